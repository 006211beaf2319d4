"""What a worker knows of the others from its connections, where faults are tolerated, and how long it waits for them."""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

from decent_dp.topo import Edge
from decent_dp.transport.handles import Policy, WireHandle
from decent_dp.transport.neighbours import Neighbours, PeerTable, Seen
from decent_dp.transport.peer_links import LinkState, PeerLink
from decent_dp.transport.sockets import SILENT
from decent_dp.transport.votes import ExchangeId, PairExchange
from decent_dp.transport.wire import Wire

__all__ = ["HolesAllowed", "WireNeighbours"]

# Seconds in which a process that was stopped reads what came meanwhile.
_OLD = 0.1
# Beats after a stop, from which on one other worker that is heard is enough.
_BEATS = 1.5
# Rounds of which the median is taken for the time of a step.
_STEPS = 16
# The fewest seconds by which an exchange can be late.
_LATE = 0.25
# The part of ``dead_after`` for which a living peer that is not in its exchange is waited for at most: it may itself wait for
# one that is silent.
_COMING = 0.4
# Seconds between two questions to a peer that is late.
_ANSWER = 0.05


class WireNeighbours(Neighbours):
    """Reads the connections from any thread, and leaves changes to the transport's thread.

    Attributes:
        dead_after: as of ``Tolerate``.
        step: the median of the seconds that the last rounds have taken.
        last: the last round in which exchanges are started. It must not change between a round and its exchanges.
    """

    def __init__(self, wire: Wire, rank: int, dead_after: float) -> None:
        self._wire, self._links = wire, wire.links
        self.dead_after = dead_after
        self.table = _WireTable(wire, rank, self)
        # When this worker entered its round, and the seconds of its last rounds.
        self._announced = self.step = 0.0
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self.last = math.inf
        self._lock = threading.Lock()

    def announce(self, round_: int) -> None:
        """This worker is in a round; heartbeats say it."""
        self._links.paused = False
        now, last = self._wire.clock.now(), self._links.round
        if last >= 0 and round_ > last:
            self._steps.append((now - self._announced) / (round_ - last))
            self.step = statistics.median(self._steps)
        if round_ > last:
            with self._lock:
                self._announced, self._links.round = now, round_

    def look(self) -> Seen:
        links, now, dead_after = list(self._links.by_rank.values()), self._wire.clock.now(), self.dead_after
        living = [link for link in links if link.state is LinkState.OPEN]
        return Seen(
            living=_ranks(living),
            silent=_ranks(x for x in links if x.state is not LinkState.NEW and self._links.patience(x.peer, 0.0) <= 0),
            lost=_ranks(link for link in links if link.silence(now) >= dead_after),
            ended=_ranks(link for link in links if link.state is LinkState.GONE),
            left=_ranks(link for link in links if link.says.left),
            epoch=max((link.says.epoch for link in living), default=0),
            is_awake=self._is_awake(links, living),
            is_replaced=self._wire.connections.replaced,
        )

    def _is_awake(self, links: list[PeerLink], living: list[PeerLink]) -> bool:
        clock, woke = self._wire.clock, self._wire.clock.woke()
        since = clock.now() - woke
        if since > self.dead_after:
            return True
        heard = [link for link in living if link.heard > woke + _OLD]
        if since >= _BEATS * clock.interval:
            return bool(heard)
        return len(heard) == len(living) and not any(link.state is LinkState.BROKEN for link in links)

    @property
    def is_paused(self) -> bool:
        return self._links.paused

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._links.paused = True
        self._wire.call(self._links.beat_all)
        try:
            yield
        finally:
            self._links.paused = False
            with contextlib.suppress(RuntimeError):  # the transport was closed
                self._wire.call(self._links.beat_all)

    def reserve_until(self, seconds: float, least: int) -> int:
        with self._lock:
            ahead = max(least, math.ceil(seconds / self.step) if self.step else 0)
            last = max(self._links.round, 0) + ahead
            self.last = min(self.last, last)
        return last

    def stop_mixing_after(self, last: int | None) -> None:
        with self._lock:
            self.last = math.inf if last is None else last

    def enter_epoch(self, number: int) -> None:
        with self._lock:  # two threads come to epochs
            self._links.epoch = max(self._links.epoch, number)
        self._wire.call(self._links.beat_all)

    def renew(self, rank: int, incarnation: int, start: int) -> None:
        self._wire.renew(rank, incarnation, start)

    def fail(self, error: Exception) -> None:
        self._wire.commands.fail(error)

    def refuse_failed(self) -> None:
        self._wire.commands.refuse_failed()

    def serve(self, answer: Callable[[int, int, bytes], bytes]) -> None:
        self._wire.requests.serve(answer)

    def ask(self, rank: int, incarnation: int, request: bytes) -> Future[bytes]:
        return self._wire.requests.ask(rank, incarnation, request)


def _ranks(links: Iterable[PeerLink]) -> frozenset[int]:
    return frozenset(link.peer for link in links)


class _WireTable(PeerTable):
    def __init__(self, wire: Wire, rank: int, neighbours: WireNeighbours) -> None:
        self._wire, self._links, self._rank, self._neighbours = wire, wire.links, rank, neighbours

    def usable(self, edge: Edge, exchange_id: ExchangeId) -> bool:
        round_, bucket = exchange_id.round, exchange_id.bucket
        if round_ > self._neighbours.last:
            return False
        return not any(
            round_ < link.start
            or link.state not in (LinkState.NEW, LinkState.OPEN)  # a new connection is made with the exchange
            or link.votes.has_dropped(round_, bucket)
            or link.lateness.on_break(round_)
            for link in map(self._links.known, self._others(edge))
        )

    def has_dropped(self, others: Sequence[int], exchange_id: ExchangeId) -> bool:
        found = map(self._links.known, others)
        return any(link.votes.has_dropped(exchange_id.round, exchange_id.bucket) for link in found)

    def skip(self, edge: Edge, exchange_id: ExchangeId) -> None:
        for peer in self._others(edge):
            self._wire.call(partial(self._wire.settlement.skip, peer, exchange_id.round, exchange_id.bucket))

    def round_of(self, rank: int) -> int:
        link = self._links.known(rank)
        # The rounds of a process that has joined begin later: it is not ahead of this worker.
        return -1 if self._links.round < link.start else link.says.round

    def living(self) -> list[int]:
        return sorted(link.peer for link in list(self._links.by_rank.values()) if link.state is LinkState.OPEN)

    def _others(self, edge: Edge) -> list[int]:
        return [rank for rank in edge.ranks if rank != self._rank]


class HolesAllowed(Policy):
    """With ``faults=``: an exchange with a worker that is gone, silent or late ends with a verdict.

    Args:
        neighbours: know how long a step takes.
        timeout: seconds without any progress after which an exchange is dropped.
    """

    def __init__(self, wire: Wire, neighbours: WireNeighbours, timeout: float) -> None:
        self._wire, self._neighbours = wire, neighbours
        self._dead_after, self._timeout = neighbours.dead_after, timeout

    def seconds_left(self, handle: WireHandle, began: float, now: float) -> float:
        pair = handle.pair
        assert pair is not None
        in_doubt = self._end_of_doubt(pair) - now
        if pair.abandoned:
            return in_doubt
        lively = self._wire.links.patience(pair.peer, began)
        active = max(began, handle.last_progress()) + self._timeout - now
        return min(in_doubt, lively, self.expected_end(pair, began) - now, active)

    def give_up(self, handle: WireHandle) -> None:
        pair = handle.pair
        assert pair is not None
        now, settlement = self._wire.clock.now(), self._wire.settlement
        if now >= self._end_of_doubt(pair):
            self._wire.commands.run_there(lambda: settlement.drop(pair))
            return
        pair.abandoned = True
        is_late = self._wire.links.patience(pair.peer, now) > 0 and now >= self.expected_end(pair, now)
        self._wire.commands.run_there(lambda: settlement.abandon(pair, late=is_late))

    def end_without(self, peer: int, exchange_id: ExchangeId) -> None:
        return

    def waited(self, handle: WireHandle, began: float) -> None:
        pair = handle.pair
        assert pair is not None
        lateness = self._wire.links.known(pair.peer).lateness
        lateness.waited(pair, began, self._wire.clock.now(), self._neighbours.step, _COMING * self._dead_after)

    def _end_of_doubt(self, pair: PairExchange) -> float:
        if not pair.voted:
            return math.inf
        if self._wire.links.has_ended(pair.peer):  # nobody will vote
            return pair.voted
        return max(pair.voted, self._wire.links.known(pair.peer).lane.moved) + SILENT * self._dead_after

    def expected_end(self, pair: PairExchange, began: float) -> float:
        """When an exchange is late (``Lateness.expected_end``). ``began``: when the wait did.

        Messages are late only if their peer was heard since then: it is asked for a sign of life, and answers it at once. So a
        peer that is stopped is waited for until it is silent. Where exchanges are slow, a peer that is not in this one yet is
        asked, too: it may be in an earlier one. One that is too busy to answer is not waited for longer than the silent; if it
        is in this one it is, as giving up bytes on their way may cost the connection (``Settlement.drop``).
        """
        links = self._wire.links
        link = links.known(pair.peer)
        if not pair.joined and link.says.epoch > links.epoch:
            return pair.opened  # it may make other rounds, without this worker
        link.lateness.patience = min(link.lateness.patience, _COMING * self._dead_after)
        end = link.lateness.expected_end(pair, began, max(self._neighbours.step, _LATE), paused=link.says.paused)
        asks = pair.joined or (link.lateness.is_slow(pair.bucket) and link.state is LinkState.OPEN)
        answered, now = link.heard if pair.joined else link.says.told, self._wire.clock.now()
        limit = math.inf if pair.joined else end + SILENT * self._dead_after
        if not asks or now < end or answered > end or now > limit:
            return end
        self._wire.call(lambda: links.beat(link, ask=True))
        return now + _ANSWER
