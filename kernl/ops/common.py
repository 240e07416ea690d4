"""How an op is declared: the helpers that keep every file of `kernl.ops` short.

An op of kernl is a `torch.library` op `torch.ops.kernl.<name>`. `define_op` registers all its parts at once:

    schema       the signature in PyTorch's schema language
    cpu, cuda    implementations. Both first ask `kernel_runs_on`: the Triton kernel where it can run, otherwise the
                 reference in plain PyTorch (the CPU, float64, a GPU that is too old)
    fake         the shape function; it allocates as the implementations do, so that strides agree
    autograd     (setup_context, backward), as `torch.library.register_autograd` takes them
    vmap         one call in place of a loop of calls, where there is a way
    autocast     what `torch.autocast` changes, by hand: torch's own helper casts *every* float tensor to one type
    ahead        which compiled kernels the op could need for other numbers of rows, so that they can be made early

Outputs are allocated with `empty`, in fake, CPU and CUDA code alike, so that tests can fill them with NaN and see an
element that no kernel wrote.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import math
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, overload

import torch
from torch._subclasses.fake_tensor import FakeTensor

from kernl.kernels.common import INTERPRET
from kernl.ops.transforms import VmapRule, register_gradient, register_recorded, register_vmap
from kernl.runtime.capability import capability_of

LIB = torch.library.Library("kernl", "FRAGMENT")
"""Owner of every registration; the ops live as long as it does."""

Ahead: TypeAlias = tuple[Hashable, Callable[[], None]]
"""A compiled kernel: what tells it apart from others, and a function that compiles, loads and launches it."""

_ahead: dict[Any, Callable[..., Iterator[Ahead]]] = {}
_made_ahead: set[Hashable] = set()
_made_ahead_lock = threading.Lock()

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Element types the kernels take. Anything else runs the reference."""


class _Mode:
    """Process-wide switches of the helpers below. Not thread-local: autograd runs backward on threads of its own."""

    reference_only = 0
    interpreted = 0
    poison = 0


@contextlib.contextmanager
def _switched_on(name: str) -> Iterator[None]:
    setattr(_Mode, name, getattr(_Mode, name) + 1)
    try:
        yield
    finally:
        setattr(_Mode, name, getattr(_Mode, name) - 1)


def force_reference() -> contextlib.AbstractContextManager[None]:
    """Within this context every op runs its reference in plain PyTorch, on any device."""
    return _switched_on("reference_only")


def interpreted_kernels() -> contextlib.AbstractContextManager[None]:
    """Within this context ops given CPU tensors run their kernels in Triton's interpreter (slow; for tests).

    Raises RuntimeError unless TRITON_INTERPRET=1 was set before kernl's kernels were imported.
    """
    if not INTERPRET:
        raise RuntimeError("kernels can be interpreted only when TRITON_INTERPRET=1 is set before kernl is imported")
    return _switched_on("interpreted")


def poisoned() -> contextlib.AbstractContextManager[None]:
    """Within this context `empty` hands out memory full of NaN (integers: the lowest value, bool: True)."""
    return _switched_on("poison")


def kernel_runs_on(tensor: torch.Tensor, op_family: str = "linear") -> bool:
    """Whether the Triton kernels of a family ("norm", "linear", "attention") can take this tensor.

    On CUDA: float16, bfloat16 or float32 and a recent enough GPU (Turing for norms, Ampere for the others and for
    bfloat16). On the CPU: only inside `interpreted_kernels()`.
    """
    if _Mode.reference_only or tensor.dtype not in KERNEL_DTYPES:
        return False
    if tensor.device.type == "cpu":
        return _Mode.interpreted > 0
    if tensor.device.type != "cuda" or INTERPRET:
        return False
    capability = capability_of(tensor.device)
    if tensor.dtype == torch.bfloat16 and not capability.has_bf16:
        return False
    return capability.fuses_norms if op_family == "norm" else capability.fuses_gemm_and_attention


def use_pdl(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor's device are launched as programmatic dependents (see kernels/common.py)."""
    return not INTERPRET and tensor.is_cuda and capability_of(tensor.device).has_pdl


def is_capturing() -> bool:
    """Whether the current CUDA stream records a graph: nothing may synchronise, measure or allocate outside torch."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_recorded(arguments: Iterable[Any]) -> bool:
    """Whether autograd records what is done with these arguments."""
    return torch.is_grad_enabled() and any(
        isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments
    )


def may_prefetch(tensor: torch.Tensor) -> bool:
    """Whether a kernel may read this tensor before its predecessor in the stream has finished.

    Only a parameter, and only while an inference graph is captured: in eager code the predecessor may be an optimiser
    that is writing it.
    """
    return isinstance(tensor, torch.nn.Parameter) and not torch.is_grad_enabled() and is_capturing()


def on_device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the tensor's GPU the current one: Triton launches there. Nothing to do for other devices."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


def empty(shape: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Contiguous uninitialised output. Every op allocates with this or with `empty_strided`."""
    return _poison(torch.empty(shape, dtype=dtype, device=device))


def empty_strided(
    shape: Sequence[int | torch.SymInt],
    strides: Sequence[int | torch.SymInt],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Uninitialised output of a given layout. Views of it (`transpose`, `select`) describe any layout as well."""
    return _poison(torch.empty_strided(shape, strides, dtype=dtype, device=device))


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    if _Mode.poison:
        if tensor.is_floating_point():
            tensor.fill_(math.nan)
        elif tensor.dtype == torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def define_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    fake: Callable[..., Any],
    autograd: tuple[Callable[..., None], Callable[..., Any]] | Literal["recorded"] | None = None,
    autocast: Callable[..., Any] | None = None,
    vmap: VmapRule | None = None,
    ahead: Callable[..., Iterator[Ahead]] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> Any:
    """Register `torch.ops.kernl.<name>` with all its parts and return the overload, ready to be called.

    schema: "name(Tensor input, float eps) -> Tensor", without the namespace. PyTorch leaves out trailing arguments
        that equal a default of the schema: functions that are to take them need that default as well.
    cpu, cuda: implementations; cuda defaults to the one for the CPU.
    fake: same signature, gives empty outputs of the right shape, type, strides and device; it must not branch on sizes.
    autograd: (setup_context(ctx, inputs, output), backward(ctx, *grads)), see `register_gradient`; or "recorded" for
        an implementation that uses nothing but PyTorch's operations whenever an operand requires a gradient, which
        autograd then records.
    autocast: `autocast(dtype, device_type, *args, **kwargs)` runs with autocast off for this op; it casts what it wants
        and calls the op.
    vmap: where vmap needs no loop over calls of the op, see `VmapRule`.
    ahead: for the arguments of a call, one pair (key, function) for each compiled kernel that the op could choose for
        other numbers of rows, other batches or sequence lengths. The function launches it on tiny tensors of its own,
        reading the given weights at most. See `ahead_of`.
    tags: further `torch.Tag`s; pt2_compliant_tag is always there.
    """
    name = schema.partition("(")[0].strip()
    LIB.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIB.impl(name, cpu, "CPU")
    LIB.impl(name, cuda or cpu, "CUDA")
    torch.library.register_fake(f"kernl::{name}", fake, lib=LIB)
    op = getattr(torch.ops.kernl, name).default
    if autograd == "recorded":
        register_recorded(LIB, op, cpu)
    elif autograd is not None:
        register_gradient(LIB, op, *autograd)
    register_vmap(LIB, op, vmap)
    if autocast is not None:
        LIB.impl(name, _under_autocast(autocast, "cuda"), "AutocastCUDA")
        LIB.impl(name, _under_autocast(autocast, "cpu"), "AutocastCPU")
    if ahead is not None:
        _ahead[op] = ahead
    return op


def ahead_of(op: Any, args: Sequence[Any]) -> list[Ahead]:
    """The compiled kernels that calls of `op` with other numbers of rows than these may need; none on a plain CPU.

    op: `torch.ops.kernl.<name>` or its default overload; any other op has none.
    args: the positional arguments of a call, all of them. Fake tensors do: of activations the sizes, strides, dtype and
        device count; weights that are real are read where they are.

    Does not raise: what goes wrong here is told by `compile_ahead`, as a failure of the op.
    """
    op = getattr(op, "default", op)
    function = _ahead.get(op)
    if function is None:
        return []
    device = next((tensor.device for tensor in _tensors(args)), None)
    try:
        return [((str(op), str(device), key), run) for key, run in function(*args)]
    except Exception as error:
        return [((str(op), str(device), str(error)), functools.partial(_fail, error))]


def _fail(error: Exception) -> None:
    raise error


@overload
def materialized(tensor: torch.Tensor) -> torch.Tensor: ...
@overload
def materialized(tensor: None) -> None: ...
@overload
def materialized(tensor: torch.Tensor | None) -> torch.Tensor | None: ...
def materialized(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor, or zeros of its layout where it is a fake one."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return torch.zeros(extent, dtype=tensor.dtype, device=tensor.device).as_strided(tensor.shape, tensor.stride())


def compile_ahead(pairs: Iterable[Ahead], *, workers: int | None = None) -> list[str]:
    """Run the functions of `ahead_of`, each key once in the life of the process. Returns what failed, in words.

    workers: threads, by default as many as there are processors, at most 8; with 1 all runs in this thread. Compilation
        spends its time in LLVM and ptxas, which run side by side. The kernels are launched on the current stream of the
        calling thread and have finished when this returns. Not to be called while a graph is captured.
    """
    todo: dict[Hashable, Callable[[], None]] = {}
    with _made_ahead_lock:
        for key, run in pairs:
            if key not in _made_ahead:
                todo.setdefault(key, run)
        _made_ahead.update(todo)
    if not todo:
        return []
    on_gpu = torch.cuda.is_available()
    stream = torch.cuda.current_stream() if on_gpu else None

    def attempt(item: tuple[Hashable, Callable[[], None]]) -> str | None:
        key, run = item
        try:
            # Device, stream and grad mode belong to a thread.
            with torch.cuda.stream(stream) if stream is not None else contextlib.nullcontext(), torch.inference_mode():
                run()
            return None
        except Exception as error:
            with _made_ahead_lock:
                _made_ahead.discard(key)
            text = str(error).strip()
            return f"{key}: {type(error).__name__}: {text.splitlines()[0][:200] if text else ''}"

    count = min(workers or min(8, os.cpu_count() or 1), len(todo))
    if INTERPRET:
        count = 1  # the interpreter replaces parts of Triton's language for all threads while a kernel runs
    if count <= 1:
        outcomes = [attempt(item) for item in todo.items()]
    else:
        with concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="kernl-compile") as pool:
            outcomes = list(pool.map(attempt, todo.items()))
    if stream is not None:
        stream.synchronize()
    return [outcome for outcome in outcomes if outcome is not None]


def _tensors(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for argument in args:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from _tensors(argument)


def _under_autocast(rule: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "Autocast" + device_type.upper()))

    def call(*args: Any, **kwargs: Any) -> Any:
        # Without the guard the rule's own call of the op would come back here.
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return rule(torch.get_autocast_dtype(device_type), device_type, *args, **kwargs)

    return call


@overload
def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...
@overload
def cast(tensor: None, dtype: torch.dtype) -> None: ...
@overload
def cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None: ...
def cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """What autocast does to one operand: float tensors but float64 go to `dtype`, anything else is left alone.

    Nothing is cached: autocast's own weight cache would hand a graph capture memory that dies with the context.
    """
    if tensor is None or not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    return tensor.to(dtype)
