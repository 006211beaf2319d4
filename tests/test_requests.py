"""Requests over the links: of processes that join, which have the links of members and no more, and of members."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.peer_links import LinkState
from tests.helpers import wait_for
from tests.wires import SECONDS, Net, content, receive, send

JOINER = 2


class Served:
    """What worker 0 was asked. It answers with the request, its number, and who has asked."""

    def __init__(self, net: Net, rank: int = 0) -> None:
        self.log: list[tuple[int, int, bytes]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        net.wires[rank].requests.serve(self.answer)

    def answer(self, rank: int, incarnation: int, request: bytes) -> bytes:
        self.goes_on.wait(SECONDS)
        self.log.append((rank, incarnation, request))
        return request + b" of %d, %d" % (rank, incarnation)


def asks(net: Net, request: bytes, peer: int = 0, rank: int = JOINER) -> Any:
    return net.wires[rank].requests.ask(peer, 0, request)


def state_of(net: Net, peer: int, rank: int = JOINER) -> LinkState:
    return net.wires[rank].links.to(peer).state


@pytest.mark.parametrize("options", [{"near": True}, {"encrypts": True}, {}])
def test_a_process_that_joins_is_answered_and_can_do_nothing_else(options):
    with Net(3, joins={JOINER: 1}, **options) as net:
        served = Served(net)
        assert asks(net, b"x").result(SECONDS) == b"x of 2, 1"
        assert [asks(net, bytes(10**5)).result(SECONDS)[-8:] for _ in range(3)] == [b" of 2, 1"] * 3
        assert len(served.log) == 4
        member, joiner = net.wires[0], net.wires[JOINER]
        assert state_of(net, 0) is LinkState.JOINING
        assert list(member.links.joiners) == [(JOINER, 1)]
        assert JOINER not in member.links.by_rank or member.links.by_rank[JOINER].state is LinkState.NEW
        # It wants to exchange: nobody is there for it.
        message = content("", 5000)
        send(joiner, 0, (0, 0, 0), message)
        found = receive(joiner, 0, (0, 0, 0), 5000)
        joiner.call(lambda: joiner.hints.send(0, (0, 0, 1), b"hint"))
        asks(net, b"y").result(SECONDS)
        assert not found.done()
        assert member.flow.dropped == 0


def test_the_connection_of_a_joiner_becomes_that_of_a_member():
    """What it has begun in the meantime is done over it."""
    with Net(3, joins={JOINER: 1}) as net:
        Served(net)
        asks(net, b"x").result(SECONDS)
        member, joiner = net.wires[0], net.wires[JOINER]
        before = member.links.joiners[JOINER, 1].channels, joiner.links.to(0).channels
        mine, yours = content(1, 50_000), content(2, 50_000)
        send(joiner, 0, (7, 0, 0), mine)
        here = receive(joiner, 0, (7, 0, 0), 50_000)
        member.renew(JOINER, 1, 7)
        there = receive(member, JOINER, (7, 0, 0), 50_000)
        send(member, JOINER, (7, 0, 0), yours)
        assert bytes(here.result(SECONDS)) == bytes(yours)
        assert bytes(there.result(SECONDS)) == bytes(mine)
        after = [link.channels for link in (member.links.to(JOINER), joiner.links.to(0))]
        assert tuple(after) == before
        assert member.links.joiners == {}
        assert (member.connections.made_again, joiner.connections.made_again) == (0, 0)
        assert asks(net, b"z").result(SECONDS) == b"z of 2, 1"


def test_a_joiner_that_is_a_member_already_connects_as_one():
    with Net(3, joins={JOINER: 1}) as net:
        net.wires[0].renew(JOINER, 1, 0)
        net.wires[JOINER].connect(0)
        wait_for(lambda: state_of(net, 0) is LinkState.OPEN, 10)
        assert net.wires[0].links.joiners == {}


def test_requests_are_repeated_when_the_connection_breaks():
    with Net(3, joins={JOINER: 1}) as net:
        served = Served(net)
        asks(net, b"x").result(SECONDS)
        served.goes_on.clear()
        answers = [asks(net, b"%d" % number) for number in range(4)]
        wait_for(lambda: net.wires[0].requests._waiting.qsize() >= 3, 10)
        member = net.wires[0]
        member.call(lambda: member.connections.lose(member.links.joiners[JOINER, 1], "cut"))
        wait_for(lambda: net.wires[JOINER].connections.made_again == 1, 10)
        served.goes_on.set()
        assert [answer.result(SECONDS) for answer in answers] == [b"%d of 2, 1" % number for number in range(4)]
        assert net.wires[JOINER].requests._asked == {}
        assert len(served.log) <= 1 + 2 * 4


def test_a_process_that_nobody_serves_is_told_at_once():
    with Net(3, joins={JOINER: 1}) as net:
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="worker 2 is not a member yet, and nobody can join now"):
            asks(net, b"x").result(SECONDS)
        net.unreachable[1] = UnreachableError("there", "no route")
        with pytest.raises(ConnectionError, match=r"worker 1 cannot be asked: .*no route"):
            asks(net, b"x", peer=1).result(SECONDS)
        assert time.monotonic() - began < 15


def test_what_another_process_of_a_worker_is_asked_is_not_answered():
    with Net(3, joins={JOINER: 1}) as net:
        Served(net)
        with pytest.raises(ConnectionError, match="worker 0 cannot be asked"):
            net.wires[JOINER].requests.ask(0, 5, b"x").result(SECONDS)
        assert asks(net, b"x").result(SECONDS)


def test_a_joiner_that_is_gone_is_forgotten():
    with Net(3, joins={JOINER: 1}, near=True) as net:
        Served(net)
        asks(net, b"x").result(SECONDS)
        net.wires[JOINER].close()
        wait_for(lambda: net.wires[0].links.joiners == {}, 10)
        net.wires[0].renew(JOINER, 1, 0)  # the others have made it a member meanwhile
        wait_for(lambda: state_of(net, JOINER, rank=0) is LinkState.GONE, 10)


def test_a_donor_that_ends_fails_what_it_was_asked():
    net = Net(3, joins={JOINER: 1}, near=True)
    try:
        served = Served(net)
        asks(net, b"x").result(SECONDS)
        served.goes_on.clear()
        answer = asks(net, b"y")
        net.wires[0].close(says_bye=False)
        with pytest.raises(ConnectionError, match="worker 0 cannot be asked"):
            answer.result(SECONDS)
    finally:
        served.goes_on.set()
        net.close()


def test_two_joiners_are_served_by_one_thread():
    with Net(4, joins={2: 1, 3: 2}) as net:
        served = Served(net)
        numbers = range(50)
        answers = [(rank, asks(net, b"%d" % number, rank=rank)) for number, rank in itertools.product(numbers, (2, 3))]
        for (rank, answer), number in zip(answers, [n for n in numbers for _ in (2, 3)], strict=True):
            assert answer.result(SECONDS) == b"%d of %d, %d" % (number, rank, rank - 1)
        assert {rank for rank, *_ in served.log} == {2, 3}
        assert sum(thread.name == "decent_dp-joiners" for thread in threading.enumerate()) == 1
    wait_for(lambda: all(thread.name != "decent_dp-joiners" for thread in threading.enumerate()), 10)


def test_members_ask_each_other_over_their_links():
    with Net(2) as net:
        net.connect()
        Served(net)
        channels = net.wires[1].links.to(0).channels
        assert asks(net, b"x", rank=1).result(SECONDS) == b"x of 1, 0"
        assert net.wires[1].links.to(0).channels == channels


def test_requests_that_wait_are_bounded():
    net = Net(2)
    try:
        net.connect()
        served = Served(net)
        served.goes_on.clear()
        first = [asks(net, b"x", rank=1) for _ in range(1000)]
        wait_for(lambda: net.wires[0].requests._waiting.full(), 10)
        served.goes_on.set()
        first[0].result(SECONDS)
        wait_for(lambda: net.wires[0].requests._waiting.empty(), 10)
        assert len(served.log) < 1000
    finally:
        served.goes_on.set()
        net.close()


def test_two_processes_cannot_join_as_one():
    """A store that has lost its contents counts them from the beginning."""
    with Net(3, joins={JOINER: 1}) as net:
        Served(net)
        asks(net, b"x").result(SECONDS)
        first = net.wires[JOINER].router._identity
        admit = net.wires[0].router.admit
        assert admit(first) == ""
        assert admit(replace(first, uid=b"another!")) == "another process is about to be worker 2"
        assert admit(replace(first, rank=0)) == "rank 0 is not expected"
