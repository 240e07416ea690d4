"""A capture device without a GPU: graphs of functions on CPU tensors.

Capturing must execute nothing and replaying must read and write the memory seen while capturing. So `capture` runs the
function on the static inputs and then puts back whatever it has changed, and `replay` runs it again and writes what it
gives to the memory of the outputs that were captured. Both writes go around the version counters.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernl.runtime.graph_key import stays


class FakeGraph:
    def __init__(self, device: FakeDevice, function: Callable[..., Any], arguments: list[Any], outputs: Any) -> None:
        self.device = device
        self.function = function
        # A graph keeps what it uses in place by address alone.
        self._arguments = [
            weakref.ref(value) if isinstance(value, torch.Tensor) and stays(value) else value for value in arguments
        ]
        inputs = {id(value) for value in arguments}
        memory = {storage_of(value) for value in arguments if isinstance(value, torch.Tensor)}
        self.outputs = [
            leaf
            if isinstance(leaf, torch.Tensor) and id(leaf) not in inputs and storage_of(leaf) not in memory
            else None
            for leaf in pytree.tree_leaves(outputs)
        ]

    @property
    def arguments(self) -> list[Any]:
        return [value() if isinstance(value, weakref.ref) else value for value in self._arguments]

    def replay(self) -> None:
        self.device.replays += 1
        for target, leaf in zip(self.outputs, pytree.tree_leaves(self.function(*self.arguments))):
            if target is not None and target.numel():
                flat(target).copy_(flat(leaf))


class FakeDevice:
    """fail: raised by the next captures, one each. capturing: what `is_capturing` says."""

    device_type = "cpu"

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.runners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.capturing = False
        self.fail: list[BaseException] = []
        self.captures = self.replays = self.plain_runs = self.entered = self.rooms_made = 0
        self.allocations: list[int] = []
        self.idle_releases = 0

    def is_capturing(self) -> bool:
        return self.capturing

    def enter_stream(self) -> None:
        self.entered += 1

    def run_plainly(self, function: Callable[..., Any], inputs: Sequence[Any], hand_out: Callable[[Any], Any]) -> Any:
        self.plain_runs += 1
        return hand_out(function(*inputs))

    def capture(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[FakeGraph, Any]:
        if self.fail:
            raise self.fail.pop(0)
        self.captures += 1
        tensors = [value for value in arguments if isinstance(value, torch.Tensor) and value.numel()]
        before = [flat(tensor).clone() for tensor in tensors]
        try:
            outputs = function(*arguments)
        finally:
            for tensor, content in zip(tensors, before):
                flat(tensor).copy_(content)
        return FakeGraph(self, function, list(arguments), outputs), outputs

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocations.append(elements)
        return torch.full((elements,), 99, dtype=dtype, device=device)

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def destroy_later(self, graphs: list[Any]) -> None:
        graphs.clear()

    def settle(self) -> None:
        pass

    def make_room(self) -> None:
        self.rooms_made += 1
        for runner in list(self.runners):
            runner.evict(self)

    def release_if_idle(self) -> None:
        self.idle_releases += 1

    def pool_bytes(self) -> int:
        return 0

    def reserved_bytes(self) -> int:
        return 0


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """All the memory behind a tensor as bytes, without its version counter."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
