"""How a strided tensor lies in memory, and how to copy it so that the copy lies the same way.

Element (i_0, ..., i_n) of a tensor lies `sum(i_d * stride_d)` elements after its first one; the tensor spans
`1 + sum((size_d - 1) * stride_d)` elements. Three cases, because `copy_` refuses to write one place twice:

- no two indices meet: copy element by element, gaps stay untouched;
- a dimension of stride 0 (an expanded tensor) repeats one slice: copy that slice once;
- indices meet in another way (a sliding window): copy the whole span as flat memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """Sizes and strides of a tensor, in elements.

    collapsed: the sizes with each repeated dimension (stride 0) reduced to one.
    span: elements from the first to the last, both included.
    overlaps: indices meet even after collapsing.
    dense: no gap, no overlap: `clone` keeps the strides.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    collapsed: tuple[int, ...]
    span: int
    overlaps: bool
    dense: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Layout:
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        if tensor.numel() == 0:
            return Layout(size, stride, size, 0, overlaps=False, dense=True)
        collapsed = tuple(1 if step == 0 else extent for extent, step in zip(size, stride))
        span = 1 + sum((extent - 1) * step for extent, step in zip(size, stride))
        # Without overlap each dimension, from the smallest stride up, steps over all that the smaller ones reach.
        reach, overlaps, count = 1, False, 1
        for step, extent in sorted((step, extent) for extent, step in zip(collapsed, stride) if extent > 1):
            overlaps |= step < reach
            reach += (extent - 1) * step
            count *= extent
        return Layout(
            size, stride, collapsed, span, overlaps, dense=collapsed == size and not overlaps and count == span
        )

    @property
    def repeats(self) -> bool:
        """Some dimension is expanded."""
        return self.collapsed != self.size

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout at the start of flat memory."""
        return flat.as_strided(self.size, self.stride, flat.storage_offset())

    def writable(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view of a tensor of this layout that shows each place in memory once: what `copy_` may write."""
        if self.overlaps:
            return tensor.as_strided((self.span,), (1,), tensor.storage_offset())
        if self.repeats:
            return tensor.as_strided(self.collapsed, self.stride, tensor.storage_offset())
        return tensor


def copy_of(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy in fresh memory with the same sizes and strides, gaps and overlaps included."""
    if layout.dense:
        return tensor.clone()
    flat = torch.empty(max(layout.span, 1), dtype=tensor.dtype, device=tensor.device)
    copy = layout.view(flat)
    layout.writable(copy).copy_(layout.writable(tensor))
    return copy
