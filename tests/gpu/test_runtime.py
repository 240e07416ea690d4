"""The CUDA-graph runner and the tuner on a real GPU."""

from __future__ import annotations

import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernl.runtime import cuda_graph, tuning
from kernl.runtime.capability import capability_of
from kernl.runtime.capture_device import cuda_capture_device
from kernl.runtime.cuda_graph import RARE, CudaGraphRunner
from kernl.runtime.tuning import Candidate, choose

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MEBIBYTE = 1 << 20


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
    gc.collect()


@pytest.fixture
def weights() -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    generator = torch.Generator("cuda").manual_seed(0)
    w1 = torch.randn(64, 256, device="cuda", generator=generator) / 8
    w2 = torch.randn(256, 64, device="cuda", generator=generator) / 16
    return torch.nn.Parameter(w1), torch.nn.Parameter(w2)


def network(w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = F.gelu(x @ w1) @ w2
    return hidden, hidden.mean(-1)


def runner_of(function: Callable[..., Any] = network, **options: Any) -> CudaGraphRunner:
    return CudaGraphRunner(function, **{"fixed_inputs": [0, 1], **options})


def check(outputs: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for actual, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, reference)


def test_capability_of_this_gpu() -> None:
    capability = capability_of()
    assert capability.arch >= 50 and capability.sm_count > 0 and capability.l2_bytes > 0
    assert capability.shared_memory_per_block >= 48 * 1024
    assert capability_of(torch.zeros(1, device="cuda")) == capability
    assert capability_of(torch.zeros(1)).arch == 0


def test_a_graph_is_reused_with_new_inputs(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    runner = runner_of()
    for _ in range(5):
        x = torch.randn(8, 64, device="cuda")
        check(runner(*weights, x), network(*weights, x))
    assert runner.graph_count() == 1 and not runner.skips


def test_ten_shapes_up_and_down(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    runner = runner_of()
    sizes = [1, 2, 3, 5, 8, 13, 64, 100, 257, 1024]
    for size in sizes + sizes[::-1]:
        x = torch.randn(size, 64, device="cuda")
        check(runner(*weights, x), network(*weights, x))
    assert runner.graph_count() == 10 and not runner.skips


def test_outputs_are_kept_across_calls(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    runner = runner_of()
    inputs = [torch.randn(random.Random(i).choice((4, 7, 32)), 64, device="cuda") for i in range(30)]
    outputs = [runner(*weights, x) for x in inputs]
    for x, got in zip(inputs, outputs):
        check(got, network(*weights, x))


def test_weights_written_in_place_and_moved(weights: tuple[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    runner = runner_of()
    x = torch.randn(8, 64, device="cuda")
    runner(*weights, x)
    weights[0].mul_(2)
    check(runner(*weights, x), network(*weights, x))
    weights[0].data.add_(1)
    check(runner(*weights, x), network(*weights, x))
    kept = runner.lookup((*weights, x))
    assert kept is not None
    weights[1].data = torch.randn_like(weights[1])
    check(runner(*weights, x), network(*weights, x))
    check(kept.replay([*weights, x]), network(*weights, x))
    assert not runner.skips


def test_addresses_are_compared_in_cpp() -> None:
    assert cuda_graph._addresses_equal is not None


def test_inference_mode_and_no_grad_in_turn(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    runner = runner_of()
    for _ in range(2):
        with torch.inference_mode():
            x = torch.randn(8, 64, device="cuda")
            got = runner(*weights, x)
            assert got[0].is_inference()
            check(got, network(*weights, x))
        x = torch.randn(8, 64, device="cuda")
        got = runner(*weights, x)
        assert not got[0].is_inference()
        check(got, network(*weights, x))
    assert runner.graph_count() == 2


def test_gradients_run_plainly(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    runner = runner_of()
    with torch.enable_grad():
        hidden, _ = runner(*weights, torch.randn(8, 64, device="cuda"))
        hidden.sum().backward()
    assert weights[0].grad is not None
    assert runner.skips == {"gradients are needed": 1}


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x[:1].expand(16, 64),
        lambda x: x[:, :1].expand(16, 64),
        lambda x: x.view(64, 16).t(),
        lambda x: x.new_ones(16, 200).copy_(x.repeat(1, 4)[:, :200])[:, 3:131:2],
        lambda x: x.flatten()[:79].unfold(0, 64, 1),
    ],
    ids=["row", "column", "transposed", "sliced", "window"],
)
def test_any_strides(
    weights: tuple[torch.Tensor, torch.Tensor], prepare: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    runner = runner_of()
    for _ in range(3):
        x = prepare(torch.randn(16, 64, device="cuda"))
        check(runner(*weights, x), network(*weights, x))
    assert runner.graph_count() == 1 and not runner.skips


def test_inputs_of_several_dtypes_and_values() -> None:
    def function(ids: torch.Tensor, mask: torch.Tensor, scale: int, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, table) * mask[..., None] * scale

    runner = CudaGraphRunner(function, fixed_inputs=[3])
    table = torch.randn(100, 8, device="cuda")
    for scale in (1, 2, 1, 2):
        ids = torch.randint(0, 100, (2, 5), device="cuda")
        mask = torch.rand(2, 5, device="cuda") > 0.5
        assert torch.equal(runner(ids, mask, scale, table), function(ids, mask, scale, table))
    assert runner.graph_count() == 2


def test_outputs_that_alias_inputs_and_each_other() -> None:
    def function(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return w, x, x.t(), w[1:], y, y[:, 0], y, (x + 1).t()

    runner = CudaGraphRunner(function, fixed_inputs=[0])
    w = torch.nn.Parameter(torch.randn(5, device="cuda"))
    for _ in range(3):
        x = torch.randn(4, 5, device="cuda")
        got = runner(w, x)
        check(got, function(w, x))
        assert got[0] is w and got[1] is x and got[4] is got[6]
        assert got[2].data_ptr() == x.data_ptr() and got[3].data_ptr() == w[1:].data_ptr()
        assert got[5].data_ptr() == got[4].data_ptr() and got[7].stride() == (1, 5)
    assert runner.graph_count() == 1


def test_effects_happen_once_per_call() -> None:
    def step(cache: torch.Tensor, counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        cache.add_(x)
        return cache + counter

    runner = CudaGraphRunner(step, fixed_inputs=[0])
    cache, counter = torch.zeros(4, device="cuda"), torch.zeros(1, device="cuda")
    for call in range(1, 6):
        got = runner(cache, counter, torch.ones(4, device="cuda"))
        assert torch.equal(got, torch.full((4,), 2.0 * call, device="cuda"))
    assert counter.item() == 5 and cache.sum().item() == 20
    assert runner.graph_count() == 1 and not runner.skips


def test_random_numbers_differ_between_replays_and_follow_the_seed() -> None:
    runner = CudaGraphRunner(lambda x: F.dropout(x, 0.5) + torch.rand_like(x))
    x = torch.ones(1000, device="cuda")
    runner(x)
    torch.manual_seed(3)
    first, second = runner(x), runner(x)
    torch.manual_seed(3)
    again = runner(x)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_autocast_casts_the_weights_of_now(weights: tuple[torch.nn.Parameter, torch.nn.Parameter]) -> None:
    runner = runner_of()
    x = torch.randn(8, 64, device="cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        runner(*weights, x)
        runner(*weights, x)
    weights[0].data.mul_(3)
    with torch.autocast("cuda", dtype=torch.float16):
        got = runner(*weights, x)
        assert got[0].dtype == torch.float16
        check(got, network(*weights, x))
    assert runner.graph_count() == 1


def test_two_runners_in_turn(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    first, second = runner_of(), CudaGraphRunner(lambda x: x.softmax(-1) * 3)
    for size in (4, 9, 4, 30, 9, 4):
        x = torch.randn(size, 64, device="cuda")
        hidden, mean = first(*weights, x)
        got = second(hidden)
        check((hidden, mean, got), (*network(*weights, x), hidden.softmax(-1) * 3))


@pytest.mark.parametrize("shared", [True, False], ids=["one runner", "a runner each"])
def test_two_threads_on_streams_of_their_own(weights: tuple[torch.Tensor, torch.Tensor], shared: bool) -> None:
    runners = [runner_of()] * 2 if shared else [runner_of(), runner_of()]
    wrong: list[str] = []

    def work(thread: int) -> None:
        rng = random.Random(thread)
        # While one thread captures, PyTorch lets no other draw from the default generator.
        generator = torch.Generator("cuda").manual_seed(thread)
        for _ in range(150):
            x = torch.randn(rng.choice((3, 16, 50)), 64, device="cuda", generator=generator)
            got = runners[thread](*weights, x)
            expected = network(*weights, x)
            if not all(torch.allclose(a, b, atol=1e-4) for a, b in zip(got, expected)):
                wrong.append(f"thread {thread}, {len(x)} rows")

    in_two_threads(work, wrong)
    assert not wrong
    assert not any(runner.skips for runner in runners)


def test_two_threads_make_first_calls_all_the_time(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    wrong: list[str] = []

    def work(thread: int) -> None:
        generator = torch.Generator("cuda").manual_seed(thread)
        runner = runner_of(max_graphs=4)
        for size in range(1, 60):
            x = torch.randn(size, 64, device="cuda", generator=generator)
            outputs = [runner(*weights, x) for _ in range(8)]  # enough of them for a place among the graphs
            expected = network(*weights, x)
            if not all(torch.allclose(a, b, atol=1e-4) for got in outputs for a, b in zip(got, expected)):
                wrong.append(f"thread {thread}, {size} rows")
        if set(runner.skips) != {RARE}:
            wrong.append(str(runner.skips))

    in_two_threads(work, wrong)
    assert not wrong


def in_two_threads(work: Callable[[int], None], wrong: list[str]) -> None:
    """Run `work` in two threads at once, each on a stream of its own; an exception is added to `wrong`."""
    torch.cuda.synchronize()

    def run(thread: int) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                work(thread)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_callers_stream_may_be_any(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    """PyTorch hands out 32 streams in turn, so one of these is the stream on which graphs are captured."""
    runner = runner_of()
    for size in range(1, 41):
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(size, 64, device="cuda")
            expected = network(*weights, x)  # cuBLAS makes a workspace for this stream
            for _ in range(3):
                check(runner(*weights, x), expected)
        torch.cuda.synchronize()
    assert not runner.skips


def test_graphs_survive_when_others_clear_the_workspaces_of_cublas() -> None:
    """As PyTorch's own graph trees do. A graph with its workspace outside the pool would read unmapped memory."""
    w = torch.randn(8192, 64, device="cuda", dtype=torch.float16)
    runner = CudaGraphRunner(lambda w, x: x @ w, fixed_inputs=[0])
    x = torch.randn(8, 8192, device="cuda", dtype=torch.float16)  # few tiles, long sums: split over the workspace
    for _ in range(3):
        torch.testing.assert_close(runner(w, x), x @ w)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert runner.graph_count() == 1


def test_inside_the_callers_own_capture_it_runs_plainly(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    runner = runner_of()
    x = torch.randn(8, 64, device="cuda")
    runner(*weights, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = runner(*weights, x)
    graph.replay()
    check(got, network(*weights, x))
    assert runner.skips == {"the caller is capturing a graph itself": 1}


# Failures


def test_a_function_that_waits_for_the_gpu_runs_plainly_and_breaks_nothing(
    weights: tuple[torch.Tensor, torch.Tensor],
) -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()

    healthy = runner_of()
    rows = torch.randn(8, 64, device="cuda")
    healthy(*weights, rows)

    runner = CudaGraphRunner(waits)
    stream = torch.cuda.current_stream()
    for _ in range(3):
        x = torch.randn(5, device="cuda")
        torch.testing.assert_close(runner(x), waits(x))
    assert sum(runner.skips.values()) == 2 and "capturing failed" in next(iter(runner.skips))
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    assert gc.isenabled()
    # The random number generator, older graphs and new captures still work.
    torch.rand(4, device="cuda")
    check(healthy(*weights, rows), network(*weights, rows))
    other = torch.randn(9, 64, device="cuda")
    healthy(*weights, other)
    check(healthy(*weights, other), network(*weights, other))
    assert healthy.graph_count() == 2 and not healthy.skips
    draws = CudaGraphRunner(torch.rand_like)
    assert not torch.equal(draws(rows), draws(rows))
    assert draws.graph_count() == 1


@pytest.mark.parametrize("times", [1, 2])
def test_out_of_memory_while_capturing(weights: tuple[torch.Tensor, torch.Tensor], times: int) -> None:
    failures = [torch.OutOfMemoryError("injected") for _ in range(times)]

    def function(w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x @ w1
        if torch.cuda.is_current_stream_capturing() and len(x) == 9 and failures:
            raise failures.pop()
        return network(w1, w2, x + hidden.mean() * 0)

    runner = runner_of(function)
    small, large = torch.randn(8, 64, device="cuda"), torch.randn(9, 64, device="cuda")
    runner(*weights, small)
    if times == 1:
        runner(*weights, large)
        assert runner.graph_count() == 1, "the small one made room"
    else:
        with pytest.warns(UserWarning, match="no memory left"):
            runner(*weights, large)
        assert runner.graph_count() == 0
    for x in (small, large, small, large):
        check(runner(*weights, x), network(*weights, x))
    assert runner.graph_count() == 3 - times


def test_an_interrupt_while_capturing_leaves_it_usable(weights: tuple[torch.Tensor, torch.Tensor]) -> None:
    interrupts: list[BaseException] = [KeyboardInterrupt()]

    def function(w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if torch.cuda.is_current_stream_capturing() and interrupts:
            raise interrupts.pop()
        return network(w1, w2, x)

    runner = runner_of(function)
    x = torch.randn(8, 64, device="cuda")
    with pytest.raises(KeyboardInterrupt):
        runner(*weights, x)
    assert not torch.cuda.is_current_stream_capturing()
    for _ in range(3):
        check(runner(*weights, x), network(*weights, x))
    assert runner.graph_count() == 1


# Memory


def wide(w1: torch.Tensor, w2: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Activations thirty times as large as the input, as in a transformer's feed-forward."""
    hidden = F.gelu(x @ w1)
    return F.gelu(hidden + 1) @ w2


def reserved_after(sizes: list[int]) -> int:
    """Bytes reserved beyond weights once these sizes have been called, graphs, pool and static inputs included.

    Outputs are dropped and PyTorch's unused cache is given back before reading `torch.cuda.memory_reserved`, so what
    remains is what the runner holds. Graphs and the pool that other tests have left are dropped first.
    """
    w1 = torch.randn(256, 4096, device="cuda", dtype=torch.float16) / 16
    w2 = torch.randn(4096, 256, device="cuda", dtype=torch.float16) / 64
    runner = runner_of(wide)
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    cuda_capture_device(w1.device).make_room()
    before = torch.cuda.memory_reserved()
    for size in sizes:
        x = torch.randn(size, 256, device="cuda", dtype=torch.float16)
        for _ in range(2):
            torch.testing.assert_close(runner(w1, w2, x), wide(w1, w2, x), atol=1e-2, rtol=1e-2)
    assert not runner.skips
    del x
    torch._C._cuda_clearCublasWorkspaces()  # those of the comparison above
    gc.collect()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved() - before
    memory = runner.memory()
    pool, static_inputs = memory["pool"] / MEBIBYTE, memory["static_inputs"] / MEBIBYTE
    print(
        f"{len(sizes)} shapes: reserved {reserved / MEBIBYTE:.0f} MiB, pool {pool:.0f}, static inputs "
        f"{static_inputs:.0f}, {runner.graph_count()} graphs held"
    )
    assert 0 < memory["pool"] <= reserved + 2 * MEBIBYTE
    runner.release()
    assert torch.cuda.memory_reserved() - before <= 2 * MEBIBYTE, "released memory goes back"
    return reserved


@pytest.mark.parametrize("order", ["largest first", "smallest first", "shuffled"])
def test_fifty_shapes_take_little_more_memory_than_the_largest(order: str) -> None:
    sizes = [16384 - 300 * index for index in range(50)]
    if order == "smallest first":
        sizes.reverse()
    if order == "shuffled":
        random.Random(0).shuffle(sizes)
    alone = reserved_after([16384])
    together = reserved_after(sizes)
    print(f"{order}: {together / MEBIBYTE:.0f} MiB for 50 shapes, {alone / MEBIBYTE:.0f} MiB for the largest alone")
    assert together <= 1.2 * alone


def test_the_first_plain_run_keeps_no_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.expand(64 * MEBIBYTE, 1) + 1).sum(0)

    runner = CudaGraphRunner(function)
    x = torch.ones(1, device="cuda")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    assert runner(x).item() == 128 * MEBIBYTE
    held = torch.cuda.memory_reserved() - before
    assert held < 1.2 * 256 * MEBIBYTE, "the graph's memory, not that of the plain run as well"
    runner.release()


def test_one_shape_reserves_hardly_more_than_plain_pytorch() -> None:
    """Weights left out, the first result still held, nothing given back before reading."""
    w1 = torch.randn(256, 4096, device="cuda", dtype=torch.float16) / 16
    w2 = torch.randn(4096, 256, device="cuda", dtype=torch.float16) / 64
    x = torch.randn(16384, 256, device="cuda", dtype=torch.float16)
    runner = runner_of(wide)

    def reserved(call: Callable[..., torch.Tensor]) -> int:
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        results = [call(w1, w2, x) for _ in range(2)]
        assert len(results) == 2
        return torch.cuda.memory_reserved() - before

    plain, ours = reserved(wide), reserved(runner)
    print(f"reserved beyond weights: plain {plain / MEBIBYTE:.0f} MiB, with graphs {ours / MEBIBYTE:.0f} MiB")
    assert ours <= 1.2 * plain
    runner.release()


# Host time


def test_host_time_of_a_call() -> None:
    fixed = [torch.nn.Parameter(torch.ones(1, device="cuda")) for _ in range(199)]

    def function(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return inputs[-1] + inputs[0].long(), inputs[-2] * 2

    runner = CudaGraphRunner(function, fixed_inputs=range(199))
    inputs = [*fixed, *(torch.zeros(1, 16, dtype=torch.int64, device="cuda") for _ in range(3))]
    runner(*inputs)
    graph = runner.lookup(inputs)
    assert graph is not None

    def microseconds(call: Callable[[], object]) -> float:
        times = []
        for _ in range(300):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
            torch.cuda.synchronize()
        return 1e6 * statistics.median(times)

    replay, call = microseconds(lambda: graph.replay(inputs)), microseconds(lambda: runner(*inputs))
    print(f"host time: graph.replay {replay:.1f} us, runner {call:.1f} us")
    assert replay < 200 and call < 250


def test_time_of_a_first_call() -> None:
    """Twelve layers of twelve launches, a new shape every time: plain run, memory given back, capture."""
    weights = [torch.randn(768, 768, device="cuda", dtype=torch.float16) / 28 for _ in range(4)]

    def layers(*inputs: torch.Tensor) -> torch.Tensor:
        *weights, x = inputs
        for _ in range(12):
            for weight in weights:
                x = F.layer_norm(F.gelu(F.linear(x, weight)), (768,))
        return x

    runner = CudaGraphRunner(layers, fixed_inputs=range(4))
    times = []
    for size in (512, 384, 256, 128, 100, 64, 32, 8):
        x = torch.randn(size, 768, device="cuda", dtype=torch.float16)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        runner(*weights, x)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    print("first calls, ms:", " ".join(f"{milliseconds:.1f}" for milliseconds in times))
    assert runner.graph_count() == 8
    assert statistics.median(times[1:]) < 60


# Tuning


def test_tuning_picks_the_faster_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNL_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("KERNL_TUNING", raising=False)
    tuning.forget()
    small, large = (torch.randn(size, 1024, device="cuda", dtype=torch.float16) for size in (128, 4096))
    weight = torch.randn(1024, 1024, device="cuda", dtype=torch.float16)
    candidates = [
        Candidate("slow", lambda: large @ weight),
        Candidate("fast", lambda: small @ weight),
        Candidate("broken", lambda: small @ small),
    ]
    for cold in (False, True):
        assert choose("test", ("warm up", cold), candidates, default="slow", cold=cold) == "fast"
        begin = time.perf_counter()
        assert choose("test", ("timed", cold), candidates, default="slow", cold=cold) == "fast"
        assert time.perf_counter() - begin < 1.0
    entry = tuning.choices()[-1]
    assert list(entry.dropped) == ["broken"]
    assert 1 < entry.times_us["fast"] < entry.times_us["slow"] < 10_000
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert choose("test", ("unseen",), candidates, default="slow") == "slow"
    tuning.forget()
