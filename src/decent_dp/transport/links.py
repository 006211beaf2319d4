"""Connections to other workers, and the thread that moves messages over them.

What a link carries first decides when a bucket can be mixed. So messages are not handed to the kernel at once but in frames,
in the order in which they are needed:

- A sender writes frames of one message at a time, that of the earliest exchange first.
- A receiver asks for bytes before they are sent (a grant), for the earliest exchange first of those that it was offered, and
  never for more than a window ahead. So a worker that is ahead does not fill its peer's link with its next round, and one that
  is behind does not keep it idle.
- The kernel holds little that is not on the wire yet, so that grants and the next message's frames do not wait behind it.

Links inside a node and links between nodes do not share a wire: each kind has its own order and window.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from torch.autograd import profiler

from decent_dp.errors import WireError
from decent_dp.transport.connection import (
    DATA,
    GRANT,
    HEADER,
    HELLO,
    LOCAL,
    LOOK,
    NOTE,
    OFFER,
    VERSION,
    Connection,
    Key,
    Lane,
    Receiving,
    Sending,
    check_size,
    greet,
    tune,
    unacknowledged,
)

__all__ = ["Key", "Links", "Receiving", "Sending"]

# Bytes of a frame: small enough for a grant not to wait long behind one on a slow link, large enough to be worth a call.
_FRAME = 2**16
# Bytes that must be there before a read is worth it, on a slow link.
_READ = 2**15
# Messages of at most so many bytes are asked for as soon as they are due: to wait for an offer would take longer than they.
_SMALL = 2**14
# Bytes read from one connection before the others get their turn.
_TURN = 2**21
# Seconds that leaving may take until all that was sent has reached the others.
_LINGER = 10.0
_NO_NAME = contextlib.nullcontext()


class Links:
    """This worker's connections.

    Args:
        rank: this worker's.
        near: the workers that share this one's network stack.
        listeners: where others connect.
        dial: connects to a worker of lower rank, blocking, and returns a stream socket.
        token: what a hello must carry, so that nobody else is taken for a worker by mistake.
    """

    def __init__(
        self,
        rank: int,
        near: frozenset[int],
        listeners: list[socket.socket],
        dial: Callable[[int], socket.socket],
        token: bytes,
    ) -> None:
        self._rank, self._near, self._dial, self._token = rank, near, dial, token
        self._listeners = listeners
        self._lanes = {near: Lane(near) for near in (True, False)}
        self._connections: dict[int, Connection] = {}
        self._dialled: set[int] = set()
        self._order = itertools.count()
        self._commands: deque[Callable[[], None]] = deque()
        self._commands_lock = threading.Lock()
        self._ended = False
        self._notes: dict[tuple[int, Key], bytes] = {}
        self._awaited: dict[tuple[int, Key], Callable[[], None]] = {}
        self._notes_lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._bell, self._ring = socket.socketpair()
        self._bell.setblocking(False)
        self._ring.setblocking(False)
        self._rung = False
        self._closing: float | None = None
        self._broken: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decent_dp-links", daemon=True)
        self._thread.start()

    # -- called by others ---------------------------------------------------------------------------------------------

    def connect(self, peer: int) -> None:
        """Makes sure that there will be a connection: the worker of higher rank makes it.

        Raises:
            OSError, RuntimeError: the peer cannot be reached.
        """
        if peer < self._rank and peer not in self._dialled:
            stream = self._dial(peer)
            greet(stream, self._rank, self._token)
            self._dialled.add(peer)
            self.call(lambda: self._attach(peer, stream))

    def send(self, sending: Sending) -> None:
        self.call(lambda: self._add_sending(sending))

    def advance(self, sending: Sending, ready: int) -> None:
        """The first ``ready`` bytes of a message are final."""
        sending.ready = ready
        self.call(lambda: self._offer(sending))

    def receive(self, receiving: Receiving) -> None:
        self.call(lambda: self._add_receiving(receiving))

    def note(self, peer: int, key: Key, text: bytes) -> None:
        """Sends a few bytes without being asked. Lost without a word if the peer is gone."""
        frame = HEADER.pack(NOTE, VERSION, len(text), *key, 0, len(text), 0) + text
        self.call(lambda: self._connection(peer).control.append(frame))

    def moved(self, peer: int) -> float:
        """When a part of a message last came from ``peer`` or went to it, on the monotonic clock; 0 for never."""
        return self._connections[peer].moved if peer in self._connections else 0.0

    def lost(self) -> list[int]:
        """The peers whose connection is closed."""
        return sorted(peer for peer, connection in list(self._connections.items()) if connection.lost is not None)

    def awaits_note(self, peer: int, key: Key) -> bool:
        return (peer, key) in self._awaited

    def await_notes(self, peers: list[int], key: Key, then: Callable[[list[bytes]], None]) -> None:
        """Calls ``then`` with the notes of ``peers``: at once if all are there, else in the links' thread."""

        def arrived() -> None:  # called with the lock held by whoever brings the last one
            if not any((peer, key) not in self._notes for peer in peers):
                found.append([self._notes.pop((peer, key)) for peer in peers])

        found: list[list[bytes]] = []
        with self._notes_lock:
            arrived()
            if not found:

                def later() -> None:
                    arrived()
                    if found:
                        self.call(lambda: then(found[0]))

                for peer in peers:
                    if (peer, key) not in self._notes:
                        self._awaited[peer, key] = later
        if found:
            then(found[0])

    def call(self, command: Callable[[], None]) -> None:
        """Has the links' thread do something.

        Raises:
            RuntimeError: it has ended.
        """
        with self._commands_lock:
            if self._ended:
                raise RuntimeError("the transport was closed") from self._broken
            self._commands.append(command)
        if not self._rung and threading.current_thread() is not self._thread:
            self._rung = True
            with contextlib.suppress(BlockingIOError, OSError):
                self._ring.send(b"!")

    def close(self) -> None:
        """Ends the thread once everything that was sent has arrived, or cannot any more."""
        if self._closing is None:
            self._closing = time.monotonic() + _LINGER
            with contextlib.suppress(RuntimeError):
                self.call(lambda: None)
            self._thread.join(_LINGER + 1)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._selector.register(self._bell, selectors.EVENT_READ, None)
            for listener in self._listeners:
                self._selector.register(listener, selectors.EVENT_READ, listener)
            while self._closing is None or not self._drained():
                self._turn()
        except BaseException as error:
            self._broken = error
            for connection in list(self._connections.values()):
                self._fail(connection, error)
        finally:
            self._tear_down()

    def _turn(self) -> None:
        idle = LOOK if self._lanes[False].held else None if self._closing is None else 0.01
        patience = 0.0 if self._commands else idle
        for key, events in self._selector.select(patience):
            if key.fileobj is self._bell:
                with contextlib.suppress(BlockingIOError):
                    self._bell.recv(4096)
                self._rung = False  # after it is read: who rings in between has its command done below
            elif isinstance(key.data, Connection):
                if events & selectors.EVENT_READ:
                    self._read(key.data)
                if events & selectors.EVENT_WRITE and key.data.socket is not None:
                    self._write(key.data)
            elif key.data in self._listeners:
                self._accept(key.data)
            else:
                self._greet(key.data, key.fileobj)  # type: ignore[arg-type]
        # Those that are there now, and not what they add: a long encoding, say, lets the links have their turn in between.
        for _ in range(len(self._commands)):
            self._commands.popleft()()
        for lane in self._lanes.values():
            self._ask(lane)
        self._write_all()

    def _connection(self, peer: int) -> Connection:
        if peer not in self._connections:
            self._connections[peer] = Connection(peer, self._lanes[peer in self._near])
        return self._connections[peer]

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            stream, _ = listener.accept()
            stream.setblocking(False)
            self._selector.register(stream, selectors.EVENT_READ, bytearray())

    def _greet(self, seen: bytearray, stream: socket.socket) -> None:
        """Reads a newcomer's hello; who has none, or a wrong one, is no worker of ours."""
        wanted, part = HEADER.size + len(self._token), b""
        try:
            part = stream.recv(wanted - len(seen))
        except BlockingIOError:
            return
        except OSError:
            pass
        seen += part
        if part and len(seen) < wanted:
            return
        self._selector.unregister(stream)
        kind, version, _, peer, *_ = HEADER.unpack(seen[: HEADER.size]) if len(seen) == wanted else (0,) * 9
        if (kind, version) != (HELLO, VERSION) or seen[HEADER.size :] != self._token:
            stream.close()
            return
        self._attach(peer, stream)

    def _attach(self, peer: int, stream: socket.socket) -> None:
        connection = self._connection(peer)
        stream.setblocking(False)
        tune(stream)
        connection.socket = stream
        self._selector.register(stream, selectors.EVENT_READ, connection)

    # -- asking -------------------------------------------------------------------------------------------------------

    def _add_receiving(self, receiving: Receiving) -> None:
        connection = self._connection(receiving.peer)
        if receiving.size == 0:
            receiving.done()
        elif connection.lost is not None:
            receiving.failed(connection.cause or ConnectionError(connection.lost))
        else:
            receiving.order = next(self._order)
            connection.receivings[receiving.key] = receiving
            if receiving.size <= _SMALL:
                self._grant(connection, receiving, receiving.size)
            elif receiving.key in connection.early_offers:
                connection.early_offers.remove(receiving.key)
                heapq.heappush(connection.lane.due, (receiving.turn, receiving))

    def _offered(self, connection: Connection, key: Key) -> None:
        receiving = connection.receivings.get(key)
        if receiving is None:
            connection.early_offers.add(key)
        else:
            heapq.heappush(connection.lane.due, (receiving.turn, receiving))

    def _ask(self, lane: Lane) -> None:
        while lane.due:
            receiving = lane.due[0][1]
            connection = self._connection(receiving.peer)
            window = connection.window()
            left, room = receiving.size - receiving.granted, window - lane.outstanding
            if room < min(left, window // 4):
                return
            self._grant(connection, receiving, min(left, room))
            if receiving.granted == receiving.size:
                heapq.heappop(lane.due)

    def _grant(self, connection: Connection, receiving: Receiving, amount: int) -> None:
        receiving.granted += amount
        if receiving.size > _SMALL:
            if connection.outstanding == 0:
                connection.asked = connection.spell = time.monotonic()
                connection.came = 0
            connection.lane.outstanding += amount
            connection.outstanding += amount
        if receiving.memory is None:
            receiving.memory = receiving.into()
        connection.control.append(HEADER.pack(GRANT, VERSION, 0, *receiving.key, receiving.granted, receiving.size, 0))

    def _granted(self, connection: Connection, key: Key, upto: int, size: int) -> None:
        sending = connection.sendings.get(key)
        if sending is None:
            connection.early_grants[key] = (upto, size)
            return
        check_size(self._rank, connection.peer, key, size, len(sending.data))
        sending.granted, sending.granted_at = upto, time.monotonic()
        self._offer(sending)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _add_sending(self, sending: Sending) -> None:
        connection = self._connection(sending.peer)
        if len(sending.data) == 0:
            sending.done()
        elif connection.lost is not None:
            sending.failed(connection.cause or ConnectionError(connection.lost))
        else:
            sending.order = next(self._order)
            connection.sendings[sending.key] = sending
            if sending.key in connection.early_grants:
                try:
                    self._granted(connection, sending.key, *connection.early_grants.pop(sending.key))
                except WireError as error:
                    self._fail(connection, error)
            self._offer(sending)

    def _offer(self, sending: Sending) -> None:
        """Queues a message of which there is something to send; says so to the peer, once, if it is worth asking for."""
        if not sending.offered and sending.ready > 0 and sending.order >= 0:
            sending.offered = True
            if len(sending.data) > _SMALL:
                self._connection(sending.peer).control.append(
                    HEADER.pack(OFFER, VERSION, 0, *sending.key, 0, len(sending.data), 0)
                )
        if sending.sendable and sending.order >= 0 and not sending.queued:
            sending.queued = True
            heapq.heappush(self._connection(sending.peer).lane.heap, (sending.turn, sending))

    def _write_all(self) -> None:
        for lane in self._lanes.values():
            while (connection := self._next_of(lane)) is not None and self._write(connection):
                pass
        for connection in list(self._connections.values()):
            if connection.socket is not None and (connection.out or connection.control) and not connection.writing:
                self._write(connection)

    def _next_of(self, lane: Lane) -> Connection | None:
        """The connection whose turn it is to send data."""
        lane.held = False
        if lane.busy is not None:
            return lane.busy
        while lane.heap:
            sending = lane.heap[0][1]
            connection = self._connections[sending.peer]
            if sending.sendable and connection.lost is None and not connection.mute:
                may = connection.socket is not None and not lane.holds(sending, self._connections.values())
                return connection if may else None
            heapq.heappop(lane.heap)
            sending.queued = False
        return None

    def _write(self, connection: Connection) -> bool:
        """Writes what may go to a peer now; False when the kernel takes no more."""
        assert connection.socket is not None
        while connection.out or self._take_frame(connection):
            try:
                # A name for the profiler costs as much as the call, so only while somebody looks.
                with profiler.record_function("decent_dp.send") if profiler._is_profiler_enabled else _NO_NAME:
                    count = connection.socket.sendmsg(connection.out)
            except BlockingIOError:
                self._watch_writing(connection, True)
                return False
            except ConnectionError:
                self._mute(connection)
                return True
            except OSError as error:
                self._lose(connection, str(error))
                return True
            while connection.out and count >= len(connection.out[0]):
                count -= len(connection.out.pop(0))
            if connection.out:
                connection.out[0] = connection.out[0][count:]
            else:
                self._frame_written(connection)
        self._watch_writing(connection, False)
        return True

    def _mute(self, connection: Connection) -> None:
        """Writing has failed. What the peer sent before it went is still to be read, and reading finds its end."""
        self._watch_writing(connection, False)
        connection.mute = True
        connection.out, connection.current = [], None
        connection.control.clear()
        if connection.lane.busy is connection:
            connection.lane.busy = None

    def _take_frame(self, connection: Connection) -> bool:
        if connection.mute:
            connection.control.clear()
            return False
        if connection.control:
            # All that wait go in one call.
            connection.out = [memoryview(b"".join(connection.control))]
            connection.control.clear()
            return True
        lane = connection.lane
        if self._next_of(lane) is not connection or lane.busy is not None:
            return False
        sending = lane.heap[0][1]
        stop = min(sending.ready, sending.granted, sending.written + _FRAME)
        age = min(int(1e6 * (time.monotonic() - sending.granted_at)), 2**32 - 1)
        header = HEADER.pack(DATA, VERSION, stop - sending.written, *sending.key, sending.written, len(sending.data), age)
        connection.out = [memoryview(header), sending.data[sending.written : stop]]
        connection.current = (sending, stop)
        lane.busy = connection
        return True

    def _frame_written(self, connection: Connection) -> None:
        if connection.current is None:
            return
        (sending, stop), connection.current = connection.current, None
        connection.lane.busy = None
        connection.moved = time.monotonic()
        sending.written = stop
        if stop == len(sending.data):
            del connection.sendings[sending.key]
            sending.done()

    def _watch_writing(self, connection: Connection, writing: bool) -> None:
        if writing != connection.writing and connection.socket is not None:
            connection.writing = writing
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
            self._selector.modify(connection.socket, events, connection)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _read(self, connection: Connection) -> None:
        taken = 0
        try:
            while connection.socket is not None:
                if taken >= _TURN:
                    self._wait_for(connection)
                    return
                if connection.body is None:
                    count = connection.socket.recv_into(memoryview(connection.header)[connection.have :])
                else:
                    count = connection.socket.recv_into(connection.body[connection.filled :])
                if count == 0:
                    self._lose(connection, "closed by the peer")
                    return
                taken += count
                self._took(connection, count)
        except BlockingIOError:
            self._wait_for(connection)
        except OSError as error:
            self._lose(connection, str(error))
        except WireError as error:
            self._fail(connection, error)

    def _wait_for(self, connection: Connection) -> None:
        """On a slow link bytes come a packet at a time: the thread sleeps until there are some."""
        left = 1 if connection.body is None else min(len(connection.body) - connection.filled, _READ)
        if connection.socket is not None and left != connection.low_water and connection.socket.family != LOCAL:
            connection.low_water = left
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, left)

    def _took(self, connection: Connection, count: int) -> None:
        if connection.body is None:
            connection.have += count
            if connection.have < HEADER.size:
                return
            connection.have = 0
            self._open_frame(connection)
        else:
            connection.filled += count
        if connection.body is not None and connection.filled == len(connection.body):
            self._close_frame(connection)

    def _open_frame(self, connection: Connection) -> None:
        kind, version, length, round_, bucket, slot, offset, size, age = HEADER.unpack(connection.header)
        key = (round_, bucket, slot)
        if version != VERSION or kind not in (DATA, OFFER, GRANT, NOTE):
            raise WireError(
                f"worker {connection.peer} sent a frame of kind {kind}, version {version}, where version {VERSION} was due. "
                "Start all workers from one installation."
            )
        if kind == GRANT:
            self._granted(connection, key, offset, size)
            return
        if kind == OFFER:
            self._offered(connection, key)
            return
        connection.frame, connection.filled = (kind, key, length), 0
        if kind == NOTE:
            connection.body = memoryview(bytearray(length))
            return
        receiving = connection.receivings.get(key)
        if receiving is None or receiving.memory is None or offset != receiving.received or offset + length > receiving.granted:
            raise WireError(
                f"worker {connection.peer} sent bytes {offset} to {offset + length} of round {round_}, bucket {bucket} (slot "
                f"{slot}), which were not due. The workers have got out of step; start them together from one installation."
            )
        check_size(self._rank, connection.peer, key, size, receiving.size)
        connection.answered(age)
        connection.body = receiving.memory[offset : offset + length]

    def _close_frame(self, connection: Connection) -> None:
        assert connection.frame is not None
        (kind, key, length), body = connection.frame, connection.body
        connection.frame = connection.body = None
        if kind == NOTE:
            with self._notes_lock:
                self._notes[connection.peer, key] = bytes(body or b"")
                self._awaited.pop((connection.peer, key), lambda: None)()
            return
        receiving = connection.receivings[key]
        receiving.received += length
        connection.moved = time.monotonic()
        connection.measure(length)
        if receiving.size > _SMALL:
            connection.lane.outstanding -= length
            connection.outstanding -= length
        if receiving.received == receiving.size:
            del connection.receivings[key]
            receiving.done()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _lose(self, connection: Connection, reason: str) -> None:
        connection.lost = reason
        self._fail(connection, ConnectionError(reason))

    def _fail(self, connection: Connection, error: BaseException) -> None:
        """A connection is of no use any more: tells everybody who waits for it."""
        connection.lost = connection.lost or str(error)
        connection.cause = connection.cause or error
        if connection.socket is not None:
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(connection.socket)
            connection.socket.close()
            connection.socket = None
        lane = connection.lane
        if lane.busy is connection:
            lane.busy = None
        connection.current, connection.out = None, []
        connection.control.clear()
        for receiving in list(connection.receivings.values()):
            if receiving.size > _SMALL:
                lane.outstanding -= receiving.granted - receiving.received
            receiving.failed(error)
        for sending in list(connection.sendings.values()):
            sending.failed(error)
        lane.due = [entry for entry in lane.due if entry[1].peer != connection.peer]
        heapq.heapify(lane.due)
        connection.outstanding = 0
        connection.receivings.clear()
        connection.sendings.clear()

    def _drained(self) -> bool:
        """All that was to be sent has reached the others' kernels. (To close a connection earlier could break it off.)"""
        assert self._closing is not None
        if time.monotonic() > self._closing:
            return True
        living = [c for c in self._connections.values() if c.socket is not None]
        return not self._commands and not any(c.out or c.control or unacknowledged(c.socket) for c in living)

    def _tear_down(self) -> None:
        while not self._ended:
            # Whoever waits for one of these has to hear of the end.
            while self._commands:
                with contextlib.suppress(Exception):
                    self._commands.popleft()()
            for connection in self._connections.values():
                self._lose(connection, "the transport was closed")
            with self._commands_lock:
                self._ended = not self._commands
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError, AttributeError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._ring.close()
