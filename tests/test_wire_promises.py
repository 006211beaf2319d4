"""What the wire promises beyond its contract: sockets, a busy interpreter, secrets, IPv6, and what was once lost."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import zmq

import decent_dp
from decent_dp.topo import Edge
from decent_dp.transport import ProcessGroupTransport, addresses, rendezvous
from decent_dp.transport.dialling import Dialler
from decent_dp.transport.messages import (
    BULK,
    CONTROL,
    DATA,
    HEADER_BYTES,
    HELLO,
    LARGEST_FRAME,
    START,
    VERSION,
    pack,
)
from decent_dp.transport.pace import Pace
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.peer_links import LinkState
from decent_dp.transport.router import Router
from decent_dp.transport.sockets import _OPEN, Channel, Curve, Event, Sockets, _inode_of
from tests.helpers import wait_for
from tests.wires import (
    HEARD,
    SECONDS,
    SECRET,
    Net,
    Unwired,
    content,
    identity,
    make_connections,
    make_doorman,
    make_links,
    receive,
    send,
    stranger,
)

# -- sockets -----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make_sockets() -> Iterator[Callable[[], Sockets]]:
    made: list[Sockets] = []

    def make() -> Sockets:
        made.append(Sockets(10.0, b""))
        return made[-1]

    yield make
    for sockets in made:
        if sockets._made:
            sockets.close_all()


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_options_of_sockets(make_sockets, encrypted):
    """libzmq ignores those that are set after a bind or a connect, without an error."""
    curve, sockets = Curve.create() if encrypted else None, make_sockets()
    control, bulk = (sockets.listen("tcp://127.0.0.1:*", curve, beats=beats) for beats in (True, False))
    dialled = sockets.dial(control.endpoint, b"id", curve, curve.public if curve else b"")
    for made in (control, bulk, dialled):
        for option, value in (
            *((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0), (zmq.IMMEDIATE, 0), (zmq.RECONNECT_IVL, 2**29)),
            *((zmq.MAXMSGSIZE, LARGEST_FRAME + HEADER_BYTES), (zmq.HANDSHAKE_IVL, 3000)),
            *((zmq.HEARTBEAT_IVL, 0 if made is bulk else 500), (zmq.MECHANISM, zmq.CURVE if encrypted else zmq.NULL)),
            (zmq.TCP_KEEPALIVE, 1 if made is bulk else -1),
        ):
            assert made.zmq.get(option) == value, option
        if made is not bulk:
            assert made.zmq.get(zmq.HEARTBEAT_TIMEOUT) == 2500, "before 0.3 of dead_after"
        assert made.monitor.get(zmq.RCVHWM) == 0, "one that is not read would stop the socket"
    # Who connects before this is bound is refused.
    assert (sockets.authenticator is not None) == encrypted


def test_what_was_sent_goes_out_when_a_worker_ends(make_sockets):
    here, listener = make_sockets(), make_sockets().listen("tcp://127.0.0.1:*")
    dialled = here.dial(listener.endpoint, b"id", None, b"")
    assert dialled.zmq.poll(5000, zmq.POLLOUT)
    for _ in range(32):
        dialled.zmq.send(bytes(2**14))
    here.close_all(flush=True)
    listener.zmq.set(zmq.RCVTIMEO, 500)
    assert sum(len(listener.zmq.recv_multipart()[1]) for _ in range(32)) == 2**19


def ends_without_a_close(rank: int, n: int, path: Path) -> None:
    transport = ProcessGroupTransport()
    transport.prepare([Edge([0, 1], 0.5)])
    transport.control.gather(None)  # both are connected
    thread = transport._wire.commands.thread

    def look() -> None:
        (path / str(rank)).write_text(str(thread.is_alive()))

    Finalize(None, look, exitpriority=1)


def test_a_process_that_ends_without_a_close_sends_what_it_has(workers, tmp_path):
    """It has done its exchanges, which nobody acknowledges inside a node."""
    workers(2, ends_without_a_close, tmp_path)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["False", "False"]


def test_what_came_before_the_end_of_a_connection_can_be_read():
    """At either end: one that was dialled drops what was not read if it may not wait for another connection."""
    here, there = (Sockets(10.0, b"") for _ in range(2))
    listener = there.listen("tcp://127.0.0.1:*")
    dialled = here.dial(listener.endpoint, b"id", None, b"")
    assert dialled.monitor.poll(1000 * SECONDS)
    dialled.zmq.send(b"x")
    assert listener.zmq.poll(1000 * SECONDS)
    name, _ = listener.zmq.recv_multipart()
    for i in range(20):
        listener.zmq.send_multipart([name, content(i, 1000)])
    there.close_all(flush=True)
    deadline = time.monotonic() + SECONDS
    while not any(event.is_end for event in dialled.events()):
        assert time.monotonic() < deadline
    assert dialled.zmq.poll(1000 * SECONDS)
    assert [dialled.zmq.recv(zmq.NOBLOCK) for _ in range(20)] == [content(i, 1000) for i in range(20)]
    here.close_all()


def test_the_end_of_the_bulk_connection_is_not_that_of_the_messages():
    """Two connections of a process that has ended end in any order, and its last message came over the other one."""
    with Net(2, near=True) as net:
        net.connect()
        arrived = receive(net.wires[0], 1, (0, 0, 2), 1000)
        bulk = net.wires[0].links.by_rank[1].channels[BULK]
        net.wires[0].call(lambda: net.wires[0].router._reader.end(bulk))
        sent = content(0, 1000)
        send(net.wires[1], 0, (0, 0, 2), sent)
        assert arrived.result(SECONDS) == sent
        late = receive(net.wires[0], 1, (1, 0, 2), 1000)
        with pytest.raises(ConnectionError, match="closed by the peer"):
            late.result(SECONDS)


def test_a_connection_ends_where_no_descriptor_is_left(monkeypatch):
    """Memory that was lent to it is used anew from then on. Those that come while a listener closes end, too."""
    here, there = (Sockets(10.0, b"") for _ in range(2))
    listener = there.listen("tcp://127.0.0.1:*")
    dialled = [here.dial(listener.endpoint, b"%d" % i, None, b"") for i in range(3)]
    for made in dialled:
        made.zmq.send(b"")
        assert listener.zmq.poll(1000 * SECONDS)
        listener.zmq.recv_multipart()

    def dup(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", dup)
    began = time.monotonic()
    there.close_all()
    here.close_all()
    assert time.monotonic() - began < 1


def closes_at_once() -> None:
    for _ in range(8):
        here, context = Sockets(0.2, b""), zmq.Context()
        there = context.socket(zmq.ROUTER)
        there.set(zmq.RCVHWM, 8)
        port = there.bind_to_random_port("tcp://127.0.0.1")
        dialled = here.dial(f"tcp://127.0.0.1:{port}", b"id", None, b"")
        dialled.zmq.send(b"")
        name, _ = there.recv_multipart()
        for _ in range(32):
            dialled.zmq.send(bytes(2**22), copy=False)
        closing = threading.Thread(target=here.close_all)
        closing.start()
        with contextlib.suppress(zmq.ZMQError):
            for _ in range(20):
                there.send_multipart([name, bytes(1000)])
                time.sleep(0.001)
        context.destroy(0)
        closing.join()


def test_both_ends_may_close_at_once():
    """libzmq 4.3.5 aborts the process if a heartbeat is due at a connection that has ended after its socket was closed."""
    process = multiprocessing.get_context("forkserver").Process(target=closes_at_once)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0


def test_an_address_in_use(make_sockets):
    sockets = make_sockets()
    with pytest.raises(OSError, match="in use"):
        sockets.listen(sockets.listen("tcp://127.0.0.1:*").endpoint)


def test_ipv6(make_sockets):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    sockets = make_sockets()
    listener = sockets.listen("tcp://[::1]:*")
    dialled = sockets.dial(listener.endpoint, b"id", None, b"")
    assert dialled.monitor.poll(5000)
    assert dialled.events()[0].kind == zmq.EVENT_CONNECTED
    port = int(listener.endpoint.rpartition(":")[2])
    addresses.probe({"node": "far", "host": "::1", "port": port}, "here", 5.0).close()


def test_strangers_are_reported_once_and_nothing_tells_the_secret(caplog):
    caplog.set_level(logging.DEBUG)
    with Net(1) as net:
        for count in (1, 2):
            with stranger(net.targets[0].control, **HEARD) as stream:
                stream.send_multipart([pack(1, flags=1), b"no hello"])
                wait_for(lambda count=count: net.wires[0].router.doorman.dropped >= count)
    assert sum("did not greet" in record.message for record in caplog.records) == 1
    curve = Curve.create()
    told = caplog.text + repr(net.wires[0]) + repr(net.wires[0].router._identity) + repr(curve)
    assert SECRET.decode() not in told
    assert curve.secret.hex() not in told
    assert repr(curve.secret) not in told


# -- a busy interpreter ------------------------------------------------------------------------------------------------------


def holds_the_lock(rank: int, n: int, encrypts: bool) -> Any:
    if encrypts:
        rendezvous.network_stack = lambda: f"node {rank}"
        addresses._own_address = lambda **_: "127.0.0.1"
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = decent_dp.gossip(model, optimizer, topology="ring", faults=decent_dp.Tolerate(dead_after=1.0))
    neighbours: Any = replica.world.neighbours  # type: ignore[attr-defined]
    found, until, held = set[int](), time.monotonic() + 3.5, False
    while time.monotonic() < until:
        model(torch.ones(1, 10)).sum().backward()
        optimizer.step()
        if rank == 1 and not held and until - time.monotonic() < 3:
            held = True
            for _ in range(2):  # calls that keep the interpreter lock
                ctypes.PyDLL(None).usleep(ctypes.c_uint(900_000))
        if rank == 0:
            seen = neighbours.look()
            found |= (seen.silent | seen.lost) - seen.left
        time.sleep(0.01)
    reconnects = replica.stats().reconnects
    replica.close()
    return found, reconnects


@pytest.mark.parametrize("encrypts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_busy_interpreter_is_not_silent(workers, encrypts):
    """For 1.8 times ``dead_after``."""
    assert workers(2, holds_the_lock, encrypts) == [(set(), 0)] * 2


# -- pace, and what was lost --------------------------------------------------------------------------------------------------


def test_a_rate_is_known_after_messages_that_take_less_than_its_interval():
    pace, now = Pace(), 0.0
    for _ in range(40):
        pace.want(10**5, now)
        now += 0.001
        pace.came(10**5, now)
        now += 1.0  # nothing is due
    assert pace.rate == pytest.approx(1e8, rel=0.1)


def test_an_earlier_round_has_the_uplink_for_all_of_its_bytes_in_flight():
    """Also while one message is out, and the next one is not asked for yet."""
    wires, size = Unwired(2), 2**20
    for bucket in (0, 1):
        wires.post((3, bucket, 0), size)
    wires.post((4, 0, 0), size, peer=2)
    wires.start((3, 0, 0), 0, size, size)
    wires.start((4, 0, 0), 0, size, size, peer=2)
    assert sum(header.second for header in wires.headers(DATA)) == size
    assert wires.headers(DATA, peer=2) == []
    wires.start((3, 0, 0), size, size, size)
    assert sum(header.second for header in wires.headers(DATA, peer=2)) == size, "the uplink is free"


@pytest.mark.parametrize(
    ("rate", "granted", "frame"),
    [
        (0, 2**18, 2**15),
        (0, 2**16, 2**14),
        (1e6, 2**16, 2**14),
        (1e7, 2**18, 50_000),
        (1e9, 2**18, 2**17),
        (1e9, 2**15, 2**14),
        (1e9, 2**22, 2**19),
    ],
)
def test_frames_are_as_large_as_the_network_is_fast(rate, granted, frame):
    """At least 16 KiB; an eighth of what is wanted, or what comes in 5 ms, up to 128 KiB and half of what is wanted."""
    wires = Unwired()
    wires.link.lane.network.pace.rate = rate
    wires.post((3, 0, 0), 2**22)
    wires.start((3, 0, 0), 0, granted, 2**22)
    assert wires.headers(DATA)[0].second == frame


def test_a_hint_that_is_sent_before_there_is_a_connection_is_kept():
    wires = Unwired()
    wires.connections.lose(wires.link, "cut")
    wires.sent[1].clear()
    wires.connections.hints.send(1, (0, 0, 1), b"hint")
    assert wires.sent[1] == []
    wires.open()
    assert b"hint" in wires.sent[1]
    assert [header.key for header in wires.headers(START)] == [(0, 0, 1)]


def test_inside_a_node_a_message_is_asked_for_at_once():
    wires = Unwired(near=True)
    wires.expect((0, 0, 2), 10**6)
    assert [header.second for header in wires.headers(START)] == [10**6]


def test_inside_a_node_nobody_says_that_a_message_has_arrived():
    """Threads are woken for each message: 'complete' on four workers of one node was slower by a quarter."""
    wires, done = Unwired(near=True), list[str]()
    wires.post((0, 0, 2), 2**20).done = lambda: done.append("sent")
    wires.start((0, 0, 2), 0, 2**20, 2**20, offers=False)
    assert done == ["sent"]
    assert wires.lent == 0, "its memory is the caller's again"
    wires.headers(START)
    wires.expect((0, 0, 3), 9).done = lambda: done.append("read")
    wires.data((0, 0, 3), 0, 9, 9)
    assert done == ["sent", "read"]
    assert len(wires.headers(START)) == 1


def test_nothing_is_sent_on_a_connection_whose_socket_was_closed():
    context = zmq.Context()
    stream = context.socket(zmq.DEALER)
    stream.close()
    Channel(SimpleNamespace(zmq=stream), 0).send(pack(DATA), b"body")  # type: ignore[arg-type]
    context.term()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("comes_back", [True, False])
def test_who_could_not_be_reached_is_tried_again_for_a_time(comes_back):
    """Nothing else happens that would wake the thread."""
    with Net(2, dead_after=10.0 if comes_back else 0.5) as net:
        net.unreachable[0] = UnreachableError("there", "timed out")
        if comes_back:
            threading.Timer(0.1, net.unreachable.clear).start()
        began = time.monotonic()
        net.wires[1].connect(0)
        assert net.wires[1].is_connected(0) == comes_back
        seconds = time.monotonic() - began
        assert seconds < 1.5 if comes_back else 0.5 < seconds < 3
        assert comes_back or isinstance(net.wires[1].why_lost(0), UnreachableError)


def test_a_stop_of_this_process_makes_nobody_silent_whom_it_has_just_dialled(monkeypatch):
    now, connections = 100.0, make_connections(0, make_links(now=lambda: now))
    credentials: Any = SimpleNamespace(identity=identity(0))
    dialler = Dialler(credentials, Mock(dead_after=10.0), Mock(), connections, Mock(), SECONDS)
    link = connections.links.to(1)
    connections.links.needed.add(1)
    dialler.look()
    after = time.monotonic() + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: after)
    now = 101.0
    dialler._fail(dialler._wanted[1], UnreachableError("there", "timed out"))
    assert link.state is LinkState.BROKEN
    assert link.silence(now) == 1.0


def attempt(net: Net, silent: socket.socket) -> Any:
    """What worker 1 does to reach worker 0, where nobody answers."""
    port = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
    net.targets[0] = replace(net.targets[0], control=port, bulk=port)
    net.wires[1].connect(0)
    wanted = net.wires[1].router._dialler._wanted
    wait_for(lambda: 0 in wanted and wanted[0].ends)
    return wanted[0]


def test_who_was_about_to_be_let_in_is_dialled_again():
    """The connection that has ended an attempt may be lost before it is used."""
    with socket.create_server(("127.0.0.1", 0)) as silent, Net(2) as net:
        target = net.targets[0]
        attempt(net, silent)
        net.targets[0] = target
        net.wires[1].call(lambda: net.wires[1].router._dialler.cancel(0))
        began = time.monotonic()
        assert net.wires[1].is_connected(0)
        assert time.monotonic() - began < 3


def test_a_busy_worker_is_dialled_again():
    """It has accepted, and the connection ended before it has greeted."""
    with socket.create_server(("127.0.0.1", 0)) as busy, Net(2) as net:
        target = net.targets[0]
        net.targets[0] = replace(target, control=f"tcp://127.0.0.1:{busy.getsockname()[1]}")

        def serve() -> None:
            for _ in range(2):
                busy.accept()[0].close()
            net.targets[0] = target

        thread = threading.Thread(target=serve)
        thread.start()
        net.wires[1].connect(0)
        assert net.wires[1].is_connected(0)
        thread.join(SECONDS)


class Listener:
    """Hashable, as a socket is."""

    is_router, is_open_to_others = True, True

    def __init__(self, events: Sequence[Event] = ()) -> None:
        self.zmq, self.channels, self.pending = self, dict[bytes, Channel](), events

    def events(self) -> Sequence[Event]:
        return self.pending

    def recv(self, *_: Any) -> bytes:
        return b"noise"


def make_router(**parts: Any) -> Any:
    """Of a worker without sockets and threads."""
    router = Router.__new__(Router)
    vars(router).update(parts)
    return router


def test_who_sends_without_end_keeps_the_thread_for_a_bounded_time():
    heard, began = [], time.monotonic()
    doorman = SimpleNamespace(hear=lambda *found: heard.append(found))
    make_router(_sockets=SimpleNamespace(reads=lambda _: True), doorman=doorman).read(Listener(), began + 0.05)
    assert time.monotonic() - began < 2
    assert heard


@pytest.mark.parametrize("is_open", [True, False])
def test_a_routing_id_that_others_may_have_seen_is_of_one_connection(is_open):
    listener: Any = Listener([Event(zmq.EVENT_DISCONNECTED, 5)])
    listener.is_open_to_others = is_open
    channel = listener.channels[b"id"] = Channel(listener, CONTROL, b"id", 5)
    reader = SimpleNamespace(over=[])
    make_router(_reader=reader).read_events(listener)
    assert (b"id" in listener.channels) == (not is_open), "elsewhere, what came before the end is read"
    assert reader.over == [channel]


def has_no_descriptor(rank: int, n: int) -> str:
    def listen(*_: Any, **__: Any) -> Any:
        raise zmq.ZMQError(errno.EMFILE)

    if rank == 1:
        Sockets.listen = listen  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as found:
        ProcessGroupTransport()
    return str(found.value)


def test_a_socket_that_cannot_be_made_is_an_error_on_all_workers(workers):
    assert set(workers(2, has_no_descriptor)) == {"Worker 1: Too many open files"}


@pytest.mark.parametrize("free", [0, 1])
def test_a_worker_without_descriptors_dials_again(monkeypatch, free):
    """``free``: sockets that can still be made."""
    made, real = [], zmq.Socket.get_monitor_socket

    def get_monitor_socket(own: Any, *args: Any) -> Any:
        made.append(own)
        if free < len(made) < free + 4:
            raise zmq.ZMQError(errno.EMFILE)
        return real(own, *args)

    with Net(2) as net:
        monkeypatch.setattr(zmq.Socket, "get_monitor_socket", get_monitor_socket)
        net.connect()
        assert all(stream.closed for stream in made[free : free + 3])


def test_a_descriptor_that_is_used_anew_at_the_other_listener():
    """The events of two listeners come in no common order: the end of an old connection is not that of the new one."""
    control, bulk = Listener(), Listener()
    doorman: Any = make_doorman()
    for socket_, kind in ((control, zmq.EVENT_ACCEPTED), (bulk, zmq.EVENT_ACCEPTED), (control, zmq.EVENT_DISCONNECTED)):
        doorman.on_event(socket_, Event(kind, 5))
    assert list(doorman._strangers) == [(bulk, 5)]


# -- what others may do ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_the_first_wrong_message_ends_a_connection():
    """libzmq would keep what comes over it meanwhile."""
    with Net(2) as net, stranger(net.targets[0].control, **HEARD) as stream:
        monitor = stream.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        began = time.monotonic()
        stream.send_multipart([b"much", b"of", b"this"])
        assert monitor.poll(1000 * SECONDS)
        assert time.monotonic() - began < 2, "before it would have had to prove who it is"
        stream.disable_monitor()
        monitor.close()
        net.connect()


def test_a_child_keeps_the_files_of_the_user(make_sockets, tmp_path):
    """A descriptor may be a file's by the time at which the event is read that named it."""
    sockets = make_sockets()
    listener = sockets.listen("tcp://127.0.0.1:*")
    with (tmp_path / "data").open("w") as file, socket.socket() as connection:
        listener._listening.clear()  # in use by libzmq
        for descriptor in (file.fileno(), connection.fileno()):
            listener._connections[descriptor] = _inode_of(descriptor)
        assert _inode_of(file.fileno()) == 0
        assert listener in _OPEN
        listener.close_in_child()
        assert os.fstat(file.fileno()).st_ino
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(connection.detach())
        listener._connections.clear()
    sockets.close_all()
    assert listener not in _OPEN


@pytest.mark.timeout(60)
def test_one_of_two_ports_is_not_a_way():
    with socket.create_server(("127.0.0.1", 0)) as silent, Net(2, dead_after=1.5) as net:
        bulk = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        net.targets[0] = replace(net.targets[0], bulk=bulk, where="127.0.0.1 port 1")
        began = time.monotonic()
        net.wires[1].connect(0)
        assert not net.wires[1].is_connected(0)
        assert "has not answered at 127.0.0.1 port 1 in time, only one of its two" in str(net.wires[1].why_lost(0))
        assert 1.4 < time.monotonic() - began < 10


def test_what_others_write_to_the_store_is_compared():
    assert rendezvous._are_equal("ab", "ab")
    assert not rendezvous._are_equal("\u00e9", "ab")


def test_a_worker_of_another_version_is_named():
    header = bytearray(pack(HELLO, flags=2))
    header[2] += 1  # the version
    with socket.create_server(("127.0.0.1", 0)) as silent, Net(2) as net:
        wanted = attempt(net, silent)
        net.wires[1].call(lambda: net.wires[1].router._dialler.hear(next(iter(wanted.ends)).socket, bytes(header)))
        wait_for(lambda: f"version {VERSION + 1}, where version {VERSION} was due" in str(net.wires[1].links.to(0).why))


def test_the_latency_is_that_of_requests():
    """Not of bytes that were asked for before the peer was in the exchange."""
    pace = Pace()
    pace.want(100, 1.0)
    pace.came(100, 5.0)
    assert pace.latency == 0.0
    pace.want(100, 6.0, asks=True)
    pace.came(100, 6.5)
    assert pace.latency == 0.5
