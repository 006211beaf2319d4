"""Four workers, one fault, and what the others see of it. ``benchmarks.what_if`` says which faults.

The workers are processes of this machine with base-2 and steps of 10 ms. A fault happens at the same second for all; each
worker keeps what it has seen (``Seen``), and ``figures`` are computed from that.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import decent_dp
from decent_dp.engine import Bucket, Engine
from decent_dp.errors import PeerLostError
from decent_dp.launch.local import store_on
from tests.faulty_link import RemoteLinks, around, connect_through

N, VICTIM = 4, 3
PACE = 0.01
# Seconds of training before the fault, and those at the end in which a step may wait for a worker that has ended.
LEAD, ENDING = 1.0, 0.5


@dataclass
class Seen:
    """What a worker has seen, in seconds on the monotonic clock, which is the same for all processes.

    Attributes:
        steps: when each step began and ended.
        mixed: when an exchange was mixed in, with whom, and when it was started.
        holes: from when on which workers are holes.
        rosters: from when on which workers are members.
        lost: optimizer steps that were called and not taken.
        left_out: exchanges that were left out, since the fault.
        marks: when something happened that only this scenario has.
        value: what must be the same on all.
        sick: after which steps its replica was not finite.
    """

    steps: list[tuple[float, float]] = field(default_factory=list)
    mixed: list[tuple[float, int, float]] = field(default_factory=list)
    holes: list[tuple[float, frozenset[int]]] = field(default_factory=list)
    rosters: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    lost: int = 0
    left_out: int = 0
    marks: dict[str, float] = field(default_factory=dict)
    value: Any = None
    sick: list[float] = field(default_factory=list)


@dataclass
class Worker:
    """A process in a scenario. ``at``: when the fault happens; ``until``: when training ends."""

    rank: int
    links: RemoteLinks
    folder: str
    shared: Any
    seen: Seen = field(default_factory=Seen)
    at: float = 0.0
    until: float = 0.0
    model: Any = None
    optimizer: Any = None
    replica: Any = None
    saving: Any = None

    def mark(self, what: str) -> None:
        self.seen.marks.setdefault(what, time.monotonic())


Action = Callable[[Worker], None]


@dataclass(frozen=True)
class Scenario:
    """What happens, and the rows of the page that its figures fill.

    Attributes:
        rows: for each row, named by its first cell, the last one as a format of the figures.
        acts: who does what between two steps, so many seconds after the fault.
        seconds: for which all train, from the fault on.
        ends: seconds from the fault until it is over.
        victims: workers that are none of "the others".
        apart: pairs that are cut; else each victim from each other worker.
        extra: for each further process, when it starts, after the fault, and what it does before it trains.
        proxy: whether connections lead through the proxy.
        store: whether the store is a process of its own, the first of ``extra``.
        preempts: whether the loop is in ``Preemption``.
        faults: arguments of ``Tolerate``.
        errors: whether a worker may end with an error.
        building: called before the replica is made; "built" is then marked, as the seconds that this takes.
    """

    rows: dict[str, str]
    acts: tuple[tuple[Iterable[int], float, Action], ...] = ()
    seconds: float = 3.0
    ends: float = 0.0
    victims: tuple[int, ...] = (VICTIM,)
    apart: tuple[tuple[int, int], ...] = ()
    extra: tuple[tuple[float, Action], ...] = ()
    proxy: bool = False
    store: bool = False
    preempts: bool = False
    faults: dict[str, Any] = field(default_factory=dict)
    errors: bool = False
    building: Action | None = None


# -- workers ---------------------------------------------------------------------------------------------------------------


def make(faults: decent_dp.Tolerate | None, width: int = 100, **options: Any) -> tuple[Any, Any, Any]:
    """(model, optimizer, replica)"""
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return model, optimizer, decent_dp.gossip(model, optimizer, faults=faults, **options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, pace: float) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    time.sleep(pace)
    optimizer.step()


def play(scenario: Scenario, rank: int, n: int, links: RemoteLinks, folder: str) -> tuple[float, Seen]:
    """A process of a scenario; returns when the fault was, and what it has seen."""
    shared = dist.distributed_c10d._get_default_store()
    worker = Worker(rank, links, folder, shared)
    if scenario.proxy:
        connect_through(links, rank)
    note_exchanges(worker.seen)
    group = dist.new_group(range(N)) if n > N else None
    if scenario.store:
        group, _server = None, meet_elsewhere(worker)
    if rank < N:
        if scenario.building is not None:
            scenario.building(worker)
        began, faults = time.monotonic(), decent_dp.Tolerate(**scenario.faults)
        worker.model, worker.optimizer, worker.replica = make(faults, process_group=group)
        seconds = time.monotonic() - began
        shared.set(f"pid {rank}", str(os.getpid()))
        if rank == 0:
            shared.set("at", str(time.monotonic() + LEAD))
    worker.at = float(shared.get("at"))
    worker.until = worker.at + scenario.seconds
    if rank < N and scenario.building is not None:
        worker.seen.marks["built"] = worker.at + seconds
    if rank >= N:
        after, does = scenario.extra[rank - N]
        time.sleep(max(worker.at + after - time.monotonic(), 0.0))
        does(worker)
    if worker.replica is not None:
        train(worker, scenario)
    return worker.at, worker.seen


def train(worker: Worker, scenario: Scenario) -> None:
    seen, replica = worker.seen, worker.replica
    acts = [(worker.at + after, act) for who, after, act in scenario.acts if worker.rank in who]
    replica.on_roster(lambda _, new: seen.rosters.append((time.monotonic(), new.members)))
    before = replica.stats().updates
    if worker.rank < N:
        acts.insert(0, (worker.at, count_holes))
    acts.sort(key=lambda entry: entry[0])
    signals = decent_dp.Preemption(replica, grace=10.0) if scenario.preempts else contextlib.nullcontext()
    with contextlib.suppress(*([PeerLostError] if scenario.errors else [])), _marked(worker), signals as stop:
        while time.monotonic() < worker.until:
            if acts and time.monotonic() >= acts[0][0]:
                acts.pop(0)[1](worker)
                continue
            began = time.monotonic()
            step(worker.model, worker.optimizer, PACE)
            seen.steps.append((began, time.monotonic()))
            note(worker)
            if stop is not None and stop.due:
                worker.mark("stopped")
                seen.value = replica.stats().rounds
                break
    stats = replica.stats()
    seen.lost, seen.left_out = len(seen.steps) - (stats.updates - before), stats.holes - seen.left_out
    time.sleep(ENDING)  # who leaves early would be missed by the others
    replica.close()


@contextlib.contextmanager
def _marked(worker: Worker) -> Iterator[None]:
    try:
        yield
    except PeerLostError:
        worker.mark("error")
        raise


def count_holes(worker: Worker) -> None:
    worker.seen.left_out = worker.replica.stats().holes


def note_exchanges(seen: Seen) -> None:
    """Has the engine of this process tell which exchanges it mixes, and when they were started."""
    started: dict[int, float] = {}

    def start(engine: Any, *_: Any) -> None:
        started[engine.round] = time.monotonic()

    def mix(_: Any, in_flight: Any, *__: Any) -> None:
        now, number = time.monotonic(), in_flight.round.number
        seen.mixed += [(now, peer, started.get(number, now)) for peer in in_flight.edge.ranks]

    around(Engine, "start", before=start)
    around(Bucket, "mix", after=mix)


def note(worker: Worker) -> None:
    """After a step: who is a hole, and whether the replica is finite."""
    seen, now, roster = worker.seen, time.monotonic(), worker.replica.roster
    holes = frozenset(roster.members[seat] for seat in roster.holes)
    if not seen.holes or seen.holes[-1][1] != holes:
        seen.holes.append((now, holes))
    if not all(bool(param.isfinite().all()) for param in worker.model.parameters()):
        seen.sick.append(now)
    elif seen.sick:
        worker.mark("healed")
    if worker.saving is not None and worker.saving.done:
        worker.mark("failed" if worker.saving.error else "saved")


def meet_elsewhere(worker: Worker) -> Any:
    """The workers' process group is one with another store, which the first further process keeps. Returns its server."""
    if worker.rank == N:
        server = store_on()
        worker.shared.set("port", str(server.port))
        return server
    if worker.rank < N:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", int(worker.shared.get("port")), is_master=False
        )
        dist.destroy_process_group()
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=worker.rank, world_size=N, timeout=limit)
    return None


# -- figures ---------------------------------------------------------------------------------------------------------------


def figures(scenario: Scenario, at: float, seen: Mapping[int, Seen]) -> dict[str, float | int | None]:
    """What the others have seen: seconds are floats, and None if it has not come to that.

    - hole, planned: from the fault until the first has a hole where it is cut, and until all have planned without the victims;
    - returns: the same, from the fault's end, until all have them back;
    - mixed: from the fault's end until each pair that is cut, and had mixed before, has mixed an exchange that began after it;
    - longest, lost, left_out: the longest step, the optimizer steps that are lost, and exchanges that are left out;
    - skipped: exchanges that are left out, in per cent of those and of the ones that the pairs mix;
    - sick, values: how many have a NaN, and how many values they have, such as means;
    - joined: from a new process's call of ``join`` to its first exchange with one of the others;
    - and all marks, from the fault's end.
    """
    others = {rank: one for rank, one in seen.items() if rank < N and rank not in scenario.victims}
    apart = set(scenario.apart or ((rank, victim) for rank in others for victim in scenario.victims))
    apart |= {(b, a) for a, b in apart}
    end, until, victims = at + scenario.ends, at + scenario.seconds, set(scenario.victims)
    holes, planned, returns, mixed, longest = [], [], [], [], [0.0]
    for rank, one in others.items():
        holes += [when for when, who in one.holes if when >= at and any((rank, peer) in apart for peer in who)]
        planned.append(_first(when for when, members in one.rosters if when >= at and not victims & set(members)))
        returns.append(_first(when for when, members in one.rosters if when >= end and victims <= set(members)))
        mixed += [
            _first(when for when, peer, began in one.mixed if peer == other and began >= end)
            for _, other in (pair for pair in apart if pair[0] == rank)
            if any(peer == other and when < at for when, peer, _ in one.mixed)
        ]
        longest += [ended - began for began, ended in one.steps if ended > at and began < until - ENDING]
    left_out = sum(one.left_out for one in others.values())
    met = [when for rank, one in others.items() for when, peer, _ in one.mixed if when >= at and (rank, peer) in apart]
    found: dict[str, float | int | None] = {
        "hole": _since(at, min(holes, default=None)),
        "planned": _since(at, _last(planned)),
        "planned_later": _since(end, _last(planned)),
        "returns": _since(end, _last(returns)),
        "mixed": _since(end, _last(mixed)),
        "longest": max(longest),
        "lost": sum(one.lost for one in others.values()),
        "left_out": left_out,
        "skipped": round(100 * left_out / max(left_out + len(met), 1)),
        "sick": sum(bool(one.sick) for one in others.values()),
        "values": len({str(one.value) for one in others.values() if one.value is not None}),
    }
    came = [
        _since(one.marks["joins"], _first(when for when, peer, _ in one.mixed if peer in others))
        for one in seen.values()
        if "joins" in one.marks
    ]
    found["joined"] = _last(came)
    for name in {name for one in seen.values() for name in one.marks} - {"joins"}:
        found[name] = _since(end, max(one.marks[name] for one in seen.values() if name in one.marks))
    return found


def _first(times: Iterable[float]) -> float | None:
    return min(times, default=None)


def _last(times: Iterable[float | None]) -> float | None:
    """The last one; None if there is none, or one that is not known."""
    known = list(times)
    return max((time for time in known if time is not None), default=None) if None not in known else None


def _since(begin: float, end: float | None) -> float | None:
    return None if end is None else end - begin


def say(found: Mapping[str, float | int | None]) -> dict[str, str]:
    """The figures, as text."""
    said = {}
    for name, value in found.items():
        in_seconds = isinstance(value, float) and (f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s")
        said[name] = in_seconds or ("never" if value is None else str(value))
    return said
