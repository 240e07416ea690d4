"""The ops of kernl, usable by themselves: each is a `torch.library` op plus a validated Python function.

    import kernl.ops
    output = kernl.ops.layer_norm(input, weight, bias)

They run Triton kernels on a GPU that has what these need and plain PyTorch everywhere else, differentiate, honour
autocast and work under `torch.compile` and `torch.export`.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

_HOMES = {
    "attention": "attention",
    "layer_norm": "norm",
    "add_layer_norm": "norm",
    "linear": "linear",
    "merged_linear": "linear",
}
# Bootstrap: explicit imports once all three files exist.
for _name, _home in _HOMES.items():
    if importlib.util.find_spec(f"kernl.ops.{_home}"):
        globals()[_name] = getattr(importlib.import_module(f"kernl.ops.{_home}"), _name)
