"""Every option of kernl in one frozen dataclass, for `optimize_model` and `torch.compile(backend="kernl")` alike.

    optimize_model(model, cuda_graph="never")
    torch.compile(model, backend="kernl", options={"cuda_graph": "never"})

An option that does not exist, or a value that is not accepted, is an error that says what is.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Lowering = Literal["auto", "eager", "inductor"]
CudaGraph = Literal["auto", "always", "never"]
Guards = Literal["fast", "full"]
Generate = Literal["hf", "fast"]
Buckets = Literal["off", "powers", "auto"] | tuple[int, ...]

_CHOICES: dict[str, tuple[str, ...]] = {
    "lowering": ("auto", "eager", "inductor"),
    "cuda_graph": ("auto", "always", "never"),
    "guards": ("fast", "full"),
    "generate": ("hf", "fast"),
}
_FLAGS = ("static_outputs", "strict", "deterministic")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How kernl treats one model. Frozen: to change an option, optimise again with other ones.

    lowering: what runs the part of the graph that no pattern took. "eager": PyTorch's own kernels, one by one; nothing
        to compile, a new graph is ready in milliseconds. "inductor": torch.compile's code generator; kernl's ops stay
        calls; the first call of a graph takes seconds, and it needs a C++ compiler. "auto": the one that measured
        better, which is "eager" (a replayed CUDA graph hides launches, and the patterns take most of the rest).
    cuda_graph: "auto": replay a CUDA graph wherever one can be captured, run plain calls elsewhere and report why.
        "always": a call that cannot be captured is an error (gradients and the CPU included). "never": plain calls.
    max_graphs: CUDA graphs kept per compiled graph, one per concrete shape. With more shapes than that, those that come
        most often get one, the others run without.
    static_outputs: hand out the CUDA graph's own output buffers. Saves a copy of each output, but the next call with
        the same shapes overwrites them.
    strict: raise where kernl would otherwise warn and run plain PyTorch (a rewrite, a lowering, a capture that fails).
    deterministic: fix the choice of kernels (nothing is measured) and the order of sums.
    patterns_disabled: names of patterns not to use, as the report prints them.
    guards: "fast": after the first call of a signature go straight to the compiled graph. Arguments, weights, buffers,
        submodules, hooks, training flags, config values and torch's global state are checked; other plain Python
        attributes of modules are not: call `model.kernl.refresh()` after changing one. "full": TorchDynamo's guards on
        every call, 0.1 ms and more. Only `optimize_model` has the fast way.
    dynamic: True: sizes are symbols, one graph serves every batch and length; False: a graph per size. None: True, and
        for a model that TorchDynamo cannot trace like that, the first size as it is and symbols from the second on.
        Length 1 has a graph of its own.
        torch.compile(backend="kernl") takes `dynamic` itself.
    recompile_limit: graphs TorchDynamo may compile for one model before kernl runs new kinds of calls as plain PyTorch
        (with a warning). TorchDynamo's own limit is 8, too few for batch 1, length 1, gradient modes and optional
        arguments.

    buckets: pad sequences on the right to a few lengths, so that few CUDA graphs serve many; results are those without
        padding. "powers": powers of two from 16 up (and the model's maximum); a tuple of lengths: these, e.g.
        (32, 64, 128); "auto": learnt from the lengths seen, as few as go with at most 1.25 tokens run for each true
        one over all calls so far (`kernl.buckets.Learnt`). It happens where the compiled graph shows that tokens meet
        in attention under an attention mask only, up to the model's maximum of positions; otherwise, and for lengths
        above every bucket, calls run as they are and the report says why. Needs `guards="fast"` and symbolic sizes.
        Only `optimize_model` pads. "off": no padding.
    generate: which loop `model.generate` runs. "fast": the one on the GPU (`kernl.generate`) wherever the arguments
        allow it, otherwise transformers' own; the report says which ran and why. "hf": always transformers' own, over
        prefill and steps of kernl's where that can be (docs/generate.md), without the compilation it would start for a
        static cache. Only `optimize_model` has it.

    Raises TypeError or ValueError naming the option, what was given and what is accepted.
    """

    lowering: Lowering = "auto"
    cuda_graph: CudaGraph = "auto"
    max_graphs: int = 64
    static_outputs: bool = False
    strict: bool = False
    deterministic: bool = False
    patterns_disabled: tuple[str, ...] = ()
    guards: Guards = "fast"
    dynamic: bool | None = None
    recompile_limit: int = 128
    buckets: Buckets = "off"
    generate: Generate = "hf"

    def __post_init__(self) -> None:
        for name, accepted in _CHOICES.items():
            value = getattr(self, name)
            if value not in accepted:
                hint = closest(str(value), accepted)
                raise ValueError(f"option {name}={value!r}: accepted are {_listed(accepted)}{hint}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"option {name}={getattr(self, name)!r}: accepted are True and False")
        if self.dynamic is not None and not isinstance(self.dynamic, bool):
            raise TypeError(f"option dynamic={self.dynamic!r}: accepted are None, True and False")
        for name in ("max_graphs", "recompile_limit"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"option {name}={value!r}: accepted is a whole number")
            if value < 1:
                raise ValueError(f"option {name}={value!r}: accepted are numbers from 1 up")
        object.__setattr__(self, "patterns_disabled", _names(self.patterns_disabled))
        object.__setattr__(self, "buckets", _buckets(self.buckets))
        if self.buckets != "off" and (self.guards == "full" or self.dynamic is False):
            other = 'guards="full"' if self.guards == "full" else "dynamic=False"
            raise ValueError(f"option buckets={self.buckets!r} with {other}: accepted is 'off' there")

    @classmethod
    def from_kwargs(cls, given: Mapping[str, Any] | None = None, /, **kwargs: Any) -> Options:
        """Options from a dict (torch.compile's `options=`) or from keyword arguments.

        Raises TypeError for an unknown option, naming the known ones and the closest.
        """
        merged = {**(given or {}), **kwargs}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in merged:
            if name not in known:
                raise TypeError(f"unknown option {name!r}{closest(name, known)}; options are {', '.join(known)}")
        return cls(**merged)

    def check_patterns(self, known: Collection[str]) -> None:
        """Raise ValueError unless every disabled pattern is one of `known`."""
        for name in self.patterns_disabled:
            if name not in known:
                raise ValueError(
                    f"option patterns_disabled: no pattern is named {name!r}{closest(name, known)}; "
                    f"patterns are {', '.join(sorted(known))}"
                )

    def changed(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }


def closest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for a misspelt name, "" when nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    try:
        names = tuple(value)
    except TypeError:
        names = (None,)
    if not all(isinstance(name, str) for name in names):
        raise TypeError(f"option patterns_disabled={value!r}: accepted are names of patterns, e.g. ('attention',)")
    return names


def _buckets(value: Any) -> Buckets:
    names = ("off", "powers", "auto")
    accepted = f"{_listed(names)} or lengths, e.g. (32, 64, 128)"
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"option buckets={value!r}: accepted are {accepted}{closest(value, names)}")
        return value  # type: ignore[return-value]
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"option buckets={value!r}: accepted are {accepted}")
    if not all(isinstance(length, int) and not isinstance(length, bool) for length in value):
        raise TypeError(f"option buckets={value!r}: accepted lengths are whole numbers")
    if not value or min(value) < 1:
        raise ValueError(f"option buckets={value!r}: accepted are lengths from 1 up, at least one")
    return tuple(sorted(set(value)))
