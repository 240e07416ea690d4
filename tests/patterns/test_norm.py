"""Norms, alone and with a residual in front: what matches, what counts as a residual, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from kernl.testing import assert_within_budget
from tests.graph.helpers import Captured, capture

pytestmark = pytest.mark.either_end

HIDDEN = 24


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*(shape or (2, 5, HIDDEN)), dtype=dtype)


def check(function: Any, *args: torch.Tensor, dynamic: bool | None = None) -> Captured:
    with torch.no_grad():
        expected = function(*args)
    found = capture(function, *args, registry=default_registry, strict=True, dynamic=dynamic)
    torch.testing.assert_close(found.result, expected)
    assert found.guards_added == 0
    return found


def counts(found: Captured) -> tuple[int, int]:
    return found.report.matched("layer_norm"), found.report.matched("add_layer_norm")


@pytest.mark.parametrize("dynamic", [None, True])
def test_layer_norm(dynamic: bool | None) -> None:
    found = check(nn.LayerNorm(HIDDEN, eps=1e-3), x(), dynamic=dynamic)
    assert found.ops() == ["kernl::layer_norm"]
    assert found.call("kernl::layer_norm")["eps"] == 1e-3
    found = check(nn.LayerNorm(HIDDEN, elementwise_affine=False), x(), dynamic=dynamic)
    assert found.call("kernl::layer_norm")["weight"] is None


@pytest.mark.parametrize("dynamic", [None, True])
def test_residual(dynamic: bool | None) -> None:
    norm = nn.LayerNorm(HIDDEN)
    found = check(lambda a, b: norm(a.cos() + b), x(), x(), dynamic=dynamic)
    assert found.ops() == ["cos", "kernl::layer_norm_of_sum"] and counts(found) == (0, 1)


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_sum_used_again_is_the_second_result(dynamic: bool | None) -> None:
    norm = nn.LayerNorm(HIDDEN)

    def pre_norm(a: torch.Tensor, b: torch.Tensor) -> Any:
        total = a.add(b.cos())
        return norm(total).exp() + total

    found = check(pre_norm, x(), x(), dynamic=dynamic)
    assert found.ops() == ["cos", "kernl::add_layer_norm", "getitem", "getitem", "exp", "add"]


@pytest.mark.both_ends
def test_in_place_residual() -> None:
    norm = nn.LayerNorm(HIDDEN)

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        hidden = a.cos()
        hidden += b
        return norm(hidden)

    assert counts(check(function, x(), x())) == (0, 1)


def test_operands_that_broadcast() -> None:
    norm = nn.LayerNorm(HIDDEN)
    assert counts(check(lambda a, b: norm(a + b), x(), x(1, 5, HIDDEN))) == (0, 1)


def cohere(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    given = x.dtype
    x = x.to(torch.float32)
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    x = (x - mean) * torch.rsqrt(variance + 1e-5)
    return (weight.to(torch.float32) * x).to(given)


def deberta(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    given = x.dtype
    x = x.float()
    mean = x.mean(-1, keepdim=True)
    variance = (x - mean).pow(2).mean(-1, keepdim=True)
    x = (x - mean) / torch.sqrt(variance + 1e-5)
    return weight * x.to(given) + bias


def ibert(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    y = x - x.mean(axis=2, keepdim=True)
    return y / torch.sqrt(1e-5 + torch.mean(y**2, axis=2, keepdim=True)) * weight + bias


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("formula", [cohere, deberta, ibert])
def test_written_out(formula: Any, dynamic: bool | None) -> None:
    weight, bias = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))
    found = check(lambda a, b: formula(a.cos() + b, weight, bias), x(), x(), dynamic=dynamic)
    assert found.ops() == ["cos", "kernl::layer_norm_of_sum"]
    call = found.call("kernl::layer_norm_of_sum")
    assert call["eps"] == 1e-5 and (call["bias"] is None) == (formula is cohere)


@pytest.mark.parametrize("formula", [cohere, deberta])
def test_written_out_in_16_bits(formula: Any) -> None:
    parameters = [nn.Parameter(torch.randn(HIDDEN, dtype=torch.bfloat16)) for _ in range(2)]
    tensor = x(dtype=torch.bfloat16)
    found = capture(lambda x: formula(x, *parameters), tensor, registry=default_registry, strict=True)
    assert found.ops() == ["kernl::layer_norm"]
    exact = formula(tensor.double(), *(parameter.double() for parameter in parameters))
    assert_within_budget(found.result, exact, formula(tensor, *parameters))


def test_formulas_that_are_no_layer_norm() -> None:
    weight, bias = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))

    def refusal(function: Any, tensor: torch.Tensor) -> str:
        found = check(function, tensor)
        assert not any(op.startswith("kernl::") for op in found.ops())
        (reason,) = found.report.refused("layer_norm_formula")
        return reason

    def powered(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(x.pow(4).mean(-1, keepdim=True) + 1e-5))

    assert refusal(powered, x()) == "the exponent is 4 (accepted: 2)"

    def of_columns(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(1, keepdim=True)
        return weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5))

    assert refusal(of_columns, x()) == "the mean is over dimension 1 (accepted: the last)"
    half = [parameter.bfloat16() for parameter in (weight, bias)]
    assert (
        refusal(lambda x: ibert(x, *half), x(dtype=torch.bfloat16)) == "the statistics are bfloat16 (accepted: float32)"
    )
    # a table in the place of a weight
    table = nn.Parameter(torch.randn(5, HIDDEN))
    found = check(lambda x: cohere(x, table, bias), x())
    assert not found.report.matched("layer_norm_formula") and not found.report.refusals


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("inside", [False, True], ids=["result", "normalized"])
def test_written_out_with_a_cast_that_is_there_to_lose_digits(dtype: torch.dtype, inside: bool) -> None:
    weight, bias = nn.Parameter(torch.randn(HIDDEN)), nn.Parameter(torch.randn(HIDDEN))

    def layer(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return x.to(dtype).float() * weight + bias if inside else (x * weight + bias).to(dtype).float()

    def root_mean_square(x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * x.to(dtype).float() if inside else (weight * x).to(dtype).float()

    for function in (layer, root_mean_square):
        check(function, x())


class Embedding(nn.Module):
    """The first norm of a model: of a sum of lookups, or of an activation and a table."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.word, self.place = nn.Embedding(11, HIDDEN), nn.Embedding(16, HIDDEN)
        self.table = nn.Parameter(torch.randn(1, 16, HIDDEN))
        self.register_buffer("positions", torch.arange(16)[None])
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words, length = self.word(ids), ids.shape[1]
        if self.kind == "positions from a buffer":
            return self.norm(words + self.place(self.positions[:, :length]))
        if self.kind == "positions from the input":
            return self.norm(words * 2.0 + self.place(ids.cumsum(1) % 16))
        if self.kind == "positions counted":
            return self.norm(self.place(torch.arange(length)) + words)
        if self.kind == "three lookups":
            return self.norm(words + self.word(ids * 0) + self.place(self.positions[:, :length]))
        return self.norm(words.cos() + self.table[:, :length])  # a table beside what has been computed


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "kind", ["positions from a buffer", "positions from the input", "positions counted", "three lookups", "a table"]
)
def test_an_embedding_sum_is_no_residual_whatever_the_batch(kind: str, batch: int) -> None:
    found = check(Embedding(kind), torch.randint(0, 11, (batch, 7)))
    assert counts(found) == (1, 0)
    if kind in ("positions from the input", "a table"):  # no plain sum of lookups: a scaled one, and an activation
        (reason,) = found.report.refused("add_layer_norm")
        assert "left to lowering" in reason
    else:
        assert found.report.matched("embedding_sum") == 1 and not found.report.refused("add_layer_norm")


def test_an_embedding_beside_an_activation_is_a_residual() -> None:
    word, linear, norm = nn.Embedding(11, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)

    def first_layer(ids: torch.Tensor) -> torch.Tensor:
        hidden = word(ids)
        return norm(hidden + linear(hidden))

    assert counts(check(first_layer, torch.randint(0, 11, (1, 7)))) == (0, 1)


def test_refusals() -> None:
    def reasons(function: Any, *args: torch.Tensor, pattern: str = "layer_norm") -> dict[str, int]:
        found = check(function, *args)
        assert not found.report.matched(pattern)
        return found.report.refused(pattern)

    assert reasons(lambda a: F.layer_norm(a, (5, HIDDEN)), x()) == {
        "normalised over 2 dimensions (accepted: the last one)": 1
    }
    accepted = "(accepted: float16, bfloat16, float32)"
    assert reasons(lambda a: F.layer_norm(a, (HIDDEN,)), x(dtype=torch.float64)) == {f"dtype float64 {accepted}": 1}
    assert reasons(lambda a, w: F.layer_norm(a, (HIDDEN,), w), x(dtype=torch.bfloat16), x(HIDDEN)) == {
        "operands of different dtypes: bfloat16, float32": 1
    }
    residual = "add_layer_norm"
    assert reasons(lambda a, b: F.layer_norm(torch.add(a, b, alpha=2), (HIDDEN,)), x(), x(), pattern=residual) == {
        "the addition scales its second operand (alpha = 2)": 1
    }
    assert reasons(lambda a, b: F.layer_norm(a + b, (HIDDEN,)), x(), x(dtype=torch.float16), pattern=residual) == {
        "operands of different dtypes: float16, float32": 1
    }


def test_what_an_in_place_operation_forbids() -> None:
    def operand_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = a + b
        b[0] = 1.0
        return F.layer_norm(total, (HIDDEN,))

    def sum_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = a + b
        total[0] = 1.0
        return F.layer_norm(total, (HIDDEN,))

    for function in (operand_written, sum_written):
        a, b = x(), x()
        expected = function(a.clone(), b.clone())
        found = capture(function, a, b, registry=default_registry, strict=True)
        torch.testing.assert_close(found.result, expected)
        assert counts(found) == (1, 0)  # the norm alone is still ours
        assert "in-place operation (setitem)" in next(iter(found.report.refused("add_layer_norm")))


def test_autocast_casts_as_it_did() -> None:
    norm = nn.LayerNorm(HIDDEN)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = check(lambda a, b: norm(a.bfloat16() + b.bfloat16()), x(), x())
    assert counts(found) == (0, 1)


def test_gradients() -> None:
    norm = nn.LayerNorm(HIDDEN)
    a, b = x().requires_grad_(), x().requires_grad_()
    function = lambda a, b: norm(a + b)  # noqa: E731
    found = capture(function, a, b, registry=default_registry, strict=True, grad=True)
    assert counts(found) == (0, 1)
    seed = torch.randn_like(a)
    mine = torch.autograd.grad(found.result, [a, b, norm.weight, norm.bias], seed)
    plain = torch.autograd.grad(function(a, b), [a, b, norm.weight, norm.bias], seed)
    torch.testing.assert_close(mine, plain)
