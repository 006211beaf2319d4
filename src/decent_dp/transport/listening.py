"""Accepts connections of workers of this run only (``hello``), and checks the public keys of encrypted ones."""

from __future__ import annotations

import contextlib
import hmac
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import zmq

from decent_dp.transport.commands import Commands
from decent_dp.transport.hello import Credentials, Identity, Visitor
from decent_dp.transport.messages import BULK, CONTROL, HEADER_BYTES, HELLO, REFUSED, pack
from decent_dp.transport.sockets import Channel, Event, Socket, Sockets

__all__ = ["Doorman"]

_log = logging.getLogger(__name__)

# Seconds in which a connection must have proven itself. On a full link a handshake takes some.
_PROVEN = 10.0
# Connections that have said hello and proven nothing, at most: each has a nonce and a channel.
_VISITORS = 1024
# All connections that have proven nothing, at most: each has a descriptor.
_STRANGERS = 4096
# Keys that are looked up at once, at most: each look-up is a thread.
_LOOKUPS = 16
# The part of this process's descriptors that strangers may have: where none is left, libzmq 4.3.5 aborts the process when
# somebody connects to a local socket.
_THEIR_PART = 1 / 4


@dataclass(eq=False)
class _Greeting:
    """A connection that has said hello."""

    visitor: Visitor
    channel: Channel
    since: float
    proven: bool = False


class Doorman:
    """Used by the transport's thread alone.

    Args:
        admit: why a worker that has proven itself is refused; empty: it is welcome.
        read_events: reads what has happened to the connections of a listener (``on_event``).

    Attributes:
        dropped: messages that were none of a worker's.
    """

    def __init__(
        self,
        credentials: Credentials,
        sockets: Sockets,
        commands: Commands,
        admit: Callable[[Identity], str],
        read_events: Callable[[Socket], None],
    ) -> None:
        self._credentials, self._sockets, self._commands = credentials, sockets, commands
        self._admit, self._read_events = admit, read_events
        # Since when a connection is there that has proven nothing. By listener and descriptor, as one may be used anew before
        # the other listener's events are read.
        self._strangers: dict[tuple[Socket, int], float] = {}
        # By routing id.
        self._greetings: dict[bytes, _Greeting] = {}
        self._lookups = 0
        self._warned = False
        self.dropped = 0

    @property
    def busy(self) -> bool:
        return bool(self._strangers or self._greetings)

    def on_event(self, socket: Socket, event: Event) -> None:
        of = socket, event.descriptor
        if event.kind == zmq.EVENT_ACCEPTED:
            self._strangers[of] = time.monotonic()
            if len(self._strangers) > _most_strangers():
                self._turn_away(next(iter(self._strangers)))
        elif event.kind == zmq.EVENT_DISCONNECTED:
            self._forget(of)
        elif event.kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._warn()

    def look(self) -> None:
        """Ends connections that have proven nothing in time."""
        late = time.monotonic() - _PROVEN
        for of in [of for of, since in self._strangers.items() if since < late]:
            self._turn_away(of)
        self._greetings = {name: greeting for name, greeting in self._greetings.items() if greeting.since >= late}

    def _forget(self, of: tuple[Socket, int]) -> bool:
        """Returns whether it was a connection that has not proven itself."""
        if self._strangers.pop(of, None) is None:
            return False
        self._greetings = {
            name: one for name, one in self._greetings.items() if (one.channel.socket, one.channel.descriptor) != of
        }
        return True

    def _turn_away(self, of: tuple[Socket, int]) -> None:
        """Ends a connection that has not proven itself, if it is one."""
        if self._forget(of):
            of[0].hang_up(of[1])
            self._warn()

    def hear(self, socket: Socket, routing_id: bytes) -> tuple[Identity, list[Channel]] | None:
        """The rest of a message from a connection that is not open is to be read. Returns a worker that is welcome, and its
        control and its bulk channel, once there are both."""
        frames: list[Any] = []
        while socket.zmq.get(zmq.RCVMORE):
            frame = socket.zmq.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < 3:  # a message of many parts is none of ours
                frames.append(frame)
        header = frames[0].bytes if frames else b""
        step = header[1] if len(frames) == 2 and len(header) == HEADER_BYTES and header[0] == HELLO else 0
        descriptor, key = -1, b""
        with contextlib.suppress(zmq.ZMQError):  # it was gone before libzmq has asked for its address
            descriptor = frames[0].get(zmq.SRCFD) if frames else -1
        of = socket, descriptor
        was_there = of in self._strangers
        self._read_events(socket)  # so far the descriptor may have been another connection's, or this one have ended
        greeting = self._greetings.get(routing_id)
        if step == 1 and greeting is None:
            if of not in self._strangers:
                return None  # it has ended already
            if socket.curve is not None:
                key = bytes.fromhex(frames[0].get("User-Id")) + socket.curve.public
            with contextlib.suppress(ValueError):
                visitor = Visitor(self._credentials.identity, self._credentials.secret, frames[1].bytes, key)
                channel = Channel(socket, visitor.plane, routing_id, descriptor)
                if len(self._greetings) >= _VISITORS:
                    del self._greetings[next(iter(self._greetings))]
                self._greetings[routing_id] = _Greeting(visitor, channel, time.monotonic())
                channel.send(pack(HELLO, flags=2), visitor.challenge)
                return None
        elif step == 3 and greeting is not None and not greeting.proven and greeting.visitor.verify(frames[1].bytes):
            return self._welcome(greeting)
        self.dropped += 1
        if was_there:  # else it may be a message that another connection has left, which had this descriptor before
            self._turn_away(of)
        return None

    def _welcome(self, greeting: _Greeting) -> tuple[Identity, list[Channel]] | None:
        worker, attempt = greeting.visitor.worker, greeting.visitor.attempt
        if refusal := self._admit(worker):
            _log.debug("a connection of worker %d was refused: %s", worker.rank, refusal)
            greeting.channel.send(pack(REFUSED), greeting.visitor.answer(refusal))
            del self._greetings[greeting.channel.routing_id]
            return None
        greeting.proven = True
        same = [one for one in self._greetings.values() if (one.visitor.worker, one.visitor.attempt) == (worker, attempt)]
        proven = {one.visitor.plane: one for one in same if one.proven}
        if len(proven) < 2:
            return None
        for one in proven.values():
            del self._greetings[one.channel.routing_id]
            self._strangers.pop((one.channel.socket, one.channel.descriptor), None)
            one.channel.send(pack(HELLO, flags=4), one.visitor.answer())
        return worker, [proven[plane].channel for plane in (CONTROL, BULK)]

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "a connection was closed because it did not greet as a worker of this run does: see which machines reach the "
                "ports of its workers (docs/security.md). More of them are not logged."
            )

    # -- keys -------------------------------------------------------------------------------------------------------------

    def authenticate(self) -> None:
        """Answers libzmq's authentication requests."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._sockets.authenticator.recv_multipart(zmq.NOBLOCK)
                if len(frames) > 8:
                    self._judge(frames)

    def _judge(self, frames: list[bytes]) -> None:
        sender, request, mechanism, key = frames[0], frames[3], frames[7], frames[8]
        known = self._credentials.known
        if mechanism != b"CURVE":
            self._answer(sender, request, b"", hmac.compare_digest(frames[-1], self._sockets.password))
            return
        if key in known or self._lookups >= _LOOKUPS:
            self._answer(sender, request, key, key in known)
            return

        def found(is_known: bool) -> None:
            self._lookups -= 1
            if is_known:
                known.add(key)
            self._answer(sender, request, key, is_known)

        self._lookups += 1
        if not self._commands.look_up(partial(self._ask_the_store, key), found, "decent_dp-keys"):
            found(False)

    def _ask_the_store(self, key: bytes) -> bool:
        with contextlib.suppress(OSError, RuntimeError):
            return self._credentials.is_known(key)
        return False

    def _answer(self, sender: bytes, request: bytes, key: bytes, is_known: bool) -> None:
        says = (b"200", b"OK", key.hex().encode()) if is_known else (b"400", b"no key of this run", b"")
        self._sockets.authenticator.send_multipart([sender, b"", b"1.0", request, *says, b""], zmq.NOBLOCK)


def _most_strangers() -> int:
    with contextlib.suppress(ImportError, OSError):
        import resource

        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if soft != resource.RLIM_INFINITY:
            return min(_STRANGERS, int(_THEIR_PART * soft))
    return _STRANGERS
