"""Attention: softmax(scale * Q K^T, masked) V.

    torch.ops.kernl.attention           the op the patterns emit: (output, logsumexp), everything spelled out
    torch.ops.kernl.attention_backward  its gradient, in `kernl.ops.attention_backward`
    kernl.ops.attention                 the validated function to call
    reference_attention                 the formulas, in any floating-point type

Which implementation runs. On a GPU from Ampere on: one of the tilings of kernl's kernel, or, where nothing is masked,
PyTorch's FlashAttention-2 or cuDNN if that measured faster for this class of problem. Everywhere else, for float64, for
a head_dim over 256 (over 128 for float32 without TF32) and for no keys at all: plain PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import torch
import triton

from kernl.kernels.attention import (
    Configuration,
    Positions,
    alignment_of,
    attention_forward,
    block_of,
    configurations,
    default_configuration,
    supports_tma,
)
from kernl.ops.attention_backward import attention_backward_op
from kernl.ops.attention_checks import check_masks, check_operands, check_positions
from kernl.ops.attention_common import (
    SCORING_SCHEMA,
    Scoring,
    attention_by_formulas,
    empty_by_rows,
    fill_hidden_rows,
    float32_precision,
    kernel_takes,
    op_arguments,
    reference_attention,
    visible_keys,
    without_padded,
)
from kernl.ops.common import Ahead, cast, define_op, empty, on_device_of, use_pdl
from kernl.ops.relative_position import RelativePositionBias
from kernl.runtime.capability import capability_of
from kernl.runtime.tuning import Candidate, choose

__all__ = ["attention", "attention_op", "implementations", "reference_attention"]

HIDDEN_ROWS = ("zero", "mean")
"""What a query that sees no key gets: zero, or the mean of all values."""

# From this many scores on cuDNN is ahead where nothing is masked (H200).
_SCORES_FOR_CUDNN = 2**25


def allocate_outputs(query: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """output [batch, heads, seqlen_q, value_dim], contiguous as [batch, seqlen_q, heads, value_dim], and logsumexp.

    In that layout `output.transpose(1, 2).reshape(batch, seqlen_q, heads * value_dim)` copies nothing.
    """
    output = empty_by_rows(query, value.shape[3])
    return output, empty(query.shape[:3], dtype=torch.float32, device=query.device)


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


# Plain PyTorch


def _torch_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's fused CPU attention, with what it leaves open filled in: hidden rows, and NaN at padded keys."""
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    attn_mask, key_padding, is_causal = scoring.attn_mask, scoring.key_padding, scoring.is_causal
    bias = hidden = None
    if attn_mask is not None or key_padding is not None:
        visible = visible_keys(scoring, range(seqlen_q), seqlen_k, query.device)
        is_causal = False
        bias = attn_mask if scoring.kind_of_mask == "float" else None
        if visible is not None:
            base = torch.zeros((), dtype=query.dtype) if bias is None else bias
            bias = torch.where(visible, base, torch.full((), -math.inf, dtype=query.dtype))
        assert bias is not None
        bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
        hidden = (bias == -math.inf).all(-1)
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query,
        without_padded(key, key_padding),
        without_padded(value, key_padding),
        0.0,
        is_causal,
        attn_mask=bias,
        scale=scoring.scale,
    )
    if hidden is not None and hidden.any():
        hidden = hidden.expand(query.shape[:3])
        logsumexp = logsumexp.masked_fill(hidden, -math.inf)
        output, logsumexp = fill_hidden_rows(output, logsumexp, hidden, value, scoring.hidden_rows)
    return output, logsumexp


def _plain_pytorch(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> tuple[torch.Tensor, torch.Tensor]:
    attn_mask = scoring.attn_mask
    fused = (
        query.device.type == "cpu"
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.shape[3] == value.shape[3]
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and min(query.numel(), key.numel()) > 0
        and scoring.is_plain
        and scoring.scale != 0  # it scales -inf as well
        and (attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype))
    )
    results = (_torch_on_cpu if fused else attention_by_formulas)(query, key, value, scoring)
    return _in_output_layout(*results, query, value)


# The op


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scoring_arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """CPU and CUDA implementation."""
    scoring = Scoring.of_op(*scoring_arguments)
    if not kernel_takes(query, key, value, scoring):
        return _plain_pytorch(query, key, value, scoring)
    scoring = scoring.with_padding_recognised(query.shape[0], key.shape[2])
    if scoring.scale <= 0 and scoring.softcap == 0:
        # The kernel takes the maximum of the scores before it scales them. Negation is exact.
        query = -query if scoring.scale < 0 else torch.zeros_like(query)
        scoring = dataclasses.replace(scoring, scale=-scoring.scale if scoring.scale < 0 else 1.0)
    with on_device_of(query):
        runs, problem, default = implementations(query, key, value, scoring)
        # On Hopper the default follows measurements: nothing is measured unless KERNL_TUNING=measure.
        name = choose(
            "attention",
            problem,
            lambda: [Candidate(name, run) for name, run in runs.items()],
            default=default,
            trusted=capability_of(query.device).arch == 90,
        )
        return runs.get(name, runs[default])()


Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _tilings(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scoring: Scoring
) -> tuple[Configuration, ...]:
    """Those of kernl's kernel that can take these tensors. mask: scoring's, expanded."""
    tilings = configurations(
        capability_of(query.device).arch,
        query.dtype,
        query.shape[3],
        value.shape[3],
        input_precision=float32_precision() if query.dtype == torch.float32 else "ieee",
        mask_alignment=_mask_alignment(mask),
        by_position=not scoring.is_plain,
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> tuple[dict[str, Run], tuple[Any, ...], str]:
    """Everything that can compute this call by name, the class of problem it belongs to, and the name to start from."""
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k, value_dim = value.shape[2:]
    capability = capability_of(query.device)
    precision = float32_precision() if query.dtype == torch.float32 else "ieee"
    mask = None if scoring.attn_mask is None else scoring.attn_mask.expand(batch, heads, seqlen_q, seqlen_k)
    tilings = _tilings(query, key, value, mask, scoring)
    default = default_configuration(tilings, capability.sm_count, batch * heads, seqlen_q)

    def launch(configuration: Configuration) -> tuple[torch.Tensor, torch.Tensor]:
        output, logsumexp = allocate_outputs(query, value)
        attention_forward(
            query,
            key,
            value,
            mask,
            scoring.key_padding,
            output,
            logsumexp,
            scale=scoring.scale,
            positions=scoring.positions,
            softcap=scoring.softcap,
            hidden_rows=scoring.hidden_rows,
            configuration=configuration,
            input_precision=precision,
            use_pdl=use_pdl(query),
        )
        return output, logsumexp

    runs: dict[str, Run] = {tiling.name: functools.partial(launch, tiling) for tiling in tilings}
    runs |= _torch_on_gpu(query, key, value, scoring)
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
        scoring.is_causal,
        scoring.kind_of_mask,
        _mask_alignment(mask),
        scoring.kind_of_padding,
        *(name in runs for name in ("flash", "cudnn")),
    )
    return runs, problem if scoring.is_plain else (*problem, *scoring.kinds_of_position), name


def _torch_on_gpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> dict[str, Run]:
    """PyTorch's own kernels for 16-bit types without a mask, where they mean the same (causal from the top left)."""
    head_dim, scale, is_causal = query.shape[3], scoring.scale, scoring.is_causal
    if (
        not query.is_cuda
        or query.dtype not in (torch.float16, torch.bfloat16)
        or scoring.attn_mask is not None
        or scoring.key_padding is not None
        or not scoring.is_plain
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


def _kernels_ahead(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scoring_arguments: Any
) -> Iterator[Ahead]:
    """The default tilings of all batches and sequence lengths, for masks like these.

    A mask with a row per query is taken with aligned rows; the padding of short sequences is read in another way than
    that of long ones, which is another compilation.
    """
    scoring = Scoring.of_op(*scoring_arguments)
    if not kernel_takes(query, key, value, scoring):
        return
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    scoring = scoring.with_padding_recognised(batch, seqlen_k)
    attn_mask, key_padding, positions = scoring.attn_mask, scoring.key_padding, scoring.positions
    mask = None if attn_mask is None else attn_mask.expand(batch, heads, seqlen_q, seqlen_k)
    per_query = mask is not None and seqlen_q > 1 and mask.stride(2) != 0

    def tiny(like: torch.Tensor, seqlen: int) -> torch.Tensor:
        _, count, _, dim = like.shape
        by_head = like.stride(1) > like.stride(2)
        shape = (1, count, seqlen, dim) if by_head else (1, seqlen, count, dim)
        zeros = torch.zeros(shape, dtype=like.dtype, device=query.device)
        return zeros if by_head else zeros.transpose(1, 2)

    def small_positions() -> Positions:
        def zeros(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape, dtype=tensor.dtype, device=query.device)

        slopes, bias, offset = positions.alibi_slopes, positions.distance_bias, positions.q_offset
        return dataclasses.replace(
            positions,
            # A number is never compiled in; its sign decides whether a row may be hidden, and so which kernel it is.
            q_offset=zeros(offset, ()) if isinstance(offset, torch.Tensor) else max(-1, min(1, offset)),
            alibi_slopes=None if slopes is None else zeros(slopes, (heads,) if slopes.dim() == 1 else (1, heads)),
            distance_bias=None if bias is None else zeros(bias, tuple(bias.shape)),
        )

    def problem(seqlen: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scoring]:
        small_mask = small_padding = None
        if mask is not None:
            rows = seqlen if per_query else 1
            small_mask = torch.zeros(1, 1, rows, seqlen, dtype=mask.dtype, device=query.device)
            small_mask = small_mask.expand(1, heads, seqlen, seqlen)
        if key_padding is not None:
            size = (1, seqlen) if key_padding.dtype == torch.bool else (1,)
            small_padding = torch.ones(size, dtype=key_padding.dtype, device=query.device)
        small = dataclasses.replace(
            scoring,
            attn_mask=small_mask,
            key_padding=small_padding,
            positions=small_positions(),
            scale=abs(scoring.scale) or 1.0,
        )
        return tiny(query, seqlen), tiny(key, seqlen), tiny(value, seqlen), small

    def launch(tiling: Configuration, seqlen: int) -> None:
        with on_device_of(query):
            implementations(*problem(seqlen))[0][tiling.name]()

    small_query, small_key, small_value, small = problem(64)
    tilings = _tilings(small_query, small_key, small_value, small.attn_mask, small)
    sm_count = capability_of(query.device).sm_count
    defaults = dict.fromkeys(
        default_configuration(tilings, sm_count, heads << batch_bits, 1 << length_bits)
        for batch_bits in range(0, 9, 2)
        for length_bits in range(13)
    )
    kinds = tuple(None if tensor is None else tensor.dtype for tensor in (query, value, mask, key_padding))
    sixteens = tuple(tensor.stride(2) % 16 == 0 for tensor in (small_query, small_key, small_value))
    sizes = (head_dim, value.shape[3], heads // key.shape[1], sixteens, per_query, float32_precision())
    in_memory = positions.q_offset.dtype if isinstance(positions.q_offset, torch.Tensor) else None
    others = (scoring.kinds_of_position, scoring.hidden_rows, positions.can_hide_a_row, in_memory)
    for tiling in defaults:
        short, long = 16, 2 * tiling.block_n + 16
        for seqlen in (short, long) if key_padding is not None and key_padding.dtype == torch.bool else (short,):
            yield (tiling, kinds, sizes, others, seqlen == long), functools.partial(launch, tiling, seqlen)


def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scoring_arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_outputs(query, value)


_MASK, _BIAS = 3, 14  # where these stand among the op's arguments


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    # Tensors are saved, so that a write to one in between is noticed; the rest is kept as it is.
    ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    ctx.arguments = [None if isinstance(value, torch.Tensor) else value for value in inputs]
    ctx.save_for_backward(*output, *(inputs[place] for place in ctx.places))
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_output: torch.Tensor | None, grad_logsumexp: torch.Tensor | None) -> tuple[Any, ...]:
    output, logsumexp, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for place, tensor in zip(ctx.places, tensors):
        arguments[place] = tensor
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    needed = ctx.needs_input_grad  # of the arguments that were given: trailing defaults are left out
    needs_mask_grad = needed[_MASK]
    needs_bias_grad = len(needed) > _BIAS and needed[_BIAS]
    *operands, grad_mask, grad_bias = attention_backward_op(
        grad_output,
        grad_logsumexp,
        *arguments[:_MASK],
        output,
        logsumexp,
        needs_mask_grad,
        needs_bias_grad,
        *arguments[_MASK:],
    )
    gradients: list[torch.Tensor | None] = [*operands, *[None] * (len(needed) - _MASK)]
    if needs_mask_grad:
        gradients[_MASK] = grad_mask
    if needs_bias_grad:
        gradients[_BIAS] = grad_bias
    return tuple(gradients)


def _autocast(
    dtype: torch.dtype,
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *rest: Any,
) -> Any:
    """As torch's scaled_dot_product_attention: operands and a float mask in the autocast type."""
    return attention_op(*(cast(tensor, dtype) for tensor in (query, key, value, attn_mask)), *rest)


attention_op = define_op(
    f"attention(Tensor query, Tensor key, Tensor value, {SCORING_SCHEMA}) -> (Tensor output, Tensor logsumexp)",
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
    window: tuple[int, int] = ...,
    q_offset: int | torch.Tensor = ...,
    alibi_slopes: torch.Tensor | None = ...,
    relative_position_bias: RelativePositionBias | None = ...,
    softcap: float | None = ...,
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
    window: tuple[int, int] = ...,
    q_offset: int | torch.Tensor = ...,
    alibi_slopes: torch.Tensor | None = ...,
    relative_position_bias: RelativePositionBias | None = ...,
    softcap: float | None = ...,
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
    window: tuple[int, int] = (-1, -1),
    q_offset: int | torch.Tensor = 0,
    alibi_slopes: torch.Tensor | None = None,
    relative_position_bias: RelativePositionBias | None = None,
    softcap: float | None = None,
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
    is_causal: a query sees keys up to its own position. Combines with the masks, and with a window.
    window: (left, right): a query sees that many keys before and after its position and the one there; -1: all of
        them. Tiles outside of it cost nothing.
    q_offset: the position of query 0 among the keys, an int or an integer tensor of one element (read when the kernel
        runs: a replayed CUDA graph sees its value of now). 0: both are counted from the top left, torch's meaning of
        causal; seqlen_k - seqlen_q: from the bottom right.
    alibi_slopes: float32 [heads] or [batch, heads]: slope * |key - position| is subtracted from the scores (ALiBi).
        Without gradient.
    relative_position_bias: T5's, computed from its table in the kernel. Its table may need a gradient.
    softcap: c tanh(score / c) in place of the scaled score (Gemma 2); before masks and biases.
    scale: 1 / sqrt(head_dim) by default.
    hidden_rows: what a query that sees no key gets: "zero" (as torch's sdpa; logsumexp -inf), or "mean", the mean of
        all seqlen_k values (as adding finfo.min to all its scores gives; logsumexp is float32's lowest number).
    return_logsumexp: return (output, logsumexp).

    Returns output [batch, heads, seqlen_q, value_dim] of query's type, contiguous as [batch, seqlen_q, heads,
    value_dim]; logsumexp is float32 [batch, heads, seqlen_q], natural logarithm. Both are differentiable in query, key,
    value, a float attn_mask and the table of a relative position bias. float32 operands honour PyTorch's matmul
    precision (TF32 or not).

    Raises ValueError when shapes, types or devices do not fit, TypeError when an operand is not floating point.
    Source: Dao, "FlashAttention-2" (2023); `kernl.kernels.attention` names those of the parts.
    """
    check_operands(query, key, value)
    check_masks(query, key, attn_mask, key_padding)
    check_positions(query, window, q_offset, alibi_slopes, relative_position_bias, softcap)
    if hidden_rows not in HIDDEN_ROWS:
        raise ValueError(f"hidden_rows: got {hidden_rows!r}, accepted {', '.join(map(repr, HIDDEN_ROWS))}")
    arguments = op_arguments(
        query.shape[3],
        scale=scale,
        attn_mask=attn_mask,
        key_padding=key_padding,
        is_causal=is_causal,
        window=window,
        q_offset=q_offset,
        alibi_slopes=alibi_slopes,
        relative_position_bias=relative_position_bias,
        softcap=softcap,
        hidden_rows=hidden_rows,
    )
    output, logsumexp = torch.ops.kernl.attention(query, key, value, *arguments)
    return (output, logsumexp) if return_logsumexp else output
