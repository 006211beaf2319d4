"""The outer optimizer over sockets, between threads and in the simulator: the same numbers after every step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from decent_dp.compression import Lossless
from decent_dp.rules import GASLoC, Gossip, MomentumTracking, OuterNesterov, Rule
from decent_dp.tools.sim.exchange import make_exchanges
from decent_dp.transport import run_replicas
from tests.rule_cases import MomentumGossip, Scaled
from tests.tools.sim_cases import OPTIMIZERS, STEPS, Case, compare, make_topology, train_really
from tests.tools.test_sim_exact import hold

OUTER, SLOW = OuterNesterov(momentum=0.6), OuterNesterov(lr=0.5, momentum=0.6)
TRACKING = MomentumTracking()


@dataclass(frozen=True)
class Threaded(Case):
    """For workers that are threads, which share torch's random numbers."""

    def make_model(self) -> nn.Module:
        with _ONE_AT_A_TIME:
            return super().make_model()


_ONE_AT_A_TIME = threading.Lock()


def case(topology: str, model: str, optimizer: str, rule: Rule = OUTER, dtype: str = "float64", **options: Any) -> Case:
    return Threaded(topology, model, optimizer, dtype, 2 if "alternating" in topology else 1, options={"rule": rule, **options})


CASES = [
    case("complete", "conv", "adamw", mix_every=2, overlap=False),
    case("one-peer-exp", "mlp", "momentum", mix_every=2),
    case("varying", "unused", "sgd", SLOW, overlap=False),
    case("unrepeated", "mlp", "sgd"),
    case("complete:3,ring", "mlp", "sgd", SLOW, mix_every=2),
    # Narrower numbers, whose state is as wide as they are.
    case("varying", "mlp", "momentum", dtype="float32"),
    # Lossy compression.
    case("ring", "mlp", "sgd", compression="bfloat16"),
    case("varying", "mlp", "adamw", compression="int8", overlap=False),
    # More than one run in a parameter.
    case("varying", "wide", "sgd", SLOW, compression="int8"),
    # Tracked momenta, also of workers that sit a round out.
    case("ring", "conv", "momentum", TRACKING, overlap=False),
    case("one-peer-exp", "mlp", "momentum", TRACKING, compression="bfloat16"),
    case("ring", "wide", "momentum", TRACKING, compression="int8"),
    case("varying", "unused", "momentum", MomentumTracking(ahead=0), mix_every=2),
    case("one-peer-exp", "mlp", "momentum", TRACKING, compression="low-rank:2,int8"),
    # Accelerated gossip, in turns and with workers that sit out; and rules of users, one with a proposal of its own.
    case("varying", "mlp", "sgd", GASLoC(0.8, 0.3), mix_every=2),
    case("varying", "mlp", "momentum", MomentumGossip(0.3)),
    case("varying", "mlp", "sgd", Scaled(64.0), compression="int8"),
]


@pytest.mark.slow
def test_over_sockets_in_process_and_simulated(workers):
    """Parameters and buffers after each of five steps, distances and bytes after the last."""
    hold(workers, 4, CASES)
    for one in CASES[::3]:  # every third one is enough
        threads = run_replicas(
            4, lambda at, one=one: train_really(at.rank, 4, replace(one, options={**one.options, "transport": at}))
        )
        compare(one, 4, threads)


@pytest.mark.slow
def test_five_workers(workers):
    hold(workers, 5, [CASES[i] for i in (0, 3, 6, 9)])


# -- the fast exchange of the simulator, and the one that goes through messages --------------------------------------------


@pytest.mark.parametrize(
    ("rule", "topologies"),
    [
        *((SLOW, ["varying"]), (MomentumGossip(0.3), ["varying", "ring"])),
        *((Scaled(8.0), ["complete", "ring"]), (Gossip(), ["unrepeated"])),
        *(
            pytest.param(rule, ["complete", "varying", "unrepeated", "ring"], marks=pytest.mark.slow)
            for rule in (OUTER, SLOW, MomentumGossip(0.3), Scaled(8.0), Gossip())
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else ",".join(value),
)
def test_stacked_exchanges_equal_messages(rule, topologies):
    """Lossless values, all edges at once or bucket by bucket through messages; with steps in between that are made
    by hand while an exchange is in flight, and with an adaptive factor."""
    n = 6
    options_of = {
        "complete": {"mix_every": 2},
        "varying": {},
        "unrepeated": {"overlap": False},
        "ring": {"mix_every": 2, "overlap": False},
    }
    for topology in topologies:
        options = options_of[topology]
        one = Case(topology, "mlp", "momentum", options={"rule": rule, **options})
        fast, slow = (_cluster(one, n, messages=messages) for messages in (False, True))
        for t in range(STEPS + 1):
            batch = [torch.stack(column) for column in zip(*(one.batch(t, rank) for rank in range(n)), strict=True)]
            for cluster in (fast, slow):
                cluster.set_adaptive_factor((1.0, 0.5, 0.0)[t % 3] if topology == "varying" else 1.0)
                cluster.step(*batch)
                for values in cluster.parameters.values():  # an edit of the user's
                    values += 0.01 * torch.randn(values.shape, generator=torch.Generator().manual_seed(t), dtype=values.dtype)
            for name, values in fast.parameters.items():
                torch.testing.assert_close(values, slow.parameters[name], rtol=0, atol=1e-13, msg=f"{one}, step {t}, {name}")
        assert fast.bytes_sent == slow.bytes_sent


class Messages(Lossless):
    """For the simulator no lossless values: they go through messages."""


def _cluster(one: Case, n: int, *, messages: bool) -> Any:
    from decent_dp.tools.sim import VirtualCluster

    topology = make_topology(one.topology, n, 0)
    cluster = VirtualCluster(one.make_model(), OPTIMIZERS[one.optimizer], topology, n, **one.both())
    if messages:
        rule = cluster._exchanges[0]._rule
        cluster._exchanges = make_exchanges(cluster._stack.params, cluster.topology, rule, cluster._faults, Messages)
    return cluster
