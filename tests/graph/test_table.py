"""Every spelling of an operation reads alike."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph, Node

from kernl.graph import call_of
from kernl.graph.table import op_name
from tests.graph.helpers import capture

x = torch.randn(2, 3, 4)
y = torch.randn(2, 3, 4)
b = x > 0


def read(function: Any, *args: Any) -> tuple[str, dict[str, Any]]:
    """The only call of a function, tensors shown by the names of the function's parameters."""
    found = capture(function, *args, rewriting=False, canonical=False)
    (node,) = found.calls()
    call = call_of(node)
    assert call is not None, f"{node.target} is not understood"
    shown = {
        name: value.name.removeprefix("l_").strip("_") if isinstance(value, Node) else value
        for name, value in call.arguments.items()
    }
    return call.op, shown


SPELLINGS = {
    "add": [
        lambda x, y: x + y,
        lambda x, y: torch.add(x, y),
        lambda x, y: x.add(other=y),
        lambda x, y: torch.add(input=x, other=y, alpha=1),
    ],
    "sub": [lambda x, y: x - y, lambda x, y: x.sub(y), lambda x, y: torch.rsub(y, x)],
    "mul": [lambda x, y: x * y, lambda x, y: torch.mul(x, y), lambda x, y: x.multiply(y)],
    "div": [lambda x, y: x / y, lambda x, y: torch.true_divide(x, y), lambda x, y: x.div(y, rounding_mode=None)],
    "matmul": [lambda x, y: x @ y, lambda x, y: torch.matmul(x, y), lambda x, y: x.matmul(y)],
    "ge": [lambda x, y: x >= y, lambda x, y: torch.ge(x, y), lambda x, y: x.greater_equal(y)],
}


@pytest.mark.parametrize("op", SPELLINGS)
def test_two_operands(op: str) -> None:
    for function in SPELLINGS[op]:
        name, arguments = read(function, x, y.mT.contiguous() if op == "matmul" else y)
        assert name == op
        assert (arguments["input"], arguments["other"]) == ("x", "y")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.transpose(1, 2),
        lambda x: torch.swapaxes(x, -1, -2),
        lambda x: x.transpose(dim0=2, dim1=1),
        lambda x: x.mT,
    ],
)
def test_transpose(function: Any) -> None:
    assert read(function, x) == ("transpose", {"input": "x", "dim0": 1, "dim1": 2})


def test_transpose_of_a_matrix() -> None:
    for function in (lambda x: x.t(), lambda x: torch.t(x), lambda x: x.T):
        assert read(function, torch.randn(2, 3)) == ("transpose", {"input": "x", "dim0": 0, "dim1": 1})


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, -1),
        lambda x: x.softmax(dim=2),
        lambda x: torch.softmax(x, 2),
        lambda x: F.softmax(x, dim=-1),
    ],
)
def test_softmax(function: Any) -> None:
    assert read(function, x) == ("softmax", {"input": "x", "dim": 2, "dtype": None})


def test_softmax_keeps_its_dtype() -> None:
    assert read(lambda x: F.softmax(x, -1, dtype=torch.float64), x)[1]["dtype"] == torch.float64


@pytest.mark.parametrize("function", [lambda x: x.view(6, 4), lambda x: x.view((6, 4)), lambda x: x.view(size=(6, 4))])
def test_sizes_are_one_tuple(function: Any) -> None:
    assert read(function, x) == ("view", {"input": "x", "size": (6, 4)})


def test_view_as_another_dtype_is_not_a_view() -> None:
    found = capture(lambda x: x.view(torch.int32), x, rewriting=False)
    assert call_of(found.calls()[0]) is None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to(torch.float64),
        lambda x: x.double(),
        lambda x: x.type(torch.float64),
        lambda x: x.to(dtype=torch.float64, non_blocking=True),
    ],
)
def test_cast(function: Any) -> None:
    op, arguments = read(function, x)
    assert op == "to" and arguments["dtype"] == torch.float64 and arguments["device"] is None


def test_to_a_device_and_to_another_tensor() -> None:
    assert read(lambda x: x.to("cpu", torch.float16), x)[1] | {"device": None} == read(lambda x: x.half(), x)[1]
    arguments = read(lambda x, i: x.to(i), x, torch.zeros(1, dtype=torch.int64))[1]
    assert (arguments["dtype"], arguments["device"]) == (torch.int64, torch.device("cpu"))


def test_linear_norm_and_attention_fill_their_defaults() -> None:
    weight = torch.randn(5, 4)
    assert read(lambda x, w: F.linear(x, w), x, weight)[1] == {"input": "x", "weight": "w", "bias": None}
    arguments = read(lambda x: F.layer_norm(x, (4,)), x)[1]
    assert arguments == {"input": "x", "normalized_shape": (4,), "weight": None, "bias": None, "eps": 1e-5}
    op, arguments = read(lambda x: F.scaled_dot_product_attention(x, x, x, scale=0.5), x)
    assert op == "scaled_dot_product_attention"
    assert (arguments["attn_mask"], arguments["is_causal"], arguments["scale"]) == (None, False, 0.5)


def test_where_in_both_spellings() -> None:
    expected = ("where", {"condition": "b", "input": "x", "other": 0.0})
    assert read(lambda b, x: torch.where(b, x, 0.0), b, x) == expected
    name, arguments = read(lambda x, b: x.where(b, 0.0), x, b)
    assert name == "where" and (arguments["condition"], arguments["input"]) == ("b", "x")


def test_logic_on_bools_is_bitwise_and_only_there() -> None:
    assert read(lambda b: torch.logical_not(b), b)[0] == read(lambda b: ~b, b)[0] == "invert"
    assert read(lambda b: torch.logical_and(b, b), b)[0] == read(lambda b: b & b, b)[0] == "and"
    assert read(lambda x: torch.logical_not(x), x)[0] == "logical_not"


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: torch.arange(4), (0, 4, 1)),
        (lambda: torch.arange(1, 4), (1, 4, 1)),
        (lambda: torch.arange(4, 0, -1), (4, 0, -1)),
    ],
)
def test_arange(function: Any, expected: tuple[int, int, int]) -> None:
    op, arguments = read(function)
    assert op == "arange" and (arguments["start"], arguments["end"], arguments["step"]) == expected


def test_in_place_spellings_read_as_writes() -> None:
    for function in (lambda x: x.add_(1), lambda x: operator.iadd(x, 1)):
        assert read(function, x.clone())[0] == "add_"
    assert read(lambda x: F.relu(x, inplace=True), x.clone())[0] == "relu_"


def test_dropout_that_does_nothing_is_no_write() -> None:
    assert read(lambda x: F.dropout(x, 0.1, training=False, inplace=True), x)[0] == "dropout"
    assert read(lambda x: F.dropout(x, 0.0, training=True, inplace=True), x)[0] == "dropout"
    assert read(lambda x: F.dropout(x, 0.1, training=True, inplace=True), x.clone())[0] == "dropout_"
    arguments = read(lambda x: torch.dropout(x, 0.25, train=False), x)[1]
    assert arguments == {"input": "x", "p": 0.25, "training": False}


def test_operators_are_read_by_their_schema() -> None:
    graph = Graph()
    node = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), 2), {})
    call = call_of(node)
    assert call is not None and call.op == "aten::add" and call["alpha"] == 1 and call["other"] == 2


def test_what_does_not_fit_is_not_understood() -> None:
    graph = Graph()
    operand = graph.placeholder("x")
    for function, args, kwargs in [
        (torch.add, (operand, 1, 1, 1), {}),
        (torch.add, (operand,), {}),
        (torch.add, (operand, 1), {"out": operand}),
        (F.softmax, (operand,), {"unknown": 1}),
        (math.sqrt, (2.0,), {}),
    ]:
        assert call_of(graph.call_function(function, args, kwargs)) is None
    assert op_name(graph.call_function(math.sqrt, (2.0,))) == "sqrt"
    assert op_name(graph.call_method("frobnicate", (operand,))) == "frobnicate"
    assert call_of(operand) is None and call_of(3) is None
