"""Bad arguments of `kernl.ops.attention`: errors that name the argument, what came and what is accepted."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernl.kernels.attention import FARTHEST
from kernl.ops.relative_position import RelativePositionBias


def check_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, accepted [batch, heads, seqlen, head_dim]")
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name}: got {tensor.dtype}, accepted float16, bfloat16, float32 or float64; convert with .to(...)"
            )
        if tensor.device != query.device:
            raise ValueError(f"{name}: got device {tensor.device}, accepted query's, {query.device}")
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise ValueError(f"{name}: got {tensor.dtype}, accepted query's type, {query.dtype}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: got batch {tensor.shape[0]}, accepted query's, {query.shape[0]}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key: got head_dim {key.shape[3]}, accepted query's, {query.shape[3]}")
    if query.shape[3] < 1 or value.shape[3] < 1:
        raise ValueError(f"head_dim: got {query.shape[3]} and value's {value.shape[3]}, accepted 1 or more")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value: got {value.shape[1]} heads and {value.shape[2]} tokens, accepted key's, {key.shape[1]} and "
            f"{key.shape[2]}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"key: got {key.shape[1]} heads, accepted a number that divides query's heads, {query.shape[1]}"
        )


def check_masks(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, key_padding: torch.Tensor | None
) -> None:
    batch, heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask: got {attn_mask.dtype}, accepted bool (True = attend) or floating point (added)"
            )
        if attn_mask.device != query.device:
            raise ValueError(f"attn_mask: got device {attn_mask.device}, accepted query's, {query.device}")
        full = (batch, heads, seqlen_q, seqlen_k)
        fits = attn_mask.dim() <= 4 and all(
            given == 1 or given == wanted for given, wanted in zip(reversed(attn_mask.shape), reversed(full))
        )
        if not fits:
            raise ValueError(
                f"attn_mask: got shape {list(attn_mask.shape)}, accepted one that broadcasts to {list(full)} "
                "([batch, heads, seqlen_q, seqlen_k])"
            )
    if key_padding is not None:
        if key_padding.device != query.device:
            raise ValueError(f"key_padding: got device {key_padding.device}, accepted query's, {query.device}")
        wanted = {torch.bool: [batch, seqlen_k], torch.int32: [batch]}.get(key_padding.dtype)
        if wanted is None or list(key_padding.shape) != wanted:
            raise ValueError(
                f"key_padding: got {key_padding.dtype} of shape {list(key_padding.shape)}, accepted bool "
                f"[{batch}, {seqlen_k}] (True = visible) or int32 lengths [{batch}]"
            )


def check_positions(
    query: torch.Tensor, window: Any, q_offset: Any, alibi_slopes: Any, relative_position_bias: Any, softcap: Any
) -> None:
    batch, heads = query.shape[:2]
    if not isinstance(window, (tuple, list)):
        raise TypeError(f"window: got {window!r}, accepted (left, right), -1 for no bound")
    if len(window) != 2 or not all(_is_whole(side) and side >= -1 for side in window):
        raise ValueError(
            f"window: got {tuple(window)}, accepted (left, right), two numbers from 0 up or -1 for no bound"
        )
    if isinstance(q_offset, torch.Tensor):
        if q_offset.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"q_offset: got {q_offset.dtype}, accepted an int, or a tensor of int32 or int64")
        if q_offset.numel() != 1:
            raise ValueError(f"q_offset: got shape {list(q_offset.shape)}, accepted an int, or a tensor of one element")
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
