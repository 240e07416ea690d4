"""Linear attention, forward and backward, against its peers; every plan of the kernels; the crossover with softmax.

    python benchmarks/linear_attention.py                                 the issue's shapes, fp16, all operations
    python benchmarks/linear_attention.py --shapes "4x8x4096x64" --operations causal_dot
    python benchmarks/linear_attention.py --plans                         every plan on offer instead of the peers
    python benchmarks/linear_attention.py --plans --write-table           the winners into the table shipped for the GPU
    python benchmarks/linear_attention.py --crossover                     lengths 256 to 32768 against attention

A shape is batch x heads x length x dim (E = M). Operations:

    causal_dot   sum_{j <= i} <q_i, k_j> v_j: no feature map, no normaliser (what fla's kernels compute)
    causal       with phi = elu + 1 and the normaliser
    full         the same over all keys

Peers: `torch` (chunked PyTorch, products in the operands' type, states in float32, all chunks at once), `inductor`
(that, compiled), `fla-chunk` and `fla-fused` (flash-linear-attention, where it is installed; feature map by PyTorch),
`kernl` (the plan that the rule chooses), `kernl-sequential` and `kernl-chunkwise` (forced).

`us` is GPU time of a forward pass with a cold L2 cache, `both_us` that of a forward and a backward pass, and
`backward_us` their difference. `floor_us` and `backward_floor_us` count every operand and result once at the GPU's copy
bandwidth (backward: q, k, v, the gradient and, normalised, the output in, three gradients out); `share` and
`backward_share` are floor over time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import (
    Results,
    add_common_arguments,
    check_result,
    floors,
    names_from,
    parse_shapes,
    peer_module,
    run_if_available,
    time_in_graph,
    write_tuning_table,
)
from kernl.ops import attention, causal_dot_product, linear_attention
from kernl.ops.linear_attention import implementations
from kernl.ops.linear_attention_formulas import Problem, forward_by_formulas
from kernl.runtime import tuning

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = [(4, 8, 4096, 64), (8, 16, 2048, 64), (1, 16, 32768, 64), (2, 16, 8192, 128)]
QUICK_SHAPES = [(4, 8, 4096, 64)]
OPERATIONS = ("causal_dot", "causal", "full")
PEERS = ("torch", "inductor", "fla-chunk", "fla-fused", "kernl", "kernl-sequential", "kernl-chunkwise")
CROSSOVER_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
CHUNK = 128

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Operands:
    """query, key, value and the gradient of the output, [batch, length, heads, dim]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    grad: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.query, self.key, self.value


def draw(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Operands:
    batch, heads, length, dim = shape
    generator = torch.Generator(device).manual_seed(length + dim)

    def normal() -> torch.Tensor:
        size = (batch, length, heads, dim)
        return (torch.randn(size, generator=generator, device=device) * dim**-0.25).to(dtype)

    return Operands(normal(), normal(), normal(), normal())


def problem_of(operation: str, operands: Operands, schedule: str = "auto") -> Problem:
    query, key, value = (tensor.transpose(1, 2) for tensor in operands.inputs)
    is_dot = operation == "causal_dot"
    name = "identity" if is_dot else "elu"
    return Problem(
        query, key, value, None, None, None, name, operation != "full", not is_dot, 0.0 if is_dot else 1e-6, schedule
    )


def with_kernl(operation: str, schedule: str) -> Function:
    def dot(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        operands = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return causal_dot_product(*operands, schedule=schedule).transpose(1, 2)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return linear_attention(query, key, value, causal=operation == "causal", schedule=schedule)

    return dot if operation == "causal_dot" else attend


def with_torch(operation: str) -> Function:
    """All chunks at once: scores inside each, states before each by a cumulated sum."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
        dtype = query.dtype
        if operation != "causal_dot":
            query, key = F.elu(query) + 1, F.elu(key) + 1
        if operation == "full":
            state = key.mT @ value
            normalizer = (query.float() * key.sum(2, keepdim=True, dtype=torch.float32)).sum(-1, keepdim=True)
            return ((query @ state) / (normalizer + 1e-6)).to(dtype).transpose(1, 2)
        chunk = min(CHUNK, query.shape[2])
        parts = [tensor.unflatten(2, (-1, chunk)) for tensor in (query, key, value)]
        scores = (parts[0] @ parts[1].mT).tril()
        states = (parts[1].mT @ parts[2]).float().cumsum(2)
        states = F.pad(states[:, :, :-1], (0, 0, 0, 0, 1, 0))
        output = (scores @ parts[2]).float() + parts[0].float() @ states
        output = output.flatten(2, 3)
        if operation == "causal":
            normalizer = (query.float() * key.cumsum(2, dtype=torch.float32)).sum(-1, keepdim=True)
            output = output / (normalizer + 1e-6)
        return output.to(dtype).transpose(1, 2)

    return run


def with_fla(operation: str, which: str) -> Function:
    linear_attn = peer_module("fla.ops.linear_attn", "flash-linear-attention")
    kernel = getattr(linear_attn, {"fla-chunk": "chunk_linear_attn", "fla-fused": "fused_chunk_linear_attn"}[which])
    if operation == "full":
        raise ValueError("it has causal forms only")

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if operation == "causal":
            query, key = F.elu(query) + 1, F.elu(key) + 1
        return kernel(query, key, value, scale=1.0, normalize=operation == "causal")[0]

    return run


def make_function(name: str, operation: str) -> Function:
    if name == "torch":
        return with_torch(operation)
    if name == "inductor":
        torch.compiler.reset()
        return torch.compile(with_torch(operation), dynamic=False)
    if name.startswith("fla"):
        return with_fla(operation, name)
    return with_kernl(operation, name.partition("-")[2] or "auto")


def reference(operation: str, operands: Operands) -> torch.Tensor:
    """float64, a batch row and a head at a time."""
    rows = []
    for row in range(operands.query.shape[0]):
        heads = []
        for head in range(operands.query.shape[2]):
            small = Operands(
                *(t[row : row + 1, :, head : head + 1].double() for t in (*operands.inputs, operands.grad))
            )
            heads.append(forward_by_formulas(problem_of(operation, small))[0])
        rows.append(torch.cat(heads, 1))
    return torch.cat(rows).transpose(1, 2)


def baseline(operation: str, operands: Operands) -> torch.Tensor:
    """Sums in float32, the result rounded to the operands' type."""
    return forward_by_formulas(problem_of(operation, operands))[0].to(operands.query.dtype).transpose(1, 2)


def tried(name: str, operation: str, operands: Operands) -> Function | None:
    """The peer, run once; None with a line that says why where it cannot run."""
    made: list[Function] = []

    def make() -> Callable[[], Any]:
        function = make_function(name, operation)
        with torch.no_grad():
            function(*operands.inputs)
        made.append(function)
        return lambda: function(*operands.inputs)

    return made[0] if run_if_available(name, make) is not None else None


def time_both(function: Function, operands: Operands, replays: int) -> float | None:
    """Milliseconds of a forward and a backward pass; None with a line that says why."""
    leaves = [tensor.detach().requires_grad_() for tensor in operands.inputs]

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, operands.grad)

    def make() -> Callable[[], Any]:
        both()
        return both

    call = run_if_available("of a backward pass", make)
    return None if call is None else time_in_graph(call, replays=replays, flush_l2=True).median_ms


def measure(
    operation: str, shape: tuple[int, ...], dtype: torch.dtype, arguments: argparse.Namespace, results: Results
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    operands = draw(shape, dtype, device)
    exact, plain = reference(operation, operands), baseline(operation, operands)
    moved = 4 * operands.query.numel() * dtype.itemsize
    backward_moved = moved // 4 * (7 if operation == "causal_dot" else 8)
    floor_ms, backward_floor_ms = floors(moved, 0)[0], floors(backward_moved, 0)[0]
    for name in arguments.peers:
        function = tried(name, operation, operands)
        if function is None:
            continue
        with torch.no_grad():
            forward_ms = time_in_graph(
                lambda function=function: function(*operands.inputs),  # type: ignore[misc]
                replays=arguments.replays,
                flush_l2=True,
            ).median_ms
            result = function(*operands.inputs)
        check = check_result(result, exact, plain)
        if not name.startswith("kernl"):
            # A peer that is less precise is still worth its figures; `error_ratio` says by how much.
            check["passed"] = True
        both_ms = None if arguments.forward_only else time_both(function, operands, arguments.replays)
        backward_ms = None if both_ms is None else both_ms - forward_ms
        results.add(
            operation=operation,
            shape=list(shape),
            dtype=arguments.dtype,
            peer=name,
            us=forward_ms * 1e3,
            both_us=None if both_ms is None else both_ms * 1e3,
            backward_us=None if backward_ms is None else backward_ms * 1e3,
            floor_us=None if floor_ms is None else floor_ms * 1e3,
            backward_floor_us=None if backward_floor_ms is None else backward_floor_ms * 1e3,
            share=None if floor_ms is None else floor_ms / forward_ms,
            backward_share=None if backward_floor_ms is None or not backward_ms else backward_floor_ms / backward_ms,
            **check,
        )
        results.save()


@torch.no_grad()
def measure_plans(
    operation: str, shape: tuple[int, ...], dtype: torch.dtype, arguments: argparse.Namespace, results: Results
) -> tuple[str, dict[str, Any]]:
    """Every plan on offer; key and entry of the tuning table."""
    operands = draw(shape, dtype, "cuda")
    exact, plain = reference(operation, operands), baseline(operation, operands)
    problem = problem_of(operation, operands)
    runs, key, default = implementations(problem)
    times, dropped = {}, {}
    floor_ms = floors(4 * operands.query.numel() * dtype.itemsize, 0)[0]
    for name, run in runs.items():
        try:
            check = check_result(run()[0].transpose(1, 2), exact, plain)
            milliseconds = time_in_graph(run, replays=arguments.replays, flush_l2=True).median_ms
        except Exception as error:  # the other plans are still worth their figures
            dropped[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
            print(f"{name}: {dropped[name]}")
            continue
        times[name] = round(milliseconds * 1e3, 2)
        results.add(
            operation=operation,
            shape=list(shape),
            dtype=arguments.dtype,
            peer=name + (" (chosen)" if name == default else ""),
            us=milliseconds * 1e3,
            floor_us=None if floor_ms is None else floor_ms * 1e3,
            share=None if floor_ms is None else floor_ms / milliseconds,
            **check,
        )
        results.save()
    best = min(times, key=lambda name: times[name])
    return tuning.problem_text(key), {"choice": best, "times_us": times, "dropped": dropped}


@torch.no_grad()
def measure_crossover(arguments: argparse.Namespace, results: Results) -> None:
    """Causal, 16 heads of 64: linear attention and kernl's softmax attention over the length."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = CROSSOVER_LENGTHS[:3] if arguments.quick else CROSSOVER_LENGTHS
    for length in lengths:
        operands = draw((max(1, 16384 // length), 16, length, 64), DTYPES[arguments.dtype], device)

        def softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attention(*(each.transpose(1, 2) for each in (query, key, value)), is_causal=True).transpose(1, 2)

        functions = {"kernl": with_kernl("causal", "auto"), "softmax": softmax}
        for name, function in functions.items():
            milliseconds = time_in_graph(
                lambda function=function: function(*operands.inputs),  # type: ignore[misc] # noqa: B023
                replays=arguments.replays,
                flush_l2=True,
            ).median_ms
            results.add(
                operation="crossover",
                shape=[operands.query.shape[0], 16, length, 64],
                dtype=arguments.dtype,
                peer=name,
                us=milliseconds * 1e3,
                passed=True,
            )
            results.save()


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, tuple[int, ...]]]:
    for shape in arguments.shapes or (QUICK_SHAPES if arguments.quick else SHAPES):
        if len(shape) != 4:
            raise SystemExit(f"a shape is batch x heads x length x dim, got {shape}")
        for operation in arguments.operations:
            yield operation, shape


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=parse_shapes, help="batch x heads x length x dim: '4x8x4096x64 8x16x2048x64'")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp16")
    parser.add_argument("--operations", type=names_from(OPERATIONS, "operation"), default=list(OPERATIONS))
    parser.add_argument("--peers", type=names_from(PEERS, "peer"), default=list(PEERS))
    parser.add_argument("--replays", type=int, default=30)
    parser.add_argument("--forward-only", action="store_true")
    parser.add_argument("--plans", action="store_true", help="time every plan of the forward pass instead of the peers")
    parser.add_argument("--write-table", action="store_true", help="with --plans: the winners into the shipped table")
    parser.add_argument(
        "--crossover", action="store_true", help="against softmax attention over the length, and no more"
    )
    add_common_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.plans and not torch.cuda.is_available():
        raise SystemExit("--plans times kernels and needs a GPU")
    if arguments.write_table and not arguments.plans:
        raise SystemExit("--write-table goes with --plans")

    results = Results("linear_attention", out=arguments.out)
    if arguments.crossover:
        measure_crossover(arguments, results)
    elif arguments.plans:
        choices = dict(
            measure_plans(operation, shape, DTYPES[arguments.dtype], arguments, results)
            for operation, shape in cases(arguments)
        )
        if arguments.write_table:
            print(f"written: {write_tuning_table('linear_attention', choices)}")
    else:
        for operation, shape in cases(arguments):
            measure(operation, shape, DTYPES[arguments.dtype], arguments, results)
    columns = ["operation", "shape", "dtype", "peer", "us", "share", "backward_us", "backward_share", "error_ratio"]
    results.print_table([*columns, "passed"])
    return results.exit_code()


if __name__ == "__main__":
    raise SystemExit(main())
