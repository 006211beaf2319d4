"""Both or neither, over a scripted network: the real messages and votes of two workers, without threads, sockets and clocks.

Each schedule is a random sequence of: messages that move, some at a time; a connection that is cut, in which each end learns of
it at a time of its own; one that is made again; an exchange that starts, is given up or is left out at one end; a peer that
counts as dead.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from decent_dp.errors import WireError
from decent_dp.transport import sockets
from decent_dp.transport.connections import Connections
from decent_dp.transport.messages import ASK, BEAT, BYE, DROP, GOT, VOTE, pack
from decent_dp.transport.peer_links import LinkState
from decent_dp.transport.router import Reader, Router
from decent_dp.transport.sockets import Channel
from decent_dp.transport.transfers import SMALL, Receiving, Sending
from decent_dp.transport.votes import PairExchange, Verdict, Votes
from tests.wires import make_connections, make_links, message

BUCKETS = 2
# The only clock that the links see.
CLOCK = itertools.count(1.0, 1e-6)


class Stream:
    """One connection at one end, as a socket of ZeroMQ: whole messages wait until the script moves them.

    Of a large body only its memory is noted, as libzmq does.
    """

    def __init__(self) -> None:
        self.zmq = self
        self.is_router = self.closed = self.cut = False
        self.channels: dict[bytes, Channel] = {}
        self.out: deque[list[Any]] = deque()
        self.arrived: deque[list[Any]] = deque()
        self._sending: list[Any] = []
        self._reading: list[Any] = []

    def send(self, part: Any, flags: int = 0, *, copy: bool = True) -> None:
        self._sending.append(bytes(part) if copy else part)
        if not flags & zmq.SNDMORE:
            if not self.cut:
                self.out.append(self._sending)
            self._sending = []

    def move(self, other: Stream, count: int) -> None:
        for _ in range(min(count, 0 if self.cut else len(self.out))):
            other.arrived.append([bytes(part) for part in self.out.popleft()])

    def recv(self, flags: int = 0) -> bytes:
        if not self._reading:
            if not self.arrived:
                raise zmq.Again
            self._reading = self.arrived.popleft()
        return self._reading.pop(0)

    def recv_into(self, memory: memoryview, flags: int = 0) -> int:
        part = self.recv()
        memory[: len(part)] = part
        return len(part)

    def get(self, option: int) -> bool:
        return bool(self._reading)


@dataclass
class End:
    """One of the two workers."""

    rank: int
    connections: Connections = field(init=False)
    router: Any = field(init=False)
    # Of control and of bulk.
    streams: list[Stream] = field(default_factory=list)
    round: int = 0
    # By (round, bucket): the handle's verdict, None while it waits; what was received.
    verdicts: dict[tuple[int, int], Verdict | None] = field(default_factory=dict)
    received: dict[tuple[int, int], bytes] = field(default_factory=dict)
    # Memory that the transport has given back, with what its owner has written to it since.
    given_back: list[bytearray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.connections = make_connections(self.rank, make_links(now=lambda: next(CLOCK)), lambda _: self.cut())
        self.flow, self.settlement = self.connections.flow, self.connections.settlement
        self.router = Router.__new__(Router)
        self.router._sockets = SimpleNamespace(reads=lambda _: True)
        self.router._reader = Reader(self.connections, self.router._sockets)

    @property
    def peer(self) -> int:
        return 1 - self.rank

    @property
    def link(self) -> Any:
        return self.connections.links.to(self.peer)

    def cut(self) -> None:
        for stream in self.streams:
            stream.cut = True

    def connect(self) -> None:
        self.streams = [Stream(), Stream()]
        made: list[Any] = [Channel(stream, plane) for plane, stream in enumerate(self.streams)]  # type: ignore[arg-type]
        for stream, channel in zip(self.streams, made, strict=True):
            stream.channels[b""] = channel
        self.connections.open(self.link, b"a process", *made)

    def read(self) -> None:
        if self.link.state is LinkState.OPEN:
            for stream in self.streams:
                self.router.read(stream, math.inf)
            if self.streams[0].cut:
                self.connections.lose(self.link, "closed by the peer")
        self.flow.go_on()

    def open_rounds(self) -> list[tuple[int, int]]:
        return [key for key, verdict in self.verdicts.items() if verdict is None]


def content(rank: int, round_: int, bucket: int, size: int) -> bytes:
    return random.Random(f"{rank} {round_} {bucket}").randbytes(size)


class World:
    def __init__(self, seed: int, sizes: tuple[int, int]) -> None:
        self.draw, self.sizes = random.Random(seed), sizes
        self.ends = [End(rank) for rank in (0, 1)]
        self.connect()

    # -- the network ------------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if not any(end.link.state is LinkState.OPEN for end in self.ends):
            for end in self.ends:
                end.connect()

    def cut(self) -> None:
        """What has arrived can still be read; the rest is lost."""
        for end in self.ends:
            end.cut()

    def move(self, end: End, count: int, planes: Sequence[int] = (0, 1)) -> None:
        """So many messages of each plane; the peer reads those that have arrived when it likes."""
        for plane in planes:
            end.streams[plane].move(self.ends[end.peer].streams[plane], count)

    # -- the workers ------------------------------------------------------------------------------------------------------

    def start(self, end: End) -> None:
        """The next round: its exchanges are opened, or left out."""
        if end.open_rounds() or end.round - self.ends[end.peer].round > 3:
            return
        for bucket in range(BUCKETS):
            key, votes = (end.round, bucket, 0), end.link.votes
            # A worker may not have seen yet that the connection is lost.
            is_lost = end.link.state is not LinkState.OPEN and self.draw.random() < 0.7
            if is_lost or bucket in votes.pairs or votes.has_dropped(end.round, bucket):
                end.settlement.skip(end.peer, end.round, bucket)
                end.verdicts[end.round, bucket] = Verdict.NEITHER
                continue
            self.open(end, key)
        end.round += 1
        end.flow.go_on()

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

        def fail(error: BaseException) -> None:
            raise AssertionError(f"worker {end.rank}: {error}")

        end.verdicts[round_, bucket] = None
        sending = Sending(end.peer, key, memoryview(own), lambda: None, fail, ready=size)
        receiving = Receiving(end.peer, key, memoryview(memory), lambda: None, fail)
        end.settlement.open(PairExchange(receiving, sending, settle))

    def abandon(self, end: End) -> None:
        for round_, bucket in end.open_rounds():
            pair = end.link.votes.pairs[bucket]
            in_doubt = pair.voted > 0
            end.settlement.abandon(pair, late=False)
            assert in_doubt is (end.verdicts[round_, bucket] is None)
        end.flow.go_on()

    def drop(self, end: End) -> None:
        """It waits no longer for the end of its doubts."""
        for round_, bucket in end.open_rounds():
            end.settlement.drop(end.link.votes.pairs[bucket])
            assert end.verdicts[round_, bucket] is Verdict.NEITHER
        end.flow.go_on()

    def skip(self, end: End) -> None:
        if not end.open_rounds():
            for bucket in range(BUCKETS):
                end.settlement.skip(end.peer, end.round, bucket)
                end.verdicts[end.round, bucket] = Verdict.NEITHER
            end.round += 1
            end.flow.go_on()

    def expire(self, end: End) -> None:
        """The peer counts as dead here."""
        end.connections.lose(end.link, "silent")
        end.settlement.expire(end.link, may_live=True)

    # -- a schedule -------------------------------------------------------------------------------------------------------

    def play(self, events: int, *, deaths: bool) -> None:
        draw = self.draw
        for _ in range(events):
            end = draw.choice(self.ends)
            what = draw.random()
            if what < 0.25:
                self.move(end, draw.choice([1, 2, 5]), draw.choice([(0,), (1,), (0, 1)]))
                self.ends[end.peer].read()
            elif what < 0.50:
                self.start(end)
            elif what < 0.86:
                self.move(end, 100)
                self.ends[end.peer].read()
            elif what < 0.91:
                self.connect()
                end.read()
            elif what < 0.935:
                self.abandon(end)
            elif what < 0.945:
                self.skip(end)
            elif what < 0.96:
                self.cut()
            elif what < 0.99:
                end.read()
            elif deaths:
                draw.choice([self.expire, self.drop])(end)

    def heal(self) -> None:
        """The network is fine from now on, and both go on to one round."""
        last = max(end.round for end in self.ends)
        for _ in range(400):
            for end in self.ends:
                end.read()
                if end.link.state is not LinkState.OPEN:
                    self.cut()
                    self.ends[end.peer].read()
                    self.connect()
                if end.round < last:
                    self.start(end)
                self.move(end, 100)
                self.ends[end.peer].read()

    def check(self, *, deaths: bool) -> int:
        """Returns the number of exchanges that only one end mixed."""
        first, second = self.ends
        assert first.round == second.round, (first.round, second.round)
        apart = 0
        for key in first.verdicts:
            verdicts = [end.verdicts[key] for end in self.ends]
            assert None not in verdicts, (key, verdicts)
            apart += verdicts[0] is not verdicts[1]
            for end, verdict in zip(self.ends, verdicts, strict=True):
                if verdict is Verdict.BOTH:
                    assert end.received[key] == content(end.peer, *key, self.sizes[key[1]])
        for end in self.ends:
            assert all(memory.count(0xFF) == len(memory) for memory in end.given_back)
        counted = sum(end.settlement.one_sided for end in self.ends)
        assert apart <= counted
        assert deaths or counted == 0
        return apart


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    # Frames have 16 KiB at a rate that is not known: messages of 300 bytes are copied, larger ones are lent.
    monkeypatch.setattr(sockets, "_COPIED", 2**10)


def run(seed: int, *, deaths: bool) -> tuple[int, int]:
    draw = random.Random(seed)
    world = World(seed, (draw.choice([1, 300, SMALL]), draw.choice([SMALL + 1, 90_000, 600_000])))
    world.play(draw.choice([60, 200, 500]), deaths=deaths)
    world.heal()
    apart = world.check(deaths=deaths)
    return apart, sum(verdict is Verdict.BOTH for verdict in world.ends[0].verdicts.values())


MANY = [pytest.param(range(first, first + 2000), marks=pytest.mark.slow) for first in (30, 2030, 4030)]


@pytest.mark.parametrize("seeds", [range(30), *MANY], ids=["some", "30", "2030", "4030"])
def test_both_mix_or_neither_whatever_the_network_does(seeds):
    mixed = 0
    for seed in seeds:
        apart, both = run(seed, deaths=False)
        assert apart == 0, f"seed {seed}"
        mixed += both
    assert mixed > 5 * len(seeds)  # the schedules are not all faults


@pytest.mark.parametrize("seeds", [range(30), pytest.param(range(30, 3000), marks=pytest.mark.slow)], ids=["some", "many"])
def test_an_exchange_that_one_end_drops_alone_is_counted(seeds):
    apart = sum(run(seed, deaths=True)[0] for seed in seeds)
    assert apart > 0 or len(seeds) < 1000  # it is possible, and rare


# -- votes by hand ---------------------------------------------------------------------------------------------------------


def test_a_later_drop_does_not_undo_a_got():
    receiving, sending = (message(kind, (3, 0, 0), 1) for kind in (Receiving, Sending))
    votes, pair = Votes(got={0: 3}, peer_got={0: 3}, peer_dropped={0: 9}), PairExchange(receiving, sending, print, voted=1.0)
    assert votes.verdict(pair) is Verdict.BOTH
    assert votes.has_dropped(4, 0)
    assert not votes.has_dropped(3, 0)


def test_votes_on_wild_buckets_are_refused():
    for header in (pack(VOTE, (0, 2**20, 0), DROP), pack(VOTE, (0, 2**31, 0), GOT)):
        end = World(0, (1, 1)).ends[0]
        end.streams[0].arrived.append([header])
        end.read()
        assert isinstance(end.link.why, WireError)


def test_an_exchange_with_a_peer_that_has_sent_what_was_not_due_is_a_hole():
    world = World(0, (1, 1))
    end = world.ends[0]
    end.streams[0].arrived.append([pack(VOTE, (0, 2**20, 0), DROP)])
    end.read()
    world.open(end, (0, 0, 0))
    assert end.verdicts[0, 0] is Verdict.NEITHER


def test_messages_without_an_exchange_are_no_error():
    end = World(0, (1, 1)).ends[0]
    end.streams[0].arrived += [[pack(VOTE, (7, 0, 0), word)] for word in (ASK, GOT, DROP)]
    end.streams[0].arrived.append([pack(BEAT, (7, 0, 0))])
    end.read()
    assert end.link.state is LinkState.OPEN
    assert end.link.says.round == 7
    end.streams[0].arrived.append([pack(BYE)])
    end.read()
    assert end.link.state is LinkState.GONE


def one_in_doubt() -> tuple[World, End, End]:
    """The first end has the message of the second, which never gets its own."""
    world = World(0, (90_000, 1))
    first, second = world.ends
    for end in world.ends:
        world.open(end, (0, 0, 0))
        end.flow.go_on()
    for _ in range(4):
        world.move(second, 100)
        first.read()
        world.move(first, 100, [0])
        second.read()
    assert first.link.votes.pairs[0].voted
    return world, first, second


def test_who_is_in_doubt_asks_and_is_told():
    """The other end drops the exchange when it is asked."""
    world, first, second = one_in_doubt()
    world.abandon(first)
    assert first.verdicts[0, 0] is None
    for _ in range(4):
        world.move(first, 100, [0])
        second.read()
        world.move(second, 100)
        first.read()
    assert [end.verdicts[0, 0] for end in world.ends] == [Verdict.NEITHER] * 2


def test_who_waits_no_longer_for_the_end_of_a_doubt_drops_what_the_other_may_have_mixed():
    world, first, _ = one_in_doubt()
    world.drop(first)
    assert (first.verdicts[0, 0], first.settlement.one_sided) == (Verdict.NEITHER, 1)
    assert first.link.state is LinkState.BROKEN, "its memory is the caller's, and libzmq may still read it"


@pytest.mark.parametrize("before", [{}, {0: -1}], ids=["nothing", "a GOT"])
def test_a_round_that_is_left_out_in_doubt_undoes_no_got_on_a_new_connection(before):
    """Once its DROP was known there before the GOT was repeated, so that the first end alone mixed. ``before``: the other end's
    votes on earlier exchanges."""
    world, first, second = one_in_doubt()
    second.link.votes.got.update(before)
    first.settlement.skip(second.rank, 3, 0)
    world.move(first, 100, [0])
    second.read()
    world.cut()
    for end in world.ends:
        end.read()
    world.connect()
    for planes in ([1], [0, 1]):  # at first its votes stay behind the data
        for _ in range(20):
            world.move(second, 100)
            first.read()
            world.move(first, 100, planes)
            second.read()
    assert [end.verdicts[0, 0] for end in world.ends] == [Verdict.BOTH] * 2


def test_a_vote_that_was_revoked_while_the_connection_was_lost():
    world = World(0, (1, 1))
    first, second = world.ends
    for end in world.ends:
        world.open(end, (0, 0, 0))
        end.flow.go_on()
    first.link.votes.peer_got[0] = 0
    pair = second.link.votes.pairs[0]
    pair.receiving.received = pair.receiving.size
    second.settlement.vote_if_complete(pair)
    world.cut()
    first.read()
    world.expire(second)
    assert second.verdicts[0, 0] is Verdict.NEITHER
    world.connect()
    second.read()
    world.move(second, 100)
    first.read()
    assert first.verdicts[0, 0] is Verdict.NEITHER


def test_who_has_the_whole_message_says_on_a_new_connection_that_it_is_in_the_exchange():
    """Else the other one never asks for its message: only the first of several is asked for without that."""
    world = World(0, (90_000, 90_000))
    first, second = world.ends
    for end in world.ends:
        for bucket in range(BUCKETS):
            world.open(end, (0, bucket, 0))
        end.flow.go_on()
    for _ in range(20):  # the first one has both messages, and none of its own has arrived
        world.move(second, 100)
        first.read()
        world.move(first, 100, [0])
        second.read()
    assert not first.link.lane.receivings
    world.cut()
    for end in world.ends:
        end.read()
    world.connect()
    for _ in range(20):
        for end in world.ends:
            world.move(end, 100)
            world.ends[end.peer].read()
    assert all(end.verdicts[0, bucket] is Verdict.BOTH for end in world.ends for bucket in range(BUCKETS))
