"""TorchDynamo's settings for one model's calls; outside of them the user's own hold.

    settings = dynamo_settings(options)
    with settings():
        compiled(model, ...)

They hold in every call that may compile, and for as long as that call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
import torch._dynamo
from torch.fx.experimental import _config as symbolic_shapes_config

from kernl.options import Options
from kernl.sdpa_shape import sdpa_of_any_batch

_dynamo_config: Any = torch._dynamo.config
_shapes_config: Any = symbolic_shapes_config
_settings_are_per_thread = isinstance(_dynamo_config._config["recompile_limit"].user_override, ContextVar)
_settings_lock = threading.Lock()
_calls_with_settings = 0
_put_back: Callable[[], None] | None = None


def has_length_1(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a dimension other than the batch is 1. TorchDynamo breaks a graph apart when such a size is a symbol."""
    return any(1 in tensor.shape[1:] for tensor in tensors)


def dynamo_settings(
    options: Options, *, one_is_a_size: bool = False, in_parts: bool = False
) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Context managers with TorchDynamo's settings for one model; outside of them the user's hold.

    one_is_a_size: symbolic sizes may be 1, so that batch 1 needs no graph of its own.
    in_parts: the model is captured as several graphs. Past the limit TorchDynamo then runs a part as plain PyTorch; an
        error in the middle of a call would come too late to start again.

    Newer versions of PyTorch keep settings per thread. In older ones they are the process's: the first call that comes
    in changes them, the last one that leaves puts them back.
    """
    change_dynamo = _dynamo_config._make_closure_patcher(
        # Floats of modules (epsilon, scale, p) stay numbers, also in symbolic graphs.
        specialize_float=True,
        # Forward hooks added after compilation are noticed.
        skip_nnmodule_hook_guards=False,
        # Weights that `tensor.data = ...` has given another dtype or shape are noticed.
        skip_tensor_guards_with_matching_dict_tags=False,
        # Past the limit TorchDynamo would run eager and say nothing.
        fail_on_recompile_limit_hit=not in_parts,
        recompile_limit=options.recompile_limit,
        accumulated_recompile_limit=max(options.recompile_limit, 256),
    )
    change_sizes = _shapes_config._make_closure_patcher(backed_size_oblivious=one_is_a_size)

    def change() -> Callable[[], None]:
        put_back_dynamo, put_back_sizes = change_dynamo(), change_sizes()

        def put_back() -> None:
            put_back_sizes()
            put_back_dynamo()

        return put_back

    @contextlib.contextmanager
    def of_this_thread() -> Iterator[None]:
        put_back = change()
        try:
            with sdpa_of_any_batch(one_is_a_size):
                yield
        finally:
            put_back()

    @contextlib.contextmanager
    def of_the_process() -> Iterator[None]:
        global _calls_with_settings, _put_back
        with _settings_lock:
            if _calls_with_settings == 0:
                _put_back = change()
            _calls_with_settings += 1
        try:
            with sdpa_of_any_batch(one_is_a_size):
                yield
        finally:
            with _settings_lock:
                _calls_with_settings -= 1
                if _calls_with_settings == 0 and _put_back is not None:
                    _put_back()

    return of_this_thread if _settings_are_per_thread else of_the_process
