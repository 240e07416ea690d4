"""Linear layers on the GPU: every configuration at real sizes, in CUDA graphs, on several streams at once."""

from __future__ import annotations

import threading

import pytest
import torch

import kernl.ops
from kernl.kernels.linear import LinearConfig, configs
from kernl.ops.linear import (
    _Counters,
    _Problem,
    _run_config,
    implementations,
    reference_linear,
)
from kernl.runtime.capability import capability_of
from kernl.runtime.capture_order import capturing_in_turn
from kernl.runtime.tuning import defaults_only
from kernl.testing import assert_within_budget
from tests.ops.test_linear import plain_linear

DEVICE = torch.device("cuda")
SIZES = [(768, (768,)), (3072, (768,)), (768, (3072,)), (768, (768, 768, 768)), (200, (72, 8, 328))]


def make_problem(
    rows: int, inner: int, columns: tuple[int, ...], activation: str, dtype: torch.dtype = torch.float16
) -> _Problem:
    return _Problem(
        torch.randn(rows, inner, device=DEVICE).to(dtype),
        [(torch.randn(n, inner, device=DEVICE) * inner**-0.5).to(dtype) for n in columns],
        [torch.randn(n, device=DEVICE).to(dtype) for n in columns],
        [torch.full((rows, n), float("nan"), device=DEVICE, dtype=dtype) for n in columns],
        activation,
    )


def check(problem: _Problem, name: str) -> None:
    for output, weight, bias in zip(problem.outputs, problem.weights, problem.biases, strict=True):
        assert bias is not None
        exact = reference_linear(problem.input.double(), weight.double(), bias.double(), problem.activation)
        plain = plain_linear(problem.input, weight, bias, problem.activation)
        assert_within_budget(output, exact, plain, name=name)


@pytest.mark.parametrize("rows", [1, 16, 60, 128, 200, 1000, 2100])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_every_implementation(size: tuple[int, tuple[int, ...]], dtype: torch.dtype, rows: int) -> None:
    inner, columns = size
    problem = make_problem(rows, inner, columns, "gelu", dtype)
    for name, run in implementations(problem).items():
        for output in problem.outputs:
            output.fill_(float("nan"))
        run()
        check(problem, f"{name} {rows}x{inner}x{columns}")


@pytest.mark.parametrize(
    "sizes", [(33, 100, 50), (7, 33, 65), (300, 60, 36), (300, 64, 100), (5, 1, 1), (1, 4097, 259)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_sizes_that_are_multiples_of_nothing(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    rows, inner, columns = sizes
    problem = make_problem(rows, inner, (columns,), "gelu", dtype)
    for name, run in implementations(problem).items():
        run()
        check(problem, name)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu", "tanh", "quick_gelu"])
def test_every_activation_of_every_implementation(activation: str) -> None:
    for rows in (16, 2100):
        problem = make_problem(rows, 256, (512,), activation)
        for name, run in implementations(problem).items():
            run()
            check(problem, f"{name} {activation}")


@pytest.mark.parametrize("tf32", [False, True])
def test_fp32_honours_the_matmul_precision(tf32: bool) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        problem = make_problem(16, 768, (256,), "none", torch.float32)
        exact = reference_linear(
            problem.input.double(), problem.weights[0].double(), problem.biases[0].double(), "none"
        )
        for name, run in implementations(problem).items():
            run()
            error = float((problem.outputs[0] - exact).abs().max())
            assert error < (2e-2 if tf32 else 2e-5), name
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("rows", [16, 128, 1024])
def test_in_a_cuda_graph(rows: int) -> None:
    inner, columns = 3072, (768,)
    problem = make_problem(rows, inner, columns, "gelu")
    for name, run in implementations(problem).items():
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        for _ in range(3):
            problem.input.copy_(torch.randn_like(problem.input))
            problem.outputs[0].fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            check(problem, f"{name} in a graph")


def test_op_in_a_cuda_graph_without_a_choice_made_before() -> None:
    input = torch.randn(48, 136, device=DEVICE, dtype=torch.float16)
    weight, bias = torch.randn(264, 136, device=DEVICE).half() / 12, torch.randn(264, device=DEVICE).half()
    with defaults_only():
        kernl.ops.linear(input, weight, bias, "gelu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # nothing may be measured here
        output = kernl.ops.linear(input, weight, bias, "gelu")
    graph.replay()
    exact = reference_linear(input.double(), weight.double(), bias.double(), "gelu")
    assert_within_budget(output, exact, reference_linear(input, weight, bias, "gelu"), name="linear")


def split_config() -> LinearConfig:
    arch = capability_of(DEVICE).arch
    return next(config for config in configs(arch, 64, torch.float16, tma=True) if config.split_k > 1)


def test_split_k_on_streams_and_in_graphs_at_once() -> None:
    problems = [make_problem(64, 3072, (768,), "gelu") for _ in range(4)]
    config = split_config()
    _run_config(problems[0], config)  # the pool of counters exists from here on
    torch.cuda.synchronize()
    graphs = []
    for problem in problems[:2]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                _run_config(problem, config)
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in problems]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                if index < 2:
                    graphs[index].replay()
                else:
                    for _ in range(20):
                        _run_config(problems[index], config)
    torch.cuda.synchronize()
    for problem in problems:
        check(problem, config.name)


def test_split_k_is_the_same_every_time() -> None:
    problem = make_problem(64, 3072, (768,), "none")
    results = []
    for _ in range(20):
        _run_config(problem, split_config())
        results.append(problem.outputs[0].clone())
    assert all(torch.equal(results[0], result) for result in results)


def test_counters_never_overlap_and_run_out_safely() -> None:
    counters = _Counters()
    first = counters.take(DEVICE, 40)
    assert first is not None and not first.any()
    assert counters.take(DEVICE, 40).data_ptr() == first.data_ptr(), "launches of one stream follow one another"
    with torch.cuda.stream(torch.cuda.Stream()):
        other = counters.take(DEVICE, 40)
    assert other is not None and abs(other.data_ptr() - first.data_ptr()) >= 4 * _Counters.PER_STREAM
    assert counters.take(DEVICE, _Counters.PER_STREAM + 1) is None

    fresh = _Counters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert fresh.take(DEVICE, 40) is None, "a pool made while capturing would belong to the graph"
        captured = [counters.take(DEVICE, 40) for _ in range(2)]
        assert captured[0].data_ptr() != captured[1].data_ptr()
        with capturing_in_turn():
            in_turn = [counters.take(DEVICE, 40) for _ in range(2)]
        assert in_turn[0].data_ptr() == in_turn[1].data_ptr() not in {cells.data_ptr() for cells in captured}
        while counters.take(DEVICE, 1 << 16) is not None:
            pass
        with capturing_in_turn():
            assert counters.take(DEVICE, 40).data_ptr() == in_turn[0].data_ptr(), "graphs in turn never use them up"
        torch.zeros(1, device=DEVICE)  # a graph must not be empty


def test_two_threads() -> None:
    problems = [make_problem(16, 768, (768,), "gelu") for _ in range(2)]
    failures: list[BaseException] = []

    def work(problem: _Problem) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(50):
                    output = kernl.ops.linear(problem.input, problem.weights[0], problem.biases[0], "gelu")
                problem.outputs[0].copy_(output)
            torch.cuda.synchronize()
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(problem,)) for problem in problems]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for problem in problems:
        check(problem, "linear in two threads")


def test_rows_beyond_32_bits_of_elements() -> None:
    rows, inner, columns = 2**17 + 3, 64, 16640  # more than 2^31 outputs
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free GPU memory")
    input = torch.randn(rows, inner, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(columns, inner, device=DEVICE, dtype=torch.float16)
    problem = _Problem(input, [weight], [None], [input.new_empty(rows, columns)], "relu")
    for name, run in implementations(problem).items():
        problem.outputs[0][-8:].fill_(float("nan"))
        run()
        tail = reference_linear(input[-8:].double(), weight.double(), None, "relu")
        plain = reference_linear(input[-8:], weight, None, "relu")
        assert_within_budget(problem.outputs[0][-8:], tail, plain, name=name)
