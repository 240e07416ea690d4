"""Where CUDA graphs are captured: one memory pool, one stream and one lock per GPU.

All graphs of a device share one memory pool. That makes fifty shapes cost little more memory than the largest of them:
a graph's intermediate values and outputs lie where any other graph may put its own. Three rules keep this right.

- Graphs of a pool never overlap. `lock` is held from the copy of the inputs to the copy of the outputs, and
  `enter_stream` makes a stream wait for the one that used the pool before it.
- Nothing in the pool outlives a replay: outputs are copied out, and what a graph wrote is then up for reuse (`borrow`).
- What must outlive a replay (an op's counters, a cached cast of a weight) is allocated by the plain first run, which
  never allocates from the pool. An op that first made such a thing while being captured would lose it.

The plain run takes PyTorch's ordinary memory, on a stream of its own: the allocator keeps memory apart by stream, so
once the results are copied to the caller's stream all that the run reserved is unused and goes back (`run_plainly`),
rather than staying reserved beside a pool of the same size. Giving back means to wait for the GPU and to empty
PyTorch's cache, a few milliseconds, at the first call of a shape only.

cuBLAS keeps a workspace for each thread and stream, 32 MB on Hopper, and a graph freezes its address. So the workspace
must lie in the graph's pool: one in ordinary memory could be freed under the graph by anybody who clears workspaces, as
PyTorch's own graph trees do. It is allocated by the first product that needs it. Hence each pool has a stream to
capture on that PyTorch hands to nobody else, on which no product has ever run outside of a capture into that pool.
Workspaces that are no longer needed are cleared, after a plain run and after a capture, only while every other
thread is known to wait: clearing frees those of all threads, and one that is about to launch a product would write to
memory that is somebody else's, or nobody's. Where other threads are at work each thread that makes first calls
holds two workspaces, one beside the pool and one in it; the budget of the pool, below, is for one of these.

A pool fragments when shapes come smallest first: the memory of a small graph cannot hold the larger tensors of the next
one. So when a capture makes the pool larger than 1.15 times what its largest graph needs alone, all graphs are dropped
and a new pool begins with the one just captured (`PoolBudget`); the others come back, into that pool, at their next
call. A pool begun this way is one piece, a tenth larger than need be: it is cut anew for each graph, so a slightly
larger shape fits, and growing shapes start few pools. Shapes warmed up largest first never cause any of this.

A capture that fails, because the function waits for the GPU, makes PyTorch refuse further captures into its pool. The
next ones take a new pool, and the graphs of the old one stay: until the next restart the budget holds for each.

Capturing executes nothing on the GPU. It happens in thread-local mode (other threads may go on launching), with the
garbage collector paused (it could destroy another graph, which is illegal while capturing) and without autocast's cache
(a graph must cast its weights itself, from their addresses).

Threads. Two locks, always taken in this order:

- `first_call_lock`, one in the process: plain first run (kernels compile and tune in it) and capture. A replay never
  takes it, so it never waits for a compilation.
- `CaptureDevice.lock`, one per GPU: the pool, and the making and destroying of graphs, which PyTorch does not allow in
  two threads at once (it keeps a set of them that no lock guards). A replay waits at most for the replay or the capture
  that is being enqueued, which takes milliseconds. It must wait for a capture: until that ends PyTorch refuses to
  advance the GPU's default random number generator, as each replay does. (Drawing from that generator in another thread
  at that moment raises PyTorch's error; a generator of one's own does not.)
"""

from __future__ import annotations

import concurrent.futures.thread
import contextlib
import ctypes
import gc
import selectors
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from kernl.runtime.capture_order import capturing_in_turn


class Evictable(Protocol):
    """Something that holds graphs of a device and can drop them all."""

    def evict(self, device: CaptureDevice) -> None: ...

    def graph_count(self, device: CaptureDevice) -> int: ...


class Graph(Protocol):
    def replay(self) -> None: ...


class CaptureDevice(Protocol):
    """What the runner asks of a device. Tests without a GPU bring their own."""

    device_type: str
    lock: threading.RLock  # type: ignore[valid-type]
    runners: weakref.WeakSet[Any]

    def is_capturing(self) -> bool:
        """The calling thread's stream is already being captured."""

    def enter_stream(self) -> None:
        """Order what the caller's stream does next after the last use of the pool."""

    def run_plainly(self, function: Callable[..., Any], inputs: Sequence[Any], hand_out: Callable[[Any], Any]) -> Any:
        """`hand_out(function(*inputs))`; afterwards the function's memory is given back, but for what is handed out."""

    def capture(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Graph, Any]:
        """The graph of one call and the outputs it will write. Executes nothing."""

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Flat memory that graphs read."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory as a tensor that does not keep it alive."""

    def settle(self) -> None:
        """Called before memory that graphs read is freed: whoever gets it next waits for the last replay."""

    def destroy_later(self, graphs: list[Any]) -> None:
        """Empty a list with the last references to graphs: at once if they may be destroyed now, else when they may."""

    def make_room(self) -> None:
        """Out of memory: drop every graph of the device and give all unused memory back."""

    def release_if_idle(self) -> None:
        """Give the pool's memory back when no graph is left."""

    def pool_bytes(self) -> int:
        """Bytes reserved for the graphs of this device, those of other runners included."""

    def reserved_bytes(self) -> int:
        """Bytes PyTorch has reserved on the device."""


class PoolBudget:
    """Decides when a fragmented pool is worth starting again, and how large the new one is.

    The bound is a share of what the largest graph needs alone, which is known once it has been captured into an empty
    pool. That need never decreases, and a new pool has room to spare for shapes that grow, so a pool is started again a
    logarithmic number of times only. The share leaves a twentieth for the buffers of inputs, which grow as well.
    """

    share = 1.15
    spare = 1.1
    floor = 64 << 20  # below this the allocator's own granularity (20 MB pieces, a 32 MB cuBLAS workspace) dominates

    def __init__(self) -> None:
        self.need = 0

    def exceeded(self, pool_bytes: int) -> bool:
        return pool_bytes > max(self.share * self.need, self.floor)

    def captured_alone(self, pool_bytes: int) -> None:
        self.need = max(self.need, pool_bytes)

    @property
    def room(self) -> int:
        """Bytes to begin a pool with when one has been too small in pieces."""
        return int(self.spare * self.need)


# What PyTorch gives cuBLAS on Hopper and newer; less on others.
_MAX_WORKSPACE_BYTES = 32 << 20

first_call_lock = threading.RLock()
_devices: dict[int, CudaCaptureDevice] = {}
_devices_lock = threading.Lock()


def cuda_capture_device(device: torch.device) -> CudaCaptureDevice:
    """The capture device of a GPU, one per GPU and process."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with _devices_lock:
        if index not in _devices:
            _devices[index] = CudaCaptureDevice(index)
        return _devices[index]


class CudaCaptureDevice:
    """The real one."""

    device_type = "cuda"

    def __init__(self, index: int) -> None:
        self.index = index
        self.lock = threading.RLock()
        self.runners: weakref.WeakSet[Evictable] = weakref.WeakSet()
        self._side_stream: torch.cuda.Stream | None = None
        self._capture_stream: torch.cuda.Stream | None = None
        self._last_stream: torch.cuda.Stream | None = None
        self._last_raw_stream: int | None = None
        self._pools: list[Any] = []
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._budget = PoolBudget()
        self._workspace_owners: set[int] = set()  # threads whose cuBLAS may have a workspace for the capture stream
        self._is_capturing = False
        self._buried: list[list[Any]] = []  # graphs to destroy once no capture is under way
        # Graphs whose capture could not be ended: the allocators may still point at them, so they are never destroyed.
        self._wrecks: list[torch.cuda.CUDAGraph] = []

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def enter_stream(self) -> None:
        raw = torch._C._cuda_getCurrentRawStream(self.index)
        if raw != self._last_raw_stream:
            stream = torch.cuda.current_stream(self.index)
            if self._last_stream is not None:
                stream.wait_stream(self._last_stream)
            self._last_stream, self._last_raw_stream = stream, raw

    def run_plainly(self, function: Callable[..., Any], inputs: Sequence[Any], hand_out: Callable[[Any], Any]) -> Any:
        reserved = self.reserved_bytes()
        caller = torch.cuda.current_stream(self.index)
        with self.lock:
            side = self._stream()
        side.wait_stream(caller)
        try:
            with torch.cuda.stream(side):
                outputs = function(*inputs)
        finally:
            caller.wait_stream(side)
        results = hand_out(outputs)
        for leaf in pytree.tree_leaves(results):
            if isinstance(leaf, torch.Tensor) and leaf.is_cuda and leaf.layout is torch.strided:
                leaf.record_stream(caller)  # one that could not be copied is still the side stream's
        del outputs
        cleared = self._clear_workspaces()
        # A thread that woke up in between may be about to launch with a workspace just freed: then it stays mapped.
        if self.reserved_bytes() > reserved and (not cleared or _other_threads_wait()):
            torch.cuda.synchronize(self.index)
            torch.cuda.empty_cache()
        return results

    def capture(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Graph, Any]:
        with _garbage_collector_paused(), _autocast_cache_off(), torch.cuda.device(self.index):
            self._is_capturing = True
            try:
                return self._capture_within_budget(function, arguments)
            finally:
                self._is_capturing = False
                self._destroy_buried()

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # On the side stream, whose freed memory only waits for work that is ordered by `enter_stream`.
        stream = self._stream()
        with torch.cuda.stream(stream):
            tensor = torch.empty(elements, dtype=dtype, device=device)
        torch.cuda.current_stream(self.index).wait_stream(stream)
        return tensor

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not storage.nbytes() or tensor.device.type != "cuda":
            return tensor
        memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())

    def settle(self) -> None:
        self._stream()

    def destroy_later(self, graphs: list[Any]) -> None:
        self._buried.append(graphs)
        if self.lock.acquire(blocking=False):
            try:
                if not self._is_capturing:
                    self._destroy_buried()
            finally:
                self.lock.release()

    def make_room(self) -> None:
        with self.lock:
            for runner in list(self.runners):
                runner.evict(self)
            self.release_if_idle()

    def release_if_idle(self) -> None:
        with self.lock:
            torch.cuda.synchronize(self.index)
            if not self._holds_graphs():
                self._anchor = None
                self._pools.clear()
            torch.cuda.empty_cache()

    def pool_bytes(self) -> int:
        return sum(self._pool_sizes())

    def reserved_bytes(self) -> int:
        return torch.cuda.memory_reserved(self.index)

    def _holds_graphs(self) -> bool:
        return any(runner.graph_count(self) for runner in list(self.runners))

    def _pool_sizes(self) -> list[int]:
        """Bytes of each pool, the one in use last; those before it are left from captures that failed."""
        if torch.cuda.get_allocator_backend() != "native":
            return [0]  # another allocator does not tell
        # A snapshot of one pool lists its few segments; one of all memory takes milliseconds for a large model.
        return [sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool)) for pool in self._pools]

    def _capture_within_budget(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[Graph, Any]:
        if self._holds_graphs():
            reserved = self.reserved_bytes()
            graph, outputs = self._capture(function, arguments)
            if self.reserved_bytes() <= reserved or not self._over_budget():
                return graph, outputs
            del graph, outputs
            self.make_room()
            restarted = True
        else:
            if self._anchor is not None:
                self.release_if_idle()  # what graphs that are gone have left is no measure of what this one needs
            restarted = False
        graph, outputs = self._capture(function, arguments)
        self._budget.captured_alone(self.pool_bytes())
        if restarted:
            # Its need is now known. Once more, in one piece with room for larger shapes.
            del graph, outputs
            self.release_if_idle()
            self._new_pool(self._budget.room)
            graph, outputs = self._capture(function, arguments)
            if self._over_budget():  # this graph wastes much of one piece; to try again would end the same way
                self._budget.captured_alone(self.pool_bytes())
        return graph, outputs

    def _over_budget(self) -> bool:
        sizes = self._pool_sizes()
        workspaces = _MAX_WORKSPACE_BYTES * max(len(self._workspace_owners) - 1, 0)
        return self._budget.exceeded(max(sizes[-1], sum(sizes) // 2) - workspaces)

    def _capture(self, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
        if self._anchor is None:
            self._new_pool()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream):
            graph.capture_begin(pool=self._pools[-1], capture_error_mode="thread_local")
            self._workspace_owners.add(threading.get_ident())
            try:
                with capturing_in_turn():
                    outputs = function(*arguments)
            except BaseException:
                with contextlib.suppress(Exception):
                    self._end(graph)
                raise
            finally:
                self._clear_workspaces()
            self._end(graph)
        return graph, outputs

    def _destroy_buried(self) -> None:
        while self._buried:
            self._buried.pop().clear()

    def _clear_workspaces(self) -> bool:
        """Free cuBLAS's workspaces unless another thread may be using one; whether that was done."""
        if not _other_threads_wait():
            return False
        torch._C._cuda_clearCublasWorkspaces()
        self._workspace_owners.clear()
        return True

    def _stream(self) -> torch.cuda.Stream:
        """The stream of plain runs and of inputs, ordered after the last use of the pool."""
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(self.index)
        if self._last_stream is not None:
            self._side_stream.wait_stream(self._last_stream)
        return self._side_stream

    def _new_pool(self, room: int = 0) -> None:
        """Start a pool with one free piece of memory, and with a graph that keeps it in being while no other does.

        Capturing that graph also ends the state in which a failed capture leaves the random number generator.
        """
        device = torch.device("cuda", self.index)
        with torch.inference_mode(False):
            scalar = torch.zeros(1, device=device)
        if self._capture_stream is None or self._workspace_owners:
            # Its workspace lies in an older pool. The stream is not destroyed: PyTorch remembers workspaces by handle.
            self._capture_stream = _private_stream(self.index)
            self._workspace_owners.clear()
        pool = torch.cuda.graph_pool_handle()
        anchor = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._capture_stream):
            anchor.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                scalar.zero_()
                if room:
                    torch.empty(room, dtype=torch.uint8, device=device)
            finally:
                anchor.capture_end()
        self._pools.append(pool)
        self._anchor = anchor

    def _end(self, graph: torch.cuda.CUDAGraph) -> None:
        """End the capture of a graph; if what ran has invalidated it, leave the device as if it had never begun."""
        try:
            graph.capture_end()
        except BaseException:
            self._wrecks.append(graph)
            pool = self._pools[-1]
            # PyTorch stops before telling its allocator that the capture is over; older graphs keep the pool.
            with contextlib.suppress(Exception):
                torch._C._cuda_endAllocateToPool(self.index, pool)
                torch._C._cuda_releasePool(self.index, pool)
            with contextlib.suppress(Exception):
                self._new_pool()
            raise


def _private_stream(index: int) -> torch.cuda.Stream:
    """A stream that PyTorch hands to nobody else; `torch.cuda.Stream()` gives out the same 32 in turn."""
    handle = ctypes.c_void_p()
    non_blocking = 1  # CU_STREAM_NON_BLOCKING: no order with the legacy default stream, whose use would break a capture
    with torch.cuda.device(index):
        torch.cuda.current_stream().query()  # makes the device's context current
        error = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), ctypes.c_uint(non_blocking))
    if error or handle.value is None:
        raise RuntimeError(f"cuStreamCreate failed with error {error}")
    return torch.cuda.ExternalStream(handle.value, torch.device("cuda", index))


# Where Python threads wait for one another: file and function.
_WAITING = {
    (threading.__file__, "wait"),
    (threading.__file__, "join"),
    (threading.__file__, "_wait_for_tstate_lock"),
    (concurrent.futures.thread.__file__, "_worker"),
    (selectors.__file__, "select"),
}


def _other_threads_wait() -> bool:
    """Whether every other Python thread is waiting for something, so that none is inside a call into PyTorch."""
    own = threading.get_ident()
    codes = [frame.f_code for thread, frame in sys._current_frames().items() if thread != own]
    return all((code.co_filename, code.co_name) in _WAITING for code in codes)


@contextlib.contextmanager
def _garbage_collector_paused() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _autocast_cache_off() -> Iterator[None]:
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)
