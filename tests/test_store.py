"""The store that workers share, and the name of a run: one contract for every transport."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from decent_dp.transport import InProcessTransport, ProcessGroupTransport, Transport, run_replicas
from decent_dp.transport import store as store_module
from decent_dp.transport.addresses import find
from decent_dp.transport.rendezvous import Rendezvous, RunRecord
from decent_dp.transport.store import StoreClient, read_text
from tests.helpers import BrokenStore, SilentStore, wait_for


def contract(transport: Transport, other: Transport) -> tuple[str, str]:
    """``other`` is a second wrapper's of the same workers."""
    rank, n, store = transport.rank, transport.world_size, transport.store
    assert read_text(store, "nothing") is None
    store.set(f"text/{rank}", f"größer\n{rank}")
    store.set("empty", "")
    transport.control.gather(None)
    assert [read_text(store, f"text/{r}") for r in range(n)] == [f"größer\n{r}" for r in range(n)]
    assert read_text(store, "empty") == ""
    assert store.compare_set("once", "", f"{rank}") == store.get("once")  # one value for all, of the first worker
    assert sorted(transport.control.gather(store.add("arrivals", 1))) == list(range(1, n + 1))
    assert read_text(other.store, f"text/{rank}") is None  # of another wrapper
    transport.control.gather(None)  # no worker exits before all have read
    return transport.run_id, other.run_id


def between_processes(rank: int, n: int) -> tuple[str, str]:
    first, second = ProcessGroupTransport(), ProcessGroupTransport()
    assert first.timeout == 60.0  # the process group's
    found = contract(first, second)
    first.close()
    second.close()
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_contract_between_processes(workers, n):
    names = workers(n, between_processes)
    assert len(set(names)) == 1
    assert names[0][0] != names[0][1]


@pytest.mark.parametrize("n", [1, 3])
def test_contract_in_process(n):
    def work(transport: InProcessTransport) -> tuple[str, str]:
        return contract(transport, transport._hub.transport(transport.rank))

    names = run_replicas(n, work)
    assert len(set(names)) == 1
    assert names[0][0] != names[0][1]


def test_a_store_that_does_not_answer_is_a_connection_error():
    client: Any = StoreClient(dist.HashStore(), "run")
    client._store = BrokenStore()
    with pytest.raises(ConnectionError, match=r"the store does not answer: connection was reset$"):
        client.run(lambda store: read_text(store, "a"))


STORE_SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_a_store_whose_process_is_stopped_is_waited_for_no_longer_than_the_limit():
    with subprocess.Popen([sys.executable, "-c", STORE_SERVER], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            client = StoreClient(("127.0.0.1", int(server.stdout.readline())), "run")
            client.run(lambda store: store.set("a", "1"))
            with pytest.raises(KeyError):
                client.run(lambda store: {}["b"])
            os.kill(server.pid, signal.SIGSTOP)
            os.waitpid(server.pid, os.WUNTRACED)  # it goes on for a moment
            began = time.monotonic()
            for _ in range(10):  # the last ones do not wait
                with pytest.raises(ConnectionError, match="the store does not answer, and does not fail"):
                    client.run(lambda store: store.get("a"), 0.4)
            assert 0.3 < time.monotonic() - began < 3.5
            os.kill(server.pid, signal.SIGCONT)
            time.sleep(0.5)
            assert client.run(lambda store: store.get("a"), 5) == b"1"
        finally:
            server.kill()


ENDS_IN_A_CALL = """
import threading
import time
import torch.distributed as dist
from decent_dp.transport.store import StoreClient
server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client, begun = StoreClient(server, "here"), threading.Event()
def ask(store):
    begun.set()
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        store.check(["a"])
threading.Thread(target=client.run, args=(ask,), daemon=True).start()
begun.wait()
client.close()
"""


def test_a_process_may_end_while_the_store_is_asked():
    """Else torch's call comes back in an interpreter that is gone, and the process aborts."""
    ended = subprocess.run([sys.executable, "-c", ENDS_IN_A_CALL], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize(("own", "other"), [(1, 0), (0, 1)])
def test_the_address_of_a_process_is_looked_up_for_no_longer_than_the_limit(own, other):
    """Where one of two has joined later."""
    store = dist.HashStore()
    rendezvous = Rendezvous(store, "run", RunRecord(b"", 2, 2, ("a", "b"), 0.0), 0, "a", incarnation=own)
    with pytest.raises(RuntimeError, match="worker 1 has stored no address"):
        find(rendezvous, 1, 5.0, other)
    client: Any = rendezvous.client
    client._store = silent = SilentStore(client._store)
    silent.answers.clear()
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(ConnectionError, match="the store does not answer"):
            find(rendezvous, 1, 0.2, other)
    assert time.monotonic() < began + 5
    silent.answers.set()


class Hanging:
    """A client whose calls return when ``go_on`` is set."""

    def __init__(self, go_on: threading.Event) -> None:
        self._go_on = go_on

    def check(self, keys: list[str]) -> bool:
        self._go_on.wait(20)
        return True


def probe(store: Any) -> Any:
    return store.check(["a"])


def test_a_connection_that_hangs_is_replaced(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    go_on, made = threading.Event(), []
    connect = store_module.connect_store

    def connect_store(*args: Any) -> Any:
        made.append(len(made))
        return connect(*args) if made[-1] in (1, 5) else Hanging(go_on)

    monkeypatch.setattr(store_module, "connect_store", connect_store)
    monkeypatch.setattr(store_module, "_LIMIT", 0.1)
    client = StoreClient(server, "run")
    with pytest.raises(ConnectionError, match="does not answer, and does not fail"):
        client.run(probe)
    client.run(probe)
    assert made == [0, 1]
    client._store = Hanging(go_on)  # type: ignore[assignment]
    for _ in range(6):
        with pytest.raises(ConnectionError, match="does not answer, and does not fail"):
            client.run(probe)
    assert made == [0, 1, 2, 3]  # not one for each call: the server may be stopped
    go_on.set()
    for _ in range(50):
        try:
            client.run(probe)
            break
        except ConnectionError:
            threading.Event().wait(0.05)
    client.run(probe)


def test_a_call_waits_for_the_call_of_another_thread_no_longer_than_its_own_limit():
    client, go_on = StoreClient(dist.HashStore(), "run"), threading.Event()
    other = threading.Thread(target=lambda: client.run(lambda store: go_on.wait(20), 30.0))
    other.start()
    wait_for(client._lock.locked)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="the store does not answer"):
        client.run(probe, 0.2)
    assert time.monotonic() < began + 5
    go_on.set()
    other.join(20)
    assert client.run(probe, 5.0) is False


def test_a_server_that_refuses_is_not_taken_for_a_peer_that_does():
    """A peer that refuses a connection has ended."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    client = StoreClient(dist.HashStore(), "run")
    client._server, client._store = ("127.0.0.1", port), None
    with pytest.raises(ConnectionError, match=r"no store answers at 127\.0\.0\.1:.*refused") as caught:
        client.run(probe)
    assert not isinstance(caught.value.__cause__ or caught.value, ConnectionRefusedError)
