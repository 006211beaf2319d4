"""Connections of who is no worker: idle, slow, random, oversized, with a wrong key, or with another run's secret."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from decent_dp.transport.hello import Dialled, Identity
from decent_dp.transport.messages import BYE, CONTROL, HELLO, pack
from decent_dp.transport.peer_links import LinkState
from decent_dp.transport.sockets import Curve
from tests.helpers import wait_for
from tests.wires import HEARD, RUN, SECONDS, Net, content, receive, send, stranger

COUNT = 200
# What a ZeroMQ socket without encryption says first: signature, version 3.1, mechanism, no server.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
GUESS = GREETING.replace(b"NULL\0", b"PLAIN") + b"\x04\x13\x05HELLO\x06worker\x05wrong"
READY = b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def net(request: pytest.FixtureRequest) -> Iterator[Net]:
    made = Net(2, encrypts=request.param)
    made.connect()
    yield made
    made.close()


def port_of(net: Net, plane: str) -> int:
    endpoint = net.targets[0].control if plane == "control" else net.targets[0].bulk
    return int(endpoint.rpartition(":")[2])


def test_the_routing_id_of_a_connection_is_of_no_use_at_the_other_listener():
    """Where nothing is encrypted, whoever listens on the way has seen it, and the password."""
    with Net(2) as net:
        net.connect()
        wait_for(lambda: all(wire.links.to(1 - rank).state is LinkState.OPEN for rank, wire in enumerate(net.wires)))
        listens = next(rank for rank in (0, 1) if net.wires[rank].links.by_rank[1 - rank].channels[CONTROL].routing_id)
        link = net.wires[listens].links.by_rank[1 - listens]
        name = link.channels[CONTROL].routing_id
        with stranger(net.targets[listens].bulk, routing_id=name, **HEARD) as stream:
            stream.send(pack(BYE))
            wait_for(lambda: net.wires[listens].router.doorman.dropped > 0)
            assert link.state is LinkState.OPEN


def sends(*parts: bytes, pause: float = 0.0) -> Callable[[socket.socket], None]:
    def send_all(stream: socket.socket) -> None:
        for part in parts:
            stream.sendall(part)
            time.sleep(pause)

    return send_all


def random_bytes(stream: socket.socket) -> None:
    stream.sendall(random.randbytes(5000))


def damaged(stream: socket.socket) -> None:
    """The beginning of an encrypted connection, with bits that are flipped."""
    raw = bytearray(GREETING.replace(b"NULL\0", b"CURVE") + b"\x04\x05HELLO" + bytes(200))
    for _ in range(random.choice([0, 1, 5])):
        raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
    stream.sendall(raw[: random.randrange(len(raw))])


# A frame of 2^40 bytes, as far as its header says; one of 4 MiB, all of it.
OVERSIZED = GREETING + READY + b"\x02" + (2**40).to_bytes(8, "big") + bytes(2**16)
LARGE = GREETING + READY + b"\x02" + (2**22).to_bytes(8, "big") + bytes(2**22)
STRANGERS: list[Callable[[socket.socket], None]] = [
    lambda stream: None,
    sends(*(GREETING[i : i + 1] for i in range(len(GREETING))), pause=0.05),
    random_bytes,
    damaged,
    sends(GUESS),
    sends(OVERSIZED),
    sends(LARGE),
    sends(b"GET / HTTP/1.1\r\n\r\n"),
    sends(GREETING, READY, b"\x00\x05hello" * 2000),
]


def stand(port: int, what: Callable[[socket.socket], None]) -> None:
    """One stranger, for a moment."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as stream:
        stream.settimeout(0.2)
        what(stream)
        time.sleep(0.5)


class Pester:
    """So many strangers at a time, at both ports."""

    def __init__(self, net: Net) -> None:
        self._stop, self.opened = threading.Event(), 0
        self._threads = [threading.Thread(target=self._run, args=(net, seed)) for seed in range(COUNT)]
        for thread in self._threads:
            thread.start()

    def _run(self, net: Net, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop.is_set():
            self.opened += 1
            stand(port_of(net, draw.choice(["control", "bulk"])), draw.choice(STRANGERS))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(SECONDS)


@pytest.mark.parametrize("net", [pytest.param(False, marks=pytest.mark.slow), True], ids=["plain", "encrypted"], indirect=True)
def test_many_strangers_delay_nobody_and_take_little_memory(net):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    pester = Pester(net)
    longest, until, round_ = 0.0, time.monotonic() + 2, 0
    try:
        while time.monotonic() < until:
            began = time.monotonic()
            asked = [receive(net.wires[rank], 1 - rank, (round_, 0, 0), 10**6) for rank in (0, 1)]
            for rank in (0, 1):
                send(net.wires[rank], 1 - rank, (round_, 0, 0), content(rank, 10**6))
            for rank in (0, 1):
                assert asked[rank].result(SECONDS) == content(1 - rank, 10**6)
            longest = max(longest, time.monotonic() - began)
            round_ += 1
    finally:
        pester.stop()
    assert longest < 1.0
    assert pester.opened > 2 * COUNT
    assert round_ > 10
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 400, f"{grown:.0f} MiB"


def test_a_worker_is_let_in_beside_strangers():
    with Net(2) as net:
        pester = Pester(net)
        try:
            time.sleep(0.5)
            began = time.monotonic()
            net.wires[1].connect(0)
            assert net.wires[1].is_connected(0)
            assert time.monotonic() - began < 2.0
        finally:
            pester.stop()


def ask(stream: zmq.Socket[bytes], parts: list[bytes]) -> list[bytes]:
    stream.send_multipart(parts)
    return stream.recv_multipart()


@pytest.mark.parametrize("knows", ["a key", "nothing", "the password"])
def test_who_does_not_know_the_secret_gets_no_welcome(knows):
    """It speaks the protocol. With encryption it has a key of its own, which the store does not have; without, it has seen the
    password on its way, or not."""
    curve = Curve.create()
    with Net(1, encrypts=knows == "a key") as net:
        target, options, keys = net.targets[0], HEARD if knows == "the password" else {}, b""
        if target.key:
            keys = curve.public + target.key
            options = {"curve_publickey": curve.public, "curve_secretkey": curve.secret, "curve_serverkey": target.key}
        with stranger(target.control, **options) as stream:
            dialled = Dialled(Identity(RUN, 1, b"stranger"), b"another secret", 0, CONTROL, bytes(16), keys)
            hello = [pack(HELLO, flags=1), dialled.hello]
            if knows == "the password":
                _, challenge = ask(stream, hello)
                hello = [pack(HELLO, flags=3), dialled.prove(challenge)]
            with pytest.raises(zmq.Again):  # of the question, where libzmq has refused the connection by then
                ask(stream, hello)
        assert 1 not in net.wires[0].links.by_rank


def test_a_name_that_another_connection_has_ends_nobody():
    """libzmq gives a connection without a name the next number, and aborts if one has called itself so."""
    with Net(2) as net, contextlib.ExitStack() as held:
        for begin in (0x6B8B4567, 0x327B23C6):  # where the counts of a process's listeners begin
            for number in range(begin, begin + 20):
                held.enter_context(stranger(net.targets[0].control, routing_id=b"\0" + number.to_bytes(4, "big")))
        for _ in range(50):
            held.enter_context(stranger(net.targets[0].control))
        time.sleep(0.5)
        net.wires[1].connect(0)
        assert net.wires[1].is_connected(0)


def few_descriptors(rank: int, n: int) -> int:
    """Strangers take what they can get, and a worker of this machine connects."""
    net, local = Net(2), Net(2, near=True)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 300, used + 300))
    held = []
    with contextlib.suppress(OSError):
        for _ in range(140):  # both ends are in this process
            held.append(socket.create_connection(("127.0.0.1", port_of(net, "control")), 5))
            time.sleep(0.002)
    left = used + 300 - len(os.listdir("/proc/self/fd"))
    local.connect()
    for stream in held:
        stream.close()
    local.close()
    net.close()
    return left


@pytest.mark.skipif(sys.platform != "linux", reason="it counts descriptors in /proc")
def test_strangers_leave_descriptors_for_workers(workers):
    """Where none is left, libzmq aborts a process at whose local socket somebody knocks."""
    assert workers(1, few_descriptors)[0] > 50


def of_another_user(rank: int, n: int) -> list[bytes]:
    """What a local socket says first to a process of this user, and to one of another."""
    net, found = Net(2, near=True), []
    for user in (os.getuid(), 65534):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as stream:
                os.setuid(user)
                stream.settimeout(5)
                stream.connect(b"\0" + net.targets[0].control.removeprefix("ipc://@").encode())
                os.write(writing, stream.recv(1))
            os._exit(0)
        os.close(writing)
        os.waitpid(child, 0)
        found.append(os.read(reading, 1))
        os.close(reading)
    net.close()
    return found


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can become another user")
def test_local_sockets_are_for_processes_of_the_same_user(workers):
    assert workers(1, of_another_user) == [[b"\xff", b""]]
