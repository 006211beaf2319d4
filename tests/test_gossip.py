"""``gossip``: the user's own optimizer makes the rounds, and the model stays what it was."""

from __future__ import annotations

import copy
import gc
import re
import time
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decent_dp import gossip
from decent_dp.errors import PeerLostError
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import DRIVERS, SGD, Driven, assert_same, loss, net, some_and_all, values

ADAMW = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.0)


def alone(model: nn.Module, optimizer: Any, **options: Any) -> Any:
    """A replica of one worker; no process group is needed."""
    return gossip(model, optimizer, transport=InProcessTransport(), **options)


def train(model: Any, optimizer: Any, batches: Any, rank: int = 0) -> None:
    for t in batches:
        optimizer.zero_grad()
        loss(model, t, rank).backward()
        optimizer.step()


# -- the model stays the module it was ---------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.fixed = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("count", torch.randint(9, (2,)))
        self.register_buffer("hidden", torch.randn(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.norm(self.body(x)))) + self.fixed
        return result


def test_the_model_stays_the_same_module(tmp_path):
    model = Normed()
    optimizer = SGD(model.parameters())
    kind, keys, repr_ = type(model), list(model.state_dict()), repr(model)
    params, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    addresses = [p.data_ptr() for p in params.values()]
    start = values(model)
    replica = alone(model, optimizer)
    train(model, optimizer, range(3))
    assert (type(model), list(model.state_dict()), repr(model)) == (kind, keys, repr_)
    assert all(p is params[name] for name, p in model.named_parameters())
    assert all(b is buffers[name] for name, b in model.named_buffers())
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert replica.optimizers == [optimizer]
    assert repr(replica).startswith("Gossip(Normed, SGD, rank=0, topology=")

    # A state dict is torch's: the tensors themselves, each in a storage of its own.
    state = model.state_dict()
    assert [state[name].data_ptr() for name in params] == addresses
    save_file(state, tmp_path / "model.safetensors")
    for name, value in load_file(tmp_path / "model.safetensors").items():
        assert torch.equal(value, state[name])

    # After close it is the user's alone.
    replica.close()
    replica.close()
    train(model, optimizer, range(2))
    assert replica.stats().rounds == 3
    hooks = [module._state_dict_hooks for module in model.modules()] + [optimizer._optimizer_step_post_hooks]
    assert not any(hooks)
    assert not torch.equal(start["body.weight"], model.body.weight)
    alone(model, optimizer).close()


def test_loaded_optimizer_state_is_used():
    model, twin_ = net(), net()
    optimizer, other = ADAMW(model.parameters()), ADAMW(twin_.parameters())
    replica = alone(model, optimizer)
    for m, o in ((model, optimizer), (twin_, other)):
        train(m, o, range(2))
        o.load_state_dict(copy.deepcopy(o.state_dict()))
        train(m, o, range(2, 4))
    assert_same(model, twin_)
    assert replica.stats().rounds == 4


# -- on workers: events between the steps ------------------------------------------------------------------------------


def test_stats_and_flush_and_the_mean_for_good():
    models = [Normed() for _ in range(4)]

    def body(at: Any) -> list[dict[str, Tensor]]:
        model = models[at.rank]
        optimizer = SGD(model.parameters())
        replica = gossip(model, optimizer, topology="one-peer-exp", transport=at)
        assert (replica.stats().rounds, replica.stats().bytes_sent, replica.consensus_distance()) == (0, 0, 0.0)
        replica.flush()
        train(model, optimizer, range(5), at.rank)
        stats = replica.stats()
        assert (stats.updates, stats.rounds, stats.exchanges, stats.grad_norm) == (5, 5, 4, None)
        # Messages are rounded up.
        size = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        assert 5 * size <= stats.bytes_sent < 5 * (size + 64)
        assert 0 < stats.waited_s < 20

        found = [values(model)]
        statistics = model.norm.running_mean.clone()
        with replica.averaged(buffers=at.rank == 0):
            assert torch.equal(model.norm.running_mean, statistics) == (at.rank > 0)
        # The exchange in flight is mixed in now: pairs that have sent to each other.
        replica.flush()
        found.append(values(model))
        replica.flush()
        assert_same(values(model), found[1])
        assert replica.stats().exchanges == 5
        train(model, optimizer, [5], at.rank)
        replica.average_()
        found.append(values(model))
        assert replica.consensus_distance() < 1e-6
        # And what was in flight belongs to the old values.
        replica.flush()
        assert_same(values(model), found[2])
        train(model, optimizer, [7], at.rank)
        replica.close()
        return found

    results = run_replicas(4, body)
    own, flushed, averaged = zip(*results, strict=True)
    for name in own[0]:
        before, after = (torch.stack([one[name] for one in found]) for found in (own, flushed))
        torch.testing.assert_close(before.mean(0), after.mean(0), rtol=0, atol=1e-6)
        assert name == "fixed" or not torch.equal(before, after)
        assert all(torch.equal(one[name], averaged[0][name]) for one in averaged)


JOINS = [
    (batches, overlap, scaled)
    for batches in ([3, 5, 0], [0, 0, 2], [0, 0, 0], [40, 3, 3])
    for overlap in (True, False)
    for scaled in (True, False)
]


@some_and_all(JOINS)
def test_join(cases):
    start = net()

    def uneven(at: Any, batches: list[int], overlap: bool, scaled: bool) -> dict[str, Tensor]:
        model = copy.deepcopy(start)
        optimizers = [SGD(model[0].parameters()), ADAMW(model[2:].parameters())]
        scaler = torch.GradScaler("cpu", init_scale=2.0, enabled=scaled)
        replica = gossip(model, optimizers, topology="complete", overlap=overlap, scaler=scaler, transport=at)
        for epoch in (1, 2):
            with replica.join():
                for t in range(batches[at.rank]):
                    model.zero_grad()
                    scaler.scale(loss(model, t, at.rank)).backward()
                    for optimizer in optimizers:
                        scaler.step(optimizer)
                    scaler.update()
                    if t == 1:
                        with pytest.raises(RuntimeError, match=r"inside join\(\)"):
                            replica.flush()
            stats = replica.stats()
            assert (stats.updates, stats.rounds) == (epoch * batches[at.rank], epoch * max(batches))
        assert overlap or replica.consensus_distance() < 1e-5
        with replica.averaged():
            found = values(model)
        replica.close()
        return found

    for case in cases:
        first, *others = run_replicas(3, lambda at, case=case: uneven(at, *case))
        for found in others:
            assert_same(first, found)


# -- life --------------------------------------------------------------------------------------------------------------


def left(rank: int, n: int, how: str) -> Any:
    """The result of the call is not kept, and worker 0 finishes first."""
    model = net()
    optimizer = SGD(model.parameters())
    kept = gossip(model, optimizer, topology="ring")
    if how == "not kept":
        del kept
        gc.collect()
    train(model, optimizer, range(6), rank)
    if how == "closed":
        time.sleep(0.3 * rank)
        kept.close()
    if how == "dropped":
        del kept, optimizer
        found = values(model)
        del model
        gc.collect()
        return found
    return values(model)


def left_in_turn(rank: int, n: int, hows: list[str]) -> list[dict[str, Tensor]]:
    """The worker exits after the last."""
    return [left(rank, n, how) for how in hows]


def test_workers_that_exit_early(workers):
    """With and without close, kept or not: the same numbers, and no worker's last exchange breaks."""
    kept = workers(3, left_in_turn, ["kept"])
    for [first], others in zip(kept, workers(3, left_in_turn, ["closed", "dropped", "not kept"]), strict=True):
        for other in others:
            assert_same(first, other)


# -- what is refused ---------------------------------------------------------------------------------------------------


def scaler_step(scaler: Any, model: nn.Module, optimizer: Any, t: int, rank: int, spoil: bool = False) -> None:
    optimizer.zero_grad()
    scaler.scale(loss(model, t, rank) * (float("inf") if spoil else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()


def scaler_mistakes(rank: int, n: int, mistake: str, transport: Any = None) -> str:
    """Made by the last worker."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=mistake == "fused")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps the step
    wrong = rank == n - 1
    scaler, other = (torch.GradScaler("cpu", init_scale=2.0) for _ in range(2))
    passed = None if mistake in ("unknown", "fused") else scaler
    gossip(model, optimizer, scaler=passed, topology="complete", transport=transport)
    for t in range(6):
        if mistake == "unused" and wrong:
            train(model, optimizer, [t], rank)
        elif wrong:  # the first step is skipped on worker 0
            scaler_step(other if mistake == "other" else scaler, model, optimizer, t, rank, spoil=(t, rank) == (0, 0))
        elif passed is None:
            train(model, optimizer, [t], rank)
        else:
            scaler_step(scaler, model, optimizer, t, rank)
    return "continued"


MISTAKES = {
    "unknown": "gossip() was not given it: pass scaler=",
    "fused": "gossip() was not given it: pass scaler=",
    "other": "gossip() was given another: pass the one",
    "unused": "without an update() of the scaler that gossip() was given",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_scaler_that_gossip_does_not_know_alone(mistake):
    with pytest.raises(RuntimeError, match=re.escape(MISTAKES[mistake])):
        scaler_mistakes(0, 1, mistake, InProcessTransport())


@pytest.mark.parametrize("mistake", ["fused", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unused", "other"))])
def test_a_scaler_that_gossip_does_not_know(workers, mistake):
    other, wrong = workers.outcomes(2, scaler_mistakes, mistake)
    assert (wrong.error, other.error) == ("RuntimeError", PeerLostError.__name__)
    assert all(MISTAKES[mistake] in outcome.message for outcome in (other, wrong))
    assert "worker 1" in other.message
    assert max(outcome.seconds for outcome in (other, wrong)) < 45


def test_an_unknown_scaler_is_found_after_a_load():
    model = net()
    optimizer = SGD(model.parameters())
    replica = alone(model, optimizer)
    train(model, optimizer, range(2))
    saved = replica.state_dict()
    replica.close()
    again = alone(model, optimizer)
    again.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="was not given it"):
        scaler_step(torch.GradScaler("cpu", init_scale=2.0), model, optimizer, 0, 0)


def test_parameters_that_share_memory_are_refused():
    """They would be mixed twice in a round. A tied parameter is one parameter, and neighbours in one block do not overlap."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    block = torch.zeros(2, 4)
    model[0].bias.data, model[1].bias.data = block[0], block[1]
    model[2].weight = model[0].weight
    gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=InProcessTransport()).close()
    model[1].weight.data = model[0].weight.data
    with pytest.raises(ValueError, match=r"'0\.weight' and '1\.weight' share memory"):
        gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=InProcessTransport())


def test_flush_and_state_dict_are_refused_while_the_replica_is_the_mean():
    model = nn.Linear(3, 2)
    replica = gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=InProcessTransport())
    with replica.averaged():
        for call in (replica.flush, replica.state_dict):
            with pytest.raises(RuntimeError, match=r"inside averaged\(\)"):
                call()
    replica.flush()
    assert replica.state_dict()["round"] == 0
    replica.close()


@DRIVERS
def test_a_replica_that_is_closed_inside_join_stays_closed(driver):
    """Else a wrapper would go on without updates, and without a word."""
    driven = Driven(driver, nn.Linear(3, 2))
    with driven.user.join():
        driven.user.close()
    assert driven.replica.life.closed
    with pytest.raises(RuntimeError, match="was closed"):
        driven.user.averaged().__enter__()
