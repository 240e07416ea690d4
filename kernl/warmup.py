"""What `model.kernl.warmup(...)` runs: inputs made from shapes, or from the texts that a model is going to see."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

ACCEPTED = (
    "accepted: a list whose items are shapes such as (batch, length) or inputs of a call (a dict of keyword arguments, "
    'a tuple of positional ones, a tensor), or "auto" with tokenizer= and texts='
)


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def batches_to_warm_up(
    model: nn.Module, shapes: Any, *, tokenizer: Any = None, texts: Iterable[str] | None = None, batch_size: Any = 1
) -> list[Any]:
    """One example call for each thing to prepare, largest first. Arguments as `Handle.warmup` takes them."""
    if isinstance(shapes, str) and shapes == "auto":
        batches = _batches_of_texts(model, tokenizer, texts, batch_size)
    else:
        if tokenizer is not None or texts is not None:
            raise ValueError('tokenizer and texts go with shapes="auto"')
        if isinstance(shapes, (str, Mapping, torch.Tensor)) or not isinstance(shapes, Iterable):
            raise TypeError(f"shapes is {_in_words(shapes)}; {ACCEPTED}")
        items = list(shapes)
        if items and all(_is_size(item) for item in items):
            raise TypeError(f"shapes is {_in_words(shapes)}, a shape by itself: give a list, [{tuple(items)}]")
        batches = [_example(model, item) for item in items]
    return sorted(batches, key=_elements, reverse=True)


def _example(model: nn.Module, item: Any) -> Any:
    """Inputs for a shape; anything else is inputs already."""
    is_shape = isinstance(item, (tuple, list)) and len(item) > 0 and all(_is_size(size) for size in item)
    if not is_shape:
        if not isinstance(item, (Mapping, torch.Tensor, tuple, list)) and not hasattr(item, "keys"):
            raise TypeError(f"shapes holds {_in_words(item)}; {ACCEPTED}")
        args, kwargs = arguments_of(item)
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            raise ValueError(f"shapes holds {_in_words(item)}, in which there is no tensor; {ACCEPTED}")
        return item
    shape = tuple(map(int, item))
    if min(shape) < 1:
        raise ValueError(f"shape {shape}: accepted are sizes from 1 up")
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", None)
    weight = next(model.parameters(), torch.empty(0))
    if main == "input_ids" and len(shape) == 2:
        ids = torch.ones(shape, dtype=torch.long, device=weight.device)
        batch = {"input_ids": ids}
        if "attention_mask" in parameters:
            batch["attention_mask"] = torch.ones_like(ids)
        return batch
    if main is not None and main != "input_ids":
        return {main: torch.zeros(shape, dtype=weight.dtype, device=weight.device)}
    raise ValueError(
        f"shape {shape}: the inputs of a {type(model).__name__} cannot be guessed from it; give example inputs (a dict "
        "of keyword arguments, a tuple of positional ones, or a tensor)"
    )


def _batches_of_texts(model: nn.Module, tokenizer: Any, texts: Iterable[str] | None, batch_size: Any) -> list[Any]:
    """The texts in batches, in their order, padded to the longest of a batch: one batch for each shape that occurs."""
    if not callable(tokenizer):
        raise TypeError(f'shapes="auto" needs tokenizer=, a Hugging Face tokenizer; got {_in_words(tokenizer)}')
    if texts is None or isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f'shapes="auto" needs texts=, a list of strings; got {_in_words(texts)}')
    texts = list(texts)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("texts: accepted is a list of strings, at least one")
    sizes = [batch_size] if isinstance(batch_size, int) else list(batch_size)
    if not sizes or not all(_is_size(size) and size > 0 for size in sizes):
        raise ValueError(f"batch_size={batch_size!r}: accepted are a number from 1 up, or a list of such numbers")
    device = next(model.parameters(), torch.empty(0)).device
    found: dict[tuple[Any, ...], Any] = {}
    for size in sizes:
        for start in range(0, len(texts), size):
            encoded = dict(tokenizer(texts[start : start + size], padding=True, truncation=True, return_tensors="pt"))
            key = tuple((name, tuple(tensor.shape)) for name, tensor in encoded.items())
            if key not in found:
                found[key] = {name: tensor.to(device) for name, tensor in encoded.items()}
    return list(found.values())


def _is_size(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _in_words(value: Any) -> str:
    text = repr(value)
    return f"a {type(value).__name__}" if len(text) > 60 or "tensor(" in text or isinstance(value, Mapping) else text


def _elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(arguments_of(batch)) if isinstance(leaf, torch.Tensor))
