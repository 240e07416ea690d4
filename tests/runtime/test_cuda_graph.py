"""The runner's policy on a fake capture device: what is captured, replayed, copied, preserved, refused."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernl.runtime.cuda_graph import RARE, CapturedGraph, CudaGraphRunner
from tests.runtime.fake_device import FakeDevice


def make(function: Callable[..., Any], **options: Any) -> tuple[CudaGraphRunner, FakeDevice]:
    device = FakeDevice()
    return CudaGraphRunner(function, capture_device=device, **options), device


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def affine(weight: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (x * weight + 1,)


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


# Capture and replay


def test_the_first_call_runs_plainly_and_captures_and_the_second_replays() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight = torch.tensor([2.0, 3.0])
    for call in range(3):
        x = torch.full((2,), float(call))
        (y,) = runner(weight, x)
        assert torch.equal(y, x * weight + 1)
    assert (device.plain_runs, device.captures, device.replays) == (1, 1, 2)
    assert runner.graph_count() == 1
    assert not runner.skips


def test_every_shape_has_its_graph_and_going_back_captures_nothing() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight = torch.tensor(2.0)
    for size in [*range(1, 11), *range(10, 0, -1)]:
        x = torch.randn(size)
        assert torch.equal(runner(weight, x)[0], x * 2 + 1)
    assert device.captures == 10
    assert device.replays == 10


def test_outputs_are_kept_across_calls() -> None:
    runner, _ = make(affine, fixed_inputs=[0])
    weight = torch.tensor(2.0)
    inputs = [torch.randn(4) for _ in range(6)]
    outputs = [runner(weight, x)[0] for x in inputs]
    for x, y in zip(inputs, outputs):
        assert torch.equal(y, x * 2 + 1)


def test_static_outputs_are_the_graphs_own() -> None:
    runner, _ = make(affine, fixed_inputs=[0], static_outputs=True)
    weight = torch.tensor(2.0)
    runner(weight, torch.zeros(2))
    first = runner(weight, torch.zeros(2))[0]
    second = runner(weight, torch.ones(2))[0]
    assert same_memory(first, second)
    assert torch.equal(first, torch.full((2,), 3.0))


def test_lookup_gives_a_graph_that_serves_later_calls_at_once() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight, x = torch.tensor(2.0), torch.zeros(3)
    assert runner.lookup((weight, x)) is None
    runner(weight, x)
    graph = runner.lookup((weight, x))
    assert isinstance(graph, CapturedGraph)
    assert torch.equal(graph.replay([weight, torch.ones(3)])[0], torch.full((3,), 3.0))
    assert device.replays == 1
    runner.evict(device)
    assert torch.equal(graph.replay([weight, torch.ones(3)])[0], torch.full((3,), 3.0)), "evicted, still right"
    assert (device.captures, device.replays) == (2, 1)
    assert torch.equal(graph.replay([weight, torch.zeros(3)])[0], torch.ones(3))
    assert (device.captures, device.replays) == (2, 2), "served by the graph that took its place"


def test_the_least_recently_replayed_graph_goes_first() -> None:
    runner, device = make(affine, fixed_inputs=[0], max_graphs=2)
    weight = torch.tensor(2.0)
    one, two, three = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    runner(weight, one)
    runner(weight, two)
    runner(weight, one)  # two is the oldest now
    runner(weight, three)
    assert runner.lookup((weight, three)) is None and runner.skips == {RARE: 1}, "once is not enough"
    for _ in range(5):
        assert torch.equal(runner(weight, three)[0], torch.ones(3))
    assert runner.lookup((weight, one)) and runner.lookup((weight, three))
    assert runner.lookup((weight, two)) is None
    assert device.captures == 3 and device.plain_runs == 3, "a call without a graph is a call of the function"
    assert runner.graph_count() == 2


def test_many_rare_shapes_do_not_displace_those_in_use() -> None:
    """More shapes than graphs, most of them seen once: a runner that captured each would replay next to nothing."""
    runner, device = make(affine, fixed_inputs=[0], max_graphs=4)
    weight = torch.tensor(2.0)
    for turn in range(100):
        for size in (1, 2, 3, 10 + turn):
            x = torch.randn(size)
            assert torch.equal(runner(weight, x)[0], x * 2 + 1)
    assert device.captures <= 8 and device.replays >= 290
    for _ in range(40):  # all at once another shape is in use
        runner(weight, torch.zeros(500))
    assert runner.lookup((weight, torch.zeros(500)))


def test_release_drops_everything_and_the_next_call_starts_again() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight, x = torch.tensor(2.0), torch.zeros(3)
    runner(weight, x)
    assert runner.memory()["static_inputs"] == 12
    assert runner.memory()["graphs"][0]["shapes"] == ((3,),)
    runner.release()
    assert runner.memory() == {"graphs": [], "pool": 0, "static_inputs": 0}
    assert device.idle_releases == 1
    assert torch.equal(runner(weight, x)[0], torch.ones(3))
    assert device.captures == 2


def test_max_graphs_is_validated() -> None:
    with pytest.raises(ValueError, match="max_graphs must be at least 1, got 0"):
        CudaGraphRunner(affine, max_graphs=0)


# Keys


def test_what_a_graph_freezes_is_in_its_key() -> None:
    runner, device = make(lambda x, scale: x * scale if scale is not None else x + 0)
    x = torch.arange(6.0).view(2, 3)
    calls: list[tuple[torch.Tensor, Any]] = [
        (x, 2),
        (x, 3),
        (x, 2.0),
        (x, True),
        (x, None),
        (x.half(), 2),
        (x.t().contiguous().t(), 2),
        (x.view(3, 2), 2),
    ]
    for repetition in range(2):
        for y, scale in calls:
            expected = y * scale if scale is not None else y
            assert torch.equal(runner(y, scale), expected)
        assert device.captures == len(calls), repetition


def test_the_switches_of_pytorch_are_in_the_key() -> None:
    runner, device = make(lambda x: x + 1)
    x = torch.zeros(2)
    runner(x)
    with torch.inference_mode():
        runner(x)
        assert runner(x).is_inference()
    with torch.enable_grad():
        runner(x)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=False), torch.autocast("cpu", dtype=torch.bfloat16):
        runner(x)
    previous = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        runner(x)
    finally:
        torch.backends.cuda.matmul.fp32_precision = previous
    torch.use_deterministic_algorithms(True)
    try:
        runner(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert device.captures == 6
    assert not runner(x).is_inference()
    assert device.captures == 6


# Inputs


def test_static_buffers_are_shared_and_grow_without_moving_under_live_graphs() -> None:
    runner, device = make(lambda x: x * 2)
    for size in (8, 3, 9, 40, 8, 9, 40, 3):
        x = torch.randn(size)
        assert torch.equal(runner(x), x * 2)
    assert device.captures == 4
    # 8 serves 3; 9 asks for half as much again as 8; 40 for itself.
    assert device.allocations == [8, 12, 40]
    assert runner.memory()["static_inputs"] == 160


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x[:1].expand(4, 6),
        lambda x: x[:, :1].expand(4, 6),
        lambda x: x[:1, :1].expand(4, 6),
        lambda x: x[:, ::2],
        lambda x: x[1:, 2:],
        lambda x: x.t(),
        lambda x: x.flatten().unfold(0, 4, 1),
        lambda x: x[:0],
        lambda x: x.flatten().as_strided((3, 3), (1, 1)),
    ],
    ids=["row", "column", "scalar", "step", "corner", "transposed", "window", "empty", "diagonals"],
)
def test_any_strides(prepare: Callable[[torch.Tensor], torch.Tensor]) -> None:
    runner, device = make(lambda x: (x * 2, x.stride()))
    for _ in range(3):
        x = prepare(torch.randn(4, 6))
        y, strides = runner(x)
        assert torch.equal(y, x * 2)
        assert strides == x.stride()
    assert device.captures == 1 and device.replays == 2


def test_inputs_that_overlap_each_other_are_read_right() -> None:
    runner, device = make(lambda x, y: x - y)
    for _ in range(3):
        memory = torch.randn(8)
        assert torch.equal(runner(memory[:6], memory[2:]), memory[:6] - memory[2:])
    assert device.replays == 2


def test_buffers_made_in_inference_mode_serve_later_modes() -> None:
    runner, _ = make(lambda x: x * 2)
    with torch.inference_mode():
        runner(torch.ones(3))
    runner(torch.ones(3))
    assert torch.equal(runner(torch.full((3,), 2.0)), torch.full((3,), 4.0))
    with torch.inference_mode():
        assert torch.equal(runner(torch.full((3,), 2.0)), torch.full((3,), 4.0))


def test_weights_are_used_by_address() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    runner(weight, x)
    weight.fill_(5)
    assert torch.equal(runner(weight, x)[0], torch.full((2,), 6.0))
    weight.data.mul_(2)
    assert torch.equal(runner(weight, x)[0], torch.full((2,), 11.0))
    assert device.captures == 1


def test_a_moved_weight_is_seen_by_the_next_call() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight, x = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    runner(weight, x)
    kept = runner.lookup((weight, x))
    assert kept is not None
    weight.data = torch.full((2,), 7.0)
    assert torch.equal(runner(weight, x)[0], torch.full((2,), 8.0))
    assert torch.equal(runner(weight, x)[0], torch.full((2,), 8.0))
    assert (device.captures, device.replays) == (2, 1)
    assert runner.graph_count() == 1
    assert torch.equal(kept.replay([weight, x])[0], torch.full((2,), 8.0)), "kept from before the move"


def test_a_weight_that_keeps_moving_is_not_captured_for_ever() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    x, kept = torch.ones(2), []
    for value in range(20):
        kept.append(torch.full((2,), float(value)))
        assert torch.equal(runner(kept[-1], x)[0], kept[-1] + 1)
    assert device.captures == 9
    assert runner.skips["parameters keep moving in memory"] > 5


# Effects


def test_an_input_written_in_place_is_copied_back_and_written_once_per_call() -> None:
    def count(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x + counter

    runner, device = make(count)
    counter = torch.zeros(1)
    for call in range(1, 6):
        assert torch.equal(runner(counter, torch.zeros(2)), torch.full((2,), float(call)))
        assert counter.item() == call
    assert device.replays == 4


def test_a_write_is_noticed_in_inference_mode() -> None:
    runner, _ = make(lambda x: x.mul_(2))
    with torch.inference_mode():
        for _ in range(3):
            x = torch.ones(2)
            assert runner(x) is x
            assert torch.equal(x, torch.full((2,), 2.0))


def test_a_declared_write_is_copied_back() -> None:
    def silently(x: torch.Tensor) -> None:
        x.data.add_(1)  # as a kernel would: the version counter does not see it

    runner, _ = make(silently, mutated_inputs=[0])
    x = torch.zeros(2)
    for _ in range(3):
        assert runner(x) is None
    assert torch.equal(x, torch.full((2,), 3.0))


def append(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache.add_(x)
    return cache * 1


def test_a_fixed_input_is_written_where_it_is() -> None:
    runner, device = make(append, fixed_inputs=[0])
    cache = torch.zeros(2)
    for call in range(1, 5):
        assert torch.equal(runner(cache, torch.ones(2)), torch.full((2,), float(call)))
    assert torch.equal(cache, torch.full((2,), 4.0))
    assert device.replays == 3


def cache_that_stays(size: int = 2) -> torch.Tensor:
    cache = torch.zeros(size)
    torch._dynamo.mark_static_address(cache)
    return cache


def test_caches_marked_as_static_are_used_where_they_are_by_graphs_of_their_own() -> None:
    runner, device = make(append)
    first, second = cache_that_stays(), cache_that_stays()
    for call in range(1, 4):
        assert torch.equal(runner(first, torch.ones(2)), torch.full((2,), float(call)))
        assert torch.equal(runner(second, 2 * torch.ones(2)), torch.full((2,), 2.0 * call))
    assert (device.captures, device.replays) == (2, 4)
    assert first.tolist() == [3, 3] and second.tolist() == [6, 6]
    assert [graph["input_bytes"] for graph in runner.memory()["graphs"]] == [8, 8]  # the other input alone
    other = torch.zeros(2)
    assert torch.equal(runner(other, torch.ones(2)), torch.ones(2))
    assert device.captures == 3 and first.tolist() == [3, 3]


def test_a_graph_that_uses_a_cache_in_place_is_not_for_a_caller_to_keep() -> None:
    runner, _ = make(append)
    cache = cache_that_stays()
    runner(cache, torch.ones(2))
    assert runner.graph_count() == 1 and runner.lookup([cache, torch.ones(2)]) is None


def test_graphs_of_caches_that_are_gone_make_way() -> None:
    runner, device = make(append, max_graphs=2)
    for _ in range(10):
        cache = cache_that_stays()
        assert [runner(cache, torch.ones(2))[0].item() for _ in range(3)] == [1, 2, 3]
        del cache
    assert device.captures == 10 and not runner.skips and runner.graph_count() <= 2


def test_an_input_that_shares_memory_with_a_cache_runs_plainly() -> None:
    runner, device = make(append)
    cache = cache_that_stays()
    runner(cache, torch.ones(2))
    cache.fill_(1)
    assert runner(cache, cache.view(2)).tolist() == [2, 2]
    assert device.replays == 0


def test_an_input_may_lie_where_a_parameter_was() -> None:
    def write(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * weight

    runner, device = make(write, fixed_inputs=[0])
    weight = torch.nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
    for _ in range(2):
        assert runner(weight, torch.ones(2)).tolist() == [6, 6]
    left = weight.data
    weight.data = torch.full((2,), 5.0)
    assert runner(weight, left).tolist() == [20, 20]
    assert runner(weight, torch.ones(2)).tolist() == [10, 10]
    assert not runner.skips and device.captures == 2


@pytest.mark.parametrize("by_address", [False, True])
def test_memory_that_is_written_and_reached_twice_runs_plainly(by_address: bool) -> None:
    def write_then_read(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2

    runner, device = make(write_then_read, fixed_inputs=[0] if by_address else [])
    x = torch.zeros(4)
    for call in range(1, 4):
        assert torch.equal(runner(x, x[:2]), torch.full((2,), 2.0 * call))
    assert device.replays == 0
    assert runner.skips["an input that is written shares memory with another input"] == 2
    assert torch.equal(runner(x, torch.ones(2)), torch.full((2,), 2.0))
    assert device.replays == 1


def test_a_written_input_that_repeats_its_memory_is_refused() -> None:
    x = torch.ones(4).unfold(0, 2, 1)
    runner, device = make(lambda x: x * 2, mutated_inputs=[0])
    for _ in range(3):
        assert torch.equal(runner(x), x * 2)
    assert device.replays == 0
    assert runner.skips["an input that is written repeats its own memory"] == 2


# Outputs


def test_outputs_that_are_inputs_come_back_as_these() -> None:
    runner, _ = make(lambda w, x, y: (x, w, y + 1), fixed_inputs=[0])
    w = torch.nn.Parameter(torch.ones(2))
    for _ in range(3):
        x, y = torch.randn(2), torch.randn(2)
        a, b, c = runner(w, x, y)
        assert a is x and b is w
        assert torch.equal(c, y + 1)


def test_views_of_inputs_are_views_of_the_callers_tensors() -> None:
    runner, device = make(lambda w, x: (w[1:], x.t()[1:], x.view(torch.int32)[0]), fixed_inputs=[0])
    w = torch.randn(3)
    for _ in range(3):
        x = torch.randn(6, 4)[1:3]
        a, b, c = runner(w, x)
        assert same_memory(a, w) and torch.equal(a, w[1:])
        assert same_memory(b, x) and torch.equal(b, x.t()[1:]) and b.stride() == x.t()[1:].stride()
        assert same_memory(c, x) and torch.equal(c, x.view(torch.int32)[0])
    assert device.replays == 2


def test_one_tensor_twice_and_views_of_one_another() -> None:
    def outputs(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x * 2
        return hidden, hidden, hidden[:, 0], hidden.view(torch.int32)[1:]

    runner, device = make(outputs)
    results = []
    for _ in range(3):
        x = torch.randn(3, 5)
        a, b, c, d = runner(x)
        assert a is b
        assert same_memory(a, c) and same_memory(a, d)
        results.append((x, a, c, d))
    for x, a, c, d in results:
        assert torch.equal(a, x * 2) and torch.equal(c, x[:, 0] * 2)
        assert torch.equal(d, (x * 2).view(torch.int32)[1:])
        assert c.stride() == (5,)
    assert device.replays == 2
    a.zero_()
    assert c.abs().sum() == 0, "memory is shared as the function shared it"


def test_strides_of_outputs_are_kept() -> None:
    def outputs(x: torch.Tensor) -> list[torch.Tensor]:
        return [(x + 1).t(), (x + 2)[:, ::2], (x + 3)[:1].expand(4, -1), (x.flatten() + 4).unfold(0, 2, 1)]

    runner, _ = make(outputs)
    for _ in range(3):
        x = torch.randn(3, 6)
        got = runner(x)
        assert isinstance(got, list)
        for actual, expected in zip(got, outputs(x)):
            assert torch.equal(actual, expected)
            assert actual.stride() == expected.stride()


def test_nesting_and_plain_values_are_kept() -> None:
    runner, device = make(lambda x, n: {"a": (x + n, None), "b": [n, 1.5, x.shape], "c": "text"})
    for _ in range(2):
        x = torch.randn(2)
        got = runner(x, 3)
        assert torch.equal(got["a"][0], x + 3) and got["a"][1] is None
        assert got["b"] == [3, 1.5, x.shape] and got["c"] == "text"
    assert device.replays == 1
    single, _ = make(lambda x: x + 1)
    assert torch.equal(single(torch.zeros(2)), torch.ones(2))
    assert torch.equal(single(torch.zeros(2)), torch.ones(2))
    nothing, _ = make(lambda x: None)
    assert nothing(torch.zeros(2)) is None and nothing(torch.zeros(2)) is None


def test_many_outputs_of_several_dtypes() -> None:
    runner, _ = make(lambda x: tuple((x + i).to(dtype) for i in range(3) for dtype in (torch.float32, torch.float16)))
    for _ in range(3):
        x = torch.randn(4)
        for index, y in enumerate(runner(x)):
            assert torch.equal(y, (x + index // 2).to((torch.float32, torch.float16)[index % 2]))


# Plain calls


def test_reasons_to_run_plainly_are_counted_and_told_once() -> None:
    told: list[str] = []
    runner, device = make(lambda x, y=None: x + 1, on_skip=told.append)
    x = torch.zeros(2)
    device.capturing = True
    runner(x)
    runner(x)
    device.capturing = False
    with torch.enable_grad():
        y = runner(torch.zeros(2, requires_grad=True))
        assert y.requires_grad
    runner(torch.zeros(2, device="meta"))
    assert told == ["the caller is capturing a graph itself", "gradients are needed", "input 0 is a tensor on meta"]
    assert runner.skips["the caller is capturing a graph itself"] == 2
    assert device.captures == 0
    with torch.enable_grad():
        runner(x)
        kept = runner.lookup((x,))
        assert kept is not None
        assert kept.replay([torch.zeros(2, requires_grad=True)]).requires_grad
    device.capturing = True
    assert torch.equal(kept.replay([x]), torch.ones(2))
    assert device.replays == 0


def test_without_a_gpu_the_real_runner_runs_plainly() -> None:
    runner = CudaGraphRunner(affine, fixed_inputs=[0])
    assert torch.equal(runner(torch.ones(2), torch.ones(2))[0], torch.full((2,), 2.0))
    assert sum(runner.skips.values()) == 1
    [reason] = runner.skips
    assert "cpu" in reason or "cuda" in reason


def test_unsupported_inputs_and_outputs_run_plainly() -> None:
    runner, device = make(lambda x, other: x + 1)
    x = torch.zeros(2)
    assert torch.equal(runner(x, object()), torch.ones(2))
    assert runner.skips == {"input 1 is of type object": 1}
    assert torch.equal(runner(x, torch.eye(2).to_sparse()), torch.ones(2))
    assert device.captures == 0

    marker = object()
    odd, device = make(lambda x: (x + 1, marker))
    for _ in range(3):
        y, got = odd(x)
        assert got is marker and torch.equal(y, torch.ones(2))
    assert device.replays == device.captures == 0
    assert odd.skips == {"an output is of type object": 2}


def test_a_tensor_without_dimensions_on_the_cpu_is_a_value() -> None:
    device = FakeDevice()
    device.device_type = "meta"
    runner = CudaGraphRunner(lambda x, scale: x, capture_device=device)
    x = torch.zeros(2, device="meta")
    keys = {runner._key((x, torch.tensor(value)))[0] for value in (1.0, 2.0, 1.0, -0.0, 0.0)}
    assert len(keys) == 4
    runner(x, torch.zeros(2))
    assert list(runner.skips) == ["input 1 is a tensor on cpu"]


def test_parameters_on_two_devices_run_plainly() -> None:
    runner, device = make(lambda w, x: x + 1, fixed_inputs=[0])
    runner(torch.zeros(2, device="meta"), torch.zeros(2))
    assert list(runner.skips) == ["input 0 is a tensor on meta"]
    assert device.captures == 0


def test_a_first_call_on_another_device_does_not_turn_weights_into_inputs() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    runner(torch.ones(2, device="meta"), torch.ones(2, device="meta"))
    weight = torch.ones(2)
    runner(weight, torch.ones(2))
    weight.fill_(3)
    assert torch.equal(runner(weight, torch.ones(2))[0], torch.full((2,), 4.0))
    assert device.allocations == [2], "one buffer: the input's"


def test_a_failed_capture_is_remembered_and_the_call_is_right() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight, x = torch.tensor(2.0), torch.ones(2)
    device.fail = [RuntimeError("operation not permitted when stream is capturing\nmore")]
    for _ in range(3):
        assert torch.equal(runner(weight, x)[0], torch.full((2,), 3.0))
    assert device.captures == 0
    reason = "capturing failed: RuntimeError: operation not permitted when stream is capturing"
    assert runner.skips == {reason: 2}
    runner(weight, torch.ones(3))
    assert device.captures == 1, "another shape is tried"


def test_after_three_failures_in_a_row_no_further_shape_is_tried() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight = torch.tensor(2.0)
    device.fail = [RuntimeError("no")] * 10
    for size in range(1, 8):
        assert torch.equal(runner(weight, torch.ones(size))[0], torch.full((size,), 3.0))
    assert len(device.fail) == 7
    assert runner.skips["capturing failed for several shapes in a row"] == 4
    device.fail = []
    runner.release()
    runner(weight, torch.ones(1))
    assert device.captures == 1, "released, it starts again"


def test_out_of_memory_evicts_all_and_tries_once_more() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    other = CudaGraphRunner(affine, capture_device=device)
    weight = torch.tensor(2.0)
    runner(weight, torch.ones(1))
    other(weight, torch.ones(1))
    device.fail = [torch.OutOfMemoryError("out")]
    assert torch.equal(runner(weight, torch.ones(2))[0], torch.full((2,), 3.0))
    assert device.rooms_made == 1
    assert (runner.graph_count(), other.graph_count()) == (1, 0)
    device.fail = [torch.OutOfMemoryError("out")] * 2
    with pytest.warns(UserWarning, match="no memory left to capture"):
        assert torch.equal(runner(weight, torch.ones(3))[0], torch.full((3,), 3.0))
    runner(weight, torch.ones(3))
    assert runner.skips == {"out of memory while capturing": 1}


def test_out_of_memory_in_the_plain_run_makes_room_and_runs_again() -> None:
    attempts = [0]

    def function(x: torch.Tensor) -> torch.Tensor:
        attempts[0] += 1
        if attempts[0] == 1:
            raise torch.OutOfMemoryError("out")
        return x + 1

    runner, device = make(function)
    assert torch.equal(runner(torch.zeros(2)), torch.ones(2))
    assert device.rooms_made == 1
    attempts[0] = 0
    effects, device = make(function, mutated_inputs=[0])
    with pytest.raises(torch.OutOfMemoryError):
        effects(torch.zeros(2))


def test_an_interrupted_capture_leaves_the_runner_usable() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight, x = torch.tensor(2.0), torch.ones(2)
    device.fail = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        runner(weight, x)
    assert gc.isenabled()
    assert torch.equal(runner(weight, x)[0], torch.full((2,), 3.0))
    assert device.captures == 1


def test_the_functions_own_error_reaches_the_caller() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        raise LookupError("no such row")

    runner, _ = make(function)
    with pytest.raises(LookupError, match="no such row"):
        runner(torch.zeros(1))


# Several of them


def test_two_runners_in_turn() -> None:
    device = FakeDevice()
    double = CudaGraphRunner(lambda x: x * 2, capture_device=device)
    square = CudaGraphRunner(lambda x: x * x, capture_device=device)
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(square(double(x)), (x * 2) ** 2)
    assert device.replays == 6


def test_threads_share_a_runner() -> None:
    runner, _ = make(affine, fixed_inputs=[0], max_graphs=3)
    weight = torch.tensor(2.0)
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _ in range(60):
                x = torch.randn(int(torch.randint(1, 6, (), generator=generator)), generator=generator)
                if not torch.equal(runner(weight, x)[0], x * 2 + 1):
                    wrong.append(seed)

    in_threads(work, 4)
    assert not wrong and set(runner.skips) <= {RARE}
    assert runner.graph_count() == 3


def test_first_calls_of_different_runners_exclude_each_other() -> None:
    inside, overlaps, wrong = [0], [0], [0]

    def function(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        inside[0] += 1
        overlaps[0] += inside[0] > 1
        time.sleep(1e-3)
        inside[0] -= 1
        return x * weight

    devices = [FakeDevice() for _ in range(3)]
    runners = [CudaGraphRunner(function, fixed_inputs=[0], capture_device=device) for device in devices]

    def work(index: int) -> None:
        with torch.no_grad():
            for size in range(1, 9):
                x = torch.randn(size)
                wrong[0] += not torch.equal(runners[index](torch.tensor(2.0), x), x * 2)

    in_threads(work, 3)
    assert overlaps == [0] and wrong == [0]
    assert all(device.captures == 8 for device in devices)


def test_one_key_is_captured_once_however_many_threads_come_first() -> None:
    runner, device = make(affine, fixed_inputs=[0])
    weight, together, wrong = torch.tensor(2.0), threading.Barrier(4), [0]

    def work(index: int) -> None:
        together.wait()
        with torch.no_grad():
            x = torch.full((3,), float(index))
            wrong[0] += not torch.equal(runner(weight, x)[0], x * 2 + 1)

    in_threads(work, 4)
    assert wrong == [0]
    assert (device.plain_runs, device.captures, device.replays) == (1, 1, 3)


def test_replays_do_not_wait_for_a_first_call() -> None:
    device, compiling, replayed = FakeDevice(), threading.Event(), threading.Event()
    ready = CudaGraphRunner(affine, fixed_inputs=[0], capture_device=device)
    weight, x = torch.tensor(2.0), torch.ones(2)
    ready(weight, x)

    def slow(x: torch.Tensor) -> torch.Tensor:
        compiling.set()
        assert replayed.wait(20), "the replay waited"
        return x + 1

    def replay(_: int) -> None:
        compiling.wait(20)
        with torch.no_grad():
            ready(weight, x)
        replayed.set()

    thread = threading.Thread(target=replay, args=(0,))
    thread.start()
    assert torch.equal(CudaGraphRunner(slow, capture_device=device)(x), x + 1)
    thread.join()
    assert device.replays == 1


def in_threads(work: Callable[[int], None], count: int) -> None:
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_host_time_of_a_call_does_not_grow_with_python_work() -> None:
    """Not a benchmark: it fails when a call does something silly, such as building a key from two hundred weights."""
    weights = [torch.ones(1) for _ in range(200)]

    def function(*inputs: Any) -> tuple[torch.Tensor, ...]:
        return inputs[-1] + 1, inputs[-2] + 1

    runner, _ = make(function, fixed_inputs=range(200))
    inputs = [*weights, torch.zeros(2, 16), torch.zeros(2, 16)]
    runner(*inputs)
    graph = runner.lookup(inputs)
    assert graph is not None and graph._captured is not None
    fake = graph._captured[0]
    fake.replay = lambda: None  # type: ignore[method-assign]
    assert median_seconds(lambda: graph.replay(inputs)) < 1e-3
    # A first call runs the function twice; the rest is the policy: keys, buffers, plans.
    assert median_seconds(lambda: (runner.evict(graph.device), runner(*inputs))) < 2e-2


def median_seconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(200):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return sorted(times)[len(times) // 2]
