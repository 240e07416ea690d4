"""`model.kernl`: what an optimised model can be asked and told.

model.kernl.report()                      what was fused, what was refused and why, what runs
model.kernl.warmup([(8, 512), (1, 16)])   compile and capture before the first request comes
model.kernl.verify(inputs)                optimised against plain results, within the error budget
model.kernl.refresh()                     forget what was compiled, after a change nobody can notice
model.kernl.memory(), .release()          what CUDA graphs hold, and give it back
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from kernl.front_door import FrontDoor, disabled_here
from kernl.options import Options
from kernl.report import Report, gpu_time_by_implementation, warn_once
from kernl.testing import ErrorReport, error_report

Batch = Any


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Inside, in this thread, optimised models run as the plain PyTorch models they are."""
    token = disabled_here.set(True)
    try:
        yield
    finally:
        disabled_here.reset(token)


@dataclasses.dataclass(frozen=True)
class Verification:
    """The outcome of `model.kernl.verify`.

    within_budget: the verdict over all outputs. outputs: an ErrorReport for each tensor of the result, by its place.
    """

    within_budget: bool
    outputs: dict[str, ErrorReport]

    def __bool__(self) -> bool:
        return self.within_budget

    def __str__(self) -> str:
        rows = [
            (
                name,
                "within" if report.within_budget else "EXCEEDS",
                f"{report.max_abs:.2e}",
                f"{report.allowed_abs:.2e}",
                f"{report.max_rel:.2e}",
                f"{report.norm:.2e}",
                f"{report.allowed_norm:.2e}",
                f"{report.mismatches} of {report.elements}",
            )
            for name, report in self.outputs.items()
        ]
        headers = ["output", "budget", "max abs", "allowed", "max rel", "norm", "allowed", "outside"]
        table = str(tabulate(rows, headers=headers, disable_numparse=True))
        details = [report.text for report in self.outputs.values() if not report.within_budget]
        return "\n".join([table, *details])


class Handle:
    """See the module's text. Made by `optimize_model`; does not keep the model alive."""

    def __init__(self, model: nn.Module, door: FrontDoor, options: Options, report: Report) -> None:
        self.options = options
        self._model = weakref.ref(model)
        self._door = door
        self._report = report

    def __repr__(self) -> str:
        calls = self._report.calls
        return (
            f"<kernl: {self._report.subject}, {len(self._report.graphs)} graphs, {calls.direct} direct calls; "
            "see .report()>"
        )

    @property
    def model(self) -> nn.Module:
        """The model this belongs to. Raises ReferenceError when it is gone."""
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this handle does not exist any more")
        return model

    def report(self, profile: Batch | None = None) -> Report:
        """What kernl did so far. Before the first call it says that nothing has been compiled.

        profile: inputs of a call (a dict of keyword arguments, a tuple of positional ones, or a tensor); it is made a
            few times under the profiler and the report gets the share of GPU time of each implementation. Needs a GPU.
        """
        if profile is not None:
            args, kwargs = arguments_of(profile)
            with _inference_unless_grad_is_off():
                self._report.gpu_time = gpu_time_by_implementation(lambda: self.model(*args, **kwargs))
            if not self._report.gpu_time:
                warn_once(
                    "profile", "report(profile=...) measures GPU time, and there is no GPU: that part is left out"
                )
        return self._report

    def warmup(self, shapes: Iterable[Any], progress: bool = True) -> None:
        """Compile and capture for these inputs, largest first, so that later calls find everything ready.

        shapes: for each kind of call either its inputs (a dict of keyword arguments, a tuple of positional ones or a
            tensor), or a shape. A shape (batch, length) stands for `input_ids` and, where the model takes one,
            `attention_mask`; for a model whose main input is something else, for that whole tensor.
        progress: show a bar.

        Calls are made under `torch.inference_mode()`, or, where the caller has switched gradients off, in the caller's
        mode: what is prepared is for calls in that mode. They run the model: buffers and random state are put back
        afterwards, the given inputs are copied. Ctrl-C leaves the model usable.

        Raises ValueError for a shape when the model's inputs cannot be guessed: give example inputs then.
        """
        batches = [self._example(shape) for shape in shapes]
        batches.sort(key=_size_of, reverse=True)
        with _keeping_state(self.model), _inference_unless_grad_is_off():
            for batch in tqdm(batches, desc="kernl warm-up", disable=not progress):
                args, kwargs = arguments_of(batch)
                # The first call compiles and captures, the second one opens the front door to the captured graph.
                for _ in range(2):
                    self.model(*_copies(args), **_copies(kwargs))

    def verify(self, inputs: Batch, verbose: bool = True) -> Verification:
        """Compare the optimised model with the plain one on these inputs, both against a copy of it in float64.

        The budget is twice the plain model's own error plus one rounding step (see `kernl.testing`). The copy needs the
        memory of the model in float64 while this runs. All three runs start from the same inputs, buffers and random
        numbers, and buffers are afterwards what they were.

        inputs: a dict of keyword arguments, a tuple of positional ones, or a tensor.
        verbose: print the table.
        """
        args, kwargs = arguments_of(inputs)
        with torch.no_grad(), _keeping_state(self.model) as rewind:
            optimised = _run_on_copies(self.model, args, kwargs)
            rewind()
            with disabled():
                plain = _run_on_copies(self.model, args, kwargs)
            rewind()
            exact = copy.deepcopy(self.model).double()
            reference = _run_on_copies(exact, _to_double(args), _to_double(kwargs))
        if optimised.keys() != plain.keys():
            raise AssertionError(
                f"the optimised model returns {', '.join(optimised)}, the plain one {', '.join(plain)}"
            )
        outputs = {
            name: error_report(
                optimised[name],
                reference[name].double() if plain[name].is_floating_point() else plain[name],
                plain[name],
                name=name,
            )
            for name in plain
        }
        result = Verification(all(report.within_budget for report in outputs.values()), outputs)
        if verbose:
            print(result)
        return result

    def refresh(self) -> None:
        """Forget everything compiled and captured. The next call starts afresh and sees every change to the model.

        Needed after changing plain Python attributes of the model's modules, which `Options(guards="fast")` does not
        look at on every call. Weights, buffers, submodules, hooks, training mode and config are noticed without it.
        """
        self._door.open()

    def memory(self) -> dict[str, Any]:
        """Bytes held for CUDA graphs: `graphs` one by one, `pool` they share, `static_inputs` they read from."""
        held: dict[str, Any] = {"graphs": [], "pool": 0, "static_inputs": 0}
        for graph in self._door.graphs:
            if graph.runner is not None:
                part = graph.runner.memory()
                held["graphs"] += part["graphs"]
                held["pool"] = max(held["pool"], part["pool"])  # one pool for all of a device
                held["static_inputs"] += part["static_inputs"]
        return held

    def release(self) -> None:
        """Give the memory of CUDA graphs back. What was compiled stays; graphs are captured again when needed."""
        for graph in self._door.graphs:
            graph.release()

    def _example(self, shape: Any) -> Batch:
        if not (
            isinstance(shape, (tuple, list, torch.Size)) and shape and all(isinstance(size, int) for size in shape)
        ):
            return shape
        model = self.model
        parameters = inspect.signature(model.forward).parameters
        main = getattr(model, "main_input_name", None)
        weight = next(model.parameters(), torch.empty(0))
        if main == "input_ids" and len(shape) == 2:
            ids = torch.ones(tuple(shape), dtype=torch.long, device=weight.device)
            batch = {"input_ids": ids}
            if "attention_mask" in parameters:
                batch["attention_mask"] = torch.ones_like(ids)
            return batch
        if main is not None and main != "input_ids":
            return {main: torch.zeros(tuple(shape), dtype=weight.dtype, device=weight.device)}
        raise ValueError(
            f"shape {tuple(shape)}: the inputs of a {type(model).__name__} cannot be guessed from it; give example "
            "inputs (a dict of keyword arguments, a tuple of positional ones, or a tensor)"
        )


def arguments_of(batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call, from a dict, a tuple or list, or a single tensor."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return (), dict(batch)
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return tuple(batch), {}
    raise TypeError(
        f"inputs are a {type(batch).__name__}; accepted: a dict of keyword arguments, a tuple of positional ones, "
        "a tensor"
    )


@contextlib.contextmanager
def _inference_unless_grad_is_off() -> Iterator[None]:
    with torch.inference_mode() if torch.is_grad_enabled() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _keeping_state(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Put buffers and random number generators back in the end, and whenever the function it gives is called."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    cpu = torch.get_rng_state()
    gpus = [torch.cuda.get_rng_state(device) for device in devices]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]

    def rewind() -> None:
        torch.set_rng_state(cpu)
        for device, state in zip(devices, gpus):
            torch.cuda.set_rng_state(state, device)
        for buffer, content in buffers:
            if not torch.equal(buffer, content):
                buffer.copy_(content)

    try:
        yield rewind
    finally:
        rewind()


def _copies(values: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, values)


def _run_on_copies(model: nn.Module, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    return _named_tensors(model(*_copies(args), **_copies(kwargs)))


def _size_of(batch: Batch) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(arguments_of(batch)) if isinstance(leaf, torch.Tensor))


def _named_tensors(result: Any) -> dict[str, torch.Tensor]:
    """Every tensor of a result with its place in it as a name; objects that are no containers are left out."""
    found: dict[str, torch.Tensor] = {}

    def visit(value: Any, name: str) -> None:
        if isinstance(value, torch.Tensor):
            found[name or "output"] = value
        elif isinstance(value, Mapping):
            for key, item in value.items():
                visit(item, f"{name}.{key}" if name else str(key))
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                visit(item, f"{name}[{index}]")

    visit(result, "")
    return found


def _to_double(values: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, values
    )
