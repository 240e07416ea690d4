"""Linear layers with their bias and activation, alone or several that share an input.

    torch.ops.kernl.linear(input, weight, bias, activation)      -> activation(input @ weight.T + bias)
    torch.ops.kernl.merged_linear(input, weights, biases)        -> [input @ weight.T + bias for each]

`input` is [..., K], a weight [N, K], a bias [N] or None; outputs are contiguous [..., N]. In fp16 and bf16 our kernels
apply bias and activation in fp32 and round once, where plain PyTorch rounds before the activation too.
fp32 products honour PyTorch's matmul precision (TF32 only where it is switched on).

Which implementation runs: cuBLAS followed by our activation kernel, cuBLASLt's own epilogue where it has one, or one of
the Triton configurations of kernels/linear.py for that number of rows (`implementations` lists them). On Hopper it is
what the shipped table or the user's cache names for the class of problems, else what `default_implementation` computes
from costs measured there; on other GPUs the few candidates are measured at first use. `benchmarks/linear.py --tune`
makes a table, and KERNL_TUNING=measure measures at first use on Hopper too.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernl.kernels.activation import ACTIVATIONS
from kernl.kernels.linear import (
    MAX_MERGED,
    LinearConfig,
    activation_chunk,
    configs,
    fits_descriptors,
    gap_in_elements,
    launch_activation,
    launch_persistent,
    launch_tiles,
)
from kernl.ops.common import (
    Ahead,
    cast,
    define_op,
    empty,
    is_capturing,
    kernel_runs_on,
    materialized,
    on_device_of,
    use_pdl,
)
from kernl.ops.transforms import by_rows
from kernl.runtime.capability import capability_of
from kernl.runtime.capture_order import graphs_take_turns
from kernl.runtime.tuning import Candidate, choose, known_choice

Implementation = Callable[[], object]


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "none"
) -> torch.Tensor:
    """activation(input @ weight.T + bias).

    input: [..., K], any float dtype, any strides.
    weight: [N, K], dtype of input. bias: [N] or None, dtype of input.
    activation: "none", "gelu" (exact), "gelu_tanh", "relu", "silu", "tanh" or "quick_gelu" (x * sigmoid(1.702 x)).

    Returns [..., N], contiguous, in the dtype of input (in autocast's dtype under autocast, as torch's linear).
    Raises ValueError for shapes, dtypes or activations that do not fit.
    """
    check_operands(input, [weight], [bias])
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}; accepted: {', '.join(ACTIVATIONS)}")
    return torch.ops.kernl.linear(input, weight, bias, activation)


def merged_linear(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None] | None = None
) -> list[torch.Tensor]:
    """Several linear layers that share an input, such as query, key and value: [input @ w.T + b for w, b in ...].

    input: [..., K], any float dtype, any strides.
    weights: [N_i, K] each, dtype of input, read where they are. biases: [N_i] or None each; None: no biases.

    Returns one contiguous [..., N_i] per weight. Raises ValueError for shapes or dtypes that do not fit.
    """
    weights = list(weights)
    biases = [None] * len(weights) if biases is None else list(biases)
    if len(biases) != len(weights):
        raise ValueError(f"biases has {len(biases)} entries; accepted: {len(weights)}, one for each weight")
    check_operands(input, weights, biases)
    return torch.ops.kernl.merged_linear(input, weights, biases)


def check_operands(input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> None:
    if input.dim() == 0:
        raise ValueError("input has no dimension; accepted: [..., K]")
    if not weights:
        raise ValueError("weights is empty; accepted: at least one [N, K]")
    if not input.is_floating_point():
        raise ValueError(f"input is {input.dtype}; accepted: floating point")
    dtypes_differ = not torch.is_autocast_enabled(input.device.type)
    for weight, bias in zip(weights, biases, strict=True):
        if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
            raise ValueError(
                f"weight has shape {list(weight.shape)}; accepted: [N, {input.shape[-1]}], K being input's last size"
            )
        if bias is not None and (bias.dim() != 1 or bias.shape[0] != weight.shape[0]):
            raise ValueError(f"bias has shape {list(bias.shape)}; accepted: [{weight.shape[0]}], or None")
        for name, tensor in (("weight", weight), ("bias", bias)):
            if dtypes_differ and tensor is not None and tensor.dtype != input.dtype:
                raise ValueError(f"{name} is {tensor.dtype} and input {input.dtype}; accepted: one dtype for all")


def reference_linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str
) -> torch.Tensor:
    """`linear` in plain PyTorch, for any float dtype and device."""
    return apply_activation(F.linear(input, weight, bias), activation).contiguous()


def reference_merged_linear(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """`merged_linear` in plain PyTorch, for any float dtype and device."""
    return [reference_linear(input, weight, bias, "none") for weight, bias in zip(weights, biases, strict=True)]


def apply_activation(values: torch.Tensor, activation: str) -> torch.Tensor:
    """One of ACTIVATIONS in plain PyTorch."""
    if activation == "gelu":
        return F.gelu(values)
    if activation == "gelu_tanh":
        return F.gelu(values, approximate="tanh")
    if activation == "relu":
        return F.relu(values)
    if activation == "silu":
        return F.silu(values)
    if activation == "tanh":
        return torch.tanh(values)
    if activation == "quick_gelu":
        return values * torch.sigmoid(1.702 * values)
    if activation == "none":
        return values
    raise ValueError(f"activation is {activation!r}; accepted: {', '.join(ACTIVATIONS)}")


def allocate(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return empty((*input.shape[:-1], weight.shape[0]), dtype=input.dtype, device=input.device)


class _Counters:
    """Zeroed int32 cells for split-K, which every launch leaves zeroed.

    Two launches that may run at the same time must not share cells. Eager launches of one stream run one after the
    other, so a stream has cells of its own, and so have all graphs that are replayed in turn. A launch captured by
    somebody else keeps fresh cells for itself, since its graph may be replayed on any stream but never overlaps with
    itself. The pool (1 MiB) is made outside captures and holds cells for thousands of such launches; when it is used up
    there are no cells, which is said once, and the caller takes a way that needs none.
    """

    POOL = 1 << 18
    PER_STREAM = 1 << 12

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[torch.device, torch.Tensor] = {}
        self._used: dict[torch.device, int] = {}
        self._of_stream: dict[tuple[torch.device, int | None], torch.Tensor] = {}
        self._said = False

    def take(self, device: torch.device, count: int) -> torch.Tensor | None:
        """`count` cells for one launch on the current stream of `device`, or None."""
        if device.type == "cpu":
            return torch.zeros(count, dtype=torch.int32)
        capturing = is_capturing()
        in_turn = capturing and graphs_take_turns()
        with self._lock:
            if capturing and (not in_turn or count > self.PER_STREAM):
                return self._slice(device, count, may_allocate=False)
            if count > self.PER_STREAM:
                return None
            owner = None if in_turn else torch.cuda.current_stream(device).cuda_stream
            cells = self._of_stream.get((device, owner))
            if cells is None:
                cells = self._slice(device, self.PER_STREAM, may_allocate=not capturing)
                if cells is not None:
                    self._of_stream[(device, owner)] = cells
            return cells

    def _slice(self, device: torch.device, count: int, *, may_allocate: bool) -> torch.Tensor | None:
        pool = self._pools.get(device)
        if pool is None:
            if not may_allocate:
                return None
            pool = torch.zeros(self.POOL, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # other streams will use the zeros
            self._pools[device] = pool
        first = self._used.get(device, 0)
        if first + count > self.POOL:
            if not self._said:
                self._said = True
                warnings.warn(
                    "kernl: the counters of split-K linears are used up by the CUDA graphs of this process; further "
                    "ones run without splitting K, which is slower for few rows",
                    stacklevel=2,
                )
            return None
        self._used[device] = first + -(-count // 32) * 32
        return pool[first : first + count]


_counters = _Counters()


@dataclasses.dataclass(frozen=True)
class _Problem:
    """Operands of one launch: input [M, K] with unit last stride, outputs [M, N_i].

    gated: two weights of one size and one output, that of a gated layer.
    assumed_rows: choose as if there were that many rows.
    """

    input: torch.Tensor
    weights: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]
    outputs: Sequence[torch.Tensor]
    activation: str
    gated: bool = False
    assumed_rows: int | None = None

    @property
    def rows(self) -> int:
        return self.input.shape[0] if self.assumed_rows is None else self.assumed_rows

    @property
    def columns(self) -> tuple[int, ...]:
        return tuple(weight.shape[0] for weight in self.weights)

    @property
    def arch(self) -> int:
        """The interpreter runs what Hopper would."""
        return capability_of(self.input.device).arch if self.input.is_cuda else 90

    def ungated(self) -> tuple[_Problem, torch.Tensor]:
        """The two products of a gated layer as a problem of their own, and the second one's output.

        The first one's output is that of the layer, for the activation and the other product to be applied in place.
        """
        up = torch.empty_like(self.outputs[0])
        return dataclasses.replace(self, outputs=[self.outputs[0], up], activation="none", gated=False), up


def _run_in_two_steps(problem: _Problem, run: Callable[[_Problem], None]) -> None:
    """A gated layer: both products by `run`, then the activation of one times the other, in place."""
    products, up = problem.ungated()
    run(products)
    launch_activation(problem.outputs[0], problem.activation, multiplier=up, use_pdl=use_pdl(up))


def _run_config(problem: _Problem, config: LinearConfig) -> None:
    if config.persistent and problem.gated:
        _run_in_two_steps(problem, lambda products: _run_config(products, config))
        return
    pdl = use_pdl(problem.input)
    operands = (problem.input, problem.weights, problem.biases, problem.outputs, problem.activation)
    if config.persistent:
        sm_count = capability_of(problem.input.device).sm_count or 4
        launch_persistent(config, *operands, sm_count=sm_count, use_pdl=pdl)
        return
    counters = None
    if config.split_k > 1:
        counters = _counters.take(problem.input.device, config.tiles(problem.input.shape[0], problem.columns))
        if counters is None:
            config = dataclasses.replace(config, split_k=1)
    launch_tiles(config, *operands, gated=problem.gated, allow_tf32=_tf32_allowed(), counters=counters, use_pdl=pdl)


def _run_cublas(problem: _Problem) -> None:
    if problem.gated:
        _run_in_two_steps(problem, _run_cublas)
        return
    for weight, bias, output in zip(problem.weights, problem.biases, problem.outputs, strict=True):
        if bias is None:
            torch.mm(problem.input, weight.t(), out=output)
        else:
            torch.addmm(bias, problem.input, weight.t(), out=output)
        if problem.activation != "none":
            launch_activation(output, problem.activation, use_pdl=use_pdl(output))


def _run_cublaslt(problem: _Problem) -> None:
    (bias,), (weight,), (output,) = problem.biases, problem.weights, problem.outputs
    assert bias is not None
    use_gelu = problem.activation == "gelu_tanh"
    torch._addmm_activation(bias, problem.input, weight.t(), use_gelu=use_gelu, out=output)


def _tf32_allowed() -> bool:
    # Both of PyTorch's switches show in this property; reading the older one can raise.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def _offered_configs(problem: _Problem) -> tuple[LinearConfig, ...]:
    input, inner = problem.input, problem.input.shape[1]
    if input.is_cuda and inner % 2 == 1 and input.element_size() == 2 and problem.arch >= 90:
        return ()  # Triton compilers up to 3.7 get an odd K wrong on Hopper
    if len(problem.weights) > MAX_MERGED or len({weight.stride(1) for weight in problem.weights}) > 1:
        return ()
    if problem.gated and not _may_alternate(problem):
        return ()
    transposed = problem.weights[0].stride(1) != 1
    if transposed and problem.rows > 64:
        return ()  # tiles of a [K, N] weight are read with strides; with few rows that hardly matters
    tma = not transposed and fits_descriptors(input, problem.weights)
    return configs(problem.arch, problem.rows, input.dtype, tma=tma)


def _may_alternate(problem: _Problem) -> bool:
    """Whether one kernel can take its columns from the two weights of a gated layer in turn."""
    (gate, up), (gate_bias, up_bias) = problem.weights, problem.biases
    return gate.stride() == up.stride() and (gate_bias is None) == (up_bias is None)


def implementations(problem: _Problem) -> dict[str, Implementation]:
    """Every way to run this problem, by name: "cublas", perhaps "cublaslt", and the Triton configurations."""
    ways: dict[str, Implementation] = {"cublas": lambda: _run_cublas(problem)}
    single_with_bias = len(problem.weights) == 1 and problem.biases[0] is not None
    if single_with_bias and problem.activation in ("relu", "gelu_tanh") and problem.input.is_cuda:
        ways["cublaslt"] = lambda: _run_cublaslt(problem)
    for config in _offered_configs(problem):
        ways[config.name] = lambda config=config: _run_config(problem, config)  # type: ignore[misc]
    return ways


def default_implementation(problem: _Problem) -> str:
    """The implementation expected to be fastest, without measuring."""
    offered = _offered_configs(problem)
    if not offered:
        return "cublas"
    sm_count = capability_of(problem.input.device).sm_count or 132
    if problem.arch >= 90 and all(config.name in _HOPPER_COSTS for config in offered):
        # A tile of which most is padding was never measured to be the best.
        fitting = [config for config in offered if config.block_m <= max(16, 2 * problem.rows - 1)]
        times = {config.name: _expected_us(config, problem, sm_count) for config in fitting}
        times["cublas"] = _expected_us_of_cublas(problem, sm_count)
        return min(times, key=lambda name: times[name])
    if problem.rows > 512 and problem.activation == "none" and len(problem.columns) == 1 and problem.input.is_cuda:
        # Nothing to fuse. Ours win only where cuBLAS's tiles fit the chip badly, which is for measurements to find.
        return "cublas"
    return min(offered, key=lambda config: _expected_clocks(config, problem, sm_count)).name


class _Cost(NamedTuple):
    """Microseconds on an H200, fitted to the measurements that tests/ops/test_linear.py holds them against.

    launch: once. wave: each time all SMs have got a program, and inner: per 1000 elements of K in it.
    transfer: per megabyte that all programs together read. output: per million output elements, of which each counts
    twice where there is an activation.
    """

    launch: float
    wave: float
    inner: float
    transfer: float
    output: float


_HOPPER_COSTS = {
    "tiles_16x16x256_w4_s4_groups4": _Cost(0.74, 0.81, 0.52, 0.292, 0.0),
    "tiles_16x32x256_w4_s4_groups4": _Cost(2.80, 0.0, 1.10, 0.135, 0.0),
    "tiles_64x32x128_w4_s4": _Cost(0.83, 0.94, 1.82, 0.048, 0.49),
    "tiles_64x32x128_w4_s4_split4": _Cost(3.90, 0.0, 0.0, 0.151, 5.01),
    "tiles_64x64x128_w4_s4": _Cost(0.30, 1.47, 1.90, 0.037, 0.46),
    "tiles_64x64x128_w4_s4_split2": _Cost(0.98, 2.70, 1.17, 0.067, 0.61),
    "persistent_64x64x128_w4_s5": _Cost(2.06, 0.77, 1.65, 0.011, 0.10),
    "persistent_64x128x64_w4_s4_2per_sm": _Cost(1.53, 1.39, 3.95, 0.021, 0.41),
    "persistent_128x128x64_w4_s3_2per_sm": _Cost(2.79, 0.06, 6.92, 0.034, 0.35),
    "persistent_128x128x64_w8_s5_store128": _Cost(2.41, 0.99, 4.81, 0.003, 0.25),
    "persistent_128x256x64_w8_s3_store256": _Cost(2.87, 1.0, 8.70, 0.015, 0.26),
}
_H200_SM_COUNT = 132


def _expected_us(config: LinearConfig, problem: _Problem, sm_count: int) -> float:
    if problem.gated and config.persistent:
        return _expected_us(config, _products_of(problem), sm_count) + _expected_us_of_gate(problem, sm_count)
    cost = _HOPPER_COSTS[config.name]
    inner, element = problem.input.shape[1], problem.input.element_size()
    tiles = config.tiles(problem.rows, problem.columns)
    if config.persistent:
        # Two programs on an SM take twice as long as one, and one alone does not go below its own latency.
        waves = max(1.0, -(-tiles // sm_count) / config.programs_per_sm)
    else:
        # Two tiles of 32 columns fit the shared memory of an SM. More of the smaller ones do, which gained nothing.
        per_sm = 2 if config.block_n == 32 else 1
        waves = -(-tiles * config.split_k // (sm_count * per_sm))
    megabytes = 1e-6 * tiles * (config.block_m + config.block_n) * inner * element
    millions = 1e-6 * tiles * config.block_m * config.block_n * (1 if problem.activation == "none" else 2)
    return (
        cost.launch
        + waves * (cost.wave + cost.inner * 1e-3 * inner / config.split_k)
        + (cost.transfer * megabytes + cost.output * millions) * _H200_SM_COUNT / sm_count
    )


def _products_of(problem: _Problem) -> _Problem:
    return dataclasses.replace(problem, activation="none", gated=False)


def _expected_us_of_gate(problem: _Problem, sm_count: int) -> float:
    """The activation of one product times the other, as a kernel of its own: half as many bytes again as one tensor's
    activation takes (see `_expected_us_of_cublas`)."""
    return 0.39 + 1.20e-6 * problem.rows * problem.columns[0] * _H200_SM_COUNT / sm_count


def _expected_us_of_cublas(problem: _Problem, sm_count: int) -> float:
    """One product after the other, then the activation as a kernel of its own. Fitted as `_HOPPER_COSTS`."""
    if problem.gated:
        return _expected_us_of_cublas(_products_of(problem), sm_count) + _expected_us_of_gate(problem, sm_count)
    inner, columns, rows = problem.input.shape[1], problem.columns, problem.rows
    chip = _H200_SM_COUNT / sm_count
    total = sum(columns)
    products = len(columns) * (3.48 + 0.71e-3 * inner)
    products += (2.23e-9 * rows * inner * total + 0.45e-6 * inner * total + 0.37e-6 * rows * total) * chip
    if rows * (inner + total) > 20e6:
        products *= 1.1  # the L2 cache does not hold input and outputs
    if problem.activation == "none":
        return products
    return products + 0.39 + 0.80e-6 * rows * total * chip


def _expected_clocks(config: LinearConfig, problem: _Problem, sm_count: int) -> float:
    """Rough GPU clocks of a tile kernel: the work of the busiest SM, by products or by bytes, and what a tile costs.

    The rates are an H200's (per clock and SM: 1640 multiply-adds, 50 bytes from L2). What decides is the ratio of the
    parts, which differs little between the GPUs that have these kernels.
    """
    inner = problem.input.shape[1] / config.split_k
    tiles = config.tiles(problem.rows, problem.columns) * config.split_k
    products = config.block_m * config.block_n * inner / 1640
    transfer = (config.block_m + config.block_n) * inner * problem.input.element_size() / 50
    epilogue = config.block_m * config.block_n * (6 if problem.activation == "none" else 14) / 128
    # Dependent matrix instructions of one program, and handing partial sums over.
    once = 25 * inner / (16 * config.k_groups) + (1600 if config.split_k > 1 else 0)
    return -(-tiles // sm_count) * (max(products, transfer) + epilogue + 600) + once


def _row_class(rows: int) -> int:
    """Problems whose rows round up to the same power of two share a choice; one row and 2 to 16 are classes too."""
    return 1 if rows == 1 else max(16, 1 << (rows - 1).bit_length())


def launch(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    activation: str,
    *,
    gated: bool = False,
) -> None:
    """Run the implementation chosen for these operands: [..., K] with any strides, contiguous outputs [..., N_i]."""
    inner = input.shape[-1]
    rows = input.reshape(-1, inner)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    flat = [output.view(-1, output.shape[-1]) for output in outputs]
    problem = _Problem(rows, weights, biases, flat, activation, gated)
    with on_device_of(input):
        default = default_implementation(problem)
        name = default
        if input.is_cuda:
            name = choose(
                "linear",
                problem_key(problem),
                lambda: _candidates(problem),
                default=default,
                cold=problem.rows <= 256,
                trusted=problem.arch == 90,
            )
        implementations(problem)[name]()


def problem_key(problem: _Problem) -> tuple[Any, ...]:
    """What choices are keyed on: row class, columns, K, bits of the dtype, activation, biases, the operands' layout.

    fp16 and bf16 run equally fast and share choices.
    """
    layout = "tn" if problem.weights[0].stride(1) == 1 else "tt"
    if problem.arch >= 90 and problem.input.element_size() == 2 and problem.rows > 64:
        layout += "" if fits_descriptors(problem.input, problem.weights) else "-unaligned"
    if problem.input.dtype == torch.float32 and _tf32_allowed():
        layout += "-tf32"
    has_bias = any(bias is not None for bias in problem.biases)
    bits = 8 * problem.input.element_size()
    activation = f"gated_{problem.activation}" if problem.gated else problem.activation
    return _row_class(problem.rows), problem.columns, problem.input.shape[1], bits, activation, has_bias, layout


def _candidates(problem: _Problem) -> list[Candidate]:
    """Candidates on outputs of their own: measuring must not write to the caller's."""
    scratch = dataclasses.replace(problem, outputs=[torch.empty_like(output) for output in problem.outputs])
    return [Candidate(name, run) for name, run in implementations(scratch).items()]


def kernels_take(input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]) -> bool:
    operands = [input, *weights, *(bias for bias in biases if bias is not None)]
    # Empty operands and mixed dtypes: plain PyTorch knows the answer, or the error to raise.
    return all(
        operand.numel() > 0 and operand.dtype == input.dtype and kernel_runs_on(operand, "linear")
        for operand in operands
    ) and all(bias is None or bias.stride(0) == 1 for bias in biases)


# Numbers of rows that together meet every choice: two or three in each row class.
_ROWS_AHEAD = (1, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
_TINY_ROWS = 16


def kernels_ahead(
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    activation: str,
    *,
    gated: bool = False,
) -> Iterator[Ahead]:
    """The kernels of every implementation chosen for some number of rows. cuBLAS has its own ready."""
    if not kernels_take(input, weights, biases):
        return
    inner = input.shape[-1]
    weights, biases = [materialized(weight) for weight in weights], [materialized(bias) for bias in biases]

    def allocate(rows: int) -> _Problem:
        columns = [weight.shape[0] for weight in weights][: 1 if gated else None]
        outputs = [torch.empty(rows, n, dtype=input.dtype, device=input.device) for n in columns]
        operand = torch.zeros(rows, inner, dtype=input.dtype, device=input.device)
        return _Problem(operand, weights, biases, outputs, activation, gated)

    one_row = allocate(1)
    seen: set[str] = set()
    for rows in sorted({*_ROWS_AHEAD, input.numel() // inner}):
        problem = dataclasses.replace(one_row, assumed_rows=rows)
        name = default_implementation(problem)
        if input.is_cuda:
            name = known_choice("linear", problem_key(problem), list(implementations(problem))) or name
        key = None if name in seen else _compilation_key(problem, name)
        seen.add(name)
        if key is not None:
            yield key, functools.partial(_run_ahead, allocate, rows, name)


def _run_ahead(allocate: Callable[[int], _Problem], rows: int, name: str) -> None:
    problem = dataclasses.replace(allocate(_TINY_ROWS), assumed_rows=rows)
    with on_device_of(problem.input):
        if name == "cublas":
            values = problem.outputs[0].zero_()
            multiplier = values.clone() if problem.gated else None
            launch_activation(values, problem.activation, multiplier=multiplier, use_pdl=use_pdl(problem.input))
        else:
            implementations(problem)[name]()


def _compilation_key(problem: _Problem, name: str) -> Hashable | None:
    """What the kernels that an implementation compiles depend on; None when it compiles nothing."""
    dtype, activation = problem.input.dtype, (problem.activation, problem.gated)
    if name == "cublas":
        compiles = problem.gated or problem.activation != "none"
        return ("activation", dtype, activation, activation_chunk(problem.columns[0])) if compiles else None
    if name == "cublaslt":
        return None
    has_bias = tuple(bias is not None for bias in problem.biases)
    strides = [number for weight in problem.weights for number in weight.stride()]
    # Triton compiles anew for sizes that are 1 or no multiple of 16. K decides more than that, so it is kept whole.
    sizes = tuple((size == 1, size % 16 == 0) for size in (*problem.columns, *strides))
    aligned = tuple(weight.data_ptr() % 16 == 0 for weight in problem.weights)
    if problem.gated:
        aligned += (gap_in_elements(problem.weights) % 16 == 0,)
    inner = problem.input.shape[1] % 16 == 0 if name.startswith("persistent") else problem.input.shape[1]
    return name, dtype, activation, has_bias, inner, sizes, aligned, _tf32_allowed() and dtype == torch.float32


# Implementations, for the CPU and CUDA alike.


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str) -> torch.Tensor:
    if not kernels_take(input, [weight], [bias]):
        return reference_linear(input, weight, bias, activation)
    output = allocate(input, weight)
    launch(input, [weight], [bias], [output], activation)
    return output


def _merged_linear(
    input: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    if not kernels_take(input, weights, biases):
        return reference_merged_linear(input, weights, biases)
    outputs = [allocate(input, weight) for weight in weights]
    launch(input, weights, biases, outputs, "none")
    return outputs


# Gradients, in plain PyTorch. The value before the activation is computed again rather than kept.


def activation_backward(grad: torch.Tensor, values: torch.Tensor, activation: str) -> torch.Tensor:
    """Gradient by `values` of activation(values)."""
    if activation == "none":
        return grad
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(grad, values)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(grad, values, approximate="tanh")
    if activation == "relu":
        return torch.ops.aten.threshold_backward(grad, values, 0)
    if activation == "silu":
        gate = torch.sigmoid(values)  # not aten's silu_backward, which has no derivative itself
        return grad * gate * (1 + values * (1 - gate))
    if activation == "tanh":
        return torch.ops.aten.tanh_backward(grad, torch.tanh(values))
    gate = torch.sigmoid(1.702 * values)
    return grad * (gate + 1.702 * values * gate * (1 - gate))


def linear_backward(
    grad: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    rows = grad.reshape(-1, grad.shape[-1])
    grad_input = grad @ weight if input_wanted else None
    grad_weight = rows.t() @ input.reshape(-1, input.shape[-1]) if weight_wanted else None
    grad_bias = rows.sum(0) if bias_wanted else None
    return grad_input, grad_weight, grad_bias


def _linear_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    input, weight, bias, ctx.activation = inputs
    ctx.save_for_backward(input, weight, bias)


def _linear_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    input, weight, bias = ctx.saved_tensors
    if ctx.activation != "none":
        grad = activation_backward(grad, F.linear(input, weight, bias), ctx.activation)
    input_wanted, weight_wanted, bias_wanted, _ = ctx.needs_input_grad
    return *linear_backward(grad, input, weight, input_wanted, weight_wanted, bias_wanted), None


def _merged_linear_context(ctx: Any, inputs: tuple[Any, ...], outputs: list[torch.Tensor]) -> None:
    input, weights, _ = inputs
    ctx.save_for_backward(input, *weights)
    ctx.set_materialize_grads(False)


def _merged_linear_backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
    input, *weights = ctx.saved_tensors
    input_wanted, weights_wanted, biases_wanted = ctx.needs_input_grad
    grad_input: torch.Tensor | None = None
    grad_weights: list[torch.Tensor | None] = [None] * len(weights)
    grad_biases: list[torch.Tensor | None] = [None] * len(weights)
    for index, (grad, weight) in enumerate(zip(grads, weights, strict=True)):
        if grad is None:
            continue
        by_input, grad_weights[index], grad_biases[index] = linear_backward(
            grad, input, weight, input_wanted, weights_wanted[index], biases_wanted[index]
        )
        if by_input is not None:
            grad_input = by_input if grad_input is None else grad_input + by_input
    return grad_input, grad_weights, grad_biases


# Autocast: everything to its dtype, as torch's linear. The activation then runs in that dtype too.


def _linear_autocast(
    dtype: torch.dtype,
    device_type: str,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
) -> torch.Tensor:
    return torch.ops.kernl.linear(cast(input, dtype), cast(weight, dtype), cast(bias, dtype), activation)


def _merged_linear_autocast(
    dtype: torch.dtype,
    device_type: str,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
) -> list[torch.Tensor]:
    return torch.ops.kernl.merged_linear(
        cast(input, dtype), [cast(weight, dtype) for weight in weights], [cast(bias, dtype) for bias in biases]
    )


define_op(
    "linear(Tensor input, Tensor weight, Tensor? bias, str activation) -> Tensor",
    cpu=_linear,
    fake=lambda input, weight, bias, activation: allocate(input, weight),
    autograd=(_linear_context, _linear_backward),
    vmap=by_rows(),
    autocast=_linear_autocast,
    ahead=lambda input, weight, bias, activation: kernels_ahead(input, [weight], [bias], activation),
)
define_op(
    "merged_linear(Tensor input, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
    cpu=_merged_linear,
    fake=lambda input, weights, biases: [allocate(input, weight) for weight in weights],
    autograd=(_merged_linear_context, _merged_linear_backward),
    vmap=by_rows(),
    autocast=_merged_linear_autocast,
    ahead=lambda input, weights, biases: kernels_ahead(input, weights, biases, "none"),
)
