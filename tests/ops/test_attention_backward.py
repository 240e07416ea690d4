"""The gradients of kernl.ops.attention by kernels: against float64 autograd, reproducible, and only where they run."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch

import kernl.kernels.attention_backward as kernel_file
from kernl.ops.attention import attention, attention_op
from kernl.ops.attention_backward import attention_backward_op
from kernl.ops.attention_common import unpadded_keys
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun
from tests.ops.test_attention import DTYPES, LAYOUTS, LOWEST, Case, make_inputs, on, one_by_one

op_file = importlib.import_module("kernl.ops.attention_backward")


@pytest.fixture(autouse=True)
def kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the formulas are the default."""

    def first(op: str, problem: object, candidates: Callable[[], Sequence[Any]], **_: object) -> str:
        return str(candidates()[0].name)

    monkeypatch.setattr(op_file, "choose", first)


# The reference: autograd in float64 through formulas of this file's own


def visible_scores(
    query: torch.Tensor, key: torch.Tensor, options: dict[str, Any], product: Callable[..., torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [batch, heads, seqlen_q, seqlen_k], and which keys are visible. A -inf in the mask hides."""
    scale = options["scale"]
    scores = product(query, key.mT) * (1 / math.sqrt(query.shape[3]) if scale is None else scale)
    visible = torch.ones(scores.shape, dtype=torch.bool)
    mask, padding = options["attn_mask"], options["key_padding"]
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        visible = visible & (mask > -math.inf)
        scores = scores + mask.masked_fill(mask == -math.inf, 0.0).to(scores.dtype)
    if padding is not None:
        visible = visible & unpadded_keys(padding, key.shape[2])[:, None, None, :]
    if options["is_causal"]:
        visible = visible.tril()
    return scores, visible


def exact_gradients(
    inputs: list[torch.Tensor], options: dict[str, Any], grads: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in inputs]
    options = {name: part.detach().cpu() if torch.is_tensor(part) else part for name, part in options.items()}
    mask = options["attn_mask"]
    if mask is not None and mask.dtype != torch.bool:
        options["attn_mask"] = mask.double().requires_grad_()
        leaves.append(options["attn_mask"])
    query, key, value = leaves[:3]
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores, visible = visible_scores(query, key, options, torch.matmul)
    hidden = ~visible.any(-1, keepdim=True)
    scores = torch.where(hidden, 0.0, scores.masked_fill(~visible, -math.inf))
    instead = value.mean(2, keepdim=True) if options["hidden_rows"] == "mean" else torch.zeros_like(value[:, :, :1])
    output = torch.where(hidden, instead, scores.softmax(-1) @ value)
    logsumexp = scores.logsumexp(-1).masked_fill(hidden[..., 0], -math.inf)
    wanted = [(result, grad.cpu().double()) for result, grad in zip((output, logsumexp), grads) if grad is not None]
    return list(torch.autograd.grad([pair[0] for pair in wanted], leaves, [pair[1] for pair in wanted]))


# The baseline: what PyTorch's fused attention does backward, from the same saved results, in its precision


class Backward(NamedTuple):
    """Gradients of query, key, value and perhaps the mask, and the results they were computed from."""

    gradients: list[torch.Tensor]
    output: torch.Tensor
    logsumexp: torch.Tensor


def natural_exp(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    return (scores - logsumexp).exp()


def power_of_two(scores: torch.Tensor, logsumexp: torch.Tensor) -> torch.Tensor:
    return (scores * math.log2(math.e) - logsumexp * math.log2(math.e)).exp2()


def plain_gradients(
    inputs: list[torch.Tensor],
    options: dict[str, Any],
    grads: list[torch.Tensor | None],
    results: Backward,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
    exponential: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = natural_exp,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Gradients, and dS before it is summed over what the mask is broadcast over.

    P, dS and the gradients rounded to the type, sums in float32.
    """
    dtype = inputs[0].dtype
    group = inputs[0].shape[1] // inputs[1].shape[1]
    query, key, value = (tensor.cpu().float() for tensor in inputs)
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    options = {name: part.detach().cpu() if torch.is_tensor(part) else part for name, part in options.items()}
    mask = options["attn_mask"]
    grad_output, grad_logsumexp = grads
    assert grad_output is not None
    grad_output = grad_output.cpu().float()

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype).float()

    scores, visible = visible_scores(query, key, options, product)
    scores = scores.masked_fill(~visible, -math.inf)
    hidden = ~visible.any(-1, keepdim=True)
    logsumexp = results.logsumexp.cpu()[..., None].masked_fill(hidden, 0.0)
    # Where a mask leaves the logsumexp without digits for the sum, that is formed anew.
    anew = scores.masked_fill(hidden, 0.0).softmax(-1)
    weights = torch.where(logsumexp.abs() > 256, anew, exponential(scores, logsumexp))
    inner = (grad_output * results.output.cpu().float()).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        inner = inner - grad_logsumexp.cpu()[..., None]
    grad_scores = weights * (product(grad_output, value.mT) - inner.masked_fill(hidden, 0.0))
    scale = options["scale"]
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    grad_query = product(rounded(grad_scores), key) * scale
    grad_key = product(rounded(grad_scores).mT, query) * scale
    grad_value = product(rounded(weights).mT, grad_output)
    if options["hidden_rows"] == "mean":
        grad_value = grad_value + (grad_output * hidden).sum(2, keepdim=True) / key.shape[2]
    grad_key, grad_value = (tensor.unflatten(1, (-1, group)).sum(2) for tensor in (grad_key, grad_value))
    gradients = [tensor.to(dtype) for tensor in (grad_query, grad_key, grad_value)]
    if mask is not None and mask.dtype != torch.bool:
        gradients.append(grad_scores.sum_to_size(mask.shape).to(mask.dtype))
    return gradients, grad_scores


def differentiate(
    inputs: list[torch.Tensor], options: dict[str, Any], grads: list[torch.Tensor | None], kernels: KernelRun
) -> Backward:
    """By one launch of the kernels."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    mask = options["attn_mask"]
    if mask is not None and mask.dtype != torch.bool:
        options = {**options, "attn_mask": mask.detach().requires_grad_()}
        leaves.append(options["attn_mask"])
    results = attention(*leaves[:3], return_logsumexp=True, **options)
    wanted = [(result, grad) for result, grad in zip(results, grads) if grad is not None]
    before = kernels.launched("attention_backward")
    found = torch.autograd.grad([pair[0] for pair in wanted], leaves, [pair[1] for pair in wanted])
    assert kernels.launched("attention_backward") == before + 1
    return Backward(list(found), *(result.detach() for result in results))


def make_grads(
    case: Case, dtype: torch.dtype, rng: torch.Generator, device: torch.device, *, of_logsumexp: bool = False
) -> list[torch.Tensor | None]:
    rows = torch.randn(case.batch, case.seqlen_q, case.heads, case.value_dim or case.head_dim, generator=rng)
    logsumexp = torch.randn(case.batch, case.heads, case.seqlen_q, generator=rng) if of_logsumexp else None
    return [rows.to(dtype).transpose(1, 2).to(device), None if logsumexp is None else logsumexp.to(device)]


def check_gradients(
    results: Backward,
    inputs: list[torch.Tensor],
    options: dict[str, Any],
    grads: list[torch.Tensor | None],
) -> None:
    expected = exact_gradients(inputs, options, grads)
    draws = [
        plain_gradients(inputs, options, grads, results, product, exponential)
        for product, exponential in ((torch.matmul, natural_exp), (one_by_one, natural_exp), (one_by_one, power_of_two))
    ]
    for position, (name, actual) in enumerate(zip(("query", "key", "value", "mask"), results.gradients)):
        reference = expected[position]
        # The largest of three errors, as in the forward pass's tests: one order of summation says little.
        baseline = max(
            (draw[position] for draw, _ in draws), key=lambda draw: float((draw.double() - reference).abs().max())
        )
        if name != "mask" or reference.numel() >= 100:
            assert_within_budget(actual, reference, baseline, name=f"gradient of {name}")
            continue
        # A handful of sums: the most that the baseline errs by in one, were all its terms to err in one direction.
        every_score = options["attn_mask"].cpu().expand(draws[0][1].shape)
        terms = exact_gradients(inputs, {**options, "attn_mask": every_score}, grads)[3]
        allowed = 2 * max((each.double() - terms).abs().sum_to_size(reference.shape).max() for _, each in draws)
        allowed = allowed + torch.finfo(actual.dtype).eps * reference.abs()
        error = (actual.cpu().double() - reference).abs()
        assert (error <= allowed).all(), f"gradient of mask: {error} allowed {allowed}"


def check(
    case: Case, dtype: torch.dtype, rng: torch.Generator, kernels: KernelRun, *, of_logsumexp: bool = False
) -> None:
    inputs, options = on(kernels.device, *make_inputs(case, dtype, rng))
    grads = make_grads(case, dtype, rng, kernels.device, of_logsumexp=of_logsumexp)
    actual = differentiate(inputs, options, grads, kernels)
    for gradient, tensor in zip(actual.gradients, inputs):
        assert gradient.shape == tensor.shape and gradient.dtype == dtype
        assert gradient.transpose(1, 2).is_contiguous()
    check_gradients(actual, inputs, options, grads)


def pairwise(axes: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Rows that hold every pair of values of every two axes at least once; greedy, the same each time."""
    names = sorted(axes, key=lambda name: -len(axes[name]))
    cells = [(name, value) for name in names for value in axes[name]]
    todo = {frozenset(pair) for pair in itertools.combinations(cells, 2) if pair[0][0] != pair[1][0]}

    def gain(row: dict[str, Any], cell: tuple[str, Any]) -> int:
        return sum(frozenset((cell, other)) in todo for other in row.items())

    while todo:
        first = next(pair for pair in itertools.combinations(cells, 2) if frozenset(pair) in todo)
        row: dict[str, Any] = dict(first)
        for name in names:
            if name not in row:
                row[name] = max(axes[name], key=lambda value: gain(row, (name, value)))
        todo -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        yield {name: row[name] for name in axes}


AXES: dict[str, Sequence[Any]] = {
    "mask": ("", "bool:bhqk", "bool:bk", "float:bhqk", "float:bk", "float:q", "inf:hqk", "lowest:bqk"),
    "padding": ("", "holes", "left", "lengths", "hidden"),
    "lengths": ((33, 70), (70, 33), (9, 66), (300, 1)),
    "dtype": DTYPES,
    "dims": ((64, None), (40, 24), (17, 33)),
    "is_causal": (False, True),
    "key_heads": (None, 1),
    "hidden_rows": ("zero", "mean"),
    "of_logsumexp": (False, True),
}


def _id(row: dict[str, Any]) -> str:
    return "-".join(str(value).replace("torch.", "").replace(" ", "") for value in row.values())


@pytest.mark.parametrize("row", list(pairwise(AXES)), ids=_id)
def test_every_pair_of_features(row: dict[str, Any], rng: torch.Generator, kernels: KernelRun) -> None:
    row = dict(row)
    dtype, of_logsumexp = row.pop("dtype"), row.pop("of_logsumexp")
    case = Case(*row.pop("lengths"), *row.pop("dims"), **row)
    check(case, dtype, rng, kernels, of_logsumexp=of_logsumexp)


def test_the_table_has_every_pair() -> None:
    rows = list(pairwise(AXES))
    for (left, left_values), (right, right_values) in itertools.combinations(AXES.items(), 2):
        assert {(row[left], row[right]) for row in rows} == set(itertools.product(left_values, right_values))


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 66, 16, heads=4),
        Case(70, 70, 16, batch=1, heads=1, is_causal=True),
        # Padding may hide every row: then all values of a head get one gradient, and few heads would be few numbers.
        Case(70, 140, 16, batch=1, heads=8, padding="left", is_causal=True, hidden_rows="mean"),
        Case(64, 128, 16, batch=1, heads=1, is_causal=True),
        Case(130, 70, 16, batch=1, heads=3, key_heads=1, is_causal=True),
        Case(20, 33, 200, 256, batch=1),
        Case(20, 33, 16, scale=-0.3, heads=4, key_heads=2),
        Case(20, 33, scale=0.0, mask="float:hqk"),
        Case(70, 300, 16, batch=1, heads=2, mask="float:k"),
        Case(70, 100, 16, batch=2, heads=1, mask="float:", is_causal=True),
    ],
    ids=str,
)
def test_shapes(case: Case, rng: torch.Generator, kernels: KernelRun) -> None:
    check(case, torch.float32, rng, kernels)


def test_one_query_and_one_key(rng: torch.Generator, kernels: KernelRun) -> None:
    """The output is the value: two gradients are nothing but a difference of equal sums."""
    inputs, options = on(kernels.device, *make_inputs(Case(1, 1), torch.float32, rng))
    grads = make_grads(Case(1, 1), torch.float32, rng, kernels.device)
    assert grads[0] is not None
    grad_query, grad_key, grad_value = differentiate(inputs, options, grads, kernels).gradients
    torch.testing.assert_close(grad_value, grads[0], rtol=1e-6, atol=1e-6)
    for gradient in (grad_query, grad_key):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, rng: torch.Generator, kernels: KernelRun) -> None:
    """Of all operands and of the gradient that comes in."""
    case = Case(33, 70, 40, padding="right", key_heads=1)
    inputs, options = on(kernels.device, *make_inputs(case, torch.float16, rng))
    grads = make_grads(case, torch.float16, rng, kernels.device)
    assert grads[0] is not None
    strided = [LAYOUTS[layout](tensor) for tensor in inputs]
    actual = differentiate(strided, options, [LAYOUTS[layout](grads[0]), None], kernels)
    check_gradients(actual, inputs, options, grads)


@pytest.mark.parametrize("layout", ("transposed", "every second", "expanded"))
def test_mask_layouts(layout: str, rng: torch.Generator, kernels: KernelRun) -> None:
    inputs, options = on(kernels.device, *make_inputs(Case(33, 70, mask="float:bhqk"), torch.float16, rng))
    mask = options["attn_mask"]
    if layout == "transposed":
        mask = mask.mT.contiguous().mT
    elif layout == "every second":
        mask = mask.repeat_interleave(2, -1)[..., ::2]
    else:  # the gradient has the size that the mask claims to have
        mask = mask[:1, :1, :, :1].expand(mask.shape)
    grads = make_grads(Case(33, 70), torch.float16, rng, kernels.device)
    options["attn_mask"] = mask
    check_gradients(differentiate(inputs, options, grads, kernels), inputs, options, grads)


def test_masks_of_fewer_dimensions(rng: torch.Generator, kernels: KernelRun) -> None:
    inputs, options = on(kernels.device, *make_inputs(Case(33, 70), torch.float32, rng))
    options["attn_mask"] = torch.randn(33, 70, generator=rng).to(kernels.device)
    grads = make_grads(Case(33, 70), torch.float32, rng, kernels.device)
    actual = differentiate(inputs, options, grads, kernels)
    assert actual.gradients[3].shape == (33, 70)
    check_gradients(actual, inputs, options, grads)


def test_gradient_of_a_sum_has_stride_zero(rng: torch.Generator, kernels: KernelRun) -> None:
    inputs, options = on(kernels.device, *make_inputs(Case(33, 70), torch.float32, rng))
    ones = torch.ones((), device=kernels.device).expand(2, 2, 33, 64)
    actual = differentiate(inputs, options, [ones, None], kernels)
    check_gradients(actual, inputs, options, [ones, None])


def test_stride_zero_operands(rng: torch.Generator, kernels: KernelRun) -> None:
    inputs, options = on(kernels.device, *make_inputs(Case(66, 70, 16, batch=1, heads=1), torch.float32, rng))
    inputs = [tensor.expand(3, 2, -1, -1) for tensor in inputs]
    grads = make_grads(Case(66, 70, 16, batch=3), torch.float32, rng, kernels.device)
    check_gradients(differentiate(inputs, options, grads, kernels), inputs, options, grads)


def test_offsets_of_64_bits(rng: torch.Generator, kernels: KernelRun) -> None:
    """Rows so far apart that a tile of them does not fit 32 bits."""
    inputs, options = on(kernels.device, *make_inputs(Case(3, 3, 16, batch=1, heads=1), torch.float16, rng))
    grads = make_grads(Case(3, 3, 16, batch=1, heads=1), torch.float16, rng, kernels.device)
    expected = differentiate(inputs, options, grads, kernels)
    for position in range(4):
        far = [*inputs, grads[0]]
        wide = torch.empty(2 * 2**23 + 16, dtype=torch.float16, device=kernels.device)
        far[position] = wide.as_strided((1, 1, 3, 16), (0, 0, 2**23, 1)).copy_(far[position])
        actual = differentiate(far[:3], options, [far[3], None], kernels)
        for one, other in zip(actual.gradients, expected.gradients):
            assert torch.equal(one, other)


def test_logsumexp_alone(rng: torch.Generator, kernels: KernelRun) -> None:
    case = Case(33, 70, mask="float:hqk", is_causal=True)
    inputs, options = on(kernels.device, *make_inputs(case, torch.float32, rng))
    grads = [None, make_grads(case, torch.float32, rng, kernels.device, of_logsumexp=True)[1]]
    actual = differentiate(inputs, options, grads, kernels)
    assert (actual.gradients[2] == 0).all()
    zeros = torch.zeros(2, 2, 33, 64)
    check_gradients(actual, inputs, options, [zeros, grads[1]])


@pytest.mark.parametrize("hidden_rows", ("zero", "mean"))
@pytest.mark.parametrize("mask", ("bool", "-inf", "padding"))
def test_queries_that_see_nothing(mask: str, hidden_rows: str, rng: torch.Generator, kernels: KernelRun) -> None:
    """No gradient for query and key; the values get equal parts of what comes in, or nothing."""
    case = Case(20, 70, heads=2, key_heads=1, hidden_rows=hidden_rows)
    inputs, options = on(kernels.device, *make_inputs(case, torch.float32, rng))
    if mask == "padding":
        options["key_padding"] = torch.zeros(2, 70, dtype=torch.bool, device=kernels.device)
    elif mask == "bool":
        options["attn_mask"] = torch.zeros(1, 2, 20, 70, dtype=torch.bool, device=kernels.device)
    else:
        options["attn_mask"] = torch.full((20, 70), -math.inf, device=kernels.device)
    grads = make_grads(case, torch.float32, rng, kernels.device, of_logsumexp=True)
    assert grads[0] is not None and grads[1] is not None
    grads[1].fill_(math.inf)  # of a constant
    grad_query, grad_key, grad_value, *grad_mask = differentiate(inputs, options, grads, kernels).gradients
    for gradient in (grad_query, grad_key, *grad_mask):
        assert (gradient == 0).all()
    part = grads[0].double().unflatten(1, (1, 2)).sum((2, 3)) / 70  # [batch, key_heads, head_dim]
    expected = part if hidden_rows == "mean" else torch.zeros_like(part)
    torch.testing.assert_close(grad_value.double(), expected[:, :, None].expand(2, 1, 70, 64))


@pytest.mark.parametrize("lowest", (LOWEST, -1e9, -65504.0))
def test_rows_pushed_down_by_a_mask(lowest: float, rng: torch.Generator, kernels: KernelRun) -> None:
    """The logsumexp of such a row has no digits left for the number of keys; the weights must add up to 1 still."""
    inputs, options = on(kernels.device, *make_inputs(Case(5, 70, 16), torch.float32, rng))
    inputs[0].zero_()  # all keys of a row weigh the same
    options["attn_mask"] = torch.full((5, 1), lowest, device=kernels.device)
    options["attn_mask"][2] = 0.0
    grads = make_grads(Case(5, 70, 16), torch.float32, rng, kernels.device)
    assert grads[0] is not None
    grad_value = differentiate(inputs, options, grads, kernels).gradients[2]
    expected = (grads[0].double().sum(2, keepdim=True) / 70).expand(grad_value.shape)
    torch.testing.assert_close(grad_value.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding", ("right", "holes", "lengths"))
@pytest.mark.parametrize("mask", ("", "float:hqk"))
def test_padded_keys_have_no_influence(mask: str, padding: str, rng: torch.Generator, kernels: KernelRun) -> None:
    case = Case(20, 100, 16, padding=padding, mask=mask, heads=1)
    inputs, options = on(kernels.device, *make_inputs(case, torch.float32, rng))
    query, key, value = inputs
    grads = make_grads(case, torch.float32, rng, kernels.device)
    bad = ~unpadded_keys(options["key_padding"], 100)[:, None, :, None]
    clean = differentiate(inputs, options, grads, kernels).gradients
    operands = [query, key.masked_fill(bad, math.nan), value.masked_fill(bad, math.inf)]
    for one, other in zip(clean, differentiate(operands, options, grads, kernels).gradients):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    for gradient in clean[1:3]:
        assert (gradient.masked_select(bad) == 0).all()


def test_a_bool_mask_of_keys_is_a_padding(rng: torch.Generator, kernels: KernelRun) -> None:
    """NaN where all queries are told not to look stays there."""
    inputs, options = on(kernels.device, *make_inputs(Case(20, 70), torch.float32, rng))
    options["attn_mask"] = torch.arange(70, device=kernels.device).expand(2, 1, 1, 70) < 50
    inputs[1][:, :, 50:] = math.nan
    inputs[2][:, :, 50:] = math.nan
    grads = make_grads(Case(20, 70), torch.float32, rng, kernels.device)
    for gradient in differentiate(inputs, options, grads, kernels).gradients:
        assert gradient.isfinite().all()


def test_same_bits_each_time(rng: torch.Generator, kernels: KernelRun) -> None:
    case = Case(70, 90, 16, batch=1, heads=2, key_heads=1, mask="float:qk", padding="holes", is_causal=True)
    inputs, options = on(kernels.device, *make_inputs(case, torch.float16, rng))
    grads = make_grads(case, torch.float16, rng, kernels.device, of_logsumexp=True)
    first, second = (differentiate(inputs, options, grads, kernels).gradients for _ in range(2))
    for one, other in zip(first, second):
        assert torch.equal(one, other)


def tilings() -> list[kernel_file.BackwardConfiguration]:
    """Every pair of tile shapes offered for 16-bit types on Ampere and Hopper."""
    found = {}
    for arch, dim, has_mask in itertools.product((80, 90), (64, 128, 256), (False, True)):
        for tiling in kernel_file.backward_configurations(
            arch, torch.float16, dim, dim, input_precision="ieee", has_mask=has_mask
        ):
            shape = [(part.block_m, part.block_n) for part in (tiling.query, tiling.key)]
            found[(*shape, has_mask)] = tiling
    return list(found.values())


@pytest.mark.parametrize("tiling", list(tilings()), ids=lambda tiling: tiling.name)
def test_tilings(
    tiling: kernel_file.BackwardConfiguration,
    rng: torch.Generator,
    kernels: KernelRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every tiling offered, whatever the interpreter would choose by itself."""
    monkeypatch.setattr(op_file, "backward_configurations", lambda *_, **__: (tiling,))
    mask = "" if tiling.mask is None else "float:hqk"
    case = Case(40, 70, 40, batch=1, heads=1, padding="both", is_causal=True, hidden_rows="mean", mask=mask)
    check(case, torch.float16, rng, kernels)


# Where the kernels run


def test_what_the_kernels_do_not_take_runs_the_formulas(rng: torch.Generator, kernels: KernelRun) -> None:
    for case, dtype in ((Case(3, 5, 300, batch=1), torch.float32), (Case(3, 5), torch.float64)):
        inputs, options = on(kernels.device, *make_inputs(case, dtype, rng))
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        grads = make_grads(case, dtype, rng, kernels.device)
        actual = torch.autograd.grad(attention(*leaves, **options), leaves, grads[0])
        for one, other in zip(actual, exact_gradients(inputs, options, grads)):
            torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-4)
    assert kernels.launched("attention_backward") == 0


def test_formulas_are_a_candidate_and_nothing_is_measured_unasked(
    rng: torch.Generator, kernels: KernelRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def choose(op: str, problem: object, candidates: Callable[[], Sequence[Any]], **options: Any) -> str:
        asked.update(options, op=op, problem=problem, names=[candidate.name for candidate in candidates()])
        return "pytorch"

    monkeypatch.setattr(op_file, "choose", choose)
    inputs, options = on(kernels.device, *make_inputs(Case(9, 20), torch.float32, rng))
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    grads = make_grads(Case(9, 20), torch.float32, rng, kernels.device)
    output, logsumexp = attention(*leaves, return_logsumexp=True, **options)
    gradients = list(torch.autograd.grad(output, leaves, grads[0]))
    check_gradients(Backward(gradients, output.detach(), logsumexp.detach()), inputs, options, grads)
    assert kernels.launched("attention_backward") == 0
    assert asked["op"] == "attention_backward" and asked["trusted"]
    assert "pytorch" in asked["names"] and len(asked["names"]) > 1
    hash(asked["problem"])
    assert (asked["default"] == "pytorch") == inputs[0].is_cuda


def test_no_tokens() -> None:
    query = torch.randn(2, 2, 5, 16, requires_grad=True)
    nothing = torch.randn(2, 2, 0, 16, requires_grad=True)
    for operands in ((query, nothing, nothing), (nothing, query, query)):
        for gradient in torch.autograd.grad(attention(*operands).sum(), operands, allow_unused=True):
            assert (gradient == 0).all()


# Manners of the op


@pytest.mark.parametrize("hidden_rows", ("zero", "mean"))
def test_gradcheck(hidden_rows: str, rng: torch.Generator) -> None:
    """The formulas in float64 against differences of the op's own results."""
    query, key, value = (torch.randn(1, heads, 3, 2, dtype=torch.float64, generator=rng) for heads in (2, 1, 1))
    mask = torch.randn(2, 3, 3, dtype=torch.float64, generator=rng)
    padding = torch.tensor([[False, True, True]])

    def run(*leaves: torch.Tensor) -> torch.Tensor:
        return attention(*leaves[:3], attn_mask=leaves[3], key_padding=padding, is_causal=True, hidden_rows=hidden_rows)  # type: ignore[return-value]

    leaves = [tensor.requires_grad_() for tensor in (query, key, value, mask)]
    assert torch.autograd.gradcheck(run, leaves)


def test_differences_of_the_kernels(rng: torch.Generator, kernels: KernelRun) -> None:
    """As gradcheck, in float32: the derivative along one direction against a difference of the forward kernel."""
    case = Case(5, 9, 16, mask="float:hqk", is_causal=True)
    inputs, options = on(kernels.device, *make_inputs(case, torch.float32, rng))
    grads = make_grads(case, torch.float32, rng, kernels.device)
    gradients = differentiate(inputs, options, grads, kernels).gradients
    operands = [*inputs, options.pop("attn_mask")]
    steps = [torch.randn(tensor.shape, generator=rng).to(kernels.device) for tensor in operands]

    def along(size: float) -> float:
        moved = [tensor + size * step for tensor, step in zip(operands, steps)]
        output = attention(*moved[:3], attn_mask=moved[3], **options)
        return float((output.double() * grads[0]).sum())

    slope = sum(float((gradient.double() * step).sum()) for gradient, step in zip(gradients, steps))
    assert (along(1e-2) - along(-1e-2)) / 2e-2 == pytest.approx(slope, rel=1e-2, abs=1e-2)


def test_opcheck() -> None:
    padding = torch.arange(9).expand(2, 9) < 7
    bias = torch.randn(4, 9, 9, requires_grad=True)
    query, key, value = (torch.randn(2, heads, 9, 16, requires_grad=True) for heads in (4, 2, 2))
    for mask, is_causal, grad_logsumexp in ((None, True, None), (bias, False, torch.randn(2, 4, 9))):
        arguments = (query, key, value, mask, padding, 0.25, is_causal, "mean")
        torch.library.opcheck(attention_op, arguments)
        output, logsumexp = (tensor.detach() for tensor in attention_op(*arguments))
        operands = [tensor if tensor is None else tensor.detach() for tensor in arguments[:5]]
        results = (output, logsumexp, mask is not None, False)
        scoring = (*operands[3:], *arguments[5:])
        torch.library.opcheck(
            attention_backward_op, (torch.randn(output.shape), grad_logsumexp, *operands[:3], *results, *scoring)
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("features", ("plain", "causal", "bias"))
def test_second_derivatives(rng: torch.Generator, features: str) -> None:
    leaves = [torch.randn(1, 2, 5, 4, generator=rng, dtype=torch.float64) for _ in range(3)]
    if features == "bias":
        leaves.append(torch.randn(1, 2, 5, 5, generator=rng, dtype=torch.float64))
    leaves = [tensor.requires_grad_() for tensor in leaves]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        bias = tensors[3] if len(tensors) > 3 else None
        return attention(*tensors[:3], attn_mask=bias, is_causal=features == "causal")

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)
