"""What LayerNorm and RMSNorm share: checks of arguments, allocation, the launch, and gradients of sums."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch

from kernl.kernels.norm import MAX_COLUMNS, MAX_ROWS, NormConfig, choose_config, launch_norm
from kernl.ops.common import Ahead, empty, kernel_runs_on, materialized, may_prefetch, on_device_of, use_pdl
from kernl.runtime.capability import capability_of


def check_operands(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None = None, columns: int | None = None
) -> None:
    if input.dim() == 0:
        raise ValueError("input has no dimension; a norm needs [..., N]")
    if not input.is_floating_point():
        raise ValueError(f"input is {input.dtype}; accepted: floating point")
    columns = input.shape[-1] if columns is None else columns
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dim() != 1 or tensor.shape[0] != columns:
            raise ValueError(f"{name} has shape {list(tensor.shape)}; accepted: [{columns}], the last size of input")
        if not tensor.is_floating_point():
            raise ValueError(f"{name} is {tensor.dtype}; accepted: floating point")


def check_residual(input: torch.Tensor, residual: torch.Tensor) -> None:
    if input.dtype != residual.dtype:
        raise ValueError(f"residual is {residual.dtype} and input {input.dtype}; accepted: one dtype for both")
    if input.dim() == 0 or residual.dim() == 0:
        raise ValueError("input and residual need at least one dimension each: [..., N]")
    try:
        torch.broadcast_shapes(input.shape, residual.shape)
    except RuntimeError:
        raise ValueError(
            f"residual has shape {list(residual.shape)}; accepted: one that broadcasts with input's {list(input.shape)}"
        ) from None


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def allocate(
    input: torch.Tensor, residual: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An output, or the sum: contiguous, in the shape and (unless another is given) the dtype of the plain result."""
    if residual is None:
        return empty(input.shape, dtype=dtype or input.dtype, device=input.device)
    shape = torch.broadcast_shapes(input.shape, residual.shape)
    return empty(shape, dtype=dtype or torch.result_type(input, residual), device=input.device)


def kernel_takes(shape: torch.Size, *tensors: torch.Tensor | None) -> bool:
    """Whether the kernel can give an output of this shape from these operands (and, where given, this output).

    A number as a residual is promoted by other rules than the kernel's.
    """
    return (
        shape[-1] <= MAX_COLUMNS
        and math.prod(shape[:-1]) <= MAX_ROWS
        and all(tensor is None or (tensor.dim() > 0 and kernel_runs_on(tensor, "norm")) for tensor in tensors)
    )


def launch(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    *,
    rms: bool = False,
    weight_offset: float = 0.0,
) -> None:
    """`launch_norm` with what it asks about the device and the moment, operands broadcast to the output's shape."""
    parameters = [tensor for tensor in (weight, bias) if tensor is not None]
    with on_device_of(output):
        launch_norm(
            input.expand(output.shape),
            weight,
            bias,
            output,
            eps,
            residual=None if residual is None else residual.expand(output.shape),
            total=total,
            rms=rms,
            weight_offset=weight_offset,
            sm_count=capability_of(output.device).sm_count,
            use_pdl=use_pdl(output),
            weights_before_wait=all(may_prefetch(tensor) for tensor in parameters),
        )


def kernels_ahead(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stores_total: bool,
    *,
    rms: bool = False,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Iterator[Ahead]:
    """The kernels for few and for many rows, in eager code and in a captured graph, for rows at one stride.

    A residual that is broadcast over the leading dimension gives rows at two strides as well. dtype: of the output,
    when it is not that of the input or the sum.
    """
    others = [tensor for tensor in (residual, weight, bias) if tensor is not None]
    if not kernel_takes(input.shape, input, *others):
        return
    columns = input.shape[-1]
    sm_count = capability_of(input.device).sm_count
    parameters = all(isinstance(tensor, torch.nn.Parameter) for tensor in (weight, bias) if tensor is not None)
    broadcast = residual is not None and residual.shape != input.shape
    for config in dict.fromkeys(choose_config(rows, columns, sm_count) for rows in (1, MAX_ROWS)):
        for before_wait in (False, True) if parameters and config.block_m else (False,):
            for two_strides in (False, True) if broadcast else (False,):
                options = (config, before_wait, two_strides, stores_total)
                dtypes = tuple(None if tensor is None else tensor.dtype for tensor in (input, residual, weight, bias))
                yield (
                    (*options, rms, weight_offset, dtype, dtypes, columns % 16 == 0, columns == 1),
                    functools.partial(_run_ahead, input, residual, weight, bias, *options, rms, weight_offset, dtype),
                )


def _run_ahead(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    config: NormConfig,
    before_wait: bool,
    two_strides: bool,
    stores_total: bool,
    rms: bool,
    weight_offset: float,
    dtype: torch.dtype | None,
) -> None:
    columns = input.shape[-1]
    x = torch.zeros(2, 2, columns, dtype=input.dtype, device=input.device)
    addend = None
    if residual is not None:
        addend = torch.zeros(1 if two_strides else 2, 2, columns, dtype=residual.dtype, device=input.device)
        addend = addend.expand(x.shape)
    sum_dtype = x.dtype if addend is None else torch.result_type(x, addend)
    with on_device_of(x):
        launch_norm(
            x,
            materialized(weight),
            materialized(bias),
            torch.empty_like(x, dtype=dtype or sum_dtype),
            1e-5,
            residual=addend,
            total=torch.empty_like(x, dtype=sum_dtype) if stores_total else None,
            rms=rms,
            weight_offset=weight_offset,
            use_pdl=use_pdl(x),
            weights_before_wait=before_wait,
            config=config,
        )


def sum_rows(tensor: torch.Tensor) -> torch.Tensor:
    # An empty list of dimensions would sum over all of them.
    return tensor.sum(tuple(range(tensor.dim() - 1))) if tensor.dim() > 1 else tensor


def remember_sum(ctx: Any, input: torch.Tensor, residual: torch.Tensor) -> None:
    ctx.input_like = (input.shape, input.dtype)
    ctx.residual_like = (residual.shape, residual.dtype)


def spread(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a sum by its two operands: reduced over what was broadcast."""
    (input_shape, input_dtype), (residual_shape, residual_dtype) = ctx.input_like, ctx.residual_like
    return (
        grad_total.sum_to_size(input_shape).to(input_dtype),
        grad_total.sum_to_size(residual_shape).to(residual_dtype),
    )
