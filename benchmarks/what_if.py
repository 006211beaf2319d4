"""What happens if: each fault that ``benchmarks.faults`` measures, and the rows of the page that its figures fill.

Faults of the network are those of the tests' proxy, ``tests.faulty_link``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

import decent_dp
from benchmarks.scenarios import ENDING, LEAD, VICTIM, Action, N, Scenario, Seen, Worker, figures, make, play
from decent_dp.checkpoint import saver
from decent_dp.errors import DisagreementError
from decent_dp.launch.local import store_on
from decent_dp.replica import transfer
from decent_dp.transport import ProcessGroupTransport
from decent_dp.transport.control_plane import Courier
from decent_dp.transport.store import server_of
from tests.faulty_link import FaultyLinks, RemoteLinks, around, ask, die, freeze
from tests.workers import Workers

# Bytes per second of a link before it becomes slow, and then.
FAST, SLOW = 1e7, 1e5

# -- what they do ----------------------------------------------------------------------------------------------------------


def come(worker: Worker, rank: int | None = VICTIM, **options: Any) -> None:
    """A new process joins the run, in the place of a worker or in addition."""
    os.environ.pop("RANK", None)
    address = server_of(worker.shared)
    assert address is not None
    worker.mark("joins")
    transport = decent_dp.join(f"{address[0]}:{address[1]}", rank=rank)
    faults = decent_dp.Tolerate(**options)
    worker.model, worker.optimizer, worker.replica = make(faults, transport=transport)


def come_misfit(worker: Worker) -> None:
    """A new process with another model."""
    address = server_of(worker.shared)
    assert address is not None
    transport = decent_dp.join(f"{address[0]}:{address[1]}", rank=VICTIM)
    with contextlib.suppress(DisagreementError):
        began = time.monotonic()
        make(decent_dp.Tolerate(), width=50, transport=transport)
    worker.seen.marks["refused"] = worker.at + time.monotonic() - began


def bring_store_back(worker: Worker) -> None:
    _server = store_on(port=int(worker.shared.get("port")))
    time.sleep(max(worker.until + 2 * ENDING - time.monotonic(), 0.0))


def suspend_all(worker: Worker, seconds: float) -> None:
    pids = [int(worker.shared.get(f"pid {rank}")) for rank in range(N)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            os.kill(pid, number)
        time.sleep(seconds if number == signal.SIGSTOP else 0.0)


def give_half_and_die(worker: Worker) -> None:
    """The first worker that is asked for its state dies after some chunks of it."""
    chunk, transfer._CHUNK = transfer.StateCopy.chunk, 1000

    def give(copy: transfer.StateCopy, begin: int) -> bytes:
        if begin > 3000 and worker.shared.add("donors", 1) == 1:
            die(worker)
        return chunk(copy, begin)

    transfer.StateCopy.chunk = give  # type: ignore[assignment, method-assign]


def leave(worker: Worker) -> None:
    worker.replica.close()
    worker.until = 0.0


def average(worker: Worker) -> None:
    """One worker dies when it sends its part."""
    if worker.rank == VICTIM:
        around(Courier, "put", before=lambda *_: die(worker))
    with worker.replica.averaged():
        worker.seen.value = [param.detach().clone().tolist() for param in worker.model.parameters()]
    worker.mark("returned")


def save(worker: Worker) -> None:
    """One worker dies before it writes its file."""
    if worker.rank == VICTIM:
        around(saver, "write_shard", before=lambda *_: die(worker))
    worker.saving = decent_dp.save(worker.replica, worker.folder)
    worker.mark("returned")


def die_while_building(worker: Worker) -> None:
    """One worker dies when all have agreed on their settings."""
    if worker.rank == VICTIM:
        around(ProcessGroupTransport, "tolerate", before=lambda *_: die(worker))


def spoil(worker: Worker) -> None:
    with torch.no_grad():
        next(iter(worker.model.parameters()))[0, 0] = float("nan")


def throttle(rate: float) -> Action:
    def act(worker: Worker) -> None:
        worker.links.throttle(0, 1, rate)
        worker.links.throttle(1, 0, rate)

    return act


def is_told(worker: Worker) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# -- the scenarios ---------------------------------------------------------------------------------------------------------

EVERY, LAST, FIRST = tuple(range(N)), (VICTIM,), (0,)
HOLE = "hole after {hole}; longest step {longest}; {lost} steps lost"
AGAIN = "mix again after {mixed}; longest step {longest}"
DIES = (LAST, 0.0, die)


def _link(row: str, text: str, *acts: tuple[Iterable[int], float, Action], **options: Any) -> Scenario:
    """A fault of the link between workers 0 and 1, who live."""
    return Scenario({row: text}, acts, **{"victims": (), "apart": ((0, 1),), "proxy": True, **options})


SCENARIOS = {
    "calm": Scenario({"longest step in 5 s without a fault": "{longest}"}, seconds=5.0, victims=()),
    # Workers that are gone, or silent.
    "kill": Scenario(
        {"a process is killed, or ends with an error": HOLE, "a worker stays away": "new topology after {planned}"},
        (DIES,),
        seconds=4.0,
    ),
    "freeze": Scenario(
        {
            "a process is frozen, or a machine cannot be reached": HOLE + "; new topology after {planned}",
            "it comes back, or the network recovers": "mixes {mixed} after it wakes",
        },
        ((LAST, 0.0, freeze(15.0)),),
        seconds=20.0,
        ends=15.0,
    ),
    "wakes in time": Scenario(
        {"it wakes, or the network recovers, before it counts as dead": "mixes {mixed} after it wakes"},
        ((LAST, 0.0, freeze(6.0)),),
        seconds=9.0,
        ends=6.0,
    ),
    "short freeze": Scenario(
        {"it was silent for less than `0.3 * dead_after`": "2 s: longest step {longest}; {left_out} exchanges left out"},
        ((LAST, 0.0, freeze(2.0)),),
        seconds=4.0,
    ),
    "late once": Scenario(
        {"a living worker is late once (it saves, or evaluates)": "3 s: longest step {longest}; {left_out} exchanges left out"},
        ((LAST, 0.0, lambda _: time.sleep(3.0)),),
        seconds=5.0,
    ),
    "nan": Scenario(
        {"a replica holds a NaN or an infinity": "finite after {healed}; {sick} other replicas with a NaN"},
        ((LAST, 0.0, spoil),),
    ),
    "close": Scenario(
        {"a worker has run out of batches": "`close()`: longest step {longest}; new topology after {planned}"},
        ((LAST, 0.0, leave),),
        seconds=4.0,
    ),
    "suspended": Scenario(
        {"all workers are suspended together (Slurm, a debugger, a laptop)": "12 s: {left_out} exchanges left out"},
        extra=((0.0, partial(suspend_all, seconds=12.0)),),
        victims=(),
        seconds=15.0,
        ends=12.0,
    ),
    "too few": Scenario(
        {"fewer than `min_workers` are left": "error after {error}"},
        (((1, 2, 3), 0.0, die),),
        victims=(1, 2, 3),
        errors=True,
    ),
    "alone": _link(
        "a worker has heard no other one for `orphan_for` seconds",
        "`orphan_for=5`, 20 s: longest step of the others {longest}; mixes {mixed} after it",
        (FIRST, 0.0, ask("partition", [3], [0, 1, 2])),
        (FIRST, 0.0, ask("heal", after=20.0)),
        faults={"orphan_for": 5.0},
        victims=LAST,
        apart=(),
        seconds=26.0,
        ends=20.0,
    ),
    # Links.
    "cut": _link("a connection breaks while both ends live", AGAIN, (FIRST, 0.0, ask("cut", 0, 1))),
    "half-open": _link(
        "a connection ends for one side only (half-open)", AGAIN, (FIRST, 0.0, ask("half_open", 0, 1)), seconds=6.0
    ),
    "one way": _link("only one direction of a link works", HOLE, (FIRST, 0.0, ask("blackhole", 0, 1)), seconds=6.0),
    "damage": _link("a message is damaged on the way", AGAIN, (FIRST, 0.0, ask("flip", 0, 1, 300, 308))),
    "slow link": _link(
        "one link becomes much slower than it was",
        "100 times slower: longest step {longest}; the pair skips {skipped} % of its exchanges",
        (FIRST, 0.5 - LEAD, throttle(FAST)),
        (FIRST, 0.0, throttle(SLOW)),
        seconds=8.0,
    ),
    "halves": _link(
        "the network falls into parts",
        "halves, 20 s: " + HOLE + "; mix again {mixed} after it",
        (FIRST, 0.0, ask("partition", [0, 1], [2, 3])),
        (FIRST, 0.0, ask("heal", after=20.0)),
        apart=((0, 2), (1, 3)),
        seconds=26.0,
        ends=20.0,
    ),
    # Calls of all workers.
    "average later": Scenario(
        {
            "`averaged()`, `consensus_distance()`, `average_()`, `flush()`, `calibrate()` or `export()` after a death": (
                "`averaged()` returns after {returned}, with the same mean on all"
            )
        },
        (DIES, (EVERY, 1.0, average)),
        ends=1.0,
    ),
    "average": Scenario(
        {"a worker dies in such a call": "`averaged()` returns after {returned}, with the same mean on all"},
        ((EVERY, 0.0, average),),
    ),
    "save later": Scenario(
        {"`save()` after a death": "returns after {returned}; complete after {saved}"}, (DIES, (EVERY, 1.0, save)), ends=1.0
    ),
    "save": Scenario(
        {"a worker dies in `save()`": "returns after {returned}; error known after {failed}; longest step {longest}"},
        ((EVERY, 0.0, save),),
    ),
    "preemption": Scenario(
        {
            "a signal stops the run (`Preemption`) after a death, or a worker dies meanwhile": (
                "all have stopped {stopped} after the signal"
            )
        },
        (DIES, ((1,), 1.0, is_told)),
        ends=1.0,
        seconds=6.0,
        preempts=True,
    ),
    "building": Scenario(
        {"a worker dies during construction": "after the agreement: the others are built after {built}"},
        building=die_while_building,
        seconds=1.0,
    ),
    # New processes, and the store.
    "new process": Scenario(
        {"a new process comes in its place": ("mixes {joined} after `join()`; longest step of the others {longest}")},
        (DIES,),
        extra=((0.5, come),),
        seconds=6.0,
    ),
    "donor": Scenario(
        {
            "that process, or the worker that sends it its state, dies on the way": (
                "the sender: mixes {joined} after `join()`; longest step of the others {longest}"
            )
        },
        ((EVERY, -0.5, give_half_and_die), DIES),
        extra=((0.5, come),),
        seconds=9.0,
    ),
    "replaced": Scenario(
        {"the process that was replaced wakes up": "error {error} after it wakes"},
        ((LAST, 0.0, freeze(17.0)),),
        extra=((12.5, come),),
        seconds=19.0,
        ends=17.0,
        errors=True,
    ),
    "two leave": Scenario(
        {
            "four workers leave, and eight come": (
                "two of four leave, four come: all mix {joined} after `join()`; longest step of the others {longest}"
            )
        },
        (((2, 3), 0.0, die),),
        victims=(2, 3),
        extra=((0.5, partial(come, rank=None, max_workers=6)),) * 4,
        faults={"max_workers": 6},
        seconds=8.0,
    ),
    "misfit": Scenario(
        {"a new process has another model, or other settings": "error after {refused}; longest step of the others {longest}"},
        (DIES,),
        extra=((1.0, come_misfit),),
    ),
    "store": Scenario(
        {
            "the store's host dies": (
                "longest step {longest}; {lost} steps lost; a change of members {planned_later} after the store is back"
            )
        },
        ((LAST, 2.0, die),),
        extra=((0.0, die), (6.0, bring_store_back)),
        store=True,
        seconds=11.0,
        ends=6.0,
    ),
}


# -- running them ----------------------------------------------------------------------------------------------------------


def work(rank: int, n: int, name: str, links: RemoteLinks, folder: str) -> tuple[float, Seen]:
    return play(SCENARIOS[name], rank, n, links, folder)


def run(workers: Workers, name: str) -> dict[str, float | int | None]:
    """The figures of a scenario."""
    scenario = SCENARIOS[name]
    n = N + len(scenario.extra)
    with tempfile.TemporaryDirectory() as folder, FaultyLinks(n) as links:
        outcomes = workers.outcomes(n, work, name, links.remote, folder)
    if bool(links.carried) != scenario.proxy:
        raise RuntimeError(f"{name}: connections must go through the proxy where it makes the fault, and only there")
    for rank, outcome in enumerate(outcomes):
        if outcome.error and outcome.exitcode != -signal.SIGKILL:
            raise RuntimeError(f"{name}: worker {rank} ended with {outcome.error}: {outcome.trace}")
    seen = {rank: outcome.value[1] for rank, outcome in enumerate(outcomes) if outcome.value is not None}
    found = figures(scenario, next(outcome.value[0] for outcome in outcomes if outcome.value is not None), seen)
    if (found["values"] or 0) > 1:
        raise RuntimeError(f"{name}: the workers have different means, or have stopped after different rounds")
    return found
