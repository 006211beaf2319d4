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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from decent_dp.checkpoint import latest
from tests.helpers import ROOT

EPOCHS, STEPS = 20, 20 * 22
# Results of a run. Times are those of this machine.
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


def numbers(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in NUMBERS}


def train(rank: int, n: int, folder: str, checkpoints: str | None, saves: Sequence[int] = ()) -> Any:
    """The example in this process: what it would write into its result. ``saves``: after these steps what is in flight is mixed
    in, as by a save."""
    import decent_dp
    from decent_dp.replica.snapshot import settle
    from examples import digits

    made = decent_dp.gossip

    def gossip(model: Any, optimizer: Any, **options: Any) -> Any:
        replica = made(model, optimizer, **options)
        optimizer.register_step_post_hook(lambda *_: settle(replica) if replica.stats().rounds in saves else None)
        return replica

    decent_dp.gossip = gossip
    config = digits.Config(topology="ring", epochs=EPOCHS, checkpoint=checkpoints, checkpoint_every=10**6)
    return json.loads(json.dumps(digits.train(config)))


def undisturbed(workers: Any, saves: Sequence[int]) -> dict[str, Any]:
    """The numbers of a run that nobody disturbs."""
    found = numbers(workers(2, train, "", None, saves)[0])
    assert found["accuracy"] > 0.9
    assert found["consensus_distance"] > 0
    assert len(found["history"]) == STEPS
    return found


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


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing_but_time(workers, tmp_path):
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
    expected = undisturbed(workers, range(7, STEPS, 7))
    assert numbers(json.loads((tmp_path / "result.json").read_text())) == expected


@pytest.mark.slow
def test_workers_that_must_stop_save_and_exit(workers, tmp_path):
    """SIGTERM to one worker, and to the other when that has saved, ends all of them well; so does a SIGTERM to torchrun.

    The next launch goes on.
    """
    # No checkpoints but those of the signals.
    checkpoints = str(tmp_path / "checkpoints")
    steps = [0]
    for epoch, told in ((5, "workers"), (10, "torchrun")):
        with torchrun(tmp_path, "--checkpoint", checkpoints, "--checkpoint-every", "1000000", restarts=3) as process:
            wait_for(process, tmp_path, lambda epoch=epoch: f"epoch {epoch:3d}:" in (tmp_path / "output.txt").read_text())
            if told == "torchrun":
                process.send_signal(signal.SIGTERM)  # ends with an error of its own
                process.wait(60)
            else:
                pids = workers_of(process)
                os.kill(pids[1], signal.SIGTERM)
                wait_for(process, tmp_path, lambda: saved_step(tmp_path) > 0)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[0], signal.SIGTERM)
                assert process.wait(60) == 0, (tmp_path / "output.txt").read_text()
        steps.append(saved_step(tmp_path))
        assert max(steps[-2], epoch * 22) < steps[-1] < STEPS
        assert not (tmp_path / "result.json").exists()
    assert numbers(workers(2, train, "", checkpoints)[0]) == undisturbed(workers, steps)
