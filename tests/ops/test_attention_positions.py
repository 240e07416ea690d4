"""Attention whose scores depend on where queries and keys stand: windows, offsets, ALiBi, T5's bias; and a softcap.

The reference is written out here from the definitions, in float64, apart from the one in kernl.ops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kernl.ops import RelativePositionBias, attention
from kernl.ops.attention_common import reference_attention
from kernl.testing import assert_within_budget, poisoned
from tests.conftest import KernelRun
from tests.ops.test_attention import one_by_one

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@dataclass(frozen=True)
class Case:
    """Sizes and features of one call; `text` is its test id."""

    text: str
    seqlen_q: int = 33
    seqlen_k: int = 70
    heads: int = 2
    key_heads: int = 2
    head_dim: int = 16
    options: dict[str, Any] = field(default_factory=dict)
    alibi: str = ""  # "heads" or "batch"
    bias: str = ""  # "both" or "before"
    masks: str = ""  # "padding", "lengths", "mask", "float"


CASES = [
    Case("window", options={"window": (9, 4)}),
    Case("left-only", options={"window": (5, -1)}),
    Case("right-only", options={"window": (-1, 3)}),
    Case("window-of-itself", seqlen_k=33, options={"window": (0, 0)}),
    Case("causal-window", seqlen_q=130, seqlen_k=130, options={"window": (17, -1), "is_causal": True}),
    Case("wide-window", options={"window": (1000, 1000)}),
    Case("bottom-right", options={"is_causal": True, "q_offset": 37}),
    Case("offset-hides-rows", options={"is_causal": True, "q_offset": -5}),
    Case("offset-beyond-keys", options={"window": (20, 0), "q_offset": 80}),
    Case("offset-in-memory", options={"is_causal": True, "q_offset": "tensor"}),
    Case("decode", seqlen_q=1, seqlen_k=77, heads=16, key_heads=16, options={"is_causal": True, "q_offset": 40}),
    Case("alibi", alibi="heads"),
    Case("alibi-causal", seqlen_k=33, alibi="batch", options={"is_causal": True}),
    Case("bias", bias="both"),
    Case("bias-one-direction", seqlen_q=70, bias="before", options={"is_causal": True}),
    Case("bias-at-an-offset", 3, 70, 8, 8, bias="before", options={"is_causal": True, "q_offset": 67}),
    Case("softcap", options={"softcap": 2.5}),
    Case("softcap-gqa", heads=4, options={"softcap": 30.0, "is_causal": True, "q_offset": 37}),
    Case("window-padding", masks="padding", options={"window": (12, 9)}),
    Case("window-lengths", masks="lengths", options={"window": (12, 9), "q_offset": 3}),
    Case("window-mask", masks="mask", options={"window": (12, 9)}),
    Case("bias-padding", bias="both", masks="padding"),
    Case("bias-float-mask", bias="both", masks="float", options={"hidden_rows": "mean"}),
    Case("alibi-padding-gqa", heads=4, alibi="heads", masks="padding", options={"window": (30, -1)}),
    Case("softcap-float-mask", masks="float", options={"softcap": 5.0}),
    Case("prefix", options={"is_causal": True, "prefix": (5, 50)}),
    Case("prefix-offset-gqa", heads=4, masks="mask", options={"is_causal": True, "q_offset": -20, "prefix": (0, 70)}),
    Case("prefix-window", masks="padding", options={"window": (6, 4), "q_offset": 33, "prefix": (3, 68)}),
    Case("offset-of-each-row", options={"is_causal": True, "q_offset": (3, 60)}),
    Case("offset-of-each-row-bias", bias="both", alibi="batch", options={"window": (9, 9), "q_offset": (-4, 60)}),
    Case("hidden-mean", masks="padding", options={"window": (2, 2), "hidden_rows": "mean", "q_offset": 30}),
    Case("everything", heads=4, head_dim=24, alibi="batch", bias="both", masks="padding",
         options={"window": (25, 8), "q_offset": 11, "softcap": 4.0, "hidden_rows": "mean"}),
]  # fmt: skip


def draw(case: Case, dtype: torch.dtype, rng: torch.Generator) -> tuple[list[torch.Tensor], dict[str, Any]]:
    sizes = [(case.seqlen_q, case.heads), (case.seqlen_k, case.key_heads), (case.seqlen_k, case.key_heads)]
    tensors = [torch.randn(2, *size, case.head_dim, generator=rng).to(dtype).transpose(1, 2) for size in sizes]
    options = dict(case.options)
    if options.get("q_offset") == "tensor":
        options["q_offset"] = torch.tensor(21)
    for name in ("q_offset", "prefix"):
        if isinstance(options.get(name), tuple):
            options[name] = torch.tensor(options[name])
    if case.alibi:
        shape = (case.heads,) if case.alibi == "heads" else (2, case.heads)
        options["alibi_slopes"] = torch.rand(shape, generator=rng)
    if case.bias:
        table = torch.randn(16, case.heads, generator=rng)
        options["relative_position_bias"] = RelativePositionBias(table, case.bias == "both", 20)
    if case.masks == "padding":
        lengths = torch.tensor([[case.seqlen_k], [case.seqlen_k // 2 + 1]])
        options["key_padding"] = torch.arange(case.seqlen_k) < lengths
    elif case.masks == "lengths":
        options["key_padding"] = torch.tensor([0, case.seqlen_k // 2], dtype=torch.int32)
    elif case.masks == "mask":
        options["attn_mask"] = torch.rand(1, 1, case.seqlen_q, case.seqlen_k, generator=rng) > 0.3
    elif case.masks == "float":
        options["attn_mask"] = torch.randn(case.heads, case.seqlen_q, case.seqlen_k, generator=rng).to(dtype)
    return tensors, options


def expected(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
    rounding: torch.dtype | None = None,
    kept: torch.Tensor | None = None,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp in the type of the operands, from the definitions; probabilities rounded to `rounding`.

    kept: what dropout leaves.
    """
    heads, seqlen_q, head_dim = query.shape[1:]
    seqlen_k = key.shape[2]
    group = heads // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = product(query, key.mT)
    added = options.get("bias")
    if added is not None and options.get("bias_before_scale"):
        scores = scores + added
    scale = options.get("scale")
    scores = scores * (1 / math.sqrt(head_dim) if scale is None else scale)
    softcap = options.get("softcap")
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    position = torch.arange(seqlen_q)[:, None] + torch.as_tensor(options.get("q_offset", 0)).view(-1, 1, 1, 1)
    distance = torch.arange(seqlen_k) - position  # [1 or batch, 1, seqlen_q, seqlen_k]
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        scores = scores - slopes.to(scores.dtype).view(-1, heads, 1, 1) * distance.abs()
    bias = options.get("relative_position_bias")
    if bias is not None:
        reach = bias.max_distance
        table = bias.by_distance().to(scores.dtype)
        scores = scores + torch.stack([row[(distance[:, 0].clamp(-reach, reach) + reach)] for row in table], 1)
    if added is not None and not options.get("bias_before_scale"):
        scores = scores + added
    visible = torch.ones(query.shape[0], 1, seqlen_q, seqlen_k, dtype=torch.bool)
    mask, padding = options.get("attn_mask"), options.get("key_padding")
    if mask is not None and mask.is_floating_point():
        scores = scores + mask
    elif mask is not None:
        visible = visible & ((mask == 0) if options.get("mask_hides") else (mask != 0))
    if padding is not None:
        keys = padding if padding.dtype == torch.bool else torch.arange(seqlen_k) < padding[:, None]
        visible = visible & keys[:, None, None, :]
    left, right = options.get("window", (-1, -1))
    near = torch.ones_like(distance, dtype=torch.bool)
    if options.get("is_causal"):
        near = near & (distance <= 0)
    if right >= 0:
        near = near & (distance <= right)
    if left >= 0:
        near = near & (distance >= -left)
    if options.get("prefix") is not None:
        near = near | (torch.arange(seqlen_k) < options["prefix"].view(-1, 1, 1, 1))
    visible = visible & near
    scores = scores.masked_fill(~visible, -math.inf)
    hidden = (scores == -math.inf).all(-1)
    probabilities = scores.softmax(-1).masked_fill(hidden[..., None], 0)
    if rounding is not None:
        probabilities = probabilities.to(rounding).to(value.dtype)
    if kept is not None:
        probabilities = probabilities * kept / (1 - options["dropout_p"])
    output = product(probabilities, value)
    logsumexp = scores.logsumexp(-1)
    if options.get("hidden_rows") == "mean":
        output = torch.where(hidden[..., None], value.mean(2, keepdim=True), output)
        logsumexp = logsumexp.masked_fill(hidden, torch.finfo(torch.float32).min)
    return output, logsumexp


def in_double(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: part.double() if torch.is_tensor(part) and part.is_floating_point() else part
        for name, part in options.items()
    }


def on(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    moved = {name: part.to(device) if torch.is_tensor(part) else part for name, part in options.items()}
    bias = moved.get("relative_position_bias")
    if bias is not None:
        moved["relative_position_bias"] = RelativePositionBias(
            bias.table.to(device), bias.bidirectional, bias.max_distance
        )
    return moved


def baseline(
    tensors: list[torch.Tensor], options: dict[str, Any], exact: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Operands, probabilities and result rounded to the type, sums in float32: the one that errs most of three orders.

    As `worst_baseline` in test_attention.py, but keys keep their order, on which the scores depend here.
    """
    dtype = tensors[0].dtype
    query, key, value = (tensor.float() for tensor in tensors)
    rng = torch.Generator().manual_seed(query.shape[2])
    draws = []
    for _ in range(3):
        dims = torch.randperm(query.shape[3], generator=rng)
        output, _ = expected(query[..., dims], key[..., dims], value, options, dtype, kept, one_by_one)
        draws.append(output.to(dtype))
    return max(draws, key=lambda draw: float((draw.double() - exact).abs().max()))


@pytest.mark.parametrize(
    ("case", "dtype"), list(zip(CASES, itertools.cycle(DTYPES))), ids=lambda part: getattr(part, "text", str(part))
)
def test_kernel(case: Case, dtype: torch.dtype, rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, options = draw(case, dtype, rng)
    exact, exact_logsumexp = expected(*(tensor.double() for tensor in tensors), in_double(options))
    with poisoned():
        output, logsumexp = attention(
            *(tensor.to(kernels.device) for tensor in tensors), return_logsumexp=True, **on(kernels.device, options)
        )
    assert kernels.launched("attention_forward") == 1
    assert_within_budget(output, exact, baseline(tensors, options, exact), name=case.text)
    torch.testing.assert_close(logsumexp.cpu().double(), exact_logsumexp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
def test_formulas(case: Case, rng: torch.Generator) -> None:
    """The CPU path, in float64."""
    tensors, options = draw(case, torch.float64, rng)
    exact, exact_logsumexp = expected(*tensors, options)
    output, logsumexp = attention(*tensors, return_logsumexp=True, **options)
    torch.testing.assert_close(output, exact, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logsumexp.double(), exact_logsumexp, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
def test_gradients(case: Case, rng: torch.Generator) -> None:
    """Of the operands, a float mask and the table of the bias, against autograd through the definitions."""
    tensors, options = draw(case, torch.float64, rng)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    if torch.is_tensor(options.get("attn_mask")) and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].detach().requires_grad_()
        leaves.append(options["attn_mask"])
    bias = options.get("relative_position_bias")
    if bias is not None:
        table = bias.table.double().requires_grad_()
        options["relative_position_bias"] = RelativePositionBias(table, bias.bidirectional, bias.max_distance)
        leaves.append(table)
    output, logsumexp = attention(*leaves[:3], return_logsumexp=True, **options)
    weights = torch.randn(output.shape, generator=rng, dtype=output.dtype)
    finite = logsumexp.detach().abs() < 1e30
    got = torch.autograd.grad((output * weights).sum() + logsumexp[finite].sum(), leaves)
    want_output, want_logsumexp = expected(*leaves[:3], options)
    want = torch.autograd.grad((want_output * weights).sum() + want_logsumexp[finite].sum(), leaves)
    for one, other in zip(got, want):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_an_offset_in_memory_is_read_when_it_runs(rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, _ = draw(Case("", seqlen_q=2), torch.float32, rng)
    offset = torch.tensor([7], device=kernels.device)
    operands = [tensor.to(kernels.device) for tensor in tensors]
    for step in range(3):
        output = attention(*operands, is_causal=True, q_offset=offset)
        want = attention(*operands, is_causal=True, q_offset=7 + 5 * step)
        assert torch.equal(output, want)
        offset += 5


def test_tiles_outside_the_window_are_not_read(rng: torch.Generator, kernels: KernelRun) -> None:
    """NaN in keys and values that no query can see does not matter, although its products would be NaN."""
    tensors, _ = draw(Case("", seqlen_q=64, seqlen_k=640), torch.float32, rng)
    query, key, value = (tensor.to(kernels.device) for tensor in tensors)
    want = attention(query, key, value, window=(10, 10), q_offset=300)
    for tensor in (key, value):
        tensor[:, :, :192] = math.nan
        tensor[:, :, 448:] = math.nan
    assert torch.equal(attention(query, key, value, window=(10, 10), q_offset=300), want)


@pytest.mark.parametrize("slopes", ["every-second", "expanded", "transposed"])
def test_slopes_of_any_strides(slopes: str, rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, _ = draw(Case("", heads=4, key_heads=4), torch.float32, rng)
    given = {
        "every-second": torch.rand(8, generator=rng)[::2],
        "expanded": torch.rand(4, generator=rng).expand(2, 4),
        "transposed": torch.rand(4, 2, generator=rng).T,
    }[slopes]
    operands = [tensor.to(kernels.device) for tensor in tensors]
    got = attention(*operands, alibi_slopes=given.to(kernels.device))
    exact, _ = expected(*(tensor.double() for tensor in tensors), {"alibi_slopes": given.double()})
    assert_within_budget(got, exact, baseline(tensors, {"alibi_slopes": given}, exact))


@pytest.mark.parametrize("bound", [2**29, 2**31 - 1, 2**63 - 1, 2**70])
def test_a_huge_window_is_none(bound: int, rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, _ = draw(Case(""), torch.float32, rng)
    operands = [tensor.to(kernels.device) for tensor in tensors]
    for offset in (0, 20):
        got = attention(*operands, window=(bound, bound), q_offset=offset)
        torch.testing.assert_close(got, attention(*operands), rtol=1e-5, atol=1e-5)


def test_far_offsets(rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, options = draw(Case("", bias="both"), torch.float32, rng)
    operands, options = [tensor.to(kernels.device) for tensor in tensors], on(kernels.device, options)
    for sign in (-1, 1):
        want = attention(*operands, q_offset=sign * 100_000, **options)
        for far in (2**29, 2**31 - 1, 2**40):
            offset = torch.tensor(sign * far, device=kernels.device)
            torch.testing.assert_close(attention(*operands, q_offset=offset, **options), want, rtol=1e-6, atol=1e-6)


def test_second_derivatives_come_from_the_formulas(rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, _ = draw(Case("", seqlen_q=5, seqlen_k=7), torch.float32, rng)

    def second(operands: list[torch.Tensor]) -> torch.Tensor:
        leaves = [tensor.detach().to(kernels.device).requires_grad_() for tensor in operands]
        (first,) = torch.autograd.grad(attention(*leaves).sin().sum(), leaves[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaves[0])[0].cpu()

    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    (first,) = torch.autograd.grad(expected(*leaves, {})[0].sin().sum(), leaves[0], create_graph=True)
    (want,) = torch.autograd.grad(first.square().sum(), leaves[0])
    torch.testing.assert_close(second(tensors).double(), want, rtol=1e-3, atol=1e-4)


def test_what_does_not_fit(rng: torch.Generator) -> None:
    (query, key, value), _ = draw(Case(""), torch.float32, rng)

    def refused(message: str, kind: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            attention(query, key, value, **options)

    refused(r"window: got \(-2, 3\), accepted", window=(-2, 3))
    refused(r"window: got 5, accepted", TypeError, window=5)
    refused(r"window: got \(1, 2, 3\), accepted", window=(1, 2, 3))
    refused(r"softcap: got -1.0, accepted", softcap=-1.0)
    refused(r"softcap: got 'x', accepted", TypeError, softcap="x")
    refused(r"q_offset: got 1.5, accepted", TypeError, q_offset=1.5)
    refused(r"q_offset: got 2147483647, accepted numbers from", q_offset=2**31 - 1)
    refused(r"alibi_slopes: got a tensor that requires a gradient", alibi_slopes=torch.ones(2, requires_grad=True))
    refused(r"q_offset: got torch.float32, accepted", TypeError, q_offset=torch.tensor(1.0))
    refused(r"q_offset: got shape \[3\], accepted", q_offset=torch.tensor([1, 2, 3]))
    refused(r"prefix: got shape \[3\], accepted \[2\]", prefix=torch.tensor([1, 2, 3]))
    refused(r"prefix: got torch.float32, accepted", TypeError, prefix=torch.tensor([1.0, 2.0]))
    refused(r"alibi_slopes: got shape \[3\], accepted", alibi_slopes=torch.ones(3))
    refused(r"alibi_slopes: got torch.int64, accepted", TypeError, alibi_slopes=torch.ones(2, dtype=torch.long))
    refused(r"relative_position_bias: got Tensor, accepted", TypeError, relative_position_bias=torch.ones(32, 2))
    three_heads = RelativePositionBias(torch.ones(32, 3))
    refused(r"relative_position_bias: got a table for 3 heads, accepted", relative_position_bias=three_heads)


def test_reference_takes_the_same_arguments(rng: torch.Generator) -> None:
    case = CASES[-1]
    tensors, options = draw(case, torch.float32, rng)
    output, logsumexp = reference_attention(*tensors, **options)
    want, want_logsumexp = expected(*tensors, options)
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logsumexp, want_logsumexp, rtol=1e-5, atol=1e-5)
