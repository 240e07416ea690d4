"""The error budget must accept a correct result and refuse a wrong one, and say where it is wrong."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernl.testing import assert_within_budget, error_report
from tests.conftest import _matches

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def softmax(rng: torch.Generator, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(input, float64 result, baseline) of a computation with some error."""
    input = (torch.randn(32, 100, generator=rng) * 3).to(dtype)
    return input, input.double().softmax(-1), input.softmax(-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_correct_result_passes(rng: torch.Generator, dtype: torch.dtype) -> None:
    input, exact, baseline = softmax(rng, dtype)
    assert_within_budget(baseline, exact, baseline)
    assert_within_budget(exact.to(dtype), exact, baseline)
    shifted = input.float() - input.float().amax(-1, keepdim=True)
    assert_within_budget((shifted.exp() / shifted.exp().sum(-1, keepdim=True)).to(dtype), exact, baseline)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_wrong_element_fails(rng: torch.Generator, dtype: torch.dtype) -> None:
    _, exact, baseline = softmax(rng, dtype)
    wrong = baseline.clone()
    largest = int(exact.argmax())
    step = torch.finfo(dtype).eps
    wrong.view(-1)[largest] *= 1 + 8 * step
    with pytest.raises(AssertionError) as failure:
        assert_within_budget(wrong, exact, baseline, name="softmax")
    text = str(failure.value)
    place = [largest // 100, largest % 100]
    assert "softmax: exceeds the error budget" in text and "shape [32, 100]" in text
    assert f"max absolute difference  {error_report(wrong, exact, baseline).max_abs:.3e} at {place}" in text
    assert f"1 of 3200 (0.0312 %), from {place} to {place}" in text
    assert f"at {place}: got" in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_small_error_everywhere_fails(rng: torch.Generator, dtype: torch.dtype) -> None:
    """Each element is inside the element-wise budget, all of them together are not."""
    _, exact, _ = softmax(rng, dtype)
    baseline = exact.to(dtype)
    scaled = (exact * (1 + 3 * torch.finfo(dtype).eps)).to(dtype)
    report = error_report(scaled, exact, baseline)
    assert not report.within_budget and report.norm > report.allowed_norm


def test_the_budget_is_of_the_size_of_the_baselines_error(rng: torch.Generator) -> None:
    _, exact, baseline = softmax(rng, torch.float16)
    error = (baseline.double() - exact).abs().max().item()
    inside, outside = exact + 1.9 * error, exact + 3 * error
    report = error_report(inside.to(torch.float16), exact, baseline)
    assert report.mismatches == 0 and report.allowed_abs == pytest.approx(2 * error)
    assert error_report(outside.to(torch.float16), exact, baseline).mismatches > 100


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_element_fails(rng: torch.Generator, value: float) -> None:
    _, exact, baseline = softmax(rng, torch.float16)
    wrong = baseline.clone()
    wrong[3, 4] = value
    with pytest.raises(AssertionError, match=r"1 of 3200 .*from \[3, 4\]") as failure:
        assert_within_budget(wrong, exact, baseline)
    assert ("NaN" in str(failure.value)) == math.isnan(value)


def test_an_unwritten_tail_fails(rng: torch.Generator) -> None:
    from kernl.ops.common import empty
    from kernl.testing import poisoned

    _, exact, baseline = softmax(rng, torch.float16)
    with poisoned():
        output = empty(baseline.shape, dtype=baseline.dtype, device=baseline.device)
    output[:, :96] = baseline[:, :96]
    with pytest.raises(AssertionError, match=r"128 of 3200 .*NaN +128 where the reference has none|128 of 3200"):
        assert_within_budget(output, exact, baseline)


def test_non_finite_elements_must_be_where_float64_has_them() -> None:
    exact = torch.tensor([1.0, math.nan, math.inf, -math.inf, 1e6], dtype=torch.float64)
    baseline = exact.half()  # 1e6 overflows to inf
    assert_within_budget(baseline.clone(), exact, baseline)
    for position in range(1, 5):
        wrong = baseline.clone()
        wrong[position] = 0.0
        with pytest.raises(AssertionError, match=f"1 of 5 .*from \\[{position}\\]"):
            assert_within_budget(wrong, exact, baseline)
    with pytest.raises(AssertionError):
        assert_within_budget(-baseline, exact, baseline)


def test_a_baseline_that_overflows_does_not_excuse_anything() -> None:
    exact = torch.ones(4, dtype=torch.float64)
    baseline = torch.tensor([math.inf, 1.0, math.nan, 1.0]).half()
    assert_within_budget(torch.ones(4).half(), exact, baseline)
    with pytest.raises(AssertionError):
        assert_within_budget(torch.ones(4).half() * 1.01, exact, baseline)


def test_integers_and_bools_must_be_equal() -> None:
    expected = torch.arange(6)
    assert_within_budget(expected.clone(), expected, expected)
    with pytest.raises(AssertionError, match="1 of 6"):
        assert_within_budget(torch.tensor([0, 1, 2, 3, 4, 6]), expected, expected)
    flags = torch.tensor([True, False])
    assert_within_budget(flags, flags, flags)
    with pytest.raises(AssertionError, match="2 of 2"):
        assert_within_budget(~flags, flags, flags)


def test_sequences_are_compared_one_by_one(rng: torch.Generator) -> None:
    _, exact, baseline = softmax(rng, torch.float32)
    assert_within_budget((baseline, baseline), [exact, exact], (baseline, baseline))
    with pytest.raises(AssertionError, match=r"pair\[1\]"):
        assert_within_budget((baseline, baseline + 1), [exact, exact], (baseline, baseline), name="pair")
    with pytest.raises(ValueError, match="2 actual, 1 reference64"):
        assert_within_budget((baseline, baseline), [exact], (baseline, baseline))


def test_empty_tensors_pass() -> None:
    empty = torch.empty(0, 4)
    assert_within_budget(empty, empty.double(), empty)


def test_arguments_that_cannot_be_compared_are_refused() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match="shapes differ"):
        assert_within_budget(x, x.double()[:1], x)
    with pytest.raises(ValueError, match="same dtype"):
        assert_within_budget(x.half(), x.double(), x)
    with pytest.raises(ValueError, match="must be float64"):
        assert_within_budget(x, x, x)


@pytest.mark.parametrize(
    ("name", "wanted", "picked"),
    [
        ("dtype", "fp16", True),
        ("dtype", "float16", True),
        ("dtype", "bf16", False),
        ("shape", "2x7x768", True),
        ("shape", "2x7", False),
        ("op", "attention", True),
        ("op", "norm", False),
        ("op", "add_layer_norm", True),
        ("family", "bert", False),
    ],
)
def test_options_pick_tests_by_their_parameters(name: str, wanted: str, picked: bool) -> None:
    parameters = {"dtype": torch.float16, "shape": (2, 7, 768)}
    callspec = SimpleNamespace(params=parameters, id="torch.float16-shape0")
    path = Path("tests/ops/test_attention.py")
    item: Any = SimpleNamespace(callspec=callspec, path=path, originalname="test_add_layer_norm")
    assert _matches(item, name, {wanted}) == picked


def test_options_pick_tests_by_the_parts_of_their_id() -> None:
    callspec = SimpleNamespace(params={"case": object()}, id="bert-fp16-2x3x40")
    item: Any = SimpleNamespace(callspec=callspec, path=Path("tests/patterns/test_models.py"))
    for name, wanted in (("family", "bert"), ("dtype", "fp16"), ("shape", "2x3x40")):
        assert _matches(item, name, {wanted})
        assert not _matches(item, name, {"other"})
