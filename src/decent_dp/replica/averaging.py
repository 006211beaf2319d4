"""The mean of the replicas, and the distance to it: of all of them, or of those that are finite where faults are tolerated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from decent_dp.compression import all_finite
from decent_dp.errors import NonFiniteError
from decent_dp.replica.averages import average_, control_of_part, squared_distance
from decent_dp.replica.consistency import among_the_same
from decent_dp.replica.shards import holds_first_copy, is_sharded, local

if TYPE_CHECKING:
    from decent_dp.replica.replica import Replica

__all__ = ["average_parts_", "check_finite", "mean_square_distance"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


@torch.no_grad()
def check_finite(
    replica: Replica,
    what: str,
    averaged: Sequence[Tensor] = (),
    params: Sequence[Tensor] | None = None,
    *,
    buffers: bool = True,
) -> bool:
    """Checks, before a mean over the replicas, that it will be finite. Called by all workers.

    Where faults are tolerated, the mean is that of the finite replicas.

    Args:
        what: the name of the user's call.
        averaged: the buffers that take part. Infinities are allowed in them (a best loss so far), and so is a NaN that
            all workers have.
        params: the tensors that take part in place of the parameters; None for the parameters.
        buffers: whether this worker uses the means of buffers.

    Returns:
        Whether this worker's replica is part of the mean.

    Raises:
        NonFiniteError: a replica holds a NaN or an infinity, or a buffer a NaN; on all workers. Where faults are tolerated:
            each one does.
    """
    params = replica.parameters.locate() if params is None else params
    chosen = set(map(id, averaged))
    named = [(name, local(buffer)) for name, buffer in replica.model.named_buffers() if id(buffer) in chosen]
    param = next((name for name, t in zip(replica.parameters.names, params, strict=False) if not all_finite(t.detach())), None)
    found = replica.world.control.gather([param, [name for name, t in named if bool(t.isnan().any())], buffers])
    everywhere = set.intersection(*(set(names) for _, names, _ in found))
    uses_buffers = any(used for _, _, used in found)
    problems: dict[int, str] = {}
    for rank, (name, names, _) in zip(replica.world.control.ranks, found, strict=True):
        culprit = next((name for name in names if name not in everywhere), None)
        if name is not None:
            problems[rank] = (
                f"{what} needs the mean of all replicas, and parameter '{name}' of worker {rank} holds a NaN or an "
                "infinity: a batch, a loss or a gradient was not finite there. Start the workers again from the last "
                "checkpoint."
            )
        elif culprit is not None and uses_buffers:
            problems[rank] = (
                f"{what} needs the mean of all replicas, and buffer '{culprit}' of worker {rank} holds a NaN: reset it "
                "there, as BatchNorm's reset_running_stats() does, or leave buffers out (averaged(buffers=False) of "
                "gossip(), sync_buffer_in_global_avg=False of the wrapper)."
            )
    number_of = {rank: replica.replicas.place_of(rank)[0] for rank in replica.world.control.ranks}
    bad = {number_of[rank] for rank in problems}
    if problems and (replica.monitor is None or bad == {*number_of.values()}):
        raise NonFiniteError(next(iter(problems.values())))
    if problems:
        _log.warning("%s is without the replicas of workers %s, which hold a NaN or an infinity", what, list(problems))
    return number_of[replica.world.rank] not in bad


@torch.no_grad()
def average_parts_(replica: Replica, parts: Sequence[Tensor], buffers: Sequence[Tensor], counts: bool) -> list[Tensor]:
    """Replaces ``parts`` of parameters and ``buffers`` by their means; returns the squared distances of the old parts.

    Parts and sharded buffers are averaged over replicas. Each worker has its own copy of any other buffer, so those are
    averaged over all workers.

    Args:
        counts: as ``check_finite`` returns it.
    """
    control = replica.world.control
    shards = [local(buffer) for buffer in buffers if is_sharded(buffer)]
    whole = [buffer for buffer in buffers if not is_sharded(buffer)]
    if replica.monitor is None:
        distances = average_(control_of_part(control, replica.replicas, replica.world.rank), [*parts, *shards])
        average_(control, whole)
        return distances[: len(parts)]

    def average_copies() -> tuple[list[Tensor], list[Tensor]]:
        copies = [tensor.clone() for tensor in (*parts, *shards, *whole)]
        part, split = control_of_part(control, replica.replicas, replica.world.rank), len(parts) + len(shards)
        distances = average_(part, copies[:split], counts)
        average_(control, copies[split:], counts)
        return copies, distances

    copies, distances = _among_whole_replicas(replica, average_copies)
    for tensor, copy in zip((*parts, *shards, *whole), copies, strict=True):
        tensor.copy_(copy)
    return distances[: len(parts)]


def _among_whole_replicas(replica: Replica, call: Callable[[], T]) -> T:
    """As ``among_the_same``, for means of parts (``control_of_part``): all parts are of the same replicas."""
    control = replica.world.control
    while True:
        ranks, result = control.ranks, among_the_same(control, call)
        if replica.replicas.shards > 1:
            control.gather(None)  # who was lost in the mean of another part?
            replica.mates.wait_for_whole_replicas()
        if control.ranks == ranks:
            return result


@torch.no_grad()
def mean_square_distance(replica: Replica) -> float:
    """The mean, over replicas, of the squared L2 distance of the parameters to their mean."""
    control = replica.world.control
    pairs = zip(replica.parameters.params, replica.parameters.locate(), strict=True)
    # Parts that a replica holds several times count once.
    parts = [part.detach() for param, part in pairs if holds_first_copy(param)]
    is_finite = None if replica.monitor is None else all(map(all_finite, parts))
    mates = replica.replicas.workers_of(replica.transport.rank)

    def gather() -> list[float | None]:
        counts = None
        if is_finite is not None:
            found = dict(zip(control.ranks, control.gather(is_finite), strict=True))
            counts = all(found.get(rank, False) for rank in mates)
            if not any(
                all(found[rank] for rank in replica.replicas.workers_of(number)) for number in replica.replicas.whole(found)
            ):
                return []
        square = squared_distance(control_of_part(control, replica.replicas, replica.world.rank), parts, counts)
        return control.gather(None if counts is False else square)

    squares = [square for square in _among_whole_replicas(replica, gather) if square is not None]
    return sum(squares) * replica.replicas.shards / len(squares) if squares else float("nan")
