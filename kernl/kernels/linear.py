r"""Linear layers: output_i = activation(input @ weight_i^T + bias_i) for one to four weights, in one launch.

    input [M, K], weight_i [N_i, K], bias_i [N_i], output_i [M, N_i]; fp32 accumulation, bias and activation in fp32.

Floor: 2 M K sum(N_i) flops; bytes of the weights (few rows) or of input and outputs (many rows). Three regimes:

`kernl_linear_tiles`, few rows. The weights are read once and the time is latency: the launch, one trip to memory, a
    chain of dependent matrix instructions, the store. So: narrow tiles, enough of them to fill the chip; most of K in
    flight at once; the weights of a program are pulled into L2 before it waits for the kernel that computes its
    input; K_GROUPS warps work on different parts of K side by side (a batched product, summed at the end), since one
    warp would have to wait for 48 products in a row at K = 768. Where N is so small that the chip does not fill,
    SPLIT_K programs share a tile: each writes its fp32 partial sum, the last to arrive (an atomic counter) adds all
    of them in fixed order, so that the result is the same every time, and sets the counter back to zero for the next
    launch. The same kernel with large tiles serves GPUs without a tensor memory accelerator.

`kernl_linear_persistent`, many rows (Hopper and newer). As many programs as the chip holds, each walking over output
    tiles in an order that keeps the operands in L2; operands arrive through tensor descriptors; the copies for the
    next tile are under way while this one's bias and activation are computed, and with two programs an SM the products
    of one hide the epilogue of the other.

`kernl_linear_activation`, after a product that cuBLAS computed.

Gated layers, output = activation(input @ gate^T + gate_bias) * (input @ up^T + up_bias), [M, N]. Written out, the two
products are stored, read again, and their product is stored: 5 M N elements, of which only the last M N must move.
`kernl_linear_tiles` lets the columns of a tile alternate between the two weights, so that what belongs together ends in
one thread, and stores M N elements in one launch. After the persistent kernel or cuBLAS, `kernl_linear_activation` also
multiplies: one more launch and all 5 M N, instead of the 7 M N of an activation and a product of their own.

Weights of one launch are read through their own pointers, so merging them copies nothing. Which weight a program works
on depends on its tile alone. The number of rows is no part of what is compiled; the configuration, K and N are. Tile
order and split-K follow the public descriptions in the Triton tutorials and in NVIDIA's CUTLASS documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernl.kernels.activation import activate
from kernl.kernels.common import (
    TRITON_TYPES,
    AotCase,
    add_product,
    count_launch,
    let_next_kernel_start,
    to_compute,
    to_storage,
    wait_for_previous_kernel,
)

MAX_MERGED = 4
"""Weights that one launch can take."""


@triton.jit
def pick(index, value0, value1, value2, value3, COUNT: tl.constexpr):
    """The pointer or descriptor number `index` of COUNT."""
    value = value0
    if COUNT > 1:
        if index == 1:
            value = value1
    if COUNT > 2:
        if index == 2:
            value = value2
    if COUNT > 3:
        if index == 3:
            value = value3
    return value


@triton.jit
def pick_number(index, value0, value1, value2, value3, COUNT: tl.constexpr):
    """The same for sizes and strides, any of which Triton may have turned into a constant."""
    value = value0
    if COUNT > 1:
        value = tl.where(index == 1, value1, value)
    if COUNT > 2:
        value = tl.where(index == 2, value2, value)
    if COUNT > 3:
        value = tl.where(index == 3, value3, value)
    return value


@triton.jit
def count_column_tiles(N0, N1, N2, N3, BLOCK_N: tl.constexpr, COUNT: tl.constexpr):
    """Column tiles of all outputs together. No tile crosses from one output into the next."""
    tiles = tl.cdiv(N0, BLOCK_N)
    if COUNT > 1:
        tiles += tl.cdiv(N1, BLOCK_N)
    if COUNT > 2:
        tiles += tl.cdiv(N2, BLOCK_N)
    if COUNT > 3:
        tiles += tl.cdiv(N3, BLOCK_N)
    return tiles


@triton.jit
def place_of_tile(
    tile, tiles_m, tiles_n, N0, N1, N2, BLOCK_N: tl.constexpr, COUNT: tl.constexpr, GROUP_M: tl.constexpr
):
    """(output, row tile, column tile in that output) of a tile number.

    GROUP_M row tiles run through all columns before the next ones start: programs at work at the same time then share
    few rows and few columns, which stay in L2.
    """
    tiles_in_group = GROUP_M * tiles_n
    first_m = tile // tiles_in_group * GROUP_M
    rows_in_group = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + tile % tiles_in_group % rows_in_group
    tile_n = tile % tiles_in_group // rows_in_group
    which = tile_n * 0
    if COUNT > 1:
        start1 = tl.cdiv(N0, BLOCK_N)
        start = tl.where(tile_n >= start1, start1, 0)
        which = tl.where(tile_n >= start1, 1, 0)
        if COUNT > 2:
            start2 = start1 + tl.cdiv(N1, BLOCK_N)
            start = tl.where(tile_n >= start2, start2, start)
            which = tl.where(tile_n >= start2, 2, which)
            if COUNT > 3:
                start3 = start2 + tl.cdiv(N2, BLOCK_N)
                start = tl.where(tile_n >= start3, start3, start)
                which = tl.where(tile_n >= start3, 3, which)
        tile_n -= start
    return which, tile_m, tile_n


@triton.jit
def load_bias(bias_ptr, columns, N, which, BIAS_MASK: tl.constexpr, COUNT: tl.constexpr):
    """Bias of some columns of output `which`, fp32. Bit i of BIAS_MASK: output i has a bias, the others get zeros."""
    if BIAS_MASK != (1 << COUNT) - 1:
        N = N * ((BIAS_MASK >> which) & 1)
    return tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)


@triton.jit
def prefetch_weight(weight_rows, first_k, end_k, K_SPAN: tl.constexpr):
    """Start copying elements first_k:end_k of these rows of a weight, each dense and given by its address, to L2."""
    LINE: tl.constexpr = 1024 // weight_rows.dtype.element_ty.primitive_bitwidth
    # [BLOCK_N, K_SPAN / LINE], one address a cache line; those past the end are the last element's line once more.
    k = tl.minimum(first_k + tl.arange(0, K_SPAN // LINE) * LINE, end_k - 1)
    addresses = weight_rows[:, None] + k[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def kernl_linear_tiles(
    input_ptr,
    weight0_ptr,
    weight1_ptr,
    weight2_ptr,
    weight3_ptr,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    bias3_ptr,
    output0_ptr,
    output1_ptr,
    output2_ptr,
    output3_ptr,
    partial_ptr,  # fp32 [SPLIT_K, tiles, BLOCK_M, BLOCK_N]
    counter_ptr,  # int32 [tiles], zero before and after
    M,
    N0,
    N1,
    N2,
    N3,
    K,
    stride_input_m,
    stride_weight0_n,
    stride_weight1_n,
    stride_weight2_n,
    stride_weight3_n,
    stride_weight_k,
    gap: tl.int64,  # GATED: from weight 0 to weight 1, in elements. No choice of pointers, which hides their alignment
    COUNT: tl.constexpr,
    BIAS_MASK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,  # N0 columns alternate between two weights, output0 has half as many; COUNT is 1
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K_GROUPS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    PREFETCH_SPAN: tl.constexpr,  # elements of K to prefetch before the wait, a power of two; 0: none
    USE_PDL: tl.constexpr,
):
    let_next_kernel_start(USE_PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = count_column_tiles(N0, N1, N2, N3, BLOCK_N, COUNT)
    which, tile_m, tile_n = place_of_tile(tile, tiles_m, tiles_n, N0, N1, N2, BLOCK_N, COUNT, GROUP_M)
    weight_ptr = pick(which, weight0_ptr, weight1_ptr, weight2_ptr, weight3_ptr, COUNT)
    output_ptr = pick(which, output0_ptr, output1_ptr, output2_ptr, output3_ptr, COUNT)
    N = pick_number(which, N0, N1, N2, N3, COUNT)
    stride_weight_n = pick_number(which, stride_weight0_n, stride_weight1_n, stride_weight2_n, stride_weight3_n, COUNT)

    blocks_k = tl.cdiv(K, BLOCK_K)
    blocks_per_split = tl.cdiv(blocks_k, SPLIT_K)
    first_block = split * blocks_per_split
    end_block = tl.minimum(first_block + blocks_per_split, blocks_k)

    # Columns past the end read the last one again, so that their load needs no mask. Rows past the end are not read:
    # with few rows most of a tile, in every program, would ask for one row, and wait in line for it.
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    wide_rows = rows.to(tl.int64)
    safe_columns = tl.minimum(columns, N - 1).to(tl.int64)
    if GATED:
        pair = safe_columns // 2
        is_up = safe_columns % 2
        weight_rows = weight_ptr + (pair * stride_weight_n + is_up * gap)
    else:
        weight_rows = weight_ptr + safe_columns * stride_weight_n  # [BLOCK_N]

    if USE_PDL and PREFETCH_SPAN > 0:
        prefetch_weight(weight_rows, first_block * BLOCK_K, tl.minimum(end_block * BLOCK_K, K), PREFETCH_SPAN)
    wait_for_previous_kernel(USE_PDL)
    if BIAS_MASK != 0:
        # Asked for now, used at the end.
        if GATED:
            bias = tl.load(tl.where(is_up == 0, bias0_ptr + pair, bias1_ptr + pair)).to(tl.float32)
        else:
            bias_ptr = pick(which, bias0_ptr, bias1_ptr, bias2_ptr, bias3_ptr, COUNT)
            bias = load_bias(bias_ptr, columns, N, which, BIAS_MASK, COUNT)

    if K_GROUPS == 1:
        k = tl.arange(0, BLOCK_K)
        k_input = k[None, :]  # [1, BLOCK_K]
        k_weight = k[:, None]  # [BLOCK_K, 1]
        row_exists = (rows < M)[:, None]
        input_ptrs = input_ptr + wide_rows[:, None] * stride_input_m + k_input
        weight_ptrs = weight_rows[None, :] + k_weight * stride_weight_k
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    else:
        PART: tl.constexpr = BLOCK_K // K_GROUPS
        group = tl.arange(0, K_GROUPS)[:, None, None] * PART
        k_input = group + tl.arange(0, PART)[None, None, :]  # [K_GROUPS, 1, PART]
        k_weight = group + tl.arange(0, PART)[None, :, None]  # [K_GROUPS, PART, 1]
        row_exists = (rows < M)[None, :, None]
        input_ptrs = input_ptr + wide_rows[None, :, None] * stride_input_m + k_input
        weight_ptrs = weight_rows[None, None, :] + k_weight * stride_weight_k
        accumulator = tl.zeros((K_GROUPS, BLOCK_M, BLOCK_N), dtype=tl.float32)
    input_ptrs += first_block * BLOCK_K
    weight_ptrs += (first_block * BLOCK_K).to(tl.int64) * stride_weight_k

    for block in range(first_block, end_block):
        if EVEN_K:
            x = tl.load(input_ptrs, mask=row_exists, other=0.0)
            w = tl.load(weight_ptrs)
        else:
            left = K - block * BLOCK_K
            x = tl.load(input_ptrs, mask=row_exists & (k_input < left), other=0.0)
            w = tl.load(weight_ptrs, mask=k_weight < left, other=0.0)
        accumulator = add_product(accumulator, to_compute(x), to_compute(w), INPUT_PRECISION)
        input_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K * stride_weight_k
    if K_GROUPS > 1:
        accumulator = tl.sum(accumulator, axis=0)  # [BLOCK_M, BLOCK_N]

    if SPLIT_K > 1:
        tiles = tiles_m * tiles_n
        in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tile_ptrs = partial_ptr + tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + in_tile
        stride_split = tiles.to(tl.int64) * (BLOCK_M * BLOCK_N)
        tl.store(tile_ptrs + split * stride_split, accumulator)
        # All threads have stored before one of them announces it; acquire and release order the rest.
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel")
        if arrived != SPLIT_K - 1:
            return
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for part in tl.static_range(SPLIT_K):
            accumulator += tl.load(tile_ptrs + part * stride_split, cache_modifier=".cg")
        tl.store(counter_ptr + tile, 0)

    if BIAS_MASK != 0:
        accumulator += bias[None, :]
    FULL_PRECISION: tl.constexpr = output0_ptr.dtype.element_ty == tl.float32
    if GATED:
        gate, up = tl.split(tl.reshape(accumulator, (BLOCK_M, BLOCK_N // 2, 2)))
        result = activate(gate, ACTIVATION, FULL_PRECISION) * up  # [BLOCK_M, BLOCK_N / 2]
        N = N // 2
        columns = tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    else:
        result = activate(accumulator, ACTIVATION, FULL_PRECISION)
    output_ptrs = output_ptr + wide_rows[:, None] * N + columns[None, :]
    mask = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(output_ptrs, to_storage(result, output0_ptr.dtype.element_ty), mask=mask)


@triton.jit
def halve_columns(x):
    """[BLOCK_M, 2 n] -> the left and the right [BLOCK_M, n]."""
    x = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(x, (0, 2, 1)))


@triton.jit
def finish_columns(
    accumulator,  # [BLOCK_M, a power of two x STORE_N]
    output_desc,
    bias_ptr,
    row,
    column,
    N,
    which,
    BIAS_MASK: tl.constexpr,
    COUNT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STORE_N: tl.constexpr,
):
    """Bias, activation and store, STORE_N columns at a time: fewer registers and a small staging buffer."""
    WIDTH: tl.constexpr = accumulator.shape[1]
    if WIDTH > STORE_N:
        left, right = halve_columns(accumulator)
        finish_columns(left, output_desc, bias_ptr, row, column, N, which, BIAS_MASK, COUNT, ACTIVATION, STORE_N)
        finish_columns(
            right, output_desc, bias_ptr, row, column + WIDTH // 2, N, which, BIAS_MASK, COUNT, ACTIVATION, STORE_N
        )
    else:
        if BIAS_MASK != 0:
            accumulator += load_bias(bias_ptr, column + tl.arange(0, WIDTH), N, which, BIAS_MASK, COUNT)[None, :]
        result = activate(accumulator, ACTIVATION, output_desc.dtype == tl.float32)
        output_desc.store([row, column], to_storage(result, output_desc.dtype))


@triton.jit(do_not_specialize=["M"])
def kernl_linear_persistent(
    input_desc,  # [M, K] in blocks of [BLOCK_M, BLOCK_K]
    weight0_desc,  # [N, K] in blocks of [BLOCK_N, BLOCK_K]
    weight1_desc,
    weight2_desc,
    weight3_desc,
    output0_desc,  # [M, N] in blocks of [BLOCK_M, STORE_N]
    output1_desc,
    output2_desc,
    output3_desc,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    bias3_ptr,
    M,
    N0,
    N1,
    N2,
    N3,
    K,
    COUNT: tl.constexpr,
    BIAS_MASK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STORE_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    let_next_kernel_start(USE_PDL)
    wait_for_previous_kernel(USE_PDL)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = count_column_tiles(N0, N1, N2, N3, BLOCK_N, COUNT)
    blocks_k = tl.cdiv(K, BLOCK_K)
    tl.assume(blocks_k > 0)  # or the compiler keeps a copy of the epilogue for products over nothing
    # Flattened, the two loops become one, whose pipeline runs on from tile to tile.
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        which, tile_m, tile_n = place_of_tile(tile, tiles_m, tiles_n, N0, N1, N2, BLOCK_N, COUNT, GROUP_M)
        row = tile_m * BLOCK_M
        column = tile_n * BLOCK_N
        weight_desc = pick(which, weight0_desc, weight1_desc, weight2_desc, weight3_desc, COUNT)
        accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for block in range(blocks_k):
            x = to_compute(input_desc.load([row, block * BLOCK_K]))  # [BLOCK_M, BLOCK_K]
            w = to_compute(weight_desc.load([column, block * BLOCK_K]))  # [BLOCK_N, BLOCK_K]
            accumulator = tl.dot(x, w.T, accumulator)

        N = pick_number(which, N0, N1, N2, N3, COUNT)
        output_desc = pick(which, output0_desc, output1_desc, output2_desc, output3_desc, COUNT)
        bias_ptr = bias0_ptr
        if BIAS_MASK != 0:
            bias_ptr = pick(which, bias0_ptr, bias1_ptr, bias2_ptr, bias3_ptr, COUNT)
        finish_columns(accumulator, output_desc, bias_ptr, row, column, N, which, BIAS_MASK, COUNT, ACTIVATION, STORE_N)


@triton.jit(do_not_specialize=["chunks"])
def kernl_linear_activation(
    values_ptr,
    multiplier_ptr,
    chunks,
    CHUNK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Apply an activation in place to chunks * CHUNK values, and multiply by as many others unless these are None.

    CHUNK tells the compiler what divides the number of values, which is what lets it load several at once.
    """
    let_next_kernel_start(USE_PDL)
    wait_for_previous_kernel(USE_PDL)
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < chunks.to(tl.int64) * CHUNK
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    values = to_compute(tl.load(values_ptr + offsets, mask=mask, other=0.0)).to(tl.float32)
    result = activate(values, ACTIVATION, dtype == tl.float32)
    if multiplier_ptr is not None:
        result *= to_compute(tl.load(multiplier_ptr + offsets, mask=mask, other=0.0)).to(tl.float32)
    tl.store(values_ptr + offsets, to_storage(result, dtype), mask=mask)


@dataclass(frozen=True)
class LinearConfig:
    """One way to run a linear layer with the kernels of this file.

    persistent: `kernl_linear_persistent`, else `kernl_linear_tiles`.
    programs_per_sm (persistent): how many share an SM.
    store_n (persistent): columns finished and stored at a time. Few need less shared memory; a store waits for the one
    before it to have left the staging buffer.
    k_groups, split_k (tiles): parts of K worked on side by side in one program, and by different programs.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    persistent: bool = False
    programs_per_sm: int = 1
    store_n: int = 64
    k_groups: int = 1
    split_k: int = 1

    @property
    def name(self) -> str:
        """Readable and unique: what the tuning tables and reports call it."""
        text = f"{'persistent' if self.persistent else 'tiles'}_{self.block_m}x{self.block_n}x{self.block_k}"
        text += f"_w{self.num_warps}_s{self.num_stages}"
        text += f"_groups{self.k_groups}" if self.k_groups > 1 else ""
        text += f"_split{self.split_k}" if self.split_k > 1 else ""
        text += f"_store{self.store_n}" if self.store_n != 64 else ""
        return text + (f"_{self.programs_per_sm}per_sm" if self.programs_per_sm > 1 else "")

    def column_tiles(self, columns: Sequence[int]) -> int:
        return sum(-(-n // self.block_n) for n in columns)

    def tiles(self, rows: int, columns: Sequence[int]) -> int:
        """Output tiles of the whole problem: the counters and partial sums that split_k needs are that many."""
        return -(-rows // self.block_m) * self.column_tiles(columns)


_GROUP_M = 8
_ANY = 1 << 62  # of rows
_MAX_PREFETCH_SPAN = 8192

# Hopper and newer: what was the fastest, or within a few percent of it, for some width of transformer on an H200. Each
# row class names few, since trying one costs a compilation.
_T16X16 = LinearConfig(16, 16, 256, 4, 4, k_groups=4)
_T16X32 = LinearConfig(16, 32, 256, 4, 4, k_groups=4)
_T64X32 = LinearConfig(64, 32, 128, 4, 4)
_T64X64 = LinearConfig(64, 64, 128, 4, 4)
_P64X64 = LinearConfig(64, 64, 128, 4, 5, persistent=True)
_P64X128 = LinearConfig(64, 128, 64, 4, 4, persistent=True, programs_per_sm=2)
_P128X128 = LinearConfig(128, 128, 64, 4, 3, persistent=True, programs_per_sm=2)
_P128X128_ALONE = LinearConfig(128, 128, 64, 8, 5, persistent=True, store_n=128)
_P128X256 = LinearConfig(128, 256, 64, 8, 3, persistent=True, store_n=256)
_HOPPER = {
    16: (_T16X16, _T16X32),
    32: (_T16X32, _T64X32),
    64: (_T64X32, replace(_T64X32, split_k=4)),
    128: (_T64X32, _T64X64, replace(_T64X64, split_k=2)),
    256: (_T64X32, _T64X64, _P64X64, _P64X128),
    512: (_T64X32, _T64X64, _P64X64, _P64X128),
    2048: (_P64X64, _P64X128, _P128X128, _P128X128_ALONE),
    _ANY: (_P128X128, _P128X256),
}
# Ampere and Ada, and operands a tensor descriptor cannot describe.
_POINTERS = {
    64: (
        LinearConfig(16, 16, 256, 4, 3, k_groups=4),
        LinearConfig(16, 32, 256, 4, 3, k_groups=4),
        LinearConfig(32, 32, 128, 4, 4),
        LinearConfig(32, 32, 128, 4, 4, split_k=4),
    ),
    256: (LinearConfig(64, 32, 128, 4, 4), LinearConfig(64, 64, 64, 4, 4), LinearConfig(64, 128, 64, 8, 3)),
    _ANY: (
        LinearConfig(64, 64, 64, 4, 3),
        LinearConfig(64, 128, 64, 8, 3),
        LinearConfig(128, 128, 32, 8, 4),
        LinearConfig(128, 128, 64, 8, 3),
    ),
}
_FLOAT32 = (LinearConfig(16, 32, 64, 4, 3), LinearConfig(16, 32, 64, 4, 3, split_k=4))


def configs(arch: int, rows: int, dtype: torch.dtype, *, tma: bool) -> tuple[LinearConfig, ...]:
    """Configurations worth trying for that many rows on sm_{arch}, the expected best not necessarily first.

    tma: operands fit tensor descriptors (see `fits_descriptors`). None for fp32 with many rows: cuBLAS does those.
    """
    if dtype == torch.float32:
        return _FLOAT32 if rows <= 32 else ()
    classes = _HOPPER if arch >= 90 and (tma or rows <= 64) else _POINTERS
    return next(offered for most, offered in classes.items() if rows <= most)


def fits_descriptors(input: torch.Tensor, weights: Sequence[torch.Tensor]) -> bool:
    """Whether tensor descriptors can describe the operands: unit last stride, rows and bases aligned to 16 bytes."""
    step = 16 // input.element_size()
    return all(
        operand.stride(1) == 1
        and operand.stride(0) >= operand.shape[1]
        and operand.stride(0) % step == 0
        and operand.data_ptr() % 16 == 0
        for operand in (input, *weights)
    ) and all(weight.shape[0] % step == 0 for weight in weights)


def padded(values: Sequence[object]) -> list[object]:
    """One value for each of MAX_MERGED weights, None for those that are not there."""
    return [*values, *([None] * (MAX_MERGED - len(values)))]


def bias_mask_of(biases: Sequence[torch.Tensor | None]) -> int:
    """A bit for each weight that has a bias."""
    return sum(1 << index for index, bias in enumerate(biases) if bias is not None)


def gap_in_elements(weights: Sequence[torch.Tensor]) -> int:
    """How far the second weight lies behind (or before) the first."""
    return (weights[1].data_ptr() - weights[0].data_ptr()) // weights[0].element_size()


def launch_tiles(
    config: LinearConfig,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    activation: str,
    *,
    gated: bool = False,
    allow_tf32: bool = False,
    counters: torch.Tensor | None = None,
    use_pdl: bool = False,
) -> None:
    """outputs[i][M, N_i] = activation(input[M, K] @ weights[i][N_i, K]^T + biases[i]) through pointers.

    gated: the two weights give one output, activation(input @ weights[0]^T) * (input @ weights[1]^T), each product with
        its bias; both have one or none does. The weights have the same strides.
    input: unit last stride. weights: any strides, the same stride along K for all. outputs: contiguous.
    counters: int32 zeros, one for each tile, needed when config.split_k > 1; not to be used by two launches at a time.
    """
    rows, inner = input.shape
    columns = [2 * weights[0].shape[0]] if gated else [weight.shape[0] for weight in weights]
    tiles = config.tiles(rows, columns)
    partial = None
    if config.split_k > 1:
        if counters is None or counters.numel() < tiles:
            raise ValueError(f"split_k={config.split_k} needs counters for {tiles} tiles")
        shape = (config.split_k, tiles, config.block_m, config.block_n)
        partial = torch.empty(shape, dtype=torch.float32, device=input.device)
    stride_k = weights[0].stride(1)
    blocks = -(-inner // config.block_k)
    span = -(-blocks // config.split_k) * config.block_k
    span = 1 << (span - 1).bit_length()
    fallback = next((bias for bias in biases if bias is not None), None)  # a valid address behind a masked load
    count_launch("linear_tiles")
    kernl_linear_tiles[(tiles, config.split_k)](
        input,
        *padded(weights),
        *padded([fallback if bias is None else bias for bias in biases]),
        *padded(outputs),
        partial,
        counters if config.split_k > 1 else None,
        rows,
        *padded(columns),
        inner,
        input.stride(0) if rows > 1 else inner,  # the stride of one row may be anything, and is never followed
        *padded([weight.stride(0) for weight in weights]),
        stride_k,
        gap_in_elements(weights) if gated else 0,
        COUNT=len(columns),
        BIAS_MASK=bias_mask_of(biases),
        ACTIVATION=activation,
        GATED=gated,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        K_GROUPS=config.k_groups,
        SPLIT_K=config.split_k,
        EVEN_K=inner % config.block_k == 0,
        GROUP_M=_GROUP_M,
        INPUT_PRECISION="tf32" if allow_tf32 else "ieee",
        PREFETCH_SPAN=span if use_pdl and stride_k == 1 and span <= _MAX_PREFETCH_SPAN else 0,
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if use_pdl else {}),
    )


def launch_persistent(
    config: LinearConfig,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    activation: str,
    *,
    sm_count: int,
    use_pdl: bool = False,
) -> None:
    """The same through tensor descriptors, for 16-bit operands that `fits_descriptors` accepts."""
    rows, inner = input.shape
    columns = [weight.shape[0] for weight in weights]
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k

    def described(tensors: Sequence[torch.Tensor], block: list[int]) -> list[object]:
        return padded([TensorDescriptor(t, list(t.shape), list(t.stride()), block) for t in tensors])

    fallback = next((bias for bias in biases if bias is not None), None)
    programs = min(config.tiles(rows, columns), sm_count * config.programs_per_sm)
    count_launch("linear_persistent")
    kernl_linear_persistent[(programs,)](
        described([input], [block_m, block_k])[0],
        *described(weights, [block_n, block_k]),
        *described(outputs, [block_m, config.store_n]),
        *padded([fallback if bias is None else bias for bias in biases]),
        rows,
        *padded(columns),
        inner,
        COUNT=len(weights),
        BIAS_MASK=bias_mask_of(biases),
        ACTIVATION=activation,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STORE_N=config.store_n,
        GROUP_M=_GROUP_M,
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if use_pdl else {}),
    )


_ACTIVATION_BLOCK = 2048


def launch_activation(
    values: torch.Tensor, activation: str, *, multiplier: torch.Tensor | None = None, use_pdl: bool = False
) -> None:
    """values = activation(values) (* multiplier), in place; both contiguous, of one shape and dtype."""
    elements = values.numel()
    if elements == 0:
        return
    chunk = activation_chunk(values.shape[-1])
    count_launch("linear_activation")
    kernl_linear_activation[(-(-elements // _ACTIVATION_BLOCK),)](
        values,
        multiplier,
        elements // chunk,
        CHUNK=chunk,
        ACTIVATION=activation,
        BLOCK=_ACTIVATION_BLOCK,
        USE_PDL=use_pdl,
        num_warps=8,
        **({"launch_pdl": True} if use_pdl else {}),
    )


def activation_chunk(columns: int) -> int:
    """What the activation kernel is told to divide the number of values, from their last size alone."""
    return 16 if columns % 16 == 0 else 1


def _tiles_case(
    config: LinearConfig,
    dtype: torch.dtype,
    activation: str,
    count: int,
    pdl: bool,
    *,
    inner: int = 4096,
    gated: bool = False,
) -> AotCase:
    aligned = inner % 16 == 0
    pointer = "*" + TRITON_TYPES[dtype]
    signature = {"input_ptr": pointer, "M": "i32", "K": "i32", "stride_input_m": "i32", "gap": "i64"}
    constexprs: dict[str, object] = {"stride_weight_k": 1}
    for index in range(MAX_MERGED):
        for name, kind in (
            (f"weight{index}_ptr", pointer),
            (f"bias{index}_ptr", pointer),
            (f"output{index}_ptr", pointer),
            (f"N{index}", "i32"),
            (f"stride_weight{index}_n", "i32"),
        ):
            if index < count and not (gated and name in ("output1_ptr", "N1", "weight1_ptr", "stride_weight1_n")):
                signature[name] = kind
            else:
                constexprs[name] = None
    if config.split_k > 1:
        signature |= {"partial_ptr": "*fp32", "counter_ptr": "*i32"}
    else:
        constexprs |= {"partial_ptr": None, "counter_ptr": None}
    constexprs |= {
        "COUNT": 1 if gated else count,
        "BIAS_MASK": 0 if gated else (1 << count) - 1,
        "ACTIVATION": activation,
        "GATED": gated,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "K_GROUPS": config.k_groups,
        "SPLIT_K": config.split_k,
        "EVEN_K": inner % config.block_k == 0,
        "GROUP_M": _GROUP_M,
        "INPUT_PRECISION": "ieee",
        "PREFETCH_SPAN": 1024 if pdl else 0,
        "USE_PDL": pdl,
    }
    divisible = (
        "K",
        "stride_input_m",
        "gap",
        *(f"N{i}" for i in range(count)),
        *(f"stride_weight{i}_n" for i in range(count)),
    )
    name = f"{config.name}-{TRITON_TYPES[dtype]}-{'gated_' if gated else ''}{activation}-{count}" + (
        "" if inner == 4096 else f"-K{inner}"
    )
    return AotCase(
        name,
        kernl_linear_tiles,
        signature,
        constexprs,
        config.num_warps,
        config.num_stages,
        divisible_by_16=divisible if aligned else (),
        options={"launch_pdl": True} if pdl else {},
    )


def _persistent_case(config: LinearConfig, dtype: torch.dtype, activation: str, count: int) -> AotCase:
    element = TRITON_TYPES[dtype]

    def descriptor(rows: int, columns: int) -> str:
        return f"tensordesc<{element}[{rows},{columns}]>"

    store_n = config.store_n
    signature = {"input_desc": descriptor(config.block_m, config.block_k), "M": "i32", "K": "i32"}
    constexprs: dict[str, object] = {}
    for index in range(MAX_MERGED):
        for name, kind in (
            (f"weight{index}_desc", descriptor(config.block_n, config.block_k)),
            (f"output{index}_desc", descriptor(config.block_m, store_n)),
            (f"bias{index}_ptr", "*" + element),
            (f"N{index}", "i32"),
        ):
            if index < count:
                signature[name] = kind
            else:
                constexprs[name] = None
    constexprs |= {
        "COUNT": count,
        "BIAS_MASK": (1 << count) - 1,
        "ACTIVATION": activation,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "STORE_N": store_n,
        "GROUP_M": _GROUP_M,
        "USE_PDL": True,
    }
    return AotCase(
        f"{config.name}-{element}-{activation}-{count}",
        kernl_linear_persistent,
        signature,
        constexprs,
        config.num_warps,
        config.num_stages,
        divisible_by_16=("K", *(f"N{i}" for i in range(count))),
        options={"launch_pdl": True},
    )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """What the op compiles on sm_{arch}: every configuration, as a GELU layer and as merged query, key and value."""
    if arch < 80:
        return
    hopper = arch >= 90
    seen = set()
    for rows in (16, 32, 64, 128, 256, 512, 2048, 16384):
        for config in configs(arch, rows, torch.float16, tma=True):
            for activation, count in (("gelu", 1), ("none", 3)):
                case = (
                    _persistent_case(config, torch.float16, activation, count)
                    if config.persistent
                    else _tiles_case(config, torch.float16, activation, count, hopper)
                )
                if case.name not in seen:
                    seen.add(case.name)
                    yield case
    for config in configs(arch, 16, torch.float32, tma=False):
        yield _tiles_case(config, torch.float32, "gelu", 1, hopper)
    few = configs(arch, 16, torch.float16, tma=False)[0]
    yield _tiles_case(few, torch.bfloat16, "tanh", 1, hopper)
    yield _tiles_case(few, torch.float16, "silu", 1, hopper, inner=4097)
    for config in configs(arch, 16, torch.float16, tma=False):
        if 768 % config.block_k:
            yield _tiles_case(config, torch.float16, "gelu", 1, hopper, inner=768)
    # A gated layer keeps two results where others keep one: the smallest, the largest, and one that splits K.
    offered = (config for rows in (16, 64, 512) for config in configs(arch, rows, torch.float16, tma=True))
    gated = [config for config in offered if not config.persistent]
    for config in (gated[0], next(config for config in gated if config.split_k > 1), gated[-1]):
        yield _tiles_case(config, torch.float16, "silu", 2, hopper, gated=True)
    for dtype in (torch.float16, torch.float32):
        pointer = "*" + TRITON_TYPES[dtype]
        yield AotCase(
            f"activation-{TRITON_TYPES[dtype]}",
            kernl_linear_activation,
            {"values_ptr": pointer, "multiplier_ptr": pointer, "chunks": "i32"},
            {"CHUNK": 16, "ACTIVATION": "gelu", "BLOCK": _ACTIVATION_BLOCK, "USE_PDL": hopper},
            num_warps=8,
            options={"launch_pdl": True} if hopper else {},
        )
