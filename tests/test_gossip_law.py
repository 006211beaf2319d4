"""The numbers of ``gossip``: those of its law, computed in NumPy, and those of the wrapper."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from decent_dp import gossip
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.topo import Topology, TopologyReg
from tests.helpers import SGD, batch, net, some_and_all
from tests.test_law import AdamWTwin, Linear, SgdTwin, Varying, data, gradient, matrix
from tests.test_mix_every import Part, mix_of, parts

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)

# -- the law, in NumPy -------------------------------------------------------------------------------------------------

LAW = ["complete", "ring", "one-peer-exp", "base-2", "varying"]
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (partial(torch.optim.SGD, lr=0.1, momentum=0.9), SgdTwin),
    "adamw": (partial(torch.optim.AdamW, lr=0.05, betas=(0.9, 0.99), weight_decay=0.1), AdamWTwin),
}
CASES = [
    (name, optimizer, overlap, mix_every)
    for name in LAW
    for optimizer in OPTIMIZERS
    for overlap in (True, False)
    for mix_every in ((1, 3) if name in ("complete", "base-2") else (1,))
]
LAW_STEPS = 7


def skips(rank: int, t: int) -> bool:
    """The steps that a scaler skips, in the twins."""
    return (rank, t) in ((1, 2), (3, 2), (0, 5))


def twin(topology: Topology, n: int, step: Any, overlap: bool, mix_every: int, skipping: bool = False) -> list[np.ndarray]:
    """x <- step(x); x <- x + Σ w (r - q) for what was sent a round ago (at once without overlap); send x."""
    start = np.random.default_rng(7).normal(size=(5, 3))
    x = [start.copy() for _ in range(n)]
    taken = [0] * n
    buckets = parts(mix_every)

    def finish(part: Part) -> None:
        w = matrix(topology.round(part.at // mix_every), n)
        for i in range(n):
            x[i][part.rows] += sum(w[i, j] * (part.sent[j] - part.sent[i]) for j in range(n))
        part.sent = None

    for t in range(LAW_STEPS):
        for i in range(n):
            if not (skipping and skips(i, t)):
                x[i] = step(i, taken[i], x[i], gradient(x[i], i, t))
                taken[i] += 1
        for part in buckets:
            again = mix_of(t, mix_every, part.offset) is not None
            if overlap and part.sent is not None and (again or t - part.at >= part.time):
                finish(part)
            if again:
                part.sent, part.at = [xi[part.rows].copy() for xi in x], t
                if not overlap:
                    finish(part)
    return x


def law_case(rank: int, case: tuple[str, str, bool, int], size: float) -> np.ndarray:
    name, optimizer, overlap, mix_every = case
    model = Linear()
    made = OPTIMIZERS[optimizer][0](model.parameters())
    replica = gossip(model, made, topology=name, overlap=overlap, mix_every=mix_every, bucket_size_in_mb=size)
    for t in range(LAW_STEPS):
        a, b = (torch.from_numpy(array) for array in data(rank, t))
        made.zero_grad()
        (model(a) - b).square().mean().backward()
        made.step()
    assert replica.stats().updates == replica.stats().rounds == LAW_STEPS
    replica.close()
    return torch.cat([p.detach() for p in model.parameters()]).numpy()


def law_with_a_scaler(rank: int, overlap: bool) -> np.ndarray:
    model = Linear()
    optimizer = OPTIMIZERS["adamw"][0](model.parameters())
    scaler = torch.GradScaler("cpu", init_scale=2.0**10)
    replica = gossip(model, optimizer, topology="one-peer-exp", overlap=overlap, scaler=scaler)
    for t in range(LAW_STEPS):
        a, b = (torch.from_numpy(array) for array in data(rank, t))
        optimizer.zero_grad()
        value = (model(a) - b).square().mean()
        scaler.scale(value * float("inf") if skips(rank, t) else value).backward()
        scaler.step(optimizer)
        scaler.update()
    assert replica.stats().rounds == LAW_STEPS
    assert replica.stats().updates == LAW_STEPS - sum(skips(rank, t) for t in range(LAW_STEPS))
    replica.close()
    return torch.cat([p.detach() for p in model.parameters()]).numpy()


def law(rank: int, n: int, cases: list[tuple[str, str, bool, int]]) -> Any:
    TopologyReg.registry["varying"] = Varying
    found = [law_case(rank, case, (25, 1e-6)[i % 2]) for i, case in enumerate(cases)]
    return found, [law_with_a_scaler(rank, overlap) for overlap in (True, False)]


def made(name: str, n: int) -> Topology:
    return (Varying if name == "varying" else TopologyReg.registry[name])(1, world_size=n, rank=0)


@some_and_all(CASES)
def test_the_law_on_four_workers_equals_numpy(workers, cases):
    results = workers(4, law, cases)
    for i, case in enumerate(cases):
        name, optimizer, overlap, mix_every = case
        want = twin(made(name, 4), 4, OPTIMIZERS[optimizer][1](4), overlap, mix_every)
        for rank in range(4):
            np.testing.assert_allclose(results[rank][0][i], want[rank], rtol=0, atol=1e-12, err_msg=f"{case} worker {rank}")
    for i, overlap in enumerate((True, False)):
        want = twin(made("one-peer-exp", 4), 4, AdamWTwin(4), overlap, 1, skipping=True)
        for rank in range(4):
            np.testing.assert_allclose(results[rank][1][i], want[rank], rtol=0, atol=1e-12, err_msg=f"scaler, worker {rank}")


# -- the wrapper's numbers ---------------------------------------------------------------------------------------------

BESIDE = {
    2: [("one-peer-exp", None, True, 1), ("complete", "int8", True, 1), ("ring", "bfloat16", False, 1)],
    3: [("ring", None, True, 4), ("complete", None, False, 1), ("base-2", "int8", False, 2), ("base-2", None, True, 1)],
    4: [("one-peer-exp", None, True, 1), ("base-2", "bfloat16", True, 1), ("one-peer-exp", "int8", True, 3)],
}


def beside(rank: int, n: int, steps: int, makes: list[list[Any]]) -> list[float]:
    """The largest difference between the parameters of the two, after each of the steps."""
    found = []
    for (topology, compression, overlap, mix_every), optimizers in zip(BESIDE[n], makes, strict=True):
        for make in optimizers:
            options = {"topology": topology, "compression": compression, "overlap": overlap, "mix_every": mix_every}
            # In float64, as a lossy compression turns rounding into steps of its own.
            kind = torch.float32 if compression is None else torch.float64
            ours, theirs = net(rank).to(kind), net(rank).to(kind)
            optimizer = make(ours.parameters())
            replica = gossip(ours, optimizer, **options)
            wrapper = DecentralizedDataParallel(theirs, make, **options)
            worst = 0.0
            for t in range(steps):
                x, y = (tensor.to(kind) for tensor in batch(t, rank))
                (ours(x) - y).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                (wrapper(x) - y).square().mean().backward()
                for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
                    worst = max(worst, float((a - b).detach().abs().max()))
            got, want = replica.stats(), wrapper.stats()
            assert (got.updates, got.rounds, got.bytes_sent) == (want.updates, want.rounds, want.bytes_sent)
            # 'complete' without overlap ends with equal replicas, up to rounding.
            assert replica.consensus_distance() > 0 or topology == "complete"
            replica.close()
            wrapper.close()
            found.append(worst)
    return found


def test_steps_equal_the_wrappers(workers):
    for found in workers(3, beside, 12, [[SGD], [ADAMW], [SGD], [ADAMW]]):
        assert max(found) <= 1e-6, found


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 4])
def test_fifty_steps_equal_the_wrappers(workers, n):
    for found in workers(n, beside, 50, [[SGD, ADAMW]] * len(BESIDE[n])):
        assert max(found) <= 1e-6, found
