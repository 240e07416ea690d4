"""Drop-in for `torch_npu.npu_fusion_attention` on NVIDIA GPUs: the same arguments, by `kernl.ops.attention`.

    attention_out = dropout(softmax(mask(scale * (pse + query key^T), atten_mask)), keep_prob) value

This file reads layouts, sparse modes and lengths, and says what is wrong with them. What makes this attention another
one than PyTorch's (a bias before the scale, masks that hide, statistics of rows) are arguments of the one op, so that
nothing is copied or inverted on the way. docs/fusion_attention.md tells how code moves over.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernl.ops.attention import attention, random_state
from kernl.ops.common import is_capturing

__all__ = ["FusionAttentionResult", "fusion_attention"]

LAYOUTS = ("BSH", "SBH", "BSND", "BNSD", "TND")
_COMPRESSED_MASK = (2048, 2048)
_COMPRESSED_PSE_ROWS = 1024
_DEFAULT, _ALL, _LEFT_UP, _RIGHT_DOWN, _BAND, _PREFIX = range(6)


class FusionAttentionResult(NamedTuple):
    """What `fusion_attention` returns, in the original's order.

    attention_out: in query's layout. softmax_max, softmax_sum: float32 [batch, heads, seqlen_q, 8] (TND: [tokens,
    heads, 8]), eight equal entries in one place of memory. reserved: empty. seed, offset: of dropout; ints, or tensors
    while a graph is traced or captured. mask_length: how many probabilities there are.
    """

    attention_out: torch.Tensor
    softmax_max: torch.Tensor
    softmax_sum: torch.Tensor
    reserved: torch.Tensor
    seed: int | torch.Tensor
    offset: int | torch.Tensor
    mask_length: int


@dataclass(frozen=True)
class _Sizes:
    """batch: rows, or sequences. seqlen_q, seqlen_k: of each row, or of the longest sequence.

    cumulative: where the sequences begin and end in query and in key (TND). mask_length: probabilities in all.
    """

    batch: int
    heads: int
    seqlen_q: int
    seqlen_k: int
    cumulative: tuple[torch.Tensor, torch.Tensor] | None = None
    mask_length: int = 0


def fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    atten_mask: torch.Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: Sequence[int] | torch.Tensor | None = None,
    actual_seq_qlen: Sequence[int] | torch.Tensor | None = None,
    actual_seq_kvlen: Sequence[int] | torch.Tensor | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
) -> FusionAttentionResult:
    """Attention with the arguments of `torch_npu.npu_fusion_attention`.

    query, key, value: float16, bfloat16 or float32, as `input_layout` says: "BSH", "SBH" (H = heads * head_dim),
        "BSND", "BNSD", or "TND" for packed sequences. key and value have the same shape.
    head_num: heads of query; those of key and value follow from their shape and divide it.
    pse: added to the products before they are scaled; query's type; [batch or 1, heads or 1, seqlen_q, seqlen_k], or
        the last 1024 of more rows, of ALiBi under a lower triangle (no gradient then; all rows are made in memory).
    padding_mask: None (the original supports nothing else).
    atten_mask: bool or uint8, 1 hides: [batch, heads or 1, seqlen_q, seqlen_k], [1, 1, seqlen_q, seqlen_k] or
        [seqlen_q, seqlen_k]; for modes 2, 3 and 4 the lower triangle of 2048 x 2048 that the original compresses masks
        to (or one of full size, for 2 and 3): it is not read.
    scale: of the products; keep_prob: in (0, 1].
    pre_tockens, next_tockens: how many keys before and after its position a query sees, in modes 0 (where there is an
        atten_mask) and 4. One may be negative if the other is larger than its absolute value.
    sparse_mode: 0 atten_mask and the band from the top left; 1 atten_mask alone; 2 causal from the top left, 3 from the
        bottom right; 4 the band from the bottom right; 5 causal from the bottom right and atten_mask, and the first
        prefix[b] keys for all queries of row b.
    prefix: ints, one for each batch row. actual_seq_qlen, actual_seq_kvlen: ends of the sequences of "TND"
        (cumulative, without a leading 0); tensors on a GPU are waited for.
    inner_precise: 0, 1 or 2: all the same here, rows that see nothing give 0. gen_mask_parallel, sync: not used.

    Differentiable in query, key, value and pse. Returns a `FusionAttentionResult`.
    Raises ValueError that names the argument and the rule; NotImplementedError for sparse modes 6, 7 and 8.
    """
    _check_scalars(input_layout, sparse_mode, keep_prob, inner_precise, padding_mask)
    operands, sizes = _as_heads(query, key, value, head_num, input_layout, actual_seq_qlen, actual_seq_kvlen)
    mask = _checked_mask(atten_mask, sparse_mode, sizes)
    options = _positions(sparse_mode, atten_mask is not None, pre_tockens, next_tockens, sizes)
    if sparse_mode == _PREFIX:
        options["prefix"] = _checked_prefix(prefix, sizes, query.device)
    if sizes.cumulative is not None:
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), sizes.cumulative))
        options |= {"max_seqlen_q": sizes.seqlen_q, "max_seqlen_k": sizes.seqlen_k}
    seed: int | torch.Tensor = 0
    offset: int | torch.Tensor = 0
    if keep_prob < 1:
        seed, offset = random_state(query.device, None, None)
        options |= {"dropout_p": 1 - keep_prob, "seed": seed, "offset": offset}
        if not (torch.compiler.is_compiling() or is_capturing()):
            seed, offset = int(seed), int(offset)
    output, maximum, total = attention(
        *operands,
        attn_mask=mask,
        mask_hides=True,
        bias=_checked_pse(pse, query, sizes),
        bias_before_scale=True,
        scale=scale,
        return_row_stats=True,
        **options,
    )
    softmax_max, softmax_sum = (_eightfold(part, input_layout) for part in (maximum, total))
    reserved = torch.empty(0, dtype=query.dtype, device=query.device)
    output = _in_layout(output, input_layout)
    return FusionAttentionResult(output, softmax_max, softmax_sum, reserved, seed, offset, sizes.mask_length)


def _check_scalars(layout: Any, sparse_mode: Any, keep_prob: float, inner_precise: Any, padding_mask: Any) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"input_layout: got {layout!r}, accepted {', '.join(LAYOUTS)}")
    if sparse_mode in (6, 7, 8):
        kind = {6: "global", 7: "dilated", 8: "block-local"}[sparse_mode]
        raise NotImplementedError(f"sparse_mode: {sparse_mode} ({kind}) is not supported, nor is it by the original")
    if isinstance(sparse_mode, bool) or sparse_mode not in range(6):
        raise ValueError(f"sparse_mode: got {sparse_mode!r}, accepted 0 to 5")
    if not 0 < keep_prob <= 1:
        raise ValueError(f"keep_prob: got {keep_prob}, accepted more than 0, up to 1")
    if inner_precise not in (0, 1, 2):
        raise ValueError(f"inner_precise: got {inner_precise!r}, accepted 0, 1 or 2")
    if padding_mask is not None:
        raise ValueError("padding_mask: got one, accepted None (the original does not support it either)")


# Layouts


def _as_heads(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    layout: str,
    actual_seq_qlen: Any,
    actual_seq_kvlen: Any,
) -> tuple[list[torch.Tensor], _Sizes]:
    """The operands as [batch, heads, seqlen, head_dim], views, and the sizes of the problem."""
    casts = torch.is_autocast_enabled(query.device.type)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != {"BSH": 3, "SBH": 3, "TND": 3}.get(layout, 4):
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, accepted {', '.join(layout)} (input_layout)")
        if not tensor.is_floating_point() or (tensor.dtype != query.dtype and not casts):
            raise ValueError(f"{name}: got {tensor.dtype}, accepted float16, bfloat16 or float32, as query")
    if key.shape != value.shape:
        raise ValueError(f"value: got shape {list(value.shape)}, accepted key's, {list(key.shape)}")
    if isinstance(head_num, bool) or not isinstance(head_num, int) or not 1 <= head_num <= 256:
        raise ValueError(f"head_num: got {head_num!r}, accepted 1 to 256")
    if layout in ("BSH", "SBH"):
        if query.shape[2] % head_num:
            raise ValueError(f"head_num: got {head_num}, accepted a divisor of query's H, {query.shape[2]}")
        head_dim = query.shape[2] // head_num
        if head_dim == 0 or key.shape[2] % head_dim:
            raise ValueError(f"key: got H {key.shape[2]}, accepted a multiple of query's head_dim, {head_dim}")
        query, key, value = (tensor.unflatten(2, (-1, head_dim)) for tensor in (query, key, value))
    by_heads = {
        "BSH": lambda tensor: tensor.transpose(1, 2),
        "SBH": lambda tensor: tensor.permute(1, 2, 0, 3),
        "BSND": lambda tensor: tensor.transpose(1, 2),
        "BNSD": lambda tensor: tensor,
        "TND": lambda tensor: tensor.transpose(0, 1).unsqueeze(0),
    }[layout]
    operands = [by_heads(tensor) for tensor in (query, key, value)]
    batch, heads, seqlen_q, head_dim = operands[0].shape
    key_heads, seqlen_k = operands[1].shape[1:3]
    if heads != head_num:
        raise ValueError(f"head_num: got {head_num}, accepted the heads of query, {heads}")
    if key_heads == 0 or heads % key_heads:
        raise ValueError(f"key: got {key_heads} heads, accepted a divisor of head_num, {heads}")
    if layout == "TND":
        sizes = _packed_sizes(heads, seqlen_q, seqlen_k, query.device, actual_seq_qlen, actual_seq_kvlen)
    else:
        for name, lengths in (("actual_seq_qlen", actual_seq_qlen), ("actual_seq_kvlen", actual_seq_kvlen)):
            if lengths is not None:
                raise ValueError(f"{name}: got one with input_layout {layout!r}, accepted with 'TND' only")
        sizes = _Sizes(batch, heads, seqlen_q, seqlen_k, mask_length=batch * heads * seqlen_q * seqlen_k)
    for name, size, most in (
        ("batch", sizes.batch, 2048 if layout == "TND" else 256),
        ("seqlen_q", sizes.seqlen_q, 65536),
        ("seqlen_kv", sizes.seqlen_k, 65536),
        ("head_dim", head_dim, 512),
    ):
        if size > most or (size < 1 and layout != "TND"):
            raise ValueError(f"query, key: got {name} {size}, accepted 1 to {most}")
    return operands, sizes


def _packed_sizes(
    heads: int, tokens_q: int, tokens_k: int, device: torch.device, actual_seq_qlen: Any, actual_seq_kvlen: Any
) -> _Sizes:
    cumulative: list[torch.Tensor] = []
    lengths: list[list[int]] = []
    for name, given, tokens in (
        ("actual_seq_qlen", actual_seq_qlen, tokens_q),
        ("actual_seq_kvlen", actual_seq_kvlen, tokens_k),
    ):
        if given is None:
            raise ValueError(f"{name}: got None with input_layout 'TND', accepted the cumulative lengths")
        ends = _integers(name, given)
        starts = [0, *ends[:-1]]
        if not ends or ends[-1] != tokens or any(start > end for start, end in zip(starts, ends)):
            raise ValueError(
                f"{name}: got {ends}, accepted cumulative lengths: numbers that never fall, the last one the tokens "
                f"there are, {tokens}"
            )
        lengths.append([end - start for start, end in zip(starts, ends)])
        cumulative.append(torch.tensor([0, *ends], dtype=torch.int32, device=device))
    lengths_q, lengths_k = lengths
    if len(lengths_q) != len(lengths_k):
        raise ValueError(f"actual_seq_kvlen: got {len(lengths_k)} lengths, accepted as many as actual_seq_qlen's")
    bits = heads * sum(length_q * length_k for length_q, length_k in zip(lengths_q, lengths_k))
    bounds = (cumulative[0], cumulative[1])
    return _Sizes(len(lengths_q), heads, max(lengths_q), max(lengths_k), bounds, bits)


def _integers(name: str, given: Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(given, torch.Tensor):
        if given.is_floating_point() or given.dtype == torch.bool or given.dim() != 1:
            raise ValueError(f"{name}: got {given.dtype} of shape {list(given.shape)}, accepted ints in one dimension")
        return [int(number) for number in given.tolist()]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in given):
        raise ValueError(f"{name}: got {list(given)}, accepted ints")
    return list(given)


def _in_layout(output: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, heads, seqlen_q, head_dim], laid out as [batch, seqlen_q, heads, head_dim], as the query's layout."""
    if layout == "BNSD":
        return output
    if layout == "TND":
        return output[0].transpose(0, 1)
    if layout == "SBH":
        return output.permute(2, 0, 1, 3).flatten(2)
    by_tokens = output.transpose(1, 2)
    return by_tokens.flatten(2) if layout == "BSH" else by_tokens


def _eightfold(statistic: torch.Tensor, layout: str) -> torch.Tensor:
    by_row = statistic[0].transpose(0, 1) if layout == "TND" else statistic
    return by_row.unsqueeze(-1).expand(*by_row.shape, 8)


# Masks, bands and biases


def _is_one_of(shape: tuple[int, ...], accepted: Sequence[tuple[int, ...]]) -> bool:
    """`shape in accepted`, size by size: of symbolic ones that expression takes torch.compile minutes to simplify."""
    return any(len(shape) == len(other) and all(map(operator.eq, shape, other)) for other in accepted)


def _checked_mask(mask: torch.Tensor | None, mode: int, sizes: _Sizes) -> torch.Tensor | None:
    """The mask that is to be read."""
    if mask is None:
        if mode not in (_DEFAULT, _ALL):
            raise ValueError(f"atten_mask: got None with sparse_mode {mode}, which needs one")
        return None
    if mask.dtype not in (torch.bool, torch.uint8):
        raise ValueError(f"atten_mask: got {mask.dtype}, accepted bool or uint8, 1 = hidden")
    shape, rows = tuple(mask.shape), (sizes.seqlen_q, sizes.seqlen_k)
    if mode in (_LEFT_UP, _RIGHT_DOWN, _BAND):
        sizes_accepted = [_COMPRESSED_MASK] if mode == _BAND else [_COMPRESSED_MASK, rows]
        if not _is_one_of(shape[-2:], sizes_accepted) or any(size != 1 for size in shape[:-2]):
            raise ValueError(f"atten_mask: got shape {list(shape)} with sparse_mode {mode}, accepted {sizes_accepted}")
        return None
    accepted: list[tuple[int, ...]] = [(sizes.batch, sizes.heads, *rows), (sizes.batch, 1, *rows)]
    if mode != _PREFIX or sizes.cumulative is not None:
        accepted += [(1, 1, *rows), rows]
    if not _is_one_of(shape, accepted):
        raise ValueError(f"atten_mask: got shape {list(shape)} with sparse_mode {mode}, accepted {accepted}")
    return mask


def _positions(mode: int, has_mask: bool, before: int, after: int, sizes: _Sizes) -> dict[str, Any]:
    """is_causal, window and q_offset: which keys a query may see by its position."""
    if mode == _ALL or not has_mask:
        return {}
    from_bottom_right = mode in (_RIGHT_DOWN, _BAND, _PREFIX)
    offset: int | torch.Tensor = 0
    if from_bottom_right and sizes.cumulative is not None:
        lengths_q, lengths_k = (bounds.diff().long() for bounds in sizes.cumulative)
        offset = lengths_k - lengths_q
    elif from_bottom_right:
        offset = sizes.seqlen_k - sizes.seqlen_q
    if mode in (_LEFT_UP, _RIGHT_DOWN, _PREFIX):
        return {"is_causal": True, "q_offset": offset}
    if (after < 0 and before <= -after) or (before < 0 and after <= -before):
        raise ValueError(
            f"pre_tockens, next_tockens: got {before} and {after}, accepted a negative one only beside one larger than "
            "its absolute value"
        )
    # A band that does not hold its queries' own positions is one that does, around positions moved into it.
    if after < 0:
        offset, before, after = offset + after, before + after, 0
    elif before < 0:
        offset, before, after = offset - before, 0, after + before
    farthest = sizes.seqlen_q + sizes.seqlen_k
    reaches = (left if left < 2 * farthest else -1 for left in (before, after))
    if isinstance(offset, int):  # beyond all queries and keys, farther makes no difference
        offset = max(-2 * farthest, min(offset, 2 * farthest))
    left, right = reaches
    return {"window": (left, right), "q_offset": offset}


def _checked_prefix(prefix: Any, sizes: _Sizes, device: torch.device) -> torch.Tensor:
    if prefix is None:
        raise ValueError("prefix: got None with sparse_mode 5, accepted one int for each batch row")
    shape = tuple(prefix.shape) if isinstance(prefix, torch.Tensor) else (len(prefix),)
    if shape != (sizes.batch,):
        raise ValueError(f"prefix: got shape {list(shape)}, accepted [{sizes.batch}], one for each batch row")
    if isinstance(prefix, torch.Tensor) and not prefix.is_floating_point() and prefix.dtype != torch.bool:
        return prefix.to(device=device, dtype=torch.int64)
    return torch.tensor(_integers("prefix", prefix), dtype=torch.int64, device=device)


def _checked_pse(pse: torch.Tensor | None, query: torch.Tensor, sizes: _Sizes) -> torch.Tensor | None:
    if pse is None:
        return None
    if pse.dtype != query.dtype and not (pse.is_floating_point() and torch.is_autocast_enabled(query.device.type)):
        raise ValueError(f"pse: got {pse.dtype}, accepted query's type, {query.dtype}")
    shape, rows = tuple(pse.shape), (sizes.seqlen_q, sizes.seqlen_k)
    accepted = [(sizes.batch, sizes.heads, *rows), (sizes.batch, 1, *rows), (1, sizes.heads, *rows)]
    if _is_one_of(shape, accepted):
        return pse
    compressed = (_COMPRESSED_PSE_ROWS, sizes.seqlen_k)
    is_compressed = _is_one_of(shape, [(sizes.batch, sizes.heads, *compressed), (1, sizes.heads, *compressed)])
    if not is_compressed or sizes.seqlen_q <= _COMPRESSED_PSE_ROWS or sizes.cumulative is not None:
        raise ValueError(
            f"pse: got shape {list(shape)}, accepted {accepted}, or the last {_COMPRESSED_PSE_ROWS} of more rows"
        )
    if pse.requires_grad and torch.is_grad_enabled():
        raise ValueError("pse: got the last 1024 rows with requires_grad, accepted without: this form has no gradient")
    return _all_rows_of(pse, sizes.seqlen_q)


def _all_rows_of(pse: torch.Tensor, seqlen_q: int) -> torch.Tensor:
    """bias(i, j) = pse[max(i - first, 0), j + max(first - i, 0)] with first = seqlen_q - 1024.

    Rows before the last 1024 are the first of these, moved to where the distance to the key is the same. What would be
    read past the last key belongs to keys after the query, which the lower triangle hides.
    """
    first = seqlen_q - _COMPRESSED_PSE_ROWS
    moved = torch.arange(first, 0, -1, device=pse.device)  # of the rows [0, first)
    columns = (torch.arange(pse.shape[3], device=pse.device) + moved[:, None]).clamp(max=pse.shape[3] - 1)
    return torch.cat([pse[:, :, 0, :][:, :, columns], pse], 2)
