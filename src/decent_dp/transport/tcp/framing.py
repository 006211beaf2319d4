"""Which frame goes next, and what becomes of a frame that came.

The order of messages on a link decides when a bucket can be mixed. So messages are not handed to the kernel at once but frame
by frame, the earliest exchange first, and a receiver grants bytes in the same order (``protocol``). The kernel holds little
that it has not sent, so that grants and the next message's frames do not wait behind it.

Connections inside a node and connections to other nodes do not share a link: each kind has its own order and window.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import selectors
import socket
import time
from collections.abc import Callable

from torch.autograd import profiler

from decent_dp.errors import WireError
from decent_dp.transport.tcp.connection import Connection, Message, Receiving, Sending, SharedLink
from decent_dp.transport.tcp.protocol import DATA, GRANT, HEADER, NOTE, OFFER, SMALL, VERSION, Key, check_size, pack

__all__ = ["Framing"]

# Bytes of a DATA frame: few enough for a grant not to wait long behind one on a slow link, enough to be worth a system call.
_FRAME = 2**16
# Bytes that must be there before a read is worth it, on a slow link.
_READ = 2**15
# Bytes read from one connection before the others are read.
_READ_AT_ONCE = 2**21
_NO_RANGE = contextlib.nullcontext()


class Framing:
    """Reads and writes the frames of all connections of one worker. Used by the reactor's thread alone.

    Args:
        rank: this worker's.
        local: the workers that share this one's network stack.
        selector: the reactor's.
        on_note: called with the peer, the key and the bytes of a NOTE.
    """

    def __init__(
        self,
        rank: int,
        local: frozenset[int],
        selector: selectors.BaseSelector,
        on_note: Callable[[int, Key, bytes], None],
    ) -> None:
        self._rank, self._local, self._selector, self._on_note = rank, local, selector, on_note
        self._links = {local: SharedLink(local) for local in (True, False)}
        self._order = itertools.count()
        self.connections: dict[int, Connection] = {}

    def connection(self, peer: int) -> Connection:
        if peer not in self.connections:
            self.connections[peer] = Connection(peer, self._links[peer in self._local], self._selector)
        return self.connections[peer]

    def open(self, peer: int, stream: socket.socket) -> None:
        if peer in self.connections and self.connections[peer].closed is not None:
            del self.connections[peer]  # the worker is back; what was in flight has failed
        connection = self.connection(peer)
        try:
            connection.open(stream)
        except OSError as error:
            self.close(connection, str(error))

    @property
    def waiting(self) -> bool:
        """A message waits for the kernel to send others, which no event reports."""
        return self._links[False].waiting

    def go_on(self) -> None:
        """Grants and writes what can be granted and written now."""
        for link in self._links.values():
            self._grant_offered(link)
        for link in self._links.values():
            while (connection := self._next_to_send(link)) is not None and self.write(connection):
                pass
        for connection in list(self.connections.values()):
            if connection.has_output:
                self.write(connection)

    def _admit(self, message: Message) -> Connection | None:
        """The connection of a new message; None if the message is done, or has failed, already."""
        connection = self.connection(message.peer)
        if message.size == 0:
            message.done()
        elif connection.closed is not None:
            message.failed(connection.cause or ConnectionError(connection.closed))
        else:
            message.order = next(self._order)
            return connection
        return None

    # -- granting -----------------------------------------------------------------------------------------------------

    def add_receiving(self, receiving: Receiving) -> None:
        connection = self._admit(receiving)
        if connection is None:
            return
        connection.receivings[receiving.key] = receiving
        if receiving.size <= SMALL:
            self._grant(connection, receiving, receiving.size)
        elif receiving.key in connection.early_offers:
            connection.early_offers.remove(receiving.key)
            self._on_offer(connection, receiving.key)

    def _on_offer(self, connection: Connection, key: Key) -> None:
        receiving = connection.receivings.get(key)
        if receiving is None:
            connection.early_offers.add(key)
        else:
            heapq.heappush(connection.link.offered, (receiving.priority, receiving))

    def _grant_offered(self, link: SharedLink) -> None:
        while link.offered:
            receiving = link.offered[0][1]
            connection = self.connections[receiving.peer]
            window = connection.window()
            left, space = receiving.size - receiving.granted, window - link.outstanding
            if space < min(left, window // 4):
                return
            self._grant(connection, receiving, min(left, space))
            if receiving.granted == receiving.size:
                heapq.heappop(link.offered)

    def _grant(self, connection: Connection, receiving: Receiving, amount: int) -> None:
        receiving.granted += amount
        if receiving.size > SMALL:
            connection.count_granted(amount)
        connection.control.append(pack(GRANT, receiving.key, offset=receiving.granted, size=receiving.size))

    def _on_grant(self, connection: Connection, key: Key, upto: int, size: int) -> None:
        sending = connection.sendings.get(key)
        if sending is None:
            connection.early_grants[key] = (upto, size)
            return
        check_size(self._rank, connection.peer, key, size, sending.size)
        sending.granted, sending.granted_at = upto, time.monotonic()
        self.queue(sending)

    # -- writing ------------------------------------------------------------------------------------------------------

    def add_sending(self, sending: Sending) -> None:
        connection = self._admit(sending)
        if connection is None:
            return
        connection.sendings[sending.key] = sending
        if sending.key in connection.early_grants:
            try:
                self._on_grant(connection, sending.key, *connection.early_grants.pop(sending.key))
            except WireError as error:
                self.fail(connection, error)
        self.queue(sending)

    def queue(self, sending: Sending) -> None:
        """Queues a message of which there is something to send, and offers it, once, if it is not small."""
        connection = self.connection(sending.peer)
        if connection.sendings.get(sending.key) is not sending:  # not added yet, done, or failed
            return
        if not sending.offered and sending.ready > 0:
            sending.offered = True
            if sending.size > SMALL:
                connection.control.append(pack(OFFER, sending.key, size=sending.size))
        if sending.sendable and not sending.queued:
            sending.queued = True
            heapq.heappush(connection.link.sendings, (sending.priority, sending))

    def send_note(self, peer: int, key: Key, text: bytes) -> None:
        self.connection(peer).control.append(pack(NOTE, key, len(text), size=len(text)) + text)

    def _next_to_send(self, link: SharedLink) -> Connection | None:
        """The connection that sends the next data of a link."""
        link.waiting = False
        if link.busy is not None:
            return link.busy
        while link.sendings:
            sending = link.sendings[0][1]
            connection = self.connections[sending.peer]
            valid = connection.sendings.get(sending.key) is sending  # has not failed with an earlier connection
            if sending.sendable and valid and not connection.write_failed:
                may = connection.socket is not None and not link.must_wait(sending, self.connections.values())
                return connection if may else None
            heapq.heappop(link.sendings)
            sending.queued = False
        return None

    def write(self, connection: Connection) -> bool:
        """Writes what may go to a peer now; False when the kernel takes no more."""
        assert connection.socket is not None
        while connection.out or self._take_frame(connection):
            try:
                # A range for the profiler costs as much as the call, so there is one only while a profiler runs.
                with profiler.record_function("decent_dp.send") if profiler._is_profiler_enabled else _NO_RANGE:
                    count = connection.socket.sendmsg(connection.out)
            except BlockingIOError:
                connection.watch_writing(True)
                return False
            except ConnectionError:
                # Frames that the peer sent before it closed are still to be read, and reading finds the end.
                connection.watch_writing(False)
                connection.write_failed = True
                connection.drop_output()
                return True
            except OSError as error:
                self.close(connection, str(error))
                return True
            while connection.out and count >= len(connection.out[0]):
                count -= len(connection.out.pop(0))
            if connection.out:
                connection.out[0] = connection.out[0][count:]
            else:
                self._frame_written(connection)
        connection.watch_writing(False)
        return True

    def _take_frame(self, connection: Connection) -> bool:
        if connection.write_failed:
            connection.control.clear()
            return False
        if connection.control:
            # All frames without data go in one call.
            connection.out = [memoryview(b"".join(connection.control))]
            connection.control.clear()
            return True
        link = connection.link
        if self._next_to_send(link) is not connection or link.busy is not None:
            return False
        sending = link.sendings[0][1]
        stop = min(sending.ready, sending.granted, sending.written + _FRAME)
        age = min(int(1e6 * (time.monotonic() - sending.granted_at)), 2**32 - 1)
        header = pack(DATA, sending.key, stop - sending.written, sending.written, sending.size, age)
        connection.out = [memoryview(header), sending.memory[sending.written : stop]]
        connection.current = (sending, stop)
        link.busy = connection
        return True

    def _frame_written(self, connection: Connection) -> None:
        if connection.current is None:
            return
        (sending, stop), connection.current = connection.current, None
        connection.link.busy = None
        connection.moved = time.monotonic()
        sending.written = stop
        if stop == sending.size:
            del connection.sendings[sending.key]
            sending.done()

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, connection: Connection) -> None:
        """Reads what is there, up to a bound."""
        taken = 0
        try:
            while connection.socket is not None and taken < _READ_AT_ONCE:
                into = memoryview(connection.header) if connection.body is None else connection.body
                count = connection.socket.recv_into(into[connection.filled :])
                if count == 0:
                    self.close(connection, "closed by the peer")
                    return
                taken += count
                connection.filled += count
                if connection.body is None and connection.filled == HEADER.size:
                    connection.filled = 0
                    self._open_frame(connection)
                if connection.body is not None and connection.filled == len(connection.body):
                    connection.filled = 0
                    self._close_frame(connection)
            connection.wait_for_bytes(_READ)
        except BlockingIOError:
            connection.wait_for_bytes(_READ)
        except OSError as error:
            self.close(connection, str(error))
        except WireError as error:
            self.fail(connection, error)

    def _open_frame(self, connection: Connection) -> None:
        kind, version, length, round_, bucket, slot, offset, size, age = HEADER.unpack(connection.header)
        key = (round_, bucket, slot)
        if version != VERSION or kind not in (DATA, OFFER, GRANT, NOTE):
            raise WireError(
                f"worker {connection.peer} sent a frame of kind {kind}, version {version}, where version {VERSION} was due. "
                "Start all workers from one installation."
            )
        if kind == GRANT:
            self._on_grant(connection, key, offset, size)
            return
        if kind == OFFER:
            self._on_offer(connection, key)
            return
        connection.frame = (kind, key, length)
        if kind == NOTE:
            connection.body = memoryview(bytearray(length))
            return
        receiving = connection.receivings.get(key)
        if receiving is None or offset != receiving.received or offset + length > receiving.granted:
            raise WireError(
                f"worker {connection.peer} sent bytes {offset} to {offset + length} of round {round_}, bucket {bucket} (slot "
                f"{slot}), which were not due. The workers have got out of step; start them together from one installation."
            )
        check_size(self._rank, connection.peer, key, size, receiving.size)
        connection.measure_latency(age)
        connection.body = receiving.memory[offset : offset + length]

    def _close_frame(self, connection: Connection) -> None:
        assert connection.frame is not None
        (kind, key, length), body = connection.frame, connection.body
        connection.frame = connection.body = None
        if kind == NOTE:
            self._on_note(connection.peer, key, bytes(body or b""))
            return
        receiving = connection.receivings[key]
        receiving.received += length
        connection.measure_rate(length)
        if receiving.size > SMALL:
            connection.count_arrived(length)
        if receiving.received == receiving.size:
            del connection.receivings[key]
            receiving.done()

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self, connection: Connection, reason: str) -> None:
        connection.closed = reason
        self.fail(connection, ConnectionError(reason))

    def fail(self, connection: Connection, error: BaseException) -> None:
        """Closes a connection, and fails all messages that need it."""
        connection.closed = connection.closed or str(error)
        connection.cause = connection.cause or error
        connection.close()
        link = connection.link
        for receiving in list(connection.receivings.values()):
            if receiving.size > SMALL:
                link.outstanding -= receiving.granted - receiving.received
            receiving.failed(error)
        for sending in list(connection.sendings.values()):
            sending.failed(error)
        link.offered = [entry for entry in link.offered if entry[1].peer != connection.peer]
        heapq.heapify(link.offered)
        connection.outstanding = 0
        connection.receivings.clear()
        connection.sendings.clear()
