"""Strided memory: the layout tells where copies may write, and copies keep it."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernl.runtime.layout import Layout, copy_of

SIZES_AND_STRIDES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=0, max_size=4)


def places(tensor: torch.Tensor) -> list[int]:
    ranges = [range(extent) for extent in tensor.shape]
    return [sum(i * step for i, step in zip(index, tensor.stride())) for index in itertools.product(*ranges)]


@settings(max_examples=300, deadline=None)
@given(SIZES_AND_STRIDES)
def test_layout_agrees_with_counting_and_copies_keep_it(dims: list[tuple[int, int]]) -> None:
    size, stride = [extent for extent, _ in dims], [step for _, step in dims]
    tensor = torch.randn(200).as_strided(size, stride, 7)
    layout = Layout.of(tensor)
    touched = places(tensor)
    assert layout.span == (max(touched) + 1 if touched else 0)
    if not touched:
        return
    collapsed = tensor.as_strided(layout.collapsed, layout.stride)
    distinct = places(collapsed)
    assert set(distinct) == set(touched)
    # "overlaps" may be said of a tensor that does not, never the other way round.
    assert layout.overlaps or len(set(distinct)) == len(distinct)
    if layout.dense:
        assert tensor.clone().stride() == tensor.stride()
        assert sorted(touched) == list(range(layout.span))
    copy = copy_of(tensor, layout)
    assert torch.equal(copy, tensor)
    assert copy.stride() == tensor.stride()
    assert copy.untyped_storage()._cdata != tensor.untyped_storage()._cdata


def test_contiguous_and_transposed_tensors_are_dense_and_sliced_ones_are_not() -> None:
    x = torch.zeros(3, 4, 5)
    assert Layout.of(x).dense and Layout.of(x.transpose(0, 2)).dense
    assert not Layout.of(x[:, :, 1:]).dense and not Layout.of(x[:, :, 1:]).overlaps
    assert not Layout.of(x[:1].expand(3, 4, 5)).dense and Layout.of(x[:1].expand(3, 4, 5)).repeats
