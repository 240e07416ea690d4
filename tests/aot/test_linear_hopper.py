"""What the warp-specialised linear kernel leaves to Triton: barriers among a role's warps, fences, products.

Its source says which role waits for which. That all warps of a role are done before one thread speaks for them is for
the compiler to see to, and a version that did not would race without any test of results failing for sure.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kernl.kernels.linear_hopper import aot_cases

ROOT = Path(__file__).resolve().parents[2]
CASES = [case.name for case in aot_cases(90)]
SCRIPT = """
import sys, triton
from triton.backends.compiler import GPUTarget
from tests.aot.compile_kernels import CompileOnlyDriver, source_of
from kernl.kernels.linear_hopper import aot_cases
triton.runtime.driver.set_active(CompileOnlyDriver(90))
case = next(case for case in aot_cases(90) if case.name == sys.argv[1])
options = {"num_warps": case.num_warps, **case.options}
print(triton.compile(source_of(case), target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])
"""
TOKENS = {
    "product": r"wgmma\.mma_async",
    "commit": r"wgmma\.commit_group",
    "wait for the last": r"wgmma\.wait_group\.sync\.aligned\s+0",
    "wait for all but one": r"wgmma\.wait_group\.sync\.aligned\s+1",
    "barrier": r"\bbar(?:rier)?\.sync\s+(?:%r\d+|\d+),\s*128",
    "arrive": r"mbarrier\.arrive\.shared",
    "stage": r"stmatrix|st\.shared",
    "fence": r"fence\.proxy\.async",
    "store": r"cp\.async\.bulk\.tensor\.2d\.global",
    "wait for stores": r"cp\.async\.bulk\.wait_group",
}


@functools.cache
def steps(name: str) -> list[str]:
    """The instructions that matter, by the names above, in the order of the text."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, name], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.finditer("|".join(f"({pattern})" for pattern in TOKENS.values()), done.stdout)
    names = list(TOKENS)
    return [names[match.lastindex - 1] for match in found if match.lastindex is not None]


def before(sequence: list[str], index: int, among: tuple[str, ...]) -> list[str]:
    """The steps of some kinds before a place, last one first."""
    return [step for step in reversed(sequence[:index]) if step in among]


@pytest.mark.parametrize("name", [CASES[0], CASES[7]])
@pytest.mark.timeout(300)
def test_a_barrier_before_one_thread_speaks_for_all(name: str) -> None:
    sequence = steps(name)
    arrivals = [index for index, step in enumerate(sequence) if step == "arrive"]
    stores = [index for index, step in enumerate(sequence) if step == "store"]
    assert arrivals and stores
    for index in arrivals:
        kinds = ("barrier", "product", "wait for the last", "wait for all but one")
        assert before(sequence, index, kinds)[0] == "barrier", "a slot is released before all warps have read it"
    for index in stores:
        assert before(sequence, index, ("barrier", "fence", "stage"))[:3] == ["barrier", "fence", "stage"]


@pytest.mark.parametrize("name", [CASES[0], CASES[7]])
@pytest.mark.timeout(300)
def test_staging_is_written_after_a_wait_and_a_barrier(name: str) -> None:
    sequence = steps(name)
    for index, step in enumerate(sequence):
        if step == "store":
            first = index - 1
            while sequence[first] != "wait for stores":
                first -= 1
            assert [kept for kept in sequence[first:index] if kept != "arrive"][:3] == [
                "wait for stores",
                "barrier",
                "stage",
            ]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(300)
def test_products_stay_under_way(name: str) -> None:
    """Two consumers, each with one loop in which one block's products are waited for when the next are issued."""
    sequence = [step for step in steps(name) if step in ("commit", "wait for the last", "wait for all but one")]
    assert sequence.count("commit") == 2
    for index, step in enumerate(sequence):
        if step == "commit":
            assert sequence[index + 1] == "wait for all but one"
