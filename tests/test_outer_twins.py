"""The outer optimizer over sockets, between threads and in the simulator: the same numbers after every step."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
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
    case("complete", "mlp", "sgd"),
    case("complete", "conv", "adamw", mix_every=2, overlap=False),
    case("one-peer-exp", "mlp", "momentum", mix_every=2),
    case("one-peer-exp", "conv", "sgd", SLOW, overlap=False),
    case("ring", "mlp", "adamw", SLOW, mix_every=3),
    case("varying", "mlp", "momentum"),
    case("varying", "conv", "adamw", mix_every=2, param_as_bucket_view=False, bucket_size_in_mb=1e-6),
    case("varying", "unused", "sgd", SLOW, overlap=False),
    case("unrepeated", "mlp", "sgd"),
    case("complete:2,ring", "mlp", "sgd", mix_every=2),
    case("complete:3,ring", "mlp", "sgd", SLOW, mix_every=2),
    # Narrower numbers, whose state is as wide as they are.
    case("varying", "mlp", "momentum", dtype="float32"),
    case("complete", "conv", "sgd", dtype="float32", mix_every=2),
    case("one-peer-exp", "mlp", "sgd", SLOW, dtype="float32", overlap=False),
    # Lossy compression.
    case("ring", "mlp", "sgd", compression="bfloat16"),
    case("complete", "mlp", "momentum", SLOW, compression="bfloat16", mix_every=2),
    case("varying", "conv", "sgd", compression="bfloat16", overlap=False),
    case("one-peer-exp", "mlp", "sgd", compression="int8"),
    case("complete", "mlp", "sgd", SLOW, compression="int8", mix_every=2),
    case("varying", "mlp", "adamw", compression="int8", overlap=False),
    # More than one run in a parameter.
    case("varying", "wide", "sgd", SLOW, compression="int8"),
    # Tracked momenta, also of workers that sit a round out.
    case("varying", "mlp", "momentum", TRACKING),
    case("ring", "conv", "momentum", TRACKING, overlap=False),
    case("complete", "mlp", "momentum", TRACKING, dtype="float32"),
    case("one-peer-exp", "mlp", "momentum", TRACKING, compression="bfloat16"),
    case("ring", "wide", "momentum", TRACKING, compression="int8"),
    case("varying", "unused", "momentum", MomentumTracking(ahead=0), mix_every=2),
    # Accelerated gossip, in turns and with workers that sit out.
    case("varying", "mlp", "sgd", GASLoC(0.8, 0.3), mix_every=2),
    case("one-peer-exp", "mlp", "momentum", TRACKING, compression="low-rank:2,int8"),
    # Rules of users, one with a proposal of its own.
    case("varying", "mlp", "momentum", MomentumGossip(0.3)),
    case("complete", "mlp", "sgd", MomentumGossip(0.5), compression="int8", mix_every=2),
    case("varying", "mlp", "sgd", Scaled(64.0), compression="int8"),
    case("ring", "mlp", "sgd", Scaled(64.0), compression="bfloat16"),
]
# Arguments that a cluster does not have.
_OF_WORKERS = {"param_as_bucket_view", "bucket_size_in_mb"}


def simulated(one: Case) -> Case:
    return replace(one, options={key: value for key, value in one.options.items() if key not in _OF_WORKERS})


def over_sockets(rank: int, n: int, cases: list[Case]) -> list[Any]:
    return [train_really(rank, n, one) for one in cases]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES], ids=["all"])
def test_over_sockets_in_process_and_simulated(workers, cases):
    """Parameters and buffers after each of five steps, distances and bytes after the last."""
    sockets = workers(4, over_sockets, cases)
    for i, one in enumerate(cases):
        real = [worker[i] for worker in sockets]
        cluster = compare(simulated(one), 4, real)
        assert one.dtype != "float64" or cluster.bytes_sent == sum(sent for _, _, sent in real), one

        if i % 3:  # every third one is enough
            continue

        def thread(transport: Any, one: Case = one) -> Any:
            return train_really(transport.rank, 4, replace(one, options={**one.options, "transport": transport}))

        # Sums of a group are added up in another order.
        for rank, (steps, distance, _) in enumerate(run_replicas(4, thread)):
            assert distance == pytest.approx(real[rank][1], abs=1e-5)
            for t, (threads, processes) in enumerate(zip(steps, real[rank][0], strict=True)):
                for name in processes:
                    np.testing.assert_allclose(
                        threads[name], processes[name], rtol=0, atol=one.tolerance(), err_msg=f"{one} {rank} {t} {name}"
                    )


@pytest.mark.slow
def test_five_workers(workers):
    cases = [simulated(CASES[i]) for i in (0, 4, 8, 18)]
    hold(workers, 5, cases)


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
