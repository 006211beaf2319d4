"""The collectives of transformers and accelerate, among the workers that live, for ``attach(trainer, faults=...)``."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer

from decent_dp import Gossip
from decent_dp.integrations._survivors import LeftOut, SurvivorCollectives

__all__ = ["TrainerOverSurvivors"]


class TrainerOverSurvivors:
    """Makes a Trainer and its accelerator use the collectives of the living workers in place of the process group.

    Both are told that they are not distributed, so that they make no collectives of their own, and which position and number
    of workers they have. What they would have gathered is gathered here.

    A worker that was out for a while continues in the round of the others. Its Trainer counts the rounds that it has left out
    as steps, without their batches and without the logs, evaluations and saves that the others have made meanwhile.

    Args:
        trainer: whose methods, and those of its accelerator, are replaced until ``leave``.
        replica: in training, in its first round.
    """

    def __init__(self, trainer: Trainer, replica: Gossip) -> None:
        self._trainer, self._replica = trainer, replica
        self._survivors = SurvivorCollectives(replica.world.rank, replica, regrouped=self._regroup)
        self._lost = LeftOut(replica)
        # Of the rounds left out those since the last log, and those whose batches are still to be left out.
        self._unlogged = self._to_skip = 0
        # Whether batches of this epoch were left out, and the step before it.
        self._skips, self._epoch_began = False, trainer.state.global_step
        self._states: list[Any] = [PartialState(), AcceleratorState()]
        first = self._states[0]
        self._before = first.distributed_type, first.process_index, first.num_processes
        self._replaced: list[tuple[Any, str]] = []
        self._seen: tuple[int, ...] = ()
        self._set(DistributedType.NO, *self._survivors.position)
        accelerator = trainer.accelerator
        self._replace(accelerator, "gather", self._gather)
        self._replace(
            accelerator, "gather_for_metrics", functools.partial(self._gather_for_metrics, accelerator.gather_for_metrics)
        )
        self._replace(accelerator, "pad_across_processes", self._pad)
        self._replace(accelerator, "reduce", self._reduce)
        self._replace(accelerator, "wait_for_everyone", self.barrier)
        self._replace(trainer, "get_batch_samples", functools.partial(self._batches, trainer.get_batch_samples))
        self._replace(trainer, "store_flos", functools.partial(self._store_flos, trainer.store_flos))
        self._replace(trainer, "_maybe_log_save_evaluate", functools.partial(self._log, trainer._maybe_log_save_evaluate))
        self._objects = {"use_gather_object": trainer.args.eval_use_gather_object}
        trainer.gather_function = functools.partial(accelerator.gather_for_metrics, **self._objects)

    def count_steps(self) -> None:
        """After a step: the rounds that this worker has left out are steps, too."""
        trainer = self._trainer
        self._replica.catch_up()
        lost = self._lost.take()
        trainer.state.global_step += lost
        self._unlogged += lost
        self._to_skip += lost
        # The Trainer steps these two after an evaluation.
        if not isinstance(trainer.lr_scheduler, ReduceLROnPlateau) and type(trainer.lr_scheduler).__name__ != "GreedyLR":
            for _ in range(lost):
                trainer.lr_scheduler.step()

    def leaves_out_epoch(self) -> bool:
        """After an epoch: whether this worker has left out all of it, where the Trainer takes the data for empty."""
        leaves_out = self._skips and self._trainer.state.global_step == self._epoch_began
        self._skips, self._epoch_began = False, self._trainer.state.global_step
        return leaves_out

    @property
    def first(self) -> int:
        """The rank of the worker that has the duties of the main process."""
        return self._survivors.ranks[0]

    def barrier(self) -> None:
        """Waits for the living workers, and takes note of who they are."""
        self._survivors.barrier()

    def leave(self, rank: int) -> bool:
        """After the training: everything is as before, unless a worker is gone. Then each one is on its own.

        Returns:
            Whether all workers are there.
        """
        self._regroup()
        if len(self._survivors.ranks) < self._before[2]:
            self._survivors = SurvivorCollectives(rank, None, self._survivors.ranks)
            self._set(DistributedType.NO, self._states[0].process_index, 1)
            return False
        for holder, name in self._replaced:
            delattr(holder, name)
        self._set(*self._before)
        self._trainer.gather_function = functools.partial(self._trainer.accelerator.gather_for_metrics, **self._objects)
        return True

    def _replace(self, holder: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(holder, name, method)
        self._replaced.append((holder, name))

    def _set(self, kind: Any, index: int, number: int) -> None:
        for state in self._states:
            state.distributed_type, state.process_index, state.num_processes = kind, index, number

    def _regroup(self) -> None:
        """The position among the living workers; the first one takes the duties of the main process over."""
        if self._survivors.ranks == self._seen:
            return
        self._seen = self._survivors.ranks
        self._set(DistributedType.NO, *self._survivors.position)
        state = self._trainer.state
        state.is_world_process_zero = self._trainer.is_world_process_zero()
        state.is_local_process_zero |= state.is_world_process_zero

    # -- methods of the accelerator -----------------------------------------------------------------------------------

    def _gather(self, tensor: Any) -> Any:
        found = self._survivors.gather_tensors([part[None] if part.ndim == 0 else part for part in _tensors_in(tensor)])
        device = self._trainer.accelerator.device
        whole = (torch.cat(parts).to(device) for parts in zip(*found, strict=True))
        return recursively_apply(lambda _: next(whole), tensor)

    def _gather_for_metrics(self, gather: Callable[..., Any], input_data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object or not _has_only_tensors(input_data):
            input_data = [entry for own in self._survivors.gather_objects(input_data) for entry in own]
        return gather(input_data, use_gather_object)

    def _pad(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        sizes = [part.shape[dim] if -part.ndim <= dim < part.ndim else -1 for part in _tensors_in(tensor)]
        longest = map(max, zip(*self._survivors.gather(sizes, "pad"), strict=True))

        def pad(part: Tensor) -> Tensor:
            size = next(longest)
            if size < 0:
                return part
            lacks = size - part.shape[dim]
            widths = [0] * (2 * part.ndim)
            widths[2 * (part.ndim - 1 - dim % part.ndim) + (not pad_first)] = lacks
            return nn.functional.pad(part, widths, value=pad_index)

        return recursively_apply(pad, tensor, error_on_other_type=True)

    def _reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def reduce(part: Tensor) -> Tensor:
            reduced = part if reduction == "none" else self._survivors.reduce_(part.detach().clone(), reduction)
            return reduced * scale

        return recursively_apply(reduce, tensor, error_on_other_type=True)

    # -- methods of the Trainer ---------------------------------------------------------------------------------------

    def _batches(
        self, get: Callable[..., tuple[list[Any], Any]], epoch_iterator: Any, num_batches: int, *args: Any, **kwargs: Any
    ) -> tuple[list[Any], Any]:
        """Leaves out the batches of the steps that this worker has not made."""
        batches, items = get(epoch_iterator, num_batches, *args, **kwargs)
        # The Trainer counts batches to know the last one of an epoch, whose step may have fewer of them.
        miscounts = self._skips and num_batches < self._trainer.args.gradient_accumulation_steps
        if self._to_skip <= 0 and not miscounts:
            return batches, items
        self._to_skip, self._skips = self._to_skip - 1, True
        return [], items

    def _store_flos(self, store_flos: Callable[[], None]) -> None:
        self._trainer.current_flos = sum(self._survivors.gather(self._trainer.current_flos, "store_flos"))
        store_flos()

    def _log(self, log: Callable[..., None], tr_loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Before a log the loss becomes the mean over workers; the Trainer's own gather of it does nothing here."""
        trainer, control = self._trainer, self._trainer.control
        if self._lost.is_behind:
            control.should_log = control.should_evaluate = control.should_save = False
        steps = trainer.state.global_step - trainer._globalstep_last_logged
        if control.should_log and steps > 0:
            # The Trainer divides by the steps, which include those that this worker has not made.
            own = float(tr_loss) / max(1, steps - self._unlogged)
            tr_loss.fill_(steps * statistics.fmean(self._survivors.gather(own, "log")))
            self._unlogged = 0
        if control.should_log or control.should_evaluate or control.should_save:
            self.barrier()  # the shares of the data, and the worker that writes, are those of the present workers
        log(tr_loss, *args, **kwargs)


def _tensors_in(data: Any) -> list[Tensor]:
    """Those of nested lists, tuples and dicts. Raises TypeError if there is something else."""
    found: list[Tensor] = []

    def find(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    recursively_apply(find, data, error_on_other_type=True)
    return found


def _has_only_tensors(data: Any) -> bool:
    try:
        _tensors_in(data)
    except TypeError:
        return False
    return True
