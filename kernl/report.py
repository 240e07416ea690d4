"""What kernl did to a model: what was fused where, what was refused and why, what runs, and what each part costs.

    print(model.kernl.report())                    text
    model.kernl.report(profile=inputs)             with the share of GPU time of each implementation
    model.kernl.report().as_dict()                 plain numbers and strings

Nothing is left out silently: a pattern that matched, one that was refused, a node that nobody knows, a CUDA graph that
was not captured, a call that did not take the front door, each is here with its reason.
"""

from __future__ import annotations

import dataclasses
import html
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tabulate import tabulate

from kernl.graph import RewriteReport
from kernl.options import Options
from kernl.runtime import tuning

_MAX_REASONS = 8


class KernlWarning(UserWarning):
    """Something runs, but not the way it was meant to."""


_said: set[str] = set()
_said_lock = threading.Lock()


def warn_once(key: str, message: str) -> bool:
    """Warn unless a warning with this key was given before in this process. Returns whether it was given now."""
    with _said_lock:
        if key in _said:
            return False
        _said.add(key)
    warnings.warn(message, KernlWarning, stacklevel=3)
    return True


def forget_warnings() -> None:
    """Let every one-time warning be given again."""
    with _said_lock:
        _said.clear()


def reason_of(error: BaseException) -> str:
    """An exception on one line; of TorchDynamo's wrappers around it, nothing."""
    error = getattr(error, "inner_exception", error)
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@dataclass
class GraphReport:
    """One graph that TorchDynamo captured.

    name: "graph 0" and up, in the order of capture.
    device: where it runs; "several" when its inputs are on more than one.
    symbolic: whether sizes are symbols, so that one graph serves many shapes.
    nodes: calls in the graph as captured.
    lowering: "eager", "inductor", or "plain PyTorch" when kernl stepped aside.
    gradients: whether some input needs gradients.
    rewriting: what the patterns did; None when kernl stepped aside before.
    seconds: time kernl (not TorchDynamo) spent on it, without `kernel_seconds`.
    kernel_seconds: time spent compiling kernels for all batches and lengths before the first run.
    kernel_failures: what failed in that; such a kernel is tried again when a call needs it.
    plain_because: why plain PyTorch runs instead.
    no_cuda_graph_because: why none is captured; None when they are.
    cuda_graphs: asks the runner how many graphs it holds ("captured") and why calls ran without ("skipped").
    """

    name: str
    device: str = "cpu"
    symbolic: bool = False
    nodes: int = 0
    lowering: str = "eager"
    gradients: bool = False
    rewriting: RewriteReport | None = None
    seconds: float = 0.0
    kernel_seconds: float = 0.0
    kernel_failures: Sequence[str] = ()
    plain_because: str | None = None
    no_cuda_graph_because: str | None = None
    cuda_graphs: Callable[[], Mapping[str, Any]] | None = None

    def as_dict(self) -> dict[str, Any]:
        entry = {
            name: getattr(self, name)
            for name in (
                "name device symbolic nodes lowering gradients seconds kernel_seconds kernel_failures plain_because "
                "no_cuda_graph_because".split()
            )
        }
        entry["cuda_graphs"] = dict(self.cuda_graphs()) if self.cuda_graphs is not None else None
        return entry


@dataclass
class CallCounts:
    """How calls reached the compiled graphs, and why some signatures stay with TorchDynamo's guards.

    direct: through the front door. guarded: through TorchDynamo. plain: plain PyTorch, after a failure.
    signatures: kinds of calls the front door knows now.
    closed: reason -> number of times it kept the front door from learning a signature.
    """

    direct: int = 0
    guarded: int = 0
    plain: int = 0
    signatures: int = 0
    closed: Counter[str] = field(default_factory=Counter)

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "closed": dict(self.closed)}


@dataclass
class PaddingCounts:
    """Calls padded to a bucket (`Options.buckets`), and why others were not.

    calls: padded, or of a bucket's very length. true_tokens: batch times length of these, as called; padded_tokens:
    as run. buckets: length -> calls. unpadded: reason -> calls.
    """

    calls: int = 0
    true_tokens: int = 0
    padded_tokens: int = 0
    buckets: Counter[int] = field(default_factory=Counter)
    unpadded: Counter[str] = field(default_factory=Counter)

    def add(self, true_tokens: int, padded_tokens: int, bucket: int) -> None:
        """Count one call."""
        self.calls += 1
        self.true_tokens += true_tokens
        self.padded_tokens += padded_tokens
        self.buckets[bucket] += 1

    def as_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "buckets": dict(self.buckets), "unpadded": dict(self.unpadded)}

    def __str__(self) -> str:
        waste = f" ({self.padded_tokens / self.true_tokens:.2f} for each)" if self.true_tokens else ""
        used = ", ".join(f"{length} ({calls} calls)" for length, calls in sorted(self.buckets.items())) or "none"
        tokens = f"{self.true_tokens} true tokens, {self.padded_tokens} run{waste}"
        return f"{self.calls} calls padded: {tokens}; buckets: {used}"


@dataclass
class GenerationCounts:
    """Which loop `generate` ran in.

    fast: calls in kernl's loop; looks: times the host looked whether all rows had ended.
    stepped: why not there -> calls in transformers' loop over kernl's prefill and steps.
    transformers: why not so either -> calls in transformers' loop over the model as it is.
    tokens: new tokens of the first two kinds.
    graphs: asks how many CUDA graphs of prefill and steps are held ("captured") and why some ran without ("skipped").
    """

    fast: int = 0
    tokens: int = 0
    looks: int = 0
    stepped: Counter[str] = field(default_factory=Counter)
    transformers: Counter[str] = field(default_factory=Counter)
    graphs: Callable[[], Mapping[str, Any]] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "fast": self.fast,
            "tokens": self.tokens,
            "looks": self.looks,
            "stepped": dict(self.stepped),
            "transformers": dict(self.transformers),
            "cuda_graphs": None if self.graphs is None else dict(self.graphs()),
        }

    def __str__(self) -> str:
        over_model, stepped = self.transformers.total(), self.stepped.total()
        text = (
            f"{self.fast} calls in kernl's loop, {stepped} in transformers' over kernl's steps, {over_model} in "
            f"transformers' over the model ({self.tokens} new tokens, {self.looks} looks of the host)"
        )
        if self.graphs is not None and (self.fast or stepped):
            state = self.graphs()
            skips = [f"{count} runs without: {why}" for why, count in state["skipped"].items()]
            text += "; CUDA graphs: " + "; ".join([f"{state['captured']} captured", *skips])
        return text


class Report:
    """Everything known about one optimised model (or about all graphs of `torch.compile(backend="kernl")`)."""

    def __init__(self, subject: str = "model", options: Options | None = None) -> None:
        self.subject = subject
        self.options = options or Options()
        self.graphs: list[GraphReport] = []
        self.calls = CallCounts()
        self.padding = PaddingCounts()
        self.generation = GenerationCounts()
        self.notes: Counter[str] = Counter()
        self.gpu_time: dict[str, float] = {}
        self._lock = threading.Lock()

    def new_graph(self) -> GraphReport:
        """Add the entry of a graph that is about to be compiled."""
        with self._lock:
            entry = GraphReport(name=f"graph {len(self.graphs)}")
            self.graphs.append(entry)
        return entry

    def note(self, text: str) -> None:
        """Remember something that did not go as planned; the same text counts up."""
        with self._lock:
            self.notes[text] += 1

    @property
    def rewriting(self) -> RewriteReport:
        """What the patterns did, over all graphs."""
        total = RewriteReport()
        for graph in self.graphs:
            if graph.rewriting is not None:
                total = total + graph.rewriting
        return total

    def matched(self, pattern: str) -> int:
        """How many matches of a pattern were rewritten, over all graphs."""
        return self.rewriting.matched(pattern)

    def as_dict(self) -> dict[str, Any]:
        """The report as plain dictionaries, lists, strings and numbers."""
        rewriting = self.rewriting
        return {
            "subject": self.subject,
            "options": dataclasses.asdict(self.options),
            "graphs": [graph.as_dict() for graph in self.graphs],
            "patterns": {
                name: {
                    "matched": entry.matched,
                    "refused": dict(entry.refused),
                    "emitted": dict(entry.emitted),
                    "where": entry.where,
                }
                for name, entry in rewriting.patterns.items()
            },
            "leftover": dict(rewriting.leftover.most_common()),
            "implementations": [dataclasses.asdict(choice) for choice in tuning.choices()],
            "gpu_time_us": dict(self.gpu_time),
            "calls": self.calls.as_dict(),
            "padding": self.padding.as_dict(),
            "generation": self.generation.as_dict(),
            "notes": dict(self.notes),
        }

    def __str__(self) -> str:
        return "\n".join(
            f"{title}\n{body}\n" if body is not None else f"{title}\n" for title, body in self._sections("simple")
        ).rstrip()

    def _repr_html_(self) -> str:
        parts = []
        for title, body in self._sections("html"):
            parts.append(f"<p><b>{html.escape(title)}</b></p>")
            if body is not None:
                parts.append(body if body.startswith("<table") else f"<pre>{html.escape(body)}</pre>")
        return "\n".join(parts)

    def _sections(self, style: str) -> Iterable[tuple[str, str | None]]:
        """Titles and bodies, in the order in which a reader wants them."""
        changed = ", ".join(f"{name}={value!r}" for name, value in self.options.changed().items())
        yield f"kernl report of {self.subject}" + (f" ({changed})" if changed else ""), None
        if not self.graphs:
            yield "nothing has been compiled yet: call the model once, then ask again", None
        else:
            rewriting = self.rewriting
            yield (
                "what was fused",
                _table(_pattern_rows(rewriting), ["pattern", "matched", "refused", "ops put in"], style),
            )
            refused = [
                (entry.name, count, reason)
                for entry in rewriting.patterns.values()
                for reason, count in entry.refused.most_common(_MAX_REASONS)
            ]
            if refused:
                yield "what was refused", _table(refused, ["pattern", "times", "because"], style)
            left = ", ".join(f"{count} {name}" for name, count in rewriting.leftover.most_common())
            yield "calls left as they were", left or "none"
            yield (
                "graphs",
                _table(
                    _graph_rows(self.graphs), ["graph", "device", "sizes", "calls", "runs as", "CUDA graphs"], style
                ),
            )
        choices = [
            (choice.op, choice.problem, choice.choice, _best_time(choice), choice.source) for choice in tuning.choices()
        ]
        if choices:
            yield (
                "implementations chosen in this process",
                _table(choices, ["op", "problem", "runs", "us", "known from"], style),
            )
        if self.gpu_time:
            total = sum(self.gpu_time.values()) or 1.0
            rows = [
                (name, f"{time:.1f}", f"{100 * time / total:.1f} %")
                for name, time in sorted(self.gpu_time.items(), key=lambda item: -item[1])
            ]
            yield "GPU time of one call", _table(rows, ["implementation", "us", "share"], style)
        calls = self.calls
        if calls.direct or calls.guarded or calls.plain:
            yield (
                "calls",
                f"{calls.direct} through the front door ({calls.signatures} signatures), {calls.guarded} through "
                f"TorchDynamo's guards, {calls.plain} plain",
            )
        if calls.closed:
            closed = [(count, reason) for reason, count in calls.closed.most_common(_MAX_REASONS)]
            yield "front door closed", _table(closed, ["times", "because"], style)
        if self.options.buckets != "off":
            yield "padding to buckets", str(self.padding)
            unpadded = [(count, reason) for reason, count in self.padding.unpadded.most_common(_MAX_REASONS)]
            if unpadded:
                yield "calls not padded", _table(unpadded, ["times", "because"], style)
        generation = self.generation
        if generation.fast or generation.stepped or generation.transformers:
            yield "generation", str(generation)
        reasons = [
            (count, kind, reason)
            for kind, counts in (("kernl's steps", generation.stepped), ("the model", generation.transformers))
            for reason, count in counts.most_common(_MAX_REASONS)
        ]
        if reasons:
            yield "generation in transformers' loop", _table(reasons, ["calls", "over", "because"], style)
        if self.notes:
            yield (
                "notes",
                _table([(count, text) for text, count in self.notes.items()], ["times", "what happened"], style),
            )


def _table(rows: Sequence[Sequence[Any]], headers: Sequence[str], style: str) -> str:
    return str(tabulate(rows, headers=headers, tablefmt=style, disable_numparse=True))


def _pattern_rows(rewriting: RewriteReport) -> list[tuple[Any, ...]]:
    rows = []
    for entry in rewriting.patterns.values():
        emitted = ", ".join(f"{count} {name}" for name, count in entry.emitted.items())
        rows.append((entry.name, entry.matched, sum(entry.refused.values()), emitted))
    return rows


def _graph_rows(graphs: Sequence[GraphReport]) -> list[tuple[Any, ...]]:
    rows = []
    for graph in graphs:
        runs = graph.lowering + (" with gradients" if graph.gradients else "")
        if graph.plain_because:
            runs = f"plain PyTorch: {graph.plain_because}"
        if graph.no_cuda_graph_because:
            captured = f"none: {graph.no_cuda_graph_because}"
        elif graph.cuda_graphs is not None:
            state = graph.cuda_graphs()
            captured = "; ".join(
                [
                    f"{state['captured']} captured",
                    *(f"{count} calls without: {why}" for why, count in state["skipped"].items()),
                ]
            )
        else:
            captured = ""
        rows.append((graph.name, graph.device, "symbolic" if graph.symbolic else "fixed", graph.nodes, runs, captured))
    return rows


def _best_time(choice: tuning.TuningEntry) -> str:
    return f"{choice.times_us[choice.choice]:.1f}" if choice.choice in choice.times_us else ""


# Who wrote a CUDA kernel shows in its name. First match wins: cuDNN's and PyTorch's attention are made with CUTLASS
# too, and cuBLAS carries no common prefix ("nvjet" on Hopper, "xmma", "gemm", "splitKreduce", "gemv").
_IMPLEMENTATIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("kernl (Triton)", ("kernl_",)),
    ("cuDNN", ("cudnn",)),
    ("PyTorch attention", ("fmha", "flash_fwd", "flash_bwd", "pytorch_flash")),
    ("Inductor (Triton)", ("triton_",)),
    ("cuBLAS", ("cublas", "nvjet", "xmma", "cutlass", "gemm", "gemv", "splitkreduce", "sgemm", "hgemm")),
    ("copies", ("memcpy", "memset", "copy_kernel", "copydevice")),
)


def implementation_of(kernel_name: str) -> str:
    """Whose work a CUDA kernel is, by its name: "kernl (Triton)", "cuBLAS", "cuDNN", ..., otherwise "PyTorch"."""
    name = kernel_name.lower()
    for implementation, marks in _IMPLEMENTATIONS:
        if any(mark in name for mark in marks):
            return implementation
    return "PyTorch"


def gpu_time_by_implementation(call: Callable[[], object], *, calls: int = 5, warmup: int = 3) -> dict[str, float]:
    """Microseconds of GPU time of one call, by implementation. Needs a GPU; {} without one."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in profiler.events() or ():
        is_kernel = str(event.device_type).endswith("CUDA") and not getattr(event, "is_user_annotation", False)
        if is_kernel and event.self_device_time_total:
            times[implementation_of(event.name)] += event.self_device_time_total / calls
    return dict(times)
