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
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, overload

import torch
import triton

from kernl.kernels.attention import attention_forward, configurations, default_configuration, supports_tma
from kernl.kernels.attention_decode import DecodeConfiguration, attention_decode, decode_configuration, prefers_decode
from kernl.kernels.attention_problem import Configuration, Positions, Scoring, alignment_of
from kernl.kernels.common import block_of
from kernl.ops.attention_backward import attention_backward_op
from kernl.ops.attention_checks import check_dropout, check_masks, check_operands, check_packed, check_positions
from kernl.ops.attention_common import (
    SCORING_SCHEMA,
    attention_by_formulas,
    empty_by_rows,
    fill_hidden_rows,
    float32_precision,
    kernel_takes,
    op_arguments,
    over_batches,
    reference_attention,
    scoring_of_op,
    visible_keys,
    with_padding_recognised,
    without_padded,
)
from kernl.ops.common import Ahead, cast, define_op, empty, on_device_of, use_pdl
from kernl.ops.relative_position import RelativePositionBias
from kernl.runtime.capability import capability_of
from kernl.runtime.tuning import Candidate, choose, known_choice

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


def _allocate_statistics(query: torch.Tensor) -> torch.Tensor:
    """[2, batch, heads, seqlen_q]: the maximum of each row of scores, and the sum of exp(score - maximum)."""
    return empty((2, *query.shape[:3]), dtype=torch.float32, device=query.device)


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
    key_padding, is_causal = scoring.key_padding, scoring.is_causal
    bias = hidden = None
    if scoring.kind_of_mask != "none" or key_padding is not None:
        visible = visible_keys(scoring, range(seqlen_q), seqlen_k, query.device)
        is_causal = False
        bias = scoring.bias
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
    fused = (
        query.device.type == "cpu"
        and query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and query.shape[3] == value.shape[3]
        and query.stride(3) == key.stride(3) == value.stride(3) == 1
        and min(query.numel(), key.numel()) > 0
        and scoring.is_plain
        and scoring.scale != 0  # it scales -inf as well
        and (scoring.bias is None or scoring.bias.dtype == query.dtype)
    )
    if fused:
        return _in_output_layout(*_torch_on_cpu(query, key, value, scoring), query, value)
    return _in_output_layout(*attention_by_formulas(query, key, value, scoring)[:2], query, value)


# The ops


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scoring_arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """CPU and CUDA implementation."""
    scoring = scoring_of_op(*scoring_arguments)
    if not kernel_takes(query, key, value, scoring):
        return _plain_pytorch(query, key, value, scoring)
    query, scoring = _as_the_kernels_want(query, key, scoring)
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


def _attention_with_statistics(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scoring_arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """CPU and CUDA implementation: the default among kernl's kernels."""
    scoring = scoring_of_op(*scoring_arguments)
    statistics = _allocate_statistics(query)
    if not kernel_takes(query, key, value, scoring):
        output, logsumexp, found = attention_by_formulas(query, key, value, scoring)
        return *_in_output_layout(output, logsumexp, query, value), statistics.copy_(found)
    query, scoring = _as_the_kernels_want(query, key, scoring)
    with on_device_of(query):
        runs, _, default = implementations(query, key, value, scoring, statistics)
        return *runs[default](), statistics


def _as_the_kernels_want(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> tuple[torch.Tensor, Scoring]:
    """Padding recognised; a scale above 0 where the maximum of the scores is taken before they are scaled."""
    scoring = with_padding_recognised(scoring, query.shape[0], key.shape[2])
    if scoring.scale <= 0 and not scoring.is_natural:
        # Negation is exact.
        query = -query if scoring.scale < 0 else torch.zeros_like(query)
        scoring = dataclasses.replace(scoring, scale=-scoring.scale if scoring.scale < 0 else 1.0)
    return query, scoring


Run = Callable[[], tuple[torch.Tensor, torch.Tensor]]


def _tilings(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> tuple[Configuration, ...]:
    """Those of kernl's kernel that can take these tensors."""
    tilings = configurations(
        capability_of(query.device).arch,
        query.dtype,
        query.shape[3],
        value.shape[3],
        input_precision=float32_precision() if query.dtype == torch.float32 else "ieee",
        mask_alignment=_mask_alignment(query, key, scoring),
        by_position=not dataclasses.replace(scoring, packed=None).is_plain or scoring.kind_of_mask == "both",
        packed=scoring.packed is not None,
    )
    if supports_tma(key) and supports_tma(value):
        return tilings
    return tuple(tiling for tiling in tilings if not tiling.uses_tma)


def _mask_alignment(query: torch.Tensor, key: torch.Tensor, scoring: Scoring) -> int:
    """0 without a mask, else the alignment of its rows; one row that serves all queries counts as aligned."""
    mask = scoring.expanded(scoring.attn_mask if scoring.bias is None else scoring.bias, query, key)
    if mask is None:
        return 0
    return 16 if mask.shape[2] == 1 or mask.stride(2) == 0 else alignment_of(mask)


def implementations(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    statistics: torch.Tensor | None = None,
) -> tuple[dict[str, Run], tuple[Any, ...], str]:
    """Everything that can compute this call by name, the class of problem it belongs to, and the name to start from.

    statistics: filled by the call that is run; then PyTorch's own kernels are left out.
    """
    batch, heads, head_dim = scoring.batch_of(query), query.shape[1], query.shape[3]
    seqlen_q, seqlen_k, value_dim = query.shape[2], *value.shape[2:]
    if scoring.packed is not None:
        seqlen_q, seqlen_k = scoring.packed.max_seqlen_q, scoring.packed.max_seqlen_k
    capability = capability_of(query.device)
    precision = float32_precision() if query.dtype == torch.float32 else "ieee"
    tilings = _tilings(query, key, value, scoring)
    default = default_configuration(tilings, capability.sm_count, batch * heads, seqlen_q)
    sm_count = max(1, capability.sm_count)
    decode = decode_configuration(capability.arch, sm_count, query, key, value, scoring)
    options: dict[str, Any] = {"input_precision": precision, "use_pdl": use_pdl(query)}

    def launch(configuration: Configuration) -> tuple[torch.Tensor, torch.Tensor]:
        results = allocate_outputs(query, value)
        attention_forward(query, key, value, scoring, *results, statistics, configuration=configuration, **options)
        return results

    def launch_decode(configuration: DecodeConfiguration) -> tuple[torch.Tensor, torch.Tensor]:
        results = allocate_outputs(query, value)
        partial = None
        if configuration.splits > 1:
            shape = (configuration.splits, batch * heads * seqlen_q, value_dim + 2)
            partial = empty(shape, dtype=torch.float32, device=query.device)
        attention_decode(
            query, key, value, scoring, *results, statistics, partial, configuration=configuration, **options
        )
        return results

    runs: dict[str, Run] = {tiling.name: functools.partial(launch, tiling) for tiling in tilings}
    if decode is not None:
        runs[decode.name] = functools.partial(launch_decode, decode)
    if statistics is None:
        runs |= _torch_on_gpu(query, key, value, scoring)
    name = default.name
    if decode is not None and prefers_decode(decode, sm_count, query, key, default.block_m):
        name = decode.name
    elif capability.arch == 90 and "cudnn" in runs and batch * heads * seqlen_q * seqlen_k >= _SCORES_FOR_CUDNN:
        name = "cudnn"
    problem = (
        str(query.dtype).removeprefix("torch."),
        precision,
        block_of(head_dim),
        block_of(value_dim),
        *_size_class(batch * heads, seqlen_q, seqlen_k),
        scoring.is_causal,
        scoring.kind_of_mask,
        _mask_alignment(query, key, scoring),
        scoring.kind_of_padding,
        *(name in runs for name in ("flash", "cudnn")),
    )
    if decode is not None:
        problem = (*problem, "decode", heads // key.shape[1] * seqlen_q)
    return runs, problem if scoring.is_plain else (*problem, *scoring.kinds_besides_masks), name


_SIZES = slice(4, 7)
"""Where `_size_class` stands in a class of problems."""


def _size_class(batch_heads: int, seqlen_q: int, seqlen_k: int) -> tuple[int, int, int]:
    """Sizes go by powers of two, so that most new shapes belong to a class that is known already."""
    lengths = (max(16, triton.next_power_of_2(seqlen)) for seqlen in (seqlen_q, seqlen_k))
    return triton.next_power_of_2(batch_heads), *lengths


def _torch_on_gpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> dict[str, Run]:
    """PyTorch's own kernels for 16-bit types without a mask, where they mean the same (causal from the top left)."""
    head_dim, scale, is_causal = query.shape[3], scoring.scale, scoring.is_causal
    if (
        not query.is_cuda
        or query.dtype not in (torch.float16, torch.bfloat16)
        or scoring.kind_of_mask != "none"
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
    """The tilings chosen by default or known to be faster, of all batches and sequence lengths, for masks like these.

    A mask with a row per query is taken with aligned rows; the padding of short sequences is read in another way than
    that of long ones, which is another compilation.
    """
    scoring = scoring_of_op(*scoring_arguments)
    if not kernel_takes(query, key, value, scoring) or scoring.packed is not None:
        return
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    scoring = with_padding_recognised(scoring, batch, seqlen_k)
    key_padding, positions, dropout = scoring.key_padding, scoring.positions, scoring.dropout
    masks = tuple(scoring.expanded(tensor, query, key) for tensor in (scoring.attn_mask, scoring.bias))
    per_query = tuple(mask is not None and seqlen_q > 1 and mask.stride(2) != 0 for mask in masks)

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
        prefix = positions.prefix
        return dataclasses.replace(
            positions,
            # A number is never compiled in; its sign decides whether a row may be hidden, and so which kernel it is.
            q_offset=zeros(offset, ()) if isinstance(offset, torch.Tensor) else max(-1, min(1, offset)),
            alibi_slopes=None if slopes is None else zeros(slopes, (heads,) if slopes.dim() == 1 else (1, heads)),
            distance_bias=None if bias is None else zeros(bias, tuple(bias.shape)),
            prefix=None if prefix is None else zeros(prefix, (1,)),
        )

    def problem(seqlen: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Scoring]:
        small_padding = small_dropout = None
        small_masks = []
        for mask, by_query in zip(masks, per_query):
            small_mask = None
            if mask is not None:
                rows = seqlen if by_query else 1
                small_mask = torch.zeros(1, 1, rows, seqlen, dtype=mask.dtype, device=query.device)
                small_mask = small_mask.expand(1, heads, seqlen, seqlen)
            small_masks.append(small_mask)
        if dropout is not None:
            zero = torch.zeros(1, dtype=torch.int64, device=query.device)
            small_dropout = dataclasses.replace(dropout, seed=zero, offset=zero)
        if key_padding is not None:
            size = (1, seqlen) if key_padding.dtype == torch.bool else (1,)
            small_padding = torch.ones(size, dtype=key_padding.dtype, device=query.device)
        small = dataclasses.replace(
            scoring,
            attn_mask=small_masks[0],
            bias=small_masks[1],
            dropout=small_dropout,
            key_padding=small_padding,
            positions=small_positions(),
            scale=abs(scoring.scale) or 1.0,
        )
        return tiny(query, seqlen), tiny(key, seqlen), tiny(value, seqlen), small

    def launch(tiling: Configuration, seqlen: int) -> None:
        with on_device_of(query):
            implementations(*problem(seqlen))[0][tiling.name]()

    small_query, small_key, small_value, small = problem(64)
    tilings = {tiling.name: tiling for tiling in _tilings(small_query, small_key, small_value, small)}
    runs, small_class, _ = implementations(small_query, small_key, small_value, small)
    sm_count, offered, names = capability_of(query.device).sm_count, list(tilings.values()), list(runs)
    wanted: dict[Configuration, None] = {}
    for batch_heads, seqlen in itertools.product(
        (heads << bits for bits in range(9)), (1 << bits for bits in range(13))
    ):
        default = default_configuration(offered, sm_count, batch_heads, seqlen)
        of_this_size = (
            *small_class[: _SIZES.start],
            *_size_class(batch_heads, seqlen, seqlen),
            *small_class[_SIZES.stop :],
        )
        known = known_choice("attention", of_this_size, names)
        wanted[default if known is None else tilings.get(known, default)] = None
    kinds = tuple(None if tensor is None else tensor.dtype for tensor in (query, value, *masks, key_padding))
    sixteens = tuple(tensor.stride(2) % 16 == 0 for tensor in (small_query, small_key, small_value))
    sizes = (head_dim, value.shape[3], heads // key.shape[1], sixteens, per_query, float32_precision())
    in_memory = positions.q_offset.dtype if isinstance(positions.q_offset, torch.Tensor) else None
    others = (scoring.kinds_besides_masks, scoring.hidden_rows, positions.can_hide_a_row, in_memory, scoring.mask_hides)
    for tiling in wanted:
        short, long = 16, 2 * tiling.block_n + 16
        for seqlen in (short, long) if key_padding is not None and key_padding.dtype == torch.bool else (short,):
            yield (tiling, kinds, sizes, others, seqlen == long), functools.partial(launch, tiling, seqlen)


def _attention_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scoring_arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_outputs(query, value)


def _attention_with_statistics_fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *scoring_arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return *allocate_outputs(query, value), _allocate_statistics(query)


_MASK, _BY_DISTANCE, _BIAS = 3, 14, 15  # where these stand among the op's arguments


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    # Tensors are saved, so that a write to one in between is noticed; the rest is kept as it is.
    ctx.places = [place for place, value in enumerate(inputs) if isinstance(value, torch.Tensor)]
    ctx.arguments = [None if isinstance(value, torch.Tensor) else value for value in inputs]
    ctx.save_for_backward(*output[:2], *(inputs[place] for place in ctx.places))
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])


def _backward(
    ctx: Any, grad_output: torch.Tensor | None, grad_logsumexp: torch.Tensor | None, *_: Any
) -> tuple[Any, ...]:
    output, logsumexp, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for place, tensor in zip(ctx.places, tensors):
        arguments[place] = tensor
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    needed = ctx.needs_input_grad  # of the arguments that were given: trailing defaults are left out
    needs_bias_grad = len(needed) > _BIAS and needed[_BIAS]
    needs_distance_grad = len(needed) > _BY_DISTANCE and needed[_BY_DISTANCE]
    *operands, grad_bias, grad_by_distance = attention_backward_op(
        grad_output,
        grad_logsumexp,
        *arguments[:_MASK],
        output,
        logsumexp,
        needed[_MASK] or needs_bias_grad,
        needs_distance_grad,
        *arguments[_MASK:],
    )
    gradients: list[torch.Tensor | None] = [*operands, *[None] * (len(needed) - _MASK)]
    if needed[_MASK]:
        gradients[_MASK] = grad_bias
    if needs_bias_grad:
        gradients[_BIAS] = grad_bias
    if needs_distance_grad:
        gradients[_BY_DISTANCE] = grad_by_distance
    return tuple(gradients)


def _autocast(
    name: str,
    dtype: torch.dtype,
    device_type: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    *rest: Any,
) -> Any:
    """As torch's scaled_dot_product_attention: operands and a float mask in the autocast type."""
    others = list(rest)
    bias = _BIAS - _MASK - 1
    if len(others) > bias:
        others[bias] = cast(others[bias], dtype)
    operands = (cast(tensor, dtype) for tensor in (query, key, value, attn_mask))
    return getattr(torch.ops.kernl, name)(*operands, *others)


attention_op = define_op(
    f"attention(Tensor query, Tensor key, Tensor value, {SCORING_SCHEMA}) -> (Tensor output, Tensor logsumexp)",
    cpu=_attention,
    fake=_attention_fake,
    autograd=(_setup_context, _backward),
    autocast=functools.partial(_autocast, "attention"),
    vmap=over_batches(_MASK),
    ahead=_kernels_ahead,
)

attention_with_statistics_op = define_op(
    f"attention_with_statistics(Tensor query, Tensor key, Tensor value, {SCORING_SCHEMA}) "
    "-> (Tensor output, Tensor logsumexp, Tensor statistics)",
    cpu=_attention_with_statistics,
    fake=_attention_with_statistics_fake,
    autograd=(_setup_context, _backward),
    autocast=functools.partial(_autocast, "attention_with_statistics"),
)


# The public function


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_logsumexp: Literal[False] = ...,
    return_row_stats: Literal[False] = ...,
    **options: Any,
) -> torch.Tensor: ...


@overload
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    return_logsumexp: bool = ...,
    return_row_stats: bool = ...,
    **options: Any,
) -> tuple[torch.Tensor, ...]: ...


def attention(  # type: ignore[misc]  # the overloads name what decides the result's type only
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    key_padding: torch.Tensor | None = None,
    is_causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    prefix: torch.Tensor | None = None,
    q_offset: int | torch.Tensor = 0,
    alibi_slopes: torch.Tensor | None = None,
    relative_position_bias: RelativePositionBias | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    bias_before_scale: bool = False,
    mask_hides: bool = False,
    hidden_rows: str = "zero",
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_logsumexp: bool = False,
    return_row_stats: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """softmax(scale * query key^T + bias, masked) value.

    query: [batch, heads, seqlen_q, head_dim], float16, bfloat16, float32 or float64 (reference only), any strides;
        head_dim 1 to 512 (over 256: the reference).
    key: [batch, key_heads, seqlen_k, head_dim]; heads is a multiple of key_heads, and query head h attends to key head
        h // (heads / key_heads), without a copy.
    value: [batch, key_heads, seqlen_k, value_dim].
    attn_mask: bool (True = attend) or floating point (added to the scaled scores, in float32), broadcastable to
        [batch, heads, seqlen_q, seqlen_k]. Never materialised: dimensions of stride 0 stay so.
    bias: floating point, as a float attn_mask; for use beside a bool one.
    key_padding: bool [batch, seqlen_k] (True = visible) or int32 lengths [batch]. What is stored at a padded key, NaN
        included, has no influence. Tiles of keys before the first and after the last visible one cost nothing.
    is_causal: a query sees keys up to its own position. Combines with the masks, and with a window.
    window: (left, right): a query sees that many keys before and after its position and the one there; -1: all of
        them. Tiles outside of it cost nothing.
    prefix: int32 or int64 [batch]: the keys before it are visible to all queries of the row, whatever is_causal and the
        window say (masks and padding still hide).
    q_offset: the position of query 0 among the keys: an int, or a tensor of one integer or [batch] (read when the
        kernel runs: a replayed CUDA graph sees its value of now). 0: both are counted from the top left, torch's
        meaning of causal; seqlen_k - seqlen_q: from the bottom right. Windows, ALiBi and T5's bias count from it too.
    alibi_slopes: float32 [heads] or [batch, heads]: slope * |key - position| is subtracted from the scores (ALiBi).
        Without gradient.
    relative_position_bias: T5's, computed from its table in the kernel. Its table may need a gradient.
    softcap: c tanh(score / c) in place of the scaled score (Gemma 2); before masks and biases.
    scale: 1 / sqrt(head_dim) by default.
    bias_before_scale: scale * (bias + query key^T) in place of bias + scale * query key^T; no softcap then.
    mask_hides: what is True, or 1 (uint8 is accepted then), in attn_mask hides. No inverted copy is made.
    hidden_rows: what a query that sees no key gets: "zero" (as torch's sdpa; logsumexp -inf), or "mean", the mean of
        all seqlen_k values (as adding finfo.min to all its scores gives; logsumexp is float32's lowest number).
    dropout_p: probability, in [0, 1), with which each softmax probability is dropped; the others are divided by
        1 - dropout_p. logsumexp and statistics are those without dropout.
    seed, offset: of dropout: int64 tensors of one element on query's device, or ints. By default drawn from PyTorch's
        generator: inside a captured CUDA graph too, which then draws anew in each replay. Only the low 32 bits of the
        offset count.
    cu_seqlens_q, cu_seqlens_k: int32 or int64 [sequences + 1]: sequences of tokens packed one after the other in a
        batch of one; sequence s has tokens [cu_seqlens[s], cu_seqlens[s + 1]), possibly none, and sees its own keys.
        Queries count from 0 in each. "batch" then stands for sequences in attn_mask, bias, prefix, q_offset and
        alibi_slopes, seqlen_q and seqlen_k in the former two for max_seqlen_q and max_seqlen_k. No key_padding.
    max_seqlen_q, max_seqlen_k: no sequence is longer. By default read from cu_seqlens: on a GPU that waits for it.
    return_logsumexp: also return the logsumexp.
    return_row_stats: also return, last, the maximum of each row of scores and the sum of exp(score - maximum); of a
        hidden row -inf and 0. Without gradients.

    Returns output [batch, heads, seqlen_q, value_dim] of query's type, contiguous as [batch, seqlen_q, heads,
    value_dim], alone or first in a tuple; logsumexp (natural logarithm) and statistics are float32 [batch, heads,
    seqlen_q]. Output and logsumexp are differentiable in query, key, value, a float attn_mask, bias and the table of a
    relative position bias. float32 operands honour PyTorch's matmul precision (TF32 or not).

    Raises ValueError when shapes, types or devices do not fit, TypeError when an operand is not floating point.
    Source: Dao, "FlashAttention-2" (2023); `kernl.kernels.attention` names those of the parts.
    """
    check_operands(query, key, value)
    packed_lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    batch, seqlen_q, seqlen_k = check_packed(query, key, *packed_lengths, key_padding)
    shape = (batch, query.shape[1], seqlen_q, seqlen_k)
    check_masks(query, shape, attn_mask, bias, key_padding, mask_hides, bias_before_scale, softcap)
    check_positions(query, batch, window, q_offset, prefix, alibi_slopes, relative_position_bias, softcap)
    check_dropout(query, dropout_p, seed, offset)
    if hidden_rows not in HIDDEN_ROWS:
        raise ValueError(f"hidden_rows: got {hidden_rows!r}, accepted {', '.join(map(repr, HIDDEN_ROWS))}")
    if dropout_p > 0:
        seed, offset = random_state(query.device, seed, offset)
    arguments = op_arguments(
        query.shape[3],
        scale=scale,
        attn_mask=attn_mask,
        bias=bias,
        key_padding=key_padding,
        is_causal=is_causal,
        window=window,
        prefix=prefix,
        q_offset=q_offset,
        alibi_slopes=alibi_slopes,
        relative_position_bias=relative_position_bias,
        softcap=softcap,
        bias_before_scale=bias_before_scale,
        mask_hides=mask_hides,
        hidden_rows=hidden_rows,
        dropout_p=dropout_p,
        seed=seed,  # type: ignore[arg-type]
        offset=offset,  # type: ignore[arg-type]
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=seqlen_q if cu_seqlens_q is not None else 0,
        max_seqlen_k=seqlen_k if cu_seqlens_q is not None else 0,
    )
    if return_row_stats:
        output, logsumexp, statistics = torch.ops.kernl.attention_with_statistics(query, key, value, *arguments)
        maximum, total = statistics.unbind(0)
        return (output, logsumexp, maximum, total) if return_logsumexp else (output, maximum, total)
    output, logsumexp = torch.ops.kernl.attention(query, key, value, *arguments)
    return (output, logsumexp) if return_logsumexp else output


def random_state(
    device: torch.device, seed: int | torch.Tensor | None, offset: int | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Seed and offset as int64 tensors of one element; what is missing is drawn where the device's generator is."""

    def on_device(given: int | torch.Tensor) -> torch.Tensor:
        if isinstance(given, torch.Tensor):
            return given.reshape(1)
        return torch.full((1,), given, dtype=torch.int64, device=device)

    if seed is None:
        drawn = torch.randint(0, 2**63 - 1, (2,), dtype=torch.int64, device=device)
        return drawn[:1], drawn[1:] if offset is None else on_device(offset)
    return on_device(seed), on_device(0 if offset is None else offset)
