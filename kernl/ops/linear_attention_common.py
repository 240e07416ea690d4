"""What the two directions of linear attention share: what the kernels take, and how calls are told apart."""

from __future__ import annotations

from typing import Any

import torch
import triton

from kernl.kernels.common import block_of
from kernl.kernels.linear_attention import MAX_DIM, Shape
from kernl.ops.attention_common import float32_precision
from kernl.ops.common import kernel_runs_on
from kernl.ops.linear_attention_formulas import Problem


def fits_kernels(problem: Problem) -> bool:
    """Whether kernels run for these tensors at all; there may still be no tiling for them."""
    query, key, value = problem.query, problem.key, problem.value
    return (
        kernel_runs_on(query, "attention")
        and max(query.shape[3], value.shape[3]) <= MAX_DIM
        and min(query.numel(), key.numel(), value.numel()) > 0
    )


def shape_of(problem: Problem) -> Shape:
    batch, heads, length_q, key_dim = problem.query.shape
    length_k, value_dim = problem.value.shape[2:]
    itemsize = problem.query.element_size()
    return Shape(batch * heads, length_q, length_k, key_dim, value_dim, itemsize, problem.is_causal)


def precision_of(problem: Problem) -> str:
    return float32_precision() if problem.query.dtype == torch.float32 else "ieee"


def problem_class(problem: Problem) -> tuple[Any, ...]:
    """Sizes go by powers of two, so that most new shapes belong to a class that is known already."""
    shape = shape_of(problem)
    return (
        str(problem.query.dtype).removeprefix("torch."),
        precision_of(problem),
        block_of(shape.key_dim),
        block_of(shape.value_dim),
        triton.next_power_of_2(shape.batch_heads),
        max(16, triton.next_power_of_2(shape.length_q)),
        max(16, triton.next_power_of_2(shape.length_k)),
        problem.feature_map,
        problem.is_causal,
        problem.normalize,
        problem.schedule,
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """With the elements of a row side by side."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


def in_float32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()
