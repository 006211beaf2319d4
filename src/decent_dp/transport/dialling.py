"""Opens connections to peers in the background, and reopens lost ones."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import zmq

from decent_dp.errors import WireError
from decent_dp.transport.commands import Commands
from decent_dp.transport.connections import Connections
from decent_dp.transport.hello import BULK, CONTROL, Credentials, CrossingError, Dialled, Identity, ReplacedError
from decent_dp.transport.messages import HELLO, REFUSED, pack, unpack
from decent_dp.transport.peer_errors import GreetingError, UnreachableError
from decent_dp.transport.peer_link import Channel, LinkState
from decent_dp.transport.polling import Polling
from decent_dp.transport.sockets import Event, Socket, Sockets, rest_of

__all__ = ["Dialler", "Target"]

_log = logging.getLogger(__name__)

# Seconds between two tries at first: few, as the sockets of a process that is killed do not all close at once.
_FIRST = 0.02
# Seconds between two tries at most: each costs a thread and a probe.
_LAST = 0.5
# Of two workers that want a connection one dials at once. Seconds until the other one dials, too: it may be the one that gets
# through, where a firewall is between them.
_OTHER_FIRST = 0.5
# The part of ``dead_after`` after which a worker counts as dead at whose address nobody listens any more.
_ENDED = 0.3


@dataclass(frozen=True)
class Target:
    """Where a worker listens.

    Attributes:
        control, bulk: its endpoints, for ZeroMQ.
        key: its public key; empty: connections there are not encrypted.
        where: its address and port, for errors; empty for a local socket.
    """

    control: str
    bulk: str
    key: bytes = b""
    where: str = ""


@dataclass(eq=False)
class _End:
    """One connection of an attempt.

    Attributes:
        challenged: the peer has answered the first message, so this port of it can be reached.
        welcome: the identity of the peer that has accepted it; None before.
    """

    channel: Channel
    dialled: Dialled
    attempt: _Attempt
    challenged: bool = False
    welcome: Identity | None = None


@dataclass(eq=False)
class _Attempt:
    """One try to open the connections to a peer.

    Attributes:
        deadline: on the monotonic clock.
        ends: one for each connection.
    """

    peer: int
    target: Target
    deadline: float
    ends: list[_End] = field(default_factory=list)
    over: bool = False


class Dialler:
    """Looks addresses up in threads of their own. All else is for the transport's thread.

    Args:
        find: returns where a process of a worker listens, by its rank and incarnation, if somebody does; blocking.
        timeout: seconds that a worker has to answer, if it does not count as dead before.
    """

    def __init__(
        self,
        credentials: Credentials,
        sockets: Sockets,
        commands: Commands,
        connections: Connections,
        polling: Polling,
        find: Callable[[int, int], Target],
        timeout: float,
    ) -> None:
        self._credentials, self._sockets, self._commands = credentials, sockets, commands
        self._connections, self._links = connections, connections.links
        self._polling, self._find = polling, find
        self._timeout = min(timeout, sockets.dead_after)
        # When each peer is dialled next; infinite while it is being dialled.
        self._due: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._wanted_at: dict[int, float] = {}
        self._attempts: dict[int, _Attempt] = {}
        self._ends: dict[Socket, _End] = {}

    def goes_first(self, peer: int) -> bool:
        """Whether this worker dials another one at once, and not only if that one has not."""
        own = self._credentials.identity
        return (self._links.known(peer).incarnation, peer) < (own.incarnation, own.rank)

    def want(self, peer: int) -> None:
        """A connection is needed. It is tried until it is there, or the peer is gone."""
        now, waits = time.monotonic(), self._links.to(peer).state is LinkState.NEW and not self.goes_first(peer)
        self._wanted_at.setdefault(peer, now)
        self._due.setdefault(peer, now + _OTHER_FIRST if waits else 0.0)

    def look(self) -> float:
        """Dials whom it is time to dial. Returns when to look again, on the monotonic clock; infinite: when something comes."""
        now = time.monotonic()
        for attempt in list(self._attempts.values()):
            if now >= attempt.deadline:
                where = f" at {attempt.target.where}" if attempt.target.where else ""
                ports = [end for end in attempt.ends if end.challenged]
                why = "only one of its two ports does: see the firewall (DECENT_DP_PORTS)" if ports else "it may be stopped"
                self._end(attempt, GreetingError(f"worker {attempt.peer} has not answered{where} in time, {why}"))
        for peer, due in list(self._due.items()):
            link = self._links.to(peer)
            if link.is_connected or link.state is LinkState.GONE:
                self._forget(peer)
            elif now >= due:
                self._due[peer] = math.inf
                # A thread for each, as one that cannot be reached takes long.
                if not self._commands.look_up(partial(self._look_up, peer), lambda outcome: outcome(), "decent_dp-dial"):
                    self._try_again(peer)
        deadlines = (attempt.deadline for attempt in self._attempts.values())
        return min([*self._due.values(), *deadlines], default=math.inf)

    def _forget(self, peer: int) -> None:
        del self._due[peer]
        self._pauses.pop(peer, None)
        self._wanted_at.pop(peer, None)
        self.cancel(peer)

    def _look_up(self, peer: int) -> Callable[[], None]:
        """Returns what is to be done then in the transport's thread."""
        incarnation = self._links.to(peer).incarnation
        try:
            return partial(self._dial, peer, incarnation, self._find(peer, incarnation))
        except (OSError, RuntimeError) as error:
            return partial(self._failed, peer, error)

    def _dial(self, peer: int, incarnation: int, target: Target) -> None:
        link = self._links.to(peer)
        if link.is_connected or link.state is LinkState.GONE or link.incarnation != incarnation:
            self._try_again(peer)
            return
        if link.state is LinkState.BROKEN and not self.goes_first(peer) and time.monotonic() < link.since + _OTHER_FIRST:
            self._try_again(peer)  # the peer still listens, and dials; if its process ends, that is noticed at once
            return
        self._attempts[peer] = _Attempt(peer, target, time.monotonic() + self._timeout)
        self._start(self._attempts[peer])

    def _start(self, attempt: _Attempt) -> None:
        name = secrets.token_bytes(16)  # never twice: of two connections with one routing id the second is ignored
        mine = self._credentials
        curve = mine.curve if attempt.target.key else None
        keys = mine.curve.public + attempt.target.key if curve else b""
        try:
            for plane in (CONTROL, BULK):
                # Heartbeats wait behind data of their connection: they go where there are none.
                beats = plane == CONTROL
                endpoint = attempt.target.control if beats else attempt.target.bulk
                socket = self._sockets.dial(endpoint, name + bytes([plane]), curve, attempt.target.key, beats=beats)
                dialled = Dialled(mine.identity, mine.secret, attempt.peer, plane, name, keys)
                self._ends[socket] = _End(Channel(socket, plane), dialled, attempt)
                attempt.ends.append(self._ends[socket])
                self._polling.watch(socket)
        except OSError as error:
            self._end(attempt, error)

    # -- what happens to an attempt -------------------------------------------------------------------------------------

    def on_event(self, socket: Socket, event: Event) -> None:
        end = self._ends.get(socket)
        if end is None:
            return
        if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            end.channel.socket.zmq.get(zmq.EVENTS)  # else a socket looks for new connections once in a millisecond
            end.channel.send(pack(HELLO, flags=1), end.dialled.hello)
        elif event.is_end:
            failed = event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH
            what = (
                "it does not accept the key of this worker" if failed else "the connection has ended (it may have another key)"
            )
            self._end(end.attempt, GreetingError(f"worker {end.attempt.peer} cannot be greeted: {what}"))

    def hear(self, socket: Socket, first: bytes) -> None:
        """A message has come; ``first``: its first frame."""
        end, body = self._ends.get(socket), rest_of(socket.zmq)
        if end is None:
            return
        attempt = end.attempt
        try:
            header = unpack(first, attempt.peer)
            if header.kind == HELLO and header.flags == 2:
                end.channel.send(pack(HELLO, flags=3), end.dialled.prove(body))
                end.challenged = True
            elif (header.kind == HELLO and header.flags == 4) or header.kind == REFUSED:
                end.welcome = end.dialled.accept(body)
                self._polling.pause(socket)  # what follows is for an open link
                if all(other.welcome is not None for other in attempt.ends):
                    self._open(attempt)
        except GreetingError as error:
            self._end(attempt, error)
        except WireError as error:  # something else than a worker of this version answers
            self._end(attempt, GreetingError(str(error)))

    def _open(self, attempt: _Attempt) -> None:
        [identity, *others] = {end.welcome for end in attempt.ends if end.welcome is not None}
        if others:
            self._end(attempt, GreetingError(f"two processes answer at the address of worker {attempt.peer}"))
            return
        self._over(attempt)
        channels = [end.channel for end in attempt.ends]
        self._connected(attempt.peer, identity, channels)
        for channel in channels:
            self._polling.resume(channel)

    def _over(self, attempt: _Attempt) -> None:
        attempt.over = True
        for end in attempt.ends:
            self._ends.pop(end.channel.socket, None)
        if self._attempts.get(attempt.peer) is attempt:
            del self._attempts[attempt.peer]

    def _end(self, attempt: _Attempt, error: Exception | None) -> None:
        if attempt.over:
            return
        self._over(attempt)
        for end in attempt.ends:
            self._polling.forget(end.channel.socket)
        if error is not None:
            self._failed(attempt.peer, error)

    def cancel(self, peer: int) -> None:
        """Ends the attempt: the peer has opened a connection itself."""
        if peer in self._attempts:
            self._end(self._attempts[peer], None)

    def is_through(self, peer: int) -> bool:
        """Whether the peer has answered an attempt that goes on."""
        return peer in self._attempts and all(end.challenged for end in self._attempts[peer].ends)

    def close(self) -> None:
        for attempt in list(self._attempts.values()):
            self._end(attempt, ConnectionError("the transport was closed"))

    # -- the outcome ------------------------------------------------------------------------------------------------------

    def _connected(self, peer: int, other: Identity, channels: list[Channel]) -> None:
        link = self._links.to(peer)
        self._due[peer] = time.monotonic() + _LAST  # if this one is lost at once
        is_same = link.uid in (b"", other.uid) and link.incarnation == other.incarnation
        if link.is_connected or link.state is LinkState.GONE or not is_same:
            for channel in channels:
                self._polling.forget(channel.socket)
            return
        # A process that has joined, or wants to, may be no member for the other one yet.
        open_ = self._connections.open_joining if self._credentials.identity.incarnation else self._connections.open
        open_(link, other.uid, *channels)

    def _try_again(self, peer: int) -> None:
        self._pauses[peer] = min(2 * self._pauses.get(peer, _FIRST / 2), _LAST)
        self._due[peer] = time.monotonic() + self._pauses[peer]

    def _failed(self, peer: int, error: Exception) -> None:
        link = self._links.to(peer)
        self._connections.replaced |= isinstance(error, ReplacedError)
        _log.debug("worker %d cannot be reached: %s", peer, error)
        self._try_again(peer)
        if link.is_connected or link.state is LinkState.GONE or isinstance(error, CrossingError):
            return
        link.why = error if isinstance(error, OSError) else ConnectionError(str(error))
        is_refused = isinstance(error, UnreachableError) and error.is_refused
        if not link.uid or is_refused or isinstance(error, ReplacedError):  # else it is made again soon
            link.fail_questions()
        is_greeting = isinstance(error, (GreetingError, TimeoutError))
        if is_refused and link.network.local:
            self._connections.give_up(link, "nobody listens at its address")
        elif is_refused and link.state is LinkState.BROKEN:
            # Its process has ended, or a firewall answers in its place: it counts as dead sooner than one that is silent.
            if not link.refused:
                ago = (1 - _ENDED) * self._sockets.dead_after
                link.heard = min(link.heard, time.monotonic() - ago)
            link.refused = True
        elif link.state is LinkState.NEW:
            wanted_at = self._wanted_at.get(peer, link.since)
            # Where a greeting fails, the peer may get through itself, if it needs this worker, too, by now.
            if not is_greeting or self.goes_first(peer) or time.monotonic() - wanted_at >= self._timeout:
                link.enter(LinkState.BROKEN)
                link.heard = wanted_at
