"""Whether a mean over the replicas would be finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decent_dp.compression import all_finite
from decent_dp.errors import NonFiniteError
from decent_dp.replica.shards import local

if TYPE_CHECKING:
    from decent_dp.replica.replica import Replica

__all__ = ["refuse_nonfinite"]


@torch.no_grad()
def refuse_nonfinite(
    replica: Replica,
    what: str,
    averaged: Sequence[Tensor] = (),
    params: Sequence[Tensor] | None = None,
    *,
    buffers: bool = True,
) -> None:
    """Checks, before a mean over the replicas, that it will be finite. Called by all workers.

    Args:
        what: the name of the user's call.
        averaged: the buffers that take part. Infinities are allowed in them (a best loss so far), and so is a NaN that
            all workers have.
        params: the tensors that take part in place of the parameters; None for the parameters.
        buffers: whether this worker uses the means of buffers.

    Raises:
        NonFiniteError: a replica holds a NaN or an infinity, or a buffer a NaN; on all workers.
    """
    params = replica.parameters.locate() if params is None else params
    chosen = set(map(id, averaged))
    named = [(name, local(buffer)) for name, buffer in replica.model.named_buffers() if id(buffer) in chosen]
    param = next((name for name, t in zip(replica.parameters.names, params, strict=False) if not all_finite(t.detach())), None)
    found = replica.everyone.control.gather([param, [name for name, t in named if bool(t.isnan().any())], buffers])
    everywhere = set.intersection(*(set(names) for _, names, _ in found))
    for rank, (name, names, _) in zip(replica.everyone.control.ranks, found, strict=True):
        if name is not None:
            raise NonFiniteError(
                f"{what} needs the mean of all replicas, and parameter '{name}' of worker {rank} holds a NaN or an "
                "infinity: a batch, a loss or a gradient was not finite there. Start the workers again from the last "
                "checkpoint."
            )
        culprit = next((name for name in names if name not in everywhere), None)
        if culprit is not None and any(used for _, _, used in found):
            raise NonFiniteError(
                f"{what} needs the mean of all replicas, and buffer '{culprit}' of worker {rank} holds a NaN: reset it "
                "there, as BatchNorm's reset_running_stats() does, or leave buffers out (averaged(buffers=False) of "
                "gossip(), sync_buffer_in_global_avg=False of the wrapper)."
            )
