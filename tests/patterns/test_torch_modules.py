"""Attention and encoder layers of torch.nn: written out and fused, with the results they had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernl.patterns  # noqa: F401
from kernl.graph import default_registry
from tests.graph.helpers import Captured, capture

pytestmark = pytest.mark.either_end

WIDTH, HEADS = 32, 4
PADDING = torch.tensor([[False] * 7, [False] * 5 + [True] * 2])
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)


def x(batch: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(length))


def check(function: Any, *args: Any, grad: bool = False, dynamic: bool | None = None) -> Captured:
    """The result is the plain one. Of a symbolic width becomes known that it is the weights', as with any linear."""
    with torch.set_grad_enabled(grad):
        expected = function(*args)
    found = capture(function, *args, registry=default_registry, strict=True, grad=grad, dynamic=dynamic)
    torch.testing.assert_close(found.result, expected, atol=1e-5, rtol=1e-4)
    assert found.guards_added == (dynamic is True)
    return found


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder(norm_first: bool, activation: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, 0.1, activation, batch_first=True, norm_first=norm_first)
    report = check(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), x(), dynamic=dynamic).report
    emitted = report.emitted()
    assert report.matched("encoder_layer") == emitted["kernl::attention"] == 2
    assert emitted["kernl::linear"] == 8 and report.matched(f"linear_{activation}") == 2
    assert report.matched("add_layer_norm") + report.matched("layer_norm") == 4
    assert not report.refusals and not report.leftover


@pytest.mark.parametrize(
    "masks",
    [
        {"src_key_padding_mask": PADDING},
        {"src_mask": CAUSAL},
        {"src_mask": CAUSAL.isinf()},
        {"src_mask": CAUSAL, "src_key_padding_mask": PADDING.float().masked_fill(PADDING, -torch.inf)},
    ],
    ids=["padding", "causal", "causal bool", "both"],
)
def test_masks_of_an_encoder_layer(masks: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True).eval()
    found = check(lambda x: layer(x, **masks), x())
    assert found.report.matched("encoder_layer") == found.report.emitted()["kernl::attention"] == 1


ARGUMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "bool": {"attn_mask": CAUSAL.isinf(), "key_padding_mask": PADDING},
    "float": {"attn_mask": CAUSAL + torch.arange(7.0), "key_padding_mask": torch.where(PADDING, -torch.inf, 0.5)},
    "by head": {"attn_mask": torch.randn(2 * HEADS, 7, 7), "key_padding_mask": torch.where(PADDING, -torch.inf, 0.0)},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "causal, padding": {"attn_mask": CAUSAL.isinf(), "key_padding_mask": PADDING, "is_causal": True},
}


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_multi_head_attention(arguments: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)
    tensor = x() if batch_first else x().transpose(0, 1)
    found = check(lambda x: attention(x, x, x, need_weights=False, **ARGUMENTS[arguments])[0], tensor, grad=True)
    assert found.report.matched("multi_head_attention") == found.report.emitted()["kernl::attention"] == 1
    assert found.report.emitted()["kernl::linear"] == 2


def test_inputs_of_multi_head_attention() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(WIDTH, HEADS, bias=False)
    query, key, value = (x(length).transpose(0, 1) for length in (5, 7, 7))
    found = check(lambda q, k: attention(q, k, k)[0], query[:, :2], key[:, :2], grad=True)
    assert found.report.emitted()["kernl::linear"] == 3  # key and value by one
    found = check(lambda q, k, v: attention(q, k, v)[0], query[:, :2], key[:, :2], value[:, :2].cos(), grad=True)
    assert found.report.emitted()["kernl::linear"] == 4
    other = nn.MultiheadAttention(WIDTH, HEADS, kdim=8, vdim=16)
    found = check(
        lambda q, k, v: other(q, k, v, need_weights=False)[0], query[:, :2], key[:, :2, :8], key[:, :2, :16], grad=True
    )
    assert found.report.emitted()["kernl::attention"] == 1


def test_what_is_not_written_out() -> None:
    def reason(function: Any, *args: torch.Tensor) -> str:
        found = capture(function, *args, registry=default_registry, strict=True, grad=True, run=True)
        (only,) = found.report.refused("multi_head_attention")
        return only

    tensor = x().transpose(0, 1)
    plain, added = nn.MultiheadAttention(WIDTH, HEADS), nn.MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    dropped = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5)
    assert "weights are returned" in reason(lambda x: plain(x, x, x), tensor)
    assert "added or static keys" in reason(lambda x: added(x, x, x)[0], tensor)
    assert "dropout is active" in reason(lambda x: dropped(x, x, x)[0], tensor)
    assert "without batch" in reason(lambda x: plain(x, x, x)[0], tensor[:, 0])


def test_gradients() -> None:
    torch.manual_seed(0)
    attention, tensor = nn.MultiheadAttention(WIDTH, HEADS), x().transpose(0, 1).requires_grad_()
    function = lambda x: attention(x, x, x, need_weights=False)[0].cos().sum()  # noqa: E731
    found = capture(function, tensor, registry=default_registry, strict=True, grad=True)
    leaves = [tensor, *attention.parameters()]
    mine, plain = (torch.autograd.grad(result, leaves) for result in (found.result, function(tensor)))
    torch.testing.assert_close(mine, plain, atol=1e-5, rtol=1e-4)
