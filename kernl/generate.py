"""Text generation with the loop on the GPU: `kernl.generate`, and `optimize_model(model, generate="fast")`.

    tokens = kernl.generate(model, **tokenizer(texts, padding=True, return_tensors="pt"), max_new_tokens=64)

Arguments and results are those of transformers' `model.generate`. Its loop costs the host about a millisecond a token,
several times what a small model costs the GPU. Here the host launches one CUDA graph a token and looks at the device
only every few tokens, to see whether all rows have ended; tokens beyond the end are cut off.

**Who does what.** transformers prepares everything, so that arguments mean the same and mistakes raise the same errors:
its `generate` is called with `custom_generate=` a function of ours in the place of its loop. By then inputs are
checked, the encoder has run (through a front door of its own), logits processors and stopping criteria are made. Our
function runs prefill and steps (`kernl.decoding`) with choices of tokens (`kernl.token_choice`).

**What cannot run that way** (beam search, streamers, processors and criteria that need the host, scores to be returned)
runs in transformers' own loop, over the same prefill and steps (`kernl.transformers_loop`). What cannot run so either
(caches of other kinds, attentions to be returned, ...) runs in transformers' loop over the model as it is. The report
says how often and why (`kernl.generation_call`); nothing was generated before. transformers would compile models with a
static cache by itself; that is switched off for the call, as kernl does it.

**Kept between calls**: memories by batch and capacity, and the graphs in them. They are dropped when anything about the
model changes that `kernl.model_state` notices, least recently used ones when there are many, and by `release()`.
Calls for one model run one after the other, but for those in transformers' loop, whose steps take turns.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import EncoderDecoderCache, GenerationMixin

from kernl.backend import CompiledGraph, InsistentRunner, kind_of, load_options
from kernl.decoding import DecodingMemory, LayerShape, Layout, LogitsProgram, Program, TokenProgram, lazy_cache
from kernl.front_door import FrontDoor, RecordedGraph, disabled_here
from kernl.generation_call import (
    MODES,
    Call,
    Prepared,
    last_position,
    read_model_arguments,
    refuse_steps,
    refuse_what_needs_the_host,
    why_not_by_arguments,
)
from kernl.handle import Handle
from kernl.model_state import ModelState
from kernl.options import Options
from kernl.report import Report, reason_of, warn_once
from kernl.runtime.cuda_graph import CudaGraphRunner
from kernl.token_choice import TokenChoice, Unserved
from kernl.transformers_loop import Steps, run_transformers_loop

Tensor = torch.Tensor

LOOK_EVERY = 8
"""Tokens between two looks of the host at whether all rows have ended."""

_MAX_MEMORIES = 16
_MAX_PROGRAMS = 8  # a memory: ways to choose tokens

OPTION_HF = 'option generate="hf"'


class _StartAgain(Exception):
    """Why transformers' `generate` has to begin once more, without a loop of ours in it."""


def generate(model: nn.Module, /, inputs: Tensor | None = None, **arguments: Any) -> Any:
    """`model.generate(inputs, **arguments)` with the loop on the GPU where it can be.

    model: a transformers model that generates; optimised by `optimize_model` or not (then with default options).
    inputs, arguments: those of transformers' `generate`: `input_ids` (int64 [batch, length]) or another main input,
        `attention_mask`, `max_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`, `eos_token_id`, ...

    Returns what transformers returns: tokens, int64 [batch, length], prompt included unless the model has an encoder.

    Raises TypeError when the model cannot generate, and whatever transformers raises for its arguments.
    """
    if not isinstance(model, nn.Module) or not isinstance(model, GenerationMixin):
        raise TypeError(f"model is a {type(model).__name__}; accepted is a transformers model that has `generate`")
    given = arguments if inputs is None else {"inputs": inputs, **arguments}
    if disabled_here.get():
        return _own_generate(model)(**given)
    return loop_of(model).generate(model, _own_generate(model), given, None)


def loop_of(model: Any) -> GenerationLoop:
    """The loop of a model; its `report` is that of the optimised model, or one of its own."""
    handle = vars(model).get("kernl")
    if isinstance(handle, Handle):
        if handle.loop is None:
            handle.loop = GenerationLoop(model, handle.plain_forward, handle.options, handle.report())
        return handle.loop
    with _loops_lock:
        if model not in _loops:
            from kernl.optimize import plain_forward, refuse_unfit

            refuse_unfit(model)
            options = load_options({})
            plain = plain_forward(model, vars(model).get("forward"))
            _loops[model] = GenerationLoop(model, plain, options, Report(type(model).__name__, options))
        return _loops[model]


_loops: weakref.WeakKeyDictionary[Any, GenerationLoop] = weakref.WeakKeyDictionary()
_encoder_locks: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()
_loops_lock = threading.Lock()


def make_generate(model: nn.Module, handle: Handle) -> Callable[..., Any]:
    """The function that takes the place of an optimised model's `generate`, by `Options.generate`."""
    find_model = weakref.ref(model)
    original = _own_generate(model)
    own = vars(model).get("generate")
    names = list(inspect.signature(original).parameters)

    @functools.wraps(getattr(original, "__func__", original))
    def generate(*args: Any, **kwargs: Any) -> Any:
        model: Any = find_model()
        if model is None:
            raise ReferenceError("the optimised model that this `generate` belongs to is gone: keep the model")
        transformers_generate = functools.partial(type(model).generate, model) if own is None else own
        if disabled_here.get() or len(args) > len(names) or set(names[: len(args)]) & kwargs.keys():
            return transformers_generate(*args, **kwargs)  # a mistake in the arguments: let transformers say so
        given = {**dict(zip(names, args)), **kwargs}
        is_fast = handle.options.generate == "fast"
        return loop_of(model).generate(model, transformers_generate, given, None if is_fast else OPTION_HF)

    generate.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return generate


PREPARES_ENCODER = (
    "_prepare_text_encoder_decoder_kwargs_for_generation",
    "_prepare_encoder_decoder_kwargs_for_generation",  # transformers before 5.24
)
"""Methods of transformers that run a model's encoder for `generate`, past the model's forward."""


def make_prepare_encoder(model: Any) -> dict[str, Callable[..., Any]]:
    """What takes the place of such a method of an optimised model, by name: with it the encoder is optimised too."""
    name = next((name for name in PREPARES_ENCODER if hasattr(model, name)), None)
    if name is None or not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return {}
    find_model = weakref.ref(model)
    own = vars(model).get(name)

    @functools.wraps(getattr(type(model), name, own))
    def prepare(*args: Any, **kwargs: Any) -> Any:
        model: Any = find_model()
        if model is None:
            raise ReferenceError("the optimised model that this method belongs to is gone: keep the model")
        original = functools.partial(getattr(type(model), name), model) if own is None else own
        if disabled_here.get():
            return original(*args, **kwargs)
        with loop_of(model).encoder_served(model):
            return original(*args, **kwargs)

    return {name: prepare}


def _own_generate(model: Any) -> Callable[..., Any]:
    """The model's `generate` without kernl's."""
    handle = vars(model).get("kernl")
    if isinstance(handle, Handle):
        return handle.before.get("generate") or functools.partial(type(model).generate, model)
    own: Callable[..., Any] = model.generate
    if isinstance(own, functools.partial) and own.func in (generate, sys.modules[__name__]):
        return functools.partial(type(model).generate, model)  # kernl.generate, put there by the user
    return own


def _without_compilation(own: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """transformers' `generate` without its compilation; the caller's generation config stays as it is."""
    config = given.get("generation_config")
    if config is None:
        parameters = inspect.signature(own).parameters
        if "disable_compile" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return own(**given)  # a `generate` of the model's own, which takes other arguments
        return own(**{"disable_compile": True, **given})
    config = copy.deepcopy(config)
    config.disable_compile = True
    return own(**{**given, "generation_config": config})


class GenerationLoop:
    """What serves `generate` of one model, with what it keeps between calls. Does not keep the model alive.

    plain: the model's own forward, called with the model first.
    """

    def __init__(self, model: nn.Module, plain: Callable[..., Any], options: Options, report: Report) -> None:
        self.options = options
        self.report = report
        self.look_every = LOOK_EVERY
        self._find_model = weakref.ref(model)
        self._lock = threading.RLock()
        self._lanes: set[int] = set()
        without_graphs = replace(options, cuda_graph="never", guards="full", buckets="off")
        self._door = StepDoor(model, _with_preparation(plain), without_graphs, report)
        self._encoder_door: FrontDoor | None = None
        self._find_encoder: Callable[[], Any] = lambda: None
        self._state: ModelState | None = None
        self._kinds: list[Any] = []
        self._shapes: dict[Any, tuple[list[LayerShape], list[LayerShape]]] = {}
        self._memories: collections.OrderedDict[Layout, DecodingMemory] = collections.OrderedDict()
        self._programs: dict[Layout, collections.OrderedDict[Any, Program]] = {}
        report.generation.graphs = self._count_graphs

    def generate(self, model: Any, own: Callable[..., Any], given: dict[str, Any], why_not_fast: str | None) -> Any:
        """Serve a call by the fastest loop that can.

        own: the model's `generate` as transformers has it. given: its arguments, by name. why_not_fast: why kernl's
        own loop is not wanted, if it is not.
        """
        reason = why_not_by_arguments(model, given)
        if reason is None:
            generators = torch.get_rng_state(), _cuda_rng_state(model.device)
            try:
                return self._prepared_by_transformers(model, own, given, why_not_fast)
            except _StartAgain as again:
                reason = str(again)
            # Models that generate in several parts may have sampled some of them.
            torch.set_rng_state(generators[0])
            _set_cuda_rng_state(model.device, generators[1])
        self.report.generation.transformers[reason] += 1
        return _without_compilation(own, given)

    def release(self) -> None:
        """Give all memory back: caches, graphs and their pool. What was compiled stays."""
        with self._lock:
            self._release_loop()
            for graph in self.encoder_graphs():
                graph.release()

    def _release_loop(self) -> None:
        for runner in self.runners():
            runner.release()
        self._programs.clear()
        self._memories.clear()

    def forget(self) -> None:
        """Start afresh: nothing is compiled, nothing is known about the model."""
        with self._lock:
            self.release()
            self._state = None
            self._shapes.clear()
            self._door.open()
            if self._encoder_door is not None:
                self._encoder_door.open()

    def encoder_graphs(self) -> list[CompiledGraph]:
        """What is compiled of the encoder, with its CUDA graphs."""
        return [] if self._encoder_door is None else list(self._encoder_door.graphs)

    def runners(self) -> list[CudaGraphRunner]:
        """Of prefill and steps."""
        return [
            runner
            for of_one in _values_now(self._programs)
            for program in _values_now(of_one)
            for runner in program.runners
        ]

    def memory_bytes(self) -> int:
        """Bytes of the static caches and the tensors beside them."""
        return sum(memory.nbytes for memory in _values_now(self._memories))

    def _count_graphs(self) -> dict[str, Any]:
        runners = self.runners()
        skipped: collections.Counter[str] = collections.Counter()
        for runner in runners:
            skipped.update(runner.skips)
        return {"captured": sum(runner.graph_count() for runner in runners), "skipped": dict(skipped)}

    def _prepared_by_transformers(
        self, model: Any, own: Callable[..., Any], given: dict[str, Any], why_not_fast: str | None
    ) -> Any:
        """Call transformers' `generate` with one of our loops in the place of its own."""
        with contextlib.ExitStack() as encoder:

            def loop(
                model: Any,
                /,
                input_ids: Tensor,
                logits_processor: Any = None,
                stopping_criteria: Any = None,
                generation_config: Any = None,
                **model_kwargs: Any,
            ) -> Any:
                encoder.close()
                prepared = Prepared(
                    input_ids,
                    logits_processor,
                    stopping_criteria,
                    generation_config,
                    model_kwargs,
                    given.get("streamer"),
                )
                return self._serve(model, prepared, why_not_fast)

            if getattr(model.config, "is_encoder_decoder", False):
                encoder.enter_context(self.encoder_served(model))
            tokens = own(**{**given, "custom_generate": loop})
        return tokens

    def _serve(self, model: Any, prepared: Prepared, why_not_fast: str | None) -> Any:
        counts = self.report.generation
        try:
            refuse_steps(model, prepared)
            with self._lane() as lane:
                if why_not_fast is None:
                    try:
                        refuse_what_needs_the_host(prepared)
                        return self._loop(model, prepared, lane)
                    except Unserved as unserved:
                        why_not_fast = str(unserved)
                result = self._transformers_loop(model, prepared, lane)
                counts.stepped[why_not_fast] += 1
                return result
        except Unserved as unserved:
            reason = str(unserved)
        if prepared.mode not in MODES:
            raise _StartAgain(reason)
        counts.transformers[reason] += 1
        return run_transformers_loop(model, prepared)

    @contextlib.contextmanager
    def _lane(self) -> Iterator[int]:
        """The number of a call among those that run now: each has memories of its own."""
        with self._lock:
            lane = next(lane for lane in itertools.count() if lane not in self._lanes)
            self._lanes.add(lane)
        try:
            yield lane
        finally:
            with self._lock:
                self._lanes.discard(lane)

    def encoder_served(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, calls of the model's encoder, which transformers' `generate` makes by itself, go through a door."""
        encoder = model.get_encoder()
        return _served_by(encoder, self._door_of(encoder))

    def _door_of(self, encoder: nn.Module) -> FrontDoor:
        """The front door of the encoder that the model has now."""
        if self._encoder_door is None or self._find_encoder() is not encoder:
            from kernl.optimize import plain_forward

            if self._encoder_door is not None:
                self._encoder_door.close()
            plain = plain_forward(encoder, vars(encoder).get("forward"))
            self._encoder_door = FrontDoor(encoder, plain, self.options, self.report)
            self._find_encoder = weakref.ref(encoder)
        return self._encoder_door

    def _loop(self, model: Any, prepared: Prepared, lane: int) -> Tensor:
        """Generate with tokens chosen on the device. Returns int64 [batch, length + new tokens]."""
        choice = TokenChoice(prepared.config, prepared.processors, prepared.criteria, prepared.prompt)
        call = read_model_arguments(model, prepared, choice.max_length, lane)
        with self._lock:
            self._follow_changes(model)
            return self._choose_all(model, call, choice)

    def _choose_all(self, model: Any, call: Call, choice: TokenChoice) -> Tensor:
        prompt = call.prompt
        memory, program = self._token_program(model, call.layout, choice, call)
        program.prefill(prompt, call.tensors, call.encoder, choice.ignored)
        length, since_look = prompt.shape[1] + 1, 1
        last = last_position(model.config)
        generators = RememberedGenerator(prompt.device, self.look_every) if choice.do_sample else None
        while length < choice.max_length:
            # Past the last position a step could fail, so there the host must know that it is wanted.
            if choice.eos is not None and (since_look >= self.look_every or length > last):
                self.report.generation.looks += 1
                since_look = 0
                if not memory.unfinished.any():
                    break
            if length > memory.layout.capacity:
                smaller = memory
                memory, program = self._token_program(model, memory.layout.larger(length), choice, call)
                memory.take_over(smaller)
            program.step()
            length, since_look = length + 1, since_look + 1
            if generators is not None:
                generators.remember()
        produced = int(memory.produced)
        if generators is not None:
            generators.rewind(length - prompt.shape[1] - produced)
        self.report.generation.fast += 1
        self.report.generation.tokens += produced * prompt.shape[0]
        return memory.tokens[:, : prompt.shape[1] + produced].clone()

    def _transformers_loop(self, model: Any, prepared: Prepared, lane: int) -> Any:
        """Generate in transformers' loop over our steps."""
        call = read_model_arguments(model, prepared, prepared.config.max_length, lane)
        with self._lock:
            self._follow_changes(model)
        steps = Steps(call, functools.partial(self._logits_program, model, call), self._lock)
        result = run_transformers_loop(model, prepared, steps)
        self.report.generation.tokens += steps.new_tokens
        return result

    def _follow_changes(self, model: nn.Module) -> None:
        """Drop what belongs to the model as it was."""
        state = self._state
        if (
            state is not None
            and state.unchanged(model, addresses=False)
            and self._kinds == list(map(kind_of, state.tensors))
        ):
            return
        self._release_loop()
        self._shapes.clear()
        try:
            self._state = ModelState(model)
        except (RuntimeError, NotImplementedError) as error:
            raise Unserved(f"weights cannot be compared ({reason_of(error)})") from None
        self._kinds = list(map(kind_of, self._state.tensors))

    def _token_program(
        self, model: Any, layout: Layout, choice: TokenChoice, call: Call
    ) -> tuple[DecodingMemory, TokenProgram]:
        memory = self._memory(model, layout, call)
        return memory, self._program(memory, choice.key, functools.partial(TokenProgram, choice))

    def _logits_program(self, model: Any, call: Call, layout: Layout) -> LogitsProgram:
        return self._program(self._memory(model, layout, call), LogitsProgram, LogitsProgram)

    def _program(self, memory: DecodingMemory, key: Any, make: Callable[..., Any]) -> Any:
        """The program of a key that runs in this memory."""
        programs = self._programs.setdefault(memory.layout, collections.OrderedDict())
        if key not in programs:
            if len(programs) >= _MAX_PROGRAMS:
                programs.popitem(last=False)[1].release()
            assert self._state is not None
            make_runner = self._make_runner if self._takes_graphs(memory.layout.device) else None
            programs[key] = make(memory, self._forward, self._state.tensors, make_runner)
        programs.move_to_end(key)
        return programs[key]

    def _memory(self, model: Any, layout: Layout, call: Call) -> DecodingMemory:
        if layout not in self._memories:
            own, cross = self._layer_shapes(model, layout, call)
            config = model.config.get_text_config(decoder=True)
            try:
                memory = DecodingMemory(layout, config, own, cross)
            except torch.OutOfMemoryError:
                memory = None
            if memory is None:
                self._drop_memories(keep=call.layout)
                memory = DecodingMemory(layout, config, own, cross)
            if len(self._memories) >= _MAX_MEMORIES:
                self._drop(next(iter(self._memories)))
            self._memories[layout] = memory
        self._memories.move_to_end(layout)
        return self._memories[layout]

    def _drop_memories(self, keep: Layout) -> None:
        """Make room: all memories go but those of the running call."""
        for layout in list(self._memories):
            if replace(layout, capacity=0) != replace(keep, capacity=0):
                self._drop(layout)

    def _drop(self, layout: Layout) -> None:
        del self._memories[layout]
        for program in self._programs.pop(layout, {}).values():
            program.release()

    def _layer_shapes(self, model: Any, layout: Layout, call: Call) -> tuple[list[LayerShape], list[LayerShape]]:
        """Heads and dimensions of the cache's layers, which only the model knows: by one plain call of it."""
        key = (layout.encoder is not None, layout.autocast)
        if key not in self._shapes:
            config = model.config.get_text_config(decoder=True)
            own = lazy_cache(config, layout.capacity)
            cross = lazy_cache(config, layout.encoder[0][1]) if layout.encoder is not None else None
            inputs = dict(call.original)
            inputs[layout.cache_name] = own if cross is None else EncoderDecoderCache(own, cross)
            try:
                with torch.no_grad():
                    self._door.plain(model, call.prompt, is_first_iteration=True, **inputs)
            except RuntimeError as error:
                if layout.autocast is None or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise Unserved(f"a static cache under autocast: {reason_of(error)}") from None  # keys and values differ
            layers: Any = [] if cross is None else cross.layers
            self._shapes[key] = [LayerShape.of(x) for x in own.layers], [LayerShape.of(x) for x in layers]
        return self._shapes[key]

    def _forward(self, tokens: Tensor, **arguments: Any) -> Any:
        model: Any = self._find_model()
        return self._door.through_guards(model, (tokens,), arguments, None)

    def _takes_graphs(self, device: torch.device) -> bool:
        if self.options.cuda_graph == "always" and device.type != "cuda":
            raise Unserved(f"no CUDA graph can be captured on the {device.type.upper()}")
        return device.type == "cuda" and self.options.cuda_graph != "never"

    def _make_runner(self, function: Callable[..., Any], fixed: int, written: int) -> CudaGraphRunner:
        def on_skip(reason: str) -> None:
            self.report.note(f"generation runs without a CUDA graph: {reason}")
            warn_once(f"skip:{reason}", f"kernl generates with {self.report.subject} without a CUDA graph: {reason}")

        make = InsistentRunner if self.options.cuda_graph == "always" else CudaGraphRunner
        return make(
            function,
            fixed_inputs=range(fixed),
            mutated_inputs=range(written),  # so that half of a step is never followed by a whole one
            max_graphs=self.options.max_graphs,
            on_skip=on_skip,
        )


def _values_now(mapping: Mapping[Any, Any]) -> list[Any]:
    """The values of a mapping that another thread, which is generating, may change at any moment."""
    while True:
        with contextlib.suppress(RuntimeError):
            return list(mapping.values())


def _with_preparation(plain: Callable[..., Any]) -> Callable[..., Any]:
    """A forward that takes what transformers' loop hands to `prepare_inputs_for_generation`.

    What that prepares, masks above all, so becomes a part of the compiled graph.
    """

    def forward(model: Any, tokens: Tensor, **arguments: Any) -> Any:
        return plain(model, **model.prepare_inputs_for_generation(tokens, **arguments), return_dict=True)

    return forward


class StepDoor(FrontDoor):
    """Compiles the model for prefill and steps: without CUDA graphs, as each graph is of a whole step."""

    def _compile(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> RecordedGraph:
        fill_on_device(gm)
        recorded = super()._compile(gm, example_inputs)
        recorded.graph.entry.no_cuda_graph_because = "part of generation's own graphs"
        return recorded


def fill_on_device(gm: torch.fx.GraphModule) -> None:
    """Write `torch.tensor(number, device=...)` as `torch.full`: the first copies from the host, and is waited for."""
    for node in gm.graph.find_nodes(op="call_function", target=torch.tensor):
        data, *rest = node.args
        if isinstance(data, (bool, int, float)) and not rest and set(node.kwargs) <= {"dtype", "device"}:
            node.target, node.args = torch.full, ((), data)
    gm.recompile()


_SERVED = ("forward", "__getstate__")
_served_now: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def _served_by(module: nn.Module, door: FrontDoor) -> Iterator[None]:
    """Inside, calls of a module go through a front door. Models that share it wait for one another."""
    with _loops_lock:
        lock = _encoder_locks.setdefault(module, threading.RLock())
    with lock:
        if module in _served_now:
            yield  # by whoever called what called this
            return
        places, before = vars(module), {name: vars(module)[name] for name in _SERVED if name in vars(module)}
        forward = _like(door.make_forward(), module.forward)

        def state_without_kernl() -> Any:
            """`module.__getstate__`: a copy that is made now, by a hook or another thread, is of the plain module."""
            from kernl.optimize import state_by_class

            state = dict(state_by_class(module))
            for name in _SERVED:
                del state[name]
            return {**state, **before}

        places |= {"forward": forward, "__getstate__": state_without_kernl}
        _served_now.add(module)
        try:
            yield
        finally:
            _served_now.discard(module)
            for name in _SERVED:
                del places[name]
            places |= before


def _like(forward: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return forward


class RememberedGenerator:
    """States of the random number generator after each of the last tokens.

    The loop may sample a few tokens too many before it sees that all rows have ended. Rewound, the generator is where
    transformers' loop would have left it.
    """

    def __init__(self, device: torch.device, steps: int) -> None:
        self._device = device
        self._states: collections.deque[Any] = collections.deque(maxlen=steps + 1)
        self.remember()

    def remember(self) -> None:
        on_gpu = self._device.type == "cuda"
        self._states.append(_cuda_rng_state(self._device) if on_gpu else torch.get_rng_state())

    def rewind(self, tokens: int) -> None:
        """Undo so many of the last tokens."""
        if tokens == 0:
            return
        state = self._states[-1 - tokens]
        if self._device.type == "cuda":
            _set_cuda_rng_state(self._device, state)
        else:
            torch.set_rng_state(state)


def _cuda_rng_state(device: torch.device) -> int | None:
    """How far the GPU's default generator has come, read without asking the GPU; None for other devices."""
    if device.type != "cuda":
        return None
    offset: int = torch.cuda.default_generators[device.index or 0].get_offset()
    return offset


def _set_cuda_rng_state(device: torch.device, offset: int | None) -> None:
    if offset is not None:
        torch.cuda.default_generators[device.index or 0].set_offset(offset)


class _CallableModule(types.ModuleType):
    """This module has the name of its function, and importing it puts it where `kernl.generate` is looked up."""

    def __call__(self, model: nn.Module, /, inputs: Tensor | None = None, **arguments: Any) -> Any:
        return generate(model, inputs, **arguments)


sys.modules[__name__].__class__ = _CallableModule
