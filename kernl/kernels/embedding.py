"""Sum of two to four embedding lookups in one pass: what BERT-like models begin with.

    output[row] = round(round(table0[i0[row]] + table1[i1[row]]) + table2[i2[row]])      each round to the tables' dtype

Word, token type and position embeddings (Devlin et al., 2018, arXiv:1810.04805). Every partial sum is rounded as a
plain addition of that dtype rounds it, so the result is bit for bit that of separate lookups and additions.

Bytes that must move, for M rows of N elements of s bytes each and T tables:
    separate lookups and sums    2 T M N s + 3 (T - 1) M N s      a lookup reads and writes, a sum reads two and writes
    this kernel                  (T + 1) M N s                    at most: rows of small tables come from L2
With T = 3 that is a third, and one launch in place of five. No arithmetic to speak of: each thread reads 16 bytes of
a row of each table, with several rows in flight, and writes 16.

An index outside its table reads nothing and makes its whole row of the output NaN: memory of others is never touched,
and the mistake shows. (Plain PyTorch stops the process with a device-side assertion, which ends the CUDA context.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernl.kernels.common import (
    TRITON_TYPES,
    AotCase,
    count_launch,
    let_next_kernel_start,
    to_compute,
    to_storage,
    wait_for_previous_kernel,
)

MAX_TABLES = 4
"""Most tables the kernel takes."""

MAX_ROWS = 2**31 - 1
"""Most rows the kernel takes: the size of a grid."""

MAX_COLUMNS = 65536
"""Longest row the kernel takes: the second dimension of a grid is short."""

# A GPU with this many rows a multiprocessor is busy without giving a thread more than one of them.
_ROWS_TO_FILL_A_MULTIPROCESSOR = 32
_BYTES_A_WARP = 32 * 16


@triton.jit
def _look_up(indices, table, entries, row_stride, outer_stride, inner_stride, outer, inner, row_mask, column, columns):
    """Rows of one table in fp32; NaN for an index that is not in it."""
    index = tl.load(indices + outer * outer_stride + inner * inner_stride, mask=row_mask, other=0).to(tl.int64)
    is_inside = (index >= 0) & (index < entries)  # [BLOCK_M]
    mask = (row_mask & is_inside)[:, None] & (column < columns)[None, :]
    x = tl.load(table + (index * row_stride)[:, None] + column[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_N]
    return tl.where(is_inside[:, None], to_compute(x).to(tl.float32), float("nan"))


@triton.jit
def _add(total, x, dtype: tl.constexpr):
    """The sum, rounded as plain PyTorch rounds it before the next addition."""
    return to_compute(to_storage(total + x, dtype)).to(tl.float32)


# Sizes and strides of indices only ever address single elements: knowing them better would compile, not speed up.
@triton.jit(
    do_not_specialize=[
        "rows",
        "inner_rows",
        *(f"{name}{table}" for name in ("entries", "outer_stride", "inner_stride") for table in range(4)),
    ]
)
def kernl_embedding_sum(
    indices0,
    indices1,
    indices2,
    indices3,
    table0,
    table1,
    table2,
    table3,
    output,
    rows,
    columns,
    inner_rows,
    entries0,
    entries1,
    entries2,
    entries3,
    row_stride0,
    row_stride1,
    row_stride2,
    row_stride3,
    outer_stride0,
    outer_stride1,
    outer_stride2,
    outer_stride3,
    inner_stride0,
    inner_stride1,
    inner_stride2,
    inner_stride3,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """BLOCK_M rows and BLOCK_N columns a program. The third and the fourth table may be None."""
    let_next_kernel_start(USE_PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    row_mask = row < rows
    outer = row // inner_rows
    inner = row % inner_rows
    dtype: tl.constexpr = output.dtype.element_ty

    wait_for_previous_kernel(USE_PDL)
    total = _look_up(
        indices0, table0, entries0, row_stride0, outer_stride0, inner_stride0, outer, inner, row_mask, column, columns
    )  # [BLOCK_M, BLOCK_N]
    x = _look_up(
        indices1, table1, entries1, row_stride1, outer_stride1, inner_stride1, outer, inner, row_mask, column, columns
    )
    total = _add(total, x, dtype)
    if table2 is not None:
        x = _look_up(
            indices2,
            table2,
            entries2,
            row_stride2,
            outer_stride2,
            inner_stride2,
            outer,
            inner,
            row_mask,
            column,
            columns,
        )
        total = _add(total, x, dtype)
    if table3 is not None:
        x = _look_up(
            indices3,
            table3,
            entries3,
            row_stride3,
            outer_stride3,
            inner_stride3,
            outer,
            inner,
            row_mask,
            column,
            columns,
        )
        total = _add(total, x, dtype)
    mask = row_mask[:, None] & (column < columns)[None, :]
    tl.store(output + row[:, None] * columns + column[None, :], to_storage(total, dtype), mask=mask)


@dataclass(frozen=True)
class EmbeddingConfig:
    """How rows and columns are spread over programs and threads."""

    block_m: int
    block_n: int
    num_warps: int


def choose_config(rows: int, columns: int, itemsize: int, sm_count: int) -> EmbeddingConfig:
    """A warp spans 512 bytes of a row. Few rows: one a warp, for latency. Many: two, for loads in flight."""
    block_n = max(min(triton.next_power_of_2(columns), _BYTES_A_WARP // itemsize), 16)
    # Rows that are shorter than that share a warp.
    rows_a_warp = _BYTES_A_WARP // itemsize // block_n
    if rows < _ROWS_TO_FILL_A_MULTIPROCESSOR * max(sm_count, 1):
        return EmbeddingConfig(rows_a_warp, block_n, 1)
    return EmbeddingConfig(8 * rows_a_warp, block_n, 4)


@dataclass(frozen=True)
class _IndexGeometry:
    """Indices of one shape as (outer, inner) rows, each tensor with its own strides in elements."""

    inner_rows: int
    strides: tuple[tuple[int, int], ...]


def _index_geometry(indices: Sequence[torch.Tensor]) -> _IndexGeometry | None:
    """Fold all dimensions into at most two, for all indices alike; None when the strides do not allow it."""
    folded: list[tuple[int, list[int]]] = []  # innermost first: size, stride in each tensor
    for dimension in reversed(range(indices[0].dim())):
        size = indices[0].shape[dimension]
        if size == 1:
            continue
        strides = [tensor.stride(dimension) for tensor in indices]
        if folded and strides == [folded[-1][0] * stride for stride in folded[-1][1]]:
            folded[-1] = (folded[-1][0] * size, folded[-1][1])
        else:
            folded.append((size, strides))
    if len(folded) > 2:
        return None
    folded += [(1, [0] * len(indices))] * (2 - len(folded))
    (inner_rows, inner), (_, outer) = folded
    return _IndexGeometry(inner_rows, tuple(zip(outer, inner)))


def launch_embedding_sum(
    indices: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    output: torch.Tensor,
    *,
    sm_count: int = 0,
    use_pdl: bool = False,
    config: EmbeddingConfig | None = None,
) -> None:
    """Write the sum of `tables[k][indices[k]]`, added from left to right, to `output`.

    indices: int64 or int32, one shape, any strides (copied when the dimensions do not fold into two).
    tables: two to four, [entries, N] of one dtype, last dimension dense.
    output: [*indices, N], contiguous, of the tables' dtype.
    sm_count: multiprocessors of the GPU; config: for benchmarks.
    """
    if output.numel() == 0:
        return
    geometry = _index_geometry(indices)
    if geometry is None:
        indices = [tensor.contiguous() for tensor in indices]
        geometry = _index_geometry(indices)
    assert geometry is not None and 2 <= len(tables) == len(indices) <= MAX_TABLES
    columns = output.shape[-1]
    rows = output.numel() // columns
    config = config or choose_config(rows, columns, output.element_size(), sm_count)
    missing = MAX_TABLES - len(tables)
    absent, zeros = [None] * missing, [0] * missing
    outer, inner = zip(*geometry.strides)
    count_launch("embedding_sum")
    kernl_embedding_sum[(triton.cdiv(rows, config.block_m), triton.cdiv(columns, config.block_n))](
        *indices,
        *absent,
        *tables,
        *absent,
        output,
        rows,
        columns,
        geometry.inner_rows,
        *(table.shape[0] for table in tables),
        *zeros,
        *(table.stride(0) for table in tables),
        *zeros,
        *outer,
        *zeros,
        *inner,
        *zeros,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        launch_pdl=use_pdl,
    )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """Two to four tables, few and many rows, even and odd widths, in the types the chip has."""
    few, many = 16, 16384
    half = torch.bfloat16 if arch >= 80 else torch.float16
    problems = [
        (torch.float16, few, 768, 3, torch.int64),
        (half, many, 768, 3, torch.int64),
        (half, many, 768, 2, torch.int32),
        (torch.float32, many, 1024, 4, torch.int64),
        (torch.float32, few, 41, 3, torch.int64),
        (half, many, 16, 2, torch.int64),
    ]
    for dtype, rows, columns, tables, index_dtype in problems:
        yield _aot_case(dtype, rows, columns, tables, index_dtype, arch)


def _aot_case(dtype: torch.dtype, rows: int, columns: int, tables: int, index_dtype: torch.dtype, arch: int) -> AotCase:
    config = choose_config(rows, columns, dtype.itemsize, 100)
    present, absent = range(tables), range(tables, MAX_TABLES)
    signature = {f"indices{table}": f"*{TRITON_TYPES[index_dtype]}" for table in present}
    signature |= dict.fromkeys((*(f"table{table}" for table in present), "output"), f"*{TRITON_TYPES[dtype]}")
    signature |= dict.fromkeys(("rows", "columns", "inner_rows"), "i32")
    for name in ("entries", "outer_stride", "inner_stride"):
        signature |= {f"{name}{table}": "i32" for table in range(MAX_TABLES)}
    signature |= {f"row_stride{table}": "i32" for table in range(MAX_TABLES)}
    constexprs: dict[str, object] = {f"{name}{table}": None for name in ("indices", "table") for table in absent}
    constexprs |= {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "USE_PDL": arch >= 90}
    even = columns % 16 == 0
    return AotCase(
        name=f"embedding_sum-{TRITON_TYPES[dtype]}-{rows}x{columns}-{tables}-{TRITON_TYPES[index_dtype]}",
        kernel=kernl_embedding_sum,
        signature=signature,
        constexprs=constexprs,
        num_warps=config.num_warps,
        divisible_by_16=("columns", *(f"row_stride{table}" for table in range(MAX_TABLES))) if even else (),
        options={"launch_pdl": True} if arch >= 90 else {},
    )
