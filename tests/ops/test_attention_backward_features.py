"""Gradients by kernels of what depends on positions, of dropout, of packed sequences and of other conventions.

The references are those of the forward passes' tests, differentiated in float64.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kernl.ops import attention
from tests.conftest import KernelRun
from tests.ops.test_attention_dropout import with_dropout
from tests.ops.test_attention_packed import (
    CONVENTIONS,
    NAMES,
    conventions,
    expected_of_all,
    lengths_on,
    options_of,
    pack,
)
from tests.ops.test_attention_positions import Case, draw, expected, in_double, on

op_file = importlib.import_module("kernl.ops.attention_backward")


@pytest.fixture(autouse=True)
def kernels_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the formulas are the default."""

    def first(op: str, problem: object, candidates: Callable[[], Sequence[Any]], **_: object) -> str:
        return str(candidates()[0].name)

    monkeypatch.setattr(op_file, "choose", first)


def compare(
    tensors: list[torch.Tensor],
    options: dict[str, Any],
    exact: Callable[[list[torch.Tensor], dict[str, Any]], tuple[torch.Tensor, torch.Tensor]],
    rng: torch.Generator,
    kernels: KernelRun,
    **lengths: Any,
) -> None:
    """float32 against float64: of query, key, value and a float mask or bias, for gradients of both outputs."""
    floats = [name for name in ("attn_mask", "bias") if options.get(name) is not None]
    floats = [name for name in floats if options[name].is_floating_point()]
    leaves = [tensor.detach().to(kernels.device).requires_grad_() for tensor in tensors]
    there = on(kernels.device, options)
    for name in floats:
        there[name] = there[name].detach().requires_grad_()
    output, logsumexp = attention(*leaves, return_logsumexp=True, **there, **lengths)
    weights = torch.randn(output.shape, generator=rng)
    weights_of_rows = torch.randn(logsumexp.shape, generator=rng)
    finite = (logsumexp.detach().abs() < 1e30).cpu()
    total = (output * weights.to(kernels.device)).sum()
    total = total + (logsumexp * weights_of_rows.to(kernels.device))[finite.to(kernels.device)].sum()
    before = kernels.launched("attention_backward")
    got = torch.autograd.grad(total, [*leaves, *(there[name] for name in floats)])
    assert kernels.launched("attention_backward") == before + 1

    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    options = in_double(options)
    for name in floats:
        options[name] = options[name].detach().requires_grad_()
    want_output, want_logsumexp = exact(wide, options)
    total = (want_output * weights).sum() + (want_logsumexp * weights_of_rows)[finite].sum()
    want = torch.autograd.grad(total, [*wide, *(options[name] for name in floats)])
    for name, one, other in zip(["query", "key", "value", *floats], got, want):
        difference = (one.cpu().double() - other).abs()
        assert (difference <= 2e-4 + 2e-4 * other.abs()).all(), f"gradient of {name} is off by {difference.max()}"


POSITIONS = [
    Case("window", options={"window": (9, 4)}),
    Case("causal-window", 130, 130, 1, 1, options={"window": (17, -1), "is_causal": True}),
    Case("bottom-right-gqa", heads=4, options={"is_causal": True, "q_offset": 37}),
    Case("offset-in-memory-hides-rows", masks="padding", options={"is_causal": True, "q_offset": (-5, 20)}),
    Case("prefix", 70, 140, 1, 1, options={"is_causal": True, "prefix": (5, 130)}),
    Case("prefix-window-means", masks="padding",
         options={"window": (6, 4), "q_offset": 53, "prefix": (3, 30), "hidden_rows": "mean"}),
    Case("alibi-bias-softcap", heads=4, alibi="batch", bias="both", masks="lengths",
         options={"softcap": 4.0, "window": (25, 8), "q_offset": 11}),
    Case("softcap-float-mask", masks="float", options={"softcap": 5.0, "is_causal": True, "q_offset": 20}),
    Case("negative-scale", options={"scale": -0.4, "window": (20, 20)}),
]  # fmt: skip


@pytest.mark.parametrize("case", POSITIONS, ids=lambda case: case.text)
def test_positions(case: Case, rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, options = draw(case, torch.float32, rng)
    compare(tensors, options, lambda leaves, wide: expected(*leaves, wide), rng, kernels)


@pytest.mark.parametrize(
    "case",
    [
        Case("padding-gqa", heads=4, masks="padding"),
        Case("float-mask", seqlen_q=70, masks="float", options={"is_causal": True}),
        Case("window", alibi="heads", options={"window": (9, 20)}),
    ],
    ids=lambda case: case.text,
)
def test_dropout(case: Case, rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, options, kept = with_dropout(case, torch.float32, rng)
    compare(tensors, options, lambda leaves, wide: expected(*leaves, wide, kept=kept), rng, kernels)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "t5"])
def test_packed(name: str, rng: torch.Generator, kernels: KernelRun) -> None:
    heads, key_heads = (4, 2) if name in ("bottom-right", "alibi") else (2, 2)
    tensors = pack(heads, key_heads, torch.float32, rng)
    options = options_of(name, heads, rng)
    compare(tensors, options, expected_of_all, rng, kernels, **lengths_on(kernels.device))


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions(name: str, rng: torch.Generator, kernels: KernelRun) -> None:
    tensors, _ = draw(Case("", heads=4), torch.float32, rng)
    options = conventions(name, torch.float32, rng)
    compare(tensors, options, lambda leaves, wide: expected(*leaves, wide), rng, kernels)
