"""The README's tables and the plots, made from the JSON rows in `benchmarks/results`.

    python benchmarks/report.py            newest BERT run of each model into README.md, plots into benchmarks/results
    python benchmarks/report.py --check    only say whether README.md is up to date (exit code 1 when not)

No figure is typed by hand: what stands between the two markers in README.md comes from here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bert import add_ratios

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
OURS = ("kernl", "kernl-inductor")
PEERS = ("eager", "graph", "inductor", "reduce-overhead", *OURS)
TITLES = {
    "eager": "eager",
    "graph": "eager in a CUDA graph",
    "inductor": "Inductor",
    "reduce-overhead": "Inductor, reduce-overhead",
    "kernl": "**kernl**",
    "kernl-inductor": 'kernl, lowering="inductor"',
}

Run = dict[str, Any]


def load_runs(folder: Path) -> list[Run]:
    """All runs on a GPU below a folder, oldest first; those of one commit on one GPU and day as one run."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))]
    runs = sorted((run for run in runs if run["environment"]["gpu"]), key=lambda run: run["environment"]["date"])
    joined: dict[tuple[str, ...], Run] = {}
    for run in runs:
        stamp = run["environment"]
        key = (stamp["commit"], stamp["gpu"], stamp["torch"], stamp["triton"], stamp["date"][:10])
        joined[key] = join(joined[key], run) if key in joined else run | {"runs": 1}
    return list(joined.values())


def join(older: Run, newer: Run) -> Run:
    """Rows of both; where both measured the same, the newer. Ratios are those of the joined rows."""
    rows = {
        (row["model"], tuple(row["shape"]), row["peer"]): dict(row) for run in (older, newer) for row in run["rows"]
    }
    add_ratios(list(rows.values()))
    return newer | {"rows": list(rows.values()), "runs": older["runs"] + 1}


def newest_by_model(runs: list[Run]) -> dict[str, Run]:
    """For each model the newest run that has rows of kernl and of someone else."""
    chosen: dict[str, Run] = {}
    for run in runs:
        for model in dict.fromkeys(row["model"] for row in run["rows"]):
            peers = {row["peer"] for row in run["rows"] if row["model"] == model}
            if "kernl" in peers and peers.difference(OURS):
                chosen[model] = run
    return chosen


Rows = dict[tuple[tuple[int, ...], str], dict[str, Any]]


def rows_of(run: Run, model: str) -> tuple[Rows, list[tuple[int, ...]]]:
    """The rows of a model by shape and peer, and its shapes in the order of measuring."""
    rows = {(tuple(row["shape"]), row["peer"]): row for row in run["rows"] if row["model"] == model}
    return rows, list(dict.fromkeys(shape for shape, _ in rows))


def bert_table(run: Run, model: str) -> str:
    """Markdown: one line a shape, one column a peer, the ratio to the best peer, both floors."""
    rows, shapes = rows_of(run, model)
    peers = [peer for peer in PEERS if any((shape, peer) in rows for shape in shapes)]
    lines = [
        "| batch, length | " + " | ".join(TITLES[peer] for peer in peers)
        + " | best peer / kernl | floor: bytes / flops |",
        "|---|" + "---|" * (len(peers) + 2),
    ]  # fmt: skip
    for shape in shapes:
        cells = [_milliseconds(rows.get((shape, peer)), peer == "kernl") for peer in peers]
        kernl = rows.get((shape, "kernl"))
        ratio = floor = "–"
        if kernl is not None:
            if "speedup" in kernl:
                ratio = f"**{kernl['speedup']:.2f}x**"
                if "target" in kernl:
                    ratio += f" (target {kernl['target']}x {'met' if kernl['met'] else 'missed'})"
            bounds = [kernl["floor_bytes_ms"], kernl["floor_flops_ms"]]
            floor = " / ".join("–" if bound is None else f"{bound:.3f}" for bound in bounds)
        lines.append(f"| {_shape(shape)} | " + " | ".join([*cells, ratio, floor]) + " |")
    return "\n".join(lines)


def cost_table(run: Run, model: str) -> str:
    """Markdown: what a call costs besides its time. Beside kernl: eager and Inductor with CUDA graphs."""
    rows, shapes = rows_of(run, model)
    peers = ("kernl", "eager", "reduce-overhead")
    names = "kernl / eager / reduce-overhead"
    lines = [
        f"| batch, length | host time, ms: {names} | memory beyond the weights, MB: {names} "
        f"| first call with the shape, s: {names} |",
        "|---|---|---|---|",
    ]
    for shape in shapes:
        found = [rows.get((shape, peer)) for peer in peers]
        cells = [
            _listed(found, "host_ms", ".3f"),
            _listed(found, "reserved_mb", ".0f"),
            _listed(found, "first_s", ".2f"),
        ]
        lines.append(f"| {_shape(shape)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def targets_met(run: Run, model: str) -> str:
    """A sentence on the targets; "" for a model without any."""
    rows = [row for row in run["rows"] if row["model"] == model and row["peer"] == "kernl" and "target" in row]
    return f" Targets met: {sum(row['met'] for row in rows)} of {len(rows)}." if rows else ""


_MEMORY_OF_EAGER = 1.2
_NEW_SHAPE_SECONDS = 0.3


def limits_held(run: Run, model: str) -> str:
    """Two sentences on what else is aimed at, memory and the time until a new shape runs (the first one compiles); ""
    for a model without targets."""
    rows, shapes = rows_of(run, model)

    def memory(shape: tuple[int, ...]) -> bool:
        ours, eager, graphs = (rows[shape, peer]["reserved_mb"] for peer in ("kernl", "eager", "reduce-overhead"))
        return bool(ours <= _MEMORY_OF_EAGER * eager and ours < graphs)

    def sentence(what: str, among: list[tuple[int, ...]], holds: Callable[[tuple[int, ...]], bool]) -> str:
        missed = [shape for shape in among if not holds(shape)]
        but = f", not {' and '.join(f'({_shape(shape)})' for shape in missed)}" if missed else ""
        return f"{what}: {len(among) - len(missed)} of {len(among)} shapes{but}."

    def has(shape: tuple[int, ...], figure: str, *peers: str) -> bool:
        return all(rows.get((shape, peer), {}).get(figure) is not None for peer in peers)

    comparable = [shape for shape in shapes if has(shape, "reserved_mb", "kernl", "eager", "reduce-overhead")]
    new = [shape for shape in shapes[1:] if has(shape, "first_s", "kernl")]
    if model != "base" or not comparable or not new:
        return ""
    return (
        " "
        + sentence(f"Memory at most {_MEMORY_OF_EAGER} times eager's and below reduce-overhead's", comparable, memory)
        + " "
        + sentence(
            f"A new shape runs within {_NEW_SHAPE_SECONDS} s",
            new,
            lambda shape: bool(rows[shape, "kernl"]["first_s"] <= _NEW_SHAPE_SECONDS),
        )
    )


def _runs(run: Run) -> str:
    return "" if run["runs"] == 1 else f", rows of {run['runs']} runs, one after the other"


def _shape(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _listed(rows: list[dict[str, Any] | None], name: str, form: str) -> str:
    values = [None if row is None else row.get(name) for row in rows]
    return " / ".join("–" if value is None else format(value, form) for value in values)


def _milliseconds(row: dict[str, Any] | None, bold: bool) -> str:
    if row is None:
        return "–"
    text = f"{row['ms']:.3f}" if row["passed"] else f"{row['ms']:.3f} (wrong result)"
    return f"**{text}**" if bold else text


def section(runs: list[Run]) -> str:
    """What stands between the markers."""
    chosen = newest_by_model(runs)
    if not chosen:
        return "No run on a GPU is kept in `benchmarks/results` yet: `make bench` makes one.\n"
    parts = []
    for model, run in chosen.items():
        stamp = run["environment"]
        parts.append(
            f"BERT-{model}, fp16, mask with 20 % padding, milliseconds per call (median, host time included) on "
            f"{stamp['gpu']}: torch {stamp['torch']}, triton {stamp['triton']}, transformers {stamp['transformers']}, "
            f"commit {stamp['commit']}, {stamp['date'][:10]}{_runs(run)}.{targets_met(run, model)}\n\n"
            f"{bert_table(run, model)}\n\n"
            "What else a call costs. kernl compiles at the first shape, Inductor at each."
            f"{limits_held(run, model)}\n\n"
            f"{cost_table(run, model)}\n"
        )
    return "\n".join(parts)


def with_section(readme: str, text: str) -> str:
    """The README with `text` between its markers."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md needs the markers {BEGIN!r} and {END!r} exactly once each")
    head, rest = readme.split(BEGIN)
    _, tail = rest.split(END)
    return f"{head}{BEGIN}\n{text}{END}{tail}"


def plot(run: Run, model: str, path: Path) -> None:
    """Speed-up over eager of each peer, a group of bars a shape."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows, shapes = rows_of(run, model)
    shapes = [shape for shape in shapes if (shape, "eager") in rows]
    peers = [peer for peer in PEERS if peer != "eager" and any((shape, peer) in rows for shape in shapes)]
    figure, axes = plt.subplots(figsize=(9, 3.6))
    width = 0.8 / max(len(peers), 1)
    for place, peer in enumerate(peers):
        heights = [
            rows[shape, "eager"]["ms"] / rows[shape, peer]["ms"] if (shape, peer) in rows else 0.0 for shape in shapes
        ]
        centres = [index + (place - (len(peers) - 1) / 2) * width for index in range(len(shapes))]
        color = {"kernl": "tab:red", "kernl-inductor": "tab:orange"}.get(peer, ["0.75", "0.6", "0.45"][place % 3])
        bars = axes.bar(centres, heights, width, label=TITLES[peer].strip("*"), color=color)
        axes.bar_label(bars, fmt=lambda height: f"{height:.1f}" if height else "", fontsize=7)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(shapes)), [f"{batch} x {length}" for batch, length in shapes])
    axes.set_xlabel("batch x length")
    axes.set_ylabel("times faster than eager")
    axes.set_title(f"BERT-{model}, fp16, {run['environment']['gpu']}")
    axes.legend(fontsize=8, frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="README tables and plots from benchmarks/results.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the results")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit code 1 when the README is out of date"
    )
    arguments = parser.parse_args(argv)
    runs = load_runs(arguments.results / "bert")
    old = arguments.readme.read_text(encoding="utf-8")
    new = with_section(old, section(runs))
    if arguments.check:
        print("README.md is up to date" if new == old else "README.md is out of date: run make report")
        return int(new != old)
    arguments.readme.write_text(new, encoding="utf-8")
    for model, run in newest_by_model(runs).items():
        path = arguments.results / f"bert_{model}.png"
        plot(run, model, path)
        print(f"plot: {path}")
    print(f"tables: {arguments.readme}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
