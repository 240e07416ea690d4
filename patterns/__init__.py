"""What kernl knows about models: one file a computation, with the maths it recognises and the models it was seen in.

Importing this package registers all of them, through the same `kernl.register_pattern` that users call.
"""

from kernl.patterns import (
    attention,
    dropout,
    eager_attention,
    embedding,
    linear,
    linear_attention,
    norm,
    relative_position,
    rms_norm,
    torch_modules,
)

__all__ = [
    "attention",
    "dropout",
    "eager_attention",
    "embedding",
    "linear",
    "linear_attention",
    "norm",
    "relative_position",
    "rms_norm",
    "torch_modules",
]
