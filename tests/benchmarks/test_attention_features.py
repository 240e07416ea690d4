"""The benchmark of attention's features, tiny and on the CPU: each case is computed rightly by the peers there are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.attention_features import GROUPS, Case, main

CASES = [
    "2x4x9x8",
    "3x4x9x8:lengths",
    "2x4x9x8:bias",
    "2x4x9x8:t5",
    "2x4x9x8:causal:kv=2:bf16",
    "2x4x19x8:causal:window=5",
    "2x4x9x8:causal:prefix=4",
    "3x2x80x8:packed:causal",
    "2x4x33x8:decode:kv=2",
]


@pytest.mark.parametrize("case", CASES)
def test_results_are_right(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--cases", case, "--peers", "kernl,kernl-triton,sdpa-flash", "--replays", "1", "--out", str(tmp_path)]
    assert main(arguments) == 0, capsys.readouterr()
    (file,) = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert [row["peer"] for row in rows][:2] == ["kernl", "kernl-triton"]
    for row in rows:
        assert row["us"] > 0 and row["error_ratio"] < 2, row
        assert (row["backward_us"] is None) == ("decode" in case)


def test_groups_are_cases() -> None:
    cases = [Case.parse(text) for group in GROUPS.values() for text in group.split()]
    assert len(cases) == 26 and any(case.key_heads == 8 for case in cases)


@pytest.mark.parametrize("text", ["1x2x3", "1x2x3x4:sideways", "1x2x3x4:window", "1x2x3x4:kv=two"])
def test_wrong_cases_are_named(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=text.replace(".", r"\.")):
        Case.parse(text)
