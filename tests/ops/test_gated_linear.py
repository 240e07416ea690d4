"""Gated layers: the kernel's alternating columns, the way in two launches, gradients, all PyTorch may do to the op."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import kernl.ops
from kernl.kernels.activation import ACTIVATIONS
from kernl.kernels.linear import LinearConfig, launch_tiles
from kernl.ops.common import ahead_of, compile_ahead, force_reference
from kernl.ops.gated_linear import reference_gated_linear
from kernl.ops.linear import _Problem, apply_activation, default_implementation, implementations, problem_key
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TILES = [
    LinearConfig(16, 16, 256, 4, 4, k_groups=4),
    LinearConfig(32, 32, 128, 4, 4, k_groups=4, split_k=2),
    LinearConfig(64, 64, 64, 4, 4, split_k=4),
]

# input, gate and up weight, gate and up bias
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def draw(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * scale).to(dtype)


def draw_operands(
    rng: torch.Generator,
    shape: tuple[int, ...],
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    biases: bool = True,
) -> Operands:
    inner = shape[-1]
    gate, up = (draw(rng, (columns, inner), dtype, inner**-0.5).to(device) for _ in range(2))
    gate_bias, up_bias = (draw(rng, (columns,), dtype).to(device) if biases else None for _ in range(2))
    return draw(rng, shape, dtype).to(device), gate, up, gate_bias, up_bias


def plain_gated_linear(operands: Operands, activation: str) -> torch.Tensor:
    """The baseline: plain PyTorch, in fp32 sums in the order of K (BLAS libraries choose theirs by shape)."""
    input, gate, up, gate_bias, up_bias = operands
    if input.dtype != torch.float32:
        return reference_gated_linear(*operands, activation)
    products = []
    for weight, bias in ((gate, gate_bias), (up, up_bias)):
        total = torch.zeros(*input.shape[:-1], weight.shape[0], device=input.device)
        for k in range(input.shape[-1]):
            total += input[..., k, None] * weight[:, k]
        products.append(total if bias is None else total + bias)
    return apply_activation(products[0], activation) * products[1]


def check(actual: torch.Tensor, operands: Operands, activation: str) -> None:
    exact = reference_gated_linear(*(None if x is None else x.double() for x in operands), activation)  # type: ignore[arg-type]
    assert_within_budget(actual, exact, plain_gated_linear(operands, activation), name="gated_linear")
    assert actual.is_contiguous()


@pytest.mark.parametrize(("rows", "biases"), [(1, True), (17, False), (130, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", TILES, ids=lambda config: config.name)
def test_tiles(
    kernels: KernelRun, rng: torch.Generator, config: LinearConfig, dtype: torch.dtype, rows: int, biases: bool
) -> None:
    operands = draw_operands(rng, (rows, 333), 39, dtype, kernels.device, biases)
    input, gate, up, gate_bias, up_bias = operands
    output = torch.full((rows, 39), float("nan"), dtype=dtype, device=kernels.device)
    counters = torch.zeros(config.tiles(rows, [78]), dtype=torch.int32, device=kernels.device)
    launch_tiles(config, input, [gate, up], [gate_bias, up_bias], [output], "silu", gated=True, counters=counters)
    check(output, operands, "silu")
    assert kernels.launched("linear_tiles") == 1
    assert not counters.any(), "split-K must leave its counters at zero"


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_rows_take_one_launch(
    kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, activation: str
) -> None:
    operands = draw_operands(rng, (2, 8, 96), 40, dtype, kernels.device, biases=activation != "silu")
    check(kernl.ops.gated_linear(*operands, activation), operands, activation)
    if kernels.device.type == "cpu":
        assert kernels.launched("linear_tiles") == 1 and kernels.launched("linear_activation") == 0


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_many_rows_take_two(kernels: KernelRun, rng: torch.Generator, activation: str) -> None:
    operands = draw_operands(rng, (600, 64), 64, torch.float16, kernels.device)
    check(kernl.ops.gated_linear(*operands, activation), operands, activation)
    if kernels.device.type == "cpu":
        assert kernels.launched("linear_persistent") == kernels.launched("linear_activation") == 1


def problem_of(operands: Operands, rows: int | None = None) -> _Problem:
    input, gate, up, gate_bias, up_bias = operands
    output = input.new_full((input.shape[0], gate.shape[0]), float("nan"))
    return _Problem(input, [gate, up], [gate_bias, up_bias], [output], "silu", gated=True, assumed_rows=rows)


@pytest.mark.parametrize("rows", [7, 70, 300])
def test_every_implementation_is_right(kernels: KernelRun, rng: torch.Generator, rows: int) -> None:
    operands = draw_operands(rng, (rows, 64), 48, torch.float16, kernels.device)
    problem = problem_of(operands)
    ways = implementations(problem)
    assert "cublas" in ways and len(ways) > 2
    for run in ways.values():
        problem.outputs[0].fill_(float("nan"))
        run()
        check(problem.outputs[0], operands, "silu")


def test_one_bias_and_layouts_the_alternating_columns_cannot_take(kernels: KernelRun, rng: torch.Generator) -> None:
    input, gate, up, gate_bias, up_bias = draw_operands(rng, (9, 64), 40, torch.float16, kernels.device)
    transposed = gate.t().contiguous().t()
    wide = torch.cat([up, up], 1)[:, :64]
    for operands in (
        (input, gate, up, gate_bias, None),
        (input, gate, up, None, up_bias),
        (input, transposed, up, None, None),
        (input, gate, wide, gate_bias, up_bias),
        (input.expand(3, 9, 64).transpose(0, 1), gate, up, None, None),
        (input, gate, gate, gate_bias, gate_bias),
    ):
        check(kernl.ops.gated_linear(*operands), operands, "silu")


def test_one_row_and_one_column(kernels: KernelRun, rng: torch.Generator) -> None:
    for shape, columns in (((33,), 150), ((150, 100), 1)):
        operands = draw_operands(rng, shape, columns, torch.float32, kernels.device)
        check(kernl.ops.gated_linear(*operands), operands, "silu")
    operands = draw_operands(rng, (1, 1), 1, torch.float32, kernels.device)
    torch.testing.assert_close(kernl.ops.gated_linear(*operands), reference_gated_linear(*operands, "silu"))


@pytest.mark.parametrize("sizes", [(0, 8, 4), (3, 0, 4), (3, 8, 0)], ids=["no rows", "no inner", "no columns"])
def test_empty(kernels: KernelRun, rng: torch.Generator, sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    input, weight = torch.randn(rows, inner, device=kernels.device), torch.randn(columns, inner, device=kernels.device)
    assert kernl.ops.gated_linear(input, weight, weight).shape == (rows, columns)


def test_choices() -> None:
    """One launch where rows are few; a key of its own, apart from two merged linears of that size."""
    operands: Operands = (
        torch.empty(1, 768, dtype=torch.float16),
        torch.empty(2048, 768, dtype=torch.float16),
        torch.empty(2048, 768, dtype=torch.float16),
        None,
        None,
    )
    for rows in (1, 8, 64, 128):
        assert default_implementation(problem_of(operands, rows)).startswith("tiles"), rows
    gated, merged = problem_of(operands), problem_of(operands)
    object.__setattr__(merged, "gated", False)
    assert problem_key(gated) != problem_key(merged)
    assert "gated_silu" in problem_key(gated)


def test_kernels_are_made_ahead(kernels: KernelRun, rng: torch.Generator) -> None:
    operands = draw_operands(rng, (5, 768), 64, torch.float16, kernels.device)
    pairs = ahead_of(torch.ops.kernl.gated_linear, (*operands, "silu"))
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys) > 2
    merged = ahead_of(torch.ops.kernl.merged_linear, (operands[0], list(operands[1:3]), list(operands[3:])))
    assert {key[2] for key in keys}.isdisjoint(key[2] for key, _ in merged)  # type: ignore[index]
    assert compile_ahead(pairs, workers=1) == []


def test_float64_and_reference_do_not_launch(kernels: KernelRun, rng: torch.Generator) -> None:
    operands = draw_operands(rng, (3, 8), 4, torch.float64, kernels.device)
    input, gate, up, gate_bias, up_bias = operands
    expected = F.silu(F.linear(input, gate, gate_bias)) * F.linear(input, up, up_bias)
    torch.testing.assert_close(kernl.ops.gated_linear(*operands), expected)
    with force_reference():
        kernl.ops.gated_linear(input.float(), gate.float(), up.float())
    assert kernels.launched("linear_tiles") == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_numerically_twice_over(rng: torch.Generator, activation: str) -> None:
    leaves = [
        x.requires_grad_()
        for x in draw_operands(rng, (2, 3, 5), 4, torch.float64, torch.device("cpu"))
        if x is not None
    ]
    op = torch.ops.kernl.gated_linear
    assert torch.autograd.gradcheck(lambda *tensors: op(*tensors, activation), leaves)
    assert torch.autograd.gradcheck(lambda x, gate, up: op(x, gate, up, None, None, activation), leaves[:3])
    assert torch.autograd.gradgradcheck(lambda *tensors: op(*tensors, activation), leaves, fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_through_the_kernels(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype) -> None:
    operands = draw_operands(rng, (30, 32), 200, dtype, kernels.device)
    seed = draw(rng, (30, 200), dtype).to(kernels.device)

    def gradients(function: Callable[..., torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in operands if x is not None]
        return torch.autograd.grad(function(*leaves, "silu"), leaves, seed.to(dtype))

    exact, plain = (gradients(reference_gated_linear, each) for each in (torch.float64, dtype))
    assert_within_budget(gradients(kernl.ops.gated_linear, dtype), exact, plain, name="gated_linear")


def test_gradients_where_few_are_wanted(rng: torch.Generator) -> None:
    input, gate, up, *_ = draw_operands(rng, (3, 5), 4, torch.float64, torch.device("cpu"))
    up.requires_grad_()
    kernl.ops.gated_linear(input, gate, up).sum().backward()
    expected = torch.autograd.grad(reference_gated_linear(input, gate, up, None, None, "silu").sum(), up)[0]
    torch.testing.assert_close(up.grad, expected)
    assert input.grad is None and gate.grad is None


def test_autocast(kernels: KernelRun, rng: torch.Generator) -> None:
    operands = draw_operands(rng, (9, 32), 24, torch.float32, kernels.device)
    with torch.autocast(kernels.device.type, dtype=torch.bfloat16):
        output = kernl.ops.gated_linear(*operands)
    assert output.dtype == torch.bfloat16
    check(output, tuple(x if x is None else x.bfloat16() for x in operands), "silu")  # type: ignore[arg-type]


def test_opcheck_and_symbolic_shapes(rng: torch.Generator) -> None:
    for dtype in (torch.float32, torch.float16):
        operands = draw_operands(rng, (3, 8), 4, dtype, torch.device("cpu"))
        leaves = [x if x is None else x.requires_grad_() for x in operands]
        torch.library.opcheck(torch.ops.kernl.gated_linear.default, (*leaves, "silu"))
        torch.library.opcheck(torch.ops.kernl.gated_linear.default, (*leaves[:3], None, leaves[4], "gelu_tanh"))

    def forward(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.ops.kernl.gated_linear(input, weight, weight, None, None, "silu")

    graph = make_fx(forward, tracing_mode="symbolic")(torch.randn(2, 5, 8), torch.randn(8, 8))
    assert graph(torch.randn(3, 7, 8), torch.randn(8, 8)).shape == (3, 7, 8)


def test_errors_name_the_argument() -> None:
    input, weight = torch.randn(2, 8), torch.randn(4, 8)
    with pytest.raises(ValueError, match=r"up_weight has shape \[3, 8\]; accepted: \[4, 8\], that of gate_weight"):
        kernl.ops.gated_linear(input, weight, weight[:3])
    with pytest.raises(ValueError, match=r"weight is torch\.float16 and input torch\.float32"):
        kernl.ops.gated_linear(input, weight, weight.half())
    with pytest.raises(ValueError, match="activation is 'swish'; accepted: none, gelu"):
        kernl.ops.gated_linear(input, weight, weight, activation="swish")
