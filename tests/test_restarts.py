"""The example under torchrun, with a worker that is killed."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from decent_dp.checkpoint import latest
from tests.helpers import ROOT

EPOCHS, STEPS = 20, 20 * 22
# Results of a run. Times are those of this machine.
NUMBERS = ("accuracy", "worst_accuracy", "validation_loss", "consensus_distance", "steps", "history")


@contextlib.contextmanager
def torchrun(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """The example on two workers; killed with all its workers if it is still there at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
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


def undisturbed(rank: int, n: int, saves: Sequence[int]) -> Any:
    """The example in this process: the numbers of a run that nobody disturbs. ``saves``: after these steps what is in flight is
    mixed in, as by a save."""
    import decent_dp
    from decent_dp.replica.snapshot import settle
    from examples import digits

    made = decent_dp.gossip

    def gossip(model: Any, optimizer: Any, **options: Any) -> Any:
        replica = made(model, optimizer, **options)
        optimizer.register_step_post_hook(lambda *_: settle(replica) if replica.stats().rounds in saves else None)
        return replica

    decent_dp.gossip = gossip
    return numbers(json.loads(json.dumps(digits.train(digits.Config(topology="ring", epochs=EPOCHS)))))


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


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_nothing_but_time(workers, tmp_path):
    """SIGKILL at a random moment to one of them; torchrun starts all of them again."""
    draw = random.Random(5)
    options = ["--checkpoint", str(tmp_path / "checkpoints"), "--checkpoint-every", "7"]
    with torchrun(tmp_path, *options) as process:
        moment = draw.randrange(20, STEPS - 100)
        deadline = time.monotonic() + 60
        while saved_step(tmp_path) < moment:
            assert process.poll() is None, (tmp_path / "output.txt").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.random() * 0.02)
        os.kill(workers_of(process)[draw.randrange(2)], signal.SIGKILL)
        assert process.wait(90) == 0, (tmp_path / "output.txt").read_text()
    assert "(exitcode: -9)" in (tmp_path / "output.txt").read_text()
    expected = workers(2, undisturbed, range(7, STEPS, 7))[0]
    assert expected["accuracy"] > 0.9
    assert expected["consensus_distance"] > 0
    assert len(expected["history"]) == STEPS
    assert numbers(json.loads((tmp_path / "result.json").read_text())) == expected
