"""The engine by itself, on a plain list of tensors; and what its drivers promise of buckets, listeners and loads."""

from __future__ import annotations

import gc
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_dp import gossip
from decent_dp.compression import COMPRESSIONS
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.engine import Engine, enter, go_to
from decent_dp.engine.bucket import InFlight
from decent_dp.engine.engine import Counts
from decent_dp.engine.layout import TensorSpec
from decent_dp.errors import PeerLostError
from decent_dp.replica.replica import Listener
from decent_dp.rules import Gossip, OuterNesterov, Round, Rule
from decent_dp.topo import CompleteTopology, Edge, EveryTopology, RingTopology, SwitchTopology, Topology, make_topology
from decent_dp.topo.schedule import turn_of
from decent_dp.transport import ExchangeId, InProcessTransport, Peers, run_replicas
from tests.helpers import DRIVERS, SGD, Driven, Heard, assert_same, net, values

MANY = 2e-4  # MiB: buckets of a small model's single tensors


def engine_of(
    transport: Any,
    topology: Topology,
    tensors: list[Any],
    rule: Rule | None = None,
    as_view: bool = False,
    compression: str | None = None,
) -> Any:
    """An engine with ``tensors`` in buckets, one for each dtype."""
    peers = Peers(transport, range(transport.world_size), transport.world_size)
    engine = Engine(peers, topology, rule or Gossip(), COMPRESSIONS[compression])
    specs = [TensorSpec.of(f"tensor {i}", tensor) for i, tensor in enumerate(tensors)]
    engine.install(engine.lay_out(specs, tensors, range(len(specs)), 2**20, as_view=as_view))
    return engine


class Turns(Topology):
    """Rounds as they are given."""

    def __init__(self, rounds: list[list[Edge]], rank: int) -> None:
        self.rounds = rounds
        super().__init__(1, world_size=sum(len(edge.ranks) for edge in rounds[0]), rank=rank)

    def _get_topo_edges(self) -> list[list[Edge]]:
        return self.rounds


# -- the engine by itself --------------------------------------------------------------------------------------------------


def abandoned(transport: Any) -> None:
    tensors = [torch.full((3,), 1.0 + transport.rank)]
    engine = engine_of(transport, RingTopology(1, world_size=2, rank=transport.rank), tensors)
    [bucket] = engine.buckets
    engine.start(bucket)
    engine.finish(bucket).raise_if_failed()
    if transport.rank == 1:
        return
    engine.advance()
    engine.start(bucket)
    outcome = engine.finish(bucket)
    assert (outcome.kind, type(outcome.error)) == ("lost", PeerLostError)
    assert "worker 1 is gone" in str(outcome.error)
    with pytest.raises(PeerLostError, match="worker 1 is gone"):
        outcome.raise_if_failed()
    assert bucket.in_flight is None
    assert engine.counts.exchanges == 1
    assert tensors[0].tolist() == [1.5] * 3


def test_a_lost_peer_is_an_outcome():
    """Nothing is raised, and nothing is written."""
    run_replicas(2, abandoned)


def test_a_million_rounds_are_left_out_at_once():
    """By a process that was frozen for hours."""
    topology = make_topology("base-2", local_world_size=1, world_size=4, rank=0)
    buckets = [SimpleNamespace(topology=topology, number=number) for number in range(50)]
    left_out: dict[int, int] = {}
    skip = lambda edge, exchange_id: left_out.__setitem__(exchange_id.bucket, exchange_id.round)  # noqa: E731
    neighbours = SimpleNamespace(skip=skip, rank=0)
    engine: Any = SimpleNamespace(round=10, counts=Counts(), buckets=buckets, _peers=neighbours)
    began = time.monotonic()
    go_to(engine, 1_000_010)
    assert time.monotonic() - began < 5
    assert engine.round == 1_000_010
    assert engine.counts.holes == 50 * 1_000_000
    assert left_out == dict.fromkeys(range(50), 1_000_009)


def dropped(transport: Any, rule: Rule) -> None:
    tensors = [torch.full((3,), 1.0 + transport.rank)]
    engine = engine_of(transport, RingTopology(1, world_size=2, rank=transport.rank), tensors, rule)
    engine.start(engine.buckets[0])
    version = tensors[0]._version
    engine.drop()
    assert tensors[0].tolist() == [1.0 + transport.rank] * 3
    assert tensors[0]._version == version


@pytest.mark.parametrize("rule", [Gossip(), OuterNesterov()])
def test_a_drop_does_not_write_to_parameters(rule):
    """The model may train on, in another thread."""
    run_replicas(2, lambda transport: dropped(transport, rule))


def test_a_wait_until_values_are_read_is_counted():
    tensors = [torch.zeros(3)]
    engine = engine_of(InProcessTransport(), CompleteTopology(1, world_size=1, rank=0), tensors)
    handle: Any = SimpleNamespace(wait_for_read=lambda: time.sleep(0.05))
    engine.buckets[0].in_flight = InFlight(Round(0), Edge([0, 1], 0.5), handle=handle)
    engine.wait_for_read()
    assert 0.05 <= engine.counts.waited_s < 5


@pytest.mark.parametrize("n", [1, 2])
def test_a_worker_without_partners_copies_nothing(n):
    def own_memory(transport: Any) -> bool:
        tensors = [torch.ones(3)]
        topology = CompleteTopology(1, world_size=n, rank=transport.rank)
        engine = engine_of(transport, topology, tensors, compression="int8")
        engine.start(engine.buckets[0])
        (sent,) = engine.buckets[0].in_flight.near
        return bool(sent.data_ptr() == tensors[0].data_ptr())

    assert run_replicas(n, own_memory) == [n == 1] * n


# -- the calls of a rule ---------------------------------------------------------------------------------------------------


class Recording(Rule):
    """Plain gossip that records its calls."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, bool]] = []

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        self.log.append(("propose", round.number, False))
        return values

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        self.log.append(("apply", round.number, difference is not None))


class RecordingMixes(Recording):
    acts_alone = False


def calls_of(transport: Any, kind: type[Recording]) -> list[tuple[str, int, bool]]:
    """Worker 1 exits after its first mix."""
    rule, rounds = kind(), [[Edge([0, 1], 0.5)], [Edge([0], 1.0), Edge([1], 1.0)]]
    engine = engine_of(transport, Turns(rounds, transport.rank).every(2), [torch.ones(3)], rule)
    [bucket] = engine.buckets
    for _ in range(6 if transport.rank == 0 else 2):
        engine.start(bucket)
        engine.finish(bucket)
        engine.advance()
    return rule.log


@pytest.mark.parametrize("kind", [Recording, RecordingMixes])
def test_a_rule_is_called_in_idle_and_lost_rounds(kind):
    """Updates 0, 2 and 4 stand between mixes and are no rounds; in 3 this worker sits out, and in 5 its peer is lost."""
    log, _ = run_replicas(2, lambda transport: calls_of(transport, kind))
    expected = []
    for t, came in ((1, True), (3, False), (5, False)):
        expected.append(("propose", t, False))
        if came or kind.acts_alone:
            expected.append(("apply", t, came))
    assert log == expected


RING, COMPLETE = (make(1, world_size=4, rank=0) for make in (RingTopology, CompleteTopology))
NAMED = make_topology("complete:3,ring", local_world_size=1, world_size=4, rank=0)
IDLE = Turns([[Edge([rank], 1.0) for rank in range(4)]], 0)
MIXES: dict[str, tuple[Topology, str]] = {
    "every update": (RING, "xxxxxxxxxxxx"),
    "a round that leaves all alone": (IDLE, "xxxxxxxxxxxx"),
    "every third": (RING.every(3), "--x--x--x--x"),
    "every second of every second": (RING.every(2).every(2), "---x---x---x"),
    "in turn": (SwitchTopology((COMPLETE, 3), RING), "xxxxxxxxxxxx"),
    "in turn, each its own": (SwitchTopology((COMPLETE.every(2), 5), (RING, 2), IDLE.every(3)), "-x-x-xx--x--"),
    "in turn, every second": (SwitchTopology((COMPLETE, 3), RING).every(2), "-x--x-x-x-x-"),
    "by name, every second": (NAMED.every(2), "-x--x-x-x-x-"),
    "mixes counted": (EveryTopology(SwitchTopology((COMPLETE, 2), RING.every(2)), 2), "-x-x---x---x"),
}


@pytest.mark.parametrize("name", MIXES)
def test_rounds_that_mix(name):
    topology, expected = MIXES[name]
    assert "".join("x" if turn_of(topology, t).mixes else "-" for t in range(12)) == expected
    with pytest.raises(ValueError, match="round must be"):
        turn_of(topology, -1)


# -- buckets ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("megabytes", [25, MANY])
def test_gossip_makes_its_buckets_at_the_call(megabytes):
    model = net()
    replica = gossip(model, SGD(model.parameters()), bucket_size_in_mb=megabytes, transport=InProcessTransport())
    buckets = replica.engine.buckets
    assert (len(buckets) > 1) is (megabytes < 25)
    assert [name for bucket in buckets for name in bucket.buffer.names] == [name for name, _ in model.named_parameters()][::-1]
    replica.close()


def trained(at: Any, driver: str, model: nn.Module, **options: Any) -> Driven:
    """After three rounds: with ``overlap`` the last one is in flight."""
    options = {"topology": "ring", "bucket_size_in_mb": MANY, **options}
    if driver == "wrapper":
        options["sync_buffer_in_global_avg"] = True
    return Driven(driver, model, at, **options).steps(0, 1, 2)


# -- the life of a replica -------------------------------------------------------------------------------------------------


class FailingListener(Listener):
    """Fails if its name is in capitals."""

    def __init__(self, called: list[str], name: str) -> None:
        self.called, self.name = called, name

    def closing(self) -> None:
        self.called.append(self.name)
        if self.name.isupper():
            raise KeyError(self.name)


def closed(transport: Any, driver: str) -> str:
    model, called = net(), list[str]()
    driven = trained(transport, driver, model)
    replica, before, buckets = driven.replica, values(model), driven.replica.engine.buckets
    assert all(bucket.in_flight is not None for bucket in buckets)
    if transport.rank == 0:
        replica.listeners += [FailingListener(called, name) for name in "aBCd"]
        with pytest.raises(KeyError):
            driven.user.close()
    driven.user.close()
    assert replica.life.closed
    assert [bucket.in_flight for bucket in buckets] == [None] * len(buckets)
    assert_same(model, before)
    return "".join(sorted(called))


@DRIVERS
def test_a_failing_listener_does_not_prevent_the_others_from_being_called(driver):
    """The exchange in flight is finished and dropped all the same."""
    assert run_replicas(2, lambda transport: closed(transport, driver)) == ["BCad", ""]


def loaded_inside(transport: Any, driver: str, names: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    driven = trained(transport, driver, model)
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    new = {name: torch.full_like(own[name], 3.0 + transport.rank) for name in names}
    with driven.user.averaged():
        model.load_state_dict(new, strict=False)
    now = model.state_dict()
    changed = [name for name, value in {**own, **new}.items() if not torch.equal(now[name], value)]
    assert changed == [], f"loaded: {names}"
    driven.user.close()


LOADED = {"a parameter": ["2.bias"], "a buffer": ["1.running_mean"], "both": ["1.weight", "1.running_var"]}


@DRIVERS
@pytest.mark.parametrize("what", LOADED)
def test_a_load_of_some_tensors_inside_averaged(what, driver):
    """They keep what was loaded, and all others have their own values back."""
    run_replicas(2, lambda transport: loaded_inside(transport, driver, LOADED[what]))


# -- construction ----------------------------------------------------------------------------------------------------------


class Unhookable(torch.optim.SGD):
    """Passes for an optimizer until a hook is registered on its step."""

    refuses = True

    def register_step_post_hook(self, hook: Any) -> Any:
        if self.refuses:
            raise RuntimeError("no hooks here")
        return super().register_step_post_hook(hook)


def resources() -> tuple[int, int]:
    """Threads and open files of this process, those that only wait for the collector aside."""
    gc.collect()
    return len(threading.enumerate()), len(os.listdir("/proc/self/fd"))


def failed(rank: int, n: int) -> Any:
    """The errors of the failed calls, and the threads and files before and after them."""

    def attempt(optimizer: Any) -> Exception | None:
        try:
            gossip(model, optimizer, topology="ring").close()
        except (TypeError, RuntimeError) as error:
            return error
        return None

    gc.freeze()  # what is there already need not be looked at again and again
    model = net()
    bad = Unhookable(model.parameters(), lr=0.1)
    bad.refuses = False
    said = [str(attempt(bad))]  # makes objects that exist once per process
    before, bad.refuses = resources(), rank == 1
    said += [str(attempt("no optimizer" if rank == 1 else bad)) for _ in range(2)]
    error = attempt(bad)  # references the half-made replica
    deadline = time.monotonic() + 5
    while any(now > then for now, then in zip(resources(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [*said, str(error)], before, resources()


def test_a_call_that_fails_gives_its_threads_and_sockets_back(workers):
    """Before the workers have agreed, where all fail, and after it, where one is alone."""
    for rank, (said, before, after) in enumerate(workers(2, failed)):
        assert [said[0], said[3]] == ["None", "no hooks here" if rank == 1 else "None"]
        assert all("optimizer must be" in text for text in said[1:3])
        assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)


def warned(rank: int, n: int) -> list[list[str]]:
    """The log of several constructions."""
    heard = Heard()
    topologies: list[dict[str, Any]] = [{"topology": "ring"}, {"topology": CompleteTopology()}, {}, {}]
    found = []
    for options in topologies:
        DecentralizedDataParallel(net(), SGD, **options).close()
        found.append(heard.texts)
        heard.lines.clear()
    return found


def test_the_default_topology_is_warned_of_once(workers):
    """By the first worker, where it is not the only choice; none that is given is warned of."""
    first, *others = workers(3, warned)
    [message] = first[2]
    assert message.startswith("topology='complete' exchanges with all workers in every update")
    assert "topology='base-2'" in message
    assert first == [[], [], [message], []]
    assert others == [[[]] * 4] * 2
    assert workers(2, warned) == [[[]] * 4] * 2


def test_a_process_that_joins_leaves_out_the_rounds_before_its_first_one():
    """Its donor may have been in a later round than that in which its epoch begins. Who meets it there must not wait."""
    told: list[Any] = []
    engine = Engine.__new__(Engine)
    engine._peers = SimpleNamespace(skip=lambda edge, exchange_id: told.append((edge.ranks, exchange_id)))  # type: ignore[assignment]
    engine.buckets = [SimpleNamespace(number=number) for number in (4, 5)]  # type: ignore[misc]
    enter(engine, 60, (3, 0, 2))
    assert engine.round == 60
    assert told == [([0, 2, 3], ExchangeId(59, 4)), ([0, 2, 3], ExchangeId(59, 5))]
