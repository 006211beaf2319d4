"""One simulated training run, from settings to rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp._checks import check_bool, check_choice, check_integer, check_number
from decent_dp.optim import GossipAdamW, lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw, optim_fn_adamw
from decent_dp.rules import MomentumTracking
from decent_dp.tools.sim.cluster import VirtualCluster
from decent_dp.tools.sim.datasets import Batches, Data, digits, dirichlet_split

__all__ = ["HIDDEN", "OPTIMIZERS", "Experiment", "Result", "Row", "Simulation", "make_model", "run"]

# Widths of the digits' network.
HIDDEN = (128, 64)

# Up to this many parameters per replica one thread computes. Threads wait for each other after each of so small operations: on
# a busy machine 30 steps of 64-256-256-10 took 29.5 s of CPU time on two threads and 7 to 9 s on one (the log, "what the
# simulator does with models that are not plain").
_ONE_THREAD = 100_000

# By name: the factory, and a learning rate for the digits.
OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "gossip-adamw": (partial(GossipAdamW, weight_decay=0.1), 2e-3),
    "adamw": (partial(optim_fn_adamw, weight_decay=0.1), 2e-3),
    "accum-adamw": (partial(optim_fn_accum_adamw, weight_decay=0.1), 2e-3),
    "sgd": (torch.optim.SGD, 0.1),
    "momentum": (partial(torch.optim.SGD, momentum=0.9), 0.02),
}
# Those that MomentumTracking is for.
_TRACKED = ("gossip-adamw", "momentum")


@dataclass(frozen=True)
class Simulation:
    """The settings of a run. They and the versions of the libraries determine its numbers; another device rounds otherwise.

    Attributes:
        topology: a registered name or a composition such as 'complete:100,ring'.
        n: workers.
        local_world_size: workers per node.
        alpha: of the Dirichlet split of the classes (see ``dirichlet_split``); None or infinity: even.
        steps: of every worker.
        batch: samples per worker and step.
        lr: the highest learning rate, after a warm-up over the first 5 % of the steps and before a cosine; None: a good one
            for the optimizer on the digits.
        optimizer: 'gossip-adamw', 'adamw', 'accum-adamw', 'sgd' or 'momentum'.
        compression: None (the parameters' own dtype), 'bfloat16' or 'int8'.
        overlap: mix with the values sent in the last step.
        mix_every: mix only in every h-th step.
        momentum_tracking: with the rule ``MomentumTracking``.
        seed: of the weights, the split and the batches.
        eval_every: steps between two rows.
        device: 'cpu', 'cuda' or 'cuda:1', where all replicas are. Weights, split and batches are the same on each.

    Raises:
        ValueError, TypeError: a setting is wrong; one line that names it and says what to do. What the data, the topology and
            the optimizer do not allow is said by ``Experiment``.
    """

    topology: str = "one-peer-exp"
    n: int = 16
    local_world_size: int = 1
    alpha: float | None = None
    steps: int = 500
    batch: int = 32
    lr: float | None = None
    optimizer: str = "adamw"
    compression: str | None = None
    overlap: bool = True
    mix_every: int = 1
    momentum_tracking: bool = False
    seed: int = 0
    eval_every: int = 50
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("steps", "eval_every"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        if check_bool("momentum_tracking", self.momentum_tracking) and self.optimizer not in _TRACKED:
            raise ValueError(
                f"momentum tracking is for optimizer='gossip-adamw' or 'momentum', and it is {self.optimizer!r}: use one of "
                "these, or leave momentum tracking out"
            )
        if self.lr is not None:
            object.__setattr__(self, "lr", check_number("lr", self.lr, "a positive learning rate", above=0.0, below=2.0**128))


@dataclass(frozen=True)
class Row:
    """The state of a run after a number of steps.

    Attributes:
        step: steps that every worker has taken.
        loss: mean over workers, and over the steps since the last row.
        consensus_distance: root mean square over replicas of the L2 distance to their mean.
        accuracy: of the mean model, on the test data.
        worst_accuracy: of the worst replica.
        bytes_sent: by all workers together until now.
    """

    step: int
    loss: float
    consensus_distance: float
    accuracy: float
    worst_accuracy: float
    bytes_sent: int


@dataclass(frozen=True)
class Result:
    """A run's rows, size and duration.

    Attributes:
        simulation: its settings.
        rows: one per ``eval_every`` steps, and one after the last step.
        parameters: of a replica, trainable.
        samples: the smallest and the largest number of training samples of a worker.
        seconds: that the simulation took on this machine.
    """

    simulation: Simulation
    parameters: int
    samples: tuple[int, int]
    rows: list[Row]
    seconds: float

    @property
    def last(self) -> Row:
        return self.rows[-1]


def find_device(name: str) -> torch.device:
    """The device of this name.

    Raises:
        ValueError: it is none, or a GPU that this process cannot use.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be 'cpu', 'cuda', or a GPU by its number such as 'cuda:1', got {name!r}") from None
    if device.type == "cuda":
        number = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= number:
            raise ValueError(f"device {name!r} needs a GPU, and torch {torch.__version__} sees {number} here: use 'cpu'")
    return device


class Experiment:
    """A run that is ready to begin.

    Args:
        simulation: the settings.
        data: to train on and to test with; None: the digits.
        hidden: widths of the network's hidden layers.

    Raises:
        ImportError: a library for the data is not installed; with the install line.
        ValueError, TypeError: a setting does not fit the data, the topology or the machine.
    """

    def __init__(self, simulation: Simulation, data: Data | None = None, hidden: Sequence[int] = HIDDEN) -> None:
        s, device = simulation, find_device(simulation.device)
        data = digits() if data is None else data
        shards = dirichlet_split(data.y.numpy(), s.n, s.alpha, s.seed)
        self._batches, self._simulation, self._data = Batches(shards, s.batch, s.seed), s, data.to(device)
        self._samples = min(map(len, shards)), max(map(len, shards))
        factory, default = OPTIMIZERS[s.optimizer]
        warm_up = min(s.steps - 1, math.ceil(0.05 * s.steps))
        self._cluster = VirtualCluster(
            make_model([data.x.shape[1], *hidden, data.classes], s.seed).to(device),
            partial(factory, lr=default if s.lr is None else s.lr),
            s.topology,
            s.n,
            lr_scheduler_fn=partial(lr_scheduler_fn_cosine_with_warmup, t_warmup=warm_up, t_max=max(1, s.steps - warm_up)),
            local_world_size=s.local_world_size,
            compression=s.compression,
            overlap=s.overlap,
            mix_every=s.mix_every,
            rule=MomentumTracking() if s.momentum_tracking else None,
        )

    def run(self) -> Result:
        """Trains as the settings say; up to 100,000 parameters per replica on one thread."""
        parameters = sum(value[0].numel() for value in self._cluster.parameters.values())
        began = time.perf_counter()
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if parameters <= _ONE_THREAD else threads)
        try:
            rows = list(self._rows())
        finally:
            torch.set_num_threads(threads)
        return Result(self._simulation, parameters, self._samples, rows, time.perf_counter() - began)

    def _rows(self) -> Iterator[Row]:
        s, data, cluster = self._simulation, self._data, self._cluster
        losses, last = torch.zeros((), dtype=torch.float64, device=data.x.device), 0
        for t in range(s.steps):
            chosen = self._batches(t).to(data.x.device)
            losses += cluster.step(data.x[chosen], data.y[chosen]).mean(dtype=torch.float64)
            if (t + 1) % s.eval_every == 0 or t + 1 == s.steps:
                accuracy = float(_accuracy(cluster.mean_model(), data))
                worst = float(torch.stack([_accuracy(cluster.replica_model(i), data) for i in range(cluster.n)]).min())
                loss, distance = float(losses) / (t + 1 - last), cluster.consensus_distance()
                yield Row(t + 1, loss, distance, accuracy, worst, cluster.bytes_sent)
                losses.zero_()
                last = t + 1


def run(simulation: Simulation, data: Data | None = None, hidden: Sequence[int] = HIDDEN) -> Result:
    """Makes an ``Experiment``, and runs it."""
    return Experiment(simulation, data, hidden).run()


@torch.no_grad()
def _accuracy(model: nn.Module, data: Data) -> Tensor:
    logits: Tensor = model.eval()(data.x_test)
    return (logits.argmax(-1) == data.y_test).float().mean()


def make_model(widths: Sequence[int], seed: int) -> nn.Module:
    """Linear layers with ReLU between them; ``widths``: of the samples, the hidden layers and the outputs."""
    # The caller's stream of random numbers does not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for inside, outside in pairwise(widths):
            # Drawn on the CPU, so that the weights are the same on any device.
            layers += [nn.Linear(inside, outside, dtype=torch.float32, device="cpu"), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
