"""Attention for few queries and many keys (decoding): the keys are split among programs, whose results are combined.

The formulas are those of `kernl.kernels.attention`. There a program owns queries of one head and walks over all of
their keys: with one query, batch * heads programs read keys and values, each group of query heads the same ones again.
Here a program owns all queries of all heads that share a key head (the rows of its tile, at least 16), and one of
`splits` shares of the keys, so that each key and value is read once and every multiprocessor has something to read.

With the share p of the keys, program p keeps m_p (maximum of the scores), l_p (sum of exp(s - m_p)) and o_p (the same
sum with values). The second kernel owns one query of one head:

    m = max_p m_p      a_p = exp(m_p - m)      l = sum_p a_p l_p      out = sum_p a_p o_p / l      lse = m + log l

which is exact whatever the shares are; a share without visible keys has m_p = -inf and l_p = 0. With one share the
first kernel writes the result itself. Flash-Decoding (Dao, Haziza, Massa and Sizov 2023).

What is shared out are the visible keys, found when the kernel runs: a static cache of 32768 tokens of which 500 are
filled (q_offset in memory and causal, or lengths, or a window) is read up to there, by all programs. A bool padding is
looked at share by share instead: tiles before its first and after its last visible key are not read, but the shares
are then as uneven as the padding is.

Bytes  K + V once, queries and output; with more than one share 4 * splits * (value_dim + 2) for each query and head,
       written and read again (out of L2). Flops as in the forward pass, on tiles of at least 16 rows: far below what
       the bytes cost.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernl.kernels.attention import attend, finished, mean_of_values
from kernl.kernels.attention_common import (
    ABSENT,
    BOOL,
    FARTHEST,
    LENGTHS,
    LN2,
    LOG2E,
    LOWEST,
    Dropout,
    Mask,
    Padding,
    Rows,
    Scores,
    Window,
    clamped,
    key_tiles,
    load_rows,
    number_of_tiles,
    offset_of_head,
    start_of_tile,
    visible_range,
)
from kernl.kernels.attention_problem import (
    UNSPECIALIZED,
    Configuration,
    Scoring,
    Variant,
    case_of,
    of_kernel,
    scoring_arguments,
    tilings,
)
from kernl.kernels.common import (
    TRITON_TYPES,
    AotCase,
    block_of,
    count_launch,
    let_next_kernel_start,
    to_storage,
    wait_for_previous_kernel,
)

MAX_QUERIES = 16
MAX_SPLITS = 128
_COMBINE_CHUNK = tl.constexpr(16)


@triton.jit
def _rows_of_heads(heads, stride_h, queries, stride_m, ALIGNMENT: tl.constexpr):
    """int64 [rows, 1]: where the row of each head and query begins."""
    offsets = (heads.to(tl.int64) * stride_h + queries.to(tl.int64) * stride_m)[:, None]
    if ALIGNMENT > 1:
        offsets = tl.multiple_of(offsets, [ALIGNMENT, ALIGNMENT])
    return offsets


@triton.jit(do_not_specialize=UNSPECIALIZED)
def kernl_attention_decode(
    query,
    key,
    value,
    attn_mask,
    bias,
    key_padding,
    alibi_slopes,
    distance_bias,
    prefix,
    q_offset,
    output,
    logsumexp,
    row_maximum,
    row_total,
    partial,
    query_stride_b,
    query_stride_h,
    query_stride_m,
    query_stride_d,
    key_stride_b,
    key_stride_h,
    key_stride_n,
    key_stride_d,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    value_stride_d,
    mask_stride_b,
    mask_stride_h,
    mask_stride_m,
    mask_stride_n,
    bias_stride_b,
    bias_stride_h,
    bias_stride_m,
    bias_stride_n,
    padding_stride_b,
    padding_stride_n,
    alibi_stride_b,
    offset_stride_b,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    right,
    left,
    reach,
    row_blocks,
    splits,
    score_scale,
    softcap,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HOW: tl.constexpr,
):
    """Row r of a tile is query r % seqlen_q of the r // seqlen_q-th head of the group."""
    wait_for_previous_kernel(HOW.use_pdl)
    let_next_kernel_start(HOW.use_pdl)

    program = tl.program_id(0)
    split = program % splits
    row_block = program // splits % row_blocks
    batch_key_head = program // splits // row_blocks
    key_heads = heads // group
    batch = batch_key_head // key_heads
    key_head = batch_key_head % key_heads
    batch64 = batch.to(tl.int64)
    key_head64 = key_head.to(tl.int64)

    rows = row_block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    row_is_valid = rows < group * seqlen_q
    rows = tl.minimum(rows, group * seqlen_q - 1)
    head_of_row = key_head * group + rows // seqlen_q
    query_of_row = rows % seqlen_q

    key += offset_of_head(batch64, key_stride_b, key_head64, key_stride_h, HOW.alignment)
    value += offset_of_head(batch64, value_stride_b, key_head64, value_stride_h, HOW.alignment)
    keys = Rows(key, key_stride_n, key_stride_d)
    values = Rows(value, value_stride_n, value_stride_d)
    if HOW.mask != ABSENT:
        attn_mask += offset_of_head(batch64, mask_stride_b, key_head64, 0, HOW.mask_alignment)
    if HOW.bias != ABSENT:
        bias += offset_of_head(batch64, bias_stride_b, key_head64, 0, HOW.bias_alignment)
    mask_rows = _rows_of_heads(head_of_row, mask_stride_h, query_of_row, mask_stride_m, HOW.mask_alignment)
    bias_rows = _rows_of_heads(head_of_row, bias_stride_h, query_of_row, bias_stride_m, HOW.bias_alignment)
    mask = Mask(attn_mask, mask_rows, mask_stride_n)
    added = Mask(bias, bias_rows, bias_stride_n)
    if HOW.key_padding != ABSENT:
        key_padding += batch64 * padding_stride_b
    padding = Padding(key_padding, padding_stride_n)
    slope = tl.load(alibi_slopes + batch64 * alibi_stride_b + head_of_row)[:, None] if HOW.alibi else 0.0
    if HOW.distance_bias:
        distance_bias += head_of_row[:, None] * (2 * reach + 1)
    scoring = Scores(score_scale, softcap, slope, distance_bias, reach)
    if HOW.top_left:
        right = 0
        offset = 0
    elif HOW.offset_in_memory:
        offset = clamped(tl.load(q_offset + batch * offset_stride_b), FARTHEST).to(tl.int32)
    else:
        offset = q_offset
    prefix_end = tl.load(prefix + batch).to(tl.int32) if HOW.has_prefix else 0
    window = Window(left, right, prefix_end)
    last_position = offset + seqlen_q - 1

    # This program's share [first, end) of the keys that some query may see by its position and the lengths.
    end = seqlen_k
    if HOW.key_padding == LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(key_padding), 0), seqlen_k)
    unpadded_end = end
    first = 0
    if HOW.has_right:
        end = tl.minimum(end, tl.maximum(last_position + right + 1, 0))
    if HOW.has_prefix:
        end = tl.maximum(end, tl.minimum(prefix_end, unpadded_end))
    elif HOW.has_left:
        first = tl.minimum(tl.maximum(offset - left, 0), end)
    first_tile = first // BLOCK_N
    share = tl.cdiv(tl.cdiv(end, BLOCK_N) - first_tile, splits)
    first = (first_tile + split * share) * BLOCK_N
    end = tl.minimum(end, first + share * BLOCK_N)
    gapless = True
    if HOW.key_padding == BOOL:
        here = Padding(key_padding + first.to(tl.int64) * padding_stride_n, padding_stride_n)
        first_of_share, end_of_share, gapless = visible_range(here, tl.maximum(end - first, 0), BOOL, True)
        end = first + end_of_share
        first += first_of_share
    tiles = key_tiles(first, end, gapless, offset, last_position, window, BLOCK_N, HOW)

    query += offset_of_head(batch64, query_stride_b, key_head64, 0, HOW.alignment)
    query_offsets = head_of_row.to(tl.int64) * query_stride_h + query_of_row.to(tl.int64) * query_stride_m
    query_tile = load_rows(
        Rows(query, 1, query_stride_d), 0, query_offsets, row_is_valid, HOW.head_dim, HOW.block_d, True, HOW.alignment
    )  # [BLOCK_M, BLOCK_D]
    BLOCK_DV: tl.constexpr = HOW.block_dv
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for TEST_KEYS in tl.static_range(2):
        for tile in tl.range(0, number_of_tiles(tiles, BLOCK_N, TEST_KEYS), num_stages=2 if TEST_KEYS else None):
            result, row_max, row_sum = attend(
                result,
                row_max,
                row_sum,
                query_tile,
                keys,
                values,
                (None, None, 0, 0, 0),
                start_of_tile(tiles, tile, BLOCK_N, TEST_KEYS, HOW),
                tiles.first,
                tiles.end,
                query_of_row,
                query_of_row + offset,
                padding,
                window,
                mask,
                added,
                scoring,
                Dropout(0, 0, 0, 0),
                BLOCK_M,
                BLOCK_N,
                TEST_KEYS,
                False,
                HOW,
            )

    columns = tl.arange(0, BLOCK_DV)
    stored = row_is_valid[:, None] & (columns < HOW.value_dim)[None, :]
    row64 = (batch64 * heads + head_of_row) * seqlen_q + query_of_row  # of all rows of statistics
    if IS_SPLIT:
        # partial: [splits, rows, VALUE_DIM + 2], the unnormalised output, the maximum and the sum.
        all_rows = tl.num_programs(0).to(tl.int64) // splits // row_blocks * group * seqlen_q
        places = partial + (split * all_rows + row64) * (HOW.value_dim + 2)
        tl.store(places[:, None] + columns[None, :], result, mask=stored)
        tl.store(places + HOW.value_dim, row_max, mask=row_is_valid)
        tl.store(places + HOW.value_dim + 1, row_sum, mask=row_is_valid)
    else:
        result, row_logsumexp = finished(result, row_max, row_sum, row_is_valid, values, seqlen_k, BLOCK_N, HOW)
        output_row64 = (batch64 * seqlen_q + query_of_row) * heads + head_of_row
        places = output + output_row64[:, None] * HOW.value_dim + columns[None, :]
        tl.store(places, to_storage(result, output.dtype.element_ty), mask=stored)
        tl.store(logsumexp + row64, row_logsumexp, mask=row_is_valid)
        if row_maximum is not None:
            tl.store(row_maximum + row64, row_max if HOW.natural else row_max * LN2, mask=row_is_valid)
            tl.store(row_total + row64, row_sum, mask=row_is_valid)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def kernl_attention_combine(
    value,
    partial,
    output,
    logsumexp,
    row_maximum,
    row_total,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    value_stride_d,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    splits,
    BLOCK_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOW: tl.constexpr,
):
    """One program for each query of each head."""
    wait_for_previous_kernel(HOW.use_pdl)
    let_next_kernel_start(HOW.use_pdl)

    row64 = tl.program_id(0).to(tl.int64)
    query_row = row64 % seqlen_q
    head = row64 // seqlen_q % heads
    batch64 = row64 // seqlen_q // heads
    partial += row64 * (HOW.value_dim + 2)
    stride64 = tl.num_programs(0).to(tl.int64) * (HOW.value_dim + 2)
    UNIT: tl.constexpr = 1.0 if not HOW.natural else LOG2E

    shares = tl.arange(0, BLOCK_SPLITS)
    maxima = tl.load(partial + shares * stride64 + HOW.value_dim, mask=shares < splits, other=float("-inf"))
    sums = tl.load(partial + shares * stride64 + (HOW.value_dim + 1), mask=shares < splits, other=0.0)
    row_max = tl.max(maxima, 0)
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    row_sum = tl.sum(sums * tl.exp2((maxima - shift) * UNIT), 0)
    is_hidden = row_sum == 0.0

    BLOCK_DV: tl.constexpr = HOW.block_dv
    columns = tl.arange(0, BLOCK_DV)
    chunk = tl.arange(0, _COMBINE_CHUNK)
    result = tl.zeros([BLOCK_DV], tl.float32)
    for start in tl.range(0, splits, _COMBINE_CHUNK):
        places = partial + (start + chunk) * stride64
        exists = start + chunk < splits
        weights = tl.load(places + HOW.value_dim, mask=exists, other=float("-inf"))
        weights = tl.exp2((weights - shift) * UNIT)
        part = tl.load(
            places[:, None] + columns[None, :],
            mask=exists[:, None] & (columns < HOW.value_dim)[None, :],
            other=0.0,
        )  # [_COMBINE_CHUNK, BLOCK_DV]
        result += tl.sum(part * weights[:, None], 0)

    divisor = tl.where(is_hidden, 1.0, row_sum)
    result = result / divisor
    natural_max = row_max if HOW.natural else row_max * LN2
    row_logsumexp = natural_max + tl.log2(divisor) * LN2
    if HOW.hidden_rows_mean:
        if is_hidden:
            value += offset_of_head(batch64, value_stride_b, head // group, value_stride_h, HOW.alignment)
            result = mean_of_values(Rows(value, value_stride_n, value_stride_d), seqlen_k, BLOCK_N, HOW)
        row_logsumexp = tl.where(is_hidden, LOWEST, row_logsumexp)

    place = output + ((batch64 * seqlen_q + query_row) * heads + head) * HOW.value_dim
    tl.store(place + columns, to_storage(result, output.dtype.element_ty), mask=columns < HOW.value_dim)
    tl.store(logsumexp + row64, row_logsumexp)
    if row_maximum is not None:
        tl.store(row_maximum + row64, natural_max)
        tl.store(row_total + row64, row_sum)


@dataclass(frozen=True)
class DecodeConfiguration:
    """A tiling, and how many programs share the keys of one key head."""

    tiling: Configuration
    splits: int

    @property
    def name(self) -> str:
        """Readable and unique: "decode-m16n64w4s3x8"."""
        return f"decode-{self.tiling.name}x{self.splits}"


# By the padded head dimension (the larger of the two); a tile of keys and one of values for each stage of the pipeline.
_HOPPER = {
    64: tilings("16 32 4 4", "32 32 4 3", "64 64 8 2"),
    128: tilings("16 64 8 3", "32 32 8 2"),
    256: tilings("16 32 8 2", "32 32 8 1"),
}
_OTHERS = {
    64: tilings("16 32 4 4", "32 32 4 3", "64 64 8 2"),
    128: tilings("16 32 4 2", "32 32 8 2"),
    256: tilings("16 32 8 1", "32 16 8 1"),
}
# float32, in either precision.
_FLOAT32 = {
    64: tilings("16 16 4 1"),
    128: tilings("16 16 8 1"),
    256: (),
}
_INTERPRETED = Configuration(16, 32, 4, 1)


def decode_tiling(
    arch: int, dtype: torch.dtype, head_dim: int, value_dim: int, rows: int, *, natural: bool
) -> Configuration | None:
    """The one for tiles of `rows` queries and heads: the smallest that holds them all, or the largest there is."""
    if arch == 0:
        return _INTERPRETED
    width = max(block_of(head_dim), block_of(value_dim), 64)
    if dtype == torch.float32:
        offered = _FLOAT32[width]
    else:
        offered = (_HOPPER if arch // 10 == 9 else _OTHERS)[width]
    if not offered:
        return None
    return next((tiling for tiling in offered if tiling.block_m >= rows), offered[-1])


@functools.lru_cache(maxsize=4096)
def splits_for(programs: int, tiles: int, sm_count: int) -> int:
    """Into how many shares to cut `tiles` tiles of keys, where one share would make `programs` programs.

    Time is what the busiest multiprocessor does, in tiles: its rounds of programs times the tiles of a share, and two
    more for each program that starts; and what the second kernel costs, as much as four tiles. (Measured nowhere yet.)
    """

    def cost(splits: int) -> tuple[float, int]:
        rounds = -(-programs * splits // sm_count)
        return rounds * (-(-tiles // splits) + 2) + (4 if splits > 1 else 0), splits

    return min(map(cost, range(1, min(tiles, MAX_SPLITS) + 1)))[1]


def decode_configuration(
    arch: int, sm_count: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> DecodeConfiguration | None:
    """How to run this problem here; None where there is no way: more than 16 queries, packed lengths or dropout."""
    batch, heads, seqlen_q, head_dim = query.shape
    key_heads, seqlen_k, value_dim = value.shape[1:]
    if seqlen_q > MAX_QUERIES or scoring.packed is not None or scoring.dropout is not None:
        return None
    rows = heads // key_heads * seqlen_q
    tiling = decode_tiling(arch, query.dtype, head_dim, value_dim, rows, natural=scoring.is_natural)
    if tiling is None:
        return None
    programs = batch * key_heads * triton.cdiv(rows, tiling.block_m)
    return DecodeConfiguration(tiling, splits_for(programs, triton.cdiv(seqlen_k, tiling.block_n), sm_count))


def prefers_decode(
    configuration: DecodeConfiguration,
    sm_count: int,
    query: torch.Tensor,
    key: torch.Tensor,
    forward_block_m: int,
) -> bool:
    """Whether decoding is expected to beat the forward kernel: fewer keys pass through the busiest multiprocessor.

    The forward kernel has batch * heads * ceil(seqlen_q / BLOCK_M) programs that read all keys each. Decoding has those
    of one key head read them once, in shares; its second kernel and its start cost as much as 256 keys. Up to 256 keys
    the forward kernel is kept. (By bytes and programs; not measured yet.)
    """
    batch, heads, seqlen_q, _ = query.shape
    key_heads, seqlen_k = key.shape[1:3]
    if seqlen_k <= 256:
        return False
    forward = -(-batch * heads * triton.cdiv(seqlen_q, forward_block_m) // sm_count) * seqlen_k
    tiling, splits = configuration.tiling, configuration.splits
    programs = batch * key_heads * triton.cdiv(heads // key_heads * seqlen_q, tiling.block_m) * splits
    decode = -(-programs // sm_count) * triton.cdiv(seqlen_k, splits) + (256 if splits > 1 else 0)
    return decode < forward


def attention_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    statistics: torch.Tensor | None,
    partial: torch.Tensor | None,
    *,
    configuration: DecodeConfiguration,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill `output`, `logsumexp` and, if given, `statistics`, all as `attention_forward` does.

    partial: float32 [splits, batch * heads * seqlen_q, value_dim + 2], contiguous; None with one share.
    """
    arguments = scoring_arguments(query, key, value, scoring, input_precision=input_precision, use_pdl=use_pdl)
    variant = arguments["HOW"]
    assert isinstance(variant, Variant)
    batch, heads, seqlen_q, _ = query.shape
    key_heads = key.shape[1]
    tiling, splits = configuration.tiling, configuration.splits
    row_blocks = triton.cdiv(heads // key_heads * seqlen_q, tiling.block_m)
    arguments |= {
        "output": output,
        "logsumexp": logsumexp,
        "row_maximum": None if statistics is None else statistics[0],
        "row_total": None if statistics is None else statistics[1],
        "partial": partial,
        "row_blocks": row_blocks,
        "splits": splits,
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "BLOCK_SPLITS": triton.next_power_of_2(splits),
        "IS_SPLIT": splits > 1,
        # The rows of a tile belong to several heads.
        "HOW": dataclasses.replace(
            variant,
            mask_per_query=variant.mask_per_query or arguments["mask_stride_h"] != 0,
            bias_per_query=variant.bias_per_query or arguments["bias_stride_h"] != 0,
        ),
    }
    pdl = {"launch_pdl": True} if use_pdl else {}
    count_launch("attention_decode")
    kernl_attention_decode[(splits * row_blocks * batch * key_heads,)](
        **of_kernel(kernl_attention_decode, arguments),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **tiling.options,
        **pdl,
    )
    if splits > 1:
        kernl_attention_combine[(batch * heads * seqlen_q,)](
            **of_kernel(kernl_attention_combine, arguments), num_warps=4, **pdl
        )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """Every tiling with everything at once, wide heads without what depends on positions; and the second kernel."""
    if arch < 80:
        return
    padded: dict[str, Any] = {"key_padding": torch.bool, "is_causal": True, "hidden_rows": "mean", "group": 4}
    for dtype, width in ((torch.float16, 64), (torch.float16, 128), (torch.float16, 256), (torch.float32, 128)):
        table = _FLOAT32 if dtype == torch.float32 else _HOPPER if arch // 10 == 9 else _OTHERS
        element = TRITON_TYPES[dtype]
        types = {"output": f"*{element}", "logsumexp": "*fp32", "partial": "*fp32"}
        others: dict[str, object] = {"row_maximum": None, "row_total": None, "IS_SPLIT": True, "BLOCK_SPLITS": 32}
        options = padded if width == 256 else {**padded, "positional": True, "prefix": True}
        for tiling in table[width]:
            name = f"decode-{element}-D{width}-{tiling.name}"
            yield case_of(name, arch, kernl_attention_decode, tiling, dtype, width, types, others, **options)
    combine = Configuration(16, 32, 4, 3)
    yield case_of("combine", arch, kernl_attention_combine, combine, dtype, width, types, others, **padded)
