"""T5's buckets against transformers' own, at every distance."""

from __future__ import annotations

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from kernl.ops.relative_position import RelativePositionBias, relative_position_bucket


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (32, 20), (8, 64), (64, 1000), (12, 50)])
def test_buckets_at_every_distance(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    distance = torch.arange(-2200, 2201)
    want = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    assert torch.equal(relative_position_bucket(distance, num_buckets, bidirectional, max_distance), want)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_by_distance_holds_the_whole_bias(bidirectional: bool, dtype: torch.dtype) -> None:
    table = torch.randn(32, 3).to(dtype)
    bias = RelativePositionBias(table, bidirectional, 100)
    found = bias.by_distance()
    assert found.shape == (3, 201) and found.dtype == torch.float32 and found.is_contiguous()
    distance = torch.arange(-700, 701)
    bucket = T5Attention._relative_position_bucket(distance, bidirectional, 32, 100)
    assert torch.equal(found[:, distance.clamp(-100, 100) + 100], table.float()[bucket].T)


def test_the_gradient_goes_to_the_buckets() -> None:
    table = torch.randn(8, 2, requires_grad=True)
    RelativePositionBias(table, True, 16).by_distance().sum().backward()
    # Keys before the query at distances 0, 1, 2 to 5, 6 to 16; bucket 4, of distance 0 after it, belongs to nobody.
    assert table.grad is not None and table.grad[:, 0].tolist() == [1, 1, 4, 11, 0, 1, 4, 11]
    assert torch.equal(table.grad[:, 0], table.grad[:, 1])


def test_what_does_not_fit() -> None:
    with pytest.raises(TypeError, match=r"table: got torch.int64, accepted is a floating-point"):
        RelativePositionBias(torch.zeros(32, 2, dtype=torch.long))
    with pytest.raises(TypeError, match=r"table: got list"):
        RelativePositionBias([1.0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"table: got shape \[32\], accepted \[num_buckets, heads\]"):
        RelativePositionBias(torch.zeros(32))
    with pytest.raises(ValueError, match=r"table: got 7 buckets, accepted an even number"):
        RelativePositionBias(torch.zeros(7, 2))
    with pytest.raises(ValueError, match=r"table: got 1 buckets, accepted 2 or more"):
        RelativePositionBias(torch.zeros(1, 2), bidirectional=False)
    with pytest.raises(TypeError, match=r"max_distance: got 16.5, accepted is a whole number"):
        RelativePositionBias(torch.zeros(32, 2), max_distance=16.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"max_distance: got 8, accepted more than 8"):
        RelativePositionBias(torch.zeros(32, 2), max_distance=8)
