"""Front door, pipeline and CUDA-graph runner together, without a GPU: graphs are captured on a fake device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import kernl
from kernl import backend
from kernl.backend import Inputs
from kernl.options import Options
from kernl.report import KernlWarning, forget_warnings
from kernl.runtime.cuda_graph import CapturedGraph, CudaGraphRunner
from tests import tiny
from tests.runtime.fake_device import FakeDevice
from tests.test_front_door import check, direct


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    fake = FakeDevice()

    class OnFakeDevice(CudaGraphRunner):
        def __init__(self, function: Any, **options: Any) -> None:
            super().__init__(function, capture_device=fake, **options)

    def obstacle(inputs: Inputs, options: Options) -> str | None:
        return "gradients are needed" if inputs.needs_grad else None

    monkeypatch.setattr(backend, "CudaGraphRunner", OnFakeDevice)
    monkeypatch.setattr(backend, "obstacle_to_capture", obstacle)
    forget_warnings()
    return fake


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def test_captured_once_and_replayed(device: FakeDevice) -> None:
    model = kernl.optimize_model(tiny.encoder())
    for seed in range(5):
        check(model, tiny.activations(seed=seed))
    assert (device.captures, device.replays) == (1, 4) and direct(model) == 4
    assert model.kernl.report().graphs[0].as_dict()["cuda_graphs"] == {"captured": 1, "skipped": {}}
    assert "1 captured" in str(model.kernl.report())


def test_a_graph_per_shape_and_results_are_kept(device: FakeDevice) -> None:
    model, plain = kernl.optimize_model(tiny.encoder()), tiny.encoder()
    batches = [tiny.activations(2, length, seed) for seed in range(2) for length in (3, 5, 4, 3)]
    results = [model(batch) for batch in batches]
    for batch, result in zip(batches, results):
        torch.testing.assert_close(result, plain(batch))
    # Length 3 has two: one of the graph for fixed sizes, one of the symbolic graph, should TorchDynamo ask that one.
    assert device.captures in (3, 4)


def test_static_outputs(device: FakeDevice) -> None:
    model = kernl.optimize_model(tiny.encoder(), static_outputs=True)
    for _ in range(2):
        first = model(tiny.activations())
    assert model(tiny.activations()).data_ptr() == first.data_ptr()


def test_weights_changed_in_place_are_replayed(device: FakeDevice) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    model.blocks[0].up.weight.data.mul_(3)
    assert check(model, x) and device.captures == 1


def test_a_moved_weight_is_captured_again(device: FakeDevice) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    weight = model.blocks[0].up.weight
    weight.data = torch.randn_like(weight)
    for _ in range(3):
        check(model, x)
    assert device.captures == 2 and check(model, x)


def test_checks_that_follow_the_launch_throw_its_result_away(device: FakeDevice) -> None:
    """The graph is launched before the model is looked at; what the look finds still counts for this very call."""
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    kept = model.blocks[0].up.weight.data  # the old memory stays valid, so the graph may read it
    model.blocks[0].up.weight.data = torch.randn_like(kept)
    before = device.replays
    check(model, x)
    assert device.replays == before + 1 and device.captures == 2
    model.blocks[1] = tiny.Block().eval()
    check(model, x)


def test_memory_that_was_freed_is_not_read_by_a_launch_ahead_of_the_checks(device: FakeDevice) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    model.blocks[0].up.weight.data = torch.randn_like(model.blocks[0].up.weight)
    before = device.replays
    check(model, x)
    assert device.replays == before and device.captures == 2
    check(model, x)
    assert device.replays == before + 1


def test_weights_of_another_shape_are_compiled_again(device: FakeDevice) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    linear = model.blocks[0].up
    linear.weight.data, linear.bias.data = torch.randn(48, 32), torch.randn(48)
    model.blocks[0].down.weight.data = torch.randn(32, 48)
    for _ in range(3):
        check(model, x)
    assert check(model, x) and len(model.kernl.report().graphs) == 2


def test_replaced_parts_are_noticed(device: FakeDevice) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    model.scale = torch.randn(tiny.WIDTH)
    for _ in range(3):
        check(model, x)
    model.blocks[1] = tiny.Block().eval()
    for _ in range(3):
        check(model, x)
    assert check(model, x)


def test_a_buffer_the_model_writes_to(device: FakeDevice) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x * self.calls

    model = kernl.optimize_model(Counts())
    for call in range(1, 6):
        assert model(torch.ones(2)).tolist() == [call, call] and model.calls.item() == call


def test_batch_norm_in_training_mode(device: FakeDevice) -> None:
    torch.manual_seed(0)
    plain, fast = nn.BatchNorm1d(4).train(), kernl.optimize_model(nn.BatchNorm1d(4).train())
    for _ in range(4):
        x = torch.randn(8, 4)
        torch.testing.assert_close(fast(x), plain(x))
        torch.testing.assert_close(fast.running_mean, plain.running_mean)
        assert fast.num_batches_tracked == plain.num_batches_tracked


def test_an_argument_the_model_writes_to(device: FakeDevice) -> None:
    class Writes(nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            cache.add_(x)
            return cache * 2

    model, cache = kernl.optimize_model(Writes()), torch.zeros(3)
    for call in range(1, 5):
        assert model(torch.ones(3), cache).tolist() == [2 * call] * 3 and cache.tolist() == [call] * 3
    assert direct(model) == 0


def test_a_failing_capture_is_said_once_and_reported(device: FakeDevice) -> None:
    device.fail = [RuntimeError("operation not permitted when stream is capturing")]
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    check(model, x)
    with pytest.warns(KernlWarning, match="without a CUDA graph: capturing failed: RuntimeError: operation not"):
        for _ in range(3):
            check(model, x)
    report = str(model.kernl.report())
    assert "operation not permitted" in report and "0 captured" in report


def test_a_failing_capture_is_an_error_when_strict(device: FakeDevice) -> None:
    device.fail = [RuntimeError("operation not permitted when stream is capturing")]
    model, x = kernl.optimize_model(tiny.encoder(), strict=True), tiny.activations()
    check(model, x)
    with pytest.raises(RuntimeError, match="operation not permitted"):
        model(x)


def test_release_and_refresh(device: FakeDevice) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    assert len(model.kernl.memory()["graphs"]) == 1
    model.kernl.release()
    assert model.kernl.memory()["graphs"] == []
    for _ in range(3):
        check(model, x)
    assert device.captures == 2
    model.kernl.refresh()
    for _ in range(3):
        check(model, x)
    assert device.captures == 3 and len(model.kernl.memory()["graphs"]) == 1


def test_calls_launch_at_once_again_after_a_release(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = kernl.optimize_model(tiny.encoder()), tiny.activations()
    for _ in range(3):
        check(model, x)
    model.kernl.release()
    for _ in range(2):
        check(model, x)

    def replay(*arguments: Any) -> Any:
        raise AssertionError("the call went round by the runner")

    monkeypatch.setattr(CapturedGraph, "replay", replay)
    check(model, x)


def test_max_graphs(device: FakeDevice) -> None:
    model, plain = kernl.optimize_model(tiny.encoder(), max_graphs=2), tiny.encoder()
    for length in (2, 3, 4, 5, 2, 3, 4, 5):
        x = tiny.activations(2, length)
        torch.testing.assert_close(model(x), plain(x))
    assert all(graph.runner.graph_count() <= 2 for graph in model.kernl._door.graphs if graph.runner)


def test_warmup_captures_everything(device: FakeDevice) -> None:
    model = kernl.optimize_model(tiny.bert())
    shapes = [(1, 4), (2, 8), (3, 5)]
    with torch.inference_mode():
        model.kernl.warmup(shapes, progress=False)
        captures = device.captures
        for batch, length in shapes:
            assert check(model, **tiny.text(batch, length))
    assert device.captures == captures


def test_gradients(device: FakeDevice) -> None:
    model, plain = kernl.optimize_model(tiny.encoder()), tiny.encoder()
    for _ in range(2):
        with torch.enable_grad():
            for encoder in (model, plain):
                encoder.zero_grad()
                encoder(tiny.activations()).sum().backward()
        torch.testing.assert_close(model.blocks[0].up.weight.grad, plain.blocks[0].up.weight.grad)
        check(model, tiny.activations())
    assert device.captures == 1
