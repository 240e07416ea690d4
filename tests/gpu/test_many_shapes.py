"""Traffic of many shapes on a GPU: right, with nothing overwritten, and with memory that does not grow."""

from __future__ import annotations

import random

import pytest
import torch

import kernl
from tests import tiny
from tests.gpu.test_end_to_end import bert, text, within_budget

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_two_hundred_shapes_with_every_output_kept() -> None:
    model = kernl.optimize_model(bert())
    rng, kept = random.Random(0), []
    with torch.inference_mode():
        for seed in range(200):
            inputs = text(rng.randint(1, 8), rng.randint(1, 60), seed)
            kept.append((inputs, model(**inputs), model(**inputs)))
        for _, first, second in kept:
            assert torch.equal(first.last_hidden_state, second.last_hidden_state), "a first call and a replay"
        for inputs, output, _ in kept[::7]:
            within_budget(model, output, inputs)
    report = model.kernl.report()
    assert len(report.graphs) <= 4 and not report.calls.plain and not report.notes


def test_a_soak_of_twenty_thousand_calls_holds_memory_flat() -> None:
    model = kernl.optimize_model(bert(num_hidden_layers=1))
    shapes = [(batch, length) for batch in (1, 2, 5, 8) for length in (1, 4, 9, 16, 23, 31, 40, 48, 55, 60)]
    assert len(shapes) == 40
    requests = [text(*shape, seed) for seed, shape in enumerate(shapes)]
    rng = random.Random(0)
    with torch.inference_mode():
        expected = [model(**inputs).last_hidden_state for inputs in requests]
        for inputs in requests:
            model(**inputs)
        torch.cuda.synchronize()
        reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
        for call in range(20_000):
            index = rng.randrange(len(requests))
            output = model(**requests[index]).last_hidden_state
            if call % 500 == 0:
                assert torch.equal(output, expected[index])
        del output
        torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= reserved + (4 << 20)
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)
    assert model.kernl.report().calls.direct >= 20_000


def test_shapes_beyond_max_graphs_come_and_go() -> None:
    model, plain = kernl.optimize_model(bert(), max_graphs=4), bert()
    rng = random.Random(1)
    with torch.inference_mode():
        for seed in range(60):
            inputs = tiny.text(rng.randint(1, 6), rng.randint(2, 30), seed, device="cuda")
            torch.testing.assert_close(
                model(**inputs).last_hidden_state, plain(**inputs).last_hidden_state, rtol=2e-2, atol=2e-2
            )
    assert all(graph.runner is None or graph.runner.graph_count() <= 4 for graph in model.kernl._door.graphs)
