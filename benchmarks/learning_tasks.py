"""What ``benchmarks.learning`` trains: three small tasks, each with batches for any number of workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.characters import CharacterTransformer, loss_fn, text
from decent_dp.tools.sim import Batches, Data, digits, dirichlet_split

__all__ = ["TASKS", "Task", "make_task"]


class Task(ABC):
    """A task with the data of n workers.

    Attributes:
        warm_up: steps of the warm-up.
        measured: what the last result of ``evaluate`` is.
    """

    warm_up = 25
    measured = "test accuracy, %"

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model; its values depend on torch's generator."""

    @abstractmethod
    def batch(self, t: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of step t, (n, samples, ...)."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> tuple[float, float, float]:
        """The loss on training data, the loss on others, and the measure on others."""


class Classes(Task):
    """Classification of vectors by two hidden layers.

    With even data every worker draws from all samples, as with a ``DistributedSampler``, which shuffles all in each epoch.
    """

    samples = 32

    def __init__(self, data: Data, n: int, alpha: float | None, seed: int) -> None:
        if alpha is None:
            shards = [np.arange(len(data.y))] * n
        elif alpha:
            shards = dirichlet_split(data.y, n, alpha, seed)
        else:  # one class each
            shards = [np.flatnonzero(data.y.numpy() == i % data.classes) for i in range(n)]
        self._data, self._draw = data, Batches(shards, self.samples, seed)

    def model(self) -> nn.Module:
        inputs, classes = self._data.x.shape[1], self._data.classes
        return nn.Sequential(
            nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, classes)
        )  # fmt: skip

    def batch(self, t: int) -> tuple[Tensor, Tensor]:
        indices = self._draw(t)
        return self._data.x[indices], self._data.y[indices]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float, float]:
        data = self._data
        trained, other = (float(F.cross_entropy(model(x), y)) for x, y in ((data.x, data.y), (data.x_test, data.y_test)))
        return trained, other, 100 * float((model(data.x_test).argmax(1) == data.y_test).float().mean())


@cache
def mnist1d() -> Data:
    """MNIST-1D (Greydanus and Kobak, arXiv 2011.14439): 4000 signals of 40 numbers to train on, and 1000 to test with."""
    try:
        from mnist1d.data import get_dataset_args, make_dataset
    except ImportError as error:
        raise SystemExit("MNIST-1D needs the package mnist1d: pip install -e '.[learning]'") from error
    made: dict[str, Any] = make_dataset(get_dataset_args())
    x, x_test = (torch.tensor(made[key], dtype=torch.float32) for key in ("x", "x_test"))
    y, y_test = (torch.tensor(made[key], dtype=torch.int64) for key in ("y", "y_test"))
    return Data(x, y, x_test, y_test, 10)


class Characters(Task):
    """The next character, from those before it. Losses are in nats."""

    warm_up = 50
    measured = "validation loss"
    samples, length = 8, 32

    def __init__(self, n: int, alpha: float | None, seed: int) -> None:
        if alpha:
            raise ValueError("text has no classes to be dealt out unevenly: 0 gives each worker a part of its own")
        self._n, self._seed, self._own = n, seed, alpha is not None

    def model(self) -> nn.Module:
        return CharacterTransformer(text()[2], self.length)

    def batch(self, t: int) -> tuple[Tensor, Tensor]:
        data, rng = text()[0], np.random.default_rng([self._seed, t])
        if not self._own:
            return self._windows(data, rng, (self._n, self.samples))
        parts = [self._windows(part, rng, (self.samples,)) for part in data[: len(data) // self._n * self._n].chunk(self._n)]
        x, y = (torch.stack(column) for column in zip(*parts, strict=True))
        return x, y

    def _windows(self, data: Tensor, rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        starts = torch.from_numpy(rng.integers(0, len(data) - self.length - 1, shape))
        found = data[starts[..., None] + torch.arange(self.length + 1)]
        return found[..., :-1], found[..., 1:]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> tuple[float, float, float]:
        samples = [self._windows(data, np.random.default_rng(7), (1024,)) for data in text()[:2]]
        trained, other = (float(loss_fn(model, x, y)) for x, y in samples)
        return trained, other, other


TASKS = ("digits", "mnist1d", "characters")


def make_task(name: str, n: int, alpha: float | None, seed: int) -> Task:
    """The task with the data of n workers.

    Args:
        alpha: of the Dirichlet split of the classes; 0: one class, or of a text one part, per worker; None: even.
    """
    if name == "characters":
        return Characters(n, alpha, seed)
    return Classes(digits() if name == "digits" else mnist1d(), n, alpha, seed)
