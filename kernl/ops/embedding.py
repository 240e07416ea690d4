"""Sum of several embedding lookups, as BERT-like models add word, token type and position embeddings.

    torch.ops.kernl.embedding_sum(indices, tables, padding_idx) -> output

    output = embedding(indices[0], tables[0]) + embedding(indices[1], tables[1]) + ...     from left to right

Each partial sum is rounded to the tables' dtype: the result is bit for bit that of `torch.nn.functional.embedding` and
plain additions. The indices broadcast against each other: position ids [1, S] beside word ids [B, S] are not expanded
in memory. `padding_idx` has one number for each table: the row that gets no gradient, or -1 for none.

Indices outside a table raise IndexError on the CPU, as in plain PyTorch. The kernel makes their rows NaN instead, where
plain PyTorch on a GPU fails with a device-side assertion; no memory outside the table is read. They get no gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kernl.kernels.embedding import (
    MAX_COLUMNS,
    MAX_ROWS,
    MAX_TABLES,
    EmbeddingConfig,
    choose_config,
    launch_embedding_sum,
)
from kernl.ops.common import Ahead, define_op, empty, kernel_runs_on, on_device_of, use_pdl
from kernl.runtime.capability import capability_of

_INDEX_DTYPES = (torch.int64, torch.int32)


def embedding_sum(
    indices: Sequence[torch.Tensor],
    tables: Sequence[torch.Tensor],
    padding_idx: Sequence[int | None] | None = None,
) -> torch.Tensor:
    """Sum of `tables[k][indices[k]]` over all k, added from left to right and rounded after each addition.

    indices: two to four tensors, int64 or int32, that broadcast to one shape [...]; any strides.
    tables: as many, [entries, N], of one float dtype.
    padding_idx: for each table the row that gets no gradient (negative: counted from the end), or None.

    Returns [..., N], contiguous, in the dtype of the tables. An index outside its table raises IndexError on the CPU;
    on a GPU its row of the output is NaN. Raises ValueError for numbers, shapes and dtypes that do not fit.
    """
    indices, tables = list(indices), list(tables)
    _check(indices, tables)
    padding = [None] * len(tables) if padding_idx is None else list(padding_idx)
    if len(padding) != len(tables):
        raise ValueError(
            f"padding_idx has {len(padding)} numbers; accepted: one (or None) for each of {len(tables)} tables"
        )
    rows = [_padding_row(row, table.shape[0]) for row, table in zip(padding, tables)]
    return torch.ops.kernl.embedding_sum(indices, tables, rows)


def _check(indices: list[torch.Tensor], tables: list[torch.Tensor]) -> None:
    if not 2 <= len(tables) <= MAX_TABLES:
        raise ValueError(f"tables has {len(tables)} tensors; accepted: 2 to {MAX_TABLES}")
    if len(indices) != len(tables):
        raise ValueError(f"indices has {len(indices)} tensors; accepted: {len(tables)}, one for each table")
    for position, table in enumerate(tables):
        name = f"tables[{position}]"
        if table.dim() != 2 or table.shape[1] != tables[0].shape[-1]:
            accepted = "[entries, N], the same N for all"
            raise ValueError(f"{name} has shape {list(table.shape)}; accepted: {accepted}")
        if not table.is_floating_point() or table.dtype != tables[0].dtype:
            raise ValueError(f"{name} is {table.dtype}; accepted: floating point, the same for all")
    for position, each in enumerate(indices):
        if each.dtype not in _INDEX_DTYPES:
            raise ValueError(f"indices[{position}] is {each.dtype}; accepted: torch.int64, torch.int32")
    try:
        torch.broadcast_shapes(*(each.shape for each in indices))
    except RuntimeError:
        shapes = ", ".join(str(list(each.shape)) for each in indices)
        raise ValueError(f"indices have shapes {shapes}; accepted: shapes that broadcast to one") from None


def _padding_row(row: int | None, entries: int) -> int:
    if row is None:
        return -1
    if not -entries <= row < entries:
        raise ValueError(f"padding_idx has {row}; accepted: a row of a table of {entries}, or None")
    return row % entries


def reference_embedding_sum(indices: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """`embedding_sum` in plain PyTorch, for any number of tables, float dtype and device."""
    return functools.reduce(torch.add, map(F.embedding, indices, tables))


def _allocate(indices: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> torch.Tensor:
    shape = torch.broadcast_shapes(*(each.shape for each in indices))
    dtype = functools.reduce(torch.promote_types, (table.dtype for table in tables))
    return empty((*shape, tables[0].shape[1]), dtype=dtype, device=tables[0].device)


def _kernel_takes(indices: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> bool:
    columns = tables[0].shape[-1]
    return (
        2 <= len(tables) <= MAX_TABLES
        and columns <= MAX_COLUMNS
        and math.prod(torch.broadcast_shapes(*(each.shape for each in indices))) <= MAX_ROWS
        and all(each.dtype in _INDEX_DTYPES and each.device == tables[0].device for each in indices)
        and all(
            # Bound by memory as the norms are, and fine on the same GPUs.
            kernel_runs_on(table, "norm")
            and table.device == tables[0].device
            and table.dtype == tables[0].dtype
            and table.dim() == 2
            and table.shape[1] == columns
            and (table.stride(1) == 1 or columns == 1)  # a table is too large to be copied
            for table in tables
        )
    )


def _embedding_sum(
    indices: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], padding_idx: Sequence[int]
) -> torch.Tensor:
    if not _kernel_takes(indices, tables):
        return reference_embedding_sum(indices, tables)
    output = _allocate(indices, tables)
    with on_device_of(output):
        launch_embedding_sum(
            torch.broadcast_tensors(*indices),
            tables,
            output,
            sm_count=capability_of(output.device).sm_count,
            use_pdl=use_pdl(output),
        )
    return output


def _kernels_ahead(indices: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> Iterator[Ahead]:
    """The kernels for few and for many rows. They are not specialised on sizes and strides of the indices."""
    if not _kernel_takes(indices, tables):
        return
    columns = tables[0].shape[1]
    sm_count = capability_of(tables[0].device).sm_count
    for config in dict.fromkeys(
        choose_config(rows, columns, tables[0].element_size(), sm_count) for rows in (1, MAX_ROWS)
    ):
        dtypes = (tables[0].dtype, *(each.dtype for each in indices))
        strides = tuple((table.stride(0) == 1, table.stride(0) % 16 == 0) for table in tables)
        yield (
            (config, dtypes, strides, columns % 16 == 0, columns == 1),
            functools.partial(_run_ahead, list(indices), list(tables), config),
        )


def _run_ahead(indices: list[torch.Tensor], tables: list[torch.Tensor], config: EmbeddingConfig) -> None:
    device, columns = tables[0].device, tables[0].shape[1]
    # Tables of one row each: real ones are large.
    small = [
        torch.zeros(columns, dtype=table.dtype, device=device).as_strided((1, columns), (table.stride(0), 1))
        for table in tables
    ]
    first_rows = [torch.zeros(2, dtype=each.dtype, device=device) for each in indices]
    output = torch.empty(2, columns, dtype=tables[0].dtype, device=device)
    with on_device_of(output):
        launch_embedding_sum(first_rows, small, output, use_pdl=use_pdl(output), config=config)


# Gradients: those of each lookup and of the additions, what was broadcast summed over.


def _context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    indices, tables, ctx.padding_idx = inputs
    ctx.entries = [table.shape[0] for table in tables]
    ctx.dtypes = [table.dtype for table in tables]
    ctx.save_for_backward(*indices)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    grads: list[torch.Tensor | None] = []
    for wanted, index, entries, dtype, padding in zip(
        ctx.needs_input_grad[1], ctx.saved_tensors, ctx.entries, ctx.dtypes, ctx.padding_idx
    ):
        if not wanted:
            grads.append(None)
            continue
        by_lookup = grad.sum_to_size((*index.shape, grad.shape[-1])).to(dtype)
        # The row of the padding index is skipped; an index outside the table must not write elsewhere.
        inside = torch.where((index >= 0) & (index < entries), index, padding)
        grads.append(torch.ops.aten.embedding_dense_backward(by_lookup, inside, entries, padding, False))
    return [None] * len(grads), grads, None


# Autocast leaves lookups and additions alone, and so it does this op: without a rule it passes through.

define_op(
    "embedding_sum(Tensor[] indices, Tensor[] tables, int[] padding_idx) -> Tensor",
    cpu=_embedding_sum,
    fake=lambda indices, tables, padding_idx: _allocate(indices, tables),
    autograd=(_context, _backward),
    ahead=lambda indices, tables, padding_idx: _kernels_ahead(indices, tables),
)
