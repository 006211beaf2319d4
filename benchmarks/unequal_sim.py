"""What unequal speeds cost 64 workers, in virtual time: ``python -m benchmarks.unequal_sim``, or ``make bench-unequal-sim``.

The rule is the one of ``faults=Tolerate()``: a budget of patience with each partner, to which each round adds a tenth of a
step. When it is used up the exchange is left out at both ends, and a worker whose partner has passed its round continues in a
later one. Messages take no time, and heartbeats tell the rounds of others once a second. A step takes 200 ms times a log-normal
factor: each worker has its own for all steps, or draws one anew for each step. After a warm-up:

- pace: the share of its time in which a worker computes, of the median worker;
- mixed: the part of a worker's updates whose exchange took place, on average over workers, and the smallest one;
- loss: of the mean model on the digits' test data after the same virtual time, from the same start, relative to waiting.

A worker's update needs only values of earlier rounds. So the digits network is trained round by round, with the edges that took
place; a worker that made no update in a round stands still. The mix is that of ``overlap=False``.

Writes ``benchmarks/results/unequal-sim.json`` and ``unequal-sim.md``.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

from benchmarks.workbench import markdown, write
from decent_dp.faults import Tolerate
from decent_dp.tools.sim import Batches, VirtualCluster, digits, dirichlet_split
from decent_dp.tools.sim.experiment import HIDDEN, make_model
from decent_dp.topo import Edge, Topology, make_topology
from decent_dp.transport.lateness import _SHARE
from decent_dp.transport.liveness import _COMING, _STEPS

N, PACE, WARM_UP, SECONDS = 64, 0.2, 300.0, 10.0
TOPOLOGIES, SIGMAS, SEEDS = ("base-2", "ring"), (0.25, 0.5, 1.0), (0, 1, 2)
MOST = _COMING * Tolerate.dead_after
HEARTBEAT = 1.0
BATCH, LR, MOMENTUM = 16, 0.05, 0.9
RESULTS = Path(__file__).parent / "results"

# Seconds of computation of a worker's next step.
Duration = Callable[[int], float]


# -- virtual time ------------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    """A worker that computes, waits for the exchange of its last update, and starts the next one.

    Attributes:
        round: of its next exchange.
        open: the round and the partner of the exchange in flight; None if it has ended, or was left out.
        flight: the same, until the worker has accounted for it.
        waits_since: when it began to wait for it; None: it computes.
        joined: when its partner has come.
        announced: the round of its last update, and when that was.
        known: the rounds of others as far as it has heard.
        dropped: by partner: the round up to which that one leaves exchanges out.
        patience: by partner.
        steps: the seconds of its last rounds.
        updates: the rounds in which it made updates, and when they ended.
        computed: the seconds of computation of each update, and of the next one.
    """

    round: int = 0
    open: tuple[int, int] | None = None
    flight: tuple[int, int] | None = None
    waits_since: float | None = None
    joined: float | None = None
    announced: tuple[int, float] = (-1, 0.0)
    known: list[int] = field(default_factory=list)
    dropped: dict[int, int] = field(default_factory=dict)
    patience: dict[int, float] = field(default_factory=dict)
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_STEPS))
    updates: list[tuple[int, float]] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)


class VirtualTime:
    """Workers of unequal speed.

    Args:
        partners: of each round of the period, each worker's partner; itself if it has none.
        duration: called with a worker.
        tolerates: with the budget of patience; else everybody waits.

    Attributes:
        mixed: by round: the pairs whose exchange took place.
    """

    def __init__(self, partners: Sequence[Sequence[int]], duration: Duration, *, tolerates: bool) -> None:
        self._partners, self._duration, self._tolerates = partners, duration, tolerates
        n = len(partners[0])
        self.workers = [Worker(known=[-1] * n) for _ in range(n)]
        self.mixed: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self._now, self._order = 0.0, itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        for i in range(n):
            self._compute(i)
        if tolerates:
            self._at(HEARTBEAT, self._beat)

    def run(self, until: float) -> None:
        while self._events[0][0] <= until:
            self._now, _, call = heapq.heappop(self._events)
            call()

    def _at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), call))

    def _beat(self) -> None:
        rounds = [worker.announced[0] for worker in self.workers]
        for worker in self.workers:
            worker.known = list(map(max, worker.known, rounds))
        self._at(self._now + HEARTBEAT, self._beat)

    def _partner(self, i: int, round_: int) -> int:
        return self._partners[round_ % len(self._partners)][i]

    def _compute(self, i: int) -> None:
        seconds = self._duration(i)
        self.workers[i].computed.append(seconds)
        self._at(self._now + seconds, lambda: self._end_step(i))

    def _end_step(self, i: int) -> None:
        """The optimizer has stepped: this worker catches up, and finishes its last exchange."""
        worker = self.workers[i]
        if self._tolerates:
            self._catch_up(i)
        worker.waits_since = self._now
        if worker.open is None:
            self._start(i)
        elif self._tolerates:
            until = self._now + min(worker.patience.get(worker.open[1], MOST), MOST)
            self._at(until, partial(self._give_up, i, worker.open))

    def _give_up(self, i: int, exchange: tuple[int, int]) -> None:
        worker = self.workers[i]
        if worker.open == exchange and worker.waits_since is not None:
            self._drop(i, exchange[1], exchange[0])

    def _drop(self, i: int, partner: int, round_: int) -> None:
        """Worker i leaves the exchanges with its partner out, up to this round, and tells it so."""
        own, other = self.workers[i], self.workers[partner]
        other.dropped[i] = max(other.dropped.get(i, -1), round_)
        other.known[i] = max(other.known[i], round_)
        for end, peer in ((i, partner), (partner, i)):
            worker = self.workers[end]
            if worker.open is not None and worker.open[1] == peer and worker.open[0] <= round_:
                worker.open = None
                if worker.waits_since is not None:
                    self._start(end)
        assert own.open is None or own.open[1] != partner or own.open[0] > round_

    def _catch_up(self, i: int) -> None:
        """The first round from the present one on that the partner has neither passed nor leaves out."""
        worker = self.workers[i]
        newest, missed = max(worker.known), {}
        while True:
            partner = self._partner(i, worker.round)
            theirs = worker.known[partner]
            if partner != i and theirs > worker.round + 1:
                target = theirs
            elif partner != i and newest > worker.round and worker.dropped.get(partner, -1) >= worker.round:
                target = worker.round + 1
            else:
                break
            for round_ in range(worker.round, target):
                missed[self._partner(i, round_)] = round_
            worker.round = target
        for partner, round_ in missed.items():
            if partner != i:
                self._drop(i, partner, round_)

    def _start(self, i: int) -> None:
        """The last exchange has ended: this worker's update is complete, and the next exchange begins."""
        worker = self.workers[i]
        self._account(worker)
        worker.waits_since = worker.joined = worker.flight = None
        round_, partner = worker.round, self._partner(i, worker.round)
        last, when = worker.announced
        if last >= 0:
            worker.steps.append((self._now - when) / (round_ - last))
        worker.announced = round_, self._now
        worker.updates.append((round_, self._now))
        worker.round += 1
        self._compute(i)
        if partner == i:
            return
        if worker.dropped.get(partner, -1) >= round_:
            self._drop(i, partner, round_)
            return
        other = self.workers[partner]
        other.known[i] = max(other.known[i], round_)
        worker.open = worker.flight = round_, partner
        if other.open == (round_, i):  # both are in it
            self.mixed[round_].add((min(i, partner), max(i, partner)))
            worker.open = other.open = None
            worker.joined = other.joined = self._now
            if other.waits_since is not None:
                self._start(partner)

    def _account(self, worker: Worker) -> None:
        """Waiting uses patience up, and each round adds to it."""
        if worker.flight is None or worker.waits_since is None:
            return
        partner = worker.flight[1]
        absent = max((self._now if worker.joined is None else worker.joined) - worker.waits_since, 0.0)
        earned = _SHARE * statistics.median(worker.steps) if worker.steps else 0.0
        left = max(min(worker.patience.get(partner, MOST), MOST) - absent, 0.0)
        worker.patience[partner] = min(left + earned, MOST)


def durations(n: int, sigma: float, *, anew: bool, seed: int) -> Duration:
    """Log-normal: each worker's own factor, or one that is drawn anew for each step."""
    own = [np.random.default_rng([seed, i]) for i in range(n)]
    fixed = [float(np.exp(sigma * rng.standard_normal())) for rng in own]
    return lambda i: PACE * (float(np.exp(sigma * own[i].standard_normal())) if anew else fixed[i])


def partners_of(name: str, n: int) -> list[list[int]]:
    topology = make_topology(name, local_world_size=1, world_size=n, rank=0)
    assert topology.period is not None
    rounds = []
    for t in range(topology.period):
        row = list(range(n))
        for edge in topology.round(t):
            if len(edge.ranks) == 2:
                a, b = edge.ranks
                row[a], row[b] = b, a
        rounds.append(row)
    return rounds


def figures(run: VirtualTime, since: float, until: float) -> dict[str, list[float]]:
    """Pace and participation of each worker between two times."""
    meetings: dict[int, set[int]] = {round_: {rank for pair in pairs for rank in pair} for round_, pairs in run.mixed.items()}
    paces, parts = [], []
    for i, worker in enumerate(run.workers):
        made = zip(worker.updates, worker.computed, strict=False)
        paces.append(sum(seconds for (_, end), seconds in made if since < end <= until) / (until - since))
        ended = worker.updates[:-1] if worker.open else worker.updates  # the last exchange is in flight
        own = [round_ for round_, end in ended if since < end <= until]
        parts.append(sum(i in meetings.get(round_, ()) for round_ in own) / len(own) if own else 1.0)
    return {"paces": paces, "parts": parts}


# -- learning ----------------------------------------------------------------------------------------------------------------


class Recorded(Topology):
    """The edges that took place."""

    def __init__(self, n: int, rounds: Sequence[set[tuple[int, int]]]) -> None:
        self._rounds = rounds
        super().__init__(1, world_size=n, rank=0)

    def round(self, t: int) -> list[Edge]:
        pairs = self._rounds[t] if t < len(self._rounds) else set()
        alone = set(range(self._world_size)) - {rank for pair in pairs for rank in pair}
        return [Edge(list(pair), 0.5) for pair in sorted(pairs)] + [Edge([rank], 1.0) for rank in sorted(alone)]

    def _largest_group(self) -> int:
        return 2  # it is asked for whenever a worker is away


def loss_of_mean(run: VirtualTime, since: float, until: float, seed: int) -> float:
    """Of the mean model on the test data, when the updates that end between two times train it from the start."""
    n, data, present = len(run.workers), digits(), defaultdict(set)
    for i, worker in enumerate(run.workers):
        for round_, end in worker.updates:
            if since < end <= until:
                present[round_].add(i)
    rounds = sorted(present)
    edges = [{pair for pair in run.mixed.get(round_, set()) if present[round_].issuperset(pair)} for round_ in rounds]
    model = make_model([data.x.shape[1], *HIDDEN, data.classes], seed)
    optimizer = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
    cluster = VirtualCluster(model, optimizer, Recorded(n, edges), n, overlap=False)
    batches = Batches(dirichlet_split(data.y.numpy(), n, None, seed), BATCH, seed)
    for t, round_ in enumerate(rounds):
        here = set(cluster.alive)
        cluster.revive(present[round_] - here)
        cluster.kill(here - present[round_])
        chosen = batches(t)
        cluster.step(data.x[chosen], data.y[chosen])
    cluster.revive(range(n))
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(cluster.mean_model()(data.x_test), data.y_test))


# -- the table ---------------------------------------------------------------------------------------------------------------


def measure(topology: str, sigma: float, seed: int, *, anew: bool, tolerates: bool, learns: bool = True) -> dict[str, float]:
    run = VirtualTime(partners_of(topology, N), durations(N, sigma, anew=anew, seed=seed), tolerates=tolerates)
    end = WARM_UP + SECONDS
    run.run(end)
    found = figures(run, WARM_UP, end)
    result = {
        "pace": statistics.median(found["paces"]),
        "slowest_pace": min(found["paces"]),
        "mixed": fmean(found["parts"]),
        "least_mixed": min(found["parts"]),
    }
    return result | ({"loss": loss_of_mean(run, WARM_UP, end, seed)} if learns else {})


def main() -> None:
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for topology, anew, sigma in itertools.product(TOPOLOGIES, (False, True), SIGMAS):
        line: dict[str, Any] = {"topology": topology, "drawn": "each step" if anew else "once", "sigma": sigma}
        for tolerates in (False, True):
            runs = [measure(topology, sigma, seed, anew=anew, tolerates=tolerates) for seed in SEEDS]
            line["tolerant" if tolerates else "waiting"] = {
                key: float(f"{fmean(run[key] for run in runs):.5g}") for key in runs[0]
            }
        print(line, flush=True)
        lines.append(line)
    headings = ["topology", "factor drawn", "sigma", "pace, waiting", "with `Tolerate()`", "mixed", "least", "loss, waiting"]
    rows = [row_of(line) for line in lines]
    settings = {"workers": N, "step_s": PACE, "warm_up_s": WARM_UP, "seconds": SECONDS, "seeds": list(SEEDS)}
    settings |= {"batch": BATCH, "lr": LR, "momentum": MOMENTUM}
    write(RESULTS, "unequal-sim", lines, settings, markdown([*headings, "with `Tolerate()`"], rows, words=2))


def row_of(line: dict[str, Any]) -> list[str]:
    waiting, own = line["waiting"], line["tolerant"]
    numbers = [waiting["pace"], own["pace"], own["mixed"], own["least_mixed"], waiting["loss"], own["loss"]]
    return [line["topology"], line["drawn"], f"{line['sigma']:g}", *(f"{number:.2f}" for number in numbers)]


if __name__ == "__main__":
    main()
