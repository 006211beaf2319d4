"""The curves of a run whose worker 0 dies, and another process takes its place."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import decent_dp
from decent_dp.logging import Recorder
from tests.helpers import loss
from tests.members import make, the_store
from tests.test_logging import curves
from tests.workers import hear, say

N, EVERY, ROUNDS = 3, 10, 150


def record(rank: int, n: int, folder: str) -> None:
    group = dist.new_group(range(N))
    options: dict[str, Any] = {"process_group": group}
    if rank == N:
        hear("dead")
        rank, options = 0, {"transport": decent_dp.join(the_store(), rank=0)}
    model, optimizer, replica = make(rank, **options)
    board = Recorder(replica, Path(folder) / "board", every=EVERY)
    while replica.stats().rounds < ROUNDS:
        if dist.get_rank() == 0 and replica.stats().rounds == 25:
            say("dead")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.03)
        value = loss(model, replica.stats().updates, rank)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        board.log(value)
    board.add("who writes", rank)
    replica.close()


@pytest.mark.slow
def test_curves_go_on_without_worker_0(workers, tmp_path):
    outcomes = workers.outcomes(N + 1, record, str(tmp_path))
    assert [outcome.exitcode for outcome in outcomes] == [-signal.SIGKILL, 0, 0, 0], outcomes
    found = curves(tmp_path / "board")
    for name in ("loss/mean", "loss/local", "distance", "step/ms"):
        points = {round_ // EVERY for round_, _ in found[name]}
        assert points == set(range(1, ROUNDS // EVERY + 1)), (name, found[name])
        assert all(math.isfinite(value) for _, value in found[name])
    assert [value for _, value in found["who writes"]] == [0.0]  # the new process
