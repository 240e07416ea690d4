"""The series of GPU steps: logs, limits and exit codes, with small steps in place of the real ones."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.series import STEPS, Step, main, run_series

WRITES = (
    "{python} -c \"import pathlib, sys; pathlib.Path(sys.argv[1], 'rows.json').write_text('[]'); print('done')\" {out}"
)
SLEEPS = '{python} -c "import time; print(1, flush=True); time.sleep(60)"'


def test_steps_run_in_order_and_leave_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = {
        "fails": Step("{python} -c \"raise SystemExit('no')\"", 60),
        "writes": Step(WRITES, 60),
        "left out": Step(WRITES, 60),
    }
    assert main(["--out", str(tmp_path), "--steps", "fails,writes"], steps) == 1
    assert (tmp_path / "writes" / "rows.json").exists() and not (tmp_path / "left out").exists()
    assert (tmp_path / "fails.log").read_text().strip() == "no"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["fails", "exit"], ["writes", "ok"]]


def test_limits(tmp_path: Path) -> None:
    steps = {"sleeps": Step(SLEEPS, 2), "never": Step(WRITES, 1000)}
    started = time.monotonic()
    sleeps, never = run_series(["sleeps", "never"], steps, tmp_path, 50)
    assert time.monotonic() - started < 30
    assert (sleeps.state, sleeps.last) == ("out of time", "1") or sleeps.last.startswith("KeyboardInterrupt")
    assert never.state == "not started"


def test_unknown_step(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--out", "/nowhere", "--steps", "bert,nothing"])
    assert "unknown step nothing" in capsys.readouterr().err


def test_commands_name_files_that_exist() -> None:
    root = Path(__file__).resolve().parents[2]
    for step in STEPS.values():
        for word in step.command.split():
            assert not word.startswith(("benchmarks/", "tests/")) or (root / word).exists(), word
