"""A node is a replica: R nodes of L workers equal R workers that see the batches of the nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import decent_dp
from decent_dp.errors import PeerLostError
from decent_dp.optim import GossipAdamW
from decent_dp.replica.assignment import assign_replicas, why_no_node
from decent_dp.rules import MomentumTracking
from decent_dp.transport import is_of_network, run_replicas
from tests.helpers import assert_same
from tests.sharded_cases import (
    ADAMW,
    SGD,
    Case,
    Odd,
    Unsharded,
    assert_close,
    ended,
    inputs,
    made,
    scaler_of,
    step,
    train,
    values,
)
from tests.test_sharded import CASES as OF_SHARDS
from tests.test_sharded import SITUATIONS, assert_equal_to_one_worker, situation

# FSDP's own mixed precision has no counterpart here.
CASES = {
    **{name: case for name, case in OF_SHARDS.items() if not case.bf16},
    "ring": Case({"topology": "ring", "bucket_size_in_mb": 1e-4}, ADAMW),
    "low-rank": Case({"compression": "low-rank:4"}, tolerance=0.05, steps=15),
    "tracking, mix_every": Case({"mix_every": 5}, partial(GossipAdamW, lr=0.01, tracking=True)),
}


class OfNode:
    """One worker of a node."""

    def __init__(self, case: Case, workers: int, seed: int = 0) -> None:
        self.case, self.workers = case, workers
        self.replica, self.place = divmod(dist.get_rank(), workers)
        self.model = Odd(seed)
        self.optimizers, self.scaler = made(case, self.model), scaler_of(case)
        options = {"local_world_size": workers, "replica": "node", **case.options}
        self.gossip = decent_dp.gossip(self.model, self.optimizers, scaler=self.scaler, **options)

    def loss(self, t: int) -> Tensor:
        x, y = (part.chunk(self.workers)[self.place] for part in inputs(t, self.replica))
        result: Tensor = (self.model(x) - y).square().mean()
        return result

    def gradients(self, t: int, scale: float = 1.0) -> None:
        for i in range(self.case.window):
            last = i == self.case.window - 1
            with contextlib.nullcontext() if last else self.gossip.no_sync():
                (scale * self.loss(100 * i + t) / self.case.window).backward()

    def move(self) -> None:
        self.model.double().float()

    def looked_at(self, t: int) -> float:
        with torch.no_grad():
            return float(sum((self.model(x) - y).square().mean() for x, y in self.parts(t))) / self.workers

    def parts(self, t: int) -> Any:
        return zip(*(part.chunk(self.workers) for part in inputs(t, self.replica)), strict=True)


def body(rank: int, n: int, plan: list[tuple[int, int, str]]) -> list[Any]:
    # Seeds differ: all workers start from the first.
    return [train(OfNode(CASES[name], workers, seed=rank)) for _, workers, name in plan]


PLANS = [
    pytest.param(4, [(2, 2, name) for name in ("base-2", "window", "outer", "int8", "tracking, mix_every")], id="2x2, some"),
    pytest.param(6, [(3, 2, name) for name in ("ring", "tracking")], id="3x2, some"),
    pytest.param(6, [(2, 3, name) for name in CASES], id="2x3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("n", "plan"), PLANS)
def test_equal_to_replicas_of_one_worker(workers, n, plan):
    found = workers(n, body, plan)
    for number, (_, shards, _) in enumerate(assert_equal_to_one_worker(found, plan, CASES)):
        for rank, own in enumerate(found):
            assert_same(own[number]["own"], found[rank - rank % shards][number]["own"])


def described(hosts: str, on_node: int = 2, of: str = "auto") -> list[Any]:
    return [{"rank": rank, "of": of, "on_node": on_node, "host": host} for rank, host in enumerate(hosts)]


def test_machines_tell_nodes_apart(caplog):
    """A launcher may deal ranks in turns."""
    assert assign_replicas(described("abab")).workers == ((0, 2), (1, 3))
    assert assign_replicas(described("aabb")).workers == ((0, 1), (2, 3))
    assert assign_replicas(described("aaab")).workers == ((0,), (1,), (2,), (3,))
    assert "the workers [0, 1, 2] are on one machine" in caplog.text
    with pytest.raises(ValueError, match=r"with local_world_size=4, the workers \[0, 1\] are on one machine"):
        assign_replicas(described("aabb", 4, "node"), 1)


def in_situations(rank: int, n: int) -> list[Any]:
    return [situation(OfNode(case, 2), name) for name, (case, _) in SITUATIONS.items()]


def test_situations(workers):
    found = workers(4, in_situations)
    for number, (name, (case, _)) in enumerate(SITUATIONS.items()):
        wanted = run_replicas(2, lambda transport, case=case, name=name: situation(Unsharded(case, transport, 2), name))
        for rank in range(4):
            assert_close(found[rank][number], wanted[rank // 2], case.tolerance, f"{name}, worker {rank}")


UNEVEN = {
    # Batches of each worker: of the first node, of the second.
    "momentum": (Case({"topology": "complete"}), [(5, 3), (2, 0)]),
    "adamw": (Case({}, ADAMW, clip=0.3), [(1, 4), (4, 4)]),
    "scaled": (Case({"mix_every": 2}, scaled=True), [(0, 3), (5, 5)]),
    "tracking": (Case({}, partial(GossipAdamW, lr=0.01, tracking=True)), [(6, 8), (8, 2)]),
}


def step_of(run: Any, losses: Callable[[], list[Tensor]], workers: int = 1) -> None:
    for optimizer in run.optimizers:
        optimizer.zero_grad()
    scale = 1.0 if run.scaler is None else run.scaler.get_scale() or 256.0
    for loss in losses():
        (loss * scale).backward()
    for param in run.model.parameters() if workers > 1 else ():
        if param.grad is not None:
            param.grad /= workers
    if run.scaler is not None:
        run.scaler.scale(torch.zeros(()))
        run.scaler.unscale_(run.optimizers[0])
    if run.case.clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), run.case.clip)
    if run.scaler is None:
        run.optimizers[0].step()
    else:
        run.scaler.step(run.optimizers[0])
        run.scaler.update()


def uneven_node(rank: int, n: int) -> list[Any]:
    found = []
    for case, batches in UNEVEN.values():
        run = OfNode(case, 2)
        for _ in range(2):
            with run.gossip.join():
                for t in range(batches[run.replica][run.place]):
                    step_of(run, lambda run=run, t=t: [run.loss(t)])
        step_of(run, lambda run=run: [run.loss(9)])  # with one optimizer state in a node
        found.append(ended(run, []))
    return found


def uneven_worker(transport: Any, name: str) -> Any:
    case, batches = UNEVEN[name]
    run = Unsharded(case, transport, 2)
    own = batches[run.replica]
    for _ in range(2):
        with run.gossip.join():
            for t in range(max(own)):
                step_of(run, lambda t=t: [loss for loss, count in zip(run.losses(t), own, strict=True) if t < count], 2)
    step_of(run, lambda: run.losses(9), 2)
    return ended(run, [])


def test_uneven_inputs_inside_a_node(workers):
    found = workers(4, uneven_node)
    for number, name in enumerate(UNEVEN):
        wanted = run_replicas(2, partial(uneven_worker, name=name))
        for rank in range(4):
            assert_close(found[rank][number], wanted[rank // 2], 1e-6, f"{name}, worker {rank}")


def dealt(rank: int, n: int, workers: int) -> list[list[int]]:
    model = Odd()
    optimizer = SGD(model.parameters())
    gossip = decent_dp.gossip(model, optimizer, local_world_size=workers, replica="node")
    sampler, found = decent_dp.RosterSampler(50, gossip, 3, shuffle=False), []
    for batch in sampler:
        found.append(batch)
        model(inputs(0, rank)[0]).sum().backward()
        optimizer.step()
    gossip.close()
    return found


def test_each_worker_of_a_node_has_batches_of_its_own(workers):
    found = workers(4, dealt, 2)
    assert len(found[0]) == 4
    assert [i for batches in zip(*found, strict=True) for batch in batches for i in batch] == list(range(48))


def makes(rank: int, n: int) -> list[str]:
    """What each way to ask for it makes."""
    from torch.nn.parallel import DistributedDataParallel

    ways: list[dict[str, Any]] = [
        {"local_world_size": 2},
        {"local_world_size": 2, "replica": "worker"},
        {"local_world_size": 4},
        {"local_world_size": 4, "replica": "node"},
        {"local_world_size": 2 if rank < 2 else 1},
        {"local_world_size": 2 if rank < 2 else 1, "replica": "node"},
        {"local_world_size": 3, "replica": "node"},
        {"local_world_size": 2, "replica": "nodes"},
        {"local_world_size": 2, "topology": "hierarchical"},
        {"inner": 2},
        {"inner": 2, "process_group": [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]},
        {"inner": 4},
        {"inner": 2, "replica": "worker"},
        {"local_world_size": 2, "rule": MomentumTracking(), "optimizer": GossipAdamW},
        {"local_world_size": 2, "replica": "node" if rank < 2 else "worker"},
    ]
    groups = {2: [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2], 4: None}
    found = []
    for way in ways:
        options, model = dict(way), Odd(0)
        wrapped = DistributedDataParallel(model, process_group=groups[options.pop("inner")]) if "inner" in options else model
        try:
            gossip = decent_dp.gossip(wrapped, options.pop("optimizer", SGD)(model.parameters()), **options)
            wrapped(inputs(0, rank)[0]).sum().backward()
            gossip.optimizers[0].step()
            found.append(str(gossip.agreed.replicas.workers))
            own = list(gossip.agreed.replicas.workers_of(rank // 2))
            is_node = len(own) == 2
            how = "averaged by DistributedDataParallel over gloo" if "inner" in way else "averaged over gloo"
            said = f"replica='node': the workers {own}, gradients {how}, " if is_node else "replica="
            assert said in repr(gossip)
            assert "exchanges over ZeroMQ)" in repr(gossip)
            gossip.close()
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


def test_what_is_a_replica(workers):
    nodes, each = "((0, 1), (2, 3))", "((0,), (1,), (2,), (3,))"
    found = workers(4, makes)
    assert all(one == found[0] for one in found)
    texts = iter(found[0])
    assert [next(texts) for _ in range(5)] == [nodes, each, each, "((0, 1, 2, 3),)", each]
    assert "of 4 workers 2 are on the node of worker 0, and 1 on that of worker 2" in next(texts)
    assert "of 4 workers 3 are on the node of worker 0. Start as many on each node" in next(texts)
    assert "'nodes'" in next(texts)
    assert [next(texts) for _ in range(3)] == [each, nodes, nodes]
    assert "over 4 of 4 workers, which averages its gradients: that is one replica" in next(texts)
    assert "over 2 of 4 workers, which averages its gradients, and replica='worker' was given" in next(texts)
    assert next(texts) == nodes
    assert "worker 0 can be of a node, and worker 2 cannot" in next(texts)


class Branches(nn.Module):
    """Parts that a loss may leave out, one that is called without the whole, and one that is run twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.never = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(2, 2)
        self.inner, self.out = nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor, way: str) -> Tensor:
        if way == "checkpoint":
            x = checkpoint(lambda x: torch.tanh(self.first(x)), x.requires_grad_(), use_reentrant=True)
            x = checkpoint(lambda x: torch.tanh(self.inner(x)), x, use_reentrant=True)
        else:
            x = torch.tanh(self.inner(torch.tanh((self.second if way == "second" else self.first)(x))))
        return self.out(x)

    def loss(self, x: Tensor, y: Tensor, way: str) -> Tensor:
        if way == "twice":
            return (self(x, "first") - y).square().mean() + (self(x, "second") - y).square().mean()
        if way == "part":
            return torch.tanh(self.first(x)).square().mean()
        return (self(x, way) - y).square().mean()


# By step, for each worker of the node. "none": a forward without a backward.
WAYS = [("first", "first"), ("second", "first"), ("first", "second"), ("twice", "part"), ("part", "part"), ("checkpoint",) * 2]
WAYS += [("none", "none"), ("checkpoint", "second"), ("second", "second"), ("first", "part")]


def branches(rank: int, n: int, bucket: float) -> dict[str, Tensor]:
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    decent_dp.gossip(model, optimizer, local_world_size=n, replica="node", bucket_size_in_mb=bucket)
    for t, ways in enumerate(WAYS):
        optimizer.zero_grad()
        x, y = (part.chunk(2)[rank] for part in inputs(t, 0))
        loss = model.loss(x, y, ways[rank].replace("none", "first"))
        if ways[rank] != "none":
            loss.backward()
            optimizer.step()
    assert model.never.weight.grad is None
    return values(model)


@pytest.mark.parametrize("bucket", [25, 0])
def test_any_part_of_a_model_may_be_used(workers, bucket):
    found = workers(2, branches, bucket)
    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for t, ways in enumerate(WAYS):
        if "none" in ways:
            continue
        optimizer.zero_grad()
        for x, y, way in zip(*(part.chunk(2) for part in inputs(t, 0)), ways, strict=True):
            (model.loss(x, y, way) / 2).backward()
        optimizer.step()
    for name, value in values(model).items():
        assert torch.equal(found[0][name], found[1][name])
        torch.testing.assert_close(found[0][name], value, rtol=1e-6, atol=1e-6)


def misuse(rank: int, n: int) -> list[str]:
    """Steps with gradients that the node has not averaged."""
    found = []

    def fails(act: Callable[[OfNode], object]) -> None:
        run = OfNode(Case(), 2)
        with pytest.raises(RuntimeError) as raised:
            act(run)
        found.append(str(raised.value))

    def unsynced(run: OfNode) -> None:
        with run.gossip.no_sync():
            run.loss(0).backward()
        run.optimizers[0].step()

    def within(run: OfNode) -> None:
        run.model.first.weight.register_post_accumulate_grad_hook(lambda _: run.optimizers[0].step())
        run.loss(0).backward()

    def by_hand(run: OfNode) -> None:
        params = [param for param in run.model.parameters() if param.requires_grad]
        step(run, 0)
        for param, grad in zip(params, torch.autograd.grad(run.loss(0), params), strict=True):
            param.grad = grad
        run.optimizers[0].step()

    fails(unsynced)
    fails(within)
    fails(by_hand)
    run = OfNode(Case(), 2)  # without gradients, or with zeros, a step is one of the node
    with run.gossip.no_sync():
        run.loss(0).backward()
    run.optimizers[0].zero_grad(set_to_none=False)
    run.optimizers[0].step()
    run.optimizers[0].zero_grad()
    run.optimizers[0].step()
    run.gossip.close()
    return found


def test_steps_with_gradients_of_one_worker(workers):
    found = workers(2, misuse)
    assert found[0] == found[1]
    assert "inside no_sync(), or they were set by hand" in found[0][0] == found[0][2]
    assert "inside a backward" in found[0][1]


def masks(rank: int, n: int, bucket: float) -> list[float]:
    """Hooks of the user's, which keep a part of each gradient, before and after ours."""
    model, found = Odd(), []
    params = [param for param in model.parameters() if param.requires_grad]

    def mask(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(torch.arange(param.numel()).view(param.shape) % 2)

    for param in params[::2]:
        param.register_post_accumulate_grad_hook(mask)
    optimizer = SGD(params)
    gossip = decent_dp.gossip(model, optimizer, local_world_size=n, replica="node", bucket_size_in_mb=bucket)
    for param in params[1::2]:
        param.register_post_accumulate_grad_hook(mask)
    for t in range(3):
        optimizer.zero_grad()
        x, y = (part.chunk(n)[rank] for part in inputs(t, 0))
        (model(x) - y).square().mean().backward()
        found.append(sum(float(param.grad.reshape(-1)[::2].abs().sum()) for param in params))
        assert all(float(param.grad.abs().sum()) for param in params if param.numel() > 1)
        optimizer.step()
    gossip.close()
    return found


class Mixed(nn.Module):
    """Parameters of three dtypes, in turns."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
        self.parts = nn.ParameterList(torch.linspace(-1, 1, 15).view(5, 3).to(dtype) for dtype in dtypes)

    def loss(self, t: int, worker: int) -> Tensor:
        return sum((part * (1 + t + worker)).double().square().mean() for part in self.parts)


def mixed(rank: int, n: int) -> list[Tensor]:
    return train_mixed(lambda model, t: model.loss(t, rank).backward(), local_world_size=2)


def train_mixed(backward: Callable[[Mixed, int], object], **options: Any) -> list[Tensor]:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    gossip = decent_dp.gossip(model, optimizer, **options)
    for t in range(4):
        optimizer.zero_grad()
        backward(model, t)
        optimizer.step()
    gossip.close()
    return [part.detach().clone() for part in model.parts]


def test_parameters_of_several_dtypes(workers):
    def one(transport: Any) -> list[Tensor]:
        ranks = (2 * transport.rank, 2 * transport.rank + 1)
        return train_mixed(lambda model, t: sum(model.loss(t, r) / 2 for r in ranks).backward(), transport=transport)

    wanted = run_replicas(2, one)
    for rank, own in enumerate(workers(4, mixed)):
        for ours, theirs in zip(own, wanted[rank // 2], strict=True):
            tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-6, torch.float64: 1e-12}[ours.dtype]
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("bucket", [25, 0])
def test_hooks_of_the_users_see_the_gradients_before_they_are_averaged(workers, bucket):
    assert workers(2, masks, bucket) == [[0.0] * 3] * 2


def loses_a_mate(rank: int, n: int) -> str:
    run = OfNode(Case(), 2)
    step(run, 0)
    if rank == 1:
        raise ValueError("no more data")
    try:
        for t in range(1, 30):
            step(run, t)
    except PeerLostError as error:
        return str(error)
    return ""


def test_a_worker_whose_mate_has_ended_says_which(workers):
    """Where faults are not tolerated."""
    outcomes = workers.outcomes(4, loses_a_mate)
    assert [outcome.error for outcome in outcomes] == ["", "ValueError", "", ""], outcomes
    assert outcomes[0].value.startswith("worker 1 is gone, and "), outcomes[0]


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2485"), True),
        (RuntimeError("[enforce fail at /gloo/transport/tcp/pair.cc:460] op.preamble.length <= op.nbytes. 8 vs 4"), False),
        (RuntimeError("CUDA out of memory"), False),
        (dist.DistBackendError("ncclRemoteError: a remote process exited"), True),
        (dist.DistBackendError("ncclUnhandledCudaError: out of memory"), False),
    ],
)
def test_only_errors_of_the_network_are_those_of_a_lost_worker(error, wanted):
    assert is_of_network(error) is wanted


def test_parameters_on_the_cpu_are_not_averaged_by_nccl():
    model, with_nccl, with_gloo = Odd(0), SimpleNamespace(only_cuda=True), SimpleNamespace(only_cuda=False)
    assert "is on the CPU, and NCCL" in why_no_node(model, with_nccl)
    assert why_no_node(model, with_gloo) == ""


def timeouts(rank: int, n: int) -> float:
    run = OfNode(Case(), 2)
    from decent_dp.transport.rendezvous import timeout_of

    own = timeout_of(run.gossip.agreed.shares.group._group)
    again = OfNode(Case(), 2)
    assert again.gossip.agreed.shares.group._group is run.gossip.agreed.shares.group._group
    assert own == timeout_of(dist.group.WORLD)
    return own.total_seconds()


def test_a_node_waits_as_long_as_the_process_group(workers):
    found = workers(4, timeouts)
    assert 0 < found[0] < 1000
