"""Attention, written as its formula.

    matmul(softmax(matmul(query, key^T) * scale + mask), value)

Read backwards from the last product, and replaced as the single call is (`kernl.patterns.attention`, which also says
what a query that sees no key gets).

Seen in all models that have "eager", and in MPNet, MPT, BLOOM, GPT-J and DeBERTa-v2, which have nothing else. The
formula varies: the scale divides, or multiplies query or key instead; a tanh caps the scores (Gemma 2); they are cast,
or softmax is told a type; the mask is added, subtracted or filled in; dropout that does nothing stands before the last
product. BLOOM and DeBERTa multiply with the heads as part of the batch, and give the scores four dimensions in between;
BLOOM's product adds its bias itself (baddbmm).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from kernl.graph import (
    Call,
    Emitted,
    Match,
    Refused,
    anything,
    call_of,
    either,
    emit,
    op,
    register_pattern,
    require,
    value_of,
)
from kernl.graph.mask import Sizes, constant_of
from kernl.graph.table import DROPOUTS, does_nothing, op_name
from kernl.patterns.attention import fused_attention, require_shapes, unrepeated
from kernl.patterns.attention_mask import (
    Masks,
    OpArguments,
    Tensor,
    add_filled,
    add_term,
    filled_in,
    op_arguments,
    read_masks,
)
from kernl.patterns.common import known_equal, require_kernel_tensors


@register_pattern(
    "eager_attention",
    either(
        op("matmul", anything("first"), anything("second")),
        op("bmm", anything("first"), anything("second")),
        op("einsum", anything("first"), anything("second")),
    ),
    priority=50,
)
def eager_attention(match: Match, first: Any, second: Any) -> Emitted | dict[Node, Emitted] | None:
    """Read backwards from the last product. None when this product is no part of an attention."""
    if not _is_last_product(match.root):
        return None
    require(op_name(match.root) != "einsum", "seen but unknown: the last product is an einsum")
    require(
        _find_softmax(first) is not None, "seen but unknown: the weights are the second operand of the last product"
    )
    softmax = _read_weights(match, first)
    weights = match.nodes
    batch, *_, seqlen_q, seqlen_k = value_of(softmax).shape
    sizes = Sizes(batch, seqlen_q, seqlen_k, -value_of(softmax).dim())

    def read(masks: Masks) -> Scores:
        return _read_scores(match, softmax, second, masks)

    def told(masks: Masks, scores: Scores) -> tuple[Scores, dict[str, Any]]:
        return scores, op_arguments(masks, match, scores.query, scores.key, eager=True)

    scores, arguments = read_masks(read, sizes, told)
    query, key = scores.query, scores.key
    for node in match.nodes - {match.root}:
        what = "weights" if node in weights else "scores"
        require(not match.users_outside(node), f"attention {what} are returned, or used elsewhere")

    value, grouped = second, False
    if isinstance(key, Node) and not scores.heads_in_batch:
        key, value, grouped = unrepeated(match, query, key, value)
    require_shapes(value_of(query).shape, _shape_of(key), value_of(value).shape, grouped=grouped)
    require_kernel_tensors(query, *_nodes_in(key), value, autocast=match.autocast)
    options = OpArguments(scale=scores.scale, softcap=scores.softcap, **arguments)
    if not scores.heads_in_batch:
        return fused_attention(query, key, value, options, value_of(softmax).dim())
    heads = value_of(softmax).shape[1]
    operands = (_by_head(operand, heads) for operand in (query, key, value))
    output = fused_attention(*operands, options, 4)
    return _split_again(match, output, value_of(softmax).shape) or emit(torch.flatten, output, 0, 1)


# Reading the formula


_PRODUCTS = frozenset({"matmul", "bmm", "baddbmm", "einsum"})
# Behind these lie other layers.
_LAYERS = frozenset({"linear", "addmm", "mm", "layer_norm", "rms_norm", "embedding", "conv1d", "conv2d", "softmax"})
_FARTHEST = 24  # nodes


def _find(start: Any, ops: frozenset[str]) -> Node | None:
    """The nearest of these operations that `start` is made from, within its layer."""
    pending, seen = [start], {start}
    while pending and len(seen) <= _FARTHEST:
        node = pending.pop(0)
        if not isinstance(node, Node):
            continue
        name = op_name(node)
        if name in ops:
            return node
        if name in _LAYERS or name in _PRODUCTS:
            continue
        for operand in node.all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return None


def _find_softmax(start: Any) -> Node | None:
    return _find(start, frozenset({"softmax"}))


def _is_last_product(product: Node) -> bool:
    """Whether an operand of this product is made from a softmax of another product."""
    for operand in product.all_input_nodes:
        softmax = _find_softmax(operand)
        if softmax is not None and _find(softmax.all_input_nodes[0], _PRODUCTS) is not None:
            return True
    return False


def _read_weights(match: Match, node: Any) -> Node:
    """From the last product back to softmax."""
    while True:
        call = call_of(node)
        match.include([node])
        if call is not None and call.op == "softmax":
            require(call["dim"] == value_of(node).dim() - 1, "seen but unknown: softmax is not over the last dimension")
            return node
        if call is not None and call.op in DROPOUTS:
            require(does_nothing(call), "attention dropout is active")
        elif call is None or not (
            call.op in ("to", "contiguous", "clone")
            or (call.op in _VIEWS and _heads_of(call["input"], node) is not None)
        ):
            raise Refused(f"seen but unknown: {op_name(node)} between softmax and the product with the values")
        assert call is not None
        node = call["input"]


@dataclass(frozen=True)
class Scores:
    """softcap(scale * query key^T), to which masks and biases are added; softcap is 0 for none.

    heads_in_batch: whether query and key are [batch * heads, seqlen, head_dim] of scores [batch, heads, ...].
    """

    query: Node
    key: Tensor
    scale: float
    softcap: float
    heads_in_batch: bool


def _read_scores(match: Match, softmax: Node, value: Node, masks: Masks) -> Scores:
    """From softmax back to the first product; what is added or filled in on the way goes to `masks`."""
    shape = value_of(softmax).shape
    scale, softcap, node = 1.0, 0.0, call_of(softmax)["input"]  # type: ignore[index]
    casts = [value_of(softmax).dtype]  # types the scores take after the place that is read
    sums: list[torch.dtype] = []  # types of the additions after it
    heads_in_batch = False
    while op_name(node) not in _PRODUCTS:
        call, result = call_of(node), value_of(node)
        match.include([node])
        unknown = f"seen but unknown: {op_name(node)} between the product of query and key and softmax"
        require(call is not None, unknown)
        assert call is not None
        factor = _factor(call)
        if call.op in ("to", "contiguous", "clone"):
            casts.append(result.dtype)
            node = call["input"]
        elif not heads_in_batch and call.op in _VIEWS and _heads_of(node, call["input"]) is not None:
            heads_in_batch = True
            node = call["input"]
            shape = value_of(node).shape
        elif factor is not None:
            node, number = factor
            scale *= number
        elif call.op == "tanh":
            # c tanh(s x): the factor after it is the cap, and all of them together are the scale.
            require(softcap == 0 and scale > 0, "seen but unknown: a tanh that is no softcap")
            softcap, node = scale, call["input"]
        elif call.op in ("add", "sub", "masked_fill", "where"):
            unscaled = scale == 1 or (scale > 0 and call.op == "add")
            require(unscaled and softcap == 0, "seen but unknown: the scores are scaled after a mask is added")
            narrower = any(torch.finfo(cast).max < torch.finfo(result.dtype).max for cast in casts)
            require(not narrower, "seen but unknown: the scores are cast to a narrower type after a mask is added")
            heads = value_of(softmax).shape[1] if heads_in_batch else None
            node = _read_mask(match, masks, call, node, sums, heads, scale)
        else:
            raise Refused(unknown)
        same = value_of(node).dim() == len(shape) and all(map(known_equal, value_of(node).shape, shape))
        require(same, "seen but unknown: the scores change their shape")

    match.include([node])
    product = call_of(node)
    known = product is not None and product.op in ("matmul", "bmm", "baddbmm")
    require(known, f"seen but unknown: scores are a {op_name(node)}")
    assert product is not None
    *added, query, transposed = list(product.arguments.values())[: 3 if product.op == "baddbmm" else 2]
    if added:
        require(heads_in_batch and scale == 1 and softcap == 0 and product["beta"] == 1, "seen but unknown: a baddbmm")
        require(isinstance(product["alpha"], (int, float)), "seen but unknown: a baddbmm whose alpha is not a constant")
        masks.biases.append(_by_head(added[0], value_of(softmax).shape[1]))
        scale = float(product["alpha"])
    query, by_query = _unscaled(match, query, value)
    transposed, by_key = _unscaled(match, transposed, value)
    key, by_inner_key = _untransposed(match, transposed), 1.0
    if isinstance(key, Node):
        key, by_inner_key = _unscaled(match, key, value)
    return Scores(query, key, scale * by_query * by_key * by_inner_key, softcap, heads_in_batch)


def _read_mask(
    match: Match, masks: Masks, call: Call, node: Node, sums: list[torch.dtype], heads: int | None, scale: float
) -> Node:
    """Read one addition or filling in; returns the scores that it is applied to.

    heads: how many there are, if they are part of the batch here. scale: what the sum is multiplied by afterwards.
    """
    dtype = value_of(node).dtype
    if call.op in ("add", "sub"):
        require(call["alpha"] == 1, "seen but unknown: the addition of a mask is scaled")
        scores, mask = call["input"], call["other"]
        are_scores = [_find(each, _PRODUCTS) is not None for each in (scores, mask)]
        if all(are_scores):  # DeBERTa's bias is made of products too, but gathers from them
            are_scores = [_leads_to_product(each) for each in (scores, mask)]
        if call.op == "add" and are_scores == [False, True]:
            scores, mask = mask, scores
        known = are_scores in ([True, False], [False, True]) and (call.op == "add" or are_scores[0])
        require(known and isinstance(mask, Node), "seen but unknown: an addition to the scores that is no mask")
        sums.append(dtype)
        if scale != 1:
            # Falcon scales its bias too; of a mask the rounding would not be the same.
            alone = Masks(masks.sizes, apart=False)
            add_term(alone, mask, tuple(sums))
            is_bias = heads is None and len(alone.biases) == 1
            require(is_bias, "seen but unknown: the scores are scaled after a mask is added")
            masks.biases.append(emit(torch.mul, alone.biases[0], scale))
        elif heads is None:
            add_term(masks, mask, tuple(sums), negated=call.op == "sub")
        else:
            bias = _by_head(mask, heads)
            masks.biases.append(emit(torch.neg, bias) if call.op == "sub" else bias)
        return scores

    require(heads is None, f"seen but unknown: {call.op} in scores with the heads in the batch")
    filled = filled_in(call)
    assert filled is not None
    scores, condition, filling, true_hides = filled
    number = constant_of(filling)
    require(
        isinstance(scores, Node) and isinstance(condition, Node) and number is not None,
        f"seen but unknown: {call.op} in the scores with something that is not a number",
    )
    assert number is not None
    expanded = call_of(condition)
    if expanded is not None and expanded.op == "expand_as" and expanded["other"] is scores:  # XLM; it would broadcast
        match.include([condition])
        condition = expanded["input"]
    add_filled(masks, condition, number, dtype, sums, true_hides=true_hides)
    return scores


def _leads_to_product(node: Any) -> bool:
    """Whether a product is reached by nothing but what is done to scores."""
    while (call := call_of(node)) is not None and call.op not in _PRODUCTS:
        factor = _factor(call)
        if factor is None and call.op not in ("to", "contiguous", "clone", "add", "masked_fill"):
            return False
        node = call["input"] if factor is None else factor[0]
    return call is not None


def _factor(call: Call) -> tuple[Node, float] | None:
    """(x, c) of x * c, c * x and x / (1 / c)."""
    if call.op not in ("mul", "div") or call.arguments.get("rounding_mode") is not None:
        return None
    operand, other = call["input"], call["other"]
    number = _scalar(other)
    if number is None and call.op == "mul":
        operand, number = other, _scalar(operand)
    if number is None or not isinstance(operand, Node) or not math.isfinite(number) or number == 0:
        return None
    return operand, number if call.op == "mul" else 1 / number


def _scalar(argument: Any) -> float | None:
    """A Python number, or a tensor without dimensions that is known to hold one (so that it changes no type)."""
    if isinstance(argument, Node):
        value = value_of(argument)
        return constant_of(argument) if isinstance(value, torch.Tensor) and value.dim() == 0 else None
    return float(argument) if isinstance(argument, (int, float)) and not isinstance(argument, bool) else None


def _unscaled(match: Match, node: Node, value: Node) -> tuple[Node, float]:
    """Query or key before it was scaled, or cast to compute in a wider type, for the scores alone."""
    scale = 1.0
    while (call := call_of(node)) is not None and not match.users_outside(node):
        factor = _factor(call)
        if factor is not None:
            inner, number = factor
        elif call.op == "to" and _widens(call["input"], node) and value_of(value).dtype != value_of(node).dtype:
            inner, number = call["input"], 1.0
        else:
            break
        match.include([node])
        node, scale = inner, scale * number
    return node, scale


def _widens(narrow: Node, wide: Node) -> bool:
    types = value_of(narrow).dtype, value_of(wide).dtype
    floating = all(dtype.is_floating_point for dtype in types) and value_of(narrow).device == value_of(wide).device
    return floating and torch.finfo(types[0]).bits < torch.finfo(types[1]).bits


def _untransposed(match: Match, transposed: Node) -> Tensor:
    """The key [..., seqlen_k, head_dim] behind its transpose; another view of it when there is none."""
    call = call_of(transposed)
    rank = value_of(transposed).dim()
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    is_transpose = call is not None and (
        (call.op == "transpose" and (call["dim0"], call["dim1"]) == (rank - 2, rank - 1))
        or (call.op == "permute" and tuple(call["dims"]) == swapped)
    )
    if call is not None and is_transpose and not match.users_outside(transposed):
        match.include([transposed])
        return call["input"]
    return emit(torch.transpose, transposed, -2, -1)


def _shape_of(tensor: Tensor) -> Sequence[Any]:
    """Of a node, or of the transpose that `_untransposed` gives."""
    if isinstance(tensor, Node):
        return value_of(tensor).shape
    *outer, rows, columns = value_of(tensor.args[0]).shape
    return (*outer, columns, rows)


def _nodes_in(tensor: Tensor) -> tuple[Node, ...]:
    return (tensor,) if isinstance(tensor, Node) else (tensor.args[0],)


# Heads that are part of the batch


_VIEWS = ("view", "reshape", "flatten")


def _heads_of(apart: Any, merged: Any) -> int | None:
    """How many heads there are, if one is [batch, heads, rows, columns] and the other [batch * heads, rows, columns].

    Both are known to hold the same elements in the same order.
    """
    shapes = [tuple(getattr(value_of(each), "shape", ())) for each in (apart, merged)]
    if [len(shape) for shape in shapes] != [4, 3] or not all(map(known_equal, shapes[0][2:], shapes[1][1:])):
        return None
    heads = shapes[0][1]
    return heads if type(heads) is int else None


def _by_head(tensor: Tensor, heads: int) -> Tensor:
    """[batch, heads, rows, columns] of [batch * heads, rows, columns]: what it was made from, if that is it."""
    call = call_of(tensor)
    if call is not None and call.op in _VIEWS and _heads_of(call["input"], tensor) == heads:
        return call["input"]
    return emit(torch.unflatten, tensor, 0, (-1, heads))


def _split_again(match: Match, output: Emitted, scores: Sequence[Any]) -> dict[Node, Emitted] | None:
    """The users of the last product, if all of them take batch and heads apart again."""
    expected = (*scores[:3], value_of(match.root).shape[-1])
    for user in match.root.users:
        shape = getattr(value_of(user), "shape", ())
        is_view = op_name(user) in ("view", "reshape", "unflatten") and len(shape) == 4
        if not is_view or not all(map(known_equal, shape, expected)):
            return None
    return dict.fromkeys(match.root.users, output)
