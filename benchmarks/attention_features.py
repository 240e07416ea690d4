"""Attention with every feature, forward and backward, against PyTorch's kernels and FlexAttention.

    python benchmarks/attention_features.py                                    all cases
    python benchmarks/attention_features.py --cases "4x32x4096x128:causal:kv=8:bf16" --forward-only
    python benchmarks/attention_features.py --groups decode,causal --peers kernl,sdpa-cudnn

A case is batch x heads x seqlen x head_dim, then options after colons:

    causal, window=N (the last N keys), prefix=N (the first N keys are visible to all), kv=N (key heads), bf16
    lengths (keys of random lengths, half of all on average), bias (dense, [1, heads, seqlen, seqlen])
    t5 (T5's bias by distance: computed in kernl's kernel, materialised for the others)
    packed (sequences of lengths from 64 to seqlen one after the other; batch says how many)
    decode (one query, seqlen keys in a cache)

Peers: `kernl` as it chooses; `kernl-triton`, the fastest of its own kernels (`tiling` says which); sdpa-flash,
sdpa-cudnn, sdpa-efficient with what kernl gets as arguments turned into a mask; `flex`, FlexAttention compiled for the
case; `fa4`, FlashAttention-4 (flash-attn-4), where it is installed. A peer that cannot run a case is left out with a
line that says why.

`us` is GPU time of a forward pass with a cold L2 cache, `backward_us` what a backward pass adds. `floor_us` is the
larger of bytes over copy bandwidth and visible flops over matmul rate (forward). Results are compared with float64 for
one batch row and the heads of one key head.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.harness import (
    Results,
    add_common_arguments,
    check_result,
    floors,
    names_from,
    peer_module,
    run_if_available,
    time_in_graph,
)
from kernl.ops import RelativePositionBias, attention
from kernl.ops.relative_position import relative_position_bucket
from kernl.runtime.tuning import Trial, trial_of

GROUPS = {
    "encoder": "32x12x128x64 32x12x512x64 8x16x384x64",
    "lengths": "32x12x128x64:lengths 32x12x512x64:lengths 8x16x384x64:lengths",
    "bias": "32x12x512x64:bias 8x8x2048x64:bias",
    "t5": "32x12x512x64:t5 8x8x2048x64:t5",
    "causal": "8x16x1024x64:causal 4x32x4096x128:causal 1x32x16384x128:causal 4x32x4096x128:causal:kv=8:bf16",
    "sparse": "1x16x16384x64:causal:window=1024 4x16x4096x64:causal:prefix=512 16x16x4096x64:packed:causal",
    "decode": " ".join(f"{b}x32x{n}x128:decode:kv=8" for b in (1, 8, 64) for n in (512, 4096, 32768)),
}
_BACKENDS = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}
PEERS = ("kernl", "kernl-triton", *_BACKENDS, "flex", "fa4")
_FLAGS = {"causal", "lengths", "bias", "t5", "packed", "decode", "bf16"}
_NUMBERS = {"window", "prefix", "kv"}
_NOT_OURS = ("flash", "cudnn", "pytorch")
_BUCKETS = 32

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What is computed. numbers: the options with a value."""

    text: str
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    flags: frozenset[str] = frozenset()
    numbers: dict[str, int] = field(default_factory=dict, hash=False)

    @classmethod
    def parse(cls, text: str) -> Case:
        """Raises argparse.ArgumentTypeError for sizes or options that do not exist."""
        sizes, *options = text.split(":")
        numbers = dict(option.split("=", 1) for option in options if "=" in option)
        flags = {option for option in options if "=" not in option}
        if flags - _FLAGS or numbers.keys() - _NUMBERS:
            raise argparse.ArgumentTypeError(
                f"options of a case are {', '.join(sorted(_FLAGS))}, "
                f"{', '.join(f'{name}=N' for name in sorted(_NUMBERS))}; got {text!r}"
            )
        try:
            batch, heads, seqlen, head_dim = map(int, sizes.split("x"))
            return cls(
                text, batch, heads, seqlen, head_dim, frozenset(flags), {name: int(n) for name, n in numbers.items()}
            )
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"a case begins like 32x12x512x64, got {text!r}") from error

    @property
    def key_heads(self) -> int:
        return self.numbers.get("kv", self.heads)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if "bf16" in self.flags else torch.float16

    @property
    def needs_backward(self) -> bool:
        return "decode" not in self.flags


class Problem:
    """Operands of a case: query, key, value and the gradient of the output, [batch, heads, seqlen, head_dim]."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.device = device
        generator = torch.Generator(device).manual_seed(0)
        batch = 1 if "packed" in case.flags else case.batch
        drawn = random.Random(0)
        shares = [(row + 0.5) / case.batch for row in range(case.batch)]
        drawn.shuffle(shares)
        least = min(64, case.seqlen) if "packed" in case.flags else 1
        self.lengths = [max(1, round(least + share * (case.seqlen - least))) for share in shares]
        tokens = sum(self.lengths) if "packed" in case.flags else case.seqlen
        queries = 1 if "decode" in case.flags else tokens

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(case.dtype)

        self.query = normal(batch, queries, case.heads, case.head_dim).transpose(1, 2)
        self.key = normal(batch, tokens, case.key_heads, case.head_dim).transpose(1, 2)
        self.value = normal(batch, tokens, case.key_heads, case.head_dim).transpose(1, 2)
        self.grad = normal(batch, queries, case.heads, case.head_dim).transpose(1, 2)
        self.table = normal(_BUCKETS, case.heads)
        self.dense = normal(1, case.heads, queries, tokens) if "bias" in case.flags else None

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value

    @cached_property
    def starts(self) -> torch.Tensor:
        """Of packed sequences, int32 [sequences + 1]."""
        ends = torch.tensor([0, *self.lengths], device=self.device).cumsum(0)
        return ends.to(torch.int32)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments of `kernl.ops.attention`."""
        case, options = self.case, dict[str, Any]()
        if "causal" in case.flags:
            options["is_causal"] = True
        if "window" in case.numbers:
            options["window"] = (case.numbers["window"] - 1, 0 if "causal" in case.flags else -1)
        if "prefix" in case.numbers:
            options["prefix"] = torch.full((case.batch,), case.numbers["prefix"], dtype=torch.int32, device=self.device)
        if "lengths" in case.flags:
            options["key_padding"] = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        if self.dense is not None:
            options["attn_mask"] = self.dense
        if "t5" in case.flags:
            options["relative_position_bias"] = RelativePositionBias(self.table)
        if "packed" in case.flags:
            options |= {"cu_seqlens_q": self.starts, "cu_seqlens_k": self.starts}
            options |= {"max_seqlen_q": max(self.lengths), "max_seqlen_k": max(self.lengths)}
        return options

    @cached_property
    def visible(self) -> torch.Tensor | None:
        """bool, broadcasts to [batch, 1, queries, keys]; None when nothing is hidden or is_causal says it all."""
        case = self.case
        if not case.flags & {"lengths", "packed"} and not case.numbers.keys() & {"window", "prefix"}:
            return None
        rows, queries, keys = case.batch if "lengths" in case.flags else 1, self.query.shape[2], self.key.shape[2]
        batch = torch.arange(rows, device=self.device)[:, None, None, None]
        query = torch.arange(queries, device=self.device)[:, None]
        key = torch.arange(keys, device=self.device)[None, :]
        return self.rule()(batch, query, key).expand(rows, 1, queries, keys)

    def rule(self) -> Callable[[Any, Any, Any], Any]:
        """Whether a query sees a key, by their numbers and the batch row's: tensors, or what FlexAttention has."""
        flags, numbers, owner = self.case.flags, self.case.numbers, self.owner if "packed" in self.case.flags else None
        lengths = torch.tensor(self.lengths, device=self.device)

        def sees(batch: Any, query: Any, key: Any) -> Any:
            seen = query >= 0
            if "causal" in flags:
                seen = seen & (key <= query)
            if "window" in numbers:
                seen = seen & (query - key < numbers["window"])
            if "prefix" in numbers:
                seen = seen | (key < numbers["prefix"])
            if "lengths" in flags:
                seen = seen & (key < lengths[batch])
            if owner is not None:
                seen = seen & (owner[query] == owner[key])
            return seen

        return sees

    @cached_property
    def owner(self) -> torch.Tensor:
        """The sequence of each packed token."""
        lengths = torch.tensor(self.lengths, device=self.device)
        return torch.repeat_interleave(torch.arange(len(self.lengths), device=self.device), lengths)

    @cached_property
    def bias(self) -> torch.Tensor | None:
        """The dense bias, T5's materialised."""
        if "t5" not in self.case.flags:
            return self.dense
        queries, keys = (torch.arange(tensor.shape[2], device=self.device) for tensor in (self.query, self.key))
        bucket = relative_position_bucket(keys[None, :] - queries[:, None], _BUCKETS, True, 128)
        return self.table[bucket].permute(2, 0, 1)[None].contiguous()

    @property
    def is_only_causal(self) -> bool:
        return "causal" in self.case.flags and self.visible is None

    def mask(self) -> torch.Tensor | None:
        """What PyTorch's kernels get: bool, or the bias with -inf where nothing is visible."""
        if self.bias is None or self.visible is None:
            return self.visible if self.bias is None else self.bias
        return self.bias.masked_fill(~self.visible, -math.inf)

    def share_visible(self) -> float:
        """Of all pairs of queries and keys."""
        if self.is_only_causal:
            return 0.5
        return 1.0 if self.visible is None else float(self.visible.float().mean())

    def exact_and_plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One batch row, the heads of one key head: in float64, and in the operands' type."""
        group = self.case.heads // self.case.key_heads

        def part(tensor: torch.Tensor, heads: int) -> torch.Tensor:
            return tensor[:1, :heads]

        mask = self.mask()
        if self.is_only_causal:
            mask = torch.ones(self.query.shape[2], self.key.shape[2], dtype=torch.bool, device=self.device).tril()
        if mask is not None and mask.dim() == 4:
            mask = mask[:1, : group if mask.shape[1] > 1 else 1]
        results = []
        for dtype in (torch.float64, self.case.dtype):
            operands = [part(self.query, group), part(self.key, 1), part(self.value, 1)]
            added = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
            with sdpa_kernel(SDPBackend.MATH):
                results.append(
                    F.scaled_dot_product_attention(
                        *(tensor.to(dtype) for tensor in operands), attn_mask=added, enable_gqa=True
                    )
                )
        return results[0], results[1]

    def part_of(self, output: torch.Tensor) -> torch.Tensor:
        return output[:1, : self.case.heads // self.case.key_heads]


def with_sdpa(problem: Problem, backend: SDPBackend) -> Function:
    mask, causal, grouped = problem.mask(), problem.is_only_causal, problem.case.key_heads != problem.case.heads

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=grouped
            )

    return run


def with_flex(problem: Problem) -> Function:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case, bias = problem.case, problem.bias
    if "decode" in case.flags:
        raise ValueError("a cache is not measured with it")

    rule = problem.rule()

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return rule(batch, query, key)

    def biased(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        assert bias is not None
        return score + bias[0, head, query, key]

    block_mask = None
    if case.flags & {"causal", "lengths", "packed"} or case.numbers.keys() & {"window", "prefix"}:
        rows = case.batch if "lengths" in case.flags else None
        sizes = (problem.query.shape[2], problem.key.shape[2])
        block_mask = create_block_mask(sees, rows, None, *sizes, device=problem.device)
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = compiled(
            query,
            key,
            value,
            score_mod=None if bias is None else biased,
            block_mask=block_mask,
            enable_gqa=case.key_heads != case.heads,
        )
        return output

    return run


def with_fa4(problem: Problem) -> Function:
    """FlashAttention-4: lengths, packed sequences and windows as its arguments."""
    case, lengths = problem.case, torch.tensor(problem.lengths, dtype=torch.int32, device=problem.device)
    causal = "causal" in case.flags
    if problem.bias is not None or "prefix" in case.numbers or (causal and "lengths" in case.flags):
        raise ValueError(
            "a bias, a prefix, and lengths with causality (from the bottom right) are not measured with it"
        )
    flash = peer_module("flash_attn.cute", "flash-attn-4")
    options: dict[str, Any] = {"causal": causal}
    if "window" in case.numbers:
        options |= {"causal": False, "window_size": (case.numbers["window"] - 1, 0 if causal else None)}
    if "packed" in case.flags:
        longest = max(problem.lengths)
        options |= {"cu_seqlens_q": problem.starts, "cu_seqlens_k": problem.starts}
        options |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    if "lengths" in case.flags:
        options["seqused_k"] = lengths

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        by_tokens = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        if "packed" in case.flags:
            result = flash.flash_attn_varlen_func(*(tensor[0] for tensor in by_tokens), **options)
        else:
            function = flash.flash_attn_varlen_func if "lengths" in case.flags else flash.flash_attn_func
            result = function(*by_tokens, **options)
        output = result[0] if isinstance(result, tuple) else result
        return (output[None] if "packed" in case.flags else output).transpose(1, 2)

    return run


def with_kernl(problem: Problem, trial: Trial | None = None) -> Function:
    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with trial_of(trial):
            return attention(query, key, value, **problem.options)

    return run


def make_function(name: str, problem: Problem) -> Function:
    if name == "kernl":
        return with_kernl(problem)
    if name == "fa4":
        return with_fa4(problem)
    return with_flex(problem) if name == "flex" else with_sdpa(problem, _BACKENDS[name])


def time_forward(function: Function, problem: Problem, replays: int) -> float:
    """Microseconds."""
    with torch.no_grad():
        timing = time_in_graph(lambda: function(*problem.operands), replays=replays, flush_l2=True)
    return timing.median_ms * 1e3


def time_forward_if_possible(function: Function, problem: Problem, replays: int) -> float | None:
    """The same, or None with a line that says why."""

    def make() -> Callable[[], Any]:
        us = time_forward(function, problem, replays)
        return lambda: us

    answer = run_if_available("of a forward pass", make)
    return None if answer is None else answer()


def time_both(function: Function, problem: Problem, replays: int, trial: Trial | None = None) -> float | None:
    """Microseconds of a forward and a backward pass; None with a line that says why."""
    leaves = [tensor.detach().requires_grad_() for tensor in problem.operands]

    def both() -> None:
        with trial_of(trial):
            torch.autograd.grad(function(*leaves), leaves, problem.grad)

    def make() -> Callable[[], Any]:
        both()
        return both

    call = run_if_available("of a backward pass", make)
    return None if call is None else time_in_graph(call, replays=replays, flush_l2=True).median_ms * 1e3


def own_kernels(problem: Problem, replays: int, forward_only: bool) -> tuple[Trial, dict[str, float]]:
    """The fastest of kernl's own kernels, forced; and what each of them takes, forward or both ways."""
    trial, taken = Trial(), dict[str, float]()

    def race(op: str, measure: Callable[[], float | None]) -> None:
        """Force the fastest of those on offer for the one problem of this op that has been met."""
        for key in [key for key in trial.met if key[0] == op]:
            times = {}
            for name in trial.met[key][0]:
                if name not in _NOT_OURS:
                    trial.forced[key] = name
                    us = measure()
                    if us is not None:
                        times[name] = taken[f"{op}:{name}"] = us
            if times:
                trial.forced[key] = min(times, key=times.__getitem__)
            else:
                trial.forced.pop(key, None)

    function = with_kernl(problem, trial)
    with torch.no_grad():
        function(*problem.operands)
    race("attention", lambda: time_forward_if_possible(function, problem, replays))
    if not forward_only and problem.case.needs_backward:
        time_both(function, problem, 1, trial)
        race("attention_backward", lambda: time_both(function, problem, replays, trial))
    return trial, taken


def measure(case: Case, arguments: argparse.Namespace, results: Results) -> None:
    problem = Problem(case, "cuda" if torch.cuda.is_available() else "cpu")
    exact, plain = problem.exact_and_plain()
    query, key = problem.query, problem.key
    moved = (2 * query.numel() + 2 * key.numel()) * query.element_size()
    flops = 4.0 * query.shape[0] * case.heads * query.shape[2] * key.shape[2] * case.head_dim * problem.share_visible()
    floor_ms = max((each for each in floors(moved, flops) if each is not None), default=None)
    for name in arguments.peers:
        trial, taken = None, None
        if name == "kernl-triton":
            trial, taken = own_kernels(problem, arguments.replays, arguments.forward_only)
            function: Function = with_kernl(problem, trial)
        else:
            made: list[Function] = []

            def make(name: str = name, made: list[Function] = made) -> Callable[[], Any]:
                made.append(make_function(name, problem))
                with torch.no_grad():
                    made[0](*problem.operands)
                return lambda: None

            if run_if_available(f"{name} for {case.text}", make) is None:
                continue
            function = made[0]
        us = time_forward(function, problem, arguments.replays)
        with torch.no_grad():
            check = check_result(problem.part_of(function(*problem.operands)), exact, plain)
        if not name.startswith("kernl"):
            check["passed"] = True  # `error_ratio` says how precise a peer is
        both_us = None
        if case.needs_backward and not arguments.forward_only:
            both_us = time_both(function, problem, arguments.replays, trial)
        results.add(
            case=case.text,
            peer=name,
            us=us,
            backward_us=None if both_us is None else both_us - us,
            floor_us=None if floor_ms is None else floor_ms * 1e3,
            share=None if floor_ms is None else floor_ms * 1e3 / us,
            tiling=None if trial is None else " ".join(trial.forced.values()),
            times_us=taken,
            **check,
        )
        results.save()
        print(f"{case.text:40} {name:16} {us:10.1f} us, both ways {both_us or 0.0:10.1f} us", flush=True)


def summary(results: Results) -> Iterator[dict[str, Any]]:
    """Each case: kernl and its own kernels against the fastest peer, forward and backward."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for row in results.rows:
        cases.setdefault(row["case"], []).append(row)
    for case, rows in cases.items():
        line: dict[str, Any] = {"case": case}
        for which in ("us", "backward_us"):
            others = [row for row in rows if not row["peer"].startswith("kernl") and row[which]]
            best = min(others, key=lambda row: row[which], default=None)
            line[f"best_{which}"] = None if best is None else f"{best[which]:.1f} ({best['peer']})"
            for row in rows:
                if row["peer"].startswith("kernl") and row[which]:
                    line[f"{row['peer']}_{which}"] = row[which]
                    line[f"{row['peer']}_{which}_speedup"] = None if best is None else best[which] / row[which]
        yield line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: [Case.parse(one) for one in text.split()], help="see above")
    parser.add_argument("--groups", type=names_from(tuple(GROUPS), "group"), default=list(GROUPS))
    parser.add_argument("--peers", type=names_from(PEERS, "peer"), default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--forward-only", action="store_true")
    add_common_arguments(parser)
    arguments = parser.parse_args(argv)
    cases = arguments.cases or [Case.parse(one) for group in arguments.groups for one in GROUPS[group].split()]
    results = Results("attention_features", out=arguments.out)
    for case in cases[:2] if arguments.quick else cases:
        measure(case, arguments, results)
    print(results.table(rows=summary(results)))
    print(f"\nrows: {results.save()}")
    return results.exit_code()


if __name__ == "__main__":
    raise SystemExit(main())
