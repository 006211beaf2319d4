"""A node as one replica: R nodes of L workers equal R workers that see the batches of the nodes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import decent_dp
from decent_dp.optim import GossipAdamW
from decent_dp.transport import run_replicas

L = 2
STEPS = 7


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(t: int, worker: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * t + worker)
    return torch.randn(4, 5, generator=generator), torch.randn(4, 3, generator=generator)


def train(gossip: Any, model: Any, optimizer: Any, workers: list[int]) -> list[Tensor]:
    for t in range(STEPS):
        optimizer.zero_grad()
        x, y = map(torch.cat, zip(*(batch(t, worker) for worker in workers), strict=True))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    gossip.flush()
    own = [p.detach().clone() for p in model.parameters()]
    with gossip.averaged():
        mean = [p.detach().clone() for p in model.parameters()]
    distance = gossip.consensus_distance()
    gossip.close()
    return own, mean, distance


OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "gossip-adamw": partial(GossipAdamW, lr=0.01),
}


def of_nodes(rank: int, n: int, optimizer: str, options: dict[str, Any]) -> Any:
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters())
    gossip = decent_dp.gossip(model, made, local_world_size=L, replica="node", **options)
    return train(gossip, model, made, [rank])


def of_workers(transport: Any, optimizer: str, options: dict[str, Any]) -> Any:
    model = net()
    made = OPTIMIZERS[optimizer](model.parameters())
    gossip = decent_dp.gossip(model, made, transport=transport, **options)
    return train(gossip, model, made, list(range(transport.rank * L, (transport.rank + 1) * L)))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_equal_workers(workers, nodes, optimizer):
    options: dict[str, Any] = {}
    found = workers(nodes * L, of_nodes, optimizer, options)
    wanted = run_replicas(nodes, lambda transport: of_workers(transport, optimizer, options))
    for rank, (own, mean, distance) in enumerate(found):
        theirs = wanted[rank // L]
        for a, b in zip(own + mean, theirs[0] + theirs[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert distance == pytest.approx(theirs[2], rel=1e-4)
