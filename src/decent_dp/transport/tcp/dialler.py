"""Makes connections beside the training: those that were lost, or are silent, and those that were not made ahead."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Callable
from functools import partial

from decent_dp.transport.communicators import GreetingError
from decent_dp.transport.tcp.connection import Connection, LinkState
from decent_dp.transport.tcp.framing import Framing
from decent_dp.transport.tcp.greeting import Identity, ReplacedError, greet
from decent_dp.transport.waiter import start_thread

__all__ = ["Dialler"]

_log = logging.getLogger(__name__)

# Seconds between two tries: few at first, as the sockets of a process that is killed do not all close at once.
_FIRST, _LAST = 0.02, 0.5
# The part of ``dead_after`` after which a worker counts as dead at whose address nobody listens any more.
_ENDED = 0.3


class Dialler:
    """Dials in threads of their own. All else is for the reactor's thread.

    One of two workers makes the connection (``greeting``). The other one greets, too, and is refused, so that the first one
    learns that a connection is needed. If nobody listens, the peer's process has ended.

    Args:
        identity, secret: for the greeting.
        dial: connects to a worker, blocking, and returns a stream socket.
        call: runs a function in the reactor's thread.
        timeout: seconds that a worker has to greet this one.
        dials: whether this worker makes the connection to another one.
        is_silent: whether a connected worker gives no signs of life.
        failed: ends this worker with an error of another thread.

    Attributes:
        replaced: another process is this worker by now.
    """

    def __init__(
        self,
        framing: Framing,
        identity: Identity,
        secret: bytes,
        dial: Callable[[int], socket.socket],
        call: Callable[[Callable[[], None]], None],
        timeout: float,
        dials: Callable[[int], bool],
        is_silent: Callable[[Connection], bool],
        failed: Callable[[Exception], None],
    ) -> None:
        self._dials, self._on_error = dials, failed
        self.replaced = False
        self._framing, self._identity, self._secret = framing, identity, secret
        self._dial, self._call, self._timeout, self._is_silent = dial, call, timeout, is_silent
        # When each peer is dialled next; infinite while it is being dialled.
        self._due: dict[int, float] = {}
        self._pauses: dict[int, float] = {}

    def want(self, peer: int) -> None:
        """A connection is needed. It is tried until it is there, or the peer is gone."""
        self._framing.connection(peer)
        self._due.setdefault(peer, 0.0)

    def look(self) -> float:
        """Dials whom it is time to dial. Returns when to look again, on the monotonic clock; infinite: when something comes."""
        for peer, due in list(self._due.items()):
            if not self._needed(self._framing.connection(peer)):
                del self._due[peer]
                self._pauses.pop(peer, None)
            elif time.monotonic() >= due:
                self._due[peer] = math.inf
                # A thread for each, as one that cannot be reached takes long.
                if not start_thread(partial(self._try, peer), "decent_dp-dial", self._on_error):
                    self._try_again(peer)
        return min(self._due.values(), default=math.inf)

    def _needed(self, connection: Connection) -> bool:
        """Whether there is no connection, or it may be one that only this end has kept."""
        return connection.state is not LinkState.GONE and (
            connection.state is not LinkState.OPEN or self._is_silent(connection)
        )

    def _try(self, peer: int) -> None:
        outcome: Callable[[], None]
        stream = None
        try:
            stream = self._dial(peer)
            try:
                other = greet(stream, self._identity, self._secret, peer, self._timeout)
                outcome = partial(self._connected, peer, stream, other)
            except (GreetingError, TimeoutError) as error:
                if self._dials(peer) or isinstance(error, ReplacedError):
                    raise
                stream.close()
                outcome = partial(self._try_again, peer)
        except (OSError, RuntimeError) as error:
            if stream is not None:
                stream.close()
            self.replaced |= isinstance(error, ReplacedError)
            _log.debug("worker %d cannot be reached: %s", peer, error)
            outcome = partial(self._failed, peer, refused=isinstance(error.__cause__ or error, ConnectionRefusedError))
        try:
            self._call(outcome)
        except RuntimeError:  # the transport was closed in the meantime
            if stream is not None:
                stream.close()

    def _try_again(self, peer: int) -> None:
        self._pauses[peer] = min(2 * self._pauses.get(peer, _FIRST / 2), _LAST)
        self._due[peer] = time.monotonic() + self._pauses[peer]

    def _failed(self, peer: int, refused: bool) -> None:
        connection = self._framing.connection(peer)
        self._try_again(peer)
        if connection.state is LinkState.OPEN and not refused:
            return
        if refused and connection.link.local:
            self._framing.give_up(connection, "nobody listens at its address")
        elif refused and connection.state is LinkState.BROKEN:
            # Its process has ended, or a firewall answers in its place: it counts as dead sooner than one that is silent.
            if not connection.refused:
                ago = (1 - _ENDED) * (self._framing.dead_after or 0.0)
                connection.heard = min(connection.heard, time.monotonic() - ago)
            connection.refused = True
        elif connection.state is LinkState.NEW:
            connection.enter(LinkState.BROKEN)
            connection.heard = connection.since

    def _connected(self, peer: int, stream: socket.socket, other: Identity) -> None:
        connection = self._framing.connection(peer)
        self._due[peer] = time.monotonic() + _LAST  # if this one is lost at once
        is_same = connection.uid in (b"", other.uid) and connection.incarnation == other.incarnation
        if not (self._needed(connection) and is_same):
            stream.close()
            return
        if connection.state is LinkState.OPEN:
            self._framing.lose(connection, "replaced")
        self._framing.open(peer, stream, other.uid)
