"""Find what the tensors of a mask hold, by running the nodes that build it on symbols in place of numbers.

Abstract interpretation: each operation takes and gives descriptions of `kernl.graph.mask_values`. A view only
substitutes indices, and so does indexing with tensors. What is not understood is a tensor of its own, never a guess.
Memory that somebody writes in place is not looked through. Nothing here adds a guard.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph.mask_values import (
    FALSE,
    INDEX_DTYPES,
    PRECISION,
    TRUE,
    Affine,
    Gathered,
    Predicate,
    Scalar,
    Select,
    Step,
    Tested,
    Value,
    at_least,
    exchanged,
    is_identity,
    known_number,
    mapped,
    own_index,
    own_indices,
    replace_identities,
    rounded_to,
    simplified,
    stepped,
    substituted,
    two_valued,
    value_of_number,
)
from kernl.graph.memory import written_by
from kernl.graph.table import Call, call_of, value_of

COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": lambda x, y: x >= y,
    "gt": lambda x, y: x > y,
    "le": lambda x, y: x <= y,
    "lt": lambda x, y: x < y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
}
FILLED = frozenset("tensor zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like".split())
_VIEWS = frozenset(
    "contiguous clone detach getitem unsqueeze squeeze expand expand_as view view_as reshape flatten transpose permute "
    "select narrow repeat".split()
)
_DEEPEST = 200  # nodes in a chain: masks are built in about 20


def read(argument: Any) -> Value | None:
    """The description of a tensor or number; None for anything else."""
    return _Reader(argument.graph if isinstance(argument, Node) else None).read(argument)


class _Reader:
    """Describes the nodes of a graph, each once: all layers of a model have their masks from the same nodes.

    What is known stays with the graph, and holds as long as a node and all before it have the operands they had.
    """

    def __init__(self, graph: Graph | None) -> None:
        self.known: dict[Node, tuple[tuple[Node, ...], Value]] = {}
        if graph is not None:
            self.known = graph.__dict__.setdefault("_kernl_descriptions", self.known)
        self.current: set[Node] = set()
        self.depth = 0

    def read(self, argument: Any) -> Value | None:
        """The description of a tensor or number; None for anything else."""
        value = value_of(argument)
        if not isinstance(value, torch.Tensor):
            if isinstance(value, bool):
                return TRUE if value else FALSE
            if isinstance(value, (int, torch.SymInt)):
                return Affine(value, {})
            return Select(TRUE, value, value) if isinstance(value, float) else None
        if not isinstance(argument, Node):
            return None
        if argument not in self.known or not self._is_current(argument):
            described = self._described(argument, value)
            self.known[argument] = tuple(argument.all_input_nodes), described
            self.current.add(argument)
        return self.known[argument][1]

    def _is_current(self, node: Node) -> bool:
        """Whether what is known of a node is about the operands that it has now."""
        if node in self.current or node not in self.known:
            return True
        operands = self.known[node][0]
        if operands != tuple(node.all_input_nodes) or not all(map(self._is_current, operands)):
            del self.known[node]
            return False
        self.current.add(node)
        return True

    def _described(self, node: Node, value: torch.Tensor) -> Value:
        described: Value | None = None
        call = call_of(node)
        if call is not None and self.depth < _DEEPEST and not is_written(node):
            self.depth += 1
            described = self._evaluate(node, call, value)
            self.depth -= 1
        if described is None or (isinstance(described, Gathered) and is_identity(described, value)):
            described = Gathered(node, own_indices(value))
        if isinstance(described, Gathered) and value.dtype == torch.bool:
            return Predicate((Tested(described),))
        if isinstance(described, Predicate):
            return replace_identities(described, node, value)
        return described

    def _evaluate(self, node: Node, call: Call, value: torch.Tensor) -> Value | None:
        op = call.op
        if op in _VIEWS:
            return self._view(call, value)
        if op == "to":
            return self._cast(call, value)
        if op == "arange":
            start, step = value_of(call["start"]), value_of(call["step"])
            if value.dtype in INDEX_DTYPES and isinstance(start, (int, torch.SymInt)) and type(step) is int:
                return simplified(Affine(start, {-1: step}), value.shape)
            return None
        if op in FILLED:
            return self._filled(call, value)
        if op in COMPARISONS:
            return self._compare(node, call, value)
        if op in ARITHMETIC:
            return self._arithmetic(node, call, value)
        if op == "neg":
            return self._negate(call, value)
        if op in ("abs", "sqrt"):
            number = known_number(self.read(call["input"]))
            if number is None or (op == "sqrt" and number < 0):
                return None
            return value_of_number(math.sqrt(number) if op == "sqrt" else abs(number), value.dtype)
        if op in ("and", "or", "invert"):
            return self._logic(node, call, value)
        if op in ("where", "masked_fill"):
            return self._where(call, value)
        if op in ("tril", "triu"):
            return self._triangle(call, value)
        if op == "cumsum":
            step_size = known_number(self.read(call["input"]))
            if type(step_size) is int and value.dtype in INDEX_DTYPES and type(call["dim"]) is int and value.dim():
                total = Affine(step_size, {call["dim"] - value.dim(): step_size} if step_size else {})
                return simplified(total, value.shape)
            return None
        if op == "diff":
            return self._difference(call, value)
        return None

    # -- views --

    def _view(self, call: Call, value: torch.Tensor) -> Value | None:
        operand = value_of(call["input"])
        if not isinstance(operand, torch.Tensor):
            return None
        read = self.read(call["input"])
        indices = self._index_map(call, operand, value)
        if read is None or indices is None:
            return None
        lengths = {dim: operand.shape[dim] for dim in indices}
        # A part of another tensor is better described as a tensor of its own: it has the size that is wanted.
        if _is_gathered(read) and not all(_is_whole(index, lengths[dim], value) for dim, index in indices.items()):
            return None
        # Whether the operand broadcasts to the result as it is.
        in_place = all(
            statically_known_true(lengths[dim] == 1)
            or (index.equals(own_index(dim)) and statically_known_true(lengths[dim] == value.shape[dim]))
            for dim, index in indices.items()
        )
        return substituted(read, indices, value.shape, keep_source=in_place)

    def _index_map(self, call: Call, operand: torch.Tensor, value: torch.Tensor) -> dict[int, Affine] | None:
        """For each dimension of the operand its index, in terms of the result's."""
        rank, new_rank = operand.dim(), value.dim()
        if call.op == "getitem":
            return self._indexed(call["index"], operand, value)
        if call.op in ("contiguous", "clone", "detach"):
            return {dim: own_index(dim) for dim in range(-rank, 0)}
        if call.op in ("expand", "expand_as", "repeat"):
            kept: dict[int, Affine] = {}
            for dim in range(-rank, 0):
                if statically_known_true(operand.shape[dim] == 1):
                    kept[dim] = Affine(0, {})
                elif statically_known_true(operand.shape[dim] == value.shape[dim]):
                    kept[dim] = own_index(dim)
                else:
                    return None
            return kept
        if call.op in ("transpose", "permute"):
            order = list(range(rank))
            if call.op == "transpose":
                first, second = call["dim0"], call["dim1"]
                order[first], order[second] = second, first
            else:
                order = list(call["dims"])
            return {source - rank: own_index(position - rank) for position, source in enumerate(order)}
        if call.op == "unsqueeze":
            dims = [dim for dim in range(new_rank) if dim != call["dim"]]
            return {dim - rank: own_index(dims[dim] - new_rank) for dim in range(rank)}
        if call.op == "select":
            index, length = value_of(call["index"]), operand.shape[call["dim"]]
            dims = [dim for dim in range(rank) if dim != call["dim"]]
            kept = {dim - rank: own_index(position - new_rank) for position, dim in enumerate(dims)}
            chosen = _from_start(index, length)
            return None if chosen is None else kept | {call["dim"] - rank: Affine(chosen, {})}
        if call.op == "narrow":
            start = _from_start(value_of(call["start"]), operand.shape[call["dim"]])
            moved = {dim: own_index(dim) for dim in range(-rank, 0)}
            if start is None:
                return None
            moved[call["dim"] - rank] = Affine(start, {call["dim"] - rank: 1})
            return moved
        # squeeze, view, reshape, flatten: as long as dimensions of length 1 are all that comes and goes
        mine = [dim for dim in range(-rank, 0) if not statically_known_true(operand.shape[dim] == 1)]
        its = [dim for dim in range(-new_rank, 0) if not statically_known_true(value.shape[dim] == 1)]
        if len(mine) != len(its):
            return None
        if not all(statically_known_true(operand.shape[one] == value.shape[other]) for one, other in zip(mine, its)):
            return None
        same = {one: own_index(other) for one, other in zip(mine, its)}
        return {dim: same.get(dim, Affine(0, {})) for dim in range(-rank, 0)}

    def _indexed(self, index: Any, operand: torch.Tensor, value: torch.Tensor) -> dict[int, Affine] | None:
        rank, new_rank = operand.dim(), value.dim()
        entries = list(index) if isinstance(index, tuple) else [index]
        if any(isinstance(value_of(entry), torch.Tensor) for entry in entries):
            return self._gathered_at(entries, operand)
        taken = sum(entry is not None and entry is not Ellipsis for entry in entries)
        if Ellipsis in entries:
            position = entries.index(Ellipsis)
            entries[position : position + 1] = [slice(None)] * (rank - taken)
        else:
            entries += [slice(None)] * (rank - taken)
        indices: dict[int, Affine] = {}
        source, target = -rank, -new_rank
        for entry in entries:
            if entry is None:
                target += 1
                continue
            if isinstance(entry, slice):
                step = 1 if entry.step is None else entry.step
                start = 0 if entry.start is None else _from_start(value_of(entry.start), operand.shape[source])
                if start is None or type(step) is not int or step < 1:
                    return None
                indices[source] = Affine(start, {target: step})
                target += 1
            else:
                chosen = _from_start(value_of(entry), operand.shape[source])
                if chosen is None:
                    return None
                indices[source] = Affine(chosen, {})
            source += 1
        return indices if source == 0 and target == 0 else None

    def _gathered_at(self, entries: list[Any], operand: torch.Tensor) -> dict[int, Affine] | None:
        """`x[i, j]` with a tensor of known indices for each dimension; they broadcast together."""
        if len(entries) != operand.dim():
            return None
        indices: dict[int, Affine] = {}
        for dim, entry in zip(range(-len(entries), 0), entries):
            read, of_entry = self.read(entry), value_of(entry)
            if not isinstance(read, Affine) or not isinstance(of_entry, torch.Tensor):
                return None
            # A negative index counts from the end: then it is not this affine form.
            if not read.is_at_least(0, of_entry.shape):
                return None
            indices[dim] = read
        return indices

    # -- elementwise --

    def _operands(self, call: Call, value: torch.Tensor) -> tuple[Value | None, Value | None]:
        """What two operands hold, at the indices of the result; None for one that broadcasts in an unknown way."""
        return self._operand(call["input"], value), self._operand(call["other"], value)

    def _integers(self, node: Node, call: Call, value: torch.Tensor) -> tuple[Value | None, Value | None]:
        """As `_operands`; beside affine integers, a tensor of one integer counts as an unknown number."""
        left, right = self._operands(call, value)

        def number(gathered: Gathered, operand: Node, other: Affine) -> Value:
            extra = other.offset if call.op == "add" and type(other.offset) is int and not other.scalars else None
            return (None if gathered.steps else _as_scalar(operand, node, extra)) or gathered

        if isinstance(left, Affine) and isinstance(right, Gathered):
            right = number(right, call["other"], left)
        elif isinstance(left, Gathered) and isinstance(right, Affine):
            left = number(left, call["input"], right)
        return left, right

    def _operand(self, argument: Any, value: torch.Tensor) -> Value | None:
        operand = value_of(argument)
        if isinstance(operand, torch.Tensor):
            for dim in range(-operand.dim(), 0):
                length = operand.shape[dim]
                if not (statically_known_true(length == 1) or statically_known_true(length == value.shape[dim])):
                    return None
        return self.read(argument)

    def _cast(self, call: Call, value: torch.Tensor) -> Value | None:
        read, operand = self.read(call["input"]), value_of(call["input"])
        if not isinstance(operand, torch.Tensor):
            return None
        if operand.dtype == value.dtype:
            return read if operand.device == value.device or not isinstance(read, Gathered) else None
        if isinstance(read, Gathered):
            return stepped(read, Step("to", value.dtype)) if operand.device == value.device else None
        if isinstance(read, Affine) and value.dtype in INDEX_DTYPES:
            return read
        if isinstance(read, Affine) and known_number(read) is None:
            return None
        two = two_valued(read, call["input"])
        return None if two is None else mapped(two, lambda number: number, value.dtype)

    def _filled(self, call: Call, value: torch.Tensor) -> Value | None:
        if call.op == "tensor":
            number = call["data"]
        elif call.op in ("full", "full_like", "new_full"):
            number = call["fill_value"]
        else:
            number = float("ones" in call.op)
        return value_of_number(number, value.dtype)

    def _compare(self, node: Node, call: Call, value: torch.Tensor) -> Value | None:
        left, right = self._integers(node, call, value)
        inner = self._inside_of_absolute(call["input"], value)
        if inner is not None and isinstance(right, Affine) and call.op in ("le", "lt", "gt", "ge"):
            limit = right if call.op in ("le", "gt") else right.shifted(-1)
            near = at_least(limit.plus(inner, -1), 0, value.shape).and_(at_least(limit.plus(inner), 0, value.shape))
            return near.inverted() if near is not None and call.op in ("gt", "ge") else near
        if isinstance(left, Affine) and isinstance(right, Affine):
            difference = left.plus(right, -1)  # left - right
            minus = difference.times(-1)
            if call.op in ("ge", "gt"):
                return at_least(difference, 0 if call.op == "ge" else 1, value.shape)
            if call.op in ("le", "lt"):
                return at_least(minus, 0 if call.op == "le" else 1, value.shape)
            both = at_least(difference, 0, value.shape).and_(at_least(minus, 0, value.shape))
            return both.inverted() if both is not None and call.op == "ne" else both
        return self._with_constant(call, value, left, right, COMPARISONS[call.op])

    def _inside_of_absolute(self, argument: Any, value: torch.Tensor) -> Affine | None:
        """x of abs(x), if that is affine."""
        call = call_of(argument)
        if call is None or call.op != "abs" or is_written(argument):
            return None
        inner = self._operand(call["input"], value)
        return inner if isinstance(inner, Affine) else None

    def _arithmetic(self, node: Node, call: Call, value: torch.Tensor) -> Value | None:
        if call.arguments.get("alpha", 1) != 1 or call.arguments.get("rounding_mode") is not None:
            return None
        left, right = self._integers(node, call, value)
        if isinstance(left, Affine) and isinstance(right, Affine):
            if value.dtype not in INDEX_DTYPES or call.op == "div":
                return None
            if call.op == "mul":
                if known_number(left) is None:
                    left, right = right, left
                factor = known_number(left)
                return right.times(factor) if type(factor) is int else None
            return left.plus(right, 1 if call.op == "add" else -1)
        if call.op == "mul" and isinstance(left, Predicate) and isinstance(right, Predicate):
            return left.and_(right) if value.dtype == torch.bool else None
        return self._with_constant(call, value, left, right, ARITHMETIC[call.op])

    def _with_constant(
        self,
        call: Call,
        value: torch.Tensor,
        left: Value | None,
        right: Value | None,
        function: Callable[[Any, Any], Any],
    ) -> Value | None:
        """An elementwise operation of which one operand is a constant."""
        constant, read, node, number, first = known_number(right), left, call["input"], call["other"], False
        if constant is None:
            constant, read, node, number, first = known_number(left), right, call["other"], call["input"], True
        if constant is None:
            return None
        if isinstance(read, Gathered):
            # Only Python numbers: a tensor would take part in type promotion.
            step = Step(call.op, number, first)
            return stepped(read, step) if isinstance(number, (bool, int, float)) else None
        two = two_valued(read, node)
        if two is None:
            return None
        try:
            return mapped(two, lambda x: function(constant, x) if first else function(x, constant), value.dtype)
        except ArithmeticError:
            return None

    def _negate(self, call: Call, value: torch.Tensor) -> Value | None:
        read = self.read(call["input"])
        if isinstance(read, Affine):
            return read.times(-1)
        if isinstance(read, Gathered):
            return stepped(read, Step("neg"))
        return mapped(read, lambda number: -number, value.dtype) if isinstance(read, Select) else None

    def _logic(self, node: Node, call: Call, value: torch.Tensor) -> Value | None:
        if value.dtype != torch.bool:
            return None
        if call.op == "invert":
            read = self.read(call["input"])
            return read.inverted() if isinstance(read, Predicate) else None
        left, right = self._operands(call, value)
        if not isinstance(left, Predicate) or not isinstance(right, Predicate):
            return None
        return left.and_(right) if call.op == "and" else left.or_(right)

    def _where(self, call: Call, value: torch.Tensor) -> Value | None:
        """where(p, x, y) of numbers; also where one of x and y is again one number or another that is the same."""
        if call.op == "where":
            condition, chosen, otherwise = call["condition"], call["input"], call["other"]
        else:
            condition, chosen, otherwise = call["mask"], call["value"], call["input"]
        where = self._operand(condition, value)
        yes = two_valued(self._operand(chosen, value), chosen)
        no = two_valued(self._operand(otherwise, value), otherwise)
        if not isinstance(where, Predicate) or yes is None or no is None or value.dtype not in PRECISION:
            return None
        yes, no = rounded_to(yes, value.dtype), rounded_to(no, value.dtype)
        x, y = known_number(yes), known_number(no)
        source = condition if isinstance(condition, Node) else None
        if x is not None and y is not None:
            return Select(where, x, y, source)
        if x is not None and no.condition.equals(where):
            return Select(where, x, no.on_false, source)
        if x is not None and no.condition.equals(where.inverted()):
            # where(p, x, p ? a : b) = p ? x : b
            return Select(where, x, no.on_true, source)
        if y is not None and y in (yes.on_true, yes.on_false):
            # where(p, q ? x : y, y) = (p and q) ? x : y
            inner = yes if yes.on_false == y else exchanged(yes)
            both = where.and_(inner.condition)
            return None if both is None else Select(both, inner.on_true, y)
        if x is not None and x in (no.on_true, no.on_false):
            # where(p, x, q ? y : x) = (not p and q) ? y : x
            inner = no if no.on_false == x else exchanged(no)
            both = where.inverted().and_(inner.condition)
            return None if both is None else Select(both, inner.on_true, x)
        return None

    def _triangle(self, call: Call, value: torch.Tensor) -> Value | None:
        """tril keeps i_-1 - i_-2 <= diagonal, triu keeps i_-1 - i_-2 >= diagonal; the rest becomes 0."""
        number, diagonal = known_number(self.read(call["input"])), call["diagonal"]
        if number is None or type(diagonal) is not int or value.dim() < 2:
            return None
        sign = 1 if call.op == "triu" else -1
        offset = Affine(-sign * diagonal, {-1: sign, -2: -sign})
        kept = at_least(simplified(offset, value.shape), 0, value.shape)
        if value.dtype == torch.bool:
            return kept if number else FALSE
        # Of an integer triangle there is no Affine; as two numbers it can still become a bool.
        return Select(kept, number, 0)

    def _difference(self, call: Call, value: torch.Tensor) -> Value | None:
        """diff of an affine tensor is its slope; what is prepended has to continue it."""
        read, operand, dim = self.read(call["input"]), value_of(call["input"]), call["dim"]
        if call["n"] != 1 or call["append"] is not None or not isinstance(read, Affine):
            return None
        if type(dim) is not int or not operand.dim() or value.dtype not in INDEX_DTYPES:
            return None
        along = dim - operand.dim()
        step = read.slopes.get(along, 0)
        if call["prepend"] is not None:
            before, length = self.read(call["prepend"]), value_of(call["prepend"]).shape
            # A single element along that dimension, with the same index everywhere else.
            if not isinstance(before, Affine) or not statically_known_true(length[along] == 1):
                return None
            first = read.plus(Affine(0, {along: step}), -1)
            jump = first.plus(before, -1)
            # Over a single position there is no further difference to agree with.
            if statically_known_true(operand.shape[along] == 1):
                return jump if not jump.slopes else None
            return Affine(step, {}) if jump.equals(Affine(step, {})) else None
        return Affine(step, {})


def _as_scalar(operand: Node, user: Node, extra: int | None) -> Affine | None:
    """A tensor of one integer, as `user` reads it from `operand`, as a number of its own.

    extra: what `user` adds to it in its first element; None if that is not known.
    """
    if not _is_one_integer(value_of(operand)):
        return None
    source, copy = operand, None
    while (call := call_of(source)) is not None and call.op in _VIEWS and _is_one_integer(value_of(call["input"])):
        if _storage(source) != _storage(call["input"]):
            copy = source
        source = call["input"]
    read_at = user if copy is None else copy
    writes = writes_to(source)
    if not writes:
        return Affine(0, {}, {Scalar(source, None, source): 1})
    version = max((write for write in writes if write < read_at), default=None)
    if is_written(read_at) or (copy is None and extra is None):
        return None
    return Affine(0, {}, {Scalar(source, version, read_at, 0 if copy is not None else extra or 0): 1})


def _is_one_integer(value: Any) -> bool:
    is_index = isinstance(value, torch.Tensor) and value.dtype in INDEX_DTYPES
    return is_index and all(statically_known_true(length == 1) for length in value.shape)


def _is_gathered(value: Value) -> bool:
    condition = value.condition if isinstance(value, Select) else value
    atoms = condition.atoms if isinstance(condition, Predicate) else ()
    return isinstance(value, Gathered) or any(isinstance(atom, Tested) for atom in atoms)


def _is_whole(index: Affine, length: Any, result: torch.Tensor) -> bool:
    """Whether a dimension of this length is read from its first to its last element."""
    if statically_known_true(length == 1):
        return True
    (dim, slope) = next(iter(index.slopes.items()), (0, 0))
    return index.equals(Affine(0, {dim: 1})) and slope == 1 and statically_known_true(length == result.shape[dim])


def _from_start(index: Any, length: Any) -> Any:
    """An index counted from the start; None when its sign is not known, or it is no number."""
    if isinstance(index, bool) or not isinstance(index, (int, torch.SymInt)):
        return None
    if statically_known_true(index >= 0):
        return index
    # A slice may start further back than there are elements, and then starts at the first one.
    return index + length if statically_known_true(index < 0) and statically_known_true(index + length >= 0) else None


def writes_to(node: Node) -> list[Node]:
    """Who writes to this value in place, through whatever view."""
    storage = _storage(node)
    found: list[Node] = []
    pending, seen = [node], {node}
    while pending:
        alias = pending.pop()
        for user in alias.users:
            if alias in written_by(user):
                found.append(user)
            if user not in seen and storage is not None and _storage(user) == storage:
                seen.add(user)
                pending.append(user)
    return found


def is_written(node: Node) -> bool:
    """Whether anybody writes to this value: then it is not what its node computes."""
    return bool(writes_to(node))


def _storage(node: Node) -> int | None:
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout == torch.strided else None
