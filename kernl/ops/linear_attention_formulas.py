"""Linear attention in plain PyTorch: the CPU path, the path of wide heads, and the oracle of the kernels.

Everything is one product, chunk by chunk, with a running state S [E, M] in the type of the computation (float32, or
float64 for float64 operands):

    causal_product(q, k, v)_i = (S_0 + sum_{j <= i} k_j v_j^T)^T q_i

A normaliser is one more column of v that holds ones. The gradients are causal products too (section "Gradients"). The
formulas themselves are PyTorch operations, so that autograd can differentiate them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

CHUNK = 256
"""Positions at a time: the scores of a chunk take [batch, heads, CHUNK, CHUNK]."""


@dataclass(frozen=True)
class Problem:
    """The arguments of `torch.ops.kernl.linear_attention`, in its order.

    query [batch, heads, length_q, E], key [batch, heads, length_k, E], value [batch, heads, length_k, M].
    key_lengths: int32 or int64 [batch], or None. initial_state [batch, heads, E, M] and initial_key_sum [batch, heads,
    E], or None. feature_map: "identity", "elu" or "relu". normalize: divide by <phi(q), sum of phi(k)> + epsilon.
    schedule: of the kernels; "auto", "sequential" or "chunkwise".
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    key_lengths: torch.Tensor | None
    initial_state: torch.Tensor | None
    initial_key_sum: torch.Tensor | None
    feature_map: str
    is_causal: bool
    normalize: bool
    epsilon: float
    schedule: str

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.query.dtype == torch.float64 else torch.float32


def feature(x: torch.Tensor, name: str) -> torch.Tensor:
    """phi(x)."""
    if name == "elu":
        return F.elu(x) + 1
    return x.relu() if name == "relu" else x


def feature_derivative(x: torch.Tensor, name: str) -> torch.Tensor:
    if name == "elu":
        return torch.where(x > 0, 1.0, x.clamp(max=0).exp())
    return (x > 0).to(x.dtype) if name == "relu" else torch.ones_like(x)


def existing_keys(problem: Problem) -> torch.Tensor | None:
    """bool [batch, 1, length_k, 1], or None for all."""
    if problem.key_lengths is None:
        return None
    positions = torch.arange(problem.key.shape[2], device=problem.key.device)
    return (positions[None, :] < problem.key_lengths[:, None])[:, None, :, None]


def mapped(problem: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """phi(query), phi(key) and value in the type of the computation; zeros at keys that do not count."""
    query, key, value = (tensor.to(problem.compute_dtype) for tensor in (problem.query, problem.key, problem.value))
    query, key = (feature(tensor, problem.feature_map) for tensor in (query, key))
    exists = existing_keys(problem)
    if exists is not None:
        key, value = (tensor.masked_fill(~exists, 0) for tensor in (key, value))
    return query, key, value


def with_ones(value: torch.Tensor) -> torch.Tensor:
    return torch.cat((value, torch.ones_like(value[..., :1])), -1)


def initial(problem: Problem) -> torch.Tensor:
    """[batch, heads, E, M], or [batch, heads, E, M + 1] with the sum of keys in the last column."""
    batch, heads, _, key_dim = problem.query.shape
    shape = (batch, heads, key_dim, problem.value.shape[3])

    def zeros(*sizes: int) -> torch.Tensor:
        return torch.zeros(sizes, dtype=problem.compute_dtype, device=problem.query.device)

    state = problem.initial_state
    state = zeros(*shape) if state is None else state.to(problem.compute_dtype)
    if not problem.normalize:
        return state
    key_sum = problem.initial_key_sum
    key_sum = zeros(*shape[:3]) if key_sum is None else key_sum.to(problem.compute_dtype)
    return torch.cat((state, key_sum[..., None]), -1)


def causal_product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(result [batch, heads, length_q, M], state in the end). Keys may be fewer than queries."""
    length_q, length_k = query.shape[2], key.shape[2]
    parts = []
    for start in range(0, length_q, CHUNK):
        here = slice(start, start + CHUNK)
        queries, keys, values = query[:, :, here], key[:, :, here], value[:, :, here]
        part = queries @ state
        if start < length_k:
            part = part + (queries @ keys.mT).tril() @ values
            state = state + keys.mT @ values
        parts.append(part)
    return torch.cat(parts, 2) if parts else query @ state, state


def full_product(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `causal_product`, where every query sees all keys."""
    for start in range(0, key.shape[2], CHUNK):
        here = slice(start, start + CHUNK)
        state = state + key[:, :, here].mT @ value[:, :, here]
    return query @ state, state


def forward_by_formulas(
    problem: Problem,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, denominator, final state, final key sum) in the type of the computation.

    denominator [batch, heads, length_q] and final key sum are [0] where nothing is normalised.
    """
    query, key, value = mapped(problem)
    product = causal_product if problem.is_causal else full_product
    nothing = query.new_empty(0)
    if not problem.normalize:
        output, state = product(query, key, value, initial(problem))
        return output, nothing, state, nothing
    both, state = product(query, key, with_ones(value), initial(problem))
    denominator = both[..., -1] + problem.epsilon
    return both[..., :-1] / denominator[..., None], denominator, state[..., :-1], state[..., -1]


# Gradients


@dataclass(frozen=True)
class Request:
    """One call of the backward op: the problem, what the forward pass gave, and the gradients that came.

    grad_state [batch, heads, E, M] and grad_key_sum [batch, heads, E]: of the final state; None for zeros.
    """

    problem: Problem
    output: torch.Tensor
    denominator: torch.Tensor
    grad_output: torch.Tensor
    grad_state: torch.Tensor | None
    grad_key_sum: torch.Tensor | None


def backward_by_formulas(request: Request) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key, value, initial state and initial key sum ([0] where nothing is normalised).

    With den the denominator (1 without), delta_i = <dO_i, out_i> (0 without), g_i = dO_i / den_i and the column
    d_i = -delta_i / den_i beside it, where values have a column of ones:

        d phi(q)_i = sum_{j <= i} (<g_i, v_j> + d_i) phi(k)_j       causal_product(g', v', phi(k)), of S_0'^T
        d phi(k)_j = sum_{i >= j} (<v_j, g_i> + d_i) phi(q)_i       causal_product(v', g', phi(q)) backwards, of dS'^T
        dv_j       = sum_{i >= j} <phi(k)_j, phi(q)_i> g_i          causal_product(phi(k), phi(q), g') backwards, of dS'
        dS_0       = dS + sum_i phi(q)_i g_i^T
    """
    problem = request.problem
    query, key, value = mapped(problem)
    state = initial(problem)
    grad = request.grad_output.to(problem.compute_dtype)
    batch, heads, _, key_dim = query.shape
    zeros = query.new_zeros((batch, heads, key_dim, value.shape[3]))
    grad_state = zeros if request.grad_state is None else request.grad_state.to(zeros.dtype)
    if problem.normalize:
        delta = (grad * request.output.to(grad.dtype)).sum(-1, keepdim=True)
        inverse = 1 / request.denominator.to(grad.dtype)[..., None]
        grad, value = grad * inverse, with_ones(value)
        grad = torch.cat((grad, -delta * inverse), -1)
        grad_key_sum = zeros[..., 0] if request.grad_key_sum is None else request.grad_key_sum.to(zeros.dtype)
        grad_state = torch.cat((grad_state, grad_key_sum[..., None]), -1)
    if problem.is_causal:
        # Keys are as many as queries here, as far as products go: missing ones are zero.
        missing = query.shape[2] - key.shape[2]
        keys, values = (F.pad(tensor, (0, 0, 0, missing)) for tensor in (key, value))
        grad_query, _ = causal_product(grad, values, keys, state.mT)
        queries, keys, values, grad = (tensor.flip(2) for tensor in (query, keys, values, grad))
        grad_key, total = causal_product(values, grad, queries, grad_state.mT)
        grad_value, _ = causal_product(keys, queries, grad, grad_state)
        grad_key, grad_value = (tensor.flip(2)[:, :, : key.shape[2]] for tensor in (grad_key, grad_value))
    else:
        grad_query, _ = full_product(grad, value, key, state.mT)
        grad_key, total = full_product(value, grad, query, grad_state.mT)
        grad_value = key @ total.mT
    total = total.mT
    if problem.normalize:
        # The column of ones is no input.
        grad_value = grad_value[..., :-1]
    compute = problem.compute_dtype
    grad_query = grad_query * feature_derivative(problem.query.to(compute), problem.feature_map)
    grad_key = grad_key * feature_derivative(problem.key.to(compute), problem.feature_map)
    exists = existing_keys(problem)
    if exists is not None:
        grad_key, grad_value = (tensor.masked_fill(~exists, 0) for tensor in (grad_key, grad_value))
    if not problem.normalize:
        return grad_query, grad_key, grad_value, total, query.new_empty(0)
    return grad_query, grad_key, grad_value, total[..., :-1], total[..., -1]
