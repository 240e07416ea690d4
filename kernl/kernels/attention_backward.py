"""Attention, backward: the gradients of query, key, value and a float attn_mask, in two or three passes.

With s_ij, lse_i and out_i as in `kernl.kernels.attention`, the keys j in N(i) visible to query i, dO and dlse the
gradients of the two outputs:

    P_ij    = exp(s_ij - lse_i)          for j in N(i), else 0
    delta_i = <dO_i, out_i> - dlse_i
    dS_ij   = P_ij (<dO_i, v_j> - delta_i)
    dQ_i    = scale sum_j dS_ij k_j      dK_j = scale sum_i dS_ij q_i      dV_j = sum_i P_ij dO_i      dbias_ij = dS_ij

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
    query: the keys that can be visible at all, as in the forward pass. key: from the diagonal on when causal, and none
    where all keys of the program are padding. The loops over tiles that need no test and over those that do are apart,
    as in the forward pass. The key kernel tests no padding: what it sums for a padded key stays in that key's row,
    which is set to zero in the end.

Corners
    Keys and values at padded positions are read as zero: NaN there cannot leak.
    A query that sees no key has P = 0. Under HIDDEN_ROWS_MEAN its gradient goes to all values in equal parts: the query
    kernel leaves the sum of dO over such rows of each program in memory, and the key kernel adds what belongs to it.
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

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernl.kernels.attention import (
    ABSENT,
    BOOL,
    FLOAT,
    LENGTHS,
    LOG2E,
    LOWEST,
    Configuration,
    _load_rows,
    _mask_kind,
    _padding_kind,
    _strides,
    _tilings,
    _visible_range,
    alignment_of,
    block_of,
)
from kernl.kernels.common import (
    TRITON_TYPES,
    AotCase,
    count_launch,
    let_next_kernel_start,
    to_compute,
    to_storage,
    wait_for_previous_kernel,
)

# Above this |logsumexp| float32 has less than 2^-16 left for the logarithm of the sum.
_LARGE_LOGSUMEXP = tl.constexpr(256.0)
_HIDDEN_CHUNK = tl.constexpr(16)


@triton.jit
def _probabilities(
    products,  # <q_i, k_j>: [queries, keys], or [keys, queries]
    query_rows,  # positions of the queries, with a dimension of size 1 for the keys
    offsets_n,  # the keys, counted from start_n, with a dimension of size 1 for the queries, like the next two
    exists,
    visible_keys,
    shift,  # like query_rows: what to subtract from the scores, see kernl_attention_backward_query
    log2_sum,
    attn_mask,  # at (batch, head, 0, 0)
    mask_stride_m,
    mask_stride_n,
    start_n,
    seqlen_q,
    score_scale,
    ATTN_MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    MASK_ALIGNMENT: tl.constexpr,
    TEST_CAUSAL: tl.constexpr,
    TEST_KEYS: tl.constexpr,
):
    """P, in the layout of `products`. Without TEST_KEYS all keys count as existing and visible."""
    visible = visible_keys
    if TEST_CAUSAL:
        visible = visible & (start_n + offsets_n <= query_rows)
    if ATTN_MASK != ABSENT:
        mask_pointers = attn_mask + tl.cast(start_n, tl.int64) * mask_stride_n + offsets_n * mask_stride_n
        if MASK_PER_QUERY:
            # Rows past the last query read the last one's mask: the load needs no test.
            mask_rows = tl.minimum(query_rows, seqlen_q - 1).to(tl.int64) * mask_stride_m
            if MASK_ALIGNMENT > 1:
                mask_rows = tl.multiple_of(mask_rows, [MASK_ALIGNMENT, MASK_ALIGNMENT])
            mask_pointers = mask_pointers + mask_rows
        mask_tile = tl.load(mask_pointers, mask=exists, other=0) if TEST_KEYS else tl.load(mask_pointers)
    if ATTN_MASK == FLOAT:
        scores = products * score_scale + to_compute(mask_tile).to(tl.float32)
        exponents = (scores - shift) * LOG2E - log2_sum
    else:
        exponents = products * score_scale - shift
        if ATTN_MASK == BOOL:
            visible = visible & (mask_tile != 0)
    if TEST_CAUSAL or TEST_KEYS or ATTN_MASK == BOOL:
        exponents = tl.where(visible, exponents, float("-inf"))
    return tl.exp2(exponents)


@triton.jit
def _unpadded_keys(
    key_padding,
    padding_stride_n,
    keys,  # [BLOCK_N] positions
    seqlen_k,
    KEY_PADDING: tl.constexpr,
):
    """Which keys exist and are not padding: [BLOCK_N] bool."""
    unpadded = keys < seqlen_k
    if KEY_PADDING == LENGTHS:
        unpadded = unpadded & (keys < tl.load(key_padding))
    elif KEY_PADDING == BOOL:
        unpadded = tl.load(key_padding + keys.to(tl.int64) * padding_stride_n, mask=unpadded, other=0) != 0
    return unpadded


@triton.jit
def _load_row_statistics(
    delta,
    shift,
    log2_sum,
    rows64,  # [BLOCK_M] batch, head and query in one number
    row_is_valid,
    ATTN_MASK: tl.constexpr,
):
    """delta, shift and log2_sum of some queries, each [BLOCK_M]; those past the end get P = 0."""
    row_delta = tl.load(delta + rows64, mask=row_is_valid, other=0.0)
    if ATTN_MASK == FLOAT:
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
    key,
    value,
    attn_mask,
    key_padding,
    key_stride_n,
    key_stride_d,
    value_stride_n,
    value_stride_d,
    mask_stride_m,
    mask_stride_n,
    padding_stride_n,
    start_n,
    first,
    end,
    query_rows,  # [BLOCK_M] positions of the queries
    seqlen_q,
    score_scale,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ATTN_MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    MASK_ALIGNMENT: tl.constexpr,
    KEY_PADDING: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TEST_KEYS: tl.constexpr,
    SUM_ONLY: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add what the keys [start_n, start_n + BLOCK_N) give to dQ, or (SUM_ONLY) to the sum of P.

    TEST_KEYS is false for a tile all of whose keys are in range, unpadded and not above the diagonal.
    """
    offsets = tl.arange(0, BLOCK_N)
    keys = start_n + offsets  # [BLOCK_N]
    exists = keys < end
    unpadded = exists & (keys >= first)
    if TEST_KEYS and KEY_PADDING == BOOL:
        unpadded = tl.load(key_padding + keys.to(tl.int64) * padding_stride_n, mask=unpadded, other=0) != 0
    if WIDE_OFFSETS:
        offsets = offsets.to(tl.int64)
    start = tl.cast(start_n, tl.int64)
    key_offset = start * key_stride_n
    value_offset = start * value_stride_n
    if ALIGNMENT > 1:
        key_offset = tl.multiple_of(key_offset, ALIGNMENT)
        value_offset = tl.multiple_of(value_offset, ALIGNMENT)
    # Padded keys are zero, as padded values are: their zero in dS would not hide a NaN from the product with K.
    key_tile = _load_rows(
        key + key_offset,
        offsets,
        unpadded,
        key_stride_n,
        key_stride_d,
        HEAD_DIM,
        BLOCK_D,
        TEST_KEYS,
        ALIGNMENT,
    )  # [BLOCK_N, BLOCK_D]
    products = tl.dot(query_tile, tl.trans(key_tile), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
    probabilities = _probabilities(
        products,
        query_rows[:, None],
        offsets[None, :],
        exists[None, :],
        unpadded[None, :],
        row_shift[:, None],
        row_log2_sum[:, None],
        attn_mask,
        mask_stride_m,
        mask_stride_n,
        start_n,
        seqlen_q,
        score_scale,
        ATTN_MASK,
        MASK_PER_QUERY,
        MASK_ALIGNMENT,
        IS_CAUSAL and TEST_KEYS,
        TEST_KEYS,
    )
    if SUM_ONLY:
        total += tl.sum(probabilities, 1)
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
        )  # [BLOCK_N, BLOCK_DV]
        grad_probabilities = tl.dot(grad_tile, tl.trans(value_tile), input_precision=INPUT_PRECISION)
        grad_scores = probabilities * (grad_probabilities - row_delta[:, None])  # [BLOCK_M, BLOCK_N]
        total = tl.dot(grad_scores.to(key_tile.dtype), key_tile, total, input_precision=INPUT_PRECISION)
    return total


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
        "grad_stride_b",
        "grad_stride_h",
        "output_stride_b",
        "output_stride_h",
        "mask_stride_b",
        "mask_stride_h",
        "mask_stride_m",
        "padding_stride_b",
    ]
)
def kernl_attention_backward_query(
    query,
    key,
    value,
    attn_mask,
    key_padding,
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
    padding_stride_b,
    padding_stride_n,
    heads,
    group,
    seqlen_q,
    seqlen_k,
    scale,
    score_scale,
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
    IS_CAUSAL: tl.constexpr,
    HIDDEN_ROWS_MEAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)

    blocks_m = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    block_m = program % blocks_m
    if IS_CAUSAL:
        block_m = blocks_m - 1 - block_m  # longest first
    batch_head = program // blocks_m
    batch = batch_head // heads
    head = batch_head % heads
    start_m = block_m * BLOCK_M
    batch64 = batch.to(tl.int64)
    head64 = head.to(tl.int64)
    key_head64 = (head // group).to(tl.int64)
    start_m64 = start_m.to(tl.int64)

    query_offset = batch64 * query_stride_b + head64 * query_stride_h + start_m64 * query_stride_m
    key_offset = batch64 * key_stride_b + key_head64 * key_stride_h
    value_offset = batch64 * value_stride_b + key_head64 * value_stride_h
    grad_offset = batch64 * grad_stride_b + head64 * grad_stride_h + start_m64 * grad_stride_m
    output_offset = batch64 * output_stride_b + head64 * output_stride_h + start_m64 * output_stride_m
    if ALIGNMENT > 1:
        query_offset = tl.multiple_of(query_offset, ALIGNMENT)
        key_offset = tl.multiple_of(key_offset, ALIGNMENT)
        value_offset = tl.multiple_of(value_offset, ALIGNMENT)
        grad_offset = tl.multiple_of(grad_offset, ALIGNMENT)
        output_offset = tl.multiple_of(output_offset, ALIGNMENT)
    key += key_offset
    value += value_offset
    if ATTN_MASK != ABSENT:
        mask_offset = batch64 * mask_stride_b + head64 * mask_stride_h
        if MASK_ALIGNMENT > 1:
            mask_offset = tl.multiple_of(mask_offset, MASK_ALIGNMENT)
        attn_mask += mask_offset
    if KEY_PADDING != ABSENT:
        key_padding += batch64 * padding_stride_b

    offsets_m = tl.arange(0, BLOCK_M)
    query_rows = start_m + offsets_m  # [BLOCK_M]
    row_is_valid = query_rows < seqlen_q
    rows64 = batch_head.to(tl.int64) * seqlen_q + query_rows
    if WIDE_OFFSETS:
        offsets_m = offsets_m.to(tl.int64)

    # What is known per query: delta_i, and the subtrahend of its scores.
    grad_tile = _load_rows(
        grad_output + grad_offset,
        offsets_m,
        row_is_valid,
        grad_stride_m,
        grad_stride_d,
        VALUE_DIM,
        BLOCK_DV,
        True,
        ALIGNMENT,
    )  # [BLOCK_M, BLOCK_DV]
    output_tile = _load_rows(
        output + output_offset,
        offsets_m,
        row_is_valid,
        output_stride_m,
        output_stride_d,
        VALUE_DIM,
        BLOCK_DV,
        True,
        ALIGNMENT,
    )  # [BLOCK_M, BLOCK_DV]
    row_delta = tl.sum(grad_tile.to(tl.float32) * output_tile.to(tl.float32), 1)
    if grad_logsumexp is not None:
        row_delta -= tl.load(grad_logsumexp + rows64, mask=row_is_valid, other=0.0)
    row_logsumexp = tl.load(logsumexp + rows64, mask=row_is_valid, other=0.0)
    query_tile = _load_rows(
        query + query_offset,
        offsets_m,
        row_is_valid,
        query_stride_m,
        query_stride_d,
        HEAD_DIM,
        BLOCK_D,
        True,
        ALIGNMENT,
    )  # [BLOCK_M, BLOCK_D]

    # [first, end): keys some query of this program may see. [full_start, full_end): tiles where all see all keys.
    first, end, gapless = _visible_range(key_padding, padding_stride_n, seqlen_k, KEY_PADDING, SCAN_PADDING)
    full_end = end // BLOCK_N * BLOCK_N
    if IS_CAUSAL:
        end = tl.minimum(end, tl.minimum(start_m + BLOCK_M, seqlen_q))
        full_end = tl.minimum(full_end, (start_m + 1) // BLOCK_N * BLOCK_N)
    tiles_start = first // BLOCK_N * BLOCK_N
    full_start = tl.minimum(tl.cdiv(first, BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
    full_end = tl.maximum(full_end, full_start)
    if KEY_PADDING == BOOL:
        full_start = tl.where(gapless, full_start, tiles_start)
        full_end = tl.where(gapless, full_end, tiles_start)
    tiles_before = tl.maximum(full_start - tiles_start, 0) // BLOCK_N
    tiles_after = tl.cdiv(tl.maximum(end - full_end, 0), BLOCK_N)

    # With a float mask P = exp2((s - shift) log2(e) - log2_sum), in natural units as in the forward pass; without one
    # P = exp2(s log2(e) - shift). Either way P = 0 in a hidden row.
    if ATTN_MASK == FLOAT:
        is_hidden = row_logsumexp == float("-inf")
        row_shift = tl.where(is_hidden, 0.0, row_logsumexp)
        row_log2_sum = tl.zeros([BLOCK_M], tl.float32)
        is_large = tl.abs(row_shift) > _LARGE_LOGSUMEXP
        if tl.max(is_large.to(tl.int32), 0) > 0:
            row_sum = tl.zeros([BLOCK_M], tl.float32)
            for start_n in tl.range(tiles_start, end, BLOCK_N, num_stages=1):
                row_sum = _keys_step(
                    row_sum,
                    query_tile,
                    grad_tile,
                    row_delta,
                    row_shift,
                    row_log2_sum,
                    key,
                    value,
                    attn_mask,
                    key_padding,
                    key_stride_n,
                    key_stride_d,
                    value_stride_n,
                    value_stride_d,
                    mask_stride_m,
                    mask_stride_n,
                    padding_stride_n,
                    tl.multiple_of(start_n, BLOCK_N),
                    first,
                    end,
                    query_rows,
                    seqlen_q,
                    score_scale,
                    BLOCK_N,
                    HEAD_DIM,
                    VALUE_DIM,
                    BLOCK_D,
                    BLOCK_DV,
                    ATTN_MASK,
                    MASK_PER_QUERY,
                    MASK_ALIGNMENT,
                    KEY_PADDING,
                    IS_CAUSAL,
                    True,
                    True,
                    ALIGNMENT,
                    WIDE_OFFSETS,
                    INPUT_PRECISION,
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
    if HIDDEN_ROWS_MEAN:
        # [batch, heads, blocks_m, VALUE_DIM], contiguous
        hidden_grad = tl.sum(tl.where((is_hidden & row_is_valid)[:, None], grad_tile.to(tl.float32), 0.0), 0)
        columns = tl.arange(0, BLOCK_DV)
        block64 = batch_head.to(tl.int64) * blocks_m + block_m
        tl.store(hidden_grads + block64 * VALUE_DIM + columns, hidden_grad, mask=columns < VALUE_DIM)

    result = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for TEST_KEYS in tl.static_range(2):
        tiles = tiles_before + tiles_after if TEST_KEYS else (full_end - full_start) // BLOCK_N
        for tile in tl.range(0, tiles, num_stages=1 if TEST_KEYS else None):
            start_n = full_start + tile * BLOCK_N
            if TEST_KEYS:
                after = full_end + (tile - tiles_before) * BLOCK_N
                start_n = tl.where(tile < tiles_before, tiles_start + tile * BLOCK_N, after)
            result = _keys_step(
                result,
                query_tile,
                grad_tile,
                row_delta,
                row_shift,
                row_log2_sum,
                key,
                value,
                attn_mask,
                key_padding,
                key_stride_n,
                key_stride_d,
                value_stride_n,
                value_stride_d,
                mask_stride_m,
                mask_stride_n,
                padding_stride_n,
                tl.multiple_of(start_n, BLOCK_N),
                first,
                end,
                query_rows,
                seqlen_q,
                score_scale,
                BLOCK_N,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_D,
                BLOCK_DV,
                ATTN_MASK,
                MASK_PER_QUERY,
                MASK_ALIGNMENT,
                KEY_PADDING,
                IS_CAUSAL,
                TEST_KEYS,
                False,
                ALIGNMENT,
                WIDE_OFFSETS,
                INPUT_PRECISION,
            )

    # Contiguous as [batch, seqlen_q, heads, HEAD_DIM].
    columns = tl.arange(0, BLOCK_D)
    places = (batch64 * seqlen_q + query_rows)[:, None] * heads + head
    tl.store(
        grad_query + places * HEAD_DIM + columns[None, :],
        to_storage(result * scale, grad_query.dtype.element_ty),
        mask=row_is_valid[:, None] & (columns < HEAD_DIM)[None, :],
    )


@triton.jit
def _queries_step(
    total_key,  # [BLOCK_N, BLOCK_D] float32: dK / scale
    total_value,  # [BLOCK_N, BLOCK_DV] float32: dV
    key_tile,  # [BLOCK_N, BLOCK_D]
    value_tile,  # [BLOCK_N, BLOCK_DV]
    query,  # at (batch, head, start_m, 0), as the next
    grad_output,
    attn_mask,  # at (batch, head, 0, 0)
    delta,
    shift,
    log2_sum,
    query_stride_m,
    query_stride_d,
    grad_stride_m,
    grad_stride_d,
    mask_stride_m,
    mask_stride_n,
    rows_start,  # number of the head's first row in delta, shift and log2_sum
    start_m,
    start_n,
    exists,  # [BLOCK_N]
    seqlen_q,
    score_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ATTN_MASK: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    MASK_ALIGNMENT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """Add what the queries [start_m, start_m + BLOCK_M) of one head give to dK and dV. The tiles are transposed.

    TEST_ROWS is false for a tile all of whose queries exist and are not before any key of the program when causal.
    """
    offsets_m = tl.arange(0, BLOCK_M)
    offsets_n = tl.arange(0, BLOCK_N)
    query_rows = start_m + offsets_m  # [BLOCK_M]
    row_is_valid = query_rows < seqlen_q
    rows64 = rows_start + query_rows
    if WIDE_OFFSETS:
        offsets_m = offsets_m.to(tl.int64)
        offsets_n = offsets_n.to(tl.int64)
    query_tile = _load_rows(
        query,
        offsets_m,
        row_is_valid,
        query_stride_m,
        query_stride_d,
        HEAD_DIM,
        BLOCK_D,
        TEST_ROWS,
        ALIGNMENT,
    )  # [BLOCK_M, BLOCK_D]
    row_delta, row_shift, row_log2_sum = _load_row_statistics(delta, shift, log2_sum, rows64, row_is_valid, ATTN_MASK)
    products = tl.dot(key_tile, tl.trans(query_tile), input_precision=INPUT_PRECISION)  # [BLOCK_N, BLOCK_M]
    probabilities = _probabilities(
        products,
        query_rows[None, :],
        offsets_n[:, None],
        exists[:, None],
        exists[:, None],
        row_shift[None, :],
        row_log2_sum[None, :],
        attn_mask,
        mask_stride_m,
        mask_stride_n,
        start_n,
        seqlen_q,
        score_scale,
        ATTN_MASK,
        MASK_PER_QUERY,
        MASK_ALIGNMENT,
        IS_CAUSAL and TEST_ROWS,
        ATTN_MASK != ABSENT,  # keys need a test where a mask is read for them; else their rows are dropped in the end
    )
    grad_tile = _load_rows(
        grad_output,
        offsets_m,
        row_is_valid,
        grad_stride_m,
        grad_stride_d,
        VALUE_DIM,
        BLOCK_DV,
        TEST_ROWS,
        ALIGNMENT,
    )  # [BLOCK_M, BLOCK_DV]
    total_value = tl.dot(probabilities.to(grad_tile.dtype), grad_tile, total_value, input_precision=INPUT_PRECISION)
    grad_probabilities = tl.dot(value_tile, tl.trans(grad_tile), input_precision=INPUT_PRECISION)
    grad_scores = probabilities * (grad_probabilities - row_delta[None, :])  # [BLOCK_N, BLOCK_M]
    total_key = tl.dot(grad_scores.to(query_tile.dtype), query_tile, total_key, input_precision=INPUT_PRECISION)
    return total_key, total_value


@triton.jit(
    do_not_specialize=[
        "heads",
        "blocks_m_of_query",
        "seqlen_q",
        "seqlen_k",
        "query_stride_b",
        "query_stride_h",
        "key_stride_b",
        "key_stride_h",
        "value_stride_b",
        "value_stride_h",
        "grad_stride_b",
        "grad_stride_h",
        "mask_stride_b",
        "mask_stride_h",
        "mask_stride_m",
        "padding_stride_b",
    ]
)
def kernl_attention_backward_key(
    query,
    key,
    value,
    attn_mask,
    key_padding,
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
    padding_stride_b,
    padding_stride_n,
    heads,
    group,
    blocks_m_of_query,
    seqlen_q,
    seqlen_k,
    scale,
    score_scale,
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
    IS_CAUSAL: tl.constexpr,
    HIDDEN_ROWS_MEAN: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)

    blocks_n = tl.cdiv(seqlen_k, BLOCK_N)
    key_heads = heads // group
    program = tl.program_id(0)
    block_n = program % blocks_n
    batch = program // blocks_n // key_heads
    key_head = program // blocks_n % key_heads
    start_n = block_n * BLOCK_N
    batch64 = batch.to(tl.int64)
    key_head64 = key_head.to(tl.int64)
    start_n64 = start_n.to(tl.int64)

    key_offset = batch64 * key_stride_b + key_head64 * key_stride_h + start_n64 * key_stride_n
    value_offset = batch64 * value_stride_b + key_head64 * value_stride_h + start_n64 * value_stride_n
    if ALIGNMENT > 1:
        key_offset = tl.multiple_of(key_offset, ALIGNMENT)
        value_offset = tl.multiple_of(value_offset, ALIGNMENT)
    if KEY_PADDING != ABSENT:
        key_padding += batch64 * padding_stride_b

    offsets_n = tl.arange(0, BLOCK_N)
    keys = start_n + offsets_n  # [BLOCK_N]
    exists = keys < seqlen_k
    unpadded = _unpadded_keys(key_padding, padding_stride_n, keys, seqlen_k, KEY_PADDING)
    if WIDE_OFFSETS:
        offsets_n = offsets_n.to(tl.int64)
    key_tile = _load_rows(
        key + key_offset, offsets_n, unpadded, key_stride_n, key_stride_d, HEAD_DIM, BLOCK_D, True, ALIGNMENT
    )  # [BLOCK_N, BLOCK_D]
    value_tile = _load_rows(
        value + value_offset, offsets_n, unpadded, value_stride_n, value_stride_d, VALUE_DIM, BLOCK_DV, True, ALIGNMENT
    )  # [BLOCK_N, BLOCK_DV]

    # [tiles_start, seqlen_q): queries that may see some key of this program. [full_start, full_end): tiles of queries
    # that all exist and see all of its keys.
    tiles_start = 0
    full_start = 0
    full_end = seqlen_q // BLOCK_M * BLOCK_M
    if IS_CAUSAL:
        rows_end = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
        tiles_start = tl.minimum(start_n // BLOCK_M * BLOCK_M, rows_end)
        full_start = tl.minimum(tl.cdiv(start_n + BLOCK_N - 1, BLOCK_M) * BLOCK_M, rows_end)
        full_end = tl.maximum(full_end, full_start)
    tiles_before = (full_start - tiles_start) // BLOCK_M
    tiles_after = tl.cdiv(tl.maximum(seqlen_q - full_end, 0), BLOCK_M)
    members = group
    if KEY_PADDING != ABSENT:
        members = tl.where(tl.max(unpadded.to(tl.int32), 0) > 0, group, 0)

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
            start_m64 = tl.cast(start_m, tl.int64)
            query_offset = batch64 * query_stride_b + head64 * query_stride_h + start_m64 * query_stride_m
            grad_offset = batch64 * grad_stride_b + head64 * grad_stride_h + start_m64 * grad_stride_m
            if ALIGNMENT > 1:
                query_offset = tl.multiple_of(query_offset, ALIGNMENT)
                grad_offset = tl.multiple_of(grad_offset, ALIGNMENT)
            head_mask = attn_mask
            if ATTN_MASK != ABSENT:
                mask_offset = batch64 * mask_stride_b + head64 * mask_stride_h
                if MASK_ALIGNMENT > 1:
                    mask_offset = tl.multiple_of(mask_offset, MASK_ALIGNMENT)
                head_mask = attn_mask + mask_offset
            total_key, total_value = _queries_step(
                total_key,
                total_value,
                key_tile,
                value_tile,
                query + query_offset,
                grad_output + grad_offset,
                head_mask,
                delta,
                shift,
                log2_sum,
                query_stride_m,
                query_stride_d,
                grad_stride_m,
                grad_stride_d,
                mask_stride_m,
                mask_stride_n,
                (batch64 * heads + head) * seqlen_q,
                tl.multiple_of(start_m, BLOCK_M),
                start_n,
                exists,
                seqlen_q,
                score_scale,
                BLOCK_M,
                BLOCK_N,
                HEAD_DIM,
                VALUE_DIM,
                BLOCK_D,
                BLOCK_DV,
                ATTN_MASK,
                MASK_PER_QUERY,
                MASK_ALIGNMENT,
                IS_CAUSAL,
                TEST_ROWS,
                ALIGNMENT,
                WIDE_OFFSETS,
                INPUT_PRECISION,
            )

    total_key = tl.where(unpadded[:, None], total_key * scale, 0.0)
    total_value = tl.where(unpadded[:, None], total_value, 0.0)
    columns_value = tl.arange(0, BLOCK_DV)
    if HIDDEN_ROWS_MEAN:
        # One row of hidden_grads per program of the query kernel; those of one key head are neighbours.
        hidden_rows = group * blocks_m_of_query
        hidden_start = (batch64 * heads + key_head * group) * blocks_m_of_query
        chunk = tl.arange(0, _HIDDEN_CHUNK)
        hidden_grad = tl.zeros([BLOCK_DV], tl.float32)
        for start in tl.range(0, hidden_rows, _HIDDEN_CHUNK, num_stages=1):
            rows = hidden_start + start + chunk  # [_HIDDEN_CHUNK]
            part = tl.load(
                hidden_grads + rows[:, None] * VALUE_DIM + columns_value[None, :],
                mask=(start + chunk < hidden_rows)[:, None] & (columns_value < VALUE_DIM)[None, :],
                other=0.0,
            )
            hidden_grad += tl.sum(part, 0)
        total_value += (hidden_grad / seqlen_k)[None, :]

    # Contiguous as [batch, seqlen_k, key_heads, dim].
    places = (batch64 * seqlen_k + keys)[:, None] * key_heads + key_head
    columns = tl.arange(0, BLOCK_D)
    tl.store(
        grad_key + places * HEAD_DIM + columns[None, :],
        to_storage(total_key, grad_key.dtype.element_ty),
        mask=exists[:, None] & (columns < HEAD_DIM)[None, :],
    )
    tl.store(
        grad_value + places * VALUE_DIM + columns_value[None, :],
        to_storage(total_value, grad_value.dtype.element_ty),
        mask=exists[:, None] & (columns_value < VALUE_DIM)[None, :],
    )


@triton.jit(
    do_not_specialize=[
        "batch",
        "heads",
        "mask_batch",
        "mask_heads",
        "seqlen_q",
        "seqlen_k",
        "query_stride_b",
        "query_stride_h",
        "key_stride_b",
        "key_stride_h",
        "value_stride_b",
        "value_stride_h",
        "grad_stride_b",
        "grad_stride_h",
        "mask_stride_b",
        "mask_stride_h",
        "mask_stride_m",
        "padding_stride_b",
    ]
)
def kernl_attention_backward_mask(
    query,
    key,
    value,
    attn_mask,
    key_padding,
    grad_output,
    delta,
    shift,
    log2_sum,
    grad_mask,
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
    padding_stride_b,
    padding_stride_n,
    batch,
    heads,
    mask_batch,
    mask_heads,
    group,
    seqlen_q,
    seqlen_k,
    score_scale,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK_PER_QUERY: tl.constexpr,
    MASK_ALIGNMENT: tl.constexpr,
    KEY_PADDING: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SUM_QUERIES: tl.constexpr,
    SUM_KEYS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)

    # The program's tile of the mask, and how many tiles of scores are added up in it along each dimension.
    blocks_m = 1 if SUM_QUERIES else tl.cdiv(seqlen_q, BLOCK_M)
    blocks_n = 1 if SUM_KEYS else tl.cdiv(seqlen_k, BLOCK_N)
    summed_m = tl.cdiv(seqlen_q, BLOCK_M) if SUM_QUERIES else 1
    summed_n = tl.cdiv(seqlen_k, BLOCK_N) if SUM_KEYS else 1
    summed_heads = heads // mask_heads
    summed = batch // mask_batch * summed_heads * summed_m * summed_n
    program = tl.program_id(0)
    block_n = program % blocks_n
    block_m = program // blocks_n % blocks_m
    mask_batch_head = program // blocks_n // blocks_m
    first_batch = mask_batch_head // mask_heads
    first_head = mask_batch_head % mask_heads

    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in tl.range(0, summed, num_stages=1):
        start_n = (block_n + step % summed_n) * BLOCK_N
        rest = step // summed_n
        start_m = (block_m + rest % summed_m) * BLOCK_M
        rest = rest // summed_m
        head = first_head + rest % summed_heads
        batch64 = tl.cast(first_batch + rest // summed_heads, tl.int64)
        head64 = tl.cast(head, tl.int64)
        key_head64 = tl.cast(head // group, tl.int64)
        start_m64 = tl.cast(start_m, tl.int64)
        start_n64 = tl.cast(start_n, tl.int64)
        if (start_n < start_m + BLOCK_M) if IS_CAUSAL else True:
            query_offset = batch64 * query_stride_b + head64 * query_stride_h + start_m64 * query_stride_m
            key_offset = batch64 * key_stride_b + key_head64 * key_stride_h + start_n64 * key_stride_n
            value_offset = batch64 * value_stride_b + key_head64 * value_stride_h + start_n64 * value_stride_n
            grad_offset = batch64 * grad_stride_b + head64 * grad_stride_h + start_m64 * grad_stride_m
            mask_offset = batch64 * mask_stride_b + head64 * mask_stride_h
            if ALIGNMENT > 1:
                query_offset = tl.multiple_of(query_offset, ALIGNMENT)
                key_offset = tl.multiple_of(key_offset, ALIGNMENT)
                value_offset = tl.multiple_of(value_offset, ALIGNMENT)
                grad_offset = tl.multiple_of(grad_offset, ALIGNMENT)
            if MASK_ALIGNMENT > 1:
                mask_offset = tl.multiple_of(mask_offset, MASK_ALIGNMENT)
            batch_padding = key_padding
            if KEY_PADDING != ABSENT:
                batch_padding = key_padding + batch64 * padding_stride_b

            offsets_m = tl.arange(0, BLOCK_M)
            offsets_n = tl.arange(0, BLOCK_N)
            query_rows = start_m + offsets_m  # [BLOCK_M]
            keys = start_n + offsets_n  # [BLOCK_N]
            row_is_valid = query_rows < seqlen_q
            exists = keys < seqlen_k
            unpadded = _unpadded_keys(batch_padding, padding_stride_n, keys, seqlen_k, KEY_PADDING)
            if WIDE_OFFSETS:
                offsets_m = offsets_m.to(tl.int64)
                offsets_n = offsets_n.to(tl.int64)
            query_tile = _load_rows(
                query + query_offset,
                offsets_m,
                row_is_valid,
                query_stride_m,
                query_stride_d,
                HEAD_DIM,
                BLOCK_D,
                True,
                ALIGNMENT,
            )  # [BLOCK_M, BLOCK_D]
            key_tile = _load_rows(
                key + key_offset, offsets_n, unpadded, key_stride_n, key_stride_d, HEAD_DIM, BLOCK_D, True, ALIGNMENT
            )  # [BLOCK_N, BLOCK_D]
            products = tl.dot(query_tile, tl.trans(key_tile), input_precision=INPUT_PRECISION)  # [BLOCK_M, BLOCK_N]
            rows64 = (batch64 * heads + head) * seqlen_q + query_rows
            row_delta, row_shift, row_log2_sum = _load_row_statistics(
                delta, shift, log2_sum, rows64, row_is_valid, FLOAT
            )
            probabilities = _probabilities(
                products,
                query_rows[:, None],
                offsets_n[None, :],
                exists[None, :],
                unpadded[None, :],
                row_shift[:, None],
                row_log2_sum[:, None],
                attn_mask + mask_offset,
                mask_stride_m,
                mask_stride_n,
                start_n,
                seqlen_q,
                score_scale,
                FLOAT,
                MASK_PER_QUERY,
                MASK_ALIGNMENT,
                IS_CAUSAL,
                True,
            )
            grad_tile = _load_rows(
                grad_output + grad_offset,
                offsets_m,
                row_is_valid,
                grad_stride_m,
                grad_stride_d,
                VALUE_DIM,
                BLOCK_DV,
                True,
                ALIGNMENT,
            )  # [BLOCK_M, BLOCK_DV]
            value_tile = _load_rows(
                value + value_offset,
                offsets_n,
                unpadded,
                value_stride_n,
                value_stride_d,
                VALUE_DIM,
                BLOCK_DV,
                True,
                ALIGNMENT,
            )  # [BLOCK_N, BLOCK_DV]
            grad_probabilities = tl.dot(grad_tile, tl.trans(value_tile), input_precision=INPUT_PRECISION)
            total += probabilities * (grad_probabilities - row_delta[:, None])

    # Contiguous as [mask_batch, mask_heads, seqlen_q or 1, seqlen_k or 1].
    rows = (block_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None]
    columns = (block_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    rows_end = seqlen_q
    columns_end = seqlen_k
    if SUM_QUERIES:
        total = tl.sum(total, 0, keep_dims=True)
        rows = tl.zeros([1, 1], tl.int32)
        rows_end = 1
    if SUM_KEYS:
        total = tl.sum(total, 1, keep_dims=True)
        columns = tl.zeros([1, 1], tl.int32)
        columns_end = 1
    places = (tl.cast(mask_batch_head, tl.int64) * rows_end + rows) * columns_end + columns
    tl.store(
        grad_mask + places,
        to_storage(total, grad_mask.dtype.element_ty),
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
    mask_tiling = None if mask is None else _tilings(mask)[0]
    return tuple(BackwardConfiguration(_tilings(query)[0], _tilings(key)[0], mask_tiling) for query, key in rows)


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
    64: _backward_tilings(("64 64 4 2", "32 64 4 2"), ("128 64 8 2", "32 128 8 2"), mask="64 64 4 1"),
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
    128: _backward_tilings(("32 32 8 1", "16 64 8 1"), ("32 32 8 1", "32 32 8 1"), mask="32 32 8 1"),
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
    arch: int, dtype: torch.dtype, head_dim: int, value_dim: int, *, input_precision: str, has_mask: bool
) -> tuple[BackwardConfiguration, ...]:
    """The tilings worth trying on sm_`arch`; none where nothing fits.

    input_precision: "tf32" or "ieee", for float32. has_mask: whether there is an attn_mask.
    """
    if arch == 0:
        return _INTERPRETED
    width = max(block_of(head_dim), block_of(value_dim), 64)
    if dtype == torch.float32:
        return (_IEEE if input_precision == "ieee" else _TF32)[width]
    if arch // 10 == 9:
        return (_HOPPER_MASK if has_mask else _HOPPER)[width]
    if arch >= 100:
        return (_BLACKWELL_MASK if has_mask else _BLACKWELL)[width]
    return (_AMPERE_MASK if has_mask else _AMPERE)[width]


def attention_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    grad_output: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    row_statistics: torch.Tensor,
    hidden_grads: torch.Tensor | None,
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    grad_mask: torch.Tensor | None,
    *,
    scale: float,
    is_causal: bool,
    configuration: BackwardConfiguration,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill the gradients.

    query, key, value, attn_mask, key_padding, scale as `attention_forward` takes them, scale of any sign; output and
    logsumexp as it left them. grad_output as output, of any strides; logsumexp and grad_logsumexp float32 [batch,
    heads, seqlen_q], contiguous.
    row_statistics: float32 [3, batch, heads, seqlen_q], contiguous: what the kernels tell each other.
    hidden_grads: float32 [batch, heads, ceil(seqlen_q / configuration.query.block_m), value_dim], contiguous, where
        hidden rows are means; else None.
    grad_query, grad_key, grad_value: contiguous as [batch, seqlen, heads, dim].
    grad_mask: of a float attn_mask, [batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1], contiguous; else None.
    """
    batch, heads, seqlen_q, head_dim = query.shape
    key_heads, seqlen_k, value_dim = key.shape[1], key.shape[2], value.shape[3]
    mask_strides = [0] * 4 if attn_mask is None else _strides(attn_mask)
    padding_strides = [0, 0] if key_padding is None else [*_strides(key_padding), 0][:2]
    inputs = [stride for tensor in (query, key, value, grad_output) for stride in _strides(tensor)]
    output_strides = _strides(output)
    kind = _mask_kind(attn_mask)
    score_scale = scale if kind == FLOAT.value else scale * LOG2E.value
    delta, shift, log2_sum = row_statistics.unbind(0)
    statistics = (delta, shift, log2_sum if kind == FLOAT.value else None)
    common: dict[str, Any] = {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_D": block_of(head_dim),
        "BLOCK_DV": block_of(value_dim),
        "MASK_PER_QUERY": mask_strides[2] != 0,
        "MASK_ALIGNMENT": 1 if attn_mask is None else alignment_of(attn_mask),
        "KEY_PADDING": _padding_kind(key_padding),
        "IS_CAUSAL": is_causal,
        "ALIGNMENT": alignment_of(query, key, value, grad_output, output),
        "WIDE_OFFSETS": max(*inputs, *output_strides, *mask_strides) >= 2**23,
        "INPUT_PRECISION": input_precision,
        "USE_PDL": use_pdl,
        **({"launch_pdl": True} if use_pdl else {}),
    }
    blocks_m = triton.cdiv(seqlen_q, configuration.query.block_m)
    count_launch("attention_backward")
    kernl_attention_backward_query[(blocks_m * batch * heads,)](
        query,
        key,
        value,
        attn_mask,
        key_padding,
        grad_output,
        output,
        logsumexp,
        grad_logsumexp,
        *statistics,
        hidden_grads,
        grad_query,
        *inputs,
        *output_strides,
        *mask_strides,
        *padding_strides,
        heads,
        heads // key_heads,
        seqlen_q,
        seqlen_k,
        scale,
        score_scale,
        ATTN_MASK=kind,
        SCAN_PADDING=_padding_kind(key_padding) == BOOL.value and seqlen_k > 2 * configuration.query.block_n,
        HIDDEN_ROWS_MEAN=hidden_grads is not None,
        **common,
        **_tile_options(configuration.query),
    )
    kernl_attention_backward_key[(triton.cdiv(seqlen_k, configuration.key.block_n) * batch * key_heads,)](
        query,
        key,
        value,
        attn_mask,
        key_padding,
        grad_output,
        *statistics,
        hidden_grads,
        grad_key,
        grad_value,
        *inputs,
        *mask_strides,
        *padding_strides,
        heads,
        heads // key_heads,
        blocks_m,
        seqlen_q,
        seqlen_k,
        scale,
        score_scale,
        ATTN_MASK=kind,
        HIDDEN_ROWS_MEAN=hidden_grads is not None,
        **common,
        **_tile_options(configuration.key),
    )
    if grad_mask is None:
        return
    assert configuration.mask is not None
    mask_batch, mask_heads, mask_rows, mask_columns = grad_mask.shape
    blocks_m = 1 if mask_rows == 1 else triton.cdiv(seqlen_q, configuration.mask.block_m)
    blocks_n = 1 if mask_columns == 1 else triton.cdiv(seqlen_k, configuration.mask.block_n)
    kernl_attention_backward_mask[(blocks_n * blocks_m * mask_batch * mask_heads,)](
        query,
        key,
        value,
        attn_mask,
        key_padding,
        grad_output,
        *statistics,
        grad_mask,
        *inputs,
        *mask_strides,
        *padding_strides,
        batch,
        heads,
        mask_batch,
        mask_heads,
        heads // key_heads,
        seqlen_q,
        seqlen_k,
        score_scale,
        SUM_QUERIES=mask_rows == 1,
        SUM_KEYS=mask_columns == 1,
        **common,
        **_tile_options(configuration.mask),
    )


def _tile_options(tiling: Configuration) -> dict[str, int]:
    return {
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        **tiling.options,
    }


def aot_case(
    name: str,
    arch: int,
    kernel: Any,
    tiling: Configuration,
    dtype: torch.dtype,
    head_dim: int,
    *,
    attn_mask: torch.dtype | None = None,
    mask_alignment: int = 1,
    key_padding: torch.dtype | None = None,
    is_causal: bool = False,
    hidden_rows: str = "zero",
    group: int = 1,
    input_precision: str = "ieee",
) -> AotCase:
    """The compilation that `attention_backward` triggers for operands contiguous as [batch, seqlen, heads, dim]."""
    element = TRITON_TYPES[dtype]
    unit = 16 // dtype.itemsize
    kind = ABSENT.value if attn_mask is None else BOOL.value if attn_mask == torch.bool else FLOAT.value
    padding = ABSENT.value if key_padding is None else BOOL.value if key_padding == torch.bool else LENGTHS.value
    values: dict[str, object] = {
        **dict.fromkeys(("query_stride_d", "key_stride_d", "value_stride_d", "grad_stride_d", "output_stride_d"), 1),
        **dict.fromkeys(("mask_stride_n", "padding_stride_n"), 1),
        "HEAD_DIM": head_dim,
        "VALUE_DIM": head_dim,
        "BLOCK_D": block_of(head_dim),
        "BLOCK_DV": block_of(head_dim),
        "BLOCK_M": tiling.block_m,
        "BLOCK_N": tiling.block_n,
        "ATTN_MASK": kind,
        "MASK_PER_QUERY": attn_mask is not None,
        "MASK_ALIGNMENT": mask_alignment,
        "KEY_PADDING": padding,
        "SCAN_PADDING": padding == BOOL.value,
        "IS_CAUSAL": is_causal,
        "HIDDEN_ROWS_MEAN": hidden_rows == "mean",
        "SUM_QUERIES": False,
        "SUM_KEYS": False,
        "ALIGNMENT": unit if head_dim % unit == 0 else 1,
        "WIDE_OFFSETS": False,
        "INPUT_PRECISION": input_precision,
        "USE_PDL": arch >= 90,
    }
    if group == 1:
        values["group"] = 1
    types = dict.fromkeys(("query", "key", "value", "grad_output", "output"), f"*{element}")
    types |= dict.fromkeys(("grad_query", "grad_key", "grad_value"), f"*{element}")
    types |= dict.fromkeys(("logsumexp", "grad_logsumexp", "delta", "shift"), "*fp32")
    types |= {"scale": "fp32", "score_scale": "fp32"}
    optional = {
        "attn_mask": None if attn_mask is None else f"*{TRITON_TYPES[attn_mask]}",
        "grad_mask": None if attn_mask is None else f"*{TRITON_TYPES[attn_mask]}",
        "key_padding": None if key_padding is None else f"*{TRITON_TYPES[key_padding]}",
        "log2_sum": "*fp32" if kind == FLOAT.value else None,
        "hidden_grads": "*fp32" if hidden_rows == "mean" else None,
    }
    types |= {argument: pointer for argument, pointer in optional.items() if pointer is not None}
    values |= {argument: None for argument, pointer in optional.items() if pointer is None}
    names = kernel.arg_names
    # Sixteen is a common divisor of heads * dim in most models; the kernels do not need it.
    divisible = ("query_stride_m", "key_stride_n", "value_stride_n", "grad_stride_m", "output_stride_m")
    return AotCase(
        name=name,
        kernel=kernel,
        signature={argument: types.get(argument, "i32") for argument in names if argument not in values},
        constexprs={argument: values[argument] for argument in names if argument in values},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        divisible_by_16=tuple(argument for argument in divisible if argument in names),
        options={**tiling.options, **({"launch_pdl": True} if arch >= 90 else {})},
    )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """The tilings on offer for sm_`arch`, with all that a kernel can be asked for at once: with and without a mask."""
    if arch < 80:
        return
    padded: dict[str, Any] = {"key_padding": torch.bool, "is_causal": True, "hidden_rows": "mean", "group": 4}
    for dtype, precision in ((torch.float16, "ieee"), (torch.float32, "tf32"), (torch.float32, "ieee")):
        kind = {torch.float16: "fp16", torch.float32: f"fp32-{precision}"}[dtype]
        features: dict[str, dict[str, Any]] = {"bias": {"attn_mask": dtype, **padded}}
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
