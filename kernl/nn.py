"""Modules of linear attention, called as those of "Transformers are RNNs" (Katharopoulos et al. 2020) are.

    attention = kernl.nn.CausalLinearAttention(query_dimensions=64)
    output = attention(queries, keys, values, attn_mask, query_lengths, key_lengths)     [batch, length, heads, dim]

    step = kernl.nn.RecurrentLinearAttention(query_dimensions=64)                        one token at a time
    output, state = step(query, key, value, state)                                       [batch, heads, dim]

They hold no weights (a feature map may): projections, heads and dropout are the layer's around them. The computation is
`kernl.ops.linear_attention`.

**Masks** are objects with `all_ones`, `lower_triangular` and `float_matrix`, or tensors: bool (True = attend) or
floating point (added to scores: 0 = attend). A linear attention cannot hide single keys from single queries, so the
non-causal module takes a mask of ones only, and the causal one a lower triangular one; None stands for that mask.
`key_lengths` is an object with `lengths` or `float_matrix` [batch, length], an integer tensor [batch], or a bool or 0/1
tensor [batch, length]. `query_lengths` is accepted and has no effect: rows past a query's length mean nothing.

**Feature maps** are names ("elu", "relu", "identity", applied inside the kernel) or factories: called with
query_dimensions they give an object with `new_feature_map(device)`, called before each forward pass, `forward_queries`
and `forward_keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kernl.ops import LinearAttentionState, linear_attention

__all__ = ["CausalLinearAttention", "LinearAttention", "LinearAttentionState", "RecurrentLinearAttention"]

_NAMED_MAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elu": lambda x: nn.functional.elu(x) + 1,
    "relu": torch.relu,
    "identity": lambda x: x,
}


class _LinearAttention(nn.Module):
    """What the three modules share: the feature map, and how operands reach the op."""

    def __init__(self, query_dimensions: int, feature_map: str | Callable[[int], Any] | None = None, eps: float = 1e-6):
        """query_dimensions: E of a head. feature_map: a name or a factory, "elu" if None. eps: added to the normaliser.

        Raises ValueError when the name is unknown, TypeError when feature_map is neither.
        """
        super().__init__()
        self.eps = eps
        self.feature_map: Any = "elu" if feature_map is None else feature_map
        if isinstance(self.feature_map, str):
            if self.feature_map not in _NAMED_MAPS:
                accepted = ", ".join(map(repr, _NAMED_MAPS))
                raise ValueError(f"feature_map: got {self.feature_map!r}, accepted {accepted} or a factory")
            return
        if not callable(self.feature_map):
            raise TypeError(f"feature_map: got {feature_map!r}, accepted a name or a factory")
        self.feature_map = self.feature_map(query_dimensions)

    def extra_repr(self) -> str:
        name = f"feature_map={self.feature_map!r}, " if isinstance(self.feature_map, str) else ""
        return f"{name}eps={self.eps}"

    def _mapped(
        self, queries: torch.Tensor, keys: torch.Tensor, key_mask: torch.Tensor | None, is_new: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Queries and keys, and the name of what the op is still to apply to them."""
        if isinstance(self.feature_map, str):
            if key_mask is None:
                return queries, keys, self.feature_map
            # A mask with holes: phi(key) has to be zero, not the key.
            function = _NAMED_MAPS[self.feature_map]
            queries, keys = function(queries), function(keys)
        else:
            if is_new:
                self.feature_map.new_feature_map(queries.device)
            queries, keys = self.feature_map.forward_queries(queries), self.feature_map.forward_keys(keys)
        if key_mask is not None:
            keys = keys * key_mask.to(keys.dtype)[:, :, None, None]
        return queries, keys, "identity"


class LinearAttention(_LinearAttention):
    """output_i = phi(q_i) sum_j phi(k_j)^T v_j / (<phi(q_i), sum_j phi(k_j)> + eps), over all keys."""

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attn_mask: Any = None,
        query_lengths: Any = None,
        key_lengths: Any = None,
    ) -> torch.Tensor:
        """queries [batch, length_q, heads, E], keys [.., length_k, .., E], values [.., length_k, .., M].

        Returns [batch, length_q, heads, M]. Raises RuntimeError when attn_mask is not all ones.
        """
        if not _is_all_ones(attn_mask):
            raise RuntimeError(
                "attn_mask: LinearAttention takes a mask of ones only, since it cannot hide keys from single queries; "
                "use CausalLinearAttention for a lower triangular mask, and key_lengths for padding"
            )
        lengths, key_mask = _key_lengths(key_lengths)
        queries, keys, name = self._mapped(queries, keys, key_mask)
        return linear_attention(queries, keys, values, feature_map=name, key_lengths=lengths, eps=self.eps)


class CausalLinearAttention(_LinearAttention):
    """As `LinearAttention`, where a query sees the keys up to its own position."""

    def forward(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        attn_mask: Any = None,
        query_lengths: Any = None,
        key_lengths: Any = None,
        *,
        initial_state: LinearAttentionState | None = None,
        return_state: bool = False,
    ) -> Any:
        """As `LinearAttention.forward`; keys and values are cut or filled up to length_q.

        initial_state, return_state: to continue a sequence (also with `RecurrentLinearAttention`).

        Returns [batch, length_q, heads, M], or that and the state. Raises RuntimeError when attn_mask is not lower
        triangular.
        """
        if not _is_lower_triangular(attn_mask):
            raise RuntimeError(
                "attn_mask: CausalLinearAttention takes a lower triangular mask only, since it cannot hide other keys "
                "from single queries; use LinearAttention for a mask of ones, and key_lengths for padding"
            )
        lengths, key_mask = _key_lengths(key_lengths)
        queries, keys, name = self._mapped(queries, keys, key_mask)
        output, state = linear_attention(
            queries,
            keys,
            values,
            feature_map=name,
            key_lengths=lengths,
            causal=True,
            eps=self.eps,
            initial_state=initial_state,
            return_state=True,
        )
        return (output, state) if return_state else output


class RecurrentLinearAttention(_LinearAttention):
    """One position of `CausalLinearAttention` from the sums over those before it: for generation."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        state: LinearAttentionState | None = None,
    ) -> tuple[torch.Tensor, LinearAttentionState]:
        """query and key [batch, heads, E], value [batch, heads, M]; state: None at the first position.

        Returns output [batch, heads, M] and the state after this position; `state` itself is not changed. A feature map
        that is drawn anew (`new_feature_map`) is drawn at the first position.
        """
        rows = [tensor.unsqueeze(1) for tensor in (query, key, value)]
        queries, keys, name = self._mapped(rows[0], rows[1], None, is_new=state is None)
        output, after = linear_attention(
            queries,
            keys,
            rows[2],
            feature_map=name,
            causal=True,
            eps=self.eps,
            initial_state=state,
            return_state=True,
        )
        return output.squeeze(1), after


def _is_all_ones(mask: Any) -> bool:
    if mask is None:
        return True
    if isinstance(mask, torch.Tensor):
        return bool(_attends(mask).all())
    return bool(mask.all_ones)


def _is_lower_triangular(mask: Any) -> bool:
    if mask is None:
        return True
    if isinstance(mask, torch.Tensor):
        attends = _attends(mask)
        return bool((attends == torch.ones_like(attends).tril()).all())
    return bool(mask.lower_triangular)


def _attends(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _key_lengths(key_lengths: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """As lengths [batch], or as a mask [batch, length] of zeros and ones."""
    if key_lengths is None:
        return None, None
    if isinstance(key_lengths, torch.Tensor):
        if key_lengths.dim() == 1 and not (key_lengths.is_floating_point() or key_lengths.dtype == torch.bool):
            return key_lengths.to(torch.int64), None
        if key_lengths.dim() == 2:
            return None, key_lengths
        raise ValueError(
            f"key_lengths: got {key_lengths.dtype} of shape {list(key_lengths.shape)}, accepted integers [batch], or "
            "bool or 0/1 [batch, length]"
        )
    if bool(getattr(key_lengths, "all_ones", False)):
        return None, None
    lengths = getattr(key_lengths, "lengths", None)
    if isinstance(lengths, torch.Tensor):
        return lengths.to(torch.int64), None
    return None, key_lengths.float_matrix
