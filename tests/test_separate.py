"""Workers that outlive each other: which of them start again, what ends with them, and how a run without survivors ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from decent_dp.launch import processes
from decent_dp.launch.local import worker_variables
from decent_dp.launch.processes import Ending, Failure, run_workers
from decent_dp.tools.cli import launch as command
from decent_dp.tools.cli import main
from tests.helpers import ROOT
from tests.tools.test_launch_command import BEGIN, JOIN_OR_BEGIN, launch

BOTH: Mapping[int, int] = {0: 0, 1: 0}

# Needs no torch, so that a process starts at once.
SCRIPT = """
import json, os, subprocess, sys, time
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def wait_for(name):
    while not os.path.exists(name):
        time.sleep(0.01)
"""


def run(
    folder: Path, script: str, look: Callable[[str], Mapping[int, int] | None], max_restarts: int = 0
) -> tuple[Ending, list[str]]:
    """Two workers. Also returns what was said; the file ``said-K`` is there when K lines were."""
    (folder / "train.py").write_text(f"{SCRIPT}\nos.chdir({str(folder)!r})\n{script}")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        (folder / f"said-{len(lines)}").touch()

    return run_workers(2, [str(folder / "train.py")], look=look, say=say, max_restarts=max_restarts), lines


def has_ended(pid: int) -> bool:
    """Whether a process has ended, or does in ten seconds; it may be a zombie."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


# -- who starts again ------------------------------------------------------------------------------------------------------

# Worker 1 fails, and is started again; then worker 0 fails; then worker 1 again, and, if worker 0 is back, both end well.
EACH_ONCE = """
if (rank, restarts) == (1, 0):
    os._exit(7)
wait_for("said-1" if rank == 0 else "said-2")
sys.exit(3 if rank == 0 and restarts == 0 else 4 if restarts == 1 and not os.path.exists("joined") else 0)
"""


def test_a_worker_that_has_not_joined_is_nobody_that_another_one_could_join(tmp_path):
    outcome, lines = run(tmp_path, EACH_ONCE, lambda _: BOTH, max_restarts=3)
    assert lines == [
        "worker 1 of 2 ended with exit code 7; the other one goes on, and it starts again (restart 1 of 3)",
        "worker 0 of 2 ended with exit code 3; none is left that it could join",
        "worker 1 of 2 ended with exit code 4; none is left that it could join",
    ]
    assert outcome.finished == ()
    assert outcome.first is not None
    assert (outcome.first.rank, outcome.first.code) == (1, 7)
    assert outcome.begun


def test_a_worker_that_has_joined_is_one_that_another_one_can_join(tmp_path):
    (tmp_path / "joined").touch()
    outcome, lines = run(
        tmp_path, EACH_ONCE, lambda _: {0: 0, 1: 5} if (tmp_path / "said-1").exists() else BOTH, max_restarts=3
    )
    assert lines == [
        "worker 1 of 2 ended with exit code 7; the other one goes on, and it starts again (restart 1 of 3)",
        "worker 0 of 2 ended with exit code 3; the other one goes on, and it starts again (restart 1 of 3)",
    ]
    assert outcome == Ending((0, 1))


# Worker 1 is killed at its 20th step. With "both" worker 0 is killed when worker 1 is back, and all end when it is back, too.
PAIR = (
    BEGIN
    + """
import signal
import decent_dp
restarted, rank, both = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0, int(os.environ["RANK"]), "both" in sys.argv
"""
    + JOIN_OR_BEGIN
    + """
faults = decent_dp.Tolerate(dead_after=3.0, min_workers=1 if both else 2)
replica = decent_dp.gossip(model, optimizer, faults=faults, transport=transport)
# Epochs with both, and the updates at the first one: soon after it a process that has joined can let others in.
whole, first, last = set(), 10**6, 10**6
while replica.stats().rounds < last:
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    roster = replica.roster
    if roster.epoch > 0 and roster.members == (0, 1):
        whole.add(roster.epoch)
        first = min(first, replica.stats().updates)
    if not restarted and replica.stats().updates == (20 if rank == 1 else first + 150):
        os.kill(os.getpid(), signal.SIGKILL)
    if restarted and len(whole) == rank + 1:
        last = min(last, max(replica.stats().rounds, roster.start) + 30)
replica.close()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("both", [False, True])
def test_a_run_is_joined_while_somebody_is_in_it(tmp_path, both):
    (tmp_path / "train.py").write_text(PAIR)
    words = ["both"] if both else []
    done = launch("-n", "2", "--keep-going", "--max-restarts", "3", "train.py", *words, folder=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("decent-dp: ")]
    killed = "was killed by SIGKILL (is the memory full?)"
    if both:
        again = f"{killed}; the other one goes on, and it starts again (restart 1 of 3)"
        assert (done.returncode, lines) == (0, [f"decent-dp: worker {rank} of 2 {again}" for rank in (1, 0)])
        return
    assert done.returncode == 1
    assert sum("starts again" in line for line in lines) <= 1
    (of_0,) = [line for line in lines if line.startswith("decent-dp: worker 0")]
    assert "min_workers=2" in of_0
    assert of_0.endswith("; none is left that it could join")
    assert lines[-1] == f"decent-dp: worker 1 of 2 {killed}"


@pytest.mark.parametrize("page", ["launch", "faults"])
@pytest.mark.parametrize("gpus", [0, 4])
def test_the_pages_choose_the_gpu_before_they_join(monkeypatch, page, gpus):
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"```python no-run\n(.*?)```", text, re.DOTALL) if "decent_dp.join(" in part]
    environ = {**worker_variables(3, 4, 1), "TORCHELASTIC_RESTART_COUNT": "1", "JOIN": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    calls = Mock()
    calls.torch.cuda.is_available.return_value = gpus > 0
    calls.torch.cuda.device_count.return_value = gpus
    names = {"os": os, "torch": calls.torch, "decent_dp": calls.decent_dp, "model": None, "optimizer": None, "steps": 0}
    calls.decent_dp.gossip.return_value.stats.return_value.updates = 0
    exec(block, names)
    made = [name for name, *_ in calls.mock_calls]
    assert "decent_dp.initialize_dist" not in made
    assert ("torch.cuda.set_device" in made[: made.index("decent_dp.join")]) == (gpus > 0)
    if gpus:
        calls.torch.cuda.set_device.assert_called_once_with(3)


# -- what ends with a worker, and how it is told ---------------------------------------------------------------------------

WITH_A_CHILD = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
with open(f"child-{rank}.part", "w") as file:
    file.write(str(child.pid))
os.rename(f"child-{rank}.part", f"child-{rank}")
wait_for("child-0")
wait_for("child-1")
if rank == 1:
    os._exit(3)
time.sleep(1000)
"""


def test_what_a_worker_has_started_ends_with_it(tmp_path):
    """Worker 1 fails, and worker 0 is ended."""
    outcome, _ = run(tmp_path, WITH_A_CHILD, lambda _: None)
    assert outcome.first is not None
    assert (outcome.first.rank, outcome.begun) == (1, False)
    for rank in range(2):
        assert has_ended(int((tmp_path / f"child-{rank}").read_text()))


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ({"message": {"message": "ValueError: boom"}}, "ValueError: boom"),
        ({"message": "boom"}, ""),
    ],
)
def test_a_note_of_another_form(tmp_path, note, message):
    write = f"open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write({json.dumps(note)!r})"
    outcome, _ = run(tmp_path, f"if rank == 0:\n    {write}\n    os._exit(3)\ntime.sleep(1000)", lambda _: None)
    assert outcome.first is not None
    assert (outcome.first.rank, outcome.first.code, outcome.first.message) == (0, 3, message)
    assert outcome.first.time == pytest.approx(time.time(), abs=60)


# Worker 0 gives up on worker 1, which stands still; at its end worker 1 says something else, or nothing.
GIVEN_UP = """
if rank == 0:
    wait_for("ready")
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": {"message": "decent_dp.errors.PeerTimeoutError: worker 1 is late"}}, file)
    os._exit(1)
import signal
signal.signal(signal.SIGTERM, HANDLER)
open("ready", "w").close()
time.sleep(1000)
"""


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "lambda *_: os._exit(5)"])
def test_a_worker_that_the_launcher_has_ended_is_not_the_first_failure(tmp_path, monkeypatch, handler):
    """Also one that ends in another way than by SIGTERM."""
    monkeypatch.setattr(processes.run_workers, "__kwdefaults__", {**processes.run_workers.__kwdefaults__, "end_s": 0.5})
    outcome, _ = run(tmp_path, GIVEN_UP.replace("HANDLER", handler), lambda _: None)
    assert outcome.first is not None
    assert (outcome.first.rank, outcome.first.message) == (0, "decent_dp.errors.PeerTimeoutError: worker 1 is late")


def test_workers_end_if_another_one_cannot_be_started(tmp_path, monkeypatch):
    popen: Any = subprocess.Popen
    started: list[Any] = []

    def start(*args: Any, **kwargs: Any) -> Any:
        if started:
            raise OSError("no more processes")
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(OSError, match="no more processes"):
        run(tmp_path, "time.sleep(1000)", lambda _: BOTH)
    assert started[0].returncode is not None


def test_a_signal_that_is_ignored_stays_so():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        own = signal.getsignal(signal.SIGTERM)
        with processes._noted((signal.SIGTERM, signal.SIGHUP)) as heard:
            os.kill(os.getpid(), signal.SIGHUP)
            assert heard == []
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("begun", [False, True])
def test_the_last_line_says_what_keep_going_needs(tmp_path, monkeypatch, capfd, begun):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):  # the command sets them
        monkeypatch.setenv(name, "")
    (tmp_path / "train.py").write_text("")
    outcome = Ending((), Failure(1, 3, "", 0.0), begun=begun)
    monkeypatch.setattr(processes, "run_workers", lambda *_, **__: outcome)
    assert main(["launch", "--nproc", "2", "--keep-going", str(tmp_path / "train.py")]) == 1
    line = "decent-dp: worker 1 of 2 ended with exit code 3"
    assert capfd.readouterr().err.splitlines()[-1] == (line if begun else line + command._NOT_BEGUN)
