"""``decent-dp launch``: workers on one machine, what it says, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from decent_dp.launch import script
from decent_dp.launch.local import usable_cores, worker_environment
from decent_dp.launch.processes import Failure, cause
from decent_dp.launch.script import last_line
from decent_dp.tools.cli import launch as command
from decent_dp.tools.cli import main
from tests.tools.test_doctor import free_port

_OF_LAUNCHERS = ("SLURM_", "MASTER_", "RANK", "WORLD", "LOCAL_", "TORCH", "GLOO_", "OMP_", "LOGLEVEL")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
# tests.helpers, for the scripts.
_PATHS = [str(Path(__file__).parents[2]), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
CLEAN |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(_PATHS)}
LAUNCH = [str(Path(sys.executable).with_name("decent-dp")), "launch"]


def launch(*words: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    how: Any = {"capture_output": True, "text": True, "timeout": 300, "cwd": folder, "env": {**CLEAN, **environ}}
    done = subprocess.run([*LAUNCH, *words], **how)
    done.stderr = own_lines(done.stderr)
    return done


def own_lines(text: str) -> str:
    """Without torch's warnings of a machine that has no name for 127.0.0.1, or is slow to find it."""
    return "".join(line for line in text.splitlines(keepends=True) if not re.match(r"\[W.*socket\.cpp", line))


def results(done: subprocess.CompletedProcess[str], n: int) -> list[Any]:
    """What the workers wrote, one JSON document each, by rank."""
    assert done.returncode == 0, done.stderr
    found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda one: one["rank"])
    assert [one["rank"] for one in found] == list(range(n))
    return found


# -- the main promise ------------------------------------------------------------------------------------------------------

BEGIN = """
import json, os, pickle, sys, time
import torch, torch.distributed as dist
from decent_dp import initialize_dist

def tell(**facts):
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), **facts}) + "\\n")
    sys.stdout.flush()
"""

SCRIPT = (
    BEGIN
    + """
import beside

class Point:
    x = 3

initialize_dist()
total = torch.ones(1)
dist.all_reduce(total)
tell(
    total=float(total), argv=sys.argv, beside=beside.name, path=sys.path[0], file=__file__, threads=torch.get_num_threads(),
    interface=os.environ["GLOO_SOCKET_IFNAME"], address=os.environ["MASTER_ADDR"], local=os.environ["LOCAL_WORLD_SIZE"],
    point=pickle.loads(pickle.dumps(Point())).x, spec=__spec__, name=__name__,
)
dist.destroy_process_group()
"""
)


@pytest.mark.slow
def test_a_script_runs_as_python_would_run_it_on_each_worker(tmp_path):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    (scripts / "train.py").write_text(SCRIPT)
    (scripts / "beside.py").write_text("name = 'beside'")
    # In the current folder, which is not the script's: it must not be found.
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong json')")
    words = ["--epochs", "5", "-m", "--nproc", "7", "$$HOME ${local_rank}", ""]
    done = launch("--nproc", "2", "scripts/train.py", *words, folder=tmp_path)
    threads = max(1, usable_cores() // 2)
    for one in results(done, 2):
        assert one["total"] == 2
        assert one["argv"] == ["scripts/train.py", *words]
        assert (one["beside"], one["path"], one["file"]) == ("beside", str(scripts), str(scripts / "train.py"))
        assert (one["threads"], one["interface"], one["address"], one["local"]) == (threads, "lo", "127.0.0.1", "2")
        assert (one["point"], one["spec"], one["name"]) == (3, None, "__main__")
    assert done.stderr.splitlines() == [
        "workers  2 (--nproc)",
        "backend  gloo: no GPU is visible",
        f"threads  {threads} per worker ({usable_cores()} cores)",
        "network  loopback only (lo): nothing leaves this machine",
        "output   of all workers, here",
    ]


# -- without a process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ:
        if name.startswith(_OF_LAUNCHERS):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("no.py", "there is no file 'no.py': write the path of a Python file"),
        ("some.module", "there is no file 'some.module': did you forget -m?"),
        ("-m no_such.module", "there is no module 'no_such' here: -m takes the name of a module, as python -m does"),
        ("--nproc 0 train.py", "--nproc must be a whole number, at least 1, or auto, got '0'"),
        ("--nproc all train.py", "--nproc must be a whole number, at least 1, or auto, got 'all'"),
        ("--max-restarts -1 train.py", "Invalid value for '--max-restarts'"),
    ],
)
def test_bad_input_is_one_line(no_launcher, tmp_path, capfd, words, message):
    no_launcher.chdir(tmp_path)
    Path("train.py").write_text("")
    assert main(["launch", *words.split()]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"decent-dp: {message}")
    assert err.count("\n") == 1


def test_a_worker_starts_no_workers(no_launcher, tmp_path, capfd):
    (tmp_path / "train.py").write_text("")
    for environ, names in (
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK and WORLD_SIZE"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "SLURM_PROCID and SLURM_STEP_ID"),
    ):
        with no_launcher.context() as context:
            for name, value in environ.items():
                context.setenv(name, value)
            assert main(["launch", str(tmp_path / "train.py")]) == 2
            err = capfd.readouterr().err
            assert err.startswith(
                f"decent-dp: decent-dp launch starts workers itself, and was called in a worker ({names} are set)"
            )
            assert err.count("\n") == 1


def test_the_users_settings_stay():
    assert worker_environment(2, {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9", "HOME": "/"}) == {
        "OMP_NUM_THREADS": "7",
        "GLOO_SOCKET_IFNAME": "eth9",
    }
    assert worker_environment(1, {"OMP_NUM_THREADS": ""})["OMP_NUM_THREADS"] == str(usable_cores())
    assert worker_environment(10**6, {})["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("gpus", "cores", "count", "why", "backend"),
    [
        (0, 3, 3, "one per core", "gloo: no GPU is visible"),
        (0, 64, 8, "at most 8 on 64 cores", "gloo: no GPU is visible"),
        (2, 64, 2, "one per visible GPU", "nccl: each worker has its own GPU (2 visible)"),
    ],
)
def test_how_many_workers_auto_is(no_launcher, capsys, gpus, cores, count, why, backend):
    no_launcher.setattr("decent_dp.launch.group.usable_gpus", lambda: gpus)
    no_launcher.setattr("decent_dp.launch.local.usable_cores", lambda: cores)
    found, reason = command._count("auto")
    assert (found, reason) == (count, f"{why}; --nproc changes it")
    command._announce(found, reason, worker_environment(found, {}))
    assert f"backend  {backend}\n" in capsys.readouterr().err


def test_more_workers_than_gpus_and_a_users_settings_are_said(no_launcher, capsys):
    no_launcher.setattr("decent_dp.launch.group.usable_gpus", lambda: 2)
    no_launcher.setenv("OMP_NUM_THREADS", "3")
    no_launcher.setenv("GLOO_SOCKET_IFNAME", "eth9")
    command._announce(4, "--nproc", worker_environment(4, os.environ))
    assert capsys.readouterr().err.splitlines()[1:4] == [
        "backend  gloo: 4 workers for 2 visible GPUs",
        "threads  3 per worker (OMP_NUM_THREADS is set)",
        "network  interface eth9 (GLOO_SOCKET_IFNAME is set)",
    ]


def test_the_cause_is_no_worker_that_lost_another():
    lost = Failure(0, 1, "decent_dp.errors.PeerLostError: worker 1 is gone", 3.0)
    gloo = Failure(1, 1, "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:41", 3.0)
    ended = Failure(2, -signal.SIGTERM, "", 2.0)
    killed = Failure(3, -signal.SIGKILL, "", 4.0)
    raised = Failure(4, 1, "ValueError: boom", 4.5)
    assert cause([lost, gloo, ended, killed, raised]) is killed
    assert cause([lost, gloo, ended, raised]) is raised
    assert cause([lost, gloo, ended]) is ended
    assert str(killed) == "was killed by SIGKILL (is the memory full?)"
    assert str(ended) == "was killed by SIGTERM"
    assert str(raised) == "failed: ValueError: boom"
    assert str(Failure(0, 3, "", 0.0)) == "ended with exit code 3"
    assert str(Failure(0, -60, "", 0.0)) == "was killed by signal 60"


def test_an_exception_is_one_line_of_bounded_length():
    assert last_line(ValueError("two\n  lines")) == "ValueError: two lines"
    assert len(last_line(ValueError("x" * 10_000))) == 500
    assert last_line(KeyboardInterrupt()) == "KeyboardInterrupt"


# -- other scripts, and other ends -----------------------------------------------------------------------------------------

TRAINING = (
    BEGIN
    + """
import signal
import decent_dp
rank, n = initialize_dist()
torch.manual_seed(rank)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
replica = decent_dp.gossip(model, optimizer)

def step():
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
"""
)


@contextlib.contextmanager
def running(*words: str, folder: Path, n: int) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """The launcher, and the processes of its workers, which have each written a line with their number."""
    # Where the tests run in the background of a shell, their children ignore SIGINT.
    how: Any = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    command = [*LAUNCH, "--nproc", str(n), *words]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=CLEAN, **how
    ) as process:
        try:
            assert process.stdout is not None
            pids = [json.loads(process.stdout.readline())["pid"] for _ in range(n)]
            yield process, pids
        finally:
            process.kill()


def all_gone(pids: list[int]) -> bool:
    """Whether these processes have ended, or do in a minute."""
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_nothing_listens_beyond_loopback_while_replicas_train(tmp_path):
    (tmp_path / "train.py").write_text(
        TRAINING
        + """
from torch.utils.data import DataLoader
from tests.helpers import listening

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return torch.tensor(float(i))

if __name__ == "__main__":
    for _ in range(3):
        step()
    dist.barrier()
    # Its processes import this script, and find its class.
    loaded = sum(float(x) for x in DataLoader(Points(), num_workers=1, multiprocessing_context="spawn"))
    tell(rounds=replica.stats().rounds, loaded=loaded, own=sorted(listening()), launchers=sorted(listening(os.getppid())))
    replica.close()
"""
    )
    for one in results(launch("-n", "2", "train.py", folder=tmp_path), 2):
        assert (one["rounds"], one["loaded"]) == (3, 6.0)
        assert one["launchers"]
        for address in [*one["own"], *one["launchers"]]:
            assert address.startswith("0100007F:"), address


@pytest.mark.slow
def test_a_module(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "__init__.py").write_text("name = 'project'")
    (tmp_path / "project" / "train.py").write_text(
        BEGIN + "from project import name\ninitialize_dist()\n"
        "tell(name=name, argv=sys.argv, spec=__spec__.name, main=__name__)\ndist.destroy_process_group()"
    )
    done = launch("-n", "2", "-m", "project.train", "--lr", "1", folder=tmp_path)
    for one in results(done, 2):
        assert (one["name"], one["spec"], one["main"]) == ("project", "project.train", "__main__")
        assert one["argv"] == [str(tmp_path / "project" / "train.py"), "--lr", "1"]


def test_what_runs_at_exit_sees_the_exception_that_ends_a_script(tmp_path):
    """As in Python. The library then waits for nobody, and tells the others."""
    (tmp_path / "train.py").write_text(
        "import atexit, sys\natexit.register(lambda: print(repr(sys.last_value)))\nraise KeyError('labels')"
    )
    command = [sys.executable, script.__file__, "0", "0", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "KeyError('labels')\n")


@pytest.mark.slow
def test_a_worker_that_raises_is_named_and_ends_all(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (tmp_path / "train.py").write_text(
        TRAINING
        + """
for t in range(10**6):
    step()
    if rank == 1 and t == 20:
        raise ValueError("boom\\nin two lines")
"""
    )
    began = time.monotonic()
    done = launch("-n", "3", "train.py", folder=tmp_path, TMPDIR=str(notes))
    assert time.monotonic() - began < 250
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[-1] == "decent-dp: worker 1 of 3 failed: ValueError: boom in two lines; its traceback is above"
    assert '[rank1]:   File "' in done.stderr
    assert "train.py" in done.stderr
    # Only the script's own frames.
    assert "script.py" not in done.stderr
    assert list(notes.glob("decent-dp-*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import sys\nsys.exit(3)", "worker 0 of 1 ended with exit code 3"),
        ("x = = 1", "worker 0 of 1 failed: File"),
        ("import no_such_module", "worker 0 of 1 failed: ModuleNotFoundError: No module named 'no_such_module'; its traceback"),
    ],
)
def test_a_script_that_does_not_get_far(tmp_path, text, words):
    (tmp_path / "train.py").write_text(text)
    done = launch("-n", "1", "train.py", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"decent-dp: {words}")


@pytest.mark.slow
def test_restarts(tmp_path):
    (tmp_path / "train.py").write_text(
        TRAINING
        + """
step()
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the first attempt")
step()
replica.average_()
tell(weight=model.weight.tolist(), restarts=os.environ["TORCHELASTIC_RESTART_COUNT"])
replica.close()
"""
    )
    done = launch("-n", "2", "--max-restarts", "1", "train.py", folder=tmp_path)
    first, second = results(done, 2)
    assert first["weight"] == second["weight"]
    assert first["restarts"] == second["restarts"] == "1"
    assert "ValueError: the first attempt" in done.stderr
    line = "worker 1 of 2 failed: ValueError: the first attempt; its traceback is above; all start again (restart 1 of 1)"
    assert f"decent-dp: {line}" in done.stderr.splitlines()


# After ``restarted`` and ``rank``: joins the run, or begins it.
JOIN_OR_BEGIN = """
if restarted:
    transport = decent_dp.join()
else:
    decent_dp.initialize_dist()
    transport = None
torch.manual_seed(rank)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""

# Worker 1 kills itself at its 20th step, and, if "twice" is said, again when it has come back. A moment later all stop.
KEPT = (
    BEGIN
    + """
import signal
import decent_dp
restarted, twice = int(os.environ["TORCHELASTIC_RESTART_COUNT"]) > 0, "twice" in sys.argv
rank = int(os.environ["RANK"])
"""
    + JOIN_OR_BEGIN
    + """
faults = decent_dp.Tolerate(dead_after=3.0)
replica = decent_dp.gossip(model, optimizer, faults=faults, transport=transport)
rosters, last = [], 10**6
while replica.stats().rounds < last:
    optimizer.zero_grad()
    model(torch.randn(4, 2)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
    roster = replica.roster
    if roster.epoch > 0 and roster.members not in rosters[-1:]:
        rosters.append(roster.members)
        came_back = (0, 1, 2) in rosters
        if came_back and (roster.members == (0, 2) or not twice):
            last = max(replica.stats().rounds, roster.start) + 30  # in a call before, a process that joins takes no part
    if rank == 1 and (came_back and twice if restarted and rosters else replica.stats().updates == 20):
        os.kill(os.getpid(), signal.SIGKILL)
replica.average_()
sys.stdout.write(json.dumps({"rank": rank, "restarted": restarted, "weight": model.weight.tolist()}) + "\\n")
sys.stdout.flush()
replica.close()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("often", ["once", "twice"])
def test_with_keep_going_a_dead_worker_is_started_again_by_itself(tmp_path, often):
    (tmp_path / "train.py").write_text(KEPT)
    done = launch("-n", "3", "--keep-going", "--max-restarts", "1", "train.py", often, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda one: one["rank"])
    living = [(0, False), (1, True), (2, False)] if often == "once" else [(0, False), (2, False)]
    assert [(one["rank"], one["restarted"]) for one in found] == living
    assert all(one["weight"] == found[0]["weight"] for one in found)
    killed = "decent-dp: worker 1 of 3 was killed by SIGKILL (is the memory full?); the other 2 go on"
    expected = [f"{killed}, and it starts again (restart 1 of 1)"]
    if often == "twice":
        expected += [killed, "decent-dp: 2 of 3 workers have finished"]
    assert [line for line in done.stderr.splitlines() if line.startswith("decent-dp: ")] == expected


@pytest.mark.slow
def test_an_agent_of_torchrun_for_each_worker_restarts_it_alone(tmp_path):
    """As on several machines: the agents do not end the workers of each other."""
    (tmp_path / "train.py").write_text(KEPT)
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nnodes=3", "--nproc-per-node=1", "--max-restarts=1"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path, "env": CLEAN}
    with contextlib.ExitStack() as ending:
        agents = []
        for rank in range(3):
            command = [*torchrun, f"--node-rank={rank}", "train.py", "once"]
            agents.append(ending.enter_context(subprocess.Popen(command, **how)))
            ending.callback(agents[-1].kill)
        outputs = [agent.communicate(timeout=200) for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0, 0], outputs
        found = [json.loads(out) for out, _ in outputs]
        assert [one["restarted"] for one in found] == [False, True, False]
        assert all(one["weight"] == found[0]["weight"] for one in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "words"),
    [
        # Before the run has begun: a worker could not join, and the others would wait for it.
        ("initialize_dist() if os.environ['RANK'] == '0' else 1 / 0", "failed: ZeroDivisionError: division by zero; its"),
        # Without faults= there is nothing to go on with.
        (
            TRAINING.replace(BEGIN, "") + "step()\nif rank == 1:\n    os._exit(3)\nwhile True:\n    step()",
            "ended with exit code 3",
        ),
    ],
)
def test_with_keep_going_a_run_that_cannot_go_on_ends(tmp_path, text, words):
    (tmp_path / "train.py").write_text(BEGIN + text)
    done = launch("-n", "2", "--keep-going", "--max-restarts", "3", "train.py", folder=tmp_path)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("decent-dp: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"decent-dp: worker 1 of 2 {words}")
    assert lines[0].endswith(command._NOT_BEGUN)


PREEMPTED = (
    TRAINING
    + """
from decent_dp.checkpoint import Preemption, save
with Preemption(replica) as stop:
    tell(pid=os.getpid())
    for t in range(10**6):
        step()
        if stop.due:
            assert save(replica, "checkpoints", {"step": t}).error is None
            raise SystemExit(0)
"""
)


@pytest.mark.slow
def test_sigterm_reaches_preemption_in_the_workers(tmp_path):
    (tmp_path / "train.py").write_text(PREEMPTED)
    with running("train.py", folder=tmp_path, n=2) as (process, pids):
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.splitlines()[-1] == "decent-dp: stopped by SIGTERM; the workers have ended"
    assert "Traceback" not in err
    assert all_gone(pids)
    assert len(list((tmp_path / "checkpoints").iterdir())) >= 1


WAITING = BEGIN + "initialize_dist()\ntell(pid=os.getpid())\ntime.sleep(1000)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, []), (signal.SIGHUP, []), (signal.SIGKILL, []), (signal.SIGTERM, ["--keep-going"])],
)
def test_no_worker_outlives_the_launcher(tmp_path, number, words):
    (tmp_path / "train.py").write_text(WAITING)
    with running(*words, "train.py", folder=tmp_path, n=2) as (process, pids):
        process.send_signal(number)
        process.communicate(timeout=120)
        assert all_gone(pids)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
