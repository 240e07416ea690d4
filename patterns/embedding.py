"""Sums of embedding lookups, with which text models begin.

    embedding(ids, words) + embedding(types, kinds) + embedding(positions, places)      two to four lookups

BERT, RoBERTa, ELECTRA and ALBERT add three, DistilBERT two. A sum rounds after each addition, so it is kept in the
order in which the model adds: (a + b) + c is taken, and so are c + (b + a) and the like, which round alike; of
(a + b) + (c + d) the two inner sums are.

The norm that follows is matched by itself (patterns/norm.py): a sum of lookups is no residual. That is why this pattern
comes before the norms: they then see one value, and report nothing that they would have refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from kernl.graph import Emitted, Match, Pattern, Refused, anything, emit, op, register_pattern, require, value_of, var
from kernl.patterns.common import kernl_op, require_kernel_tensors, short

_INDEX_DTYPES = (torch.int64, torch.int32)


def _lookup(position: int) -> Pattern:
    return op(
        "embedding",
        input=var(f"indices{position}"),
        weight=var(f"table{position}"),
        padding_idx=anything(f"padding_idx{position}"),
        max_norm=anything(f"max_norm{position}"),
        norm_type=anything(f"norm_type{position}"),
        scale_grad_by_freq=anything(f"scale_grad_by_freq{position}"),
        sparse=anything(f"sparse{position}"),
    )


_TWO = op("add", _lookup(0), _lookup(1))
_THREE = op("add", _TWO, _lookup(2))
_FOUR = op("add", _THREE, _lookup(3))


@register_pattern("embedding_sum", _FOUR | _THREE | _TWO, priority=45)
def embedding_sum(match: Match) -> Emitted:
    count = next(position for position in range(5) if f"table{position}" not in match.bindings)
    indices: list[Node] = [match[f"indices{position}"] for position in range(count)]
    tables: list[Node] = [match[f"table{position}"] for position in range(count)]
    for position in range(count):
        require(match[f"max_norm{position}"] is None, "a lookup renormalises its table (max_norm)")
        require(not match[f"scale_grad_by_freq{position}"], "a lookup scales gradients by frequency")
        require(not match[f"sparse{position}"], "a lookup gives sparse gradients")
    require_kernel_tensors(*tables, autocast=False)  # autocast casts neither lookups nor sums
    for index in map(value_of, indices):
        if index.dtype not in _INDEX_DTYPES:
            accepted = ", ".join(map(short, _INDEX_DTYPES))
            raise Refused(f"indices of dtype {short(index.dtype)} (accepted: {accepted})")
    require(len({value_of(table).shape[1] for table in tables}) == 1, "tables of different widths")
    padding = [_padding_row(match[f"padding_idx{position}"], tables[position]) for position in range(count)]
    return emit(kernl_op("embedding_sum"), indices, tables, padding)


def _padding_row(padding_idx: Any, table: Node) -> int:
    """The row without gradient, counted from zero, or -1."""
    if padding_idx is None:
        return -1
    entries = value_of(table).shape[0]
    require(
        isinstance(padding_idx, int) and (padding_idx >= 0 or isinstance(entries, int)),
        "a padding index that is not known",
    )
    return padding_idx if padding_idx >= 0 else padding_idx + entries
