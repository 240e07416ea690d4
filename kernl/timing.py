"""How long a call takes: the one timing method of the demo, the notebook and the benchmarks.

Three different questions, three functions:

- `time_call`: what a caller waits for. Each call stands between two CUDA events and is waited for, so that the host's
  time to launch it counts whenever the GPU would otherwise be idle. On the CPU: the wall clock around each call.
- `time_throughput`: what a call costs when calls are queued back to back and nobody waits in between.
- `time_in_graph`: what the GPU alone needs, for operators of a few microseconds: calls are captured in a CUDA graph and
  replayed, so that no host time is left in the figure.

Figures are medians: a mean follows the one call in which the operating system did something else.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Larger than the L2 cache of any GPU yet: writing it evicts what the previous call left there.
_L2_FLUSH_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median, and the 20th and 80th percentile as a measure of noise."""

    median_ms: float
    low_ms: float
    high_ms: float
    calls: int

    @classmethod
    def of(cls, samples_ms: list[float]) -> Timing:
        ordered = sorted(samples_ms)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[last // 5], ordered[last - last // 5], len(ordered))


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_first_call(function: Callable[[], Any]) -> tuple[Any, float]:
    """Call once, wait, and return the result with the wall-clock milliseconds: what compilation costs a user."""
    synchronize()
    start = time.perf_counter()
    result = function()
    synchronize()
    return result, (time.perf_counter() - start) * 1e3


def time_call(
    function: Callable[[], Any], *, calls: int = 50, warmup: int = 5, flush_l2: bool = False, limit_s: float = 60.0
) -> Timing:
    """Time calls one at a time, each waited for.

    With `flush_l2` the L2 cache is overwritten before each call, which also hides the host's launch time behind the
    flush. `limit_s` ends a slow measurement early, after three calls at the least.
    """
    for _ in range(warmup):
        function()
    synchronize()
    samples: list[float] = []
    flush = _flush_buffer() if flush_l2 else None
    begin = time.perf_counter()
    if torch.cuda.is_available():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(calls):
        if flush is not None:
            flush.zero_()
        if torch.cuda.is_available():
            start.record()
            function()
            end.record()
            torch.cuda.synchronize()
            samples.append(start.elapsed_time(end))
        else:
            moment = time.perf_counter()
            function()
            samples.append((time.perf_counter() - moment) * 1e3)
        if len(samples) >= 3 and time.perf_counter() - begin > limit_s:
            break
    return Timing.of(samples)


def time_throughput(function: Callable[[], Any], *, calls: int = 50, warmup: int = 5) -> float:
    """Milliseconds per call when `calls` calls are queued back to back and waited for once."""
    for _ in range(warmup):
        function()
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def time_host(function: Callable[[], Any], *, calls: int = 50, warmup: int = 5) -> float:
    """Milliseconds until the call *returns*, with an idle GPU before it: the host's share of a call (median)."""
    for _ in range(warmup):
        function()
    samples: list[float] = []
    for _ in range(calls):
        synchronize()
        start = time.perf_counter()
        function()
        samples.append((time.perf_counter() - start) * 1e3)
    synchronize()
    return statistics.median(samples)


def time_in_graph(function: Callable[[], Any], *, calls: int = 10, replays: int = 50, flush_l2: bool = False) -> Timing:
    """GPU time per call: `calls` calls captured in one CUDA graph, replayed `replays` times.

    With `flush_l2` one call is captured and the L2 cache is overwritten before each replay: a cold call. Without, the
    operands stay in the L2 cache where they fit. Falls back to `time_call` where there is no GPU.
    """
    if not torch.cuda.is_available():
        return time_call(function, calls=replays, flush_l2=flush_l2)
    if flush_l2:
        calls = 1
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compilation, tuning and workspaces happen before the capture
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    timing = time_call(graph.replay, calls=replays, flush_l2=flush_l2)
    return Timing(timing.median_ms / calls, timing.low_ms / calls, timing.high_ms / calls, timing.calls)


def _flush_buffer() -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = _L2_FLUSH_BYTES if device == "cuda" else 32 * 2**20
    return torch.empty(size, dtype=torch.int8, device=device)
