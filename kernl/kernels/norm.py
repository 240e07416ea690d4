"""LayerNorm and RMSNorm over the last dimension, alone or of a sum of two tensors.

    total  = input + residual                          (rounded to its dtype first, as plain PyTorch does)

    LayerNorm
    mean   = sum(total) / N          variance = sum((total - mean)^2) / N
    output = (total - mean) / sqrt(variance + epsilon) * weight + bias

    RMSNorm
    output = total / sqrt(sum(total^2) / N + epsilon) * (weight_offset + weight)

Layer Normalization, Ba, Kiros and Hinton, 2016 (arXiv:1607.06450). Root Mean Square Layer Normalization, Zhang and
Sennrich, 2019 (arXiv:1910.07467). Statistics are fp32. LayerNorm's take two passes, the mean first: a single pass over
sum and sum of squares loses all digits when the mean is large. RMSNorm has no mean to subtract and needs one pass. All
is computed in fp32 and rounded once, to the output's dtype, which for RMSNorm may be another than that of the sum.

Bytes that must move, for M rows of N elements of s bytes each (weight and bias are noise), of either norm:
    norm of one tensor         2 M N s     input in, output out
    norm of a sum              4 M N s     input, residual in, output and sum out
    the same, sum not kept     3 M N s
Flops: about 8 M N (RMSNorm 4 M N), far below what the bytes take. So the kernels keep a row in registers between the
two passes and touch memory once. Three regimes:

    many rows      one warp per 1024 elements; short rows share a program, which then loads weight and bias once for all
                   of them. Up to 1024 columns a reduction stays inside a warp: shuffles, no barrier.
    few rows       latency counts: a row is spread over more warps, about 8 elements a thread, one 16-byte load each.
    long rows      above 16384 columns a row does not fit the registers: `kernl_layer_norm_streamed` reads it twice, the
                   second time from L2, and merges the statistics of its chunks (Chan, Golub and LeVeque, 1979).
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

MAX_COLUMNS = 65536
"""Longest row the kernels take."""

MAX_ROWS = 2**31 - 1
"""Most rows the kernels take: the size of a grid."""

_MAX_COLUMNS_IN_REGISTERS = 16384
_STREAM_BLOCK = 4096
_STREAM_WARPS = 8
# A GPU with this many rows a multiprocessor is busy without splitting rows further.
_ROWS_TO_FILL_A_MULTIPROCESSOR = 8


@triton.jit
def _row_offsets(row, inner_rows, outer_stride, inner_stride, FLAT: tl.constexpr):
    """Where rows start, in elements: row (o, i) is at o * outer_stride + i * inner_stride."""
    if FLAT:
        return row.to(tl.int64) * inner_stride
    else:
        outer = (row // inner_rows).to(tl.int64)
        inner = (row % inner_rows).to(tl.int64)
        return outer * outer_stride + inner * inner_stride


@triton.jit
def _rounded_sum(x, addend, input, residual):
    """x + addend as plain PyTorch rounds it: to the dtype of both, or to fp32 when there are two. Returned in fp32."""
    if input.dtype.element_ty == residual.dtype.element_ty:
        return to_compute(to_storage(x + addend, input.dtype.element_ty)).to(tl.float32)
    else:
        return x + addend


@triton.jit(do_not_specialize=["rows", "inner_rows"])
def kernl_layer_norm_rows(
    input,
    residual,
    weight,
    bias,
    output,
    total,
    rows,
    columns,
    inner_rows,
    input_outer_stride,
    input_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    epsilon,
    RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    FLAT: tl.constexpr,
    STORE_TOTAL: tl.constexpr,
    WEIGHTS_BEFORE_WAIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """BLOCK_M whole rows a program. residual, weight, bias and total may be None. RMS: RMSNorm, which has no bias."""
    let_next_kernel_start(USE_PDL)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    column_mask = column < columns
    mask = (row < rows)[:, None] & column_mask[None, :]

    # Parameters that no kernel of this stream writes are read while the previous kernel still runs.
    if not WEIGHTS_BEFORE_WAIT:
        wait_for_previous_kernel(USE_PDL)
    if weight is not None:
        scale = to_compute(tl.load(weight + column, mask=column_mask, other=0.0)).to(tl.float32)  # [BLOCK_N]
        if WEIGHT_OFFSET != 0.0:
            scale += WEIGHT_OFFSET
    if bias is not None:
        shift = to_compute(tl.load(bias + column, mask=column_mask, other=0.0)).to(tl.float32)  # [BLOCK_N]
    if WEIGHTS_BEFORE_WAIT:
        wait_for_previous_kernel(USE_PDL)

    input_row = _row_offsets(row, inner_rows, input_outer_stride, input_inner_stride, FLAT)
    output_offset = row.to(tl.int64)[:, None] * columns + column[None, :]
    x = tl.load(input + input_row[:, None] + column[None, :], mask=mask, other=0.0)  # [BLOCK_M, BLOCK_N]
    x = to_compute(x).to(tl.float32)
    if residual is not None:
        residual_row = _row_offsets(row, inner_rows, residual_outer_stride, residual_inner_stride, FLAT)
        addend = tl.load(residual + residual_row[:, None] + column[None, :], mask=mask, other=0.0)
        x = _rounded_sum(x, to_compute(addend).to(tl.float32), input, residual)
        if STORE_TOTAL:
            tl.store(total + output_offset, to_storage(x, total.dtype.element_ty), mask=mask)

    if not RMS:
        # Plain `/` is approximate on a GPU: two units in the last place of a large mean are many of the result.
        mean = tl.div_rn(tl.sum(x, axis=1), tl.cast(columns, tl.float32))  # [BLOCK_M]
        x = tl.where(column_mask[None, :], x - mean[:, None], 0.0)
    mean_square = tl.sum(x * x, axis=1) / columns
    y = x * tl.rsqrt(mean_square + epsilon)[:, None]
    if weight is not None:
        y = y * scale[None, :]
    if bias is not None:
        y = y + shift[None, :]
    tl.store(output + output_offset, to_storage(y, output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner_rows"])
def kernl_layer_norm_streamed(
    input,
    residual,
    weight,
    bias,
    output,
    total,
    columns,
    inner_rows,
    input_outer_stride,
    input_inner_stride,
    residual_outer_stride,
    residual_inner_stride,
    epsilon,
    RMS: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    FLAT: tl.constexpr,
    STORE_TOTAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One row a program, BLOCK_N columns at a time, two passes over memory."""
    let_next_kernel_start(USE_PDL)
    row = tl.program_id(0)
    input += _row_offsets(row, inner_rows, input_outer_stride, input_inner_stride, FLAT)
    if residual is not None:
        residual += _row_offsets(row, inner_rows, residual_outer_stride, residual_inner_stride, FLAT)
    output += row.to(tl.int64) * columns
    if STORE_TOTAL:
        total += row.to(tl.int64) * columns
    wait_for_previous_kernel(USE_PDL)

    mean = 0.0
    squares = 0.0  # sum of squared deviations from the mean (RMSNorm: from zero) so far
    for start in range(0, columns, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        mask = column < columns
        x = to_compute(tl.load(input + column, mask=mask, other=0.0)).to(tl.float32)  # [BLOCK_N]
        if residual is not None:
            addend = to_compute(tl.load(residual + column, mask=mask, other=0.0)).to(tl.float32)
            x = _rounded_sum(x, addend, input, residual)
            if STORE_TOTAL:
                tl.store(total + column, to_storage(x, total.dtype.element_ty), mask=mask)
        if RMS:
            squares += tl.sum(x * x, axis=0)
        else:
            count = tl.minimum(BLOCK_N, columns - start).to(tl.float32)
            chunk_mean = tl.div_rn(tl.sum(x, axis=0), count)
            centered = tl.where(mask, x - chunk_mean, 0.0)
            chunk_squares = tl.sum(centered * centered, axis=0)
            share = count / (start + count)
            delta = chunk_mean - mean
            mean += delta * share
            squares += chunk_squares + delta * delta * start * share
    inverse_deviation = tl.rsqrt(squares / columns + epsilon)

    for start in range(0, columns, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        mask = column < columns
        x = to_compute(tl.load(input + column, mask=mask, other=0.0)).to(tl.float32)
        if residual is not None:
            addend = to_compute(tl.load(residual + column, mask=mask, other=0.0)).to(tl.float32)
            x = _rounded_sum(x, addend, input, residual)
        y = (x if RMS else x - mean) * inverse_deviation
        if weight is not None:
            scale = to_compute(tl.load(weight + column, mask=mask, other=0.0)).to(tl.float32)
            if WEIGHT_OFFSET != 0.0:
                scale += WEIGHT_OFFSET
            y = y * scale
        if bias is not None:
            y = y + to_compute(tl.load(bias + column, mask=mask, other=0.0)).to(tl.float32)
        tl.store(output + column, to_storage(y, output.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class NormConfig:
    """How rows are spread over programs and threads. block_m is 0 for the streamed kernel."""

    block_m: int
    block_n: int
    num_warps: int


def choose_config(rows: int, columns: int, sm_count: int) -> NormConfig:
    """The configuration for a problem, see the regimes in the module's docstring."""
    if columns > _MAX_COLUMNS_IN_REGISTERS:
        return NormConfig(0, _STREAM_BLOCK, _STREAM_WARPS)
    block_n = max(16, triton.next_power_of_2(columns))
    if rows < _ROWS_TO_FILL_A_MULTIPROCESSOR * max(sm_count, 1):
        return NormConfig(1, block_n, min(max(block_n // 256, 1), 16))
    return NormConfig(max(2048 // block_n, 1), block_n, min(max(block_n // 1024, 1), 16))


@dataclass(frozen=True)
class _RowGeometry:
    """The leading dimensions of two tensors of one shape as (outer, inner) rows, each with its strides in elements."""

    rows: int
    inner_rows: int
    strides: tuple[tuple[int, int], ...]  # (outer, inner) of each tensor

    @property
    def flat(self) -> bool:
        return self.inner_rows == self.rows


def _row_geometry(tensors: Sequence[torch.Tensor]) -> _RowGeometry | None:
    """Fold the leading dimensions into at most two, for all tensors alike; None when the strides do not allow it."""
    folded: list[tuple[int, list[int]]] = []  # innermost first: size, stride in each tensor
    for dimension in reversed(range(tensors[0].dim() - 1)):
        size = tensors[0].shape[dimension]
        if size == 1:
            continue
        strides = [tensor.stride(dimension) for tensor in tensors]
        if folded and strides == [folded[-1][0] * stride for stride in folded[-1][1]]:
            folded[-1] = (folded[-1][0] * size, folded[-1][1])
        else:
            folded.append((size, strides))
    if len(folded) > 2:
        return None
    folded += [(1, [0] * len(tensors))] * (2 - len(folded))
    (inner_rows, inner), (outer_rows, outer) = folded
    return _RowGeometry(inner_rows * outer_rows, inner_rows, tuple(zip(outer, inner)))


def launch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    output: torch.Tensor,
    epsilon: float,
    *,
    residual: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
    rms: bool = False,
    weight_offset: float = 0.0,
    sm_count: int = 0,
    use_pdl: bool = False,
    weights_before_wait: bool = False,
    config: NormConfig | None = None,
) -> None:
    """Write the norm of `input` (plus `residual`) to `output`, and the sum to `total` when given.

    input, residual: [..., N], one shape, any strides (copied when the last dimension is not dense or the leading ones
        do not fold into two).
    weight, bias: [N] or None.
    output, total: [..., N] contiguous. The sum has the dtype of input and residual, or fp32 when they differ.
    rms: RMSNorm, which takes no bias, instead of LayerNorm. weight_offset: added to the weight.
    sm_count: multiprocessors of the GPU; weights_before_wait: see kernels/common.py; config: for benchmarks.
    """
    columns = output.shape[-1]
    if output.numel() == 0:
        return
    operands = [_dense_rows(tensor) for tensor in (input, residual) if tensor is not None]
    geometry = _row_geometry(operands)
    if geometry is None:
        operands = [tensor.contiguous() for tensor in operands]
        geometry = _row_geometry(operands)
    assert geometry is not None
    weight = weight.contiguous() if weight is not None else None
    bias = bias.contiguous() if bias is not None else None
    strides = (*geometry.strides[0], *(geometry.strides[1] if residual is not None else (0, 0)))
    config = config or choose_config(geometry.rows, columns, sm_count)
    addend = operands[1] if residual is not None else None
    count_launch(("" if residual is None else "add_") + ("rms_norm" if rms else "layer_norm"))
    if config.block_m == 0:
        kernl_layer_norm_streamed[(geometry.rows,)](
            operands[0],
            addend,
            weight,
            bias,
            output,
            total,
            columns,
            geometry.inner_rows,
            *strides,
            epsilon,
            RMS=rms,
            WEIGHT_OFFSET=weight_offset,
            FLAT=geometry.flat,
            STORE_TOTAL=total is not None,
            BLOCK_N=config.block_n,
            USE_PDL=use_pdl,
            num_warps=config.num_warps,
            launch_pdl=use_pdl,
        )
        return
    kernl_layer_norm_rows[(triton.cdiv(geometry.rows, config.block_m),)](
        operands[0],
        addend,
        weight,
        bias,
        output,
        total,
        geometry.rows,
        columns,
        geometry.inner_rows,
        *strides,
        epsilon,
        RMS=rms,
        WEIGHT_OFFSET=weight_offset,
        FLAT=geometry.flat,
        STORE_TOTAL=total is not None,
        WEIGHTS_BEFORE_WAIT=weights_before_wait,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        USE_PDL=use_pdl,
        num_warps=config.num_warps,
        launch_pdl=use_pdl,
    )


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def aot_cases(arch: int) -> Iterator[AotCase]:
    """Both regimes and the streamed kernel, alone and with a residual, in the types the chip has.

    RMSNorm is LayerNorm's kernel with less work in it: a few of its own cases, one with T5's mixture of types (an fp32
    sum of fp16 and fp32, normalised to fp16).
    """
    few, many = 16, 16384
    half = torch.bfloat16 if arch >= 80 else torch.float16
    problems = [
        ("layer_norm", half, many, 768),
        ("layer_norm", torch.float32, many, 16384),
        ("layer_norm", torch.float32, few, 40),
        ("add_layer_norm", torch.float16, few, 768),
        ("add_layer_norm", torch.float16, many, 1024),
        ("add_layer_norm", half, few, 16384),
        ("add_layer_norm", torch.float32, many, 1025),
        ("add_layer_norm", half, many, 65536),
        ("rms_norm", half, many, 128),
        ("add_rms_norm", half, few, 4096),
        ("add_rms_norm", half, many, 65536),
    ]
    for name, dtype, rows, columns in problems:
        yield _aot_case(name, dtype, rows, columns, arch)
    yield _aot_case("add_rms_norm", torch.float16, many, 512, arch, residual=torch.float32)


def _aot_case(
    name: str, dtype: torch.dtype, rows: int, columns: int, arch: int, *, residual: torch.dtype | None = None
) -> AotCase:
    config = choose_config(rows, columns, 100)
    rms, add = name.endswith("rms_norm"), name.startswith("add")
    addend = residual or dtype
    total = dtype if addend == dtype else torch.float32
    streamed = config.block_m == 0
    pointer = f"*{TRITON_TYPES[dtype]}"
    signature = dict.fromkeys(("input", "weight", "output") if rms else ("input", "weight", "bias", "output"), pointer)
    signature |= dict.fromkeys(("columns", "inner_rows", "input_inner_stride"), "i32")
    constexprs: dict[str, object] = {"input_outer_stride": 0, "residual_outer_stride": 0}
    constexprs |= {"RMS": rms, "WEIGHT_OFFSET": 0.0} | ({"bias": None} if rms else {})
    if add:
        signature |= {"residual": f"*{TRITON_TYPES[addend]}", "total": f"*{TRITON_TYPES[total]}"}
        signature["residual_inner_stride"] = "i32"
    else:
        constexprs |= {"residual": None, "total": None, "residual_inner_stride": 0}
    if not streamed:
        signature["rows"] = "i32"
        constexprs |= {"BLOCK_M": config.block_m, "WEIGHTS_BEFORE_WAIT": arch >= 90 and rows <= 16}
    signature["epsilon"] = "fp32"
    constexprs |= {"FLAT": True, "STORE_TOTAL": add, "BLOCK_N": config.block_n, "USE_PDL": arch >= 90}
    even = columns % 16 == 0
    return AotCase(
        name=f"{name}-{TRITON_TYPES[dtype]}-{rows}x{columns}" + (f"-{TRITON_TYPES[residual]}" if residual else ""),
        kernel=kernl_layer_norm_streamed if streamed else kernl_layer_norm_rows,
        signature=signature,
        constexprs=constexprs,
        num_warps=config.num_warps,
        divisible_by_16=("columns", "input_inner_stride", "residual_inner_stride") if even else (),
        options={"launch_pdl": True} if arch >= 90 else {},
    )
