"""Attention, written as one call or as its formula.

    output = softmax(scale * query key^T, masked) value

    scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)
    matmul(softmax(matmul(query, key^T) * scale + mask), value)

Seen in BERT, RoBERTa, XLM-R, ELECTRA, DistilBERT, ALBERT, ViT, CLIP, ModernBERT, T5, GPT-2, Llama and Mistral, which
have both ("sdpa" and "eager"), and in MPNet, which has only the formula. DeBERTa's is seen, and left alone.

The formula varies: the scale divides, or multiplies query or key instead; the scores are cast, or softmax is told a
type; the mask is added, subtracted or filled in; dropout that does nothing stands before the last product. All of these
are read backwards from that product. Key and value heads that were repeated for grouped queries stay shared.

The mask is recovered from the arithmetic that builds it (`kernl.graph.mask`): causality becomes `is_causal`, padding
becomes the [batch, seqlen_k] tensor it was made from, and the [batch, 1, seqlen_q, seqlen_k] tensor is never built.
What is not recovered is passed as it is: one fused attention all the same.

**Queries that see no key** get what the model gives them:

* a bool mask, or -inf: 0, as torch's sdpa. (softmax alone gives NaN there, which is nobody's wish.)
* a number that takes the scores' place (masked_fill with finfo.min): the mean of all values.
* finfo.min added in float32 or bfloat16: the mean too, since every score vanishes beside it.
* -65504 added in float16 rounds score - 65504 to a multiple of 32; -1e9 added in float32, to one of 64; -65504 added in
  float32, inside sdpa, keeps most of the score. That is neither 0 nor the mean, but float32 can do the same arithmetic
  with a number of the same spacing: such a mask stays additive, [batch, 1, 1, seqlen_k] when it is padding. (So does
  any that is added while gradients are wanted: the scores of such queries have gradients.)

For all other queries a hidden key has weight exp(-large) = 0 in every encoding. A number that is not large (over -5000)
is a bias and stays one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

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
    var,
)
from kernl.graph.mask import (
    Sizes,
    Visibility,
    all_of,
    constant_of,
    read_additive,
    read_condition,
    round_to,
    shifted_to_float32,
    spacing,
)
from kernl.graph.table import DROPOUTS, does_nothing, op_name
from kernl.patterns.common import kernl_op, require_kernel_tensors, short

MAX_HEAD_DIM = 256

# exp(_DEEP + s) is 0 for any difference s of two scores that leaves a softmax its meaning.
_DEEP = -5000.0
# A number with this spacing absorbs any score up to float16's largest.
_ABSORBING = 2.0**17

Tensor = Node | Emitted
MaskArguments = tuple[Tensor | None, Tensor | None, bool, str]  # attn_mask, key_padding, is_causal, hidden_rows


@dataclass(frozen=True, eq=False)
class Hidden:
    """Keys that a mask hides by giving their scores a value.

    condition: the mask as a bool tensor (True = attend) that broadcasts to the scores; None for causality alone.
    value: a large negative number or -inf; it takes the place of hidden scores.
    sums: if it is added to them instead, the types of this and of later additions.
    """

    visibility: Visibility
    condition: Tensor | None
    value: float = -math.inf
    sums: tuple[torch.dtype, ...] = ()


@dataclass(eq=False)
class Masks:
    """All that is done to the scores besides scaling."""

    hidden: list[Hidden] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)


@register_pattern(
    "attention",
    op(
        "scaled_dot_product_attention",
        query=var("query"),
        key=var("key"),
        value=var("value"),
        attn_mask=var("attn_mask", or_none=True),
        dropout_p=anything("dropout_p"),
        is_causal=anything("is_causal"),
        scale=anything("scale"),
        enable_gqa=anything("enable_gqa"),
    ),
    priority=50,
)
def sdpa_attention(
    match: Match,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None,
    dropout_p: Any,
    is_causal: Any,
    scale: Any,
    enable_gqa: Any,
) -> Emitted:
    require(not isinstance(dropout_p, Node) and dropout_p == 0, "attention dropout is active")
    require(isinstance(is_causal, bool) and isinstance(enable_gqa, bool), "is_causal or enable_gqa is not a constant")
    require(
        scale is None or isinstance(scale, (int, float)),
        "the scale is not a constant (torch.compile(dynamic=True) makes numbers tensors: leave dynamic out, or set "
        "torch._dynamo.config.specialize_float = True)",
    )
    key, value, grouped = _unrepeated(query, key, value)
    _require_shapes(*(value_of(operand).shape for operand in (query, key, value)), grouped=grouped or enable_gqa)
    require_kernel_tensors(query, key, value, autocast=match.autocast)
    shape = value_of(query).shape
    scale = 1 / math.sqrt(shape[-1]) if scale is None else float(scale)
    sizes = Sizes(shape[0], shape[-2], value_of(key).shape[-2], -len(shape))

    masks = Masks()
    if attn_mask is not None:
        dims = value_of(attn_mask).dim()
        require(dims in (len(shape), len(shape) - 1) or dims < len(shape) == 4, f"a mask of {dims} dimensions")
        if value_of(attn_mask).dtype == torch.bool:
            masks.hidden.append(Hidden(read_condition(attn_mask, sizes), attn_mask))
        else:
            # The mask is added in float32, whatever its type; but autocast gives it the type of the result first.
            given = value_of(match.root).dtype if match.autocast else torch.float32
            _read_additive(masks, attn_mask, sizes, (torch.float32,), given=given)
    if is_causal:
        masks.hidden.append(Hidden(Visibility(is_causal=True), None))
    return _attention(query, key, value, scale, _mask_arguments(masks, sizes, match), len(shape))


@register_pattern(
    "eager_attention",
    either(
        op("matmul", anything("first"), anything("second")),
        op("bmm", anything("first"), anything("second")),
        op("einsum", anything("first"), anything("second")),
    ),
    priority=50,
)
def eager_attention(match: Match, first: Any, second: Any) -> Emitted | None:
    """Read backwards from the last product. None when this product is no part of an attention."""
    if not _is_last_product(match.root):
        return None
    require(op_name(match.root) != "einsum", "seen but unknown: the last product is an einsum")
    require(
        _find_softmax(first) is not None, "seen but unknown: the weights are the second operand of the last product"
    )
    softmax = _read_weights(match, first)
    weights = match.nodes
    query, key, scale, masks = _read_scores(match, softmax, second)
    for node in match.nodes - {match.root}:
        what = "weights" if node in weights else "scores"
        require(not match.users_outside(node), f"attention {what} are returned, or used elsewhere")

    value, grouped = second, False
    if isinstance(key, Node):
        key, value, grouped = _unrepeated(query, key, value)
    batch, *_, seqlen_q, seqlen_k = value_of(softmax).shape
    rank = value_of(softmax).dim()
    shapes = [value_of(query).shape, _shape_of(key), value_of(value).shape]
    _require_shapes(*shapes, grouped=grouped)
    require_kernel_tensors(query, *_nodes_in(key), value, autocast=match.autocast)
    mask = _mask_arguments(masks, Sizes(batch, seqlen_q, seqlen_k, -rank), match, eager=True)
    return _attention(query, key, value, scale, mask, rank)


def _attention(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: MaskArguments, rank: int) -> Emitted:
    attn_mask, key_padding, is_causal, hidden_rows = mask
    if rank == 3:  # [batch, seqlen, head_dim]: one head
        query, key, value = (emit(torch.unsqueeze, operand, 1) for operand in (query, key, value))
        attn_mask = None if attn_mask is None else emit(torch.unsqueeze, attn_mask, -3)
    attention = kernl_op("attention")
    output = emit(attention, query, key, value, attn_mask, key_padding, scale, is_causal, hidden_rows)[0]
    return emit(torch.squeeze, output, 1) if rank == 3 else output


def _require_shapes(query: Sequence[Any], key: Sequence[Any], value: Sequence[Any], *, grouped: bool) -> None:
    ranks = {len(query), len(key), len(value)}
    require(ranks in ({3}, {4}), f"operands have {' and '.join(map(str, sorted(ranks)))} dimensions (accepted: 3 or 4)")
    same = [(query[0], key[0]), (query[0], value[0]), (key[-2], value[-2])]
    require(all(map(_known_equal, *zip(*same))), "batches or lengths of query, key and value are not known to be equal")
    if len(query) == 4:
        require(_known_equal(key[1], value[1]), "key and value have different numbers of heads")
        divides = grouped and type(query[1]) is int and type(key[1]) is int and query[1] % key[1] == 0
        require(divides or _known_equal(query[1], key[1]), "query and key have different numbers of heads")
    for name, dim in (("head_dim", query[-1]), ("value head_dim", value[-1])):
        require(type(dim) is int, f"{name} is not a constant")
        require(1 <= dim <= MAX_HEAD_DIM, f"{name} {dim} (accepted: up to {MAX_HEAD_DIM})")


def _known_equal(one: Any, other: Any) -> bool:
    return statically_known_true(one == other)


def _unrepeated(query: Node, key: Node, value: Node) -> tuple[Node, Node, bool]:
    """Key and value before their heads were repeated for grouped queries, and whether they were."""
    shared = [_before_repeat(operand) for operand in (key, value)]
    if shared[0] is None or shared[1] is None or value_of(query).dim() != 4:
        return key, value, False
    if not _known_equal(value_of(shared[0]).shape[1], value_of(shared[1]).shape[1]):
        return key, value, False
    return shared[0], shared[1], True


def _before_repeat(node: Node) -> Node | None:
    """x of reshape(expand(x[:, :, None], [batch, heads, repeats, seqlen, dim])), which repeats each head."""
    reshape = call_of(node)
    if reshape is None or reshape.op not in ("reshape", "view", "flatten"):
        return None
    expand = call_of(reshape["input"])
    if expand is None or expand.op != "expand":
        return None
    insert = call_of(expand["input"])
    if insert is None or insert.op not in ("getitem", "unsqueeze"):
        return None
    if insert.op == "getitem":
        index = insert["index"]
        everything = slice(None, None, None)
        given = [None if each is None else each == everything for each in index] if isinstance(index, tuple) else []
        if given[:3] != [True, True, None] or not all(given[3:]) or len(given) > 5:
            return None
    elif insert["dim"] != 2:
        return None
    source, repeated, result = (value_of(each) for each in (insert["input"], reshape["input"], node))
    if source.dim() != 4 or repeated.dim() != 5 or result.dim() != 4:
        return None
    batch, heads, seqlen, dim = source.shape
    of_repeated = (repeated.shape[0], repeated.shape[1], repeated.shape[3], repeated.shape[4])
    expected = (batch, heads * repeated.shape[2], seqlen, dim)
    equal = all(map(_known_equal, source.shape, of_repeated)) and all(map(_known_equal, result.shape, expected))
    return insert["input"] if equal else None


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
        elif call is None or call.op not in ("to", "contiguous", "clone"):
            raise Refused(f"seen but unknown: {op_name(node)} between softmax and the product with the values")
        assert call is not None
        node = call["input"]


def _read_scores(match: Match, softmax: Node, value: Node) -> tuple[Node, Tensor, float, Masks]:
    """From softmax back to the first product: query, key, scale, and what is added or filled in."""
    shape = value_of(softmax).shape
    sizes = Sizes(shape[0], shape[-2], shape[-1], -len(shape))
    masks, scale, node = Masks(), 1.0, call_of(softmax)["input"]  # type: ignore[index]
    casts = [value_of(softmax).dtype]  # types the scores take after the place that is read
    sums: list[torch.dtype] = []  # types of the additions after it
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
        elif factor is not None:
            node, number = factor
            scale *= number
        elif call.op in ("add", "sub", "masked_fill", "where"):
            require(scale == 1, "seen but unknown: the scores are scaled after a mask is added")
            narrower = any(torch.finfo(cast).max < torch.finfo(result.dtype).max for cast in casts)
            require(not narrower, "seen but unknown: the scores are cast to a narrower type after a mask is added")
            node = _read_mask(masks, call, node, sizes, sums)
        else:
            raise Refused(unknown)
        same = value_of(node).dim() == len(shape) and all(map(_known_equal, value_of(node).shape, shape))
        require(same, "seen but unknown: the scores change their shape")

    match.include([node])
    product = call_of(node)
    require(product is not None and product.op in ("matmul", "bmm"), f"seen but unknown: scores are a {op_name(node)}")
    assert product is not None
    query, transposed = product.arguments.values()
    query, by_query = _unscaled(match, query, value)
    transposed, by_key = _unscaled(match, transposed, value)
    key, by_inner_key = _untransposed(match, transposed), 1.0
    if isinstance(key, Node):
        key, by_inner_key = _unscaled(match, key, value)
    return query, key, scale * by_query * by_key * by_inner_key, masks


def _read_mask(masks: Masks, call: Call, node: Node, sizes: Sizes, sums: list[torch.dtype]) -> Node:
    """Read one addition or filling in; returns the scores that it is applied to."""
    dtype = value_of(node).dtype
    if call.op in ("add", "sub"):
        require(call["alpha"] == 1, "seen but unknown: the addition of a mask is scaled")
        made_from_product = [_find(call[name], _PRODUCTS) is not None for name in ("input", "other")]
        scores, mask = call["input"], call["other"]
        if call.op == "add" and made_from_product == [False, True]:
            scores, mask = mask, scores
        known = made_from_product in ([True, False], [False, True]) and (call.op == "add" or made_from_product[0])
        require(known and isinstance(mask, Node), "seen but unknown: an addition to the scores that is no mask")
        sums.append(dtype)
        _read_additive(masks, mask, sizes, tuple(sums), negated=call.op == "sub")
        return scores

    if call.op == "masked_fill":
        scores, condition, filling, true_hides = call["input"], call["mask"], call["value"], True
    else:
        scores, condition, filling, true_hides = call["input"], call["condition"], call["other"], False
        if _find(scores, _PRODUCTS) is None:
            scores, filling, true_hides = filling, scores, True
    number = constant_of(filling)
    require(
        isinstance(scores, Node) and isinstance(condition, Node) and number is not None,
        f"seen but unknown: {call.op} in the scores with something that is not a number",
    )
    assert number is not None
    number = round_to(number, dtype)
    require(number <= _DEEP, f"seen but unknown: hidden scores become {number:g}, which is no mask")
    require(_absorbs(number, sums), "seen but unknown: something is added to scores that a mask has filled in")
    visibility = read_condition(condition, sizes, true_hides=true_hides)
    masks.hidden.append(Hidden(visibility, emit(torch.logical_not, condition) if true_hides else condition, number))
    return scores


def _absorbs(number: float, sums: Sequence[torch.dtype]) -> bool:
    """Whether any score added to this number, in these types, leaves it what it is."""
    return number == -math.inf or all(spacing(number, dtype) >= _ABSORBING for dtype in sums)


def _read_additive(
    masks: Masks,
    mask: Node,
    sizes: Sizes,
    sums: tuple[torch.dtype, ...],
    *,
    negated: bool = False,
    given: torch.dtype = torch.float32,
) -> None:
    """Read a tensor that is added to the scores: a mask, if it holds 0 and one large negative number, or a bias.

    sums: the types of this addition and of those that follow. given: the type the mask has when it is added.
    """
    dims = value_of(mask).dim()
    require(dims > 1 or sizes.batch_dim == -4, f"a mask of {dims} dimensions")
    additive = read_additive(mask, sizes, negated=negated)
    if additive is not None:
        number = round_to(additive.hidden_value, given)
        if number == 0:
            return
        if number <= _DEEP:
            condition = emit(torch.eq, mask, 0) if additive.condition is None else additive.condition
            masks.hidden.append(Hidden(additive.visibility, condition, number, sums))
            return
    masks.biases.append(emit(torch.neg, mask) if negated else mask)


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


# What the op is told


def _mask_arguments(masks: Masks, sizes: Sizes, match: Match, *, eager: bool = False) -> MaskArguments:
    hidden = [each for each in masks.hidden if not each.visibility.hides_nothing]
    require(len(masks.biases) < 2, "seen but unknown: several biases are added to the scores")
    bias = masks.biases[0] if masks.biases else None
    if not hidden:
        # Autocast gives the op finfo.min as -inf, which the formula adds in float32.
        return bias, None, False, "mean" if eager and match.autocast else "zero"

    value, sums = hidden[0].value, hidden[0].sums
    if len(hidden) > 1 and value != -math.inf:
        require(not any(each.sums for each in hidden), "seen but unknown: several masks whose numbers add up")
    require(all(each.value == value for each in hidden), "seen but unknown: several masks that hide differently")
    is_causal = any(each.visibility.is_causal for each in hidden)
    key_padding = all_of(each.visibility.key_padding for each in hidden)
    # What is recovered of an incomplete mask stands beside the mask itself: it tells the kernel which tiles to skip.
    condition = all_of(each.condition for each in hidden if not each.visibility.complete)
    rows_may_be_hidden = key_padding is not None or condition is not None

    needs_grad = bool(sums) and value_of(match.root).requires_grad
    if not rows_may_be_hidden or value == -math.inf:
        hidden_rows = "zero"
    elif _absorbs(value, sums) and not needs_grad:
        hidden_rows = "mean"
    else:
        # Gradients too: the scores of a row that sees nothing have some, unless the mask has taken their place.
        case = f"a mask of {value:g} in {short(sums[0])}" + (", with gradients" if needs_grad else "")
        require(not match.autocast, f"{case}, under autocast")
        require(_absorbs(value, sums) or (bias is None and len(set(sums)) == 1), f"{case}, and other additions")
        shown = hidden[0].condition if condition is None else condition
        if condition is None and key_padding is not None and not is_causal:
            shown = emit(operator.getitem, key_padding, (slice(None), *(None,) * (-sizes.batch_dim - 2)))
        number = value if _absorbs(value, sums) else shifted_to_float32(value, sums[0])
        additive = emit(torch.where, shown, emit(torch.Tensor.new_zeros, shown, (), dtype=torch.float32), number)
        return additive if bias is None else emit(torch.add, additive, bias), None, False, "zero"
    if condition is not None and bias is not None:
        bias, condition = emit(torch.where, condition, bias, -math.inf), None
    return bias if condition is None else condition, key_padding, is_causal, hidden_rows
