"""The benchmark of many shapes, tiny and on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import traffic


def rows_of(folder: Path) -> list[dict[str, Any]]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())["rows"]  # type: ignore[no-any-return]


def test_requests_are_what_they_are_said_to_be() -> None:
    requests = traffic.requests_of(5000)
    lengths = sorted(length for _, length in requests)
    assert lengths[0] == 8 and lengths[-1] == 512 and 55 < lengths[2500] < 75
    assert {batch for batch, _ in requests} == set(range(1, 17))
    assert requests == traffic.requests_of(5000)


def test_padding_by_hand_hides_itself() -> None:
    model = traffic.new_model("tiny")
    inputs = traffic.make_inputs(model, (3, 21), seed=0)
    larger = traffic.padded(inputs)
    assert larger["input_ids"].shape == (4, 32) and larger["attention_mask"][:3, 21:].sum() == 0
    with torch.inference_mode():
        got = model(**larger).last_hidden_state[:3, :21]
        want = model(**inputs).last_hidden_state
    assert torch.isfinite(got).all()
    # float32, after a layer norm: other tile sizes of the BLAS add up in another order.
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_small_run(tmp_path: Path) -> None:
    arguments = ["--model", "tiny", "--parts", "traffic,host", "--peers", "kernl", "--requests", "12"]
    if not torch.cuda.is_available():
        arguments[3] = "traffic"  # the peer of the other part needs a compiler
    assert traffic.main([*arguments, "--out", str(tmp_path)]) == 0
    row = rows_of(tmp_path)[0]
    assert row["requests"] == 12 and row["passed"] and row["requests_per_s"] > 0


def test_a_peer_that_is_wrong_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_peer = traffic.make_peer

    def wrong(name: str, model: Any) -> Any:
        serve, undo = make_peer(name, model)
        return lambda inputs: serve(inputs) * 1.1, undo

    monkeypatch.setattr(traffic, "make_peer", wrong)
    arguments = ["--model", "tiny", "--parts", "traffic", "--peers", "kernl", "--requests", "4"]
    assert traffic.main([*arguments, "--out", str(tmp_path)]) == 1


def test_first_calls_of_two_processes(tmp_path: Path) -> None:
    assert traffic.main(["--model", "tiny", "--parts", "first", "--shapes", "3", "--out", str(tmp_path)]) == 0
    cold, warm = rows_of(tmp_path)
    assert (cold["state"], warm["state"]) == ("cold", "warm")
    for row in (cold, warm):
        assert row["first_s"] > 0 and row["new_shapes"] == 3 and row["passed"]
        assert 0 < row["new_s_median"] <= row["new_s_p95"] <= row["new_s_worst"]


def test_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        traffic.main(["--parts", "first,second"])
    assert "unknown part second; accepted: first, host, memory, traffic" in capsys.readouterr().err
