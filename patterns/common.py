"""What the pattern files share: finding kernl's ops and the conditions under which their kernels can stand in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kernl.graph import Refused, value_of

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def known_equal(one: Any, other: Any) -> bool:
    """Whether two sizes are the same for every shape that the graph serves; asking adds no guard."""
    return statically_known_true(one == other)


def kernl_op(name: str) -> Callable[..., Any]:
    """`torch.ops.kernl.<name>`; the ops register themselves when `kernl.ops` is imported, which is not done before."""
    import kernl.ops

    assert kernl.ops is not None
    return getattr(torch.ops.kernl, name).default


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def require_kernel_tensors(*operands: Node | None, autocast: bool) -> None:
    """Refuse unless these are plain strided tensors of one dtype the kernels take (of any of them under autocast)."""
    values = [value_of(operand) for operand in operands if operand is not None]
    for value in values:
        if is_traceable_wrapper_subclass(value) or value.layout != torch.strided:
            raise Refused(f"an operand is not a plain tensor ({type(value).__name__}, {value.layout})")
        if value.dtype not in KERNEL_DTYPES:
            accepted = ", ".join(map(short, KERNEL_DTYPES))
            raise Refused(f"dtype {short(value.dtype)} (accepted: {accepted})")
    dtypes = sorted({short(value.dtype) for value in values})
    # Under autocast torch casts the operands, and so does the op's own autocast rule.
    if len(dtypes) > 1 and not autocast:
        raise Refused(f"operands of different dtypes: {', '.join(dtypes)}")


def belongs_to_model(placeholder: Node) -> bool:
    """Whether an input of the graph is a parameter or buffer, which Dynamo notes in its source."""
    if isinstance(value_of(placeholder), torch.nn.Parameter):
        return True
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    name = name() if callable(name) else name
    return "._parameters[" in name or "._buffers[" in name
