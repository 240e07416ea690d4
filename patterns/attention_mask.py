"""What is done to attention's scores besides scaling them: read from the graph, and told to the op.

Added to the scores are masks (0 and one large negative number), biases, and sums of these; filled in are numbers where
a condition says so. `Masks` collects what was found:

    hidden     keys that get no weight, because of a condition or an added number (`kernl.graph.mask`)
    distance   a bias that depends on heads and distance alone (`kernl.patterns.relative_position`)
    biases     tensors that are added as they are

T5 has the first two in one tensor, where(visible, bias, finfo.min): it is taken apart. `op_arguments` chooses what
attention is told, so that queries that see no key get what the model gives them (see `kernl.patterns.attention`); where
that cannot be told of the parts, the tensor goes to the kernel whole.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph import Call, Emitted, Match, Refused, call_of, emit, require, value_of
from kernl.graph.mask import (
    Affine,
    Sizes,
    Visibility,
    all_of,
    constant_of,
    joined,
    known_number,
    read_additive,
    read_condition,
    round_to,
    shifted_to_float32,
    spacing,
)
from kernl.graph.mask_reader import is_written
from kernl.patterns.common import short
from kernl.patterns.relative_position import DistanceBias, read_distance_bias

# exp(DEEP + s) is 0 for any difference s of two scores that leaves a softmax its meaning.
DEEP = -5000.0
# A number with this spacing absorbs any score up to float16's largest.
_ABSORBING = 2.0**17

Tensor = Node | Emitted


@dataclass(frozen=True, eq=False)
class Hidden:
    """Keys that a mask hides by giving their scores a value.

    condition: the mask as a bool tensor (True = attend) that broadcasts to the scores; None for causality alone.
    value: a large negative number or -inf; it takes the place of hidden scores.
    sums: if it is added to them instead, the types of this and of later additions.
    replaces_bias: whether a bias is added only to the scores that are not hidden.
    """

    visibility: Visibility
    condition: Tensor | None
    value: float = -math.inf
    sums: tuple[torch.dtype, ...] = ()
    replaces_bias: bool = False


@dataclass(eq=False)
class Masks:
    """All that is done to the scores besides scaling.

    apart: whether sums of masks and biases are taken apart; was_apart: whether there were any.
    """

    sizes: Sizes
    apart: bool = True
    was_apart: bool = False
    hidden: list[Hidden] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)
    distance: DistanceBias | None = None


@dataclass(frozen=True)
class OpArguments:
    """Of `torch.ops.kernl.attention`, after the operands, in its order."""

    attn_mask: Tensor | None = None
    key_padding: Tensor | None = None
    scale: float = 1.0
    is_causal: bool = False
    hidden_rows: str = "zero"
    left: int | None = None
    right: int | None = None
    offset: Any = 0
    q_offset: Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    distance_bias: Tensor | None = None

    def positional(self) -> list[Any]:
        """Without those at the end that have their defaults."""
        values = [getattr(self, each.name) for each in fields(self)]
        defaults = [each.default for each in fields(self)]
        while len(values) > 5 and values[-1] == defaults[len(values) - 1]:
            values.pop()
        return values


def read_masks(read: Callable[[Masks], Any], sizes: Sizes, told: Callable[[Masks, Any], Any]) -> Any:
    """told(masks, read(masks)), with masks and biases taken apart, or if that is refused, not."""
    masks = Masks(sizes)
    try:
        return told(masks, read(masks))
    except Refused:
        if not masks.was_apart:
            raise
    whole = Masks(sizes, apart=False)
    return told(whole, read(whole))


# Reading


def add_filled(
    masks: Masks, condition: Node, number: float, dtype: torch.dtype, sums: Sequence[torch.dtype], *, true_hides: bool
) -> None:
    """A number that takes the place of scores. sums: the types of the additions that come after."""
    number = round_to(number, dtype)
    require(number <= DEEP, f"seen but unknown: hidden scores become {number:g}, which is no mask")
    require(absorbs(number, sums), "seen but unknown: something is added to scores that a mask has filled in")
    visibility = read_condition(condition, masks.sizes, true_hides=true_hides)
    masks.hidden.append(Hidden(visibility, _shown(condition, true_hides), number))


def add_term(
    masks: Masks,
    term: Node,
    sums: tuple[torch.dtype, ...],
    *,
    negated: bool = False,
    given: torch.dtype = torch.float32,
) -> None:
    """A tensor that is added to the scores: a mask, if it holds 0 and one large negative number, or a bias, or a sum.

    sums: the types of this addition and of those that follow. given: the type the tensor has when it is added.
    """
    dims = value_of(term).dim()
    require(dims > 1 or masks.sizes.batch_dim == -4, f"a mask of {dims} dimensions")
    additive = read_additive(term, masks.sizes, negated=negated)
    if additive is not None:
        number = round_to(additive.hidden_value, given)
        if number == 0:
            return
        if number <= DEEP:
            condition = emit(torch.eq, term, 0) if additive.condition is None else additive.condition
            masks.hidden.append(Hidden(additive.visibility, condition, number, sums))
            return
    if masks.apart and not negated and _take_apart(masks, term, sums, given):
        masks.was_apart = True
        return
    if masks.distance is None and not negated:
        masks.distance = read_distance_bias(term, masks.sizes)
        if masks.distance is not None:
            masks.was_apart = True
            return
    bias: Tensor = emit(torch.neg, term) if negated else _first_alike(term)
    masks.biases.append(bias if value_of(term).is_floating_point() else emit(torch.Tensor.float, bias))


def _take_apart(masks: Masks, term: Node, sums: tuple[torch.dtype, ...], given: torch.dtype) -> bool:
    """Read where(visible, bias, number) and bias + mask as their parts. False where a term is neither."""
    call, dtype = call_of(term), value_of(term).dtype
    while call is not None and call.op in ("contiguous", "clone", "expand") and not is_written(term):
        term = call["input"]
        call = call_of(term)
    if call is None or is_written(term):
        return False
    if call.op == "add" and call["alpha"] == 1:
        parts = call["input"], call["other"]
        if not all(isinstance(part, Node) and value_of(part).is_floating_point() for part in parts):
            return False
        for part in parts:
            add_term(masks, part, (dtype, *sums))
        return True
    filled = filled_in(call)
    number = None if filled is None else constant_of(filled[2])
    if filled is None or number is None:
        return False
    kept, condition, _, true_hides = filled
    number = round_to(round_to(number, dtype), given)
    if number > DEEP or not isinstance(kept, Node) or not value_of(kept).is_floating_point():
        return False
    visibility = read_condition(condition, masks.sizes, true_hides=true_hides)
    masks.hidden.append(Hidden(visibility, _shown(condition, true_hides), number, sums, replaces_bias=True))
    add_term(masks, kept, sums, given=given)
    return True


def filled_in(call: Call) -> tuple[Any, Any, Any, bool] | None:
    """(kept, condition, filling, whether True hides) of masked_fill and where; which is kept, the number tells."""
    if call.op == "masked_fill":
        return call["input"], call["mask"], call["value"], True
    if call.op != "where":
        return None
    if constant_of(call["input"]) is not None:
        return call["other"], call["condition"], call["input"], True
    return call["input"], call["condition"], call["other"], False


def _shown(condition: Node, true_hides: bool) -> Tensor:
    return emit(torch.logical_not, condition) if true_hides else condition


def _first_alike(node: Node) -> Node:
    """The first node that computes the same of the same operands: models build one bias anew in each layer."""
    call = call_of(node)
    if call is None or call.op not in ("where", "masked_fill", "contiguous", "add") or not node.all_input_nodes:
        return node
    operand = node.all_input_nodes[0]
    if call.op == "contiguous":
        operand = _first_alike(operand)
    args = tuple(operand if each is node.all_input_nodes[0] else each for each in node.args)
    alike = [
        user
        for user in operand.users
        if (user.op, user.target, user.args, user.kwargs) == (node.op, node.target, args, node.kwargs)
        and not is_written(user)
    ]
    return min([*alike, node])


# Telling


def absorbs(number: float, sums: Sequence[torch.dtype]) -> bool:
    """Whether any score added to this number, in these types, leaves it what it is."""
    return number == -math.inf or all(spacing(number, dtype) >= _ABSORBING for dtype in sums)


def op_arguments(masks: Masks, match: Match, query: Tensor, key: Tensor, *, eager: bool = False) -> dict[str, Any]:
    """Those of `OpArguments` that are about masks and biases. Raises Refused where the op cannot do the same."""
    sizes = masks.sizes
    hidden = [each for each in masks.hidden if not each.visibility.hides_nothing]
    gained = bool(masks.hidden) or masks.distance is not None
    require(len(masks.biases) < 2 or gained or not masks.was_apart, "nothing but biases was in a sum of biases")
    bias = functools.reduce(lambda one, other: emit(torch.add, one, other), masks.biases) if masks.biases else None
    together = joined((each.visibility for each in hidden), sizes)
    positions = _positions(together, masks.distance, sizes, query, key)
    # What cannot be told by position stands in the condition.
    by_condition = [
        each
        for each in hidden
        if not each.visibility.complete
        or (each.visibility.by_position and (positions is None or not together.complete))
    ]
    if positions is None:
        positions = _positions(Visibility(), masks.distance, sizes, query, key)
        require(positions is not None, "seen but unknown: the distance of a bias is not that of two positions")
    assert positions is not None
    if masks.distance is not None:
        positions["distance_bias"] = masks.distance.by_distance
    if not hidden:
        # Autocast gives the op finfo.min as -inf, which the formula adds in float32.
        return positions | {"attn_mask": bias, "hidden_rows": "mean" if eager and match.autocast else "zero"}

    value, sums = hidden[0].value, hidden[0].sums
    if len(hidden) > 1 and value != -math.inf:
        require(not any(each.sums for each in hidden), "seen but unknown: several masks whose numbers add up")
    require(all(each.value == value for each in hidden), "seen but unknown: several masks that hide differently")
    # What is recovered of an incomplete mask stands beside the mask itself: it tells the kernel which tiles to skip.
    require(all(each.condition is not None for each in by_condition), "seen but unknown: a causal mask and an offset")
    condition = all_of(each.condition for each in by_condition)
    key_padding = together.key_padding
    rows_may_be_hidden = together.may_hide_rows or condition is not None

    replaces_bias = any(each.replaces_bias for each in hidden) and (bias is not None or masks.distance is not None)
    needs_grad = bool(sums) and value_of(match.root).requires_grad
    if not rows_may_be_hidden or value == -math.inf:
        hidden_rows = "zero"
    elif absorbs(value, sums) and not needs_grad:
        hidden_rows = "mean"
    else:
        # Gradients too: the scores of a row that sees nothing have some, unless the mask has taken their place.
        case = f"a mask of {value:g} in {short(sums[0])}" + (", with gradients" if needs_grad else "")
        require(not match.autocast, f"{case}, under autocast")
        require(not replaces_bias, f"{case}, in place of a bias")
        last = len(sums) == 1 or (masks.distance is None and len(set(sums)) == 1)
        require(absorbs(value, sums) or (bias is None and last), f"{case}, and other additions")
        shown = hidden[0].condition if condition is None else condition
        if condition is None and key_padding is not None and not together.by_position:
            shown = emit(operator.getitem, key_padding, (slice(None), *(None,) * (-sizes.batch_dim - 2)))
        number = value if absorbs(value, sums) else shifted_to_float32(value, sums[0])
        additive = emit(torch.where, shown, emit(torch.Tensor.new_zeros, shown, (), dtype=torch.float32), number)
        told = _positions(Visibility(), masks.distance, sizes, query, key)
        assert told is not None
        if masks.distance is not None:
            told["distance_bias"] = masks.distance.by_distance
        return told | {"attn_mask": additive if bias is None else emit(torch.add, additive, bias)}
    if condition is not None and bias is not None:
        bias, condition = emit(torch.where, condition, bias, -math.inf), None
    mask = bias if condition is None else condition
    return positions | {"attn_mask": mask, "key_padding": key_padding, "hidden_rows": hidden_rows}


def _positions(
    visibility: Visibility, distance: DistanceBias | None, sizes: Sizes, query: Tensor, key: Tensor
) -> dict[str, Any] | None:
    """Bounds of what a query sees and the position of query 0, as the op takes them; None when it cannot."""
    first, last = visibility.first, visibility.last
    if distance is not None:
        origin = distance.origin
    else:
        origin = Affine(0, {})
        around = all(bound is None or known_number(bound) is not None for bound in (first, last))
        around = around and (last is None or known_number(last) >= 0)  # type: ignore[operator]
        around = around and (first is None or known_number(first) <= 0)  # type: ignore[operator]
        if not around:
            origin = first if last is None else last  # type: ignore[assignment]
    told: dict[str, Any] = {}
    if last is not None:
        right = known_number(last.plus(origin, -1))
        if right is None or right < 0:
            return None
        told |= {"is_causal": True} if right == 0 else {"right": int(right)}
    if first is not None:
        left = known_number(origin.plus(first, -1))
        if left is None or left < 0:
            return None
        told["left"] = int(left)
    offset = _told_offset(origin, sizes, query, key)
    return None if offset is None else told | offset


def _told_offset(origin: Affine, sizes: Sizes, query: Tensor, key: Tensor) -> dict[str, Any] | None:
    """The position of query 0: a number, what keys there are before the queries, or an integer in a tensor."""
    number = known_number(origin)
    if number is not None:
        return {"offset": int(number)} if number else {}
    if not origin.scalars:
        if not statically_known_true(origin.offset == sizes.seqlen_k - sizes.seqlen_q):
            return None
        lengths = (emit(torch.Tensor.size, operand, -2) for operand in (key, query))
        return {"offset": emit(operator.sub, *lengths)}
    (scalar, factor), *others = origin.scalars.items()
    rest = known_number(Affine(origin.offset, {}))
    if others or factor != 1 or rest is None:
        return None
    dims = value_of(scalar.holder).dim()
    told: Tensor = emit(operator.getitem, scalar.holder, (0,) * dims) if dims else scalar.holder
    extra = int(rest) - scalar.extra
    return {"q_offset": emit(torch.add, told, extra) if extra else told}
