"""What every kernel file shares: launch counting, the list of compilable cases, and a few device-side helpers.

Device-side conventions
    Names        kernels are called `kernl_<op>_<what>`, so that a profiler's rows can be attributed.
    Addresses    program ids are widened to int64 before a stride multiplies them.
    bf16         Triton's interpreter computes bf16 wrongly and silently, and truncates where a GPU rounds:
                 `to_compute` right after a load makes it fp32 there and leaves the value alone in compiled code,
                 `to_storage` right before a store rounds to nearest in both.
    Dependent launches (compute capability 9.0 and newer)
                 a kernel launched with `launch_pdl=True` starts while its predecessor still runs. Each kernel has a
                 constexpr USE_PDL; when it is true, *every* program calls `wait_for_previous_kernel(USE_PDL)` before it
                 first reads an activation or writes anything. All programs must: the wait is what orders a kernel
                 after those two and more launches before it. `let_next_kernel_start(USE_PDL)` goes as early as
                 possible, since the next kernel waits for this one's end by itself.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRET: bool = bool(triton.knobs.runtime.interpret)
"""True when kernels run in Triton's interpreter (TRITON_INTERPRET=1 when this module was imported)."""

_INTERPRET = tl.constexpr(INTERPRET)

launches: collections.Counter[str] = collections.Counter()
"""How often each kernel was launched in this process, by the name its launcher gave to `count_launch`."""


def block_of(dim: int) -> int:
    """A head dimension as the kernels pad it: the next power of two, at least 16 (tensor cores take no less)."""
    return max(16, triton.next_power_of_2(dim))


def count_launch(name: str) -> None:
    """Note one launch of a kernel. Tests use the counts to see that a kernel ran and not its reference."""
    launches[name] += 1


@dataclass(frozen=True)
class AotCase:
    """One compilation of a kernel, as its launcher would trigger it.

    name: readable, unique in its file: "layer_norm-fp16-N768".
    kernel: the `@triton.jit` function.
    signature: Triton type of each argument that is not constexpr: {"input": "*fp16", "rows": "i32"}.
    constexprs: value of each constexpr argument, and of arguments Triton would specialise to 1 or None.
    num_warps, num_stages: launch configuration.
    divisible_by_16: integer arguments known to be multiples of 16 (pointers always are, as torch allocates them).
    unaligned: pointer arguments that are not known to be 16-byte aligned.
    options: further compile options such as launch_pdl or maxnreg.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 3
    divisible_by_16: tuple[str, ...] = ()
    unaligned: tuple[str, ...] = ()
    options: Mapping[str, object] = field(default_factory=dict)


TRITON_TYPES: dict[torch.dtype, str] = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bool: "i1",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
"""How Triton spells the element types, for the signatures of `AotCase`: a pointer is "*" + this."""


@triton.jit
def to_compute(x):
    """The loaded value in a type the interpreter computes with: bf16 becomes fp32 there, nothing changes on a GPU."""
    if _INTERPRET:
        if x.dtype == tl.bfloat16:
            x = x.to(tl.float32)
    return x


@triton.jit
def to_storage(x, dtype: tl.constexpr):
    """The computed (fp32) value rounded to the nearest one of an output's type: `output.dtype.element_ty`."""
    if _INTERPRET:
        if dtype == tl.bfloat16:
            x = x.to(tl.float32)
            bits = x.to(tl.uint32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
            x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)  # NaN stays NaN
    return x.to(dtype)


@triton.jit
def add_product(total, a, b, INPUT_PRECISION: tl.constexpr):
    """total + a b, float32.

    A float32 product in full precision is summed up on its own before it is added: one running sum over thousands of
    terms rounds each of them to the digits of the whole, which errs five times as much as what cuBLAS does.
    (Subtracting the negative keeps the compiler from letting the product start from the total.)
    """
    if a.dtype == tl.float32 and INPUT_PRECISION == "ieee":
        return total - tl.dot(-a, b, input_precision=INPUT_PRECISION)
    else:
        return tl.dot(a, b, total, input_precision=INPUT_PRECISION)


@triton.jit
def wait_for_previous_kernel(USE_PDL: tl.constexpr):
    """Block until every kernel before this one in the stream has finished and its writes are visible."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_kernel_start(USE_PDL: tl.constexpr):
    """Allow the next kernel of the stream to be scheduled; it still waits for this one's end before it reads."""
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
