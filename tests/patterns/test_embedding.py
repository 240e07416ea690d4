"""Sums of embedding lookups: in whole models, in every order of operands, and where they must stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from tests.graph.helpers import Captured, capture
from tests.patterns.test_families import FAMILIES, assert_counts
from tests.patterns.test_families import check as check_model

pytestmark = pytest.mark.either_end

HIDDEN = 8
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
PLACES = torch.arange(4)[None]


def table(dtype: torch.dtype = torch.float32, columns: int = HIDDEN) -> torch.Tensor:
    return torch.randn(10, columns).to(dtype)


def check(function: Any, *args: torch.Tensor, dynamic: bool | None = None) -> Captured:
    expected = function(*args)
    found = capture(function, *args, registry=default_registry, strict=True, dynamic=dynamic)
    assert torch.equal(found.result, expected), "the rewritten graph does not give the same bits"
    assert found.guards_added == 0
    return found


# Which tables a family adds, by the number of their entries: words, types, places; in the order of the additions.
ADDED = {"bert": 3, "roberta": 3, "electra": 3, "distilbert": 2, "albert": 3}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dynamic", [None, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("family", ADDED)
def test_families(family: str, dynamic: bool | None, batch: int) -> None:
    kind = FAMILIES[family]
    found = check_model(kind.build("sdpa"), kind.example(batch=batch), dynamic)
    assert found.report.matched("embedding_sum") == 1 and not found.report.refused("embedding_sum")
    assert len(found.call("kernl::embedding_sum")["tables"]) == ADDED[family]
    assert found.report.leftover["embedding"] == 0
    assert not found.report.refused("add_layer_norm")  # the norm of it is no residual's, and is not counted as one
    assert_counts(kind, found)


def test_a_family_without_lookups() -> None:
    kind = FAMILIES["vit"]
    assert check_model(kind.build("sdpa"), kind.example()).report.matched("embedding_sum") == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", range(4))
def test_orders_of_operands_that_round_alike(order: int, dtype: torch.dtype) -> None:
    orders = [
        lambda a, b, c: (a + b) + c,
        lambda a, b, c: c + (a + b),
        lambda a, b, c: c.add(b + a),
        lambda a, b, c: (b + a).add_(c),
    ]

    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return orders[order](F.embedding(IDS, a), F.embedding(IDS * 0, b), F.embedding(PLACES, c))

    found = check(function, table(dtype), table(dtype), table(dtype))
    assert found.report.matched("embedding_sum") == 1 and "add" not in found.ops()


def test_four_lookups_and_more() -> None:
    def chain(count: int) -> Captured:
        def function(*tables: torch.Tensor) -> torch.Tensor:
            total = F.embedding(IDS, tables[0])
            for each in tables[1:]:
                total = total + F.embedding(IDS, each)
            return total

        return check(function, *(table(torch.float16) for _ in range(count)))

    assert chain(4).ops() == ["kernl::embedding_sum"]
    found = chain(5)  # the first four, then one lookup and one addition
    assert sorted(found.ops()) == ["add", "embedding", "kernl::embedding_sum"]


def test_a_balanced_sum_keeps_its_order() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        return (F.embedding(IDS, a) + F.embedding(IDS, b)) + (F.embedding(IDS, c) + F.embedding(IDS, d))

    found = check(function, *(table(torch.float16) for _ in range(4)))
    assert found.ops() == ["kernl::embedding_sum", "kernl::embedding_sum", "add"]


def test_a_value_used_again() -> None:
    def lookup_returned(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        words = F.embedding(IDS, a)
        return (words + F.embedding(PLACES, b)) * words

    found = check(lookup_returned, table(), table())
    assert found.report.matched("embedding_sum") == 0
    (reason,) = found.report.refused("embedding_sum")
    assert "used by mul, outside the match" in reason

    def partial_sum_used(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        partial = F.embedding(IDS, a) + F.embedding(PLACES, b)
        return (partial + F.embedding(IDS, c)) * partial

    found = check(partial_sum_used, table(), table(), table())
    assert len(found.call("kernl::embedding_sum")["tables"]) == 2  # that sum alone


def test_one_lookup_added_to_itself() -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        words = F.embedding(IDS, a)
        return words + words

    assert check(function, table()).ops() == ["kernl::embedding_sum"]


def test_refusals() -> None:
    def reasons(function: Any, *tables: torch.Tensor) -> dict[str, int]:
        found = check(function, *tables)
        assert not found.report.matched("embedding_sum")
        return found.report.refused("embedding_sum")

    def pair(**options: Any) -> Any:
        return lambda a, b: F.embedding(IDS, a, **options) + F.embedding(PLACES, b)

    assert reasons(pair(max_norm=100.0), table(), table()) == {"a lookup renormalises its table (max_norm)": 1}
    assert reasons(pair(scale_grad_by_freq=True), table(), table()) == {"a lookup scales gradients by frequency": 1}
    assert reasons(pair(sparse=True), table(), table()) == {"a lookup gives sparse gradients": 1}
    accepted = "(accepted: float16, bfloat16, float32)"
    assert reasons(pair(), table(torch.float64), table(torch.float64)) == {f"dtype float64 {accepted}": 1}
    assert reasons(pair(), table(torch.float16), table()) == {"operands of different dtypes: float16, float32": 1}
    assert reasons(pair(), table(), table(columns=1)) == {"tables of different widths": 1}
    assert reasons(lambda a, b: torch.add(F.embedding(IDS, a), F.embedding(IDS, b), alpha=2), table(), table()) == {}
    assert reasons(lambda a, b: F.embedding(IDS, a) * 2 + F.embedding(IDS, b), table(), table()) == {}
    assert reasons(lambda a, b: F.embedding(IDS, a) + b[:4], table(), table()) == {}


def test_what_an_in_place_operation_forbids() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        words = F.embedding(IDS, a)
        a[1] = 7.0
        return words + F.embedding(PLACES, b)

    a, b = table(), table()
    expected = function(a.clone(), b)
    found = capture(function, a, b, registry=default_registry, strict=True)
    assert torch.equal(found.result, expected)
    assert "in-place operation (setitem)" in next(iter(found.report.refused("embedding_sum")))


def test_autocast_changes_nothing() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.embedding(IDS, a) + F.embedding(PLACES, b)

    assert check(function, table(), table()).report.matched("embedding_sum") == 1


@pytest.mark.parametrize("padding_idx", [None, 3, -1])
def test_gradients(padding_idx: int | None) -> None:
    words, places = nn.Embedding(10, HIDDEN, padding_idx=padding_idx), nn.Embedding(10, HIDDEN)
    function = lambda ids: words(ids) + places(PLACES)  # noqa: E731
    found = capture(function, IDS, registry=default_registry, strict=True, grad=True)
    assert found.call("kernl::embedding_sum")["padding_idx"] == [-1 if padding_idx is None else padding_idx % 10, -1]
    parameters = [words.weight, places.weight]
    mine = torch.autograd.grad(found.result.cos().sum(), parameters)
    plain = torch.autograd.grad(function(IDS).cos().sum(), parameters)
    torch.testing.assert_close(mine, plain)
