"""Agreement among the workers that live, over a scripted network in virtual time: random deaths, cuts, losses and delays."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.transport.agreement import _KEPT, Agreements, PeerView
from decent_dp.transport.control_plane import ControlPlane

# Seconds of virtual time: between two looks, until a broken connection makes a worker LOST, and the end.
LOOK, DEAD_AFTER, END = 0.1, 3.0, 60.0


def links_of(
    view: Callable[[int], PeerView], send: Callable[[int, bytes], None], want: Callable[[int], None] = lambda peer: None
) -> Any:
    return SimpleNamespace(
        view=view, send_note=lambda peer, key, message: send(peer, message), want=want, first_round=lambda peer: -1
    )


class Network:
    """Workers with links among them.

    Attributes:
        results: by worker: what it was told, by name.
    """

    def __init__(self, n: int, links: set[frozenset[int]], *, seed: int = 0, loss: float = 0.0) -> None:
        self.n, self.links, self.random, self.loss = n, set(links), random.Random(seed), loss
        self.now = 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.dead: dict[int, float] = {}
        self.down: set[frozenset[int]] = set()
        self.cut: dict[frozenset[int], float] = {}
        self.results: list[dict[str, Mapping[int, str]]] = [{} for _ in range(n)]
        self.messages = 0
        self.machines = [self.machine(rank) for rank in range(n)]
        for rank in range(n):
            self.at(0.0, lambda rank=rank: self.look(rank, 0))

    def machine(self, rank: int, incarnation: int = 0) -> Agreements:
        def conclude(name: str, texts: Mapping[int, str]) -> None:
            assert name not in self.results[rank], "told twice"
            self.results[rank][name] = texts

        return Agreements(
            rank,
            self.n,
            links_of(
                lambda peer: self.view(rank, peer),
                lambda peer, message: self.send(rank, peer, message),
                lambda peer: self.at(0.01, lambda: self.link(rank, peer)),
            ),
            conclude,
            incarnation,
        )

    def at(self, delay: float, call: Callable[[], Any]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.order), call))

    def view(self, rank: int, peer: int) -> PeerView:
        edge = frozenset((rank, peer))
        if edge not in self.links:
            return PeerView.UNKNOWN
        broken = min(self.dead.get(peer, float("inf")), self.cut.get(edge, float("inf")))
        if self.now < broken + 0.05:
            return PeerView.LINKED
        return PeerView.PENDING if self.now < broken + DEAD_AFTER else PeerView.LOST

    def link(self, rank: int, peer: int) -> None:
        self.links.add(frozenset((rank, peer)))

    def send(self, rank: int, peer: int, message: bytes) -> None:
        edge = frozenset((rank, peer))
        assert edge in self.links
        self.messages += 1
        if edge in self.cut or edge in self.down:
            return
        if self.random.random() < self.loss:  # with its connection, which is made again
            self.down.add(edge)
            self.at(0.06, lambda: self.reconnect(edge))
            return

        def arrives() -> None:
            if peer not in self.dead and edge not in self.cut:
                self.machines[peer].hear(rank, message)

        self.at(self.random.uniform(0.001, 0.05), arrives)

    def reconnect(self, edge: frozenset[int]) -> None:
        self.down.discard(edge)
        for a, b in itertools.permutations(edge):
            if not {a, b} & self.dead.keys() and edge not in self.cut:
                self.machines[a].reconnected(b)

    def look(self, rank: int, count: int) -> None:
        if rank not in self.dead:
            self.machines[rank].look(again=count % 5 == 4)
            self.at(LOOK, lambda: self.look(rank, count + 1))

    def kill(self, rank: int) -> None:
        self.dead.setdefault(rank, self.now)

    def leave(self, rank: int) -> None:
        """It has said all, and then that it leaves."""
        if rank in self.dead:
            return
        self.machines[rank].leave()

        def goes() -> None:
            for peer in range(self.n):
                edge = frozenset((rank, peer))
                if edge in self.links and not (edge in self.cut or edge in self.down or {rank, peer} & self.dead.keys()):
                    self.machines[peer].departed(rank)
            self.kill(rank)

        self.at(0.051, goes)

    def break_link(self, a: int, b: int) -> None:
        self.cut.setdefault(frozenset((a, b)), self.now)

    def propose(self, rank: int, name: str, text: str, **options: Any) -> None:
        if rank not in self.dead:
            self.machines[rank].propose(name, text, **options)

    def run(self, until: float = END) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, call = heapq.heappop(self.events)
            call()
        self.now = until

    def component(self, rank: int) -> set[int]:
        """The living workers that a chain of links leads to, at the end."""
        found, waiting = {rank}, [rank]
        while waiting:
            here = waiting.pop()
            for there in range(self.n):
                edge = frozenset((here, there))
                if there not in found | self.dead.keys() and edge in self.links and edge not in self.cut:
                    found.add(there)
                    waiting.append(there)
        return found


def all_pairs(n: int) -> set[frozenset[int]]:
    return {frozenset(pair) for pair in itertools.combinations(range(n), 2)}


def ring(n: int) -> set[frozenset[int]]:
    return {frozenset((i, (i + 1) % n)) for i in range(n)}


@pytest.mark.parametrize("links", [all_pairs(5), ring(5), set()], ids=["all pairs", "ring", "none yet"])
def test_all_get_the_texts_of_all(links):
    net = Network(5, links)
    for rank in range(5):
        net.at(rank, lambda rank=rank: net.propose(rank, "call/1", f"text {rank}"))
    net.run(3.9)
    assert net.results == [{}] * 5  # the last one has not come
    net.run(6.0)
    for found in net.results:
        assert found["call/1"] == {rank: f"text {rank}" for rank in range(5)}


def test_one_that_died_is_not_waited_for_and_one_that_is_late_is():
    net = Network(4, ring(4))
    net.kill(0)
    for rank, when in ((1, 0.5), (2, 1.0), (3, 20.0)):
        net.at(when, lambda rank=rank: net.propose(rank, "call/1", f"{rank}"))
    net.run(19.0)
    assert net.machines[1].missing("call/1") == [3]
    assert net.results[1] == {}
    net.run(22.0)
    assert [net.results[rank]["call/1"] for rank in (1, 2, 3)] == [{1: "1", 2: "2", 3: "3"}] * 3


@pytest.mark.parametrize(("leaver", "victim"), [(0, None), (2, None), (1, 0), (2, 0)])
@pytest.mark.parametrize("links", [all_pairs(4), ring(4)], ids=["all pairs", "ring"])
def test_what_a_worker_has_said_that_leaves_counts(links, leaver, victim):
    """Also if the one that was to decide leaves, or dies later."""
    net = Network(4, links)
    net.propose(leaver, "vote/1", "left")
    net.at(0.5, lambda: net.leave(leaver))
    if victim is not None:
        net.at(1.0, lambda: net.kill(victim))
    others = [rank for rank in range(4) if rank not in (leaver, victim)]
    net.at(8.0, lambda: [net.propose(rank, "vote/1", "x") for rank in others])
    net.run(20.0)
    for rank in others:
        assert net.results[rank]["vote/1"] == dict(sorted({leaver: "left", **dict.fromkeys(others, "x")}.items()))


def test_one_that_is_late_costs_few_messages():
    net = Network(8, ring(8))
    for rank in range(7):
        net.propose(rank, "call/1", "x")
    net.run(10.0)
    before = net.messages
    net.run(50.0)
    assert net.messages - before < 20 * 8 * 8  # a question every two seconds
    net.propose(7, "call/1", "x")
    net.run(50.5)
    assert all("call/1" in found for found in net.results)


def test_a_broken_connection_leaves_nobody_out_whom_another_one_reaches():
    net = Network(4, all_pairs(4))
    net.break_link(0, 1)
    net.at(5.0, lambda: [net.propose(rank, "call/1", "x") for rank in range(4)])
    net.run(7.0)
    assert [sorted(found["call/1"]) for found in net.results] == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize("told", [1, 2, 3])
def test_the_next_one_asks_those_that_know_the_result(told):
    """Worker 0 decides and dies, and only one of the others has heard. Worker 4 has died before, and would be left out."""
    net = Network(5, all_pairs(5))
    for rank in range(5):
        net.propose(rank, "call/1", str(rank))
    while not net.results[0]:
        net.run(net.events[0][0])
    net.kill(0)
    net.kill(4)
    on_the_way = [event for event in net.events if event[2].__name__ == "arrives"]
    net.events = [event for event in net.events if event not in on_the_way]
    heapq.heapify(net.events)
    net.machines[told].hear(0, json.dumps(["result", "call/1", None, [], [0, list(net.results[0]["call/1"].items())]]).encode())
    net.run(10.0)
    assert [sorted(net.results[rank]["call/1"]) for rank in (1, 2, 3)] == [[0, 1, 2, 3, 4]] * 3


def test_a_result_of_one_that_is_gone_counts_once_the_present_decider_has_it():
    """Else that one, which has this worker's text, might decide otherwise for the rest."""
    net = Network(3, all_pairs(3))
    net.kill(0)
    net.run(4.0)
    net.propose(2, "call/1", "2")
    net.run(4.1)
    net.machines[2].hear(0, json.dumps(["result", "call/1", None, [], [0, [[0, "0"], [2, "2"]]]]).encode())
    assert net.results[2] == {}
    net.run(5.0)
    net.propose(1, "call/1", "1")
    assert net.results[1:] == [{"call/1": {0: "0", 2: "2"}}] * 2


def test_who_decides_knows_of_connections_that_were_made_later():
    """Worker 2 has told worker 1 that it knows nothing of worker 0, and tells worker 0 alone when they are connected."""
    net = Network(3, {frozenset((0, 1)), frozenset((1, 2))})
    net.at(0.1, lambda: [net.propose(rank, "call/1", "x") for rank in (1, 2)])
    net.at(1.0, lambda: net.link(0, 2))
    net.at(2.0, lambda: net.break_link(0, 1))
    net.at(10.0, lambda: net.propose(0, "call/1", "x"))
    net.run(20.0)
    assert [sorted(found["call/1"]) for found in net.results] == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"{}",
        b"[" * 200_000,
        b'["say","call/1",null,[],[1,"x",0,0,false]]',
        b'["say","call/one",null,[],[1,"x",0,0,0,false]]',
        b'["ask","call/1",null,[],[false,["x"]]]',
        b'["ask","call/1",null,[],[false,[-3]]]',
        b'["ask","call/1",null,[2.5],[false,[]]]',
        b'["say","call/1",null,[],[1,"x",Infinity,0,0,false]]',
        b'["result","call/1",null,[],[null,[]]]',
        b'["other","call/1",null,[],[]]',
    ],
)
def test_what_is_no_message_is_refused(message):
    net = Network(3, all_pairs(3))
    with pytest.raises(ValueError, match="no message of an agreement"):
        net.machines[0].hear(1, message)
    for rank in range(3):
        net.propose(rank, "call/1", "x")
    net.run(2.0)
    assert [sorted(found["call/1"]) for found in net.results] == [[0, 1, 2]] * 3


def test_who_comes_when_it_is_over_learns_that_it_was_left_out():
    net = Network(3, all_pairs(3))
    net.break_link(0, 2)
    net.break_link(1, 2)
    net.at(5.0, lambda: [net.propose(rank, "call/1", "x") for rank in (0, 1)])
    net.run(6.0)
    assert sorted(net.results[0]["call/1"]) == [0, 1]
    net.cut.clear()
    net.propose(2, "call/1", "x")
    net.run(8.0)
    assert sorted(net.results[2]["call/1"]) == [0, 1]


def test_those_that_have_not_come_are_asked_at_once():
    net = Network(4, all_pairs(4))
    net.propose(3, "stop/1", "now", asks=True)
    net.run(0.4)
    assert all(machine.is_asked("stop/1") for machine in net.machines)  # worker 0 asks, though it has not come itself
    net.propose(2, "stop/2", "at leisure")
    net.run(5.0)
    assert not any(machine.is_asked("stop/2") for machine in net.machines)


def test_a_process_whose_first_round_is_a_later_one_is_not_waited_for():
    """It may come all the same, as the others hear of it late."""
    net = Network(4, all_pairs(4))
    for machine in net.machines:
        machine._links.first_round = lambda peer: {3: 50, 0: 20}.get(peer, -1)
    for rank in (1, 2):
        net.propose(rank, "call/1", str(rank), round_=20)
        net.propose(rank, "call/2", str(rank), round_=51)
    net.run(1.0)
    assert net.results[1:3] == [{"call/1": {1: "1", 2: "2"}}] * 2
    for rank in (0, 3):
        net.propose(rank, "call/2", str(rank), round_=51)
    net.run(2.0)
    assert [sorted(found["call/2"]) for found in net.results] == [[0, 1, 2, 3]] * 4


def test_some_of_the_workers_agree_among_themselves():
    net = Network(5, all_pairs(5))
    for rank in (1, 3):
        net.propose(rank, "part-1,3/1", str(rank), among=(1, 3))
    net.run(1.0)
    assert net.results == [{}, {"part-1,3/1": {1: "1", 3: "3"}}, {}, {"part-1,3/1": {1: "1", 3: "3"}}, {}]


def test_what_one_that_takes_no_part_has_said_before_keeps_nobody_waiting():
    """Worker 1 was connected to worker 3, which has died since, and does not say so in an agreement that is not its own."""
    net = Network(4, all_pairs(4))
    for rank in range(4):
        net.propose(rank, "call/1", "x")
    net.run(1.0)
    net.kill(3)
    net.run(1.5 + DEAD_AFTER)
    net.machines[0]._sees[1] = frozenset({0, 3})
    for rank in (0, 2):
        net.propose(rank, "part 0 2 3/1", str(rank), among=(0, 2, 3))
    net.run(3.0 + DEAD_AFTER)
    assert [net.results[rank]["part 0 2 3/1"] for rank in (0, 2)] == [{0: "0", 2: "2"}] * 2


def test_what_is_kept_of_results_is_bounded():
    """Who comes too late for one that is not kept learns that it is over."""
    net = Network(2, all_pairs(2))
    net.break_link(0, 1)
    net.run(5.0)
    for number in range(3 * _KEPT):
        net.propose(0, f"call/{number}/0", "x")
    machine = net.machines[0]
    assert not machine._open
    assert len(machine._results["call"]) == _KEPT
    net.cut.clear()
    net.propose(1, "call/3/0", "y")
    net.propose(1, f"call/{3 * _KEPT - 1}/0", "y")
    net.run(8.0)
    assert net.results[1] == {"call/3/0": {}, f"call/{3 * _KEPT - 1}/0": {0: "x"}}


def schedule(seed: int) -> None:
    """Many agreements one after the other, deaths, cuts and losses; what must hold whatever happens."""
    rng = random.Random(seed)
    n = rng.randint(2, 7)
    links = rng.choice([all_pairs, ring])(n) if rng.random() < 0.8 else set()
    net = Network(n, links, seed=seed, loss=rng.choice([0.0, 0.0, 0.1, 0.3]))
    names = [f"call/{k}" for k in range(4)]
    for rank in range(n):
        at = 0.0
        for name in names:
            at += rng.choice([0.01, 0.1, 2.0]) * rng.random()
            net.at(at, lambda rank=rank, name=name: net.propose(rank, name, f"{rank} in {name}"))
    for _ in range(rng.randint(0, n)):
        victim = rng.randrange(n)
        end = net.kill if rng.random() < 0.7 else net.leave
        net.at(rng.uniform(0.0, 3.0), lambda victim=victim, end=end: end(victim))
    if n > 2:
        for _ in range(rng.randint(0, 2)):
            a, b = rng.sample(range(n), 2)
            net.at(rng.uniform(0.0, 3.0), lambda a=a, b=b: net.break_link(a, b))
    net.run()
    living = [rank for rank in range(n) if rank not in net.dead]
    # Where a third of the messages is lost, a question every two seconds may take more than a minute to come through.
    while net.loss and net.now < 10 * END and any(len(net.results[rank]) < len(names) for rank in living):
        net.run(net.now + END)
    for rank, name in itertools.product(living, names):
        assert name in net.results[rank], f"seed {seed}: worker {rank} waits for {name}"
        decision = net.results[rank][name]
        for other in net.component(rank):
            assert net.results[other].get(name) == decision, f"seed {seed}: workers {rank} and {other} differ in {name}"
        assert decision == {member: f"{member} in {name}" for member in decision}
        if not net.cut:
            assert decision.keys() >= set(living), f"seed {seed}: {name} leaves out a living worker"


def test_who_was_away_asks_before_it_decides():
    """Worker 0 has the statements of both others, loses its connection, and comes when they have decided without it."""
    net = Network(3, {frozenset((0, 1)), frozenset((1, 2))})
    net.at(0.1, lambda: [net.propose(rank, "call/1", "x") for rank in (1, 2)])
    net.at(2.0, lambda: [net.break_link(0, 1), net.break_link(0, 2)])
    net.run(9.0)
    assert [sorted(net.results[rank]["call/1"]) for rank in (1, 2)] == [[1, 2]] * 2
    net.cut.clear()
    net.propose(0, "call/1", "x")
    net.run(20.0)
    assert sorted(net.results[0]["call/1"]) == [1, 2]  # and it learns that it was left out


def test_random_schedules():
    for seed in range(20):
        schedule(seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(20, 20000, 999))
def test_many_random_schedules(first):
    for seed in range(first, first + 999):
        schedule(seed)


def test_what_a_process_that_was_replaced_has_said_does_not_count():
    net = Network(4, all_pairs(4))
    for rank in range(3):
        net.machines[rank].renew(3, 1)
    old, net.machines[3] = net.machines[3], net.machine(3, incarnation=1)
    old.propose("call/1", "old")
    net.run(0.5)
    for rank in range(4):
        net.propose(rank, "call/1", "new")
    net.run(1.0)
    assert net.results == [{"call/1": dict.fromkeys(range(4), "new")}] * 4


def test_who_has_left_is_not_heard_by_way_of_others_either():
    """They need not be asked whom they are connected to since then."""
    views, results = {1: PeerView.LINKED, 2: PeerView.LINKED}, list[Mapping[int, str]]()
    first = Agreements(0, 3, links_of(views.__getitem__, lambda *_: None), lambda _, texts: results.append(texts))

    def send(peer: int, message: bytes) -> None:
        if peer == 0:
            first.hear(2, message)

    last = Agreements(2, 3, links_of(lambda _: PeerView.LINKED, send), lambda *_: None)
    for worker, text in ((first, "of 0"), (last, "of 2")):
        worker.propose("name/0", text)
    first.departed(1)
    views[1] = PeerView.LOST
    first.look(again=False)
    assert results == [{0: "of 0", 2: "of 2"}]


@pytest.mark.parametrize("has_heard", [False, True])
def test_who_is_connected_again_in_a_collective_learns_that_the_others_have_ended_it(has_heard):
    """It waits for their parts, which do not come any more, and they wait for it in their next call."""
    view, name, planes = PeerView.LINKED, "call/1/2", list[ControlPlane]()

    def links(rank: int) -> Any:
        made = links_of(lambda _: view, lambda peer, text: planes[peer].agreements.hear(rank, text))
        made.call = lambda command: command()
        return made

    planes += [ControlPlane(rank, 2, links(rank)) for rank in range(2)]
    planes[1].coming = name, (0, 1)
    if has_heard:
        planes[0].agreements.ask(1, name, (0, 1))
    view = PeerView.LOST
    assert planes[0].agree(name, "failed", among=(0, 1)).result(0) == {0: "failed"}
    assert not planes[1].is_asked(name)
    view = PeerView.LINKED
    planes[1].reconnected(0)
    assert planes[1].is_asked(name)
    assert planes[1].agree(name, "failed", among=(0, 1)).result(0) == {0: "failed"}
