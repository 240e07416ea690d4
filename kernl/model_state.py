"""Has anything about a model changed that TorchDynamo's guards would have noticed?

TorchDynamo checks a few thousand conditions in front of every call, 0.1 ms for a 12-layer BERT. Most of them can be put
as one comparison of two flat sequences that runs in C:

    parameters, buffers    the same tensor objects under the same modules, at the same addresses
    submodules             the same module objects under the same names
    training               the same flag on every module that may look at it
    forward hooks          the same functions on every submodule (nn.Module.__call__ runs the model's own)
    config                 equal values in every config object and in the configs inside it, be they objects or dicts
    tensors in attributes  the same objects, and None where there was None

Equal addresses stand for equal storage, dtype and shape: all three change only with `tensor.data = ...`, which brings
another address (`model.half()`, `model.to(device)` and some LoRA merges do exactly this). They are the one expensive
part, and may be left out when a CUDA-graph runner is behind the call, which looks at them as well.

Not checked: other plain Python attributes of modules, of the classes, of the world. That is the documented exception,
see `kernl.Options.guards`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import nn

_is = operator.is_
_training = operator.itemgetter("training")
_address = torch.Tensor.data_ptr
_config = operator.itemgetter("config")
_requires_grad = operator.attrgetter("requires_grad")

# Modules whose forward does not look at `training`; their flag may differ.
_BLIND_TO_TRAINING = frozenset(
    {
        nn.Linear,
        nn.LayerNorm,
        nn.Embedding,
        nn.Conv1d,
        nn.Conv2d,
        nn.Identity,
        nn.GELU,
        nn.ReLU,
        nn.SiLU,
        nn.Tanh,
        nn.ModuleList,
        nn.ModuleDict,
        nn.Sequential,
    }
)


class ModelState:
    """A snapshot of a model; `unchanged(model)` compares it with the model as it is now.

    Holds no reference to the model nor to its instance dictionary, so that it may be stored on the model without
    keeping it alive.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        below = modules[1:]

        self._submodules: list[dict[str, Any]] = [module._modules for module in modules if module._modules]
        self._submodules_then = [dict(children) for children in self._submodules]

        registries: list[dict[str, Any]] = [r for module in modules for r in (module._parameters, module._buffers)]
        self._registries = [registry for registry in registries if registry]
        # Those that are empty must stay so.
        self._empty = [registry for registry in registries if not registry]
        self._empty += [module._modules for module in modules if not module._modules]
        self._registries_then = [dict(registry) for registry in self._registries]
        registered = [value for registry in self._registries for value in registry.values() if value is not None]
        # Comparing dictionaries asks for identity first and then for equality. Two different tensors are never equal in
        # that sense (their comparison has no single truth value), unless they have one element.
        self._single = [
            (registry, name, value)
            for registry in self._registries
            for name, value in registry.items()
            if value is not None and value.numel() == 1
        ]

        self._own_attributes = _tensor_attributes(model)
        self._attributes = [
            (vars(module), name, tensor) for module in below for name, tensor in _tensor_attributes(module).items()
        ]

        self.tensors: list[torch.Tensor] = registered
        self.tensors += [*self._own_attributes.values(), *(tensor for _, _, tensor in self._attributes)]
        # A tensor may take the place of None.
        self._none = [
            (vars(module), name)
            for module in below
            for name, value in vars(module).items()
            if value is None and not name.startswith("_")
        ]
        self._own_none = [name for name, value in vars(model).items() if value is None and not name.startswith("_")]
        self._addresses = list(map(_address, self.tensors))
        self._floating = [tensor for tensor in self.tensors if tensor.is_floating_point()]

        self._training = model.training
        # What torch.compile wraps a module in has no flag of its own.
        self._flagged = [
            vars(module) for module in below if type(module) not in _BLIND_TO_TRAINING and "training" in vars(module)
        ]
        self._training_then = list(map(_training, self._flagged))

        hooks: list[dict[int, Any]] = [
            registry for module in below for registry in (module._forward_hooks, module._forward_pre_hooks)
        ]
        hooks += [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]
        self._without_hooks = [registry for registry in hooks if not registry]
        self._with_hooks = [registry for registry in hooks if registry]
        self._hooks_then = [dict(registry) for registry in self._with_hooks]

        self._own_config = vars(model).get("config")
        self._configured = [vars(module) for module in below if "config" in vars(module)]
        self._config_objects = list(map(_config, self._configured))
        self._configs = _config_values([self._own_config, *self._config_objects])
        self._configs_then = [{name: _copy_of(value) for name, value in config.items()} for config in self._configs]

    def unchanged(self, model: nn.Module, addresses: bool = True) -> bool:
        """Whether everything listed in the module's text is as it was; without `addresses`, all the rest."""
        own = vars(model)
        return (
            own["training"] is self._training
            and self._submodules == self._submodules_then
            and not any(self._empty)
            and self._same_tensors()
            and list(map(_training, self._flagged)) == self._training_then
            and not any(self._without_hooks)
            and self._with_hooks == self._hooks_then
            and own.get("config") is self._own_config
            and all(map(_is, map(_config, self._configured), self._config_objects))
            and self._same_configs()
            and all(own.get(name) is tensor for name, tensor in self._own_attributes.items())
            and all(state.get(name) is tensor for state, name, tensor in self._attributes)
            and all(own.get(name) is None for name in self._own_none)
            and all(state.get(name) is None for state, name in self._none)
            and (not addresses or list(map(_address, self.tensors)) == self._addresses)
        )

    def needs_grad(self) -> bool:
        """Whether autograd would record a call (asked only while gradients are enabled)."""
        return any(map(_requires_grad, self._floating))

    def _same_tensors(self) -> bool:
        try:
            return self._registries == self._registries_then and all(
                registry[name] is tensor for registry, name, tensor in self._single
            )
        except Exception:  # of two different tensors with many elements, compared as one truth value
            return False

    def _same_configs(self) -> bool:
        try:
            return self._configs == self._configs_then
        except Exception:  # values that cannot be compared (arrays) and are not the same objects any more
            return False


def _config_values(configs: list[Any]) -> list[dict[str, Any]]:
    """The values of these configs and of the configs inside them, each once."""
    found: dict[int, dict[str, Any]] = {}
    pending = list(configs)
    while pending:
        config = pending.pop()
        values = config if isinstance(config, dict) else getattr(config, "__dict__", None)
        if values is None or id(values) in found:
            continue
        found[id(values)] = values
        pending += [value for value in values.values() if isinstance(value, dict) or _is_config(value)]
    return list(found.values())


def _is_config(value: Any) -> bool:
    return hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor, nn.Module)) and not callable(value)


def _copy_of(value: Any) -> Any:
    """A container as it is now, all the way down; anything else is compared as the object it is."""
    if isinstance(value, dict):
        return {name: _copy_of(item) for name, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_copy_of(item) for item in value)
    return value


def _tensor_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are plain attributes, neither parameters nor buffers."""
    return {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
