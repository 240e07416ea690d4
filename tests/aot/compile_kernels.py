"""Compile kernels for a GPU that need not be there, and read off what the compiled code uses.

    python -m tests.aot.compile_kernels --arch 90 [--case norm/layer_norm-fp16 ...]

Prints one JSON object per case and line as soon as it is known, so that a compiler crash costs one case only. Runs in a
process of its own: Triton decides at import whether kernels are interpreted or compiled.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.compiler import ASTSource

import kernl.kernels
from kernl.kernels.common import INTERPRET, AotCase

ARCHITECTURES = (75, 80, 86, 89, 90, 100)

# Bytes of shared memory one program may use, the opt-in limit of each compute capability.
SHARED_MEMORY_LIMIT = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448}


def cases(arch: int) -> Iterator[tuple[str, AotCase]]:
    """Every case of every kernel file for one architecture, named "<file>/<case>"."""
    for module_info in pkgutil.iter_modules(kernl.kernels.__path__):
        module = importlib.import_module(f"kernl.kernels.{module_info.name}")
        if not hasattr(module, "aot_cases"):
            continue
        for case in module.aot_cases(arch):
            yield f"{module_info.name}/{case.name}", case


class CompileOnlyDriver(DriverBase):
    """Answers the compiler's questions about the GPU without having one."""

    def __init__(self, arch: int) -> None:
        self.target = GPUTarget("cuda", arch, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> Any:
        raise RuntimeError("this driver only compiles")

    def get_device_interface(self) -> Any:
        raise RuntimeError("this driver only compiles")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("this driver only compiles")

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise RuntimeError("this driver only compiles")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def source_of(case: AotCase) -> ASTSource:
    names = case.kernel.arg_names
    unknown = [name for name in (*case.signature, *case.constexprs) if name not in names]
    missing = [name for name in names if name not in case.signature and name not in case.constexprs]
    if unknown or missing:
        raise ValueError(f"the case does not fit the kernel's arguments: unknown {unknown}, missing {missing}")
    signature = {name: case.signature.get(name, "constexpr") for name in names}
    divisible = [
        name
        for name, kind in signature.items()
        if name in case.divisible_by_16 or (kind.startswith("*") and name not in case.unaligned)
    ]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in divisible}
    constexprs = {name: value for name, value in case.constexprs.items() if signature[name] == "constexpr"}
    return ASTSource(case.kernel, signature, constexprs, attributes)


def compile_case(case: AotCase, arch: int) -> dict[str, object]:
    """Registers, stack and shared memory of the compiled case."""
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options}
    compiled = triton.compile(source_of(case), target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    # " Function kernl_layer_norm_rows: REG:32 STACK:0 SHARED:0 LOCAL:0 ..."; spilled registers live on the stack.
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump printed no resource usage: {usage}")
    registers, stack, local = map(int, found.groups())
    return {"registers": registers, "spilled_bytes": stack + local, "shared": compiled.metadata.shared}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, required=True, choices=ARCHITECTURES)
    parser.add_argument("--case", action="append", default=[], help="compile only these (<file>/<name>)")
    arguments = parser.parse_args()
    if INTERPRET:
        parser.error("unset TRITON_INTERPRET: interpreted kernels cannot be compiled")
    triton.runtime.driver.set_active(CompileOnlyDriver(arguments.arch))

    # Two cases of one kernel may be the same compilation under different names.
    done: dict[object, dict[str, object]] = {}
    for name, case in cases(arguments.arch):
        if arguments.case and name not in arguments.case:
            continue
        key = repr((case.kernel.__name__, case.kernel.__module__, sorted(case.signature.items()))) + repr(
            (sorted(case.constexprs.items()), case.num_warps, case.num_stages, case.divisible_by_16, case.unaligned)
        )
        key += repr(sorted(case.options.items()))
        start = time.perf_counter()
        if key not in done:
            try:
                done[key] = compile_case(case, arguments.arch)
            except Exception as error:  # whatever the compiler raises is this case's result
                done[key] = {"error": f"{type(error).__name__}: {error}"}
        result = {"name": name, "seconds": round(time.perf_counter() - start, 2), **done[key]}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
