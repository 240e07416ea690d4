"""The patterns that are known, in the order in which they are tried.

    @register_pattern("my_gelu", op("my_gelu_op", var("x")))
    def my_gelu(x):
        return emit(torch.ops.my.fast_gelu.default, x)

kernl's own patterns and the user's come in by this same call. Higher `priority` is tried first; at the same priority,
the one registered first. kernl's own use: dropout 100, layers of torch.nn that are one call 95, linears and layer norms
written out 90, relative position bias 60, attention 50, linear attention 48, embedding sums 45, residual + norm 40,
norm 30, gated linears 25, linear + activation 20, merged linears 10, linear 0.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernl.graph.pattern import Pattern

Rewrite = Callable[..., Any]


@dataclass(frozen=True)
class RegisteredPattern:
    """A pattern, what to put in its place, and where it was written."""

    name: str
    pattern: Pattern
    rewrite: Rewrite
    priority: int
    where: str
    arguments: tuple[str, ...]  # the bound names `rewrite` takes
    takes_match: bool  # whether its first parameter is the Match itself

    @property
    def anchors(self) -> frozenset[str]:
        return self.pattern.anchors()


class Registry:
    """An ordered set of patterns; each can be switched off without being forgotten. Thread-safe."""

    def __init__(self) -> None:
        self._patterns: dict[str, RegisteredPattern] = {}
        self._disabled: set[str] = set()
        self._lock = threading.RLock()

    def register(
        self, name: str, pattern: Pattern, rewrite: Rewrite, *, priority: int = 0, where: str | None = None
    ) -> None:
        """Add a pattern.

        Args:
            name: how reports and options call it; must be new.
            pattern: what to look for; its result must be an operation (`op`, `scaled` or alternatives of these).
            rewrite: called with those of the bound names that it takes (a first parameter called `match` gets the
                `Match` itself); returns what replaces the match, `Refused("reason")`, or None where it has no say.
            priority: higher is tried first.
            where: "file.py:line" for the report; that of `rewrite` when left out.

        Raises:
            ValueError: the name is taken, the pattern could match any node, or `rewrite` takes a name never bound.
            TypeError: `name` is no string, `priority` no integer, `pattern` no pattern, or `rewrite` cannot be called.
        """
        if not isinstance(name, str):
            raise TypeError(f"name is a {type(name).__name__}; accepted: a string")
        if not isinstance(priority, int):
            raise TypeError(f"priority of pattern {name!r} is a {type(priority).__name__}; accepted: an integer")
        if not isinstance(pattern, Pattern):
            raise TypeError(
                f"pattern is a {type(pattern).__name__}; accepted: what op(...), either(...) or a | b returns"
            )
        if not callable(rewrite):
            raise TypeError(f"rewrite is a {type(rewrite).__name__}; accepted: a function of the bound names")
        if not pattern.anchors():
            raise ValueError(
                f"pattern {name!r} could match any node; its result must be an op(...) or alternatives of op(...)"
            )
        parameters = list(inspect.signature(rewrite).parameters)
        takes_match = parameters[:1] == ["match"]
        arguments = tuple(parameters[takes_match:])
        unbound = [argument for argument in arguments if argument not in pattern.names()]
        if unbound:
            bound = ", ".join(sorted(pattern.names())) or "nothing"
            raise ValueError(f"rewrite of pattern {name!r} takes {', '.join(unbound)}, but the pattern binds {bound}")
        with self._lock:
            if name in self._patterns:
                taken = self._patterns[name].where
                raise ValueError(f"pattern {name!r} is registered already, at {taken}: choose another name")
            where = where or _location(rewrite)
            self._patterns[name] = RegisteredPattern(name, pattern, rewrite, priority, where, arguments, takes_match)

    def unregister(self, name: str) -> None:
        """Forget a pattern."""
        with self._lock:
            self._require(name)
            del self._patterns[name]
            self._disabled.discard(name)

    def disable(self, *names: str) -> None:
        """Keep these patterns from being tried."""
        with self._lock:
            for name in names:
                self._require(name)
            self._disabled.update(names)

    def enable(self, *names: str) -> None:
        """Undo `disable`."""
        with self._lock:
            for name in names:
                self._require(name)
            self._disabled.difference_update(names)

    def enabled(self, name: str) -> bool:
        with self._lock:
            self._require(name)
            return name not in self._disabled

    def active(self, without: Collection[str] = ()) -> list[RegisteredPattern]:
        """The patterns to try, in order, except those disabled here or named in `without`."""
        with self._lock:
            for name in without:
                self._require(name)
            skipped = self._disabled.union(without)
            patterns = [pattern for name, pattern in self._patterns.items() if name not in skipped]
        return sorted(patterns, key=lambda pattern: -pattern.priority)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._patterns)

    def __contains__(self, name: object) -> bool:
        return name in self._patterns

    def __iter__(self) -> Iterator[RegisteredPattern]:
        return iter(sorted(self._patterns.values(), key=lambda pattern: -pattern.priority))

    def _require(self, name: str) -> None:
        if name not in self._patterns:
            raise ValueError(f"no pattern is called {name!r}; there are {', '.join(sorted(self._patterns)) or 'none'}")


def _location(function: Rewrite) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return f"{type(function).__name__} object"
    path = Path(code.co_filename)
    return f"{path.parent.name}/{path.name}:{code.co_firstlineno}"


default_registry = Registry()


def register_pattern(
    name: str,
    pattern: Pattern,
    rewrite: Rewrite | None = None,
    *,
    priority: int = 0,
    registry: Registry | None = None,
) -> Any:
    """Register a pattern, as a call or as a decorator of the rewrite function. See `Registry.register`."""
    target = default_registry if registry is None else registry
    if rewrite is not None:
        caller = sys._getframe(1)
        path = Path(caller.f_code.co_filename)
        where = f"{path.parent.name}/{path.name}:{caller.f_lineno}"
        target.register(name, pattern, rewrite, priority=priority, where=where)
        return rewrite

    def decorate(function: Rewrite) -> Rewrite:
        target.register(name, pattern, function, priority=priority)
        return function

    return decorate
