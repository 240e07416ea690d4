"""kernl.ops.attention for problems nobody picked: sizes, strides, types, masks, biases, positions, packing, dropout.

Every run draws other problems. The kernels (interpreted without a GPU) have to take each of them and to be as precise
as `kernl.testing` asks, forward and backward; the references are written out here from the definitions. A failure
prints the seed that repeats it.

    KERNL_PROPERTY_EXAMPLES=2000 pytest tests/ops/test_attention_properties.py     for a night; failures are shrunk then
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st

from kernl.ops import RelativePositionBias, attention
from kernl.ops.relative_position import relative_position_bucket
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun
from tests.ops.test_attention import LOWEST, one_by_one
from tests.ops.test_attention_dropout import kept_mask

forward_file = importlib.import_module("kernl.ops.attention")
backward_file = importlib.import_module("kernl.ops.attention_backward")

EXAMPLES = int(os.environ.get("KERNL_PROPERTY_EXAMPLES", "0"))
pytestmark = pytest.mark.timeout(60 * EXAMPLES if EXAMPLES else 300)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Of results that are too few for a budget, relative to the terms they are sums of.
TOLERANCES = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 3e-5}
ENOUGH = 100


@dataclass(frozen=True)
class Problem:
    """What is drawn; the numbers in the tensors follow from `seed`."""

    seed: int
    dtype: torch.dtype
    batch: int
    heads: int
    key_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    value_dim: int
    layouts: tuple[str, str, str, str]  # of query, key, value and the gradient that comes in
    lengths: tuple[tuple[int, int], ...] = ()  # of packed sequences; batch, seqlen_q and seqlen_k follow from them
    mask: str = ""  # kind and dimensions, "bool:bhqk"; "" for none, as in the next two
    mask_layout: str = ""
    bias: str = ""
    bias_before_scale: bool = False
    padding: str = ""
    is_causal: bool = False
    window: tuple[int, int] = (-1, -1)
    prefix: bool = False
    q_offset: int | tuple[int, ...] = 0
    offset_in_memory: bool = False
    table: str = ""
    alibi: str = ""
    softcap: float = 0.0
    scale: float | None = None
    hidden_rows: str = "zero"
    dropout_p: float = 0.0
    of_logsumexp: bool = False
    decodes: bool = False


def nothing_or(*values: Any, often: int = 2) -> st.SearchStrategy[Any]:
    """One of the values, or what stands for none of its type; the latter `often` times as often as a value."""
    return st.sampled_from([type(values[0])()] * often * len(values) + list(values))


@st.composite
def problems(draw: st.DrawFn, packed: bool, backward: bool) -> Problem:
    lengths: tuple[tuple[int, int], ...] = ()
    longest = 48 if packed else 70
    length = st.one_of(st.sampled_from([1, 16, 33, longest]), st.integers(1, longest))
    group = draw(st.sampled_from([1, 1, 2, 3]))
    key_heads = draw(st.sampled_from([1, 2]))
    if packed:
        lengths = tuple(draw(st.lists(st.tuples(st.one_of(st.just(0), length), st.one_of(st.just(0), length)),
                                      min_size=1, max_size=3)))  # fmt: skip
        tokens_q, tokens_k = (max(1, sum(each[side] for each in lengths)) for side in (0, 1))
        if sum(each[0] for each in lengths) < 1 or sum(each[1] for each in lengths) < 1:
            lengths, tokens_q, tokens_k = (*lengths, (5, 9)), tokens_q + 5, tokens_k + 9
        batch, seqlen_q, seqlen_k = len(lengths), *(max(each[side] for each in lengths) for side in (0, 1))
    else:
        batch, seqlen_q, seqlen_k = draw(st.sampled_from([1, 2])), draw(length), draw(length)
        tokens_q, tokens_k = batch * seqlen_q, batch * seqlen_k
    # As many elements as a budget needs.
    rows = min(tokens_q * group, tokens_k if backward else tokens_q * group) * key_heads
    dims = [dim for dim in (1, 3, 16, 17, 33, 40, 64, 80, 128, 200, 256) if dim * rows >= ENOUGH]
    head_dim = draw(st.sampled_from(dims[: 6 if backward else 9]))
    value_dim = draw(st.one_of(st.just(head_dim), st.sampled_from(dims[: 6 if backward else 9])))
    before_scale = draw(nothing_or(True, often=6))
    mask = draw(nothing_or("bool", "hides", "uint8", "float", "inf", "lowest"))
    bias = "" if mask in ("float", "inf", "lowest") else draw(nothing_or("float"))
    dimensions = st.sampled_from(["bhqk", "hqk", "qk", "bk", "bq", "h", "k", "q", "", "bhq"])
    offset = st.one_of(st.just(0), st.just(seqlen_k - seqlen_q), st.integers(-10, 80))
    each_row = draw(nothing_or(True, often=3)) and batch > 1
    dropout_p = draw(nothing_or(0.3, often=4))
    problem = Problem(
        seed=draw(st.integers(0, 2**32 - 1)),
        dtype=draw(st.sampled_from(DTYPES)),
        batch=batch,
        heads=key_heads * group,
        key_heads=key_heads,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        value_dim=value_dim,
        layouts=draw(st.tuples(*[st.sampled_from(list(LAYOUTS))] * 4)),
        lengths=lengths,
        mask=mask and f"{mask}:{draw(dimensions)}",
        mask_layout=draw(st.sampled_from(["", "transposed", "sliced", "every second", "expanded"])),
        bias=bias and f"{bias}:{draw(dimensions)}",
        bias_before_scale=bool(bias) and before_scale,
        padding="" if packed else draw(nothing_or("right", "left", "both", "holes", "hidden", "lengths", often=1)),
        is_causal=draw(st.booleans()),
        window=draw(st.one_of(st.just((-1, -1)), st.tuples(st.integers(-1, 40), st.integers(-1, 40)))),
        prefix=draw(nothing_or(True, often=3)),
        q_offset=tuple(draw(st.lists(offset, min_size=batch, max_size=batch))) if each_row else draw(offset),
        offset_in_memory=each_row or draw(st.booleans()),
        table=draw(nothing_or("both", "before")),
        alibi=draw(nothing_or("heads", "batch")),
        softcap=0.0 if before_scale and bias else draw(nothing_or(3.0, 30.0)),
        scale=draw(st.sampled_from([None, None, None, 0.3, -0.3, 0.0])),
        dropout_p=dropout_p,
        hidden_rows="zero" if dropout_p else draw(st.sampled_from(["zero", "mean"])),
        of_logsumexp=draw(st.booleans()),
        decodes=draw(st.booleans()),
    )
    return problem


# Tensors

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "by tokens": lambda tensor: tensor.transpose(1, 2).contiguous().transpose(1, 2),
    "by heads": lambda tensor: tensor.contiguous(),
    "dim before tokens": lambda tensor: tensor.mT.contiguous().mT,
    "sliced": lambda tensor: F.pad(tensor, (3, 2, 1, 4))[:, :, 1:-4, 3:-2],
    "every second": lambda tensor: tensor.repeat_interleave(2, -1)[..., ::2],
    "one head": lambda tensor: tensor[:, :1].expand(tensor.shape),
    "one row": lambda tensor: tensor[:1].expand(tensor.shape),
}
MASK_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda mask: mask,
    "transposed": lambda mask: mask.mT.contiguous().mT,
    "sliced": lambda mask: F.pad(mask, (3, 2, 1, 4))[..., 1:-4, 3:-2],
    "every second": lambda mask: mask.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda mask: mask,
}


@dataclass
class Call:
    """The arguments of one call. leaves: those that get gradients, by name."""

    problem: Problem
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    options: dict[str, Any]
    table: torch.Tensor | None

    @property
    def leaves(self) -> dict[str, torch.Tensor]:
        found = {"query": self.query, "key": self.key, "value": self.value, "table": self.table}
        found |= {name: self.options.get(name) for name in ("attn_mask", "bias")}
        return {name: leaf for name, leaf in found.items() if leaf is not None and leaf.is_floating_point()}

    def with_leaves(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Call:
        """A copy whose leaves are changed and detached, and require gradients."""
        changed = {name: change(leaf).detach().requires_grad_() for name, leaf in self.leaves.items()}
        options = {name: changed.get(name, option) for name, option in self.options.items()}
        operands = (changed["query"], changed["key"], changed["value"])
        return Call(self.problem, *operands, options, changed.get("table"))


def make_mask(text: str, layout: str, problem: Problem, rng: torch.Generator) -> torch.Tensor:
    kind, _, dims = text.partition(":")
    full = {"b": problem.batch, "h": problem.heads, "q": problem.seqlen_q, "k": problem.seqlen_k}
    shape = [full[dim] if dim in dims else 1 for dim in "bhqk"]
    dtype = (problem.dtype, torch.float32)[int(torch.randint(2, (), generator=rng))]
    visible = torch.rand(shape, generator=rng) > 0.4
    visible[0, 0, shape[2] // 2] = False
    mask = {
        "bool": lambda: visible,
        "hides": lambda: ~visible,
        "uint8": lambda: torch.where(visible, 0, torch.randint(1, 256, shape, generator=rng)).to(torch.uint8),
        "float": lambda: torch.randn(shape, generator=rng).to(dtype),
        "inf": lambda: torch.where(visible, 0.5, -math.inf).to(dtype),
        "lowest": lambda: torch.where(visible, 0.0, LOWEST),
    }[kind]()
    mask = MASK_LAYOUTS[layout](mask)
    if layout == "expanded":
        return mask.expand(*(full[dim] for dim in "bhqk"))
    while mask.dim() > 0 and mask.shape[0] == 1 and int(torch.randint(2, (), generator=rng)):
        mask = mask[0]
    return mask


def make_padding(problem: Problem, rng: torch.Generator) -> torch.Tensor:
    keys = torch.arange(problem.seqlen_k)
    lengths = torch.randint(1, problem.seqlen_k + 1, (problem.batch, 1), generator=rng)
    match problem.padding:
        case "right":
            return keys < lengths
        case "left":
            return keys >= problem.seqlen_k - lengths
        case "both":
            return (keys < lengths) & (keys >= lengths // 3)
        case "holes":
            return (torch.rand(problem.seqlen_k, problem.batch, generator=rng) > 0.3).T
        case "hidden":
            return (torch.arange(problem.batch) > 0)[:, None].expand(-1, problem.seqlen_k)
        case "lengths":
            lengths[0] *= int(torch.randint(2, (), generator=rng))
            return lengths[:, 0].to(torch.int32)
    raise AssertionError(problem.padding)


def make_call(problem: Problem) -> Call:
    rng = torch.Generator().manual_seed(problem.seed)
    rows, tokens_q, tokens_k = problem.batch, problem.seqlen_q, problem.seqlen_k
    options: dict[str, Any] = {"is_causal": problem.is_causal, "window": problem.window, "scale": problem.scale}
    options |= {"hidden_rows": problem.hidden_rows, "softcap": problem.softcap}
    if problem.lengths:
        rows, tokens_q, tokens_k = 1, *(sum(each[side] for each in problem.lengths) for side in (0, 1))
        bounds = torch.tensor([(0, 0), *problem.lengths]).cumsum(0)
        options |= {"cu_seqlens_q": bounds[:, 0].to(torch.int32), "cu_seqlens_k": bounds[:, 1]}
    sizes = [(problem.heads, tokens_q, problem.head_dim), (problem.key_heads, tokens_k, problem.head_dim)]
    sizes += [(problem.key_heads, tokens_k, problem.value_dim)]
    query, key, value = (
        LAYOUTS[layout](torch.randn(rows, *size, generator=rng).to(problem.dtype))
        for size, layout in zip(sizes, problem.layouts)
    )
    if problem.mask:
        options["attn_mask"] = make_mask(problem.mask, problem.mask_layout, problem, rng)
        options["mask_hides"] = problem.mask.startswith(("hides", "uint8"))
    if problem.bias:
        options |= {"bias": make_mask(problem.bias, "", problem, rng), "bias_before_scale": problem.bias_before_scale}
    if problem.padding:
        options["key_padding"] = make_padding(problem, rng)
        if problem.hidden_rows == "zero":  # means are of padded keys too
            padded = ~visible_by_padding(options["key_padding"], problem.seqlen_k)[:, None, :, None]
            if "one" not in problem.layouts[1] + problem.layouts[2]:
                key, value = key.clone().masked_fill_(padded, math.nan), value.clone().masked_fill_(padded, math.nan)
    if problem.prefix:
        options["prefix"] = torch.randint(0, problem.seqlen_k + 1, (problem.batch,), generator=rng)
    options["q_offset"] = torch.tensor(problem.q_offset) if problem.offset_in_memory else problem.q_offset
    table = torch.randn(16, problem.heads, generator=rng) if problem.table else None
    if problem.alibi:
        slopes = torch.rand(problem.heads, problem.batch, generator=rng)
        options["alibi_slopes"] = slopes[:, 0] if problem.alibi == "heads" else slopes.T
    if problem.dropout_p:
        options |= {"dropout_p": problem.dropout_p, "seed": problem.seed, "offset": problem.seed >> 3}
    return Call(problem, query, key, value, options, table)


# The references


def visible_by_padding(padding: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    return padding if padding.dtype == torch.bool else torch.arange(seqlen_k) < padding[:, None]


def pieces(call: Call) -> Iterator[tuple[Call, torch.Tensor | None]]:
    """The call, or each packed sequence with queries as a call of its own (views); and what dropout leaves of it."""
    problem, options = call.problem, call.options
    kept = None
    if problem.dropout_p:
        shape = (problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
        kept = kept_mask(problem.dropout_p, shape, options["seed"], options["offset"])
    if not problem.lengths:
        yield call, kept
        return
    start_q = start_k = 0
    for number, (length_q, length_k) in enumerate(problem.lengths):
        queries, keys = slice(start_q, start_q + length_q), slice(start_k, start_k + length_k)
        start_q, start_k = queries.stop, keys.stop
        here = slice(number, number + 1)
        alone = {name: option for name, option in options.items() if not name.startswith("cu_")}
        for name in ("attn_mask", "bias"):
            if name in alone:
                full = alone[name].expand(problem.batch, problem.heads, problem.seqlen_q, problem.seqlen_k)
                alone[name] = full[here, :, :length_q, :length_k]
        for name in ("prefix", "q_offset"):
            if name in alone and torch.is_tensor(alone[name]) and alone[name].dim() == 1:
                alone[name] = alone[name][here]
        if problem.alibi == "batch":
            alone["alibi_slopes"] = alone["alibi_slopes"][here]
        operands = (call.query[:, :, queries], call.key[:, :, keys], call.value[:, :, keys])
        sizes = replace(problem, batch=1, seqlen_q=length_q, seqlen_k=length_k, lengths=())
        if length_q:
            yield (
                Call(sizes, *operands, alone, call.table),
                None if kept is None else kept[here, :, :length_q, :length_k],
            )


@dataclass
class Parts:
    """Of one piece, everything [batch, heads, seqlen_q, seqlen_k] or broadcastable to it.

    query, key and value with padded keys zeroed and one head each; scores: what is hidden included, finite; slope: of
    the softcap; by_distance: what the table adds. rows: of hidden ones.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    scores: torch.Tensor
    slope: torch.Tensor | float
    by_distance: torch.Tensor | None
    visible: torch.Tensor
    hidden: torch.Tensor


def parts_of(call: Call, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Parts:
    """In the type of the operands."""
    problem, options, query = call.problem, call.options, call.query
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    group = problem.heads // problem.key_heads
    visible = torch.ones(problem.batch, problem.heads, seqlen_q, seqlen_k, dtype=torch.bool)
    keys, values = call.key, call.value
    if "key_padding" in options:
        unpadded = visible_by_padding(options["key_padding"], seqlen_k)
        visible = visible & unpadded[:, None, None]
        if problem.hidden_rows == "zero":
            keys, values = (torch.where(unpadded[:, None, :, None], tensor, 0.0) for tensor in (keys, values))
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (keys, values))
    scale = 1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale
    scores = product(query, key.mT)
    if problem.bias_before_scale:
        scores = scores + options["bias"].to(scores.dtype)
    scores = scores * scale
    slope: torch.Tensor | float = 1.0
    if problem.softcap:
        capped = (scores / problem.softcap).tanh()
        scores, slope = problem.softcap * capped, 1 - capped.detach().square()
    position = torch.arange(seqlen_q)[:, None] + torch.as_tensor(options["q_offset"]).view(-1, 1, 1, 1)
    distance = (torch.arange(seqlen_k) - position).expand(problem.batch, 1, seqlen_q, seqlen_k)
    if problem.alibi:
        slopes = options["alibi_slopes"].to(scores.dtype).view(-1, problem.heads, 1, 1)
        scores = scores - slopes * distance.abs()
    by_distance = None
    if call.table is not None:
        bucket = relative_position_bucket(distance.clamp(-20, 20), 16, problem.table == "both", 20)
        by_distance = call.table.to(scores.dtype)[bucket[:, 0]].permute(0, 3, 1, 2)
        scores = scores + by_distance
    for name in ("attn_mask", "bias"):
        added = options.get(name)
        if added is None or (name == "bias" and problem.bias_before_scale):
            continue
        if added.is_floating_point():
            visible = visible & (added > -math.inf)
            scores = scores + torch.where(added > -math.inf, added, 0.0).to(scores.dtype)
        else:
            visible = visible & ((added == 0) if options["mask_hides"] else added)
    near = torch.ones_like(distance, dtype=torch.bool)
    left, right = problem.window
    if problem.is_causal:
        near = near & (distance <= 0)
    if right >= 0:
        near = near & (distance <= right)
    if left >= 0:
        near = near & (distance >= -left)
    if problem.prefix:
        near = near | (torch.arange(seqlen_k) < options["prefix"].view(-1, 1, 1, 1))
    visible = visible & near
    hidden = ~visible.any(-1, keepdim=True)
    return Parts(query, key, value, scale, scores, slope, by_distance, visible, hidden)


def exact(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logsumexp in float64, differentiable."""
    call = replace_leaves_type(call, torch.float64)
    outputs, logsumexps = [], []
    for piece, kept in pieces(call):
        parts = parts_of(piece, torch.matmul)
        mean = piece.problem.hidden_rows == "mean"
        instead = 1 / max(1, piece.problem.seqlen_k) if mean else 0.0
        scores = torch.where(parts.hidden, 0.0, parts.scores.masked_fill(~parts.visible, -math.inf))
        weights = torch.where(parts.hidden, instead, scores.softmax(-1))
        if kept is not None:
            weights = weights * kept / (1 - piece.problem.dropout_p)
        outputs.append(weights @ parts.value)
        lowest = LOWEST if mean else -math.inf
        # torch.logsumexp's own gradient is off where a large mask leaves the result no digits for the sum.
        largest = scores.detach().amax(-1, keepdim=True) if piece.problem.seqlen_k else torch.zeros(())
        logsumexp = largest + (scores - largest).exp().sum(-1, keepdim=True).log()
        logsumexps.append(logsumexp.masked_fill(parts.hidden, lowest)[..., 0])
    return torch.cat(outputs, 2), torch.cat(logsumexps, 2)


def replace_leaves_type(call: Call, dtype: torch.dtype) -> Call:
    """Differentiable: the gradients reach the leaves of the given call."""
    options = {
        name: option.to(dtype) if name in ("attn_mask", "bias") and option.is_floating_point() else option
        for name, option in call.options.items()
    }
    operands = (tensor.to(dtype) for tensor in (call.query, call.key, call.value))
    return Call(call.problem, *operands, options, None if call.table is None else call.table.to(dtype))


Order = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@torch.no_grad()
def baseline(
    call: Call, product: Order, base_2: bool, grid: float, grads: tuple[torch.Tensor, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """Output and gradients by name: operands, P, dS and results rounded to the type, sums in float32.

    dS = P (dO V^T - sum_d dO O + dlse), from the rounded output, as every fused attention has it. What is rounded on
    the way is so as a multiple of `grid`: errors of the same size, and others for each grid.
    """
    problem, dtype = call.problem, call.query.dtype
    outputs = []
    totals = {name: torch.zeros(leaf.shape) for name, leaf in call.leaves.items()}
    views = replace(call, query=totals["query"], key=totals["key"], value=totals["value"])
    views.options = {name: totals.get(name, option) for name, option in call.options.items()}
    start = 0

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return (tensor * grid).to(dtype).float() / grid

    wide = replace_leaves_type(call, torch.float32)
    for (piece, kept), (total, _) in zip(pieces(wide), pieces(views)):
        parts = parts_of(piece, product)
        group, seqlen_k = problem.heads // problem.key_heads, piece.problem.seqlen_k
        scores = parts.scores.masked_fill(~parts.visible, -math.inf)
        logsumexp = scores.logsumexp(-1, keepdim=True) if seqlen_k else scores.new_zeros(*scores.shape[:3], 1)
        logsumexp = logsumexp.masked_fill(parts.hidden, 0.0)
        log2e = math.log2(math.e)
        weights = (scores * log2e - logsumexp * log2e).exp2() if base_2 else (scores - logsumexp).exp()
        anew = scores.masked_fill(parts.hidden, 0.0).softmax(-1)  # large masks leave logsumexp no digits for the sum
        weights = torch.where(logsumexp.abs() > 256, anew, weights).masked_fill(parts.hidden, 0.0)
        factors = 1.0 if kept is None else kept / (1 - problem.dropout_p)
        output = product(rounded(weights * factors), parts.value)
        if problem.hidden_rows == "mean" and seqlen_k:
            output = torch.where(parts.hidden, parts.value.mean(2, keepdim=True), output)
        outputs.append(output.to(dtype).float())
        if grads is None:
            continue
        here = slice(start, start + piece.problem.seqlen_q) if problem.lengths else slice(None)
        start += piece.problem.seqlen_q
        grad_output, grad_logsumexp = grads[0][:, :, here].float(), grads[1][:, :, here, None]
        delta = (grad_output * rounded(output)).sum(-1, keepdim=True) - grad_logsumexp
        grad_scores = weights * (product(grad_output, parts.value.mT) * factors - delta)
        grad_products = rounded(grad_scores * parts.slope)
        grad_key = product(grad_products.mT, parts.query) * parts.scale
        grad_value = product(rounded(weights * factors).mT, grad_output)
        if "key_padding" in piece.options:
            unpadded = visible_by_padding(piece.options["key_padding"], seqlen_k)[:, None, :, None]
            grad_key, grad_value = grad_key * unpadded, grad_value * unpadded
        if problem.hidden_rows == "mean" and seqlen_k:
            grad_value = grad_value + (grad_output * parts.hidden).sum(2, keepdim=True) / seqlen_k
        total.query.add_(product(grad_products, parts.key) * parts.scale)
        total.key.add_(grad_key.unflatten(1, (-1, group)).sum(2))
        total.value.add_(grad_value.unflatten(1, (-1, group)).sum(2))
        for name in ("attn_mask", "bias"):
            if name in totals:
                before = name == "bias" and problem.bias_before_scale
                grad = grad_scores * parts.slope * parts.scale if before else grad_scores
                if problem.lengths:
                    padding = (0, problem.seqlen_k - seqlen_k, 0, problem.seqlen_q - piece.problem.seqlen_q)
                    full = torch.zeros(problem.batch, *grad.shape[1:2], problem.seqlen_q, problem.seqlen_k)
                    full[len(outputs) - 1 + skipped(problem, len(outputs))] = F.pad(grad, padding)[0]
                    grad = full
                totals[name] += grad.sum_to_size(totals[name].shape)
        if piece.table is not None:
            with torch.enable_grad():
                table = piece.table.detach().requires_grad_()
                added = parts_of(replace(piece, table=table), torch.matmul).by_distance
                assert added is not None
                totals["table"] += torch.autograd.grad(added, table, grad_scores)[0]
    results = {name: total.to(call.leaves[name].dtype) for name, total in totals.items()} if grads else {}
    return {**results, "output": torch.cat(outputs, 2).to(dtype)}


def skipped(problem: Problem, pieces_so_far: int) -> int:
    """Sequences without queries before the last of so many with some."""
    numbers = [number for number, (length_q, _) in enumerate(problem.lengths) if length_q]
    return numbers[pieces_so_far - 1] - (pieces_so_far - 1)


def baselines(call: Call, grads: tuple[torch.Tensor, torch.Tensor] | None) -> list[dict[str, torch.Tensor]]:
    """Several: one order of summation, one way to exponentiate and to round say little about how far others are off."""
    rng = torch.Generator().manual_seed(call.problem.seed)
    draws = [baseline(call, torch.matmul, False, grid, grads) for grid in (1.0, 1.13, 1.29)]
    for base_2, grid in ((False, 1.43), (True, 1.61), (True, 1.87)):
        dims = torch.randperm(call.problem.head_dim, generator=rng)
        shuffled = replace(call, query=call.query[..., dims], key=call.key[..., dims])
        draw = baseline(shuffled, one_by_one, base_2, grid, grads)
        draws.append({name: part[..., dims.argsort()] if name in ("query", "key") else part
                      for name, part in draw.items()})  # fmt: skip
    return draws


def compare(
    name: str,
    found: torch.Tensor,
    expected: torch.Tensor,
    draws: list[dict[str, torch.Tensor]],
    independent: int,
    terms: torch.Tensor | float,
) -> None:
    """Within the budget; of few independent values, within a tolerance relative to the terms they are sums of."""
    expected, found = expected.detach(), found.detach().cpu()
    assert found.dtype == draws[0][name].dtype, name
    if min(independent, expected.unique().numel()) >= ENOUGH:
        worst = max((draw[name] for draw in draws), key=lambda draw: float((draw.double() - expected).abs().max()))
        assert_within_budget(found, expected, worst, name=name)
        return
    difference = (found.double() - expected).abs()
    allowed = TOLERANCES[draws[0]["output"].dtype] * (1 + terms)
    assert (difference <= allowed).all(), f"{name}: off by {difference.max()}, allowed {allowed}"


# The tests


@pytest.fixture
def tries(rng: torch.Generator) -> Callable[..., Any]:
    """Decorate a function of one problem and run it for several, drawn from the test's seed."""

    def run_for(strategy: st.SearchStrategy[Problem], examples: int) -> Callable[[Callable[[Problem], None]], None]:
        settings = hypothesis.settings(
            max_examples=EXAMPLES or examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if EXAMPLES else [Phase.generate],
            print_blob=False,
        )

        def decorate(check: Callable[[Problem], None]) -> None:
            hypothesis.seed(rng.initial_seed())(settings(hypothesis.given(strategy)(check)))()

        return decorate

    return run_for


def on(device: torch.device, call: Call) -> Call:
    def there(part: Any) -> Any:
        return part.to(device) if torch.is_tensor(part) else part

    options = {name: there(option) for name, option in call.options.items()}
    return Call(call.problem, there(call.query), there(call.key), there(call.value), options, there(call.table))


def run(call: Call) -> tuple[torch.Tensor, ...]:
    options = dict(call.options)
    if call.table is not None:
        options["relative_position_bias"] = RelativePositionBias(call.table, call.problem.table == "both", 20)
    return attention(call.query, call.key, call.value, return_logsumexp=True, **options)


def launched(kernels: KernelRun) -> int:
    return kernels.launched("attention_forward") + kernels.launched("attention_decode")


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_forward(packed: bool, kernels: KernelRun, tries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @tries(problems(packed, False), 15)
    def check(problem: Problem) -> None:
        monkeypatch.setattr(forward_file, "prefers_decode", lambda *_: problem.decodes)
        call, before = make_call(problem), launched(kernels)
        output, logsumexp = run(on(kernels.device, call))
        assert launched(kernels) == before + 1
        assert output.transpose(1, 2).is_contiguous() and logsumexp.dtype == torch.float32
        expected, expected_logsumexp = exact(call)
        compare("output", output, expected, baselines(call, None), expected.numel(), 1.0)
        torch.testing.assert_close(logsumexp.cpu().double(), expected_logsumexp, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_gradients(packed: bool, kernels: KernelRun, tries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of query, key, value, a float mask, a bias and the table of a bias by distance (this one by formulas)."""

    def first(op: str, problem: object, candidates: Callable[[], Any], **_: object) -> str:
        return str(candidates()[0].name)

    monkeypatch.setattr(backward_file, "choose", first)  # on a GPU the formulas are the default

    @tries(problems(packed, True), 10)
    def check(problem: Problem) -> None:
        call = make_call(problem)
        rng = torch.Generator().manual_seed(problem.seed + 1)
        there = on(kernels.device, call).with_leaves(lambda leaf: leaf)
        output, logsumexp = run(there)
        grad_output = LAYOUTS[problem.layouts[3]](torch.randn(output.shape, generator=rng).to(problem.dtype))
        grad_logsumexp = torch.randn(logsumexp.shape, generator=rng) * problem.of_logsumexp
        before = kernels.launched("attention_backward")
        wanted = (output, logsumexp) if problem.of_logsumexp else (output,)
        grads = (grad_output, grad_logsumexp)
        found = torch.autograd.grad(wanted, tuple(there.leaves.values()),
                                    [grad.to(kernels.device) for grad in grads[: len(wanted)]])  # fmt: skip
        assert kernels.launched("attention_backward") == before + (call.table is None)

        wide = call.with_leaves(torch.Tensor.double)
        results = exact(wide)[: len(wanted)]
        expected = torch.autograd.grad(
            results, tuple(wide.leaves.values()), [grad.double() for grad in grads[: len(wanted)]]
        )
        pairs, terms = independent_pairs(call)
        draws = baselines(call, grads)
        for name, one, other in zip(there.leaves, found, expected):
            compare(name, one, other, draws, pairs, terms)


def independent_pairs(call: Call) -> tuple[int, float]:
    """Pairs of a query and a key that see each other, and how large a gradient's terms may be in all."""
    count = sum(
        int(parts_of(piece, torch.matmul).visible.sum())
        for piece, _ in pieces(replace_leaves_type(call, torch.float32))
    )
    return count, 4.0 * math.sqrt(call.problem.value_dim)
