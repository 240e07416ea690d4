"""How large the pool of a device becomes and how often it is started again, on a model of PyTorch's allocator."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kernl.runtime.capture_device import CudaCaptureDevice, Graph, PoolBudget

MEBIBYTE = 1 << 20
WORKSPACE = 32 * MEBIBYTE


class Pool:
    """Best fit, blocks split and merge within their segment, a new segment when none fits."""

    def __init__(self, room: int = 0) -> None:
        self.segments: list[list[list[int]]] = []  # blocks in order: [bytes, is free]
        if room:
            self.free(self.allocate(room))

    def allocate(self, size: int) -> list[int]:
        size = -(-size // 512) * 512
        fitting = [(block[0], i, j) for i, s in enumerate(self.segments) for j, block in enumerate(s) if block[1]]
        fitting = [entry for entry in fitting if entry[0] >= size]
        if not fitting:
            rounding = 2 * MEBIBYTE
            self.segments.append([[20 * MEBIBYTE if size < 10 * MEBIBYTE else -(-size // rounding) * rounding, 1]])
            return self.allocate(size)
        _, i, j = min(fitting)
        block = self.segments[i][j]
        rest = block[0] - size
        block[1] = 0
        if rest > MEBIBYTE:
            block[0] = size
            self.segments[i].insert(j + 1, [rest, 1])
        return block

    def free(self, block: list[int]) -> None:
        block[1] = 1
        for segment in self.segments:
            merged: list[list[int]] = []
            for other in segment:
                if merged and merged[-1][1] and other[1]:
                    merged[-1][0] += other[0]
                else:
                    merged.append(other)
            segment[:] = merged

    def nbytes(self) -> int:
        return sum(block[0] for segment in self.segments for block in segment)


class ModelDevice(CudaCaptureDevice):
    """A device whose memory is the model above. A graph is the size it was captured with; `kept` counts as live."""

    def __init__(self) -> None:
        super().__init__(0)
        self.pools: list[Pool] = []
        self.kept: set[int] = set()
        self.captures = self.restarts = 0

    def call(self, size: int) -> None:
        if size not in self.kept:
            self._capture_within_budget(feed_forward, (size,))
            self.kept.add(size)

    def make_room(self) -> None:
        self.restarts += 1
        self.kept.clear()
        self.release_if_idle()

    def release_if_idle(self) -> None:
        self.pools.clear()
        self._anchor = None

    def reserved_bytes(self) -> int:
        return sum(self._pool_sizes())

    def _holds_graphs(self) -> bool:
        return bool(self.kept)

    def _pool_sizes(self) -> list[int]:
        return [pool.nbytes() for pool in self.pools]

    def _new_pool(self, room: int = 0) -> None:
        self.pools.append(Pool(room))

    def _capture(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Graph, Any]:
        self.captures += 1
        if not self.pools:
            self._new_pool()
        function(self.pools[-1], *arguments)
        return None, None  # type: ignore[return-value]


def feed_forward(pool: Pool, rows: int) -> None:
    """gelu(gelu(x @ w1) + 1) @ w2, half precision, 256 -> 4096 -> 256."""
    hidden_bytes = rows * 4096 * 2
    product, workspace = pool.allocate(hidden_bytes), pool.allocate(WORKSPACE)
    hidden = pool.allocate(hidden_bytes)
    pool.free(product)
    shifted = pool.allocate(hidden_bytes)
    activated = pool.allocate(hidden_bytes)
    pool.free(shifted)
    output = pool.allocate(rows * 256 * 2)
    for block in (activated, hidden, output, workspace):
        pool.free(block)


def pool_after(sizes: Sequence[int]) -> ModelDevice:
    device = ModelDevice()
    for size in sizes:
        device.call(size)
    return device


@pytest.mark.parametrize("order", ["largest first", "smallest first", "shuffled"])
def test_fifty_shapes_take_little_more_memory_than_the_largest(order: str) -> None:
    sizes = [16384 - 300 * index for index in range(50)]
    if order == "smallest first":
        sizes.reverse()
    for seed in range(10 if order == "shuffled" else 1):
        if order == "shuffled":
            random.Random(seed).shuffle(sizes)
        device, alone = pool_after(sizes), pool_after([16384]).pool_bytes()
        assert alone == 416 * MEBIBYTE
        assert device.pool_bytes() <= PoolBudget.share * alone
        assert device.restarts <= (0 if order == "largest first" else 15)
        for _ in range(3):  # then everything comes back and stays
            for size in sizes:
                device.call(size)
        assert len(device.kept) == 50 and device.pool_bytes() <= PoolBudget.share * alone


def test_a_pool_left_by_a_failed_capture_drops_no_graphs() -> None:
    device = pool_after([8])
    device.pools.append(Pool())
    device.call(9)
    assert device.kept == {8, 9} and not device.restarts
    # Many failures do not add up without end.
    for size in range(10, 30):
        device.pools.append(Pool())
        device.call(size)
    assert device.restarts and len(device.pools) < 8


def test_a_pool_is_started_again_only_when_it_outgrows_its_largest_graph() -> None:
    budget = PoolBudget()
    assert not budget.exceeded(60 * MEBIBYTE), "small pools are left alone"
    budget.captured_alone(100 * MEBIBYTE)
    assert not budget.exceeded(114 * MEBIBYTE) and budget.exceeded(116 * MEBIBYTE)
    budget.captured_alone(30 * MEBIBYTE)
    assert not budget.exceeded(114 * MEBIBYTE), "the largest need is not forgotten: it will be back"
