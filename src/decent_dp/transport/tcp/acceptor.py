"""Accepts connections, and greets who made them (``greeting``) before they reach anything else."""

from __future__ import annotations

import contextlib
import functools
import logging
import selectors
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decent_dp.transport.communicators import OUT_OF_DESCRIPTORS
from decent_dp.transport.tcp.connection import LOCAL
from decent_dp.transport.tcp.descriptors import own
from decent_dp.transport.tcp.greeting import Greeting, Identity

__all__ = ["Acceptor"]

_log = logging.getLogger(__name__)

# Seconds for which nobody is accepted when there is no file descriptor, or no place for a connection without a greeting.
_ACCEPT_AGAIN = 0.2
# Seconds in which a connection must have greeted, and how many may be without a greeting. The others wait in the listener's
# queue, and while they do, a connection keeps its place for ``_SHARE_SECONDS`` only: 64 strangers keep nobody out for long.
_GREETING_SECONDS, _SHARE_SECONDS, _WITHOUT_GREETING = 10.0, 1.0, 64


@dataclass(frozen=True)
class _Newcomer:
    """A connection without a greeting.

    Attributes:
        source: where it comes from: an address (of IPv6 its network of 64 bits), or the user at a local socket.
        since: when it was accepted, on the monotonic clock.
    """

    greeting: Greeting
    source: bytes
    since: float


class Acceptor:
    """Used by the reactor's thread alone. What it registers at the selector has as ``data`` a function to call.

    Args:
        listeners: sockets to which others connect.
        selector: the reactor's.
        identity: this worker's.
        secret: known to the workers of the run alone.
        admit: why a worker of this run that has greeted is refused; None: it is welcome.
        opened: called with a worker that is welcome and its connection.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        selector: selectors.BaseSelector,
        identity: Identity,
        secret: bytes,
        admit: Callable[[Identity], str | None],
        opened: Callable[[Identity, socket.socket], None],
    ) -> None:
        self._selector, self._identity, self._secret = selector, identity, secret
        self._admit, self._opened = admit, opened
        # The listeners that are paused, and until when; in the beginning all, until the first look.
        self._accept_again = dict.fromkeys(listeners, 0.0)
        self._newcomers: dict[socket.socket, _Newcomer] = {}  # the oldest first
        self._warned: set[str] = set()

    def look(self) -> float | None:
        """Looks at the deadlines. Returns the seconds until the next look; None: when something comes."""
        now = time.monotonic()
        for listener, at in list(self._accept_again.items()):
            if now >= at:
                del self._accept_again[listener]
                self._selector.register(listener, selectors.EVENT_READ, functools.partial(self._accept, listener))
        for stream, newcomer in list(self._newcomers.items()):
            if now >= newcomer.since + _GREETING_SECONDS:
                self._drop(stream)
        return _ACCEPT_AGAIN if self._accept_again or self._newcomers else None

    def _pause(self, listener: socket.socket) -> None:
        """Accepts nobody for a while. The newcomer stays in the listener's queue, and the selector would report it again."""
        self._selector.unregister(listener)
        self._accept_again[listener] = time.monotonic() + _ACCEPT_AGAIN

    def _accept(self, listener: socket.socket) -> None:
        if not self._make_room():
            self._pause(listener)
            return
        try:
            stream = own(lambda: listener.accept()[0])
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                self._warn_once("a connection of another worker cannot be accepted yet: %s", error)
                self._pause(listener)
            return
        try:
            stream.setblocking(False)
            newcomer = _Newcomer(Greeting(self._identity, self._secret), _source_of(stream), time.monotonic())
            stream.send(newcomer.greeting.challenge)
        except OSError:
            stream.close()  # gone already
            return
        self._newcomers[stream] = newcomer
        self._selector.register(stream, selectors.EVENT_READ, functools.partial(self._read, stream))

    def _make_room(self) -> bool:
        """Whether there is a place, or the oldest connection of the source that has most places could be dropped."""
        if len(self._newcomers) < _WITHOUT_GREETING:
            return True
        ((greediest, _),) = Counter(newcomer.source for newcomer in self._newcomers.values()).most_common(1)
        stream, oldest = next(item for item in self._newcomers.items() if item[1].source == greediest)
        if time.monotonic() < oldest.since + _SHARE_SECONDS:
            return False
        self._drop(stream)
        return True

    def _read(self, stream: socket.socket) -> None:
        newcomer = self._newcomers.get(stream)
        if newcomer is None:  # dropped after the selector had reported it
            return
        part = b""
        try:
            part = stream.recv(newcomer.greeting.missing)
        except BlockingIOError:
            return
        except OSError:
            pass
        newcomer.greeting.feed(part)
        if not part:
            self._drop(stream)
        elif not newcomer.greeting.missing:
            self._answer(stream, newcomer.greeting)

    def _answer(self, stream: socket.socket, greeting: Greeting) -> None:
        worker = greeting.verify()
        if worker is None:
            self._warn_once(
                "a connection was closed because it did not greet as a worker of this run does: see which machines reach the "
                "ports of its workers (docs/security.md). More of them are not logged."
            )
            self._drop(stream)
            return
        del self._newcomers[stream]
        self._selector.unregister(stream)
        refusal = self._admit(worker)
        if refusal is not None:
            _log.debug("a connection of worker %d was refused: %s", worker.rank, refusal)
        with contextlib.suppress(OSError):  # one that is gone again is found so by the first read
            stream.send(greeting.answer(refusal))
        if refusal is None:
            self._opened(worker, stream)
        else:
            stream.close()

    def _drop(self, stream: socket.socket) -> None:
        """Closes a stranger's connection, without a word."""
        del self._newcomers[stream]
        self._selector.unregister(stream)
        stream.close()

    def _warn_once(self, text: str, *details: object) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, *details)


def _source_of(stream: socket.socket) -> bytes:
    """Raises OSError if the other end is gone."""
    if stream.family == LOCAL:  # on Linux alone (``addresses``)
        _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return b"%d" % user
    host = stream.getpeername()[0].partition("%")[0]
    return socket.inet_pton(stream.family, host)[:8]
