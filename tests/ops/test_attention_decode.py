"""Attention of few queries: keys shared out among programs, heads of a group in one tile, results combined.

The reference is that of test_attention_positions.py, written out from the definitions.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernl.kernels import attention_decode as kernel_file
from kernl.kernels.attention_decode import DecodeConfiguration
from kernl.kernels.attention_problem import Configuration
from kernl.ops import attention
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun
from tests.ops.test_attention_positions import Case, baseline, draw, expected, in_double, on

op_file = importlib.import_module("kernl.ops.attention")

Decoding = Callable[[int], None]


@pytest.fixture
def decoding(monkeypatch: pytest.MonkeyPatch) -> Decoding:
    """A function that makes all calls decode with a number of shares, in tiles of 16 rows and 32 keys."""

    def with_shares(splits: int) -> None:
        configuration = DecodeConfiguration(Configuration(16, 32, 4, 1), splits)
        monkeypatch.setattr(op_file, "decode_configuration", lambda *_: configuration)
        monkeypatch.setattr(op_file, "prefers_decode", lambda *_: True)

    return with_shares


# Few queries, and each feature once or twice; shares are chosen so that some are empty and some begin inside a window.
CASES = [
    (4, Case("plain", 1, 170, 4, 4)),
    (1, Case("one-share", 2, 100, heads=4, options={"is_causal": True, "q_offset": 98})),
    (3, Case("group", 1, 170, heads=8, options={"is_causal": True, "q_offset": "tensor"})),
    (3, Case("more-rows-than-a-tile", 5, 100, heads=8, options={"is_causal": True, "q_offset": 95})),
    (8, Case("more-shares-than-tiles", 1, 70, 4, 4)),
    (3, Case("one-key", 1, 1, 4, 4)),
    (2, Case("offset-before-the-keys", 3, 64, heads=4, options={"is_causal": True, "q_offset": -2})),
    (2, Case("means", 3, 64, heads=4, options={"is_causal": True, "q_offset": -2, "hidden_rows": "mean"})),
    (1, Case("means-in-one-share", 3, 64, options={"is_causal": True, "q_offset": -2, "hidden_rows": "mean"})),
    (3, Case("offset-of-each-row", 2, 170, options={"is_causal": True, "q_offset": (168, 9)})),
    (3, Case("window", 2, 200, options={"window": (40, 0), "q_offset": 150})),
    (3, Case("window-prefix", 2, 200, options={"window": (20, 0), "q_offset": 170, "prefix": (3, 60)})),
    (2, Case("causal-prefix", 2, 100, options={"is_causal": True, "q_offset": 10, "prefix": (0, 70)})),
    (3, Case("padding", 2, 170, heads=4, masks="padding")),
    (3, Case("lengths", 1, 170, 8, 8, masks="lengths")),
    (2, Case("lengths-means", 1, 70, 4, 4, masks="lengths", options={"hidden_rows": "mean"})),
    (2, Case("mask-gqa", 3, 100, heads=4, masks="mask")),
    (2, Case("float-mask-by-head", 2, 100, heads=4, masks="float")),
    (2, Case("alibi-gqa", 2, 100, heads=4, alibi="batch", options={"is_causal": True, "q_offset": 98})),
    (2, Case("bias-gqa", 2, 100, heads=4, bias="before", options={"is_causal": True, "q_offset": 98})),
    (2, Case("odd-head-dim-softcap", 2, 100, head_dim=24, options={"softcap": 3.0})),
]  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize(("splits", "case"), CASES, ids=lambda part: part.text if isinstance(part, Case) else None)
def test_kernel(splits: int, case: Case, rng: torch.Generator, kernels: KernelRun, decoding: Decoding) -> None:
    decoding(splits)
    dtype = DTYPES[sum(map(ord, case.text)) % 3]
    tensors, options = draw(case, dtype, rng)
    exact, exact_logsumexp = expected(*(tensor.double() for tensor in tensors), in_double(options))
    there = [tensor.to(kernels.device) for tensor in tensors]
    output, logsumexp = attention(*there, return_logsumexp=True, **on(kernels.device, options))
    assert kernels.launched("attention_decode") == 1 and kernels.launched("attention_forward") == 0
    assert output.transpose(1, 2).is_contiguous()
    torch.testing.assert_close(logsumexp.cpu().double(), exact_logsumexp, rtol=1e-4, atol=1e-4)
    assert exact.numel() >= 100  # fewer say little
    assert_within_budget(output, exact, baseline(tensors, options, exact), name=case.text)


@pytest.mark.parametrize("kind", ["bool", "lengths", "offset"])
def test_keys_nobody_sees_are_not_read(kind: str, rng: torch.Generator, kernels: KernelRun, decoding: Decoding) -> None:
    """A static cache that holds NaN beyond its filled part: in whole tiles, and in the rest of the last one."""
    decoding(3)
    tensors, _ = draw(Case("", 1, 160, heads=4), torch.float32, rng)
    query, key, value = (tensor.to(kernels.device) for tensor in tensors)
    filled = 50
    options: dict[str, Any] = {
        "bool": {"key_padding": (torch.arange(160) < filled).expand(2, 160).to(kernels.device)},
        "lengths": {"key_padding": torch.full((2,), filled, dtype=torch.int32, device=kernels.device)},
        "offset": {"is_causal": True, "q_offset": torch.tensor(filled - 1, device=kernels.device)},
    }[kind]
    want = attention(query, key, value, **options)
    # Causality multiplies hidden values by zero, as PyTorch does: only whole tiles are unread then.
    first_bad = 64 if kind == "offset" else filled
    for tensor in (key, value):
        tensor[:, :, first_bad:] = math.nan
    assert torch.equal(attention(query, key, value, **options), want)


def test_the_same_whatever_the_shares(rng: torch.Generator, kernels: KernelRun, decoding: Decoding) -> None:
    tensors, options = draw(Case("", 1, 130, heads=4, masks="padding"), torch.float32, rng)
    there, options = [tensor.to(kernels.device) for tensor in tensors], on(kernels.device, options)
    results = []
    for splits in (1, 3, 7):
        decoding(splits)
        results.append(attention(*there, return_logsumexp=True, **options))
    for result in results[1:]:
        for one, other in zip(result, results[0]):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_an_offset_in_memory_is_read_when_it_runs(rng: torch.Generator, kernels: KernelRun, decoding: Decoding) -> None:
    decoding(2)
    tensors, _ = draw(Case("", 1, 70, heads=4), torch.float32, rng)
    operands = [tensor.to(kernels.device) for tensor in tensors]
    offset = torch.tensor([7], device=kernels.device)
    for step in range(2):
        want = attention(*operands, is_causal=True, q_offset=7 + 40 * step)
        assert torch.equal(attention(*operands, is_causal=True, q_offset=offset), want)
        offset += 40


def test_strided_operands(rng: torch.Generator, kernels: KernelRun, decoding: Decoding) -> None:
    """Every second element of everything; keys of a cache laid out [batch, heads, seqlen, dim]."""
    decoding(2)
    tensors, _ = draw(Case("", 2, 70, heads=4), torch.float32, rng)
    query, key, value = (tensor.to(kernels.device) for tensor in tensors)
    want = attention(query, key, value)
    strided = [tensor.contiguous().repeat_interleave(2, -1)[..., ::2] for tensor in (query, key, value)]
    torch.testing.assert_close(attention(*strided), want, rtol=1e-6, atol=1e-6)


# The choice


def test_shares_fill_the_gpu_and_no_more() -> None:
    def shares(batch: int, key_heads: int, seqlen_k: int) -> int:
        return kernel_file.splits_for(batch * key_heads, -(-seqlen_k // 64), 132)

    assert shares(1, 8, 32768) in range(16, 34)  # 128 to 264 programs
    assert shares(64, 8, 32768) <= 3
    assert shares(1, 8, 64) == 1
    assert all(shares(1, 1, length) <= -(-length // 64) for length in (1, 64, 65, 700))


def test_decoding_is_preferred_where_it_reads_less_or_fills_more() -> None:
    def preferred(batch: int, heads: int, key_heads: int, seqlen_q: int, seqlen_k: int) -> bool:
        query, key = (
            torch.empty(batch, count, tokens, 128, dtype=torch.float16, device="meta")
            for count, tokens in ((heads, seqlen_q), (key_heads, seqlen_k))
        )
        scoring = op_file.Scoring()
        configuration = kernel_file.decode_configuration(90, 132, query, key, key, scoring)
        if configuration is None:
            return False
        return kernel_file.prefers_decode(configuration, 132, query, key, 16)

    assert preferred(1, 32, 8, 1, 4096) and preferred(8, 32, 8, 1, 4096) and preferred(64, 32, 8, 1, 512)
    assert preferred(1, 12, 12, 1, 4096)
    assert not preferred(1, 12, 12, 1, 256)  # too few keys to share out
    assert not preferred(64, 32, 32, 1, 512)  # as many programs either way
    assert not preferred(1, 32, 8, 17, 4096)  # too many queries
