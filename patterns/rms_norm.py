"""RMSNorm, as one call or as its formula, alone and with the residual addition in front of it.

    y = x / sqrt(mean(x^2) + eps) * weight                             over the last dimension
    y = rms_norm(input + residual)                                     the sum is nearly always used again

torch.nn.RMSNorm is one call. transformers' models spell the formula out, each with casts of its own:

    T5, mT5, UMT5                   weight * to(x * rsqrt(mean(float(x)^2) + eps), weight's dtype if that is 16 bits)
    Llama, Qwen, Mistral, Phi3      weight * to(float(x) * rsqrt(mean(float(x)^2) + eps), x's dtype)
    Gemma                           to(float(x) * rsqrt(mean(float(x)^2) + eps) * (1 + float(weight)), x's dtype)
    Gemma3n and later               pow(..., -0.5) in place of rsqrt
    Llama4's heads, and others      no weight at all

The op computes all of it in fp32 and rounds once, see kernl/ops/rms_norm.py. Statistics that a model takes in 16 bits,
where squares overflow, are left alone. A cast behind the product belongs to the norm only where the product was fp32:
any other rounds, and stays.

In fp16 T5 clamps its residual sums before it normalises them, to a bound that depends on whether any value of the
whole tensor is infinite. So there the norm is of the clamped tensor, not of a sum: the sum, `isinf`, `any`, `where` and
`clamp` stay as they are (no synchronisation with the host is among them), and the norm alone is ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph import (
    ANY,
    Emitted,
    Match,
    Pattern,
    anything,
    call_of,
    either,
    emit,
    op,
    register_pattern,
    require,
    scalar,
    through,
    value_of,
    var,
)
from kernl.patterns.common import kernl_op, require_kernel_tensors, short
from kernl.patterns.norm import or_cast, require_residual, rounds_as_little

_SINGLE = torch.float32


def _rms_norm_of(x: Pattern, again: Pattern) -> Pattern:
    """All spellings of the norm of `x`, which reads as `again` wherever else it occurs."""
    call = op(
        "rms_norm",
        x,
        normalized_shape=anything("normalized_shape"),
        weight=var("weight", or_none=True),
        eps=anything("eps"),
    )
    first, other = or_cast(x), or_cast(again)
    square = op("pow", first, scalar("exponent")) | op("square", first) | op("mul", first, other)
    mean_square = op("mean", square, dim=anything("dim"), keepdim=True).named("mean_square")
    inverse = op("rsqrt", op("add", mean_square, scalar("eps")))
    inverse |= op("pow", op("add", mean_square, scalar("eps")), scalar("root"))
    normalized = op("mul", inverse, other)
    weight = or_cast(var("weight"))
    scale = op("add", weight, scalar("weight_offset")).named("scale") | weight
    product = op("mul", normalized | op("to", normalized, dtype=ANY).named("rounded"), scale)
    return either(call, through(product.named("product"), "to"), through(normalized.named("product"), "to"))


@dataclass(frozen=True)
class _Norm:
    """What the op is told besides its operands."""

    weight: Node | None
    eps: float
    weight_offset: float
    dtype: torch.dtype

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.weight, self.eps, self.weight_offset, self.dtype


def _read(match: Match, x: Node) -> _Norm | None:
    """The arguments of a norm of `x`, once it is known to be one. None where another way of matching says it better."""
    rank, columns = value_of(x).dim(), value_of(x).shape[-1]
    weight, eps, offset = match.get("weight"), match["eps"], match.get("weight_offset", 0.0)
    dtype = value_of(match.root).dtype
    if match.get("product") is None:
        shape = match["normalized_shape"]
        dims = len(shape) if isinstance(shape, (tuple, list, torch.Size)) else 1
        require(dims == 1, f"normalised over {dims} dimensions (accepted: the last one)")
        require(eps is None or isinstance(eps, float), "eps is not a constant")
        return _Norm(weight, torch.finfo(_SINGLE).eps if eps is None else eps, 0.0, dtype)

    product = match["product"]
    if not rounds_as_little(match, value_of(x).dtype, value_of(product).dtype):
        return None
    if match.root is not product:
        call = call_of(match.root)
        assert call is not None
        if call["input"] is not product or value_of(product).dtype != _SINGLE or match.users_outside(product):
            return None
    if weight is not None and not _is_weight(value_of(weight), columns):
        return None
    exponent, root = match.get("exponent", 2), match.get("root", -0.5)
    require(exponent == 2, f"the exponent is {exponent:g} (accepted: 2)")
    require(math.isclose(root, -0.5), f"the power of the mean is {root:g} (accepted: -0.5, a square root)")
    require(match["dim"] in (rank - 1, (rank - 1,)), f"the mean is over dimension {match['dim']} (accepted: the last)")
    statistics = value_of(match["mean_square"]).dtype
    require(statistics == _SINGLE, f"the statistics are {short(statistics)} (accepted: float32)")
    if "scale" in match.bindings and value_of(match["scale"]).dtype != _SINGLE:
        return None  # rounded before it is used: then the rounded sum is the weight
    return _Norm(weight, float(eps), float(offset), dtype)


def _is_weight(value: torch.Tensor, columns: Any) -> bool:
    return value.dim() == 1 and statically_known_true(value.shape[0] == columns)


def _require_operands(*operands: Node | None) -> None:
    """Each of a dtype that the kernels take; they need not have the same."""
    for operand in operands:
        require_kernel_tensors(operand, autocast=False)


@register_pattern(
    "add_rms_norm",
    _rms_norm_of(op("add", var("input"), var("residual"), alpha=anything("alpha")).named("sum"), var("sum")),
    priority=40,
)
def add_rms_norm(match: Match, input: Node, residual: Node, alpha: Any, sum: Node) -> dict[Node, Emitted] | None:
    norm = _read(match, sum)
    if norm is None:
        return None
    require_residual(input, residual, alpha)
    _require_operands(input, residual, norm.weight)
    require(value_of(input).dim() > 0 and value_of(residual).dim() > 0, "an operand of the sum is a number")
    if not match.users_outside(sum):
        return {match.root: emit(kernl_op("rms_norm_of_sum"), input, residual, *norm.arguments)}
    both = emit(kernl_op("add_rms_norm"), input, residual, *norm.arguments)
    return {match.root: both[0], sum: both[1]}


@register_pattern("rms_norm", _rms_norm_of(var("input"), var("input")), priority=30)
def rms_norm(match: Match, input: Node) -> Emitted | None:
    norm = _read(match, input)
    if norm is None:
        return None
    _require_operands(input, norm.weight)
    return emit(kernl_op("rms_norm"), input, *norm.arguments)
