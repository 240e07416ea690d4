"""What a tensor of a mask holds, as a formula of its indices.

Descriptions of what stands at the index i = (i_-n, ..., i_-1), dimensions counted from the end as broadcasting does:

    Affine      offset + sum of slope_d * i_d                     arange, and integer arithmetic on it
    Gathered    steps(carrier[affine_0, ..., affine_m])           elements of another tensor, after elementwise steps
    Predicate   a conjunction (or the negation of one) of         comparisons, and, or, not
                    affine >= 0   and   tests of gathered bools
    Select      one number where a predicate holds, another elsewhere

`affine >= 0` that holds over the whole tensor vanishes, which is how the all-true masks of bidirectional models do.
Sizes may be symbolic; they are compared with `statically_known_true`, which adds no guard. `kernl.graph.mask_reader`
finds the description of a node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph.table import value_of

# Numbers


def round_to(number: float, dtype: torch.dtype) -> float:
    """The nearest number that `dtype` has, ties to even, as a cast gives it."""
    precision = PRECISION.get(dtype)
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
    return 2.0 ** (math.frexp(number)[1] - PRECISION[dtype])


def shifted_to_float32(number: float, dtype: torch.dtype) -> float:
    """A number whose sums in float32 round as the sums of `number` do in the narrower `dtype`.

    It has the same spacing to its neighbours, and is even or odd alike, so that ties go the same way: fp16's
    -65504 + s, rounded to multiples of 32, becomes -(65504 * 2^13 + 32) + s.
    """
    step = spacing(number, dtype)
    shifted = number * 2.0 ** (PRECISION[torch.float32] - PRECISION[dtype])
    is_odd = (number / step) % 2 == 1
    return shifted + math.copysign(step, number) if is_odd and shifted != number else shifted


PRECISION = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


# Descriptions


@dataclass(frozen=True)
class Scalar:
    """The integer that a tensor of one element holds when the graph runs, such as how many tokens a cache has.

    source: the tensor. version: the last write to it before it is read; None before any. The first element of `holder`,
    which nobody writes, is this integer plus `extra`.
    """

    source: Node
    version: Node | None
    holder: Node = field(compare=False)
    extra: int = field(default=0, compare=False)


@dataclass(frozen=True, eq=False)
class Affine:
    """offset + sum of slope * index over dimensions + sum of factor * scalar.

    Dimensions count from the end, so are negative. The offset may be symbolic.
    """

    offset: Any
    slopes: Mapping[int, int]
    scalars: Mapping[Scalar, int] = field(default_factory=dict)

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        slopes, scalars = _sum(self.slopes, other.slopes, factor), _sum(self.scalars, other.scalars, factor)
        return Affine(self.offset + factor * other.offset, slopes, scalars)

    def times(self, factor: int) -> Affine:
        return Affine(0, {}).plus(self, factor)

    def shifted(self, number: Any) -> Affine:
        return Affine(self.offset + number, self.slopes, self.scalars)

    def is_at_least(self, bound: int, shape: Sequence[Any]) -> bool:
        """Whether that is known to hold over a whole tensor of this shape."""
        least = self.offset + sum(slope * (shape[dim] - 1) for dim, slope in self.slopes.items() if slope < 0)
        return not self.scalars and statically_known_true(least >= bound)

    def equals(self, other: Affine) -> bool:
        return self.moves_as(other) and statically_known_true(self.offset == other.offset)

    def moves_as(self, other: Affine) -> bool:
        """Whether the two differ by their offsets alone."""
        return dict(self.slopes) == dict(other.slopes) and dict(self.scalars) == dict(other.scalars)


def _sum(one: Mapping[Any, int], other: Mapping[Any, int], factor: int) -> dict[Any, int]:
    total = dict(one)
    for key, number in other.items():
        total[key] = total.get(key, 0) + factor * number
    return {key: number for key, number in total.items() if number}


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
                return Predicate((atom.times(-1).shifted(-1),))
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


TRUE, FALSE = Predicate(), Predicate(negated=True)
INDEX_DTYPES = (torch.int64, torch.int32)


def _same_atom(one: Affine | Tested, other: Affine | Tested) -> bool:
    if isinstance(one, Affine) and isinstance(other, Affine):
        return one.equals(other)
    if not isinstance(one, Tested) or not isinstance(other, Tested) or one.holds_if != other.holds_if:
        return False
    mine, its = one.gathered, other.gathered
    same_elements = mine.carrier is its.carrier and mine.steps == its.steps
    return same_elements and all(map(Affine.equals, mine.indices, its.indices))


def known_number(value: Value | None) -> float | None:
    if isinstance(value, Affine):
        return None if value.slopes or value.scalars else _whole(value.offset)
    if isinstance(value, Predicate):
        always = value.always()
        return None if always is None else int(always)
    if isinstance(value, Select):
        if value.on_true == value.on_false:
            return value.on_true
        always = value.condition.always()
        return None if always is None else value.on_true if always else value.on_false
    return None


def _whole(number: Any) -> int | None:
    """An int, also one that symbols have cancelled out of; None for what is still symbolic."""
    if isinstance(number, torch.SymInt) and number.node.expr.is_number:
        return int(number.node.expr)
    return number if type(number) is int else None


def value_of_number(number: Any, dtype: torch.dtype) -> Value | None:
    """How a tensor of this type that holds one number is described."""
    if not isinstance(number, (bool, int, float)):
        return None
    if dtype == torch.bool:
        return TRUE if number else FALSE
    if dtype in INDEX_DTYPES:
        return Affine(int(number), {})
    return Select(TRUE, round_to(number, dtype), round_to(number, dtype)) if dtype in PRECISION else None


def two_valued(value: Value | None, node: Any) -> Select | None:
    if isinstance(value, Select):
        return value
    number = known_number(value)
    if number is not None:
        return Select(TRUE, number, number)
    if isinstance(value, Predicate):
        return Select(value, 1, 0, node if isinstance(node, Node) else None)
    return None


def own_index(dim: int) -> Affine:
    return Affine(0, {dim: 1})


def own_indices(value: torch.Tensor) -> tuple[Affine, ...]:
    return tuple(simplified(own_index(dim), value.shape) for dim in range(-value.dim(), 0))


def simplified(affine: Affine, shape: Sequence[Any]) -> Affine:
    """Without the dimensions of length 1, whose index is always 0."""
    slopes = {dim: slope for dim, slope in affine.slopes.items() if not statically_known_true(shape[dim] == 1)}
    return Affine(affine.offset, slopes, affine.scalars)


def at_least(affine: Affine, bound: int, shape: Sequence[Any]) -> Predicate:
    """affine >= bound over a tensor of this shape."""
    affine = affine.shifted(-bound)
    if affine.is_at_least(0, shape):
        return TRUE
    if affine.times(-1).is_at_least(1, shape):
        return FALSE
    return Predicate((affine,))


def substituted(
    value: Value, indices: Mapping[int, Affine], shape: Sequence[Any], *, keep_source: bool = False
) -> Value | None:
    """The same elements, read at other indices."""

    def moved(affine: Affine) -> Affine:
        result = Affine(affine.offset, {}, affine.scalars)
        for dim, slope in affine.slopes.items():
            result = result.plus(indices[dim], slope)
        return simplified(result, shape)

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
            known = at_least(atom, 0, shape).always()
            if known is None:
                new_atoms.append(atom)
            elif known is False:
                new_atoms, negated = [], not negated
                break
        else:
            gathered = substituted(atom.gathered, indices, shape)
            assert isinstance(gathered, Gathered)
            new_atoms.append(Tested(gathered, atom.holds_if))
    predicate = Predicate(tuple(new_atoms), negated)
    if isinstance(value, Predicate):
        return predicate
    source = value.source if keep_source else None
    return Select(predicate, value.on_true, value.on_false, source, value.flipped)


def stepped(gathered: Gathered, step: Step) -> Gathered:
    return Gathered(gathered.carrier, gathered.indices, gathered.steps + (step,))


def rounded_to(value: Select, dtype: torch.dtype) -> Select:
    on_true, on_false = round_to(value.on_true, dtype), round_to(value.on_false, dtype)
    return Select(value.condition, on_true, on_false, value.source, value.flipped)


def exchanged(value: Select) -> Select:
    return Select(value.condition.inverted(), value.on_false, value.on_true, value.source, not value.flipped)


def mapped(value: Select, function: Callable[[Any], Any], dtype: torch.dtype) -> Value | None:
    """A function of a tensor that holds two numbers, in the result's type."""
    on_true, on_false = function(value.on_true), function(value.on_false)
    if dtype == torch.bool:
        if bool(on_true) == bool(on_false):
            return TRUE if on_true else FALSE
        return value.condition if on_true else value.condition.inverted()
    on_true, on_false = round_to(on_true, dtype), round_to(on_false, dtype)
    if on_true == on_false and dtype in INDEX_DTYPES:
        return Affine(int(on_true), {})
    return Select(value.condition, on_true, on_false, value.source, value.flipped)


def is_identity(gathered: Gathered, value: torch.Tensor) -> bool:
    """Whether a tensor has the very elements of its carrier, after elementwise steps: then it can be the carrier."""
    carrier = value_of(gathered.carrier)
    return (
        carrier.dim() == value.dim()
        and all(statically_known_true(one == other) for one, other in zip(carrier.shape, value.shape))
        and all(index.equals(own) for index, own in zip(gathered.indices, own_indices(value)))
    )


def replace_identities(predicate: Predicate, node: Node, value: torch.Tensor) -> Predicate:
    """Let a bool tensor that tests others of its size element by element stand for itself: nothing is done twice."""
    tests = [atom for atom in predicate.atoms if isinstance(atom, Tested) and is_identity(atom.gathered, value)]
    if not tests or len(tests) < len(predicate.atoms):
        return predicate
    return Predicate((Tested(Gathered(node, own_indices(value))),))
