"""Layer normalisation, alone and with the residual addition in front of it.

    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias             over the last dimension
    y = layer_norm(input + residual)                                   the sum may be used again

Some models spell it out, at best in fp32 (Cohere, the first DeBERTa, I-BERT): that becomes the one call first.

Post-norm models (BERT, RoBERTa, ELECTRA, DistilBERT, ALBERT) normalise every residual sum; pre-norm models (ViT, CLIP,
GPT-2) also pass the sum on to the next residual: then both are results of one op.

The first norm of a model is one of a sum too: word + type + position embeddings. That is no residual: an operand is a
table, the same for every row of the batch. Where all are lookups, patterns/embedding.py has made their sum one op
before this file's patterns are tried; what it leaves is fused with the lookups when the rest of the graph is lowered.
So a sum counts as residual unless both operands are embedding lookups (or sums of them), or one depends on no input of
the model at all. (The rule looks at where values come from, not at shapes: with one row in the batch, those of a table
and of an activation agree.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from kernl.graph import (
    ANY,
    Emitted,
    Match,
    Pattern,
    anything,
    call_of,
    emit,
    op,
    register_pattern,
    require,
    scalar,
    value_of,
    var,
)
from kernl.patterns.common import belongs_to_model, kernl_op, known_equal, require_kernel_tensors, short


def _layer_norm_of(operand: Any) -> Any:
    return op(
        "layer_norm",
        operand,
        normalized_shape=anything("normalized_shape"),
        weight=var("weight", or_none=True),
        bias=var("bias", or_none=True),
        eps=scalar("eps"),
    )


def _require_last_dim(normalized_shape: Any) -> None:
    rank = len(normalized_shape) if isinstance(normalized_shape, (tuple, list, torch.Size)) else 1
    require(rank == 1, f"normalised over {rank} dimensions (accepted: the last one)")


@register_pattern(
    "add_layer_norm",
    _layer_norm_of(op("add", input=var("input"), other=var("residual"), alpha=anything("alpha")).named("sum")),
    priority=40,
)
def add_layer_norm(
    match: Match,
    input: Node,
    residual: Node,
    alpha: Any,
    sum: Node,
    normalized_shape: Any,
    weight: Node | None,
    bias: Node | None,
    eps: float,
) -> dict[Node, Emitted]:
    _require_last_dim(normalized_shape)
    require_residual(input, residual, alpha)
    require_kernel_tensors(input, residual, weight, bias, autocast=match.autocast)
    if not match.users_outside(sum):
        return {match.root: emit(kernl_op("layer_norm_of_sum"), input, residual, weight, bias, float(eps))}
    both = emit(kernl_op("add_layer_norm"), input, residual, weight, bias, float(eps))
    return {match.root: both[0], sum: both[1]}


@register_pattern("layer_norm", _layer_norm_of(var("input")), priority=30)
def layer_norm(
    match: Match, input: Node, normalized_shape: Any, weight: Node | None, bias: Node | None, eps: float
) -> Emitted:
    _require_last_dim(normalized_shape)
    require_kernel_tensors(input, weight, bias, autocast=match.autocast)
    return emit(kernl_op("layer_norm"), input, weight, bias, float(eps))


def or_cast(x: Pattern) -> Pattern:
    """float(x), or x itself: a cast to fp32 loses nothing, and the ops make it anyway."""
    return op("to", x, dtype=torch.float32) | x


def rounds_as_little(match: Match, *dtypes: torch.dtype) -> bool:
    """Whether what is normalised is rounded, on the way, to no type but fp32 and those that are there anyway.

    Any other cast is wanted for what it loses, as in training for quantised inference.
    """
    rounded = match.get("rounded")
    return rounded is None or value_of(rounded).dtype in (torch.float32, *dtypes)


def _formula() -> Pattern:
    x = or_cast(var("input"))
    mean = op("mean", x, dim=anything("dim"), keepdim=True).named("mean")
    centred = op("sub", x, mean)
    square = op("pow", centred, scalar("exponent")) | op("square", centred) | op("mul", centred, centred)
    variance = op("mean", square, dim=anything("dim"), keepdim=True).named("variance")
    shifted = op("add", variance, scalar("eps"))
    normalized = op("mul", centred, op("rsqrt", shifted)) | op("div", centred, op("sqrt", shifted))
    product = op("mul", normalized | op("to", normalized, dtype=ANY).named("rounded"), or_cast(var("weight")))
    result = (op("add", product, or_cast(var("bias"))) | product).named("result")
    return result | op("to", result, dtype=ANY)


@register_pattern("layer_norm_formula", _formula(), priority=90)
def layer_norm_formula(match: Match, input: Node, weight: Node, bias: Node | None, eps: float) -> Emitted | None:
    value = value_of(input)
    for each in (value_of(parameter) for parameter in (weight, bias) if parameter is not None):
        if each.dtype != value.dtype or each.dim() != 1 or not known_equal(each.shape[0], value.shape[-1]):
            return None
    if value_of(match.root).dtype != value.dtype:
        return None  # what is matched from the node before, or after, says it better
    if not rounds_as_little(match, value.dtype, value_of(match["result"]).dtype):
        return None
    last = value.dim() - 1
    require(match.get("exponent", 2) == 2, f"the exponent is {match.get('exponent')} (accepted: 2)")
    require(match["dim"] in (last, (last,)), f"the mean is over dimension {match['dim']} (accepted: the last)")
    statistics = value_of(match["variance"]).dtype
    require(statistics == torch.float32, f"the statistics are {short(statistics)} (accepted: float32)")
    return emit(F.layer_norm, input, tuple(value_of(weight).shape), weight, bias, float(eps))


def require_residual(input: Node, residual: Node, alpha: Any) -> None:
    """Refuse a sum that is no residual addition (see the top of this file)."""
    require(alpha == 1, f"the addition scales its second operand (alpha = {alpha})")
    require(
        not (_is_lookup(input) and _is_lookup(residual)),
        "the sum is of embedding lookups, not of a residual: left to lowering",
    )
    for operand in (input, residual):
        require(not _is_table(operand), "an operand of the sum is a table (it depends on no input): left to lowering")


def _is_lookup(node: Any) -> bool:
    """An embedding lookup, or a sum, scaling or cast of lookups and tables."""
    call = call_of(node)
    if call is None:
        return False
    if call.op in ("embedding", "kernl::embedding_sum"):
        return True
    if call.op == "add":
        operands = (call["input"], call["other"])
        return all(_is_lookup(each) or _is_table(each) for each in operands) and any(map(_is_lookup, operands))
    if call.op in ("mul", "div"):
        return any(_is_lookup(each) for each in (call["input"], call["other"])) and not all(
            isinstance(value_of(each), torch.Tensor) for each in (call["input"], call["other"])
        )
    return call.op in ("to", "contiguous", "view", "reshape", "unsqueeze", "expand") and _is_lookup(call["input"])


_DEEPEST_TABLE = 64  # nodes: tables lie a few views and lookups away from a parameter, activations behind whole layers


def _is_table(node: Any) -> bool:
    """A value that depends on parameters, buffers, constants and sizes only."""
    if not isinstance(node, Node):
        return False
    seen: set[Node] = set()
    pending = [node]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        if len(seen) > _DEEPEST_TABLE:
            return False
        if (
            current.op == "placeholder"
            and isinstance(value_of(current), torch.Tensor)
            and not belongs_to_model(current)
        ):
            return False
        pending.extend(current.all_input_nodes)
    return True
