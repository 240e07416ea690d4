"""Who writes, who shares memory, what switches modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import Graph

from kernl.graph.memory import Storages, same_metadata, switches_mode, written_by
from tests.graph.helpers import capture


def nodes_of(function: Any, *args: torch.Tensor) -> Any:
    return capture(function, *args, rewriting=False, canonical=False).graph.graph


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.add_(1),
        lambda x: x.__iadd__(1),
        lambda x: x.copy_(x.clone()),
        lambda x: x.index_fill_(0, torch.tensor([0]), 1.0),
        lambda x: F.relu(x, inplace=True),
        lambda x: torch.relu_(x),
        lambda x: F.leaky_relu(x, 0.1, True),
        lambda x: F.leaky_relu(x, 0.1, inplace=True),
        lambda x: torch.exp(x.clone(), out=x),
        lambda x: x.__setitem__(0, 1.0),
        lambda x: torch.ops.aten.add_.Tensor(x, 1),
        lambda x: torch.ops.aten.mul_(x, x),
    ],
)
def test_writes_are_seen(function: Any) -> None:
    graph = nodes_of(lambda x: (function(x), x.cos())[1], torch.randn(2, 3))
    written = [target.op for node in graph.nodes for target in written_by(node)]
    assert written == ["placeholder"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + 1,
        lambda x: x[:1].mT,
        lambda x: ~(x > 0),
        lambda x: F.gelu(x).softmax(-1),
        lambda x: torch.ops.aten.add.Tensor(x, 1),
        lambda x: F.dropout(x, 0.1, training=False, inplace=True),
        lambda x: x.bool() & True,
        lambda x: torch.cat([x, x]).chunk(2)[0],
    ],
)
def test_functions_write_nothing(function: Any) -> None:
    assert not any(written_by(node) for node in nodes_of(function, torch.randn(2, 3)).nodes)


def test_an_embedding_that_renormalises_writes_its_table() -> None:
    graph = nodes_of(lambda i, w: F.embedding(i, w, max_norm=1.0), torch.tensor([0]), torch.randn(3, 4))
    (embedding,) = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.name for node in written_by(embedding)] == ["l_w_"]


def test_an_unknown_callable_may_write_all_its_operands() -> None:
    def unknown(x: Any, y: Any) -> None: ...

    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert set(written_by(graph.call_function(unknown, (x, y)))) == {x, y}


def test_views_share_memory_and_copies_do_not() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x.view(-1), x[0].chunk(2, -1)[1], F.dropout(x, 0.1, training=False), x.clone(), x + 0, y.exp()

    graph = nodes_of(function, torch.randn(2, 3, 4), torch.randn(2))
    storages = Storages(graph)
    by_name = {node.name: node for node in graph.nodes}
    (output,) = [node for node in graph.nodes if node.op == "output"]
    shared = [storages.overlap(by_name["l_x_"], node) for node in output.args[0]]
    assert shared == [True, True, True, False, False, False]


def test_merged_values_share_memory_from_then_on() -> None:
    graph = nodes_of(lambda x: (x.exp(), x.cos(), x.sin()), torch.randn(2))
    storages = Storages(graph)
    first, second, third = [node for node in graph.nodes if node.op == "call_method"]
    storages.merge(first, second)
    assert storages.overlap(first, second) and not storages.overlap(first, third)
    storages.merge(second, third)
    assert storages.overlap(first, third)


def test_a_value_without_fake_tensor_may_share_any_memory() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert Storages(graph).overlap(x, y)


def test_switches_of_mode_are_found() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x.exp()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y @ y

    graph = nodes_of(function, torch.randn(2, 2, requires_grad=True))
    names = [getattr(node.target, "__name__", "") for node in graph.nodes if switches_mode(node)]
    assert "_enter_autocast" in names and "_exit_autocast" in names
    assert len(names) == len([node for node in graph.nodes if node.op == "call_function"]) - 1  # all but the product


def test_a_module_made_on_the_way_switches_nothing() -> None:
    """The slice of a ModuleList is one: Llama and its kin run the first so many of their layers."""
    layers = torch.nn.ModuleList([torch.nn.Tanh(), torch.nn.Tanh()])

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers[:1]:
            x = layer(x)
        return x

    graph = nodes_of(function, torch.randn(2, 2))
    assert "_log_api_usage_once" in [getattr(node.target, "__name__", "") for node in graph.nodes]
    assert not any(map(switches_mode, graph.nodes))


def test_metadata_is_compared_without_the_stride_of_single_rows() -> None:
    one = torch.empty(1, 4)
    assert same_metadata(one, torch.empty_strided((1, 4), (17, 1)))
    assert not same_metadata(torch.empty(2, 4), torch.empty_strided((2, 4), (17, 1)))
    assert same_metadata(torch.empty(2, 4), torch.empty_strided((2, 4), (17, 1)), strides=False)
    assert not same_metadata(one, one.half()) and not same_metadata(one, None)
