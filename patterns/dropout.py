"""Dropout that does nothing.

    dropout(x, p) = x      when the model is not training, or p = 0

Recognised by the operation, never by its name or place: every model written for training carries dozens of these into
inference (BERT: 1 + 3 per layer). One that is active stays, and is reported.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from kernl.graph import Refused, anything, op, register_pattern, var

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


@register_pattern("dropout", op(DROPOUTS, var("input"), p=anything("p"), training=anything("training")), priority=100)
def remove_dropout(input: Node, p: Any, training: Any) -> Node | Refused:
    if training is False or (isinstance(p, (int, float)) and p == 0):
        return input
    return Refused("dropout is active (training)")
