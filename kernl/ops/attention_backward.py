"""The gradient of `kernl.ops.attention`.

    torch.ops.kernl.attention_backward  gradients of query, key, value, a float attn_mask and a bias by distance
    reference_backward                  the same from explicit formulas in plain PyTorch

Which implementation runs. On a GPU the formulas, because the kernels have not been measured on one yet, or, with
KERNL_TUNING=measure, whichever is fastest for the class of problem. In Triton's interpreter the kernels. Everywhere
else the formulas, and for what the kernels do not make: the gradient of a bias by distance, second derivatives, and
what dropout leaves of means in hidden rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton

from kernl.kernels.attention_backward import BackwardConfiguration, attention_backward, backward_configurations
from kernl.kernels.attention_problem import Scoring
from kernl.kernels.common import block_of
from kernl.ops.attention_common import (
    SCORING_SCHEMA,
    Sequence,
    bias_index,
    by_key_head,
    distances,
    empty_by_rows,
    float32_precision,
    kernel_takes,
    over_batches,
    scoring_of_op,
    sequences_of,
    slice_rows,
    softmax_over_visible,
    with_padding_recognised,
    without_padded,
)
from kernl.ops.common import define_op, empty, is_recorded, on_device_of, use_pdl
from kernl.runtime.capability import capability_of
from kernl.runtime.tuning import Candidate, choose

# Scores held in memory at a time by the formulas.
_BACKWARD_SCORES = 2**25

Gradients: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Of query, key, value, attn_mask and distance_bias (the last two [0] when nobody wants them)."""

Run: TypeAlias = Callable[[], Gradients]

# The formulas


@dataclass(frozen=True)
class Request:
    """One call of the op: what the forward pass took and gave, the gradients that came, and those that are wanted."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scoring: Scoring
    output: torch.Tensor
    logsumexp: torch.Tensor
    grad_output: torch.Tensor
    grad_logsumexp: torch.Tensor | None
    needs_mask_grad: bool
    needs_bias_grad: bool

    @property
    def masked_gradient(self) -> torch.Tensor | None:
        """The float attn_mask or bias, if its gradient is wanted."""
        return self.scoring.bias if self.needs_mask_grad else None

    @property
    def biased_gradient(self) -> torch.Tensor | None:
        """The bias by distance, if its gradient is wanted."""
        return self.scoring.positions.distance_bias if self.needs_bias_grad else None


def reference_backward(request: Request) -> Gradients:
    """All gradients, in float64 for float64 operands and else in float32. logsumexp is not read.

    With P the probabilities, D = sum_d grad_output * output and c' the derivative of the softcap (1 without one), for a
    block of queries at a time:

    dV = P^T dO      dS = P (dO V^T - D + dlse)      dQ = scale (c' dS) K      dK = scale (c' dS)^T Q      dbias = dS

    A hidden row has P = 0; under "mean" it passes 1 / seqlen_k of its gradient to each value and nothing else.
    """
    results = _allocate_gradients(request)
    compute = torch.float64 if request.query.dtype == torch.float64 else torch.float32
    totals: Gradients = tuple(torch.zeros(part.shape, dtype=compute, device=part.device) for part in results)  # type: ignore[assignment]
    if request.scoring.packed is None:
        _add_gradients(request, totals)
    else:
        for sequence in sequences_of(request.scoring):
            _add_gradients(*_alone(request, totals, sequence))
    for part, total in zip(results, totals):
        part.copy_(total)
    return results


def _alone(request: Request, totals: Gradients, sequence: Sequence) -> tuple[Request, Gradients]:
    """What a packed sequence contributes to: views of the request and of the sums."""
    queries, keys = sequence.queries, sequence.keys
    grad_query, grad_key, grad_value, grad_mask, grad_by_distance = totals
    here = dataclasses.replace(
        request,
        query=request.query[:, :, queries],
        key=request.key[:, :, keys],
        value=request.value[:, :, keys],
        scoring=sequence.scoring,
        output=request.output[:, :, queries],
        logsumexp=request.logsumexp[:, :, queries],
        grad_output=request.grad_output[:, :, queries],
        grad_logsumexp=None if request.grad_logsumexp is None else request.grad_logsumexp[:, :, queries],
    )
    return here, (
        grad_query[:, :, queries],
        grad_key[:, :, keys],
        grad_value[:, :, keys],
        sequence.of_mask(grad_mask) if request.needs_mask_grad else grad_mask,
        grad_by_distance,
    )


def _add_gradients(request: Request, totals: Gradients) -> None:
    """Add the gradients of one batch to sums in the type that is computed in."""
    query, key, value, scoring = request.query, request.key, request.value, request.scoring
    total_query, total_key, total_value, total_mask, total_bias = totals
    compute = total_query.dtype
    batch, heads, seqlen_q, _ = query.shape
    key_heads, seqlen_k = key.shape[1:3]
    keys = without_padded(key.to(compute), scoring.key_padding)
    values = without_padded(value.to(compute), scoring.key_padding)
    block = max(1, _BACKWARD_SCORES // max(1, batch * heads * seqlen_k))
    for start in range(0, seqlen_q, block):
        rows = range(start, min(start + block, seqlen_q))
        here = slice(rows.start, rows.stop)
        queries = query[:, :, here].to(compute)
        grads = request.grad_output[:, :, here].to(compute)
        softmax = softmax_over_visible(queries, keys, scoring, rows)
        grad_rows = by_key_head(grads, key_heads)
        grad_weights = (grad_rows @ values.mT).view_as(softmax.probabilities)
        if softmax.factors is not None:
            grad_weights = grad_weights * softmax.factors
        inner = (grads * request.output[:, :, here].to(compute)).sum(-1)
        if request.grad_logsumexp is not None:
            inner = inner - request.grad_logsumexp[:, :, here].to(compute)
        grad_scores = softmax.probabilities * (grad_weights - inner[..., None])
        total_value += by_key_head(softmax.weights, key_heads).mT @ grad_rows
        if scoring.hidden_rows == "mean" and seqlen_k > 0 and softmax.hidden.any():
            total_value += by_key_head(softmax.of_means(), key_heads).mT @ grad_rows
        if request.biased_gradient is not None:
            index = bias_index(scoring.positions, distances(scoring.positions, rows, seqlen_k, query.device))
            by_head = grad_scores.sum(0) if index.dim() == 2 else grad_scores.transpose(0, 1)
            total_bias.index_add_(1, index.flatten(), by_head.flatten(1))
        grad_products = grad_scores if softmax.slope is None else grad_scores * softmax.slope
        if request.masked_gradient is not None:
            part = slice_rows(total_mask, rows)
            assert part is not None
            grad_bias = grad_products * scoring.scale if scoring.bias_before_scale else grad_scores
            part += grad_bias.sum_to_size(part.shape)
        grad_product_rows = by_key_head(grad_products, key_heads)
        total_query[:, :, here] += (grad_product_rows @ keys).view_as(queries) * scoring.scale
        total_key += grad_product_rows.mT @ by_key_head(queries, key_heads) * scoring.scale


def _allocate_gradients(request: Request) -> Gradients:
    """Of query, key and value, laid out as the output is; of mask and bias as these are ([0] when nobody wants one)."""

    def like(tensor: torch.Tensor | None) -> torch.Tensor:
        shape, dtype = ((0,), torch.float32) if tensor is None else (tuple(tensor.shape), tensor.dtype)
        return empty(shape, dtype=dtype, device=request.query.device)

    operands = (request.query, request.key, request.value)
    grad_query, grad_key, grad_value = (empty_by_rows(tensor, tensor.shape[3]) for tensor in operands)
    return grad_query, grad_key, grad_value, like(request.masked_gradient), like(request.biased_gradient)


# The op


def _request(
    grad_output: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    needs_mask_grad: bool,
    needs_bias_grad: bool,
    *scoring: Any,
) -> Request:
    """From the arguments of `torch.ops.kernl.attention_backward`, in their order."""
    operands = (query, key, value, scoring_of_op(*scoring), output, logsumexp)
    return Request(*operands, grad_output, grad_logsumexp, needs_mask_grad, needs_bias_grad)


def _attention_backward(*arguments: Any) -> Gradients:
    """CPU and CUDA implementation."""
    request = _request(*arguments)
    query, key, value, scoring = request.query, request.key, request.value, request.scoring
    # The formulas are PyTorch operations, which autograd records when somebody wants a second derivative.
    if is_recorded(arguments) or request.needs_bias_grad or not kernel_takes(query, key, value, scoring):
        return reference_backward(request)
    scoring = with_padding_recognised(scoring, query.shape[0], key.shape[2])
    request = dataclasses.replace(request, scoring=scoring)
    with on_device_of(query):
        runs, problem, default = backward_implementations(request)
        name = choose(
            "attention_backward",
            problem,
            lambda: [Candidate(name, run) for name, run in runs.items()],
            default=default,
            trusted=True,
        )
        return runs.get(name, runs[default])()


def backward_implementations(request: Request) -> tuple[dict[str, Run], tuple[Any, ...], str]:
    """Everything that can compute this call by name, the class of problem it belongs to, and the name to start from."""
    query, value, scoring = request.query, request.value, request.scoring
    batch, heads, head_dim = scoring.batch_of(query), query.shape[1], query.shape[3]
    key_heads, value_dim = value.shape[1], value.shape[3]
    seqlen_q, seqlen_k = query.shape[2], value.shape[2]
    if scoring.packed is not None:
        seqlen_q, seqlen_k = scoring.packed.max_seqlen_q, scoring.packed.max_seqlen_k
    precision = float32_precision() if query.dtype == torch.float32 else "ieee"
    masked = request.masked_gradient

    def launch(configuration: BackwardConfiguration) -> Gradients:
        gradients = _allocate_gradients(request)
        grad_query, grad_key, grad_value, grad_mask, _ = gradients
        statistics = empty((3, *query.shape[:3]), dtype=torch.float32, device=query.device)
        hidden_grads = None
        if scoring.hidden_rows == "mean" and scoring.can_hide_a_row:
            shape = (batch, heads, triton.cdiv(seqlen_q, configuration.query.block_m), value_dim)
            hidden_grads = empty(shape, dtype=torch.float32, device=query.device)
        attention_backward(
            query,
            request.key,
            value,
            scoring,
            (request.output, request.logsumexp.contiguous()),
            (
                request.grad_output,
                None if request.grad_logsumexp is None else request.grad_logsumexp.float().contiguous(),
            ),
            (statistics, hidden_grads),
            (grad_query, grad_key, grad_value, None if masked is None else grad_mask[(None,) * (4 - masked.dim())]),
            configuration=configuration,
            input_precision=precision,
            use_pdl=use_pdl(query),
        )
        return gradients

    tilings = backward_configurations(
        capability_of(query.device).arch,
        query.dtype,
        head_dim,
        value_dim,
        input_precision=precision,
        has_mask=scoring.kind_of_mask != "none",
        by_position=not scoring.is_plain or scoring.kind_of_mask == "both",
    )
    runs: dict[str, Run] = {tiling.name: functools.partial(launch, tiling) for tiling in tilings}
    runs["pytorch"] = functools.partial(reference_backward, request)
    # Sizes go by powers of two, as in the forward pass.
    problem = (
        str(query.dtype).removeprefix("torch."),
        precision,
        block_of(head_dim),
        block_of(value_dim),
        triton.next_power_of_2(batch * key_heads),
        heads // key_heads,
        max(16, triton.next_power_of_2(seqlen_q)),
        max(16, triton.next_power_of_2(seqlen_k)),
        None if masked is None else tuple(size > 1 for size in masked.shape),
        scoring.kind_of_mask,
        scoring.kind_of_padding,
        scoring.is_causal,
    )
    if not scoring.is_plain or scoring.kind_of_mask == "both":
        problem = (*problem, *scoring.kinds_besides_masks)
    return runs, problem, "pytorch" if query.is_cuda else tilings[0].name


attention_backward_op = define_op(
    "attention_backward(Tensor grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    "Tensor output, Tensor logsumexp, bool needs_mask_grad, bool needs_bias_grad, "
    f"{SCORING_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_attention_backward,
    fake=lambda *arguments: _allocate_gradients(_request(*arguments)),
    autograd="recorded",
    vmap=over_batches(9),
)
