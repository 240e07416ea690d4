"""The benchmark of linear attention, tiny and on the CPU: rows with figures and right results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import linear_attention


def test_rows(tmp_path: Path) -> None:
    arguments = ["--shapes", "1x2x130x8 1x2x128x8", "--dtype", "fp32", "--replays", "2", "--out", str(tmp_path)]
    # 130 is no multiple of the PyTorch peer's chunk: it is left out, with a line that says so.
    assert linear_attention.main([*arguments, "--peers", "torch,fla-chunk,kernl,kernl-sequential"]) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["operation"] for row in rows} == set(linear_attention.OPERATIONS)
    assert all(row["passed"] and row["us"] > 0 and row["both_us"] > 0 for row in rows)
    kernl = [row for row in rows if row["peer"].startswith("kernl")]
    assert len(kernl) == 2 * 2 * 3
    torch_rows = [row for row in rows if row["peer"] == "torch" and row["shape"][2] == 128]
    assert len(torch_rows) == 3 and all(row["error_ratio"] < 10 for row in torch_rows)
