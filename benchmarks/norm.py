"""LayerNorm and RMSNorm, alone and of a sum, against their peers.

    python benchmarks/norm.py                                   all shapes, fp16
    python benchmarks/norm.py --shapes "16384,768" --dtype bf16
    python benchmarks/norm.py --sweep --shapes "128,768"        every configuration of the kernel instead of peers

A shape is rows,columns. Six operations:

    layer_norm          one tensor in, one out
    add_layer_norm      two in, the norm and the sum out (pre-norm models: the sum is the next residual)
    layer_norm_of_sum   two in, the norm out (post-norm models)
    rms_norm, add_rms_norm, rms_norm_of_sum   the same for RMSNorm; in plain PyTorch, the formula of Llama's module

Peers: eager PyTorch, Inductor (compiled for each shape) and kernl; Liger's norms where they are installed. `us` is GPU
time with a cold L2 cache, `warm_us` that of ten calls in a CUDA graph, operands in L2 where they fit. `gb_s` counts the
bytes the operation must move (each operand once) over `us`; `share` is that over the GPU's copy bandwidth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

import kernl.ops  # noqa: F401 (registers torch.ops.kernl)
from benchmarks.harness import (
    Results,
    add_common_arguments,
    check_result,
    floors,
    parse_shapes,
    run_if_available,
    time_in_graph,
)
from kernl.kernels.norm import NormConfig, choose_config, launch_norm
from kernl.runtime.capability import capability_of

EPSILON = 1e-5
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES = [(16, 768), (128, 768), (1024, 768), (4096, 768), (16384, 768), (4096, 1024), (16384, 1024), (4096, 8192),
          (2048, 16384), (512, 65536)]  # fmt: skip
QUICK_SHAPES = [(128, 768), (4096, 1024)]

# Tensors of the input's size that an operation has to move.
TENSORS_MOVED = {
    "layer_norm": 2,
    "add_layer_norm": 4,
    "layer_norm_of_sum": 3,
    "rms_norm": 2,
    "add_rms_norm": 4,
    "rms_norm_of_sum": 3,
}
PEERS = ("eager", "inductor", "liger", "kernl")

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # input, residual, weight, bias
Operation = Callable[..., tuple[torch.Tensor, ...]]


def draw(rows: int, columns: int, dtype: torch.dtype, device: str) -> Operands:
    generator = torch.Generator(device).manual_seed(rows + columns)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    return normal(rows, columns), normal(rows, columns), normal(columns) + 1, normal(columns)


def is_rms(operation: str) -> bool:
    return "rms_norm" in operation


def of_sum(operation: str) -> bool:
    return operation not in ("layer_norm", "rms_norm")


def plain(operation: str) -> Operation:
    """The operation in plain PyTorch; the first result is the norm."""

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if not is_rms(operation):
            return F.layer_norm(x, (x.shape[-1],), weight, bias, EPSILON)
        wide = x if x.dtype == torch.float64 else x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return weight * wide.to(x.dtype)

    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        total = x + residual if of_sum(operation) else x
        return (norm(total, weight, bias), *([total] if operation.startswith("add_") else []))

    return function


def with_kernl(operation: str) -> Operation:
    op = getattr(torch.ops.kernl, operation)

    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        operands = (x, residual, weight) if of_sum(operation) else (x, weight)
        result = op(*operands, *((EPSILON, 0.0, x.dtype) if is_rms(operation) else (bias, EPSILON)))
        return result if isinstance(result, tuple) else (result,)

    return function


def with_liger(operation: str) -> Operation:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        total = x + residual if of_sum(operation) else x
        if is_rms(operation):
            return LigerRMSNormFunction.apply(total, weight, EPSILON), total
        return LigerLayerNormFunction.apply(total, weight, bias, EPSILON), total

    return function


def make_peer(name: str, operation: str, operands: Operands) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A call without arguments, tried once so that a peer that cannot run here fails now."""
    if name == "inductor":
        torch.compiler.reset()
        function: Operation = torch.compile(plain(operation), dynamic=False)
    else:
        function = {"eager": plain, "liger": with_liger, "kernl": with_kernl}[name](operation)
    function(*operands)
    return lambda: function(*operands)


def configurations(rows: int, columns: int) -> Iterator[NormConfig]:
    """Every sensible configuration of the kernels for a shape."""
    sm_count = capability_of("cuda" if torch.cuda.is_available() else "cpu").sm_count
    chosen = choose_config(rows, columns, sm_count)
    if chosen.block_m == 0:
        for block_n in (1024, 2048, 4096, 8192):
            for num_warps in (4, 8, 16):
                yield NormConfig(0, block_n, num_warps)
        return
    for block_m in (1, 2, 4, 8, 16, 32):
        for num_warps in (1, 2, 4, 8, 16):
            elements = block_m * chosen.block_n / (32 * num_warps)  # a thread
            if 2 <= elements <= 128:
                yield NormConfig(block_m, chosen.block_n, num_warps)


def make_configured(operation: str, operands: Operands, config: NormConfig) -> Callable[[], tuple[torch.Tensor, ...]]:
    x, residual, weight, bias = operands
    output, total = torch.empty_like(x), torch.empty_like(x)
    capability = capability_of(x.device)

    def call() -> tuple[torch.Tensor, ...]:
        launch_norm(
            x,
            weight,
            None if is_rms(operation) else bias,
            output,
            EPSILON,
            residual=residual if of_sum(operation) else None,
            total=total if operation.startswith("add_") else None,
            rms=is_rms(operation),
            sm_count=capability.sm_count,
            use_pdl=capability.has_pdl,
            config=config,
        )
        return (output,)

    return call


def contenders(
    operation: str, operands: Operands, arguments: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], tuple[torch.Tensor, ...]]]]:
    if arguments.sweep:
        rows, columns = operands[0].shape
        chosen = choose_config(rows, columns, capability_of(operands[0].device).sm_count)
        for config in configurations(rows, columns):
            mark = " (chosen)" if config == chosen else ""
            name = f"{config.block_m}x{config.block_n} {config.num_warps} warps{mark}"
            yield name, make_configured(operation, operands, config)
        return
    for name in arguments.peers:
        call = run_if_available(name, lambda name=name: make_peer(name, operation, operands))  # type: ignore[misc]
        if call is not None:
            yield name, call


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.sweep and device == "cpu":
        raise SystemExit("--sweep times kernels and needs a GPU")
    dtype = DTYPES[arguments.dtype]
    results = Results("norm", out=arguments.out)
    for shape in arguments.shapes or (QUICK_SHAPES if arguments.quick else SHAPES):
        rows, columns = shape
        operands = draw(rows, columns, dtype, device)
        for operation in arguments.operations:
            exact = plain(operation)(*operands)
            # The norm of the sum as it is rounded.
            total = operands[0] + operands[1] if of_sum(operation) else operands[0]
            alone = "rms_norm" if is_rms(operation) else "layer_norm"
            reference = plain(alone)(*(x.double() for x in (total, total, *operands[2:])))[0]
            moved = TENSORS_MOVED[operation] * operands[0].numel() * dtype.itemsize
            floor_ms, _ = floors(moved, 0)
            for name, call in contenders(operation, operands, arguments):
                cold = time_in_graph(call, replays=arguments.replays, flush_l2=True)
                warm = time_in_graph(call, replays=arguments.replays)
                results.add(
                    operation=operation,
                    shape=list(shape),
                    dtype=arguments.dtype,
                    peer=name,
                    us=cold.median_ms * 1e3,
                    warm_us=warm.median_ms * 1e3,
                    gb_s=moved / cold.median_ms / 1e6,
                    floor_us=None if floor_ms is None else floor_ms * 1e3,
                    share=None if floor_ms is None else floor_ms / cold.median_ms,
                    **check_result(call()[0], reference, exact[0]),
                )
                results.save()
    results.print_table(
        ["operation", "shape", "dtype", "peer", "us", "warm_us", "gb_s", "floor_us", "share", "error_ratio", "passed"]
    )
    return results.exit_code()


def _names(accepted: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in accepted]
        if unknown or not names:
            raise argparse.ArgumentTypeError(f"unknown name in {text!r}; accepted: {', '.join(accepted)}")
        return names

    return parse


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="LayerNorm and RMSNorm against their peers.")
    parser.add_argument("--shapes", type=parse_shapes, help="rows,columns pairs: '16384,768 4096,8192'")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp16")
    operations = tuple(TENSORS_MOVED)
    parser.add_argument("--operations", type=_names(operations), default=list(operations), help=", ".join(operations))
    parser.add_argument("--peers", type=_names(PEERS), default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument("--replays", type=int, default=50, help="timed replays a figure (default 50)")
    parser.add_argument("--sweep", action="store_true", help="time every configuration of the kernel instead of peers")
    add_common_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.replays < 1:
        parser.error(f"--replays must be at least 1, got {arguments.replays}")
    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
