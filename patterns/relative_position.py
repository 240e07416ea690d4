"""A bias that is looked up by the distance of key and query, computed once for each distance.

    embedding(f(key - query), table)     f: any elementwise arithmetic on integers      [seqlen_q, seqlen_k, heads]

becomes

    by_distance = embedding(f([-reach .. reach]), table)^T                              [heads, 2 reach + 1], float32
    embedding(clamp(key - query, -reach, reach) + reach, by_distance^T)

with the same elements, provided f is the same for all distances from `reach` on, on either side. Whether it is, is not
read from the arithmetic (T5's has a logarithm) but tried: the captured nodes run on all distances up to 131072, and on
samples beyond. `kernl.patterns.attention` then hands `by_distance` to the kernel, and the second line, which has a
number for every query and key, is dead unless somebody else uses the bias: a model that returns it, an attention that
is refused.

Seen in T5, mT5, UMT5 (a table in each layer) and MPNet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph import Emitted, Match, call_of, emit, op, register_pattern, require, value_of, var
from kernl.graph.mask import Affine, Sizes, known_number, read_affine, read_elements
from kernl.graph.mask_reader import is_written
from kernl.graph.table import op_name
from kernl.patterns.common import known_equal

_FARTHEST = 2**17
_SAMPLES = [
    number for power in range(17, 30) for number in (2**power - 1, 2**power, 2**power + 1, 3 * 2 ** (power - 1))
]
_WIDEST_REACH = 2**13

_ELEMENTWISE = frozenset(
    "add sub mul div floordiv remainder neg abs log exp sqrt pow maximum minimum min max clamp where ge gt le lt eq ne "
    "and or xor invert logical_and logical_or logical_not to zeros_like ones_like full_like clone contiguous".split()
)


@dataclass(frozen=True)
class DistanceBias:
    """by_distance [heads, 2 reach + 1], float32: what is added to the score of a key at each distance from query i,
    which stands at key i + origin."""

    by_distance: Node | Emitted
    origin: Affine


@register_pattern("relative_position_bias", op("embedding", var("index"), var("table")), priority=60)
def relative_position_bias(match: Match, index: Node, table: Node) -> Emitted | None:
    if value_of(index).dim() != 2 or value_of(table).dim() != 2 or _read_normal_form(match.root) is not None:
        return None
    if type(value_of(table).shape[0]) is not int:
        return None
    function = _function_of_distance(index)
    if function is None:
        return None
    reach = _reach(function, value_of(table).shape[0])
    weights = value_of(table)

    ones = emit(torch.Tensor.new_ones, table, (2 * reach + 1,), dtype=torch.int64)
    distances = emit(torch.sub, emit(torch.cumsum, ones, 0), reach + 1)
    rows: Any = emit(F.embedding, function.at(distances, emit), table)
    if weights.dtype != torch.float32:
        rows = emit(torch.Tensor.float, rows)
    by_distance = emit(torch.clone, emit(torch.transpose, rows, 0, 1), memory_format=torch.contiguous_format)

    place: Any = emit(torch.add, emit(torch.clamp, function.distance, -reach, reach), reach)
    if any(value_of(leaf).device != value_of(index).device for leaf in function.leaves):
        place = emit(torch.Tensor.to, place, value_of(index).device)
    rows = emit(torch.transpose, by_distance, 0, 1)
    if weights.dtype != torch.float32:
        rows = emit(torch.Tensor.to, rows, weights.dtype)
    return emit(F.embedding, place, rows)


def read_distance_bias(bias: Node, sizes: Sizes) -> DistanceBias | None:
    """A bias [1 or batch, heads, seqlen_q, seqlen_k] that depends on heads and distance alone; None for any other."""
    read = read_elements(bias)
    normal = None if read is None or is_written(read[0]) else _read_normal_form(read[0])
    if read is None or normal is None:
        return None
    lengths = value_of(read[0]).shape  # [seqlen_q, seqlen_k, heads]
    if not all(map(known_equal, lengths, (sizes.seqlen_q, sizes.seqlen_k))):
        return None
    for found, dim, length in zip(read[1], (-2, -1, -3), lengths):
        expected = {} if statically_known_true(length == 1) else {dim: 1}
        if not found.equals(Affine(0, expected)):
            return None
    return normal


def _read_normal_form(node: Node) -> DistanceBias | None:
    """embedding(clamp(distance, -reach, reach) + reach, rows), as the pattern above leaves it."""
    lookup = call_of(node)
    if lookup is None or lookup.op != "embedding":
        return None
    place, rows = lookup["input"], lookup["weight"]
    if op_name(place) == "to":
        place = place.args[0]
    shifted = call_of(place)
    clamped = call_of(shifted["input"]) if shifted is not None and shifted.op == "add" else None
    if shifted is None or clamped is None or clamped.op != "clamp":
        return None
    if any(map(is_written, (lookup["input"], place, shifted["input"]))):
        return None
    reach = shifted["other"]
    if type(reach) is not int or (clamped["min"], clamped["max"]) != (-reach, reach):
        return None
    affine = read_affine(clamped["input"])
    origin = None if affine is None else _origin(affine, value_of(clamped["input"]).shape)
    if origin is None or value_of(rows).shape[0] != 2 * reach + 1:
        return None
    return DistanceBias(_transposed(rows), origin)


def _transposed(rows: Node) -> Node | Emitted:
    """rows [2 reach + 1, heads] as float32 [heads, 2 reach + 1]: what they were made from, if it is that."""
    source = rows.args[0] if op_name(rows) == "to" else rows
    transpose = call_of(source)
    if (
        transpose is not None
        and (transpose.op, transpose.arguments.get("dim0"), transpose.arguments.get("dim1")) == ("transpose", 0, 1)
        and value_of(transpose["input"]).dtype == torch.float32
    ):
        return transpose["input"]
    return emit(torch.Tensor.float, emit(torch.transpose, rows, 0, 1))


# The function of the distance


class _Function:
    """Elementwise arithmetic that leads from `distance`, key - query - origin, to `result`."""

    def __init__(
        self, result: Node, distance: Node | Emitted, leaves: dict[Node, tuple[int, int]], order: list[Node]
    ) -> None:
        self.result, self.distance, self.leaves, self.order = result, distance, leaves, order

    def at(self, distances: Any, call: Callable[..., Any]) -> Any:
        """The same arithmetic at other distances. call(function, *args, **kwargs): does it, or describes it."""
        values: dict[Node, Any] = {}

        def put(argument: Any) -> Any:
            return values[argument] if isinstance(argument, Node) else argument

        for node, (sign, offset) in self.leaves.items():
            value = distances if sign == 1 else call(torch.neg, distances)
            values[node] = value if offset == 0 else call(torch.add, value, offset)
        for node in self.order:
            kwargs = {name: put(each) for name, each in node.kwargs.items() if name != "device"}
            args = tuple(map(put, node.args))
            if op_name(node) == "to":
                same = value_of(node.args[0]).dtype == value_of(node).dtype
                values[node] = args[0] if same else call(torch.Tensor.to, args[0], value_of(node).dtype)
            elif node.op == "call_method":
                function = getattr(torch, str(node.target), None) or getattr(torch.Tensor, str(node.target))
                values[node] = call(function, *args, **kwargs)
            else:
                values[node] = call(node.target, *args, **kwargs)
        return values[self.result]

    def signature(self) -> str:
        """The same for functions of the same operations on the same numbers."""
        places = {node: f"%{place}" for place, node in enumerate([*self.leaves, *self.order])}

        def put(argument: Any) -> Any:
            return places[argument] if isinstance(argument, Node) else argument

        calls = []
        for node in self.order:
            kwargs = sorted((name, put(each)) for name, each in node.kwargs.items())
            calls.append((str(node.target), value_of(node).dtype, [*map(put, node.args)], kwargs))
        return repr((list(self.leaves.values()), calls))


def _function_of_distance(result: Node) -> _Function | None:
    """None when `result` is anything else than elementwise arithmetic on the distance of two indices."""
    shape = value_of(result).shape
    origin: Affine | None = None
    distance: Node | Emitted | None = None
    leaves: dict[Node, tuple[int, int]] = {}
    order: list[Node] = []
    pending: list[tuple[Node, bool]] = [(result, False)]
    seen: set[Node] = set()
    while pending:
        node, is_ready = pending.pop()
        if is_ready:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        value = value_of(node)
        if not isinstance(value, torch.Tensor) or value.dim() != 2 or not all(map(known_equal, value.shape, shape)):
            return None
        affine = read_affine(node) if value.dtype in (torch.int64, torch.int32) else None
        if affine is not None and affine.slopes:
            for sign in (1, -1):
                found = _origin(affine.times(sign), shape)
                if found is not None:
                    break
            if found is None:
                return None
            if origin is None:
                # The others are counted from this one.
                origin, distance = found, node if sign == 1 else emit(torch.neg, node)
            offset = known_number(origin.plus(found, -1))
            if offset is None:
                return None
            leaves[node] = (sign, sign * int(offset))
            continue
        call = call_of(node)
        if (
            is_written(node)
            or op_name(node) not in _ELEMENTWISE
            or (call is None and op_name(node) not in ("min", "max"))
        ):
            return None
        if any(isinstance(each, (list, tuple, dict, torch.SymInt)) for each in (*node.args, *node.kwargs.values())):
            return None
        pending.append((node, True))
        pending.extend((each, False) for each in node.all_input_nodes)
    if distance is None or result in leaves:
        return None
    return _Function(result, distance, leaves, order)


def _origin(affine: Affine, shape: Any) -> Affine | None:
    """c of i_-1 - i_-2 - c; the index of a dimension of length 1 is 0 and does not occur."""
    expected = {-1: 1, -2: -1}
    slopes = {dim: slope for dim, slope in expected.items() if not statically_known_true(shape[dim] == 1)}
    return Affine(affine.offset, {}, affine.scalars).times(-1) if dict(affine.slopes) == slopes else None


_reaches: dict[Any, int] = {}  # of functions that were tried already: a model may have one in each layer


def _reach(function: _Function, rows: int) -> int:
    """From which distance on, on either side, the function does not change, rounded up to a power of two."""
    key = function.signature(), rows
    if key in _reaches:
        return _reaches[key]
    # Rounded up because another device may round a logarithm in another way.
    samples = torch.tensor(_SAMPLES)
    distances = torch.cat([-samples.flip(0), torch.arange(-_FARTHEST, _FARTHEST + 1), samples])
    found = function.at(distances, lambda target, *args, **kwargs: target(*args, **kwargs))
    require(bool(((found >= 0) & (found < rows)).all()), "a bias by distance reads outside of its table")
    changing = torch.cat([distances[found != found[0]][:1], distances[found != found[-1]][-1:]])
    reach = 1 << int(changing.abs().max() + 1).bit_length() if len(changing) else 1
    require(reach <= _WIDEST_REACH, "a bias by distance that is still changing at a distance of 8192")
    if len(_reaches) < 1000:
        _reaches[key] = reach
    return reach
