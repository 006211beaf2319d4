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
from decent_dp.transport.hello import CROSSING, REPLACED, Credentials, Dialled, RefusedError
from decent_dp.transport.messages import BULK, CONTROL, HELLO, REFUSED, pack, unpack
from decent_dp.transport.peer_errors import GreetingError, UnreachableError
from decent_dp.transport.peer_links import LinkState, PeerLink
from decent_dp.transport.sockets import Channel, Event, Socket, Sockets, rest_of

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
class _Wanted:
    """A peer to which a connection is needed.

    Attributes:
        since: when it was first, on the clock of the links.
        due: when it is dialled next, on the monotonic clock; infinite while it is being dialled.
        pause: seconds between the last two tries.
        ends: both connections of the try that goes on; ``deadline``: of it; ``where``: the peer listens, for errors.
    """

    link: PeerLink
    since: float
    due: float
    pause: float = _FIRST / 2
    ends: dict[Channel, Dialled] = field(default_factory=dict)
    deadline: float = math.inf
    where: str = ""

    @property
    def peer(self) -> int:
        return self.link.peer

    @property
    def is_over(self) -> bool:
        return self.link.is_connected or self.link.state is LinkState.GONE

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
        find: Callable[[int, int], Target],
        timeout: float,
    ) -> None:
        self._credentials, self._sockets, self._commands = credentials, sockets, commands
        self._connections, self._links, self._find = connections, connections.links, find
        self._timeout = min(timeout, sockets.dead_after)
        self._wanted: dict[int, _Wanted] = {}

    def goes_first(self, peer: int) -> bool:
        """Whether this worker dials another one at once, and not only if that one has not."""
        own = self._credentials.identity
        return (self._links.known(peer).incarnation, peer) < (own.incarnation, own.rank)

    def is_through(self, peer: int) -> bool:
        """Whether the peer has answered an attempt that goes on."""
        ends = self._wanted[peer].ends if peer in self._wanted else {}
        return bool(ends) and all(dialled.challenged for dialled in ends.values())

    def look(self) -> float:
        """Dials whom it is time to dial. Returns when to look again, on the monotonic clock; infinite: when something comes."""
        now = time.monotonic()
        for peer in [peer for peer, wanted in self._wanted.items() if wanted.link is not self._links.to(peer)]:
            self.cancel(peer)  # another process is this peer now
            del self._wanted[peer]
        lost = {link.peer for link in self._links.by_rank.values() if link.state is LinkState.BROKEN}
        for peer in (self._links.needed | lost) - self._wanted.keys():
            link = self._links.to(peer)
            waits = link.state is LinkState.NEW and not self.goes_first(peer)
            self._wanted[peer] = _Wanted(link, self._links.clock.now(), now + _OTHER_FIRST if waits else 0.0)
        self._links.needed.clear()
        for peer, wanted in list(self._wanted.items()):
            if now >= wanted.deadline:
                where = f" at {wanted.where}" if wanted.where else ""
                is_half = any(dialled.challenged for dialled in wanted.ends.values())
                why = "only one of its two ports does: see the firewall (DECENT_DP_PORTS)" if is_half else "it may be stopped"
                self._fail(wanted, GreetingError(f"worker {peer} has not answered{where} in time, {why}"))
            if wanted.is_over:
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
        try:
            return partial(self._dial, wanted, self._find(wanted.peer, wanted.link.incarnation))
        except (OSError, RuntimeError) as error:
            return partial(self._fail, wanted, error)

    def _dial(self, wanted: _Wanted, target: Target) -> None:
        peer, link = wanted.peer, wanted.link
        if self._wanted.get(peer) is not wanted or wanted.ends:
            return  # there has been a connection since then
        # The peer still listens, and dials; if its process ends, that is noticed at once.
        is_new = self._links.clock.now() < link.since + _OTHER_FIRST
        if wanted.is_over or (link.state is LinkState.BROKEN and not self.goes_first(peer) and is_new):
            wanted.try_again()
            return
        wanted.due, wanted.deadline, wanted.where = math.inf, time.monotonic() + self._timeout, target.where
        name = secrets.token_bytes(16)  # never twice: of two connections with one routing id the second is ignored
        mine = self._credentials
        curve = mine.curve if target.key else None
        keys = mine.curve.public + target.key if curve else b""
        try:
            # Heartbeats wait behind data of their connection: they go where there are none.
            for plane, endpoint, beats in ((CONTROL, target.control, True), (BULK, target.bulk, False)):
                socket = self._sockets.dial(endpoint, name + bytes([plane]), curve, target.key, beats=beats)
                wanted.ends[Channel(socket, plane)] = Dialled(mine.identity, mine.secret, peer, plane, name, keys)
                self._sockets.watch(socket)
        except OSError as error:
            self._fail(wanted, error)

    # -- what happens to an attempt -------------------------------------------------------------------------------------

    def on_event(self, socket: Socket, event: Event) -> None:
        for wanted, channel in self._attempts(socket):
            if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                socket.zmq.get(zmq.EVENTS)  # else a socket looks for new connections once in a millisecond
                channel.send(pack(HELLO, flags=1), wanted.ends[channel].hello)
            elif event.is_end:
                why = "the connection has ended (it may have another key)"
                if event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    why = "it does not accept the key of this worker"
                self._fail(wanted, GreetingError(f"worker {wanted.peer} cannot be greeted: {why}"))

    def hear(self, socket: Socket, first: bytes) -> None:
        """A message has come; ``first``: its first frame."""
        body = rest_of(socket.zmq)
        for wanted, channel in self._attempts(socket):
            dialled = wanted.ends[channel]
            try:
                header = unpack(first, wanted.peer)
                if header.kind == HELLO and header.flags == 2:
                    channel.send(pack(HELLO, flags=3), dialled.prove(body))
                elif (header.kind == HELLO and header.flags == 4) or header.kind == REFUSED:
                    dialled.accept(body)
                    self._sockets.pause(socket)  # what follows is for an open link
                    if all(dialled.welcome is not None for dialled in wanted.ends.values()):
                        self._open(wanted)
            except GreetingError as error:
                self._fail(wanted, error)
            except WireError as error:  # something else than a worker of this version answers
                self._fail(wanted, GreetingError(str(error)))

    def _attempts(self, socket: Socket) -> list[tuple[_Wanted, Channel]]:
        """The attempt that a socket is of; none: it is over."""
        found = ((wanted, channel) for wanted in self._wanted.values() for channel in wanted.ends)
        return [(wanted, channel) for wanted, channel in found if channel.socket is socket]

    def _open(self, wanted: _Wanted) -> None:
        peer, link = wanted.peer, wanted.link
        [other, *others] = {dialled.welcome for dialled in wanted.ends.values() if dialled.welcome is not None}
        if others:
            raise GreetingError(f"two processes answer at the address of worker {peer}")
        if wanted.is_over or link.uid not in (b"", other.uid) or link.incarnation != other.incarnation:
            self.cancel(peer)
            return
        channels, wanted.ends = wanted.ends, {}
        self.cancel(peer)
        # A process that has joined, or wants to, may be no member for the other one yet.
        joins = self._credentials.identity.incarnation > 0
        self._connections.open(link, other.uid, *channels, joins=joins)

    def cancel(self, peer: int) -> None:
        """Ends the attempt: there is a connection, which may be lost at once."""
        if peer in self._wanted:
            wanted = self._wanted[peer]
            channels, wanted.ends, wanted.deadline = wanted.ends, {}, math.inf
            wanted.due = time.monotonic() + _LAST
            self._sockets.close(*(channel.socket for channel in channels))

    def close(self) -> None:
        for peer in self._wanted:
            self.cancel(peer)

    def _fail(self, wanted: _Wanted, error: Exception) -> None:
        """There is no connection this time."""
        peer, link = wanted.peer, wanted.link
        if self._wanted.get(peer) is not wanted:
            return  # there has been one since then
        self.cancel(peer)
        reason = error.reason if isinstance(error, RefusedError) else ""
        self._connections.replaced |= reason == REPLACED
        _log.debug("worker %d cannot be reached: %s", peer, error)
        wanted.try_again()
        if wanted.is_over or reason == CROSSING:
            return
        was_refused, link.why = link.refused, error if isinstance(error, OSError) else ConnectionError(str(error))
        is_refused = isinstance(error, UnreachableError) and error.is_refused
        if not link.uid or is_refused or reason == REPLACED:  # else it is made again soon
            self._connections.requests.fail(link)
        if is_refused and link.lane.network.local:
            self._connections.give_up(link, "nobody listens at its address")
            return
        is_greeting = isinstance(error, (GreetingError, TimeoutError))
        if link.state is LinkState.NEW and (
            # Where a greeting fails, the peer may get through itself, if it needs this worker, too, by now.
            not is_greeting or self.goes_first(peer) or link.clock.now() - wanted.since >= self._timeout
        ):
            link.enter(LinkState.BROKEN)
            link.heard = wanted.since
        if link.refused and not was_refused:
            # Its process has ended, or a firewall answers in its place: it counts as dead sooner than one that is silent.
            link.heard = min(link.heard, link.clock.now() - (1 - _ENDED) * self._sockets.dead_after)
