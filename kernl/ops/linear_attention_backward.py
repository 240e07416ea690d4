"""The gradient of `kernl.ops.linear_attention` and `kernl.ops.causal_dot_product`.

    torch.ops.kernl.linear_attention_backward  gradients of query, key, value, initial state and initial key sum

Which implementation runs. Where the forward pass runs its kernels, kernels too, if there is a tiling for these
dimensions; else, and when somebody wants a second derivative, the formulas.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from kernl.kernels.linear_attention_backward import (
    BackwardPlan,
    BackwardTilings,
    backward_plans,
    backward_tilings,
    linear_attention_backward,
)
from kernl.ops.attention_common import empty_by_rows
from kernl.ops.common import define_op, empty, is_recorded, on_device_of, use_pdl
from kernl.ops.linear_attention_common import (
    dense,
    fits_kernels,
    in_float32,
    precision_of,
    problem_class,
    shape_of,
)
from kernl.ops.linear_attention_formulas import Problem, Request, backward_by_formulas, forward_by_formulas
from kernl.runtime.capability import capability_of
from kernl.runtime.tuning import Candidate, choose

Gradients: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

Run: TypeAlias = Callable[[], Gradients]


def backward_arguments(
    grad_output: torch.Tensor,
    grad_state: torch.Tensor | None,
    grad_key_sum: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor,
    problem: tuple[Any, ...],
) -> tuple[Any, ...]:
    """The arguments of `torch.ops.kernl.linear_attention_backward`, in their order."""
    return (grad_output, grad_state, grad_key_sum, output, denominator, *problem)


def _request(
    grad_output: torch.Tensor,
    grad_state: torch.Tensor | None,
    grad_key_sum: torch.Tensor | None,
    output: torch.Tensor,
    denominator: torch.Tensor,
    *problem: Any,
) -> Request:
    return Request(Problem(*problem), output, denominator, grad_output, grad_state, grad_key_sum)


def allocate_gradients(problem: Problem) -> Gradients:
    """Of query, key and value, laid out as the output is; of the initial sums in float32 or float64."""
    query, key, value = problem.query, problem.key, problem.value
    batch, heads, _, key_dim = query.shape

    def of_sums(*shape: Any) -> torch.Tensor:
        return empty(shape, dtype=problem.compute_dtype, device=query.device)

    return (
        *(empty_by_rows(tensor, tensor.shape[3]) for tensor in (query, key, value)),  # type: ignore[return-value]
        of_sums(batch, heads, key_dim, value.shape[3]),
        of_sums(batch, heads, key_dim) if problem.normalize else of_sums(0),
    )


def backward_implementations(request: Request) -> tuple[dict[str, Run], tuple[Any, ...], str]:
    """Everything that can compute this call by name, the class of problem it belongs to, and the name to start from."""
    problem = request.problem
    capability, shape = capability_of(problem.query.device), shape_of(problem)
    batch, heads = problem.query.shape[:2]
    tilings = offered_tilings(problem)
    assert tilings is not None
    offered = backward_plans(tilings, shape, capability.sm_count, problem.schedule)

    def launch(plan: BackwardPlan) -> Gradients:
        results = allocate_gradients(problem)
        grad_query, grad_key, grad_value, grad_initial_state, grad_initial_key_sum = results
        device = grad_query.device
        delta = states = sums = None
        if problem.normalize:
            delta = empty((batch, heads, shape.length_q), dtype=torch.float32, device=device)
        partials = max(plan.key_segments, plan.segments - 1 if problem.is_causal else plan.segments)
        if partials > 0:
            of_states = (partials, batch, heads, shape.key_dim, shape.value_dim)
            states = empty(of_states, dtype=torch.float32, device=device)
            sums = empty(of_states[:4], dtype=torch.float32, device=device) if problem.normalize else None
        linear_attention_backward(
            dense(problem.query),
            dense(problem.key),
            dense(problem.value),
            problem.key_lengths,
            in_float32(problem.initial_state),
            in_float32(problem.initial_key_sum) if problem.normalize else None,
            dense(request.grad_output),
            in_float32(request.grad_state),
            in_float32(request.grad_key_sum) if problem.normalize else None,
            dense(request.output),
            request.denominator.contiguous() if problem.normalize else None,
            delta,
            states,
            sums,
            grad_query,
            grad_key,
            grad_value,
            grad_initial_state,
            grad_initial_key_sum if problem.normalize else None,
            feature_map=problem.feature_map,
            is_causal=problem.is_causal,
            plan=plan,
            input_precision=precision_of(problem),
            use_pdl=use_pdl(grad_query),
        )
        return results

    runs: dict[str, Run] = {plan.name: functools.partial(launch, plan) for plan in offered}
    return runs, problem_class(problem), offered[0].name


def offered_tilings(problem: Problem) -> BackwardTilings | None:
    return backward_tilings(
        capability_of(problem.query.device).arch,
        problem.query.dtype,
        problem.query.shape[3],
        problem.value.shape[3],
        input_precision=precision_of(problem),
    )


def _linear_attention_backward(*arguments: Any) -> Gradients:
    """CPU and CUDA implementation."""
    request = _request(*arguments)
    problem = request.problem
    # The formulas are PyTorch operations, which autograd records when somebody wants a second derivative.
    wants_second = is_recorded(arguments)
    if wants_second or not fits_kernels(problem) or offered_tilings(problem) is None:
        if wants_second:
            # Through the results too, which the formulas of the gradient read.
            output, denominator, *_ = forward_by_formulas(problem)
            request = dataclasses.replace(request, output=output, denominator=denominator)
        gradients = backward_by_formulas(request)
        if wants_second:
            kinds = (problem.query.dtype,) * 3 + (problem.compute_dtype,) * 2
            return tuple(gradient.to(kind) for gradient, kind in zip(gradients, kinds))  # type: ignore[return-value]
        results = allocate_gradients(problem)
        for result, gradient in zip(results, gradients):
            result.copy_(gradient)
        return results
    with on_device_of(problem.query):
        runs, key, default = backward_implementations(request)
        name = choose(
            "linear_attention_backward",
            key,
            lambda: [Candidate(name, run) for name, run in runs.items()],
            default=default,
            trusted=True,
        )
        return runs.get(name, runs[default])()


linear_attention_backward_op = define_op(
    "linear_attention_backward(Tensor grad_output, Tensor? grad_state, Tensor? grad_key_sum, Tensor output, "
    "Tensor denominator, Tensor query, Tensor key, Tensor value, Tensor? key_lengths, Tensor? initial_state, "
    "Tensor? initial_key_sum, str feature_map, bool is_causal, bool normalize, float epsilon, str schedule) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_linear_attention_backward,
    fake=lambda *arguments: allocate_gradients(_request(*arguments).problem),
    autograd="recorded",
)
