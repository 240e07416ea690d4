"""Every op under what PyTorch does to functions: opcheck, torch.func, torch.compile, torch.export, autocast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap

import kernl.ops
from kernl import backend
from kernl.ops import fusion_attention
from kernl.ops.fusion_attention import FusionAttentionResult
from tests.conftest import KernelRun

Function = Callable[..., Any]


def rand(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, requires_grad=requires_grad)


# opcheck of every op there is

PLAIN = (None, None, 0.25, False, "zero")
ELU = (None, None, None, "elu", True, True, 1e-6, "auto")


def arguments_of(name: str) -> list[tuple[Any, ...]]:
    """Some calls of an op. An op that is not here fails its test."""

    def leaf(*shape: int) -> torch.Tensor:
        return rand(*shape, requires_grad=True)

    norm = (leaf(3, 8), leaf(3, 8), leaf(8))
    heads = [leaf(2, 2, 5, 4) for _ in range(3)]
    results = [tensor.detach() for tensor in torch.ops.kernl.attention(*heads, *PLAIN)]
    sums = [tensor.detach() for tensor in torch.ops.kernl.linear_attention(*heads, *ELU)[:2]]
    plain = [tensor.detach() for tensor in heads]
    tokens = [torch.randint(0, 5, (2, 3)), torch.arange(3)]
    backward = (rand(2, 2, 5, 4), rand(2, 2, 5), *plain, *results)
    return {
        "layer_norm": [(norm[0], norm[2], norm[2], 1e-5)],
        "add_layer_norm": [(*norm, None, 1e-5)],
        "layer_norm_of_sum": [(*norm, norm[2], 1e-5)],
        "rms_norm": [(norm[0], norm[2], 1e-5, 1.0, torch.float32)],
        "add_rms_norm": [(*norm, 1e-5, 0.0, torch.float32)],
        "rms_norm_of_sum": [(*norm, 1e-5, 0.0, torch.float16)],
        "linear": [(norm[0], leaf(4, 8), leaf(4), "gelu")],
        "merged_linear": [(norm[0], [leaf(4, 8), leaf(6, 8)], [None, leaf(6)])],
        "gated_linear": [(norm[0], leaf(4, 8), leaf(4, 8), None, leaf(4), "silu")],
        "embedding_sum": [(tokens, [leaf(5, 8), leaf(3, 8)], [0, -1])],
        "attention": [(*heads, *PLAIN), (*heads, leaf(1, 2, 5, 5), None, 0.25, True, "mean", 3)],
        "attention_with_statistics": [(*heads, *PLAIN)],
        "attention_backward": [(*backward, False, False, *PLAIN),
                               (*backward, True, False, rand(2, 5, 5), *PLAIN[1:])],
        "linear_attention": [(*heads, *ELU)],
        "linear_attention_backward": [(rand(2, 2, 5, 4), None, None, *sums, *plain, *ELU)],
    }[name]  # fmt: skip


def registered() -> list[str]:
    names = (name.partition("::") for name in torch._C._dispatch_get_all_op_names())
    return sorted(name for space, _, name in names if space == "kernl" and not name.startswith("test_"))


@pytest.mark.parametrize("name", registered())
def test_opcheck(name: str) -> None:
    for arguments in arguments_of(name):
        torch.library.opcheck(getattr(torch.ops.kernl, name).default, arguments)


# The public functions, each as a function of tensors. The first result counts.

_TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, pse: torch.Tensor) -> FusionAttentionResult:
    return fusion_attention(query, key, value, 2, "BSND", pse=pse, scale=0.5, sparse_mode=3, atten_mask=_TRIANGLE)


def _masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return kernl.ops.attention(query, key, value, bias=bias, window=(3, -1), is_causal=True, softcap=5.0)


def _causal(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return kernl.ops.attention(query, key, value, is_causal=True)


def _embedded(words: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    return kernl.ops.embedding_sum([torch.tensor([[1, 2, 4]]), torch.arange(3)], [words, places])


_TOKENS, _HEADS = (2, 5, 8), (2, 2, 5, 4)
FUNCTIONS: dict[str, tuple[Function, list[tuple[int, ...]]]] = {
    "layer_norm": (kernl.ops.layer_norm, [_TOKENS, (8,), (8,)]),
    "add_layer_norm": (kernl.ops.add_layer_norm, [_TOKENS, (5, 8), (8,), (8,)]),
    "rms_norm": (kernl.ops.rms_norm, [_TOKENS, (8,)]),
    "add_rms_norm": (kernl.ops.add_rms_norm, [_TOKENS, _TOKENS, (8,)]),
    "linear": (lambda *tensors: kernl.ops.linear(*tensors, activation="gelu"), [_TOKENS, (6, 8), (6,)]),
    "merged_linear": (
        lambda input, one, other, bias: torch.cat(kernl.ops.merged_linear(input, [one, other], [None, bias]), -1),
        [_TOKENS, (6, 8), (4, 8), (4,)],
    ),
    "gated_linear": (lambda *tensors: kernl.ops.gated_linear(*tensors), [_TOKENS, (6, 8), (6, 8)]),
    "embedding_sum": (_embedded, [(5, 8), (3, 8)]),
    "attention": (_causal, [_HEADS, _HEADS, _HEADS]),
    "attention, masked": (_masked, [_HEADS, (2, 1, 5, 4), (2, 1, 5, 4), (2, 2, 5, 5)]),
    "fusion_attention": (_fused, [(2, 5, 2, 4), (2, 5, 1, 4), (2, 5, 1, 4), (1, 2, 5, 5)]),
    "linear_attention": (lambda *tensors: kernl.ops.linear_attention(*tensors, causal=True), [(2, 5, 2, 4)] * 3),
    "causal_dot_product": (kernl.ops.causal_dot_product, [_HEADS, _HEADS, _HEADS]),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def first_of(function: Function) -> Function:
    def run(*tensors: torch.Tensor) -> torch.Tensor:
        result = function(*tensors)
        return result if isinstance(result, torch.Tensor) else result[0]

    return run


def drawn(name: str, rng: torch.Generator, dtype: torch.dtype = torch.float32, *front: int) -> list[torch.Tensor]:
    return [torch.randn(*front, *shape, generator=rng, dtype=dtype) for shape in FUNCTIONS[name][1]]


def test_every_function_is_here() -> None:
    functions = {name for name in kernl.ops.__all__ if not isinstance(getattr(kernl.ops, name), type)}
    assert functions == {name.partition(",")[0] for name in FUNCTIONS}


# torch.func


@pytest.mark.filterwarnings("error")
@each_function
def test_vmap_is_a_loop_of_calls(name: str, rng: torch.Generator) -> None:
    """Over all tensors, over the first and over the last alone, at the front and elsewhere; one vmap in another."""
    function = first_of(FUNCTIONS[name][0])
    many, one = drawn(name, rng, torch.float32, 3), drawn(name, rng)
    count = len(one)
    for places in (range(count), [0], [count - 1]):
        tensors = [many[place] if place in places else one[place] for place in range(count)]
        want = torch.stack([
            function(*(tensor[number] if place in places else tensor for place, tensor in enumerate(tensors)))
            for number in range(3)
        ])  # fmt: skip
        dims = tuple(0 if place in places else None for place in range(count))
        torch.testing.assert_close(vmap(function, dims)(*tensors), want)
        last = tuple(-1 if dim == 0 else None for dim in dims)
        moved = [tensor if dim is None else tensor.movedim(0, -1) for tensor, dim in zip(tensors, dims)]
        torch.testing.assert_close(vmap(function, last)(*moved), want)
    twice = [torch.stack([tensor, 2 * tensor]) for tensor in many]
    want = torch.stack([vmap(function)(*tensors) for tensors in zip(*twice)])
    torch.testing.assert_close(vmap(vmap(function))(*twice), want)


def test_vmap_launches_once(kernels: KernelRun, rng: torch.Generator) -> None:
    """Attention, forward and backward, of padded and of plain batches."""
    query, key, value = (torch.randn(3, 1, 1, 9, 16, generator=rng).to(kernels.device) for _ in range(3))
    padding = torch.rand(3, 1, 9, generator=rng).to(kernels.device) > 0.3

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return kernl.ops.attention(query, key, value, key_padding=padding)

    want = torch.stack([attend(*tensors) for tensors in zip(query, key, value, padding)])
    launched = kernels.launched("attention_forward")
    torch.testing.assert_close(vmap(attend)(query, key, value, padding), want)
    vmap(grad(lambda *tensors: attend(*tensors).sum()))(query, key, value, padding)
    assert kernels.launched("attention_forward") == launched + 2


@pytest.mark.parametrize(
    "options",
    [
        {"attn_mask": torch.rand(2, 1, 5, 5) > 0.4},
        {"alibi_slopes": torch.rand(2, 2)},
        {"q_offset": torch.tensor([0, 3]), "is_causal": True},
        {"prefix": torch.tensor([0, 3]), "is_causal": True},
        {"dropout_p": 0.5, "seed": 3},
        {"return_row_stats": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_vmap_of_attention_with_something_of_each_row(options: dict[str, Any], rng: torch.Generator) -> None:
    def attend(*tensors: torch.Tensor) -> Any:
        return kernl.ops.attention(*tensors, **options)

    tensors = [torch.randn(3, *_HEADS, generator=rng) for _ in range(3)]
    found, want = vmap(attend)(*tensors), [attend(*one) for one in zip(*tensors)]
    if isinstance(found, tuple):
        found, want = found[1], [each[1] for each in want]
    torch.testing.assert_close(found, torch.stack(want))


def test_vmap_draws_dropout_as_it_is_told(rng: torch.Generator) -> None:
    query = torch.randn(*_HEADS, generator=rng).expand(2, *_HEADS)
    key = torch.randn(_HEADS, generator=rng)

    def attend(query: torch.Tensor) -> torch.Tensor:
        return kernl.ops.attention(query, key, key, dropout_p=0.5)

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(attend)(query)
    one, other = vmap(attend, randomness="different")(query)
    assert not torch.equal(one, other)
    one, other = vmap(attend, randomness="same")(query)
    assert torch.equal(one, other)


@each_function
def test_gradients_of_torch_func_are_autograds(name: str, rng: torch.Generator) -> None:
    """grad, a Jacobian, gradients of each sample, and a Hessian by two Jacobians."""
    function, tensors = first_of(FUNCTIONS[name][0]), drawn(name, rng, torch.float64)
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = function(*leaves)
    weights = torch.randn(output.shape, generator=rng, dtype=output.dtype)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        return (function(*tensors).sin() * weights).sum()

    places = tuple(range(len(tensors)))
    wanted = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    for one, other in zip(grad(loss, places)(*tensors), wanted):
        torch.testing.assert_close(one, other)
    rows = torch.autograd.functional.jacobian(function, tuple(tensors))
    for one, other in zip(jacrev(function, places)(*tensors), rows):
        torch.testing.assert_close(one, other)
    many = [torch.stack([tensor, 0.5 * tensor]) for tensor in tensors]
    each = [grad(loss, places)(*sample) for sample in zip(*many)]
    for one, other in zip(vmap(grad(loss, places))(*many), zip(*each)):
        torch.testing.assert_close(one, torch.stack(other))
    step = torch.randn(tensors[0].shape, generator=rng, dtype=torch.float64)

    def along(*tensors: torch.Tensor) -> torch.Tensor:
        return (grad(loss)(*tensors) * step).sum()

    second = torch.autograd.grad((wanted[0] * step).sum(), leaves, allow_unused=True)
    for one, other in zip(grad(along, places)(*tensors), second):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


def test_a_hessian_by_reverse_mode(rng: torch.Generator) -> None:
    query, key, value = (torch.randn(1, 1, 3, 2, generator=rng, dtype=torch.float64) for _ in range(3))

    def loss(query: torch.Tensor) -> torch.Tensor:
        return kernl.ops.attention(query, key, value).square().sum()

    torch.testing.assert_close(jacrev(jacrev(loss))(query), torch.autograd.functional.hessian(loss, query))


@each_function
def test_forward_mode_is_refused(name: str, rng: torch.Generator) -> None:
    """Rather than answered with tangents of zero."""
    function, tensors = first_of(FUNCTIONS[name][0]), drawn(name, rng)
    for place in range(len(tensors)):

        def of_one(tensor: torch.Tensor, place: int = place) -> torch.Tensor:
            return function(*tensors[:place], tensor, *tensors[place + 1 :])

        with pytest.raises(NotImplementedError, match=r"no forward-mode derivative .* jacrev"):
            jvp(of_one, (tensors[place],), (tensors[place],))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        function(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:])
    with forward_ad.dual_level():  # others do not mind
        torch.testing.assert_close(function(*tensors), function(*tensors))


# torch.compile and torch.export


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_compiled(compiler: str, rng: torch.Generator) -> None:
    """All functions in one graph, with gradients. Inductor's C++ takes long: attention alone."""
    if compiler == "inductor" and not backend.has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    names = list(FUNCTIONS) if compiler == "aot_eager" else ["attention, masked", "fusion_attention"]
    tensors = {name: drawn(name, rng) for name in names}

    def run(*leaves: torch.Tensor) -> list[torch.Tensor]:
        rest = iter(leaves)
        return [first_of(FUNCTIONS[name][0])(*itertools.islice(rest, len(tensors[name]))) for name in names]

    results = []
    for function in (run, torch.compile(run, backend=compiler, fullgraph=True)):
        leaves = [tensor.clone().requires_grad_() for group in tensors.values() for tensor in group]
        outputs = function(*leaves)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        results.append([*outputs, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_fusion_attention_compiled_for_other_shapes(rng: torch.Generator) -> None:
    """The second call makes sizes symbolic. Its checks of shapes once took minutes to simplify."""
    compiled = torch.compile(first_of(_fused), backend="aot_eager", fullgraph=True)
    for batch, seqlen_q, seqlen_k, rows in ((2, 5, 5, 1), (3, 7, 9, 3)):
        sizes = [(batch, seqlen_q, 2, 4), *[(batch, seqlen_k, 1, 4)] * 2, (rows, 2, seqlen_q, seqlen_k)]
        tensors = [torch.randn(size, generator=rng) for size in sizes]
        torch.testing.assert_close(compiled(*tensors), _fused(*tensors)[0])


class _Attention(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        padding = torch.full((query.shape[0],), 4, dtype=torch.int32)
        masked = kernl.ops.attention(query, key, value, attn_mask=bias, key_padding=padding, is_causal=True)
        aligned = kernl.ops.attention(
            query, key, value, window=(3, 0), q_offset=key.shape[2] - query.shape[2], return_logsumexp=True
        )
        return masked + aligned[0] * aligned[1].exp()[..., None]


class _Fusion(torch.nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        down = fusion_attention(query, key, value, 2, "BNSD", scale=0.5, sparse_mode=3, atten_mask=_TRIANGLE)
        options = {"pre_tockens": 4, "next_tockens": 2, "sparse_mode": 4, "atten_mask": _TRIANGLE}
        band = fusion_attention(query, key, value, 2, "BNSD", scale=0.5, **options)
        return down.attention_out, down.softmax_max, band.attention_out, band.softmax_sum


@pytest.mark.parametrize("kind", ["attention", "fusion_attention"])
def test_exported_for_all_batches_and_lengths(kind: str, rng: torch.Generator) -> None:
    def inputs(batch: int, seqlen_q: int, seqlen_k: int) -> tuple[torch.Tensor, ...]:
        query, key, value = (
            torch.randn(batch, heads, tokens, 4, generator=rng)
            for heads, tokens in ((2, seqlen_q), (1, seqlen_k), (1, seqlen_k))
        )
        bias = torch.randn(2, seqlen_q, seqlen_k, generator=rng)
        return (query, key, value, bias) if kind == "attention" else (query, key, value)

    module = _Attention() if kind == "attention" else _Fusion()
    batch, seqlen_q, seqlen_k = (torch.export.Dim(name, max=2048) for name in ("batch", "seqlen_q", "seqlen_k"))
    if kind == "fusion_attention":
        batch = torch.export.Dim("batch", max=256)  # no more in the original
    shapes = [{0: batch, 2: seqlen_q}, {0: batch, 2: seqlen_k}, {0: batch, 2: seqlen_k}, {1: seqlen_q, 2: seqlen_k}]
    example = inputs(2, 5, 7)
    program = torch.export.export(module, example, dynamic_shapes=tuple(shapes[: len(example)]))
    for sizes in ((2, 5, 7), (3, 11, 6), (5, 2, 30)):
        others = inputs(*sizes)
        torch.testing.assert_close(program.module()(*others), module(*others))


# Autocast

NOT_CAST = {"layer_norm", "add_layer_norm", "rms_norm", "add_rms_norm", "embedding_sum"}


@each_function
def test_autocast(name: str, rng: torch.Generator) -> None:
    """Matrix products and attention in its type, as PyTorch has it on a CPU; gradients in the types of the operands."""
    function = first_of(FUNCTIONS[name][0])
    leaves = [tensor.requires_grad_() for tensor in drawn(name, rng)]
    with torch.autocast("cpu", torch.bfloat16):
        output = function(*leaves)
    expected = torch.float32 if name in NOT_CAST else torch.bfloat16
    assert output.dtype == expected
    want = function(*(leaf.to(expected) for leaf in leaves))
    torch.testing.assert_close(output, want, rtol=1e-2, atol=1e-2)
    for leaf, gradient in zip(leaves, torch.autograd.grad(output.float().square().sum(), leaves)):
        assert gradient.dtype == leaf.dtype and gradient.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert function(*leaves).dtype == torch.float32


@pytest.mark.parametrize("name", ["attention", "fusion_attention", "linear", "gated_linear", "linear_attention"])
def test_autocast_takes_operands_of_several_types(name: str, rng: torch.Generator) -> None:
    """As a model has them: one from a matrix product, one from a norm."""
    function, tensors = first_of(FUNCTIONS[name][0]), drawn(name, rng)
    mixed = [tensor.bfloat16() if place % 2 else tensor for place, tensor in enumerate(tensors)]
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(function(*mixed), function(*tensors))


@pytest.mark.parametrize("dim", [0, 1])
def test_vmap_of_attention_over_nothing(dim: int) -> None:
    shape = [2, 2, 5, 8]
    shape.insert(dim, 0)
    assert vmap(kernl.ops.attention, in_dims=dim)(*(rand(*shape) for _ in range(3))).shape == (0, 2, 2, 5, 8)
