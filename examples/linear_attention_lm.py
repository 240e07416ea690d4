"""Train a tiny causal linear-attention language model on text of the repository, and generate from it.

    python examples/linear_attention_lm.py [--steps 300] [--device cuda]

Characters in, characters out. Training runs the parallel form (`kernl.nn.CausalLinearAttention`), generation the
recurrent step (`kernl.nn.RecurrentLinearAttention`): a token costs the same however long the text is. At the end the
parallel form reads what was generated and has to choose the same characters.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from kernl.nn import CausalLinearAttention, LinearAttentionState, RecurrentLinearAttention

TEXT = Path(__file__).resolve().parent.parent / "kernl" / "data" / "sentences.txt"

State = list[LinearAttentionState | None]


class Layer(nn.Module):
    """Attention and a small MLP, each behind a norm."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.projection = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.parallel = CausalLinearAttention(width // heads)
        self.recurrent = RecurrentLinearAttention(width // heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width]"""
        operands = self.projection(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.output(self.parallel(*operands).flatten(2))
        return x + self.mlp(self.norms[1](x))

    def step(self, x: torch.Tensor, state: LinearAttentionState | None) -> tuple[torch.Tensor, LinearAttentionState]:
        """One position [batch, width], and the sums over those before it."""
        operands = self.projection(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(1)
        attended, state = self.recurrent(*operands, state)
        x = x + self.output(attended.flatten(1))
        return x + self.mlp(self.norms[1](x)), state


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, longest: int, width: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [batch, length, vocabulary] of what follows each token."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def step(self, tokens: torch.Tensor, position: int, states: State) -> tuple[torch.Tensor, State]:
        """Logits [batch, vocabulary] of what follows one token at a position, and the states after it."""
        x = self.tokens(tokens) + self.positions.weight[position]
        after: State = []
        for layer, state in zip(self.layers, states):
            x, state = layer.step(x, state)
            after.append(state)
        return self.head(self.norm(x)), after


@torch.no_grad()
def generate(model: LanguageModel, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """The prompt [length] and `count` tokens after it, each the likeliest: token by token, by the recurrent step."""
    tokens = prompt.tolist()
    states: State = [None] * len(model.layers)
    logits = torch.empty(0)
    for position in range(len(tokens) + count - 1):
        logits, states = model.step(prompt.new_tensor([tokens[position]]), position, states)
        if position >= len(prompt) - 1:
            tokens.append(int(logits[0].argmax()))
    return prompt.new_tensor(tokens)


def train(model: LanguageModel, text: torch.Tensor, steps: int, batch: int, length: int) -> list[float]:
    """The loss of every step, in nats a character."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (batch,), generator=generator)
        rows = torch.stack([text[start : start + length + 1] for start in starts.tolist()])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=128, help="characters of a training row")
    parser.add_argument("--generate", type=int, default=100, help="characters to generate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    text = TEXT.read_text(encoding="utf-8")
    vocabulary = sorted(set(text))
    numbers = {character: number for number, character in enumerate(vocabulary)}
    tokens = torch.tensor([numbers[character] for character in text], device=options.device)
    prompt = tokens[:20]
    longest = max(options.length, len(prompt) + options.generate)
    model = LanguageModel(len(vocabulary), longest).to(options.device)

    begin = time.perf_counter()
    losses = train(model, tokens, options.steps, options.batch, options.length)
    seconds = time.perf_counter() - begin
    tail = losses[-20:]
    print(f"{options.steps} steps in {seconds:.1f} s, loss {losses[0]:.2f} -> {sum(tail) / len(tail):.2f}")

    model.eval()
    begin = time.perf_counter()
    generated = generate(model, prompt, options.generate)
    seconds = time.perf_counter() - begin
    print(f"{options.generate} characters in {seconds:.2f} s by the recurrent step:")
    print("".join(vocabulary[number] for number in generated.tolist()))
    with torch.no_grad():
        chosen = model(generated[None, :-1])[0].argmax(-1)
    same = bool((chosen[len(prompt) - 1 :] == generated[len(prompt) :]).all())
    print(f"the parallel form chooses {'the same characters' if same else 'OTHER CHARACTERS'}")
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
