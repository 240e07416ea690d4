"""BERT against its peers, side by side in one run.

    python benchmarks/bert.py                          all shapes and peers, BERT-base
    python benchmarks/bert.py --model large --shapes "1,128 8,512 32,512"
    python benchmarks/bert.py --peers eager,graph,kernl --quick

The model is transformers' BERT with random weights in fp16, in eval mode under `torch.inference_mode()`, with sdpa
attention, and an attention mask in which a fifth of the positions is padding. Peers:

    eager            the model as it is
    graph            the model in a hand-made CUDA graph: inputs copied into static buffers, outputs left there
    inductor         torch.compile, compiled for each shape (dynamic=False)
    reduce-overhead  the same with mode="reduce-overhead": Inductor and CUDA graphs
    kernl            kernl.optimize_model, one model for all shapes; outputs are fresh copies
    kernl-inductor   the same with lowering="inductor" (only when asked for: it decides what lowering="auto" means)

Every peer is timed in the same way. `ms`: median over calls, each between two CUDA events and waited for, so that the
host's time counts when the GPU is idle. `throughput_ms`: calls queued back to back. `host_ms`: until the call returns.
`first_s`: the first call with a shape; for kernl that is the compilation on the first shape only, a new shape after it.
Every first call is a cold one: caches on disk (Triton's, Inductor's, kernl's) start empty, unless `--warm` is given.
`error_ratio`: distance from the fp32 model, over the distance of eager fp16 from it. `met`: whether kernl is as many
times faster than the best peer of this run as `TARGETS` asks for (BERT-base).

`reserved_mb`: the most memory reserved beyond the model's weights, for this shape alone. The other peers start every
shape anew. kernl keeps what it has captured, and its first calls are timed like that; its memory is therefore measured
last, after `model.kernl.release()`, over a call that captures the shape again and one that replays it. The weights are
measured before any peer is made, when nothing else is allocated.

Two lower bounds stand beside each row: `floor_bytes_ms`, weights read once and the hidden state read and written once a
layer, at the GPU's copy bandwidth; `floor_flops_ms`, all matrix products (attention over visible keys only) at its
measured 16-bit rate.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import BertConfig, BertModel

from benchmarks.harness import (
    Results,
    add_common_arguments,
    check_result,
    floors,
    names_from,
    parse_shapes,
    time_call,
    time_first_call,
    time_host,
    time_throughput,
)

# kernl first: a run cut short then still says how fast kernl is.
PEERS = ("kernl", "eager", "graph", "reduce-overhead", "inductor")
OURS = ("kernl", "kernl-inductor")
ALL_PEERS = tuple(dict.fromkeys((*PEERS, *OURS)))
SLOW_TO_COMPILE = ("inductor", "reduce-overhead")
SHAPES = [(1, 16), (1, 128), (1, 384), (8, 128), (8, 512), (32, 128), (32, 512)]
QUICK_SHAPES = [(1, 128), (8, 512)]
# How many times faster than the best peer kernl is to be, for BERT-base.
TARGETS = {
    (1, 16): 1.6,
    (1, 128): 1.6,
    (1, 384): 1.6,
    (8, 128): 1.4,
    (8, 512): 1.2,
    (32, 128): 1.2,
    (32, 512): 1.2,
}
CONFIGS: dict[str, dict[str, int]] = {
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    "minilm": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "tiny": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 99,
    },
}

Inputs = dict[str, torch.Tensor]
Call = Callable[[Inputs], torch.Tensor]


def make_model(name: str, dtype: torch.dtype, device: str) -> BertModel:
    """BERT with random weights, the same for every dtype."""
    torch.manual_seed(0)
    return BertModel(BertConfig(**CONFIGS[name])).to(device=device, dtype=dtype).eval()


def make_inputs(model: BertModel, batch: int, length: int, seed: int = 0) -> Inputs:
    """Random tokens; lengths spread evenly so that a fifth of all positions is padding on the right."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    visible = [0.8] if batch == 1 else torch.linspace(1.0, 0.6, batch).tolist()
    lengths = torch.tensor([max(1, round(share * length)) for share in visible])
    mask = (torch.arange(length)[None, :] < lengths[:, None]).long()
    return {name: value.to(model.device) for name, value in (("input_ids", input_ids), ("attention_mask", mask))}


def floor_of(config: BertConfig, inputs: Inputs) -> tuple[float, float]:
    """Bytes and flops that no implementation can do without (16-bit weights and activations)."""
    batch, length = inputs["input_ids"].shape
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    tokens = batch * length
    layer_weights = 4 * hidden * hidden + 2 * hidden * inner
    weights = layers * (layer_weights + 9 * hidden + inner) + hidden * hidden  # biases, norms, pooler
    bytes_moved = 2.0 * (weights + 3 * tokens * hidden + layers * 2 * tokens * hidden)
    pairs = length * float(inputs["attention_mask"].sum())  # (query, visible key) pairs over the batch
    flops = 2.0 * tokens * layers * layer_weights + layers * 4.0 * pairs * hidden
    return bytes_moved, flops


@dataclass
class Peer:
    """A way to run the model.

    prepare: gives the call to time for the shape of these inputs. close: undoes everything.
    release: gives back the memory held for all shapes so far; None for a peer that starts every shape anew.
    """

    name: str
    prepare: Callable[[Inputs], Call]
    close: Callable[[], None] = lambda: None
    release: Callable[[], None] | None = None


def eager_peer(model: BertModel) -> Peer:
    return Peer("eager", lambda _: lambda inputs: model(**inputs).last_hidden_state)


def graph_peer(model: BertModel) -> Peer:
    if not torch.cuda.is_available():
        raise RuntimeError("CUDA graphs need a GPU")

    def prepare(example: Inputs) -> Call:
        state: dict[str, Any] = {}

        def call(inputs: Inputs) -> torch.Tensor:
            if not state:
                state["static"] = {name: value.clone() for name, value in inputs.items()}
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(2):
                        model(**state["static"])
                torch.cuda.current_stream().wait_stream(stream)
                state["graph"] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(state["graph"]):
                    state["output"] = model(**state["static"]).last_hidden_state
            for name, value in inputs.items():
                state["static"][name].copy_(value)
            state["graph"].replay()
            return state["output"]

        return call

    return Peer("graph", prepare)


class ColdCaches:
    """As a context manager: points the caches on disk at new empty folders, and back at the end."""

    VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "KERNL_CACHE_DIR")

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.count = 0

    def __enter__(self) -> ColdCaches:
        self.before = {variable: os.environ.get(variable) for variable in self.VARIABLES}
        self.folder = tempfile.TemporaryDirectory(prefix="kernl-bench-", ignore_cleanup_errors=True)
        return self

    def renew(self) -> None:
        if self.enabled:
            self.count += 1
            for variable in self.VARIABLES:
                os.environ[variable] = os.path.join(self.folder.name, f"{self.count}-{variable.lower()}")

    def __exit__(self, *exception: object) -> None:
        for variable, value in self.before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value
        self.folder.cleanup()


def inductor_peer(model: BertModel, mode: str | None, caches: ColdCaches) -> Peer:
    def prepare(example: Inputs) -> Call:
        torch.compiler.reset()
        caches.renew()
        compiled = torch.compile(model, mode=mode, dynamic=False)
        return lambda inputs: compiled(**inputs).last_hidden_state

    return Peer(mode or "inductor", prepare, torch.compiler.reset)


def kernl_peer(model: BertModel, name: str) -> Peer:
    import kernl

    lowering = "inductor" if name == "kernl-inductor" else "auto"
    optimised: Any = kernl.optimize_model(model, lowering=lowering)

    def close() -> None:
        kernl.restore_model(model)
        torch.compiler.reset()

    call: Call = lambda inputs: optimised(**inputs).last_hidden_state  # noqa: E731
    return Peer(name, lambda _: call, close, optimised.kernl.release)


def make_peer(name: str, model: BertModel, caches: ColdCaches) -> Peer:
    caches.renew()
    if name == "eager":
        return eager_peer(model)
    if name == "graph":
        return graph_peer(model)
    if name in OURS:
        return kernl_peer(model, name)
    return inductor_peer(model, None if name == "inductor" else name, caches)


def release_memory() -> None:
    """Give back everything that nobody uses."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        # cuBLAS keeps a workspace for every stream it has seen, and the pool of the CUDA graph it was made in with it.
        clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear_workspaces is not None:
            clear_workspaces()
        torch.cuda.empty_cache()


def reserved_bytes() -> int:
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


def reserved_mb(peer: Peer, call: Call, inputs: Inputs, weights: int) -> float | None:
    """The most that was reserved beyond the weights for this shape alone (see the module's text)."""
    if not torch.cuda.is_available():
        return None
    if peer.release is not None:
        peer.release()
        release_memory()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            call(inputs)
        torch.cuda.synchronize()
    return (torch.cuda.max_memory_reserved() - weights) / 2**20


@torch.inference_mode()
def measure_shape(peer: Peer, inputs: Inputs, calls: int, weights: int) -> tuple[dict[str, Any], torch.Tensor]:
    """All figures of one peer at one shape, and its result. `weights`: bytes reserved for the model's weights alone."""
    release_memory()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    call = peer.prepare(inputs)
    output, first_ms = time_first_call(lambda: call(inputs).clone())
    timing = time_call(lambda: call(inputs), calls=calls, warmup=5)
    figures: dict[str, Any] = {
        "ms": timing.median_ms,
        "ms_low": timing.low_ms,
        "ms_high": timing.high_ms,
        "calls": timing.calls,
        "throughput_ms": time_throughput(lambda: call(inputs), calls=calls),
        "host_ms": time_host(lambda: call(inputs), calls=calls),
        "first_s": first_ms / 1e3,
    }
    # New inputs of the same shape: a peer that froze its inputs would still give the old result.
    other = {**inputs, "input_ids": inputs["input_ids"].flip(0, 1)}
    call(inputs)
    if torch.equal(call(other), output):
        raise AssertionError(f"{peer.name} gives the same result for other inputs")
    del output, other
    figures["reserved_mb"] = reserved_mb(peer, call, inputs, weights)
    return figures, call(inputs).clone()


def peers_to_run(
    names: list[str], shapes: list[tuple[int, ...]], quick: bool
) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    for name in names:
        if quick and name in SLOW_TO_COMPILE:
            yield name, [shape for shape in shapes if shape in QUICK_SHAPES] or shapes[:1]
        else:
            yield name, shapes


def measure_peers(
    arguments: argparse.Namespace,
    model: BertModel,
    references: dict[tuple[int, ...], torch.Tensor],
    baselines: dict[tuple[int, ...], torch.Tensor],
    results: Results,
    caches: ColdCaches,
) -> int:
    """Add a row for every peer and shape. Returns how often kernl could not be measured."""
    failures = 0
    release_memory()
    weights = reserved_bytes()
    for name, shapes in peers_to_run(arguments.peers, arguments.shapes, arguments.quick):
        release_memory()
        left_over = (reserved_bytes() - weights) / 2**20
        if left_over > 0:
            print(f"{name}: {left_over:.0f} MB that the peer before has left count as its own", file=sys.stderr)
        try:
            peer = make_peer(name, model, caches)
        except Exception as error:
            print(f"{name}: left out, {type(error).__name__}: {error}", file=sys.stderr)
            failures += name in OURS
            continue
        for shape in shapes:
            inputs = make_inputs(model, *shape)
            bytes_floor, flops_floor = floors(*floor_of(model.config, inputs))
            try:
                figures, output = measure_shape(peer, inputs, arguments.calls, weights)
            except Exception as error:
                print(f"{name} {shape}: failed, {type(error).__name__}: {error}", file=sys.stderr)
                failures += name in OURS
                continue
            results.add(
                model=arguments.model,
                shape=list(shape),
                peer=name,
                dtype=str(model.dtype).removeprefix("torch."),
                **figures,
                floor_bytes_ms=bytes_floor,
                floor_flops_ms=flops_floor,
                **check_result(output.cpu(), references[shape], baselines[shape]),
            )
            del output
            results.save()
            print(f"{name:16} {shape!s:10} {figures['ms']:8.3f} ms   first {figures['first_s']:6.2f} s", flush=True)
        peer.close()
        del peer
    return failures


def run(arguments: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    transformers.logging.set_verbosity_error()
    results = Results("bert", out=arguments.out)
    model = make_model(arguments.model, dtype, device)

    references: dict[tuple[int, ...], torch.Tensor] = {}
    baselines: dict[tuple[int, ...], torch.Tensor] = {}
    exact = make_model(arguments.model, torch.float32, device)
    exact.load_state_dict(model.state_dict())  # the rounded weights: the precision of the computation is compared
    with torch.inference_mode():
        for shape in arguments.shapes:
            inputs = make_inputs(model, *shape)
            reference_model = exact if dtype != torch.float32 else exact.double()
            references[shape] = reference_model(**inputs).last_hidden_state.cpu()
            baselines[shape] = model(**inputs).last_hidden_state.cpu()
    del exact, reference_model

    with ColdCaches(not arguments.warm) as caches:
        failures = measure_peers(arguments, model, references, baselines, results, caches)

    add_ratios(results.rows)
    path = results.save()
    results.print_table(
        ["shape", "peer", "ms", "throughput_ms", "host_ms", "first_s", "reserved_mb", "error_ratio", "passed"]
    )
    print()
    print(summary(results))
    print(f"\nrows: {path}")
    return 1 if failures else results.exit_code()


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """To each row of kernl: the best peer at that shape, how many times faster than it kernl is, and the target."""
    for row in rows:
        others = [
            r
            for r in rows
            if (r["model"], r["shape"]) == (row["model"], row["shape"]) and r["peer"] not in OURS and r["passed"]
        ]
        if row["peer"] in OURS and others:
            best = min(others, key=lambda r: r["ms"])
            row["best_peer"], row["best_peer_ms"] = best["peer"], best["ms"]
            row["speedup"] = best["ms"] / row["ms"]
            row["throughput_speedup"] = min(r["throughput_ms"] for r in others) / row["throughput_ms"]
            target = TARGETS.get(tuple(row["shape"])) if row["model"] == "base" else None
            if target is not None:
                row["target"], row["met"] = target, row["passed"] and row["speedup"] >= target


def summary(results: Results) -> str:
    """One line a shape: the best peer, kernl, the ratio and its target, and both floors."""
    rows = [row for row in results.rows if row["peer"] in OURS]
    columns = ["model", "shape", "peer", "ms", "best_peer", "best_peer_ms", "speedup", "target", "met",
               "throughput_speedup", "first_s", "floor_bytes_ms", "floor_flops_ms", "passed"]  # fmt: skip
    return results.table(columns, rows)


parse_peers = names_from(ALL_PEERS, "peer")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="BERT against its peers, side by side in one run.")
    parser.add_argument("--model", choices=sorted(CONFIGS), default="base")
    parser.add_argument("--shapes", type=parse_shapes, default=SHAPES, help="batch,length pairs: '1,128 8,512'")
    parser.add_argument("--peers", type=parse_peers, default=list(PEERS), help=f"of {', '.join(ALL_PEERS)}")
    parser.add_argument("--calls", type=int, default=50, help="timed calls a figure (default 50)")
    parser.add_argument("--warm", action="store_true", help="use the caches on disk as they are")
    add_common_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.calls < 1:
        parser.error(f"--calls must be at least 1, got {arguments.calls}")
    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
