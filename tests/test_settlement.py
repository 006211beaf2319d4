"""Both or neither, over a scripted network: the real frames and votes of two workers, without threads, sockets and clocks.

Each schedule is a random sequence of: bytes that move, in pieces; a connection that is cut, in which each end learns of it at
a time of its own; one that is made again; a bit that flips; an exchange that starts, is given up or is left out at one end; a
peer that counts as dead.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from decent_dp.errors import WireError
from decent_dp.transport import settlement as settlement_module
from decent_dp.transport.base import Verdict
from decent_dp.transport.tcp import connection as connection_module
from decent_dp.transport.tcp import framing as framing_module
from decent_dp.transport.tcp.connection import LinkState, Pair, Receiving, Sending
from decent_dp.transport.tcp.framing import Framing
from decent_dp.transport.tcp.protocol import ASK, BEAT, BYE, DROP, GOT, HEADER_SIZE, NOTE, SMALL, DamagedError, pack
from decent_dp.transport.votes import Vote, Votes

BUCKETS = 2


class Clock:
    """The only clock that the modules see."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1e-6
        return self.now


class Stream:
    """One end of a connection: bytes that were written wait until the script moves them."""

    family = socket.AF_INET

    def __init__(self) -> None:
        self.out, self.arrived = bytearray(), bytearray()
        self.other: Stream | None = None
        self.cut = False
        self.room = 1 << 16

    def setblocking(self, flag: bool) -> None: ...
    def setsockopt(self, *args: Any) -> None: ...

    def fileno(self) -> int:
        raise OSError("no descriptor")

    def sendmsg(self, parts: list[memoryview]) -> int:
        if self.cut:
            raise ConnectionResetError("cut")
        free = self.room - len(self.out)
        if free <= 0:
            raise BlockingIOError
        data = b"".join(parts)[:free]
        self.out += data
        return len(data)

    def recvmsg_into(self, into: list[memoryview]) -> tuple[int, list[Any], int, Any]:
        return sum(map(self._recv_into, into)) or self._nothing(), [], 0, None

    def recv_into(self, into: memoryview) -> int:
        return self._recv_into(into) or self._nothing()

    def _recv_into(self, into: memoryview) -> int:
        part = self.arrived[: len(into)]
        into[: len(part)] = part
        del self.arrived[: len(part)]
        return len(part)

    def _nothing(self) -> int:
        if self.cut:
            return 0
        raise BlockingIOError

    def close(self) -> None:
        self.cut = True


class Selector:
    def register(self, *args: Any) -> None: ...
    def unregister(self, *args: Any) -> None: ...
    def modify(self, *args: Any) -> None: ...


@dataclass
class End:
    """One of the two workers."""

    rank: int
    framing: Framing
    stream: Stream | None = None
    round: int = 0
    # By (round, bucket): the handle's verdict, None while it waits; what was received.
    verdicts: dict[tuple[int, int], Verdict | None] = field(default_factory=dict)
    received: dict[tuple[int, int], bytes] = field(default_factory=dict)
    # Memory that the transport has given back, with what its owner has written to it since.
    given_back: list[bytearray] = field(default_factory=list)
    damaged: int = 0

    @property
    def peer(self) -> int:
        return 1 - self.rank

    @property
    def connection(self) -> Any:
        return self.framing.connection(self.peer)

    def open_rounds(self) -> list[tuple[int, int]]:
        return [key for key, verdict in self.verdicts.items() if verdict is None]


def content(rank: int, round_: int, bucket: int, size: int) -> bytes:
    return random.Random(f"{rank} {round_} {bucket}").randbytes(size)


class World:
    def __init__(self, seed: int, sizes: tuple[int, int]) -> None:
        self.draw, self.sizes = random.Random(seed), sizes
        self.ends = [End(rank, Framing(rank, frozenset(), Selector(), lambda *_: None)) for rank in (0, 1)]  # type: ignore[arg-type]
        self.flips = 0
        self.give_back: dict[tuple[int, int, int], Callable[[], Any]] = {}
        for end in self.ends:
            end.framing.dead_after = 10.0
            self.count_damage(end)
        self.connect()

    def count_damage(self, end: End) -> None:
        lose = end.framing.lose

        def counted(connection: Any, reason: str, error: BaseException | None = None) -> None:
            end.damaged += isinstance(error, DamagedError)
            lose(connection, reason, error)

        end.framing.lose = counted  # type: ignore[method-assign]

    # -- the network ------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if any(end.connection.state is LinkState.OPEN for end in self.ends):
            return
        streams = Stream(), Stream()
        for end, own, other in zip(self.ends, streams, streams[::-1], strict=True):
            own.other, end.stream = other, own
            end.framing.open(end.peer, own, b"a process")  # type: ignore[arg-type]

    def cut(self) -> None:
        """What has arrived can still be read; the rest is lost."""
        for end in self.ends:
            if end.stream is not None:
                end.stream.out.clear()
                end.stream.cut = True

    def move(self, end: End, count: int) -> None:
        stream = end.stream
        if stream is not None and stream.other is not None and not stream.cut:
            stream.other.arrived += stream.out[:count]
            del stream.out[:count]

    def flip(self, end: End) -> None:
        if end.stream is not None and end.stream.out:
            self.flips += 1
            place = self.draw.randrange(len(end.stream.out))
            end.stream.out[place] ^= 1 << self.draw.randrange(8)

    def read(self, end: End) -> None:
        if end.connection.state is LinkState.OPEN:
            end.framing.read(end.connection)
        if end.connection.state is LinkState.OPEN:
            end.framing.write(end.connection)  # the selector reports that there is room
        end.framing.go_on()

    # -- the workers ------------------------------------------------------------------------------------------------------

    def start(self, end: End) -> None:
        """The next round: its exchanges are opened, or left out."""
        if end.open_rounds() or end.round - self.ends[end.peer].round > 3:
            return
        for bucket in range(BUCKETS):
            key, votes = (end.round, bucket, 0), end.connection.votes
            # A worker may not have seen yet that the connection is lost.
            is_lost = end.connection.state is not LinkState.OPEN and self.draw.random() < 0.7
            if is_lost or votes.in_doubt(bucket) or votes.has_dropped(end.round, bucket):
                end.framing.settlement.skip(end.peer, end.round, bucket)
                end.verdicts[end.round, bucket] = Verdict.NEITHER
                continue
            self.open(end, key)
        end.round += 1
        end.framing.go_on()

    def open(self, end: End, key: tuple[int, int, int]) -> None:
        round_, bucket, _ = key
        size = self.sizes[bucket]
        memory, own = bytearray(size), bytearray(content(end.rank, round_, bucket, size))

        def settle(verdict: Verdict) -> None:
            end.verdicts[round_, bucket] = verdict
            end.received.setdefault((round_, bucket), bytes(memory))
            give_back()

        def give_back() -> None:
            memory[:] = own[:] = b"\xff" * size
            end.given_back += [memory, own]

        self.give_back[end.rank, round_, bucket] = lambda: (end.received.update({(round_, bucket): bytes(memory)}), give_back())

        def fail(error: BaseException) -> None:
            raise AssertionError(f"worker {end.rank}: {error}")

        end.verdicts[round_, bucket] = None
        sending = Sending(end.peer, key, memoryview(own), lambda: None, fail, ready=size)
        receiving = Receiving(end.peer, key, memoryview(memory), lambda: None, fail)
        end.framing.settlement.open(Pair(receiving, sending, settle))

    def abandon(self, end: End) -> None:
        for round_, bucket in end.open_rounds():
            verdict = end.framing.settlement.abandon(end.peer, (round_, bucket, 0), late=False)
            if verdict is Verdict.OPEN:
                assert end.verdicts[round_, bucket] is None
                end.verdicts[round_, bucket] = Verdict.OPEN
                self.give_back[end.rank, round_, bucket]()
            else:
                assert end.verdicts[round_, bucket] is not None
        end.framing.go_on()

    def skip(self, end: End) -> None:
        if not end.open_rounds():
            for bucket in range(BUCKETS):
                end.framing.settlement.skip(end.peer, end.round, bucket)
                end.verdicts[end.round, bucket] = Verdict.NEITHER
            end.round += 1
            end.framing.go_on()

    def expire(self, end: End) -> None:
        """The peer counts as dead here."""
        end.framing.lose(end.connection, "silent")
        end.framing.settlement.expire(end.connection)

    # -- a schedule -------------------------------------------------------------------------------------------------------

    def play(self, events: int, *, deaths: bool) -> None:
        draw = self.draw
        for _ in range(events):
            end = draw.choice(self.ends)
            what = draw.random()
            if what < 0.25:
                self.move(end, draw.choice([1, 7, HEADER_SIZE, 100, 5000, 70_000]))
                self.read(self.ends[end.peer])
            elif what < 0.50:
                self.start(end)
            elif what < 0.86:
                self.move(end, 1 << 20)
                self.read(self.ends[end.peer])
            elif what < 0.91:
                self.connect()
                self.read(end)
            elif what < 0.935:
                self.abandon(end)
            elif what < 0.945:
                self.skip(end)
            elif what < 0.96:
                self.cut()
            elif what < 0.97:
                self.flip(end)
            elif what < 0.99:
                self.read(end)
            elif deaths:
                self.expire(end)

    def heal(self) -> None:
        """The network is fine from now on, and both go on to one round."""
        last = max(end.round for end in self.ends)
        for _ in range(400):
            for end in self.ends:
                self.read(end)
                if end.connection.state is not LinkState.OPEN:
                    self.cut()
                    self.read(self.ends[end.peer])
                    self.connect()
                if end.round < last:
                    self.start(end)
                self.move(end, 1 << 20)
                self.read(self.ends[end.peer])

    def check(self, *, deaths: bool) -> int:
        """Returns the number of exchanges that only one end mixed."""
        first, second = self.ends
        assert first.round == second.round, (first.round, second.round)
        apart = 0
        for key in first.verdicts:
            verdicts = [end.verdicts[key] for end in self.ends]
            assert not {None, Verdict.OPEN} & set(verdicts), (key, verdicts)
            apart += verdicts[0] is not verdicts[1]
            for end, verdict in zip(self.ends, verdicts, strict=True):
                if verdict is Verdict.BOTH:
                    assert end.received[key] == content(end.peer, *key, self.sizes[key[1]])
        assert sum(end.damaged for end in self.ends) <= self.flips
        for end in self.ends:
            assert all(memory.count(0xFF) == len(memory) for memory in end.given_back)
        counted = sum(end.framing.settlement.one_sided for end in self.ends)
        assert apart <= counted
        assert deaths or counted == 0
        return apart


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    for module in (connection_module, framing_module, settlement_module):
        monkeypatch.setattr(module, "time", clock)


def run(seed: int, *, deaths: bool) -> tuple[int, int]:
    draw = random.Random(seed)
    world = World(seed, (draw.choice([1, 300, SMALL]), draw.choice([SMALL + 1, 90_000, 600_000])))
    world.play(draw.choice([60, 200, 500]), deaths=deaths)
    world.heal()
    apart = world.check(deaths=deaths)
    return apart, sum(verdict is Verdict.BOTH for verdict in world.ends[0].verdicts.values())


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 6000), marks=pytest.mark.slow)], ids=["some", "many"])
def test_both_mix_or_neither_whatever_the_network_does(seeds):
    mixed = 0
    for seed in seeds:
        apart, both = run(seed, deaths=False)
        assert apart == 0, f"seed {seed}"
        mixed += both
    assert mixed > 5 * len(seeds)  # the schedules are not all faults


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.slow)], ids=["some", "many"])
def test_an_exchange_that_one_end_drops_alone_is_counted(seeds):
    apart = sum(run(seed, deaths=True)[0] for seed in seeds)
    assert apart > 0 or len(seeds) < 1000  # it is possible, and rare


# -- votes by hand ---------------------------------------------------------------------------------------------------------


def test_votes_are_repeated_for_the_last_exchange_and_for_what_was_left_out():
    votes = Votes()
    votes.open(3, 0)
    assert votes.vote_got(3, 0) == Vote(3, 0, got=True)
    assert votes.verdict(3, 0) is Verdict.OPEN
    votes.hear(Vote(3, 0, got=True))
    assert votes.verdict(3, 0) is Verdict.BOTH
    votes.close(3, 0)
    votes.vote_drop(5, 0)
    votes.vote_drop(4, 1)
    assert list(votes.repeated()) == [Vote(3, 0, got=True), Vote(5, 0, got=False), Vote(4, 1, got=False)]


def test_a_later_drop_does_not_undo_a_got():
    votes = Votes()
    votes.open(3, 0)
    votes.vote_got(3, 0)
    for vote in (Vote(3, 0, got=True), Vote(9, 0, got=False)):
        votes.hear(vote)
    assert votes.verdict(3, 0) is Verdict.BOTH
    assert votes.has_dropped(4, 0)
    assert not votes.has_dropped(3, 0)


def test_votes_on_wild_buckets_and_large_bodies_are_refused():
    world = World(0, (1, 1))
    end = world.ends[0]
    for frame in (pack(DROP, (0, 2**20, 0)), pack(GOT, (0, 2**31, 0)), pack(NOTE, (0, 0, 1), 2**30)):
        fresh = World(0, (1, 1))
        end = fresh.ends[0]
        assert end.stream is not None
        end.stream.arrived += frame
        end.framing.read(end.connection)
        assert isinstance(end.connection.cause, WireError)


def test_frames_without_an_exchange_are_no_error():
    world = World(0, (1, 1))
    end = world.ends[0]
    assert end.stream is not None
    for kind in (ASK, BEAT, GOT, DROP):
        end.stream.arrived += pack(kind, (7, 0, 0))
    end.framing.read(end.connection)
    assert end.connection.state is LinkState.OPEN
    assert end.connection.round == 7
    end.stream.arrived += pack(BYE, (0, 0, 0))
    end.framing.read(end.connection)
    assert end.connection.state is LinkState.GONE


def test_who_is_in_doubt_asks_and_is_told():
    """The other end never gets the rest of the message, and drops the exchange when it is asked."""
    world = World(0, (90_000, 1))
    first, second = world.ends
    assert first.stream is not None
    first.stream.room = 4096
    for end in world.ends:
        world.open(end, (0, 0, 0))
        end.framing.go_on()
    for count in (HEADER_SIZE, HEADER_SIZE, 0, 0, 0):  # its offer and its grant, and nothing of its message
        world.move(second, 1 << 20)
        world.read(first)
        world.move(first, count)
        world.read(second)
    assert first.connection.votes.in_doubt(0)
    world.abandon(first)
    assert first.verdicts[0, 0] is Verdict.OPEN
    for _ in range(40):
        world.move(first, 1 << 20)
        world.read(second)
        world.move(second, 1 << 20)
        world.read(first)
    assert [end.verdicts[0, 0] for end in world.ends] == [Verdict.NEITHER] * 2


def test_a_vote_that_was_revoked_while_the_connection_was_lost():
    world = World(0, (1, 1))
    first, second = world.ends
    for end in world.ends:
        world.open(end, (0, 0, 0))
        end.framing.go_on()
    first.connection.votes.hear(Vote(0, 0, got=True))
    pair = second.connection.pairs[0]
    pair.receiving.received = pair.receiving.size
    second.framing.settlement.vote_if_complete(second.connection, 0)
    world.cut()
    world.read(first)
    world.expire(second)
    assert second.verdicts[0, 0] is Verdict.NEITHER
    world.connect()
    world.read(second)
    world.move(second, 1 << 20)
    world.read(first)
    assert first.verdicts[0, 0] is Verdict.NEITHER
