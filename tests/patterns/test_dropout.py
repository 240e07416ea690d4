"""Dropout goes by its type, and only when it does nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from tests.graph.helpers import Captured, capture


def rewrite(function: Any, *args: torch.Tensor, **options: Any) -> Captured:
    return capture(function, *args, registry=default_registry, strict=True, **options)


@pytest.mark.parametrize(
    "dropout",
    [
        lambda x: F.dropout(x, 0.1, training=False),
        lambda x: F.dropout(x, 0.0, training=True),
        lambda x: F.dropout(x, 0.1, False, True),
        lambda x: torch.dropout(x, 0.5, False),
        lambda x: F.dropout1d(x, 0.1, training=False),
        lambda x: F.alpha_dropout(x, 0.1, training=False),
        nn.Dropout(0.3).eval(),
    ],
)
def test_dropout_that_does_nothing_goes(dropout: Any) -> None:
    x = torch.randn(2, 3, 4)
    found = rewrite(lambda x: dropout(x.exp()).cos(), x)
    assert found.ops() == ["exp", "cos"]
    assert found.report.matched("dropout") == 1 and not found.report.refusals
    torch.testing.assert_close(found.result, x.exp().cos())


def test_active_dropout_stays_and_is_reported() -> None:
    found = rewrite(lambda x: F.dropout(x.exp(), 0.5).cos(), torch.randn(64))
    assert found.ops() == ["exp", "dropout", "cos"]
    assert found.report.refused("dropout") == {"dropout is active (training)": 1}


def test_a_write_to_what_dropout_returns_reaches_its_operand() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        F.dropout(y, 0.1, training=False)[0].add_(1)
        return y.cos()

    x = torch.randn(3, 4)
    found = rewrite(function, x)
    assert found.report.matched("dropout") == 1
    torch.testing.assert_close(found.result, function(x))
