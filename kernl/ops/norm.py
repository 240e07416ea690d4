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

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernl.ops.common import cast, define_op
from kernl.ops.norm_common import (
    allocate,
    check_operands,
    check_residual,
    compute_dtype,
    kernel_takes,
    kernels_ahead,
    launch,
    remember_sum,
    spread,
    sum_rows,
)
from kernl.ops.transforms import by_rows


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
    check_operands(input, weight, bias)
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
    check_residual(input, residual)
    check_operands(input, weight, bias, columns=max(input.shape[-1], residual.shape[-1]))
    return AddLayerNorm(*torch.ops.kernl.add_layer_norm(input, residual, weight, bias, eps))


def reference_layer_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """`layer_norm` in plain PyTorch, for any float dtype and device."""
    columns = (input.shape[-1],)
    if all(tensor is None or tensor.dtype == input.dtype for tensor in (weight, bias)):
        return F.layer_norm(input, columns, weight, bias, eps).contiguous()
    # PyTorch mixes dtypes on some devices only.
    compute = compute_dtype(input)
    output = F.layer_norm(input.to(compute), columns, cast(weight, compute), cast(bias, compute), eps)
    return output.to(input.dtype).contiguous()


def reference_add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_layer_norm` in plain PyTorch, for any float dtype and device."""
    total = (input + residual).contiguous()
    return reference_layer_norm(total, weight, bias, eps), total


# Implementations, for the CPU and CUDA alike.


def _layer_norm(
    input: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if not kernel_takes(input.shape, input, weight, bias):
        return reference_layer_norm(input, weight, bias, eps)
    output = allocate(input)
    launch(input, None, weight, bias, output, None, eps)
    return output


def _add_layer_norm(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    if not kernel_takes(torch.broadcast_shapes(input.shape, residual.shape), input, residual, weight, bias):
        return reference_add_layer_norm(input, residual, weight, bias, eps)
    output, total = allocate(input, residual), allocate(input, residual)
    launch(input, residual, weight, bias, output, total, eps)
    return output, total


def _layer_norm_of_sum(
    input: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    if not kernel_takes(torch.broadcast_shapes(input.shape, residual.shape), input, residual, weight, bias):
        return reference_add_layer_norm(input, residual, weight, bias, eps)[0]
    output = allocate(input, residual)
    launch(input, residual, weight, bias, output, None, eps)
    return output


# Gradients. With n = (x - mean) / deviation and g = grad * weight, both over one row of x:
#   d_x = (g - mean(g) - n * mean(g * n)) / deviation      d_weight = sum of grad * n      d_bias = sum of grad


def _norm_backward(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, wanted: tuple[bool, bool]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of a norm by its input (in the compute dtype) and, where wanted, by weight and bias."""
    compute = compute_dtype(x)
    x, grad = x.to(compute), grad.to(compute)
    centered = x - x.mean(-1, keepdim=True)
    inverse_deviation = (centered.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    normalized = centered * inverse_deviation
    scaled = grad if weight is None else grad * weight.to(compute)
    grad_x = inverse_deviation * (
        scaled - scaled.mean(-1, keepdim=True) - normalized * (scaled * normalized).mean(-1, keepdim=True)
    )
    weight_wanted, bias_wanted = wanted
    grad_weight = sum_rows(grad * normalized).to(ctx.weight_dtype) if weight_wanted else None
    grad_bias = sum_rows(grad).to(ctx.bias_dtype) if bias_wanted else None
    return grad_x, grad_weight, grad_bias


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


def _add_layer_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    input, residual, weight, bias, eps = inputs
    _remember(ctx, weight, bias, eps)
    remember_sum(ctx, input, residual)
    ctx.save_for_backward(output[1], weight)


def _add_layer_norm_backward(
    ctx: Any, grad_output: torch.Tensor, grad_sum: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    grad_total, grad_weight, grad_bias = _norm_backward(ctx, grad_output, total, weight, ctx.needs_input_grad[2:4])
    return *spread(ctx, grad_total + grad_sum), grad_weight, grad_bias, None


def _layer_norm_of_sum_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, residual, weight, bias, eps = inputs
    _remember(ctx, weight, bias, eps)
    remember_sum(ctx, input, residual)
    ctx.save_for_backward(input, residual, weight)


def _layer_norm_of_sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, residual, weight = ctx.saved_tensors
    total = input + residual
    grad_total, grad_weight, grad_bias = _norm_backward(ctx, grad, total, weight, ctx.needs_input_grad[2:4])
    return *spread(ctx, grad_total), grad_weight, grad_bias, None


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
    fake=lambda input, weight, bias, eps: allocate(input),
    autograd=(_layer_norm_context, _layer_norm_backward),
    vmap=by_rows(),
    autocast=_layer_norm_autocast,
    ahead=lambda input, weight, bias, eps: kernels_ahead(input, None, weight, bias, False),
)
define_op(
    "add_layer_norm(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
    "-> (Tensor output, Tensor sum)",
    cpu=_add_layer_norm,
    fake=lambda input, residual, weight, bias, eps: (allocate(input, residual), allocate(input, residual)),
    autograd=(_add_layer_norm_context, _add_layer_norm_backward),
    vmap=by_rows(2),
    autocast=_add_layer_norm_autocast,
    ahead=lambda input, residual, weight, bias, eps: kernels_ahead(input, residual, weight, bias, True),
)
define_op(
    "layer_norm_of_sum(Tensor input, Tensor residual, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    cpu=_layer_norm_of_sum,
    fake=lambda input, residual, weight, bias, eps: allocate(input, residual),
    autograd=(_layer_norm_of_sum_context, _layer_norm_of_sum_backward),
    vmap=by_rows(2),
    autocast=_layer_norm_of_sum_autocast,
    ahead=lambda input, residual, weight, bias, eps: kernels_ahead(input, residual, weight, bias, False),
)
