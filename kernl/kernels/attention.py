"""Attention, forward: softmax(scale * Q K^T, masked) V in one pass over the keys.

For one batch row, one head and one query i, with the visible keys j in N(i):

    s_ij   = cap(scale * <q_i, k_j>) + bias_ij            cap(x) = c tanh(x / c), or x
    bias   = attn_mask_ij - slope |d| + table[d]          d = j - (i + q_offset), how far the key is from the query
    lse_i  = log sum_{j in N(i)} exp(s_ij)                natural logarithm, float32
    out_i  = sum_{j in N(i)} exp(s_ij - lse_i) v_j

The scores are never written to memory. One program owns BLOCK_M queries of one head and walks over tiles of BLOCK_N
keys, keeping for each query the running maximum m, the running sum l and the unnormalised output o. A new tile t does

    m' = max(m, max_t s)      a = exp(m - m')
    l  = a l + sum_t exp(s - m')
    o  = a o + exp(s - m') V_t

and in the end out = o / l, lse = m + log l. Exponentials are powers of two: scale * log2(e) is one factor, so that the
argument of exp2 is a single multiply-add. Follows FlashAttention (Dao et al. 2022) in the loop order of
FlashAttention-2 (Dao 2023) and the online softmax of Milakov and Gimelshein (2018).

Which tiles are visited
    The keys that can be visible at all are a range [first, end): causality bounds it by the last query of the program,
    int32 lengths by one scalar load, a bool padding row by one scan of that row (seqlen_k bytes: one load and three
    reductions per 1024 keys, overlapped with the load of the queries; skipped when there are at most two tiles).
    Tiles outside are neither loaded nor computed. Tiles that lie fully inside (no padding, below the diagonal) run in a
    loop without any range or padding test; the others, at the ends of the range, in a second loop that tests each key.
    A padding row with holes sends all its tiles through the second loop. No load depends on a branch, so both loops
    stay software-pipelined.

    A window (keys from `left` before a query to `right` after it; causal: right = 0) bounds the range at both ends by
    the first and the last query of the program, and the full tiles by the other way round.

What depends on the distance
    ALiBi (Press et al. 2022) is arithmetic on d. T5's bias (Raffel et al. 2020) is the same for all |d| beyond some
    reach, so each head has a table of 2 * reach + 1 numbers, read per element and found in L1: no [seqlen_q, seqlen_k]
    bias exists. Where q_offset lies in memory, a replayed CUDA graph sees its value of now.

Corners
    A hidden key's value is never read: NaN there cannot leak. (A value hidden by attn_mask alone is multiplied by zero,
    as in PyTorch.) A query that sees no key gets output 0 and lse -inf (HIDDEN_ROWS_MEAN false), or the mean over all
    values and lse = float32's lowest number (true): what arithmetic with `finfo.min` in place of -inf gives, since
    finfo.min + s rounds to finfo.min for every key and then cancels. Such queries cost one more pass over V, in their
    programs only.
    Scores to which something is added keep their natural units up to the subtraction of the maximum: finfo.min times
    log2(e) would overflow.

Bytes and flops
    flops   2 * batch * heads * seqlen_q * seqlen_k * (head_dim + value_dim)           (half of it when causal)
    bytes   (Q + K + V + out) * element size + 4 * batch * heads * seqlen_q, each once: K and V of a head stay in L2
            while its seqlen_q / BLOCK_M programs read them.
    For head_dim 64 and 16-bit types the exponentials cost as much time on the special-function units (16 a cycle and
    multiprocessor) as the products on the tensor cores: about 0.4 of the matmul rate is the ceiling without overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernl.kernels.activation import tanh
from kernl.kernels.common import (
    TRITON_TYPES,
    AotCase,
    count_launch,
    let_next_kernel_start,
    to_compute,
    wait_for_previous_kernel,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)

# What kind of tensor attn_mask and key_padding are.
ABSENT = tl.constexpr(0)
BOOL = tl.constexpr(1)
FLOAT = tl.constexpr(2)
LENGTHS = tl.constexpr(3)

MAX_HEAD_DIM = 256
# Windows and offsets beyond this are as good as unbounded; sums of two and a length fit 32 bits.
FARTHEST = tl.constexpr(2**29)
_SCAN_CHUNK = tl.constexpr(1024)


@triton.jit
def _clamped(x, bound):
    return tl.minimum(tl.maximum(x, -bound), bound)


@triton.jit
def _load_rows(
    pointer,
    rows,  # [ROWS] row numbers relative to pointer
    row_is_valid,  # [ROWS]
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """A [ROWS, BLOCK_COLUMNS] tile; invalid rows and the columns past COLUMNS are 0 and not read."""
    columns = tl.arange(0, BLOCK_COLUMNS)
    row_offsets = rows[:, None] * row_stride
    if ALIGNMENT > 1:
        row_offsets = tl.multiple_of(row_offsets, [ALIGNMENT, ALIGNMENT])
    pointers = pointer + row_offsets + columns[None, :] * column_stride
    if COLUMNS == BLOCK_COLUMNS:
        tile = tl.load(pointers, mask=row_is_valid[:, None], other=0.0) if TEST_ROWS else tl.load(pointers)
    else:
        valid = (columns < COLUMNS)[None, :]
        if TEST_ROWS:
            valid = valid & row_is_valid[:, None]
        tile = tl.load(pointers, mask=valid, other=0.0)
    return to_compute(tile)


@triton.jit
def _join_ranges(first_a, end_a, count_a, first_b, end_b, count_b):
    return tl.minimum(first_a, first_b), tl.maximum(end_a, end_b), count_a + count_b


@triton.jit
def _visible_range(key_padding, stride_n, seqlen_k, KEY_PADDING: tl.constexpr, SCAN_PADDING: tl.constexpr):
    """First and one past the last visible key of a batch row, and whether every key between them is visible."""
    first = 0
    end = seqlen_k
    gapless = True
    if KEY_PADDING == LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(key_padding), 0), seqlen_k)
    elif KEY_PADDING == BOOL:
        if SCAN_PADDING:
            chunk = tl.arange(0, _SCAN_CHUNK)
            firsts = tl.full([_SCAN_CHUNK], 2147483647, tl.int32)
            ends = tl.zeros([_SCAN_CHUNK], tl.int32)
            counts = tl.zeros([_SCAN_CHUNK], tl.int32)
            for start in range(0, seqlen_k, _SCAN_CHUNK):
                keys = start + chunk
                visible = tl.load(key_padding + keys.to(tl.int64) * stride_n, mask=keys < seqlen_k, other=0) != 0
                firsts = tl.minimum(firsts, tl.where(visible, keys, 2147483647))
                ends = tl.maximum(ends, tl.where(visible, keys + 1, 0))
                counts += visible.to(tl.int32)
            # One reduction of three values: each one takes the program through shared memory and a barrier.
            first, end, count = tl.reduce((firsts, ends, counts), 0, _join_ranges)
            first = tl.minimum(first, end)
            gapless = count == end - first
        else:
            gapless = False
    return first, end, gapless


@triton.jit
def _attend(
    output,  # [BLOCK_M, BLOCK_DV] float32, unnormalised
    row_max,  # [BLOCK_M] float32; in powers of two, or natural where something is added to the scores
    row_sum,  # [BLOCK_M] float32
    query,  # [BLOCK_M, BLOCK_D]
    key,
    value,
    key_tiles,
    value_tiles,
    attn_mask,
    key_padding,
    key_stride_n,
    key_stride_d,
    value_stride_n,
    value_stride_d,
    mask_stride_m,
    mask_stride_n,
    padding_stride_n,
    batch,
    key_head,
    start_n,
    first,
    end,
    query_rows,  # [BLOCK_M] numbers of the queries
    positions,  # [BLOCK_M] of the queries among the keys
    right,
    left,
    seqlen_q,
    scale,
    softcap,
    slope,
    distance_bias,
    reach,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ATTN_MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    MASK_ALIGNMENT: tl.constexpr,
    KEY_PADDING: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DISTANCE_BIAS: tl.constexpr,
    NATURAL: tl.constexpr,
    TEST_KEYS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """One step of the online softmax: the keys [start_n, start_n + BLOCK_N).

    TEST_KEYS is false for a tile all of whose keys are in range, unpadded and inside the window of every query.
    """
    offsets = tl.arange(0, BLOCK_N)
    keys = start_n + offsets  # [BLOCK_N]
    # Keys and mask are loaded for all keys that exist, so that no load waits for the padding; values are not.
    exists = keys < end  # [BLOCK_N]
    unpadded = exists & (keys >= first)  # [BLOCK_N]
    if TEST_KEYS and KEY_PADDING == BOOL:
        unpadded = tl.load(key_padding + keys.to(tl.int64) * padding_stride_n, mask=unpadded, other=0) != 0
        if BLOCK_N <= 64:
            # As the bits of one integer: in the layout of the scores each thread would hold a pointer per column.
            bits = tl.sum(unpadded.to(tl.int64) << offsets, 0)
            word = tl.where(offsets < 32, bits.to(tl.int32), (bits >> 32).to(tl.int32))
            unpadded = ((word >> (offsets & 31)) & 1) != 0
    if WIDE_OFFSETS:
        offsets = offsets.to(tl.int64)
    start = tl.cast(start_n, tl.int64)
    key_offset = start * key_stride_n
    value_offset = start * value_stride_n
    if ALIGNMENT > 1:
        key_offset = tl.multiple_of(key_offset, ALIGNMENT)
        value_offset = tl.multiple_of(value_offset, ALIGNMENT)

    # [BLOCK_N, BLOCK_D]; the descriptor fills what lies outside the tensor with zeros.
    if USE_TMA:
        key_tile = key_tiles.load([batch, key_head, start_n, 0]).reshape([BLOCK_N, BLOCK_D])
        key_tile = to_compute(key_tile)
    else:
        key_tile = _load_rows(
            key + key_offset,
            offsets,
            exists,
            key_stride_n,
            key_stride_d,
            HEAD_DIM,
            BLOCK_D,
            TEST_KEYS,
            ALIGNMENT,
        )
    scores = tl.dot(query, tl.trans(key_tile), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]

    visible = unpadded[None, :]  # [1 or BLOCK_M, BLOCK_N]
    if HAS_RIGHT:
        visible = visible & (keys[None, :] <= (positions + right)[:, None])
    if HAS_LEFT:
        visible = visible & (keys[None, :] >= (positions - left)[:, None])
    if NATURAL:
        scores = scores * scale
    if SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    if ALIBI or DISTANCE_BIAS:
        distance = keys[None, :] - positions[:, None]  # [BLOCK_M, BLOCK_N]
        if ALIBI:
            scores -= slope * tl.abs(distance).to(tl.float32)
        if DISTANCE_BIAS:
            scores += tl.load(distance_bias + (_clamped(distance, reach) + reach))
    if ATTN_MASK != ABSENT:
        # attn_mask points at (batch, head, 0, 0). One row serves all queries when it does not depend on them. Rows past
        # the last query read the last one's mask: nobody looks at their result, and the load needs no test.
        mask_pointers = attn_mask + start * mask_stride_n + offsets[None, :] * mask_stride_n
        if MASK_PER_QUERY:
            mask_rows = tl.minimum(query_rows, seqlen_q - 1).to(tl.int64)[:, None] * mask_stride_m
            if MASK_ALIGNMENT > 1:
                mask_rows = tl.multiple_of(mask_rows, [MASK_ALIGNMENT, MASK_ALIGNMENT])
            mask_pointers = mask_pointers + mask_rows
        if TEST_KEYS:
            mask_tile = tl.load(mask_pointers, mask=exists[None, :], other=0)
        else:
            mask_tile = tl.load(mask_pointers)  # [1 or BLOCK_M, BLOCK_N]
        if ATTN_MASK == FLOAT:
            scores += to_compute(mask_tile).to(tl.float32)
        else:
            visible = visible & (mask_tile != 0)
    if TEST_KEYS or ATTN_MASK == BOOL:
        scores = tl.where(visible, scores, float("-inf"))

    if NATURAL:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
    if TEST_KEYS or ATTN_MASK != ABSENT:
        # A row that has seen no key yet: subtract 0, not -inf, which would give NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    if NATURAL:
        probabilities = tl.exp2((scores - shift[:, None]) * LOG2E)  # [BLOCK_M, BLOCK_N]
        decay = tl.exp2((row_max - shift) * LOG2E)
    else:
        probabilities = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(probabilities, 1)
    output = output * decay[:, None]

    # [BLOCK_N, BLOCK_DV]; the values of hidden keys are zero, whatever is stored there.
    if USE_TMA and (KEY_PADDING == ABSENT or not TEST_KEYS):
        value_tile = value_tiles.load([batch, key_head, start_n, 0]).reshape([BLOCK_N, BLOCK_DV])
        value_tile = to_compute(value_tile)
    else:
        value_tile = _load_rows(
            value + value_offset,
            offsets,
            unpadded,
            value_stride_n,
            value_stride_d,
            VALUE_DIM,
            BLOCK_DV,
            TEST_KEYS,
            ALIGNMENT,
        )
    output = tl.dot(probabilities.to(value_tile.dtype), value_tile, output, input_precision=INPUT_PRECISION)
    return output, new_max, row_sum


@triton.jit(
    do_not_specialize=[
        "heads",
        "seqlen_q",
        "seqlen_k",
        "query_stride_b",
        "query_stride_h",
        "key_stride_b",
        "key_stride_h",
        "value_stride_b",
        "value_stride_h",
        "mask_stride_b",
        "mask_stride_h",
        "mask_stride_m",
        "padding_stride_b",
        "alibi_stride_b",
        "right",
        "left",
        "q_offset",
        "reach",
    ]
)
def kernl_attention_forward(
    query,
    key,
    value,
    key_tiles,
    value_tiles,
    attn_mask,
    key_padding,
    alibi_slopes,
    distance_bias,
    q_offset,
    output,
    logsumexp,
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
    padding_stride_b,
    padding_stride_n,
    alibi_stride_b,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    right,
    left,
    reach,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ATTN_MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    MASK_ALIGNMENT: tl.constexpr,
    KEY_PADDING: tl.constexpr,
    SCAN_PADDING: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    OFFSET_IN_MEMORY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DISTANCE_BIAS: tl.constexpr,
    NATURAL: tl.constexpr,
    HIDDEN_ROWS_MEAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    USE_TMA: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)

    # Programs of one head are neighbours, so that its keys and values are read from L2. Causal: longest ones first.
    blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    block_m = program % blocks_m
    if HAS_RIGHT:
        block_m = blocks_m - 1 - block_m
    batch_head = program // blocks_m
    batch = batch_head // heads
    head = batch_head % heads
    key_head = head // group
    start_m = block_m * BLOCK_M
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    key_head64 = key_head.to(tl.int64)
    start_m64 = start_m.to(tl.int64)

    query_offset = batch64 * query_stride_b + head64 * query_stride_h + start_m64 * query_stride_m
    key_offset = batch64 * key_stride_b + key_head64 * key_stride_h
    value_offset = batch64 * value_stride_b + key_head64 * value_stride_h
    if ALIGNMENT > 1:
        # The hint has to sit on the operation itself. Without it a head_dim of 40 is read by single elements.
        query_offset = tl.multiple_of(query_offset, ALIGNMENT)
        key_offset = tl.multiple_of(key_offset, ALIGNMENT)
        value_offset = tl.multiple_of(value_offset, ALIGNMENT)
    query += query_offset
    key += key_offset
    value += value_offset
    if ATTN_MASK != ABSENT:
        mask_offset = batch64 * mask_stride_b + head64 * mask_stride_h
        if MASK_ALIGNMENT > 1:
            mask_offset = tl.multiple_of(mask_offset, MASK_ALIGNMENT)
        attn_mask += mask_offset
    if KEY_PADDING != ABSENT:
        key_padding += batch64 * padding_stride_b
    slope = tl.load(alibi_slopes + batch64 * alibi_stride_b + head) if ALIBI else 0.0
    if DISTANCE_BIAS:
        distance_bias += head64 * (2 * reach + 1)
    # The position of query 0 among the keys: a number, or a place in memory that a replayed graph reads anew.
    if TOP_LEFT:
        right = 0
        offset = 0
    elif OFFSET_IN_MEMORY:
        offset = _clamped(tl.load(q_offset), FARTHEST).to(tl.int32)
    else:
        offset = q_offset

    offsets_m = tl.arange(0, BLOCK_M)
    query_rows = start_m + offsets_m  # [BLOCK_M]
    positions = query_rows + offset  # [BLOCK_M]
    query_tile = _load_rows(
        query,
        offsets_m.to(tl.int64) if WIDE_OFFSETS else offsets_m,
        query_rows < seqlen_q,
        query_stride_m,
        query_stride_d,
        HEAD_DIM,
        BLOCK_D,
        True,
        ALIGNMENT,
    )  # [BLOCK_M, BLOCK_D]

    # [first, end): keys some query of this program may see. [full_start, full_end): tiles where all see all keys.
    first, end, gapless = _visible_range(key_padding, padding_stride_n, seqlen_k, KEY_PADDING, SCAN_PADDING)
    last_m = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
    full_end = end // BLOCK_N * BLOCK_N
    if HAS_RIGHT:
        end = tl.minimum(end, tl.maximum(last_m + offset + right + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(start_m + offset + right + 1, 0) // BLOCK_N * BLOCK_N)
    full_first = first
    if HAS_LEFT:
        first = tl.minimum(tl.maximum(first, start_m + offset - left), end)
        full_first = tl.maximum(first, last_m + offset - left)
    tiles_start = first // BLOCK_N * BLOCK_N
    full_start = tl.minimum(tl.cdiv(full_first, BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
    full_end = tl.maximum(full_end, full_start)
    if KEY_PADDING == BOOL:
        full_start = tl.where(gapless, full_start, tiles_start)
        full_end = tl.where(gapless, full_end, tiles_start)
    tiles_before = tl.maximum(full_start - tiles_start, 0) // BLOCK_N
    tiles_after = tl.cdiv(tl.maximum(end - full_end, 0), BLOCK_N)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for TEST_KEYS in tl.static_range(2):
        tiles = tiles_before + tiles_after if TEST_KEYS else (full_end - full_start) // BLOCK_N
        # The tested loop is short, and a deeper pipeline would cost it registers.
        for tile in tl.range(0, tiles, num_stages=2 if TEST_KEYS else None):
            start_n = full_start + tile * BLOCK_N
            if TEST_KEYS:
                after = full_end + (tile - tiles_before) * BLOCK_N
                start_n = tl.where(tile < tiles_before, tiles_start + tile * BLOCK_N, after)
            start_n = tl.multiple_of(start_n, BLOCK_N)
            result, row_max, row_sum = _attend(
                result,
                row_max,
                row_sum,
                query_tile,
                key,
                value,
                key_tiles,
                value_tiles,
                attn_mask,
                key_padding,
                key_stride_n,
                key_stride_d,
                value_stride_n,
                value_stride_d,
                mask_stride_m,
                mask_stride_n,
                padding_stride_n,
                batch,
                key_head,
                start_n,
                first,
                end,
                query_rows,
                positions,
                right,
                left,
                seqlen_q,
                scale,
                softcap,
                slope,
                distance_bias,
                reach,
                BLOCK_M,
                BLOCK_N,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_D,
                BLOCK_DV,
                ATTN_MASK,
                MASK_PER_QUERY,
                MASK_ALIGNMENT,
                KEY_PADDING,
                HAS_RIGHT,
                HAS_LEFT,
                SOFTCAP,
                ALIBI,
                DISTANCE_BIAS,
                NATURAL,
                TEST_KEYS,
                ALIGNMENT,
                USE_TMA,
                WIDE_OFFSETS,
                INPUT_PRECISION,
            )

    # NaN scores leave a NaN sum, not 0: they are no hidden rows, and come out as NaN.
    is_hidden = row_sum == 0.0
    row_sum = tl.where(is_hidden, 1.0, row_sum)
    if NATURAL:
        row_logsumexp = row_max + tl.log2(row_sum) * LN2
    else:
        row_logsumexp = (row_max + tl.log2(row_sum)) * LN2
    result = result / row_sum[:, None]

    if HIDDEN_ROWS_MEAN:
        wants_mean = is_hidden & (query_rows < seqlen_q)
        if tl.max(wants_mean.to(tl.int32), 0) > 0:
            offsets_n = tl.arange(0, BLOCK_N)
            total = tl.zeros([BLOCK_DV], tl.float32)
            for start_n in tl.range(0, seqlen_k, BLOCK_N):
                value_tile = _load_rows(
                    value + tl.cast(start_n, tl.int64) * value_stride_n,
                    offsets_n.to(tl.int64) if WIDE_OFFSETS else offsets_n,
                    start_n + offsets_n < seqlen_k,
                    value_stride_n,
                    value_stride_d,
                    VALUE_DIM,
                    BLOCK_DV,
                    True,
                    ALIGNMENT,
                )
                total += tl.sum(value_tile.to(tl.float32), 0)
            result = tl.where(wants_mean[:, None], (total / seqlen_k)[None, :], result)
        row_logsumexp = tl.where(is_hidden, LOWEST, row_logsumexp)

    # The output is contiguous as [batch, seqlen_q, heads, value_dim].
    rows64 = batch64 * seqlen_q + query_rows
    columns = tl.arange(0, BLOCK_DV)
    tl.store(
        output + (rows64[:, None] * heads + head) * VALUE_DIM + columns[None, :],
        result.to(output.dtype.element_ty),
        mask=(query_rows < seqlen_q)[:, None] & (columns < VALUE_DIM)[None, :],
    )
    tl.store(logsumexp + batch_head.to(tl.int64) * seqlen_q + query_rows, row_logsumexp, mask=query_rows < seqlen_q)


@dataclass(frozen=True)
class Configuration:
    """How one launch is cut up: queries and keys per tile, warps, depth of the software pipeline.

    uses_tma: tiles are fetched by the tensor memory accelerator (compute capability 9.0 and newer), except values some
        of which are padding.
    max_registers: cap on the registers of a thread, so that more programs fit on a multiprocessor; None for no cap.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    uses_tma: bool = False
    max_registers: int | None = None

    @property
    def name(self) -> str:
        """Readable and unique: "m128n64w8s3" or "m128n64w8s3r128-tma"."""
        registers = f"r{self.max_registers}" if self.max_registers else ""
        tail = "-tma" if self.uses_tma else ""
        return f"m{self.block_m}n{self.block_n}w{self.num_warps}s{self.num_stages}{registers}{tail}"

    @property
    def options(self) -> dict[str, int]:
        """Compile options beyond num_warps and num_stages."""
        return {} if self.max_registers is None else {"maxnreg": self.max_registers}


def block_of(dim: int) -> int:
    """A head dimension as the kernel pads it: the next power of two, at least 16 (tensor cores take no less)."""
    return max(16, triton.next_power_of_2(dim))


def _tilings(*rows: str) -> tuple[Configuration, ...]:
    """Configurations from rows such as "128 64 8 3 tma 128": queries, keys, warps, stages, TMA, register cap."""
    found = []
    for row in rows:
        block_m, block_n, num_warps, num_stages, *rest = row.split()
        caps = [int(word) for word in rest if word != "tma"]
        sizes = (int(block_m), int(block_n), int(num_warps), int(num_stages))
        found.append(Configuration(*sizes, uses_tma="tma" in rest, max_registers=caps[0] if caps else None))
    return tuple(found)


# By the padded head dimension (the larger of the two): tilings, of which `default_configuration` takes the first that
# suits the number of queries; those after it are for measurements to choose. Each compiles without spills on Triton 3.6
# and 3.9 both, in the shared memory of the chips it is for. A cap on registers lets a multiprocessor hold two programs
# of eight warps or three of four. Measured on an H200, plain loads are a little faster than the TMA at head_dim 64.
_HOPPER = {
    64: _tilings("64 64 4 3", "32 64 4 2", "16 32 4 2", "64 64 4 3 tma 168"),
    128: _tilings(
        "128 64 8 3 tma",
        "128 32 8 3",
        "64 64 4 2 tma",
        "64 32 4 3",
        "32 64 4 2",
        "16 64 4 3",
        "16 32 4 2",
    ),
    256: _tilings("64 32 8 2 tma", "64 32 8 2", "32 32 8 1", "16 16 4 2"),
}
_BLACKWELL = {
    64: _tilings("128 64 8 3 tma", "64 64 4 3 tma", "64 64 4 3", "16 32 4 2"),
    128: _tilings("128 64 8 3 tma", "64 64 4 2 tma", "64 32 8 2", "16 32 4 2"),
    256: _tilings("64 32 8 2", "32 32 8 1"),
}
_AMPERE = {
    64: _tilings("128 64 8 3", "64 32 4 3", "16 64 4 2"),
    128: _tilings("128 32 8 2", "64 32 4 2", "16 32 4 1"),
    256: _tilings("64 32 8 1", "16 16 4 2"),
}
# An attn_mask takes registers: where its rows are not aligned, a pointer and a value for each of its elements.
_MASK = {
    64: _tilings("64 32 8 2", "16 32 4 2"),
    128: _tilings("64 32 8 2", "16 16 4 2"),
    256: _tilings("32 32 8 1"),
}
# So does what depends on positions.
_POSITIONS = {**_MASK, 128: _tilings("64 32 8 2", "16 32 4 2")}
_HOPPER_MASK = {
    64: _tilings("64 32 8 2 tma", "64 32 8 2", "16 16 4 2"),
    128: _tilings("64 32 8 2", "16 32 4 2"),
    256: _tilings("32 32 8 1"),
}
_HOPPER_ALIGNED_MASK = {
    64: _tilings("64 64 4 3 tma", "128 32 8 3 tma", "64 32 4 3", "16 32 4 2"),
    128: _tilings("64 32 4 3 tma", "64 32 8 2", "16 32 4 2"),
    256: _tilings("32 32 8 1"),
}
_TF32 = {
    64: _tilings("64 16 8 2", "16 16 4 1"),
    128: _tilings("16 32 4 2"),
    256: _tilings("32 16 8 1"),
}
# Without tensor cores the operands of a product are held in registers: small tiles, and none fits for wide heads.
_IEEE = {
    64: _tilings("32 16 8 1"),
    128: _tilings("16 16 8 1"),
    256: (),
}
# Cost in the interpreter is per operation, not per element.
_INTERPRETED = (Configuration(64, 64, 4, 1),)


def configurations(
    arch: int,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    *,
    input_precision: str,
    mask_alignment: int = 0,
    by_position: bool = False,
) -> tuple[Configuration, ...]:
    """The tilings worth trying on sm_`arch`, those with many queries a program first; none where nothing fits.

    input_precision: "tf32" or "ieee", for float32. mask_alignment: 0 without attn_mask, else that of its rows (see
    `alignment_of`); more than 1 too when one row serves all queries. by_position: with a softcap, or anything in
    `Positions` but causality from the top left.
    """
    if arch == 0:
        return _INTERPRETED
    width = max(block_of(head_dim), block_of(value_dim), 64)
    if dtype == torch.float32:
        return (_IEEE if input_precision == "ieee" else _TF32)[width]
    is_hopper = arch // 10 == 9
    if by_position:
        return (_HOPPER_MASK if is_hopper else _POSITIONS)[width]
    if mask_alignment == 0:
        return (_HOPPER if is_hopper else _BLACKWELL if arch >= 100 else _AMPERE)[width]
    if is_hopper:
        return (_HOPPER_MASK if mask_alignment == 1 else _HOPPER_ALIGNED_MASK)[width]
    return _MASK[width]


def default_configuration(
    candidates: Sequence[Configuration], sm_count: int, batch_heads: int, seqlen_q: int
) -> Configuration:
    """The first whose BLOCK_M is not mostly padding; more than 64 only if every multiprocessor gets a program.

    With fewer than 64 queries a program, those of a short sequence are done no sooner: they all read all keys.
    """
    for candidate in candidates:
        programs = batch_heads * triton.cdiv(seqlen_q, candidate.block_m)
        if 2 * seqlen_q > candidate.block_m and (candidate.block_m <= 64 or programs >= sm_count):
            return candidate
    return min(candidates, key=lambda candidate: candidate.block_m)


def _strides(tensor: torch.Tensor) -> list[int]:
    """Strides, 0 where a dimension has one element: what they are there must not cause another compilation."""
    strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride())]
    if tensor.shape[-1] == 1:
        strides[-1] = 1
    return strides


def alignment_of(*tensors: torch.Tensor) -> int:
    """16 bytes in elements when every row of these tensors begins at a multiple of that from its start, else 1.

    Nothing between: each value is another compilation.
    """
    elements = 16 // tensors[0].element_size()
    strides = [_strides(tensor) for tensor in tensors]
    aligned = all(row[-1] == 1 and all(stride % elements == 0 for stride in row[:-1]) for row in strides)
    return elements if aligned else 1


def supports_tma(tensor: torch.Tensor) -> bool:
    """Whether a tensor-map can describe this [batch, heads, seqlen, dim] tensor: unit last stride, else 16 bytes."""
    unit = tensor.element_size()
    return (
        tensor.data_ptr() % 16 == 0
        and (tensor.stride(-1) == 1 or tensor.shape[-1] == 1)
        and all(
            size == 1 or (stride > 0 and stride * unit % 16 == 0)
            for size, stride in zip(tensor.shape[:-1], tensor.stride())
        )
    )


def _descriptor(tensor: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    # The stride of a dimension of one element is never followed, but has to be a valid one.
    row = tensor.shape[-1] * tensor.element_size() // 16 * 16 + 16
    strides = [
        stride if size > 1 else row // tensor.element_size() for size, stride in zip(tensor.shape, tensor.stride())
    ]
    return TensorDescriptor(tensor, list(tensor.shape), [*strides[:-1], 1], [1, 1, rows, columns])


@dataclass(frozen=True)
class Positions:
    """What depends on where a query and a key stand, besides the masks.

    The query i is at position i + q_offset among the keys. It sees the keys from `left` before it to `right` after it;
    None: all on that side. q_offset: a number, or a tensor of one integer on the device, read when the kernel runs.
    alibi_slopes: float32 [heads] or [batch, heads]: slope * |distance| is subtracted from the score.
    distance_bias: float32 [heads, 2 * reach + 1], contiguous: added to the score of a key at distance
    d = key - position, at index reach + d, where d is clamped to [-reach, reach].
    """

    left: int | None = None
    right: int | None = None
    q_offset: int | torch.Tensor = 0
    alibi_slopes: torch.Tensor | None = None
    distance_bias: torch.Tensor | None = None

    @property
    def may_be_offset(self) -> bool:
        return isinstance(self.q_offset, (torch.Tensor, torch.SymInt)) or self.q_offset != 0

    @property
    def is_plain(self) -> bool:
        """Nothing, or causality from the top left."""
        return (
            self.left is None
            and (self.right is None or self.right == 0)
            and not self.may_be_offset
            and self.alibi_slopes is None
            and self.distance_bias is None
        )

    @property
    def can_hide_a_row(self) -> bool:
        """Whether a query may see no key at all. A causal one at an offset of 0 or more sees at least the first."""
        before_the_keys = isinstance(self.q_offset, torch.Tensor) or self.q_offset < 0
        return self.left is not None or (self.right is not None and (before_the_keys or self.right < 0))


ANYWHERE = Positions()


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    *,
    scale: float,
    positions: Positions,
    softcap: float,
    hidden_rows: str,
    configuration: Configuration,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill `output` and `logsumexp`.

    query [batch, heads, seqlen_q, head_dim], key [batch, key_heads, seqlen_k, head_dim], value [batch, key_heads,
    seqlen_k, value_dim], of one type and any strides; seqlens at least 1. attn_mask bool or float, already expanded
    (strides 0) to [batch, heads, seqlen_q, seqlen_k]. key_padding bool [batch, seqlen_k] or int32 lengths [batch].
    output [batch, heads, seqlen_q, value_dim], contiguous as [batch, seqlen_q, heads, value_dim]. logsumexp float32
    [batch, heads, seqlen_q], contiguous. scale is positive. softcap: c tanh(score / c) in place of the score, if not 0.
    """
    batch, heads, seqlen_q, head_dim = query.shape
    key_heads, seqlen_k, value_dim = key.shape[1], key.shape[2], value.shape[3]
    block_m, block_n = configuration.block_m, configuration.block_n
    mask_strides = [0] * 4 if attn_mask is None else _strides(attn_mask)
    padding_strides = [0, 0] if key_padding is None else [*_strides(key_padding), 0][:2]
    all_strides = [stride for tensor in (query, key, value) for stride in _strides(tensor)]
    uses_tma = configuration.uses_tma and supports_tma(key) and supports_tma(value)
    block_d, block_dv = block_of(head_dim), block_of(value_dim)
    slopes, by_distance = positions.alibi_slopes, positions.distance_bias
    # Scores that something is added to, or done to, keep their natural units (see "Corners").
    natural = _mask_kind(attn_mask) == FLOAT.value or softcap != 0 or slopes is not None or by_distance is not None
    can_hide = attn_mask is not None or key_padding is not None or positions.can_hide_a_row
    count_launch("attention_forward")
    kernl_attention_forward[(triton.cdiv(seqlen_q, block_m) * batch * heads,)](
        query,
        key,
        value,
        _descriptor(key, block_n, block_d) if uses_tma else None,
        _descriptor(value, block_n, block_dv) if uses_tma else None,
        attn_mask,
        key_padding,
        slopes,
        by_distance,
        positions.q_offset,
        output,
        logsumexp,
        *all_strides,
        *mask_strides,
        *padding_strides,
        heads if slopes is not None and slopes.dim() == 2 else 0,
        heads,
        heads // key_heads,
        seqlen_q,
        seqlen_k,
        min(positions.right or 0, FARTHEST.value),
        min(positions.left or 0, FARTHEST.value),
        0 if by_distance is None else by_distance.shape[1] // 2,
        scale if natural else scale * LOG2E.value,
        softcap,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        ATTN_MASK=_mask_kind(attn_mask),
        MASK_PER_QUERY=mask_strides[2] != 0,
        MASK_ALIGNMENT=1 if attn_mask is None else alignment_of(attn_mask),
        KEY_PADDING=_padding_kind(key_padding),
        SCAN_PADDING=_padding_kind(key_padding) == BOOL.value and seqlen_k > 2 * block_n,
        HAS_RIGHT=positions.right is not None,
        HAS_LEFT=positions.left is not None,
        TOP_LEFT=positions.is_plain,
        OFFSET_IN_MEMORY=isinstance(positions.q_offset, torch.Tensor),
        SOFTCAP=softcap != 0,
        ALIBI=slopes is not None,
        DISTANCE_BIAS=by_distance is not None,
        NATURAL=natural,
        HIDDEN_ROWS_MEAN=hidden_rows == "mean" and can_hide,
        ALIGNMENT=alignment_of(query, key, value),
        WIDE_OFFSETS=max(*all_strides, *mask_strides) >= 2**23,
        USE_TMA=uses_tma,
        INPUT_PRECISION=input_precision,
        USE_PDL=use_pdl,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
        **configuration.options,
        **({"launch_pdl": True} if use_pdl else {}),
    )


def _mask_kind(attn_mask: torch.Tensor | None) -> int:
    if attn_mask is None:
        return ABSENT.value
    return BOOL.value if attn_mask.dtype == torch.bool else FLOAT.value


def _padding_kind(key_padding: torch.Tensor | None) -> int:
    if key_padding is None:
        return ABSENT.value
    return BOOL.value if key_padding.dtype == torch.bool else LENGTHS.value


def aot_case(
    name: str,
    arch: int,
    configuration: Configuration,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    attn_mask: torch.dtype | None = None,
    mask_per_query: bool = True,
    mask_alignment: int = 1,
    key_padding: torch.dtype | None = None,
    is_causal: bool = False,
    positional: bool = False,
    hidden_rows: str = "zero",
    input_precision: str = "ieee",
) -> AotCase:
    """The compilation that `attention_forward` triggers for operands contiguous as [batch, seqlen, heads, dim].

    positional: with all that depends on positions (window, ALiBi, bias by distance, offset in memory), and a softcap.
    """
    value_dim = head_dim if value_dim is None else value_dim
    element = TRITON_TYPES[dtype]
    block_d, block_dv = block_of(head_dim), block_of(value_dim)
    unit = 16 // dtype.itemsize
    constexprs: dict[str, object] = {
        "query_stride_d": 1,
        "key_stride_d": 1,
        "value_stride_d": 1,
        "mask_stride_n": 1,
        "padding_stride_n": 1,
        "group": 1,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": configuration.block_m,
        "BLOCK_N": configuration.block_n,
        "ATTN_MASK": ABSENT.value if attn_mask is None else BOOL.value if attn_mask == torch.bool else FLOAT.value,
        "MASK_PER_QUERY": mask_per_query and attn_mask is not None,
        "MASK_ALIGNMENT": 1 if attn_mask is None else mask_alignment,
        "KEY_PADDING": (
            ABSENT.value if key_padding is None else BOOL.value if key_padding == torch.bool else LENGTHS.value
        ),
        "SCAN_PADDING": True,
        "HAS_RIGHT": is_causal or positional,
        "HAS_LEFT": positional,
        "TOP_LEFT": not positional,
        "OFFSET_IN_MEMORY": positional,
        "SOFTCAP": positional,
        "ALIBI": positional,
        "DISTANCE_BIAS": positional,
        "NATURAL": positional or (attn_mask is not None and attn_mask != torch.bool),
        "HIDDEN_ROWS_MEAN": hidden_rows == "mean",
        "ALIGNMENT": unit if head_dim % unit == value_dim % unit == 0 else 1,
        "WIDE_OFFSETS": False,
        "USE_TMA": configuration.uses_tma,
        "INPUT_PRECISION": input_precision,
        "USE_PDL": arch >= 90,
    }
    signature = dict.fromkeys(("query", "key", "value", "output"), f"*{element}")
    signature |= {"logsumexp": "*fp32", "scale": "fp32", "softcap": "fp32"}
    if positional:
        signature |= {"alibi_slopes": "*fp32", "distance_bias": "*fp32", "q_offset": "*i64"}
    else:
        constexprs |= {"alibi_slopes": None, "distance_bias": None}
    for argument, kind in (("attn_mask", attn_mask), ("key_padding", key_padding)):
        if kind is None:
            constexprs[argument] = None
        else:
            signature[argument] = f"*{TRITON_TYPES[kind]}"
    for argument, columns in (("key_tiles", block_d), ("value_tiles", block_dv)):
        if configuration.uses_tma:
            signature[argument] = f"tensordesc<{element}[1, 1, {configuration.block_n}, {columns}]>"
        else:
            constexprs[argument] = None
    for argument in kernl_attention_forward.arg_names:
        if argument not in signature and argument not in constexprs:
            signature[argument] = "i32"
    # Sixteen is a common divisor of heads * dim in most models; the kernel does not need it.
    divisible = ("query_stride_m", "key_stride_n", "value_stride_n")
    return AotCase(
        name=name,
        kernel=kernl_attention_forward,
        signature=signature,
        constexprs=constexprs,
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
        divisible_by_16=divisible,
        options={**configuration.options, **({"launch_pdl": True} if arch >= 90 else {})},
    )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """The tilings on offer for sm_`arch` with the masks that they are offered for."""
    if arch < 80:
        return
    names = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
    padded: dict[str, Any] = {"key_padding": torch.bool, "is_causal": True, "hidden_rows": "mean"}

    def cases(
        dtype: torch.dtype,
        head_dim: int,
        features: dict[str, dict[str, Any]],
        precision: str = "ieee",
        alignment: int = 0,
        by_position: bool = False,
    ) -> Iterator[AotCase]:
        kind = names[dtype] + ("-tf32" if precision == "tf32" else "")
        offered = configurations(
            arch,
            dtype,
            head_dim,
            head_dim,
            input_precision=precision,
            mask_alignment=alignment,
            by_position=by_position,
        )
        for configuration in offered:
            for feature, arguments in features.items():
                name = f"attention-{kind}-D{head_dim}-{feature}-{configuration.name}"
                options = {"input_precision": precision, "mask_alignment": max(1, alignment), **arguments}
                yield aot_case(name, arch, configuration, dtype, head_dim, **options)

    positional = {"positional": {"positional": True, **padded}}
    plain: dict[str, dict[str, Any]] = {"plain": {}, "padded": padded}
    biased = {"bias": {"attn_mask": torch.float32, **padded}}
    for head_dim in (64, 128, 256):
        yield from cases(torch.float16, head_dim, plain)
        yield from cases(torch.float16, head_dim, {"mask": {"attn_mask": torch.bool, **padded}}, alignment=1)
        yield from cases(torch.float16, head_dim, positional, by_position=True)
        yield from cases(torch.float32, head_dim, biased, "tf32")
        yield from cases(torch.float32, head_dim, biased, "ieee")
    if arch // 10 == 9:
        one_row = {"attn_mask": torch.float16, "mask_per_query": False, "hidden_rows": "mean"}
        yield from cases(torch.float16, 64, {"aligned": {"attn_mask": torch.float16}, "key": one_row}, alignment=8)
        yield from cases(torch.float16, 128, {"aligned": {"attn_mask": torch.float16}}, alignment=8)
    yield from cases(torch.bfloat16, 40, {"plain": {}})
