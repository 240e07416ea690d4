"""Attention, forward: softmax(scale * Q K^T, masked) V in one pass over the keys.

For one batch row, one head and one query i, with the visible keys j in N(i):

    s_ij   = cap(scale * <q_i, k_j>) + bias_ij            cap(x) = c tanh(x / c), or x
                                                          bias_before_scale: scale * (<q_i, k_j> + given_ij)
    bias   = given_ij - slope |d| + table[d]              d = j - (i + q_offset), how far the key is from the query
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
    the first and the last query of the program, and the full tiles by the other way round. The keys of a prefix are
    visible to all: with causality alone they lengthen the full tiles, with a bound on the left their tiles come first,
    tested, and those between them and the window are skipped.

    Packed sequences (cu_seqlens): a program belongs to one of them, and returns at once if that has no such queries.

What depends on the distance
    ALiBi (Press et al. 2022) is arithmetic on d. T5's bias (Raffel et al. 2020) is the same for all |d| beyond some
    reach, so each head has a table of 2 * reach + 1 numbers, read per element and found in L1: no [seqlen_q, seqlen_k]
    bias exists. Where q_offset lies in memory, a replayed CUDA graph sees its value of now.

Dropout
    out_i = sum_j r_ij exp(s_ij - lse_i) v_j with r_ij either 0 or 1 / (1 - p); lse is the one without. What is dropped
    follows from Philox 4x32 (Salmon et al. 2011) at (j, i, batch * heads + head, offset) under a seed, both read from
    memory: no mask is stored, tiles do not matter, and a replayed CUDA graph may find another seed. One block of four
    words serves four neighbouring keys.

Corners
    A hidden key's value is never read: NaN there cannot leak. (A value hidden by attn_mask alone is multiplied by zero,
    as in PyTorch.) A query that sees no key gets output 0 and lse -inf, or (HOW.hidden_rows_mean) the mean over all
    values and lse = float32's lowest number: what arithmetic with `finfo.min` in place of -inf gives, since
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
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernl.kernels.attention_common import (
    ABSENT,
    BOOL,
    FARTHEST,
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
    is_kept,
    key_tiles,
    load_rows,
    masked_scores,
    number_of_tiles,
    offset_of_head,
    offset_of_row,
    rows_of_mask,
    start_of_tile,
    unpadded_keys,
    visible_range,
)
from kernl.kernels.attention_problem import (
    UNSPECIALIZED,
    Configuration,
    Scoring,
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
    to_compute,
    wait_for_previous_kernel,
)


@triton.jit
def attend(
    output,  # [BLOCK_M, BLOCK_DV] float32, unnormalised
    row_max,  # [BLOCK_M] float32; in powers of two, or natural where something is done to the scores
    row_sum,  # [BLOCK_M] float32
    query,  # [BLOCK_M, BLOCK_D]
    key,  # Rows of the head, as the next
    value,
    tensor_maps,  # of keys and values, and where the head's tokens begin in them: batch, head, token
    start_n,
    first,
    end,
    query_rows,  # [BLOCK_M] numbers of the queries
    positions,  # [BLOCK_M] of the queries among the keys
    padding,  # Padding
    window,  # Window
    mask,  # Mask, as the next
    bias,
    scoring,  # Scores
    dropout,  # Dropout
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TEST_KEYS: tl.constexpr,
    USE_TMA: tl.constexpr,
    HOW: tl.constexpr,
):
    """One step of the online softmax: the keys [start_n, start_n + BLOCK_N).

    TEST_KEYS is false for a tile all of whose keys are in range, unpadded and inside the window of every query.
    """
    BLOCK_D: tl.constexpr = HOW.block_d
    BLOCK_DV: tl.constexpr = HOW.block_dv
    offsets = tl.arange(0, BLOCK_N)
    keys = start_n + offsets  # [BLOCK_N]
    # Keys and mask are loaded for all keys that exist, so that no load waits for the padding; values are not.
    exists = keys < end  # [BLOCK_N]
    unpadded = exists & (keys >= first)  # [BLOCK_N]
    if TEST_KEYS and HOW.key_padding == BOOL:
        unpadded = unpadded_keys(padding, keys, unpadded)
        if BLOCK_N <= 64:
            # As the bits of one integer: in the layout of the scores each thread would hold a pointer per column.
            bits = tl.sum(unpadded.to(tl.int64) << offsets, 0)
            word = tl.where(offsets < 32, bits.to(tl.int32), (bits >> 32).to(tl.int32))
            unpadded = ((word >> (offsets & 31)) & 1) != 0
    if HOW.wide_offsets:
        offsets = offsets.to(tl.int64)
    key_map, value_map, map_batch, map_head, map_token = tensor_maps

    # [BLOCK_N, BLOCK_D]; the tensor map fills what lies outside the tensor with zeros.
    if USE_TMA:
        key_tile = key_map.load([map_batch, map_head, map_token + start_n, 0]).reshape([BLOCK_N, BLOCK_D])
        key_tile = to_compute(key_tile)
    else:
        key_tile = load_rows(key, start_n, offsets, exists, HOW.head_dim, HOW.block_d, TEST_KEYS, HOW.alignment)
    products = tl.dot(query, tl.trans(key_tile), input_precision=HOW.input_precision)  # [BLOCK_M, BLOCK_N]
    scores, _ = masked_scores(
        products,
        positions[:, None],
        start_n,
        keys[None, :],
        offsets[None, :],
        exists[None, :],
        unpadded[None, :],
        window,
        mask,
        bias,
        scoring,
        TEST_KEYS,
        TEST_KEYS,
        HOW,
    )

    if HOW.natural:
        new_max = tl.maximum(row_max, tl.max(scores, 1))
    else:
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scoring.scale)
    if TEST_KEYS or HOW.mask != ABSENT or HOW.bias != ABSENT:
        # A row that has seen no key yet: subtract 0, not -inf, which would give NaN.
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    if HOW.natural:
        probabilities = tl.exp2((scores - shift[:, None]) * LOG2E)  # [BLOCK_M, BLOCK_N]
        decay = tl.exp2((row_max - shift) * LOG2E)
    else:
        probabilities = tl.exp2(scores * scoring.scale - shift[:, None])
        decay = tl.exp2(row_max - shift)
    row_sum = row_sum * decay + tl.sum(probabilities, 1)
    output = output * decay[:, None]
    if HOW.dropout:
        probabilities = tl.where(is_kept(dropout, query_rows, start_n, BLOCK_M, BLOCK_N), probabilities, 0.0)

    # [BLOCK_N, BLOCK_DV]; the values of hidden keys are zero, whatever is stored there.
    if USE_TMA and (not TEST_KEYS or (HOW.key_padding == ABSENT and not HOW.varlen)):
        value_tile = value_map.load([map_batch, map_head, map_token + start_n, 0]).reshape([BLOCK_N, BLOCK_DV])
        value_tile = to_compute(value_tile)
    else:
        value_tile = load_rows(value, start_n, offsets, unpadded, HOW.value_dim, HOW.block_dv, TEST_KEYS, HOW.alignment)
    output = tl.dot(probabilities.to(value_tile.dtype), value_tile, output, input_precision=HOW.input_precision)
    return output, new_max, row_sum


@triton.jit
def mean_of_values(value, seqlen_k, BLOCK_N: tl.constexpr, HOW: tl.constexpr):
    """[BLOCK_DV] float32, of all values of a head, padded ones included; 0 where there are none."""
    BLOCK_DV: tl.constexpr = HOW.block_dv
    offsets_n = tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_DV], tl.float32)
    for start_n in tl.range(0, seqlen_k, BLOCK_N):
        rows = offsets_n.to(tl.int64) if HOW.wide_offsets else offsets_n
        exists = start_n + offsets_n < seqlen_k
        value_tile = load_rows(value, start_n, rows, exists, HOW.value_dim, HOW.block_dv, True, HOW.alignment)
        total += tl.sum(value_tile.to(tl.float32), 0)
    return total / tl.maximum(seqlen_k, 1)


@triton.jit
def finished(
    result,  # [BLOCK_M, BLOCK_DV] float32, unnormalised
    row_max,  # [BLOCK_M], as `attend` leaves them
    row_sum,
    row_is_valid,
    value,  # Rows
    seqlen_k,
    BLOCK_N: tl.constexpr,
    HOW: tl.constexpr,
):
    """The output, and its logsumexp."""
    # NaN scores leave a NaN sum, not 0: they are no hidden rows, and come out as NaN.
    is_hidden = row_sum == 0.0
    divisor = tl.where(is_hidden, 1.0, row_sum)
    if HOW.natural:
        row_logsumexp = row_max + tl.log2(divisor) * LN2
    else:
        row_logsumexp = (row_max + tl.log2(divisor)) * LN2
    result = result / divisor[:, None]
    if HOW.hidden_rows_mean:
        wants_mean = is_hidden & row_is_valid
        if tl.max(wants_mean.to(tl.int32), 0) > 0:
            mean = mean_of_values(value, seqlen_k, BLOCK_N, HOW)
            result = tl.where(wants_mean[:, None], mean[None, :], result)
        row_logsumexp = tl.where(is_hidden, LOWEST, row_logsumexp)
    return result, row_logsumexp


@triton.jit(do_not_specialize=UNSPECIALIZED)
def kernl_attention_forward(
    query,
    key,
    value,
    key_map,
    value_map,
    attn_mask,
    bias,
    key_padding,
    alibi_slopes,
    distance_bias,
    prefix,
    q_offset,
    cu_seqlens_q,
    cu_seqlens_k,
    dropout_seed,
    dropout_offset,
    output,
    logsumexp,
    row_maximum,
    row_total,
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
    max_seqlen_q,
    right,
    left,
    reach,
    dropout_threshold,
    score_scale,
    softcap,
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN_PADDING: tl.constexpr,
    USE_TMA: tl.constexpr,
    HOW: tl.constexpr,
):
    wait_for_previous_kernel(HOW.use_pdl)
    let_next_kernel_start(HOW.use_pdl)

    # Programs of one head are neighbours, so that its keys and values are read from L2. Causal: longest ones first.
    rows_in_all = seqlen_q
    blocks_m = tl.cdiv(max_seqlen_q if HOW.varlen else seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    block_m = program % blocks_m
    if HOW.has_right:
        block_m = blocks_m - 1 - block_m
    batch_head = program // blocks_m
    batch = batch_head // heads
    head = batch_head % heads
    key_head = head // group
    start_m = block_m * BLOCK_M
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    key_head64 = key_head.to(tl.int64)

    query += offset_of_head(batch64, query_stride_b, head64, query_stride_h, HOW.alignment)
    key += offset_of_head(batch64, key_stride_b, key_head64, key_stride_h, HOW.alignment)
    value += offset_of_head(batch64, value_stride_b, key_head64, value_stride_h, HOW.alignment)
    # Where the rows begin: of the output (in units of heads), of the statistics; and of the keys, in a tensor map.
    output_start = batch64 * seqlen_q
    statistics_start = batch_head.to(tl.int64) * seqlen_q
    map_token = 0
    if HOW.varlen:
        # A sequence is a stretch of the one batch row there is: its strides are 0.
        start_q = tl.load(cu_seqlens_q + batch).to(tl.int32)
        start_k = tl.load(cu_seqlens_k + batch).to(tl.int32)
        seqlen_q = tl.load(cu_seqlens_q + batch + 1).to(tl.int32) - start_q
        seqlen_k = tl.load(cu_seqlens_k + batch + 1).to(tl.int32) - start_k
        if start_m >= seqlen_q:
            return
        query += offset_of_row(start_q, query_stride_m, HOW.alignment)
        key += offset_of_row(start_k, key_stride_n, HOW.alignment)
        value += offset_of_row(start_k, value_stride_n, HOW.alignment)
        output_start = start_q.to(tl.int64)
        statistics_start = head64 * rows_in_all + start_q
        map_token = start_k
    queries = Rows(query, query_stride_m, query_stride_d)
    keys = Rows(key, key_stride_n, key_stride_d)
    values = Rows(value, value_stride_n, value_stride_d)
    tensor_maps = (key_map, value_map, 0 if HOW.varlen else batch, key_head, map_token)

    offsets_m = tl.arange(0, BLOCK_M)
    query_rows = start_m + offsets_m  # [BLOCK_M]
    row_is_valid = query_rows < seqlen_q
    # The position of query 0 among the keys: a number, or a place in memory that a replayed graph reads anew.
    if HOW.top_left:
        right = 0
        offset = 0
    elif HOW.offset_in_memory:
        offset = clamped(tl.load(q_offset + batch * offset_stride_b), FARTHEST).to(tl.int32)
    else:
        offset = q_offset
    prefix_end = tl.load(prefix + batch).to(tl.int32) if HOW.has_prefix else 0
    window = Window(left, right, prefix_end)
    if HOW.mask != ABSENT:
        attn_mask += offset_of_head(batch64, mask_stride_b, head64, mask_stride_h, HOW.mask_alignment)
    if HOW.bias != ABSENT:
        bias += offset_of_head(batch64, bias_stride_b, head64, bias_stride_h, HOW.bias_alignment)
    # Rows past the last query read the last one's mask: nobody looks at their result, and the load needs no test.
    mask_rows = tl.minimum(query_rows, seqlen_q - 1)[:, None]
    mask = Mask(attn_mask, rows_of_mask(mask_rows, mask_stride_m, HOW.mask_alignment), mask_stride_n)
    added = Mask(bias, rows_of_mask(mask_rows, bias_stride_m, HOW.bias_alignment), bias_stride_n)
    if HOW.key_padding != ABSENT:
        key_padding += batch64 * padding_stride_b
    padding = Padding(key_padding, padding_stride_n)
    slope = tl.load(alibi_slopes + batch64 * alibi_stride_b + head) if HOW.alibi else 0.0
    if HOW.distance_bias:
        distance_bias += head64 * (2 * reach + 1)
    scoring = Scores(score_scale, softcap, slope, distance_bias, reach)
    seed = tl.load(dropout_seed) if HOW.dropout else 0
    counter = tl.load(dropout_offset) if HOW.dropout else 0
    dropout = Dropout(seed, counter, batch_head, dropout_threshold)

    rows = offsets_m.to(tl.int64) if HOW.wide_offsets else offsets_m
    query_tile = load_rows(
        queries, start_m, rows, row_is_valid, HOW.head_dim, HOW.block_d, True, HOW.alignment
    )  # [BLOCK_M, BLOCK_D]
    first, end, gapless = visible_range(padding, seqlen_k, HOW.key_padding, SCAN_PADDING)
    last_m = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
    tiles = key_tiles(first, end, gapless, start_m + offset, last_m + offset, window, BLOCK_N, HOW)

    BLOCK_DV: tl.constexpr = HOW.block_dv
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    result = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for TEST_KEYS in tl.static_range(2):
        # The tested loop is short, and a deeper pipeline would cost it registers.
        for tile in tl.range(0, number_of_tiles(tiles, BLOCK_N, TEST_KEYS), num_stages=2 if TEST_KEYS else None):
            result, row_max, row_sum = attend(
                result,
                row_max,
                row_sum,
                query_tile,
                keys,
                values,
                tensor_maps,
                start_of_tile(tiles, tile, BLOCK_N, TEST_KEYS, HOW),
                tiles.first,
                tiles.end,
                query_rows,
                query_rows + offset,
                padding,
                window,
                mask,
                added,
                scoring,
                dropout,
                BLOCK_M,
                BLOCK_N,
                TEST_KEYS,
                USE_TMA,
                HOW,
            )

    result, row_logsumexp = finished(result, row_max, row_sum, row_is_valid, values, seqlen_k, BLOCK_N, HOW)
    if HOW.dropout:
        result = result * keep_scale

    # The output is contiguous as [batch, seqlen_q, heads, value_dim].
    columns = tl.arange(0, HOW.block_dv)
    tl.store(
        output + ((output_start + query_rows)[:, None] * heads + head) * HOW.value_dim + columns[None, :],
        result.to(output.dtype.element_ty),
        mask=row_is_valid[:, None] & (columns < HOW.value_dim)[None, :],
    )
    tl.store(logsumexp + statistics_start + query_rows, row_logsumexp, mask=row_is_valid)
    if row_maximum is not None:
        tl.store(row_maximum + statistics_start + query_rows, row_max if HOW.natural else row_max * LN2, row_is_valid)
        tl.store(row_total + statistics_start + query_rows, row_sum, mask=row_is_valid)


# By the padded head dimension (the larger of the two): tilings, of which `default_configuration` takes the first that
# suits the number of queries; those after it are for measurements to choose. Each compiles without spills on Triton 3.6
# and 3.9 both, in the shared memory of the chips it is for. A cap on registers lets a multiprocessor hold two programs
# of eight warps or three of four. Measured on an H200, plain loads are a little faster than the TMA at head_dim 64, and
# with many waves of programs tiles of 32 keys are, of which a multiprocessor holds five.
_HOPPER = {
    64: tilings("64 64 4 3", "32 64 4 2", "16 32 4 2", "64 64 4 3 tma 168", "64 128 4 2 tma", "64 32 4 3 tma"),
    128: tilings(
        "128 64 8 3 tma",
        "128 32 8 3",
        "64 64 4 2 tma",
        "64 32 4 3",
        "32 64 4 2",
        "16 64 4 3",
        "16 32 4 2",
    ),
    256: tilings("64 32 8 2 tma", "64 32 8 2", "32 32 8 1", "16 16 4 2"),
}
_HOPPER_PACKED = {**_HOPPER, 128: _HOPPER[128][:-1]}
_BLACKWELL = {
    64: tilings("128 64 8 3 tma", "64 64 4 3 tma", "64 64 4 3", "16 32 4 2"),
    128: tilings("128 64 8 3 tma", "64 64 4 2 tma", "64 32 8 2", "16 32 4 2"),
    256: tilings("64 32 8 2", "16 16 4 2"),
}
_AMPERE = {
    64: tilings("128 64 8 3", "64 32 4 3", "16 64 4 2"),
    128: tilings("128 32 8 2", "64 32 4 2", "16 32 4 1"),
    256: tilings("64 32 8 1", "16 16 4 2"),
}
# An attn_mask takes registers: where its rows are not aligned, a pointer and a value for each of its elements.
_MASK = {
    64: tilings("64 32 8 2", "16 32 4 2"),
    128: tilings("64 32 8 2", "16 16 4 2"),
    256: tilings("32 32 8 1"),
}
# So does what depends on positions.
_POSITIONS = {
    64: tilings("64 32 8 2", "16 16 4 2"),
    128: tilings("64 32 8 2", "16 16 8 1"),
    256: tilings("32 32 8 1"),
}
_BLACKWELL_POSITIONS = {**_POSITIONS, 128: tilings("64 32 8 2", "16 32 8 1")}
_HOPPER_MASK = {
    64: tilings("64 32 8 2 tma", "64 32 8 2", "16 16 4 2"),
    128: tilings("64 32 8 2", "16 32 4 2"),
    256: tilings("32 32 8 1"),
}
_HOPPER_ALIGNED_MASK = {
    64: tilings("64 64 4 3 tma", "128 32 8 3 tma", "64 32 4 3", "16 32 4 2"),
    128: tilings("64 32 4 3 tma", "64 32 8 2", "16 32 4 2"),
    256: tilings("32 32 8 1"),
}
_TF32 = {
    64: tilings("64 16 8 2", "16 16 4 1"),
    128: tilings("16 32 4 2"),
    256: tilings("16 32 8 1"),
}
# Without tensor cores the operands of a product are held in registers: small tiles, and none fits for wide heads.
_IEEE = {
    64: tilings("32 16 8 1"),
    128: tilings("16 16 8 1"),
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
    packed: bool = False,
) -> tuple[Configuration, ...]:
    """The tilings worth trying on sm_`arch`, those with many queries a program first; none where nothing fits.

    input_precision: "tf32" or "ieee", for float32. mask_alignment: 0 without attn_mask, else that of its rows (see
    `alignment_of`); more than 1 too when one row serves all queries. by_position: with a softcap, dropout, or anything
    in `Positions` but causality from the top left. packed: sequences.
    """
    if arch == 0:
        return _INTERPRETED
    width = max(block_of(head_dim), block_of(value_dim), 64)
    if dtype == torch.float32:
        return (_IEEE if input_precision == "ieee" else _TF32)[width]
    is_hopper = arch // 10 == 9
    if by_position or (packed and arch < 90):
        return (_HOPPER_MASK if is_hopper else _BLACKWELL_POSITIONS if arch >= 100 else _POSITIONS)[width]
    if mask_alignment == 0:
        return ((_HOPPER_PACKED if packed else _HOPPER) if is_hopper else _BLACKWELL if arch >= 100 else _AMPERE)[width]
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


def attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    statistics: torch.Tensor | None = None,
    *,
    configuration: Configuration,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill `output`, `logsumexp` and, if given, `statistics`.

    query [batch, heads, seqlen_q, head_dim], key [batch, key_heads, seqlen_k, head_dim], value [batch, key_heads,
    seqlen_k, value_dim], of one type and any strides; seqlens at least 1. The scale is positive unless something is
    done to the scores (`Scoring.is_natural`).
    output [batch, heads, seqlen_q, value_dim], contiguous as [batch, seqlen_q, heads, value_dim]. logsumexp float32
    [batch, heads, seqlen_q], contiguous. statistics: float32 [2, batch, heads, seqlen_q], contiguous: the maximum of
    each row of scores, and the sum of exp(score - maximum).
    """
    arguments = scoring_arguments(query, key, value, scoring, input_precision=input_precision, use_pdl=use_pdl)
    block_m, block_n = configuration.block_m, configuration.block_n
    uses_tma = configuration.uses_tma and supports_tma(key) and supports_tma(value)
    arguments |= {
        "key_map": _descriptor(key, block_n, block_of(key.shape[3])) if uses_tma else None,
        "value_map": _descriptor(value, block_n, block_of(value.shape[3])) if uses_tma else None,
        "output": output,
        "logsumexp": logsumexp,
        "row_maximum": None if statistics is None else statistics[0],
        "row_total": None if statistics is None else statistics[1],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "SCAN_PADDING": scoring.kind_of_padding == "bool" and key.shape[2] > 2 * block_n,
        "USE_TMA": uses_tma,
    }
    seqlen_q = query.shape[2] if scoring.packed is None else scoring.packed.max_seqlen_q
    count_launch("attention_forward")
    kernl_attention_forward[(triton.cdiv(seqlen_q, block_m) * scoring.batch_of(query) * query.shape[1],)](
        **of_kernel(kernl_attention_forward, arguments),
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
        **configuration.options,
        **({"launch_pdl": True} if use_pdl else {}),
    )


def aot_case(
    name: str,
    arch: int,
    configuration: Configuration,
    dtype: torch.dtype,
    head_dim: int,
    *,
    value_dim: int | None = None,
    **features: Any,
) -> AotCase:
    """The compilation that `attention_forward` triggers; features as `case_of` takes them."""
    element = TRITON_TYPES[dtype]
    types = {"output": f"*{element}", "logsumexp": "*fp32"}
    values: dict[str, object] = {"USE_TMA": configuration.uses_tma, "row_maximum": None, "row_total": None}
    widths = (block_of(head_dim), block_of(head_dim if value_dim is None else value_dim))
    for argument, columns in zip(("key_map", "value_map"), widths):
        if configuration.uses_tma:
            types[argument] = f"tensordesc<{element}[1, 1, {configuration.block_n}, {columns}]>"
        else:
            values[argument] = None
    options = {"value_dim": value_dim, **features}
    return case_of(name, arch, kernl_attention_forward, configuration, dtype, head_dim, types, values, **options)


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
        packed: bool = False,
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
            packed=packed,
        )
        for configuration in offered:
            for feature, arguments in features.items():
                name = f"attention-{kind}-D{head_dim}-{feature}-{configuration.name}"
                options = {"input_precision": precision, "mask_alignment": max(1, alignment), **arguments}
                yield aot_case(name, arch, configuration, dtype, head_dim, **options)

    positional = {"positional": {"positional": True, **padded}}
    masks = {"attn_mask": torch.uint8, "bias": torch.float16, "bias_before_scale": True, "prefix": True}
    others: dict[str, dict[str, Any]] = {
        "packed": {"packed": True, "dropout": True, "is_causal": True},
        "masks": {**masks, "is_causal": True},
    }
    plain: dict[str, dict[str, Any]] = {"plain": {}, "padded": padded}
    biased = {"bias": {"bias": torch.float32, **padded}}
    for head_dim in (64, 128, 256):
        yield from cases(torch.float16, head_dim, plain)
        yield from cases(torch.float16, head_dim, {"mask": {"attn_mask": torch.bool, **padded}}, alignment=1)
        yield from cases(torch.float16, head_dim, positional, by_position=True)
        yield from cases(torch.float32, head_dim, biased, "tf32")
        yield from cases(torch.float32, head_dim, biased, "ieee")
    if arch // 10 == 9:
        one_row = {"bias": torch.float16, "per_query": False, "hidden_rows": "mean"}
        yield from cases(torch.float16, 64, {"aligned": {"bias": torch.float16}, "key": one_row}, alignment=8)
        yield from cases(torch.float16, 128, {"aligned": {"bias": torch.float16}}, alignment=8)
    yield from cases(torch.float16, 128, others, by_position=True)
    if arch >= 90:
        varlen = {"varlen": {"packed": True, "is_causal": True, "group": 4}}
        yield from cases(torch.float16, 128, varlen, packed=True)
    yield from cases(torch.bfloat16, 40, {"plain": {}})
