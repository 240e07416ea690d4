"""What autograd and torch.func do to an op: its gradient, at every level of torch.func.grad, and vmap.

PyTorch's own registrations lack things that a model may need: what `torch.library.register_autograd` makes is refused
by torch.func.grad and jacrev, answers forward mode (torch.func.jvp) with tangents of zero, and gives no gradients to a
list in which one tensor is None; the fallback for vmap takes no lists.

Here the gradient of an op is one autograd node for each level of torch.func, as those of PyTorch's operators are.
Forward mode is refused. vmap is a loop over calls of the op, or one call where the op says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

Arguments = tuple[Any, ...]

VmapRule = Callable[..., tuple[Any, Any] | None]
"""rule(op, batch_size, dims, *arguments): outputs and where their new dimension is, or None if this call is not for it.

dims: for each argument the dimension that vmap runs over, None for none; of the structure of the arguments.
"""


def register_gradient(
    library: torch.library.Library, op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> None:
    """setup_context(ctx, inputs, output) and backward(ctx, *grads), as `torch.library.register_autograd` takes them.

    inputs has the schema's defaults filled in. For an argument that is a list, `ctx.needs_input_grad` holds a list, and
    backward returns one or None.
    """
    apply = _node(op, setup_context, backward)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_forward_mode(op, arguments)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return apply(keyset, arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    library.impl(op._opname, kernel, "Autograd", with_keyset=True)


def register_recorded(library: torch.library.Library, op: Any, implementation: Callable[..., Any]) -> None:
    """For an implementation that uses nothing but PyTorch's operations whenever an operand requires a gradient.

    Autograd records these. torch.func does not see them, since it passes the op on from level to level: there the
    implementation is differentiated when its gradient is asked for.
    """

    def keep_all(ctx: Any, inputs: Arguments, output: Any) -> None:
        ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in inputs]
        ctx.save_for_backward(*(inputs[place] for place in ctx.places))

    def by_recording(ctx: Any, *grads: torch.Tensor) -> Arguments:
        inputs = list(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors):
            inputs[place] = tensor
        wanted = [place for place, needed in enumerate(ctx.needs_input_grad) if needed]

        def function(*tensors: torch.Tensor) -> Any:
            arguments = list(inputs)
            for place, tensor in zip(wanted, tensors):
                arguments[place] = tensor
            return implementation(*arguments)

        pull_back = torch.func.vjp(function, *(inputs[place] for place in wanted))[1]
        gradients: list[torch.Tensor | None] = [None] * len(ctx.needs_input_grad)
        for place, gradient in zip(wanted, pull_back(tuple(grads))):
            gradients[place] = gradient
        return tuple(gradients)

    apply = _node(op, keep_all, by_recording)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_forward_mode(op, arguments)
        if torch._C._are_functorch_transforms_active():
            if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
                return apply(keyset, arguments)
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)

    library.impl(op._opname, kernel, "Autograd", with_keyset=True)


def register_vmap(library: torch.library.Library, op: Any, rule: VmapRule | None) -> None:
    """One call where `rule` takes it, else one call for each element of the dimension."""

    def over_all(info: Any, dims: Arguments, *arguments: Any) -> tuple[Any, Any]:
        found = None if rule is None else rule(op, info.batch_size, dims, *arguments)
        if found is not None:
            return found
        if info.batch_size == 0:
            raise ValueError(f"vmap over {op.name()}: got a dimension of size 0, accepted 1 or more")
        (flat, lengths), (flat_dims, _) = _flattened(arguments), _flattened(dims)
        results = []
        for number in range(info.batch_size):
            here = [value if dim is None else value.select(dim, number) for value, dim in zip(flat, flat_dims)]
            results.append(op(*_nested(here, lengths)))
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        kind = type(results[0])
        return kind(torch.stack(parts) for parts in zip(*results)), kind([0] * len(results[0]))

    torch.library.register_vmap(op.name(), over_all, lib=library)


def by_rows(operands: int = 1) -> VmapRule:
    """Of an op that treats all rows of its first arguments, which broadcast, alike: one more dimension of rows."""

    def rule(op: Any, batch_size: int, dims: Arguments, *arguments: Any) -> tuple[Any, Any] | None:
        if any(dim is not None for dim in _flattened(dims[operands:])[0]):
            return None
        ranks = [tensor.dim() - (dim is not None) for tensor, dim in zip(arguments[:operands], dims)]
        moved = []
        for tensor, dim, rank in zip(arguments, dims, ranks):
            if dim is not None:
                tensor = tensor.movedim(dim, 0).unflatten(0, (batch_size, *[1] * (max(ranks) - rank)))
            moved.append(tensor)
        results = op(*moved, *arguments[operands:])
        return results, 0 if isinstance(results, torch.Tensor) else type(results)([0] * len(results))

    return rule


def _node(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Callable[[Any, Arguments], Any]:
    """A function that calls the op below autograd and leaves a node in the graph."""

    class Node(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, lengths: Any, *flat: Any) -> Any:
            ctx.lengths = lengths
            inputs = tuple(_nested(flat, lengths))
            # A node's forward turns gradients off, which is not for the levels of torch.func below this one.
            transformed = torch._C._are_functorch_transforms_active()
            with torch.set_grad_enabled(transformed), torch._C._AutoDispatchBelowAutograd():
                result = op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
            filled, _ = torch._library.utils.fill_defaults(op._schema, inputs, {})
            setup_context(ctx, filled, result)
            return tuple(result) if isinstance(result, list) else result

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            needed = ctx.needs_input_grad
            try:
                ctx.needs_input_grad = tuple(_nested(needed[2:], ctx.lengths))
                result = backward(ctx, *grads)
            finally:
                ctx.needs_input_grad = needed
            flat: list[Any] = [None, None]
            for gradient, length in zip(result, ctx.lengths, strict=True):
                flat.extend([gradient] if length is None else [None] * length if gradient is None else gradient)
            return tuple(flat)

        @classmethod
        def apply_once(cls, *arguments: Any) -> Any:
            """At the level of torch.func that is being computed alone: the op gets to those below by itself."""
            with enable_single_level_autograd_function():
                return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]

    Node.__name__ = Node.__qualname__ = f"{op._opname}_of_kernl"

    returns_list = len(op._schema.returns) == 1 and isinstance(op._schema.returns[0].type, torch._C.ListType)

    def apply(keyset: Any, arguments: Arguments) -> Any:
        flat, lengths = _flattened(arguments)
        transformed = torch._C._are_functorch_transforms_active()
        result = (Node.apply_once if transformed else Node.apply)(keyset, lengths, *flat)
        return list(result) if returns_list else result

    return apply


def _refuse_forward_mode(op: Any, arguments: Arguments) -> None:
    """Without a tangent of their own the outputs would count as constants."""
    if forward_ad._current_level < 0:
        return
    if any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in _tensors(arguments)):
        raise NotImplementedError(
            f"{op.name()} has no forward-mode derivative (torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad): "
            "use reverse mode, torch.func.vjp and jacrev; jacrev(jacrev(f)) is a Hessian"
        )


def _tensors(arguments: Sequence[Any]) -> Iterator[torch.Tensor]:
    for argument in _flattened(arguments)[0]:
        if isinstance(argument, torch.Tensor):
            yield argument


def _flattened(arguments: Sequence[Any]) -> tuple[list[Any], tuple[int | None, ...]]:
    """The arguments with the elements of lists in their place; and the lengths of those, None for what is no list."""
    flat: list[Any] = []
    lengths: list[int | None] = []
    for argument in arguments:
        is_list = isinstance(argument, (list, tuple))
        flat.extend(argument if is_list else [argument])
        lengths.append(len(argument) if is_list else None)
    return flat, tuple(lengths)


def _nested(flat: Sequence[Any], lengths: Sequence[int | None]) -> Iterator[Any]:
    place = 0
    for length in lengths:
        yield flat[place] if length is None else list(flat[place : place + length])
        place += 1 if length is None else length
