"""Linear layers: activations on every bit pattern, kernels against float64, the op under all PyTorch may do to it."""

from __future__ import annotations

import importlib
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import kernl.ops
from kernl.kernels.activation import ACTIVATIONS
from kernl.kernels.common import launches
from kernl.kernels.linear import (
    LinearConfig,
    configs,
    fits_descriptors,
    launch_activation,
    launch_persistent,
    launch_tiles,
)
from kernl.ops.common import ahead_of, force_reference
from kernl.ops.linear import (
    _HOPPER_COSTS,
    _Counters,
    _Problem,
    apply_activation,
    default_implementation,
    implementations,
    problem_key,
    reference_linear,
    reference_merged_linear,
)
from kernl.runtime.capture_order import capturing_in_turn
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ROWS = [1, 5, 16, 17, 130]

TILES = [
    LinearConfig(16, 16, 256, 4, 4, k_groups=4),
    LinearConfig(32, 32, 128, 4, 4, k_groups=4, split_k=2),
    LinearConfig(64, 32, 128, 4, 4),
    LinearConfig(64, 64, 64, 4, 4, split_k=4),
]
PERSISTENT = [
    LinearConfig(64, 64, 64, 4, 6, persistent=True),
    LinearConfig(64, 128, 64, 4, 4, persistent=True, programs_per_sm=2),
    LinearConfig(128, 128, 64, 8, 4, persistent=True, store_n=128),
    LinearConfig(128, 256, 64, 8, 3, persistent=True, store_n=256),
]

Operands = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]


def draw(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * scale).to(dtype)


def draw_operands(
    rng: torch.Generator, rows: int, inner: int, columns: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Operands:
    input = draw(rng, (rows, inner), dtype).to(device)
    weights = [draw(rng, (n, inner), dtype, inner**-0.5).to(device) for n in columns]
    biases: list[torch.Tensor | None] = [draw(rng, (n,), dtype).to(device) for n in columns]
    return input, weights, biases


def outputs_for(input: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.full((input.shape[0], weight.shape[0]), float("nan"), dtype=input.dtype, device=input.device)
        for weight in weights
    ]


def plain_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    """The baseline: plain PyTorch, in fp32 a sum in the order of K.

    A product in fp32 is as precise as its order of summation, which BLAS libraries choose by shape.
    """
    if input.dtype != torch.float32:
        return reference_linear(input, weight, bias, activation)
    total = torch.zeros(*input.shape[:-1], weight.shape[0], device=input.device)
    for k in range(input.shape[-1]):
        total += input[..., k, None] * weight[:, k]
    return apply_activation(total if bias is None else total + bias, activation)


def check(
    actual: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> None:
    exact = reference_linear(input.double(), weight.double(), None if bias is None else bias.double(), activation)
    assert_within_budget(actual, exact, plain_linear(input, weight, bias, activation), name="linear")
    assert actual.is_contiguous()


# Activations


def all_bit_patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit float type, infinities and NaN too."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).clone()


def unit_in_the_last_place(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Spacing of the numbers of `dtype` around each float64 value, the subnormal ones included."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp_min(info.tiny))[1] - 1
    return info.eps * torch.exp2(exponent.double())


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_activation_on_every_bit_pattern(kernels: KernelRun, dtype: torch.dtype, activation: str) -> None:
    inputs = all_bit_patterns(dtype)
    values = inputs.clone().to(kernels.device)
    launch_activation(values, activation)
    exact = apply_activation(inputs.double(), activation)
    if activation == "gelu":
        # Without the cancellation in 1 + erf.
        exact = inputs.double() * torch.special.erfc(-inputs.double() * 0.5**0.5) / 2
    elif activation == "gelu_tanh":
        x = inputs.double()
        exact = x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))

    actual = values.cpu()
    rounded = exact.to(dtype)
    finite = rounded.isfinite()
    assert torch.equal(actual.isnan(), rounded.isnan())
    assert torch.equal(actual[~finite & ~rounded.isnan()], rounded[~finite & ~rounded.isnan()])
    error = (actual.double() - exact).abs()[finite]
    # Half a unit is the rounding itself. The GELU's own error is stated in units of fp16 for both types.
    allowed = 0.5 * unit_in_the_last_place(exact[finite], dtype)
    allowed += (0.15 if activation == "gelu" else 0.01) * unit_in_the_last_place(exact[finite], torch.float16)
    worst = int((error / allowed).argmax())
    assert bool((error <= allowed).all()), (
        f"{activation}({inputs[finite][worst]}) = {actual[finite][worst]}, float64 {exact[finite][worst]}: "
        f"{float(error[worst] / allowed[worst]):.2f} x the allowed error"
    )


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
@pytest.mark.parametrize("activation", [name for name in ACTIVATIONS if name != "none"])
def test_activation_in_fp32(kernels: KernelRun, rng: torch.Generator, activation: str) -> None:
    inputs = torch.cat([draw(rng, (2000,), torch.float32, scale) for scale in (1e-4, 1.0, 8.0)])
    values = inputs.clone().to(kernels.device)
    launch_activation(values, activation)
    exact = apply_activation(inputs.double(), activation)
    assert_within_budget(values.cpu(), exact, apply_activation(inputs, activation), name=activation)


# Kernels


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", TILES, ids=lambda config: config.name)
def test_tiles(kernels: KernelRun, rng: torch.Generator, config: LinearConfig, dtype: torch.dtype, rows: int) -> None:
    input, weights, biases = draw_operands(rng, rows, 333, (39,), dtype, kernels.device)
    outputs = outputs_for(input, weights)
    counters = torch.zeros(config.tiles(rows, [39]), dtype=torch.int32, device=kernels.device)
    launch_tiles(config, input, weights, biases, outputs, "gelu", counters=counters)
    check(outputs[0], input, weights[0], biases[0], "gelu")
    assert kernels.launched("linear_tiles") == 1
    assert not counters.any(), "split-K must leave its counters at zero"


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", PERSISTENT, ids=lambda config: config.name)
def test_persistent(
    kernels: KernelRun, rng: torch.Generator, config: LinearConfig, dtype: torch.dtype, rows: int
) -> None:
    input, weights, biases = draw_operands(rng, rows, 200, (328,), dtype, kernels.device)
    outputs = outputs_for(input, weights)
    launch_persistent(config, input, weights, biases, outputs, "gelu", sm_count=2)
    check(outputs[0], input, weights[0], biases[0], "gelu")
    assert kernels.launched("linear_persistent") == 1


@pytest.mark.parametrize("with_biases", ["all", "some", "none"])
@pytest.mark.parametrize("config", [TILES[0], TILES[1], PERSISTENT[0], PERSISTENT[2]], ids=lambda config: config.name)
def test_merged_weights_of_unequal_width(
    kernels: KernelRun, rng: torch.Generator, config: LinearConfig, with_biases: str
) -> None:
    columns = (72, 8, 200, 64)
    for count in (2, 4):
        input, weights, biases = draw_operands(rng, 37, 72, columns[:count], torch.float16, kernels.device)
        if with_biases != "all":
            biases = [bias if with_biases == "some" and index % 2 else None for index, bias in enumerate(biases)]
        outputs = outputs_for(input, weights)
        if config.persistent:
            launch_persistent(config, input, weights, biases, outputs, "none", sm_count=3)
        else:
            counters = torch.zeros(config.tiles(37, columns), dtype=torch.int32, device=kernels.device)
            launch_tiles(config, input, weights, biases, outputs, "none", counters=counters)
        for output, weight, bias in zip(outputs, weights, biases, strict=True):
            check(output, input, weight, bias, "none")


def test_split_k_is_the_same_every_time(kernels: KernelRun, rng: torch.Generator) -> None:
    config = LinearConfig(16, 16, 64, 4, 4, split_k=4)
    input, weights, biases = draw_operands(rng, 16, 700, (48,), torch.float16, kernels.device)
    counters = torch.zeros(3, dtype=torch.int32, device=kernels.device)
    results = []
    for _ in range(3):
        outputs = outputs_for(input, weights)
        launch_tiles(config, input, weights, biases, outputs, "none", counters=counters)
        results += outputs
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_split_k_without_counters_is_an_error(kernels: KernelRun, rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 16, 64, (48,), torch.float16, kernels.device)
    with pytest.raises(ValueError, match="counters"):
        launch_tiles(TILES[1], input, weights, biases, outputs_for(input, weights), "none")


# The op


@pytest.mark.parametrize(
    "shape", [(1, 64, 48), (5, 33, 7), (17, 100, 33), (2, 9, 64, 40), (130, 96, 72), (300, 64, 128)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    *leading, inner, columns = shape
    input = draw(rng, (*leading, inner), dtype).to(kernels.device)
    weight = draw(rng, (columns, inner), dtype, inner**-0.5).to(kernels.device)
    bias = draw(rng, (columns,), dtype).to(kernels.device)
    check(kernl.ops.linear(input, weight, bias), input, weight, bias, "none")
    check(kernl.ops.linear(input, weight, None, "silu"), input, weight, None, "silu")
    if kernels.device.type == "cpu" and (dtype != torch.float32 or math.prod(leading) <= 32):
        assert kernels.launched("linear_tiles") + kernels.launched("linear_persistent") == 2


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_with_activation(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, activation: str) -> None:
    input, weights, biases = draw_operands(rng, 16, 96, (40,), dtype, kernels.device)
    check(kernl.ops.linear(input, weights[0], biases[0], activation), input, weights[0], biases[0], activation)
    if kernels.device.type == "cpu":
        assert kernels.launched("linear_tiles") == 1


def test_linear_in_many_rows_takes_descriptors(kernels: KernelRun, rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 520, 64, (64,), torch.float16, kernels.device)
    problem = _Problem(input, weights, biases, outputs_for(input, weights), "gelu")
    assert default_implementation(problem).startswith("persistent")
    check(kernl.ops.linear(input, weights[0], biases[0], "gelu"), input, weights[0], biases[0], "gelu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_and_weights_of_any_layout(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype) -> None:
    weight = draw(rng, (40, 64), dtype, 0.125).to(kernels.device)
    bias = draw(rng, (40,), dtype).to(kernels.device)
    wide = draw(rng, (6, 3, 130), dtype).to(kernels.device)
    inputs = {
        "row stride": wide[:, 0, :64],
        "offset": wide[:, 1, 1:65],
        "leading dimensions swapped": wide.transpose(0, 1)[..., :64],
        "last stride 2": wide[..., :128:2],
        "transposed": draw(rng, (64, 9), dtype).to(kernels.device).t(),
        "expanded": wide[:1, :1, :64].expand(4, 5, 64),
        "one dimension": wide[0, 0, :64],
    }
    for name, input in inputs.items():
        output = kernl.ops.linear(input, weight, bias, "relu")
        assert output.shape == (*input.shape[:-1], 40), name
        check(output, input, weight, bias, "relu")
    if kernels.device.type == "cpu":
        assert kernels.launched("linear_tiles") == len(inputs)
    input = inputs["row stride"]
    for layout in (weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, :64], weight[::2]):
        matching = bias[: layout.shape[0]]
        check(kernl.ops.linear(input, layout, matching, "gelu"), input, layout, matching, "gelu")
        merged = kernl.ops.merged_linear(input, [layout, weight], [matching, bias])
        check(merged[0], input, layout, matching, "none")
        check(merged[1], input, weight, bias, "none")
    strided_bias = draw(rng, (80,), dtype).to(kernels.device)[::2]
    check(kernl.ops.linear(input, weight, strided_bias), input, weight, strided_bias, "none")


@pytest.mark.parametrize("sizes", [(0, 8, 4), (3, 0, 4), (3, 8, 0)], ids=["no rows", "no inner", "no columns"])
def test_empty(kernels: KernelRun, sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    input = torch.randn(rows, inner, dtype=torch.float16, device=kernels.device)
    weight = torch.randn(columns, inner, dtype=torch.float16, device=kernels.device)
    bias = torch.randn(columns, dtype=torch.float16, device=kernels.device)
    for output in (kernl.ops.linear(input, weight, bias, "gelu"), *kernl.ops.merged_linear(input, [weight], [bias])):
        assert output.shape == (rows, columns)
    torch.testing.assert_close(kernl.ops.linear(input, weight, bias), F.linear(input, weight, bias))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_linear(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, count: int) -> None:
    columns = (40, 7, 64, 33, 16)[:count]
    input, weights, biases = draw_operands(rng, 10, 60, columns, dtype, kernels.device)
    biases[count // 2] = None
    input = input.view(2, 5, 60)
    outputs = kernl.ops.merged_linear(input, weights, biases)
    for output, weight, bias in zip(outputs, weights, biases, strict=True):
        assert output.shape == (2, 5, weight.shape[0])
        check(output, input, weight, bias, "none")
    for output, weight in zip(kernl.ops.merged_linear(input, weights), weights, strict=True):
        check(output, input, weight, None, "none")
    if kernels.device.type == "cpu" and count <= 4:
        assert kernels.launched("linear_tiles") == 2


def test_weights_are_read_where_they_are(kernels: KernelRun, rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 3, 32, (16, 16), torch.float32, kernels.device)
    kernl.ops.merged_linear(input, weights, biases)
    weights[1].data.mul_(2.0)
    check(kernl.ops.merged_linear(input, weights, biases)[1], input, weights[1], biases[1], "none")


def test_float64_and_reference_do_not_launch(kernels: KernelRun) -> None:
    input, weight = torch.randn(3, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
    input, weight = input.to(kernels.device), weight.to(kernels.device)
    torch.testing.assert_close(kernl.ops.linear(input, weight, None, "gelu"), F.gelu(F.linear(input, weight)))
    with force_reference():
        kernl.ops.linear(input.float(), weight.float(), None, "gelu")
    assert kernels.launched("linear_tiles") == 0


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_linear(rng: torch.Generator, activation: str) -> None:
    input = draw(rng, (2, 3, 5), torch.float64).requires_grad_()
    weight = draw(rng, (4, 5), torch.float64).requires_grad_()
    bias = draw(rng, (4,), torch.float64).requires_grad_()
    op = torch.ops.kernl.linear
    assert torch.autograd.gradcheck(lambda x, w, b: op(x, w, b, activation), (input, weight, bias))
    assert torch.autograd.gradcheck(lambda x, w: op(x, w, None, activation), (input, weight))
    assert torch.autograd.gradgradcheck(lambda x, w, b: op(x, w, b, activation), (input, weight, bias))


def test_gradients_of_merged_linear(rng: torch.Generator) -> None:
    input = draw(rng, (2, 3, 5), torch.float64).requires_grad_()
    weights = [draw(rng, (n, 5), torch.float64).requires_grad_() for n in (4, 2, 3)]
    biases = [draw(rng, (n,), torch.float64).requires_grad_() for n in (4, 3)]

    def merged(x: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third, bias0, bias2 = tensors
        return tuple(torch.ops.kernl.merged_linear(x, [first, second, third], [bias0, None, bias2]))

    assert torch.autograd.gradcheck(merged, (input, *weights, *biases))


def test_gradients_where_few_are_wanted_or_used(rng: torch.Generator) -> None:
    input = draw(rng, (3, 5), torch.float64)
    frozen, trained = draw(rng, (4, 5), torch.float64), draw(rng, (2, 5), torch.float64).requires_grad_()
    outputs = torch.ops.kernl.merged_linear(input, [frozen, trained], [None, None])
    outputs[1].sum().backward()
    torch.testing.assert_close(trained.grad, input.sum(0).expand(2, 5))
    output = torch.ops.kernl.linear(input, trained, None, "relu")
    output.sum().backward()
    assert input.grad is None and frozen.grad is None


def test_gradients_through_the_kernels(kernels: KernelRun, rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 9, 32, (24,), torch.float32, kernels.device)
    leaves = [input, weights[0], biases[0]]
    grads = []
    for run in (kernl.ops.linear, reference_linear):
        copies = [leaf.clone().requires_grad_() for leaf in leaves if leaf is not None]
        output = run(*copies, "gelu")
        grads.append(torch.autograd.grad(output.square().sum(), copies))
    for ours, plain in zip(*grads, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_autocast(kernels: KernelRun, rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 9, 32, (24, 8), torch.float32, kernels.device)
    half = [tensor.bfloat16() for tensor in (input, weights[0], biases[0]) if tensor is not None]
    with torch.autocast(kernels.device.type, dtype=torch.bfloat16):
        output = kernl.ops.linear(input, weights[0], biases[0], "gelu")
        outputs = kernl.ops.merged_linear(input, weights, biases)
        assert F.linear(input, weights[0], biases[0]).dtype == output.dtype == outputs[1].dtype == torch.bfloat16
        with torch.autocast(kernels.device.type, enabled=False):
            assert kernl.ops.linear(input, weights[0], biases[0]).dtype == torch.float32
        double = kernl.ops.linear(input.double(), weights[0].double())
        assert double.dtype == F.linear(input.double(), weights[0].double()).dtype
    check(output, half[0], half[1], half[2], "gelu")
    check(outputs[0], half[0], half[1], half[2], "none")


def test_autocast_gradients_have_the_parameters_dtype(rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 3, 8, (4,), torch.float32, torch.device("cpu"))
    weight = weights[0].requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kernl.ops.linear(input, weight, biases[0], "tanh").float().sum().backward()
        loss = sum(output.float().sum() for output in kernl.ops.merged_linear(input, [weight, weight], [None, None]))
        torch.autograd.backward(loss)
    assert weight.grad is not None and weight.grad.dtype == torch.float32


def test_opcheck(rng: torch.Generator) -> None:
    for dtype in (torch.float32, torch.float16):
        input, weights, biases = draw_operands(rng, 3, 8, (4, 6), dtype, torch.device("cpu"))
        tensors = [input, *weights, *(bias for bias in biases if bias is not None)]
        for tensor in tensors:
            tensor.requires_grad_()
        torch.library.opcheck(torch.ops.kernl.linear.default, (input, weights[0], biases[0], "gelu"))
        torch.library.opcheck(torch.ops.kernl.linear.default, (input.view(1, 3, 8), weights[0], None, "none"))
        torch.library.opcheck(torch.ops.kernl.merged_linear.default, (input, weights, biases))
        torch.library.opcheck(torch.ops.kernl.merged_linear.default, (input, weights, [None, biases[1]]))


def test_symbolic_shapes_add_no_guard() -> None:
    def forward(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        output = torch.ops.kernl.linear(input, weight, None, "gelu")
        first, second = torch.ops.kernl.merged_linear(output, [weight, weight], [None, None])
        return first + second

    graph = make_fx(forward, tracing_mode="symbolic")(torch.randn(2, 5, 8), torch.randn(8, 8))
    assert graph(torch.randn(3, 7, 8), torch.randn(8, 8)).shape == (3, 7, 8)
    dims = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}

    class Model(torch.nn.Module):
        def forward(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return forward(input, weight)

    exported = torch.export.export(
        Model(), (torch.randn(2, 5, 8), torch.randn(8, 8)), dynamic_shapes={"input": dims, "weight": None}
    )
    assert exported.module()(torch.randn(4, 3, 8), torch.randn(8, 8)).shape == (4, 3, 8)


# Choice of implementation


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 1024, 16384])
@pytest.mark.parametrize("arch", [80, 86, 90, 100])
def test_configurations_are_few_and_named_apart(arch: int, rows: int) -> None:
    for dtype in DTYPES:
        for tma in (False, True):
            offered = configs(arch, rows, dtype, tma=tma)
            assert len({config.name for config in offered}) == len(offered) <= 4
            assert not any(config.persistent for config in offered) or (arch >= 90 and tma)


@pytest.mark.parametrize("rows", [1, 16, 128, 1000, 5000])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_default_is_among_the_implementations(rows: int, activation: str) -> None:
    for inner, columns in ((768, (768,)), (3072, (768,)), (768, (768, 768, 768)), (100, (33,)), (33, (7,))):
        problem = _Problem(
            torch.empty(rows, inner, dtype=torch.float16),
            [torch.empty(n, inner, dtype=torch.float16) for n in columns],
            [None] * len(columns),
            [torch.empty(rows, n, dtype=torch.float16) for n in columns],
            activation,
        )
        assert default_implementation(problem) in implementations(problem)
        assert "cublas" in implementations(problem)


# Microseconds of GPU time on an H200, PyTorch 2.11 and Triton 3.6, fp16: rows x K x N, activation after a colon.
MEASURED_NAMES = {
    "cublas": "cublas",
    "16x16": "tiles_16x16x256_w4_s4_groups4",
    "16x32": "tiles_16x32x256_w4_s4_groups4",
    "64x32": "tiles_64x32x128_w4_s4",
    "64x32/4": "tiles_64x32x128_w4_s4_split4",
    "64x64": "tiles_64x64x128_w4_s4",
    "64x64/2": "tiles_64x64x128_w4_s4_split2",
    "P64x64": "persistent_64x64x128_w4_s5",
    "P64x128": "persistent_64x128x64_w4_s4_2per_sm",
    "P128x128": "persistent_128x128x64_w4_s3_2per_sm",
    "P128x128 alone": "persistent_128x128x64_w8_s5_store128",
    "P128x256": "persistent_128x256x64_w8_s3_store256",
}
MEASURED: dict[str, dict[str, float]] = {
    "1x4096x4096": {"cublas": 13.88, "16x16": 26.47, "16x32": 25.2},
    "16x768x768": {"cublas": 4.19, "16x16": 2.64, "16x32": 3.39},
    "16x768x768+768+768": {"cublas": 13.31, "16x16": 5.37, "16x32": 5.29},
    "16x768x3072:gelu": {"cublas": 6.04, "16x16": 5.73, "16x32": 6.09},
    "16x3072x768": {"cublas": 7.37, "16x16": 5.87, "16x32": 6.64},
    "32x768x768": {"cublas": 4.23, "16x32": 3.82, "64x32": 3.71, "64x32/4": 4.9},
    "32x768x768+768+768": {"cublas": 13.36, "16x32": 6.64, "64x32": 7.08, "64x32/4": 7.19},
    "32x768x3072:gelu": {"cublas": 6.23, "16x32": 5.34, "64x32": 8.69, "64x32/4": 8.81},
    "32x3072x768": {"cublas": 7.54, "16x32": 7.04, "64x32": 10.06, "64x32/4": 7.8},
    "64x768x768": {"cublas": 4.61, "16x32": 5.71, "64x32": 3.07, "64x32/4": 4.72},
    "64x768x768+768+768": {"cublas": 13.68, "16x32": 7.14, "64x32": 4.16, "64x32/4": 6.07},
    "64x768x3072:gelu": {"cublas": 6.39, "16x32": 8.08, "64x32": 4.59, "64x32/4": 8.1},
    "64x3072x768": {"cublas": 7.69, "16x32": 11.11, "64x32": 8.51, "64x32/4": 6.36},
    "128x768x768": {"cublas": 4.55, "64x32": 3.36, "64x64": 3.48, "64x64/2": 4.62},
    "128x768x768+768+768": {"cublas": 13.69, "64x32": 4.54, "64x64": 3.96, "64x64/2": 8.24},
    "128x768x3072:gelu": {"cublas": 6.48, "64x32": 4.76, "64x64": 4.26, "64x64/2": 8.97},
    "128x3072x768": {"cublas": 7.79, "64x32": 8.84, "64x64": 8.8, "64x64/2": 6.84},
    "256x768x768": {"P64x64": 4.16, "cublas": 4.86, "64x32": 3.84, "64x64": 3.62, "P64x128": 5.89},
    "256x768x768+768+768": {"P64x64": 7.13, "cublas": 14.26, "64x32": 7.63, "64x64": 7.34, "P64x128": 7.17},
    "256x768x3072:gelu": {"P64x64": 6.81, "cublas": 7.31, "64x32": 8.37, "64x64": 8.17, "P64x128": 7.83},
    "256x3072x768": {"P64x64": 8.24, "cublas": 8.13, "64x32": 9.93, "64x64": 8.45, "P64x128": 15.8},
    "384x768x768": {
        "P64x64": 4.23,
        "cublas": 4.98,
        "P64x128": 5.92,
        "P128x128": 7.84,
        "P128x128 alone": 7.11,
        "P128x256": 10.79,
        "64x32": 4.53,
        "64x64": 3.85,
        "64x64/2": 8.11,
    },
    "384x768x768+768+768": {
        "P64x64": 7.21,
        "cublas": 14.71,
        "P64x128": 7.44,
        "P128x128": 9.53,
        "P128x128 alone": 7.55,
        "P128x256": 10.95,
        "64x32": 9.57,
        "64x64": 8.31,
        "64x64/2": 17.06,
    },
    "384x768x3072:gelu": {
        "P64x64": 9.2,
        "cublas": 8.43,
        "P64x128": 8.05,
        "P128x128": 11.81,
        "P128x128 alone": 8.06,
        "P128x256": 12.43,
        "64x32": 12.81,
        "64x64": 12.26,
        "64x64/2": 22.34,
    },
    "384x3072x768": {
        "P64x64": 9.14,
        "cublas": 8.54,
        "P64x128": 15.86,
        "P128x128": 23.71,
        "P128x128 alone": 18.4,
        "P128x256": 31.46,
        "64x32": 11.04,
        "64x64": 9.82,
        "64x64/2": 14.1,
    },
    "512x768x768": {
        "P64x64": 4.24,
        "cublas": 5.0,
        "64x32": 4.62,
        "64x64": 4.07,
        "64x64/2": 8.84,
        "P64x128": 6.3,
        "P128x128 alone": 7.16,
    },
    "512x768x768+768+768": {
        "P64x64": 9.46,
        "cublas": 14.77,
        "64x32": 13.11,
        "64x64": 11.65,
        "64x64/2": 22.14,
        "P64x128": 7.69,
        "P128x128 alone": 7.76,
    },
    "512x768x3072:gelu": {
        "P64x64": 9.24,
        "cublas": 9.26,
        "64x32": 15.12,
        "64x64": 13.4,
        "64x64/2": 26.48,
        "P64x128": 8.14,
        "P128x128 alone": 8.2,
    },
    "512x3072x768": {
        "P64x64": 8.9,
        "cublas": 8.62,
        "64x32": 12.97,
        "64x64": 10.84,
        "64x64/2": 15.07,
        "P64x128": 16.71,
        "P128x128 alone": 18.52,
    },
    "1024x768x768": {
        "P64x64": 6.06,
        "cublas": 5.78,
        "P64x128": 6.74,
        "P128x128": 9.22,
        "P128x128 alone": 7.18,
        "P128x256": 10.87,
    },
    "1024x768x768+768+768": {
        "P64x64": 14.32,
        "cublas": 17.14,
        "P64x128": 11.64,
        "P128x128": 10.82,
        "P128x128 alone": 12.74,
        "P128x256": 11.58,
    },
    "1024x768x3072:gelu": {
        "P64x64": 16.41,
        "cublas": 13.32,
        "P64x128": 13.93,
        "P128x128": 12.54,
        "P128x128 alone": 13.65,
        "P128x256": 13.21,
    },
    "1024x3072x768": {
        "P64x64": 14.98,
        "cublas": 10.73,
        "P64x128": 18.09,
        "P128x128": 28.22,
        "P128x128 alone": 18.51,
        "P128x256": 31.37,
    },
    "2048x768x768": {
        "P64x64": 8.35,
        "cublas": 7.35,
        "P64x128": 7.07,
        "P128x128": 10.43,
        "P128x128 alone": 7.46,
        "P128x256": 11.49,
    },
    "2048x768x768+768+768": {
        "P64x64": 24.44,
        "cublas": 21.55,
        "P64x128": 18.59,
        "P128x128": 16.66,
        "P128x128 alone": 18.42,
        "P128x256": 20.75,
    },
    "2048x768x3072:gelu": {
        "P64x64": 30.91,
        "cublas": 22.8,
        "P64x128": 23.01,
        "P128x128": 22.83,
        "P128x128 alone": 20.25,
        "P128x256": 23.53,
    },
    "2048x3072x768": {
        "P64x64": 23.28,
        "cublas": 16.0,
        "P64x128": 20.05,
        "P128x128": 30.83,
        "P128x128 alone": 19.06,
        "P128x256": 32.09,
    },
    "4096x768x768": {"cublas": 10.25, "P128x128": 10.59, "P128x256": 11.79},
    "4096x768x768+768+768": {"cublas": 30.49, "P128x128": 28.51, "P128x256": 29.88},
    "4096x768x3072:gelu": {"cublas": 41.37, "P128x128": 34.57, "P128x256": 34.93},
    "4096x3072x768": {"cublas": 27.42, "P128x128": 33.0, "P128x256": 32.51},
    "16384x768x768": {"cublas": 32.77, "P128x128": 31.94, "P128x256": 33.0},
    "16384x768x768+768+768": {"cublas": 103.96, "P128x128": 95.31, "P128x256": 91.85},
    "16384x768x3072:gelu": {"cublas": 169.8, "P128x128": 143.9, "P128x256": 135.48},
    "16384x3072x768": {"cublas": 109.77, "P128x128": 113.47, "P128x256": 107.3},
    "16384x1024x4096:gelu": {"cublas": 264.12, "P128x128": 241.11, "P128x256": 221.26},
    "16384x4096x1024": {"cublas": 203.92, "P128x128": 205.35, "P128x256": 185.19},
}


@pytest.mark.parametrize("shape", MEASURED)
def test_default_agrees_with_what_was_measured(shape: str) -> None:
    sizes, _, activation = shape.partition(":")
    rows, inner, widths = sizes.split("x")
    columns = [int(width) for width in widths.split("+")]
    one_row = torch.empty(1, int(inner), dtype=torch.float16)
    problem = _Problem(
        one_row,
        [torch.empty(n, int(inner), dtype=torch.float16) for n in columns],
        [torch.empty(n, dtype=torch.float16) for n in columns],
        [torch.empty(1, n, dtype=torch.float16) for n in columns],
        activation or "none",
        assumed_rows=int(rows),
    )
    times = {MEASURED_NAMES[name]: us for name, us in MEASURED[shape].items()}
    assert set(times) >= {config.name for config in configs(90, int(rows), torch.float16, tma=True)}, "all measured"
    name = default_implementation(problem)
    assert times[name] <= 1.1 * min(times.values()), f"{name} takes {times[name]}: {times}"


def test_every_configuration_for_hopper_has_a_cost() -> None:
    for rows in (1, 32, 64, 128, 256, 512, 2048, 10_000):
        for config in configs(90, rows, torch.float16, tma=True):
            assert config.name in _HOPPER_COSTS


def test_the_number_of_rows_is_not_compiled_in() -> None:
    # In a process of its own: this one may have replaced the kernels by interpreted ones.
    program = """if True:
        from kernl.kernels import linear, norm
        varying = {
            linear.kernl_linear_tiles: {"M"},
            linear.kernl_linear_persistent: {"M"},
            linear.kernl_linear_activation: {"chunks"},
            norm.kernl_layer_norm_rows: {"rows", "inner_rows"},
            norm.kernl_layer_norm_streamed: {"inner_rows"},
        }
        for kernel, names in varying.items():
            assert {parameter.name for parameter in kernel.params if parameter.do_not_specialize} == names, kernel
    """
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "TRITON_INTERPRET": "0"})


# Kernels made ahead


def test_kernels_ahead(kernels: KernelRun, rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 5, 768, (64,), torch.float16, kernels.device)
    before = [tensor.clone() for tensor in (input, weights[0])]
    pairs = ahead_of(torch.ops.kernl.linear, (input, weights[0], biases[0], "gelu"))
    pairs += ahead_of(torch.ops.kernl.merged_linear.default, (input, weights * 2, biases * 2))
    keys = [key for key, _ in pairs]
    assert len(set(keys)) == len(keys) and 4 <= len(keys) <= 24
    again = ahead_of(torch.ops.kernl.linear, (input[:1], weights[0].clone(), biases[0], "gelu"))
    assert {key for key, _ in again} <= set(keys), "other weights of that size, and other rows, need the same kernels"
    for _, run in pairs:
        launched = sum(launches.values())
        run()
        assert sum(launches.values()) == launched + 1
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(input), mode.from_tensor(weights[0]), mode.from_tensor(biases[0])
    assert {key for key, _ in ahead_of(torch.ops.kernl.linear, (fake[0], weights[0], biases[0], "gelu"))} <= set(keys)
    for key, run in ahead_of(torch.ops.kernl.linear, (*fake, "gelu"))[:1]:
        assert key in keys
        run()
    assert torch.equal(input, before[0]) and torch.equal(weights[0], before[1])
    assert ahead_of(torch.ops.kernl.linear, (input.double(), weights[0].double(), None, "gelu")) == []


def test_no_kernels_ahead_on_a_plain_cpu() -> None:
    assert ahead_of(torch.ops.kernl.linear, (torch.randn(2, 8), torch.randn(4, 8), None, "none")) == []
    assert ahead_of(torch.ops.aten.add.Tensor, (torch.randn(2), torch.randn(2))) == []


def test_rows_of_one_class_share_a_choice() -> None:
    def key(rows: int) -> tuple[object, ...]:
        weight = torch.empty(8, 16, dtype=torch.float16)
        return problem_key(_Problem(torch.empty(rows, 16, dtype=torch.float16), [weight], [None], [weight], "none"))

    assert key(2) == key(16) != key(1)
    assert key(513) == key(1024) != key(1025)


def test_descriptors_need_aligned_rows_and_bases() -> None:
    wide = torch.empty(8, 136, dtype=torch.float16)
    weight = torch.empty(16, 64, dtype=torch.float16)
    assert fits_descriptors(wide[:, :64], [weight])
    assert not fits_descriptors(wide[:, 1:65], [weight])
    assert not fits_descriptors(torch.empty(8, 60, dtype=torch.float16), [torch.empty(16, 60, dtype=torch.float16)])
    assert not fits_descriptors(wide[:, :64], [torch.empty(12, 64, dtype=torch.float16)])
    assert not fits_descriptors(wide[:, :64], [torch.empty(64, 16, dtype=torch.float16).t()])
    assert not fits_descriptors(wide[:1, :64].expand(8, 64), [weight])


def test_both_switches_of_the_matmul_precision_are_read() -> None:
    # In processes of their own: once one switch was used, PyTorch refuses to read the other.
    program = (
        "import torch, kernl.ops; from kernl.ops.linear import _tf32_allowed; before = _tf32_allowed(); {}; "
        "assert (before, _tf32_allowed()) == (False, True)"
    )
    for switch in (
        "torch.set_float32_matmul_precision('high')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    ):
        subprocess.run([sys.executable, "-c", program.format(switch)], check=True)


def test_the_counters_take_a_mebibyte() -> None:
    assert 4 * _Counters.POOL == 1 << 20


def test_counters_on_the_cpu_are_fresh_zeros() -> None:
    cells = _Counters().take(torch.device("cpu"), 7)
    assert cells is not None and cells.shape == (7,) and not cells.any()


# Errors


def test_errors_name_the_argument() -> None:
    input, weight, bias = torch.randn(2, 8), torch.randn(4, 8), torch.randn(4)
    with pytest.raises(ValueError, match=r"weight has shape \[4, 8\]; accepted: \[N, 7\]"):
        kernl.ops.linear(input[:, :7], weight)
    with pytest.raises(ValueError, match=r"bias has shape \[3\]; accepted: \[4\]"):
        kernl.ops.linear(input, weight, bias[:3])
    with pytest.raises(ValueError, match=r"weight is torch\.float16 and input torch\.float32"):
        kernl.ops.linear(input, weight.half())
    with pytest.raises(ValueError, match=r"input is torch\.int64"):
        kernl.ops.linear(input.long(), weight)
    with pytest.raises(ValueError, match="activation is 'swish'; accepted: none, gelu"):
        kernl.ops.linear(input, weight, bias, "swish")
    with pytest.raises(ValueError, match="input has no dimension"):
        kernl.ops.linear(torch.tensor(1.0), weight)
    with pytest.raises(ValueError, match="biases has 1 entries; accepted: 2"):
        kernl.ops.merged_linear(input, [weight, weight], [bias])
    with pytest.raises(ValueError, match="weights is empty"):
        kernl.ops.merged_linear(input, [])


def test_reference_of_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(ValueError, match="activation is 'swish'"):
        apply_activation(torch.ones(1), "swish")


def test_merged_reference_is_the_separate_layers(rng: torch.Generator) -> None:
    input, weights, biases = draw_operands(rng, 3, 8, (4, 6), torch.float32, torch.device("cpu"))
    for output, weight, bias in zip(reference_merged_linear(input, weights, biases), weights, biases, strict=True):
        torch.testing.assert_close(output, F.linear(input, weight, bias), rtol=0, atol=0)


def test_captured_launches_share_counters_only_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs come and go for as long as a process lives, so those of kernl's runner must not use cells up."""
    counters, device = _Counters(), torch.device("meta")
    ops = importlib.import_module("kernl.ops.linear")
    capturing = False
    monkeypatch.setattr(ops, "is_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7, synchronize=int))
    of_stream = counters.take(device, 40)
    assert of_stream is counters.take(device, 9)
    capturing = True
    used = counters._used[device]
    alone = [counters.take(device, 40) for _ in range(2)]
    assert counters._used[device] == used + 2 * 64 and alone[0] is not alone[1]
    with capturing_in_turn():
        shared = [counters.take(device, 40) for _ in range(100)]
        assert all(cells is shared[0] for cells in shared) and shared[0] is not of_stream
        large = counters.take(device, _Counters.PER_STREAM + 1)
        assert large is not None and large.numel() == _Counters.PER_STREAM + 1
    assert counters._used[device] == used + 2 * 64 + _Counters.PER_STREAM + _Counters.PER_STREAM + 32
