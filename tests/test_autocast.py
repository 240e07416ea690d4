"""Autocast entered outside, around an optimised model: the plain model's results, types included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernl
from kernl.testing import error_report
from tests import tiny

DTYPES = [torch.bfloat16, torch.float16]


def within_budget(model: nn.Module, dtype: torch.dtype, **inputs: Any) -> None:
    """Outputs under autocast have plain PyTorch's types and are as near to float64 as plain PyTorch's."""
    with torch.no_grad():
        with torch.autocast("cpu", dtype):
            got = model(**inputs)
            with kernl.disabled():
                plain = model(**inputs)
        exact = type(model)(model.config).double().eval()  # type: ignore[operator]
        exact.load_state_dict(model.state_dict())
        reference = exact(**inputs)
    for name, tensor in plain.items():
        assert got[name].dtype == tensor.dtype
        report = error_report(got[name], reference[name].double(), tensor, name=name)
        assert report.within_budget, report.text


@pytest.mark.parametrize("dtype", DTYPES)
def test_bert(dtype: torch.dtype) -> None:
    model = kernl.optimize_model(tiny.bert())
    for seed, length in [(0, 7), (1, 7), (2, 9)]:
        within_budget(model, dtype, **tiny.text(length=length, seed=seed))
    assert model.kernl.report().matched("add_layer_norm") > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_and_out_again(dtype: torch.dtype) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    plain = tiny.encoder()
    with torch.inference_mode():
        for _ in range(3):
            with torch.autocast("cpu", dtype):
                got, want = model(x), plain(x)
            assert got.dtype == want.dtype
            torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(model(x), plain(x))


def test_weights_updated_between_autocast_calls() -> None:
    """Autocast caches cast weights; a stale one must not be used."""
    model, plain = kernl.optimize_model(tiny.encoder()), tiny.encoder()
    x = tiny.activations()
    with torch.no_grad():
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(model(x).float(), plain(x).float(), rtol=2e-2, atol=2e-2)
            for encoder in (model, plain):
                encoder.blocks[0].up.weight.mul_(1.5)


def test_gradients_under_autocast() -> None:
    model, plain = kernl.optimize_model(tiny.encoder()), tiny.encoder()
    x = tiny.activations()
    for encoder in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = encoder(x).float().square().mean()
        loss.backward()
    for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters()):
        assert got.grad is not None and want.grad is not None and got.grad.dtype == want.grad.dtype, name
        scale = want.grad.abs().max()
        torch.testing.assert_close(got.grad / scale, want.grad / scale, rtol=0, atol=3e-2, msg=name)
