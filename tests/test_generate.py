"""Generation on the device gives the tokens of transformers' own loop, and the report says which loop ran."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    MaxTimeCriteria,
    MistralConfig,
    MistralForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

import kernl
from kernl.decoding import capacity_for, encoder_capacity_for
from kernl.generate import LOOK_EVERY, PREPARES_ENCODER, loop_of
from kernl.report import forget_warnings
from tests import tiny

pytestmark = pytest.mark.either_end

VOCABULARY = 97
T5 = {"vocab_size": VOCABULARY, "d_model": 24, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
DECODER = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 64, "num_hidden_layers": 2}
DECODER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
DECODER |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
WHISPER = {"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "num_mel_bins": 8}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
WHISPER |= {"max_source_positions": 30, "max_target_positions": 60, "decoder_start_token_id": 3, "pad_token_id": 0}
WHISPER |= {"bos_token_id": 2, "eos_token_id": 1, "suppress_tokens": [5, 6], "begin_suppress_tokens": [7, 8]}


def bart(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "d_model": 24, "encoder_layers": 1, "decoder_layers": 2}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    sizes |= {"max_position_embeddings": 160, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    return BartForConditionalGeneration(BartConfig(**sizes, decoder_start_token_id=1, forced_eos_token_id=1, **changes))


def gpt2(**changes: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 160}
    sizes |= {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **changes}))


BUILDERS: dict[str, Callable[..., Any]] = {
    "t5": lambda **changes: T5ForConditionalGeneration(T5Config(**T5, **changes)),
    "mt5": lambda **changes: MT5ForConditionalGeneration(MT5Config(**T5, feed_forward_proj="gated-gelu", **changes)),
    "bart": bart,
    "gpt2": gpt2,
    "llama": lambda **changes: LlamaForCausalLM(LlamaConfig(**DECODER, **changes)),
    "qwen2": lambda **changes: Qwen2ForCausalLM(Qwen2Config(**DECODER, **changes)),
    "mistral": lambda **changes: MistralForCausalLM(MistralConfig(**DECODER, sliding_window=8, **changes)),
    "gemma2": lambda **changes: Gemma2ForCausalLM(Gemma2Config(**DECODER, sliding_window=8, **changes)),
    "whisper": lambda **changes: WhisperForConditionalGeneration(WhisperConfig(**WHISPER, **changes)),
}
FAMILIES = [name for name in BUILDERS if name != "whisper"]
WITH_ENCODER = ("t5", "mt5", "bart", "whisper")


def build(family: str, seed: int = 0, **changes: Any) -> Any:
    """A model whose tokens vary and whose logits are far apart; as initialised it would repeat one token."""
    torch.manual_seed(seed)
    model = BUILDERS[family](**changes).eval()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # tied, it would give the last token once more
    torch.manual_seed(seed)
    inner, outer = (0.15, 0.3) if family == "bart" else (0.25, 0.5)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1:
            is_embedding = any(part in name for part in ("embed", "shared", "wte"))
            parameter.data.normal_(0, outer if is_embedding else inner)
    return model


def prompt(family: str, batch: int = 2, length: int = 7, seed: int = 0) -> dict[str, torch.Tensor]:
    """Tokens; every second row is padded, on the left unless there is an encoder."""
    generator = torch.Generator().manual_seed(seed)
    if family == "whisper":
        return {"input_features": torch.randn(batch, 8, 60, generator=generator)}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::2, : length // 2] = 0
    if family in WITH_ENCODER:
        mask = mask.flip(-1)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.fixture(autouse=True)
def fresh_warnings() -> None:
    forget_warnings()


@pytest.fixture(scope="module")
def models() -> Iterator[dict[str, Any]]:
    """Models kept for the whole file: compiling one takes seconds."""
    # All are made before any is compiled: newer versions of transformers count the kinds of models there are, and
    # TorchDynamo guards on that number.
    made: dict[str, Any] = {family: build(family) for family in FAMILIES}
    yield made
    made.clear()


def kept(models: dict[str, Any], family: str) -> Any:
    return models[family]


def counts(model: Any) -> Any:
    return loop_of(model).report.generation


def calls_by_loop(model: Any) -> dict[str, int]:
    found = counts(model)
    return {"fast": found.fast, "stepped": found.stepped.total(), "transformers": found.transformers.total()}


def check(model: Any, loop: str = "fast", seed: int = 0, **arguments: Any) -> torch.Tensor:
    """The same tokens, from the loop expected, and the same random state afterwards."""
    torch.manual_seed(seed)
    with kernl.disabled():
        want = model.generate(**copy.copy(arguments))
    state = torch.get_rng_state()
    before = calls_by_loop(model)
    torch.manual_seed(seed)
    got = kernl.generate(model, **arguments)
    assert got.dtype == want.dtype and got.shape == want.shape, (got.shape, want.shape)
    assert torch.equal(got, want), f"first differing column: {(got != want).any(0).nonzero()[0].item()}"
    assert torch.equal(torch.get_rng_state(), state)
    assert calls_by_loop(model) == {**before, loop: before[loop] + 1}, counts(model)
    return got


# No token ends a row, so that lengths are known.
ENDLESS = {"eos_token_id": None}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_and_sampled_with_padding(models: dict[str, Any], family: str) -> None:
    model = kept(models, family)
    inputs = prompt(family)
    tokens = check(model, **inputs, max_new_tokens=20, **ENDLESS)
    assert len(set(tokens[0].tolist())) > 3  # not the same token over and over
    check(model, **inputs, max_new_tokens=20)
    sampled = check(model, **inputs, max_new_tokens=20, do_sample=True, temperature=2.0, top_k=30, top_p=0.9)
    assert not torch.equal(sampled[:, :8], tokens[:, :8])


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "llama", "gemma2"])
def test_eager_attention(family: str) -> None:
    check(build(family, attn_implementation="eager"), **prompt(family), max_new_tokens=12)


@pytest.mark.parametrize("family", ["t5", "llama", "mistral"])
def test_cache_grows_without_compiling_again(models: dict[str, Any], family: str) -> None:
    model = kept(models, family)
    check(model, **prompt(family), max_new_tokens=10, **ENDLESS)
    graphs = len(loop_of(model).report.graphs)
    check(model, **prompt(family), max_new_tokens=150, **ENDLESS)
    check(model, **prompt(family, length=70, seed=1), max_new_tokens=80, **ENDLESS)
    assert len(loop_of(model).report.graphs) == graphs
    capacities = {layout.capacity for layout in loop_of(model)._memories}
    assert {64, 128, 192} <= capacities


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_different_prompts_in_a_row(models: dict[str, Any], family: str) -> None:
    model = kept(models, family)
    for seed, (batch, length) in enumerate([(2, 7), (2, 7), (3, 5), (1, 9), (2, 12), (1, 1)]):
        inputs = prompt(family, batch, length, seed)
        if length == 1:
            inputs = {"input_ids": inputs["input_ids"]}
        check(model, **inputs, max_new_tokens=10)


def ending_at(model: Any, inputs: dict[str, Any], row: int, step: int, new: int = 40) -> int:
    """A token that greedy decoding gives for the first time in a row at this step (or soon after)."""
    with kernl.disabled():
        tokens = model.generate(**inputs, max_new_tokens=new, eos_token_id=None)[:, -new:]
    for position in range(step, new):
        token = int(tokens[row, position])
        if token not in tokens[row, :position] and token != 0:
            return token
    raise AssertionError("the row repeats itself")


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "llama"])
def test_rows_end_early_and_all_rows_end(models: dict[str, Any], family: str) -> None:
    model, inputs = kept(models, family), prompt(family)
    ends = [ending_at(model, inputs, 0, 3), ending_at(model, inputs, 1, 5)]
    one = check(model, **inputs, max_new_tokens=40, eos_token_id=ends[0], pad_token_id=0)
    assert (one[:, -1] == 0).any() or one.shape[1] < 40  # a row has been padded or all have ended
    looks = counts(model).looks
    both = check(model, **inputs, max_new_tokens=40, eos_token_id=ends, pad_token_id=0)
    assert both.shape[1] < inputs["input_ids"].shape[1] + 40
    assert 0 < counts(model).looks - looks <= -(-40 // LOOK_EVERY)


def test_random_state_is_where_transformers_leaves_it(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "llama"), prompt("llama", batch=1)
    lengths = set()
    for seed in range(6):
        tokens = check(
            model, seed=seed, **inputs, max_new_tokens=60, do_sample=True, temperature=3.0, eos_token_id=list(range(8))
        )
        lengths.add(tokens.shape[1])
    assert len(lengths) > 2 and min(lengths) < 30


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"max_length": 15},
        {"max_new_tokens": 1},
        {"max_new_tokens": 12, "min_new_tokens": 6},
        {"max_length": 25, "min_length": 14},
        {"max_new_tokens": 25, "repetition_penalty": 1.8},
        {"max_new_tokens": 12, "suppress_tokens": [3, 4, 5, 6, 7, 8, 9, 10] + list(range(30, 60))},
        {"max_new_tokens": 12, "begin_suppress_tokens": list(range(3, 50))},
        {"max_new_tokens": 12, "forced_eos_token_id": 1},
        {"max_new_tokens": 12, "forced_bos_token_id": 9},
        {"max_new_tokens": 12, "do_sample": True, "min_p": 0.05, "typical_p": 0.9},
        {"max_new_tokens": 12, "do_sample": True, "epsilon_cutoff": 0.01, "renormalize_logits": True},
        {"max_new_tokens": 8, "do_sample": True, "num_return_sequences": 3},
        {"max_new_tokens": 8, "remove_invalid_values": True},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_arguments(models: dict[str, Any], family: str, arguments: dict[str, Any]) -> None:
    model = kept(models, family)
    for seed, length in enumerate((7, 4)):  # the second prompt shares what the first has left
        inputs = prompt(family, length=length, seed=seed)
        end = ending_at(model, inputs, 0, 2)
        check(model, **inputs, **arguments, eos_token_id=[end, 1])


def test_minimum_length_really_forbids_the_end(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "t5"), prompt("t5", batch=1)
    end = ending_at(model, inputs, 0, 2)
    short = check(model, **inputs, max_new_tokens=30, eos_token_id=end)
    long = check(model, **inputs, max_new_tokens=30, min_new_tokens=20, eos_token_id=end)
    assert short.shape[1] < 20 < long.shape[1]


def test_generation_config_and_prompts_of_the_decoder(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "t5"), prompt("t5")
    config = GenerationConfig(max_new_tokens=9, do_sample=True, top_k=5, decoder_start_token_id=0, pad_token_id=0)
    before = config.to_dict()
    check(model, **inputs, generation_config=config)
    assert config.to_dict() == before
    start = torch.tensor([[0, 5, 6], [0, 8, 9]])
    check(model, **inputs, decoder_input_ids=start, max_new_tokens=9)
    visible = torch.tensor([[1, 1, 1], [1, 0, 1]])
    check(model, **inputs, decoder_input_ids=start, decoder_attention_mask=visible, max_new_tokens=9)


def test_encoder_outputs_given_and_no_mask(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "t5"), prompt("t5")
    with kernl.disabled(), torch.no_grad():
        states = model.get_encoder()(**inputs)
    check(model, encoder_outputs=states, attention_mask=inputs["attention_mask"], max_new_tokens=9)
    check(model, input_ids=prompt("t5", batch=1)["input_ids"], max_new_tokens=9)


def test_positions_and_token_types(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "gpt2"), prompt("gpt2")
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0) + 2
    types = torch.randint(0, VOCABULARY, inputs["input_ids"].shape)
    check(model, **inputs, position_ids=positions, max_new_tokens=9)
    check(model, **inputs, token_type_ids=types, max_new_tokens=9)


def test_modes_of_torch(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "llama"), prompt("llama")
    with torch.inference_mode():
        check(model, **inputs, max_new_tokens=9)
    check(model, **inputs, max_new_tokens=9)
    with torch.inference_mode():
        check(model, **inputs, max_new_tokens=90, **ENDLESS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_whisper(attention: str) -> None:
    model = build("whisper", attn_implementation=attention)
    config = model.generation_config
    config.suppress_tokens, config.begin_suppress_tokens = [5, 6], [7, 8]
    config.no_timestamps_token_id, config.is_multilingual = VOCABULARY - 1, False
    inputs = prompt("whisper")
    tokens = check(model, **inputs, max_new_tokens=20)
    assert tokens.shape[1] > 5 and not {5, 6} & set(tokens.flatten().tolist())
    check(model, **inputs, max_new_tokens=20, do_sample=True)
    check(model, **prompt("whisper", batch=1, seed=1), max_new_tokens=20)
    check(model, "stepped", **inputs, max_new_tokens=10, logits_processor=[Plus()])
    assert list(counts(model).stepped) == ["the logits processor Plus needs the host"]
    check(model, "stepped", **inputs, max_new_tokens=10, num_beams=3)


class Streamer(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass


class Plus(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(1, dims=-1)


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        ("beam search", {"num_beams": 3}),
        ("beam search", {"num_beams": 4, "num_return_sequences": 2, "early_stopping": True, "length_penalty": 0.5}),
        ("beam search", {"num_beams": 3, "do_sample": True, "top_k": 20, "temperature": 2.0}),
        ("the logits processor NoRepeatNGramLogitsProcessor needs the host", {"no_repeat_ngram_size": 2}),
        ("the logits processor Plus needs the host", {"logits_processor": [Plus()]}),
        (
            "the logits processor PrefixConstrainedLogitsProcessor needs the host",
            {"prefix_allowed_tokens_fn": lambda batch, ids: [3, 4, 5]},
        ),
        (
            "the stopping criterion MaxTimeCriteria needs the host",
            {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1000.0)])},
        ),
        ("argument max_time", {"max_time": 1000.0}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_transformers_loop_over_steps(models: dict[str, Any], reason: str, arguments: dict[str, Any]) -> None:
    model = kept(models, "llama")
    before = counts(model).stepped[reason]
    check(model, "stepped", **prompt("llama", batch=3), max_new_tokens=8, **arguments)
    assert counts(model).stepped[reason] == before + 1
    assert loop_of(model).report.as_dict()["generation"]["stepped"][reason] == before + 1
    assert "generation in transformers' loop" in str(loop_of(model).report)


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        ("argument use_cache=False", {"use_cache": False}),
        ("argument prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
        ("argument prefill_chunk_size", {"prefill_chunk_size": 4}),
        ("argument output_attentions", {"output_attentions": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_transformers_loop_over_the_model(models: dict[str, Any], reason: str, arguments: dict[str, Any]) -> None:
    model = build("llama", attn_implementation="eager") if "output_attentions" in arguments else kept(models, "llama")
    before = counts(model).transformers[reason]
    check(model, "transformers", **prompt("llama", batch=1), max_new_tokens=8, **arguments)
    assert counts(model).transformers[reason] == before + 1
    assert loop_of(model).report.as_dict()["generation"]["transformers"][reason] == before + 1


@pytest.mark.parametrize("family", FAMILIES)
def test_beams(models: dict[str, Any], family: str) -> None:
    model = kept(models, family)
    for seed in range(2):
        check(
            model, "stepped", seed, **prompt(family, batch=3, length=7 + seed, seed=seed), max_new_tokens=9, num_beams=3
        )
    assert not loop_of(model).report.notes


@pytest.mark.parametrize("family", ["t5", "mistral"])
def test_beams_across_caches(models: dict[str, Any], family: str) -> None:
    arguments = {"num_beams": 2, "max_new_tokens": 68, "length_penalty": 2.0, **ENDLESS}
    model = kept(models, family)
    check(model, "stepped", **prompt(family, length=1), **{**arguments, "max_new_tokens": 3})
    graphs = len(loop_of(model).report.graphs)
    loop_of(model).release()
    tokens = check(model, "stepped", **prompt(family, length=1), **arguments)
    assert tokens.shape[1] == 69
    assert [layout.capacity for layout in loop_of(model)._memories] == [64, 128]
    assert len(loop_of(model).report.graphs) == graphs


@pytest.mark.parametrize("family", ["t5", "llama"])
@pytest.mark.parametrize("beams", [1, 3])
def test_scores_and_a_cache_to_go_on_from(models: dict[str, Any], family: str, beams: int) -> None:
    model, inputs = kept(models, family), prompt(family, batch=2)
    arguments = {"max_new_tokens": 12, "num_beams": beams, "return_dict_in_generate": True, "output_scores": True}
    with kernl.disabled():
        want = model.generate(**inputs, **arguments, output_logits=True, **ENDLESS)
    stepped = counts(model).stepped.total()
    got = kernl.generate(model, **inputs, **arguments, output_logits=True, **ENDLESS)
    assert counts(model).stepped.total() == stepped + 1
    assert type(got) is type(want) and list(got) == list(want)
    assert torch.equal(got.sequences, want.sequences)
    for name in ("scores", "logits"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)
    (name,) = {"cache", "past_key_values"} & set(got)
    assert type(got[name]) is type(want[name])
    kept_cache = copy.deepcopy(got[name])
    kernl.generate(model, **prompt(family, seed=5), **arguments)  # which must not write to it
    ours, theirs, earlier = (
        [part for layer in cache for part in layer if isinstance(part, torch.Tensor)]
        for cache in (got[name], want[name], kept_cache)
    )
    assert len(ours) == 2 * 2 * (2 if family == "t5" else 1)  # keys and values of two layers
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert all(map(torch.equal, ours, earlier))


def test_streamers_get_each_token(models: dict[str, Any]) -> None:
    for family in ("t5", "llama"):
        model, inputs = kept(models, family), prompt(family, batch=1)
        streamer, expected = Streamer(), Streamer()
        tokens = kernl.generate(model, **inputs, max_new_tokens=5, streamer=streamer)
        with kernl.disabled():
            model.generate(**inputs, max_new_tokens=5, streamer=expected)
        assert streamer.tokens == expected.tokens == tokens.flatten().tolist()
        assert counts(model).stepped["argument streamer"] == 1


def test_training_mode(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "llama"), prompt("llama", batch=1)
    model.train()
    check(model, "transformers", **inputs, max_new_tokens=5)
    model.eval()
    assert counts(model).transformers["the model is in training mode"] == 1


def test_a_processor_that_generates_or_asks_the_model_or_fails(models: dict[str, Any]) -> None:
    model, inputs = kept(models, "llama"), prompt("llama")
    tokens = kernl.generate(model, **inputs, max_new_tokens=6, **ENDLESS)
    inner: list[torch.Tensor] = []

    def meddle(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inner.append(kernl.generate(model, **inputs, max_new_tokens=6, **ENDLESS))
        inner.append(kernl.generate(model, **inputs, max_new_tokens=6, logits_processor=[lambda _, x: x], **ENDLESS))
        model(ids)
        return scores

    outer = kernl.generate(model, **inputs, max_new_tokens=6, logits_processor=[meddle], **ENDLESS)
    assert len(inner) == 12 and all(torch.equal(found, tokens) for found in (outer, *inner))

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kernl.generate(model, **inputs, max_new_tokens=6, logits_processor=[fail])
    check(model, "stepped", **inputs, max_new_tokens=6, num_beams=2)
    check(model, **inputs, max_new_tokens=6)
    assert not loop_of(model)._lanes


def test_a_streamer_that_waits_for_another_call(models: dict[str, Any]) -> None:
    """A queue that is full until another thread has generated with the same model."""
    model, inputs = kept(models, "llama"), [prompt("llama", batch=1, seed=seed) for seed in (1, 2)]
    want = [kernl.generate(model, **each, max_new_tokens=6, **ENDLESS) for each in inputs]
    waits, answers = threading.Event(), []

    class Patient(Streamer):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.tokens) == 7 + 3:
                waits.set()
                other.join(timeout=60)
                assert not other.is_alive()

    def answer() -> None:
        waits.wait(timeout=60)
        with torch.no_grad():
            for arguments in ({}, {"num_beams": 1, "streamer": Streamer()}):
                answers.append(kernl.generate(model, **inputs[1], max_new_tokens=6, **arguments, **ENDLESS))

    other = threading.Thread(target=answer)
    other.start()
    streamer = Patient()
    tokens = kernl.generate(model, **inputs[0], max_new_tokens=6, streamer=streamer, **ENDLESS)
    assert torch.equal(tokens, want[0]) and streamer.tokens == tokens.flatten().tolist()
    assert len(answers) == 2 and all(torch.equal(answer, want[1]) for answer in answers)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"max_new_token": 5}),
        (ValueError, {"max_length": 3}),
        (ValueError, {"max_new_tokens": 5, "temperature": -1.0, "do_sample": True}),
        (ValueError, {"max_new_tokens": -5}),
        (ValueError, {"max_new_tokens": 5, "num_beams": 2, "streamer": Streamer()}),
        (ValueError, {"max_new_tokens": 5, "stop_strings": ["x"]}),
        (ValueError, {"max_new_tokens": 5, "encoder_outputs": (torch.zeros(1, 1, 1),)}),
        (TypeError, {"max_new_tokens": "five"}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mistakes_raise_what_transformers_raises(
    models: dict[str, Any], error: type[Exception], arguments: dict[str, Any]
) -> None:
    model, inputs = kept(models, "llama"), prompt("llama")
    with pytest.raises(error) as theirs, kernl.disabled():
        model.generate(**inputs, **arguments)
    with pytest.raises(error) as ours:
        kernl.generate(model, **inputs, **arguments)
    assert str(ours.value) == str(theirs.value)
    check(model, **inputs, max_new_tokens=6)


def test_more_tokens_than_positions() -> None:
    model = build("gpt2", n_layer=1)
    inputs = prompt("gpt2", length=150)
    with pytest.raises(IndexError) as theirs:
        model.generate(**inputs, max_new_tokens=30, **ENDLESS)
    with pytest.raises(IndexError) as ours:
        kernl.generate(model, **inputs, max_new_tokens=30, **ENDLESS)
    assert str(ours.value) == str(theirs.value)
    # A row that ends where the positions do: no step is run ahead of what is wanted.
    for seed in range(20):
        inputs = prompt("gpt2", batch=1, length=150, seed=seed)
        with kernl.disabled():
            *before, last = model.generate(**inputs, max_new_tokens=11, **ENDLESS)[0, 150:].tolist()
        if last not in before:
            break
    assert check(model, **inputs, max_new_tokens=30, eos_token_id=last).shape[1] == 161


def test_not_a_model_that_generates() -> None:
    with pytest.raises(TypeError, match="model is a BertModel; accepted is a transformers model that has `generate`"):
        kernl.generate(tiny.bert(), input_ids=torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match='option generate="fast": a BertModel has no `generate` of transformers'):
        kernl.optimize_model(tiny.bert(), generate="fast")
    with pytest.raises(ValueError, match="option generate='fsat': accepted are 'hf', 'fast'; did you mean 'fast'"):
        kernl.optimize_model(tiny.bert(), generate="fsat")
    assert isinstance(kernl.optimize_model(tiny.bert()), BertModel)


def test_changed_weights_are_seen() -> None:
    model, inputs = build("llama"), prompt("llama")
    before = check(model, **inputs, max_new_tokens=8, **ENDLESS)
    model.load_state_dict(build("llama", seed=1).state_dict())
    assert not torch.equal(check(model, **inputs, max_new_tokens=8, **ENDLESS), before)
    model.model.layers[0] = build("llama", seed=2).model.layers[0]
    check(model, **inputs, max_new_tokens=8, **ENDLESS)
    model.double()
    check(model, **inputs, max_new_tokens=8, **ENDLESS)


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_optimized_model(family: str) -> None:
    model, inputs = build(family), prompt(family)
    plain = model.generate(**inputs, max_new_tokens=12)
    kernl.optimize_model(model, generate="fast")
    report = model.kernl.report()
    assert torch.equal(model.generate(**inputs, max_new_tokens=12), plain)
    assert torch.equal(
        model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], max_length=12 + (1 if family == "t5" else 7)
        ),
        plain,
    )
    assert report.generation.fast == 2
    model.generate(**inputs, max_new_tokens=4, num_beams=2)
    assert dict(report.generation.stepped) == {"beam search": 1} and not report.generation.transformers
    assert "2 calls in kernl's loop, 1 in transformers' over kernl's steps" in str(report)
    assert "beam search" in str(report)
    assert report.as_dict()["generation"]["fast"] == 2
    with kernl.disabled():
        model.generate(**inputs, max_new_tokens=4)
    assert report.generation.fast == 2
    assert model.kernl.memory()["generation"] > 0
    model.kernl.release()
    assert model.kernl.memory()["generation"] == 0
    model.kernl.refresh()
    assert torch.equal(model.generate(**inputs, max_new_tokens=12), plain)
    twin = copy.deepcopy(model)
    assert "generate" not in vars(twin) and torch.equal(twin.generate(**inputs, max_new_tokens=12), plain)
    kernl.restore_model(model)
    assert "generate" not in vars(model) and torch.equal(model.generate(**inputs, max_new_tokens=12), plain)


def test_option_hf_runs_transformers_loop_without_its_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("llama"), prompt("llama")
    seen = []

    def criteria(self: Any, model_kwargs: Any, generation_config: Any) -> bool:
        seen.append(generation_config.disable_compile)
        return False

    monkeypatch.setattr(type(model), "_valid_auto_compile_criteria", criteria)
    want = model.generate(**inputs, max_new_tokens=6)
    kernl.optimize_model(model)
    before = model.generation_config.to_dict()
    assert torch.equal(model.generate(**inputs, max_new_tokens=6), want)
    config = GenerationConfig(max_new_tokens=6, pad_token_id=0, eos_token_id=1)
    assert torch.equal(model.generate(**inputs, generation_config=config), want)
    assert seen[0] is not True and seen[1:] == [True, True]
    assert model.generation_config.to_dict() == before and not config.disable_compile
    generation = model.kernl.report().generation
    assert dict(generation.stepped) == {'option generate="hf"': 2}
    # So it is over the model as it is.
    assert torch.equal(model.generate(**inputs, generation_config=config, use_cache=False), want)
    assert dict(generation.transformers) == {"argument use_cache=False": 1} and generation.fast == 0
    assert seen[3:] == [True] and not config.disable_compile


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_option_hf_serves_the_encoder_too(family: str) -> None:
    model = build(family)
    inputs = prompt(family)
    want = model.generate(**inputs, max_new_tokens=4, num_beams=2, **ENDLESS)
    kernl.optimize_model(model)
    for call in range(3):
        assert torch.equal(model.generate(**inputs, max_new_tokens=4, num_beams=2, **ENDLESS), want)
        assert model.kernl.report().calls.direct == call  # the encoder's: a cache is no argument by value
    assert "forward" not in vars(model.get_encoder())
    assert set(PREPARES_ENCODER) & vars(model).keys()
    kernl.restore_model(model)
    assert not set(PREPARES_ENCODER) & vars(model).keys()


@pytest.mark.parametrize("option", ["hf", "fast"])
def test_a_copy_made_while_the_encoder_runs_is_plain(option: str) -> None:
    model, inputs = kernl.optimize_model(build("t5"), generate=option), prompt("t5")
    copies: list[Any] = []

    def make_copy(*_: Any) -> None:
        copies.append(copy.deepcopy(model))

    hook = model.get_encoder().register_forward_pre_hook(make_copy)
    tokens = model.generate(**inputs, max_new_tokens=4, **ENDLESS)
    hook.remove()
    (made,) = copies
    assert not {"forward", "__getstate__"} & (vars(made.get_encoder()).keys() | vars(model.get_encoder()).keys())
    made.get_encoder()._forward_pre_hooks.clear()
    assert torch.equal(made.generate(**inputs, max_new_tokens=4, **ENDLESS), tokens)


def test_own_generate_on_the_instance_is_kept() -> None:
    model = build("llama")
    model.generate = lambda *args, **kwargs: "mine"
    kernl.optimize_model(model)
    assert model.generate(input_ids=torch.ones(1, 3)) == "mine"
    kernl.restore_model(model)
    assert model.generate() == "mine"


def test_the_model_is_freed() -> None:
    model = build("t5")
    kernl.generate(model, **prompt("t5"), max_new_tokens=4)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def test_lengths_of_caches() -> None:
    lengths = sorted({capacity_for(n) for n in range(1, 1000)})
    assert lengths == [64, 128, 192, 256, 384, 512, 768, 1024]
    assert all(capacity_for(n) >= n for n in range(1, 1000))
    encoder = {encoder_capacity_for(n) for n in range(1, 1000)}
    assert not encoder & set(lengths) and all(encoder_capacity_for(n) >= n for n in range(1, 1000))


def test_sizes_equal_by_chance_are_not_taken_for_one() -> None:
    """Two rows, two heads of keys: attention is fused in all layers, of prefill and of steps."""
    model = LlamaForCausalLM(LlamaConfig(**DECODER)).eval()
    kernl.optimize_model(model, generate="fast")
    prompt = torch.randint(3, VOCABULARY, (DECODER["num_key_value_heads"], 7))
    with torch.no_grad():
        model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False)
    assert model.kernl.report().matched("attention") == 2 * DECODER["num_hidden_layers"]


@pytest.mark.parametrize("family", ["llama", "whisper"])
def test_as_many_rows_as_tokens_in_the_prompt(family: str) -> None:
    """Attention is fused in prefill too, and other prompts need no graphs of their own."""
    model = build(family)
    layers = model.config.num_hidden_layers if family == "llama" else model.config.decoder_layers
    fused = 2 * layers if family == "llama" else 1 + 4 * layers
    for batch in (2, 3):
        arguments = prompt(family, batch, length=2)
        if family == "whisper":
            arguments["decoder_input_ids"] = torch.randint(3, VOCABULARY, (batch, 2))
        check(model, **arguments, max_new_tokens=6)
        assert loop_of(model).report.matched("attention") == fused


def test_a_replaced_encoder_is_noticed() -> None:
    model, other = build("t5"), build("t5", seed=5)
    check(model, **prompt("t5"), max_new_tokens=6)
    model.encoder = other.encoder
    check(model, **prompt("t5"), max_new_tokens=6)


@pytest.mark.parametrize("family", ["t5", "gpt2", "llama"])
def test_another_dtype_and_autocast_between_calls(family: str) -> None:
    model, inputs = build(family), prompt(family)
    check(model, **inputs, max_new_tokens=6)
    for dtype in (torch.float64, torch.float32):
        check(model.to(dtype), **inputs, max_new_tokens=6)
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            assert kernl.generate(model, **inputs, max_new_tokens=6).shape[0] == len(inputs["input_ids"])
    check(model, **inputs, max_new_tokens=6)


def test_a_generate_of_the_models_own_keeps_its_arguments() -> None:
    class Strict(LlamaForCausalLM):
        def generate(self, input_ids: torch.Tensor, count: int) -> torch.Tensor:  # type: ignore[override]
            return input_ids[:, :count]

    model = kernl.optimize_model(Strict(LlamaConfig(**DECODER)).eval())
    assert model.generate(torch.ones(1, 4, dtype=torch.long), 3).shape == (1, 3)


def test_spellings_that_transformers_takes() -> None:
    model, inputs = build("llama"), prompt("llama")
    with kernl.disabled():
        want = model.generate(**inputs, max_new_tokens=5)
    assert torch.equal(kernl.generate(model, **inputs, max_new_tokens=5, custom_generate=None), want)
    model.generate = functools.partial(kernl.generate, model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=5), want)


@pytest.mark.parametrize("name", ["_sample", "_update_model_kwargs_for_generation"])
def test_methods_replaced_on_the_model_mean_transformers_loop(name: str) -> None:
    model, inputs = build("llama"), prompt("llama")
    setattr(model, name, getattr(model, name))
    kernl.generate(model, **inputs, max_new_tokens=3)
    assert "has a loop of its own" in str(loop_of(model).report)
