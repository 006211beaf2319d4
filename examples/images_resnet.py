"""Trains a ResNet, decentralized, to say from which photograph of scikit-image a patch of 32 × 32 pixels comes.

    torchrun --standalone --nproc-per-node 4 examples/images_resnet.py --small --save runs/resnet.pt    # a minute on two cores

With --checkpoint DIR, a run that was stopped continues exactly when it is started again.
"""

import argparse
import contextlib
import json
import time
from itertools import pairwise
from pathlib import Path

import torch
from skimage import data, io  # in the clone: pip install -e '.[examples]'
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, Subset, TensorDataset

import decent_dp
from decent_dp.checkpoint import Preemption, calibrate, export, load, save
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup

PHOTOS = ["astronaut", "brick", "camera", "chelsea", "coffee", "coins", "grass", "gravel", "ihc", "moon", "motorcycle_left"]
LARGE = {"widths": [64, 128, 256, 512], "batch": 64, "lr": 0.1, "epochs": 30}
SMALL = {"widths": [16, 32, 64], "batch": 32, "lr": 0.1, "epochs": 8}
REPORT = ("epoch", "local loss", "mean loss", "accuracy of the mean model", "ms per step")


def cut(images: Tensor, size: int, stride: int) -> Tensor:
    """All squares of this size in the images, with a distance of ``stride`` from one to the next."""
    return images.unfold(2, size, stride).unfold(3, size, stride).permute(0, 2, 3, 1, 4, 5).flatten(0, 2)


def read_patches(name: str, label: int) -> list[TensorDataset]:
    """Patches of a photograph to train with, and others to validate with, from different tiles of 64 × 64 pixels."""
    photo = torch.tensor(io.imread(Path(data.__file__).with_name(f"{name}.png")))  # comes with the wheel: no download
    tiles = cut(torch.atleast_3d(photo)[None, :512, :512].permute(0, 3, 1, 2).expand(1, 3, -1, -1) / 255, 64, 64)
    sides = cut(tiles[torch.arange(len(tiles)) % 4 > 0], 32, 16), cut(tiles[::4], 32, 32)
    return [TensorDataset(patches, torch.full((len(patches),), label)) for patches in sides]


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def make_resnet(widths: list[int]) -> nn.Module:
    blocks = [nn.Sequential(conv(a, b, stride=2), Residual(conv(b, b), conv(b, b))) for a, b in pairwise(widths)]
    return nn.Sequential(conv(3, widths[0]), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], len(PHOTOS)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a ResNet on patches of photographs.")
    parser.add_argument("--small", action="store_true", help="a model for CPUs; else a larger one")
    parser.add_argument("--checkpoint", metavar="DIR", help="where the run saves, and continues from")
    parser.add_argument("--save", metavar="FILE", help="where the mean model goes: a plain state dict")
    parser.add_argument("--out", metavar="FILE", help="where the results go, as JSON")
    options = parser.parse_args()
    size = argparse.Namespace(**(SMALL if options.small else LARGE))
    rank, workers = decent_dp.initialize_dist()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    train, held_out = map(ConcatDataset, zip(*(read_patches(name, i) for i, name in enumerate(PHOTOS)), strict=True))
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(train, size.batch, sampler=sampler, drop_last=True, generator=torch.Generator())
    share = DataLoader(Subset(held_out, range(rank, len(held_out), workers)), 256)  # each worker evaluates its share

    torch.manual_seed(0)
    model = make_resnet(size.widths).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=size.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = lr_scheduler_fn_cosine_with_warmup(optimizer, t_max=(size.epochs - 1) * len(loader), t_warmup=len(loader))
    replica = decent_dp.gossip(model, optimizer)  # the one line: a mix with the neighbours follows each step

    found = load(replica, options.checkpoint, missing_ok=True) if options.checkpoint else None
    at = found or {"epoch": 0, "step": 0, "loss": torch.zeros((), device=device), "history": []}
    scheduler.load_state_dict(at.pop("scheduler", scheduler.state_dict()))
    with Preemption(replica) if options.checkpoint else contextlib.nullcontext() as stop:
        for epoch in range(at["epoch"], size.epochs):
            sampler.set_epoch(epoch)
            loader.generator.manual_seed(epoch)
            began, since = time.perf_counter(), at["step"]
            for step, (x, y) in enumerate(loader, start=epoch * len(loader) + 1):
                if step <= at["step"]:
                    continue  # made before the stop
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x.to(device, memory_format=torch.channels_last)), y.to(device))
                loss.backward()
                optimizer.step()
                scheduler.step()
                at["step"], at["loss"] = step, at["loss"] + loss.detach() / len(loader)
                if stop and ((due := stop.due) or replica.due(50)):
                    saving = save(replica, options.checkpoint, {**at, "scheduler": scheduler.state_dict()}, wait=due)
                    if due:
                        raise SystemExit(saving.error)  # None is exit code 0
            local, ms = at["loss"].item(), 1e3 * (time.perf_counter() - began) / max(1, at["step"] - since)
            model.eval()
            with replica.averaged(), torch.no_grad():
                calibrate(replica, loader)  # the statistics of BatchNorm, for the mean model
                right = sum((model(x.to(device)).argmax(1) == y.to(device)).sum() for x, y in share)
            model.train()
            sums = torch.stack([at["loss"] / workers, right / len(held_out)])
            torch.distributed.all_reduce(sums)
            row = dict(zip(REPORT, (epoch + 1, local, *sums.tolist(), ms), strict=True))
            at.update(epoch=epoch + 1, loss=torch.zeros_like(at["loss"]), history=[*at["history"], row])
            if rank == 0:
                print(", ".join(f"{name} {number:.4g}" for name, number in row.items()), flush=True)
    if options.save:
        export(replica, options.save, loader=loader)
    if options.out and rank == 0:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(json.dumps({"workers": workers, "history": at["history"]}))


if __name__ == "__main__":
    main()
