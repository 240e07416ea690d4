"""Norms on a GPU: shapes too slow for the interpreter, CUDA graphs, dependent launches, autocast, 64-bit offsets.

The tests of tests/ops/test_norm.py run on the GPU as well when there is one; they are not repeated here.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import kernl.ops
from kernl.kernels.common import launches
from kernl.ops.norm import reference_add_layer_norm, reference_layer_norm
from kernl.ops.rms_norm import reference_add_rms_norm, reference_rms_norm
from kernl.testing import assert_within_budget, poisoned
from tests.conftest import KernelRun

EPSILON = 1e-5


def draw(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=rng) * 2 + 1).to("cuda").to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 16, 768), (1, 384, 768), (32, 512, 768), (4096, 1024), (5000, 40), (4096, 1000), (700, 4097), (3000, 8192),
     (50, 16384), (40, 30000), (9, 65536)],
    ids=lambda shape: "x".join(map(str, shape)),
)  # fmt: skip
def test_norms(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    input, residual = draw(rng, shape, dtype), draw(rng, shape, dtype)
    weight, bias = draw(rng, shape[-1:], dtype), draw(rng, shape[-1:], dtype)
    exact = reference_layer_norm(input.double(), weight.double(), bias.double(), EPSILON)
    baseline = reference_layer_norm(input, weight, bias, EPSILON)
    assert_within_budget(kernl.ops.layer_norm(input, weight, bias, EPSILON), exact, baseline, name="layer_norm")

    plain, plain_sum = reference_add_layer_norm(input, residual, weight, bias, EPSILON)
    exact = reference_layer_norm(plain_sum.double(), weight.double(), bias.double(), EPSILON)
    output, total = kernl.ops.add_layer_norm(input, residual, weight, bias, EPSILON)
    assert torch.equal(total, plain_sum)
    assert_within_budget(output, exact, plain, name="add_layer_norm")
    assert torch.equal(torch.ops.kernl.layer_norm_of_sum(input, residual, weight, bias, EPSILON), output)
    assert kernels.launched("layer_norm") == 1 and kernels.launched("add_layer_norm") == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(1, 16, 512), (1, 1, 4096), (8, 512, 768), (2, 32, 300, 128), (5000, 40), (700, 4097), (50, 16384), (9, 65536)],
    ids=lambda shape: "x".join(map(str, shape)),
)
def test_rms_norms(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    input, residual = draw(rng, shape, dtype), draw(rng, shape, dtype)
    weight = draw(rng, shape[-1:], dtype)
    options = (EPSILON, 1.0, dtype)
    exact = reference_rms_norm(input.double(), weight.double(), EPSILON, 1.0, torch.float64)
    actual = kernl.ops.rms_norm(input, weight, EPSILON, weight_offset=1.0)
    assert_within_budget(actual, exact, reference_rms_norm(input, weight, *options), name="rms_norm")

    plain, plain_sum = reference_add_rms_norm(input, residual, weight, *options)
    exact = reference_rms_norm(plain_sum.double(), weight.double(), EPSILON, 1.0, torch.float64)
    output, total = kernl.ops.add_rms_norm(input, residual, weight, EPSILON, weight_offset=1.0)
    assert torch.equal(total, plain_sum)
    assert_within_budget(output, exact, plain, name="add_rms_norm")
    assert torch.equal(torch.ops.kernl.rms_norm_of_sum(input, residual, weight, *options), output)
    assert kernels.launched("rms_norm") == 1 and kernels.launched("add_rms_norm") == 2


def test_the_residual_stream_of_t5_in_a_cuda_graph() -> None:
    """fp16 and fp32 in, fp32 sum and fp16 norm out, weights read before the launch in front has finished."""
    norms = torch.nn.ModuleList(torch.nn.RMSNorm(512, eps=EPSILON) for _ in range(6)).cuda().half()
    static = torch.zeros(300, 512, dtype=torch.float16, device="cuda")

    def chain(op) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
        x, stream = static, static.float()
        for norm in norms:
            x, stream = op(x, stream, norm.weight, EPSILON, 0.0, torch.float16)
        return x, stream

    with torch.no_grad():
        chain(torch.ops.kernl.add_rms_norm)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(torch.ops.kernl.add_rms_norm)
        for _ in range(3):
            static.copy_(torch.randn(300, 512, device="cuda"))
            for norm in norms:
                norm.weight.copy_(torch.randn(512, device="cuda") * 0.1 + 1)
            graph.replay()
            torch.testing.assert_close(captured, chain(reference_add_rms_norm), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_of_the_models_formula(dtype: torch.dtype) -> None:
    """Autocast changes no cast of Llama's module, and nothing in the op that stands for it."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm, half = LlamaRMSNorm(64, EPSILON).cuda(), torch.randn(8, 64, device="cuda").to(dtype)
    with torch.autocast("cuda", dtype=dtype):
        expected = norm(half)
        actual = kernl.ops.rms_norm(half, norm.weight, EPSILON, dtype=expected.dtype)
    assert actual.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=2**-7, atol=1e-5)


def test_offsets_beyond_32_bits() -> None:
    rows, columns = 70_000, 32_768  # more than 2**31 elements
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB of free GPU memory")
    input = torch.zeros(rows, columns, dtype=torch.float16, device="cuda")
    input[-1] = torch.randn(columns, device="cuda", dtype=torch.float16)
    with poisoned():
        output = kernl.ops.layer_norm(input)
    torch.testing.assert_close(output[-1], F.layer_norm(input[-1], (columns,)), rtol=2e-3, atol=2e-3)
    assert output[:-1].abs().max() == 0


@pytest.mark.parametrize("rows", [4, 300, 20_000])
def test_in_a_cuda_graph_with_parameters_changed_in_place(rows: int) -> None:
    """A chain of dependent launches: each norm reads what the one before wrote, and the weights are read early."""
    norms = torch.nn.ModuleList(torch.nn.LayerNorm(768) for _ in range(6)).cuda().half()
    static = torch.zeros(rows, 768, dtype=torch.float16, device="cuda")

    def chain(function_norm, x: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        residual = x
        for norm in norms:
            x, residual = function_norm(x, residual, norm.weight, norm.bias, EPSILON)
            x = x * 1.5  # a kernel of PyTorch's in between, launched without PDL
        return x

    with torch.no_grad():
        chain(torch.ops.kernl.add_layer_norm, static)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(torch.ops.kernl.add_layer_norm, static)
        before = sum(launches.values())
        for step in range(5):
            static.copy_(torch.randn(rows, 768, device="cuda"))
            for norm in norms:
                norm.weight.copy_(torch.randn(768, device="cuda") * 0.1 + 1)
                norm.bias.data.fill_(0.1 * step)  # does not count as a new version of the tensor
            graph.replay()
            expected = chain(reference_add_layer_norm, static)
            torch.testing.assert_close(captured, expected, rtol=1e-2, atol=1e-2)
        assert sum(launches.values()) == before


def test_many_replays_of_dependent_launches_agree() -> None:
    """Races between a kernel and its early-started successor would show as results that differ."""
    weight, bias = (torch.nn.Parameter(torch.randn(768, device="cuda").half()) for _ in range(2))
    x = torch.randn(512, 768, device="cuda").half()

    def chain() -> torch.Tensor:
        output = total = x
        for _ in range(30):
            output, total = torch.ops.kernl.add_layer_norm(output, total, weight, bias, EPSILON)
        return output

    with torch.no_grad():
        expected = chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain()
        for _ in range(200):
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_gives_the_dtypes_of_plain_pytorch(dtype: torch.dtype) -> None:
    norm = torch.nn.LayerNorm(64).cuda()
    half, single = torch.randn(8, 64, device="cuda").to(dtype), torch.randn(8, 64, device="cuda")
    with torch.autocast("cuda", dtype=dtype):
        expected = norm(half)
        actual = kernl.ops.layer_norm(half, norm.weight, norm.bias, norm.eps)
        assert actual.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(actual, expected)
        for residual in (half, single):
            plain_sum = half + residual
            output, total = torch.ops.kernl.add_layer_norm(half, residual, norm.weight, norm.bias, norm.eps)
            assert total.dtype == plain_sum.dtype and torch.equal(total, plain_sum)
            assert output.dtype == torch.float32
            torch.testing.assert_close(output, norm(plain_sum))


def test_weights_of_another_dtype_where_plain_pytorch_refuses() -> None:
    half, norm = torch.randn(8, 64, device="cuda").half(), torch.nn.LayerNorm(64).cuda()
    output = kernl.ops.layer_norm(half, norm.weight, norm.bias)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output, norm(half.float()).half())


def test_under_inductor_with_changing_shapes() -> None:
    norm = torch.nn.LayerNorm(96).cuda().half()

    def block(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, total = torch.ops.kernl.add_layer_norm(x * 2, y.transpose(0, 1), norm.weight, norm.bias, norm.eps)
        return torch.tanh(output), total

    compiled = torch.compile(block, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for batch, length in ((3, 5), (7, 11), (64, 128)):
            x = torch.randn(batch, length, 96, device="cuda").half()
            y = torch.randn(length, batch, 96, device="cuda").half()
            torch.testing.assert_close(compiled(x, y), block(x, y), rtol=2e-3, atol=2e-3)


def test_gradients_match_float64(rng: torch.Generator) -> None:
    given = [draw(rng, (64, 768), torch.float16), draw(rng, (64, 768), torch.float16),
             draw(rng, (768,), torch.float16), draw(rng, (768,), torch.float16)]  # fmt: skip
    grad = draw(rng, (64, 768), torch.float16)

    def gradients(op, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
        output, total = op(*leaves, EPSILON)
        return torch.autograd.grad((output, total), leaves, (grad.to(dtype), grad.to(dtype)))

    assert_within_budget(
        gradients(torch.ops.kernl.add_layer_norm, torch.float16),
        gradients(reference_add_layer_norm, torch.float64),
        gradients(reference_add_layer_norm, torch.float16),
        name="gradients",
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_on_a_device_that_is_not_the_current_one() -> None:
    x = torch.randn(8, 64, device="cuda:1")
    torch.testing.assert_close(kernl.ops.layer_norm(x), F.layer_norm(x, (64,)))
