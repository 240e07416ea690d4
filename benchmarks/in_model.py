"""Implementations compared inside a whole model, where kernels overlap with their neighbours and share the caches.

    python benchmarks/in_model.py                                  BERT-base, the shapes of benchmarks/bert.py
    python benchmarks/in_model.py --shapes "1,384 32,512" --ops linear
    python benchmarks/in_model.py --all-tilings                    tilings of every row class, not only those on offer
    python benchmarks/in_model.py --write-table                    winners into the table shipped for this GPU

For each shape the model is captured with the implementations that kernl chooses. Then, one class of problem after the
other and the most frequent kinds first, each other implementation on offer takes its place: the model is captured again
and timed, and the fastest stays. A change has to gain `--margin` (default 0.5 %) to count: below that it is noise.

`us` is the time of a call with the calls queued back to back, in which the GPU does not wait for the host;
`reserved_mb` what the calls reserved: an implementation that needs a workspace costs memory too. `passed`: the model's
output is as near to the fp32 model's as plain fp16 is (see `check_result`).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import statistics
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

import kernl
from benchmarks.bert import CONFIGS, SHAPES, Inputs, make_inputs, make_model, release_memory, reserved_bytes
from benchmarks.harness import (
    Results,
    add_common_arguments,
    check_result,
    names_from,
    parse_shapes,
    time_throughput,
    write_tuning_table,
)
from kernl.runtime.tuning import Trial, trial_of

OPS = ("linear", "attention")
Problem = tuple[str, str]  # op, and the class of problem as text


@dataclasses.dataclass
class Subject:
    """A model under test with inputs of one shape, the exact output and that of the plain model."""

    model: Any
    inputs: Inputs
    exact: torch.Tensor
    plain: torch.Tensor
    calls: int

    def measure(self, forced: dict[Problem, str]) -> tuple[dict[str, Any], Trial]:
        """The model with these implementations, captured anew: what it takes, and which problems it met."""
        trial = Trial(forced=dict(forced))
        self.model.kernl.release()
        release_memory()
        torch.cuda.reset_peak_memory_stats()
        before = reserved_bytes()
        with trial_of(trial):
            for _ in range(3):
                output = self.model(**self.inputs).last_hidden_state
            reserved_mb = (torch.cuda.max_memory_reserved() - before) / 2**20
            checked = check_result(output, self.exact, self.plain)
            taken_ms = [time_throughput(lambda: self.model(**self.inputs), calls=self.calls) for _ in range(5)]
        return {"us": statistics.median(taken_ms) * 1e3, "reserved_mb": reserved_mb, **checked}, trial


def subjects(name: str, shapes: list[tuple[int, ...]], calls: int) -> Iterator[tuple[tuple[int, ...], Subject]]:
    plain, exact = make_model(name, torch.float16, "cuda"), make_model(name, torch.float32, "cuda")
    references = []
    for shape in shapes:
        inputs = make_inputs(plain, *shape)
        references.append((inputs, exact(**inputs).last_hidden_state, plain(**inputs).last_hidden_state))
    del exact
    model = kernl.optimize_model(plain)
    for shape, (inputs, wanted, baseline) in zip(shapes, references):
        yield shape, Subject(model, inputs, wanted, baseline, calls)


def improve(
    subject: Subject, shape: tuple[int, ...], ops: list[str], margin: float, results: Results
) -> dict[Problem, str]:
    """Implementations that make the model faster than kernl's choice, by class of problem."""

    def add(problem: Problem | None, name: str, row: dict[str, Any]) -> None:
        op, text = problem if problem is not None else ("all", "")
        row = results.add(shape=shape, op=op, problem=text, implementation=name, **row)
        wrong = "" if row["passed"] else "  WRONG"
        print(f"{shape!s:12} {row['us']:9.1f} us {row['reserved_mb']:6.0f} MB  {op} {text} {name}{wrong}", flush=True)
        results.save()

    forced: dict[Problem, str] = {}
    best, trial = subject.measure(forced)
    add(None, "as chosen", best)
    for problem in sorted(trial.met, key=lambda problem: ops.index(problem[0]) if problem[0] in ops else len(ops)):
        names, chosen = trial.met[problem]
        if problem[0] not in ops:
            continue
        for name in names:
            if name == chosen:
                continue
            try:
                row, _ = subject.measure({**forced, problem: name})
            except Exception as error:  # out of shared memory, a shape that a library refuses: not an implementation
                print(f"{shape!s:12} {problem[1]} {name}: {type(error).__name__}: {error}", flush=True)
                continue
            add(problem, name, row)
            if row["passed"] and row["us"] < best["us"] * (1 - margin):
                best, forced[problem] = row, name
    add(None, "best found", best)
    return forced


def offer_every_tiling() -> None:
    """Let linears of any number of rows take the tilings of all row classes."""
    ops: Any = importlib.import_module("kernl.ops.linear")
    tilings: Any = importlib.import_module("kernl.kernels.linear")
    classes, offered = tilings._HOPPER, ops.configs

    def configs(arch: int, rows: int, dtype: torch.dtype, *, tma: bool) -> tuple[Any, ...]:
        usual = offered(arch, rows, dtype, tma=tma)
        if arch < 90 or dtype == torch.float32 or not tma:
            return usual
        more = dict.fromkeys(config for group in classes.values() for config in group)
        split = dict.fromkeys(dataclasses.replace(config, split_k=2) for config in more if not config.persistent)
        return tuple(dict.fromkeys((*usual, *more, *split)))

    ops.configs = configs


def table_of(changes: dict[tuple[int, ...], dict[Problem, str]], results: Results, op: str) -> dict[str, Any]:
    """Entries for the shipped table: of each class of problem the name that won in most shapes."""
    votes: dict[str, Counter[str]] = {}
    for forced in changes.values():
        for (changed, text), name in forced.items():
            if changed == op:
                votes.setdefault(text, Counter())[name] += 1
    entries = {}
    for text, names in votes.items():
        name = names.most_common(1)[0][0]
        rows = [row for row in results.rows if row["problem"] == text and row["implementation"] == name]
        taken = {json.dumps(row["shape"]): round(row["us"], 2) for row in rows}
        entries[text] = {"choice": name, "times_us": {}, "dropped": {}, "in_model": {"what": "a call", "us": taken}}
    return entries


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="base")
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help="batch,length pairs: '1,128 8,512'")
    parser.add_argument("--ops", type=names_from(OPS, "op"), default=list(OPS), help=f"of {', '.join(OPS)}")
    parser.add_argument("--margin", type=float, default=0.005, help="least gain that counts (default 0.005)")
    parser.add_argument("--calls", type=int, default=30, help="calls a timing (default 30)")
    parser.add_argument("--all-tilings", action="store_true", help="tilings of every row class for linears")
    parser.add_argument("--write-table", action="store_true", help="winners into the table shipped for this GPU")
    add_common_arguments(parser)
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: only there is anything to choose from")
    if arguments.all_tilings:
        offer_every_tiling()
    shapes = arguments.shapes[:2] if arguments.quick else arguments.shapes
    results = Results("in_model", out=arguments.out)
    with torch.inference_mode():
        changes = {
            shape: improve(subject, shape, arguments.ops, arguments.margin, results)
            for shape, subject in subjects(arguments.model, shapes, arguments.calls)
        }
    if arguments.write_table:
        for op in arguments.ops:
            print(write_tuning_table(op, table_of(changes, results, op)))
    print(f"\nrows: {results.save()}")
    return results.exit_code()


if __name__ == "__main__":
    raise SystemExit(main())
