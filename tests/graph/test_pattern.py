"""What the pattern language accepts and what it binds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernl.graph import ANY, Pattern, anything, either, op, scalar, scaled, through, var
from tests.graph.helpers import capture

x, y = torch.randn(2, 3), torch.randn(2, 3)


def ways(pattern: Pattern, function: Any, *args: torch.Tensor) -> list[dict[str, Any]]:
    """Every way in which a pattern fits a function's last call; nodes shown by the name of what is called."""
    (*_, last) = capture(function, *args, rewriting=False, canonical=False).calls()
    found = []
    for bindings, nodes in pattern.match(last):
        assert last in nodes
        found.append({name: getattr(value, "name", value) for name, value in bindings.items()})
    return found


def test_arguments_by_place_and_by_name() -> None:
    for pattern in (
        op("linear", var("a"), var("w"), var("b", or_none=True)),
        op("linear", input=var("a"), bias=var("b", or_none=True), weight=var("w")),
    ):
        assert ways(pattern, lambda x, y: F.linear(x, y), x, y) == [{"a": "l_x_", "w": "l_y_", "b": None}]
    assert not ways(op("linear", var("a"), var("w"), var("b")), lambda x, y: F.linear(x, y), x, y)


def test_an_argument_that_is_not_mentioned_has_its_default() -> None:
    pattern = op("add", var("a"), var("b"))
    assert ways(pattern, lambda x, y: torch.add(x, y, alpha=1), x, y)
    assert not ways(pattern, lambda x, y: torch.add(x, y, alpha=2), x, y)
    assert (
        ways(op("add", var("a"), var("b"), alpha=scalar("s")), lambda x, y: torch.add(x, y, alpha=2), x, y)[0]["s"] == 2
    )
    assert not ways(op("softmax", var("a"), dim=1), lambda x: F.softmax(x, 1, dtype=torch.float64), x)


def test_commutative_operations_match_in_both_orders() -> None:
    pattern = op("add", op("exp", var("a")), var("b"))
    expected = [{"a": "l_x_", "b": "l_y_"}]
    assert ways(pattern, lambda x, y: x.exp() + y, x, y) == expected
    assert ways(pattern, lambda x, y: y + x.exp(), x, y) == expected
    assert not ways(op("sub", op("exp", var("a")), var("b")), lambda x, y: y - x.exp(), x, y)
    # by name, the order is meant
    assert not ways(op("add", input=op("exp", var("a")), other=var("b")), lambda x, y: y + x.exp(), x, y)
    # both ways are offered, so that a rewrite that refuses one can have the other
    assert len(ways(pattern, lambda x, y: x.exp() + y.exp(), x, y)) == 2


def test_the_same_name_is_the_same_thing() -> None:
    pattern = op("mul", var("a"), op("sigmoid", var("a")))
    assert ways(pattern, lambda x: x * x.sigmoid(), x)
    assert not ways(pattern, lambda x, y: x * y.sigmoid(), x, y)
    pattern = op("mul", op("add", var("a"), scalar("c")), scalar("c"))
    assert ways(pattern, lambda x: (x + 2) * 2, x) and not ways(pattern, lambda x: (x + 2) * 3, x)


def test_dimensions_count_from_either_end() -> None:
    for dim in (-1, 1):
        for function in (lambda x: F.softmax(x, -1), lambda x: F.softmax(x, 1)):
            assert ways(op("softmax", var("a"), dim=dim), function, x)
    assert not ways(op("softmax", var("a"), dim=0), lambda x: F.softmax(x, -1), x)
    assert ways(op("transpose", var("a"), dim0=-2, dim1=-1), lambda x: x.transpose(1, 0), x)


@pytest.mark.parametrize(
    ("function", "scale"),
    [(lambda x: x * 0.25, 0.25), (lambda x: 0.25 * x, 0.25), (lambda x: x / 4, 0.25), (lambda x: torch.mul(x, 2), 2.0)],
)
def test_scaled_takes_every_way_to_scale(function: Any, scale: float) -> None:
    assert ways(scaled(var("a"), "scale"), function, x) == [{"a": "l_x_", "scale": scale}]


def test_scaled_is_by_a_number() -> None:
    for function in (lambda x, y: x * y, lambda x, y: 2 / x, lambda x, y: torch.div(x, 2, rounding_mode="floor")):
        assert not ways(scaled(var("a"), "scale"), function, x, y)


def test_through_any_number_of_wrappers() -> None:
    pattern = op("exp", through(op("cos", var("a")), "to", "contiguous"))
    assert ways(pattern, lambda x: x.cos().exp(), x)
    assert ways(pattern, lambda x: x.cos().double().contiguous().exp(), x)
    assert not ways(pattern, lambda x: x.cos().clone().exp(), x)
    pattern = op("exp", through(op("cos", var("a")), "dropout"))
    assert ways(pattern, lambda x: F.dropout(x.cos(), training=False).exp(), x)
    assert not ways(pattern, lambda x: F.dropout(x.cos(), training=True).exp(), x)


def test_numbers_are_equal_whatever_their_type_and_a_bool_is_none() -> None:
    assert ways(op("pow", var("a"), 2), lambda x: x**2.0, x) and ways(op("pow", var("a"), 2.0), lambda x: x**2, x)
    assert not ways(op("mul", var("a"), 1), lambda x: x * True, x)


def test_alternatives_and_names_of_nodes() -> None:
    pattern = op("exp", op("cos", var("a")).named("inner") | op("sin", var("a")).named("inner"))
    assert ways(pattern, lambda x: x.sin().exp(), x) == [{"a": "l_x_", "inner": "sin"}]
    assert ways(either(op("cos", var("a")), op("sin", ANY)), lambda x: x.sin(), x) == [{}]
    assert ways(op(("cos", "sin"), var("a")), lambda x: x.sin(), x)


def test_variables_are_tensors_and_scalars_are_numbers() -> None:
    assert not ways(op("mul", var("a"), var("b")), lambda x: x * 2, x)
    assert not ways(op("mul", var("a"), scalar("s")), lambda x, y: x * y, x, y)
    assert ways(op("getitem", var("a"), anything("index")), lambda x: x[:, None], x)[0]["index"][1] is None
    assert ways(op("gelu", var("a"), approximate="tanh"), lambda x: F.gelu(x, approximate="tanh"), x)


def test_a_pattern_over_operators_of_torch_ops() -> None:
    pattern = op("aten::add", var("a"), var("b"))
    assert ways(pattern, lambda x, y: torch.ops.aten.add.Tensor(x, y), x, y)
    assert not ways(pattern, lambda x, y: torch.ops.aten.add.Tensor(x, y, alpha=2), x, y)


def test_what_a_pattern_needs_and_binds() -> None:
    pattern = op("layer_norm", op("add", var("a"), var("b")).named("sum"), (4,)) | op("rms_norm", var("a"), (4,))
    assert pattern.anchors() == {"layer_norm", "rms_norm"}
    assert pattern.names() == {"a", "b", "sum"}
    assert frozenset({"add"}) in op("layer_norm", op("add", var("a"), var("b")), (4,)).needs()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: op("lineaar", var("x")), "lineaar.*operation table"),
        (lambda: op("linear", var("x"), heads=3), "heads.*the operation has .*input, weight, bias"),
        (lambda: op("exp", var("x"), var("y")), "2 positional"),
    ],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
