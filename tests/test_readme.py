"""The README's code runs, and what it says about options, commands and patterns is so."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import kernl

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def _on_cpu(code: str) -> str:
    """The same code without a GPU, on weights that are installed."""
    from kernl.demo import find_model_folder

    code = code.replace('"sentence-transformers/all-MiniLM-L6-v2"', repr(str(find_model_folder())))
    return code.replace("torch.float16", "torch.float32").replace('"cuda"', '"cpu"')


def test_quickstart_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    exec(_on_cpu(BLOCKS[0]), names)
    assert names["output"].last_hidden_state.shape[-1] == 384
    assert "what was fused" in capsys.readouterr().out
    kernl.restore_model(names["model"])


def test_usage_runs() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    model = BertModel(config).eval()
    inputs = {"input_ids": torch.randint(0, 64, (2, 9))}

    def tokenizer(texts: list[str], **options: object) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.ones(len(texts), max(map(len, texts)), dtype=torch.long)}

    names = {"kernl": kernl, "torch": torch, "model": model, "inputs": inputs}
    names |= {"tokenizer": tokenizer, "texts": ["Call me Ishmael.", "Some years ago"]}
    code = "\n".join(
        line for line in BLOCKS[1].splitlines() if 'backend="kernl"' not in line
    )  # needs an installed package
    exec(_on_cpu(code), names)
    with torch.inference_mode():
        expected = model(**inputs).last_hidden_state
    torch.testing.assert_close(names["plain"].last_hidden_state, expected)  # type: ignore[attr-defined]


def test_own_pattern_runs() -> None:
    from kernl.graph import default_registry

    exec(BLOCKS[2], {})
    try:

        class SquaredRelu(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(x) ** 2

        model: Any = kernl.optimize_model(SquaredRelu())
        x = torch.randn(3, 5)
        with torch.inference_mode():
            torch.testing.assert_close(model(x), torch.relu(x) ** 2)
        assert model.kernl.report().matched("squared_relu") == 1
    finally:
        default_registry.unregister("squared_relu")


def test_options_are_all_listed_with_their_defaults() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.+?)`? \|", README, flags=re.MULTILINE))
    for field in dataclasses.fields(kernl.Options):
        default = '"' + field.default + '"' if isinstance(field.default, str) else repr(field.default)
        assert rows.get(field.name) == default, field.name


def test_patterns_exist() -> None:
    import kernl.patterns  # noqa: F401
    from kernl.graph import default_registry

    names = set(default_registry.names())
    named = re.findall(r"^\| [^|]+ \| `([\w*]+)` \| [^|]+ \| [^|]+ \|$", README, flags=re.MULTILINE)
    matches = {name: {known for known in names if re.fullmatch(name.replace("*", r"\w*"), known)} for name in named}
    assert all(matches.values()), matches
    assert names == set().union(*matches.values())  # and none is left out


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:`|^    )make ([a-z-]+)\b", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
