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
from dataclasses import replace
from functools import partial

from decent_dp.transport.agreement import View
from decent_dp.transport.communicators import SilentError
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.liveness import SILENT, WireNeighbours
from decent_dp.transport.mailbox import Mailbox
from decent_dp.transport.repeats import Repeats
from decent_dp.transport.tcp.acceptor import Acceptor
from decent_dp.transport.tcp.connection import Connection, LinkState, Receiving, Sending, unacknowledged
from decent_dp.transport.tcp.descriptors import own
from decent_dp.transport.tcp.dialler import Dialler
from decent_dp.transport.tcp.framing import Framing
from decent_dp.transport.tcp.greeting import GUEST, REPLACED, Identity, greet
from decent_dp.transport.tcp.protocol import ACK, BYE, Key, pack
from decent_dp.transport.waiter import start_thread

__all__ = ["Reactor"]

_log = logging.getLogger(__name__)

# Seconds that closing may take until all that was sent has reached the others.
_LINGER = 10.0
# Seconds between two looks at a full link, as no event reports that the kernel has sent what it holds.
_LOOK = 0.005
# The weight of the latest turn in the mean over those before.
_NEWEST = 0.1
# Seconds between two heartbeats, at most.
_BEAT = 1.0


class Reactor:
    """This worker's connections.

    Args:
        identity: this worker's.
        secret: with which workers prove that they are of this run.
        expected: the ranks of the run.
        local: the workers that share this one's network stack.
        listeners: sockets to which others connect.
        dial: connects to a worker, which is the process of an incarnation, blocking, and returns a stream socket.
        timeout: seconds that a worker has to greet this one after ``dial``.
        dead_after: seconds without a sign of life after which a peer that is waited for is an error (``tolerate``: is dead).
    """

    def __init__(
        self,
        identity: Identity,
        secret: bytes,
        expected: range,
        local: frozenset[int],
        listeners: list[socket.socket],
        dial: Callable[[int, int], socket.socket],
        timeout: float,
        dead_after: float = 10.0,
    ) -> None:
        self._identity, self._secret, self._expected = identity, secret, set(expected)
        self._dial, self._timeout = dial, timeout
        self._listeners = listeners
        self._dialled: set[int] = set()
        # Called with the connection of a process that is no worker yet, in a thread of its own.
        self.on_guest: Callable[[socket.socket], None] | None = None
        self._guest_errors = Repeats()
        self._dead_after = dead_after
        self._next_beat, self._woke = time.monotonic(), -math.inf
        self._dialler: Dialler | None = None
        self._neighbours: WireNeighbours | None = None
        self._dial_at = math.inf
        self._commands: deque[Callable[[], None]] = deque()
        self._commands_lock = threading.Lock()
        self._ended = False
        self.mailbox = Mailbox(self.call)
        self._selector = selectors.DefaultSelector()
        self.control_plane = ControlPlane(
            identity.rank,
            len(expected),
            self.call,
            self._send_note,
            self._view,
            self._want,
            self.fail,
            identity.incarnation,
            self._is_silent,
            lambda: any(c.start > self._framing.round for c in self._framing.connections.values()),
        )
        self._framing = Framing(identity.rank, local, self._selector, self._keep_note, lambda peer: self._connected(peer))
        self._acceptor = Acceptor(listeners, self._selector, identity, secret, self._admit, self._open)
        # A byte to ``_waker`` wakes the thread.
        wakeup, waker = socket.socketpair()
        self._wakeup, self._waker = own(lambda: wakeup), own(lambda: waker)
        self._wakeup.setblocking(False)
        self._waker.setblocking(False)
        self._woken = False
        self._closing: float | None = None
        # What has ended the thread, and the name of the thread in which it was raised.
        self._error: BaseException | None = None
        self._failed_in = ""
        self._thread = threading.Thread(target=self._run, name="decent_dp-transport", daemon=True)
        _REACTORS.add(self)
        self._thread.start()

    # -- called by any thread -----------------------------------------------------------------------------------------

    def connect(self, peer: int, *, wait: bool = True) -> None:
        """Makes sure that there will be a connection: one of both makes it (``greeting``).

        Args:
            wait: until there is one. Where faults are tolerated, another thread makes it, and that may fail.

        Raises:
            OSError, RuntimeError: the peer cannot be reached, or does not welcome this worker.
        """
        if self._dials(peer) and peer not in self._dialled:
            if self._dialler is not None:
                self._dialled.add(peer)
                self.call(lambda: self._want(peer))
                deadline = time.monotonic() + self._dead_after
                while wait and self._view(peer) is View.UNKNOWN and time.monotonic() < deadline:
                    time.sleep(_LOOK)
                return
            stream = self._dial(peer, self.incarnation_of(peer))
            try:
                other = greet(stream, self._identity, self._secret, peer, self._timeout)
                self.call(lambda: self._framing.open(peer, stream, other.uid))
            except (OSError, RuntimeError):
                stream.close()
                raise
            self._dialled.add(peer)

    def _dials(self, peer: int) -> bool:
        """Whether this worker makes the connection to another one, and not that one."""
        return (self.incarnation_of(peer), peer) < (self._identity.incarnation, self._identity.rank)

    def incarnation_of(self, peer: int) -> int:
        connection = self._framing.connections.get(peer)
        return 0 if connection is None else connection.incarnation

    def renew(self, peer: int, incarnation: int, start: int = -1) -> None:
        """``Neighbours.renew``."""

        def renew() -> None:
            if self.incarnation_of(peer) < incarnation:
                self._expected.add(peer)
                self._framing.renew(peer, incarnation, start)
                self.control_plane.renew(peer, incarnation)

        self.call(renew)

    def want(self, peer: int) -> None:
        """A connection is to be made, where faults are tolerated."""
        self.call(lambda: self._want(peer))

    def _want(self, peer: int) -> None:
        if self._dialler is not None:
            self._dialler.want(peer)

    def visit(self, peer: int, incarnation: int) -> socket.socket:
        """``Neighbours.visit``."""
        stream = self._dial(peer, incarnation)
        try:
            greet(stream, replace(self._identity, rank=GUEST), self._secret, peer, SILENT * self._dead_after)
        except BaseException:
            stream.close()
            raise
        return stream

    @property
    def replaced(self) -> bool:
        """Whether another process is this worker now."""
        return self._dialler is not None and self._dialler.replaced

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
        self.call(lambda: self._send_note(peer, key, text))

    def last_progress(self, peer: int) -> float:
        """When a part of a message last came from ``peer`` or went to it, on the monotonic clock; 0 for never."""
        connection = self._framing.connections.get(peer)
        return connection.moved if connection is not None else 0.0

    def open_slots(self, peer: int, exchange: tuple[int, int]) -> list[int]:
        """The slots of the messages of an exchange (round, bucket) that are yet to come from ``peer``, or to go to it."""
        connection = self._framing.connections.get(peer)
        keys = [] if connection is None else [*list(connection.receivings), *list(connection.sendings)]
        return [slot for *of, slot in keys if tuple(of) == exchange]

    def now(self) -> float:
        """The time, as far as this thread has looked at its peers since: after a stop of this process they only seem silent."""
        return min(time.monotonic(), self._next_beat + self.interval)

    def woke(self) -> float:
        """When this process last went on after a stop in which it became a hole, on the monotonic clock; -inf for never."""
        now = time.monotonic()
        return now if self._was_stopped(now) else self._woke

    def _was_stopped(self, now: float) -> bool:
        return now - self._next_beat > SILENT * self._dead_after

    @property
    def interval(self) -> float:
        """Seconds between two heartbeats."""
        return min(_BEAT, self._dead_after / 10)

    def lost(self) -> list[int]:
        """The peers whose connection is closed for good."""
        return sorted(
            connection.peer for connection in list(self._framing.connections.values()) if connection.closed is not None
        )

    def tolerate(self, dead_after: float, places: int = 0) -> WireNeighbours:
        """From now on lost connections are made again, and exchanges of pairs end with a verdict.

        Args:
            places: the number of ranks, with those of workers that may come (``renew``).
        """
        self.control_plane.expand(places)
        self._dead_after = dead_after
        self._framing.dead_after = dead_after
        timeout = min(self._timeout, SILENT * dead_after)
        self._dialler = Dialler(
            self._framing,
            self._identity,
            self._secret,
            lambda peer: self._dial(peer, self.incarnation_of(peer)),
            self.call,
            timeout,
            self._dials,
            lambda c: self._is_silent(c.peer),
            self.fail,
        )
        self.call(self._beat)  # it is more often from now on
        self._neighbours = WireNeighbours(self, self._framing, self._identity.rank, dead_after)  # type: ignore[arg-type]
        return self._neighbours

    def call(self, command: Callable[[], None]) -> None:
        """Runs ``command`` in the reactor's thread.

        Raises:
            RuntimeError: the thread has ended.
        """
        with self._commands_lock:
            if self._ended:
                raise self._is_over() from self._error
            self._commands.append(command)
        if not self._woken and threading.current_thread() is not self._thread:
            self._woken = True
            with contextlib.suppress(OSError):
                self._waker.send(b"!")

    def fail(self, error: Exception) -> None:
        """``Neighbours.fail``."""
        name = threading.current_thread().name

        def end() -> None:
            self._failed_in = self._failed_in or name
            raise error

        if self._closing is None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self.call(end)

    def refuse_failed(self) -> None:
        """``Neighbours.refuse_failed``."""
        if self._error is not None:
            raise self._is_over() from self._error

    def _is_over(self) -> RuntimeError:
        if self._error is None:
            return RuntimeError("the transport was closed")
        what = f"{type(self._error).__name__}: {self._error}"
        return RuntimeError(f"the transport of this worker has failed: {what} (in the thread {self._failed_in})")

    def close(self, *, says_bye: bool = True) -> None:
        """Ends the thread once everything that was sent has arrived, or cannot any more.

        Args:
            says_bye: this worker has done what it was to do. Else it has failed, and counts as dead.
        """
        if self._closing is None:
            self._closing = time.monotonic() + _LINGER
            with contextlib.suppress(RuntimeError):
                self.call(self._say_bye if says_bye and self._dialler is not None else lambda: None)
            self._thread.join(_LINGER + 1)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _send_note(self, peer: int, key: Key, text: bytes) -> None:
        self._framing.send_note(peer, key, text)

    def _connected(self, peer: int) -> None:
        self._framing.beat(self._framing.connection(peer))  # says in which round and epoch this worker is
        self.control_plane.reconnected(peer)

    def _keep_note(self, peer: int, key: Key, text: bytes) -> None:
        (self.mailbox.keep if key[1] < ACK else self.control_plane.hear)(peer, key, text)

    def _view(self, peer: int) -> View:
        """What the control plane is to know of a peer; any thread may ask."""
        connection = self._framing.connections.get(peer)
        if connection is None or connection.state is LinkState.NEW:
            return View.UNKNOWN
        if connection.silence(self.now()) >= self._dead_after:
            return View.LOST
        if connection.state is LinkState.OPEN and self._neighbours is not None and self._neighbours.patience(peer, 0.0) > 0:
            return View.LINKED
        return View.PENDING

    def _is_silent(self, peer: int) -> bool:
        connection = self._framing.connections.get(peer)
        return connection is not None and connection.silence(self.now()) >= SILENT * self._dead_after

    def _run(self) -> None:
        try:
            self._selector.register(self._wakeup, selectors.EVENT_READ, None)
            while self._closing is None or not self._is_drained():
                self._step()
        except BaseException as error:
            self._failed_in = self._failed_in or self._thread.name
            self._error = error
            _log.exception("the transport of worker %d has failed", self._identity.rank)
            over = self._is_over()
            over.__cause__ = error
            for connection in list(self._framing.connections.values()):
                self._framing.fail(connection, over)
        finally:
            self._shut_down()

    def _step(self) -> None:
        look_again = self._acceptor.look()
        happened = self._selector.select(self._patience(look_again))
        began = time.monotonic()
        for key, events in happened:
            if key.fileobj is self._wakeup:
                with contextlib.suppress(BlockingIOError):
                    self._wakeup.recv(4096)
                self._woken = False  # after the read: a command that comes in between is done below
            elif isinstance(key.data, Connection):
                if events & selectors.EVENT_READ:
                    self._framing.read(key.data)
                if events & selectors.EVENT_WRITE and key.data.socket is not None:
                    self._framing.write(key.data)
            else:
                key.data()  # the acceptor's
            # Much may have come from each of many peers. They must hear from this worker meanwhile.
            self._beat_if_due()
        self._beat_if_due()
        # The commands that are there now, not those that they add: a long encoding lets messages move in between.
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        self._framing.go_on()
        if self._dialler is not None and self._closing is None:
            for connection in self._framing.connections.values():
                if connection.state is LinkState.BROKEN:
                    self._dialler.want(connection.peer)
            self._dial_at = min(self._dialler.look(), self.control_plane.look())
        self._framing.turn += _NEWEST * (time.monotonic() - began - self._framing.turn)

    def _patience(self, look_again: float | None) -> float | None:
        if self._commands:
            return 0.0
        if self._framing.waiting:
            return _LOOK
        if self._closing is not None:
            return 0.01
        until_beat = max(0.0, min(self._next_beat, self._dial_at) - time.monotonic())
        return until_beat if look_again is None else min(look_again, until_beat)

    def _beat_if_due(self) -> None:
        if time.monotonic() >= self._next_beat:
            self._beat()

    def _beat(self) -> None:
        """Once in a while: gives signs of life, looks for those of the peers, and makes lost connections again."""
        now = time.monotonic()
        stopped = now - self._next_beat > 2 * self.interval  # this process was, perhaps with all others
        self._woke = now if self._was_stopped(now) else self._woke
        self._next_beat = now + self.interval
        for connection in list(self._framing.connections.values()):
            if stopped:
                connection.heard = now
            # A low-water mark hides the bytes of a slow link, and after a stop of this process all peers look silent.
            if connection.state is LinkState.OPEN and now - connection.heard > _BEAT / 2:
                self._framing.read(connection)
            if connection.state is LinkState.OPEN:
                self._framing.beat(connection)
            self._judge(connection, now)

    def _judge(self, connection: Connection, now: float) -> None:
        state, silent = connection.state, connection.silence(now)
        if state is LinkState.OPEN and silent > self._dead_after:
            reason = f"silent for {self._dead_after:g} s"
            if self._dialler is not None:
                self._framing.lose(connection, reason)
            elif connection.receivings or connection.sendings:  # somebody waits for it
                self._framing.fail(connection, SilentError(reason))
        if self._dialler is None:
            return
        if state is LinkState.BROKEN and silent > self._dead_after:
            self._framing.settlement.expire(connection)
        if state is LinkState.OPEN and silent > SILENT * self._dead_after:
            self._dialler.want(connection.peer)
        if state is LinkState.NEW and connection.pairs and now - connection.since > SILENT * self._dead_after:
            self._dialler.want(connection.peer)

    def _say_bye(self) -> None:
        for connection in self._framing.connections.values():
            if connection.state is LinkState.OPEN:
                connection.control.append(pack(BYE, (0, 0, 0)))

    def _admit(self, worker: Identity) -> str | None:
        """Why a worker that has connected is refused; None: it is welcome."""
        if worker.rank == GUEST:
            return "nobody can join this run" if self.on_guest is None else None
        if worker.rank not in self._expected:
            return f"rank {worker.rank} is not expected"
        connection = self._framing.connection(worker.rank)
        if worker.incarnation != connection.incarnation:
            return REPLACED if worker.incarnation < connection.incarnation else f"worker {worker.rank} is not a member yet"
        if self._dials(worker.rank) or worker.rank == self._identity.rank:
            if worker.rank != self._identity.rank:
                self._want(worker.rank)
            return f"rank {worker.rank} must not connect to rank {self._identity.rank}, as that one connects"
        if connection.state is LinkState.GONE:
            return f"worker {worker.rank} is gone for worker {self._identity.rank}, which has dropped what they had in common"
        if connection.uid not in (b"", worker.uid):
            return f"another process has been worker {worker.rank}, and the others do not know of a new one"
        if connection.state is LinkState.OPEN and self._dialler is None:
            return f"rank {worker.rank} is connected already, and no rank may run twice"
        return None

    def _open(self, worker: Identity, stream: socket.socket) -> None:
        if worker.rank == GUEST:
            assert self.on_guest is not None
            if not start_thread(partial(self.on_guest, stream), "decent_dp-guest", self._guest_failed):
                stream.close()
            return
        connection = self._framing.connection(worker.rank)
        if connection.state is LinkState.OPEN:  # the peer has seen first that it was lost
            self._framing.lose(connection, "replaced by the peer")
        self._framing.open(worker.rank, stream, worker.uid)

    def _guest_failed(self, error: Exception) -> None:
        """The process asks another worker, and this one trains on."""
        if self._guest_errors.again():
            _log.warning("a process that joins was not served (%d times by now)", self._guest_errors.times, exc_info=error)

    # -- the end ------------------------------------------------------------------------------------------------------

    def _is_drained(self) -> bool:
        """All that was to be sent has reached the others' kernels: closing a connection earlier could break it off."""
        assert self._closing is not None
        if time.monotonic() > self._closing:
            return True
        connected = [c for c in self._framing.connections.values() if c.socket is not None]
        alive = [c for c in connected if self._dialler is None or c.silence(self.now()) < SILENT * self._dead_after]
        return not self._commands and not any(c.out or c.control or unacknowledged(c.socket) for c in alive)

    def _shut_down(self) -> None:
        while not self._ended:
            # The messages of these commands fail, and those who wait for them learn of the end.
            while self._commands:
                with contextlib.suppress(Exception):
                    self._commands.popleft()()
            self.control_plane.close(self._error)
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
