"""Options, fixtures and environment shared by all tests.

Without a GPU the kernels run in Triton's interpreter, which has to be chosen before Triton is imported. Only tests that
ask for the `kernels` fixture run kernels; all others see the plain CPU path.

    pytest tests/ops --op attention --dtype fp16,bf16 --shape 2x3x40

Kernels and model families have hundreds of cases, and two versions of Triton and transformers to run on: `--share 1/2`
runs one half of the cases of each such test, `--share 2/2` the other. Files that say `pytestmark =
pytest.mark.either_end`, and all of tests/graph, are dealt out test by test, but for tests marked `both_ends`. Cases
marked `dealt_with(kind)` are dealt out kind by kind, so that each share has one of each kind at least.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import re
import subprocess
import zlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

_DTYPE_NAMES = {
    torch.float16: ("fp16", "float16", "half"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float32: ("fp32", "float32", "float"),
    torch.float64: ("fp64", "float64", "double"),
}
_FILTERS = {
    "op": "run only tests of these ops: the test's `op` parameter, or else its name test_<op> or file test_<op>.py",
    "family": "run only tests of these model families: the test's `family` parameter (bert, vit, ...)",
    "dtype": "run only tests of these types: the test's `dtype` parameter (fp16, bf16, fp32, fp64)",
    "shape": "run only tests of these shapes: the test's `shape` parameter, written 2x7x768",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kernl", "kernl: pick tests by what they compute")
    for name, text in _FILTERS.items():
        group.addoption(
            f"--{name}", action="append", default=[], metavar=name.upper(), help=f"{text}; commas or repeats add up"
        )
    group.addoption(
        "--share",
        type=_read_share,
        default=(1, 1),
        metavar="I/N",
        help="run the I-th of N shares of the tests of kernels and of those marked many_cases (each parametrised one "
        "gives about 1/N of its cases) or either_end (each file gives about 1/N of its tests)",
    )


def _read_share(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise argparse.ArgumentTypeError(f"--share {text}: accepted is I/N with 1 <= I <= N, such as 1/2")
    return int(found[1]), int(found[2])


def _not_in_share(items: list[pytest.Item], share: tuple[int, int]) -> set[pytest.Item]:
    """Tests that another share runs. Neighbours are drawn apart: they differ in the last parameter."""
    part, parts = share
    root = Path(__file__).parent
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("both_ends"):
            continue
        if item.get_closest_marker("either_end") or root / "graph" in item.path.parents:
            groups[str(item.path)].append(item)
        elif hasattr(item, "callspec") and (
            item.get_closest_marker("many_cases") or {root / "ops", root / "aot"} & set(item.path.parents)
        ):
            kind = item.get_closest_marker("dealt_with")
            groups[item.nodeid.split("[")[0] + (str(kind.args[0]) if kind else "")].append(item)
    left_out: set[pytest.Item] = set()
    for group in groups.values():
        if len(group) < parts and any(item.get_closest_marker("dealt_with") for item in group):
            continue  # too few for a case in each share: all of them run it
        shuffled = sorted(group, key=lambda item: (zlib.crc32(item.nodeid.encode()), item.nodeid))
        left_out.update(item for position, item in enumerate(shuffled) if position % parts != part - 1)
    return left_out


def _spellings(value: object) -> set[str]:
    """How a parameter's value may be written on the command line."""
    if isinstance(value, torch.dtype):
        return set(_DTYPE_NAMES.get(value, ())) | {str(value).removeprefix("torch.")}
    if isinstance(value, (tuple, list, torch.Size)):
        return {"x".join(map(str, value))}
    return {str(value).lower()}


def _matches(item: pytest.Item, name: str, wanted: set[str]) -> bool:
    callspec = getattr(item, "callspec", None)
    if callspec is not None:
        if name in callspec.params and _spellings(callspec.params[name]) & wanted:
            return True
        # Ids cover cases that arrive as one object: test_forward[attention-fp16-2x3x40].
        if wanted & set(re.split(r"[-\s]", callspec.id.lower())):
            return True
        if name in callspec.params:
            return False
    names = (item.path.stem, getattr(item, "originalname", None) or "")
    return name == "op" and any(text.removeprefix("test_") in wanted for text in names)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gpu_folder = Path(__file__).parent / "gpu"
    for item in items:
        if gpu_folder in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not HAS_CUDA:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    kept, dropped = list(items), []
    for name in _FILTERS:
        wanted = {part.strip().lower() for value in config.getoption(f"--{name}") for part in value.split(",")}
        if wanted:
            dropped += [item for item in kept if not _matches(item, name, wanted)]
            kept = [item for item in kept if _matches(item, name, wanted)]
    left_out = _not_in_share(kept, config.getoption("--share"))
    dropped += [item for item in kept if item in left_out]
    kept = [item for item in kept if item not in left_out]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@dataclass(frozen=True)
class KernelRun:
    """Where a test's kernels run, and how often they were launched since the test began."""

    device: torch.device

    def launched(self, name: str) -> int:
        from kernl.kernels.common import launches

        return launches[name]


@pytest.fixture
def kernels() -> Iterator[KernelRun]:
    """Run the Triton kernels: on the GPU, or on CPU tensors in the interpreter. Outputs are allocated full of NaN."""
    from kernl.kernels.common import launches
    from kernl.testing import interpreted_kernels, poisoned

    launches.clear()
    with poisoned():
        if HAS_CUDA:
            yield KernelRun(torch.device("cuda", torch.cuda.current_device()))
        else:
            with interpreted_kernels():
                yield KernelRun(torch.device("cpu"))


@functools.cache
def _commit() -> str:
    """The commit under test; empty outside of a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """A CPU generator whose seed follows from the test and the commit.

    So each commit draws new inputs, and what has passed or failed does so again on any machine. KERNL_TEST_SEED=random
    draws anew in every run; a failure prints the seed, and KERNL_TEST_SEED=<seed> repeats it.
    """
    given = os.environ.get("KERNL_TEST_SEED")
    if given == "random":
        seed = int.from_bytes(os.urandom(4), "little")
    else:
        seed = int(given) if given else zlib.crc32(f"{request.node.nodeid} {_commit()}".encode())
    request.node.user_properties.append(("seed", seed))
    return torch.Generator().manual_seed(seed)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    seed = dict(item.user_properties).get("seed")
    if report.failed and seed is not None:
        report.sections.append(("random inputs", f"repeat with KERNL_TEST_SEED={seed}"))
