"""Rewriting: what is replaced, what is refused and why, and that results are the plain function's."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernl.graph import Match, Pattern, Refused, Registry, anything, emit, op, require, scalar, var
from tests.graph.helpers import Captured, capture, define, double, sum_and_relu, weighted_sum


def rules(*patterns: tuple[Pattern, Any]) -> Registry:
    registry = Registry()
    for number, (pattern, rewrite) in enumerate(patterns):
        registry.register(f"rule{number}", pattern, rewrite)
    return registry


# relu(x) * 2
DOUBLE_RELU = rules((op("mul", op("relu", var("x")), 2), lambda x: emit(double, emit(torch.relu, x))))
# relu(x + y), whose sum may be used again
SUM_AND_RELU = rules(
    (
        op("relu", op("add", var("x"), var("y")).named("sum")),
        lambda match, x, y, sum: {match.root: (both := emit(sum_and_relu, x, y))[1], sum: both[0]},
    )
)
# relu(x + y), the sum being lost
RELU_OF_SUM = rules((op("relu", op("add", var("x"), var("y"))), lambda x, y: emit(sum_and_relu, x, y)[1]))


def check(function: Any, *args: torch.Tensor, registry: Registry, **options: Any) -> Captured:
    """Rewrite and run; the result, and what was written into the inputs, must be the plain function's."""
    copies = [argument.clone() for argument in args]
    expected = function(*copies)
    found = capture(function, *args, registry=registry, **options)
    torch.testing.assert_close(found.result, expected)
    for argument, copy in zip(args, copies):
        torch.testing.assert_close(argument, copy)
    return found


def x() -> torch.Tensor:
    return torch.randn(4, 6)


def only_refusal(found: Captured) -> str:
    assert not found.report.matched("rule0")
    (reason,) = found.report.refused("rule0")
    return reason


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_match_is_replaced_and_its_nodes_are_gone(dynamic: bool | None) -> None:
    found = check(lambda x: (x.relu() * 2).cos(), x(), registry=DOUBLE_RELU, strict=True, dynamic=dynamic)
    assert found.ops() == ["relu", "kernl_test::double", "cos"]
    report = found.report
    assert report.matched("rule0") == 1 and not report.refusals
    assert report.emitted() == {"kernl_test::double": 1, "relu": 1}
    assert report.leftover == {"cos": 1}
    assert found.guards_added == 0


def test_new_nodes_carry_values_and_provenance() -> None:
    found = check(lambda x: (x.relu() * 2).cos(), x(), registry=DOUBLE_RELU, dynamic=True)
    node = next(node for node in found.calls() if node.target is double)
    value = node.meta["example_value"]
    assert isinstance(value.shape[0], torch.SymInt) and value.fake_mode is node.args[0].meta["example_value"].fake_mode
    assert "x.relu() * 2" in node.meta["stack_trace"]
    assert node.meta["kernl_pattern"] == "rule0"


def test_one_rewritten_graph_serves_all_sizes() -> None:
    function = lambda x, y: F.relu(x @ y.mT + x)  # noqa: E731
    found = check(function, torch.randn(5, 5), torch.randn(5, 5), registry=SUM_AND_RELU, dynamic=True, strict=True)
    for rows in (2, 7, 19):
        mine, other = torch.randn(rows, rows), torch.randn(rows, rows)
        with torch.no_grad():
            torch.testing.assert_close(found.function(mine, other), function(mine, other))
    assert len(found.graphs) == 1 and found.guards_added == 0 and found.report.matched("rule0") == 1


def test_several_results() -> None:
    found = check(lambda x, y: ((x + y).relu() + 1, 3 * (x + y).cos()), x(), x(), registry=SUM_AND_RELU)
    assert found.ops().count("kernl_test::sum_and_relu") == 1 and found.report.matched("rule0") == 1

    def used_again(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        return total.relu(), total.cos(), total

    found = check(used_again, x(), x(), registry=SUM_AND_RELU, strict=True)
    assert found.ops() == ["kernl_test::sum_and_relu", "getitem", "getitem", "cos"]


def test_a_result_used_before_the_match_ends_moves_the_new_node_up() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        other = total.cos()
        return total.relu() + other

    found = check(function, x(), x(), registry=SUM_AND_RELU, strict=True)
    assert found.ops()[0] == "kernl_test::sum_and_relu"


def test_an_operand_that_comes_after_the_first_use_is_refused() -> None:
    registry = rules(
        (
            op("mul", op("add", var("x"), scalar("c")).named("sum"), var("y")),
            lambda match, x, c, y, sum: {match.root: (both := emit(sum_and_relu, x, y))[0], sum: both[1]},
        )
    )

    def function(x: torch.Tensor) -> torch.Tensor:
        total = x + 1
        return total * total.cos()  # y = total.cos() needs the sum that would be replaced

    found = capture(function, x(), registry=registry)
    assert "computed after the first use" in only_refusal(found)
    torch.testing.assert_close(found.result.shape, x().shape)


def test_an_interior_value_used_elsewhere_is_refused() -> None:
    def used(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        return total.relu() + total.cos()

    reason = only_refusal(check(used, x(), x(), registry=RELU_OF_SUM))
    assert reason == "a value inside the match (add) is used by cos, outside the match"

    def returned(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        return total.relu(), total

    assert only_refusal(check(returned, x(), x(), registry=RELU_OF_SUM)).endswith("(add) is returned by the graph")


def test_a_write_between_read_and_new_node_is_refused() -> None:
    def to_an_operand(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x + y
        x.add_(1)
        return total.relu()

    def through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x + y
        x.view(-1)[3:].mul_(2)
        return total.relu()

    def by_assignment(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = x + y
        y[0] = 7
        return total.relu()

    for function in (to_an_operand, through_a_view, by_assignment):
        reason = only_refusal(check(function, x(), x(), registry=RELU_OF_SUM))
        assert "writes an operand between its read and the new node" in reason, function.__name__


def test_a_write_to_the_replaced_value_is_refused() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        total = x + y
        rows = total[1:]
        rows.mul_(3)
        return total.relu(), total

    reason = only_refusal(check(function, x(), x(), registry=SUM_AND_RELU))
    assert "writes a value inside the match" in reason


def test_writes_elsewhere_before_and_after_are_legal() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        total = x + y
        cache[0] = 1
        result = total.relu()
        y.add_(1)
        return result

    found = check(function, x(), x(), x(), registry=RELU_OF_SUM)
    assert found.report.matched("rule0") == 1


def test_an_in_place_operation_is_not_taken_for_the_functional_one() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu_(x.add_(y))

    found = check(function, x(), x(), registry=RELU_OF_SUM)
    assert not found.report.matched("rule0")


def test_changes_of_mode_inside_a_match_are_refused() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            total = x + y
        return total.relu()

    found = capture(function, x().requires_grad_(), x(), registry=RELU_OF_SUM, grad=True)
    assert "mode changes inside the match (_set_grad_enabled)" in only_refusal(found)
    assert not found.result.requires_grad


def test_a_result_of_another_dtype_or_size_is_refused() -> None:
    as_double = rules((op("cos", var("x")), lambda x: emit(torch.ops.aten.to.dtype, x, torch.float64)))
    found = check(lambda x: x.cos().exp(), x(), registry=as_double)
    assert only_refusal(found) == "the result would be float64 [4, 6] on cpu in place of float32 [4, 6] on cpu"
    one_row = rules((op("cos", var("x")), lambda x: emit(operator.getitem, emit(torch.cos, x), 0)))
    assert "float32 [6]" in only_refusal(check(lambda x: x.cos().exp(), x(), registry=one_row))


transposed_relu = define("transposed_relu(Tensor x) -> Tensor", lambda x: x.mT.contiguous().relu().mT)
OTHER_STRIDES = rules((op("relu", var("x")), lambda x: emit(transposed_relu, x)))


@pytest.mark.parametrize("dynamic", [None, True])
def test_other_strides_are_carried_downstream(dynamic: bool | None) -> None:
    function = lambda x: (x.relu().mT.contiguous() + 1).view(-1)  # noqa: E731
    found = check(function, x(), registry=OTHER_STRIDES, dynamic=dynamic, strict=True)
    assert found.report.matched("rule0") == 1 and found.guards_added == 0
    values = {node.name: node.meta["example_value"] for node in found.calls()}
    assert values["getattr_1" if "getattr_1" in values else "transpose"].is_contiguous()


def test_other_strides_that_a_view_cannot_take_are_refused() -> None:
    reason = only_refusal(check(lambda x: x.relu().view(-1), x(), registry=OTHER_STRIDES))
    assert "other strides, which view cannot take" in reason


def test_a_copy_that_would_become_a_view_is_refused_where_it_is_written() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.relu()
        copy = y.mT.contiguous()
        copy[0] = 5
        return y + copy.mT

    reason = only_refusal(check(function, x(), registry=OTHER_STRIDES))
    assert "contiguous would share memory that is written" in reason


def test_a_view_is_not_swapped_for_a_new_tensor_where_it_shows() -> None:
    to_copy = rules(
        (op("view", var("x"), size=anything("size")), lambda x, size: emit(torch.clone, emit(torch.reshape, x, size)))
    )

    def function(x: torch.Tensor) -> Any:
        y = x.cos()
        rows = y.view(-1)
        rows[0] = 5
        return y + 1

    assert "share" in only_refusal(check(function, x(), registry=to_copy))
    assert check(lambda x: x.cos().view(-1).exp(), x(), registry=to_copy).report.matched("rule0") == 1
    assert "returns the result" in only_refusal(check(lambda x: x.view(-1), x(), registry=to_copy))


def test_a_node_may_replace_a_match() -> None:
    no_op = rules((op("mul", var("x"), 1), lambda x: x))
    found = check(lambda x: (x.cos() * 1).exp(), x(), registry=no_op)
    assert found.ops() == ["cos", "exp"]
    assert "returns the result" in only_refusal(check(lambda x: x * 1, x(), registry=no_op))


def test_refusals_keep_their_reason_and_place() -> None:
    def never(x: Any) -> Refused:
        return Refused("not today")

    def raises(x: Any) -> Any:
        require(False, "not ever")

    for rewrite, reason in ((never, "not today"), (raises, "not ever")):
        found = check(
            lambda x: x.cos() + x.exp().cos(), x(), registry=rules((op("cos", var("x")), rewrite)), strict=True
        )
        assert found.report.refused("rule0") == {reason: 2}
        assert [refusal.reason for refusal in found.report.refusals] == [reason, reason]
        assert "x.cos()" in (found.report.refusals[0].stack_trace or "")


def test_none_is_no_opinion() -> None:
    found = check(lambda x: x.cos().exp(), x(), registry=rules((op("cos", var("x")), lambda x: None)))
    assert not found.report.refusals and not found.report.matched("rule0")


def test_a_refused_way_leaves_the_other_one() -> None:
    def rewrite(match: Match, x: Any, y: Any) -> Any:
        require(y.op != "placeholder", "y must be computed")
        return emit(weighted_sum, x, y, 1.0)

    found = check(lambda x, y: x.cos() + y, x(), x(), registry=rules((op("add", var("x"), var("y")), rewrite)))
    assert found.report.matched("rule0") == 1 and not found.report.refusals


@pytest.mark.parametrize(
    ("rewrite", "message"),
    [
        (lambda x: 1 / 0, "ZeroDivisionError"),
        (lambda x: "a string", "a rewrite returned Node: str"),
        (lambda x: emit(torch.ops.aten.linear.default, x), "linear"),
        (lambda x: emit(torch.add, emit(torch.exp, x), torch.ones(5)), "Tensor"),
    ],
)
def test_a_crash_in_a_rewrite_leaves_plain_pytorch(rewrite: Any, message: str) -> None:
    registry = rules((op("cos", var("x")), rewrite))
    found = check(lambda x: x.cos().exp(), x(), registry=registry)
    reason = only_refusal(found)
    assert reason.startswith("error: ") and message in reason
    assert found.ops() == ["cos", "exp"]
    with pytest.raises(Exception, match=message):
        capture(lambda x: x.cos().exp(), x(), registry=registry, strict=True)


def test_emitted_results_are_indexed_not_unpacked() -> None:
    with pytest.raises(TypeError):
        tuple(emit(sum_and_relu, None, None))  # type: ignore[arg-type]


def test_priority_decides_and_later_patterns_see_what_earlier_ones_emit() -> None:
    registry = Registry()
    registry.register("later", op("kernl_test::double", var("x")), lambda x: emit(torch.mul, x, 2), priority=0)
    registry.register(
        "early", op("cos", var("x")), lambda x: emit(double, emit(torch.mul, emit(torch.cos, x), 0.5)), priority=9
    )
    found = check(lambda x: x.cos().exp(), x(), registry=registry, strict=True)
    assert found.report.matched("early") == 1 and found.report.matched("later") == 1
    found = check(lambda x: x.cos().exp(), x(), registry=registry, without=["early"])
    assert list(found.report.patterns) == ["later"] and not found.report.matched("later")


def test_what_only_the_match_used_goes_and_random_numbers_are_still_drawn() -> None:
    drop = rules((op("add", op("mul", var("x"), var("unused")), var("y")), lambda y: emit(torch.clone, y)))

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noise = F.dropout(x, 0.5)
        return (y * noise.exp().cos()) + y.sin()

    found = capture(function, x(), x(), registry=drop, strict=True)
    assert found.ops() == ["dropout", "sin", "clone"]


def test_autocast_regions_of_the_graph_are_seen() -> None:
    seen = []

    def rewrite(match: Match, x: Any, y: Any) -> Any:
        seen.append(match.autocast)
        return emit(torch.matmul, x, y)

    def function(x: torch.Tensor) -> torch.Tensor:
        outside = x @ x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = x @ x
            with torch.autocast("cpu", enabled=False):
                excluded = x @ x
        return outside + inside + excluded

    registry = rules((op("matmul", var("x"), var("y")), rewrite))
    found = check(function, torch.randn(3, 3), registry=registry, strict=True)
    assert found.report.matched("rule0") == 3 and sorted(seen) == [False, False, True]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        seen.clear()
        check(lambda x: x @ x, torch.randn(3, 3), registry=registry, strict=True)
    assert seen == [True]


def test_gradients_of_a_rewritten_graph() -> None:
    function = lambda x: (x.relu() * 2).cos().sum()  # noqa: E731
    mine, plain = x().requires_grad_(), None
    plain = mine.detach().clone().requires_grad_()
    registry = rules((op("mul", op("relu", var("x")), 2), lambda x: emit(torch.mul, 2, emit(torch.relu, x))))
    found = capture(function, mine, registry=registry, grad=True, strict=True)
    assert found.report.matched("rule0") == 1
    found.result.backward()
    function(plain).backward()
    torch.testing.assert_close(mine.grad, plain.grad)


def test_reports_add_up_and_read_well() -> None:
    one = check(lambda x: (x.relu() * 2).cos(), x(), registry=DOUBLE_RELU).report
    other = check(lambda x, y: (x + y).relu() + (x + y).cos(), x(), x(), registry=RELU_OF_SUM).report
    total = one + one + other
    assert total.matched("rule0") == 3 and total.leftover["cos"] == 3
    assert total.seconds > 0 and total.matched("unknown") == 0 and total.refused("unknown") == {}
    text = str(one)
    assert "rule0: 1 matched -> 1 relu, 1 kernl_test::double" in text and "left over: 1 cos" in text
