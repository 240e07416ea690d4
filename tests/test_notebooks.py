"""The notebooks run from top to bottom on the CPU, and what is kept of their last run has no error in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebooks'")
pytest.importorskip("nbclient", reason="needs the extra 'notebooks'")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a run prints when results are the same, the number of its plots, and where the kept outputs may come from.
EXPECTED = {
    "bert.ipynb": ("same answers: True", 3, ("NVIDIA",)),
    "t5.ipynb": ("kernl.generate  same tokens: True", 2, ("NVIDIA", "no GPU")),
}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from notebooks.execute import execute

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Not the interpreter, which would be slow and is tested elsewhere: what a reader without a GPU sees.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("KERNL_T5", raising=False)
    monkeypatch.setenv("KERNL_T5_STEPS", "200")
    out = tmp_path / path.name
    execute(path, out, timeout=150)
    cells = [cell for cell in nbformat.read(out, as_version=4).cells if cell.cell_type == "code"]
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    sameness, plots, _ = EXPECTED[path.name]
    assert sameness in text
    images = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(images) >= plots


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_kept_outputs_are_those_of_a_whole_run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for position, cell in enumerate(cells, 1):
        assert cell.execution_count == position, f"not run in order from top to bottom: {cell.source}"
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    devices = EXPECTED[path.name][2]
    assert any(device in printed for device in devices), f"the kept outputs name no device of {devices}"


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == list(EXPECTED)
