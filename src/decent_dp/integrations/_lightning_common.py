"""What Lightning's Trainer and Fabric share: arguments, collectives, and the replicas beside a checkpoint file."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from decent_dp import Gossip, gossip
from decent_dp._checks import install_hint
from decent_dp.checkpoint import load, save
from decent_dp.errors import CheckpointError
from decent_dp.integrations import OPTIONS
from decent_dp.integrations._survivors import SurvivorCollectives, save_again
from decent_dp.replica.consistency import call_on_all
from decent_dp.transport import Collectives

try:
    import lightning
    from lightning.pytorch.plugins.io import AsyncCheckpointIO
except ImportError as error:
    raise ImportError(f"this module needs Lightning; {install_hint('lightning')}") from error

if tuple(int(part) for part in lightning.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"this module needs Lightning 2.6 or newer, got {lightning.__version__}; {install_hint('lightning')}")

from lightning.fabric.utilities.rank_zero import rank_zero_only
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

__all__ = [
    "NOTE",
    "GossipArguments",
    "LightningOverSurvivors",
    "load_own",
    "load_replicas",
    "mean_state",
    "remove_replicas",
    "save_replicas",
]

_log = logging.getLogger(__name__)

T = TypeVar("T")

# The base of what comes before a DDPStrategy, which has no types.
Strategy: Any = object
# The entry of a checkpoint file that says which replicas belong to it, and the ending of the folder that has them.
NOTE = "decent_dp"
_ENDING = ".decent_dp"
# Arguments of Lightning's DDPStrategy that are about processes and files rather than about DDP.
_LIGHTNING = {
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "process_group_backend",
    "timeout",
    "start_method",
}
_ELSEWHERE = {
    "scaler": "the GradScaler of the precision plugin is used",
    "process_group": "all workers mix with each other",
    "transport": "workers are processes here",
}
_DDP = {*inspect.signature(DistributedDataParallel.__init__).parameters, "static_graph", "model_averaging_period"}


class GossipArguments(Strategy):  # type: ignore[misc]
    """The part of both strategies that takes the arguments of ``gossip``, and calls it. It comes before a DDPStrategy.

    Raises:
        TypeError: an argument is unknown, or is one of PyTorch's DDP.
    """

    # What the DDPStrategy calls its precision plugin.
    PRECISION: ClassVar[str]

    def __init__(self, **arguments: Any) -> None:
        self._options = {key: arguments.pop(key) for key in OPTIONS & arguments.keys()}
        for key in arguments.keys() - _LIGHTNING - {self.PRECISION}:
            why = "it is unknown"
            if key in _ELSEWHERE:
                why = _ELSEWHERE[key]
            elif key in _DDP or key.startswith("ddp_comm"):
                why = "it is an argument of PyTorch's DDP, which is not used: nothing wraps the model, and gradients stay local"
            raise TypeError(f"{type(self).__name__} has no argument '{key}': {why}. Leave it out.")
        super().__init__(**arguments)
        self.reset()

    def reset(self) -> None:
        """Sets what a strategy has before it begins."""
        raise NotImplementedError

    def setup_environment(self) -> None:
        """Raises ValueError, on all workers, for devices and plugins that cannot work."""
        name, device = type(self).__name__, self.root_device
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{name} trains on CPUs and CUDA GPUs, not on '{device.type}': choose accelerator='cpu' or 'gpu'.")
        if isinstance(self.checkpoint_io, AsyncCheckpointIO):
            raise ValueError(
                f"{name} writes the replicas and the checkpoint file together, and AsyncCheckpointIO would write the file "
                "later: leave it out."
            )
        super().setup_environment()

    def make_replica(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> Gossip:
        """Calls ``gossip``, with the precision plugin's scaler and the number of devices of a node."""
        if self.has_lost_workers:
            raise RuntimeError("workers have died in an earlier training, which a new one needs: start all workers again.")
        options = {**self._options, "scaler": getattr(getattr(self, self.PRECISION), "scaler", None)}
        if options.get("local_world_size") is None:
            options["local_world_size"] = self.num_processes
        return gossip(model, optimizers, **options)


class LightningOverSurvivors(Strategy):  # type: ignore[misc]
    """The part of both strategies that Lightning makes its collectives with. It comes before a DDPStrategy.

    Without ``faults`` they are those of the process group. With it they are those of the living workers while there is a
    replica in training. After that, if a worker is gone, each one is on its own.
    """

    # Of the replica that was last in training, if it tolerates deaths.
    _last_control: Collectives | None = None
    # The collectives of a replica, by which they are numbered.
    _of_replica: tuple[Gossip, SurvivorCollectives] | None = None

    def current_replica(self) -> Gossip | None:
        """The replica over whose connections the workers speak; None if none is in training."""
        raise NotImplementedError

    def survivors(self) -> SurvivorCollectives | None:
        """The workers of a collective; None for those of the process group."""
        replica = self.current_replica()
        if replica is not None:
            self._last_control = replica.survivors
        control = self._last_control
        if control is None or (replica is None and len(control.ranks) == self.world_size):
            return None
        if replica is None:
            return self._alone_among(control.ranks)
        if self._of_replica is None or self._of_replica[0] is not replica:
            self._of_replica = replica, SurvivorCollectives(self.global_rank, replica, regrouped=self._take_over)
        return self._of_replica[1]

    def _alone_among(self, ranks: Sequence[int]) -> SurvivorCollectives:
        """The collectives of this worker only; ``ranks``: of those that live."""
        return SurvivorCollectives(self.global_rank, None, ranks, regrouped=self._take_over)

    @property
    def has_lost_workers(self) -> bool:
        """Whether a worker is gone, so that the process group cannot be used any more."""
        survivors = self.survivors()
        return survivors is not None and len(survivors.ranks) < self.world_size

    @property
    def is_global_zero(self) -> bool:
        """Whether this worker writes files and logs: the first one that lives."""
        survivors = self.survivors()
        return bool(self.global_rank == (0 if survivors is None else survivors.ranks[0]))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """This worker's share of the data; among the living workers when a data loader is made anew."""
        survivors = self.survivors()
        if survivors is None:
            kwargs: dict[str, Any] = super().distributed_sampler_kwargs
            return kwargs
        rank, number = survivors.position
        return {"num_replicas": number, "rank": rank}

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        survivors = self.survivors()
        if survivors is None:
            super().barrier(*args, **kwargs)
        else:
            survivors.barrier()

    def broadcast(self, obj: T, src: int = 0) -> T:
        survivors = self.survivors()
        found: T = super().broadcast(obj, src) if survivors is None else survivors.broadcast(obj, src)
        return found

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        survivors = self._survivors_of(group)
        if survivors is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        survivors.reduce_(tensor, "sum" if reduce_op is None else reduce_op)
        return tensor

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._survivors_of(group) is None or not isinstance(tensor, Tensor):
            return super().all_reduce(tensor, group, reduce_op)
        return self.reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Shape (living workers, ...). Raises ValueError for ``sync_grads``, with faults."""
        survivors = self._survivors_of(group)
        if survivors is None:
            found: Tensor = super().all_gather(tensor, group, sync_grads)
            return found
        if sync_grads:
            raise ValueError(
                "all_gather(sync_grads=True) sends gradients to other workers, which faults= does not: leave it out"
            )
        return torch.stack(self._gather_tensors(tensor))

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        survivors = self.survivors()
        if survivors is None:
            return bool(super().reduce_boolean_decision(decision, all))
        decisions = survivors.gather(bool(decision))
        return False not in decisions if all else True in decisions

    def _gather_tensors(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """The tensors of all workers, for torchmetrics."""
        survivors = self._survivors_of(group)
        if survivors is None:
            found: list[Tensor] = gather_all_tensors(tensor, group)
            return found
        return [own.to(tensor.device) for (own,) in survivors.gather_tensors([tensor])]

    @contextlib.contextmanager
    def survivor_metrics(self, module: nn.Module) -> Iterator[None]:
        """Inside, the metrics of torchmetrics in ``module`` gather among the living workers."""

        def gather(tensor: Tensor, group: Any = None) -> list[Tensor]:
            return self._gather_tensors(tensor, group)

        changed = [part for part in module.modules() if isinstance(part, Metric) and part.dist_sync_fn is None]
        for metric in changed:
            metric.dist_sync_fn = gather  # not the method: a copy of the metric would copy this strategy
        try:
            yield
        finally:
            for metric in changed:
                metric.dist_sync_fn = None

    def _survivors_of(self, group: Any) -> SurvivorCollectives | None:
        """Of a collective of this group. A smaller one is the user's own, and a worker on its own makes none."""
        survivors = self.survivors()
        of_all = group is None or group is dist.group.WORLD
        return survivors if of_all or (survivors is not None and survivors.is_alone) else None

    def _take_over(self) -> None:
        """The first living worker logs, if worker 0 is gone."""
        if self.is_global_zero:
            rank_zero_only.rank = 0


# -- replicas beside a checkpoint file --------------------------------------------------------------------------------


def save_replicas(
    strategy: Any,
    path: str | os.PathLike[str],
    replicas: Mapping[str, Gossip],
    own: dict[str, Any],
    contents: dict[str, Any],
    storage_options: Any,
) -> None:
    """Saves replicas in a folder beside ``path``, and then the file itself. Called by all workers.

    The folder of each save has a new name, which is in the file: the file and the replicas of an earlier save of this name stay
    together until the new file is there.

    Args:
        path: worker 0's is used. Others may differ, because ModelCheckpoint puts each worker's own metrics into file names.
        replicas: of this run, by the names of their models in the file.
        own: what this worker alone gets back: the states of its schedulers, of its data loaders, ...
        contents: of the file, which worker 0 writes to its own ``path``, with a note of the replicas.

    Raises:
        ValueError: the path is not on a disk.
        CheckpointError: a worker could not write. All of these on all workers.
    """
    control = next(iter(replicas.values())).world.control
    ranks: tuple[int, ...] = ()
    while ranks != tuple(control.ranks):  # again without a worker that has died in it
        file, name = strategy.broadcast((os.fspath(path), uuid.uuid4().hex[:12]))
        if "://" in file:
            raise ValueError(
                f"the replicas are saved beside the checkpoint file, and '{file}' is not on a disk: save to a folder that all "
                "workers see, or the mean model alone (save_weights_only=True)."
            )
        folder, ranks = _beside(file) / name, tuple(control.ranks)
        own_file = _own_file(folder, ranks.index(strategy.global_rank))
        call_on_all(control, partial(_written, file, partial(strategy.checkpoint_io.save_checkpoint, own, own_file)))
        for number, replica in enumerate(replicas.values()):
            save_again(replica, partial(save, replica, folder / f"replica-{number}", keep=1))
        note = {NOTE: {"replicas": name, "models": list(replicas), "workers": len(ranks)}}
        write = partial(strategy.checkpoint_io.save_checkpoint, {**contents, **note}, path, storage_options=storage_options)
        call_on_all(control, partial(_written, file, write if strategy.is_global_zero else lambda: None))
    remove_replicas(strategy, file, keep=name)


def mean_state(replicas: Iterable[Gossip], read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """A copy of the state dict that ``read()`` returns where these replicas are their means. Called by all workers."""
    with contextlib.ExitStack() as scope:
        for replica in replicas:
            if replica.mean.backup is None:
                scope.enter_context(replica.averaged())
        return {key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in read().items()}


def remove_replicas(strategy: Any, path: str | os.PathLike[str], keep: str | None = None) -> None:
    """Removes the replicas that were saved beside ``path``, except those of the save ``keep``."""
    folder = _beside(path)
    if not (strategy.local_rank == 0 or strategy.is_global_zero) or not folder.is_dir():
        return
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            if entry.name != keep:
                shutil.rmtree(entry, ignore_errors=True)
        if keep is None:
            folder.rmdir()


def load_own(strategy: Any, path: str | os.PathLike[str], note: Mapping[str, Any], weights_only: bool | None) -> dict[str, Any]:
    """What this worker has saved for itself beside ``path``; {} if it was another number of workers, or is not there."""
    file = _own_file(_saved_beside(path) / note["replicas"], strategy.global_rank)
    if note["workers"] != strategy.world_size:
        return {}
    if not file.is_file():
        if file.parent.is_dir():  # else load_replicas says that all is missing
            _log.warning(
                "%s is missing: worker %d has the schedulers, callbacks and loops of worker 0 instead",
                file,
                strategy.global_rank,
            )
        return {}
    found: dict[str, Any] = strategy.checkpoint_io.load_checkpoint(file, weights_only=weights_only)
    return found


def load_replicas(strategy: Any, path: str | os.PathLike[str], note: Mapping[str, Any], replicas: Mapping[str, Gossip]) -> bool:
    """Resumes from the replicas beside ``path``; returns whether they are there. Called by all workers.

    A replica that was not saved, because the file has another name or only the mean for it, is left as it is.

    Raises:
        CheckpointError: some workers see them and others do not, or they do not fit this run; on all workers.
    """
    folder, saved, now = _saved_beside(path) / note["replicas"], note["workers"], strategy.world_size
    resize = None if saved == now else "spread"
    for number, name in enumerate(note["models"]):
        if name not in replicas:
            continue
        if load(replicas[name], folder / f"replica-{number}", resize=resize, missing_ok=True) is None:
            if strategy.is_global_zero:
                _log.warning(
                    "%s has the mean of the replicas, but %s is missing: all workers start from the mean, with the optimizer "
                    "state of worker 0. Copy the folder with the file to resume exactly.",
                    *(path, folder),
                )
            return False
    if resize is not None and strategy.is_global_zero:
        _log.warning("%s was saved by %d workers and this run has %d: the replicas were distributed", path, saved, now)
    return True


def _beside(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(os.fspath(path)) + _ENDING)


def _saved_beside(path: str | os.PathLike[str]) -> Path:
    """As ``_beside``, also through a link to the file, which ModelCheckpoint(save_last="link") makes."""
    return _beside(os.path.realpath(path))


def _own_file(folder: Path, rank: int) -> Path:
    return folder / f"lightning-{rank:05d}.ckpt"


def _written(path: object, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        raise CheckpointError(f"{path} could not be saved: {type(error).__name__}: {error}") from error
