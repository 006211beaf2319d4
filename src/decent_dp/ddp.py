"""``DecentralizedDataParallel``: the wrapper with updates inside the backward."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.profiler import record_function

from decent_dp.arguments import (
    FLOAT_DTYPES,
    LR_SCHEDULER_FN_TYPE,
    OPTIM_FN_TYPE,
    check_factories,
    check_model,
    check_scaler,
    refuse_graphs,
)
from decent_dp.backward.driver import BackwardReplica
from decent_dp.backward.state_dicts import insert_module
from decent_dp.backward.units import DeferredList
from decent_dp.faults import Tolerate, check_faults
from decent_dp.replica.construction import Agreement, Arguments, Settings, workers_per_node
from decent_dp.replica.live import start_replica
from decent_dp.replica.replica import Calls, Stats
from decent_dp.rules import Rule
from decent_dp.rules.rule import check_rule
from decent_dp.topo import Topology
from decent_dp.topo import TopologyReg as TopologyReg  # existing scripts import it from here
from decent_dp.transport import Transport, check_encrypt, check_transport, open_transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LR_SCHEDULER_FN_TYPE", "OPTIM_FN_TYPE", "DecentralizedDataParallel", "Stats"]

_log = logging.getLogger(__name__)

# Arguments of PyTorch DDP, with the advice for the error.
_DDP_KEYWORDS = {
    "device_ids": "leave it out and move the model to its device before wrapping it; it stays there",
    "output_device": "leave it out: outputs stay on the model's device",
    "dim": "leave it out: each worker feeds its own batch",
    "broadcast_buffers": "leave it out: buffers are local; sync_buffer_in_global_avg=True averages them in global_avg",
    "init_sync": "leave it out: parameters and buffers are broadcast from rank 0 once, at construction",
    "bucket_cap_mb": "pass bucket_size_in_mb",
    "find_unused_parameters": "leave it out: parameters may be unused at any time",
    "check_reduction": "leave it out",
    "gradient_as_bucket_view": "pass param_as_bucket_view: here parameters are views of buckets",
    "static_graph": "leave it out: graphs may change at any time",
    "delay_all_reduce_named_params": "leave it out: gradients are not reduced",
    "param_to_hook_all_reduce": "leave it out: gradients are not reduced",
    "mixed_precision": "leave it out and use torch.autocast and scaler=",
    "device_mesh": "pass process_group",
}


@functools.cache
def _warn_once_of_complete() -> None:
    _log.warning(
        "topology='complete' exchanges with all workers in every update, and sends as many bytes as PyTorch DDP. On slow "
        "links pass topology='base-2' or another topology of pairs."
    )


class DecentralizedDataParallel(Calls, nn.Module):
    """Trains a replica of ``model`` on each worker and mixes parameters with the neighbours of a topology.

    Every backward is one update. It mixes in the parameters that the neighbours sent one update ago, applies the gradients
    with the optimizers of ``optim_fn``, and sends the new parameters while the next forward and backward run. After an update
    ``p.grad`` is None. Replicas differ after each step: evaluate their mean (``averaged``).

    Args:
        model: the replica, already on its device, where it stays. Parameters and buffers are copied from rank 0.
        optim_fn: makes an optimizer from (name, parameter) pairs; called once per bucket, at the first update.
        lr_scheduler_fn: makes a scheduler for an optimizer; stepped once per optimizer step. None for no schedule.
        topology: a registered name or a ``Topology``, which defines the groups that mix in each round. Names can follow each
            other: 'complete:500,base-2' uses the first for 500 updates and then the second.
        scaler: the ``torch.GradScaler`` with which the caller scales the loss; the wrapper unscales, steps and updates.
        grad_clip_norm: clips the norm of all gradients of the replica, as ``torch.nn.utils.clip_grad_norm_`` does; 0.0 for
            no clipping.
        param_as_bucket_view: whether parameters are views of one flat buffer per bucket. The numbers are the same.
        sync_buffer_in_global_avg: whether floating-point buffers (BatchNorm statistics) take part in ``global_avg``.
        bucket_size_in_mb: upper size of a bucket, in MiB; 0 for one bucket per parameter.
        _local_world_size: workers per node; None for the launcher's ``LOCAL_WORLD_SIZE``, else 1.
        overlap: exchange during the next forward and backward. With False, the backward returns after step, exchange and mix.
        compression: None sends each dtype as it is; 'bfloat16'; 'int8' sends a byte per value, relative to the distance between
            replicas; for topologies of pairs '4bit', '2bit' and '1bit', relative to what a partner knows, and 'low-rank:R' or
            'low-rank:R,int8', projections of rank R. On edges of two workers, none moves the mean over workers.
        mix_every: mix each parameter in every ``mix_every``-th update only, in turns.
        rule: how received parameters are applied, from ``decent_dp.rules``; None for plain gossip.
        faults: ``Tolerate(...)``: when a worker dies, freezes or cannot be reached, its partners leave it out, and nobody else
            waits; for topologies of pairs. None: it is an error that names the worker, on those that need it.
        encrypt: whether traffic between workers is; the same on all. None: between nodes, and not inside one.
        process_group: the workers that mix; None for the default group. A topology's ranks are ranks in it.
        transport: ``InProcessTransport()`` for workers that are threads, or what ``join()`` returned.

    Raises:
        ValueError, TypeError: an argument is wrong, or models, settings or topologies differ between workers. All workers
            raise the same error.
        RuntimeError: there is no process group.
    """

    FLOAT_DTYPES = FLOAT_DTYPES

    def __init__(
        self,
        model: nn.Module,
        optim_fn: OPTIM_FN_TYPE = None,  # type: ignore[assignment]  # checked below, so that all workers raise the same error
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None = None,
        topology: str | Topology = "complete",
        scaler: torch.amp.GradScaler | None = None,
        grad_clip_norm: float = 0.0,
        param_as_bucket_view: bool = True,
        sync_buffer_in_global_avg: bool = False,
        bucket_size_in_mb: float = 25,
        _local_world_size: int | None = None,
        *,
        overlap: bool = True,
        compression: str | None = None,
        mix_every: int = 1,
        rule: Rule | None = None,
        faults: Tolerate | None = None,
        encrypt: bool | None = None,
        process_group: ProcessGroup | None = None,
        transport: Transport | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        owned, opened = open_transport(transport, process_group, faults, encrypt)

        def check() -> Arguments:
            _refuse_ddp_keywords(unknown)
            check_transport(transport)
            if isinstance(model, DecentralizedDataParallel):
                raise TypeError("model is already wrapped in DecentralizedDataParallel: pass its .module")
            check_model(model)
            if param_as_bucket_view:
                refuse_graphs(model)
            check_factories(optim_fn, lr_scheduler_fn)
            scaled = check_scaler(scaler) is not None
            settings = Settings(
                bucket_size_in_mb=bucket_size_in_mb,
                overlap=overlap,
                scaled=scaled,
                compression=compression,
                mix_every=mix_every,
                grad_clip_norm=grad_clip_norm,
                sync_buffer_in_global_avg=bool(sync_buffer_in_global_avg),
            )
            local = workers_per_node("_local_world_size", _local_world_size)
            more = {"scheduled": lr_scheduler_fn is not None, "encrypt": check_encrypt(encrypt)}
            return Arguments(settings, topology, check_rule(rule), local, more, faults=check_faults(faults))

        def make(agreed: Agreement) -> BackwardReplica:
            if topology == "complete" and opened.world_size > 2 and opened.rank == 0:
                _warn_once_of_complete()
            as_view = bool(param_as_bucket_view)
            return BackwardReplica(model, opened, agreed, optim_fn, lr_scheduler_fn, scaler, as_view=as_view)

        #: The driver, for the other parts of this library.
        self.replica: BackwardReplica = start_replica(model, opened, owned, check, make)
        self.module = model
        self.training = model.training
        # Existing scripts read these two.
        self._optims, self._lr_schedulers = self.replica.optimizers, self.replica.schedulers
        self.register_load_state_dict_pre_hook(insert_module)  # type: ignore[no-untyped-call]

    # -- the model ----------------------------------------------------------------------------------------------------

    # torch.compile must trace the model alone. (torch.compiler.disable would load the compiler at import; this form, which
    # torch's optimizers use, loads it at the first call.)
    @_disable_dynamo(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        inner = self.replica.before_forward()
        try:
            with record_function("DecentralizedDataParallel.forward"):
                output = self.module(*args, **kwargs)
        except Exception as error:
            replica = self.replica
            replica.world.report(f"{type(error).__name__} in its forward of round {replica.engine.round}: {error}")
            raise
        if not inner and torch.is_grad_enabled() and not self.replica.life.closed:
            self.replica.backwards.after_forward(output)
        return output

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, with the model's names."""
        self.replica.apply_pending()
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's, with the model's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state dict, with its own keys; the values are copies."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads into the model; keys may start with ``_model.`` or ``module.``.

        The exchange in flight belongs to the old values: it is finished, and its difference is dropped.

        Raises:
            ValueError: with ``assign=True``.
        """
        self.replica.apply_pending()
        mean = self.replica.mean
        backup = mean.backup
        try:
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        except Exception:
            mean.backup = backup  # a load that fails half-way must not lose the replica's own values
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients, after a pending update. It is never needed, because an update leaves no gradients."""
        self.replica.apply_pending()
        self.module.zero_grad(set_to_none)
        self.replica.backwards.discarded()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("the wrapper holds connections and cannot be copied: copy.deepcopy(model.module) copies the model.")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("the wrapper holds connections and cannot be pickled: save model.state_dict(), or model.module.")

    # -- updates ------------------------------------------------------------------------------------------------------

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Sets whether gradients are kept for a later backward. After ``False`` the update of the window is pending.

        For existing scripts; ``no_sync`` is the simpler form.
        """
        self.replica.set_accumulate(bool(enable))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager in which backwards accumulate gradients; the next backward after it updates."""
        self.replica.apply_pending()
        with self.replica.backwards.pause():
            yield

    def update(self) -> None:
        """Applies the present gradients, also those set by hand, as one update and one round.

        Called by all workers. A worker without gradients takes part in the round and does not move its parameters.
        """
        self.replica.update()

    def set_adaptive_factor(self, factor: float) -> None:
        """Sets how far a mix goes, from 0 (none) to 1 (full); must be the same on all workers.

        Raises:
            ValueError: outside [0, 1].
        """
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"the adaptive factor must be in [0, 1], got {factor!r}")
        self.replica.engine.factor = float(factor)

    # -- the mean -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Replaces every replica by the mean of all. For existing scripts; ``averaged`` is the simpler form.

        Args:
            will_revert: whether to keep a copy of this replica for ``revert_global_avg``.
            return_d2c: whether to return this replica's previous L2 distance to the mean.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
            NonFiniteError: a replica holds a NaN or an infinity; on all of them.
        """
        replica, mean = self.replica, self.replica.mean
        if will_revert:
            replica.begin_collective("global_avg")
            distances = mean.average_("global_avg", keep=[*replica.parameters.params, *mean.buffers])
        else:
            distances = replica.become_mean("global_avg")
        return float(sum(float(d) for d in distances) ** 0.5) if return_d2c else None

    def revert_global_avg(self) -> None:
        """Undoes ``global_avg``: parameters and buffers. Without a backup it does nothing and logs a warning.

        There is no backup where none was requested, after its use, and after an update or a load.
        """
        mean = self.replica.mean
        if mean.backup is None:
            _log.warning(
                "revert_global_avg() did nothing, because there is no backup: call it once after each global_avg() (with "
                "will_revert=True), before the next update or load, which drops the backup."
            )
        else:
            mean.revert()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:  # type: ignore[override]  # with or without buffers is an argument of the wrapper
        """Context manager in which every replica is the mean of all, for evaluation. Called by all workers."""
        with super().averaged():
            yield

    # -- optimizers ---------------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """One per bucket; empty before the first update."""
        return self._optims

    @property
    def lr_schedulers(self) -> list[LRScheduler]:
        """One per bucket; empty before the first update and without ``lr_scheduler_fn``."""
        made = [scheduler for scheduler in self._lr_schedulers if scheduler is not None]
        return DeferredList(self._lr_schedulers.why if not self._optims else "There is none: pass lr_scheduler_fn.", made)

    def get_lr(self) -> float:
        """The current learning rate of the first bucket's first group; 0.0 before the first update."""
        if not self._optims:
            return 0.0
        return float(self._optims[0].param_groups[0]["lr"])

    def optim_state_dict(self) -> dict[str, Any]:
        """Returns the optimizers' state by parameter name, with schedulers, scaler and the next round; it fits any buckets.

        Raises:
            ValueError: an optimizer has state that belongs to no parameter; names it.
        """
        return self.replica.optim_state_dict()

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of ``optim_state_dict``; before the first update it is kept until then.

        Before the first update it also sets the next round, so that a topology resumes at the same place. All workers must
        load theirs, or the first update raises ``OutOfStepError``.

        Raises:
            ValueError: it was saved from other parameters; names the first.
        """
        self.replica.load_optim_state_dict(state_dict)

    def extra_repr(self) -> str:
        replica = self.replica
        return f"rank={replica.mates.number}, topology={replica.engine.topology!r}, overlap={replica.agreed.settings.overlap}"

    @property
    def _model(self) -> nn.Module:
        return self.module


def _refuse_ddp_keywords(unknown: Mapping[str, Any]) -> None:
    """Raises TypeError for unknown keyword arguments, with advice for those of PyTorch DDP."""
    for name in unknown:
        advice = _DDP_KEYWORDS.get(name)
        if advice is not None:
            raise TypeError(f"{name} is an argument of PyTorch DDP, not of DecentralizedDataParallel: {advice}.")
        if name == "wire":
            raise TypeError("wire is now called compression: pass compression=None (was 'float32'), 'bfloat16' or 'int8'.")
        raise TypeError(f"DecentralizedDataParallel got an unexpected keyword argument {name!r}")
