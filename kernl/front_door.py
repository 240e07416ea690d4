"""The front door: from the user's call straight to the compiled graph, past TorchDynamo's guards.

The guards of a small model cost more than its GPU work. They answer one question, "is this call like the one that was
compiled?", and for a given kind of call the question can be asked much faster:

1. A *signature* is read from the arguments (`kernl.signature`). It is the key of a dictionary.
2. The model is compared with a snapshot of itself (`kernl.model_state`): weights, buffers, submodules, training flags,
   hooks, config.
3. torch's global state (gradient and inference mode, autocast, default dtype, determinism, TF32) is compared by
   the same object that TorchDynamo's guards use.

**Learning.** The first call of a signature goes through TorchDynamo. Meanwhile the compiled graph notes what it is
called with and what it returns. If one graph ran, the whole `forward` is in it, it has no side effect on Python
objects, each of its inputs is an argument, a weight or a number that follows from the shapes, and each tensor of the
result is one of its outputs, then the call is *understood*: a `Plan` says which argument goes to which input and how
outputs become the result. Anything less, and calls of this signature go on through TorchDynamo; the report says why.

**Serving.** A later call of that signature fills in the inputs, calls the graph and rebuilds the result. Where a CUDA
graph is behind it, that is launched before the model is compared with its snapshot, and its outputs are thrown away in
the rare case that the comparison fails: the host's time for it disappears behind the GPU's.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo import eval_frame as _eval_frame
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from torch.utils._device import DeviceContext

from kernl.backend import CannotCapture, CompiledGraph, WeightsChanged, compile_graph, source_name
from kernl.buckets import Buckets
from kernl.dynamo_settings import dynamo_settings, has_length_1
from kernl.model_state import ModelState
from kernl.options import Options
from kernl.report import Report, reason_of, warn_once
from kernl.runtime.cuda_graph import CapturedGraph
from kernl.sdpa_shape import sdpa_of_any_batch
from kernl.signature import BY_VALUE, read_call

Tensor = torch.Tensor
Build = Callable[[Sequence[Any], Sequence[Tensor]], Any]

_MAX_SIGNATURES = 512
_MAX_LESSONS = 3  # calls of one signature from which learning is tried
_MAX_FAILURES = 8  # of TorchDynamo, after which it is not asked about new signatures

_is_compiling = torch.compiler.is_compiling
_is_inference = torch.is_inference_mode_enabled
_jit_tracing_state = torch._C._get_tracing_state
_count_function_modes = torch._C._len_torch_function_stack
_count_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack

disabled_here: ContextVar[bool] = ContextVar("kernl_disabled", default=False)
"""Whether this thread (or task) is inside `with kernl.disabled()`."""


class _Local(threading.local):
    runs: list[Run] | None = None  # of the call being learnt in this thread
    started = 0  # graphs that this thread has begun to run
    wrote = 0  # those among them that write to arguments or weights


_local = _Local()


NOT_SERVED = object()


class NotUnderstood(Exception):
    """Why calls of a signature stay with TorchDynamo."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a compiled graph during a call."""

    graph: RecordedGraph
    inputs: tuple[Any, ...]
    outputs: Any


class RecordedGraph:
    """A compiled graph that notes its runs while a call is being learnt."""

    def __init__(self, graph: CompiledGraph, obstacle: str | None) -> None:
        self.graph = graph
        self.obstacle = obstacle

    def __call__(self, *inputs: Any) -> Any:
        _local.started += 1
        _local.wrote += bool(self.graph.inputs.mutated)
        outputs = self.graph(*inputs)
        runs = _local.runs
        if runs is not None:
            runs.append(Run(self, inputs, outputs))
        return outputs


IN_PARTS = "the model is not captured as one graph"


def obstacle_in_frame(entry_name: str) -> str | None:
    """Asked while a backend runs: what TorchDynamo's code does besides calling the graph, None when nothing.

    The answer is in the `OutputGraph` that is calling the backend. It is found by walking up the stack, since backends
    are not handed it; should it not be there, nothing is known and the front door stays closed.
    """
    frame: types.FrameType | None = sys._getframe(1)
    output: Any = None
    while frame is not None:
        output = frame.f_locals.get("self")
        if hasattr(output, "side_effects") and hasattr(output, "compile_subgraph_reason"):
            break
        frame = frame.f_back
    else:
        return "what TorchDynamo's code does besides calling the graph is not known"
    try:
        if output.co_fields["co_name"] != entry_name or output.compile_subgraph_reason.graph_break:
            return IN_PARTS
        modified = [
            variable.source
            for variable in output.side_effects._get_modified_vars()
            if type(getattr(variable, "mutation_type", None)).__name__.endswith("Existing")
        ]
    except (AttributeError, KeyError) as error:
        return f"what TorchDynamo's code does besides calling the graph is not known ({reason_of(error)})"
    names = [name for name in map(source_name, modified) if not _is_harmless(name)]
    return f"forward changes Python objects: {', '.join(name or 'unnamed' for name in names)}" if names else None


def _is_harmless(name: str) -> bool:
    """transformers sets a context variable while it collects hidden states, and resets it."""
    return name.endswith("_active_collector") or "output_capturing" in name


class Plan:
    """How to serve a call of one signature, under one state of torch, by one compiled graph.

    template: the graph's inputs with the weights and numbers filled in. slots: (position of an input, index of the
    call's tensor that goes there). build: makes the result from the graph's outputs and the call's tensors.
    """

    __slots__ = (
        "_captured",
        "_modes",
        "_template",
        "_world",
        "build",
        "grad",
        "graph",
        "inference",
        "slots",
    )

    def __init__(
        self, graph: CompiledGraph, template: list[Any], slots: tuple[tuple[int, int], ...], build: Build
    ) -> None:
        self.graph = graph
        self._template = template
        self.slots = slots
        self.build = build
        self._captured: CapturedGraph | None = None
        self.grad = torch.is_grad_enabled()
        self.inference = _is_inference()
        self._modes = active_function_modes()
        self._world = GlobalStateGuard()

    def for_sizes(self, numbers: Mapping[int, int]) -> Plan:
        """The plan of a call of other sizes; numbers: the graph's inputs that are sizes. It serves bare outputs."""
        template = [numbers.get(position, value) for position, value in enumerate(self._template)]
        return Plan(self.graph, template, self.slots, lambda outputs, tensors: outputs)

    def fits(self) -> bool:
        """Whether torch's global state is the one the plan was learnt under."""
        return (
            self._world.check()
            and _is_inference() is self.inference
            and _count_function_modes() == len(self._modes)
            and (not self._modes or active_function_modes() == self._modes)
            and not _count_dispatch_modes()
            and _transforms() is None
            and _eval_frame._stance.stance == "default"
        )

    def suits(self, state: ModelState, model: nn.Module) -> bool:
        """Whether the model is as it was when the plan was learnt. A captured graph looks after addresses itself."""
        return state.unchanged(model, addresses=self._captured is None) and not (self.grad and state.needs_grad())

    def serve(self, tensors: Sequence[Tensor], state: ModelState, model: nn.Module) -> Any:
        """The result of a call with these tensor arguments; NOT_SERVED when the model is not as the plan wants it.

        A captured graph is launched first, and the model is looked at while the GPU works.
        """
        inputs = self._template.copy()
        for position, index in self.slots:
            inputs[position] = tensors[index]
        captured = self._captured
        if captured is not None and not self.grad:
            outputs = captured.replay_ahead(inputs)
            if outputs is not None:
                if state.unchanged(model, addresses=False) and captured.fixed_in_place(inputs):
                    return self.build(outputs, tensors)
                return NOT_SERVED
            if not captured.is_alive:
                captured = self._captured = None  # evicted or released: the runner captures anew
        if not self.suits(state, model):
            return NOT_SERVED
        if captured is not None:
            return self.build(captured.replay(inputs), tensors)
        outputs = self.graph(*inputs)
        if self.graph.runner is not None:
            # All of the call's tensors are on the GPU, or there would be no runner: its key is part of the signature.
            self._captured = self.graph.runner.lookup(inputs)
        return self.build(outputs, tensors)


def active_function_modes() -> tuple[Any, ...]:
    return tuple(torch._C._get_function_stack_at(level) for level in range(_count_function_modes()))


def understand(runs: Sequence[Run], result: Any, tensors: Sequence[Tensor], state: ModelState) -> Plan:
    """A plan that serves calls like the one just made.

    runs: graphs that ran during the call. result: what the call returned. tensors: its tensor arguments in order.
    state: the model as it was before and after. Raises NotUnderstood with the reason when there is no such plan.
    """
    if len(runs) != 1:
        raise NotUnderstood(f"the call ran {len(runs)} graphs, not one")
    run = runs[0]
    graph = run.graph.graph
    if run.graph.obstacle is not None:
        raise NotUnderstood(run.graph.obstacle)
    if torch.is_grad_enabled() and (graph.inputs.needs_grad or state.needs_grad()):
        raise NotUnderstood("gradients are needed")
    if any(not isinstance(mode, DeviceContext) for mode in active_function_modes()):
        raise NotUnderstood("a torch function mode is active")
    if any(value is not None and not isinstance(value, Tensor) for value in run.outputs):
        raise NotUnderstood("the graph returns numbers")

    argument = {id(tensor): index for index, tensor in enumerate(tensors)}
    fixed = {id(tensor) for tensor in state.tensors}
    if fixed & argument.keys():
        raise NotUnderstood("a tensor of the model is given as an argument")

    template: list[Any] = []
    slots: list[tuple[int, int]] = []
    for position, (value, source) in enumerate(zip(run.inputs, graph.inputs.sources)):
        template.append(value)
        if not isinstance(value, Tensor):
            # Numbers that follow from shapes and values of arguments are the same whenever the signature is.
            if not _follows_from_signature(source_name(source)):
                raise NotUnderstood(f"the graph takes the number {source_name(source)}")
        elif id(value) in argument:
            if position in graph.inputs.mutated:
                raise NotUnderstood("the graph writes to an argument")
            template[position] = None
            slots.append((position, argument[id(value)]))
        elif id(value) not in fixed:
            raise NotUnderstood(f"the graph takes a tensor that is no argument and no weight: {source_name(source)}")

    sources: dict[int, tuple[str, int]] = {
        id(tensor): ("argument", index) for tensor, index in zip(tensors, range(len(tensors)))
    }
    sources.update((id(value), ("output", index)) for index, value in enumerate(run.outputs) if value is not None)
    return Plan(graph, template, tuple(slots), builder_of(result, sources))


def _follows_from_signature(name: str) -> bool:
    return any(part in name for part in (".size()", ".stride()", ".storage_offset()")) or name.startswith(
        ("L['args']", "L['kwargs']")
    )


def builder_of(result: Any, sources: Mapping[int, tuple[str, int]]) -> Build:
    """A function that makes a result of the same structure from outputs and arguments.

    sources: where each tensor, by its id, comes from: ("output", index) or ("argument", index).
    """
    kind = type(result)
    if isinstance(result, Tensor):
        if id(result) not in sources:
            raise NotUnderstood("a tensor of the result is not an output of the graph")
        place, index = sources[id(result)]
        if place == "output":
            return lambda outputs, tensors: outputs[index]
        return lambda outputs, tensors: tensors[index]
    if kind in BY_VALUE or kind is float:
        return lambda outputs, tensors: result
    if kind is tuple or kind is list:
        parts = [builder_of(item, sources) for item in result]
        if kind is tuple:
            return lambda outputs, tensors: tuple([part(outputs, tensors) for part in parts])
        return lambda outputs, tensors: [part(outputs, tensors) for part in parts]
    if isinstance(result, tuple) and hasattr(kind, "_make"):
        parts = [builder_of(item, sources) for item in result]
        return lambda outputs, tensors: kind._make([part(outputs, tensors) for part in parts])
    if kind is dict:
        named = {name: builder_of(item, sources) for name, item in result.items()}
        return lambda outputs, tensors: {name: part(outputs, tensors) for name, part in named.items()}
    if isinstance(result, collections.OrderedDict) and dataclasses.is_dataclass(result):
        return _model_output_builder(result, sources)
    raise NotUnderstood(f"the result holds a {kind.__name__}")


def _model_output_builder(result: Any, sources: Mapping[int, tuple[str, int]]) -> Build:
    """Hugging Face's output classes: every value is both an attribute and, unless None, an item.

    Their constructor costs as much as everything else here together, so the object is put together as it was found.
    """
    kind: Any = type(result)
    attributes = vars(result)
    if any(attributes.get(name) is not value for name, value in result.items()):
        raise NotUnderstood(f"the items of a {kind.__name__} are not its attributes")
    named = [(name, builder_of(value, sources)) for name, value in attributes.items()]
    items = tuple(result.keys())
    create, set_item = kind.__new__, collections.OrderedDict.__setitem__

    def build(outputs: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
        made = create(kind)
        values = {name: part(outputs, tensors) for name, part in named}
        vars(made).update(values)
        for name in items:
            set_item(made, name, values[name])
        return made

    return build


class Book:
    """The plans learnt while the model was in one state."""

    def __init__(self, state: ModelState | None) -> None:
        """state: None for the empty book of a model that has not been called."""
        self.state: Any = state
        self.plans: dict[tuple[Any, ...], list[Plan]] = {}
        self.lessons: collections.Counter[tuple[Any, ...]] = collections.Counter()
        self.kinds: dict[Any, Any] = {}  # what `kernl.buckets` has learnt of calls whatever their sizes


class FrontDoor:
    """Serves the calls of one model: directly where a plan is known, through TorchDynamo otherwise.

    Keeps no reference to the model, so that a model with a front door is freed like any other.
    """

    def __init__(self, model: nn.Module, plain: Callable[..., Any], options: Options, report: Report) -> None:
        """plain: the model's own forward, called with the model first."""
        self.options = options
        self.report = report
        self.plain = plain
        self.graphs: list[CompiledGraph] = []
        self._names = _positional_names(plain)
        self._class_name = type(model).__name__
        self._buckets = None if options.buckets == "off" else Buckets(options, report.padding, self._names)
        self._lock = threading.Lock()
        self.open()
        # TorchDynamo's side of the door refers back to it; without this, weights in plans would wait for the collector.
        door = weakref.ref(self)
        self._model = weakref.ref(model, functools.partial(_close, door))

    def open(self, *, symbolic: bool = True) -> None:
        """Start afresh: nothing is compiled, nothing is known.

        symbolic: with `dynamic=None`, whether sizes are symbols from the start or only once they have changed.
        """
        self._entry_name = _new_name(self._class_name)
        entry = _with_own_code(self.plain, self._entry_name)
        dynamic = self.options.dynamic
        if dynamic is None and symbolic:
            dynamic = True
        self._may_turn_to_fixed_sizes = dynamic is True and self.options.dynamic is None
        self._any_batch = dynamic is True
        self._use_settings(in_parts=False)
        self._start_with(torch.compile(entry, backend=self._compile, dynamic=dynamic))

    def _use_settings(self, *, in_parts: bool) -> None:
        self._in_parts = in_parts
        self._settings = dynamo_settings(self.options, in_parts=in_parts)
        self._settings_for_any_batch = dynamo_settings(self.options, one_is_a_size=self._any_batch, in_parts=in_parts)

    def close(self) -> None:
        """Let go of everything compiled and captured; no call may follow."""
        self._start_with(None)

    def _start_with(self, guarded: Callable[..., Any] | None) -> None:
        graphs, self.graphs = self.graphs, []
        self._guarded: Any = guarded
        self._broken: dict[Any, str] = {}
        self.book = Book(None)
        for graph in graphs:
            graph.release()

    def make_forward(self) -> Callable[..., Any]:
        """The function that takes the place of the model's forward."""
        door, plain, find_model, calls = self, self.plain, self._model, self.report.calls

        def forward(*args: Any, **kwargs: Any) -> Any:
            model: Any = find_model()
            if model is None:
                raise ReferenceError(
                    "the optimised model that this forward belongs to is gone: keep the model, not its forward"
                )
            if _is_compiling() or _jit_tracing_state() is not None or disabled_here.get():
                return plain(model, *args, **kwargs)
            call = read_call(args, kwargs)
            if call is not None:
                signature, tensors = call
                book = door.book
                for plan in book.plans.get(signature, ()):
                    if plan.fits():
                        try:
                            result = plan.serve(tensors, book.state, model)
                        except WeightsChanged:
                            break
                        if result is NOT_SERVED:
                            continue
                        calls.direct += 1
                        return result
            return door.through_guards(model, args, kwargs, call)

        buckets = self._buckets
        if buckets is None:
            return forward

        def padded_forward(*args: Any, **kwargs: Any) -> Any:
            model = find_model()
            if model is None or _is_compiling() or _jit_tracing_state() is not None or disabled_here.get():
                return forward(*args, **kwargs)
            return buckets.call(door, model, *door._by_name(args, kwargs), forward)

        return padded_forward

    def plan_of(self, signature: tuple[Any, ...]) -> Plan | None:
        """The plan by which a call of this signature would be served now."""
        return next((plan for plan in self.book.plans.get(signature, ()) if plan.fits()), None)

    def run(self, plan: Plan, tensors: Sequence[Tensor], book: Book, model: nn.Module) -> Any:
        """What a plan of this book serves; None when the model is not as the book has it."""
        try:
            served = plan.serve(tensors, book.state, model)
        except WeightsChanged:
            return None
        if served is NOT_SERVED:
            return None
        self.report.calls.direct += 1
        return served

    def through_guards(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: tuple[tuple[Any, ...], list[Tensor]] | None,
    ) -> Any:
        """Call through TorchDynamo, and learn from the call where it can be learnt from."""
        signature = None if call is None else call[0]
        because = self._why_plain(signature)
        if because is not None:
            self.report.calls.plain += 1
            return self.plain(model, *args, **kwargs)
        install_output_hooks(model, kwargs)
        args, kwargs = self._by_name(args, kwargs)
        state = self._state_to_learn(model, signature)
        outer, _local.runs = _local.runs, [] if state is not None else None
        started, wrote = _local.started, _local.wrote
        try:
            with self._settings() if call is None or has_length_1(call[1]) else self._settings_for_any_batch():
                result = self._guarded(model, *args, **kwargs)
            runs = _local.runs
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, Exception) and (self.options.strict or isinstance(inner, CannotCapture)):
                raise inner from None  # TorchDynamo's wrapping says nothing about it
            if self.options.strict:
                raise
            if _local.wrote != wrote or (_local.started != started and call is None):
                raise  # a part of the call has run: what it has written must not be written twice
            result = self._after_failure(error, signature, model, args, kwargs)
            runs = None
        finally:
            _local.runs = outer
        self.report.calls.guarded += 1
        if runs is not None and state is not None and call is not None:
            self._learn(model, state, call, runs, result)
        return result

    def _compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> RecordedGraph:
        """The backend of this model."""
        obstacle = obstacle_in_frame(self._entry_name)
        if obstacle == IN_PARTS and not self._in_parts:
            self._use_settings(in_parts=True)
            self.report.note(
                f"{IN_PARTS}: its parts run one after the other through TorchDynamo; past the limit of "
                f"{self.options.recompile_limit} graphs (option recompile_limit) a part runs as plain PyTorch"
            )
        with sdpa_of_any_batch(False):  # what is traced from here on may take the function apart
            graph = compile_graph(gm, example_inputs, self.options, self.report)
        self.graphs.append(graph)
        return RecordedGraph(graph, obstacle)

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call with every argument by name in the order of the signature: one spelling, one compilation."""
        if len(args) > len(self._names) or any(name in kwargs for name in self._names[: len(args)]):
            return args, kwargs  # a mistake: let forward say so
        given = {**dict(zip(self._names, args)), **kwargs}
        ordered = {name: given[name] for name in self._names if name in given}
        return (), {**ordered, **given}

    def _why_plain(self, signature: Any) -> str | None:
        """Why TorchDynamo is not asked about this call."""
        if signature in self._broken:
            return self._broken[signature]
        if len(self._broken) >= _MAX_FAILURES:
            return "TorchDynamo failed too often"
        return None

    def _after_failure(
        self, error: Exception, signature: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Serve a call that TorchDynamo could not; if plain PyTorch cannot either, the mistake is the caller's."""
        try:
            result = self.plain(model, *args, **kwargs)
        except Exception as users_error:
            raise users_error from None
        if isinstance(error, FailOnRecompileLimitHit):
            reason = f"the limit of {self.options.recompile_limit} compiled graphs is reached (option recompile_limit)"
        else:
            reason = reason_of(error)
            if self._may_turn_to_fixed_sizes and not isinstance(error, BackendCompilerFailed):
                self.report.note(f"sizes are not symbols from the start, as TorchDynamo cannot trace that: {reason}")
                self.open(symbolic=False)
                return result
        with self._lock:
            self._broken[signature] = reason
        self.report.note(f"a kind of call runs as plain PyTorch: {reason}")
        warn_once(f"call:{id(self)}:{reason}", f"kernl runs calls of {self.report.subject} as plain PyTorch: {reason}")
        return result

    def _state_to_learn(self, model: nn.Module, signature: Any) -> ModelState | None:
        """A snapshot to learn this call with; None when there is nothing to learn."""
        if signature is None:
            if self.options.guards == "fast":
                self.report.calls.closed["an argument cannot be compared by value"] += 1
            return None
        if self.options.guards == "full" or self.book.lessons[signature] >= _MAX_LESSONS:
            return None
        if _count_dispatch_modes() or _transforms() or _eval_frame._stance.stance != "default":
            return None
        try:
            state = ModelState(model)
        except (RuntimeError, NotImplementedError) as error:  # weights without an address: sparse, fake, wrapped
            self.report.calls.closed[f"weights cannot be compared ({reason_of(error)})"] += 1
            return None
        return state

    def _learn(
        self,
        model: nn.Module,
        state: ModelState,
        call: tuple[tuple[Any, ...], list[Tensor]],
        runs: Sequence[Run],
        result: Any,
    ) -> None:
        signature, tensors = call
        plan = None
        try:
            understood = understand(runs, result, tensors, state)
            if not state.unchanged(model):
                raise NotUnderstood("the call changed the model")
            plan = understood
        except NotUnderstood as reason:
            self.report.calls.closed[str(reason)] += 1
        with self._lock:
            if self.book.state is None or not self.book.state.unchanged(model):
                self.book = Book(state)
            book = self.book
            if plan is None:
                if len(book.lessons) >= _MAX_SIGNATURES:
                    book.lessons.clear()
                book.lessons[signature] += 1
                return
            while len(book.plans) >= _MAX_SIGNATURES and signature not in book.plans:
                book.plans.pop(next(iter(book.plans)))
            # Served in the order of learning; a plan that fits no more is found out by `fits`.
            book.plans[signature] = [known for known in book.plans.get(signature, []) if not known.fits()] + [plan]
            self.report.calls.signatures = len(book.plans)


def _close(door: weakref.ref[FrontDoor], _: object) -> None:
    """The model is gone, perhaps because the interpreter is going: nothing may be raised, and globals may be gone."""
    try:
        alive = door()
        if alive is not None:
            alive.close()
    except Exception:
        pass


_numbers = itertools.count()


def _new_name(class_name: str) -> str:
    return f"kernl_{class_name}_{next(_numbers)}"


def _with_own_code(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function TorchDynamo compiles. It keeps what it compiles per code object, so each model gets its own."""

    def entry(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return plain(model, *args, **kwargs)

    code = entry.__code__.replace(co_name=name)
    return types.FunctionType(code, entry.__globals__, name, None, entry.__closure__)


def _positional_names(plain: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters after the model that may be given by position or by name; () when there is `*args`."""
    parameters = list(inspect.signature(plain).parameters.values())[1:]
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY) for parameter in parameters):
        return ()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)


def install_output_hooks(model: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """Let transformers put its hooks for hidden states and attentions in place now.

    It does so by itself in the first call that asks for such outputs, behind a lock that TorchDynamo cannot trace: that
    call would fall apart into many graphs, and the next one would be compiled again.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    config = getattr(model, "config", None)
    asked = [value for name, value in kwargs.items() if name.startswith("output_")]
    asked += [getattr(config, name, None) for name in ("output_hidden_states", "output_attentions")]
    if capturing is None or all(value is None or value is False for value in asked):
        return
    for module in model.modules():
        if _collects_outputs(type(module)):
            capturing.maybe_install_capturing_hooks(module)


def _collects_outputs(kind: type) -> bool:
    """Whether a class's forward is wrapped by transformers' collector of outputs."""
    function = getattr(kind, "forward", None)
    while function is not None:
        code = getattr(function, "__code__", None)
        if code is not None and code.co_filename.endswith("output_capturing.py"):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
