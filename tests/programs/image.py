"""An image classifier as it was written for decent_dp 0.2, on generated images: torch.compile, channels_last, a sampler."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from decent_dp.ddp import DecentralizedDataParallel as DecentDP
from decent_dp.optim import lr_scheduler_fn_cosine_with_warmup, optim_fn_accum_adamw
from decent_dp.utils import initialize_dist

EPOCHS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.relu(self.conv2(x)).mean((2, 3)))


def load_data():
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(256) % 4
    images = 0.5 * torch.randn(256, 3, 8, 8, generator=generator)
    images += torch.randn(4, 3, 1, 1, generator=generator)[labels]
    return TensorDataset(images, labels)


def main():
    folder, resume = Path(sys.argv[1]), "--resume" in sys.argv
    rank, world_size = initialize_dist()
    torch.manual_seed(rank)  # every worker draws other weights: those of worker 0 count
    dataset = load_data()
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    steps = EPOCHS * len(loader)
    model = DecentDP(
        Net().to(memory_format=torch.channels_last),
        optim_fn=partial(optim_fn_accum_adamw, lr=0.02, accum_iter=2),
        lr_scheduler_fn=partial(lr_scheduler_fn_cosine_with_warmup, t_max=steps, t_warmup=2),
        topology="one-peer-exp",
        grad_clip_norm=1.0,
        sync_buffer_in_global_avg=True,
    )
    if resume:
        saved = torch.load(folder / "model.pt")
        model.load_state_dict({f"_model.{key}": value for key, value in saved.items()})  # as 0.2 saved them
    model.forward = torch.compile(model.forward, backend="aot_eager")  # inductor needs a minute
    criterion = nn.CrossEntropyLoss()

    losses = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(1)
        for images, labels in loader:
            images = images.to(memory_format=torch.channels_last)
            model.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            total += loss.detach()
        losses.append(total.item() / len(loader))

        own = [param.detach().clone() for param in model.parameters()]
        model.global_avg()
        model.eval()
        with torch.no_grad():
            images, labels = dataset.tensors
            correct = (model(images.to(memory_format=torch.channels_last)).argmax(1) == labels).float().mean()
        dist.all_reduce(correct)
        mean = sum(param.double().sum().item() for param in model.parameters())
        model.revert_global_avg()
        for param, value in zip(model.parameters(), own, strict=True):
            assert torch.equal(param, value)
        assert all(param.is_contiguous(memory_format=torch.channels_last) for param in model.parameters() if param.ndim == 4)
        last_lr = model._lr_schedulers[0].get_last_lr()[0]
        assert abs(last_lr - model.get_lr()) < 1e-12
    last = sum(param.double().sum().item() for param in model.parameters())
    model.global_avg(will_revert=False)
    if rank == 0 and not resume:
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save([optim.state_dict() for optim in model._optims], folder / "optims.pt")
    dist.barrier()
    print(json.dumps({"losses": losses, "mean": mean, "last": last, "accuracy": correct.item() / world_size}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
