"""Each compression between workers: the mean over them stays, distances shrink, and processes equal threads."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import decent_dp
from decent_dp.compression import COMPRESSIONS, Block, int8, lattice
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.transport import InProcessTransport, Transport, run_replicas
from tests.helpers import SGD, loss, net, values

TOPOLOGIES = ["one-peer-exp", "ring", "complete", "alternating-exp-ring"]
SIZES = [(300, 230), (190,), (), (0, 3), (5, 7)]  # of the parameters; the first is more than one run


class Bag(nn.Module):
    """Parameters whose gradients are ``pull``."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.params = nn.ParameterList([torch.randn(size, generator=draw).to(dtype) for size in SIZES])


def flat(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy()


def shake(model: nn.Module, rank: int, distance: float) -> None:
    draw = torch.Generator().manual_seed(100 + rank)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(distance * torch.randn(param.shape, generator=draw).to(param.dtype))


def train(
    rank: int,
    topology: str,
    compression: str | None,
    *,
    transport: Any = None,
    lr: float = 0.0,
    rounds: int = 6,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> tuple[np.ndarray, np.ndarray, Any]:
    """The parameters before and after some rounds, made far apart first; with a rate, gradients drag them further."""
    inner = Bag(0, dtype)
    model = DecentralizedDataParallel(
        inner,
        partial(torch.optim.SGD, lr=lr),
        topology=topology,
        compression=compression,
        transport=transport,
        _local_world_size=2,
        **how,
    )
    shake(inner, rank, 0.01)
    before = flat(inner)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(rounds):
        for param in inner.parameters():
            param.grad = torch.randn(param.shape, generator=draw).to(dtype)
        model.update()
    stats = model.stats()
    model.close()
    return before, flat(inner), stats


def mixing(transport: InProcessTransport) -> Any:
    return {
        (topology, compression): train(
            transport.rank,
            topology,
            compression,
            transport=transport,
            overlap=False,
            rounds=8 if topology == "ring" else 6,
        )
        for topology in TOPOLOGIES
        for compression in COMPRESSIONS
    }


def test_mixing_keeps_the_mean_and_brings_replicas_together():
    found = run_replicas(4, mixing)
    for (topology, compression), (_, _, stats) in found[0].items():
        before, after = (np.stack([f[topology, compression][i] for f in found]) for i in range(2))
        apart = [np.sqrt(np.mean(np.sum((x - x.mean(0)) ** 2, 1))) for x in (before, after)]
        moved = np.abs(after.mean(0) - before.mean(0)).max()
        case = topology, compression, moved, apart
        assert apart[1] < 0.5 * apart[0] if compression != "int8" else apart[1] < 0.8 * apart[0], case
        if compression is None and topology in ("one-peer-exp", "complete"):
            assert apart[1] < 1e-3 * apart[0], case
        # Of edges of two the differences cancel exactly, and what is left is the rounding of the sums.
        rounding = 8 * 4 * 2.0**-24
        if topology in ("one-peer-exp", "ring") or compression is None:
            assert moved <= rounding, case
        else:
            # A few roundings of the mean, on int8 those of the first, widest range; and over all parameters nothing.
            step = 2.0**-7 if compression == "bfloat16" else 4 / 127
            assert moved <= 4 * step * np.abs(before).max(), case
            assert abs((after.mean(0) - before.mean(0)).mean()) <= 0.003, case
        assert stats.rounds in (6, 8)


LAYOUTS: list[dict[str, Any]] = [
    {},
    {"param_as_bucket_view": False},
    {"bucket_size_in_mb": 1e-4},
    {"bucket_size_in_mb": 1e-3, "param_as_bucket_view": False},
]
CASES = [
    *((topology, compression, {}) for topology in ("ring", "complete") for compression in COMPRESSIONS),
    *(("complete", "int8", layout) for layout in LAYOUTS),
    *(("ring", "int8", layout) for layout in LAYOUTS),
    ("ring", "int8", {"overlap": False}),
]


SOME_CASES = [
    ("ring", "int8", {}),
    ("ring", "int8", LAYOUTS[3]),
    ("complete", "bfloat16", {"overlap": False}),
]


def all_of(rank: int, n: int, cases: list[Any], rounds: int, transport: Any = None) -> list[np.ndarray]:
    return [
        train(rank, topology, compression, transport=transport, lr=0.02, rounds=rounds, **how)[1]
        for topology, compression, how in cases
    ]


@pytest.mark.parametrize(
    ("n", "cases", "rounds"),
    [(3, SOME_CASES, 4), *(pytest.param(n, CASES, 6, marks=pytest.mark.slow) for n in (2, 3, 5))],
    ids=["3-some", "2", "3", "5"],
)
def test_processes_equal_threads_in_every_layout(workers, n, cases, rounds):
    processes = workers(n, all_of, cases, rounds)
    in_threads = run_replicas(n, lambda transport: all_of(transport.rank, n, cases, rounds, transport))
    for number, (topology, compression, how) in enumerate(cases):
        threads = [found[number] for found in in_threads]
        for rank in range(n):
            assert np.array_equal(processes[rank][number], threads[rank]), (topology, compression, how, rank)
        if compression == "int8" and how in LAYOUTS:
            plain = next(i for i, case in enumerate(cases) if case == (topology, compression, {}))
            for rank in range(n):
                one, other = processes[rank][number], processes[rank][plain]
                if topology == "ring":
                    assert np.array_equal(one, other), (how, rank)
                else:  # in another bucket a chunk of a group may have another root
                    assert np.abs(one - other).max() <= 0.05, (how, rank)


def spreading(transport: InProcessTransport) -> Any:
    rank = transport.rank
    found = {}
    for topology in ("one-peer-exp", "complete"):
        for compression in COMPRESSIONS:
            inner = Bag(0)
            sgd = partial(torch.optim.SGD, lr=0.0)
            how = {"topology": topology, "compression": compression, "overlap": False}
            model = DecentralizedDataParallel(inner, sgd, transport=transport, **how)
            shake(inner, rank, 0.01)
            with torch.no_grad():
                if rank == 1:
                    inner.params[0][0, 3], inner.params[1][2] = math.nan, math.inf
            before = values(inner)
            for param in inner.parameters():
                param.grad = torch.zeros_like(param)
            model.update()
            bad = [int((~p.isfinite()).sum()) for p in inner.parameters()]
            moved = not torch.equal(inner.params[4], before["params.4"])
            model.close()
            found[topology, compression] = (bad, moved)
    return found


def test_values_that_are_not_finite_do_not_spread():
    """Its peers sit out the round; other pairs mix."""
    for rank, found in enumerate(run_replicas(4, spreading)):
        for (topology, compression), (bad, moved) in found.items():
            assert bad == [int(rank == 1), int(rank == 1), 0, 0, 0], (rank, topology, compression, bad)
            assert moved == (topology != "complete" and rank > 1), (rank, topology, compression)


def disagreeing(rank: int, n: int) -> list[tuple[str, str]]:
    found = []
    for compression in ("int8" if rank == 1 else "bfloat16", "int9", "bf16" if rank else None):
        try:
            DecentralizedDataParallel(net(), SGD, topology="ring", compression=compression)
        except ValueError as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_workers_that_disagree(workers):
    found = workers(3, disagreeing)
    assert found[0] == found[1] == found[2]
    (kind, message), (unknown, words), (_, one) = found[0]
    assert kind == "DisagreementError"
    assert "compression" in message
    assert "int8" in message
    assert "bfloat16" in message
    assert unknown == "ValueError"
    assert "did you mean 'int8'?" in words
    assert "did you mean 'bfloat16'?" in one


def loading(transport: Transport, topology: str) -> Any:
    rank, n, inner = transport.rank, transport.world_size, Bag(0)
    sgd = partial(torch.optim.SGD, lr=0.0)
    model = DecentralizedDataParallel(inner, sgd, topology=topology, compression="int8", transport=transport)
    shake(inner, rank, 1e-3)

    def go_on(rounds: int) -> float:
        for _ in range(rounds):
            for param in inner.parameters():
                param.grad = torch.zeros_like(param)
            model.update()
        return model.consensus_distance()

    close = go_on(8)
    # Replicas are suddenly far apart: much further than anybody expects.
    model.load_state_dict({name: value + 3.0 * rank for name, value in inner.state_dict().items()})
    distances = [model.consensus_distance()]
    expected = 3.0 * (n - 1) / 2
    for _ in range(4):
        distances.append(go_on(6))
    rejected = sum(bucket.compression.rejected for bucket in model.replica.engine.buckets)
    with model.averaged():
        off = float((inner.params[1] - Bag(0).params[1]).detach().mean()) - expected
    stats = model.stats()
    model.close()
    return close, distances, rejected, off, stats


@pytest.mark.parametrize("topology", ["one-peer-exp", "complete"])
def test_after_a_load_ranges_are_exceeded_and_recover(replicas, topology):
    for close, distances, rejected, off, stats in replicas(4, loading, topology):
        assert close < 1
        assert distances[0] > 100
        assert distances[-1] < 0.02 * distances[0], distances
        assert rejected > 0
        assert abs(off) < (0.01 if topology != "complete" else 0.2)
        assert stats.rejected == rejected


def traced(rank: int, n: int) -> list[dict[str, set[int]]]:
    """The names in a trace, each with the threads that it was seen in: of this thread alone, and of all."""
    model = DecentralizedDataParallel(net(rank), SGD, topology="one-peer-exp", compression="int8")
    loss(model, 0, rank).backward()
    found = []
    for everywhere in (False, True):
        settings = _ExperimentalConfig(profile_all_threads=everywhere)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=settings) as trace:
            for t in range(1, 4):
                loss(model, t, rank).backward()
        names: dict[str, set[int]] = {}
        for event in trace.events():
            if event.name.startswith("decent_dp."):
                names.setdefault(event.name.removeprefix("decent_dp."), set()).add(event.thread)
        found.append(names)
    model.close()
    return found


def test_names_in_a_trace(workers):
    if "profile_all_threads" not in str(_ExperimentalConfig.__init__.__doc__):
        pytest.skip("this torch traces no other threads")
    for own, every in workers(2, traced):
        assert set(own) == {"wait", "mix", "step"}
        assert set(every) == {"wait", "mix", "step", "encode", "send"}
        assert every["encode"] == every["send"]  # the thread that moves the bytes,
        assert not every["send"] & every["step"]  # beside training


def beside_a_slower_partner(rank: int, n: int, compression: str) -> tuple[float, np.ndarray, np.ndarray]:
    """The seconds of a step while the partner has not come to its own; the parameters that were sent, and after the mix."""
    inner = Bag(0)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.0)
    mixing = decent_dp.gossip(inner, optimizer, topology="one-peer-exp", compression=compression)

    def step() -> None:
        for param in inner.parameters():
            param.grad = torch.zeros_like(param)
        optimizer.step()

    shake(inner, rank, 0.01)  # so that distances are known
    step()
    mixing.flush()
    shake(inner, rank, 0.01)
    mixing.gather(None)
    time.sleep(rank)
    began = time.monotonic()
    step()
    seconds, sent = time.monotonic() - began, flat(inner)
    with torch.no_grad():
        for param in inner.parameters():
            param.add_(0.0 if rank else 0.05)
    mixing.flush()
    mixing.close()
    return seconds, sent, flat(inner) - (0.0 if rank else 0.05)


@pytest.mark.parametrize("compression", ["int8", "low-rank:2,int8"])
def test_a_step_does_not_wait_for_a_slower_partner(workers, compression):
    """Although nothing can be coded before the partner's hint has come. What was there in the step is sent."""
    (seconds, *first), (_, *second) = workers(2, beside_a_slower_partner, compression)
    assert seconds < 0.5
    np.testing.assert_allclose(first[1] + second[1], first[0] + second[0], atol=1e-5)
    whole = slice(math.prod(SIZES[0]), math.prod(SIZES[0]) + SIZES[1][0])  # sent as it is by all compressions
    before, after = (np.abs(first[place] - second[place])[whole].max() for place in (0, 1))
    assert after < 0.1 * before


def test_a_block_that_is_never_mixed_is_warned_of_once(monkeypatch, caplog):
    real = lattice._compare

    def apart(block: Block, *given: Any) -> tuple[bool, float]:
        certain, most = real(block, *given)
        return certain and block.numel != 144, most

    monkeypatch.setattr(lattice, "_compare", apart)
    monkeypatch.setattr(int8, "load_numba", lambda: None)

    def work(transport: InProcessTransport) -> int:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", compression="int8", transport=transport)
        for t in range(15):
            loss(model, t, transport.rank).backward()
            if t == 9:  # nine exchanges have been finished
                transport.control.gather(None)
                assert caplog.text == ""
                transport.control.gather(None)
        found = model.stats().rejected
        model.close()
        return found

    assert all(found >= 14 for found in run_replicas(2, work))
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 2  # of each worker
    assert all("parameter '2.weight' was not mixed, or not all of it, in the last 10 exchanges" in text for text in warned)
    assert all("compression='int8'" in text for text in warned)
