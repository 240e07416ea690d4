"""The whole pipeline on one screen. TorchDynamo hands over a graph; a callable goes back.

    canonicalise -> rewrite -> lower -> CUDA-graph runner

    torch.compile(model, backend="kernl")
    torch.compile(model, backend="kernl", options={"lowering": "inductor", "patterns_disabled": ["dropout"]})

`compile_graph` is the pipeline and reads from top to bottom; the rest of the file is its steps, in order.

**Never worse, never down.** If a step fails, that graph runs as the plain PyTorch it was captured from, a warning says
so once with the reason, and the report lists it. `strict=True` raises instead. The same holds for the first run of a
graph: that is where kernels are compiled.

**Gradients.** Under `lowering="eager"` the rewritten graph runs node by node and autograd records it as it would record
the model, kernl's ops having backward formulas of their own. Under `lowering="inductor"`, and for graphs with regions
(checkpointed layers), AOTAutograd cuts the graph into forward and backward. No CUDA graph is captured in either case.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from kernl.graph import RewriteReport, canonicalize, default_registry, rewrite
from kernl.graph.match import Refused
from kernl.graph.memory import Storages, written_by
from kernl.graph.numbers import with_floats_of_modules
from kernl.graph.table import placeholders_of
from kernl.graph.tokens import TokenFlow, trace_tokens
from kernl.ops.common import ahead_of, compile_ahead
from kernl.options import Options
from kernl.report import GraphReport, Report, reason_of, warn_once
from kernl.runtime import tuning
from kernl.runtime.capability import capability_of, find_cpp_compiler
from kernl.runtime.capture_device import CaptureDevice
from kernl.runtime.cuda_graph import RARE, CudaGraphRunner

Runnable = Callable[..., Any]

_torch_compile_report = Report('torch.compile(backend="kernl")')


def kernl_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Runnable:
    """The backend "kernl" of torch.compile.

    gm, example_inputs: what TorchDynamo hands to a backend.
    options: the fields of `kernl.Options` as a dictionary.
    mode: torch.compile's `mode`; only None and "default" mean something here.

    Raises TypeError or ValueError for an option or a mode that does not exist.
    """
    if mode not in (None, "default"):
        raise ValueError(
            f'mode={mode!r}: backend "kernl" has no modes (CUDA graphs and tuning are on by default); '
            "leave it out and use options={...}"
        )
    checked = load_options(options)
    gm, kept = with_floats_of_modules(gm)
    compiled = compile_graph(gm, [example_inputs[position] for position in kept], checked, _torch_compile_report)
    if len(kept) == len(example_inputs):
        return compiled
    return lambda *inputs: compiled(*(inputs[position] for position in kept))


def report() -> Report:
    """What happened to every graph compiled through `torch.compile(backend="kernl")` in this process."""
    return _torch_compile_report


def load_options(given: Mapping[str, Any] | Options | None) -> Options:
    """Validated options, names of patterns included."""
    importlib.import_module("kernl.patterns")  # registers kernl's own patterns
    options = given if isinstance(given, Options) else Options.from_kwargs(given)
    options.check_patterns(default_registry.names())
    return options


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any], options: Options, report: Report) -> CompiledGraph:
    """Turn one captured graph into a callable that takes the same inputs and returns the same outputs."""
    started = time.perf_counter()
    entry = report.new_graph()
    plain = plain_copy(gm)
    inputs = Inputs(gm, example_inputs)
    describe(gm, inputs, entry)
    try:
        refuse_what_cannot_run(inputs)
        note_what_stays_plain(inputs, report)
        inputs.mutated = written_inputs(gm)
        canonical = canonicalize(gm)
        inputs.tokens = token_flow(gm, inputs, options)
        entry.rewriting = rewrite_graph(gm, canonical, options)
        function, entry.lowering = lower(gm, example_inputs, inputs, options)
        function = with_kernels_ahead(function, gm, example_inputs, inputs, entry)
        if options.deterministic:
            function = with_fixed_choices(function)
        function = capture_when_possible(function, inputs, options, entry, report)
    except Exception as error:
        if options.strict or isinstance(error, CannotCapture) or inputs.needs_tracing:
            raise
        function = run_plain(plain, entry, report, reason_of(error))
    entry.seconds = time.perf_counter() - started
    return CompiledGraph(function, plain, inputs, options, entry, report)


class Inputs:
    """What the pipeline needs to know about a graph's inputs.

    count, sources: how many there are, and how TorchDynamo reached them.
    fixed: positions of parameters and buffers, whose addresses stay. kinds: their dtypes, shapes and devices.
    mutated: positions the graph writes to.
    needs_grad: whether autograd will record the graph. needs_tracing: whether it would do so wrongly (`has_regions`).
    devices: where the tensors are. dtypes: theirs. symbolic: whether sizes are symbols.
    tokens: how padding of sequences would show, or why that is not known; None when nobody has asked.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        placeholders = placeholders_of(gm)
        sources = [getattr(node, "_dynamo_source", None) for node in placeholders]
        tensors = [value for value in example_inputs if isinstance(value, torch.Tensor)]
        self.count = len(placeholders)
        self.sources = sources
        self.fixed = frozenset(
            position
            for position, (value, source) in enumerate(zip(example_inputs, sources))
            if isinstance(value, torch.nn.Parameter) or _is_module_tensor(value, source)
        )
        self.kinds = {position: kind_of(example_inputs[position]) for position in self.fixed}
        self.mutated: frozenset[int] = frozenset()
        self.tokens: TokenFlow | str | None = None
        self.needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        self.devices = sorted({str(tensor.device) for tensor in tensors})
        self.dtypes = frozenset(tensor.dtype for tensor in tensors)
        self.needs_tracing = self.needs_grad and has_regions(gm)
        self.symbolic = any(isinstance(value, torch.SymInt) for value in example_inputs) or any(
            isinstance(node.meta.get("example_value"), torch.SymInt) for node in placeholders
        )

    @property
    def device(self) -> torch.device:
        return torch.device(self.devices[0]) if self.devices else torch.device("cpu")


def _is_module_tensor(value: Any, source: Any) -> bool:
    """Buffers: tensors that TorchDynamo reached through `module._buffers[...]`."""
    return isinstance(value, torch.Tensor) and "_buffers[" in source_name(source)


def has_regions(gm: GraphModule) -> bool:
    """Whether parts of the graph are graphs of their own, such as checkpointed layers.

    Run node by node, a checkpointed region draws other random numbers when it is computed again for the backward pass,
    and dropout's gradient is wrong. AOTAutograd is made for these regions.
    """
    return any(isinstance(node.target, torch._ops.HigherOrderOperator) for node in gm.graph.nodes)


def source_name(source: Any) -> str:
    """The Python expression by which TorchDynamo reached an input ("" when it has none)."""
    if source is None:
        return ""
    try:
        name = source.name
        return str(name() if callable(name) else name)
    except NotImplementedError:
        return ""


def written_inputs(gm: GraphModule) -> frozenset[int]:
    """Positions of the inputs whose memory the graph writes to."""
    storages = Storages(gm.graph)
    written = [target for node in gm.graph.nodes for target in written_by(node)]
    placeholders = placeholders_of(gm)
    return frozenset(
        position
        for position, placeholder in enumerate(placeholders)
        if isinstance(placeholder.meta.get("example_value"), torch.Tensor)
        and any(storages.overlap(placeholder, target) for target in written)
    )


def plain_copy(gm: GraphModule) -> Runnable:
    """The graph as it was captured, for when anything goes wrong. The code is generated only if it is called."""
    graph = Graph(tracer_cls=getattr(gm.graph, "_tracer_cls", None))
    graph.output(graph.graph_copy(gm.graph, {}))
    made: list[Runnable] = []

    def plain(*inputs: Any) -> Any:
        if not made:
            made.append(GraphModule(gm, graph).forward)
        return made[0](*inputs)

    return plain


def describe(gm: GraphModule, inputs: Inputs, entry: GraphReport) -> None:
    entry.device = inputs.devices[0] if len(inputs.devices) == 1 else "several" if inputs.devices else "cpu"
    entry.symbolic = inputs.symbolic
    entry.gradients = inputs.needs_grad
    entry.nodes = sum(node.op in ("call_function", "call_method", "call_module") for node in gm.graph.nodes)


class CannotRun(RuntimeError):
    """This graph is not for kernl; the message says why."""


class CannotCapture(RuntimeError):
    """`cuda_graph="always"` was asked for, and no CUDA graph can be captured."""


def refuse_what_cannot_run(inputs: Inputs) -> None:
    """Turing fuses norms only, which `kernl.ops` decides; anything older runs as plain PyTorch."""
    if inputs.device.type == "cuda":
        capability = capability_of(inputs.device)
        if not capability.fuses_norms:
            raise CannotRun(
                f"{capability.name} has compute capability {capability.major}.{capability.minor}; kernl's kernels need "
                "7.5 (Turing) or newer"
            )
    elif inputs.device.type == "cpu":
        warn_once(
            "cpu",
            "kernl runs on the CPU: every fused op uses its reference in plain PyTorch, no CUDA graphs. Results are "
            "the same; the speed-up needs an NVIDIA GPU",
        )


def note_what_stays_plain(inputs: Inputs, report: Report) -> None:
    """On Turing the ops that have no kernel there run PyTorch's (`kernl.ops` decides); the report must say so."""
    capability = capability_of(inputs.device)
    if inputs.device.type != "cuda" or capability.fuses_gemm_and_attention:
        return
    which = f"compute capability {capability.major}.{capability.minor}, and kernl's need 8.0 (Ampere)"
    report.note(f"linear and attention ops run PyTorch's kernels: {which}")
    if torch.bfloat16 in inputs.dtypes and not capability.has_bf16:
        report.note(f"all ops on bfloat16 run PyTorch's kernels: {which}")


def token_flow(gm: GraphModule, inputs: Inputs, options: Options) -> TokenFlow | str | None:
    """Where the tokens go, for `Options.buckets`; the reason when a sequence cannot be padded."""
    if options.buckets == "off":
        return None
    try:
        return trace_tokens(gm, inputs.fixed)
    except Refused as refused:
        return refused.reason
    except Exception as error:
        if options.strict:
            raise
        return f"error: {reason_of(error)}"


def rewrite_graph(gm: GraphModule, canonical: Counter[str], options: Options) -> RewriteReport:
    """Let the patterns replace what they recognise. canonical: the edits that `canonicalize` has made before."""
    report = rewrite(gm, without=options.patterns_disabled, strict=options.strict)
    report.canonical = canonical
    gm.recompile()
    return report


def lower(gm: GraphModule, example_inputs: Sequence[Any], inputs: Inputs, options: Options) -> tuple[Runnable, str]:
    """Give the rewritten graph something that runs it, and its name."""
    if options.lowering == "inductor":
        if inputs.device.type == "cpu" and not has_cpp_compiler():
            raise CannotRun('lowering="inductor" needs a C++ compiler and none was found (g++, or set CXX)')
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(gm, list(example_inputs), config_patches={"triton.cudagraphs": False})
        return compiled, "inductor"
    if inputs.needs_tracing:
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager(gm, list(example_inputs)), "eager (AOTAutograd)"
    return gm.forward, "eager"


def has_cpp_compiler() -> bool:
    return find_cpp_compiler() is not None


def with_kernels_ahead(
    function: Runnable, gm: GraphModule, example_inputs: Sequence[Any], inputs: Inputs, entry: GraphReport
) -> Runnable:
    """Compile, before the first run and side by side, the kernels that the graph needs for any batch and length.

    One after the other, at the first call of each new size, they would cost the user seconds each time.
    """
    if inputs.device.type != "cuda" or inputs.needs_grad:
        return function
    placeholders = placeholders_of(gm)
    calls = kinds_of_calls(gm, {placeholders[position]: example_inputs[position] for position in inputs.fixed})

    def run(*values: Any) -> Any:
        if calls:
            started = time.perf_counter()
            failures = compile_ahead(pair for op, arguments in calls for pair in ahead_of(op, arguments))
            entry.kernel_seconds = time.perf_counter() - started
            entry.kernel_failures = failures
            calls.clear()
        return function(*values)

    return run


def kinds_of_calls(gm: GraphModule, weights: Mapping[Node, Any]) -> list[tuple[Any, Any]]:
    """Ops of kernl in a graph with their arguments; of calls for which the same kernels are compiled, the first."""
    kinds: dict[Any, tuple[Any, Any]] = {}
    for node in gm.graph.nodes:
        if is_kernl_op(node) and all(has_size_hints(arg) for arg in node.all_input_nodes):
            arguments = torch.fx.map_arg(node.args, lambda arg: weights[arg] if arg in weights else stand_in(arg))
            kinds.setdefault((node.target, _kind_of_argument(arguments)), (node.target, arguments))
    return list(kinds.values())


def _kind_of_argument(value: Any) -> Any:
    """What an op's choice of kernels may look at. No kernel is compiled for more alignment than that of 16 bytes."""
    if isinstance(value, torch.Tensor):
        address = 0 if isinstance(value, FakeTensor) else value.data_ptr() % 16
        return tuple(value.shape), value.stride(), value.dtype, value.device, address
    if isinstance(value, (tuple, list)):
        return tuple(map(_kind_of_argument, value))
    return type(value), value


def is_kernl_op(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "kernl"


def stand_in(node: Node) -> Any:
    """The value of a node, a tensor without memory if it is one, of the sizes seen while tracing."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    with FakeTensorMode(allow_non_fake_inputs=True):
        return torch.empty_strided(
            [size_hint(size) for size in value.shape],
            [size_hint(stride) for stride in value.stride()],
            dtype=value.dtype,
            device=value.device,
        )


def has_size_hints(node: Node) -> bool:
    """Whether all sizes of a node's value were seen while tracing; those computed from data were not."""
    value = node.meta.get("example_value")
    sizes = [*value.shape, *value.stride()] if isinstance(value, torch.Tensor) else [value]
    return all(seen_while_tracing(size).is_number for size in sizes if isinstance(size, torch.SymInt))


def size_hint(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(seen_while_tracing(size))


def seen_while_tracing(size: torch.SymInt) -> Any:
    """A symbolic size with its symbols replaced. (Sizes of slices have no `hint` of their own in PyTorch 2.11.)"""
    return size.node.expr.xreplace(size.node.shape_env.backed_var_to_val)


def with_fixed_choices(function: Runnable) -> Runnable:
    """Run without measuring anything, and with PyTorch's deterministic kernels."""

    def run(*inputs: Any) -> Any:
        with tuning.defaults_only(), _deterministic_algorithms():
            return function(*inputs)

    return run


@contextlib.contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def capture_when_possible(
    function: Runnable, inputs: Inputs, options: Options, entry: GraphReport, report: Report
) -> Runnable:
    """Put the CUDA-graph runner around the function, or say why not."""
    entry.no_cuda_graph_because = obstacle_to_capture(inputs, options)
    if entry.no_cuda_graph_because is not None:
        if options.cuda_graph == "always":
            raise CannotCapture(
                f'cuda_graph="always", but no CUDA graph can be captured: {entry.no_cuda_graph_because}'
            )
        if inputs.needs_grad and inputs.device.type == "cuda" and options.cuda_graph == "auto":
            warn_once(
                "gradients",
                "gradients are needed, which keeps CUDA graphs off: the model runs, but launches are not hidden. For "
                "inference call it under torch.inference_mode() or torch.no_grad()",
            )
        return function

    def on_skip(reason: str) -> None:
        if reason in _ORDINARY_SKIPS:
            return
        if options.strict:
            raise CannotCapture(reason)
        report.note(f"{entry.name}: calls run without a CUDA graph: {reason}")
        warn_once(f"skip:{reason}", f"kernl runs calls of {report.subject} without a CUDA graph: {reason}")

    function = for_these_weights(function, inputs)
    make_runner = InsistentRunner if options.cuda_graph == "always" else CudaGraphRunner
    runner = make_runner(
        function,
        fixed_inputs=inputs.fixed,
        mutated_inputs=inputs.mutated,
        max_graphs=options.max_graphs,
        static_outputs=options.static_outputs,
        on_skip=on_skip,
    )
    entry.cuda_graphs = lambda: {"captured": runner.graph_count(), "skipped": dict(runner.skips)}
    return runner


# Reasons of the runner that are the caller's doing, not a failure.
_ORDINARY_SKIPS = frozenset({"gradients are needed", "the caller is capturing a graph itself", RARE})


class WeightsChanged(RuntimeError):
    """A weight has another dtype, shape or device than the graph was compiled for."""


def for_these_weights(function: Runnable, inputs: Inputs) -> Runnable:
    """Refuse weights of another kind. Runs once per capture, not in replays: a weight that moves is captured anew."""

    def run(*values: Any) -> Any:
        for position, kind in inputs.kinds.items():
            if kind_of(values[position]) != kind:
                raise WeightsChanged(f"input {position} was {kind} and is {kind_of(values[position])}")
        return function(*values)

    return run


def kind_of(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, torch.device]:
    return tensor.dtype, tensor.shape, tensor.device


def obstacle_to_capture(inputs: Inputs, options: Options) -> str | None:
    """Why this graph gets no CUDA graph; None when nothing speaks against it."""
    if options.cuda_graph == "never":
        return 'cuda_graph="never"'
    if inputs.device.type != "cuda":
        return f"inputs are on the {inputs.device.type.upper()}"
    if len(inputs.devices) > 1:
        return f"inputs are on several devices ({', '.join(inputs.devices)})"
    if inputs.needs_grad:
        return "gradients are needed"
    return None


class InsistentRunner(CudaGraphRunner):
    """For `cuda_graph="always"`: where another runner would call the function plainly, this one raises."""

    def run_plainly(self, reason: str, inputs: Sequence[Any]) -> Any:
        raise CannotCapture(f'cuda_graph="always", but this call cannot be captured: {reason}')

    def _admits(self, key: tuple[object, ...], device: CaptureDevice) -> bool:
        return True


def run_plain(plain: Runnable, entry: GraphReport, report: Report, reason: str) -> Runnable:
    """Step aside: this graph runs as plain PyTorch from now on."""
    entry.plain_because = reason
    entry.lowering = "plain PyTorch"
    report.note(f"{entry.name} runs as plain PyTorch: {reason}")
    warn_once(f"plain:{reason}", f"kernl runs a graph of {report.subject} as plain PyTorch: {reason}")
    return plain


class CompiledGraph:
    """The callable of one captured graph: the fast function, with plain PyTorch behind it.

    The first run is where kernels are compiled and launched for the first time; if it fails and plain PyTorch does not,
    plain PyTorch takes over for good. If both fail, the error is the user's and comes from plain PyTorch.
    """

    def __init__(
        self, function: Runnable, plain: Runnable, inputs: Inputs, options: Options, entry: GraphReport, report: Report
    ) -> None:
        self.inputs = inputs
        self.entry = entry
        self._function = function
        self._plain = plain
        self._options = options
        self._report = report
        self._has_run = False
        # Nothing to fall back to, or told not to.
        self._is_on_its_own = (
            function is plain or options.strict or options.cuda_graph == "always" or inputs.needs_tracing
        )

    @property
    def runner(self) -> CudaGraphRunner | None:
        return self._function if isinstance(self._function, CudaGraphRunner) else None

    def __call__(self, *inputs: Any) -> Any:
        if self._is_on_its_own:
            return self._function(*inputs)
        # A graph that writes to its inputs must find them as they were if it has to run a second time.
        before = {} if self._has_run else {i: inputs[i].detach().clone() for i in self.inputs.mutated}
        try:
            outputs = self._function(*inputs)
        except CannotCapture:
            raise
        except WeightsChanged as error:  # TorchDynamo's guards let it pass
            self._report.note(f"{self.entry.name}: a call ran as plain PyTorch: {error}")
            return self._plain(*inputs)
        except Exception as error:
            if self._has_run and self.inputs.mutated:
                raise
            return self._step_aside(error, inputs, before)
        self._has_run = True
        return outputs

    def _step_aside(self, error: Exception, inputs: Sequence[Any], before: Mapping[int, torch.Tensor]) -> Any:
        with torch.no_grad():
            for position, content in before.items():
                inputs[position].copy_(content)
        outputs = self._plain(*inputs)
        if isinstance(error, torch.OutOfMemoryError):  # of this call, perhaps not of the next
            self._report.note(f"{self.entry.name}: a call ran as plain PyTorch: {reason_of(error)}")
        else:
            self._function = run_plain(self._plain, self.entry, self._report, reason_of(error))
            self._is_on_its_own = True
        return outputs

    def release(self) -> None:
        """Give back the memory of CUDA graphs; they are captured again when they are needed."""
        if self.runner is not None:
            self.runner.release()
