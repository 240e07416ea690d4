"""The benchmark of generation, tiny and on the CPU: rows with figures, right tokens and the loop that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import generate


def test_rows(tmp_path: Path) -> None:
    assert (
        generate.main(["--quick", "--models", "tiny", "--shapes", "2,9", "--calls", "2", "--out", str(tmp_path)]) == 0
    )
    (path,) = tmp_path.glob("*.json")
    rows = {row["peer"]: row for row in json.loads(path.read_text())["rows"]}
    assert set(rows) == set(generate.PEERS)
    assert all(row["passed"] and row["ms"] > 0 and row["same_tokens"] == 1.0 for row in rows.values())
    assert rows["kernl-fast"]["loop"] == "kernl" and rows["kernl"]["loop"] == "kernl's steps"
    assert rows["kernl-fast"]["speedup"] == rows["static"]["ms"] / rows["kernl-fast"]["ms"]


def test_wrong_tokens_do_not_pass() -> None:
    import torch

    model = generate.make_model("tiny", torch.float32, "cpu")
    inputs = generate.make_inputs(model, 1, 9)
    tokens = generate.call_of("eager", model, inputs, 6)()
    assert generate.judge(model, inputs, tokens, tokens)["passed"]
    assert not generate.judge(model, inputs, tokens, tokens.roll(1, dims=-1))["passed"]
    assert not generate.judge(model, inputs, tokens, tokens[:, :-1])["passed"]
    with pytest.raises(SystemExit):
        generate.main(["--calls", "-1"])
