"""The thread that moves messages over the connections to other workers."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import selectors
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from decent_dp.errors import WireError
from decent_dp.transport.communicators import OUT_OF_DESCRIPTORS, SilentError
from decent_dp.transport.tcp.connection import Connection, LinkState, Receiving, Sending, unacknowledged
from decent_dp.transport.tcp.descriptors import own
from decent_dp.transport.tcp.framing import Framing
from decent_dp.transport.tcp.neighbours import SILENT, TcpNeighbours, silence
from decent_dp.transport.tcp.protocol import BEAT, BYE, HEADER_SIZE, Key, pack, peer_of, send_hello
from decent_dp.transport.waiter import Waiter

__all__ = ["Reactor"]

_log = logging.getLogger(__name__)

# Seconds that closing may take until all that was sent has reached the others.
_LINGER = 10.0
# Seconds between two looks at a full link, as no event reports that the kernel has sent what it holds.
_LOOK = 0.005
# Seconds for which nobody is accepted when there is no file descriptor, or too many connections without a hello.
_ACCEPT_AGAIN = 0.2
# Seconds in which a connection must say hello, and how many may be without one. The others wait in the listener's queue.
_HELLO_SECONDS, _WITHOUT_HELLO = 10.0, 64
# Seconds between two heartbeats, at most, and between two tries to make a lost connection again.
_BEAT, _DIAL_AGAIN = 1.0, 0.5
# Notes of a bucket that are kept for each peer, as there is one for each exchange and one for the next, and their bytes.
_NOTES, _NOTE_BYTES = 4, 2**26


class Reactor:
    """This worker's connections.

    Args:
        rank: this worker's.
        local: the workers that share this one's network stack.
        listeners: sockets to which others connect.
        dial: connects to a worker of lower rank, blocking, and returns a stream socket.
        token: what a hello must carry, so that no other program is taken for a worker by mistake.
        dead_after: seconds without a sign of life after which a peer that is waited for is an error (``tolerate``: is dead).
    """

    def __init__(
        self,
        rank: int,
        local: frozenset[int],
        listeners: list[socket.socket],
        dial: Callable[[int], socket.socket],
        token: bytes,
        dead_after: float = 10.0,
    ) -> None:
        self._rank, self._dial, self._token = rank, dial, token
        self._listeners = listeners
        self._accept_again: dict[socket.socket, float] = {}
        # Connections that have not said hello, each with its deadline.
        self._without_hello: dict[socket.socket, float] = {}
        self._warned = False
        self._dialled: set[int] = set()
        self._dead_after = dead_after
        self._tolerant = False
        self.round = -1
        self._next_beat = time.monotonic()
        # Connections that are being made again, each with the time of the next try; infinite while one is under way.
        self._dial_at: dict[int, float] = {}
        self._dialler = Waiter("decent_dp-dial")
        self._commands: deque[Callable[[], None]] = deque()
        self._commands_lock = threading.Lock()
        self._ended = False
        self._notes: dict[tuple[int, Key], bytes] = {}
        self._on_notes: dict[tuple[int, Key], Callable[[], None]] = {}
        self._notes_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._framing = Framing(rank, local, self._selector, self._keep_note)
        # A byte to ``_waker`` wakes the thread.
        wakeup, waker = socket.socketpair()
        self._wakeup, self._waker = own(lambda: wakeup), own(lambda: waker)
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._woken = False
        self._closing: float | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decent_dp-transport", daemon=True)
        _REACTORS.add(self)
        self._thread.start()

    # -- called by any thread -----------------------------------------------------------------------------------------

    def connect(self, peer: int, *, wait: bool = True) -> None:
        """Makes sure that there will be a connection: the worker of higher rank makes it.

        Args:
            wait: until there is one. False: another thread makes it; only where faults are tolerated.

        Raises:
            OSError, RuntimeError: the peer cannot be reached.
        """
        if peer < self._rank and peer not in self._dialled:
            if not wait:
                self._dialled.add(peer)
                self.call(lambda: self._want(peer))
                return
            stream = self._dial(peer)
            try:
                send_hello(stream, self._rank, self._token)
                self.call(lambda: self._framing.open(peer, stream))
            except (OSError, RuntimeError):
                stream.close()
                raise
            self._dialled.add(peer)

    def send(self, sending: Sending) -> None:
        self.call(lambda: self._framing.add_sending(sending))

    def advance(self, sending: Sending, ready: int) -> None:
        """The first ``ready`` bytes of a message are final."""
        sending.ready = ready
        self.call(lambda: self._framing.queue(sending))

    def receive(self, receiving: Receiving) -> None:
        self.call(lambda: self._framing.add_receiving(receiving))

    def send_note(self, peer: int, key: Key, text: bytes) -> None:
        """Sends a few bytes that are not granted. They are lost without an error if the peer is gone."""
        self.call(lambda: self._framing.send_note(peer, key, text))

    def last_progress(self, peer: int) -> float:
        """When a part of a message last came from ``peer`` or went to it, on the monotonic clock; 0 for never."""
        connection = self._framing.connections.get(peer)
        return connection.moved if connection is not None else 0.0

    def open_slots(self, peer: int, exchange: tuple[int, int]) -> list[int]:
        """The slots of the messages of an exchange (round, bucket) that are yet to come from ``peer``, or to go to it."""
        connection = self._framing.connections.get(peer)
        keys = [] if connection is None else [*list(connection.receivings), *list(connection.sendings)]
        return [slot for *of, slot in keys if tuple(of) == exchange]

    def lost(self) -> list[int]:
        """The peers whose connection is closed for good."""
        return sorted(peer for peer, connection in list(self._framing.connections.items()) if connection.closed is not None)

    def tolerate(self, dead_after: float) -> TcpNeighbours:
        """From now on lost connections are made again, and exchanges of pairs end with a verdict."""
        self._dead_after, self._tolerant = dead_after, True
        self._framing.tolerant = True
        return TcpNeighbours(self, self._framing, self._rank, dead_after)

    def waits_for_note(self, peer: int, key: Key) -> bool:
        return (peer, key) in self._on_notes

    def when_noted(self, peers: list[int], key: Key, then: Callable[[list[bytes]], None]) -> None:
        """Calls ``then`` with the notes of ``peers``: at once if all are there, else in the reactor's thread."""

        def take() -> list[bytes] | None:  # under the lock
            complete = all((peer, key) in self._notes for peer in peers)
            return [self._notes.pop((peer, key)) for peer in peers] if complete else None

        def arrived() -> None:
            found = take()
            if found is not None:
                self.call(lambda: then(found))

        with self._notes_lock:
            found = take()
            if found is None:
                self._on_notes.update(((peer, key), arrived) for peer in peers if (peer, key) not in self._notes)
        if found is not None:
            then(found)

    def call(self, command: Callable[[], None]) -> None:
        """Runs ``command`` in the reactor's thread.

        Raises:
            RuntimeError: the thread has ended.
        """
        with self._commands_lock:
            if self._ended:
                raise RuntimeError("the transport was closed") from self._error
            self._commands.append(command)
        if not self._woken and threading.current_thread() is not self._thread:
            self._woken = True
            with contextlib.suppress(OSError):
                self._waker.send(b"!")

    def close(self) -> None:
        """Ends the thread once everything that was sent has arrived, or cannot any more."""
        if self._closing is None:
            self._closing = time.monotonic() + _LINGER
            with contextlib.suppress(RuntimeError):
                self.call(self._say_bye if self._tolerant else lambda: None)
            self._thread.join(_LINGER + 1)
            self._dialler.close()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._selector.register(self._wakeup, selectors.EVENT_READ, None)
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, listener)
            while self._closing is None or not self._is_drained():
                self._step()
        except BaseException as error:
            self._error = error
            for connection in list(self._framing.connections.values()):
                self._framing.fail(connection, error)
        finally:
            self._shut_down()

    def _step(self) -> None:
        for key, events in self._selector.select(self._timeout()):
            if key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                self._woken = False  # after the read: a command that comes in between is done below
            elif isinstance(key.data, Connection):
                if events & selectors.EVENT_READ:
                    self._framing.read(key.data)
                if events & selectors.EVENT_WRITE and key.data.socket is not None:
                    self._framing.write(key.data)
            elif key.data in self._listeners:
                self._accept(key.data)
            else:
                self._read_hello(key.data, key.fileobj)  # type: ignore[arg-type]
        self._look_at_deadlines()
        if time.monotonic() >= self._next_beat:
            self._beat()
        # The commands that are there now, not those that they add: a long encoding lets messages move in between.
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        self._framing.go_on()
        if self._tolerant:
            for connection in self._framing.connections.values():
                if connection.state is LinkState.BROKEN:
                    self._dial_at.setdefault(connection.peer, 0.0)
            self._dial_wanted()

    def _timeout(self) -> float | None:
        if self._commands:
            return 0.0
        if self._framing.waiting:
            return _LOOK
        if self._closing is not None:
            return 0.01
        until_beat = max(0.0, min([self._next_beat, *self._dial_at.values()]) - time.monotonic())
        return min(_ACCEPT_AGAIN, until_beat) if self._accept_again or self._without_hello else until_beat

    def _beat(self) -> None:
        """Once in a while: gives signs of life, looks for those of the peers, and makes lost connections again."""
        now = time.monotonic()
        self._next_beat = now + min(_BEAT, self._dead_after / 10)
        for connection in list(self._framing.connections.values()):
            # A low-water mark hides the bytes of a slow link, and after a stop of this process all peers look silent.
            if connection.state is LinkState.OPEN and now - connection.heard > _BEAT / 2:
                self._framing.read(connection)
            if connection.state is LinkState.OPEN:
                unheard = int(1000 * min(time.monotonic() - connection.heard, 1e6))
                connection.control.append(pack(BEAT, (max(self.round, 0), 0, 0), age=unheard))
            self._judge(connection, now)

    def _judge(self, connection: Connection, now: float) -> None:
        state = connection.state
        if state is LinkState.OPEN and silence(connection) > self._dead_after:
            reason = f"silent for {self._dead_after:g} s"
            if self._tolerant:
                self._framing.lose(connection, reason)
            elif connection.receivings or connection.sendings:  # somebody waits for it
                self._framing.fail(connection, SilentError(reason))
        if not self._tolerant or self._closing is not None:
            return
        if state is LinkState.BROKEN and silence(connection) > self._dead_after:
            self._framing.settlement.expire(connection)
        waits_for_first = state is LinkState.NEW and connection.pairs and now - connection.since > SILENT * self._dead_after
        if connection.state is LinkState.BROKEN or waits_for_first:
            self._dial_at.setdefault(connection.peer, now)

    def _want(self, peer: int) -> None:
        self._framing.connection(peer)
        self._dial_at.setdefault(peer, 0.0)

    def _dial_wanted(self) -> None:
        for peer, at in list(self._dial_at.items()):
            connection = self._framing.connection(peer)
            if connection.state in (LinkState.OPEN, LinkState.GONE) or self._closing is not None:
                del self._dial_at[peer]
            elif time.monotonic() >= at:
                self._dial_at[peer] = math.inf
                self._dialler.submit(partial(self._dial_once, peer))

    def _dial_once(self, peer: int) -> None:
        """In a thread of its own. The worker of lower rank only looks whether anybody listens: the other one connects."""
        stream: socket.socket | None = None
        try:
            stream = self._dial(peer)
            if peer < self._rank:
                send_hello(stream, self._rank, self._token)
        except (OSError, RuntimeError) as error:
            refused = isinstance(error.__cause__ or error, ConnectionRefusedError)
            outcome = partial(self._not_dialled, peer, refused)
        else:
            outcome = partial(self._has_dialled, peer, stream)
        try:
            self.call(outcome)
        except RuntimeError:  # closed in the meantime
            if stream is not None:
                stream.close()

    def _not_dialled(self, peer: int, refused: bool) -> None:
        connection = self._framing.connection(peer)
        if connection.state is LinkState.OPEN:
            return
        if refused:
            self._framing.give_up(connection, "nobody listens at its address")
        elif connection.state is LinkState.NEW:
            connection.enter(LinkState.BROKEN)
        self._dial_at[peer] = time.monotonic() + _DIAL_AGAIN

    def _has_dialled(self, peer: int, stream: socket.socket) -> None:
        if peer < self._rank and self._framing.connection(peer).state is not LinkState.OPEN:
            self._framing.open(peer, stream)
        else:
            stream.close()
        self._dial_at[peer] = time.monotonic() + _DIAL_AGAIN

    def _say_bye(self) -> None:
        for connection in self._framing.connections.values():
            if connection.state is LinkState.OPEN:
                connection.control.append(pack(BYE, (0, 0, 0)))

    def _look_at_deadlines(self) -> None:
        for listener, at in list(self._accept_again.items()):
            if time.monotonic() >= at:
                del self._accept_again[listener]
                self._selector.register(listener, selectors.EVENT_READ, listener)
        for stream, deadline in list(self._without_hello.items()):
            if time.monotonic() >= deadline:
                del self._without_hello[stream]
                self._selector.unregister(stream)
                stream.close()

    def _pause(self, listener: socket.socket) -> None:
        """Accepts nobody for a while. The newcomer stays in the listener's queue, and the selector would report it again."""
        self._selector.unregister(listener)
        self._accept_again[listener] = time.monotonic() + _ACCEPT_AGAIN

    def _accept(self, listener: socket.socket) -> None:
        if len(self._without_hello) >= _WITHOUT_HELLO:
            self._pause(listener)
            return
        try:
            stream = own(lambda: listener.accept()[0])
        except OSError as error:
            if error.errno in OUT_OF_DESCRIPTORS:
                if not self._warned:
                    self._warned = True
                    _log.warning("a connection of another worker cannot be accepted yet: %s", error)
                self._pause(listener)
            return
        stream.setblocking(False)
        self._without_hello[stream] = time.monotonic() + _HELLO_SECONDS
        self._selector.register(stream, selectors.EVENT_READ, bytearray())

    def _read_hello(self, seen: bytearray, stream: socket.socket) -> None:
        """Reads the hello of a new connection; closes it if that is not the hello of a worker."""
        expected, part = HEADER_SIZE + len(self._token), b""
        try:
            part = stream.recv(expected - len(seen))
        except BlockingIOError:
            return
        except OSError:
            pass
        seen += part
        if part and len(seen) < expected:
            return
        del self._without_hello[stream]
        self._selector.unregister(stream)
        peer = peer_of(bytes(seen), self._token)
        if peer is None:
            stream.close()
        else:
            self._framing.open(peer, stream)

    def forget_notes(self, peer: int, key: Key) -> None:
        """Nobody waits for the notes of an exchange any more."""
        with self._notes_lock:
            for waited in [waited for waited in self._on_notes if waited[0] == peer and waited[1][:2] == key[:2]]:
                del self._on_notes[waited]

    def _keep_note(self, peer: int, key: Key, text: bytes) -> None:
        with self._notes_lock:
            of_bucket = [waiting for waiting in self._notes if waiting[0] == peer and waiting[1][1:] == key[1:]]
            if len(of_bucket) >= _NOTES:
                del self._notes[min(of_bucket, key=lambda waiting: waiting[1][0])]
            self._notes[peer, key] = text
            if sum(len(own) for (of, _), own in self._notes.items() if of == peer) > _NOTE_BYTES:
                raise WireError(f"worker {peer} has sent more than {_NOTE_BYTES} bytes of notes that nobody has asked for")
            self._on_notes.pop((peer, key), lambda: None)()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _is_drained(self) -> bool:
        """All that was to be sent has reached the others' kernels: closing a connection earlier could break it off."""
        assert self._closing is not None
        if time.monotonic() > self._closing:
            return True
        connected = [c for c in self._framing.connections.values() if c.socket is not None]
        alive = [c for c in connected if not self._tolerant or silence(c) < SILENT * self._dead_after]
        return not self._commands and not any(c.out or c.control or unacknowledged(c.socket) for c in alive)

    def _shut_down(self) -> None:
        while not self._ended:
            # The messages of these commands fail, and those who wait for them learn of the end.
            while self._commands:
                with contextlib.suppress(Exception):
                    self._commands.popleft()()
            for connection in self._framing.connections.values():
                self._framing.close(connection, "the transport was closed")
            with self._commands_lock:
                self._ended = not self._commands
        streams = [key.fileobj for key in self._selector.get_map().values()]
        for stream in [*streams, *self._listeners, self._waker]:
            with contextlib.suppress(OSError, AttributeError):
                stream.close()  # type: ignore[union-attr]
        self._selector.close()

    def _end_in_child(self) -> None:
        """In a forked process, which has no such thread. Its sockets close by themselves (``own``)."""
        self._commands_lock = threading.Lock()  # another thread of the parent may have locked it
        self._ended = True
        # Nothing is unregistered first, as the child shares the kernel's list of the parent's selector.
        self._selector.close()


_REACTORS: weakref.WeakSet[Reactor] = weakref.WeakSet()


def _end_in_child() -> None:
    for reactor in list(_REACTORS):
        if not reactor._ended:
            reactor._end_in_child()


# DataLoader workers are forked where that is the default.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_in_child)
