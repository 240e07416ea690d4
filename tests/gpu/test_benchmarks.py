"""Timing, the peers of the BERT benchmark and `kernl doctor`, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import bert
from kernl import cli, timing


def test_time_in_graph_leaves_host_time_out() -> None:
    """A small kernel takes a few microseconds on the GPU; launching it from Python takes longer than that."""
    x = torch.randn(1024, device="cuda")
    inside = timing.time_in_graph(lambda: torch.sin(x)).median_ms
    assert 0 < inside < timing.time_call(lambda: torch.sin(x)).median_ms
    assert inside < 0.02


def test_flushing_the_cache_makes_a_call_slower() -> None:
    x = torch.randn(4 * 2**20, device="cuda")  # 16 MB: fits the L2 cache of every GPU that has one of 32 MB and more
    if torch.cuda.get_device_properties(0).L2_cache_size < 40 * 2**20:
        pytest.skip("the L2 cache is too small to hold the operand")
    out = torch.empty((), device="cuda")
    warm = timing.time_in_graph(lambda: torch.sum(x, dim=0, out=out)).median_ms
    cold = timing.time_in_graph(lambda: torch.sum(x, dim=0, out=out), flush_l2=True).median_ms
    assert cold > warm


def test_the_matrix_product_has_a_plausible_rate() -> None:
    """2 n^3 flops in the measured time must be below what any GPU can do: else something was not waited for."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
    milliseconds = timing.time_call(lambda: x @ x).median_ms
    assert 2 * 4096**3 / (milliseconds * 1e-3) < 5e15


def test_bert_benchmark(tmp_path: Path) -> None:
    arguments = ["--model", "minilm", "--shapes", "2,32 3,48", "--peers", "eager,graph,kernl", "--calls", "5"]
    assert bert.main([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    found = json.loads(path.read_text())
    assert found["environment"]["gpu"] == torch.cuda.get_device_name()
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        assert row["passed"] and row["dtype"] == "float16" and row["reserved_mb"] >= 0


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0, capsys.readouterr().out
    text = capsys.readouterr().out
    assert torch.cuda.get_device_name() in text and "runs on cuda" in text
