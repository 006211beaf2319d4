"""Signs of life where faults are tolerated, what is kept for a peer, and connections that are made again, with two workers of
one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from decent_dp.errors import WireError
from decent_dp.faults import default_dead_after
from decent_dp.topo import Edge
from decent_dp.transport import flow as flow_module
from decent_dp.transport.flow import Hints
from decent_dp.transport.handles import WireHandle
from decent_dp.transport.liveness import HolesAllowed, WireNeighbours
from decent_dp.transport.messages import BULK, DATA, pack
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.peer_links import LinkState
from decent_dp.transport.transfers import Receiving, Sending
from decent_dp.transport.votes import ExchangeId, PairExchange, Verdict
from tests.helpers import wait_for
from tests.wires import Net, make_links

EDGE, EXCHANGE = Edge([0, 1], 0.5), ExchangeId(3, 0)
SILENT = UnreachableError("there", "timed out")
REFUSED = UnreachableError("there", "connection refused", is_refused=True)


@pytest.mark.parametrize(("text", "seconds"), [("", 10.0), ("60", 60.0), (" 0.5 ", 0.5)])
def test_the_environment_sets_the_time(monkeypatch, text, seconds):
    monkeypatch.setenv("DECENT_DP_DEAD_AFTER", text)
    assert default_dead_after() == seconds


@pytest.mark.parametrize("text", ["soon", "0.1", "-1", "inf", "nan"])
def test_a_wrong_time_is_refused(monkeypatch, text):
    monkeypatch.setenv("DECENT_DP_DEAD_AFTER", text)
    with pytest.raises(ValueError, match="the environment variable DECENT_DP_DEAD_AFTER must be a number of seconds"):
        default_dead_after()


# -- two workers ------------------------------------------------------------------------------------------------------------


class Two:
    """Two workers that tolerate faults, and what the first knows of the second."""

    def __init__(self, *, near: bool = False, dead_after: float = 10.0) -> None:
        self.net = Net(2, near=near, size=2, dead_after=dead_after)
        self.known, self.theirs = (WireNeighbours(wire, rank, dead_after) for rank, wire in enumerate(self.net.wires))
        for rank in (0, 1):
            self.net.wires[rank].connect(1 - rank)
        wait_for(lambda: self.known.table.living() == [1] and self.theirs.table.living() == [0])
        self.link = self.net.wires[0].links.to(1)

    def there(self, call: Callable[[Any], object]) -> None:
        """Calls it with the second worker's wire, in its thread."""
        self.net.wires[1].call(lambda: call(self.net.wires[1]))

    def open(self, rank: int, pair: PairExchange) -> None:
        wire = self.net.wires[rank]
        wire.call(lambda: wire.settlement.open(pair))

    def end(self) -> None:
        """The second worker's process ends."""
        self.net.wires[1].close(says_bye=False)


@pytest.fixture
def make() -> Iterator[Callable[..., Two]]:
    made: list[Two] = []

    def build(**settings: Any) -> Two:
        made.append(Two(**settings))
        return made[-1]

    yield build
    for two in made:
        two.net.close()


@pytest.mark.parametrize("near", [True, False])
def test_a_process_that_has_ended_is_a_hole_at_once(make, near):
    """Within a machine it is gone. Elsewhere a firewall may answer in its place, and it may come back."""
    two = make(near=near, dead_after=20.0)
    two.net.unreachable[1] = REFUSED
    two.end()
    wait_for(lambda: two.known.look().silent == {1}, 0.5)
    if near:
        wait_for(lambda: two.link.state is LinkState.GONE, 1.0)
        assert (two.known.look().lost, two.known.look().left) == ({1}, set())
    else:
        time.sleep(0.1)
        assert two.link.state is LinkState.BROKEN
        assert not two.known.table.usable(EDGE, EXCHANGE)


def test_who_was_replaced_learns_it_when_it_connects_again(make):
    two = make()
    assert not two.theirs.look().is_replaced
    two.known.renew(1, 1, 5)  # another process is worker 1 for worker 0
    wait_for(lambda: two.theirs.look().is_replaced)


@pytest.mark.parametrize("listens", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_process_that_has_ended_elsewhere_counts_as_dead_sooner(make, listens):
    """After 0.3 of ``dead_after``, if nobody listens at its address."""
    two = make(dead_after=3.0)
    two.net.unreachable[1] = SILENT if listens else REFUSED
    two.end()
    began = time.monotonic()
    time.sleep(0.5)
    assert (two.known.look().silent, two.known.look().lost) == ({1}, set())
    wait_for(lambda: two.known.look().lost == {1})
    assert listens == (time.monotonic() - began > 2.0)


def test_what_a_peer_leaves_out_is_not_started(make):
    two = make()
    assert two.known.table.usable(EDGE, EXCHANGE)
    two.there(lambda wire: wire.settlement.skip(0, 3, 0))
    wait_for(lambda: not two.known.table.usable(EDGE, EXCHANGE))
    assert two.known.table.usable(EDGE, ExchangeId(4, 0))
    assert two.known.table.usable(EDGE, ExchangeId(3, 1))


def test_a_doubt_is_waited_for_as_long_as_a_silence_and_then_counted(make):
    """The other worker has the message and gives signs of life, and does not vote."""
    two = make(dead_after=2.0)
    two.there(lambda wire: setattr(wire.settlement, "vote_if_complete", lambda pair: None))
    verdicts: list[Any] = []
    wire = two.net.wires[0]
    policy = HolesAllowed(wire, two.known, 60.0)
    handle = WireHandle(ExchangeId(0, 0), [1], policy, wire, lambda *_: RuntimeError())
    handle.expect(1)
    for rank, settle in ((0, partial(handle.settle, 1)), (1, verdicts.append)):
        memory = memoryview(bytearray(100))
        sending = Sending(1 - rank, (0, 0, 0), memory, lambda: None, print, ready=100)
        pair = PairExchange(Receiving(1 - rank, (0, 0, 0), memoryview(bytearray(100)), lambda: None, print), sending, settle)
        if rank == 0:
            handle.pair = pair
        two.open(rank, pair)
    began = time.monotonic()
    handle.wait()
    assert 0.5 < time.monotonic() - began < 1.5
    assert (handle.verdict, two.net.wires[0].settlement.one_sided) == (Verdict.NEITHER, 1)
    wait_for(lambda: verdicts == [Verdict.NEITHER])  # the other one learns it


def test_a_peer_that_sends_what_was_not_due_costs_its_edge_and_no_more(make):
    two = make()
    verdicts: list[Verdict] = []
    errors: list[BaseException] = []
    key, data = (0, 0, 0), memoryview(bytearray(40_000))
    sending = Sending(1, key, data, lambda: None, errors.append, ready=len(data))
    two.open(0, PairExchange(Receiving(1, key, data, lambda: None, errors.append), sending, verdicts.append))
    wait_for(lambda: bool(two.link.votes.pairs))
    two.there(lambda wire: wire.links.to(0).channels[BULK].send(pack(DATA, key, 0, 30_000, 10, len(data)), b"x" * 10))
    wait_for(lambda: verdicts == [Verdict.NEITHER])
    assert (errors, two.known.look().lost) == ([], {1})


def test_a_worker_that_is_late_is_asked_and_answers(make):
    two = make(dead_after=50.0)
    two.net.wires[1].links.round = 7
    two.net.wires[0].call(lambda: two.net.wires[0].links.beat(two.link, ask=True))
    wait_for(lambda: two.known.table.round_of(1) == 7 or two.link.says.round == 7, 0.5)  # heartbeats are a second apart


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("refusals", [0, 2])
def test_a_lost_connection_is_made_again(make, monkeypatch, near, refusals):
    """Also if the system refuses a thread at first."""
    two = make(near=near, dead_after=20.0)
    refused, start = [], threading.Thread.start

    def start_or_refuse(thread: threading.Thread) -> None:
        if thread.name == "decent_dp-dial" and len(refused) < refusals:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    for count in (1, 2, 3):
        two.net.wires[0].call(lambda: two.net.wires[0].connections.lose(two.link, "cut by the test"))
        wait_for(lambda count=count: two.net.wires[0].connections.made_again == count)
        wait_for(lambda: two.theirs.table.living() == [0])
    assert len(refused) == refusals


# -- hints -----------------------------------------------------------------------------------------------------------------


class Heard(Hints):
    """Of worker 0, and those that have been passed on."""

    def __init__(self) -> None:
        self.links = make_links()
        super().__init__(self.links)
        self.passed_on: list[list[bytes]] = []

    def come(self, peer: int, round_: int, bucket: int, hint: bytes) -> None:
        self.hear(self.links.to(peer), (round_, bucket, 1), hint)


def test_old_hints_go_and_too_many_are_refused(monkeypatch):
    hints = Heard()
    for round_ in range(10):
        hints.come(1, round_, 0, b"note")
    hints.when_there([1], (9, 0, 1), hints.passed_on.append)
    hints.when_there([1], (2, 0, 1), hints.passed_on.append)  # was dropped: it is waited for
    assert hints.passed_on == [[b"note"]]
    assert hints.lacks(1, (2, 0, 1))
    hints.forget((2, 0, 1))
    assert not hints.lacks(1, (2, 0, 1))
    monkeypatch.setattr(flow_module, "_HINT_BYTES", 1000)
    for bucket in range(250):
        hints.come(2, 0, bucket, b"note")
    with pytest.raises(WireError, match="worker 2 has sent more than 1000 bytes of hints"):
        hints.come(2, 0, 250, b"note")


def test_an_exchange_begins_when_the_hints_of_all_are_there():
    hints = Heard()
    hints.come(2, 3, 0, b"of 2")
    hints.when_there([1, 2], (3, 0, 1), hints.passed_on.append)
    assert (hints.passed_on, hints.lacks(1, (3, 0, 1)), hints.lacks(2, (3, 0, 1))) == ([], True, False)
    hints.come(1, 3, 1, b"of another bucket")
    assert hints.passed_on == []
    hints.come(1, 3, 0, b"of 1")
    assert hints.passed_on == [[b"of 1", b"of 2"]]
