"""Numbers of workers, topologies, and workers that differ, run out of batches or die."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from decent_dp import gossip
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import DisagreementError, OutOfStepError, PeerLostError, PeerTimeoutError
from decent_dp.topo import Edge, RingTopology, Topology, TopologyReg
from decent_dp.transport import run_replicas
from tests.helpers import SGD, alone, assert_same, batch, errors_of, listening, loss, net, values
from tests.workers import PRELOADED, hear, say, shorten

NAMES = ["complete", "ring", "one-peer-exp", "alternating-exp-ring"]


def waits_for_nobody(rank: int, n: int) -> None:
    if rank == 1:
        hear("nothing")


def test_a_worker_that_hangs_is_named_with_where_it_stands(workers):
    with pytest.raises(AssertionError, match=r"(?s)workers \[1\] still ran after 3 s.*waits_for_nobody"):
        workers(2, waits_for_nobody, timeout=3)


# -- every number of workers -------------------------------------------------------------------------------------------


def every_topology(transport: Any) -> Any:
    found, rank, n = {}, transport.rank, transport.world_size
    for name in NAMES:
        for local in sorted({1, 2, n}):
            try:
                model = DecentralizedDataParallel(net(rank), SGD, topology=name, _local_world_size=local, transport=transport)
            except ValueError as error:
                found[name, local] = str(error)
                continue
            for t in range(4):
                loss(model, t, rank).backward()
            with model.averaged():
                found[name, local] = (values(model), model.consensus_distance())
            model.close()
    return found


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6, 8))])
def test_every_topology_runs_or_refuses(n):
    results = run_replicas(n, every_topology)
    for key in results[0]:
        name, local = key
        power = n & (n - 1) == 0
        nodes = n // local
        fits = {
            "complete": True,
            "ring": True,
            "one-peer-exp": power,
            "alternating-exp-ring": n % local == 0 and nodes & (nodes - 1) == 0,
        }[name]
        for found in results:
            if fits:
                assert found[key][1] < 1e-6
                assert_same(found[key][0], results[0][key][0])
            else:
                assert found[key] == results[0][key]
                assert "'base-2' and 'ring' fit" in found[key], found[key]


# -- custom topologies -------------------------------------------------------------------------------------------------


class Idle(Topology):
    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge([i], 1.0) for i in range(self._world_size)]]


class Seeded(Topology):
    """Without a period: a fresh matching each round, of unequal weight."""

    def round(self, t: int) -> list[Edge]:
        generator = torch.Generator().manual_seed(t)
        order = torch.randperm(self._world_size, generator=generator).tolist()
        weight = 0.3 + 0.1 * (t % 5)
        edges = [Edge(order[i : i + 2], weight) for i in range(0, len(order) - 1, 2)]
        return edges + ([Edge([order[-1]], 1.0)] if len(order) % 2 else [])


def custom_topologies(rank: int, n: int) -> Any:
    TopologyReg.register("seeded")(Seeded)
    TopologyReg.registry["idle"] = Idle
    found = []
    for topology in ("idle", "seeded", Seeded()):
        model = DecentralizedDataParallel(net(), SGD, topology=topology)
        twin = net()
        optimizer = SGD(list(twin.named_parameters()))
        for t in range(5):
            loss(model, t, rank).backward()
            loss(twin, t, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        if topology == "idle":
            assert_same(model, twin)
            assert model.stats().bytes_sent == 0
        found.append((model.stats().bytes_sent, model.consensus_distance(), model.stats().rounds))
        model.close()
    return found


def test_custom_and_idle_topologies(workers):
    results = workers(3, custom_topologies)
    for idle, named, instance in results:
        assert idle[1] > named[1] > 0
        assert named[1:] == instance[1:]
        assert named[2] == 5
    assert sum(found[1][0] for found in results) > 0


class Hooked(torch.optim.SGD):
    """Records its arguments before each mix."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls: list[Any] = []

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        self.calls.append((list(edge.ranks), weight, [p.comm_buffer.clone() for p in params]))
        assert all(p.comm_buffer.shape == p.shape for p in params)


class Sometimes(Topology):
    def _get_topo_edges(self) -> list[list[Edge]]:
        return [[Edge([0, 1], 0.75), Edge([2], 1.0)], [Edge([0, 1, 2], 0.5)]]


def pre_average_hooks(transport: Any) -> Any:
    topology = Sometimes(world_size=3, rank=transport.rank)
    model = DecentralizedDataParallel(
        net(), lambda p: Hooked(p), topology=topology, bucket_size_in_mb=1e-6, transport=transport
    )
    sent = []
    for t in range(4):
        loss(model, t, transport.rank).backward()
        sent.append(values(model))
        if t == 0:
            assert all(not optimizer.calls for optimizer in model.optimizers)
    assert not any(hasattr(p, "comm_buffer") for p in model.parameters())
    return sent, [(optimizer.param_groups[0]["param_names"], optimizer.calls) for optimizer in model.optimizers]


def test_pre_average_hook():
    results = run_replicas(3, pre_average_hooks)
    for rank, (_, hooks) in enumerate(results):
        for (name,), calls in hooks:
            edges = [(t, [0, 1] if t % 2 == 0 else [0, 1, 2]) for t in range(3)]
            due = [(t, ranks) for t, ranks in edges if rank in ranks]
            assert [ranks for ranks, *_ in calls] == [ranks for _, ranks in due]
            for (t, ranks), (_, weight, (buffer,)) in zip(due, calls, strict=True):
                assert weight == (0.75 if len(ranks) == 2 else 0.5)
                others = [results[j][0][t][name] for j in ranks if j != rank]
                expected = sum((1 - weight) / (len(ranks) - 1) * q for q in others)
                torch.testing.assert_close(buffer, expected, rtol=1e-5, atol=1e-6)


# -- errors on all workers with the same text -------------------------------------------------------------------------


def edges_topology(rounds: Any) -> Any:
    class Made(Topology):
        def _get_topo_edges(self) -> list[list[Edge]]:
            return [[Edge(list(ranks), weight) for ranks, weight in edges] for edges in rounds]

    return lambda local: Made(local)


class Different(nn.Module):
    def __init__(self, **changes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = changes.get("width", 6)
        self.first = nn.Linear(6, width)
        if "extra" in changes:
            self.between = nn.Linear(6, 6)
        setattr(self, changes.get("name", "last"), nn.Linear(width, 3).to(changes.get("dtype", torch.float32)))
        if "buffer" in changes:
            self.register_buffer("b", torch.zeros(2))
        if "frozen" in changes:
            self.first.requires_grad_(False)
        if "strides" in changes:
            self.first.weight = nn.Parameter(self.first.weight.detach().t().contiguous().t())


def model_of(**changes: Any) -> Any:
    return lambda rank: {"model": Different(**changes) if rank == 1 else Different()}


def both(**arguments: Any) -> Any:
    return lambda rank: arguments


def one(**arguments: Any) -> Any:
    return lambda rank: arguments if rank == 1 else {}


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "rank twice": (both(topology=edges_topology([[([0, 1], 0.5), ([1, 2], 0.5)]])), ValueError, "1"),
    "rank missing": (both(topology=edges_topology([[([0, 1], 0.5)]])), ValueError, "2"),
    "rank out of range": (both(topology=edges_topology([[([0, 1], 0.5), ([2, 7], 0.5)]])), ValueError, "7"),
    "weight": (both(topology=edges_topology([[([0, 1], 1.5), ([2], 1.0)]])), ValueError, "1.5"),
    "another weight": (
        lambda rank: {"topology": edges_topology([[([0, 1], 0.5 + 0.1 * (rank == 1)), ([2], 1.0)]])},
        ValueError,
        "rounds",
    ),
    "unfit": (both(topology="one-peer-exp"), ValueError, "'base-2' and 'ring' fit"),
    "no topology": (both(topology=3), TypeError, "3"),
    "another width": (model_of(width=5), ValueError, r"'first.weight' \(6, 6\).*\(5, 6\)"),
    "a layer more": (model_of(extra=True), ValueError, "'between.weight'"),
    "a layer less": (
        lambda rank: {"model": Different() if rank == 1 else Different(extra=True)},
        ValueError,
        r"'between.weight'.*'last.weight'",
    ),
    "a buffer more at the end": (model_of(buffer=True), ValueError, "none.*buffer 'b'"),
    "another dtype": (model_of(dtype=torch.float64), ValueError, "'last.weight'.*float32.*float64"),
    "another name": (model_of(name="final"), ValueError, "'last.weight'.*'final.weight'"),
    "other strides": (model_of(strides=True), ValueError, "strides"),
    "bucket size text": (both(bucket_size_in_mb="25"), TypeError, "'25'"),
    "bucket size nan": (both(bucket_size_in_mb=float("nan")), ValueError, "nan"),
    "bucket size on one": (one(bucket_size_in_mb=1), ValueError, "bucket_size_in_mb is 25.0 on worker 0 and 1.0 on worker 1"),
    "overlap": (both(overlap="no"), TypeError, "overlap must be True or False, got 'no'"),
    "clip norm": (both(grad_clip_norm=-1.0), ValueError, "grad_clip_norm.*-1.0"),
    "nothing trains on one": (one(model=nn.Linear(2, 2).requires_grad_(False)), ValueError, "worker 1.*no trainable"),
    "no module": (both(model=3), TypeError, "torch.nn.Module"),
    "optim_fn": (both(optim_fn=None), TypeError, "optim_fn"),
    "an optimizer": (
        lambda rank: {"optim_fn": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
        TypeError,
        r"is one, SGD: .*partial\(torch.optim.SGD",
    ),
    "wrapped by DDP": (lambda rank: {"model": nn.parallel.DistributedDataParallel(nn.Linear(2, 2))}, TypeError, r"\.module"),
    "scheduler_fn": (both(lr_scheduler_fn=3), TypeError, "lr_scheduler_fn"),
    "alternating": (both(topology="alternating-exp-ring", _local_world_size=2), ValueError, "'base-2' and 'ring' fit"),
    "wire": (both(wire="int8"), TypeError, "wire is now called compression"),
    "device_ids": (both(device_ids=[0]), TypeError, "device_ids.*PyTorch DDP.*leave it out"),
    "find_unused_parameters": (both(find_unused_parameters=True), TypeError, "unused at any time"),
    "bucket_cap_mb": (both(bucket_cap_mb=3), TypeError, "bucket_size_in_mb"),
    "unknown keyword": (both(colour=3), TypeError, "colour"),
}


def refused(rank: int, n: int) -> Any:
    found = {}
    for name, (make, _, _) in REFUSED.items():
        arguments = {"model": Different(), "optim_fn": SGD, **make(rank)}
        topology = arguments.get("topology")
        if callable(topology):
            TopologyReg.registry["made"] = topology
            arguments["topology"] = "made"
        model = arguments["model"]
        before = values(model) if isinstance(model, nn.Module) and name != "lazy" else {}
        try:
            DecentralizedDataParallel(**arguments)
            found[name] = ("accepted", "")
        except Exception as error:
            found[name] = (type(error), str(error))
        if before:
            assert_same(model, before)
    # After all that, these workers can still train together.
    model = DecentralizedDataParallel(Different(), SGD, topology="ring")
    x, y = batch(0, rank)
    (model.module.last(model.module.first(x)) - y).square().mean().backward()
    assert model.stats().rounds == 1
    return found


def test_errors_at_construction_are_the_same_on_all_workers(workers):
    began = time.monotonic()
    results = workers(3, refused)
    assert time.monotonic() - began < 90
    for name, (_, kind, pattern) in REFUSED.items():
        found = results[0][name]
        assert found[0] != "accepted", name
        assert issubclass(found[0], kind), (name, found)
        assert re.search(pattern, found[1]), (name, found[1])
        for other in results[1:]:
            assert other[name] == found, name


class Scrambled(Topology):
    """Raises on one worker only, and later than the constructor."""

    def round(self, t: int) -> list[Edge]:
        if t == 0 and self._rank == 2:
            raise ArithmeticError("this worker cannot count")
        return [Edge(list(range(self._world_size)), 1 / self._world_size)]


def fails_on_one(transport: Any) -> str:
    try:
        DecentralizedDataParallel(net(), SGD, topology="scrambled", transport=transport)
    except RuntimeError as error:
        return str(error)
    return "accepted"


def test_a_topology_that_fails_on_one_worker():
    TopologyReg.registry["scrambled"] = Scrambled
    results = run_replicas(3, fails_on_one)
    assert set(results) == {"worker 2: ArithmeticError: this worker cannot count"}


def wrong_instance(transport: Any) -> None:
    with pytest.raises(ValueError, match="world_size=5"):
        DecentralizedDataParallel(net(), SGD, topology=RingTopology(world_size=5, rank=transport.rank), transport=transport)


def test_an_instance_made_for_other_workers():
    run_replicas(2, wrong_instance)


def other_order(transport: Any) -> Any:
    """Workers whose first backward goes through the layers in other orders, or not through all."""

    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in [[self.a, self.b, self.c], [self.c, self.a], [self.b, self.c, self.a]][transport.rank]:
                x = torch.tanh(layer(x))
            result: torch.Tensor = self.out(x)
            return result

    found = []
    for topology in ("ring", "complete"):
        model = DecentralizedDataParallel(
            Ordered(), SGD, topology=topology, overlap=False, bucket_size_in_mb=1e-6, transport=transport
        )
        for t in range(4):
            loss(model, t, transport.rank).backward()
        names = [o.param_groups[0]["param_names"] for o in model.optimizers]
        found.append((names, model.consensus_distance(), model.stats().rounds))
        model.close()
    return found


def test_another_order_of_first_use_is_no_error():
    results = run_replicas(3, other_order)
    for found in results:
        assert [names for names, *_ in found] == [names for names, *_ in results[0]]
        assert found[1][1] < 1e-6
        assert found[0][2] == found[1][2] == 4
    assert results[0][0][0][0][0].startswith("out.")  # worker 0's first gradients


# -- uneven inputs -----------------------------------------------------------------------------------------------------


def uneven(rank: int, n: int) -> Any:
    return [uneven_epochs(rank, *case) for case in JOINS]


def uneven_epochs(rank: int, batches: list[int], topology: str, overlap: bool) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology=topology, overlap=overlap, bucket_size_in_mb=1e-6)
    found = []
    for _ in range(2):
        with model.join():
            for t in range(batches[rank]):
                loss(model, t, rank).backward()
        found.append((model.consensus_distance(), model.stats().updates, model.stats().rounds))
    model.close()
    return found


# Each value occurs, and complete without overlap, where replicas end equal.
JOINS = [
    ([3, 5, 0], "complete", False),
    ([0, 0, 2], "ring", True),
    ([0, 0, 0], "complete", True),
    ([40, 3, 3], "ring", False),
]


def test_join(workers):
    for rank, results in enumerate(workers(3, uneven)):
        for (batches, topology, overlap), found in zip(JOINS, results, strict=True):
            for epoch, (_, updates, rounds) in enumerate(found, start=1):
                assert (updates, rounds) == (epoch * batches[rank], epoch * max(batches)), (batches, topology, overlap)
            if topology == "complete" and not overlap:
                assert found[-1][0] < 1e-5, (batches, topology, overlap)


def join_with_windows(transport: Any) -> Any:
    rank = transport.rank
    model = DecentralizedDataParallel(net(), SGD, topology="ring", grad_clip_norm=1.0, transport=transport)
    with model.join():
        for i in range(6 + 2 * rank):
            model.set_accumulate_grad(i % 2 == 0)
            loss(model, i, rank).backward()
        with pytest.raises(RuntimeError, match=r"inside join\(\)"):
            model.consensus_distance()
        with pytest.raises(RuntimeError, match="inside join"), model.join():
            pass
    with contextlib.suppress(KeyError), model.join():
        raise KeyError
    return model.stats().updates, model.stats().rounds


def test_join_with_accumulation():
    assert run_replicas(2, join_with_windows) == [(3, 4), (4, 4)]


def out_of_step(rank: int, n: int) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    for t in range(3 + (rank == 0)):
        loss(model, t, rank).backward()
    calls = model.global_avg, model.consensus_distance, lambda: model.averaged().__enter__()
    return errors_of(calls, OutOfStepError, r"worker 0: 4, worker 1: 3.*need join")


def test_other_numbers_of_updates_are_named_on_all(workers):
    first, second = workers(2, out_of_step)
    assert first == second


def missing_peer(rank: int, n: int) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="complete")
    for t in range(3):
        loss(model, t, rank).backward()
    if rank == 1:
        hear("the others have failed")  # alive, with nothing more to do
        os._exit(0)
    shorten(model.replica.world, 2)
    try:
        for t in range(3):
            loss(model, t, rank).backward()
    finally:
        if rank == 0:
            say("the others have failed")


def test_a_missing_peer_is_named_within_the_timeout(workers):
    outcome = workers.outcomes(3, missing_peer)[0]
    assert outcome.error == PeerTimeoutError.__name__
    assert "worker 1" in outcome.message
    assert "join() around the loop" in outcome.message
    assert outcome.seconds < 45  # not the group's 60 s


# -- process groups ----------------------------------------------------------------------------------------------------


def groups(rank: int, n: int) -> Any:
    before = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    # The members in another order than in the world: edges speak of ranks in the group.
    group = dist.new_group([1, 3])
    found = None
    if rank in (1, 3):
        model = net(rank)
        optimizer = SGD(model.parameters())
        replica = gossip(model, optimizer, topology="ring", overlap=False, process_group=group)
        for t in range(3):
            loss(model, t, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        found = values(model), replica.consensus_distance()
    else:
        for make in (
            lambda m: DecentralizedDataParallel(m, SGD, process_group=group),
            lambda m: gossip(m, SGD(m.parameters()), process_group=group),
        ):
            with pytest.raises(ValueError, match="not a member"):
                make(net())
    after = dist.new_group([0, 1, 2, 3])
    total = torch.ones(1)
    dist.all_reduce(total, group=after)
    dist.all_reduce(total, group=before[rank // 2])
    everybody = DecentralizedDataParallel(net(), SGD, topology="complete", overlap=False)
    loss(everybody, 0, rank).backward()
    return found, float(total), everybody.consensus_distance()


def test_process_groups_beside_each_other(workers):
    results = workers(4, groups)
    assert [total for _, total, _ in results] == [8.0] * 4
    assert all(distance < 1e-6 for *_, distance in results)
    assert results[1][0][1] < 1e-6
    assert_same(results[1][0][0], results[3][0][0], 1e-6)


# -- workers that fail -------------------------------------------------------------------------------------------------


def failing(rank: int, n: int, how: str, topology: str) -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if rank == 2 and self.calls == 4:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("a bad batch in shard 17")
            result: torch.Tensor = self.body(x)
            return result

    model = DecentralizedDataParallel(Model(), SGD, topology=topology)
    for t in range(12):
        loss(model, t, rank).backward()
    model.close()


@pytest.mark.parametrize(("how", "topology"), [("kill", "complete"), pytest.param("raise", "ring", marks=pytest.mark.slow)])
def test_a_worker_that_fails_is_named(workers, how, topology):
    outcomes = workers.outcomes(4, failing, how, topology)
    assert outcomes[2].error == ("ValueError" if how == "raise" else "Gone")
    for rank in (0, 1, 3):
        outcome = outcomes[rank]
        assert outcome.error == PeerLostError.__name__, outcome
        # In a ring, worker 0 learns of it from a neighbour that quotes its own loss.
        assert "worker 2" in outcome.message or "2" in outcome.message.split("workers", 1)[-1], outcome.message
        if how == "raise":
            assert "shard 17" in outcome.message
        assert outcome.seconds < 45  # a silent one is waited for 60 s


KEPT: list[Any] = []


def raises_between(rank: int, n: int) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="complete")
    KEPT.append(model)  # as a script's, it lives until the process ends
    for t in range(9):
        if t == 5 and rank == 1:
            # The interpreter notes an error that ends a script, and then exits.
            sys.last_value = KeyError("shard 17 is missing")
            return
        loss(model, t, rank).backward()


def test_an_error_between_updates_is_quoted(workers):
    """In the loader or the loop, where the wrapper does not see it: the cause is reported at exit."""
    first, second = workers.outcomes(2, raises_between)
    assert (first.error, second.error) == (PeerLostError.__name__, "")
    assert "worker 1 is gone" in first.message
    assert "Worker 1 reported: KeyError in round 5: 'shard 17 is missing'" in first.message


def save_what_is_left(rank: int, n: int) -> Any:
    """A script whose peer is gone: it saves, closes, and passes on the first error."""
    model = DecentralizedDataParallel(net(), SGD, topology="ring", bucket_size_in_mb=1e-6)
    for t in range(3):
        loss(model, t, rank).backward()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def go_on() -> None:
        for t in range(5):
            model.set_accumulate_grad(True)
            loss(model, t, rank).backward()
            model.set_accumulate_grad(False)
            model.state_dict()  # makes the pending update, which fails

    with pytest.raises(PeerLostError, match="worker 1"):
        go_on()
    state, optimizer = model.state_dict(), model.optim_state_dict()
    with pytest.raises(RuntimeError, match=r"an update failed earlier.*worker 1"):
        loss(model, 9, rank)
    model.eval()
    with torch.no_grad():
        model(batch(0)[0])
    model.close()
    return len(state), len(optimizer["state"])


def test_after_a_failure_the_replica_can_be_saved(workers):
    outcomes = workers.outcomes(2, save_what_is_left)
    assert outcomes[0].value == (6, 6), outcomes[0]


def alone_in_a_collective(rank: int, n: int) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    loss(model, 0, rank).backward()
    model.replica.world.control.gather(None)
    if rank == 0:  # a habit of DDP's scripts
        shorten(model.replica.world, 1.5)
        with (
            pytest.raises(PeerTimeoutError, match=r"not all workers called averaged: .*`if rank == 0:` inside"),
            model.averaged(),
        ):
            pass
        say("worker 0 has failed")
        return True
    hear("worker 0 has failed")
    return True


def test_a_collective_on_one_worker_only(workers):
    outcomes = workers.outcomes(2, alone_in_a_collective)
    assert outcomes[0].value is True, outcomes[0]


class Late(Topology):
    """Without a period, and a group from round 1 on: it is connected when it is first used."""

    def round(self, t: int) -> list[Edge]:
        everybody = list(range(self._world_size))
        return [Edge(everybody, 1 / len(everybody))] if t else [Edge([rank], 1.0) for rank in everybody]


def late_group(rank: int, n: int, how: str) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology=Late())
    loss(model, 0, rank).backward()
    dist.barrier()
    if rank == 0:
        if how == "gone":
            os._exit(0)
        hear("the others have failed")
        return "slept"
    time.sleep(0.3)
    shorten(model.replica.world, 2)
    try:
        loss(model, 1, rank).backward()
        loss(model, 2, rank).backward()
    except (PeerTimeoutError, PeerLostError) as error:
        if how == "silent":  # the other one would learn of it from this worker's exit
            say(f"worker {rank} has failed")
            hear(f"worker {3 - rank} has failed")
            say("the others have failed")
        return type(error).__name__, str(error)
    return "no error"


@pytest.mark.parametrize(("how", "kind"), [("silent", "PeerTimeoutError"), ("gone", "PeerLostError")])
def test_a_group_that_cannot_be_connected_names_the_missing_workers(workers, how, kind):
    """No process listens at worker 0's address, or it does not answer."""
    found = [outcome.value for outcome in workers.outcomes(3, late_group, how)]
    for outcome in found[1:]:
        assert outcome[0] == kind, found
        assert outcome[1].startswith("worker 0 "), found
        assert "round 1, bucket 0" in outcome[1], found


def ports(rank: int, n: int) -> Any:
    found = []
    for how in ("close", "drop"):
        before = listening()
        model = DecentralizedDataParallel(net(), SGD, topology="complete")
        loss(model, 0, rank).backward()
        loss(model, 1, rank).backward()
        opened = listening() - before
        if how == "close":
            model.close()
        dist.barrier()
        if how == "drop":
            del model
        import gc

        gc.collect()
        found.append((len(opened), len(listening() - before)))
    return found


def test_no_port_is_opened_inside_a_node(workers):
    for found in workers(3, ports):
        assert found == [(0, 0)] * 2


def last_exchange(rank: int, n: int, closes: list[bool]) -> Any:
    found = []
    for topology in ("ring", "complete"):
        model = DecentralizedDataParallel(net(), SGD, topology=topology, bucket_size_in_mb=1e-6)
        for t in range(3):
            time.sleep(0.02 * rank)
            loss(model, t, rank).backward()
        if closes[rank]:
            before = values(model)
            model.close()
            model.close()
            assert_same(model.module, before)
        found.append(model)
    return values(found[0].module)


@pytest.mark.parametrize("closes", [[False, True, True], pytest.param([False] * 3, marks=pytest.mark.slow)])
def test_a_worker_that_finishes_first_breaks_no_other(workers, closes):
    assert all(workers(3, last_exchange, closes))


def closed(rank: int, n: int) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    loss(model, 0, rank).backward()
    model.close()
    model.eval()
    with torch.no_grad():
        model(batch(0)[0])
    loss(model, 1, rank).backward()  # in eval mode: gradients, and no update
    assert all(p.grad is not None for p in model.parameters())
    model.train()
    with pytest.raises(RuntimeError, match="closed"):
        loss(model, 1, rank)
    loss(model.module, 1, rank).backward()
    assert model.stats().rounds == 1
    model.module.load_state_dict(net(3).state_dict(), assign=True)  # it is an ordinary model again
    with pytest.raises(RuntimeError, match="closed"):
        model.global_avg()
    return model.state_dict()


def test_after_close(workers):
    workers(2, closed)


# -- factories, at the first update ------------------------------------------------------------------------------------


def leaves_out(params: Any) -> Any:
    return torch.optim.SGD(params[1:], lr=0.1)


def twice(params: Any) -> Any:
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": [params[0][1]]})
    return optimizer


def foreign(params: Any) -> Any:
    return torch.optim.SGD([*(p for _, p in params), nn.Parameter(torch.zeros(1))], lr=0.1)


FACTORIES: dict[str, tuple[Any, type[Exception], str]] = {
    "returns nothing": ({"optim_fn": lambda p: None}, TypeError, "optim_fn must return.*None"),
    "leaves out": ({"optim_fn": leaves_out}, ValueError, "leaves out parameter '4.weight'|leaves out parameter '4.bias'"),
    "takes twice": ({"optim_fn": twice}, ValueError, "twice"),
    "takes another": ({"optim_fn": foreign}, ValueError, "was not given"),
    "raises": ({"optim_fn": lambda p: torch.optim.SGD(p, lr=-1.0)}, ValueError, "Invalid learning rate"),
    "no scheduler": ({"lr_scheduler_fn": lambda o: None}, TypeError, "lr_scheduler_fn must return.*None"),
    "plateau": ({"lr_scheduler_fn": torch.optim.lr_scheduler.ReduceLROnPlateau}, TypeError, "ReduceLROnPlateau"),
}


def bad_factories(transport: Any) -> Any:
    """They are bad on worker 1 only."""
    rank, found = transport.rank, {}
    for name, (arguments, _, _) in FACTORIES.items():
        good = {"optim_fn": SGD}
        if "lr_scheduler_fn" in arguments:
            good["lr_scheduler_fn"] = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
        chosen = {**good, **arguments} if rank == 1 else good
        model = DecentralizedDataParallel(net(), topology="ring", transport=transport, **chosen)
        before = values(model)
        try:
            loss(model, 0, rank).backward()
            found[name] = ("accepted", "")
        except Exception as error:
            found[name] = (type(error), str(error))
        assert_same(model.module, before)
        with pytest.raises(RuntimeError, match="an update failed earlier"):
            loss(model, 1, rank).backward()
    return found


def test_bad_factories_are_refused_on_all_workers():
    results = run_replicas(2, bad_factories)
    for name, (_, kind, pattern) in FACTORIES.items():
        found = results[0][name]
        assert found == results[1][name]
        assert issubclass(found[0], kind), (name, found)
        assert re.search(pattern, found[1]), (name, found)
        assert found[1].startswith("worker 1: ")


def test_adaptive_factor_out_of_range():
    model = alone(net())
    for factor in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="adaptive factor"):
            model.set_adaptive_factor(factor)


def test_different_adaptive_factors_are_an_error_on_all():
    """Noticed at the next collective call: mixing with them would move the mean."""
    models = [net() for _ in range(3)]

    def work(transport: Any) -> list[str]:
        model = DecentralizedDataParallel(models[transport.rank], SGD, transport=transport)
        model.set_adaptive_factor(0.5)
        with model.averaged():
            pass
        model.set_adaptive_factor(1.0 if transport.rank == 1 else 0.5)
        found = []
        for call in (model.global_avg, model.consensus_distance):
            with pytest.raises(DisagreementError) as caught:
                call()
            found.append(str(caught.value))
        return found

    texts = run_replicas(3, work)
    assert texts[0] == texts[1] == texts[2]
    assert all("adaptive factor is 0.5 on worker 0 and 1.0 on worker 1" in text for text in texts[0])


def test_wrapping_twice():
    with pytest.raises(TypeError, match="already wrapped"):
        alone(alone(net()))


def loaded(rank: int, n: int) -> list[str]:
    numba = importlib.util.find_spec("numba") is not None
    return [name for name in PRELOADED if name not in sys.modules and (numba or "kernels" not in name)]


def test_workers_begin_with_what_the_fork_server_has_loaded(workers):
    """A module that sets another list when tests import it would make each worker import most of this anew."""
    assert workers(1, loaded) == [[]]
