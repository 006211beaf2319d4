"""Under a real Slurm: what ``initialize_dist`` reads, the example's job script, and all that ends a job before its time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decent_dp.checkpoint import latest, read_parameters
from tests.slurm_cluster import PATH, ROOT, Cluster, missing
from tests.test_docs import blocks
from tests.tools.test_launch_command import KEPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TRAIN, JOB = "examples/slurm/train.py", "examples/slurm/job.sbatch"
NODES, TASKS = 2, 2  # per node
EPOCHS, STEPS = 10, 10 * 11

# What `python` is in the jobs: until the job is requeued, an optimizer's step takes as long as PACE says.
PACED = """
import os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook
if "SLURM_RESTART_COUNT" not in os.environ:
    register_optimizer_step_post_hook(lambda *_: time.sleep(float(os.environ.get("PACE", "0"))))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    with Cluster(NODES) as started:
        (started.folder / "bin").mkdir()
        (started.folder / "paced.py").write_text(PACED)
        python = started.folder / "bin" / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} -W error {started.folder}/paced.py "$@"\n')
        python.chmod(0o755)
        yield started


def environ(cluster: Cluster, **also: str) -> dict[str, str]:
    path = os.pathsep.join([f"{cluster.folder}/bin", str(Path(sys.executable).parent), PATH])
    return {"PATH": path, "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}", **also}


# -- initialize_dist -------------------------------------------------------------------------------------------------------

READ = """
import dataclasses, json, os, socket, sys
import torch, torch.distributed as dist
import decent_dp
from decent_dp.launch import read_environment
found = dataclasses.asdict(read_environment(os.environ))
rank, world_size = decent_dp.initialize_dist()
total = torch.tensor([10.0 ** rank])
dist.all_reduce(total)
model = torch.nn.Linear(3, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica = decent_dp.gossip(model, optimizer, topology=sys.argv[1])
for _ in range(3):
    optimizer.zero_grad()
    (rank * model(torch.ones(4, 3)).sum()).backward()
    optimizer.step()
found |= {"host": socket.gethostname(), "joined": [rank, world_size], "total": float(total), "rounds": replica.stats().rounds}
found |= {"master": [os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])], "local": os.environ["LOCAL_WORLD_SIZE"]}
replica.close()
dist.destroy_process_group()
print("\\n" + json.dumps(found), flush=True)
"""


def read(cluster: Cluster, folder: Path, *options: str, topology: str = "ring") -> list[dict[str, Any]]:
    """What the tasks of a step have found, in the order of their ranks."""
    script = folder / "read.py"
    script.write_text(READ)
    text = cluster.run("srun", *options, "python", str(script), topology, env=environ(cluster))
    found = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [task["joined"] for task in sorted(found, key=lambda task: task["rank"])] == [
        [r, len(found)] for r in range(len(found))
    ]
    assert {task["total"] for task in found} == {float("1" * len(found))}
    assert {task["rounds"] for task in found} == {3}
    assert {task["launcher"] for task in found} == {"slurm"}
    assert all(task["master"] == [task["address"], task["port"]] for task in found)
    assert all(task["local"] == str(task["local_world_size"]) for task in found)
    return sorted(found, key=lambda task: task["rank"])


def test_two_tasks_on_each_node(cluster, tmp_path):
    # One of the topologies that ask how many workers a node has.
    found = read(cluster, tmp_path, "--nodes=2", "--ntasks-per-node=2", topology="hierarchical")
    assert [(t["host"], t["local_rank"], t["local_world_size"]) for t in found] == [
        ("node1", 0, 2),
        ("node1", 1, 2),
        ("node2", 0, 2),
        ("node2", 1, 2),
    ]
    assert {t["address"] for t in found} == {"node1"}


def test_uneven_tasks(cluster, tmp_path):
    found = read(cluster, tmp_path, "--nodes=2", "--ntasks=3")
    assert [(t["host"], t["local_rank"], t["local_world_size"]) for t in found] == [
        ("node1", 0, 2),
        ("node1", 1, 2),
        ("node2", 0, 1),
    ]
    assert {t["address"] for t in found} == {"node1"}


def test_worker_0_on_another_node_than_the_first(cluster, tmp_path):
    """A user's own order of nodes: Slurm sorts the list, and no variable says where worker 0 is."""
    order = tmp_path / "hosts"
    order.write_text("node2\nnode1\nnode1\n")
    (tmp_path / "read.py").write_text(READ)
    command = ["srun", "--ntasks=3", "--distribution=arbitrary", "python", str(tmp_path / "read.py"), "ring"]
    code, text = cluster.outcome(*command, env=environ(cluster, SLURM_HOSTFILE=str(order)))
    assert code != 0
    assert text.count("set MASTER_ADDR to the address of worker 0") == 3
    text = cluster.run(*command, env=environ(cluster, SLURM_HOSTFILE=str(order), MASTER_ADDR="node2"))
    assert text.count('"rounds": 3') == 3


# -- jobs that are ended before their time ---------------------------------------------------------------------------------


def parameters(folder: Path, n: int = NODES * TASKS) -> list[dict[str, torch.Tensor]]:
    """Of every worker, in the newest checkpoint."""
    newest = latest(folder / "checkpoints")
    assert newest is not None
    assert newest.name.startswith(f"step-{STEPS:08d}-")
    return [read_parameters(newest, rank=rank) for rank in range(n)]


@pytest.fixture(scope="module")
def uninterrupted(cluster, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """A run that nothing disturbs.

    It saves after each step, as all runs here do: a save finishes the exchange in flight, so that runs which save after
    different steps are not equal bit for bit.
    """
    folder = tmp_path_factory.mktemp("uninterrupted")
    size = [f"--nodes={NODES}", f"--ntasks-per-node={TASKS}"]
    command = ["python", TRAIN, "--folder", str(folder), "--epochs", str(EPOCHS), "--save-every", "1"]
    text = cluster.run("srun", *size, *command, env=environ(cluster))
    result = json.loads((folder / "result.json").read_text())
    assert (result["workers"], result["steps"]) == (4, STEPS)
    assert result["accuracy"] > 0.8
    assert "stopped" not in text
    found = parameters(folder)
    for first, second in zip(found[::TASKS], found[1::TASKS], strict=True):  # a node is one replica
        assert all(torch.equal(value, second[name]) for name, value in first.items())
    return found


class Job:
    """The example's job script: at first with slow steps, after a restart as fast as they are.

    Args:
        options: of sbatch, which count more than those in the script.
        env: beside the folder.
        arguments: of train.py, beside its length.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        *options: str,
        save_every: int = 1,
        env: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self._cluster, self.folder, self._output = cluster, folder, folder / "output.txt"
        size = [f"--nodes={NODES}", f"--ntasks-per-node={TASKS}", f"--output={self._output}"]
        train = ["--epochs", str(EPOCHS), "--save-every", str(save_every), *arguments]
        variables = environ(cluster, FOLDER=str(folder), PACE="1.0", **(env or {}))
        self.number = cluster.submit(*size, *options, JOB, *train, env=variables)

    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def state(self) -> dict[str, str]:
        return self._cluster.job(self.number)

    def until(self, happened: Callable[[], bool], seconds: float = 250) -> None:
        self._cluster.until(happened, seconds, self.output)

    def until_it_trains(self) -> None:
        self.until(lambda: "workers begin" in self.output())
        time.sleep(2)  # a step or two

    def saved_step(self) -> int:
        newest = latest(self.folder / "checkpoints")
        return 0 if newest is None else int(newest.name.split("-")[1])

    def kill_worker(self, rank: int) -> None:
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                command, variables = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
                wanted = {f"SLURM_JOB_ID={self.number}".encode(), f"SLURM_PROCID={rank}".encode(), b"SLURM_STEP_ID=0"}
                ours = f"SLURM_CONF={self._cluster.folder}/slurm.conf".encode()
                if TRAIN.encode() in command and wanted | {ours} <= set(variables):
                    os.kill(int(entry.name), signal.SIGKILL)
                    return
        raise AssertionError(f"worker {rank} does not run\n{self.output()}")

    def finish(self) -> None:
        # Not those that a job passes through: PREEMPTED, NODE_FAIL, SIGNALING and more, with which it is requeued or goes on.
        self.until(lambda: self.state()["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"))
        state = self.state()
        assert (state["JobState"], state["ExitCode"], state["Restarts"]) == ("COMPLETED", "0:0", "1"), self.output()


def assert_resumed_exactly(job: Job, expected: list[dict[str, torch.Tensor]], *, stopped: bool | None) -> None:
    """``stopped``: whether worker 0 has said so; None if nobody knows."""
    text = job.output()
    assert stopped in (None, "stopped: start it again to resume" in text), text
    begins = [(int(b), int(e)) for b, e in re.findall(r"4 workers begin at batch (\d+) of epoch (\d+)", text)]
    assert len(begins) == 2, text
    assert begins[0] == (0, 0) < begins[1], text
    if stopped:  # where the workers have stopped
        rounds = {int(number) for number in re.findall(r"all workers stop after round (\d+)", text)}
        assert rounds == {begins[1][0] + STEPS // EPOCHS * begins[1][1]}, text
    assert json.loads((job.folder / "result.json").read_text())["steps"] == STEPS
    for found, params in zip(parameters(job.folder), expected, strict=True):
        assert found.keys() == params.keys()
        for name in params:
            assert torch.equal(found[name], params[name]), name


def test_the_limit_on_time(cluster, uninterrupted, tmp_path):
    """Slurm signals the workers half a minute to a minute after the start; they save, and the job requeues itself."""
    job = Job(cluster, tmp_path, "--time=1", "--signal=USR1@1")
    job.until(lambda: job.state()["Restarts"] == "1")
    assert "stopped: start it again to resume" in job.output()
    job.finish()
    assert_resumed_exactly(job, uninterrupted, stopped=True)


def test_a_worker_that_is_killed(cluster, uninterrupted, tmp_path):
    job = Job(cluster, tmp_path)
    job.until(lambda: job.saved_step() >= 3)
    job.kill_worker(3)
    job.finish()
    assert "node2: task 3: Killed" in job.output()
    assert "PeerLostError" in job.output()
    assert_resumed_exactly(job, uninterrupted, stopped=False)


@pytest.mark.parametrize("partition", ["low", "low-at-once"])
def test_a_job_of_more_priority(cluster, uninterrupted, tmp_path, partition):
    """Slurm pre-empts the job, with SIGUSR1 and a minute to save, or with SIGTERM and its usual 30 seconds."""
    job = Job(cluster, tmp_path, f"--partition={partition}")
    job.until_it_trains()
    other = cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=hostname")
    job.finish()
    assert cluster.job(other)["JobState"] == "COMPLETED"
    # In the second case Slurm ends srun at once, and what the workers still write is lost; they have saved.
    assert_resumed_exactly(job, uninterrupted, stopped=partition == "low" or None)


def test_a_node_that_fails(cluster, uninterrupted, tmp_path):
    """The batch script ends with the job; Slurm requeues it, and starts it when the node is back."""
    job = Job(cluster, tmp_path)
    job.until(lambda: job.saved_step() >= 3)
    cluster.crash(2)
    job.finish()
    assert_resumed_exactly(job, uninterrupted, stopped=None)


def test_a_cancelled_job_does_not_come_back(cluster, tmp_path):
    job = Job(cluster, tmp_path, save_every=1_000_000)
    job.until_it_trains()
    cluster.run("scancel", str(job.number))
    job.until(lambda: job.state()["JobState"] == "CANCELLED")
    job.until(lambda: job.saved_step() > 0)  # within KillWait
    time.sleep(3)
    assert (job.state()["JobState"], job.state()["Restarts"]) == ("CANCELLED", "0")


# -- one task that starts again --------------------------------------------------------------------------------------------


def test_a_task_that_is_killed_starts_again_alone(cluster, tmp_path):
    """The job script of the page: the other tasks go on, and the first node has the store."""
    (tmp_path / "train.py").write_text(KEPT.replace('os.environ["RANK"]', 'os.environ["SLURM_PROCID"]'))
    (block,) = [b.code for b in blocks(ROOT / "docs" / "launch.md", "text") if "--kill-on-bad-exit=0" in b.code]
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n" + block.replace("train.py", f"{tmp_path}/train.py once"))
    output = tmp_path / "output.txt"
    sizes = ["--nodes=2", "--ntasks=3", "--ntasks-per-node=2"]
    number = cluster.submit(*sizes, f"--output={output}", str(script), env=environ(cluster))
    cluster.until(lambda: cluster.job(number)["JobState"] in ("COMPLETED", "FAILED"), 150, output.read_text)
    text = output.read_text()
    assert cluster.job(number)["JobState"] == "COMPLETED", text
    found = sorted((json.loads(line) for line in text.splitlines() if line.startswith("{")), key=lambda one: one["rank"])
    assert [(one["rank"], one["restarted"]) for one in found] == [(0, False), (1, True), (2, False)], text
    assert all(one["weight"] == found[0]["weight"] for one in found)


# -- without Slurm ---------------------------------------------------------------------------------------------------------


def test_the_example_alone(tmp_path):
    """Stopped by a signal and started again, it ends as one that was not."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PACE": "0.05"}
    (tmp_path / "paced.py").write_text(PACED)
    plain = [sys.executable, "-W", "error", TRAIN, "--small", "--epochs", "40"]
    folders = [tmp_path / "plain", tmp_path / "stopped"]
    for folder in folders:
        folder.mkdir()
    subprocess.run([*plain, "--folder", folders[0]], cwd=ROOT, env=env, check=True, timeout=180)
    paced = [sys.executable, "-W", "error", tmp_path / "paced.py", *plain[3:], "--folder", folders[1]]
    process = subprocess.Popen(paced, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "1 workers begin at batch 0 of epoch 0\n"
        time.sleep(1)
        process.send_signal(signal.SIGUSR1)
        text, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, text) == (0, "stopped: start it again to resume\n")
    assert not (folders[1] / "result.json").exists()
    done = subprocess.run(
        [*plain, "--folder", folders[1]], cwd=ROOT, env=env, capture_output=True, text=True, check=True, timeout=180
    )
    assert "begin at batch 0 of epoch 0" not in done.stdout
    results = [json.loads((folder / "result.json").read_text()) for folder in folders]
    assert results[0] == results[1]
    a, b = (read_parameters(folder / "checkpoints", rank=0) for folder in folders)
    assert all(torch.equal(a[name], b[name]) for name in a)
