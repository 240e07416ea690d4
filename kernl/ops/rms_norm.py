"""RMSNorm over the last dimension, alone or fused with the residual addition in front of it.

    torch.ops.kernl.rms_norm(input, weight, eps, weight_offset, dtype)                    -> output
    torch.ops.kernl.add_rms_norm(input, residual, weight, eps, weight_offset, dtype)      -> output, sum
    torch.ops.kernl.rms_norm_of_sum(input, residual, weight, eps, weight_offset, dtype)   -> output, when nothing else
                                                                                             reads the sum

    sum = input + residual                            rounded to its dtype first, broadcasting and promoted as plain
    output = sum / sqrt(mean(sum^2) + eps) * (weight_offset + weight), in `dtype`

Statistics and products are fp32 (float64 for a float64 sum) and the result is rounded once. The models differ in when
they round:

    T5                    statistics in fp32; normalised values rounded to the weight's dtype if that is 16 bits wide,
                          then multiplied by the weight. The result has the weight's dtype, or fp32
    Llama, Qwen, Mistral  statistics in fp32; normalised values rounded to the input's dtype, then multiplied by the
                          weight. The result has the dtype the two promote to
    Gemma                 statistics and product with (1 + weight) in fp32, rounded to the input's dtype: as here
    torch's rms_norm      the same without the one

So this is what Gemma and torch compute, and T5 and Llama less one rounding, that of the normalised values to 16 bits:
nearer to exact arithmetic, and from their results at most that rounding away. In fp32 nobody rounds in between.

Bytes moved, for M rows of N elements of s bytes: 2 M N s alone, 4 M N s with a residual, 3 M N s without its sum. One
kernel after the other, the formula moves 7 M N s in fp32 (square, mean, and two products; the rest is small) and
18 M N s in 16 bits, where two casts come in and what lies between them is fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kernl.ops.common import define_op
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


class AddRMSNorm(NamedTuple):
    """Result of `add_rms_norm`: the norm, and the sum it is taken of (the next residual)."""

    output: torch.Tensor
    sum: torch.Tensor


def rms_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dimension: input / sqrt(mean(input^2) + eps) * (weight_offset + weight).

    input: [..., N], any float dtype, any strides.
    weight: [N] or None, any float dtype. weight_offset: added to it (1 in Gemma).
    eps: added to the mean of the squares.
    dtype: of the result; that of input when left out. For what T5 and Llama return: `torch.result_type(weight, input)`,
        or for T5 with a 16-bit weight that weight's dtype.

    Returns [..., N], contiguous. `torch.autocast` changes nothing. Raises ValueError for shapes that do not fit and for
    dtypes that are not floating point.

    Root Mean Square Layer Normalization, Zhang and Sennrich, 2019 (arXiv:1910.07467).
    """
    check_operands(input, weight)
    return torch.ops.kernl.rms_norm(input, weight, eps, weight_offset, _result_dtype(input, dtype))


def add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> AddRMSNorm:
    """RMSNorm of `input + residual` over the last dimension, and that sum.

    input, residual: broadcastable to one shape [..., N], same float dtype, any strides.
    weight, weight_offset, eps, dtype: as in `rms_norm`.

    Returns (output, sum), both [..., N] and contiguous, the sum in the dtype of input. Raises ValueError for shapes
    that do not fit, for dtypes that are not floating point and for an input and a residual of different dtypes.
    """
    check_residual(input, residual)
    check_operands(input, weight, columns=max(input.shape[-1], residual.shape[-1]))
    dtype = _result_dtype(input, dtype)
    return AddRMSNorm(*torch.ops.kernl.add_rms_norm(input, residual, weight, eps, weight_offset, dtype))


def _result_dtype(input: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    if dtype is None:
        return input.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}; accepted: a floating-point torch.dtype, or None for input's")
    return dtype


def reference_rms_norm(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, dtype: torch.dtype
) -> torch.Tensor:
    """`rms_norm` in plain PyTorch, for any float dtype and device."""
    x = input.to(compute_dtype(input))
    output = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        output = output * (weight_offset + weight.to(x.dtype))
    return output.to(dtype).contiguous()


def reference_add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` in plain PyTorch, for any float dtype and device."""
    total = (input + residual).contiguous()
    return reference_rms_norm(total, weight, eps, weight_offset, dtype), total


# Implementations, for the CPU and CUDA alike.


def _rms_norm(
    input: torch.Tensor, weight: torch.Tensor | None, eps: float, weight_offset: float, dtype: torch.dtype
) -> torch.Tensor:
    output = allocate(input, dtype=dtype)
    if not kernel_takes(input.shape, input, weight, output):
        return reference_rms_norm(input, weight, eps, weight_offset, dtype)
    launch(input, None, weight, None, output, None, eps, rms=True, weight_offset=weight_offset)
    return output


def _add_rms_norm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, total = allocate(input, residual, dtype), allocate(input, residual)
    if not kernel_takes(output.shape, input, residual, weight, output):
        return reference_add_rms_norm(input, residual, weight, eps, weight_offset, dtype)
    launch(input, residual, weight, None, output, total, eps, rms=True, weight_offset=weight_offset)
    return output, total


def _rms_norm_of_sum(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    output = allocate(input, residual, dtype)
    if not kernel_takes(output.shape, input, residual, weight, output):
        return reference_add_rms_norm(input, residual, weight, eps, weight_offset, dtype)[0]
    launch(input, residual, weight, None, output, None, eps, rms=True, weight_offset=weight_offset)
    return output


# Gradients. With r = 1 / sqrt(mean(x^2) + eps), n = x r and g = grad * (weight_offset + weight), over one row of x:
#   d_x = (g - n * mean(g * n)) r      d_weight = sum of grad * n


def _norm_backward(
    ctx: Any, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, weight_wanted: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of a norm by its input (in the compute dtype) and, where wanted, by the weight."""
    x = x.to(compute_dtype(x))
    grad = grad.to(x.dtype)
    inverse_rms = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
    normalized = x * inverse_rms
    scaled = grad if weight is None else grad * (ctx.weight_offset + weight.to(x.dtype))
    grad_x = inverse_rms * (scaled - normalized * (scaled * normalized).mean(-1, keepdim=True))
    grad_weight = sum_rows(grad * normalized).to(ctx.weight_dtype) if weight_wanted else None
    return grad_x, grad_weight


def _remember(ctx: Any, weight: torch.Tensor | None, eps: float, weight_offset: float) -> None:
    ctx.eps, ctx.weight_offset = eps, weight_offset
    ctx.weight_dtype = None if weight is None else weight.dtype


def _rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, eps, weight_offset, _ = inputs
    _remember(ctx, weight, eps, weight_offset)
    ctx.save_for_backward(input, weight)


def _rms_norm_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    grad_input, grad_weight = _norm_backward(ctx, grad, input, weight, ctx.needs_input_grad[1])
    return grad_input.to(input.dtype), grad_weight, None, None, None


def _add_rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    input, residual, weight, eps, weight_offset, _ = inputs
    _remember(ctx, weight, eps, weight_offset)
    remember_sum(ctx, input, residual)
    ctx.save_for_backward(output[1], weight)


def _add_rms_norm_backward(
    ctx: Any, grad_output: torch.Tensor, grad_sum: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    total, weight = ctx.saved_tensors
    grad_total, grad_weight = _norm_backward(ctx, grad_output, total, weight, ctx.needs_input_grad[2])
    return *spread(ctx, grad_total + grad_sum), grad_weight, None, None, None


def _rms_norm_of_sum_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, residual, weight, eps, weight_offset, _ = inputs
    _remember(ctx, weight, eps, weight_offset)
    remember_sum(ctx, input, residual)
    ctx.save_for_backward(input, residual, weight)


def _rms_norm_of_sum_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, residual, weight = ctx.saved_tensors
    grad_total, grad_weight = _norm_backward(ctx, grad, input + residual, weight, ctx.needs_input_grad[2])
    return *spread(ctx, grad_total), grad_weight, None, None, None


# No autocast rule: the models compute RMSNorm from casts of their own, which autocast leaves as they are, and the dtype
# of the result is an argument.

define_op(
    "rms_norm(Tensor input, Tensor? weight, float eps, float weight_offset, ScalarType dtype) -> Tensor",
    cpu=_rms_norm,
    fake=lambda input, weight, eps, weight_offset, dtype: allocate(input, dtype=dtype),
    autograd=(_rms_norm_context, _rms_norm_backward),
    vmap=by_rows(),
    ahead=lambda input, weight, eps, weight_offset, dtype: kernels_ahead(
        input, None, weight, None, False, rms=True, weight_offset=weight_offset, dtype=dtype
    ),
)
define_op(
    "add_rms_norm(Tensor input, Tensor residual, Tensor? weight, float eps, float weight_offset, ScalarType dtype) "
    "-> (Tensor output, Tensor sum)",
    cpu=_add_rms_norm,
    fake=lambda input, residual, weight, eps, weight_offset, dtype: (
        allocate(input, residual, dtype),
        allocate(input, residual),
    ),
    autograd=(_add_rms_norm_context, _add_rms_norm_backward),
    vmap=by_rows(2),
    ahead=lambda input, residual, weight, eps, weight_offset, dtype: kernels_ahead(
        input, residual, weight, None, True, rms=True, weight_offset=weight_offset, dtype=dtype
    ),
)
define_op(
    "rms_norm_of_sum(Tensor input, Tensor residual, Tensor? weight, float eps, float weight_offset, ScalarType dtype) "
    "-> Tensor",
    cpu=_rms_norm_of_sum,
    fake=lambda input, residual, weight, eps, weight_offset, dtype: allocate(input, residual, dtype),
    autograd=(_rms_norm_of_sum_context, _rms_norm_of_sum_backward),
    vmap=by_rows(2),
    ahead=lambda input, residual, weight, eps, weight_offset, dtype: kernels_ahead(
        input, residual, weight, None, False, rms=True, weight_offset=weight_offset, dtype=dtype
    ),
)
