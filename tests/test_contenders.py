"""What others have published, as the benchmark of the time to the same loss has it: against the formulas in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.contenders import decode_e3m0, encode_e3m0, pack, pairs, unpack

N, STEPS = 4, 6


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moves(rank: int, step: int) -> list[Tensor]:
    """What an optimizer does to a matrix and a vector in a step."""
    return [0.01 * drawn(80, 70, seed=1000 * rank + step), 0.01 * drawn(70, seed=1000 * rank + step + 500)]


def params() -> list[nn.Parameter]:
    return [nn.Parameter(drawn(80, 70, seed=1)), nn.Parameter(drawn(70, seed=2))]


def flat(tensors: Any) -> np.ndarray:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).double().numpy()


def trained(rank: int, n: int, name: str, *options: Any) -> list[np.ndarray]:
    """The parameters after each step."""
    own = params()
    after, found = getattr(contenders, name)(own, *options), []
    for step in range(STEPS):
        with torch.no_grad():
            for param, move in zip(own, moves(rank, step), strict=True):
                param.add_(move)
        after()
        found.append(flat(own))
    getattr(after, "close", lambda: None)()
    dist.barrier()
    return found


def local(values: np.ndarray, rank: int, steps: range) -> np.ndarray:
    return values + sum(flat(moves(rank, step)) for step in steps)


def test_bits_are_packed():
    for bits in (1, 2, 4, 12, 14):
        numbers = torch.randint(0, 2**bits, (77,), generator=torch.Generator().manual_seed(bits))
        message = pack(numbers, bits)
        assert len(message) == -(-77 * bits // 8)
        assert torch.equal(unpack(message, bits, 77), numbers)


def test_e3m0_is_the_nearest_power_of_two():
    values = torch.cat([drawn(1000, seed=1), torch.zeros(1), 1e-3 * drawn(100, seed=2)])
    codes, scale = encode_e3m0(values)
    sizes = float(scale) * np.array([0.0, *(2.0**e for e in range(-6, 1))])
    found, expected = decode_e3m0(codes, scale).numpy(), values.numpy()
    nearest = np.abs(np.abs(expected)[:, None] - sizes).min(1)
    assert np.allclose(np.abs(found - expected), nearest, atol=1e-6)
    assert int(codes.max()) < 16


def test_partners_are_mutual():
    for number in range(5):
        partner = pairs(8, number)
        assert all(partner[partner[i]] == i != partner[i] for i in range(8))
    assert pairs(8, 1) != pairs(8, 2)


def test_diloco_and_snoo(workers):
    """Nesterov momentum on the movement of three steps; of the mean, and of a worker alone."""
    found = workers(N, trained, "OuterMean", 3)
    alone = workers(N, trained, "Snoo", 3)
    for ranks, given in (([range(N)] * N, found), ([[rank] for rank in range(N)], alone)):
        for rank in range(N):
            anchor, momentum = flat(params()), 0.0
            for start in (0, 3):
                moved = np.mean([anchor - local(anchor, other, range(start, start + 3)) for other in ranks[rank]], axis=0)
                momentum = 0.9 * momentum + moved
                anchor = anchor - 0.7 * (moved + 0.9 * momentum)
                assert np.abs(given[rank][start + 2] - anchor).max() < 1e-5


def test_muloco_keeps_what_few_bits_leave_out(workers):
    """What is lost in one exchange is sent in the next: the sum of what was sent is the sum of the movement."""
    found = workers(2, trained, "OuterMean", 1, 4, 1.0, 0.0)
    exact = flat(params()) + np.mean([sum(flat(moves(rank, step)) for step in range(STEPS)) for rank in range(2)], axis=0)
    assert np.array_equal(found[0][-1], found[1][-1])
    last = np.abs(flat(moves(0, 0))).max()
    assert np.abs(found[0][-1] - exact).max() < 0.5 * last  # a step of the code or two, of 2/15 of the movement


def sparse(memory: np.ndarray, kept: int) -> np.ndarray:
    """The largest values of each chunk of a tensor, as two sizes per tensor, with their signs."""
    sent = np.zeros_like(memory)
    for start, end in ((0, 5600), (5600, 5670)):
        places = []
        for first in range(start, end, 4096):
            part = memory[first : min(first + 4096, end)]
            most = 70 if start == 5600 else min(kept, len(part))
            places += (first + np.argsort(-np.abs(part))[:most]).tolist()
        sizes = np.abs(memory[places])
        large = sizes > np.sort(sizes)[(len(sizes) - 1) // 2]
        low = sizes[~large].mean()
        high = sizes[large].mean() if large.any() else low
        sent[places] = np.sign(memory[places]) * np.where(large, high, low)
    return sent


def test_sparseloco(workers):
    found = workers(N, trained, "SparseLoCo", 2, 64)
    anchor, memories = flat(params()), [np.zeros(5670) for _ in range(N)]
    for start in (0, 2, 4):
        total = np.zeros(5670)
        for rank, memory in enumerate(memories):
            memory *= 0.95
            memory += anchor - local(anchor, rank, range(start, start + 2))
            sent = sparse(memory, 64)
            memory -= sent
            total += sent
        anchor = anchor - total / N
        for rank in range(N):
            assert np.abs(found[rank][start + 1] - anchor).max() < 1e-5
    assert 0 < np.count_nonzero(anchor - flat(params())) < 0.3 * 5670


def test_noloco(workers):
    found = workers(N, trained, "NoLoCo", 3)
    slow, momenta = [flat(params()) for _ in range(N)], [np.zeros(5670) for _ in range(N)]
    for number, start in enumerate((0, 3), 1):
        partner = pairs(N, number)
        moved = [local(values, rank, range(start, start + 3)) - values for rank, values in enumerate(slow)]
        new = []
        for i, j in enumerate(partner):
            pull = slow[i] - (slow[i] + slow[j]) / 2
            momenta[i] = 0.5 * momenta[i] + 0.7 * (moved[i] + moved[j]) / 2 - 1.0 * pull
            new.append(slow[i] + momenta[i])
        slow = new
        for rank in range(N):
            assert np.abs(found[rank][start + 2] - slow[rank]).max() < 1e-5


def test_factored_gossip(workers):
    found = workers(N, trained, "FactoredGossip", 3)
    slow, momenta = [flat(params()) for _ in range(N)], [np.zeros(5670) for _ in range(N)]
    for number, start in enumerate((0, 3), 1):
        mean, stepped = np.mean(slow, axis=0), []
        for rank, values in enumerate(slow):
            moved = values - local(values, rank, range(start, start + 3))
            momenta[rank] = 0.9 * momenta[rank] + moved
            stepped.append(mean - 0.7 * (moved + 0.9 * momenta[rank]))
        slow = [(stepped[i] + stepped[j]) / 2 for i, j in enumerate(pairs(N, number))]
        for rank in range(N):
            assert np.abs(found[rank][start + 2] - slow[rank]).max() < 1e-5


def streamed(rank: int, n: int) -> list[np.ndarray]:
    own = params()
    after, found = contenders.StreamingDiLoCo([own], 3, 1), []
    for step in range(4):
        with torch.no_grad():
            for param, move in zip(own, moves(rank, step), strict=True):
                param.add_(move)
        after()
        found.append(flat(own))
    after.close()
    dist.barrier()
    return found


def test_streaming_diloco(workers):
    """A fragment is sent every third step, and a step later becomes half its own and half the common one."""
    found = workers(2, streamed)
    start = flat(params())
    assert np.abs(found[0][2] - local(start, 0, range(3))).max() < 1e-5  # nothing has come yet
    moved = np.mean([-local(np.zeros(5670), rank, range(3)) for rank in range(2)], axis=0)
    anchor = start - 0.4 * 1.9 * moved
    expected = 0.5 * local(start, 0, range(4)) + 0.5 * anchor
    # Two roundings to powers of two, of at most a third each.
    assert np.abs(found[0][3] - expected).max() < 0.5 * 0.4 * 1.9 * np.abs(moved).max()
    assert np.corrcoef(found[0][3] - local(start, 0, range(4)), expected - local(start, 0, range(4)))[0, 1] > 0.9


def demo_steps(rank: int, n: int) -> list[np.ndarray]:
    own, found = params(), []
    optimizer = contenders.DeMo(own, lr=0.01, most=8)
    for step in range(3):
        for param, move in zip(own, moves(rank, step), strict=True):
            param.grad = move
        optimizer.step()
        found.append(flat(own))
    return found


def test_demo(workers):
    """Signs of the mean of the largest coefficients; a momentum is left without those that were sent."""
    found = workers(2, demo_steps)
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))
    steps = np.diff([flat(params()), *found[0]], axis=0)
    assert np.allclose(np.abs(steps[np.abs(steps) > 1e-6]), 0.01, atol=1e-6)
    basis = contenders.cosines(64).double().numpy()
    assert np.abs(basis @ basis.T - np.eye(64)).max() < 1e-6
    # The first step of the vector, of 35 values twice.
    rows = []
    for rank in range(2):
        coefficients = 0.01 * moves(rank, 0)[1].double().numpy().reshape(2, 35) @ contenders.cosines(35).double().numpy().T
        top = np.argsort(-np.abs(coefficients), axis=1)[:, :8]
        kept = np.zeros_like(coefficients)
        np.put_along_axis(kept, top, np.take_along_axis(coefficients, top, axis=1), axis=1)
        rows.append(kept)
    count = np.maximum(sum(row != 0 for row in rows), 1)
    expected = -0.01 * np.sign(sum(rows) / count @ contenders.cosines(35).double().numpy()).reshape(-1)
    assert np.mean(np.abs(steps[0][5600:] - expected) < 1e-6) > 0.97  # values are sent in bfloat16


def test_muon_is_that_of_torch():
    weight = nn.Parameter(drawn(64, 128, seed=1))
    twin = nn.Parameter(weight.detach().clone())
    ours = contenders.Muon([("blocks.0.weight", weight), ("head", nn.Parameter(torch.ones(3)))], lr=0.02)
    theirs = torch.optim.Muon([twin], lr=0.02, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        weight.grad = drawn(64, 128, seed=step + 10)
        twin.grad = weight.grad.clone()
        ours.param_groups[1]["params"][0].grad = torch.ones(3)
        ours.step()
        theirs.step()
    assert (weight - twin).abs().max() < 0.02 * (drawn(64, 128, seed=1) - twin).abs().max() + 2e-3


@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_an_orthogonal_matrix(shape):
    values = torch.linalg.svdvals(contenders.orthogonal(drawn(*shape, seed=1), contenders.Muon.COEFFICIENTS))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
