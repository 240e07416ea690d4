"""What kernl would do to a model, found out from its config alone: no weights, no GPU, no run.

    kernl coverage path/to/model bert-base-uncased t5
    kernl.coverage.coverage("path/to/model").as_dict()

The model is built from its config with fake tensors (shapes and types, no memory), TorchDynamo captures it, and the
graph is rewritten exactly as `torch.compile(backend="kernl")` would. Nothing is computed, so a model of seventy billion
parameters takes as long as its number of layers asks for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernl.backend import Inputs as GraphInputs
from kernl.backend import describe, load_options, plain_copy, rewrite_graph
from kernl.graph import canonicalize
from kernl.report import Report, reason_of

BATCH, LENGTH, DECODER_LENGTH = 2, 48, 16


class CoverageError(RuntimeError):
    """A model that cannot be looked at; the message says why and what to try."""


@dataclass(frozen=True)
class Coverage:
    """The report of one model, and how it was built."""

    name: str
    architecture: str
    attention: str
    layers: int | None
    report: Report

    def as_dict(self) -> dict[str, Any]:
        summary = {
            "model": self.name,
            "architecture": self.architecture,
            "attention": self.attention,
            "layers": self.layers,
        }
        return {**summary, **self.report.as_dict()}

    def __str__(self) -> str:
        layers = "" if self.layers is None else f", {self.layers} layers"
        return f"{self.name}: {self.architecture}{layers}, {self.attention} attention\n\n{self.report}"


def coverage(
    name: str | Path, *, attention: str | None = None, dynamic: bool | None = None, **options: Any
) -> Coverage:
    """Report what kernl fuses and refuses in a model.

    Args:
        name: a folder with a `config.json`, a model name that transformers can resolve (looked up on disk first, then
            on the hub), or a model type of transformers (`bert`), which stands for its default config.
        attention: "sdpa" or "eager"; by default what transformers chooses for the model.
        dynamic: as in torch.compile.
        options: fields of `kernl.Options`.

    Raises:
        CoverageError: the config is not found, or the model cannot be built or captured.
    """
    import transformers

    settings = load_options(options)
    config = load_config(name)
    transformers.utils.logging.disable_progress_bar()
    mode = _fake_mode()
    try:
        model = _build(config, attention, mode)
        report = Report(str(name), settings)

        def look(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            plain = plain_copy(gm)
            entry = report.new_graph()
            describe(gm, GraphInputs(gm, example_inputs), entry)
            entry.rewriting = rewrite_graph(gm, canonicalize(gm), settings)
            entry.lowering = "not run"
            entry.no_cuda_graph_because = "not run"
            return plain

        torch.compiler.reset()
        with torch.no_grad(), mode:
            torch.compile(model, backend=look, dynamic=dynamic)(**example_inputs(model, config))
    except Exception as error:
        cause: BaseException = error
        while cause.__cause__ is not None:  # TorchDynamo wraps what went wrong
            cause = cause.__cause__
        raise CoverageError(
            f"{name}: {type(config).__name__} cannot be captured without weights: {reason_of(cause)}"
        ) from error
    finally:
        torch.compiler.reset()
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    return Coverage(str(name), type(model).__name__, model.config._attn_implementation, layers, report)


def load_config(name: str | Path) -> Any:
    """The config of a folder, of a name on disk or on the hub, or the default config of a model type."""
    import transformers

    folder = Path(name)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CoverageError(f"{name}: the folder has no config.json; accepted: a folder as save_pretrained makes")
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if str(name) in transformers.CONFIG_MAPPING:
        return transformers.AutoConfig.for_model(str(name))
    try:
        return transformers.AutoConfig.from_pretrained(str(name))
    except Exception as error:
        raise CoverageError(
            f"{name}: no such folder, no model type of transformers, and its config could not be fetched "
            f"({reason_of(error)[:200]}). Accepted: a folder with a config.json, a model name, or a type such as 'bert'"
        ) from error


def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def _build(config: Any, attention: str | None, mode: Any) -> Any:
    """The model with fake parameters and buffers, by way of the meta device, where initialisation costs nothing."""
    import transformers

    wanted = {} if attention is None else {"attn_implementation": attention}
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config, **wanted)
    with mode:
        for module in model.modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                        table[key] = torch.nn.Parameter(fake, False) if table is module._parameters else fake
    return model.eval()


def example_inputs(model: Any, config: Any) -> dict[str, torch.Tensor]:
    """Inputs of the kind the model takes, by the name and the config of its main input."""
    accepted = inspect.signature(model.forward).parameters
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    given: dict[str, torch.Tensor] = {}
    vision = getattr(config, "vision_config", config)
    if "pixel_values" in accepted and hasattr(vision, "image_size"):
        size = vision.image_size
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        given["pixel_values"] = torch.zeros(BATCH, getattr(vision, "num_channels", 3), height, width)
    if "input_features" in accepted and hasattr(config, "num_mel_bins"):
        frames = 2 * getattr(config, "max_source_positions", LENGTH)
        given["input_features"] = torch.zeros(BATCH, config.num_mel_bins, frames)
    if "input_values" in accepted and "input_ids" not in accepted:
        given["input_values"] = torch.zeros(BATCH, 16000)
    if "input_ids" in accepted:
        given["input_ids"] = tokens
        if "attention_mask" in accepted:
            given["attention_mask"] = torch.ones_like(tokens)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        given["decoder_input_ids"] = torch.zeros(BATCH, DECODER_LENGTH, dtype=torch.long)
    if not given:
        raise CoverageError(
            f"{type(model).__name__} takes none of pixel_values, input_features, input_values, input_ids"
        )
    return given
