"""Linear attention on a GPU: sizes too slow for the interpreter, every plan, long sequences, CUDA graphs, a peer.

The tests of tests/ops/test_linear_attention.py run on the GPU as well when there is one; they are not repeated here.
"""

from __future__ import annotations

import pytest
import torch

from kernl.kernels.linear_attention import default_plan
from kernl.ops import LinearAttentionState, causal_dot_product, linear_attention
from kernl.ops.linear_attention import implementations, offered_plans
from kernl.ops.linear_attention_common import shape_of
from kernl.ops.linear_attention_formulas import Problem
from kernl.runtime.capability import capability_of
from kernl.testing import assert_within_budget, poisoned
from tests.conftest import KernelRun
from tests.ops.test_linear_attention import Case, check, differentiate, draw, on, quadratic

HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNL_TUNING", "off")


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
@pytest.mark.parametrize("schedule", ["sequential", "chunkwise"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(16, 16), (48, 80), (64, 64), (128, 128), (100, 33)], ids=str)
def test_results_and_gradients(
    kernels: KernelRun, rng: torch.Generator, dims: tuple[int, int], causal: bool, schedule: str, dtype: torch.dtype
) -> None:
    if dtype == torch.float32 and max(dims) > 64:
        pytest.skip("without TF32 the gradient of wide heads runs the formulas")
    case = Case(
        (1000, 1000), dims, causal=causal, key_lengths=True, with_state=True, schedule=schedule, batch=2, heads=3
    )
    check(case, dtype, rng, kernels)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dims", [(256, 256), (256, 1), (1, 256), (200, 130)], ids=str)
def test_wide_and_narrow_heads(
    kernels: KernelRun, rng: torch.Generator, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    check(Case((513, 513), dims, schedule="chunkwise", batch=2, heads=2), dtype, rng, kernels)


def test_tf32(kernels: KernelRun, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """float32 honours PyTorch's matmul precision: TF32 is less precise than IEEE, and is not used unless allowed.

    TF32 drops bits past the tenth: up to 2**-10 an operand, in each of the two products.
    """
    case = Case((600, 600), (64, 64), batch=1, heads=2)
    inputs = draw(case, torch.float32, rng)
    expected = quadratic(case, inputs.map(lambda tensor: tensor.double()))[0]
    errors = {}
    for precision in ("ieee", "tf32"):
        monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", precision)
        output = linear_attention(*(each.to(kernels.device) for each in inputs.tensors), causal=True)
        errors[precision] = float((output.cpu().double() - expected).norm() / expected.norm())
    assert errors["ieee"] < 1e-5 < errors["tf32"] < 4 * 2**-10


def test_every_plan_on_offer(rng: torch.Generator) -> None:
    failures = []
    for dims in ((64, 64), (128, 128), (256, 256)):
        case = Case((2050, 2050), dims, batch=1, heads=2)
        inputs = on(torch.device("cuda"), draw(case, torch.float16, rng))
        problem = Problem(
            *(each.transpose(1, 2) for each in inputs.tensors), None, None, None, "elu", True, True, 1e-6, "auto"
        )
        expected = quadratic(case, on(torch.device("cpu"), inputs).map(lambda tensor: tensor.cpu().double()))[0]
        runs, _, default = implementations(problem)
        assert default in runs
        for name, run in runs.items():
            with poisoned():
                output = run()[0].transpose(1, 2)
            try:
                assert_within_budget(output, expected, expected.half(), name=f"{name} {dims}")
            except AssertionError as error:
                failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("schedule", ["sequential", "chunkwise"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 4097])
def test_lengths(kernels: KernelRun, rng: torch.Generator, length: int, schedule: str) -> None:
    check(Case((length, length), (64, 64), schedule=schedule, batch=2, heads=4), torch.float16, rng, kernels)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_65536_positions(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype) -> None:
    """Values of mean 1: the state grows past float16's largest number, the running sums keep their digits."""
    query, key, value = (torch.randn(1, 65536, 2, 64, generator=rng).to(dtype).cuda() for _ in range(3))
    value = value + 1
    for schedule in ("sequential", "chunkwise"):
        output = linear_attention(query, key, value, causal=True, schedule=schedule)
        with torch.no_grad():
            exact = linear_attention(*(each.double() for each in (query, key, value)), causal=True)
        assert_within_budget(output, exact, exact.to(dtype), name=schedule)


@pytest.mark.parametrize("schedule", ["sequential", "chunkwise"])
def test_same_bits_each_time(kernels: KernelRun, rng: torch.Generator, schedule: str) -> None:
    case = Case((3000, 3000), (64, 64), schedule=schedule, with_state=True, batch=4, heads=8)
    inputs = on(kernels.device, draw(case, torch.float16, rng))
    first = differentiate(case, inputs)
    for _ in range(5):
        second = differentiate(case, inputs)
        for one, other in zip(first[0] + first[1], second[0] + second[1]):
            assert torch.equal(one, other)


def test_memory_grows_with_the_length_alone(rng: torch.Generator) -> None:
    """No scores, no state per position: forward and backward need a few times the bytes of the operands."""
    operands = [torch.randn(1, 65536, 8, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(3)]
    grad = torch.randn_like(operands[0])
    torch.autograd.grad(linear_attention(*operands, causal=True), operands, grad)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(linear_attention(*operands, causal=True), operands, grad)
    peak = torch.cuda.max_memory_allocated() - before
    assert peak <= 6 * operands[0].numel() * 2


def test_offsets_past_32_bits(kernels: KernelRun) -> None:
    """Rows so far apart that their offsets do not fit 32 bits."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    wide = torch.zeros(300, 2**23, device="cuda", dtype=torch.float16)
    views = [wide[:, start : start + 64].unflatten(1, (1, 64))[None] for start in (0, 64, 128)]
    for view in views:
        view.copy_(torch.randn(view.shape, device="cuda"))
    expected = linear_attention(*(view.contiguous() for view in views), causal=True)
    assert torch.equal(linear_attention(*views, causal=True), expected)


def test_in_a_cuda_graph(rng: torch.Generator) -> None:
    """A replay reads the operands and the state of now."""
    operands = [torch.randn(2, 700, 4, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    state = LinearAttentionState(torch.zeros(2, 4, 64, 64, device="cuda"), torch.zeros(2, 4, 64, device="cuda"))

    def call() -> torch.Tensor:
        return linear_attention(*operands, causal=True, initial_state=state)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    for tensor in (*operands, *state):
        tensor.copy_(torch.randn(tensor.shape, device="cuda").abs())
    graph.replay()
    assert torch.equal(output, call())


def test_few_heads_are_cut_on_this_gpu() -> None:
    operands = [torch.empty(1, 4, 16384, 64, device="cuda", dtype=torch.float16) for _ in range(3)]
    problem = Problem(*operands, None, None, None, "elu", True, True, 1e-6, "auto")
    plan = default_plan(offered_plans(problem), shape_of(problem), capability_of("cuda").sm_count)
    assert plan.segments > 1


def test_flash_linear_attention_agrees(rng: torch.Generator) -> None:
    linear_attn = pytest.importorskip("fla.ops.linear_attn")
    operands = [torch.randn(2, 1024, 4, 64, device="cuda", dtype=torch.float16) * 0.3 for _ in range(3)]
    theirs = linear_attn.chunk_linear_attn(*operands, scale=1.0, normalize=False)[0]
    ours = causal_dot_product(*(each.transpose(1, 2) for each in operands)).transpose(1, 2)
    exact = causal_dot_product(*(each.double().transpose(1, 2) for each in operands)).transpose(1, 2)
    assert_within_budget(ours, exact, theirs, name="beside flash-linear-attention")
