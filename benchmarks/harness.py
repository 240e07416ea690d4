"""What every benchmark shares: an environment stamp, a result check, rows kept as JSON, a table.

A benchmark is a script that makes rows (plain dictionaries), each with its own result check, for `Results` to keep:

    results = Results("norm", out=arguments.out)
    timing = time_in_graph(lambda: kernl.ops.layer_norm(x, weight, bias, eps), flush_l2=True)
    check = check_result(kernl.ops.layer_norm(x, weight, bias, eps), reference64, baseline)
    results.add(shape="4096x768", peer="kernl", us=timing.median_ms * 1e3, **check)
    results.save()
    results.print_table(["shape", "peer", "us", "error_ratio"])

One file a run: `<date>_<gpu>_<commit>.json` with the environment and the rows. Files are never overwritten by another
GPU's or another commit's run, so that a figure can be traced to what produced it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

from kernl.timing import Timing, time_call, time_first_call, time_host, time_in_graph, time_throughput

__all__ = [
    "Results",
    "Timing",
    "add_common_arguments",
    "check_result",
    "environment",
    "names_from",
    "parse_shapes",
    "relative_error",
    "time_call",
    "time_first_call",
    "time_host",
    "time_in_graph",
    "time_throughput",
]

# Limits of the GPU, from which floors are computed: measured copy bandwidth (read + write) and 16-bit matmul rate.
# An unknown GPU gets no floor rather than a wrong one.
LIMITS = {"NVIDIA H200": {"bytes_per_s": 4.27e12, "flops_per_s": 790e12}}

# Error beyond the plain computation's own, in units of the dtype's rounding step at the size of the largest value.
ERROR_FACTOR = 2.0


def environment() -> dict[str, Any]:
    """GPU, driver, versions, commit and date of this run."""
    import importlib.metadata

    def version(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    stamp: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "gpu": None,
        "compute_capability": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        stamp["gpu"] = properties.name
        stamp["compute_capability"] = f"{properties.major}.{properties.minor}"
        stamp["driver"] = _driver_version()
    return stamp


def commit() -> str:
    """Short hash of the checked-out commit, with `-dirty` for local changes; `KERNL_COMMIT` where there is no git."""
    if given := os.environ.get("KERNL_COMMIT"):
        return given
    root = Path(__file__).resolve().parent.parent
    try:
        short = _output(["git", "-C", str(root), "rev-parse", "--short=10", "HEAD"])
        # Result files of the run itself are no change of the code.
        changed = _output(["git", "-C", str(root), "status", "--porcelain", "--", ".", ":!benchmarks/results"])
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return f"{short}-dirty" if changed else short


def _driver_version() -> str | None:
    try:
        return _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm-wise error: ||actual - reference|| / ||reference||, in float64."""
    reference = reference.double()
    return float((actual.double() - reference).norm() / reference.norm().clamp_min(1e-30))


def check_result(actual: torch.Tensor, reference: torch.Tensor, baseline: torch.Tensor) -> dict[str, Any]:
    """Is `actual` as close to the reference as plain PyTorch at the same dtype is?

    Args:
        actual: the result to judge.
        reference: the same computation in float64 (or float32 for a whole model).
        baseline: the same computation in plain PyTorch at `actual`'s dtype.

    Returns:
        `error` and `baseline_error` (norm-wise, relative), their ratio `error_ratio`, the largest absolute difference
        `max_abs`, and `passed`: the error is within twice the baseline's plus one rounding step of the dtype.
    """
    error, baseline_error = relative_error(actual, reference), relative_error(baseline, reference)
    step = torch.finfo(actual.dtype).eps
    return {
        "error": error,
        "baseline_error": baseline_error,
        "error_ratio": error / max(baseline_error, 1e-30) if baseline_error else (0.0 if error == 0 else float("inf")),
        "max_abs": float((actual.double() - reference.double()).abs().max()),
        "passed": bool(torch.isfinite(actual).all()) and error <= ERROR_FACTOR * baseline_error + step,
    }


def floors(bytes_moved: float, flops: float) -> tuple[float | None, float | None]:
    """The two lower bounds of a call on this GPU in milliseconds: by bytes moved and by flops. None where not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    limits = LIMITS.get(name)
    if limits is None:
        return None, None
    return bytes_moved / limits["bytes_per_s"] * 1e3, flops / limits["flops_per_s"] * 1e3


class Results:
    """Rows of one benchmark run, kept as `<out>/<date>_<gpu>_<commit>.json`.

    Args:
        name: the benchmark's name; `out` defaults to `benchmarks/results/<name>`.
        out: folder of the file; made when missing.
    """

    def __init__(self, name: str, out: str | Path | None = None) -> None:
        self.name = name
        self.out = Path(out) if out is not None else Path(__file__).resolve().parent / "results" / name
        self.environment = environment()
        self.rows: list[dict[str, Any]] = []

    def add(self, **row: Any) -> dict[str, Any]:
        """Append one row. Each row must say whether its result was right: the key `passed`."""
        if "passed" not in row:
            raise ValueError(f"a row needs the key 'passed' (see check_result); got {sorted(row)}")
        self.rows.append(row)
        return row

    @property
    def path(self) -> Path:
        moment = self.environment["date"].replace("-", "").replace(":", "")[:13]
        gpu = re.sub(r"[^A-Za-z0-9]+", "-", self.environment["gpu"] or "cpu").strip("-").lower()
        return self.out / f"{moment}_{gpu}_{self.environment['commit']}.json"

    def save(self) -> Path:
        """Write the file (again): call it after every row, so that a run cut short keeps what it has."""
        self.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"benchmark": self.name, "environment": self.environment, "rows": self.rows}, indent=1)
        partial = self.path.with_suffix(".partial")
        partial.write_text(text + "\n")
        partial.replace(self.path)
        return self.path

    def table(self, columns: Sequence[str] | None = None, rows: Iterable[dict[str, Any]] | None = None) -> str:
        """The rows as text; `columns` picks and orders, missing values are left empty."""
        chosen = list(self.rows if rows is None else rows)
        names = list(columns) if columns is not None else list(dict.fromkeys(key for row in chosen for key in row))
        body = [[_cell(row.get(name)) for name in names] for row in chosen]
        return tabulate(body, headers=names, tablefmt="simple", disable_numparse=True, stralign="right")

    def print_table(self, columns: Sequence[str] | None = None) -> None:
        stamp = self.environment
        print(f"\n{self.name} on {stamp['gpu'] or 'the CPU'}, torch {stamp['torch']}, triton {stamp['triton']}, "
              f"transformers {stamp['transformers']}, commit {stamp['commit']}")  # fmt: skip
        print(self.table(columns))

    def exit_code(self) -> int:
        """1 when a row's result was wrong: a fast wrong answer is a failure."""
        wrong = [row for row in self.rows if not row["passed"]]
        for row in wrong:
            print(f"WRONG RESULT: {row}", file=sys.stderr)
        return 1 if wrong else 0


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    if isinstance(value, (tuple, list)):
        return ",".join(str(item) for item in value)
    return str(value)


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """`--out FOLDER` and `--quick`, as every benchmark has them."""
    parser.add_argument("--out", metavar="FOLDER", help="where the JSON file goes (default: benchmarks/results/<name>)")
    parser.add_argument("--quick", action="store_true", help="fewer shapes and calls")


def parse_shapes(text: str) -> list[tuple[int, ...]]:
    """`"1,128 8x512"` to `[(1, 128), (8, 512)]`."""
    shapes = [tuple(int(size) for size in re.split("[x,]", part)) for part in text.split()]
    if not shapes or any(size <= 0 for shape in shapes for size in shape):
        raise argparse.ArgumentTypeError(f"shapes are positive sizes such as '1,128 8,512', got {text!r}")
    return shapes


def names_from(accepted: Sequence[str], what: str) -> Callable[[str], list[str]]:
    """For argparse: `"eager,kernl"` to a list; an unknown one is an error that says what is accepted."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in accepted]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown {what} {', '.join(unknown)}; accepted: {', '.join(accepted)}")
        return names

    return parse


def run_if_available(name: str, make: Callable[[], Callable[[], Any]]) -> Callable[[], Any] | None:
    """`make()`, or None with a line that says why when a peer is not installed or cannot run here."""
    try:
        return make()
    except Exception as error:
        print(f"peer {name} left out: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


def peer_module(module: str, package: str) -> Any:
    """The module of a peer. Raises ImportError naming the package when it is not installed or does not work here."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{package} cannot be imported, pip install 'kernl[bench]' has it ({error})") from error


def write_tuning_table(op: str, choices: dict[str, dict[str, Any]], path: Path | None = None) -> Path:
    """Merge an op's measured choices into the table shipped for this GPU (or into `path`); the others in it stay."""
    import triton

    from kernl.runtime import tuning

    gpu = torch.cuda.get_device_name()
    if path is None:
        path = Path(tuning.__file__).parent / "tuned" / f"{tuning.gpu_slug(gpu)}.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"choices": {}}
    content |= {
        "format": 1,
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "kernels": tuning.kernel_source_hash(),
    }
    content["choices"].setdefault(op, {}).update(choices)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return path
