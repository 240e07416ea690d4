"""Rewriting: find the patterns in a canonical graph, check that each replacement is legal, put it in.

    report = rewrite(gm, registry)

**Order.** Patterns are tried one after another, highest priority first. A pattern is tried at each node that its result
may be, from the last node of the graph to the first, so that of two overlapping matches the one that ends later wins.
One pass: what a pattern emits can be matched by the patterns after it.

**A rewrite function changes nothing.** It returns a description, `emit(torch.ops.kernl.linear.default, x, weight, bias,
"gelu")` (or, when a match has several results, a dictionary from replaced nodes to descriptions), or `Refused("why")`.
Then the engine decides whether it may happen:

1. every value inside the match that is not replaced is used inside the match alone;
2. nothing writes to the memory of an operand, through any view, between its original read and the new node, nor to the
   memory of a value inside the match;
3. gradient or autocast mode does not change in between;
4. the replacement has the size, dtype and device of what it replaces; if its strides differ, everything downstream
   still works and shares memory as before.

New nodes stand where the match ended (or right before the first use of one of its results, if that comes earlier). They
carry fake values made by the fake mode of their operands; symbolic sizes stay symbolic and no guard is added.

A rewrite that raises is recorded as refused, "error: ...", and that match stays as it was; `strict=True` lets it raise.
"""

from __future__ import annotations

import contextlib
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from kernl.graph.match import Emitted, Match, Refused
from kernl.graph.memory import Storages, remove_dead, remove_unused, same_metadata, switches_mode, written_by
from kernl.graph.registry import RegisteredPattern, Registry, default_registry
from kernl.graph.table import call_of, op_name, value_of


@dataclass(frozen=True)
class Refusal:
    """One match that was not rewritten."""

    pattern: str
    node: str
    reason: str
    stack_trace: str | None = None


@dataclass
class PatternReport:
    """What one pattern did."""

    name: str
    where: str
    matched: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # reason -> number of matches
    emitted: Counter[str] = field(default_factory=Counter)  # op -> number of nodes


@dataclass
class RewriteReport:
    """What was done to a graph. `leftover` counts the calls that no pattern replaced, by operation."""

    patterns: dict[str, PatternReport] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    leftover: Counter[str] = field(default_factory=Counter)
    canonical: Counter[str] = field(default_factory=Counter)  # edits of `canonicalize`, if the caller notes them here
    seconds: float = 0.0

    def matched(self, name: str) -> int:
        """How many matches of this pattern were rewritten."""
        return self.patterns[name].matched if name in self.patterns else 0

    def refused(self, name: str) -> dict[str, int]:
        """Reasons and counts of this pattern's matches that were not rewritten."""
        return dict(self.patterns[name].refused) if name in self.patterns else {}

    def emitted(self) -> Counter[str]:
        """Operations put into the graph, over all patterns."""
        return sum((pattern.emitted for pattern in self.patterns.values()), Counter())

    def __add__(self, other: RewriteReport) -> RewriteReport:
        """The report of two graphs together."""
        total = RewriteReport(
            refusals=self.refusals + other.refusals,
            leftover=self.leftover + other.leftover,
            canonical=self.canonical + other.canonical,
            seconds=self.seconds + other.seconds,
        )
        for report in (*self.patterns.values(), *other.patterns.values()):
            entry = total.patterns.setdefault(report.name, PatternReport(report.name, report.where))
            entry.matched += report.matched
            entry.refused += report.refused
            entry.emitted += report.emitted
        return total

    def __str__(self) -> str:
        lines = []
        for report in self.patterns.values():
            if report.matched or report.refused:
                ops = ", ".join(f"{count} {name}" for name, count in report.emitted.items())
                lines.append(f"{report.name}: {report.matched} matched{f' -> {ops}' if ops else ''}  ({report.where})")
                lines.extend(f"    refused {count}: {reason}" for reason, count in report.refused.items())
        left = ", ".join(f"{count} {name}" for name, count in self.leftover.most_common())
        return "\n".join([*lines, f"left over: {left or 'nothing'}"])


def rewrite(
    gm: GraphModule,
    registry: Registry | None = None,
    *,
    without: Collection[str] = (),
    strict: bool = False,
) -> RewriteReport:
    """Replace what the registry's patterns find in a canonical graph, in place.

    Args:
        gm: a torch-level Dynamo graph whose nodes hold fake values in `meta["example_value"]`, after `canonicalize`.
        registry: the patterns; the default registry when left out.
        without: names of patterns not to try.
        strict: let an exception inside a pattern through instead of recording it.
    """
    started = time.perf_counter()
    report = RewriteReport()
    patterns = (default_registry if registry is None else registry).active(without)
    rewriter = _Rewriter(gm)
    for pattern in patterns:
        report.patterns[pattern.name] = entry = PatternReport(pattern.name, pattern.where)
        if not rewriter.may_hold(pattern):
            continue
        for root in rewriter.anchors(pattern):
            if root in rewriter.erased or not root.users:
                continue
            refusal = rewriter.try_at(pattern, root, entry, strict)
            if refusal is not None:
                entry.refused[refusal] += 1
                report.refusals.append(Refusal(pattern.name, root.name, refusal, root.meta.get("stack_trace")))
    removed = remove_unused(gm.graph)
    if removed or any(entry.matched for entry in report.patterns.values()):
        gm.recompile()
    report.leftover = Counter(
        op_name(node)
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method") and "kernl_pattern" not in node.meta
    )
    report.seconds = time.perf_counter() - started
    return report


_MAX_WAYS = 64  # in which one pattern is tried at one node


class _Rewriter:
    """The graph with what matching and legality need to know about it."""

    def __init__(self, gm: GraphModule):
        self.graph = gm.graph
        self.storages = Storages(self.graph)
        self.erased: set[Node] = set()
        self.by_op: dict[str, list[Node]] = {}
        self.writes: list[tuple[Node, tuple[Node, ...]]] = []
        self.switches: list[Node] = []
        for node in self.graph.nodes:
            call = call_of(node)
            if call is not None:
                self.by_op.setdefault(call.op, []).append(node)
            if targets := written_by(node):
                self.writes.append((node, targets))
            elif switches_mode(node):
                self.switches.append(node)

    def may_hold(self, pattern: RegisteredPattern) -> bool:
        """The early reject: whether each operation the pattern needs occurs at all."""
        return all(any(self.by_op.get(op) for op in needed) for needed in pattern.pattern.needs())

    def anchors(self, pattern: RegisteredPattern) -> list[Node]:
        nodes = [node for op in pattern.anchors for node in self.by_op.get(op, ()) if node not in self.erased]
        return sorted(nodes, reverse=True)

    def try_at(self, pattern: RegisteredPattern, root: Node, entry: PatternReport, strict: bool) -> str | None:
        """Rewrite the first way in which the pattern fits and may be replaced. Returns why not, if it fits at all."""
        refusal = None
        try:
            for ways, (bindings, nodes) in enumerate(pattern.pattern.match(root)):
                if ways == _MAX_WAYS:
                    break
                match = Match(root, nodes, bindings, self._autocast_at(root))
                arguments = {name: bindings.get(name) for name in pattern.arguments}
                try:
                    result = (
                        pattern.rewrite(match, **arguments) if pattern.takes_match else pattern.rewrite(**arguments)
                    )
                    if isinstance(result, Refused):
                        raise result
                    if result is not None:
                        entry.emitted += self.replace(match, result, pattern.name)
                        entry.matched += 1
                        return None
                except Refused as refused:
                    refusal = refusal or refused.reason
        except Exception as error:
            if strict:
                raise
            return f"error: {type(error).__name__}: {error}"
        return refusal

    def replace(self, match: Match, result: Any, name: str) -> Counter[str]:
        """Put `result` in the place of the match, or raise Refused and leave the graph as it was."""
        replacements: dict[Node, Any] = result if isinstance(result, dict) else {match.root: result}
        for old, new in replacements.items():
            if not isinstance(old, Node) or not isinstance(new, (Node, Emitted)):
                got = f"{type(old).__name__}: {type(new).__name__}"
                raise TypeError(
                    f"a rewrite returned {got}; accepted: emit(...), a node, {{node: emit(...)}}, Refused or None"
                )
        match.include(replacements)
        operands = _operands(replacements.values())
        self._check_uses(match, replacements, operands)
        used = {old: new for old, new in replacements.items() if match.users_outside(old)}
        point = min([match.root, *(user for old in used for user in match.users_outside(old))])
        for operand in operands:
            if not operand < point:
                raise Refused(f"operand {operand.name} is computed after the first use of what it would replace")
        self._check_writes(match, used, operands, point)

        created: list[Node] = []
        try:
            new_values = self._create(used, point, match.root, created, name)
            moved = self._check_values(new_values, match)
            self._check_aliases(new_values, operands)
        except BaseException:
            for node in reversed(created):
                self.graph.erase_node(node)
            raise
        for node, value in moved.items():
            node.meta["example_value"] = value
        for old, new in new_values.items():
            self.storages.merge(old, new)
            old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in match.nodes)
        for node in created:
            if (call := call_of(node)) is not None:
                self.by_op.setdefault(call.op, []).append(node)
        self.erased |= remove_dead(self.graph, match.nodes)
        return Counter(op_name(node) for node in created if node.target is not operator.getitem)

    def _check_uses(self, match: Match, replacements: dict[Node, Any], operands: list[Node]) -> None:
        for node in match.nodes:
            if node in replacements or node in operands:
                continue
            for user in match.users_outside(node):
                where = (
                    "returned by the graph" if user.op == "output" else f"used by {op_name(user)}, outside the match"
                )
                raise Refused(f"a value inside the match ({op_name(node)}) is {where}")

    def _check_writes(self, match: Match, used: dict[Node, Any], operands: list[Node], point: Node) -> None:
        first, last = min([point, *match.nodes]), max([point, *match.nodes])
        for switch in self.switches:
            if first < switch < last:
                raise Refused(f"gradient or autocast mode changes inside the match ({op_name(switch)})")
        for write, targets in self.writes:
            if write in match.nodes:
                raise Refused(f"the match holds an in-place operation ({op_name(write)})")
            for target in targets:
                for operand in operands:
                    reads = [node for node in match.nodes if operand in node.all_input_nodes] or [operand]
                    if min([point, *reads]) < write < max([point, *reads]) and self.storages.overlap(target, operand):
                        reason = "an in-place operation ({}) writes an operand between its read and the new node"
                        raise Refused(reason.format(op_name(write)))
                if first < write < last and any(self.storages.overlap(target, node) for node in match.nodes):
                    raise Refused(f"an in-place operation ({op_name(write)}) writes a value inside the match")

    def _check_aliases(self, new_values: dict[Node, Node], operands: list[Node]) -> None:
        """A view takes part in writes of its base, a new tensor does not: refuse to swap them where that could show."""
        returned = [node for output in self.graph.nodes if output.op == "output" for node in output.all_input_nodes]
        for old, new in new_values.items():
            changed = [
                each for each in operands if self.storages.overlap(old, each) != self.storages.overlap(new, each)
            ]
            if not changed:
                continue
            if any(self.storages.overlap(old, node) for node in returned):
                raise Refused(
                    "the graph returns the result, which would become a view of an operand or cease to be one"
                )
            for write, targets in self.writes:
                if any(self.storages.overlap(target, node) for target in targets for node in (old, *changed)):
                    reason = "an in-place operation ({}) writes memory that the result would begin or cease to share"
                    raise Refused(reason.format(op_name(write)))

    def _create(
        self, used: dict[Node, Any], point: Node, root: Node, created: list[Node], name: str
    ) -> dict[Node, Node]:
        """Create the nodes `used` describes before `point`, with fake values and the root's provenance."""
        made: dict[int, Node] = {}
        provenance = {key: value for key, value in root.meta.items() if key != "example_value"}

        def node_of(description: Any) -> Any:
            if isinstance(description, (tuple, list)):
                return type(description)(node_of(each) for each in description)
            if not isinstance(description, Emitted):
                return description
            key = id(description)
            if key not in made:
                args = tuple(node_of(each) for each in description.args)
                kwargs = {key: node_of(each) for key, each in description.kwargs.items()}
                with self.graph.inserting_before(point):
                    node = self.graph.call_function(description.target, args, kwargs)
                created.append(node)
                node.meta = dict(provenance, kernl_pattern=name)
                node.meta["example_value"] = self._fake_value(node, point)
                made[key] = node
            return made[key]

        return {old: node_of(new) for old, new in used.items()}

    def _fake_value(self, node: Node, point: Node) -> Any:
        """What the node computes, under the fake mode of its operands and the autocast regions it stands in."""
        args, kwargs = _map_nodes((node.args, node.kwargs), value_of)
        if node.target is operator.getitem:
            return args[0][args[1]]
        with contextlib.ExitStack() as stack:
            for mode in _fake_modes(node.all_input_nodes):
                stack.enter_context(mode)
            for enter in self._autocast_regions(point):
                stack.enter_context(_autocast(enter))
            assert callable(node.target)
            return node.target(*args, **kwargs)

    def _autocast_regions(self, point: Node) -> list[Node]:
        """The `_enter_autocast` nodes before `point` that are not closed by then."""
        opened: list[Node] = []
        for switch in self.switches:
            if switch < point:
                if getattr(switch.target, "__name__", "") == "_enter_autocast":
                    opened.append(switch)
                elif getattr(switch.target, "__name__", "") == "_exit_autocast" and switch.args[0] in opened:
                    opened.remove(switch.args[0])  # type: ignore[arg-type]
        return opened

    def _autocast_at(self, root: Node) -> bool:
        value = value_of(root)
        device_type = value.device.type if isinstance(value, torch.Tensor) else "cpu"
        for enter in reversed(self._autocast_regions(root)):
            if enter.args[0] == device_type:
                return bool(enter.args[2])
        return torch.is_autocast_enabled(device_type)

    def _check_values(self, new_values: dict[Node, Node], match: Match) -> dict[Node, Any]:
        """Compare new values with old ones. Returns new fake values for the nodes downstream whose strides change."""
        changed: dict[Node, Any] = {}
        for old, new in new_values.items():
            before, after = value_of(old), value_of(new)
            if not isinstance(before, torch.Tensor):
                raise Refused(f"{old.name} has no known size and dtype")
            if not same_metadata(before, after, strides=False):
                raise Refused(f"the result would be {_describe(after)} in place of {_describe(before)}")
            if not same_metadata(before, after):
                changed[old] = after
        return self._propagate(changed, match) if changed else {}

    def _propagate(self, changed: dict[Node, Any], match: Match) -> dict[Node, Any]:
        """Carry new strides downstream until they make no difference; refuse when an operation cannot take them."""
        values = dict(changed)
        pending = sorted({user for node in changed for user in match.users_outside(node)})
        while pending:
            node = pending.pop(0)
            if node.op == "output":
                continue
            if node.op not in ("call_function", "call_method"):
                raise Refused(f"the result has other strides, and is used by a {node.op}")
            before, after = value_of(node), self._recompute(node, values)
            if not isinstance(before, torch.Tensor):
                if isinstance(before, (tuple, list)):  # of tensors: chunk, split, unbind
                    values[node] = after
                    pending = sorted({*pending, *node.users})
                continue
            if not same_metadata(before, after, strides=False):
                raise Refused(f"the result has other strides, which change what {op_name(node)} gives")
            # What was a copy (`contiguous`, `reshape`) may now be a view, or the other way round.
            for operand in node.all_input_nodes:
                shared = _share_memory(value_of(operand), before)
                if shared != _share_memory(values.get(operand, value_of(operand)), after) and any(
                    self.storages.overlap(target, each)
                    for _, targets in self.writes
                    for target in targets
                    for each in (node, operand)
                ):
                    raise Refused(f"the result has other strides: {op_name(node)} would share memory that is written")
            if not same_metadata(before, after):
                values[node] = after
                pending = sorted({*pending, *node.users})
        return {node: value for node, value in values.items() if node not in changed}

    def _recompute(self, node: Node, values: dict[Node, Any]) -> Any:
        """The fake value of a node when its operands have these values."""
        args, kwargs = _map_nodes(
            (node.args, node.kwargs), lambda each: values[each] if each in values else value_of(each)
        )
        try:
            with contextlib.ExitStack() as stack:
                for mode in _fake_modes(node.all_input_nodes):
                    stack.enter_context(mode)
                    if mode.shape_env is not None:
                        stack.enter_context(mode.shape_env.suppress_guards())
                for enter in self._autocast_regions(node):
                    stack.enter_context(_autocast(enter))
                if node.op == "call_method":
                    return getattr(args[0], str(node.target))(*args[1:], **kwargs)
                assert callable(node.target)
                return node.target(*args, **kwargs)
        except Exception as error:
            raise Refused(f"the result has other strides, which {op_name(node)} cannot take ({error})") from error


def _operands(results: Iterable[Any]) -> list[Node]:
    """The existing nodes that these descriptions read."""
    found: dict[Node, None] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Node):
            found[value] = None
        elif isinstance(value, Emitted):
            visit(value.args)
            visit(tuple(value.kwargs.values()))
        elif isinstance(value, (tuple, list)):
            for each in value:
                visit(each)
        elif isinstance(value, slice):
            visit((value.start, value.stop, value.step))

    visit(tuple(results))
    return list(found)


def _fake_modes(nodes: Sequence[Node]) -> Iterator[Any]:
    """The fake mode of these nodes' values, if any."""
    for node in nodes:
        value = node.meta.get("example_value")
        mode = getattr(value, "fake_mode", None)
        if mode is not None:
            yield mode
            return


def _map_nodes(arguments: Any, function: Callable[[Node], Any]) -> Any:
    """Arguments with every node replaced by `function(node)`; values need not be what a graph could hold."""
    if isinstance(arguments, Node):
        return function(arguments)
    if isinstance(arguments, (tuple, list)):
        mapped = [_map_nodes(each, function) for each in arguments]
        return type(arguments)(*mapped) if hasattr(arguments, "_fields") else type(arguments)(mapped)
    if isinstance(arguments, dict):
        return {name: _map_nodes(each, function) for name, each in arguments.items()}
    if isinstance(arguments, slice):
        return slice(*(_map_nodes(each, function) for each in (arguments.start, arguments.stop, arguments.step)))
    return arguments


def _autocast(enter: Node) -> contextlib.AbstractContextManager[Any]:
    """The context that an `_enter_autocast` node opens."""
    device_type, dtype, enabled, cache_enabled = enter.args
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)  # type: ignore[arg-type]


def _share_memory(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"
