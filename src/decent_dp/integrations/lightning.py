"""Lightning: ``Trainer(strategy="gossip")`` and ``Fabric(strategy="gossip")``, after this module was imported.

::

    import decent_dp.integrations.lightning

    trainer = lightning.Trainer(strategy="gossip", devices=4)

``GossipStrategy(topology=..., ...)`` takes the arguments of ``decent_dp.gossip``. It starts processes, shards data and reduces
metrics as ``DDPStrategy`` does, and wraps nothing: gradients stay local, and a round follows each step of the optimizers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from decent_dp import Gossip, Preemption
from decent_dp.checkpoint.random_states import random_states, set_random_states
from decent_dp.errors import PeerError
from decent_dp.integrations._lightning_common import (
    NOTE,
    GossipArguments,
    LightningOverSurvivors,
    load_own,
    load_replicas,
    mean_state,
    remove_replicas,
    save_replicas,
)
from decent_dp.integrations._lightning_fabric import GossipFabricStrategy
from decent_dp.integrations._survivors import LeftOut, SurvivorCollectives
from decent_dp.replica.shards import is_sharded

if TYPE_CHECKING:
    import lightning.pytorch as pl

from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException

__all__ = ["GossipFabricStrategy", "GossipStrategy"]

_log = logging.getLogger(__name__)

# The entry of the only model in a checkpoint file.
_MODEL = "state_dict"


class GossipStrategy(GossipArguments, LightningOverSurvivors, DDPStrategy):  # type: ignore[misc]
    """A strategy of Lightning's Trainer whose workers mix with their neighbours after each step of the optimizers.

    Validation, and the weights in checkpoint files, are the mean of the replicas. A folder beside each file has all replicas,
    from which ``fit(ckpt_path=...)`` resumes exactly. At the end of ``fit`` the model is the mean.

    Args:
        topology, compression, mix_every, rule, faults, encrypt, overlap, bucket_size_in_mb, local_world_size, replica: as of
            ``decent_dp.gossip``; ``local_world_size`` None is the Trainer's number of devices per node.
        arguments: ``accelerator``, ``parallel_devices``, ``cluster_environment``, ``checkpoint_io``, ``precision_plugin``,
            ``process_group_backend``, ``timeout`` and ``start_method`` of Lightning's DDPStrategy.

    Attributes:
        replica: what ``decent_dp.gossip`` returned in the present or last ``fit``; None before.

    Raises:
        TypeError: an argument is unknown, or is one of PyTorch's DDP.
    """

    strategy_name = "gossip"

    PRECISION = "precision_plugin"

    def reset(self) -> None:
        self.replica: Gossip | None = None
        self._trainer: Any = None
        # Contexts of the present fit: the agreement on a stop and the metrics, and the mean while it validates.
        self._contexts = contextlib.ExitStack()
        self._evaluation = contextlib.ExitStack()
        # The mean that was given to a checkpoint.
        self._mean: dict[str, Any] | None = None
        # The checkpoint file of this resume with its note, and the random states that it had.
        self._resumed: tuple[Any, Any] | None = None
        self._random: dict[str, Any] | None = None
        self._lost: LeftOut | None = None

    # -- setup and teardown -------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._layer_sync is not None:
            raise ValueError(
                "Trainer(sync_batchnorm=True) waits for all workers in each forward, and a gossip round for neighbours only: "
                "leave it out. Validation and checkpoints average the statistics of BatchNorm."
            )
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer
        if self.has_lost_workers and trainer.state.fn != TrainerFn.FITTING:
            self._setup_without_the_others(trainer)
            return
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        _check_trainer(trainer, self)
        if self.world_size == 1:
            _log.warning(
                "one worker has no neighbours, and trains alone: pass Trainer(devices=...), or start more with torchrun"
            )
        self.replica = self.make_replica(self.lightning_module, self.optimizers)
        self._lost, self._random = LeftOut(self.replica), None
        self._contexts.enter_context(_Stops(self, trainer, self.replica))
        if self.replica.survivors is not None:
            self._contexts.enter_context(self.survivor_metrics(self.lightning_module))

    def _setup_without_the_others(self, trainer: pl.Trainer) -> None:
        """As Lightning's own for ``validate``, ``test`` and ``predict``, without a broadcast of the model, the mean."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        self.setup_precision_plugin()
        self._contexts.enter_context(self.survivor_metrics(self.lightning_module))

    def configure_ddp(self) -> None:
        """Wraps nothing."""

    def teardown(self) -> None:
        with contextlib.ExitStack() as ending:  # from the last line to the first, whatever raises
            ending.callback(super().teardown)
            if not self._training:
                ending.callback(self._contexts.close)
                return
            ending.callback(self._current.close)
            ending.callback(self._contexts.close)
            ending.callback(self._evaluation.close)
            if not (self._trainer.interrupted or self._current.life.fault):
                self._current.average_()

    @property
    def _training(self) -> bool:
        """Whether the workers have replicas of their own, in ``fit``."""
        return self.replica is not None and not self.replica.life.closed

    @property
    def _current(self) -> Gossip:
        """The replica of this fit."""
        assert self.replica is not None
        return self.replica

    @property
    def _alone(self) -> bool:
        """Whether an error ends this worker, and it must not wait for the others, which may still train."""
        interrupted = self._trainer is not None and self._trainer.interrupted
        return interrupted and not isinstance(sys.exc_info()[1], SIGTERMException)

    def on_exception(self, exception: BaseException) -> None:
        """Tells the others, which lose this worker, why."""
        if self._training and not isinstance(exception, (PeerError, SIGTERMException)):
            self._current.world.report(f"{type(exception).__name__}: {exception}")

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        return self._current.no_sync() if self._training else contextlib.nullcontext()

    def on_train_start(self) -> None:
        self._lost = LeftOut(self._current)  # a checkpoint that was loaded is of a later round
        if self._random is not None and self._trainer.fit_loop.restarted_mid_epoch:
            # The data loader's new iterator has drawn a seed, which the uninterrupted run has drawn at the epoch's start.
            set_random_states(self._random, self.lightning_module)
        self._random = None

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        found = super().optimizer_step(optimizer, closure, model, **kwargs)
        replica = self.current_replica()
        if replica is not None and replica.survivors is not None and self.lightning_module.automatic_optimization:
            self._leave_out_batches()
        return found

    def _leave_out_batches(self) -> None:
        """After a step: leaves out what belongs to the rounds that this worker has left out, up to the end of the epoch."""
        trainer, replica = self._trainer, self._current
        assert self._lost is not None
        replica.catch_up()
        lost = self._lost.take()
        loop, fetcher = trainer.fit_loop.epoch_loop, trainer.fit_loop._data_fetcher
        for _ in range(lost):
            _count_steps(loop, 1)
            for _ in range(trainer.accumulate_grad_batches):
                if not fetcher.done:
                    next(fetcher)
                    _count(loop.batch_progress, 1)
            loop.update_lr_schedulers("step", update_plateau_schedulers=False)
        if lost:
            loop.batch_progress.is_last_batch = fetcher.done
        if self._lost.is_behind and not fetcher.done:
            loop._skip_next_val = True
            for callback in trainer.callbacks:
                if isinstance(callback, ModelCheckpoint):
                    callback._last_global_step_saved = trainer.global_step + 1  # the one that ends now

    def end_epoch(self) -> None:
        """Whether to stop, and the number of the epoch, are those of all workers: one that was out may be in an earlier one."""
        trainer, replica = self._trainer, self._current
        progress = trainer.fit_loop.epoch_progress
        replica.world.control.begin("end of the epoch")
        found = replica.world.control.gather([bool(trainer.should_stop), progress.current.processed])
        trainer.should_stop = any(stops for stops, _ in found)
        later = max(epoch for _, epoch in found) - progress.current.processed
        _count(progress, later)
        assert self._lost is not None
        _count_steps(trainer.fit_loop.epoch_loop, self._lost.take())  # the next epoch begins with all of its batches

    # -- the mean -----------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        if self._training:
            self._evaluation.enter_context(self._current.averaged())

    def on_validation_end(self) -> None:
        self._evaluation.close()
        if self._training and self._trainer is not None:
            # All workers meet here anyway; a hook of the validation may have decided on one of them alone.
            self._trainer.should_stop = self.stops_any(self._trainer.should_stop)

    def stops_any(self, should_stop: bool) -> bool:
        """Whether ``should_stop`` is set on any worker. Called by all workers, and an error names one that is gone."""
        control = self._current.world.control
        control.begin("should_stop")
        return any(control.gather(should_stop))

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict of the mean; in ``fit`` a copy. Called by all workers."""
        if not self._training or self._alone:
            state: dict[str, Any] = super().lightning_module_state_dict()
            return state
        self._mean = state = mean_state([self._current], super().lightning_module_state_dict)
        return state

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes the file, with the mean, and in ``fit`` all replicas beside it. Called by all workers."""
        mean, self._mean = self._mean, None
        if self._alone:
            _log.warning("%s was not saved: it takes all workers, and an error has ended this one", filepath)
            return
        if not self._training or "optimizer_states" not in checkpoint:  # the model alone
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            remove_replicas(self, filepath)
            return
        # A state dict that a callback has put there (a moving average) is this worker's.
        own = {key: value for key, value in checkpoint.items() if key != "optimizer_states" and value is not mean}
        save_replicas(self, filepath, {_MODEL: self._current}, own, checkpoint, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        remove_replicas(self, filepath)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Reads the file; for ``fit`` with this worker's own states of schedulers, callbacks, loops and data loaders."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        self._resumed = None
        assert self.lightning_module is not None
        if NOTE in checkpoint and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = checkpoint_path, checkpoint[NOTE]
            checkpoint.update(load_own(self, *self._resumed, weights_only))
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restores the replicas with their optimizers, if the file has any; else the file's optimizer states."""
        if self._resumed is None or not load_replicas(self, *self._resumed, {_MODEL: self._current}):
            super().load_optimizer_state_dict(checkpoint)
        elif self._resumed[1]["workers"] == self.world_size:
            self._random = random_states(self._current.model)
        self._resumed = None

    def process_dataloader(self, dataloader: Any) -> Any:
        """Sets the epoch of samplers, which a resumed run would otherwise do after a loader with processes has read them."""
        assert self.lightning_module is not None
        epoch = self.lightning_module.trainer.fit_loop.epoch_progress.current.processed
        for holder in (dataloader, getattr(dataloader, "batch_sampler", None)):
            set_epoch = getattr(getattr(holder, "sampler", None), "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
        return dataloader

    # -- collectives of Lightning, also in its handling of an error ---------------------------------------------------

    def current_replica(self) -> Gossip | None:
        return self.replica if self._training else None

    def survivors(self) -> SurvivorCollectives | None:
        if not self._alone:
            return super().survivors()
        return self._alone_among(range(self.world_size) if self._last_control is None else self._last_control.ranks)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(cls.strategy_name, cls, description="decent_dp: mixes with neighbours", override=True)


def _check_trainer(trainer: pl.Trainer, strategy: GossipStrategy) -> None:
    """Raises ValueError, on all workers, for what cannot work in this fit."""
    for optimizer in strategy.optimizers:
        if type(optimizer).__name__ == "_MockOptimizer":
            raise ValueError(
                "configure_optimizers returned None: a gossip round follows an optimizer's step. Return an optimizer."
            )
    for name, param in strategy.lightning_module.named_parameters():
        if is_sharded(param):
            raise ValueError(
                f"parameter '{name}' is sharded, and GossipStrategy trains whole replicas: leave out fully_shard, or write "
                "the loop with decent_dp.gossip()."
            )
    if trainer._val_check_time_interval is not None:
        raise ValueError(
            "Trainer(val_check_interval=<a time>) goes by each worker's own clock, and all must validate after the same batch: "
            "pass a number of batches."
        )
    for callback in trainer.callbacks:
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None and strategy.is_global_zero:
            _log.warning(
                "ModelCheckpoint(train_time_interval=...) asks worker 0 at every batch, so that all workers wait for it: "
                "every_n_train_steps does not"
            )


class _Stops:
    """Stops all workers after the same batch, without a collective per batch.

    A SIGTERM, a limit of time, or ``trainer.should_stop`` on one worker alone is a request. The workers agree on a round, and
    after it each of them does what Lightning does on that worker.

    Lightning broadcasts whether worker 0 has received a SIGTERM before every batch, and in the signal's handler. A ``Timer``
    broadcasts after every batch. All of these are replaced here.
    """

    def __init__(self, strategy: GossipStrategy, trainer: pl.Trainer, replica: Gossip) -> None:
        self._strategy, self._trainer, self._connector = strategy, trainer, trainer._signal_connector
        self._stop = Preemption(replica, signals=())
        self._timers: list[Timer] = []
        self._process = os.getpid()
        self._over = False
        self._sigterm, self._requeue = False, False

    def __enter__(self) -> _Stops:
        trainer, connector = self._trainer, self._connector
        self._stop.__enter__()
        loop = trainer.fit_loop.epoch_loop
        loop._broadcast_sigterm_tensor, loop.on_advance_end = (lambda: None), self._on_advance_end
        trainer.fit_loop.on_advance_end = self._on_epoch_end
        connector._sigterm_notifier_fn, connector._slurm_sigusr_handler_fn = self._on_sigterm, self._on_requeue
        for callback in trainer.callbacks:
            if isinstance(callback, Timer) and callback._duration is not None and callback._interval == "step":
                callback._interval = "epoch"
                self._timers.append(callback)
        return self

    def __exit__(self, *error: Any) -> None:
        loop = self._trainer.fit_loop.epoch_loop
        del loop._broadcast_sigterm_tensor, loop.on_advance_end, self._trainer.fit_loop.on_advance_end
        for timer in self._timers:
            timer._interval = "step"
        del self._connector._sigterm_notifier_fn, self._connector._slurm_sigusr_handler_fn
        self._stop.__exit__(*error)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a process of a data loader, which was forked with this handler
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._sigterm = True
        self._stop.request()

    def _on_requeue(self, number: int, frame: FrameType | None) -> None:
        """Slurm's signal before the time limit."""
        if os.getpid() == self._process:
            self._requeue = True
            self._stop.request()

    def _on_advance_end(self, fetcher: Any) -> None:
        """After each batch, when all hooks have decided; Lightning's own then acts on it."""
        self._agree()
        loop = self._trainer.fit_loop.epoch_loop
        type(loop).on_advance_end(loop, fetcher)

    def _on_epoch_end(self) -> None:
        type(self._trainer.fit_loop).on_advance_end(self._trainer.fit_loop)
        self._strategy.end_epoch()

    def _agree(self) -> None:
        trainer = self._trainer
        if self._over:
            return
        if self._stop.due:
            self._over = True
            any_of = self._strategy.reduce_boolean_decision
            sigterm, requeue = any_of(self._sigterm, all=False), any_of(self._requeue, all=False)
            if requeue:
                type(self._connector)._slurm_sigusr_handler_fn(self._connector, signal.SIGUSR1, None)
            if sigterm or requeue:
                self._connector.received_sigterm = True  # Lightning raises SIGTERMException after this batch
            else:
                trainer.should_stop = True
        elif trainer.should_stop or any(timer.time_remaining() <= 0 for timer in self._timers):
            trainer.should_stop = False
            self._stop.request()


def _count(progress: Any, number: int, kinds: Sequence[str] = ("ready", "started", "processed", "completed")) -> None:
    """So many more batches, epochs or steps count as made."""
    for part in (progress.current, progress.total):
        for kind in kinds:
            setattr(part, kind, getattr(part, kind) + number)


def _count_steps(loop: Any, number: int) -> None:
    """These steps of the optimizer count as made."""
    _count(loop.automatic_optimization.optim_progress.optimizer.step, number, ("ready", "completed"))
    loop._batches_that_stepped += number


GossipStrategy.register_strategies(StrategyRegistry)
