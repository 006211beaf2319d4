"""A small transformer that predicts the next character of a text; needs torch and NumPy only."""

from __future__ import annotations

import math
from functools import cache
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["CharacterTransformer", "loss_fn", "text"]


class Block(nn.Module):
    """Attention and a network of two layers, each behind a norm and beside a shortcut."""

    HEADS = 4

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.inputs(self.before(x)).view(samples, length, 3, self.HEADS, width // self.HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(width // self.HEADS)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -1e9).softmax(-1) @ value
        x = x + self.outputs(mixed.transpose(1, 2).reshape(samples, length, width))
        result: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return result


class CharacterTransformer(nn.Module):
    """By default two blocks of width 48; 65,000 parameters."""

    def __init__(self, characters: int, length: int, width: int = 48, depth: int = 2) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.norm(self.blocks(self.characters(x) + self.places.weight[: x.shape[1]])))
        return result


@cache
def text() -> tuple[Tensor, Tensor, int]:
    """Python's help on its language as numbers: nine tenths to train on, the rest, and the number of characters."""
    whole = "\n".join(topics[name] for name in sorted(topics))
    numbers = {character: i for i, character in enumerate(sorted(set(whole)))}
    data = torch.tensor([numbers[character] for character in whole])
    cut = int(0.9 * len(data))
    return data[:cut], data[cut:], len(numbers)


def loss_fn(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean cross entropy."""
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())
