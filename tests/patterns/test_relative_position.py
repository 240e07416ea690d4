"""A bias by distance is found whatever its arithmetic, becomes a table by distance, and stays dense where it must."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernl.patterns  # noqa: F401
from kernl.graph import Call, call_of, default_registry, value_of
from kernl.ops.relative_position import RelativePositionBias
from tests.graph.helpers import Captured, capture

pytestmark = pytest.mark.either_end

HEADS, SEQLEN = 3, 9


def _distance(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    return torch.arange(seqlen_k)[None, :] - torch.arange(seqlen_q)[:, None]


def t5_bucket(distance: torch.Tensor, bidirectional: bool, buckets: int, farthest: int) -> torch.Tensor:
    """Written from the definition in words: exact buckets for short distances, then logarithmic ones."""
    start = torch.zeros_like(distance)
    if bidirectional:
        buckets //= 2
        start = start + (distance > 0).long() * buckets
        distance = distance.abs()
    else:
        distance = -torch.min(distance, torch.zeros_like(distance))
    exact = buckets // 2
    scaled = torch.log(distance.float() / exact) / math.log(farthest / exact) * (buckets - exact)
    far = torch.min(exact + scaled.to(torch.long), torch.full_like(distance, buckets - 1))
    return start + torch.where(distance < exact, distance, far)


# name -> (rows of the table, function of key - query)
FUNCTIONS: dict[str, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {
    "t5_encoder": (8, lambda d: t5_bucket(d, True, 8, 20)),
    "t5_decoder": (8, lambda d: t5_bucket(d, False, 8, 20)),
    "query_minus_key": (8, lambda d: t5_bucket(-d, True, 8, 20)),
    "clamped": (7, lambda d: d.clamp(-3, 3) + 3),
    "shifted": (7, lambda d: (d + 2).clamp(min=-3).clamp(max=3) + 3),
    "sign": (3, lambda d: torch.where(d > 0, 2, torch.where(d < 0, 0, 1))),
    "parity_nearby": (2, lambda d: torch.where(d.abs() < 5, d % 2, torch.zeros_like(d))),
}


def _biased(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, table: Any) -> Any:
        index = function(_distance(query.shape[2], key.shape[2]))
        bias = F.embedding(index, table).permute(2, 0, 1).unsqueeze(0)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=1.0)

    return attend


def _operands(rows: int, seqlen_q: int = SEQLEN, seqlen_k: int = SEQLEN, dtype: Any = torch.float32) -> list[Any]:
    query, key, value = (torch.randn(2, HEADS, length, 8).to(dtype) for length in (seqlen_q, seqlen_k, seqlen_k))
    table = torch.randn(rows, HEADS).to(dtype)
    # As in a model, where only batch and lengths vary.
    for operand, dims in ((query, (1, 3)), (key, (1, 3)), (value, (1, 3)), (table, (0, 1))):
        torch._dynamo.mark_static(operand, dims)
    return [query, key, value, table]


def _capture(function: Callable[..., Any], *inputs: Any, **options: Any) -> Captured:
    found = capture(function, *inputs, registry=default_registry, strict=True, **options)
    with torch.no_grad():
        torch.testing.assert_close(found.result, function(*inputs), rtol=1e-4, atol=1e-5)
    assert found.guards_added == 0
    return found


def _attention(found: Captured) -> Call:
    return found.call("kernl::attention")


@pytest.mark.parametrize(
    "name, dynamic", [*((name, None) for name in FUNCTIONS), *((name, True) for name in ("t5_encoder", "t5_decoder"))]
)
def test_any_function_of_the_distance(name: str, dynamic: bool | None) -> None:
    rows, function = FUNCTIONS[name]
    found = _capture(_biased(function), *_operands(rows), dynamic=dynamic)
    # One that is clamped needs no rewriting.
    assert found.report.matched("relative_position_bias") == (name != "clamped")
    assert found.report.matched("attention") == 1
    told = _attention(found)
    assert told["attn_mask"] is None and told["offset"] == (-2 if name == "shifted" else 0)
    by_distance = value_of(told["distance_bias"])
    assert by_distance.dtype == torch.float32 and by_distance.shape[0] == HEADS
    # Nothing of [seqlen, seqlen, heads] is left.
    assert found.ops().count("embedding") == (name != "clamped") and "permute" not in found.ops()
    for lengths in ((SEQLEN, SEQLEN), (5, 14)) if dynamic else ():
        inputs = _operands(rows, *lengths)
        assert found.function is not None
        torch.testing.assert_close(found.function(*inputs), _biased(function)(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_tables_are_told_in_float32(dtype: torch.dtype) -> None:
    rows, function = FUNCTIONS["t5_encoder"]
    inputs = _operands(rows, dtype=dtype)
    found = capture(_biased(function), *inputs, registry=default_registry, strict=True)
    assert value_of(_attention(found)["distance_bias"]).dtype == torch.float32
    expected = _biased(function)(*(each.float() for each in inputs))
    torch.testing.assert_close(found.result.float(), expected, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("bidirectional, buckets, farthest", [(True, 32, 128), (False, 32, 128), (True, 8, 500)])
def test_the_table_by_distance_is_the_ops_own(bidirectional: bool, buckets: int, farthest: int) -> None:
    def function(query: Any, key: Any, value: Any, table: Any) -> Any:
        return _biased(lambda d: t5_bucket(d, bidirectional, buckets, farthest))(query, key, value, table)

    inputs = _operands(buckets, seqlen_q=40, seqlen_k=40)
    found = _capture(function, *inputs)
    source = _attention(found)["distance_bias"]
    graph = found.graph.graph
    (output,) = [node for node in graph.nodes if node.op == "output"]
    output.args = ((source,),)
    found.graph.recompile()
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    names = {"query": inputs[0], "key": inputs[1], "value": inputs[2], "table": inputs[3]}
    (by_distance,) = found.graph(*(names[next(each for each in names if each in name)] for name in placeholders))
    own = RelativePositionBias(inputs[3], bidirectional, farthest).by_distance()
    mine, its = by_distance.shape[1] // 2, own.shape[1] // 2
    places = torch.arange(-2 * its, 2 * its + 1)
    assert torch.equal(by_distance[:, places.clamp(-mine, mine) + mine], own[:, places.clamp(-its, its) + its])


# name -> (function, rows of the table, what is refused)
NEAR_MISSES: dict[str, tuple[Callable[..., torch.Tensor], int, str | None]] = {
    "sum_of_positions": (lambda q, k: (torch.arange(k)[None, :] + torch.arange(q)[:, None]).clamp(max=4), 5, None),
    "stretched": (lambda q, k: (torch.arange(k)[None, :] - 2 * torch.arange(q)[:, None]).clamp(-2, 2) + 2, 5, None),
    "one_position": (lambda q, k: torch.arange(k)[None, :].expand(q, k).clamp(max=4), 5, None),
    "two_origins": (
        lambda q, k: _distance(q, k).clamp(-2, 2) + 2 + (torch.arange(k)[None, :] > 3).long().expand(q, k),
        6,
        None,
    ),
    "outside_of_the_table": (lambda q, k: _distance(q, k).clamp(-20, 20).abs(), 9, "reads outside of its table"),
    "never_constant": (lambda q, k: _distance(q, k) % 5, 5, "still changing"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_lookups_stay_dense(name: str) -> None:
    index_of, rows, reason = NEAR_MISSES[name]

    def function(query: Any, key: Any, value: Any, table: Any) -> Any:
        bias = F.embedding(index_of(query.shape[2], key.shape[2]), table).permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    found = _capture(function, *_operands(rows))
    assert found.report.matched("relative_position_bias") == 0
    reasons = found.report.refused("relative_position_bias")
    assert (reason is None and not reasons) or (reason is not None and reason in next(iter(reasons)))
    # One fused attention all the same.
    assert found.report.matched("attention") == 1
    assert _attention(found)["attn_mask"] is not None and _attention(found)["distance_bias"] is None


def test_an_index_written_in_place_is_not_looked_through() -> None:
    def function(query: Any, key: Any, value: Any, table: Any) -> Any:
        index = _distance(SEQLEN, SEQLEN).clamp(-3, 3) + 3
        view = index[2:]
        view.zero_()
        bias = F.embedding(index, table).permute(2, 0, 1)[None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)

    found = _capture(function, *_operands(7))
    assert found.report.matched("relative_position_bias") == 0 and found.report.matched("attention") == 1


def test_ordinary_lookups_are_nobodys_business() -> None:
    table = torch.randn(SEQLEN, 4)
    found = _capture(
        lambda ids: F.embedding(ids, table) + F.embedding(torch.arange(SEQLEN)[None], table),
        torch.ones(2, SEQLEN).long(),
    )
    assert not found.report.matched("relative_position_bias") and not found.report.refused("relative_position_bias")


def test_a_bias_that_is_returned_stays_dense_beside_the_fused_attention() -> None:
    rows, bucket = FUNCTIONS["t5_encoder"]

    def function(query: Any, key: Any, value: Any, table: Any) -> Any:
        bias = F.embedding(bucket(_distance(SEQLEN, SEQLEN)), table).permute(2, 0, 1).unsqueeze(0)
        first = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return F.scaled_dot_product_attention(first, key, value, attn_mask=bias), bias

    inputs = _operands(rows)
    found = _capture(function, *inputs)
    assert torch.equal(found.result[1], function(*inputs)[1])
    calls = [call_of(node) for node in found.calls() if node.target is torch.ops.kernl.attention.default]
    assert len(calls) == 2 and all(call["attn_mask"] is None for call in calls if call is not None)
    assert len({call["distance_bias"] for call in calls if call is not None}) == 1


def test_an_attention_that_is_refused_keeps_its_bias() -> None:
    rows, bucket = FUNCTIONS["t5_encoder"]

    def function(query: Any, key: Any, value: Any, table: Any) -> Any:
        bias = F.embedding(bucket(_distance(SEQLEN, SEQLEN)), table).permute(2, 0, 1).unsqueeze(0)
        weights = torch.softmax(query @ key.mT + bias, -1)
        other = torch.softmax(query @ key.mT + bias, -1) @ value
        return weights @ value, weights, other

    found = _capture(function, *_operands(rows))
    assert found.report.refused("eager_attention") == {"attention weights are returned, or used elsewhere": 1}
    assert found.report.matched("eager_attention") == 1
    assert _attention(found)["distance_bias"] is not None


@pytest.mark.parametrize("name", ["t5_encoder", "t5_decoder"])
def test_gradients_reach_the_table(name: str) -> None:
    rows, bucket = FUNCTIONS[name]
    inputs = [each.requires_grad_() for each in _operands(rows)]
    weight = torch.randn(2, HEADS, SEQLEN, 8)
    found = capture(_biased(bucket), *inputs, registry=default_registry, strict=True, grad=True)
    assert found.report.matched("attention") == 1 and _attention(found)["distance_bias"] is not None
    mine = torch.autograd.grad((found.result * weight).sum(), inputs)
    plain = torch.autograd.grad((_biased(bucket)(*inputs) * weight).sum(), inputs)
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


def test_queries_behind_a_cache() -> None:
    """Their positions: a number, the difference of two lengths, and an integer on the device."""
    rows, bucket = FUNCTIONS["t5_decoder"]

    def attend(query: Any, key: Any, value: Any, table: Any, past: Any) -> Any:
        positions = torch.arange(query.shape[2])[:, None] + past
        keys = torch.arange(key.shape[2])[None, :]
        bias = F.embedding(bucket(keys - positions), table).permute(2, 0, 1).unsqueeze(0)
        visible = (keys <= positions)[None, None]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=torch.where(visible, bias, -math.inf))

    inputs = _operands(rows, seqlen_q=4, seqlen_k=11)
    found = _capture(lambda *x: attend(*x, 6), *inputs)
    assert _attention(found)["offset"] == 6 and _attention(found)["is_causal"]
    for dynamic in (None, True):
        length = lambda *x: attend(*x, x[1].shape[2] - x[0].shape[2])  # noqa: E731
        found = _capture(length, *inputs, dynamic=dynamic)
        assert value_of(_attention(found)["offset"]) == 7 and _attention(found)["is_causal"]
        assert _attention(found)["attn_mask"] is None
    past = torch.tensor(5)
    found = _capture(attend, *inputs, past)
    assert _attention(found)["q_offset"] is not None and _attention(found)["is_causal"]
    assert _attention(found)["attn_mask"] is None
    past = torch.tensor(3)
    assert found.function is not None
    torch.testing.assert_close(found.function(*inputs, past), attend(*inputs, past), rtol=1e-4, atol=1e-5)
