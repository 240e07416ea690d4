"""Who may import whom. The rule of the house, read from the source with `ast`: imports inside functions count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Room -> what it may import of ours. A name stands for itself and everything below it. A room is matched by the longest
# name that fits, so `kernl.ops` rules for every file in there.
ALLOWED: dict[str, tuple[str, ...]] = {
    "kernl.kernels": ("kernl.kernels",),
    "kernl.ops": (
        "kernl.ops",
        "kernl.kernels",
        "kernl.runtime.capability",
        "kernl.runtime.capture_order",
        "kernl.runtime.tuning",
    ),
    "kernl.runtime": ("kernl.runtime",),
    "kernl.graph": ("kernl.graph",),
    "kernl.patterns": ("kernl.patterns", "kernl.graph", "kernl.ops"),
    # Helpers for tests of the ops, of use to people outside too. It reaches for the interpreter's switches only.
    "kernl.testing": ("kernl.ops.common",),
    "kernl.timing": (),
    "kernl.nn": ("kernl.ops",),
    "kernl.options": (),
    "kernl.report": ("kernl.options", "kernl.graph", "kernl.runtime"),
    # Of the ops it may only ask for kernels to be compiled ahead of a first run. Which op stands for what is the
    # patterns' business, and where it runs the op's own.
    "kernl.backend": (
        "kernl.options",
        "kernl.report",
        "kernl.graph",
        "kernl.patterns",
        "kernl.runtime",
        "kernl.ops.common",
    ),
    "kernl.model_state": (),
    "kernl.signature": (),
    "kernl.sdpa_shape": (),
    "kernl.dynamo_settings": ("kernl.options", "kernl.sdpa_shape"),
    "kernl.buckets": ("kernl.graph", "kernl.options", "kernl.report", "kernl.signature"),
    "kernl.front_door": (
        "kernl.backend",
        "kernl.buckets",
        "kernl.dynamo_settings",
        "kernl.model_state",
        "kernl.options",
        "kernl.report",
        "kernl.runtime",
        "kernl.sdpa_shape",
        "kernl.signature",
    ),
    "kernl.warmup": (),
    "kernl.hf_attention": ("kernl.ops", "kernl.report"),
    "kernl.token_choice": (),
    "kernl.decoding": ("kernl.runtime", "kernl.token_choice"),
    "kernl.generation_call": ("kernl.decoding", "kernl.token_choice"),
    "kernl.transformers_loop": ("kernl.decoding", "kernl.generation_call"),
    # The loop of generation and `optimize_model` sit side by side: each finds the other when it is asked to.
    "kernl.generate": (
        "kernl.backend",
        "kernl.decoding",
        "kernl.front_door",
        "kernl.generation_call",
        "kernl.handle",
        "kernl.model_state",
        "kernl.optimize",
        "kernl.options",
        "kernl.report",
        "kernl.runtime",
        "kernl.token_choice",
        "kernl.transformers_loop",
    ),
    "kernl.handle": (
        "kernl.front_door",
        "kernl.generate",
        "kernl.options",
        "kernl.report",
        "kernl.testing",
        "kernl.warmup",
    ),
    "kernl.optimize": (
        "kernl.backend",
        "kernl.front_door",
        "kernl.generate",
        "kernl.handle",
        "kernl.options",
        "kernl.report",
    ),
}

# Nothing below the front door knows a model library; the graph engine and the patterns know no kernel language either.
FORBIDDEN_OUTSIDE: dict[str, tuple[str, ...]] = {
    "kernl.kernels": ("transformers", "tabulate", "tqdm"),
    "kernl.ops": ("transformers", "tabulate", "tqdm"),
    "kernl.runtime": ("transformers", "tabulate"),
    "kernl.graph": ("transformers", "triton"),
    "kernl.patterns": ("transformers", "triton"),
    "kernl.backend": ("transformers", "triton"),
    "kernl.testing": ("transformers", "triton"),
    "kernl.timing": ("transformers", "triton"),
}

# The top of the house may import anything of ours; nobody below imports it.
TOP = ("kernl.cli", "kernl.coverage", "kernl.demo", "kernl.__main__")


def _modules() -> dict[str, Path]:
    files = {}
    for folder, package in (("kernl", "kernl"), ("patterns", "kernl.patterns")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *(part for part in parts if part != "__init__")))] = path
    return files


def _resolve(module: str, path: Path, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    base = package[: len(package) - (node.level - 1)]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_names(source: str, module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports, by statement or by `importlib.import_module("...")`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _resolve(module, path, node)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def _is_under(name: str, root: str) -> bool:
    return name == root or name.startswith(root + ".")


def _room(module: str) -> str:
    return max((room for room in (*ALLOWED, *TOP) if _is_under(module, room)), key=len)


def _is_lawful(room: str, name: str) -> bool:
    if not _is_under(name, "kernl"):
        return not any(_is_under(name, root) for root in FORBIDDEN_OUTSIDE.get(room, ()))
    if room in TOP or name == "kernl.__version__":
        return True
    return any(_is_under(name, root) for root in (room, *ALLOWED[room]))


def breaches(module: str, path: Path, source: str) -> list[str]:
    room = _room(module)
    return [
        f"{path.relative_to(ROOT)}:{line}: {room} may not import {name}"
        for line, name in imported_names(source, module, path)
        if not _is_lawful(room, name)
    ]


@pytest.mark.parametrize("module", [name for name in _modules() if name != "kernl"])
def test_imports_point_downward(module: str) -> None:
    path = _modules()[module]
    assert not breaches(module, path, path.read_text())


def test_package_init_resolves_lazily() -> None:
    """`import kernl` must cost nothing: outside TYPE_CHECKING its file imports the standard library only."""
    path = ROOT / "kernl" / "__init__.py"
    tree = ast.parse(path.read_text())
    statements = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [name for node in statements for _, name in imported_names(ast.unparse(node), "kernl", path)]
    assert not [name for name in names if name.split(".")[0] in ("torch", "triton", "transformers", "kernl")]


@pytest.mark.parametrize(
    ("module", "source", "is_lawful"),
    [
        ("kernl.ops.norm", "from kernl.kernels.norm import layer_norm_forward", True),
        ("kernl.ops.norm", "from kernl.runtime import tuning", True),
        ("kernl.ops.norm", "from kernl.runtime.tuning import choose", True),
        ("kernl.ops.norm", "from kernl.runtime.cuda_graph import CudaGraphRunner", False),
        ("kernl.ops.norm", "from kernl.patterns import norm", False),
        ("kernl.ops.norm", "def f():\n    import kernl.backend", False),
        ("kernl.kernels.norm", "from kernl.ops import norm", False),
        ("kernl.kernels.norm", "from .common import count_launch", True),
        ("kernl.kernels.norm", "from ..ops.common import empty", False),
        ("kernl.graph.mask", "import transformers.models.bert", False),
        ("kernl.runtime.cuda_graph", "from kernl.graph import registry", False),
        ("kernl.patterns.norm", "from kernl.graph.pattern import op", True),
        ("kernl.patterns.norm", "from kernl.backend import kernl_backend", False),
        ("kernl.backend", "from kernl.optimize import optimize_model", False),
        ("kernl.backend", "from kernl.ops.common import compile_ahead", True),
        ("kernl.backend", "from kernl.ops.linear import linear", False),
        ("kernl.backend", "import importlib\nimportlib.import_module('kernl.cli')", False),
        ("kernl.optimize", "from kernl import demo", False),
        ("kernl.cli", "import kernl\nfrom kernl import demo", True),
    ],
)
def test_the_rule_itself(module: str, source: str, is_lawful: bool) -> None:
    assert (not breaches(module, ROOT / (module.replace(".", "/") + ".py"), source)) == is_lawful
