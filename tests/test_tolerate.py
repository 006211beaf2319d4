"""``faults=Tolerate(...)``: arguments, what it does not go with, compressed messages, the wrapper, and calls of all workers
after a death."""

from __future__ import annotations

import contextlib
import copy
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import decent_dp
from decent_dp.errors import NonFiniteError
from decent_dp.replica import replica as replica_module
from decent_dp.rules import MomentumTracking, OuterNesterov
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import assert_same, error_of, net, values
from tests.members import DEAD_AFTER, die, make, step, stop

# -- arguments -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"dead_after": 0.1}, ValueError, "dead_after must be a number of seconds, at least 0.5, got 0.1"),
        ({"dead_after": "10"}, TypeError, "dead_after must be a number of seconds"),
        ({"min_workers": 0}, ValueError, "min_workers must be a whole number of workers, at least 1, got 0"),
        ({"max_workers": 0}, ValueError, "max_workers must be a whole number of workers, at least 1, got 0"),
        ({"partition": "folow"}, ValueError, "did you mean 'follow'"),
        ({"orphan_for": -1}, ValueError, "orphan_for must be"),
    ],
)
def test_wrong_settings_are_refused(given, error, text):
    with pytest.raises(error, match=text):
        decent_dp.Tolerate(**given)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("gossip", {"faults": 10.0}, "faults must be None or a decent_dp.Tolerate, such as Tolerate(dead_after=10.0), got 10.0"),
    ("gossip", {"topology": "complete"}, "faults=Tolerate(...) needs a topology of pairs"),
    ("wrapper", {"topology": "ring:3,complete"}, "mixes groups of 3"),
]


def refused(rank: int, n: int) -> list[str]:
    found = [error_of(lambda kind=kind, options=options: make(rank, kind, **options)) for kind, options, _ in REFUSED]
    return [*found, error_of(lambda: make(rank, faults=decent_dp.Tolerate(dead_after=5.0 + rank)))]


def test_what_it_does_not_go_with_is_refused_on_all_workers(workers):
    for found in workers(3, refused):
        for error, text in zip(found, [*(text for *_, text in REFUSED), "faults is {'dead_after': 5.0"], strict=True):
            assert text in error


def test_one_worker_needs_nobody():
    def body(transport: Any) -> None:
        model, optimizer, replica = make(0, transport=transport)
        twin = net()
        other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
        for t in range(5):
            step(model, optimizer, t, 0)
            step(twin, other, t, 0)
        assert_same(model, twin)
        with replica.averaged():
            pass
        assert replica.roster == decent_dp.faults.Roster(0, 0, 1, (0,), ())
        replica.close()

    run_replicas(1, body)


# -- without faults nothing changes ----------------------------------------------------------------------------------------


def trains(rank: int, n: int, kind: str, options: dict[str, Any]) -> Any:
    model, optimizer, replica = make(rank, kind, **options)
    for t in range(8):
        step(model, optimizer, t, rank)
    stats = replica.stats()
    found = values(model), stats.exchanges, stats.holes, stats.one_sided
    replica.close()
    return found


CASES = [
    ("gossip", {"compression": "int8", "bucket_size_in_mb": 0}),
    ("gossip", {"compression": "low-rank:1,int8"}),
    ("gossip", {"mix_every": 3, "rule": OuterNesterov()}),
    ("gossip", {"overlap": False, "compression": "bfloat16"}),
    ("wrapper", {"topology": "ring"}),
    ("wrapper", {"rule": MomentumTracking(), "compression": "int8"}),
]
SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in CASES[1:]]
EACH_CASE = pytest.mark.parametrize(("kind", "options"), [CASES[0], *SLOW])


@EACH_CASE
def test_without_faults_the_numbers_are_the_same(workers, kind, options):
    with_ = workers(4, trains, kind, options)
    without = workers(4, trains, kind, {**options, "faults": None})
    for one, other in zip(with_, without, strict=True):
        assert one[1:] == other[1:]
        assert one[2:] == (0, 0)
        assert_same(one[0], other[0])


# -- deaths ----------------------------------------------------------------------------------------------------------------


def survives(rank: int, n: int, kind: str, options: dict[str, Any], victim: int) -> Any:
    model, optimizer, replica = make(rank, kind, **options)
    longest = 0.0
    for t in range(30):
        if (rank, t) == (victim, 6):
            die()
        began = time.monotonic()
        step(model, optimizer, t, rank)
        longest = max(longest, time.monotonic() - began)
    apart = replica.consensus_distance()
    with replica.averaged():
        mean = values(model)
    again = replica.consensus_distance()
    found = mean, (apart, again), replica.stats(), replica.roster, longest, values(model)
    replica.close()
    return found


@EACH_CASE
def test_the_others_train_on_and_agree_on_their_mean(workers, kind, options):
    victim = 3
    outcomes = workers.outcomes(4, survives, kind, options, victim)
    assert outcomes[victim].exitcode == -signal.SIGKILL
    found = [outcome.value for rank, outcome in enumerate(outcomes) if rank != victim]
    assert all(found), [outcome.trace for outcome in outcomes]
    means, distances, stats, rosters, longest, own = zip(*found, strict=True)
    expected = {name: sum(replica[name].double() for replica in own) / len(own) for name in own[0]}
    for mean in means:
        for name, value in expected.items():
            torch.testing.assert_close(mean[name].double(), value, rtol=0, atol=1e-6)
    squares = [sum(((replica[name].double() - value) ** 2).sum() for name, value in expected.items()) for replica in own]
    assert distances[0] == pytest.approx([float(sum(squares) / len(own)) ** 0.5] * 2, rel=1e-4)
    assert all(one == distances[0] for one in distances)
    assert all(one.updates == 30 and one.one_sided == 0 for one in stats)
    # Its partners know it at once; on a busy machine there is a new epoch by now.
    assert any(victim in roster.holes or victim not in roster.members for roster in rosters)
    assert max(longest) < 0.3 * DEAD_AFTER + 2


def fails(rank: int, n: int) -> Any:
    model, optimizer, replica = make(rank)
    try:
        for t in range(40):
            if rank and t == 6:
                raise ValueError("a worker's own")
            step(model, optimizer, t, rank)
            time.sleep(0.02)
        return replica.stats().updates
    finally:
        replica.close()


def test_a_worker_that_fails_counts_as_dead_and_too_few_are_an_error(workers):
    """Though it closes its replica in a ``finally``."""
    outcomes = workers.outcomes(3, fails)
    assert [outcome.error for outcome in outcomes] == ["PeerLostError", "ValueError", "ValueError"]
    assert "1 of 3 workers are left" in outcomes[0].message
    assert "min_workers=2" in outcomes[0].message


def exits_early(rank: int, n: int) -> Any:
    model, optimizer, replica = make(rank)
    for t in range(40 if rank == 0 else 6):
        step(model, optimizer, t, rank)
        time.sleep(0.02)
    if rank == 0:
        with replica.averaged():
            mean = values(model)
        return mean, values(model)
    with contextlib.suppress(SystemExit):
        try:
            sys.exit(0)  # no failure, though an exception passes the ``finally``
        finally:
            replica.close()
    return None


def test_the_last_worker_averages_alone_when_the_others_have_finished(workers):
    mean, own = workers(3, exits_early)[0]
    assert_same(mean, own, 1e-6)


def left_alone(rank: int, n: int) -> Any:
    model, optimizer, replica = make(rank, faults=decent_dp.Tolerate(min_workers=1, orphan_for=0.1))
    for t in range(40):
        if (rank, t) == (1, 6):
            die()
        step(model, optimizer, t, rank)
        time.sleep(0.02)
    with replica.averaged():
        return replica.stats().updates


def test_the_last_worker_trains_alone(workers):
    """It is not cut off: the others have ended."""
    assert workers.outcomes(2, left_alone)[0].value == 40


FROZEN = 4.0


def is_cut_off(rank: int, n: int, policy: str, calls: bool) -> Any:
    """Worker 1 freezes. Worker 0 cannot know whether that one is gone, or itself cut off."""
    model, optimizer, replica = make(rank, faults=decent_dp.Tolerate(dead_after=1.0, partition=policy, orphan_for=0.6))
    times, means, was_away = [time.monotonic()], [], False
    while times[-1] < times[0] + FROZEN + 4.0:
        if rank == 1 and not was_away and times[-1] > times[0] + 2.0:
            stop(FROZEN)
            was_away = True
            if calls:
                with replica.averaged():
                    means.append(values(model))
        step(model, optimizer, len(times), rank)
        time.sleep(0.02)
        times.append(time.monotonic())
        if calls and rank == 0 and not was_away and replica.roster.holes:
            was_away = True
            with replica.averaged():
                means.append(values(model))
    with replica.averaged():
        means.append(values(model))
    replica.close()
    return np.diff(times), replica.stats(), means


@pytest.mark.parametrize(
    ("policy", "calls"),
    [("follow", True), *(pytest.param(policy, False, marks=pytest.mark.slow) for policy in ("follow", "train", "stop"))],
)
def test_a_worker_that_is_cut_off(workers, policy, calls):
    outcomes = workers.outcomes(2, is_cut_off, policy, calls)
    if policy == "stop":
        assert "has heard no other for 0.6 s" in outcomes[0].message
        return
    (gaps, stats, means), (_, _, others) = (outcome.value for outcome in outcomes)
    trained = stats.updates - stats.exchanges  # without the other one
    assert (gaps.max() > FROZEN - 1.8) == (policy == "follow"), gaps.max()
    assert (trained < 60) == (policy == "follow"), trained
    for mean, other in zip(means, others, strict=True):
        for name in mean:
            torch.testing.assert_close(mean[name], other[name])


# -- replicas that are not finite --------------------------------------------------------------------------------------------


def is_not_finite(rank: int, n: int, kind: str, sick: list[int]) -> Any:
    model, optimizer, replica = make(rank, kind)
    for t in range(6):
        step(model, optimizer, t, rank)
    inner = getattr(model, "module", model)
    own = values(inner)  # finishes the round
    if rank in sick:
        with torch.no_grad():
            next(inner.parameters()).view(-1)[0] = float("nan")
    with replica.averaged():
        mean = values(inner)
    distance = replica.consensus_distance()
    average = replica.average_ if kind == "gossip" else replica.global_avg
    average(*(() if kind == "gossip" else (False,)))
    found = values(inner)
    for t in range(6, 12):
        step(model, optimizer, t, rank)
    replica.close()
    return own, mean, distance, found, all(bool(param.isfinite().all()) for param in inner.parameters())


@pytest.mark.parametrize("kind", [pytest.param("gossip", marks=pytest.mark.slow), "wrapper"])
def test_a_mean_is_that_of_the_finite_replicas(workers, kind):
    outcomes = workers.outcomes(4, is_not_finite, kind, [2])
    found = [outcome.value for outcome in outcomes]
    counted = [own for own, *_ in found[:2] + found[3:]]
    squares = np.zeros(3)
    for name in counted[0]:
        stacked = np.stack([own[name].double().numpy() for own in counted])
        squares += np.square(stacked - stacked.mean(0)).reshape(3, -1).sum(1)
        for _, mean, _, average, _ in found:
            for of in (mean, average):
                np.testing.assert_allclose(of[name].double().numpy(), stacked.mean(0), rtol=1e-5, atol=1e-6)
    for _, _, distance, _, is_finite in found:
        assert distance == pytest.approx(np.sqrt(squares.mean()), rel=1e-4)
        assert is_finite


def none_is_finite(rank: int, n: int) -> Any:
    model, _, replica = make(rank)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = float("nan")
    with pytest.raises(NonFiniteError), replica.averaged():
        pass
    distance = replica.consensus_distance()
    replica.close()
    return distance


def test_without_a_finite_replica_there_is_no_mean(workers):
    assert all(np.isnan(distance) for distance in workers(2, none_is_finite))


def calibrates(rank: int, n: int) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = decent_dp.gossip(model, optimizer, faults=decent_dp.Tolerate())
    if rank == 2:
        with torch.no_grad():
            model[0].weight[0, 0] = float("nan")
    decent_dp.checkpoint.calibrate(replica, [torch.randn(8, 6, generator=torch.Generator().manual_seed(rank))])
    replica.close()
    return model[1].running_mean


def test_statistics_are_those_of_the_finite_replicas(workers):
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 4)
    inputs = [torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)) for rank in (0, 1)]
    with torch.no_grad():
        expected = torch.stack([layer(x).double().mean(0) for x in inputs]).mean(0)
    for found in workers(3, calibrates):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


# -- late and stopped workers ----------------------------------------------------------------------------------------------


def is_slow(rank: int, n: int, seconds: float) -> Any:
    """The last worker becomes slow. Returns the steps of each before and after, and the share of steps that mixed then."""
    model, optimizer, replica = make(rank)
    found = []
    for slow in (False, True, True):  # at first each worker waits for the slow one for longer
        before, began, steps = replica.stats().exchanges, time.monotonic(), 0
        while time.monotonic() < began + seconds:
            time.sleep(0.15 if slow and rank == n - 1 else 0.03)
            step(model, optimizer, steps, rank)
            steps += 1
        found.append(steps)
    mixed = (replica.stats().exchanges - before) / steps
    replica.close()
    return found[0], found[2], mixed


@pytest.mark.slow
def test_a_slow_worker_slows_nobody_and_mixes(workers):
    *others, (_, after, mixed) = workers(4, is_slow, 6.0)
    assert min(after / before for before, after, _ in others) > 0.8
    assert after > 0.8 * 6.0 / 0.15
    assert mixed > 0.3


def goes_back(rank: int, n: int) -> Any:
    model, optimizer, replica = make(rank)
    for t in range(10):
        step(model, optimizer, t, rank)
    own = replica.state_dict()  # first, as it mixes what is in flight
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    states = copy.deepcopy(optimizer.state_dict()), own
    first = []
    for turn in range(2):
        for t in range(10, 30 if turn == 0 else 20):
            step(model, optimizer, t, rank)
            if turn == 0 and t == 19:
                first.append(values(model))
        if turn == 0:
            model.load_state_dict(kept)
            optimizer.load_state_dict(states[0])
            replica.load_state_dict(states[1])
    first.append(values(model))
    found = first, replica.stats().rounds, replica.stats().holes
    replica.close()
    return found


def test_an_earlier_state_may_be_loaded(workers):
    """Rounds go back, and nobody takes the others' old rounds for present ones."""
    for (before, after), rounds, holes in workers(2, goes_back):
        assert_same(before, after)
        assert (rounds, holes) == (20, 0)


def dies_with_its_neighbour(rank: int, n: int) -> Any:
    model, optimizer, replica = make(rank, topology="ring")
    for t in range(20):
        if rank in (0, 1) and t == 6:
            die()
        step(model, optimizer, t, rank)
    apart = replica.consensus_distance()
    replica.close()
    return apart


def test_no_living_worker_knows_of_both_deaths(workers):
    outcomes = workers.outcomes(4, dies_with_its_neighbour)
    assert [outcome.error for outcome in outcomes[2:]] == ["", ""], outcomes
    assert outcomes[2].value == outcomes[3].value


# -- threads ---------------------------------------------------------------------------------------------------------------


def test_threads_that_end_are_holes():
    ended = []

    def body(transport: Any) -> Any:
        model, optimizer, replica = make(transport.rank, transport=transport)
        for t in range(12):
            if (transport.rank, t) == (3, 6):
                ended.append(t)
                return None
            step(model, optimizer, t, transport.rank)
        return replica.stats().holes, replica.stats().updates

    found = run_replicas(4, body)
    assert ended == [6]
    assert [updates for _, updates in found[:3]] == [12, 12, 12]
    assert found[1][0] > 0 < found[2][0]


@pytest.mark.parametrize("ahead", [0, 3])
def test_a_call_of_workers_in_different_rounds_finishes_what_is_in_flight(monkeypatch, ahead):
    """One that is ahead may have mixed it, and the mean of all would include one half of it."""
    finished: list[int] = []

    def work(transport: Any) -> None:
        _, _, replica = make(0, transport=transport, faults=decent_dp.Tolerate(min_workers=1))
        check = replica_module.check_same_call
        monkeypatch.setattr(
            replica_module, "check_same_call", lambda *args, **options: (found := check(*args, **options)) + [found[0] + ahead]
        )
        replica.engine.buckets.append(
            SimpleNamespace(number=0, topology=replica.engine.topology, buffer=SimpleNamespace(rebind=lambda: None))
        )
        monkeypatch.setattr(replica.engine, "finish", lambda bucket: finished.append(bucket.number))
        replica.consensus_distance()
        replica.engine.buckets.clear()
        replica.close()

    run_replicas(1, work)
    assert bool(finished) is (ahead > 0)


class Counting(InProcessTransport):
    def counts(self) -> dict[str, int]:
        return {"one_sided": 3, "reconnects": 4}


def test_what_happened_to_connections_is_counted_without_tolerance_too():
    model = net()
    replica = decent_dp.gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), transport=Counting())
    assert (replica.stats().one_sided, replica.stats().reconnects) == (3, 4)
    replica.close()
