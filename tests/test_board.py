"""Words that workers leave for each other, what a run is called, and who is gone: one contract for every transport."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from decent_dp.topo import Edge
from decent_dp.transport import InProcessTransport, ProcessGroupTransport, Transport, run_replicas
from decent_dp.transport.communicators import StoreBoard

pytestmark = pytest.mark.timeout(60)


def contract(transport: Transport, other: Transport) -> tuple[str, str]:
    """``other`` is a second wrapper's of the same workers."""
    rank, n, board = transport.rank, transport.world_size, transport.board
    assert board.read("nothing") is None
    board.post(f"word/{rank}", f"größer\n{rank}")
    board.post("empty", "")
    transport.control.gather(None)
    assert [board.read(f"word/{r}") for r in range(n)] == [f"größer\n{r}" for r in range(n)]
    assert board.read("empty") == ""
    assert other.board.read(f"word/{rank}") is None  # of another wrapper
    transport.control.gather(None)
    board.post(f"word/{rank}", "new")
    assert board.read(f"word/{rank}") == "new"

    counted: list[int] = []
    lock = threading.Lock()

    def count() -> None:
        for _ in range(20):
            found = board.count("arrivals")
            with lock:
                counted.append(found)

    threads = [threading.Thread(target=count) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    every = sorted(number for part in transport.control.gather(counted) for number in part)
    assert every == list(range(1, 60 * n + 1))

    assert transport.timeout > 0
    assert transport.lost() == []
    transport.control.gather(None)  # nobody leaves before all have looked
    return transport.run_id, other.run_id


def between_processes(rank: int, n: int) -> tuple[str, str]:
    first, second = ProcessGroupTransport(), ProcessGroupTransport()
    assert first.timeout == 20.0  # the process group's
    found = contract(first, second)
    first.close()
    second.close()
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_contract_between_processes(workers, n):
    names = workers(n, between_processes)
    assert len(set(names)) == 1
    assert names[0][0] != names[0][1]


@pytest.mark.parametrize("n", [1, 3])
def test_contract_in_process(n):
    def work(transport: InProcessTransport) -> tuple[str, str]:
        return contract(transport, transport._hub.transport(transport.rank))

    names = run_replicas(n, work, timeout=20)
    assert len(set(names)) == 1
    assert names[0][0] != names[0][1]


def test_words_and_counts_do_not_meet():
    board = StoreBoard(dist.HashStore())
    assert [board.count("a"), board.count("a"), board.count("b")] == [1, 2, 1]
    assert board.read("a") is None
    board.post("a", "text")
    assert board.count("a") == 3
    assert board.read("a") == "text"


class BrokenStore:
    """A store whose keeper is gone."""

    asked = 0

    def set(self, *_: Any) -> None:
        self.asked += 1
        raise RuntimeError("connection was reset")

    check = get = add = set


def test_a_store_that_does_not_answer_is_asked_once():
    store: Any = BrokenStore()
    board = StoreBoard(store)
    for call in (lambda: board.read("a"), lambda: board.post("a", ""), lambda: board.count("a")):
        with pytest.raises(ConnectionError, match="store does not answer"):
            call()
    assert store.asked == 1


def one_is_killed(rank: int, n: int) -> list[int]:
    transport = ProcessGroupTransport()
    transport.prepare([Edge([0, 1, 2], 1 / 3)])
    transport.control.gather(None)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 10
    while not transport.lost() and time.monotonic() < deadline:
        time.sleep(0.01)
    found = transport.lost()
    transport.board.post(f"seen/{rank}", "")  # whoever leaves first would be lost to the other
    while transport.board.read(f"seen/{2 - rank}") is None and time.monotonic() < deadline:
        time.sleep(0.01)
    transport.close()
    return found


def test_who_was_killed_is_known_to_be_gone(workers):
    outcomes = workers.outcomes(3, one_is_killed)
    assert [outcome.value for outcome in outcomes] == [[1], None, [1]]


def test_a_thread_that_has_left_is_known_to_be_gone():
    def work(transport: InProcessTransport) -> list[int]:
        if transport.rank == 1:
            return []
        deadline = time.monotonic() + 5
        while not transport.lost() and time.monotonic() < deadline:
            time.sleep(0.01)
        return transport.lost()

    assert run_replicas(2, work, timeout=10) == [[1], []]
