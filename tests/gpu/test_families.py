"""Every supported encoder on a GPU: counts of the patterns, and outputs from replayed CUDA graphs, for all paddings.

One compilation for each model; sizes are the same everywhere, so that most kernels are compiled once for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

import kernl
from kernl.testing import assert_within_budget
from tests.gpu.test_end_to_end import captured
from tests.graph.helpers import Captured
from tests.patterns.test_families import FAMILIES, VOCABULARY, Family, assert_counts

DEVICE, DTYPE = "cuda", torch.float16
# The error budget compares maxima, which takes more than a handful of elements.
REPEATS, LENGTH = 4, 24


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KERNL_TUNING", "off")
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def draw(kind: Family, seed: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs, and which rows of the batch see anything: unpadded, padded right, padded left; padding only does not."""
    generator = torch.Generator().manual_seed(seed)
    if kind.inputs == "pixels":
        pixels = torch.randn(4 * REPEATS, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels.to(DEVICE, DTYPE)}, torch.ones(4 * REPEATS, dtype=torch.bool)
    mask = torch.ones(REPEATS, 4, LENGTH, dtype=torch.long)
    for row, length in zip(mask, torch.randint(1, LENGTH, (REPEATS, 2), generator=generator).tolist()):
        row[1, length[0] :] = 0
        row[2, : length[1]] = 0
        row[3] = 0
    mask = mask.flatten(0, 1)
    ids = torch.randint(3, VOCABULARY, mask.shape, generator=generator)
    return {"input_ids": ids.to(DEVICE), "attention_mask": mask.to(DEVICE)}, mask.any(1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_and_outputs(family: str, attention: str) -> None:
    kind = FAMILIES[family]
    plain = kind.build(attention).to(DEVICE, DTYPE)
    exact = copy.deepcopy(plain).double()
    model = kernl.optimize_model(copy.deepcopy(plain), strict=True)
    for seed in range(3):
        inputs, sees = draw(kind, seed)
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        found, reference, baseline = model(**inputs), exact(**wide), plain(**inputs)
        for name in found:
            # Rows of padding only have a budget of their own: an odd baseline there must not widen that of the others.
            for rows in (sees, ~sees):
                if rows.any():
                    results = (each[name].cpu()[rows] for each in (found, reference, baseline))
                    assert_within_budget(*results, name=f"{family} {attention}, call {seed}, {name}")
    report = model.kernl.report()
    assert_counts(kind, Captured(reports=[report.rewriting]))
    assert len(report.graphs) == 1 and not report.notes
    assert captured(model) == 1, "calls of one shape replay one CUDA graph"
