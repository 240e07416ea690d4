"""Calls whose result nobody reads are not run; calls with effects are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.graph.helpers import capture


def test_unused_calls_go_and_effects_stay() -> None:
    def model(x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        torch.arange(x.shape[0]).mul(2)
        F.dropout(x, 0.5, True)  # draws random numbers: those that follow depend on it
        counter.add_(1)
        return x * 2

    counter = torch.zeros(1)
    captured = capture(model, torch.randn(3, 4), counter)
    assert sorted(captured.ops()) == ["add_", "dropout", "mul"]
    assert counter.item() == 1
