"""Packed sequences of different lengths, and the arguments for callers with other conventions: a bias beside a mask, a
bias before the scale, masks that hide, statistics of rows.

The reference is that of test_attention_positions.py, sequence by sequence.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kernl.ops import RelativePositionBias, attention
from kernl.ops.attention import attention_op, attention_with_statistics_op
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun
from tests.ops.test_attention_dropout import OFFSET, SEED, kept_mask
from tests.ops.test_attention_positions import Case, baseline, draw, expected, in_double, on

LENGTHS_Q, LENGTHS_K = [33, 0, 5, 20, 1], [40, 7, 0, 70, 2]
SEQUENCES = len(LENGTHS_Q)
LONGEST = (max(LENGTHS_Q), max(LENGTHS_K))


def cumulative(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def pack(
    heads: int, key_heads: int, dtype: torch.dtype, rng: torch.Generator, head_dim: int = 16
) -> list[torch.Tensor]:
    sizes = [(sum(LENGTHS_Q), heads), (sum(LENGTHS_K), key_heads), (sum(LENGTHS_K), key_heads)]
    return [torch.randn(1, *size, head_dim, generator=rng).to(dtype).transpose(1, 2) for size in sizes]


def one_of(tensors: list[torch.Tensor], options: dict[str, Any], number: int) -> tuple[list[Any], dict[str, Any], Any]:
    """The operands, options and dropout mask of one sequence."""
    start_q, start_k = sum(LENGTHS_Q[:number]), sum(LENGTHS_K[:number])
    length_q, length_k = LENGTHS_Q[number], LENGTHS_K[number]
    query, key, value = tensors
    alone = dict(options)
    for name in ("attn_mask", "bias"):
        if alone.get(name) is not None:
            here = slice(number, number + 1) if alone[name].shape[0] > 1 else slice(None)
            alone[name] = alone[name][here, :, :length_q, :length_k]
    for name in ("prefix", "q_offset"):
        if torch.is_tensor(alone.get(name)):
            alone[name] = alone[name][number : number + 1]
    slopes = alone.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        alone["alibi_slopes"] = slopes[number : number + 1]
    kept = None
    if "dropout_p" in options:
        shape = (SEQUENCES, query.shape[1], length_q, max(length_k, 1))
        kept = kept_mask(options["dropout_p"], shape)[number : number + 1, ..., :length_k]
    operands = [query[:, :, start_q : start_q + length_q]]
    operands += [tensor[:, :, start_k : start_k + length_k] for tensor in (key, value)]
    return operands, alone, kept


def expected_of_all(
    tensors: list[torch.Tensor], options: dict[str, Any], rounded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp of all sequences, exact or as the baseline of the budget."""
    outputs, logsumexps = [], []
    for number in range(SEQUENCES):
        operands, alone, kept = one_of(tensors, options, number)
        if LENGTHS_Q[number] == 0 or LENGTHS_K[number] == 0:
            shape = operands[0].shape
            outputs.append(torch.zeros(*shape[:3], operands[2].shape[3], dtype=operands[0].dtype))
            logsumexps.append(torch.full(shape[:3], -math.inf, dtype=operands[0].dtype))
            continue
        wide = [tensor.double() for tensor in operands]
        exact, logsumexp = expected(*wide, in_double(alone), kept=kept)
        outputs.append(baseline(operands, alone, exact.detach(), kept) if rounded else exact)
        logsumexps.append(logsumexp)
    return torch.cat(outputs, 2), torch.cat(logsumexps, 2)


def options_of(name: str, heads: int, rng: torch.Generator) -> dict[str, Any]:
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "bottom-right": {"is_causal": True, "q_offset": torch.tensor(LENGTHS_K) - torch.tensor(LENGTHS_Q)},
        "window-prefix": {"window": (4, 3), "prefix": torch.tensor([9, 2, 3, 50, 0])},
        "mask": {"attn_mask": torch.rand(1, 1, *LONGEST, generator=rng) > 0.3},
        "bias": {"bias": torch.randn(SEQUENCES, heads, *LONGEST, generator=rng), "is_causal": True},
        "alibi": {"alibi_slopes": torch.rand(SEQUENCES, heads, generator=rng), "window": (20, -1)},
        "t5": {"relative_position_bias": RelativePositionBias(torch.randn(16, heads, generator=rng), True, 20)},
        "dropout": {"dropout_p": 0.25, "seed": SEED, "offset": OFFSET, "is_causal": True},
    }[name]


NAMES = ("plain", "causal", "bottom-right", "window-prefix", "mask", "bias", "alibi", "t5", "dropout")


def lengths_on(device: torch.device, *, told: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {"cu_seqlens_q": cumulative(LENGTHS_Q), "cu_seqlens_k": cumulative(LENGTHS_K).long()}
    found = {name: tensor.to(device) for name, tensor in found.items()}
    return {**found, "max_seqlen_q": LONGEST[0], "max_seqlen_k": LONGEST[1]} if told else found


@pytest.mark.parametrize("name", NAMES)
def test_kernel(name: str, rng: torch.Generator, kernels: KernelRun) -> None:
    heads, key_heads = (4, 2) if name in ("bottom-right", "alibi") else (2, 2)
    dtype = (torch.float16, torch.bfloat16, torch.float32)[len(name) % 3]
    tensors = pack(heads, key_heads, dtype, rng)
    options = options_of(name, heads, rng)
    exact, exact_logsumexp = expected_of_all(tensors, options)
    there = [tensor.to(kernels.device) for tensor in tensors]
    lengths = lengths_on(kernels.device, told=name != "plain")
    output, logsumexp = attention(*there, return_logsumexp=True, **lengths, **on(kernels.device, options))
    assert kernels.launched("attention_forward") == 1
    assert output.shape == tensors[0].shape and logsumexp.shape == tensors[0].shape[:3]
    assert_within_budget(output, exact, expected_of_all(tensors, options, True)[0].to(dtype), name=name)
    torch.testing.assert_close(logsumexp.cpu().double(), exact_logsumexp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_formulas_and_gradients(name: str, rng: torch.Generator) -> None:
    tensors = pack(2, 1, torch.float64, rng)
    options = options_of(name, 2, rng)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    wanted = list(leaves)
    if "bias" in options:
        options["bias"] = options["bias"].double().requires_grad_()
        wanted.append(options["bias"])
    if "relative_position_bias" in options:
        table = options["relative_position_bias"].table.double().requires_grad_()
        options["relative_position_bias"] = RelativePositionBias(table, True, 20)
        wanted.append(table)
    output, logsumexp = attention(*leaves, return_logsumexp=True, **lengths_on(torch.device("cpu")), **options)
    want, want_logsumexp = expected_of_all(leaves, options)
    torch.testing.assert_close(output, want, rtol=1e-9, atol=1e-9)
    weights = torch.randn(output.shape, generator=rng, dtype=output.dtype)
    finite = logsumexp.detach() > -1e30
    got = torch.autograd.grad((output * weights).sum() + logsumexp[finite].sum(), wanted)
    exact = torch.autograd.grad((want * weights).sum() + want_logsumexp[finite].sum(), wanted)
    for one, other in zip(got, exact):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_nothing_comes_from_the_neighbours(rng: torch.Generator, kernels: KernelRun) -> None:
    """NaN in one sequence stays there, although a tile of another one's keys ends where it begins."""
    tensors = pack(2, 2, torch.float32, rng)
    query, key, value = (tensor.to(kernels.device) for tensor in tensors)
    lengths = lengths_on(kernels.device)
    want = attention(query, key, value, **lengths)
    start, end = sum(LENGTHS_K[:3]), sum(LENGTHS_K[:4])
    key[:, :, start:end], value[:, :, start:end] = math.nan, math.nan
    got = attention(query, key, value, **lengths)
    first, last = sum(LENGTHS_Q[:3]), sum(LENGTHS_Q[:4])
    assert got[:, :, first:last].isnan().all()
    assert torch.equal(got[:, :, :first], want[:, :, :first]) and torch.equal(got[:, :, last:], want[:, :, last:])


def test_lengths_that_do_not_fit() -> None:
    query = torch.randn(1, 2, 10, 16)

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            attention(query, query, query, **options)

    good, falling = torch.tensor([0, 4, 10]), torch.tensor([0, 6, 4, 10])
    refused("cu_seqlens_k: got NoneType, accepted int32 or int64", cu_seqlens_q=good)
    refused(
        r"cu_seqlens_q: got \[0, 6, 4, 10\], accepted numbers that never fall", cu_seqlens_q=falling, cu_seqlens_k=good
    )
    refused(r"cu_seqlens_k: got \[0, 4, 9\], accepted", cu_seqlens_q=good, cu_seqlens_k=torch.tensor([0, 4, 9]))
    refused("cu_seqlens_k: got 2 numbers", cu_seqlens_q=good, cu_seqlens_k=torch.tensor([0, 10]))
    refused("max_seqlen_q: got 3, accepted together with", max_seqlen_q=3)
    padding = torch.ones(1, 10, dtype=torch.bool)
    refused("key_padding: got one beside cu_seqlens_k", cu_seqlens_q=good, cu_seqlens_k=good, key_padding=padding)
    mask = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    refused(
        r"attn_mask: got .*, accepted one that broadcasts to \[2, 2, 6, 6\]",
        cu_seqlens_q=good,
        cu_seqlens_k=good,
        attn_mask=mask,
    )


# Other conventions


def conventions(name: str, dtype: torch.dtype, rng: torch.Generator) -> dict[str, Any]:
    mask = torch.rand(2, 1, 33, 70, generator=rng) > 0.4
    mask[0, 0, 5] = False
    bias = torch.randn(1, 4, 33, 70, generator=rng).to(dtype)
    return {
        "mask-and-bias": {"attn_mask": mask, "bias": bias, "is_causal": True, "q_offset": 37},
        "hides": {"attn_mask": ~mask, "mask_hides": True},
        "hides-uint8-by-key": {"attn_mask": (~mask[:, :, :1]).to(torch.uint8), "mask_hides": True},
        "before-the-scale": {"bias": bias, "bias_before_scale": True, "scale": 0.3},
        "negative-scale": {"bias": bias[:, :1], "bias_before_scale": True, "scale": -0.3},
        "all": {"attn_mask": (~mask).to(torch.uint8), "mask_hides": True, "bias": bias, "bias_before_scale": True,
                "scale": 0.2, "window": (30, 6), "q_offset": 20, "prefix": torch.tensor([0, 9])},
    }[name]  # fmt: skip


CONVENTIONS = ("mask-and-bias", "hides", "hides-uint8-by-key", "before-the-scale", "negative-scale", "all")


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions(name: str, rng: torch.Generator, kernels: KernelRun) -> None:
    """Output, logsumexp and statistics by the kernel."""
    dtype = (torch.float16, torch.bfloat16, torch.float32)[len(name) % 3]
    tensors, _ = draw(Case("", heads=4), dtype, rng)
    options = conventions(name, dtype, rng)
    exact, exact_logsumexp = expected(*(tensor.double() for tensor in tensors), in_double(options))
    there = [tensor.to(kernels.device) for tensor in tensors]
    results = attention(*there, return_logsumexp=True, return_row_stats=True, **on(kernels.device, options))
    assert kernels.launched("attention_forward") == 1
    output, logsumexp, maximum, total = (result.cpu() for result in results)
    assert_within_budget(output, exact, baseline(tensors, options, exact), name=name)
    torch.testing.assert_close(logsumexp.double(), exact_logsumexp, rtol=1e-4, atol=1e-4)
    hidden = exact_logsumexp == -math.inf
    assert (maximum[hidden] == -math.inf).all() and (total[hidden] == 0).all()
    assert (total[~hidden] >= 0.999).all()  # the maximum's own term is 1
    torch.testing.assert_close((maximum + total.log()).double(), exact_logsumexp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions_by_formulas(name: str, rng: torch.Generator) -> None:
    """And the gradients, of the bias too."""
    tensors, _ = draw(Case("", heads=4), torch.float64, rng)
    options = conventions(name, torch.float64, rng)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    if "bias" in options:
        options["bias"] = options["bias"].detach().requires_grad_()
        leaves.append(options["bias"])
    output, maximum, total = attention(*leaves[:3], return_row_stats=True, **options)
    want, logsumexp = expected(*leaves[:3], options)
    torch.testing.assert_close(output, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close((maximum + total.log()).double(), logsumexp.detach(), rtol=1e-5, atol=1e-5)
    assert not maximum.requires_grad and not total.requires_grad
    weights = torch.randn(output.shape, generator=rng, dtype=output.dtype)
    got = torch.autograd.grad((output * weights).sum(), leaves)
    for one, other in zip(got, torch.autograd.grad((want * weights).sum(), leaves)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_opcheck() -> None:
    operands = [torch.randn(2, 2, 5, 16, requires_grad=True) for _ in range(3)]
    mask = torch.rand(5, 5) > 0.9
    bias = torch.randn(1, 2, 5, 5, requires_grad=True)
    scoring = (None, None, 0, None, 0.0, None, None, bias, True, True, torch.tensor([1, 2]))
    torch.library.opcheck(attention_with_statistics_op, (*operands, mask, None, 0.25, True, "zero", *scoring))
    packed = [tensor.detach()[:1].requires_grad_() for tensor in operands]
    lengths = (torch.tensor([0, 2, 5]), torch.tensor([0, 5, 5]), 3, 5)
    plain = (*scoring[:7], None, False, False, None, 0.0, None, None)
    torch.library.opcheck(attention_op, (*packed, None, None, 0.25, True, "zero", *plain, *lengths))


def test_conventions_that_do_not_fit() -> None:
    query = torch.randn(1, 2, 5, 16)

    def refused(kind: type[Exception], message: str, **options: Any) -> None:
        with pytest.raises(kind, match=message):
            attention(query, query, query, **options)

    number, mask = torch.randn(5, 5), torch.ones(5, 5, dtype=torch.uint8)
    refused(TypeError, "attn_mask: got torch.uint8, accepted bool", attn_mask=mask)
    refused(TypeError, "attn_mask: got torch.float32, accepted bool or uint8", attn_mask=number, mask_hides=True)
    refused(ValueError, "bias: got one beside a float attn_mask", attn_mask=number, bias=number)
    refused(TypeError, "bias: got torch.uint8", bias=mask)
    refused(ValueError, "softcap: got 3.0 with bias_before_scale", bias=number, bias_before_scale=True, softcap=3.0)
    wide = torch.randn(1, 1, 2, 513)
    with pytest.raises(ValueError, match="head_dim: got 513 and value's 513, accepted 1 to 512"):
        attention(wide, wide, wide)
