"""Recover what a mask means from the arithmetic that builds it.

Models build their masks inside the graph, from index arithmetic:

    q = arange(S)[None, None, :, None]     k = arange(S)[None, None, None, :]     b = arange(B)[:, None, None, None]
    visible = (k <= q) & padding[b, k]                            bool, True = attend
    mask = where(visible, 0, finfo.min)                           float, added to the scores

Here these nodes are run on symbols in place of numbers (abstract interpretation). A tensor is described by what it
holds at the index i = (i_-n, ..., i_-1), dimensions counted from the end as broadcasting does:

    Affine      offset + sum of slope_d * i_d                     arange, and integer arithmetic on it
    Gathered    steps(carrier[affine_0, ..., affine_m])           elements of another tensor, after elementwise steps
    Predicate   a conjunction (or the negation of one) of         comparisons, and, or, not
                    affine >= 0   and   tests of gathered bools
    Select      one number where a predicate holds, another elsewhere

A view only substitutes indices, and so does indexing with tensors. `affine >= 0` that holds over the whole tensor
vanishes, which is how the all-true masks of bidirectional models do. What is left is compared with what attention
knows: "causal" is i_-2 - i_-1 >= 0, and "key padding" is a bool [batch, seqlen_k] at (i_-4, i_-1).

Everything here is exact or nothing: what is not understood is a tensor of its own, never a guess. Sizes may be
symbolic; they are compared with `statically_known_true`, which adds no guard. Memory that somebody writes in place is
not looked through.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph.match import Emitted, emit
from kernl.graph.memory import written_by
from kernl.graph.table import Call, call_of, value_of


@dataclass(frozen=True)
class Sizes:
    """The lengths of an attention's dimensions, ints or SymInts.

    `batch_dim` is where its masks have the batch: -4, or -3 when there are no heads.
    """

    batch: Any
    seqlen_q: Any
    seqlen_k: Any
    batch_dim: int = -4


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which keys a query sees: those that are not padding and, if causal, not after it.

    `key_padding` is a bool [batch, seqlen_k] (True = visible), a node or a description of one; None when there is none.
    When `complete` is false there are further conditions, which only the mask itself tells.
    """

    is_causal: bool = False
    key_padding: Node | Emitted | None = None
    complete: bool = True

    @property
    def hides_nothing(self) -> bool:
        return self.complete and not self.is_causal and self.key_padding is None

    @property
    def may_hide_rows(self) -> bool:
        """Whether a query may see no key at all. Under causality alone each sees key 0."""
        return not self.complete or self.key_padding is not None


@dataclass(frozen=True, eq=False)
class AdditiveMask:
    """A float mask that holds 0 where `visibility` says so and `hidden_value` (negative, possibly -inf) elsewhere.

    `condition` is the same as a bool tensor (True = visible) that broadcasts as the mask does, where there is one.
    """

    visibility: Visibility
    hidden_value: float
    condition: Node | Emitted | None


def read_condition(mask: Node, sizes: Sizes, *, true_hides: bool = False) -> Visibility:
    """What a bool mask says; with `true_hides` True stands for hidden."""
    value = _Reader().read(mask)
    if not isinstance(value, Predicate):
        return Visibility(complete=False)
    return _visibility(value.inverted() if true_hides else value, sizes)


def read_additive(mask: Node, sizes: Sizes, *, negated: bool = False) -> AdditiveMask | None:
    """What a float mask says; None when it holds anything but 0 and one negative number.

    With `negated` the mask is subtracted from the scores, not added.
    """
    value = _two_valued(_Reader().read(mask), mask)
    if value is None:
        return None
    sign = -1 if negated else 1
    shown, hidden = sign * value.on_true, sign * value.on_false
    condition, source, flipped = value.condition, value.source, value.flipped
    if shown != 0:
        shown, hidden, condition, flipped = hidden, shown, condition.inverted(), not flipped
    if shown != 0 or not hidden <= 0:
        return None
    if hidden == 0:
        return AdditiveMask(Visibility(), 0.0, None)
    described: Node | Emitted | None = source
    if source is not None and flipped:
        described = emit(torch.bitwise_not, source)
    return AdditiveMask(_visibility(condition, sizes), float(hidden), described)


def constant_of(argument: Any) -> float | None:
    """The number that a tensor holds everywhere (or a Python number itself), if it is known."""
    return _constant(_Reader().read(argument))


def round_to(number: float, dtype: torch.dtype) -> float:
    """The nearest number that `dtype` has, ties to even, as a cast gives it."""
    precision = _PRECISION.get(dtype)
    if dtype == torch.bool:
        return float(number != 0)
    if precision is None:
        return float(int(number)) if math.isfinite(number) else number
    if number == 0 or not math.isfinite(number):
        return number
    _, exponent = math.frexp(number)
    smallest = math.frexp(torch.finfo(dtype).tiny)[1] - precision
    quantum = 2.0 ** max(exponent - precision, smallest)
    rounded = round(number / quantum) * quantum
    return math.copysign(math.inf, number) if abs(rounded) > torch.finfo(dtype).max else rounded


def spacing(number: float, dtype: torch.dtype) -> float:
    """The distance between neighbouring numbers of `dtype` around a normal number."""
    return 2.0 ** (math.frexp(number)[1] - _PRECISION[dtype])


def shifted_to_float32(number: float, dtype: torch.dtype) -> float:
    """A number whose sums in float32 round as the sums of `number` do in the narrower `dtype`.

    It has the same spacing to its neighbours, and is even or odd alike, so that ties go the same way: fp16's
    -65504 + s, rounded to multiples of 32, becomes -(65504 * 2^13 + 32) + s.
    """
    step = spacing(number, dtype)
    shifted = number * 2.0 ** (_PRECISION[torch.float32] - _PRECISION[dtype])
    is_odd = (number / step) % 2 == 1
    return shifted + math.copysign(step, number) if is_odd and shifted != number else shifted


_PRECISION = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


@dataclass(frozen=True, eq=False)
class Affine:
    """offset + sum of slope * index over dimensions (counted from the end, so negative). The offset may be symbolic."""

    offset: Any
    slopes: Mapping[int, int]

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        slopes = dict(self.slopes)
        for dim, slope in other.slopes.items():
            slopes[dim] = slopes.get(dim, 0) + factor * slope
        return Affine(self.offset + factor * other.offset, {dim: slope for dim, slope in slopes.items() if slope})

    def times(self, factor: int) -> Affine:
        return Affine(self.offset * factor, {dim: slope * factor for dim, slope in self.slopes.items() if factor})

    def least(self, shape: Sequence[Any]) -> Any:
        """The smallest value over a tensor of this shape."""
        return self.offset + sum(slope * (shape[dim] - 1) for dim, slope in self.slopes.items() if slope < 0)

    def equals(self, other: Affine) -> bool:
        return dict(self.slopes) == dict(other.slopes) and statically_known_true(self.offset == other.offset)


@dataclass(frozen=True)
class Step:
    """One elementwise operation with a Python number (or dtype) as its other operand."""

    op: str
    other: Any = None
    other_first: bool = False


@dataclass(frozen=True, eq=False)
class Gathered:
    """steps(carrier[indices])."""

    carrier: Node
    indices: tuple[Affine, ...]
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, eq=False)
class Tested:
    """A bool that is gathered from somewhere."""

    gathered: Gathered
    holds_if: bool = True


@dataclass(frozen=True, eq=False)
class Predicate:
    """All of `atoms` hold (an Affine stands for "at least 0"); or, `negated`, not all of them."""

    atoms: tuple[Affine | Tested, ...] = ()
    negated: bool = False

    def inverted(self) -> Predicate:
        if len(self.atoms) == 1 and not self.negated:
            (atom,) = self.atoms
            if isinstance(atom, Affine):
                return Predicate((Affine(-atom.offset - 1, {dim: -slope for dim, slope in atom.slopes.items()}),))
            return Predicate((Tested(atom.gathered, not atom.holds_if),))
        return Predicate(self.atoms, not self.negated)

    def and_(self, other: Predicate) -> Predicate | None:
        if other.always() is not None:
            self, other = other, self
        if self.always() is not None:
            return other if self.always() else self
        return None if self.negated or other.negated else Predicate(self.atoms + other.atoms)

    def or_(self, other: Predicate) -> Predicate | None:
        neither = self.inverted().and_(other.inverted())
        return None if neither is None else neither.inverted()

    def equals(self, other: Predicate) -> bool:
        """Whether they are put together alike; what differs may still mean the same."""
        alike = self.negated == other.negated and len(self.atoms) == len(other.atoms)
        return alike and all(map(_same_atom, self.atoms, other.atoms))

    def always(self) -> bool | None:
        """True or False when it is that everywhere."""
        return None if self.atoms else not self.negated


@dataclass(frozen=True, eq=False)
class Select:
    """`on_true` where `condition` holds, `on_false` elsewhere.

    `source` is a bool tensor that broadcasts as this one does and holds the condition (its negation if `flipped`).
    """

    condition: Predicate
    on_true: float
    on_false: float
    source: Node | None = None
    flipped: bool = False


Value = Affine | Gathered | Predicate | Select


def _same_atom(one: Affine | Tested, other: Affine | Tested) -> bool:
    if isinstance(one, Affine) and isinstance(other, Affine):
        return one.equals(other)
    if not isinstance(one, Tested) or not isinstance(other, Tested) or one.holds_if != other.holds_if:
        return False
    mine, its = one.gathered, other.gathered
    same_elements = mine.carrier is its.carrier and mine.steps == its.steps
    return same_elements and all(map(Affine.equals, mine.indices, its.indices))


TRUE, FALSE = Predicate(), Predicate(negated=True)
_INDEX_DTYPES = (torch.int64, torch.int32)


def _constant(value: Value | None) -> float | None:
    if isinstance(value, Affine):
        return value.offset if not value.slopes and type(value.offset) is int else None
    if isinstance(value, Predicate):
        always = value.always()
        return None if always is None else int(always)
    if isinstance(value, Select):
        if value.on_true == value.on_false:
            return value.on_true
        always = value.condition.always()
        return None if always is None else value.on_true if always else value.on_false
    return None


def _constant_value(number: Any, dtype: torch.dtype) -> Value | None:
    """How a tensor of this type that holds one number is described."""
    if not isinstance(number, (bool, int, float)):
        return None
    if dtype == torch.bool:
        return TRUE if number else FALSE
    if dtype in _INDEX_DTYPES:
        return Affine(int(number), {})
    return Select(TRUE, round_to(number, dtype), round_to(number, dtype)) if dtype in _PRECISION else None


def _two_valued(value: Value | None, node: Any) -> Select | None:
    if isinstance(value, Select):
        return value
    number = _constant(value)
    if number is not None:
        return Select(TRUE, number, number)
    if isinstance(value, Predicate):
        return Select(value, 1, 0, node if isinstance(node, Node) else None)
    return None


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
_TORCH_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (*COMPARISONS, *ARITHMETIC, "neg")},
    "invert": torch.bitwise_not,
}
FILLED = frozenset("tensor zeros ones full new_zeros new_ones new_full zeros_like ones_like full_like".split())
_VIEWS = frozenset(
    "contiguous clone detach getitem unsqueeze squeeze expand expand_as view view_as reshape flatten transpose permute "
    "select narrow repeat".split()
)
_DEEPEST = 200  # nodes in a chain: masks are built in about 20


class _Reader:
    """Describes nodes, each once."""

    def __init__(self) -> None:
        self.known: dict[Node, Value] = {}
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
        if argument not in self.known:
            self.known[argument] = self._described(argument, value)
        return self.known[argument]

    def _described(self, node: Node, value: torch.Tensor) -> Value:
        described: Value | None = None
        call = call_of(node)
        if call is not None and self.depth < _DEEPEST and not _is_written(node):
            self.depth += 1
            described = self._evaluate(node, call, value)
            self.depth -= 1
        if described is None or (isinstance(described, Gathered) and _is_identity(described, value)):
            described = Gathered(node, _own_indices(value))
        if isinstance(described, Gathered) and value.dtype == torch.bool:
            return Predicate((Tested(described),))
        if isinstance(described, Predicate):
            return _replace_identities(described, node, value)
        return described

    def _evaluate(self, node: Node, call: Call, value: torch.Tensor) -> Value | None:
        op = call.op
        if op in _VIEWS:
            return self._view(call, value)
        if op == "to":
            return self._cast(call, value)
        if op == "arange":
            start, step = value_of(call["start"]), value_of(call["step"])
            if value.dtype in _INDEX_DTYPES and isinstance(start, (int, torch.SymInt)) and type(step) is int:
                return _simplified(Affine(start, {-1: step}), value.shape)
            return None
        if op in FILLED:
            return self._filled(call, value)
        if op in COMPARISONS:
            return self._compare(call, value)
        if op in ARITHMETIC:
            return self._arithmetic(call, value)
        if op == "neg":
            return self._negate(call, value)
        if op in ("and", "or", "invert"):
            return self._logic(node, call, value)
        if op in ("where", "masked_fill"):
            return self._where(call, value)
        if op in ("tril", "triu"):
            return self._triangle(call, value)
        if op == "cumsum":
            step_size = _constant(self.read(call["input"]))
            if type(step_size) is int and value.dtype in _INDEX_DTYPES and type(call["dim"]) is int and value.dim():
                total = Affine(step_size, {call["dim"] - value.dim(): step_size} if step_size else {})
                return _simplified(total, value.shape)
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
            or (index.equals(_index(dim)) and statically_known_true(lengths[dim] == value.shape[dim]))
            for dim, index in indices.items()
        )
        return _substituted(read, indices, value.shape, keep_source=in_place)

    def _index_map(self, call: Call, operand: torch.Tensor, value: torch.Tensor) -> dict[int, Affine] | None:
        """For each dimension of the operand its index, in terms of the result's."""
        rank, new_rank = operand.dim(), value.dim()
        if call.op == "getitem":
            return self._indexed(call["index"], operand, value)
        if call.op in ("contiguous", "clone", "detach"):
            return {dim: _index(dim) for dim in range(-rank, 0)}
        if call.op in ("expand", "expand_as", "repeat"):
            kept: dict[int, Affine] = {}
            for dim in range(-rank, 0):
                if statically_known_true(operand.shape[dim] == 1):
                    kept[dim] = Affine(0, {})
                elif statically_known_true(operand.shape[dim] == value.shape[dim]):
                    kept[dim] = _index(dim)
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
            return {source - rank: _index(position - rank) for position, source in enumerate(order)}
        if call.op == "unsqueeze":
            dims = [dim for dim in range(new_rank) if dim != call["dim"]]
            return {dim - rank: _index(dims[dim] - new_rank) for dim in range(rank)}
        if call.op == "select":
            index, length = value_of(call["index"]), operand.shape[call["dim"]]
            dims = [dim for dim in range(rank) if dim != call["dim"]]
            kept = {dim - rank: _index(position - new_rank) for position, dim in enumerate(dims)}
            chosen = _from_start(index, length)
            return None if chosen is None else kept | {call["dim"] - rank: Affine(chosen, {})}
        if call.op == "narrow":
            start = _from_start(value_of(call["start"]), operand.shape[call["dim"]])
            moved = {dim: _index(dim) for dim in range(-rank, 0)}
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
        same = {one: _index(other) for one, other in zip(mine, its)}
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
            if not statically_known_true(read.least(of_entry.shape) >= 0):
                return None
            indices[dim] = read
        return indices

    # -- elementwise --

    def _operands(self, call: Call, value: torch.Tensor) -> tuple[Value | None, Value | None]:
        """What two operands hold, at the indices of the result; None for one that broadcasts in an unknown way."""
        return self._operand(call["input"], value), self._operand(call["other"], value)

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
            return _stepped(read, Step("to", value.dtype)) if operand.device == value.device else None
        if isinstance(read, Affine) and value.dtype in _INDEX_DTYPES:
            return read
        if isinstance(read, Affine) and read.slopes:
            return None
        two = _two_valued(read, call["input"])
        return None if two is None else _mapped(two, lambda number: number, value.dtype)

    def _filled(self, call: Call, value: torch.Tensor) -> Value | None:
        if call.op == "tensor":
            number = call["data"]
        elif call.op in ("full", "full_like", "new_full"):
            number = call["fill_value"]
        else:
            number = float("ones" in call.op)
        return _constant_value(number, value.dtype)

    def _compare(self, call: Call, value: torch.Tensor) -> Value | None:
        left, right = self._operands(call, value)
        if isinstance(left, Affine) and isinstance(right, Affine):
            difference = left.plus(right, -1)  # left - right
            minus = difference.times(-1)
            if call.op in ("ge", "gt"):
                return _at_least(difference, 0 if call.op == "ge" else 1, value.shape)
            if call.op in ("le", "lt"):
                return _at_least(minus, 0 if call.op == "le" else 1, value.shape)
            both = _at_least(difference, 0, value.shape).and_(_at_least(minus, 0, value.shape))
            return both.inverted() if both is not None and call.op == "ne" else both
        return self._with_constant(call, value, left, right, COMPARISONS[call.op])

    def _arithmetic(self, call: Call, value: torch.Tensor) -> Value | None:
        if call.arguments.get("alpha", 1) != 1 or call.arguments.get("rounding_mode") is not None:
            return None
        left, right = self._operands(call, value)
        if isinstance(left, Affine) and isinstance(right, Affine):
            if value.dtype not in _INDEX_DTYPES or call.op == "div":
                return None
            if call.op == "mul":
                if left.slopes:
                    left, right = right, left
                factor = _constant(left)
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
        constant, read, node, number, first = _constant(right), left, call["input"], call["other"], False
        if constant is None:
            constant, read, node, number, first = _constant(left), right, call["other"], call["input"], True
        if constant is None:
            return None
        if isinstance(read, Gathered):
            # Only Python numbers: a tensor would take part in type promotion.
            step = Step(call.op, number, first)
            return _stepped(read, step) if isinstance(number, (bool, int, float)) else None
        two = _two_valued(read, node)
        if two is None:
            return None
        try:
            return _mapped(two, lambda x: function(constant, x) if first else function(x, constant), value.dtype)
        except ArithmeticError:
            return None

    def _negate(self, call: Call, value: torch.Tensor) -> Value | None:
        read = self.read(call["input"])
        if isinstance(read, Affine):
            return read.times(-1)
        if isinstance(read, Gathered):
            return _stepped(read, Step("neg"))
        return _mapped(read, lambda number: -number, value.dtype) if isinstance(read, Select) else None

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
        yes = _two_valued(self._operand(chosen, value), chosen)
        no = _two_valued(self._operand(otherwise, value), otherwise)
        if not isinstance(where, Predicate) or yes is None or no is None or value.dtype not in _PRECISION:
            return None
        yes, no = _rounded(yes, value.dtype), _rounded(no, value.dtype)
        x, y = _constant(yes), _constant(no)
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
            inner = yes if yes.on_false == y else _flipped(yes)
            both = where.and_(inner.condition)
            return None if both is None else Select(both, inner.on_true, y)
        if x is not None and x in (no.on_true, no.on_false):
            # where(p, x, q ? y : x) = (not p and q) ? y : x
            inner = no if no.on_false == x else _flipped(no)
            both = where.inverted().and_(inner.condition)
            return None if both is None else Select(both, inner.on_true, x)
        return None

    def _triangle(self, call: Call, value: torch.Tensor) -> Value | None:
        """tril keeps i_-1 - i_-2 <= diagonal, triu keeps i_-1 - i_-2 >= diagonal; the rest becomes 0."""
        number, diagonal = _constant(self.read(call["input"])), call["diagonal"]
        if number is None or type(diagonal) is not int or value.dim() < 2:
            return None
        sign = 1 if call.op == "triu" else -1
        offset = Affine(-sign * diagonal, {-1: sign, -2: -sign})
        kept = _at_least(_simplified(offset, value.shape), 0, value.shape)
        if value.dtype == torch.bool:
            return kept if number else FALSE
        # Of an integer triangle there is no Affine; as two numbers it can still become a bool.
        return Select(kept, number, 0)

    def _difference(self, call: Call, value: torch.Tensor) -> Value | None:
        """diff of an affine tensor is its slope; what is prepended has to continue it."""
        read, operand, dim = self.read(call["input"]), value_of(call["input"]), call["dim"]
        if call["n"] != 1 or call["append"] is not None or not isinstance(read, Affine):
            return None
        if type(dim) is not int or not operand.dim() or value.dtype not in _INDEX_DTYPES:
            return None
        along = dim - operand.dim()
        step = read.slopes.get(along, 0)
        if call["prepend"] is not None:
            before, length = self.read(call["prepend"]), value_of(call["prepend"]).shape
            # A single element along that dimension, with the same index everywhere else.
            if not isinstance(before, Affine) or not statically_known_true(length[along] == 1):
                return None
            first = Affine(read.offset, {each: slope for each, slope in read.slopes.items() if each != along})
            jump = first.plus(before, -1)
            # Over a single position there is no further difference to agree with.
            if statically_known_true(operand.shape[along] == 1):
                return jump if not jump.slopes else None
            return Affine(step, {}) if jump.equals(Affine(step, {})) else None
        return Affine(step, {})


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


def _index(dim: int) -> Affine:
    return Affine(0, {dim: 1})


def _own_indices(value: torch.Tensor) -> tuple[Affine, ...]:
    return tuple(_simplified(_index(dim), value.shape) for dim in range(-value.dim(), 0))


def _simplified(affine: Affine, shape: Sequence[Any]) -> Affine:
    """Without the dimensions of length 1, whose index is always 0."""
    slopes = {dim: slope for dim, slope in affine.slopes.items() if not statically_known_true(shape[dim] == 1)}
    return Affine(affine.offset, slopes)


def _at_least(affine: Affine, bound: int, shape: Sequence[Any]) -> Predicate:
    """affine >= bound over a tensor of this shape."""
    affine = Affine(affine.offset - bound, affine.slopes)
    if statically_known_true(affine.least(shape) >= 0):
        return TRUE
    if statically_known_true(affine.times(-1).least(shape) > 0):
        return FALSE
    return Predicate((affine,))


def _from_start(index: Any, length: Any) -> Any:
    """An index counted from the start; None when its sign is not known, or it is no number."""
    if isinstance(index, bool) or not isinstance(index, (int, torch.SymInt)):
        return None
    if statically_known_true(index >= 0):
        return index
    # A slice may start further back than there are elements, and then starts at the first one.
    return index + length if statically_known_true(index < 0) and statically_known_true(index + length >= 0) else None


def _substituted(
    value: Value, indices: Mapping[int, Affine], shape: Sequence[Any], *, keep_source: bool = False
) -> Value | None:
    """The same elements, read at other indices."""

    def moved(affine: Affine) -> Affine:
        result = Affine(affine.offset, {})
        for dim, slope in affine.slopes.items():
            result = result.plus(indices[dim], slope)
        return _simplified(result, shape)

    if isinstance(value, Affine):
        return moved(value)
    if isinstance(value, Gathered):
        return Gathered(value.carrier, tuple(map(moved, value.indices)), value.steps)
    atoms = value.atoms if isinstance(value, Predicate) else value.condition.atoms
    negated = value.negated if isinstance(value, Predicate) else value.condition.negated
    new_atoms: list[Affine | Tested] = []
    for atom in atoms:
        if isinstance(atom, Affine):
            atom = moved(atom)
            # On fewer indices a comparison may have become always true, or never.
            known = _at_least(atom, 0, shape).always()
            if known is None:
                new_atoms.append(atom)
            elif known is False:
                new_atoms, negated = [], not negated
                break
        else:
            gathered = _substituted(atom.gathered, indices, shape)
            assert isinstance(gathered, Gathered)
            new_atoms.append(Tested(gathered, atom.holds_if))
    predicate = Predicate(tuple(new_atoms), negated)
    if isinstance(value, Predicate):
        return predicate
    source = value.source if keep_source else None
    return Select(predicate, value.on_true, value.on_false, source, value.flipped)


def _stepped(gathered: Gathered, step: Step) -> Gathered:
    return Gathered(gathered.carrier, gathered.indices, gathered.steps + (step,))


def _rounded(value: Select, dtype: torch.dtype) -> Select:
    on_true, on_false = round_to(value.on_true, dtype), round_to(value.on_false, dtype)
    return Select(value.condition, on_true, on_false, value.source, value.flipped)


def _flipped(value: Select) -> Select:
    return Select(value.condition.inverted(), value.on_false, value.on_true, value.source, not value.flipped)


def _mapped(value: Select, function: Callable[[Any], Any], dtype: torch.dtype) -> Value | None:
    """A function of a tensor that holds two numbers, in the result's type."""
    on_true, on_false = function(value.on_true), function(value.on_false)
    if dtype == torch.bool:
        if bool(on_true) == bool(on_false):
            return TRUE if on_true else FALSE
        return value.condition if on_true else value.condition.inverted()
    on_true, on_false = round_to(on_true, dtype), round_to(on_false, dtype)
    if on_true == on_false and dtype in _INDEX_DTYPES:
        return Affine(int(on_true), {})
    return Select(value.condition, on_true, on_false, value.source, value.flipped)


def _is_identity(gathered: Gathered, value: torch.Tensor) -> bool:
    """Whether a tensor has the very elements of its carrier, after elementwise steps: then it can be the carrier."""
    carrier = value_of(gathered.carrier)
    return (
        carrier.dim() == value.dim()
        and all(statically_known_true(one == other) for one, other in zip(carrier.shape, value.shape))
        and all(index.equals(own) for index, own in zip(gathered.indices, _own_indices(value)))
    )


def _replace_identities(predicate: Predicate, node: Node, value: torch.Tensor) -> Predicate:
    """Let a bool tensor that tests others of its size element by element stand for itself: nothing is done twice."""
    tests = [atom for atom in predicate.atoms if isinstance(atom, Tested) and _is_identity(atom.gathered, value)]
    if not tests or len(tests) < len(predicate.atoms):
        return predicate
    return Predicate((Tested(Gathered(node, _own_indices(value))),))


def _is_written(node: Node) -> bool:
    """Whether anybody writes to this value in place, through whatever view: then it is not what its node computes."""
    storage = _storage(node)
    pending, seen = [node], {node}
    while pending:
        alias = pending.pop()
        for user in alias.users:
            if alias in written_by(user):
                return True
            if user not in seen and storage is not None and _storage(user) == storage:
                seen.add(user)
                pending.append(user)
    return False


def _storage(node: Node) -> int | None:
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) and value.layout == torch.strided else None


def _visibility(predicate: Predicate, sizes: Sizes) -> Visibility:
    if predicate.negated:
        return Visibility(complete=False)
    is_causal, complete = False, True
    paddings: list[Node | Emitted] = []
    for atom in predicate.atoms:
        if isinstance(atom, Affine):
            if _is_causal(atom, sizes):
                is_causal = True
            else:
                complete = False
        else:
            padding = _key_padding(atom, sizes)
            if padding is None:
                complete = False
            elif padding not in paddings:
                paddings.append(padding)
    return Visibility(is_causal, all_of(paddings), complete)


def _is_causal(atom: Affine, sizes: Sizes) -> bool:
    """i_-2 - i_-1 >= 0; the index of a dimension of length 1 is 0 and does not occur."""
    expected = {-2: (sizes.seqlen_q, 1), -1: (sizes.seqlen_k, -1)}
    slopes = {dim: slope for dim, (length, slope) in expected.items() if not statically_known_true(length == 1)}
    return atom.equals(Affine(0, slopes))


def _key_padding(test: Tested, sizes: Sizes) -> Node | Emitted | None:
    """The bool [batch, seqlen_k] that a test reads at (batch, key); None when it reads anything else, or elsewhere."""
    gathered = test.gathered
    # What is written now and then must be read where the mask reads it.
    if _is_written(gathered.carrier):
        return None
    result: Any = _as_batch_and_keys(gathered, sizes)
    if result is None:
        return None
    for step in gathered.steps:
        if step.op == "to":
            to_bool = step.other == torch.bool
            result = emit(torch.ne, result, 0) if to_bool else emit(torch.Tensor.to, result, step.other)
        elif step.op in ("neg", "invert"):
            result = emit(_TORCH_FUNCTIONS[step.op], result)
        elif not step.other_first:
            result = emit(_TORCH_FUNCTIONS[step.op], result, step.other)
        elif step.op == "sub":
            result = emit(torch.rsub, result, step.other)
        else:
            swapped = {"ge": "le", "gt": "lt", "le": "ge", "lt": "gt"}.get(step.op, step.op)
            if swapped == "div":
                return None
            result = emit(_TORCH_FUNCTIONS[swapped], result, step.other)
    return result if test.holds_if else emit(torch.logical_not, result)


def _as_batch_and_keys(gathered: Gathered, sizes: Sizes) -> Node | Emitted | None:
    """The carrier, or a view of it, as [batch, seqlen_k]; None when it has other dimensions, or is read otherwise."""
    shape = value_of(gathered.carrier).shape
    is_single = [statically_known_true(length == 1) for length in (sizes.batch, sizes.seqlen_k)]
    wanted = [(sizes.batch, sizes.batch_dim), (sizes.seqlen_k, -1)]
    wanted = [each for each, single in zip(wanted, is_single) if not single]
    places = [place for place, length in enumerate(shape) if not statically_known_true(length == 1)]
    if len(places) != len(wanted):
        return None
    for place, (length, dim) in zip(places, wanted):
        if not gathered.indices[place].equals(_index(dim)) or not statically_known_true(shape[place] == length):
            return None
    if len(shape) == 2:
        return gathered.carrier
    kept = [slice(None) if place in places else 0 for place in range(len(shape))]
    before, after = [None] * is_single[0], [None] * is_single[1]
    return emit(operator.getitem, gathered.carrier, (*before, *kept, *after))


def all_of(conditions: Iterable[Node | Emitted | None]) -> Node | Emitted | None:
    """The bool tensor that is true where all of these are; None stands for true everywhere."""
    combined: Node | Emitted | None = None
    for condition in conditions:
        if condition is not None:
            combined = condition if combined is None else emit(torch.logical_and, combined, condition)
    return combined
