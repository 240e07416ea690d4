"""What padding may do to a graph. Whatever is accepted is also run, padded and not, and must agree at true tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernl.backend import Inputs
from kernl.dynamo_settings import dynamo_settings
from kernl.graph import Refused, canonicalize
from kernl.graph.tokens import TokenFlow, trace_tokens
from kernl.options import Options

Tensor = torch.Tensor

BATCH, LENGTH, BUCKET, WIDTH, WORDS, POSITIONS = 3, 7, 12, 8, 40, 30


class Toy(nn.Module):
    """A function of embedded tokens and a mask, with some weights that it may use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.alone = nn.Conv1d(WIDTH, WIDTH, 1)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("numbers", torch.arange(POSITIONS)[None])
        self.function = function

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Any:
        return self.function(self, self.words(ids), attention_mask, ids)


def call(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Ids and a mask that hides something on both sides."""
    ids = torch.randint(2, WORDS, (BATCH, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    mask[2, -3:] = 0
    return ids, mask


def flow_of(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> TokenFlow | str:
    """The flow of the model's only graph, or the reason why there is none."""
    found: list[TokenFlow | str] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        canonicalize(gm)
        try:
            found.append(trace_tokens(gm, Inputs(gm, example_inputs).fixed))
        except Refused as refused:
            found.append(refused.reason)
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad(), dynamo_settings(Options(), one_is_a_size=True)():
        torch.compile(model, backend=backend, dynamic=True)(*args, **kwargs)
    (flow,) = found
    return flow


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 2, WIDTH // 2).transpose(1, 2)


def sdpa(x: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    output = F.scaled_dot_product_attention(heads(x), heads(x), heads(x), attn_mask=mask, **options)
    return output.transpose(1, 2).reshape(*x.shape)


def eager(x: Tensor, hide: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    weights = hide(heads(x) @ heads(x).mT / 2).softmax(-1)
    return (weights @ heads(x)).transpose(1, 2).reshape(*x.shape), weights


def additive(mask: Tensor, number: float = torch.finfo(torch.float32).min) -> Tensor:
    return (1.0 - mask[:, None, None].float()) * number


LOWEST = torch.finfo(torch.float32).min

# Each: function of (model, embedded tokens, mask, ids).
KEPT: dict[str, Callable[..., Any]] = {
    "token by token": lambda m, x, mask, ids: F.gelu(m.norm(x + m.linear(x))) * 2,
    "a convolution of one": lambda m, x, mask, ids: m.alone(x.transpose(1, 2)).transpose(1, 2),
    "the first token": lambda m, x, mask, ids: (m.linear(x[:, 0]).tanh(), x[:, :1], x.select(1, 0)),
    "masked sdpa": lambda m, x, mask, ids: sdpa(x, mask.bool()[:, None, None]),
    "masked sdpa, number": lambda m, x, mask, ids: sdpa(x, additive(mask)),
    "sdpa, infinity": lambda m, x, mask, ids: sdpa(
        x, torch.zeros(mask.shape).masked_fill(mask == 0, -torch.inf)[:, None, None]
    ),
    "causal by a bool mask": lambda m, x, mask, ids: sdpa(
        x, mask.bool()[:, None, None] & (torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1]))
    ),
    "a window by a bool mask": lambda m, x, mask, ids: sdpa(
        x, mask.bool()[:, None, None] & ((torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs() < 3)
    ),
    "added": lambda m, x, mask, ids: eager(x, lambda scores: scores + additive(mask)),
    "added, -10000": lambda m, x, mask, ids: eager(x, lambda scores: scores + additive(mask, -10000.0)),
    "subtracted": lambda m, x, mask, ids: eager(x, lambda scores: scores - additive(mask, 10000.0)),
    "filled in": lambda m, x, mask, ids: eager(
        x, lambda scores: scores.masked_fill((mask == 0)[:, None, None], LOWEST)
    ),
    "where": lambda m, x, mask, ids: eager(x, lambda scores: torch.where(mask[:, None, None] > 0, scores, LOWEST)),
    "with a bias of positions": lambda m, x, mask, ids: eager(
        x,
        lambda scores: (
            scores - 0.1 * (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs() + additive(mask)
        ),
    ),
    "mean of what is shown": lambda m, x, mask, ids: (
        (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
    ),
    "weights by a product": lambda m, x, mask, ids: mask[:, None].float() @ x,
    "a table of positions": lambda m, x, mask, ids: x + m.positions(m.numbers[:, : x.shape[1]]),
    "positions from arange": lambda m, x, mask, ids: x + m.positions(torch.arange(x.shape[1])),
    "positions from a cumulative sum": lambda m, x, mask, ids: (
        x + m.positions(torch.cumsum(ids.ne(1).int(), 1) * ids.ne(1) + 1)
    ),
    "positions from the mask": lambda m, x, mask, ids: x + m.positions((mask.cumsum(1) - 1).clamp(min=0) * mask),
    "sums from the left": lambda m, x, mask, ids: x.cumsum(1),
    "halves": lambda m, x, mask, ids: torch.cat(x.chunk(2, -1)[::-1], -1),
}


@pytest.mark.parametrize("name", KEPT)
def test_kept_and_really_so(name: str) -> None:
    model = Toy(KEPT[name]).eval()
    ids, mask = call()
    flow = flow_of(model, ids, mask)
    assert isinstance(flow, TokenFlow), flow
    missing = BUCKET - LENGTH
    padded = torch.cat([ids, ids[:, -1:].expand(-1, missing)], 1), F.pad(mask, (0, missing))
    with torch.no_grad():
        want, got = model(ids, mask), model(*padded)
    want, got = ((each,) if isinstance(each, Tensor) else each for each in (want, got))
    assert len(want) == len(got) == len(flow.outputs)
    for expected, actual, dims in zip(want, got, flow.outputs):
        for dim in dims:
            assert actual.shape[dim] == BUCKET
            actual = actual.narrow(dim, 0, LENGTH)
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "convolution": (lambda m, x, mask, ids: m.conv(x.transpose(1, 2)), "conv1d mixes tokens"),
    "mean": (lambda m, x, mask, ids: x.mean(1) * mask.sum(), "mean mixes tokens"),
    "sum": (lambda m, x, mask, ids: x.sum(1) * mask.sum(), "sum mixes tokens"),
    "greatest": (lambda m, x, mask, ids: x.amax(1) * mask.sum(), "amax mixes tokens"),
    "last": (lambda m, x, mask, ids: x[:, -1] * mask[:, :1], "token -1 is read"),
    "second": (lambda m, x, mask, ids: x[:, 1] * mask[:, :1], "token 1 is read"),
    "all but one": (lambda m, x, mask, ids: x[:, 1:] * mask[:, 1:, None], "made from the length"),
    "every other": (lambda m, x, mask, ids: x[:, ::2] * mask[:, ::2, None], "made from the length|a part of the"),
    "last by the mask": (
        lambda m, x, mask, ids: x[torch.arange(x.shape[0]), mask.sum(1) - 1],
        "indexing with tensors|tokens are gathered",
    ),
    "sums from the right": (lambda m, x, mask, ids: x.flip(1).cumsum(1).flip(1) * mask[..., None], "flip is not known"),
    "no mask in sdpa": (lambda m, x, mask, ids: sdpa(x, None) * mask[..., None], "an attention has no mask"),
    "one of two masked": (
        lambda m, x, mask, ids: sdpa(sdpa(x, mask.bool()[:, None, None]), None),
        "an attention has no mask",
    ),
    "no mask in softmax": (
        lambda m, x, mask, ids: eager(x, lambda scores: scores)[0] * mask[..., None],
        "does not hide padding",
    ),
    "a mask upside down": (lambda m, x, mask, ids: sdpa(x, mask.bool().logical_not()[:, None, None]), "does not hide"),
    "a weak mask": (lambda m, x, mask, ids: eager(x, lambda s: s + additive(mask, -100.0)), "does not hide padding"),
    "queries masked": (lambda m, x, mask, ids: sdpa(x, mask.bool()[:, None, :, None]), "does not hide padding"),
    "softmax over queries": (
        lambda m, x, mask, ids: (heads(x) @ heads(x).mT + additive(mask).mT).softmax(-2) @ heads(x),
        "softmax is not over the last dimension",
    ),
    "causal": (lambda m, x, mask, ids: sdpa(x, None, is_causal=True) * mask[..., None], "a causal attention"),
    "causal by a number": (
        lambda m, x, mask, ids: eager(
            x,
            lambda scores: (
                scores
                + torch.where(
                    mask.bool()[:, None, None] & (torch.arange(x.shape[1])[:, None] >= torch.arange(x.shape[1])),
                    0.0,
                    LOWEST,
                )
            ),
        ),
        "a query may see no key",
    ),
    "scores scaled after the mask": (
        lambda m, x, mask, ids: eager(x, lambda scores: (scores + additive(mask)) * 1e-38),
        "does not hide padding",
    ),
    "the length as a number": (lambda m, x, mask, ids: x / x.shape[1] * mask[..., None], "length is used as a number"),
    "its root": (lambda m, x, mask, ids: x / x.shape[1] ** 0.5 * mask[..., None], "length is used as a number"),
    "filled with it": (
        lambda m, x, mask, ids: x + torch.full((1,), x.shape[1]) * mask[..., None],
        "length is used as a number",
    ),
    "positions from the right": (
        lambda m, x, mask, ids: x + m.positions(x.shape[1] - 1 - torch.arange(x.shape[1])) * mask[..., None],
        "length is used as a number",
    ),
    "merged with the batch": (
        lambda m, x, mask, ids: x.reshape(-1, WIDTH) * mask.reshape(-1, 1),
        "made from the length",
    ),
    "a norm over tokens": (
        lambda m, x, mask, ids: F.layer_norm(x, x.shape[1:]) * mask[..., None],
        "layer_norm mixes tokens",
    ),
    "a product over tokens": (lambda m, x, mask, ids: x.mT @ x * mask.sum(), "matmul mixes tokens"),
    "sorted": (lambda m, x, mask, ids: x.sort(1).values * mask[..., None], "sort is not known"),
    "rolled": (lambda m, x, mask, ids: x.roll(1, 1) * mask[..., None], "roll is not known"),
    "a write": (lambda m, x, mask, ids: mask.mul_(2)[..., None] * x, "writes to a tensor"),
    "an index out of anything": (
        lambda m, x, mask, ids: x + m.positions(torch.arange(x.shape[1]) * ids % POSITIONS) * mask[..., None],
        "an index may be out of its table",
    ),
    "picked by a bool mask": (
        lambda m, x, mask, ids: m.positions(ids.clamp(max=29)) + x.flatten(1).gather(1, ids.clamp(max=20)).sum(),
        "merges the tokens|made from the length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    function, reason = REFUSED[name]
    flow = flow_of(Toy(function).eval(), *call())
    assert isinstance(flow, str), flow
    assert re.search(reason, flow), flow


def test_active_dropout_is_refused() -> None:
    flow = flow_of(Toy(lambda m, x, mask, ids: m.dropout(x) * mask[..., None]).train(), *call())
    assert flow == "dropout is active"


def test_what_is_known_of_the_limit() -> None:
    limits = {
        "token by token": None,
        "a table of positions": POSITIONS,
        "positions from arange": POSITIONS,
        "positions from a cumulative sum": POSITIONS - 2,
        "positions from the mask": None,  # at padding they are 0
    }
    for name, limit in limits.items():
        flow = flow_of(Toy(KEPT[name]).eval(), *call())
        assert isinstance(flow, TokenFlow) and flow.limit == limit and not flow.needs_limit, name


def test_a_slice_keeps_the_tokens_up_to_its_end() -> None:
    flow = flow_of(Toy(lambda m, x, mask, ids: x[:, :5] * mask[:, :5, None]).eval(), *call())
    assert isinstance(flow, TokenFlow) and flow.limit == 5


def test_positions_that_are_computed_need_a_limit_from_elsewhere() -> None:
    def distances(m: Any, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        return x + m.positions((places.float() + 1).log().long().clamp(max=POSITIONS - 1)) * mask[..., None]

    flow = flow_of(Toy(distances).eval(), *call())
    assert isinstance(flow, TokenFlow) and flow.needs_limit and flow.limit is None


def test_which_masks_have_to_be_looked_at() -> None:
    looked_at = {"masked sdpa": False, "causal by a bool mask": False, "masked sdpa, number": True, "added": True}
    for name, needs in looked_at.items():
        flow = flow_of(Toy(KEPT[name]).eval(), *call())
        assert isinstance(flow, TokenFlow) and flow.needs_visible_keys is needs, name


def test_a_graph_without_a_mask_says_that_it_needs_one() -> None:
    class NoMask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sdpa(x, None)

    flow = flow_of(NoMask(), torch.randn(BATCH, LENGTH, WIDTH))
    assert isinstance(flow, TokenFlow) and flow.attends and flow.mask is None
    assert flow_of(nn.GELU(), torch.randn(BATCH, LENGTH, WIDTH)).attends is False  # type: ignore[union-attr]


def test_a_mask_that_is_made_from_the_ids() -> None:
    class OwnMask(nn.Module):
        def __init__(self, padding: int) -> None:
            super().__init__()
            self.words, self.padding = nn.Embedding(WORDS, WIDTH), padding

        def forward(self, ids: Tensor) -> Tensor:
            return sdpa(self.words(ids), (ids != self.padding)[:, None, None])

    ids = call()[0]
    flow = flow_of(OwnMask(0), ids)
    assert isinstance(flow, TokenFlow) and flow.mask is not None  # ids padded with 0 hide themselves
    assert flow_of(OwnMask(1), ids) == "an attention is masked by something that is no mask argument"


def test_sizes_and_conditions() -> None:
    def in_two_ways(m: Any, x: Tensor, mask: Tensor, ids: Tensor) -> Tensor:
        y = x * mask[..., None]
        return m.linear(y) if x.shape[1] > 5 and x.shape[0] < 4 else y

    flow = flow_of(Toy(in_two_ways).eval(), *call())
    assert isinstance(flow, TokenFlow)

    def serves(batch: int, length: int) -> bool:
        return flow.sizes_of(dict.fromkeys(flow.inputs, (batch, length))) is not None

    assert serves(BATCH, LENGTH) and serves(2, 100)
    assert not serves(BATCH, 5) and not serves(4, LENGTH)
    first, second = flow.inputs
    assert flow.sizes_of({first: (3, 7), second: (3, 8)}) is None
    assert flow.sizes_of({first: (3, 7, 1)}) is None


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (((LENGTH, LENGTH), (LENGTH, LENGTH)), "batch and length are one size"),
        (((BATCH, LENGTH), (BATCH, 1, LENGTH, LENGTH)), "a length elsewhere|several lengths|fixed"),
    ],
)
def test_arguments_that_do_not_show_the_length(shapes: tuple[Any, Any], reason: str) -> None:
    class Scores(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return ids * 2 + attention_mask.sum()

    flow = flow_of(Scores(), torch.ones(shapes[0]), torch.ones(shapes[1]))
    assert isinstance(flow, str) and re.search(reason, flow), flow
