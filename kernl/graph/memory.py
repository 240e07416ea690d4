"""Who writes, and who shares memory: what a rewrite must know before it moves a read.

`written_by(node)` gives the values whose memory a call writes; a callable that nobody knows may write every operand.
`Storages` tells which values share memory, through any chain of views, from the storages of their fake tensors.
`switches_mode(node)` finds the calls that turn gradients or autocast on and off. `remove_dead` deletes what no longer
counts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph.table import DROPOUTS, Tensor, call_of, does_nothing

# Modules whose functions write nothing unless their name, their schema or an argument says so.
_KNOWN_MODULES = ("torch", "_operator", "math", "builtins")
_NOT_WRITES = frozenset({"requires_grad_", "share_memory_"})
_WRITING_OPERATORS = tuple(
    getattr(operator, name)
    for name in (
        *("setitem", "delitem", "ilshift", "irshift", "imod", "imatmul", "ifloordiv", "iconcat"),
        *("iadd", "isub", "imul", "itruediv", "ipow", "iand", "ior", "ixor"),
    )
)
_SWITCHES = frozenset(
    "_enter_autocast _exit_autocast _set_grad_enabled _enter_inference_mode _exit_inference_mode".split()
)


def written_by(node: Node) -> tuple[Node, ...]:
    """The values whose memory this call writes."""
    if node.op == "call_method":
        return _written_by_method(node, str(node.target))
    if node.op != "call_function":
        return ()
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return _written_by_schema(node, target._schema)
    if isinstance(target, torch._ops.OpOverloadPacket):
        schemas = [getattr(target, name)._schema for name in target.overloads()]
        return tuple(dict.fromkeys(written for schema in schemas for written in _written_by_schema(node, schema)))
    call = call_of(node)
    if call is not None:
        if call.op.endswith("_"):
            return _nodes([call.arguments.get("input")])
        # embedding(max_norm=...) renormalises its table in place
        if call.op == "embedding" and call["max_norm"] is not None:
            return _nodes([call["weight"]])
        return ()
    if target in _WRITING_OPERATORS or node.kwargs.get("inplace") is True:
        return _nodes(node.args[:1])
    name, module = getattr(target, "__name__", ""), str(getattr(target, "__module__", None) or type(target).__module__)
    if name.endswith("_") and not name.endswith("__") and module != "_operator":
        return _nodes(node.args[:1])
    if target in (F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm):
        return tuple(node.all_input_nodes)  # running statistics
    if module.split(".")[0] in _KNOWN_MODULES and not isinstance(target, torch._ops.HigherOrderOperator):
        return _nodes([node.kwargs.get("out")])
    return tuple(node.all_input_nodes)


def _written_by_method(node: Node, name: str) -> tuple[Node, ...]:
    call = call_of(node)
    if call is not None:
        writes = call.op.endswith("_")
    elif name.startswith("__"):
        writes = name == "__setitem__" or (
            name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
        )
    else:
        writes = name.endswith("_") and name not in _NOT_WRITES
    return _nodes(node.args[:1]) if writes else _nodes([node.kwargs.get("out")])


def _written_by_schema(node: Node, schema: Any) -> tuple[Node, ...]:
    written = []
    for position, parameter in enumerate(schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            written.append(node.args[position] if position < len(node.args) else node.kwargs.get(parameter.name))
    return _nodes(written)


def _nodes(values: Iterable[Any]) -> tuple[Node, ...]:
    found: list[Node] = []
    for value in values:
        if isinstance(value, Node):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(_nodes(value))
    return tuple(found)


def switches_mode(node: Node) -> bool:
    """Whether a call turns gradients, autocast or another mode on or off, rather than computing something."""
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if name in _SWITCHES:
        return True
    if name == "_log_api_usage_once":  # a module is made on the way, such as the slice of a ModuleList
        return False
    computes = node.meta.get("example_value") is not None or call_of(node) is not None or written_by(node)
    return not (computes or "assert" in name or name.startswith("_check"))


def remove_dead(graph: Graph, nodes: Iterable[Node]) -> set[Node]:
    """Remove those of these nodes that have no users, then whatever they alone used; returns what was removed.

    Stays: what writes, what nobody knows, and, beyond `nodes` themselves, what draws random numbers (it must go on
    drawing) and operators of `torch.ops`.
    """
    removed: set[Node] = set()
    replaced = set(nodes)
    pending = sorted(replaced, reverse=True)
    while pending:
        node = pending.pop(0)
        call = call_of(node)
        if node in removed or node.users or call is None or written_by(node):
            continue
        if node not in replaced and (call.op in DROPOUTS or "::" in call.op):
            continue
        operands = node.all_input_nodes
        graph.erase_node(node)
        removed.add(node)
        pending = sorted({*pending, *operands}, reverse=True)
    return removed


def remove_unused(graph: Graph) -> set[Node]:
    """Remove the calls whose result nobody reads, as models leave them behind, with the exceptions of `remove_dead`."""
    unused = [
        node
        for node in graph.nodes
        if not node.users and (call := call_of(node)) and call.op not in DROPOUTS and "::" not in call.op
    ]
    return remove_dead(graph, unused)


class Storages:
    """Which values share memory.

    A value without a fake tensor may share memory with any other.
    """

    UNKNOWN = -1

    def __init__(self, graph: Graph) -> None:
        self._parent: dict[int, int] = {}
        self._keepalive: list[Any] = []  # storages are told apart by address: none may die while they are compared
        for node in graph.nodes:
            call = call_of(node)
            # Dropout that does nothing returns its operand, though its fake value is a copy.
            if call is not None and call.op in DROPOUTS and does_nothing(call) and isinstance(call["input"], Node):
                self.merge(node, call["input"])

    def of(self, node: Node) -> frozenset[int]:
        """The storages of a node: several for a tuple of tensors, none for numbers."""
        value = node.meta.get("example_value")
        if value is None:
            return frozenset() if node.op == "output" or switches_mode(node) else frozenset({self.UNKNOWN})
        return frozenset(self._of_value(value))

    def overlap(self, one: Node, other: Node) -> bool:
        """Whether two values may share memory."""
        mine, others = self.of(one), self.of(other)
        if self.UNKNOWN in mine or self.UNKNOWN in others:
            return bool(mine and others)
        return bool(mine & others)

    def merge(self, one: Node, other: Node) -> None:
        """Note that one value has taken the other's place, or is the same: from now on they share memory."""
        keys = sorted((self.of(one) | self.of(other)) - {self.UNKNOWN})
        for key in keys[1:]:
            self._parent[key] = keys[0]

    def _of_value(self, value: Any) -> Iterator[int]:
        if isinstance(value, Tensor):
            try:
                storage = value.untyped_storage()
            except (RuntimeError, NotImplementedError):  # sparse and other layouts have no single storage
                yield self.UNKNOWN
                return
            self._keepalive.append(storage)
            key = storage._cdata
            while (parent := self._parent.get(key, key)) != key:
                key = parent
            yield key
        elif isinstance(value, (tuple, list)):
            for each in value:
                yield from self._of_value(each)
        elif isinstance(value, dict):
            yield from self._of_value(tuple(value.values()))


def same_metadata(one: Any, other: Any, *, strides: bool = True) -> bool:
    """Whether two tensors provably have the same size, dtype and device (and strides). Adds no guard."""
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return False
    if (one.dtype, one.device, one.layout, one.dim()) != (other.dtype, other.device, other.layout, other.dim()):
        return False
    if not all(statically_known_true(mine == its) for mine, its in zip(one.shape, other.shape)):
        return False
    if not strides:
        return True
    # The stride of a dimension of length 1 is never used.
    return one.layout == torch.strided and all(
        statically_known_true(mine == its) or statically_known_true(length == 1)
        for mine, its, length in zip(one.stride(), other.stride(), one.shape)
    )
