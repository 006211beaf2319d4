"""Process groups of NCCL, with what one GPU allows."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import decent_dp
from benchmarks.gpu.case import PAIR, SINGLE, TRIO, SkipError, Worker, case
from benchmarks.gpu.keeping import everything, need_safetensors
from benchmarks.gpu.situations import PLAIN, check_script
from benchmarks.gpu.training import largest_difference, library, run_library, run_twin, values

BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")
# NCCL refuses two ranks on one GPU of one host. With a host's name of its own for each process it takes them for several
# hosts, and connects them over the loopback interface.
_AS_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}
# Seconds for NCCL to connect.
_CONNECT = 25.0


def need_nccl(worker: Worker) -> None:
    if not worker.cuda:
        raise SkipError("NCCL is for GPUs")
    if not dist.is_nccl_available():
        raise SkipError("this torch has no NCCL")


@contextlib.contextmanager
def only_worker(worker: Worker, backend: str) -> Iterator[None]:
    """A process group of this worker alone; of gloo without a GPU."""
    if worker.cuda:
        need_nccl(worker)
    store = dist.FileStore(str(worker.folder / f"store {backend}"), 1)  # type: ignore[attr-defined]
    dist.init_process_group(backend if worker.cuda else "gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@case("a process group of one, of NCCL", SINGLE, alone=True)
def alone(worker: Worker) -> str:
    """Trains as plain PyTorch, saves, loads and closes."""
    need_safetensors()
    from decent_dp.checkpoint import load, save

    for number, backend in enumerate(BACKENDS):
        with only_worker(worker, backend):
            run, began = run_library(PLAIN, worker)
            found, folder = values(run.model), worker.folder / str(number)
            save(run.replica, folder)
            with run.replica.averaged():
                pass
            distance = run.replica.consensus_distance()
            assert distance == 0.0, f"one replica is {distance:.2g} away from the mean"
            run.replica.close()
            again = library(PLAIN, worker)
            load(again.replica, folder)
            assert largest_difference(values(again.model), found) == 0.0, "the loaded replica is another"
            again.replica.close()
            twin = run_twin(PLAIN, 1, worker.device, began)[0]
            worst = largest_difference(found, values(twin))
            assert worst <= PLAIN.tolerance, f"{backend}: differs from plain PyTorch by {worst:.2g}"
    return f"equal: {', '.join(BACKENDS)}" if worker.cuda else "equal: gloo"


@case("a model on the CPU in a group of NCCL", SINGLE, alone=True)
def on_the_cpu(worker: Worker) -> str:
    """One worker needs no group, so it trains, on the CPU."""
    need_nccl(worker)
    with only_worker(worker, "nccl"):
        run, _ = run_library(replace(PLAIN, place=lambda model, _: model), worker)
        assert all(param.device.type == "cpu" for param in run.model.parameters())
        run.replica.close()
    return "trains"


@case("initialize_dist outside a launcher", SINGLE, alone=True)
def outside(worker: Worker) -> str:
    """One worker, on the first GPU, with the backend that is for it."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    rank, n = decent_dp.initialize_dist()
    try:
        assert (rank, n) == (0, 1), f"rank {rank} of {n}"
        backend = dist.get_backend()
        run, began = run_library(PLAIN, worker)
        found = values(run.model)
        run.replica.close()
        worst = largest_difference(found, values(run_twin(PLAIN, 1, worker.device, began)[0]))
        assert worst <= PLAIN.tolerance, f"differs from plain PyTorch by {worst:.2g}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return f"trains, with {backend}"


def on_one_gpu(worker: Worker, backend: str) -> Any:
    """A group of all workers, of which NCCL believes that each is a host.

    Raises:
        SkipError: this NCCL does not do it; that is not what it is for.
    """
    need_nccl(worker)
    os.environ.update(_AS_HOSTS, NCCL_HOSTID=f"host{worker.rank}")
    torch.cuda.set_device(worker.device)
    group = dist.new_group(range(worker.n), backend=backend, timeout=timedelta(seconds=_CONNECT))
    reasons: list[str] = ["it did not connect in time"]

    def meet() -> None:
        try:
            total = torch.ones(4, device=worker.device)
            dist.all_reduce(total, group=group)
            ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
            while not ready.query():  # a synchronisation would wait for ever
                time.sleep(0.01)
            if total.tolist() != [float(worker.n)] * 4:
                raise ValueError(f"its sum was {total.tolist()}")
            reasons.clear()
        except Exception as error:
            reasons[0] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    thread = threading.Thread(target=meet, daemon=True)
    thread.start()
    thread.join(_CONNECT)
    found = [reason for of_worker in worker.gather(list(reasons)) for reason in of_worker]
    if found:
        raise SkipError(f"NCCL has no two ranks on this GPU: {found[0]}")
    return group


def check_nccl(backend: str, changes: dict[str, Any], worker: Worker) -> str:
    """Exchanges over NCCL itself, between processes on one GPU, equal the twin."""
    group = on_one_gpu(worker, backend)
    text = check_script(replace(PLAIN, options={"process_group": group}, **changes), worker)
    return f"{text} (over NCCL)"


NCCL_SCRIPTS: dict[str, dict[str, Any]] = {"complete": {}, "no overlap": {"overlap": False}}
for _name, _changes in NCCL_SCRIPTS.items():
    case(f"nccl, one GPU as several: {_name}", PAIR, TRIO, alone=True, timeout=120)(partial(check_nccl, "nccl", _changes))
case("cpu:gloo,cuda:nccl, one GPU as several", PAIR, alone=True, timeout=120)(partial(check_nccl, BACKENDS[1], {}))


@case("nccl, one GPU as several: a checkpoint", PAIR, alone=True, timeout=120)
def resumes(worker: Worker) -> str:
    """Equals the run without a stop, bit for bit."""
    need_safetensors()
    from decent_dp.checkpoint import load, save

    group = on_one_gpu(worker, "nccl")
    script = replace(PLAIN, options={"process_group": group})
    run = library(script, worker)
    for t in range(4):
        run.step(t)
    save(run.replica, worker.folder / "checkpoints")
    for t in range(4, 8):
        run.step(t)
    due = everything(run.model)
    run.replica.close()
    again = library(script, worker)
    load(again.replica, worker.folder / "checkpoints")
    for t in range(4, 8):
        again.step(t)
    worst = largest_difference(list(everything(again.model).values()), list(due.values()))
    again.replica.close()
    assert worst == 0.0, f"the resumed run differs by {worst:.2g}"
    return "equal"


def check_refusal(backend: str, worker: Worker) -> str:
    """NCCL refuses two ranks on one GPU: an error on both workers that says what to do, soon."""
    need_nccl(worker)
    os.environ.pop("NCCL_HOSTID", None)
    torch.cuda.set_device(worker.device)
    group = dist.new_group(range(worker.n), backend=backend, timeout=timedelta(seconds=_CONNECT))
    began = time.monotonic()
    try:
        run, _ = run_library(replace(PLAIN, options={"process_group": group}), worker)
    except RuntimeError as error:
        text, seconds = " ".join(str(error).split()), time.monotonic() - began
    else:
        torch.cuda.synchronize(worker.device)
        run.replica.close()
        raise SkipError("this NCCL allows two ranks on one GPU")
    assert seconds < 30, f"the error came after {seconds:.0f} s"
    assert "GPU" in text, f"the error does not say that the GPU is shared: {text}"
    assert "LOCAL_RANK" in text, f"the error does not say what to do: {text}"
    return f"after {seconds:.1f} s: {text[:120]}"


for _backend in BACKENDS:
    case(f"{_backend}, two workers on one GPU: refused", PAIR, alone=True, timeout=120)(partial(check_refusal, _backend))
