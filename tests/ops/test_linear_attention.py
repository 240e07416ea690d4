"""kernl.ops.linear_attention and causal_dot_product: against two float64 oracles, forward, gradients and states."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import kernl.kernels.linear_attention as kernel_file
from kernl.ops import LinearAttentionState, causal_dot_product, linear_attention
from kernl.ops.common import ahead_of
from kernl.ops.linear_attention_formulas import CHUNK
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun
from tests.ops.test_attention import one_by_one

op_file = importlib.import_module("kernl.ops.linear_attention")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": lambda x: F.elu(x) + 1,
    "relu": torch.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Case:
    """One call; everything a test varies. lengths: of queries and keys. dims: E and M."""

    lengths: tuple[int, int] = (130, 130)
    dims: tuple[int, int] = (48, 48)
    causal: bool = True
    normalize: bool = True
    feature_map: str = "elu"
    key_lengths: bool = False
    with_state: bool = False
    schedule: str = "sequential"
    batch: int = 2
    heads: int = 1

    def __str__(self) -> str:
        words = [f"N{self.lengths[0]}x{self.lengths[1]}", f"D{self.dims[0]}x{self.dims[1]}", self.feature_map]
        words += [self.schedule, "causal" if self.causal else "full"]
        flags = {"normalize": self.normalize, "lengths": self.key_lengths, "state": self.with_state}
        return "-".join(words + [name for name, is_on in flags.items() if is_on])


@dataclass
class Inputs:
    """query, key, value [batch, length, heads, dim]; state and key_sum; key_lengths; gradients that come back."""

    tensors: list[torch.Tensor]
    states: list[torch.Tensor]
    key_lengths: torch.Tensor | None
    grads: list[torch.Tensor]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
        lists = [list(map(change, each)) for each in (self.tensors, self.states, self.grads)]
        return Inputs(lists[0], lists[1], self.key_lengths, lists[2])


def draw(case: Case, dtype: torch.dtype, rng: torch.Generator) -> Inputs:
    (length_q, length_k), (key_dim, value_dim) = case.lengths, case.dims
    batch, heads = case.batch, case.heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    query, key = normal(batch, length_q, heads, key_dim), normal(batch, length_k, heads, key_dim)
    if case.normalize and case.feature_map != "elu":
        query, key = query.abs() + 0.1, key.abs() + 0.1  # a normaliser near zero would be a matter of luck
    value = normal(batch, length_k, heads, value_dim)
    states = [normal(batch, heads, key_dim, value_dim), 5 * normal(batch, heads, key_dim).abs()]
    grads = [normal(batch, length_q, heads, value_dim).to(dtype), *(0.1 * normal(*each.shape) for each in states)]
    lengths = torch.tensor([length_k, max(1, length_k * 2 // 3)])[:batch] if case.key_lengths else None
    count = (2 if case.normalize else 1) if case.with_state else 0
    outputs = 3 if case.normalize else 2
    return Inputs([each.to(dtype) for each in (query, key, value)], states[:count], lengths, grads[:outputs])


def call(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """Output [batch, length, heads, M], state and, normalised, key sum: by the public functions."""
    if case.normalize:
        output, state = linear_attention(
            *inputs.tensors,
            feature_map=case.feature_map,
            key_lengths=inputs.key_lengths,
            causal=case.causal,
            initial_state=LinearAttentionState(*inputs.states) if inputs.states else None,
            return_state=True,
            schedule=case.schedule,
        )
        return [output, *state]
    operands = [tensor.transpose(1, 2) for tensor in inputs.tensors]
    output, total = causal_dot_product(
        *operands, initial_state=inputs.states[0] if inputs.states else None, return_state=True, schedule=case.schedule
    )
    return [output.transpose(1, 2), total]


def differentiate(
    case: Case, inputs: Inputs, function: Callable[[Case, Inputs], list[torch.Tensor]] = call
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results, and the gradients of operands and states."""
    inputs = inputs.map(lambda tensor: tensor.detach().clone())
    leaves = [tensor.requires_grad_() for tensor in (*inputs.tensors, *inputs.states)]
    results = function(case, inputs)
    grads = [grad.to(result.dtype) for grad, result in zip(inputs.grads, results)]
    found = torch.autograd.grad(results, leaves, grads)
    return [result.detach() for result in results], list(found)


# The oracles, in the type of the inputs


def visible(case: Case, inputs: Inputs) -> torch.Tensor:
    """bool, broadcasts to [batch, heads, length_q, length_k]."""
    length_q, length_k = inputs.tensors[0].shape[1], inputs.tensors[1].shape[1]
    device = inputs.tensors[0].device
    seen = torch.ones(length_q, length_k, dtype=torch.bool, device=device)
    if case.causal:
        seen = seen.tril()
    if inputs.key_lengths is None:
        return seen[None, None]
    return seen & (torch.arange(length_k, device=device) < inputs.key_lengths[:, None])[:, None, None, :]


def mapped(case: Case, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """phi(query), phi(key), value, [batch, heads, length, dim]; zeros at keys nobody can see."""
    query, key, value = (tensor.transpose(1, 2) for tensor in inputs.tensors)
    seen = visible(case, inputs).any(2)[..., None]
    return (
        MAPS[case.feature_map](query),
        MAPS[case.feature_map](key).masked_fill(~seen, 0),
        value.masked_fill(~seen, 0),
    )


def zero_states(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    query, value = inputs.tensors[0], inputs.tensors[2]
    shape = (query.shape[0], query.shape[2], query.shape[3], value.shape[3])
    states = [query.new_zeros(shape), query.new_zeros(shape[:3])]
    return [*inputs.states, *states[len(inputs.states) :]]


def quadratic(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    query, key, value = mapped(case, inputs)
    state, key_sum = zero_states(case, inputs)
    scores = (query @ key.mT).masked_fill(~visible(case, inputs), 0)
    output = scores @ value + query @ state
    state = state + key.mT @ value
    if not case.normalize:
        return [output.transpose(1, 2), state]
    output = output / (scores.sum(-1) + (query * key_sum[:, :, None]).sum(-1) + 1e-6)[..., None]
    return [output.transpose(1, 2), state, key_sum + key.sum(2)]


def sequential(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """Causal, one position after the other."""
    query, key, value = mapped(case, inputs)
    state, key_sum = zero_states(case, inputs)
    outputs = []
    for i in range(query.shape[2]):
        if i < key.shape[2]:
            state = state + key[:, :, i, :, None] * value[:, :, i, None, :]
            key_sum = key_sum + key[:, :, i]
        output = (query[:, :, i, None, :] @ state)[:, :, 0]
        if case.normalize:
            output = output / ((query[:, :, i] * key_sum).sum(-1, keepdim=True) + 1e-6)
        outputs.append(output)
    return [torch.stack(outputs, 1), state, key_sum][: 3 if case.normalize else 2]


# The baseline: plain PyTorch with sums in float32, everything that enters a product rounded to the type


def plain(case: Case, inputs: Inputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Results and gradients in the types of `call`. Gradients from the formulas, and from rounded results.

    Computed where the inputs are: in which order a device adds up a thousand float32 products is part of its error. In
    float32, where nothing else errs, one after the other.
    """
    dtype = inputs.tensors[0].dtype
    product = one_by_one if dtype == torch.float32 else torch.matmul

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        """To the digits of the type, not to its range."""
        mantissa, exponent = torch.frexp(tensor)
        return torch.ldexp(mantissa.to(dtype).float(), exponent)

    def summed(tensor: torch.Tensor) -> torch.Tensor:
        """Over positions, one after the other: `sum` adds in a tree, which errs less than any running sum."""
        total = tensor[:, :, 0]
        for position in range(1, tensor.shape[2]):
            total = total + tensor[:, :, position]
        return total

    in_float = inputs.map(lambda tensor: tensor.float())
    query, key, value = (rounded(tensor) for tensor in mapped(case, in_float))
    state, key_sum = zero_states(case, in_float)
    seen = visible(case, inputs)
    products = product(query, key.mT).masked_fill(~seen, 0)
    output = product(rounded(products), value) + product(query, rounded(state))
    results = [output, state + product(key.mT, value)]
    inverse, delta = key_sum.new_ones(()), key_sum.new_zeros(())
    grad = in_float.grads[0].transpose(1, 2)
    if case.normalize:
        inverse = 1 / (products.sum(-1) + (query * key_sum[:, :, None]).sum(-1) + 1e-6)[..., None]
        results = [output * inverse, results[1], key_sum + summed(key)]
        delta = (grad * rounded(results[0])).sum(-1, keepdim=True)
    grad_state = in_float.grads[1]
    grad_sum = in_float.grads[2] if case.normalize else torch.zeros_like(key_sum)
    scores = (product(grad, value.mT) - delta).masked_fill(~seen, 0)
    grad_query = (
        product(rounded(scores), key) + product(grad, rounded(state).mT) - delta * key_sum[:, :, None]
    ) * inverse
    grad_key = product(rounded(scores * inverse).mT, query) + product(value, rounded(grad_state).mT)
    grad_key = grad_key + grad_sum[:, :, None]
    grad_value = product(rounded(products * inverse).mT, grad) + product(key, rounded(grad_state))
    gradients = [grad_query, grad_key, grad_value]
    for place in (0, 1):
        raw = in_float.tensors[place].transpose(1, 2).detach().requires_grad_()
        slope = torch.autograd.grad(MAPS[case.feature_map](raw).sum(), raw)[0]
        gradients[place] = gradients[place] * slope
    exists = seen.any(2)[..., None]
    gradients[1:] = [gradient.masked_fill(~exists, 0) for gradient in gradients[1:]]
    gradients = [gradient.transpose(1, 2).to(dtype) for gradient in gradients]
    weighted = rounded(query * inverse)
    gradients.append(grad_state + product(weighted.mT, grad))
    gradients.append(grad_sum - summed(query * inverse * delta))
    results[0] = results[0].transpose(1, 2).to(dtype)
    return results, gradients[: 3 + len(inputs.states)]


def linear(case: Case, inputs: Inputs) -> list[torch.Tensor]:
    """The linear form: each query meets sums over keys instead of keys."""
    if case.causal:
        return sequential(case, inputs)
    query, key, value = mapped(case, inputs)
    state, key_sum = zero_states(case, inputs)
    state, key_sum = state + key.mT @ value, key_sum + key.sum(2)
    output = query @ state
    if not case.normalize:
        return [output.transpose(1, 2), state]
    return [(output / ((query * key_sum[:, :, None]).sum(-1, keepdim=True) + 1e-6)).transpose(1, 2), state, key_sum]


def baselines(case: Case, inputs: Inputs) -> list[list[torch.Tensor]]:
    """What plain PyTorch gives, results and gradients in one list, in as many ways as there are.

    In float32 the linear form is one of them. It is the computation that the kernels do, and errs otherwise than the
    quadratic one: an error of a sum over keys is common to all queries that it meets.
    """
    ways = [plain(case, inputs)]
    lengths = {tensor.shape[1] for tensor in inputs.tensors}
    if inputs.tensors[0].dtype == torch.float32 and (len(lengths) == 1 or not case.causal):
        ways.append(differentiate(case, inputs, linear))
    return [results + gradients for results, gradients in ways]


def on(device: torch.device, inputs: Inputs) -> Inputs:
    moved = inputs.map(lambda tensor: tensor.to(device))
    moved.key_lengths = None if inputs.key_lengths is None else inputs.key_lengths.to(device)
    return moved


def compare(
    name: str, dtype: torch.dtype, actual: torch.Tensor, expected: torch.Tensor, *baselines: torch.Tensor
) -> None:
    """Within the error budget; the largest error of a handful of numbers is luck, they get 16 steps of the operands."""
    if expected.numel() >= 100:
        worst = max(baselines, key=lambda baseline: float((baseline.cpu().double() - expected).abs().max()))
        assert_within_budget(actual, expected, worst, name=name)
        return
    step = 16 * torch.finfo(dtype).eps
    typical = float(expected.square().mean().sqrt())
    torch.testing.assert_close(
        actual.cpu().double(), expected, rtol=step, atol=step * typical, msg=lambda m: f"{name}: {m}"
    )


def check(
    case: Case, dtype: torch.dtype, rng: torch.Generator, kernels: KernelRun, *, gradients: bool = True
) -> list[torch.Tensor]:
    inputs = draw(case, dtype, rng)
    expected, expected_grads = differentiate(case, inputs.map(lambda tensor: tensor.double()), quadratic)
    placed = on(kernels.device, inputs)
    ways = baselines(case, placed)
    found: list[torch.Tensor] = []
    if gradients:
        actual, found = differentiate(case, placed)
        assert kernels.launched("linear_attention_backward") == 1
    else:
        actual = [result.detach() for result in call(case, placed)]
    assert kernels.launched("linear_attention_forward") == 1
    assert actual[0].dtype == dtype and actual[0].is_contiguous()
    names = ["output", "state", "key_sum"][: len(expected)]
    names += [f"gradient of {name}" for name in ("query", "key", "value", "initial state", "initial key sum")]
    for name, *tensors in zip(names, actual + found, expected + expected_grads, *ways):
        compare(name, dtype, *tensors)
    return actual + found


CASES = [
    (torch.float16, Case(key_lengths=True, with_state=True)),
    (torch.float16, Case((200, 200), (64, 64), schedule="chunkwise")),
    (torch.bfloat16, Case((130, 70), (80, 40), key_lengths=True, with_state=True, schedule="chunkwise")),
    (torch.float32, Case((150, 150), (17, 33), key_lengths=True, with_state=True, schedule="chunkwise")),
    (torch.float32, Case((65, 65), (80, 16), feature_map="relu", with_state=True)),
    (torch.float16, Case((129, 129), (64, 32), feature_map="identity", normalize=False, with_state=True)),
    (torch.bfloat16, Case((130, 130), (40, 80), feature_map="identity", normalize=False, schedule="chunkwise")),
    (torch.float32, Case((70, 70), (16, 128), feature_map="identity", normalize=False, with_state=True)),
    (torch.float16, Case((130, 200), (48, 64), causal=False, key_lengths=True, with_state=True, schedule="chunkwise")),
    (torch.bfloat16, Case((70, 65), (80, 48), causal=False, feature_map="relu")),
    (torch.float32, Case((65, 130), (33, 80), causal=False, key_lengths=True, with_state=True, schedule="chunkwise")),
    (torch.float16, Case((1, 1), (64, 64), batch=1, heads=3, with_state=True)),
]


@pytest.mark.parametrize(("dtype", "case"), CASES, ids=lambda value: str(value).removeprefix("torch."))
def test_results_and_gradients(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, case: Case) -> None:
    check(case, dtype, rng, kernels)


@pytest.mark.parametrize("length", [1, 63, 64, 65])
@pytest.mark.parametrize("schedule", ["sequential", "chunkwise"])
def test_lengths_around_a_chunk(kernels: KernelRun, rng: torch.Generator, length: int, schedule: str) -> None:
    check(
        Case((length, length), (20, 30), schedule=schedule, batch=1, heads=2),
        torch.float16,
        rng,
        kernels,
        gradients=False,
    )


@pytest.mark.parametrize("dims", [(1, 1), (1, 80), (256, 100), (100, 256)], ids=str)
def test_dims(kernels: KernelRun, rng: torch.Generator, dims: tuple[int, int]) -> None:
    # Sums of 64 positions of one head and one dimension would be too few numbers to judge an error by.
    case = Case((96, 96), dims, batch=2, heads=2, schedule="chunkwise")
    check(case, torch.float32, rng, kernels, gradients=dims[0] == 256)


def test_a_long_sequence(kernels: KernelRun, rng: torch.Generator) -> None:
    case = Case((4097, 4097), (16, 16), batch=1, schedule="chunkwise")
    check(case, torch.float16, rng, kernels, gradients=False)


# The formulas, which run on CPUs and for wide heads


@pytest.mark.parametrize("case", [case for _, case in CASES] + [Case((CHUNK + 3, CHUNK + 3), (300, 5))], ids=str)
def test_formulas(rng: torch.Generator, case: Case) -> None:
    inputs = draw(case, torch.float64, rng).map(lambda tensor: tensor.double())
    for oracle in (quadratic, sequential) if case.causal else (quadratic,):
        for got, wanted in zip(differentiate(case, inputs), differentiate(case, inputs, oracle)):
            for one, other in zip(got, wanted):
                torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives(rng: torch.Generator, causal: bool) -> None:
    inputs = draw(Case((5, 5), (3, 2), batch=1, causal=causal, with_state=True), torch.float64, rng)
    inputs = inputs.map(lambda tensor: tensor.double())
    leaves = [tensor.requires_grad_() for tensor in (*inputs.tensors, *inputs.states)]

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return linear_attention(*tensors[:3], causal=causal, initial_state=LinearAttentionState(*tensors[3:]))

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_65536_positions(rng: torch.Generator) -> None:
    """The running state in float32 holds what a long sequence adds up."""
    case = Case((65536, 65536), (8, 4), batch=1)
    inputs = draw(case, torch.float16, rng)
    actual = call(case, inputs)[0]
    query, key, value = (tensor.double().transpose(1, 2) for tensor in inputs.tensors)
    query, key = MAPS["elu"](query), MAPS["elu"](key)
    totals = (key[..., :, None] * value[..., None, :]).cumsum(2)
    expected = (query[..., None, :] @ totals)[..., 0, :] / ((query * key.cumsum(2)).sum(-1, keepdim=True) + 1e-6)
    expected = expected.transpose(1, 2)
    assert_within_budget(actual, expected, expected.to(torch.float16))


# Behaviour


def test_a_sequence_in_parts(kernels: KernelRun, rng: torch.Generator) -> None:
    """A state that is handed on continues the sequence."""
    case = Case((150, 150), (48, 33))
    inputs = on(kernels.device, draw(case, torch.float16, rng))
    whole, state = linear_attention(*inputs.tensors, causal=True, return_state=True)
    first = [tensor[:, :70] for tensor in inputs.tensors]
    rest = [tensor[:, 70:] for tensor in inputs.tensors]
    one, between = linear_attention(*first, causal=True, return_state=True)
    other, after = linear_attention(*rest, causal=True, initial_state=between, return_state=True, schedule="chunkwise")
    torch.testing.assert_close(torch.cat((one, other), 1), whole, rtol=2e-3, atol=2e-3)
    for given, expected in zip(after, state):
        torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("schedule", ["sequential", "chunkwise"])
def test_same_bits_each_time(kernels: KernelRun, rng: torch.Generator, schedule: str) -> None:
    case = Case((130, 130), schedule=schedule, with_state=True)
    inputs = on(kernels.device, draw(case, torch.float16, rng))
    first, second = differentiate(case, inputs), differentiate(case, inputs)
    for one, other in zip(first[0] + first[1], second[0] + second[1]):
        assert torch.equal(one, other)


def test_schedules_differ_in_their_partial_states(kernels: KernelRun, rng: torch.Generator) -> None:
    inputs = on(kernels.device, draw(Case(), torch.float16, rng))
    linear_attention(*inputs.tensors, causal=True, schedule="sequential")
    assert kernels.launched("linear_attention_state") == 0
    linear_attention(*inputs.tensors, causal=True, schedule="chunkwise")
    assert kernels.launched("linear_attention_state") == 1


def test_float16_range(kernels: KernelRun, rng: torch.Generator) -> None:
    """States, scores and normalisers beyond float16's largest number, and far below its smallest."""
    case = Case((200, 200), (64, 32), feature_map="identity", batch=3)
    for size in (200.0, 1e-3):
        inputs = draw(case, torch.float16, rng)
        inputs.tensors[:2] = [(tensor * size).half() for tensor in inputs.tensors[:2]]
        inputs.tensors[2] += 4
        inputs.grads[1:] = [torch.zeros_like(grad) for grad in inputs.grads[1:]]
        expected, expected_grads = differentiate(case, inputs.map(lambda tensor: tensor.double()), quadratic)
        actual, found = differentiate(case, on(kernels.device, inputs))
        assert_within_budget(actual[0], expected[0], expected[0].half(), name="output")
        for name, got, wanted in zip("qkv", found, expected_grads):
            assert got.isfinite().all()
            assert_within_budget(got, wanted, plain(case, inputs)[1]["qkv".index(name)], name=f"gradient of {name}")


@pytest.mark.parametrize("causal", [False, True])
def test_padded_keys_do_not_leak(kernels: KernelRun, rng: torch.Generator, causal: bool) -> None:
    case = Case((70, 70), causal=causal, key_lengths=True)
    inputs = on(kernels.device, draw(case, torch.float32, rng))
    expected, expected_grads = differentiate(case, inputs)
    for place in (1, 2):
        inputs.tensors[place][1, 70 * 2 // 3 :] = math.nan
    actual, found = differentiate(case, inputs)
    for one, other in zip(actual + found, expected + expected_grads):
        assert torch.equal(one, other)
    assert not found[1][1, 70 * 2 // 3 :].any() and not found[2][1, 70 * 2 // 3 :].any()


def test_strides(kernels: KernelRun, rng: torch.Generator) -> None:
    """Views of one projection, a broadcast head, a last dimension that is not dense."""
    packed = torch.randn(2, 70, 2, 3, 32, generator=rng).to(kernels.device)
    query, key, value = packed.unbind(3)
    strided = [query, key[:, :, :1].expand(-1, -1, 2, -1), value.mT.contiguous().mT]
    expected = linear_attention(*(tensor.contiguous() for tensor in strided), causal=True)
    assert torch.equal(linear_attention(*strided, causal=True), expected)


@pytest.mark.parametrize("lengths", [(40, 70), (70, 40)], ids=str)
def test_causal_with_other_lengths(kernels: KernelRun, rng: torch.Generator, lengths: tuple[int, int]) -> None:
    """Keys and values are cut or filled up to the length of the queries."""
    inputs = on(kernels.device, draw(Case(lengths), torch.float32, rng))
    query, key, value = inputs.tensors
    missing = max(0, lengths[0] - lengths[1])
    filled = [F.pad(tensor[:, : lengths[0]], (0, 0, 0, 0, 0, missing)) for tensor in (key, value)]
    given = torch.full((2,), min(lengths), device=kernels.device)
    expected = linear_attention(query, *filled, key_lengths=given, causal=True)
    assert torch.equal(linear_attention(query, key, value, causal=True), expected)


def test_callable_feature_map(kernels: KernelRun, rng: torch.Generator) -> None:
    inputs = on(kernels.device, draw(Case(), torch.float32, rng))
    named = linear_attention(*inputs.tensors, feature_map="elu", causal=True)
    called = linear_attention(*inputs.tensors, feature_map=lambda x: F.elu(x) + 1, causal=True)
    torch.testing.assert_close(called, named, rtol=1e-5, atol=1e-5)
    doubled = linear_attention(*inputs.tensors, feature_map=lambda x: torch.cat((x.relu(), (-x).relu()), -1))
    assert doubled.shape == inputs.tensors[2].shape


def test_autocast(rng: torch.Generator) -> None:
    inputs = draw(Case(), torch.float32, rng)
    with torch.autocast("cpu", torch.bfloat16):
        output = linear_attention(*inputs.tensors, causal=True)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, linear_attention(*(each.bfloat16() for each in inputs.tensors), causal=True))


def test_op_contract(rng: torch.Generator) -> None:
    inputs = draw(Case((9, 9), (4, 6), with_state=True), torch.float32, rng)
    operands = [tensor.transpose(1, 2).requires_grad_() for tensor in inputs.tensors]
    for normalize in (True, False):
        states = inputs.states if normalize else [inputs.states[0], None]
        arguments = (*operands, None, *states, "elu", True, normalize, 1e-6, "auto")
        torch.library.opcheck(torch.ops.kernl.linear_attention.default, arguments)


def test_under_torch_compile(rng: torch.Generator) -> None:
    inputs = draw(Case((33, 33)), torch.float32, rng)
    for tensor in inputs.tensors:
        tensor.requires_grad_()

    def function(*tensors: torch.Tensor) -> torch.Tensor:
        return linear_attention(*tensors, causal=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    results = [torch.autograd.grad(each(*inputs.tensors).sum(), inputs.tensors) for each in (function, compiled)]
    for one, other in zip(*results):
        torch.testing.assert_close(one, other)


def test_kernels_are_made_ahead(kernels: KernelRun, rng: torch.Generator) -> None:
    inputs = on(kernels.device, draw(Case((9, 9), (16, 8), with_state=True), torch.float16, rng))
    operands = [tensor.transpose(1, 2) for tensor in inputs.tensors]
    arguments = [
        *operands,
        torch.tensor([9, 5], device=kernels.device),
        *inputs.states,
        "elu",
        True,
        True,
        1e-6,
        "auto",
    ]
    pairs = ahead_of(torch.ops.kernl.linear_attention, arguments)
    assert len(pairs) >= 2 and len({key for key, _ in pairs}) == len(pairs)
    for _, run in pairs:
        run()
    assert kernels.launched("linear_attention_forward") == len(pairs)


def test_what_runs_the_formulas(kernels: KernelRun, rng: torch.Generator) -> None:
    for dtype, dims in ((torch.float64, (8, 8)), (torch.float32, (257, 8)), (torch.float32, (8, 257))):
        case = Case((9, 9), dims)
        call(case, on(kernels.device, draw(case, dtype, rng)))
    assert kernels.launched("linear_attention_forward") == 0


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"query": torch.zeros(2, 5, 3)}, ValueError, r"query: got shape \[2, 5, 3\], accepted \[batch"),
        ({"key": torch.zeros(2, 5, 1, 4)}, ValueError, "key: got dim 4, accepted query's, 8"),
        ({"value": torch.zeros(2, 6, 1, 8)}, ValueError, "value: got length 6, accepted key's, 5"),
        ({"value": torch.zeros(2, 5, 2, 8)}, ValueError, "value: got batch 2 and 2 heads"),
        ({"key": torch.zeros(2, 5, 1, 8).half()}, ValueError, "key: got torch.float16, accepted query's type"),
        ({"query": torch.zeros(2, 5, 1, 8).long()}, TypeError, "query: got torch.int64"),
        ({"key_lengths": torch.zeros(3, dtype=torch.int32)}, ValueError, "key_lengths: got torch.int32 of shape"),
        ({"feature_map": "softmax"}, ValueError, "feature_map: got 'softmax', accepted 'elu'"),
        ({"feature_map": 3}, TypeError, "feature_map: got 3"),
        ({"schedule": "fast"}, ValueError, "schedule: got 'fast', accepted 'auto'"),
        (
            {"initial_state": (torch.zeros(2, 1, 8, 7), torch.zeros(2, 1, 8))},
            ValueError,
            r"initial_state.key_value: got torch.float32 of shape \[2, 1, 8, 7\]",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_errors(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {name: torch.zeros(2, 5, 1, 8) for name in ("query", "key", "value")} | change
    with pytest.raises(error, match=text):
        linear_attention(**arguments)


def test_the_example_of_the_page() -> None:
    page = Path(__file__).parents[2] / "docs" / "linear_attention.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    whole = linear_attention(names["query"], names["key"], names["value"], causal=True)
    torch.testing.assert_close(torch.cat((names["first"], names["rest"]), 1), whole, rtol=1e-4, atol=1e-5)


# The rule that chooses a plan


def shape(batch_heads: int, length: int, dim: int, is_causal: bool = True) -> kernel_file.Shape:
    return kernel_file.Shape(batch_heads, length, length, dim, dim, 2, is_causal)


def plan_of(of: kernel_file.Shape, schedule: str = "auto") -> kernel_file.Plan:
    forward, state = kernel_file.tilings(90, torch.float16, of.key_dim, of.value_dim, input_precision="ieee")
    assert state is not None
    return kernel_file.default_plan(kernel_file.plans(forward, state, of, schedule), of, 132)


@pytest.mark.parametrize(
    ("of", "is_cut"),
    [
        (shape(32, 4096, 64), True),
        (shape(16, 32768, 64), True),
        (shape(1024, 2048, 64), False),
        (shape(1, 64, 64), False),
    ],
    ids=str,
)
def test_few_heads_are_cut_into_segments(of: kernel_file.Shape, is_cut: bool) -> None:
    plan = plan_of(of)
    assert (plan.segments > 1) == is_cut
    assert plan.key_segments == plan.segments - 1
    assert plan_of(of, "sequential").segments == 1


@pytest.mark.parametrize("of", [shape(32, 4096, 64), shape(1, 65536, 64), shape(8, 8192, 128), shape(3, 5000, 256)])
def test_partial_states_are_a_small_share(of: kernel_file.Shape) -> None:
    plan = plan_of(of)
    states = plan.key_segments * of.batch_heads * of.state_bytes
    assert states <= of.batch_heads * of.length_q * of.bytes_per_position / kernel_file.SHORTEST_SEGMENT_SHARE


def test_segments_cover_the_length() -> None:
    for length in (1, 63, 64, 65, 1000, 4097):
        for count in (1, 2, 3, 8, 32):
            segments = kernel_file.segments_of(length, count, 64)
            per_segment = kernel_file.segment_length(length, segments, 64)
            assert segments <= count and (segments - 1) * per_segment < length <= segments * per_segment
