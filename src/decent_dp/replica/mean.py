"""The mean of the replicas, and each replica's own values while its tensors are the mean."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from decent_dp.arguments import FLOAT_DTYPES
from decent_dp.compression import all_finite
from decent_dp.errors import NonFiniteError
from decent_dp.replica.averages import average_, control_of_part, squared_distance
from decent_dp.replica.consistency import among_the_same
from decent_dp.replica.construction import Agreement
from decent_dp.replica.mates import Mates
from decent_dp.replica.parameters import Parameters
from decent_dp.replica.shards import holds_first_copy, is_sharded, local
from decent_dp.transport import Collectives, Transport

__all__ = ["Mean"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Mean:
    """Makes a replica the mean of all, and keeps its own values meanwhile. For a DTensor, this is the local part.

    Where faults are tolerated, the mean is that of the finite replicas.

    Args:
        world: connects all workers.

    Attributes:
        backup: pairs (tensor, own value) while tensors have other values; None otherwise.
        scoped: whether the end of a with-block restores the backup.
        weights: of this replica, and of this worker in the mean of buffers that each has its own copy of; None: all equal.
    """

    def __init__(self, model: nn.Module, parameters: Parameters, world: Transport, agreed: Agreement, mates: Mates) -> None:
        self._model, self._parameters = model, parameters
        self._world, self._members, self._replicas, self._mates = world, agreed.monitor, agreed.replicas, mates
        self._needs_all = not agreed.monitor.tolerates_faults
        self._with_buffers = agreed.settings.sync_buffer_in_global_avg
        self.backup: list[tuple[Tensor, Tensor]] | None = None
        self.scoped = False
        self.weights = agreed.weights

    @property
    def buffers(self) -> list[Tensor]:
        """The floating-point ones (such as BatchNorm statistics), if they are averaged."""
        return [buffer for buffer in self._model.buffers() if self._with_buffers and buffer.dtype in FLOAT_DTYPES]

    # -- of all replicas ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def average_(
        self,
        what: str,
        params: Sequence[Tensor] | None = None,
        buffers: Sequence[Tensor] | None = None,
        *,
        uses_buffers: bool = True,
        keep: Iterable[Tensor] = (),
    ) -> list[Tensor]:
        """Replaces parameters and buffers by their means; returns the squared distances of the old parameters to theirs.

        Called by all workers. Parts and sharded buffers are averaged over replicas. Each worker has its own copy of any other
        buffer, so those are averaged over all workers.

        Args:
            what: the name of the user's call.
            params, buffers: the tensors that take part in place of the parameters and of ``buffers``. Infinities are allowed
                in buffers (a best loss so far), and so is a NaN that all workers have.
            uses_buffers: whether this worker uses the means of buffers.
            keep: what is backed up, unless there is a backup already.

        Raises:
            NonFiniteError: a replica holds a NaN or an infinity, or a buffer a NaN; on all workers, and nothing is changed.
                Where faults are tolerated: each one does.
        """
        buffers = self.buffers if buffers is None else buffers
        params = self._parameters.locate() if params is None else params
        counts = self._check_finite(what, params, buffers, uses_buffers)
        if self.backup is None and (kept := self._copies(keep)):
            self.backup = kept
        parts = [*params, *(local(buffer) for buffer in buffers if is_sharded(buffer))]
        tensors = [*parts, *(buffer for buffer in buffers if not is_sharded(buffer))]

        def average() -> tuple[list[Tensor], list[Tensor]]:
            # Who dies half-way may leave some of them changed. Without faults nobody goes on then.
            means = tensors if self._needs_all else [tensor.clone() for tensor in tensors]
            of_replica, of_worker = self._weights_if(None if self._needs_all else counts)
            distances = average_(self._control_of_part(), means[: len(parts)], of_replica)
            average_(self._world.control, means[len(parts) :], of_worker)
            return means, distances[: len(params)]

        means, distances = average() if self._needs_all else self._among_whole_replicas(average)
        for tensor, value in zip(tensors, means, strict=True):
            if value is not tensor:
                tensor.copy_(value)
        self._parameters.gather()
        return distances

    def _check_finite(self, what: str, params: Sequence[Tensor], buffers: Sequence[Tensor], uses_buffers: bool) -> bool:
        """Returns whether this worker's replica is part of the mean."""
        control = self._world.control
        chosen = set(map(id, buffers))
        named = [(name, local(buffer)) for name, buffer in self._model.named_buffers() if id(buffer) in chosen]
        names = zip(self._parameters.names, params, strict=False)
        param = next((name for name, t in names if not all_finite(t.detach())), None)
        found = control.gather([param, [name for name, t in named if bool(t.isnan().any())], uses_buffers])
        everywhere = set.intersection(*(set(names) for _, names, _ in found))
        are_used = any(used for _, _, used in found)
        problems: dict[int, str] = {}
        for rank, (name, names, _) in zip(control.ranks, found, strict=True):
            culprit = next((name for name in names if name not in everywhere), None)
            if name is not None:
                problems[rank] = (
                    f"{what} needs the mean of all replicas, and parameter '{name}' of worker {rank} holds a NaN or an "
                    "infinity: a batch, a loss or a gradient was not finite there. Start the workers again from the last "
                    "checkpoint."
                )
            elif culprit is not None and are_used:
                problems[rank] = (
                    f"{what} needs the mean of all replicas, and buffer '{culprit}' of worker {rank} holds a NaN: reset it "
                    "there, as BatchNorm's reset_running_stats() does, or leave buffers out (averaged(buffers=False) of "
                    "gossip(), sync_buffer_in_global_avg=False of the wrapper)."
                )
        number_of = {rank: self._replicas.place_of(rank)[0] for rank in control.ranks}
        bad = {number_of[rank] for rank in problems}
        if problems:
            error = NonFiniteError(next(iter(problems.values())))
            if bad == {*number_of.values()}:
                raise error
            self._members.refuse(error)
            _log.warning("%s is without the replicas of workers %s, which hold a NaN or an infinity", what, list(problems))
        return number_of[self._world.rank] not in bad

    @torch.no_grad()
    def mean_square_distance(self) -> float:
        """The mean, over replicas and by their weights, of the squared L2 distance of the parameters to their mean."""
        control, replicas = self._world.control, self._replicas
        pairs = zip(self._parameters.params, self._parameters.locate(), strict=True)
        # Parts that a replica holds several times count once.
        parts = [part.detach() for param, part in pairs if holds_first_copy(param)]
        is_finite = None if self._needs_all else all(map(all_finite, parts))
        mates = replicas.workers_of(replicas.place_of(self._world.rank)[0])

        def gather() -> list[list[float] | None]:
            counts = None
            if is_finite is not None:
                found = dict(zip(control.ranks, control.gather(is_finite), strict=True))
                counts = all(found.get(rank, False) for rank in mates)
                if not any(all(found[rank] for rank in replicas.workers_of(number)) for number in replicas.whole(found)):
                    return []
            weight, _ = self._weights_if(counts)
            square = squared_distance(self._control_of_part(), parts, weight)
            return control.gather(None if counts is False else [1.0 if weight is None else weight, square])

        found = [pair for pair in self._among_whole_replicas(gather) if pair is not None]
        total = sum(weight * square for weight, square in found)
        return total * replicas.shards / sum(weight for weight, _ in found) if found else float("nan")

    def _weights_if(self, counts: bool | None) -> tuple[float | None, float | None]:
        """The weights of this replica and this worker for ``average_``, if the replica counts."""
        return (counts, counts) if counts is False or self.weights is None else self.weights

    def _control_of_part(self) -> Collectives:
        return control_of_part(self._world.control, self._replicas, self._world.rank)

    def _among_whole_replicas(self, call: Callable[[], T]) -> T:
        """As ``among_the_same``, for means of parts (``control_of_part``): all parts are of the same replicas."""
        control = self._world.control
        while True:
            ranks, result = control.ranks, among_the_same(control, call)
            if self._replicas.shards > 1:
                control.gather(None)  # who was lost in the mean of another part?
                self._mates.wait_for_whole_replicas()
            if control.ranks == ranks:
                return result

    # -- the replica's own values -------------------------------------------------------------------------------------

    @torch.no_grad()
    def revert(self) -> None:
        """Restores the replica's own values."""
        self._parameters.locate()
        for tensor, value in self.backup or ():
            local(tensor).copy_(value)
        self.backup = None

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Removes ``tensors`` from the backup: they have got new values."""
        released = {id(tensor) for tensor in tensors}
        self.backup = [pair for pair in self.backup or () if id(pair[0]) not in released]

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the tensors have the replica's own values, which may be changed; afterwards they are the mean again."""

        @torch.no_grad()
        def swap() -> None:
            self._parameters.locate()
            for tensor, value in self.backup or ():
                present = local(tensor).clone()
                local(tensor).copy_(value)
                value.copy_(present)

        swap()
        try:
            yield
        finally:
            swap()

    @contextlib.contextmanager
    def preserved(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Restores the present values of ``tensors`` at the end of the with-block.

        Released tensors are not restored, and none is if the backup was reverted or dropped by an update inside.
        """
        outer, outer_scoped = self.backup, self.scoped
        before = self._copies(tensors)
        covered = {id(tensor) for tensor, _ in outer or ()}
        self.backup = [*(outer or ()), *(pair for pair in before if id(pair[0]) not in covered)]
        self.scoped = outer_scoped or outer is None
        try:
            yield
        finally:
            self.scoped = outer_scoped
            if self.backup is not None:
                kept = {id(tensor) for tensor, _ in self.backup}
                self.backup = None if outer is None else [pair for pair in outer if id(pair[0]) in kept]
                self._parameters.locate()
                with torch.no_grad():
                    for tensor, value in before:
                        if id(tensor) in kept:
                            local(tensor).copy_(value)

    def _copies(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        self._parameters.locate()
        return [(tensor, local(tensor).detach().clone()) for tensor in tensors]
