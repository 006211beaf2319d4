"""Texts of all workers, gathered through the store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from decent_dp.checkpoint.agreement import StoreGather
from decent_dp.errors import PeerLostError, PeerTimeoutError
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import BrokenStore


def worker(rank: int, store: Any, lost: tuple[int, ...] = ()) -> StoreGather:
    transport: Any = SimpleNamespace(rank=rank, world_size=3, store=store, lost=lambda: list(lost))
    return StoreGather(transport, "question")


def test_all_workers_receive_all_texts_and_leave_nothing_behind():
    def work(transport: InProcessTransport) -> Any:
        found = []
        for t in range(20):
            gather = StoreGather(transport, f"question/{t}")
            time.sleep(0.01 * (transport.rank == t % 3))
            gather.put(f"größer {transport.rank}")
            found.append(gather.wait(10, "a", "b"))
            transport.control.gather(None)
            gather.clear()
        transport.control.gather(None)
        return found, transport.store.num_keys()

    for found, keys in run_replicas(3, work, 20):
        assert found == [{0: "größer 0", 1: "größer 1", 2: "größer 2"}] * 20
        assert keys == 0


@pytest.mark.parametrize(
    ("lost", "kind", "text"),
    [
        ((), PeerTimeoutError, "workers 1, 2 did not answer"),
        ((1,), PeerLostError, "lost worker 1 before all had answered."),
        ((1, 2), PeerLostError, "lost workers 1, 2 before all had answered."),
    ],
)
def test_missing_workers_are_named(lost, kind, text):
    gather, began = worker(0, dist.HashStore(), lost), time.monotonic()  # type: ignore[attr-defined]
    gather.put("x")
    with pytest.raises(kind) as caught:
        gather.wait(2.0, before="all had answered", late="did not answer")
    assert str(caught.value) == text
    assert (time.monotonic() - began < 1.9) == bool(lost)


def test_a_worker_that_is_gone_after_its_text_was_stored_is_not_missing():
    """Also one that died before it was counted."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    first, second = worker(0, store, lost=(1,)), worker(2, store)
    store.set("question/1", "b")
    threading.Timer(0.2, lambda: second.put("c")).start()
    first.put("a")
    assert first.wait(10, "", "") == {0: "a", 1: "b", 2: "c"}
    assert second.wait(0.1, "", "") == {0: "a", 1: "b", 2: "c"}  # late


def test_a_wait_ends_when_it_is_cancelled_or_the_store_is_gone():
    gather, cancelled = worker(0, dist.HashStore()), threading.Event()  # type: ignore[attr-defined]
    gather.put("a")
    threading.Timer(0.1, cancelled.set).start()
    assert gather.wait(10, "", "", cancelled) is None
    broken: Any = BrokenStore()
    for call in (lambda: worker(0, broken).put("a"), lambda: worker(0, broken).wait(10, "", "")):
        with pytest.raises(ConnectionError, match=r"the store does not answer: connection was reset$"):
            call()
