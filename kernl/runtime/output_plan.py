"""From the outputs a function gave while it was captured to the outputs of every later call.

The tensors a graph writes will be overwritten by the next replay, so a call hands out copies. It hands out what the
function itself would have: a tensor that *is* an input comes back as that input, a view of an input as the same view
of the caller's tensor, one tensor returned twice as one tensor, tensors that share memory as tensors that share
memory, and everything with its sizes and strides. Values that are not tensors were computed on the host from what the
graph's key holds, so they are constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kernl.runtime.graph_key import Uncapturable
from kernl.runtime.layout import Layout, copy_of

_CONSTANTS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.Size)
_ALIGNMENT = 16


@dataclass(frozen=True)
class _ViewOfInput:
    """An output that shares memory with an input: where it starts (bytes after the input's first element)."""

    position: int
    index: int
    layout: Layout
    dtype: torch.dtype
    byte_offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        start = tensor.storage_offset() * tensor.element_size() + self.byte_offset
        if self.dtype == tensor.dtype:
            return tensor.as_strided(self.layout.size, self.layout.stride, start // tensor.element_size())
        view = torch.empty(0, dtype=self.dtype, device=tensor.device)
        return view.set_(tensor.untyped_storage(), start // view.element_size(), self.layout.size, self.layout.stride)


@dataclass(frozen=True)
class _SharedMemory:
    """Several outputs in one piece of memory: the piece is copied once, the outputs are views of the copy."""

    source: torch.Tensor  # the piece as bytes
    members: tuple[tuple[int, torch.dtype, Layout, int], ...]  # position, dtype, layout, first element in the piece

    def copies(self) -> list[tuple[int, torch.Tensor]]:
        # Padded, so that every dtype's size divides it.
        piece = self.source.new_empty(-(-self.source.numel() // _ALIGNMENT) * _ALIGNMENT)
        piece[: self.source.numel()].copy_(self.source)
        return [
            (position, piece.view(dtype).as_strided(layout.size, layout.stride, start))
            for position, dtype, layout, start in self.members
        ]


class OutputPlan:
    """How to make the outputs of a call from the tensors a graph has written.

    outputs: what the function gave, any nesting of tuples, lists and dicts of tensors and plain values.
    arguments: what it was given. borrow: makes a tensor of the same memory that does not keep the memory alive;
    without it the plan keeps the outputs. copies: hand out copies (default) or the graph's own tensors.

    Raises Uncapturable when an output is neither a tensor nor a plain value.
    """

    def __init__(
        self,
        outputs: Any,
        arguments: Sequence[Any],
        *,
        borrow: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        copies: bool = True,
    ) -> None:
        leaves, self._structure = pytree.tree_flatten(outputs)
        # A flat list or tuple is what a compiled graph gives; building it by hand saves microseconds a call.
        self._container = type(outputs) if type(outputs) in (tuple, list) and len(leaves) == len(outputs) else None
        self._template: list[Any] = [None] * len(leaves)
        self._from_input: list[tuple[int, int]] = []
        self._views: list[_ViewOfInput] = []
        self._same: list[tuple[int, int]] = []
        self._sources: list[tuple[int, torch.Tensor]] = []
        self._strided: list[tuple[int, torch.Tensor, Layout]] = []
        self._shared: list[_SharedMemory] = []
        self._classify(leaves, arguments, borrow, copies)
        # One launch copies all the tensors of one dtype.
        groups: dict[tuple[torch.dtype, torch.device], tuple[list[int], list[torch.Tensor]]] = {}
        for position, source in self._sources:
            positions, sources = groups.setdefault((source.dtype, source.device), ([], []))
            positions.append(position)
            sources.append(source)
        self._groups = list(groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes copied out by each call."""
        sources = [source for _, source in self._sources] + [piece.source for piece in self._shared]
        sources += [source for _, source, _ in self._strided]
        return sum(source.numel() * source.element_size() for source in sources)

    def make(self, inputs: Sequence[Any]) -> Any:
        """The outputs of the call that has just run with these inputs."""
        results = self._template.copy()
        for positions, sources in self._groups:
            if len(sources) == 1:
                results[positions[0]] = sources[0].clone()
            else:
                copies = [torch.empty_like(source) for source in sources]
                torch._foreach_copy_(copies, sources)
                for position, copy in zip(positions, copies):
                    results[position] = copy
        for position, source, layout in self._strided:
            results[position] = copy_of(source, layout)
        for piece in self._shared:
            for position, view in piece.copies():
                results[position] = view
        for position, index in self._from_input:
            results[position] = inputs[index]
        for view_of_input in self._views:
            results[view_of_input.position] = view_of_input.of(inputs[view_of_input.index])
        for position, first in self._same:
            results[position] = results[first]
        return self.assemble(results)

    def assemble(self, leaves: list[Any]) -> Any:
        """Leaves in the nesting the function gave them in."""
        if self._container is tuple:
            return tuple(leaves)
        if self._container is list:
            return leaves
        return pytree.tree_unflatten(leaves, self._structure)

    def _classify(
        self,
        leaves: list[Any],
        arguments: Sequence[Any],
        borrow: Callable[[torch.Tensor], torch.Tensor],
        copies: bool,
    ) -> None:
        given = {id(value): index for index, value in enumerate(arguments) if isinstance(value, torch.Tensor)}
        memory_of_input: dict[int, int] = {}
        for index, value in enumerate(arguments):
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                memory_of_input.setdefault(_memory(value), index)
        first_position: dict[int, int] = {}
        fresh: dict[int, list[int]] = {}
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                if type(leaf) not in _CONSTANTS:
                    raise Uncapturable(f"an output is of type {type(leaf).__name__}")
                self._template[position] = leaf
            elif id(leaf) in given:
                self._from_input.append((position, given[id(leaf)]))
            elif type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout is not torch.strided:
                raise Uncapturable(f"an output is of type {type(leaf).__name__}, layout {leaf.layout}")
            elif id(leaf) in first_position:
                self._same.append((position, first_position[id(leaf)]))
            else:
                first_position[id(leaf)] = position
                index = memory_of_input.get(_memory(leaf), -1) if leaf.untyped_storage().nbytes() else -1
                if index >= 0:
                    self._add_view(position, leaf, index, arguments[index])
                elif not copies:
                    self._template[position] = leaf
                else:
                    fresh.setdefault(_memory(leaf), []).append(position)
        for positions in fresh.values():
            if len(positions) > 1:
                self._add_shared(positions, leaves, borrow)
                continue
            leaf, layout = leaves[positions[0]], Layout.of(leaves[positions[0]])
            if layout.dense:
                self._sources.append((positions[0], borrow(leaf)))
            else:
                self._strided.append((positions[0], borrow(leaf), layout))

    def _add_view(self, position: int, leaf: torch.Tensor, index: int, argument: torch.Tensor) -> None:
        begin = argument.storage_offset() * argument.element_size()
        offset = int(leaf.storage_offset() * leaf.element_size() - begin)
        self._views.append(_ViewOfInput(position, index, Layout.of(leaf), leaf.dtype, offset))

    def _add_shared(
        self, positions: list[int], leaves: list[Any], borrow: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        tensors = [leaves[position] for position in positions]
        layouts = [Layout.of(tensor) for tensor in tensors]
        starts = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
        ends = [start + layout.span * tensor.element_size() for start, layout, tensor in zip(starts, layouts, tensors)]
        begin = min(starts) // _ALIGNMENT * _ALIGNMENT
        end = max(ends)
        source = torch.empty(0, dtype=torch.uint8, device=tensors[0].device)
        source.set_(borrow(tensors[0]).untyped_storage(), begin, (end - begin,), (1,))
        self._shared.append(
            _SharedMemory(
                source,
                tuple(
                    (position, tensor.dtype, layout, (start - begin) // tensor.element_size())
                    for position, tensor, layout, start in zip(positions, tensors, layouts, starts)
                ),
            )
        )


def _memory(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a tensor: the storage object."""
    return tensor.untyped_storage()._cdata
