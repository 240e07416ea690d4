"""Models small enough to be compiled in a test, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, BertModel

VOCABULARY = 101
WIDTH = 32


def bert_config(**changes: Any) -> BertConfig:
    sizes = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
    }
    return BertConfig(**{**sizes, **changes})


def bert(seed: int = 0, **changes: Any) -> BertModel:
    torch.manual_seed(seed)
    return BertModel(bert_config(**changes)).eval()


def classifier(seed: int = 0, **changes: Any) -> BertForSequenceClassification:
    torch.manual_seed(seed)
    return BertForSequenceClassification(bert_config(**changes)).eval()


def text(batch: int = 2, length: int = 7, seed: int = 0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Ids and a mask that hides the end of every row but the first."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1:, max(length // 2, 1) :] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


class Block(nn.Module):
    """Residual block: LayerNorm, linear, GELU, linear."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(self.act(self.up(self.norm(x)))))


class Encoder(nn.Module):
    """Two blocks and a buffer: compiled in a fraction of a second."""

    def __init__(self, blocks: int = 2, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.register_buffer("scale", torch.full((WIDTH,), 1.5))
        self.factor = 2.0

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None, double: bool = False) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        x = x * self.scale * self.factor
        if bias is not None:
            x = x + bias
        return 2 * x if double else x


def encoder(seed: int = 0, blocks: int = 2) -> Encoder:
    return Encoder(blocks, seed).eval()


def activations(batch: int = 2, length: int = 3, seed: int = 1) -> torch.Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(seed))
