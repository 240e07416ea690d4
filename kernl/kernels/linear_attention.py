"""Linear attention, forward: a feature map in place of softmax, one running state in place of the scores.

For one batch row and one head, with phi(q_i), phi(k_j) [E], v_j [M] and the visible keys j in N(i):

    S_i   = S_0 + sum_{j in N(i)} phi(k_j) v_j^T        [E, M]        z_i = z_0 + sum_{j in N(i)} phi(k_j)        [E]
    out_i = S_i^T phi(q_i)                       or, normalised,      out_i = S_i^T phi(q_i) / den_i
    den_i = <phi(q_i), z_i> + epsilon

Causal: N(i) = {j <= i}; else all keys. phi is elu(x) + 1, relu(x) or x, applied to a tile after its load: it is never
written to memory, and neither are scores nor a state per position. S_0 and z_0 continue an earlier part of the
sequence. Katharopoulos et al., "Transformers are RNNs" (2020, arXiv:2006.16236); the chunked form is that of Hua et
al., "Transformer Quality in Linear Time" (2022, arXiv:2202.10447), section 3.2.

Two kernels
    state    (one program per head, segment of the keys and block of value columns) sums phi(k) v^T over its segment and
             leaves that partial state in memory.
    forward  (one program per head, segment of the queries and block of value columns) adds up the partial states that
             come before its segment, in their order, then walks the segment CHUNK positions at a time. Causal:

                 A    = phi(Q) phi(K)^T, zero above the diagonal                          [CHUNK, CHUNK]
                 num  = phi(Q) S + A V          den = phi(Q) z + sum(A) + epsilon
                 S   += phi(K)^T V              z  += sum(phi(K))

             Not causal: S and z are final from the start, and keys and values are not read again.

Two schedules, which differ in the number of segments alone
    sequential   one segment: causal, the forward kernel alone, one program per head and block of columns walks the
                 whole sequence. Everything is read once. Needs about as many heads x blocks as multiprocessors.
    chunkwise    several segments, so that few heads fill the GPU too; keys and values are read twice (the second time
                 from L2 where they fit), and the partial states come on top.
    `estimated_us` is the rule that chooses. No atomics: sums have one owner and a fixed order, so that every run gives
    the same bits.

Bytes and flops, for B heads in all (batch x heads), N positions and elements of s bytes
    bytes   B N (2 E + 2 M) s            q, k, v in and out out: the floor
            B N (E + M) s                keys and values once more: chunkwise, causal
            B segments 4 E M             the partial states, written once and read (segments - 1) / 2 times on average
                                         from L2. A segment is at least SHORTEST_SEGMENT_SHARE times as large as its
                                         state in bytes, so that states stay below an eighth of the floor.
    flops   2 B N (2 E M + CHUNK (E + M)) causal; 4 B N E M otherwise: at E = M = CHUNK = 64 in 16 bits 32 flops a byte,
            a fifth of what an H200 can do per byte.
    Expected on an H200 (4.27 TB/s), B4 H8 N4096 D64 fp16, causal, chunkwise with 8 segments: floor 67 MB, 16 us; with
    K and V again 101 MB, of which a third can come from L2; two launches. 60 % of the floor's rate (27 us) if the loads
    are hidden. B8 H16 N2048 D64 sequential: floor 134 MB, 31 us; 32 dependent steps of about 1.2 us: 38 us, 80 %.

Layout
    In registers a state is transposed, [value columns, E]: its update V^T phi(K) then takes V as it was loaded and
    phi(K) as the scores took it; a product with phi(K)^T would need a transposed copy of what came out of registers.

Precision
    States, scores, sums and the division are float32. Products run on tensor cores with operands of the input's type:
    phi(q), phi(k), A and S are rounded to it, once each. For float16, whose range is small, A (by row) and S (as a
    whole) are divided by a power of two before and multiplied by it after: nothing overflows or loses digits before
    the result itself does. float32 operands keep their digits but for TF32, where PyTorch's setting allows it.

Corners
    Keys and values past key_lengths (or past the last key) are not read: NaN there cannot leak. Their phi is zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from kernl.kernels.common import (
    _INTERPRET,
    TRITON_TYPES,
    AotCase,
    add_product,
    block_of,
    count_launch,
    let_next_kernel_start,
    to_compute,
    to_storage,
    wait_for_previous_kernel,
)

MAX_DIM = 256
"""Widest E and M the kernels take."""

# Feature maps.
IDENTITY = tl.constexpr(0)
ELU = tl.constexpr(1)
RELU = tl.constexpr(2)
ELU_RECOMPUTED = tl.constexpr(3)  # see `_exp`
FEATURE_MAPS = {"identity": IDENTITY.value, "elu": ELU.value, "relu": RELU.value}

_LOG2E = tl.constexpr(1.4426950216293335)  # float32; with the rest, log2(e) to 48 bits
_LOG2E_REST = tl.constexpr(1.92596299e-08)
_LN2 = tl.constexpr(0.6931471805599453)
# Exponents of float32 between which powers of two are taken: their reciprocals and squares are normal numbers.
_LOWEST_EXPONENT = tl.constexpr(67 << 23)  # 2^-60
_HIGHEST_EXPONENT = tl.constexpr(187 << 23)  # 2^60


@triton.jit
def _exp(x, PURE: tl.constexpr, FULL_PRECISION: tl.constexpr):
    """exp(x) for float32; below 2^-126 it is 0, which saves three instructions per element.

    FULL_PRECISION: what the product x log2(e) loses by rounding, several units in the last place of the result, is made
    up for. Inputs of 16 bits do not need it, nor does TF32.

    Where it is PURE the compiler computes it anew for each layout that a product wants the result in, which takes
    registers. What is impure cannot be predicated, as the pipelines of sm_100's tensor cores need it.
    """
    if _INTERPRET:
        return tl.exp(x)
    else:
        exponent = x * _LOG2E
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=PURE, pack=1
        )
        if FULL_PRECISION:
            lost = tl.fma(x, _LOG2E, -exponent) + x * _LOG2E_REST
            power = tl.where(exponent > -126.0, tl.fma(power * _LN2, lost, power), power)
        return power


@triton.jit
def reciprocal(x, DTYPE: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """1 / x, rounded correctly where products are float32's, in full precision."""
    if DTYPE == tl.float32 and INPUT_PRECISION == "ieee":
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
    else:
        return 1.0 / x


@triton.jit
def feature(x, FEATURE_MAP: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """phi(x). Of queries it needs no mask: what is not there meets zeros of phi(k), or is not stored."""
    if FEATURE_MAP == ELU or FEATURE_MAP == ELU_RECOMPUTED:
        FULL_PRECISION: tl.constexpr = x.dtype == tl.float32 and INPUT_PRECISION == "ieee"
        x = x.to(tl.float32)
        return tl.where(x > 0, x + 1.0, _exp(x, FEATURE_MAP == ELU_RECOMPUTED, FULL_PRECISION))
    elif FEATURE_MAP == RELU:
        return tl.where(x < 0, 0.0, x)  # NaN stays
    else:
        return x


@triton.jit
def key_feature(x, exists, FEATURE_MAP: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """phi(x), and 0 where nothing exists, which was loaded as 0."""
    if FEATURE_MAP == ELU or FEATURE_MAP == ELU_RECOMPUTED:
        return tl.where(exists, feature(x, FEATURE_MAP, INPUT_PRECISION), 0.0)
    else:
        return feature(x, FEATURE_MAP, INPUT_PRECISION)


@triton.jit
def feature_derivative(x, FEATURE_MAP: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """phi'(x) in float32; 0 at 0 for relu, as in PyTorch."""
    FULL_PRECISION: tl.constexpr = x.dtype == tl.float32 and INPUT_PRECISION == "ieee"
    x = x.to(tl.float32)
    if FEATURE_MAP == ELU or FEATURE_MAP == ELU_RECOMPUTED:
        return tl.where(x > 0, 1.0, _exp(x, True, FULL_PRECISION))
    elif FEATURE_MAP == RELU:
        return tl.where(x > 0, 1.0, 0.0)
    else:
        return tl.full(x.shape, 1.0, tl.float32)


@triton.jit
def as_operand(x, DTYPE: tl.constexpr):
    """x rounded to the type of a product's operands."""
    return to_compute(to_storage(x, DTYPE))


@triton.jit
def _power_of_two_of(x):
    """The largest power of two that is not above x (x >= 0, float32), and its reciprocal; within 2^-60 and 2^60."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, _LOWEST_EXPONENT), _HIGHEST_EXPONENT)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def scaled_rows(x, DTYPE: tl.constexpr):
    """x [ROWS, COLUMNS] float32 as operand * factor, factor [ROWS, 1] a power of two; 1 but for float16."""
    if DTYPE == tl.float16:
        factor, inverse = _power_of_two_of(tl.max(tl.abs(x), 1))
        return (x * inverse[:, None]).to(tl.float16), factor[:, None]
    else:
        return as_operand(x, DTYPE), 1.0


@triton.jit
def scaled_tile(x, DTYPE: tl.constexpr):
    """As `scaled_rows`, with one factor [1, 1] for all of x."""
    if DTYPE == tl.float16:
        # With two dimensions to the end: Triton 3.6 fails on sm_100 where a reduction leaves one of them.
        largest = tl.max(tl.max(tl.abs(x), 1, keep_dims=True), 0, keep_dims=True)
        factor, inverse = _power_of_two_of(largest)
        return (x * inverse).to(tl.float16), factor
    else:
        return as_operand(x, DTYPE), 1.0


@triton.jit
def sum_of_products(
    a,  # [ROWS, K]
    factor_a,  # scalar or [ROWS, 1], as factor_c; both are 1 but for float16
    b,  # [K, COLUMNS]
    c,  # [ROWS, L]
    factor_c,
    d,  # [L, COLUMNS]
    row_factor,  # [ROWS, 1] or 1.0
    DTYPE: tl.constexpr,
    SCALED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """(factor_a a b + factor_c c d) row_factor, float32. Not SCALED: row_factor is 1."""
    first = tl.dot(a, b, input_precision=INPUT_PRECISION)
    if DTYPE == tl.float16:
        second = tl.dot(c, d, input_precision=INPUT_PRECISION)
        return first * (factor_a * row_factor) + second * (factor_c * row_factor)
    else:
        result = tl.dot(c, d, first, input_precision=INPUT_PRECISION)
        return result * row_factor if SCALED else result


@triton.jit
def _existing(rows, end, columns, columns_left, TEST_ROWS: tl.constexpr, TEST_COLUMNS: tl.constexpr):
    """Which elements of a tile exist; what is not tested does."""
    if TEST_ROWS and TEST_COLUMNS:
        return (rows < end)[:, None] & (columns < columns_left)[None, :]
    elif TEST_ROWS:
        return (rows < end)[:, None]
    elif TEST_COLUMNS:
        return (columns < columns_left)[None, :]
    else:
        return (columns >= 0)[None, :]


@triton.jit
def load_tile(
    pointer,  # at the first column of the tile, in row 0
    start,
    end,
    row_stride,
    columns_left,  # columns from there to the last one
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    TEST_COLUMNS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
):
    """The rows [start, start + ROWS), and which elements exist (broadcasts). Those past an end are 0, not read.

    Without TEST_ROWS all rows are before `end`, without TEST_COLUMNS all columns exist.
    """
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    exists = _existing(start + rows, end, columns, columns_left, TEST_ROWS, TEST_COLUMNS)
    if WIDE_OFFSETS:
        rows = rows.to(tl.int64)
    pointers = pointer + tl.cast(start, tl.int64) * row_stride + (rows[:, None] * row_stride + columns[None, :])
    if TEST_ROWS or TEST_COLUMNS:
        tile = tl.load(pointers, mask=exists, other=0.0)
    else:
        tile = tl.load(pointers)
    return to_compute(tile), exists


@triton.jit
def store_tile(
    pointer,  # at the first column of the tile, in row 0
    tile,  # [ROWS, COLUMNS] float32
    start,
    end,
    row_stride,
    columns_left,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    TEST_COLUMNS: tl.constexpr,
):
    rows = start + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    places = tl.cast(start, tl.int64) * row_stride + (
        tl.arange(0, ROWS).to(tl.int64)[:, None] * row_stride + columns[None, :]
    )
    stored = to_storage(tile, pointer.dtype.element_ty)
    if TEST_ROWS or TEST_COLUMNS:
        exists = _existing(rows, end, columns, columns_left, TEST_ROWS, TEST_COLUMNS)
        tl.store(pointer + places, stored, mask=exists)
    else:
        tl.store(pointer + places, stored)


@triton.jit
def state_before(
    states,  # [segments, batch * heads, KEY_DIM, VALUE_DIM] float32, or None
    key_sums,  # [segments, batch * heads, KEY_DIM] float32, or None
    initial_state,  # [batch * heads, KEY_DIM, VALUE_DIM] float32, or None
    initial_key_sum,  # [batch * heads, KEY_DIM] float32, or None
    batch_head,
    batch_heads,
    first,
    end,
    first_e,
    first_m,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NORMALIZE: tl.constexpr,
    INITIAL_LAST: tl.constexpr,
):
    """The partial states [first, end), in this order, and the initial state: [BLOCK_M, BLOCK_E] and [BLOCK_E].

    INITIAL_LAST: it is added to their sum, not the other way round. It may be much larger, and each term added to it is
    rounded to its digits. No help where positions will be added one after the other, and it takes registers.
    """
    e = first_e + tl.arange(0, BLOCK_E)
    m = first_m + tl.arange(0, BLOCK_M)
    valid_e = e < KEY_DIM
    valid = (m < VALUE_DIM)[:, None] & valid_e[None, :]
    places = e[None, :] * VALUE_DIM + m[:, None]
    batch_head64 = tl.cast(batch_head, tl.int64)
    batch_heads64 = tl.cast(batch_heads, tl.int64)
    state = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    key_sum = tl.zeros([BLOCK_E], tl.float32)
    for part in tl.static_range(2):
        if INITIAL_LAST == (part == 1):
            if initial_state is not None:
                state += tl.load(initial_state + batch_head64 * (KEY_DIM * VALUE_DIM) + places, mask=valid, other=0.0)
            if NORMALIZE and initial_key_sum is not None:
                key_sum += tl.load(initial_key_sum + batch_head64 * KEY_DIM + e, mask=valid_e, other=0.0)
        elif states is not None:
            for segment in tl.range(first, end, num_stages=2):
                place = tl.cast(segment, tl.int64) * batch_heads64 + batch_head64
                state += tl.load(states + place * (KEY_DIM * VALUE_DIM) + places, mask=valid, other=0.0)
                if NORMALIZE:
                    key_sum += tl.load(key_sums + place * KEY_DIM + e, mask=valid_e, other=0.0)
    return state, key_sum


@triton.jit
def store_state(
    state,  # [BLOCK_M, BLOCK_E] float32
    key_sum,  # [BLOCK_E] float32
    states,  # [.., KEY_DIM, VALUE_DIM] float32
    key_sums,  # [.., KEY_DIM] float32
    place,  # int64, over the leading dimensions
    first_e,
    first_m,
    key_sum_end,  # KEY_DIM, or 0 where another program stores the key sum
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    e = first_e + tl.arange(0, BLOCK_E)
    m = first_m + tl.arange(0, BLOCK_M)
    valid = (m < VALUE_DIM)[:, None] & (e < KEY_DIM)[None, :]
    places = e[None, :] * VALUE_DIM + m[:, None]
    tl.store(states + place * (KEY_DIM * VALUE_DIM) + places, state, mask=valid)
    if NORMALIZE:
        tl.store(key_sums + place * KEY_DIM + e, key_sum, mask=e < key_sum_end)


@triton.jit
def last_key(key_lengths, batch, length_k):
    """One past the last key of a batch row that counts."""
    if key_lengths is not None:
        length_k = tl.minimum(tl.maximum(tl.load(key_lengths + batch), 0), length_k).to(tl.int32)
    return length_k


@triton.jit(do_not_specialize=["heads", "length", "segment_length", "segments", "first_segment"])
def kernl_linear_attention_state(
    key,
    value,
    key_lengths,
    denominator,
    delta,
    states,
    key_sums,
    key_stride_b,
    key_stride_h,
    key_stride_n,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    heads,
    batch_heads,
    length,
    segment_length,
    segments,
    first_segment,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    NORMALIZE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """sum phi(k) v^T and, NORMALIZE, sum phi(k) over each segment.

    WEIGHTED (the backward pass, over queries and gradients): sum phi(q) g^T / den and, instead of sum phi(q), minus
    sum phi(q) delta / den.
    """
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)
    blocks_m = tl.cdiv(VALUE_DIM, BLOCK_M)
    program = tl.program_id(0)
    first_m = program % blocks_m * BLOCK_M
    segment = program // blocks_m % segments
    batch_head = program // blocks_m // segments
    batch = batch_head // heads
    batch64 = tl.cast(batch, tl.int64)
    head64 = tl.cast(batch_head % heads, tl.int64)
    key += batch64 * key_stride_b + head64 * key_stride_h
    value += batch64 * value_stride_b + head64 * value_stride_h + first_m
    last = last_key(key_lengths, batch, length)
    first = (first_segment + segment) * segment_length
    end = tl.minimum(first + segment_length, last)
    DTYPE: tl.constexpr = value.dtype.element_ty

    state = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    key_sum = tl.zeros([BLOCK_E], tl.float32)
    for start in range(first, end, CHUNK):
        start = tl.multiple_of(start, CHUNK)
        raw, exists = load_tile(
            key, start, last, key_stride_n, KEY_DIM, CHUNK, BLOCK_E, TEST_ROWS, KEY_DIM != BLOCK_E, WIDE_OFFSETS
        )  # [CHUNK, BLOCK_E]
        values, _ = load_tile(
            value,
            start,
            last,
            value_stride_n,
            VALUE_DIM - first_m,
            CHUNK,
            BLOCK_M,
            TEST_ROWS,
            VALUE_DIM % BLOCK_M != 0,
            WIDE_OFFSETS,
        )  # [CHUNK, BLOCK_M]
        keys = key_feature(raw, exists, FEATURE_MAP, INPUT_PRECISION)
        if WEIGHTED:
            rows = start + tl.arange(0, CHUNK)
            places = tl.cast(batch_head, tl.int64) * length + rows
            weight = reciprocal(
                tl.load(denominator + places, mask=rows < last, other=float("inf")), DTYPE, INPUT_PRECISION
            )  # [CHUNK]
            row_delta = tl.load(delta + places, mask=rows < last, other=0.0)
            weighted = as_operand(keys, DTYPE).to(tl.float32) * weight[:, None]
            key_sum -= tl.sum(weighted * row_delta[:, None], 0)
            operand, factor = scaled_tile(weighted, DTYPE)
            if DTYPE == tl.float16:
                state += tl.dot(tl.trans(values), operand, input_precision=INPUT_PRECISION) * factor
            else:
                state = add_product(state, tl.trans(values), operand, INPUT_PRECISION)
        else:
            operand = as_operand(keys, DTYPE)
            state = add_product(state, tl.trans(values), operand, INPUT_PRECISION)
            if NORMALIZE:
                key_sum += tl.sum(operand.to(tl.float32), 0)
    place = tl.cast(segment, tl.int64) * batch_heads + batch_head
    store_state(
        state,
        key_sum,
        states,
        key_sums,
        place,
        0,
        first_m,
        tl.where(first_m == 0, KEY_DIM, 0),
        KEY_DIM,
        VALUE_DIM,
        BLOCK_E,
        BLOCK_M,
        NORMALIZE,
    )


@triton.jit(do_not_specialize=["heads", "length_q", "length_k", "segment_length", "segments", "key_segments"])
def kernl_linear_attention_forward(
    query,
    key,
    value,
    key_lengths,
    states,
    key_sums,
    initial_state,
    initial_key_sum,
    output,
    denominator,
    final_state,
    final_key_sum,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    key_stride_b,
    key_stride_h,
    key_stride_n,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    heads,
    batch_heads,
    length_q,
    length_k,
    segment_length,
    segments,
    key_segments,
    epsilon,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Walk the queries of one segment, see the module's text."""
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)
    blocks_m = tl.cdiv(VALUE_DIM, BLOCK_M)
    program = tl.program_id(0)
    first_m = program % blocks_m * BLOCK_M
    segment = program // blocks_m % segments
    batch_head = program // blocks_m // segments
    batch = batch_head // heads
    batch64 = tl.cast(batch, tl.int64)
    head64 = tl.cast(batch_head % heads, tl.int64)
    output_stride_n = tl.cast(heads, tl.int64) * VALUE_DIM
    query += batch64 * query_stride_b + head64 * query_stride_h
    key += batch64 * key_stride_b + head64 * key_stride_h
    value += batch64 * value_stride_b + head64 * value_stride_h + first_m
    output += batch64 * length_q * output_stride_n + head64 * VALUE_DIM + first_m
    if NORMALIZE:
        denominator += tl.cast(batch_head, tl.int64) * length_q
    last = last_key(key_lengths, batch, length_k)
    first = segment * segment_length
    end = tl.minimum(first + segment_length, length_q)
    DTYPE: tl.constexpr = value.dtype.element_ty

    state, key_sum = state_before(
        states,
        key_sums,
        initial_state,
        initial_key_sum,
        batch_head,
        batch_heads,
        0,
        segment if IS_CAUSAL else key_segments,
        0,
        first_m,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_E,
        BLOCK_M,
        NORMALIZE,
        not IS_CAUSAL,
    )
    denominator_end = tl.where(first_m == 0, length_q, 0)  # one of the programs of a head stores it
    offsets = tl.arange(0, CHUNK)
    below = offsets[:, None] >= offsets[None, :]  # [CHUNK, CHUNK] queries, keys
    if not IS_CAUSAL:
        state_operand, state_factor = scaled_tile(state, DTYPE)

    for start in range(first, end, CHUNK):
        start = tl.multiple_of(start, CHUNK)
        raw, _ = load_tile(
            query, start, length_q, query_stride_n, KEY_DIM, CHUNK, BLOCK_E, TEST_ROWS, KEY_DIM != BLOCK_E, WIDE_OFFSETS
        )  # [CHUNK, BLOCK_E]
        queries = as_operand(feature(raw, FEATURE_MAP, INPUT_PRECISION), DTYPE)
        if IS_CAUSAL:
            raw, exists = load_tile(
                key, start, last, key_stride_n, KEY_DIM, CHUNK, BLOCK_E, TEST_ROWS, KEY_DIM != BLOCK_E, WIDE_OFFSETS
            )  # [CHUNK, BLOCK_E]
            values, _ = load_tile(
                value,
                start,
                last,
                value_stride_n,
                VALUE_DIM - first_m,
                CHUNK,
                BLOCK_M,
                TEST_ROWS,
                VALUE_DIM % BLOCK_M != 0,
                WIDE_OFFSETS,
            )  # [CHUNK, BLOCK_M]
            keys = as_operand(key_feature(raw, exists, FEATURE_MAP, INPUT_PRECISION), DTYPE)
            scores = tl.dot(queries, tl.trans(keys), input_precision=INPUT_PRECISION)
            scores = tl.where(below, scores, 0.0)  # [CHUNK, CHUNK]
        inverse = 1.0
        if NORMALIZE:
            normalizer = tl.sum(queries.to(tl.float32) * key_sum[None, :], 1) + epsilon  # [CHUNK]
            if IS_CAUSAL:
                normalizer += tl.sum(scores, 1)
            tl.store(denominator + start + offsets, normalizer, mask=start + offsets < denominator_end)
            inverse = reciprocal(normalizer, DTYPE, INPUT_PRECISION)[:, None]
        if IS_CAUSAL:
            state_operand, state_factor = scaled_tile(state, DTYPE)
            score_operand, score_factor = scaled_rows(scores, DTYPE)
            result = sum_of_products(
                queries,
                state_factor,
                tl.trans(state_operand),
                score_operand,
                score_factor,
                values,
                inverse,
                DTYPE,
                NORMALIZE,
                INPUT_PRECISION,
            )  # [CHUNK, BLOCK_M]
        else:
            result = tl.dot(queries, tl.trans(state_operand), input_precision=INPUT_PRECISION)
            result = result * (state_factor * inverse)
        store_tile(
            output,
            result,
            start,
            length_q,
            output_stride_n,
            VALUE_DIM - first_m,
            CHUNK,
            BLOCK_M,
            TEST_ROWS,
            VALUE_DIM % BLOCK_M != 0,
        )
        if IS_CAUSAL:
            state = add_product(state, tl.trans(values), keys, INPUT_PRECISION)
            if NORMALIZE:
                key_sum += tl.sum(keys.to(tl.float32), 0)

    if segment == (segments - 1 if IS_CAUSAL else 0):
        store_state(
            state,
            key_sum,
            final_state,
            final_key_sum,
            tl.cast(batch_head, tl.int64),
            0,
            first_m,
            tl.where(first_m == 0, KEY_DIM, 0),
            KEY_DIM,
            VALUE_DIM,
            BLOCK_E,
            BLOCK_M,
            NORMALIZE,
        )


# How a call is cut up

SHORTEST_SEGMENT_SHARE = 8
"""A segment has at least this many times the bytes of its partial state, where the rule below chooses."""

MAX_SEGMENTS = 64
"""A program reads half of a head's partial states on average: more of them would cost more than they bring."""


@dataclass(frozen=True)
class Tiling:
    """CHUNK positions a step, columns of the state a program holds, and the launch configuration.

    recomputes_elu: see `_exp`.
    """

    chunk: int
    columns: int
    num_warps: int
    num_stages: int
    recomputes_elu: bool = False

    def feature_code(self, name: str) -> int:
        """A feature map as the kernels take it."""
        return ELU_RECOMPUTED.value if name == "elu" and self.recomputes_elu else FEATURE_MAPS[name]

    @property
    def name(self) -> str:
        return f"c{self.chunk}m{self.columns}w{self.num_warps}s{self.num_stages}"


@dataclass(frozen=True)
class Plan:
    """One way to compute a call: tilings of both kernels, and into how many segments queries and keys are cut.

    Causal: both into the same. key_segments counts the partial states that are made: causal, the last segment needs
    none.
    """

    forward: Tiling
    state: Tiling
    segments: int
    key_segments: int

    @property
    def name(self) -> str:
        return f"{self.forward.name}x{self.segments}"

    @property
    def chunk(self) -> int:
        """What segments are multiples of."""
        return max(self.forward.chunk, self.state.chunk)


def segment_length(length: int, segments: int, chunk: int) -> int:
    """Positions of each segment but the last: a multiple of the chunk."""
    return max(1, triton.cdiv(triton.cdiv(length, chunk), segments)) * chunk


def segments_of(length: int, segments: int, chunk: int) -> int:
    """How many segments of that length there really are, at least 1."""
    return max(1, triton.cdiv(length, segment_length(length, segments, chunk)))


def strides_of(tensor: torch.Tensor) -> list[int]:
    """Of batch, heads and positions; 0 where a dimension has one element: it must not cause another compilation."""
    return [stride if size > 1 else 0 for size, stride in zip(tensor.shape[:3], tensor.stride())]


# By the padded E (at least 64): "positions a step, value columns, warps, stages". What comes first holds the most
# columns of the state; those after it make more programs of few heads. Each compiles without spills on Triton 3.6 and
# 3.9 both, in the shared memory of the chips it is for.
def _tilings(*rows: str) -> tuple[Tiling, ...]:
    return tuple(tiling_of(row) for row in rows)


def tiling_of(row: str) -> Tiling:
    """From "positions columns warps stages", and "recompute" at the end."""
    chunk, columns, num_warps, num_stages = (int(word) for word in row.removesuffix("recompute").split())
    return Tiling(chunk, columns, num_warps, num_stages, row.endswith("recompute"))


_HOPPER = {
    64: _tilings("64 64 8 3", "64 32 8 3", "32 64 4 3"),
    128: _tilings("32 64 8 2", "16 64 8 2"),
    256: _tilings("16 32 8 1"),
}
_BLACKWELL = {
    64: _tilings("64 64 8 3 recompute", "64 32 8 3 recompute", "32 64 4 3"),
    128: _tilings("64 64 8 2 recompute", "32 64 8 2"),
    256: _tilings("16 32 8 1"),
}
_AMPERE = {
    64: _tilings("32 64 4 3", "32 32 4 3"),
    128: _tilings("32 64 8 2", "16 64 8 2"),
    256: _tilings("16 32 8 1"),
}
_TF32 = {
    64: _tilings("32 32 8 1"),
    128: _tilings("16 32 8 1"),
    256: _tilings("16 16 8 2"),
}
_TF32_BLACKWELL = {**_TF32, 256: _tilings("16 16 8 1")}
# Without tensor cores the operands of a product are held in registers: small tiles, and none fits for wide heads.
_IEEE = {
    64: _tilings("16 32 8 1"),
    128: _tilings("16 16 8 1"),
    256: (),
}
_STATE = {
    64: Tiling(64, 64, 4, 3),
    128: Tiling(64, 64, 8, 2),
    256: Tiling(16, 32, 8, 2),
}
_STATE_BLACKWELL = {**_STATE, 64: tiling_of("64 64 8 3 recompute"), 128: tiling_of("32 64 8 2 recompute")}
_STATE_TF32 = {64: Tiling(32, 32, 8, 1), 128: Tiling(32, 32, 8, 1), 256: Tiling(16, 16, 8, 1)}
_STATE_IEEE = {64: Tiling(16, 32, 8, 1), 128: Tiling(16, 16, 8, 1)}
# Cost in the interpreter is per operation, not per element.
_INTERPRETED = Tiling(64, 64, 4, 1)


def tilings(
    arch: int, dtype: torch.dtype, key_dim: int, value_dim: int, *, input_precision: str
) -> tuple[tuple[Tiling, ...], Tiling | None]:
    """Those of the forward kernel worth trying on sm_`arch`, and the state kernel's; none where nothing fits.

    input_precision: "tf32" or "ieee", for float32.
    """
    width = max(block_of(key_dim), 64)
    offered: tuple[Tiling, ...]
    state: Tiling | None
    if arch == 0:
        offered, state = (_INTERPRETED,), _INTERPRETED
    elif dtype == torch.float32 and input_precision == "ieee":
        offered, state = _IEEE[width], _STATE_IEEE.get(width)
    elif dtype == torch.float32:
        offered, state = (_TF32_BLACKWELL if arch >= 100 else _TF32)[width], _STATE_TF32[width]
    else:
        table = _HOPPER if arch // 10 == 9 else _BLACKWELL if arch >= 100 else _AMPERE
        offered, state = table[width], (_STATE_BLACKWELL if arch >= 100 else _STATE)[width]
    if not offered or state is None:
        return (), None
    return tuple(dict.fromkeys(_narrowed(tiling, value_dim) for tiling in offered)), _narrowed(state, value_dim)


def _narrowed(tiling: Tiling, value_dim: int) -> Tiling:
    """With no more columns than there are values."""
    return dataclasses.replace(tiling, columns=min(tiling.columns, block_of(value_dim)))


@dataclass(frozen=True)
class Shape:
    """Of a call: heads of all batch rows together, lengths, E, M, and the bytes of an element."""

    batch_heads: int
    length_q: int
    length_k: int
    key_dim: int
    value_dim: int
    itemsize: int
    is_causal: bool

    @property
    def state_bytes(self) -> int:
        return 4 * self.key_dim * self.value_dim

    @property
    def bytes_per_position(self) -> int:
        """Of q, k, v and the output, of one head."""
        return 2 * (self.key_dim + self.value_dim) * self.itemsize


# The constants of `estimated_us`. Guessed for an H200, to be replaced by measurements.
_LAUNCH_US = 2.0
_STEP_US = 0.8  # a step of an otherwise idle multiprocessor, without its products
_STEP_US_PER_MFLOP = 0.25
_BUSY_STEP_US = 0.25  # what a step adds on a multiprocessor that has others to turn to
_BUSY_STEP_US_PER_MFLOP = 0.08
_SUM_US = 0.25  # to read a partial state and add it
_RESIDENT = 4  # programs a multiprocessor holds at a time
_BYTES_PER_US_AND_MULTIPROCESSOR = 26e3
_L2_SHARE = 0.5  # of the time that the same bytes take from memory


def estimated_us(plan: Plan, shape: Shape, sm_count: int) -> float:
    """What a plan should take: per kernel the largest of three bounds, and a launch.

    latency     partial states and steps, one after the other, in as many waves as the programs need
    throughput  all steps of all programs, spread over the multiprocessors
    bytes       what has to come from memory; partial states come from L2
    """
    blocks = triton.cdiv(shape.value_dim, plan.forward.columns)
    bandwidth = _BYTES_PER_US_AND_MULTIPROCESSOR * sm_count

    def kernel(programs: int, summed: float, steps: int, mflop: float, moved: float) -> float:
        waves = triton.cdiv(programs, sm_count * _RESIDENT)
        latency = waves * (steps * (_STEP_US + _STEP_US_PER_MFLOP * mflop) + summed * _SUM_US)
        throughput = programs * steps / sm_count * (_BUSY_STEP_US + _BUSY_STEP_US_PER_MFLOP * mflop)
        return _LAUNCH_US + max(latency, throughput, moved / bandwidth)

    chunk, columns = plan.forward.chunk, plan.forward.columns
    steps = triton.cdiv(segment_length(shape.length_q, plan.segments, plan.chunk), chunk)
    products = 2 * chunk * shape.key_dim * columns
    if shape.is_causal:
        products = 2 * products + 2 * chunk * chunk * (shape.key_dim + columns)
    moved = float(shape.batch_heads * shape.length_q * shape.bytes_per_position)
    if not shape.is_causal:
        moved /= 2
    summed = (plan.segments - 1) / 2 if shape.is_causal else plan.key_segments
    moved += _L2_SHARE * shape.batch_heads * plan.segments * summed * shape.state_bytes
    total = kernel(shape.batch_heads * plan.segments * blocks, summed, steps, products / 1e6, moved)
    if plan.key_segments > 0:
        state_blocks = triton.cdiv(shape.value_dim, plan.state.columns)
        length = segment_length(shape.length_k, max(plan.segments, plan.key_segments), plan.chunk)
        share = plan.key_segments / max(plan.segments, plan.key_segments)
        total += kernel(
            shape.batch_heads * plan.key_segments * state_blocks,
            0,
            triton.cdiv(length, plan.state.chunk),
            2 * plan.state.chunk * shape.key_dim * plan.state.columns / 1e6,
            shape.batch_heads * shape.length_k * shape.bytes_per_position / 2 * share,
        )
    return total


SCHEDULES = ("auto", "sequential", "chunkwise")


def plans(forward: Sequence[Tiling], state: Tiling, shape: Shape, schedule: str = "auto") -> tuple[Plan, ...]:
    """The plans worth considering. schedule: "sequential" and "chunkwise" leave those of one kind, if there are any."""
    found: dict[Plan, None] = {}
    longest = max(shape.length_q, shape.length_k)
    shortest = SHORTEST_SEGMENT_SHARE * shape.state_bytes / shape.bytes_per_position
    for tiling in forward:
        counts = [1 << bits for bits in range(MAX_SEGMENTS.bit_length())]
        if schedule == "sequential":
            counts = [1]
        elif schedule == "chunkwise":
            counts = counts[1:]
        for count in counts:
            if schedule == "auto" and count > 1 and longest < count * shortest:
                break
            found.setdefault(_plan(tiling, state, shape, count))
    return tuple(found)


def _plan(tiling: Tiling, state: Tiling, shape: Shape, count: int) -> Plan:
    chunk = max(tiling.chunk, state.chunk)
    segments = segments_of(shape.length_q, count, chunk)
    if shape.is_causal:
        return Plan(tiling, state, segments, segments - 1)
    return Plan(tiling, state, segments, segments_of(shape.length_k, count, chunk))


def default_plan(offered: Sequence[Plan], shape: Shape, sm_count: int) -> Plan:
    """The one with the smallest estimate; without a GPU the first."""
    return min(offered, key=lambda plan: estimated_us(plan, shape, sm_count)) if sm_count else offered[0]


# Launching


def launch_states(
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None,
    weights: tuple[torch.Tensor, torch.Tensor] | None,
    states: torch.Tensor,
    key_sums: torch.Tensor | None,
    *,
    positions_per_segment: int,
    first_segment: int = 0,
    feature_map: str,
    tiling: Tiling,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill the partial states of `len(states)` segments, from the first of them on.

    states float32 [segments, batch, heads, E, M], key_sums [segments, batch, heads, E] or None, contiguous.
    weights: denominator and delta, float32 [batch, heads, length], for the backward pass, where key and value are query
    and the gradient of the output.
    """
    batch, heads, length, key_dim = key.shape
    value_dim = value.shape[3]
    strides = [*strides_of(key), *strides_of(value)]
    denominator, delta = weights if weights is not None else (None, None)
    programs = batch * heads * states.shape[0] * triton.cdiv(value_dim, tiling.columns)
    count_launch("linear_attention_state")
    kernl_linear_attention_state[(programs,)](
        key,
        value,
        key_lengths,
        denominator,
        delta,
        states,
        key_sums,
        *strides,
        heads,
        batch * heads,
        length,
        positions_per_segment,
        states.shape[0],
        first_segment,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_E=block_of(key_dim),
        BLOCK_M=tiling.columns,
        CHUNK=tiling.chunk,
        FEATURE_MAP=tiling.feature_code(feature_map),
        NORMALIZE=key_sums is not None,
        WEIGHTED=weights is not None,
        TEST_ROWS=key_lengths is not None or length % tiling.chunk != 0,
        WIDE_OFFSETS=max(strides) >= 2**23,
        INPUT_PRECISION=input_precision,
        USE_PDL=use_pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **({"launch_pdl": True} if use_pdl else {}),
    )


def linear_attention_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    initial_key_sum: torch.Tensor | None,
    states: torch.Tensor | None,
    key_sums: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor | None,
    final_state: torch.Tensor,
    final_key_sum: torch.Tensor | None,
    *,
    feature_map: str,
    is_causal: bool,
    epsilon: float,
    plan: Plan,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill output, final state and, normalised, denominator and final key sum (all three None otherwise).

    query [batch, heads, length_q, E], key [batch, heads, length_k, E], value [batch, heads, length_k, M], of one type,
    last dimension dense; lengths at least 1; causal: length_k at most length_q. key_lengths int32 or int64 [batch].
    initial_state [batch, heads, E, M], initial_key_sum [batch, heads, E], float32, contiguous, or None.
    states, key_sums: scratch, see `launch_states`, of plan.key_segments segments; None if that is 0.
    output [batch, heads, length_q, M], contiguous as [batch, length_q, heads, M]. denominator float32 [batch, heads,
    length_q], final_state as initial_state, all contiguous.
    """
    batch, heads, length_q, key_dim = query.shape
    length_k, value_dim = value.shape[2:]
    tiling = plan.forward
    per_segment = segment_length(length_q, plan.segments, plan.chunk)
    if states is not None:
        launch_states(
            key,
            value,
            key_lengths,
            None,
            states,
            key_sums,
            positions_per_segment=(
                per_segment if is_causal else segment_length(length_k, plan.key_segments, plan.chunk)
            ),
            feature_map=feature_map,
            tiling=plan.state,
            input_precision=input_precision,
            use_pdl=use_pdl,
        )
    strides = [*strides_of(query), *strides_of(key), *strides_of(value)]
    uneven = length_q % tiling.chunk != 0 or (is_causal and (key_lengths is not None or length_k != length_q))
    count_launch("linear_attention_forward")
    kernl_linear_attention_forward[(batch * heads * plan.segments * triton.cdiv(value_dim, tiling.columns),)](
        query,
        key,
        value,
        key_lengths,
        states,
        key_sums,
        initial_state,
        initial_key_sum,
        output,
        denominator,
        final_state,
        final_key_sum,
        *strides,
        heads,
        batch * heads,
        length_q,
        length_k,
        per_segment,
        plan.segments,
        plan.key_segments,
        epsilon,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_E=block_of(key_dim),
        BLOCK_M=tiling.columns,
        CHUNK=tiling.chunk,
        FEATURE_MAP=tiling.feature_code(feature_map),
        IS_CAUSAL=is_causal,
        NORMALIZE=denominator is not None,
        TEST_ROWS=uneven,
        WIDE_OFFSETS=max(strides) >= 2**23,
        INPUT_PRECISION=input_precision,
        USE_PDL=use_pdl,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **({"launch_pdl": True} if use_pdl else {}),
    )


_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def _common_case(
    arch: int, dtype: torch.dtype, key_dim: int, value_dim: int, tiling: Tiling, precision: str, feature_map: str
) -> tuple[dict[str, str], dict[str, object], dict[str, object]]:
    """Signature, constexprs and options that the cases of all kernels share."""
    signature = dict.fromkeys(("query", "key", "value", "output"), f"*{TRITON_TYPES[dtype]}")
    signature |= dict.fromkeys(("states", "key_sums", "final_state", "final_key_sum", "denominator"), "*fp32")
    signature |= {"epsilon": "fp32"}
    constexprs: dict[str, object] = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_E": block_of(key_dim),
        "BLOCK_M": tiling.columns,
        "CHUNK": tiling.chunk,
        "FEATURE_MAP": tiling.feature_code(feature_map),
        "WIDE_OFFSETS": False,
        "INPUT_PRECISION": precision,
        "USE_PDL": arch >= 90,
    }
    return signature, constexprs, {"launch_pdl": True} if arch >= 90 else {}


STRIDES = ("stride_b", "stride_h", "stride_n")


def finished_case(
    name: str,
    kernel: Any,
    tiling: Tiling,
    signature: dict[str, str],
    constexprs: dict[str, object],
    options: dict[str, object],
) -> AotCase:
    """With every argument that has no type yet as an int32, and strides that are multiples of 16."""
    names = kernel.arg_names
    types = {argument: signature.get(argument, "i32") for argument in names if argument not in constexprs}
    return AotCase(
        name=name,
        kernel=kernel,
        signature=types,
        constexprs={argument: value for argument, value in constexprs.items() if argument in names},
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        divisible_by_16=tuple(argument for argument in types if argument.endswith(STRIDES)),
        options=options,
    )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """The tilings on offer for sm_`arch`: causal, with rows tested, one of them also without."""
    if arch < 80:
        return
    problems: list[tuple[torch.dtype, int, str, str]] = [
        (torch.float16, 64, "ieee", "elu"),
        (torch.float16, 128, "ieee", "elu"),
        (torch.bfloat16, 256, "ieee", "elu"),
        (torch.float32, 256, "tf32", "elu"),
        (torch.float32, 128, "ieee", "elu"),
    ]
    for dtype, dim, precision, feature_map in problems:
        offered, state = tilings(arch, dtype, dim, dim, input_precision=precision)
        assert state is not None
        kind = f"{_NAMES[dtype]}-{precision}" if dtype == torch.float32 else _NAMES[dtype]
        for tiling in offered:
            for tested in (False, True) if dim == 64 and tiling is offered[0] else (True,):
                name = f"forward-{kind}-D{dim}-{tiling.name}" + ("-tested" if tested else "")
                yield _forward_case(name, arch, dtype, dim, tiling, precision, feature_map, tested)
        if dtype == torch.float32:
            continue  # its state kernel is compiled for the backward pass, which asks more of it
        signature, constexprs, options = _common_case(arch, dtype, dim, dim, state, precision, feature_map)
        constexprs |= {"key_lengths": None, "denominator": None, "delta": None}
        constexprs |= {"NORMALIZE": True, "WEIGHTED": False, "TEST_ROWS": True}
        name = f"state-{kind}-D{dim}-{state.name}"
        yield finished_case(name, kernl_linear_attention_state, state, signature, constexprs, options)


def _forward_case(
    name: str,
    arch: int,
    dtype: torch.dtype,
    dim: int,
    tiling: Tiling,
    precision: str,
    feature_map: str,
    tested: bool,
) -> AotCase:
    signature, constexprs, options = _common_case(arch, dtype, dim, dim, tiling, precision, feature_map)
    if tested:
        signature |= {"key_lengths": "*i64", "initial_state": "*fp32", "initial_key_sum": "*fp32"}
    else:
        constexprs |= {"key_lengths": None, "initial_state": None, "initial_key_sum": None}
    constexprs |= {"IS_CAUSAL": True, "NORMALIZE": True, "TEST_ROWS": tested}
    return finished_case(name, kernl_linear_attention_forward, tiling, signature, constexprs, options)
