"""Exchanges over links when workers are slow, late, or leave: how long is waited, for whom, and what is sent."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from decent_dp.compression import Int8, Lossless, MessageId
from decent_dp.compression.blockwise import _BLOCK_ON_CPU
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import PeerTimeoutError
from decent_dp.replica.lifecycle import shut_down
from decent_dp.topo import Edge
from decent_dp.transport import (
    ExchangeId,
    InProcessTransport,
    ProcessGroupTransport,
    groups,
    handles,
    process_group,
    run_replicas,
)
from tests.helpers import SGD, came, loss, net, request
from tests.wires import make_links
from tests.workers import shorten


class Slow(Lossless):
    """Codes a piece in a third of a second."""

    def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
        for ready in super().encode(values, out, message_id, hints):
            time.sleep(0.5)
            yield ready


def slow_but_moving(rank: int, n: int) -> float:
    transport, edge = ProcessGroupTransport(), Edge([0, 1], 0.5)
    transport.prepare([edge])
    transport.control.gather(None)
    shorten(transport, 3.0)
    own = request(torch.full((9 * _BLOCK_ON_CPU,), float(rank)), rank, ExchangeId(0, 0), Slow if rank else Lossless)
    began = time.monotonic()
    transport.start(edge, own).wait()
    seconds = time.monotonic() - began
    assert (came(own) == 1 - rank).all()
    transport.close()
    return seconds


@pytest.mark.slow
def test_a_message_that_takes_longer_than_the_timeout_arrives_if_it_moves(workers):
    assert workers(2, slow_but_moving)[0] > 4


def silent_for_all_buckets(rank: int, n: int) -> Any:
    transport, edge = ProcessGroupTransport(), Edge(list(range(n)), 1 / n)
    transport.prepare([edge])
    transport.control.gather(None)
    shorten(transport, 2.0)
    if n == 3 and rank < n - 1:  # without a hint of the last worker nothing is coded
        hinted = transport.start(edge, request(torch.ones(5000), rank, ExchangeId(1, 0), Int8))
        with pytest.raises(PeerTimeoutError, match=f"worker {n - 1} sent nothing for round 1, bucket 0"):
            hinted.wait()
    found, began = [], time.monotonic()
    if rank < n - 1:
        handles = [transport.start(edge, request(torch.ones(5000), rank, ExchangeId(2, i))) for i in range(8)]
        for handle in handles:
            with pytest.raises(PeerTimeoutError) as caught:
                handle.wait()
            found.append(str(caught.value))
    seconds = time.monotonic() - began
    dist.barrier()
    transport.close()
    return found, seconds


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_a_timeout_is_waited_for_once_and_not_per_bucket(workers, n):
    for rank, (found, seconds) in enumerate(workers(n, silent_for_all_buckets)[:-1]):
        assert 1.9 < seconds < 15  # eight timeouts, if each bucket waited
        for bucket, message in enumerate(found):
            # Buckets of one piece take turns at their root, which knows who is missing; the leaves know whether it is the root.
            root = bucket % n
            others = [n - 1] if root in (rank, n - 1) else [r for r in range(n) if r not in (rank, root)]
            who = f"worker {n - 1}" if others == [n - 1] else f"one of the workers {others}"
            assert message.startswith(f"{who} sent nothing for round 2, bucket {bucket}"), (rank, message)


def edited_before_it_is_coded(rank: int, n: int) -> tuple[bool, bool]:
    """Worker 1 announces late; both change their parameters as soon as they may."""
    transport, edge, exchange_id = ProcessGroupTransport(), Edge([0, 1], 0.5), ExchangeId(0, 0)
    transport.prepare([edge])
    values = torch.linspace(-1, 1, 3 * _BLOCK_ON_CPU) * (1 + rank)
    before = values.clone()
    own = request(values, rank, exchange_id, Int8)
    if rank == 0:
        handle = transport.start(edge, own)
        handle.wait_for_read()
        values.fill_(0.123)
    else:
        time.sleep(0.5)
        handle = transport.start(edge, own)
        handle.wait_for_read()
        values.fill_(0.321)
    handle.wait()
    here = torch.cat([difference * unit for _, difference, unit in own.compression.differences(own.sent, own.received)])
    step = float(own.compression._steps.max())  # type: ignore[attr-defined]
    expected = before / (1 + rank) * (2 - rank) - before
    transport.close()
    return bool((here - expected).abs().max() <= 2 * step), step < 0.1


def test_the_values_of_the_start_are_sent(workers):
    assert workers(2, edited_before_it_is_coded) == [(True, True)] * 2


# -- leaving ---------------------------------------------------------------------------------------------------------------


def leaves_at_once(rank: int, n: int) -> bool:
    """Worker 1 is slow to connect; worker 0 has nothing more to do after it has wrapped its model."""
    if rank == 1:
        find = process_group.find

        def late(meeting: Any, peer: int, *args: Any) -> Any:
            time.sleep(0.7)
            return find(meeting, peer, *args)

        process_group.find = late
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    model.close()
    return True


def test_a_worker_that_exits_after_wrapping_is_found_by_the_others(workers):
    assert workers(2, leaves_at_once) == [True, True]


def collected_in_the_links_thread(rank: int, n: int) -> tuple[bool, list[str]]:
    """As the garbage collector does with a wrapper that was dropped, in whichever thread allocates."""
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    for t in range(3):
        loss(model, t, rank).backward()
    links, owner = model.replica.world._wire, threading.current_thread()  # type: ignore[attr-defined]
    ended: list[str] = []
    epochs: Any = SimpleNamespace(keeper=SimpleNamespace(close=lambda: ended.append("epochs")))

    def collect() -> None:
        shut_down(model.replica.engine, model.replica.world, epochs, owner)
        ended.append("asked for")

    links.call(collect)
    links.commands.thread.join(10)
    return bool(links.commands.thread.is_alive()), sorted(ended)


def test_a_wrapper_that_is_collected_by_the_thread_that_moves_its_bytes_leaves(workers):
    assert workers(2, collected_in_the_links_thread) == [(False, ["asked for", "epochs"])] * 2


def test_a_wrapper_that_is_collected_by_the_thread_of_its_peer_leaves():
    """That thread cannot wait for what only it would send."""
    dropped: list[Any] = []
    there, gone = threading.Barrier(2), threading.Event()

    def body(at: InProcessTransport) -> float:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=at)
        loss(model, 0, at.rank).backward()
        if at.rank == 1:
            loss(model, 1, at.rank).backward()
            dropped.append(model)
            del model
            there.wait(50)
            gone.wait(50)
            return 0.0
        there.wait(50)
        began = time.monotonic()
        dropped.clear()
        gc.collect()
        seconds = time.monotonic() - began
        loss(model, 1, at.rank).backward()
        gone.set()
        return seconds

    assert run_replicas(2, body)[0] < 45  # the other waits for 60 s


def broken_thread(rank: int, n: int) -> list[str]:
    transport, edge = ProcessGroupTransport(), Edge([0, 1], 0.5)
    transport.prepare([edge])
    transport.control.gather(None)
    said = []
    if rank == 0:
        started = threading.Event()

        def fail() -> None:
            assert started.wait(40)
            raise ZeroDivisionError("a bug of ours")

        transport._wire.call(fail)
        began = time.monotonic()
        # Commands that the thread has not done yet when it ends.
        handle = transport.start(edge, request(torch.ones(3 * _BLOCK_ON_CPU), rank, ExchangeId(0, 0)))
        started.set()
        handle.wait_for_read()
        with pytest.raises(RuntimeError) as caught:
            handle.wait()
        said.append(str(caught.value))
        assert time.monotonic() - began < 45
        transport._wire.commands.thread.join(50)
        with pytest.raises(RuntimeError, match="the transport of this worker has failed: ZeroDivisionError"):
            transport.start(edge, request(torch.ones(3), rank, ExchangeId(1, 0)))
    dist.barrier()
    transport.close()
    return said


def test_nobody_waits_for_a_thread_that_has_ended(workers):
    [said], _ = workers(2, broken_thread)
    assert "round 0, bucket 0" in said


def groups_without_a_garbage_collector(rank: int, n: int) -> list[int]:
    transport, edge = ProcessGroupTransport(), Edge(list(range(n)), 1 / n)
    transport.prepare([edge])
    alive, made = [], weakref.WeakSet[Any]()
    begin = groups._ChunkReduction.begin

    def noted(self: Any) -> None:
        made.add(self)
        begin(self)

    groups._ChunkReduction.begin = noted  # type: ignore[method-assign]
    gc.disable()
    for round_ in range(3):
        own = request(torch.full((3 * _BLOCK_ON_CPU,), float(rank)), rank, ExchangeId(round_, 0), Lossless)
        transport.start(edge, own).wait()
        transport.control.gather(None)
        time.sleep(0.2)  # the transport's thread drops its last reference after it has said that all is there
        alive.append(len(made))
    gc.enable()
    transport.close()
    return alive


def test_a_group_that_is_done_is_freed_at_once(workers):
    assert workers(3, groups_without_a_garbage_collector) == [[0, 0, 0]] * 3


def test_many_failed_requests_for_buffers_do_not_nest():
    pool, given = groups.BufferPool(), list[int]()
    all_of_it: list[Tensor] = []
    pool.take(1, groups._POOL_BYTES, all_of_it.extend)

    def fail(buffers: list[Tensor]) -> None:
        given.append(len(buffers))
        pool.release(buffers, reuse=False)

    for _ in range(5000):
        pool.take(1, 100, fail)
    assert given == []
    pool.release(all_of_it, reuse=True)
    assert given == [1] * 5000
    pool.take(1, groups._POOL_BYTES, fail)  # all of it is free again
    assert len(given) == 5001


# -- messages of GPUs ------------------------------------------------------------------------------------------------------


def handle_that_lands(timeout: float) -> tuple[Any, list[str]]:
    """A handle of one message, whose staging notes its calls."""
    hints = SimpleNamespace(lacks=lambda *_: False)
    links = make_links()
    wire: Any = SimpleNamespace(links=links, hints=hints, clock=links.clock, why_lost=lambda _: TimeoutError())
    explain = lambda error, *_: RuntimeError(f"is {error!r}")  # noqa: E731
    handle = handles.WireHandle(ExchangeId(0, 0), [1], handles.AllNeeded(wire, timeout, explain), wire, explain)
    calls: list[str] = []
    handle.land, handle.finish = lambda: calls.append("lands"), lambda: calls.append("finishes")
    handle.expect(1)
    return handle, calls


def test_a_message_lands_when_it_has_come_and_is_finished_by_the_wait():
    handle, calls = handle_that_lands(10.0)
    handle.arrive()
    handle.wait()
    assert calls == ["lands", "finishes"]


def test_an_error_of_this_workers_own_is_not_that_of_a_peer():
    handle, _ = handle_that_lands(10.0)
    handle.fail(-1, PermissionError(13, "Permission denied", "cache"))
    with pytest.raises(RuntimeError, match=r"the exchange failed: .*Permission denied: 'cache'"):
        handle.wait()


def test_what_comes_after_a_failed_wait_does_not_land():
    """It could get into the messages of a later exchange."""
    handle, calls = handle_that_lands(0.01)
    with pytest.raises(RuntimeError, match="TimeoutError"):
        handle.wait()
    handle.arrive()
    assert calls == []


def test_what_comes_after_an_error_does_not_land():
    handle, calls = handle_that_lands(10.0)
    handle.fail(1, ConnectionError("gone"))
    handle.arrive()
    with pytest.raises(RuntimeError, match="gone"):
        handle.wait()
    assert calls == []


def test_a_peer_that_has_ended_costs_no_exchange_with_another_one():
    """Of several that are in flight. A timeout is waited for once for all of them, and this is none."""
    links, ended = make_links(), {1}
    links.has_ended = ended.__contains__  # type: ignore[method-assign]
    wire: Any = SimpleNamespace(links=links, clock=links.clock, why_lost=lambda peer: ConnectionError(f"{peer} is gone"))
    explain = lambda error, peers, _: RuntimeError(f"{peers}: {error}")  # noqa: E731
    policy = handles.AllNeeded(wire, 60.0, explain)
    dead, alive = (handles.WireHandle(ExchangeId(0, 0), [peer], policy, wire, explain) for peer in (1, 2))
    with pytest.raises(RuntimeError, match="1 is gone"):
        policy.give_up(dead)
    now = time.monotonic()
    assert policy.seconds_left(dead, now, now) == 0.0
    assert policy.seconds_left(alive, now, now) > 50
