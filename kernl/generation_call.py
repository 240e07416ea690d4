"""A call of `generate`: which loop can serve it, and what the model is given at each step.

Three loops can: kernl's, with tokens chosen on the device; transformers' over kernl's prefill and steps
(`kernl.transformers_loop`); transformers' over the model as it is. What the first two cannot do raises `Unserved`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache, GenerationMixin
from transformers.generation import GenerationMode

from kernl.decoding import (
    ADVANCES,
    GROWS,
    REPEATS,
    STAYS,
    STEP,
    Argument,
    Layout,
    capacity_for,
    encoder_capacity_for,
)
from kernl.token_choice import Unserved

Tensor = torch.Tensor

_BECOMES = {"attention_mask": GROWS, "position_ids": ADVANCES, "token_type_ids": REPEATS}
_BECOMES_WITH_ENCODER = {"attention_mask": STAYS, "decoder_attention_mask": GROWS, "decoder_position_ids": ADVANCES}

_NEED_THE_MODEL = ("assistant_model", "custom_generate", "tokenizer", "synced_gpus")  # arguments
_NEED_THE_MODEL_SET = (  # settings
    "prefill_chunk_size",
    "output_attentions",
    "output_hidden_states",
    "prompt_lookup_num_tokens",
)
_NEED_THE_HOST_SET = ("return_dict_in_generate", "output_scores", "output_logits", "max_time", "stop_strings")
_LOOP_OF_TRANSFORMERS = ("_sample", "_beam_search", "_prefill", "_update_model_kwargs_for_generation")
_BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE)
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, *_BEAMS)
"""Of transformers' loops, those that can run over kernl's steps."""


def why_not_by_arguments(model: Any, given: Mapping[str, Any]) -> str | None:
    """Why the model must run as it is, where the arguments alone tell; None when they do not."""
    kind = type(model)
    is_known = kind.generate is GenerationMixin.generate or kind.generate.__module__.endswith("generation_whisper")
    if (
        not is_known
        or {*_LOOP_OF_TRANSFORMERS, "prepare_inputs_for_generation"} & vars(model).keys()
        or any(getattr(kind, name) is not getattr(GenerationMixin, name) for name in _LOOP_OF_TRANSFORMERS)
    ):
        return f"{kind.__name__} has a loop of its own"
    if any(module.training for module in model.modules()):
        return "the model is in training mode"
    for name in _NEED_THE_MODEL:
        if given.get(name):
            return f"argument {name}"
    configs = (given.get("generation_config"), model.generation_config)

    def setting(name: str) -> Any:
        values = (given.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    for name in _NEED_THE_MODEL_SET:
        if setting(name):
            return f"argument {name}"
    if given.get("streamer") is not None and (setting("num_beams") or 1) != 1:
        return "argument streamer"  # a mistake, which transformers would not see with a loop of ours in its place
    if setting("use_cache") is False:
        return "argument use_cache=False"
    if given.get("past_key_values") is not None or given.get("cache") is not None:
        return "a cache is given"
    if setting("cache_implementation") not in (None, "static", "dynamic", "hybrid"):
        return f"argument cache_implementation={setting('cache_implementation')!r}"
    return None


@dataclass(frozen=True, eq=False)
class Prepared:
    """A call as transformers' `generate` hands it to a loop. prompt: int64 [batch, length]."""

    prompt: Tensor
    processors: Any
    criteria: Any
    config: Any
    model_kwargs: dict[str, Any]
    streamer: Any

    @property
    def mode(self) -> GenerationMode:
        mode: GenerationMode = self.config.get_generation_mode()
        return mode


def refuse_steps(model: Any, prepared: Prepared) -> None:
    """Raise Unserved where prefill and steps in a memory of kernl's cannot stand for calls of the model."""
    mode, prompt = prepared.mode, prepared.prompt
    if mode not in MODES:
        raise Unserved(f"generation mode {mode.value}")
    if mode in _BEAMS and hasattr(model, "_reorder_cache"):
        raise Unserved(f"a {type(model).__name__} reorders its cache in its own way")
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
    if not prepares and prepared.model_kwargs.get(masks) is not None:
        raise Unserved(f"a {type(model).__name__} prepares its masks in its own way")


def refuse_what_needs_the_host(prepared: Prepared) -> None:
    """Raise Unserved where the host must see every token, or more than tokens: kernl's loop does not stop for it."""
    if prepared.streamer is not None:
        raise Unserved("argument streamer")
    for name in _NEED_THE_HOST_SET:
        if getattr(prepared.config, name, None):
            raise Unserved(f"argument {name}")
    if prepared.mode in _BEAMS:
        raise Unserved("beam search")


@dataclass(frozen=True, eq=False)
class Call:
    """The model's arguments in one call of `generate`.

    prompt: int64 [batch, length]. tensors: those of `layout.arguments`, in that order. encoder: states [batch, length,
    width] or None, padded; encoder_length: without the padding. original: all arguments as transformers has made them,
    the encoder's as they are above.
    """

    prompt: Tensor
    layout: Layout
    tensors: list[Tensor]
    encoder: Tensor | None
    encoder_length: int | None
    original: dict[str, Any]


def read_model_arguments(model: Any, prepared: Prepared, max_length: int, lane: int) -> Call:
    """Sort out what transformers would pass to the model at each step. Raises Unserved for what has no place."""
    prompt, arguments = prepared.prompt, dict(prepared.model_kwargs)
    caches = [name for name, value in arguments.items() if isinstance(value, Cache)]
    if len(caches) != 1:
        raise Unserved("the model's cache is not one of transformers' caches")
    del arguments[caches[0]]
    with_encoder = model.config.is_encoder_decoder
    encoder, encoder_length = _read_encoder(model, prompt.shape[0], arguments) if with_encoder else (None, None)

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
        lane=lane,
    )
    return Call(prompt, layout, tensors, encoder, encoder_length, arguments)


def _read_argument(name: str, becomes: str, value: Tensor, prompt: Tensor) -> Argument:
    if becomes == STAYS:
        return Argument(name, becomes, tuple(value.shape), value.dtype)
    if value.shape[-1] != prompt.shape[1] or (becomes == GROWS and value.shape != prompt.shape):
        raise Unserved(f"{name} of shape {tuple(value.shape)} for a prompt of shape {tuple(prompt.shape)}")
    shape = tuple(value.shape[:-1])
    return Argument(name, becomes, shape, value.dtype)


def _read_encoder(model: Any, batch: int, arguments: dict[str, Any]) -> tuple[Tensor, int]:
    """The encoder's states, padded to one of a few lengths where the decoder takes a mask for them; their length."""
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
    return states, length


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def last_position(config: Any) -> int:
    """The number of positions a model has, or more than any text."""
    text = config.get_text_config(decoder=True)
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "max_target_positions")]
    return min((limit for limit in limits if isinstance(limit, int)), default=sys.maxsize)
