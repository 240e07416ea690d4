"""The warp-specialised linear kernel's own source, run on the CPU with its roles interleaved at random.

No GPU is asked, and Triton's interpreter knows no roles: here producer and consumers are threads of which one runs at a
time, and hand over at every barrier. Copies arrive, products read their operands and stores read their buffers as late
as they may, and what a copy is about to overwrite is NaN from the moment it is issued. So a wait for the wrong phase, a
slot or buffer released too early and a deadlock all show, for some order; broken copies of the source show that they
do.
"""

from __future__ import annotations

import inspect
import random
import textwrap
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernl.kernels import linear, linear_hopper
from kernl.ops.linear import apply_activation

NAN = float("nan")


class Failure(AssertionError):
    """What the kernel did that it must not do."""


class Role(threading.Thread):
    """A group of warps. It runs until it pauses, and again when the machine says so."""

    def __init__(self, machine: Machine, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        super().__init__(daemon=True)
        self.machine, self.function, self.arguments = machine, function, arguments
        self.weight = machine.random.choice((1, 1, 10))
        self.go = threading.Semaphore(0)
        self.ready: Callable[[], bool] = lambda: True
        self.is_done = False
        self.error: BaseException | None = None
        self.products: list[Product] = []
        self.stores: list[Copy] = []

    def run(self) -> None:
        self.go.acquire()
        try:
            if not self.machine.stopped:
                self.function(*self.arguments)
        except BaseException as error:
            self.error = error
        self.is_done = True
        self.machine.back.release()

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        self.ready = ready
        self.machine.back.release()
        self.go.acquire()
        if self.machine.stopped:
            raise Failure("stopped")


class Barrier:
    """An mbarrier of count 1."""

    def __init__(self) -> None:
        self.phases_over, self.arrived, self.bytes_missing = 0, False, 0

    def arrive(self) -> None:
        if self.arrived:
            raise Failure("a second arrival in one phase")
        self.arrived = True
        self.update()

    def update(self) -> None:
        if self.arrived and self.bytes_missing == 0:
            self.phases_over, self.arrived = self.phases_over + 1, False


class Shared:
    """A tensor in shared memory, or a view of it."""

    def __init__(self, data: torch.Tensor, unfenced: set[int]) -> None:
        self.data, self.unfenced = data, unfenced

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, index: int) -> Shared:
        return Shared(self.data[index], self.unfenced)

    def slice(self, start: int, length: int) -> Shared:
        return Shared(self.data[start : start + length], self.unfenced)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(order), self.unfenced)

    def store(self, values: torch.Tensor) -> None:
        self.data.copy_(values)
        self.unfenced.add(self.data.data_ptr())


class Product:
    """A product under way: nobody may look at the sum, and its operands must stay as they are until it is over."""

    def __init__(self, x: Shared, w: Shared, total: torch.Tensor) -> None:
        self.operands = [(view.data, view.data.clone()) for view in (x, w)]
        if any(bool(copy.isnan().any()) for _, copy in self.operands):
            raise Failure("a product of a slot that is not loaded")
        self.total = total + self.operands[0][1] @ self.operands[1][1]

    def finish(self) -> None:
        if not all(torch.equal(now, at_issue) for now, at_issue in self.operands):
            raise Failure("a slot was overwritten under a product")


class Copy:
    """A copy under way between global and shared memory."""

    def __init__(self, action: Callable[[], None], weight: float) -> None:
        self.action, self.weight, self.is_done = action, weight, False

    def finish(self) -> None:
        self.action()
        self.is_done = True


class Machine:
    """One program: its shared memory, its roles and what they use of Gluon."""

    def __init__(self, program: int, programs: int, seed: int, replace: dict[str, str]) -> None:
        self.random = random.Random(seed)
        self.back = threading.Semaphore(0)
        self.stopped = False
        self.copies: list[Copy] = []
        # Some orders favour a role, so that it runs as far ahead as the barriers let it, or leave copies for later.
        self.load_weight, self.store_weight = self.random.choice((0.2, 1, 5)), self.random.choice((0.001, 1))
        self.unfenced: set[int] = set()
        self.program, self.programs = program, programs
        self.running: Role
        self.names = self._names(replace)

    def run(self, roles: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        threads = [Role(self, function, arguments) for function, arguments in roles]
        for thread in threads:
            thread.start()
        try:
            while not all(thread.is_done for thread in threads):
                able: list[Any] = [thread for thread in threads if not thread.is_done and thread.ready()]
                able += self.copies
                if not able:
                    raise Failure("deadlock")
                chosen = self.random.choices(able, [one.weight for one in able])[0]
                if isinstance(chosen, Copy):
                    self.copies.remove(chosen)
                    chosen.finish()
                    continue
                self.running = chosen
                chosen.go.release()
                self.back.acquire()
                if chosen.error is not None:
                    raise chosen.error
            while self.copies:
                self.copies.pop().finish()
        finally:
            self.stopped = True
            for thread in threads:
                thread.go.release()

    def _names(self, replace: dict[str, str]) -> dict[str, Any]:
        """The kernel's source with this machine in the place of Gluon, and some lines replaced."""
        names: dict[str, Any] = {
            "gl": SimpleNamespace(
                float32=torch.float32,
                int64=torch.int64,
                cdiv=lambda a, b: -(-a // b),
                minimum=min,
                program_id=lambda axis: self.program,
                num_programs=lambda axis: self.programs,
                zeros=lambda shape, dtype, layout: torch.zeros(shape),
                arange=lambda start, end, layout: torch.arange(start, end),
                load=self.load,
                expand_dims=lambda x, axis: x.unsqueeze(axis),
                convert_layout=lambda x, layout, assert_trivial: x,
                NVMMADistributedLayout=lambda *arguments: None,
                SliceLayout=lambda *arguments: None,
                static_range=range,
                static_assert=lambda condition, text: None,
                allocate_shared_memory=self.allocate,
                warp_specialize=lambda roles, warps, registers: self.run(roles),
            ),
            "tl": SimpleNamespace(
                cdiv=lambda a, b: -(-a // b),
                minimum=min,
                where=lambda condition, yes, no: yes if condition else no,
                reshape=lambda x, shape: x.reshape(shape),
                permute=lambda x, order: x.permute(order),
                split=lambda x: (x[..., 0], x[..., 1]),
            ),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: None,
                wait=self.wait,
                arrive=self.arrive,
                expect=self.expect,
            ),
            "tma": SimpleNamespace(store_wait=self.store_wait),
            "copy_in": self.copy_in,
            "copy_out": self.copy_out,
            "fence_async_shared": self.unfenced.clear,
            "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.wait_for_products,
            "activate": lambda x, activation, full_precision: apply_activation(x, activation),
            "wait_for_previous_kernel": lambda use_pdl: None,
            "let_next_kernel_start": lambda use_pdl: None,
        }
        missing = set(replace)
        for module, functions in (
            (linear, ("pick", "pick_number", "count_column_tiles", "place_of_tile", "halve_columns")),
            (linear_hopper, ("produce", "finish_columns", "consume", "kernl_linear_hopper")),
        ):
            for function in functions:
                source = textwrap.dedent(inspect.getsource(getattr(module, function).fn))
                for line, other in replace.items():
                    if line in source:
                        missing.discard(line)
                        source = source.replace(line, other)
                source = "from __future__ import annotations\n" + source[source.index("def ") :]
                exec(compile(source, function, "exec"), names)
        assert not missing, f"the kernel has no such lines any more: {missing}"
        return names

    def allocate(self, dtype: torch.dtype, shape: list[int], layout: None) -> Any:
        if dtype == torch.int64:
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=barriers.__getitem__)
        return Shared(torch.full(shape, NAN), self.unfenced)

    def load(self, pointer: Pointer, mask: torch.Tensor, other: float) -> torch.Tensor:
        values = torch.full(mask.shape, other)
        values[mask] = pointer.data[pointer.offsets[mask]]
        return values

    def wait(self, barrier: Barrier, parity: int) -> None:
        self.running.pause(lambda: barrier.phases_over % 2 != parity)

    def arrive(self, barrier: Barrier, pred: bool = True) -> None:
        if pred:
            barrier.arrive()
        self.running.pause()

    def expect(self, barrier: Barrier, count: int) -> None:
        barrier.bytes_missing += count
        barrier.arrive()

    def copy_in(self, descriptor: Descriptor, place: list[int], barrier: Barrier, target: Shared) -> None:
        if barrier.bytes_missing <= 0:
            raise Failure("a copy that no barrier expects")
        target.data.fill_(NAN)

        def arrive() -> None:
            target.data.zero_()
            source = descriptor.block(place)
            target.data[: source.shape[0], : source.shape[1]] = source
            barrier.bytes_missing -= 2 * target.data.numel()
            barrier.update()

        self.copies.append(Copy(arrive, self.load_weight))
        self.running.pause()

    def copy_out(self, descriptor: Descriptor, place: list[int], source: Shared) -> None:
        if source.data.data_ptr() in self.unfenced:
            raise Failure("a store without a fence")
        at_issue = source.data.clone()

        def read() -> None:
            if not torch.equal(source.data, at_issue):
                raise Failure("a staging buffer was overwritten before it was stored")
            target = descriptor.block(place)
            if not bool(target.isnan().all()):
                raise Failure("an output was stored twice")
            target.copy_(at_issue[: target.shape[0], : target.shape[1]])

        copy = Copy(read, self.store_weight)
        self.copies.append(copy)
        self.running.stores.append(copy)
        self.running.pause()

    def store_wait(self, pending: int) -> None:
        stores = self.running.stores
        over = stores[: max(0, len(stores) - pending)]
        self.running.pause(lambda: all(store.is_done for store in over))

    def multiply(self, x: Shared, w: Shared, total: Any, is_async: bool) -> Product:
        product = Product(x, w, total.total if isinstance(total, Product) else total)
        self.running.products.append(product)
        self.running.pause()
        return product

    def wait_for_products(self, pending: int, deps: tuple[Product]) -> Any:
        products = self.running.products
        while len(products) > pending:
            products.pop(0).finish()
        return deps[0].total if pending == 0 else deps[0]


class Pointer:
    def __init__(self, data: torch.Tensor, offsets: torch.Tensor | None = None) -> None:
        self.data, self.offsets = data, torch.arange(0) if offsets is None else offsets

    def __add__(self, offsets: torch.Tensor) -> Pointer:
        return Pointer(self.data, offsets)


class Descriptor:
    layout = None
    dtype = torch.float32

    def __init__(self, data: torch.Tensor, block_shape: list[int]) -> None:
        self.data, self.block_shape = data, block_shape

    def block(self, place: list[int]) -> torch.Tensor:
        """What of the block at that place exists."""
        (row, column), (rows, columns) = place, self.block_shape
        return self.data[row : row + rows, column : column + columns]


def run(
    *,
    rows: int = 9,
    inner: int = 12,
    columns: tuple[int, ...] = (16,),
    bias_mask: int = 1,
    activation: str = "relu",
    stages: int = 3,
    buffers: int = 2,
    halves: bool = False,
    lead: int = 1,
    programs: int = 1,
    seed: int = 0,
    replace: dict[str, str] | None = None,
) -> None:
    """Run the kernel with tiny blocks and compare with plain PyTorch. Integers, so that results are exact."""
    block_m, block_n, block_k, store_n = 4, 8, 4, 4
    generator = torch.Generator().manual_seed(seed)

    def integers(*size: int) -> torch.Tensor:
        return torch.randint(-8, 9, size, generator=generator).float()

    input = integers(rows, inner)
    weights = [integers(n, inner) for n in columns]
    biases = [integers(n) for n in columns]
    outputs = [torch.full((rows, n), NAN) for n in columns]
    tile_m = block_m // 2 if halves else block_m

    def padded(values: list[Any]) -> list[Any]:
        return values + [None] * (linear.MAX_MERGED - len(values))

    for program in range(programs):
        machine = Machine(program, programs, seed, replace or {})
        machine.names["kernl_linear_hopper"](
            Descriptor(input, [block_m, block_k]),
            *padded([Descriptor(weight, [block_n, block_k]) for weight in weights]),
            *padded([Descriptor(output, [tile_m, store_n]) for output in outputs]),
            *padded([Pointer(bias) for bias in biases]),
            rows,
            *padded(list(columns)),
            inner,
            COUNT=len(columns),
            BIAS_MASK=bias_mask,
            ACTIVATION=activation,
            STAGES=stages,
            BUFFERS=buffers,
            HALVES=halves,
            LEAD=lead,
            GROUP_M=2,
            USE_PDL=False,
        )
    for index, (output, weight, bias) in enumerate(zip(outputs, weights, biases, strict=True)):
        exact = input @ weight.t() + (bias if bias_mask >> index & 1 else 0.0)
        if not torch.equal(output, apply_activation(exact, activation)):
            raise Failure("a wrong result")


@pytest.mark.parametrize("halves", [False, True], ids=["turns", "halves"])
def test_any_order_gives_the_result(halves: bool) -> None:
    seed = random.SystemRandom().getrandbits(32)
    draw = random.Random(seed)
    for _ in range(60):
        count = draw.choice((1, 1, 2, 3, 4))
        stages = draw.randint(2, 5)
        case: dict[str, Any] = {
            "rows": draw.randint(1, 23),
            "inner": draw.randint(1, 30),
            "columns": tuple(draw.randint(1, 20) for _ in range(count)),
            "bias_mask": draw.randrange(1 << count),
            "activation": draw.choice(("none", "relu")),
            "stages": stages,
            "buffers": draw.choice((1, 2)),
            "halves": halves,
            "lead": draw.randint(1, stages - 1),
            "programs": draw.choice((1, 1, 2, 5)),
            "seed": draw.getrandbits(32),
        }
        try:
            run(**case)
        except Exception as error:
            raise AssertionError(f"run(**{case}): {error!r}") from error


@pytest.mark.parametrize(
    ("line", "other", "halves"),
    [
        ("mbarrier.wait(turns.index(CONSUMER), last_turn)", "pass", False),
        ("mbarrier.wait(freed.index(slot), last_round)", "pass", False),
        ("mbarrier.wait(freed.index(2 * slot + 1), last_round)", "pass", True),
        ("last_round = (position // STAGES + 1) % 2", "last_round = position // STAGES % 2", False),
        ("mbarrier.wait(full.index(slot), position // STAGES % 2)", "pass", True),
        ("warpgroup_mma_wait(1, deps", "warpgroup_mma_wait(2, deps", False),
        ("warpgroup_mma_wait(1, deps", "warpgroup_mma_wait(2, deps", True),
        ("pred=block > 0", "pred=block >= 0", True),
        ("position += blocks_k  # those", "pass  # those", False),
        ("mbarrier.arrive(turns.index(1 - CONSUMER))", "pass", False),
        ("tma.store_wait(BUFFERS - 1)", "tma.store_wait(BUFFERS)", True),
        ("fence_async_shared()\n        copy_out", "copy_out", False),
        ("ahead = position + gl.minimum(LEAD, blocks_k) - 1", "ahead = position + LEAD - 1", True),
    ],
)
def test_broken_source_is_noticed(line: str, other: str, halves: bool) -> None:
    with pytest.raises(Failure):
        for seed in range(200):
            inner = 3 if "minimum" in line else 20
            run(rows=21, inner=inner, halves=halves, lead=2, seed=seed, replace={line: other})


@pytest.mark.parametrize(("stages", "lead", "halves"), [(1, 1, False), (1, 1, True), (3, 3, True)])
def test_limits_of_the_static_assertion_are_the_deadlocks(stages: int, lead: int, halves: bool) -> None:
    with pytest.raises(Failure, match="deadlock"):
        run(rows=21, inner=24, stages=stages, lead=lead, halves=halves)


def test_configurations_fit_the_chip_and_are_named_apart() -> None:
    configs = linear_hopper.HOPPER_CONFIGS
    assert len({config.name for config in configs}) == len(configs)
    for config in configs:
        ring = config.stages * (config.block_m + config.block_n) * config.block_k * 2
        staging = 2 * config.buffers * config.tile_m * config.store_n * 2
        assert ring + staging + 1024 <= 232448
        assert 1 <= config.lead < config.stages
        pieces = config.block_n // config.store_n
        assert pieces % config.buffers == 0, "a buffer's turn must come round with the tiles"
        assert config.tile_m * config.block_n == 128 * 128, "a thread's accumulator is 128 registers"
