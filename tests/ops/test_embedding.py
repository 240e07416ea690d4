"""The sum of embedding lookups: bit for bit that of plain PyTorch, and the op under every way PyTorch may run it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

import kernl.ops
from kernl.kernels.embedding import EmbeddingConfig, choose_config, launch_embedding_sum
from kernl.ops.common import ahead_of, force_reference
from kernl.ops.embedding import reference_embedding_sum
from tests.conftest import KernelRun

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
ENTRIES = (31, 2, 17, 5)


def draw_tables(
    rng: torch.Generator, columns: int, dtype: torch.dtype, device: torch.device, count: int = 3
) -> list[torch.Tensor]:
    # Values of different sizes: sums that were not rounded in between would differ.
    return [
        (torch.randn(entries, columns, generator=rng) * 3.0**position).to(dtype).to(device)
        for position, entries in enumerate(ENTRIES[:count])
    ]


def draw_indices(
    rng: torch.Generator, shapes: Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.int64
) -> list[torch.Tensor]:
    return [
        torch.randint(0, entries, shape, generator=rng).to(dtype).to(device) for entries, shape in zip(ENTRIES, shapes)
    ]


def check(indices: Sequence[torch.Tensor], tables: Sequence[torch.Tensor]) -> None:
    actual, expected = kernl.ops.embedding_sum(indices, tables), reference_embedding_sum(indices, tables)
    assert actual.dtype == expected.dtype and actual.is_contiguous()
    assert torch.equal(actual, expected), "not what separate lookups and additions give"


@pytest.mark.parametrize("columns", [1, 7, 40, 130, 768])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bit_identical_to_plain(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, columns: int) -> None:
    tables = draw_tables(rng, columns, dtype, kernels.device)
    check(draw_indices(rng, [(3, 5), (3, 5), (1, 5)], kernels.device), tables)
    assert kernels.launched("embedding_sum") == 1


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_to_four_tables(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, count: int) -> None:
    tables = draw_tables(rng, 40, dtype, kernels.device, count)
    check(draw_indices(rng, [(3, 5)] * count, kernels.device), tables)
    assert kernels.launched("embedding_sum") == 1


def test_the_order_of_the_sums_is_kept(kernels: KernelRun) -> None:
    values = (2048.0, 1.0, 1.0)  # 2048 + 1 rounds to 2048 in half precision, 2048 + 2 does not
    tables = [torch.full((1, 16), value, dtype=torch.float16, device=kernels.device) for value in values]
    index = torch.zeros(2, dtype=torch.long, device=kernels.device)
    assert (kernl.ops.embedding_sum([index] * 3, tables) == 2048).all()
    assert (kernl.ops.embedding_sum([index] * 3, tables[::-1]) == 2050).all()


@pytest.mark.parametrize(
    "shapes",
    [
        [(3, 5), (1, 5), (3, 1)],
        [(5,), (3, 5), ()],
        [(3, 4, 5), (5,), (4, 1)],
        [(1, 1), (1, 1), (1,)],
        [(2, 3, 4, 5), (3, 1, 5), (2, 1, 4, 1)],  # does not fold into two dimensions
        [(), (), ()],
    ],
    ids=str,
)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_indices_broadcast(
    kernels: KernelRun, rng: torch.Generator, shapes: list[tuple[int, ...]], index_dtype: torch.dtype
) -> None:
    tables = draw_tables(rng, 24, torch.float16, kernels.device)
    check(draw_indices(rng, shapes, kernels.device, index_dtype), tables)
    assert kernels.launched("embedding_sum") == 1


def test_strides_and_mixed_index_dtypes(kernels: KernelRun, rng: torch.Generator) -> None:
    tables = [table[1:, 3:] for table in draw_tables(rng, 32, torch.float32, kernels.device)]
    first, second, third = (torch.zeros(6, 8, dtype=torch.long, device=kernels.device) for _ in range(3))
    first += torch.arange(8, device=kernels.device)
    third += torch.arange(6, device=kernels.device)[:, None]
    check([first.t(), second.t().int(), third[:, :1].expand(-1, 8).t()], tables)
    check([first[::2, ::3], second[::2, ::3], third[::2, ::3].int()], tables)
    assert kernels.launched("embedding_sum") == 2
    check([first, second], [table[:, ::2] for table in tables[:2]])  # such a table would have to be copied
    assert kernels.launched("embedding_sum") == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_index_outside_its_table_gives_nan(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype) -> None:
    # The tables are cut out of larger ones: what lies around them must not be read.
    tables = [table[1:-1] for table in draw_tables(rng, 40, dtype, kernels.device)[::2]]
    entries = [table.shape[0] for table in tables]
    first = torch.tensor([0, -1, 3, entries[0], 2, 2**40, -(2**40)], device=kernels.device)
    second = torch.tensor([0, 1, entries[1], 2, 3, 4, 5], device=kernels.device)
    output = kernl.ops.embedding_sum([first, second], tables)
    bad = torch.tensor([False, True, True, True, False, True, True])
    assert output[bad].isnan().all()
    assert torch.equal(output[~bad], reference_embedding_sum([first[~bad], second[~bad]], tables))


def test_gradients_of_indices_outside_a_table(kernels: KernelRun, rng: torch.Generator) -> None:
    tables = [table.requires_grad_() for table in draw_tables(rng, 8, torch.float32, kernels.device, 2)]
    first, second = torch.tensor([[1, -1, 31], [0, 0, 0]], device=kernels.device)
    output = kernl.ops.embedding_sum([first, second], tables)
    grads = torch.autograd.grad(output, tables, torch.ones_like(output))
    assert grads[0].sum() == 8 and (grads[0][1] == 1).all()


def test_the_reference_raises_for_an_index_outside_its_table(rng: torch.Generator) -> None:
    tables = draw_tables(rng, 8, torch.float32, torch.device("cpu"), 2)
    with pytest.raises(IndexError):
        kernl.ops.embedding_sum([torch.tensor([31]), torch.tensor([0])], tables)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_elements(kernels: KernelRun, rng: torch.Generator, shape: tuple[int, ...]) -> None:
    tables = draw_tables(rng, 8, torch.float32, kernels.device, 2)
    index = torch.zeros(shape, dtype=torch.long, device=kernels.device)
    assert kernl.ops.embedding_sum([index, index], tables).shape == (*shape, 8)
    assert kernl.ops.embedding_sum([index, index], [table[:, :0] for table in tables]).shape == (*shape, 0)


@pytest.mark.parametrize("config", [EmbeddingConfig(1, 16, 1), EmbeddingConfig(4, 64, 2)], ids=str)
def test_any_configuration_is_right(kernels: KernelRun, rng: torch.Generator, config: EmbeddingConfig) -> None:
    tables = draw_tables(rng, 40, torch.float16, kernels.device)
    indices = draw_indices(rng, [(7,)] * 3, kernels.device)
    output = torch.full((7, 40), float("nan"), dtype=torch.float16, device=kernels.device)
    launch_embedding_sum(indices, tables, output, config=config)
    assert torch.equal(output, reference_embedding_sum(indices, tables))


def test_configurations_read_sixteen_bytes_a_thread() -> None:
    assert choose_config(1, 768, 2, 132) == EmbeddingConfig(1, 256, 1)
    assert choose_config(16384, 768, 2, 132) == EmbeddingConfig(8, 256, 4)
    assert choose_config(16384, 768, 4, 132) == EmbeddingConfig(8, 128, 4)
    assert choose_config(16384, 64, 2, 132) == EmbeddingConfig(32, 64, 4)


def test_what_runs_the_reference(kernels: KernelRun, rng: torch.Generator) -> None:
    indices = draw_indices(rng, [(3, 5)] * 2, kernels.device)
    check(indices, draw_tables(rng, 8, torch.float64, kernels.device, 2))
    with force_reference():
        check(indices, draw_tables(rng, 8, torch.float32, kernels.device, 2))
    assert kernels.launched("embedding_sum") == 0


def test_kernels_ahead(kernels: KernelRun, rng: torch.Generator) -> None:
    tables = draw_tables(rng, 40, torch.float16, kernels.device)
    indices = draw_indices(rng, [(3, 5), (3, 5), (1, 5)], kernels.device)
    pairs = ahead_of(torch.ops.kernl.embedding_sum, (indices, tables, [-1] * 3))
    for _, run in pairs:
        run()
    assert len(pairs) == kernels.launched("embedding_sum") > 0
    with force_reference():
        assert not ahead_of(torch.ops.kernl.embedding_sum, (indices, tables, [-1] * 3))


INDEX = torch.zeros(3, dtype=torch.long)
TABLE = torch.zeros(4, 8)


@pytest.mark.parametrize(
    ("indices", "tables", "padding_idx", "message"),
    [
        ([INDEX], [TABLE], None, "tables has 1 tensors; accepted: 2 to 4"),
        ([INDEX] * 5, [TABLE] * 5, None, "tables has 5 tensors"),
        ([INDEX], [TABLE] * 2, None, "indices has 1 tensors; accepted: 2"),
        ([INDEX] * 2, [TABLE, TABLE[0]], None, r"tables\[1\] has shape \[8\]"),
        ([INDEX] * 2, [TABLE, TABLE[:, :4]], None, r"tables\[1\] has shape \[4, 4\]"),
        ([INDEX] * 2, [TABLE, TABLE.half()], None, r"tables\[1\] is torch.float16"),
        ([INDEX] * 2, [TABLE.int()] * 2, None, r"tables\[0\] is torch.int32; accepted: floating point"),
        ([INDEX, INDEX.float()], [TABLE] * 2, None, r"indices\[1\] is torch.float32; accepted: torch.int64"),
        ([INDEX, INDEX[:2]], [TABLE] * 2, None, r"indices have shapes \[3\], \[2\]"),
        ([INDEX] * 2, [TABLE] * 2, [1], "padding_idx has 1 numbers"),
        ([INDEX] * 2, [TABLE] * 2, [None, 4], "padding_idx has 4; accepted: a row of a table of 4"),
    ],
)
def test_bad_arguments_are_named(
    indices: list[torch.Tensor], tables: list[torch.Tensor], padding_idx: list[int | None] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        kernl.ops.embedding_sum(indices, tables, padding_idx)


# Under PyTorch's machinery


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_opcheck(kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype) -> None:
    tables = [table.requires_grad_() for table in draw_tables(rng, 8, dtype, kernels.device)]
    indices = draw_indices(rng, [(3, 5), (3, 5), (1, 5)], kernels.device)
    torch.library.opcheck(torch.ops.kernl.embedding_sum.default, (indices, tables, [0, -1, 2]))
    tables = [table.detach() for table in tables]
    torch.library.opcheck(
        torch.ops.kernl.embedding_sum.default, ([index.t().int() for index in indices], tables, [-1] * 3)
    )


PADDINGS = [None, (0, None, 1), (-1, 1, None)]


def plain(
    indices: Sequence[torch.Tensor], tables: Sequence[torch.Tensor], padding_idx: Sequence[int | None] | None
) -> torch.Tensor:
    padding = padding_idx or [None] * len(tables)
    first, *others = (F.embedding(*each) for each in zip(indices, tables, padding))
    for each in others:
        first = first + each
    return first


@pytest.mark.parametrize("padding_idx", PADDINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(
    kernels: KernelRun, rng: torch.Generator, dtype: torch.dtype, padding_idx: tuple[int | None, ...] | None
) -> None:
    tables = [table.requires_grad_() for table in draw_tables(rng, 40, dtype, kernels.device)]
    indices = draw_indices(rng, [(6, 5), (6, 5), (1, 5)], kernels.device)
    indices[0][0, :3] = torch.tensor([0, 30, 30], device=kernels.device)
    grad = torch.randn(6, 5, 40, generator=rng).to(dtype).to(kernels.device)
    actual = torch.autograd.grad(kernl.ops.embedding_sum(indices, tables, padding_idx), tables, grad)
    expected = torch.autograd.grad(plain(indices, tables, padding_idx), tables, grad)
    torch.testing.assert_close(actual, expected)
    assert kernels.launched("embedding_sum") == 1


def test_one_table_alone_is_differentiated(kernels: KernelRun, rng: torch.Generator) -> None:
    tables = draw_tables(rng, 8, torch.float32, kernels.device)
    indices = draw_indices(rng, [(6, 5), (6, 5), (1, 5)], kernels.device)
    tables[2].requires_grad_()
    (actual,) = torch.autograd.grad(kernl.ops.embedding_sum(indices, tables).cos().sum(), tables[2:])
    (expected,) = torch.autograd.grad(plain(indices, tables, None).cos().sum(), tables[2:])
    torch.testing.assert_close(actual, expected)


def test_one_table_in_two_places(kernels: KernelRun, rng: torch.Generator) -> None:
    table = draw_tables(rng, 8, torch.float32, kernels.device)[0].requires_grad_()
    indices = draw_indices(rng, [(6, 5), (6, 5)], kernels.device)
    (actual,) = torch.autograd.grad(kernl.ops.embedding_sum(indices, [table, table]).cos().sum(), table)
    (expected,) = torch.autograd.grad(plain(indices, [table, table], None).cos().sum(), table)
    torch.testing.assert_close(actual, expected)


def test_gradients_numerically_twice_over(rng: torch.Generator) -> None:
    device = torch.device("cpu")
    tables = [table.requires_grad_() for table in draw_tables(rng, 3, torch.float64, device)]
    indices = draw_indices(rng, [(2, 5), (2, 5), (1, 5)], device)

    def function(*tables: torch.Tensor) -> torch.Tensor:
        return kernl.ops.embedding_sum(indices, tables).square()

    assert torch.autograd.gradcheck(function, tables, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, tables, fast_mode=True)


def test_compile_with_gradients(kernels: KernelRun, rng: torch.Generator) -> None:
    tables = [table.requires_grad_() for table in draw_tables(rng, 8, torch.float32, kernels.device)]
    indices = draw_indices(rng, [(6, 5), (6, 5), (1, 5)], kernels.device)
    compiled = torch.compile(lambda *given: kernl.ops.embedding_sum(*given), backend="aot_eager", fullgraph=True)
    actual = torch.autograd.grad(compiled(indices, tables, (0, None, None)).cos().sum(), tables)
    expected = torch.autograd.grad(plain(indices, tables, (0, None, None)).cos().sum(), tables)
    torch.testing.assert_close(actual, expected)


def test_one_compilation_serves_all_shapes(kernels: KernelRun, rng: torch.Generator) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    tables = draw_tables(rng, 8, torch.float16, kernels.device)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *indices: torch.ops.kernl.embedding_sum(indices, tables, [-1] * 3), backend=backend, dynamic=True
    )
    for batch, length in ((3, 7), (4, 5), (9, 2)):
        indices = draw_indices(rng, [(batch, length), (batch, length), (1, length)], kernels.device)
        assert torch.equal(compiled(*indices), reference_embedding_sum(indices, tables))
    assert len(graphs) == 1


def test_export(kernels: KernelRun, rng: torch.Generator) -> None:
    class Start(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = torch.nn.Embedding(31, 8), torch.nn.Embedding(17, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
            return kernl.ops.embedding_sum([ids, positions], [self.words.weight, self.places.weight])

    start = Start().to(kernels.device)
    dims = {0: torch.export.Dim("batch", min=2), 1: torch.export.Dim("length", min=2, max=17)}
    exported = torch.export.export(
        start, (torch.zeros(3, 5, dtype=torch.long, device=kernels.device),), dynamic_shapes=(dims,)
    )
    (ids,) = draw_indices(rng, [(4, 7)], kernels.device)
    assert torch.equal(exported.module()(ids), start.words(ids) + start.places(torch.arange(7, device=kernels.device)))
    assert torch.ops.kernl.embedding_sum.default in [node.target for node in exported.graph.nodes]


def test_autocast_leaves_lookups_alone(rng: torch.Generator) -> None:
    tables = draw_tables(rng, 8, torch.float32, torch.device("cpu"))
    indices = draw_indices(rng, [(6, 5), (6, 5), (1, 5)], torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(indices, tables)
        assert kernl.ops.embedding_sum(indices, tables).dtype == torch.float32
