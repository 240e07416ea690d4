"""kernl: transformer models at full speed on NVIDIA GPUs, without touching the model.

    model = kernl.optimize_model(model)              # any Hugging Face or plain PyTorch model
    model = torch.compile(model, backend="kernl")    # the same pipeline under torch.compile

Names are resolved on first use, so that `import kernl` costs nothing.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout that is not installed, `patterns/` lies beside this package instead of inside it.
_checkout = Path(__file__).resolve().parent.parent
if not (_checkout / "kernl" / "patterns").exists() and (_checkout / "patterns" / "__init__.py").exists():
    __path__.append(str(_checkout))

__version__ = "0.1.0"

_HOMES = {
    "optimize_model": "kernl.optimize",
    "restore_model": "kernl.optimize",
    "disabled": "kernl.optimize",
    "generate": "kernl.generate",
    "Options": "kernl.options",
    "KernlWarning": "kernl.report",
    "register_attention": "kernl.hf_attention",
    "register_pattern": "kernl.graph",
    "ops": "kernl.ops",
    "nn": "kernl.nn",
}

if TYPE_CHECKING:
    from kernl import nn as nn
    from kernl import ops as ops
    from kernl.generate import generate as generate
    from kernl.graph import register_pattern as register_pattern
    from kernl.hf_attention import register_attention as register_attention
    from kernl.optimize import disabled as disabled
    from kernl.optimize import optimize_model as optimize_model
    from kernl.optimize import restore_model as restore_model
    from kernl.options import Options as Options
    from kernl.report import KernlWarning as KernlWarning

__all__ = [
    "KernlWarning",
    "Options",
    "__version__",
    "disabled",
    "generate",
    "nn",
    "ops",
    "optimize_model",
    "register_attention",
    "register_pattern",
    "restore_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernl' has no attribute '{name}'; it has {', '.join(__all__)}")
    home = importlib.import_module(_HOMES[name])
    return home if home.__name__ == f"kernl.{name}" else getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
