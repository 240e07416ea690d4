"""The memory that generation runs in, and what runs in it: prefill and one decoding step.

All state of a running generation is in tensors that never move: keys and values, tokens, lengths, masks, positions.
A `Program` reads and writes nothing else, and needs no answer from the device. So on a GPU its prefill and its step are
one CUDA graph each. The host only counts.

    step    mask the token to be read in as visible
            model's own `prepare_inputs_for_generation`, forward with the static cache
            advance positions

    TokenProgram     chooses the next token too (`kernl.token_choice`), padding for rows that are finished, writes it
                     down, and notes rows that have just finished: kernl's own loop
    LogitsProgram    gives the logits away and is told the next token: transformers' loop (`kernl.transformers_loop`)

**Capacity.** The cache has one of a few lengths: 64, 128, 192, 256, 384, 512, 768, ... . When it is full, generation
moves to a larger one (`DecodingMemory.take_over`); sizes are symbols in the compiled model, so nothing is compiled
again. Encoder states are padded to a few lengths as well where the decoder takes a mask for them.

**Layers with a sliding window** get all of the capacity too; the window is then in the mask. transformers' own static
layer for them rolls its content by Python counters, which a graph would freeze.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import EncoderDecoderCache, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer
from transformers.modeling_outputs import BaseModelOutput

from kernl.runtime.cuda_graph import CudaGraphRunner
from kernl.token_choice import TokenChoice, Unserved

Tensor = torch.Tensor

STEP = 64
"""Least length of a cache."""


def capacity_for(length: int) -> int:
    """The least cache length of 64, 128, 192, 256, 384, 512, 768, ... that holds `length` positions."""
    capacity = STEP
    while capacity < length:
        capacity *= 2
    three_quarters = capacity // 4 * 3
    return three_quarters if length <= three_quarters and three_quarters % STEP == 0 else capacity


def encoder_capacity_for(length: int) -> int:
    """The same for encoder states: 32, 96, 160, 224, 352, ... .

    Never a cache's length: TorchDynamo takes sizes that are equal by chance for one size, and would compile again as
    soon as they differ.
    """
    return capacity_for(length + STEP // 2) - STEP // 2


# What becomes of an argument of the model from one step to the next.
GROWS = "grows"  # a mask over the tokens so far: [batch, length], a column of ones a step
ADVANCES = "advances"  # positions: [..., length], the last one plus one
REPEATS = "repeats"  # token types: [..., length], the last one again
STAYS = "stays"  # the encoder's mask: as it is


@dataclasses.dataclass(frozen=True)
class Argument:
    """A tensor that the model takes at every step. shape: of the call's tensor; without its length unless it STAYS."""

    name: str
    becomes: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a DecodingMemory is made for; equal layouts can share one.

    plain: names and values of the model's arguments that are no tensors. encoder: shape and dtype of its states.
    cache_name: the argument by which the model takes its cache. autocast: the type it casts to, None when it is off.
    lane: 0, or the number of a call that runs beside others.
    """

    batch: int
    capacity: int
    device: torch.device
    cache_name: str
    arguments: tuple[Argument, ...]
    plain: tuple[tuple[str, Any], ...]
    encoder: tuple[tuple[int, ...], torch.dtype] | None
    autocast: torch.dtype | None = None
    lane: int = 0

    def larger(self, length: int) -> Layout:
        return dataclasses.replace(self, capacity=capacity_for(length))


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """Keys and values of one layer: heads, head_dim of each, and dtype."""

    heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @staticmethod
    def of(layer: Any) -> LayerShape:
        if not layer.is_initialized:
            raise Unserved("a layer of the model leaves its cache empty")
        if layer.keys.dtype != layer.values.dtype:
            raise Unserved(f"keys are {layer.keys.dtype} and values {layer.values.dtype}")
        _, heads, _, key_dim = layer.keys.shape
        return LayerShape(heads, key_dim, layer.values.shape[-1], layer.keys.dtype)


def lazy_cache(config: Any, capacity: int) -> StaticCache:
    """transformers' static cache, every layer with the full capacity; raises Unserved for states other than keys."""
    cache = StaticCache(config=config, max_cache_len=capacity)
    for layer in cache.layers:
        if type(layer) not in (StaticLayer, StaticSlidingWindowLayer):
            raise Unserved(f"the model's cache has a {type(layer).__name__}")
    cache.layers = [StaticLayer(max_cache_len=capacity) for _ in cache.layers]
    return cache


def cache_of(config: Any, capacity: int, batch: int, shapes: Sequence[LayerShape], device: torch.device) -> StaticCache:
    """The same with its memory, zeros."""
    cache = lazy_cache(config, capacity)
    for layer, shape in zip(cache.layers, shapes):
        stubs = [
            torch.empty(batch, shape.heads, 0, dim, dtype=shape.dtype, device=device)
            for dim in (shape.key_dim, shape.value_dim)
        ]
        layer.lazy_initialization(*stubs)
        for tensor in (layer.keys, layer.values, layer.cumulative_length):
            # Marked by transformers as constants of a graph: each cache would be compiled anew.
            if hasattr(tensor, "_dynamo_static_input_type"):
                del tensor._dynamo_static_input_type
        for tensor in (layer.keys, layer.values):
            # Numbers of every call, and never to be taken for a batch or a length that is equal by chance.
            torch._dynamo.mark_static(tensor, [1, 3])
    return cache


class DecodingMemory:
    """The tensors of one layout. None of them is ever replaced.

    tokens int64 [batch, capacity + 1]: prompt and new tokens. ignored int64 [batch]: leading ones no penalty counts.
    token int64 [batch, 1]: the one to read in next. length, prompt_length int64 [1].
    unfinished int64 [batch]: 1 until the row has ended. produced int64 [1]: new tokens until the last row ended.
    arguments: by name, the model's tensors as they are at a decoding step. cache: what the model gets. own_layers,
    cross_layers: the cache's layers of keys and values of tokens and of the encoder's states.
    """

    def __init__(self, layout: Layout, config: Any, shapes: Sequence[LayerShape], cross: Sequence[LayerShape]) -> None:
        self.layout = layout
        batch, capacity, device = layout.batch, layout.capacity, layout.device
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.tokens = torch.zeros(batch, capacity + 1, dtype=torch.long, device=device)
            self.ignored = torch.zeros(batch, dtype=torch.long, device=device)
            self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)
            self.length = torch.zeros(1, dtype=torch.long, device=device)
            self.prompt_length = torch.zeros(1, dtype=torch.long, device=device)
            self.unfinished = torch.ones(batch, dtype=torch.long, device=device)
            self.produced = torch.zeros(1, dtype=torch.long, device=device)
            self.arguments = {
                argument.name: torch.zeros(_static_shape(argument, capacity), dtype=argument.dtype, device=device)
                for argument in layout.arguments
            }
            own_cache = cache_of(config, capacity, batch, shapes, device)
            self.cache: Any = own_cache
            self.own_layers: list[Any] = list(own_cache.layers)
            self.cross_layers: list[Any] = []
            self.encoder: Tensor | None = None
            if layout.encoder is not None:
                encoder_shape, dtype = layout.encoder
                self.encoder = torch.zeros(encoder_shape, dtype=dtype, device=device)
                cross_cache = cache_of(config, encoder_shape[1], batch, cross, device)
                self.cache = EncoderDecoderCache(own_cache, cross_cache)
                self.cross_layers = list(cross_cache.layers)
            self._layers = [*self.own_layers, *self.cross_layers]
        self.tensors: list[Tensor] = [
            self.tokens,
            self.ignored,
            self.token,
            self.length,
            self.prompt_length,
            self.unfinished,
            self.produced,
            *self.arguments.values(),
            *([] if self.encoder is None else [self.encoder]),
            *(layer.keys for layer in self._layers),
            *(layer.values for layer in self._layers),
            *(layer.cumulative_length for layer in self._layers),
        ]

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def cross_is_filled(self, filled: bool) -> None:
        """Tell the model's Python code whether keys and values of the encoder's states are in the cache."""
        if isinstance(self.cache, EncoderDecoderCache):
            self.cache.is_updated = dict.fromkeys(range(len(self.own_layers)), filled)

    def begin(
        self, prompt: Tensor, arguments: Sequence[Tensor], encoder: Tensor | None, ignored: Tensor | None
    ) -> None:
        """Empty the cache, write the prompt and the model's arguments down. prompt: int64 [batch, length]."""
        prompt_length = prompt.shape[1]
        # What an earlier generation has left is hidden by the mask, but infinities would show through it.
        torch._foreach_zero_([layer.keys for layer in self._layers])
        torch._foreach_zero_([layer.values for layer in self._layers])
        torch._foreach_zero_([layer.cumulative_length for layer in self._layers])
        self.tokens[:, :prompt_length] = prompt
        self.ignored.zero_() if ignored is None else self.ignored.copy_(ignored)
        self.length.fill_(prompt_length)
        self.prompt_length.fill_(prompt_length)
        self.unfinished.fill_(1)
        self.produced.zero_()
        if self.encoder is not None:
            assert encoder is not None
            self.encoder.copy_(encoder)
        for argument, tensor in zip(self.layout.arguments, arguments):
            static = self.arguments[argument.name]
            if argument.becomes == GROWS:
                static.zero_()
                static[:, :prompt_length] = tensor
            elif argument.becomes == STAYS:
                static.copy_(tensor)
            elif argument.becomes == ADVANCES:
                static.copy_(tensor[..., -1:] + 1)
            else:
                static.copy_(tensor[..., -1:])

    def show_token(self) -> None:
        """Make the token about to be read in visible in the masks over tokens."""
        for argument in self.layout.arguments:
            if argument.becomes == GROWS:
                self.arguments[argument.name].index_fill_(1, self.length - 1, 1)

    def advance_positions(self) -> None:
        for argument in self.layout.arguments:
            if argument.becomes == ADVANCES:
                self.arguments[argument.name].add_(1)

    def write_token(self, chosen: Tensor, choice: TokenChoice) -> None:
        """Append a token to each row: `chosen`, int64 [batch], or padding where the row has ended."""
        if choice.eos is not None and choice.pad is not None:
            chosen = chosen * self.unfinished + choice.pad * (1 - self.unfinished)
        self.token.copy_(chosen[:, None])
        self.tokens.index_copy_(1, self.length, self.token)
        self.length.add_(1)
        self.produced.add_(self.unfinished.amax())
        if choice.eos is not None:
            self.unfinished.mul_((self.token != choice.eos).all(dim=1))

    def reorder(self, order: Tensor) -> None:
        """Let each row go on from another row's tokens. order: int64 [batch].

        Only among rows of one prompt, as beam search does: the encoder's keys and values are the same for all of them.
        """
        for layer in self.own_layers:
            layer.keys.copy_(layer.keys.index_select(0, order))
            layer.values.copy_(layer.values.index_select(0, order))

    def take_over(self, smaller: DecodingMemory) -> None:
        """Go on where a smaller memory of the same kind has become full."""
        with torch.no_grad():
            for mine, theirs in zip(self.tensors, smaller.tensors):
                if mine.shape == theirs.shape:
                    mine.copy_(theirs)
                    continue
                (dim,) = (dim for dim in range(mine.ndim) if mine.shape[dim] != theirs.shape[dim])
                mine.zero_()
                mine.narrow(dim, 0, theirs.shape[dim]).copy_(theirs)


def _static_shape(argument: Argument, capacity: int) -> tuple[int, ...]:
    if argument.becomes == STAYS:
        return argument.shape
    return (*argument.shape, capacity if argument.becomes == GROWS else 1)


class Program:
    """What runs in one memory, each function of it behind a CUDA-graph runner.

    forward: the model, called with what `prepare_inputs_for_generation` takes.
    weights: tensors that the graphs will read by address. make_runner: from a function, the number of its first inputs
    that are used by address and the number of those it writes, or None to run it plainly (on the CPU).
    """

    def __init__(
        self,
        memory: DecodingMemory,
        forward: Callable[..., Any],
        weights: Sequence[Tensor],
        make_runner: Callable[[Callable[..., Any], int, int], CudaGraphRunner] | None,
    ) -> None:
        self.memory = memory
        self.runners: list[CudaGraphRunner] = []
        self._forward = forward
        self._fixed = [*memory.tensors, *weights]
        self._make_runner = make_runner

    def release(self) -> None:
        for runner in self.runners:
            runner.release()

    def _behind_runner(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which takes what comes after the memory's tensors and the weights."""

        def run(*inputs: Any) -> Any:
            return function(*inputs[len(self._fixed) :])

        if self._make_runner is None:
            return function
        runner = self._make_runner(run, len(self._fixed), len(self.memory.tensors))
        self.runners.append(runner)
        return functools.partial(runner, *self._fixed)

    def _read_prompt(
        self, prompt: Tensor, encoder: Tensor | None, ignored: Tensor | None, *arguments: Tensor
    ) -> Tensor:
        """Begin with a prompt, int64 [batch, length]. Returns its last logits, float32 [batch, vocabulary]."""
        memory = self.memory
        # In here, as running and capturing call this twice: the model's code says by itself that it has filled them.
        memory.cross_is_filled(False)
        memory.begin(prompt, arguments, encoder, ignored)
        given = {
            argument.name: memory.arguments[argument.name] if argument.becomes == STAYS else _of_own_length(tensor)
            for argument, tensor in zip(memory.layout.arguments, arguments)
        }
        return self._logits(_of_own_length(prompt), given, is_first_iteration=True)

    def _read_token(self) -> Tensor:
        """Read the memory's token in. Returns the logits after it, float32 [batch, vocabulary]."""
        memory = self.memory
        memory.cross_is_filled(True)
        memory.show_token()
        logits = self._logits(memory.token, memory.arguments, next_sequence_length=1)
        memory.advance_positions()
        return logits

    def _logits(self, tokens: Tensor, arguments: dict[str, Tensor], **how: Any) -> Tensor:
        with _autocast_cache_off():
            outputs = self._forward(tokens, **how, **model_arguments(self.memory, arguments))
        logits: Tensor = outputs.logits[:, -1].to(copy=True, dtype=torch.float32)
        return logits


class TokenProgram(Program):
    """Prefill and step that choose the next token: kernl's own loop."""

    def __init__(self, choice: TokenChoice, *rest: Any) -> None:
        super().__init__(*rest)
        self._choice = choice
        self._run_prefill = self._behind_runner(self._prefill)
        self._run_step = self._behind_runner(self._step)

    def prefill(
        self, prompt: Tensor, arguments: Sequence[Tensor], encoder: Tensor | None, ignored: Tensor | None
    ) -> None:
        """Begin with a prompt, int64 [batch, length], and choose the first new token."""
        self._run_prefill(prompt, encoder, ignored, *arguments)

    def step(self) -> None:
        """Read the last token in and choose the next one."""
        self._run_step()

    def _prefill(self, *inputs: Any) -> tuple[()]:
        return self._choose(self._read_prompt(*inputs))

    def _step(self) -> tuple[()]:
        return self._choose(self._read_token())

    def _choose(self, logits: Tensor) -> tuple[()]:
        self.memory.write_token(self._choice(self.memory, logits), self._choice)
        return ()


class LogitsProgram(Program):
    """Prefill and step that give the logits away and are told the next token: transformers' loop."""

    def __init__(self, *rest: Any) -> None:
        super().__init__(*rest)
        self._run_prefill = self._behind_runner(self._prefill)
        self._run_step = self._behind_runner(self._step)

    def prefill(self, prompt: Tensor, arguments: Sequence[Tensor], encoder: Tensor | None) -> Tensor:
        """Begin with a prompt, int64 [batch, length]. Returns its last logits, float32 [batch, vocabulary]."""
        (logits,) = self._run_prefill(prompt, encoder, *arguments)
        return logits

    def step(self, token: Tensor, order: Tensor | None) -> Tensor:
        """Read a token in, int64 [batch, 1]. Returns the logits after it, float32 [batch, vocabulary].

        order: int64 [batch]; rows of the cache that the rows go on from, before the token is read. None: their own.
        """
        (logits,) = self._run_step(token, order)
        return logits

    def _prefill(self, prompt: Tensor, encoder: Tensor | None, *arguments: Tensor) -> tuple[Tensor]:
        logits = self._read_prompt(prompt, encoder, None, *arguments)
        self.memory.length.add_(1)  # the token to come
        return (logits,)

    def _step(self, token: Tensor, order: Tensor | None) -> tuple[Tensor]:
        if order is not None:
            self.memory.reorder(order)
        self.memory.token.copy_(token)
        logits = self._read_token()
        self.memory.length.add_(1)
        return (logits,)


def _of_own_length(tensor: Tensor) -> Tensor:
    """The same [..., length], a length that TorchDynamo does not take for the batch where they are equal by chance."""
    alias = tensor.detach()
    torch._dynamo.maybe_mark_dynamic(alias, alias.ndim - 1)
    return alias


def model_arguments(memory: DecodingMemory, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What transformers' loop would pass to `prepare_inputs_for_generation`, with the static cache."""
    arguments = {memory.layout.cache_name: memory.cache, **dict(memory.layout.plain), **tensors}
    if memory.encoder is not None:
        arguments["encoder_outputs"] = BaseModelOutput(last_hidden_state=memory.encoder)  # type: ignore[arg-type]
    return arguments


@contextlib.contextmanager
def _autocast_cache_off() -> Iterator[None]:
    """As it is while a graph is captured: TorchDynamo's guards look at this switch, and must not see it change."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
