"""Linears: with their activation however it is written, merged when they share an input, and alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from tests.graph.helpers import Captured, capture

pytestmark = pytest.mark.either_end

torch.manual_seed(0)
linear = nn.Linear(8, 16)


def x(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 5, 8, dtype=dtype)


def check(function: Any, *args: torch.Tensor, dynamic: bool | None = None, tolerance: float = 1e-5) -> Captured:
    with torch.no_grad():
        expected = function(*args)
    found = capture(function, *args, registry=default_registry, strict=True, dynamic=dynamic)
    torch.testing.assert_close(found.result, expected, atol=tolerance, rtol=tolerance)
    assert found.guards_added == 0
    return found


def gelu_new(x: torch.Tensor, cubic: float = 0.044715) -> torch.Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + cubic * torch.pow(x, 3.0))))


ACTIVATIONS = {
    "gelu": F.gelu,
    "x / 2 (1 + erf)": lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "(1 + erf) x / 2": lambda x: (torch.erf(x * 0.70710678) + 1) * x / 2,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_new": gelu_new,
    "gelu_new, other order": lambda x: x * (0.5 * (torch.tanh(0.79788456 * (x**3 * 0.044715 + x)) + 1)),
    "gelu_fast": lambda x: 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x))),
    "relu": F.relu,
    "relu in place": lambda x: F.relu(x, inplace=True),
    "silu": F.silu,
    "x sigmoid(x)": lambda x: x * torch.sigmoid(x),
    "sigmoid(x) x": lambda x: x.sigmoid() * x,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "nn.Module": nn.GELU(),
}
FUSED = {
    "gelu": ["gelu", "x / 2 (1 + erf)", "(1 + erf) x / 2", "nn.Module"],
    "gelu_tanh": ["gelu tanh", "gelu_new", "gelu_new, other order", "gelu_fast"],
    "relu": ["relu", "relu in place"],
    "silu": ["silu", "x sigmoid(x)", "sigmoid(x) x"],
    "tanh": ["tanh"],
    "quick_gelu": ["quick_gelu"],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    activation = ACTIVATIONS[name]
    found = check(lambda x: activation(linear(x)), x(), dynamic=True)
    assert found.ops() == ["kernl::linear"]
    assert name in FUSED[found.call("kernl::linear")["activation"]]
    assert not found.report.refusals


def test_no_bias_and_a_single_vector() -> None:
    plain = nn.Linear(8, 16, bias=False)
    found = check(lambda x: F.gelu(plain(x)), torch.randn(8))
    assert found.call("kernl::linear")["bias"] is None


def test_other_constants_are_other_functions() -> None:
    def refusal(function: Any, pattern: str) -> str:
        found = check(function, x())
        assert found.report.matched("linear") == 1 and not found.report.matched(pattern)
        (reason,) = found.report.refused(pattern)
        return reason

    assert refusal(lambda x: gelu_new(linear(x), 0.05), "linear_gelu_new") == (
        "the cubic coefficient is 0.05 (accepted: 0.044715)"
    )
    assert "the exponent is 2" in refusal(
        lambda x: 0.5 * (y := linear(x)) * (1.0 + torch.tanh(0.7978845 * (y + 0.044715 * torch.pow(y, 2)))),
        "linear_gelu_new",
    )
    assert "the slope is 2" in refusal(lambda x: (y := linear(x)) * torch.sigmoid(2 * y), "linear_quick_gelu")
    assert "the slope is 1" in refusal(lambda x: (y := linear(x)) * 0.5 * (1 + torch.erf(y * 1.0)), "linear_gelu_erf")
    assert "the factor is 0.25" in refusal(
        lambda x: (y := linear(x)) * 0.25 * (1 + torch.erf(y / math.sqrt(2))), "linear_gelu_erf"
    )


# Gated


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated(name: str) -> None:
    activation, up = ACTIVATIONS[name], nn.Linear(8, 16)
    for function in (lambda x: activation(linear(x)) * up(x), lambda x: up(x) * activation(linear(x))):
        found = check(function, x(), dynamic=True)
        assert found.ops() == ["kernl::gated_linear"]
        call = found.call("kernl::gated_linear")
        assert name in FUSED[call["activation"]] and not found.report.refusals
        assert call["gate_weight"] is not call["up_weight"]


def test_gated_as_models_write_it() -> None:
    """No biases, the gate computed after what it gates, a dropout and the second linear behind it."""
    gate, up, down = (nn.Linear(*sizes, bias=False) for sizes in ((8, 16), (8, 16), (16, 8)))

    def block(x: torch.Tensor) -> torch.Tensor:
        value = up(x)
        return down(F.dropout(value * F.silu(gate(x)), 0.1, training=False))

    for dynamic in (None, True):
        found = check(block, x(), dynamic=dynamic)
        assert found.ops() == ["kernl::gated_linear", "kernl::linear"]
        call = found.call("kernl::gated_linear")
        assert call["gate_bias"] is None and call["up_bias"] is None
    assert found.report.matched("gated_silu") == 1 and found.report.matched("linear") == 1


def test_a_second_linear_kept_in_fp32_keeps_its_cast() -> None:
    """T5's `wo`."""
    gate, up = (nn.Linear(8, 16, bias=False).bfloat16() for _ in range(2))
    wo = nn.Linear(16, 8, bias=False)
    found = check(lambda x: wo((gelu_new(gate(x)) * up(x)).to(wo.weight.dtype)), x(torch.bfloat16), tolerance=2e-2)
    assert found.ops() == ["kernl::gated_linear", "to", "kernl::linear"] and found.result.dtype == torch.float32
    assert found.call("kernl::gated_linear")["activation"] == "gelu_tanh"


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "relu in place"])  # it writes to both halves
def test_gated_by_half_of_one_linear(name: str) -> None:
    """ModernBERT, Phi3 (the gate first, or last in the product), DINOv2."""
    activation, both = ACTIVATIONS[name], nn.Linear(8, 32)

    def chunked(x: torch.Tensor) -> torch.Tensor:
        gate, up = both(x).chunk(2, dim=-1)
        return up * activation(gate)

    def split(x: torch.Tensor) -> torch.Tensor:
        up, gate = both(x).split(16, dim=-1)
        return activation(gate) * up

    for function, gate_first in ((chunked, True), (split, False)):
        found = check(function, x(), dynamic=True)
        assert found.ops() == ["getitem"] * 4 + ["kernl::gated_linear"] and not found.report.refusals
        call = found.call("kernl::gated_linear")
        assert name in FUSED[call["activation"]]
        rows = [call[argument].args[1] for argument in ("gate_weight", "up_weight", "gate_bias", "up_bias")]
        assert rows == [slice(0, 16), slice(16, 32)][:: 1 if gate_first else -1] * 2


def test_what_is_not_gated_by_its_other_half() -> None:
    both, uneven = nn.Linear(8, 32), nn.Linear(8, 48, bias=False)

    def third(x: torch.Tensor) -> torch.Tensor:
        gate, up, rest = uneven(x).split(16, dim=-1)
        return F.silu(gate) * up + rest

    def whole_rows(x: torch.Tensor) -> torch.Tensor:
        gate, up = both(x[:, :4]).chunk(2, dim=1)
        return F.silu(gate) * up

    def twice(x: torch.Tensor) -> torch.Tensor:
        gate, up = both(x).chunk(2, dim=-1)
        return F.silu(gate) * gate + up

    for function in (third, twice):
        found = check(function, x())
        (reason,) = found.report.refused("gated_silu")
        assert reason == "gate and gated are not the halves of a linear" and "kernl::linear" in found.ops()
    assert not check(whole_rows, x()).report.matched("gated_silu")


def test_what_is_no_gated_layer() -> None:
    up, narrow = nn.Linear(8, 16), nn.Linear(8, 1)
    other = x()

    def ops(function: Any) -> list[str]:
        return check(function, x()).ops()

    assert ops(lambda x: F.silu(linear(x)) * up(other)) == ["kernl::linear", "kernl::linear", "mul"]
    assert ops(lambda x: F.silu(linear(x)) * x.sum()) == ["kernl::linear", "sum", "mul"]
    assert ops(lambda x: torch.sigmoid(linear(x)) * up(x)).count("kernl::merged_linear") == 1
    assert ops(lambda x: linear(x) * up(x)).count("kernl::merged_linear") == 1

    found = check(lambda x: F.silu(linear(x)) * narrow(x), x())
    assert found.report.refused("gated_silu") == {"gate and gated linear are of different sizes": 1}
    found = check(lambda x: ((value := up(x)) * F.silu(linear(x)), value), x())
    assert found.report.refused("gated_silu") == {"a value inside the match (linear) is returned by the graph": 1}
    assert found.report.matched("linear_silu") == 1


def test_gated_in_autocast_and_with_gradients() -> None:
    up = nn.Linear(8, 16)
    function = lambda x: F.silu(linear(x)) * up(x)  # noqa: E731
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = check(function, x(), tolerance=2e-2)
    assert found.ops() == ["kernl::gated_linear"] and found.result.dtype == torch.bfloat16
    input = x().requires_grad_()
    found = capture(function, input, registry=default_registry, strict=True, grad=True)
    assert found.ops() == ["kernl::gated_linear"]
    leaves = [input, linear.weight, linear.bias, up.weight, up.bias]
    mine, plain = (torch.autograd.grad(result.cos().sum(), leaves) for result in (found.result, function(input)))
    torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)


class Conv1D(nn.Module):
    """GPT-2's linear: a weight [K, N] and a product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, 8), self.weight).view(*x.shape[:-1], 16)


@pytest.mark.parametrize("dynamic", [None, True])
def test_products_with_parameters_are_linears(dynamic: bool | None) -> None:
    layer, table = Conv1D(), nn.Parameter(torch.randn(8, 16))
    for function in (
        lambda x: F.gelu(x @ linear.weight.T + linear.bias),
        lambda x: F.gelu(torch.add(linear.bias, torch.matmul(x, linear.weight.permute(1, 0)))),
        lambda x: F.gelu(x @ linear.weight.t()),
    ):
        found = check(function, x(), dynamic=dynamic)
        assert found.ops() == ["kernl::linear"] and found.call("kernl::linear")["weight"].op == "placeholder"
    for function in (lambda x: F.gelu(layer(x)), lambda x: F.gelu(x @ table)):
        found = check(function, x(), dynamic=dynamic)
        assert found.ops()[-2:] == ["transpose", "kernl::linear"] and "gelu" not in found.report.leftover
    found = check(lambda x: torch.addmm(layer.bias, x, layer.weight), torch.randn(5, 8), dynamic=dynamic)
    assert found.ops() == ["transpose", "kernl::linear"]


def test_products_that_are_no_linears() -> None:
    layer, vector = Conv1D(), nn.Parameter(torch.randn(8))
    given, column = torch.randn(8, 16), nn.Parameter(torch.randn(5, 1))
    assert check(lambda x, w: x @ w, x(), given).ops() == ["matmul"]
    assert check(lambda x: x @ vector, x()).ops() == ["matmul"]
    assert check(lambda x: vector @ layer.weight + x.sum(), x()).ops() == ["matmul", "sum", "add"]
    assert check(lambda x: x @ linear.weight.T + column, x()).ops() == ["kernl::linear", "add"]
    rows = torch.randn(5, 16)
    assert check(lambda x, b: torch.addmm(b, x, layer.weight), x()[0], rows).ops() == ["addmm"]
    assert check(lambda x: torch.addmm(layer.bias, x, layer.weight, beta=2), x()[0]).ops() == ["addmm"]
    # a view by others than those of the rows stays
    found = check(lambda x: torch.addmm(layer.bias, x.view(-1, 8), layer.weight).view(5, 2, 16), x())
    assert found.ops() == ["view", "transpose", "kernl::linear", "view"]


@pytest.mark.parametrize("dims", [(0, 0), (1, 1), (1, -1)])
def test_a_dimension_changed_for_itself_is_no_transpose(dims: tuple[int, int]) -> None:
    square = nn.Parameter(torch.randn(8, 8))
    check(lambda x: x @ square.transpose(*dims), x())


@pytest.mark.parametrize("sizes", [[2, 1, 1], [1, 2, 1]])
def test_parts_of_which_one_broadcasts_are_no_halves(sizes: list[int]) -> None:
    parts = nn.Linear(8, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        first, second, _ = parts(x).split(sizes, dim=-1)
        return F.silu(first) * second if sizes[0] == 2 else F.silu(second) * first

    assert not check(function, x()).report.matched("gated_silu")


def test_a_linear_used_before_its_activation_too() -> None:
    found = check(lambda x: (y := linear(x)).relu() + y, x())
    assert found.report.refused("linear_relu") == {
        "a value inside the match (linear) is used by add, outside the match": 1
    }
    assert found.report.matched("linear") == 1 and found.ops() == ["kernl::linear", "relu", "add"]


def test_in_place_between_linear_and_activation() -> None:
    def written(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        y[0] = 1.0
        return F.gelu(y)

    def operand_written(x: torch.Tensor) -> torch.Tensor:
        y = linear(x)
        x.zero_()
        return F.gelu(y)

    for function in (written, operand_written):
        tensor = x()
        with torch.no_grad():
            expected = function(tensor.clone())
        found = capture(function, tensor, registry=default_registry, strict=True)
        torch.testing.assert_close(found.result, expected)
        assert found.report.matched("linear") == 1 and not found.report.matched("linear_gelu")
    assert "in-place operation (zero_) writes an operand" in next(iter(found.report.refused("linear_gelu")))


def test_refused_operands() -> None:
    double = nn.Linear(8, 16).double()
    found = check(lambda x: F.gelu(double(x)), x(torch.float64))
    reason = "dtype float64 (accepted: float16, bfloat16, float32)"
    assert found.report.refused("linear_gelu") == found.report.refused("linear") == {reason: 1}
    assert found.ops() == ["linear", "gelu"]
    vector = torch.randn(8)
    found = check(lambda x, v: F.linear(x, v), x(), vector)
    assert found.report.refused("linear") == {"the weight has 1 dimensions (accepted: 2)": 1}


class Projections(nn.Module):
    """Linears of one input, as many as there are sizes."""

    def __init__(self, *sizes: int, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, size, bias=bias) for size in sizes)

    def forward(self, x: torch.Tensor) -> Any:
        return [layer(x).cos() for layer in self.layers]


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((8,), []),
        ((8, 8), [2]),
        ((8, 4, 16), [3]),
        ((8,) * 4, [4]),
        ((8,) * 5, [3, 2]),
        ((8,) * 6, [3, 3]),
        ((4,) * 9, [3, 3, 3]),
    ],
)
def test_linears_of_one_input_are_merged(sizes: tuple[int, ...], groups: list[int]) -> None:
    found = check(Projections(*sizes), x(), dynamic=True)
    merged = [node for node in found.calls() if node.target is torch.ops.kernl.merged_linear.default]
    assert [len(node.args[1]) for node in merged] == groups
    assert found.report.matched("linear") == len(sizes) - sum(groups)
    names = [weight.name for node in merged for weight in node.args[1]]
    assert names == sorted(names), "in the order of the graph"


def test_biases_are_optional_one_by_one() -> None:
    model = Projections(8, 8, 8)
    model.layers[1] = nn.Linear(8, 8, bias=False)
    found = check(model, x())
    biases = found.call("kernl::merged_linear")["biases"]
    assert [bias is None for bias in biases] == [False, True, False]


def test_what_is_not_merged() -> None:
    first, second, third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
    # one feeds the other
    found = check(lambda x: second(first(x)) + x, x())
    assert found.report.matched("merged_linear") == 0 and found.report.matched("linear") == 2
    # another product lies in between
    found = check(lambda x: (a := first(x)) + second(a) + third(x), x())
    assert found.report.matched("merged_linear") == 0 and found.report.matched("linear") == 3
    # an activation has taken one of them
    found = check(lambda x: F.silu(first(x)) + second(x), x())
    assert found.ops() == ["kernl::linear", "kernl::linear", "add"]
    # of another dtype
    half = torch.randn(8, 8, dtype=torch.float64)
    found = check(lambda x, h: (first(x), F.linear(x.double(), h)), x(), half)
    assert found.report.matched("merged_linear") == 0


def test_a_write_between_merged_linears_is_refused() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        one = first(x)
        x.mul_(2)
        return one + second(x)

    tensor = x()
    with torch.no_grad():
        expected = function(tensor.clone())
    found = capture(function, tensor, registry=default_registry, strict=True)
    torch.testing.assert_close(found.result, expected)
    assert "in-place operation (mul_)" in next(iter(found.report.refused("merged_linear")))
    assert found.report.matched("linear") == 2


def test_weights_are_read_where_they_are() -> None:
    model = Projections(8, 8, 8)
    tensor = x()
    found = check(model, tensor)
    with torch.no_grad():
        model.layers[1].weight.mul_(2)
        model.layers[2].weight.data = torch.randn(8, 8)
        torch.testing.assert_close(found.function(tensor), model(tensor))
    assert len(found.graphs) == 1


def test_autocast() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = check(lambda x: F.relu(linear(x)), x(), tolerance=2e-2)
    assert found.ops() == ["kernl::linear"] and found.result.dtype == torch.bfloat16


def test_gradients() -> None:
    model = Projections(8, 4, 16)
    tensor = x().requires_grad_()
    function = lambda x: sum(result.sum() for result in model(x)) + F.gelu(linear(x)).sum()  # noqa: E731
    found = capture(function, tensor, registry=default_registry, strict=True, grad=True)
    assert found.report.matched("merged_linear") == 1 and found.report.matched("linear_gelu") == 1
    parameters = [tensor, *model.parameters(), *linear.parameters()]
    mine = torch.autograd.grad(found.result, parameters)
    torch.testing.assert_close(mine, torch.autograd.grad(function(tensor), parameters))


def test_gradients_of_halves_and_of_products() -> None:
    both, layer = nn.Linear(8, 32), Conv1D()
    function = lambda x: (F.silu((h := both(x).chunk(2, dim=-1))[0]) * h[1] + F.gelu(layer(x))).cos().sum()  # noqa: E731
    tensor = x().requires_grad_()
    found = capture(function, tensor, registry=default_registry, strict=True, grad=True)
    assert found.report.matched("gated_silu") == 1 and found.report.matched("linear_gelu") == 1
    leaves = [tensor, *both.parameters(), *layer.parameters()]
    mine, plain = (torch.autograd.grad(result, leaves) for result in (found.result, function(tensor)))
    torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
