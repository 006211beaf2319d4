"""The example under torchrun: workers that are killed, and workers that are told to stop."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from decent_dp.checkpoint import latest

ROOT = Path(__file__).resolve().parents[1]
EPOCHS, STEPS = 20, 20 * 22
# What a run has found out; times are the machine's.
NUMBERS = ("accuracy", "worst_accuracy", "validation_loss", "consensus_distance", "steps", "history")


@contextlib.contextmanager
def torchrun(folder: Path, *options: str, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """The example on two workers; killed with all its workers if it is still there at the end."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        f"--max-restarts={restarts}",
    ]
    command += ["examples/digits.py", "--epochs", str(EPOCHS), "--topology", "ring", "--out", str(folder / "result.json")]
    with open(folder / "output.txt", "a") as output:
        process = subprocess.Popen(
            [*command, *options],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def numbers(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    return {name: result[name] for name in NUMBERS}


def workers_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """Process ids by rank, of those that torchrun has started and that still run."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, IndexError):
            if entry.name.isdigit() and (entry / "stat").read_text().rpartition(")")[2].split()[1] == str(process.pid):
                environ = (entry / "environ").read_text()
                found[int(re.search(r"(?:^|\0)RANK=(\d+)\0", environ)[1])] = int(entry.name)
    return found


def saved_step(folder: Path) -> int:
    newest = latest(folder / "checkpoints")
    return 0 if newest is None else int(newest.name.split("-")[1])


def wait_for(process: subprocess.Popen[str], folder: Path, happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert process.poll() is None, (folder / "output.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> dict[str, Any]:
    """One that knows nothing of checkpoints."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with torchrun(folder) as process:
        assert process.wait(60) == 0, (folder / "output.txt").read_text()
    found = numbers(folder)
    assert found["accuracy"] > 0.9
    assert found["consensus_distance"] > 0
    assert len(found["history"]) == STEPS
    return found


@pytest.mark.timeout(180)
def test_a_worker_that_is_killed_costs_nothing_but_time(undisturbed, tmp_path):
    """SIGKILL at a random moment to one of them; torchrun starts all of them again."""
    draw = random.Random(5)
    options = ["--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "7"]
    with torchrun(tmp_path, *options, restarts=3) as process:
        moment = draw.randrange(20, STEPS - 100)
        wait_for(process, tmp_path, lambda: saved_step(tmp_path) >= moment)
        time.sleep(draw.random() * 0.02)
        os.kill(workers_of(process)[draw.randrange(2)], signal.SIGKILL)
        assert process.wait(90) == 0, (tmp_path / "output.txt").read_text()
    assert "(exitcode: -9)" in (tmp_path / "output.txt").read_text()
    assert numbers(tmp_path) == undisturbed


@pytest.mark.timeout(180)
def test_workers_that_are_told_to_stop_save_and_leave(undisturbed, tmp_path):
    """SIGTERM to one worker ends all of them well; so does a SIGTERM to torchrun. The next launch goes on."""
    # No checkpoints but those of the signals.
    options = ["--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "1000000"]
    steps = [0]
    for epoch, told in ((5, "a worker"), (10, "torchrun")):
        with torchrun(tmp_path, *options, restarts=3) as process:
            wait_for(process, tmp_path, lambda epoch=epoch: f"epoch {epoch:3d}:" in (tmp_path / "output.txt").read_text())
            if told == "torchrun":
                process.send_signal(signal.SIGTERM)  # ends with an error of its own
                process.wait(60)
            else:
                os.kill(workers_of(process)[1], signal.SIGTERM)
                assert process.wait(60) == 0, (tmp_path / "output.txt").read_text()
        steps.append(saved_step(tmp_path))
        assert max(steps[-2], epoch * 22) < steps[-1] < STEPS
        assert not (tmp_path / "result.json").exists()
    with torchrun(tmp_path, *options) as process:
        assert process.wait(60) == 0, (tmp_path / "output.txt").read_text()
    assert numbers(tmp_path) == undisturbed
