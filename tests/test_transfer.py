"""The state of a replica over connections that break: the bytes, the copies that a member keeps, and who is asked."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decent_dp.replica import host as host_module
from decent_dp.replica import transfer as transfer_module
from decent_dp.replica.host import Host
from decent_dp.replica.transfer import PartialState, StateCopy, hear, hear_answer, receive_state, say, send_state
from decent_dp.serialization import encode

TREE = {
    "a": torch.arange(7.0),
    "b": {"c": torch.zeros(0, 3), "d": torch.ones(2, 3, dtype=torch.bfloat16)},
    "e": (1, "x"),
    "f": None,
    "g": torch.tensor(3, dtype=torch.int64),
}
DIGEST = 32


class Cut:
    """A stream that breaks after some bytes. ``sent``: how many it has taken."""

    def __init__(self, stream: Any, after: int) -> None:
        self.stream, self.after, self.sent = stream, after, 0

    def sendall(self, part: Any) -> None:
        taken = bytes(part)[: self.after - self.sent]
        self.sent += len(taken)
        self.stream.sendall(taken)
        if len(taken) < len(part):
            if hasattr(self.stream, "shutdown"):
                self.stream.shutdown(socket.SHUT_RDWR)
            else:
                self.stream.close()
            raise ConnectionResetError("cut")


class Flip:
    """A stream that changes one byte."""

    def __init__(self, stream: Any, at: int) -> None:
        self.stream, self.at, self.sent = stream, at, 0

    def sendall(self, part: Any) -> None:
        raw = bytearray(part)
        if self.sent <= self.at < self.sent + len(raw):
            raw[self.at - self.sent] ^= 1
        self.sent += len(raw)
        self.stream.sendall(raw)


def over_wire(send: Callable[[Any], None]) -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)

    def body() -> None:
        with theirs, contextlib.suppress(OSError):  # the other end may have seen enough
            send(theirs)

    threading.Thread(target=body, daemon=True).start()
    return ours


def header_of(copy: StateCopy) -> int:
    return 8 + len(json.dumps(copy.header))


def get_part(copy: StateCopy, partial: PartialState, after: int) -> int:
    """The connection breaks after so many bytes. Returns how many have come."""
    cuts: list[Cut] = []

    def send(stream: Any) -> None:
        cuts.append(Cut(stream, after))
        send_state(cuts[0], copy, partial.filled)  # type: ignore[arg-type]

    with over_wire(send) as stream, pytest.raises(ConnectionError, match="has closed the connection"):
        receive_state(stream, 5, partial)
    return cuts[0].sent


def get_rest(copy: StateCopy, partial: PartialState) -> tuple[Any, int]:
    """The state, and the bytes that were sent for it now."""
    counts: list[int] = []

    def send(stream: Any) -> None:
        cut = Cut(stream, 10**9)
        send_state(cut, copy, partial.filled)  # type: ignore[arg-type]
        counts.append(cut.sent)
        assert hear(stream) == {"received": copy.name}
        counts.append(0)

    with over_wire(send) as stream:
        found = receive_state(stream, 5, partial)
        with contextlib.suppress(OSError):
            assert stream.recv(1) == b""
    assert len(counts) == 2
    return found, counts[0]


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


def test_a_state_arrives_as_it_was_sent():
    text, tensors = encode(TREE)

    def send(stream: socket.socket) -> None:
        say(stream, None)
        send_state(stream, StateCopy(text, tensors))

    with over_wire(send) as stream:
        assert_is(receive_state(stream, 5), TREE)


@pytest.mark.parametrize("part", [5, 2**18])
def test_a_transfer_continues_wherever_the_connection_breaks(monkeypatch, part):
    """In the header, in a tensor, between tensors, in the SHA-256."""
    monkeypatch.setattr(transfer_module, "_PART", part)
    monkeypatch.setattr(transfer_module, "_REMEMBERED", 11)
    text, tensors = encode(TREE)
    header, size = header_of(StateCopy(text, tensors)), 7 * 4 + 6 * 2 + 8
    for after in (*range(0, header, 40), *range(header - 1, header + size + DIGEST)):
        copy, partial = StateCopy(text, tensors), PartialState()
        assert get_part(copy, partial, after) == after
        came = min(max(after - header, 0), size)
        assert (partial.filled, partial.copy) == (came, copy.name if after >= header else None)
        found, sent = get_rest(copy, partial)
        assert_is(found, TREE)
        assert sent == header + size - came + DIGEST
        assert (partial.filled, partial.copy) == (0, None)


def test_a_transfer_continues_again_and_again(monkeypatch):
    monkeypatch.setattr(transfer_module, "_PART", 100)
    monkeypatch.setattr(transfer_module, "_REMEMBERED", 300)
    values = torch.randint(0, 256, (4, 997), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    copy, partial, draw = StateCopy(*encode({"w": list(values)})), PartialState(), random.Random(7)
    came = []
    while partial.filled < copy.size - 200:
        before = partial.filled
        came.append(get_part(copy, partial, header_of(copy) + draw.randrange(200)) - header_of(copy))
        assert partial.filled - before == came[-1]
    found, sent = get_rest(copy, partial)
    assert sum(came) + sent - header_of(copy) - DIGEST == copy.size == 4 * 997
    assert len(came) > 20
    for tensor, value in zip(found["w"], values, strict=True):
        assert bytes(tensor.numpy()) == bytes(value.numpy())


def test_what_was_sent_is_not_hashed_again(monkeypatch):
    """It would take longer than the other end waits."""
    monkeypatch.setattr(transfer_module, "_PART", 10)
    monkeypatch.setattr(transfer_module, "_REMEMBERED", 100)
    source = torch.arange(250, dtype=torch.uint8)
    copy, partial = StateCopy(*encode({"w": source})), PartialState()
    get_part(copy, partial, header_of(copy) + 230)
    assert [position for position, _ in copy.digests] == [0, 100, 200]
    source[:200] = 0
    found, _ = get_rest(copy, partial)
    assert_is(found, {"w": torch.arange(250, dtype=torch.uint8)})


def test_another_copy_begins_anew():
    """Also one of the same layout."""
    old, new = (StateCopy(*encode({"w": torch.full((9,), value)})) for value in (1.0, 2.0))
    partial = PartialState()
    get_part(old, partial, header_of(old) + 20)

    def send(stream: socket.socket) -> None:
        send_state(stream, new)

    with over_wire(send) as stream:
        assert_is(receive_state(stream, 5, partial), {"w": torch.full((9,), 2.0)})


def test_parts_of_two_copies_never_become_a_state():
    old, new = (StateCopy(*encode({"w": torch.full((9,), value)})) for value in (1.0, 2.0))
    partial = PartialState()
    get_part(old, partial, header_of(old) + 20)
    new.header = old.header

    def send(stream: socket.socket) -> None:
        send_state(stream, new, partial.filled)

    with over_wire(send) as stream, pytest.raises(ConnectionError, match="SHA-256 is wrong"):
        receive_state(stream, 5, partial)
    assert (partial.filled, partial.copy, partial.tensors) == (0, None, {})


def test_a_damaged_state_is_refused_wherever_a_bit_is_flipped():
    copy = StateCopy(*encode({"a": torch.arange(5.0)}))
    header = header_of(copy)
    for at in range(8, header + copy.size + DIGEST):
        partial = PartialState()

        def send(stream: socket.socket, at: int = at) -> None:
            send_state(Flip(stream, at), copy)  # type: ignore[arg-type]

        with over_wire(send) as stream, pytest.raises((ConnectionError, TimeoutError)) as caught:
            receive_state(stream, 5, partial)
        if at >= header:
            assert "SHA-256 is wrong" in str(caught.value)
            assert (partial.filled, partial.copy) == (0, None)


def test_a_bit_that_is_flipped_in_the_rest_discards_everything():
    copy = StateCopy(*encode({"a": torch.arange(5.0)}))
    for at in range(header_of(copy), header_of(copy) + 10 + DIGEST):
        partial = PartialState()
        get_part(copy, partial, header_of(copy) + 10)

        def send(stream: socket.socket, at: int = at) -> None:
            send_state(Flip(stream, at), copy, 10)  # type: ignore[arg-type]

        with over_wire(send) as stream, pytest.raises(ConnectionError, match="SHA-256 is wrong"):
            receive_state(stream, 5, partial)
        assert (partial.filled, partial.copy) == (0, None)


def test_messages_are_bounded_and_refusals_are_errors():
    too_long = (2**40).to_bytes(8, "little")
    with over_wire(lambda stream: stream.sendall(too_long)) as stream, pytest.raises(ConnectionError, match="are allowed"):
        hear(stream)
    with over_wire(lambda stream: say(stream, [1])) as stream, pytest.raises(ConnectionError, match="no dict"):
        hear(stream)
    refusal = {"refused": "too busy"}
    with over_wire(lambda stream: say(stream, refusal)) as stream, pytest.raises(ConnectionError, match="too busy"):
        receive_state(stream, 5)

    def never(stream: socket.socket) -> None:
        for _ in range(40):
            say(stream, None)
            time.sleep(0.02)

    with over_wire(never) as stream, pytest.raises(TimeoutError, match="has not answered within"):
        hear_answer(stream, 0.2)


# -- the copies that a member keeps ----------------------------------------------------------------------------------------


class Member:
    """A host without a replica. It trains: its value is the number of its boundaries."""

    def __init__(self, values: int = 1000, dead_after: float = 1.0) -> None:
        self.values, self.boundaries, self.taken = values, 0, 0
        self.engine, self.neighbours = SimpleNamespace(exchanges=1, first_bucket=0), SimpleNamespace(is_paused=False)
        faults: Any = SimpleNamespace(dead_after=dead_after)
        monitor: Any = SimpleNamespace(members=(0, 1), epochs=None, faults=faults, neighbours=self.neighbours)
        replica: Any = SimpleNamespace(engine=self.engine)
        self.host = Host(replica, monitor)
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self._train, daemon=True)
        self.thread.start()

    def _train(self) -> None:
        while not self.ends.wait(0.01):
            self.boundaries += 1
            self.host.reached_boundary()

    def take(self) -> Any:
        self.taken += 1
        return {"parameters": {"w": torch.full((self.values,), float(self.boundaries))}}

    def stop(self) -> None:
        self.ends.set()
        self.thread.join()

    def open(self) -> socket.socket:
        return over_wire(self.host.serve)

    def get(self, partial: PartialState) -> Any:
        with self.open() as stream:
            say(stream, partial.request)
            return receive_state(stream, 5, partial)["snapshot"]["parameters"]["w"]

    def get_part(self, partial: PartialState, size: int) -> None:
        """So many bytes of its tensors, and closes the connection."""
        with self.open() as stream:
            say(stream, partial.request)
            header = hear_answer(stream, 5)
            partial.begin(header)
            cut = SimpleNamespace(recv_into=lambda view: stream.recv_into(view[: size - partial.filled]))
            with contextlib.suppress(ConnectionError):  # recv_into of nothing returns 0
                partial.fill(cut)  # type: ignore[arg-type]
        assert partial.filled == size


@pytest.fixture
def member(monkeypatch) -> Iterator[Callable[..., Member]]:
    members: list[Member] = []

    def make(**options: Any) -> Member:
        members.append(Member(**options))
        return members[-1]

    def take(replica: Any, *, settled: bool) -> Any:
        assert not settled, "a member must not wait for the others"
        return next(m for m in members if m.host._replica is replica).take()

    monkeypatch.setattr(host_module, "take", take)
    yield make
    for one in members:
        one.stop()


def until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_member_sends_the_rest_of_the_same_copy_and_drops_it_when_it_has_arrived(member):
    donor, partial = member(), PartialState()
    donor.get_part(partial, 1000)
    boundaries, name = donor.boundaries, partial.copy
    until(lambda: donor.boundaries > boundaries + 5)
    assert list(donor.host._copies) == [name]
    found = donor.get(partial)
    assert bool((found == found[0]).all())
    assert 0 < float(found[0]) <= boundaries
    assert donor.taken == 1
    until(lambda: not donor.host._copies)


def test_a_copy_is_kept_until_it_has_arrived_and_not_until_it_is_sent(member):
    donor, partial = member(values=10), PartialState()
    donor.get_part(partial, 40)  # without the SHA-256, which is in the kernel's memory
    until(lambda: not any(kept.users for kept in donor.host._copies.values()))
    assert len(donor.host._copies) == 1
    donor.get(partial)
    assert donor.taken == 1


def test_a_copy_that_nobody_asks_for_is_dropped(member):
    donor, partial = member(dead_after=0.2), PartialState()
    donor.get_part(partial, 1000)
    began = time.monotonic()
    until(lambda: not donor.host._copies)
    assert time.monotonic() - began > 0.3
    donor.stop()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(donor.get(partial)))
    thread.start()
    until(lambda: donor.host._wanted is not None)
    donor.host.reached_boundary()  # it gets another copy, all of it
    thread.join(10)
    assert donor.taken == 2
    assert bool((found[0] == float(donor.boundaries)).all())


def test_the_next_guest_drops_old_copies(member):
    donor, old = member(dead_after=0.3), PartialState()
    donor.get_part(old, 1000)
    donor.stop()
    time.sleep(0.9)
    assert list(donor.host._copies) == [old.copy]
    with donor.open() as stream:  # nobody comes to a boundary
        say(stream, PartialState().request)
        until(lambda: donor.host._wanted is not None)
        assert donor.host._copies == {}


def test_the_end_of_an_old_connection_changes_nothing_for_the_new_one(member):
    donor, partial = member(values=10**6, dead_after=0.5), PartialState()
    with donor.open() as new:  # nobody reads what is sent
        with donor.open() as old:
            say(old, partial.request)
            partial.begin(hear_answer(old, 5))
            say(new, partial.request)
            hear_answer(new, 5)
            (kept,) = donor.host._copies.values()
            assert kept.users == 2
        until(lambda: kept.users == 1)
        time.sleep(0.05)
        assert list(donor.host._copies) == [partial.copy]


def test_the_end_of_training_drops_all_copies(member):
    donor, partial = member(values=10**6), PartialState()
    donor.get_part(partial, 1000)
    with donor.open() as stream:  # it is sent
        say(stream, PartialState().request)
        hear_answer(stream, 5)
        donor.stop()
        donor.host.closing()
        assert donor.host._copies == {}
    with pytest.raises(ConnectionError, match="this worker has ended"):
        donor.get(PartialState())


@pytest.mark.parametrize("begin", [-1, 4001, "1", True, None, 1.0, [2]])
def test_a_place_outside_of_the_copy_is_refused(member, begin):
    donor, partial = member(), PartialState()
    donor.get_part(partial, 1000)
    with donor.open() as stream:
        say(stream, partial.request | {"from": begin})
        with pytest.raises(ConnectionError, match="from must be an int from 0 to 4000"):
            receive_state(stream, 5)
    donor.get(partial)  # it is kept
    assert donor.taken == 1


@pytest.mark.parametrize("name", ["other", None, 7, ["x"], {}])
def test_a_copy_that_is_not_known_is_another_one_from_its_first_byte(member, name):
    donor = member(values=10)
    with donor.open() as stream:
        say(stream, {"want": "state", "copy": name, "from": 7})
        assert receive_state(stream, 5)["snapshot"]["parameters"]["w"].shape == (10,)


def test_those_that_come_together_get_one_copy(member):
    donor, parts = member(values=10**6), [PartialState() for _ in range(12)]
    for partial in parts:
        donor.get_part(partial, 1000)
    assert (donor.taken, len({partial.copy for partial in parts})) == (1, 1)
    donor.engine.first_bucket += 1  # the workers have loaded another state
    donor.get_part(PartialState(), 1000)
    assert donor.taken == 2


def test_not_more_than_a_few_copies_are_kept(member, monkeypatch):
    """Each is as large as the state. Later ones get the newest."""
    monkeypatch.setattr(host_module, "_FRESH", 0.0)
    donor, parts = member(values=10**6), [PartialState() for _ in range(5)]
    for partial in parts:
        donor.get_part(partial, 1000)
        assert len(donor.host._copies) <= 2
    assert [partial.copy for partial in parts[1:]] == [parts[1].copy] * 4
    for partial in parts[:2]:
        found = donor.get(partial)
        assert bool((found == found[0]).all())
    assert donor.taken == 2


def test_not_more_than_a_few_are_served_at_a_time(member):
    donor = member(values=10**6, dead_after=0.5)
    with contextlib.ExitStack() as stack:
        for _ in range(8):  # nobody reads what is sent here
            stream = stack.enter_context(donor.open())
            say(stream, PartialState().request)
            hear_answer(stream, 5)
        began = time.monotonic()
        donor.get(PartialState())  # when the others have been stuck for too long
        assert time.monotonic() - began < 3


def test_a_member_that_waits_for_others_says_so_and_sends_the_rest_of_what_it_has(member):
    donor, partial = member(), PartialState()
    donor.neighbours.is_paused = True
    donor.stop()
    with pytest.raises(ConnectionError, match="it waits for others"):
        donor.get(PartialState())
    donor.host.reached_boundary()
    until(lambda: donor.host._wanted is None)
    donor.host._copies.clear()
    thread = threading.Thread(target=lambda: donor.get_part(partial, 1000))
    donor.neighbours.is_paused = False
    thread.start()
    until(lambda: donor.host._wanted is not None)
    donor.host.reached_boundary()
    thread.join(5)
    donor.neighbours.is_paused = True
    donor.get(partial)
