"""Attention is found in every family, its mask recovered, and the result is the plain model's, corners included."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch.fx import GraphModule, Node

import kernl.ops
import kernl.patterns  # noqa: F401
from kernl.graph import RewriteReport, call_of, canonicalize, default_registry, rewrite, value_of
from kernl.testing import assert_within_budget
from tests.graph.helpers import capture

pytestmark = pytest.mark.either_end

LAYERS, HEADS = 2, 4
MINE = ("attention", "eager_attention", "relative_position_bias", "dropout")
OTHERS = {name for name in default_registry.names() if name not in MINE}


class Compiled:
    """A function or model whose graphs had their attention replaced, with the reports."""

    def __init__(self, function: Callable[..., Any], *, dynamic: bool | None = None) -> None:
        self.graphs: list[GraphModule] = []
        self.reports: list[RewriteReport] = []
        torch._dynamo.reset()
        self.function = torch.compile(function, backend=self._backend, dynamic=dynamic, fullgraph=True)

    def _backend(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        canonicalize(gm)
        self.reports.append(rewrite(gm, without=OTHERS, strict=True))
        self.graphs.append(gm)
        return gm.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(specialize_float=True):  # a scale is a number, whatever the sizes are
            return self.function(*args, **kwargs)

    @property
    def matched(self) -> tuple[int, int]:
        """How many calls of sdpa and how many formulas were replaced."""
        return tuple(sum(report.matched(name) for report in self.reports) for name in ("attention", "eager_attention"))

    @property
    def refused(self) -> dict[str, int]:
        return {
            reason: count
            for report in self.reports
            for name in ("attention", "eager_attention")
            for reason, count in report.refused(name).items()
        }

    @property
    def arguments(self) -> dict[str, Any]:
        """What the first attention of the last graph is told; nodes by what they hold."""
        node = next(node for node in self.graphs[-1].graph.nodes if node.target is torch.ops.kernl.attention.default)
        call = call_of(node)
        assert call is not None
        return call.arguments

    @property
    def masking(self) -> tuple[bool, bool, bool, str]:
        """Whether there is an attn_mask, key padding, causality; and hidden_rows."""
        told = self.arguments
        return told["attn_mask"] is not None, told["key_padding"] is not None, told["is_causal"], told["hidden_rows"]

    @property
    def window(self) -> tuple[int | None, int | None, Any]:
        """left, right, and the number or tensor that is the position of the first query."""
        told = self.arguments
        offset = told["offset"] if told["q_offset"] is None else told["q_offset"]
        return told["left"], told["right"], offset

    def square_masks(self) -> list[Node]:
        """What is left of [batch, 1, seqlen, seqlen] masks."""
        values = {node: value_of(node) for node in self.graphs[-1].graph.nodes}
        tensors = {node: value for node, value in values.items() if isinstance(value, torch.Tensor)}
        return [node for node, value in tensors.items() if value.dim() == 4 and value.dtype == torch.bool]


# The families


def _text(config: type[Any], model: type[Any], **special: Any) -> Callable[..., torch.nn.Module]:
    def make(implementation: str, **options: Any) -> torch.nn.Module:
        sizes = {
            "hidden_size": 32,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "intermediate_size": 48,
            "vocab_size": 50,
            "max_position_embeddings": 32,
        }
        return model(config(**{**sizes, **special, **options}, attn_implementation=implementation))

    return make


def _distilbert(implementation: str, **options: Any) -> torch.nn.Module:
    sizes = {"dim": 32, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48, "vocab_size": 50}
    config = hf.DistilBertConfig(**sizes, max_position_embeddings=32, **options, attn_implementation=implementation)
    return hf.DistilBertModel(config)


def _vit(implementation: str, **options: Any) -> torch.nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 48}
    config = hf.ViTConfig(**sizes, image_size=8, patch_size=4, **options, attn_implementation=implementation)
    return hf.ViTModel(config, add_pooling_layer=False)


def _gpt2(implementation: str, **options: Any) -> torch.nn.Module:
    sizes = {"n_embd": 32, "n_layer": LAYERS, "n_head": HEADS, "vocab_size": 50, "n_positions": 32}
    tokens = {"bos_token_id": 1, "eos_token_id": 1, "use_cache": False}
    return hf.GPT2Model(hf.GPT2Config(**sizes, **tokens, **options, attn_implementation=implementation))


FAMILIES: dict[str, Callable[..., torch.nn.Module]] = {
    "bert": _text(hf.BertConfig, hf.BertModel),
    "roberta": _text(hf.RobertaConfig, hf.RobertaModel),
    "electra": _text(hf.ElectraConfig, hf.ElectraModel, embedding_size=16),
    "distilbert": _distilbert,
    "albert": _text(hf.AlbertConfig, hf.AlbertModel, embedding_size=16),
    "vit": _vit,
    "gpt2": _gpt2,
    "llama": _text(hf.LlamaConfig, hf.LlamaModel, num_key_value_heads=2, use_cache=False),
    "mistral": _text(
        hf.MistralConfig, hf.MistralModel, num_key_value_heads=2, use_cache=False, sliding_window=3, head_dim=8
    ),
}
DECODERS = ("gpt2", "llama", "mistral")


def _model(family: str, implementation: str, **options: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family](implementation, **options).eval()


def _padding_rows(batch: int, seqlen: int) -> torch.Tensor:
    """One sequence padded on the right, one on the left, one with holes, one that is nothing but padding."""
    rows = torch.ones(4, seqlen, dtype=torch.long)
    rows[0, seqlen // 2 + 1 :] = 0
    rows[1, : seqlen // 3] = 0
    rows[2, 1::2] = 0
    rows[3, :] = 0
    return rows[:batch].clone()


def _check(model: Callable[..., Any], compiled: Compiled, **inputs: Any) -> None:
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        found = compiled(**inputs).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, implementation: str) -> None:
    """Any size, with a mask; then static, without one."""
    model = _model(family, implementation)
    expected = (LAYERS, 0) if implementation == "sdpa" else (0, LAYERS)
    hidden_rows = "zero" if implementation == "sdpa" else "mean"
    compiled = Compiled(model, dynamic=True)
    if family == "vit":
        for batch in (4, 3):
            _check(model, compiled, pixel_values=torch.randn(batch, 3, 8, 8))
        assert compiled.masking == (False, False, False, "zero")
    else:
        for batch, seqlen in ((4, 9), (3, 6)):
            mask = _padding_rows(batch, seqlen)
            _check(model, compiled, input_ids=torch.randint(3, 50, (batch, seqlen)), attention_mask=mask)
        assert compiled.masking == (False, True, family in DECODERS, hidden_rows)
        assert compiled.window == (2 if family == "mistral" else None, None, 0)
    assert len(compiled.graphs) == 1, "a new size was compiled anew"
    assert compiled.matched == expected
    assert not compiled.refused
    # The [batch, 1, seqlen, seqlen] mask is gone with everything that built it.
    assert not compiled.square_masks()
    assert not {"where", "le", "ge", "and"} & set(compiled.reports[0].leftover)

    if family == "vit":
        return
    compiled = Compiled(model)
    _check(model, compiled, input_ids=torch.randint(3, 50, (2, 7)))
    assert compiled.matched == expected
    assert not compiled.refused
    assert compiled.masking == (False, False, family in DECODERS, "zero")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_batch_or_length_of_one(implementation: str) -> None:
    model = _model("bert", implementation)
    compiled = Compiled(model, dynamic=True)
    for batch, seqlen in ((1, 7), (3, 1), (1, 1)):
        for mask in (torch.ones(batch, seqlen), torch.zeros(batch, seqlen), _padding_rows(batch, seqlen)):
            _check(model, compiled, input_ids=torch.randint(3, 50, (batch, seqlen)), attention_mask=mask.long())
        assert compiled.masking == (False, True, False, "zero" if implementation == "sdpa" else "mean")
    assert sum(compiled.matched) == 3 * LAYERS


@pytest.mark.both_ends
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_half_precision_model(implementation: str, dtype: torch.dtype) -> None:
    model = _model("bert", implementation)
    inputs = {"input_ids": torch.randint(3, 50, (4, 9)), "attention_mask": _padding_rows(4, 9)}
    seen = inputs["attention_mask"].any(1)
    with torch.no_grad():
        reference = model.double()(**inputs).last_hidden_state
        model = model.to(dtype)
        baseline = model(**inputs).last_hidden_state
        compiled = Compiled(model)
        found = compiled(**inputs).last_hidden_state
    assert compiled.matched in ((LAYERS, 0), (0, LAYERS)) and not compiled.refused
    assert_within_budget(found[seen], reference[seen], baseline[seen], name=f"bert {implementation}")
    # The sequence without a token: what the plain model gives, up to a few roundings.
    torch.testing.assert_close(found[~seen], baseline[~seen], rtol=0, atol=8 * torch.finfo(dtype).eps)


def test_float_and_bool_attention_masks_of_the_model() -> None:
    model = _model("bert", "sdpa")
    for mask in (_padding_rows(4, 8).float(), _padding_rows(4, 8).bool()):
        compiled = Compiled(model)
        _check(model, compiled, input_ids=torch.randint(3, 50, (4, 8)), attention_mask=mask)
        assert compiled.masking == (False, True, False, "zero")


# The formula in its variants


def _operands(
    shape: tuple[int, ...] = (4, 2, 6, 8), dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    return {name: (torch.randn(shape) * scale).to(dtype) for name in ("query", "key", "value")}


def _compare(function: Callable[..., Any], *inputs: Any, atol: float = 2e-6) -> Compiled:
    compiled = Compiled(function)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs), function(*inputs), rtol=1e-5, atol=atol)
    return compiled


def _scale_after(query: Any, key: Any, value: Any) -> Any:
    return (query @ key.transpose(-1, -2) * 0.3).softmax(-1) @ value


def _scale_divides(query: Any, key: Any, value: Any) -> Any:
    scores = torch.matmul(query, key.permute(0, 1, 3, 2)) / math.sqrt(8)
    return torch.matmul(F.softmax(scores, dim=-1), value)


def _scale_before(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax((query * 0.3) @ key.mT, -1) @ value


def _scale_both(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax((query / 2) @ (key * 0.5).transpose(2, 3), dim=3) @ value


def _scale_transposed_key(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax(torch.matmul(query, key.transpose(3, 2) * 0.25), -1).matmul(value)


def _scale_is_a_constant_tensor(query: Any, key: Any, value: Any) -> Any:
    return F.softmax(query @ key.mT / torch.tensor(2.5), dim=-1) @ value


def _no_scale(query: Any, key: Any, value: Any) -> Any:
    return F.dropout(torch.softmax(query @ key.mT, -1), 0.1, training=False) @ value


def _softmax_in_float32(query: Any, key: Any, value: Any) -> Any:
    return F.softmax(query @ key.mT * 0.3, dim=-1, dtype=torch.float32).to(query.dtype) @ value


def _scores_in_float32(query: Any, key: Any, value: Any) -> Any:
    scores = query.float() @ key.float().mT / 3
    return F.softmax(scores.float(), dim=-1).type_as(value) @ value


def _softcap(query: Any, key: Any, value: Any) -> Any:
    scores = torch.tanh(query @ key.mT * 0.3 / 2.5) * 2.5
    return torch.softmax(scores + torch.where(torch.ones(6, 6).tril() == 1, 0.0, -math.inf), -1) @ value


def _softcap_of_other_numbers(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax(2.5 * (query @ key.mT * 0.3).tanh(), -1) @ value


def _bias_before_scale(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax((query @ key.mT + key[..., :1].mT) * 0.3, -1) @ value


def _key_never_transposed(query: Any, key: Any, value: Any) -> Any:
    return torch.softmax(query @ key.reshape(4, 6, 2, 8).permute(0, 2, 3, 1) * 0.3, -1) @ value


VARIANTS = [
    _scale_after,
    _scale_divides,
    _scale_before,
    _scale_both,
    _scale_transposed_key,
    _scale_is_a_constant_tensor,
    _no_scale,
    _softmax_in_float32,
    _scores_in_float32,
    _bias_before_scale,
    _softcap,
    _softcap_of_other_numbers,
    _key_never_transposed,
]


@pytest.mark.parametrize("function", VARIANTS, ids=lambda function: function.__name__)
def test_variant(function: Callable[..., Any]) -> None:
    compiled = _compare(function, *_operands().values())
    assert compiled.matched == (0, 1) and not compiled.refused
    nodes = [node for node in compiled.graphs[0].graph.nodes if node.op in ("call_function", "call_method")]
    assert not any(name in str(node.target) for node in nodes for name in ("softmax", "matmul", "tanh"))
    if "softcap" in function.__name__:
        assert compiled.arguments["softcap"] == 2.5
        assert compiled.arguments["scale"] == pytest.approx(0.3 if function is _softcap else 0.75)


@pytest.mark.parametrize("function", [_softmax_in_float32, _scores_in_float32], ids=lambda function: function.__name__)
def test_variant_in_half_precision(function: Callable[..., Any]) -> None:
    operands = _operands(dtype=torch.float16)
    compiled = Compiled(function)
    found = compiled(*operands.values())
    reference = function(*(operand.double() for operand in operands.values()))
    assert_within_budget(found, reference, function(*operands.values()), name=function.__name__)
    assert compiled.matched == (0, 1)


@pytest.mark.parametrize("product", [torch.matmul, torch.bmm])
def test_three_dimensions_are_one_head(product: Callable[..., Any]) -> None:
    def function(query: Any, key: Any, value: Any, mask: Any) -> Any:
        scores = product(query, key.transpose(1, 2)) * 0.3
        return product(scores.masked_fill(mask[:, None, :] == 0, -1e9).softmax(-1), value)

    compiled = _compare(function, *_operands((4, 6, 8)).values(), _padding_rows(4, 6))
    assert compiled.matched == (0, 1)
    assert compiled.masking == (False, True, False, "mean")
    compiled = _compare(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m[:, None, :] != 0),
        *_operands((4, 6, 8)).values(),
        _padding_rows(4, 6),
    )
    assert compiled.matched == (1, 0)
    assert compiled.masking == (False, True, False, "zero")


def test_grouped_queries_share_their_keys() -> None:
    def repeated(query: Any, key: Any, value: Any) -> Any:
        key, value = (each[:, :, None].expand(4, 2, 3, 6, 8).reshape(4, 6, 6, 8) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value)

    query, key, value = torch.randn(4, 6, 5, 8), torch.randn(4, 2, 6, 8), torch.randn(4, 2, 6, 8)
    for function in (repeated, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)):
        compiled = _compare(function, query, key, value)
        assert compiled.matched == (1, 0)
        assert tuple(value_of(compiled.arguments["key"]).shape) == (4, 2, 6, 8)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_keys_and_values_whose_numbers_are_two_symbols(implementation: str) -> None:
    """TorchDynamo gives a cache's tensors symbols of their own once they have grown."""

    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if implementation == "sdpa":
            return F.scaled_dot_product_attention(query, key, value)
        return (query @ key.mT).softmax(-1) @ value

    query, key, value = (torch.randn(2, 3, length, 8) for length in (4, 6, 6))
    for tensor in (key, value):
        torch._dynamo.mark_dynamic(tensor, 2)
    found = capture(function, query, key, value, registry=default_registry, strict=True)
    assert found.ops() == ["kernl::attention", "getitem"] and found.guards_added == 0
    torch.testing.assert_close(found.result, function(query, key, value))


def test_sdpa_arguments() -> None:
    operands = list(_operands().values())
    compiled = _compare(lambda *x: F.scaled_dot_product_attention(*x), *operands)
    assert compiled.arguments["scale"] == 1 / math.sqrt(8)
    compiled = _compare(lambda *x: F.scaled_dot_product_attention(*x, scale=0.7, is_causal=True), *operands)
    assert compiled.arguments["scale"] == 0.7
    assert compiled.masking == (False, False, True, "zero")
    longer = torch.randn(4, 2, 9, 8)
    for lengths in ((operands[0], longer, longer), (longer, *operands[1:])):
        # From the top left, whatever the lengths.
        compiled = _compare(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), *lengths)
        assert compiled.matched == (1, 0)


# Masks of the formula


def _masked(hide: Callable[..., Any]) -> Callable[..., Any]:
    def function(query: Any, key: Any, value: Any, mask: Any) -> Any:
        return torch.softmax(hide(query @ key.transpose(-1, -2) * 0.3, mask), dim=-1) @ value

    return function


def _visible(mask: torch.Tensor) -> torch.Tensor:
    return mask.bool()[:, None, None, :]


LOWEST = torch.finfo(torch.float32).min
# How the mask is put in -> (attn_mask, key_padding, is_causal, hidden_rows)
MASKINGS: dict[str, tuple[Callable[..., Any], tuple[bool, bool, bool, str]]] = {
    "added": (lambda s, m: s + torch.where(_visible(m), 0.0, LOWEST), (False, True, False, "mean")),
    "added_first": (lambda s, m: torch.where(_visible(m), 0.0, LOWEST) + s, (False, True, False, "mean")),
    "added_in_place": (lambda s, m: s.add_((1 - _visible(m).float()) * LOWEST), (False, True, False, "mean")),
    "subtracted": (lambda s, m: s - (1 - _visible(m).float()) * 1e30, (False, True, False, "mean")),
    "subtracted_1e9": (lambda s, m: s - (1 - _visible(m).float()) * 1e9, (True, False, False, "zero")),
    "filled": (lambda s, m: s.masked_fill((m == 0)[:, None, None, :], LOWEST), (False, True, False, "mean")),
    "filled_expanded": (
        lambda s, m: s.masked_fill((m == 0)[:, None, None, :].expand_as(s), LOWEST),
        (False, True, False, "mean"),
    ),
    "filled_1e9": (lambda s, m: s.masked_fill(~_visible(m), -1e9), (False, True, False, "mean")),
    "chosen": (lambda s, m: torch.where(_visible(m), s, LOWEST), (False, True, False, "mean")),
    "chosen_otherwise": (lambda s, m: torch.where(_visible(m) == 0, LOWEST, s), (False, True, False, "mean")),
    "causal": (
        lambda s, m: s.masked_fill(torch.ones(6, 6).tril() == 0, -math.inf),
        (False, False, True, "zero"),
    ),
    "causal_added": (
        lambda s, m: s + torch.triu(torch.full((6, 6), -math.inf), diagonal=1),
        (False, False, True, "zero"),
    ),
    "causal_then_padding": (
        lambda s, m: s.masked_fill(torch.ones(6, 6).tril() == 0, LOWEST).masked_fill(~_visible(m), LOWEST),
        (False, True, True, "mean"),
    ),
    "shifted_diagonal": (
        lambda s, m: s + torch.where(torch.ones(6, 6).tril(1) == 1, 0.0, LOWEST),
        (False, False, False, "zero"),
    ),
    "no_diagonal": (
        lambda s, m: s.masked_fill(torch.ones(6, 6).tril(-1) == 0, LOWEST),
        (False, False, True, "mean"),
    ),
    "query_padding": (
        lambda s, m: s + torch.where(_visible(m) & _visible(m).mT, 0.0, LOWEST),
        (True, True, False, "mean"),
    ),
    "scaled_mask": (
        lambda s, m: s + (1.0 - m[:, None, None, :].float()) * LOWEST,
        (True, False, False, "zero"),
    ),
    "multiplied_mask": (
        lambda s, m: s + torch.where(_visible(m), 0.0, LOWEST) * m.float().sum(1)[:, None, None, None],
        (True, False, False, "zero"),
    ),
    "soft_mask": (lambda s, m: s + torch.where(_visible(m), 0.0, -3.0), (True, False, False, "zero")),
    "bias": (
        lambda s, m: s + m.float()[:, None, :, None] * m.cumsum(-1)[:, None, None, :],
        (True, False, False, "zero"),
    ),
    "bias_then_mask": (
        lambda s, m: s + m.cumsum(-1)[:, None, None, :] + torch.where(_visible(m), 0.0, LOWEST),
        (True, True, False, "mean"),
    ),
    "two_biases": (
        lambda s, m: s + m.float()[:, None, :, None] + m.cumsum(-1)[:, None, None, :],
        (True, False, False, "zero"),
    ),
    "two_biases_and_a_mask": (
        lambda s, m: (
            s + m.float()[:, None, :, None] + torch.where(_visible(m), m.cumsum(-1)[:, None, None, :].float(), LOWEST)
        ),
        (True, True, False, "mean"),
    ),
    "bias_then_square_mask": (
        lambda s, m: (
            s + m.cumsum(-1)[:, None, None, :].float() + torch.where(_visible(m) & _visible(m).mT, 0.0, LOWEST)
        ),
        (True, True, False, "mean"),
    ),
    "nothing_hidden": (
        lambda s, m: s + torch.where(torch.ones_like(_visible(m)), 0.0, LOWEST),
        (False, False, False, "zero"),
    ),
}


WINDOWS = {"shifted_diagonal": (None, 1, 0), "no_diagonal": (None, None, -1)}


@pytest.mark.parametrize("name", MASKINGS)
def test_masking(name: str) -> None:
    hide, expected = MASKINGS[name]
    compiled = _compare(_masked(hide), *_operands().values(), _padding_rows(4, 6), atol=5e-6)
    assert compiled.matched == (0, 1), compiled.refused
    assert compiled.masking == expected
    assert compiled.window == WINDOWS.get(name, (None, None, 0))


def test_minus_infinity_gives_zero_where_everything_is_hidden() -> None:
    function = _masked(lambda s, m: s.masked_fill(~_visible(m), -math.inf))
    compiled = Compiled(function)
    inputs = (*_operands().values(), _padding_rows(4, 6))
    found = compiled(*inputs)
    assert compiled.masking == (False, True, False, "zero")
    torch.testing.assert_close(found, function(*inputs).nan_to_num())  # the plain formula divides 0 by 0


@pytest.mark.parametrize("seqlen", [6, 11])
def test_sdpa_with_masks_that_are_no_padding(seqlen: int) -> None:
    def attend(mask: Callable[[torch.Tensor], torch.Tensor]) -> Compiled:
        def function(query: Any, key: Any, value: Any, padding: Any) -> Any:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask(padding))

        return _compare(function, *_operands((4, 2, seqlen, 8)).values(), _padding_rows(4, seqlen))

    def positions(padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        index = torch.arange(padding.shape[1])
        return index[None, None, :, None], index[None, None, None, :]

    def shifted(padding: torch.Tensor) -> torch.Tensor:
        query, key = positions(padding)
        return (key <= query + 1) & _visible(padding)

    def offset(padding: torch.Tensor) -> torch.Tensor:
        index = torch.arange(padding.shape[1])
        return torch.cat([padding, padding], 1).bool()[:, index + 1][:, None, None, :]

    def lengths(padding: torch.Tensor) -> torch.Tensor:
        _, key = positions(padding)
        return key < padding.sum(1)[:, None, None, None]

    def float_mask(padding: torch.Tensor) -> torch.Tensor:
        return torch.where(_visible(padding), 0.0, LOWEST)

    assert attend(shifted).masking == (False, True, False, "zero")
    assert attend(shifted).window == (None, 1, 0)
    assert attend(offset).masking == (False, True, False, "zero")
    assert attend(lengths).masking == (False, True, False, "zero")
    assert attend(float_mask).masking == (False, True, False, "mean")


@pytest.mark.parametrize("value", [-65504.0, -1e4])
@pytest.mark.parametrize("spread", [1, 40])
def test_float16_mask_keeps_its_rounding(value: float, spread: int) -> None:
    """Scores that are exact in float16, so that the sums are too: rows that see nothing must round as they do."""
    key = torch.randint(-spread, spread + 1, (4, 2, 6, 8)).half()
    query = F.one_hot(torch.randint(0, 8, (4, 2, 6)), 8).half()
    values = torch.randn(4, 2, 6, 8).half()
    mask = torch.zeros(4, 6, dtype=torch.long)
    mask[0, :3] = 1

    def formula(query: Any, key: Any, value_: Any, mask: Any) -> Any:
        additive = torch.where(_visible(mask), torch.zeros((), dtype=query.dtype), value)
        return torch.softmax(query @ key.mT + additive, dim=-1, dtype=torch.float32).to(query.dtype) @ value_

    compiled = Compiled(formula)
    found, expected = compiled(query, key, values, mask), formula(query, key, values, mask)
    assert compiled.matched == (0, 1)
    assert compiled.masking == (True, False, False, "zero")
    assert tuple(value_of(compiled.arguments["attn_mask"]).shape) == (4, 1, 1, 6)
    known = expected.isfinite()  # a row whose scores are all under -16 overflows to -inf, and is NaN
    torch.testing.assert_close(found[known], expected[known], rtol=2e-3, atol=2e-3)
    if spread > 1 and value == -65504.0:
        mean = values.float().mean(2, keepdim=True).expand_as(values)
        assert (expected[known].float() - mean[known]).abs().max() > 0.1, (
            "the case is meant to be neither mean nor zero"
        )


def test_float16_mask_inside_sdpa_keeps_most_of_the_scores() -> None:
    operands = _operands(dtype=torch.float16)

    def function(query: Any, key: Any, value: Any, mask: Any) -> Any:
        additive = (1 - _visible(mask).half()) * torch.finfo(torch.float16).min
        return F.scaled_dot_product_attention(query, key, value, attn_mask=additive.expand(4, 1, 6, 6))

    inputs = (*operands.values(), _padding_rows(4, 6))
    compiled = Compiled(function)
    found = compiled(*inputs)
    assert compiled.masking == (True, False, False, "zero")
    assert tuple(value_of(compiled.arguments["attn_mask"]).shape) == (4, 1, 1, 6)
    torch.testing.assert_close(found, function(*inputs), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_autocast(implementation: str, dtype: torch.dtype) -> None:
    model = _model("bert", implementation)
    inputs = {"input_ids": torch.randint(3, 50, (4, 9)), "attention_mask": _padding_rows(4, 9)}
    compiled = Compiled(model)
    with torch.no_grad():
        reference = model(**inputs).last_hidden_state.double()
        with torch.autocast("cpu", dtype):
            baseline, found = model(**inputs).last_hidden_state, compiled(**inputs).last_hidden_state
    assert sum(compiled.matched) == LAYERS and not compiled.refused
    seen = inputs["attention_mask"].any(1)
    assert_within_budget(found[seen], reference[seen], baseline[seen], name=f"bert {implementation} autocast")
    torch.testing.assert_close(found[~seen], baseline[~seen], rtol=0, atol=8 * torch.finfo(dtype).eps)


# Refusals


def _refused(function: Callable[..., Any], *inputs: Any) -> str:
    compiled = Compiled(function)
    torch.manual_seed(0)
    found = compiled(*inputs)
    torch.manual_seed(0)
    torch.testing.assert_close(found, function(*inputs))
    assert compiled.matched == (0, 0)
    (reason,) = compiled.refused
    return reason


@pytest.mark.both_ends
@pytest.mark.parametrize("implementation", ["eager"])
@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert", "albert", "vit"])
def test_returned_weights(family: str, implementation: str) -> None:
    model = _model(family, implementation)
    inputs = {"pixel_values": torch.randn(2, 3, 8, 8)} if family == "vit" else {"input_ids": torch.ones(2, 5).long()}
    compiled = Compiled(model)
    with torch.no_grad():
        expected, found = (each(**inputs, output_attentions=True) for each in (model, compiled))
    assert compiled.refused == {"attention weights are returned, or used elsewhere": LAYERS}
    torch.testing.assert_close(found.attentions, expected.attentions)


def _formula(query: Any, key: Any, value: Any, between: Callable[..., Any] = lambda x: x) -> Any:
    return between(torch.softmax(query @ key.mT * 0.3, -1)) @ value


def _scored(query: Any, key: Any, value: Any, between: Callable[..., Any]) -> Any:
    return torch.softmax(between(query @ key.mT), -1) @ value


UNKNOWN: dict[str, tuple[Callable[..., Any], str]] = {
    "head_mask": (
        lambda q, k, v: _formula(q, k, v, lambda p: p * torch.tensor([0.0, 1.0])[None, :, None, None]),
        "mul between softmax and the product with the values",
    ),
    "masked_before_the_softcap": (
        lambda q, k, v: _scored(q, k, v, lambda s: torch.tanh((s + q[..., :1]) / 5) * 5),
        "scaled after a mask",
    ),
    "negative_softcap": (lambda q, k, v: _scored(q, k, v, lambda s: torch.tanh(s / 5) * -5), "tanh that is no softcap"),
    "two_softcaps": (lambda q, k, v: _scored(q, k, v, lambda s: s.tanh().tanh()), "tanh that is no softcap"),
    "scaled_after_mask": (
        lambda q, k, v: _scored(q, k, v, lambda s: (s + torch.where(torch.arange(6) < 4, 0.0, LOWEST)) * 0.5),
        "scaled after a mask",
    ),
    "not_last": (
        lambda q, k, v: torch.softmax(q @ k.mT, -2) @ v,
        "softmax is not over the last dimension",
    ),
    "two_additive_masks": (
        lambda q, k, v: _scored(
            q,
            k,
            v,
            lambda s: (
                s
                + torch.where(torch.ones(6, 6).tril() == 1, 0.0, LOWEST)
                + torch.where(torch.arange(6) < 4, 0.0, LOWEST)
            ),
        ),
        "several masks",
    ),
    "einsum": (
        lambda q, k, v: torch.einsum("bhqk,bhkd->bhqd", torch.softmax(q @ k.mT, -1), v),
        "the last product is an einsum",
    ),
    "einsum_scores": (
        lambda q, k, v: torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k), -1) @ v,
        "scores are a einsum",
    ),
    "weights_second": (lambda q, k, v: v.mT @ torch.softmax(q @ k.mT, -1).mT, "the weights are the second operand"),
    "reshaped_scores": (
        lambda q, k, v: torch.bmm(torch.softmax((q @ k.mT).view(8, 6, 6), -1), v.reshape(8, 6, 8)),
        "between the product of query and key and softmax",
    ),
    "filled_with_a_small_number": (
        lambda q, k, v: _scored(q, k, v, lambda s: s.masked_fill(torch.arange(6) > 3, -5.0)),
        "which is no mask",
    ),
    "filled_with_a_tensor": (
        lambda q, k, v: _scored(q, k, v, lambda s: torch.where(torch.arange(6) > 3, q[..., :1], s)),
        "something that is not a number",
    ),
    "bias_made_of_products": (
        lambda q, k, v: _scored(q, k, v, lambda s: s + q @ q.mT),
        "an addition to the scores that is no mask",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_seen_but_unknown(name: str) -> None:
    function, reason = UNKNOWN[name]
    found = _refused(function, *_operands().values())
    assert found.startswith("seen but unknown: ") and reason in found


def test_refused_operands() -> None:
    assert _refused(_scale_after, *_operands(dtype=torch.float64).values()).startswith("dtype float64")
    assert "head_dim 264" in _refused(_scale_after, *_operands((1, 1, 2, 264)).values())
    assert "head_dim 264" in _refused(F.scaled_dot_product_attention, *_operands((1, 1, 2, 264)).values())
    assert "5 dimensions" in _refused(_scale_after, *_operands((1, 1, 2, 3, 4)).values())
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(1, 1, 3, 8), torch.randn(1, 1, 3, 8)
    assert "not known to be equal" in _refused(_scale_after, query, key, value)
    key, value = key.expand(2, 1, 3, 8), value.expand(2, 1, 3, 8)
    assert "numbers of heads" in _refused(_scale_after, query, key, value.expand(2, 4, 3, 8))
    assert "numbers of heads" in _refused(_scale_after, query[:, :1], key.expand(2, 4, 3, 8), value.expand(2, 4, 3, 8))
    assert _compare(_scale_after, query, key, value).matched == (0, 1)  # one head of keys for all of the queries


def test_active_dropout() -> None:
    def formula(query: Any, key: Any, value: Any) -> Any:
        return F.dropout(torch.softmax(query @ key.mT, -1), 0.5, training=True) @ value

    operands = list(_operands().values())
    compiled = Compiled(formula)
    compiled(*operands)
    assert compiled.matched == (0, 0) and compiled.refused == {"attention dropout is active": 1}
    compiled = Compiled(lambda *x: F.scaled_dot_product_attention(*x, dropout_p=0.5))
    compiled(*operands)
    assert compiled.matched == (0, 0) and compiled.refused == {"attention dropout is active": 1}


@pytest.mark.both_ends
def test_scores_used_elsewhere() -> None:
    def function(query: Any, key: Any, value: Any) -> Any:
        scores = query @ key.mT
        return torch.softmax(scores, -1) @ value, scores.sum()

    assert _refused(function, *_operands().values()) == "attention scores are returned, or used elsewhere"


def test_products_that_are_no_attention() -> None:
    def function(query: Any, key: Any, value: Any) -> Any:
        gate = torch.softmax(F.linear(query, key[0, 0]), -1)  # a router, say
        return gate @ value, query @ key.mT

    compiled = _compare(function, *_operands().values())
    assert compiled.matched == (0, 0) and not compiled.refused


@pytest.mark.both_ends
def test_mask_written_in_place() -> None:
    def function(query: Any, key: Any, value: Any) -> Any:
        mask = torch.zeros(6, 6)
        mask[:, 4:] = -math.inf
        visible = torch.ones(4, 6, dtype=torch.bool)
        visible[1:, 2:4] = False
        first = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return F.scaled_dot_product_attention(first, key, value, attn_mask=visible[:, None, None, :])

    compiled = _compare(function, *_operands().values())
    assert compiled.matched == (2, 0)


def test_positions_behind_a_counter_that_is_written_in_between() -> None:
    """Both bounds stay true; as they count from different numbers, the op gets the mask."""

    def function(query: Any, key: Any, value: Any, tokens: Any) -> Any:
        index = torch.arange(6)
        last = index[:, None] + tokens
        tokens.add_(1)
        first = index[:, None] + tokens.clone()
        visible = (index[None, :] <= last) & (index[None, :] > first - 3)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=visible[None, None])

    operands = _operands().values()
    compiled = Compiled(function)
    found = compiled(*operands, torch.tensor(1))
    torch.testing.assert_close(found, function(*operands, torch.tensor(1)), rtol=1e-5, atol=2e-6)
    assert compiled.matched == (1, 0) and compiled.masking == (True, False, False, "zero")


def test_gradients() -> None:
    function = _masked(lambda s, m: s + torch.where(_visible(m), 0.0, LOWEST))
    operands = [operand.requires_grad_() for operand in _operands().values()]
    mask = _padding_rows(4, 6)
    compiled = Compiled(function)
    weight = torch.randn(4, 2, 6, 8)
    found = torch.autograd.grad((compiled(*operands, mask) * weight).sum(), operands)
    expected = torch.autograd.grad((function(*operands, mask) * weight).sum(), operands)
    assert compiled.matched == (0, 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_large_model_is_read_quickly() -> None:
    """All layers share one mask; reading it for each of them costs little."""
    model = _model("bert", "eager", num_hidden_layers=12)
    compiled = Compiled(model)
    ids = torch.ones(2, 8, dtype=torch.long)
    with torch.no_grad():
        compiled(input_ids=ids, attention_mask=ids)
    assert compiled.matched == (0, 12)
    assert compiled.reports[0].seconds < 2.0


def test_every_node_of_the_match_is_a_node() -> None:
    compiled = _compare(_scale_after, *_operands().values())
    assert all(isinstance(compiled.arguments[name], Node) for name in ("query", "key", "value"))
