"""Trains on handwritten digits under Slurm; stops in time when Slurm asks for it, and resumes exactly. Copy it with job.sbatch.

    sbatch examples/slurm/job.sbatch                                                        # saves and requeues itself
    srun --nodes 2 --ntasks-per-node 4 python examples/slurm/train.py --folder /shared/run7 # the same by hand
    torchrun --nproc-per-node 4 examples/slurm/train.py --folder runs/slurm --small         # without Slurm, to try it

All workers keep their checkpoints in the folder, on a disk that all nodes see. Worker 0 writes result.json there at the end.
Needs scikit-learn, which brings the data along; in the clone of the repository: pip install -e '.[examples]'
"""

from __future__ import annotations

import argparse
import json
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import decent_dp
from decent_dp.checkpoint import Preemption, load, save
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup

try:
    from sklearn.datasets import load_digits
except ImportError:
    raise SystemExit("The digits need scikit-learn; in the clone of the repository: pip install -e '.[examples]'") from None

TRAINING = 1437  # images; the other 360 are for validation


def images_and_labels() -> tuple[Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))  # the same on all workers
    return torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]


def train(folder: Path, epochs: int, save_every: int, batch_size: int) -> dict[str, Any] | None:
    """Called by all workers. Returns the result; None if a signal has stopped the run."""
    rank, world_size = decent_dp.initialize_dist()
    x, y = images_and_labels()
    dataset = TensorDataset(x[:TRAINING], y[:TRAINING])
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, drop_last=True)
    # Its own generator, so that the order of an epoch depends on nothing but its number.
    draws = torch.Generator()
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True, generator=draws)

    device = "cuda" if torch.cuda.is_available() else "cpu"  # this worker's own GPU, if it has one
    torch.manual_seed(rank)  # each worker draws its own dropout; weights are copied from worker 0
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)).to(device)
    optimizer = decent_dp.GossipAdamW(model.parameters(), lr=2e-3)
    steps = epochs * len(loader)
    scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=max(1, steps - 10), t_warmup=10)
    replica = decent_dp.gossip(model, optimizer)
    criterion = nn.CrossEntropyLoss()

    at: dict[str, Any] = {"epoch": 0, "batch": 0}
    if found := load(replica, folder / "checkpoints", missing_ok=True):
        scheduler.load_state_dict(found.pop("scheduler"))
        at = found
    if rank == 0:
        print(f"{world_size} workers begin at batch {at['batch']} of epoch {at['epoch']}", flush=True)

    # job.sbatch asks Slurm for USR1; a SIGTERM comes from scancel, from torchrun, or from a cluster that pre-empts.
    with Preemption(replica, signals=(signal.SIGTERM, signal.SIGUSR1)) as stop:
        for epoch in range(at["epoch"], epochs):
            sampler.set_epoch(epoch)
            draws.manual_seed(epoch)
            for batch, (images, labels) in enumerate(loader, start=1):
                if batch <= at["batch"]:
                    continue  # trained with before the run was stopped
                optimizer.zero_grad()
                criterion(model(images.to(device)), labels.to(device)).backward()
                optimizer.step()
                scheduler.step()
                at = {"epoch": epoch, "batch": batch}
                if stop.due:  # on all workers after the same step
                    saving = save(replica, folder / "checkpoints", {**at, "scheduler": scheduler.state_dict()})
                    if saving.error is not None:
                        raise SystemExit(f"stopped, and nothing could be saved: {saving.error}")
                    replica.close()
                    return None
                if (epoch * len(loader) + batch) % save_every == 0:
                    # A copy, which is written while training continues.
                    save(replica, folder / "checkpoints", {**at, "scheduler": scheduler.state_dict()}, wait=False)
            at = {"epoch": epoch + 1, "batch": 0}
    save(replica, folder / "checkpoints", {**at, "scheduler": scheduler.state_dict()})

    distance = replica.consensus_distance()
    model.eval()
    with replica.averaged(), torch.no_grad():  # replicas differ: their mean is the result
        accuracy = float((model(x[TRAINING:].to(device)).argmax(dim=1).cpu() == y[TRAINING:]).float().mean())
    replica.close()
    return {"workers": world_size, "steps": steps, "accuracy": accuracy, "consensus_distance": distance}


def main() -> None:
    parser = argparse.ArgumentParser(description="Decentralized training under Slurm, which stops in time and resumes.")
    parser.add_argument("--folder", type=Path, required=True, help="on a shared disk: checkpoints and result.json")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32, help="of each worker")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="between two checkpoints")
    parser.add_argument("--small", action="store_true", help="a tenth of the epochs")
    options = parser.parse_args()
    torch.set_num_threads(1)  # workers share the cores of their node
    epochs = max(1, options.epochs // 10) if options.small else options.epochs
    result = train(options.folder, epochs, options.save_every, options.batch_size)
    if torch.distributed.get_rank() == 0:
        print("stopped: start it again to resume" if result is None else json.dumps(result), flush=True)
        if result is not None:
            (options.folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
