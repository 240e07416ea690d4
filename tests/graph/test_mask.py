"""Masks are recovered exactly or not at all: each case is built, read, rebuilt from what was read, and compared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy, Tracer

from kernl.graph import Emitted, canonicalize, value_of
from kernl.graph.mask import (
    Sizes,
    Visibility,
    known_number,
    read_additive,
    read_condition,
    round_to,
    shifted_to_float32,
    spacing,
)

BATCH, SEQLEN = 3, 6
LOWEST = torch.finfo(torch.float32).min


def _indices(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """batch, query and key positions as transformers makes them."""
    batch, seqlen = mask.shape[0], mask.shape[-1]
    return (
        torch.arange(batch)[:, None, None, None],
        (torch.arange(seqlen) + 0)[None, None, :, None],
        (torch.arange(seqlen) + 0)[None, None, None, :],
    )


def _square(condition: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return condition.expand(mask.shape[0], 1, mask.shape[-1], mask.shape[-1])


def bidirectional(mask: torch.Tensor) -> torch.Tensor:
    _, query, _ = _indices(mask)
    return _square(query >= 0, mask)


def padded(mask: torch.Tensor) -> torch.Tensor:
    batch, query, key = _indices(mask)
    visible = query.new_ones((), dtype=torch.bool) & (query >= 0).to(mask.device)
    return _square(visible & mask.to(device=mask.device, dtype=torch.bool)[batch, key].to(mask.device), mask)


def causal(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return _square(query.new_ones((), dtype=torch.bool) & (key <= query), mask)


def causal_padded(mask: torch.Tensor) -> torch.Tensor:
    batch, query, key = _indices(mask)
    return (query >= key) & mask.bool()[batch, key]


def causal_through_position_ids(mask: torch.Tensor) -> torch.Tensor:
    batch, query, key = _indices(mask)
    positions = torch.arange(mask.shape[1]).unsqueeze(0).expand(mask.shape[0], -1)
    return positions[batch, key] <= positions[batch, query]


def causal_and_packed_positions(mask: torch.Tensor) -> torch.Tensor:
    """transformers looks for packed sequences in position_ids; there are none in an arange."""
    batch, query, key = _indices(mask)
    positions = torch.arange(mask.shape[1]).unsqueeze(0).expand(mask.shape[0], -1)
    jumps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    sequence = jumps.cumsum(-1)
    return (key <= query) & (sequence[batch, query] == sequence[batch, key])


def wide_window(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return (key > query - 10) & (key <= query)


def broadcast_padding(mask: torch.Tensor) -> torch.Tensor:
    return mask[:, None, None, :] != 0


def integer_equal_one(mask: torch.Tensor) -> torch.Tensor:
    return mask.view(mask.shape[0], 1, 1, -1) == 1


def compared_after_arithmetic(mask: torch.Tensor) -> torch.Tensor:
    return (1.0 - mask[:, None, None, :].float()) < 0.5


def unsqueezed_twice(mask: torch.Tensor) -> torch.Tensor:
    return ~(mask == 0).unsqueeze(1).unsqueeze(2)


def tril(mask: torch.Tensor) -> torch.Tensor:
    return torch.tril(torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool))


def tril_of_ones_equals_one(mask: torch.Tensor) -> torch.Tensor:
    return (torch.ones(mask.shape[1], mask.shape[1]).tril() == 1)[None, None] & (mask != 0)[:, None, None, :]


def not_triu(mask: torch.Tensor) -> torch.Tensor:
    return ~torch.triu(torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool), diagonal=1)


def two_paddings(mask: torch.Tensor) -> torch.Tensor:
    return (mask != 0)[:, None, None, :] & (mask < 5)[:, None, None, :]


def hidden_by_or(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return ~((mask == 0)[:, None, None, :] | (key > query))


def transposed_indices(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return (query <= key).transpose(-1, -2)


def key_offset(mask: torch.Tensor) -> torch.Tensor:
    batch, _, key = _indices(mask)
    return _square(torch.cat([mask, mask], 1).bool()[batch, key + 2], mask)


def negative_index(mask: torch.Tensor) -> torch.Tensor:
    batch, _, key = _indices(mask)
    return _square(mask.bool()[batch, key - 1], mask)


def reversed_batch(mask: torch.Tensor) -> torch.Tensor:
    batch, _, key = _indices(mask)
    return _square(mask.bool()[mask.shape[0] - 1 - batch, key], mask)


def flipped(mask: torch.Tensor) -> torch.Tensor:
    return (mask != 0).flip(1)[:, None, None, :] & (mask[:, ::2].repeat_interleave(2, 1) != 0)[:, None, None, :]


def lengths(mask: torch.Tensor) -> torch.Tensor:
    _, _, key = _indices(mask)
    return key < mask.sum(1)[:, None, None, None]


def shifted_diagonal(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return key <= query + 1


def strictly_below(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return key < query


def anti_causal(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return key >= query


def narrow_window(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return (key > query - 2) & (key <= query)


def two_windows(mask: torch.Tensor) -> torch.Tensor:
    """Bounds that several comparisons give; the narrower ones count."""
    batch, query, key = _indices(mask)
    near = ((query - key) < 2) & (key - query <= 3) & (key <= query + 1) & (key >= query - 4)
    return near & mask.bool()[batch, key]


def symmetric_window(mask: torch.Tensor) -> torch.Tensor:
    batch, query, key = _indices(mask)
    return (torch.abs(query - key) <= 2) & ~((key - query).abs() >= 4) & mask.bool()[batch, key]


def behind_a_cache(mask: torch.Tensor) -> torch.Tensor:
    batch, query, key = _indices(mask)
    query = query + 2
    return (key <= query) & (key > query - 6) & mask.bool()[batch, key]


@dataclass(frozen=True)
class Bounds:
    """A query i sees keys i + first to i + last; None: no bound."""

    first: int | None = None
    last: int | None = None


ANY, CAUSAL = Bounds(), Bounds(last=0)
# function -> (bounds, has key_padding)
COMPLETE: dict[Callable[..., Any], tuple[Bounds, bool]] = {
    bidirectional: (ANY, False),
    padded: (ANY, True),
    causal: (CAUSAL, False),
    causal_padded: (CAUSAL, True),
    causal_through_position_ids: (CAUSAL, False),
    causal_and_packed_positions: (CAUSAL, False),
    broadcast_padding: (ANY, True),
    integer_equal_one: (ANY, True),
    compared_after_arithmetic: (ANY, True),
    unsqueezed_twice: (ANY, True),
    tril: (CAUSAL, False),
    tril_of_ones_equals_one: (CAUSAL, True),
    not_triu: (CAUSAL, False),
    two_paddings: (ANY, True),
    hidden_by_or: (CAUSAL, True),
    transposed_indices: (CAUSAL, False),
    # Read elsewhere, but once for each batch row and key: their [batch, 1, 1, seqlen_k] tensor is padding.
    key_offset: (ANY, True),
    negative_index: (ANY, True),
    reversed_batch: (ANY, True),
    flipped: (ANY, True),
    lengths: (ANY, True),
    shifted_diagonal: (Bounds(last=1), False),
    strictly_below: (Bounds(last=-1), False),
    anti_causal: (Bounds(first=0), False),
    narrow_window: (Bounds(-1, 0), False),
    two_windows: (Bounds(-1, 1), True),
    symmetric_window: (Bounds(-2, 2), True),
    behind_a_cache: (Bounds(-3, 2), True),
}


def stretched_diagonal(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return key * 2 <= query


def query_padding(mask: torch.Tensor) -> torch.Tensor:
    return (mask != 0)[:, None, :, None].expand(-1, -1, -1, mask.shape[1])


def both_paddings(mask: torch.Tensor) -> torch.Tensor:
    return (mask != 0)[:, None, :, None] & (mask != 0)[:, None, None, :]


def first_row_for_all(mask: torch.Tensor) -> torch.Tensor:
    return _square((mask != 0)[:1, None, None, :], mask)


def exclusive(mask: torch.Tensor) -> torch.Tensor:
    _, query, key = _indices(mask)
    return (key <= query) | (mask != 0)[:, None, None, :]


def written_afterwards(mask: torch.Tensor) -> torch.Tensor:
    visible = torch.ones(mask.shape[0], 1, mask.shape[1], mask.shape[1], dtype=torch.bool)
    visible[:, :, 0] = False
    return visible


def written_through_a_view(mask: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(mask.shape[1])
    positions[2:].fill_(0)
    return positions[None, None, None, :] <= torch.arange(mask.shape[1])[None, None, :, None]


INCOMPLETE: list[Callable[..., Any]] = [
    stretched_diagonal,
    query_padding,
    both_paddings,
    first_row_for_all,
    exclusive,
    written_afterwards,
    written_through_a_view,
]


def _padding_rows() -> torch.Tensor:
    """Right and left padding, holes: numbers that are not all 0 or 1."""
    return torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1], [1, 0, 1, 0, 1, 1]])


def _capture(function: Callable[..., Any], *inputs: Any, dynamic: bool) -> GraphModule:
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True):
        torch.compile(function, backend=keep, dynamic=dynamic, fullgraph=True)(*inputs)
    (gm,) = graphs
    canonicalize(gm)
    return gm


def _mask_node(gm: GraphModule) -> Node:
    output = next(node for node in gm.graph.nodes if node.op == "output")
    results = output.args[0]
    return results[0] if isinstance(results, (tuple, list)) else results


def _sizes(mask: Node) -> Sizes:
    shape = value_of(mask).shape
    return Sizes(shape[0] if len(shape) == 4 else 1, shape[-1], shape[-1])


def _evaluate(gm: GraphModule, result: Node | Emitted, inputs: tuple[Any, ...]) -> torch.Tensor:
    """What a node, or the description of one, holds for these inputs."""

    def node_of(each: Any) -> Any:
        if isinstance(each, Emitted):
            return gm.graph.call_function(each.target, tuple(map(node_of, each.args)), each.kwargs)
        return each

    output = next(node for node in gm.graph.nodes if node.op == "output")
    before = output.args
    with gm.graph.inserting_before(output):
        output.args = ((node_of(result),),)
    gm.recompile()
    found = gm(*inputs)[0]
    output.args = before
    gm.recompile()
    return found


def _by_position(read: Visibility, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    """bool [seqlen_q, seqlen_k]: what bounds that are numbers let each query see."""
    distance = torch.arange(seqlen_k)[None, :] - torch.arange(seqlen_q)[:, None]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if read.last is not None:
        visible &= distance <= int(known_number(read.last))  # type: ignore[arg-type]
    if read.first is not None:
        visible &= distance >= int(known_number(read.first))  # type: ignore[arg-type]
    return visible


def _graph_inputs(gm: GraphModule, mask: torch.Tensor) -> tuple[Any, ...]:
    """Inputs for the placeholders: sizes (when dynamic) and the mask."""
    found: list[Any] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            value = value_of(node)
            if isinstance(value, torch.Tensor):
                found.append(mask)
            else:
                found.append(mask.shape[0] if value.node.hint == BATCH else mask.shape[1])
    return tuple(found)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("build", COMPLETE, ids=lambda build: build.__name__)
def test_recovered(build: Callable[..., Any], dynamic: bool) -> None:
    mask = _padding_rows()
    gm = _capture(build, mask, dynamic=dynamic)
    node = _mask_node(gm)
    read = read_condition(node, _sizes(node))
    bounds, has_padding = COMPLETE[build]
    assert read.complete
    found = Bounds(*(None if each is None else int(known_number(each)) for each in (read.first, read.last)))
    assert (found, read.key_padding is not None) == (bounds, has_padding)
    assert read.hides_nothing == (bounds == ANY and not has_padding)
    expected = build(mask).expand(BATCH, 1, SEQLEN, SEQLEN)
    rebuilt = _by_position(read, SEQLEN, SEQLEN).expand(BATCH, 1, SEQLEN, SEQLEN)
    assert read.may_hide_rows == (has_padding or not bool(rebuilt.any(-1).all()))
    if read.key_padding is not None:
        padding = _evaluate(gm, read.key_padding, _graph_inputs(gm, mask))
        assert padding.dtype == torch.bool and padding.shape == mask.shape
        rebuilt = rebuilt & padding[:, None, None, :]
    assert torch.equal(rebuilt, expected)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("build", INCOMPLETE, ids=lambda build: build.__name__)
def test_near_misses_are_not_recovered(build: Callable[..., Any], dynamic: bool) -> None:
    """What is read of them is true, but the mask itself is still needed."""
    mask = _padding_rows()
    gm = _capture(build, mask, dynamic=dynamic)
    node = _mask_node(gm)
    read = read_condition(node, _sizes(node))
    assert not read.complete and not read.hides_nothing
    assert read.may_hide_rows
    weaker = _by_position(read, SEQLEN, SEQLEN).expand(BATCH, 1, SEQLEN, SEQLEN)
    if read.key_padding is not None:
        weaker = weaker & _evaluate(gm, read.key_padding, _graph_inputs(gm, mask))[:, None, None, :]
    expected = build(mask).expand(BATCH, 1, SEQLEN, SEQLEN)
    assert torch.equal(weaker & expected, expected)


def test_window_that_sees_everything_is_plain_causality() -> None:
    gm = _capture(wide_window, _padding_rows(), dynamic=False)
    read = read_condition(_mask_node(gm), _sizes(_mask_node(gm)))
    assert read.complete and read.first is None and known_number(read.last) == 0 and read.key_padding is None
    gm = _capture(wide_window, _padding_rows(), dynamic=True)
    read = read_condition(_mask_node(gm), _sizes(_mask_node(gm)))
    assert read.complete and known_number(read.first) == -9  # a longer input has keys outside


@pytest.mark.parametrize("is_written", [False, True])
def test_positions_that_a_tensor_holds(is_written: bool) -> None:
    """Queries behind a cache: the number of tokens in it is the same in two reads, unless it is written in between."""

    def build(mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        batch, query, key = _indices(mask)
        last = query + tokens
        if is_written:
            tokens.add_(1)
        first = query + tokens.clone()
        tokens.add_(1)
        return (key <= last) & (key > first - 3) & mask.bool()[batch, key]

    gm = _capture(build, _padding_rows(), torch.tensor(2), dynamic=False)
    node = _mask_node(gm)
    read = read_condition(node, _sizes(node))
    assert read.complete and read.key_padding is not None and read.may_hide_rows
    assert read.first is not None and read.last is not None
    assert len(read.first.scalars) == len(read.last.scalars) == 1
    width = known_number(read.last.plus(read.first, -1))
    assert width == (None if is_written else 2)


def test_bounds_of_which_none_is_known_to_be_tighter_need_the_mask() -> None:
    def build(mask: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        _, query, key = _indices(mask)
        return (key <= query + tokens) & (key <= query + 1)

    gm = _capture(build, _padding_rows(), torch.tensor(2), dynamic=False)
    read = read_condition(_mask_node(gm), _sizes(_mask_node(gm)))
    assert not read.complete and read.by_position


def test_what_is_known_of_a_node_goes_when_its_operands_change() -> None:
    gm = _capture(padded, _padding_rows(), dynamic=False)
    node = _mask_node(gm)
    assert read_condition(node, _sizes(node)).complete
    (argument,) = [each for each in gm.graph.nodes if each.op == "placeholder"]
    with gm.graph.inserting_after(argument):
        other = gm.graph.call_function(torch.Tensor.flip, (argument, 1))
    other.meta = dict(argument.meta)
    argument.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    padding = read_condition(node, _sizes(node)).key_padding
    found = _evaluate(gm, padding, (_padding_rows(),))  # type: ignore[arg-type]
    assert torch.equal(found, _padding_rows().flip(1) != 0)


def test_key_padding_is_the_tensor_of_the_graph_where_there_is_one() -> None:
    gm = _capture(padded, _padding_rows(), dynamic=False)
    read = read_condition(_mask_node(gm), _sizes(_mask_node(gm)))
    assert isinstance(read.key_padding, Node)
    assert value_of(read.key_padding).dtype == torch.bool
    assert tuple(value_of(read.key_padding).shape) == (BATCH, SEQLEN)


def test_true_hides() -> None:
    gm = _capture(lambda mask: (mask == 0)[:, None, None, :], _padding_rows(), dynamic=False)
    node = _mask_node(gm)
    read = read_condition(node, _sizes(node), true_hides=True)
    assert read.complete and read.key_padding is not None
    visible = _evaluate(gm, read.key_padding, (_padding_rows(),))
    assert torch.equal(visible, _padding_rows() != 0)


@pytest.mark.parametrize("batch, seqlen", [(1, 6), (3, 1), (1, 1)])
@pytest.mark.parametrize("build", [bidirectional, padded, causal, causal_padded], ids=lambda build: build.__name__)
def test_batch_or_length_of_one(build: Callable[..., Any], batch: int, seqlen: int) -> None:
    mask = torch.randint(0, 2, (batch, seqlen))
    gm = _capture(build, mask, dynamic=True)
    node = _mask_node(gm)
    read = read_condition(node, Sizes(value_of(node).shape[0], value_of(node).shape[-2], value_of(node).shape[-1]))
    assert read.complete
    assert (read.key_padding is not None) == ("padded" in build.__name__)
    assert read.by_position == ("causal" in build.__name__ and seqlen > 1)


def _additive(where: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda mask: where(padded(mask))


ADDITIVE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float]] = {
    "where_tensor": (_additive(lambda m: torch.where(m, torch.tensor(0.0), LOWEST)), LOWEST),
    "where_zeros": (_additive(lambda m: torch.where(m, torch.zeros(()), LOWEST)), LOWEST),
    "one_minus": (_additive(lambda m: (1.0 - m.to(torch.float32)) * LOWEST), LOWEST),
    "one_minus_half": (_additive(lambda m: (1.0 - m.half()) * torch.finfo(torch.float16).min), -65504.0),
    "masked_fill": (_additive(lambda m: torch.zeros_like(m, dtype=torch.float32).masked_fill(~m, -1e9)), -1e9),
    "inverted_then_filled": (
        _additive(lambda m: (1.0 - m.float()).masked_fill((1.0 - m.float()).to(torch.bool), LOWEST)),
        LOWEST,
    ),
    "minus_infinity": (_additive(lambda m: torch.where(m, 0.0, float("-inf"))), float("-inf")),
    "cast_to_half": (_additive(lambda m: torch.where(m, 0.0, -1e9).to(torch.float16)), float("-inf")),
    "divided": (_additive(lambda m: (m.float() - 1) / 1e-4), -10000.0),
    "negated": (_additive(lambda m: -(1.0 - m.float()) * 30000), -30000.0),
    "nested": (lambda m: torch.where((m != 0)[:, None, None, :], padded(m).float().sub(1).mul(8e3), -8e3), -8000.0),
    "before_the_views": (lambda m: ((m != 0).float() - 1).mul(9000.0)[:, None, None, :], -9000.0),
}


@pytest.mark.parametrize("name", ADDITIVE)
def test_additive_masks(name: str) -> None:
    build, hidden_value = ADDITIVE[name]
    mask = _padding_rows()
    gm = _capture(build, mask, dynamic=False)
    node = _mask_node(gm)
    read = read_additive(node, _sizes(node))
    assert read is not None
    assert read.hidden_value == pytest.approx(hidden_value, rel=1e-6)
    assert read.hidden_value == build(mask).min().item()
    assert read.visibility.complete and not read.visibility.by_position
    assert read.visibility.key_padding is not None
    assert torch.equal(_evaluate(gm, read.visibility.key_padding, (mask,)), mask != 0)
    if read.condition is not None:
        condition = _evaluate(gm, read.condition, (mask,))
        assert torch.equal(*torch.broadcast_tensors(condition, build(mask) == 0))


def test_additive_triangle() -> None:
    def build(mask: torch.Tensor) -> torch.Tensor:
        return torch.triu(torch.full((mask.shape[1], mask.shape[1]), float("-inf")), diagonal=1)

    node = _mask_node(_capture(build, _padding_rows(), dynamic=True))
    read = read_additive(node, _sizes(node))
    assert read is not None and read.hidden_value == float("-inf")
    assert read.visibility.complete and read.visibility.by_position and read.visibility.key_padding is None


def test_subtracted_mask() -> None:
    node = _mask_node(
        _capture(lambda mask: (1 - (mask != 0).int())[:, None, None, :] * 1e4, _padding_rows(), dynamic=False)
    )
    assert read_additive(node, _sizes(node)) is None
    read = read_additive(node, _sizes(node), negated=True)
    assert read is not None and read.hidden_value == -1e4 and read.visibility.complete


@pytest.mark.parametrize(
    "build",
    [
        lambda mask: (1.0 - mask[:, None, None, :].float()) * LOWEST,  # the input may hold other numbers than 0 and 1
        lambda mask: mask[:, None, None, :] * 0.5,
        lambda mask: torch.where(mask[:, None, None, :] != 0, 1.0, LOWEST),
        lambda mask: torch.where(mask[:, None, None, :] != 0, 0.0, 5.0),
        lambda mask: torch.where(mask[:, None, None, :] != 0, mask[:, None, None, :].float(), LOWEST),
        lambda mask: torch.rand(mask.shape[0], 1, 1, mask.shape[1]),
    ],
)
def test_other_numbers_are_a_bias(build: Callable[..., Any]) -> None:
    node = _mask_node(_capture(build, _padding_rows(), dynamic=False))
    assert read_additive(node, _sizes(node)) is None


def test_nothing_hidden_additively() -> None:
    node = _mask_node(
        _capture(lambda mask: torch.where(bidirectional(mask), 0.0, LOWEST), _padding_rows(), dynamic=True)
    )
    read = read_additive(node, _sizes(node))
    assert read is not None and read.visibility.hides_nothing


def test_reading_adds_no_guard() -> None:
    node = _mask_node(_capture(causal_padded, _padding_rows(), dynamic=True))
    environment = value_of(node).fake_mode.shape_env
    before = len(environment.guards)
    read_condition(node, _sizes(node))
    read_condition(node, Sizes(value_of(node).shape[0], 17, value_of(node).shape[-1]))
    assert len(environment.guards) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_as_a_cast_does(dtype: torch.dtype, rng: torch.Generator) -> None:
    numbers = torch.randn(300, generator=rng, dtype=torch.float64) * 10.0 ** torch.randint(-9, 9, (300,), generator=rng)
    special = [0.0, 1.0, 65504.0, 65519.0, 65520.0, -65536.0, 2.0**-24, 2.0**-25, 3.4028235677973366e38, LOWEST]
    for number in numbers.tolist() + special + [float("inf"), float("-inf")]:
        # Through float32 where that rounds first, as torch does for Python numbers.
        expected = torch.tensor(number, dtype=torch.float64).to(dtype).item()
        assert round_to(number, dtype) == expected, number


@pytest.mark.parametrize("number, dtype", [(-65504.0, torch.float16), (-1e4, torch.float16), (-1e9, torch.bfloat16)])
def test_float32_rounds_a_shifted_number_alike(number: float, dtype: torch.dtype) -> None:
    number = round_to(number, dtype)
    shifted = shifted_to_float32(number, dtype)
    assert spacing(shifted, torch.float32) == spacing(number, dtype)
    scores = torch.linspace(-3, 3, 97) * spacing(number, dtype) / 2  # ties included
    narrow = torch.tensor(number, dtype=dtype) + scores.to(dtype)
    wide = torch.tensor(shifted, dtype=torch.float32) + scores.to(dtype).float()
    finite = narrow.isfinite()
    assert torch.equal((narrow.float() - number)[finite], (wide - shifted)[finite])


class _RandomMask:
    """A random condition that broadcasts to [batch, 1, seqlen, seqlen], recorded faster than Dynamo would."""

    def __init__(self, seed: int, batch: int, seqlen: int) -> None:
        self.random, self.batch, self.seqlen = Random(seed), batch, seqlen
        self.tracer = Tracer()
        self.tracer.graph = Graph()
        self.mask = self.tracer.create_proxy("placeholder", "mask", (), {})
        self.tracer.graph.output((self.condition(4).node,))
        self.gm = GraphModule(torch.nn.Module(), self.tracer.graph)

    def make(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Proxy:
        return self.tracer.create_proxy("call_function", function, args, kwargs)

    def index(self) -> Proxy:
        index: Any = self.make(torch.arange, self.seqlen)
        if self.random.random() < 0.5:
            index = index + self.random.choice([0, 0, 1, -1, self.seqlen])
        if self.random.random() < 0.2:
            index = index * self.random.choice([1, 2, -1])
        return self.seqlen - 1 - index if self.random.random() < 0.15 else index

    def condition(self, depth: int) -> Proxy:
        if not depth or self.random.random() < 0.25:
            return self.atom()
        kind = self.random.choice(["and", "and", "or", "not", "view", "where", "equal"])
        one = self.condition(depth - 1)
        if kind == "not":
            return ~one if self.random.random() < 0.5 else one.eq(False)
        if kind == "view":
            full = one.expand(self.batch, 1, self.seqlen, self.seqlen)
            views: list[Callable[[], Proxy]] = [
                lambda: full,
                lambda: full.transpose(2, 3),
                lambda: full[:, 0].unsqueeze(1),
                lambda: full.flip(0),
                lambda: full[:1],
                lambda: full.reshape(self.batch, self.seqlen, self.seqlen)[:, None],
                lambda: full[:, :, -1:],
                lambda: full[..., self.make(torch.arange, self.seqlen)],
                lambda: full.permute(0, 1, 3, 2),
                lambda: full.narrow(2, 0, 1),
            ]
            return self.random.choice(views)()
        if kind == "where":
            return self.make(torch.where, one, 0.0, -9e3) >= self.random.choice([0.0, -1.0])
        other = self.condition(depth - 1)
        if kind == "equal":
            return (one.float() * self.random.choice([2.0, -1.0]) + 1).eq(1) & other
        return one & other if kind == "and" else one | other

    def atom(self) -> Proxy:
        query, key = self.index()[None, None, :, None], self.index()[None, None, None, :]
        compare = self.random.choice(["le", "lt", "ge", "gt", "eq", "ne"])
        batch = self.make(torch.arange, self.batch)[:, None, None, None]
        place = self.make(torch.arange, self.seqlen)[None, None, None]
        square = self.make(torch.ones, self.seqlen, self.seqlen, dtype=torch.bool)
        atoms: list[Callable[[], Proxy]] = [
            lambda: getattr(key, compare)(query),
            lambda: key.le(query),
            lambda: getattr((key - query).abs(), compare)(self.random.choice([-1, 0, 1, 3])),
            lambda: getattr(key, compare)(self.random.choice([-1, 0, 2, self.seqlen])),
            lambda: query.ge(0),
            lambda: getattr(self.mask, compare)(self.random.choice([0, 1]))[:, None, None, :],
            lambda: self.mask.ne(0)[:, None, None, :],
            lambda: self.mask.bool()[:, None, :, None],
            lambda: self.mask.bool()[batch, place],
            lambda: square.tril(self.random.choice([-1, 0, 1])),
            lambda: (1 - self.mask.bool().int()).view(self.batch, 1, 1, self.seqlen).eq(0),
        ]
        return self.random.choice(atoms)()


class _FakeValues(Interpreter):
    def run_node(self, n: Node) -> Any:
        n.meta["example_value"] = result = super().run_node(n)
        return result


@pytest.mark.parametrize("trial", range(100))
def test_random_masks(trial: int, rng: torch.Generator) -> None:
    """Nothing is read that is not so, and what is said to be complete is."""
    seed = int(torch.randint(2**31, (), generator=rng))
    batch, seqlen = Random(seed).choice([(3, 5), (4, 4), (1, 6), (3, 1)])
    example = torch.randint(0, 3, (batch, seqlen), generator=rng)
    gm = _RandomMask(seed, batch, seqlen).gm
    with FakeTensorMode() as mode:
        _FakeValues(gm).run(mode.from_tensor(example))
    node = _mask_node(gm)
    read = read_condition(node, Sizes(batch, seqlen, seqlen))
    expected = gm(example)[0].expand(batch, 1, seqlen, seqlen)
    rebuilt = _by_position(read, seqlen, seqlen).expand(batch, 1, seqlen, seqlen)
    assert not read.sees_by_position or bool(rebuilt.any(-1).all()), gm.code
    if read.key_padding is not None:
        rebuilt = rebuilt & _evaluate(gm, read.key_padding, (example,))[:, None, None, :]
    assert torch.equal(rebuilt & expected, expected), gm.code
    assert not read.complete or torch.equal(rebuilt, expected), gm.code
