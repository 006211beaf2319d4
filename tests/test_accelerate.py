"""The lines of docs/accelerate.md: gossip in a loop of Accelerate, which leaves the model out of ``prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import decent_dp
from decent_dp.checkpoint import load, save
from tests.framework_cases import Model, Points, Run, as_launched, assert_equal_runs, collectives, copies, plain_loop

pytest.importorskip("accelerate")


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.0)


def falling(optimizer: torch.optim.Optimizer, steps: int = 1) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + steps * step / 4))


class Loop:
    """A training script with Accelerate: 64 samples in batches of 4, two to a step."""

    def __init__(self, model: Model, scaler: Any = None, **options: Any) -> None:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration, set_seed

        set_seed(0)
        config = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=config, **options)
        if scaler is not None:
            self.accelerator.scaler = scaler  # on a GPU mixed_precision="fp16" makes it
        model.to(self.accelerator.device)
        optimizer = adamw(model.parameters())
        loader = DataLoader(Points(), batch_size=4, shuffle=True)
        self.model = model
        self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(optimizer, loader, falling(optimizer))
        self.replica = decent_dp.gossip(
            model, self.optimizer.optimizer, scaler=self.accelerator.scaler, topology="ring", bucket_size_in_mb=1
        )
        self.run, self.met, self.skipped = Run(), [], []

    def train(self, steps: int, done: int = 0, after_step: Any = lambda number: None) -> None:
        from accelerate import skip_first_batches

        accelerator, model = self.accelerator, self.model
        model.train()
        with collectives() as found:
            before = 0
            for epoch in range(done // 4, -(-steps // 4)):
                self.loader.set_epoch(epoch)
                skip = 2 * max(0, done - 4 * epoch)
                for batch in skip_first_batches(self.loader, skip) if skip else self.loader:
                    with accelerator.accumulate(model):
                        loss = model(**batch)["loss"]
                        self.run.losses.append(float(loss.detach()))
                        accelerator.backward(loss)
                        if accelerator.sync_gradients and accelerator.scaler is None:
                            self.run.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                        self.optimizer.step()
                        self.scheduler.step()
                        self.optimizer.zero_grad()
                    if accelerator.sync_gradients:
                        self.skipped.append(accelerator.optimizer_step_was_skipped)
                        self.met.append(found[before:])
                        done += 1
                        after_step(done)
                        before = len(found)
                        if done == steps:
                            break
        self.run.params, self.run.rounds = copies(model), self.replica.stats().rounds

    def finish(self) -> Run:
        with self.replica.averaged():
            self.run.mean = copies(self.model)
        self.replica.close()
        return self.run


def whole_run(rank: int, n: int, folder: Path) -> list[list[int]]:
    as_launched(rank, n)
    loop = Loop(Model(seed=rank))
    replica, own = loop.replica, {}

    def evaluate_and_save(step: int) -> None:
        if step != 3:
            return
        own[step] = copies(loop.model)
        loop.model.eval()
        dataset = Points(32, seed=1)
        with replica.averaged(), torch.no_grad():
            share = slice(16 * rank, 16 * rank + 16)
            total = loop.accelerator.gather_for_metrics(loop.model(dataset.x[share], dataset.y[share])["loss"].view(1))
            own["mean"] = copies(loop.model)
        own["eval_loss"] = float(total.mean())
        loop.model.train()
        loop.accelerator.save_state(str(folder))
        save(replica, folder / "decent_dp", {"steps": step}, keep=1)

    loop.train(6, after_step=evaluate_and_save)
    seen, met, run = list(loop.model.seen), loop.met, loop.finish()

    # (a), (c): bit for bit the plain loop, with one round for each window of two batches. Accelerate steps a schedule n times.
    plain = plain_loop(
        seen,
        accumulate=2,
        clip=0.1,
        make_optimizer=adamw,
        make_scheduler=lambda optimizer: falling(optimizer, n),
        saves=(3,),
        topology="ring",
        bucket_size_in_mb=1,
    )
    assert_equal_runs(run, plain)
    assert run.rounds == 6
    assert run.norms == plain.norms  # (b): of all local gradients
    assert min(run.norms) > 0.1
    assert met == [[]] * 6  # (h)
    # (f): inside averaged() the model is the mean, and training has gone on from the worker's own.
    found: list[Any] = [None] * n
    dist.all_gather_object(found, own[3])
    for mean, same in zip(own["mean"], zip(*found, strict=True), strict=True):
        torch.testing.assert_close(mean, torch.stack(same).mean(0))
        assert not torch.equal(mean, same[0])
    model = Model()
    for param, value in zip(model.parameters(), own["mean"], strict=True):
        nn.init.zeros_(param).data.add_(value)
    dataset = Points(32, seed=1)
    assert own["eval_loss"] == pytest.approx(float(model(dataset.x, dataset.y)["loss"]), rel=1e-5)

    # (e): load_state for the scheduler, and load for every worker's own, last.
    again = Loop(Model(seed=7 + rank))
    again.accelerator.load_state(str(folder))
    state = load(again.replica, folder / "decent_dp")
    again.train(6, done=state["steps"])
    again.run.losses = run.losses[:6] + again.run.losses
    assert_equal_runs(again.finish(), run)

    skip_on_one(rank)
    return seen


class Bursting(Model):
    """Whose fifth loss is infinite, on worker 1."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if len(self.seen) == 5 and dist.get_rank() == 1:
            output["loss"] = output["loss"] * torch.inf
        return output


def skip_on_one(rank: int) -> None:
    """(d): an overflow on one worker leaves the rounds equal."""
    loop = Loop(Bursting(), scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    loop.train(6)
    assert loop.skipped == [rank == 1 and step == 2 for step in range(6)]
    assert loop.replica.stats().rounds == 6
    assert loop.replica.stats().updates == 6 - rank
    assert all(bool(param.isfinite().all()) for param in loop.finish().mean)


@pytest.mark.slow
def test_accelerate_trains_as_the_plain_loop_and_resumes_exactly(workers, tmp_path):
    seen = workers(2, whole_run, tmp_path)
    first_epoch = sorted(number for batches in seen for batch in batches[:8] for number in batch)
    assert first_epoch == list(range(64))  # (i): each sample once, on one worker


def mixed_precision(rank: int, n: int) -> tuple[set[torch.dtype], int]:
    """With autocast the model is prepared alone, without DDP."""
    as_launched(rank, n)
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare_model(Model(), evaluation_mode=True)
    optimizer, loader = accelerator.prepare(adamw(model.parameters()), DataLoader(Points(), batch_size=4))
    replica = decent_dp.gossip(model, optimizer.optimizer)
    dtypes = set()
    model.layers[0].register_forward_hook(lambda module, inputs, output: dtypes.add(output.dtype))
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    rounds = replica.stats().rounds
    replica.close()
    return dtypes, rounds


@pytest.mark.slow
def test_with_mixed_precision_the_model_is_prepared_without_ddp(workers):
    assert workers(3, mixed_precision) == [({torch.bfloat16}, 6)] * 3
