"""A moving average of the replica, whose mean over workers is the moving average of the mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from decent_dp.checkpoint.saver import Trained, replica_of
from decent_dp.errors import OutOfStepError
from decent_dp.replica.consistency import check_consistency, worker_counts

__all__ = ["AveragedReplica"]


class AveragedReplica:
    """An exponential moving average of this worker's replica, for evaluation and ``export``.

    Each worker keeps its own, without communication. Means over updates and over workers are linear and commute: the mean over
    workers of these averages, which ``averaged`` computes, is the moving average of the mean model. The first ``update`` sets
    the average to the replica; each further one makes it ``decay * average + (1 - decay) * replica``, as
    ``torch.optim.swa_utils.get_ema_multi_avg_fn`` does. It is kept in float32 or a wider dtype.

    Args:
        model: the wrapper, or what ``decent_dp.gossip`` returned; its trainable parameters are averaged.
        decay: in [0, 1), the same on all workers. The average extends over about 1 / (1 - decay) updates.

    Attributes:
        decay: as given.
        updates: calls of ``update`` so far.

    Raises:
        ValueError: ``decay`` is outside [0, 1).
    """

    def __init__(self, model: Trained, decay: float = 0.999) -> None:
        self._replica = replica_of(model, "AveragedReplica")
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"decay must be in [0, 1), got {decay!r}")
        self.decay = float(decay)
        self.updates = 0
        self._averages = [
            value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
            for value in self._replica.parameters.locate()
        ]

    @torch.no_grad()
    def update(self) -> None:
        """Adds the replica as it is now to the average. Call it after each update, on all workers; with uneven inputs once
        after each ``join``, in which workers without data make no more updates.

        Raises:
            RuntimeError: inside ``averaged``, where the replica has other values.
        """
        self._replica.apply_pending()
        if self._replica.mean.backup is not None:
            raise RuntimeError("update() of AveragedReplica needs the replica's own values: call it outside averaged()")
        pairs = zip(self._replica.parameters.locate(), self._averages, strict=True)
        params = [value.detach().to(average.dtype) for value, average in pairs]
        if self.updates == 0:
            torch._foreach_copy_(self._averages, params)
        else:
            torch._foreach_lerp_(self._averages, params, 1.0 - self.decay)
        self.updates += 1

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the model's parameters are the moving average of the mean; afterwards each replica has its own values again.

        Called by all workers. Buffers are as inside ``model.averaged()``: BatchNorm's statistics are those of the replica,
        averaged over workers with ``sync_buffer_in_global_avg``; ``calibrate`` and ``export`` estimate them for the average.
        Afterwards all buffers are as before, and ``save`` inside saves the earlier values. The exchange in flight continues.
        Before the first ``update``, the average is the replica as it was when this object was made.

        Raises:
            OutOfStepError: the workers have made different numbers of updates, of the model or of the average.
            NonFiniteError: the average of a worker holds a NaN or an infinity; on all workers.
            DisagreementError: they were given different decays. On all workers.
        """
        replica = self._replica
        replica.begin_collective("averaged of AveragedReplica")
        self._compare()
        params = replica.parameters.params
        # Buffers too, because `calibrate` changes them.
        with replica.mean.preserved([*params, *replica.model.buffers()]):
            with torch.no_grad():
                means = [average.clone() for average in self._averages]
                replica.mean.average_("averaged of AveragedReplica", means)
                for value, mean in zip(replica.parameters.locate(), means, strict=True):
                    value.copy_(mean)
                replica.parameters.gather()
                del means
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns this worker's state. Save it on every worker: ``save(model, path, state={"ema": ema.state_dict()})``.

        Returns:
            'updates', and 'average', a dict of the tensors by parameter name. They are not copies.
        """
        return {"updates": self.updates, "average": dict(zip(self._replica.parameters.names, self._averages, strict=True))}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Loads the result of ``state_dict``; ``decay`` stays as it is.

        Raises:
            ValueError: it is of another model; names the first difference, and nothing is loaded.
        """
        if not {"updates", "average"} <= state_dict.keys():
            raise ValueError(f"the state of an AveragedReplica has 'updates' and 'average', got {sorted(state_dict)}")
        average: Mapping[str, Tensor] = state_dict["average"]
        own: dict[str, Tensor] = self.state_dict()["average"]
        for name in (*own, *average):
            if name not in average or name not in own:
                where = "the model" if name in own else "the state"
                raise ValueError(f"'{name}' is a trainable parameter of {where} only: it was saved from another model")
            if average[name].shape != own[name].shape:
                raise ValueError(
                    f"'{name}' is {tuple(average[name].shape)} in the state and {tuple(own[name].shape)} in the model: it was "
                    "saved from another model, or by nodes of another number of workers, which have other parts"
                )
        for name, tensor in own.items():
            tensor.copy_(average[name])
        self.updates = int(state_dict["updates"])

    def _compare(self) -> None:
        control, own = self._replica.world.control, {"the decay of AveragedReplica": self.decay}
        check_consistency(control, self._replica.world.rank, lambda: (None, {"settings": own}))
        if len(set(found := control.gather(self.updates))) > 1:
            counts = worker_counts(found, control.ranks)
            self._replica.monitor.refuse(
                OutOfStepError(
                    f"AveragedReplica has averaged different numbers of updates ({counts}): call its update() on every worker, "
                    "after the same updates of the model. With uneven inputs, where workers run out in join(), call it once "
                    "after each join() instead."
                )
            )
