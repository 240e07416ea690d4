"""What the attention kernels share on the device: operands, visible keys, scores and dropout.

HOW is the `Variant` of `kernl.kernels.attention_problem`: all that is decided at compilation. Branches on it leave no
trace in the compiled code, and what a variant has no use for is None. What belongs together at run time goes from one
helper to the next as a named tuple.

All helpers that make scores work in either orientation. A tile of scores is [queries, keys], or [keys, queries] where
the kernel owns keys; what belongs to queries comes with a dimension of size 1 for the keys, and the other way round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernl.kernels.activation import tanh
from kernl.kernels.common import to_compute

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)

# What kind of tensor attn_mask, bias and key_padding are. BOOL: True attends. HIDES: what is not zero is hidden.
ABSENT = tl.constexpr(0)
BOOL = tl.constexpr(1)
FLOAT = tl.constexpr(2)
LENGTHS = tl.constexpr(3)
HIDES = tl.constexpr(4)

# Windows and offsets beyond this are as good as unbounded; sums of two and a length fit 32 bits.
FARTHEST = tl.constexpr(2**29)
_SCAN_CHUNK = tl.constexpr(1024)

# The fewest rounds with which Philox 4x32 passes BigCrush (Salmon et al., "Parallel random numbers: as easy as 1, 2,
# 3", 2011).
PHILOX_ROUNDS = tl.constexpr(7)


class Rows(NamedTuple):
    """A matrix in memory: where its row 0 is, and how far apart its rows and columns are."""

    pointer: Any
    stride: Any
    column_stride: Any


class Mask(NamedTuple):
    """A number for each query and key of one head: attn_mask or bias."""

    pointer: Any  # of the head
    rows: Any  # int64: where the row of each query begins, with a dimension of size 1 for the keys
    stride_n: Any


class Padding(NamedTuple):
    """key_padding of one batch row."""

    pointer: Any
    stride_n: Any


class Window(NamedTuple):
    """What a query may see by its position: keys from `left` before it to `right` after it, and those of the prefix."""

    left: Any
    right: Any
    prefix: Any


class Scores(NamedTuple):
    """What makes scores of the products <q, k>, besides attn_mask and bias.

    slope and distance_bias: one for all rows, or one each, with a dimension of size 1 for the keys.
    """

    scale: Any
    softcap: Any
    slope: Any
    distance_bias: Any
    reach: Any


class Dropout(NamedTuple):
    """Which probabilities are dropped: those whose 31 random bits are below the threshold."""

    seed: Any
    offset: Any
    head: Any  # batch * heads + head
    threshold: Any


class KeyTiles(NamedTuple):
    """The tiles of keys that a program visits: first those of a prefix, tested; then [start, full_start), tested;
    [full_start, full_end), all of whose keys are visible to all queries; and [full_end, end), tested.

    Of a tile in the tested ranges, the keys [first, end) exist and may be visible.
    """

    first: Any
    end: Any
    prefix_start: Any
    start: Any
    full_start: Any
    full_end: Any
    of_prefix: Any
    before: Any
    after: Any


@triton.jit
def clamped(x, bound):
    return tl.minimum(tl.maximum(x, -bound), bound)


@triton.jit
def offset_of_head(batch64, stride_b, head64, stride_h, ALIGNMENT: tl.constexpr):
    """Where a head of a batch row begins, in elements."""
    offset = batch64 * stride_b + head64 * stride_h
    if ALIGNMENT > 1:
        # The hint has to sit on the operation itself. Without it a head_dim of 40 is read by single elements.
        offset = tl.multiple_of(offset, ALIGNMENT)
    return offset


@triton.jit
def offset_of_row(row, stride, ALIGNMENT: tl.constexpr):
    """Where a row begins, in elements."""
    offset = tl.cast(row, tl.int64) * stride
    if ALIGNMENT > 1:
        offset = tl.multiple_of(offset, ALIGNMENT)
    return offset


@triton.jit
def load_rows(
    matrix,  # Rows
    start,  # the tile's first row
    rows,  # [ROWS] row numbers from there on
    row_is_valid,  # [ROWS]
    COLUMNS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    TEST_ROWS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """A [ROWS, BLOCK_COLUMNS] tile; invalid rows and the columns past COLUMNS are 0 and not read."""
    columns = tl.arange(0, BLOCK_COLUMNS)
    row_offsets = rows[:, None] * matrix.stride
    if ALIGNMENT > 1:
        row_offsets = tl.multiple_of(row_offsets, [ALIGNMENT, ALIGNMENT])
    first_row = matrix.pointer + offset_of_row(start, matrix.stride, ALIGNMENT)
    pointers = first_row + row_offsets + columns[None, :] * matrix.column_stride
    if COLUMNS == BLOCK_COLUMNS:
        tile = tl.load(pointers, mask=row_is_valid[:, None], other=0.0) if TEST_ROWS else tl.load(pointers)
    else:
        valid = (columns < COLUMNS)[None, :]
        if TEST_ROWS:
            valid = valid & row_is_valid[:, None]
        tile = tl.load(pointers, mask=valid, other=0.0)
    return to_compute(tile)


@triton.jit
def rows_of_mask(
    rows,  # of queries that all exist, with a dimension of size 1 for the keys
    stride_m,
    ALIGNMENT: tl.constexpr,
):
    offsets = rows.to(tl.int64) * stride_m
    if ALIGNMENT > 1:
        offsets = tl.multiple_of(offsets, [ALIGNMENT, ALIGNMENT])
    return offsets


@triton.jit
def _join_ranges(first_a, end_a, count_a, first_b, end_b, count_b):
    return tl.minimum(first_a, first_b), tl.maximum(end_a, end_b), count_a + count_b


@triton.jit
def visible_range(padding, seqlen_k, KEY_PADDING: tl.constexpr, SCAN_PADDING: tl.constexpr):
    """First and one past the last visible key of a batch row, and whether every key between them is visible."""
    first = 0
    end = seqlen_k
    gapless = True
    if KEY_PADDING == LENGTHS:
        end = tl.minimum(tl.maximum(tl.load(padding.pointer), 0), seqlen_k)
    elif KEY_PADDING == BOOL:
        if SCAN_PADDING:
            chunk = tl.arange(0, _SCAN_CHUNK)
            firsts = tl.full([_SCAN_CHUNK], 2147483647, tl.int32)
            ends = tl.zeros([_SCAN_CHUNK], tl.int32)
            counts = tl.zeros([_SCAN_CHUNK], tl.int32)
            for start in range(0, seqlen_k, _SCAN_CHUNK):
                keys = start + chunk
                places = padding.pointer + keys.to(tl.int64) * padding.stride_n
                visible = tl.load(places, mask=keys < seqlen_k, other=0) != 0
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
def key_tiles(
    first,  # the keys that are not padding
    end,
    gapless,
    first_position,  # of the program's queries among the keys
    last_position,
    window,  # Window
    BLOCK_N: tl.constexpr,
    HOW: tl.constexpr,
):
    """Which tiles of keys queries at these positions see."""
    unpadded_first = first
    unpadded_end = end
    full_end = end // BLOCK_N * BLOCK_N
    if HOW.has_right:
        end = tl.minimum(end, tl.maximum(last_position + window.right + 1, 0))
        full_end = tl.minimum(full_end, tl.maximum(first_position + window.right + 1, 0) // BLOCK_N * BLOCK_N)
    prefix_start = 0
    of_prefix = 0
    if HOW.has_prefix:
        prefix = tl.minimum(window.prefix, unpadded_end)
        end = tl.maximum(end, prefix)
        if not HOW.has_left:
            full_end = tl.maximum(full_end, prefix // BLOCK_N * BLOCK_N)
    full_first = first
    if HOW.has_left:
        first = tl.minimum(tl.maximum(first, first_position - window.left), end)
        full_first = tl.maximum(full_first, last_position - window.left)
    start = first // BLOCK_N * BLOCK_N
    full_start = tl.minimum(tl.cdiv(full_first, BLOCK_N), tl.cdiv(end, BLOCK_N)) * BLOCK_N
    if HOW.has_prefix and HOW.has_left:
        prefix_start = unpadded_first // BLOCK_N * BLOCK_N
        of_prefix = tl.maximum(tl.cdiv(prefix, BLOCK_N) - prefix_start // BLOCK_N, 0)
        after_prefix = prefix_start + of_prefix * BLOCK_N
        start = tl.maximum(start, after_prefix)
        full_start = tl.maximum(full_start, after_prefix)
        first = unpadded_first
    full_end = tl.maximum(full_end, full_start)
    if HOW.key_padding == BOOL:
        full_start = tl.where(gapless, full_start, start)
        full_end = tl.where(gapless, full_end, start)
    before = tl.maximum(full_start - start, 0) // BLOCK_N
    after = tl.cdiv(tl.maximum(end - full_end, 0), BLOCK_N)
    return KeyTiles(first, end, prefix_start, start, full_start, full_end, of_prefix, before, after)


@triton.jit
def number_of_tiles(tiles, BLOCK_N: tl.constexpr, TESTED: tl.constexpr):
    if TESTED:
        return tiles.of_prefix + tiles.before + tiles.after
    else:
        return (tiles.full_end - tiles.full_start) // BLOCK_N


@triton.jit
def start_of_tile(tiles, tile, BLOCK_N: tl.constexpr, TESTED: tl.constexpr, HOW: tl.constexpr):
    """The first key of a tile, counted among those that are tested or those that are not."""
    start_n = tiles.full_start + tile * BLOCK_N
    if TESTED:
        of_window = tile
        if HOW.has_prefix and HOW.has_left:
            of_window = tile - tiles.of_prefix
        after = tiles.full_end + (of_window - tiles.before) * BLOCK_N
        start_n = tl.where(of_window < tiles.before, tiles.start + of_window * BLOCK_N, after)
        if HOW.has_prefix and HOW.has_left:
            start_n = tl.where(of_window < 0, tiles.prefix_start + tile * BLOCK_N, start_n)
    return tl.multiple_of(start_n, BLOCK_N)


@triton.jit
def unpadded_keys(
    padding,  # Padding, bool
    keys,  # [BLOCK_N]
    may_be_read,  # [BLOCK_N]
):
    """Which of the keys that may be read are no padding: [BLOCK_N]."""
    return tl.load(padding.pointer + keys.to(tl.int64) * padding.stride_n, mask=may_be_read, other=0) != 0


@triton.jit
def _load_mask(mask, start_n, offsets_n, exists, PER_QUERY: tl.constexpr, TEST_KEYS: tl.constexpr):
    """[queries or 1, keys]: one row serves all queries when it does not depend on them."""
    pointers = mask.pointer + tl.cast(start_n, tl.int64) * mask.stride_n + offsets_n * mask.stride_n
    if PER_QUERY:
        pointers = pointers + mask.rows
    return tl.load(pointers, mask=exists, other=0) if TEST_KEYS else tl.load(pointers)


@triton.jit
def masked_scores(
    products,  # <q_i, k_j>: [queries, keys], or [keys, queries]
    positions,  # of the queries among the keys, with a dimension of size 1 for the keys
    start_n,  # first key of the tile
    keys,  # with a dimension of size 1 for the queries, as the next three
    offsets_n,  # keys - start_n, in 64 bits where that is needed
    exists,  # keys that attn_mask and bias may be read for
    visible,  # keys that exist and are no padding
    window,  # Window
    mask,  # Mask, as the next
    bias,
    scoring,  # Scores
    TEST_POSITIONS: tl.constexpr,
    TEST_KEYS: tl.constexpr,
    HOW: tl.constexpr,
):
    """Scores with -inf for what is hidden, and the derivative of the capped ones by the uncapped (or 1).

    In natural units where something is done to the products (`HOW.natural`), else the products as they came. Without
    TEST_POSITIONS all queries see all keys as far as positions go; without TEST_KEYS all keys exist and are visible.
    """
    scores = products
    slope_of_cap = 1.0
    if HOW.bias_before_scale:
        bias_tile = _load_mask(bias, start_n, offsets_n, exists, HOW.bias_per_query, TEST_KEYS)
        scores += to_compute(bias_tile).to(tl.float32)
    if HOW.natural:
        scores = scores * scoring.scale
    if HOW.softcap:
        capped = tanh(scores / scoring.softcap)
        slope_of_cap = 1.0 - capped * capped
        scores = scoring.softcap * capped
    if HOW.alibi or HOW.distance_bias:
        distance = keys - positions
        if HOW.alibi:
            scores -= scoring.slope * tl.abs(distance).to(tl.float32)
        if HOW.distance_bias:
            scores += tl.load(scoring.distance_bias + (clamped(distance, scoring.reach) + scoring.reach))
    if HOW.bias != ABSENT and not HOW.bias_before_scale:
        bias_tile = _load_mask(bias, start_n, offsets_n, exists, HOW.bias_per_query, TEST_KEYS)
        scores += to_compute(bias_tile).to(tl.float32)
    if TEST_POSITIONS and (HOW.has_left or HOW.has_right):
        seen = keys >= 0
        if HOW.has_right:
            seen = keys <= positions + window.right
        if HOW.has_left:
            seen = seen & (keys >= positions - window.left)
        if HOW.has_prefix:
            seen = seen | (keys < window.prefix)
        visible = visible & seen
    if HOW.mask != ABSENT:
        mask_tile = _load_mask(mask, start_n, offsets_n, exists, HOW.mask_per_query, TEST_KEYS)
        visible = visible & ((mask_tile == 0) if HOW.mask == HIDES else (mask_tile != 0))
    if TEST_POSITIONS or TEST_KEYS or HOW.mask != ABSENT:
        scores = tl.where(visible, scores, float("-inf"))
    return scores, slope_of_cap


@triton.jit
def is_kept(
    dropout,  # Dropout
    rows,  # [BLOCK_M] numbers of the queries
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] bool: which probabilities dropout leaves.

    Word j % 4 of Philox's block at (j / 4, i, batch * heads + head, offset), under the key `seed`, belongs to query i
    and key j, whatever the tiles are.
    """
    quads = start_n // 4 + tl.arange(0, BLOCK_N // 4)
    counter_j = tl.broadcast_to(quads[None, :], [BLOCK_M, BLOCK_N // 4])
    counter_i = tl.broadcast_to(rows[:, None], [BLOCK_M, BLOCK_N // 4])
    head = tl.zeros_like(counter_j) + dropout.head
    offset = tl.zeros_like(counter_j) + dropout.offset.to(tl.int32)
    word_0, word_1, word_2, word_3 = tl.philox(dropout.seed, counter_j, counter_i, head, offset, PHILOX_ROUNDS)
    kept_0 = (word_0 >> 1).to(tl.int32) >= dropout.threshold
    kept_1 = (word_1 >> 1).to(tl.int32) >= dropout.threshold
    kept_2 = (word_2 >> 1).to(tl.int32) >= dropout.threshold
    kept_3 = (word_3 >> 1).to(tl.int32) >= dropout.threshold
    return tl.join(tl.join(kept_0, kept_2), tl.join(kept_1, kept_3)).reshape([BLOCK_M, BLOCK_N])
