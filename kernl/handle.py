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
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from tabulate import tabulate
from torch import nn
from torch.utils import _pytree as pytree
from tqdm import tqdm

from kernl.front_door import FrontDoor, disabled_here
from kernl.options import Options
from kernl.report import Report, gpu_time_by_implementation, reason_of, warn_once
from kernl.testing import ErrorReport, error_report
from kernl.warmup import arguments_of, batches_to_warm_up

if TYPE_CHECKING:
    from kernl.generate import GenerationLoop

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
        self.loop: GenerationLoop | None = None  # of generation, once it has been used
        # What optimising found in the instance's dictionary, and what it has put there.
        self.before: dict[str, Any] = {}
        self.placed: dict[str, Any] = {}
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

    @property
    def plain_forward(self) -> Callable[..., Any]:
        """The model's own forward, called with the model first."""
        return self._door.plain

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

    def warmup(
        self,
        shapes: Any,
        progress: bool = True,
        *,
        tokenizer: Any = None,
        texts: Iterable[str] | None = None,
        batch_size: int | Sequence[int] = 1,
    ) -> None:
        """Compile and capture for these inputs, largest first, so that later calls find everything ready.

            model.kernl.warmup([(1, 16), (8, 128)])
            model.kernl.warmup("auto", tokenizer=tokenizer, texts=texts, batch_size=[1, 8])

        shapes: a list with, for each kind of call, either its inputs (a dict of keyword arguments, a tuple of
            positional ones or a tensor), or a shape. A shape (batch, length) stands for `input_ids` and, where the
            model takes one, `attention_mask`; for a model whose main input is something else, for that whole tensor.
            "auto": the shapes that `texts` have, in their order, in batches of `batch_size` padded to their longest.
        progress: show a bar.
        tokenizer, texts, batch_size: for "auto": a Hugging Face tokenizer, a list of strings, and one or several
            numbers of texts a call.

        Calls are made under `torch.inference_mode()`, or, where the caller has switched gradients off, in the caller's
        mode: what is prepared is for calls in that mode. They run the model: buffers and random state are put back
        afterwards, the given inputs are copied. Ctrl-C leaves the model usable.

        Raises TypeError or ValueError, with what is accepted, for anything else, and for a shape from which the model's
        inputs cannot be guessed: give example inputs then.
        """
        batches = batches_to_warm_up(self.model, shapes, tokenizer=tokenizer, texts=texts, batch_size=batch_size)
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

        Raises ValueError for a model that cannot run in float64, such as one whose forward casts to a fixed dtype.
        """
        args, kwargs = arguments_of(inputs)
        with torch.no_grad(), _keeping_state(self.model) as rewind:
            optimised = _run_on_copies(self.model, args, kwargs)
            rewind()
            with disabled():
                plain = _run_on_copies(self.model, args, kwargs)
            rewind()
            reference = _run_in_double(self.model, args, kwargs)
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
        if self.loop is not None:
            self.loop.forget()

    def memory(self) -> dict[str, Any]:
        """Bytes held for CUDA graphs: `graphs` one by one, `pool` they share, `static_inputs` they read from.

        `generation`: the static caches of `generate`, and the tensors beside them.
        """
        held: dict[str, Any] = {"graphs": [], "pool": 0, "static_inputs": 0, "generation": 0}
        graphs = [*self._door.graphs, *([] if self.loop is None else self.loop.encoder_graphs())]
        runners = [graph.runner for graph in graphs if graph.runner is not None]
        if self.loop is not None:
            runners += self.loop.runners()
            held["generation"] = self.loop.memory_bytes()
        for runner in runners:
            part = runner.memory()
            held["graphs"] += part["graphs"]
            held["pool"] = max(held["pool"], part["pool"])  # one pool for all of a device
            held["static_inputs"] += part["static_inputs"]
        return held

    def release(self) -> None:
        """Give the memory of CUDA graphs and caches back. What was compiled stays; graphs are captured again."""
        if self.loop is not None:
            self.loop.release()
        for graph in self._door.graphs:
            graph.release()


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


def _run_in_double(model: nn.Module, args: Any, kwargs: Any) -> dict[str, torch.Tensor]:
    exact = copy.deepcopy(model).double()
    try:
        return _run_on_copies(exact, _to_double(args), _to_double(kwargs))
    except Exception as error:
        raise ValueError(
            f"verify compares with the model in float64, which the {type(model).__name__} cannot run in "
            f"({reason_of(error)}); compare its results with those under kernl.disabled() instead"
        ) from error


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
