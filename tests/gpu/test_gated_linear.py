"""Gated layers on the GPU: every implementation at the sizes of T5 and Llama, and in CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import kernl.ops
from kernl.ops.gated_linear import reference_gated_linear
from kernl.ops.linear import _Problem, implementations
from kernl.runtime.tuning import defaults_only
from kernl.testing import assert_within_budget
from tests.ops.test_gated_linear import Operands, check

DEVICE = torch.device("cuda")


def make_operands(rows: int, inner: int, columns: int, dtype: torch.dtype, biases: bool) -> Operands:
    gate, up = ((torch.randn(columns, inner, device=DEVICE) * inner**-0.5).to(dtype) for _ in range(2))
    gate_bias, up_bias = (torch.randn(columns, device=DEVICE).to(dtype) if biases else None for _ in range(2))
    return torch.randn(rows, inner, device=DEVICE).to(dtype), gate, up, gate_bias, up_bias


def problem_of(operands: Operands, activation: str) -> _Problem:
    input, gate, up, gate_bias, up_bias = operands
    output = torch.full((input.shape[0], gate.shape[0]), float("nan"), device=DEVICE, dtype=input.dtype)
    return _Problem(input, [gate, up], [gate_bias, up_bias], [output], activation, gated=True)


@pytest.mark.parametrize("rows", [1, 16, 60, 128, 200, 1000, 2100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(512, 1024), (768, 2048), (4096, 3000), (200, 72)], ids=str)
def test_every_implementation(size: tuple[int, int], dtype: torch.dtype, rows: int) -> None:
    operands = make_operands(rows, *size, dtype, biases=size == (768, 2048))
    problem = problem_of(operands, "silu")
    for run in implementations(problem).values():
        problem.outputs[0].fill_(float("nan"))
        run()
        check(problem.outputs[0], operands, "silu")


@pytest.mark.parametrize("sizes", [(33, 100, 50), (7, 33, 65), (300, 60, 36), (5, 1, 1), (1, 4097, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sizes_that_are_multiples_of_nothing(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    operands = make_operands(*sizes, dtype, biases=True)
    problem = problem_of(operands, "gelu_tanh")
    for run in implementations(problem).values():
        problem.outputs[0].fill_(float("nan"))
        run()
        check(problem.outputs[0], operands, "gelu_tanh")


@pytest.mark.parametrize("rows", [1, 128, 1024])
def test_in_a_cuda_graph(rows: int) -> None:
    operands = make_operands(rows, 768, 2048, torch.float16, biases=False)
    with defaults_only(), torch.no_grad():
        kernl.ops.gated_linear(*operands, "gelu_tanh")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = kernl.ops.gated_linear(*operands, "gelu_tanh")
    for _ in range(3):
        operands[0].copy_(torch.randn_like(operands[0]))
        output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        check(output, operands, "gelu_tanh")


def test_split_k_is_the_same_every_time() -> None:
    problem = problem_of(make_operands(48, 4096, 512, torch.float16, biases=False), "silu")
    for name, run in implementations(problem).items():
        if "split" in name:
            results = []
            for _ in range(5):
                run()
                results.append(problem.outputs[0].clone())
            assert all(torch.equal(result, results[0]) for result in results), name


def test_gradients_match_float64() -> None:
    operands = make_operands(64, 256, 512, torch.float16, biases=True)
    seed = torch.randn(64, 512, device=DEVICE)

    def gradients(op, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
        leaves = [x.to(dtype).requires_grad_() for x in operands if x is not None]
        return torch.autograd.grad(op(*leaves, "silu"), leaves, seed.to(dtype))

    exact, plain = (gradients(reference_gated_linear, dtype) for dtype in (torch.float64, torch.float16))
    assert_within_budget(gradients(kernl.ops.gated_linear, torch.float16), exact, plain, name="gated_linear")
