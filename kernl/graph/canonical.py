"""Bring a torch-level Dynamo graph into the form that patterns are written for.

How operations are spelled needs no edit: `call_of` (see `kernl.graph.table`) reads every spelling alike. `canonicalize`
changes two things only, and only where nobody can tell the difference:

* a node that returns its own operand goes away: `to` with the dtype and device the operand has, `view` or `expand` to
  the size it has, `contiguous` of something contiguous, adding the integer 0 to integers;
* an in-place operation becomes the functional one. Where somebody else could see the write (an input, another view
  that is used later), it stays a write, and reads as one (`add_`).

Anything else, and anything not understood, is left exactly as it was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kernl.graph.memory import Storages, remove_dead, same_metadata, switches_mode, written_by
from kernl.graph.table import Call, Tensor, call_of, value_of

_MAY_RETURN_OPERAND = frozenset(
    ["to", "contiguous", "view", "reshape", "expand", "expand_as", "view_as", "flatten", "permute"]
)
# In-place changes of size or stride reach every name of the tensor object itself: then nothing is edited at all.
_METADATA_WRITES = frozenset(
    "unsqueeze_ squeeze_ transpose_ t_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_ detach_".split()
)
# In-place operation -> the function that returns what it writes, and how many arguments that takes by position.
_FUNCTIONAL: dict[str, tuple[Callable[..., Any], int]] = {
    "add_": (torch.add, 2),
    "sub_": (torch.sub, 2),
    "mul_": (torch.mul, 2),
    "div_": (torch.div, 2),
    "pow_": (torch.pow, 2),
    "and_": (torch.bitwise_and, 2),
    "or_": (torch.bitwise_or, 2),
    "xor_": (torch.bitwise_xor, 2),
    "masked_fill_": (torch.masked_fill, 3),
    "clamp_": (torch.clamp, 3),
    "neg_": (torch.neg, 1),
    "exp_": (torch.exp, 1),
    "sqrt_": (torch.sqrt, 1),
    "rsqrt_": (torch.rsqrt, 1),
    "tanh_": (torch.tanh, 1),
    "sigmoid_": (torch.sigmoid, 1),
    "relu_": (torch.relu, 1),
    "silu_": (F.silu, 1),
    "dropout_": (F.dropout, 3),
}


def canonicalize(gm: GraphModule) -> Counter[str]:
    """Edit a graph in place as this module's docstring says. Returns how many edits of each kind were made."""
    done: Counter[str] = Counter()
    nodes = list(gm.graph.nodes)
    if any(node.op == "call_method" and node.target in _METADATA_WRITES for node in nodes):
        return done
    if any(written_by(node) for node in nodes):
        done += _functionalize(gm)
    done += _drop_identities(gm)
    if done:
        gm.recompile()
    return done


def _drop_identities(gm: GraphModule) -> Counter[str]:
    done: Counter[str] = Counter()
    storages = Storages(gm.graph)
    nodes = list(gm.graph.nodes)
    written = {storage for node in nodes for target in written_by(node) for storage in storages.of(target)}
    returned = {node for output in nodes if output.op == "output" for node in output.all_input_nodes}
    handed_out = {storage for node in returned for storage in storages.of(node)}
    switches = any(map(switches_mode, nodes))
    for node in nodes:
        call = call_of(node) if node.users else None
        if call is None or not isinstance(call.arguments.get("input"), Node):
            continue
        operand: Node = call["input"]
        if call.op in _MAY_RETURN_OPERAND:
            # `to` and `contiguous` return the very object. A view is another one, which a caller can tell apart, and
            # one made under no_grad passes no gradient on.
            same_object = call.op in ("to", "contiguous")
            dropped = (same_object or not (switches or node in returned)) and _returns_operand(node, operand, storages)
        elif call.op == "add":
            # x + 0 has memory of its own: nobody may write it or x, or be handed it.
            memory = storages.of(node) | storages.of(operand)
            seen = bool(memory & written) or bool(storages.of(node) & handed_out)
            dropped = _adds_zero(node, call) and not seen and Storages.UNKNOWN not in memory | written
        else:
            continue
        if dropped:
            node.replace_all_uses_with(operand)
            remove_dead(gm.graph, [node])
            done[f"{call.op} that changes nothing"] += 1
    return done


def _returns_operand(node: Node, operand: Node, storages: Storages) -> bool:
    mine, its = value_of(node), value_of(operand)
    return (
        same_metadata(mine, its)
        and storages.of(node) == storages.of(operand)
        and Storages.UNKNOWN not in storages.of(node)
        and statically_known_true(mine.storage_offset() == its.storage_offset())
    )


def _adds_zero(node: Node, call: Call) -> bool:
    value = value_of(call["input"])
    return (
        type(call["other"]) is int
        and call["other"] == 0
        and isinstance(value, Tensor)
        and not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool)
        and same_metadata(value_of(node), value)
    )


def _functionalize(gm: GraphModule) -> Counter[str]:
    """`x.add_(y)` -> `x' = x + y`, where later uses of x become uses of x'."""
    done: Counter[str] = Counter()
    storages = Storages(gm.graph)
    for node in list(gm.graph.nodes):
        if switches_mode(node):
            # Under no_grad an in-place operation keeps the history of what it writes, the functional one does not.
            break
        call = call_of(node)
        if call is None or call.op not in _FUNCTIONAL:
            continue
        target = call["input"]
        if not isinstance(target, Node) or not _write_is_private(gm, node, target, storages):
            continue
        function, by_position = _FUNCTIONAL[call.op]
        arguments = list(call.arguments.items())
        args = tuple(value for _, value in arguments[:by_position])
        kwargs = {name: value for name, value in arguments[by_position:] if value not in (1, None)}
        if not _gives_same(function, args, kwargs, value_of(target)):
            continue
        with gm.graph.inserting_before(node):
            functional = gm.graph.call_function(function, args, kwargs)
        # The fake value of the written tensor: so that what was an alias of it still counts as one.
        functional.meta = dict(node.meta, example_value=value_of(target))
        node.replace_all_uses_with(functional)
        gm.graph.erase_node(node)
        target.replace_all_uses_with(functional, delete_user_cb=functional.__lt__)
        done[f"{call.op} made functional"] += 1
    return done


def _write_is_private(gm: GraphModule, node: Node, target: Node, storages: Storages) -> bool:
    """Whether `target`'s memory belongs to the graph and no other name for it is used after `node` writes it."""
    for other in gm.graph.nodes:
        if other is node:
            return True
        if other is not target and not storages.overlap(other, target):
            continue
        if other.op in ("placeholder", "get_attr"):
            return False  # the caller sees the write
        if other is not target and any(user > node for user in other.users):
            return False
    return False


def _gives_same(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], written: Any) -> bool:
    """Whether the functional form has the size, dtype and strides of the tensor that would have been written."""
    fake_mode = getattr(written, "fake_mode", None)
    if fake_mode is None:
        return False
    try:
        with fake_mode, torch.no_grad():
            result = function(*map(value_of, args), **{name: value_of(value) for name, value in kwargs.items()})
    except Exception:  # whatever torch objects to, the write stays as it was
        return False
    return same_metadata(result, written)
