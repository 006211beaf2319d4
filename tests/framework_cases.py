"""What the tests of all integrations share: a small task, the plain ``gossip()`` loop, a record of collectives.

The plain loop is the independent computation that a framework must equal bit for bit, given the same batches.
"""

from __future__ import annotations

import contextlib
import os
import traceback
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

import decent_dp
from decent_dp.replica.snapshot import settle
from tests.helpers import seed_cpu

# What waits for all members of a group, or makes all of them wait for one.
_COLLECTIVES = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
]


def quiet_frameworks() -> None:
    """In a worker: warnings of other packages are theirs; those that decent_dp gives, or causes, stay errors."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"decent_dp\b")
    warnings.filterwarnings("error", message=r".*(decent_dp|gossip)")


def as_launched(rank: int, n: int) -> None:
    """In a worker: the environment that torchrun sets, and quiet frameworks. Before the framework is imported."""
    worker = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in worker.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
    quiet_frameworks()


class Points(Dataset[dict[str, Tensor]]):
    """Inputs of six numbers and targets of three, as dicts with the keys 'x' and 'labels'; 'index' is the sample's number."""

    def __init__(self, n: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 6, generator=generator)
        self.y = torch.tanh(self.x[:, :3]) + 0.1 * torch.randn(n, 3, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"x": self.x[i], "labels": self.y[i], "index": i}


class Model(nn.Module):
    """Returns its loss first, as models of transformers do, and records the numbers of the samples that it sees in training.

    Attributes:
        seen: of each forward in training, the samples' numbers.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        seed_cpu(seed)
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
        self.seen: list[list[int]] = []

    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        if self.training and index is not None:
            self.seen.append(index.tolist())
        logits = self.layers(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


@dataclass
class Run:
    """A training run of one worker.

    Attributes:
        losses: of each micro-batch of this worker, in order.
        params: at the end, before any mean is taken.
        mean: the mean of all replicas at the end.
        norms: the norm of the local gradients in each step, before clipping.
        rounds: of the replica.
    """

    losses: list[float] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    mean: list[Tensor] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rounds: int = 0


def copies(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def plain_loop(
    batches: Iterable[list[int]],
    *,
    accumulate: int = 1,
    clip: float | None = None,
    make_optimizer: Any = None,
    make_scheduler: Any = None,
    seed: int = 0,
    dataset: Points | None = None,
    saves: Collection[int] = (),
    **options: Any,
) -> Run:
    """Trains ``Model`` with ``gossip()`` on these batches of sample numbers, of this worker. Called by all workers.

    Args:
        accumulate: batches per step; their losses are divided by it.
        clip: the largest norm of the gradients.
        make_optimizer: from parameters; None for AdamW with a rate of 0.01 and no decay.
        make_scheduler: from the optimizer, stepped after each step of it.
        saves: after these steps what is in flight is mixed in, as by a save.
        options: of ``gossip``.
    """
    dataset = Points() if dataset is None else dataset
    model = Model(seed)
    make = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.0))
    optimizer = make(model.parameters())
    scheduler = None if make_scheduler is None else make_scheduler(optimizer)
    replica = decent_dp.gossip(model, optimizer, **options)
    run = Run()
    for number, batch in enumerate(batches, start=1):
        loss = model(dataset.x[batch], dataset.y[batch])["loss"]
        run.losses.append(float(loss))
        (loss / accumulate).backward()
        if number % accumulate == 0:
            if clip is not None:
                run.norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            run.params = copies(model)
            if number // accumulate in saves:
                settle(replica)
    run.rounds = replica.stats().rounds
    with replica.averaged():
        run.mean = copies(model)
    replica.close()
    return run


def assert_equal_runs(found: Run, expected: Run) -> None:
    """Bit for bit."""
    assert found.losses == expected.losses
    assert found.rounds == expected.rounds
    for name in ("params", "mean"):
        for a, b in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert torch.equal(a, b), (name, float((a - b).abs().max()))


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """Records the calls of ``torch.distributed`` that involve all workers: the name, and where it was called.

    decent_dp's rounds do not use these functions; its construction does.
    """
    found: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in _COLLECTIVES:
            original = getattr(dist, name, None)
            if original is None:
                continue

            def record(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
                group = kwargs.get("group") or next((a for a in args if isinstance(a, dist.ProcessGroup)), None)
                if (group or dist.group.WORLD).size() == dist.get_world_size():
                    frames = traceback.extract_stack(limit=6)[:-1]
                    found.append(f"{_name} from " + " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(frames)))
                return _original(*args, **kwargs)

            for module in (dist, dist.distributed_c10d):
                if getattr(module, name, None) is original:
                    patch.setattr(module, name, record)
        yield found
