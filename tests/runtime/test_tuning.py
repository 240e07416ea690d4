"""The choice among candidates: order of look-up, what a failure does, what is written to disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kernl.runtime import tuning
from kernl.runtime.tuning import Candidate, choose

GPU = "NVIDIA Test 100"
PROBLEM = (128, 768, torch.float16, None, ("gelu", True))


class Clock:
    """Times come from a table; candidates are run once to see whether they raise."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.timed: list[str] = []
        self.cold: set[bool] = set()

    def warm_up(self, run: Callable[[], object]) -> None:
        run()

    def time(self, run: Callable[[], object], cold: bool) -> float:
        name = run()
        assert isinstance(name, str)
        self.timed.append(name)
        self.cold.add(cold)
        return self.seconds[name]


def named(*names: str) -> list[Candidate]:
    return [Candidate(name, lambda name=name: name) for name in names]  # type: ignore[misc]


def failing(name: str) -> Candidate:
    def run() -> object:
        raise RuntimeError(f"{name} does not fit\nsecond line")

    return Candidate(name, run)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KERNL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KERNL_TUNING", raising=False)
    monkeypatch.setattr(tuning, "_SHIPPED", tmp_path / "tuned")
    monkeypatch.setattr(tuning, "_warned", set())
    tuning.forget()
    yield
    tuning.forget()


def pick(clock: Clock, candidates: list[Candidate], default: str = "a", cold: bool = False) -> str:
    return choose("linear", PROBLEM, candidates, default=default, timer=clock, gpu=GPU, cold=cold)


def test_the_fastest_wins_and_is_remembered_without_measuring_again() -> None:
    clock = Clock({"a": 3e-6, "b": 2e-6, "c": 20e-6})
    assert pick(clock, named("a", "b", "c")) == "b"
    measured = len(clock.timed)
    assert clock.timed.count("c") == 1, "a hopeless candidate is timed once"
    assert pick(clock, named("a", "b", "c")) == "b"
    assert len(clock.timed) == measured
    [entry] = tuning.choices()
    assert (entry.op, entry.choice, entry.source) == ("linear", "b", "measured")
    assert entry.times_us == {"a": 3.0, "b": 2.0, "c": 20.0}


def test_without_a_gpu_the_default_runs_and_no_candidate_is_built() -> None:
    if torch.cuda.is_available():
        pytest.skip("a machine without a GPU")

    def build() -> list[Candidate]:
        raise AssertionError("built")

    assert choose("linear", PROBLEM, build, default="a") == "a"


def test_the_second_process_reads_the_disk() -> None:
    assert pick(Clock({"a": 3e-6, "b": 2e-6}), named("a", "b")) == "b"
    tuning.forget()
    clock = Clock({})
    assert pick(clock, named("a", "b")) == "b"
    assert clock.timed == []
    assert tuning.choices()[0].source == "cache"
    assert [entry.choice for entry in tuning.entries()] == ["b"]
    assert tuning.cache_size() > 0


def test_the_shipped_table_answers_when_the_cache_is_empty(tmp_path: Path) -> None:
    assert pick(Clock({"a": 3e-6, "b": 2e-6}), named("a", "b")) == "b"
    table = tuning.export_table(gpu=GPU)
    assert table.name == "nvidia_test_100.json"
    assert tuning.clear() == 1
    assert tuning.entries() == []
    assert pick(Clock({}), named("a", "b")) == "b"
    assert tuning.choices()[0].source == "table"


def test_a_name_that_is_no_longer_offered_is_measured_again() -> None:
    assert pick(Clock({"a": 3e-6, "old": 2e-6}), named("a", "old")) == "old"
    tuning.forget()
    assert pick(Clock({"a": 3e-6, "new": 1e-6}), named("a", "new")) == "new"


def test_a_candidate_that_raises_is_dropped_with_its_reason() -> None:
    clock = Clock({"a": 3e-6})
    assert pick(clock, [*named("a"), failing("b")]) == "a"
    assert tuning.choices()[0].dropped == {"b": "RuntimeError: b does not fit"}


def test_when_all_fail_the_default_runs_and_nothing_is_written() -> None:
    assert pick(Clock({}), [failing("a"), failing("b")]) == "a"
    assert tuning.choices()[0].source == "default"
    assert tuning.entries() == []


def test_an_unknown_default_is_an_error_that_names_the_candidates() -> None:
    with pytest.raises(ValueError, match="accepted a, b"):
        pick(Clock({}), named("a", "b"), default="z")


def test_a_trial_forces_and_notes_choices_and_leaves_no_trace() -> None:
    clock = Clock({"a": 2.0, "b": 1.0})
    text = tuning.problem_text(PROBLEM)
    trial = tuning.Trial(forced={("linear", text): "a"})
    with tuning.trial_of(trial):
        assert pick(clock, named("a", "b"), default="b") == "a" and clock.timed == []
    assert trial.met == {("linear", text): (("a", "b"), "a")}
    with tuning.trial_of(tuning.Trial(forced={("linear", text): "c"})) as _:
        assert pick(clock, named("a", "b")) == "b"  # not on offer: measured as ever
    assert pick(clock, named("a", "b")) == "b"


def test_only_one_candidate_is_never_measured() -> None:
    assert pick(Clock({}), named("a")) == "a"


def test_cold_reaches_the_clock() -> None:
    clock = Clock({"a": 1e-6, "b": 2e-6})
    pick(clock, named("a", "b"), cold=True)
    assert clock.cold == {True}


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"format": 9, "choices": {}}', '{"format": 1, "choices": {"linear": 3}}']
)
def test_a_damaged_file_is_ignored_with_a_warning(content: str) -> None:
    path = tuning.cache_path(GPU)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.warns(UserWarning, match="ignores the tuning file"):
        assert pick(Clock({"a": 3e-6, "b": 2e-6}), named("a", "b")) == "b"
    assert json.loads(path.read_text())["choices"]["linear"]


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("KERNL_CACHE_DIR", str(blocker))
    with pytest.warns(UserWarning, match="cannot write|ignores"):
        assert pick(Clock({"a": 3e-6, "b": 2e-6}), named("a", "b")) == "b"
    assert pick(Clock({}), named("a", "b")) == "b"


def test_modes_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"a": 3e-6, "b": 2e-6})
    monkeypatch.setenv("KERNL_TUNING", "table")
    assert pick(clock, named("a", "b")) == "a"
    monkeypatch.setenv("KERNL_TUNING", "measure")
    assert pick(clock, named("a", "b")) == "b"
    monkeypatch.setenv("KERNL_TUNING", "off")
    assert pick(clock, named("a", "b")) == "a"


def test_a_trusted_default_is_measured_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"a": 3e-6, "b": 2e-6})

    def trusting(default: str) -> str:
        return choose("linear", PROBLEM, named("a", "b"), default=default, timer=clock, gpu=GPU, trusted=True)

    assert (trusting("a"), trusting("b")) == ("a", "b"), "what is not known is not remembered"
    assert clock.timed == []
    assert [entry.source for entry in tuning.choices()] == ["default"]
    assert tuning.known_choice("linear", PROBLEM, ["a", "b"], gpu=GPU) is None
    monkeypatch.setenv("KERNL_TUNING", "measure")
    assert trusting("a") == "b"
    assert [entry.source for entry in tuning.choices()] == ["measured"]
    monkeypatch.delenv("KERNL_TUNING")
    tuning.forget()
    assert tuning.known_choice("linear", PROBLEM, ["a", "b"], gpu=GPU) == "b", "the user's cache"
    assert trusting("a") == "b"


def test_nothing_is_measured_while_capturing_and_the_default_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock({"a": 3e-6, "b": 2e-6})
    monkeypatch.setattr(tuning, "_is_capturing", lambda: True)
    assert pick(clock, named("a", "b")) == "a"
    assert clock.timed == []
    monkeypatch.setattr(tuning, "_is_capturing", lambda: False)
    assert pick(clock, named("a", "b")) == "b"
    monkeypatch.setattr(tuning, "_is_capturing", lambda: True)
    assert pick(clock, named("a", "b")) == "b", "what is known is used while capturing"


def test_deterministic_mode_and_defaults_only_fix_the_choice() -> None:
    clock = Clock({"a": 3e-6, "b": 2e-6})
    assert pick(clock, named("a", "b")) == "b"
    with tuning.defaults_only():
        assert pick(clock, named("a", "b")) == "a"
    torch.use_deterministic_algorithms(True)
    try:
        assert pick(clock, named("a", "b")) == "a"
    finally:
        torch.use_deterministic_algorithms(False)
    assert pick(clock, named("a", "b")) == "b"


def test_the_time_of_a_call_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(tuning.time, "perf_counter", lambda: now[0])

    class Slow(Clock):
        def time(self, run: Callable[[], object], cold: bool) -> float:
            now[0] += 0.025
            return super().time(run, cold)

    clock = Slow({"a": 1e-6, "b": 2e-6, "c": 2e-6, "d": 2e-6})
    assert pick(clock, named("a", "b", "c", "d")) == "a"
    assert clock.timed == ["a", "b", "c", "d"], "each is timed once, then the budget is spent"


def test_two_threads_measure_once() -> None:
    clock = Clock({"a": 3e-6, "b": 2e-6})
    warm_ups: list[str] = []

    def run() -> str:
        warm_ups.append("a")
        return "a"

    candidates = [Candidate("a", run), *named("b")]
    answers: list[str] = []
    threads = [threading.Thread(target=lambda: answers.append(pick(clock, candidates))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["b"] * 4
    assert clock.timed.count("a") == clock.timed.count("b") <= 15
    assert len(tuning.choices()) == 1
