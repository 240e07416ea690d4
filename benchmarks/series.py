"""Everything a GPU is needed for, one step after the other: tests, sanitizer, comparisons, and what they gave.

    python benchmarks/series.py --out FOLDER                                         all steps
    python benchmarks/series.py --out FOLDER --steps bert,traffic --budget-s 580     some of them, within ten minutes

Each step is a process of its own with a time limit. What it prints goes to `<out>/<step>.log`, rows kept as JSON to
`<out>/<step>/`. A step that fails or runs out of time does not stop the next; one that would not fit into what is left
of the budget is not started. At the end: a table of the steps. Exit code 1 when one of them failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import names_from

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Step:
    """command: `{python}` and `{out}` stand for the interpreter and the step's folder. seconds: its time limit."""

    command: str
    seconds: float
    environment: tuple[tuple[str, str], ...] = ()


_ONE_THREAD = (("OMP_NUM_THREADS", "1"), ("KERNL_TUNING", "off"))
# Tests in several processes where pytest-xdist is installed: they wait for compilers more than for the GPU.
# Verbose, so that the log has the name of each test that failed also when the time was not enough for a summary.
_PYTEST = "{python} -m pytest -v -rfE --tb=short {workers} "

STEPS: Mapping[str, Step] = {
    "tests": Step(_PYTEST + "tests/gpu", 600, _ONE_THREAD),
    "tests_of_ops": Step(_PYTEST + "tests/ops", 600, _ONE_THREAD),
    "sanitize": Step("make sanitize VENV=none PYTHON={python}", 300),
    "linear": Step("{python} benchmarks/in_model.py --ops linear --all-tilings --out {out}", 200),
    "attention": Step("{python} benchmarks/in_model.py --ops attention --out {out}", 120),
    "bert": Step("{python} benchmarks/bert.py --out {out}", 400),
    "lowering": Step("{python} benchmarks/bert.py --peers kernl,kernl-inductor --out {out}", 240),
    "traffic": Step("{python} benchmarks/traffic.py --limit-s 20 --out {out}", 400),
    "features": Step("{python} benchmarks/attention_features.py --out {out}", 400),
    "linear_attention": Step("{python} benchmarks/linear_attention.py --out {out}", 200),
    "generate": Step("{python} benchmarks/generate.py --out {out}", 300),
}


@dataclass(frozen=True)
class Outcome:
    """state: "ok", "exit code N", "out of time" or "not started". last: the last line that the step printed."""

    step: str
    state: str
    seconds: float
    last: str


def run_step(name: str, step: Step, out: Path, seconds: float) -> Outcome:
    """Run one step, for so many seconds at most, with its log and its rows under `out`."""
    (out / name).mkdir(parents=True, exist_ok=True)
    workers = f"-n {min(os.cpu_count() or 1, 15)}" if importlib.util.find_spec("xdist") else ""
    words = {"python": shlex.quote(sys.executable), "out": shlex.quote(str(out / name)), "workers": workers}
    environment = {**os.environ, **dict(step.environment)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    log = out / f"{name}.log"
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            shlex.split(step.command.format(**words)),
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            state = "ok" if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            _stop(process)
            state = "out of time"
    lines = log.read_text(errors="replace").strip().splitlines()
    return Outcome(name, state, time.monotonic() - started, lines[-1] if lines else "")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C first, so that results so far are printed, then the end of the process and of all that it started."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_series(names: Sequence[str], steps: Mapping[str, Step], out: Path, budget: float) -> list[Outcome]:
    """The outcomes of the steps in order. One for which less than a tenth of its limit is left is not started."""
    end = time.monotonic() + budget
    outcomes = []
    for name in names:
        step, left = steps[name], end - time.monotonic()
        if left < step.seconds / 10:
            outcomes.append(Outcome(name, "not started", 0.0, f"{left:.0f} s were left"))
            continue
        print(f"{name} ...", flush=True)
        outcomes.append(run_step(name, step, out, min(step.seconds, left)))
    return outcomes


def main(argv: Sequence[str] | None = None, steps: Mapping[str, Step] = STEPS) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=names_from(list(steps), "step"), default=list(steps))
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds for all steps together (default 3600)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="logs and rows")
    arguments = parser.parse_args(argv)
    outcomes = run_series(arguments.steps, steps, arguments.out.resolve(), arguments.budget_s)
    rows = [(outcome.step, outcome.state, f"{outcome.seconds:.0f}", outcome.last[:100]) for outcome in outcomes]
    print(tabulate(rows, headers=["step", "state", "s", "last line"]))
    return int(any(outcome.state != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
