"""Attention on a GPU: sizes too slow for the interpreter, every implementation on offer, CUDA graphs, 64-bit offsets.

The tests of tests/ops/test_attention.py run on the GPU as well when there is one; they are not repeated here.
"""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernl.ops.attention import attention, implementations, reference_attention
from kernl.ops.attention_backward import Request, backward_implementations
from kernl.ops.attention_common import op_arguments, scoring_of_op
from kernl.ops.common import ahead_of
from kernl.testing import assert_within_budget, poisoned
from tests.conftest import KernelRun

SIZES = [
    (32, 12, 12, 512, 512, 64),
    (8, 12, 12, 384, 384, 64),
    (1, 12, 12, 16, 16, 64),
    (2, 4, 4, 1000, 777, 40),
    (2, 8, 2, 513, 513, 128),
    (1, 4, 1, 300, 600, 256),
    (1, 2, 2, 130, 130, 200),
    (2, 3, 3, 257, 257, 80),
]


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNL_TUNING", "off")


def draw(rng: torch.Generator, size: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Operands as views of [batch, tokens, heads, head_dim]."""
    batch, heads, key_heads, seqlen_q, seqlen_k, head_dim = size
    shapes = [(batch, seqlen_q, heads, head_dim), (batch, seqlen_k, key_heads, head_dim)]
    return [torch.randn(shape, generator=rng).to("cuda").to(dtype).transpose(1, 2) for shape in (*shapes, shapes[1])]


def padding(rng: torch.Generator, batch: int, seqlen_k: int) -> torch.Tensor:
    lengths = torch.randint(max(1, seqlen_k // 2), seqlen_k + 1, (batch, 1), generator=rng)
    return (torch.arange(seqlen_k) < lengths).to("cuda")


def baseline(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = (query @ key.mT).float() / math.sqrt(query.shape[3])
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    return scores.softmax(-1).to(query.dtype) @ value


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: object) -> list[torch.Tensor]:
    return list(reference_attention(query.double(), key.double(), value.double(), **options))  # type: ignore[arg-type]


def is_pytorchs(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> bool:
    """float32 at full precision beyond head_dim 128; and plain cases that the default gives to cuDNN."""
    scoring = scoring_of_op(*op_arguments(query.shape[3], **options))
    if query.dtype == torch.float32:
        return query.shape[3] > 128
    is_plain = "attn_mask" not in options and "key_padding" not in options
    return is_plain and implementations(query, key, value, scoring)[2] == "cudnn"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("masking", ["none", "causal", "padding", "bias"])
@pytest.mark.parametrize("size", SIZES, ids=lambda size: "x".join(map(str, size)))
def test_forward(
    kernels: KernelRun, rng: torch.Generator, size: tuple[int, ...], masking: str, dtype: torch.dtype
) -> None:
    query, key, value = draw(rng, size, dtype)
    batch, heads, _, seqlen_q, seqlen_k, _ = size
    options: dict[str, object] = {}
    visible = None
    if masking == "causal":
        options["is_causal"] = True
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device="cuda").tril()
    elif masking == "padding":
        options["key_padding"] = padding(rng, batch, seqlen_k)
        visible = options["key_padding"][:, None, None, :]  # type: ignore[index]
    elif masking == "bias":
        options["attn_mask"] = torch.randn(1, heads, seqlen_q, seqlen_k, generator=rng).to("cuda").to(dtype)
    output, logsumexp = attention(query, key, value, return_logsumexp=True, **options)  # type: ignore[call-overload]
    assert kernels.launched("attention_forward") == (0 if is_pytorchs(query, key, value, options) else 1)
    expected, expected_logsumexp = exact(query, key, value, **options)
    plain = (
        F.scaled_dot_product_attention(query, key, value, attn_mask=options["attn_mask"], enable_gqa=True)  # type: ignore[arg-type]
        if masking == "bias"
        else baseline(query, key, value, visible)
    )
    assert_within_budget(output, expected, plain, name="output")
    # Summed in float32 with the GPU's approximate exponential and logarithm. One key of 500 lost would be 2e-3.
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("masking", ["none", "causal", "padding", "mask"])
def test_every_implementation_on_offer(rng: torch.Generator, head_dim: int, masking: str) -> None:
    query, key, value = draw(rng, (2, 4, 4, 300, 300, head_dim), torch.float16)
    key_padding = padding(rng, 2, 300) if masking == "padding" else None
    attn_mask = torch.rand(2, 1, 300, 300, generator=rng).to("cuda") > 0.3 if masking == "mask" else None
    scale, is_causal = 1 / math.sqrt(head_dim), masking == "causal"
    scoring = scoring_of_op(attn_mask, key_padding, scale, is_causal, "zero")
    runs, _, default = implementations(query, key, value, scoring)
    assert default in runs
    visible = attn_mask
    if key_padding is not None:
        visible = key_padding[:, None, None, :]
    if is_causal:
        visible = torch.ones(300, 300, dtype=torch.bool, device="cuda").tril()
    expected, expected_logsumexp = exact(
        query, key, value, attn_mask=attn_mask, key_padding=key_padding, is_causal=is_causal
    )
    plain = baseline(query, key, value, visible)
    failures = []
    for name, run in runs.items():
        try:
            with poisoned():
                output, logsumexp = run()
            assert output.transpose(1, 2).is_contiguous() and logsumexp.shape == (2, 4, 300)
            assert_within_budget(output, expected, plain, name=name)
            # PyTorch's own kernels are among them, and are not ours to bound closer. One key of 300 lost is 3e-3.
            torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-3, atol=1e-3)
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n\n".join(failures)


def test_tf32_follows_either_switch(rng: torch.Generator) -> None:
    query, key, value = draw(rng, (1, 2, 2, 200, 200, 64), torch.float32)
    expected = exact(query, key, value)[0]
    before = torch.backends.cuda.matmul.fp32_precision
    errors = {}
    try:
        for precision in ("ieee", "tf32"):
            torch.backends.cuda.matmul.fp32_precision = precision
            errors[precision] = (attention(query, key, value) - expected).abs().max().item()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert errors["ieee"] < 1e-5 < errors["tf32"] < 1e-2


def test_in_a_cuda_graph(rng: torch.Generator) -> None:
    query, key, value = draw(rng, (2, 12, 12, 128, 128, 64), torch.float16)
    key_padding = padding(rng, 2, 128)
    attention(query, key, value, key_padding=key_padding)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Dependent launches: the second reads what the first has written.
        first = attention(query, key, value, key_padding=key_padding)
        second = attention(first, key, value, key_padding=key_padding)
    for _ in range(3):
        for tensor, fresh in zip((query, key, value), draw(rng, (2, 12, 12, 128, 128, 64), torch.float16)):
            tensor.copy_(fresh)
        key_padding.copy_(padding(rng, 2, 128))
        graph.replay()
        expected = attention(query, key, value, key_padding=key_padding)
        torch.testing.assert_close(first, expected, rtol=0, atol=0)
        torch.testing.assert_close(second, attention(expected, key, value, key_padding=key_padding), rtol=0, atol=0)


def test_padding_saves_time_and_nan_there_is_harmless(rng: torch.Generator) -> None:
    query, key, value = draw(rng, (4, 12, 12, 512, 512, 64), torch.float16)
    key_padding = padding(rng, 4, 512)
    clean = attention(query, key, value, key_padding=key_padding)
    bad = ~key_padding[:, None, :, None]
    dirty = attention(query, key.masked_fill(bad, math.nan), value.masked_fill(bad, math.nan), key_padding=key_padding)
    assert torch.equal(clean, dirty)


def test_offsets_beyond_32_bits() -> None:
    """More than 2**31 elements in key and value, and rows of the mask further apart than that."""
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    heads, tokens, head_dim = 300, 131_072, 64
    key = torch.zeros(1, tokens, heads, head_dim, dtype=torch.float16, device="cuda")
    key[:, :, -1].normal_()
    key = key.transpose(1, 2)
    query = torch.randn(1, heads, 5, head_dim, dtype=torch.float16, device="cuda")
    output = attention(query, key, key)[:, -1:]
    expected = F.scaled_dot_product_attention(query[:, -1:].float(), key[:, -1:].float(), key[:, -1:].float())
    # Results rounded to float16: half a step is 5e-4 of them, and of the probabilities that went in.
    torch.testing.assert_close(output.float(), expected, rtol=2e-3, atol=2e-3)
    assert torch.equal(attention(query, key, key)[:, 0], torch.zeros_like(query[:, 0]))


def test_what_is_known_to_be_faster_is_compiled_ahead(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    op_module = importlib.import_module("kernl.ops.attention")
    query, key, value = draw(rng, (2, 4, 4, 100, 100, 64), torch.float16)
    arguments = op_arguments(64, key_padding=padding(rng, 2, 100))
    runs, _, default = implementations(query, key, value, scoring_of_op(*arguments))
    faster = next(name for name in reversed(runs) if name.startswith("m64n") and name != default)

    def compiled_ahead() -> set[str]:
        pairs = ahead_of(torch.ops.kernl.attention, (query, key, value, *arguments))
        return {tiling.name for (tiling, *_), _ in pairs}

    assert default in compiled_ahead() and faster not in compiled_ahead()
    monkeypatch.setattr(op_module, "known_choice", lambda op, problem, names: faster if 512 in problem else None)
    assert {default, faster} <= compiled_ahead()


def test_wide_row_stride() -> None:
    """Token stride of a [seqlen, batch, heads, dim] layout so wide that one tile spans more than 2**31 elements."""
    if torch.cuda.mem_get_info()[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB of free GPU memory")
    stride, tokens = 2**25 + 8, 80
    storage = torch.zeros(stride * tokens, dtype=torch.float16, device="cuda")
    key = storage.as_strided((1, 1, tokens, 64), (64, 64, stride, 1))
    key.normal_()
    query = torch.randn(1, 1, 7, 64, dtype=torch.float16, device="cuda")
    expected = attention(query, key.contiguous(), key.contiguous())
    # The same numbers from another layout, for which another tiling may be chosen: one step of float16 near 1.
    torch.testing.assert_close(attention(query, key, key), expected, rtol=0, atol=1e-3)


def test_gradients(rng: torch.Generator) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in draw(rng, (2, 4, 2, 200, 300, 64), torch.float32)]
    key_padding = padding(rng, 2, 300)
    grad = torch.randn(2, 4, 200, 64, generator=rng).to("cuda")
    actual = torch.autograd.grad(attention(*leaves, key_padding=key_padding), leaves, grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in leaves]
    expected = torch.autograd.grad(reference_attention(*wide, key_padding=key_padding)[0], wide, grad.double())
    for one, other in zip(actual, expected):
        # float32: sums of at most 300 products, which err by some 300 of its steps of 1e-7 at the worst.
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


BACKWARD_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {"is_causal": True, "key_heads": 2},
    "window": {"window": (60, 20)},
    "padding": {"key_padding": True},
    "bool mask": {"attn_mask": "bool"},
    "bias with gradient": {"attn_mask": "float"},
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
@pytest.mark.parametrize("case", BACKWARD_CASES)
def test_every_backward_implementation_on_offer(
    rng: torch.Generator, case: str, head_dim: int, dtype: torch.dtype
) -> None:
    options = dict(BACKWARD_CASES[case])
    batch, heads, seqlen_q, seqlen_k = 2, 4, 190, 190
    query, key, value = draw(rng, (batch, heads, options.pop("key_heads", heads), seqlen_q, seqlen_k, head_dim), dtype)
    grad = torch.randn(query.shape, generator=rng).to("cuda").to(dtype)
    visible = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool, device="cuda")
    offsets = torch.arange(seqlen_k, device="cuda") - torch.arange(seqlen_q, device="cuda")[:, None]
    if options.get("is_causal"):
        visible = visible & (offsets <= 0)
    if "window" in options:
        visible = visible & (offsets >= -60) & (offsets <= 20)
    if "key_padding" in options:
        options["key_padding"] = padding(rng, batch, seqlen_k)
        visible = visible & options["key_padding"][:, None, None, :]
    mask_kind = options.pop("attn_mask", None)
    bias = None
    if mask_kind == "bool":
        visible = options["attn_mask"] = torch.rand(batch, 1, seqlen_q, seqlen_k, generator=rng).to("cuda") > 0.3
    elif mask_kind == "float":
        bias = options["attn_mask"] = torch.randn(1, heads, seqlen_q, seqlen_k, generator=rng).to("cuda").to(dtype)

    def gradients_by_autograd(kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(kind).requires_grad_() for tensor in (query, key, value)]
        added = torch.zeros(visible.shape, dtype=kind, device="cuda").masked_fill(~visible, -math.inf)
        if bias is not None:
            leaves.append(bias.detach().to(kind).requires_grad_())
            added = leaves[3]
        with sdpa_kernel(SDPBackend.MATH):
            output = F.scaled_dot_product_attention(*leaves[:3], attn_mask=added, enable_gqa=True)
        return list(torch.autograd.grad(output, leaves, grad.to(kind)))

    expected, plain = gradients_by_autograd(torch.float64), gradients_by_autograd(dtype)
    output, logsumexp = attention(query, key, value, return_logsumexp=True, **options)
    scoring = scoring_of_op(*op_arguments(head_dim, **options))
    request = Request(query, key, value, scoring, output, logsumexp, grad, None, bias is not None, False)
    runs, _, _ = backward_implementations(request)
    if head_dim == 256 and (mask_kind is not None or "window" in options):
        assert list(runs) == ["pytorch"]  # no tiling fits beside heads that wide
        return
    assert len(runs) > 1, "kernels are on offer"
    failures = []
    for name, run in runs.items():
        try:
            with poisoned():
                found = run()
            again = run()
            for part, got, same, want, base in zip(("query", "key", "value", "bias"), found, again, expected, plain):
                assert_within_budget(got, want, base, name=f"{name}: gradient of {part}")
                assert torch.equal(got, same), f"{name}: the gradient of {part} differs from run to run"
        except (AssertionError, RuntimeError) as error:
            failures.append(f"{name}: {error}")
    assert not failures, "\n\n".join(failures)


def test_compiled_by_inductor_with_symbolic_shapes(rng: torch.Generator) -> None:
    def block(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.ops.kernl.attention(query, key, value, None, None, 0.125, False, "zero")[0]
        return F.gelu(output.transpose(1, 2).reshape(query.shape[0], query.shape[2], -1))

    compiled = torch.compile(block, dynamic=True)
    for tokens in (40, 77):
        operands = draw(rng, (2, 4, 4, tokens, tokens, 64), torch.float16)
        # Inductor computes the GELU in float32, eager rounds to float16 before it: two of its steps, of 1e-3.
        torch.testing.assert_close(compiled(*operands), block(*operands), rtol=2e-3, atol=2e-3)


# Decoding


@pytest.mark.parametrize("size", [(1, 32, 8), (8, 32, 8), (2, 12, 12), (3, 8, 1)], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 512), (1, 4097), (4, 1000), (16, 9000)])
def test_decoding(
    kernels: KernelRun, rng: torch.Generator, size: tuple[int, int, int], seqlen_q: int, seqlen_k: int
) -> None:
    """A static cache of which the first two thirds are filled."""
    batch, heads, key_heads = size
    query, key, value = draw(rng, (batch, heads, key_heads, seqlen_q, seqlen_k, 128), torch.bfloat16)
    offset = torch.tensor(seqlen_k * 2 // 3, device="cuda")
    output, logsumexp = attention(query, key, value, is_causal=True, q_offset=offset, return_logsumexp=True)
    assert kernels.launched("attention_decode") + kernels.launched("attention_forward") == 1
    expected, expected_logsumexp = exact(query, key, value, is_causal=True, q_offset=offset)
    visible = torch.arange(seqlen_k, device="cuda") <= torch.arange(seqlen_q, device="cuda")[:, None] + offset
    assert_within_budget(output, expected, baseline(query, key, value, visible), name="output")
    # Summed in float32, in parts that are joined: a lost part shows here, one key of thousands in the output above.
    torch.testing.assert_close(logsumexp.double(), expected_logsumexp, rtol=1e-4, atol=1e-4)


def test_decoding_in_a_cuda_graph_follows_the_offset(rng: torch.Generator) -> None:
    query, key, value = draw(rng, (2, 32, 8, 1, 4096, 128), torch.float16)
    offset = torch.tensor([100], device="cuda")
    attention(query, key, value, is_causal=True, q_offset=offset)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = attention(query, key, value, is_causal=True, q_offset=offset)
    for position in (0, 63, 64, 2000, 4095):
        offset.fill_(position)
        graph.replay()
        expected = exact(query, key[:, :, : position + 1], value[:, :, : position + 1])[0]
        # Rounded to float16: half a step is 5e-4 of the result, and of the probabilities that went in.
        torch.testing.assert_close(output.double(), expected, rtol=2e-3, atol=2e-3)


# Dropout


def test_a_replayed_graph_drops_anew_and_the_backward_pass_the_same(rng: torch.Generator) -> None:
    leaves = [tensor.detach().requires_grad_() for tensor in draw(rng, (2, 4, 4, 128, 128, 64), torch.float16)]

    def step() -> tuple[torch.Tensor, ...]:
        output = attention(*leaves, dropout_p=0.5)
        return output.detach(), *torch.autograd.grad(output.float().sum(), leaves)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    outputs = []
    for _ in range(3):
        graph.replay()
        outputs.append(results[0].clone())
        # <dV, V> = <dO, out> only if the same probabilities were dropped in both directions.
        forward, backward = results[0].double().sum(), (results[3].double() * leaves[2].detach().double()).sum()
        # Sums of 65,536 products rounded to float16, in the thousands; with other masks they are some 40 apart.
        torch.testing.assert_close(backward, forward, rtol=1e-2, atol=1.0)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_dropout_is_that_of_the_reference(rng: torch.Generator, kernels: KernelRun, head_dim: int) -> None:
    query, key, value = draw(rng, (2, 4, 2, 300, 333, head_dim), torch.float32)
    options: dict[str, Any] = {"dropout_p": 0.3, "seed": torch.tensor([17], device="cuda")}
    options["offset"] = torch.tensor([5], device="cuda")
    output = attention(query, key, value, **options)
    assert kernels.launched("attention_forward") == 1
    torch.testing.assert_close(output.double(), exact(query, key, value, **options)[0], rtol=1e-4, atol=1e-4)


# Packed sequences


def test_packed_sequences(rng: torch.Generator, kernels: KernelRun) -> None:
    lengths = torch.tensor([700, 0, 64, 129, 1, 2000])
    total = int(lengths.sum())
    query, key, value = draw(rng, (1, 8, 2, total, total, 64), torch.float16)
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to("cuda", torch.int32)
    options: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "is_causal": True}
    options |= {"max_seqlen_q": 2000, "max_seqlen_k": 2000}
    output = attention(query, key, value, **options)
    assert kernels.launched("attention_forward") == 1
    sequence = torch.repeat_interleave(torch.arange(6), lengths).to("cuda")
    visible = (sequence[:, None] == sequence) & torch.ones(total, total, dtype=torch.bool, device="cuda").tril()
    expected = exact(query, key, value, **options)[0]
    assert_within_budget(output, expected, baseline(query, key, value, visible), name="packed")
