"""RMSNorm: the spellings of torch and of the models, residuals, fp16 clamps, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from tests.graph.helpers import Captured, capture

HIDDEN = 24
EPSILON = 1e-6
SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def x(*shape: int, dtype: torch.dtype = SINGLE) -> torch.Tensor:
    return torch.randn(*(shape or (2, 5, HIDDEN))).to(dtype)


def check(function: Any, *args: torch.Tensor, dynamic: bool | None = None) -> Captured:
    """Rewrite and run; in 16 bits results may be one rounding of the normalised values apart."""
    with torch.no_grad():
        expected = function(*args)
    found = capture(function, *args, registry=default_registry, strict=True, dynamic=dynamic)
    coarse = any(tensor.dtype != SINGLE for tensor in args)
    tolerance: dict[str, float] = {"rtol": 2**-6, "atol": 2**-7} if coarse else {}
    torch.testing.assert_close(found.result, expected, **tolerance, equal_nan=True)
    assert found.guards_added == 0
    return found


def counts(found: Captured) -> tuple[int, int]:
    return found.report.matched("rms_norm"), found.report.matched("add_rms_norm")


def formula(a: torch.Tensor, eps: float = EPSILON) -> torch.Tensor:
    return a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + eps)


def norm_of(kind: Callable[..., nn.Module], dtype: torch.dtype, *arguments: Any, **options: Any) -> nn.Module:
    norm = kind(HIDDEN, *arguments, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(HIDDEN))
    return norm.to(dtype)


NORMS: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "t5": lambda dtype: norm_of(T5LayerNorm, dtype),
    "llama": lambda dtype: norm_of(LlamaRMSNorm, dtype),
    "gemma": lambda dtype: norm_of(GemmaRMSNorm, dtype),
    "gemma3n": lambda dtype: norm_of(Gemma3nRMSNorm, dtype),
    "gemma3n without weight": lambda dtype: norm_of(Gemma3nRMSNorm, dtype, with_scale=False),
    "torch": lambda dtype: norm_of(nn.RMSNorm, dtype),
    "torch with eps": lambda dtype: norm_of(nn.RMSNorm, dtype, 1e-3),
    "torch without weight": lambda dtype: norm_of(nn.RMSNorm, dtype, elementwise_affine=False),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # torch says that its own fused kernel cannot
@pytest.mark.parametrize(
    "dtypes", [(SINGLE, SINGLE), (HALF, HALF), (BRAIN, BRAIN), (SINGLE, HALF), (BRAIN, SINGLE)], ids=str
)
@pytest.mark.parametrize("norm", NORMS)
def test_every_spelling(norm: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    found = check(NORMS[norm](dtypes[1]), x(dtype=dtypes[0]), dynamic=True if dtypes[0] == dtypes[1] else None)
    assert found.ops() == ["kernl::rms_norm"] and counts(found) == (1, 0)
    call = found.call("kernl::rms_norm")
    epsilons = {
        "torch": torch.finfo(SINGLE).eps,
        "torch with eps": 1e-3,
        "torch without weight": torch.finfo(SINGLE).eps,
    }
    assert call["eps"] == epsilons.get(norm, EPSILON)
    assert call["weight_offset"] == (1.0 if norm == "gemma" else 0.0)
    assert (call["weight"] is None) == norm.endswith("without weight")
    assert call["input"].op == "placeholder", "a cast in front of the op: it reads 16 bits by itself"


def test_other_ways_to_square() -> None:
    for squared in (torch.square, lambda a: a * a, lambda a: a**2):
        found = check(lambda a: torch.rsqrt(squared(a).mean((-1,), True) + 1e-5) * a, x())  # noqa: B023
        assert found.ops() == ["kernl::rms_norm"] and found.call("kernl::rms_norm")["weight"] is None


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("norm", ["t5", "llama", "gemma", "torch"])
def test_residual(norm: str, dynamic: bool | None) -> None:
    module = NORMS[norm](BRAIN)
    found = check(lambda a, b: module(a.cos() + b), x(dtype=BRAIN), x(dtype=BRAIN), dynamic=dynamic)
    assert found.ops() == ["cos", "kernl::rms_norm_of_sum"] and counts(found) == (0, 1)


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("norm", ["t5", "llama", "gemma", "torch"])
def test_the_sum_used_again_is_the_second_result(norm: str, dynamic: bool | None) -> None:
    module = NORMS[norm](BRAIN)

    def pre_norm(a: torch.Tensor, b: torch.Tensor) -> Any:
        total = a.add(b.cos())
        return module(total).abs(), total.abs()

    found = check(pre_norm, x(dtype=BRAIN), x(dtype=BRAIN), dynamic=dynamic)
    assert found.ops() == ["cos", "kernl::add_rms_norm", "getitem", "getitem", "abs", "abs"]


def test_a_residual_stream_in_another_dtype() -> None:
    """T5 in fp16 whose `wo` stays in fp32: the stream is fp32, its norms are fp16."""
    norm, wo = NORMS["t5"](HALF), nn.Linear(HIDDEN, HIDDEN)

    def layer(stream: torch.Tensor, inner: torch.Tensor) -> Any:
        stream = stream + wo(inner.to(wo.weight.dtype))
        return norm(stream), stream

    found = check(layer, x(dtype=HALF), x(dtype=HALF))
    assert found.ops() == ["to", "kernl::linear", "kernl::add_rms_norm", "getitem", "getitem"]
    assert [tensor.dtype for tensor in found.result] == [HALF, SINGLE]


def test_heads_normalised_where_the_projection_left_them() -> None:
    norm = NORMS["llama"](SINGLE)
    found = check(lambda a: norm(a.transpose(1, 2)), x(2, 5, 3, HIDDEN), dynamic=True)
    assert found.ops() == ["transpose", "kernl::rms_norm"]


@pytest.mark.parametrize("value", [1.0, 7e4, float("inf"), float("nan")])
def test_the_clamp_of_t5_stays(value: float) -> None:
    """As transformers writes it: the bound depends on whether anything in the whole tensor is infinite."""
    norm = NORMS["t5"](HALF)
    largest = torch.finfo(HALF).max

    def layer(a: torch.Tensor, b: torch.Tensor) -> Any:
        total = a + b
        bound = torch.where(torch.isinf(total).any(), largest - 1000, largest)
        total = torch.clamp(total, min=-bound, max=bound)
        return norm(total), total

    a = x(dtype=HALF)
    a[1, 2, 3] = value
    found = check(layer, a, x(dtype=HALF))
    assert found.ops() == ["add", "isinf", "any", "where", "neg", "clamp", "kernl::rms_norm"]
    assert counts(found) == (1, 0)


def test_a_rounded_sum_of_one_and_weight_stays_rounded() -> None:
    weight = nn.Parameter(x(HIDDEN, dtype=BRAIN))
    found = check(lambda a: (formula(a.float()) * (1.0 + weight)).type_as(a), x(dtype=BRAIN))
    assert found.ops() == ["add", "kernl::rms_norm"] and found.call("kernl::rms_norm")["weight_offset"] == 0.0


def test_a_cast_that_rounds_once_more_stays() -> None:
    norm = NORMS["llama"](HALF)
    found = check(lambda a: norm(a).float(), x(dtype=HALF))
    assert found.ops() == ["kernl::rms_norm", "to"]


def test_a_product_with_something_else_is_no_weight() -> None:
    found = check(lambda a, b: formula(a) * b, x(), x())
    assert found.ops() == ["kernl::rms_norm", "mul"] and found.call("kernl::rms_norm")["weight"] is None
    found = check(lambda a, b: formula(a) * b, x(3, HIDDEN), x(1))
    assert found.ops() == ["kernl::rms_norm", "mul"]


def test_an_embedding_sum_is_no_residual() -> None:
    word, place, norm = nn.Embedding(11, HIDDEN), nn.Parameter(x(1, 7, HIDDEN)), NORMS["llama"](SINGLE)
    ids = torch.randint(0, 11, (3, 7))
    found = check(lambda ids: norm(word(ids).cos() + place), ids)
    assert counts(found) == (1, 0) and "left to lowering" in next(iter(found.report.refused("add_rms_norm")))


def test_refusals() -> None:
    def reason(function: Any, *args: torch.Tensor, pattern: str = "rms_norm") -> str:
        found = check(function, *args)
        assert not found.report.matched(pattern)
        (only,) = set(found.report.refused(pattern))
        return only

    def over(dim: Any, a: torch.Tensor) -> torch.Tensor:
        return a * torch.rsqrt(a.pow(2).mean(dim, keepdim=True) + EPSILON)

    assert reason(lambda a: F.rms_norm(a, (5, HIDDEN)), x()) == "normalised over 2 dimensions (accepted: the last one)"
    assert reason(lambda a: over(1, a), x()) == "the mean is over dimension 1 (accepted: the last)"
    assert reason(lambda a: over((1, 2), a), x()) == "the mean is over dimension (1, 2) (accepted: the last)"
    assert reason(formula, x(dtype=BRAIN)) == "the statistics are bfloat16 (accepted: float32)"
    assert "dtype float64" in reason(lambda a: F.rms_norm(a, (HIDDEN,), None, 1e-6), x(dtype=torch.float64))
    cubed = lambda a: a * torch.rsqrt(a.abs().pow(3).mean(-1, keepdim=True) + 1.0)  # noqa: E731
    assert check(cubed, x()).report.matched("rms_norm") == 0  # the norm of another tensor than the product
    assert reason(lambda a: a * (a.pow(4).mean(-1, True) + 1.0).rsqrt(), x()) == "the exponent is 4 (accepted: 2)"
    third = lambda a: a * (a.pow(2).mean(-1, True) + 1.0).pow(-1 / 3)  # noqa: E731
    assert reason(third, x()) == "the power of the mean is -0.333333 (accepted: -0.5, a square root)"
    residual = "add_rms_norm"
    scaled_sum = lambda a, b: formula(torch.add(a, b, alpha=2))  # noqa: E731
    assert reason(scaled_sum, x(), x(), pattern=residual) == "the addition scales its second operand (alpha = 2)"


def test_values_used_elsewhere_are_not_taken_away() -> None:
    def function(a: torch.Tensor) -> Any:
        mean = a.pow(2).mean(-1, keepdim=True)
        return a * torch.rsqrt(mean + EPSILON), mean

    found = check(function, x())
    assert counts(found) == (0, 0)
    assert found.report.refused("rms_norm") == {"a value inside the match (mean) is returned by the graph": 1}
    weight = x(HIDDEN)

    def normalised_too(a: torch.Tensor) -> Any:
        normalised = formula(a)
        return normalised * weight, normalised

    assert check(normalised_too, x()).ops() == ["kernl::rms_norm", "mul"]  # the norm without its weight


def test_what_an_in_place_operation_forbids() -> None:
    norm = NORMS["llama"](SINGLE)

    def sum_written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        total = a + b
        total[0] = 1.0
        return norm(total)

    a, b = x(), x()
    expected = sum_written(a, b)
    found = capture(sum_written, a, b, registry=default_registry, strict=True)
    torch.testing.assert_close(found.result, expected)
    assert counts(found) == (1, 0)


def test_autocast_casts_as_it_did() -> None:
    norm = NORMS["t5"](SINGLE)
    with torch.autocast("cpu", dtype=BRAIN):
        found = check(lambda a, b: norm(a.bfloat16() + b.bfloat16()), x(), x())
    assert counts(found) == (0, 1) and found.result.dtype == SINGLE


@pytest.mark.parametrize("norm", ["t5", "llama", "gemma", "torch"])
def test_gradients(norm: str) -> None:
    module = NORMS[norm](SINGLE)
    a, b = x().requires_grad_(), x().requires_grad_()
    function = lambda a, b: module(a + b)  # noqa: E731
    found = capture(function, a, b, registry=default_registry, strict=True, grad=True)
    assert counts(found) == (0, 1)
    seed = torch.randn_like(a)
    mine = torch.autograd.grad(found.result, [a, b, module.weight], seed)
    plain = torch.autograd.grad(function(a, b), [a, b, module.weight], seed)
    torch.testing.assert_close(mine, plain)
