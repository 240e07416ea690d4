"""The ops of kernl, usable by themselves: each is a `torch.library` op plus a validated Python function.

    import kernl.ops
    output = kernl.ops.layer_norm(input, weight, bias)

They run Triton kernels on a GPU that has what these need and plain PyTorch everywhere else, differentiate, honour
autocast and work under `torch.compile` and `torch.export`. Importing this package registers `torch.ops.kernl.*`.

`kernl.ops.attention` and `kernl.ops.linear` are the functions; the files of these names are reached with
`from kernl.ops.linear import ...`.
"""

from kernl.ops.attention import attention
from kernl.ops.embedding import embedding_sum
from kernl.ops.linear import linear, merged_linear
from kernl.ops.norm import add_layer_norm, layer_norm
from kernl.ops.relative_position import RelativePositionBias

__all__ = [
    "RelativePositionBias",
    "add_layer_norm",
    "attention",
    "embedding_sum",
    "layer_norm",
    "linear",
    "merged_linear",
]
