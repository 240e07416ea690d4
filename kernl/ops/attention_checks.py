"""Bad arguments of `kernl.ops.attention`: errors that name the argument, what came and what is accepted."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernl.kernels.attention_common import FARTHEST
from kernl.ops.relative_position import RelativePositionBias

_WIDEST = 512


def check_kind(name: str, tensor: torch.Tensor, query: torch.Tensor, layout: str) -> None:
    """What query, key and value of any attention must be, whatever their sizes. layout: the four dimensions' names."""
    if tensor.dim() != 4:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, accepted {layout}")
    if not tensor.is_floating_point():
        raise TypeError(
            f"{name}: got {tensor.dtype}, accepted float16, bfloat16, float32 or float64; convert with .to(...)"
        )
    if tensor.device != query.device:
        raise ValueError(f"{name}: got device {tensor.device}, accepted query's, {query.device}")
    if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
        raise ValueError(f"{name}: got {tensor.dtype}, accepted query's type, {query.dtype}")


def check_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        check_kind(name, tensor, query, "[batch, heads, seqlen, head_dim]")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: got batch {tensor.shape[0]}, accepted query's, {query.shape[0]}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key: got head_dim {key.shape[3]}, accepted query's, {query.shape[3]}")
    if not (1 <= query.shape[3] <= _WIDEST and 1 <= value.shape[3] <= _WIDEST):
        raise ValueError(f"head_dim: got {query.shape[3]} and value's {value.shape[3]}, accepted 1 to {_WIDEST}")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value: got {value.shape[1]} heads and {value.shape[2]} tokens, accepted key's, {key.shape[1]} and "
            f"{key.shape[2]}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"key: got {key.shape[1]} heads, accepted a number that divides query's heads, {query.shape[1]}"
        )


def check_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    key_padding: torch.Tensor | None,
) -> tuple[int, int, int]:
    """What stands for batch, seqlen_q and seqlen_k in masks: with packed lengths sequences and the longest of them."""
    if cu_seqlens_q is None and cu_seqlens_k is None:
        for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
            if longest is not None:
                raise ValueError(f"{name}: got {longest}, accepted together with cu_seqlens_q and cu_seqlens_k only")
        return query.shape[0], query.shape[2], key.shape[2]
    given = {"cu_seqlens_q": (cu_seqlens_q, query), "cu_seqlens_k": (cu_seqlens_k, key)}
    for name, (lengths, tensor) in given.items():
        if not isinstance(lengths, torch.Tensor) or lengths.dtype not in (torch.int32, torch.int64):
            kind = getattr(lengths, "dtype", type(lengths).__name__)
            raise ValueError(f"{name}: got {kind}, accepted int32 or int64 [sequences + 1], for queries and keys both")
        if lengths.dim() != 1 or lengths.shape[0] < 2:
            raise ValueError(f"{name}: got shape {list(lengths.shape)}, accepted [sequences + 1]")
        if lengths.device != query.device:
            raise ValueError(f"{name}: got device {lengths.device}, accepted query's, {query.device}")
        if tensor.shape[0] != 1:
            raise ValueError(f"{name}: got a batch of {tensor.shape[0]}, accepted one row that holds all sequences")
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            values = lengths.tolist()
            if values[0] != 0 or values[-1] != tensor.shape[2] or sorted(values) != values:
                raise ValueError(
                    f"{name}: got {values}, accepted numbers that never fall, from 0 to the tokens there are, "
                    f"{tensor.shape[2]}"
                )
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k: got {cu_seqlens_k.shape[0]} numbers, accepted as many as in cu_seqlens_q, "
            f"{cu_seqlens_q.shape[0]}"
        )
    if key_padding is not None:
        raise ValueError("key_padding: got one beside cu_seqlens_k, accepted none: the lengths say what is there")
    longest_q = int(cu_seqlens_q.diff().max()) if max_seqlen_q is None else max_seqlen_q
    longest_k = int(cu_seqlens_k.diff().max()) if max_seqlen_k is None else max_seqlen_k
    return cu_seqlens_q.shape[0] - 1, longest_q, longest_k


def check_masks(
    query: torch.Tensor,
    shape: tuple[int, int, int, int],
    attn_mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    mask_hides: bool,
    bias_before_scale: bool,
    softcap: float | None,
) -> None:
    """shape: [batch, heads, seqlen_q, seqlen_k], what masks broadcast to."""
    batch, _, _, seqlen_k = shape
    if attn_mask is not None:
        if mask_hides and attn_mask.dtype not in (torch.bool, torch.uint8):
            raise TypeError(f"attn_mask: got {attn_mask.dtype}, accepted bool or uint8 with mask_hides")
        if not mask_hides and attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask: got {attn_mask.dtype}, accepted bool (True = attend) or floating point (added)"
            )
        _check_mask_shape("attn_mask", attn_mask, query, shape)
    if bias is not None:
        if not bias.is_floating_point():
            raise TypeError(f"bias: got {bias.dtype}, accepted floating point")
        if attn_mask is not None and attn_mask.is_floating_point():
            raise ValueError("bias: got one beside a float attn_mask, accepted beside a bool one: add the two")
        _check_mask_shape("bias", bias, query, shape)
    if bias_before_scale and softcap:
        raise ValueError(f"softcap: got {softcap} with bias_before_scale, accepted one or the other")
    if key_padding is not None:
        if key_padding.device != query.device:
            raise ValueError(f"key_padding: got device {key_padding.device}, accepted query's, {query.device}")
        wanted = {torch.bool: [batch, seqlen_k], torch.int32: [batch]}.get(key_padding.dtype)
        if wanted is None or list(key_padding.shape) != wanted:
            raise ValueError(
                f"key_padding: got {key_padding.dtype} of shape {list(key_padding.shape)}, accepted bool "
                f"[{batch}, {seqlen_k}] (True = visible) or int32 lengths [{batch}]"
            )


def _check_mask_shape(name: str, mask: torch.Tensor, query: torch.Tensor, shape: tuple[int, int, int, int]) -> None:
    if mask.device != query.device:
        raise ValueError(f"{name}: got device {mask.device}, accepted query's, {query.device}")
    fits = mask.dim() <= 4 and all(
        given == 1 or given == wanted for given, wanted in zip(reversed(mask.shape), reversed(shape))
    )
    if not fits:
        raise ValueError(
            f"{name}: got shape {list(mask.shape)}, accepted one that broadcasts to {list(shape)} "
            "([batch, heads, seqlen_q, seqlen_k])"
        )


def check_dropout(query: torch.Tensor, dropout_p: Any, seed: Any, offset: Any) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, (int, float)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: got {dropout_p!r}, accepted a number from 0 to less than 1")
    for name, given in (("seed", seed), ("offset", offset)):
        if given is None or _is_whole(given):
            continue
        if not isinstance(given, torch.Tensor) or given.dtype != torch.int64 or given.numel() != 1:
            kind = f"{given.dtype} of shape {list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
            raise ValueError(f"{name}: got {kind}, accepted an int, or an int64 tensor of one element")
        if given.device != query.device:
            raise ValueError(f"{name}: got device {given.device}, accepted query's, {query.device}")
    if offset is not None and seed is None:
        raise ValueError(f"offset: got {offset} without a seed, accepted together with one")


def check_positions(
    query: torch.Tensor,
    batch: int,
    window: Any,
    q_offset: Any,
    prefix: Any,
    alibi_slopes: Any,
    relative_position_bias: Any,
    softcap: Any,
) -> None:
    heads = query.shape[1]
    if prefix is not None:
        if not isinstance(prefix, torch.Tensor) or prefix.dtype not in (torch.int32, torch.int64):
            given = getattr(prefix, "dtype", type(prefix).__name__)
            raise TypeError(f"prefix: got {given}, accepted int32 or int64 [{batch}]")
        if tuple(prefix.shape) != (batch,):
            raise ValueError(f"prefix: got shape {list(prefix.shape)}, accepted [{batch}]")
        if prefix.device != query.device:
            raise ValueError(f"prefix: got device {prefix.device}, accepted query's, {query.device}")
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: got {window!r}, accepted (left, right), -1 for no bound")
    if len(window) != 2 or not all(_is_whole(side) and side >= -1 for side in window):
        raise ValueError(
            f"window: got {tuple(window)}, accepted (left, right), two numbers from 0 up or -1 for no bound"
        )
    if isinstance(q_offset, torch.Tensor):
        if q_offset.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"q_offset: got {q_offset.dtype}, accepted an int, or a tensor of int32 or int64")
        if q_offset.numel() != 1 and tuple(q_offset.shape) != (batch,):
            raise ValueError(
                f"q_offset: got shape {list(q_offset.shape)}, accepted an int, or a tensor of one element or [{batch}]"
            )
        if q_offset.device != query.device:
            raise ValueError(f"q_offset: got device {q_offset.device}, accepted query's, {query.device}")
    elif not _is_whole(q_offset):
        raise TypeError(f"q_offset: got {q_offset!r}, accepted an int, or a tensor of one integer")
    elif abs(q_offset) > FARTHEST.value:
        raise ValueError(f"q_offset: got {q_offset}, accepted numbers from {-FARTHEST.value} to {FARTHEST.value}")
    if alibi_slopes is not None:
        if not isinstance(alibi_slopes, torch.Tensor) or alibi_slopes.dtype not in (torch.float32, torch.float64):
            given = getattr(alibi_slopes, "dtype", type(alibi_slopes).__name__)
            raise TypeError(f"alibi_slopes: got {given}, accepted float32 [{heads}] or [{batch}, {heads}]")
        if tuple(alibi_slopes.shape) not in ((heads,), (batch, heads)):
            raise ValueError(
                f"alibi_slopes: got shape {list(alibi_slopes.shape)}, accepted [{heads}] or [{batch}, {heads}]"
            )
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "alibi_slopes: got a tensor that requires a gradient, accepted one without: call .detach()"
            )
        if alibi_slopes.device != query.device:
            raise ValueError(f"alibi_slopes: got device {alibi_slopes.device}, accepted query's, {query.device}")
    if relative_position_bias is not None:
        if not isinstance(relative_position_bias, RelativePositionBias):
            given = type(relative_position_bias).__name__
            raise TypeError(f"relative_position_bias: got {given}, accepted a kernl.ops.RelativePositionBias")
        table = relative_position_bias.table
        if table.shape[1] != heads:
            raise ValueError(
                f"relative_position_bias: got a table for {table.shape[1]} heads, accepted one for {heads}"
            )
        if table.device != query.device:
            raise ValueError(f"relative_position_bias: got device {table.device}, accepted query's, {query.device}")
    if softcap is not None and not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap: got {softcap!r}, accepted a positive number, or None or 0 for none")
    if softcap is not None and not (math.isfinite(softcap) and softcap >= 0):
        raise ValueError(f"softcap: got {softcap}, accepted a positive number, or None or 0 for none")


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
