"""The thread that moves messages over ZeroMQ to other workers and back."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from typing import Any

import zmq

from decent_dp.errors import PeerLostError, WireError
from decent_dp.transport.agreement import PeerView
from decent_dp.transport.commands import Commands
from decent_dp.transport.connections import LINGER, Connections
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.dialling import Dialler, Target
from decent_dp.transport.hello import BULK, CONTROL, CROSSING, REPLACED, Credentials, Identity
from decent_dp.transport.listening import Doorman
from decent_dp.transport.messages import BEAT, BLOCK, BLOCKS, BYE, CALL, DATA, START, STATE, VOTE, Header, Key, pack, unpack
from decent_dp.transport.peer_errors import SilentError
from decent_dp.transport.peer_link import Channel, LinkState, PeerLink
from decent_dp.transport.peer_links import PeerLinks
from decent_dp.transport.polling import Polling
from decent_dp.transport.requests import Requests
from decent_dp.transport.sockets import SILENT, Socket, Sockets, rest_of

__all__ = ["Reader", "Wire"]

_log = logging.getLogger(__name__)

# Seconds in which the last messages of a process that has ended are read.
_LAST = 1.0
# Seconds between two looks at what no event reports.
_LOOK = 0.05
# Seconds between two heartbeats, at most.
_BEAT = 1.0
# Seconds for which an exchange waits for a lost connection to be made again.
_MENDED = 0.25
# Seconds after the loss of a connection in which the peer dials, if it lives, though it refuses to be dialled.
_GETS_THROUGH = 1.0
# Seconds after which other connections have their turn.
_READ_FOR = 0.02
# Seconds for which a worker that has dialled successfully refuses the other's dialling, which had begun before.
_CROSSED = 1.0


class Wire:
    """This worker's connections.

    Args:
        expected: the ranks of the run.
        local: the workers that share this one's network stack.
        sockets: makes them.
        listeners: those to which others connect.
        find: where a process of a worker listens, by its rank and incarnation; blocking.
        timeout: seconds that a worker has to answer when it is dialled.
    """

    def __init__(
        self,
        credentials: Credentials,
        expected: range,
        local: frozenset[int],
        sockets: Sockets,
        listeners: list[Socket],
        find: Callable[[int, int], Target],
        timeout: float,
    ) -> None:
        self._identity, self._expected = credentials.identity, set(expected)
        self._sockets, self._listeners, self._dead_after = sockets, listeners, sockets.dead_after
        self._asked: set[int] = set()
        self._next_beat, self._woke = time.monotonic(), -math.inf
        self.stopped = 0.0  # seconds for which this process, or this thread, was stopped so far
        self._look_at = math.inf
        self.commands, self._polling, self.links = Commands(), Polling(sockets), PeerLinks(local)
        self.call = self.commands.call
        rank = self._identity.rank
        self.control_plane = ControlPlane(rank, len(expected), self, self._identity.incarnation)
        self.connections = Connections(rank, self.links, self._polling, self.control_plane, self._dead_after)
        self.flow, self.settlement = self.connections.flow, self.connections.settlement
        with_whom = credentials, sockets, self.commands
        self._doorman = Doorman(*with_whom, self)
        self._dialler = Dialler(*with_whom, self.connections, self._polling, find, timeout)
        self.requests = Requests(self.links, self.commands, self._dialler.want)
        self._reader = Reader(self.connections, self._polling, self._doorman, self._dialler, self.requests)
        self.read_events, self.want = self._reader.read_events, self._dialler.want
        self._closing: float | None = None
        self._thread = self.commands.thread = threading.Thread(target=self._run, name="decent_dp-transport", daemon=True)
        _WIRES.add(self)
        # A process may end right after its last exchange, without a close: what libzmq has of it still goes out.
        self._at_exit = Finalize(None, _close_at_exit, args=(weakref.ref(self),), exitpriority=10)
        self._thread.start()

    # -- called by any thread -----------------------------------------------------------------------------------------

    def connect(self, peer: int) -> None:
        """Makes sure that there will be a connection: one of both makes it."""
        if peer not in self._asked:
            self._asked.add(peer)
            self.call(lambda: self._dialler.want(peer) if self.links.to(peer).state is LinkState.NEW else None)

    def is_connected(self, peer: int) -> bool:
        """Whether there is a connection. Waits until it is made, or the peer counts as dead."""
        while (view := self.view(peer)) in (PeerView.UNKNOWN, PeerView.PENDING):
            self.commands.refuse_failed()
            time.sleep(_LOOK / 50)
        return view is PeerView.LINKED

    def has_ended(self, peer: int) -> bool:
        """Whether the connection is lost, and nobody listens at the address of this worker any more."""
        link = self.links.known(peer)
        # The peer may get through itself, if it needs this worker, too, by now.
        return link.refused and time.monotonic() - link.since > _GETS_THROUGH

    def why_lost(self, peer: int) -> BaseException:
        """Why a worker takes no part in an exchange."""
        link = self.links.known(peer)
        if link.state in (LinkState.NEW, LinkState.OPEN):  # where they are connected it has waited for too long itself
            return link.why or TimeoutError()
        return link.why_lost

    def renew(self, peer: int, incarnation: int, start: int = -1) -> None:
        """``Neighbours.renew``."""

        def renew() -> None:
            if self.links.known(peer).incarnation < incarnation:
                self._expected.add(peer)
                self.connections.renew(peer, incarnation, start)

        self.call(renew)

    def now(self) -> float:
        """The time, as far as this thread has looked at its peers since: after a stop of this process they only seem silent."""
        return min(time.monotonic(), self._next_beat + self.interval)

    def woke(self) -> float:
        """When this process last went on after a stop in which it became a hole, on the monotonic clock; -inf for never."""
        now = time.monotonic()
        return now if now - self._next_beat > SILENT * self._dead_after else self._woke

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return min(_BEAT, self._dead_after / 10)

    def patience(self, peer: int, since: float) -> float:
        """Seconds for which an exchange may still wait for a sign of life. If none are left, its edge is a hole.

        Args:
            since: when the exchange was started; it counts for a peer that has never been connected.
        """
        link, now = self.links.known(peer), self.now()
        if link.state is LinkState.NEW:
            return since + self._dead_after - now
        lively = SILENT * self._dead_after - link.silence(now)
        if link.state is LinkState.BROKEN:
            return 0.0 if link.refused else min(lively, link.since + _MENDED - now)
        return lively

    def close(self, *, says_bye: bool = True) -> None:
        """Ends the thread once everything that was sent has arrived, or cannot any more.

        Args:
            says_bye: this worker has done what it was to do. Else it has failed, and counts as dead.
        """
        if self._closing is None:
            self._at_exit.cancel()
            self.commands.closing = True
            self._closing = time.monotonic() + (LINGER if says_bye else 0.0)
            with contextlib.suppress(RuntimeError):
                self.call(self.connections.say_bye if says_bye else lambda: None)
            self._thread.join(LINGER + 1)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._polling.add(self.commands.wakeup)
            if self._sockets.authenticator is not None:
                self._polling.add(self._sockets.authenticator)
            for listener in self._listeners:
                self._polling.watch(listener)
            more = False
            while self._closing is None or not self._is_drained():
                more = self._step(more)
        except BaseException as error:
            self.commands.failed_in = self.commands.failed_in or self._thread.name
            self.commands.error = error
            if not isinstance(error, PeerLostError):  # which the training thread gets
                _log.exception("the transport of worker %d has failed", self._identity.rank)
        finally:
            self._shut_down()

    def _step(self, more: bool) -> bool:
        """One turn. ``more``: there is more to send. Returns whether there is still."""
        happened = self._polling.wait(0 if more else math.ceil(1000 * self._patience()))
        self._beat_if_due()  # before what has come is read: this process may have been stopped
        for stream in happened:
            socket = self._polling.sources.get(stream)
            if socket is not None and stream is socket.monitor:
                self._reader.read_events(socket)
        for stream in happened:
            socket = self._polling.sources.get(stream)
            if stream == self.commands.wakeup:
                self.commands.awake()
            elif stream is self._sockets.authenticator:
                self._doorman.authenticate()
            elif socket is not None and stream is socket.zmq:
                self._reader.read(socket, time.monotonic() + _READ_FOR)
            # Much may have come from each of many peers. They must hear from this worker meanwhile.
            self._beat_if_due()
        for channel in self._polling.over:
            self._end(channel)
        self._polling.over.clear()
        self.commands.run()
        more = self.flow.go_on()
        if self._closing is None:
            for link in self.links.by_rank.values():
                if link.state is LinkState.BROKEN:
                    self._dialler.want(link.peer)
            self._look_at = min(self._dialler.look(), self.control_plane.look())
        return more

    def _patience(self) -> float:
        """Seconds for which nothing is to be done."""
        if self.commands:
            return 0.0
        # A message may wait for others to arrive; if their peer stops, no event tells it.
        if self.links.networks[False].waiting or self._closing is not None or self._polling.leaving or self._doorman.busy:
            return _LOOK if self._closing is None else _LOOK / 5
        return max(0.0, min(self._next_beat, self._look_at) - time.monotonic())

    # -- events and messages ----------------------------------------------------------------------------------------------

    def _end(self, channel: Channel) -> None:
        """A connection has ended. What came before is read first."""
        if not channel.socket.zmq.closed:
            self._reader.read(channel.socket, time.monotonic() + _LAST)
        link = channel.link
        if link and link.state is LinkState.OPEN and channel is link.channels[BULK] and link.network.local:
            # The peer has ended. Its last messages may still come over the other connection, as nobody says that they have.
            self._polling.leaving.setdefault(link.channels[CONTROL], time.monotonic() + _LAST)
            self._polling.hang_up(channel)
        else:
            self._lose(channel)

    def _lose(self, channel: Channel) -> None:
        self._polling.leaving.pop(channel, None)
        link = channel.link
        if link is not None and channel in link.channels:
            silent = time.monotonic() - link.heard > self._dead_after / 2
            reason = f"silent for {self._dead_after:g} s" if silent else "closed by the peer"
            self.connections.lose(link, reason, SilentError(reason) if silent else None)
        self._polling.hang_up(channel)

    # -- links --------------------------------------------------------------------------------------------------------

    def view(self, peer: int) -> PeerView:
        """What the control plane is to know of a peer; any thread may ask."""
        link = self.links.known(peer)
        if link.state is LinkState.NEW:
            return PeerView.UNKNOWN
        if link.silence(self.now()) >= self._dead_after:
            return PeerView.LOST
        return PeerView.LINKED if link.state is LinkState.OPEN else PeerView.PENDING

    def first_round(self, peer: int) -> int:
        return self.links.known(peer).start

    def send_note(self, peer: int, key: Key, text: bytes) -> None:
        link, is_block = self.links.to(peer), key[1] == BLOCKS
        if link.state is LinkState.OPEN:
            link.channels[BULK if is_block else CONTROL].send(pack(BLOCK if is_block else CALL, key), text)

    def admit(self, worker: Identity) -> str:
        """Why a worker that has connected is refused; empty: it is welcome."""
        if self._joins(worker) and worker.rank != self._identity.rank:
            joiner = self.links.joiners.get((worker.rank, worker.incarnation))
            if joiner is not None and joiner.uid != worker.uid:
                return f"another process is about to be worker {worker.rank}"
            return "" if self.requests.is_served else f"worker {worker.rank} is not a member yet, and nobody can join now"
        if worker.rank not in self._expected or worker.rank == self._identity.rank:
            return f"rank {worker.rank} is not expected"
        link = self.links.to(worker.rank)
        if worker.incarnation != link.incarnation:
            return REPLACED
        if link.state is LinkState.GONE:
            return f"worker {worker.rank} is gone for worker {self._identity.rank}, which has dropped what they had in common"
        if link.uid not in (b"", worker.uid):
            return f"another process has been worker {worker.rank}, and the others do not know of a new one"
        if self._dialler.goes_first(worker.rank):
            is_new = link.state is LinkState.OPEN and time.monotonic() - link.since < _CROSSED
            if self._dialler.is_through(worker.rank) or is_new:
                return CROSSING
        return ""

    def let_in(self, worker: Identity, channels: list[Channel]) -> None:
        self._polling.accept(channels)
        if self._joins(worker):
            self.connections.let_join(worker.rank, worker.incarnation, worker.uid, *channels)
            return
        link = self.links.to(worker.rank)
        self._dialler.cancel(worker.rank)
        if link.is_connected:  # the peer has seen first that it was lost
            self.connections.lose(link, "replaced by the peer")
        self.connections.open(link, worker.uid, *channels)

    def _joins(self, worker: Identity) -> bool:
        """Whether it is of a process that is no member yet, as far as this worker knows."""
        return worker.incarnation > self.links.known(worker.rank).incarnation

    # -- heartbeats -----------------------------------------------------------------------------------------------------

    def _beat_if_due(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        """Once in a while: says where this worker is, and looks for the silent."""
        self._woke, now = self.woke(), time.monotonic()
        stopped = now - self._next_beat
        if stopped > 2 * self.interval:  # this process was, perhaps with all others
            for link in self.links.by_rank.values():
                link.was_stopped(stopped)
            self.stopped += stopped
        self._next_beat = now + self.interval
        self._doorman.look()
        for channel in [channel for channel, until in self._polling.leaving.items() if now >= until]:
            self._lose(channel)
        for link in list(self.links.by_rank.values()):
            self.links.beat(link)
            self._judge(link, now)

    def _judge(self, link: PeerLink, now: float) -> None:
        brought = max(link.moved, link.since, link.busy)
        if link.state is LinkState.OPEN and link.pairs and link.pace.due and now - brought > self._dead_after:
            # The control connection lives, and the peer neither sends what it has offered nor moves an earlier exchange.
            self.connections.lose(link, f"it has brought nothing for {self._dead_after:g} s")
        if link.state is LinkState.BROKEN and link.silence(now) > self._dead_after:
            self.connections.expire(link)
        if link.state is LinkState.NEW and link.pairs and now - link.since > SILENT * self._dead_after:
            self._dialler.want(link.peer)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _is_drained(self) -> bool:
        """All peers have answered this worker's BYE, so they have received everything before it."""
        assert self._closing is not None
        if time.monotonic() > self._closing:
            return True
        waits = [link for link in self.links.by_rank.values() if link.state is LinkState.OPEN and not link.left]
        return not (self.commands or waits)

    def _shut_down(self) -> None:
        over: Exception = ConnectionError("the transport was closed")
        if self.commands.error is not None:
            over = self.commands.is_over()
            over.__cause__ = self.commands.error
        while not self.commands.ended:
            self.commands.run_last()
            self.control_plane.close(self.commands.error)
            self.requests.close()
            self._dialler.close()
            for link in self.links.by_rank.values():
                if link.state is LinkState.OPEN:  # what is on its way there goes out, unlike memory that is lent to libzmq
                    self._polling.leaving.setdefault(link.channels[CONTROL], math.inf)
                self.connections.fail(link, over)
            self.commands.end()
        self._sockets.close_all(flush=self._closing is None or time.monotonic() >= self._closing)
        self.commands.close()


class Reader:
    """Reads events and messages, and dispatches them. Used by the transport's thread alone.

    Args:
        doorman, dialler: take those of connections that are not open yet.
    """

    def __init__(
        self,
        connections: Connections,
        polling: Polling,
        doorman: Doorman,
        dialler: Dialler,
        requests: Requests,
    ) -> None:
        self._connections, self._polling = connections, polling
        self._doorman, self._dialler, self._requests = doorman, dialler, requests

    def read_events(self, socket: Socket) -> None:
        polling, owner = self._polling, self._polling.owners.get(socket)
        for event in socket.events():
            if socket.is_router and event.kind == zmq.EVENT_DISCONNECTED and (socket, event.descriptor) in polling.accepted:
                channel = polling.accepted.pop((socket, event.descriptor))
                if socket.is_open_to_others:  # somebody who has seen its routing id may use it from now on
                    polling.routes.pop(channel.route, None)
                polling.over.append(channel)
            elif socket.is_router:
                self._doorman.on_event(socket, event)
            elif owner is None:
                self._dialler.on_event(socket, event)
            elif event.is_end:
                polling.over.append(owner)

    def read(self, socket: Socket, until: float) -> None:
        """Reads what has come to a socket."""
        stream = socket.zmq
        with contextlib.suppress(zmq.Again):
            while self._polling.is_watched(socket) and time.monotonic() < until:
                first = stream.recv(zmq.NOBLOCK)
                routes, owners = self._polling.routes, self._polling.owners
                channel = routes.get((socket, first)) if socket.is_router else owners.get(socket)
                if channel is not None:
                    self._take(channel, stream.recv(zmq.NOBLOCK) if socket.is_router else first)
                elif socket.is_router:
                    self._doorman.hear(socket, first)
                else:
                    self._dialler.hear(socket, first)

    def _take(self, channel: Channel, raw: bytes) -> None:
        stream, link = channel.socket.zmq, channel.link
        if link is None:
            rest_of(stream)
            self._doorman.dropped += 1
            return
        try:
            header = unpack(raw, link.peer)
            link.heard = time.monotonic()
            if header.kind == DATA:
                self._take_data(link, header, stream)
            else:
                self._hear(link, channel, header, rest_of(stream))
        except WireError as error:
            rest_of(stream)
            self._connections.fail(link, error)

    def _hear(self, link: PeerLink, channel: Channel, header: Header, body: bytes) -> None:
        """Raises WireError if the peer has got out of step."""
        kind, key = header.kind, header.key
        if kind == BYE:
            self._connections.hear_bye(link, channel, header)
        elif kind == STATE:
            self._requests.hear(link, channel, header, body)
        elif not self._is_member(link):
            return
        elif kind in (CALL, BLOCK):
            self._connections.control_plane.hear(link.peer, key, body)
        elif kind == BEAT:
            self._connections.links.hear_beat(link, header)
        elif kind in (START, VOTE):
            self._connections.links.hear_round(link, key)
            if kind == START:
                self._connections.flow.hear_start(link, header, body)
            else:
                self._connections.settlement.hear(link, header)

    def _is_member(self, link: PeerLink) -> bool:
        """Whether the peer may send more than STATE. To a process that joins it does so from when on it is a member there."""
        if link.state is LinkState.JOINING and self._connections.links.by_rank.get(link.peer) is link:
            self._connections.open(link, link.uid, *link.channels)
        return link.state is LinkState.OPEN

    def _take_data(self, link: PeerLink, header: Header, stream: Any) -> None:
        flow = self._connections.flow
        memory = flow.memory_for(link, header)
        if memory is None:
            rest_of(stream)
            return
        count = stream.recv_into(memory, flags=zmq.NOBLOCK) if stream.get(zmq.RCVMORE) else 0
        if count != len(memory) or stream.get(zmq.RCVMORE):
            raise WireError(f"worker {link.peer} sent a part of {count} bytes, where it announced {len(memory)}")
        flow.arrived(link, header)


_WIRES: weakref.WeakSet[Wire] = weakref.WeakSet()


def _close_at_exit(wire: weakref.ref[Wire]) -> None:
    if (found := wire()) is not None:
        found.close(says_bye=False)


def _end_in_child() -> None:
    for wire in list(_WIRES):
        wire.commands.end_in_child()


# DataLoader workers are forked where that is the default.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)
