"""Workers that tolerate faults, for several test files: how they train, die, join and end."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import decent_dp
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.transport.store import server_of
from tests.helpers import SGD, loss, net
from tests.workers import Outcome, hear, say

DEAD_AFTER = 4.0
# The workers that begin a run, and the one that dies.
N, VICTIM = 4, 2
PAUSE = 0.02


def make(rank: int, kind: str = "gossip", seed: int = 0, **options: Any) -> tuple[Any, Any, Any]:
    """(model, what steps it, its replica)"""
    options = {"faults": decent_dp.Tolerate(dead_after=DEAD_AFTER), "topology": "base-2", **options}
    model = net(seed)
    if kind == "wrapper":
        wrapped = DecentralizedDataParallel(model, SGD, **options)
        return wrapped, None, wrapped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, decent_dp.gossip(model, optimizer, **options)


def step(model: Any, optimizer: Any, t: int, rank: int) -> None:
    loss(model, t, rank).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def train(model: Any, optimizer: Any, rank: int, done: Callable[[], bool]) -> float:
    """Steps until ``done``, which is at an equal number of rounds, or soon. Returns the seconds of the longest step."""
    t, longest, deadline = 0, 0.0, time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(PAUSE)
        began = time.monotonic()
        step(model, optimizer, t, rank)
        longest = max(longest, time.monotonic() - began)
        t += 1
    return longest


def end(replica: Any) -> None:
    """All leave together."""
    with replica.averaged():
        pass
    replica.close()


# -- deaths ----------------------------------------------------------------------------------------------------------------


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: float) -> None:
    """This process is stopped for so long."""
    wakes = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    wakes.wait()


def die_in(holder: Any, name: str, *, after: bool = False, when: Callable[..., bool] = lambda *_: True) -> None:
    """This process dies at the beginning, or the end, of the first call of a method that ``when`` accepts."""
    method = getattr(holder, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        dies = when(*args)
        if dies and not after:
            die()
        result = method(*args, **kwargs)
        if dies:
            die()
        return result

    setattr(holder, name, call)


def is_of(kind: str) -> Callable[..., bool]:
    """Whether an agreement is of this kind."""
    return lambda _, name, *texts: name.startswith(kind)


def survivors(outcomes: Sequence[Outcome], victim: int = VICTIM) -> list[Any]:
    """What the others have returned; ``victim``: -1 if none dies."""
    assert victim < 0 or outcomes[victim].exitcode == -signal.SIGKILL
    for rank, outcome in enumerate(outcomes):
        assert rank == victim or outcome.error == "", f"worker {rank}: {outcome.trace}"
    return [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]


def kill_one(model: Any, optimizer: Any, replica: Any, rank: int) -> None:
    """Worker 2 of the first four dies after some rounds."""
    train(model, optimizer, rank, lambda: replica.stats().rounds >= 20)
    if dist.get_rank() == VICTIM:
        say("dead")
        die()


# -- processes that join ---------------------------------------------------------------------------------------------------


def the_store() -> str:
    server = server_of(dist.distributed_c10d._get_default_store())
    assert server is not None
    return f"{server[0]}:{server[1]}"


def begin(rank: int, kind: str = "gossip", when: str = "dead", **options: Any) -> tuple[Any, Any, Any, int]:
    """The first four processes of a launch are workers. Each other one joins, as worker 2, when it hears ``when``."""
    group = dist.new_group(range(N))
    if rank < N:
        return (*make(rank, kind, process_group=group, **options), rank)
    hear(when)
    return (*make(VICTIM, kind, seed=17, transport=decent_dp.join(the_store(), rank=VICTIM), **options), VICTIM)


def is_whole(replica: Any) -> bool:
    """Whether another process is worker 2 in the present round, and all are connected to it."""
    return has_begun(replica) and replica.roster.members == tuple(range(N)) and is_connected(replica)


def is_connected(replica: Any) -> bool:
    """To the members that have joined, to all if this one has, and to its partners. Others need no connection: of four that
    began the run, workers 0 and 3 never meet in 'base-2'."""
    inner = getattr(replica, "replica", replica)
    own, newest = inner.world.rank, inner.monitor.epochs.newest
    start = max(replica.stats().rounds, newest.start)
    needed = {rank for t in range(start, start + 32) for rank in inner.engine.topology.get_edge(t).ranks}
    needed |= set(newest.members if own in newest.incarnations else newest.incarnations) & set(newest.members)
    return needed <= {own, *inner.world.table.living()}


def has_begun(replica: Any) -> bool:
    """Whether rounds of the newest epoch have been made. A process that joins takes part in calls from then on."""
    return bool(replica.roster.epoch > 0 and replica.stats().rounds > replica.roster.start)
