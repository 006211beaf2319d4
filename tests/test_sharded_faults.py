"""Sharded replicas where faults are tolerated: a replica lives, dies and joins as a whole."""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import decent_dp
from decent_dp.checkpoint import exporting
from decent_dp.errors import NonFiniteError, PeerLostError, PeerTimeoutError
from decent_dp.membership import MembershipMonitor
from decent_dp.replica import state_receiver
from decent_dp.replica.mates import Mates
from decent_dp.transport import Replicas, Seen
from decent_dp.transport.tree import Tree
from tests.helpers import assert_same
from tests.members import DEAD_AFTER, die_in, the_store
from tests.sharded_cases import Odd, inputs, needs_shards, shard, values
from tests.workers import _store, hear, say

pytestmark = needs_shards

# Three replicas of two workers each; workers 2 and 3 are the second one, and two more processes take their place.
REPLICAS, SHARDS = 3, 2
N = REPLICAS * SHARDS
VICTIMS = (2, 3)
PAUSE = 0.02


class Part:
    """One worker's part of a replica. The processes after the first ``N`` join."""

    def __init__(
        self,
        rank: int,
        n: int,
        kind: str = "sharded",
        *,
        shards: int = SHARDS,
        buffers: bool = True,
        joining_as: Any = VICTIMS,
        **options: Any,
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self.rank, self.joins = rank, rank >= N
        if kind == "sharded":
            names = ("replica", "shard")
            meshes = [DeviceMesh("cpu", torch.arange(N).view(-1, shards), mesh_dim_names=names)]
            if n > N:
                meshes.append(DeviceMesh("cpu", torch.arange(N, n).view(1, shards), mesh_dim_names=names))
            mesh = meshes[self.joins]
        else:
            options = {"replica": "node", "local_world_size": shards, **options}
        groups = [dist.new_group(range(first, last)) for first, last in ((0, N), (N, n)) if first < last]
        self.shards, self.position = shards, rank % shards
        options = {"faults": decent_dp.Tolerate(dead_after=DEAD_AFTER), **options}
        if self.joins:
            hear("dead")
            self.rank = joining_as[rank - N]
            options["transport"] = decent_dp.join(the_store(), rank=self.rank)
        if kind == "node" or not self.joins:
            options["process_group"] = groups[self.joins]
        self.number = self.rank // shards
        model = Odd(0 if rank < N else 17)
        if not buffers:
            del model.shift
        self.model: nn.Module = shard(model, mesh["shard"]) if kind == "sharded" else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.8)
        self.scaler = options.get("scaler")
        self.gossip = decent_dp.gossip(self.model, self.optimizer, **options)
        self.rosters: list[tuple[int, int]] = []
        self.gossip.on_roster(lambda old, new: self.rosters.append((self.steps, new.epoch)))
        self.steps = 0

    def step(self, factor: float = 1.0) -> None:
        x, y = (part.chunk(self.shards)[self.position] for part in inputs(self.steps, self.number))
        self.optimizer.zero_grad()
        loss: Tensor = (self.model(x) - y).square().mean() * factor
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.steps += 1

    def train(self, done: Callable[[], bool]) -> float:
        """Steps until ``done``, which all workers of a replica are to find after the same step. Returns the seconds of the
        longest one."""
        longest, deadline = 0.0, time.monotonic() + 90
        while not done():
            assert time.monotonic() < deadline
            time.sleep(PAUSE)
            began = time.monotonic()
            self.step()
            longest = max(longest, time.monotonic() - began)
        return longest

    def end(self) -> dict[str, Tensor]:
        with self.gossip.averaged():
            mean = values(self.model)
        self.gossip.close()
        return mean


def loses_some(rank: int, n: int, kind: str, how: str, path: str) -> Any:
    """Workers of the second replica are lost: one is killed, or both, or one is stopped for good."""
    part = Part(rank, n, kind)
    if not part.joins:
        part.train(lambda: part.gossip.stats().rounds >= 20)
    if rank == VICTIMS[1] or (rank == VICTIMS[0] and how == "node"):
        _store().set("pid", str(os.getpid()))
        if how != "freeze":
            say("dead")
        os.kill(os.getpid(), signal.SIGSTOP if how == "freeze" else signal.SIGKILL)
    if rank == VICTIMS[0] and how == "freeze":
        os.dup2(os.open(f"{path}/stderr", os.O_CREAT | os.O_WRONLY), 2)

    def is_without() -> bool:
        return part.gossip.roster.epoch > 0

    if how == "freeze" and not part.joins:
        part.train(is_without)
        say("dead")
    longest = part.train(lambda: is_whole(part))
    if how == "freeze" and rank == 0:
        os.kill(int(_store().get("pid")), signal.SIGCONT)
    folder = f"{path}/checkpoints"
    saved = decent_dp.save(part.gossip, folder, wait=True)
    before = values(part.model)
    part.train(lambda: part.gossip.stats().rounds >= part.gossip.roster.start + 40)
    assert decent_dp.load(part.gossip, folder) is not None
    assert_same(values(part.model), before)
    distance, stats = part.gossip.consensus_distance(), part.gossip.stats()
    return part.gossip.gather(part.steps), part.gossip.roster, part.rosters, longest, saved.error, distance, stats, part.end()


def is_whole(part: Part) -> bool:
    """Whether all three replicas mix again: the epoch after a death may have the new processes already. Rounds are the same on
    all workers of a replica, and so are its rosters."""
    roster = part.gossip.roster
    return roster.epoch > 0 and roster.size == REPLICAS and part.gossip.stats().rounds >= roster.start + 30


@pytest.mark.parametrize("kind", ["sharded", "node"])
@pytest.mark.parametrize("how", ["kill", *(pytest.param(how, marks=pytest.mark.slow) for how in ("node", "freeze"))])
def test_a_replica_that_loses_a_worker_ends_and_joins_again(workers, tmp_path, kind, how):
    outcomes = workers.outcomes(N + SHARDS, loses_some, kind, how, str(tmp_path))
    if how == "freeze":  # its other worker waits in a collective that cannot be left
        assert outcomes[2].exitcode == 1
        assert "PeerLostError: worker 3 has ended, or cannot be heard" in (tmp_path / "stderr").read_text()
        assert (outcomes[3].error, "worker 2 has ended" in outcomes[3].message) == ("PeerLostError", True), outcomes[3]
    else:
        assert outcomes[3].exitcode == -signal.SIGKILL
    if how == "kill":
        assert (outcomes[2].error, "worker 3 has ended" in outcomes[2].message) == ("PeerLostError", True), outcomes[2]
    living = [0, 1, 4, 5, 6, 7]
    assert [outcomes[i].trace for i in living] == [""] * 6
    found = {VICTIMS[i - N] if i >= N else i: outcomes[i].value for i in living}
    for rank, (steps, roster, rosters, longest, error, distance, stats, mean) in found.items():
        assert sorted(map(int, steps)) == list(range(N))
        assert (roster.seat, roster.members, error) == (rank // SHARDS, (0, 1, 2), None)
        assert_same(mean, found[0][-1])
        assert distance == found[0][5] < 1.0
        # The workers of a replica come to a roster after the same step.
        assert rosters == found[rank ^ 1][2]
        assert stats.exchanges > 10
        if rank not in VICTIMS:
            assert longest < 0.4 * DEAD_AFTER + 1


def is_late_and_spoilt(rank: int, n: int, kind: str) -> Any:
    """A worker of the second replica is late for a while, and later its replica has a loss that is not finite."""
    part = Part(rank, n, kind)
    seen, spoilt = [], False
    while part.gossip.stats().rounds < 160:
        time.sleep(3.0 if (rank, part.steps) == (VICTIMS[1], 20) else PAUSE)
        rounds = part.gossip.stats().rounds
        spoils = part.number == 1 and rounds >= 100 and not spoilt
        spoilt |= spoils
        part.step(float("nan") if spoils else 1.0)
        seen.append((part.gossip.stats().rounds, part.gossip.due(10)))
    distance = part.gossip.consensus_distance()
    return seen, distance, part.gossip.stats(), part.end()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "node"])
def test_a_replica_that_was_late_goes_on_and_heals_as_a_whole(workers, kind):
    found = workers(N, is_late_and_spoilt, kind)
    for rank, (seen, distance, stats, mean) in enumerate(found):
        assert seen == found[rank ^ 1][0]
        assert distance == found[0][1] < 1.0
        assert_same(mean, found[0][-1])
        assert stats.nonfinite > 0 or rank not in VICTIMS
    assert found[2][2].updates < found[0][2].updates


def spoils_its_share(rank: int, n: int) -> Any:
    """One worker of the second node gets a NaN into its share: both heal, after the same round."""
    part, healed = Part(rank, n, "node"), []
    part.train(lambda: part.gossip.stats().rounds >= 20)
    if rank == VICTIMS[0]:

        def spoil(*_: Any) -> None:  # after the backward, which would make the gradients of both NaN
            hook.remove()
            with torch.no_grad():
                part.model.get_parameter("first.weight")[0, 0] = math.nan

        hook = part.optimizer.register_step_pre_hook(spoil)
    while part.gossip.stats().rounds < 60:
        part.step()
        healed.append(all(bool(param.isfinite().all()) for param in part.model.parameters()))
        time.sleep(PAUSE)
    return healed, part.end()


def test_a_node_heals_together(workers):
    found = workers(N, spoils_its_share)
    for rank, (healed, mean) in enumerate(found):
        assert healed[-1]
        assert healed[3:] == found[rank ^ 1][0][3:]
        assert_same(mean, found[0][1])
        assert all(healed) is (rank not in VICTIMS)


def means_without(rank: int, n: int) -> Any:
    """The mean and the distance to it: a part of the second replica is not finite, and then a worker of it dies inside."""
    part, found = Part(rank, n, buffers=False), []  # after which all workers meet in the mean of the buffers
    for how in ("nan", "death"):
        with torch.no_grad():
            for param in part.model.parameters():
                param.fill_(float("nan") if how == "nan" and rank == VICTIMS[0] else 2.0**part.number)
        if how == "death" and rank == VICTIMS[1]:
            die_in(Tree, "_sum_up", when=lambda *_: time.sleep(1.0) is None)  # the other part has its mean by then
        with part.gossip.averaged():
            mean = values(part.model)
        found.append((mean, part.gossip.consensus_distance()))
    part.gossip.close()
    return found


def test_a_mean_is_without_all_parts_of_a_replica(workers):
    outcomes = workers.outcomes(N, means_without)
    assert outcomes[3].exitcode == -signal.SIGKILL
    assert outcomes[2].error == "PeerLostError", outcomes[2]
    names = [name for name, _ in Odd().named_parameters() if name != "still"]
    for rank in (0, 1, 4, 5):
        assert outcomes[rank].error == "", outcomes[rank].trace
        for mean, distance in outcomes[rank].value:
            assert all(torch.allclose(mean[name], torch.full_like(mean[name], 2.5)) for name in names), mean
            assert distance == pytest.approx(1.5 * sum(mean[name].numel() for name in names) ** 0.5)


class Fake:
    """The other worker of a replica, and what both have agreed on."""

    def __init__(self, texts: dict[int, str]) -> None:
        self.rank, self.world_size, self.timeout, self.texts = 2, 4, 0.1, texts
        self.names: list[str] = []
        self.control, self.ranks, self.neighbours = self, (2, 3), object()
        self.plane: Any = self

    def gather(self, value: Any) -> None:
        self.ranks = (2, 3)

    def agree(self, name: str, text: str, among: Any) -> Future[Any]:
        self.names.append(name)
        found: Future[Any] = Future()
        if self.texts:
            found.set_result({self.rank: text, **self.texts})
        return found

    def missing(self, name: str) -> list[int]:
        return [3]


def make_mates(texts: dict[int, str]) -> tuple[Mates, Any]:
    neighbours = SimpleNamespace(look=Seen, fail=lambda error: None)
    transport: Any = Fake(texts)
    monitor: Any = make_monitor(transport, neighbours, ((0, 1), (2, 3)))
    monitor.epochs = SimpleNamespace(own=SimpleNamespace(number=7), limit=math.inf, keeper=SimpleNamespace(stop=lambda: None))
    return Mates(transport, monitor), monitor


def make_monitor(transport: Any, neighbours: Any, workers: tuple[tuple[int, ...], ...]) -> MembershipMonitor:
    return MembershipMonitor(transport, neighbours, decent_dp.Tolerate(), Replicas(workers), None)


def test_the_workers_of_a_replica_agree_on_a_round_and_on_an_epoch():
    mates, monitor = make_mates({3: "[12, 4, -6]"})
    # The round in which one of them has to go on, and the last one in which one of them was not finite.
    assert (mates.agree_on(10, -1), mates.nonfinite_in) == (12, 4)
    assert monitor.epochs.limit == 6  # the epoch that both know
    mates, monitor = make_mates({3: "[9, -1, -8]"})
    assert (mates.agree_on(10, 5), mates.nonfinite_in, monitor.epochs.limit) == (10, 5, 7)
    assert mates.agree_on(11, -1, alone=True) == 11  # at the end of `join`, where it is each worker's own
    assert mates.nonfinite_in == -1
    assert monitor.epochs.limit == math.inf


def test_a_worker_that_has_lost_its_replica_promises_nothing_more():
    """Its process may stay for a while, and new ones take the place of the replica."""
    mates, monitor = make_mates({})
    stopped: list[bool] = []
    monitor.epochs.keeper.stop = lambda: stopped.append(True)
    mates._lose([3])
    assert stopped == [True]


def test_the_workers_of_a_replica_are_all_connected():
    """In agreements each meets the first one only."""
    transport: Any = Fake({})
    connected: list[int] = []
    transport.plane = SimpleNamespace(connect=connected.append)
    neighbours = SimpleNamespace(look=Seen, fail=lambda error: None)
    mates = Mates(transport, make_monitor(transport, neighbours, ((0, 1, 5), (2, 3, 4))))
    mates.start(0)
    mates.close()
    assert sorted(connected) == [3, 4]


def test_a_call_waits_for_whole_replicas():
    """Worker 3 is not heard by the others; by worker 2, perhaps, it is."""
    mates, _ = make_mates({})
    control: Any = mates._transport.control
    control.ranks = (0, 2, 3)
    mates.wait_for_whole_replicas()  # the others of the first replica end
    assert control.ranks == (2, 3)
    control.ranks, control.gather = (0, 2, 3), lambda value: time.sleep(0.01)
    with pytest.raises(PeerTimeoutError, match="of which others are gone, and they have not ended within 0"):
        mates.wait_for_whole_replicas()
    control.ranks = (0, 1, 2)
    with pytest.raises(PeerLostError, match="worker 3 has ended, or cannot be heard, and worker 2 is of the same replica"):
        mates.wait_for_whole_replicas()


def test_a_worker_of_a_replica_that_does_not_come_is_an_error():
    mates, _ = make_mates({})
    with pytest.raises(PeerTimeoutError, match="worker 3 did not come to a round of its replica"):
        mates.agree_on(0, -1)
    mates, monitor = make_mates({})
    monitor.neighbours.look = lambda: Seen(lost=frozenset([0, 3]))
    with pytest.raises(PeerLostError, match="worker 3 has ended"), mates.explaining():
        raise RuntimeError("Connection closed by peer")
    mates, monitor = make_mates({})
    monitor.neighbours.look = lambda: Seen(lost=frozenset([3]), left=frozenset([3]))
    assert mates._look()  # it has done its part
    with pytest.raises(PeerLostError, match="worker 3 has ended"), mates.explaining():
        raise RuntimeError("Connection closed by peer")


def test_an_error_that_says_what_has_happened_stays_as_it_is():
    mates, monitor = make_mates({})
    monitor.neighbours.look = lambda: Seen(lost=frozenset([3]))
    with pytest.raises(NonFiniteError, match="the cause"), mates.explaining():
        raise NonFiniteError("the cause")
    began, alone = time.monotonic(), Mates(mates._transport, make_monitor(mates._transport, None, ((0,), (1,), (2,))))
    with pytest.raises(RuntimeError, match="the cause"), alone.explaining():
        raise RuntimeError("the cause")
    assert time.monotonic() - began < 0.5


def test_a_process_is_ended_only_where_torch_waits():
    mates, _ = make_mates({})
    assert mates._patience(sys._getframe()) == math.inf
    found: dict[str, Any] = {"sys": sys}
    exec(compile("frame = sys._getframe()", os.sep.join(("", "torch", "distributed", "x.py")), "exec"), found)
    assert mates._patience(found["frame"]) < 5


def exports(rank: int, n: int, path: str) -> Any:
    """Worker 0 dies while it writes the file: another replica writes it."""
    part = Part(rank, n)
    part.train(lambda: part.gossip.stats().rounds >= 5)
    if rank == 0:
        die_in(exporting, "_write", when=lambda *_: time.sleep(1.0) is None)
    decent_dp.checkpoint.export(part.gossip, path)
    with part.gossip.averaged():
        mean = values(part.model)
    part.gossip.close()
    return mean


@pytest.mark.slow
def test_a_model_is_exported_by_a_whole_replica(workers, tmp_path):
    outcomes = workers.outcomes(N, exports, str(tmp_path / "model.pt"))
    assert outcomes[0].exitcode == -signal.SIGKILL
    assert outcomes[1].error == "PeerLostError", outcomes[1]
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    for rank in (2, 3, 4, 5):
        assert outcomes[rank].error == "", outcomes[rank].trace
        assert saved.keys() == outcomes[rank].value.keys()


def grows(rank: int, n: int) -> Any:
    """A fourth replica comes. Its workers ask different members first, whose scalers differ."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank // SHARDS), growth_interval=10**6)
    if rank >= N:
        state_receiver.random = SimpleNamespace(  # type: ignore[assignment]
            choice=random.choice, sample=lambda others, count: sorted(others, reverse=bool(rank % 2))
        )
    faults = decent_dp.Tolerate(dead_after=DEAD_AFTER, max_workers=N + SHARDS)
    part = Part(rank, n, faults=faults, scaler=scaler, joining_as=(N, N + 1))
    begins_with = scaler.get_scale()
    if rank == 0:
        say("dead")

    def is_larger() -> bool:
        roster = part.gossip.roster
        return roster.size == REPLICAS + 1 and part.gossip.stats().rounds >= roster.start + 20

    part.train(is_larger)
    return begins_with, part.gossip.stats().updates, part.end()


@pytest.mark.slow
def test_a_run_grows_by_a_whole_replica(workers):
    found = workers(N + SHARDS, grows)
    for begins_with, updates, mean in found:
        assert_same(mean, found[0][-1])
        assert begins_with in (256.0, 512.0, 1024.0)
        assert updates > 20
    assert found[N][:2] == found[N + 1][:2]


GROWING = decent_dp.Tolerate(dead_after=DEAD_AFTER, max_workers=N + 2 * SHARDS)


def grows_by_two_nodes(rank: int, n: int) -> Any:
    """Two nodes come, whose processes were started together. One that has not what the run has is refused before."""
    refused = []
    for own, wrong in ((rank, {"replica": "worker"}), (rank, {"inner": True}), (rank ^ 1, {})) if rank >= N else ():
        hear("dead")
        refused.append(refusal_of(own, wrong))
    part = Part(rank, n, "node", faults=GROWING, joining_as=range(N, n))
    if rank == 0:
        say("dead")
    part.train(lambda: part.gossip.roster.size == REPLICAS + 2 and part.gossip.stats().rounds >= part.gossip.roster.start + 20)
    return refused, part.gossip.agreed.replicas.workers_of(part.number), part.end()


def refusal_of(rank: int, wrong: dict[str, Any]) -> str:
    from torch.nn.parallel import DistributedDataParallel

    model: nn.Module = Odd(0)
    group = dist.new_group(range(N, N + 2 * SHARDS), use_local_synchronization=True)
    options = {"replica": "node", "local_world_size": SHARDS, "process_group": group, **wrong}
    options["transport"] = decent_dp.join(the_store(), rank=rank)
    if options.pop("inner", False):
        own = [6, 7] if rank < 8 else [8, 9]
        group = dist.new_group(own, use_local_synchronization=True)
        model = DistributedDataParallel(model, process_group=group)
    with pytest.raises(ValueError, match="run") as caught:
        decent_dp.gossip(model, torch.optim.SGD(model.parameters(), 0.02, 0.8), faults=GROWING, **options)
    return str(caught.value)


@pytest.mark.slow
def test_a_run_grows_by_nodes_that_are_started_together(workers):
    found = workers(N + 2 * SHARDS, grows_by_two_nodes)
    for rank, (refused, workers_of, mean) in enumerate(found):
        assert_same(mean, found[0][-1])
        assert workers_of == (rank // 2 * 2, rank // 2 * 2 + 1)
        if rank >= N:
            assert "a replica of this run has 2 workers, and this process would be one of 1" in refused[0]
            assert "pass the model without it" in refused[1]
            assert "have the ranks [7, 6, 9, 8] in the run" in refused[2]


def has_uneven_batches(rank: int, n: int) -> Any:
    part = Part(rank, n, "node")
    with part.gossip.join():
        for _ in range(15 + 3 * part.position + 4 * part.number):
            part.step()
            time.sleep(PAUSE)
    rounds = part.gossip.stats().rounds
    return rounds, part.gossip.stats().holes, values(part.model), part.end()


@pytest.mark.slow
def test_uneven_inputs_inside_a_node_where_faults_are_tolerated(workers):
    found = workers(N, has_uneven_batches)
    for rank, (rounds, holes, own, mean) in enumerate(found):
        assert (rounds, holes) == (15 + 3 + 4 * 2, 0)
        assert_same(own, found[rank ^ 1][2])
        assert_same(mean, found[0][3])
