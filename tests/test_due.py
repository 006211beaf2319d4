"""Calls of all workers by rounds: ``due``, the Recorder and the frameworks, when a worker was out for a while or has joined."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import decent_dp
from decent_dp.logging import Recorder
from decent_dp.replica.cadence import Cadence
from tests.framework_cases import as_launched, copies, quiet_frameworks
from tests.helpers import loss, values
from tests.members import DEAD_AFTER, make, stop, the_store
from tests.test_logging import curves
from tests.workers import hear, say

N, FROZEN, EVERY = 4, 3, 20
# Seconds of a step, the round in which a worker is stopped, for so many seconds, and the last round.
PACE, STOP_AT, STOPPED, LAST = 0.02, 35, 1.5 * DEAD_AFTER, 360

# Found rather than imported: the imports take seconds, which only the workers need to spend.
_MISSING = [name for name in ("transformers", "accelerate", "lightning") if importlib.util.find_spec(name) is None]
needs_frameworks = pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}")


# -- the count -------------------------------------------------------------------------------------------------------------


def asked(cadence: Cadence, every: int, rounds: Any, asks_at: Callable[[int], bool] = lambda _: True) -> list[int]:
    """Makes these rounds; those after which it is due."""
    found = []
    for round_ in rounds:
        cadence.add(round_)
        if asks_at(round_ + 1) and cadence.is_due(every, round_ + 1):
            assert cadence.is_due(every, round_ + 1)  # until the next round
            found.append(round_ + 1)
    return found


def test_due_in_every_so_many_rounds():
    assert asked(Cadence(), 5, range(20)) == [5, 10, 15, 20]
    # Two rounds per question, as with two backwards per iteration.
    assert asked(Cadence(), 5, range(20), lambda round_: round_ % 2 == 1) == [5, 11, 15]
    assert asked(Cadence(), 1, range(3)) == [1, 2, 3]
    cadence = Cadence()  # a question that is not asked in each round
    assert asked(cadence, 5, range(20), lambda round_: cadence.is_due(10, round_) or True) == [5, 10, 15, 20]
    cadence = Cadence()
    assert asked(cadence, 5, range(20), lambda round_: not cadence.is_due(10, round_)) == [5, 15]


def test_a_worker_that_has_left_rounds_out_has_left_their_calls_out():
    cadence = Cadence()
    assert asked(cadence, 5, range(7)) == [5]
    assert asked(cadence, 5, range(32, 41)) == [35, 40]
    assert (cadence.made, cadence.left_out(41)) == (16, 25)
    # It goes on in a round that the others have begun: they have made its call before that.
    cadence.fall_behind(50)
    assert (cadence.is_due(5, 50), cadence.left_out(50)) == (False, 34)
    assert asked(cadence, 5, range(50, 56)) == [55]
    # It has come to a round in a call of all: the others are at its beginning, too.
    assert cadence.is_due(5, 60)


def test_who_asks_in_other_rounds_gets_answers_of_its_own():
    cadence, found = Cadence(), []
    for round_ in range(20):
        cadence.add(round_)
        cadence.is_due(5, round_ + 1, "another")
        if round_ % 4 == 3 and cadence.is_due(5, round_ + 1):
            found.append(round_ + 1)
    assert found == [8, 12, 16, 20]


def test_a_checkpoint_begins_anew():
    cadence = Cadence()
    assert asked(cadence, 5, range(7)) == [5]
    assert asked(cadence, 5, range(3, 8)) == [5]
    assert asked(cadence, 5, range(101, 107)) == [105]


# -- a worker that was stopped, and one that has joined --------------------------------------------------------------------


def woke_at(steps: list[tuple[float, int]]) -> float:
    """The end of the step in which the worker was stopped."""
    return next(after for (before, _), (after, _) in itertools.pairwise(steps) if after - before > STOPPED - 0.5)


def assert_same_pace(steps: list[tuple[float, int]], others: list[tuple[float, int]], since: float) -> None:
    """From one window after ``since`` on, a worker makes as many steps as another one."""
    began = next(end for end, round_ in others if end > since and round_ % EVERY == 0)
    began = next(end for end, round_ in others if end > began and round_ % EVERY == 0)
    own, theirs = (sum(end > began for end, _ in some) for some in (steps, others))
    assert theirs > 50
    assert own > 0.8 * theirs, (own, theirs)


def call_by_rounds(replica: Any, calls: list[tuple[str, int]]) -> None:
    """Two calls that take turns: a worker that counts by itself meets the others in the wrong one."""
    if replica.due(EVERY):
        calls.append((f"gather of {sorted(replica.gather(1))}", replica.stats().rounds))
    elif replica.due(EVERY // 2):
        replica.consensus_distance()
        calls.append(("distance", replica.stats().rounds))


def train(replica: Any, model: Any, optimizer: Any, rank: int, board: Any = None, stops_at: int = LAST) -> Any:
    """Until the last round. Returns the calls that were made, and for each step its end and the round it came to."""
    calls: list[tuple[str, int]] = []
    steps: list[tuple[float, int]] = []
    while (round_ := replica.stats().rounds) < LAST:
        value = loss(model, round_, rank)
        value.backward()
        time.sleep(PACE)
        if stops_at <= round_ < LAST and not any(seen >= LAST for _, seen in steps):
            stops_at = LAST
            stop(STOPPED)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        if board is not None:
            board.log(value.detach())
        else:
            call_by_rounds(replica, calls)
        steps.append((time.monotonic(), replica.stats().rounds))
    with replica.averaged():
        mean = values(model)
    return calls, steps, mean


def is_stopped(rank: int, n: int, kind: str, folder: str | None) -> Any:
    model, optimizer, replica = make(rank, kind)
    board = None if folder is None else Recorder(replica, Path(folder) / "board", every=EVERY)
    found = train(replica, model, optimizer, rank, board, STOP_AT if rank == FROZEN else LAST)
    replica.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gossip", "wrapper", "Recorder"])
def test_a_worker_that_was_stopped_keeps_the_pace_of_the_others(workers, tmp_path, kind):
    if kind == "Recorder":
        pytest.importorskip("tensorboard")
        found = workers(N, is_stopped, "gossip", str(tmp_path))
        assert [round_ for round_, _ in curves(tmp_path / "board")["distance"]] == list(range(EVERY, LAST + 1, EVERY))
    else:
        found = workers(N, is_stopped, kind, None)
    calls, steps, _ = found[FROZEN]
    others, their_steps, mean = found[0]
    for _, _, one_mean in found:
        assert all((one_mean[name] == mean[name]).all() for name in mean)
    if kind != "Recorder":
        assert all(one_calls[-8:] == others[-8:] for one_calls, *_ in found)  # all take part in the last ones
        assert others[-1] == (f"gather of {list(range(N))}", LAST)
        # Each call is made once per window by the workers that were there all the time.
        assert [round_ for _, round_ in others] == list(range(EVERY // 2, LAST + 1, EVERY // 2))
        # Those that were made without it are not made up for.
        assert len(calls) < len(others) - 3
    # From one window after it woke on it makes as many steps as they.
    assert_same_pace(steps, their_steps, woke_at(steps))


def joins(rank: int, n: int, folder: str | None) -> Any:
    group = dist.new_group(range(N - 1))
    options: dict[str, Any] = {"process_group": group}
    if rank == N - 1:
        hear("trained")
        options = {"transport": decent_dp.join(the_store())}
    model, optimizer, replica = make(rank, faults=decent_dp.Tolerate(dead_after=DEAD_AFTER, max_workers=N), **options)
    if rank == 0:
        replica.on_roster(lambda *_: None)
        say("trained")
    board = None if folder is None else Recorder(replica, Path(folder) / "board", every=EVERY)
    assert rank < N - 1 or not replica.due(EVERY)  # it is no member yet
    found = train(replica, model, optimizer, rank, board)
    replica.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["due", "Recorder"])
def test_a_process_that_has_joined_keeps_the_pace_of_the_others(workers, tmp_path, what):
    pytest.importorskip("tensorboard")
    found = workers(N, joins, str(tmp_path) if what == "Recorder" else None)
    _, steps, _ = found[-1]
    others, their_steps, _ = found[0]
    assert all(one[-8:] == others[-8:] for one, _, _ in found)
    assert what == "Recorder" or others[-1] == (f"gather of {list(range(N))}", LAST)
    assert_same_pace(steps, their_steps, steps[0][0])


# -- the frameworks --------------------------------------------------------------------------------------------------------


def transformers_is_stopped(rank: int, n: int, folder: Path) -> Any:
    """Two steps per epoch: whole epochs are left out."""
    as_launched(rank, n)
    from transformers import TrainerCallback

    from decent_dp.integrations.transformers import attach
    from tests.test_transformers import trainer_of

    steps: list[tuple[float, int]] = []

    class Stop(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            time.sleep(PACE)
            if rank == FROZEN and state.global_step >= STOP_AT and not woke:
                stop(STOPPED)
                woke.append(time.monotonic())

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            steps.append((time.monotonic(), state.global_step))

    woke: list[float] = []
    every = {"logging_steps": 10, "eval_strategy": "steps", "eval_steps": 40, "save_strategy": "steps", "save_steps": 200}
    trainer = trainer_of(folder, callbacks=[Stop()], max_steps=LAST, save_total_limit=1, **every)
    attach(trainer, faults=decent_dp.Tolerate(dead_after=DEAD_AFTER))
    trainer.train()
    history = [(entry["step"], entry.get("loss"), entry.get("eval_loss")) for entry in trainer.state.log_history[:-1]]
    rate = trainer.optimizer.param_groups[0]["lr"]
    return history, steps, [*woke, 0.0][0], trainer.state.global_step, rate, copies(trainer.model)


@needs_frameworks
@pytest.mark.slow
def test_a_trainer_that_was_stopped_keeps_the_pace_of_the_others(workers, tmp_path):
    found = workers(N, transformers_is_stopped, tmp_path)
    history, steps, woke, *_ = found[FROZEN]
    others, their_steps, *_ = found[0]
    assert [step for step, loss, _ in others if loss is not None] == list(range(10, LAST + 1, 10))
    assert [step for step, _, loss in others if loss is not None] == list(range(40, LAST + 1, 40))
    assert all(one[0][-8:] == others[-8:] for one in found)
    assert len(history) < len(others) - 3
    for one in found:
        assert one[3:5] == (LAST, pytest.approx(found[0][4]))
        for a, b in zip(one[5], found[0][5], strict=True):
            assert torch.equal(a, b)
    assert_same_pace(steps, their_steps, woke)


def lightning_is_stopped(rank: int, n: int, folder: Path) -> Any:
    """In the first of two epochs."""
    quiet_frameworks()
    from tests import lightning_cases as cases

    class Stop(cases.Callback):
        def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
            time.sleep(PACE)
            if rank == FROZEN and trainer.global_step >= STOP_AT and not woke:
                stop(STOPPED)
                woke.append(time.monotonic())

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            steps.append((time.monotonic(), trainer.global_step))
            assert trainer.global_step == trainer.current_epoch * LAST // 2 + trainer.fit_loop.epoch_loop.batch_idx + 1

    steps: list[tuple[float, int]] = []
    woke: list[float] = []
    strategy = cases.GossipStrategy(faults=decent_dp.Tolerate(dead_after=DEAD_AFTER))
    module = cases.Metered(log=True)
    saves = cases.ModelCheckpoint(folder, filename="{step}", every_n_train_steps=40, save_top_k=-1)
    trainer = cases.trainer(
        *(rank, n),
        strategy=strategy,
        callbacks=[Stop(), saves],
        enable_checkpointing=True,
        max_epochs=2,
        val_check_interval=30,
        accumulate_grad_batches=1,
    )
    trainer.fit(module, cases.loader(LAST // 2 * n * cases.BATCH), cases.loader(60, shuffle=False))
    return steps, [*woke, 0.0][0], trainer.global_step, len(module.validated), copies(module.model)


@needs_frameworks
@pytest.mark.slow
def test_lightning_that_was_stopped_keeps_the_pace_of_the_others(workers, tmp_path):
    found = workers(N, lightning_is_stopped, tmp_path)
    steps, woke, _, validated, _ = found[FROZEN]
    assert [one[2] for one in found] == [LAST] * N
    assert [one[3] for one in found[:FROZEN]] == [LAST // 30] * FROZEN
    assert validated < LAST // 30
    assert len(list(tmp_path.glob("*.ckpt"))) == LAST // 40
    for one in found:
        for a, b in zip(one[4], found[0][4], strict=True):
            assert torch.equal(a, b)
    assert_same_pace(steps, found[0][0], woke)
