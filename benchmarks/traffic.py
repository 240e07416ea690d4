"""Many shapes: what the first call, a new shape and traffic of random lengths cost.

    python benchmarks/traffic.py                               every part, BERT-base
    python benchmarks/traffic.py --parts first,memory          some of them
    python benchmarks/traffic.py --model tiny --requests 200   a small run, also without a GPU

Parts:

    first      in processes of their own: the first call of an empty cache on disk, then of the cache the first process
               has left, and in each of them the first calls of 50 other shapes (median, 95th percentile, worst)
    host       from the call to its return on an idle GPU (`host_us`), and until its CUDA graph is launched
               (`launch_us`), with three inputs; beside it Inductor's reduce-overhead
    memory     bytes reserved beyond the weights with graphs for 64 shapes, over those of the largest shape alone
    traffic    requests one after the other: lengths log-normal from 8 to 512 (median 64), batches 1 to 16, a fresh
               random mask each; every peer serves the same requests in the same order, its first calls apart

Peers of `traffic`: `kernl`, `kernl-buckets` (`buckets="auto"`), `inductor` (`dynamic=True`) and `reduce-overhead`
(`dynamic=True`, requests padded by hand to powers of two in batch and length, so that it has few graphs to record).
A warm-up serves the first tenth of the requests; its seconds stand in `warmup_s`. A peer that is not through after
`--limit-s` is judged by what it has served. Some outputs of each peer are compared with eager's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BertModel

from benchmarks.bert import CONFIGS, ColdCaches, Inputs, make_model, release_memory, reserved_bytes
from benchmarks.harness import Results, check_result, names_from, time_first_call, time_host
from kernl.timing import synchronize

PARTS = ("first", "host", "memory", "traffic")
PEERS = ("kernl", "kernl-buckets", "inductor", "reduce-overhead")
_LONGEST, _MOST = 512, 16
_CHECK_EVERY = 500
_ROOT = Path(__file__).resolve().parent.parent

Request = tuple[int, int]  # batch, length
Serve = Callable[[Inputs], torch.Tensor]


def requests_of(count: int, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    lengths = (round(rng.lognormvariate(math.log(64), 1.0)) for _ in range(count))
    return [(rng.randint(1, _MOST), min(max(length, 8), _LONGEST)) for length in lengths]


def make_inputs(model: BertModel, request: Request, seed: int, *, token_types: bool = False) -> Inputs:
    """Random tokens; the rows of the batch end anywhere in the last half, one of them at the end."""
    batch, length = request
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)
    lengths = torch.randint((length + 1) // 2, length + 1, (batch,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length)[None, :] < lengths[:, None]).long()
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if token_types:
        inputs["token_type_ids"] = torch.zeros_like(input_ids)
    return {name: value.to(model.device) for name, value in inputs.items()}


def new_model(name: str) -> BertModel:
    has_gpu = torch.cuda.is_available()
    return make_model(name, torch.float16 if has_gpu else torch.float32, "cuda" if has_gpu else "cpu")


# Peers


def make_peer(name: str, model: BertModel) -> tuple[Serve, Callable[[], None]]:
    """How the peer serves a request, and how to undo it."""
    if name.startswith("kernl"):
        import kernl

        options: dict[str, Any] = {"buckets": "auto"} if name == "kernl-buckets" else {}
        optimised: Any = kernl.optimize_model(model, **options)
        return lambda inputs: optimised(**inputs).last_hidden_state, lambda: _undo(model)
    torch.compiler.reset()
    mode = None if name == "inductor" else "reduce-overhead"
    compiled: Any = torch.compile(model, mode=mode, dynamic=True)

    def serve(inputs: Inputs) -> torch.Tensor:
        return compiled(**inputs).last_hidden_state  # type: ignore[no-any-return]

    def serve_padded(inputs: Inputs) -> torch.Tensor:
        batch, length = inputs["input_ids"].shape
        torch.compiler.cudagraph_mark_step_begin()
        return serve(padded(inputs))[:batch, :length]

    return (serve if mode is None else serve_padded), torch.compiler.reset


def _undo(model: BertModel) -> None:
    import kernl

    kernl.restore_model(model)
    torch.compiler.reset()


def padded(inputs: Inputs) -> Inputs:
    """Batch and length rounded up to powers of two; rows that are added attend to their first token."""
    batch, length = inputs["input_ids"].shape
    rows, columns = 1 << (batch - 1).bit_length(), max(16, 1 << (length - 1).bit_length())
    found = {
        name: torch.nn.functional.pad(value, (0, columns - length, 0, rows - batch)) for name, value in inputs.items()
    }
    found["attention_mask"][batch:, 0] = 1
    return found


# Parts


def measure_first(arguments: argparse.Namespace, results: Results) -> None:
    """Two processes, one after the other, on one set of caches that is empty before the first."""
    with tempfile.TemporaryDirectory(prefix="kernl-traffic-", ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **{name: os.path.join(folder, name.lower()) for name in ColdCaches.VARIABLES}}
        for state in ("cold", "warm"):
            command = [
                sys.executable,
                __file__,
                "--child",
                "--model",
                arguments.model,
                "--shapes",
                str(arguments.shapes),
            ]
            done = subprocess.run(command, cwd=_ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"the process of a {state} first call failed:\n{done.stderr[-2000:]}")
            row = results.add(part="first", peer="kernl", state=state, **json.loads(done.stdout.splitlines()[-1]))
            print(f"first call {state}: {row['first_s']:.2f} s", flush=True)


def child(arguments: argparse.Namespace) -> None:
    """In a process of its own: print the seconds of the first call, and of new shapes after it, as JSON."""
    import kernl

    model = new_model(arguments.model)
    shapes = list(dict.fromkeys(requests_of(20 * arguments.shapes, seed=1)))[: arguments.shapes]
    baseline = [_hidden(model, make_inputs(model, shape, seed=0)).cpu() for shape in shapes[:3]]
    optimised: Any = kernl.optimize_model(model)
    with torch.inference_mode():
        example = make_inputs(model, (1, 128), seed=0)
        _, first_ms = time_first_call(lambda: optimised(**example))
        seconds = []
        for shape in shapes:
            inputs = make_inputs(model, shape, seed=0)
            seconds.append(time_first_call(lambda: optimised(**inputs))[1] / 1e3)  # noqa: B023
        got = [optimised(**make_inputs(model, shape, seed=0)).last_hidden_state.cpu() for shape in shapes[:3]]
    passed = all(_close(one, other) for one, other in zip(got, baseline))
    # Once each for batch 1 and for larger ones some versions of PyTorch compile: `new_s_worst` shows it.
    ordered = sorted(seconds)
    print(
        json.dumps(
            {
                "first_s": first_ms / 1e3,
                "new_s_median": statistics.median(ordered),
                "new_s_p95": ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))],
                "new_s_worst": ordered[-1],
                "new_shapes": len(ordered),
                "passed": passed,
            }
        )
    )


@torch.inference_mode()
def _hidden(model: BertModel, inputs: Inputs) -> torch.Tensor:
    return model(**inputs).last_hidden_state  # type: ignore[no-any-return]


def _close(actual: torch.Tensor, baseline: torch.Tensor) -> bool:
    """A coarse check: the fine one is bert.py's."""
    return bool(torch.isfinite(actual).all()) and check_result(actual, baseline, baseline)["error"] < 1e-2


@torch.inference_mode()
def measure_host(arguments: argparse.Namespace, results: Results) -> None:
    for name in ("kernl", "reduce-overhead"):
        model = new_model(arguments.model)
        inputs = make_inputs(model, (1, 16), seed=0, token_types=True)
        baseline = _hidden(model, inputs).cpu()
        serve, undo = make_peer(name, model)
        for _ in range(3):
            output = serve(inputs).clone()
        microseconds = 1e3 * time_host(lambda: serve(inputs), calls=200, warmup=20)  # noqa: B023
        launch_us = time_to_launch(lambda: serve(inputs), calls=200)  # noqa: B023
        row = {"host_us": microseconds, "launch_us": launch_us}
        results.add(part="host", peer=name, **row, passed=_close(output.cpu(), baseline))
        launched = "no CUDA graph" if launch_us is None else f"{launch_us:.0f} us until the graph is launched"
        print(f"host time, {name}: {microseconds:.0f} us, {launched}", flush=True)
        undo()


def time_to_launch(call: Callable[[], Any], calls: int) -> float | None:
    """Microseconds (median) from a call, with an idle GPU, until the CUDA graph it replays has been launched.

    None where no graph of PyTorch's class is replayed.
    """
    launched: list[float] = []
    replay = torch.cuda.CUDAGraph.replay

    def noted(graph: torch.cuda.CUDAGraph) -> None:
        replay(graph)
        launched.append(time.perf_counter())

    samples = []
    torch.cuda.CUDAGraph.replay = noted  # type: ignore[method-assign]
    try:
        for _ in range(calls):
            synchronize()
            launched.clear()
            started = time.perf_counter()
            call()
            if launched:
                samples.append((launched[-1] - started) * 1e6)
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    return statistics.median(samples) if samples else None


@torch.inference_mode()
def measure_memory(arguments: argparse.Namespace, results: Results) -> None:
    """64 shapes in random order, then the largest alone."""
    import kernl

    model = new_model(arguments.model)
    release_memory()
    weights = reserved_bytes()
    grid = [
        (batch, length) for batch in (1, 2, 4, 8, 12, 16, 24, 32) for length in (16, 32, 64, 128, 192, 256, 384, 512)
    ]
    largest = max(grid, key=lambda shape: shape[0] * shape[1])
    random.Random(0).shuffle(grid)
    optimised: Any = kernl.optimize_model(model, max_graphs=len(grid))
    found, passed = {}, True
    for label, shapes in (("all", grid), ("largest", [largest])):
        optimised.kernl.release()
        release_memory()
        for shape in shapes:
            inputs = make_inputs(model, shape, seed=0)
            for _ in range(2):
                output = optimised(**inputs).last_hidden_state
            if shape in (grid[0], largest):
                with kernl.disabled():
                    passed &= _close(output.cpu(), _hidden(model, inputs).cpu())
            del output, inputs
        release_memory()
        found[label] = (reserved_bytes() - weights) / 2**20
    ratio = found["all"] / found["largest"] if found["largest"] else None
    results.add(
        part="memory",
        peer="kernl",
        shapes=len(grid),
        mb=found["all"],
        largest_mb=found["largest"],
        ratio=ratio,
        passed=passed,
    )
    print(
        f"memory: {found['all']:.0f} MB for {len(grid)} shapes, {found['largest']:.0f} MB for the largest", flush=True
    )
    kernl.restore_model(model)


@torch.inference_mode()
def measure_traffic(arguments: argparse.Namespace, results: Results) -> None:
    requests = requests_of(arguments.requests)
    checked = range(0, len(requests), max(1, min(_CHECK_EVERY, len(requests) // 4)))
    eager = new_model(arguments.model)
    expected = {i: _hidden(eager, make_inputs(eager, requests[i], seed=i)).cpu() for i in checked}
    del eager
    for name in arguments.peers:
        model = new_model(arguments.model)
        inputs = [make_inputs(model, request, seed=i) for i, request in enumerate(requests)]
        serve, undo = make_peer(name, model)
        warm = max(1, len(requests) // 10)
        begin = time.perf_counter()
        for request in inputs[:warm]:
            serve(request)
        synchronize()
        warmup_s = time.perf_counter() - begin
        passed, tokens, served = True, 0, 0
        begin = time.perf_counter()
        for index, request in enumerate(inputs):
            output = serve(request)
            served, tokens = served + 1, tokens + request["input_ids"].numel()
            if index in expected:
                passed &= _close(output.cpu(), expected[index])
            if time.perf_counter() - begin > arguments.limit_s:
                break
        synchronize()
        seconds = time.perf_counter() - begin
        results.add(
            part="traffic",
            peer=name,
            requests=served,
            warmup_s=warmup_s,
            seconds=seconds,
            requests_per_s=served / seconds,
            tokens_per_s=tokens / seconds,
            passed=passed,
        )
        print(f"traffic, {name}: {served / seconds:.0f} requests/s after {warmup_s:.1f} s of warm-up", flush=True)
        undo()
        del model, inputs, serve
        release_memory()


MEASURES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "first": measure_first,
    "host": measure_host,
    "memory": measure_memory,
    "traffic": measure_traffic,
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(CONFIGS), default="base")
    parser.add_argument("--parts", type=names_from(PARTS, "part"), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--peers", type=names_from(PEERS, "peer"), default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--shapes", type=int, default=50, help="new shapes after a first call")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds of traffic a peer gets at most")
    parser.add_argument(
        "--out", metavar="FOLDER", help="where the JSON file goes (default: benchmarks/results/traffic)"
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if min(arguments.requests, arguments.shapes) < 1:
        parser.error("--requests and --shapes are at least 1")
    if arguments.child:
        child(arguments)
        return 0
    results = Results("traffic", out=arguments.out)
    for part in arguments.parts:
        MEASURES[part](arguments, results)
        results.save()
    print(f"\nrows: {Path(results.save())}")
    return results.exit_code()


if __name__ == "__main__":
    raise SystemExit(main())
