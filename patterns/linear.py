"""Linear layers: with the activation behind them, together with others that read the same input, and alone.

    activation(x @ weight.T + bias)            gelu, gelu_tanh, relu, silu, tanh, quick_gelu
    activation(x @ gate.T) * (x @ up.T)        the same, gated by another linear of the same input and size
    x @ [weight_1 | ... | weight_n].T          n = 2 to 4 linears of one input, in one launch, each with its own result

Gated with silu (SwiGLU): Llama, Qwen, Mistral; with gelu_tanh: T5 1.1, FLAN-T5, mT5, Gemma. The original T5 has relu
and no gate. What follows (T5 casts to fp32 before a `wo` that it keeps in fp32) is no part of the match.

Activations come as one call or spelled out; the spelled-out ones are recognised by their form, their constants captured
and compared:

    gelu         torch's own; x / 2 * (1 + erf(x / sqrt(2)))
    gelu_tanh    torch's own with approximate="tanh"; in ALBERT and GPT-2 x / 2 * (1 + tanh(sqrt(2 / pi) * (x +
                 0.044715 * x^3))); elsewhere x / 2 * (1 + tanh(x * sqrt(2 / pi) * (1 + 0.044715 * x * x)))
    quick_gelu   x * sigmoid(1.702 * x), in CLIP
    silu         torch's own; x * sigmoid(x)

Linears are merged when they follow each other in the graph (no other matrix product in between): query, key and value
of BERT, ViT, T5, ...; key and value of cross-attention; the two heads of a question answering model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.fx import Node

from kernl.graph import (
    Emitted,
    Match,
    Pattern,
    Refused,
    call_of,
    emit,
    op,
    register_pattern,
    require,
    scalar,
    scaled,
    value_of,
    var,
)
from kernl.patterns.common import kernl_op, require_kernel_tensors

_linear = op("linear", var("input"), var("weight"), var("bias", or_none=True)).named("linear")
_x = var("linear")  # the linear's result, where it occurs again
_up = op("linear", var("input"), var("up_weight"), var("up_bias", or_none=True))

Rewrite = Callable[..., Emitted]


def _register_activation(name: str, pattern: Pattern) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite function for `pattern`, an activation of a linear, and for `pattern` gated by another one."""

    def register(rewrite: Rewrite) -> Rewrite:
        register_pattern(f"gated_{name}", op("mul", pattern, _up), priority=25)(rewrite)
        return register_pattern(f"linear_{name}", pattern, priority=20)(rewrite)

    return register


def _linear_op(match: Match, activation: str) -> Emitted:
    input, weight, bias = match["input"], match["weight"], match["bias"]
    _require_linear(match, input, weight, bias)
    up_weight, up_bias = match.get("up_weight"), match.get("up_bias")
    if up_weight is None:
        return emit(kernl_op("linear"), input, weight, bias, activation)
    _require_linear(match, input, up_weight, up_bias)
    require(value_of(weight).shape == value_of(up_weight).shape, "gate and gated linear are of different sizes")
    return emit(kernl_op("gated_linear"), input, weight, up_weight, bias, up_bias, activation)


def _require_linear(match: Match, input: Node, weight: Node, bias: Node | None) -> None:
    require_kernel_tensors(input, weight, bias, autocast=match.autocast)
    rank = value_of(weight).dim()
    require(rank == 2, f"the weight has {rank} dimensions (accepted: 2)")


def _require_constant(name: str, value: float, expected: float) -> None:
    """Constants are written with few digits or many; a different one is a different function."""
    require(math.isclose(value, expected, rel_tol=1e-4), f"{name} is {value:g} (accepted: {expected:g})")


# -- one call ----------------------------------------------------------------------------------------------------------


@_register_activation("gelu", op("gelu", _linear))
def linear_gelu(match: Match) -> Emitted:
    return _linear_op(match, "gelu")


@_register_activation("gelu_tanh", op("gelu", _linear, approximate="tanh"))
def linear_gelu_tanh(match: Match) -> Emitted:
    return _linear_op(match, "gelu_tanh")


@_register_activation("relu", op("relu", _linear))
def linear_relu(match: Match) -> Emitted:
    return _linear_op(match, "relu")


# silu(x), or x * sigmoid(x)
@_register_activation("silu", op("silu", _linear) | op("mul", _linear, op("sigmoid", _x)))
def linear_silu(match: Match) -> Emitted:
    return _linear_op(match, "silu")


@_register_activation("tanh", op("tanh", _linear))
def linear_tanh(match: Match) -> Emitted:
    return _linear_op(match, "tanh")


# -- spelled out -------------------------------------------------------------------------------------------------------


# x * sigmoid(slope * x)
@_register_activation("quick_gelu", op("mul", _linear, op("sigmoid", scaled(_x, "slope"))))
def linear_quick_gelu(match: Match, slope: float) -> Emitted:
    _require_constant("the slope", slope, 1.702)
    return _linear_op(match, "quick_gelu")


def _half_gate(curve: Pattern) -> Pattern:
    """half * x * (one + curve), in every order of the products."""
    gate = op("add", curve, scalar("one"))
    return (
        op("mul", scaled(_linear, "half"), gate)
        | op("mul", _linear, scaled(gate, "half"))
        | scaled(op("mul", _linear, gate), "half")
    )


def _require_half_gate(half: float, one: float) -> None:
    _require_constant("the factor", half, 0.5)
    _require_constant("the addend", one, 1.0)


# x / 2 * (1 + erf(x / sqrt(2)))
@_register_activation("gelu_erf", _half_gate(op("erf", scaled(_x, "slope"))))
def linear_gelu_erf(match: Match, half: float, one: float, slope: float) -> Emitted:
    _require_half_gate(half, one)
    _require_constant("the slope", slope, math.sqrt(0.5))
    return _linear_op(match, "gelu")


# x / 2 * (1 + tanh(slope * (x + cubic * x^3)))
@_register_activation(
    "gelu_new",
    _half_gate(op("tanh", scaled(op("add", _x, scaled(op("pow", _x, scalar("exponent")), "cubic")), "slope"))),
)
def linear_gelu_new(match: Match, half: float, one: float, slope: float, cubic: float, exponent: float) -> Emitted:
    _require_half_gate(half, one)
    _require_constant("the exponent", exponent, 3.0)
    return _gelu_tanh_op(match, slope, cubic)


# x / 2 * (1 + tanh(x * slope * (1 + cubic * x * x)))
@_register_activation(
    "gelu_fast",
    _half_gate(
        op("tanh", op("mul", scaled(_x, "slope"), op("add", op("mul", scaled(_x, "cubic"), _x), scalar("one"))))
    ),
)
def linear_gelu_fast(match: Match, half: float, one: float, slope: float, cubic: float) -> Emitted:
    _require_half_gate(half, one)
    return _gelu_tanh_op(match, slope, cubic)


def _gelu_tanh_op(match: Match, slope: float, cubic: float) -> Emitted:
    _require_constant("the slope", slope, math.sqrt(2.0 / math.pi))
    _require_constant("the cubic coefficient", cubic, 0.044715)
    return _linear_op(match, "gelu_tanh")


# -- several, and alone ------------------------------------------------------------------------------------------------

_MOST_MERGED = 4
_PRODUCTS = frozenset(
    "linear matmul bmm mm addmm baddbmm einsum conv1d conv2d conv3d scaled_dot_product_attention".split()
    + ["kernl::linear", "kernl::gated_linear", "kernl::merged_linear", "kernl::attention"]
)


@register_pattern("merged_linear", _linear, priority=10)
def merged_linear(match: Match, input: Node, weight: Node, bias: Node | None) -> dict[Node, Emitted] | Refused | None:
    run = _run_before(match.root, input)
    # Patterns are tried from the end of the graph: five linears become the last two, then the first three.
    chunks = -(-len(run) // _MOST_MERGED)
    group = run[-(len(run) // chunks) :]
    if len(group) < 2:
        return None
    _require_linear(match, input, weight, bias)
    calls = [call for node in group if (call := call_of(node)) is not None]
    weights, biases = [call["weight"] for call in calls], [call["bias"] for call in calls]
    result = emit(kernl_op("merged_linear"), input, weights, biases)
    return {node: result[position] for position, node in enumerate(group)}


def _run_before(last: Node, input: Node) -> list[Node]:
    """The linears of `input` up to `last` with no other matrix product in between, first one first."""
    if len(input.users) < 2:
        return [last]
    weight = value_of(_argument(last, "weight"))
    earliest = min(input.users)
    run = [last]
    node = last.prev
    while node >= earliest and node.op != "placeholder":
        call = call_of(node)
        if call is not None and call.op in _PRODUCTS:
            if call.op != "linear" or call["input"] is not input:
                break
            mine, bias = value_of(call["weight"]), value_of(call["bias"])
            alike = mine.dim() == 2 and mine.dtype == weight.dtype and (bias is None or bias.dtype == mine.dtype)
            if alike and node.users:
                run.append(node)
        node = node.prev
    return run[::-1]


def _argument(node: Node, name: str) -> Any:
    call = call_of(node)
    assert call is not None
    return call[name]


@register_pattern("linear", _linear, priority=0)
def linear(match: Match) -> Emitted:
    return _linear_op(match, "none")
