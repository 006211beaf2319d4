"""Connections of who is no worker: idle, slow, random, oversized, with a wrong key, or with another run's secret."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from decent_dp.transport.hello import CONTROL, Dialled, Identity
from decent_dp.transport.messages import HELLO, pack
from decent_dp.transport.sockets import Curve
from tests.wires import RUN, SECONDS, Net, content, receive, send

COUNT = 200
# What a ZeroMQ socket without encryption says first: signature, version 3.1, mechanism, no server.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
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


def sends(*parts: bytes, pause: float = 0.0) -> Callable[[socket.socket], None]:
    def send_all(stream: socket.socket) -> None:
        for part in parts:
            stream.sendall(part)
            time.sleep(pause)

    return send_all


def random_bytes(stream: socket.socket) -> None:
    stream.sendall(random.randbytes(5000))


# A frame of 2^40 bytes, as far as its header says; one of 4 MiB, all of it.
OVERSIZED = GREETING + READY + b"\x02" + (2**40).to_bytes(8, "big") + bytes(2**16)
LARGE = GREETING + READY + b"\x02" + (2**22).to_bytes(8, "big") + bytes(2**22)
STRANGERS: list[Callable[[socket.socket], None]] = [
    lambda stream: None,
    sends(*(GREETING[i : i + 1] for i in range(len(GREETING))), pause=0.05),
    random_bytes,
    sends(OVERSIZED),
    sends(LARGE),
    sends(b"GET / HTTP/1.1\r\n\r\n"),
    sends(GREETING, READY, b"\x00\x05hello" * 2000),
]


def pester(net: Net, stop: threading.Event, opened: list[int]) -> None:
    """So many strangers at a time, at both ports, until it stops."""
    draw, streams = random.Random(0), list[socket.socket]()
    while not stop.is_set():
        while len(streams) < COUNT:
            stream = socket.create_connection(("127.0.0.1", port_of(net, draw.choice(["control", "bulk"]))))
            stream.settimeout(0.2)
            streams.append(stream)
            opened.append(1)
            what = draw.choice(STRANGERS)
            if what is STRANGERS[1]:
                threading.Thread(target=contextlib.suppress(OSError)(what), args=(stream,), daemon=True).start()
            else:
                with contextlib.suppress(OSError):
                    what(stream)
        time.sleep(0.05)
        for stream in streams[: COUNT // 4]:
            stream.close()
        del streams[: COUNT // 4]
    for stream in streams:
        stream.close()


def test_many_strangers_delay_nobody_and_take_little_memory(net):
    stop, opened = threading.Event(), list[int]()
    thread = threading.Thread(target=pester, args=(net, stop, opened))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    thread.start()
    longest, until, round_ = 0.0, time.monotonic() + 4, 0
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
        stop.set()
        thread.join()
    assert longest < 1.0
    assert len(opened) > 2 * COUNT
    assert round_ > 10
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 400, f"{grown:.0f} MiB"


def test_a_worker_is_let_in_beside_strangers():
    net, stop, opened = Net(2), threading.Event(), list[int]()
    thread = threading.Thread(target=pester, args=(net, stop, opened))
    thread.start()
    try:
        while len(opened) < COUNT:
            time.sleep(0.01)
        began = time.monotonic()
        net.wires[1].connect(0)
        assert time.monotonic() - began < 1.0
    finally:
        stop.set()
        thread.join()
        net.close()


@pytest.mark.parametrize("encrypts", [False, True])
def test_who_does_not_know_the_secret_gets_no_welcome(encrypts):
    """It speaks the protocol; with encryption it has a key of its own, which the store does not have."""
    net, context = Net(1, encrypts=encrypts), zmq.Context()
    stream = context.socket(zmq.DEALER)
    stream.linger, stream.rcvtimeo = 0, 1000
    curve = Curve.create()
    if encrypts:
        stream.curve_publickey, stream.curve_secretkey, stream.curve_serverkey = curve.public, curve.secret, net.targets[0].key
    try:
        stream.connect(net.targets[0].control)
        keys = curve.public + net.targets[0].key if encrypts else b""
        dialled = Dialled(Identity(RUN, 1, b"stranger"), b"another secret", 0, CONTROL, bytes(16), keys)
        stream.send_multipart([pack(HELLO, flags=1), dialled.hello])
        if encrypts:
            with pytest.raises(zmq.Again):
                stream.recv_multipart()
        else:
            _, challenge = stream.recv_multipart()
            stream.send_multipart([pack(HELLO, flags=3), dialled.prove(challenge)])
            with pytest.raises(zmq.Again):
                stream.recv_multipart()
        assert 1 not in net.wires[0]._flow.connections
    finally:
        context.destroy(linger=0)
        net.close()
