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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *others: Any, **options: Any
) -> torch.Tensor:
    if not _is_on.get() or get_proxy_mode() is not None or not _shape_is_known(query, key, value):
        return _sdpa._op_dk(_key, query, key, value, *others, **options)
    batch, heads, seqlen, _ = query.shape
    # Dense as [batch, seqlen, heads, dim]: PyTorch's fused kernels and kernl's write it like that.
    return query.new_empty(batch, seqlen, heads, value.shape[3]).transpose(1, 2)


def _shape_is_known(*operands: torch.Tensor) -> bool:
    """Whether these are [batch, heads, seqlen, dim] of one batch and type, and nobody records gradients."""
    if not all(type(tensor) is FakeTensor and tensor.dim() == 4 for tensor in operands):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in operands):
        return False
    query = operands[0]
    return all(
        tensor.dtype == query.dtype
        and tensor.device == query.device
        and statically_known_true(tensor.shape[0] == query.shape[0])
        and _divides(tensor.shape[1], query.shape[1])
        for tensor in operands[1:]
    )


def _divides(heads: int | torch.SymInt, all_heads: int | torch.SymInt) -> bool:
    """As many heads, or groups of them (`enable_gqa`); a single one may also be broadcast."""
    return isinstance(heads, int) and isinstance(all_heads, int) and heads > 0 and all_heads % heads == 0
