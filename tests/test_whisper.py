"""Whisper tiny.en with its real weights hears a sentence: the right words, and the same tokens from every loop."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import pipeline

import kernl
from kernl.generate import loop_of
from tests import whisper_tiny
from tests.whisper_tiny import CLIP, SENTENCE

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parent.parent / "examples" / "whisper_transcribe.py"))
LAYERS = 4  # of the encoder with one attention each, of the decoder with two: over the text so far, and over the sound


@dataclass(frozen=True)
class Whisper:
    """Model and processor, and two clips: the sentence, and its beginning.

    inputs: of the model, both clips. tokens: what the plain model makes of them, int64 [2, length].
    """

    model: Any
    processor: Any
    clips: list[np.ndarray]
    inputs: dict[str, torch.Tensor]
    tokens: torch.Tensor

    @property
    def sentence(self) -> dict[str, torch.Tensor]:
        """The inputs of the first clip alone; the model makes `tokens[:1]` of them."""
        return {name: tensor[:1] for name, tensor in self.inputs.items()}

    def texts(self, tokens: torch.Tensor) -> list[str]:
        return [text.strip() for text in self.processor.batch_decode(tokens, skip_special_tokens=True)]

    def attentions(self) -> list[int]:
        """Fused attentions, graph by graph."""
        graphs = loop_of(self.model).report.graphs
        return [graph.rewriting.matched("attention") for graph in graphs if graph.rewriting is not None]


def load_whisper(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Whisper:
    """Skips the test where the weights are not installed."""
    try:
        folder = whisper_tiny.find_folder()
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    model, processor = whisper_tiny.load(folder, dtype)
    samples, rate = EXAMPLE["read_wav"](CLIP)
    clips = [samples, samples[: 5 * rate // 2]]
    # With a mask of what is sound, as transformers' pipeline has it.
    inputs = processor(clips, sampling_rate=rate, return_tensors="pt", return_attention_mask=True).to(device, dtype)
    return Whisper(model, processor, clips, dict(inputs), model.to(device).generate(**inputs))


@pytest.fixture(scope="module")
def loaded() -> Whisper:
    return load_whisper()


@pytest.fixture
def whisper(loaded: Whisper) -> Iterator[Whisper]:
    yield loaded
    if hasattr(loaded.model, "kernl"):
        kernl.restore_model(loaded.model)


def test_the_plain_model_hears_the_sentence(whisper: Whisper) -> None:
    first, second = whisper.texts(whisper.tokens)
    assert first == SENTENCE and second.startswith("Had he married a more amiable woman") and len(second) < 40


def test_loop_of_kernl(whisper: Whisper) -> None:
    model = kernl.optimize_model(whisper.model, generate="fast")
    assert torch.equal(model.generate(**whisper.inputs), whisper.tokens)
    assert torch.equal(kernl.generate(model, **whisper.inputs), whisper.tokens)
    speech = pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=whisper.processor.tokenizer,
        feature_extractor=whisper.processor.feature_extractor,
    )
    # By itself the pipeline asks for five beams.
    heard = speech(list(whisper.clips), batch_size=2, generate_kwargs={"num_beams": 1})
    assert [text["text"].strip() for text in heard] == whisper.texts(whisper.tokens)
    report = model.kernl.report()
    assert (report.generation.fast, dict(report.generation.transformers)) == (3, {})
    # The encoder; the decoder at the first token, and at the others.
    assert whisper.attentions() == [LAYERS, 2 * LAYERS, 2 * LAYERS]
    assert not report.notes


def test_loop_of_transformers(whisper: Whisper) -> None:
    model = kernl.optimize_model(whisper.model)
    assert torch.equal(model.generate(**whisper.sentence), whisper.tokens[:1])
    report = model.kernl.report()
    generation = report.generation
    assert (dict(generation.stepped), dict(generation.transformers)) == ({'option generate="hf"': 1}, {})
    assert whisper.attentions() == [LAYERS, 2 * LAYERS, 2 * LAYERS]
    assert not report.notes


def test_timestamps_run_in_the_loop_of_transformers(whisper: Whisper) -> None:
    want = whisper.model.generate(**whisper.sentence, return_timestamps=True)
    assert torch.equal(kernl.generate(whisper.model, **whisper.sentence, return_timestamps=True), want)
    generation = loop_of(whisper.model).report.generation
    reason = "the logits processor WhisperTimeStampLogitsProcessor needs the host"
    assert (dict(generation.stepped), dict(generation.transformers)) == ({reason: 1}, {})


def test_the_example(whisper: Whisper, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One clip, from a folder as users have it."""
    whisper.model.save_pretrained(tmp_path)
    whisper.processor.save_pretrained(tmp_path)
    EXAMPLE["main"]([str(CLIP), "--model", str(tmp_path), "--device", "cpu", "--calls", "1"])
    text = capsys.readouterr().out
    assert f"plain: {SENTENCE}\n" in text and f"kernl: {SENTENCE}\n" in text
    assert "6.0 s of speech, cpu, float32: the texts are the same" in text
