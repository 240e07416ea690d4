"""Which implementation runs: the one that measured fastest for this problem on this GPU.

    name = choose("linear", (rows, columns, inner, "float16", "gelu"), candidates, default="cublas")

An op describes its problem class as a tuple of plain values and offers one `Candidate` per implementation. The answer
is looked up, in this order, in

1. what this process has already chosen,
2. the user's cache on disk: one JSON file per GPU, PyTorch, Triton and kernel source, so that a new version of any of
   them measures afresh,
3. the table shipped with kernl for that GPU (`kernl/runtime/tuned/<gpu>.json`),

and only then measured and written to the user's cache. A name found on disk that is no longer offered is ignored.
An op that knows the GPU well enough passes `trusted=True`: its default is then run without measuring, unless
KERNL_TUNING=measure asks for it. Such a default is not remembered: it may differ within a class of problems.

How it is measured. Every candidate first runs alone, outside the budget, because its first run compiles. One that
raises is dropped, with the exception as its reason. Then the candidates take turns (so that a change of clock hits all
of them) until the time budget of the call is spent, and the smallest median wins; one that is three times slower than
the best is not timed twice. Under about 30 us the host needs longer to launch a kernel than the GPU to run it, so each
turn first puts the GPU to sleep while the host fills the queue: the events around the runs then see GPU time only.

The L2 cache. Runs in a row find their operands in L2. That is right for activations, which the kernel before has just
written, and wrong for weights, which a whole model evicts between two uses. A caller whose operands are mostly weights
passes `cold=True`: the L2 is then overwritten before each run.

Nothing is measured while the current stream is being captured (the default is answered, and not remembered), when there
is no GPU, under `torch.use_deterministic_algorithms` or `defaults_only()`: then the default runs.

Environment: KERNL_CACHE_DIR, the folder of the cache (default ~/.cache/kernl); KERNL_TUNING = `measure` (trusted
defaults too), `table` (use cache and table, never measure) or `off` (always the default). Without it, what is not
trusted is measured.

Format of the cache and of the shipped tables (times in microseconds of the candidates that ran, reasons of the others):

    {"format": 1, "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "kernels": "<hash of the source>",
     "choices": {"linear": {"[128,3072,768,\\"float16\\",\\"gelu\\"]": {
         "choice": "split_k_4",
         "times_us": {"cublas": 8.4, "split_k_4": 6.2},
         "dropped": {"tma": "OutOfResources: shared memory"}}}}}

A shipped table may also say `in_model`: what whole models took, where that and not the op alone has decided.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from kernl.runtime.capability import capability_of

_FORMAT = 1
_BUDGET_SECONDS = 0.060
_MAX_TURNS = 15
_HOPELESS = 3.0
_TURN_SECONDS = 0.5e-3
_MAX_RUNS_PER_TURN = 20
_SLEEP_CYCLES_PER_SECOND = 2e9
_MAX_SLEEP_SECONDS = 3e-3
_SHIPPED = Path(__file__).resolve().parent / "tuned"

_MODES = ("measure", "table", "off")

Source = Literal["measured", "cache", "table", "default"]


@dataclass(frozen=True)
class Candidate:
    """One implementation of a problem. `run` launches it on operands of the caller's choice.

    It is called many times, so it must have no effect but on its own fresh outputs or scratch memory.
    """

    name: str
    run: Callable[[], object]


@dataclass(frozen=True)
class TuningEntry:
    """What was chosen for one problem, where the choice comes from, and what each candidate took (microseconds)."""

    op: str
    problem: str
    choice: str
    source: Source
    times_us: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


class Timer(Protocol):
    """Measures candidates; replaced in tests that have no GPU."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Run once to the end, compilation included."""

    def time(self, run: Callable[[], object], cold: bool) -> float:
        """Seconds of GPU time of one run."""


_lock = threading.RLock()
_memory: dict[tuple[str, str, tuple[Any, ...]], TuningEntry] = {}
_defaults: dict[tuple[str, str, tuple[Any, ...]], TuningEntry] = {}  # nothing known, the caller's default ran first
_files: dict[Path, dict[str, Any]] = {}
_warned: set[str] = set()
_defaults_only: ContextVar[bool] = ContextVar("kernl_tuning_defaults_only", default=False)


@dataclass
class Trial:
    """Choices made by hand, see `trial_of`. Both by (op, problem as text).

    forced: names to choose where they are offered. met: what was asked for, with the names on offer and the answer.
    """

    forced: dict[tuple[str, str], str] = field(default_factory=dict)
    met: dict[tuple[str, str], tuple[tuple[str, ...], str]] = field(default_factory=dict)


_trial: ContextVar[Trial | None] = ContextVar("kernl_tuning_trial", default=None)


def choose(
    op: str,
    problem: tuple[Any, ...],
    candidates: Sequence[Candidate] | Callable[[], Sequence[Candidate]],
    *,
    default: str,
    cold: bool = False,
    trusted: bool = False,
    timer: Timer | None = None,
    gpu: str | None = None,
) -> str:
    """Name of the candidate to run for this problem.

    op: name of the op.
    problem: tuple of ints, floats, bools, strings, None, dtypes or tuples of them, equal for calls that should share a
        choice (round sizes to classes first).
    candidates: at least one, or a function that builds them, called only when the problem is new to this process.
    default: name of the candidate that runs when nothing is known and nothing may be measured.
    cold: overwrite the L2 cache before each timed run (see the module's text).
    trusted: the default is known to be good on this GPU: measure only when KERNL_TUNING=measure.
    timer, gpu: the clock and the GPU's name, for tests; by default CUDA events and the current device.

    Raises ValueError when `default` is not among the names of the candidates.
    """
    trial = _trial.get()
    if trial is not None:
        names_on_offer = tuple(each.name for each in (candidates() if callable(candidates) else candidates))
        forced = trial.forced.get((op, problem_text(problem)))
        with trial_of(None):
            answer = (
                forced
                if forced in names_on_offer
                else choose(op, problem, candidates, default=default, cold=cold, trusted=trusted, timer=timer, gpu=gpu)
            )
        trial.met[op, problem_text(problem)] = (names_on_offer, answer)
        return answer
    mode = _mode(trusted)
    if mode == "off" or _defaults_only.get() or torch.are_deterministic_algorithms_enabled():
        return default
    if gpu is None:
        gpu = capability_of().name
        if gpu == "cpu" and timer is None:
            return default
    known = _memory.get((gpu, op, problem))
    if known is not None:
        return known.choice
    if mode == "table" and (gpu, op, problem) in _defaults:
        return default

    offered = candidates() if callable(candidates) else candidates
    names = [candidate.name for candidate in offered]
    if default not in names:
        raise ValueError(
            f"default must be the name of a candidate of {op}: got {default!r}, accepted {', '.join(names)}"
        )
    if len(offered) == 1:
        return default
    text = problem_text(problem)
    with _lock:
        known = _memory.get((gpu, op, problem))
        if known is None:
            known = _look_up(gpu, op, text, names)
            if known is None:
                if mode == "table":
                    _defaults[(gpu, op, problem)] = TuningEntry(op, text, default, "default")
                    return default
                if _is_capturing():
                    return default
                known = _measure(op, text, offered, default, cold, timer or _CudaTimer())
                _store(gpu, known)
            _memory[(gpu, op, problem)] = known
    return known.choice


def known_choice(op: str, problem: tuple[Any, ...], names: Sequence[str], *, gpu: str | None = None) -> str | None:
    """What `choose` would answer from memory, cache or table; None when it would measure or take the default."""
    if os.environ.get("KERNL_TUNING") == "off" or _defaults_only.get() or torch.are_deterministic_algorithms_enabled():
        return None
    gpu = capability_of().name if gpu is None else gpu
    with _lock:
        known = _memory.get((gpu, op, problem)) or _look_up(gpu, op, problem_text(problem), names)
    return None if known is None or known.choice not in names else known.choice


def _mode(trusted: bool) -> str:
    setting = os.environ.get("KERNL_TUNING", "table" if trusted else "measure")
    if setting not in _MODES:
        _warn_once(f"KERNL_TUNING is {setting!r}; accepted: {', '.join(_MODES)}. kernl measures")
        return "measure"
    return setting


@contextlib.contextmanager
def defaults_only() -> Iterator[None]:
    """Inside, in this thread, every choice is the default one: the same kernels run whatever was measured."""
    token = _defaults_only.set(True)
    try:
        yield
    finally:
        _defaults_only.reset(token)


@contextlib.contextmanager
def trial_of(trial: Trial | None) -> Iterator[None]:
    """Inside, in this thread, choices that `trial` forces are those, and `trial` notes all that is asked for.

    For measuring whole models with one implementation or another. Nothing of it is remembered.
    """
    token = _trial.set(trial)
    try:
        yield
    finally:
        _trial.reset(token)


def choices() -> list[TuningEntry]:
    """The choices made in this process so far. Where nothing was known: the default of the first call."""
    with _lock:
        return [*_memory.values(), *(entry for key, entry in _defaults.items() if key not in _memory)]


def entries() -> list[TuningEntry]:
    """Everything in the user's cache on disk, all GPUs and versions."""
    found: list[TuningEntry] = []
    for path in sorted(cache_folder().glob("*.json")):
        for op, problems in _read(path).get("choices", {}).items():
            for problem, record in problems.items():
                entry = _entry(op, problem, record, "cache")
                if entry is not None:
                    found.append(entry)
    return found


def cache_folder() -> Path:
    """Folder of the user's tuning cache. It need not exist."""
    root = os.environ.get("KERNL_CACHE_DIR")
    if root:
        return Path(root).expanduser() / "tuning"
    try:
        return Path.home() / ".cache" / "kernl" / "tuning"
    except RuntimeError:  # an account without a home
        return Path(tempfile.gettempdir()) / "kernl" / "tuning"


def cache_path(gpu: str | None = None) -> Path:
    """File of the user's cache for a GPU (the current one by default) and the versions at hand."""
    gpu = capability_of().name if gpu is None else gpu
    versions = f"torch{torch.__version__.split('+')[0]}-triton{_triton_version()}-{kernel_source_hash()[:12]}"
    return cache_folder() / f"{gpu_slug(gpu)}-{versions}.json"


def cache_size() -> int:
    """Bytes of the user's cache on disk."""
    return sum(path.stat().st_size for path in cache_folder().glob("*.json"))


def clear() -> int:
    """Forget every choice, on disk too. Returns the number of files removed."""
    with _lock:
        forget()
        removed = 0
        for path in cache_folder().glob("*.json"):
            path.unlink(missing_ok=True)
            removed += 1
        return removed


def forget() -> None:
    """Forget what this process has chosen and read; the files stay. The next choice reads them again."""
    with _lock:
        _memory.clear()
        _defaults.clear()
        _files.clear()


def export_table(path: Path | None = None, gpu: str | None = None) -> Path:
    """Write the user's cache of a GPU as a table to ship with kernl. Returns the file written."""
    gpu = capability_of().name if gpu is None else gpu
    target = _SHIPPED / f"{gpu_slug(gpu)}.json" if path is None else path
    _write(target, _read(cache_path(gpu)) or _empty_file(gpu))
    return target


def gpu_slug(gpu: str) -> str:
    """The GPU's name as part of a file name: "NVIDIA H200" is nvidia_h200."""
    return re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_")


def problem_text(problem: tuple[Any, ...]) -> str:
    """A problem as the key it has on disk."""
    return json.dumps(problem, default=str, separators=(",", ":"))


def kernel_source_hash() -> str:
    """Hash of the source of kernels and ops: a choice measured on other code is not reused."""
    global _source_hash
    if _source_hash is None:
        digest = hashlib.sha256()
        package = Path(__file__).resolve().parent.parent
        for folder in ("kernels", "ops"):
            for file in sorted((package / folder).glob("*.py")):
                digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
        _source_hash = digest.hexdigest()
    return _source_hash


_source_hash: str | None = None


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return str(triton.__version__)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _look_up(gpu: str, op: str, text: str, names: Sequence[str]) -> TuningEntry | None:
    places: tuple[tuple[Path, Source], ...] = (
        (cache_path(gpu), "cache"),
        (_SHIPPED / f"{gpu_slug(gpu)}.json", "table"),
    )
    for path, source in places:
        if path not in _files:
            _files[path] = _read(path)
        record = _files[path].get("choices", {}).get(op, {}).get(text)
        entry = None if record is None else _entry(op, text, record, source)
        if entry is not None and entry.choice in names:
            return entry
    return None


def _measure(
    op: str, text: str, candidates: Sequence[Candidate], default: str, cold: bool, timer: Timer
) -> TuningEntry:
    dropped: dict[str, str] = {}
    alive: list[Candidate] = []
    for candidate in candidates:
        try:
            timer.warm_up(candidate.run)
            alive.append(candidate)
        except Exception as error:
            dropped[candidate.name] = _reason(error)

    samples: dict[str, list[float]] = {}
    deadline = time.perf_counter() + _BUDGET_SECONDS
    for turn in range(_MAX_TURNS):
        for candidate in list(alive):
            # The first turn always completes: a choice among some of the candidates would not be a choice.
            if turn > 0 and time.perf_counter() > deadline:
                break
            try:
                samples.setdefault(candidate.name, []).append(timer.time(candidate.run, cold))
            except Exception as error:
                dropped[candidate.name] = _reason(error)
                samples.pop(candidate.name, None)
                alive.remove(candidate)
        if not alive or time.perf_counter() > deadline:
            break
        fastest = min(min(samples[candidate.name]) for candidate in alive)
        alive = [candidate for candidate in alive if min(samples[candidate.name]) <= _HOPELESS * fastest]

    times = {name: statistics.median(values) for name, values in samples.items()}
    choice = min(times, key=lambda name: times[name]) if times else default
    times_us = {name: round(1e6 * seconds, 3) for name, seconds in times.items()}
    return TuningEntry(op, text, choice, "measured" if times else "default", times_us, dropped)


def _reason(error: Exception) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__


class _CudaTimer:
    """GPU time by events on the current stream, with the host's launch time hidden behind a sleeping GPU."""

    def __init__(self) -> None:
        self._host_seconds: dict[int, float] = {}
        self._gpu_seconds: dict[int, float] = {}
        self._flush: torch.Tensor | None = None

    def warm_up(self, run: Callable[[], object]) -> None:
        run()
        torch.cuda.current_stream().synchronize()
        begin = time.perf_counter()
        run()
        self._host_seconds[id(run)] = time.perf_counter() - begin
        torch.cuda.current_stream().synchronize()

    def time(self, run: Callable[[], object], cold: bool) -> float:
        estimate = self._gpu_seconds.get(id(run))
        runs = 1 if estimate is None else max(1, min(_MAX_RUNS_PER_TURN, int(_TURN_SECONDS / max(estimate, 1e-7))))
        if cold:
            seconds = self._time_cold(run, min(runs, 4))
        else:
            self._sleep(self._host_seconds[id(run)] * runs)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(runs):
                run()
            end.record()
            end.synchronize()
            seconds = 1e-3 * begin.elapsed_time(end) / runs
        self._gpu_seconds[id(run)] = seconds
        return seconds

    def _time_cold(self, run: Callable[[], object], runs: int) -> float:
        if self._flush is None:
            l2_bytes = capability_of().l2_bytes or 64 << 20
            self._flush = torch.empty(l2_bytes + (l2_bytes >> 2), dtype=torch.uint8, device="cuda")
        events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(runs)]
        self._sleep((self._host_seconds[id(run)] + 20e-6) * runs)
        for begin, end in events:
            self._flush.zero_()
            begin.record()
            run()
            end.record()
        events[-1][1].synchronize()
        return 1e-3 * statistics.median(begin.elapsed_time(end) for begin, end in events)

    def _sleep(self, seconds: float) -> None:
        """Keep the GPU busy for half as long again as the host needs to fill the queue."""
        torch.cuda._sleep(int(min(1.5 * seconds + 50e-6, _MAX_SLEEP_SECONDS) * _SLEEP_CYCLES_PER_SECOND))


def _store(gpu: str, entry: TuningEntry) -> None:
    if entry.source == "default":
        return  # every candidate failed: perhaps only today
    path = cache_path(gpu)
    # Another process may have written since this one read: merge with what is there now. Two writers within the same
    # millisecond can still lose each other's newest line, which costs one more measurement later.
    content = _read(path) or _empty_file(gpu)
    record = {"choice": entry.choice, "times_us": entry.times_us, "dropped": entry.dropped}
    content["choices"].setdefault(entry.op, {})[entry.problem] = record
    _files[path] = content
    try:
        _write(path, content)
    except OSError as error:
        _warn_once(f"kernl cannot write its tuning cache {path} ({error}); it measures again in the next process")


def _empty_file(gpu: str) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": _triton_version(),
        "kernels": kernel_source_hash(),
        "choices": {},
    }


def _read(path: Path) -> dict[str, Any]:
    """Content of a cache file or table, {} when it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        problems = content["choices"].values()
        if content["format"] != _FORMAT or not all(isinstance(table, dict) for table in problems):
            raise ValueError(f"format {content['format']!r} is not {_FORMAT}")
        return dict(content)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        _warn_once(f"kernl ignores the tuning file {path}: {_reason(error)}")
        return {}


def _entry(op: str, problem: str, record: Any, source: Source) -> TuningEntry | None:
    if not isinstance(record, dict) or not isinstance(record.get("choice"), str):
        return None
    times = {name: value for name, value in dict(record.get("times_us") or {}).items() if value is not None}
    return TuningEntry(op, problem, record["choice"], source, times, dict(record.get("dropped") or {}))


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write atomically: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=path.name, suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=3)
