"""Training with an optimised model: gradients, dropout, steps of an optimiser, the same as with the plain model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import kernl
from kernl import backend
from tests import tiny

pytestmark = pytest.mark.either_end


def same_gradients(model: nn.Module, plain: nn.Module) -> None:
    for (name, got), (_, want) in zip(model.named_parameters(), plain.named_parameters()):
        if want.grad is None:
            assert got.grad is None, name
        else:
            assert got.grad is not None, name
            scale = want.grad.abs().max().clamp_min(1e-6)
            torch.testing.assert_close(got.grad / scale, want.grad / scale, rtol=0, atol=1e-5, msg=name)


def test_bert_classifier() -> None:
    plain, fast = tiny.classifier(), kernl.optimize_model(tiny.classifier())
    for seed in (1, 2):
        labels = torch.tensor([0, 1])
        losses = []
        for model in (plain, fast):
            model.zero_grad()
            losses.append(model(**tiny.text(seed=seed), labels=labels).loss)
            losses[-1].backward()
        torch.testing.assert_close(losses[1], losses[0])
        same_gradients(fast, plain)
    assert fast.kernl.report().graphs[0].gradients


def test_gradients_of_inputs() -> None:
    plain, fast = tiny.encoder().requires_grad_(False), kernl.optimize_model(tiny.encoder().requires_grad_(False))
    for seed in (1, 2):
        x, y = tiny.activations(seed=seed).requires_grad_(), tiny.activations(seed=seed).requires_grad_()
        plain(x).square().sum().backward()
        fast(y).square().sum().backward()
        torch.testing.assert_close(y.grad, x.grad)


def test_training_mode_has_dropout() -> None:
    """The same random numbers drop the same elements."""
    plain, fast = tiny.encoder().train(), kernl.optimize_model(tiny.encoder().train())
    for seed in (1, 2, 3):
        for model in (plain, fast):
            model.zero_grad()
            torch.manual_seed(seed)
            model(tiny.activations()).square().sum().backward()
        same_gradients(fast, plain)
    with torch.no_grad():
        torch.manual_seed(5)
        want = plain(tiny.activations())
        torch.manual_seed(5)
        torch.testing.assert_close(fast(tiny.activations()), want)


def test_steps_of_an_optimiser() -> None:
    plain, fast = tiny.encoder(), kernl.optimize_model(tiny.encoder())
    optimisers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in (plain, fast)]
    for step in range(4):
        for model, optimiser in zip((plain, fast), optimisers):
            optimiser.zero_grad()
            model(tiny.activations(seed=step)).square().mean().backward()
            optimiser.step()
        with torch.no_grad():  # evaluated in between: the step is seen at once
            torch.testing.assert_close(fast(tiny.activations()), plain(tiny.activations()), rtol=1e-3, atol=1e-4)
    same_gradients(fast, plain)


def test_accumulation_and_frozen_layers() -> None:
    plain, fast = tiny.encoder(), kernl.optimize_model(tiny.encoder())
    for model in (plain, fast):
        model.blocks[0].requires_grad_(False)
        for seed in (1, 2):
            model(tiny.activations(seed=seed)).sum().backward()
    same_gradients(fast, plain)


def test_gradient_checkpointing() -> None:
    plain, fast = tiny.classifier(), tiny.classifier()
    for model in (plain, fast):
        model.train()
        model.gradient_checkpointing_enable()
    kernl.optimize_model(fast)
    for model in (plain, fast):
        torch.manual_seed(0)
        model(**tiny.text(), labels=torch.tensor([0, 1])).loss.backward()
    same_gradients(fast, plain)
    assert fast.kernl.report().graphs[0].lowering == "eager (AOTAutograd)"


def test_double_backward() -> None:
    """Gradients of gradients go where plain PyTorch's go, or say that they cannot."""
    x, y = tiny.activations().requires_grad_(), tiny.activations().requires_grad_()
    plain, fast = tiny.encoder(), kernl.optimize_model(tiny.encoder())
    (want,) = torch.autograd.grad(plain(x).square().sum(), x, create_graph=True)
    (got,) = torch.autograd.grad(fast(y).square().sum(), y, create_graph=True)
    torch.testing.assert_close(got, want)
    (want,) = torch.autograd.grad(want.square().sum(), x)
    (got,) = torch.autograd.grad(got.square().sum(), y)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_inductor_with_gradients() -> None:
    if not backend.has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    plain, fast = tiny.encoder(blocks=1), kernl.optimize_model(tiny.encoder(blocks=1), lowering="inductor", strict=True)
    for model in (plain, fast):
        model(tiny.activations()).square().sum().backward()
    same_gradients(fast, plain)
