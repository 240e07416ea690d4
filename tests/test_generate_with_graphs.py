"""Generation with captured graphs, without a GPU: a tape of PyTorch's calls stands for a CUDA graph.

As with a real one, a replay runs no Python of the model, reads and writes the memory it was captured with, and nothing
in it may ask the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import kernl
from kernl import backend
from kernl.decoding import DecodingMemory
from kernl.generate import GenerationLoop, fill_on_device, loop_of
from kernl.runtime.cuda_graph import CudaGraphRunner
from kernl.token_choice import TokenChoice
from tests.runtime.fake_device import FakeDevice
from tests.test_generate import ENDLESS, build, check, prompt

pytestmark = pytest.mark.either_end

# Calls for which a GPU's host waits, or whose results have sizes that depend on data.
WAITING = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "_unique2", "isin", "masked_select")


class Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # compiled functions run as compiled

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING:
            raise AssertionError(f"{func} waits for the device")
        outputs = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, outputs))
        return outputs


class Tape:
    def __init__(self, device: TapeDevice, recorder: Recorder) -> None:
        self.device = device
        self.recorder = recorder

    def replay(self) -> None:
        self.device.replays += 1
        for func, args, kwargs, outputs in self.recorder.calls:
            again = func(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(outputs), pytree.tree_leaves(again)):
                if isinstance(old, torch.Tensor) and old.numel() and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class TapeDevice(FakeDevice):
    """Unlike a real device it computes while it captures, so buffers must hold something: 1, a token of every model."""

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.ones(elements, dtype=dtype, device=device)

    def capture(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        self.captures += 1
        tensors = {id(value): value for value in arguments if isinstance(value, torch.Tensor) and value.numel()}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        recorder, state = Recorder(), torch.get_rng_state()
        try:
            with recorder:
                outputs = function(*arguments)
        finally:
            torch.set_rng_state(state)
            for name, content in before.items():
                tensors[name].copy_(content)
        return Tape(self, recorder), outputs


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[TapeDevice]:
    tapes = TapeDevice()

    def make_runner(self: GenerationLoop, function: Callable[..., Any], fixed: int, written: int) -> CudaGraphRunner:
        return CudaGraphRunner(function, fixed_inputs=range(fixed), mutated_inputs=range(written), capture_device=tapes)

    monkeypatch.setattr(GenerationLoop, "_takes_graphs", lambda self, device: True)
    monkeypatch.setattr(GenerationLoop, "_make_runner", make_runner)
    yield tapes


def skips(model: Any) -> dict[str, int]:
    skipped: dict[str, int] = loop_of(model).report.generation.as_dict()["cuda_graphs"]["skipped"]
    return skipped


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "llama", "mistral", "whisper"])
def test_tokens_come_from_replays(device: TapeDevice, family: str, attention: str) -> None:
    model = build(family, attn_implementation=attention)
    if family == "whisper":
        model.generation_config.no_timestamps_token_id, model.generation_config.is_multilingual = 96, False
    for seed in range(3):
        check(model, **prompt(family, seed=seed), max_new_tokens=12, **({} if family == "whisper" else ENDLESS))
    # One prefill and one step; all but the first run of each is a replay.
    assert device.captures == 2 and device.replays >= 2 + 3 * 8
    assert not skips(model)


@pytest.mark.parametrize("family", ["t5", "llama", "mistral"])
def test_transformers_loop_replays_too(device: TapeDevice, family: str) -> None:
    model = build(family)
    for seed in range(3):
        check(model, "stepped", seed, **prompt(family, seed=seed), max_new_tokens=10, no_repeat_ngram_size=2, **ENDLESS)
    # One prefill and one step; all but the first run of each is a replay.
    assert device.captures == 2 and device.replays >= 2 + 3 * 6
    for seed in range(3):
        check(model, "stepped", seed, **prompt(family, seed=seed), max_new_tokens=10, num_beams=3, **ENDLESS)
    assert device.captures == 4 and not skips(model)
    # The same graphs, whatever the loop makes of the logits.
    check(model, "stepped", **prompt(family, seed=4), max_new_tokens=10, num_beams=3, do_sample=True, **ENDLESS)
    assert device.captures == 4


def test_beams_move_to_a_larger_cache(device: TapeDevice) -> None:
    model = build("llama")
    for seed in range(2):
        inputs = prompt("llama", length=1, seed=seed)
        check(model, "stepped", seed, **inputs, max_new_tokens=66, num_beams=2, **ENDLESS)
    # The second cache has no prefill, and its first step reorders like all others.
    assert device.captures == 3 and not skips(model)


def test_all_that_is_captured_is_frozen_by_the_key(device: TapeDevice) -> None:
    model = build("t5")
    ways: list[dict[str, Any]] = [
        {"do_sample": True, "temperature": 2.0, "top_k": 20, "top_p": 0.9},
        {"do_sample": True, "temperature": 3.0, "top_k": 20, "top_p": 0.9},
        {"repetition_penalty": 1.7, "min_new_tokens": 5, "eos_token_id": [1, 40, 41, 42]},
        {"suppress_tokens": list(range(30, 60)), "begin_suppress_tokens": [3, 4, 5]},
        {"forced_bos_token_id": 9, "forced_eos_token_id": 1},
    ]
    for seed in range(2):
        for arguments in ways:
            check(model, seed=seed, **prompt("t5", seed=seed), max_new_tokens=12, **arguments)
    assert device.captures == 2 * len(ways) and not skips(model)


def test_penalty_and_minimum_share_graphs_between_lengths_of_prompts(device: TapeDevice) -> None:
    model = build("llama")
    for length in (5, 9, 7):
        inputs = prompt("llama", length=length, seed=length)
        check(model, **inputs, max_new_tokens=12, min_new_tokens=6, repetition_penalty=1.5, eos_token_id=[1, 40, 41])
    assert device.captures == 3 + 1  # a prefill for each length, and the step


def test_numbers_are_filled_in_on_the_device() -> None:
    x = torch.randn(3, 2)
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    positive = graph.call_function(torch.gt, (given, 0))
    half = graph.call_function(torch.tensor, (0.5,), {"dtype": torch.float64, "device": torch.device("cpu")})
    pair = graph.call_function(torch.tensor, ([1.0, 2.0],))
    graph.output((graph.call_function(torch.where, (positive, half, pair)), half))
    gm = torch.fx.GraphModule({}, graph)
    want = gm(x)
    fill_on_device(gm)
    assert [node.target for node in graph.nodes if node.target in (torch.tensor, torch.full)] == [
        torch.full,
        torch.tensor,  # a list of numbers cannot be filled in
    ]
    for one, other in zip(gm(x), want):
        assert torch.equal(one, other) and one.dtype == other.dtype


def test_growth_and_return_to_the_first_cache(device: TapeDevice) -> None:
    model = build("llama")
    for _ in range(2):
        check(model, **prompt("llama"), max_new_tokens=150, **ENDLESS)
    assert device.captures == 1 + 2  # steps in caches of 128 and 192
    assert not skips(model)


def test_moved_and_replaced_weights_are_captured_again(device: TapeDevice) -> None:
    model, inputs = build("llama"), prompt("llama")
    check(model, **inputs, max_new_tokens=8, **ENDLESS)
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = torch.randn_like(weight)
    check(model, **inputs, max_new_tokens=8, **ENDLESS)
    model.model.layers[1] = build("llama", seed=2).model.layers[1]
    check(model, **inputs, max_new_tokens=8, **ENDLESS)
    assert device.captures == 6


def test_memories_are_bounded_and_made_room_for(device: TapeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    from kernl import generate

    monkeypatch.setattr(generate, "_MAX_MEMORIES", 2)
    monkeypatch.setattr(generate, "_MAX_PROGRAMS", 2)
    model = build("llama")
    for batch in (1, 2, 3, 2):
        check(model, **prompt("llama", batch=batch), max_new_tokens=6, **ENDLESS)
    assert [layout.batch for layout in loop_of(model)._memories] == [3, 2]
    for top_k in (2, 3, 4):
        check(model, **prompt("llama"), max_new_tokens=6, do_sample=True, top_k=top_k, **ENDLESS)
    assert max(len(programs) for programs in loop_of(model)._programs.values()) == 2

    real, failures = DecodingMemory.__init__, [torch.OutOfMemoryError("full")]

    def full_once(self: DecodingMemory, *args: Any) -> None:
        if failures:
            raise failures.pop()
        real(self, *args)

    monkeypatch.setattr(DecodingMemory, "__init__", full_once)
    check(model, **prompt("llama", batch=5), max_new_tokens=6, **ENDLESS)
    assert [layout.batch for layout in loop_of(model)._memories] == [5] and not failures


def test_a_capture_that_fails_leaves_the_loop_running(device: TapeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(function: Any, arguments: Any) -> Any:
        raise RuntimeError("no graph today")

    monkeypatch.setattr(device, "capture", fail)
    model = build("llama")
    check(model, **prompt("llama"), max_new_tokens=8, **ENDLESS)
    assert "capturing failed: RuntimeError: no graph today" in skips(model)
    assert "runs without: capturing failed" in str(loop_of(model).report)


def test_released_memory_comes_back(device: TapeDevice) -> None:
    model = kernl.optimize_model(build("llama"), generate="fast")
    first = model.generate(**prompt("llama"), max_new_tokens=8)
    assert model.kernl.memory()["graphs"] and model.kernl.memory()["generation"]
    model.kernl.release()
    assert not model.kernl.memory()["graphs"] and not model.kernl.memory()["generation"]
    assert torch.equal(model.generate(**prompt("llama"), max_new_tokens=8), first)


def test_memory_and_release_cover_the_encoder(device: TapeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnTapes(CudaGraphRunner):
        def __init__(self, function: Callable[..., Any], **options: Any) -> None:
            super().__init__(function, capture_device=device, **options)

    def obstacle(inputs: Any, options: kernl.Options) -> str | None:
        return "prefill and step are captured whole" if options.cuda_graph == "never" else None

    monkeypatch.setattr(backend, "CudaGraphRunner", OnTapes)
    monkeypatch.setattr(backend, "obstacle_to_capture", obstacle)
    model = kernl.optimize_model(build("t5"), generate="fast")
    first = model.generate(**prompt("t5"), max_new_tokens=8)
    assert torch.equal(model.generate(**prompt("t5"), max_new_tokens=8), first)
    assert device.captures == len(model.kernl.memory()["graphs"]) == 3  # the encoder, prefill, a step
    model.kernl.release()
    assert not model.kernl.memory()["graphs"]
    assert torch.equal(model.generate(**prompt("t5"), max_new_tokens=8), first)
    assert device.captures == 2 * 3


def test_half_a_step_is_never_followed_by_a_whole_one(device: TapeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out after the forward of the first step: the caches are written, so that it cannot begin again."""
    model, calls = build("llama"), itertools.count()
    choose = TokenChoice.__call__

    def failing(self: TokenChoice, progress: Any, logits: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:  # prefill, as run and as captured, then the step
            raise torch.OutOfMemoryError("no memory")
        return choose(self, progress, logits)

    monkeypatch.setattr(TokenChoice, "__call__", failing)
    with pytest.raises(torch.OutOfMemoryError):
        kernl.generate(model, **prompt("llama"), max_new_tokens=6)
    monkeypatch.undo()
