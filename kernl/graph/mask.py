"""Recover what a mask means from the arithmetic that builds it.

Models build their masks inside the graph, from index arithmetic:

    q = arange(S)[None, None, :, None]     k = arange(S)[None, None, None, :]     b = arange(B)[:, None, None, None]
    visible = (k <= q) & padding[b, k]                            bool, True = attend
    mask = where(visible, 0, finfo.min)                           float, added to the scores

`kernl.graph.mask_reader` runs these nodes on symbols in place of numbers; what it finds (`kernl.graph.mask_values`) is
compared here with what attention knows:

    causal        i_-2 - i_-1 + last >= 0       a query sees keys up to `last` after its own index
    window        i_-1 - i_-2 - first >= 0      and from `first` on
    key padding   a bool [batch, seqlen_k] at (i_-4, i_-1)

where first and last are numbers, symbols, or integers that a tensor on the device holds. Everything here is exact or
nothing: what is not recovered leaves a visibility incomplete, and the mask itself is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph.mask_reader import ARITHMETIC, COMPARISONS, FILLED, is_written, read
from kernl.graph.mask_values import (
    Affine,
    Gathered,
    Predicate,
    Tested,
    known_number,
    own_index,
    round_to,
    shifted_to_float32,
    spacing,
    two_valued,
)
from kernl.graph.match import Emitted, emit
from kernl.graph.table import value_of

__all__ = [
    "ARITHMETIC",
    "CAUSAL",
    "COMPARISONS",
    "FILLED",
    "AdditiveMask",
    "Affine",
    "Sizes",
    "Visibility",
    "all_of",
    "constant_of",
    "joined",
    "known_number",
    "read_additive",
    "read_affine",
    "read_condition",
    "read_elements",
    "round_to",
    "shifted_to_float32",
    "spacing",
]


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
    """Which keys a query sees: the query i those from i + first to i + last that are not padding.

    first, last: without slopes; None for no bound. key_padding: a bool [batch, seqlen_k] (True = visible), a node or a
    description of one; None when there is none. complete: whether that is all; else there are further conditions, which
    only the mask itself tells. sees_by_position: whether the bounds alone are known to leave each query some key.
    """

    first: Affine | None = None
    last: Affine | None = None
    key_padding: Node | Emitted | None = None
    complete: bool = True
    sees_by_position: bool = True

    @property
    def by_position(self) -> bool:
        """Whether what a query sees depends on where it stands."""
        return self.first is not None or self.last is not None

    @property
    def hides_nothing(self) -> bool:
        return self.complete and not self.by_position and self.key_padding is None

    @property
    def may_hide_rows(self) -> bool:
        """Whether a query may see no key at all. Under causality alone each sees key 0."""
        return not self.complete or self.key_padding is not None or not self.sees_by_position


CAUSAL = Visibility(last=Affine(0, {}))


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
    value = read(mask)
    if not isinstance(value, Predicate):
        return Visibility(complete=False)
    return _visibility(value.inverted() if true_hides else value, sizes)


def read_additive(mask: Node, sizes: Sizes, *, negated: bool = False) -> AdditiveMask | None:
    """What a float mask says; None when it holds anything but 0 and one negative number.

    With `negated` the mask is subtracted from the scores, not added.
    """
    value = two_valued(read(mask), mask)
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
    return known_number(read(argument))


def read_affine(node: Any) -> Affine | None:
    """What a tensor of integers holds, if that is an affine function of its indices."""
    value = read(node)
    return value if isinstance(value, Affine) else None


def read_elements(node: Node) -> tuple[Node, tuple[Affine, ...]] | None:
    """(carrier, indices) of a tensor that holds carrier[indices], the elements of another one as they are."""
    value = read(node)
    if not isinstance(value, Gathered) or value.steps:
        return None
    return value.carrier, value.indices


# What attention knows


def _visibility(predicate: Predicate, sizes: Sizes) -> Visibility:
    if predicate.negated:
        return Visibility(complete=False)
    first: Affine | None = None
    last: Affine | None = None
    complete = True
    paddings: list[Node | Emitted] = []
    for atom in predicate.atoms:
        if isinstance(atom, Tested):
            padding = _key_padding(atom, sizes)
            if padding is None:
                complete = False
            elif padding not in paddings:
                paddings.append(padding)
            continue
        bound = _bound(atom, sizes)
        if bound is None:
            complete = False
        elif bound[0] == "last":
            last, known = _tighter(bound[1], last)
            complete = complete and known
        else:
            first, known = _tighter(bound[1], first, sign=-1)
            complete = complete and known
    sees = _sees_by_position(first, last, sizes)
    return Visibility(first, last, all_of(paddings), complete, sees)


def joined(visibilities: Iterable[Visibility], sizes: Sizes) -> Visibility:
    """What all of these let a query see."""
    first: Affine | None = None
    last: Affine | None = None
    complete = True
    paddings = []
    for each in visibilities:
        for_last, for_first = _tighter(each.last, last), _tighter(each.first, first, sign=-1)
        last, first = for_last[0], for_first[0]
        complete = complete and each.complete and for_last[1] and for_first[1]
        paddings.append(each.key_padding)
    return Visibility(first, last, all_of(paddings), complete, _sees_by_position(first, last, sizes))


def _bound(atom: Affine, sizes: Sizes) -> tuple[str, Affine] | None:
    """("last", c) of i_-2 - i_-1 + c >= 0 and ("first", c) of i_-1 - i_-2 - c >= 0."""
    # The index of a dimension of length 1 is 0 and does not occur.
    lengths = {-2: sizes.seqlen_q, -1: sizes.seqlen_k}
    occur = [dim for dim, length in lengths.items() if not statically_known_true(length == 1)]
    rest = Affine(atom.offset, {}, atom.scalars)
    for name, sign in (("last", 1), ("first", -1)):
        slopes = {-2: sign, -1: -sign}
        if dict(atom.slopes) == {dim: slopes[dim] for dim in occur}:
            return name, rest.times(sign)
    return None


def _tighter(one: Affine | None, other: Affine | None, sign: int = 1) -> tuple[Affine | None, bool]:
    """The smaller of two bounds (the larger, with sign -1), and whether it is known which one that is."""
    if one is None or other is None:
        return (other if one is None else one), True
    for least, most in ((one, other), (other, one)):
        if most.plus(least, -1).times(sign).is_at_least(0, ()):
            return least, True
    return one, False


def _sees_by_position(first: Affine | None, last: Affine | None, sizes: Sizes) -> bool:
    """Whether 0 <= i + last, i + first < seqlen_k and first <= last for all queries i."""
    within = last is None or last.is_at_least(0, ())
    if first is not None:
        behind = first.times(-1)
        within = within and behind.shifted(sizes.seqlen_k - sizes.seqlen_q).is_at_least(0, ())
        within = within and (last is None or last.plus(behind).is_at_least(0, ()))
    return within


_TORCH_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in (*COMPARISONS, *ARITHMETIC, "neg")},
    "invert": torch.bitwise_not,
}


def _key_padding(test: Tested, sizes: Sizes) -> Node | Emitted | None:
    """The bool [batch, seqlen_k] that a test reads at (batch, key); None when it reads anything else, or elsewhere."""
    gathered = test.gathered
    # What is written now and then must be read where the mask reads it.
    if is_written(gathered.carrier):
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
        if not gathered.indices[place].equals(own_index(dim)) or not statically_known_true(shape[place] == length):
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
