"""Linear attention, backward: gradients of query, key, value and the initial sums.

With phi, S, z, out and den as in `kernl.kernels.linear_attention`, dO the gradient of the output, dS and dz those of
the final state and key sum, w_i = 1 / den_i and delta_i = <dO_i, out_i> (not normalised: w = 1, delta = 0):

    d phi(q)_i = w_i [ sum_{j in N(i)} (<dO_i, v_j> - delta_i) phi(k_j) + S_0 dO_i - delta_i z_0 ]
    d phi(k)_j = sum_{i: j in N(i)} w_i (<v_j, dO_i> - delta_i) phi(q_i) + dS v_j + dz
    dv_j       = sum_{i: j in N(i)} w_i <phi(k_j), phi(q_i)> dO_i + dS^T phi(k_j)
    dS_0       = dS + sum_i w_i phi(q_i) dO_i^T          dz_0 = dz - sum_i w_i delta_i phi(q_i)

and dq = d phi(q) phi'(q), dk = d phi(k) phi'(k). The sums over keys are the forward pass's state S once more; those
over queries are another state R [E, M], which is walked from the last position to the first:

    state      (of the forward pass) partial states S of the segments; and, with weights w, partial states R
    query      walks a segment forwards with S: dq; leaves delta in memory for those after it
    key_value  walks a segment backwards with R: dk and dv in one pass where R fits the registers of a program, else in
               two: dv by blocks of value columns, dk by blocks of E

w_i stays outside of the products with operands of 16 bits, or is made of a size that they can hold: 1 / den of a long
sequence is far below the smallest float16.

Bytes and flops, for B heads in all, N positions, elements of s bytes
    bytes   B N (4 E + 4 M) s: q, k, v, dO, out in, dq, dk, dv out (without out when not normalised): the floor. The
            causal kernels move B N (4 E + 5 M) s (q, k, v, dO, out; k, v, q, dO; three gradients) and, chunkwise,
            B N (2 E + 2 M) s more for the partial states.
    flops   2 B N (5 E M + CHUNK (3 E + 3 M)) causal: two and a half times the forward pass.
No atomics: every sum has one owner and a fixed order.
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
    AotCase,
    add_product,
    block_of,
    count_launch,
    let_next_kernel_start,
    wait_for_previous_kernel,
)
from kernl.kernels.linear_attention import (
    IDENTITY,
    Plan,
    Shape,
    Tiling,
    _common_case,
    as_operand,
    default_plan,
    feature,
    feature_derivative,
    finished_case,
    kernl_linear_attention_state,
    key_feature,
    last_key,
    launch_states,
    load_tile,
    plans,
    reciprocal,
    scaled_rows,
    scaled_tile,
    segment_length,
    state_before,
    store_state,
    store_tile,
    strides_of,
    sum_of_products,
    tiling_of,
)


@triton.jit(do_not_specialize=["heads", "length_q", "length_k", "segment_length", "segments", "key_segments"])
def kernl_linear_attention_backward_query(
    query,
    key,
    value,
    key_lengths,
    grad_output,
    output,
    denominator,
    states,
    key_sums,
    initial_state,
    initial_key_sum,
    delta,
    grad_query,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    key_stride_b,
    key_stride_h,
    key_stride_n,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    grad_stride_b,
    grad_stride_h,
    grad_stride_n,
    output_stride_b,
    output_stride_h,
    output_stride_n,
    heads,
    batch_heads,
    length_q,
    length_k,
    segment_length,
    segments,
    key_segments,
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
    """dq of one segment and BLOCK_E columns; BLOCK_M holds all of M."""
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)
    blocks_e = tl.cdiv(KEY_DIM, BLOCK_E)
    program = tl.program_id(0)
    first_e = program % blocks_e * BLOCK_E
    segment = program // blocks_e % segments
    batch_head = program // blocks_e // segments
    batch = batch_head // heads
    batch64 = tl.cast(batch, tl.int64)
    head64 = tl.cast(batch_head % heads, tl.int64)
    result_stride_n = tl.cast(heads, tl.int64) * KEY_DIM
    query += batch64 * query_stride_b + head64 * query_stride_h + first_e
    key += batch64 * key_stride_b + head64 * key_stride_h + first_e
    value += batch64 * value_stride_b + head64 * value_stride_h
    grad_output += batch64 * grad_stride_b + head64 * grad_stride_h
    grad_query += batch64 * length_q * result_stride_n + head64 * KEY_DIM + first_e
    if NORMALIZE:
        output += batch64 * output_stride_b + head64 * output_stride_h
        denominator += tl.cast(batch_head, tl.int64) * length_q
        delta += tl.cast(batch_head, tl.int64) * length_q
    last = last_key(key_lengths, batch, length_k)
    first = segment * segment_length
    end = tl.minimum(first + segment_length, length_q)
    DTYPE: tl.constexpr = grad_output.dtype.element_ty

    state, key_sum = state_before(
        states,
        key_sums,
        initial_state,
        initial_key_sum,
        batch_head,
        batch_heads,
        0,
        segment if IS_CAUSAL else key_segments,
        first_e,
        0,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_E,
        BLOCK_M,
        NORMALIZE,
        not IS_CAUSAL,
    )  # [BLOCK_M, BLOCK_E], [BLOCK_E]
    delta_end = tl.where(first_e == 0, length_q, 0)  # one of the programs of a head stores it
    offsets = tl.arange(0, CHUNK)
    below = offsets[:, None] >= offsets[None, :]  # [CHUNK, CHUNK] queries, keys
    if not IS_CAUSAL:
        state_operand, state_factor = scaled_tile(state, DTYPE)

    for start in range(first, end, CHUNK):
        start = tl.multiple_of(start, CHUNK)
        rows = start + offsets
        grads, _ = load_tile(
            grad_output,
            start,
            length_q,
            grad_stride_n,
            VALUE_DIM,
            CHUNK,
            BLOCK_M,
            TEST_ROWS,
            VALUE_DIM != BLOCK_M,
            WIDE_OFFSETS,
        )  # [CHUNK, BLOCK_M]
        weight = 1.0
        if NORMALIZE:
            outputs, _ = load_tile(
                output,
                start,
                length_q,
                output_stride_n,
                VALUE_DIM,
                CHUNK,
                BLOCK_M,
                TEST_ROWS,
                VALUE_DIM != BLOCK_M,
                WIDE_OFFSETS,
            )
            row_delta = tl.sum(grads.to(tl.float32) * outputs.to(tl.float32), 1)  # [CHUNK]
            tl.store(delta + rows, row_delta, mask=rows < delta_end)
            normalizer = tl.load(denominator + rows, mask=rows < length_q, other=float("inf"))  # [CHUNK]
            weight = reciprocal(normalizer, DTYPE, INPUT_PRECISION)[:, None]
        if IS_CAUSAL:
            raw, exists = load_tile(
                key,
                start,
                last,
                key_stride_n,
                KEY_DIM - first_e,
                CHUNK,
                BLOCK_E,
                TEST_ROWS,
                KEY_DIM % BLOCK_E != 0,
                WIDE_OFFSETS,
            )
            keys = as_operand(key_feature(raw, exists, FEATURE_MAP, INPUT_PRECISION), DTYPE)  # [CHUNK, BLOCK_E]
            values, _ = load_tile(
                value,
                start,
                last,
                value_stride_n,
                VALUE_DIM,
                CHUNK,
                BLOCK_M,
                TEST_ROWS,
                VALUE_DIM != BLOCK_M,
                WIDE_OFFSETS,
            )  # [CHUNK, BLOCK_M]
            scores = tl.dot(grads, tl.trans(values), input_precision=INPUT_PRECISION)
            if NORMALIZE:
                scores -= row_delta[:, None]
            scores = tl.where(below, scores, 0.0)  # [CHUNK, CHUNK]
            state_operand, state_factor = scaled_tile(state, DTYPE)
            score_operand, score_factor = scaled_rows(scores, DTYPE)
            result = sum_of_products(
                grads,
                state_factor,
                state_operand,
                score_operand,
                score_factor,
                keys,
                weight,
                DTYPE,
                NORMALIZE,
                INPUT_PRECISION,
            )  # [CHUNK, BLOCK_E]
        else:
            result = tl.dot(grads, state_operand, input_precision=INPUT_PRECISION) * (state_factor * weight)
        if NORMALIZE:
            result -= (row_delta[:, None] * weight) * key_sum[None, :]
        if FEATURE_MAP != IDENTITY:
            raw, _ = load_tile(
                query,
                start,
                length_q,
                query_stride_n,
                KEY_DIM - first_e,
                CHUNK,
                BLOCK_E,
                TEST_ROWS,
                KEY_DIM % BLOCK_E != 0,
                WIDE_OFFSETS,
            )
            result *= feature_derivative(raw, FEATURE_MAP, INPUT_PRECISION)
        store_tile(
            grad_query,
            result,
            start,
            length_q,
            result_stride_n,
            KEY_DIM - first_e,
            CHUNK,
            BLOCK_E,
            TEST_ROWS,
            KEY_DIM % BLOCK_E != 0,
        )
        if IS_CAUSAL:
            state = add_product(state, tl.trans(values), keys, INPUT_PRECISION)
            if NORMALIZE:
                key_sum += tl.sum(keys.to(tl.float32), 0)


@triton.jit(do_not_specialize=["heads", "length_q", "length_k", "segment_length", "segments", "query_segments"])
def kernl_linear_attention_backward_key_value(
    query,
    key,
    value,
    key_lengths,
    grad_output,
    denominator,
    delta,
    states,
    query_sums,
    grad_state,
    grad_key_sum,
    grad_key,
    grad_value,
    grad_initial_state,
    grad_initial_key_sum,
    query_stride_b,
    query_stride_h,
    query_stride_n,
    key_stride_b,
    key_stride_h,
    key_stride_n,
    value_stride_b,
    value_stride_h,
    value_stride_n,
    grad_stride_b,
    grad_stride_h,
    grad_stride_n,
    heads,
    batch_heads,
    length_q,
    length_k,
    segment_length,
    segments,
    query_segments,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    NORMALIZE: tl.constexpr,
    OF_KEY: tl.constexpr,
    OF_VALUE: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    WIDE_OFFSETS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """dk (OF_KEY) and dv (OF_VALUE) of one segment of keys.

    OF_KEY: BLOCK_M holds all of M; OF_VALUE: BLOCK_E holds all of E. Gradients of the initial sums come with OF_KEY.
    """
    wait_for_previous_kernel(USE_PDL)
    let_next_kernel_start(USE_PDL)
    blocks_e = tl.cdiv(KEY_DIM, BLOCK_E)
    blocks_m = tl.cdiv(VALUE_DIM, BLOCK_M)
    program = tl.program_id(0)
    first_e = program % blocks_e * BLOCK_E
    first_m = program // blocks_e % blocks_m * BLOCK_M
    segment = program // (blocks_e * blocks_m) % segments
    batch_head = program // (blocks_e * blocks_m) // segments
    batch = batch_head // heads
    batch64 = tl.cast(batch, tl.int64)
    head64 = tl.cast(batch_head % heads, tl.int64)
    heads64 = tl.cast(heads, tl.int64)
    query += batch64 * query_stride_b + head64 * query_stride_h + first_e
    key += batch64 * key_stride_b + head64 * key_stride_h + first_e
    value += batch64 * value_stride_b + head64 * value_stride_h + first_m
    grad_output += batch64 * grad_stride_b + head64 * grad_stride_h + first_m
    grad_key += (batch64 * length_k * heads64 + head64) * KEY_DIM + first_e
    grad_value += (batch64 * length_k * heads64 + head64) * VALUE_DIM + first_m
    if NORMALIZE and IS_CAUSAL:
        denominator += tl.cast(batch_head, tl.int64) * length_q
        delta += tl.cast(batch_head, tl.int64) * length_q
    last = last_key(key_lengths, batch, length_k)
    length = length_q if IS_CAUSAL else length_k
    first = segment * segment_length
    end = tl.minimum(first + segment_length, length)
    DTYPE: tl.constexpr = grad_output.dtype.element_ty

    # Partial states are of the segments 1, 2, ... when causal: those after this one come first in the walk.
    state, query_sum = state_before(
        states,
        query_sums,
        grad_state,
        grad_key_sum,
        batch_head,
        batch_heads,
        segment if IS_CAUSAL else 0,
        query_segments,
        first_e,
        first_m,
        KEY_DIM,
        VALUE_DIM,
        BLOCK_E,
        BLOCK_M,
        NORMALIZE,
        not IS_CAUSAL,
    )  # [BLOCK_M, BLOCK_E], [BLOCK_E]
    offsets = tl.arange(0, CHUNK)
    above = offsets[:, None] <= offsets[None, :]  # [CHUNK, CHUNK] keys, queries
    if not IS_CAUSAL:
        state_operand, state_factor = scaled_tile(state, DTYPE)

    steps = tl.cdiv(end - first, CHUNK)
    for step in range(steps):
        start = tl.multiple_of(first + (steps - 1 - step) * CHUNK, CHUNK)
        raw_keys, key_exists = load_tile(
            key,
            start,
            last,
            key_stride_n,
            KEY_DIM - first_e,
            CHUNK,
            BLOCK_E,
            TEST_ROWS,
            KEY_DIM % BLOCK_E != 0,
            WIDE_OFFSETS,
        )  # [CHUNK, BLOCK_E]
        counts = (start + offsets < last)[:, None]
        if OF_KEY:
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
        if IS_CAUSAL:
            raw, _ = load_tile(
                query,
                start,
                length_q,
                query_stride_n,
                KEY_DIM - first_e,
                CHUNK,
                BLOCK_E,
                TEST_ROWS,
                KEY_DIM % BLOCK_E != 0,
                WIDE_OFFSETS,
            )
            queries = as_operand(feature(raw, FEATURE_MAP, INPUT_PRECISION), DTYPE)  # [CHUNK, BLOCK_E]
            grads, _ = load_tile(
                grad_output,
                start,
                length_q,
                grad_stride_n,
                VALUE_DIM - first_m,
                CHUNK,
                BLOCK_M,
                TEST_ROWS,
                VALUE_DIM % BLOCK_M != 0,
                WIDE_OFFSETS,
            )  # [CHUNK, BLOCK_M]
            if NORMALIZE:
                rows = start + offsets
                normalizer = tl.load(denominator + rows, mask=rows < length_q, other=float("inf"))  # [CHUNK]
                weight = reciprocal(normalizer, DTYPE, INPUT_PRECISION)
                row_delta = tl.load(delta + rows, mask=rows < length_q, other=0.0)  # [CHUNK]
            state_operand, state_factor = scaled_tile(state, DTYPE)

        if OF_VALUE:
            keys = as_operand(key_feature(raw_keys, key_exists, FEATURE_MAP, INPUT_PRECISION), DTYPE)
            if IS_CAUSAL:
                scores = tl.dot(keys, tl.trans(queries), input_precision=INPUT_PRECISION)  # [CHUNK, CHUNK]
                if NORMALIZE:
                    scores *= weight[None, :]
                score_operand, score_factor = scaled_rows(tl.where(above, scores, 0.0), DTYPE)
                result = sum_of_products(
                    keys,
                    state_factor,
                    tl.trans(state_operand),
                    score_operand,
                    score_factor,
                    grads,
                    1.0,
                    DTYPE,
                    False,
                    INPUT_PRECISION,
                )  # [CHUNK, BLOCK_M]
            else:
                result = tl.dot(keys, tl.trans(state_operand), input_precision=INPUT_PRECISION) * state_factor
            if TEST_ROWS:
                result = tl.where(counts, result, 0.0)
            store_tile(
                grad_value,
                result,
                start,
                length_k,
                heads64 * VALUE_DIM,
                VALUE_DIM - first_m,
                CHUNK,
                BLOCK_M,
                TEST_ROWS,
                VALUE_DIM % BLOCK_M != 0,
            )
        if OF_KEY:
            if IS_CAUSAL:
                scores = tl.dot(values, tl.trans(grads), input_precision=INPUT_PRECISION)  # [CHUNK, CHUNK]
                if NORMALIZE:
                    scores = (scores - row_delta[None, :]) * weight[None, :]
                score_operand, score_factor = scaled_rows(tl.where(above, scores, 0.0), DTYPE)
                result = sum_of_products(
                    values,
                    state_factor,
                    state_operand,
                    score_operand,
                    score_factor,
                    queries,
                    1.0,
                    DTYPE,
                    False,
                    INPUT_PRECISION,
                )  # [CHUNK, BLOCK_E]
            else:
                result = tl.dot(values, state_operand, input_precision=INPUT_PRECISION) * state_factor
            if NORMALIZE:
                result += query_sum[None, :]
            if FEATURE_MAP != IDENTITY:
                result *= feature_derivative(raw_keys, FEATURE_MAP, INPUT_PRECISION)
            if TEST_ROWS:
                result = tl.where(counts, result, 0.0)
            store_tile(
                grad_key,
                result,
                start,
                length_k,
                heads64 * KEY_DIM,
                KEY_DIM - first_e,
                CHUNK,
                BLOCK_E,
                TEST_ROWS,
                KEY_DIM % BLOCK_E != 0,
            )
        if IS_CAUSAL:
            if NORMALIZE:
                weighted = queries.to(tl.float32) * weight[:, None]
                query_sum -= tl.sum(weighted * row_delta[:, None], 0)
                operand, factor = scaled_tile(weighted, DTYPE)
                if DTYPE == tl.float16:
                    state += tl.dot(tl.trans(grads), operand, input_precision=INPUT_PRECISION) * factor
                else:
                    state = add_product(state, tl.trans(grads), operand, INPUT_PRECISION)
            else:
                state = add_product(state, tl.trans(grads), queries, INPUT_PRECISION)

    if OF_KEY and segment == 0:
        store_state(
            state,
            query_sum,
            grad_initial_state,
            grad_initial_key_sum,
            tl.cast(batch_head, tl.int64),
            first_e,
            first_m,
            KEY_DIM,
            KEY_DIM,
            VALUE_DIM,
            BLOCK_E,
            BLOCK_M,
            NORMALIZE,
        )


@dataclass(frozen=True)
class BackwardTilings:
    """One for each kernel. `columns` is the block of E of the query kernel and of the pass over keys, the block of M of
    the pass over values. value None: one pass for both, with the whole state in registers.
    """

    query: Tiling
    key: Tiling
    value: Tiling | None
    state: Tiling

    @property
    def name(self) -> str:
        value = "" if self.value is None else f"-v-{self.value.name}"
        return f"q-{self.query.name}-k-{self.key.name}{value}"

    @property
    def chunk(self) -> int:
        return max(tiling.chunk for tiling in (self.query, self.key, self.value, self.state) if tiling is not None)


@dataclass(frozen=True)
class BackwardPlan:
    """Tilings, and into how many segments queries and keys are cut; causal: both into the same."""

    tilings: BackwardTilings
    segments: int
    key_segments: int

    @property
    def name(self) -> str:
        return f"{self.tilings.name}x{self.segments}"


def _tilings(query: str, key: str, value: str | None, state: str) -> BackwardTilings:
    """Each as `tiling_of` reads it."""
    made = [None if row is None else tiling_of(row) for row in (query, key, value, state)]
    return BackwardTilings(*made)  # type: ignore[arg-type]


# By the padded dimension, the larger of E and M, at least 64.
_HOPPER = {
    64: _tilings("64 64 8 2", "32 64 8 2", None, "64 64 4 2"),
    128: _tilings("32 64 8 2", "32 64 8 2", "32 64 8 2", "64 64 8 2"),
    256: _tilings("16 32 8 2", "16 16 8 1", "16 16 8 1", "16 32 8 2"),
}
_BLACKWELL = {
    64: _tilings("64 64 8 2 recompute", "32 64 8 2 recompute", None, "64 64 8 3 recompute"),
    128: _tilings("32 64 8 2 recompute", "32 64 8 2 recompute", "32 64 8 2 recompute", "32 64 8 2 recompute"),
    256: _HOPPER[256],
}
_AMPERE = {
    64: _tilings("32 64 8 2", "32 32 8 1", "32 32 8 1", "64 64 4 2"),
    128: _tilings("32 64 8 2", "16 64 8 2", "32 64 8 2", "64 64 8 2"),
    256: _tilings("16 32 8 2", "16 16 8 1", "16 16 8 1", "16 32 8 2"),
}
# Wider than this, and wider than 64 without tensor cores, nothing fits.
_TF32 = {
    64: _tilings("32 32 8 1", "16 64 8 1", "16 64 8 1", "32 32 8 1"),
    128: _tilings("16 32 8 1", "16 32 8 1", "16 32 8 1", "32 32 8 1"),
}
_IEEE = {64: _tilings("16 16 8 1", "16 16 8 1", "16 16 8 1", "16 32 8 1")}
# Cost in the interpreter is per operation, not per element. Both forms of the passes over keys and values are there.
_INTERPRETED = {
    64: _tilings("64 64 4 1", "64 64 4 1", None, "64 64 4 1"),
    128: _tilings("64 64 4 1", "64 64 4 1", "64 64 4 1", "64 64 4 1"),
    256: _tilings("64 64 4 1", "64 64 4 1", "64 64 4 1", "64 64 4 1"),
}


def backward_tilings(
    arch: int, dtype: torch.dtype, key_dim: int, value_dim: int, *, input_precision: str
) -> BackwardTilings | None:
    """Those for sm_`arch`; None where nothing fits. input_precision: "tf32" or "ieee", for float32."""
    width = max(block_of(key_dim), block_of(value_dim), 64)
    if arch == 0:
        found: BackwardTilings | None = _INTERPRETED[width]
    elif dtype == torch.float32:
        found = (_IEEE if input_precision == "ieee" else _TF32).get(width)
    else:
        found = (_BLACKWELL if arch >= 100 else _HOPPER if arch >= 90 else _AMPERE)[width]
    if found is None:
        return None
    return BackwardTilings(
        _narrowed(found.query, key_dim),
        _narrowed(found.key, key_dim),
        None if found.value is None else _narrowed(found.value, value_dim),
        _narrowed(found.state, value_dim),
    )


def _narrowed(tiling: Tiling, dim: int) -> Tiling:
    return dataclasses.replace(tiling, columns=min(tiling.columns, block_of(dim)))


def backward_plans(tilings: BackwardTilings, shape: Shape, sm_count: int, schedule: str) -> tuple[BackwardPlan, ...]:
    """The plans worth considering, the one to start from first: by the forward pass's rule for the query kernel."""
    # The query kernel is a forward pass whose queries and values are dO and phi(k): E and M change places.
    turned = Shape(
        shape.batch_heads,
        shape.length_q,
        shape.length_k,
        shape.value_dim,
        shape.key_dim,
        shape.itemsize,
        shape.is_causal,
    )
    chunk = tilings.chunk
    tiling, state = (Tiling(chunk, each.columns, 0, 0) for each in (tilings.query, tilings.state))
    offered = plans((tiling,), state, turned, schedule)
    first = default_plan(offered, turned, sm_count)
    ordered: Sequence[Plan] = (first, *(plan for plan in offered if plan is not first))
    return tuple(BackwardPlan(tilings, plan.segments, plan.key_segments) for plan in ordered)


def linear_attention_backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_lengths: torch.Tensor | None,
    initial_state: torch.Tensor | None,
    initial_key_sum: torch.Tensor | None,
    grad_output: torch.Tensor,
    grad_state: torch.Tensor | None,
    grad_key_sum: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor | None,
    delta: torch.Tensor | None,
    states: torch.Tensor | None,
    sums: torch.Tensor | None,
    grad_query: torch.Tensor,
    grad_key: torch.Tensor,
    grad_value: torch.Tensor,
    grad_initial_state: torch.Tensor,
    grad_initial_key_sum: torch.Tensor | None,
    *,
    feature_map: str,
    is_causal: bool,
    plan: BackwardPlan,
    input_precision: str,
    use_pdl: bool,
) -> None:
    """Fill the gradients. Arguments as `linear_attention_forward` takes and leaves them; grad_output of any strides but
    for a dense last dimension.

    delta: scratch, float32 [batch, heads, length_q]. states, sums: scratch, float32 [count, batch, heads, E, M] and
    [count, batch, heads, E] for the most partial states that the plan makes, None if it makes none. denominator, delta,
    sums, grad_initial_key_sum are None where nothing is normalised. Gradients: contiguous [batch, length, heads, dim].
    """
    batch, heads, length_q, key_dim = query.shape
    length_k, value_dim = value.shape[2:]
    tilings = plan.tilings
    per_segment = segment_length(length_q, plan.segments, tilings.chunk)
    per_key_segment = per_segment if is_causal else segment_length(length_k, plan.key_segments, tilings.chunk)
    query_partials = plan.segments - 1 if is_causal else plan.segments
    normalize = denominator is not None
    all_strides = [strides_of(tensor) for tensor in (query, key, value, grad_output, output)]
    common: dict[str, Any] = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "IS_CAUSAL": is_causal,
        "NORMALIZE": normalize,
        "WIDE_OFFSETS": max(map(max, all_strides)) >= 2**23,
        "INPUT_PRECISION": input_precision,
        "USE_PDL": use_pdl,
        **({"launch_pdl": True} if use_pdl else {}),
    }
    of_states: dict[str, Any] = {
        "feature_map": feature_map,
        "tiling": tilings.state,
        "input_precision": input_precision,
        "use_pdl": use_pdl,
    }

    def is_uneven(chunk: int, length: int) -> bool:
        return length % chunk != 0 or key_lengths is not None or (is_causal and length_k != length_q)

    def some(count: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if count == 0 or states is None:
            return None, None
        return states[:count], None if sums is None else sums[:count]

    count_launch("linear_attention_backward")
    partial, partial_sums = some(plan.key_segments)
    if partial is not None:
        launch_states(
            key,
            value,
            key_lengths,
            None,
            partial,
            partial_sums,
            positions_per_segment=per_key_segment,
            **of_states,
        )
    tiling = tilings.query
    kernl_linear_attention_backward_query[(batch * heads * plan.segments * triton.cdiv(key_dim, tiling.columns),)](
        query,
        key,
        value,
        key_lengths,
        grad_output,
        output,
        denominator,
        partial,
        partial_sums,
        initial_state,
        initial_key_sum,
        delta,
        grad_query,
        *[stride for strides in all_strides for stride in strides],
        heads,
        batch * heads,
        length_q,
        length_k,
        per_segment,
        plan.segments,
        plan.key_segments,
        BLOCK_E=tiling.columns,
        BLOCK_M=block_of(value_dim),
        CHUNK=tiling.chunk,
        FEATURE_MAP=tiling.feature_code(feature_map),
        TEST_ROWS=is_uneven(tiling.chunk, length_q),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **common,
    )

    partial, partial_sums = some(query_partials)
    if partial is not None:
        assert delta is not None or not normalize
        launch_states(
            query,
            grad_output,
            None,
            (denominator, delta) if denominator is not None and delta is not None else None,
            partial,
            partial_sums,
            positions_per_segment=per_segment,
            first_segment=1 if is_causal else 0,
            **of_states,
        )
    passes: list[tuple[Tiling, bool, bool, int, int]]  # tiling, of key, of value, BLOCK_E, BLOCK_M
    block_e, block_m = block_of(key_dim), block_of(value_dim)
    if tilings.value is None:
        passes = [(tilings.key, True, True, block_e, block_m)]
    else:
        passes = [
            (tilings.key, True, False, tilings.key.columns, block_m),
            (tilings.value, False, True, block_e, tilings.value.columns),
        ]
    segments = plan.segments if is_causal else plan.key_segments
    for tiling, of_key, of_value, columns_e, columns_m in passes:
        blocks = triton.cdiv(key_dim, columns_e) * triton.cdiv(value_dim, columns_m)
        kernl_linear_attention_backward_key_value[(batch * heads * segments * blocks,)](
            query,
            key,
            value,
            key_lengths,
            grad_output,
            denominator,
            delta,
            partial,
            partial_sums,
            grad_state,
            grad_key_sum,
            grad_key,
            grad_value,
            grad_initial_state,
            grad_initial_key_sum,
            *[stride for strides in all_strides[:4] for stride in strides],
            heads,
            batch * heads,
            length_q,
            length_k,
            per_key_segment,
            segments,
            query_partials,
            BLOCK_E=columns_e,
            BLOCK_M=columns_m,
            CHUNK=tiling.chunk,
            FEATURE_MAP=tiling.feature_code(feature_map),
            OF_KEY=of_key,
            OF_VALUE=of_value,
            TEST_ROWS=is_uneven(tiling.chunk, length_q if is_causal else length_k),
            num_warps=tiling.num_warps,
            num_stages=tiling.num_stages,
            **common,
        )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """The tilings for sm_`arch`, causal and normalised, with rows tested."""
    if arch < 80:
        return
    problems: list[tuple[str, torch.dtype, int, str]] = [
        ("fp16", torch.float16, 64, "ieee"),
        ("fp16", torch.float16, 128, "ieee"),
        ("bf16", torch.bfloat16, 256, "ieee"),
        ("fp32-tf32", torch.float32, 128, "tf32"),
        ("fp32-ieee", torch.float32, 64, "ieee"),
    ]
    for kind, dtype, dim, precision in problems:
        tilings = backward_tilings(arch, dtype, dim, dim, input_precision=precision)
        assert tilings is not None
        what = (arch, dtype, dim)
        name = f"{kind}-D{dim}"
        yield _query_case(f"query-{name}-{tilings.query.name}", *what, tilings.query, precision, "elu")
        fused = tilings.value is None
        kinds = "key_value" if fused else "key"
        yield _key_value_case(f"{kinds}-{name}-{tilings.key.name}", *what, tilings.key, precision, "elu", True, fused)
        if tilings.value is not None:
            tiling = tilings.value
            yield _key_value_case(f"value-{name}-{tiling.name}", *what, tiling, precision, "elu", False, True)
        yield _state_case(f"state-{name}-{tilings.state.name}", *what, tilings.state, precision, "elu")


def _query_case(
    name: str, arch: int, dtype: torch.dtype, dim: int, tiling: Tiling, precision: str, feature_map: str
) -> AotCase:
    signature, constexprs, options = _common_case(arch, dtype, dim, dim, tiling, precision, feature_map)
    signature |= {"grad_output": signature["query"], "grad_query": signature["query"], "key_lengths": "*i64"}
    signature |= {"delta": "*fp32", "initial_state": "*fp32", "initial_key_sum": "*fp32"}
    constexprs |= {"BLOCK_E": tiling.columns, "BLOCK_M": block_of(dim)}
    constexprs |= {"IS_CAUSAL": True, "NORMALIZE": True, "TEST_ROWS": True}
    return finished_case(name, kernl_linear_attention_backward_query, tiling, signature, constexprs, options)


def _key_value_case(
    name: str,
    arch: int,
    dtype: torch.dtype,
    dim: int,
    tiling: Tiling,
    precision: str,
    feature_map: str,
    of_key: bool,
    of_value: bool,
) -> AotCase:
    signature, constexprs, options = _common_case(arch, dtype, dim, dim, tiling, precision, feature_map)
    signature |= dict.fromkeys(("grad_output", "grad_key", "grad_value"), signature["query"])
    signature |= {"key_lengths": "*i64", "delta": "*fp32", "query_sums": "*fp32"}
    signature |= dict.fromkeys(("grad_state", "grad_key_sum", "grad_initial_state", "grad_initial_key_sum"), "*fp32")
    constexprs |= {"BLOCK_E": block_of(dim) if of_value else tiling.columns}
    constexprs |= {"BLOCK_M": block_of(dim) if of_key else tiling.columns}
    constexprs |= {"IS_CAUSAL": True, "NORMALIZE": True, "TEST_ROWS": True, "OF_KEY": of_key, "OF_VALUE": of_value}
    return finished_case(name, kernl_linear_attention_backward_key_value, tiling, signature, constexprs, options)


def _state_case(
    name: str, arch: int, dtype: torch.dtype, dim: int, tiling: Tiling, precision: str, feature_map: str
) -> AotCase:
    signature, constexprs, options = _common_case(arch, dtype, dim, dim, tiling, precision, feature_map)
    signature |= {"delta": "*fp32"}
    constexprs |= {"key_lengths": None, "NORMALIZE": True, "WEIGHTED": True, "TEST_ROWS": True}
    return finished_case(name, kernl_linear_attention_state, tiling, signature, constexprs, options)
