"""The frameworks of the integrations, each in a short run on the GPU, against the plain loop that simulates all workers."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

import decent_dp
from benchmarks.gpu.case import PAIR, SkipError, Worker, case
from benchmarks.gpu.training import FEATURES, OUTPUTS, Script, batch, compare, largest_difference, run_twin, values

SAMPLES, BATCH, STEPS = 64, 4, 8
CPU = torch.device("cpu")


class Points(Dataset[dict[str, Tensor]]):
    """As dicts with the keys 'x' and 'labels'."""

    def __init__(self) -> None:
        self.x, self.labels = batch(1, 0, CPU, SAMPLES, FEATURES), batch(2, 0, CPU, SAMPLES, OUTPUTS)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"x": self.x[i], "labels": self.labels[i]}


class Net(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(FEATURES, 12), nn.Tanh(), nn.Linear(12, OUTPUTS))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(x)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def batch_by_batch(t: int, rank: int) -> list[int]:
    """The samples of a step, where workers take turns in batches."""
    first = BATCH * (2 * t + rank)
    return list(range(first, first + BATCH))


def sample_by_sample(t: int, rank: int) -> list[int]:
    """Where they take turns in samples."""
    return [rank + 2 * (BATCH * t + k) for k in range(BATCH)]


def twins(worker: Worker, samples: Callable[[int, int], list[int]]) -> list[list[Tensor]]:
    points = Points()

    def loss(model: Any, t: int, rank: int, like: Tensor) -> Tensor:
        chosen = samples(t, rank)
        found: Tensor = model(points.x[chosen].to(like.device), points.labels[chosen].to(like.device))["loss"]
        return found

    script = Script(make=Net, loss=loss, optimizer=sgd, steps=STEPS)
    return [values(model) for model in run_twin(script, worker.n, worker.device, Net().state_dict())]


def against_mean(worker: Worker, model: nn.Module, samples: Callable[[int, int], list[int]]) -> str:
    """Compares with the mean of all, which frameworks leave at the end."""
    own = twins(worker, samples)
    mean = [torch.stack([one.double() for one in parts]).mean(0).float() for parts in zip(*own, strict=True)]
    found = values(model)
    assert found[0].device.type == worker.device.type, f"it trained on {found[0].device}"
    moved = largest_difference(found, [param.to(worker.device) for param in Net().parameters()])
    assert moved > 1e-3, f"training has moved the parameters by {moved:.2g} only"
    return compare(found, mean, 2e-5, "the mean of twins")


def launched(worker: Worker, *modules: str) -> None:
    """The environment of a launcher for a worker that is alone on its node, and quiet frameworks, which must be there.

    Raises:
        SkipError: one of ``modules`` is missing.
    """
    # So each of them takes the first GPU.
    of_worker = {"RANK": worker.rank, "NODE_RANK": worker.rank, "GROUP_RANK": worker.rank, "WORLD_SIZE": worker.n}
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in {**of_worker, **alone}.items()})
    os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", WANDB_DISABLED="true")
    warnings.simplefilter("ignore")
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SkipError(f"{name}: {str(error).partition('; ')[0]}") from None
        except Exception as error:  # a package that does not go with another one, or with this torch
            raise SkipError(f"{name} cannot be imported ({type(error).__name__}: {error})") from None
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)


@case("Accelerate", PAIR, drivers=("gossip",), alone=True, timeout=150)
def accelerate(worker: Worker) -> str:
    launched(worker, "accelerate")
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not worker.cuda)
    assert accelerator.num_processes == worker.n, f"Accelerate sees {accelerator.num_processes} workers"
    assert accelerator.device.type == worker.device.type
    model = Net().to(accelerator.device)
    optimizer, loader = accelerator.prepare(sgd(model.parameters()), DataLoader(Points(), batch_size=BATCH))
    replica = decent_dp.gossip(model, optimizer.optimizer, scaler=accelerator.scaler, topology="complete")
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    rounds, found = replica.stats().rounds, values(model)
    replica.close()
    assert rounds == STEPS, f"{rounds} rounds, not {STEPS}"
    return compare(found, twins(worker, batch_by_batch)[worker.rank], 2e-5, "the twin")


@case("Accelerate, float16", PAIR, drivers=("gossip",), alone=True, timeout=150)
def accelerate_scaled(worker: Worker) -> str:
    """With the GradScaler that Accelerate makes."""
    launched(worker, "accelerate")
    if not worker.cuda:
        raise SkipError("Accelerate makes a GradScaler for GPUs only")
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="fp16")
    model = accelerator.prepare_model(Net().to(accelerator.device), evaluation_mode=True)
    optimizer, loader = accelerator.prepare(sgd(model.parameters()), DataLoader(Points(), batch_size=BATCH))
    assert accelerator.scaler is not None
    replica = decent_dp.gossip(model, optimizer.optimizer, scaler=accelerator.scaler, topology="complete")
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    rounds, found, skipped = replica.stats().rounds, values(model), accelerator.optimizer_step_was_skipped
    replica.close()
    assert rounds == STEPS, f"{rounds} rounds, not {STEPS}"
    assert not skipped
    return compare(found, twins(worker, batch_by_batch)[worker.rank], 2e-2, "the twin in float32")


@case("Trainer of transformers", PAIR, drivers=("gossip",), alone=True, timeout=170)
def transformers(worker: Worker) -> str:
    launched(worker, "accelerate", "transformers")
    from transformers import PrinterCallback, Trainer, TrainingArguments

    try:
        from decent_dp.integrations.transformers import attach
    except ImportError as error:
        raise SkipError(str(error)) from None

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    model = Net()
    optimizer = sgd(model.parameters())
    arguments = TrainingArguments(
        output_dir=str(worker.folder / "out"),
        use_cpu=not worker.cuda,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        per_device_train_batch_size=BATCH,
        max_grad_norm=0.0,
        max_steps=STEPS,
        logging_strategy="no",
        save_strategy="no",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    trainer = InOrder(model=model, args=arguments, train_dataset=Points(), optimizers=(optimizer, constant))
    try:
        callback = attach(trainer, topology="complete")
    except ImportError as error:
        raise SkipError(str(error)) from None
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    assert callback.replica is not None
    rounds = callback.replica.stats().rounds
    assert rounds == STEPS, f"{rounds} rounds, not {STEPS}"
    return against_mean(worker, model, batch_by_batch)


@case("Lightning", PAIR, drivers=("gossip",), alone=True, timeout=170)
def lightning(worker: Worker) -> str:
    launched(worker, "lightning.pytorch")
    import lightning.pytorch as pl

    from decent_dp.integrations.lightning import GossipStrategy

    class Module(pl.LightningModule):  # type: ignore[misc]  # its sources are skipped
        rounds = 0

        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

        def training_step(self, inputs: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.model(**inputs)["loss"]
            return loss

        def on_train_end(self) -> None:
            strategy: Any = self.trainer.strategy
            self.rounds = strategy.replica.stats().rounds

        def configure_optimizers(self) -> Any:
            return sgd(self.parameters())

    for name in ("lightning", "lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    module = Module()
    trainer = pl.Trainer(
        accelerator="gpu" if worker.cuda else "cpu",
        devices=1,
        num_nodes=worker.n,
        strategy=GossipStrategy(topology="complete", process_group_backend="gloo"),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        default_root_dir=str(worker.folder),
    )
    sampler: Any = DistributedSampler(Points(), worker.n, worker.rank, shuffle=False)
    trainer.fit(module, DataLoader(Points(), batch_size=BATCH, sampler=sampler))
    assert module.rounds == STEPS, f"{module.rounds} rounds, not {STEPS}"
    # It may have moved the model to the CPU at the end.
    module.to(worker.device)
    text = against_mean(worker, module.model, sample_by_sample)
    assert dist.is_initialized()
    return text
