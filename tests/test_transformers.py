"""``attach(trainer)``: the Trainer of transformers trains as the plain ``gossip()`` loop, and does the rest as it promises."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from decent_dp.checkpoint import read_parameters
from decent_dp.replica.snapshot import settle
from tests.framework_cases import (
    Model,
    Points,
    Run,
    as_launched,
    assert_equal_runs,
    collectives,
    copies,
    plain_loop,
    quiet_frameworks,
)
from tests.helpers import error_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.0)


def falling(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 4))


def trainer_of(folder: Path, model: nn.Module | None = None, callbacks: Any = (), kind: Any = None, **options: Any) -> Any:
    """A Trainer on the CPU: 64 samples in batches of 4, two to a step, the optimizer and the schedule of the plain loop."""
    from transformers import Trainer, TrainingArguments

    model = Model() if model is None else model
    dataset = options.pop("dataset", None) or Points()
    optimizer = options.pop("optimizer", None) or adamw(model.parameters())
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.1,
        "max_steps": 6,
        "logging_steps": 3,
        "save_strategy": "no",
        "dataloader_pin_memory": False,
        **options,
    }
    return (kind or Trainer)(
        model=model,
        args=TrainingArguments(**arguments),
        train_dataset=dataset,
        eval_dataset=Points(32, seed=1),
        optimizers=(optimizer, falling(optimizer)),
        callbacks=list(callbacks),
    )


def watch_of(model: nn.Module) -> Any:
    """A callback that records, after each step, the parameters and how often all workers had to meet in it."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        def __init__(self) -> None:
            self.run, self.params, self.evaluated, self.met = Run(), {}, {}, {}
            self.found: list[str] = []
            model.register_forward_hook(self.forward)

        def forward(self, module: nn.Module, _: Any, output: Any) -> None:
            if module.training:
                self.run.losses.append(float(output["loss"].detach()))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.params[state.global_step] = copies(model)
            self.met[state.global_step] = self.found[self.before :]
            self.start()

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.evaluated[state.global_step] = copies(model)
            self.start()

        def start(self, *_: Any, **__: Any) -> None:
            """What comes next belongs to the next step, also the fetching of its batches."""
            self.before = len(self.found)

        on_train_begin = on_log = on_save = start

    return Watch()


def trained(trainer: Any, callback: Any, watch: Any, **options: Any) -> Run:
    """Trains, and returns what a plain loop returns."""
    with collectives() as found:
        watch.found = found
        trainer.train(**options)
    run = watch.run
    run.params, run.mean = watch.params[trainer.state.global_step], copies(trainer.model)
    run.rounds = callback.replica.stats().rounds
    return run


def logged(trainer: Any, key: str) -> dict[int, float]:
    return {entry["step"]: entry[key] for entry in trainer.state.log_history if key in entry}


def mean_of(params: list[Tensor]) -> list[Tensor]:
    """The mean over all workers, in float64."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, [param.double() for param in params])
    return [torch.stack(same).mean(0) for same in zip(*found, strict=True)]


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6)


def loss_of(params: list[Tensor], dataset: Points) -> float:
    model = Model()
    with torch.no_grad():
        for param, value in zip(model.parameters(), params, strict=True):
            param.copy_(value)
        return float(model(dataset.x, dataset.y)["loss"])


def whole_run(rank: int, n: int, folder: Path) -> list[list[int]]:
    as_launched(rank, n)
    from decent_dp.integrations.transformers import attach

    model = Model(seed=rank)  # rank 0's is what all begin with
    watch = watch_of(model)
    trainer = trainer_of(folder, model, [watch], eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3)
    callback = attach(trainer, topology="ring")
    run = trained(trainer, callback, watch)
    batches = list(model.seen)

    # (a), (c): bit for bit the plain loop, with one round for each window of two batches.
    plain = plain_loop(
        batches, accumulate=2, clip=0.1, make_optimizer=adamw, make_scheduler=falling, topology="ring", saves=(3, 6)
    )
    assert_equal_runs(run, plain)
    assert run.rounds == 6
    # (b): the norm of all local gradients.
    assert logged(trainer, "grad_norm") == {step: plain.norms[step - 1] for step in (3, 6)}
    assert min(plain.norms) > 0.1
    # (g): the logged loss is the mean over workers.
    windows = torch.tensor(run.losses, dtype=torch.float64).view(2, 6).mean(1)
    dist.all_reduce(windows)
    torch.testing.assert_close(torch.tensor(list(logged(trainer, "loss").values())).double(), windows / n, rtol=1e-4, atol=0)
    # (h): no step makes all workers meet, not even the first of an epoch. The logs do, which shows that meetings are seen.
    assert watch.met == {step: [] for step in range(1, 7)}
    assert watch.found
    # (f): evaluation sees the mean, and training goes on from the worker's own.
    mean = mean_of(watch.params[3])
    assert logged(trainer, "eval_loss")[3] == pytest.approx(loss_of(mean, Points(32, seed=1)), rel=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(watch.evaluated[3], watch.params[3], strict=True))
    assert not torch.equal(watch.params[3][0], mean[0].float())
    # A checkpoint's model file is the mean, and there are all replicas beside it.
    from safetensors.torch import load_file

    saved = folder / "checkpoint-3"
    assert_close(load_file(saved / "model.safetensors").values(), [mean[i] for i in _order(model, saved)])
    assert_close(read_parameters(saved / "decent_dp", rank=rank).values(), mean)  # as the save has mixed the pair

    # (e): a new Trainer with another model goes on, bit for bit.
    model = Model(seed=7 + rank)
    watch = watch_of(model)
    trainer = trainer_of(folder, model, [watch])
    again = trained(trainer, attach(trainer, topology="ring"), watch, resume_from_checkpoint=str(saved))
    again.losses = run.losses[:6] + again.losses
    assert_equal_runs(again, run)
    check_refusals(folder / "refused")
    return batches


def refused(call: Any, message: str) -> None:
    found = error_of(call)
    if not found.startswith(message):
        raise AssertionError(f"expected {message!r}, got {found!r}")


def check_refusals(folder: Path) -> None:
    """Bad input is one line that says what to do, on all workers."""
    from decent_dp.integrations import transformers as ours
    from decent_dp.integrations.transformers import attach

    for options, message in [
        ({"accelerator_config": {"dispatch_batches": True}}, "ValueError: dispatch_batches=True makes all workers wait"),
        ({"accelerator_config": {"even_batches": False}}, "ValueError: even_batches=False lets workers have different"),
        ({"include_num_input_tokens_seen": True}, "ValueError: include_num_input_tokens_seen makes all workers wait"),
        ({"auto_find_batch_size": True}, "ValueError: auto_find_batch_size starts one worker again"),
        ({"enable_jit_checkpoint": True}, "ValueError: enable_jit_checkpoint saves on each worker after another step"),
    ]:
        trainer = trainer_of(folder, **options)
        refused(lambda trainer=trainer: attach(trainer), message)
    refused(lambda: attach(trainer_of(folder), topolgy="ring"), "TypeError: attach() has no argument 'topolgy': choose among")
    for path, value, message in [
        ("is_deepspeed_enabled", True, "ValueError: the Trainer uses DeepSpeed: it shards one model"),
        ("is_fsdp_enabled", True, "ValueError: the Trainer uses FSDP: it shards one model"),
        ("args._n_gpu", 2, "ValueError: the Trainer would use nn.DataParallel, because this process sees 2 GPUs"),
        ("accelerator.state.distributed_type", "XLA", "ValueError: the Trainer runs on XLA"),
        ("args.distributed_state.num_processes", 1, "RuntimeError: there are 2 workers, and the Trainer knows 1"),
        ("is_in_train", True, "RuntimeError: attach() was called after train() had begun"),
    ]:
        trainer = trainer_of(folder)
        owner: Any = trainer
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        with pytest.MonkeyPatch.context() as patch:
            if name == "distributed_type":
                value = type(owner.distributed_type)(value)
            patch.setattr(owner, name, value)
            refused(lambda trainer=trainer: attach(trainer), message)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ours.transformers, "__version__", "4.57.1")
        refused(lambda: attach(trainer), "ImportError: attach() needs transformers 5.20 or newer, and 4.57.1")
    assert error_of(lambda: attach(Model())) == "TypeError: attach() takes a Trainer of transformers, got Model"
    attach(trainer)
    assert error_of(lambda: attach(trainer)) == "ValueError: attach() was called before with this trainer: call it once."

    class Modes(torch.optim.SGD):
        def eval(self) -> None: ...

    model = Model()
    trainer = trainer_of(folder, model, optimizer=Modes(model.parameters(), lr=0.1))
    attach(trainer)
    refused(trainer.train, "ValueError: Modes gives the model other weights for evaluation")
    trainer = trainer_of(folder)
    attach(trainer, topology="hierarchical", local_world_size=3)
    refused(trainer.train, "ValueError: HierarchicalTopology needs nodes of equal size, but local_world_size=3")
    trainer = trainer_of(folder)
    attach(trainer)
    trainer.hp_search_backend = "optuna"  # as hyperparameter_search() sets it
    refused(trainer.train, "ValueError: hyperparameter_search() makes a new accelerator for each trial")
    trainer = trainer_of(folder)
    trainer.optimizer.step = MethodType(lambda optimizer, closure=None: None, trainer.optimizer)  # it steps in the backward
    attach(trainer)
    refused(trainer.train, "RuntimeError: AdamW made no round in step 1")


def _order(model: nn.Module, saved: Path) -> list[int]:
    """The model's parameters in the order of the names in the file."""
    from safetensors.torch import load_file

    names = [name for name, _ in model.named_parameters()]
    return [names.index(name) for name in load_file(saved / "model.safetensors")]


def test_the_trainer_trains_as_the_plain_loop_and_resumes_exactly(workers, tmp_path):
    seen = workers(2, whole_run, tmp_path)
    first_epoch = sorted(number for batches in seen for batch in batches[:8] for number in batch)
    assert first_epoch == list(range(64))  # (i): each sample once, on one worker


def tiny_lora(rank: int) -> Any:
    """A decoder with adapters, whose every weight differs between workers."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(rank)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 16}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **sizes))
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))


class Sentences(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Rows of eight ascending numbers, with labels for the second half of every other row."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = (torch.arange(8) + i) % 32
        labels = tokens.clone()
        labels[: 4 * (i % 2)] = -100
        return {"input_ids": tokens, "labels": labels}


def adapters(rank: int, n: int, folder: Path) -> None:
    as_launched(rank, n)
    from safetensors.torch import load_file
    from transformers import EarlyStoppingCallback

    from decent_dp.integrations.transformers import attach

    model = tiny_lora(rank)
    trains = [param for param in model.parameters() if param.requires_grad]
    frozen = [param for param in model.parameters() if not param.requires_grad]
    before = [param.detach().clone() for param in frozen]
    watch = watch_of(model)
    trainer = trainer_of(
        folder,
        model,
        [watch, EarlyStoppingCallback(1)],
        dataset=Sentences(),
        optimizer=torch.optim.SGD(trains, lr=1.0),
        max_steps=12,
        max_grad_norm=0.0,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        save_total_limit=1,
        metric_for_best_model="eval_loss",
        load_best_model_at_end=True,
    )
    trainer.eval_dataset = Sentences()
    # The loss falls until step 4, and then steps go up the slope.
    trainer.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda step: 1 if step < 4 else -30)
    callback = attach(trainer, topology="ring")
    with collectives() as watch.found:
        trainer.train()

    # Early stopping and the best model go by the metric of the mean, which all workers have in common.
    losses = logged(trainer, "eval_loss")
    assert list(losses) == [2, 4, 6]
    assert losses[4] < losses[2] < losses[6]
    # Also where the loss is divided by the number of tokens: no step makes all workers meet.
    assert watch.met == {step: [] for step in range(1, 7)}
    # Only adapters train and are mixed; frozen weights are rank 0's on all workers.
    assert sum(param.numel() for param in callback.replica.parameters.params) == sum(param.numel() for param in trains)
    assert all(torch.equal(a, b) for a, b in zip(frozen, before, strict=True)) == (rank == 0)
    digest: list[Any] = [None] * n
    dist.all_gather_object(digest, [param.detach() for param in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(digest[0], digest[rank], strict=True))
    # The model is the best one, bit for bit, and what comes after train() is of that.
    assert trainer.state.best_model_checkpoint == str(folder / "checkpoint-4")
    best = load_file(folder / "checkpoint-4" / "adapter_model.safetensors")
    names = {name.replace(".default", ""): param for name, param in model.named_parameters() if param.requires_grad}
    assert names.keys() == best.keys()  # only the adapter is in the file
    assert all(torch.equal(names[name], value) for name, value in best.items())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[4], rel=1e-6)
    assert sorted(path.name for path in folder.glob("checkpoint-*")) == ["checkpoint-4"]
    with pytest.raises(RuntimeError, match="closed"):
        callback.replica.consensus_distance()


@pytest.mark.slow
def test_only_adapters_are_mixed_and_the_best_model_is_a_mean(workers, tmp_path):
    pytest.importorskip("peft")
    workers(3, adapters, tmp_path)


class Noisy(Model):
    """With dropout; its fifth loss is infinite, on worker 1."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.layers.insert(2, nn.Dropout(0.2))

    def forward(self, x: Tensor, labels: Tensor, index: Tensor | None = None) -> dict[str, Tensor]:
        output = super().forward(x, labels, index)
        if len(self.seen) == 5 and dist.get_rank() == 1:
            output["loss"] = output["loss"] * torch.inf
        return output


def scaled(rank: int, n: int, folder: Path) -> None:
    as_launched(rank, n)
    from decent_dp.integrations.transformers import attach

    def prepared(folder: Path, seed: int, steps: int) -> tuple[Any, Any, Any]:
        model = Noisy(seed)
        watch = watch_of(model)
        options = {"max_steps": steps, "max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
        trainer = trainer_of(folder, model, [watch], **options)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)  # on a GPU fp16=True makes it
        return trainer, attach(trainer, topology="ring"), watch

    trainer, callback, watch = prepared(folder / "whole", rank, 12)
    run = trained(trainer, callback, watch)
    # (d): the third step was skipped on worker 1 alone, and its schedule is a step behind.
    assert run.rounds == 12
    assert callback.replica.stats().updates == 12 - (rank == 1)
    assert trainer.lr_scheduler.last_epoch == 12 - (rank == 1)
    assert all(bool(param.isfinite().all()) for param in run.mean)
    dist.barrier()
    assert [path.name for path in (folder / "whole").glob("checkpoint-*")] == ["checkpoint-12"]

    # (e): a run that stops after six steps and is resumed is the same.
    trainer, callback, watch = prepared(folder / "half", rank, 6)
    trained(trainer, callback, watch)
    half = watch.run.losses
    trainer, callback, watch = prepared(folder / "half", 7 + rank, 12)
    trainer.model.seen += [[]] * 12  # the infinite loss is not in this half
    again = trained(trainer, callback, watch, resume_from_checkpoint=True)
    again.losses = half + again.losses
    assert_equal_runs(again, run)
    assert trainer.lr_scheduler.last_epoch == 12 - (rank == 1)


@pytest.mark.slow
def test_an_overflow_on_one_worker_leaves_rounds_equal_and_is_resumed_exactly(workers, tmp_path):
    workers(3, scaled, tmp_path)


class Stream(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    def __iter__(self) -> Any:
        return (Points()[i] for i in range(64))


def in_other_orders(rank: int, n: int, folder: Path) -> list[str]:
    """What people do with a Trainer besides one run: all on one trainer, or in one folder."""
    as_launched(rank, n)
    import logging

    from safetensors.torch import load_file
    from transformers import TrainerCallback

    from decent_dp.integrations import transformers as integration

    class Nosy(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                trainer.save_model(str(folder / "middle"))
                trainer.save_model(str(folder / "middle"))
                predicted.append(trainer.predict(Points(32, seed=1)).metrics["test_loss"])

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            last.extend(copies(trainer.model))

    predicted: list[float] = []
    last: list[Tensor] = []
    trainer = trainer_of(folder, callbacks=[Nosy()], max_steps=4, save_strategy="steps", save_steps=2)
    before = trainer.evaluate()["eval_loss"]  # before training, of the worker's own model
    callback = integration.attach(trainer)
    assert callback.replica is None
    trainer.train()
    # Other callbacks and the script find the mean when training has ended.
    assert all(torch.equal(a, b) for a, b in zip(last, copies(trainer.model), strict=True))
    trainer.save_model(str(folder / "end"))
    dist.barrier()
    for name, loss in [("middle", predicted[0]), ("checkpoint-2", predicted[0]), ("end", trainer.evaluate()["eval_loss"])]:
        model = Model(seed=3)
        model.load_state_dict(load_file(folder / name / "model.safetensors"))
        assert loss == pytest.approx(loss_of(copies(model), Points(32, seed=1)), rel=1e-5)
        assert loss < before
    first = callback.replica
    trainer.train()  # once more, from there, over the checkpoints of the first time
    assert callback.replica is not first
    assert callback.replica.stats().rounds == 4

    # An IterableDataset is read by each worker, not by one for all.
    model = Model()
    watch = watch_of(model)
    trainer = trainer_of(folder / "stream", model, [watch], dataset=Stream(), max_steps=3, logging_steps=9)
    trained(trainer, integration.attach(trainer), watch)
    assert watch.met == {1: [], 2: [], 3: []}
    assert [sorted(batch) for batch in model.seen] == [list(range(8 * i + 4 * rank, 8 * i + 4 * rank + 4)) for i in range(6)]

    # The best model has to be there on all workers, or they would keep different ones.
    steps = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        # The first one: after the last save two workers have the same model anyhow.
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    trainer = trainer_of(folder / "best", max_steps=4, load_best_model_at_end=True, **steps)
    integration.attach(trainer)
    if rank == 1:
        trainer._load_best_model = lambda: None  # as on a machine that does not see the folder
    found = error_of(trainer.train)
    assert "was not loaded on all workers: each needs to see its file" in found

    # From a checkpoint without replicas all workers start from its model, and the log says so.
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("decent_dp").addHandler(handler)
    if rank == 0:
        import shutil

        shutil.rmtree(folder / "checkpoint-2" / "decent_dp")
    dist.barrier()
    trainer = trainer_of(folder, max_steps=4)
    callback = integration.attach(trainer)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
    assert callback.replica.stats().rounds == 2
    return records


@pytest.mark.slow
def test_training_twice_saving_in_the_middle_and_checkpoints_without_replicas(workers, tmp_path):
    for records in workers(2, in_other_orders, tmp_path):
        assert any("has no replicas in 'decent_dp'" in record for record in records)


def alone(rank: int, n: int, folder: Path) -> None:
    """One process without a launcher, as in a notebook."""
    dist.destroy_process_group()
    quiet_frameworks()
    from decent_dp.integrations.transformers import attach

    found = []
    for name, half in [("whole", False), ("half", True), ("half", False)]:
        options = {"save_strategy": "steps", "save_steps": 3}
        trainer = trainer_of(folder / name, max_steps=3 if half else 6, **options)
        callback = attach(trainer)
        trainer.train(resume_from_checkpoint=name == "half" and not half)
        found.append(copies(trainer.model))
        assert callback.replica.stats().rounds == (3 if half else 6)
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))
    assert not dist.is_initialized()


@pytest.mark.slow
def test_one_process_needs_no_launcher(workers, tmp_path):
    workers(1, alone, tmp_path)


# The loss falls, so that only the first checkpoint is a best one: an evaluation decides against the others.
BEST: dict[str, Any] = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "save_total_limit": 1}
BEST |= {"metric_for_best_model": "eval_loss", "greater_is_better": True, "load_best_model_at_end": True}


def interrupted(rank: int, n: int, folder: Path, stops: bool, settles: int = 0, **options: Any) -> list[Tensor]:
    """``settles``: after this step what is in flight is mixed in, as by a save."""
    as_launched(rank, n)
    from transformers import TrainerCallback

    from decent_dp.integrations.transformers import attach

    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if stops and rank == 1 and state.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
            assert not stops or state.global_step < 400
            if state.global_step == settles:
                settle(callback.replica)

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            (folder / f"seen-{state.global_step}-{rank}").touch()

    trainer = trainer_of(folder, callbacks=[Interrupt()], max_steps=400, **options)
    callback = attach(trainer, signals=(signal.SIGUSR1,))
    trainer.train(resume_from_checkpoint=bool(list(folder.glob("checkpoint-*"))))
    return copies(trainer.model)


@pytest.mark.slow
def test_a_signal_to_one_worker_stops_all_after_the_same_step(workers, tmp_path):
    stopped = workers.outcomes(2, interrupted, tmp_path / "a", True)
    assert [(outcome.error, outcome.message) for outcome in stopped] == [("SystemExit", "0")] * 2
    [checkpoint] = (tmp_path / "a").glob("checkpoint-*")
    step = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 2 < step < 400
    # Callbacks of the user have seen the checkpoint, as any other.
    assert sorted(path.name for path in (tmp_path / "a").glob("seen-*")) == [f"seen-{step}-0", f"seen-{step}-1"]
    resumed = workers(2, interrupted, tmp_path / "a", False)
    undisturbed = workers(2, interrupted, tmp_path / "b", False, step)
    for a, b in zip(resumed, undisturbed, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_a_signal_saves_also_where_an_evaluation_decides_on_saves(workers, tmp_path):
    stopped = workers.outcomes(2, partial(interrupted, **BEST), tmp_path, True)
    assert [(outcome.error, outcome.message) for outcome in stopped] == [("SystemExit", "0")] * 2
    _, last = sorted(int(path.name.removeprefix("checkpoint-")) for path in tmp_path.glob("checkpoint-*"))
    assert 2 < last < 400
    assert (tmp_path / f"checkpoint-{last}" / "trainer_state.json").is_file()
    assert all((tmp_path / f"seen-{last}-{rank}").exists() for rank in range(2))


def resized(rank: int, n: int, folder: Path, steps: int) -> tuple[int, list[Tensor], list[Tensor]]:
    """The rounds and the parameters when training begins, and the parameters of this worker when it ends."""
    as_launched(rank, n)
    from transformers import TrainerCallback

    from decent_dp.integrations.transformers import attach

    seen: list[Any] = []

    class Look(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            seen.extend((callback.replica.stats().rounds, copies(trainer.model)))

        def on_save(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step == steps:
                seen.append(copies(trainer.model))

    trainer = trainer_of(folder, callbacks=[Look()], max_steps=steps, save_strategy="steps", save_steps=3)
    callback = attach(trainer)
    trainer.train(resume_from_checkpoint=bool(list(folder.glob("checkpoint-*"))))
    assert trainer.state.global_step == steps
    rounds, begin, end = seen
    return rounds, begin, end


@pytest.mark.slow
def test_another_number_of_workers_goes_on_from_the_replicas(workers, tmp_path):
    three = workers(3, resized, tmp_path, 3)
    assert [rounds for rounds, *_ in three] == [0] * 3
    four = workers(4, resized, tmp_path, 6)
    assert [rounds for rounds, *_ in four] == [3] * 4
    for _, begin, _ in four:  # each is one that was saved, not their mean
        assert any(all(torch.equal(a, b) for a, b in zip(begin, end, strict=True)) for _, _, end in three)
    assert len({tuple(begin[0].flatten().tolist()) for _, begin, _ in four}) > 1


def fails_while_it_saves(rank: int, n: int, folder: Path) -> None:
    as_launched(rank, n)
    from decent_dp.integrations.transformers import attach

    trainer = trainer_of(folder, max_steps=9, save_strategy="steps", save_steps=3)
    callback = attach(trainer)

    def fail(_: Path) -> None:
        raise OSError("killed here")

    callback._save_replicas = fail
    refused(lambda: trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6")), "OSError: killed here")


@pytest.mark.slow
def test_a_save_that_was_interrupted_is_not_resumed_from(workers, tmp_path):
    workers(2, resized, tmp_path, 6)
    # The Trainer writes its state last, and does not look for it when it chooses the newest folder.
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    assert [rounds for rounds, *_ in workers(2, resized, tmp_path, 9)] == [3, 3]
    # The second save of a step, over the first.
    workers(2, fails_while_it_saves, tmp_path)
    assert [rounds for rounds, *_ in workers(2, resized, tmp_path, 12)] == [6, 6]


def test_without_the_extra_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "decent_dp.integrations.transformers", raising=False)
    with pytest.raises(ImportError, match=r"the Trainer needs transformers and accelerate; .*\[transformers\]"):
        importlib.import_module("decent_dp.integrations.transformers")
