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
    wanted: _Wanted
    challenged: bool = False
    welcome: Identity | None = None


@dataclass(eq=False)
class _Wanted:
    """A peer to which a connection is needed.

    Attributes:
        since: when it was first.
        due: when it is dialled next; infinite while it is being dialled.
        pause: seconds between the last two tries.
        ends: both connections of the try that goes on; ``deadline``: of it; ``where``: the peer listens, for errors.
    """

    peer: int
    since: float
    due: float
    pause: float = _FIRST / 2
    ends: list[_End] = field(default_factory=list)
    deadline: float = math.inf
    where: str = ""

    def try_again(self) -> None:
        self.pause = min(2 * self.pause, _LAST)
        self.due = time.monotonic() + self.pause


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
        self._wanted: dict[int, _Wanted] = {}
        self._ends: dict[Socket, _End] = {}

    def goes_first(self, peer: int) -> bool:
        """Whether this worker dials another one at once, and not only if that one has not."""
        own = self._credentials.identity
        return (self._links.known(peer).incarnation, peer) < (own.incarnation, own.rank)

    def want(self, peer: int) -> None:
        """A connection is needed. It is tried until it is there, or the peer is gone."""
        if peer not in self._wanted:
            now, waits = time.monotonic(), self._links.to(peer).state is LinkState.NEW and not self.goes_first(peer)
            self._wanted[peer] = _Wanted(peer, now, now + _OTHER_FIRST if waits else 0.0)

    def look(self) -> float:
        """Dials whom it is time to dial. Returns when to look again, on the monotonic clock; infinite: when something comes."""
        now = time.monotonic()
        for peer, wanted in list(self._wanted.items()):
            link = self._links.to(peer)
            if now >= wanted.deadline:
                where = f" at {wanted.where}" if wanted.where else ""
                is_half = any(end.challenged for end in wanted.ends)
                why = "only one of its two ports does: see the firewall (DECENT_DP_PORTS)" if is_half else "it may be stopped"
                self._fail(wanted, GreetingError(f"worker {peer} has not answered{where} in time, {why}"))
            if link.is_connected or link.state is LinkState.GONE:
                self.cancel(peer)
                del self._wanted[peer]
            elif now >= wanted.due:
                wanted.due = math.inf
                # A thread for each, as one that cannot be reached takes long.
                if not self._commands.look_up(partial(self._look_up, wanted), lambda outcome: outcome(), "decent_dp-dial"):
                    wanted.try_again()
        return min((min(wanted.due, wanted.deadline) for wanted in self._wanted.values()), default=math.inf)

    def _look_up(self, wanted: _Wanted) -> Callable[[], None]:
        """Returns what is to be done then in the transport's thread."""
        incarnation = self._links.known(wanted.peer).incarnation
        try:
            return partial(self._dial, wanted, incarnation, self._find(wanted.peer, incarnation))
        except (OSError, RuntimeError) as error:
            return partial(self._fail, wanted, error)

    def _dial(self, wanted: _Wanted, incarnation: int, target: Target) -> None:
        peer, link = wanted.peer, self._links.to(wanted.peer)
        if self._wanted.get(peer) is not wanted:
            return  # there has been a connection since then
        # The peer still listens, and dials; if its process ends, that is noticed at once.
        leaves = link.state is LinkState.BROKEN and not self.goes_first(peer) and time.monotonic() < link.since + _OTHER_FIRST
        if leaves or link.is_connected or link.state is LinkState.GONE or link.incarnation != incarnation:
            wanted.try_again()
            return
        wanted.deadline, wanted.where = time.monotonic() + self._timeout, target.where
        name = secrets.token_bytes(16)  # never twice: of two connections with one routing id the second is ignored
        mine = self._credentials
        curve = mine.curve if target.key else None
        keys = mine.curve.public + target.key if curve else b""
        try:
            # Heartbeats wait behind data of their connection: they go where there are none.
            for plane, endpoint, beats in ((CONTROL, target.control, True), (BULK, target.bulk, False)):
                socket = self._sockets.dial(endpoint, name + bytes([plane]), curve, target.key, beats=beats)
                dialled = Dialled(mine.identity, mine.secret, peer, plane, name, keys)
                self._ends[socket] = _End(Channel(socket, plane), dialled, wanted)
                wanted.ends.append(self._ends[socket])
                self._polling.watch(socket)
        except OSError as error:
            self._fail(wanted, error)

    # -- what happens to an attempt -------------------------------------------------------------------------------------

    def on_event(self, socket: Socket, event: Event) -> None:
        end = self._ends.get(socket)
        if end is None:
            return
        if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            end.channel.socket.zmq.get(zmq.EVENTS)  # else a socket looks for new connections once in a millisecond
            end.channel.send(pack(HELLO, flags=1), end.dialled.hello)
        elif event.is_end:
            why = "the connection has ended (it may have another key)"
            if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                why = "it does not accept the key of this worker"
            self._fail(end.wanted, GreetingError(f"worker {end.wanted.peer} cannot be greeted: {why}"))

    def hear(self, socket: Socket, first: bytes) -> None:
        """A message has come; ``first``: its first frame."""
        end, body = self._ends.get(socket), rest_of(socket.zmq)
        if end is None:
            return
        try:
            header = unpack(first, end.wanted.peer)
            if header.kind == HELLO and header.flags == 2:
                end.channel.send(pack(HELLO, flags=3), end.dialled.prove(body))
                end.challenged = True
            elif (header.kind == HELLO and header.flags == 4) or header.kind == REFUSED:
                end.welcome = end.dialled.accept(body)
                self._polling.pause(socket)  # what follows is for an open link
                if all(other.welcome is not None for other in end.wanted.ends):
                    self._open(end.wanted)
        except GreetingError as error:
            self._fail(end.wanted, error)
        except WireError as error:  # something else than a worker of this version answers
            self._fail(end.wanted, GreetingError(str(error)))

    def _open(self, wanted: _Wanted) -> None:
        peer, ends, link = wanted.peer, wanted.ends, self._links.to(wanted.peer)
        [other, *others] = {end.welcome for end in ends if end.welcome is not None}
        if others:
            raise GreetingError(f"two processes answer at the address of worker {peer}")
        wanted.due = time.monotonic() + _LAST  # if this one is lost at once
        is_same = link.uid in (b"", other.uid) and link.incarnation == other.incarnation
        if link.is_connected or link.state is LinkState.GONE or not is_same:
            self.cancel(peer)
            return
        self._end(wanted)
        # A process that has joined, or wants to, may be no member for the other one yet.
        open_ = self._connections.open_joining if self._credentials.identity.incarnation else self._connections.open
        open_(link, other.uid, *(end.channel for end in ends))
        for end in ends:
            self._polling.resume(end.channel)

    def _end(self, wanted: _Wanted) -> list[_End]:
        """The attempt is over."""
        ends, wanted.ends, wanted.deadline = wanted.ends, [], math.inf
        for end in ends:
            del self._ends[end.channel.socket]
        return ends

    def cancel(self, peer: int) -> None:
        """Ends the attempt: the peer has opened a connection itself."""
        if peer in self._wanted:
            for end in self._end(self._wanted[peer]):
                self._polling.forget(end.channel.socket)

    def is_through(self, peer: int) -> bool:
        """Whether the peer has answered an attempt that goes on."""
        ends = self._wanted[peer].ends if peer in self._wanted else []
        return bool(ends) and all(end.challenged for end in ends)

    def close(self) -> None:
        for peer in self._wanted:
            self.cancel(peer)

    def _fail(self, wanted: _Wanted, error: Exception) -> None:
        """There is no connection this time."""
        peer, link = wanted.peer, self._links.to(wanted.peer)
        if self._wanted.get(peer) is not wanted:
            return  # there has been one since then
        self.cancel(peer)
        self._connections.replaced |= isinstance(error, ReplacedError)
        _log.debug("worker %d cannot be reached: %s", peer, error)
        wanted.try_again()
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
                link.heard = min(link.heard, time.monotonic() - (1 - _ENDED) * self._sockets.dead_after)
            link.refused = True
        elif link.state is LinkState.NEW and (
            # Where a greeting fails, the peer may get through itself, if it needs this worker, too, by now.
            not is_greeting or self.goes_first(peer) or time.monotonic() - wanted.since >= self._timeout
        ):
            link.enter(LinkState.BROKEN)
            link.heard = wanted.since
