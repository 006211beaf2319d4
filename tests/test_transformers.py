"""``attach(trainer)``: the Trainer of transformers trains as the plain ``gossip()`` loop, and does the rest as it promises."""

from __future__ import annotations

from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from decent_dp.checkpoint import read_parameters
from tests.framework_cases import (
    Model,
    Points,
    Run,
    as_launched,
    assert_equal_runs,
    collectives,
    copies,
    plain_loop,
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
    plain = plain_loop(batches, accumulate=2, clip=0.1, make_optimizer=adamw, make_scheduler=falling, topology="ring")
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
    assert_close(read_parameters(saved / "decent_dp", rank=rank).values(), watch.params[3])

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
