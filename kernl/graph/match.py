"""What a rewrite function works with: the match it is given, and the description of a replacement that it returns."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node


class Refused(Exception):
    """A rewrite that must not happen, with the reason; may be returned or raised."""

    @property
    def reason(self) -> str:
        return str(self.args[0])


def require(condition: bool, reason: str) -> None:
    """Refuse the rewrite for this reason unless `condition`."""
    if not condition:
        raise Refused(reason)


@dataclass(frozen=True, eq=False)
class Emitted:
    """A call to be put into the graph; arguments may be nodes, other `Emitted`, Python values and lists of these.

    `emitted[i]` is one of its results.
    """

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __getitem__(self, index: int) -> Emitted:
        return Emitted(operator.getitem, (self, index), {})

    __iter__ = None  # how many results there are is not known: index them


def emit(target: Callable[..., Any], *args: Any, **kwargs: Any) -> Emitted:
    """Describe a call of `target` that is to replace a match."""
    return Emitted(target, args, kwargs)


class Match:
    """Where a pattern fits.

    root: the pattern's result. nodes: everything inside, the root included. bindings: the names, also as `match["x"]`.
    autocast: whether autocast is on there.
    """

    def __init__(self, root: Node, nodes: frozenset[Node], bindings: dict[str, Any], autocast: bool = False):
        self.root = root
        self.nodes = nodes
        self.bindings = bindings
        self.autocast = autocast

    def __getitem__(self, name: str) -> Any:
        return self.bindings[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.bindings.get(name, default)

    def include(self, nodes: Iterable[Node]) -> None:
        """Take further nodes into the match, found by the rewrite function itself."""
        self.nodes = self.nodes.union(nodes)

    def users_outside(self, node: Node) -> list[Node]:
        """Who uses this value and is not in the match."""
        return [user for user in node.users if user not in self.nodes]
