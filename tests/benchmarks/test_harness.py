"""The harness and the benchmarks built on it, tiny and on the CPU: figures exist, wrong results are noticed."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import bert, harness, report
from kernl import timing


def test_timings_are_of_the_right_size() -> None:
    def nap() -> None:
        time.sleep(0.004)

    call = timing.time_call(nap, calls=5, warmup=1)
    assert call.calls == 5 and 4 <= call.low_ms <= call.median_ms <= call.high_ms
    assert timing.time_throughput(nap, calls=3, warmup=0) >= 4
    assert timing.time_host(nap, calls=3, warmup=0) >= 4
    assert timing.time_in_graph(nap, replays=3).median_ms >= 4
    result, milliseconds = timing.time_first_call(lambda: (nap, 7)[1])
    assert result == 7 and milliseconds >= 0


def test_time_limit_and_flush() -> None:
    assert timing.time_call(lambda: time.sleep(0.01), calls=1000, warmup=0, limit_s=0.05).calls < 20
    assert timing.time_call(lambda: None, calls=3, warmup=0, flush_l2=True).calls == 3


def test_timing_percentiles() -> None:
    found = timing.Timing.of([float(value) for value in (5, 1, 3, 2, 4, 100, 6, 7, 8, 9, 10)])
    assert (found.median_ms, found.low_ms, found.high_ms) == (6, 3, 9)


def test_result_check() -> None:
    exact = torch.randn(64, 64, dtype=torch.float64)
    half = exact.half()
    right = harness.check_result(half, exact, half)
    assert right["passed"] and right["error_ratio"] == pytest.approx(1.0)
    assert not harness.check_result(half * 1.02, exact, half)["passed"]
    broken = half.clone()
    broken[3, 3] = float("nan")
    assert not harness.check_result(broken, exact, half)["passed"]


def test_rows_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = harness.Results("norm", tmp_path)
    with pytest.raises(ValueError, match="'passed'"):
        results.add(shape="4x4", us=1.0)
    results.add(shape="4x4", us=1.0, passed=True)
    results.add(shape="8x8", us=12.345, passed=False)
    kept = json.loads(results.save().read_text())
    assert kept["benchmark"] == "norm" and len(kept["rows"]) == 2
    assert {"date", "commit", "gpu", "driver", "torch", "triton", "transformers"} <= set(kept["environment"])
    assert results.path.name.endswith(f"_cpu_{results.environment['commit']}.json") or torch.cuda.is_available()
    results.print_table(["shape", "us", "missing", "passed"])
    assert "12.3" in capsys.readouterr().out
    assert results.exit_code() == 1
    assert "WRONG RESULT" in capsys.readouterr().err


def test_shapes_on_the_command_line() -> None:
    assert harness.parse_shapes("1,128 8x512") == [(1, 128), (8, 512)]
    for wrong in ("", "0,4"):
        with pytest.raises(argparse.ArgumentTypeError):
            harness.parse_shapes(wrong)


@pytest.fixture(scope="module")
def bert_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("results")
    shapes, peers = "1,16 3,20", "eager,kernl"
    code = bert.main(["--model", "tiny", "--shapes", shapes, "--peers", peers, "--calls", "3", "--out", str(out)])
    assert code == 0
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def test_bert_benchmark_runs(bert_run: dict[str, Any]) -> None:
    rows = bert_run["rows"]
    assert [(row["peer"], tuple(row["shape"])) for row in rows] == [
        ("eager", (1, 16)), ("eager", (3, 20)), ("kernl", (1, 16)), ("kernl", (3, 20))]  # fmt: skip
    for row in rows:
        assert (
            row["passed"] and row["ms"] > 0 and row["throughput_ms"] > 0 and row["host_ms"] > 0 and row["first_s"] > 0
        )
    assert all("speedup" in row and row["best_peer"] == "eager" for row in rows if row["peer"] == "kernl")


def test_bert_inputs_have_a_fifth_padding() -> None:
    model = bert.make_model("tiny", torch.float32, "cpu")
    for batch, length in ((1, 128), (8, 512), (32, 128)):
        mask = bert.make_inputs(model, batch, length)["attention_mask"]
        assert mask.shape == (batch, length)
        assert 1 - mask.float().mean().item() == pytest.approx(0.2, abs=0.01)
        assert bool((mask.diff(dim=1) <= 0).all()), "padding is on the right"


def test_floor_counts_weights_and_products() -> None:
    """BERT-base: 85 million weights in the encoder, and 2 flops a weight and token."""
    config = bert.BertConfig()
    model_inputs = {"input_ids": torch.zeros(1, 16), "attention_mask": torch.ones(1, 16)}
    bytes_moved, flops = bert.floor_of(config, model_inputs)
    assert bytes_moved == pytest.approx(2 * 86e6, rel=0.02)
    assert flops == pytest.approx(2 * 16 * 85e6, rel=0.02)


def test_a_peer_that_freezes_its_inputs_is_noticed() -> None:
    model = bert.make_model("tiny", torch.float32, "cpu")
    inputs = bert.make_inputs(model, 2, 8)
    frozen = model(**inputs).last_hidden_state.detach()
    peer = bert.Peer("frozen", lambda _: lambda _: frozen)
    with pytest.raises(AssertionError, match="same result for other inputs"):
        bert.measure_shape(peer, inputs, 2, 0)


def test_peers_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert bert.parse_peers("eager,kernl") == ["eager", "kernl"]
    with pytest.raises(SystemExit):
        bert.main(["--peers", "onnx"])
    assert "unknown peer onnx" in capsys.readouterr().err
    quick = dict(bert.peers_to_run(["inductor", "kernl"], [(1, 16), (1, 128)], quick=True))
    assert quick == {"inductor": [(1, 128)], "kernl": [(1, 16), (1, 128)]}


def _gpu_run(bert_run: dict[str, Any], folder: Path) -> None:
    environment = {**bert_run["environment"], "gpu": "Test GPU", "commit": "abc123"}
    (folder / "bert").mkdir()
    text = json.dumps({**bert_run, "environment": environment})
    (folder / "bert" / "20260101T0000_test-gpu_abc123.json").write_text(text)


def test_report_writes_the_readme(bert_run: dict[str, Any], tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    arguments = ["--results", str(tmp_path), "--readme", str(readme)]
    assert report.main(arguments) == 0
    assert "No run on a GPU" in readme.read_text()
    _gpu_run(bert_run, tmp_path)
    assert report.main([*arguments, "--check"]) == 1
    assert report.main(arguments) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| 1, 16 |" in text and "**kernl**" in text and "commit abc123" in text
    assert (tmp_path / "bert_tiny.png").stat().st_size > 5000
    assert report.main([*arguments, "--check"]) == 0


def test_report_needs_its_markers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exactly once"):
        report.with_section("no markers", "text")


def test_readme_of_the_project_is_up_to_date() -> None:
    assert report.main(["--check"]) == 0
