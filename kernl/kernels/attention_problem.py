"""What the attention kernels share on the host: what a problem is, how it is cut up, and the arguments of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernl.kernels.attention_common import ABSENT, BOOL, FARTHEST, FLOAT, HIDES, LENGTHS, LOG2E
from kernl.kernels.common import TRITON_TYPES, AotCase, block_of

MAX_HEAD_DIM = 256


@dataclass(frozen=True)
class Configuration:
    """How one launch is cut up: queries and keys per tile, warps, depth of the software pipeline.

    uses_tma: tiles are fetched by the tensor memory accelerator (compute capability 9.0 and newer), except values some
        of which are padding.
    max_registers: cap on the registers of a thread, so that more programs fit on a multiprocessor; None for no cap.
    """

    block_m: int
    block_n: int
    num_warps: int = 4
    num_stages: int = 2
    uses_tma: bool = False
    max_registers: int | None = None

    @property
    def name(self) -> str:
        """Readable and unique: "m128n64w8s3" or "m128n64w8s3r128-tma"."""
        registers = f"r{self.max_registers}" if self.max_registers else ""
        tail = "-tma" if self.uses_tma else ""
        return f"m{self.block_m}n{self.block_n}w{self.num_warps}s{self.num_stages}{registers}{tail}"

    @property
    def options(self) -> dict[str, int]:
        """Compile options beyond num_warps and num_stages."""
        return {} if self.max_registers is None else {"maxnreg": self.max_registers}


def tilings(*rows: str) -> tuple[Configuration, ...]:
    """Configurations from rows such as "128 64 8 3 tma 128": queries, keys, warps, stages, TMA, register cap."""
    found = []
    for row in rows:
        block_m, block_n, num_warps, num_stages, *rest = row.split()
        caps = [int(word) for word in rest if word != "tma"]
        sizes = (int(block_m), int(block_n), int(num_warps), int(num_stages))
        found.append(Configuration(*sizes, uses_tma="tma" in rest, max_registers=caps[0] if caps else None))
    return tuple(found)


def strides_of(tensor: torch.Tensor) -> list[int]:
    """Strides, 0 where a dimension has one element: what they are there must not cause another compilation."""
    strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride())]
    if tensor.shape[-1] == 1:
        strides[-1] = 1
    return strides


def alignment_of(*tensors: torch.Tensor) -> int:
    """16 bytes in elements when every row of these tensors begins at a multiple of that from its start, else 1.

    Nothing between: each value is another compilation.
    """
    elements = 16 // tensors[0].element_size()
    strides = [strides_of(tensor) for tensor in tensors]
    aligned = all(row[-1] == 1 and all(stride % elements == 0 for stride in row[:-1]) for row in strides)
    return elements if aligned else 1


@dataclass(frozen=True)
class Positions:
    """What depends on where a query and a key stand, besides the masks.

    The query i is at position i + q_offset among the keys. It sees the keys from `left` before it to `right` after it;
    None: all on that side. q_offset: a number, or a tensor of one integer or [batch] on the device, read when the
    kernel runs.
    alibi_slopes: float32 [heads] or [batch, heads]: slope * |distance| is subtracted from the score.
    distance_bias: float32 [heads, 2 * reach + 1], contiguous: added to the score of a key at distance
    d = key - position, at index reach + d, where d is clamped to [-reach, reach].
    prefix: integers [batch]: the keys before it are visible to all queries of the row, whatever the window.
    """

    left: int | None = None
    right: int | None = None
    q_offset: int | torch.Tensor = 0
    alibi_slopes: torch.Tensor | None = None
    distance_bias: torch.Tensor | None = None
    prefix: torch.Tensor | None = None

    @property
    def may_be_offset(self) -> bool:
        return isinstance(self.q_offset, (torch.Tensor, torch.SymInt)) or self.q_offset != 0

    @property
    def is_plain(self) -> bool:
        """Nothing, or causality from the top left."""
        return (
            self.left is None
            and (self.right is None or self.right == 0)
            and not self.may_be_offset
            and self.alibi_slopes is None
            and self.distance_bias is None
            and self.prefix is None
        )

    @property
    def can_hide_a_row(self) -> bool:
        """Whether a query may see no key at all. A causal one at an offset of 0 or more sees at least the first."""
        before_the_keys = isinstance(self.q_offset, torch.Tensor) or self.q_offset < 0
        return self.left is not None or (self.right is not None and (before_the_keys or self.right < 0))


ANYWHERE = Positions()


@dataclass(frozen=True)
class PackedLengths:
    """Sequences one after the other in one batch row: sequence s has the tokens [cu_seqlens[s], cu_seqlens[s + 1]).

    cu_seqlens_q, cu_seqlens_k: int32 or int64 [sequences + 1], contiguous. max_seqlen_q, max_seqlen_k: no sequence is
    longer.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def sequences(self) -> int:
        return self.cu_seqlens_q.shape[0] - 1


@dataclass(frozen=True)
class DropoutOptions:
    """Each probability is dropped with probability p; seed and offset: int64, of one element, on the device.

    first_batch: the number of the first batch row, where this is a part of a batch.
    """

    p: float
    seed: torch.Tensor
    offset: torch.Tensor
    first_batch: int = 0

    @property
    def threshold(self) -> int:
        """Of 31 random bits: those below are dropped."""
        return min(round(self.p * 2**31), 2**31 - 1)


@dataclass(frozen=True)
class Scoring:
    """What makes probabilities of the products of queries and keys.

    attn_mask: bool or uint8, True attends (mask_hides: what is not 0 is hidden); bias: float, added to the scaled
        scores, or before they are scaled (bias_before_scale). Both broadcast to [batch, heads, seqlen_q, seqlen_k].
        With packed lengths the sequences stand for the batch, here and in what follows.
    key_padding: bool [batch, seqlen_k] or int32 lengths [batch]. hidden_rows: "zero" or "mean".
    positions: windows, the offset of the queries, and what is added by distance. softcap: 0 for none.
    """

    attn_mask: torch.Tensor | None = None
    key_padding: torch.Tensor | None = None
    scale: float = 1.0
    hidden_rows: str = "zero"
    positions: Positions = ANYWHERE
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    bias_before_scale: bool = False
    mask_hides: bool = False
    dropout: DropoutOptions | None = None
    packed: PackedLengths | None = None

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but masks, and causality from the top left at most."""
        return (
            self.softcap == 0
            and self.positions.is_plain
            and not self.bias_before_scale
            and self.dropout is None
            and self.packed is None
        )

    @property
    def is_causal(self) -> bool:
        return self.positions.right == 0

    @property
    def is_natural(self) -> bool:
        """Whether something is done to the scores besides scaling them: they then keep their natural units."""
        positions = self.positions
        return (
            self.bias is not None
            or self.softcap != 0
            or positions.alibi_slopes is not None
            or positions.distance_bias is not None
        )

    @property
    def can_hide_a_row(self) -> bool:
        return (
            self.attn_mask is not None
            or self.bias is not None
            or self.key_padding is not None
            or self.packed is not None
            or self.positions.can_hide_a_row
        )

    @property
    def kind_of_mask(self) -> str:
        if self.attn_mask is None:
            return "none" if self.bias is None else "float"
        return "bool" if self.bias is None else "both"

    @property
    def kind_of_padding(self) -> str:
        return "none" if self.key_padding is None else "bool" if self.key_padding.dtype == torch.bool else "lengths"

    @property
    def kinds_besides_masks(self) -> tuple[bool, ...]:
        """Which things that are not plain there are: implementations are chosen by them."""
        positions = self.positions
        return (
            positions.right is not None,
            positions.left is not None,
            self.softcap != 0,
            positions.alibi_slopes is not None,
            positions.distance_bias is not None,
            positions.prefix is not None,
            self.bias_before_scale,
            self.dropout is not None,
            self.packed is not None,
        )

    def batch_of(self, query: torch.Tensor) -> int:
        """Batch rows, or packed sequences."""
        return query.shape[0] if self.packed is None else self.packed.sequences

    def expanded(self, tensor: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
        """attn_mask or bias with all its dimensions, those of stride 0 included."""
        if tensor is None:
            return None
        seqlen_q, seqlen_k = query.shape[2], key.shape[2]
        if self.packed is not None:
            seqlen_q, seqlen_k = self.packed.max_seqlen_q, self.packed.max_seqlen_k
        return tensor.expand(self.batch_of(query), query.shape[1], seqlen_q, seqlen_k)


@dataclass(frozen=True)
class Variant:
    """What is decided when a kernel is compiled: the constexpr argument HOW.

    mask, bias, key_padding: which kind (see `kernl.kernels.attention_common`). per_query: false where one row serves
    all queries. alignments: in elements, see `alignment_of`. top_left: positions of queries and keys count from the
    same token, so that no offset is compiled in. natural: see `Scoring.is_natural`.
    """

    head_dim: int
    value_dim: int
    block_d: int
    block_dv: int
    mask: int = ABSENT.value
    mask_per_query: bool = False
    mask_alignment: int = 1
    bias: int = ABSENT.value
    bias_per_query: bool = False
    bias_alignment: int = 1
    bias_before_scale: bool = False
    key_padding: int = ABSENT.value
    has_right: bool = False
    has_left: bool = False
    has_prefix: bool = False
    top_left: bool = True
    offset_in_memory: bool = False
    softcap: bool = False
    alibi: bool = False
    distance_bias: bool = False
    natural: bool = False
    varlen: bool = False
    dropout: bool = False
    hidden_rows_mean: bool = False
    alignment: int = 1
    wide_offsets: bool = False
    input_precision: str = "ieee"
    use_pdl: bool = False


# Strides and sizes that no kernel is compiled for: a 1 or a multiple of 16 there would be another compilation.
UNSPECIALIZED = (
    *(
        "heads",
        "seqlen_q",
        "seqlen_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "right",
        "left",
        "reach",
        "q_offset",
        "dropout_threshold",
    ),
    *(f"{operand}_stride_{dim}" for operand in ("query", "key", "value", "grad", "output") for dim in "bh"),
    *(f"{mask}_stride_{dim}" for mask in ("mask", "bias") for dim in "bhm"),
    *("padding_stride_b", "alibi_stride_b", "offset_stride_b"),
    *("batch", "bias_batch", "bias_heads", "blocks_m_of_query", "row_blocks", "splits"),
)


def strides_by_name(name: str, tensor: torch.Tensor | None, dims: str) -> dict[str, int]:
    """Kernel arguments: {"key_stride_b": ...}, zeros where there is no tensor."""
    strides = [0] * len(dims) if tensor is None else strides_of(tensor)
    return {f"{name}_stride_{dim}": stride for dim, stride in zip(dims, strides)}


def scoring_arguments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scoring: Scoring,
    *others: torch.Tensor,
    input_precision: str,
    use_pdl: bool,
) -> dict[str, object]:
    """The arguments of all attention kernels that describe a problem, by name. What a kernel lacks is to be left out.

    others: further operands that are read by rows.
    """
    positions, packed, dropout = scoring.positions, scoring.packed, scoring.dropout
    mask, bias = (scoring.expanded(tensor, query, key) for tensor in (scoring.attn_mask, scoring.bias))
    padding, slopes, by_distance = scoring.key_padding, positions.alibi_slopes, positions.distance_bias
    heads, seqlen_q, head_dim = query.shape[1:]
    key_heads, seqlen_k, value_dim = value.shape[1:]
    offset = positions.q_offset
    padding_strides = [0, 0] if padding is None else [*strides_of(padding), 0][:2]
    strides = {
        **strides_by_name("query", query, "bhmd"),
        **strides_by_name("key", key, "bhnd"),
        **strides_by_name("value", value, "bhnd"),
        **strides_by_name("mask", mask, "bhmn"),
        **strides_by_name("bias", bias, "bhmn"),
    }
    natural = scoring.is_natural
    arguments: dict[str, object] = {
        "query": query,
        "key": key,
        "value": value,
        "attn_mask": mask,
        "bias": bias,
        "key_padding": padding,
        "alibi_slopes": slopes,
        "distance_bias": by_distance,
        "prefix": positions.prefix,
        "q_offset": offset,
        "cu_seqlens_q": None if packed is None else packed.cu_seqlens_q,
        "cu_seqlens_k": None if packed is None else packed.cu_seqlens_k,
        "dropout_seed": None if dropout is None else dropout.seed,
        "dropout_offset": None if dropout is None else dropout.offset,
        **strides,
        "padding_stride_b": padding_strides[0],
        "padding_stride_n": padding_strides[1],
        "alibi_stride_b": heads if slopes is not None and slopes.dim() == 2 else 0,
        "offset_stride_b": 1 if isinstance(offset, torch.Tensor) and offset.numel() > 1 else 0,
        "heads": heads,
        "group": heads // key_heads,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "max_seqlen_q": seqlen_q if packed is None else packed.max_seqlen_q,
        "right": max(-FARTHEST.value, min(positions.right or 0, FARTHEST.value)),
        "left": max(-FARTHEST.value, min(positions.left or 0, FARTHEST.value)),
        "reach": 0 if by_distance is None else by_distance.shape[1] // 2,
        "dropout_threshold": 0 if dropout is None else dropout.threshold,
        "scale": scoring.scale,
        "score_scale": scoring.scale if natural else scoring.scale * LOG2E.value,
        "softcap": scoring.softcap,
        "keep_scale": 1.0 if dropout is None else 1 / (1 - dropout.p),
    }
    variant = Variant(
        head_dim=head_dim,
        value_dim=value_dim,
        block_d=block_of(head_dim),
        block_dv=block_of(value_dim),
        mask=ABSENT.value if mask is None else HIDES.value if scoring.mask_hides else BOOL.value,
        mask_per_query=strides["mask_stride_m"] != 0,
        mask_alignment=1 if mask is None else alignment_of(mask),
        bias=ABSENT.value if bias is None else FLOAT.value,
        bias_per_query=strides["bias_stride_m"] != 0,
        bias_alignment=1 if bias is None else alignment_of(bias),
        bias_before_scale=scoring.bias_before_scale and bias is not None,
        key_padding={"none": ABSENT, "bool": BOOL, "lengths": LENGTHS}[scoring.kind_of_padding].value,
        has_right=positions.right is not None,
        has_left=positions.left is not None,
        has_prefix=positions.prefix is not None and (positions.right is not None or positions.left is not None),
        top_left=positions.is_plain,
        offset_in_memory=isinstance(offset, torch.Tensor),
        softcap=scoring.softcap != 0,
        alibi=slopes is not None,
        distance_bias=by_distance is not None,
        natural=natural,
        varlen=packed is not None,
        dropout=dropout is not None,
        hidden_rows_mean=scoring.hidden_rows == "mean" and scoring.can_hide_a_row,
        alignment=alignment_of(query, key, value, *others),
        wide_offsets=max(*strides.values(), *(stride for tensor in others for stride in strides_of(tensor))) >= 2**23,
        input_precision=input_precision,
        use_pdl=use_pdl,
    )
    return {**arguments, "HOW": variant}


def of_kernel(kernel: Any, arguments: dict[str, object]) -> dict[str, object]:
    """Those that the kernel takes."""
    names = kernel.arg_names
    return {name: arguments[name] for name in names if name in arguments}


_TYPES_OF_CASE = {
    "dropout_seed": "*i64",
    "dropout_offset": "*i64",
    "scale": "fp32",
    "score_scale": "fp32",
    "softcap": "fp32",
    "keep_scale": "fp32",
}


def case_of(
    name: str,
    arch: int,
    kernel: Any,
    configuration: Configuration,
    dtype: torch.dtype,
    head_dim: int,
    types: dict[str, str],
    values: dict[str, object],
    *,
    value_dim: int | None = None,
    attn_mask: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    per_query: bool = True,
    mask_alignment: int = 1,
    bias_before_scale: bool = False,
    key_padding: torch.dtype | None = None,
    is_causal: bool = False,
    positional: bool = False,
    prefix: bool = False,
    packed: bool = False,
    dropout: bool = False,
    hidden_rows: str = "zero",
    group: int = 1,
    input_precision: str = "ieee",
) -> AotCase:
    """The compilation that a launch triggers for operands contiguous as [batch, seqlen, heads, dim].

    types, values: of the arguments that only this kernel has (pointers, or constexprs and what is None).
    positional: with all that depends on positions (window, ALiBi, bias by distance, offset in memory), and a softcap.
    """
    value_dim = head_dim if value_dim is None else value_dim
    element = TRITON_TYPES[dtype]
    unit = 16 // dtype.itemsize
    padding = ABSENT if key_padding is None else BOOL if key_padding == torch.bool else LENGTHS
    variant = Variant(
        head_dim=head_dim,
        value_dim=value_dim,
        block_d=block_of(head_dim),
        block_dv=block_of(value_dim),
        mask=ABSENT.value if attn_mask is None else HIDES.value if attn_mask == torch.uint8 else BOOL.value,
        mask_per_query=per_query and attn_mask is not None,
        mask_alignment=1 if attn_mask is None else mask_alignment,
        bias=ABSENT.value if bias is None else FLOAT.value,
        bias_per_query=per_query and bias is not None,
        bias_alignment=1 if bias is None else mask_alignment,
        bias_before_scale=bias_before_scale,
        key_padding=padding.value,
        has_right=is_causal or positional,
        has_left=positional,
        has_prefix=prefix,
        top_left=not (positional or prefix),
        offset_in_memory=positional,
        softcap=positional,
        alibi=positional,
        distance_bias=positional,
        natural=positional or bias is not None,
        varlen=packed,
        dropout=dropout,
        hidden_rows_mean=hidden_rows == "mean",
        alignment=unit if head_dim % unit == value_dim % unit == 0 else 1,
        input_precision=input_precision,
        use_pdl=arch >= 90,
    )
    all_values: dict[str, object] = {
        **dict.fromkeys(("query_stride_d", "key_stride_d", "value_stride_d", "grad_stride_d", "output_stride_d"), 1),
        **dict.fromkeys(("mask_stride_n", "bias_stride_n", "padding_stride_n"), 1),
        "BLOCK_M": configuration.block_m,
        "BLOCK_N": configuration.block_n,
        "SCAN_PADDING": key_padding == torch.bool,
        "HOW": variant,
        **values,
    }
    if group == 1:
        all_values["group"] = 1
    all_types = {**dict.fromkeys(("query", "key", "value"), f"*{element}"), **_TYPES_OF_CASE, **types}
    if positional:
        all_types["q_offset"] = "*i64"
    optional = {
        "attn_mask": None if attn_mask is None else f"*{TRITON_TYPES[attn_mask]}",
        "bias": None if bias is None else f"*{TRITON_TYPES[bias]}",
        "key_padding": None if key_padding is None else f"*{TRITON_TYPES[key_padding]}",
        **dict.fromkeys(("alibi_slopes", "distance_bias"), "*fp32" if positional else None),
        "prefix": "*i32" if prefix else None,
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "*i32" if packed else None),
        **dict.fromkeys(("dropout_seed", "dropout_offset"), "*i64" if dropout else None),
    }
    all_values |= {argument: None for argument, kind in optional.items() if kind is None}
    all_types |= {argument: kind for argument, kind in optional.items() if kind is not None}
    names = kernel.arg_names
    # Sixteen is a common divisor of heads * dim in most models; the kernels do not need it.
    divisible = ("query_stride_m", "key_stride_n", "value_stride_n", "grad_stride_m", "output_stride_m")
    return AotCase(
        name=name,
        kernel=kernel,
        signature={argument: all_types.get(argument, "i32") for argument in names if argument not in all_values},
        constexprs={argument: all_values[argument] for argument in names if argument in all_values},
        num_warps=configuration.num_warps,
        num_stages=configuration.num_stages,
        divisible_by_16=tuple(argument for argument in divisible if argument in names),
        options={**configuration.options, **({"launch_pdl": True} if arch >= 90 else {})},
    )
