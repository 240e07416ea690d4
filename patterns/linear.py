"""Linear layers: with the activation behind them, together with others that read the same input, and alone.

    activation(x @ weight.T + bias)            gelu, gelu_tanh, relu, silu, tanh, quick_gelu
    activation(x @ gate.T) * (x @ up.T)        the same, gated by another linear of the same input and size
    activation(g) * u, g | u = x @ both.T      the same, where gate and up are the halves of one weight
    x @ [weight_1 | ... | weight_n].T          n = 2 to 4 linears of one input, in one launch, each with its own result
    x @ weight.T + bias, addmm(bias, x, w)     linears written as products: made linears first, for all of the above

Gated with silu (SwiGLU): Llama, Qwen, Mistral; with gelu_tanh: T5 1.1, FLAN-T5, mT5, Gemma. The original T5 has relu
and no gate. ModernBERT, Phi3, GLM and DINOv2 have one weight for both, of which the op is given two slices, not copies.
What follows (T5 casts to fp32 before a `wo` that it keeps in fp32) is no part of the match.

A product is a linear where it is with a parameter, or with the transpose of one: in Falcon, and in GPT-2, whose weights
are [K, N] and which flattens what it multiplies by them.

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
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node

from kernl.graph import (
    Emitted,
    Match,
    Pattern,
    Refused,
    anything,
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
from kernl.patterns.common import belongs_to_model, kernl_op, known_equal, require_kernel_tensors

_linear = op("linear", var("input"), var("weight"), var("bias", or_none=True)).named("linear")
_x = var("linear")  # the linear's result, where it occurs again
_up = op("linear", var("input"), var("up_weight"), var("up_bias", or_none=True))
_halves = (op("chunk", _linear, 2, dim=-1) | op("split", _linear, anything("sizes"), dim=-1)).named("halves")
_gate_half = op("getitem", _halves, scalar("gate_index")).named("gate")
_up_half = op("getitem", anything("halves"), scalar("up_index")).named("up")

Rewrite = Callable[..., Emitted]


def _register_activation(name: str, activation: Callable[[Pattern, Pattern], Pattern]) -> Callable[[Rewrite], Rewrite]:
    """Register a rewrite function for an activation of a linear, and for the same gated.

    activation: makes the pattern for `x`, which reads as `again` wherever else it occurs.
    """

    def register(rewrite: Rewrite) -> Rewrite:
        of_linear = activation(_linear, _x)
        gated = op("mul", of_linear, _up) | op("mul", activation(_gate_half, var("gate")), _up_half)
        register_pattern(f"gated_{name}", gated, priority=25)(rewrite)
        return register_pattern(f"linear_{name}", of_linear, priority=20)(rewrite)

    return register


def _linear_op(match: Match, activation: str) -> Emitted:
    input, weight, bias = match["input"], match["weight"], match["bias"]
    _require_linear(match, input, weight, bias)
    if "gate" in match.bindings:
        (gate, up), (gate_bias, up_bias) = (_in_halves(match, each) for each in (weight, bias))
        return emit(kernl_op("gated_linear"), input, gate, up, gate_bias, up_bias, activation)
    up_weight, up_bias = match.get("up_weight"), match.get("up_bias")
    if up_weight is None:
        return emit(kernl_op("linear"), input, weight, bias, activation)
    _require_linear(match, input, up_weight, up_bias)
    require(value_of(weight).shape == value_of(up_weight).shape, "gate and gated linear are of different sizes")
    return emit(kernl_op("gated_linear"), input, weight, up_weight, bias, up_bias, activation)


def _in_halves(match: Match, parameter: Node | None) -> tuple[Emitted | None, Emitted | None]:
    """The rows of the gate and those of what it gates."""
    places = [match["gate_index"], match["up_index"]]
    rows = value_of(match["weight"]).shape[0]
    are_halves = all(known_equal(2 * value_of(match[name]).shape[-1], rows) for name in ("gate", "up"))
    require(sorted(places) == [0, 1] and are_halves, "gate and gated are not the halves of a linear")
    if parameter is None:
        return None, None
    half = rows // 2
    gate, up = (emit(operator.getitem, parameter, slice(place * half, (place + 1) * half)) for place in places)
    return gate, up


def _require_linear(match: Match, input: Node, weight: Node, bias: Node | None) -> None:
    require_kernel_tensors(input, weight, bias, autocast=match.autocast)
    rank = value_of(weight).dim()
    require(rank == 2, f"the weight has {rank} dimensions (accepted: 2)")


def _require_constant(name: str, value: float, expected: float) -> None:
    """Constants are written with few digits or many; a different one is a different function."""
    require(math.isclose(value, expected, rel_tol=1e-4), f"{name} is {value:g} (accepted: {expected:g})")


# -- written as a product ----------------------------------------------------------------------------------------------


_product = op("matmul", var("input"), var("matrix"))


@register_pattern("product_linear", op("add", _product, var("bias")) | _product, priority=90)
def product_linear(input: Node, matrix: Node, bias: Node | None) -> Emitted | None:
    weight = _weight_of(matrix)
    if weight is None or value_of(input).dim() < 2 or not (bias is None or _is_bias(bias, matrix)):
        return None
    return emit(F.linear, input, weight, bias)


@register_pattern("addmm_linear", op("addmm", var("bias"), var("rows"), var("matrix")), priority=90)
def addmm_linear(match: Match, bias: Node, rows: Node, matrix: Node) -> dict[Node, Emitted] | None:
    weight = _weight_of(matrix)
    if weight is None or not _is_bias(bias, matrix):
        return None
    input = _unflattened(match.root, rows)
    return dict.fromkeys([match.root] if input is rows else match.root.users, emit(F.linear, input, weight, bias))


def _weight_of(matrix: Node) -> Node | Emitted | None:
    """The weight [N, K] of a linear that multiplies by this [K, N]; None unless that is a parameter or the like."""
    if value_of(matrix).dim() != 2:
        return None
    if belongs_to_model(matrix):
        return emit(torch.t, matrix)
    call = call_of(matrix)
    if call is None or call.op not in ("transpose", "permute"):
        return None
    order = tuple(call["dims"]) if call.op == "permute" else (call["dim1"], call["dim0"])
    if order != (1, 0):
        return None
    weight: Node = call["input"]
    return weight if belongs_to_model(weight) else None


def _is_bias(bias: Node, matrix: Node) -> bool:
    mine, its = value_of(bias), value_of(matrix)
    return belongs_to_model(bias) and mine.shape == its.shape[1:] and mine.dtype == its.dtype


def _unflattened(product: Node, rows: Node) -> Node:
    """x, where the product with x.view(-1, K) is viewed as [..., N] by all who use it; otherwise what was given."""
    views = (rows, *product.users)
    calls = [call for each in views if (call := call_of(each)) is not None and call.op in ("view", "reshape")]
    if len(calls) < len(views):
        return rows
    input: Node = calls[0]["input"]
    *outer, inner = value_of(input).shape
    apart = [(inner, value_of(rows).shape[1])]
    for user in product.users:
        shape = value_of(user).shape
        if len(shape) != len(outer) + 1:
            return rows
        apart += zip(shape, (*outer, value_of(product).shape[1]))
    return input if all(known_equal(one, other) for one, other in apart) else rows


# -- one call ----------------------------------------------------------------------------------------------------------


@_register_activation("gelu", lambda x, again: op("gelu", x))
def linear_gelu(match: Match) -> Emitted:
    return _linear_op(match, "gelu")


@_register_activation("gelu_tanh", lambda x, again: op("gelu", x, approximate="tanh"))
def linear_gelu_tanh(match: Match) -> Emitted:
    return _linear_op(match, "gelu_tanh")


@_register_activation("relu", lambda x, again: op("relu", x))
def linear_relu(match: Match) -> Emitted:
    return _linear_op(match, "relu")


# silu(x), or x * sigmoid(x)
@_register_activation("silu", lambda x, again: op("silu", x) | op("mul", x, op("sigmoid", again)))
def linear_silu(match: Match) -> Emitted:
    return _linear_op(match, "silu")


@_register_activation("tanh", lambda x, again: op("tanh", x))
def linear_tanh(match: Match) -> Emitted:
    return _linear_op(match, "tanh")


# -- spelled out -------------------------------------------------------------------------------------------------------


# x * sigmoid(slope * x)
@_register_activation("quick_gelu", lambda x, again: op("mul", x, op("sigmoid", scaled(again, "slope"))))
def linear_quick_gelu(match: Match, slope: float) -> Emitted:
    _require_constant("the slope", slope, 1.702)
    return _linear_op(match, "quick_gelu")


def _half_gate(x: Pattern, curve: Pattern) -> Pattern:
    """half * x * (one + curve), in every order of the products."""
    gate = op("add", curve, scalar("one"))
    return op("mul", scaled(x, "half"), gate) | op("mul", x, scaled(gate, "half")) | scaled(op("mul", x, gate), "half")


def _require_half_gate(half: float, one: float) -> None:
    _require_constant("the factor", half, 0.5)
    _require_constant("the addend", one, 1.0)


# x / 2 * (1 + erf(x / sqrt(2)))
@_register_activation("gelu_erf", lambda x, again: _half_gate(x, op("erf", scaled(again, "slope"))))
def linear_gelu_erf(match: Match, half: float, one: float, slope: float) -> Emitted:
    _require_half_gate(half, one)
    _require_constant("the slope", slope, math.sqrt(0.5))
    return _linear_op(match, "gelu")


# x / 2 * (1 + tanh(slope * (x + cubic * x^3)))
@_register_activation(
    "gelu_new",
    lambda x, again: _half_gate(
        x, op("tanh", scaled(op("add", again, scaled(op("pow", again, scalar("exponent")), "cubic")), "slope"))
    ),
)
def linear_gelu_new(match: Match, half: float, one: float, slope: float, cubic: float, exponent: float) -> Emitted:
    _require_half_gate(half, one)
    _require_constant("the exponent", exponent, 3.0)
    return _gelu_tanh_op(match, slope, cubic)


# x / 2 * (1 + tanh(x * slope * (1 + cubic * x * x)))
@_register_activation(
    "gelu_fast",
    lambda x, again: _half_gate(
        x,
        op(
            "tanh",
            op("mul", scaled(again, "slope"), op("add", op("mul", scaled(again, "cubic"), again), scalar("one"))),
        ),
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
