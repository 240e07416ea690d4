"""Attention, backward: the gradients of query, key, value and a float attn_mask or bias, in two or three passes.

With s_ij, lse_i and out_i as in `kernl.kernels.attention`, the keys j in N(i) visible to query i, dO and dlse the
gradients of the two outputs:

    P_ij    = exp(s_ij - lse_i)          for j in N(i), else 0
    delta_i = <dO_i, out_i> - dlse_i
    dS_ij   = P_ij (<dO_i, v_j> - delta_i)
    dQ_i    = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i      dbias_ij = dS_ij

With dropout <dO_i, v_j> and the P of dV are multiplied by its factors, 0 or 1 / (1 - p), made again from seed and
offset; with a softcap dS is multiplied by the cap's derivative where it meets q or k; with bias_before_scale dbias has
the factor scale too. The gradient of a bias by distance (T5's) is not made here.

Neither P nor dS is written to memory: each kernel computes its tiles anew from the logsumexp of the forward pass.

    query  one program per BLOCK_M queries of one head, a loop over the keys they see. It begins with what is known per
           query (delta, and lse in the form the other kernels want) and leaves that in memory for them.
    key    one program per BLOCK_N keys of one key head, a loop over the query heads that share it and over the queries
           that see the keys: dK and dV stay in registers, and a group of heads is summed without a copy. Its tiles are
           transposed, [keys, queries], so that P and dS enter their products as they come.
    mask   only where somebody wants dbias: one program per tile of the *mask*, a loop over whatever the mask is
           broadcast over (batch, heads, queries, keys). Nothing of size [batch, heads, seqlen_q, seqlen_k] is made
           unless the mask itself has it.

Every element of a gradient has one owner that sums in a fixed order: no atomics, the same bits each time. Follows
FlashAttention (Dao et al. 2022) and the loop order of FlashAttention-2 (Dao 2023).

Which tiles are visited
    query: the keys that can be visible at all, as in the forward pass. key: the queries whose windows reach the keys of
    the program (all for keys of a prefix), and none where all keys of the program are padding. The loops over tiles
    that need no test and over those that do are apart, as in the forward pass. The key kernel tests no padding: what it
    sums for a padded key stays in that key's row, which is set to zero in the end.

Corners
    Keys and values at padded positions are read as zero: NaN there cannot leak.
    A query that sees no key has P = 0. Where hidden rows are means its gradient goes to all values in equal parts: the
    query kernel leaves the sum of dO over such rows of each program in memory, and the key kernel adds its part.
    A float mask can push every score of a row to where lse = max + log(sum) has no digits left for log(sum); with
    finfo.min for all keys, lse is finfo.min, and exp(s - lse) is 1 where the forward pass had 1 / seqlen_k. For rows
    with |lse| > 256 the query kernel therefore sums exp(s - lse) over the keys once more, which is 1 but for that
    rounding, and P is divided by it. A row of a mean that is hidden has the sum 0.

Flops and bytes
    flops   query: 2 * scores * (2 * head_dim + value_dim); key: 2 * scores * (2 * head_dim + 2 * value_dim), with
            scores = batch * heads * seqlen_q * seqlen_k (half of it when causal): 7 products where the forward pass has
            2. mask: 2 * scores * (head_dim + value_dim) more.
    bytes   each kernel reads Q, K, V and dO once (what is read again by other programs comes from L2), the query kernel
            the output too; 8 to 12 bytes per query and head go through memory between them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernl.kernels.attention_common import (
    ABSENT,
    BOOL,
    FARTHEST,
    LENGTHS,
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
    Variant,
    case_of,
    of_kernel,
    scoring_arguments,
    strides_by_name,
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

# Above this |logsumexp| float32 has less than 2^-16 left for the logarithm of the sum.
_LARGE_LOGSUMEXP = tl.constexpr(256.0)
_HIDDEN_CHUNK = tl.constexpr(16)


@triton.jit
def _exponentials(scores, shift, log2_sum, scoring, HOW: tl.constexpr):
    """P, from scores that are -inf where hidden; shift and log2_sum with a dimension of size 1 for the keys."""
    if HOW.natural:
        return tl.exp2((scores - shift) * LOG2E - log2_sum)
    else:
        return tl.exp2(scores * scoring.scale - shift)


@triton.jit
def _offset_of_queries(q_offset, batch, offset_stride_b, HOW: tl.constexpr):
    """The position of query 0 among the keys."""
    if HOW.top_left:
        return 0
    elif HOW.offset_in_memory:
        return clamped(tl.load(q_offset + batch * offset_stride_b), FARTHEST).to(tl.int32)
    else:
        return q_offset


@triton.jit
def _sequence(cu_seqlens, batch):
    """First token and length of a packed sequence."""
    start = tl.load(cu_seqlens + batch).to(tl.int32)
    return start, tl.load(cu_seqlens + batch + 1).to(tl.int32) - start


@triton.jit
def _load_row_statistics(
    delta,
    shift,
    log2_sum,
    rows64,  # [BLOCK_M] numbers of the rows among all statistics
    row_is_valid,
    HOW: tl.constexpr,
):
    """delta, shift and log2_sum of some queries, each [BLOCK_M]; those past the end get P = 0."""
    row_delta = tl.load(delta + rows64, mask=row_is_valid, other=0.0)
    if HOW.natural:
        row_shift = tl.load(shift + rows64, mask=row_is_valid, other=0.0)
        row_log2_sum = tl.load(log2_sum + rows64, mask=row_is_valid, other=float("inf"))
    else:
        row_shift = tl.load(shift + rows64, mask=row_is_valid, other=float("inf"))
        row_log2_sum = row_shift  # not read
    return row_delta, row_shift, row_log2_sum


@triton.jit
def _keys_step(
    total,  # [BLOCK_M, BLOCK_D] float32: dQ / scale; or [BLOCK_M] float32: sum of P
    query_tile,  # [BLOCK_M, BLOCK_D]
    grad_tile,  # [BLOCK_M, BLOCK_DV]
    row_delta,  # [BLOCK_M], as the next two
    row_shift,
    row_log2_sum,
    key,  # Rows of the head, as the next
    value,
    start_n,
    first,
    end,
    query_rows,  # [BLOCK_M] numbers of the queries
    positions,  # [BLOCK_M] of the queries among the keys
    padding,  # Padding
    window,  # Window
    last_row,  # number of the last query
    mask_pointer,  # at (batch, head, 0, 0), as the next
    bias_pointer,
    mask_stride_m,
    mask_stride_n,
    bias_stride_m,
    bias_stride_n,
    scoring,  # Scores
    dropout,  # Dropout
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TEST_KEYS: tl.constexpr,
    SUM_ONLY: tl.constexpr,
    HOW: tl.constexpr,
):
    """Add what the keys [start_n, start_n + BLOCK_N) give to dQ, or (SUM_ONLY) to the sum of P.

    TEST_KEYS is false for a tile all of whose keys are in range, unpadded and inside the window of every query.
    """
    offsets = tl.arange(0, BLOCK_N)
    keys = start_n + offsets  # [BLOCK_N]
    exists = keys < end
    unpadded = exists & (keys >= first)
    if TEST_KEYS and HOW.key_padding == BOOL:
        unpadded = unpadded_keys(padding, keys, unpadded)
    if HOW.wide_offsets:
        offsets = offsets.to(tl.int64)
    # Padded keys are zero, as padded values are: their zero in dS would not hide a NaN from the product with K.
    key_tile = load_rows(
        key, start_n, offsets, unpadded, HOW.head_dim, HOW.block_d, TEST_KEYS, HOW.alignment
    )  # [BLOCK_N, BLOCK_D]
    mask_rows = tl.minimum(query_rows, last_row)[:, None]
    products = tl.dot(query_tile, tl.trans(key_tile), input_precision=HOW.input_precision)  # [BLOCK_M, BLOCK_N]
    scores, slope_of_cap = masked_scores(
        products,
        positions[:, None],
        start_n,
        keys[None, :],
        offsets[None, :],
        exists[None, :],
        unpadded[None, :],
        window,
        Mask(mask_pointer, rows_of_mask(mask_rows, mask_stride_m, HOW.mask_alignment), mask_stride_n),
        Mask(bias_pointer, rows_of_mask(mask_rows, bias_stride_m, HOW.bias_alignment), bias_stride_n),
        scoring,
        TEST_KEYS,
        TEST_KEYS,
        HOW,
    )
    probabilities = _exponentials(scores, row_shift[:, None], row_log2_sum[:, None], scoring, HOW)
    if SUM_ONLY:
        total += tl.sum(probabilities, 1)
    else:
        value_tile = load_rows(
            value, start_n, offsets, unpadded, HOW.value_dim, HOW.block_dv, TEST_KEYS, HOW.alignment
        )  # [BLOCK_N, BLOCK_DV]
        grad_probabilities = tl.dot(grad_tile, tl.trans(value_tile), input_precision=HOW.input_precision)
        if HOW.dropout:
            kept = is_kept(dropout, query_rows, start_n, BLOCK_M, BLOCK_N)
            grad_probabilities = tl.where(kept, grad_probabilities * keep_scale, 0.0)
        grad_scores = probabilities * (grad_probabilities - row_delta[:, None])  # [BLOCK_M, BLOCK_N]
        if HOW.softcap:
            grad_scores = grad_scores * slope_of_cap
        total = tl.dot(grad_scores.to(key_tile.dtype), key_tile, total, input_precision=HOW.input_precision)
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def kernl_attention_backward_query(
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
    cu_seqlens_q,
    cu_seqlens_k,
    dropout_seed,
    dropout_offset,
    grad_output,
    output,
    logsumexp,
    grad_logsumexp,
    delta,
    shift,
    log2_sum,
    hidden_grads,
    grad_query,
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
    grad_stride_b,
    grad_stride_h,
    grad_stride_m,
    grad_stride_d,
    output_stride_b,
    output_stride_h,
    output_stride_m,
    output_stride_d,
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
    scale,
    score_scale,
    softcap,
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCAN_PADDING: tl.constexpr,
    HOW: tl.constexpr,
):
    wait_for_previous_kernel(HOW.use_pdl)
    let_next_kernel_start(HOW.use_pdl)

    BLOCK_D: tl.constexpr = HOW.block_d
    rows_in_all = seqlen_q
    blocks_m = tl.cdiv(max_seqlen_q if HOW.varlen else seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    block_m = program % blocks_m
    if HOW.has_right:
        block_m = blocks_m - 1 - block_m  # longest first
    batch_head = program // blocks_m
    batch = batch_head // heads
    head = batch_head % heads
    start_m = block_m * BLOCK_M
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    key_head64 = (head // group).to(tl.int64)

    query += offset_of_head(batch64, query_stride_b, head64, query_stride_h, HOW.alignment)
    key += offset_of_head(batch64, key_stride_b, key_head64, key_stride_h, HOW.alignment)
    value += offset_of_head(batch64, value_stride_b, key_head64, value_stride_h, HOW.alignment)
    grad_output += offset_of_head(batch64, grad_stride_b, head64, grad_stride_h, HOW.alignment)
    output += offset_of_head(batch64, output_stride_b, head64, output_stride_h, HOW.alignment)
    row_start = batch64 * seqlen_q
    statistics_start = batch_head.to(tl.int64) * seqlen_q
    if HOW.varlen:
        start_q, seqlen_q = _sequence(cu_seqlens_q, batch)
        start_k, seqlen_k = _sequence(cu_seqlens_k, batch)
        query += offset_of_row(start_q, query_stride_m, HOW.alignment)
        key += offset_of_row(start_k, key_stride_n, HOW.alignment)
        value += offset_of_row(start_k, value_stride_n, HOW.alignment)
        grad_output += offset_of_row(start_q, grad_stride_m, HOW.alignment)
        output += offset_of_row(start_q, output_stride_m, HOW.alignment)
        row_start = start_q.to(tl.int64)
        statistics_start = head64 * rows_in_all + start_q
        if start_m >= seqlen_q:
            if HOW.hidden_rows_mean:
                columns = tl.arange(0, HOW.block_dv)
                place = hidden_grads + (batch_head.to(tl.int64) * blocks_m + block_m) * HOW.value_dim
                tl.store(place + columns, tl.zeros_like(columns).to(tl.float32), mask=columns < HOW.value_dim)
            return
    keys = Rows(key, key_stride_n, key_stride_d)
    values = Rows(value, value_stride_n, value_stride_d)

    offsets_m = tl.arange(0, BLOCK_M)
    query_rows = start_m + offsets_m  # [BLOCK_M]
    row_is_valid = query_rows < seqlen_q
    rows64 = statistics_start + query_rows
    offset = _offset_of_queries(q_offset, batch, offset_stride_b, HOW)
    if HOW.top_left:
        right = 0
    window = Window(left, right, tl.load(prefix + batch).to(tl.int32) if HOW.has_prefix else 0)
    if HOW.mask != ABSENT:
        attn_mask += offset_of_head(batch64, mask_stride_b, head64, mask_stride_h, HOW.mask_alignment)
    if HOW.bias != ABSENT:
        bias += offset_of_head(batch64, bias_stride_b, head64, bias_stride_h, HOW.bias_alignment)
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

    # What is known per query: delta_i, and the subtrahend of its scores.
    rows = offsets_m.to(tl.int64) if HOW.wide_offsets else offsets_m
    grad_tile = load_rows(
        Rows(grad_output, grad_stride_m, grad_stride_d),
        start_m,
        rows,
        row_is_valid,
        HOW.value_dim,
        HOW.block_dv,
        True,
        HOW.alignment,
    )  # [BLOCK_M, BLOCK_DV]
    output_tile = load_rows(
        Rows(output, output_stride_m, output_stride_d),
        start_m,
        rows,
        row_is_valid,
        HOW.value_dim,
        HOW.block_dv,
        True,
        HOW.alignment,
    )  # [BLOCK_M, BLOCK_DV]
    row_delta = tl.sum(grad_tile.to(tl.float32) * output_tile.to(tl.float32), 1)
    if grad_logsumexp is not None:
        row_delta -= tl.load(grad_logsumexp + rows64, mask=row_is_valid, other=0.0)
    row_logsumexp = tl.load(logsumexp + rows64, mask=row_is_valid, other=0.0)
    query_tile = load_rows(
        Rows(query, query_stride_m, query_stride_d),
        start_m,
        rows,
        row_is_valid,
        HOW.head_dim,
        HOW.block_d,
        True,
        HOW.alignment,
    )  # [BLOCK_M, BLOCK_D]

    first, end, gapless = visible_range(padding, seqlen_k, HOW.key_padding, SCAN_PADDING)
    last_m = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1
    tiles = key_tiles(first, end, gapless, start_m + offset, last_m + offset, window, BLOCK_N, HOW)

    # With natural scores P = exp2((s - shift) log2(e) - log2_sum); otherwise P = exp2(s scale log2(e) - shift). Either
    # way P = 0 in a hidden row.
    if HOW.natural:
        is_hidden = row_logsumexp == float("-inf")
        row_shift = tl.where(is_hidden, 0.0, row_logsumexp)
        row_log2_sum = tl.zeros([BLOCK_M], tl.float32)
        is_large = tl.abs(row_shift) > _LARGE_LOGSUMEXP
        if tl.max(is_large.to(tl.int32), 0) > 0:
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            # From the first tile of all: a prefix may come before the window.
            first_tile = tiles.first // BLOCK_N * BLOCK_N
            for start_n in tl.range(first_tile, tiles.end, BLOCK_N, num_stages=1):
                row_sum = _keys_step(
                    row_sum,
                    query_tile,
                    grad_tile,
                    row_delta,
                    row_shift,
                    row_log2_sum,
                    keys,
                    values,
                    tl.multiple_of(start_n, BLOCK_N),
                    tiles.first,
                    tiles.end,
                    query_rows,
                    query_rows + offset,
                    padding,
                    window,
                    seqlen_q - 1,
                    attn_mask,
                    bias,
                    mask_stride_m,
                    mask_stride_n,
                    bias_stride_m,
                    bias_stride_n,
                    scoring,
                    dropout,
                    keep_scale,
                    BLOCK_M,
                    BLOCK_N,
                    True,
                    True,
                    HOW,
                )
            is_hidden = is_hidden | (is_large & (row_sum == 0.0))
            row_log2_sum = tl.log2(tl.where(is_large & (row_sum > 0.0), row_sum, 1.0))
            row_shift = tl.where(is_hidden, 0.0, row_shift)
        row_log2_sum = tl.where(is_hidden, float("inf"), row_log2_sum)
        tl.store(log2_sum + rows64, row_log2_sum, mask=row_is_valid)
    else:
        is_hidden = row_logsumexp <= LOWEST
        row_shift = tl.where(is_hidden, float("inf"), row_logsumexp) * LOG2E
        row_log2_sum = row_shift  # not read
    row_delta = tl.where(is_hidden, 0.0, row_delta)
    tl.store(delta + rows64, row_delta, mask=row_is_valid)
    tl.store(shift + rows64, row_shift, mask=row_is_valid)
    if HOW.hidden_rows_mean:
        # [batch, heads, blocks_m, VALUE_DIM], contiguous
        hidden_grad = tl.sum(tl.where((is_hidden & row_is_valid)[:, None], grad_tile.to(tl.float32), 0.0), 0)
        columns = tl.arange(0, HOW.block_dv)
        place = hidden_grads + (batch_head.to(tl.int64) * blocks_m + block_m) * HOW.value_dim
        tl.store(place + columns, hidden_grad, mask=columns < HOW.value_dim)

    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for TEST_KEYS in tl.static_range(2):
        for tile in tl.range(0, number_of_tiles(tiles, BLOCK_N, TEST_KEYS), num_stages=1 if TEST_KEYS else None):
            result = _keys_step(
                result,
                query_tile,
                grad_tile,
                row_delta,
                row_shift,
                row_log2_sum,
                keys,
                values,
                start_of_tile(tiles, tile, BLOCK_N, TEST_KEYS, HOW),
                tiles.first,
                tiles.end,
                query_rows,
                query_rows + offset,
                padding,
                window,
                seqlen_q - 1,
                attn_mask,
                bias,
                mask_stride_m,
                mask_stride_n,
                bias_stride_m,
                bias_stride_n,
                scoring,
                dropout,
                keep_scale,
                BLOCK_M,
                BLOCK_N,
                TEST_KEYS,
                False,
                HOW,
            )

    # Contiguous as [batch, seqlen_q, heads, HEAD_DIM].
    columns_d = tl.arange(0, BLOCK_D)
    places = (row_start + query_rows)[:, None] * heads + head
    tl.store(
        grad_query + places * HOW.head_dim + columns_d[None, :],
        to_storage(result * scale, grad_query.dtype.element_ty),
        mask=row_is_valid[:, None] & (columns_d < HOW.head_dim)[None, :],
    )


@triton.jit
def _queries_step(
    total_key,  # [BLOCK_N, BLOCK_D] float32: dK / scale
    total_value,  # [BLOCK_N, BLOCK_DV] float32: dV
    key_tile,  # [BLOCK_N, BLOCK_D]
    value_tile,  # [BLOCK_N, BLOCK_DV]
    query,  # Rows of the head, as the next
    grad_output,
    delta,
    shift,
    log2_sum,
    statistics_start,  # number of the head's first row in delta, shift and log2_sum
    start_m,
    start_n,
    exists,  # [BLOCK_N]
    seqlen_q,
    offset,
    window,  # Window
    mask_pointer,  # at (batch, head, 0, 0), as the next
    bias_pointer,
    mask_stride_m,
    mask_stride_n,
    bias_stride_m,
    bias_stride_n,
    scoring,  # Scores
    dropout,  # Dropout
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    HOW: tl.constexpr,
):
    """Add what the queries [start_m, start_m + BLOCK_M) of one head give to dK and dV. The tiles are transposed.

    TEST_ROWS is false for a tile all of whose queries exist and see all keys of the program by their positions.
    """
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)
    keys = start_n + offsets_n
    query_rows = start_m + offsets_m  # [BLOCK_M]
    row_is_valid = query_rows < seqlen_q
    rows64 = statistics_start + query_rows
    if HOW.wide_offsets:
        offsets_m = offsets_m.to(tl.int64)
        offsets_n = offsets_n.to(tl.int64)
    query_tile = load_rows(
        query, start_m, offsets_m, row_is_valid, HOW.head_dim, HOW.block_d, TEST_ROWS, HOW.alignment
    )  # [BLOCK_M, BLOCK_D]
    row_delta, row_shift, row_log2_sum = _load_row_statistics(delta, shift, log2_sum, rows64, row_is_valid, HOW)
    mask_rows = tl.minimum(query_rows, seqlen_q - 1)[None, :]
    products = tl.dot(key_tile, tl.trans(query_tile), input_precision=HOW.input_precision)  # [BLOCK_N, BLOCK_M]
    scores, slope_of_cap = masked_scores(
        products,
        (query_rows + offset)[None, :],
        start_n,
        keys[:, None],
        offsets_n[:, None],
        exists[:, None],
        exists[:, None],
        window,
        Mask(mask_pointer, rows_of_mask(mask_rows, mask_stride_m, HOW.mask_alignment), mask_stride_n),
        Mask(bias_pointer, rows_of_mask(mask_rows, bias_stride_m, HOW.bias_alignment), bias_stride_n),
        scoring,
        TEST_ROWS,
        # Keys need a test where a mask is read for them; else their rows are dropped in the end.
        HOW.mask != ABSENT or HOW.bias != ABSENT,
        HOW,
    )
    probabilities = _exponentials(scores, row_shift[None, :], row_log2_sum[None, :], scoring, HOW)
    grad_tile = load_rows(
        grad_output, start_m, offsets_m, row_is_valid, HOW.value_dim, HOW.block_dv, TEST_ROWS, HOW.alignment
    )  # [BLOCK_M, BLOCK_DV]
    weights = probabilities
    if HOW.dropout:
        kept = tl.trans(is_kept(dropout, query_rows, start_n, BLOCK_M, BLOCK_N))
        weights = tl.where(kept, probabilities * keep_scale, 0.0)
    total_value = tl.dot(weights.to(grad_tile.dtype), grad_tile, total_value, input_precision=HOW.input_precision)
    grad_probabilities = tl.dot(value_tile, tl.trans(grad_tile), input_precision=HOW.input_precision)
    if HOW.dropout:
        grad_probabilities = tl.where(kept, grad_probabilities * keep_scale, 0.0)
    grad_scores = probabilities * (grad_probabilities - row_delta[None, :])  # [BLOCK_N, BLOCK_M]
    if HOW.softcap:
        grad_scores = grad_scores * slope_of_cap
    total_key = tl.dot(grad_scores.to(query_tile.dtype), query_tile, total_key, input_precision=HOW.input_precision)
    return total_key, total_value


@triton.jit(do_not_specialize=UNSPECIALIZED)
def kernl_attention_backward_key(
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
    cu_seqlens_q,
    cu_seqlens_k,
    dropout_seed,
    dropout_offset,
    grad_output,
    delta,
    shift,
    log2_sum,
    hidden_grads,
    grad_key,
    grad_value,
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
    grad_stride_b,
    grad_stride_h,
    grad_stride_m,
    grad_stride_d,
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
    blocks_m_of_query,
    seqlen_q,
    seqlen_k,
    max_seqlen_k,
    right,
    left,
    reach,
    dropout_threshold,
    scale,
    score_scale,
    softcap,
    keep_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOW: tl.constexpr,
):
    wait_for_previous_kernel(HOW.use_pdl)
    let_next_kernel_start(HOW.use_pdl)

    BLOCK_D: tl.constexpr = HOW.block_d
    BLOCK_DV: tl.constexpr = HOW.block_dv
    rows_in_all = seqlen_q
    blocks_n = tl.cdiv(max_seqlen_k if HOW.varlen else seqlen_k, BLOCK_N)
    key_heads = heads // group
    program = tl.program_id(0)
    block_n = program % blocks_n
    batch = program // blocks_n // key_heads
    key_head = program // blocks_n % key_heads
    start_n = block_n * BLOCK_N
    batch64 = batch.to(tl.int64)
    key_head64 = key_head.to(tl.int64)

    key += offset_of_head(batch64, key_stride_b, key_head64, key_stride_h, HOW.alignment)
    value += offset_of_head(batch64, value_stride_b, key_head64, value_stride_h, HOW.alignment)
    row_start = batch64 * seqlen_k
    if HOW.varlen:
        start_q, seqlen_q = _sequence(cu_seqlens_q, batch)
        start_k, seqlen_k = _sequence(cu_seqlens_k, batch)
        if start_n >= seqlen_k:
            return
        query += offset_of_row(start_q, query_stride_m, HOW.alignment)
        key += offset_of_row(start_k, key_stride_n, HOW.alignment)
        value += offset_of_row(start_k, value_stride_n, HOW.alignment)
        grad_output += offset_of_row(start_q, grad_stride_m, HOW.alignment)
        row_start = start_k.to(tl.int64)
    if HOW.key_padding != ABSENT:
        key_padding += batch64 * padding_stride_b

    offsets_n = tl.arange(0, BLOCK_N)
    keys = start_n + offsets_n  # [BLOCK_N]
    exists = keys < seqlen_k
    unpadded = exists
    if HOW.key_padding == LENGTHS:
        unpadded = unpadded & (keys < tl.load(key_padding))
    elif HOW.key_padding == BOOL:
        unpadded = unpadded_keys(Padding(key_padding, padding_stride_n), keys, exists)
    rows_n = offsets_n.to(tl.int64) if HOW.wide_offsets else offsets_n
    key_tile = load_rows(
        Rows(key, key_stride_n, key_stride_d),
        start_n,
        rows_n,
        unpadded,
        HOW.head_dim,
        HOW.block_d,
        True,
        HOW.alignment,
    )  # [BLOCK_N, BLOCK_D]
    value_tile = load_rows(
        Rows(value, value_stride_n, value_stride_d),
        start_n,
        rows_n,
        unpadded,
        HOW.value_dim,
        HOW.block_dv,
        True,
        HOW.alignment,
    )  # [BLOCK_N, BLOCK_DV]

    # [tiles_start, end): queries that may see some key of this program. [full_start, full_end): tiles of queries that
    # all exist and see all of its keys by their positions.
    offset = _offset_of_queries(q_offset, batch, offset_stride_b, HOW)
    if HOW.top_left:
        right = 0
    end = seqlen_q
    tiles_start = 0
    full_start = 0
    full_end = seqlen_q // BLOCK_M * BLOCK_M
    if HOW.has_left:
        last_sees = start_n - offset + left
        end = tl.minimum(end, tl.maximum(last_sees + BLOCK_N, 0))
        full_end = tl.minimum(full_end, tl.maximum(last_sees + 1, 0) // BLOCK_M * BLOCK_M)
    rows_end = tl.cdiv(end, BLOCK_M) * BLOCK_M
    if HOW.has_right:
        first_sees = start_n - offset - right
        tiles_start = tl.minimum(tl.maximum(first_sees, 0) // BLOCK_M * BLOCK_M, rows_end)
        full_start = tl.minimum(tl.cdiv(tl.maximum(first_sees + BLOCK_N - 1, 0), BLOCK_M) * BLOCK_M, rows_end)
    prefix_end = 0
    if HOW.has_prefix:
        prefix_end = tl.load(prefix + batch).to(tl.int32)
        touches = start_n < prefix_end
        covers = start_n + BLOCK_N <= prefix_end
        end = tl.where(touches, seqlen_q, end)
        tiles_start = tl.where(touches, 0, tiles_start)
        full_start = tl.where(covers, 0, full_start)
        full_end = tl.where(covers, seqlen_q // BLOCK_M * BLOCK_M, full_end)
    full_end = tl.maximum(full_end, full_start)
    tiles_before = (full_start - tiles_start) // BLOCK_M
    tiles_after = tl.cdiv(tl.maximum(end - full_end, 0), BLOCK_M)
    window = Window(left, right, prefix_end)
    members = group
    if HOW.key_padding != ABSENT:
        members = tl.where(tl.max(unpadded.to(tl.int32), 0) > 0, group, 0)
    seed = tl.load(dropout_seed) if HOW.dropout else 0
    counter = tl.load(dropout_offset) if HOW.dropout else 0

    total_key = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    total_value = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # One loop over heads and tiles together: what a nested one keeps in registers for its next round does not fit.
    for TEST_ROWS in tl.static_range(2):
        tiles = tiles_before + tiles_after if TEST_ROWS else (full_end - full_start) // BLOCK_M
        for step in tl.range(0, members * tiles, num_stages=1 if TEST_ROWS else None):
            head = key_head * group + step // tiles
            tile = step % tiles
            start_m = full_start + tile * BLOCK_M
            if TEST_ROWS:
                after = full_end + (tile - tiles_before) * BLOCK_M
                start_m = tl.where(tile < tiles_before, tiles_start + tile * BLOCK_M, after)
            head64 = tl.cast(head, tl.int64)
            head_query = query + offset_of_head(batch64, query_stride_b, head64, query_stride_h, HOW.alignment)
            head_grad = grad_output + offset_of_head(batch64, grad_stride_b, head64, grad_stride_h, HOW.alignment)
            head_mask = attn_mask
            if HOW.mask != ABSENT:
                head_mask += offset_of_head(batch64, mask_stride_b, head64, mask_stride_h, HOW.mask_alignment)
            head_bias = bias
            if HOW.bias != ABSENT:
                head_bias += offset_of_head(batch64, bias_stride_b, head64, bias_stride_h, HOW.bias_alignment)
            slope = tl.load(alibi_slopes + batch64 * alibi_stride_b + head) if HOW.alibi else 0.0
            head_distances = distance_bias
            if HOW.distance_bias:
                head_distances += head64 * (2 * reach + 1)
            statistics_start = (batch64 * heads + head) * seqlen_q
            if HOW.varlen:
                statistics_start = head64 * rows_in_all + start_q
            total_key, total_value = _queries_step(
                total_key,
                total_value,
                key_tile,
                value_tile,
                Rows(head_query, query_stride_m, query_stride_d),
                Rows(head_grad, grad_stride_m, grad_stride_d),
                delta,
                shift,
                log2_sum,
                statistics_start,
                tl.multiple_of(start_m, BLOCK_M),
                start_n,
                exists,
                seqlen_q,
                offset,
                window,
                head_mask,
                head_bias,
                mask_stride_m,
                mask_stride_n,
                bias_stride_m,
                bias_stride_n,
                Scores(score_scale, softcap, slope, head_distances, reach),
                Dropout(seed, counter, batch * heads + head, dropout_threshold),
                keep_scale,
                BLOCK_M,
                BLOCK_N,
                TEST_ROWS,
                HOW,
            )

    total_key = tl.where(unpadded[:, None], total_key * scale, 0.0)
    total_value = tl.where(unpadded[:, None], total_value, 0.0)
    columns_value = tl.arange(0, BLOCK_DV)
    if HOW.hidden_rows_mean:
        # One row of hidden_grads per program of the query kernel; those of one key head are neighbours.
        hidden_rows = group * blocks_m_of_query
        hidden_start = (batch64 * heads + key_head * group) * blocks_m_of_query
        chunk = tl.arange(0, _HIDDEN_CHUNK)
        hidden_grad = tl.zeros([BLOCK_DV], tl.float32)
        for start in tl.range(0, hidden_rows, _HIDDEN_CHUNK, num_stages=1):
            rows = hidden_start + start + chunk  # [_HIDDEN_CHUNK]
            part = tl.load(
                hidden_grads + rows[:, None] * HOW.value_dim + columns_value[None, :],
                mask=(start + chunk < hidden_rows)[:, None] & (columns_value < HOW.value_dim)[None, :],
                other=0.0,
            )
            hidden_grad += tl.sum(part, 0)
        total_value += (hidden_grad / seqlen_k)[None, :]

    # Contiguous as [batch, seqlen_k, key_heads, dim].
    places = (row_start + keys)[:, None] * key_heads + key_head
    columns = tl.arange(0, BLOCK_D)
    tl.store(
        grad_key + places * HOW.head_dim + columns[None, :],
        to_storage(total_key, grad_key.dtype.element_ty),
        mask=exists[:, None] & (columns < HOW.head_dim)[None, :],
    )
    tl.store(
        grad_value + places * HOW.value_dim + columns_value[None, :],
        to_storage(total_value, grad_value.dtype.element_ty),
        mask=exists[:, None] & (columns_value < HOW.value_dim)[None, :],
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def kernl_attention_backward_mask(
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
    cu_seqlens_q,
    cu_seqlens_k,
    dropout_seed,
    dropout_offset,
    grad_output,
    delta,
    shift,
    log2_sum,
    grad_bias,
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
    grad_stride_b,
    grad_stride_h,
    grad_stride_m,
    grad_stride_d,
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
    batch,
    heads,
    bias_batch,
    bias_heads,
    group,
    seqlen_q,
    seqlen_k,
    max_seqlen_q,
    max_seqlen_k,
    right,
    left,
    reach,
    dropout_threshold,
    scale,
    score_scale,
    softcap,
    keep_scale,
    SUM_QUERIES: tl.constexpr,
    SUM_KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HOW: tl.constexpr,
):
    wait_for_previous_kernel(HOW.use_pdl)
    let_next_kernel_start(HOW.use_pdl)

    # The program's tile of the bias, and how many tiles of scores are added up in it along each dimension.
    blocks_m = 1 if SUM_QUERIES else tl.cdiv(max_seqlen_q, BLOCK_M)
    blocks_n = 1 if SUM_KEYS else tl.cdiv(max_seqlen_k, BLOCK_N)
    summed_m = tl.cdiv(max_seqlen_q, BLOCK_M) if SUM_QUERIES else 1
    summed_n = tl.cdiv(max_seqlen_k, BLOCK_N) if SUM_KEYS else 1
    summed_heads = heads // bias_heads
    summed = batch // bias_batch * summed_heads * summed_m * summed_n
    rows_in_all = seqlen_q
    program = tl.program_id(0)
    block_n = program % blocks_n
    block_m = program // blocks_n % blocks_m
    bias_batch_head = program // blocks_n // blocks_m
    first_batch = bias_batch_head // bias_heads
    first_head = bias_batch_head % bias_heads
    if HOW.top_left:
        right = 0
    seed = tl.load(dropout_seed) if HOW.dropout else 0
    counter = tl.load(dropout_offset) if HOW.dropout else 0

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, summed, num_stages=1):
        start_n = (block_n + step % summed_n) * BLOCK_N
        rest = step // summed_n
        start_m = (block_m + rest % summed_m) * BLOCK_M
        rest = rest // summed_m
        head = first_head + rest % summed_heads
        row = first_batch + rest // summed_heads
        batch64 = tl.cast(row, tl.int64)
        head64 = tl.cast(head, tl.int64)
        key_head64 = tl.cast(head // group, tl.int64)
        length_q = seqlen_q
        length_k = seqlen_k
        start_q = 0
        start_k = 0
        if HOW.varlen:
            start_q, length_q = _sequence(cu_seqlens_q, row)
            start_k, length_k = _sequence(cu_seqlens_k, row)
        offset = _offset_of_queries(q_offset, row, offset_stride_b, HOW)
        may_see = (start_m < length_q) & (start_n < length_k)
        if HOW.has_right and not HOW.has_prefix:
            may_see = may_see & (start_n < start_m + BLOCK_M + offset + right)
        if may_see:
            head_query = query + offset_of_head(batch64, query_stride_b, head64, query_stride_h, HOW.alignment)
            head_key = key + offset_of_head(batch64, key_stride_b, key_head64, key_stride_h, HOW.alignment)
            head_value = value + offset_of_head(batch64, value_stride_b, key_head64, value_stride_h, HOW.alignment)
            head_grad = grad_output + offset_of_head(batch64, grad_stride_b, head64, grad_stride_h, HOW.alignment)
            head_mask = attn_mask
            if HOW.mask != ABSENT:
                head_mask += offset_of_head(batch64, mask_stride_b, head64, mask_stride_h, HOW.mask_alignment)
            head_bias = bias + offset_of_head(batch64, bias_stride_b, head64, bias_stride_h, HOW.bias_alignment)
            slope = tl.load(alibi_slopes + batch64 * alibi_stride_b + head) if HOW.alibi else 0.0
            head_distances = distance_bias
            if HOW.distance_bias:
                head_distances += head64 * (2 * reach + 1)
            statistics_start = (batch64 * heads + head) * seqlen_q
            if HOW.varlen:
                statistics_start = head64 * rows_in_all + start_q

            offsets_m = tl.arange(0, BLOCK_M)
            offsets_n = tl.arange(0, BLOCK_N)
            query_rows = start_m + offsets_m  # [BLOCK_M]
            keys = start_n + offsets_n  # [BLOCK_N]
            row_is_valid = query_rows < length_q
            exists = keys < length_k
            unpadded = exists
            if HOW.key_padding == LENGTHS:
                unpadded = unpadded & (keys < tl.load(key_padding + batch64 * padding_stride_b))
            elif HOW.key_padding == BOOL:
                padding = Padding(key_padding + batch64 * padding_stride_b, padding_stride_n)
                unpadded = unpadded_keys(padding, keys, exists)
            if HOW.wide_offsets:
                offsets_m = offsets_m.to(tl.int64)
                offsets_n = offsets_n.to(tl.int64)
            query_tile = load_rows(
                Rows(head_query, query_stride_m, query_stride_d),
                start_q + start_m,
                offsets_m,
                row_is_valid,
                HOW.head_dim,
                HOW.block_d,
                True,
                HOW.alignment,
            )  # [BLOCK_M, BLOCK_D]
            key_tile = load_rows(
                Rows(head_key, key_stride_n, key_stride_d),
                start_k + start_n,
                offsets_n,
                unpadded,
                HOW.head_dim,
                HOW.block_d,
                True,
                HOW.alignment,
            )  # [BLOCK_N, BLOCK_D]
            products = tl.dot(query_tile, tl.trans(key_tile), input_precision=HOW.input_precision)
            rows64 = statistics_start + query_rows
            row_delta, row_shift, row_log2_sum = _load_row_statistics(delta, shift, log2_sum, rows64, row_is_valid, HOW)
            mask_rows = tl.minimum(query_rows, length_q - 1)[:, None]
            scores, _ = masked_scores(
                products,
                (query_rows + offset)[:, None],
                start_n,
                keys[None, :],
                offsets_n[None, :],
                exists[None, :],
                unpadded[None, :],
                Window(left, right, tl.load(prefix + row).to(tl.int32) if HOW.has_prefix else 0),
                Mask(head_mask, rows_of_mask(mask_rows, mask_stride_m, HOW.mask_alignment), mask_stride_n),
                Mask(head_bias, rows_of_mask(mask_rows, bias_stride_m, HOW.bias_alignment), bias_stride_n),
                Scores(score_scale, softcap, slope, head_distances, reach),
                True,
                True,
                HOW,
            )  # [BLOCK_M, BLOCK_N]
            probabilities = tl.exp2((scores - row_shift[:, None]) * LOG2E - row_log2_sum[:, None])
            grad_tile = load_rows(
                Rows(head_grad, grad_stride_m, grad_stride_d),
                start_q + start_m,
                offsets_m,
                row_is_valid,
                HOW.value_dim,
                HOW.block_dv,
                True,
                HOW.alignment,
            )  # [BLOCK_M, BLOCK_DV]
            value_tile = load_rows(
                Rows(head_value, value_stride_n, value_stride_d),
                start_k + start_n,
                offsets_n,
                unpadded,
                HOW.value_dim,
                HOW.block_dv,
                True,
                HOW.alignment,
            )  # [BLOCK_N, BLOCK_DV]
            grad_probabilities = tl.dot(grad_tile, tl.trans(value_tile), input_precision=HOW.input_precision)
            if HOW.dropout:
                dropout = Dropout(seed, counter, row * heads + head, dropout_threshold)
                kept = is_kept(dropout, query_rows, start_n, BLOCK_M, BLOCK_N)
                grad_probabilities = tl.where(kept, grad_probabilities * keep_scale, 0.0)
            grad_scores = probabilities * (grad_probabilities - row_delta[:, None])
            if HOW.bias_before_scale:
                grad_scores = grad_scores * scale
            total += grad_scores

    # Contiguous as [bias_batch, bias_heads, seqlen_q or 1, seqlen_k or 1].
    rows = (block_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (block_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    rows_end = max_seqlen_q
    columns_end = max_seqlen_k
    if SUM_QUERIES:
        total = tl.sum(total, 0, keep_dims=True)
        rows = tl.zeros([1, 1], tl.int32)
        rows_end = 1
    if SUM_KEYS:
        total = tl.sum(total, 1, keep_dims=True)
        columns = tl.zeros([1, 1], tl.int32)
        columns_end = 1
    places = (tl.cast(bias_batch_head, tl.int64) * rows_end + rows) * columns_end + columns
    tl.store(
        grad_bias + places,
        to_storage(total, grad_bias.dtype.element_ty),
        mask=(rows < rows_end) & (columns < columns_end),
    )


@dataclass(frozen=True)
class BackwardConfiguration:
    """How one backward pass is cut up: each kernel has a tiling of its own.

    mask: None where no attn_mask is taken.
    """

    query: Configuration
    key: Configuration
    mask: Configuration | None = None

    @property
    def name(self) -> str:
        """Readable, and unique as one tiling of the mask kernel goes with each width: "q-m64n64w4s2-k-m32n64w4s2"."""
        return f"q-{self.query.name}-k-{self.key.name}"


def _backward_tilings(*rows: tuple[str, str], mask: str | None = None) -> tuple[BackwardConfiguration, ...]:
    """Configurations from pairs of rows for the query and the key kernel, each "queries keys warps stages"."""
    mask_tiling = None if mask is None else tilings(mask)[0]
    return tuple(BackwardConfiguration(tilings(query)[0], tilings(key)[0], mask_tiling) for query, key in rows)


# By the padded head dimension (the larger of the two); each without spills on Triton 3.6 and 3.9 both, in the shared
# memory of the chips it is for. Not measured yet: what comes first has the largest tiles that fit.
_HOPPER = {
    64: _backward_tilings(("64 64 4 2", "64 128 8 2"), ("128 64 8 2", "32 64 4 2")),
    128: _backward_tilings(("128 32 8 2", "32 64 8 2"), ("64 32 4 2", "32 32 4 1")),
    256: _backward_tilings(("32 32 8 1", "16 32 8 1")),
}
_BLACKWELL = {
    64: _backward_tilings(("128 64 8 2", "64 128 8 2"), ("128 64 8 2", "32 64 4 2")),
    128: _backward_tilings(("64 32 8 2", "32 64 8 2")),
    256: _backward_tilings(("32 32 8 1", "16 32 8 1")),
}
_AMPERE = {
    64: _backward_tilings(("64 32 4 2", "32 64 4 2"), ("64 32 4 2", "32 128 8 2")),
    128: _backward_tilings(("64 32 8 2", "32 64 8 2"), ("64 32 8 1", "32 32 8 1")),
    256: _backward_tilings(("32 32 8 1", "16 32 8 1")),
}
# An attn_mask takes registers: where its rows are not aligned, a pointer and a value for each of its elements; and a
# float one may need the sum of P. None fits beside wide heads.
_HOPPER_MASK = {
    64: _backward_tilings(("64 64 8 2", "32 64 4 2"), ("64 64 8 2", "32 128 8 2"), mask="64 64 8 1"),
    128: _backward_tilings(("64 32 8 2", "32 64 8 2"), mask="64 64 8 1"),
    256: (),
}
_BLACKWELL_MASK = {
    64: _backward_tilings(("128 64 8 2", "32 128 8 2"), ("64 64 4 2", "32 64 4 2"), mask="64 64 8 1"),
    128: _backward_tilings(("64 32 8 2", "32 64 8 2"), mask="64 32 8 1"),
    256: (),
}
_AMPERE_MASK = {
    64: _backward_tilings(("64 32 8 2", "32 128 8 2"), ("64 32 8 2", "32 64 8 1"), mask="64 32 8 1"),
    128: _backward_tilings(("32 32 8 1", "16 32 8 1"), ("32 32 8 1", "32 32 8 1"), mask="32 32 8 1"),
    256: (),
}
# So does what depends on positions, and dropout.
_POSITIONS = {
    64: _backward_tilings(("64 32 8 2", "32 32 8 1"), mask="64 32 8 1"),
    128: _backward_tilings(("32 32 8 1", "32 32 8 1"), mask="32 32 8 1"),
    256: (),
}
_TF32 = {
    64: _backward_tilings(("32 32 8 1", "32 32 8 1"), mask="32 16 4 1"),
    128: _backward_tilings(("16 16 8 1", "16 32 8 1"), mask="16 16 8 1"),
    256: (),
}
# Without tensor cores the operands of a product are held in registers.
_IEEE = {
    64: _backward_tilings(("16 16 8 1", "16 16 8 1"), mask="16 16 8 1"),
    128: (),
    256: (),
}
# Cost in the interpreter is per operation, not per element.
_INTERPRETED = _backward_tilings(("64 64 4 1", "64 64 4 1"), mask="64 64 4 1")


def backward_configurations(
    arch: int,
    dtype: torch.dtype,
    head_dim: int,
    value_dim: int,
    *,
    input_precision: str,
    has_mask: bool,
    by_position: bool = False,
) -> tuple[BackwardConfiguration, ...]:
    """The tilings worth trying on sm_`arch`; none where nothing fits.

    input_precision: "tf32" or "ieee", for float32. has_mask: whether there is an attn_mask or a bias.
    by_position: with anything besides masks, padding and causality from the top left.
    """
    if arch == 0:
        return _INTERPRETED
    width = max(block_of(head_dim), block_of(value_dim), 64)
    if dtype == torch.float32:
        return (_IEEE if input_precision == "ieee" else _TF32)[width]
    if by_position:
        return _POSITIONS[width]
    if arch // 10 == 9:
        return (_HOPPER_MASK if has_mask else _HOPPER)[width]
    if arch >= 100:
        return (_BLACKWELL_MASK if has_mask else _BLACKWELL)[width]
    return (_AMPERE_MASK if has_mask else _AMPERE)[width]


def attention_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    results: tuple[torch.Tensor, torch.Tensor],
    grads: tuple[torch.Tensor, torch.Tensor | None],
    scratch: tuple[torch.Tensor, torch.Tensor | None],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    *,
    configuration: BackwardConfiguration,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill the gradients.

    query, key, value, scoring as `attention_forward` takes them, the scale of any sign.
    results: output and logsumexp as it left them.
    grads: of the output, of any strides; of the logsumexp, float32 [batch, heads, seqlen_q], contiguous, or None.
    scratch: float32 [3, batch, heads, seqlen_q], contiguous: what the kernels tell each other; and, where hidden rows
        are means, float32 [batch, heads, ceil(seqlen_q / configuration.query.block_m), value_dim], contiguous. With
        packed lengths that is [sequences, heads, ceil(max_seqlen_q / ...), value_dim].
    gradients: of query, key and value, contiguous as [batch, seqlen, heads, dim]; of a float bias, [batch or 1, heads
        or 1, seqlen_q or 1, seqlen_k or 1], contiguous, or None.
    """
    output, logsumexp = results
    grad_output, grad_logsumexp = grads
    statistics, hidden_grads = scratch
    grad_query, grad_key, grad_value, grad_bias = gradients
    arguments = scoring_arguments(
        query, key, value, scoring, grad_output, output, input_precision=input_precision, use_pdl=use_pdl
    )
    variant = arguments["HOW"]
    assert isinstance(variant, Variant)
    if scoring.scale <= 0 and not variant.natural:
        # Scores of hidden keys are -inf before they are scaled.
        variant = dataclasses.replace(variant, natural=True)
        arguments["score_scale"] = scoring.scale
    batch, heads = scoring.batch_of(query), query.shape[1]
    key_heads = key.shape[1]
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    if scoring.packed is not None:
        seqlen_q, seqlen_k = scoring.packed.max_seqlen_q, scoring.packed.max_seqlen_k
    delta, shift, log2_sum = statistics.unbind(0)
    blocks_m = triton.cdiv(seqlen_q, configuration.query.block_m)
    arguments |= {
        **strides_by_name("grad", grad_output, "bhmd"),
        **strides_by_name("output", output, "bhmd"),
        "grad_output": grad_output,
        "output": output,
        "logsumexp": logsumexp,
        "grad_logsumexp": grad_logsumexp,
        "delta": delta,
        "shift": shift,
        "log2_sum": log2_sum if variant.natural else None,
        "hidden_grads": hidden_grads,
        "grad_query": grad_query,
        "grad_key": grad_key,
        "grad_value": grad_value,
        "grad_bias": grad_bias,
        "blocks_m_of_query": blocks_m,
        "max_seqlen_k": seqlen_k,
        "batch": batch,
        "SCAN_PADDING": scoring.kind_of_padding == "bool" and seqlen_k > 2 * configuration.query.block_n,
        "HOW": variant,
    }
    count_launch("attention_backward")
    _launch(kernl_attention_backward_query, blocks_m * batch * heads, arguments, configuration.query, use_pdl)
    blocks_n = triton.cdiv(seqlen_k, configuration.key.block_n)
    _launch(kernl_attention_backward_key, blocks_n * batch * key_heads, arguments, configuration.key, use_pdl)
    if grad_bias is None:
        return
    assert configuration.mask is not None
    bias_batch, bias_heads, bias_rows, bias_columns = grad_bias.shape
    blocks_m = 1 if bias_rows == 1 else triton.cdiv(seqlen_q, configuration.mask.block_m)
    blocks_n = 1 if bias_columns == 1 else triton.cdiv(seqlen_k, configuration.mask.block_n)
    arguments |= {"bias_batch": bias_batch, "bias_heads": bias_heads}
    arguments |= {"SUM_QUERIES": bias_rows == 1, "SUM_KEYS": bias_columns == 1}
    programs = blocks_n * blocks_m * bias_batch * bias_heads
    _launch(kernl_attention_backward_mask, programs, arguments, configuration.mask, use_pdl)


def _launch(kernel: Any, programs: int, arguments: dict[str, object], tiling: Configuration, use_pdl: bool) -> None:
    arguments = {**arguments, "BLOCK_M": tiling.block_m, "BLOCK_N": tiling.block_n}
    kernel[(programs,)](
        **of_kernel(kernel, arguments),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **tiling.options,
        **({"launch_pdl": True} if use_pdl else {}),
    )


def aot_case(
    name: str,
    arch: int,
    kernel: Any,
    tiling: Configuration,
    dtype: torch.dtype,
    head_dim: int,
    **features: Any,
) -> AotCase:
    """The compilation that `attention_backward` triggers; features as `case_of` takes them."""
    element, bias = TRITON_TYPES[dtype], features.get("bias")
    is_natural = bias is not None or features.get("positional", False)
    types = dict.fromkeys(("grad_output", "output", "grad_query", "grad_key", "grad_value"), f"*{element}")
    types |= dict.fromkeys(("logsumexp", "grad_logsumexp", "delta", "shift"), "*fp32")
    values: dict[str, object] = {"SUM_QUERIES": False, "SUM_KEYS": False}
    for argument, kind in (
        ("log2_sum", "*fp32" if is_natural else None),
        ("hidden_grads", "*fp32" if features.get("hidden_rows") == "mean" else None),
        ("grad_bias", None if bias is None else f"*{TRITON_TYPES[bias]}"),
    ):
        if kind is None:
            values[argument] = None
        else:
            types[argument] = kind
    return case_of(name, arch, kernel, tiling, dtype, head_dim, types, values, **features)


def aot_cases(arch: int) -> Iterator[AotCase]:
    """The tilings on offer for sm_`arch`, with all that a kernel can be asked for at once: with and without a mask."""
    if arch < 80:
        return
    padded: dict[str, Any] = {"key_padding": torch.bool, "is_causal": True, "hidden_rows": "mean", "group": 4}
    for dtype, precision in ((torch.float16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")):
        kind = {torch.float16: "fp16", torch.float32: f"fp32-{precision}"}[dtype]
        features: dict[str, dict[str, Any]] = {"bias": {"bias": dtype, **padded}}
        if dtype == torch.float16:  # float32 has the same tilings either way
            features["padded"] = padded
        for head_dim, (feature, arguments) in itertools.product((64, 128, 256), features.items()):
            has_mask = feature == "bias"
            offered = backward_configurations(
                arch, dtype, head_dim, head_dim, input_precision=precision, has_mask=has_mask
            )
            kernels: list[tuple[str, Any, Configuration]] = []
            for configuration in offered:
                kernels.append(("query", kernl_attention_backward_query, configuration.query))
                kernels.append(("key", kernl_attention_backward_key, configuration.key))
                if has_mask and configuration.mask is not None:
                    kernels.append(("mask", kernl_attention_backward_mask, configuration.mask))
            for part, kernel, tiling in dict.fromkeys(kernels):
                name = f"{part}-{kind}-D{head_dim}-{feature}-{tiling.name}"
                options = {**arguments, "input_precision": precision}
                yield aot_case(name, arch, kernel, tiling, dtype, head_dim, **options)
    besides: dict[str, dict[str, Any]] = {
        "positional": {"positional": True, "key_padding": torch.bool, "hidden_rows": "mean", "group": 4},
        "packed": {"packed": True, "dropout": True, "is_causal": True, "prefix": True, "group": 4},
    }
    for width, (feature, arguments) in itertools.product((64, 128), besides.items()):
        both = _POSITIONS[width][0]
        for part, kernel, one in (
            ("query", kernl_attention_backward_query, both.query),
            ("key", kernl_attention_backward_key, both.key),
        ):
            yield aot_case(f"{part}-fp16-D{width}-{feature}", arch, kernel, one, torch.float16, width, **arguments)
