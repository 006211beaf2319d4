"""Curves of a run for TensorBoard: ``pip install -e '.[tensorboard]'``."""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decent_dp._checks import check_bool, check_integer, install_hint, to_float
from decent_dp.checkpoint.saver import Trained, replica_of
from decent_dp.logging.publisher import publish
from decent_dp.replica.consistency import check_consistency
from decent_dp.replica.replica import Replica

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)


class Recorder:
    """Writes the curves of a run for TensorBoard: one call here, and one per step.

    ::

        board = decent_dp.logging.Recorder(replica, "runs/board")
        for x, y in batches:
            loss = ...
            loss.backward()
            optimizer.step()
            board.log(loss)

    Made by all workers. It writes a point whenever the number of rounds reaches a multiple of ``every``. The x axis is the
    number of rounds, so a resumed run continues its curves; the points after the checkpoint that it resumes are replaced.

    ================================ ============================================================================
    ``loss/mean``                    the mean of all losses since the last point, over all workers
    ``loss/local``                   the same of the worker that writes alone
    ``rate``                         the largest learning rate of its parameter groups
    ``distance``                     ``consensus_distance()`` now
    ``step/ms``                      wall time per round, with everything in the loop; mean over workers
    ``step/waited_ms``               the part of it in which training waited for messages; mean over workers
    ``sent/bytes_per_step``          per worker
    ``sent/Mbit_per_s``              per worker
    ``skipped/rejected_blocks``      since the last point, of all workers: see ``Stats.rejected``
    ``skipped/nonfinite_rounds``     likewise: see ``Stats.nonfinite``
    ================================ ============================================================================

    Worker 0 writes them, or the first one that lives; a point needs all workers for a moment, and ``distance`` an all-reduce of
    all parameters. Inside ``join``, where workers may have run out of data, only ``loss/local`` and ``rate`` are written; call
    ``flush`` after it. A process that joins a run makes its ``Recorder`` as the others did, with the same arguments.

    Each worker also publishes its status for ``decent-dp watch``, as by ``publish``.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned.
        folder: for the event files; made if it is missing.
        every: rounds per point.
        distance: whether to measure ``distance``.
        each_worker: also write each worker's own numbers, in ``folder/worker0``, ``folder/worker1``, …

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the folder cannot be made. (A point that cannot be written later is a warning in the log.)
        TypeError, ValueError: an argument is wrong, or differs between workers. All of these on all workers.
    """

    def __init__(
        self,
        model: Trained,
        folder: str | os.PathLike[str],
        *,
        every: int = 100,
        distance: bool = True,
        each_worker: bool = False,
    ) -> None:
        self._replica = replica = replica_of(model, "Recorder")
        rank = replica.world.rank
        # A process that joins makes it alone.
        control = replica.world.control if replica.life.before_first_round is None else None
        if control is not None:
            replica.begin_collective("Recorder")

        def check() -> tuple[Path, dict[str, Any]]:
            settings = {
                "every": check_integer("every", every, 1, "rounds"),
                "distance": check_bool("distance", distance),
                "each_worker": check_bool("each_worker", each_worker),
            }
            path = Path(folder)
            if rank == 0 or each_worker or replica.survivors is not None:
                _writer_class()
                path.mkdir(parents=True, exist_ok=True)
            return path, {"settings": settings}

        path = check()[0] if control is None else check_consistency(control, rank, check)
        self._every, self._distance = every, distance
        self._run = _Curves(path)
        self._own = _Curves(path / f"worker{rank}") if each_worker else None
        # The sum of the losses on each device, and of those that are numbers; and how many there are.
        self._sums: dict[torch.device | None, Any] = {}
        self._losses = 0
        self._round: int | None = None
        self._counted = self._count()
        # Since the last point of all workers. Inside join there are points of this worker alone.
        self._unshared: list[_Interval] = []
        publish(replica)

    @torch.no_grad()
    def log(self, loss: Tensor | float) -> None:
        """Adds the loss of a step; called by all workers equally often, after the step.

        A tensor is added up on its device, and read only for a point.

        Args:
            loss: a tensor of one element, or a number.

        Raises:
            ValueError, TypeError: it is something else.
            OutOfStepError: the workers have made different numbers of rounds, or different calls; on all of them.
            PeerTimeoutError: a worker has not called it.
        """
        replica = self._replica
        if self._round is None:
            # The time before the first step is of another kind, and so may be the rounds (of a checkpoint that was loaded).
            self._counted = self._count()
            self._round = replica.engine.round - 1
        self._add(loss)
        replica.catch_up()
        if replica.cadence.is_due(self._every, replica.engine.round, self) and replica.engine.round != self._round:
            if replica.life.joining:
                self._write_local()
            else:
                self._write_point("log of Recorder")
        self._round = replica.engine.round

    @torch.no_grad()
    def flush(self) -> None:
        """Writes a point now, with everything since the last one; for instance after ``join``. Called by all workers.

        Raises:
            OutOfStepError, PeerTimeoutError: as for ``log``.
        """
        self._write_point("flush of Recorder")

    def add(self, name: str, value: Tensor | float) -> None:
        """Adds a point of your own to a curve, such as the accuracy of the mean model. The worker that writes the curves writes
        it, the others nothing.

        Args:
            name: of the curve; what is before a slash is the name of its group.
            value: a tensor of one element, or a number.
        """
        if self._writes:
            self._run.write(self._replica.engine.round, {name: value.item() if isinstance(value, Tensor) else float(value)})

    @property
    def _writes(self) -> bool:
        """Whether this worker is the first of those that have taken part in the last call of all."""
        world = self._replica.world
        return world.rank == world.control.ranks[0]

    # -- the numbers --------------------------------------------------------------------------------------------------

    def _add(self, loss: Tensor | float) -> None:
        if isinstance(loss, Tensor):
            if loss.numel() != 1 or loss.is_complex():
                raise ValueError(
                    f"log takes the loss of a step, one real number, got {loss.dtype} of shape {tuple(loss.shape)}"
                )
            value: Any = loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))
        elif (value := to_float(loss)) is None:
            raise TypeError(f"log takes the loss of a step, a tensor or a number, got {loss!r}")
        device = loss.device if isinstance(loss, Tensor) else None
        # Not in place: log may be called in inference_mode, and the next time outside.
        self._sums[device] = self._sums.get(device, 0.0) + value
        self._losses += 1

    def _count(self) -> tuple[float, ...]:
        stats, made = self._replica.stats(), self._replica.cadence.made
        return made, time.perf_counter(), stats.bytes_sent, stats.waited_s, stats.rejected, stats.nonfinite

    def _take_window(self) -> _Interval:
        """What has come since the last call."""
        before, self._counted = self._counted, self._count()
        total = sum(map(float, self._sums.values()))
        window = _Interval(total, self._losses, *(b - a for a, b in zip(before, self._counted, strict=True)))
        # Begun anew, and not subtracted: a NaN would stay.
        self._sums, self._losses = {}, 0
        return window

    def _write_local(self) -> None:
        window = self._take_window()
        self._unshared.append(window)
        numbers = window.loss("loss/local") | _rate(self._replica)
        if self._writes:
            self._run.write(self._replica.engine.round, numbers)
        if self._own is not None:
            self._own.write(self._replica.engine.round, numbers | window.speeds() | window.skipped())

    def _write_point(self, what: str) -> None:
        replica = self._replica
        replica.begin_collective(what)
        self._write_local()
        window, self._unshared = _sum_of(self._unshared), []
        windows = [_Interval(*entry) for entry in replica.world.control.gather(astuple(window))]
        distance = {"distance": replica.consensus_distance()} if self._distance else {}
        if self._writes:
            # With uneven inputs a worker's first step may have been its last.
            speeds = [speed for found in windows if (speed := found.speeds())]
            means = {name: statistics.fmean(speed[name] for speed in speeds) for name in speeds[0]} if speeds else {}
            total = _sum_of(windows)
            self._run.write(replica.engine.round, total.loss("loss/mean") | distance | means | total.skipped())


@dataclass(frozen=True)
class _Interval:
    """What has come between two points."""

    losses_sum: float
    losses: float
    rounds: float
    seconds: float
    bytes_sent: float
    waited_s: float
    rejected: float
    nonfinite: float

    def loss(self, name: str) -> dict[str, float]:
        return {name: self.losses_sum / self.losses} if self.losses else {}

    def speeds(self) -> dict[str, float]:
        """Of a window of one worker; empty if it has no rounds, as before the second one."""
        if self.rounds <= 0:
            return {}
        return {
            "step/ms": 1e3 * self.seconds / self.rounds,
            "step/waited_ms": 1e3 * self.waited_s / self.rounds,
            "sent/bytes_per_step": self.bytes_sent / self.rounds,
            "sent/Mbit_per_s": 8e-6 * self.bytes_sent / self.seconds,
        }

    def skipped(self) -> dict[str, float]:
        return {"skipped/rejected_blocks": self.rejected, "skipped/nonfinite_rounds": self.nonfinite}


def _sum_of(windows: Sequence[_Interval]) -> _Interval:
    return _Interval(*map(sum, zip(*map(astuple, windows), strict=True)))


class _Curves:
    """An event file in a folder, which begins with the first point."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def write(self, round_: int, numbers: dict[str, float]) -> None:
        """A point that cannot be written is a warning: training goes on."""
        try:
            if self._writer is None:
                # Points of an earlier start from this round on are hidden: this one has resumed from an earlier checkpoint.
                self._writer = _writer_class()(str(self._folder), purge_step=round_)
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, round_)
            self._writer.flush()
        except OSError as error:
            _log.warning("the curves in %s cannot be written: %s", self._folder, error)


def _rate(replica: Replica) -> dict[str, float]:
    """A rate may be a tensor. The wrapper has no optimizers before its first update, and some optimizers have no rate."""
    groups = [group for optimizer in replica.optimizers for group in optimizer.param_groups]
    rates = [float(group["lr"]) for group in groups if "lr" in group]
    return {"rate": max(rates)} if rates else {}


def _writer_class() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(f"Recorder needs tensorboard; {install_hint('tensorboard')}") from error
    return SummaryWriter
