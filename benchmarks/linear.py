"""Linear layers: every implementation the op can choose from, measured side by side, each result checked.

    python benchmarks/linear.py                                  # the shapes of BERT, T5 and a 4096-wide decoder
    python benchmarks/linear.py --shapes "16x768x3072:gelu 4096x768x768+768+768"
    python benchmarks/linear.py --tune --write-table             # fill kernl/runtime/tuned/<gpu>.json

A shape is rows x K x N, with N written a+b+c for merged weights and an activation after a colon. Times are
microseconds of GPU time per call, medians over replays of a CUDA graph in which each call uses another set of weights,
so that weights come from memory, as they do in a model, and the input from the L2 cache where it fits. "torch" is plain
PyTorch: F.linear, then the activation, one linear after the other for merged weights. The floor is the larger of bytes
over bandwidth and flops over rate of this GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Results, check_result, floors, write_tuning_table
from kernl.ops.linear import (
    _Problem,
    default_implementation,
    implementations,
    problem_key,
    reference_linear,
)
from kernl.runtime import tuning

_WEIGHT_SETS_BYTES = 160 << 20
_SHAPES = (
    "16x768x768 16x768x768+768+768 16x768x3072:gelu 16x3072x768 "
    "128x768x768 128x768x768+768+768 128x768x3072:gelu 128x3072x768 "
    "384x768x768 384x768x768+768+768 384x768x3072:gelu 384x3072x768 "
    "1024x768x768 1024x768x768+768+768 1024x768x3072:gelu 1024x3072x768 "
    "4096x768x768 4096x768x768+768+768 4096x768x3072:gelu 4096x3072x768 "
    "16384x768x768 16384x768x768+768+768 16384x768x3072:gelu 16384x3072x768 "
    "1x4096x4096 16384x1024x4096:gelu 16384x4096x1024"
)
# The most common widths first: --limit-s may end the rest.
_TUNE_HIDDEN = (768, 384, 1024, 512, 4096)
_TUNE_ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_TUNE_SECONDS = 90.0


@dataclass(frozen=True)
class Shape:
    rows: int
    inner: int
    columns: tuple[int, ...]
    activation: str = "none"
    bias: bool = True

    @classmethod
    def parse(cls, text: str) -> Shape:
        sizes, _, activation = text.partition(":")
        rows, inner, columns = sizes.split("x")
        return cls(int(rows), int(inner), tuple(map(int, columns.split("+"))), activation or "none")

    def __str__(self) -> str:
        text = f"{self.rows}x{self.inner}x{'+'.join(map(str, self.columns))}"
        return text if self.activation == "none" else f"{text}:{self.activation}"

    @property
    def weight_bytes(self) -> int:
        return 2 * self.inner * sum(self.columns)

    def floor_us(self) -> float | None:
        moved = self.weight_bytes + 2 * self.rows * (self.inner + sum(self.columns))
        limits = floors(moved, 2.0 * self.rows * self.inner * sum(self.columns))
        return None if limits[0] is None or limits[1] is None else 1e3 * max(limits[0], limits[1])


def tuning_shapes() -> list[Shape]:
    """Merged projections, output projection, feed-forward up with GELU and down, of the usual widths."""
    return [
        Shape(rows, inner, columns, activation)
        for hidden in _TUNE_HIDDEN
        for inner, columns, activation in (
            (hidden, (hidden,) * 3, "none"),
            (hidden, (hidden,), "none"),
            (hidden, (4 * hidden,), "gelu"),
            (4 * hidden, (hidden,), "none"),
        )
        for rows in _TUNE_ROWS
    ]


def make_problems(shape: Shape, dtype: torch.dtype, sets: int) -> list[_Problem]:
    """The same problem with `sets` sets of weights; they share input and outputs."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def random(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, device=device, generator=generator) * scale).to(dtype)

    input = random(shape.rows, shape.inner)
    outputs = [torch.full((shape.rows, n), math.nan, dtype=dtype, device=device) for n in shape.columns]
    return [
        _Problem(
            input,
            [random(n, shape.inner, scale=shape.inner**-0.5) for n in shape.columns],
            [random(n) if shape.bias else None for n in shape.columns],
            outputs,
            shape.activation,
        )
        for _ in range(sets)
    ]


def run_torch(problem: _Problem) -> list[torch.Tensor]:
    return [
        reference_linear(problem.input, weight, bias, problem.activation)
        for weight, bias in zip(problem.weights, problem.biases, strict=True)
    ]


def time_calls_us(calls: Sequence[Callable[[], Any]], replays: int) -> float:
    """GPU time of one call: all of them in a CUDA graph, several times over, the graph replayed."""
    calls[0]()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    calls[-1]()
    torch.cuda.synchronize()
    rounds = max(1, round(24 / len(calls))) if time.perf_counter() - begin < 1e-3 else 1
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    samples = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end) / (rounds * len(calls)))
    return statistics.median(samples)


def measure(shape: Shape, dtype: torch.dtype, replays: int) -> list[dict[str, Any]]:
    """One row for each implementation: its time, and whether its result is right."""
    # With many rows the weights are a small part of what moves, and need not come from memory.
    sets = max(3, min(40 if shape.rows <= 1024 else 6, -(-_WEIGHT_SETS_BYTES // shape.weight_bytes)))
    problems = make_problems(shape, dtype, sets)
    first = problems[0]
    baseline = run_torch(first)
    exact = [
        reference_linear(first.input.float(), weight.float(), None if bias is None else bias.float(), first.activation)
        for weight, bias in zip(first.weights, first.biases, strict=True)
    ]
    default = default_implementation(first)
    rows: list[dict[str, Any]] = []
    for name in ["torch", *implementations(first)]:
        row: dict[str, Any] = {"shape": str(shape), "way": name, "default": name == default}
        try:
            if name == "torch":
                calls: list[Callable[[], Any]] = [lambda problem=problem: run_torch(problem) for problem in problems]
                results = baseline
            else:
                calls = [implementations(problem)[name] for problem in problems]
                results = first.outputs
                for output in results:
                    output.fill_(math.nan)
                calls[0]()
                torch.cuda.synchronize()
            checks = [check_result(*tensors) for tensors in zip(results, exact, baseline, strict=True)]
            row |= max(checks, key=lambda check: (not check["passed"], check["error"]))
            row["us"] = time_calls_us(calls, replays)
        except Exception as error:  # the other ways are still worth their figures
            row |= {"passed": False, "failure": f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"}
            torch.cuda.synchronize()
        rows.append(row)
    return rows


def compile_one(task: tuple[Shape, torch.dtype, str]) -> None:
    """Run one implementation once in a process of its own: the compiled kernel lands in Triton's cache on disk."""
    shape, dtype, name = task
    implementations(make_problems(shape, dtype, 1)[0])[name]()
    torch.cuda.synchronize()


def compile_all(shapes: Sequence[Shape], dtype: torch.dtype, workers: int) -> None:
    """Compile in parallel what `measure` will run. Failures show again, with their reason, when it is measured."""
    tasks: dict[tuple[Any, ...], tuple[Shape, torch.dtype, str]] = {}
    for shape in shapes:
        problem = make_problems(shape, dtype, 1)[0]
        for name in implementations(problem):
            # Persistent kernels are the same for all sizes; the others depend on K. None depends on the rows.
            size = () if name.startswith("persistent") else (shape.inner,)
            tasks[(name, size, len(shape.columns), shape.activation, shape.bias)] = (shape, dtype, name)
    context = multiprocessing.get_context("spawn")
    try:
        with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
            for future in [pool.submit(compile_one, task) for task in tasks.values()]:
                try:
                    future.result()
                except Exception as error:
                    print(f"compiling ahead: {type(error).__name__}: {str(error)[:120]}", file=sys.stderr)
    except Exception as error:
        print(f"compiling ahead stopped: {error}", file=sys.stderr)


def print_shape(shape: Shape, rows: Sequence[dict[str, Any]]) -> None:
    """One line a shape with the figures that matter, then one line an implementation."""
    timed = {row["way"]: row["us"] for row in rows if row.get("us") is not None and row["passed"]}
    floor = shape.floor_us()
    best = min((name for name in timed if name != "torch"), key=lambda name: timed[name], default=None)
    head = f"{shape!s:32s} floor {floor or math.nan:7.1f}  torch {timed.get('torch', math.nan):7.1f}"
    if best is not None:
        head += f"  cublas {timed.get('cublas', math.nan):7.1f}  best {timed[best]:7.1f} {best}"
        head += f"  ({timed.get('torch', math.nan) / timed[best]:.2f}x torch)"
    print(head)
    for row in rows:
        if "failure" in row:
            print(f"    {row['way']:48s} FAILED {row['failure']}")
        else:
            note = ("" if row["passed"] else "  WRONG RESULT") + ("  <- default" if row["default"] else "")
            print(f"    {row['way']:48s} {row['us']:8.2f}  error {row['error_ratio']:.2f} x torch's{note}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=_SHAPES, help='"16x768x3072:gelu 128x768x768+768+768"')
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--tune", action="store_true", help="measure the grid of transformer shapes instead")
    parser.add_argument("--write-table", action="store_true", help="write the fastest ways to the shipped table")
    parser.add_argument(
        "--table", type=Path, help="where --write-table writes (default: kernl/runtime/tuned/<gpu>.json)"
    )
    parser.add_argument("--replays", type=int, default=7)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument(
        "--limit-s",
        type=float,
        help=f"start no shape after that many seconds (default: {_TUNE_SECONDS:.0f} with --tune)",
    )
    parser.add_argument("--out", metavar="FOLDER", help="where the JSON file goes (default: benchmarks/results/linear)")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/linear.py needs a CUDA device", file=sys.stderr)
        return 1

    begin = time.perf_counter()
    dtype = getattr(torch, arguments.dtype)
    shapes = tuning_shapes() if arguments.tune else [Shape.parse(text) for text in arguments.shapes.split()]
    limit_s = arguments.limit_s or (_TUNE_SECONDS if arguments.tune else math.inf)
    results = Results("linear", out=arguments.out)
    if arguments.workers > 1:
        compile_all(shapes, dtype, arguments.workers)
        print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    choices: dict[str, dict[str, Any]] = {}
    failed = False
    for shape in shapes:
        if time.perf_counter() - begin > limit_s:
            print(f"stopped before {shape} after {time.perf_counter() - begin:.0f} s")
            break
        try:
            rows = measure(shape, dtype, arguments.replays)
        except Exception as error:  # such as an illegal access, after which this process can do nothing more
            print(f"stopped at {shape}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            failed = True
            break
        print_shape(shape, rows)
        for row in rows:
            results.add(**row, floor_us=shape.floor_us())
        ours = {row["way"]: row["us"] for row in rows if row["passed"] and row["way"] != "torch"}
        if ours:
            key = tuning.problem_text(problem_key(make_problems(shape, dtype, 1)[0]))
            choices[key] = {
                "choice": min(ours, key=lambda name: ours[name]),
                "times_us": {name: round(us, 2) for name, us in ours.items()},
                "dropped": {row["way"]: row["failure"] for row in rows if "failure" in row},
            }
    print(f"rows in {results.save()}")
    if arguments.write_table:
        print(f"table in {write_tuning_table('linear', choices, arguments.table)}")
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return max(results.exit_code(), int(failed))


if __name__ == "__main__":
    sys.exit(main())
