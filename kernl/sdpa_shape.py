"""The shape of scaled_dot_product_attention, found without asking whether the batch is 1.

While TorchDynamo traces, PyTorch before 2.13 takes this function apart to find the shape of its result. On the way it
asks whether a mask has to be expanded along the batch, and the answer becomes a guard: batch 1 and larger ones then get
a graph each, and the second costs seconds. Within `sdpa_of_any_batch()` the shape is read off the operands instead, in
this thread and only where it is beyond doubt; everything else, other tracers included, gets PyTorch's own answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

_sdpa: Any = torch.ops.aten.scaled_dot_product_attention.default
_key = DispatchKey.CompositeImplicitAutograd
_is_on: ContextVar[bool] = ContextVar("kernl_sdpa_of_any_batch", default=False)


@contextlib.contextmanager
def sdpa_of_any_batch(is_on: bool = True) -> Iterator[None]:
    """While it lasts, tracing scaled_dot_product_attention in this thread adds no guard on the batch. False: it may."""
    if is_on and _key not in _sdpa.py_kernels:
        _sdpa.py_impl(_key)(_scaled_dot_product_attention)
    token = _is_on.set(is_on)
    try:
        yield
    finally:
        _is_on.reset(token)


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    if (
        not _is_on.get()
        or get_proxy_mode() is not None
        or not _shape_is_known(query, key, value)
        or (attn_mask is not None and (is_causal or not _mask_fits(attn_mask, query, key)))
    ):
        return _sdpa._op_dk(_key, query, key, value, attn_mask, dropout_p, is_causal, **options)
    batch, heads, seqlen, head_dim = query.shape
    # Dense as [batch, seqlen, heads, head_dim]: PyTorch's fused kernels and kernl's write it like that.
    return query.new_empty(batch, seqlen, heads, head_dim).transpose(1, 2)


def _shape_is_known(*operands: torch.Tensor) -> bool:
    """Whether these are [batch, heads, seqlen, dim] of one batch, dim and type, and nobody records gradients."""
    if not all(type(tensor) is FakeTensor and tensor.dim() == 4 for tensor in operands):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        return False
    query, key, value = operands
    return statically_known_true(key.shape[2] == value.shape[2]) and all(
        tensor.dtype == query.dtype
        and tensor.device == query.device
        and statically_known_true(tensor.shape[0] == query.shape[0])
        and statically_known_true(tensor.shape[3] == query.shape[3])
        and _divides(tensor.shape[1], query.shape[1])
        for tensor in (key, value)
    )


def _mask_fits(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a mask broadcasts to the scores. Its sizes are 1, or made those of the scores by a guard."""
    if type(mask) is not FakeTensor or mask.dtype not in (torch.bool, query.dtype) or not 2 <= mask.dim() <= 4:
        return False
    if mask.device != query.device or (torch.is_grad_enabled() and mask.requires_grad):
        return False
    scores = (*query.shape[:3], key.shape[2])
    return all(
        (isinstance(size, int) and size == 1) or bool(size == wanted)
        for size, wanted in zip(mask.shape, scores[4 - mask.dim() :])
    )


def _divides(heads: int | torch.SymInt, all_heads: int | torch.SymInt) -> bool:
    """As many heads, or groups of them (`enable_gqa`); a single one may also be broadcast."""
    return isinstance(heads, int) and isinstance(all_heads, int) and heads > 0 and all_heads % heads == 0
