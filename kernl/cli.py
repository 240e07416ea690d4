"""The command `kernl`.

    kernl doctor               what is installed, what will run here and what not; exit code 1 when something is broken
    kernl demo                 a real BERT answers questions over real text, plain and optimised, side by side
    kernl coverage MODEL ...   what would be fused in a model and what not, from its config alone
    kernl cache [--clear]      the choices of kernels measured on this machine

Heavy imports happen inside the commands, so that `kernl --help` answers at once and `kernl doctor` can say which import
is broken.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernl import __version__

# What pyproject.toml asks for: from (inclusive) and below (exclusive, None for any).
REQUIRED: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "torch": ((2, 11), None),
    "triton": ((3, 6), (3, 10)),
    "transformers": ((5, 17), (6,)),
    "tabulate": ((0,), None),
    "tqdm": ((0,), None),
}


@dataclass(frozen=True)
class Check:
    """One line of `kernl doctor`. state: "ok", "note" (works, with a limit) or "broken"."""

    subject: str
    state: str
    detail: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        return int(arguments.command(arguments))
    except BrokenPipeError:  # the reader (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kernl", description="Transformer models at full speed on NVIDIA GPUs.")
    parser.add_argument("--version", action="version", version=f"kernl {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what is installed here, what will run and what will not")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(command=run_doctor)

    demo = commands.add_parser("demo", help="a real BERT answers questions over real text, plain and optimised")
    demo.add_argument(
        "--model", metavar="FOLDER", help="folder of a BERT sentence encoder (default: the weights package)"
    )
    demo.add_argument("--device", choices=("cuda", "cpu"), help="default: the GPU when there is one")
    demo.add_argument("--quick", action="store_true", help="without Inductor, fewer repetitions")
    demo.add_argument("--no-inductor", action="store_true", help="leave Inductor out")
    demo.add_argument(
        "--inductor-limit", type=_positive, default=180.0, metavar="SECONDS", help="give up on Inductor after (180)"
    )
    demo.set_defaults(command=run_demo)

    coverage = commands.add_parser(
        "coverage", help="what would be fused in a model and what not, from its config alone"
    )
    coverage.add_argument(
        "models", nargs="+", metavar="MODEL", help="folder with a config.json, model name, or type (bert)"
    )
    coverage.add_argument("--attention", choices=("sdpa", "eager"), help="default: what transformers chooses")
    coverage.add_argument("--disable", action="append", default=[], metavar="PATTERN", help="leave a pattern out")
    coverage.add_argument("--json", action="store_true", help="print JSON, one list entry a model")
    coverage.set_defaults(command=run_coverage)

    cache = commands.add_parser("cache", help="the choices of kernels measured on this machine")
    cache.add_argument("--clear", action="store_true", help="forget them")
    cache.add_argument("--json", action="store_true", help="print JSON")
    cache.set_defaults(command=run_cache)
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def _fail(command: str, message: object) -> int:
    print(f"kernl {command}: {message}", file=sys.stderr)
    return 1


def run_demo(arguments: argparse.Namespace) -> int:
    import torch

    from kernl import demo

    if arguments.device == "cuda" and not torch.cuda.is_available():
        return _fail("demo", "--device cuda, but PyTorch sees no GPU; `kernl doctor` says more")
    try:
        return demo.run(
            model_folder=arguments.model,
            device=arguments.device,
            quick=arguments.quick,
            inductor=not arguments.no_inductor,
            inductor_limit_s=arguments.inductor_limit,
        )
    except FileNotFoundError as error:
        return _fail("demo", error)


def run_coverage(arguments: argparse.Namespace) -> int:
    from kernl.coverage import CoverageError, coverage

    code = 0
    collected: list[dict[str, Any]] = []
    for position, name in enumerate(arguments.models):
        try:
            result = coverage(name, attention=arguments.attention, patterns_disabled=tuple(arguments.disable))
        except (CoverageError, ValueError, TypeError) as error:
            code = _fail("coverage", error)
            collected.append({"model": name, "error": str(error)})
            continue
        collected.append(result.as_dict())
        if not arguments.json:
            print(("\n" if position else "") + str(result))
    if arguments.json:
        print(json.dumps(collected, indent=1, default=str))
    return code


def run_cache(arguments: argparse.Namespace) -> int:
    from tabulate import tabulate

    from kernl.runtime import tuning

    folder = tuning.cache_folder()
    if arguments.clear:
        removed = tuning.clear()
        print(
            json.dumps({"folder": str(folder), "removed": removed})
            if arguments.json
            else f"{folder}: {removed} removed"
        )
        return 0
    entries = tuning.entries()
    if arguments.json:
        print(json.dumps({"folder": str(folder), "entries": [asdict(entry) for entry in entries]}, indent=1))
        return 0
    print(f"{folder}: {len(entries)} choice{'s' * (len(entries) != 1)}, {tuning.cache_size()} bytes")
    if entries:
        rows = []
        for entry in entries:
            times = sorted(entry.times_us.items(), key=lambda item: item[1])
            rows.append((entry.op, entry.problem, entry.choice, ", ".join(f"{name} {us:.1f}" for name, us in times)))
        print(tabulate(rows, headers=["op", "problem", "runs", "measured (us)"], disable_numparse=True))
    return 0


def run_doctor(arguments: argparse.Namespace) -> int:
    from_imports = [check_python(), *check_packages()]
    checks = list(from_imports)
    features: list[tuple[str, str, str]] = []
    if not any(check.state == "broken" for check in from_imports):
        checks += [
            *check_gpu(),
            *check_compilers(),
            *check_caches(),
            check_backend_name(),
            check_weights(),
            *check_ops(),
        ]
        features = feature_table()
    broken = [check.subject for check in checks if check.state == "broken"]
    if arguments.json:
        keys = ("feature", "runs", "because")
        print(
            json.dumps(
                {
                    "kernl": __version__,
                    "checks": [asdict(check) for check in checks],
                    "features": [dict(zip(keys, feature)) for feature in features],
                    "broken": broken,
                },
                indent=1,
            )
        )
        return int(bool(broken))
    marks = {"ok": "ok", "note": "--", "broken": "BROKEN"}
    width = max(len(check.subject) for check in checks)
    print(f"kernl {__version__}\n")
    for check in checks:
        print(f"{marks[check.state]:>6}  {check.subject:{width}}  {check.detail}")
    if features:
        width = max(len(name) for name, _, _ in features)
        how_width = max(len(how) for _, how, _ in features)
        print("\nWhat will run here:\n")
        for name, how, why in features:
            print(f"        {name:{width}}  {how:{how_width}}  {why}".rstrip())
    print(f"\nbroken: {', '.join(broken)}" if broken else "\nnothing is broken")
    return int(bool(broken))


def check_python() -> Check:
    state = "ok" if sys.version_info >= (3, 10) else "broken"
    return Check("python", state, f"{platform.python_version()} ({sys.executable}); kernl needs 3.10 or newer")


def check_packages() -> list[Check]:
    """Installed, importable and of a version that kernl knows."""
    checks = []
    for name, (least, below) in REQUIRED.items():
        wanted = f">={_dotted(least)}" + (f",<{_dotted(below)}" if below else "") if least != (0,) else "any version"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(
                Check(name, "broken", f"not installed; pip install '{name}{'' if least == (0,) else wanted}'")
            )
            continue
        parsed = _release(version)
        if parsed < least or (below is not None and parsed >= below):
            checks.append(Check(name, "broken", f"{version}; kernl needs {wanted}"))
            continue
        try:
            importlib.import_module(name)
        except Exception as error:
            checks.append(Check(name, "broken", f"{version}, but importing it fails: {type(error).__name__}: {error}"))
            continue
        checks.append(Check(name, "ok", version))
    return checks


def _release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.13.0+cpu" is (2, 13, 0), "5.18.0rc1" is (5, 18, 0)."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_gpu() -> list[Check]:
    """The GPU, its driver, and whether PyTorch can use it."""
    import torch

    from kernl.runtime.capability import capability_of

    seen_by_driver = _nvidia_smi("name,driver_version,memory.total")
    if not torch.cuda.is_available():
        if not seen_by_driver:
            return [Check("GPU", "note", "none: kernl runs its reference path on the CPU, without a speed-up")]
        if torch.version.cuda is None:
            detail = f"{seen_by_driver[0]} is there, but this PyTorch ({torch.__version__}) is built without CUDA"
            return [Check("GPU", "note", detail)]
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and not visible.strip("-1, "):
            return [Check("GPU", "note", f"hidden by CUDA_VISIBLE_DEVICES={visible!r}")]
        detail = f"{seen_by_driver[0]} is there, but PyTorch (CUDA {torch.version.cuda}) cannot use it: driver too old?"
        return [Check("GPU", "broken", detail)]
    checks = []
    for index in range(torch.cuda.device_count()):
        capability = capability_of(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        detail = f"{capability.name}, compute capability {capability.major}.{capability.minor}, {memory:.0f} GiB"
        state = "ok" if capability.fuses_norms else "note"
        checks.append(Check(f"GPU {index}", state, detail))
    driver = seen_by_driver[0].split(", ")[1] if seen_by_driver else "version unknown"
    checks.append(Check("CUDA", "ok", f"PyTorch is built for {torch.version.cuda}, driver {driver}"))
    return checks


def _nvidia_smi(fields: str) -> list[str]:
    try:
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def check_compilers() -> list[Check]:
    """Triton compiles a launcher in C for each kernel; Inductor needs C++ on the CPU."""
    import torch

    from kernl.runtime.capability import find_cpp_compiler

    c_compiler = next(
        (path for name in (os.environ.get("CC"), "gcc", "clang", "cc") if name and (path := shutil.which(name))), None
    )
    needed = torch.cuda.is_available()
    checks = [
        Check("C compiler", "ok", c_compiler)
        if c_compiler
        else Check(
            "C compiler", "broken" if needed else "note", "none found; Triton needs one on a GPU (gcc, or set CC)"
        )
    ]
    cpp_compiler = find_cpp_compiler()
    checks.append(
        Check("C++ compiler", "ok", cpp_compiler)
        if cpp_compiler
        else Check("C++ compiler", "note", 'none found; lowering="inductor" needs one (g++, or set CXX)')
    )
    return checks


def check_caches() -> list[Check]:
    """Folders that are written to: kernl's choices, Triton's compiled kernels."""
    from kernl.runtime import tuning

    triton_folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return [_writable("kernl cache", tuning.cache_folder(), "KERNL_CACHE_DIR"),
            _writable("triton cache", triton_folder, "TRITON_CACHE_DIR")]  # fmt: skip


def _writable(subject: str, folder: Path, variable: str) -> Check:
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return Check(
            subject, "broken", f"{folder} cannot be written ({error.strerror}); set {variable} to a folder that can"
        )
    return Check(subject, "ok", f"{folder}" + ("" if existing == folder else " (made on first use)"))


def check_backend_name() -> Check:
    """Whether torch.compile finds the backend by name, which needs the entry point of an installed package."""
    points = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "kernl" in points.names:
        return Check("backend name", "ok", 'torch.compile(model, backend="kernl")')
    return Check(
        "backend name",
        "note",
        'kernl is not installed (pip install -e .): backend="kernl" is unknown, optimize_model works',
    )


def check_weights() -> Check:
    from kernl.demo import INSTALL_COMMAND, find_model_folder

    try:
        return Check("demo weights", "ok", str(find_model_folder()))
    except FileNotFoundError:
        return Check("demo weights", "note", f"not installed; {INSTALL_COMMAND}")


def check_ops() -> list[Check]:
    """Each op on a small problem, on the device that will be used, against plain PyTorch."""
    import torch
    from torch.nn import functional

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    hidden, weight, bias = draw(4, 40, 64), draw(96, 64), draw(96)
    norm_weight, norm_bias, residual = draw(64), draw(64), draw(4, 40, 64)
    query, key, value = (draw(2, 4, 40, 32) for _ in range(3))

    def plain_linear() -> torch.Tensor:
        return functional.gelu(functional.linear(hidden, weight, bias))

    def plain_add_norm() -> torch.Tensor:
        return functional.layer_norm(hidden + residual, (64,), norm_weight, norm_bias, 1e-5)

    def plain_attention() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, key, value)

    problems: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor]]] = {
        "op linear": (lambda: torch.ops.kernl.linear(hidden, weight, bias, "gelu"), plain_linear),
        "op add_layer_norm": (
            lambda: torch.ops.kernl.add_layer_norm(hidden, residual, norm_weight, norm_bias, 1e-5)[0],
            plain_add_norm,
        ),
        "op attention": (
            lambda: torch.ops.kernl.attention(query, key, value, None, None, 32**-0.5, False, "zero")[0],
            plain_attention,
        ),
    }
    checks = []
    for name, (ours, plain) in problems.items():
        try:
            importlib.import_module("kernl.ops")
            with torch.inference_mode():
                error = float((ours() - plain()).abs().max())
        except Exception as failure:
            first = next(iter(str(failure).splitlines()), "")
            checks.append(Check(name, "broken", f"{type(failure).__name__}: {first}"))
            continue
        # fp32 inputs of size 1 and 64 summands; TF32 keeps ten bits of each.
        state = "ok" if error < 0.05 else "broken"
        checks.append(Check(name, state, f"runs on {device.type}, largest difference from plain PyTorch {error:.1e}"))
    return checks


def feature_table() -> list[tuple[str, str, str]]:
    """Feature, how it runs here, and why."""
    import torch

    from kernl.runtime.capability import capability_of, find_cpp_compiler

    capability = capability_of()
    on_gpu = torch.cuda.is_available()
    too_old = "" if not on_gpu else f"compute capability {capability.major}.{capability.minor}"
    reason = too_old or "no GPU"

    def kernel(runs: bool, needs: str) -> tuple[str, str]:
        return ("Triton kernels", "") if runs else ("plain PyTorch", f"{reason}; kernels need {needs}")

    norms = kernel(capability.fuses_norms, "7.5 (Turing)")
    products = kernel(capability.fuses_gemm_and_attention, "8.0 (Ampere)")
    return [
        ("layer norm, residual + layer norm", *norms),
        ("attention, masks", *products),
        ("linear + activation, merged linears", *products),
        ("bfloat16 kernels", "yes" if capability.has_bf16 else "plain PyTorch", "" if capability.has_bf16 else reason),
        ("CUDA graphs", "yes" if on_gpu else "no", "" if on_gpu else "no GPU"),
        (
            "programmatic dependent launch",
            "yes" if capability.has_pdl else "no",
            "" if capability.has_pdl else f"{reason}; needs 9.0",
        ),
        (
            'lowering="inductor"',
            "yes" if find_cpp_compiler() else "no",
            "" if find_cpp_compiler() else "no C++ compiler",
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
