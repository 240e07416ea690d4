"""`attn_implementation="kernl"`: Hugging Face models that call kernl's attention without being compiled."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MPNetConfig,
    MPNetModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import kernl
from kernl import hf_attention
from kernl.report import KernlWarning, forget_warnings

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 60}

MODELS: dict[str, tuple[type[Any], Any]] = {
    "bert": (BertModel, BertConfig(**SIZES)),
    "llama": (LlamaForCausalLM, LlamaConfig(**DECODER)),
    "mistral-window": (MistralForCausalLM, MistralConfig(**DECODER, sliding_window=5)),
    "gemma2-softcap": (
        Gemma2ForCausalLM,
        Gemma2Config(**DECODER, head_dim=8, query_pre_attn_scalar=8, sliding_window=4, attn_logit_softcapping=2.0),
    ),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0),
    ),
    "whisper": (
        WhisperForConditionalGeneration,
        WhisperConfig(
            vocab_size=61, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
            max_target_positions=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        ),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def registered() -> str:
    return kernl.register_attention()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The options of each call of kernl's attention."""
    seen: list[dict[str, Any]] = []
    original = hf_attention.attention

    def spy(*operands: torch.Tensor, **options: Any) -> Any:
        seen.append({**options, "shapes": [tuple(operand.shape) for operand in operands]})
        return original(*operands, **options)

    monkeypatch.setattr(hf_attention, "attention", spy)
    yield seen


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """The same model with eager and with kernl's attention."""
    kind, config = MODELS[name]
    torch.manual_seed(0)
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="kernl").eval()
    ours.load_state_dict(eager.state_dict())
    return eager, ours


def inputs_of(name: str, padding: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 60, (3, 11), generator=generator)
    if name == "whisper":
        return {"input_features": torch.randn(3, 8, 40, generator=generator), "decoder_input_ids": ids}
    inputs = {"input_ids": ids}
    if padding != "none":
        mask = torch.ones_like(ids)
        mask[1:, :4] = 0
        inputs["attention_mask"] = mask.flip(1) if padding == "right" else mask
    if name == "t5":
        inputs["decoder_input_ids"] = ids[:, :7]
    return inputs


def first(output: Any) -> torch.Tensor:
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_eager(name: str, padding: str, calls: list[dict[str, Any]]) -> None:
    if name == "whisper" and padding != "none":
        pytest.skip("takes no mask")
    eager, ours = pair(name)
    inputs = inputs_of(name, padding)
    with torch.no_grad():
        got, want = first(ours(**inputs)), first(eager(**inputs))
    assert len(calls) == {"t5": 6, "whisper": 6}.get(name, 2)
    visible = inputs.get("attention_mask", torch.ones(3, 11)).bool() if name != "t5" else torch.ones(3, 7).bool()
    torch.testing.assert_close(got[visible], want[visible], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_mask_and_position_bias_stay_apart(dtype: torch.dtype, calls: list[dict[str, Any]]) -> None:
    """Nothing of [batch, heads, seqlen, seqlen] is made, and a text of nothing but padding comes out as with eager."""
    eager, ours = (model.to(dtype) for model in pair("t5"))
    inputs = inputs_of("t5", "right")
    inputs["attention_mask"][2] = 0
    with torch.no_grad():
        got, want = first(ours(**inputs)), first(eager(**inputs))
    steps = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
    torch.testing.assert_close(got, want, rtol=0, atol=steps[dtype] * float(want.abs().max()))
    encoder = [call for call in calls if call["shapes"][0][2] == 11]
    assert len(encoder) == 2
    for call in encoder:
        assert call["attn_mask"].dtype == torch.bool and call["attn_mask"].shape[1] == 1
        assert call["bias"].shape == (1, 4, 11, 11)


def test_no_copies_of_grouped_keys_and_no_mask_where_a_flag_says_it(calls: list[dict[str, Any]]) -> None:
    _, ours = pair("llama")
    ours(**inputs_of("llama", "none"))
    for call in calls:
        assert call["shapes"] == [(3, 4, 11, 8), (3, 2, 11, 8), (3, 2, 11, 8)]
        assert call["is_causal"] and call["attn_mask"] is None


@pytest.mark.parametrize("name", ["llama", "gemma2-softcap", "t5"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_are_those_of_eager(name: str, cache: str) -> None:
    eager, ours = pair(name)
    inputs = {key: value for key, value in inputs_of(name, "left").items() if not key.startswith("decoder")}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(ours.generate(**inputs, **options), eager.generate(**inputs, **options))  # type: ignore[operator]


def test_gradients_are_those_of_eager() -> None:
    eager, ours = pair("llama")
    inputs = inputs_of("llama", "right")
    for model in (eager, ours):
        first(model(**inputs))[:, :5].square().sum().backward()
    for (name, one), other in zip(ours.named_parameters(), eager.parameters()):
        assert one.grad is not None and other.grad is not None, name
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)


def test_it_can_be_chosen_later_and_optimised() -> None:
    eager, _ = pair("bert")
    inputs = inputs_of("bert", "right")
    with torch.inference_mode():
        want = first(eager(**inputs))
        eager.set_attn_implementation("kernl")  # type: ignore[operator]
        model: Any = kernl.optimize_model(eager)
        for _ in range(2):
            torch.testing.assert_close(first(model(**inputs)), want, rtol=1e-4, atol=1e-5)
    assert not model.kernl.report().notes


@pytest.mark.parametrize("kind", [MPNetModel, BloomModel])
def test_models_that_compute_attention_by_themselves_stay_right(kind: type[Any]) -> None:
    forget_warnings()
    config: Any = {
        MPNetModel: MPNetConfig(**SIZES),
        BloomModel: BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4),
    }[kind]
    torch.manual_seed(0)
    eager = kind._from_config(copy.deepcopy(config), attn_implementation="eager").eval()
    ours = kind._from_config(copy.deepcopy(config), attn_implementation="kernl").eval()
    ours.load_state_dict(eager.state_dict())
    inputs = inputs_of("bert", "right")
    with torch.no_grad():
        want = first(eager(**inputs))
        with pytest.warns(KernlWarning, match="models compute attention by themselves; not used"):
            got = first(ours(**inputs))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_dropout_goes_to_pytorch(calls: list[dict[str, Any]]) -> None:
    kind, config = MODELS["llama"]
    config = copy.deepcopy(config)
    config.attention_dropout = 0.5
    model = kind._from_config(config, attn_implementation="kernl").train()
    first(model(**inputs_of("llama", "none"))).sum().backward()
    assert not calls
    first(model.eval()(**inputs_of("llama", "none")))
    assert len(calls) == 2


def test_what_it_does_not_have() -> None:
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(NotImplementedError, match="no attention sinks"):
        hf_attention.attention_of_module(nn.Module(), x, x, x, None, s_aux=torch.ones(2))


def test_softcap_and_dropout() -> None:
    """On average over masks the output is that without dropout."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 5, 4) for _ in range(3))
    arguments = (nn.Module(), query, key, value, None)
    plain, _ = hf_attention.attention_of_module(*arguments, softcap=2.0)
    outputs = [hf_attention.attention_of_module(*arguments, softcap=2.0, dropout=0.3)[0] for _ in range(2000)]
    assert not torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(torch.stack(outputs).mean(0), plain, rtol=0, atol=0.06)
