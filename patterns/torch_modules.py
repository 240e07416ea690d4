"""Attention and encoder layers of torch.nn, which TorchDynamo keeps as one call: written out for the other patterns.

    linear(attention(linear(query), linear(key), linear(value)))       nn.MultiheadAttention
    norm(x + attention(x)), norm(x + linear(activation(linear(x))))    nn.TransformerEncoderLayer, its "fast path"

The first stands in nn.TransformerDecoder, in WavLM and in OpenAI's CLIP; the second in nn.TransformerEncoder in eval
mode without gradients, where any mask is read as a bool one. What comes out are plain PyTorch calls: whatever else is
known about linears, attention and norms then applies to them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from kernl.graph import Emitted, Match, anything, emit, op, register_pattern, require, value_of
from kernl.graph.table import SCHEMAS

Tensor = Node | Emitted


def _any_call(name: str) -> Any:
    """A call of an operation whatever its arguments, each bound to its own name."""
    return op(name, **{argument: anything(argument) for argument, _ in SCHEMAS[name]})


@register_pattern("encoder_layer", _any_call("transformer_encoder_layer"), priority=95)
def encoder_layer(match: Match) -> Emitted:
    of: Any = match.bindings
    src = of["src"]
    require(not match.autocast, "seen but unknown: an encoder layer of torch.nn, in one call, under autocast")
    require(
        value_of(src).dim() == 3 and not value_of(src).is_nested, "an encoder layer of torch.nn that is not batched"
    )

    def norm(x: Tensor, which: int) -> Emitted:
        weight, bias = of[f"norm_weight_{which}"], of[f"norm_bias_{which}"]
        return emit(F.layer_norm, x, (of["embed_dim"],), weight, bias, of["eps"])

    def feed(x: Tensor) -> Emitted:
        inner = emit(F.linear, x, of["ffn_weight_1"], of["ffn_bias_1"])
        return emit(F.linear, emit(F.gelu if of["use_gelu"] else F.relu, inner), of["ffn_weight_2"], of["ffn_bias_2"])

    if of["norm_first"]:
        x = emit(torch.add, src, _fast_attention(of, norm(src, 1)))
        return emit(torch.add, x, feed(norm(x, 2)))
    x = norm(emit(torch.add, src, _fast_attention(of, src)), 1)
    return norm(emit(torch.add, x, feed(x)), 2)


@register_pattern("multi_head_attention", _any_call("multi_head_attention_forward"), priority=95)
def multi_head_attention(match: Match) -> dict[Node, Emitted]:
    of: Any = match.bindings
    result = _only_output(match)
    require(of["dropout_p"] == 0 or of["training"] is False, "attention dropout is active")
    added = [of[name] for name in ("bias_k", "bias_v", "static_k", "static_v")]
    require(not of["add_zero_attn"] and added == [None] * 4, "seen but unknown: attention with added or static keys")
    inputs = of["query"], of["key"], of["value"]
    require(all(value_of(each).dim() == 3 for each in inputs), "seen but unknown: attention of torch.nn without batch")
    mask, is_causal = of["attn_mask"], of["is_causal"] is True
    padding = of["key_padding_mask"]
    if is_causal and padding is None and of["need_weights"] is False:
        mask = None
    else:
        is_causal = False
    operands = _projected(of, inputs)
    projection = of["out_proj_weight"], of["out_proj_bias"]
    output = _attention(
        operands, projection, of["num_heads"], mask=_merged(padding, mask, of["num_heads"]), is_causal=is_causal
    )
    return {result: output}


def _only_output(match: Match) -> Node:
    """The first of the two results; the second, the weights, must not be used."""
    results = {user.args[1]: user for user in match.root.users if user.target is operator.getitem}
    require(len(results) == len(match.root.users) and 0 in results, "seen but unknown: what is done with the results")
    require(1 not in results or not results[1].users, "attention weights are returned, or used elsewhere")
    match.include(match.root.users)
    return results[0]


def _fast_attention(of: Any, x: Tensor) -> Emitted:
    mask: Tensor | None = of["mask"]
    if mask is not None:
        mask = emit(torch.eq, _of_keys(mask) if of["mask_type"] == 1 else mask, 0)  # what is 0 is seen
    operands = _split(emit(F.linear, x, of["qkv_weight"], of["qkv_bias"]), 3)
    return _attention(operands, (of["proj_weight"], of["proj_bias"]), of["num_heads"], mask=mask, batch_first=True)


def _projected(of: Any, inputs: Sequence[Node]) -> list[Emitted]:
    """Query, key and value, by as few linears as there are inputs that follow each other and are the same."""
    width, weight, bias = of["embed_dim_to_check"], of["in_proj_weight"], of["in_proj_bias"]

    def rows(parameter: Node | None, first: int, last: int) -> Any:
        return None if parameter is None else emit(operator.getitem, parameter, slice(first * width, last * width))

    if of["use_separate_proj_weight"]:
        weights = of["q_proj_weight"], of["k_proj_weight"], of["v_proj_weight"]
        return [emit(F.linear, x, weights[i], rows(bias, i, i + 1)) for i, x in enumerate(inputs)]
    query, key, value = inputs
    if query is key is value:
        return _split(emit(F.linear, query, weight, bias), 3)
    first = emit(F.linear, query, rows(weight, 0, 1), rows(bias, 0, 1))
    if key is value:
        return [first, *_split(emit(F.linear, key, rows(weight, 1, 3), rows(bias, 1, 3)), 2)]
    return [
        first,
        *(emit(F.linear, x, rows(weight, i, i + 1), rows(bias, i, i + 1)) for i, x in ((1, key), (2, value))),
    ]


def _split(x: Emitted, parts: int) -> list[Emitted]:
    chunks = emit(torch.chunk, x, parts, -1)
    return [chunks[i] for i in range(parts)]


def _attention(
    operands: Sequence[Tensor],
    projection: tuple[Node, Node | None],
    heads: int,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    batch_first: bool = False,
) -> Emitted:
    """Of [seqlen, batch, width], or [batch, seqlen, width]; by heads [batch, heads, seqlen, head_dim]."""
    apart, together = ((0, 2, 1, 3), (0, 2, 1, 3)) if batch_first else ((1, 2, 0, 3), (2, 0, 1, 3))
    by_heads = [emit(torch.permute, emit(torch.unflatten, each, -1, (heads, -1)), apart) for each in operands]
    output = emit(F.scaled_dot_product_attention, *by_heads, attn_mask=mask, is_causal=is_causal)
    return emit(F.linear, emit(torch.flatten, emit(torch.permute, output, together), -2), *projection)


def _merged(padding: Node | None, mask: Node | None, heads: int) -> Tensor | None:
    """One mask for `scaled_dot_product_attention`, where True is what attends. In torch.nn it is what does not."""
    if padding is None and mask is None:
        return None
    are_bool = {value_of(each).dtype == torch.bool for each in (padding, mask) if each is not None}
    require(len(are_bool) == 1, "seen but unknown: a padding and a mask of different types")
    parts: list[Tensor] = []
    if mask is not None:
        parts.append(mask if value_of(mask).dim() == 2 else emit(torch.unflatten, mask, 0, (-1, heads)))
    if padding is not None:
        parts.append(_of_keys(padding))
    if are_bool == {True}:
        parts = [emit(torch.bitwise_not, part) for part in parts]
    return parts[0] if len(parts) == 1 else emit(torch.bitwise_and if are_bool == {True} else torch.add, *parts)


def _of_keys(padding: Tensor) -> Emitted:
    """[batch, seqlen_k] as [batch, 1, 1, seqlen_k]."""
    return emit(operator.getitem, padding, (slice(None), None, None))
