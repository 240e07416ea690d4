"""RMSNorm, alone and of a sum: the kernels against float64 and against the models' own modules, gradients, compilation.

Strides, broadcasting and configurations are the launcher's, which LayerNorm shares: tests/ops/test_norm.py has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import kernl.ops
from kernl.kernels.norm import MAX_COLUMNS, NormConfig, launch_norm
from kernl.ops.common import ahead_of, compile_ahead, force_reference
from kernl.ops.rms_norm import reference_add_rms_norm, reference_rms_norm
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 1), (300, 7), (2, 3, 768), (9, 1000), (2, 1025), (1, 4097), (33, 2, 64)]
EPSILON = 1e-6
OPS = ["rms_norm", "add_rms_norm", "rms_norm_of_sum"]


def draw(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * 2 + 1).to(dtype).to(device)


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def check(
    total: torch.Tensor, weight: torch.Tensor | None, actual: torch.Tensor, *, offset: float = 0.0, name: str
) -> None:
    """`actual` is the norm of `total`, as near to float64 as the reference is."""
    exact = reference_rms_norm(total.double(), double(weight), EPSILON, offset, torch.float64)
    assert_within_budget(actual, exact, reference_rms_norm(total, weight, EPSILON, offset, actual.dtype), name=name)
    assert actual.is_contiguous()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    input, residual = (draw(rng, shape, dtype, kernels.device) for _ in range(2))
    weight = draw(rng, shape[-1:], dtype, kernels.device)
    check(input, weight, kernl.ops.rms_norm(input, weight, EPSILON), name="rms_norm")

    output, total = kernl.ops.add_rms_norm(input, residual, weight, EPSILON)
    assert torch.equal(total, input + residual) and total.is_contiguous()
    check(total, weight, output, name="add_rms_norm")
    assert torch.equal(torch.ops.kernl.rms_norm_of_sum(input, residual, weight, EPSILON, 0.0, dtype), output)
    assert kernels.launched("rms_norm") == 1 and kernels.launched("add_rms_norm") == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("columns", [16385, MAX_COLUMNS])
def test_rows_too_long_for_registers(
    kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, columns: int
) -> None:
    input, residual = (draw(rng, (2, columns), dtype, kernels.device) for _ in range(2))
    weight = draw(rng, (columns,), dtype, kernels.device)
    check(input, weight, kernl.ops.rms_norm(input, weight, EPSILON), name="rms_norm")
    output, total = kernl.ops.add_rms_norm(input, residual, weight, EPSILON, weight_offset=1.0)
    assert torch.equal(total, input + residual)
    check(total, weight, output, offset=1.0, name="add_rms_norm")
    assert torch.equal(torch.ops.kernl.rms_norm_of_sum(input, residual, weight, EPSILON, 1.0, dtype), output)
    assert kernels.launched("rms_norm") == 1 and kernels.launched("add_rms_norm") == 2


def test_rows_longer_than_the_kernels_take(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (1, MAX_COLUMNS + 1), torch.float32, kernels.device)
    check(input, None, kernl.ops.rms_norm(input, eps=EPSILON), name="rms_norm")
    assert kernels.launched("rms_norm") == 0


# The models' own modules


def with_weight(module: nn.Module, rng: torch.Generator, dtype: torch.dtype, device: torch.device) -> nn.Module:
    module.weight.data = draw(rng, tuple(module.weight.shape), dtype, device)
    return module


MODULES: dict[str, tuple[Callable[[int], nn.Module], float]] = {  # and the offset of the weight
    "t5": (lambda columns: T5LayerNorm(columns, EPSILON), 0.0),
    "llama": (lambda columns: LlamaRMSNorm(columns, EPSILON), 0.0),
    "gemma": (lambda columns: GemmaRMSNorm(columns, EPSILON), 1.0),
    "torch": (lambda columns: nn.RMSNorm(columns, EPSILON), 0.0),
}


# The dtypes of the hidden states and of the weight. T5 in fp16 keeps its residual stream in fp32.
MIXTURES = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch says that its own fused kernel cannot
@pytest.mark.parametrize("dtypes", MIXTURES, ids=lambda pair: f"{pair[0]}-{pair[1]}".replace("torch.", ""))
@pytest.mark.parametrize("model", MODULES)
def test_the_modules_of_models(
    kernels: KernelRun, rng: torch.Generator, model: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    make, offset = MODULES[model]
    input = draw(rng, (40, 96), dtypes[0], kernels.device)
    module = with_weight(make(96).to(kernels.device), rng, dtypes[1], kernels.device)
    expected = module(input)
    actual = kernl.ops.rms_norm(input, module.weight, EPSILON, weight_offset=offset, dtype=expected.dtype)
    exact = reference_rms_norm(input.double(), module.weight.double(), EPSILON, offset, torch.float64)
    assert_within_budget(actual, exact, expected, name=model)
    if expected.dtype == torch.float32 and dtypes[0] == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    assert kernels.launched("rms_norm") == 1


@pytest.mark.parametrize("columns", [40, 20000])
def test_a_sum_of_two_dtypes_normalised_to_a_third(kernels: KernelRun, rng: torch.Generator, columns: int) -> None:
    """T5 in fp16: fp16 hidden states plus the fp32 output of `wo`, normalised to the fp16 of the weight."""
    input = draw(rng, (3, columns), torch.float16, kernels.device)
    residual = draw(rng, (3, columns), torch.float32, kernels.device)
    weight = draw(rng, (columns,), torch.float16, kernels.device)
    for pair in ((input, residual), (residual, input)):
        output, total = torch.ops.kernl.add_rms_norm(*pair, weight, EPSILON, 0.0, torch.float16)
        assert output.dtype == torch.float16 and total.dtype == torch.float32
        assert torch.equal(total, input + residual)
        check(total, weight, output, name="add_rms_norm")
        without_sum = torch.ops.kernl.rms_norm_of_sum(*pair, weight, EPSILON, 0.0, torch.float16)
        assert torch.equal(without_sum, output)
    assert kernels.launched("add_rms_norm") == 4


def test_the_sum_is_rounded_before_its_norm_is_taken(kernels: KernelRun) -> None:
    """2048 + 1 is 2048 in fp16: the norm must not see the 2049, whatever its own dtype is."""
    input = torch.full((2, 16), 2048.0, dtype=torch.float16, device=kernels.device)
    input[:, 8:] = 1.0
    residual = torch.ones_like(input)
    exact = reference_rms_norm((input + residual).double(), None, 0.0, 0.0, torch.float64)
    output = torch.ops.kernl.rms_norm_of_sum(input, residual, None, 0.0, 0.0, torch.float32)
    torch.testing.assert_close(output.double(), exact, rtol=1e-6, atol=0)


def test_squares_that_overflow_fp16(kernels: KernelRun) -> None:
    input = torch.full((2, 40), 6e4, dtype=torch.float16, device=kernels.device)
    torch.testing.assert_close(kernl.ops.rms_norm(input), torch.ones_like(input))
    assert kernels.launched("rms_norm") == 1


def test_zeros_and_values_that_are_not_finite_stay_in_their_row(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (4, 40), torch.float32, kernels.device)
    input[0], input[1, 3], input[2, 5] = 0.0, float("nan"), float("inf")
    output, expected = kernl.ops.rms_norm(input), LlamaRMSNorm(40).to(kernels.device)(input)
    torch.testing.assert_close(output, expected, equal_nan=True)
    assert not output[3].isnan().any() and (output[0] == 0).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_no_elements(kernels: KernelRun, shape: tuple[int, ...]) -> None:
    input = torch.empty(shape, device=kernels.device)
    assert kernl.ops.rms_norm(input).shape == shape
    assert [tensor.shape for tensor in kernl.ops.add_rms_norm(input, input)] == [shape, shape]


def test_rows_at_two_strides_and_a_strided_weight(kernels: KernelRun, rng: torch.Generator) -> None:
    """Heads are normalised where the projection left them, transposed (Qwen3, Gemma3)."""
    input = draw(rng, (6, 5, 4, 24), torch.float16, kernels.device).transpose(1, 2)
    weight = draw(rng, (24, 2), torch.float16, kernels.device)[:, 0]
    check(input, weight, kernl.ops.rms_norm(input, weight, EPSILON), name="rms_norm")
    residual = draw(rng, (1, 4, 5, 24), torch.float16, kernels.device)
    output, total = kernl.ops.add_rms_norm(input, residual, weight, EPSILON)
    assert torch.equal(total, input + residual)
    check(total, weight, output, name="add_rms_norm")


@pytest.mark.parametrize("config", [NormConfig(1, 64, 1), NormConfig(4, 64, 2), NormConfig(0, 16, 1)], ids=str)
def test_any_configuration_is_right(kernels: KernelRun, rng: torch.Generator, config: NormConfig) -> None:
    input, weight = (draw(rng, shape, torch.float32, kernels.device) for shape in ((75, 41), (41,)))
    output = torch.full_like(input, float("nan"))
    launch_norm(input, weight, None, output, EPSILON, rms=True, weight_offset=1.0, config=config)
    check(input, weight, output, offset=1.0, name="rms_norm")


def test_where_the_reference_runs(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (3, 8), torch.float64, kernels.device)
    expected = F.rms_norm(input, (8,), None, EPSILON)
    torch.testing.assert_close(kernl.ops.rms_norm(input, eps=EPSILON), expected, rtol=1e-14, atol=0)
    assert kernl.ops.rms_norm(input, dtype=torch.float32).dtype == torch.float32
    assert kernl.ops.rms_norm(input.float(), dtype=torch.float64).dtype == torch.float64
    with force_reference():
        torch.testing.assert_close(kernl.ops.rms_norm(input.float(), eps=EPSILON), expected.float())
    assert not kernels.launched("rms_norm")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernl.ops.rms_norm(x[0, 0]), "input has no dimension"),
        (lambda x: kernl.ops.rms_norm(x.long()), "input is torch.int64; accepted: floating point"),
        (lambda x: kernl.ops.rms_norm(x, x[0, :4]), r"weight has shape \[4\]; accepted: \[8\]"),
        (lambda x: kernl.ops.rms_norm(x, dtype=torch.int32), "dtype is torch.int32; accepted: a floating-point"),
        (lambda x: kernl.ops.add_rms_norm(x, x.half()), "residual is torch.float16 and input torch.float32"),
        (lambda x: kernl.ops.add_rms_norm(x, x[:2]), r"residual has shape \[2, 8\]"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 8))


def test_kernels_are_made_ahead(kernels: KernelRun) -> None:
    """What `ahead` launches is an RMSNorm, of the dtypes of the call."""
    input = torch.zeros(4, 40, dtype=torch.float16, device=kernels.device)
    arguments = (input, input.float(), nn.Parameter(input[0]), EPSILON, 1.0, torch.float16)
    ahead = ahead_of(torch.ops.kernl.add_rms_norm, arguments)
    assert len({key for key, _ in ahead}) == len(ahead) == 4
    assert compile_ahead(ahead, workers=1) == []
    assert kernels.launched("add_rms_norm") == 4 and not kernels.launched("add_layer_norm")


# Under PyTorch's machinery


def arguments(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> dict[str, torch.Tensor]:
    shapes = {"input": (6, 20, 40), "residual": (1, 20, 40), "weight": (40,)}
    return {
        name: torch.randn(shape, device=device).to(dtype).requires_grad_(requires_grad)
        for name, shape in shapes.items()
    }


def operands(op: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for name, tensor in given.items() if op != "rms_norm" or name != "residual"]


def fused(op: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    result = getattr(torch.ops.kernl, op)(*tensors, EPSILON, 1.0, tensors[0].dtype)
    return list(result) if isinstance(result, tuple) else [result]


def plain(op: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    dtype = tensors[0].dtype
    if op == "rms_norm":
        return [reference_rms_norm(*tensors, EPSILON, 1.0, dtype)]
    output, total = reference_add_rms_norm(*tensors, EPSILON, 1.0, dtype)
    return [output, total] if op == "add_rms_norm" else [output]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_opcheck(kernels: KernelRun, op: str, dtype: torch.dtype) -> None:
    *inputs, weight = operands(op, arguments(kernels.device, dtype, requires_grad=True))
    overload = getattr(torch.ops.kernl, op).default
    torch.library.opcheck(overload, (*inputs, weight, EPSILON, 0.0, torch.float16))
    torch.library.opcheck(overload, (*(x.detach().transpose(0, 1) for x in inputs), None, EPSILON, 0.0, dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(kernels: KernelRun, rng: torch.Generator, op: str, dtype: torch.dtype) -> None:
    given = operands(op, arguments(kernels.device, dtype, requires_grad=False))
    grads = [draw(rng, tuple(x.shape), dtype, kernels.device) for x in plain(op, *given)]

    def gradients(function: Callable[..., list[torch.Tensor]], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
        return torch.autograd.grad(function(op, *leaves), leaves, [grad.to(dtype) for grad in grads])

    exact, baseline = gradients(plain, torch.float64), gradients(plain, dtype)
    assert_within_budget(gradients(fused, dtype), exact, baseline, name=op)
    assert kernels.launched("rms_norm" if op == "rms_norm" else "add_rms_norm") == 1


@pytest.mark.parametrize("op", OPS)
def test_gradients_numerically_twice_over(op: str) -> None:
    leaves = operands(op, arguments(torch.device("cpu"), torch.float64, requires_grad=True))

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return fused(op, *tensors)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("position", [0, 1])
def test_only_the_sum_or_only_the_norm_is_differentiated(kernels: KernelRun, position: int) -> None:
    leaves = operands("add_rms_norm", arguments(kernels.device, torch.float32, requires_grad=True))
    actual, expected = (function("add_rms_norm", *leaves)[position] for function in (fused, plain))
    torch.testing.assert_close(
        torch.autograd.grad(actual.square().sum(), leaves[:2]),
        torch.autograd.grad(expected.square().sum(), leaves[:2]),
        rtol=1e-4,
        atol=1e-4,
    )


def test_mixed_dtypes_are_differentiated(kernels: KernelRun) -> None:
    input, residual, weight = operands("add_rms_norm", arguments(kernels.device, torch.float32, requires_grad=True))
    half = input.detach().half().requires_grad_()
    output, total = torch.ops.kernl.add_rms_norm(half, residual, weight, EPSILON, 0.0, torch.float16)
    assert output.dtype == torch.float16 and total.dtype == torch.float32
    grads = torch.autograd.grad([output.sum(), total.sum()], [half, residual, weight])
    assert [grad.dtype for grad in grads] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize("op", OPS)
def test_compile_with_gradients(kernels: KernelRun, op: str) -> None:
    leaves = operands(op, arguments(kernels.device, torch.float32, requires_grad=True))

    def loss(function: Callable[..., list[torch.Tensor]]) -> list[torch.Tensor]:
        outputs = function(op, *leaves)
        return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)]  # type: ignore[arg-type]

    compiled = torch.compile(fused, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(loss(compiled), loss(plain), rtol=1e-4, atol=1e-4)


def test_export_for_every_shape(kernels: KernelRun) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(8)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            output, total = kernl.ops.add_rms_norm(x, residual, self.norm.weight)
            return kernl.ops.rms_norm(output, dtype=torch.float16) + total

    block = Block().to(kernels.device)
    shapes = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2)}

    def example(*shape: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(*shape, 8, device=kernels.device) for _ in range(2))

    exported = torch.export.export(block, example(3, 5), dynamic_shapes=(shapes, shapes))
    given = example(4, 7)
    torch.testing.assert_close(exported.module()(*given), block(*given), rtol=1e-4, atol=1e-4)
    targets = [node.target for node in exported.graph.nodes]
    assert torch.ops.kernl.add_rms_norm.default in targets and torch.ops.kernl.rms_norm.default in targets


def test_autocast_changes_nothing() -> None:
    input, residual, weight = arguments(torch.device("cpu"), torch.bfloat16, requires_grad=False).values()

    def results(weight: torch.Tensor) -> list[Any]:
        return [
            kernl.ops.rms_norm(input, weight),
            *kernl.ops.add_rms_norm(input, residual, weight),
            LlamaRMSNorm.forward(_Bare(weight), input),
        ]

    for each in (weight, weight.float()):
        expected = results(each)
        with torch.autocast("cpu", dtype=torch.float16):
            actual = results(each)
        assert [x.dtype for x in actual] == [x.dtype for x in expected]
        assert all(map(torch.equal, actual, expected))


class _Bare:
    """What LlamaRMSNorm.forward reads of its module."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.variance_epsilon = weight, EPSILON
