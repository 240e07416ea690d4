"""Attention, written as one call.

    output = softmax(scale * query key^T, masked) value

    scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)

Seen in BERT, RoBERTa, XLM-R, ELECTRA, DistilBERT, ALBERT, ViT, CLIP, ModernBERT, T5, GPT-2, BART, Whisper, Llama,
Mistral, Qwen 2 and Gemma 3 with "sdpa"; `kernl.patterns.eager_attention` reads what is written as a formula. Key and
value heads that were repeated for grouped queries stay shared, also those of a static cache.

The mask is recovered from the arithmetic that builds it (`kernl.graph.mask`): causality becomes `is_causal`, a sliding
window its width, padding the [batch, seqlen_k] tensor it was made from, and the [batch, 1, seqlen_q, seqlen_k] tensor
is never built; nor is a bias that depends on distance alone (`kernl.patterns.relative_position`). What is not recovered
is passed as it is: one fused attention all the same.

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
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from kernl.graph import Emitted, Match, anything, call_of, emit, op, register_pattern, require, value_of, var
from kernl.graph.mask import CAUSAL, Sizes, read_condition
from kernl.patterns.attention_mask import Hidden, Masks, OpArguments, Tensor, add_term, op_arguments, read_masks
from kernl.patterns.common import kernl_op, known_equal, require_kernel_tensors

MAX_HEAD_DIM = 256


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
    key, value, grouped = unrepeated(match, query, key, value)
    require_shapes(*(value_of(operand).shape for operand in (query, key, value)), grouped=grouped or enable_gqa)
    require_kernel_tensors(query, key, value, autocast=match.autocast)
    shape = value_of(query).shape
    scale = 1 / math.sqrt(shape[-1]) if scale is None else float(scale)
    sizes = Sizes(shape[0], shape[-2], value_of(key).shape[-2], -len(shape))

    def read(masks: Masks) -> None:
        if attn_mask is not None:
            dims = value_of(attn_mask).dim()
            require(dims in (len(shape), len(shape) - 1) or dims < len(shape) == 4, f"a mask of {dims} dimensions")
            if value_of(attn_mask).dtype == torch.bool:
                masks.hidden.append(Hidden(read_condition(attn_mask, sizes), attn_mask))
            else:
                # The mask is added in float32, whatever its type; but autocast gives it the type of the result first.
                given = value_of(match.root).dtype if match.autocast else torch.float32
                add_term(masks, attn_mask, (torch.float32,), given=given)
        if is_causal:
            masks.hidden.append(Hidden(CAUSAL, None))

    told = read_masks(read, sizes, lambda masks, _: op_arguments(masks, match, query, key))
    return fused_attention(query, key, value, OpArguments(scale=scale, **told), len(shape))


def fused_attention(query: Tensor, key: Tensor, value: Tensor, arguments: OpArguments, rank: int) -> Emitted:
    """The op's output, of 3 dimensions for operands of 3."""
    if rank == 3:  # [batch, seqlen, head_dim]: one head
        query, key, value = (emit(torch.unsqueeze, operand, 1) for operand in (query, key, value))
        if arguments.attn_mask is not None:
            arguments = replace(arguments, attn_mask=emit(torch.unsqueeze, arguments.attn_mask, -3))
    output = emit(kernl_op("attention"), query, key, value, *arguments.positional())[0]
    return emit(torch.squeeze, output, 1) if rank == 3 else output


def require_shapes(query: Sequence[Any], key: Sequence[Any], value: Sequence[Any], *, grouped: bool) -> None:
    ranks = {len(query), len(key), len(value)}
    require(ranks in ({3}, {4}), f"operands have {' and '.join(map(str, sorted(ranks)))} dimensions (accepted: 3 or 4)")
    # That there are as many keys as values need not be known, or any call is an error: a cache's may be two symbols.
    known = known_equal(query[0], key[0]) and known_equal(query[0], value[0])
    require(known, "batches of query, key and value are not known to be equal")
    if len(query) == 4:
        require(known_equal(key[1], value[1]), "key and value have different numbers of heads")
        divides = grouped and type(query[1]) is int and type(key[1]) is int and query[1] % key[1] == 0
        fit = divides or known_equal(query[1], key[1]) or known_equal(key[1], 1)  # one head for all broadcasts
        require(fit, "query and key have different numbers of heads")
    for name, dim in (("head_dim", query[-1]), ("value head_dim", value[-1])):
        require(type(dim) is int, f"{name} is not a constant")
        require(1 <= dim <= MAX_HEAD_DIM, f"{name} {dim} (accepted: up to {MAX_HEAD_DIM})")


def unrepeated(match: Match, query: Node, key: Node, value: Node) -> tuple[Node, Node, bool]:
    """Key and value before their heads were repeated for grouped queries, and whether they were."""
    shared = [_before_repeat(operand) for operand in (key, value)]
    if shared[0] is None or shared[1] is None or value_of(query).dim() != 4:
        return key, value, False
    if not known_equal(value_of(shared[0]).shape[1], value_of(shared[1]).shape[1]):
        return key, value, False
    for operand in (key, value):
        # Taken into the match where nobody else needs them: they read a cache after it is written, and so must the op.
        steps = [operand, operand.all_input_nodes[0], operand.all_input_nodes[0].all_input_nodes[0]]
        if all(user in steps for node in steps for user in match.users_outside(node)):
            match.include(steps)
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
    equal = all(map(known_equal, source.shape, of_repeated)) and all(map(known_equal, result.shape, expected))
    return insert["input"] if equal else None
