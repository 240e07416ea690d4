"""The one call of the user: `optimize_model(model)`, and its opposite.

    model = kernl.optimize_model(model)        # the same object; every call of it is now fast
    with kernl.disabled():                     # plain PyTorch in here
        model(**inputs)
    kernl.restore_model(model)                 # nothing of kernl is left on it

Only `forward`, `generate` and the method by which `generate` runs an encoder are replaced, on the instance:
`model(...)`, `transformers.pipeline`, `Trainer` and hooks on the model work as before. Weights, buffers, config and
class are untouched.

**Copies are plain.** A `forward` on the instance would survive `copy.deepcopy` as a function that still runs the
*original*. Therefore what Python saves of an optimised model (`copy.copy`, `copy.deepcopy`, `pickle`, `torch.save`) is
the plain model, and so are the replicas of `torch.nn.DataParallel`. Call `optimize_model` on a copy to optimise it.

**Twice is once.** Optimising again with the same options changes nothing; with others it starts afresh with those.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from kernl.backend import load_options
from kernl.front_door import FrontDoor
from kernl.handle import Handle, Verification, disabled
from kernl.report import Report

__all__ = ["Handle", "Verification", "disabled", "optimize_model", "restore_model"]

Model = TypeVar("Model", bound=nn.Module)


def optimize_model(model: Model, **options: Any) -> Model:
    """Make every call of `model` fast. Returns the same object.

    model: any `nn.Module` in one piece: on one device, not quantised, not offloaded, not compiled already.
    options: fields of `kernl.Options`.

    Compilation happens at the first call of each kind; `model.kernl.warmup(...)` does it ahead of time. Works in
    training mode and with gradients too, at about PyTorch's speed.

    Raises:
        TypeError: `model` is not an nn.Module, or an option does not exist.
        ValueError: an option's value is not accepted, or kernl does not take this kind of model; the message says why.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; accepted is an nn.Module (for a pipeline, its .model)")
    settings = load_options(options)
    present = vars(model).get("kernl")
    if isinstance(present, Handle) and present.options == settings and _is_in_place(model, present):
        return model
    if isinstance(present, Handle):
        restore_model(model)
    refuse_unfit(model)
    if settings.generate == "fast" and not _generates(model):
        raise ValueError(f'option generate="fast": a {type(model).__name__} has no `generate` of transformers')

    report = Report(type(model).__name__, settings)
    door = FrontDoor(model, plain_forward(model, vars(model).get("forward")), settings, report)
    handle = Handle(model, door, settings, report)
    placed = {
        "forward": _like_forward(door.make_forward(), model),
        "__getstate__": _PlainState(model),
        "_replicate_for_data_parallel": _PlainReplica(model),
    }
    if _generates(model):
        from kernl.generate import make_generate, make_prepare_encoder

        placed |= {"generate": make_generate(model, handle), **make_prepare_encoder(model)}
    handle.placed = placed
    handle.before = {name: vars(model)[name] for name in placed if name in vars(model)}
    vars(model).update(placed, kernl=handle)
    return model


def restore_model(model: Model) -> Model:
    """Undo `optimize_model` exactly. Returns the same object; a model that is not optimised is left as it is."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}; accepted is an nn.Module")
    handle = vars(model).get("kernl")
    if isinstance(handle, Handle):
        handle.release()
        _remove_kernl(vars(model), handle)
    return model


def _is_in_place(model: nn.Module, handle: Handle) -> bool:
    """Whether calls still go to kernl: nobody has set another forward since."""
    return vars(model).get("forward") is handle.placed["forward"]


def _remove_kernl(state: dict[str, Any], handle: Handle) -> None:
    """Make the dictionary of an optimised model, or a copy of it, what it would be without kernl.

    What the user has set since, such as a `forward` of their own, is theirs and stays.
    """
    del state["kernl"]
    for name, value in handle.placed.items():
        if state.get(name) is value:
            del state[name]
    for name, value in handle.before.items():
        state.setdefault(name, value)


def refuse_unfit(model: nn.Module) -> None:
    """Raise ValueError, with the reason, for models whose plain forward kernl could not stand in for."""
    name = type(model).__name__
    for path, module in model.named_modules():
        if _is_compiled(module):
            what = f"its module {path!r}, a {type(module).__name__}," if path else "it"
            raise ValueError(
                f"the {name} cannot be optimised: {what} is compiled already. Give optimize_model the model without "
                'torch.compile (or use torch.compile(model, backend="kernl"))'
            )
    if isinstance(model, torch.jit.ScriptModule):
        raise ValueError(
            f"the {name} is a TorchScript module, whose graph is fixed; optimise the model it was made from"
        )
    if hasattr(model, "kernl"):
        raise ValueError(
            f"the {name} has an attribute `kernl` of its own, which is where optimize_model puts its handle"
        )
    if any(
        isinstance(tensor, (UninitializedBuffer, UninitializedParameter))
        for tensor in (*model.parameters(), *model.buffers())
    ):
        raise ValueError(f"the {name} has lazy weights without a shape yet; call the model once, then optimise it")
    quantised = _why_quantised(model)
    if quantised is not None:
        raise ValueError(
            f"the {name} is quantised or distributed ({quantised}); kernl takes plain weights in fp16, bf16, fp32, fp64"
        )
    for path, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            place = f"its module {path!r}" if path else "it"
            raise ValueError(
                f"the {name} is offloaded or dispatched by accelerate ({place} has a hook that moves tensors between "
                "calls); load it onto one device without device_map"
            )
    devices = {str(tensor.device) for tensor in (*model.parameters(), *model.buffers())}
    device_map: Any = getattr(model, "hf_device_map", {})
    devices |= {str(place) for place in device_map.values() if len(device_map) > 1}
    if len(devices) > 1:
        raise ValueError(
            f"the {name} is split over several devices ({', '.join(sorted(devices))}); kernl takes models on one device"
        )
    if "meta" in devices:
        raise ValueError(f"the {name} has no weights yet (they are on the meta device); load them first")


def _is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has been at work: it wraps the module, its call, or the forward that the user put on it."""
    return (
        isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def _why_quantised(model: nn.Module) -> str | None:
    quantizer = getattr(model, "hf_quantizer", None)
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if quantizer is not None or config is not None:
        return f"quantization_config {type(config).__name__ if config is not None else type(quantizer).__name__}"
    for path, module in model.named_modules():
        if type(module).__module__.split(".")[0] in ("bitsandbytes", "auto_gptq", "gptqmodel", "awq", "hqq", "quanto"):
            return f"module {path!r} is a {type(module).__module__}.{type(module).__name__}"
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = type(tensor.data) if isinstance(tensor, nn.Parameter) else type(tensor)
        if kind not in (torch.Tensor, nn.Parameter, nn.Buffer):
            return f"weight {path!r} is a {kind.__name__}"
        if tensor.is_quantized:
            return f"weight {path!r} has dtype {tensor.dtype}"
    return None


def plain_forward(model: nn.Module, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """The model's forward as a function of the model and its arguments; `own` is one already set on the instance."""
    if own is None:
        function = type(model).forward
        return function if inspect.isfunction(function) else _called_with_model(function)

    def call_own(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    parameters = inspect.signature(own).parameters.values()
    call_own.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY), *parameters]
    )
    return call_own


def _called_with_model(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(model, *args, **kwargs)

    call.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return call


def _generates(model: nn.Module) -> bool:
    """Whether the model has the `generate` of transformers (or one of its own on top of that)."""
    utils = sys.modules.get("transformers.generation.utils")
    return utils is not None and isinstance(model, utils.GenerationMixin)


def _like_forward(forward: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """Give the new forward the name, the documentation and the signature of the one it stands for."""
    original = model.forward
    forward.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        if hasattr(original, name):
            setattr(forward, name, getattr(original, name))
    function = getattr(original, "__func__", None)
    if function is not None:
        forward.__wrapped__ = function  # type: ignore[attr-defined]
    return forward


def state_by_class(module: nn.Module) -> Any:
    """What Python saves of a module, if nothing on the instance says otherwise. Python 3.10 has no default for it."""
    get_state = getattr(type(module), "__getstate__", None)
    return vars(module).copy() if get_state is None else get_state(module)


class _PlainState:
    """`model.__getstate__`: what Python saves of an optimised model is the plain one."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> Any:
        model = self._model()
        assert model is not None
        state = state_by_class(model)
        if isinstance(state, dict):
            state = dict(state)
            _remove_kernl(state, vars(model)["kernl"])
        return state


class _PlainReplica:
    """`model._replicate_for_data_parallel`: replicas hold other tensors and are plain."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def __call__(self) -> nn.Module:
        model = self._model()
        assert model is not None
        replica = type(model)._replicate_for_data_parallel(model)
        _remove_kernl(vars(replica), vars(model)["kernl"])
        return replica
