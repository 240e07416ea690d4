"""Generation with T5 against transformers' own loops, side by side in one run.

    python benchmarks/generate.py                       T5-small and T5-base, batch 1 and 8
    python benchmarks/generate.py --models small --shapes "1,128"
    python benchmarks/generate.py --quick               few calls; on a CPU: a tiny model, to see that it runs

Sizes of T5 with random weights in fp16, 128 input tokens, 64 new tokens, greedy; no token ends a row, so every call
gives the same number of tokens. Peers:

    eager         transformers' `generate` as it is: a cache that grows
    static        the same with `cache_implementation="static"`, which transformers compiles by itself on a GPU
    kernl         kernl.optimize_model, transformers' loop over kernl's steps
    kernl-fast    kernl.optimize_model(generate="fast"): the loop on the GPU

`ms`: median over calls of the whole of `generate`, each between two CUDA events and waited for. `ms_per_token`: that
over the new tokens (of one row). `first_s`: the first call, compilation included. `same_tokens`: the share of new
tokens that are eager's. `passed`: for eager, tokens were given; for others, every token that is not eager's came after
one that plain eager logits do not tell apart (the gap between the best two is within twice the model's own error
against fp32). `speedup`: times faster than "static". `floor_bytes_ms`: the decoder's weights read once a token, the
encoder's once, at the GPU's copy bandwidth.
"""

from __future__ import annotations

import argparse
import copy
import gc
from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import T5Config, T5ForConditionalGeneration

import kernl
from benchmarks.harness import Results, add_common_arguments, floors, names_from, parse_shapes
from kernl.timing import time_call, time_first_call

PEERS = ("kernl-fast", "kernl", "eager", "static")
SHAPES = [(1, 128), (8, 128)]
NEW_TOKENS = 64
# How many times faster than "static" each is to be.
TARGETS = {"kernl": 1.8, "kernl-fast": 4.0}
COMMON = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
CONFIGS: dict[str, dict[str, int]] = {
    "small": {},
    "base": {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12},
    "tiny": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 131},
}

Inputs = dict[str, torch.Tensor]
Call = Callable[[], torch.Tensor]


def make_model(name: str, dtype: torch.dtype, device: str) -> Any:
    """T5 with random weights; the head is drawn by itself, or each token would bring itself again."""
    torch.manual_seed(0)
    model: Any = T5ForConditionalGeneration(T5Config(**{**COMMON, **CONFIGS[name]}))
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    return model.to(device=device, dtype=dtype).eval()


def make_inputs(model: Any, batch: int, length: int) -> Inputs:
    """Random tokens without padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, model.config.vocab_size, (batch, length), generator=generator).to(model.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def call_of(peer: str, model: Any, inputs: Inputs, new_tokens: int) -> Call:
    """What is timed. The model is the peer's own."""
    arguments: dict[str, Any] = {"max_new_tokens": new_tokens, "eos_token_id": None, "do_sample": False}
    if peer == "static":
        arguments["cache_implementation"] = "static"
    elif peer != "eager":
        kernl.optimize_model(model, generate="fast" if peer == "kernl-fast" else "hf")
    return lambda: model.generate(**inputs, **arguments)  # type: ignore[no-any-return]


def judge(model: Any, inputs: Inputs, expected: torch.Tensor, tokens: torch.Tensor) -> dict[str, Any]:
    """Whether tokens are eager's, as far as eager's logits tell tokens apart. model: the plain one."""
    if tokens.shape != expected.shape:
        return {"same_tokens": 0.0, "passed": False}
    same = tokens == expected
    exact = copy.deepcopy(model).float()
    with torch.inference_mode():
        plain = model(**inputs, decoder_input_ids=expected[:, :-1]).logits.float()
        budget = 2 * (plain - exact(**inputs, decoder_input_ids=expected[:, :-1]).logits).abs().max()
    best = plain.topk(2, dim=-1).values
    is_clear = (best[..., 0] - best[..., 1] > budget).long().cumprod(dim=-1).bool()
    return {"same_tokens": float(same[:, 1:].float().mean()), "passed": bool(same[:, 1:][is_clear].all())}


def floor_ms(model: Any, new_tokens: int) -> float | None:
    def bytes_of(module: Any) -> float:
        return float(sum(p.numel() * p.element_size() for p in module.parameters() if p is not model.shared.weight))

    read = bytes_of(model.encoder) + new_tokens * (bytes_of(model.decoder) + bytes_of(model.lm_head))
    return floors(read, 0.0)[0]


def which_loop(model: Any) -> dict[str, Any]:
    """Of a peer of kernl: which loop ran, and how many graphs of prefill and steps there are."""
    if not hasattr(model, "kernl"):
        return {}
    generation = model.kernl.report().generation.as_dict()
    graphs = generation["cuda_graphs"]
    return {
        "loop": "kernl" if generation["fast"] else "kernl's steps" if generation["stepped"] else "transformers",
        "cuda_graphs": 0 if graphs is None else graphs["captured"],
    }


def measure(name: str, peer: str, shape: tuple[int, ...], arguments: argparse.Namespace, results: Results) -> None:
    """One row: a peer, its model made anew, at one shape."""
    on_gpu = torch.cuda.is_available()
    dtype, device = (torch.float16, "cuda") if on_gpu else (torch.float32, "cpu")
    plain, model = make_model(name, dtype, device), make_model(name, dtype, device)
    inputs, new_tokens = make_inputs(plain, *shape), arguments.new_tokens
    expected = call_of("eager", plain, inputs, new_tokens)()
    call = call_of(peer, model, inputs, new_tokens)
    with torch.inference_mode():
        tokens, first_s = time_first_call(call)
        tokens = call()
        timing = time_call(call, calls=arguments.calls, warmup=1 if arguments.quick else 3)
    results.add(
        model=name,
        shape=list(shape),
        new_tokens=new_tokens,
        peer=peer,
        dtype=str(dtype).removeprefix("torch."),
        ms=timing.median_ms,
        ms_per_token=timing.median_ms / new_tokens,
        first_s=first_s,
        floor_bytes_ms=floor_ms(plain, new_tokens),
        **which_loop(model),
        **judge(plain, inputs, expected, tokens),
    )
    results.save()
    kernl.restore_model(model)
    del plain, model, call
    torch._dynamo.reset()
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """To each row: how many times faster than "static" of the same model and shape, and whether the target is met."""
    for row in rows:
        peers = [r for r in rows if (r["model"], r["shape"], r["peer"]) == (row["model"], row["shape"], "static")]
        if peers:
            row["speedup"] = peers[0]["ms"] / row["ms"]
            if row["peer"] in TARGETS:
                row["target"] = TARGETS[row["peer"]]
                row["met"] = row["passed"] and row["speedup"] >= row["target"]


def run(arguments: argparse.Namespace) -> int:
    transformers.logging.set_verbosity_error()
    results = Results("generate", out=arguments.out)
    for name in arguments.models:
        for shape in arguments.shapes:
            for peer in arguments.peers:
                measure(name, peer, shape, arguments, results)
    add_ratios(results.rows)
    path = results.save()
    results.print_table(
        "model shape peer loop ms ms_per_token first_s cuda_graphs same_tokens speedup target met floor_bytes_ms "
        "passed".split()
    )
    print(f"\nrows: {path}")
    return results.exit_code()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Generation with T5 against transformers' own loops.")
    models = names_from(sorted(CONFIGS), "model")
    parser.add_argument("--models", type=models, help=f"of {', '.join(sorted(CONFIGS))} (default small,base)")
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help="batch,length pairs: '1,128 8,128'")
    parser.add_argument("--peers", type=names_from(PEERS, "peer"), default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--calls", type=int, help="timed calls (default 20; 3 with --quick)")
    parser.add_argument("--new-tokens", type=int, help=f"new tokens (default {NEW_TOKENS}; 8 with --quick on a CPU)")
    add_common_arguments(parser)
    arguments = parser.parse_args(argv)
    small = arguments.quick and not torch.cuda.is_available()
    arguments.models = arguments.models or (["tiny"] if small else ["small", "base"])
    arguments.calls = arguments.calls or (3 if arguments.quick else 20)
    arguments.new_tokens = arguments.new_tokens or (8 if small else NEW_TOKENS)
    if arguments.calls < 1 or arguments.new_tokens < 1:
        parser.error(f"--calls and --new-tokens must be at least 1, got {arguments.calls} and {arguments.new_tokens}")
    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
