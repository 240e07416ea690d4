"""Every kernel, in the configurations its op chooses, compiles for every supported GPU without spilling registers.

The kernels are compiled in one separate process per architecture (this one may be interpreting them); a case's test
only looks at its result.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aot.compile_kernels import ARCHITECTURES, SHARED_MEMORY_LIMIT, cases

CASES = [(arch, name, case.kernel.__name__) for arch in ARCHITECTURES for name, case in cases(arch)]


@functools.cache
def _results(arch: int, names: tuple[str, ...]) -> tuple[dict[str, dict[str, object]], str]:
    """What the compiling process says about each case, and its error output."""
    command = [sys.executable, "-m", "tests.aot.compile_kernels", "--arch", str(arch)]
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    for name in names:
        command += ["--case", name]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {str(line["name"]): line for line in lines}, f"exit code {done.returncode}\n{done.stderr[-3000:]}"


def _selected(request: pytest.FixtureRequest, arch: int) -> tuple[str, ...]:
    """The cases of one architecture that this run of pytest is going to look at."""
    return tuple(
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.originalname == "test_kernel_compiles"
        and item.callspec.params["arch"] == arch
    )


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        pytest.param(arch, name, id=f"{name}-sm_{arch}", marks=pytest.mark.dealt_with(f"{kernel} on sm_{arch}"))
        for arch, name, kernel in CASES
    ],
)
@pytest.mark.timeout(600)
def test_kernel_compiles(request: pytest.FixtureRequest, arch: int, name: str) -> None:
    results, errors = _results(arch, _selected(request, arch))
    assert name in results, f"the compiling process did not get to this case:\n{errors}"
    result = results[name]
    assert "error" not in result, result["error"]
    assert result["spilled_bytes"] == 0, f"{result['spilled_bytes']} bytes of registers spilled: {result}"
    shared = result["shared"]
    assert isinstance(shared, int) and shared <= SHARED_MEMORY_LIMIT[arch], (
        f"{shared} bytes of shared memory, sm_{arch} has {SHARED_MEMORY_LIMIT[arch]}"
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_case_names_are_unique(arch: int) -> None:
    names = [name for case_arch, name, _ in CASES if case_arch == arch]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
