"""A small language for shapes of computation: what to look for, with names for the parts.

    op("layer_norm", op("add", var("input"), var("residual")).named("sum"), eps=scalar("eps"), ...)

reads "a layer_norm of a sum". Names bind to the arguments of the rewrite function of the same name. A pattern is
matched from its result backwards; `Pattern.match` yields every way in which it fits, so a rewrite that refuses one way
leaves the others to be tried.

* `op(name, *arguments, **arguments)`: a call of the operation table (`kernl.graph.table`). Positional arguments follow
  the operation's schema. **An argument that is not mentioned must have its default**: a pattern overlooks no option.
  Two positional operands of a commutative operation match in either order. `name` may be a tuple of names.
* `var("x")`: any tensor; `or_none=True` also takes a missing optional one. `scalar("eps")`: a Python number.
  `anything("index")`: any argument whatever; `ANY`: the same, not bound. The same name twice must be the same thing.
* a plain Python value: exactly that value (dimensions count from either end).
* `a | b`: alternatives. `through(pattern, "to", "contiguous")`: `pattern`, after any number of these operations.
  `scaled(pattern, "scale")`: `pattern * scale` or `pattern / (1 / scale)`.
* `.named("sum")` binds the node itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from kernl.graph.table import (
    COMMUTATIVE,
    DIM_NAMES,
    DROPOUTS,
    REQUIRED,
    SCHEMAS,
    call_of,
    does_nothing,
    normalize_dim,
    value_of,
)

Bindings = dict[str, Any]
# What a partial match holds: the names bound so far and the nodes taken into the match.
State = tuple[Bindings, frozenset[Node]]


class Pattern(ABC):
    """The base of all patterns."""

    @abstractmethod
    def fit(self, argument: Any, state: State) -> Iterator[State]:
        """Every way to extend a partial match by an argument of a call."""

    def match(self, node: Node) -> Iterator[State]:
        """Every way in which this pattern fits with `node` as its result."""
        return self.fit(node, ({}, frozenset()))

    def anchors(self) -> frozenset[str]:
        """The operations this pattern's result may be; empty when it may be anything."""
        return frozenset()

    def needs(self) -> tuple[frozenset[str], ...]:
        """For an early reject: a graph that holds none of one of these sets cannot match."""
        return ()

    def names(self) -> frozenset[str]:
        """The names this pattern may bind."""
        return frozenset()

    def __or__(self, other: Any) -> Pattern:
        return Either(self, other)

    def named(self, name: str) -> Pattern:
        return Named(self, name)


def _bind(name: str, value: Any, state: State) -> Iterator[State]:
    bindings, nodes = state
    if name not in bindings:
        yield {**bindings, name: value}, nodes
    elif bindings[name] is value or (not isinstance(value, Node) and bindings[name] == value):
        yield state


class Var(Pattern):
    """A tensor that enters the match from outside."""

    def __init__(self, name: str, or_none: bool = False):
        self.name, self.or_none = name, or_none

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        is_tensor = isinstance(argument, Node) and isinstance(value_of(argument), torch.Tensor)
        if is_tensor or (argument is None and self.or_none):
            yield from _bind(self.name, argument, state)

    def names(self) -> frozenset[str]:
        return frozenset({self.name})


class Scalar(Pattern):
    """A Python number: captured, for the rewrite to judge."""

    def __init__(self, name: str):
        self.name = name

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        if isinstance(argument, (int, float)) and not isinstance(argument, bool):
            yield from _bind(self.name, argument, state)

    def names(self) -> frozenset[str]:
        return frozenset({self.name})


class Anything(Pattern):
    """Any argument at all, bound when it has a name."""

    def __init__(self, name: str | None = None):
        self.name = name

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        if self.name is None:
            yield state
        else:
            yield from _bind(self.name, argument, state)

    def names(self) -> frozenset[str]:
        return frozenset() if self.name is None else frozenset({self.name})


class Literal(Pattern):
    """Exactly this value."""

    def __init__(self, value: Any):
        self.value = value

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        if isinstance(argument, Node):
            return
        both_numbers = all(type(each) in (int, float) for each in (argument, self.value))
        if (both_numbers or type(argument) is type(self.value)) and argument == self.value:
            yield state


class Named(Pattern):
    """`pattern`, with the node itself bound to a name."""

    def __init__(self, pattern: Pattern, name: str):
        self.pattern, self.name = pattern, name

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        for found in self.pattern.fit(argument, state):
            yield from _bind(self.name, argument, found)

    def anchors(self) -> frozenset[str]:
        return self.pattern.anchors()

    def needs(self) -> tuple[frozenset[str], ...]:
        return self.pattern.needs()

    def names(self) -> frozenset[str]:
        return self.pattern.names() | {self.name}


class Either(Pattern):
    """Alternatives, tried from left to right."""

    def __init__(self, *patterns: Any):
        self.patterns: list[Pattern] = []
        for pattern in map(as_pattern, patterns):
            self.patterns.extend(pattern.patterns if isinstance(pattern, Either) else [pattern])

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        for pattern in self.patterns:
            yield from pattern.fit(argument, state)

    def anchors(self) -> frozenset[str]:
        parts = [pattern.anchors() for pattern in self.patterns]
        return frozenset().union(*parts) if all(parts) else frozenset()

    def needs(self) -> tuple[frozenset[str], ...]:
        anchors = self.anchors()
        return (anchors,) if anchors else ()

    def names(self) -> frozenset[str]:
        return frozenset().union(*(pattern.names() for pattern in self.patterns))


class Through(Pattern):
    """`pattern`, or `pattern` followed by any number of one-operand operations, whatever their other arguments.

    A dropout is gone through only when it does nothing.
    """

    def __init__(self, pattern: Any, *ops: str):
        self.pattern, self.ops = as_pattern(pattern), ops

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        yield from self.pattern.fit(argument, state)
        call = call_of(argument)
        if call is not None and call.op in self.ops and (call.op not in DROPOUTS or does_nothing(call)):
            bindings, nodes = state
            yield from self.fit(call["input"], (bindings, nodes | {argument}))

    def anchors(self) -> frozenset[str]:
        inner = self.pattern.anchors()
        return inner | frozenset(self.ops) if inner else frozenset()

    def needs(self) -> tuple[frozenset[str], ...]:
        return self.pattern.needs()

    def names(self) -> frozenset[str]:
        return self.pattern.names()


class Scaled(Pattern):
    """`pattern * scale`, `scale * pattern`, or `pattern / divisor` with scale = 1 / divisor."""

    def __init__(self, pattern: Any, name: str):
        self.pattern, self.name = as_pattern(pattern), name

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        call = call_of(argument)
        if call is None or call.op not in ("mul", "div") or call.arguments.get("rounding_mode") is not None:
            return
        operand, factor = call["input"], call["other"]
        if call.op == "mul" and isinstance(factor, Node):
            operand, factor = factor, operand
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or (call.op == "div" and factor == 0):
            return
        scale = float(factor) if call.op == "mul" else 1.0 / factor
        bindings, nodes = state
        for found in _bind(self.name, scale, (bindings, nodes | {argument})):
            yield from self.pattern.fit(operand, found)

    def anchors(self) -> frozenset[str]:
        return frozenset({"mul", "div"})

    def needs(self) -> tuple[frozenset[str], ...]:
        return (self.anchors(), *self.pattern.needs())

    def names(self) -> frozenset[str]:
        return self.pattern.names() | {self.name}


class Op(Pattern):
    """A call of an operation, with patterns for its arguments."""

    def __init__(self, name: str | tuple[str, ...], positional: tuple[Any, ...], named: dict[str, Any]):
        self.ops = (name,) if isinstance(name, str) else tuple(name)
        self.positional = tuple(map(as_pattern, positional))
        self.by_name = {argument: as_pattern(pattern) for argument, pattern in named.items()}
        for each in self.ops:
            schema = SCHEMAS.get(each)
            if schema is None:
                if "::" in each:
                    continue
                raise ValueError(
                    f"op: name is {each!r}, which is not in the operation table ({', '.join(sorted(SCHEMAS))})"
                )
            known = [parameter for parameter, _ in schema]
            unknown = [argument for argument in self.by_name if argument not in known]
            if unknown or len(positional) > len(known):
                given = f"{len(positional)} positional and {', '.join(named) or 'no named'} arguments"
                raise ValueError(f"op({each!r}): got {given}; the operation has ({', '.join(known)})")
        self.commutes = len(self.positional) == 2 and all(each in COMMUTATIVE for each in self.ops)

    def fit(self, argument: Any, state: State) -> Iterator[State]:
        call = call_of(argument)
        if call is None or call.op not in self.ops:
            return
        patterns = dict(zip(call.arguments, self.positional, strict=False)) | self.by_name
        operand = value_of(call.arguments.get("input"))
        rank = operand.dim() if isinstance(operand, torch.Tensor) else None
        defaults = _defaults(call.op, argument)
        for name, value in call.arguments.items():
            if name in patterns:
                continue
            default = defaults.get(name, REQUIRED)
            if rank is not None and name in DIM_NAMES:
                default = normalize_dim(default, rank)
            if isinstance(value, Node) or not (value is default or value == default):
                return
        bindings, nodes = state
        start = (bindings, nodes | {argument})
        pairs = [(_from_zero(pattern, name, rank), call.arguments[name]) for name, pattern in patterns.items()]
        yield from _fit_all(pairs, start)
        if self.commutes:
            (first, one), (second, other), *rest = pairs
            if one is not other:
                yield from _fit_all([(first, other), (second, one), *rest], start)

    def anchors(self) -> frozenset[str]:
        return frozenset(self.ops)

    def needs(self) -> tuple[frozenset[str], ...]:
        inner = [needed for pattern in (*self.positional, *self.by_name.values()) for needed in pattern.needs()]
        return (self.anchors(), *inner)

    def names(self) -> frozenset[str]:
        return frozenset().union(*(pattern.names() for pattern in (*self.positional, *self.by_name.values())))


def _defaults(op: str, node: Node) -> dict[str, Any]:
    if op in SCHEMAS:
        return dict(SCHEMAS[op])
    if isinstance(node.target, torch._ops.OpOverload):
        parameters = node.target._schema.arguments
        return {each.name: each.default_value for each in parameters if each.has_default_value()}
    return {}


def _from_zero(pattern: Pattern, name: str, rank: int | None) -> Pattern:
    """A literal dimension, counted from zero as the call's is."""
    if rank is not None and isinstance(pattern, Literal) and name in DIM_NAMES:
        return Literal(normalize_dim(pattern.value, rank))
    return pattern


def _fit_all(pairs: list[tuple[Pattern, Any]], state: State) -> Iterator[State]:
    if not pairs:
        yield state
        return
    (pattern, argument), *rest = pairs
    for found in pattern.fit(argument, state):
        yield from _fit_all(rest, found)


def as_pattern(value: Any) -> Pattern:
    """A pattern itself; any other value stands for exactly that value."""
    return value if isinstance(value, Pattern) else Literal(value)


def op(name: str | tuple[str, ...], *arguments: Any, **named_arguments: Any) -> Pattern:
    """A call of the operation `name` (or of one of several) whose arguments fit."""
    return Op(name, arguments, named_arguments)


def var(name: str, *, or_none: bool = False) -> Pattern:
    """A tensor from outside the match, bound to `name`; with `or_none` a missing optional one too."""
    return Var(name, or_none)


def scalar(name: str) -> Pattern:
    """A Python number, bound to `name`."""
    return Scalar(name)


def anything(name: str) -> Pattern:
    """Any argument (a node, a number, a tuple, None), bound to `name`."""
    return Anything(name)


ANY: Pattern = Anything()


def through(pattern: Any, *ops: str) -> Pattern:
    """`pattern`, possibly followed by any of the one-operand operations `ops`."""
    return Through(pattern, *ops)


def scaled(pattern: Any, name: str) -> Pattern:
    """`pattern` times a Python number, however it is written; the factor is bound to `name` as a float."""
    return Scaled(pattern, name)


def either(*patterns: Any) -> Pattern:
    """The first of these that fits, then the others."""
    return Either(*patterns)
