"""Somebody between two nodes: what passes is recorded, changed and sent again."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

import pytest
import torch

from decent_dp.topo import Edge
from decent_dp.transport import ExchangeId, ProcessGroupTransport, addresses, process_group, rendezvous
from decent_dp.transport.dialling import Target
from tests.helpers import came, request
from tests.test_transport import caught

NUMEL = 40_000
EDGE = Edge([0, 1], 0.5)


class Between:
    """Forwards the connections of one plane to a port of this machine.

    Args:
        changes: the byte of what the dialled worker answers that is changed; None for none.

    Attributes:
        said, answered: what the dialling worker has said on the first connection, and what the other one has.
    """

    def __init__(self, port: int, changes: int | None = None) -> None:
        self.target, self.changes = port, changes
        self.said, self.answered = bytearray(), bytearray()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                dialling = self.listener.accept()[0]
                there = socket.create_connection(("127.0.0.1", self.target))
                threading.Thread(target=self._forward, args=(dialling, there, self.said, None), daemon=True).start()
                threading.Thread(target=self._forward, args=(there, dialling, self.answered, self.changes), daemon=True).start()

    def _forward(self, source: socket.socket, to: socket.socket, record: bytearray, changes: int | None) -> None:
        with contextlib.suppress(OSError):
            while part := bytearray(source.recv(2**16)):
                place = -1 if changes is None else changes - len(record)
                record += part
                if 0 <= place < len(part):
                    part[place] ^= 1
                to.sendall(part)
        for stream in (source, to):
            with contextlib.suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)


def apart(rank: int, encrypt: bool | None, changes: int | None = None) -> tuple[Any, list[Between]]:
    """A transport of a worker with a node of its own, and who is between it and the others, if it has dialled."""
    rendezvous.network_stack = lambda: f"node {rank}"
    addresses._own_address = lambda **_: "127.0.0.1"
    between: list[Between] = []
    find = process_group.find

    def find_between(*args: Any) -> Target:
        target = find(*args)
        if not between:
            ports = [int(endpoint.rpartition(":")[2]) for endpoint in (target.control, target.bulk)]
            between.extend([Between(ports[0]), Between(ports[1], changes)])
        control, bulk = (f"tcp://127.0.0.1:{one.port}" for one in between)
        return Target(control, bulk, target.key, target.where)

    process_group.find = find_between
    return ProcessGroupTransport(encrypt=encrypt), between


def content(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def swap(transport: Any, round_: int) -> torch.Tensor:
    own = request(content(transport.rank), transport.rank, ExchangeId(round_, 0))
    transport.start(EDGE, own).wait()
    return came(own)


def recorded(rank: int, n: int, encrypt: bool | None) -> Any:
    transport, between = apart(rank, encrypt)
    transport.prepare([EDGE])
    assert torch.equal(swap(transport, 0), content(1 - rank))
    passed = [bytes(record) for one in between for record in (one.said, one.answered)]
    ports = [one.target for one in between]
    # Sent again, to the worker that was dialled.
    again = []
    for port, said in zip(ports, passed[::2], strict=True):
        with socket.create_connection(("127.0.0.1", port)) as stream:
            stream.settimeout(20)
            with contextlib.suppress(OSError):
                stream.sendall(said)
            heard = bytearray()
            with contextlib.suppress(OSError):
                while part := stream.recv(2**16):
                    heard += part
                    stream.settimeout(4)
            again.append(bytes(heard))
    transport.control.gather(None)
    assert torch.equal(swap(transport, 1), content(1 - rank)), "the connections go on"
    strangers = sum(greeting.proven for greeting in transport._wire.router.doorman._greetings.values())
    transport.control.gather(None)
    transport.close()
    return passed, again, strangers


@pytest.mark.parametrize("encrypt", [None, False])
def test_who_records_learns_no_parameters_and_opens_nothing_with_them(workers, encrypt):
    found = workers(2, recorded, encrypt)
    (passed, again, _), (nothing, _, _) = sorted(found, key=lambda of: -len(of[0]))
    assert nothing == []
    assert len(passed) == 4
    whole = b"".join(passed)
    assert len(whole) > 2 * 4 * NUMEL
    for rank in range(2):
        raw = content(rank).numpy().tobytes()
        seen = sum(raw[start : start + 16] in whole for start in range(0, len(raw), 1600))
        assert (seen == 0) if encrypt is None else (seen > 90), "without encryption all of it is seen"
    assert all(strangers == 0 for _, _, strangers in found), "nothing is proven by what was recorded"
    assert all(len(heard) < 2000 for heard in again), "a challenge at most, and no data"


def changed(rank: int, n: int, encrypt: bool | None) -> Any:
    os.environ["DECENT_DP_DEAD_AFTER"] = "60"
    transport, _ = apart(rank, encrypt, changes=60_000)
    transport.prepare([EDGE])
    got: list[torch.Tensor] = []
    outcome = caught(lambda: got.append(swap(transport, 0)))
    transport.control.gather(None)
    transport.close()
    return outcome, [torch.equal(values, content(1 - rank)) for values in got]


def test_a_changed_byte_ends_the_connection_and_what_is_mixed_is_right(workers):
    """It is made again, and what was on its way is sent again. libzmq's heartbeats would find nothing for 18 s."""
    found = workers(2, changed, True)
    for (kind, _, seconds), is_right in found:
        assert (kind, is_right) == ("nothing", [True])
        assert seconds < 10
