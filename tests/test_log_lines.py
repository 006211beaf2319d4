"""What happens again and again is said once, and then ever more rarely, with its number."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from typing import Any

import decent_dp
from decent_dp.transport.waiter import Repeats
from tests.faulty_link import FaultyLinks, RemoteLinks, connect_through
from tests.helpers import Heard, assert_same, values
from tests.members import make, step


def test_lines_double_and_begin_anew_after_a_minute():
    now = [0.0]
    repeats = Repeats(2, clock=lambda: now[0])

    def lines(times: int) -> list[int]:
        found = []
        for _ in range(times):
            now[0] += 1.0
            if repeats.again():
                found.append(repeats.times)
        return found

    assert lines(20) == [2, 4, 8, 16]
    assert repeats.seconds == 19.0
    now[0] += 61.0
    assert lines(3) == [2]


def has_a_bad_link(rank: int, n: int, links: RemoteLinks) -> Any:
    connect_through(links, rank)
    log = Heard(logging.INFO)
    model, optimizer, replica = make(rank)
    for t in range(150):
        if rank == 0 and t % 5 == 0 and t < 100:
            if t % 10:
                links.cut(0, 1)
            else:
                links.flip(0, 1, 30, 40)
        time.sleep(0.01)
        step(model, optimizer, t, rank)
    with replica.averaged():
        mean = values(model)
    stats = replica.stats()
    replica.close()
    return mean, stats, log.lines


def test_a_link_that_breaks_often_is_counted_and_said(workers):
    with FaultyLinks(2) as links:
        found = workers(2, has_a_bad_link, links.remote, timeout=90)
    assert_same(found[0][0], found[1][0])
    for mean, stats, lines in found:
        del mean
        assert stats.reconnects >= 10, stats
        assert stats.exchanges > 50, stats
        warnings = [line for level, line in lines if level >= logging.WARNING and "has broken" in line]
        assert [re.findall("has broken ([0-9]+) times", line) for line in warnings[:2]] == [["4"], ["8"]], lines
        assert len(lines) <= 12, lines


def has_no_store(rank: int, n: int) -> Any:
    """While another epoch is wanted."""
    log = Heard(logging.INFO)
    model, optimizer, replica = make(rank, topology="ring", faults=decent_dp.Tolerate(dead_after=1.0))

    def run(*_: Any) -> None:
        raise ConnectionError("a test")

    replica.monitor.epochs.keeper._store._store.run = run
    for t in range(300):
        if (rank, t) == (2, 10):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        step(model, optimizer, t, rank)
    replica.close()
    return replica.roster.epoch, log.lines


def test_an_epoch_that_is_wanted_for_long_fills_no_log(workers):
    outcomes = workers.outcomes(3, has_no_store, timeout=90)
    for outcome in outcomes[:2]:
        assert outcome.trace == ""
        epoch, lines = outcome.value
        assert epoch == 0
        assert sum("the members cannot change until the store answers" in line for _, line in lines) == 1
        assert len(lines) <= 5, lines
