"""One compile, many shapes: traffic of random sizes through one model, in every grad mode, with and without a mask."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kernl
from tests import tiny
from tests.runtime.fake_device import FakeDevice
from tests.test_pipeline_with_graphs import device  # noqa: F401 (a fixture)

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


def random_shapes(count: int, seed: int) -> list[tuple[int, int]]:
    """Half of them small, where batch 1 and length 1 are frequent."""
    rng = random.Random(seed)
    return [(rng.randint(1, 4), rng.randint(1, 6) if rng.random() < 0.5 else rng.randint(1, 40)) for _ in range(count)]


@pytest.mark.parametrize("masked", [True, False], ids=["masked", "unmasked"])
@pytest.mark.parametrize("mode", MODES)
def test_two_hundred_shapes(mode: str, masked: bool) -> None:
    plain, model = tiny.bert(), kernl.optimize_model(tiny.bert())
    with MODES[mode]():
        for seed, shape in enumerate(random_shapes(200, seed=len(mode) + masked)):
            inputs = tiny.text(*shape, seed)
            if not masked:
                del inputs["attention_mask"]
            got, want = model(**inputs), plain(**inputs)
            torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state, rtol=1e-4, atol=1e-5)
            assert got.last_hidden_state.requires_grad == (mode == "grad")
    report = model.kernl.report()
    assert len(report.graphs) <= 4, "general, batch 1, length 1, both"
    assert not report.calls.plain and not report.notes
    assert all(graph.plain_because is None for graph in report.graphs)


def test_all_modes_through_one_model(device: FakeDevice) -> None:  # noqa: F811
    """Modes, masks and shapes in any order; outputs of earlier calls are what they were at the end."""
    plain, kept = tiny.bert(), []
    model = kernl.optimize_model(tiny.bert(), max_graphs=16)
    rng = random.Random(5)
    for seed, shape in enumerate(random_shapes(150, seed=7)):
        inputs = tiny.text(*shape, seed)
        if rng.random() < 0.5:
            del inputs["attention_mask"]
        with MODES[rng.choice(list(MODES))]():
            kept.append((inputs, model(**inputs)))
    for inputs, got in kept:
        with torch.no_grad():
            want = plain(**inputs)
        torch.testing.assert_close(got.last_hidden_state, want.last_hidden_state, rtol=1e-4, atol=1e-5)
    # Two signatures, with and without gradients (inference mode and no_grad may share), four graphs each at most.
    assert len(model.kernl.report().graphs) <= 2 * 3 * 4
    assert device.captures > 16
    assert all(graph.runner is None or graph.runner.graph_count() <= 16 for graph in model.kernl._door.graphs)
