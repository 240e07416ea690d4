"""Dropout on the probabilities: Philox bit for bit, the same mask everywhere, drawn anew inside a graph."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch

from kernl.kernels.attention_problem import Configuration, DropoutOptions
from kernl.ops import attention
from kernl.ops.attention import attention_op
from kernl.ops.attention_common import kept_by_dropout, philox
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun
from tests.ops.test_attention_positions import Case, baseline, draw, expected, in_double, on

op_file = importlib.import_module("kernl.ops.attention")

SEED, OFFSET = 0x1234_5678_9ABC_DEF1, 0x1_0000_0007


def philox_in_python(counter: tuple[int, int, int, int], seed: int, rounds: int) -> tuple[int, int, int, int]:
    """Salmon et al. 2011, in numbers of any size."""
    a, b, c, d = counter
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(rounds):
        low, high = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (high >> 32) ^ b ^ key[0], high & 0xFFFFFFFF, (low >> 32) ^ d ^ key[1], low & 0xFFFFFFFF
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return a, b, c, d


def kept_in_python(p: float, seed: int, offset: int, shape: tuple[int, int, int, int]) -> torch.Tensor:
    batch, heads, seqlen_q, seqlen_k = shape
    kept = torch.zeros(shape, dtype=torch.bool)
    for row, head, query in itertools.product(range(batch), range(heads), range(seqlen_q)):
        words: list[int] = []
        for quad in range((seqlen_k + 3) // 4):
            words += philox_in_python((quad, query, row * heads + head, offset & 0xFFFFFFFF), seed, 7)
        kept[row, head, query] = torch.tensor([word >> 1 >= round(p * 2**31) for word in words[:seqlen_k]])
    return kept


def kept_mask(p: float, shape: tuple[int, int, int, int], seed: int = SEED, offset: int = OFFSET) -> torch.Tensor:
    options = DropoutOptions(p, torch.tensor([seed]), torch.tensor([offset]))
    return kept_by_dropout(options, shape[0], shape[1], range(shape[2]), shape[3])


def test_philox_against_published_numbers() -> None:
    """The known answers that come with the authors' library (philox4x32, 7 and 10 rounds, all zeros and all ones)."""
    zero, ones = torch.zeros((), dtype=torch.int64), torch.full((), -1, dtype=torch.int64)
    answers = {
        (10, 0): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        (10, -1): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (7, 0): (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
    }
    for (rounds, bits), answer in answers.items():
        word = ones if bits else zero
        assert tuple(map(int, philox(word, (word, word, word, word), rounds))) == answer


def test_the_reference_is_philox() -> None:
    shape = (2, 3, 5, 9)
    assert torch.equal(kept_mask(0.3, shape), kept_in_python(0.3, SEED, OFFSET, shape))


def kept_by_kernel(p: float, shape: tuple[int, int, int, int], device: torch.device, **options: Any) -> torch.Tensor:
    """Which values come through the forward kernel: each key's value is a unit vector of its own."""
    batch, heads, seqlen_q, seqlen_k = shape
    query = torch.zeros(batch, heads, seqlen_q, 16, device=device)
    key = torch.zeros(batch, heads, seqlen_k, 16, device=device)
    value = torch.eye(seqlen_k, device=device).expand(batch, heads, -1, -1)
    output = attention(query, key, value, dropout_p=p, seed=SEED, offset=OFFSET, **options)
    weight = 1 / (seqlen_k * (1 - p))
    torch.testing.assert_close(output, torch.where(output > weight / 2, weight, 0.0), rtol=1e-5, atol=1e-6)
    return (output > weight / 2).cpu()


@pytest.mark.parametrize("tile", [(64, 64), (16, 32), (32, 16)], ids=str)
def test_the_kernel_drops_what_the_reference_drops(
    tile: tuple[int, int], kernels: KernelRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whatever the tiles."""
    monkeypatch.setattr(op_file, "configurations", lambda *_, **__: (Configuration(*tile, 4, 1),))
    shape = (2, 2, 21, 75)
    kept = kept_by_kernel(0.4, shape, kernels.device)
    assert kernels.launched("attention_forward") == 1
    assert torch.equal(kept, kept_mask(0.4, shape))


def test_keep_rate_and_independence() -> None:
    """Of 2^20 decisions, 1 - p within five standard deviations; and no two heads, rows, seeds or offsets alike."""
    shape = (2, 4, 128, 1024)
    for p in (0.1, 0.5, 0.9):
        kept = kept_mask(p, shape).double()
        deviation = (p * (1 - p) / kept.numel()) ** 0.5
        assert abs(float(kept.mean()) - (1 - p)) < 5 * deviation
    kept = kept_mask(0.5, shape)
    others = [kept[:, [1, 0, 3, 2]], kept.flip(0), kept.roll(1, 2), kept.roll(1, 3)]
    others += [kept_mask(0.5, shape, seed=SEED + 1), kept_mask(0.5, shape, offset=OFFSET + 1)]
    for other in others:
        assert abs(float((kept == other).double().mean()) - 0.5) < 5 * 0.5 / kept.numel() ** 0.5


def test_no_dropout_is_none(rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, _ = draw(Case(""), torch.float32, rng)
    operands = [tensor.to(kernels.device) for tensor in tensors]
    assert torch.equal(attention(*operands, dropout_p=0.0, seed=3), attention(*operands))


CASES = [
    Case("plain"),
    Case("gqa-causal", heads=4, options={"is_causal": True, "q_offset": 37}),
    Case("padding", masks="padding"),
    Case("lengths", masks="lengths"),
    Case("float-mask", masks="float"),
    Case("window-bias", bias="both", options={"window": (12, 9), "softcap": 4.0}),
    Case("decode", seqlen_q=1, seqlen_k=300, heads=4, options={"is_causal": True, "q_offset": 280}),
    Case("means", seqlen_q=12, masks="padding", options={"is_causal": True, "q_offset": -4, "hidden_rows": "mean"}),
]


def with_dropout(case: Case, dtype: torch.dtype, rng: torch.Generator) -> tuple[Any, dict[str, Any], torch.Tensor]:
    tensors, options = draw(case, dtype, rng)
    kept = kept_mask(0.3, (2, case.heads, case.seqlen_q, case.seqlen_k))
    return tensors, {**options, "dropout_p": 0.3, "seed": SEED, "offset": OFFSET}, kept


def exact_with_means(
    tensors: list[torch.Tensor], options: dict[str, Any], kept: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `expected` gives, with dropout on the mean of hidden rows too: their probabilities are 1 / seqlen_k."""
    output, logsumexp = expected(*tensors, options, kept=kept)
    if options.get("hidden_rows") == "mean":
        value = tensors[2].repeat_interleave(tensors[0].shape[1] // tensors[2].shape[1], 1)
        weights = kept.to(value.dtype) / (1 - options["dropout_p"]) / value.shape[2]
        output = torch.where((logsumexp < -1e30)[..., None], weights @ value, output)
    return output, logsumexp


@pytest.mark.parametrize("case", CASES[:-1], ids=lambda case: case.text)
def test_kernel(case: Case, rng: torch.Generator, kernels: KernelRun) -> None:
    dtype = (torch.float16, torch.bfloat16, torch.float32)[sum(map(ord, case.text)) % 3]
    tensors, options, kept = with_dropout(case, dtype, rng)
    exact, exact_logsumexp = expected(*(tensor.double() for tensor in tensors), in_double(options), kept=kept)
    there = [tensor.to(kernels.device) for tensor in tensors]
    output, logsumexp = attention(*there, return_logsumexp=True, **on(kernels.device, options))
    assert kernels.launched("attention_forward") == 1
    assert_within_budget(output, exact, baseline(tensors, options, exact, kept), name=case.text)
    torch.testing.assert_close(logsumexp.cpu().double(), exact_logsumexp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.text)
def test_formulas_and_gradients(case: Case, rng: torch.Generator) -> None:
    tensors, options, kept = with_dropout(case, torch.float64, rng)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output, logsumexp = attention(*leaves, return_logsumexp=True, **options)
    want, want_logsumexp = exact_with_means(leaves, options, kept)
    torch.testing.assert_close(output, want, rtol=1e-9, atol=1e-9)
    weights = torch.randn(output.shape, generator=rng, dtype=output.dtype)
    finite = logsumexp.detach().abs() < 1e30
    got = torch.autograd.grad((output * weights).sum() + logsumexp[finite].sum(), leaves)
    exact = torch.autograd.grad((want * weights).sum() + want_logsumexp[finite].sum(), leaves)
    for one, other in zip(got, exact):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_gradients_after_the_kernel(rng: torch.Generator, kernels: KernelRun) -> None:
    """The mask of the forward kernel is the one of the backward pass."""
    case = CASES[1]
    tensors, options, kept = with_dropout(case, torch.float32, rng)
    leaves = [tensor.detach().to(kernels.device).requires_grad_() for tensor in tensors]
    output = attention(*leaves, **on(kernels.device, options))
    assert kernels.launched("attention_forward") == 1
    exact_leaves = [tensor.double().requires_grad_() for tensor in tensors]
    want = expected(*exact_leaves, options, kept=kept)[0]
    weights = torch.randn(output.shape, generator=rng)
    got = torch.autograd.grad((output * weights.to(kernels.device)).sum(), leaves)
    for one, other in zip(got, torch.autograd.grad((want * weights).sum(), exact_leaves)):
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-4, atol=1e-4)


def test_a_seed_is_drawn_from_torchs_generator() -> None:
    operands = [torch.randn(1, 2, 8, 16) for _ in range(3)]

    def run(**options: Any) -> torch.Tensor:
        return attention(*operands, dropout_p=0.5, **options)

    torch.manual_seed(7)
    first, second = run(), run()
    torch.manual_seed(7)
    assert torch.equal(run(), first) and not torch.equal(first, second)
    assert torch.equal(run(seed=3), run(seed=torch.tensor(3), offset=torch.tensor([0])))
    compiled = torch.compile(run, backend="aot_eager")
    torch.manual_seed(7)
    results = [compiled(), compiled()]
    assert not torch.equal(*results)  # nothing about the draw is frozen into the graph


def test_opcheck() -> None:
    operands = [torch.randn(1, 2, 5, 16, requires_grad=True) for _ in range(3)]
    seed, offset = torch.tensor([SEED]), torch.tensor([OFFSET])
    nothing = (None, None, 0, None, 0.0, None, None, None, False, False, None)
    arguments = (*operands, None, None, 0.25, True, "zero", *nothing, 0.3, seed, offset)
    torch.library.opcheck(attention_op, arguments)


def test_what_does_not_fit() -> None:
    operands = [torch.randn(1, 2, 5, 16) for _ in range(3)]
    for p in (1.0, -0.1, True, "a"):
        with pytest.raises(ValueError, match=r"dropout_p: got .*, accepted a number from 0 to less than 1"):
            attention(*operands, dropout_p=p)
    with pytest.raises(ValueError, match=r"seed: got torch.int32 of shape \[\], accepted"):
        attention(*operands, dropout_p=0.1, seed=torch.tensor(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="offset: got 3 without a seed"):
        attention(*operands, dropout_p=0.1, offset=3)
