"""The helpers ops are declared with: switches, allocation, registration, and the device-side conversions."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch._subclasses.fake_tensor import FakeTensorMode

from kernl.kernels.common import to_compute, to_storage
from kernl.ops import common
from kernl.runtime.capability import DeviceCapability
from tests.conftest import KernelRun


def test_kernels_are_made_ahead_once_and_failures_are_told() -> None:
    ran: list[str] = []
    seen: set[bool] = set()

    def run(name: str) -> None:
        seen.add(torch.is_inference_mode_enabled())
        ran.append(name)
        if name == "broken":
            raise RuntimeError("ptxas failed\nmore text")

    unique = object()
    pairs = [((unique, name), functools.partial(run, name)) for name in ("a", "b", "a", "broken")]
    reasons = common.compile_ahead(pairs, workers=3)
    assert sorted(ran) == ["a", "b", "broken"] and seen == {True}
    assert len(reasons) == 1 and "broken" in reasons[0] and reasons[0].endswith("RuntimeError: ptxas failed")
    assert not torch.is_inference_mode_enabled()
    assert len(common.compile_ahead(pairs, workers=1)) == 1, "what failed is tried again"
    assert sorted(ran) == ["a", "b", "broken", "broken"], "what worked is not"


def test_switches_nest() -> None:
    tensor = torch.zeros(2)
    assert not common.kernel_runs_on(tensor)
    if common.INTERPRET:
        with common.interpreted_kernels():
            assert common.kernel_runs_on(tensor, "norm")
            with common.force_reference(), common.force_reference():
                assert not common.kernel_runs_on(tensor)
            assert common.kernel_runs_on(tensor)
            assert not common.kernel_runs_on(tensor.double())
            assert not common.kernel_runs_on(tensor.long())
    assert not common.kernel_runs_on(tensor)


def test_switches_are_undone_by_an_error() -> None:
    with pytest.raises(KeyError):
        with common.force_reference(), common.poisoned():
            raise KeyError
    assert common._Mode.reference_only == common._Mode.poison == 0


def test_kernels_are_interpreted_only_when_triton_was_told_so() -> None:
    code = "import kernl.testing as t\nwith t.interpreted_kernels(): pass"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}, text=True,
        capture_output=True,
    )  # fmt: skip
    assert "TRITON_INTERPRET=1" in done.stderr


class _OnCuda:
    """As much of a CUDA tensor as the choice of kernel looks at."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@pytest.mark.parametrize(
    ("arch", "dtype", "norm", "linear", "pdl"),
    [
        ((6, 0), torch.float16, False, False, False),
        ((7, 5), torch.float16, True, False, False),
        ((7, 5), torch.bfloat16, False, False, False),
        ((8, 0), torch.bfloat16, True, True, False),
        ((9, 0), torch.float32, True, True, True),
        ((9, 0), torch.float64, False, False, True),
    ],
)
def test_the_gpu_decides(
    monkeypatch: pytest.MonkeyPatch, arch: tuple[int, int], dtype: torch.dtype, norm: bool, linear: bool, pdl: bool
) -> None:
    capability = DeviceCapability("test", *arch, sm_count=100, shared_memory_per_block=0, l2_bytes=0)
    monkeypatch.setattr(common, "capability_of", lambda device: capability)
    monkeypatch.setattr(common, "INTERPRET", False)
    tensor: Any = _OnCuda(dtype)
    assert common.kernel_runs_on(tensor, "norm") == norm
    assert common.kernel_runs_on(tensor, "linear") == common.kernel_runs_on(tensor, "attention") == linear
    assert common.use_pdl(tensor) == pdl


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32, torch.bool], ids=str)
def test_poisoned_outputs_are_never_a_plausible_result(dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    with common.poisoned():
        dense = common.empty((2, 3), dtype=dtype, device=device)
        strided = common.empty_strided((2, 3), (1, 2), dtype=dtype, device=device)
    assert strided.stride() == (1, 2)
    for tensor in (dense, strided):
        if dtype.is_floating_point:
            assert tensor.isnan().all()
        elif dtype == torch.bool:
            assert tensor.all()
        else:
            assert (tensor == torch.iinfo(dtype).min).all()


def test_only_parameters_in_a_captured_inference_graph_are_read_early(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert not common.is_capturing() and not common.may_prefetch(parameter)
    monkeypatch.setattr(common, "is_capturing", lambda: True)
    assert not common.may_prefetch(parameter)
    with torch.no_grad():
        assert common.may_prefetch(parameter)
        assert not common.may_prefetch(parameter * 1)


def test_cast_leaves_alone_what_autocast_leaves_alone() -> None:
    assert common.cast(None, torch.float16) is None
    for dtype in (torch.int64, torch.bool, torch.float64, torch.float16):
        tensor = torch.zeros(2, dtype=dtype)
        assert common.cast(tensor, torch.float16) is tensor
    cast = common.cast(torch.zeros(2), torch.float16)
    assert cast is not None and cast.dtype == torch.float16


@pytest.fixture(scope="module")
def scaled() -> Iterator[Any]:
    """An op of the tests' own, with every part `define_op` can register."""
    seen: list[tuple[torch.dtype, str]] = []

    def autocast(dtype: torch.dtype, device_type: str, input: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        seen.append((dtype, device_type))
        return torch.ops.kernl.test_scaled(input.to(dtype), factor)

    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, float], output: torch.Tensor) -> None:
        ctx.factor = inputs[1]

    op = common.define_op(
        "test_scaled(Tensor input, float factor=2.0) -> Tensor",
        cpu=lambda input, factor=2.0: input.contiguous() * factor,
        fake=lambda input, factor=2.0: common.empty(input.shape, dtype=input.dtype, device=input.device),
        autograd=(setup_context, lambda ctx, grad: (grad * ctx.factor, None)),
        autocast=autocast,
    )
    yield op, seen


def test_define_op_registers_every_part(scaled: Any) -> None:
    op, seen = scaled
    x = torch.ones(3, 4, requires_grad=True)
    assert op is torch.ops.kernl.test_scaled.default
    torch.library.opcheck(op, (x, 3.0))
    op(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 3.0))
    assert not seen
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(x).dtype == torch.bfloat16
    assert seen == [(torch.bfloat16, "cpu")]
    with torch.autocast("cpu", enabled=False):
        assert op(x).dtype == torch.float32


def test_autocast_is_honoured_inside_a_compiled_graph(scaled: Any) -> None:
    op, _ = scaled
    compiled = torch.compile(lambda x: op(x, 3.0), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = compiled(torch.ones(3, 4))
    assert output.dtype == torch.bfloat16 and torch.equal(output.float(), torch.full((3, 4), 3.0))


@triton.jit
def kernl_test_round_trip(input, output, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = to_compute(tl.load(input + offsets)).to(tl.float32)
    tl.store(output + offsets, to_storage(x * 1.0, output.dtype.element_ty))


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_conversions_round_as_torch_does(
    kernels: KernelRun, rng: torch.Generator, source: torch.dtype, target: torch.dtype
) -> None:
    values = torch.randn(1024, generator=rng).to(source)
    values[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1 + 2**-8]).to(source)
    values = values.to(kernels.device)
    output = torch.zeros(1024, dtype=target, device=kernels.device)
    kernl_test_round_trip[(1,)](values, output, BLOCK=1024)
    torch.testing.assert_close(output, values.to(target), rtol=0, atol=0, equal_nan=True)


def test_norms_and_attention_name_their_kernels_ahead(kernels: KernelRun) -> None:
    from kernl.kernels.common import launches

    x = torch.randn(2, 5, 48, device=kernels.device)
    weight = torch.nn.Parameter(torch.ones(48, device=kernels.device))
    query = torch.randn(2, 7, 2, 16, device=kernels.device).transpose(1, 2)
    padding = torch.ones(2, 7, dtype=torch.bool, device=kernels.device)
    bias = torch.randn(1, 2, 7, 7, device=kernels.device)
    cases = [
        (torch.ops.kernl.layer_norm, (x, weight, weight, 1e-5), 4),
        (torch.ops.kernl.add_layer_norm, (x, x[:1], weight, None, 1e-5), 8),
        (torch.ops.kernl.layer_norm_of_sum, (x, x, None, None, 1e-5), 4),
        (torch.ops.kernl.attention, (query, query, query, None, padding, 0.25, False, "mean"), 2),
        (torch.ops.kernl.attention, (query, query, query, bias, None, -0.25, True, "zero"), 1),
        (torch.ops.kernl.attention, (query, query, query, padding[:, None, None], None, 0.25, False, "zero"), 2),
    ]
    for op, args, most in cases:
        with common.force_reference():
            assert common.ahead_of(op, args) == []
        pairs = common.ahead_of(op, args)
        assert len({key for key, _ in pairs}) == len(pairs)
        assert 1 <= len(pairs) and (len(pairs) <= most or kernels.device.type == "cuda")
        before = sum(launches.values())
        with torch.inference_mode():
            for _, run in pairs:
                run()
        assert sum(launches.values()) == before + len(pairs)
        with FakeTensorMode() as mode:
            fake = [mode.from_tensor(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        with_fake = common.ahead_of(op, fake)
        assert {key for key, _ in with_fake} == {key for key, _ in pairs} or isinstance(args[1], torch.nn.Parameter)
        with torch.inference_mode():
            with_fake[0][1]()
