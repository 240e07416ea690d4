"""Transcribe speech with Whisper, as it is and with kernl, and compare text and time.

    python examples/whisper_transcribe.py talk.wav [--model openai/whisper-tiny.en] [--device cuda]

The file is a WAV of 16 kHz; `ffmpeg -i talk.mp3 -ac 1 -ar 16000 -sample_fmt s16 talk.wav` makes one. Whisper hears 30
seconds: what is longer is cut there, and the pieces are one batch (a word on a cut may be lost).
"""

from __future__ import annotations

import argparse
import wave
from pathlib import Path

import numpy as np
import torch
from tabulate import tabulate
from transformers import WhisperForConditionalGeneration, WhisperProcessor

import kernl
from kernl.timing import time_call, time_first_call

SECONDS = 30


def read_wav(path: str | Path) -> tuple[np.ndarray, int]:
    """Samples of a WAV file, float32 [length] from -1 to 1 (channels are averaged), and how many a second has."""
    with wave.open(str(path)) as file:
        width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
        content = file.readframes(file.getnframes())
    if width == 1:
        samples = (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    elif width == 2:
        samples = np.frombuffer(content, "<i2").astype(np.float32) / 32768
    else:
        raise ValueError(f"{path} has samples of {8 * width} bits; accepted are 8 and 16")
    return samples.reshape(-1, channels).mean(axis=1), rate


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("audio", help="a WAV file")
    parser.add_argument("--model", default="openai/whisper-tiny.en", help="a name on the Hub, or a folder")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--calls", type=int, default=10, help="calls to time")
    options = parser.parse_args(arguments)

    dtype = torch.float16 if options.device.startswith("cuda") else torch.float32
    processor = WhisperProcessor.from_pretrained(options.model)
    model = WhisperForConditionalGeneration.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
    samples, rate = read_wav(options.audio)
    pieces = [samples[start : start + SECONDS * rate] for start in range(0, len(samples), SECONDS * rate)]
    inputs = processor(pieces, sampling_rate=rate, return_tensors="pt").to(options.device, dtype)

    rows, texts = [], {}
    for name in ("plain", "kernl"):
        if name == "kernl":
            kernl.optimize_model(model, generate="fast")
        tokens, first_ms = time_first_call(lambda: model.generate(**inputs))
        timing = time_call(lambda: model.generate(**inputs), calls=options.calls, warmup=0)
        texts[name] = " ".join(text.strip() for text in processor.batch_decode(tokens, skip_special_tokens=True))
        rows.append([name, f"{first_ms / 1e3:.2f}", f"{timing.median_ms:.1f}"])
        print(f"{name}: {texts[name]}\n")
    print(tabulate(rows, headers=["", "first call s", "next calls ms (median)"], disable_numparse=True))
    print(f"{len(samples) / rate:.1f} s of speech, {options.device}, {str(dtype).removeprefix('torch.')}: ", end="")
    print("the texts are the same" if texts["plain"] == texts["kernl"] else "the texts differ")


if __name__ == "__main__":
    main()
