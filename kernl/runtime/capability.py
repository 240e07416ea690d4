"""What a device can do: the one table from which every choice of kernel starts. And whether a C++ compiler is at hand.

    capability_of(tensor.device).fuses_gemm_and_attention

The fields are read once per device from `torch.cuda.get_device_properties`. Anything that is not a CUDA device (a CPU
tensor, a machine without a GPU) has architecture 0, for which every feature is off. A test that wants to see what the
code does on another chip builds a `DeviceCapability` by hand.
"""

from __future__ import annotations

import functools
import os
import shutil
from dataclasses import dataclass

import torch

_SHARED_MEMORY_BEFORE_OPT_IN = 48 * 1024


@dataclass(frozen=True)
class DeviceCapability:
    """Capabilities of one device.

    name: the vendor's name of the chip, "cpu" when there is none.
    major, minor: CUDA compute capability.
    sm_count: streaming multiprocessors.
    shared_memory_per_block: bytes one program may use, opt-in limit included.
    l2_bytes: size of the second-level cache in bytes.
    """

    name: str
    major: int
    minor: int
    sm_count: int
    shared_memory_per_block: int
    l2_bytes: int

    @property
    def arch(self) -> int:
        """Compute capability as one number: 90 for sm_90, 0 without a CUDA device."""
        return 10 * self.major + self.minor

    @property
    def fuses_norms(self) -> bool:
        """Turing and newer: kernels without tensor-core instructions."""
        return self.arch >= 75

    @property
    def fuses_gemm_and_attention(self) -> bool:
        """Ampere and newer: Triton emits no tensor-core code for sm_75."""
        return self.arch >= 80

    @property
    def has_bf16(self) -> bool:
        return self.arch >= 80

    @property
    def has_tma(self) -> bool:
        """Tensor memory accelerator: descriptors instead of pointers."""
        return self.arch >= 90

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch: a kernel starts before the one it follows has ended."""
        return self.arch >= 90


NO_CUDA = DeviceCapability(name="cpu", major=0, minor=0, sm_count=0, shared_memory_per_block=0, l2_bytes=0)


def capability_of(device: torch.device | torch.Tensor | str | int | None = None) -> DeviceCapability:
    """Capability of a device, of the device a tensor lives on, or (None) of the current CUDA device.

    Never raises for a device that is not CUDA, or when there is no GPU: the answer has `arch == 0`. The properties are
    read once per device.
    """
    if isinstance(device, torch.Tensor):
        device = device.device
    elif isinstance(device, int):
        device = torch.device("cuda", device)
    elif isinstance(device, str):
        device = torch.device(device)
    if device is not None and device.type != "cuda":
        return NO_CUDA
    index = device.index if device is not None else None
    if index is None:
        if not torch.cuda.is_initialized() and not torch.cuda.is_available():
            return NO_CUDA
        index = torch.cuda.current_device()
    return _capability_of_cuda_device(index)


@functools.cache
def _capability_of_cuda_device(index: int) -> DeviceCapability:
    if not torch.cuda.is_available():
        return NO_CUDA
    properties = torch.cuda.get_device_properties(index)
    return DeviceCapability(
        name=properties.name,
        major=properties.major,
        minor=properties.minor,
        sm_count=properties.multi_processor_count,
        shared_memory_per_block=getattr(properties, "shared_memory_per_block_optin", _SHARED_MEMORY_BEFORE_OPT_IN),
        l2_bytes=getattr(properties, "L2_cache_size", 0),
    )


def find_cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would use: the variable CXX, else g++, clang++ or c++ on the path, else None."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (path := shutil.which(name.split()[0])):
            return path
    return None
