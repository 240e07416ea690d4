"""Linear attention: a feature map in place of softmax, at a cost that grows with the length and not with its square.

    torch.ops.kernl.linear_attention           the op: (output, denominator, state, key_sum), everything spelled out
    torch.ops.kernl.linear_attention_backward  its gradient
    kernl.ops.linear_attention                 the validated function, [batch, length, heads, dim] as in the original
    kernl.ops.causal_dot_product               sum_{j <= i} <q_i, k_j> v_j alone, [batch, heads, length, dim]

Which implementation runs. On a GPU from Ampere on kernl's kernels, in one of the plans of `kernl.kernels
.linear_attention`: how many value columns a program holds, and into how many segments the sequence is cut. The default
is the plan that `estimated_us` expects to be fastest; KERNL_TUNING=measure measures instead. Everywhere else, for
float64, and for E or M over 256 (E over 128 for float32 without TF32): the formulas, chunk by chunk, in plain PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch

from kernl.kernels.linear_attention import (
    FEATURE_MAPS,
    SCHEDULES,
    Plan,
    Shape,
    default_plan,
    linear_attention_forward,
    plans,
    tilings,
)
from kernl.ops.attention_checks import check_kind
from kernl.ops.attention_common import empty_by_rows
from kernl.ops.common import Ahead, cast, define_op, empty, on_device_of, use_pdl
from kernl.ops.linear_attention_backward import backward_arguments, linear_attention_backward_op
from kernl.ops.linear_attention_common import (
    dense,
    fits_kernels,
    in_float32,
    precision_of,
    problem_class,
    shape_of,
)
from kernl.ops.linear_attention_formulas import Problem, forward_by_formulas
from kernl.runtime.capability import capability_of
from kernl.runtime.tuning import Candidate, choose

__all__ = ["LinearAttentionState", "causal_dot_product", "implementations", "linear_attention", "linear_attention_op"]


class LinearAttentionState(NamedTuple):
    """What a part of a sequence leaves for the next: float32 (float64 for float64 operands).

    key_value [batch, heads, E, M]: the sum of phi(key) value^T; key_sum [batch, heads, E]: that of phi(key).
    """

    key_value: torch.Tensor
    key_sum: torch.Tensor


Results: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Run: TypeAlias = Callable[[], Results]

_TENSORS = 6  # the op's arguments that are tensors come first


def allocate_outputs(problem: Problem) -> Results:
    """output [batch, heads, length_q, M], contiguous as [batch, length_q, heads, M]; denominator [batch, heads,
    length_q]; state [batch, heads, E, M]; key_sum [batch, heads, E]. Not normalised: denominator and key_sum are [0].
    """
    query, value = problem.query, problem.value
    batch, heads, length_q, key_dim = query.shape
    value_dim = value.shape[3]

    def of_sums(*shape: Any) -> torch.Tensor:
        return empty(shape, dtype=problem.compute_dtype, device=query.device)

    return (
        empty_by_rows(query, value_dim),
        of_sums(batch, heads, length_q) if problem.normalize else of_sums(0),
        of_sums(batch, heads, key_dim, value_dim),
        of_sums(batch, heads, key_dim) if problem.normalize else of_sums(0),
    )


def offered_plans(problem: Problem, shape: Shape | None = None) -> tuple[Plan, ...]:
    """For these tensors, or others of their kind of another shape."""
    shape = shape_of(problem) if shape is None else shape
    forward, state = tilings(
        capability_of(problem.query.device).arch,
        problem.query.dtype,
        shape.key_dim,
        shape.value_dim,
        input_precision=precision_of(problem),
    )
    return () if state is None else plans(forward, state, shape, problem.schedule)


def implementations(problem: Problem) -> tuple[dict[str, Run], tuple[Any, ...], str]:
    """Everything that can compute this call by name, the class of problem it belongs to, and the name to start from."""
    offered = offered_plans(problem)
    default = default_plan(offered, shape_of(problem), capability_of(problem.query.device).sm_count)
    runs: dict[str, Run] = {plan.name: functools.partial(_launch, problem, plan) for plan in offered}
    return runs, problem_class(problem), default.name


def _launch(problem: Problem, plan: Plan) -> Results:
    results = allocate_outputs(problem)
    output, denominator, state, key_sum = results
    batch, heads, key_dim, value_dim = state.shape
    states = key_sums = None
    if plan.key_segments > 0:
        of_states = (plan.key_segments, batch, heads, key_dim, value_dim)
        states = empty(of_states, dtype=torch.float32, device=output.device)
        if problem.normalize:
            key_sums = empty(of_states[:4], dtype=torch.float32, device=output.device)
    linear_attention_forward(
        dense(problem.query),
        dense(problem.key),
        dense(problem.value),
        problem.key_lengths,
        in_float32(problem.initial_state),
        in_float32(problem.initial_key_sum),
        states,
        key_sums,
        output,
        denominator if problem.normalize else None,
        state,
        key_sum if problem.normalize else None,
        feature_map=problem.feature_map,
        is_causal=problem.is_causal,
        epsilon=problem.epsilon,
        plan=plan,
        input_precision=precision_of(problem),
        use_pdl=use_pdl(output),
    )
    return results


def _kernels_ahead(*arguments: Any) -> Iterator[Ahead]:
    """Of the default plans of all batches and lengths: with and without partial states, rows that fit chunks or not."""
    problem = Problem(*arguments)
    if not fits_kernels(problem) or not offered_plans(problem):
        return
    heads, device = problem.query.shape[1], problem.query.device
    sm_count = capability_of(device).sm_count
    defaults: dict[tuple[Any, ...], Plan] = {}
    for batch_bits in range(0, 9, 2):
        for length_bits in range(4, 17, 2):
            length = 1 << length_bits
            shape = dataclasses.replace(
                shape_of(problem), batch_heads=heads << batch_bits, length_q=length, length_k=length
            )
            plan = default_plan(offered_plans(problem, shape), shape, sm_count)
            defaults.setdefault((plan.forward, plan.key_segments > 0), plan)

    def tiny(like: torch.Tensor, length: int) -> torch.Tensor:
        by_head = like.stride(1) > like.stride(2)
        shape = (1, heads, length, like.shape[3]) if by_head else (1, length, heads, like.shape[3])
        zeros = torch.zeros(shape, dtype=like.dtype, device=device)
        return zeros if by_head else zeros.transpose(1, 2)

    def first_row(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.ones((1, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    def launch(plan: Plan, length: int) -> None:
        segments = 1 if plan.segments == 1 else 2
        key_segments = 0 if plan.key_segments == 0 else segments - 1 if problem.is_causal else segments
        small = dataclasses.replace(
            problem,
            query=tiny(problem.query, length),
            key=tiny(problem.key, length),
            value=tiny(problem.value, length),
            key_lengths=first_row(problem.key_lengths),
            initial_state=first_row(problem.initial_state),
            initial_key_sum=first_row(problem.initial_key_sum),
        )
        with on_device_of(small.query):
            _launch(small, dataclasses.replace(plan, segments=segments, key_segments=key_segments))

    tensors = tuple(None if part is None else part.dtype for part in arguments[:_TENSORS])
    strides = tuple(tuple(stride % 16 == 0 for stride in tensor.stride()) for tensor in arguments[:3])
    kinds = (tensors, strides, problem.query.shape[3], problem.value.shape[3], heads, arguments[_TENSORS:])
    for plan in defaults.values():
        for length in (2 * plan.chunk, 2 * plan.chunk - 1):
            yield (plan.forward, plan.key_segments > 0, length, kinds), functools.partial(launch, plan, length)


def _linear_attention(*arguments: Any) -> Results:
    """CPU and CUDA implementation."""
    problem = Problem(*arguments)
    if not fits_kernels(problem) or not offered_plans(problem):
        results = allocate_outputs(problem)
        for result, value in zip(results, forward_by_formulas(problem)):
            result.copy_(value)
        return results
    with on_device_of(problem.query):
        runs, key, default = implementations(problem)
        name = choose(
            "linear_attention",
            key,
            lambda: [Candidate(name, run) for name, run in runs.items()],
            default=default,
            trusted=True,
        )
        return runs.get(name, runs[default])()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    ctx.save_for_backward(*output[:2], *inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: Any, _: Any, grad_state: Any, grad_key_sum: Any) -> tuple[Any, ...]:
    output, denominator, *tensors = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    problem = (*tensors, *ctx.options)
    grads = linear_attention_backward_op(
        *backward_arguments(grad_output, grad_state, grad_key_sum, output, denominator, problem)
    )
    gradients: list[Any] = [*grads[:3], None, None, None, *[None] * len(ctx.options)]
    for place, grad in ((4, grads[3]), (5, grads[4])):
        if tensors[place] is not None and ctx.needs_input_grad[place]:
            gradients[place] = grad.to(tensors[place].dtype)
    return tuple(gradients)


def _autocast(dtype: torch.dtype, device_type: str, query: Any, key: Any, value: Any, *rest: Any) -> Any:
    """Operands in the autocast type, states as they are."""
    return linear_attention_op(*(cast(tensor, dtype) for tensor in (query, key, value)), *rest)


linear_attention_op = define_op(
    "linear_attention(Tensor query, Tensor key, Tensor value, Tensor? key_lengths, Tensor? initial_state, "
    "Tensor? initial_key_sum, str feature_map, bool is_causal, bool normalize, float epsilon, str schedule) "
    "-> (Tensor output, Tensor denominator, Tensor state, Tensor key_sum)",
    cpu=_linear_attention,
    fake=lambda *arguments: allocate_outputs(Problem(*arguments)),
    autograd=(_setup_context, _backward),
    autocast=_autocast,
    ahead=_kernels_ahead,
)


# The public functions


@overload
def causal_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = ...,
    return_state: Literal[False] = ...,
    schedule: str = ...,
) -> torch.Tensor: ...


@overload
def causal_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = ...,
    return_state: Literal[True],
    schedule: str = ...,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def causal_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    return_state: bool = False,
    schedule: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """output_i = query_i (initial_state + sum_{j <= i} key_j^T value_j).

    query, key: [batch, heads, length, E], float16, bfloat16, float32 or float64, any strides; the length is 1 or more.
    value: [batch, heads, length, M]. E and M over 256 run plain PyTorch.
    initial_state: [batch, heads, E, M]; zeros by default. What an earlier call returned continues its sequence.
    return_state: return (output, state), the state [batch, heads, E, M] after the last position: float32, or float64
        for float64 operands.
    schedule: "sequential" (one walk over the length per head), "chunkwise" (the length in segments, side by side) or
        "auto".

    Returns output [batch, heads, length, M] of query's type, contiguous as [batch, length, heads, M]. Sums are float32.
    Differentiable in all tensors, also through the state. float32 operands honour PyTorch's matmul precision.

    Raises ValueError when shapes, types or devices do not fit, TypeError when an operand is not floating point.
    Source: Katharopoulos et al., "Transformers are RNNs" (2020).
    """
    layout = "[batch, heads, length, dim]"
    _check_operands(query, key, value, layout, length_axis=2)
    if key.shape[2] != query.shape[2]:
        raise ValueError(f"key: got length {key.shape[2]}, accepted query's, {query.shape[2]}")
    _check_schedule(schedule)
    _check_state("initial_state", initial_state, (*query.shape[:2], query.shape[3], value.shape[3]), query)
    output, _, state, _ = torch.ops.kernl.linear_attention(
        query, key, value, None, initial_state, None, "identity", True, False, 0.0, schedule
    )
    return (output, state) if return_state else output


@overload
def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    feature_map: str | Callable[[torch.Tensor], torch.Tensor] = ...,
    key_lengths: torch.Tensor | None = ...,
    causal: bool = ...,
    eps: float = ...,
    initial_state: LinearAttentionState | None = ...,
    return_state: Literal[False] = ...,
    schedule: str = ...,
) -> torch.Tensor: ...


@overload
def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    feature_map: str | Callable[[torch.Tensor], torch.Tensor] = ...,
    key_lengths: torch.Tensor | None = ...,
    causal: bool = ...,
    eps: float = ...,
    initial_state: LinearAttentionState | None = ...,
    return_state: Literal[True],
    schedule: str = ...,
) -> tuple[torch.Tensor, LinearAttentionState]: ...


def linear_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    feature_map: str | Callable[[torch.Tensor], torch.Tensor] = "elu",
    key_lengths: torch.Tensor | None = None,
    causal: bool = False,
    eps: float = 1e-6,
    initial_state: LinearAttentionState | None = None,
    return_state: bool = False,
    schedule: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, LinearAttentionState]:
    """output_i = phi(q_i) sum_j phi(k_j)^T v_j / (<phi(q_i), sum_j phi(k_j)> + eps), over all keys or over j <= i.

    query: [batch, length_q, heads, E], float16, bfloat16, float32 or float64, any strides.
    key: [batch, length_k, heads, E]; value: [batch, length_k, heads, M]. Lengths are 1 or more. E and M over 256 run
        plain PyTorch.
    feature_map: phi. "elu" is elu(x) + 1; "relu", "identity": as they say; these are applied inside the kernel. Or a
        callable from [batch, length, heads, E] to [batch, length, heads, E'], applied before it.
    key_lengths: int32 or int64 [batch]: keys from there on count as absent, whatever is stored there.
    causal: a query sees the keys up to its own position. If length_k is not length_q, keys and values are cut, or
        filled up with absent ones, to length_q.
    eps: added to the normaliser.
    initial_state: sums over an earlier part of the sequence, as `return_state` gave them.
    return_state: return (output, state): the sums over all keys that count, and the initial ones.
    schedule: as for `causal_dot_product`.

    Returns output [batch, length_q, heads, M] of query's type, contiguous. Sums are float32. Differentiable in query,
    key, value and initial_state. float32 operands honour PyTorch's matmul precision.

    Raises ValueError when shapes, types or devices do not fit, TypeError when an operand is not floating point.
    Source: Katharopoulos et al., "Transformers are RNNs" (2020).
    """
    layout = "[batch, length, heads, dim]"
    _check_operands(query, key, value, layout, length_axis=1)
    _check_schedule(schedule)
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            accepted = ", ".join(map(repr, ("elu", "relu", "identity")))
            raise ValueError(f"feature_map: got {feature_map!r}, accepted {accepted} or a callable")
        name = feature_map
    elif callable(feature_map):
        query, key, name = feature_map(query), feature_map(key), "identity"
        _check_operands(query, key, value, layout, length_axis=1)
    else:
        raise TypeError(f"feature_map: got {feature_map!r}, accepted a name or a callable")
    if key_lengths is not None:
        _check_key_lengths(key_lengths, query)
    if causal and key.shape[1] > query.shape[1]:
        key, value = key[:, : query.shape[1]], value[:, : query.shape[1]]
    state_shape = (query.shape[0], query.shape[2], query.shape[3], value.shape[3])
    key_value, key_sum = (None, None) if initial_state is None else initial_state
    _check_state("initial_state.key_value", key_value, state_shape, query)
    _check_state("initial_state.key_sum", key_sum, state_shape[:3], query)
    output, _, *state = torch.ops.kernl.linear_attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),
        key_lengths,
        key_value,
        key_sum,
        name,
        bool(causal),
        True,
        float(eps),
        schedule,
    )
    output = output.transpose(1, 2)
    return (output, LinearAttentionState(*state)) if return_state else output


def _check_operands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str, *, length_axis: int
) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_kind(name, tensor, query, layout)
        head_axis = 3 - length_axis
        if tensor.shape[0] != query.shape[0] or tensor.shape[head_axis] != query.shape[head_axis]:
            raise ValueError(
                f"{name}: got batch {tensor.shape[0]} and {tensor.shape[head_axis]} heads, accepted query's, "
                f"{query.shape[0]} and {query.shape[head_axis]}"
            )
        if tensor.shape[length_axis] < 1 or tensor.shape[3] < 1:
            raise ValueError(
                f"{name}: got length {tensor.shape[length_axis]} and dim {tensor.shape[3]}, accepted 1 or more"
            )
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key: got dim {key.shape[3]}, accepted query's, {query.shape[3]}")
    if value.shape[length_axis] != key.shape[length_axis]:
        raise ValueError(f"value: got length {value.shape[length_axis]}, accepted key's, {key.shape[length_axis]}")


def _check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}, accepted {', '.join(map(repr, SCHEDULES))}")


def _check_key_lengths(key_lengths: torch.Tensor, query: torch.Tensor) -> None:
    if key_lengths.dtype not in (torch.int32, torch.int64) or tuple(key_lengths.shape) != (query.shape[0],):
        raise ValueError(
            f"key_lengths: got {key_lengths.dtype} of shape {list(key_lengths.shape)}, accepted int32 or int64 "
            f"[{query.shape[0]}]"
        )
    if key_lengths.device != query.device:
        raise ValueError(f"key_lengths: got device {key_lengths.device}, accepted query's, {query.device}")


def _check_state(name: str, state: torch.Tensor | None, shape: tuple[int, ...], query: torch.Tensor) -> None:
    if state is None:
        return
    if tuple(state.shape) != shape or not state.is_floating_point():
        raise ValueError(
            f"{name}: got {state.dtype} of shape {list(state.shape)}, accepted floating point {list(shape)}"
        )
    if state.device != query.device:
        raise ValueError(f"{name}: got device {state.device}, accepted query's, {query.device}")
