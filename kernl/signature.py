"""What kind of call this is: the part of the arguments that a compiled graph depends on.

    signature, tensors = read_call(args, kwargs)

Two calls with equal signatures have the same number of positional arguments and the same names; tensors of the same
dtypes, devices, shapes, strides and offsets, requiring gradients alike; and everything else equal by value. It is read
on every call, before anything else happens, and is the key under which the front door looks up what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Tensor = torch.Tensor

BY_VALUE = frozenset({type(None), bool, int, str, torch.dtype, torch.device})
"""Types whose values are compared with `==`."""


class _NotByValue(Exception):
    """An argument that cannot be compared by value."""


def read_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Tensor]] | None:
    """Signature of a call and its tensors in order; None when some argument cannot be compared by value."""
    parts: list[Any] = [len(args), *kwargs]
    tensors: list[Tensor] = []
    try:
        for value in args:
            _read(value, parts, tensors)
        for value in kwargs.values():
            _read(value, parts, tensors)
    except (_NotByValue, RuntimeError):  # RuntimeError: strides of a nested tensor
        return None
    # The same tensor given twice is another kind of call: TorchDynamo makes one input of both.
    identities = list(map(id, tensors))
    if len(set(identities)) != len(identities):
        parts += map(identities.index, identities)
    return tuple(parts), tensors


def _read(value: Any, parts: list[Any], tensors: list[Tensor]) -> None:
    kind = type(value)
    if kind is Tensor and value.layout is torch.strided:
        tensors.append(value)
        parts += (
            value.dtype,
            value.shape,
            value.stride(),
            value.device,
            value.requires_grad,
            value.storage_offset(),
        )
    elif kind in BY_VALUE:
        parts += (kind, value)
    elif kind is float:
        parts += (kind, value.hex())  # 0.0 and -0.0 are equal and not the same
    elif kind is tuple or kind is list:
        parts += (kind, len(value))
        for item in value:
            _read(item, parts, tensors)
    elif kind is dict:
        parts += (kind, len(value))
        for name, item in value.items():
            _read(name, parts, tensors)
            _read(item, parts, tensors)
    else:
        raise _NotByValue(f"an argument is a {kind.__name__}")
