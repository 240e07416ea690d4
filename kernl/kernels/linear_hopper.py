r"""Linear layers on Hopper, many rows: output_i = activation(input @ weight_i^T + bias_i) by specialised warps.

    input [M, K], weight_i [N_i, K], bias_i [N_i], output_i [M, N_i], fp16 or bf16; fp32 accumulation, bias, activation.

In the persistent kernel of kernels/linear.py the tensor cores wait while bias, activation and store are computed. Here
groups of warps have roles: while one finishes a tile, the products of another fill the tensor cores. In Gluon, since
Triton leaves neither roles nor barriers to its user. It follows NVIDIA's PTX manual (mbarrier, wgmma, bulk tensor
copies, setmaxnreg) and the public descriptions of CUTLASS's Hopper kernels. Not measured yet, so that the op offers it
on request alone (`OFFER_HOPPER` in ops/linear.py).

Roles of one program, one program an SM, each walking over the same tiles (program, + programs, + 2 programs, ...)
    producer     1 warp, 40 registers a thread: for every block of K of every tile, copies of x [BLOCK_M, BLOCK_K] and
                 w [BLOCK_N, BLOCK_K] into the next slot of a ring of STAGES slots, through tensor descriptors.
    consumer 0   4 warps each, 232 registers a thread: wgmma on the slots in order, accumulator [TILE_M, BLOCK_N] in
    consumer 1   registers; then bias, activation, rounding and store, STORE_N columns at a time through BUFFERS staging
                 buffers of its own, copied out by bulk tensor copies, which clip rows and columns past the end.

HALVES says who does what.
    false, "turns"   The consumers take whole tiles alternately, so a slot has one reader. A consumer may begin when the
                     other has issued all products of its tile; its epilogue then runs under those of the other.
    true, "halves"   Each consumer takes half the rows of every tile, so a slot has two readers, which share w. Consumer
                     1 begins a tile when consumer 0 has left LEAD blocks of it behind, so that they finish it at
                     different times. Each epilogue is covered by the blocks in the ring that the other has yet to do.

A block of K costs, at 4096 flops and 128 bytes of shared memory an SM and clock:
                             clocks of products   shared memory: read + written   flops a byte from L2
    turns  128x128x64        512                  96 + 64 B/clock                 64
    halves 128x256x64        1024                 80 + 48 B/clock                 85
    halves 256x128x64        1024                 96 + 48 B/clock                 85
A wgmma m64nNk16 reads 64 x 16 of x and N x 16 of w from shared memory, and what arrives is written there once. So
shared memory holds turns to 80 % of the tensor cores' rate, and it needs 10.8 TB/s from L2 at 690 TFLOP/s, about what
cuBLAS reaches within the power limit; halves needs 8.1. Triton's kernels of these tiles drew 9.0 and 7.8 at K = 4096.
An epilogue with bias and GELU is 12 instructions an element, 128 elements a thread: 1500 issue slots, some 2000 clocks.
The ring of halves covers STAGES x 512 = 2048 of them; turns covers all. A tile takes 12288 and 6144 clocks at K = 768.
Predicted, us: [16384, 768] x 3072 + GELU  113-120 halves, 125-135 turns (Triton 143.8; flops at 690 TFLOP/s: 112);
[16384, 768] x 3 x 768  85-90 (93);  [16384, 3072] x 768  110-114 (116; cuBLAS 109);  [16384, 768] x 768  29-31 (32.3).

Barriers. p numbers the blocks of all tiles of the program: slot p % STAGES, round p // STAGES. Every mbarrier has count
1: one thread arrives, for all of its role after a barrier among them, which Triton inserts (tests/aot checks it).
`wait(b, parity)` goes on when c, the phases of b that are over, has c % 2 != parity. So waiting for phase n is right
exactly if c is n or n + 1; the last column says why it is not below / not above.

    barrier       arrives, how often             waits, for phase             c >= n / c <= n + 1
    full[s]       the copies into s (bytes),     reader of p: round of p      all earlier blocks were waited for, by the
                  once a round                                                reader or (turns) before it got its turn /
                                                                              the next copy waits for this reader
    freed[s]      reader of s, once a round,     producer of p: round of p    the producer waited for every round before
                  when products on s are over    less 1, in round 0 none      this one / nobody frees what is not loaded
                  (halves: two, one a reader)
    turns[c]      consumer 1 - c, once a tile,   consumer c, once a tile;     strictly in turn: who hands one over then
                  products issued (turns only)   consumer 0 at first none     waits for it to come back
    freed[s] of   (as above)                     halves: consumer 1, once a   below: it begins too early, which is slow
    consumer 0                                   tile, for a block of it      but not wrong / p + STAGES is not loaded
                                                                              before consumer 1 has left p

No deadlock. A consumer leaves block p when it has issued p + 1 or its tile ends, so it holds one block while it waits
for the next: STAGES >= 2. In halves consumer 1 waits, holding nothing, for consumer 0 to leave block LEAD - 1 of the
tile, for which that one needs block LEAD: LEAD < STAGES. Products, epilogue and stores wait for nothing but their own.
So the next block of the slower consumer is loaded, being loaded, or due in a slot that nobody holds. In turns, a tile
of consumer 1 comes after one of consumer 0 and before the next, so every turn waited for is handed over.
tests/ops/test_linear_hopper.py runs this source on the CPU, roles interleaved at random, copies as late as they may be,
and finds deadlocks, wrong phases, overwritten slots and buffers, and wrong results.

No race. x and w: written and read by the asynchronous proxy alone, ordered by full and freed. Staging: the thread that
copies a buffer out waits until its copies but the last BUFFERS - 1 have read theirs, then a barrier lets all threads
write the buffer; each fences its writes for the asynchronous proxy before the barrier after which that thread copies.
Dependent launches: each role waits for the previous kernel itself before its first read or write of global memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernl.kernels.activation import activate
from kernl.kernels.common import TRITON_TYPES, AotCase, count_launch, let_next_kernel_start, wait_for_previous_kernel
from kernl.kernels.linear import (
    MAX_MERGED,
    bias_mask_of,
    count_column_tiles,
    halve_columns,
    padded,
    pick,
    pick_number,
    place_of_tile,
)

# Triton 3.7 and newer have other names for the same two copies.
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def produce(
    input_desc,
    weights,  # descriptors
    rings,  # x [STAGES, BLOCK_M, BLOCK_K] and w [STAGES, BLOCK_N, BLOCK_K]
    barriers,  # full [STAGES]; freed [STAGES], in HALVES [2 * STAGES]: 2 * slot + consumer; turns [2]
    sizes,  # M, N0, N1, N2, N3, K
    COUNT: gl.constexpr,
    HALVES: gl.constexpr,
    GROUP_M: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """The producer: copy every block of every tile of this program into the ring."""
    wait_for_previous_kernel(USE_PDL)
    x_ring, w_ring = rings
    full, freed, _ = barriers
    M, N0, N1, N2, N3, K = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BLOCK_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * 2  # also of what lies past the end
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = count_column_tiles(N0, N1, N2, N3, BLOCK_N, COUNT)
    blocks_k = gl.cdiv(K, BLOCK_K)
    position = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        which, tile_m, tile_n = place_of_tile(tile, tiles_m, tiles_n, N0, N1, N2, BLOCK_N, COUNT, GROUP_M)
        weight_desc = pick(which, weights[0], weights[1], weights[2], weights[3], COUNT)
        for block in range(blocks_k):
            slot = position % STAGES
            last_round = (position // STAGES + 1) % 2
            if HALVES:
                mbarrier.wait(freed.index(2 * slot), last_round)
                mbarrier.wait(freed.index(2 * slot + 1), last_round)
            else:
                mbarrier.wait(freed.index(slot), last_round)
            mbarrier.expect(full.index(slot), BLOCK_BYTES)
            copy_in(input_desc, [tile_m * BLOCK_M, block * BLOCK_K], full.index(slot), x_ring.index(slot))
            copy_in(weight_desc, [tile_n * BLOCK_N, block * BLOCK_K], full.index(slot), w_ring.index(slot))
            position += 1


@gluon.jit
def finish_columns(
    accumulator,  # [TILE_M, a power of two x STORE_N]
    output_desc,
    staging,  # [BUFFERS, TILE_M, STORE_N]
    row,
    column,
    ACTIVATION: gl.constexpr,
    PIECE: gl.constexpr,  # which of the pieces of its width this is
):
    """Activation and store, STORE_N columns at a time, from the left."""
    WIDTH: gl.constexpr = accumulator.shape[1]
    BUFFERS: gl.constexpr = staging.shape[0]
    STORE_N: gl.constexpr = staging.shape[2]
    if WIDTH > STORE_N:
        left, right = halve_columns(accumulator)
        finish_columns(left, output_desc, staging, row, column, ACTIVATION, 2 * PIECE)
        finish_columns(right, output_desc, staging, row, column + WIDTH // 2, ACTIVATION, 2 * PIECE + 1)
    else:
        # The registers of a piece are those of a narrower product: no data moves.
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STORE_N, 16])
        result = activate(accumulator, ACTIVATION, False).to(output_desc.dtype)
        result = gl.convert_layout(result, layout, assert_trivial=True)
        buffer = staging.index(PIECE % BUFFERS)
        tma.store_wait(BUFFERS - 1)
        buffer.store(result)
        fence_async_shared()
        copy_out(output_desc, [row, column], buffer)


@gluon.jit
def consume(
    CONSUMER: gl.constexpr,  # 0 or 1
    outputs,  # descriptors
    biases,  # pointers
    rings,
    staging,  # [BUFFERS, TILE_M, STORE_N]
    barriers,
    sizes,
    COUNT: gl.constexpr,
    BIAS_MASK: gl.constexpr,
    ACTIVATION: gl.constexpr,
    HALVES: gl.constexpr,
    LEAD: gl.constexpr,
    GROUP_M: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    """A consumer: its half of every tile, or every other tile."""
    wait_for_previous_kernel(USE_PDL)
    x_ring, w_ring = rings
    full, freed, turns = barriers
    M, N0, N1, N2, N3, K = sizes
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    TILE_M: gl.constexpr = staging.shape[1]
    FIRST_ROW: gl.constexpr = CONSUMER * TILE_M if HALVES else 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = count_column_tiles(N0, N1, N2, N3, BLOCK_N, COUNT)
    blocks_k = gl.cdiv(K, BLOCK_K)
    first_tile = gl.program_id(0)
    step = gl.num_programs(0)
    position = 0
    if not HALVES:
        first_tile += CONSUMER * step
        step *= 2
        position += CONSUMER * blocks_k
    last_turn = 1 - CONSUMER  # consumer 0 has the first turn without asking
    for tile in range(first_tile, tiles_m * tiles_n, step):
        which, tile_m, tile_n = place_of_tile(tile, tiles_m, tiles_n, N0, N1, N2, BLOCK_N, COUNT, GROUP_M)
        row = tile_m * BLOCK_M + FIRST_ROW
        column = tile_n * BLOCK_N
        if HALVES:
            if CONSUMER == 1:
                ahead = position + gl.minimum(LEAD, blocks_k) - 1
                mbarrier.wait(freed.index(2 * (ahead % STAGES)), ahead // STAGES % 2)
        else:
            mbarrier.wait(turns.index(CONSUMER), last_turn)
            last_turn = 1 - last_turn

        accumulator = gl.zeros([TILE_M, BLOCK_N], gl.float32, layout)
        slot = position % STAGES
        for block in range(blocks_k):
            before = slot
            slot = position % STAGES
            mbarrier.wait(full.index(slot), position // STAGES % 2)
            x = x_ring.index(slot)  # [BLOCK_M, BLOCK_K]
            if HALVES:
                x = x.slice(FIRST_ROW, TILE_M)
            w = w_ring.index(slot).permute((1, 0))  # [BLOCK_K, BLOCK_N]
            accumulator = warpgroup_mma(x, w, accumulator, is_async=True)
            # All but the product just issued are over: their slot is free.
            accumulator = warpgroup_mma_wait(1, deps=(accumulator,))
            mbarrier.arrive(freed.index(2 * before + CONSUMER if HALVES else before), pred=block > 0)
            position += 1
        if not HALVES:
            mbarrier.arrive(turns.index(1 - CONSUMER))
            position += blocks_k  # those of the other consumer's tile

        # The bias arrives while the last product is computed.
        if BIAS_MASK != 0:
            N = pick_number(which, N0, N1, N2, N3, COUNT)
            if BIAS_MASK != (1 << COUNT) - 1:
                N = N * ((BIAS_MASK >> which) & 1)
            bias_ptr = pick(which, biases[0], biases[1], biases[2], biases[3], COUNT)
            columns = column + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, layout))
            bias = gl.load(bias_ptr + columns, mask=columns < N, other=0.0)
        accumulator = warpgroup_mma_wait(0, deps=(accumulator,))
        mbarrier.arrive(freed.index(2 * slot + CONSUMER if HALVES else slot))
        # The lower half of the last rows may be past the end. The branch also keeps ptxas from moving the epilogue's
        # arithmetic, about a thousand instructions, in front of the arrival.
        if row < M:
            if BIAS_MASK != 0:
                accumulator += gl.expand_dims(bias.to(gl.float32), 0)
            output_desc = pick(which, outputs[0], outputs[1], outputs[2], outputs[3], COUNT)
            finish_columns(accumulator, output_desc, staging, row, column, ACTIVATION, 0)
    tma.store_wait(0)  # the staging buffers end with the program


@gluon.jit(do_not_specialize=["M", "K"])
def kernl_linear_hopper(
    input_desc,  # [M, K] in blocks of [BLOCK_M, BLOCK_K]
    weight0_desc,  # [N, K] in blocks of [BLOCK_N, BLOCK_K]
    weight1_desc,
    weight2_desc,
    weight3_desc,
    output0_desc,  # [M, N] in blocks of [TILE_M, STORE_N]
    output1_desc,
    output2_desc,
    output3_desc,
    bias0_ptr,
    bias1_ptr,
    bias2_ptr,
    bias3_ptr,
    M,
    N0,
    N1,
    N2,
    N3,
    K,
    COUNT: gl.constexpr,
    BIAS_MASK: gl.constexpr,
    ACTIVATION: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    HALVES: gl.constexpr,
    LEAD: gl.constexpr,
    GROUP_M: gl.constexpr,
    USE_PDL: gl.constexpr,
):
    gl.static_assert(STAGES >= 2 and 1 <= LEAD and LEAD < STAGES, "see: no deadlock")
    let_next_kernel_start(USE_PDL)
    dtype: gl.constexpr = input_desc.dtype
    rings = (
        gl.allocate_shared_memory(dtype, [STAGES] + input_desc.block_shape, input_desc.layout),
        gl.allocate_shared_memory(dtype, [STAGES] + weight0_desc.block_shape, weight0_desc.layout),
    )
    staging0 = gl.allocate_shared_memory(dtype, [BUFFERS] + output0_desc.block_shape, output0_desc.layout)
    staging1 = gl.allocate_shared_memory(dtype, [BUFFERS] + output0_desc.block_shape, output0_desc.layout)
    READERS: gl.constexpr = 2 if HALVES else 1
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    freed = gl.allocate_shared_memory(gl.int64, [READERS * STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), 1)
    for reader in gl.static_range(READERS * STAGES):
        mbarrier.init(freed.index(reader), 1)
    for consumer in gl.static_range(2):
        mbarrier.init(turns.index(consumer), 1)
    fence_async_shared()

    weights = (weight0_desc, weight1_desc, weight2_desc, weight3_desc)
    outputs = (output0_desc, output1_desc, output2_desc, output3_desc)
    biases = (bias0_ptr, bias1_ptr, bias2_ptr, bias3_ptr)
    barriers = (full, freed, turns)
    sizes = (M, N0, N1, N2, N3, K)
    # fmt: off
    gl.warp_specialize(
        [
            (consume, (0, outputs, biases, rings, staging0, barriers, sizes, COUNT, BIAS_MASK, ACTIVATION, HALVES,
                       LEAD, GROUP_M, USE_PDL)),
            (consume, (1, outputs, biases, rings, staging1, barriers, sizes, COUNT, BIAS_MASK, ACTIVATION, HALVES,
                       LEAD, GROUP_M, USE_PDL)),
            (produce, (input_desc, weights, rings, barriers, sizes, COUNT, HALVES, GROUP_M, USE_PDL)),
        ],
        [4, 1],  # warps of consumer 1 and of the producer, and their registers; consumer 0 has what is left
        [232, 40],
    )
    # fmt: on


@dataclass(frozen=True)
class HopperConfig:
    """One way to run a linear layer with `kernl_linear_hopper`.

    block_m, block_n, block_k: what a slot of the ring holds of input and weight.
    stages: slots. halves: see the head of this file. lead (halves): blocks that consumer 0 is ahead.
    store_n, buffers: columns finished and stored at a time, and staging buffers for them, of each consumer.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    halves: bool
    store_n: int = 64
    buffers: int = 2
    lead: int = 2

    @property
    def name(self) -> str:
        """Readable and unique: what the tuning tables and reports call it."""
        way = "halves" if self.halves else "turns"
        return f"hopper_{way}_{self.block_m}x{self.block_n}x{self.block_k}_s{self.stages}"

    @property
    def tile_m(self) -> int:
        """Rows of a consumer's tile."""
        return self.block_m // 2 if self.halves else self.block_m

    def tiles(self, rows: int, columns: Sequence[int]) -> int:
        """Output tiles of the whole problem, each with blocks of its own in the ring."""
        return -(-rows // self.block_m) * sum(-(-n // self.block_n) for n in columns)


_GROUP_M = 8
HOPPER_CONFIGS = (
    HopperConfig(128, 256, 64, 4, halves=True),
    HopperConfig(256, 128, 64, 4, halves=True, store_n=32),
    HopperConfig(128, 128, 64, 5, halves=False),
)
"""Worth trying for 16-bit operands that `kernels.linear.fits_descriptors` accepts, on compute capability 9.0 alone."""


def _layout(block: Sequence[int]) -> gl.NVMMASharedLayout:
    """Swizzled as widely as a row of a block of 16-bit values allows, for wgmma and bulk copies alike."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * block[1]), element_bitwidth=16, rank=2)


def launch_hopper(
    config: HopperConfig,
    input: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    outputs: Sequence[torch.Tensor],
    activation: str,
    *,
    sm_count: int,
    use_pdl: bool = False,
) -> None:
    """outputs[i][M, N_i] = activation(input[M, K] @ weights[i][N_i, K]^T + biases[i]).

    For fp16 and bf16 operands that `kernels.linear.fits_descriptors` accepts, all sizes positive, outputs contiguous.
    """
    rows, inner = input.shape
    columns = [weight.shape[0] for weight in weights]

    def described(tensors: Sequence[torch.Tensor], block: list[int]) -> list[object]:
        return [TensorDescriptor(t, list(t.shape), list(t.stride()), block, _layout(block)) for t in tensors]

    fallback = next((bias for bias in biases if bias is not None), None)  # a valid address behind a masked load
    count_launch("linear_hopper")
    kernl_linear_hopper[(min(config.tiles(rows, columns), sm_count),)](
        *described([input], [config.block_m, config.block_k]),
        *padded(described(weights, [config.block_n, config.block_k])),
        *padded(described(outputs, [config.tile_m, config.store_n])),
        *padded([fallback if bias is None else bias for bias in biases]),
        rows,
        *padded(columns),
        inner,
        COUNT=len(weights),
        BIAS_MASK=bias_mask_of(biases),
        ACTIVATION=activation,
        STAGES=config.stages,
        BUFFERS=config.buffers,
        HALVES=config.halves,
        LEAD=config.lead,
        GROUP_M=_GROUP_M,
        USE_PDL=use_pdl,
        num_warps=4,  # of consumer 0
        **({"launch_pdl": True} if use_pdl else {}),
    )


def _case(config: HopperConfig, dtype: torch.dtype, activation: str, count: int, bias_mask: int) -> AotCase:
    element = TRITON_TYPES[dtype]

    def descriptor(*block: int) -> str:
        return f"tensordesc<{element}[{block[0]},{block[1]}],{_layout(block)!r}>"

    signature = {"input_desc": descriptor(config.block_m, config.block_k), "M": "i32", "K": "i32"}
    constexprs: dict[str, object] = {}
    for index in range(MAX_MERGED):
        for name, kind, is_given in (
            (f"weight{index}_desc", descriptor(config.block_n, config.block_k), True),
            (f"output{index}_desc", descriptor(config.tile_m, config.store_n), True),
            (f"bias{index}_ptr", "*" + element, bias_mask != 0),
            (f"N{index}", "i32", True),
        ):
            if index < count and is_given:
                signature[name] = kind
            else:
                constexprs[name] = None
    constexprs |= {
        "COUNT": count,
        "BIAS_MASK": bias_mask,
        "ACTIVATION": activation,
        "STAGES": config.stages,
        "BUFFERS": config.buffers,
        "HALVES": config.halves,
        "LEAD": config.lead,
        "GROUP_M": _GROUP_M,
        "USE_PDL": True,
    }
    return AotCase(
        f"{config.name}-{element}-{activation}-{count}-bias{bias_mask}",
        kernl_linear_hopper,
        signature,
        constexprs,
        divisible_by_16=tuple(f"N{i}" for i in range(count)),
        options={"launch_pdl": True},
    )


def aot_cases(arch: int) -> Iterator[AotCase]:
    """Every configuration as a GELU layer and as merged linears; its instructions exist on sm_90 alone."""
    if arch != 90:
        return
    for config in HOPPER_CONFIGS:
        yield _case(config, torch.float16, "gelu", 1, 1)
        yield _case(config, torch.float16, "none", 3, 7)
        yield _case(config, torch.bfloat16, "tanh", 4, 5)  # the longest activation, and some biases only
    yield _case(HOPPER_CONFIGS[0], torch.float16, "none", 1, 0)
