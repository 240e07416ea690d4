"""The example of linear attention runs: it learns a little, and both forms choose the same characters."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "linear_attention_lm.py"


def test_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    example = runpy.run_path(str(EXAMPLE))
    example["main"](["--steps", "12", "--batch", "8", "--length", "48", "--generate", "25", "--device", "cpu"])
    text = capsys.readouterr().out
    first, last = (float(number) for number in text.partition("loss ")[2].partition("\n")[0].split(" -> "))
    assert last < first - 0.3
    assert "the parallel form chooses the same characters" in text
