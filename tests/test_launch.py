"""initialize_dist: under each launcher and under none, with GPUs and without."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import decent_dp
from decent_dp.launch import Launch, initialize_dist, read_environment
from decent_dp.launch.group import _unused_store
from tests.helpers import listening
from tests.members import make, step
from tests.workers import _store

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}


def launch_by_slurm(rank: int, n: int, port: int) -> Any:
    dist.destroy_process_group()
    own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0", "SLURM_JOB_ID": str(port - 20000)}
    job = {"SLURM_NTASKS": "16", "SLURM_NNODES": "4"}  # the step is smaller
    step_ = {"NUM_TASKS": str(n), "NUM_NODES": "1", "TASKS_PER_NODE": str(n), "NODELIST": "nowhere07"}
    os.environ.update({**SLURM, **own, **job, **{f"SLURM_STEP_{name}": value for name, value in step_.items()}})
    first, again = initialize_dist(), initialize_dist()
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    return first, again, float(total), os.environ["LOCAL_WORLD_SIZE"]


def test_tasks_of_slurm_meet(workers):
    port = free_port(range(20000 + os.getpid() % 9000, 30000))
    assert workers(2, launch_by_slurm, port) == [((rank, 2), (rank, 2), 3.0, "2") for rank in range(2)]


# -- reading ---------------------------------------------------------------------------------------------------------------


# As Slurm 22.05 gives them to worker 0 of: SLURM_HOSTFILE=(node2, node1, node1) srun --ntasks=3 --distribution=arbitrary
ARBITRARY = {
    "SLURM_DISTRIBUTION": "arbitrary",
    "SLURM_JOB_ID": "4",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[1-2]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_TASKS_PER_NODE": "2,1",
}


def changed(environ: dict[str, str], change: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in {**environ, **change}.items() if value is not None}


PORT = 20000 + 123456 % 10000
NODE = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "gpu03", "SLURM_STEP_TASKS_PER_NODE": "8"}
ONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}


@pytest.mark.parametrize(
    ("environ", "change", "launch"),
    [
        ({}, {}, Launch("none", 0, 1, 0, 1, None, None)),
        # The batch script itself, and a shell on a login node, are no tasks of a step.
        (SLURM, {"SLURM_STEP_ID": None, "SLURM_PROCID": "0"}, Launch("none", 0, 1, 0, 1, None, None)),
        (TORCHRUN, {}, Launch("torchrun", 3, 8, 1, 2, "node0", 29400)),
        ({**SLURM, **TORCHRUN}, {}, Launch("torchrun", 3, 8, 1, 2, "node0", 29400)),
        (ONE, {}, Launch("torchrun", 0, 1, 0, 1, "localhost", 1234)),
        (SLURM, {}, Launch("slurm", 5, 8, 1, 4, "gpu03", PORT)),
        (SLURM, {"MASTER_PORT": "77", "MASTER_ADDR": "10.0.0.1"}, Launch("slurm", 5, 8, 1, 4, "10.0.0.1", 77)),
        # A script has exported the number of workers.
        (SLURM, {"WORLD_SIZE": "8"}, Launch("slurm", 5, 8, 1, 4, "gpu03", PORT)),
        (
            SLURM,
            {**dict.fromkeys(k for k in SLURM if k.startswith("SLURM_STEP_N")), "SLURM_JOB_NODELIST": "job[1-2]"},
            Launch("slurm", 5, 8, 1, 4, "job1", PORT),
        ),
        (SLURM, NODE, Launch("slurm", 5, 8, 1, 8, "127.0.0.1", PORT)),
        (ARBITRARY, {"MASTER_ADDR": "node2"}, Launch("slurm", 0, 3, 0, 1, "node2", 20004)),
        (
            ARBITRARY,
            {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "node2", "SLURM_NODEID": "0"},
            Launch("slurm", 0, 3, 0, 2, "127.0.0.1", 20004),
        ),
    ],
)
def test_what_a_launcher_says(environ, change, launch):
    assert read_environment(changed(environ, change)) == launch


def test_jobs_and_steps_that_run_at_once_use_different_ports():
    """As in a search for a learning rate; and the next jobs may run beside them."""
    places = [(job, step) for job in "345" for step in range(8)] + [(job, 0) for job in (100, 101)]
    made = [read_environment({**SLURM, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}).port for job, step in places]
    assert len(set(made)) == len(made)
    # Not among the ports that Linux gives to outgoing connections, and not a system's; also of an interactive step.
    more = [{"SLURM_JOB_ID": "9999999999"}, {"SLURM_STEP_ID": "4294967290"}]
    made += [read_environment({**SLURM, **change}).port for change in more]
    assert all(port is not None and 20000 <= port < 30000 for port in made)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu01", "gpu01"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("gpu[010,012-014]", "gpu010"),
        ("node-a[2-3]-ib", "node-a2-ib"),
        ("rack[1-2]-node[03,05]-ib,x", "rack1-node03-ib"),
    ],
)
def test_the_first_node(nodes, first):
    assert read_environment({**SLURM, "SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize(
    ("counts", "node", "expected"),
    [
        ("4(x2),3", 1, 4),
        ("4(x2),3", 2, 3),
        ("2,1(x3),5", 4, 5),
        (None, 0, 4),  # given by no variable: eight tasks on two nodes
    ],
)
def test_tasks_per_node(counts, node, expected):
    environ = changed(SLURM, {"SLURM_NODEID": str(node), "SLURM_STEP_TASKS_PER_NODE": counts})
    assert read_environment(environ).local_world_size == expected


@pytest.mark.parametrize(
    ("environ", "change", "words"),
    [
        (TORCHRUN, {"MASTER_ADDR": None}, "MASTER_ADDR or MASTER_PORT is not"),
        (TORCHRUN, {"LOCAL_RANK": None}, "LOCAL_RANK is missing"),
        # Every worker would silently train alone.
        (TORCHRUN, {"RANK": None}, "RANK"),
        (TORCHRUN, {"WORLD_SIZE": None}, "WORLD_SIZE"),
        (TORCHRUN, {"RANK": "zero"}, "RANK must be a whole number, got 'zero'"),
        (TORCHRUN, {"LOCAL_RANK": ""}, "LOCAL_RANK must be a whole number, got ''"),
        (ARBITRARY, {}, r"arbitrary does not tell .* set MASTER_ADDR to the address of worker 0"),
        (SLURM, {"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS must be"),
        (SLURM, {"SLURM_STEP_NODELIST": "[1-2]"}, r"'\[1-2\]' names no host: set MASTER_ADDR"),
    ],
)
def test_missing_variables_and_bad_numbers(environ, change, words):
    with pytest.raises(RuntimeError, match=words):
        read_environment(changed(environ, change))


# -- backend and device ----------------------------------------------------------------------------------------------------


class Machine:
    """Stands for torch.distributed and the GPUs: notes what is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.backend, self.options, self.device = None, {}, None
        self.raises: Exception | None = None
        self.environ: dict[str, str] = {}
        monkeypatch.setattr("decent_dp.launch.group._open_store", self._open_store)
        monkeypatch.setattr("decent_dp.launch.group._unused_store", lambda *_: None)
        monkeypatch.setattr(dist, "init_process_group", self._init)
        monkeypatch.setattr(dist, "get_rank", lambda *_: self.options["rank"])
        monkeypatch.setattr(dist, "get_world_size", lambda *_: self.options["world_size"])
        self.gpus(0)

    def _open_store(self, launch: Launch) -> None:
        if self.raises is not None:
            raise self.raises

    def _init(self, backend: str, **options: Any) -> None:
        self.backend, self.options = backend, options

    def _set_device(self, index: int) -> None:
        assert self.backend is None, "the device must be current before NCCL is made"
        self.device = index

    def gpus(self, count: int, *, nccl: bool = True) -> None:
        self._monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        self._monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        self._monkeypatch.setattr(torch.cuda, "set_device", self._set_device)
        self._monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)

    def start(self, environ: dict[str, str]) -> tuple[int, int]:
        self.environ = dict(environ)
        self._monkeypatch.setattr(os, "environ", self.environ)
        return initialize_dist()


@pytest.fixture
def machine(monkeypatch) -> Machine:
    return Machine(monkeypatch)


TASK = {"SLURM_GPUS_PER_TASK": "1"}


@pytest.mark.parametrize(
    ("environ", "gpus", "change", "backend", "device"),
    [
        # Two workers on this node.
        (TORCHRUN, 0, {}, "gloo", None),
        (TORCHRUN, 2, {}, "nccl", 1),
        (TORCHRUN, -4, {}, "gloo", None),  # this torch has no NCCL
        # The launcher does not say how many workers a node has: local rank 3 of two GPUs has none of its own.
        (TORCHRUN, 2, {"LOCAL_WORLD_SIZE": None, "LOCAL_RANK": "3"}, "gloo", None),
        (SLURM, 4, {}, "nccl", 1),
        # Each task sees its own GPU alone.
        (SLURM, 1, TASK, "nccl", 0),
        (SLURM, 1, {"SLURM_GPUS_PER_TASK": "a100:1"}, "nccl", 0),
        (SLURM, 1, {"SLURM_GPU_BIND": "single:1"}, "nccl", 0),
        # Four tasks share what they see.
        (SLURM, 1, {}, "gloo", None),
        (SLURM, 1, {"SLURM_GPU_BIND": "single:4"}, "gloo", None),
        ({}, 3, {}, "nccl", 0),
    ],
)
def test_backend_and_device(machine, environ, gpus, change, backend, device):
    machine.gpus(abs(gpus), nccl=gpus > 0)
    environ = changed(environ, change)
    launch = read_environment(environ)
    assert machine.start(environ) == (launch.rank, launch.world_size)
    assert (machine.backend, machine.device) == (backend, device)
    assert (machine.options["rank"], machine.options["world_size"]) == (launch.rank, launch.world_size)
    # The variables that torch's env:// reads.
    assert machine.environ["LOCAL_WORLD_SIZE"] == str(launch.local_world_size)
    assert machine.environ.get("MASTER_ADDR") == launch.address
    assert machine.environ.get("MASTER_PORT") == (None if launch.port is None else str(launch.port))


def test_a_taken_port(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        monkeypatch.setattr(os, "environ", {**os.environ, **environ})
        with pytest.raises(RuntimeError, match=rf"port {port} of 127.0.0.1 is taken \(MASTER_PORT\).*--standalone") as caught:
            initialize_dist()
        assert type(caught.value) is RuntimeError
    assert not dist.is_initialized()


# -- for real --------------------------------------------------------------------------------------------------------------


def launch_alone(rank: int, n: int) -> list[Any]:
    from decent_dp.ddp import DecentralizedDataParallel

    dist.destroy_process_group()
    for name in list(os.environ):
        if name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD", "LOCAL_")):
            del os.environ[name]
    before = listening()
    found: list[Any] = [initialize_dist(), dist.get_backend(), initialize_dist()]
    model = DecentralizedDataParallel(torch.nn.Linear(2, 1), lambda params: torch.optim.SGD(params, lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    # Whatever gloo's own default group opens, there is no store and nothing of ours.
    found += [model.stats().updates, len(listening() - before) <= 1, "MASTER_PORT" in os.environ]
    model.close()
    return found


def test_alone_for_real(workers):
    assert workers(1, launch_alone) == [[(0, 1), "gloo", (0, 1), 1, True, False]]


def free_port(ports: range) -> int:
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


# -- restarts --------------------------------------------------------------------------------------------------------------


def test_workers_do_not_meet_those_of_an_earlier_attempt(monkeypatch):
    """torchrun's agent keeps one store for all attempts; workers of the last one may have died anywhere."""
    monkeypatch.setattr("decent_dp.launch.group._TIMEOUT", 5.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for attempt, n in enumerate((3, 3, 3, 2, 1)):
        # One that died before it had a name.
        server.set("decent_dp/worker/1", "an old number")
        # Worker 0 comes last or first: what is there until the others come is old.
        delays = [0.05 * (rank if attempt % 2 else n - rank) for rank in range(n)]
        with ThreadPoolExecutor(n) as pool:
            stores = list(pool.map(partial(_come, server.port, n), range(n), delays))
        for store in stores:
            assert not store.check(["address"])
        stores[0].set("address", str(attempt))
        assert [store.get("address") for store in stores] == [str(attempt).encode()] * n


def _come(port: int, n: int, rank: int, delay: float) -> Any:
    time.sleep(delay)
    return _unused_store(dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False), rank, n)


def start_as(rank: int, n: int, port: int, served: str = "True") -> tuple[int, int]:
    """Begins as a process of a launcher does, without any group of before."""
    if dist.is_initialized():
        dist.destroy_process_group()
    numbers = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": served})
    return initialize_dist()


def refused_restart(rank: int, n: int, port: int, served: str = "True") -> tuple[str, float]:
    """What a process is told that is started again alone, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        start_as(rank, n, port, served)
    return str(caught.value), time.monotonic() - began


def trains_until(board: Any, word: str, rank: int, dies: bool, run: str) -> str:
    """A worker of a run; it is killed after some steps, or ends at this word."""
    model, optimizer, replica = make(rank, faults=decent_dp.Tolerate(dead_after=4.0, run=run))
    t = 0
    while not board.check([word]):
        time.sleep(0.02)
        step(model, optimizer, t, rank)
        t += 1
        if dies and t == 10:
            board.set("dead", "")
            os.kill(os.getpid(), signal.SIGKILL)
    replica.close()
    return "trained"


def restarts_without_join(rank: int, n: int, port: int) -> Any:
    """Of three workers one dies, and is started again as in the beginning. Then two begin another run at the store, and at last
    the first run's workers begin anew."""
    board = _store()
    found: list[Any] = []
    if rank < 3:
        start_as(rank, 3, port)
        found.append(trains_until(board, "end", rank, rank == 1, "first"))
        board.set(f"ended {rank}", "")
    else:
        if rank == 3:
            board.wait(["dead"])
            found.append(refused_restart(1, 3, port))
            board.set("refused", "")
        board.wait(["refused"])
        start_as(rank - 3, 2, port)
        with pytest.raises(ValueError, match="a run of this name lives at this store"):
            make(rank - 3, faults=decent_dp.Tolerate(run="first"))
        board.set(f"second {rank}", "")
        found.append(trains_until(board, "second 3", rank - 3, False, "second"))
        board.set("end", "")
    board.wait(["ended 0", "ended 2"])
    if rank != 4:
        found.append(start_as(rank if rank < 3 else 1, 3, port))
    return found


def test_a_process_that_is_started_again_alone_is_told_to_join(workers):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = workers.outcomes(5, restarts_without_join, server.port, timeout=120)
    assert [outcome.trace for outcome in outcomes] == [""] * 5
    zero, one, two, (refused, *others), four = [outcome.value for outcome in outcomes]
    assert (zero, one, two) == (["trained", (0, 3)], None, ["trained", (2, 3)])
    assert (others, four) == (["trained", (1, 3)], ["trained"])
    message, seconds = refused
    assert message.startswith("the run 'first' lives at this store without worker 1")
    assert "decent_dp.join(run='first')" in message
    assert seconds < 10


def loses_its_store(rank: int, n: int, port: int) -> Any:
    """Worker 0 keeps the store, dies with it, and is started again alone."""
    board = _store()
    if rank < 3:
        start_as(rank, 3, port, served="False")
        return trains_until(board, "end", rank, rank == 0, "first")
    board.wait(["dead"])
    with contextlib.suppress(ConnectionRefusedError):
        while True:  # until its store is gone
            socket.create_connection(("127.0.0.1", port)).close()
            time.sleep(0.05)
    found = refused_restart(0, 3, port, served="False")
    board.set("end", "")
    return found


@pytest.mark.slow
def test_worker_0_that_is_started_again_with_its_store_is_told_to_join(workers):
    """The members write to the new store, which is where the old one was."""
    outcomes = workers.outcomes(4, loses_its_store, free_port(range(20000 + os.getpid() % 9000, 30000)), timeout=120)
    assert [outcome.trace for outcome in outcomes] == [""] * 4
    _, *trained, (message, seconds) = [outcome.value for outcome in outcomes]
    assert trained == ["trained", "trained"]
    assert message.startswith("the run 'first' lives at this store without worker 0")
    assert seconds < 15


def test_worker_0_says_that_it_waits(monkeypatch, caplog):
    for name, seconds in (("_TIMEOUT", 0.5), ("_SAY", 0.1), ("_LOOK", 0.1)):
        monkeypatch.setattr(f"decent_dp.launch.group.{name}", seconds)
    with pytest.raises(RuntimeError, match=r"worker 0 of 2 waited 0\.5 s for the others to start"):
        _unused_store(dist.HashStore(), 0, 2)
    (said,) = caplog.messages
    assert said.startswith("worker 0 of 2 has waited for the others for 0.1 s")
    assert "decent_dp.join()" in said
