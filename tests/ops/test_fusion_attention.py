"""kernl.ops.fusion_attention against a dense oracle in float64, written from the formulas of the contract."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernl.ops.fusion_attention import fusion_attention
from kernl.testing import assert_within_budget
from tests.conftest import KernelRun
from tests.ops.test_attention_dropout import kept_mask

HUGE = 2147483647
TRIANGLE = torch.ones(2048, 2048, dtype=torch.uint8).triu(1)


def visible_pairs(
    options: dict[str, Any], batch: int, seqlen_q: int, seqlen_k: int, row: int | None = None
) -> torch.Tensor:
    """bool [batch, 1 or heads, seqlen_q, seqlen_k], pair by pair. row: of a packed batch, the sequence this is."""
    mode, mask = options.get("sparse_mode", 0), options.get("atten_mask")
    i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)[None, :]
    everything = torch.ones(batch, 1, seqlen_q, seqlen_k, dtype=torch.bool)
    if mask is None:
        return everything
    before, after = options.get("pre_tockens", HUGE), options.get("next_tockens", HUGE)
    shift = seqlen_k - seqlen_q
    given = (mask[..., :seqlen_q, :seqlen_k] == 0) if mode in (0, 1, 5) else everything
    if mode == 0:
        return everything & given & (j >= i - before) & (j <= i + after)
    if mode == 1:
        return everything & given
    if mode == 2:
        return everything & (j <= i)
    if mode == 3:
        return everything & (j <= i + shift)
    if mode == 4:
        return everything & (j >= i + shift - before) & (j <= i + shift + after)
    prefix = torch.as_tensor(options["prefix"]).view(-1, 1, 1, 1)
    prefix = prefix if row is None else prefix[row : row + 1]
    return everything & given & ((j <= i + shift) | (j < prefix))


def dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
    kept: torch.Tensor | None = None,
    rounding: torch.dtype | None = None,
    row: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, maximum, sum) of operands [batch, heads, seqlen, head_dim]."""
    batch, heads, seqlen_q, _ = query.shape
    group = heads // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT
    if options.get("pse") is not None:
        pse = options["pse"].to(scores.dtype)
        if pse.shape[2] == 1024 < seqlen_q:
            full = torch.zeros(*pse.shape[:2], seqlen_q, pse.shape[3], dtype=pse.dtype)
            for i in range(seqlen_q):
                moved = max(seqlen_q - 1024 - i, 0)
                full[:, :, i, : pse.shape[3] - moved] = pse[:, :, max(i - (seqlen_q - 1024), 0), moved:]
            pse = full
        scores = scores + pse
    scores = scores * options.get("scale", 1.0)
    scores = scores.masked_fill(~visible_pairs(options, batch, seqlen_q, key.shape[2], row), float("-inf"))
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - maximum.clamp(min=-1e30)).exp()
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.clamp(min=1e-30)
    if rounding is not None:
        weights = weights.to(rounding).to(value.dtype)
    if kept is not None:
        weights = weights * kept / options["keep_prob"]
    return weights @ value, maximum[..., 0], total[..., 0]


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """[batch, heads, seqlen, head_dim] in another layout, contiguous there."""
    by_tokens = tensor.transpose(1, 2)
    return {
        "BNSD": tensor,
        "BSND": by_tokens,
        "BSH": by_tokens.flatten(2),
        "SBH": by_tokens.transpose(0, 1).flatten(2),
    }[layout].contiguous()


def draw(
    rng: torch.Generator,
    dtype: torch.dtype,
    heads: int,
    key_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int = 16,
) -> list[torch.Tensor]:
    sizes = ((heads, seqlen_q), (key_heads, seqlen_k), (key_heads, seqlen_k))
    return [torch.randn(2, *size, head_dim, generator=rng).to(dtype) for size in sizes]


def options_of(name: str, heads: int, seqlen_q: int, seqlen_k: int, dtype: Any, rng: torch.Generator) -> dict[str, Any]:
    """One combination of mode, mask and pse by name."""

    def mask(*shape: int) -> torch.Tensor:
        hidden = torch.rand(*shape, seqlen_q, seqlen_k, generator=rng) > 0.6
        hidden[..., seqlen_q // 2, :] = True  # a row that sees nothing
        return hidden

    def pse(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, seqlen_q, seqlen_k, generator=rng).to(dtype)

    return {
        "default": {},
        "default-no-mask-ignores-the-band": {"pre_tockens": 3, "next_tockens": 0},
        "default-mask": {"atten_mask": mask(2, heads)},
        "default-band": {"atten_mask": mask(2, 1).to(torch.uint8), "pre_tockens": 7, "next_tockens": 2},
        "default-band-left": {"atten_mask": mask(1, 1), "pre_tockens": 9, "next_tockens": -3, "pse": pse(2, heads)},
        "default-band-right": {"atten_mask": mask(), "pre_tockens": -2, "next_tockens": 11},
        "all-mask": {"sparse_mode": 1, "atten_mask": mask(), "pre_tockens": 1, "next_tockens": 1, "pse": pse(1, heads)},
        "all": {"sparse_mode": 1, "pre_tockens": 65536, "next_tockens": 65536},
        "left-up": {"sparse_mode": 2, "atten_mask": TRIANGLE, "pse": pse(2, 1)},
        "left-up-full-mask": {"sparse_mode": 2, "atten_mask": torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)},
        "right-down": {"sparse_mode": 3, "atten_mask": TRIANGLE.bool(), "pse": pse(2, heads)},
        "band": {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": 12, "next_tockens": 5},
        "band-left": {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": 12, "next_tockens": -4},
        "band-huge": {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": HUGE, "next_tockens": 0},
        "prefix": {"sparse_mode": 5, "atten_mask": mask(2, 1), "prefix": [3, seqlen_k - 1]},
        "prefix-tensor": {"sparse_mode": 5, "atten_mask": mask(2, heads), "prefix": torch.tensor([0, 9]),
                          "pse": pse(2, heads)},
    }[name]  # fmt: skip


NAMES = (
    "default", "default-no-mask-ignores-the-band", "default-mask", "default-band", "default-band-left",
    "default-band-right", "all-mask", "all", "left-up", "left-up-full-mask", "right-down", "band", "band-left",
    "band-huge", "prefix", "prefix-tensor",
)  # fmt: skip
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEADS = ((2, 2), (4, 2), (4, 1))
LENGTHS = ((33, 70), (70, 33), (17, 17))


def compare(
    result: Any, tensors: Sequence[torch.Tensor], options: dict[str, Any], layout: str, kept: torch.Tensor | None = None
) -> None:
    output, maximum, total = dense(*(tensor.double() for tensor in tensors), options, kept)
    baseline = dense(*(tensor.float() for tensor in tensors), options, kept, tensors[0].dtype)[0]
    rounded = baseline.to(tensors[0].dtype)
    assert_within_budget(result.attention_out.cpu(), laid_out(output, layout), laid_out(rounded, layout), name=layout)
    for found, expected in ((result.softmax_max, maximum), (result.softmax_sum, total)):
        assert found.shape == (*expected.shape, 8) and found.dtype == torch.float32 and found.stride(-1) == 0
        torch.testing.assert_close(found[..., 3].cpu().double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("number", "name"), list(enumerate(NAMES)), ids=lambda part: part if isinstance(part, str) else ""
)
def test_kernel(number: int, name: str, rng: torch.Generator, kernels: KernelRun) -> None:
    """Each combination in one layout, type, head ratio and pair of lengths."""
    dtype, layout = DTYPES[number % 3], ("BSH", "SBH", "BSND", "BNSD")[number % 4]
    (heads, key_heads), lengths = HEADS[number // 2 % 3], LENGTHS[number // 3 % 3]
    tensors = draw(rng, dtype, heads, key_heads, *lengths)
    options = {**options_of(name, heads, *lengths, dtype, rng), "scale": 0.3}
    there = [laid_out(tensor, layout).to(kernels.device) for tensor in tensors]
    moved = {key: part.to(kernels.device) if torch.is_tensor(part) else part for key, part in options.items()}
    result = fusion_attention(*there, heads, layout, **moved)
    assert kernels.launched("attention_forward") + kernels.launched("attention_decode") == 1
    assert result.reserved.numel() == 0 and result.mask_length == 2 * heads * lengths[0] * lengths[1]
    compare(result, tensors, options, layout)


@pytest.mark.parametrize("layout", ("BSH", "SBH", "BSND", "BNSD"))
def test_every_combination_by_formulas(layout: str, rng: torch.Generator) -> None:
    """Layouts x modes and masks x head ratios x lengths."""
    for name, (heads, key_heads), lengths in itertools.product(NAMES, HEADS, LENGTHS):
        tensors = draw(rng, torch.float32, heads, key_heads, *lengths)
        options = {**options_of(name, heads, *lengths, torch.float32, rng), "scale": 0.3}
        result = fusion_attention(*(laid_out(tensor, layout) for tensor in tensors), heads, layout, **options)
        output, maximum, total = dense(*(tensor.double() for tensor in tensors), options)
        torch.testing.assert_close(result.attention_out.double(), laid_out(output, layout), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.softmax_max[..., 0].double(), maximum, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(result.softmax_sum[..., 7].double(), total, rtol=1e-4, atol=1e-5)


ENDS_Q, ENDS_K = [20, 20, 25, 58], [31, 40, 40, 75]


@pytest.mark.parametrize("name", ("none", "default", "left-up", "right-down", "band", "prefix", "dropout"))
@pytest.mark.parametrize("how", ("kernel", "formulas"))
def test_packed(name: str, how: str, rng: torch.Generator, kernels: KernelRun) -> None:
    query = torch.randn(ENDS_Q[-1], 4, 16, generator=rng)
    key, value = (torch.randn(ENDS_K[-1], 2, 16, generator=rng) for _ in range(2))
    hidden = torch.rand(33, 35, generator=rng) > 0.7
    options: dict[str, Any] = {
        "none": {},
        "default": {"atten_mask": hidden, "pre_tockens": 8, "next_tockens": 3},
        "left-up": {"sparse_mode": 2, "atten_mask": TRIANGLE},
        "right-down": {"sparse_mode": 3, "atten_mask": TRIANGLE},
        "band": {"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": 9, "next_tockens": -1},
        "prefix": {"sparse_mode": 5, "atten_mask": hidden, "prefix": [2, 5, 0, 30]},
        "dropout": {"keep_prob": 0.7},
    }[name]
    device = kernels.device if how == "kernel" else torch.device("cpu")
    there = [(tensor.double() if how == "formulas" else tensor).to(device) for tensor in (query, key, value)]
    moved = {key: part.to(device) if torch.is_tensor(part) else part for key, part in options.items()}
    ends = (ENDS_Q, torch.tensor(ENDS_K)) if name == "none" else (ENDS_Q, ENDS_K)
    result = fusion_attention(*there, 4, "TND", actual_seq_qlen=ends[0], actual_seq_kvlen=ends[1], scale=0.25, **moved)
    assert kernels.launched("attention_forward") == (how == "kernel")
    assert result.softmax_max.shape == (58, 4, 8)
    bits, starts = 0, [(0, 0), *zip(ENDS_Q, ENDS_K)]
    kept_everywhere = kept_mask(0.3, (4, 4, 33, 35), result.seed, result.offset) if name == "dropout" else None
    for row, ((first_q, first_k), end_q, end_k) in enumerate(zip(starts, ENDS_Q, ENDS_K)):
        length_q, length_k = end_q - first_q, end_k - first_k
        bits += 4 * length_q * length_k
        found = result.attention_out[first_q:end_q].cpu()
        if length_q == 0 or length_k == 0:
            assert (found == 0).all()
            continue
        alone = [query[first_q:end_q], key[first_k:end_k], value[first_k:end_k]]
        operands = [tensor.transpose(0, 1)[None].double() for tensor in alone]
        kept = None if kept_everywhere is None else kept_everywhere[row : row + 1, :, :length_q, :length_k]
        output, maximum, total = dense(*operands, {**options, "scale": 0.25}, kept, row=row)
        torch.testing.assert_close(found.double(), output[0].transpose(0, 1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            result.softmax_max[first_q:end_q, :, 0].cpu().double(), maximum[0].T, rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            result.softmax_sum[first_q:end_q, :, 0].cpu().double(), total[0].T, rtol=1e-4, atol=1e-5
        )
    assert result.mask_length == bits


@pytest.mark.parametrize("name", ("default-band-left", "left-up", "prefix-tensor"))
def test_gradients(name: str, rng: torch.Generator) -> None:
    tensors = draw(rng, torch.float64, 4, 2, 17, 17)
    options = {**options_of(name, 4, 17, 17, torch.float64, rng), "scale": 0.3}
    options["pse"] = options["pse"].requires_grad_()
    leaves = [*(tensor.requires_grad_() for tensor in tensors), options["pse"]]
    result = fusion_attention(*(laid_out(tensor, "BSH") for tensor in tensors), 4, "BSH", **options)
    weights = torch.randn(result.attention_out.shape, generator=rng, dtype=torch.float64)
    want = laid_out(dense(*tensors, options)[0], "BSH")
    got = torch.autograd.grad((result.attention_out * weights).sum(), leaves)
    for one, other in zip(got, torch.autograd.grad((want * weights).sum(), leaves)):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8)


def test_the_last_1024_rows_of_alibi(rng: torch.Generator) -> None:
    """Given as ALiBi makes them, the other rows follow."""
    tokens, slopes = 1100, torch.tensor([0.5, 0.1])
    tensors = draw(rng, torch.float32, 2, 1, tokens, tokens, 8)
    distance = torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None]
    full = (slopes[:, None, None] * distance)[None]
    options = {"sparse_mode": 2, "atten_mask": TRIANGLE, "pse": full[:, :, -1024:].contiguous()}
    result = fusion_attention(*tensors, 2, "BNSD", **options)
    for pse in (options["pse"], full):
        want = dense(*(tensor.double() for tensor in tensors), {**options, "pse": pse})[0]
        torch.testing.assert_close(result.attention_out.double(), want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="pse: got the last 1024 rows with requires_grad"):
        fusion_attention(*tensors, 2, "BNSD", **{**options, "pse": options["pse"].requires_grad_()})


def test_dropout_is_reproduced_by_seed_and_offset(rng: torch.Generator, kernels: KernelRun) -> None:
    tensors = draw(rng, torch.float32, 4, 2, 33, 40)
    options = {"keep_prob": 0.6, "scale": 0.3}
    result = fusion_attention(*(tensor.to(kernels.device) for tensor in tensors), 4, "BNSD", **options)
    assert isinstance(result.seed, int) and isinstance(result.offset, int)
    compare(result, tensors, options, "BNSD", kept_mask(0.4, (2, 4, 33, 40), result.seed, result.offset))


@pytest.mark.parametrize(
    "setting", [(0, 128, 128), (1, 65536, 65536), (2, 65536, 0), (3, 65536, 0), (4, 128, 128)], ids=str
)
def test_the_originals_own_acceptance(setting: tuple[int, int, int], rng: torch.Generator) -> None:
    mode, before, after = setting
    query, key, value = (torch.randn(1, 8, 256, 256, generator=rng).half() for _ in range(3))
    i = torch.arange(256)
    mask = {
        0: (i[None] > i[:, None] + 128) | (i[None] < i[:, None] - 128),
        1: None,
    }.get(mode, TRIANGLE)
    options = {"sparse_mode": mode, "atten_mask": mask, "pre_tockens": before, "next_tockens": after, "scale": 0.08838}
    result = fusion_attention(query, key, value, 8, "BNSD", **options)
    want = dense(query.double(), key.double(), value.double(), options)[0]
    assert ((result.attention_out - want).abs() <= 0.01 * want.abs().clamp(min=0.05)).all()


def test_under_compile(rng: torch.Generator) -> None:
    tensors = draw(rng, torch.float32, 4, 2, 17, 17)

    def run(*operands: torch.Tensor) -> Any:
        return fusion_attention(*operands, 4, "BNSD", scale=0.3, sparse_mode=3, atten_mask=TRIANGLE, keep_prob=0.9)

    result = torch.compile(run, backend="aot_eager", fullgraph=True)(*tensors)
    assert torch.is_tensor(result.seed) and torch.is_tensor(result.offset)
    kept = kept_mask(0.1, (2, 4, 17, 17), int(result.seed), int(result.offset))
    options = {"sparse_mode": 3, "atten_mask": TRIANGLE, "scale": 0.3, "keep_prob": 0.9}
    want = dense(*(tensor.double() for tensor in tensors), options, kept)[0]
    torch.testing.assert_close(result.attention_out.double(), want, rtol=1e-4, atol=1e-5)


_HIDDEN = torch.ones(2, 1, 5, 5, dtype=torch.bool)
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"input_layout": "BNHD"}, ValueError, "input_layout: got 'BNHD', accepted BSH"),
    ({"sparse_mode": 6}, NotImplementedError, r"sparse_mode: 6 \(global\) is not supported"),
    ({"sparse_mode": 8}, NotImplementedError, "block-local"),
    ({"sparse_mode": 9}, ValueError, "sparse_mode: got 9, accepted 0 to 5"),
    ({"sparse_mode": 2}, ValueError, "atten_mask: got None with sparse_mode 2"),
    ({"sparse_mode": 5}, ValueError, "atten_mask: got None with sparse_mode 5"),
    ({"sparse_mode": 4, "atten_mask": torch.ones(5, 5).bool()}, ValueError, r"atten_mask: got shape \[5, 5\] with"),
    ({"sparse_mode": 3, "atten_mask": torch.ones(5, 6).bool()}, ValueError, r"atten_mask: got shape \[5, 6\] with"),
    ({"sparse_mode": 5, "atten_mask": torch.ones(5, 5).bool()}, ValueError, r"atten_mask: got shape \[5, 5\] with"),
    ({"sparse_mode": 5, "atten_mask": torch.ones(2, 1, 5, 5).bool()}, ValueError, "prefix: got None"),
    ({"sparse_mode": 5, "atten_mask": _HIDDEN, "prefix": [1]}, ValueError, r"prefix: got shape \[1\]"),
    ({"atten_mask": torch.ones(1, 2, 5, 5).bool()}, ValueError, "atten_mask: got shape"),
    ({"atten_mask": torch.ones(5, 5)}, ValueError, "atten_mask: got torch.float32, accepted bool or uint8"),
    ({"atten_mask": _HIDDEN, "next_tockens": -3, "pre_tockens": 3}, ValueError, "pre_tockens, next_tockens: got 3 and"),
    ({"atten_mask": _HIDDEN, "next_tockens": 1, "pre_tockens": -3}, ValueError, "pre_tockens, next_tockens: got -3"),
    ({"padding_mask": torch.ones(2, 5)}, ValueError, "padding_mask: got one, accepted None"),
    ({"keep_prob": 0.0}, ValueError, "keep_prob: got 0.0"),
    ({"inner_precise": 3}, ValueError, "inner_precise: got 3"),
    ({"head_num": 3}, ValueError, "head_num: got 3, accepted the heads of query, 2"),
    ({"value": torch.ones(2, 2, 5, 8)}, ValueError, r"value: got shape \[2, 2, 5, 8\], accepted key's"),
    ({"pse": torch.ones(2, 2, 5, 5).half()}, ValueError, "pse: got torch.float16, accepted query's type"),
    ({"pse": torch.ones(1, 1, 5, 5)}, ValueError, "pse: got shape"),
    ({"actual_seq_qlen": [5]}, ValueError, "actual_seq_qlen: got one with input_layout 'BNSD'"),
    ({"input_layout": "TND"}, ValueError, "query: got shape"),
    ({"input_layout": "BSH"}, ValueError, "query: got shape"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), BAD, ids=lambda part: part if isinstance(part, str) else "")
def test_errors_name_the_argument_and_the_rule(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {name: torch.ones(2, 2, 5, 16) for name in ("query", "key", "value")}
    arguments |= {"head_num": 2, "input_layout": "BNSD", **change}
    with pytest.raises(kind, match=message):
        fusion_attention(**arguments)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((None, [5]), "actual_seq_qlen: got None with input_layout 'TND'"),
        (([5, 3, 5], [5, 5, 5]), r"actual_seq_qlen: got \[5, 3, 5\], accepted cumulative"),
        (([2, 4], [2, 5]), r"actual_seq_qlen: got \[2, 4\], accepted cumulative"),
        (([2, 5], [5]), "actual_seq_kvlen: got 1 lengths"),
        (([2.0, 5.0], [2, 5]), "actual_seq_qlen: got .*, accepted ints"),
    ],
)
def test_lengths_that_do_not_fit(lengths: tuple[Any, Any], message: str) -> None:
    tensor = torch.ones(5, 2, 16)
    with pytest.raises(ValueError, match=message):
        fusion_attention(tensor, tensor, tensor, 2, "TND", actual_seq_qlen=lengths[0], actual_seq_kvlen=lengths[1])
