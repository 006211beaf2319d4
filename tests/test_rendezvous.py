"""Communicators and the small parts that transports are made of."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import zmq
from torch import nn

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import PeerError, PeerLostError, PeerTimeoutError
from decent_dp.transport import ProcessGroupTransport, addresses, peer_errors, rendezvous
from decent_dp.transport.peer_errors import Notes, UnreachableError, peer_error
from decent_dp.transport.rendezvous import Rendezvous, RunRecord
from decent_dp.transport.sockets import Sockets
from decent_dp.transport.store import StoreClient
from decent_dp.transport.waiter import Waiter
from tests.helpers import SGD, batch, broken_store, listening, silent_store

# -- small parts -----------------------------------------------------------------------------------------------------------


def its_timeout(rank: int, n: int) -> tuple[float, ...]:
    own = ProcessGroupTransport(timeout=0.5)
    short = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    return (
        ProcessGroupTransport()._rendezvous.run.timeout,
        ProcessGroupTransport(short)._rendezvous.run.timeout,
        own.timeout,
        own._rendezvous.run.timeout,
    )


def test_the_timeout_is_the_process_groups(workers):
    """Exchanges may have their own; the workers connect within the process group's."""
    assert workers(2, its_timeout, group_timeout=20) == [(20, 10, 0.5, 20)] * 2


def test_the_waiter_keeps_order_and_survives_errors():
    waiter, done = Waiter("test"), []

    def fail() -> None:
        raise ZeroDivisionError("mine")

    def add(i: int) -> int:
        time.sleep(0.01 * (3 - i))
        done.append(i)
        return i

    futures = [waiter.submit(lambda i=i: add(i)) for i in range(3)]
    failed = waiter.submit(fail)
    last = waiter.submit(lambda: done.append("last"))
    assert [future.result(5) for future in (*futures, last)] == [0, 1, 2, None]
    with pytest.raises(ZeroDivisionError, match="mine"):
        failed.result(5)
    assert done == [0, 1, 2, "last"]
    waiter.close(wait=5)
    assert waiter._thread is not None
    assert not waiter._thread.is_alive()


def notes_of(store: Any, rank: int) -> Notes:
    client = StoreClient(dist.HashStore(), "")
    client._store = store
    return Notes(client, "note", rank)


def test_notes():
    store = dist.HashStore()
    mine, other = notes_of(store, 0), notes_of(store, 1)
    assert mine.read([0, 1]) == ""
    other.write("ValueError: größer\nthan " + "x" * 5000)
    mine.write("my own")
    said = mine.read([0, 1, 2])
    assert said.startswith(" Worker 1 reported: ValueError: größer\nthan x")
    assert "my own" not in said
    assert len(said) < 2100


@pytest.mark.parametrize("make", [broken_store, silent_store])
@pytest.mark.parametrize("first", ["read", "write"])
def test_a_store_that_does_not_answer_is_asked_for_a_note_once(monkeypatch, make, first):
    monkeypatch.setattr(peer_errors, "_STORE_LIMIT", 0.5)
    notes, began = notes_of(store := make(dist.HashStore()), 0), time.monotonic()
    if first == "write":
        notes.write("lost")
    for _ in range(3):
        assert "store does not answer" in notes.read([1, 2])
    notes.write("lost again")
    assert time.monotonic() - began < 1.9  # four limits, if each call waited
    if make is silent_store:
        store.answers.set()


def test_error_texts():
    notes = notes_of(dist.HashStore(), 0)
    minute = 60.0
    gone = peer_error(RuntimeError("Connection closed by peer [127.0.0.1]:1"), [4], "round 1, bucket 0", notes, minute)
    assert isinstance(gone, PeerLostError)
    assert str(gone).startswith("worker 4 is gone")
    silent = peer_error(RuntimeError("Timed out waiting 60000ms for recv"), [4, 5], "a gather", notes, minute)
    assert isinstance(silent, PeerTimeoutError)
    assert "one of the workers [4, 5] sent nothing for a gather within the process group's timeout of 60 s" in str(silent)
    shared = peer_error(RuntimeError(ONE_GPU), [4], "round 0, bucket 0", notes, minute)
    assert type(shared) is PeerError
    assert str(shared).startswith("round 0, bucket 0 failed: workers share a GPU, which NCCL refuses: give each worker a GPU")


# As torch raises it (DistBackendError), and what another error of NCCL says.
ONE_GPU = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.27.5\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
    "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1b000"
)
OTHER = "NCCL error in: NCCLUtils.cpp:94, unhandled system error"


@pytest.mark.parametrize(
    ("text", "message"), [(ONE_GPU, "workers share a GPU.*LOCAL_RANK.*backend='gloo'"), (OTHER, "system error")]
)
def test_two_workers_on_one_gpu_are_told_what_to_do(monkeypatch, text, message):
    def fail(*_: Any, **__: Any) -> None:
        raise dist.DistBackendError(text)

    monkeypatch.setattr(dist, "get_rank", lambda _: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(dist, "all_gather_object", fail)
    with pytest.raises(RuntimeError, match=message):
        Rendezvous.create(None)


# -- addresses -------------------------------------------------------------------------------------------------------------


def meeting_at(store: Any, seconds: float = 5.0, rank: int = 0, **settings: Any) -> Rendezvous:
    node = settings.pop("node", "here")
    run: dict[str, Any] = {"token": b"token", "world_size": 4, "places": 4, "node_of": ("here",) * 4, "timeout": seconds}
    return Rendezvous(dist.PrefixStore("decent_dp/run", store), "run", RunRecord(**run | settings), rank, node)


def far_away(store: Any, rank: int, host: str, port: int) -> None:
    """A worker of another node has stored its address."""
    meeting_at(store, rank=rank).publish(
        {"node": "far", "machine": "m", "pid": 1, "incarnation": 0, "host": host, "port": port, "bulk": port, "key": ""}
    )


def test_a_worker_that_does_not_answer_is_named_with_both_addresses_and_the_ways_out():
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
    store = dist.HashStore()
    far_away(store, 3, host, port)
    rendezvous = meeting_at(store)
    rendezvous.addresses[0] = {"host": "10.1.0.7", "port": 29600}
    with pytest.raises(UnreachableError) as caught:
        addresses.find(rendezvous, 3, 5.0)
    error = peer_error(caught.value, [3], "round 0, bucket 1", notes_of(store, 0), rendezvous.run.timeout)
    assert isinstance(error, PeerLostError)
    assert str(error).startswith(f"worker 3 does not answer at {host} port {port} ([Errno ")
    for said in ("round 0, bucket 1 needs it", "10.1.0.7 port 29600", "DECENT_DP_INTERFACE", "DECENT_DP_PORTS", "WireGuard"):
        assert said in str(error)
    assert "join" not in str(error)


@pytest.mark.parametrize("master", ["localhost", "node0"])
@pytest.mark.parametrize("has_route", [True, False])
def test_the_address_for_others_is_not_loopback_if_another_exists(monkeypatch, master, has_route):
    """A machine whose name is a loopback address, as Debian has it, and whose master may call itself 'localhost'."""
    names = {"localhost": "127.0.0.1", "node0": "10.1.0.1", "here": "127.0.1.1"}

    class Probe:
        def __init__(self, *kind: Any) -> None:
            self.source = ""

        def __enter__(self) -> Probe:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def connect(self, to: tuple[str, int]) -> None:
            if not to[0].startswith("127.") and not has_route:
                raise OSError("network is unreachable")
            self.source = "127.0.0.1" if to[0].startswith("127.") else "10.1.0.7"

        def getsockname(self) -> tuple[str, int]:
            return self.source, 40000

    fake: Any = SimpleNamespace(
        socket=Probe,
        SOCK_DGRAM=socket.SOCK_DGRAM,
        gethostname=lambda: "here",
        getaddrinfo=lambda name, port, type: [(socket.AF_INET, type, 0, "", (names.get(name, name), port))],
    )
    monkeypatch.setattr(addresses, "socket", fake)
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert addresses._own_address() == ("10.1.0.7" if has_route else "127.0.0.1")


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Sockets]:
    for name in ("GLOO_SOCKET_IFNAME", "DECENT_DP_INTERFACE", "DECENT_DP_PORTS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    made = Sockets(10.0, b"")
    yield made
    made.close_all()


@pytest.mark.parametrize("variable", ["DECENT_DP_INTERFACE", "GLOO_SOCKET_IFNAME", None])
def test_only_the_chosen_interface_is_listened_on(monkeypatch, sockets, variable):
    if variable == "DECENT_DP_INTERFACE":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    if variable is not None:
        monkeypatch.setenv(variable, "lo,another")
    store = dist.HashStore()
    rendezvous = meeting_at(store, node="alone")
    made = addresses.listen(rendezvous, sockets)
    assert [listener.curve is not None for listener in made] == [True, True], "what leaves a node is encrypted"
    address = json.loads(rendezvous.store.get("address/0"))
    host, port, bulk = address["host"], address["port"], address["bulk"]
    assert [f"tcp://{host}:{number}" for number in (port, bulk)] == [listener.endpoint for listener in made]
    assert (address["machine"], address["pid"], address["incarnation"]) == (socket.gethostname(), os.getpid(), 0)
    assert host == ("127.0.0.1" if variable else addresses._own_address())
    # This machine's other addresses are not answered at.
    for other in {"127.0.0.1", "127.0.0.2", addresses.address_of("eth0") or "127.0.0.3"} - {host}:
        with contextlib.closing(socket.socket()) as stranger, pytest.raises(ConnectionRefusedError):
            stranger.connect((other, port))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems' local sockets are files")
@pytest.mark.parametrize(("places", "encrypt"), [(4, None), (4, True), (5, None), (5, False)])
def test_workers_of_one_machine_listen_for_others_only_if_these_may_come(monkeypatch, sockets, places, encrypt):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    rendezvous = meeting_at(dist.HashStore(), places=places, encrypt=encrypt)
    made = addresses.listen(rendezvous, sockets)
    remote = [listener for listener in made if listener.endpoint.startswith("tcp://")]
    assert len(made) - len(remote) == 2
    assert (len(remote), rendezvous.addresses[0].get("host")) == ((2, "127.0.0.1") if places == 5 else (0, None))
    assert all((listener.curve is not None) == (encrypt is not False) for listener in remote)
    # Where the master's address does not tell, none is guessed: nobody has asked for one beyond the loopback interface.
    monkeypatch.delenv("MASTER_ADDR")
    assert addresses._own_address(guess=False) == "127.0.0.1"


@pytest.mark.parametrize("variable", ["DECENT_DP_INTERFACE", "GLOO_SOCKET_IFNAME"])
def test_an_interface_without_an_address_is_not_replaced_by_another(monkeypatch, sockets, variable):
    monkeypatch.setenv(variable, "wg7")
    with pytest.raises(RuntimeError, match=f"{variable}=wg7: this network interface has no address"):
        addresses.listen(meeting_at(dist.HashStore(), node="alone"), sockets)


def test_ports_are_those_that_were_asked_for(monkeypatch, sockets):
    monkeypatch.setenv("DECENT_DP_INTERFACE", "lo")
    with socket.create_server(("127.0.0.1", 0)) as server:
        first = server.getsockname()[1]
        monkeypatch.setenv("DECENT_DP_PORTS", f"{first}-{first + 40}")
        found = []
        for rank in range(2):
            rendezvous = meeting_at(dist.HashStore(), rank=rank, node="alone")
            addresses.listen(rendezvous, sockets)
            found += [rendezvous.addresses[rank]["port"], rendezvous.addresses[rank]["bulk"]]
        assert len(set(found)) == 4
        assert all(first < port <= first + 40 for port in found), "one in use is passed over"
        monkeypatch.setenv("DECENT_DP_PORTS", f"{first}-{first + 1}")
        with pytest.raises(RuntimeError, match=f"DECENT_DP_PORTS={first}-.*fewer than two of these ports are free"):
            addresses.listen(meeting_at(dist.HashStore(), node="alone"), sockets)
    for text in ("29600", "29600-29600", "29700-29600", "a-b", "0-9", "1-70000"):
        monkeypatch.setenv("DECENT_DP_PORTS", text)
        with pytest.raises(ValueError, match=f"DECENT_DP_PORTS={text} must be a range of ports"):
            addresses.listen(meeting_at(dist.HashStore(), node="alone"), sockets)


def with_io_threads(rank: int, n: int, text: str) -> int | str:
    os.environ["DECENT_DP_IO_THREADS"] = text
    try:
        transport: Any = ProcessGroupTransport()
    except RuntimeError as error:
        return str(error)
    found = int(transport._wire.router._sockets._context.get(zmq.IO_THREADS))
    transport.close()
    return found


@pytest.mark.parametrize(("text", "found"), [("", 1), ("2", 2), ("0", "a number from 1 to 16, got '0'"), ("x", "got 'x'")])
def test_the_number_of_io_threads(workers, text, found):
    for each in workers(2, with_io_threads, text):
        assert (each == found) if isinstance(found, int) else (found in each)


def threads_of_zmq() -> list[Path]:
    return [path for path in Path("/proc/self/task").glob("*/comm") if path.read_text().startswith("ZMQ")]


def cannot_listen(rank: int, n: int) -> tuple[str, int]:
    rendezvous.network_stack = lambda: f"node {rank}"
    addresses._own_address = lambda **_: "127.0.0.1"
    os.environ.update({"DECENT_DP_PORTS": "7-6"} if rank == 1 else {})
    before = len(threads_of_zmq())
    try:
        ProcessGroupTransport().close()
    except RuntimeError as error:
        return str(error), len(threads_of_zmq()) - before
    return "", 0


def test_a_worker_that_cannot_listen_is_an_error_on_all(workers):
    error = "Worker 1: DECENT_DP_PORTS=7-6 must be a range of ports, such as 29600-29699"
    assert workers(3, cannot_listen) == [(error, 0)] * 3, "nothing is left of the sockets that were made"


def test_a_mac_has_one_network_stack(monkeypatch):
    """Else its workers would meet as if they were on different nodes."""

    def missing(*_: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(rendezvous, "open", missing, raising=False)
    assert rendezvous.network_stack() is None
    monkeypatch.setattr("sys.platform", "darwin")
    assert rendezvous.network_stack() == rendezvous.network_stack() is not None


def test_an_interface_may_have_an_ipv6_address_alone(monkeypatch):
    # An address of the link, which is no use to others, one of another interface, and the one to be found.
    rows = [("fe80", "7", "20", "wg7"), ("fd00", "8", "00", "wg8"), ("fd00", "7", "00", "wg7")]
    text = "".join(f"{start}{end:0>28} 09 40 {scope} 80 {name:>8}\n" for start, end, scope, name in rows)
    monkeypatch.setattr(addresses, "open", lambda path: io.StringIO(text), raising=False)
    assert addresses.address_of("wg7") == "fd00::7"
    assert addresses.address_of("wg9") is None


def test_whether_a_port_is_open_is_known_soon(monkeypatch):
    """The kernel would try for two minutes, and the store may take long."""
    waited = []

    def no_answer(*arguments: Any) -> Any:
        waited.append(arguments[2])
        raise addresses.UnreachableError("there", "timed out")

    monkeypatch.setattr(addresses, "probe", no_answer)
    store = dist.HashStore()
    far_away(store, 1, "127.0.0.1", 9)
    for seconds, answers in ((1800.0, 10.0), (5.0, 10.0)):
        with pytest.raises(addresses.UnreachableError):
            addresses.find(meeting_at(store), 1, seconds, 0, answers)
    assert waited == [10.0, 5.0]


def test_at_the_limit_of_open_files_the_peer_is_not_blamed(monkeypatch):
    store = dist.HashStore()
    far_away(store, 1, "127.0.0.1", 9)
    rendezvous = meeting_at(store)

    def refuse(*arguments: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(addresses.socket, "socket", refuse)
    with pytest.raises(OSError, match="Too many open files") as caught:
        addresses.find(rendezvous, 1, 5.0)
    error = peer_error(caught.value, [1], "round 0, bucket 1", notes_of(store, 0), rendezvous.run.timeout)
    assert str(error).startswith("this process cannot open a connection to worker 1, which round 0, bucket 1 needs: Too many")


def on_one_node(rank: int, n: int) -> Any:
    """The sockets of the network that training opens. SyncBatchNorm is only evaluated, as it trains on GPUs alone."""

    def made(*_: Any) -> Any:
        raise AssertionError("a communicator was made")

    before = listening()
    dist.ProcessGroupGloo = made  # type: ignore[misc]
    net_ = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    model = DecentralizedDataParallel(net_, SGD, topology="one-peer-exp")
    model.eval()
    for t in range(3):
        model(batch(t, rank)[0]).square().mean().backward()
    opened, rounds = listening() - before, model.stats().rounds
    model.close()
    return opened, rounds


def test_on_one_node_there_is_nothing_that_others_could_reach(workers):
    assert workers(2, on_one_node) == [(set(), 3)] * 2
