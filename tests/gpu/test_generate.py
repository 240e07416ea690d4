"""Generation on a GPU: prefill and steps are CUDA graphs, and tokens are those of transformers' own loop.

In fp16 two loops may part where the two best tokens are nearly equal: there the logits of the plain model must say so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import kernl
from benchmarks import generate as benchmark
from kernl.generate import loop_of
from tests.test_generate import ENDLESS, build, check, ending_at, prompt

T5_SMALL = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}  # its sizes are the config's defaults
LLAMA = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def large(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    if family == "t5":
        model: Any = T5ForConditionalGeneration(T5Config(**T5_SMALL))
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    else:
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    # Some tokens stand out, as a trained model's do: of random rows of one size the two best logits are too near.
    model.lm_head.weight.data *= torch.randn(model.lm_head.weight.shape[0], 1).exp()
    return model.eval().to("cuda", dtype)


def captured(model: Any) -> int:
    """Graphs held; none may have been given up."""
    report = loop_of(model).report
    graphs = report.generation.as_dict()["cuda_graphs"]
    assert graphs["skipped"] == {} and not report.notes, (graphs, dict(report.notes))
    return int(graphs["captured"])


def logits_of(model: Any, inputs: dict[str, torch.Tensor], tokens: torch.Tensor, new: int) -> torch.Tensor:
    """The plain model's logits for each new token, given the tokens before it: float32 [batch, new, vocabulary]."""
    with kernl.disabled(), torch.no_grad():
        if model.config.is_encoder_decoder:
            logits = model(**inputs, decoder_input_ids=tokens[:, :-1]).logits
        else:
            mask = torch.cat([inputs["attention_mask"], torch.ones_like(tokens[:, -new:])], dim=1)
            positions = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 0)
            logits = model(input_ids=tokens[:, :-1], attention_mask=mask[:, :-1], position_ids=positions[:, :-1]).logits
    return logits[:, -new:].float()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("family", ["t5", "llama"])
def test_best_tokens_within_the_budget(family: str, batch: int, dtype: torch.dtype) -> None:
    model, exact = large(family, dtype), large(family, dtype).float()
    new, clear = 40, 0
    for seed in range(2):
        inputs = on_gpu(prompt(family, batch, 60, seed))
        tokens = kernl.generate(model, **inputs, max_new_tokens=new, **ENDLESS)
        plain = logits_of(model, inputs, tokens, new)
        budget = 2 * (plain - logits_of(exact, inputs, tokens, new)).abs().max() + torch.finfo(dtype).eps
        chosen = plain.gather(-1, tokens[:, -new:, None])[..., 0]
        assert (plain.amax(-1) - chosen <= budget).all()
        with kernl.disabled():
            want = model.generate(**inputs, max_new_tokens=new, **ENDLESS)
        best = plain.topk(2, dim=-1).values
        is_clear = (best[..., 0] - best[..., 1] > budget).long().cumprod(-1).bool()  # all tokens up to here
        assert torch.equal(want[:, -new:][is_clear], tokens[:, -new:][is_clear])
        clear += int(is_clear.sum())
    assert clear > 0
    assert captured(model) == 2 and loop_of(model).report.generation.fast == 2


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["t5", "mt5", "bart", "gpt2", "llama", "mistral", "gemma2"])
def test_same_tokens_in_float32(family: str, attention: str) -> None:
    model = build(family, attn_implementation=attention).cuda()
    for seed in range(3):
        check(model, **on_gpu(prompt(family, seed=seed)), max_new_tokens=20, **ENDLESS)
    assert captured(model) == 2


def test_sampling_draws_the_same_numbers() -> None:
    model = build("llama").cuda()
    for seed in range(4):
        inputs = on_gpu(prompt("llama", seed=seed))
        arguments = {"max_new_tokens": 40, "do_sample": True, "temperature": 3.0, "eos_token_id": list(range(8))}
        torch.manual_seed(seed)
        with kernl.disabled():
            want = model.generate(**inputs, **arguments)
        after = torch.rand(4, device="cuda")
        torch.manual_seed(seed)
        got = kernl.generate(model, **inputs, **arguments)
        assert torch.equal(got, want) and torch.equal(torch.rand(4, device="cuda"), after)
    assert captured(model) == 2


@pytest.mark.parametrize("family", ["t5", "llama"])
def test_growth_early_ends_and_processors(family: str) -> None:
    model = build(family).cuda()
    inputs = on_gpu(prompt(family))
    for _ in range(2):
        check(model, **inputs, max_new_tokens=150, **ENDLESS)
    graphs = captured(model)
    check(model, **inputs, max_new_tokens=150, **ENDLESS)
    assert captured(model) == graphs
    ends = [ending_at(model, inputs, 0, 3), ending_at(model, inputs, 1, 5)]
    check(model, **inputs, max_new_tokens=40, eos_token_id=ends)
    rules = {"repetition_penalty": 1.5, "min_new_tokens": 6, "suppress_tokens": list(range(30, 90))}
    for _ in range(2):
        check(model, **inputs, max_new_tokens=40, eos_token_id=ends, **rules)
    captured(model)


def test_whisper() -> None:
    model = build("whisper").cuda()
    model.generation_config.no_timestamps_token_id, model.generation_config.is_multilingual = 96, False
    for seed in range(3):
        check(model, **on_gpu(prompt("whisper", seed=seed)), max_new_tokens=20)
    assert captured(model) == 2


def test_modes_and_changed_weights() -> None:
    model, inputs = build("llama").cuda(), on_gpu(prompt("llama"))
    for _ in range(2):
        check(model, **inputs, max_new_tokens=10, **ENDLESS)
        with torch.inference_mode():
            check(model, **inputs, max_new_tokens=10, **ENDLESS)
    model.model.layers[0].mlp.up_proj.weight.data = torch.randn_like(model.model.layers[0].mlp.up_proj.weight)
    check(model, **inputs, max_new_tokens=10, **ENDLESS)
    model.load_state_dict(build("llama", seed=3).state_dict())
    check(model, **inputs, max_new_tokens=10, **ENDLESS)
    captured(model)


def test_optimized_model_and_its_memory() -> None:
    model, inputs = build("t5").cuda(), on_gpu(prompt("t5"))
    plain = model.generate(**inputs, max_new_tokens=12)
    kernl.optimize_model(model, generate="fast", cuda_graph="always", strict=True)
    for _ in range(3):
        assert torch.equal(model.generate(**inputs, max_new_tokens=12), plain)
    assert model.kernl.report().generation.fast == 3 and captured(model) == 2
    assert len(model.kernl.memory()["graphs"]) == 3  # the encoder's too
    model.kernl.release()
    assert not model.kernl.memory()["graphs"] and captured(model) == 0
    assert torch.equal(model.generate(**inputs, max_new_tokens=12), plain)


def test_static_cache_in_transformers_loop_is_not_compiled_twice() -> None:
    model, inputs = build("llama").cuda(), on_gpu(prompt("llama"))
    kernl.optimize_model(model)
    model.generate(**inputs, max_new_tokens=6, cache_implementation="static")
    assert not hasattr(model, "_compiled_call")
    assert model.kernl.report().generation.stepped['option generate="hf"'] == 1


def test_benchmark(tmp_path: Path) -> None:
    assert benchmark.main(["--models", "tiny", "--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["peer"] for row in rows} == set(benchmark.PEERS) and all(row["passed"] for row in rows)
    (fast,) = [row for row in rows if row["peer"] == "kernl-fast" and row["shape"][0] == 1]
    assert fast["loop"] == "kernl" and fast["cuda_graphs"] >= 2
