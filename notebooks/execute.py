"""Run a notebook in place and keep its outputs.

    python notebooks/execute.py notebooks/bert.ipynb                 on the GPU when there is one
    python notebooks/execute.py notebooks/bert.ipynb --out copy.ipynb

Needs the extra `notebooks` (nbclient, ipykernel, matplotlib).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient


def execute(path: Path, out: Path, timeout: int = 900) -> None:
    """Run all cells of `path` with this interpreter, from the root of the checkout, and write the result to `out`."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    root = Path(__file__).resolve().parent.parent
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(root)}},
        record_timing=False,
    )
    client.execute()
    # What differs from machine to machine without saying anything.
    notebook.metadata.get("language_info", {}).pop("version", None)
    nbformat.write(notebook, out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run a notebook in place and keep its outputs.")
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--out", type=Path, help="write here instead of in place")
    parser.add_argument("--timeout", type=int, default=900, help="seconds a cell may take (900)")
    arguments = parser.parse_args(argv)
    if not arguments.notebook.is_file():
        print(f"no such notebook: {arguments.notebook}", file=sys.stderr)
        return 1
    execute(arguments.notebook, arguments.out or arguments.notebook, arguments.timeout)
    print(f"written: {arguments.out or arguments.notebook}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
