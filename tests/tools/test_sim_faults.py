"""Deaths, freezes, partitions and cut edges in the simulator, against gossip with holes in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from decent_dp.compression import Lossless
from decent_dp.optim import GossipAdamW
from decent_dp.rules import GASLoC, MomentumTracking, OuterNesterov, Round, Rule
from decent_dp.tools.sim import VirtualCluster, exchange
from decent_dp.tools.sim.exchange import CompressedExchange
from decent_dp.topo import make_topology
from tests.helpers import some_in_the_fast_tests
from tests.tools.sim_cases import MODELS, snapshot

FEATURES, SAMPLES, LR, MOMENTUM = 5, 4, 0.05, 0.9

# By step: what happens before it.
Events = Mapping[int, Sequence[tuple[Any, ...]]]

DEATH: Events = {2: [("kill", 1)], 5: [("kill", [0, 3])]}
FREEZE: Events = {3: [("kill", [2, 4])], 4: [("kill", 0)], 6: [("revive", 2)], 9: [("revive", [0, 4])]}
PARTITION: Events = {2: [("cut", range(3), range(3, 6))], 8: [("heal", range(3), range(3, 6))]}
EDGES: Events = {1: [("cut", 0, 1)], 3: [("cut", 4, 2), ("kill", 5)], 5: [("heal", 1, 0)], 7: [("revive", 5)]}
FIRST: Events = {0: [("kill", 0), ("cut", 3, [1, 2])]}
ALL = {"death": DEATH, "freeze": FREEZE, "partition": PARTITION, "edges": EDGES, "first": FIRST}


def happen(cluster: VirtualCluster, events: Events, t: int) -> None:
    for verb, *sides in events.get(t, ()):
        getattr(cluster, verb)(*sides)


def batch(n: int, t: int, features: int = FEATURES) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([7, t])
    return rng.normal(size=(n, SAMPLES, features)), rng.normal(size=(n, SAMPLES, 1))


# -- the same in NumPy -----------------------------------------------------------------------------------------------------


class Hand:
    """Least squares by SGD with momentum and gossip of pairs, in float64: one vector per replica."""

    def __init__(self, n: int, topology: str, overlap: bool, every: int) -> None:
        start = np.random.default_rng(3).normal(size=FEATURES)
        self.x, self.speed = np.tile(start, (n, 1)), np.zeros((n, FEATURES))
        self.rounds = make_topology(topology, local_world_size=1, world_size=n, rank=0)
        self.overlap, self.every = overlap, every
        self.away: set[int] = set()
        self.cuts: set[frozenset[int]] = set()
        self.flying: tuple[int, list[tuple[int, int, float]], np.ndarray] | None = None

    def kill(self, which: Any) -> None:
        self.away |= set(np.atleast_1d(which).tolist())

    def revive(self, which: Any) -> None:
        self.away -= set(np.atleast_1d(which).tolist())

    def cut(self, a: Any, b: Any) -> None:
        self.cuts |= {frozenset((i, j)) for i in np.atleast_1d(a).tolist() for j in np.atleast_1d(b).tolist()}

    def heal(self, a: Any, b: Any) -> None:
        self.cuts -= {frozenset((i, j)) for i in np.atleast_1d(a).tolist() for j in np.atleast_1d(b).tolist()}

    def meet(self, i: int, j: int) -> bool:
        return not {i, j} & self.away and frozenset((i, j)) not in self.cuts

    def step(self, t: int) -> None:
        a, y = batch(len(self.x), t)
        here = [i for i in range(len(self.x)) if i not in self.away]
        gradients = {i: 2 * a[i].T @ (a[i] @ self.x[i] - y[i, :, 0]) / SAMPLES for i in here}
        if self.overlap and self.flying is not None and t - self.flying[0] == self.every:
            self.land()
        for i in here:
            self.speed[i] = MOMENTUM * self.speed[i] + gradients[i]
            self.x[i] -= LR * self.speed[i]
        if (t + 1) % self.every == 0:
            edges = [(*edge.ranks, edge.weight) for edge in self.rounds.round(t // self.every) if len(edge.ranks) == 2]
            self.flying = t, [(i, j, w) for i, j, w in edges if self.meet(i, j)], self.x.copy()
        if not self.overlap and self.flying is not None:
            self.land()

    def land(self) -> None:
        assert self.flying is not None
        _, edges, sent = self.flying
        for i, j, weight in edges:
            if self.meet(i, j):
                self.x[i] += (1 - weight) * (sent[j] - sent[i])
                self.x[j] += (1 - weight) * (sent[i] - sent[j])
        self.flying = None


def linear() -> nn.Module:
    model = nn.Linear(FEATURES, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(np.random.default_rng(3).normal(size=(1, FEATURES))))
    return model


def squared(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x) - y).square().mean()


MOMENTUM_SGD = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)


def least_squares(topology: str, n: int, **options: Any) -> VirtualCluster:
    return VirtualCluster(linear(), options.pop("optim_fn", MOMENTUM_SGD), topology, n, loss_fn=squared, **options)


HOLES: list[tuple[str, int, dict[str, Any]]] = [
    ("base-2", 6, {}),  # idle workers and weights other than one half
    ("ring", 7, {"overlap": False}),
    ("one-peer-exp", 8, {"vectorize": False}),
    ("random-matching", 6, {}),
    ("base-2", 6, {"mix_every": 3}),
    ("ring", 6, {"mix_every": 2, "overlap": False, "vectorize": False}),
]


@pytest.mark.parametrize(("events", "how"), some_in_the_fast_tests(ALL, HOLES))
def test_every_value_is_that_of_gossip_with_holes(events: str, how: tuple[str, int, dict[str, Any]]) -> None:
    (topology, n, options), chosen = how, ALL[events]
    hand = Hand(n, topology, options.get("overlap", True), options.get("mix_every", 1))
    cluster = least_squares(topology, n, **options)
    for t in range(14):
        happen(cluster, chosen, t)
        for verb, *sides in chosen.get(t, ()):
            getattr(hand, verb)(*map(list, (np.atleast_1d(side) for side in sides)))
        losses = cluster.step(*map(torch.from_numpy, batch(n, t)))
        hand.step(t)
        found = cluster.parameters["weight"][:, 0].numpy()
        np.testing.assert_allclose(found, hand.x, rtol=0, atol=1e-13, err_msg=f"step {t}")
        assert set(losses.isnan().nonzero().flatten().tolist()) == hand.away
        here = cluster.alive
        assert here == [i for i in range(n) if i not in hand.away]
        own = hand.x[here]
        distance = np.sqrt(np.square(own - own.mean(0)).sum(1).mean())
        assert cluster.consensus_distance() == pytest.approx(distance, rel=1e-12, abs=1e-15)
        mean = cluster.mean_model().weight.detach().numpy()[0]
        np.testing.assert_allclose(mean, own.mean(0), rtol=0, atol=1e-14)
    assert cluster.vectorized is options.get("vectorize", True)


# -- the mean over the survivors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "bfloat16", "int8", "low-rank:1"])
@pytest.mark.parametrize("events", [DEATH, PARTITION, EDGES], ids=["death", "partition", "edges"])
def test_mixing_never_moves_the_mean_of_the_survivors(compression: str | None, events: Events) -> None:
    """With a rate of zero only the mix moves replicas; the dead stand still to the last bit."""
    cluster = least_squares("base-2", 6, optim_fn=partial(torch.optim.SGD, lr=0.0), compression=compression)
    weight = cluster.parameters["weight"]
    weight.copy_(torch.from_numpy(np.random.default_rng(1).normal(0, 1e-2, weight.shape)) + 1.0)
    before = weight.clone()
    for t in range(14):
        happen(cluster, events, t)
        here, start = cluster.alive, weight.clone()
        cluster.step(*map(torch.from_numpy, batch(6, t)))
        assert (weight[here].mean(0) - start[here].mean(0)).abs().max() < 1e-14
        away = [i for i in range(6) if i not in here]
        assert torch.equal(weight[away], start[away])
    assert (weight[cluster.alive] - before[cluster.alive]).abs().max() > 1e-3  # they did mix
    assert cluster.rejected == 0


# -- paths agree -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Told(Rule):
    """Plain gossip that counts what it was told, element by element."""

    def state(self, values: Tensor) -> dict[str, Tensor]:
        return {"proposed": torch.zeros_like(values), "came": torch.zeros_like(values), "nothing": torch.zeros_like(values)}

    def propose(self, values: Tensor, state: dict[str, Tensor], round: Round) -> Tensor:
        state["proposed"].add_(1)
        return values

    def apply(self, values: Tensor, state: dict[str, Tensor], difference: Tensor | None, round: Round) -> None:
        state["nothing" if difference is None else "came"].add_(1)
        if difference is not None:
            values.add_(difference)


class LosslessByBuckets(CompressedExchange):
    """The readable twin of ``LosslessExchange``, with its arguments."""

    def __init__(self, params: Any, topology: Any, rule: Any, faults: Any) -> None:
        specs = [exchange.TensorSpec.of(name, param.detach()[0]) for name, param in params.items()]
        (plan,) = exchange.plan_buckets(specs, range(len(specs)), float("inf"))
        super().__init__(params, plan, topology, rule, faults, Lossless)


def train(events: Events, model: str, optim_fn: Any, **options: Any) -> list[dict[str, np.ndarray]]:
    torch.manual_seed(11)
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9)  # its rate is in the optimizer alone
    topology = options.pop("topology", "base-2")
    cluster = VirtualCluster(MODELS[model]().double(), optim_fn, topology, 6, lr_scheduler_fn=schedule, **options)
    found = []
    for t in range(14):
        happen(cluster, events, t)
        rng = np.random.default_rng([5, t])
        x, y = torch.from_numpy(rng.normal(size=(6, 4, 16))), torch.from_numpy(rng.integers(0, 3, (6, 4)))
        stood = [i for i in range(6) if i not in cluster.alive]
        # What was in flight ends with nothing, which a rule may use to move.
        still = cluster.buffers if "rule" in options else {**cluster.parameters, **cluster.buffers}
        before = snapshot({name: value[stood] for name, value in still.items()})
        losses = cluster.step(x, y)
        assert all(np.array_equal(value[stood].numpy(), before[name]) for name, value in still.items()), t
        states = {
            f"{name} {key}": s
            for exchange in cluster._exchanges
            for name, state in exchange.states.items()
            for key, s in state.items()
        }
        found.append(snapshot({**cluster.parameters, **cluster.buffers, **states, "losses": losses}))
        found[-1]["steps"] = np.array(cluster.steps)
    return found


PATHS = [
    ("conv", partial(torch.optim.AdamW, lr=0.01), {}),
    ("mlp", partial(torch.optim.SGD, lr=0.05, momentum=0.9), {"rule": OuterNesterov(momentum=0.3), "overlap": False}),
    ("mlp", partial(torch.optim.AdamW, lr=0.01), {"rule": GASLoC(momentum=0.2), "mix_every": 2}),
    ("mlp", partial(torch.optim.SGD, lr=0.05, momentum=0.9), {"rule": MomentumTracking(), "topology": "ring"}),
    ("mlp", partial(GossipAdamW, lr=0.01), {}),
    ("mlp", partial(GossipAdamW, lr=0.01, tracking=True), {"topology": "random-matching"}),
    ("mlp", partial(torch.optim.Adagrad, lr=0.01), {"rule": Told(), "mix_every": 3}),
]


@pytest.mark.parametrize(("path", "events"), some_in_the_fast_tests(range(len(PATHS)), ALL))
def test_all_paths_agree(monkeypatch: pytest.MonkeyPatch, path: int, events: str) -> None:
    """All replicas at once or one by one; one optimizer or one each; all edges at once or bucket by bucket."""
    model, optim_fn, options = PATHS[path]
    fast = train(ALL[events], model, optim_fn, vectorize=True, **options)
    loop = train(ALL[events], model, optim_fn, vectorize=False, **options)
    monkeypatch.setattr(exchange, "LosslessExchange", LosslessByBuckets)
    buckets = train(ALL[events], model, optim_fn, vectorize=True, **options)
    for t, (own, *others) in enumerate(zip(fast, loop, buckets, strict=True)):
        for other in others:
            assert own.keys() == other.keys()
            for name, values in own.items():
                np.testing.assert_allclose(other[name], values, rtol=0, atol=1e-9, err_msg=f"step {t}, {name}")


# -- one at a time ---------------------------------------------------------------------------------------------------------


def test_what_is_in_flight_with_a_dead_worker_is_dropped() -> None:
    """Of two workers one dies after the first step: the other goes on as if it had always been alone."""
    pair, alone = least_squares("ring", 2), least_squares("ring", 2)
    alone.cut(0, 1)
    for t in range(4):
        if t == 1:
            pair.kill(1)
        for cluster in (pair, alone):
            cluster.step(*map(torch.from_numpy, batch(2, t)))
    assert torch.equal(pair.parameters["weight"][0], alone.parameters["weight"][0])
    assert pair.steps == [4, 1]
    assert pair.consensus_distance() == 0.0
    assert pair.bytes_sent == 2 * 8 * FEATURES  # those of the first step


def test_a_freeze_that_ends_in_time_loses_no_exchange() -> None:
    """With mix_every=4 an exchange has four updates to arrive."""
    events: list[Events] = [{}, {5: [("cut", 0, 1)], 6: [("heal", 0, 1)]}, {5: [("cut", 0, 1)]}]
    ends = []
    for own in events:
        cluster = least_squares("ring", 2, mix_every=4)
        for t in range(8):
            happen(cluster, own, t)
            cluster.step(*map(torch.from_numpy, batch(2, t)))
        ends.append(cluster.parameters["weight"].clone())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], ends[2])


@pytest.mark.parametrize("compression", [None, "bfloat16"])
def test_rules_are_told_once_of_every_round(compression: str | None) -> None:
    cluster = least_squares("one-peer-exp", 4, rule=Told(), compression=compression)
    # Rounds 0 and 2 are the pairs 0-1 and 2-3; rounds 1 and 3 are 0-2 and 1-3.
    events: Events = {2: [("kill", 1)], 4: [("revive", 1), ("cut", 2, 3)]}
    for t in range(6):
        happen(cluster, events, t)
        cluster.step(*map(torch.from_numpy, batch(4, t)))
    states = cluster._exchanges[0].states["weight"]
    told = {key: tensor.flatten(1)[:, 0].int().tolist() for key, tensor in states.items()}
    assert all(tensor.flatten(1).std(1).max() == 0 for tensor in states.values())
    # Round 1 was in flight when 1 died: 1 and 3 get nothing. Round 2 has a hole at 0, round 3 at 3, and none for 1, which is
    # away; round 4 has one at 2 and 3. Round 5 is in flight.
    assert told["proposed"] == [6, 4, 6, 6]
    assert told["came"] == [4, 2, 4, 2]
    assert told["nothing"] == [1, 1, 1, 3]


def test_the_dead_may_be_broken() -> None:
    """A replica with NaN that is killed harms nobody, nor do its batches."""
    clusters = [least_squares("base-2", 6) for _ in range(2)]
    for t in range(8):
        x, y = map(torch.from_numpy, batch(6, t))
        for cluster in clusters:
            if t == 3:
                cluster.kill(2)
        if t >= 3:
            clusters[1].parameters["weight"][2] = torch.nan
        clusters[0].step(x, y)
        clusters[1].step(x.index_fill(0, torch.tensor([2]), torch.inf if t >= 3 else 0.0) if t >= 3 else x, y)
    here = clusters[0].alive
    assert torch.equal(*(cluster.parameters["weight"][here] for cluster in clusters))
    assert clusters[0].consensus_distance() == clusters[1].consensus_distance()


def of_survivors(cluster: VirtualCluster, key: str) -> Tensor:
    """An entry of the optimizers' state, (n, *shape)."""
    states = [next(iter(optimizer.state.values()), {}) for optimizer in cluster.optimizers]
    if len(states) == 1:
        return states[0][key][cluster.alive]
    return torch.stack([states[i][key] for i in cluster.alive])


@pytest.mark.parametrize(
    ("events", "vectorize"), some_in_the_fast_tests(ALL, [True, False]), ids=lambda value: str(value).lower()
)
def test_the_mean_of_the_tracked_momenta_is_that_of_the_survivors_own(events: str, vectorize: bool) -> None:
    """Also in the step after a change, with messages in flight from before it."""
    cluster = least_squares("base-2", 6, rule=MomentumTracking(), vectorize=vectorize)
    apart = 0.0
    for t in range(14):
        happen(cluster, ALL[events], t)
        cluster.step(*map(torch.from_numpy, batch(6, t)))
        tracked, own = (of_survivors(cluster, key) for key in ("momentum_buffer", "own_momentum"))
        torch.testing.assert_close(tracked.mean(0), own.mean(0), rtol=0, atol=1e-12, msg=f"step {t}")
        apart = max(apart, float((tracked - own).abs().max()))
    assert apart > 0.1


# -- refusals --------------------------------------------------------------------------------------------------------------


def test_groups_are_refused_by_name() -> None:
    for topology, local in (("complete", 1), ("hierarchical", 2), ("complete:10,ring", 1)):
        cluster = VirtualCluster(linear(), MOMENTUM_SGD, topology, 4, local_world_size=local)
        for verb, sides in (("kill", (0,)), ("cut", (0, 1))):
            with pytest.raises(
                ValueError, match=rf"VirtualCluster\.{verb} needs a topology of pairs.* groups of 4: use 'base-2'"
            ):
                getattr(cluster, verb)(*sides)
        assert cluster.alive == [0, 1, 2, 3]


def test_what_cannot_be() -> None:
    cluster = least_squares("ring", 4)
    with pytest.raises(IndexError, match="replica 4 is out of range: the replicas are 0 to 3"):
        cluster.kill(4)
    with pytest.raises(IndexError, match="replica -1 is out of range"):
        cluster.cut(0, [1, -1])
    with pytest.raises(ValueError, match="replica 2 is on both sides of the cut"):
        cluster.cut([1, 2], [2, 3])
    with pytest.raises(TypeError):
        cluster.kill(1.5)  # type: ignore[arg-type]
    cluster.kill([0, 1])
    with pytest.raises(ValueError, match="kill would leave none of the 4 replicas"):
        cluster.kill([2, 3])
    assert cluster.alive == [2, 3]
    cluster.kill(0)  # again
    cluster.revive([0, 3])
    assert cluster.alive == [0, 2, 3]
    cluster.heal(1, 2)  # was not cut
