"""LayerNorm, alone and of a sum: the kernels against float64, and the op under every way PyTorch may run it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import kernl.ops
from kernl.kernels.norm import MAX_COLUMNS, NormConfig, choose_config, launch_norm
from kernl.ops.common import force_reference
from kernl.ops.norm import (
    _add_layer_norm_autocast,
    _layer_norm_autocast,
    _layer_norm_of_sum_autocast,
    reference_add_layer_norm,
    reference_layer_norm,
)
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Short rows come in numbers: the budget compares two maxima, which takes more than a few rows to be more than luck.
SHAPES = [(1, 1), (300, 7), (3, 43, 40), (2, 3, 768), (9, 1000), (2, 1025), (1, 4097), (33, 64), (133, 16)]
EPSILON = 1e-5


def draw(rng: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Values around a mean that is not zero: a one-pass variance would lose digits here.
    return (torch.randn(shape, generator=rng, dtype=torch.float64) * 2 + 3).to(dtype).to(device)


def double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.double()


def check_norm_of(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, actual: torch.Tensor, name: str
) -> None:
    """Against float64. The largest error is that of the row with the least variance, and there a matter of luck.

    So the baseline is the worst of three orders in which PyTorch can add the columns up.
    """
    exact = reference_layer_norm(input.double(), double(weight), double(bias), EPSILON).cpu()
    columns = torch.arange(input.shape[-1], device=input.device)
    draws = []
    for order in (columns, columns.flip(0), columns.roll(len(columns) // 2)):
        operands = [None if tensor is None else tensor[..., order] for tensor in (input, weight, bias)]
        draws.append(reference_layer_norm(*operands, EPSILON)[..., order.argsort()].cpu())
    baseline = max(draws, key=lambda draw: float((draw.double() - exact).abs().nan_to_num().max()) if len(draw) else 0)
    assert_within_budget(actual, exact, baseline, name=name)
    assert actual.is_contiguous()


def check_layer_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, actual: torch.Tensor
) -> None:
    check_norm_of(input, weight, bias, actual, "layer_norm")


def check_add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    total: torch.Tensor | None,
) -> None:
    _, plain_total = reference_add_layer_norm(input, residual, weight, bias, EPSILON)
    if total is not None:
        assert torch.equal(total, plain_total), "the sum is not the one plain PyTorch rounds to"
        assert total.is_contiguous()
    # The norm is that of the rounded sum.
    check_norm_of(plain_total, weight, bias, output, "add_layer_norm")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    input = draw(rng, shape, dtype, kernels.device)
    weight, bias = (draw(rng, shape[-1:], dtype, kernels.device) for _ in range(2))
    check_layer_norm(input, weight, bias, kernl.ops.layer_norm(input, weight, bias, EPSILON))
    assert kernels.launched("layer_norm") == 1


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_layer_norm(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    input, residual = (draw(rng, shape, dtype, kernels.device) for _ in range(2))
    weight, bias = (draw(rng, shape[-1:], dtype, kernels.device) for _ in range(2))
    output, total = kernl.ops.add_layer_norm(input, residual, weight, bias, EPSILON)
    check_add_layer_norm(input, residual, weight, bias, output, total)
    without_sum = torch.ops.kernl.layer_norm_of_sum(input, residual, weight, bias, EPSILON)
    assert torch.equal(without_sum, output)
    assert kernels.launched("add_layer_norm") == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [16385, 20001, MAX_COLUMNS])
def test_rows_too_long_for_registers(
    kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, columns: int
) -> None:
    input, residual = (draw(rng, (2, columns), dtype, kernels.device) for _ in range(2))
    weight, bias = (draw(rng, (columns,), dtype, kernels.device) for _ in range(2))
    check_layer_norm(input, weight, bias, kernl.ops.layer_norm(input, weight, bias, EPSILON))
    output, total = kernl.ops.add_layer_norm(input, residual, weight, bias, EPSILON)
    check_add_layer_norm(input, residual, weight, bias, output, total)
    without_sum = torch.ops.kernl.layer_norm_of_sum(input, residual, weight, bias, EPSILON)
    assert torch.equal(without_sum, output)
    assert kernels.launched("add_layer_norm") == 2


def test_rows_longer_than_the_kernels_take(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (1, MAX_COLUMNS + 1), torch.float32, kernels.device)
    check_layer_norm(input, None, None, kernl.ops.layer_norm(input, eps=EPSILON))
    assert kernels.launched("layer_norm") == 0


@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_weight_and_bias_are_optional(
    kernels: KernelRun, rng: torch.Generator, has_weight: bool, has_bias: bool
) -> None:
    input, residual = (draw(rng, (30, 40), torch.float16, kernels.device) for _ in range(2))
    weight = draw(rng, (40,), torch.float16, kernels.device) if has_weight else None
    bias = draw(rng, (40,), torch.float16, kernels.device) if has_bias else None
    check_layer_norm(input, weight, bias, kernl.ops.layer_norm(input, weight, bias, EPSILON))
    check_add_layer_norm(
        input, residual, weight, bias, *kernl.ops.add_layer_norm(input, residual, weight, bias, EPSILON)
    )
    assert kernels.launched("layer_norm") == kernels.launched("add_layer_norm") == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_weights_of_another_dtype(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype) -> None:
    input = draw(rng, (50, 40), dtype, kernels.device)
    weight, bias = (draw(rng, (40,), torch.float32, kernels.device) for _ in range(2))
    output = kernl.ops.layer_norm(input, weight, bias, EPSILON)
    assert output.dtype == dtype
    check_layer_norm(input, weight, bias, output)
    check_layer_norm(input.float(), weight.to(dtype), None, kernl.ops.layer_norm(input.float(), weight.to(dtype)))
    assert kernels.launched("layer_norm") == 2


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed_rows": lambda x: x.transpose(0, 1),
    "transposed_columns": lambda x: x.transpose(1, 2),
    "every_other_row": lambda x: x[:, ::2],
    "sliced_columns": lambda x: x[..., 1:16],
    "strided_columns": lambda x: x[..., ::2],
    "expanded": lambda x: x[:1].expand(12, -1, -1),
    "expanded_columns": lambda x: x[..., :1].expand(-1, -1, 17),
    "row_of_a_batch": lambda x: x[:, 0],
    "one_row": lambda x: x[1, 2],
    "four_dimensions": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1).transpose(1, 2),
    "scattered": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1).permute(2, 1, 0, 3)[::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(kernels: KernelRun, rng: torch.Generator, layout: str) -> None:
    input = LAYOUTS[layout](draw(rng, (12, 14, 24), torch.float16, kernels.device))
    weight, bias = (draw(rng, input.shape[-1:], torch.float16, kernels.device) for _ in range(2))
    check_layer_norm(input, weight, bias, kernl.ops.layer_norm(input, weight, bias, EPSILON))
    for residual in (draw(rng, tuple(input.shape), torch.float16, kernels.device), input):
        for pair in ((input, residual), (residual, input)):
            check_add_layer_norm(*pair, weight, bias, *kernl.ops.add_layer_norm(*pair, weight, bias, EPSILON))
    assert kernels.launched("add_layer_norm") == 4


def test_strided_weight(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (50, 40), torch.float32, kernels.device)
    weight, bias = draw(rng, (40, 2), torch.float32, kernels.device).unbind(1)
    check_layer_norm(input, weight, bias, kernl.ops.layer_norm(input, weight, bias, EPSILON))


@pytest.mark.parametrize(
    ("input_shape", "residual_shape"),
    [
        ((13, 15, 24), (1, 15, 24)),  # position embeddings
        ((1, 15, 24), (13, 15, 24)),
        ((13, 15, 24), (15, 24)),
        ((13, 1, 24), (1, 15, 24)),
        ((13, 15, 24), (24,)),
        ((24,), (2, 13, 15, 24)),
        ((13, 15, 24), (13, 15, 1)),
        ((2, 1, 13, 24), (4, 1, 24)),
    ],
)
def test_broadcasting(
    kernels: KernelRun, rng: torch.Generator, input_shape: tuple[int, ...], residual_shape: tuple[int, ...]
) -> None:
    input = draw(rng, input_shape, torch.float16, kernels.device)
    residual = draw(rng, residual_shape, torch.float16, kernels.device)
    weight, bias = (draw(rng, (24,), torch.float16, kernels.device) for _ in range(2))
    check_add_layer_norm(
        input, residual, weight, bias, *kernl.ops.add_layer_norm(input, residual, weight, bias, EPSILON)
    )
    assert kernels.launched("add_layer_norm") == 1


def test_a_sum_of_two_dtypes_is_promoted(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (60, 40), torch.float16, kernels.device)
    residual = draw(rng, (60, 40), torch.float32, kernels.device)
    output, total = torch.ops.kernl.add_layer_norm(input, residual, None, None, EPSILON)
    assert output.dtype == total.dtype == torch.float32
    check_add_layer_norm(input, residual, None, None, output, total)
    assert kernels.launched("add_layer_norm") == 1


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (3, 0)])
def test_no_elements(kernels: KernelRun, shape: tuple[int, ...]) -> None:
    input = torch.empty(shape, device=kernels.device)
    assert kernl.ops.layer_norm(input).shape == shape
    output, total = kernl.ops.add_layer_norm(input, input)
    assert output.shape == total.shape == shape


def test_non_finite_values_stay_in_their_row(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (4, 40), torch.float32, kernels.device)
    input[1, 3], input[2, 5] = float("nan"), float("inf")
    output = kernl.ops.layer_norm(input)
    assert output[1:3].isnan().all() and not output[[0, 3]].isnan().any()


def test_constant_rows_and_large_means(kernels: KernelRun) -> None:
    constant = torch.full((2, 40), 7.0, device=kernels.device)
    assert kernl.ops.layer_norm(constant).abs().max() == 0
    # Mean 1e4, deviation 1: fp32 sums of squares would leave no digit of the variance.
    shifted = torch.randn(64, 40, device=kernels.device) + 1e4
    check_layer_norm(shifted, None, None, kernl.ops.layer_norm(shifted))


@pytest.mark.parametrize("config", [NormConfig(1, 64, 1), NormConfig(4, 64, 2), NormConfig(0, 16, 1)], ids=str)
def test_any_configuration_is_right(kernels: KernelRun, rng: torch.Generator, config: NormConfig) -> None:
    input = draw(rng, (75, 41), torch.float32, kernels.device)
    output = torch.full_like(input, float("nan"))
    launch_norm(input, None, None, output, EPSILON, config=config)
    check_layer_norm(input, None, None, output)


def test_configurations_follow_the_problem() -> None:
    assert choose_config(16, 768, 132).block_m == 1
    assert choose_config(16, 768, 132).num_warps == 4
    assert choose_config(16384, 768, 132) == NormConfig(2, 1024, 1)
    assert choose_config(16384, 64, 132).block_m == 32
    assert choose_config(16384, 16384, 132).num_warps == 16
    assert choose_config(1, 16385, 132).block_m == 0


def test_cpu_tensors_run_the_reference(rng: torch.Generator) -> None:
    from kernl.kernels.common import launches

    launches.clear()
    input = draw(rng, (3, 8), torch.float16, torch.device("cpu"))
    assert torch.equal(kernl.ops.layer_norm(input), F.layer_norm(input, (8,)))
    assert not launches


def test_float64_runs_the_reference(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (3, 8), torch.float64, kernels.device)
    assert torch.equal(kernl.ops.layer_norm(input), F.layer_norm(input, (8,)))
    output, total = kernl.ops.add_layer_norm(input, input)
    assert torch.equal(total, input + input) and torch.equal(output, F.layer_norm(total, (8,)))
    assert kernels.launched("layer_norm") == kernels.launched("add_layer_norm") == 0


def test_forced_reference(kernels: KernelRun, rng: torch.Generator) -> None:
    input = draw(rng, (3, 8), torch.float32, kernels.device)
    with force_reference():
        assert torch.equal(kernl.ops.layer_norm(input), F.layer_norm(input, (8,)))
    assert kernels.launched("layer_norm") == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernl.ops.layer_norm(x[0, 0]), "input has no dimension"),
        (lambda x: kernl.ops.layer_norm(x.long()), "input is torch.int64; accepted: floating point"),
        (lambda x: kernl.ops.layer_norm(x, x[0, :4]), r"weight has shape \[4\]; accepted: \[8\]"),
        (lambda x: kernl.ops.layer_norm(x, x[0], x[:1]), r"bias has shape \[1, 8\]"),
        (lambda x: kernl.ops.layer_norm(x, x[0].long()), "weight is torch.int64"),
        (lambda x: kernl.ops.add_layer_norm(x, x.half()), "residual is torch.float16 and input torch.float32"),
        (lambda x: kernl.ops.add_layer_norm(x, x[:2]), r"residual has shape \[2, 8\]"),
        (lambda x: kernl.ops.add_layer_norm(x, x[0, 0]), "at least one dimension"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[torch.Tensor], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(3, 8))


# Under PyTorch's machinery


def arguments(device: torch.device, dtype: torch.dtype, requires_grad: bool) -> dict[str, torch.Tensor]:
    shapes = {"input": (6, 20, 40), "residual": (1, 20, 40), "weight": (40,), "bias": (40,)}
    return {
        name: torch.randn(shape, device=device).to(dtype).requires_grad_(requires_grad)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "layer_norm_of_sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_opcheck(kernels: KernelRun, op: str, dtype: torch.dtype) -> None:
    given = arguments(kernels.device, dtype, requires_grad=True)
    operands = [given["input"]] if op == "layer_norm" else [given["input"], given["residual"]]
    overload = getattr(torch.ops.kernl, op).default
    torch.library.opcheck(overload, (*operands, given["weight"], given["bias"], EPSILON))
    torch.library.opcheck(overload, (*(x.detach().transpose(0, 1) for x in operands), None, None, EPSILON))


def plain(op: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    x = given["input"] if op == "layer_norm" else given["input"] + given["residual"]
    output = F.layer_norm(x, x.shape[-1:], given["weight"], given["bias"], EPSILON)
    return [output, x] if op == "add_layer_norm" else [output]


def fused(op: str, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    operands = [given["input"]] if op == "layer_norm" else [given["input"], given["residual"]]
    result = getattr(torch.ops.kernl, op)(*operands, given["weight"], given["bias"], EPSILON)
    return list(result) if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "layer_norm_of_sum"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(kernels: KernelRun, rng: torch.Generator, op: str, dtype: torch.dtype) -> None:
    given = arguments(kernels.device, dtype, requires_grad=False)
    given = {name: tensor for name, tensor in given.items() if op != "layer_norm" or name != "residual"}

    def gradients(
        function: Callable[[str, dict[str, torch.Tensor]], list[torch.Tensor]], dtype: torch.dtype
    ) -> tuple[torch.Tensor, ...]:
        leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in given.items()}
        outputs = function(op, leaves)
        return torch.autograd.grad(outputs, list(leaves.values()), [grad.to(dtype) for grad in grads])

    grads = [draw(rng, tuple(x.shape), dtype, kernels.device) for x in plain(op, given)]
    exact, baseline = gradients(plain, torch.float64), gradients(plain, dtype)
    assert_within_budget(gradients(fused, dtype), exact, baseline, name=op)
    assert kernels.launched("layer_norm" if op == "layer_norm" else "add_layer_norm") == 1


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "layer_norm_of_sum"])
def test_gradients_numerically_twice_over(op: str) -> None:
    given = arguments(torch.device("cpu"), torch.float64, requires_grad=True)
    leaves = [given[name] for name in given if op != "layer_norm" or name != "residual"]

    def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return fused(op, dict(zip((name for name in given if op != "layer_norm" or name != "residual"), tensors)))

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True)


def test_only_the_sum_or_only_the_norm_is_differentiated(kernels: KernelRun) -> None:
    given = arguments(kernels.device, torch.float32, requires_grad=True)
    for position in (0, 1):
        actual, expected = fused("add_layer_norm", given)[position], plain("add_layer_norm", given)[position]
        torch.testing.assert_close(
            torch.autograd.grad(actual.square().sum(), [given["input"], given["residual"]]),
            torch.autograd.grad(expected.square().sum(), [given["input"], given["residual"]]),
            rtol=1e-4,
            atol=1e-4,
        )


def test_mixed_dtypes_are_differentiated(kernels: KernelRun) -> None:
    given = arguments(kernels.device, torch.float32, requires_grad=True)
    half = given["input"].detach().half().requires_grad_()
    output = kernl.ops.layer_norm(half, given["weight"], given["bias"])
    assert output.dtype == torch.float16
    grads = torch.autograd.grad(output.sum(), [half, given["weight"], given["bias"]])
    assert [grad.dtype for grad in grads] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "layer_norm_of_sum"])
def test_compile_with_gradients(kernels: KernelRun, op: str) -> None:
    given = arguments(kernels.device, torch.float32, requires_grad=True)

    def loss(function: Callable[[dict[str, torch.Tensor]], list[torch.Tensor]]) -> list[torch.Tensor]:
        outputs = function(given)
        leaves = [tensor for name, tensor in given.items() if op != "layer_norm" or name != "residual"]
        return [*outputs, *torch.autograd.grad(sum(x.square().sum() for x in outputs), leaves)]  # type: ignore[arg-type]

    compiled = torch.compile(lambda given: fused(op, given), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(loss(compiled), loss(lambda given: plain(op, given)), rtol=1e-4, atol=1e-4)


def test_one_compilation_serves_all_shapes(kernels: KernelRun) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, total = torch.ops.kernl.add_layer_norm(x, y, None, None, EPSILON)
        return torch.ops.kernl.layer_norm(output, None, None, EPSILON), total

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    for shape in ((2, 5, 8), (3, 7, 8), (9, 2, 12), (4, 4, 4)):
        x, y = torch.randn(shape, device=kernels.device), torch.randn(shape, device=kernels.device)
        torch.testing.assert_close(compiled(x, y), function(x, y), rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1


def test_export(kernels: KernelRun) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(8)

        def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            output, total = kernl.ops.add_layer_norm(x, residual, self.norm.weight, self.norm.bias, self.norm.eps)
            return kernl.ops.layer_norm(output) + total

    block = Block().to(kernels.device)
    batch, length = torch.export.Dim("batch", min=2), torch.export.Dim("length", min=2)
    shapes = {0: batch, 1: length}
    example = (torch.randn(3, 5, 8, device=kernels.device), torch.randn(3, 5, 8, device=kernels.device))
    exported = torch.export.export(block, example, dynamic_shapes=(shapes, shapes))
    given = (torch.randn(4, 7, 8, device=kernels.device), torch.randn(4, 7, 8, device=kernels.device))
    torch.testing.assert_close(exported.module()(*given), block(*given), rtol=1e-4, atol=1e-4)
    targets = [node.target for node in exported.graph.nodes]
    assert torch.ops.kernl.add_layer_norm.default in targets and torch.ops.kernl.layer_norm.default in targets


def test_autocast_on_the_cpu_leaves_norms_alone() -> None:
    given = arguments(torch.device("cpu"), torch.float32, requires_grad=False)
    half = given["input"].bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = F.layer_norm(half, half.shape[-1:], given["weight"], given["bias"], EPSILON)
        actual = kernl.ops.layer_norm(half, given["weight"], given["bias"], EPSILON)
        output, total = kernl.ops.add_layer_norm(half, half, given["weight"], given["bias"], EPSILON)
        only = torch.ops.kernl.layer_norm_of_sum(half, half, given["weight"], given["bias"], EPSILON)
    assert actual.dtype == expected.dtype and output.dtype == total.dtype == only.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected)


def test_the_cuda_autocast_rule_norms_in_float32() -> None:
    """Called directly here; tests/gpu compares with PyTorch's own autocast."""
    half = torch.randn(3, 8).half()
    single = torch.randn(3, 8)
    rule = (torch.float16, "cuda")
    assert _layer_norm_autocast(*rule, half, half[0], None, EPSILON).dtype == torch.float32
    for residual, sum_dtype in ((half, torch.float16), (single, torch.float32)):
        output, total = _add_layer_norm_autocast(*rule, half, residual, half[0], None, EPSILON)
        assert output.dtype == torch.float32 and total.dtype == sum_dtype
        only = _layer_norm_of_sum_autocast(*rule, half, residual, half[0], None, EPSILON)
        assert torch.equal(only, output)
        torch.testing.assert_close(output, F.layer_norm((half + residual).float(), (8,), half[0].float()))
