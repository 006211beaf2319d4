"""Data for simulations: each worker's samples, and the batches drawn from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decent_dp._checks import check_integer, install_hint, to_float

__all__ = ["Batches", "Data", "digits", "dirichlet_split"]

IntArray = npt.NDArray[np.int64]

_TEST_SAMPLES = 360
# α is clamped to this range: below it a worker has one class until that is used up, and variates would underflow; above it all
# workers have all classes.
_ALPHAS = (1e-100, 1e15)


@dataclass(frozen=True)
class Data:
    """Samples and labels to train on, and others to test with; one row per sample.

    Attributes:
        classes: labels are 0 to classes - 1.
    """

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int

    def to(self, device: torch.device) -> Data:
        """The same data on ``device``."""
        x, y, x_test, y_test = (tensor.to(device) for tensor in (self.x, self.y, self.x_test, self.y_test))
        return Data(x, y, x_test, y_test, self.classes)


@cache
def digits() -> Data:
    """1437 images of handwritten digits to train on and 360 to test with, (64,) float32 in [0, 1]: always the same split.

    Raises:
        ImportError: scikit-learn, which contains the data, is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(f"the digits need scikit-learn; {install_hint('sim')}") from error
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=_TEST_SAMPLES, stratify=labels, random_state=0)
    x, x_test = (torch.tensor(part, dtype=torch.float32, device="cpu") for part in split[:2])
    y, y_test = (torch.tensor(part, dtype=torch.int64, device="cpu") for part in split[2:])
    return Data(x, y, x_test, y_test, 10)


def dirichlet_split(labels: Any, n: int, alpha: float | None, seed: int = 0) -> list[IntArray]:
    """Distributes samples to n workers; the smaller ``alpha``, the more uneven their classes.

    Every worker gets the same number of samples, or one more. Its mixture of classes is drawn from Dirichlet(α p), where p is
    the mixture of all samples. Workers take turns in drawing a sample from their mixture, without replacement, while a class
    has samples left (Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, arXiv 1909.06335). With α = 0.1 most of a worker's samples are of one to three classes; None or
    infinity splits evenly.

    Args:
        labels: one per sample, integers or anything else that NumPy can sort, 1-D.
        n: workers.
        alpha: α > 0, None or ``math.inf``.
        seed: the same seed, the same split.

    Returns:
        For each worker the indices of its samples, int64, in increasing order. They are a partition of all samples.

    Raises:
        ValueError, TypeError: ``n``, ``alpha`` or ``seed`` is out of range, or there are fewer samples than workers.
    """
    found: npt.NDArray[Any] = np.asarray(labels)
    if found.ndim != 1:
        raise ValueError(f"labels must be 1-D, one per sample, got the shape {found.shape}")
    n, seed = check_integer("n, the number of workers,", n, 1), check_integer("seed", seed, 0)
    if len(found) < n:
        raise ValueError(f"{len(found)} samples are too few for {n} workers: each needs at least one")
    check_alpha(alpha)
    rng = np.random.default_rng(seed)
    if alpha is None or alpha == math.inf:
        order = rng.permutation(len(found))
        return [np.sort(order[i::n]).astype(np.int64) for i in range(n)]
    _, numbers = np.unique(found, return_inverse=True)
    counts = np.bincount(numbers)
    # Each class's samples in random order, taken from the end.
    stock = [rng.permutation(np.flatnonzero(numbers == k)).tolist() for k in range(len(counts))]
    mixtures = _mixtures(rng, min(max(alpha, _ALPHAS[0]), _ALPHAS[1]) * counts / counts.sum(), n)
    left = counts.astype(np.float64)
    dealt: list[list[int]] = [[] for _ in range(n)]
    draws = rng.random(len(found))
    for number in range(len(found)):
        worker = number % n
        chances = np.cumsum(np.where(left > 0, mixtures[worker], 0.0))
        if chances[-1] <= 0:  # its classes are used up: draw from the rest, by class size
            chances = np.cumsum(left)
        k = int(np.searchsorted(chances, draws[number] * chances[-1], side="right"))
        # If the sum is tiny, the product may be rounded up to it: then it is the last class with a chance.
        k = min(k, int(np.searchsorted(chances, chances[-1], side="left")))
        dealt[worker].append(stock[k].pop())
        left[k] -= 1
    return [np.sort(np.array(indices, dtype=np.int64)) for indices in dealt]


def check_alpha(alpha: float | None) -> None:
    """Raises TypeError or ValueError unless ``alpha`` is positive, infinite or None."""
    if alpha is not None and to_float(alpha) is None:
        raise TypeError(f"alpha must be a positive number, or None for an even split, got {alpha!r}")
    if alpha is not None and not alpha > 0:
        raise ValueError(
            f"alpha must be positive (the smaller, the fewer classes a worker sees), or None for even, got {alpha!r}"
        )


def _mixtures(rng: np.random.Generator, concentration: npt.NDArray[np.float64], n: int) -> npt.NDArray[np.float64]:
    """n draws of a Dirichlet distribution, (n, classes), also if it is so uneven that gamma variates underflow.

    Log-gamma variates by Gamma(a) = Gamma(a + 1) · U^(1/a) (Marsaglia and Tsang 2000).
    """
    shape = (n, len(concentration))
    logs = np.log(rng.gamma(concentration + 1, size=shape)) + np.log(1 - rng.random(shape)) / concentration
    weights: npt.NDArray[np.float64] = np.exp(logs - logs.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return weights


class Batches:
    """Draws one batch per worker and step from the worker's own samples, with replacement.

    The draw of worker i in step t depends only on the seed, t, i and the number of its samples.

    Args:
        shards: for each worker the indices of its samples.
        size: samples per batch.
        seed: of the draws.

    Raises:
        ValueError, TypeError: there is no worker, or one without samples; ``size`` or ``seed`` is out of range.
    """

    def __init__(self, shards: Sequence[IntArray], size: int, seed: int = 0) -> None:
        self._size, self._seed = check_integer("size, the samples per batch,", size, 1), check_integer("seed", seed, 0)
        if not len(shards):
            raise ValueError("shards must hold the indices of each worker's samples, and there is no worker")
        self._counts = np.array([len(shard) for shard in shards])
        if not self._counts.all():
            raise ValueError(f"worker {int(np.argmin(self._counts))} has no samples: every worker needs at least one")
        self._table = np.zeros((len(shards), int(self._counts.max())), dtype=np.int64)
        for row, shard in zip(self._table, shards, strict=True):
            row[: len(shard)] = shard

    def __call__(self, t: int) -> Tensor:
        """The indices of step t >= 0, (workers, size), int64."""
        draws = np.random.default_rng([self._seed, check_integer("t, the step,", t, 0)]).random((len(self._table), self._size))
        places = (draws * self._counts[:, None]).astype(np.int64)
        return torch.from_numpy(np.take_along_axis(self._table, places, 1))
