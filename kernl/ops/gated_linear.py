"""Two linear layers of one input, the activation of one times the other: the first half of a gated feed-forward block.

    torch.ops.kernl.gated_linear(input, gate_weight, up_weight, gate_bias, up_bias, activation)
        -> activation(input @ gate_weight.T + gate_bias) * (input @ up_weight.T + up_bias)

SwiGLU (silu), GEGLU (gelu, gelu_tanh), ReGLU (relu). `input` is [..., K], the weights [N, K], the output [..., N].
In fp16 and bf16 plain PyTorch rounds both products, the activation and the result; in one kernel everything up to the
result stays fp32, and with the product in a kernel before the two products are rounded.

Elements moved besides input and weights, for M rows: 7 M N in plain PyTorch (two products stored, one read and stored
by the activation, both read and one stored by the product). One launch that never stores the products, for up to 512
rows or on GPUs without a tensor memory accelerator: M N. Otherwise both products in one launch (or by cuBLAS, whichever
is expected to be faster) and a second one for activation and product: 5 M N. See kernels/linear.py; the choice is made
as for every linear (kernl/ops/linear.py).

GLU Variants Improve Transformer, Shazeer, 2020 (arXiv:2002.05202).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from kernl.kernels.activation import ACTIVATIONS
from kernl.ops.common import cast, define_op
from kernl.ops.linear import (
    activation_backward,
    allocate,
    apply_activation,
    check_operands,
    kernels_ahead,
    kernels_take,
    launch,
    linear_backward,
)
from kernl.ops.transforms import by_rows


def gated_linear(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    activation: str = "silu",
) -> torch.Tensor:
    """activation(input @ gate_weight.T + gate_bias) * (input @ up_weight.T + up_bias).

    input: [..., K], any float dtype, any strides.
    gate_weight, up_weight: [N, K], dtype of input, read where they are. gate_bias, up_bias: [N] or None.
    activation: "silu" (SwiGLU), or any that `linear` takes.

    Returns [..., N], contiguous, in the dtype of input (in autocast's dtype under autocast, as torch's linear).
    Raises ValueError for shapes, dtypes or activations that do not fit.

    GLU Variants Improve Transformer, Shazeer, 2020 (arXiv:2002.05202).
    """
    check_operands(input, [gate_weight, up_weight], [gate_bias, up_bias])
    if up_weight.shape != gate_weight.shape:
        raise ValueError(
            f"up_weight has shape {list(up_weight.shape)}; accepted: {list(gate_weight.shape)}, that of gate_weight"
        )
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; accepted: {', '.join(ACTIVATIONS)}")
    return torch.ops.kernl.gated_linear(input, gate_weight, up_weight, gate_bias, up_bias, activation)


def reference_gated_linear(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    """`gated_linear` in plain PyTorch, for any float dtype and device."""
    gate = apply_activation(F.linear(input, gate_weight, gate_bias), activation)
    return (gate * F.linear(input, up_weight, up_bias)).contiguous()


def _gated_linear(
    input: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    weights, biases = [gate_weight, up_weight], [gate_bias, up_bias]
    if not kernels_take(input, weights, biases):
        return reference_gated_linear(input, gate_weight, up_weight, gate_bias, up_bias, activation)
    output = allocate(input, gate_weight)
    launch(input, weights, biases, [output], activation, gated=True)
    return output


# Gradients, in plain PyTorch. The two products are computed again rather than kept.


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, gate_weight, up_weight, gate_bias, up_bias = ctx.saved_tensors
    input_wanted, gate_wanted, up_wanted, gate_bias_wanted, up_bias_wanted, _ = ctx.needs_input_grad
    gate, up = F.linear(input, gate_weight, gate_bias), F.linear(input, up_weight, up_bias)
    grad_gate = activation_backward(grad * up, gate, ctx.activation)
    grad_up = grad * apply_activation(gate, ctx.activation)
    by_gate, *of_gate = linear_backward(grad_gate, input, gate_weight, input_wanted, gate_wanted, gate_bias_wanted)
    by_up, *of_up = linear_backward(grad_up, input, up_weight, input_wanted, up_wanted, up_bias_wanted)
    grad_input = None if by_gate is None or by_up is None else by_gate + by_up
    return grad_input, of_gate[0], of_up[0], of_gate[1], of_up[1], None


# Autocast: everything to its dtype, as torch's linear. Activation and product then run in that dtype too.


def _autocast(dtype: torch.dtype, device_type: str, *operands: Any) -> torch.Tensor:
    *tensors, activation = operands
    return torch.ops.kernl.gated_linear(*(cast(tensor, dtype) for tensor in tensors), activation)


define_op(
    "gated_linear(Tensor input, Tensor gate_weight, Tensor up_weight, Tensor? gate_bias, Tensor? up_bias, "
    "str activation) -> Tensor",
    cpu=_gated_linear,
    fake=lambda input, gate_weight, up_weight, gate_bias, up_bias, activation: allocate(input, gate_weight),
    autograd=(_context, _backward),
    vmap=by_rows(),
    autocast=_autocast,
    ahead=lambda input, gate_weight, up_weight, gate_bias, up_bias, activation: kernels_ahead(
        input, [gate_weight, up_weight], [gate_bias, up_bias], activation, gated=True
    ),
)
