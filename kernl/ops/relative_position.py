"""T5's relative position bias: a learned number for each head and bucket of distances.

Distances up to half of the buckets have one each; beyond, buckets widen with the logarithm of the distance, and from
max_distance on there is one for all. So a bias depends on the head and on key - query alone, and is the same for all
distances from max_distance on: a table of 2 * max_distance + 1 numbers a head holds all of it, which is what the
kernel reads in place of a [heads, seqlen_q, seqlen_k] tensor.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020
(arXiv:1910.10683).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class RelativePositionBias:
    """Added to the scores: table[bucket(key - query), head].

    table: [num_buckets, heads], floating point; it may need a gradient.
    bidirectional: half of the buckets for keys after the query (encoders); else all of those share bucket 0 (decoders).
    max_distance: from here on all distances share a bucket.

    Raises TypeError or ValueError naming the argument when they do not fit.
    """

    table: torch.Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        table = self.table
        if not isinstance(table, torch.Tensor) or not table.is_floating_point():
            given = table.dtype if isinstance(table, torch.Tensor) else type(table).__name__
            raise TypeError(f"table: got {given}, accepted is a floating-point tensor [num_buckets, heads]")
        if table.dim() != 2:
            raise ValueError(f"table: got shape {list(table.shape)}, accepted [num_buckets, heads]")
        fewest = 4 if self.bidirectional else 2
        if table.shape[0] < fewest or (self.bidirectional and table.shape[0] % 2):
            kind = "an even number of 4 or more" if self.bidirectional else "2 or more"
            raise ValueError(f"table: got {table.shape[0]} buckets, accepted {kind}")
        if isinstance(self.max_distance, bool) or not isinstance(self.max_distance, int):
            raise TypeError(f"max_distance: got {self.max_distance!r}, accepted is a whole number")
        if self.max_distance <= self._exact:
            raise ValueError(
                f"max_distance: got {self.max_distance}, accepted more than {self._exact}, the distances with a bucket "
                "of their own"
            )

    @property
    def _exact(self) -> int:
        """Distances with a bucket of their own, on one side."""
        return self.table.shape[0] // (4 if self.bidirectional else 2)

    def by_distance(self) -> torch.Tensor:
        """[heads, 2 * max_distance + 1], contiguous: the bias at distances -max_distance to max_distance.

        float32, or float64 where the table is that. Differentiable in the table.
        """
        reach = self.max_distance
        distance = torch.arange(-reach, reach + 1, device=self.table.device)
        bucket = relative_position_bucket(distance, self.table.shape[0], self.bidirectional, reach)
        table = self.table if self.table.dtype == torch.float64 else self.table.float()
        return table.T[:, bucket].contiguous()


def relative_position_bucket(
    distance: torch.Tensor, num_buckets: int, bidirectional: bool, max_distance: int
) -> torch.Tensor:
    """The bucket of each distance key - query (int64, any shape), in the float32 arithmetic of T5's own definition."""
    offset = torch.zeros_like(distance)
    if bidirectional:
        num_buckets //= 2
        offset = torch.where(distance > 0, num_buckets, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = num_buckets // 2
    growth = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (num_buckets - exact)
    # Where a distance has a bucket of its own the logarithm is not used, and may be that of zero.
    far = (exact + growth.clamp(min=0).to(torch.int64)).clamp(max=num_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
