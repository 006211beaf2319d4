"""The law of mixing, computed in NumPy in float64 from its definitions alone, and the training that it is held against."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

import decent_dp
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.rules import GASLoC, OuterNesterov
from decent_dp.topo import Edge, Topology, TopologyReg

N = 4


class Varying(Topology):
    """Idle workers, a group of three, weights other than 1/2 and weights that vary by round."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        return [
            [Edge([0, 1], 0.75), Edge([2], 1.0), Edge([3], 1.0)],
            [Edge([1, 2, 3], 0.5), Edge([0], 1.0)],
            [Edge([0, 3], 0.3), Edge([1, 2], 0.6)],
        ]


def topology_of(name: str, n: int, local: int = 1) -> Topology:
    made = {**TopologyReg.registry, "varying": Varying}[name](local, world_size=n, rank=0)  # type: ignore[call-arg]
    assert isinstance(made, Topology)
    return made


def matrix(edges: list[Edge], n: int) -> np.ndarray:
    """The mixing matrix of a round, from the definition of an edge."""
    w = np.zeros((n, n))
    for edge in edges:
        for i in edge.ranks:
            for j in edge.ranks:
                w[i, j] = edge.weight if i == j else (1 - edge.weight) / (len(edge.ranks) - 1)
    return w


# -- linear least squares --------------------------------------------------------------------------------------------------


def start() -> np.ndarray:
    return np.random.default_rng(7).normal(size=(5, 3))


def data(rank: int, t: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([rank, t])
    return rng.normal(size=(6, 5)), rng.normal(size=(6, 3))


def gradient(x: np.ndarray, rank: int, t: int) -> np.ndarray:
    """Of mean((A X - B)²) over the entries, X being 5 × 3."""
    a, b = data(rank, t)
    return 2 * a.T @ (a @ x - b) / b.size


def edit(rank: int, t: int) -> np.ndarray:
    """The user's change of the parameters between updates t and t + 1."""
    return np.random.default_rng([9, rank, t]).normal(size=(5, 3)) * 0.1


class Linear(nn.Module):
    """X as two parameters, so that there can be several buckets."""

    def __init__(self) -> None:
        super().__init__()
        x = torch.from_numpy(start())
        self.upper, self.lower = nn.Parameter(x[:2].clone()), nn.Parameter(x[2:].clone())

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return a @ torch.cat([self.upper, self.lower])


def squares(model: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (model(a) - b).square().mean()


def loss_of(model: Any, rank: int, t: int) -> torch.Tensor:
    return squares(model, *(torch.from_numpy(array) for array in data(rank, t)))


def whole(model: nn.Module) -> np.ndarray:
    return torch.cat([param.detach() for param in model.parameters()]).numpy().copy()


class SgdTwin:
    def __init__(self, n: int) -> None:
        self.v: list[Any] = [None] * n

    def __call__(self, i: int, t: int, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.v[i] = g if self.v[i] is None else 0.9 * self.v[i] + g
        return x - 0.1 * self.v[i]


class AdamWTwin:
    def __init__(self, n: int) -> None:
        self.m, self.v = [0.0] * n, [0.0] * n

    def __call__(self, i: int, t: int, x: np.ndarray, g: np.ndarray) -> np.ndarray:
        self.m[i] = 0.9 * self.m[i] + 0.1 * g
        self.v[i] = 0.99 * self.v[i] + 0.01 * g * g
        x = x * (1 - 0.05 * 0.1)
        m, v = self.m[i] / (1 - 0.9 ** (t + 1)), self.v[i] / (1 - 0.99 ** (t + 1))
        return x - 0.05 * m / (np.sqrt(v) + 1e-8)


INNER: dict[str, tuple[Any, Callable[[int], Any]]] = {
    "sgd": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), SgdTwin),
    "adamw": (partial(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1), AdamWTwin),
}

# -- turns -----------------------------------------------------------------------------------------------------------------


def mix_of(t: int, h: int, offset: int) -> int | None:
    """The number of the mix in update t, None if there is none: one in every h updates, in that before the turn begins."""
    return t // h if (t + 1) % h == offset % h else None


@dataclass
class Part:
    """Some rows of x that are a bucket: their turn begins ``offset`` updates after a multiple of h and has ``time`` updates."""

    rows: slice
    offset: int
    time: int
    # What was proposed, the replicas at that time, and the update.
    sent: Any = None
    base: Any = None
    at: int = -1


def parts(h: int) -> list[Part]:
    """The turns: the last registered parameter, of 3 rows of 5, comes first."""
    first = h * 3 // 5
    if not first:
        return [Part(slice(0, 5), 0, h)]
    return [Part(slice(2, 5), 0, first), Part(slice(0, 2), first, h - first)]


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        topology: a name, or several in turn, as 'complete:3,ring'.
        local: workers per node. ``h``: ``mix_every``. ``k``: backwards that are summed before a step.
        edited: parameters are changed between updates. ``factor``: the adaptive one.
        batches: of each worker, in ``join``; else all have ``steps``.
        skipped: (worker, update) that a scaler skips.
    """

    topology: str
    inner: str = "sgd"
    h: int = 1
    overlap: bool = True
    rule: Any = None
    steps: int = 7
    factor: float = 1.0
    edited: bool = False
    local: int = 1
    k: int = 1
    batches: tuple[int, ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()

    def steps_of(self, rank: int) -> int:
        return self.batches[rank] if self.batches else self.steps

    def edges(self, t: int, n: int, offset: int = 0) -> Any:
        """The edges of update t of a bucket whose turn begins at ``offset``; None if it does not mix."""
        for name, _, updates in (part.partition(":") for part in self.topology.split(",")):
            length = int(updates or 10**9)
            if t < length:
                mix = mix_of(t, self.h, offset)
                return None if mix is None else topology_of(name, n, self.local).round(mix)
            t -= length  # each topology begins with its first round
        raise AssertionError


# -- the law ---------------------------------------------------------------------------------------------------------------


def mixed(
    rule: Any, memory: dict[str, np.ndarray], base: np.ndarray, sent: np.ndarray, difference: np.ndarray
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """How the replicas move, which were ``base`` when they proposed ``sent``; and what the rule has kept then."""
    if isinstance(rule, OuterNesterov):
        pseudo = memory["anchor"] - (sent + difference)
        momentum = rule.momentum * memory["momentum"] + pseudo
        anchor = memory["anchor"] - rule.lr * (pseudo + rule.momentum * momentum)
        return anchor - base, {"anchor": anchor, "momentum": momentum}
    if isinstance(rule, GASLoC):
        anchor = sent + difference + rule.momentum * (sent - memory["last"])
        return anchor - base, {"anchor": anchor, "last": sent}
    return difference, {}


def twin(case: Case, n: int = N, driver: str = "wrapper", loads: Mapping[int, Any] | None = None) -> np.ndarray:
    """Each worker's parameters at the end.

    Args:
        driver: 'wrapper' mixes before its step, 'gossip' after it; 'gossip' and 'wrapper' without overlap are the same.
        loads: after these updates all replicas become the mean ('mean'), or some rows what is loaded: (rows, values of each
            worker). What was in flight of them is dropped, and the rule begins anew with them.
    """
    inner, taken = INNER[case.inner][1](n), [0] * n
    x = np.stack([start()] * n)
    memory = {"anchor": x.copy(), "last": x.copy(), "momentum": np.zeros_like(x)}
    fresh = np.zeros((1, 5, 1), dtype=bool)
    buckets = parts(case.h)

    def mix(part: Part) -> None:
        rows = part.rows
        w = matrix(case.edges(part.at, n, part.offset), n) - np.eye(n)
        difference = case.factor * np.einsum("ij,jkl->ikl", w, part.sent)
        own = {key: kept[:, rows] for key, kept in memory.items()}
        move, new = mixed(case.rule, own, part.base, part.sent, difference)
        x[:, rows] += np.where(fresh[:, rows], 0.0, move)
        for key, values in new.items():
            memory[key][:, rows] = np.where(fresh[:, rows], own[key], values)
        fresh[:, rows] = False
        part.sent = None

    def finish(t: int, mixes: list[bool]) -> None:
        for part, again in zip(buckets, mixes, strict=True):
            if case.overlap and part.sent is not None and (again or t - part.at >= part.time):
                mix(part)

    for t in range(max(case.batches) if case.batches else case.steps):
        g = [sum(gradient(x[i], i, case.k * t + j) for j in range(case.k)) for i in range(n)]
        mixes = [case.edges(t, n, part.offset) is not None for part in buckets]
        if driver == "wrapper":
            finish(t, mixes)
        for i in range(n):
            if t < case.steps_of(i) and (i, t) not in case.skipped:
                x[i] = inner(i, taken[i], x[i], g[i])
                taken[i] += 1
        if driver == "gossip":
            finish(t, mixes)
        for part, again in zip(buckets, mixes, strict=True):
            if again:
                rows, anchor = part.rows, memory["anchor"]
                fresh[:, rows] = False
                part.base, part.at = x[:, rows].copy(), t
                part.sent = part.base
                if isinstance(case.rule, GASLoC):
                    part.sent = anchor[:, rows] + case.rule.lr * (part.base - anchor[:, rows])
                if not case.overlap:
                    mix(part)
        if case.edited:
            x += np.stack([edit(i, t) for i in range(n)])
        if loads and t in loads:
            loaded = np.zeros_like(fresh)
            if loads[t] == "mean":
                loaded[:] = True
                x[:] = x.mean(0)
            else:
                rows, values = loads[t]
                loaded[:, rows] = True
                x[:, rows] = np.stack(values)[:, rows]
            for key, anew in (("anchor", x), ("last", x), ("momentum", 0.0)):
                memory[key] = np.where(loaded, anew, memory[key])
            fresh |= loaded
    return x


# -- the same with the library ---------------------------------------------------------------------------------------------


def options_of(case: Case, i: int) -> dict[str, Any]:
    """Of the i-th case: one bucket or two, of views or of separate tensors (which the wrapper alone tells apart)."""
    return {"param_as_bucket_view": i % 2 == 0, "bucket_size_in_mb": 25 if i % 4 < 2 else 1e-6}


def train(rank: int, case: Case, driver: str = "wrapper", transport: Any = None, **options: Any) -> np.ndarray:
    """This worker's parameters at the end."""
    TopologyReg.registry["varying"] = Varying  # also where it runs in another process
    model, make, local = Linear(), INNER[case.inner][0], "_local_world_size" if driver == "wrapper" else "local_world_size"
    options = {"overlap": case.overlap, "mix_every": case.h, "rule": case.rule, local: case.local, **options}
    scaler = torch.GradScaler("cpu", init_scale=2.0**10) if case.skipped else None
    options |= {"topology": case.topology, "scaler": scaler, "transport": transport}
    driven: Any
    if driver == "wrapper":
        forward = driven = DecentralizedDataParallel(model, make, **options)
        driven.set_adaptive_factor(case.factor)
    else:
        options.pop("param_as_bucket_view", None)
        optimizer, forward = make(model.parameters()), model
        driven = decent_dp.gossip(model, optimizer, **options)
    with driven.join() if case.batches else contextlib.nullcontext():
        for t in range(case.steps_of(rank)):
            for j in range(case.k):
                loss = loss_of(forward, rank, case.k * t + j)
                if scaler is not None:
                    loss = scaler.scale(loss * float("inf") if (rank, t) in case.skipped else loss)
                with driven.no_sync() if j < case.k - 1 else contextlib.nullcontext():
                    loss.backward()
            if driver == "gossip":
                optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
                optimizer.zero_grad()
            if case.edited:
                added = torch.from_numpy(edit(rank, t))
                with torch.no_grad():
                    model.upper.add_(added[:2])
                    model.lower.add_(added[2:])
    stats = driven.stats()
    assert stats.rounds == (max(case.batches) if case.batches else case.steps)
    assert stats.updates == case.steps_of(rank) - sum(of == rank for of, _ in case.skipped)
    driven.close()
    return whole(model)
