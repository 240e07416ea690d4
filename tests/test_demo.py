"""The demo: its text, its answers, and that it fails when results are wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kernl import demo

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def encoder() -> demo.Encoder:
    return demo.load_encoder(demo.find_model_folder())


@pytest.fixture(scope="module")
def plain(encoder: demo.Encoder) -> demo.Variant:
    return demo.measure("plain", encoder, [sentence.text for sentence in demo.load_sentences()], quick=True)


def test_text_is_clean() -> None:
    sentences = demo.load_sentences()
    assert 150 <= len(sentences) <= 250
    texts = [sentence.text for sentence in sentences]
    assert len(set(texts)) == len(texts)
    for text in texts:
        assert text.isascii() and text == text.strip() and "  " not in text
        assert re.search(r'[.?!]"?$', text), text
        assert text.count('"') % 2 == 0, text


def test_every_work_has_its_source() -> None:
    sources = (ROOT / "kernl" / "data" / "SOURCES.md").read_text()
    rows = [line for line in sources.splitlines() if line.startswith("| ") and not line.startswith("| work")]
    works = {sentence.work for sentence in demo.load_sentences()}
    assert len(rows) == len(works)
    for work in works:
        (year,) = re.findall(r"\((\d{4})", work)
        assert any(year in row for row in rows), work


def test_questions_are_answered(plain: demo.Variant) -> None:
    sentences = demo.load_sentences()
    best = demo.best_answers(plain.questions, plain.sentences, 1)
    for (question, beginning), (position,) in zip(demo.QUESTIONS.items(), best):
        assert sentences[position].text.startswith(beginning), question


def test_vectors_do_not_depend_on_the_batch(encoder: demo.Encoder) -> None:
    """Padding, sorting by length and batching must not show in the vectors."""
    texts = [sentence.text for sentence in demo.load_sentences()[:9]]
    together = encoder.embed(encoder.tokenize(texts, batch_size=4))
    alone = torch.cat([encoder.embed(encoder.tokenize([text])) for text in texts])
    torch.testing.assert_close(together, alone, rtol=0, atol=2e-6)
    torch.testing.assert_close(together.norm(dim=-1), torch.ones(len(texts)))


def test_demo_runs_and_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    from kernl import cli

    assert cli.main(["demo", "--quick", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "Optimised and plain results agree." in text
    for beginning in demo.QUESTIONS.values():
        assert f"A: {beginning}" in text
    assert "what was fused" in text
    (row,) = [line for line in text.splitlines() if re.match(r"fp32\s+kernl", line)]
    assert "yes" in row
    matched = dict(re.findall(r"^(\w+)\s+(\d+)\s+\d+", text, flags=re.MULTILINE))
    graphs = len(re.findall(r"^graph \d+", text, flags=re.MULTILINE))
    assert int(matched["attention"]) == 6 * graphs > 0, "MiniLM has six layers"


@pytest.mark.parametrize("damage", ["noise", "swapped"])
def test_demo_fails_when_results_differ(
    damage: str, plain: demo.Variant, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentences = plain.sentences.clone()
    if damage == "noise":
        sentences = torch.nn.functional.normalize(sentences + 1e-3 * torch.randn_like(sentences), dim=-1)
    else:
        sentences[[0, 1]] = sentences[[1, 0]]
    wrong = demo.Variant("kernl", torch.float32, 1.0, 1.0, 1.0, sentences, plain.questions)

    class Reporting:
        class model:
            class kernl:
                report: Callable[..., str] = staticmethod(lambda profile=None: "no report")

    def fake_measure(name: str, encoder: Any, texts: list[str], *, quick: bool = False) -> demo.Variant:
        return plain if name == "plain" else wrong

    monkeypatch.setattr(demo, "measure", fake_measure)
    monkeypatch.setattr(demo, "kernl_encoder", lambda encoder: Reporting)
    assert demo.run(device="cpu", quick=True) == 1
    assert "FAILED" in capsys.readouterr().out


def test_comparison_with_the_budget(plain: demo.Variant) -> None:
    generator = torch.Generator().manual_seed(0)
    exact = plain.sentences.double() + 1e-8 * torch.randn(plain.sentences.shape, generator=generator).double()
    assert demo.compare(plain, plain, exact).passed(torch.float32)
    worse = plain.sentences + 3e-6 * torch.randn(plain.sentences.shape, generator=generator)
    verdict = demo.compare(demo.Variant("kernl", torch.float32, 1, 1, 1, worse, plain.questions), plain, exact)
    assert verdict.min_cosine > demo.MIN_COSINE[torch.float32], "the cosine alone would let it pass"
    assert verdict.within_budget is False and not verdict.passed(torch.float32)


def test_inductor_is_left_out_with_a_reason(encoder: demo.Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_cpp_compiler", lambda: None)
    assert "no C++ compiler" in str(demo._measure_inductor(encoder, ["text"], 1.0))
    monkeypatch.setattr(demo, "find_cpp_compiler", lambda: "g++")
    monkeypatch.setattr(demo, "inductor_encoder", lambda encoder: time.sleep(30))
    started = time.perf_counter()
    assert "not finished after" in str(demo._measure_inductor(encoder, ["text"], 0.2))
    assert time.perf_counter() - started < 10


def test_model_folder_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setenv("KERNL_DEMO_MODEL", str(tmp_path))
    assert demo.find_model_folder() == tmp_path
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        demo.find_model_folder(tmp_path / "nothing")
