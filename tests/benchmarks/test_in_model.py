"""Implementations compared inside a model: the search and what it writes, with times from a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import Results
from benchmarks.in_model import improve, table_of
from kernl.runtime.tuning import Trial

UP, DOWN = ("linear", "[up]"), ("linear", "[down]")


class Subject:
    """Implementation "a" of each problem is what kernl chooses; "wrong" gives wrong results, "broken" raises."""

    saves = {"b": 10.0, "c": 0.1, "wrong": 50.0}

    def measure(self, forced: dict[tuple[str, str], str]) -> tuple[dict[str, Any], Trial]:
        if "broken" in forced.values():
            raise RuntimeError("out of shared memory")
        us = 100.0 - sum(self.saves.get(name, 0.0) for name in forced.values())
        met = {
            UP: (("a", "b", "broken"), "a"),
            DOWN: (("a", "c", "wrong"), "a"),
            ("attention", "[x]"): (("a", "b"), "a"),
        }
        row = {"us": us, "reserved_mb": 1.0, "passed": "wrong" not in forced.values()}
        return row, Trial(forced=dict(forced), met=met)


def test_what_is_faster_and_right_stays(tmp_path: Path) -> None:
    results = Results("in_model", out=tmp_path)
    forced = improve(Subject(), (1, 384), ["linear"], 0.005, results)  # type: ignore[arg-type]
    assert forced == {UP: "b"}  # c gains less than the margin
    assert [row["implementation"] for row in results.rows] == ["as chosen", "b", "c", "wrong", "best found"]
    assert results.rows[-1]["us"] == 90.0
    entries = table_of({(1, 384): forced, (1, 512): forced, (8, 64): {UP: "c"}}, results, "linear")
    assert entries["[up]"]["choice"] == "b" and entries["[up]"]["in_model"]["us"] == {"[1, 384]": 90.0}
    assert table_of({(1, 384): forced}, results, "attention") == {}
