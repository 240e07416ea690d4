"""Padding to buckets shows nowhere: results are those without it, to the rounding of sums, and the graphs are few."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from transformers import (
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    ElectraConfig,
    ElectraModel,
    MPNetConfig,
    MPNetModel,
    RobertaConfig,
    RobertaModel,
)

import kernl
from kernl import buckets as buckets_file
from kernl.buckets import MOST_WASTE, Learnt, Listed, Powers, plan
from kernl.options import Options
from kernl.report import PaddingCounts
from kernl.testing import assert_within_budget
from tests import tiny
from tests.runtime.fake_device import FakeDevice
from tests.test_pipeline_with_graphs import device  # noqa: F401 (a fixture)

Tensor = torch.Tensor

LENGTHS = (7, 16, 9, 33, 17, 2, 60, 32, 40)
SIZES = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "hidden_size": tiny.WIDTH,
    "intermediate_size": 64,
    "vocab_size": tiny.VOCABULARY,
    "max_position_embeddings": 64,
}


_HIDES = "a row of the mask hides every token, or the mask holds other numbers than 0 and 1"


@pytest.fixture(autouse=True)
def any_model_is_known(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The analysis is what is tested, on toys as well; `test_models_of_ones_own...` is about who is padded at all."""
    if not request.node.name.startswith("test_models_of_ones_own"):
        monkeypatch.setattr(buckets_file, "is_of_transformers", lambda model, forward: True)


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def make(family: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZES, **changes}
    if family == "bert":
        return tiny.bert(**{"num_hidden_layers": 1, **changes}, attn_implementation=attention)
    if family == "roberta":
        return RobertaModel(RobertaConfig(**sizes, attn_implementation=attention)).eval()
    if family == "electra":
        return ElectraModel(ElectraConfig(**sizes, embedding_size=16, attn_implementation=attention)).eval()
    if family == "mpnet":
        return MPNetModel(MPNetConfig(**sizes)).eval()
    assert family == "distilbert"
    config = DistilBertConfig(
        dim=tiny.WIDTH,
        hidden_dim=64,
        n_layers=1,
        n_heads=2,
        vocab_size=tiny.VOCABULARY,
        max_position_embeddings=64,
        attn_implementation=attention,
    )
    return DistilBertModel(config).eval()


class Toy(nn.Module):
    """A small encoder, compiled in a fraction of the time that a BERT takes: embeds, mixes as it is told, projects."""

    def __init__(self, mix: Callable[[Toy, Tensor, Tensor | None], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions = nn.Embedding(tiny.VOCABULARY, tiny.WIDTH), nn.Embedding(64, tiny.WIDTH)
        self.conv = nn.Conv1d(tiny.WIDTH, tiny.WIDTH, 3, padding=1)
        self.act: nn.Module = nn.GELU()
        self.out = nn.Linear(tiny.WIDTH, 4)
        self.dropout = nn.Dropout(0.5)
        self.mix = mix or (lambda m, x, mask: attend(x, mask))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, as_tuple: bool = False) -> Any:
        x = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        result = self.out(self.act(self.dropout(self.mix(self, x, attention_mask))))
        return (result, result[:, 0]) if as_tuple else result


def attend(x: Tensor, mask: Tensor | None) -> Tensor:
    x = x[:, None]
    return F.scaled_dot_product_attention(x, x, x, None if mask is None else mask.bool()[:, None, None])[:, 0]


def attend_eagerly(m: Toy, x: Tensor, mask: Tensor | None) -> Tensor:
    scores = x @ x.mT
    if mask is not None:
        scores = scores.masked_fill((mask == 0)[:, None], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ x


def toy(attention: str = "sdpa") -> Toy:
    return Toy(attend_eagerly if attention == "eager" else None).eval()


def optimised(model: nn.Module, buckets: Any = "powers", **options: Any) -> tuple[Any, nn.Module]:
    """The model with buckets, and a plain copy of it."""
    plain = copy.deepcopy(model)
    return kernl.optimize_model(model, buckets=buckets, **options), plain


def same(model: Any, plain: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Compare a call with the plain model's. Returns whether it was padded."""
    before = padding(model).calls
    want, got = plain(*args, **kwargs), model(*args, **kwargs)
    assert type(got) is type(want)
    expected, actual = (pytree.tree_flatten(each) for each in (want, got))
    assert actual[1] == expected[1]
    for one, other in zip(actual[0], expected[0]):
        assert one.is_contiguous() or not other.is_contiguous()
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    return padding(model).calls > before


def padding(model: Any) -> PaddingCounts:
    return model.kernl.report().padding


def graphs(model: Any) -> int:
    return len(model.kernl.report().graphs)


# Results.


FAMILIES = [(family, attention) for family in ("bert", "roberta", "distilbert") for attention in ("sdpa", "eager")]


@pytest.mark.parametrize(("family", "attention"), [*FAMILIES, ("electra", "sdpa"), ("mpnet", "eager")])
def test_encoders(family: str, attention: str) -> None:
    model, plain = optimised(make(family, attention))
    padded = [same(model, plain, **tiny.text(batch, length, seed=length)) for length in LENGTHS for batch in (2, 1, 3)]
    assert padded == [False] + [True] * (len(padded) - 1), padding(model).unpadded
    largest = 62 if family in ("roberta", "mpnet") else 64  # their positions start at 2
    assert set(padding(model).buckets) == {16, 32, largest} and graphs(model) == 1
    inputs = tiny.text(4, 21)
    exact = copy.deepcopy(plain).double()(**inputs)[0]
    assert_within_budget(model(**inputs)[0], exact, plain(**inputs)[0], name=family)


def test_hidden_states_and_attentions() -> None:
    model, plain = optimised(make("bert", "eager"))
    for length in (7, 9, 33):
        for batch in (2, 1):
            inputs = tiny.text(batch, length)
            padded = same(model, plain, **inputs, output_hidden_states=True, output_attentions=True)
    result = model(**inputs, output_hidden_states=True, output_attentions=True)
    assert padded and result.attentions[0].shape == (1, 2, 33, 33) and result.hidden_states[1].shape == (1, 33, 32)


def test_tuples_and_positional_arguments() -> None:
    model, plain = optimised(toy())
    for length in (7, 9, 33):
        ids, mask = tiny.text(2, length).values()
        assert same(model, plain, ids, mask) == (length > 7)
        assert same(model, plain, attention_mask=mask, input_ids=ids)
        assert same(model, plain, ids, attention_mask=mask, as_tuple=True) == (length > 7)


def test_token_types_and_position_ids() -> None:
    model, plain = optimised(make("bert"))
    for length in (7, 9, 33):
        inputs = tiny.text(2, length)
        types = (torch.arange(length) > 3).long().expand(2, -1).contiguous()
        positions = torch.arange(length).flip(0).repeat(2, 1)
        assert same(model, plain, **inputs, token_type_ids=types, position_ids=positions) == (length > 7)


def test_embeddings_in_place_of_ids() -> None:
    model, plain = optimised(make("bert"))
    for length in (7, 9, 33):
        x = tiny.activations(2, length)
        assert same(model, plain, inputs_embeds=x, attention_mask=tiny.text(2, length)["attention_mask"]) == (
            length > 7
        )


@pytest.mark.parametrize("model", [make("bert"), toy(), toy("eager")], ids=["bert", "sdpa", "eager"])
def test_a_mask_that_was_not_given_is_made(model: nn.Module) -> None:
    fast, plain = optimised(model)
    ids = [tiny.text(batch, length)["input_ids"] for length in (7, 9, 33, 16) for batch in (2, 3)]
    assert [same(fast, plain, input_ids=each) for each in ids] == [False, False] + [True] * 6
    assert not same(fast, plain, input_ids=ids[0], attention_mask=None)  # another kind of call, once
    assert same(fast, plain, input_ids=ids[0], attention_mask=None) and graphs(fast) == 3


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int32])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_on_the_left_and_types_of_masks(attention: str, dtype: torch.dtype) -> None:
    model, plain = optimised(toy(attention))
    for length in (7, 9, 33):
        ids, mask = tiny.text(3, length).values()
        assert same(model, plain, input_ids=ids, attention_mask=mask.flip(1).to(dtype)) == (length > 7)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_row_that_hides_everything(attention: str) -> None:
    """sdpa gives 0 there; the formula gives the mean over all tokens, which padding would change."""
    model, plain = optimised(toy(attention))
    same(model, plain, **tiny.text())
    inputs = tiny.text(3, 9)
    inputs["attention_mask"][1] = 0
    assert same(model, plain, **inputs) == (attention == "sdpa")
    reasons = padding(model).unpadded
    assert (_HIDES in reasons) == (attention == "eager")


# What is refused.


TOYS: dict[str, tuple[Callable[[Toy, Tensor, Tensor | None], Tensor], str]] = {
    "convolution": (lambda m, x, mask: m.conv(attend(x, mask).mT).mT, "conv1d mixes tokens"),
    "mean": (lambda m, x, mask: attend(x, mask).mean(1), "mean mixes tokens"),
    "unmasked": (lambda m, x, mask: attend(attend(x, mask), None), "an attention has no mask"),
    "last": (lambda m, x, mask: attend(x, mask)[:, -1], "token -1 is read, and only the first is at its place"),
    "sums from the right": (lambda m, x, mask: attend(x.flip(1).cumsum(1).flip(1), mask), "flip is not known"),
}


@pytest.mark.parametrize("name", TOYS)
def test_toys_that_are_refused(name: str) -> None:
    mix, reason = TOYS[name]
    model, plain = optimised(Toy(mix).eval())
    for length in (7, 9, 33, 9):
        assert not same(model, plain, **tiny.text(2, length))
    assert any(reason in text for text in padding(model).unpadded)
    report = str(model.kernl.report())
    assert "calls not padded" in report and reason in report


def test_the_same_toy_with_nothing_to_refuse() -> None:
    model, plain = optimised(Toy(lambda m, x, mask: attend(x, mask)[:, 0]).eval())
    for length in (7, 9, 33):
        assert same(model, plain, **tiny.text(2, length)) == (length > 7)


def test_a_graph_that_is_not_for_this_length() -> None:
    """A model that does something else for long inputs: padding must not carry a short one over."""

    def mix(m: Toy, x: Tensor, mask: Tensor | None) -> Tensor:
        return attend(x, mask) * (2 if x.shape[1] > 20 else 1)

    model, plain = optimised(Toy(mix).eval())
    for length in (25, 18, 25, 17, 40, 12, 11):
        same(model, plain, **tiny.text(2, length))
    assert padding(model).buckets == {16: 2, 20: 1, 32: 1, 64: 1}  # 20 is the last length of the other graph
    assert padding(model).unpadded["the graph serves other sizes"] == 1


def test_the_number_of_tokens_in_the_result() -> None:
    class Counts(Toy):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, as_tuple: bool = False) -> Any:
            return super().forward(input_ids, attention_mask), input_ids.shape[1]

    model, plain = optimised(Counts().eval())
    for length in (7, 9, 7, 9):
        inputs = tiny.text(2, length)
        assert model(**inputs)[1] == length
        torch.testing.assert_close(model(**inputs)[0], plain(**inputs)[0])
    assert padding(model).calls == 0


def test_an_argument_in_the_result_is_that_very_object() -> None:
    class Returns(Toy):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, as_tuple: bool = False) -> Any:
            return super().forward(input_ids, attention_mask), attention_mask

    model, _ = optimised(Returns().eval())
    for length in (7, 9):
        inputs = tiny.text(2, length)
        assert model(**inputs)[1] is inputs["attention_mask"]
    assert padding(model).calls == 1


def test_the_maximum_of_positions() -> None:
    model, plain = optimised(toy(), (8, 100))
    for length in (7, 5, 33, 64):
        same(model, plain, **tiny.text(2, length))
    assert set(padding(model).buckets) == {8} and padding(model).unpadded["longer than every bucket"] == 2


def test_the_maximum_that_the_config_names() -> None:
    model, plain = optimised(toy())
    model.config = tiny.bert_config(max_position_embeddings=20)
    for length in (7, 17, 40):
        same(model, plain, **tiny.text(2, length))
    assert set(padding(model).buckets) == {20} and padding(model).unpadded["longer than the model's maximum, 20"] == 1


def test_length_1_stays_as_it_is() -> None:
    model, plain = optimised(toy())
    for length in (7, 1, 1):
        assert not same(model, plain, **tiny.text(2, length))


def test_training_and_gradients() -> None:
    model, plain = optimised(toy())
    for length in (7, 9):
        same(model, plain, **tiny.text(2, length))
    with torch.enable_grad():
        inputs = tiny.text(2, 11)
        model(**inputs).sum().backward()
        plain(**inputs).sum().backward()
    torch.testing.assert_close(model.out.weight.grad, plain.out.weight.grad)
    model.train()
    model(**tiny.text(2, 11))
    assert padding(model).calls == 1 and padding(model).unpadded["the model is in training mode"] == 1
    model.eval()
    assert [same(model, plain, **tiny.text(2, 12)) for _ in range(2)] == [False, True]


def test_inference_mode_has_lessons_of_its_own() -> None:
    model, plain = optimised(toy())
    padded = []
    for _ in range(2):
        with torch.inference_mode():
            padded += [same(model, plain, **tiny.text(2, length)) for length in (7, 9)]
        padded += [same(model, plain, **tiny.text(2, length)) for length in (7, 9)]
    assert padded == [False, True, False, True, True, True, True, True]


def in_any_shape(m: Toy, x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None and mask.dim() == 4:
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], mask)[:, 0]
    return attend(x, mask)


def test_arguments_that_cannot_be_padded() -> None:
    model, plain = optimised(Toy(in_any_shape).eval())
    for length in (7, 9, 11):
        ids, mask = tiny.text(2, length).values()
        assert not same(model, plain, input_ids=ids.t().contiguous().t(), attention_mask=mask)
        assert not same(model, plain, input_ids=mask, attention_mask=mask)
        whole = mask[:, None, None].bool().expand(-1, 1, length, -1).contiguous()
        assert not same(model, plain, input_ids=ids, attention_mask=whole)
    reasons = padding(model).unpadded
    assert reasons["argument input_ids is not contiguous"] == 3 and reasons["a tensor is given twice"] == 3
    assert reasons["argument attention_mask has a length elsewhere"] == 2


# Changes to the model.


def test_changes_are_noticed() -> None:
    model, plain = optimised(toy())
    for length in (7, 9):
        same(model, plain, **tiny.text(2, length))
    for each in (model, plain):
        each.out.weight.mul_(2)
    assert same(model, plain, **tiny.text(2, 10))  # in place: nothing to notice
    for each in (model, plain):
        each.act = nn.ReLU()
    assert [same(model, plain, **tiny.text(2, length)) for length in (10, 11)] == [False, True]

    class Mixes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.mean(1, keepdim=True)

    for each in (model, plain):
        each.act = Mixes()
    assert [same(model, plain, **tiny.text(2, length)) for length in (10, 11)] == [False, False]
    assert "mean mixes tokens" in padding(model).unpadded
    kernl.restore_model(model)
    torch.testing.assert_close(model(**tiny.text()), plain(**tiny.text()))


def test_disabled_and_refresh() -> None:
    model, plain = optimised(toy())
    for length in (7, 9):
        same(model, plain, **tiny.text(2, length))
    with kernl.disabled():
        assert not same(model, plain, **tiny.text(2, 10))
    model.kernl.refresh()
    assert [same(model, plain, **tiny.text(2, length)) for length in (10, 11)] == [False, True]


def test_verify_and_warmup() -> None:
    model, _ = optimised(make("bert"))
    model.kernl.warmup([(2, 16), (2, 64)], progress=False)
    with torch.inference_mode():
        model(**tiny.text(2, 33))
    assert model.kernl.verify(tiny.text(2, 21), verbose=False)
    assert padding(model).calls >= 3


# Graphs.


@pytest.mark.usefixtures("device")
def test_few_cuda_graphs_for_many_lengths(request: pytest.FixtureRequest) -> None:
    fake: FakeDevice = request.getfixturevalue("device")
    model, plain = optimised(toy())
    for length in range(3, 65):
        same(model, plain, **tiny.text(2, length))
    assert graphs(model) == 1
    assert fake.captures == 4  # the first call's own, and one for each of 16, 32 and 64
    assert fake.replays == 62 - 4 and padding(model).buckets == {16: 13, 32: 16, 64: 32}


@pytest.mark.usefixtures("device")
def test_results_outlive_later_calls(request: pytest.FixtureRequest) -> None:
    model, plain = optimised(toy())
    inputs = [tiny.text(2, length, seed=length) for length in (7, 9, 10, 11, 12)]
    results = [model(**each) for each in inputs]
    for each, result in zip(inputs, results):
        torch.testing.assert_close(result, plain(**each), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("device")
def test_without_buckets_there_is_a_graph_per_length(request: pytest.FixtureRequest) -> None:
    fake: FakeDevice = request.getfixturevalue("device")
    model = kernl.optimize_model(toy())
    for length in range(2, 12):
        model(**tiny.text(2, length))
    assert fake.captures >= 10 and "padded" not in str(model.kernl.report())


def test_the_report() -> None:
    model, plain = optimised(toy(), (16, 32))
    for length in (7, 9, 10, 20, 40):
        same(model, plain, **tiny.text(2, length))
    report = model.kernl.report()
    assert report.as_dict()["padding"] == {
        "calls": 3,
        "true_tokens": 78,
        "padded_tokens": 128,
        "buckets": {16: 2, 32: 1},
        "unpadded": dict(report.padding.unpadded),
    }
    text = str(report)
    assert "3 calls padded: 78 true tokens, 128 run (1.64 for each); buckets: 16 (2 calls), 32 (1 calls)" in text
    assert "longer than every bucket" in text


# Which bucket.


def test_powers() -> None:
    assert [Powers().bucket(length, 1, None) for length in (1, 2, 16, 17, 512, 513)] == [16, 16, 16, 32, 512, 1024]
    assert [Powers().bucket(length, 1, 500) for length in (256, 257, 500)] == [256, 500, 500]


def test_listed() -> None:
    policy = Listed([64, 16])
    assert [policy.bucket(length, 1, None) for length in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, None]
    assert policy.bucket(17, 1, 63) is None


@pytest.mark.parametrize("seed", range(4))
def test_auto_bounds_the_waste_at_every_moment(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, true, run, used = Learnt(), 0, 0, []
    middle = [40, 200, 20, 300][seed]
    for call in range(2000):
        spread = 5 if call % 3 else 100  # most lengths are near each other, some anywhere
        length = int((middle + spread * torch.randn((), generator=generator)).clamp(2, 512))
        batch = 1 + call % 4
        bucket = policy.bucket(length, batch, 512)
        assert bucket is not None and length <= bucket <= 512
        true, run = true + batch * length, run + batch * bucket
        assert run <= MOST_WASTE * true
        used.append(bucket)
    assert len(set(used[-500:])) <= 24 and run > true


def test_auto_takes_one_bucket_where_one_will_do() -> None:
    policy = Learnt()
    buckets = {policy.bucket(90 + call % 11, 2, None) for call in range(400)}
    assert policy.lengths == [104] and len(buckets) <= 3


@pytest.mark.parametrize(
    ("seen", "buckets"),
    [
        ({}, []),
        ({100: 1}, [104]),
        ({90: 5, 100: 5}, [104]),
        ({10: 5, 100: 5}, [16, 104]),
        ({3: 1}, [3]),
        ({8: 9, 16: 9, 24: 9, 32: 9}, [16, 32]),
    ],
)
def test_plans(seen: dict[int, int], buckets: list[int]) -> None:
    assert plan(seen) == buckets


def test_a_plan_stays_within_the_maximum() -> None:
    assert plan({61: 1}, 62) == [62]


def test_auto_on_a_model() -> None:
    model, plain = optimised(toy(), "auto")
    for call in range(40):
        same(model, plain, **tiny.text(2, 20 + call % 8, seed=call))
    counts = padding(model)
    assert counts.calls == 39 and len(counts.buckets) <= 4
    assert counts.true_tokens <= counts.padded_tokens <= MOST_WASTE * counts.true_tokens


# The option.


def test_the_option() -> None:
    assert Options().buckets == "off"
    assert Options(buckets=[64, 16, 16]).buckets == (16, 64)  # type: ignore[arg-type]
    assert Options(buckets="auto").changed() == {"buckets": "auto"}


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        ("power", ValueError, "'power': accepted are 'off', 'powers', 'auto' or lengths.*did you mean 'powers'"),
        (True, TypeError, "True: accepted are"),
        (64, TypeError, "64: accepted are 'off'"),
        (None, TypeError, "None: accepted are"),
        ((), ValueError, "from 1 up, at least one"),
        ((0, 16), ValueError, "from 1 up"),
        ((16, 32.0), TypeError, "whole numbers"),
        ((16, True), TypeError, "whole numbers"),
    ],
)
def test_bad_values(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"option buckets=.*{message}"):
        Options(buckets=value)


@pytest.mark.parametrize("other", [{"guards": "full"}, {"dynamic": False}])
def test_options_that_rule_it_out(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"option buckets='auto' with .*: accepted is 'off'"):
        Options(buckets="auto", **other)


def test_models_of_ones_own_and_forwards_of_ones_own_run_unpadded() -> None:
    """What a mask means there, and what no mask means, cannot be read off the graph."""

    class Subclass(BertModel):
        pass

    own_class = Subclass(tiny.bert_config(num_hidden_layers=1)).eval()
    own_forward = tiny.bert(num_hidden_layers=1)
    inner = own_forward.forward
    own_forward.forward = lambda input_ids, attention_mask=None: inner(input_ids, attention_mask)  # type: ignore[method-assign]
    for model in (own_class, own_forward):
        plain = copy.deepcopy(model)
        fast: Any = kernl.optimize_model(model, buckets="powers")
        for length in (5, 7, 11):
            inputs = tiny.text(2, length)
            want, got = plain(**inputs).last_hidden_state, fast(**inputs).last_hidden_state
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        padding = fast.kernl.report().padding
        assert not padding.calls and list(padding.unpadded) == [
            "the model is none of transformers' own, and what its mask means is not known"
        ]


@pytest.mark.parametrize("value", [2, -1])
def test_a_mask_of_other_numbers_is_not_padded(value: int) -> None:
    plain = tiny.bert(num_hidden_layers=1, attn_implementation="eager")
    fast: Any = kernl.optimize_model(tiny.bert(num_hidden_layers=1, attn_implementation="eager"), buckets="powers")
    for length in (5, 7, 9):
        inputs = tiny.text(2, length)
        inputs["attention_mask"][0] = value
        want, got = plain(**inputs).last_hidden_state, fast(**inputs).last_hidden_state
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    padding = fast.kernl.report().padding
    assert not padding.calls and padding.unpadded[_HIDES] == 2
