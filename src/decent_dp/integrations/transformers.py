"""``attach(trainer)``: gossip in the ``Trainer`` of transformers, in place of DDP.

The Trainer's own loop makes the rounds, because a round follows each step of its optimizer. What is left to do: no DDP around
the model, no collective of all workers in a step, the mean for evaluation and saving, and all replicas in the checkpoints.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from decent_dp import Gossip, checkpoint, gossip
from decent_dp._checks import install_hint
from decent_dp.launch import read_environment
from decent_dp.replica.averages import differing
from decent_dp.transport import InProcessTransport

try:
    import accelerate
    import transformers
    from transformers import Trainer, TrainerCallback
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError(f"the Trainer needs transformers and accelerate; {install_hint('transformers')}") from error

from decent_dp.integrations import OPTIONS
from decent_dp.integrations._survivors import save_again
from decent_dp.integrations._trainer_survivors import TrainerOverSurvivors

__all__ = ["GossipCallback", "attach"]

_log = logging.getLogger(__name__)

# The versions whose sources this module was written for. Older ones train, save and resume in another order.
_OLDEST = {"transformers": (5, 20), "accelerate": (1, 15)}
# The folder of all replicas in a checkpoint's folder.
_REPLICAS = "decent_dp"


def attach(trainer: Trainer, *, signals: Iterable[int] = (), **options: Any) -> GossipCallback:
    """Makes a ``Trainer`` train by gossip in place of DDP. Called by all workers, between ``Trainer(...)`` and ``train()``.

    Every worker trains its own replica, and mixes it with neighbours after each optimizer step. Evaluation, metrics and saved
    models are those of the mean of all replicas, and so is the model after ``train()``. Each ``checkpoint-N`` has all replicas
    in the folder ``decent_dp``, from which ``train(resume_from_checkpoint=True)`` resumes exactly.

    Sets ``average_tokens_across_devices=False`` and ``dispatch_batches=False``, which would make all workers wait in each step.

    Args:
        trainer: a ``Trainer``, or a subclass.
        signals: at one of these to any worker, all workers save a checkpoint after the same step and exit with status 0
            (``checkpoint.Preemption``).
        options: topology, compression, mix_every, rule, faults, encrypt, overlap, bucket_size_in_mb, local_world_size and
            replica, as of ``gossip``. With ``faults`` the Trainer's own collectives, too, are those of the living workers.

    Returns:
        A callback of the trainer; its ``replica`` is what ``gossip`` returned, from the beginning of training.

    Raises:
        TypeError: an option is unknown.
        ValueError: the trainer has a setting that does not fit; names it. Or ``attach`` was called before.
        RuntimeError: training has begun, or the trainer does not know all workers.
        ImportError: transformers or accelerate is too old.
    """
    _check_versions()
    _check(trainer)
    if unknown := sorted(options.keys() - OPTIONS):
        raise TypeError(f"attach() has no argument '{unknown[0]}': choose among {', '.join(sorted(OPTIONS))} and signals")
    trainer.args.average_tokens_across_devices = False
    trainer.args.accelerator_config.dispatch_batches = False
    trainer.accelerator.dataloader_config.dispatch_batches = False
    return GossipCallback(trainer, options, tuple(signals))


class GossipCallback(TrainerCallback):  # type: ignore[misc]  # its sources are skipped
    """What ``attach`` adds to a Trainer. Its methods are called by the Trainer.

    Attributes:
        replica: what ``gossip`` returned, from the beginning of training; None before. It is closed when training has ended.
    """

    def __init__(self, trainer: Trainer, options: dict[str, Any], signals: tuple[int, ...]) -> None:
        self.replica: Gossip | None = None
        self._trainer, self._options, self._signals = trainer, options, signals
        # The checkpoint from which the present train() resumes.
        self._resume: str | None = None
        self._stop: checkpoint.Preemption | None = None
        # The step of the last checkpoint, and whether the next one is the last of this process.
        self._saved, self._ends = -1, False
        # Left when train() returns or raises.
        self._during = contextlib.ExitStack()
        self._inside_mean = False
        # With faults, from the beginning of training; it stays if a worker is gone at the end.
        self._survivors: TrainerOverSurvivors | None = None
        # Rounds at the end of the last step.
        self._rounds = 0
        accelerator = trainer.accelerator
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
        trainer.train = functools.partial(self._train, trainer.train)
        trainer.evaluation_loop = functools.partial(self._evaluate, trainer.evaluation_loop)
        trainer.save_model = functools.partial(self._save, trainer.save_model)
        # First, so that other callbacks find the replica when training begins, and the mean when it has ended.
        trainer.callback_handler.callbacks.insert(0, self)

    # -- around methods of the Trainer --------------------------------------------------------------------------------

    def _train(
        self, train: Callable[..., Any], resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if self._trainer.hp_search_backend is not None:
            raise ValueError(
                "hyperparameter_search() makes a new accelerator for each trial, which would add DDP: make a Trainer and "
                "call attach() for each trial yourself."
            )
        resume = resume_from_checkpoint or None
        self._resume = resume = _last_complete(self._trainer.args.output_dir) if resume is True else resume
        with contextlib.ExitStack() as self._during:
            self._during.callback(self._leave)
            return train(resume or resume_from_checkpoint, *args, **kwargs)

    def _evaluate(self, evaluation_loop: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._averaged():
            return evaluation_loop(*args, **kwargs)

    def _save(self, save_model: Callable[..., Any], output_dir: str | None = None, _internal_call: bool = False) -> None:
        # Before the Trainer writes its own state and removes older checkpoints.
        saves = _internal_call and self._training and not self._trainer.args.save_only_model
        # An upload, too, saves internally, in another folder.
        is_checkpoint = output_dir is not None and Path(output_dir).name.startswith(f"{PREFIX_CHECKPOINT_DIR}-")
        folder = Path(output_dir) / _REPLICAS if output_dir is not None and saves and is_checkpoint else None
        is_writer = self._trainer.is_local_process_zero() or self._trainer.is_world_process_zero()
        if folder is not None and is_writer:
            # Of an earlier run, whose step had the same number. All workers meet in averaged() before any of them writes.
            (folder.parent / TRAINER_STATE_NAME).unlink(missing_ok=True)  # written last: the folder is complete with it
            shutil.rmtree(folder, ignore_errors=True)
        writer = None
        while writer is None or (self._survivors is not None and writer != self._survivors.first):
            writer = -1 if self._survivors is None else self._survivors.first
            with self._averaged():
                save_model(output_dir, _internal_call)
            if self._training and self._survivors is not None:
                self._survivors.barrier()  # the writer may have died
        if folder is not None:
            self._save_replicas(folder)

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Context manager in which the model is the mean of all replicas, if it is being trained."""
        if not self._training or self._inside_mean:
            yield
            return
        assert self.replica is not None
        self._inside_mean = True
        try:
            with self.replica.averaged():
                yield
        finally:
            self._inside_mean = False

    @property
    def _training(self) -> bool:
        return self.replica is not None and not self.replica.life.closed

    # -- called by the Trainer ----------------------------------------------------------------------------------------

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Makes the replica; the Trainer has made the optimizer, and loaded what it loads from a checkpoint."""
        if self.replica is not None:
            self.replica.close()  # an earlier train() has raised
        trainer = self._trainer
        optimizer = trainer.optimizer.optimizer
        if callable(getattr(optimizer, "eval", None)):
            raise ValueError(
                f"{type(optimizer).__name__} gives the model other weights for evaluation, from values that workers do not "
                "have in common: choose another optimizer."
            )
        if self._survivors is not None:
            raise RuntimeError("workers have died in an earlier train(), which a new one needs: start all workers again.")
        transport = None if dist.is_initialized() else InProcessTransport()
        replica = gossip(trainer.model, optimizer, scaler=trainer.accelerator.scaler, transport=transport, **self._options)
        self.replica = replica
        trainer.accelerator.no_sync = lambda model=None: replica.no_sync()  # of the class again, after ``train``
        self._during.callback(vars(trainer.accelerator).pop, "no_sync", None)
        if self._resume is not None:
            self._load_replicas(Path(self._resume) / _REPLICAS)
        if replica.survivors is not None:
            self._survivors = TrainerOverSurvivors(trainer, replica)
        self._rounds = replica.stats().rounds
        self._stop, self._saved, self._ends = None, -1, False
        if self._signals:
            self._stop = self._during.enter_context(checkpoint.Preemption(replica, self._signals))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        assert self.replica is not None
        before, self._rounds = self._rounds, self.replica.stats().rounds
        if self._rounds == before:
            kind = type(self.replica.optimizers[0]).__name__
            raise RuntimeError(
                f"{kind} made no round in step {state.global_step}: it does not step in its step(). Choose an optimizer that "
                "does."
            )
        if self._survivors is not None:
            self._survivors.count_steps()
        if self._stop is not None and self._stop.due:
            control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._saved = state.global_step
        if self._ends:
            raise SystemExit(0)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        """Comes after a stop, too: other callbacks have seen its checkpoint, and nothing of a run that has ended follows."""
        if self._survivors is not None and self._survivors.leaves_out_epoch():
            control.should_training_stop = False
        if self._stop is not None and self._stop.due:
            if self._saved == state.global_step:
                raise SystemExit(0)
            # With save_strategy="best" an evaluation after the same step has decided against the checkpoint.
            control.should_save = self._ends = True
            # Last now: it ends the process in on_save, and the others are to see that save. A new list: this one is being read.
            handler = self._trainer.callback_handler
            handler.callbacks = [*(other for other in handler.callbacks if other is not self), self]
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The model becomes the mean for good, or is the best one that the Trainer has loaded."""
        replica = self.replica
        assert replica is not None
        if not (args.load_best_model_at_end and state.best_model_checkpoint is not None):
            replica.average_()
        elif differing(replica.world.control, replica.parameters.params):
            raise RuntimeError(
                f"the best model, {state.best_model_checkpoint}, was not loaded on all workers: each needs to see its file. "
                "Use a shared disk, or save_on_each_node=True."
            )
        replica.close()
        self._leave()

    def _leave(self) -> None:
        """The collectives of the living workers end with the training."""
        if self._survivors is not None and self.replica is not None and self._survivors.leave(self.replica.world.rank):
            self._survivors = None

    # -- all replicas -------------------------------------------------------------------------------------------------

    def _save_replicas(self, folder: Path) -> None:
        replica = self.replica
        assert replica is not None
        # The Trainer saves worker 0's, and a scaler may have skipped a step on another worker only.
        state = {} if replica.scaler is None else {"scheduler": self._trainer.lr_scheduler.state_dict()}
        # An error is raised on all workers: the Trainer would go on to remove older checkpoints.
        save_again(replica, lambda: checkpoint.save(replica, folder, state, keep=1))

    def _load_replicas(self, folder: Path) -> None:
        assert self.replica is not None
        # On another number of workers the replicas are distributed, as the Trainer itself resumes there.
        state = checkpoint.load(self.replica, folder, resize="spread", missing_ok=True)
        if state is None:
            _log.warning(
                "%s has no replicas in '%s', as if it was saved without attach() or with save_only_model=True: all workers "
                "start from its model",
                self._resume,
                folder.name,
            )
        elif "scheduler" in state:
            self._trainer.lr_scheduler.load_state_dict(state["scheduler"])


def _last_complete(folder: str) -> str | None:
    """The newest checkpoint whose save has ended: the Trainer writes its state last."""
    found = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    numbers = [int(path.parent.name.rpartition("-")[2]) for path in found if path.parent.name.rpartition("-")[2].isdigit()]
    return str(Path(folder) / f"{PREFIX_CHECKPOINT_DIR}-{max(numbers)}") if numbers else None


def _check_versions() -> None:
    for module in (transformers, accelerate):
        oldest = _OLDEST[module.__name__]
        version = tuple(int(number) for number in re.findall(r"\d+", module.__version__)[:2])
        if version < oldest:
            raise ImportError(
                f"attach() needs {module.__name__} {'.'.join(map(str, oldest))} or newer, and {module.__version__} is "
                f"installed; {install_hint('transformers')}"
            )


def _check(trainer: Trainer) -> None:
    """Raises an error for a trainer that cannot train by gossip. Settings are equal on all workers, and so is the error."""
    if not isinstance(trainer, Trainer):
        raise TypeError(f"attach() takes a Trainer of transformers, got {type(trainer).__name__}")
    if any(isinstance(callback, GossipCallback) for callback in trainer.callback_handler.callbacks):
        raise ValueError("attach() was called before with this trainer: call it once.")
    if trainer.is_in_train:
        raise RuntimeError("attach() was called after train() had begun: call it before.")
    for refused, message in _refusals(trainer):
        if refused:
            raise ValueError(message)
    workers = dist.get_world_size() if dist.is_initialized() else read_environment(os.environ).world_size
    if trainer.args.world_size != workers:
        raise RuntimeError(
            f"there are {workers} workers, and the Trainer knows {trainer.args.world_size}: it would train on its own. Start "
            "the script with torchrun, and on machines without GPUs pass use_cpu=True to TrainingArguments."
        )


def _refusals(trainer: Trainer) -> list[tuple[bool, str]]:
    """Settings that cannot be had with gossip: whether the trainer has it, and what to do."""
    args, config = trainer.args, trainer.args.accelerator_config
    kind = str(trainer.accelerator.distributed_type.value)
    sharded = "it shards one model over all workers, which leaves no replicas to mix. Remove it from the arguments."
    return [
        (trainer.is_deepspeed_enabled, f"the Trainer uses DeepSpeed: {sharded}"),
        (bool(trainer.is_fsdp_enabled or args.fsdp), f"the Trainer uses FSDP: {sharded}"),
        (
            getattr(trainer, "is_distributed_loading_by_transformers", False) or args.parallelism_config is not None,
            f"the Trainer has a parallelism_config, or a model with a distributed_config: {sharded}",
        ),
        (
            args.n_gpu > 1,
            f"the Trainer would use nn.DataParallel, because this process sees {args.n_gpu} GPUs: start the script with "
            "torchrun, a process for each, or set CUDA_VISIBLE_DEVICES.",
        ),
        (kind not in ("NO", "MULTI_CPU", "MULTI_GPU"), f"the Trainer runs on {kind}: gossip runs on CPUs and CUDA GPUs."),
        (
            config.dispatch_batches is True,
            "dispatch_batches=True makes all workers wait for worker 0 in each step: leave it out of accelerator_config. Each "
            "worker then reads the IterableDataset, and takes its share.",
        ),
        (
            not config.even_batches,
            "even_batches=False lets workers have different numbers of batches, and a round needs all of them: leave it out of "
            "accelerator_config.",
        ),
        (
            args.include_num_input_tokens_seen != "no",
            "include_num_input_tokens_seen makes all workers wait for each other in each step: set it to 'no'.",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size starts one worker again with other batches, and a round needs all of them: choose "
            "per_device_train_batch_size.",
        ),
        (
            args.enable_jit_checkpoint,
            "enable_jit_checkpoint saves on each worker after another step: use attach(trainer, signals=(signal.SIGTERM,)).",
        ),
    ]
