"""Attention: softmax(scale * Q K^T, masked) V.

    torch.ops.kernl.attention           the op the patterns emit: (output, logsumexp), everything spelled out
    torch.ops.kernl.attention_backward  its gradient, in plain PyTorch
    kernl.ops.attention                 the validated function to call
    reference_attention                 the formulas, in any floating-point type

Which implementation runs. On a GPU from Ampere on: one of the tilings of kernl's kernel, or, where nothing is masked,
PyTorch's FlashAttention-2 or cuDNN if that measured faster for this class of problem. Everywhere else, for float64, for
a head_dim over 256 (over 128 for float32 without TF32) and for no keys at all: plain PyTorch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import torch
import triton

from kernl.kernels.attention import (
    MAX_HEAD_DIM,
    Configuration,
    alignment_of,
    attention_forward,
    block_of,
    configurations,
    default_configuration,
    supports_tma,
)
from kernl.ops.common import Ahead, cast, define_op, empty, kernel_runs_on, on_device_of, use_pdl
from kernl.runtime.capability import capability_of
from kernl.runtime.tuning import Candidate, choose

HIDDEN_ROWS = ("zero", "mean")
"""What a query that sees no key gets: zero, or the mean of all values."""

# From this many scores on cuDNN is ahead where nothing is masked (H200).
_SCORES_FOR_CUDNN = 2**25
# Scores held in memory at a time by the backward pass.
_BACKWARD_SCORES = 2**25


def allocate_outputs(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """output [batch, heads, seqlen_q, value_dim], contiguous as [batch, seqlen_q, heads, value_dim], and logsumexp.

    In that layout `output.transpose(1, 2).reshape(batch, seqlen_q, heads * value_dim)` copies nothing.
    """
    output = _empty_by_rows(query, value.shape[3])
    return output, empty(query.shape[:3], dtype=torch.float32, device=query.device)


def _empty_by_rows(like: torch.Tensor, dim: int) -> torch.Tensor:
    batch, heads, seqlen, _ = like.shape
    return empty((batch, seqlen, heads, dim), dtype=like.dtype, device=like.device).transpose(1, 2)


def _in_output_layout(
    output: torch.Tensor, logsumexp: torch.Tensor, query: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The given results, copied only where they are laid out in another way than `allocate_outputs` does."""
    expected_output, expected_logsumexp = allocate_outputs(query, value)
    if output.dtype != expected_output.dtype or not output.transpose(1, 2).is_contiguous():
        output = expected_output.copy_(output)
    if logsumexp.dtype != torch.float32 or not logsumexp.is_contiguous():
        logsumexp = expected_logsumexp.copy_(logsumexp)
    return output, logsumexp


# The reference


def _visible_keys(
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    is_causal: bool,
    rows: range,
    seqlen_k: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Which keys the queries `rows` may see: bool, broadcastable to [batch, heads, rows, seqlen_k]; None for all."""
    visible = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = attn_mask
    if key_padding is not None:
        unpadded = _unpadded_keys(key_padding, seqlen_k)[:, None, None, :]
        visible = unpadded if visible is None else visible & unpadded
    if is_causal:
        queries = torch.arange(rows.start, rows.stop, device=device)
        below = torch.arange(seqlen_k, device=device)[None, :] <= queries[:, None]
        visible = below if visible is None else visible & below
    return visible


def _unpadded_keys(key_padding: torch.Tensor, seqlen_k: int) -> torch.Tensor:
    """bool [batch, seqlen_k] from either form of key_padding."""
    if key_padding.dtype == torch.bool:
        return key_padding
    return torch.arange(seqlen_k, device=key_padding.device)[None, :] < key_padding[:, None]


def _without_padded(tensor: torch.Tensor, key_padding: torch.Tensor | None) -> torch.Tensor:
    """[batch, heads, seqlen_k, dim] with zeros at padded keys, so that NaN stored there goes nowhere."""
    if key_padding is None:
        return tensor
    return tensor.masked_fill(~_unpadded_keys(key_padding, tensor.shape[2])[:, None, :, None], 0)


def _slice_rows(mask: torch.Tensor | None, rows: range) -> torch.Tensor | None:
    """The rows of a broadcastable attn_mask that belong to some queries."""
    if mask is None or mask.dim() < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., rows.start : rows.stop, :]


def _by_key_head(tensor: torch.Tensor, key_heads: int) -> torch.Tensor:
    """[batch, heads, rows, dim] as [batch, key_heads, group * rows, dim]: queries that share a key head together."""
    batch, heads, rows, dim = tensor.shape
    return tensor.reshape(batch, key_heads, heads // key_heads * rows, dim)


def _probabilities(
    query: torch.Tensor,
    key: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    rows: range,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Softmax over the visible keys [batch, heads, rows, seqlen_k] (0 in hidden rows), logsumexp, and which are hidden.

    query holds the queries `rows` only; key has padded keys zeroed already.
    """
    batch, heads, count, _ = query.shape
    key_heads, seqlen_k = key.shape[1:3]
    scores = (_by_key_head(query, key_heads) @ key.mT).view(batch, heads, count, seqlen_k) * scale
    attn_mask = _slice_rows(attn_mask, rows)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        scores = scores + attn_mask.to(scores.dtype)
    visible = _visible_keys(attn_mask, key_padding, is_causal, rows, seqlen_k, query.device)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    hidden = (scores == -math.inf).all(-1)  # [batch, heads, rows]
    logsumexp = scores.logsumexp(-1).masked_fill(hidden, -math.inf)
    return scores.softmax(-1).masked_fill(hidden[..., None], 0.0), logsumexp, hidden


def reference_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    hidden_rows: str = "zero",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention from its formulas: same arguments as `attention`, results (output, logsumexp).

    Computes in float64 for float64 operands, else in float32; logsumexp has that type.
    """
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, seqlen_q, head_dim = query.shape
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    probabilities, logsumexp, hidden = _probabilities(
        query.to(compute),
        _without_padded(key.to(compute), key_padding),
        attn_mask,
        key_padding,
        scale,
        is_causal,
        range(seqlen_q),
    )
    values = _without_padded(value.to(compute), key_padding)
    output = (_by_key_head(probabilities, key.shape[1]) @ values).view(batch, heads, seqlen_q, value.shape[3])
    output, logsumexp = _fill_hidden_rows(output, logsumexp, hidden, value, hidden_rows)
    return output.to(query.dtype), logsumexp


def _fill_hidden_rows(
    output: torch.Tensor, logsumexp: torch.Tensor, hidden: torch.Tensor, value: torch.Tensor, hidden_rows: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if hidden_rows == "mean" and value.shape[2] > 0 and hidden.any():
        group = output.shape[1] // value.shape[1]
        mean = value.to(output.dtype).mean(2, keepdim=True).repeat_interleave(group, 1)
        output = torch.where(hidden[..., None], mean, output)
        logsumexp = logsumexp.masked_fill(hidden, torch.finfo(torch.float32).min)
    return output, logsumexp


def _torch_on_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's fused CPU attention, with what it leaves open filled in: hidden rows, and NaN at padded keys."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    bias = hidden = None
    if attn_mask is not None or key_padding is not None:
        visible = _visible_keys(attn_mask, key_padding, is_causal, range(seqlen_q), seqlen_k, query.device)
        is_causal = False
        bias = attn_mask if attn_mask is not None and attn_mask.dtype != torch.bool else None
        if visible is not None:
            base = torch.zeros((), dtype=query.dtype) if bias is None else bias
            bias = torch.where(visible, base, torch.full((), -math.inf, dtype=query.dtype))
        assert bias is not None
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
        hidden = (bias == -math.inf).all(-1)
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        _without_padded(key, key_padding),
        _without_padded(value, key_padding),
        0.0,
        is_causal,
        attn_mask=bias,
        scale=scale,
    )
    if hidden is not None and hidden.any():
        hidden = hidden.expand(query.shape[:3])
        logsumexp = logsumexp.masked_fill(hidden, -math.inf)
        output, logsumexp = _fill_hidden_rows(output, logsumexp, hidden, value, hidden_rows)
    return output, logsumexp


# The op


def _plain_pytorch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    fused = (
        query.device.type == "cpu"
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.shape[3] == value.shape[3]
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and min(query.numel(), key.numel()) > 0
        and scale != 0  # it scales -inf as well
        and (attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype))
    )
    if fused:
        results = _torch_on_cpu(query, key, value, attn_mask, key_padding, scale, is_causal, hidden_rows)
    else:
        results = reference_attention(
            query,
            key,
            value,
            attn_mask=attn_mask,
            key_padding=key_padding,
            is_causal=is_causal,
            scale=scale,
            hidden_rows=hidden_rows,
        )
    return _in_output_layout(*results, query, value)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """CPU and CUDA implementation."""
    if not _kernel_takes(query, key, value, attn_mask):
        return _plain_pytorch(query, key, value, attn_mask, key_padding, scale, is_causal, hidden_rows)
    if key_padding is None and attn_mask is not None and attn_mask.dtype == torch.bool:
        key_padding = _as_key_padding(attn_mask, query.shape[0], key.shape[2])
        attn_mask = attn_mask if key_padding is None else None
    if scale <= 0:
        # The kernel takes the maximum of the scores before it scales them. Negation is exact.
        query, scale = (-query, -scale) if scale < 0 else (torch.zeros_like(query), 1.0)
    with on_device_of(query):
        runs, problem, default = implementations(
            query, key, value, attn_mask, key_padding, scale, is_causal, hidden_rows
        )
        # On Hopper the default follows measurements: nothing is measured unless KERNL_TUNING=measure.
        name = choose(
            "attention",
            problem,
            lambda: [Candidate(name, run) for name, run in runs.items()],
            default=default,
            trusted=capability_of(query.device).arch == 90,
        )
        return runs.get(name, runs[default])()


def _kernel_takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None) -> bool:
    widest = max(query.shape[3], value.shape[3])
    ieee = query.is_cuda and query.dtype == torch.float32 and _float32_precision() == "ieee"
    return (
        kernel_runs_on(query, "attention")
        and widest <= MAX_HEAD_DIM
        and not (widest > 128 and ieee)
        and min(query.numel(), key.numel(), value.numel()) > 0
        and (attn_mask is None or attn_mask.dtype != torch.float64)
    )


def _as_key_padding(attn_mask: torch.Tensor, batch: int, seqlen_k: int) -> torch.Tensor | None:
    """A bool mask that is the same for all heads and queries, as a key padding, whose hidden tiles are skipped."""
    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    if any(mask.shape[dim] > 1 and mask.stride(dim) != 0 for dim in (1, 2)):
        return None
    return mask[:, 0, 0].expand(batch, seqlen_k)


Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _tilings(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask_alignment: int
) -> tuple[Configuration, ...]:
    """Those of kernl's kernel that can take these tensors."""
    tilings = configurations(
        capability_of(query.device).arch,
        query.dtype,
        query.shape[3],
        value.shape[3],
        input_precision=_float32_precision() if query.dtype == torch.float32 else "ieee",
        mask_alignment=mask_alignment,
    )
    if supports_tma(key) and supports_tma(value):
        return tilings
    return tuple(tiling for tiling in tilings if not tiling.uses_tma)


def _mask_alignment(mask: torch.Tensor | None) -> int:
    """0 without a mask, else the alignment of its rows; one row that serves all queries counts as aligned."""
    if mask is None:
        return 0
    return 16 if mask.shape[2] == 1 or mask.stride(2) == 0 else alignment_of(mask)


def implementations(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
) -> tuple[dict[str, Run], tuple[Any, ...], str]:
    """Everything that can compute this call by name, the class of problem it belongs to, and the name to start from."""
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k, value_dim = value.shape[2:]
    capability = capability_of(query.device)
    precision = _float32_precision() if query.dtype == torch.float32 else "ieee"
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, seqlen_q, seqlen_k)
    mask_alignment = _mask_alignment(mask)
    tilings = _tilings(query, key, value, mask_alignment)
    default = default_configuration(tilings, capability.sm_count, batch * heads, seqlen_q)

    def launch(configuration: Configuration) -> tuple[torch.Tensor, torch.Tensor]:
        output, logsumexp = allocate_outputs(query, value)
        attention_forward(
            query,
            key,
            value,
            mask,
            key_padding,
            output,
            logsumexp,
            scale=scale,
            is_causal=is_causal,
            hidden_rows=hidden_rows,
            configuration=configuration,
            input_precision=precision,
            use_pdl=use_pdl(query),
        )
        return output, logsumexp

    runs: dict[str, Run] = {tiling.name: functools.partial(launch, tiling) for tiling in tilings}
    runs |= _torch_on_gpu(query, key, value, attn_mask, key_padding, scale, is_causal)
    name = default.name
    if capability.arch == 90 and "cudnn" in runs and batch * heads * seqlen_q * seqlen_k >= _SCORES_FOR_CUDNN:
        name = "cudnn"
    # Sizes go by powers of two, so that most new shapes belong to a class that is known already.
    problem = (
        str(query.dtype).removeprefix("torch."),
        precision,
        block_of(head_dim),
        block_of(value_dim),
        triton.next_power_of_2(batch * heads),
        max(16, triton.next_power_of_2(seqlen_q)),
        max(16, triton.next_power_of_2(seqlen_k)),
        is_causal,
        "none" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        mask_alignment,
        "none" if key_padding is None else "bool" if key_padding.dtype == torch.bool else "lengths",
        *(name in runs for name in ("flash", "cudnn")),
    )
    return runs, problem, name


def _torch_on_gpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
) -> dict[str, Run]:
    """PyTorch's own kernels for 16-bit types without a mask, where they mean the same (causal from the top left)."""
    head_dim = query.shape[3]
    if (
        not query.is_cuda
        or query.dtype not in (torch.float16, torch.bfloat16)
        or attn_mask is not None
        or key_padding is not None
        or head_dim != value.shape[3]
        or head_dim % 8 != 0
        or query.shape[1] != key.shape[1]
        or (is_causal and query.shape[2] != key.shape[2])
        or not all(tensor.stride(3) == 1 and tensor.data_ptr() % 16 == 0 for tensor in (query, key, value))
        or not all(stride % 8 == 0 for tensor in (query, key, value) for stride in tensor.stride()[:3])
    ):
        return {}

    def flash() -> tuple[torch.Tensor, torch.Tensor]:
        output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )[:2]
        return _in_output_layout(output, logsumexp, query, value)

    def cudnn() -> tuple[torch.Tensor, torch.Tensor]:
        output, logsumexp = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )[:2]
        return _in_output_layout(output, logsumexp.reshape(query.shape[:3]), query, value)

    runs: dict[str, Run] = {"flash": flash}
    # cuDNN refuses single tokens in some versions.
    if head_dim <= 128 and min(query.shape[2], key.shape[2]) > 1 and torch.backends.cudnn.is_available():
        runs["cudnn"] = cudnn
    return runs


def _float32_precision() -> str:
    """Whether TF32 is allowed, by either of PyTorch's switches: the older cannot be read once the newer was set."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _kernels_ahead(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
) -> Iterator[Ahead]:
    """The default tilings of all batches and sequence lengths, for masks like these.

    A mask with a row per query is taken with aligned rows; the padding of short sequences is read in another way than
    that of long ones, which is another compilation.
    """
    if not _kernel_takes(query, key, value, attn_mask):
        return
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    if key_padding is None and attn_mask is not None and attn_mask.dtype == torch.bool:
        key_padding = _as_key_padding(attn_mask, batch, seqlen_k)
        attn_mask = attn_mask if key_padding is None else None
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, seqlen_q, seqlen_k)
    per_query = mask is not None and seqlen_q > 1 and mask.stride(2) != 0

    def tiny(like: torch.Tensor, seqlen: int) -> torch.Tensor:
        _, count, _, dim = like.shape
        by_head = like.stride(1) > like.stride(2)
        shape = (1, count, seqlen, dim) if by_head else (1, seqlen, count, dim)
        zeros = torch.zeros(shape, dtype=like.dtype, device=query.device)
        return zeros if by_head else zeros.transpose(1, 2)

    def operands(seqlen: int) -> tuple[Any, ...]:
        small_mask = small_padding = None
        if mask is not None:
            rows = seqlen if per_query else 1
            small_mask = torch.zeros(1, 1, rows, seqlen, dtype=mask.dtype, device=query.device)
            small_mask = small_mask.expand(1, heads, seqlen, seqlen)
        if key_padding is not None:
            size = (1, seqlen) if key_padding.dtype == torch.bool else (1,)
            small_padding = torch.ones(size, dtype=key_padding.dtype, device=query.device)
        return tiny(query, seqlen), tiny(key, seqlen), tiny(value, seqlen), small_mask, small_padding

    def launch(tiling: Configuration, seqlen: int) -> None:
        small_query, small_key, small_value, small_mask, small_padding = operands(seqlen)
        options = (small_mask, small_padding, abs(scale) or 1.0, is_causal, hidden_rows)
        with on_device_of(query):
            implementations(small_query, small_key, small_value, *options)[0][tiling.name]()

    small_query, small_key, small_value, small_mask, _ = operands(64)
    tilings = _tilings(small_query, small_key, small_value, _mask_alignment(small_mask))
    sm_count = capability_of(query.device).sm_count
    defaults = dict.fromkeys(
        default_configuration(tilings, sm_count, heads << batch_bits, 1 << length_bits)
        for batch_bits in range(0, 9, 2)
        for length_bits in range(13)
    )
    kinds = tuple(None if tensor is None else tensor.dtype for tensor in (query, value, mask, key_padding))
    sixteens = tuple(tensor.stride(2) % 16 == 0 for tensor in (small_query, small_key, small_value))
    sizes = (head_dim, value.shape[3], heads // key.shape[1], sixteens, per_query, _float32_precision())
    for tiling in defaults:
        short, long = 16, 2 * tiling.block_n + 16
        for seqlen in (short, long) if key_padding is not None and key_padding.dtype == torch.bool else (short,):
            key_of = (tiling, kinds, sizes, is_causal, hidden_rows, seqlen == long)
            yield key_of, functools.partial(launch, tiling, seqlen)


def _attention_fake(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_outputs(query, value)


# Gradients


def _attention_backward(
    grad_output: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    output: torch.Tensor,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
    needs_mask_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With P the probabilities and D = sum_d grad_output * output, for a block of queries at a time:

    dV = P^T dO      dS = P (dO V^T - D + dlse)      dQ = scale dS K      dK = scale dS^T Q      dbias = dS

    A hidden row has P = 0; under "mean" it passes 1 / seqlen_k of its gradient to each value and nothing else.
    """
    results = _allocate_gradients(query, key, value, attn_mask, needs_mask_grad)
    grad_query, grad_key, grad_value, grad_mask = results
    compute = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, heads, seqlen_q, _ = query.shape
    key_heads, seqlen_k = key.shape[1:3]
    keys = _without_padded(key.to(compute), key_padding)
    values = _without_padded(value.to(compute), key_padding)
    total_key = torch.zeros_like(keys, memory_format=torch.contiguous_format)
    total_value = torch.zeros_like(values, memory_format=torch.contiguous_format)
    total_mask = torch.zeros(grad_mask.shape, dtype=compute, device=query.device)
    block = max(1, _BACKWARD_SCORES // max(1, batch * heads * seqlen_k))
    for start in range(0, seqlen_q, block):
        rows = range(start, min(start + block, seqlen_q))
        here = slice(rows.start, rows.stop)
        queries = query[:, :, here].to(compute)
        grads = grad_output[:, :, here].to(compute)
        weights, _, hidden = _probabilities(queries, keys, attn_mask, key_padding, scale, is_causal, rows)
        grad_rows = _by_key_head(grads, key_heads)
        grad_weights = (grad_rows @ values.mT).view_as(weights)
        inner = (grads * output[:, :, here].to(compute)).sum(-1)
        if grad_logsumexp is not None:
            inner = inner - grad_logsumexp[:, :, here].to(compute)
        grad_scores = weights * (grad_weights - inner[..., None])
        total_value += _by_key_head(weights, key_heads).mT @ grad_rows
        if hidden_rows == "mean" and hidden.any():
            shared = _by_key_head(grads * hidden[..., None], key_heads).sum(2, keepdim=True)
            total_value += shared / seqlen_k
        grad_score_rows = _by_key_head(grad_scores, key_heads)
        grad_query[:, :, here] = (grad_score_rows @ keys).view_as(queries) * scale
        total_key += grad_score_rows.mT @ _by_key_head(queries, key_heads) * scale
        if needs_mask_grad and attn_mask is not None:
            part = _slice_rows(total_mask, rows)
            assert part is not None
            part += grad_scores.sum_to_size(part.shape)
    grad_key.copy_(total_key)
    grad_value.copy_(total_value)
    grad_mask.copy_(total_mask)
    return results


def _allocate_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    needs_mask_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, laid out as the output is, and of the mask ([0] when nobody wants that)."""
    of_mask = needs_mask_grad and attn_mask is not None
    mask_shape = attn_mask.shape if of_mask and attn_mask is not None else (0,)
    mask_dtype = attn_mask.dtype if of_mask and attn_mask is not None else torch.float32
    return (
        _empty_by_rows(query, query.shape[3]),
        _empty_by_rows(key, key.shape[3]),
        _empty_by_rows(value, value.shape[3]),
        empty(mask_shape, dtype=mask_dtype, device=query.device),
    )


def _attention_backward_fake(
    grad_output: torch.Tensor,
    grad_logsumexp: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    output: torch.Tensor,
    scale: float,
    is_causal: bool,
    hidden_rows: str,
    needs_mask_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _allocate_gradients(query, key, value, attn_mask, needs_mask_grad)


attention_backward_op = define_op(
    "attention_backward(Tensor grad_output, Tensor? grad_logsumexp, Tensor query, Tensor key, Tensor value, "
    "Tensor? attn_mask, Tensor? key_padding, Tensor output, float scale, bool is_causal, str hidden_rows, "
    "bool needs_mask_grad) -> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_attention_backward,
    fake=_attention_backward_fake,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, attn_mask, key_padding, ctx.scale, ctx.is_causal, ctx.hidden_rows = inputs
    ctx.save_for_backward(query, key, value, attn_mask, key_padding, output[0])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: torch.Tensor | None, grad_logsumexp: torch.Tensor | None) -> tuple[Any, ...]:
    query, key, value, attn_mask, key_padding, output = ctx.saved_tensors
    needs_mask_grad = ctx.needs_input_grad[3]
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    grad_query, grad_key, grad_value, grad_mask = attention_backward_op(
        grad_output,
        grad_logsumexp,
        query,
        key,
        value,
        attn_mask,
        key_padding,
        output,
        ctx.scale,
        ctx.is_causal,
        ctx.hidden_rows,
        needs_mask_grad,
    )
    return grad_query, grad_key, grad_value, grad_mask if needs_mask_grad else None, None, None, None, None


def _autocast(
    dtype: torch.dtype,
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    key_padding: torch.Tensor | None,
    *rest: Any,
) -> Any:
    """As torch's scaled_dot_product_attention: operands and a float mask in the autocast type."""
    operands = (cast(tensor, dtype) for tensor in (query, key, value, attn_mask))
    return attention_op(*operands, key_padding, *rest)


attention_op = define_op(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? key_padding, float scale, "
    "bool is_causal, str hidden_rows) -> (Tensor output, Tensor logsumexp)",
    cpu=_attention,
    fake=_attention_fake,
    autograd=(_setup_context, _backward),
    autocast=_autocast,
    ahead=_kernels_ahead,
)


# The public function


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = ...,
    key_padding: torch.Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    hidden_rows: str = ...,
    return_logsumexp: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = ...,
    key_padding: torch.Tensor | None = ...,
    is_causal: bool = ...,
    scale: float | None = ...,
    hidden_rows: str = ...,
    return_logsumexp: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    hidden_rows: str = "zero",
    return_logsumexp: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * query key^T, masked) value.

    query: [batch, heads, seqlen_q, head_dim], float16, bfloat16, float32 or float64 (reference only), any strides.
    key: [batch, key_heads, seqlen_k, head_dim]; heads is a multiple of key_heads, and query head h attends to key head
        h // (heads / key_heads), without a copy.
    value: [batch, key_heads, seqlen_k, value_dim]. Head dimensions over 256 run the reference.
    attn_mask: bool (True = attend) or floating point (added to the scaled scores, in float32), broadcastable to
        [batch, heads, seqlen_q, seqlen_k]. Never materialised: dimensions of stride 0 stay so.
    key_padding: bool [batch, seqlen_k] (True = visible) or int32 lengths [batch]. What is stored at a padded key, NaN
        included, has no influence. Tiles of keys before the first and after the last visible one cost nothing.
    is_causal: query i sees keys j <= i, both counted from 0 (torch's meaning). Combines with the masks.
    scale: 1 / sqrt(head_dim) by default.
    hidden_rows: what a query that sees no key gets: "zero" (as torch's sdpa; logsumexp -inf), or "mean", the mean of
        all seqlen_k values (as adding finfo.min to all its scores gives; logsumexp is float32's lowest number).
    return_logsumexp: return (output, logsumexp).

    Returns output [batch, heads, seqlen_q, value_dim] of query's type, contiguous as [batch, seqlen_q, heads,
    value_dim]; logsumexp is float32 [batch, heads, seqlen_q], natural logarithm. Both are differentiable in query, key,
    value and a float attn_mask. float32 operands honour PyTorch's matmul precision (TF32 or not).

    Raises ValueError when shapes, types or devices do not fit, TypeError when an operand is not floating point.
    Source: Dao, "FlashAttention-2" (2023).
    """
    _check_operands(query, key, value)
    _check_masks(query, key, attn_mask, key_padding)
    if hidden_rows not in HIDDEN_ROWS:
        raise ValueError(f"hidden_rows: got {hidden_rows!r}, accepted {', '.join(map(repr, HIDDEN_ROWS))}")
    if scale is None:
        scale = 1 / math.sqrt(query.shape[3])
    output, logsumexp = torch.ops.kernl.attention(
        query, key, value, attn_mask, key_padding, float(scale), bool(is_causal), hidden_rows
    )
    return (output, logsumexp) if return_logsumexp else output


def _check_operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, accepted [batch, heads, seqlen, head_dim]")
        if not tensor.is_floating_point():
            raise TypeError(
                f"{name}: got {tensor.dtype}, accepted float16, bfloat16, float32 or float64; convert with .to(...)"
            )
        if tensor.device != query.device:
            raise ValueError(f"{name}: got device {tensor.device}, accepted query's, {query.device}")
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise ValueError(f"{name}: got {tensor.dtype}, accepted query's type, {query.dtype}")
        if tensor.shape[0] != query.shape[0]:
            raise ValueError(f"{name}: got batch {tensor.shape[0]}, accepted query's, {query.shape[0]}")
    if key.shape[3] != query.shape[3]:
        raise ValueError(f"key: got head_dim {key.shape[3]}, accepted query's, {query.shape[3]}")
    if query.shape[3] < 1 or value.shape[3] < 1:
        raise ValueError(f"head_dim: got {query.shape[3]} and value's {value.shape[3]}, accepted 1 or more")
    if value.shape[1:3] != key.shape[1:3]:
        raise ValueError(
            f"value: got {value.shape[1]} heads and {value.shape[2]} tokens, accepted key's, {key.shape[1]} and "
            f"{key.shape[2]}"
        )
    if key.shape[1] == 0 or query.shape[1] % key.shape[1] != 0:
        raise ValueError(
            f"key: got {key.shape[1]} heads, accepted a number that divides query's heads, {query.shape[1]}"
        )


def _check_masks(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, key_padding: torch.Tensor | None
) -> None:
    batch, heads, seqlen_q, _ = query.shape
    seqlen_k = key.shape[2]
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
            raise TypeError(
                f"attn_mask: got {attn_mask.dtype}, accepted bool (True = attend) or floating point (added)"
            )
        if attn_mask.device != query.device:
            raise ValueError(f"attn_mask: got device {attn_mask.device}, accepted query's, {query.device}")
        full = (batch, heads, seqlen_q, seqlen_k)
        fits = attn_mask.dim() <= 4 and all(
            given == 1 or given == wanted for given, wanted in zip(reversed(attn_mask.shape), reversed(full))
        )
        if not fits:
            raise ValueError(
                f"attn_mask: got shape {list(attn_mask.shape)}, accepted one that broadcasts to {list(full)} "
                "([batch, heads, seqlen_q, seqlen_k])"
            )
    if key_padding is not None:
        if key_padding.device != query.device:
            raise ValueError(f"key_padding: got device {key_padding.device}, accepted query's, {query.device}")
        wanted = {torch.bool: [batch, seqlen_k], torch.int32: [batch]}.get(key_padding.dtype)
        if wanted is None or list(key_padding.shape) != wanted:
            raise ValueError(
                f"key_padding: got {key_padding.dtype} of shape {list(key_padding.shape)}, accepted bool "
                f"[{batch}, {seqlen_k}] (True = visible) or int32 lengths [{batch}]"
            )
