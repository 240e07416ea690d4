"""Linear attention in einsum form: which spellings match, what is fused, what is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from tests.graph.helpers import Captured, capture

pytestmark = pytest.mark.either_end

SHAPE = (2, 9, 3, 8)  # batch, length, heads, dim


def draw(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in shapes or (SHAPE, SHAPE, (*SHAPE[:3], 5))]


def elu(x: torch.Tensor) -> torch.Tensor:
    return F.elu(x) + 1


def full(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, phi: Callable[..., Any] = elu, eps: float = 1e-6
) -> torch.Tensor:
    query, key = phi(query), phi(key)
    state = torch.einsum("nshd,nshm->nhmd", key, value)
    normalizer = 1 / (torch.einsum("nlhd,nhd->nlh", query, key.sum(dim=1)) + eps)
    return torch.einsum("nlhd,nhmd,nlh->nlhm", query, state, normalizer).contiguous()


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, phi: Callable[..., Any] = elu, eps: float = 1e-6
) -> torch.Tensor:
    query, key = phi(query), phi(key)
    state = torch.einsum("nshd,nshm->nshmd", key, value).cumsum(dim=1)
    normalizer = 1 / (torch.einsum("nlhd,nlhd->nlh", query, key.cumsum(1)) + eps)
    return torch.einsum("nlhd,nlhmd,nlh->nlhm", query, state, normalizer)


def dotted(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[batch, heads, length, dim], operands in another order, no epsilon."""
    query, key = query.softmax(-1), key.exp()
    normalizer = torch.einsum("...nd,...d->...n", query, key.sum(-2)).reciprocal()
    context = torch.einsum("...nd,...ne->...de", key, value)
    return torch.einsum("...de,...nd,...n->...ne", context, query, normalizer)


def check(function: Any, *args: torch.Tensor, dynamic: bool | None = None, **options: Any) -> Captured:
    with torch.no_grad():
        expected = function(*args)
    found = capture(function, *args, registry=default_registry, strict=True, dynamic=dynamic, **options)
    torch.testing.assert_close(found.result, expected)
    assert found.guards_added == 0
    return found


def the_call(found: Captured) -> Any:
    assert found.report.matched("linear_attention") == 1
    return found.call("kernl::linear_attention")


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("form", [full, causal])
def test_einsum_form(form: Any, dynamic: bool | None) -> None:
    found = check(form, *draw(), dynamic=dynamic)
    call = the_call(found)
    assert call["feature_map"] == "elu" and call["is_causal"] == (form is causal) and call["epsilon"] == 1e-6
    assert not {"einsum", "elu", "add", "cumsum", "sum", "div"} & set(found.ops())


def test_lengths_may_differ() -> None:
    found = check(full, *draw((2, 4, 3, 8), (2, 9, 3, 8), (2, 9, 3, 5)))
    assert the_call(found)["feature_map"] == "elu"


@pytest.mark.parametrize(
    ("phi", "name"), [(torch.relu, "relu"), (torch.exp, "identity"), (lambda x: elu(x) + 1, "identity")]
)
def test_feature_maps(phi: Any, name: str) -> None:
    found = check(lambda *operands: full(*operands, phi=phi, eps=1e-3), *draw())
    call = the_call(found)
    assert call["feature_map"] == name and call["epsilon"] == 1e-3


def test_a_mask_of_the_keys_stays_outside() -> None:
    counts = (torch.arange(9) < torch.tensor([[9], [5]])).float()

    def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key = elu(key) * counts[:, :, None, None]
        return full(elu(query), key, value, phi=lambda x: x)

    assert the_call(check(masked, *draw()))["feature_map"] == "identity"


def test_other_letters_and_orders() -> None:
    found = check(dotted, *draw((2, 3, 9, 8), (2, 3, 9, 8), (2, 3, 9, 5)))
    assert the_call(found)["epsilon"] == 0.0


def test_a_feature_used_elsewhere_is_kept() -> None:
    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        mapped = elu(query)
        return full(mapped, elu(key), value, phi=lambda x: x) + mapped.sum()

    found = check(function, *draw())
    assert the_call(found)["feature_map"] == "identity" and "elu" in found.ops()


def test_in_a_module_with_gradients() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projections = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = (each(x).unflatten(-1, (3, 8)) for each in self.projections)
            return causal(query, key, value).flatten(2)

    layer, x = Layer(), torch.randn(2, 9, 24, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    found = capture(layer, x, registry=default_registry, strict=True, grad=True)
    assert found.report.matched("linear_attention") == 1
    (actual,) = torch.autograd.grad(found.result.square().sum(), x)
    torch.testing.assert_close(actual, expected)


def refused(function: Any, *operands: torch.Tensor) -> Captured:
    found = check(function, *(operands or draw()))
    assert found.report.matched("linear_attention") == 0
    assert "kernl::linear_attention" not in found.ops()
    return found


def test_a_returned_state_is_refused_with_its_reason() -> None:
    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        state = torch.einsum("nshd,nshm->nhmd", key, value)
        normalizer = 1 / (torch.einsum("nlhd,nhd->nlh", query, key.sum(dim=1)) + 1e-6)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", query, state, normalizer), state

    assert "a normaliser or a state is returned" in str(refused(function, *(each.abs() for each in draw())).report)


def test_wide_heads_and_float64_are_refused() -> None:
    refused(full, *draw((1, 3, 2, 300), (1, 3, 2, 300), (1, 3, 2, 4)))
    refused(full, *(each.double() for each in draw()))


def test_near_misses_are_left_alone() -> None:
    def normalized_over_values(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state = torch.einsum("nshd,nshm->nhmd", key, value)
        normalizer = 1 / (torch.einsum("nlhd,nhd->nlh", query, value.sum(dim=1)) + 1e-6)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", query, state, normalizer)

    def summed_over_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state = torch.einsum("nshd,nshm->nhmd", key, value)
        normalizer = 1 / (torch.einsum("nlhd,nsd->nlh", query, key.sum(dim=2)) + 1e-6)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", query, state, normalizer)

    def causal_state_alone(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state = torch.einsum("nshd,nshm->nshmd", key, value).cumsum(dim=1)
        normalizer = 1 / (torch.einsum("nlhd,nhd->nlh", query, key.sum(1)) + 1e-6)
        return torch.einsum("nlhd,nlhmd,nlh->nlhm", query, state, normalizer)

    def cumulated_over_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        state = torch.einsum("nshd,nshm->nshmd", key, value).cumsum(dim=2)
        normalizer = 1 / (torch.einsum("nlhd,nlhd->nlh", query, key.cumsum(1)) + 1e-6)
        return torch.einsum("nlhd,nlhmd,nlh->nlhm", query, state, normalizer)

    operands = [each.abs() for each in draw(SHAPE, SHAPE, SHAPE)]
    for function in (normalized_over_values, summed_over_heads, causal_state_alone, cumulated_over_heads):
        refused(function, *operands)
