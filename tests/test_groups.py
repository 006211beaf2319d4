"""What a group holds in memory while it waits for its slowest member, and what happens to what waits behind it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from decent_dp.errors import PeerLostError
from decent_dp.topo import Edge
from decent_dp.transport import Label, ProcessGroupTransport
from decent_dp.transport.linked import _ROOM
from decent_dp.wire.base import _RUN_ON_CPU
from tests.helpers import came, parcel

MIB = 2**20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_is_late(rank: int, n: int, numel: int) -> tuple[int, float]:
    """The last worker starts when the others have sent all that they can; how much memory that took, and the mean."""
    transport = ProcessGroupTransport()
    transport.prepare([Edge(list(range(n)), 1 / n)])
    own = parcel(torch.full((numel,), float(rank)), rank, Label(0, 0))
    transport.control.gather(None)
    time.sleep(0.5)
    before = resident()
    if rank == n - 1:
        time.sleep(1.5)
    handle = transport.exchange.start(Edge(list(range(n)), 1 / n), own)
    time.sleep(1)
    grown = resident() - before
    handle.wait()
    mean = came(own)
    assert mean.min() == mean.max()
    transport.close()
    return grown, float(mean[0])


def test_who_waits_for_a_late_worker_does_not_hold_all_that_the_others_sent(workers):
    n, numel = 5, 12 * MIB
    found = workers(n, one_is_late, numel)
    assert [mean for _, mean in found] == [2.0] * n
    for grown, _ in found[:-1]:
        # Without a bound: for a fifth of the pieces two messages beside the one that lies in `received`.
        assert grown < _ROOM + 5 * MIB < 2 / 5 * 4 * numel, [grown / MIB for grown, _ in found]


def one_dies(rank: int, n: int, buckets: int) -> list[tuple[str, str]] | None:
    """Groups of one piece have one root, worker 0: only some of them fit into its memory at a time."""
    transport = ProcessGroupTransport()
    edge = Edge(list(range(n)), 1 / n)
    transport.prepare([edge])
    transport.control.gather(None)
    handles = [
        transport.exchange.start(edge, parcel(torch.ones(_RUN_ON_CPU), rank, Label(0, bucket)))
        for bucket in range(0 if rank == n - 1 else buckets)
    ]
    time.sleep(0.5)
    if rank == n - 1:
        os._exit(3)
    found = []
    for handle in handles:
        try:
            handle.wait()
        except PeerLostError as error:
            found.append(str(error))
    transport.close()
    return found


def test_what_waits_for_memory_hears_of_a_lost_worker(workers):
    buckets = 40
    assert 4 * (2 * _RUN_ON_CPU) * buckets > 2 * _ROOM
    outcomes = workers.outcomes(4, one_dies, buckets, group_timeout=25)
    value: Any = outcomes[0].value
    assert not outcomes[0].error, outcomes[0].trace
    assert outcomes[0].seconds < 10
    assert len(value) == buckets
    assert all(message.startswith("worker 3 is gone") for message in value), value
