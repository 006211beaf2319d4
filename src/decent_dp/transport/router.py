"""The thread that owns the sockets: it moves messages over ZeroMQ to other workers and back."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from typing import Any

import zmq

from decent_dp.errors import PeerLostError, WireError
from decent_dp.transport.commands import Commands
from decent_dp.transport.connections import LINGER, Connections
from decent_dp.transport.dialling import Dialler
from decent_dp.transport.hello import CROSSING, REPLACED, Credentials, Identity
from decent_dp.transport.listening import Doorman
from decent_dp.transport.messages import BEAT, BLOCK, BULK, BYE, CALL, CONTROL, DATA, HINT, START, STATE, VOTE, Header, unpack
from decent_dp.transport.peer_errors import SilentError
from decent_dp.transport.peer_links import LinkState, PeerLink
from decent_dp.transport.sockets import Channel, Socket, Sockets, rest_of

__all__ = ["Reader", "Router"]

_log = logging.getLogger(__name__)

# Seconds in which the last messages of a process that has ended are read.
_LAST = 1.0
# Seconds between two looks at what no event reports.
_LOOK = 0.05
# Seconds after which other connections have their turn.
_READ_FOR = 0.02
# Seconds for which a worker that has dialled successfully refuses the other's dialling, which had begun before.
_CROSSED = 1.0


class Reader:
    """What has come to sockets that are open: it goes to the link of its connection.

    Attributes:
        over: connections that have ended.
    """

    def __init__(self, connections: Connections, sockets: Sockets) -> None:
        self._connections, self._sockets = connections, sockets
        self.over: list[Channel] = []

    def take(self, channel: Channel, raw: bytes) -> None:
        """A message; ``raw``: its header."""
        stream, link = channel.socket.zmq, channel.link
        try:
            header = unpack(raw, link.peer)
            link.heard = link.clock.now()
            if header.kind == DATA:
                self._take_data(link, header, stream)
            else:
                self._hear(link, channel, header, rest_of(stream))
        except WireError as error:
            rest_of(stream)
            self._connections.fail(link, error)

    def _hear(self, link: PeerLink, channel: Channel, header: Header, body: bytes) -> None:
        """Raises WireError if the peer has got out of step."""
        kind, key, connections = header.kind, header.key, self._connections
        if kind == BYE:
            connections.hear_bye(link, channel, header)
        elif kind == STATE:
            connections.requests.hear(link, channel, header, body)
        elif not self._is_member(link):
            return
        elif kind in (CALL, BLOCK):
            connections.control_plane.hear(link.peer, key, body)
        elif kind == BEAT:
            connections.links.hear_beat(link, header)
        elif kind in (START, VOTE):
            connections.links.hear_round(link, key)
            if kind == VOTE:
                connections.settlement.hear(link, header)
            elif key[2] == HINT:
                connections.hints.hear(link, key, body)
            else:
                connections.flow.hear_start(link, header)

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

    def end(self, channel: Channel) -> None:
        """A connection has ended, and what came before was read."""
        link = channel.link
        if link.state is LinkState.OPEN and channel is link.channels[BULK] and link.lane.network.local:
            # The peer has ended. Its last messages may still come over the other connection, as nobody says that they have.
            self._connections.lingering.setdefault(link.channels[CONTROL], link.clock.now() + _LAST)
            self._sockets.hang_up(channel)
        else:
            self.lose(channel)

    def lose(self, channel: Channel) -> None:
        self._connections.lingering.pop(channel, None)
        link: PeerLink = channel.link
        if channel in link.channels:
            dead_after = self._sockets.dead_after
            silent = link.clock.now() - link.heard > dead_after / 2
            reason = f"silent for {dead_after:g} s" if silent else "closed by the peer"
            self._connections.lose(link, reason, SilentError(reason) if silent else None)
        self._sockets.hang_up(channel)


class Router:
    """Owns the sockets. All else that changes links is called by its thread, too.

    Args:
        dialler, doorman: take the events and messages of connections that are not open yet.
    """

    def __init__(
        self,
        credentials: Credentials,
        sockets: Sockets,
        commands: Commands,
        connections: Connections,
        dialler: Dialler,
        listeners: list[Socket],
    ) -> None:
        self._identity, self._sockets, self._listeners = credentials.identity, sockets, listeners
        self._commands, self._connections, self._links = commands, connections, connections.links
        self._reader = Reader(connections, sockets)
        self._clock, self._dialler = self._links.clock, dialler
        self.doorman = Doorman(credentials, sockets, commands, self.admit, self.read_events)
        self._next_beat, self._look_at = time.monotonic(), math.inf
        self._closing: float | None = None
        commands.thread = threading.Thread(target=self._run, name="decent_dp-transport", daemon=True)

    def close(self, *, says_bye: bool) -> None:
        """Called by any thread."""
        if self._closing is None:
            self._commands.closing = True
            self._closing = time.monotonic() + (LINGER if says_bye else 0.0)
            with contextlib.suppress(RuntimeError):
                self._commands.call(self._connections.say_bye if says_bye else lambda: None)
            self._commands.thread.join(LINGER + 1)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        commands = self._commands
        try:
            self._sockets.add(commands.wakeup)
            if self._sockets.authenticator is not None:
                self._sockets.add(self._sockets.authenticator)
            for listener in self._listeners:
                self._sockets.watch(listener)
            more = False
            while self._closing is None or not self._is_drained():
                more = self._step(more)
        except BaseException as error:
            commands.failed_in = commands.failed_in or commands.thread.name
            commands.error = error
            if not isinstance(error, PeerLostError):  # which the training thread gets
                _log.exception("the transport of worker %d has failed", self._identity.rank)
        finally:
            commands.end(self._fail_all)
            self._sockets.close_all(flush=self._closing is None or time.monotonic() >= self._closing)
            commands.close()

    def _step(self, more: bool) -> bool:
        """One turn. ``more``: there is more to send. Returns whether there is still."""
        happened = self._sockets.wait(0 if more else math.ceil(1000 * self._patience()))
        self._beat_if_due()  # before what has come is read: this process may have been stopped
        for stream in happened:
            socket = self._sockets.polled.get(stream)
            if socket is not None and stream is socket.monitor:
                self.read_events(socket)
        for stream in happened:
            socket = self._sockets.polled.get(stream)
            if stream == self._commands.wakeup:
                self._commands.awake()
            elif stream is self._sockets.authenticator:
                self.doorman.authenticate()
            elif socket is not None and stream is socket.zmq:
                self.read(socket, time.monotonic() + _READ_FOR)
            # Much may have come from each of many peers. They must hear from this worker meanwhile.
            self._beat_if_due()
        over, self._reader.over = self._reader.over, []
        for channel in over:
            if not channel.socket.zmq.closed:  # what came before is read first
                self.read(channel.socket, time.monotonic() + _LAST)
            self._reader.end(channel)
        self._commands.run()
        more = self._connections.flow.go_on()
        if self._closing is None:
            self._look_at = min(self._dialler.look(), self._connections.control_plane.look())
        return more

    def _patience(self) -> float:
        """Seconds for which nothing is to be done."""
        if self._commands:
            return 0.0
        # A message may wait for others to arrive; if their peer stops, no event tells it.
        waits = self._links.networks[False].waiting or self._connections.lingering or self.doorman.busy
        if self._closing is not None:
            return _LOOK / 5
        return _LOOK if waits else max(0.0, min(self._next_beat, self._look_at) - time.monotonic())

    def read_events(self, socket: Socket) -> None:
        """What has happened to the connections of a socket."""
        for event in socket.events():
            ended = event.kind == zmq.EVENT_DISCONNECTED if socket.is_router else event.is_end
            at = event.descriptor if socket.is_router else -1
            channel = next((channel for channel in socket.channels.values() if channel.descriptor == at), None)
            if channel is not None and ended:
                channel.descriptor = -1
                if socket.is_open_to_others:  # somebody who has seen its routing id may use it from now on
                    del socket.channels[channel.routing_id]
                self._reader.over.append(channel)
            elif socket.is_router:
                self.doorman.on_event(socket, event)
            elif channel is None:
                self._dialler.on_event(socket, event)

    def read(self, socket: Socket, until: float) -> None:
        """What has come to a socket."""
        stream = socket.zmq
        with contextlib.suppress(zmq.Again):
            while self._sockets.reads(socket) and time.monotonic() < until:
                first = stream.recv(zmq.NOBLOCK)
                channel = socket.channels.get(first if socket.is_router else b"")
                if channel is not None:
                    self._reader.take(channel, stream.recv(zmq.NOBLOCK) if socket.is_router else first)
                elif socket.is_router:
                    if (welcome := self.doorman.hear(socket, first)) is not None:
                        self._let_in(*welcome)
                else:
                    self._dialler.hear(socket, first)

    # -- who has connected ----------------------------------------------------------------------------------------------

    def admit(self, worker: Identity) -> str:
        """Why a worker that has proven itself is refused; empty: it is welcome."""
        mine = self._identity.rank
        if self._joins(worker) and worker.rank != mine:
            joiner = self._links.joiners.get((worker.rank, worker.incarnation))
            if joiner is not None and joiner.uid != worker.uid:
                return f"another process is about to be worker {worker.rank}"
            is_served = self._connections.requests.is_served
            return "" if is_served else f"worker {worker.rank} is not a member yet, and nobody can join now"
        if worker.rank not in self._links.expected or worker.rank == mine:
            return f"rank {worker.rank} is not expected"
        link = self._links.to(worker.rank)
        if worker.incarnation != link.incarnation:
            return REPLACED
        if link.state is LinkState.GONE:
            return f"worker {worker.rank} is gone for worker {mine}, which has dropped what they had in common"
        if link.uid not in (b"", worker.uid):
            return f"another process has been worker {worker.rank}, and the others do not know of a new one"
        if self._dialler.goes_first(worker.rank):
            is_new = link.state is LinkState.OPEN and self._clock.now() - link.since < _CROSSED
            if self._dialler.is_through(worker.rank) or is_new:
                return CROSSING
        return ""

    def _let_in(self, worker: Identity, channels: list[Channel]) -> None:
        if self._joins(worker):
            self._connections.let_join(worker.rank, worker.incarnation, worker.uid, *channels)
            return
        link = self._links.to(worker.rank)
        self._dialler.cancel(worker.rank)
        self._connections.lose(link, "replaced by the peer")  # which has seen first that the connection was lost
        self._connections.open(link, worker.uid, *channels)

    def _joins(self, worker: Identity) -> bool:
        """Whether it is of a process that is no member yet, as far as this worker knows."""
        return worker.incarnation > self._links.known(worker.rank).incarnation

    # -- heartbeats -----------------------------------------------------------------------------------------------------

    def _beat_if_due(self) -> None:
        """Once in a while: says where this worker is, and looks for the silent."""
        self._clock.look()
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + self._clock.interval
        self.doorman.look()
        now = self._clock.now()
        for channel in [channel for channel, until in self._connections.lingering.items() if now >= until]:
            self._reader.lose(channel)
        for link in list(self._links.by_rank.values()):
            self._links.beat(link)
            self.judge(link, now)

    def judge(self, link: PeerLink, now: float) -> None:
        dead_after, brought = self._links.dead_after, max(link.lane.moved, link.since, link.says.busy)
        if link.state is LinkState.OPEN and link.votes.pairs and link.lane.pace.due and now - brought > dead_after:
            # The control connection lives, and the peer neither sends what it has offered nor moves an earlier exchange.
            self._connections.lose(link, f"it has brought nothing for {dead_after:g} s")
        if link.state is LinkState.BROKEN and link.silence(now) > dead_after:
            self._connections.expire(link)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _is_drained(self) -> bool:
        """All peers have answered this worker's BYE, so they have received everything before it."""
        assert self._closing is not None
        if time.monotonic() > self._closing:
            return True
        waits = [link for link in self._links.by_rank.values() if link.state is LinkState.OPEN and not link.says.left]
        return not (self._commands or waits)

    def _fail_all(self) -> None:
        over: Exception = ConnectionError("the transport was closed")
        if self._commands.error is not None:
            over = self._commands.is_over()
            over.__cause__ = self._commands.error
        self._connections.control_plane.close(self._commands.error)
        self._connections.requests.close()
        self._dialler.close()
        for link in self._links.by_rank.values():
            if link.state is LinkState.OPEN:  # what is on its way there goes out, unlike memory that is lent to libzmq
                self._connections.lingering.setdefault(link.channels[CONTROL], math.inf)
            self._connections.fail(link, over)
