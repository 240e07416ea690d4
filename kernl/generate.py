"""Text generation with the loop on the GPU: `kernl.generate`, and `optimize_model(model, generate="fast")`.

    tokens = kernl.generate(model, **tokenizer(texts, padding=True, return_tensors="pt"), max_new_tokens=64)

Arguments and results are those of transformers' `model.generate`. Its loop costs the host about a millisecond a token,
several times what a small model costs the GPU. Here the host launches one CUDA graph a token and looks at the device
only every few tokens, to see whether all rows have ended; tokens beyond the end are cut off.

**Who does what.** transformers prepares everything, so that arguments mean the same and mistakes raise the same errors:
its `generate` is called with `custom_generate=` a function of ours in the place of its loop. By then inputs are
checked, the encoder has run (through a front door of its own), logits processors and stopping criteria are made. Our
function runs prefill and steps (`kernl.decoding`) with choices of tokens (`kernl.token_choice`).

**What cannot run that way** (beam search, streamers, processors and criteria that need the host, scores or states to be
returned, ...) runs in transformers' own loop, and the report says how often and why. Nothing was generated before.
transformers would compile models with a static cache by itself; that is switched off for the call, as kernl does it.

**Kept between calls**: memories by batch and capacity, and the graphs in them. They are dropped when anything about the
model changes that `kernl.model_state` notices, least recently used ones when there are many, and by `release()`.
Calls for one model run one after the other.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import Cache, EncoderDecoderCache, GenerationMixin
from transformers.generation import GenerationMode

from kernl.backend import CompiledGraph, InsistentRunner, kind_of, load_options
from kernl.decoding import (
    ADVANCES,
    GROWS,
    REPEATS,
    STAYS,
    STEP,
    Argument,
    DecodingMemory,
    LayerShape,
    Layout,
    Program,
    capacity_for,
    encoder_capacity_for,
    lazy_cache,
)
from kernl.front_door import FrontDoor, RecordedGraph, disabled_here
from kernl.handle import Handle
from kernl.model_state import ModelState
from kernl.options import Options
from kernl.report import Report, reason_of, warn_once
from kernl.runtime.cuda_graph import CudaGraphRunner
from kernl.token_choice import TokenChoice, Unserved

Tensor = torch.Tensor

LOOK_EVERY = 8
"""Tokens between two looks of the host at whether all rows have ended."""

_MAX_MEMORIES = 16
_MAX_PROGRAMS = 8  # a memory: ways to choose tokens

_BECOMES = {"attention_mask": GROWS, "position_ids": ADVANCES, "token_type_ids": REPEATS}
_BECOMES_WITH_ENCODER = {"attention_mask": STAYS, "decoder_attention_mask": GROWS, "decoder_position_ids": ADVANCES}
_NEED_TRANSFORMERS_LOOP = ("streamer", "assistant_model", "custom_generate", "tokenizer", "synced_gpus")
_NEED_TRANSFORMERS_LOOP_SET = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
    "prefill_chunk_size",
    "max_time",
    "stop_strings",
)


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
    return loop_of(model).generate(model, _own_generate(model), given)


def loop_of(model: Any) -> FastLoop:
    """The loop of a model; its `report` is that of the optimised model, or one of its own."""
    handle = vars(model).get("kernl")
    if isinstance(handle, Handle):
        if handle.loop is None:
            handle.loop = FastLoop(model, handle.plain_forward, handle.options, handle.report())
        return handle.loop
    with _loops_lock:
        if model not in _loops:
            from kernl.optimize import plain_forward, refuse_unfit

            refuse_unfit(model)
            options = load_options({})
            plain = plain_forward(model, vars(model).get("forward"))
            _loops[model] = FastLoop(model, plain, options, Report(type(model).__name__, options))
        return _loops[model]


_loops: weakref.WeakKeyDictionary[Any, FastLoop] = weakref.WeakKeyDictionary()
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
        if handle.options.generate == "fast":
            return loop_of(model).generate(model, transformers_generate, given)
        return _in_transformers_loop(transformers_generate, given, handle.report(), 'option generate="hf"')

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


def _in_transformers_loop(own: Callable[..., Any], given: Mapping[str, Any], report: Report, reason: str) -> Any:
    """transformers' own loop, without its compilation; the caller's generation config stays as it is."""
    report.generation.transformers[reason] += 1
    config = given.get("generation_config")
    if config is None:
        parameters = inspect.signature(own).parameters
        if "disable_compile" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return own(**given)  # a `generate` of the model's own, which takes other arguments
        return own(**{"disable_compile": True, **given})
    config = copy.deepcopy(config)
    config.disable_compile = True
    return own(**{**given, "generation_config": config})


class FastLoop:
    """The loop of one model, with what it keeps between calls. Does not keep the model alive.

    plain: the model's own forward, called with the model first.
    """

    def __init__(self, model: nn.Module, plain: Callable[..., Any], options: Options, report: Report) -> None:
        self.options = options
        self.report = report
        self.look_every = LOOK_EVERY
        self._find_model = weakref.ref(model)
        self._lock = threading.RLock()
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

    def generate(self, model: Any, own: Callable[..., Any], given: dict[str, Any]) -> Any:
        """own: the model's `generate` as transformers has it. given: its arguments, by name."""
        reason = why_not_by_arguments(model, given)
        if reason is None:
            generators = torch.get_rng_state(), _cuda_rng_state(model.device)
            try:
                with self._lock:
                    return self._prepared_by_transformers(model, own, given)
            except Unserved as unserved:
                reason = str(unserved)
            # Models that generate in several parts may have sampled some of them.
            torch.set_rng_state(generators[0])
            _set_cuda_rng_state(model.device, generators[1])
        return _in_transformers_loop(own, given, self.report, reason)

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

    def _prepared_by_transformers(self, model: Any, own: Callable[..., Any], given: dict[str, Any]) -> Any:
        """Call transformers' `generate` with our loop in the place of its own."""
        with contextlib.ExitStack() as encoder:

            def loop(
                model: Any,
                /,
                input_ids: Tensor,
                logits_processor: Any = None,
                stopping_criteria: Any = None,
                generation_config: Any = None,
                **model_kwargs: Any,
            ) -> Tensor:
                encoder.close()
                return self._loop(
                    model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs
                )

            if getattr(model.config, "is_encoder_decoder", False):
                encoder.enter_context(self.encoder_served(model))
            tokens = own(**{**given, "custom_generate": loop})
        return tokens

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

    def _loop(
        self,
        model: Any,
        prompt: Tensor,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        config: Any,
        model_kwargs: dict[str, Any],
    ) -> Tensor:
        """Generate. prompt: int64 [batch, length]. Returns int64 [batch, length + new tokens]."""
        refuse_what_needs_transformers(model, prompt, config, model_kwargs)
        choice = TokenChoice(config, processors, criteria, prompt)
        call = read_model_arguments(model, prompt, choice.max_length, model_kwargs)
        self._follow_changes(model)

        memory, program = self._program(model, call.layout, choice, call)
        program.prefill(prompt, call.tensors, call.encoder, choice.ignored)
        length, since_look = prompt.shape[1] + 1, 1
        last_position = _last_position(model.config)
        generators = RememberedGenerator(prompt.device, self.look_every) if choice.do_sample else None
        while length < choice.max_length:
            # Past the last position a step could fail, so there the host must know that it is wanted.
            if choice.eos is not None and (since_look >= self.look_every or length > last_position):
                self.report.generation.looks += 1
                since_look = 0
                if not memory.unfinished.any():
                    break
            if length > memory.layout.capacity:
                smaller = memory
                memory, program = self._program(model, memory.layout.larger(length), choice, call)
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

    def _program(self, model: Any, layout: Layout, choice: TokenChoice, call: Call) -> tuple[DecodingMemory, Program]:
        memory = self._memory(model, layout, call)
        programs = self._programs.setdefault(layout, collections.OrderedDict())
        if choice.key not in programs:
            if len(programs) >= _MAX_PROGRAMS:
                programs.popitem(last=False)[1].release()
            assert self._state is not None
            make_runner = self._make_runner if self._takes_graphs(layout.device) else None
            programs[choice.key] = Program(memory, choice, self._forward, self._state.tensors, make_runner)
        programs.move_to_end(choice.key)
        return memory, programs[choice.key]

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


def why_not_by_arguments(model: Any, given: Mapping[str, Any]) -> str | None:
    """Why transformers' loop must run, where the arguments alone tell; None when they do not."""
    kind = type(model)
    is_known = kind.generate is GenerationMixin.generate or kind.generate.__module__.endswith("generation_whisper")
    own = {"_sample", "_update_model_kwargs_for_generation"}
    if (
        not is_known
        or own & vars(model).keys()
        or any(getattr(kind, n) is not getattr(GenerationMixin, n) for n in own)
    ):
        return f"{kind.__name__} has a loop of its own"
    if any(module.training for module in model.modules()):
        return "the model is in training mode"
    for name in _NEED_TRANSFORMERS_LOOP:
        if given.get(name):
            return f"argument {name}"
    configs = (given.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:
        values = (given.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    for name in _NEED_TRANSFORMERS_LOOP_SET:
        if setting(name):
            return f"argument {name}"
    if (setting("num_beams") or 1) != 1:
        return "beam search"
    if setting("use_cache") is False:
        return "argument use_cache=False"
    if given.get("past_key_values") is not None or given.get("cache") is not None:
        return "a cache is given"
    if setting("cache_implementation") not in (None, "static", "dynamic", "hybrid"):
        return f"argument cache_implementation={setting('cache_implementation')!r}"
    return None


def refuse_what_needs_transformers(model: Any, prompt: Tensor, config: Any, model_kwargs: Mapping[str, Any]) -> None:
    """Raise Unserved for what only shows once transformers has prepared the call."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise Unserved(f"generation mode {mode.value}")
    if not getattr(model, "_can_compile_fullgraph", False):
        raise Unserved(f"a {type(model).__name__} does not take a static cache")
    if model._forward_hooks or model._forward_pre_hooks:
        raise Unserved("the model has hooks")
    if prompt.device != model.device:
        raise Unserved(f"inputs are on {prompt.device}, the model is on {model.device}")
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise Unserved(f"a prompt of shape {tuple(prompt.shape)}")
    prepares = type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    masks = "decoder_attention_mask" if model.config.is_encoder_decoder else "attention_mask"
    if not prepares and model_kwargs.get(masks) is not None:
        raise Unserved(f"a {type(model).__name__} prepares its masks in its own way")


class Call:
    """The model's arguments in one call of `generate`.

    tensors: those of `layout.arguments`, in that order. encoder: states [batch, length, width] or None. original: all
    arguments as transformers has made them, the encoder's as they are above.
    """

    def __init__(self, prompt: Tensor, layout: Layout, tensors: list[Tensor], encoder: Any, original: Any) -> None:
        self.prompt = prompt
        self.layout = layout
        self.tensors = tensors
        self.encoder: Tensor | None = encoder
        self.original: dict[str, Any] = original


def read_model_arguments(model: Any, prompt: Tensor, max_length: int, model_kwargs: Mapping[str, Any]) -> Call:
    """Sort out what transformers would pass to the model at each step. Raises Unserved for what has no place."""
    arguments = dict(model_kwargs)
    caches = [name for name, value in arguments.items() if isinstance(value, Cache)]
    if len(caches) != 1:
        raise Unserved("the model's cache is not one of transformers' caches")
    del arguments[caches[0]]
    with_encoder = model.config.is_encoder_decoder
    encoder = _read_encoder(model, prompt.shape[0], arguments) if with_encoder else None

    becomes = _BECOMES_WITH_ENCODER if with_encoder else _BECOMES
    found: list[Argument] = []
    tensors: list[Tensor] = []
    plain: list[tuple[str, Any]] = []
    for name, value in arguments.items():
        if name == "encoder_outputs" and with_encoder:
            continue
        if isinstance(value, Tensor) and name in becomes:
            found.append(_read_argument(name, becomes[name], value, prompt))
            tensors.append(value)
        elif value is None or isinstance(value, (bool, int, float, str)):
            plain.append((name, value))
        else:
            raise Unserved(f"the model takes {name}, a {type(value).__name__}")
    length = prompt.shape[1]
    layout = Layout(
        batch=prompt.shape[0],
        capacity=capacity_for(max(length, min(max_length - 1, length + STEP - 1))),
        device=prompt.device,
        cache_name=caches[0],
        arguments=tuple(found),
        plain=tuple(plain),
        encoder=None if encoder is None else (tuple(encoder.shape), encoder.dtype),
        autocast=_autocast_dtype(prompt.device),
    )
    return Call(prompt, layout, tensors, encoder, arguments)


def _read_argument(name: str, becomes: str, value: Tensor, prompt: Tensor) -> Argument:
    if becomes == STAYS:
        return Argument(name, becomes, tuple(value.shape), value.dtype)
    if value.shape[-1] != prompt.shape[1] or (becomes == GROWS and value.shape != prompt.shape):
        raise Unserved(f"{name} of shape {tuple(value.shape)} for a prompt of shape {tuple(prompt.shape)}")
    shape = tuple(value.shape[:-1])
    return Argument(name, becomes, shape, value.dtype)


def _read_encoder(model: Any, batch: int, arguments: dict[str, Any]) -> Tensor:
    """The encoder's states, padded to one of a few lengths where the decoder takes a mask for them."""
    outputs = arguments["encoder_outputs"]
    states = getattr(outputs, "last_hidden_state", None)
    others = [name for name, value in outputs.items() if value is not None] if isinstance(outputs, dict) else []
    if states is None or others != ["last_hidden_state"] or states.ndim != 3 or states.shape[0] != batch:
        raise Unserved("the encoder gives more than its last states")
    length = states.shape[1]
    mask = arguments.get("attention_mask")
    takes_mask = "encoder_attention_mask" in inspect.signature(model.get_decoder().forward).parameters
    if takes_mask and (mask is None or mask.shape == states.shape[:2]):
        if mask is None:
            mask = torch.ones(states.shape[:2], dtype=torch.long, device=states.device)
        rest = encoder_capacity_for(length) - length
        arguments["attention_mask"] = nn.functional.pad(mask, (0, rest))
        states = nn.functional.pad(states, (0, 0, 0, rest))
    arguments["encoder_outputs"] = type(outputs)(last_hidden_state=states)
    return states


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def _last_position(config: Any) -> int:
    """The number of positions a model has, or more than any text."""
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    return min((limit for limit in limits if isinstance(limit, int)), default=sys.maxsize)


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
