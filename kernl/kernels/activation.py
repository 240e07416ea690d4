r"""Activations for the epilogue of a matrix product, in fp32, cheap enough to hide behind it.

The exact GELU is x * Phi(x), with Phi the normal distribution function. libdevice's erf is tens of instructions, which
as an epilogue costs as much as a second kernel over the output. Here it is one ex2 and five multiply-adds:

    t = |x|,  tail = Phi(-t) = 2^P(t),  gelu(x) = x * (tail if x < 0 else 1 - tail)

log2 Phi(-t) is a smooth function close to a parabola, so a polynomial P of degree 5 suffices, and since it is the
logarithm that is approximated the *relative* error stays small in the negative tail, where 1 + erf(x / sqrt 2)
cancels. P minimises the largest error of gelu(x) in units of the last place of fp16 (denormals included) over t in
[0, 6]; it was found by Lawson's iteratively re-weighted least squares against 40-digit values. The largest error
before the final rounding is 0.146 ulp of fp16, also when the output is bf16. Beyond t = 6, where |gelu(x)| < 2^-27 is
zero in fp16, P keeps falling, so nothing has to be clamped; +inf and NaN come out as they went in and -inf gives NaN,
as in PyTorch.

fp32 outputs take the textbook formula with erf: there the matrix product is far more expensive than its epilogue.
"""

from __future__ import annotations

import triton
import triton.language as tl

ACTIVATIONS: tuple[str, ...] = ("none", "gelu", "gelu_tanh", "relu", "silu", "tanh", "quick_gelu")
"""Names that `activate` takes."""


@triton.jit
def gelu_half_precision(x):
    """x * Phi(x), right to 0.146 ulp of fp16 before it is rounded."""
    t = tl.abs(x)
    log2_tail = -3.3326644e-4 * t + 5.9509850e-3
    log2_tail = log2_tail * t - 4.8651498e-2
    log2_tail = log2_tail * t - 4.6356419e-1
    log2_tail = log2_tail * t - 1.1494322
    log2_tail = log2_tail * t - 1.0001024
    tail = tl.exp2(log2_tail)
    return x * tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def gelu_full_precision(x):
    """x * Phi(x) as PyTorch computes it in fp32."""
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    """x/2 * (1 + tanh(u)) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3). The second form keeps the tail."""
    # -2 * log2(e) * sqrt(2/pi), since the exponential is a power of two.
    minus_2u = -2.302208198 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp2(minus_2u))


@triton.jit
def silu(x):
    """x * sigmoid(x)"""
    return x / (1.0 + tl.exp2(-1.4426950408889634 * x))


@triton.jit
def quick_gelu(x):
    """x * sigmoid(1.702 x)"""
    return x / (1.0 + tl.exp2(-2.4554669595930156 * x))


@triton.jit
def tanh(x):
    """Odd polynomial (relative error 1e-10) below 0.6, where the quotient would cancel; the quotient above."""
    square = x * x
    slope = 2.23106e-3 * square - 8.26709e-3
    slope = slope * square + 2.173444e-2
    slope = slope * square - 5.395248e-2
    slope = slope * square + 1.3333248e-1
    slope = slope * square - 3.3333332e-1
    near = x + x * square * slope
    decay = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.6, near, tl.where(x < 0.0, -far, far))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr, FULL_PRECISION: tl.constexpr):
    """Apply one of ACTIVATIONS to fp32 values. FULL_PRECISION: the result is kept in fp32, not rounded to 16 bits."""
    if ACTIVATION == "gelu":
        if FULL_PRECISION:
            x = gelu_full_precision(x)
        else:
            x = gelu_half_precision(x)
    elif ACTIVATION == "gelu_tanh":
        x = gelu_tanh(x)
    elif ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # a comparison and not a maximum, which would swallow NaN
    elif ACTIVATION == "silu":
        x = silu(x)
    elif ACTIVATION == "quick_gelu":
        x = quick_gelu(x)
    elif ACTIVATION == "tanh":
        x = tanh(x)
    else:
        tl.static_assert(ACTIVATION == "none", "unknown activation")
    return x
