"""Blocks between the workers of a collective: their order, and what comes before its collective."""

from __future__ import annotations

import threading

import pytest

from decent_dp.transport.control_plane import Courier
from decent_dp.transport.messages import ACK, BLOCKS, Key


@pytest.fixture
def courier():
    sent: list[tuple[int, Key, bytes]] = []
    made = Courier(lambda peer, key, block: sent.append((peer, key, block)))
    return made, sent


def test_a_block_that_comes_while_earlier_ones_are_taken_waits_for_them(courier, monkeypatch):
    made, sent = courier
    made.hear(1, (7, BLOCKS, 0), b"first")  # this worker is not in collective 7 yet
    hear, threads = Courier.hear, []

    def hear_after_the_next(self: Courier, *args: object) -> None:
        if not threads:
            threads.append(threading.Thread(target=hear, args=(self, 1, (7, BLOCKS, 1), b"second")))
            threads[0].start()
            threads[0].join(0.2)
        hear(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Courier, "hear", hear_after_the_next)
    made.begin(7)
    threads[0].join(5)
    assert [made.get(1, lambda peer: pytest.fail(f"worker {peer}'s block was dropped")) for _ in range(2)] == [
        b"first",
        b"second",
    ]
    assert sent[-1] == (1, (7, ACK, 2), b"")


def test_blocks_of_a_collective_that_was_given_up_are_dropped(courier):
    made, sent = courier
    for number, block in ((7, b"old"), (8, b"new")):
        made.hear(1, (number, BLOCKS, 0), block)
    made.begin(8)
    assert made.get(1, pytest.fail) == b"new"
    assert sent == [(1, (8, ACK, 1), b"")]
