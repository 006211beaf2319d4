"""Collectives of the workers that live: their results, also after a death, a freeze or a broken connection inside.

The workers are threads with connections of their own; one dies by an error in the thread of its transport, which closes its
sockets as the end of a process does.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decent_dp.errors import OutOfStepError, PeerLostError, PeerTimeoutError
from decent_dp.replica.consistency import texts_of
from decent_dp.topo import Edge
from decent_dp.transport import ExchangeId
from decent_dp.transport import tree as tree_module
from decent_dp.transport.agreement import PeerView
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.control_plane import Courier
from decent_dp.transport.liveness import WireNeighbours
from decent_dp.transport.messages import AGREEMENT
from decent_dp.transport.peer_errors import UnreachableError
from decent_dp.transport.peer_links import LinkState
from decent_dp.transport.tree import spanning_tree
from decent_dp.transport.wire import Wire
from tests.helpers import some_in_the_fast_tests, wait_for
from tests.test_transport import control
from tests.wires import Net

DEAD_AFTER = 2.0
# Seconds that a test may wait for a collective that does not depend on silence.
SOON = 1.5


class KilledError(Exception):
    pass


def neighbours_with(round_of: Callable[[int], int]) -> Any:
    return SimpleNamespace(paused=contextlib.nullcontext, table=SimpleNamespace(round_of=round_of))


class Company:
    """Workers with tolerant transports.

    Attributes:
        controls: their collectives.
    """

    def __init__(self, n: int, links: Sequence[tuple[int, int]], timeout: float = 20.0, *, near: bool = True) -> None:
        self.net = Net(n, near=near, size=n, dead_after=DEAD_AFTER)
        for a, b in links:
            self.net.wires[min(a, b)].connect(max(a, b))
        nodes = [f"node {rank // 2}" for rank in range(n)]
        self.controls = [
            Collectives(wire.control_plane, range(n), nodes, timeout, neighbours=neighbours_with(lambda _: -1))
            for wire in self.net.wires
        ]

    def wire(self, rank: int) -> Wire:
        return self.net.wires[rank]

    def begins(self, rank: int, round_: int) -> None:
        """The others know the first round of a worker that has joined."""
        for wire in self.net.wires:
            wire.links.to(rank).start = round_

    def kill(self, rank: int) -> None:
        def die() -> None:
            raise KilledError

        with contextlib.suppress(RuntimeError):
            self.wire(rank).call(die)
        self.wire(rank).commands.thread.join(5)

    def run(self, work: Callable[[int, Collectives], Any], ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """What ``work`` returns on each worker, or its error."""
        results: dict[int, Any] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank, self.controls[rank])
            except Exception as error:
                results[rank] = error

        chosen = range(len(self.controls)) if ranks is None else ranks
        threads = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive(), "a worker waits for ever"
        return results


def ring(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n if n > 2 else n - 1)]


@pytest.fixture
def make() -> Iterator[Callable[..., Company]]:
    made: list[Company] = []

    def build(*args: Any, **options: Any) -> Company:
        made.append(Company(*args, **options))
        return made[-1]

    yield build
    for company in made:
        company.net.close()


def values(rank: int, size: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rank).standard_normal(size)).to(dtype)


def mean_of(ranks: Sequence[int], size: int) -> torch.Tensor:
    return torch.from_numpy(np.mean([np.random.default_rng(rank).standard_normal(size) for rank in ranks], 0))


@pytest.mark.parametrize(
    ("near", "n"), some_in_the_fast_tests([True, False], [2, 3]) + [pytest.param(True, 6, marks=pytest.mark.slow)]
)
def test_collectives(make, monkeypatch, n, near):
    monkeypatch.setattr(tree_module, "_SEGMENT", 2**21)  # several in the large mean
    company = make(n, ring(n), near=near)

    def work(rank: int, collectives: Collectives) -> Any:
        control(SimpleNamespace(rank=rank, world_size=n, control=collectives))  # type: ignore[arg-type]
        tensor = values(rank, 700_001)
        collectives.mean(tensor)
        return tensor, collectives.ranks

    for tensor, ranks in company.run(work).values():
        torch.testing.assert_close(tensor, mean_of(range(n), 700_001), rtol=1e-14, atol=1e-14)
        assert ranks == tuple(range(n))


def test_workers_that_were_never_connected_meet(make):
    company = make(4, [])
    assert company.run(lambda rank, control: control.gather(rank)) == {rank: [0, 1, 2, 3] for rank in range(4)}


def test_one_that_does_not_dial_is_dialled(make):
    """Of two workers either may dial: also if only one wants it, and could not reach the other before."""
    company = make(2, [])
    low, high = company.wire(0), company.wire(1)
    company.net.unreachable[0] = UnreachableError("there", "timed out")
    high.connect(0)
    wait_for(lambda: high.links.to(0).state is LinkState.BROKEN)
    assert low.links.by_rank.get(1) is None
    company.net.unreachable.clear()
    wait_for(lambda: {wire.links.to(1 - rank).state for rank, wire in enumerate((low, high))} == {LinkState.OPEN})


DEATHS = [
    pytest.param(victim, blocks, marks=() if (victim, blocks) in ((0, 3), (1, 1)) else pytest.mark.slow)
    for victim in range(5)
    for blocks in (0, 1, 3, 6)
]


@pytest.fixture
def dying(make, monkeypatch) -> Callable[[int, int], Company]:
    """Five workers, of which ``victim`` dies when it is about to send or to take a block, after so many others."""

    def build(victim: int, blocks: int) -> Company:
        company = make(5, [*ring(5), (0, 2), (1, 3)])
        company.run(lambda rank, control: control.gather(rank))
        left = {"blocks": blocks}

        def counted(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(courier: Courier, *args: Any) -> Any:
                if courier is company.wire(victim).control_plane.courier(0):
                    if left["blocks"] == 0:
                        company.kill(victim)
                        raise KilledError
                    left["blocks"] -= 1
                return method(courier, *args)

            return call

        monkeypatch.setattr(Courier, "put", counted(Courier.put))
        monkeypatch.setattr(Courier, "get", counted(Courier.get))
        return company

    return build


@pytest.mark.parametrize(("victim", "blocks"), DEATHS)
@pytest.mark.parametrize("what", ["mean", "gather_tensors"])
def test_a_death_in_a_collective(dying, what, victim, blocks):
    """As root, inside the tree and as a leaf."""
    company, size = dying(victim, blocks), 400_000

    def work(rank: int, control: Collectives) -> Any:
        if what == "mean":
            found = values(rank, size)
            control.mean(found)
        else:
            found = control.gather_tensors([values(rank, 150_000 + rank), torch.tensor(rank)])
        return found, control.ranks, control.gather(rank)

    began = time.monotonic()
    results = company.run(work)
    assert time.monotonic() - began < DEAD_AFTER + SOON
    living = [rank for rank in range(5) if rank != victim]
    assert isinstance(results.pop(victim), (KilledError, RuntimeError))
    assert sorted(results) == living
    for found, ranks, gathered in results.values():
        assert list(ranks) == gathered == living
        if what == "mean":
            torch.testing.assert_close(found, mean_of(living, size), rtol=1e-14, atol=1e-14)
            continue
        assert [int(number) for _, number in found] == living
        for rank, (tensor, _) in zip(living, found, strict=True):
            assert tensor.equal(values(rank, 150_000 + rank))


@pytest.mark.parametrize("dead", [[0], [1, 3]])
def test_deaths_before_a_collective(make, dead):
    """Of the first worker, and of all neighbours of another one."""
    company, living = make(5, ring(5)), [rank for rank in range(5) if rank not in dead]
    company.run(lambda rank, control: control.gather(rank))
    for rank in dead:
        company.kill(rank)
    began = time.monotonic()
    assert company.run(lambda rank, control: control.gather(rank), living) == dict.fromkeys(living, living)
    assert time.monotonic() - began < SOON


@pytest.mark.slow
def test_a_frozen_worker_is_left_out_and_told_when_it_wakes(make):
    company = make(4, ring(4))
    company.run(lambda rank, control: control.gather(rank))
    company.net.freeze(2, DEAD_AFTER + 1.5)
    began = time.monotonic()
    results = company.run(lambda rank, control: control.gather(rank), [0, 1, 3])
    assert results == {rank: [0, 1, 3] for rank in (0, 1, 3)}
    assert DEAD_AFTER / 2 < time.monotonic() - began < DEAD_AFTER + SOON
    wait_for(lambda: WireNeighbours(company.wire(2), 2, DEAD_AFTER).table.living() == [0, 1, 3], 10.0)
    late = company.run(lambda rank, control: control.gather(rank), [2])[2]
    assert isinstance(late, PeerLostError)
    assert "took worker 2 for gone" in str(late)


def test_a_worker_that_was_late_waits_for_the_next_call_of_the_same_name(make):
    """Also if it has made a call together with the others since then, by chance of the same name."""
    company = make(4, ring(4))

    def work(rank: int, control: Collectives) -> Any:
        control.begin("first")
        control.gather(rank)
        if rank == 2:
            control.enter(control.calls, first=-1)  # as one that has missed calls
        control.begin("second")
        found = [control.gather(rank)]
        for call in ("averaged", "third") if rank == 2 else ("save", "flush", "averaged", "third"):
            control.begin(call)
            found.append(control.gather(rank))
        return found

    results, some = company.run(work), [0, 1, 3]
    assert results.pop(2) == [[0, 1, 2, 3]] * 3
    assert results == {rank: [[0, 1, 2, 3], some, some, [0, 1, 2, 3], [0, 1, 2, 3]] for rank in some}


def test_a_worker_that_was_late_ends_if_the_others_never_make_its_call(make):
    company = make(3, ring(3), timeout=1.0)

    def work(rank: int, control: Collectives) -> Any:
        if rank == 2:
            control.enter(control.calls, first=-1)
            control._leave = lambda: company.kill(2)
            control.begin("averaged")
            return control.gather(rank)
        for _ in range(40):
            control.begin("save")
            found = control.gather(rank)
            time.sleep(0.05)
        return found

    results = company.run(work)
    late = results.pop(2)
    assert isinstance(late, OutOfStepError)
    assert "worker 2 has missed calls of the others, and waits for their next averaged()" in str(late)
    assert "other ones for 1 s, such as a gather of save()" in str(late)
    assert results == {0: [0, 1], 1: [0, 1]}


def test_a_short_freeze_costs_time_only(make):
    company = make(3, ring(3))
    company.run(lambda rank, control: control.gather(rank))
    company.net.freeze(1, 0.7 * DEAD_AFTER)
    assert company.run(lambda rank, control: control.gather(rank)) == {rank: [0, 1, 2] for rank in range(3)}


@pytest.mark.parametrize("near", [pytest.param(True, marks=pytest.mark.slow), False], ids=["unix", "tcp"])
def test_a_connection_that_breaks_is_made_again(make, near):
    company, size = make(4, ring(4), near=near), 300_000
    begun, stop = threading.Event(), threading.Event()

    def lose(wire: Wire) -> None:
        for link in list(wire.links.by_rank.values()):
            wire.connections.lose(link, "cut by the test")

    def cut() -> None:
        begun.wait()  # then there are connections to cut
        for rank in itertools.cycle(range(4)):
            company.wire(rank).call(partial(lose, company.wire(rank)))
            if stop.wait(0.3):
                return

    cutting = threading.Thread(target=cut, daemon=True)
    cutting.start()

    def work(rank: int, control: Collectives) -> Any:
        for _ in range(4):
            tensor = values(rank, size)
            control.mean(tensor)
            begun.set()
        return tensor, control.ranks

    results = company.run(work)
    stop.set()
    cutting.join()
    for result in results.values():
        tensor, ranks = result
        assert ranks == (0, 1, 2, 3)
        torch.testing.assert_close(tensor, mean_of(range(4), size), rtol=1e-14, atol=1e-14)
    wait_for(lambda: sum(wire.connections.made_again for wire in company.net.wires) > 0)


def test_who_does_not_come_is_named(make):
    company = make(3, ring(3), timeout=0.3)
    results = company.run(lambda rank, control: control.gather(rank), [0, 1])
    for error in results.values():
        assert isinstance(error, PeerTimeoutError)
    assert "worker 2 did not" in str(results[0])


def test_different_calls_are_an_error_on_all(make):
    company = make(3, ring(3))

    def work(rank: int, control: Collectives) -> Any:
        control.gather(rank)
        if rank == 2:
            return control.gather(rank)
        return control.mean(torch.ones(3))

    errors = company.run(work)
    assert all(isinstance(error, OutOfStepError) for error in errors.values())
    assert {str(error) for error in errors.values()} == {
        "worker 0 has come to a mean of 12 bytes and worker 2 to a gather: make the same calls in the same order on every "
        "worker."
    }


def test_parts_of_a_network_do_not_share_a_call(make):
    """Between two collectives of one call each half has made one of its own."""
    company = make(4, ring(4))

    def call(rank: int, control: Collectives) -> Any:
        control.begin("mean")
        control.gather(rank)
        control._call.history = 1 + rank // 2
        return control.gather(rank)

    errors = company.run(call)
    assert all(isinstance(error, PeerLostError) and "fallen into parts" in str(error) for error in errors.values())
    again = company.run(lambda rank, control: (control.begin("mean"), control.gather(rank))[1])
    assert again == {key: [0, 1, 2, 3] for key in range(4)}


def call_of(round_: int, *, late: float = 0.0) -> Callable[[int, Collectives], list[Any]]:
    """A call of two gathers, to which worker 2 comes ``late``."""

    def call(rank: int, control: Collectives) -> list[Any]:
        time.sleep(late if rank == 2 else 0.0)
        control.begin("call", round_)
        return [*control.gather(rank), *control.gather(f"{rank} again")]

    return call


def test_a_call_does_not_wait_for_a_process_that_joins_and_whose_first_round_is_a_later_one(make):
    company = make(3, ring(3))
    joins = company.controls[2]
    everyone = [0, 1, 2, "0 again", "1 again", "2 again"]
    assert company.run(call_of(1)) == dict.fromkeys(range(3), everyone)
    joins.enter(1, first=8)
    company.begins(2, 8)
    began = time.monotonic()
    assert company.run(call_of(8), (0, 1)) == {rank: [0, 1, "0 again", "1 again"] for rank in (0, 1)}
    assert time.monotonic() - began < SOON
    # It comes to a call of round 9, and they are in one of round 8.
    early = threading.Thread(target=lambda: company.run(call_of(9), (2,)), daemon=True)
    early.start()
    time.sleep(0.2)
    assert company.run(call_of(8), (0, 1)) == {rank: [0, 1, "0 again", "1 again"] for rank in (0, 1)}
    assert company.run(call_of(9), (0, 1)) == dict.fromkeys((0, 1), everyone)
    early.join(5)
    assert not early.is_alive()
    assert company.run(call_of(9, late=0.5)) == dict.fromkeys(range(3), everyone)  # it waits now
    company.begins(2, -1)  # a state was loaded
    assert company.run(call_of(3, late=0.5)) == dict.fromkeys(range(3), everyone)


def test_a_mean_is_made_once_whatever_processes_and_rounds_take_part(make, monkeypatch):
    """The first workers have their result, and say so, while the last one waits for its own; who is absent says that."""
    company = make(4, ring(4))
    tries = Counter[int]()
    company.controls[1]._plane.incarnation = 7
    company.controls[3].enter(0, first=50)
    company.begins(3, 50)

    def work(rank: int, control: Collectives) -> torch.Tensor | None:
        if rank == 3:
            return None
        control.begin("mean", 10 + rank)
        mean, put = control._tree.mean, control._tree._put

        def count(*args: Any) -> Any:
            tries[rank] += 1
            return mean(*args)

        def slow(peer: int, block: Any) -> None:
            time.sleep(0.7 if rank == 1 else 0.0)  # it is in the middle of the tree
            put(peer, block)

        monkeypatch.setattr(control._tree, "mean", count)
        monkeypatch.setattr(control._tree, "_put", slow)
        tensor = values(rank, 100)
        control.mean(tensor)
        return tensor

    results = company.run(work)
    for rank in range(3):
        torch.testing.assert_close(results[rank], mean_of((0, 1, 2), 100))
    assert tries == {0: 1, 1: 1, 2: 1}


def test_a_call_without_a_round_is_also_that_of_a_process_that_has_joined(make):
    company = make(3, ring(3))
    company.controls[2].enter(0, first=8)

    def call(rank: int, control: Collectives) -> list[Any]:
        time.sleep(0.3 if rank == 2 else 0.0)
        control.begin("load_state_dict")
        return control.gather(rank)

    assert company.run(call) == {rank: [0, 1, 2] for rank in range(3)}


def test_a_text_that_nobody_says_stops_no_worker(make):
    company = make(2, ring(2))
    company.run(call_of(1))
    company.wire(1).control_plane.agree("call/7/0", "nonsense")
    time.sleep(0.2)
    assert company.run(call_of(2)) == {rank: [0, 1, "0 again", "1 again"] for rank in range(2)}


@pytest.mark.slow
@pytest.mark.parametrize("comes", [1.5, 5.0])
def test_a_worker_that_wakes_within_a_call_does_not_stop_it(make, comes):
    """The others have begun it without that worker, and go on with it while that worker waits for their next one, or trains."""
    company = make(3, ring(3))
    company.run(call_of(1))
    company.net.freeze(2, 1.3 * DEAD_AFTER)

    def work(rank: int, control: Collectives) -> list[Any]:
        time.sleep(comes * DEAD_AFTER if rank == 2 else 0.0)
        control.begin("call", 5)
        found = control.gather(rank)
        if rank == 2:
            return found
        time.sleep(DEAD_AFTER)
        wait_for(lambda: company.wire(rank).links.to(2).state is LinkState.OPEN)
        began = time.monotonic()
        found += control.gather("more")
        assert time.monotonic() - began < SOON
        control.begin("call", 6)
        return [*found, *control.gather(rank)]

    assert company.run(work) == {0: [0, 1, "more", "more", 0, 1, 2], 1: [0, 1, "more", "more", 0, 1, 2], 2: [0, 1, 2]}


def test_a_worker_that_waits_in_a_call_is_paused(make):
    """In all of its agreements, as long as it waits; not in a call that all come to."""
    company = make(2, ring(2))
    pauses: list[str] = []

    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        pauses.append("paused")
        yield
        pauses.append("goes on")

    company.controls[0]._neighbours.paused = paused  # type: ignore[union-attr, method-assign]

    def work(rank: int, control: Collectives) -> None:
        for _ in range(2):
            time.sleep(0.3 * rank)
            control.gather(rank)

    company.run(work)
    assert pauses == ["paused", "goes on"] * 2


def test_nobody_meets_a_process_that_joins_before_its_first_round(make):
    """And its round tells nobody that it is behind."""
    company = make(2, ring(2))
    company.run(lambda rank, control: control.gather(rank))
    wire, edge = company.wire(0), Edge([0, 1], 0.5)
    neighbours, link = WireNeighbours(wire, 0, DEAD_AFTER), wire.links.to(1)
    link.start, link.says.round = 50, 51
    for round_, meets in ((10, False), (49, False), (50, True)):
        neighbours.announce(round_)
        assert neighbours.table.usable(edge, ExchangeId(round_, 0)) == meets
        assert neighbours.table.round_of(1) == (51 if meets else -1)


@pytest.mark.slow
def test_a_worker_that_makes_rounds_is_waited_for(make):
    """For longer than the timeout. One that makes none is not."""
    company = make(2, ring(2))
    began = time.monotonic()

    def rounds(rank: int) -> int:
        return int(10 * min(time.monotonic() - began, 3.0))

    control = Collectives(company.wire(0).control_plane, range(2), ["a", "a"], 1.0, neighbours=neighbours_with(rounds))
    with pytest.raises(PeerTimeoutError, match="worker 1 did not"):
        control.gather(0)
    assert 3.9 < time.monotonic() - began < 8.0


def test_a_message_that_is_none_costs_its_connection_only(make):
    company = make(3, ring(3))
    company.run(lambda rank, control: control.gather(rank))
    company.wire(1).call(lambda: company.wire(1).send_note(0, (0, AGREEMENT, 0), b'["x",[[1,1,"x",["a"],"0","0"]],null,0]'))
    wait_for(lambda: company.wire(0).links.to(1).why is not None)
    assert company.wire(0).commands.thread.is_alive()


def test_a_transport_that_is_closed_waits_for_nobody(make):
    company = make(2, ring(2))
    waiting = company.wire(0).control_plane.agree("call/0/0", "[]")
    company.wire(0).close()
    with pytest.raises(RuntimeError, match="closed"):
        waiting.result(5)


def test_the_tree_spans_all_and_follows_connections():
    chosen = random.Random(0)
    for _ in range(300):
        n = chosen.randint(1, 12)
        ranks = sorted(chosen.sample(range(20), n))
        apart = {frozenset(pair) for pair in itertools.combinations(ranks, 2)}
        for i, rank in enumerate(ranks[1:], 1):  # connected, with some more
            for peer in {chosen.choice(ranks[:i]), chosen.choice(ranks[:i])}:
                apart.discard(frozenset((rank, peer)))
        parents = spanning_tree(ranks, apart, [f"node {rank // 4}" for rank in range(20)])
        assert sorted(parents) == ranks
        assert parents[ranks[0]] is None
        for rank, parent in parents.items():
            assert frozenset((rank, parent)) not in apart
            seen = {rank}
            while parent is not None:
                assert parent not in seen
                seen.add(parent)
                parent = parents[parent]


def test_the_tree_has_two_children_and_leaves_a_node_seldom():
    everybody = range(16)
    nodes = [f"node {rank // 4}" for rank in everybody]
    parents = spanning_tree(everybody, set(), nodes)
    assert max(sum(parent == rank for parent in parents.values()) for rank in everybody) == 2
    between = sum(parent is not None and nodes[parent] != nodes[rank] for rank, parent in parents.items())
    assert between == 3


# -- one worker alone --------------------------------------------------------------------------------------------------------


def alone(agree: Callable[..., Any], timeout: float = 60.0) -> Collectives:
    """Worker 0 of two, without ``faults=``; ``agree`` in place of that of its control plane."""
    courier = SimpleNamespace(begin=lambda number: None)
    plane: Any = SimpleNamespace(rank=0, incarnation=0, courier=lambda channel: courier, view=lambda peer: PeerView.LINKED)
    plane.agree, plane.agreements = agree, None
    return Collectives(plane, range(2), ["a", "a"], timeout, explain=lambda ranks, _: PeerLostError(f"{ranks} are gone"))


def test_who_was_left_out_does_not_say_that_it_is_gone_itself():
    result: Future[dict[int, str]] = Future()
    result.set_result({})
    with pytest.raises(PeerLostError, match="the others took worker 0 for gone"):
        alone(lambda *_, **__: result).gather(None)


def test_attempts_that_fail_again_and_again_end(monkeypatch):
    """Two workers that reach each other by way of a third agree, and have no connection for the data."""
    control = alone(lambda *_: None, timeout=0.2)
    tries: list[float] = []

    def agree(what: str, text: str) -> dict[int, str]:
        tries.append(time.monotonic())
        assert len(tries) < 1000, "it goes on for ever"
        time.sleep(0.01)
        return {0: text, 1: "failed"}

    monkeypatch.setattr(control, "_agree", agree)
    control._call.number = 1
    with pytest.raises(PeerLostError, match=r"has failed again and again .* \[0, 1\] live: some of them do not reach"):
        control.mean(torch.ones(1))
    assert tries[-1] - tries[0] > 0.15


def test_an_agreement_without_this_worker_is_no_loss_of_another_one():
    """Where faults are not tolerated the loss of another one is an error, too."""
    found: Future[Mapping[int, str]] = Future()
    found.set_result({1: "x"})
    for rank, said in ((0, "the others took worker 0 for gone"), (1, r"^\[0, 2\] for a save$")):
        transport: Any = SimpleNamespace(rank=rank, world_size=3, neighbours=None)
        transport.explain = lambda error, ranks, what: PeerLostError(f"{ranks} for {what}")
        with pytest.raises(PeerLostError, match=said):
            texts_of(transport, found, "a save")
