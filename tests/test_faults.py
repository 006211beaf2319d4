"""Real workers that die, freeze, are cut off or spoil what they send, and what the others make of it.

Every worker takes SGD steps with gradients that the test knows, and writes what it is about to send to a file that outlives it.
So the test finds out, for each update of each worker, which exchanges were mixed in (``Run.ledger``), and nothing else may
have moved a replica. It follows whether both ends of an edge have mixed an exchange, or neither.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import decent_dp
from decent_dp.engine import Engine
from decent_dp.errors import PeerLostError
from decent_dp.topo import TopologyReg
from tests.faulty_link import WHERES, Fault, FaultyLinks, RemoteLinks, around, ask, connect_through, die, freeze, inject
from tests.workers import Outcome, Workers, hear, say

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network stacks and signals as on Linux")

# Seconds without a sign of life after which a worker is out, and those after which it is a hole; in tests of silence, and else.
DEAD_AFTER, DEFAULT_DEAD_AFTER, HOLE = 4.0, 10.0, 0.3
# Seconds that a busy machine may add to a promise. A closed connection is seen "at once": long before silence makes a hole, and
# a hole is made long before a worker is out.
SLACK = 2.0
# The round in which faults happen. Of four workers with 'base-2', (0 1) and (2 3) meet in even rounds, (0 2) and (1 3) in odd
# ones; of six in a ring, (0 1), (2 3) and (4 5) in even rounds, (1 2), (3 4) and (5 0) in odd ones.
ROUND = 20
# Rounds at the end whose exchanges may not be settled when training ends.
UNSETTLED = 5
# Numbers that are recorded of a replica: enough to tell exchanges apart.
RECORDED = 16
LR, EXACT = 0.1, 1e-10


# -- the workers -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """A run. ``tolerate``: the arguments of ``Tolerate``, or None. ``pace``: the seconds that a step computes."""

    n: int
    faults: tuple[Fault, ...]
    survivors: tuple[int, ...]
    topology: str
    steps: int
    pace: float
    dimension: int
    tolerate: dict[str, Any] | None
    file: Path


@dataclass(frozen=True)
class Report:
    """How a worker sees the end.

    Attributes:
        gone: the workers that were holes at any time; ``holes``: those that are.
        rebuilt: the first round of the first topology that was rebuilt; the number of steps, if none was.
    """

    stats: Any
    gone: frozenset[int]
    holes: tuple[int, ...]
    finite: bool
    rebuilt: int


def gradient(rank: int, t: int, dimension: int) -> np.ndarray:
    return np.random.default_rng([rank, t]).standard_normal(dimension)


@functools.cache
def projection(dimension: int) -> np.ndarray:
    """What is recorded of a replica. It is linear, so that exchanges add up as in the replica, and sees every element."""
    return np.random.default_rng(0).standard_normal((RECORDED, dimension)) / math.sqrt(dimension)


def record(plan: Plan) -> np.ndarray:
    """For each worker and update: when it ended, its round, and the projection of the replica when its exchange was started."""
    return np.memmap(plan.file, np.float64, "r+", shape=(plan.n, plan.steps, 2 + RECORDED))


def train_worker(rank: int, n: int, plan: Plan, links: RemoteLinks) -> Report:
    connect_through(links, rank)
    model = nn.ParameterDict({"x": nn.Parameter(torch.ones(plan.dimension, dtype=torch.float64))})
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    tolerance = {} if plan.tolerate is None else {"faults": decent_dp.Tolerate(**plan.tolerate)}
    replica = decent_dp.gossip(model, optimizer, topology=plan.topology, **tolerance)
    rows, gone, rebuilt, t = record(plan)[rank], set[int](), plan.steps, 0

    def note_values(engine: Any, *_: Any) -> None:
        rows[t, 1] = engine.round
        rows[t, 2:] = projection(plan.dimension) @ model.x.detach().numpy()

    inject(SimpleNamespace(rank=rank, links=links, model=model), plan.faults)
    around(Engine, "start", before=note_values)  # before any fault at this point
    for t in range(plan.steps):
        time.sleep(plan.pace)
        model.x.grad = torch.from_numpy(gradient(rank, t, plan.dimension))
        try:
            optimizer.step()
        finally:
            rows[t, 0] = time.monotonic()
        if plan.tolerate is not None:
            gone |= set(replica.roster.holes)
            if replica.roster.epoch > 0:
                rebuilt = min(rebuilt, replica.roster.start)
    report = Report(
        replica.stats(),
        frozenset(gone),
        () if plan.tolerate is None else replica.roster.holes,
        bool(model.x.isfinite().all()),
        rebuilt,
    )
    # Who leaves early would be a hole of the others.
    say(f"trained {rank}")
    for other in plan.survivors:
        with contextlib.suppress(RuntimeError):  # it has failed, which its own outcome tells
            hear(f"trained {other}", 15)
    return report


# -- what they have done ---------------------------------------------------------------------------------------------------


class Run:
    """The end of a run, and its record.

    Attributes:
        sent: the projection of each replica in each update, when its exchange was started, (n, steps, numbers); else NaN.
        ended: when each update of each worker ended, or failed, (n, steps).
        moved: how far mixing alone has moved the replicas in ``sent``.
    """

    def __init__(self, plan: Plan, outcomes: list[Outcome]) -> None:
        self.plan, self.outcomes = plan, outcomes
        rows = np.array(record(plan))
        self.ended, self.sent = rows[..., 0], rows[..., 2:]
        # By worker: the update of each round. A worker that was silent goes on in the round of the others.
        self.updates = [{int(q): t for t, q in enumerate(own) if q >= 0} for own in rows[..., 1]]
        project, shape = projection(plan.dimension), (plan.n, plan.steps, RECORDED)
        gradients = [project @ gradient(rank, t, plan.dimension) for rank in range(plan.n) for t in range(plan.steps)]
        self.moved = self.sent - project.sum(1) + LR * np.cumsum(np.reshape(gradients, shape), axis=1)
        self.topologies = [TopologyReg.registry[plan.topology](1, world_size=plan.n, rank=rank) for rank in range(plan.n)]
        self.ledgers = {rank: self.ledger(rank) for rank in plan.survivors}

    def report(self, rank: int) -> Report:
        outcome = self.outcomes[rank]
        assert (outcome.error, outcome.exitcode) == ("", 0), f"worker {rank}: {outcome.trace or outcome}"
        report: Report = outcome.value
        return report

    def ledger(self, rank: int) -> dict[tuple[int, int], int]:
        """The exchanges that a worker has mixed: (peer, round) -> the update. Fails if anything else has moved its replica.

        An update mixes in the exchange of the round before, or none, and at most one that is late.
        """
        found: dict[tuple[int, int], int] = {}
        for t in range(1, self.plan.steps):
            step = self.moved[rank, t] - self.moved[rank, t - 1]
            if np.isnan(step).any():  # it has died, and another test says whether it should have
                break
            recent = self._exchanges(rank, [t - 1])
            late = (
                self._exchanges(rank, range(t - 1)) if not any(_equal(step, value) for _, value in [*recent, NOTHING]) else []
            )
            for (first, a), (second, b) in itertools.product([NOTHING, *recent], [NOTHING, *late]):
                if _equal(step, a + b):
                    mixed = {key for key in (first, second) if key is not None}
                    assert not mixed & found.keys(), f"worker {rank} has mixed {mixed & found.keys()} twice, in update {t}"
                    found.update(dict.fromkeys(mixed, t))
                    break
            else:
                raise AssertionError(f"in update {t} worker {rank} was moved by something that nobody has sent: {step}")
        return found

    def _exchanges(self, rank: int, updates: Sequence[int]) -> list[tuple[Any, np.ndarray]]:
        """What the exchanges of these updates would add, whatever the topology: after a fault it may have been planned anew."""
        return [
            ((peer, q), weight * (self.sent[peer, self.updates[peer][q]] - self.sent[rank, t]))
            for q, t in self.updates[rank].items()
            if t in updates
            for peer in range(self.plan.n)
            if peer != rank and q in self.updates[peer]
            for weight in (1 / 2, 1 / 3, 2 / 3)
        ]

    def rounds_mixed(self, rank: int, peer: int) -> list[int]:
        return sorted(q for who, q in self.ledgers[rank] if who == peer)

    def waits(self, rank: int) -> np.ndarray:
        """The seconds of each update, but for the first, beyond its computation."""
        return np.diff(self.ended[rank]) - self.plan.pace

    def check(self, waits: float = SLACK, times: int = 2) -> None:
        """The promise: survivors take every step, wait for ``waits`` seconds at most, not often, and their mean is exact."""
        steps, survivors = self.plan.steps, list(self.plan.survivors)
        for rank in survivors:
            report = self.report(rank)
            assert report.finite
            assert report.stats.updates == steps
            assert self.waits(rank).max() < waits, (rank, self.waits(rank).max())
            if waits > SLACK:  # once, not in each round; and once more because another waits
                assert (self.waits(rank) > 0.8 * (waits - SLACK)).sum() <= times, (rank, self.waits(rank))
        one_sided = [
            (a, b, q)
            for a, b in itertools.combinations(survivors, 2)
            for q in set(self.rounds_mixed(a, b)) ^ set(self.rounds_mixed(b, a))
            if q < steps - UNSETTLED
        ]
        counted = sum(getattr(self.report(rank).stats, "one_sided", 0) for rank in survivors)
        assert len(one_sided) <= counted, one_sided
        in_step = all(q == t for rank in survivors for q, t in self.updates[rank].items())
        if not one_sided and in_step:  # else the same update of two workers is in different rounds
            self._check_mean(survivors)

    def _check_mean(self, survivors: list[int]) -> None:
        """Mixing never moves the mean of all before the first fault, nor that of the survivors after the last exchange with
        another worker; but for updates between which one end has mixed an exchange and the other not yet."""
        first = min((fault.round for fault in self.plan.faults), default=0)
        assert _equal(self.moved[:, : first + 1].sum(0), 0.0)
        ledgers, steps = self.ledgers, self.plan.steps
        settled = max([t for ledger in ledgers.values() for (peer, _), t in ledger.items() if peer not in survivors] + [0])
        level = np.zeros(steps, dtype=int)
        for rank, ledger in ledgers.items():
            for (peer, q), t in ledger.items():
                if peer in survivors:
                    level[t : ledgers[peer].get((rank, q), steps)] += 1
        total = self.moved[survivors].sum(0)[settled:][level[settled:] == 0]
        assert len(total) > (steps - settled) // 2
        assert _equal(total, total[0])

    def check_holes(self, *ranks: int) -> None:
        """The counters of these workers tell the exchanges that were left out, and those of the others tell none.

        The edges are those that the topology had at the start. So only rounds count that come before it was rebuilt, or a
        hole can have healed. On a busy machine rounds take up to twice the pace.
        """
        plan = self.plan
        dead_after = DEFAULT_DEAD_AFTER if plan.tolerate is None else plan.tolerate["dead_after"]
        for rank in plan.survivors:
            stop = min(plan.steps - 1, self.report(rank).rebuilt, ROUND + int((1 - HOLE) / 2 * dead_after / plan.pace))
            edges = ((q, self.topologies[rank].get_edge(q).ranks) for q in range(stop))
            missing = [q for q, edge in edges if not any((peer, q) in self.ledgers[rank] for peer in edge if peer != rank)]
            holes = self.report(rank).stats.holes
            assert bool(missing) == (rank in ranks), (rank, missing)
            # The last exchange with a dead worker is in doubt until it counts as dead.
            assert holes >= len(missing) - 1, (rank, missing, holes)
            if stop == plan.steps - 1:
                assert holes <= len(missing) + (UNSETTLED if missing else 0), (rank, missing, holes)


NOTHING: tuple[None, np.ndarray] = (None, np.zeros(RECORDED))


def _equal(a: np.ndarray, b: Any) -> bool:
    return bool((np.abs(a - b) < EXACT).all())  # NaN equals nothing


@pytest.fixture
def train(workers: Workers, tmp_path: Path) -> Callable[..., Run]:
    """Runs n workers with these faults, behind links that can fail. ``dead_after`` None: without tolerance."""

    def run(
        n: int,
        *faults: Fault,
        survivors: Sequence[int] | None = None,
        dead_after: float | None = DEFAULT_DEAD_AFTER,
        topology: str = "base-2",
        steps: int = 60,
        pace: float = 0.01,
        dimension: int = 64,
    ) -> Run:
        survivors = range(n) if survivors is None else survivors
        tolerate = None if dead_after is None else {"dead_after": dead_after}
        plan = Plan(n, faults, tuple(survivors), topology, steps, pace, dimension, tolerate, tmp_path / "record")
        np.full((n, steps, 2 + RECORDED), math.nan).tofile(plan.file)
        with FaultyLinks(n) as links:
            outcomes = workers.outcomes(n, train_worker, plan, links.remote)
        assert links.carried
        return Run(plan, outcomes)

    return run


def slow(*args: Any) -> Any:
    return pytest.param(*args, marks=pytest.mark.slow)


WITH_AND_WITHOUT = pytest.mark.parametrize("dead_after", [None, DEFAULT_DEAD_AFTER], ids=["error", "tolerate"])


# -- the record itself -----------------------------------------------------------------------------------------------------


def simulated(tmp_path: Path, *, skips: Any = (), late: Any = (), spoils: Any = (), dies: int | None = None) -> Run:
    """A run of four workers without workers. ``skips``, ``late`` and ``spoils``: (rank, round) of exchanges that this end does
    not mix, mixes three updates later, or of which it mixes a part. ``dies``: worker 3 starts no exchange after this round."""
    steps, n, survivors = 40, 4, (0, 1, 2, 3) if dies is None else (0, 1, 2)
    faults = () if dies is None else (Fault(3, dies, "after start", die),)
    plan = Plan(n, faults, survivors, "base-2", steps, 0.01, RECORDED, None, tmp_path / "record")
    np.full((n, steps, 2 + RECORDED), math.nan).tofile(plan.file)
    rows, x, missing = record(plan), np.ones((n, RECORDED)), dict.fromkeys(range(n), 0)
    topologies = [TopologyReg.registry["base-2"](1, world_size=n, rank=rank) for rank in range(n)]
    pending: list[tuple[int, int, np.ndarray]] = []
    for t in range(steps):
        for _, rank, difference in [entry for entry in pending if entry[0] == t]:
            x[rank] += difference
        x -= LR * np.stack([gradient(rank, t, RECORDED) for rank in range(n)])
        rows[:, t] = np.hstack([np.full((n, 1), 0.01 * t), np.full((n, 1), t), x @ projection(RECORDED).T])
        if dies is not None and t > dies:
            rows[3, t] = math.nan
        for rank in range(n):
            [peer] = set(topologies[rank].get_edge(t).ranks) - {rank}
            if (rank, t) in skips or (dies is not None and t > dies and 3 in (rank, peer)):
                missing[rank] += t < steps - 1
                continue
            difference = (x[peer] - x[rank]) / 2
            difference[0] *= 0.5 if (rank, t) in spoils else 1.0
            pending.append((t + (4 if (rank, t) in late else 1), rank, difference))
    reports = {
        r: Report(SimpleNamespace(updates=steps, holes=missing[r], one_sided=0), frozenset(), (), True, steps) for r in range(n)
    }
    return Run(plan, [Outcome(reports[rank]) for rank in range(n)])


def test_the_record_tells_what_was_mixed(tmp_path):
    check_undisturbed(simulated(tmp_path), SLACK)
    run = simulated(tmp_path, late=[(0, 20)])
    run.check()
    assert (run.ledgers[0][1, 20], run.ledgers[1][0, 20]) == (24, 21)
    run = simulated(tmp_path, skips=[(0, 20), (1, 20)])
    run.check()
    run.check_holes(0, 1)
    for dies in (20, 21):
        run = simulated(tmp_path, dies=dies)
        run.check()
        run.check_holes(1, 2)
        assert max(run.rounds_mixed(1, 3) + run.rounds_mixed(2, 3)) == dies
    with pytest.raises(AssertionError, match=r"\[\(0, 1, 20\)\]"):
        simulated(tmp_path, skips=[(0, 20)]).check()
    with pytest.raises(AssertionError, match="in update 21 worker 0 was moved by something that nobody has sent"):
        simulated(tmp_path, spoils=[(0, 20)])


# -- without tolerance -----------------------------------------------------------------------------------------------------


def check_error(run: Run, victim: int, neighbours: Sequence[int], seconds: float) -> None:
    """The neighbours of a worker that is gone name it in time."""
    last = run.ended[victim, ROUND - 1]
    for rank in neighbours:
        outcome = run.outcomes[rank]
        assert outcome.error == PeerLostError.__name__, outcome
        assert f"worker {victim}" in outcome.message
        assert np.nanmax(run.ended[rank]) - last < seconds + SLACK


@pytest.mark.parametrize("where", [where if where == "mid message" else slow(where) for where in WHERES])
def test_without_tolerance_a_killed_worker_is_named(train, where):
    run = train(4, Fault(3, ROUND, where, die), survivors=(), dead_after=None)
    assert run.outcomes[3].exitcode == -signal.SIGKILL
    if where != "mid message":  # which is in another thread
        assert np.isnan(run.ended[3, ROUND]) == ("start" in where)
    assert np.isnan(run.sent[3, ROUND + 1]).all()
    check_error(run, 3, [1, 2], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("how", [freeze(2 * DEFAULT_DEAD_AFTER), ask("partition", [3], [0, 1, 2])], ids=["frozen", "cut off"])
def test_without_tolerance_a_silent_worker_is_named(train, how):
    """Also one that is alive, and so is the connection."""
    run = train(4, Fault(3, ROUND, "after start", how), survivors=(), dead_after=None)
    check_error(run, 3, [1, 2], DEFAULT_DEAD_AFTER)


# -- nothing is lost -------------------------------------------------------------------------------------------------------


def check_undisturbed(run: Run, waits: float) -> None:
    """Every exchange was mixed by both ends, in the update after its start, and nobody was a hole."""
    run.check(waits)
    for rank, ledger in run.ledgers.items():
        assert run.report(rank).gone == frozenset()
        expected = {}
        for q in range(run.plan.steps - 1):
            expected.update({(peer, q): q + 1 for peer in run.topologies[rank].get_edge(q).ranks if peer != rank})
        assert ledger == expected


@WITH_AND_WITHOUT
def test_a_short_freeze_makes_one_round_late(train, dead_after):
    run = train(4, Fault(3, ROUND, "after start", freeze(1.0)), dead_after=dead_after)
    check_undisturbed(run, 1.0 + SLACK)
    assert max(run.waits(rank).max() for rank in range(3)) > 0.5


@pytest.mark.slow
def test_where_links_are_slow_nobody_is_late_whose_messages_move(train):
    """Messages of 1.2 MB take a second, and in each round one worker has no partner, and is ahead then. From round 12 on those
    of worker 2 take 2.5 times as long, as if a new process copied its state."""

    def throttle(rank: int, others: Sequence[int], round_: int, rate: float) -> list[Fault]:
        return [
            Fault(rank, round_, "before start", ask("throttle", *ends, rate))
            for other in others
            for ends in ((rank, other), (other, rank))
        ]

    n = 5
    slow_from_the_start = [fault for rank in range(n) for fault in throttle(rank, range(rank), 1, 1.2e6)]
    run = train(
        n, *slow_from_the_start, *throttle(2, (0, 1, 3, 4), 12, 0.48e6), steps=24, dimension=150_000, topology="random-matching"
    )
    assert [run.report(rank).stats.holes for rank in range(n)] == [0] * n
    assert [run.report(rank).stats.reconnects for rank in range(n)] == [0] * n


# -- deaths ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [where if where == "mid message" else slow(where) for where in WHERES])
def test_a_killed_worker_costs_its_partner_an_edge(train, where):
    run = train(4, Fault(3, ROUND, where, die), survivors=(0, 1, 2))
    assert run.outcomes[3].exitcode == -signal.SIGKILL
    run.check()
    run.check_holes(1, 2)
    assert max(run.rounds_mixed(2, 3)) <= ROUND
    assert run.report(1).holes == run.report(2).holes == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("sent", [1000, 39_900])
def test_a_worker_killed_in_a_long_message(train, sent):
    run = train(4, Fault(3, ROUND, "mid message", die, sent), survivors=(0, 1, 2), dimension=5000)
    run.check()
    assert max(run.rounds_mixed(2, 3)) < ROUND


@pytest.mark.slow
def test_a_worker_killed_at_the_start_of_training(train):
    train(4, Fault(3, 0, "after start", die), survivors=(0, 1, 2)).check()


@pytest.mark.slow
def test_both_ends_of_an_edge_die_at_once(train):
    faults = [Fault(rank, ROUND, "after start", die) for rank in (2, 3)]
    run = train(6, *faults, survivors=(0, 1, 4, 5), topology="ring")
    run.check()
    run.check_holes(1, 4)


# -- silence ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_long_freeze_makes_a_hole_until_the_worker_wakes(train):
    """What it had sent is not mixed. It goes on in the round of the others."""
    frozen = Fault(3, ROUND, "after start", freeze(2 * DEAD_AFTER))
    run = train(4, frozen, survivors=(0, 1, 2), dead_after=DEAD_AFTER, steps=500, pace=0.02)
    run.check(HOLE * DEAD_AFTER + SLACK)
    run.check_holes(1, 2)
    for rank in (1, 2):
        assert 3 in run.report(rank).gone
        mixed = run.rounds_mixed(rank, 3)
        while_frozen = [q for q in mixed if ROUND < q < ROUND + DEAD_AFTER / run.plan.pace / 2]
        assert while_frozen == []
        assert max(mixed) > run.plan.steps - 50
        # The worker that has woken mixes the same exchanges, and nothing else but one that its partner was in doubt about.
        odd = {q for peer, q in run.ledger(3) if peer == rank} ^ set(mixed)
        odd = {q for q in odd if q < run.plan.steps - UNSETTLED}
        assert len(odd) <= run.report(rank).stats.one_sided, odd
        assert odd <= {ROUND}, odd


@pytest.mark.slow
def test_a_partition_makes_holes_and_heals(train):
    cut_off = Fault(0, ROUND, "before start", ask("partition", [0, 1], [2, 3]))
    healed = Fault(0, ROUND, "before start", ask("heal", after=2 * HOLE * DEAD_AFTER))
    run = train(4, cut_off, healed, dead_after=DEAD_AFTER, steps=350, pace=0.02)
    run.check(HOLE * DEAD_AFTER + SLACK)
    run.check_holes(0, 1, 2, 3)
    for a, b in ((0, 2), (1, 3)):
        assert b in run.report(a).gone
        assert a in run.report(b).gone
        assert max(run.rounds_mixed(a, b)) > run.plan.steps - 50
        assert run.report(a).holes == run.report(b).holes == ()


@pytest.mark.slow
@pytest.mark.parametrize(("where", "ends"), [("before start", (0, 1)), ("mid message", (1, 0))])
def test_a_link_that_passes_one_direction_only(train, where, ends):
    run = train(4, Fault(0, ROUND, where, ask("blackhole", *ends)), dead_after=DEAD_AFTER, steps=300, pace=0.02)
    run.check(HOLE * DEAD_AFTER + SLACK)
    run.check_holes(0, 1)
    assert max(run.rounds_mixed(0, 1), default=0) <= ROUND


# -- connections -----------------------------------------------------------------------------------------------------------


CUT, HALF_OPEN = ask("cut", 0, 1), ask("half_open", 0, 1)
BREAKS = [slow(CUT, where, 64) for where in WHERES] + [slow(HALF_OPEN, "before start", 64)]
# A bit in each of eight bytes that are sent from the round on: of a header, a message or what a frame ends with.
SPOILT = [(60, 64), *((start, 64) for start in (0, 10, 45, 300)), (20_000, 5000)]
BREAKS += [
    pytest.param(ask("flip", 0, 1, start, start + 8), "before start", size, marks=[] if start == 60 else pytest.mark.slow)
    for start, size in SPOILT
]


@pytest.mark.parametrize(("how", "where", "dimension"), BREAKS)
def test_a_connection_that_breaks_is_made_anew_and_nothing_corrupt_is_mixed(train, how, where, dimension):
    run = train(4, Fault(0, ROUND, where, how), dead_after=DEAD_AFTER, steps=200, pace=0.02, dimension=dimension)
    run.check(HOLE * DEAD_AFTER + SLACK if how is HALF_OPEN else SLACK)
    assert max(run.rounds_mixed(0, 1)) > run.plan.steps - 50
    assert all(run.report(rank).holes == () for rank in range(run.plan.n))


# -- values ----------------------------------------------------------------------------------------------------------------


def spoil(worker: Any) -> None:
    with torch.no_grad():
        worker.model.x[1] = math.nan


@pytest.mark.slow
def test_no_other_worker_gets_a_nan(train):
    run = train(4, Fault(2, ROUND, "before start", spoil), survivors=(0, 1, 3), steps=150)
    run.check()
    assert ROUND not in run.rounds_mixed(3, 2)
    assert max(run.rounds_mixed(0, 2) + run.rounds_mixed(3, 2)) > ROUND + 50  # it has the values of another one
