"""The notebooks run from top to bottom on the CPU, and what is kept of their last run has no error in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="needs the extra 'notebooks'")
pytest.importorskip("nbclient", reason="needs the extra 'notebooks'")

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from notebooks.execute import execute

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Not the interpreter, which would be slow and is tested elsewhere: what a reader without a GPU sees.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / path.name
    execute(path, out, timeout=150)
    cells = [cell for cell in nbformat.read(out, as_version=4).cells if cell.cell_type == "code"]
    text = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "same answers: True" in text
    images = [output for cell in cells for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(images) >= 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_kept_outputs_are_those_of_a_whole_run_on_a_gpu(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for position, cell in enumerate(cells, 1):
        assert cell.execution_count == position, f"not run in order from top to bottom: {cell.source}"
        for output in cell.outputs:
            assert output.output_type != "error", cell.source
    printed = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    assert "NVIDIA" in printed, "the kept outputs are not those of a GPU"


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["bert.ipynb"]
