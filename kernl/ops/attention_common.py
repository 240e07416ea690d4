"""What the two directions of attention share: the formulas in plain PyTorch, layouts, and what the kernels take."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kernl.kernels.attention_common import FARTHEST, PHILOX_ROUNDS
from kernl.kernels.attention_problem import MAX_HEAD_DIM, DropoutOptions, PackedLengths, Positions, Scoring
from kernl.ops.common import empty, kernel_runs_on
from kernl.ops.relative_position import RelativePositionBias
from kernl.ops.transforms import VmapRule

SCORING_SCHEMA = (
    "Tensor? attn_mask, Tensor? key_padding, float scale, bool is_causal, str hidden_rows, SymInt? left=None, "
    "SymInt? right=None, SymInt offset=0, Tensor? q_offset=None, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? distance_bias=None, Tensor? bias=None, bool bias_before_scale=False, bool mask_hides=False, "
    "Tensor? prefix=None, float dropout_p=0.0, Tensor? dropout_seed=None, Tensor? dropout_offset=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, SymInt max_seqlen_k=0"
)
"""The arguments of both ops that `Scoring` holds."""


def scoring_of_op(
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
    bias: torch.Tensor | None = None,
    bias_before_scale: bool = False,
    mask_hides: bool = False,
    prefix: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: torch.Tensor | None = None,
    dropout_offset: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> Scoring:
    """From the arguments of `torch.ops.kernl.attention` after its operands, in their order."""
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.uint8):  # patterns pass numbers of any type
        attn_mask, bias = None, attn_mask
    alibi_slopes, distance_bias, q_offset, prefix = (
        None if tensor is None else tensor.contiguous() for tensor in (alibi_slopes, distance_bias, q_offset, prefix)
    )
    dropout = packed = None
    if dropout_p > 0:
        assert dropout_seed is not None and dropout_offset is not None
        dropout = DropoutOptions(dropout_p, dropout_seed, dropout_offset)
    if cu_seqlens_q is not None:
        assert cu_seqlens_k is not None
        packed = PackedLengths(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k)
    return Scoring(
        attn_mask,
        key_padding,
        scale,
        hidden_rows,
        Positions(left, right, offset if q_offset is None else q_offset, alibi_slopes, distance_bias, prefix),
        softcap,
        bias,
        bias_before_scale,
        mask_hides,
        dropout,
        packed,
    )


def over_batches(scoring_at: int) -> VmapRule:
    """vmap of an op as more batch rows. scoring_at: where the arguments of `SCORING_SCHEMA` begin, behind operands.

    Not where something belongs to a batch row besides operands and key_padding, or is summed over them.
    """

    def rule(op: Any, batch_size: int, dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any] | None:
        scoring, padding_at = scoring_of_op(*arguments[scoring_at:]), scoring_at + 1
        positions = scoring.positions
        by_row = (scoring.attn_mask, scoring.bias), (positions.alibi_slopes,), (positions.q_offset, positions.prefix)
        if (
            any(dim is not None for place, dim in enumerate(dims) if place >= scoring_at and place != padding_at)
            or any(argument is True for argument in arguments[:scoring_at])  # gradients of masks are wanted
            or any(tensor is not None and tensor.dim() == 4 and tensor.shape[0] > 1 for tensor in by_row[0])
            or any(tensor is not None and tensor.dim() == 2 for tensor in by_row[1])
            or any(isinstance(tensor, torch.Tensor) and tensor.numel() > 1 for tensor in by_row[2])
            or scoring.dropout is not None
            or scoring.packed is not None
        ):
            return None

        def folded(tensor: Any, dim: int | None) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            moved = tensor.expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return moved.flatten(0, 1)

        here = list(arguments)
        for place in (*range(scoring_at), padding_at):
            here[place] = folded(arguments[place], dims[place])
        runs_over_first = dims[0] is not None and dims[0] % arguments[0].dim() == 0
        rows = arguments[0].shape[int(runs_over_first)]
        results = op(*here)
        # The gradient of a mask that nobody wants is [0].
        apart = tuple(part.unflatten(0, (batch_size, rows)) if part.dim() > 1 else part for part in results)
        return apart, tuple(0 if part.dim() > 1 else None for part in results)

    return rule


def with_padding_recognised(scoring: Scoring, batch: int, seqlen_k: int) -> Scoring:
    """A bool mask that is the same for all heads and queries becomes a key padding, whose tiles are skipped."""
    if scoring.key_padding is not None or scoring.attn_mask is None or scoring.packed is not None:
        return scoring
    if scoring.mask_hides or scoring.attn_mask.dtype != torch.bool:
        return scoring
    key_padding = as_key_padding(scoring.attn_mask, batch, seqlen_k)
    return scoring if key_padding is None else dataclasses.replace(scoring, attn_mask=None, key_padding=key_padding)


def empty_by_rows(like: torch.Tensor, dim: int) -> torch.Tensor:
    batch, heads, seqlen, _ = like.shape
    return empty((batch, seqlen, heads, dim), dtype=like.dtype, device=like.device).transpose(1, 2)


def kernel_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> bool:
    widest = max(query.shape[3], value.shape[3])
    ieee = query.is_cuda and query.dtype == torch.float32 and float32_precision() == "ieee"
    # What dropout leaves of a mean of all values is not worth a kernel.
    drops_means = scoring.dropout is not None and scoring.hidden_rows == "mean" and scoring.can_hide_a_row
    return (
        kernel_runs_on(query, "attention")
        and widest <= MAX_HEAD_DIM
        and not (widest > 128 and ieee)
        and min(query.numel(), key.numel(), value.numel()) > 0
        and key.shape[2] == value.shape[2]  # otherwise the error is PyTorch's
        and not drops_means
        and not any(
            tensor is not None and tensor.dtype == torch.float64
            for tensor in (scoring.bias, scoring.positions.alibi_slopes, scoring.positions.distance_bias)
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
    """int64 [rows, seqlen_k], or [batch, 1, rows, seqlen_k]: how far each key is after each of the queries `rows`."""
    queries = torch.arange(rows.start, rows.stop, device=device)
    offset = positions.q_offset
    if isinstance(offset, torch.Tensor):
        queries = queries + (offset.reshape(()) if offset.numel() == 1 else offset.view(-1, 1, 1))
    else:
        queries = queries + offset
    return torch.arange(seqlen_k, device=device) - queries[..., None]


def visible_keys(scoring: Scoring, rows: range, seqlen_k: int, device: torch.device) -> torch.Tensor | None:
    """Which keys the queries `rows` may see: bool, broadcastable to [batch, heads, rows, seqlen_k]; None for all."""
    conditions: list[torch.Tensor] = []
    mask = slice_rows(scoring.attn_mask, rows)
    if mask is not None:
        conditions.append((mask == 0) if scoring.mask_hides else (mask != 0))
    if scoring.key_padding is not None:
        conditions.append(unpadded_keys(scoring.key_padding, seqlen_k)[:, None, None, :])
    left, right, prefix = scoring.positions.left, scoring.positions.right, scoring.positions.prefix
    if left is not None or right is not None:
        distance = distances(scoring.positions, rows, seqlen_k, device)
        if right is None:
            in_window = distance >= -left  # type: ignore[operator]
        else:
            in_window = distance <= right
            if left is not None:
                in_window = in_window & (distance >= -left)
        if prefix is not None:
            in_window = in_window | (torch.arange(seqlen_k, device=device) < prefix.view(-1, 1, 1, 1))
        conditions.append(in_window)
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


_LOW = 0xFFFFFFFF


def _multiplied(factor: int, word: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The high and the low 32 bits of the product of two numbers of 32 bits, in int64 arithmetic that cannot overflow
    where it matters."""
    low = factor * (word & 0xFFFF)
    high = (factor * (word >> 16) + (low >> 16)) >> 16
    return high, (factor * word) & _LOW


def philox(
    seed: torch.Tensor,
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rounds: int = PHILOX_ROUNDS.value,
) -> tuple[torch.Tensor, ...]:
    """Four words of 32 random bits for each counter: Philox 4x32 (Salmon et al. 2011), in PyTorch's int64."""
    first, second, third, fourth = (word & _LOW for word in counter)
    key = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(rounds):
        high_b, low_b = _multiplied(0xCD9E8D57, third)
        high_a, low_a = _multiplied(0xD2511F53, first)
        first, second, third, fourth = high_b ^ second ^ key[0], low_b, high_a ^ fourth ^ key[1], low_a
        key = [(key[0] + 0x9E3779B9) & _LOW, (key[1] + 0xBB67AE85) & _LOW]
    return first, second, third, fourth


def kept_by_dropout(dropout: DropoutOptions, batch: int, heads: int, rows: range, seqlen_k: int) -> torch.Tensor:
    """bool [batch, heads, rows, seqlen_k]: what is left, bit for bit as the kernels leave it."""
    device = dropout.seed.device
    quads = torch.arange((seqlen_k + 3) // 4, device=device)
    queries = torch.arange(rows.start, rows.stop, device=device)[:, None]
    batch_heads = torch.arange(batch * heads, device=device)[:, None, None] + dropout.first_batch * heads
    counter = torch.broadcast_tensors(quads, queries, batch_heads, dropout.offset.reshape(()))
    words = torch.stack(philox(dropout.seed.reshape(()), counter), -1)  # type: ignore[arg-type]
    kept = (words >> 1) >= dropout.threshold
    return kept.flatten(-2)[..., :seqlen_k].view(batch, heads, len(rows), seqlen_k)


@dataclass(frozen=True)
class Softmax:
    """Over the visible keys, for some queries.

    probabilities [batch, heads, rows, seqlen_k], 0 in hidden rows; logsumexp, maximum and hidden (bool) [batch, heads,
    rows]; slope: derivative of the capped scores by the uncapped ones, of the shape of the probabilities; None without
    a cap. factors: what dropout multiplies the probabilities by, 0 or 1 / (1 - p); None without dropout.
    """

    probabilities: torch.Tensor
    logsumexp: torch.Tensor
    maximum: torch.Tensor
    hidden: torch.Tensor
    slope: torch.Tensor | None
    factors: torch.Tensor | None

    @property
    def weights(self) -> torch.Tensor:
        """What the values are multiplied by."""
        return self.probabilities if self.factors is None else self.probabilities * self.factors

    def of_means(self) -> torch.Tensor:
        """The weights of all values in rows that are hidden, 0 in others."""
        weights = self.hidden[..., None] / self.probabilities.new_full((), self.probabilities.shape[3])
        return weights.expand_as(self.probabilities) if self.factors is None else weights * self.factors


def softmax_over_visible(query: torch.Tensor, key: torch.Tensor, scoring: Scoring, rows: range) -> Softmax:
    """query holds the queries `rows` only; key has padded keys zeroed already."""
    batch, heads, count, _ = query.shape
    key_heads, seqlen_k = key.shape[1:3]
    scores = (by_key_head(query, key_heads) @ key.mT).view(batch, heads, count, seqlen_k)
    bias = slice_rows(scoring.bias, rows)
    if bias is not None and scoring.bias_before_scale:
        scores = scores + bias.to(scores.dtype)
    scores = scores * scoring.scale
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
            # [heads, rows, seqlen_k], or [heads, batch, 1, rows, seqlen_k]
            by_distance = positions.distance_bias.to(scores.dtype)[:, bias_index(positions, distance)]
            scores = scores + (by_distance if by_distance.dim() == 3 else by_distance.squeeze(2).transpose(0, 1))
    if bias is not None and not scoring.bias_before_scale:
        scores = scores + bias.to(scores.dtype)
    visible = visible_keys(scoring, rows, seqlen_k, query.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    hidden = (scores == -math.inf).all(-1)  # [batch, heads, rows]
    logsumexp = scores.logsumexp(-1).masked_fill(hidden, -math.inf)
    maximum = scores.amax(-1) if seqlen_k > 0 else torch.full_like(logsumexp, -math.inf)
    factors = None
    if scoring.dropout is not None:
        kept = kept_by_dropout(scoring.dropout, batch, heads, rows, seqlen_k)
        factors = kept.to(scores.dtype) / (1 - scoring.dropout.p)
    probabilities = scores.softmax(-1).masked_fill(hidden[..., None], 0.0)
    return Softmax(probabilities, logsumexp, maximum, hidden, slope, factors)


def bias_index(positions: Positions, distance: torch.Tensor) -> torch.Tensor:
    """Where in a row of distance_bias the bias of each distance stands."""
    assert positions.distance_bias is not None
    reach = positions.distance_bias.shape[1] // 2
    return distance.clamp(-reach, reach) + reach


@dataclass(frozen=True)
class Sequence:
    """One of several packed sequences: its queries, its keys, and the scoring of it alone."""

    number: int
    queries: slice
    keys: slice
    scoring: Scoring

    def of_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The part of an attn_mask, a bias or a gradient of one that belongs to the sequence: a view."""
        return _of_sequence(mask, self.number, self.queries.stop - self.queries.start, self.keys.stop - self.keys.start)


def _of_sequence(mask: torch.Tensor, number: int, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    if mask.dim() == 4 and mask.shape[0] > 1:
        mask = mask[number : number + 1]
    if mask.dim() >= 1 and mask.shape[-1] > 1:
        mask = mask[..., :seqlen_k]
    if mask.dim() >= 2 and mask.shape[-2] > 1:
        mask = mask[..., :seqlen_q, :]
    return mask


def sequences_of(scoring: Scoring) -> Iterator[Sequence]:
    """The packed sequences, one by one. Reads the lengths: on a GPU this waits for it."""
    packed = scoring.packed
    assert packed is not None
    bounds_q, bounds_k = packed.cu_seqlens_q.tolist(), packed.cu_seqlens_k.tolist()
    positions, dropout = scoring.positions, scoring.dropout
    for number in range(packed.sequences):
        queries = slice(bounds_q[number], bounds_q[number + 1])
        keys = slice(bounds_k[number], bounds_k[number + 1])
        lengths = (queries.stop - queries.start, keys.stop - keys.start)
        here = slice(number, number + 1)
        offset, slopes = positions.q_offset, positions.alibi_slopes
        of_sequence = dataclasses.replace(
            positions,
            q_offset=offset[here] if isinstance(offset, torch.Tensor) and offset.numel() > 1 else offset,
            alibi_slopes=slopes[here] if slopes is not None and slopes.dim() == 2 else slopes,
            prefix=None if positions.prefix is None else positions.prefix[here],
        )
        mask, bias = (
            None if tensor is None else _of_sequence(tensor, number, *lengths)
            for tensor in (scoring.attn_mask, scoring.bias)
        )
        alone = dataclasses.replace(
            scoring,
            attn_mask=mask,
            bias=bias,
            positions=of_sequence,
            dropout=None if dropout is None else dataclasses.replace(dropout, first_batch=number),
            packed=None,
        )
        yield Sequence(number, queries, keys, alone)


def attention_by_formulas(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, logsumexp, statistics), in float64 for float64 operands, else in float32; the last two have that type.

    statistics [2, batch, heads, seqlen_q]: maximum of the scores, and sum of exp(score - maximum).
    """
    if scoring.packed is not None:
        shape = (*query.shape[:3], value.shape[3])
        output = query.new_zeros(shape)
        compute = torch.float64 if query.dtype == torch.float64 else torch.float32
        logsumexp = torch.empty(query.shape[:3], dtype=compute, device=query.device)
        statistics = torch.empty((2, *query.shape[:3]), dtype=compute, device=query.device)
        for sequence in sequences_of(scoring):
            operands = (query[:, :, sequence.queries], key[:, :, sequence.keys], value[:, :, sequence.keys])
            results = attention_by_formulas(*operands, sequence.scoring)
            output[:, :, sequence.queries], logsumexp[:, :, sequence.queries] = results[:2]
            statistics[:, :, :, sequence.queries] = results[2]
        return output, logsumexp, statistics
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, seqlen_q, _ = query.shape
    key_heads = key.shape[1]
    keys = without_padded(key.to(compute), scoring.key_padding)
    softmax = softmax_over_visible(query.to(compute), keys, scoring, range(seqlen_q))
    values = without_padded(value.to(compute), scoring.key_padding)
    shape = (batch, heads, seqlen_q, value.shape[3])
    output = (by_key_head(softmax.weights, key_heads) @ values).view(shape)
    logsumexp = softmax.logsumexp
    statistics = torch.stack([softmax.maximum, (logsumexp - softmax.maximum).exp().masked_fill(softmax.hidden, 0)])
    if scoring.dropout is not None and scoring.hidden_rows == "mean" and value.shape[2] > 0 and softmax.hidden.any():
        means = (by_key_head(softmax.of_means(), key_heads) @ value.to(compute)).view(shape)
        output = torch.where(softmax.hidden[..., None], means, output)
        logsumexp = logsumexp.masked_fill(softmax.hidden, torch.finfo(torch.float32).min)
    else:
        output, logsumexp = fill_hidden_rows(output, logsumexp, softmax.hidden, value, scoring.hidden_rows)
    return output.to(query.dtype), logsumexp, statistics


def fill_hidden_rows(
    output: torch.Tensor, logsumexp: torch.Tensor, hidden: torch.Tensor, value: torch.Tensor, hidden_rows: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if hidden_rows == "mean" and hidden.any():
        if value.shape[2] > 0:
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
    bias: torch.Tensor | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    prefix: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    alibi_slopes: torch.Tensor | None = None,
    relative_position_bias: RelativePositionBias | None = None,
    softcap: float | None = None,
    bias_before_scale: bool = False,
    mask_hides: bool = False,
    hidden_rows: str = "zero",
    dropout_p: float = 0.0,
    seed: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int = 0,
    max_seqlen_k: int = 0,
) -> tuple[Any, ...]:
    """What `kernl.ops.attention` takes by name, as the arguments of the op after its operands (`SCORING_SCHEMA`).

    With dropout both seed and offset are given, as tensors.
    """
    in_memory = isinstance(q_offset, torch.Tensor)
    return (
        attn_mask,
        key_padding,
        1 / math.sqrt(head_dim) if scale is None else float(scale),
        bool(is_causal),
        hidden_rows,
        *(None if side < 0 else min(side, FARTHEST.value) for side in window),
        0 if in_memory else q_offset,
        q_offset.reshape(-1) if isinstance(q_offset, torch.Tensor) else None,
        float(softcap or 0.0),
        alibi_slopes,
        None if relative_position_bias is None else relative_position_bias.by_distance(),
        bias,
        bias_before_scale,
        mask_hides,
        prefix,
        float(dropout_p),
        seed if dropout_p > 0 else None,
        offset if dropout_p > 0 else None,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
    )


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention from its formulas, whatever kernels there are. options: those of `kernl.ops.attention`.

    Returns (output, logsumexp). Computes in float64 for float64 operands, else in float32; logsumexp has that type.
    """
    return attention_by_formulas(query, key, value, scoring_of_op(*op_arguments(query.shape[3], **options)))[:2]
