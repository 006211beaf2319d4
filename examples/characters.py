"""Trains a small character language model, decentralized, on text that comes with Python: the help on its language.

    torchrun --nproc-per-node 4 examples/characters.py --topology one-peer-exp --compression int8
    python examples/characters.py                      # one worker

Losses are in nats a character.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_adamw
from decent_dp.utils import initialize_dist

CONTEXT = 64  # characters that a training example has
VALIDATION_SHARE = 0.1
WARM_UP_STEPS = 30
REPORT_EVERY = 50


@dataclass(frozen=True)
class Config:
    topology: str = "one-peer-exp"
    compression: str | None = None
    steps: int = 300
    batch_size: int = 16  # examples of each worker
    lr: float = 1e-2
    seed: int = 0
    local_world_size: int | None = None  # workers per node; None: from the launcher
    save: str | None = None  # where the mean model goes


@cache
def load_text() -> tuple[str, str]:
    """The text to train on, and the text to validate with, which is the end of the whole. It depends on the Python version."""
    text = "\n".join(topics[name] for name in sorted(topics))
    cut = round(len(text) * (1 - VALIDATION_SHARE))
    return text[:cut], text[cut:]


@cache
def load_data() -> tuple[Tensor, Tensor, int]:
    """The two texts as numbers, and the number of different characters."""
    train_text, validation_text = load_text()
    numbers = {character: i for i, character in enumerate(sorted(set(train_text + validation_text)))}
    x, x_val = (torch.tensor([numbers[character] for character in text]) for text in (train_text, validation_text))
    return x, x_val, len(numbers)


class CharacterModel(nn.Module):
    """Guesses each next character from those before it, with a GRU."""

    def __init__(self, characters: int, width: int = 128) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width // 2)
        self.gru = nn.GRU(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.gru(self.embedding(x))
        return self.head(hidden)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return CharacterModel(load_data()[2])


def batches(text: Tensor, config: Config, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Characters and their successors, from random places that differ between workers."""
    generator = torch.Generator().manual_seed(1000 * config.seed + rank)
    for _ in range(config.steps):
        starts = torch.randint(len(text) - CONTEXT, (config.batch_size, 1), generator=generator)
        examples = text[starts + torch.arange(CONTEXT + 1)]
        yield examples[:, :-1], examples[:, 1:]


def train(config: Config, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Trains one model. Called by all workers; returns the same result on all of them."""
    text, validation_text, _ = load_data()
    # Factories, because decent_dp makes one optimizer and one scheduler per bucket.
    model = DecentralizedDataParallel(
        make_model(config.seed),
        partial(optim_fn_adamw, lr=config.lr, weight_decay=0.1),
        partial(lr_scheduler_fn_cosine_with_warmup, t_warmup=WARM_UP_STEPS, t_max=max(1, config.steps - WARM_UP_STEPS)),
        topology=config.topology,
        compression=config.compression,
        grad_clip_norm=1.0,
        _local_world_size=config.local_world_size,
    )

    history: list[dict[str, float]] = []
    losses: list[Tensor] = []
    for step, (x, y) in enumerate(batches(text, config, dist.get_rank()), start=1):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()  # and that is all: it mixes with the neighbours, steps the optimizer and the scheduler
        losses.append(loss.detach())
        if step % REPORT_EVERY == 0 or step == config.steps:
            mean_losses = mean_over_workers(torch.stack(losses)).tolist()
            first = len(history) + 1
            history += [{"step": first + i, "loss": value} for i, value in enumerate(mean_losses)]
            losses.clear()
            report(f"step {step:4d}: loss {sum(mean_losses) / len(mean_losses):.4f}")

    distance = model.consensus_distance()
    # Replicas differ: their mean is the result, and is saved.
    with model.averaged():
        of_mean = loss_on(model, validation_text)
        if config.save and dist.get_rank() == 0:
            Path(config.save).parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), config.save)  # plain keys: it loads into make_model(...)
    stats = model.stats()
    result = {
        "config": asdict(config),
        "workers": dist.get_world_size(),
        "steps": len(history),
        "validation_loss": of_mean,
        "consensus_distance": distance,
        "bytes_per_step": float(mean_over_workers(torch.tensor(stats.bytes_sent / max(1, stats.rounds)))),
        "history": history,
    }
    model.close()
    return result


@torch.no_grad()
def loss_on(model: nn.Module, text: Tensor) -> float:
    """The loss over the whole text except its last few characters, in examples like those of training."""
    count = (len(text) - 1) // CONTEXT
    x, y = text[: count * CONTEXT], text[1 : count * CONTEXT + 1]
    model.eval()
    loss = F.cross_entropy(model(x.view(count, CONTEXT)).flatten(0, 1), y)
    model.train()
    return float(loss)


def mean_over_workers(values: Tensor) -> Tensor:
    values = values.clone()
    dist.all_reduce(values)
    return values / dist.get_world_size()


def main() -> None:
    default = Config()
    parser = argparse.ArgumentParser(description="Decentralized training of a character language model.")
    parser.add_argument("--topology", default=default.topology, help="a name: complete, base-2, hierarchical, ...")
    parser.add_argument("--compression", choices=("bfloat16", "int8"), help="of the sent parameters")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--batch-size", type=int, default=default.batch_size, help="of each worker")
    parser.add_argument("--lr", type=float, default=default.lr)
    parser.add_argument("--seed", type=int, default=default.seed, help="of the weights and of the places in the text")
    parser.add_argument("--local-world-size", type=int, help="workers per node, for alternating-exp-ring; else the launcher's")
    parser.add_argument("--save", metavar="FILE", help="where the mean model's state dict goes")
    parser.add_argument("--out", metavar="FILE", help="where the results go, as JSON")
    options = vars(parser.parse_args())
    out = options.pop("out")

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the model is small, and trains on the CPU
    torch.set_num_threads(1)  # workers share this machine's cores
    rank, world_size = initialize_dist()

    def report(line: str) -> None:
        if rank == 0:
            print(line, flush=True)

    result = train(Config(**options), report)
    report(f"{world_size} workers, {result['steps']} steps, {result['bytes_per_step'] / 1e3:.1f} kB sent per worker and step")
    report(f"validation loss of the mean model {result['validation_loss']:.4f} nats a character")
    if out and rank == 0:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(result, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
