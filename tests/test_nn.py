"""kernl.nn: the modules' contract, masks and feature maps of both kinds, the recurrent step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from kernl.nn import CausalLinearAttention, LinearAttention, RecurrentLinearAttention
from tests.conftest import KernelRun

BATCH, LENGTH, HEADS, KEY_DIM, VALUE_DIM = 2, 37, 3, 16, 24


class Mask:
    """A mask object: what the modules may ask of one. Which keys count, as bool."""

    def __init__(self, matrix: torch.Tensor):
        self.bool_matrix = matrix
        self.float_matrix = matrix.float()
        self.all_ones = bool(matrix.all())
        self.lower_triangular = bool((matrix == torch.ones_like(matrix).tril()).all())


class LengthMask(Mask):
    def __init__(self, lengths: torch.Tensor, longest: int):
        super().__init__(torch.arange(longest) < lengths[:, None])
        self.lengths = lengths


class DoubledRelu(nn.Module):
    """A feature map object: relu of both signs, times a factor that is drawn anew; it tells queries from keys."""

    def __init__(self, query_dimensions: int):
        super().__init__()
        self.query_dimensions = query_dimensions
        self.drawn = 0
        self.weight = nn.Parameter(torch.ones(query_dimensions))

    def new_feature_map(self, device: torch.device) -> None:
        self.drawn += 1

    def forward_queries(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x.relu(), (-x).relu()), -1) * 2

    def forward_keys(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return torch.cat((x.relu(), (-x).relu()), -1)


def draw(rng: torch.Generator, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    shapes = [(BATCH, LENGTH, HEADS, dim) for dim in (KEY_DIM, KEY_DIM, VALUE_DIM)]
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


def expected(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """From mapped queries and keys, by the quadratic form. counts: bool [batch, length] of the keys."""
    scores = torch.einsum("nlhe,nshe->nhls", queries, keys)
    if causal:
        scores = scores.tril()
    if counts is not None:
        scores = scores * counts[:, None, None, :]
    weights = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    return torch.einsum("nhls,nshm->nlhm", weights, values)


def elu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.elu(x) + 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["object", "bool", "float", "none"])
def test_masks_that_are_taken(rng: torch.Generator, causal: bool, kind: str) -> None:
    queries, keys, values = draw(rng)
    matrix = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    matrix = matrix.tril() if causal else matrix
    mask: Any = {
        "object": Mask(matrix),
        "bool": matrix,
        "float": torch.zeros(LENGTH, LENGTH).masked_fill(~matrix, -math.inf),
        "none": None,
    }[kind]
    module = (CausalLinearAttention if causal else LinearAttention)(KEY_DIM)
    output = module(queries, keys, values, mask, None, None)
    torch.testing.assert_close(output, expected(elu(queries), elu(keys), values, causal))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_masks_that_are_refused(rng: torch.Generator, as_tensor: bool) -> None:
    operands = draw(rng)
    ones = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    other = ones.clone()
    other[3, 1] = False
    wrap = (lambda matrix: matrix) if as_tensor else Mask
    for module, matrices in ((LinearAttention, (ones.tril(), other)), (CausalLinearAttention, (ones, other))):
        for matrix in matrices:
            with pytest.raises(RuntimeError, match=f"attn_mask: {module.__name__} takes a .* only"):
                module(KEY_DIM)(*operands, wrap(matrix))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["lengths", "length mask", "matrix", "bool", "all"])
def test_key_lengths(rng: torch.Generator, causal: bool, kind: str) -> None:
    queries, keys, values = draw(rng)
    lengths = torch.tensor([LENGTH, 20])
    counts = torch.arange(LENGTH) < lengths[:, None]
    given: Any = {
        "lengths": lengths.int(),
        "length mask": LengthMask(lengths, LENGTH),
        "matrix": Mask(counts),
        "bool": counts,
        "all": LengthMask(torch.full((BATCH,), LENGTH), LENGTH),
    }[kind]
    module = (CausalLinearAttention if causal else LinearAttention)(KEY_DIM)
    output = module(queries, keys, values, None, LengthMask(lengths, LENGTH), given)
    wanted = expected(elu(queries), elu(keys), values, causal, None if kind == "all" else counts)
    torch.testing.assert_close(output, wanted)


def test_key_lengths_of_a_wrong_shape(rng: torch.Generator) -> None:
    with pytest.raises(ValueError, match=r"key_lengths: got torch.float32 of shape \[2\], accepted integers"):
        LinearAttention(KEY_DIM)(*draw(rng), key_lengths=torch.ones(2))


@pytest.mark.parametrize("name", ["elu", "relu", "identity"])
def test_named_feature_maps(rng: torch.Generator, name: str) -> None:
    queries, keys, values = draw(rng)
    queries, keys = queries.abs(), keys.abs()
    function = elu if name == "elu" else lambda x: x  # of positive numbers
    output = LinearAttention(KEY_DIM, feature_map=name)(queries, keys, values)
    torch.testing.assert_close(output, expected(function(queries), function(keys), values, False))


@pytest.mark.parametrize("causal", [False, True])
def test_feature_map_factories(rng: torch.Generator, causal: bool) -> None:
    queries, keys, values = draw(rng)
    module = (CausalLinearAttention if causal else LinearAttention)(KEY_DIM, feature_map=DoubledRelu).double()
    feature_map = module.feature_map
    assert feature_map.query_dimensions == KEY_DIM and list(module.parameters()) == [feature_map.weight]
    lengths = torch.tensor([LENGTH, 20])
    output = module(queries, keys, values, key_lengths=lengths)
    assert feature_map.drawn == 1
    mapped = feature_map.forward_queries(queries), feature_map.forward_keys(keys)
    wanted = expected(*mapped, values, causal, torch.arange(LENGTH) < lengths[:, None])
    torch.testing.assert_close(output, wanted)
    output.sum().backward()
    assert feature_map.weight.grad is not None


def test_feature_maps_that_are_refused() -> None:
    with pytest.raises(ValueError, match="feature_map: got 'softmax', accepted 'elu', 'relu', 'identity' or a factory"):
        LinearAttention(KEY_DIM, feature_map="softmax")
    with pytest.raises(TypeError, match="feature_map: got 3"):
        LinearAttention(KEY_DIM, feature_map=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("feature_map", ["elu", DoubledRelu])
def test_recurrent_step_is_the_parallel_form(rng: torch.Generator, feature_map: Any) -> None:
    queries, keys, values = draw(rng)
    causal = CausalLinearAttention(KEY_DIM, feature_map=feature_map).double()
    step = RecurrentLinearAttention(KEY_DIM, feature_map=feature_map).double()
    whole, final = causal(queries, keys, values, return_state=True)
    state, outputs = None, []
    for position in range(LENGTH):
        output, state = step(queries[:, position], keys[:, position], values[:, position], state)
        outputs.append(output)
    torch.testing.assert_close(torch.stack(outputs, 1), whole)
    for one, other in zip(state, final):
        torch.testing.assert_close(one, other)
    if feature_map is DoubledRelu:
        assert step.feature_map.drawn == 1


def test_recurrent_step_after_a_prompt_on_kernels(kernels: KernelRun, rng: torch.Generator) -> None:
    """float16: the state is float32, so that steps and the parallel form differ by roundings of the output alone."""
    operands = [tensor.to(kernels.device) for tensor in draw(rng, torch.float16)]
    causal, step = CausalLinearAttention(KEY_DIM), RecurrentLinearAttention(KEY_DIM)
    whole = causal(*operands)
    _, state = causal(*(tensor[:, :34] for tensor in operands), return_state=True)
    for position in range(34, LENGTH):
        output, state = step(*(tensor[:, position] for tensor in operands), state)
        torch.testing.assert_close(output, whole[:, position], rtol=2e-3, atol=2e-3)
    assert kernels.launched("linear_attention_forward") == 2 + LENGTH - 34


def test_repr() -> None:
    assert repr(LinearAttention(8)) == "LinearAttention(feature_map='elu', eps=1e-06)"
