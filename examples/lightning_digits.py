"""Handwritten digits with Lightning's Trainer, decentralized: the strategy is the only line that differs from DDP's.

    python examples/lightning_digits.py --devices 4             # Lightning starts the workers
    torchrun --nproc-per-node 4 examples/lightning_digits.py
    python examples/lightning_digits.py --checkpoint runs/lightning    # resumes after a stop, also in the middle of an epoch

Needs Lightning and scikit-learn, with the data; in the clone of the repository: pip install -e '.[lightning,examples]'
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from decent_dp import GossipAdamW

try:
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    from decent_dp.integrations.lightning import GossipStrategy
except ImportError as error:
    raise SystemExit(f"{error}; in the clone of the repository: pip install -e '.[lightning,examples]'") from None


class Digits(LightningModule):  # nothing in it is about decentralized training
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.model = nn.Sequential(nn.Linear(64, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss: Tensor = nn.functional.cross_entropy(self.model(images), labels)
        self.log("loss", loss, on_epoch=True, on_step=False, sync_dist=True)  # the mean over workers, once per epoch
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        right = self.model(images).argmax(dim=1) == labels
        self.log("accuracy", right.float().mean(), sync_dist=True)  # of the mean of all replicas

    def on_train_epoch_end(self) -> None:
        of = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.trainer.print(f"epoch {self.current_epoch + 1}: loss {of['loss']:.4f}, accuracy {of.get('accuracy', 0):.2%}")

    def configure_optimizers(self) -> Any:
        optimizer = GossipAdamW(self.parameters(), lr=2e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ResumableLoader(DataLoader[Any]):
    """Continues in the middle of an epoch. Lightning saves and restores its state; a plain loader begins the epoch again."""

    done = skip = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["done"] % len(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.done, self.skip = self.skip, 0
        return map(self._count, itertools.islice(super().__iter__(), self.done, None))

    def _count(self, batch: Any) -> Any:
        self.done += 1
        return batch


def load_data() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images / 16, labels, test_size=360, stratify=labels, random_state=0)
    x, x_val, y, y_val = (torch.tensor(part, dtype=torch.float32 if part.ndim == 2 else torch.int64) for part in split)
    return TensorDataset(x, y), TensorDataset(x_val, y_val)


def main() -> None:
    parser = argparse.ArgumentParser(description="Decentralized training with Lightning on handwritten digits.")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", 2)), help="workers per node")
    parser.add_argument("--small", action="store_true", help="5 epochs instead of 20")
    parser.add_argument("--checkpoint", metavar="DIR", help="folder of the checkpoints, from which the run resumes")
    options = parser.parse_args()
    epochs = 5 if options.small else 20

    seed_everything(0)
    torch.set_num_threads(1)  # workers share this machine's cores
    train, validation = load_data()
    loader, held_out = ResumableLoader(train, batch_size=32, shuffle=True), DataLoader(validation, batch_size=90)
    saves = [ModelCheckpoint(options.checkpoint, save_last=True, save_on_exception=True)] if options.checkpoint else []
    trainer = Trainer(
        strategy=GossipStrategy(topology="base-2"),  # or strategy="gossip", after the import
        devices=options.devices,
        max_epochs=epochs,
        callbacks=saves,
        enable_checkpointing=bool(saves),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    steps = epochs * len(loader) // trainer.world_size
    # A SIGTERM to any worker: all save after the same step and end. The next start goes on from there.
    trainer.fit(module := Digits(steps), loader, held_out, ckpt_path="last" if saves else None)
    rounds, (found,) = trainer.strategy.replica.stats().rounds, trainer.validate(module, held_out, verbose=False)
    trainer.print(f"{trainer.world_size} workers, {rounds} rounds, accuracy {found['accuracy']:.2%}")  # of the mean


if __name__ == "__main__":
    main()
