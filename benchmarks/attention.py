"""Attention, forward: every implementation the op can choose from beside PyTorch's backends, each result checked.

    python benchmarks/attention.py                   # BERT's shapes with and without padding, causal, D128
    python benchmarks/attention.py --shapes "32x12x512x64:padding 8x16x1024x128:causal"
    python benchmarks/attention.py --write-table     # merge the winners into kernl/runtime/tuned/<gpu>.json

A shape is batch x heads x tokens x head_dim, then options after colons: `padding` (lengths between 60 % and 100 % of
the tokens, 80 % on average; kernl gets bool key_padding, peers the same as a bool attn_mask), `causal`, `bias` (a dense
float mask [1, heads, tokens, tokens]). Operands are views of one [batch, tokens, 3, heads, head_dim] projection, as in
a model. Times are microseconds of GPU time per call, medians over replays of a CUDA graph whose calls rotate through
sets of inputs. The rate counts all tokens, padded ones too (halved when causal), so that rows of one shape compare. The
floor is the larger of bytes over bandwidth and visible flops over matmul rate of this GPU.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import Results, check_result, floors, peer_module, write_tuning_table
from kernl.ops.attention import implementations, reference_attention
from kernl.ops.attention_common import scoring_of_op
from kernl.runtime import tuning

_SHAPES = " ".join(
    [f"{batch}x12x{tokens}x64" for batch in (1, 8, 32) for tokens in (16, 128, 384, 512)]
    + [f"{batch}x12x{tokens}x64:padding" for batch in (1, 8, 32) for tokens in (16, 128, 384, 512)]
    + ["8x16x1024x64:causal", "8x16x1024x128", "8x16x1024x128:causal", "8x12x512x64:bias"]
)
_ROTATING_BYTES = 32 << 20
_PEERS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    tokens: int
    head_dim: int
    options: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Shape:
        sizes, *options = text.split(":")
        unknown = set(options) - {"padding", "causal", "bias"}
        if unknown:
            raise argparse.ArgumentTypeError(f"options of a shape are padding, causal and bias, got {sorted(unknown)}")
        return cls(*map(int, sizes.split("x")), frozenset(options))

    def __str__(self) -> str:
        return ":".join([f"{self.batch}x{self.heads}x{self.tokens}x{self.head_dim}", *sorted(self.options)])

    @property
    def is_causal(self) -> bool:
        return "causal" in self.options

    def flops(self, visible_keys: int) -> float:
        """Of both products, for that many keys over the whole batch."""
        return 4.0 * self.heads * self.tokens * visible_keys * self.head_dim * (0.5 if self.is_causal else 1.0)


@dataclass(frozen=True)
class Problem:
    """One set of operands."""

    shape: Shape
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None
    key_padding: torch.Tensor | None

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.shape.head_dim)

    @property
    def visible_keys(self) -> int:
        if self.key_padding is None:
            return self.shape.batch * self.shape.tokens
        return int(self.key_padding.sum())

    def implementations(self) -> tuple[dict[str, Callable[[], Any]], tuple[Any, ...], str]:
        scoring = scoring_of_op(self.attn_mask, self.key_padding, self.scale, self.shape.is_causal, "zero")
        runs, problem, default = implementations(self.query, self.key, self.value, scoring)
        return dict(runs), problem, default

    def sdpa(self, backend: SDPBackend) -> torch.Tensor:
        mask = self.attn_mask
        if self.key_padding is not None:
            mask = self.key_padding[:, None, None, :].expand(-1, 1, self.shape.tokens, -1)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                self.query, self.key, self.value, attn_mask=mask, is_causal=self.shape.is_causal, scale=self.scale
            )

    def reference(self) -> torch.Tensor:
        """float64, a batch row at a time."""
        rows = []
        for row in range(self.shape.batch):
            here = slice(row, row + 1)
            operands = (tensor[here].double() for tensor in (self.query, self.key, self.value))
            padding = None if self.key_padding is None else self.key_padding[here]
            output, _ = reference_attention(
                *operands,
                attn_mask=self.attn_mask,
                key_padding=padding,
                is_causal=self.shape.is_causal,
                scale=self.scale,
            )
            rows.append(output)
        return torch.cat(rows)

    def plain(self) -> torch.Tensor:
        """The baseline of the error: the formulas at the operands' type."""
        scores = (self.query @ self.key.mT).float() * self.scale
        if self.attn_mask is not None:
            scores = scores + self.attn_mask
        if self.key_padding is not None:
            scores = scores.masked_fill(~self.key_padding[:, None, None, :], -math.inf)
        if self.shape.is_causal:
            scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), -math.inf)
        return scores.softmax(-1).to(self.query.dtype) @ self.value


def make_problem(shape: Shape, dtype: torch.dtype, seed: int) -> Problem:
    generator = torch.Generator("cuda").manual_seed(seed)
    projection = torch.randn(
        shape.batch, shape.tokens, 3, shape.heads, shape.head_dim, device="cuda", generator=generator
    ).to(dtype)
    query, key, value = (projection[:, :, part].transpose(1, 2) for part in range(3))
    attn_mask = key_padding = None
    if "bias" in shape.options:
        attn_mask = torch.randn(1, shape.heads, shape.tokens, shape.tokens, device="cuda", generator=generator).to(
            dtype
        )
    if "padding" in shape.options:
        share = torch.linspace(0.6, 1.0, shape.batch, device="cuda") if shape.batch > 1 else torch.tensor([0.8]).cuda()
        order = torch.randperm(shape.batch, device="cuda", generator=generator)
        lengths = (share[order] * shape.tokens).round().int()
        key_padding = torch.arange(shape.tokens, device="cuda")[None, :] < lengths[:, None]
    return Problem(shape, query, key, value, attn_mask, key_padding)


def time_calls_us(calls: Sequence[Callable[[], Any]], replays: int) -> float:
    """GPU time of one call: all of them in a CUDA graph, several times over, the graph replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    rounds = max(1, 24 // len(calls))
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


def flex_attention_calls(problems: Sequence[Problem]) -> list[Callable[[], Any]]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False)
    calls: list[Callable[[], Any]] = []
    for problem in problems:
        shape, padding = problem.shape, problem.key_padding
        if problem.attn_mask is not None or (shape.is_causal and padding is not None):
            raise ValueError("no FlexAttention form of this mask here")
        block_mask = None
        if padding is not None:
            block_mask = create_block_mask(
                lambda b, h, q, k, padding=padding: padding[b, k], shape.batch, None, shape.tokens, shape.tokens
            )
        elif shape.is_causal:
            block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, shape.tokens, shape.tokens)
        calls.append(
            lambda problem=problem, block_mask=block_mask: compiled(
                problem.query, problem.key, problem.value, block_mask=block_mask, scale=problem.scale
            )
        )
    return calls


def flash_attention_4_calls(problems: Sequence[Problem]) -> list[Callable[[], Any]]:
    """FlashAttention-4 where it is installed; padding as lengths."""
    flash = peer_module("flash_attn.cute", "flash-attn-4")
    calls: list[Callable[[], Any]] = []
    for problem in problems:
        if problem.attn_mask is not None or (problem.shape.is_causal and problem.key_padding is not None):
            raise ValueError("no such mask in FlashAttention-4")
        function, options = flash.flash_attn_func, {"causal": problem.shape.is_causal}
        if problem.key_padding is not None:
            function, options["seqused_k"] = flash.flash_attn_varlen_func, problem.key_padding.sum(1, dtype=torch.int32)

        def call(problem: Problem = problem, function: Any = function, options: dict[str, Any] = options) -> Any:
            operands = (tensor.transpose(1, 2) for tensor in (problem.query, problem.key, problem.value))
            result = function(*operands, softmax_scale=problem.scale, **options)
            return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)

        calls.append(call)
    return calls


def candidates(problems: Sequence[Problem], flex: bool) -> Iterator[tuple[str, Callable[[], list[Callable[[], Any]]]]]:
    """Name of each way, and what makes its calls (making them may fail)."""
    for name, backend in _PEERS.items():
        yield (
            name,
            lambda backend=backend: [
                lambda problem=problem: problem.sdpa(backend)
                for problem in problems  # type: ignore[misc]
            ],
        )
    yield "fa4", lambda: flash_attention_4_calls(problems)
    if flex:
        yield "flex", lambda: flex_attention_calls(problems)
    for name in problems[0].implementations()[0]:
        yield name, lambda name=name: [problem.implementations()[0][name] for problem in problems]


def measure(shape: Shape, dtype: torch.dtype, replays: int, flex: bool) -> list[dict[str, Any]]:
    """One row for each implementation: its time, and whether its result is right."""
    set_bytes = 3 * 2 * shape.batch * shape.tokens * shape.heads * shape.head_dim
    problems = [make_problem(shape, dtype, seed) for seed in range(max(2, min(12, -(-_ROTATING_BYTES // set_bytes))))]
    first = problems[0]
    exact, baseline = first.reference(), first.plain()
    default = first.implementations()[2]
    flops = shape.flops(shape.batch * shape.tokens)
    moved = set_bytes * 4 / 3
    limits = floors(moved, shape.flops(first.visible_keys))
    floor_us = None if limits[0] is None or limits[1] is None else 1e3 * max(limits[0], limits[1])
    rows: list[dict[str, Any]] = []
    for name, make in candidates(problems, flex):
        row: dict[str, Any] = {"shape": str(shape), "way": name, "default": name == default, "floor_us": floor_us}
        try:
            calls = make()
            result = calls[0]()
            row |= check_result(result[0] if isinstance(result, tuple) else result, exact, baseline)
            del result
            row["us"] = time_calls_us(calls, replays)
            row["tflops"] = flops / row["us"] / 1e6
        except Exception as error:  # the other ways are still worth their figures
            text = str(error).strip().splitlines()
            row |= {"passed": True, "failure": f"{type(error).__name__}: {text[0][:160] if text else ''}"}
            torch.cuda.synchronize()
        rows.append(row)
    return rows


def compile_one(task: tuple[Shape, torch.dtype, str]) -> None:
    """Run one implementation once in a process of its own: the compiled kernel lands in Triton's cache on disk."""
    shape, dtype, name = task
    make_problem(shape, dtype, 0).implementations()[0][name]()
    torch.cuda.synchronize()


def compile_all(shapes: Sequence[Shape], dtype: torch.dtype, workers: int) -> None:
    """Compile in parallel what `measure` will run. Failures show again, with their reason, when it is measured."""
    tasks: dict[tuple[Any, ...], tuple[Shape, torch.dtype, str]] = {}
    for shape in shapes:
        for name in make_problem(shape, dtype, 0).implementations()[0]:
            if name not in ("flash", "cudnn"):
                tasks[(name, shape.head_dim, shape.options, shape.tokens > 256)] = (shape, dtype, name)
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
    peers = [name for name in timed if name in (*_PEERS, "flex", "fa4")]
    ours = [name for name in timed if name not in peers and name not in ("flash", "cudnn")]
    head = f"{shape!s:28s} floor {rows[0]['floor_us'] or math.nan:7.1f}"
    if peers and ours:
        peer, best = (min(names, key=lambda name: timed[name]) for names in (peers, ours))
        head += f"  best peer {timed[peer]:8.2f} {peer}  kernl {timed[best]:8.2f} {best}"
        head += f"  ({timed[peer] / timed[best]:.2f}x)"
    print(head)
    for row in rows:
        if "failure" in row:
            print(f"    {row['way']:28s} FAILED {row['failure']}")
        else:
            note = ("" if row["passed"] else "  WRONG RESULT") + ("  <- default" if row["default"] else "")
            print(
                f"    {row['way']:28s} {row['us']:9.2f} us {row['tflops']:7.1f} TFLOP/s"
                f"  error {row['error_ratio']:.2f} x plain's{note}"
            )
    sys.stdout.flush()


def choice_of(shape: Shape, dtype: torch.dtype, rows: Sequence[dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """Key and entry of the tuning table, from the rows of the op's own implementations."""
    runs, problem, _ = make_problem(shape, dtype, 0).implementations()
    times = {row["way"]: row["us"] for row in rows if row["passed"] and row.get("us") and row["way"] in runs}
    if not times:
        return None
    return tuning.problem_text(problem), {
        "choice": min(times, key=lambda name: times[name]),
        "times_us": {name: round(us, 2) for name, us in times.items()},
        "dropped": {row["way"]: row["failure"] for row in rows if "failure" in row and row["way"] in runs},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=_SHAPES, help='"32x12x512x64:padding 8x16x1024x128:causal"')
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"))
    parser.add_argument("--flex", action="store_true", help="compare with FlexAttention too (compiles 5 s a shape)")
    parser.add_argument("--write-table", action="store_true", help="write the fastest ways to the shipped table")
    parser.add_argument(
        "--table", type=Path, help="where --write-table writes (default: kernl/runtime/tuned/<gpu>.json)"
    )
    parser.add_argument("--replays", type=int, default=9)
    parser.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--limit-s", type=float, default=1e9, help="start no shape after that many seconds")
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the JSON file goes (default: benchmarks/results/attention)"
    )
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/attention.py needs a CUDA device", file=sys.stderr)
        return 1

    begin = time.perf_counter()
    dtype = getattr(torch, arguments.dtype)
    shapes = [Shape.parse(text) for text in arguments.shapes.split()]
    results = Results("attention", out=arguments.out)
    if arguments.workers > 1:
        compile_all(shapes, dtype, arguments.workers)
        print(f"compiled in {time.perf_counter() - begin:.1f} s", flush=True)
    choices: dict[str, dict[str, Any]] = {}
    failed = False
    for shape in shapes:
        if time.perf_counter() - begin > arguments.limit_s:
            print(f"stopped before {shape} after {time.perf_counter() - begin:.0f} s")
            break
        try:
            rows = measure(shape, dtype, arguments.replays, arguments.flex)
        except Exception as error:  # such as an illegal access, after which this process can do nothing more
            print(f"stopped at {shape}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            failed = True
            break
        print_shape(shape, rows)
        for row in rows:
            results.add(**row)
        entry = choice_of(shape, dtype, rows)
        if entry is not None:
            choices[entry[0]] = entry[1]
    print(f"rows in {results.save()}")
    if arguments.write_table:
        print(f"table in {write_tuning_table('attention', choices, arguments.table)}")
    print(f"{time.perf_counter() - begin:.0f} s in all")
    return max(results.exit_code(), int(failed))


if __name__ == "__main__":
    sys.exit(main())
