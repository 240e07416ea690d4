"""Whisper tiny.en with its real weights on a GPU: the same tokens with encoder, prefill and steps as CUDA graphs.

Along these clips the best token leads the second by 0.3 or more; in float16 logits are off by some 0.03.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kernl
from kernl.generate import loop_of
from tests.gpu.test_generate import captured
from tests.test_whisper import LAYERS, SENTENCE, load_whisper


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loop_of_kernl(dtype: torch.dtype) -> None:
    whisper = load_whisper(dtype, "cuda")
    assert whisper.texts(whisper.tokens)[0] == SENTENCE
    model: Any = kernl.optimize_model(whisper.model, generate="fast")
    for _ in range(3):
        assert torch.equal(model.generate(**whisper.inputs), whisper.tokens)
    generation = model.kernl.report().generation
    assert (generation.fast, dict(generation.transformers)) == (3, {})
    assert whisper.attentions() == [LAYERS, 2 * LAYERS, 2 * LAYERS]
    assert captured(model) == 2 and len(model.kernl.memory()["graphs"]) == 3  # the encoder's too
    for _ in range(2):  # a batch of one
        assert torch.equal(kernl.generate(model, **whisper.sentence), whisper.tokens[:1])
    assert captured(model) == 4 and generation.fast == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_loop_of_transformers(dtype: torch.dtype) -> None:
    whisper = load_whisper(dtype, "cuda")
    model: Any = kernl.optimize_model(whisper.model)
    for _ in range(2):
        assert torch.equal(model.generate(**whisper.inputs), whisper.tokens)
    want = whisper.texts(whisper.tokens)[0]
    assert whisper.texts(model.generate(**whisper.sentence))[0] == want == SENTENCE
    assert loop_of(model).report.generation.fast == 0 and model.kernl.report().matched("attention") > 0
