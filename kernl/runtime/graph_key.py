"""When two calls may replay the same CUDA graph: when everything that a graph freezes is equal.

A graph freezes the layout of its tensors (shape, strides, dtype, device), every value that is not a tensor, and the
switches of PyTorch that decide which kernels a call launches. Contents of tensors and, thanks to static input
buffers, their addresses are not part of the key, except those of tensors that `stay`: a graph uses them where they are.
The addresses of parameters and buffers are frozen too, but they are compared at each replay instead
(`kernl.runtime.cuda_graph`), so that a moved weight replaces its graph rather than adding one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import Parameter

_VALUES = (int, bool, str, type(None), torch.dtype, torch.device)
_TENSORS = (torch.Tensor, Parameter)


class Uncapturable(Exception):
    """This call cannot be served by a CUDA graph; the text says why, without naming sizes."""


def torch_state() -> tuple[object, ...]:
    """The process-wide and thread-local switches that change what a call computes or launches.

    The fp32 precisions are read per backend: `torch.get_float32_matmul_precision` raises once the newer settings are
    used.
    """
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("cuda", "conv"),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


def graph_key(
    inputs: Sequence[Any], indices: Sequence[int], device_type: str, device: torch.device | None
) -> tuple[tuple[object, ...], torch.device]:
    """Key of a call, and the one device it runs on.

    inputs: the call's inputs; indices: those that are not used by address. device_type: "cuda", or what the tests
    capture on; device: where the inputs used by address live, None when there are none.

    A tensor with no dimensions on the CPU counts as a value: kernels get it as a plain argument, which a graph freezes.
    Raises Uncapturable for values that cannot be compared, tensors a graph cannot read, and several devices.
    """
    parts: list[object] = [torch_state()]
    for index in indices:
        value = inputs[index]
        kind = type(value)
        if kind in _TENSORS:
            if value.layout is not torch.strided or value.is_nested:
                raise Uncapturable(f"input {index} is a tensor of layout {value.layout} or nested")
            place = value.device
            if place.type == device_type:
                if device is None:
                    device = place
                elif device != place:
                    raise Uncapturable("inputs are on more than one device")
                parts.append((value.shape, value.stride(), value.dtype, value.data_ptr() if stays(value) else None))
            elif place.type == "cpu" and value.ndim == 0:
                parts.append((value.dtype, repr(value.item())))
            else:
                raise Uncapturable(f"input {index} is a tensor on {place.type}")
        elif kind in _VALUES:
            parts.append((kind, value))
        elif kind is float:
            # Equal floats need not be the same value (0.0 and -0.0), nor the same value equal (nan).
            parts.append((kind, repr(value)))
        else:
            raise Uncapturable(f"input {index} is of type {kind.__name__}")
    if device is None:
        raise Uncapturable(f"no input is on {device_type}")
    parts.append(device)
    return tuple(parts), device


def stays(tensor: torch.Tensor) -> bool:
    """Whether its maker says that a tensor will be given again and again at the same address.

    With `torch._dynamo.mark_static_address`, as transformers does for keys and values of its static caches.
    """
    return getattr(tensor, "_dynamo_static_input_type", None) is not None


def needs_gradient(inputs: Sequence[Any]) -> bool:
    """Whether autograd would record the call. Asked only while gradients are enabled."""
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)
