"""What the two directions of attention share: the formulas in plain PyTorch, layouts, and what the kernels take."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from kernl.kernels.attention import ANYWHERE, FARTHEST, MAX_HEAD_DIM, Positions
from kernl.ops.common import empty, kernel_runs_on
from kernl.ops.relative_position import RelativePositionBias

SCORING_SCHEMA = (
    "Tensor? attn_mask, Tensor? key_padding, float scale, bool is_causal, str hidden_rows, SymInt? left=None, "
    "SymInt? right=None, SymInt offset=0, Tensor? q_offset=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? distance_bias=None"
)
"""The arguments of both ops that `Scoring` holds."""


@dataclass(frozen=True)
class Scoring:
    """What makes probabilities of the products of queries and keys: all of the op's arguments but the operands.

    attn_mask, key_padding, hidden_rows: as `kernl.ops.attention` takes them. positions: windows, the offset of the
    queries, and what is added by distance. softcap: 0 for none.
    """

    attn_mask: torch.Tensor | None = None
    key_padding: torch.Tensor | None = None
    scale: float = 1.0
    hidden_rows: str = "zero"
    positions: Positions = ANYWHERE
    softcap: float = 0.0

    @classmethod
    def of_op(
        cls,
        attn_mask: torch.Tensor | None,
        key_padding: torch.Tensor | None,
        scale: float,
        is_causal: bool,
        hidden_rows: str,
        left: int | None = None,
        right: int | None = None,
        offset: int = 0,
        q_offset: torch.Tensor | None = None,
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        distance_bias: torch.Tensor | None = None,
    ) -> Scoring:
        """From the arguments of `torch.ops.kernl.attention`, in their order."""
        if is_causal:
            right = 0 if right is None else min(right, 0)
        alibi_slopes, distance_bias = (
            None if tensor is None else tensor.contiguous() for tensor in (alibi_slopes, distance_bias)
        )
        positions = Positions(left, right, offset if q_offset is None else q_offset, alibi_slopes, distance_bias)
        return cls(attn_mask, key_padding, scale, hidden_rows, positions, softcap)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but masks, and causality from the top left at most."""
        return self.softcap == 0 and self.positions.is_plain

    @property
    def is_causal(self) -> bool:
        return self.positions.right == 0

    @property
    def kind_of_mask(self) -> str:
        return "none" if self.attn_mask is None else "bool" if self.attn_mask.dtype == torch.bool else "float"

    @property
    def kind_of_padding(self) -> str:
        return "none" if self.key_padding is None else "bool" if self.key_padding.dtype == torch.bool else "lengths"

    @property
    def kinds_of_position(self) -> tuple[bool, ...]:
        """Which things that are not plain there are: implementations are chosen by them."""
        positions = self.positions
        return (
            positions.right is not None,
            positions.left is not None,
            self.softcap != 0,
            positions.alibi_slopes is not None,
            positions.distance_bias is not None,
        )

    def with_padding_recognised(self, batch: int, seqlen_k: int) -> Scoring:
        """A bool mask that is the same for all heads and queries becomes a key padding, whose tiles are skipped."""
        if self.key_padding is not None or self.kind_of_mask != "bool":
            return self
        assert self.attn_mask is not None
        key_padding = as_key_padding(self.attn_mask, batch, seqlen_k)
        if key_padding is None:
            return self
        return dataclasses.replace(self, attn_mask=None, key_padding=key_padding)


def empty_by_rows(like: torch.Tensor, dim: int) -> torch.Tensor:
    batch, heads, seqlen, _ = like.shape
    return empty((batch, seqlen, heads, dim), dtype=like.dtype, device=like.device).transpose(1, 2)


def kernel_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> bool:
    widest = max(query.shape[3], value.shape[3])
    ieee = query.is_cuda and query.dtype == torch.float32 and float32_precision() == "ieee"
    return (
        kernel_runs_on(query, "attention")
        and widest <= MAX_HEAD_DIM
        and not (widest > 128 and ieee)
        and min(query.numel(), key.numel(), value.numel()) > 0
        and not any(
            tensor is not None and tensor.dtype == torch.float64
            for tensor in (scoring.attn_mask, scoring.positions.alibi_slopes, scoring.positions.distance_bias)
        )
    )


def as_key_padding(attn_mask: torch.Tensor, batch: int, seqlen_k: int) -> torch.Tensor | None:
    """A bool mask that is the same for all heads and queries, as a key padding, whose hidden tiles are skipped."""
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if any(mask.shape[dim] > 1 and mask.stride(dim) != 0 for dim in (1, 2)):
        return None
    return mask[:, 0, 0].expand(batch, seqlen_k)


def float32_precision() -> str:
    """Whether TF32 is allowed, by either of PyTorch's switches: the older cannot be read once the newer was set."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


# The formulas


def distances(positions: Positions, rows: range, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """int64 [rows, seqlen_k]: how far each key is after each of the queries `rows`."""
    queries = torch.arange(rows.start, rows.stop, device=device) + positions.q_offset
    return torch.arange(seqlen_k, device=device)[None, :] - queries[:, None]


def visible_keys(scoring: Scoring, rows: range, seqlen_k: int, device: torch.device) -> torch.Tensor | None:
    """Which keys the queries `rows` may see: bool, broadcastable to [batch, heads, rows, seqlen_k]; None for all."""
    conditions: list[torch.Tensor] = []
    mask = slice_rows(scoring.attn_mask, rows)
    if mask is not None and mask.dtype == torch.bool:
        conditions.append(mask)
    if scoring.key_padding is not None:
        conditions.append(unpadded_keys(scoring.key_padding, seqlen_k)[:, None, None, :])
    left, right = scoring.positions.left, scoring.positions.right
    if left is not None or right is not None:
        distance = distances(scoring.positions, rows, seqlen_k, device)
        if right is not None:
            conditions.append(distance <= right)
        if left is not None:
            conditions.append(distance >= -left)
    visible: torch.Tensor | None = None
    for condition in conditions:
        visible = condition if visible is None else visible & condition
    return visible


def unpadded_keys(key_padding: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """bool [batch, seqlen_k] from either form of key_padding."""
    if key_padding.dtype == torch.bool:
        return key_padding
    return torch.arange(seqlen_k, device=key_padding.device)[None, :] < key_padding[:, None]


def without_padded(tensor: torch.Tensor, key_padding: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, seqlen_k, dim] with zeros at padded keys, so that NaN stored there goes nowhere."""
    if key_padding is None:
        return tensor
    return tensor.masked_fill(~unpadded_keys(key_padding, tensor.shape[2])[:, None, :, None], 0)


def slice_rows(mask: torch.Tensor | None, rows: range) -> torch.Tensor | None:
    """The rows of a broadcastable attn_mask that belong to some queries."""
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., rows.start : rows.stop, :]


def by_key_head(tensor: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[batch, heads, rows, dim] as [batch, key_heads, group * rows, dim]: queries that share a key head together."""
    batch, heads, rows, dim = tensor.shape
    return tensor.reshape(batch, key_heads, heads // key_heads * rows, dim)


@dataclass(frozen=True)
class Softmax:
    """Over the visible keys, for some queries.

    probabilities [batch, heads, rows, seqlen_k], 0 in hidden rows; logsumexp and hidden (bool) [batch, heads, rows];
    slope: derivative of the capped scores by the uncapped ones, of the shape of the probabilities; None without a cap.
    """

    probabilities: torch.Tensor
    logsumexp: torch.Tensor
    hidden: torch.Tensor
    slope: torch.Tensor | None


def softmax_over_visible(query: torch.Tensor, key: torch.Tensor, scoring: Scoring, rows: range) -> Softmax:
    """query holds the queries `rows` only; key has padded keys zeroed already."""
    batch, heads, count, _ = query.shape
    key_heads, seqlen_k = key.shape[1:3]
    scores = (by_key_head(query, key_heads) @ key.mT).view(batch, heads, count, seqlen_k) * scoring.scale
    slope = None
    if scoring.softcap != 0:
        capped = (scores / scoring.softcap).tanh()
        scores, slope = scoring.softcap * capped, 1 - capped * capped
    positions = scoring.positions
    if positions.alibi_slopes is not None or positions.distance_bias is not None:
        distance = distances(positions, rows, seqlen_k, query.device)
        if positions.alibi_slopes is not None:
            scores = scores - positions.alibi_slopes.to(scores.dtype).view(-1, heads, 1, 1) * distance.abs()
        if positions.distance_bias is not None:
            scores = scores + positions.distance_bias.to(scores.dtype)[:, bias_index(positions, distance)]
    if scoring.kind_of_mask == "float":
        mask = slice_rows(scoring.attn_mask, rows)
        assert mask is not None
        scores = scores + mask.to(scores.dtype)
    visible = visible_keys(scoring, rows, seqlen_k, query.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    hidden = (scores == -math.inf).all(-1)  # [batch, heads, rows]
    logsumexp = scores.logsumexp(-1).masked_fill(hidden, -math.inf)
    return Softmax(scores.softmax(-1).masked_fill(hidden[..., None], 0.0), logsumexp, hidden, slope)


def bias_index(positions: Positions, distance: torch.Tensor) -> torch.Tensor:
    """Where in a row of distance_bias the bias of each distance stands."""
    assert positions.distance_bias is not None
    reach = positions.distance_bias.shape[1] // 2
    return distance.clamp(-reach, reach) + reach


def attention_by_formulas(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, logsumexp), in float64 for float64 operands, else in float32; logsumexp has that type."""
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, seqlen_q, _ = query.shape
    keys = without_padded(key.to(compute), scoring.key_padding)
    softmax = softmax_over_visible(query.to(compute), keys, scoring, range(seqlen_q))
    values = without_padded(value.to(compute), scoring.key_padding)
    output = (by_key_head(softmax.probabilities, key.shape[1]) @ values).view(batch, heads, seqlen_q, value.shape[3])
    output, logsumexp = fill_hidden_rows(output, softmax.logsumexp, softmax.hidden, value, scoring.hidden_rows)
    return output.to(query.dtype), logsumexp


def fill_hidden_rows(
    output: torch.Tensor, logsumexp: torch.Tensor, hidden: torch.Tensor, value: torch.Tensor, hidden_rows: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if hidden_rows == "mean" and value.shape[2] > 0 and hidden.any():
        group = output.shape[1] // value.shape[1]
        mean = value.to(output.dtype).mean(2, keepdim=True).repeat_interleave(group, 1)
        output = torch.where(hidden[..., None], mean, output)
        logsumexp = logsumexp.masked_fill(hidden, torch.finfo(torch.float32).min)
    return output, logsumexp


def op_arguments(
    head_dim: int,
    *,
    scale: float | None = None,
    attn_mask: torch.Tensor | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    q_offset: int | torch.Tensor = 0,
    alibi_slopes: torch.Tensor | None = None,
    relative_position_bias: RelativePositionBias | None = None,
    softcap: float | None = None,
    hidden_rows: str = "zero",
) -> tuple[Any, ...]:
    """What `kernl.ops.attention` takes by name, as the arguments of the op after its operands (`SCORING_SCHEMA`)."""
    in_memory = isinstance(q_offset, torch.Tensor)
    return (
        attn_mask,
        key_padding,
        1 / math.sqrt(head_dim) if scale is None else float(scale),
        bool(is_causal),
        hidden_rows,
        *(None if side < 0 else min(side, FARTHEST.value) for side in window),
        0 if in_memory else q_offset,
        q_offset.reshape(()) if isinstance(q_offset, torch.Tensor) else None,
        float(softcap or 0.0),
        alibi_slopes,
        None if relative_position_bias is None else relative_position_bias.by_distance(),
    )


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention from its formulas, whatever kernels there are. options: those of `kernl.ops.attention`.

    Returns (output, logsumexp). Computes in float64 for float64 operands, else in float32; logsumexp has that type.
    """
    return attention_by_formulas(query, key, value, Scoring.of_op(*op_arguments(query.shape[3], **options)))
