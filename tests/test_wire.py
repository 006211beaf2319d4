"""The wire: who may connect, what is wanted and what goes; the contract of all transports is in ``test_transport``."""

from __future__ import annotations

import json
import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from decent_dp.topo import Edge
from decent_dp.transport import ExchangeId, ProcessGroupTransport, peer_errors, rendezvous
from decent_dp.transport.hello import REPLACED, Dialled, Identity, RefusedError, Visitor
from decent_dp.transport.messages import BULK, CONTROL, DATA, HELLO, START, pack
from decent_dp.transport.peer_errors import GreetingError
from decent_dp.transport.peer_links import LinkState
from decent_dp.transport.sockets import Event
from decent_dp.transport.transfers import Receiving, Sending
from decent_dp.transport.votes import PairExchange, Verdict
from decent_dp.transport.wire import Wire
from tests.test_transport import caught, swap
from tests.wires import SECRET, Net, Unwired, identity, make_doorman, make_links, message, receive

# -- between processes -----------------------------------------------------------------------------------------------------


def killed_beside_a_child(rank: int, n: int) -> Any:
    transport = ProcessGroupTransport()
    edge = Edge([0, 1], 0.5)
    swap(transport, edge, ExchangeId(0, 0))
    if rank == 1:
        if os.fork() == 0:
            time.sleep(3)  # as a worker of a DataLoader that outlives its parent
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    kind, message, _ = caught(swap, transport, edge, ExchangeId(1, 0))
    return kind, message, time.monotonic() - began


def test_a_forked_child_does_not_hide_that_its_parent_was_killed(workers):
    kind, message, seconds = workers.outcomes(2, killed_beside_a_child)[0].value
    assert kind == "PeerLostError"
    assert "worker 1 is gone" in message
    assert seconds < 2, "the child kept the connections"


# -- what all workers must have in common ----------------------------------------------------------------------------------


def meets(rank: int, n: int, secrets: list[str], encrypts: list[bool | None], versions: list[int]) -> str:
    os.environ["DECENT_DP_SECRET_FILE" if secrets[rank].startswith("/") else "DECENT_DP_SECRET"] = secrets[rank]
    rendezvous.VERSION = versions[rank]
    try:
        shared = rendezvous.Rendezvous.create(None, encrypt=encrypts[rank])
    except ValueError as error:
        return str(error)
    assert (shared.proof == shared.run.token) == (not secrets[rank])
    assert not secrets[rank] or secrets[rank] not in repr(shared)
    return "met"


@pytest.mark.parametrize(
    ("secrets", "encrypts", "versions", "said"),
    [
        (["", ""], [None, None], [7, 7], "met"),
        (["long and random"] * 2, [False, False], [7, 7], "met"),
        (["", "s"], [None, None], [7, 7], "only workers [1] have DECENT_DP_SECRET"),
        (["s", "t"], [None, None], [7, 7], "is not the same on all workers"),
        (["s", "/nowhere/secret"], [None, None], [7, 7], "worker 1: DECENT_DP_SECRET_FILE=/nowhere/secret cannot be read"),
        (["", ""], [None, True], [7, 7], "encrypt= must be the same on all workers, and is (by rank): [None, True]"),
        (["", ""], [None, None], [7, 8], "different versions of the protocol (by rank: [7, 8])"),
    ],
)
def test_what_differs_is_an_error_on_all_workers(workers, secrets, encrypts, versions, said):
    found = workers(2, meets, secrets, encrypts, versions)
    assert all(said in text for text in found), found


def test_a_secret_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DECENT_DP_SECRET", "not this one")
    file = tmp_path / "secret"
    monkeypatch.setenv("DECENT_DP_SECRET_FILE", str(file))
    with pytest.raises(ValueError, match="cannot be read"):
        rendezvous.run_secret()
    file.write_text("\n")
    with pytest.raises(ValueError, match="is empty"):
        rendezvous.run_secret()
    file.write_text("long and random\n")
    assert rendezvous.run_secret() == b"long and random"


def forged(rank: int, n: int) -> list[str]:
    """Worker 0 reads addresses that somebody else has written: changed, of another worker, and whole."""
    transport: Any = ProcessGroupTransport()
    shared, found = transport._rendezvous, []
    own = shared.addresses.get(rank)
    whole = transport.control.gather(own)
    if rank == 0:
        for address in ({**whole[1], "local": "elsewhere"}, {**whole[2]}, whole[1]):
            shared.addresses.pop(1, None)
            shared.store.set(rendezvous.address_key(1, 0), json.dumps(address))
            try:
                found.append(shared.address_of(1, 0, 5.0)["local"])
            except RuntimeError as error:
                found.append(str(error))
        assert shared.knows(shared.curve.public, 5.0)
        shared.store.set(f"key/{'00' * 32}", "1")
        assert not shared.knows(bytes(32), 5.0)
    transport.control.gather(None)
    transport.close()
    return [*found, own["local"]]


def test_an_address_that_no_worker_of_the_run_has_written(workers):
    (changed, of_another, whole, _), (own,), _ = workers(3, forged)
    for said in (changed, of_another):
        assert "the address of worker 1 in the store was not written by a worker of this run" in said
    assert whole == own


# -- who is at the other end -----------------------------------------------------------------------------------------------

RUN, KEYS = bytes(16), bytes(64)
DIALLER, LISTENER = Identity(RUN, 1, b"dialler "), Identity(RUN, 0, b"listener")


def greet(theirs: bytes = b"secret", ours: bytes = b"secret", keys: bytes = KEYS, refusal: str = "") -> Identity | None:
    dialled = Dialled(DIALLER, b"secret", 0, CONTROL, bytes(16), KEYS)
    visitor = Visitor(LISTENER, theirs, dialled.hello, keys)
    proof = dialled.prove(visitor.challenge)
    if not visitor.verify(proof):
        return None
    assert visitor.worker == DIALLER
    assert not Visitor(LISTENER, theirs, dialled.hello, keys).verify(proof), "a recorded proof opens nothing"
    return dialled.accept(visitor.answer(refusal))


def test_both_ends_prove_who_they_are():
    assert greet() == LISTENER
    assert greet(theirs=b"another") is None
    assert greet(keys=bytes(63) + b"1") is None, "somebody came between, with keys of their own"
    with pytest.raises(GreetingError, match=r"worker 0 refused the connection of worker 1: not now\."):
        greet(refusal="not now")
    with pytest.raises(RefusedError) as refused:
        greet(refusal=REPLACED)
    assert refused.value.reason == REPLACED


def test_a_listener_that_does_not_know_the_secret():
    dialled = Dialled(DIALLER, b"secret", 0, CONTROL, bytes(16), KEYS)
    other = Visitor(LISTENER, b"another", dialled.hello, KEYS)
    dialled.prove(other.challenge)
    with pytest.raises(GreetingError, match="does not know the secret"):
        dialled.accept(other.answer())
    with pytest.raises(GreetingError, match="another program"):
        dialled.prove(b"SSH-2.0")
    with pytest.raises(ValueError, match="no hello"):
        Visitor(LISTENER, b"secret", b"GET / HTTP/1.1", KEYS)


class Frame(bytes):
    """As zmq's, with metadata."""

    bytes = property(bytes)

    def get(self, what: object) -> int:
        return 5  # the descriptor


class Door:
    """A doorman and its listener, to which nothing is connected."""

    curve = None

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.sent: list[bytes] = []
        self.pending: list[Event] = []
        self.doorman = make_doorman(self.read_events)
        self.zmq = SimpleNamespace(
            closed=False,
            get=lambda _: bool(self.frames),
            recv=lambda *_, **__: self.frames.pop(0),
            send=lambda part, *_, **__: self.sent.append(part),
        )

    def read_events(self, _: Any) -> None:
        while self.pending:
            self.doorman.on_event(self, self.pending.pop(0))  # type: ignore[arg-type]

    def hear(self, step: int, body: bytes, name: bytes = b"id") -> Any:
        self.frames += [Frame(pack(HELLO, flags=step)), Frame(body)]
        return self.doorman.hear(self, name)  # type: ignore[arg-type]


@pytest.mark.parametrize("ended", [False, True])
def test_a_connection_that_has_ended_is_not_let_in(ended):
    """Its end would not be told again."""
    door, welcome = Door(), None
    door.pending = [Event(zmq.EVENT_ACCEPTED, 5)]
    for plane, name in ((CONTROL, b"id"), (BULK, b"bulk")):
        dialled = Dialled(identity(1), SECRET, 0, plane, bytes(16), b"")
        door.hear(1, dialled.hello, name)
        door.pending = [Event(zmq.EVENT_DISCONNECTED, 5)] * (ended and plane == BULK)
        welcome = door.hear(3, dialled.prove(door.sent[-1]), name)
    assert (welcome is None) == ended


def test_a_hello_is_judged_after_all_events_before_it():
    """The descriptor was a connection's that only looked whether anybody listens; the events of its end are not read yet."""
    door = Door()
    door.pending = [Event(zmq.EVENT_ACCEPTED, 5), Event(zmq.EVENT_DISCONNECTED, 5), Event(zmq.EVENT_ACCEPTED, 5)]
    door.hear(1, Dialled(DIALLER, SECRET, 0, CONTROL, bytes(16), b"").hello)
    assert len(door.sent) == 3, "the hello is answered"
    assert list(door.doorman._greetings) == [b"id"], "the end of the connection before it does not end it"


# -- connections that cannot be made ----------------------------------------------------------------------------------------


def test_what_needs_a_connection_that_cannot_be_made_fails():
    """Nobody waits for the connection, as the other worker dials first."""
    net = Net(2, near=True)
    net.unreachable[1] = peer_errors.UnreachableError(None, "refused", is_refused=True)
    asked = receive(net.wires[0], 1, (0, 0, 2), 100)
    net.wires[0].connect(1)
    with pytest.raises(peer_errors.UnreachableError):
        asked.result(5)
    net.close()


# -- what is wanted, and what goes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 1e3, 1e6, 2e7, 1e9])
@pytest.mark.parametrize("size", [20_000, 2**19 + 8, 2**22, 2**25])
def test_every_message_comes_in_the_end(rate, size):
    """Whatever the rates of a link and of all links, and however they differ, bytes are wanted until all have come."""
    wires, key = Unwired(), (0, 0, 2)
    wires.link.lane.pace.rate = rate
    receiving = wires.expect(key, size)
    wires.start(key, 0, 0, size)
    for _ in range(2000):
        wires.flow.go_on()
        assert receiving.granted > receiving.received, "nothing is on its way, and nothing is wanted"
        assert wires.data(key, receiving.received, min(receiving.granted - receiving.received, 2**16), size)
        if receiving.received == size:
            break
    assert receiving.received == size
    assert wires.headers(START)[-1].first == size, "the sender may use its memory again"
    assert wires.link.lane.pace.due == wires.link.lane.network.pace.due == 0


def test_what_is_on_its_way_is_bounded_by_time():
    wires, key = Unwired(), (0, 0, 2)
    wires.link.lane.pace.rate = wires.link.lane.network.pace.rate = 1e6
    receiving = wires.expect(key, 2**25)
    wires.start(key, 0, 0, 2**25)
    assert wires.link.lane.pace.due == receiving.granted == 250_000


def test_a_start_that_comes_before_the_exchange_is_kept():
    wires, key = Unwired(), (3, 0, 0)
    wires.start(key, 0, 2**17, 2**20)
    assert key in wires.link.lane.early
    wires.expect(key, 2**20)
    sending = wires.post(key, 2**20)
    wires.flow.go_on()
    assert sending.written == 2**17
    assert sum(header.second for header in wires.headers(DATA)) == 2**17


def test_what_was_not_asked_for_is_dropped_and_counted():
    wires, key = Unwired(), (0, 0, 0)
    assert not wires.data((0, 0, 2), 0, 100, 100)
    assert wires.flow.dropped == 1
    wires.expect(key, 2**20)
    wires.start(key, 0, 0, 2**20)
    assert wires.data(key, 0, 2**16, 2**20)
    assert not wires.data(key, 0, 2**16, 2**20), "it has come already"
    assert wires.flow.dropped == 2


def test_a_message_goes_on_where_it_was_on_a_new_connection():
    wires, key = Unwired(), (0, 0, 0)
    wires.expect(key, 2**20)
    wires.post(key, 2**20)
    wires.start(key, 0, 2**20, 2**20)
    wires.data(key, 0, 2**16, 2**20)
    wires.connections.lose(wires.link, "cut")
    assert wires.link.lane.pace.due == 0
    wires.headers(DATA)
    wires.open()
    assert wires.headers(START)[0].first == 2**16
    wires.start(key, 2**18, 2**20, 2**20)
    assert wires.headers(DATA)[0].second > 0


def test_what_is_sent_again_is_no_progress():
    """Else a way that brings short frames and no long ones is tried for ever: a timeout counts from the last progress."""
    wires, key = Unwired(), (0, 0, 0)
    wires.post(key, 2**20)
    wires.start(key, 0, 2**18, 2**20)
    assert wires.headers(DATA)
    wires.link.lane.moved = 0.0
    for upto in (2**18, 2**19):
        wires.connections.lose(wires.link, "it has brought nothing")
        wires.open()
        wires.start(key, 0, upto, 2**20)
        assert wires.headers(DATA)
        assert bool(wires.link.lane.moved) == (upto == 2**19), "what is new counts"


@pytest.mark.parametrize("size", [2**16 - 1, 2**20])
def test_a_message_that_is_given_up_in_doubt_costs_its_connection_if_it_was_lent(size):
    """libzmq may still read the memory, which is the caller's from now on. It has a copy of short messages."""
    wires, key, verdicts = Unwired(), (3, 0, 0), list[Verdict]()
    pair = PairExchange(message(Receiving, key, size), message(Sending, key, size, ready=size), verdicts.append)
    wires.connections.settlement.open(pair)
    wires.start(key, 0, size, size)
    assert (wires.lent == 0) == (size < 2**16)
    while pair.receiving.received < size:
        wires.data(key, pair.receiving.received, min(2**16, pair.receiving.granted - pair.receiving.received), size)
        wires.flow.go_on()
    assert wires.link.votes.pairs[0].voted
    wires.connections.settlement.drop(pair)
    assert verdicts == [Verdict.NEITHER]
    assert (wires.link.state is LinkState.OPEN) == (wires.lent == 0) == (wires.hung_up == [])


def test_what_was_written_to_a_peer_that_has_ended_counts_as_sent():
    wires, done = Unwired(), []
    sending = wires.post((0, 0, 2), 2**17)
    sending.done = lambda: done.append(True)
    wires.start(sending.key, 0, 2**17, 2**17, offers=False)
    assert not done, "the peer has not said that it has it"
    wires.connections.lose(wires.link, "closed by the peer")
    assert done


def test_a_look_why_a_worker_is_lost_makes_no_link():
    """Another thread walks through them."""
    wire: Any = SimpleNamespace(links=make_links())
    assert isinstance(Wire.why_lost(wire, 5), TimeoutError)
    assert 5 not in wire.links.by_rank
