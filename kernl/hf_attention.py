"""kernl's attention inside Hugging Face models, without compiling anything.

    kernl.register_attention()
    model = AutoModel.from_pretrained(name, attn_implementation="kernl")

Models that get their attention from transformers' `AttentionInterface`, which most do, then call `kernl.ops.attention`:
grouped-query attention without a copy of keys and values, Gemma's softcap, T5's position bias. Masks are those of
"sdpa": bool, and none at all where nothing is hidden or a causal flag says it. Dropout on probabilities (in training)
goes to PyTorch's sdpa, but for models with a softcap, which sdpa has not. Models that compute attention by themselves
go on doing so, and the user is told.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from kernl.ops import attention
from kernl.report import warn_once

NAME = "kernl"


def register_attention() -> str:
    """Make "kernl" known to transformers as an attention implementation, with its masks. Returns the name.

    Calling it twice changes nothing. Select it with `attn_implementation="kernl"` or
    `model.set_attn_implementation("kernl")`.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(NAME, attention_of_module)
    AttentionMaskInterface.register(NAME, mask_for_model)
    return NAME


def mask_for_model(*args: Any, config: Any = None, **kwargs: Any) -> torch.Tensor | None:
    """What transformers calls for the masks of a model: bool ones where its attention comes from the interface.

    Some models compute attention themselves whatever implementation is chosen, and add the mask to the scores: they get
    the additive masks of "eager", and the user is told that kernl's attention is not used.
    """
    from transformers.masking_utils import eager_mask, sdpa_mask

    modelling = sys.modules.get(type(config).__module__.replace(".configuration_", ".modeling_"))
    if modelling is None or hasattr(modelling, "ALL_ATTENTION_FUNCTIONS"):
        return sdpa_mask(*args, config=config, **kwargs)
    model = getattr(config, "model_type", type(config).__name__)
    warn_once(
        f"bypass:{model}", f'attn_implementation="kernl": {model} models compute attention by themselves; not used'
    )
    return eager_mask(*args, config=config, **kwargs)


def attention_of_module(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls: as its own `sdpa_attention_forward`, with a softcap.

    query [batch, heads, seqlen_q, head_dim]; key, value [batch, key_heads, seqlen_k, head_dim]. attention_mask bool
    (True = attend) or float, broadcastable to [batch, heads, seqlen_q, seqlen_k]. position_bias: float, likewise.
    Returns the output as [batch, seqlen_q, heads, head_dim], and None in place of the probabilities.

    Raises NotImplementedError for attention sinks (gpt-oss).
    """
    if kwargs.get("s_aux") is not None:
        raise NotImplementedError(
            'attn_implementation="kernl" has no attention sinks, which this model uses; load it with "eager"'
        )
    if kwargs.get("output_attentions"):
        warn_once("output_attentions", 'attn_implementation="kernl" gives no attention weights; use "eager" for these')
    if dropout > 0.0 and softcap is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        common = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **common, **kwargs)
        return output, None
    is_decoder = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(query.shape[2] > 1 and attention_mask is None and is_decoder)
    masks: dict[str, Any] = {"attn_mask": attention_mask}
    if position_bias is not None:
        if attention_mask is None or attention_mask.dtype != torch.bool:
            masks = {"attn_mask": position_bias if attention_mask is None else attention_mask + position_bias}
        else:
            # Apart, so that nothing of [batch, heads, seqlen_q, seqlen_k] is made. To eager models, which add the
            # lowest number to hidden scores, all keys of a query that sees none look the same.
            masks |= {"bias": position_bias, "hidden_rows": "mean"}
    output = attention(query, key, value, is_causal=causal, scale=scaling, softcap=softcap, dropout_p=dropout, **masks)
    return output.transpose(1, 2).contiguous(), None
