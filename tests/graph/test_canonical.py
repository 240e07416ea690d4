"""What `canonicalize` edits, and above all what it leaves alone. Results and writes are the plain function's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.graph.helpers import Captured, capture


def canonical(function: Any, *args: torch.Tensor, dynamic: bool | None = None, grad: bool = False) -> Captured:
    """Capture and canonicalise; check results, what was written into the inputs, and which results share memory."""
    copies = [argument.clone() for argument in args]
    with torch.set_grad_enabled(grad):
        expected = function(*copies)
    found = capture(function, *args, rewriting=False, dynamic=dynamic, grad=grad)
    torch.testing.assert_close(found.result, expected)
    for argument, copy in zip(args, copies):
        torch.testing.assert_close(argument, copy)
    return found


def x() -> torch.Tensor:
    return torch.randn(2, 3, 4)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "identity",
    [
        lambda y: y.to(torch.float32),
        lambda y: y.float(),
        lambda y: y.to("cpu"),
        lambda y: y.contiguous(),
        lambda y: y.view(y.shape),
        lambda y: y.reshape(y.size(0), y.size(1), -1),
        lambda y: y.expand(y.shape[0], -1, -1),
        lambda y: y.expand_as(y),
        lambda y: y.permute(0, 1, 2),
    ],
)
def test_identities_go(identity: Any, dynamic: bool | None) -> None:
    found = canonical(lambda x: identity(x.exp()).cos(), x(), dynamic=dynamic)
    assert found.ops() == ["exp", "cos"]
    assert found.guards_added == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda y: y.to(torch.float64),
        lambda y: y.to(torch.float32, copy=True),
        lambda y: y.mT.contiguous(),
        lambda y: y.view(6, 4),
        lambda y: y[:1].expand(2, -1, -1),
        lambda y: y.view(torch.int32),
        lambda y: y.clone(),
        lambda y: y.detach(),
        lambda y: y + 0.0,
        lambda y: y[:, :],
    ],
)
def test_changes_stay(change: Any) -> None:
    found = canonical(lambda x: change(x.exp()).cos(), x())
    assert not found.canonical


def test_adding_zero_to_integers() -> None:
    found = canonical(lambda: (torch.arange(4) + 0) * 2)
    assert found.ops() == ["arange", "mul"]
    # what is handed out has memory of its own
    assert "add" in canonical(lambda i: (i + 0).view(2, 2), torch.arange(4)).ops()
    # so has what is written
    assert "add" in canonical(lambda i: (i + 0).mul_(2).cos() + i, torch.arange(4)).ops()
    # and a bool becomes an integer
    assert "add" in canonical(lambda b: (b + 0) * 3, torch.ones(2, dtype=torch.bool)).ops()


def test_a_returned_view_stays_an_object_of_its_own() -> None:
    found = canonical(lambda x: x.view(x.shape), x())
    assert found.ops() == ["view"]
    tensor = x()
    found = capture(lambda x: x.contiguous(), tensor, rewriting=False)
    assert found.result is tensor


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda h, x: h.add_(x), "add"),
        (lambda h, x: h.add_(x, alpha=2), "add"),
        (lambda h, x: h.sub_(x), "sub"),
        (lambda h, x: h.mul_(x), "mul"),
        (lambda h, x: h.div_(2.0), "div"),
        (lambda h, x: h.masked_fill_(x > 0, 0.0), "masked_fill"),
        (lambda h, x: h.clamp_(min=0.0), "clamp"),
        (lambda h, x: h.relu_(), "relu"),
        (lambda h, x: F.silu(h, inplace=True), "silu"),
        (lambda h, x: torch.tanh_(h), "tanh"),
    ],
)
def test_private_writes_become_functional(write: Any, expected: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        write(h, x)
        return h.cos()  # reads what was written, by the old name

    ops = canonical(function, x()).ops()
    assert expected in ops and f"{expected}_" not in ops


def test_augmented_assignment_becomes_functional() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        h += x
        h *= 2
        return h

    assert canonical(function, x()).ops() == ["exp", "add", "mul"]


def test_writes_that_somebody_sees_stay() -> None:
    def to_input(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x.cos()

    def through_a_view_of_the_input(x: torch.Tensor) -> torch.Tensor:
        x[0].mul_(2)
        return x.cos()

    def under_another_name(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        rows = h.view(-1)
        h.add_(1)
        return rows.cos()

    def through_a_view(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        h[0].add_(1)
        return h.cos()

    def through_dropout_that_does_nothing(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        F.dropout(h, 0.1, training=False).add_(1)
        return h.cos()

    def item_assignment(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        h[:, 0] = 1
        return h.cos()

    def to_a_smaller_dtype(x: torch.Tensor) -> torch.Tensor:
        h = x.half()
        h += x
        return h.cos()

    def of_another_layout(x: torch.Tensor) -> torch.Tensor:
        h = x.exp().mT
        h.masked_fill_(x.mT.contiguous() > 0, 0.0)
        return h.mT.contiguous().view(-1)

    for function in (
        to_input,
        through_a_view_of_the_input,
        under_another_name,
        through_a_view,
        through_dropout_that_does_nothing,
        item_assignment,
        to_a_smaller_dtype,
    ):
        found = canonical(function, x())
        assert not found.canonical, function.__name__
        assert any(op.endswith("_") or op == "setitem" for op in found.ops()), function.__name__
    canonical(of_another_layout, x())


def test_gradients_pass_a_functional_write() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 3
        h += x
        return h.sum()

    tensor = x().requires_grad_()
    found = capture(function, tensor, rewriting=False, grad=True)
    assert found.canonical
    found.result.backward()
    torch.testing.assert_close(tensor.grad, torch.full_like(tensor, 4))


def test_a_write_under_no_grad_keeps_the_history_of_what_it_writes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x * 3
        with torch.no_grad():
            h.add_(1)
        return h.sum()

    tensor = x().requires_grad_()
    found = capture(function, tensor, rewriting=False, grad=True)
    found.result.backward()
    torch.testing.assert_close(tensor.grad, torch.full_like(tensor, 3))


def test_a_view_under_no_grad_is_not_its_operand() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.view(x.shape)
        return (x * y).sum()

    tensor = x().requires_grad_()
    capture(function, tensor, rewriting=False, grad=True).result.backward()
    torch.testing.assert_close(tensor.grad, tensor.detach())


def test_nothing_is_edited_beside_changes_of_size_in_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        h = x.exp()
        h.unsqueeze_(0)
        return h.contiguous().cos()

    assert not canonical(function, x()).canonical
