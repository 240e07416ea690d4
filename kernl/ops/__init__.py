"""The ops of kernl, usable by themselves: each is a `torch.library` op plus a validated Python function.

    import kernl.ops
    output = kernl.ops.layer_norm(input, weight, bias)

They run Triton kernels on a GPU that has what these need and plain PyTorch everywhere else, differentiate, honour
autocast and work under `torch.compile`, `torch.export` and torch.func's vmap, grad, vjp and jacrev (forward mode, jvp,
is refused). Importing this package registers `torch.ops.kernl.*`.

`kernl.ops.attention`, `kernl.ops.linear` and others are the functions; the files of these names are reached with
`from kernl.ops.linear import ...`.
"""

from kernl.ops.attention import attention
from kernl.ops.embedding import embedding_sum
from kernl.ops.fusion_attention import fusion_attention
from kernl.ops.gated_linear import gated_linear
from kernl.ops.linear import linear, merged_linear
from kernl.ops.linear_attention import LinearAttentionState, causal_dot_product, linear_attention
from kernl.ops.norm import add_layer_norm, layer_norm
from kernl.ops.relative_position import RelativePositionBias
from kernl.ops.rms_norm import add_rms_norm, rms_norm

__all__ = [
    "LinearAttentionState",
    "RelativePositionBias",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "causal_dot_product",
    "embedding_sum",
    "fusion_attention",
    "gated_linear",
    "layer_norm",
    "linear",
    "linear_attention",
    "merged_linear",
    "rms_norm",
]
