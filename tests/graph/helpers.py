"""Capture a function with TorchDynamo, rewrite its graph, run it. With ops of its own, to test the engine alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kernl.graph import Registry, RewriteReport, call_of, canonicalize, rewrite
from kernl.graph.table import op_name

LIB = torch.library.Library("kernl_test", "DEF")


def define(schema: str, function: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    """A test op that runs `function`, fake tensors included."""
    name = schema.partition("(")[0]
    LIB.define(schema)
    LIB.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kernl_test::{name}", fake or function, lib=LIB)
    return getattr(torch.ops.kernl_test, name).default


double = define("double(Tensor x) -> Tensor", lambda x: x * 2)
weighted_sum = define("weighted_sum(Tensor x, Tensor y, float alpha) -> Tensor", lambda x, y, alpha: x + y * alpha)
# (x + y, relu(x + y))
sum_and_relu = define("sum_and_relu(Tensor x, Tensor y) -> (Tensor, Tensor)", lambda x, y: (x + y, torch.relu(x + y)))


@dataclass
class Captured:
    """What came of a capture: results, the graphs (rewritten, when a registry was given) and their reports."""

    result: Any = None
    graphs: list[GraphModule] = field(default_factory=list)
    reports: list[RewriteReport] = field(default_factory=list)
    canonical: Counter[str] = field(default_factory=Counter)
    guards_added: int = 0
    function: Callable[..., Any] | None = None

    @property
    def graph(self) -> GraphModule:
        assert len(self.graphs) == 1, f"{len(self.graphs)} graphs"
        return self.graphs[0]

    @property
    def report(self) -> RewriteReport:
        return sum(self.reports, RewriteReport())

    def calls(self) -> list[Node]:
        return [node for node in self.graph.graph.nodes if node.op in ("call_function", "call_method")]

    def ops(self) -> list[str]:
        return [op_name(node) for node in self.calls()]

    def call(self, op: str) -> Any:
        """The arguments of the only call of this operation."""
        (found,) = [call for node in self.calls() if (call := call_of(node)) is not None and call.op == op]
        return found


def capture(
    function: Callable[..., Any],
    *args: Any,
    registry: Registry | None = None,
    rewriting: bool = True,
    canonical: bool = True,
    without: Collection[str] = (),
    dynamic: bool | None = None,
    strict: bool = False,
    grad: bool = False,
    run: bool = True,
    **kwargs: Any,
) -> Captured:
    """Compile `function` with kernl's graph passes as backend, and call it."""
    captured = Captured()

    def backend(gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        shape_envs = {
            id(mode.shape_env): mode.shape_env
            for node in gm.graph.nodes
            if (mode := getattr(node.meta.get("example_value"), "fake_mode", None)) is not None and mode.shape_env
        }
        before = sum(len(env.guards) for env in shape_envs.values())
        if canonical:
            captured.canonical += canonicalize(gm)
        if rewriting:
            captured.reports.append(rewrite(gm, registry or Registry(), without=without, strict=strict))
        gm.graph.lint()
        captured.guards_added += sum(len(env.guards) for env in shape_envs.values()) - before
        captured.graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    with torch._dynamo.config.patch(specialize_float=True), torch.set_grad_enabled(grad):
        captured.function = torch.compile(function, backend=backend, dynamic=dynamic)
        if run:
            captured.result = captured.function(*args, **kwargs)
    return captured
