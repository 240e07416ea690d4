"""Floats of modules are numbers again.

TorchDynamo takes a float that it has seen with two values, `LayerNorm.eps` of two models say, as an input of the graph:
a tensor of no dimensions whose `item()` is a symbol. Patterns then meet a symbol where the model has a constant, and
the input is a tensor on the CPU, which no CUDA graph takes.

Reading the symbol's value puts a guard on it: a module with another value gets a graph of its own. That is right for
what belongs to a module, which seldom changes. A float that the caller passes stays a symbol.
"""

from __future__ import annotations

import torch
from torch._dynamo.source import UnspecializedNNModuleSource
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from kernl.graph.table import placeholders_of, value_of


def with_floats_of_modules(gm: GraphModule) -> tuple[GraphModule, list[int]]:
    """The graph with numbers for the floats of modules, and the positions of the inputs that it still takes.

    TorchDynamo reads the inputs it passes off its own graph, so that one is left as it is.
    """
    placeholders = placeholders_of(gm)
    if not any(map(_is_float_of_module, placeholders)):
        return gm, list(range(len(placeholders)))
    copies: dict[Node, Node] = {}
    graph = Graph(tracer_cls=getattr(gm.graph, "_tracer_cls", None))
    graph.output(graph.graph_copy(gm.graph, copies))
    kept = []
    for position, placeholder in enumerate(placeholders):
        copy = copies[placeholder]
        if not _is_float_of_module(placeholder):
            copy._dynamo_source = getattr(placeholder, "_dynamo_source", None)  # type: ignore[attr-defined]
            kept.append(position)
            continue
        for item in list(copy.users):
            _put_number(item, float(value_of(item)))  # reading it is what guards
            graph.erase_node(item)
        graph.erase_node(copy)
    return GraphModule(gm, graph), kept


def _put_number(node: Node, number: float) -> None:
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda each: number if each is node else each)


def _is_float_of_module(placeholder: Node) -> bool:
    """Whether TorchDynamo found the value in an attribute of a module, and nothing but its `item()` is used."""
    source = getattr(placeholder, "_dynamo_source", None)
    while source is not None and not isinstance(source, UnspecializedNNModuleSource):
        source = getattr(source, "base", None)
    return (
        source is not None
        and len(placeholder.users) > 0
        and all(
            user.op == "call_method" and user.target == "item" and isinstance(value_of(user), torch.SymFloat)
            for user in placeholder.users
        )
    )
