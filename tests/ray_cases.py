"""What runs in the workers of Ray, and a small cluster to run it in.

Not in the tests' own module, because Ray's workers import it.
"""

from __future__ import annotations

import os
import secrets
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import decent_dp
from tests.framework_cases import Model, Points, Run, collectives, copies, quiet_frameworks
from tests.helpers import error_of

ROOT = Path(__file__).parents[1]
EPOCHS = 3
OPTIONS = {"topology": "base-2"}


def ray_environment() -> dict[str, str]:
    """For the process that starts Ray, and what it starts: nothing is sent, written at home, or printed in colour."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_TOKEN": secrets.token_hex(),
        "RAY_COLOR_PREFIX": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "NO_COLOR": "1",
    }


@contextmanager
def cluster(cpus: int = 3) -> Iterator[None]:
    """Ray on this machine, ended afterwards."""
    import ray

    os.environ.update(ray_environment())
    # Ray's sockets have long names, and a socket's name at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=80 * 2**20, _temp_dir=folder, log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()


def loader_of(batch: int = 8) -> Any:
    from ray.train.torch import prepare_data_loader

    return prepare_data_loader(DataLoader(Points(), batch_size=batch, shuffle=True))


def train_loop(config: dict[str, Any]) -> None:
    """Trains ``Model``, and saves this worker's Run.

    With ``kill``, worker 1 is killed in the second epoch after each start, so that only a start in the last epoch gets through.
    """
    import ray.train
    from ray.train import Checkpoint
    from ray.train.torch import prepare_model

    from decent_dp.checkpoint import load, save

    quiet_frameworks()
    out = Path(config["out"])
    rank = dist.get_rank()
    model = prepare_model(Model(seed=rank), parallel_strategy=None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    replica = decent_dp.gossip(model, optimizer, **OPTIONS)
    loader, run, first = loader_of(), Run(), 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            at = load(replica, folder)
        assert at is not None
        first, run.losses, model.seen = at["epoch"], at["losses"], at["seen"]
    found: list[str] = []
    for epoch in range(first, EPOCHS):
        loader.sampler.set_epoch(epoch)
        with collectives() as calls:
            for number, batch in enumerate(loader):
                if config.get("kill") and (rank, epoch, number) == (1, first + 1, 2):
                    ray.train.get_all_reported_checkpoints()  # until Ray knows of the last one
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = model(**batch)["loss"]
                run.losses.append(float(loss))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        found += calls
        if config.get("kill") and epoch + 1 < EPOCHS:
            state = {"epoch": epoch + 1, "losses": run.losses, "seen": model.seen}
            with tempfile.TemporaryDirectory() as folder:
                path = save(replica, folder, state).wait()
                ray.train.report({"epoch": epoch}, checkpoint=Checkpoint.from_directory(path) if path else None)
    run.params, run.rounds = copies(model), replica.stats().rounds
    with replica.averaged():
        run.mean = copies(model)
    group: Any = dist.distributed_c10d._get_default_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME")
    about = {
        "environment": {name: os.environ.get(name) for name in names},
        "timeout": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "threads": torch.get_num_threads(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "first": first,
    }
    replica.close()
    about["refused"] = error_of(forgetful)
    torch.save({"run": vars(run), "batches": model.seen, "collectives": found, "about": about}, out / f"{rank}.pt")


def forgetful() -> None:
    """Does not tell prepare_model that it is to add no DDP."""
    from ray.train.torch import prepare_model

    wrapped = prepare_model(Model())
    replica = decent_dp.gossip(wrapped.module, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    try:
        wrapped(**Points()[0])
    finally:
        replica.close()


def fit(out: Path, failures: int = 0, timeout_s: int = 120, **config: Any) -> tuple[list[dict[str, Any]], str]:
    """Runs the train loop on two workers of Ray: what each saved, and the error that ended the run, or ''."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchTrainer

    from decent_dp.integrations.ray import GossipConfig

    out.mkdir(exist_ok=True)
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={"out": str(out), **config},
        torch_config=GossipConfig(timeout_s=timeout_s),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(out), name="run", failure_config=FailureConfig(max_failures=failures)),
    )
    try:
        trainer.fit()
        error = ""
    except TrainingFailedError as caught:
        error = str(caught)
    return [torch.load(path, weights_only=False) for path in sorted(out.glob("*.pt"))], error
