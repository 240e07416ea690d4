"""kernl.ops.attention: the kernel (interpreted without a GPU), the reference, gradients, and the op's manners."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernl.kernels.attention as kernel_file
from kernl.kernels.attention_problem import Configuration
from kernl.ops.attention import attention, attention_op, reference_attention
from kernl.ops.common import force_reference
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun

# Attribute access on the package would give the function of that name.
op_file = importlib.import_module("kernl.ops.attention")
backward_file = importlib.import_module("kernl.ops.attention_backward")

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LOWEST = torch.finfo(torch.float32).min


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one problem, and the masks it comes with."""

    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    value_dim: int | None = None
    batch: int = 2
    heads: int = 2
    key_heads: int | None = None
    mask: str = ""
    padding: str = ""
    is_causal: bool = False
    hidden_rows: str = "zero"
    scale: float | None = None

    def __str__(self) -> str:
        parts = [f"{self.batch}x{self.heads}x{self.seqlen_q}x{self.seqlen_k}x{self.head_dim}"]
        parts += [f"v{self.value_dim}"] if self.value_dim else []
        parts += [f"kv{self.key_heads}"] if self.key_heads else []
        parts += [part for part in (self.mask, self.padding, self.is_causal and "causal") if part]
        parts += ["mean"] if self.hidden_rows == "mean" else []
        return "-".join(parts)


def make_mask(case: Case, dtype: torch.dtype, rng: torch.Generator) -> torch.Tensor | None:
    """The attn_mask a case asks for: "bool" or "float", then which dimensions it has (b, h, q, k; others are 1)."""
    if not case.mask:
        return None
    kind, _, dims = case.mask.partition(":")
    full = {"b": case.batch, "h": case.heads, "q": case.seqlen_q, "k": case.seqlen_k}
    shape = [full[dim] if dim in dims else 1 for dim in "bhqk"]
    if kind == "bool":
        mask = torch.rand(shape, generator=rng) > 0.4
        mask[0, 0, shape[2] // 2] = False  # a row, or all of a batch, that sees nothing
        return mask
    if kind == "lowest":  # the arithmetic of Hugging Face's eager masks, with rows where every key gets finfo.min
        mask = torch.rand(shape, generator=rng) > 0.4
        mask[0, 0, shape[2] // 2] = False
        return torch.where(mask, 0.0, LOWEST)
    if kind == "inf":
        return torch.where(torch.rand(shape, generator=rng) > 0.6, 0.5, -math.inf).to(dtype)
    return torch.randn(shape, generator=rng).to(dtype)


def make_padding(case: Case, rng: torch.Generator) -> torch.Tensor | None:
    keys = torch.arange(case.seqlen_k)
    lengths = torch.randint(1, case.seqlen_k + 1, (case.batch, 1), generator=rng)
    match case.padding:
        case "":
            return None
        case "right":
            return keys < lengths
        case "left":
            return keys >= case.seqlen_k - lengths
        case "both":
            return (keys < lengths) & (keys >= lengths // 3)
        case "holes":
            return torch.rand(case.batch, case.seqlen_k, generator=rng) > 0.3
        case "hidden":
            return torch.zeros(case.batch, case.seqlen_k, dtype=torch.bool).index_fill_(0, torch.tensor(0), True)
        case "lengths":
            lengths[0] = 0
            return lengths[:, 0].to(torch.int32)
    raise AssertionError(case.padding)


def make_inputs(case: Case, dtype: torch.dtype, rng: torch.Generator) -> tuple[list[torch.Tensor], dict[str, Any]]:
    key_heads = case.key_heads or case.heads
    query = torch.randn(case.batch, case.seqlen_q, case.heads, case.head_dim, generator=rng).to(dtype)
    key = torch.randn(case.batch, case.seqlen_k, key_heads, case.head_dim, generator=rng).to(dtype)
    value = torch.randn(case.batch, case.seqlen_k, key_heads, case.value_dim or case.head_dim, generator=rng).to(dtype)
    options: dict[str, Any] = {"is_causal": case.is_causal, "hidden_rows": case.hidden_rows, "scale": case.scale}
    options |= {"attn_mask": make_mask(case, dtype, rng), "key_padding": make_padding(case, rng)}
    return [tensor.transpose(1, 2) for tensor in (query, key, value)], options


def on(device: torch.device, inputs: list[torch.Tensor], options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    moved = {name: part.to(device) if torch.is_tensor(part) else part for name, part in options.items()}
    return [tensor.to(device) for tensor in inputs], moved


def exact(inputs: list[torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 on the CPU."""
    wide = {
        name: part.double() if torch.is_tensor(part) and part.is_floating_point() else part
        for name, part in options.items()
    }
    output, logsumexp = reference_attention(*(tensor.double() for tensor in inputs), **wide)
    return output, logsumexp


def one_by_one(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right with one accumulator for each element, as a GPU's float32 units add them up."""
    total = left.new_zeros(*left.shape[:-1], right.shape[-1])
    for position in range(left.shape[-1]):
        total = total + left[..., :, position, None] * right[..., position, None, :]
    return total


def plain(
    inputs: list[torch.Tensor],
    options: dict[str, Any],
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """The baseline of the budget: operands, probabilities and result rounded to the type, sums in float32."""
    query, key, value = inputs
    exact_output, _ = exact(inputs, options)
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scale = options.get("scale")
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    scores = product(query.float(), key.float().mT) * scale
    mask, padding = options.get("attn_mask"), options.get("key_padding")
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    if padding is not None:
        if padding.dtype != torch.bool:
            padding = torch.arange(key.shape[2]) < padding[:, None]
        scores = scores.masked_fill(~padding[:, None, None], -math.inf)
        if options["hidden_rows"] == "zero":
            value = value.masked_fill(~padding[:, None, :, None], 0)
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    fill = 1 / max(1, scores.shape[-1]) if options["hidden_rows"] == "mean" else 0.0
    weights = scores.softmax(-1).masked_fill(hidden, fill).to(query.dtype)
    rounded = product(weights.float(), value.float()).to(query.dtype)
    assert (rounded.double() - exact_output).abs().max() < 0.1, "the baseline computes something else"
    return rounded


def in_another_order(
    inputs: list[torch.Tensor], options: dict[str, Any], rng: torch.Generator
) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """The same problem with its sums in another order: over head_dim, and over the keys where no position counts."""
    query, key, value = inputs
    dims = torch.randperm(query.shape[3], generator=rng)
    query, key = query[..., dims], key[..., dims]
    mask, padding = options["attn_mask"], options["key_padding"]
    if options["is_causal"] or (padding is not None and padding.dtype != torch.bool):
        return [query, key, value], options
    keys = torch.randperm(key.shape[2], generator=rng)
    if mask is not None and mask.shape[3] != 1:
        mask = mask[..., keys]
    if padding is not None:
        padding = padding[:, keys]
    return [query, key[:, :, keys], value[:, :, keys]], {**options, "attn_mask": mask, "key_padding": padding}


def worst_baseline(
    inputs: list[torch.Tensor], options: dict[str, Any], expected: torch.Tensor, seed: int
) -> torch.Tensor:
    """`plain` with its sums in whichever of several orders errs most.

    One order says little about how precise float32 sums are: those of a few rows may happen to round well, and a CPU's
    matrix product splits a sum over many accumulators, which halves its error against the one that a kernel has. The
    rule stays that of kernl.testing; it is given a baseline that stands for more draws. A whole tensor is chosen, not
    the worst of each element, so that the norm of the difference is held to one computation that PyTorch could do.
    """
    rng = torch.Generator().manual_seed(seed)
    draws = [plain(inputs, options), *(plain(*in_another_order(inputs, options, rng), one_by_one) for _ in range(3))]
    return max(draws, key=lambda draw: float((draw.double() - expected).abs().nan_to_num(0, 0, 0).max()))


def check(case: Case, dtype: torch.dtype, rng: torch.Generator, kernels: KernelRun, *, launches: int = 1) -> None:
    inputs, options = make_inputs(case, dtype, rng)
    there, options_there = on(kernels.device, inputs, options)
    before = kernels.launched("attention_forward")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KERNL_TUNING", "off")
        output, logsumexp = attention(*there, return_logsumexp=True, **options_there)
    assert kernels.launched("attention_forward") == before + launches
    expected, expected_logsumexp = exact(inputs, options)
    baseline = worst_baseline(inputs, options, expected, rng.initial_seed())
    assert output.transpose(1, 2).is_contiguous()
    assert_within_budget(output, expected, baseline, name=f"output of {case}")
    assert logsumexp.dtype == torch.float32 and logsumexp.is_contiguous()
    # Few values, each a sum of exact products in float32: a fixed bound is tighter than twice a baseline's luck.
    torch.testing.assert_close(logsumexp.cpu().double(), expected_logsumexp, rtol=1e-5, atol=1e-5)


# Problems of few rows come in numbers, for the same reason.
SHAPES = [
    Case(1, 1, batch=4, heads=8),
    Case(1, 65, 16, batch=16, heads=1),
    Case(5, 5, 80),
    Case(16, 16, 40),
    Case(63, 64),
    Case(64, 63, 16),
    Case(65, 130),
    Case(130, 65, 96, batch=1),
    Case(37, 64, 1, batch=4, heads=8),
    Case(7, 20, 17, 33),
    Case(16, 70, 64, 40, key_heads=1),
    Case(20, 66, 40, heads=4, key_heads=2),
    Case(6, 10, 200, 256, heads=3),
    Case(9, 12, scale=-0.3),
    Case(9, 12, scale=0.0, is_causal=True),
]
MASKS = [
    Case(65, 65, is_causal=True),
    Case(70, 130, 40, is_causal=True, batch=1),
    Case(130, 70, is_causal=True, batch=1),
    Case(33, 70, mask="bool:bhqk"),
    Case(33, 70, mask="bool:q"),
    Case(33, 70, mask="bool:bk", is_causal=True),
    Case(33, 70, mask="bool:hq", hidden_rows="mean"),
    Case(33, 200, mask="bool:k", hidden_rows="mean", is_causal=True),
    Case(33, 70, mask="bool:b"),
    Case(33, 128, mask="float:bhqk"),
    Case(33, 70, mask="float:hqk", key_heads=1),
    Case(33, 70, mask="float:bk", is_causal=True),
    Case(33, 70, mask="float:q", padding="right"),
    Case(17, 30, mask="lowest:bqk"),
    Case(70, 9, mask="inf:hqk"),
    Case(70, 9, mask="inf:hqk", hidden_rows="mean", padding="holes"),
    Case(33, 130, padding="right"),
    Case(33, 200, padding="left"),
    Case(33, 200, padding="both", hidden_rows="mean"),
    Case(33, 200, padding="holes"),
    Case(70, 200, padding="holes", is_causal=True, hidden_rows="mean"),
    Case(70, 70, padding="left", is_causal=True),
    Case(70, 70, padding="left", is_causal=True, hidden_rows="mean"),
    Case(33, 70, padding="hidden"),
    Case(33, 200, padding="hidden", hidden_rows="mean", key_heads=1),
    Case(33, 200, padding="lengths"),
    Case(33, 100, padding="lengths", is_causal=True, hidden_rows="mean"),
    Case(33, 100, mask="bool:hqk", padding="left", hidden_rows="mean", is_causal=True),
    Case(5, 1030, 16, batch=2, heads=1, padding="both"),
]


# Each case in one type, in turn; what is most of the arithmetic in all three.
IN_ALL_TYPES = [Case(65, 130), Case(20, 66, 40, heads=4, key_heads=2), Case(33, 70, mask="bool:bk", is_causal=True)]
KERNEL_CASES = [*zip(SHAPES + MASKS, itertools.cycle(DTYPES)), *itertools.product(IN_ALL_TYPES, DTYPES)]


@pytest.mark.parametrize(("case", "dtype"), KERNEL_CASES, ids=str)
def test_kernel(case: Case, dtype: torch.dtype, rng: torch.Generator, kernels: KernelRun) -> None:
    check(case, dtype, rng, kernels)


@pytest.mark.parametrize("case", SHAPES + MASKS, ids=str)
def test_plain_path(case: Case, rng: torch.Generator) -> None:
    """What runs on a CPU: PyTorch's fused attention where it means the same, against the formulas."""
    inputs, options = make_inputs(case, torch.float32, rng)
    with force_reference():
        output, logsumexp = attention(*inputs, return_logsumexp=True, **options)
    expected, expected_logsumexp = exact(inputs, options)
    assert output.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "contiguous": lambda tensor: tensor.contiguous(),
    "dim before tokens": lambda tensor: tensor.mT.contiguous().mT,
    "sliced": lambda tensor: F.pad(tensor, (3, 2, 1, 4))[:, :, 1:-4, 3:-2],
    "every second": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
    "part of a merged projection": lambda tensor: (
        torch.cat([tensor, tensor, tensor], 1)
        .permute(0, 2, 1, 3)
        .contiguous()
        .permute(0, 2, 1, 3)[:, -tensor.shape[1] :]
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", (40, 64))
def test_layouts(layout: str, head_dim: int, rng: torch.Generator, kernels: KernelRun) -> None:
    inputs, options = make_inputs(Case(33, 70, head_dim, padding="right"), torch.float16, rng)
    expected, baseline = exact(inputs, options)[0], plain(inputs, options)
    there, options = on(kernels.device, inputs, options)
    output = attention(*(LAYOUTS[layout](tensor) for tensor in there), **options)
    assert kernels.launched("attention_forward") >= 1
    assert_within_budget(output, expected, baseline, name=layout)


@pytest.mark.parametrize("kind", ("bool", "float"))
@pytest.mark.parametrize("layout", ("transposed", "sliced", "every second"))
def test_mask_layouts(layout: str, kind: str, rng: torch.Generator, kernels: KernelRun) -> None:
    inputs, options = make_inputs(Case(33, 70, mask=f"{kind}:bhqk"), torch.float16, rng)
    expected, baseline = exact(inputs, options)[0], plain(inputs, options)
    there, options = on(kernels.device, inputs, options)
    mask = options.pop("attn_mask")
    if layout == "transposed":
        mask = mask.mT.contiguous().mT
    elif layout == "sliced":
        mask = F.pad(mask, (3, 2, 1, 4))[..., 1:-4, 3:-2]
    else:
        mask = mask.repeat_interleave(2, -1)[..., ::2]
    assert_within_budget(attention(*there, attn_mask=mask, **options), expected, baseline, name=layout)


def test_stride_zero_operands(rng: torch.Generator, kernels: KernelRun) -> None:
    inputs, options = make_inputs(Case(20, 70, batch=1, heads=1), torch.float16, rng)
    expected, baseline = exact(inputs, options)[0], plain(inputs, options)
    there, options = on(kernels.device, inputs, options)
    output = attention(*(tensor.expand(3, 2, -1, -1) for tensor in there), **options)
    assert_within_budget(output, expected.expand(3, 2, -1, -1), baseline.expand(3, 2, -1, -1))


@pytest.mark.parametrize("hidden_rows", ("zero", "mean"))
@pytest.mark.parametrize("padding", ("right", "left", "holes", "lengths"))
@pytest.mark.parametrize("path", ("kernel", "plain"))
def test_padded_keys_have_no_influence(
    path: str, padding: str, hidden_rows: str, rng: torch.Generator, kernels: KernelRun
) -> None:
    case = Case(20, 200, padding=padding, hidden_rows=hidden_rows)
    inputs, options = make_inputs(case, torch.float32, rng)
    there, options = on(kernels.device, inputs, options)
    query, key, value = there
    visible = options["key_padding"]
    if visible.dtype != torch.bool:
        visible[0] = 3  # nothing hidden but padding: the mean would read the values
        visible = torch.arange(200, device=visible.device) < visible[:, None]
    bad = ~visible[:, None, :, None]

    def run(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if path == "kernel":
            return attention(query, key, value, return_logsumexp=True, **options)
        with force_reference():
            return attention(query, key, value, return_logsumexp=True, **options)

    clean = run(key, value)
    for poison in (math.nan, math.inf):
        dirty = run(key.masked_fill(bad, poison), value.masked_fill(bad, poison))
        for one, other in zip(clean, dirty):
            torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_nan_in_visible_operands_comes_out(rng: torch.Generator, kernels: KernelRun) -> None:
    (query, key, value), _ = make_inputs(Case(5, 70), torch.float32, rng)
    query, key, value = (tensor.to(kernels.device) for tensor in (query, key, value))
    query[0, 0, 2, 3] = math.nan
    output, logsumexp = attention(query, key, value, return_logsumexp=True)
    assert output[0, 0, 2].isnan().all() and logsumexp[0, 0, 2].isnan()
    assert output.isnan().sum() == output.shape[3] and logsumexp.isnan().sum() == 1


def test_hidden_rows_are_what_eager_arithmetic_gives(rng: torch.Generator, kernels: KernelRun) -> None:
    """scores + finfo.min in float32, as Hugging Face's eager attention does it: causal, and rows that see nothing."""
    case = Case(20, 20, padding="left", is_causal=True)
    (query, key, value), options = make_inputs(case, torch.float32, rng)
    padding = options["key_padding"]
    padding[0] = torch.arange(20) >= 7
    visible = padding[:, None, None, :] & torch.ones(20, 20, dtype=torch.bool).tril()
    scores = query @ key.mT / 8 + torch.where(visible, 0.0, LOWEST)
    expected = scores.softmax(-1) @ value
    output = attention(
        *(tensor.to(kernels.device) for tensor in (query, key, value)),
        key_padding=padding.to(kernels.device),
        is_causal=True,
        hidden_rows="mean",
    )
    torch.testing.assert_close(output.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_large_scores(rng: torch.Generator, kernels: KernelRun) -> None:
    (query, key, value), _ = make_inputs(Case(100, 70), torch.float32, rng)
    # Scores near 1e5 have only a few rows in which a second key counts; with each key's neighbour beside it, all have.
    key[:, :, 35:] = key[:, :, :35] + 1e-4 * torch.randn(key[:, :, :35].shape, generator=rng)
    # The baseline on the same device: such scores show in which order a device adds up.
    inputs = [tensor.to(kernels.device) for tensor in (100 * query, 100 * key, value)]
    options = {"hidden_rows": "zero"}
    assert_within_budget(attention(*inputs), exact(inputs, options)[0], plain(inputs, options))


# Every tiling offered, whatever the interpreter would choose by itself.


def tilings() -> list[Configuration]:
    found = {}
    for arch in (80, 90):
        for dim in (64, 128, 256):
            for tiling in kernel_file.configurations(arch, torch.float16, dim, dim, input_precision="ieee"):
                shape = (tiling.block_m, tiling.block_n, tiling.uses_tma)
                found[shape] = tiling
    return list(found.values())


@pytest.mark.parametrize(
    ("tiling", "padding"),
    list(zip(tilings(), itertools.cycle(("both", "holes", "")))),
    ids=lambda part: getattr(part, "name", part),
)
def test_tilings(
    tiling: Configuration,
    padding: str,
    rng: torch.Generator,
    kernels: KernelRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op_file, "configurations", lambda *_, **__: (tiling,))
    check(
        Case(70, 140, 40, batch=2, heads=1, padding=padding, is_causal=True, hidden_rows="mean"),
        torch.float16,
        rng,
        kernels,
    )


def test_default_tiling_fills_the_gpu() -> None:
    offered = kernel_file.configurations(90, torch.float16, 64, 64, input_precision="ieee")

    def block(batch_heads: int, seqlen_q: int) -> int:
        return kernel_file.default_configuration(offered, 132, batch_heads, seqlen_q).block_m

    assert block(384, 512) == 64
    assert block(12, 128) == 64
    assert block(12, 384) == 64
    assert block(12, 16) == 16
    assert block(1, 1) == 16
    assert block(10_000, 16) == 16 or block(10_000, 16) == 32


# Gradients


def _plain_gradients(inputs: list[torch.Tensor], options: dict[str, Any], grads: list[torch.Tensor]) -> list[Any]:
    leaves = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = options["attn_mask"]
    wide = dict(options)
    if mask is not None and mask.dtype != torch.bool:
        wide["attn_mask"] = mask.detach().double().requires_grad_()
        leaves.append(wide["attn_mask"])
    outputs = reference_attention(*leaves[:3], **wide)
    used = [(output, grad) for output, grad in zip(outputs, grads) if output.requires_grad]
    total = sum(
        (torch.where(output.isfinite() & (output > LOWEST / 2), output, 0.0) * grad.double()).sum()
        for output, grad in used
    )
    assert isinstance(total, torch.Tensor)
    return list(torch.autograd.grad(total, leaves))


GRADIENT_CASES = [
    Case(33, 70),
    Case(20, 30, 40, 24, heads=4, key_heads=2, is_causal=True),
    Case(20, 30, mask="float:hqk"),
    Case(20, 30, mask="float:bk", key_heads=1),
    Case(20, 30, mask="float:q"),
    Case(20, 30, mask="bool:bhqk"),
    Case(20, 30, mask="bool:bhqk", hidden_rows="mean"),
    Case(20, 30, padding="holes", is_causal=True, hidden_rows="mean", heads=4, key_heads=2),
    Case(20, 30, padding="hidden", hidden_rows="mean"),
    Case(20, 30, padding="lengths"),
]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=str)
@pytest.mark.parametrize("chunked", (False, True), ids=("whole", "chunked"))
def test_gradients(case: Case, chunked: bool, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    if chunked:
        monkeypatch.setattr(backward_file, "_BACKWARD_SCORES", case.batch * case.heads * case.seqlen_k * 7)
    inputs, options = make_inputs(case, torch.float32, rng)
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    if case.mask.startswith("float"):
        options["attn_mask"].requires_grad_()
        leaves.append(options["attn_mask"])
    output, logsumexp = attention(*leaves[:3], return_logsumexp=True, **options)
    grads = [torch.randn(output.shape, generator=rng), torch.randn(logsumexp.shape, generator=rng)]
    actual = torch.autograd.grad([output, logsumexp], leaves, grads)
    expected = _plain_gradients(inputs, options, grads)
    for one, other in zip(actual, expected):
        assert one.shape == other.shape
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_gradients_match_eager_mean_arithmetic(rng: torch.Generator) -> None:
    """Left padding and causality: the first queries see nothing, and their gradient reaches every value."""
    (query, key, value), _ = make_inputs(Case(20, 20), torch.float64, rng)
    padding = torch.arange(20).expand(2, 20) >= 7
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, value)]
    visible = padding[:, None, None, :] & torch.ones(20, 20, dtype=torch.bool).tril()
    scores = leaves[0] @ leaves[1].mT / 8
    expected = (
        torch.where(visible.any(-1, keepdim=True), scores.masked_fill(~visible, -1e30), 0 * scores).softmax(-1)
        @ leaves[2]
    )
    actual = attention(*leaves, key_padding=padding, is_causal=True, hidden_rows="mean")
    torch.testing.assert_close(actual, expected)
    grad = torch.randn(expected.shape, dtype=torch.float64, generator=rng)
    for one, other in zip(torch.autograd.grad(actual, leaves, grad), torch.autograd.grad(expected, leaves, grad)):
        torch.testing.assert_close(one, other)


def test_gradient_after_the_kernel(rng: torch.Generator, kernels: KernelRun) -> None:
    case = Case(33, 70, padding="right")
    inputs, options = make_inputs(case, torch.float16, rng)
    there, options_there = on(kernels.device, inputs, options)
    leaves = [tensor.detach().requires_grad_() for tensor in there]
    output = attention(*leaves, **options_there)
    grad = torch.randn(output.shape, generator=rng).half()
    actual = torch.autograd.grad(output, leaves, grad.to(kernels.device))
    zero = torch.zeros(output.shape[:3])
    for one, other in zip(actual, _plain_gradients(inputs, options, [grad, zero])):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-2, atol=1e-2)


# Manners of the op


def _sample(dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> list[torch.Tensor]:
    return [torch.randn(2, heads, 9, 16, dtype=dtype, requires_grad=requires_grad) for heads in (4, 2, 2)]


def test_opcheck() -> None:
    padding = torch.arange(9).expand(2, 9) < 7
    bias = torch.randn(1, 4, 9, 9, requires_grad=True)
    for arguments in (
        (*_sample(), None, None, 0.25, True, "zero"),
        (*_sample(requires_grad=True), None, padding, 0.25, False, "mean"),
        (*_sample(requires_grad=True), bias, torch.tensor([4, 9], dtype=torch.int32), 0.25, False, "zero"),
    ):
        torch.library.opcheck(attention_op, arguments)


def test_output_layout_is_the_same_everywhere() -> None:
    query, key, value = _sample()
    plain_output, _ = attention(query, key, value, return_logsumexp=True)
    for device in ("meta",):
        meta, logsumexp = attention(*(tensor.to(device) for tensor in (query, key, value)), return_logsumexp=True)
        assert meta.shape == plain_output.shape and meta.stride() == plain_output.stride()
        assert logsumexp.shape == (2, 4, 9) and logsumexp.dtype == torch.float32
    merged = plain_output.transpose(1, 2).reshape(2, 9, 64)
    assert merged.untyped_storage().data_ptr() == plain_output.untyped_storage().data_ptr()


def test_export_and_symbolic_shapes() -> None:
    class Module(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return torch.ops.kernl.attention(query, key, value, None, None, 0.25, False, "zero")[0]

    tokens = torch.export.Dim("tokens")
    program = torch.export.export(
        Module(), tuple(_sample()), dynamic_shapes={name: {2: tokens} for name in ("query", "key", "value")}
    )
    longer = [torch.randn(2, heads, 21, 16) for heads in (4, 2, 2)]
    torch.testing.assert_close(program.module()(*longer), attention(*longer))


def test_compiles_with_gradients() -> None:
    compiled = torch.compile(lambda *args: attention(*args, is_causal=True), backend="aot_eager", dynamic=True)
    for tokens in (9, 13):
        leaves = [torch.randn(2, 2, tokens, 16, requires_grad=True) for _ in range(3)]
        expected = torch.autograd.grad(attention(*leaves, is_causal=True).square().sum(), leaves)
        actual = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
        for one, other in zip(actual, expected):
            torch.testing.assert_close(one, other)


def test_autocast_casts_as_sdpa_does() -> None:
    query, key, value = _sample()
    bias = torch.randn(4, 9, 9)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, logsumexp = attention(query, key, value, attn_mask=bias, return_logsumexp=True)
        torch_output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, enable_gqa=True)
    assert output.dtype == torch_output.dtype == torch.bfloat16 and logsumexp.dtype == torch.float32
    torch.testing.assert_close(output, torch_output, rtol=2e-2, atol=2e-2)


def test_no_keys() -> None:
    query = torch.randn(2, 2, 5, 16)
    nothing = torch.randn(2, 2, 0, 16)
    output, logsumexp = attention(query, nothing, nothing, return_logsumexp=True)
    assert (output == 0).all() and (logsumexp == -math.inf).all()
    output, logsumexp = attention(query, nothing, nothing, hidden_rows="mean", return_logsumexp=True)
    assert (output == 0).all() and (logsumexp == LOWEST).all()
    assert attention(query[:, :, :0], query, query).shape == (2, 2, 0, 16)


def test_head_dim_over_the_limit_and_float64_run_the_reference(rng: torch.Generator, kernels: KernelRun) -> None:
    for case, dtype in ((Case(3, 5, 300, batch=1), torch.float32), (Case(3, 5), torch.float64)):
        inputs, options = make_inputs(case, dtype, rng)
        there, options = on(kernels.device, inputs, options)
        torch.testing.assert_close(
            attention(*there, **options).cpu().double(), exact(inputs, options)[0], rtol=1e-4, atol=1e-4
        )
    assert kernels.launched("attention_forward") == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 9)}, r"query: got shape \[2, 4, 9\]"),
        ({"key": torch.zeros(2, 3, 9, 16), "value": torch.zeros(2, 3, 9, 16)}, "key: got 3 heads.*query's heads, 4"),
        ({"key": torch.zeros(2, 2, 9, 8)}, "key: got head_dim 8.*16"),
        ({"value": torch.zeros(2, 2, 8, 16)}, "value: got 2 heads and 8 tokens"),
        ({"key": torch.zeros(1, 2, 9, 16)}, "key: got batch 1"),
        ({"key": torch.zeros(2, 2, 9, 16, dtype=torch.float64)}, "key: got torch.float64, accepted query's type"),
        ({"key": torch.zeros(2, 2, 9, 16, device="meta")}, "key: got device meta"),
        ({"value": torch.zeros(2, 2, 9, 16, dtype=torch.int32)}, "value: got torch.int32"),
        ({"attn_mask": torch.zeros(2, 9, 9)}, r"attn_mask: got shape \[2, 9, 9\].*\[2, 4, 9, 9\]"),
        ({"attn_mask": torch.zeros(9, 9, dtype=torch.int64)}, "attn_mask: got torch.int64"),
        ({"key_padding": torch.zeros(2, 9, dtype=torch.int64)}, "key_padding: got torch.int64.*int32 lengths"),
        ({"key_padding": torch.zeros(9, 2, dtype=torch.bool)}, r"key_padding: got torch.bool of shape \[9, 2\]"),
        ({"hidden_rows": "nan"}, "hidden_rows: got 'nan', accepted 'zero', 'mean'"),
    ],
)
def test_errors_name_the_argument(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = dict(zip(("query", "key", "value"), _sample())) | change
    with pytest.raises((ValueError, TypeError), match=message):
        attention(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)
