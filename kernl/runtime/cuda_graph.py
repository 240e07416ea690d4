"""Replay instead of launch: any callable on a GPU, one CUDA graph per shape.

    runner = CudaGraphRunner(function, fixed_inputs=(0, 1, 2))     # inputs 0 to 2 are weights
    outputs = runner(weight, bias, scale, tokens)

Launching the kernels of a small model takes the host ten times longer than the GPU needs to run them; a CUDA graph
launches all of them at once. A graph freezes addresses and sizes, so this is what a call does:

    key     what the graphs of two calls would have to agree on                      graph_key.py
    check   parameters and buffers are where they were: they are used by address
    copy    the other inputs into the buffers the graph reads                        static_inputs.py
            (not tensors marked as staying where they are, such as caches: their address is part of the key)
    replay
    copy    the outputs out, so that no later call overwrites them                   output_plan.py

The first call of a key runs the function once, plainly: that run is the user's result, and in it kernels compile and
tune. Right after it the graph is captured, which executes nothing; so effects (a cache written in place, a counter, the
state of the random number generator) happen once per call, the first one included, and the second call replays.

Inputs the function writes to are copied back after each replay. They are declared (`mutated_inputs`) or noticed while
capturing, by the version counter of the buffer. Inputs used by address are simply written.

A call runs plainly, with the reason counted in `skips`, when no input is on a GPU, when autograd would record it,
when the caller is itself capturing, when inputs are of a kind a graph cannot take, when all places for graphs are taken
by kinds of calls that come more often, and when capturing has failed: a key is not tried twice, and after three
failures in a row no further one is tried. Running out of memory drops all graphs of the device and tries once more.

Memory: see capture_device.py. All graphs of a device share a pool, buffers of inputs are shared by the graphs of a
runner, at most `max_graphs` are kept. Which of more kinds of calls get one: see admission.py.

Threads: first calls run one after the other, in the whole process; replays do not wait for them. A replay holds its
device's lock while it enqueues, and the work of two streams is ordered, not overlapped.
"""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from kernl.runtime.admission import Admission
from kernl.runtime.capture_device import CaptureDevice, Graph, cuda_capture_device, first_call_lock
from kernl.runtime.graph_key import Uncapturable, graph_key, needs_gradient, stays
from kernl.runtime.output_plan import OutputPlan
from kernl.runtime.static_inputs import InputCopies, StaticInputs

RARE = "all places for graphs are taken, by shapes that come more often (option max_graphs)"

_MAX_FAILURES_IN_A_ROW = 3
_MAX_MOVES = 8
_MAX_REMEMBERED_KEYS = 4096

# PyTorch compares the addresses of two hundred tensors in C++ ten times faster than Python does. CPU builds lack it.
_addresses_equal: Callable[[list[Any], list[int | None], list[int]], bool] | None = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", None
)


class CudaGraphRunner:
    """A callable that replays CUDA graphs of `function` wherever it can.

    function: takes positional inputs (tensors, numbers, strings, None) and gives tensors and plain values in any
        nesting of tuples, lists and dicts. Its result must depend on its inputs alone.
    fixed_inputs: indices of parameters and buffers. They are read and written where they are, never copied. When one
        moves (`p.data = ...`), the next call captures anew.
    mutated_inputs: indices of inputs known to be written, beyond those that are noticed.
    max_graphs: graphs kept per device. Once there are that many, a new kind of call gets a graph, in place of the least
        recently used one, when it comes more often (see `admission`); until then it runs plainly.
    static_outputs: hand out the graph's own output tensors. The next replay of that graph overwrites them.
    capture_device: where to capture; by default the GPU the inputs are on.
    on_skip: called with the reason the first time a call runs plainly for it.

    Attributes: `skips`, a Counter of reasons; `function`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        fixed_inputs: Collection[int] = (),
        mutated_inputs: Collection[int] = (),
        max_graphs: int = 64,
        static_outputs: bool = False,
        capture_device: CaptureDevice | None = None,
        on_skip: Callable[[str], None] | None = None,
    ) -> None:
        if max_graphs < 1:
            raise ValueError(f"max_graphs must be at least 1, got {max_graphs}")
        self.function = function
        self.skips: Counter[str] = Counter()
        self._fixed = sorted(set(fixed_inputs))
        self._mutated = frozenset(mutated_inputs)
        self._max_graphs = max_graphs
        self._static_outputs = static_outputs
        self._given_device = capture_device
        self._device_type = "cuda" if capture_device is None else capture_device.device_type
        self._on_skip = on_skip

        self._lock = threading.RLock()
        self._copied: list[int] | None = None  # set by the first call, which shows how many inputs there are
        self._fixed_device: torch.device | None = None
        self._graphs: dict[tuple[object, ...], CapturedGraph] = {}
        self._refused: dict[tuple[object, ...], str] = {}
        self._moves: Counter[tuple[object, ...]] = Counter()
        self._static_inputs: dict[torch.device, StaticInputs] = {}
        self._devices: set[CaptureDevice] = set()
        self._admission = Admission(max_graphs)
        self._failures_in_a_row = 0
        self._clock = itertools.count()

    def __call__(self, *inputs: Any) -> Any:
        try:
            key, device = self._key(inputs)
        except Uncapturable as reason:
            return self.run_plainly(str(reason), inputs)
        graph = self._graphs.get(key)
        if graph is not None:
            return graph.replay(inputs)
        return self._first_call(key, device, inputs)

    def lookup(self, inputs: Sequence[Any]) -> CapturedGraph | None:
        """The graph that would serve this call, None when there is none (yet).

        A caller that knows by other means that a later call has the same key may keep the graph and call
        `graph.replay(inputs)` at once. That stays right when weights move or the graph is evicted in the meantime.
        None, too, for a graph that uses tensors of the call where they are: it is for these tensors only.
        """
        try:
            key, _ = self._key(inputs)
        except Uncapturable:
            return None
        graph = self._graphs.get(key)
        return None if graph is None or graph.uses_in_place else graph

    def run_plainly(self, reason: str, inputs: Sequence[Any]) -> Any:
        """Call the function without a graph and count the reason."""
        self.skips[reason] += 1
        if self._on_skip is not None and self.skips[reason] == 1:
            self._on_skip(reason)
        return self.function(*inputs)

    def graph_count(self, device: CaptureDevice | None = None) -> int:
        """Graphs held, on all devices or on one."""
        with self._lock:
            return sum(device is None or graph.device is device for graph in self._graphs.values())

    def memory(self) -> dict[str, Any]:
        """Bytes held for this runner's graphs.

        `graphs`: one dict per graph with its input sizes (`shapes`), `input_bytes`, `output_bytes` (copied out by each
        call) and `reserved_bytes`, what capturing it added to the memory PyTorch has reserved. `pool`: the pool of the
        devices used, graphs of other runners included. `static_inputs`: the buffers shared by the graphs.
        """
        with self._lock:
            graphs = list(self._graphs.values())
            static_inputs = sum(buffers.nbytes() for buffers in self._static_inputs.values())
            devices = list(self._devices)
        return {
            "graphs": [graph.memory() for graph in graphs],
            "pool": sum(device.pool_bytes() for device in devices),
            "static_inputs": static_inputs,
        }

    def release(self) -> None:
        """Drop all graphs and buffers and give their memory back. The next call starts again.

        The pool is shared: its memory goes back once no runner has a graph in it.
        """
        with self._lock:
            devices = list(self._devices)
        for device in devices:
            self.evict(device)
        with self._lock:
            for buffers in self._static_inputs.values():
                buffers.clear()
            self._refused.clear()
            self._moves.clear()
            self._admission.clear()
            self._failures_in_a_row = 0
        for device in devices:
            device.release_if_idle()

    def evict(self, device: CaptureDevice) -> None:
        """Drop the graphs of one device. A graph that a caller has kept falls back to calling this runner."""
        self._drop_where(device, lambda graph: True)

    def _drop_where(self, device: CaptureDevice, condition: Callable[[CapturedGraph], bool]) -> None:
        with self._lock:
            graphs = [graph for graph in self._oldest_first(device) if condition(graph)]
            for graph in graphs:
                del self._graphs[graph.key]
        for graph in graphs:
            graph.drop()

    def _key(self, inputs: Sequence[Any]) -> tuple[tuple[object, ...], torch.device]:
        if self._copied is None:
            self._learn_inputs(inputs)
        assert self._copied is not None
        if torch.is_grad_enabled() and needs_gradient(inputs):
            raise Uncapturable("gradients are needed")
        return graph_key(inputs, self._copied, self._device_type, self._fixed_device)

    def _learn_inputs(self, inputs: Sequence[Any]) -> None:
        """Which inputs are used by address: those said to be, unless a graph takes them by value.

        Nothing is learnt from a call that no graph can serve, such as the first one of a model still on the CPU.
        """
        with self._lock:
            fixed = []
            for index in self._fixed:
                value = inputs[index]
                if not isinstance(value, torch.Tensor):
                    continue
                if value.device.type == self._device_type:
                    fixed.append(index)
                elif value.ndim > 0:
                    raise Uncapturable(f"input {index} is a tensor on {value.device.type}")
            devices = {inputs[index].device for index in fixed}
            if len(devices) > 1:
                raise Uncapturable("parameters are on more than one device")
            self._fixed = fixed
            self._fixed_device = devices.pop() if devices else None
            self._copied = sorted(set(range(len(inputs))) - set(fixed))

    def _first_call(self, key: tuple[object, ...], place: torch.device, inputs: Sequence[Any]) -> Any:
        """Run plainly, for the user, then capture, for the next call."""
        if self._failures_in_a_row >= _MAX_FAILURES_IN_A_ROW:
            return self.run_plainly("capturing failed for several shapes in a row", inputs)
        if key in self._refused:
            return self.run_plainly(self._refused[key], inputs)
        device = cuda_capture_device(place) if self._given_device is None else self._given_device
        if device.is_capturing():
            return self.run_plainly("the caller is capturing a graph itself", inputs)
        self._drop_where(device, lambda graph: graph.is_useless)
        if not self._admits(key, device):
            return self.run_plainly(RARE, inputs)
        with self._lock:
            self._devices.add(device)
            device.runners.add(self)
            static_inputs = self._static_inputs.setdefault(place, StaticInputs(device.allocate))

        with first_call_lock:
            if key not in self._graphs and key not in self._refused:
                results = self._first_result(key, device, inputs)
                with device.lock:
                    if key not in self._refused:
                        device.enter_stream()
                        self._capture(key, device, static_inputs, inputs)
                return results
        return self(*inputs)  # another thread was first

    def _admits(self, key: tuple[object, ...], device: CaptureDevice) -> bool:
        """Whether there is a place for a graph of this key, or this key deserves that of another one."""
        with self._lock:
            peers = self._oldest_first(device)
            return len(peers) < self._max_graphs or self._admission.admits(key, peers[0], peers)

    def _oldest_first(self, device: CaptureDevice) -> list[CapturedGraph]:
        """The graphs of one device, the least recently used one first. For a caller that holds the lock."""
        graphs = (graph for graph in self._graphs.values() if graph.device is device)
        return sorted(graphs, key=lambda graph: graph.last_used)

    def _first_result(self, key: tuple[object, ...], device: CaptureDevice, inputs: Sequence[Any]) -> Any:
        """The function's own result, copied out of the memory it was computed in."""

        def hand_out(outputs: Any) -> Any:
            try:
                return OutputPlan(outputs, inputs).make(inputs)
            except Uncapturable as reason:
                self._refuse(key, str(reason))
                return outputs

        try:
            return device.run_plainly(self.function, inputs, hand_out)
        except torch.OutOfMemoryError:
            if self._mutated:
                raise  # half of an effect must not be followed by a whole one
        # Outside of the handler: the error's traceback holds the tensors that filled the memory.
        device.make_room()
        return device.run_plainly(self.function, inputs, hand_out)

    def _capture(
        self,
        key: tuple[object, ...],
        device: CaptureDevice,
        static_inputs: StaticInputs,
        inputs: Sequence[Any],
    ) -> None:
        """Capture the graph of a key, or remember why not."""
        for _attempt in range(2):
            try:
                graph = CapturedGraph(self, key, device, static_inputs, inputs)
            except torch.OutOfMemoryError:
                pass  # room is made below, once the error's traceback has let go of its tensors
            except Uncapturable as reason:
                self._refuse(key, str(reason))
                return
            except Exception as error:
                self._failures_in_a_row += 1
                text = str(error).strip().splitlines()
                self._refuse(key, f"capturing failed: {type(error).__name__}: {text[0][:200] if text else ''}")
                return
            else:
                self._failures_in_a_row = 0
                self._keep(graph)
                return
            device.make_room()
        warnings.warn(
            "kernl: no memory left to capture a CUDA graph, even with all other graphs dropped; "
            "calls of this shape run without one",
            stacklevel=2,
        )
        self._refuse(key, "out of memory while capturing")

    def _keep(self, graph: CapturedGraph) -> None:
        with self._lock:
            # Only graphs of the same device make way: a thread never holds the locks of two.
            peers = self._oldest_first(graph.device)
            surplus = peers[: max(len(peers) - self._max_graphs + 1, 0)]
            for oldest in surplus:
                del self._graphs[oldest.key]
            self._graphs[graph.key] = graph
        for oldest in surplus:
            oldest.drop()

    def _refuse(self, key: tuple[object, ...], reason: str) -> None:
        with self._lock:
            if len(self._refused) >= _MAX_REMEMBERED_KEYS:
                self._refused.clear()
            self._refused[key] = reason

    def _moved(self, graph: CapturedGraph, inputs: Sequence[Any]) -> Any:
        """A parameter lies elsewhere: its graph is useless. Start the key again, unless that happens all the time."""
        with self._lock:
            if self._graphs.get(graph.key) is graph:
                del self._graphs[graph.key]
                self._moves[graph.key] += 1
                if self._moves[graph.key] > _MAX_MOVES:
                    self._refuse(graph.key, "parameters keep moving in memory")
        graph.drop()
        return self(*inputs)


class CapturedGraph:
    """One graph, the buffers it reads and the way its outputs are handed out.

    `last_used` is a tick of the runner's clock: the least of them is evicted first. `uses`: replays of late.
    """

    def __init__(
        self,
        runner: CudaGraphRunner,
        key: tuple[object, ...],
        device: CaptureDevice,
        static_inputs: StaticInputs,
        inputs: Sequence[Any],
    ) -> None:
        self.key = key
        self.last_used = next(runner._clock)
        self.uses = 0
        self._tick = runner._clock.__next__
        self._runner = runner
        self.device = device
        self._lock = device.lock
        self._checks_gradients = torch.is_grad_enabled()
        assert runner._copied is not None
        given = [
            index
            for index in runner._copied
            if isinstance(inputs[index], torch.Tensor) and inputs[index].device.type == device.device_type
        ]
        copied = [index for index in given if not stays(inputs[index])]
        in_place = [index for index in given if stays(inputs[index])]
        self._used_in_place = [weakref.ref(inputs[index].untyped_storage()) for index in in_place]
        self._fixed = runner._fixed
        self._addresses: list[int | None] = [None] * len(inputs)
        for index in self._fixed:
            self._addresses[index] = inputs[index].data_ptr()

        reserved = device.reserved_bytes()
        copies = static_inputs.copies_for(inputs, copied)
        arguments = [copies.views.get(index, value) for index, value in enumerate(inputs)]
        versions = [_version(value) for value in arguments]
        graph, outputs = device.capture(runner.function, arguments)
        written = {i for i, value in enumerate(arguments) if _version(value) != versions[i]} | runner._mutated
        self._has_effects = bool(written)
        self._written = sorted(written.intersection(copied))
        # Copies do not see each other's writes, so memory that is written must be reached through one input only.
        self._exclusive = copied if written else []
        self._fixed_memory = {_memory(inputs[index]) for index in (*self._fixed, *in_place)} if written else set()
        if not all(copies.is_plain(index) for index in self._written):
            raise Uncapturable("an input that is written repeats its own memory")
        plan = OutputPlan(outputs, arguments, borrow=device.borrow, copies=not runner._static_outputs)
        # Graph, input copies, output plan; None once dropped.
        self._captured: tuple[Graph, InputCopies, OutputPlan] | None = (graph, copies, plan)
        # Weak references to the memory of parameters and buffers; one that dies puts itself into the list.
        self._watches: list[Any] = []
        self._freed: list[Any] = []
        self._watch(inputs)
        self._memory = {
            "shapes": tuple(tuple(inputs[index].shape) for index in copied),
            "input_bytes": copies.nbytes,
            "output_bytes": plan.nbytes,
            "reserved_bytes": max(device.reserved_bytes() - reserved, 0),
        }

    @property
    def uses_in_place(self) -> bool:
        """Whether it reads or writes tensors of the call where they are."""
        return bool(self._used_in_place)

    @property
    def is_useless(self) -> bool:
        """Whether one of these tensors is gone, so that no call will have this graph's key."""
        return any(storage() is None for storage in self._used_in_place)

    @property
    def is_alive(self) -> bool:
        """Whether the graph has not been dropped: to make room, or by `release`."""
        return self._captured is not None

    def replay(self, inputs: Sequence[Any]) -> Any:
        """The function's result for inputs of this graph's key."""
        if self.device.is_capturing():
            return self._runner.run_plainly("the caller is capturing a graph itself", inputs)
        if self._checks_gradients and torch.is_grad_enabled() and needs_gradient(inputs):
            return self._runner.run_plainly("gradients are needed", inputs)
        with self._lock:
            is_alive = self._captured is not None
            in_place = is_alive and self.fixed_in_place(inputs)
            # Asked when all parameters are in place: the memory of one that moved may be that of an input by now.
            shares = in_place and bool(self._exclusive) and self._shares_written_memory(inputs)
            if in_place and not shares:
                if self._freed:
                    self._watch(inputs)
                return self._launch(inputs)
        if shares:
            return self._runner.run_plainly("an input that is written shares memory with another input", inputs)
        if is_alive:
            return self._runner._moved(self, inputs)
        successor = self._runner._graphs.get(self.key)
        return self._runner(*inputs) if successor is None else successor.replay(inputs)

    def replay_ahead(self, inputs: Sequence[Any]) -> Any:
        """The result as `replay` gives it, provided that `fixed_in_place(inputs)`; None when nothing was launched.

        For a caller that has more to check and checks it, and `fixed_in_place`, while the GPU works: comparing the
        addresses of two hundred parameters takes as long as launching. If a check fails, the result is thrown away.
        That is harmless, since a graph whose parameters' memory has been freed, or that writes to its inputs or to
        buffers, is not launched here.
        """
        if self._freed or self._has_effects or self._checks_gradients or self.device.is_capturing():
            return None
        with self._lock:
            return None if self._captured is None or self._freed else self._launch(inputs)

    def drop(self) -> None:
        """Let go of the graph and of the memory that only it uses."""
        with self._lock:
            if self._captured is not None:
                self.device.settle()
                self._captured = None

    def __del__(self) -> None:
        # The garbage collector may be at work, in any thread: the device knows when a graph may be destroyed.
        if getattr(self, "_captured", None) is not None:
            last_reference: list[Any] = [self._captured]
            self._captured = None
            self.device.destroy_later(last_reference)

    def memory(self) -> dict[str, Any]:
        return self._memory

    def _launch(self, inputs: Sequence[Any]) -> Any:
        # Holding the lock. Nothing outside of it refers to what has been captured, so that `drop` destroys it in there.
        assert self._captured is not None
        graph, copies, plan = self._captured
        self.device.enter_stream()
        copies.fill(inputs)
        graph.replay()
        self.last_used = self._tick()
        self.uses += 1
        if self._written:
            copies.copy_back(inputs, self._written)
        return plan.make(inputs)

    def _watch(self, inputs: Sequence[Any]) -> None:
        """Notice from now on when the memory of a parameter or buffer is freed."""
        freed: list[Any] = []
        self._freed = freed
        self._watches = [weakref.ref(inputs[index].untyped_storage(), freed.append) for index in self._fixed]

    def fixed_in_place(self, inputs: Sequence[Any]) -> bool:
        """Whether parameters and buffers are at the addresses that the graph reads."""
        if not self._fixed:
            return True
        if _addresses_equal is not None:
            # The C++ function takes lists only.
            as_list = inputs if type(inputs) is list else list(inputs)
            return _addresses_equal(as_list, self._addresses, self._fixed)
        addresses = self._addresses
        return all(inputs[index].data_ptr() == addresses[index] for index in self._fixed)

    def _shares_written_memory(self, inputs: Sequence[Any]) -> bool:
        seen = set(self._fixed_memory)
        for index in self._exclusive:
            memory = _memory(inputs[index])
            if memory in seen:
                return True
            seen.add(memory)
        return False


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _version(value: Any) -> int | None:
    """Times a tensor has been written in place, None when nobody counts."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version
