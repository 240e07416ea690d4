"""Whether what is being captured can run at the same time as other graphs.

Graphs that share a memory pool must not: each would overwrite what the other keeps there. kernl's runner captures all
graphs of a GPU into one pool and orders their replays, whichever streams they come from. Kernels that need scratch
memory of their own, such as counters, can then share it among all these graphs, instead of keeping some for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_in_turn: ContextVar[bool] = ContextVar("kernl_graphs_take_turns", default=False)


def graphs_take_turns() -> bool:
    """Whether the graph that this thread captures runs at no time together with others of the GPU captured like it."""
    return _in_turn.get()


@contextlib.contextmanager
def capturing_in_turn() -> Iterator[None]:
    """What this thread captures inside is replayed in turn with all other graphs of the GPU captured like this."""
    token = _in_turn.set(True)
    try:
        yield
    finally:
        _in_turn.reset(token)
