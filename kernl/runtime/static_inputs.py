"""The buffers from which CUDA graphs read their inputs.

A graph reads fixed addresses, so before a replay each input is copied to where its graph expects it. All graphs of
one runner share one flat buffer per input: a shape uses the beginning of it, with the strides of the caller's tensor.
A shape that does not fit gets a new buffer, at least half as large again as the old one. The old one lives on for as
long as a graph that was captured with it: buffers never move under a live graph. Kept so, all the buffers of an input
take at most three times the bytes of the last one, which is at most one and a half times the largest input seen
(shapes warmed up largest first take one buffer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from kernl.runtime.layout import Layout

_GROWTH = 1.5

Allocate = Callable[[int, torch.dtype, torch.device], torch.Tensor]


class StaticInputs:
    """The flat buffers of a runner, one per input index, dtype and device.

    allocate: makes a flat buffer of so many elements.
    """

    def __init__(self, allocate: Allocate) -> None:
        self._allocate = allocate
        self._buffers: dict[tuple[int, torch.dtype, torch.device], torch.Tensor] = {}

    def copies_for(self, inputs: Sequence[Any], indices: Sequence[int]) -> InputCopies:
        """Places for the tensors at these indices, and the way to fill them."""
        layouts: dict[int, Layout] = {}
        views: dict[int, torch.Tensor] = {}
        for index in indices:
            tensor = inputs[index]
            layouts[index] = Layout.of(tensor)
            views[index] = layouts[index].view(self._buffer(index, tensor, layouts[index].span))
        return InputCopies(layouts, views)

    def nbytes(self) -> int:
        """Bytes of the buffers that new graphs will use. Older buffers still held by graphs are not counted."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def clear(self) -> None:
        """Forget the buffers; those that a graph reads stay alive with it."""
        self._buffers.clear()

    def _buffer(self, index: int, tensor: torch.Tensor, span: int) -> torch.Tensor:
        key = (index, tensor.dtype, tensor.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < span:
            elements = span if buffer is None else max(span, int(_GROWTH * buffer.numel()))
            # A tensor made in inference mode could not be written outside of it.
            with torch.inference_mode(False), torch.no_grad():
                buffer = self._allocate(max(elements, 1), tensor.dtype, tensor.device)
            self._buffers[key] = buffer
        return buffer


class InputCopies:
    """Copies the inputs of one graph into its static buffers, with as few calls as there are dtypes.

    views: by input index, the static tensor with the caller's sizes and strides: what the captured function gets.
    """

    def __init__(self, layouts: dict[int, Layout], views: dict[int, torch.Tensor]) -> None:
        self.views = views
        self._layouts = layouts
        self._targets = {index: layouts[index].writable(view) for index, view in views.items()}
        self._reshaped = {i: layout for i, layout in layouts.items() if layout.repeats or layout.overlaps}
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, view in views.items():
            if index not in self._reshaped:
                by_dtype.setdefault(view.dtype, []).append(index)
        self._single = [(self._targets[group[0]], group[0]) for group in by_dtype.values() if len(group) == 1]
        self._several = [
            ([self._targets[index] for index in group], itemgetter(*group))
            for group in by_dtype.values()
            if len(group) > 1
        ]

    @property
    def nbytes(self) -> int:
        return sum(self._layouts[index].span * view.element_size() for index, view in self.views.items())

    def is_plain(self, index: int) -> bool:
        """Whether every element of the input has a place of its own in memory."""
        return index not in self._reshaped

    def fill(self, inputs: Sequence[Any]) -> None:
        """Copy the caller's tensors in."""
        for target, index in self._single:
            target.copy_(inputs[index])
        for targets, pick in self._several:
            torch._foreach_copy_(targets, pick(inputs))
        for index, layout in self._reshaped.items():
            self._targets[index].copy_(layout.writable(inputs[index]))

    def copy_back(self, inputs: Sequence[Any], indices: Sequence[int]) -> None:
        """Give the caller's tensors what the graph has written to their copies."""
        for index in indices:
            inputs[index].copy_(self.views[index])
