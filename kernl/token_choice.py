"""From the logits of one step to the next token, on the device: a step must never wait for the host.

Transformers' logits processors are Python objects. Three kinds of them can run inside a CUDA graph:

    look at             such as                                            run as
    scores alone        temperature, top-k, top-p, min-p, typical-p        the object itself
    the length          minimum lengths, tokens forced or forbidden        `TokenRule`: the length is a tensor
    tokens so far       repetition penalty                                 `Penalty`: over all of the token buffer

Any other kind (`Unserved`) means transformers' own loop. Sampling draws what `torch.multinomial` draws: the largest of
p / q with q exponential; only its check of p is left out, for which the host would have to wait.

Everything that a captured graph freezes is in `TokenChoice.key`. Lengths in it are counted from the end of the prompt,
so that prompts of all lengths share graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.generation import logits_process, stopping_criteria

Tensor = torch.Tensor


class Unserved(Exception):
    """Why a call of `generate` runs in transformers' own loop."""


class Progress(Protocol):
    """What has been generated: tensors that are written in place (`kernl.decoding.DecodingMemory`)."""

    tokens: Tensor  # int64 [batch, capacity + 1], of which the first `length` columns count
    ignored: Tensor  # int64 [batch]: leading tokens that no penalty counts
    length: Tensor  # int64 [1]
    prompt_length: Tensor  # int64 [1]


Process = Callable[[Progress, Tensor], Tensor]

_ON_SCORES_ALONE: tuple[type, ...] = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
)


class TokenChoice:
    """Greedy or sampled, after the processors; rows that are finished give the padding token.

    key: equal for choices that may share a captured graph. eos: int64 [n], or None when no token ends a row.
    ignored: int64 [batch], leading tokens that no penalty counts (padding), or None. It may differ between choices of
    one key.

    Raises Unserved for a processor or a stopping criterion that needs the host.
    """

    def __init__(
        self,
        generation_config: Any,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        prompt: Tensor,
    ) -> None:
        """prompt: int64 [batch, length]."""
        device, prompt_length = prompt.device, prompt.shape[1]
        self.do_sample = bool(generation_config.do_sample)
        self.eos, self.max_length = _read_criteria(criteria, device)
        self.pad = None if self.eos is None else generation_config._pad_token_tensor.to(device)
        self.ignored = _ignored_by(processors, prompt)
        parts: list[Any] = [self.do_sample, _value(self.eos), _value(self.pad)]
        self._processes: list[Process] = []
        for processor in processors:
            part, process = _read_processor(processor, prompt_length, device)
            parts.append(part)
            self._processes.append(process)
        self.key = tuple(parts)

    def __call__(self, progress: Progress, logits: Tensor) -> Tensor:
        """The next token of each row, int64 [batch]. logits: float32 [batch, vocabulary]."""
        scores = logits
        for process in self._processes:
            scores = process(progress, scores)
        if not self.do_sample:
            return scores.argmax(dim=-1)
        probabilities = scores.softmax(dim=-1)
        return (probabilities / torch.empty_like(probabilities).exponential_(1)).argmax(dim=-1)


def _read_criteria(criteria: Sequence[Any], device: torch.device) -> tuple[Tensor | None, int]:
    """The tokens that end a row, and the length at which all rows end."""
    eos: Tensor | None = None
    lengths = []
    for criterion in criteria:
        if type(criterion) is stopping_criteria.MaxLengthCriteria:
            lengths.append(int(criterion.max_length))
        elif type(criterion) is stopping_criteria.EosTokenCriteria and eos is None:
            eos = criterion.eos_token_id.to(device)
        else:
            raise Unserved(f"the stopping criterion {type(criterion).__name__} needs the host")
    if not lengths:
        raise Unserved("there is no maximum length")
    return eos, min(lengths)


def _read_processor(processor: Any, prompt_length: int, device: torch.device) -> tuple[Any, Process]:
    """Key and function of one processor."""
    kind = type(processor)
    name = kind.__name__
    if kind in _ON_SCORES_ALONE:
        return (name, _values_of(processor)), lambda progress, scores: processor(progress.tokens, scores)
    if kind is logits_process.RepetitionPenaltyLogitsProcessor:
        penalty = Penalty(float(processor.penalty))
        return (name, penalty.factor), penalty
    rule = _token_rule(processor, prompt_length, device)
    if rule is None:
        raise Unserved(f"the logits processor {name} needs the host")
    return (name, _value(rule.ids), rule.lengths, rule.forces), rule


def _ignored_by(processors: Sequence[Any], prompt: Tensor) -> Tensor | None:
    """Leading tokens of each row that a repetition penalty does not count: newer versions leave padding out."""
    found = [p for p in processors if type(p) is logits_process.RepetitionPenaltyLogitsProcessor]
    ignored = [p.prompt_ignore_length for p in found if p.prompt_ignore_length is not None]
    if not ignored:
        return None
    if len(found) > 1:
        raise Unserved("several repetition penalties that leave tokens out")
    return torch.as_tensor(ignored[0], dtype=torch.long, device=prompt.device).expand(prompt.shape[0]).contiguous()


@dataclass(frozen=True)
class Penalty:
    """Make tokens that have occurred less likely: scores divided by the factor, or multiplied where negative."""

    factor: float

    def __call__(self, progress: Progress, scores: Tensor) -> Tensor:
        vocabulary = scores.shape[-1]
        positions = torch.arange(progress.tokens.shape[1], device=scores.device)
        counts = (positions >= progress.ignored[:, None]) & (positions < progress.length)
        counts &= progress.tokens < vocabulary
        occurred = torch.zeros(scores.shape[0], vocabulary + 1, dtype=torch.bool, device=scores.device)
        occurred.scatter_(1, torch.where(counts, progress.tokens, vocabulary), True)
        penalised = torch.where(scores < 0, scores * self.factor, scores / self.factor)
        return torch.where(occurred[:, :vocabulary], penalised, scores)


def _token_rule(processor: Any, prompt_length: int, device: torch.device) -> TokenRule | None:
    """A processor that forces or forbids tokens at some lengths, as a rule with lengths counted from the prompt on."""
    kind = type(processor)

    def rule(ids: Any, first: int | None, last: int | None, *, forces: bool = False) -> TokenRule:
        return TokenRule(torch.as_tensor(ids, dtype=torch.long, device=device).reshape(-1), (first, last), forces)

    if kind is logits_process.SuppressTokensLogitsProcessor:
        return rule(processor.suppress_tokens, None, None)
    if kind is logits_process.SuppressTokensAtBeginLogitsProcessor:
        begin = processor.begin_index - prompt_length
        return rule(processor.begin_suppress_tokens, begin, begin)
    if kind is logits_process.MinLengthLogitsProcessor:
        return rule(processor.eos_token_id, None, processor.min_length - prompt_length - 1)
    if kind is logits_process.MinNewTokensLengthLogitsProcessor:
        skipped = processor.prompt_length_to_skip - prompt_length
        return rule(processor.eos_token_id, None, skipped + processor.min_new_tokens - 1)
    if kind is logits_process.ForcedBOSTokenLogitsProcessor:
        return rule(processor.bos_token_id, 1 - prompt_length, 1 - prompt_length, forces=True)
    if kind is logits_process.ForcedEOSTokenLogitsProcessor:
        last = processor.max_length - 1 - prompt_length
        return rule(processor.eos_token_id, last, last, forces=True)
    return None


@dataclass(frozen=True)
class TokenRule:
    """Forbid some tokens, or force one of them, while the number of new tokens lies in a range.

    ids: int64 [n]. lengths: first and last number of new tokens the rule holds for; None: no bound. forces: the scores
    of these tokens become 0 and all others -inf; otherwise theirs become -inf.
    """

    ids: Tensor
    lengths: tuple[int | None, int | None]
    forces: bool

    def __call__(self, progress: Progress, scores: Tensor) -> Tensor:
        mask = _marked(self.ids, scores.shape[-1])
        ruled = torch.where(mask, 0.0, -torch.inf) if self.forces else torch.where(mask, -torch.inf, scores)
        first, last = self.lengths
        new_tokens = progress.length - progress.prompt_length
        if first is not None:
            ruled = torch.where(new_tokens >= first, ruled, scores)
        return ruled if last is None else torch.where(new_tokens <= last, ruled, scores)


def _marked(ids: Tensor, vocabulary: int) -> Tensor:
    """bool [vocabulary], True at these ids; ids outside of it mark nothing. (`torch.isin` may wait for the host.)"""
    inside = (ids >= 0) & (ids < vocabulary)
    marks = torch.zeros(vocabulary + 1, dtype=torch.bool, device=ids.device)
    return marks.index_fill_(0, torch.where(inside, ids, vocabulary), True)[:vocabulary]


def _values_of(processor: Any) -> tuple[Any, ...]:
    return tuple((name, _value(value)) for name, value in sorted(vars(processor).items()))


def _value(value: Any) -> Any:
    """An attribute as something to compare by value. Reading a tensor waits for the device, once a call."""
    if isinstance(value, Tensor):
        flat: list[Any] = value.reshape(-1).tolist()
        return tuple(flat)
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    raise Unserved(f"a logits processor holds a {type(value).__name__}")
