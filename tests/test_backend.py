"""The pipeline behind `torch.compile(backend="kernl")`: right results, validated options, and never down."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kernl import backend
from kernl.backend import CannotRun, Inputs, compile_graph, kernl_backend, written_inputs
from kernl.graph.table import placeholders_of
from kernl.options import Options
from kernl.report import KernlWarning, Report, forget_warnings
from kernl.runtime.capability import DeviceCapability
from tests import tiny


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    forget_warnings()


def compiled(function: Callable[..., Any], report: Report | None = None, **options: Any) -> Callable[..., Any]:
    """The function behind kernl's backend, with a report of its own."""
    settings = backend.load_options(options)  # registers kernl's patterns, whichever test comes first
    mine = report or Report()
    return torch.compile(function, backend=lambda gm, inputs: compile_graph(gm, inputs, settings, mine))


def test_torch_compile() -> None:
    model, x = tiny.encoder(), tiny.activations()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=kernl_backend)(x), model(x))
    assert backend.report().graphs[-1].lowering == "eager"


def test_options_of_torch_compile() -> None:
    model, x = tiny.encoder(), tiny.activations()
    fast = torch.compile(model, backend=kernl_backend, options={"patterns_disabled": ["linear_gelu"]})
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    rewriting = backend.report().graphs[-1].rewriting
    assert rewriting is not None and "linear_gelu" not in rewriting.patterns and rewriting.matched("layer_norm") > 0


def test_models_with_other_floats_are_fused_too() -> None:
    """TorchDynamo takes a float that it has seen with another value before, here `eps`, as an input of the graph."""
    for epsilon in (1e-5, 1e-3, 1e-1):
        model, x = tiny.encoder(), tiny.activations()
        for norm in (module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)):
            norm.eps = epsilon
        fast = torch.compile(model, backend=kernl_backend)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x))
            graph = backend.report().graphs[-1]
            assert graph.rewriting is not None and graph.rewriting.matched("layer_norm") > 0
            for norm in (module for module in model.modules() if isinstance(module, torch.nn.LayerNorm)):
                norm.eps = 0.5 + epsilon  # guarded
            torch.testing.assert_close(fast(x), model(x))
            assert backend.report().graphs[-1] is not graph


def test_floats_of_the_caller_stay_symbols() -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.nn.functional.gelu(x) * factor

    fast, x = torch.compile(scaled, backend=kernl_backend), tiny.activations()
    for factor in (2.0, 3.0, 4.0):
        torch.testing.assert_close(fast(x, factor), scaled(x, factor))
    graphs = len(backend.report().graphs)
    torch.testing.assert_close(fast(x, 5.0), scaled(x, 5.0))
    assert len(backend.report().graphs) == graphs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lowring": "eager"}, "did you mean 'lowering'"),
        ({"patterns_disabled": ["no_such_pattern"]}, "no pattern is named 'no_such_pattern'.*dropout"),
        ({"cuda_graph": "sometimes"}, "'auto', 'always', 'never'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        torch.compile(tiny.encoder(), backend=kernl_backend, options=options)(tiny.activations())


def test_modes_are_inductors() -> None:
    with pytest.raises(ValueError, match="reduce-overhead"):
        kernl_backend(torch.fx.symbolic_trace(nn.Identity()), [torch.ones(1)], mode="reduce-overhead")


def test_one_graph_serves_many_shapes() -> None:
    model, report = tiny.encoder(), Report()
    fast = compiled(model.forward, report)
    with torch.no_grad():
        for batch, length in [(2, 3), (3, 5), (4, 9), (7, 2)]:
            x = tiny.activations(batch, length)
            torch.testing.assert_close(fast(x), model(x))
    assert [graph.symbolic for graph in report.graphs] == [False, True]


@pytest.mark.parametrize("one_is_a_size", [True, False])
def test_sizes_of_all_operands_are_known_while_tracing(one_is_a_size: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled ahead for them. Slices are what PyTorch 2.11 keeps no hint for."""
    graphs, lower = [], backend.lower

    def keep(gm: torch.fx.GraphModule, *others: Any) -> Any:
        graphs.append(gm)
        return lower(gm, *others)

    monkeypatch.setattr(backend, "lower", keep)
    dense, norm = nn.Linear(16, 16), nn.LayerNorm(16)
    table = torch.randn(50, 16)
    fast = compiled(lambda x: norm(dense(x + table[: x.shape[1]]) + table[None, : x.shape[1]]))
    with torch.no_grad(), torch.fx.experimental._config.patch(backed_size_oblivious=one_is_a_size):
        for length in (5, 7):
            fast(torch.randn(2, length, 16))
    ops = [node for node in graphs[-1].graph.nodes if backend.is_kernl_op(node)]
    assert ops and all(backend.has_size_hints(node) for op in ops for node in op.all_input_nodes)
    seen = backend.stand_in(next(node for node in graphs[-1].graph.nodes if backend.is_kernl_op(node)))
    assert seen.shape == (2, 7, 16) and seen.stride() == (112, 16, 1)


def test_kernels_of_equal_layers_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, lower = [], backend.lower

    def look(gm: torch.fx.GraphModule, example_inputs: Any, *others: Any) -> Any:
        weights = dict(zip(placeholders_of(gm), example_inputs))
        kinds.append([target for target, _ in backend.kinds_of_calls(gm, weights)])
        return lower(gm, example_inputs, *others)

    monkeypatch.setattr(backend, "lower", look)
    with torch.no_grad():
        compiled(tiny.bert(num_hidden_layers=2))(**tiny.text())
        compiled(tiny.bert(num_hidden_layers=6))(**tiny.text())
    few, many = kinds
    assert sorted(map(str, few)) == sorted(map(str, many))
    names = [target._schema.name for target in many]
    assert names.count("kernl::attention") == names.count("kernl::merged_linear") == 1


def test_cpu_is_said_once() -> None:
    with pytest.warns(KernlWarning, match="runs on the CPU"), torch.no_grad():
        compiled(tiny.encoder().forward)(tiny.activations())
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", KernlWarning)
        compiled(tiny.encoder().forward)(tiny.activations())


@pytest.mark.parametrize("step", ["canonicalize", "rewrite", "lower", "capture_when_possible"])
def test_a_failing_step_leaves_plain_pytorch(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{step} is broken")

    monkeypatch.setattr(backend, step, fail)
    model, x, report = tiny.encoder(), tiny.activations(), Report()
    with torch.no_grad():
        with pytest.warns(KernlWarning, match=f"plain PyTorch: RuntimeError: {step} is broken"):
            result = compiled(model.forward, report)(x)
        torch.testing.assert_close(result, model(x))
    assert report.graphs[0].plain_because == f"RuntimeError: {step} is broken"
    assert report.graphs[0].lowering == "plain PyTorch" and f"{step} is broken" in str(report)

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=f"{step} is broken"):
        compiled(model.forward, strict=True)(x)


def test_a_half_rewritten_graph_is_not_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_it(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        for node in reversed(gm.graph.nodes):
            if node.op == "call_function":
                node.target = torch.neg
        gm.recompile()
        raise RuntimeError("half done")

    monkeypatch.setattr(backend, "rewrite", break_it)
    model, x = tiny.encoder(), tiny.activations()
    with torch.no_grad(), pytest.warns(KernlWarning, match="half done"):
        torch.testing.assert_close(compiled(model.forward)(x), model(x))


def failing_lowering(gm: torch.fx.GraphModule, *rest: Any) -> tuple[Callable[..., Any], str]:
    def run(*inputs: Any) -> Any:
        gm(*inputs)
        raise RuntimeError("no kernel image is available")

    return run, "eager"


def test_a_failing_first_run_leaves_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "lower", failing_lowering)
    model, x, report = tiny.encoder(), tiny.activations(), Report()
    fast = compiled(model.forward, report)
    with torch.no_grad():
        with pytest.warns(KernlWarning, match="no kernel image"):
            torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(fast(x), model(x))
    assert report.notes.total() == 1

    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(RuntimeError, match="no kernel image"):
        compiled(model.forward, strict=True)(x)


def test_running_again_does_not_repeat_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "lower", failing_lowering)

    def count(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return x * counter

    counter = torch.zeros(1)
    with torch.no_grad(), pytest.warns(KernlWarning, match="no kernel image"):
        result = compiled(count)(counter, torch.ones(3))
    assert counter.item() == 1 and result.tolist() == [1, 1, 1]


def test_the_users_own_error_comes_through() -> None:
    model = tiny.bert()
    fast = compiled(model.forward)
    ids = tiny.text()["input_ids"]
    with torch.no_grad():
        fast(ids)
        with pytest.raises(IndexError), warnings.catch_warnings():
            warnings.simplefilter("error", KernlWarning)
            fast(torch.full_like(ids, 10_000))
        torch.testing.assert_close(fast(ids)[0], model(ids)[0])


def captured(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[torch.fx.GraphModule, list[Any]]:
    """The graph TorchDynamo hands to a backend."""
    seen: list[Any] = []

    def keep(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        seen.append((gm, list(example_inputs)))
        return gm.forward

    torch.compile(function, backend=keep)(*inputs)
    return seen[0]


def test_weights_of_another_kind_are_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should TorchDynamo's guards not notice `weight.data = ...` (as in torch 2.11), plain PyTorch takes the call."""

    def checked(gm: torch.fx.GraphModule, example_inputs: Any, inputs: Inputs, options: Options) -> Any:
        return backend.for_these_weights(gm.forward, inputs), "eager"

    monkeypatch.setattr(backend, "lower", checked)
    model, x, report = tiny.encoder(), tiny.activations(), Report()
    gm, inputs = captured(model.forward, x)
    graph = compile_graph(gm, inputs, Options(), report)
    with torch.no_grad():
        torch.testing.assert_close(graph(*inputs)[0], model(x))
        doubled = [value.double() for value in inputs]
        torch.testing.assert_close(graph(*doubled)[0], model.double()(x.double()))
    assert "was (torch.float32" in str(report) and report.graphs[0].plain_because is None


def test_written_inputs() -> None:
    def write(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        b[0] = 1.0
        c.view(-1).mul_(a.sum())
        return a + b + c + d.clone().add_(1)

    gm, _ = captured(write, *(torch.ones(2, 2) for _ in range(4)))
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    assert sorted(names[position] for position in written_inputs(gm)) == ["l_b_", "l_c_"]


def test_parameters_and_buffers_are_fixed_inputs() -> None:
    model = tiny.encoder()
    gm, inputs = captured(model.forward, tiny.activations())
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    moving = [name for position, name in enumerate(names) if position not in Inputs(gm, inputs).fixed]
    assert moving == ["l_x_"] and len(names) == 1 + 6 * 2 + 1


def test_gradients_match_eager() -> None:
    model = tiny.encoder()
    x = tiny.activations().requires_grad_()
    report = Report()
    (want,) = torch.autograd.grad(model(x).square().sum(), x)
    (got,) = torch.autograd.grad(compiled(model.forward, report)(x).square().sum(), x)
    torch.testing.assert_close(got, want)
    assert report.graphs[0].gradients


def test_inductor_lowering() -> None:
    if not backend.has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    model, x, report = tiny.encoder(blocks=1), tiny.activations(), Report()
    fast = compiled(model.forward, report, lowering="inductor", strict=True)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))
    assert report.graphs[0].lowering == "inductor" and report.matched("linear_gelu") == 1


def test_inductor_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "has_cpp_compiler", lambda: False)
    model, x = tiny.encoder(), tiny.activations()
    with torch.no_grad(), pytest.warns(KernlWarning, match=r"needs a C\+\+ compiler"):
        torch.testing.assert_close(compiled(model.forward, lowering="inductor")(x), model(x))


def test_cuda_graph_always_on_a_cpu_is_an_error() -> None:
    with torch.no_grad(), pytest.raises(Exception, match="no CUDA graph can be captured: inputs are on the CPU"):
        compiled(tiny.encoder().forward, cuda_graph="always")(tiny.activations())


def test_deterministic() -> None:
    model, x = tiny.encoder(), tiny.activations()
    seen: list[bool] = []
    fixed = backend.with_fixed_choices(lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
    fixed()
    assert seen == [True] and not torch.are_deterministic_algorithms_enabled()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model.forward, deterministic=True)(x), model(x))


@pytest.mark.parametrize(("arch", "runs"), [((7, 0), False), ((7, 5), True), ((9, 0), True)])
def test_old_gpus(arch: tuple[int, int], runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gm, inputs = captured(lambda x: x + 1, torch.ones(2))
    known = Inputs(gm, inputs)
    known.devices = ["cuda:0"]
    capability = DeviceCapability("a GPU", *arch, sm_count=80, shared_memory_per_block=1 << 16, l2_bytes=1 << 22)
    monkeypatch.setattr(backend, "capability_of", lambda device: capability)
    if runs:
        backend.refuse_what_cannot_run(known)
    else:
        with pytest.raises(CannotRun, match=r"a GPU has compute capability 7\.0; .* need 7\.5 \(Turing\) or newer"):
            backend.refuse_what_cannot_run(known)


def test_a_gpu_older_than_turing_runs_plainly_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnOldGpu(Inputs):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.devices = ["cuda:0"]

    old = DeviceCapability("an old GPU", 7, 0, sm_count=80, shared_memory_per_block=1 << 16, l2_bytes=1 << 22)
    monkeypatch.setattr(backend, "capability_of", lambda device: old)
    monkeypatch.setattr(backend, "Inputs", OnOldGpu)
    model, x, report = tiny.encoder(), tiny.activations(), Report()
    gm, inputs = captured(model.forward, x)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = [compile_graph(gm, inputs, Options(), report)(*inputs)[0] for _ in range(2)]
        plain = model(x)
    said = [str(warning.message) for warning in caught if issubclass(warning.category, KernlWarning)]
    assert len(said) == 1 and "an old GPU has compute capability 7.0" in said[0]
    assert all(torch.equal(result, plain) for result in results)
    assert [graph.lowering for graph in report.graphs] == ["plain PyTorch"] * 2


@pytest.mark.parametrize(
    ("devices", "needs_grad", "mode", "reason"),
    [
        (["cuda:0"], False, "auto", None),
        (["cuda:0"], False, "never", 'cuda_graph="never"'),
        (["cuda:0"], True, "auto", "gradients are needed"),
        (["cuda:0", "cuda:1"], False, "auto", "inputs are on several devices"),
        (["cpu"], False, "auto", "inputs are on the CPU"),
        ([], False, "auto", "inputs are on the CPU"),
    ],
)
def test_why_no_cuda_graph(devices: list[str], needs_grad: bool, mode: Any, reason: str | None) -> None:
    gm, inputs = captured(lambda x: x + 1, torch.ones(2))
    known = Inputs(gm, inputs)
    known.devices, known.needs_grad = devices, needs_grad
    answer = backend.obstacle_to_capture(known, Options(cuda_graph=mode))
    assert (answer or "").startswith(reason or "") and (answer is None) == (reason is None)
    torch._dynamo.reset()


@pytest.mark.parametrize(("arch", "count"), [((7, 5), 2), ((8, 0), 0)])
def test_what_turing_leaves_to_pytorch_is_in_the_report(
    arch: tuple[int, int], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gm, inputs = captured(lambda x: x + 1, torch.ones(2, dtype=torch.bfloat16))
    known, report = Inputs(gm, inputs), Report()
    known.devices = ["cuda:0"]
    capability = DeviceCapability("a GPU", *arch, sm_count=40, shared_memory_per_block=1 << 16, l2_bytes=1 << 22)
    monkeypatch.setattr(backend, "capability_of", lambda device: capability)
    backend.note_what_stays_plain(known, report)
    assert len(report.notes) == count
    if count:
        assert "linear and attention ops run PyTorch's kernels: compute capability 7.5" in str(report)
        assert "bfloat16 run PyTorch's kernels" in str(report)
