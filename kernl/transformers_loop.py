"""transformers' own loops over kernl's prefill and steps.

Beam search, streamers, processors and criteria that need the host, scores to be returned: all that is transformers'
code, which calls the model once a token. Here it calls a stand-in: an object of a subclass of the model's class, with
the model's attributes, for which "prepare the inputs and call the model" is one step of a `LogitsProgram`. So the cache
stays where it is, one CUDA graph serves all steps until the cache is full, and masks are made in that graph.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GENERATION_MODES_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast, Seq2SeqLMOutput
from transformers.utils import ModelOutput

from kernl.decoding import DecodingMemory, Layout, LogitsProgram
from kernl.generation_call import Call, Prepared

Tensor = torch.Tensor


class Steps:
    """Prefill and steps of one call of `generate`.

    program_for: finds the program for a layout. lock: held in each of them, not between: there transformers' loop runs
    code of the user, which may wait for other calls of the same model.
    length: tokens read. order: int64 [batch] or None, rows of the cache that rows go on from at the next step.
    new_tokens: those that the logits given away were for.
    """

    def __init__(
        self, call: Call, program_for: Callable[[Layout], LogitsProgram], lock: contextlib.AbstractContextManager[Any]
    ) -> None:
        self.length = self.new_tokens = 0
        self.order: Tensor | None = None
        self._call = call
        self._program_for = program_for
        self._lock = lock
        with lock:
            self._program = program_for(call.layout)

    @property
    def cache_name(self) -> str:
        """What this version of transformers calls the cache."""
        return self._call.layout.cache_name

    @property
    def memory(self) -> DecodingMemory:
        return self._program.memory

    def read(self, tokens: Tensor) -> Tensor:
        """The logits after tokens, int64 [batch, length]: of the prompt first, then one at a time.

        Returns float32 [batch, vocabulary].
        """
        with self._lock:
            if self.length == 0:
                logits = self._program.prefill(tokens, self._call.tensors, self._call.encoder)
            else:
                if self.length == self.memory.layout.capacity:
                    smaller = self.memory
                    self._program = self._program_for(smaller.layout.larger(self.length + 1))
                    self.memory.take_over(smaller)
                logits = self._program.step(tokens, self.order)
                self.order = None
        self.length += tokens.shape[1]
        self.new_tokens += tokens.shape[0]
        return logits

    def reorder(self, order: Tensor) -> None:
        order = order.to(self.memory.layout.device, torch.long)
        self.order = order if self.order is None else self.order.index_select(0, order)

    def copy_of_cache(self, config: Any) -> Any:
        """transformers' cache with what has been read, for the caller to keep."""
        memory = self.memory
        own = _copy(config, memory.own_layers, self.length, self.order)
        if self._call.encoder_length is None:
            return own
        return EncoderDecoderCache(own, _copy(config, memory.cross_layers, self._call.encoder_length, None))


def _copy(config: Any, layers: list[Any], length: int, order: Tensor | None) -> DynamicCache:
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    for index, layer in enumerate(layers):
        parts = [tensor[:, :, :length] for tensor in (layer.keys, layer.values)]
        keys, values = (part.clone() if order is None else part.index_select(0, order) for part in parts)
        cache.update(keys, values, index)
    return cache


class CacheInMemory:
    """Stands for the cache in what transformers' loop hands from step to step."""

    is_compileable = False
    is_croppable = False

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._steps.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._steps.reorder(beam_idx)


def run_transformers_loop(model: Any, prepared: Prepared, steps: Steps | None = None) -> Any:
    """transformers' loop of the mode that is asked for: over `steps`, or over the model as it is.

    Without its compilation, which it would do for static caches; the config is a copy that transformers made.
    """
    prepared.config.disable_compile = True
    loop = getattr(type(model), GENERATION_MODES_MAPPING[prepared.mode])
    result = loop(
        model if steps is None else _stand_in_for(model, steps),
        prepared.prompt,
        logits_processor=prepared.processors,
        stopping_criteria=prepared.criteria,
        generation_config=prepared.config,
        **({} if prepared.streamer is None else {"streamer": prepared.streamer}),
        **prepared.model_kwargs,
    )
    if isinstance(result, ModelOutput):
        for name in [name for name, value in result.items() if isinstance(value, CacheInMemory)]:
            assert steps is not None
            result[name] = steps.copy_of_cache(model.config)
    return result


def _stand_in_for(model: Any, steps: Steps) -> Any:
    kind = _kind_of_stand_in(type(model))  # type: ignore[arg-type]
    stand_in = kind.__new__(kind)
    object.__setattr__(stand_in, "__dict__", vars(model))
    object.__setattr__(stand_in, "_kernl_steps", steps)
    return stand_in


@functools.lru_cache(maxsize=64)
def _kind_of_stand_in(kind: Any) -> Any:
    def prepare_inputs_for_generation(
        self: Any, input_ids: Tensor, *_: Any, is_first_iteration: bool = False, **__: Any
    ) -> dict[str, Tensor]:
        tokens = input_ids if is_first_iteration else input_ids[:, -1:]
        # Strides that do not tell how many tokens there are by now: each layout is captured by itself.
        return {"tokens": tokens.clone(memory_format=torch.contiguous_format)}

    def call(self: Any, tokens: Tensor, return_dict: bool = True) -> Any:
        steps: Steps = self._kernl_steps
        logits = steps.read(tokens)[:, None]
        output: Any = Seq2SeqLMOutput if self.config.is_encoder_decoder else CausalLMOutputWithPast
        return output(logits=logits, **{steps.cache_name: CacheInMemory(steps)})

    members = {
        "__slots__": ("_kernl_steps",),  # not in __dict__, which is the model's
        "__module__": kind.__module__,
        "__call__": call,
        "prepare_inputs_for_generation": prepare_inputs_for_generation,
    }
    return type(kind.__name__, (kind,), members)
