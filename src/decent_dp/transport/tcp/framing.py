"""Which frame goes next, and what becomes of a frame that came.

The order of messages on a link decides when a bucket can be mixed. So messages are not handed to the kernel at once but frame
by frame, the earliest exchange first, and a receiver grants bytes in the same order (``protocol``). The kernel holds little
that it has not sent, so that grants and the next message's frames do not wait behind it.

Connections inside a node and connections to other nodes do not share a link: each kind has its own order and window.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import itertools
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from torch.autograd import profiler

from decent_dp.errors import WireError
from decent_dp.transport.communicators import SilentError
from decent_dp.transport.settlement import Settlement
from decent_dp.transport.tcp.connection import Connection, LinkState, Message, Receiving, Sending, SharedLink
from decent_dp.transport.tcp.protocol import (
    ACK,
    ASK,
    BEAT,
    BYE,
    DATA,
    DROP,
    GOT,
    GRANT,
    HEADER_SIZE,
    LARGEST_DATA,
    NOTE,
    OFFER,
    SMALL,
    DamagedError,
    Frame,
    Key,
    check_size,
    checksum,
    pack,
    unpack,
)
from decent_dp.transport.votes import Vote

__all__ = ["Framing"]

_log = logging.getLogger(__name__)

# Bytes of a DATA frame, at most.
_FRAME = LARGEST_DATA
# Bytes read from one connection before the others are read.
_READ_AT_ONCE = 2**21
# Seconds after which other peers have their turn: a note may need much more time than its bytes.
_READ_FOR = 0.02
# Bits of the size of a BEAT: the sender wants one in return; it makes no rounds at present.
_ASKS, _PAUSES = 1, 2
# Offers, grants and notes that one peer may have sent ahead.
_MOST_AHEAD = 2**16
_NO_RANGE = contextlib.nullcontext()


class Framing:
    """Reads and writes the frames of all connections of one worker. Used by the reactor's thread alone.

    Args:
        rank: this worker's.
        local: the workers that share this one's network stack.
        selector: the reactor's.
        on_note: called with the peer, the key and the bytes of a NOTE.
        on_open: called with the peer when there is a connection, perhaps in place of a lost one.

    Attributes:
        dead_after: as of ``Tolerate``; None where faults are errors. The kernel breaks no connection then, because a full queue
            at a slow link may look like silence to it.
        round: the one in which this worker is; -1 before the first. ``first_bucket``: of those in use.
        paused: this worker makes no rounds at present.
        epoch: the number of the newest one that this worker knows.
        turn: the seconds that one turn of the thread takes at present.
        reconnects: connections that were made in place of lost ones.
        settlement: of the exchanges with verdicts.
    """

    def __init__(
        self,
        rank: int,
        local: frozenset[int],
        selector: selectors.BaseSelector,
        on_note: Callable[[int, Key, bytes], None],
        on_open: Callable[[int], None] = lambda peer: None,
    ) -> None:
        self._rank, self._local, self._selector = rank, local, selector
        self._on_note, self._on_open = on_note, on_open
        self._links = {local: SharedLink(local) for local in (True, False)}
        self._order = itertools.count()
        self.connections: dict[int, Connection] = {}
        self.dead_after: float | None = None
        self.round, self.first_bucket, self.paused, self.epoch = -1, 0, False, 0
        self.turn = 0.0
        self.reconnects = 0
        self.settlement = Settlement(self)  # type: ignore[arg-type]

    @property
    def tolerant(self) -> bool:
        """Whether a lost connection is made again, and exchanges end with a verdict."""
        return self.dead_after is not None

    def connection(self, peer: int) -> Connection:
        if peer not in self.connections:
            self.connections[peer] = Connection(peer, self._links[peer in self._local], self._selector)
        return self.connections[peer]

    def open(self, peer: int, stream: socket.socket, uid: bytes) -> None:
        """Uses a connection to a process of the peer, which has greeted."""
        connection = self.connection(peer)
        connection.uid = uid
        try:
            connection.open(stream, self.dead_after)
        except OSError as error:
            self.lose(connection, str(error))
            return
        if self.tolerant:
            self.reconnects += connection.lost is not None
            connection.lost = None
            self._start_again(connection)
            self._on_open(peer)

    def renew(self, peer: int, incarnation: int, start: int) -> None:
        """Another process is this peer now, from round ``start`` on. It counts as one that was connected just now."""
        self.give_up(self.connection(peer), "another process has taken its place")
        connection = Connection(peer, self._links[peer in self._local], self._selector)
        connection.incarnation, connection.start = incarnation, start
        connection.enter(LinkState.BROKEN)
        connection.heard = connection.since
        self.connections[peer] = connection

    def _start_again(self, connection: Connection) -> None:
        """Begins a connection, perhaps in place of a lost one: votes and notes are repeated, and messages begin anew."""
        connection.control.clear()
        connection.rewind()
        self.settlement.repeat(connection)
        connection.control.extend(note for notes in connection.notes.values() for note in notes)
        for receiving in connection.receivings.values():
            if receiving.size <= SMALL:
                self._grant(connection, receiving, receiving.size)
        for sending in connection.sendings.values():
            self.queue(sending)

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
        self._forget_before(connection.early_offers, receiving.key)
        if receiving.size <= SMALL:
            self._grant(connection, receiving, receiving.size)
        elif receiving.key in connection.early_offers:
            connection.early_offers.remove(receiving.key)
            self._on_offer(connection, receiving.key)

    def _on_offer(self, connection: Connection, key: Key) -> None:
        receiving = connection.receivings.get(key)
        if receiving is None:
            _bound(connection, len(connection.early_offers))
            connection.early_offers.add(key)
        elif receiving.granted == 0:
            heapq.heappush(connection.link.offered, (receiving.priority, receiving))

    def _grant_offered(self, link: SharedLink) -> None:
        while link.offered:
            receiving = link.offered[0][1]
            connection = self.connections[receiving.peer]
            window = connection.window(receiving.sources)
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
            _bound(connection, len(connection.early_grants))
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
        self._forget_before(connection.early_grants, sending.key)
        if sending.key in connection.early_grants:
            try:
                self._on_grant(connection, sending.key, *connection.early_grants.pop(sending.key))
            except WireError as error:
                self.fail(connection, error)
        self.queue(sending)

    def queue(self, sending: Sending) -> None:
        """Queues a message of which there is something to send, and offers it, once, if it is not small."""
        connection = self.connection(sending.peer)
        if connection.sendings.get(sending.key) is not sending:
            return  # not added yet, or cancelled
        if not sending.offered and sending.ready > 0:
            sending.offered = True
            if sending.size > SMALL:
                connection.control.append(pack(OFFER, sending.key, size=sending.size))
        if self.tolerant and sending.ready == sending.size:
            self.settlement.vote_if_complete(connection, sending.key[1])
        if sending.sendable and not sending.queued:
            sending.queued = True
            heapq.heappush(connection.link.sendings, (sending.priority, sending))

    def send_note(self, peer: int, key: Key, text: bytes) -> None:
        connection = self.connection(peer)
        if connection.state is LinkState.GONE:
            return
        frame = pack(NOTE, key, len(text), size=len(text), checksum=checksum(text)) + text
        if self.tolerant and key[1] < ACK:  # the control plane sends its own again
            connection.keep_note(key[1], frame)
        if not self.tolerant or connection.state is LinkState.OPEN:  # else a new connection begins with it
            connection.control.append(frame)

    def say(self, connection: Connection, kind: int, key: Key) -> None:
        """Sends a vote, or asks for one."""
        connection.control.append(pack(kind, key))

    def recall(self, connection: Connection, sending: Sending) -> None: ...

    def begin(self, bucket: int) -> None:
        """Rounds count from now on for buckets from this number on."""
        self.first_bucket, self.round = bucket, -1
        for connection in self.connections.values():
            connection.forget_rounds()

    def beat(self, connection: Connection, *, ask: bool = False) -> None:
        """Gives a sign of life; ``ask``: and asks for one."""
        unheard = int(1000 * min(time.monotonic() - connection.heard, 1e6))
        says = (_ASKS if ask else 0) | (_PAUSES if self.paused else 0)
        connection.control.append(
            pack(BEAT, (max(self.round, 0), self.first_bucket, 0), size=says, age=unheard, epoch=self.epoch)
        )

    def beat_all(self) -> None:
        for connection in self.connections.values():
            if connection.state is LinkState.OPEN:
                self.beat(connection)

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
            except (ConnectionError, TimeoutError):
                # Frames that the peer sent before it closed are still to be read, and reading finds the end.
                connection.watch_writing(False)
                connection.write_failed = True
                connection.drop_output()
                return True
            except OSError as error:
                self.lose(connection, str(error))
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
            # All frames without data go in one call, with the next data.
            connection.out = [memoryview(b"".join(connection.control))]
            connection.control.clear()
        self._take_data(connection)
        return bool(connection.out)

    def _take_data(self, connection: Connection) -> None:
        link = connection.link
        if self._next_to_send(link) is not connection or link.busy is not None:
            return
        sending, now = link.sendings[0][1], time.monotonic()
        connection.going.resume(now)
        stop = min(sending.ready, sending.granted, sending.written + min(connection.going.piece, _FRAME))
        age = min(int(1e6 * (now - sending.granted_at)), 2**32 - 1)
        body = sending.memory[sending.written : stop]
        found = checksum(body) if connection.checked else 0
        header = pack(DATA, sending.key, len(body), sending.written, sending.size, age, checksum=found)
        connection.out += [memoryview(header), body]
        connection.current = (sending, stop)
        link.busy = connection

    def _frame_written(self, connection: Connection) -> None:
        if connection.current is None:
            return
        (sending, stop), connection.current = connection.current, None
        connection.link.busy = None
        connection.moved = time.monotonic()
        if connection.going.count(stop - sending.written, connection.moved, self.turn):
            connection.hold_unsent()
        sending.written = stop
        # Where faults are tolerated, a message is done when the peer has voted.
        if stop == sending.size and connection.sendings.get(sending.key) is sending and not self.tolerant:
            del connection.sendings[sending.key]
            sending.done()

    # -- reading ------------------------------------------------------------------------------------------------------

    def read(self, connection: Connection) -> None:
        """Reads what is there, up to a bound."""
        try:
            with contextlib.suppress(BlockingIOError):
                self._read(connection)
            connection.wait_for_bytes()
        except OSError as error:
            silent = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
            self.lose(connection, str(error), SilentError(str(error)) if silent else None)
        except DamagedError as error:
            self.lose(connection, str(error), error)
        except WireError as error:
            self.fail(connection, error)

    def _read(self, connection: Connection) -> None:
        taken, until = 0, time.monotonic() + _READ_FOR
        while connection.socket is not None and taken < _READ_AT_ONCE and (not taken or connection.heard < until):
            body, filled = connection.body, connection.filled
            if body is None:
                wanted = HEADER_SIZE - filled
                count = connection.socket.recv_into(connection.header_view[filled:])
            else:
                # After a body comes a header, by the same call.
                wanted = len(body) - filled + HEADER_SIZE
                count = connection.socket.recvmsg_into([body[filled:], connection.header_view])[0]
            if count == 0:
                self.lose(connection, "closed by the peer")
                return
            taken += count
            connection.heard = time.monotonic()
            connection.filled = filled = filled + count
            if body is not None and filled >= len(body):
                connection.filled = filled - len(body)
                body = None  # it keeps the memory of a message
                self._close_frame(connection)
            if connection.body is None and connection.filled == HEADER_SIZE:
                connection.filled = 0
                self._open_frame(connection)
            if connection.body is not None and not len(connection.body):
                self._close_frame(connection)
            if count < wanted:
                return  # no more is there

    def _open_frame(self, connection: Connection) -> None:
        frame = unpack(connection.header, connection.peer)
        kind, key = frame.kind, frame.key
        # A note is for a later round, and frames of earlier buckets belong to a state that was replaced.
        if kind != NOTE and key[1] >= self.first_bucket:
            connection.round = max(connection.round, key[0])
        if kind == GRANT:
            self.settlement.join(connection, key)
            self._on_grant(connection, key, frame.offset, frame.size)
        elif kind == OFFER:
            self.settlement.join(connection, key)
            self._on_offer(connection, key)
        elif kind == BEAT:
            connection.unheard = frame.age / 1000
            connection.paused = bool(frame.size & _PAUSES)
            connection.epoch = max(connection.epoch, frame.epoch)
            if frame.size & _ASKS:
                self.beat(connection)
        elif kind in (GOT, DROP):
            _bound(connection, key[1])
            self.settlement.hear(connection, Vote(key[0], key[1], kind == GOT))
        elif kind == ASK:
            self.settlement.answer(connection, key[0], key[1])
        elif kind == BYE:
            connection.left = True
            self.give_up(connection, "the peer has left")
        else:
            connection.frame = frame
            connection.body = memoryview(bytearray(frame.length)) if kind == NOTE else self._memory_for(connection, frame)

    def _memory_for(self, connection: Connection, frame: Frame) -> memoryview:
        """Where the body of a DATA frame goes."""
        key, length = frame.key, frame.length
        self._forget_before(connection.unwanted, key)  # dropped before they were sent
        unwanted = connection.unwanted.get(key, 0)
        if 0 < length <= unwanted:
            return memoryview(bytearray(length))
        receiving = connection.receivings.get(key)
        if receiving is None or frame.offset != receiving.received or frame.offset + length > receiving.granted:
            raise WireError(
                f"worker {connection.peer} sent bytes {frame.offset} to {frame.offset + length} of round {key[0]}, bucket "
                f"{key[1]} (slot {key[2]}), which were not due. The workers have got out of step; start them together from one "
                "installation."
            )
        check_size(self._rank, connection.peer, key, frame.size, receiving.size)
        self.settlement.join(connection, key)
        connection.measure_latency(frame.age)
        return receiving.memory[frame.offset : frame.offset + length]

    def _forget_before(self, keys: dict[Key, Any] | set[Key], key: Key) -> None:
        """Removes the keys of earlier rounds of a bucket, which both ends have passed: some may never be used.

        Where no exchange is dropped, each is used; that of a group that waits for memory after those of later rounds.
        """
        if len(keys) < 2 or not self.tolerant:
            return
        for early in [early for early in keys if early[1:] == key[1:] and early[0] < key[0]]:
            keys.pop(early) if isinstance(keys, dict) else keys.remove(early)

    def _close_frame(self, connection: Connection) -> None:
        assert connection.frame is not None
        frame, body = connection.frame, connection.body
        connection.frame = connection.body = None
        key, length = frame.key, frame.length
        if frame.checksum and body is not None and checksum(body) != frame.checksum:
            raise DamagedError(f"a message of worker {connection.peer} was damaged on the way: its checksum is wrong")
        if frame.kind == NOTE:
            self._on_note(connection.peer, key, bytes(body or b""))
            return
        receiving = connection.receivings.get(key)
        if receiving is None or key in connection.unwanted:
            left = connection.unwanted.pop(key) - length
            if left > 0:
                connection.unwanted[key] = left
            return
        receiving.received += length
        connection.moved = time.monotonic()
        connection.coming.count(length, connection.moved, self.turn)
        if receiving.size > SMALL:
            connection.count_arrived(length)
        if receiving.received == receiving.size:
            del connection.receivings[key]
            receiving.done()

    def cancel(self, connection: Connection, receiving: Receiving, sending: Sending) -> None:
        """From now on the memory of these messages is the caller's: what is on the way goes elsewhere."""
        if connection.receivings.get(receiving.key) is receiving:
            del connection.receivings[receiving.key]
            connection.link.offered = [entry for entry in connection.link.offered if entry[1] is not receiving]
            heapq.heapify(connection.link.offered)
            on_the_way = receiving.granted - receiving.received
            if on_the_way and connection.socket is not None:
                connection.unwanted[receiving.key] = on_the_way
                if receiving.size > SMALL:
                    connection.count_arrived(on_the_way)
            if connection.frame is not None and connection.frame.key == receiving.key and connection.body is not None:
                connection.body = memoryview(bytearray(connection.body))  # with what has come, for the checksum
        if connection.sendings.get(sending.key) is sending:
            del connection.sendings[sending.key]
            sending.ready = sending.written  # it is not sendable any more
            if connection.current is not None and connection.current[0] is sending and connection.out:
                connection.out[-1] = memoryview(bytes(connection.out[-1]))

    # -- closing ------------------------------------------------------------------------------------------------------

    def lose(self, connection: Connection, reason: str, error: BaseException | None = None) -> None:
        """The connection was lost: where faults are tolerated it is made again, elsewhere its messages fail."""
        if not self.tolerant:
            self.fail(connection, error or ConnectionError(reason))
        elif connection.state is LinkState.OPEN:
            self._let_go(connection)
            connection.enter(LinkState.BROKEN)
            connection.rewind()
            connection.lost = reason
            if connection.losses.again():
                _log.warning(
                    "the connection to worker %d has broken %d times within %.0f s, the last time as follows: %s. It is made "
                    "again, and what was on its way is sent again. See what damages or cuts it: a cable, a firewall, a tunnel",
                    connection.peer,
                    connection.losses.times,
                    math.ceil(connection.losses.seconds),
                    reason,
                )

    def give_up(self, connection: Connection, reason: str) -> None:
        """Where faults are tolerated: the peer has left, or no process listens at its address any more."""
        self._let_go(connection)
        connection.closed = connection.closed or reason
        connection.enter(LinkState.GONE)
        self.settlement.expire(connection)

    def _let_go(self, connection: Connection) -> None:
        """Closes the socket, and forgets what its peer had announced on it."""
        connection.close()
        link = connection.link
        connection.count_arrived(connection.outstanding)
        link.offered = [entry for entry in link.offered if entry[1].peer != connection.peer]
        heapq.heapify(link.offered)
        connection.early_offers.clear()
        connection.early_grants.clear()
        connection.unwanted.clear()

    def close(self, connection: Connection, reason: str) -> None:
        self.fail(connection, ConnectionError(reason))

    def fail(self, connection: Connection, error: BaseException) -> None:
        """Closes a connection, and fails all messages that need it.

        Where faults are tolerated, a peer that sends what was not due costs no more than one that is gone.
        """
        connection.closed = connection.closed or str(error)
        connection.cause = connection.cause or error
        if self.tolerant and isinstance(error, WireError):
            _log.warning("the connection to worker %d was closed for good: %s", connection.peer, error)
            self.give_up(connection, str(error))
            return
        self._let_go(connection)
        connection.enter(LinkState.GONE)
        for receiving in list(connection.receivings.values()):
            receiving.failed(error)
        for sending in list(connection.sendings.values()):
            sending.failed(error)
        connection.receivings.clear()
        connection.sendings.clear()
        if self.tolerant:
            self.settlement.expire(connection)


def _bound(connection: Connection, ahead: int) -> None:
    if ahead >= _MOST_AHEAD:
        raise WireError(f"worker {connection.peer} has announced {ahead} messages ahead, or one of bucket {ahead}: too many")
