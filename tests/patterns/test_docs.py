"""The examples of docs/patterns.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import nn

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from kernl.graph.table import SCHEMAS
from tests.graph.helpers import capture

PAGE = (Path(__file__).parents[2] / "docs" / "patterns.md").read_text()
REGISTER, MANAGE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_example_matches_and_computes_the_same() -> None:
    lines = [line for line in REGISTER.splitlines() if line.strip()]
    assert len(lines) <= 10
    linear = nn.Linear(8, 16)
    x = torch.randn(3, 8)
    plain = lambda x: torch.relu(linear(x)) ** 2  # noqa: E731
    exec(REGISTER, {})
    try:
        found = capture(plain, x, registry=default_registry, strict=True)
        assert found.report.matched("linear_squared_relu") == 1
        assert found.ops() == ["kernl::linear", "square"]
        torch.testing.assert_close(found.result, plain(x))
    finally:
        exec(MANAGE, {})
    assert "linear_squared_relu" not in default_registry


def test_the_page_names_the_priorities_and_operations_there_are() -> None:
    priorities = {name: int(number) for name, number in re.findall(r"([a-z]+) (\d+)[,.]", PAGE)}
    registered = {pattern.name: pattern.priority for pattern in default_registry}
    assert priorities["dropout"] == registered["dropout"] and priorities["linear"] == registered["linear"]
    assert priorities["norm"] == registered["layer_norm"]
    assert set(re.findall(r'op\("(\w+)"', PAGE)) <= SCHEMAS.keys()
