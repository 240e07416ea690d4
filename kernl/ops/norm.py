"""LayerNorm over the last dimension, alone or fused with the residual addition in front of it.

    torch.ops.kernl.layer_norm(input, weight, bias, eps)                    -> output
    torch.ops.kernl.add_layer_norm(input, residual, weight, bias, eps)      -> output, sum
    torch.ops.kernl.layer_norm_of_sum(input, residual, weight, bias, eps)   -> output, when nothing else reads the sum

    sum = input + residual                            rounded to its dtype first
    output = (sum - mean) / sqrt(variance + eps) * weight + bias

The first is `torch.nn.functional.layer_norm` over one dimension; the other two are that of a plain sum, broadcasting
and type promotion included. Statistics are fp32 (float64 for float64). weight and bias may have another float type than
the input, which plain PyTorch refuses on a GPU. Leaving the sum out saves a quarter of the memory traffic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernl.kernels.norm import MAX_COLUMNS, MAX_ROWS, NormConfig, choose_config, launch_layer_norm
from kernl.ops.common import (
    Ahead,
    cast,
    define_op,
    empty,
    kernel_runs_on,
    materialized,
    may_prefetch,
    on_device_of,
    use_pdl,
)
from kernl.runtime.capability import capability_of


class AddLayerNorm(NamedTuple):
    """Result of `add_layer_norm`: the norm, and the sum it is taken of (the next residual in a pre-norm model)."""

    output: torch.Tensor
    sum: torch.Tensor


def layer_norm(
    input: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """LayerNorm over the last dimension.

    input: [..., N], any float dtype, any strides.
    weight, bias: [N] or None, any float dtype.
    eps: added to the variance.

    Returns [..., N], contiguous, in the dtype of input (float32 under `torch.autocast("cuda")`, as torch.layer_norm).
    Raises ValueError for shapes that do not fit and for dtypes that are not floating point.

    Layer Normalization, Ba, Kiros and Hinton, 2016 (arXiv:1607.06450).
    """
    _check(input, weight, bias)
    return torch.ops.kernl.layer_norm(input, weight, bias, eps)


def add_layer_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> AddLayerNorm:
    """LayerNorm of `input + residual` over the last dimension, and that sum.

    input, residual: broadcastable to one shape [..., N], same float dtype, any strides.
    weight, bias: [N] or None, any float dtype.
    eps: added to the variance.

    Returns (output, sum), both [..., N] and contiguous, in the dtype of input (the output is float32 under
    `torch.autocast("cuda")`). Raises ValueError for shapes that do not fit, for dtypes that are not floating point and
    for an input and a residual of different dtypes.
    """
    _check_residual(input, residual)
    _check(input, weight, bias, columns=max(input.shape[-1], residual.shape[-1]))
    return AddLayerNorm(*torch.ops.kernl.add_layer_norm(input, residual, weight, bias, eps))


def _check(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, columns: int | None = None
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


def _check_residual(input: torch.Tensor, residual: torch.Tensor) -> None:
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


def reference_layer_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`layer_norm` in plain PyTorch, for any float dtype and device."""
    columns = (input.shape[-1],)
    if all(tensor is None or tensor.dtype == input.dtype for tensor in (weight, bias)):
        return F.layer_norm(input, columns, weight, bias, eps).contiguous()
    # PyTorch mixes dtypes on some devices only.
    compute = _compute_dtype(input)
    output = F.layer_norm(input.to(compute), columns, cast(weight, compute), cast(bias, compute), eps)
    return output.to(input.dtype).contiguous()


def reference_add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_layer_norm` in plain PyTorch, for any float dtype and device."""
    total = (input + residual).contiguous()
    return reference_layer_norm(total, weight, bias, eps), total


def _compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _allocate(input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """An output, or the sum: contiguous, in the shape and dtype of the plain result."""
    if residual is None:
        return empty(input.shape, dtype=input.dtype, device=input.device)
    shape = torch.broadcast_shapes(input.shape, residual.shape)
    return empty(shape, dtype=torch.result_type(input, residual), device=input.device)


def _kernel_takes(shape: torch.Size, *tensors: torch.Tensor | None) -> bool:
    """Whether the kernel can give an output of this shape from these operands."""
    return (
        shape[-1] <= MAX_COLUMNS
        and math.prod(shape[:-1]) <= MAX_ROWS
        and all(tensor is None or kernel_runs_on(tensor, "norm") for tensor in tensors)
    )


def _launch(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    parameters = [tensor for tensor in (weight, bias) if tensor is not None]
    with on_device_of(output):
        launch_layer_norm(
            input.expand(output.shape),
            weight,
            bias,
            output,
            eps,
            residual=None if residual is None else residual.expand(output.shape),
            total=total,
            sm_count=capability_of(output.device).sm_count,
            use_pdl=use_pdl(output),
            weights_before_wait=all(may_prefetch(tensor) for tensor in parameters),
        )


def _kernels_ahead(
    input: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stores_total: bool,
) -> Iterator[Ahead]:
    """The kernels for few and for many rows, in eager code and in a captured graph, for rows at one stride.

    A residual that is broadcast over the leading dimension gives rows at two strides as well.
    """
    others = [tensor for tensor in (residual, weight, bias) if tensor is not None]
    if not _kernel_takes(input.shape, input, *others):
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
                    (*options, dtypes, columns % 16 == 0, columns == 1),
                    functools.partial(_run_ahead, input, residual, weight, bias, *options),
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
) -> None:
    columns = input.shape[-1]
    x = torch.zeros(2, 2, columns, dtype=input.dtype, device=input.device)
    addend = None
    if residual is not None:
        addend = torch.zeros(1 if two_strides else 2, 2, columns, dtype=residual.dtype, device=input.device)
        addend = addend.expand(x.shape)
    with on_device_of(x):
        launch_layer_norm(
            x,
            materialized(weight),
            materialized(bias),
            torch.empty_like(x),
            1e-5,
            residual=addend,
            total=torch.empty_like(x) if stores_total else None,
            use_pdl=use_pdl(x),
            weights_before_wait=before_wait,
            config=config,
        )


# Implementations, for the CPU and CUDA alike.


def _layer_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if not _kernel_takes(input.shape, input, weight, bias):
        return reference_layer_norm(input, weight, bias, eps)
    output = _allocate(input)
    _launch(input, None, weight, bias, output, None, eps)
    return output


def _add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not _kernel_takes(torch.broadcast_shapes(input.shape, residual.shape), input, residual, weight, bias):
        return reference_add_layer_norm(input, residual, weight, bias, eps)
    output, total = _allocate(input, residual), _allocate(input, residual)
    _launch(input, residual, weight, bias, output, total, eps)
    return output, total


def _layer_norm_of_sum(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if not _kernel_takes(torch.broadcast_shapes(input.shape, residual.shape), input, residual, weight, bias):
        return reference_add_layer_norm(input, residual, weight, bias, eps)[0]
    output = _allocate(input, residual)
    _launch(input, residual, weight, bias, output, None, eps)
    return output


# Gradients. With n = (x - mean) / deviation and g = grad * weight, both over one row of x:
#   d_x = (g - mean(g) - n * mean(g * n)) / deviation      d_weight = sum of grad * n      d_bias = sum of grad


def _norm_backward(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a norm by its input (in the compute dtype) and, where wanted, by weight and bias."""
    compute = _compute_dtype(x)
    x, grad = x.to(compute), grad.to(compute)
    centered = x - x.mean(-1, keepdim=True)
    inverse_deviation = (centered.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    normalized = centered * inverse_deviation
    scaled = grad if weight is None else grad * weight.to(compute)
    grad_x = inverse_deviation * (
        scaled - scaled.mean(-1, keepdim=True) - normalized * (scaled * normalized).mean(-1, keepdim=True)
    )
    weight_wanted, bias_wanted = wanted
    grad_weight = _sum_rows(grad * normalized).to(ctx.weight_dtype) if weight_wanted else None
    grad_bias = _sum_rows(grad).to(ctx.bias_dtype) if bias_wanted else None
    return grad_x, grad_weight, grad_bias


def _sum_rows(tensor: torch.Tensor) -> torch.Tensor:
    # An empty list of dimensions would sum over all of them.
    return tensor.sum(tuple(range(tensor.dim() - 1))) if tensor.dim() > 1 else tensor


def _remember(ctx: Any, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> None:
    ctx.eps = eps
    ctx.weight_dtype = None if weight is None else weight.dtype
    ctx.bias_dtype = None if bias is None else bias.dtype


def _layer_norm_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, bias, eps = inputs
    _remember(ctx, weight, bias, eps)
    ctx.save_for_backward(input, weight)


def _layer_norm_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    grad_input, grad_weight, grad_bias = _norm_backward(ctx, grad, input, weight, ctx.needs_input_grad[1:3])
    return grad_input.to(input.dtype), grad_weight, grad_bias, None


def _remember_sum(ctx: Any, input: torch.Tensor, residual: torch.Tensor) -> None:
    ctx.input_like = (input.shape, input.dtype)
    ctx.residual_like = (residual.shape, residual.dtype)


def _spread(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of a sum by its two operands: reduced over what was broadcast."""
    (input_shape, input_dtype), (residual_shape, residual_dtype) = ctx.input_like, ctx.residual_like
    return (
        grad_total.sum_to_size(input_shape).to(input_dtype),
        grad_total.sum_to_size(residual_shape).to(residual_dtype),
    )


def _add_layer_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    input, residual, weight, bias, eps = inputs
    _remember(ctx, weight, bias, eps)
    _remember_sum(ctx, input, residual)
    ctx.save_for_backward(output[1], weight)


def _add_layer_norm_backward(
    ctx: Any, grad_output: torch.Tensor, grad_sum: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    grad_total, grad_weight, grad_bias = _norm_backward(ctx, grad_output, total, weight, ctx.needs_input_grad[2:4])
    return *_spread(ctx, grad_total + grad_sum), grad_weight, grad_bias, None


def _layer_norm_of_sum_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, residual, weight, bias, eps = inputs
    _remember(ctx, weight, bias, eps)
    _remember_sum(ctx, input, residual)
    ctx.save_for_backward(input, residual, weight)


def _layer_norm_of_sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, residual, weight = ctx.saved_tensors
    total = input + residual
    grad_total, grad_weight, grad_bias = _norm_backward(ctx, grad, total, weight, ctx.needs_input_grad[2:4])
    return *_spread(ctx, grad_total), grad_weight, grad_bias, None


# Autocast. torch.layer_norm runs in float32 under autocast on CUDA and is left alone on the CPU; a sum is left alone.


def _layer_norm_autocast(
    dtype: torch.dtype,
    device_type: str,
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    if device_type == "cuda":
        input, weight, bias = cast(input, torch.float32), cast(weight, torch.float32), cast(bias, torch.float32)
    return torch.ops.kernl.layer_norm(input, weight, bias, eps)


def _add_layer_norm_autocast(
    dtype: torch.dtype,
    device_type: str,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    if device_type != "cuda" or torch.result_type(input, residual).itemsize >= 4:
        return torch.ops.kernl.add_layer_norm(input, residual, weight, bias, eps)
    # The sum stays in half precision, its norm does not.
    total = (input + residual).contiguous()
    return torch.ops.kernl.layer_norm(total.to(torch.float32), weight, bias, eps), total


def _layer_norm_of_sum_autocast(
    dtype: torch.dtype,
    device_type: str,
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    if device_type != "cuda" or torch.result_type(input, residual).itemsize >= 4:
        return torch.ops.kernl.layer_norm_of_sum(input, residual, weight, bias, eps)
    return torch.ops.kernl.layer_norm((input + residual).to(torch.float32), weight, bias, eps)


define_op(
    "layer_norm(Tensor input, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    cpu=_layer_norm,
    fake=lambda input, weight, bias, eps: _allocate(input),
    autograd=(_layer_norm_context, _layer_norm_backward),
    autocast=_layer_norm_autocast,
    ahead=lambda input, weight, bias, eps: _kernels_ahead(input, None, weight, bias, False),
)
define_op(
    "add_layer_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor output, Tensor sum)",
    cpu=_add_layer_norm,
    fake=lambda input, residual, weight, bias, eps: (_allocate(input, residual), _allocate(input, residual)),
    autograd=(_add_layer_norm_context, _add_layer_norm_backward),
    autocast=_add_layer_norm_autocast,
    ahead=lambda input, residual, weight, bias, eps: _kernels_ahead(input, residual, weight, bias, True),
)
define_op(
    "layer_norm_of_sum(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    cpu=_layer_norm_of_sum,
    fake=lambda input, residual, weight, bias, eps: _allocate(input, residual),
    autograd=(_layer_norm_of_sum_context, _layer_norm_of_sum_backward),
    autocast=_layer_norm_of_sum_autocast,
    ahead=lambda input, residual, weight, bias, eps: _kernels_ahead(input, residual, weight, bias, False),
)
