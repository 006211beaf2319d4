"""One simulated training run, from settings to rows."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp._checks import check_bool, check_choice, check_integer, check_number, to_float
from decent_dp.compression import check_compression
from decent_dp.engine import fit_rule
from decent_dp.optim import GossipAdamW, lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw, optim_fn_adamw
from decent_dp.rules import Gossip, MomentumTracking, Rule
from decent_dp.tools.sim.cluster import VirtualCluster
from decent_dp.tools.sim.datasets import Batches, Data, check_alpha, digits, dirichlet_split
from decent_dp.topo import Topology, make_topology

__all__ = ["DATA", "OPTIMIZERS", "Result", "Row", "Simulation", "find_device", "run"]

DATA: dict[str, Callable[[], Data]] = {"digits": digits}

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
        data: 'digits', handwritten digits of 8 x 8 pixels.
        topology: a registered name or a composition such as 'complete:100,ring'.
        n: workers.
        local_world_size: workers per node.
        alpha: of the Dirichlet split of the classes (see ``dirichlet_split``); None or infinity: even.
        steps: of every worker.
        batch: samples per worker and step.
        lr: the highest learning rate; None: a good one for the optimizer on these data.
        optimizer: 'gossip-adamw', 'adamw', 'accum-adamw', 'sgd' or 'momentum'.
        schedule: 'cosine' (with a warm-up over the first 5 % of the steps) or 'constant'.
        compression: None (the parameters' own dtype), 'bfloat16' or 'int8'.
        overlap: mix with the values sent in the last step.
        mix_every: mix only in every h-th step.
        momentum_tracking: with the rule ``MomentumTracking``.
        grad_clip_norm: of each replica's gradients; 0.0 for no clipping.
        hidden: widths of the network's hidden layers.
        seed: of the weights, the split and the batches.
        eval_every: steps between two rows.
        device: 'cpu', 'cuda' or 'cuda:1', where all replicas are. Weights, split and batches are the same on each.

    Raises:
        ValueError, TypeError: a setting is wrong; one line that names it and says what to do.
    """

    data: str = "digits"
    topology: str = "one-peer-exp"
    n: int = 16
    local_world_size: int = 1
    alpha: float | None = None
    steps: int = 500
    batch: int = 32
    lr: float | None = None
    optimizer: str = "adamw"
    schedule: str = "cosine"
    compression: str | None = None
    overlap: bool = True
    mix_every: int = 1
    momentum_tracking: bool = False
    grad_clip_norm: float = 0.0
    hidden: tuple[int, ...] = (128, 64)
    seed: int = 0
    eval_every: int = 50
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name in ("n", "local_world_size", "steps", "batch", "mix_every", "eval_every"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        object.__setattr__(self, "seed", check_integer("seed", self.seed, 0))
        for name in ("overlap", "momentum_tracking"):
            check_bool(name, getattr(self, name))
        object.__setattr__(self, "hidden", tuple(check_integer("a width of hidden", width, 1) for width in self.hidden))
        check_choice("data", self.data, DATA)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("schedule", self.schedule, ("cosine", "constant"))
        if self.momentum_tracking and self.optimizer not in _TRACKED:
            raise ValueError(
                f"momentum tracking is for optimizer='gossip-adamw' or 'momentum', and it is {self.optimizer!r}: use one of "
                "these, or leave momentum tracking out"
            )
        norm = check_number("grad_clip_norm", self.grad_clip_norm, "0.0 (no clipping) or a positive norm", at_least=0.0)
        object.__setattr__(self, "grad_clip_norm", norm)
        if self.lr is not None:
            object.__setattr__(self, "lr", check_number("lr", self.lr, "a positive learning rate", above=0.0, below=2.0**128))
        check_alpha(self.alpha)
        object.__setattr__(self, "alpha", None if self.alpha is None else to_float(self.alpha))
        made = make_topology(self.topology, local_world_size=self.local_world_size, world_size=self.n, rank=0)
        rule: Rule = MomentumTracking() if self.momentum_tracking else Gossip()
        kind = check_compression(self.compression)
        fit_rule(rule, kind, Topology.every(made, self.mix_every), narrow=False, overlap=self.overlap)

    def to_json(self) -> dict[str, Any]:
        """The settings as JSON values."""
        settings = asdict(self)
        return {**settings, "hidden": list(self.hidden), "alpha": None if self.alpha == math.inf else self.alpha}


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
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def last(self) -> Row:
        return self.rows[-1]

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values: None for a number that is not finite, as of a run that has diverged."""
        return {
            "format": "decent_dp-simulation-1",
            "simulation": self.simulation.to_json(),
            "parameters": self.parameters,
            "samples": list(self.samples),
            "seconds": self.seconds,
            "rows": [{k: v if math.isfinite(v) else None for k, v in asdict(row).items()} for row in self.rows],
        }


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


def run(simulation: Simulation, on_row: Callable[[Row], object] | None = None) -> Result:
    """Trains as the settings say; up to 100,000 parameters per replica on one thread.

    Args:
        simulation: the settings.
        on_row: called with each row when it is ready.

    Raises:
        ImportError: a library for the data is not installed; with the install line.
        ValueError: there are fewer samples than workers, or no such device.
    """
    device = find_device(simulation.device)
    data = DATA[simulation.data]()
    shards = dirichlet_split(data.y.numpy(), simulation.n, simulation.alpha, simulation.seed)
    batches = Batches(shards, simulation.batch, simulation.seed)
    data = data.to(device)
    cluster = _make_cluster(simulation, data)
    parameters = sum(value[0].numel() for value in cluster.parameters.values())
    sizes = [len(shard) for shard in shards]
    began = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if parameters <= _ONE_THREAD else threads)
    try:
        rows = _train(simulation, cluster, data, batches, on_row)
    finally:
        torch.set_num_threads(threads)
    return Result(simulation, parameters, (min(sizes), max(sizes)), rows, time.perf_counter() - began)


def _train(
    simulation: Simulation, cluster: VirtualCluster, data: Data, batches: Batches, on_row: Callable[[Row], object] | None
) -> list[Row]:
    rows: list[Row] = []
    losses, last = torch.zeros((), dtype=torch.float64, device=data.x.device), 0
    for t in range(simulation.steps):
        chosen = batches(t).to(data.x.device)
        losses += cluster.step(data.x[chosen], data.y[chosen]).mean(dtype=torch.float64)
        if (t + 1) % simulation.eval_every and t + 1 != simulation.steps:
            continue
        accuracy = float(_accuracy(cluster.mean_model(), data))
        worst = float(torch.stack([_accuracy(cluster.replica_model(i), data) for i in range(cluster.n)]).min())
        loss, distance = float(losses) / (t + 1 - last), cluster.consensus_distance()
        rows.append(Row(t + 1, loss, distance, accuracy, worst, cluster.bytes_sent))
        losses.zero_()
        last = t + 1
        if on_row is not None:
            on_row(rows[-1])
    return rows


@torch.no_grad()
def _accuracy(model: nn.Module, data: Data) -> Tensor:
    logits: Tensor = model.eval()(data.x_test)
    return (logits.argmax(-1) == data.y_test).float().mean()


def make_model(simulation: Simulation, features: int, classes: int) -> nn.Module:
    """The network of a run: linear layers with ReLU between them."""
    widths = [features, *simulation.hidden, classes]
    # The caller's stream of random numbers does not change.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(simulation.seed)
        layers: list[nn.Module] = []
        for inside, outside in pairwise(widths):
            # Drawn on the CPU, so that the weights are the same on any device.
            layers += [nn.Linear(inside, outside, dtype=torch.float32, device="cpu"), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _make_cluster(simulation: Simulation, data: Data) -> VirtualCluster:
    factory, default = OPTIMIZERS[simulation.optimizer]
    schedule = None
    if simulation.schedule == "cosine":
        warm_up = min(simulation.steps - 1, math.ceil(0.05 * simulation.steps))
        schedule = partial(lr_scheduler_fn_cosine_with_warmup, t_warmup=warm_up, t_max=max(1, simulation.steps - warm_up))
    return VirtualCluster(
        make_model(simulation, data.x.shape[1], data.classes).to(data.x.device),
        partial(factory, lr=default if simulation.lr is None else simulation.lr),
        simulation.topology,
        simulation.n,
        lr_scheduler_fn=schedule,
        local_world_size=simulation.local_world_size,
        compression=simulation.compression,
        overlap=simulation.overlap,
        mix_every=simulation.mix_every,
        rule=MomentumTracking() if simulation.momentum_tracking else None,
        grad_clip_norm=simulation.grad_clip_norm,
    )
