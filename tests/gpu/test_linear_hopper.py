"""The warp-specialised linear kernel on a Hopper GPU.

A wrong barrier hangs the GPU, so before anything else each configuration runs in a process that can be killed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernl.kernels.activation import ACTIVATIONS
from kernl.kernels.linear_hopper import HOPPER_CONFIGS, HopperConfig, launch_hopper
from kernl.ops.linear import _Problem, _run_hopper, implementations, reference_linear
from kernl.runtime.capability import capability_of
from kernl.testing import assert_within_budget
from tests.gpu.test_linear import DEVICE, check, make_problem
from tests.ops.test_linear import plain_linear

ROOT = Path(__file__).resolve().parents[2]
SECONDS_FOR_FIRST_LAUNCHES = 150
FIRST_LAUNCHES = [(1, 64, (8,)), (129, 200, (136,)), (1000, 768, (768,)), (20000, 768, (768, 72, 768))]

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
    pytest.mark.timeout(120),
]
every_config = pytest.mark.parametrize("config", HOPPER_CONFIGS, ids=[config.name for config in HOPPER_CONFIGS])


def first_launches(name: str) -> None:
    """Some problems from one tile to many a program, several times over: what a wrong barrier would not survive."""
    config = next(config for config in HOPPER_CONFIGS if config.name == name)
    for rows, inner, columns in FIRST_LAUNCHES:
        problem = make_problem(rows, inner, columns, "none")
        for _ in range(5):
            run(problem, config)
        torch.cuda.synchronize()
        print(f"{name} {rows}x{inner}x{columns} came back", flush=True)


_came_back: dict[str, str] = {}
"""Configuration -> why it must not be launched in this process, or nothing."""


@pytest.fixture(autouse=True)
def comes_back(request: pytest.FixtureRequest) -> None:
    configs = [request.getfixturevalue("config")] if "config" in request.fixturenames else HOPPER_CONFIGS
    for config in configs:
        name = config.name
        if name not in _came_back:
            script = f"from tests.gpu.test_linear_hopper import first_launches; first_launches({name!r})"
            try:
                done = subprocess.run(
                    [sys.executable, "-c", script],
                    cwd=ROOT,
                    capture_output=True,
                    text=True,
                    timeout=SECONDS_FOR_FIRST_LAUNCHES,
                )
                _came_back[name] = "" if done.returncode == 0 else done.stderr[-2000:]
            except subprocess.TimeoutExpired as error:
                _came_back[name] = f"{name} hangs; before that: {error.stdout!r}"
        if _came_back[name]:
            pytest.fail(_came_back[name], pytrace=False)


def run(problem: _Problem, config: HopperConfig, *, use_pdl: bool = True) -> None:
    sm_count = capability_of(DEVICE).sm_count or 132
    operands = (problem.input, problem.weights, problem.biases, problem.outputs, problem.activation)
    launch_hopper(config, *operands, sm_count=sm_count, use_pdl=use_pdl)


@every_config
@pytest.mark.parametrize("rows", [1, 63, 64, 65, 128, 300, 2100, 16384])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "size",
    [(64, (768,)), (768, (3072,)), (3072, (768,)), (768, (768, 768, 768)), (200, (72, 8, 328)), (4096, (264,) * 4)],
    ids=str,
)
def test_sizes(size: tuple[int, tuple[int, ...]], dtype: torch.dtype, rows: int, config: HopperConfig) -> None:
    inner, columns = size
    problem = make_problem(rows, inner, columns, "gelu", dtype)
    run(problem, config)
    check(problem, f"{config.name} {rows}x{inner}x{columns}")


@every_config
def test_sizes_nobody_chose(config: HopperConfig, rng: torch.Generator) -> None:
    def draw(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=rng))

    for _ in range(40):
        rows, inner = draw(3000), 8 * draw(256)
        columns = tuple(8 * draw(120) for _ in range(draw(4)))
        activation = ACTIVATIONS[draw(len(ACTIVATIONS)) - 1]
        problem = make_problem(rows, inner, columns, activation)
        problem = _Problem(
            problem.input,
            problem.weights,
            [bias if draw(3) > 1 else None for bias in problem.biases],
            problem.outputs,
            activation,
        )
        run(problem, config, use_pdl=draw(2) == 1)
        for output, weight, bias in zip(problem.outputs, problem.weights, problem.biases, strict=True):
            wide_bias = None if bias is None else bias.double()
            exact = reference_linear(problem.input.double(), weight.double(), wide_bias, activation)
            plain = plain_linear(problem.input, weight, bias, activation)
            assert_within_budget(output, exact, plain, name=f"{config.name} {rows}x{inner}x{columns} {activation}")


@every_config
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_activation(activation: str, dtype: torch.dtype, config: HopperConfig) -> None:
    problem = make_problem(1111, 256, (512,), activation, dtype)
    run(problem, config)
    check(problem, f"{config.name} {activation}")


@every_config
def test_rows_with_a_stride(config: HopperConfig) -> None:
    problem = make_problem(700, 256, (512,), "none")
    wide = torch.randn(700, 1024, device=DEVICE, dtype=torch.float16)
    strided = _Problem(wide[:, 512:768], problem.weights, problem.biases, problem.outputs, "none")
    run(strided, config)
    check(strided, config.name)


@every_config
@pytest.mark.parametrize("size", [(64, (512,)), (768, (3072,)), (3072, (768, 768))], ids=str)
def test_fifty_launches_give_one_result(size: tuple[int, tuple[int, ...]], config: HopperConfig) -> None:
    inner, columns = size
    problem = make_problem(5000, inner, columns, "gelu")
    run(problem, config)
    check(problem, config.name)
    first = [output.clone() for output in problem.outputs]
    for _ in range(50):
        for output in problem.outputs:
            output.fill_(float("nan"))
        run(problem, config)
        assert all(torch.equal(output, kept) for output, kept in zip(problem.outputs, first, strict=True))


@every_config
def test_dependent_launches_in_a_graph(config: HopperConfig) -> None:
    """Each reads what the one before it wrote, and overwrites what the one two before it read."""
    up, down = make_problem(3000, 768, (1536,), "gelu"), make_problem(3000, 1536, (768,), "none")
    hidden, result = up.outputs[0], up.input

    def chain() -> None:
        for _ in range(6):
            run(up, config)
            run(_Problem(hidden, down.weights, down.biases, [result], "none"), config)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(10):
        start = torch.randn_like(result)
        result.copy_(start)
        graph.replay()
        in_graph = result.clone()
        result.copy_(start)
        for _ in range(6):
            for inputs, problem, output in ((result, up, hidden), (hidden, down, result)):
                torch.cuda.synchronize()
                step = _Problem(inputs, problem.weights, problem.biases, [output], problem.activation)
                run(step, config, use_pdl=False)
        assert torch.equal(in_graph, result)


@every_config
def test_two_streams_at_once(config: HopperConfig) -> None:
    problems = [make_problem(2500, 512, (768, 768), "relu") for _ in range(2)]
    run(problems[0], config)
    torch.cuda.synchronize()
    for problem in problems:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(30):
                run(problem, config)
    torch.cuda.synchronize()
    for problem in problems:
        check(problem, config.name)


@every_config
def test_more_elements_than_32_bits_count(config: HopperConfig) -> None:
    rows, inner, columns = 2**17 + 3, 64, 16640
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    input = torch.randn(rows, inner, device=DEVICE, dtype=torch.float16)
    weight = torch.randn(columns, inner, device=DEVICE, dtype=torch.float16)
    problem = _Problem(input, [weight], [None], [input.new_empty(rows, columns)], "relu")
    problem.outputs[0][-8:].fill_(float("nan"))
    run(problem, config)
    tail = reference_linear(input[-8:].double(), weight.double(), None, "relu")
    plain = reference_linear(input[-8:], weight, None, "relu")
    assert_within_budget(problem.outputs[0][-8:], tail, plain, name=config.name)


@every_config
def test_gated(config: HopperConfig) -> None:
    products = make_problem(1500, 256, (512, 512), "silu")
    output = torch.full_like(products.outputs[0], float("nan"))
    _run_hopper(_Problem(products.input, products.weights, products.biases, [output], "silu", gated=True), config)

    def reference(dtype: torch.dtype) -> torch.Tensor:
        gate, up = (
            reference_linear(products.input.to(dtype), weight.to(dtype), bias if bias is None else bias.to(dtype), kind)
            for weight, bias, kind in zip(products.weights, products.biases, ("silu", "none"), strict=True)
        )
        return gate * up

    exact, plain = reference(torch.float64), reference(torch.float16)
    assert_within_budget(output, exact, plain, name=config.name)


def test_offered_on_request_alone() -> None:
    problem = make_problem(4096, 256, (512,), "gelu")
    names = {config.name for config in HOPPER_CONFIGS}
    assert names <= set(implementations(problem, hopper=True))
    assert not names & set(implementations(problem, hopper=False))
