"""The state of a replica in chunks: the bytes, the copies that a member keeps, and the seats that it gives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from decent_dp.replica import state_server as state_server_module
from decent_dp.replica import transfer as transfer_module
from decent_dp.replica.host_copies import HostMemory
from decent_dp.replica.state_server import StateServer
from decent_dp.replica.transfer import (
    Donor,
    PartialState,
    StateCopy,
    pack_message,
    pull,
    unpack_message,
)
from decent_dp.serialization import encode
from decent_dp.transport import Replicas
from tests.helpers import wait_for

TREE = {
    "a": torch.arange(7.0),
    "b": {"c": torch.zeros(0, 3), "d": torch.ones(2, 3, dtype=torch.bfloat16)},
    "e": (1, "x"),
    "f": None,
    "g": torch.tensor(3, dtype=torch.int64),
}
GONE = ConnectionError("it is gone")


def donor_of(answer: Callable[[dict[str, Any]], Any], stuck: float = 5.0) -> Donor:
    """A worker that is asked. ``answer``: returns the answer to a request; None, if none comes; or why it cannot be asked."""

    def ask(request: bytes) -> Future[bytes]:
        future: Future[bytes] = Future()
        found = answer(unpack_message(request)[0])
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not None:
            future.set_result(found)
        return future

    return Donor(ask, stuck)


def copy_of(tree: Any) -> StateCopy:
    text, tensors = encode(tree)
    return StateCopy(text, HostMemory().copy(tensors))


class Giver:
    """Gives chunks of a copy.

    Attributes:
        most: after so many answers it is gone.
        asked: where the chunks begin that it was asked for.
        change: called with each answer, and its number; returns the one that arrives.
    """

    def __init__(self, copy: StateCopy, most: float = float("inf")) -> None:
        self.copy, self.most, self.asked = copy, most, list[int]()
        self.change: Callable[[bytes, int], bytes] = lambda answer, number: answer

    def answer(self, request: dict[str, Any]) -> Any:
        if len(self.asked) >= self.most:
            return GONE
        begin = request["from"] if request["copy"] == self.copy.name else 0
        self.asked.append(begin)
        return self.change(self.copy.chunk(begin), len(self.asked))

    def pull(self, partial: PartialState) -> Any:
        return pull(donor_of(self.answer), partial, 5)


def pull_part(copy: StateCopy, partial: PartialState, most: int) -> None:
    with pytest.raises(ConnectionError, match="it is gone"):
        Giver(copy, most).pull(partial)


def assert_is(found: Any, tree: Any) -> None:
    assert found.keys() == tree.keys()
    for key, value in tree.items():
        if isinstance(value, dict):
            assert_is(found[key], value)
        elif isinstance(value, torch.Tensor):
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)
        else:
            assert found[key] == value


# -- the bytes -------------------------------------------------------------------------------------------------------------


def test_a_state_arrives_as_it_was_given():
    copy, waits = copy_of(TREE), [pack_message({"wait": "it is in a step"})]
    giver = Giver(copy)
    found = pull(donor_of(lambda request: waits.pop() if waits else giver.answer(request)), PartialState(), 5)
    assert_is(found, TREE)
    assert giver.asked == [0, copy.size]
    assert {t.untyped_storage().nbytes() - t.nbytes for t in tree_leaves(found) if isinstance(t, torch.Tensor)} == {0}


@pytest.mark.parametrize("chunk", [1, 5, 64, 2**17])
def test_a_transfer_continues_wherever_it_stops(monkeypatch, chunk):
    """In the header, in a tensor, between tensors. No byte is given twice."""
    monkeypatch.setattr(transfer_module, "_CHUNK", chunk)
    size = copy_of(TREE).size
    for most in range(0, -(-size // chunk), 1 if chunk > 5 else 37):
        copy, partial = copy_of(TREE), PartialState()
        pull_part(copy, partial, most)
        assert (partial.filled, partial.name) == (most * chunk, copy.name if most else None)
        giver = Giver(copy)
        assert_is(giver.pull(partial), TREE)
        assert giver.asked == [*range(most * chunk, size, chunk), size]
        assert (partial.filled, partial.name) == (0, None)


def test_a_few_chunks_are_asked_for_ahead(monkeypatch):
    monkeypatch.setattr(transfer_module, "_CHUNK", 100)
    copy, asked = copy_of({"w": torch.zeros(1000)}), list[int]()
    partial = PartialState()
    donor = donor_of(lambda r: (asked.append(r["from"]), copy.chunk(0) if r["from"] == 0 else None)[1], stuck=0.1)
    with pytest.raises(TimeoutError, match="has not answered for"):
        pull(donor, partial, 5)
    assert asked == [0, 100, 200, 300, 400]


def test_another_copy_begins_anew(monkeypatch):
    """Also one of the same layout; and what was asked of the first one and comes later is left."""
    monkeypatch.setattr(transfer_module, "_CHUNK", 20)
    old, new = (copy_of({"w": torch.full((9,), value)}) for value in (1.0, 2.0))
    partial = PartialState()
    pull_part(old, partial, 3)
    assert_is(Giver(new).pull(partial), {"w": torch.full((9,), 2.0)})
    giver, answers = Giver(old), list[int]()
    giver.change = lambda answer, number: (answers.append(0), answer if len(answers) < 4 else new.chunk(0))[1]

    def answer(request: dict[str, Any]) -> Any:
        return giver.answer(request) if request["copy"] != new.name else new.chunk(request["from"])

    assert_is(pull(donor_of(answer), PartialState(), 5), {"w": torch.full((9,), 2.0)})


@pytest.mark.parametrize("number", [1, 2, 5])
def test_no_bit_of_a_chunk_can_be_another_one(monkeypatch, number):
    """Then the transfer ends, and continues with that chunk."""
    monkeypatch.setattr(transfer_module, "_CHUNK", 64)
    copy = copy_of(TREE)
    for at in range(len(copy.chunk(64 * (number - 1)))):

        def flip(answer: bytes, count: int, at: int = at) -> bytes:
            raw = bytearray(answer)
            if count == number:
                raw[at] ^= 1
            return bytes(raw)

        giver, partial = Giver(copy), PartialState()
        giver.change = flip
        with pytest.raises(ConnectionError, match=r"damaged|no JSON|no chunk of a state"):
            giver.pull(partial)
        assert partial.filled == 64 * (number - 1)
        assert_is(Giver(copy).pull(partial), TREE)


def test_a_chunk_of_another_place_is_not_taken(monkeypatch):
    monkeypatch.setattr(transfer_module, "_CHUNK", 64)
    giver, partial = Giver(copy_of(TREE)), PartialState()
    giver.change = lambda answer, number: giver.copy.chunk(128) if number == 2 else answer
    with pytest.raises(ConnectionError, match="no chunk of a state: 64 bytes from 128 on"):
        giver.pull(partial)
    assert_is(giver.pull(partial), TREE)


def test_refusals_and_long_waits_are_errors():
    with pytest.raises(ConnectionError, match="too busy"):
        pull(donor_of(lambda _: pack_message({"refused": "too busy"})), PartialState(), 5)
    with pytest.raises(TimeoutError, match=r"has not answered within 0\.2 s: a step"):
        pull(donor_of(lambda _: pack_message({"wait": "a step"})), PartialState(), 0.2)


def test_a_donor_that_has_made_its_memory_is_waited_for_no_longer_than_others():
    making = [pack_message({"wait": "a step", "copies": True})] * 3
    with pytest.raises(TimeoutError, match=r"has not answered within 0\.[2-9] s: a step"):
        pull(donor_of(lambda _: making.pop() if making else pack_message({"wait": "a step"})), PartialState(), 0.2)


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"", "no JSON"),
        (b"[1]\n", "no dict"),
        (b'{"a":1,"a":2}\n', "twice"),
        (b'{"a":"\xff"}\n', "no JSON"),
        (b"[" * 10**6 + b"\n", "too many"),
    ],
    ids=["nothing", "a list", "twice", "no text", "levels"],
)
def test_what_is_no_message(message, cause):
    with pytest.raises(ConnectionError, match=cause):
        unpack_message(message)


@pytest.mark.parametrize("entry", [["a", "float99", [1]], ["a", "uint8", [3, 2.5]], ["a", "uint8", [10**9]], ["a"]], ids=str)
def test_what_is_no_state(entry):
    """Such as that of another version."""
    header = json.dumps({"tree": "null", "tensors": [entry]}).encode()
    partial = PartialState()
    partial.begin("c", len(header) + 64, len(header))
    partial.add(memoryview(header + bytes(64)))
    with pytest.raises(ConnectionError, match="no state that this worker can read"):
        partial.take()
    assert (partial.name, partial.filled) == (None, 0)


# -- the copies that a member keeps ----------------------------------------------------------------------------------------


class Member:
    """A state server without a replica. It trains: its value is the number of its boundaries."""

    def __init__(self, values: int = 1000, dead_after: float = 1.0) -> None:
        self.values, self.boundaries, self.copied, self.value = values, 0, 0, 0.0
        self.engine = SimpleNamespace(counts=SimpleNamespace(exchanges=1), first_bucket=0)
        self.neighbours = SimpleNamespace(is_paused=False)
        faults: Any = SimpleNamespace(dead_after=dead_after)
        self.monitor: Any = SimpleNamespace(members=(0, 1), epochs=None, faults=faults, neighbours=self.neighbours)
        replica: Any = SimpleNamespace(engine=self.engine, agreed=SimpleNamespace())
        self.server = StateServer(replica, self.monitor)
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        while not self.ends.wait(0.01):
            self.boundaries += 1
            self.server.reached_boundary()

    def before_take(self) -> None:
        return

    def take(self) -> Any:
        self.before_take()
        return {"parameters": {"w": torch.full((self.values,), float(self.boundaries) + self.value)}}

    def stop(self) -> None:
        self.ends.set()
        self.thread.join()

    def ask(self, asker: int, **request: Any) -> dict[str, Any]:
        return unpack_message(self.server.answer(asker, 1, pack_message(request)))[0]

    def get(self, partial: PartialState, asker: int = 2, most: float = float("inf"), seconds: float = 5.0) -> Any:
        """``most``: answers, and then it is gone."""
        count = [0]

        def answer(request: dict[str, Any]) -> Any:
            found = self.server.answer(asker, 1, pack_message(request))
            count[0] += "wait" not in unpack_message(found)[0]
            return found if count[0] <= most else GONE

        return pull(donor_of(answer), partial, seconds)["snapshot"]["parameters"]["w"]

    def get_part(self, partial: PartialState, asker: int = 2, most: int = 2) -> None:
        with pytest.raises(ConnectionError, match="it is gone"):
            self.get(partial, asker, most)
        assert partial.filled == most * 1000


@pytest.fixture
def member(monkeypatch) -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def make(**options: Any) -> Member:
        members.append(Member(**options))
        return members[-1]

    def take(replica: Any, *, settled: bool) -> Any:
        assert not settled, "a member must not wait for the others"
        return next(m for m in members if m.server._replica is replica).take()

    def keep(*args: Any) -> Any:
        next(m for m in members if m.thread is threading.current_thread()).copied += 1
        return kept(*args)

    kept = state_server_module._Kept
    monkeypatch.setattr(state_server_module, "_Kept", keep)
    monkeypatch.setattr(state_server_module, "take", take)
    monkeypatch.setattr(transfer_module, "_CHUNK", 1000)
    yield make
    for one in members:
        one.stop()


def test_a_member_gives_the_rest_of_the_same_copy_and_drops_it_when_it_has_arrived(member):
    donor, partial = member(), PartialState()
    donor.get_part(partial)
    boundaries, name = donor.boundaries, partial.name
    wait_for(lambda: donor.boundaries > boundaries + 5)
    assert list(donor.server._copies) == [name]
    found = donor.get(partial)
    assert bool((found == found[0]).all())
    assert 0 < float(found[0]) <= boundaries
    assert donor.copied == 1
    wait_for(lambda: not donor.server._copies)


def test_a_copy_is_kept_until_it_has_arrived_and_not_until_it_is_given(member):
    donor, partial = member(values=10), PartialState()
    donor.get_part(partial, most=0)  # all of it is in one chunk, which was lost
    wait_for(lambda: donor.copied == 1)
    assert len(donor.server._copies) == 1
    donor.get(partial)
    assert donor.copied == 1


def test_a_copy_that_nobody_asks_for_is_dropped(member):
    donor, partial = member(dead_after=0.2), PartialState()
    donor.get_part(partial)
    began = time.monotonic()
    wait_for(lambda: not donor.server._copies)
    assert time.monotonic() - began > 0.3
    found = donor.get(partial)  # of another copy, all of it
    assert donor.copied == 2
    assert bool((found == found[0]).all())


def test_the_end_of_training_drops_all_copies(member):
    donor, partial = member(), PartialState()
    donor.get_part(partial)
    donor.stop()
    donor.server.closing()
    assert donor.server._copies == {}
    with pytest.raises(ConnectionError, match="this worker has ended"):
        donor.get(partial)


@pytest.mark.parametrize("begin", [-1, 10**6, "1", None])
def test_a_place_outside_of_the_copy_is_refused(member, begin):
    donor, partial = member(), PartialState()
    donor.get_part(partial)
    answer = donor.ask(2, want="state", copy=partial.name, **{"from": begin})
    assert f"from must be an int from 0 to {partial.size}" in answer["refused"]
    donor.get(partial)  # it is kept
    assert donor.copied == 1


@pytest.mark.parametrize("name", ["other", None])
def test_a_copy_that_is_not_known_is_another_one_from_its_first_byte(member, name):
    donor = member()
    wait_for(lambda: "place" in donor.ask(2, want="state", copy=name, **{"from": 7}))
    assert donor.ask(2, want="state", copy=name, **{"from": 7})["place"][-1] == 0


@pytest.mark.parametrize("request_", [{}, {"want": "state"}, {"want": "state", "copy": None}])
def test_what_is_no_request_is_refused(member, request_):
    assert "refused" in member().ask(2, **request_)


def test_those_that_come_together_get_one_copy(member):
    donor, parts = member(), [PartialState() for _ in range(12)]
    for asker, partial in enumerate(parts):
        donor.get_part(partial, asker)
    assert (donor.copied, len({partial.name for partial in parts})) == (1, 1)
    donor.engine.first_bucket += 1  # the workers have loaded another state
    donor.get_part(PartialState())
    assert donor.copied == 2


def test_not_more_than_a_few_copies_are_kept(member, monkeypatch):
    """Each is as large as the state. Later ones get the newest."""
    monkeypatch.setattr(state_server_module, "_FRESH", 0.0)
    donor, parts = member(), [PartialState() for _ in range(5)]
    for asker, partial in enumerate(parts):
        donor.get_part(partial, asker, most=1)
        assert len(donor.server._copies) <= 2
    assert [partial.name for partial in parts[1:]] == [parts[1].name] * 4
    for asker, partial in enumerate(parts[:2]):
        found = donor.get(partial, asker)
        assert bool((found == found[0]).all())
    assert donor.copied == 2


def test_who_asks_while_the_copy_is_made_gets_that_one(member):
    donor, begins, ends = member(), threading.Event(), threading.Event()
    donor.before_take = lambda: (begins.set(), ends.wait(10))
    donor.ask(2, want="state", copy=None, **{"from": 0})
    assert begins.wait(10)
    for asker in (2, 3):
        assert "wait" in donor.ask(asker, want="state", copy=None, **{"from": 0})
    ends.set()
    for asker in (2, 3):
        donor.get(PartialState(), asker)
    assert (donor.copied, donor.server._copies) == (1, {})


def test_training_goes_on_while_the_memory_for_a_copy_is_made(member, monkeypatch):
    """One that asks waits for longer than for another one, meanwhile."""
    made, reserved = threading.Event(), HostMemory.reserved

    def slow(*needed: Any) -> HostMemory:
        assert made.wait(10)
        return reserved(*needed)

    monkeypatch.setattr(HostMemory, "reserved", slow)
    donor = member()
    donor.ask(2, want="state", copy=None, **{"from": 0})
    wait_for(lambda: donor.server._memory is not None)
    boundaries = donor.boundaries
    threading.Timer(1.0, made.set).start()
    found = donor.get(PartialState(), seconds=0.5)
    assert donor.boundaries > boundaries + 20
    assert float(found[0]) > boundaries + 20, "it is the state at the boundary at which it was copied"


def test_who_waits_for_a_boundary_waits_as_briefly_with_memory_as_without(member):
    donor = member()
    donor.stop()
    donor.ask(2, want="state", copy=None, **{"from": 0})
    donor.server._memory = Future[HostMemory]()
    assert donor.ask(2, want="state", copy=None, **{"from": 0})["copies"] is True
    donor.server._memory.set_result(HostMemory())
    assert donor.ask(2, want="state", copy=None, **{"from": 0})["copies"] is False


def test_a_copy_without_memory_is_refused(member, monkeypatch):
    def fail(*needed: Any) -> HostMemory:
        raise MemoryError("4000 bytes")

    monkeypatch.setattr(HostMemory, "reserved", fail)
    donor = member()
    with pytest.raises(ConnectionError, match="4000 bytes"):
        donor.get(PartialState())
    boundaries = donor.boundaries
    wait_for(lambda: donor.boundaries > boundaries + 5)


def test_a_replica_that_is_not_finite_is_not_given(member):
    donor = member()
    donor.value = float("nan")
    with pytest.raises(ConnectionError, match="holds a NaN or an infinity"):
        donor.get(PartialState())
    assert donor.server._copies == {}
    donor.value = 0.0
    donor.get(PartialState())


def test_an_error_at_the_boundary_is_an_answer(member):
    donor = member()
    donor.stop()
    donor.engine.counts.exchanges = 0
    assert "wait" in donor.ask(2, want="state", copy=None, **{"from": 0})
    assert "wait" in donor.ask(3, want="state", copy=None, **{"from": 0})
    donor.server.reached_boundary()
    for asker in (2, 3):
        assert "has not mixed yet" in donor.ask(asker, want="state", copy=None, **{"from": 0})["refused"]
    assert "wait" in donor.ask(4, want="state", copy=None, **{"from": 0})


def test_a_member_that_waits_for_others_says_so_and_gives_the_rest_of_what_it_has(member):
    donor, partial = member(), PartialState()
    donor.neighbours.is_paused = True
    with pytest.raises(ConnectionError, match="it waits for others"):
        donor.get(PartialState())
    donor.neighbours.is_paused = False
    donor.get_part(partial)
    donor.neighbours.is_paused = True
    donor.get(partial)
    assert donor.copied == 1


# -- seats -----------------------------------------------------------------------------------------------------------------


class Epochs:
    """As those of a member."""

    known = None

    def __init__(self) -> None:
        self.offers: dict[tuple[int, int], Future[Any]] = {}
        self.withdrawn: list[tuple[int, int]] = []
        self.keeper = self

    def offer(self, *asker: int) -> Future[Any]:
        return self.offers.setdefault(asker, Future())  # type: ignore[arg-type]

    def withdraw(self, *asker: int) -> None:
        self.withdrawn.append(asker)  # type: ignore[arg-type]


@pytest.fixture
def seats(member) -> tuple[Member, Epochs]:
    donor, epochs = member(), Epochs()
    donor.monitor.epochs, donor.monitor.is_free = epochs, lambda rank, incarnation: rank == 2
    donor.server._replica.world = SimpleNamespace(control=SimpleNamespace(calls=7))
    donor.server._replica.cadence = SimpleNamespace(contexts=3, joins=1)
    donor.server._replica.agreed.replicas = Replicas(tuple((rank,) for rank in range(4)))
    return donor, epochs


def wants(donor: Member, *ranks: int) -> Any:
    """The answer to the first of these processes, which want to be members together."""
    return donor.ask(ranks[0], want="seat", **{"for": [[rank, 1] for rank in ranks]})


def test_a_seat_is_given_when_the_epoch_is_decided(seats):
    donor, epochs = seats
    assert wants(donor, 3) == {"wait": "worker 3 lives"}
    assert epochs.offers == {}
    for _ in range(3):
        assert "wait" in wants(donor, 2)
    [future] = epochs.offers.values()
    future.set_result(SimpleNamespace(number=4, text="{}"))
    answer = {"epoch": 4, "text": "{}", "calls": 7, "joins": 1, "contexts": 3, "first_bucket": 0}
    assert wants(donor, 2) == wants(donor, 2) == answer
    assert (donor.server._seats, epochs.withdrawn) == ({}, [])


def test_a_seat_is_withdrawn_from_one_that_asks_no_more(seats, monkeypatch):
    monkeypatch.setattr(state_server_module, "_ENDED", 0.3)
    donor, epochs = seats
    wants(donor, 2)
    wait_for(lambda: epochs.withdrawn == [(2, 1)])
    assert donor.server._seats == {}


def test_a_seat_that_another_one_has_got_is_refused(seats):
    donor, epochs = seats
    wants(donor, 2)
    epochs.offers[2, 1].set_exception(ConnectionError("another process is worker 2"))
    assert wants(donor, 2) == {"refused": "another process is worker 2"}


def test_seats_are_given_to_all_processes_of_a_replica_together(seats):
    donor, epochs = seats
    donor.monitor.is_free = lambda rank, incarnation: True
    donor.server._replica.agreed.replicas = Replicas(((0, 1), (2, 3)))
    assert "its replica is the workers [2, 3]" in wants(donor, 2)["refused"]
    assert "its replica is the workers [2, 3]" in wants(donor, 2, 1)["refused"]
    assert "wait" in wants(donor, 2, 3)
    epochs.offers[2, 1].set_result(SimpleNamespace(number=4, text="{}"))
    assert "wait" in wants(donor, 2, 3)
    epochs.offers[3, 1].set_result(SimpleNamespace(number=4, text="{}"))
    assert wants(donor, 2, 3)["epoch"] == 4


def test_a_seat_is_withdrawn_if_another_one_of_its_replica_cannot_be_had(seats, monkeypatch):
    monkeypatch.setattr(state_server_module, "_ENDED", 0.3)
    donor, epochs = seats
    donor.monitor.is_free = lambda rank, incarnation: True
    donor.server._replica.agreed.replicas = Replicas(((0, 1), (2, 3)))
    assert "its replica is the workers [2, 3]" in donor.ask(2, want="seat", **{"for": [[2, 1], [3, "1"]]})["refused"]
    offer = epochs.offer

    def refuse(*asker: int) -> Any:
        if asker == (3, 1):
            raise ConnectionError("another process is worker 3")
        return offer(*asker)

    epochs.offer = refuse
    assert wants(donor, 2, 3) == {"refused": "another process is worker 3"}
    wait_for(lambda: epochs.withdrawn == [(2, 1)])
