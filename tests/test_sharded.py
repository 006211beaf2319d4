"""Sharded replicas are equal to unsharded ones: numbers."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch

import decent_dp
from decent_dp.errors import NonFiniteError
from decent_dp.optim import GossipAdamW
from decent_dp.rules import MomentumTracking, OuterNesterov
from decent_dp.transport import run_replicas
from tests.sharded_cases import (
    ADAMW,
    SGD,
    Case,
    Odd,
    Sharded,
    Unsharded,
    assert_close,
    ended,
    mesh_of,
    needs_shards,
    shard,
    step,
    train,
    values,
    whole,
    zero_grad,
)

pytestmark = needs_shards

CASES = {
    "base-2": Case({"topology": "base-2"}, fsdp={"reshard_after_forward": True}),
    "one-peer-exp": Case({"topology": "one-peer-exp", "overlap": False}, ADAMW, fsdp={"reshard_after_forward": False}),
    "complete": Case({"topology": "complete", "bucket_size_in_mb": 1e-4}, ADAMW),
    "mix_every": Case({"mix_every": 3}, clip=0.3),
    "window": Case({"topology": "complete"}, window=2, clip=0.3, fsdp={"reshard_after_forward": False}),
    "bf16": Case({}, ADAMW, bf16=True),
    "outer": Case({"rule": OuterNesterov(momentum=0.6), "topology": "complete", "mix_every": 4}, ADAMW),
    # How it rounds depends on where a tensor is cut.
    "bfloat16": Case({"compression": "bfloat16"}, tolerance=0.02),
    "int8": Case({"compression": "int8", "topology": "complete", "overlap": False}, tolerance=0.05, steps=15),
    "gossip-adamw": Case({}, partial(GossipAdamW, lr=0.01), clip=0.3, steps=11),
    "tracking": Case({"topology": "complete"}, partial(GossipAdamW, lr=0.01, tracking=True), clip=0.3),
    "tracking, sgd": Case({"rule": MomentumTracking()}, fsdp={"reshard_after_forward": False}, steps=11),
    # Several of them together, for the fast tests.
    "outer in windows": Case(
        {"rule": OuterNesterov(momentum=0.6), "topology": "complete", "mix_every": 2},
        ADAMW,
        window=2,
        clip=0.3,
        bf16=True,
        fsdp={"reshard_after_forward": False},
        steps=9,
    ),
}


def body(rank: int, n: int, plan: list[tuple[int, int, str]]) -> list[Any]:
    found = []
    for replicas, shards, name in plan:
        # Seeds differ: all replicas become the first.
        mesh = mesh_of(replicas, shards)
        found.append(train(Sharded(CASES[name], mesh, seed=mesh.get_coordinate()[0])))
    return found


def unsharded(transport: Any, case: Case, shards: int) -> Any:
    return train(Unsharded(case, transport, shards, seed=transport.rank))


def assert_equal_to_one_worker(found: list[Any], plan: list[tuple[int, int, str]], cases: dict[str, Case]) -> Any:
    """Compares the results of all workers, by case, with those of replicas of one worker; returns the plan."""
    for number, (replicas, shards, name) in enumerate(plan):
        wanted = run_replicas(replicas, partial(unsharded, case=cases[name], shards=shards))
        for rank, own in enumerate(found):
            where = f"{replicas} x {shards}, {name}, worker {rank}"
            assert_close(own[number], wanted[rank // shards], cases[name].tolerance, where)
    return plan


FOUR = [(2, 2, name) for name in CASES]
PLANS = [
    pytest.param(4, [(2, 2, name) for name in ("outer in windows", "tracking", "tracking, sgd")], id="some"),
    pytest.param(4, FOUR, id="4", marks=pytest.mark.slow),
    pytest.param(6, [(2, 3, "bf16"), (2, 3, "outer"), (3, 2, "complete")], id="6", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("n", "plan"), PLANS)
def test_equal_to_unsharded_replicas(workers, n, plan):
    found = workers(n, body, plan)
    for number, (_, _, name) in enumerate(assert_equal_to_one_worker(found, plan, CASES)):
        distances = {found[rank][number]["distance"] for rank in range(n)}
        assert len(distances) == 1, (name, distances)


# -- what else happens in a run --------------------------------------------------------------------------------------------


def closure(run: Any) -> None:
    def again(t: int) -> Any:
        zero_grad(run)
        run.gradients(t)

    for t in range(5):
        run.optimizers[0].step(lambda t=t: again(t))


def schedule(run: Any) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizers[0], 3, 0.5)
    for t in range(5):
        step(run, t)
        scheduler.step()


def load(run: Any) -> None:
    kept = {}
    for t in range(6):
        step(run, t)
        if t == 2:
            kept = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
        if t == 3:
            run.looked_at(t)
            run.model.load_state_dict(kept)
            if run.replica == 0:  # a part of it again: nothing is in flight for it any more
                run.model.load_state_dict({"scale": kept["scale"]}, strict=False)


def uneven(run: Any) -> None:
    with run.gossip.join():
        for t in range(2 if run.replica else 4):
            step(run, t)


def skipped(run: Any) -> None:
    """A forward without a backward, and one inside averaged(), which ends with an error."""
    for t in range(4):
        if t == 2:
            run.looked_at(t)
            with contextlib.suppress(ZeroDivisionError), run.gossip.averaged():
                run.looked_at(t)
                raise ZeroDivisionError
        step(run, t)


def scaled(run: Any) -> None:
    """One replica skips a step: one of its shards has an infinite gradient."""
    for t in range(5):
        zero_grad(run)
        run.gradients(t, run.scaler.get_scale() if t else 256.0)
        if t == 2 and run.replica == 1 and getattr(run, "position", 1) == 1:
            grad = run.model.first.weight.grad
            (grad.to_local() if hasattr(grad, "to_local") else grad)[0, 0] = float("inf")
        if not t:
            run.scaler.scale(torch.zeros(()))  # it has its scale from the first loss on
        run.scaler.step(run.optimizers[0])
        run.scaler.update()


def two(params: list[Any]) -> list[torch.optim.Optimizer]:
    trained = [param for param in params if param.requires_grad]
    return [ADAMW(trained[:3]), SGD(trained[3:])]


SITUATIONS = {
    "closure": (Case(), closure),
    "schedule": (Case(optimizer=two), schedule),
    "load": (Case({"rule": OuterNesterov(momentum=0.6), "mix_every": 2}), load),
    "uneven": (Case({"topology": "complete"}), uneven),
    "closure, tracking": (Case({"rule": MomentumTracking()}), closure),
    "uneven, tracking": (Case({"rule": MomentumTracking()}), uneven),
    "scaled": (Case({"topology": "complete"}, scaled=True), scaled),
    "skipped": (Case(fsdp={"reshard_after_forward": False}), skipped),
}


def situation(run: Any, name: str) -> Any:
    SITUATIONS[name][1](run)
    return ended(run, [])


def situations(rank: int, n: int) -> list[Any]:
    mesh = mesh_of(2, 2)
    return [situation(Sharded(case, mesh), name) for name, (case, _) in SITUATIONS.items()]


@pytest.mark.slow
def test_situations(workers):
    found = workers(4, situations)
    for number, (name, (case, _)) in enumerate(SITUATIONS.items()):
        wanted = run_replicas(2, lambda transport, case=case, name=name: situation(Unsharded(case, transport, 2), name))
        for rank in range(4):
            assert_close(found[rank][number], wanted[rank // 2], case.tolerance, f"{name}, worker {rank}")


def seeded(rank: int, n: int) -> tuple[dict[str, Any], float]:
    run = Sharded(Case(), mesh_of(2, 2), seed=rank)
    made = values(run.model)
    run.model.shift.fill_(rank)  # as BatchNorm's statistics, which FSDP leaves to each worker
    with run.gossip.averaged():
        shift = float(run.model.shift)
    run.gossip.close()
    return made, shift


def test_tensors_that_are_not_sharded_are_of_all_workers(workers):
    """Buffers and frozen parameters start as worker 0's, whatever each worker's seed, and a buffer's mean is over all."""
    found = workers(4, seeded)
    for made, shift in found:
        assert shift == 1.5
        for name in ("shift", "still", "scale", "first.weight"):
            assert torch.equal(made[name], found[0][0][name]), name


def start_of_one_worker_each(rank: int, n: int) -> Any:
    model = shard(Odd(seed=rank), mesh_of(n, 1)["shard"])
    decent_dp.gossip(model, SGD(model.parameters()))
    return values(model)


def test_replicas_of_one_worker_start_from_the_first_one(workers):
    """Their parameters are DTensors, and each worker has all of them."""
    first, second = workers(2, start_of_one_worker_each)
    assert all(torch.equal(first[name], second[name]) for name in first)


def lost(rank: int, n: int) -> None:
    run = Sharded(Case({"topology": "complete"}), mesh_of(2, 2))
    for t in range(30):
        step(run, t)
        if rank == 3 and t == 2:
            raise ZeroDivisionError("as it happens")


def test_a_worker_that_fails_ends_all(workers):
    """The workers of its own replica fail in a collective of FSDP; those of others in an exchange, which names it."""
    outcomes = workers.outcomes(4, lost)
    assert all(outcome.error for outcome in outcomes)
    assert outcomes[3].message == "as it happens"
    texts = [outcome.message for outcome in outcomes]
    assert any(
        "worker 3" in text and outcome.error == "PeerLostError" for text, outcome in zip(texts, outcomes, strict=True)
    ), texts


def spoilt(rank: int, n: int) -> tuple[str, list[bool], int]:
    run = Sharded(Case({"topology": "complete"}), mesh_of(2, 2))
    text = ""
    try:
        for t in range(20):
            zero_grad(run)
            (run.loss(t) * (float("nan") if (rank, t) == (2, 1) else 1.0)).backward()
            run.optimizers[0].step()
    except NonFiniteError as error:
        text = str(error)
    parts = [param.to_local() for param in run.model.parameters() if param.requires_grad]
    finite = [bool(part.isfinite().all()) for part in parts if part.numel()]
    return text, finite, run.gossip.stats().nonfinite


def test_a_replica_that_is_not_finite_stays_alone(workers):
    """A loss that is NaN on one worker spoils all shards of its replica, and no other replica."""
    for rank, (text, finite, rounds) in enumerate(workers(4, spoilt)):
        culprit = 2 + rank % 2  # the worker of the same position
        assert f"a replica held a NaN or an infinity, that of worker {culprit} " in text, (rank, text)
        assert rounds == 10
        assert all(finite) if rank < 2 else not any(finite), (rank, finite)


# -- calls between a forward and its backward -------------------------------------------------------------------------------


def averaged(run: Any, kept: Any) -> None:
    with run.gossip.averaged():
        pass


def another_step(run: Any, kept: Any) -> None:
    for optimizer in run.optimizers:
        optimizer.step()


BETWEEN: dict[str, tuple[Any, bool]] = {
    "average_": (lambda run, kept: run.gossip.average_(), True),
    "averaged": (averaged, True),
    "flush": (lambda run, kept: run.gossip.flush(), True),
    "load of the model": (lambda run, kept: run.model.load_state_dict(kept), True),
    "a step": (another_step, True),
    "consensus_distance": (lambda run, kept: run.gossip.consensus_distance(), False),
    "state of the replica": (lambda run, kept: run.gossip.state_dict(), True),  # what is in flight is mixed in first
    "state of the model": (lambda run, kept: run.model.state_dict(), False),
    "gather": (lambda run, kept: run.gossip.gather(1), False),
    "evaluation without gradients": (lambda run, kept: run.looked_at(3), False),
}


def between(rank: int, n: int) -> list[tuple[str, float]]:
    mesh, found = mesh_of(2, 2), []
    for call, _ in BETWEEN.values():
        run = Sharded(Case(), mesh)
        for t in range(3):
            step(run, t)
        kept = {name: value.detach().clone() for name, value in run.model.state_dict().items()}
        zero_grad(run)
        loss, error = run.loss(3), ""
        call(run, kept)
        try:
            loss.backward()
        except RuntimeError as stale:
            error = str(stale)
        gradient = run.model.out.weight.grad
        found.append((error, 0.0 if gradient is None else float(whole(gradient).sum())))
        zero_grad(run)
        step(run, 4)  # after it all is well again
        run.gossip.close()
    return found


@pytest.mark.slow
def test_what_changes_parameters_between_a_forward_and_its_backward_is_an_error(workers):
    """FSDP would gather the new parameters, and use the activations of the old ones."""
    for found in workers(4, between):
        plain = found[-1][1]
        for (name, (_, changes)), (error, gradient) in zip(BETWEEN.items(), found, strict=True):
            if changes:
                assert "parameters have changed between this forward and its backward" in error, name
            else:
                assert (error, gradient) == ("", plain), name
