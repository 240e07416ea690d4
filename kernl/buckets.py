"""Buckets: calls of many lengths, padded to a few.

Each shape has a CUDA graph of its own, so sequences of every length would be captured one by one. With
`Options(buckets=...)` a call is padded on the right to the next bucket, served by the graph of that shape, and its
outputs are cut back. Nobody can tell, because nothing is padded before it is proven that nobody can.

**Learning.** The first call of a kind (names, types and dtypes of its arguments, whatever their sizes) runs as it is.
The graph that it compiled comes with an analysis of where tokens go (`kernl.graph.tokens`): which arguments have them,
which one is the mask, which dimensions of which outputs have them, up to which length, or why padding would show. With
the front door's plan of that call this makes a `Lesson`. A graph of a call without a mask cannot hide anything: the
next such call is given a mask of ones, and a lesson is learnt from that.

**Serving.** A later call of that kind, of another length, is padded and goes to the very graph that was analysed, with
its sizes filled in: TorchDynamo is not asked, so its conditions on sizes are checked here, for the true length as for
the padded one. The mask is padded with zeros, all else with copies of the last token.

**For whom.** Models of transformers. There 1 in an `attention_mask` means visible and no mask means ones, tables of
positions are as long as the config says, and what is computed at padding is finite; in a module of one's own none of
this can be read off the graph.

What stays as it is: length 1; lengths longer than every bucket, or than the model's maximum; training mode; calls
that need gradients; a mask with a row of nothing but zeros, where the model gives the mean over all tokens, padding
included, or with other numbers than 0 and 1 (looking at a mask on the GPU waits for it; models with
`attn_implementation="sdpa"` need no look).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from kernl.graph.tokens import TokenFlow
from kernl.options import Options
from kernl.report import PaddingCounts
from kernl.signature import BY_VALUE, read_call

Tensor = torch.Tensor

SMALLEST_POWER = 16
MOST_WASTE = 1.25
"""Of "auto": tokens run for each true one, over all calls so far."""
_STEP = 8  # lengths are multiples of it where "auto" chooses: tensor cores like them
_FIRST_PLANNING = 16  # calls until "auto" plans for the first time; then whenever they have doubled
_MAX_SHAPES = 512


class Policy(Protocol):
    """Which bucket for a call; None when it is longer than all of them."""

    def bucket(self, length: int, batch: int, limit: int | None) -> int | None:
        """limit: the longest length the model takes, None for any."""


class Powers:
    """Powers of two from 16 up; the model's maximum stands for those beyond it."""

    def bucket(self, length: int, batch: int, limit: int | None) -> int | None:
        power = max(SMALLEST_POWER, 1 << (length - 1).bit_length())
        return power if limit is None else min(power, limit)


class Listed:
    """The lengths the user has given; those beyond the model's maximum are not used."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = sorted(lengths)

    def bucket(self, length: int, batch: int, limit: int | None) -> int | None:
        fitting = (each for each in self.lengths if length <= each and (limit is None or each <= limit))
        return next(fitting, None)


class Learnt:
    """As few buckets as the lengths seen allow when for each true token at most 1.25 are to be run.

    A call takes the smallest bucket that it fits in, unless the bound would break; then a bucket is made for it: its
    length, rounded up to a multiple of 8 where the bound allows. Now and then (when calls have doubled) the buckets are
    planned anew from all lengths seen so far.
    """

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._seen: Counter[int] = Counter()  # length -> sequences
        self._calls = 0
        self._next_planning = _FIRST_PLANNING
        self._true = self._padded = 0
        self._lock = threading.Lock()

    def bucket(self, length: int, batch: int, limit: int | None) -> int | None:
        with self._lock:
            self._seen[length] += batch
            self._calls += 1
            if self._calls >= self._next_planning:
                self.lengths = plan(self._seen, limit)
                self._next_planning *= 2
            rounded = _rounded(length, limit)
            fitting = [each for each in self.lengths if each >= length][:1]
            chosen = next((each for each in (*fitting, rounded) if self._allows(length, each, batch)), length)
            if chosen not in self.lengths:
                self.lengths = sorted([*self.lengths, chosen])
            self._true += batch * length
            self._padded += batch * chosen
            return chosen

    def _allows(self, length: int, bucket: int, batch: int) -> bool:
        return self._padded + batch * bucket <= MOST_WASTE * (self._true + batch * length)


def _rounded(length: int, limit: int | None) -> int:
    rounded = -(-length // _STEP) * _STEP
    return rounded if limit is None else max(min(rounded, limit), length)


def plan(seen: Mapping[int, int], limit: int | None = None) -> list[int]:
    """Buckets for these lengths (length -> sequences), such that at most 1.25 tokens are run for each true one.

    Each length starts as its own bucket; the neighbours that cost the fewest tokens are merged as long as that holds.
    """
    groups = [[length, count] for length, count in sorted(seen.items())]
    allowed = MOST_WASTE * sum(length * count for length, count in seen.items())
    padded = sum(length * count for length, count in seen.items())
    while len(groups) > 1:
        cost, place = min(
            ((upper[0] - lower[0]) * lower[1], place) for place, (lower, upper) in enumerate(itertools.pairwise(groups))
        )
        if padded + cost > allowed:
            break
        padded += cost
        groups[place + 1][1] += groups[place][1]
        del groups[place]
    buckets: list[int] = []
    for length, count in groups:
        cost = (_rounded(length, limit) - length) * count
        if padded + cost <= allowed:
            padded, length = padded + cost, _rounded(length, limit)
        buckets.append(length)
    return sorted(set(buckets))


def policy_of(options: Options) -> Policy:
    if options.buckets == "powers":
        return Powers()
    if options.buckets == "auto":
        return Learnt()
    assert not isinstance(options.buckets, str)
    return Listed(options.buckets)


class Plan(Protocol):
    """What is needed of the front door's plans."""

    @property
    def graph(self) -> Any: ...

    @property
    def slots(self) -> tuple[tuple[int, int], ...]: ...

    @property
    def build(self) -> Callable[[Sequence[Any], Sequence[Any]], Any]: ...

    def fits(self) -> bool: ...

    def for_sizes(self, numbers: Mapping[int, int]) -> Any: ...


class Door(Protocol):
    """What is needed of the front door."""

    plain: Callable[..., Any]

    @property
    def book(self) -> Any: ...

    def plan_of(self, signature: tuple[Any, ...]) -> Any: ...

    def run(self, plan: Any, tensors: Sequence[Tensor], book: Any, model: nn.Module) -> list[Any] | None: ...


class Unpadded(Exception):
    """Why a call runs as it is."""


class Lesson:
    """How calls of one kind are padded for the graph that served one of them; `because` says why they are not."""

    def __init__(self, plan: Plan, arguments: int, longest: int | None) -> None:
        """arguments: how many tensors such a call has. longest: the length that the config allows, None without."""
        self.plan = plan
        self.because: str | None = None
        self._sizes: dict[Any, Any] = {}  # by shapes: the values of the graph's symbols, None where it serves others
        self._plans: dict[Any, Any] = {}  # by these values when padded
        flow, slots = plan.graph.inputs.tokens, dict(plan.slots)
        if not isinstance(flow, TokenFlow):
            self.because = flow or "the graph was not analysed"
            return
        self.flow = flow
        self.limit = min((each for each in (flow.limit, longest) if each is not None), default=None)
        self._slots = slots
        if flow.needs_limit and longest is None:
            self.because = "positions may be out of their table, and the config has no max_position_embeddings"
        elif not set(flow.inputs) <= slots.keys():
            self.because = "a tensor with the length is no argument"
        elif not set(flow.numbers.values()) <= {size for position in slots for size in flow.shapes[position]}:
            self.because = "the graph takes a number that is no size of an argument"
        elif _holds_numbers(plan.build([None] * len(flow.outputs), [None] * arguments)):
            self.because = "the result holds a number"
        else:
            self.mask = None if flow.mask is None else slots[flow.mask]
            self.with_tokens = frozenset(slots[position] for position in flow.inputs)

    def sizes(self, tensors: Sequence[Tensor]) -> tuple[int, int]:
        """Batch and length of a call. The batch may be 1 in some arguments (position ids)."""
        shapes = [tensors[index].shape for index in self.with_tokens]
        return max(shape[0] for shape in shapes), shapes[0][1]

    def serves(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the graph is the one for this call as it is."""
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in self._sizes:
            if len(self._sizes) >= _MAX_SHAPES:
                self._sizes.clear()
            self._sizes[shapes] = self.flow.sizes_of(
                {position: shapes[index] for position, index in self._slots.items()}
            )
        return self._sizes[shapes] is not None

    def plan_for(self, tensors: Sequence[Tensor], bucket: int) -> Any:
        """The plan that serves this call padded to the bucket; None if its graph does not."""
        sizes = {**self._sizes[tuple(tensor.shape for tensor in tensors)], self.flow.length: bucket}
        key = tuple(sizes.values())
        if key not in self._plans:
            if len(self._plans) >= _MAX_SHAPES:
                self._plans.clear()
            numbers = {position: sizes[symbol] for position, symbol in self.flow.numbers.items()}
            self._plans[key] = self.plan.for_sizes(numbers) if self.flow.serves(sizes) else None
        return self._plans[key]

    def pad(self, tensors: Sequence[Tensor], bucket: int) -> list[Tensor]:
        return [
            _padded(tensor, bucket, with_zeros=index == self.mask) if index in self.with_tokens else tensor
            for index, tensor in enumerate(tensors)
        ]

    def cut(self, outputs: Sequence[Any], length: int) -> list[Any]:
        """Outputs without padding, laid out as tensors of their size usually are."""
        return [self._cut(output, dims, length) for output, dims in zip(outputs, self.flow.outputs)]

    @staticmethod
    def _cut(output: Any, dims: tuple[int, ...], length: int) -> Any:
        if not dims or output.shape[dims[0]] == length:
            return output
        for dim in dims:
            output = output.narrow(dim, 0, length)
        return output.contiguous()


def _padded(tensor: Tensor, bucket: int, *, with_zeros: bool) -> Tensor:
    """tensor [batch, length, ...], padded on the right: with zeros, or with copies of the last token."""
    missing = bucket - tensor.shape[1]
    if not missing:
        return tensor
    last = tensor[:, -1:].expand(-1, missing, *tensor.shape[2:])
    return torch.cat((tensor, torch.zeros_like(last) if with_zeros else last), 1)


def _holds_numbers(result: Any) -> bool:
    """Numbers in a result may come from the length."""
    if isinstance(result, Mapping):
        return any(map(_holds_numbers, result.values()))
    if isinstance(result, (tuple, list)):
        return any(map(_holds_numbers, result))
    return isinstance(result, (int, float)) and not isinstance(result, bool)


class Buckets:
    """Pads the calls of one model. Keeps no reference to the model or its front door."""

    def __init__(self, options: Options, counts: PaddingCounts, names: Sequence[str]) -> None:
        """names: the arguments that forward takes by name."""
        self._policy = policy_of(options)
        self._counts = counts
        self._takes_mask = "attention_mask" in names

    def call(
        self,
        door: Door,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        forward: Callable[..., Any],
    ) -> Any:
        """The result of a call. args, kwargs: by name as far as possible. forward: makes it without padding."""
        try:
            if not is_of_transformers(model, door.plain):
                raise Unpadded("the model is none of transformers' own, and what its mask means is not known")
            if model.training:
                raise Unpadded("the model is in training mode")
            if args:
                raise Unpadded("arguments are given by position to a forward that takes any number of them")
            return self._padded(door, model, kwargs, forward)
        except Unpadded as reason:
            self._counts.unpadded[str(reason)] += 1
        result = forward(*args, **kwargs)
        if not args and not model.training:
            self._learn(door, model, kwargs)
        return result

    def _padded(self, door: Door, model: nn.Module, kwargs: dict[str, Any], forward: Callable[..., Any]) -> Any:
        kind, tensors = read_kind(kwargs)
        book = door.book
        lessons = [lesson for lesson in book.kinds.get(kind, ()) if lesson.plan.fits()]
        if not lessons:
            raise Unpadded("first calls of their kind, or calls that the front door does not serve")
        because: Unpadded | None = None
        for lesson in reversed(lessons):
            try:
                if lesson.because is not None:
                    raise Unpadded(lesson.because)
                if lesson.flow.attends:
                    return self._with_mask(door, model, kwargs, lesson, tensors, forward)
                return lesson.plan.build(self._served(door, model, book, lesson, tensors, kwargs), tensors)
            except Unpadded as reason:
                because = because or reason
        assert because is not None
        raise because

    def _with_mask(
        self,
        door: Door,
        model: nn.Module,
        kwargs: dict[str, Any],
        lesson: Lesson,
        tensors: Sequence[Tensor],
        forward: Callable[..., Any],
    ) -> Any:
        """Make the call with a mask that hides nothing: its graph can hide padding."""
        if not self._takes_mask or kwargs.get("attention_mask") is not None:
            raise Unpadded("an attention has no mask")
        batch, length = lesson.sizes(tensors)
        mask = torch.ones((batch, length), dtype=torch.long, device=tensors[next(iter(lesson.with_tokens))].device)
        kwargs = {**kwargs, "attention_mask": mask}
        kind, _ = read_kind(kwargs)
        if any(known.plan.fits() for known in door.book.kinds.get(kind, ())):
            return self._padded(door, model, kwargs, forward)
        self._counts.unpadded["first calls of their kind with a mask of ones"] += 1
        result = forward(**kwargs)
        self._learn(door, model, kwargs)
        return result

    def _served(
        self, door: Door, model: nn.Module, book: Any, lesson: Lesson, tensors: Sequence[Tensor], kwargs: dict[str, Any]
    ) -> list[Any]:
        """The graph's outputs without padding."""
        batch, length = lesson.sizes(tensors)
        if length < 2:
            raise Unpadded("length 1 has a graph of its own")
        if lesson.limit is not None and length > lesson.limit:
            raise Unpadded(f"longer than the model's maximum, {lesson.limit}")
        if not lesson.serves(tensors):
            raise Unpadded("the graph serves other sizes")
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise Unpadded("the caller is capturing a graph itself")
        if lesson.flow.needs_visible_keys:
            assert lesson.mask is not None
            _look_at(tensors[lesson.mask])
        bucket = self._policy.bucket(length, batch, lesson.limit)
        if bucket is None:
            raise Unpadded("longer than every bucket")
        plan = lesson.plan_for(tensors, bucket)
        if plan is None:
            raise Unpadded("the graph serves other sizes")
        outputs = door.run(plan, lesson.pad(tensors, bucket), book, model)
        if outputs is None:
            raise Unpadded("the model has changed")
        self._counts.add(batch * length, batch * bucket, bucket)
        return lesson.cut(outputs, length)

    def _learn(self, door: Door, model: nn.Module, kwargs: dict[str, Any]) -> None:
        """Keep what the front door has learnt from the call just made, if that is new."""
        call = read_call((), kwargs)
        plan = None if call is None else door.plan_of(call[0])
        if plan is None:
            return
        try:
            kind, tensors = read_kind(kwargs)
        except Unpadded:
            return
        lessons = door.book.kinds.setdefault(kind, [])
        if all(lesson.plan.graph is not plan.graph or not lesson.plan.fits() for lesson in lessons):
            longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
            lessons.append(Lesson(plan, len(tensors), longest if isinstance(longest, int) else None))


def is_of_transformers(model: nn.Module, forward: Callable[..., Any]) -> bool:
    """Whether class and forward, and with them the meaning of the arguments, are transformers' own."""
    return type(model).__module__.startswith("transformers.models.") and forward is type(model).forward


def _look_at(mask: Tensor) -> None:
    """Raise Unpadded unless a mask [batch, length] is of zeros and ones, and each row has a one."""
    ones = mask == 1
    if not bool(((mask == 0) | ones).all() & ones.any(1).all()):
        raise Unpadded("a row of the mask hides every token, or the mask holds other numbers than 0 and 1")


def read_kind(kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], list[Tensor]]:
    """What a call has in common with those of other sizes, and its tensors in order. Raises Unpadded."""
    parts: list[Any] = []
    tensors: list[Tensor] = []
    for name, value in kwargs.items():
        parts.append(name)
        if type(value) is Tensor and value.layout is torch.strided:
            if not value.is_contiguous():
                raise Unpadded(f"argument {name} is not contiguous")
            tensors.append(value)
            parts += (value.dtype, value.dim(), value.device, value.requires_grad)
        elif type(value) in BY_VALUE:
            parts += (type(value), value)
        elif type(value) is float:
            parts.append(value.hex())
        else:
            raise Unpadded(f"argument {name} is a {type(value).__name__}")
    if len(set(map(id, tensors))) != len(tensors):
        raise Unpadded("a tensor is given twice")
    return tuple(parts), tensors
