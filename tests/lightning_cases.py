"""Modules and Trainers of the tests of Lightning; imported in workers only, because importing Lightning takes seconds."""

from __future__ import annotations

import copy
import itertools
import os
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, Timer  # noqa: F401
from lightning.pytorch.plugins import MixedPrecision  # noqa: F401
from lightning.pytorch.plugins.environments import SLURMEnvironment  # noqa: F401
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO  # noqa: F401
from lightning.pytorch.utilities.exceptions import SIGTERMException  # noqa: F401
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from torchmetrics import MeanMetric

from decent_dp.integrations.lightning import GossipFabricStrategy, GossipStrategy  # noqa: F401
from decent_dp.replica.snapshot import settle
from tests.framework_cases import Model, Points, Run, copies

BATCH = 4


class Module(pl.LightningModule):
    """Trains ``Model``; records this worker's losses, its replica at the end, and what it evaluated with.

    Attributes:
        run: as the plain loop's.
        validated: at each validation, the parameters at its first batch and those after it.
    """

    enough = False

    def __init__(self, *, log: bool = False, schedule: bool = False, poison: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.model = Model()
        self.run, self.validated = Run(), []
        self.log_losses, self.schedule, self.poison = log, schedule, poison

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        self.run.losses.append(float(loss))
        if self.log_losses:
            self.log("local", loss, on_step=True)
            self.log("epoch_mean", loss, on_step=False, on_epoch=True, sync_dist=True)
        if self.poison == (self.global_rank, self.global_step):
            loss = loss * float("inf")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:  # after all callbacks
        self.trainer.should_stop |= self.enough

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.run.norms.append(float(nn.utils.get_total_norm([p.grad for p in self.parameters() if p.grad is not None])))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(copies(self.model))
        loss = self.model(**batch)["loss"]
        self.log("val_loss", loss, sync_dist=True)
        self.log("own_loss", loss)

    def on_train_end(self) -> None:  # before the strategy makes the replica the mean
        self.run.params = copies(self.model)
        self.run.rounds = self.trainer.strategy.replica.stats().rounds

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.0)
        if not self.schedule:
            return optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Metered(Module):
    """Validates and tests with a metric of torchmetrics, too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.metric = MeanMetric()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.metric.update(self.model(**batch)["loss"], weight=len(batch["x"]))
        self.log("metric", self.metric)
        assert copy.deepcopy(self.metric).dist_sync_fn is self.metric.dist_sync_fn

    test_step = validation_step


class Noisy(Module):
    """Draws random numbers in each step, and reduces its rate by its own losses: states of each worker."""

    loaded: int | None = None

    def __init__(self) -> None:
        super().__init__(log=True)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({**batch, "x": nn.functional.dropout(batch["x"], 0.2)}, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 0.8 if self.run.losses[-1] > 0.4 else 1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rank"] = self.global_rank

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["rank"]


class Adversarial(Module):
    """Two optimizers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for sign, optimizer in zip((1, -1), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(sign * self.model(**batch)["loss"])
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, _, last = self.model.layers
        return [torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(last.parameters(), lr=0.1)]


class Idle(Module):
    def configure_optimizers(self) -> None:
        return None


class Watch(Callback):
    """Records collectives in steps, what is logged, and the replica before each validation.

    Attributes:
        in_steps: collectives from the second batch of a stretch without validation on, up to its last.
    """

    def __init__(self, found: list[str] | None = None) -> None:
        self.found = [] if found is None else found
        self.in_steps: list[str] = []
        self.local: list[float] = []
        self.means: list[float] = []
        self.own: list[list[Tensor]] = []
        self._mark: int | None = None

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if self._mark is not None:
            self.in_steps += self.found[self._mark :]
        self._mark = len(self.found)
        self.local.append(float(trainer.callback_metrics.get("local", 0)))

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        self._mark = None
        self.means.append(float(trainer.callback_metrics.get("epoch_mean", 0)))

    def on_validation_start(self, trainer: Any, module: Any) -> None:  # the strategy's own hook comes later
        self._mark = None
        self.own.append(copies(module.model))


class Kept(Callback):
    """This worker's state dict after each batch, by step."""

    def __init__(self) -> None:
        self.at: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.at[trainer.global_step] = {key: value.clone() for key, value in module.state_dict().items()}


class Settles(Callback):
    """After these steps what is in flight is mixed in, as by a save."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            settle(trainer.strategy.replica)


class Lone(Callback):
    """Sets ``should_stop`` on one worker alone, in this hook."""

    def __init__(self, rank: int, hook: str) -> None:
        self.rank = rank
        setattr(self, hook, self.decide)

    def decide(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop |= trainer.global_rank == self.rank and trainer.global_step >= 8


class Hasty(Timer):
    """A limit of time that one worker reaches alone, at a step."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__(timedelta(hours=1), interval="step")
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.trainer = trainer

    def time_remaining(self, *_: Any) -> float:
        return 1.0 - ((self.trainer.global_rank, self.trainer.global_step >= self.step) == (self.rank, True))


class Resumable(DataLoader[Any]):
    """A loader that resumes in the middle of an epoch: the example of the page."""

    done = skip = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.skip = state["done"] % len(self)

    def __iter__(self) -> Any:
        self.done, self.skip = self.skip, 0
        return map(self.count, itertools.islice(super().__iter__(), self.done, None))

    def count(self, batch: Any) -> Any:
        self.done += 1
        return batch


class Ahead(DataLoader[Any]):
    """Reads its sampler when the iterator is made, as a loader with processes does."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__()))


class Full(TorchCheckpointIO):
    """A disk that is full on worker 1."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        if os.environ["LOCAL_RANK"] == "1":
            raise OSError("no space left")
        super().save_checkpoint(checkpoint, path, storage_options)


class Interrupt(Callback):
    """Calls ``act(trainer)`` on one worker at the end of a batch."""

    def __init__(self, rank: int, step: int, act: Any) -> None:
        self.rank, self.step, self.act = rank, step, act

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            self.act(trainer)


def loader(n: int = 64, kind: Any = DataLoader, shuffle: bool = True, **options: Any) -> Any:
    return kind(Points(n), batch_size=BATCH, shuffle=shuffle, **options)


def trainer(rank: int, n: int, folder: str | None = None, **options: Any) -> pl.Trainer:
    """One per worker of the fixture, which are the Trainer's processes."""
    os.environ["LOCAL_RANK"] = str(rank)
    options = {"strategy": "gossip", "max_epochs": 2, "logger": False, "enable_checkpointing": False} | options
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0} | options
    return pl.Trainer(accelerator="cpu", devices=n, default_root_dir=folder, **options)


def shares(rank: int, n: int, epochs: int, size: int = 64) -> list[list[int]]:
    """The batches of this worker, by torch's own sampler."""
    sampler = DistributedSampler(Points(size), n, rank, shuffle=True, seed=0)
    found = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        own = list(sampler)
        found += [own[i : i + BATCH] for i in range(0, len(own), BATCH)]
    return found


def fitted(rank: int, n: int, module: Module, *loaders: Any, ckpt_path: str | None = None, **options: Any) -> Run:
    """The run of a Trainer, with the mean at its end."""
    pl_trainer = trainer(rank, n, **options)
    pl_trainer.fit(module, *(loaders or (loader(),)), ckpt_path=ckpt_path)
    module.run.mean = copies(module.model)
    return module.run


def fabric_of(rank: int, n: int, plugins: Any = (), strategy: Any = "gossip") -> Fabric:
    os.environ["LOCAL_RANK"] = str(rank)
    fabric = Fabric(accelerator="cpu", devices=n, strategy=strategy, plugins=list(plugins))
    fabric.launch()
    return fabric


def fabric_parts(rank: int, n: int, *, scaler: bool = False, strategy: Any = "gossip") -> Any:
    """Fabric, and the model and the optimizer that it has set up."""
    plugins = [FabricMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))] if scaler else []
    fabric = fabric_of(rank, n, plugins, strategy)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    return (fabric, *fabric.setup(model, optimizer))
