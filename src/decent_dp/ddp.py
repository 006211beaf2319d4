"""The wrapper: a replica that trains on its own and mixes with its neighbours."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.handed import (
    FLOAT_DTYPES,
    LR_SCHEDULER_FN_TYPE,
    OPTIM_FN_TYPE,
    Policy,
    check_factories,
    check_model,
    check_scaler,
)
from decent_dp.replica import consensus
from decent_dp.replica.agree import agree, agree_on_signature, meet, model_signature
from decent_dp.replica.building import Builder
from decent_dp.replica.engine import Bucket, Engine
from decent_dp.replica.guard import Guard, insert_module
from decent_dp.replica.leaving import given_back_on_error, leave
from decent_dp.replica.schedule import Schedule, refuse_trained_elsewhere
from decent_dp.replica.settings import Settings, local_world_size, refuse_ddp_keywords
from decent_dp.replica.snapshot import Replica, put_back, take
from decent_dp.replica.states import check_optim_state, collect_optim_state, load_optim_state
from decent_dp.topo import Topology, make_topology
from decent_dp.transport import Transport, connect
from decent_dp.wire import check_wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["LR_SCHEDULER_FN_TYPE", "OPTIM_FN_TYPE", "DecentralizedDataParallel", "Stats"]

_log = logging.getLogger(__name__)

# Rounds of a period whose groups are connected at construction; a topology without a period connects as it goes.
_PREPARED_ROUNDS = 64


@dataclass(frozen=True)
class Stats:
    """What a replica has done so far.

    Attributes:
        updates: optimizer steps taken.
        rounds: rounds made, also before a restart (``load_optim_state_dict``); more than ``updates`` where a scaler skipped a
            step or ``join`` went on without one.
        bytes_sent: put on the wire by this worker for exchanges, without the headers of frames.
        grad_norm: of the last update, before clipping; None without ``grad_clip_norm``.
        exchanges: finished, of single buckets.
        waited_s: seconds that the training thread has waited for exchanges.
        rejected: blocks of parameters that were not mixed in a round, as replicas were further apart than a lossy wire
            could tell.
    """

    updates: int
    rounds: int
    bytes_sent: int
    grad_norm: float | None
    exchanges: int = 0
    waited_s: float = 0.0
    rejected: int = 0


class DecentralizedDataParallel(nn.Module):
    """Trains a replica of ``model`` on each worker and mixes parameters with the neighbours of a topology.

    Every backward is one update: gradients are applied by the optimizer of ``optim_fn`` to parameters that were mixed with
    what the neighbours sent an update ago, and the new parameters are sent while the next forward and backward run. After
    an update ``p.grad`` is None. Replicas differ after each step: evaluate their mean (``averaged``).

    Args:
        model: the replica, already on its device; it stays there. Parameters and buffers become those of rank 0.
        optim_fn: makes an optimizer from (name, parameter) pairs; called once a bucket, at the first update.
        lr_scheduler_fn: makes a scheduler for an optimizer; stepped once an optimizer step. None for none.
        topology: a registered name or a ``Topology``: who mixes with whom in each round. Also names in turn, as in
            'complete:500,base-2': the first for 500 updates, then the second.
        scaler: the ``torch.GradScaler`` that the caller scales the loss with; this wrapper unscales, steps and updates.
        grad_clip_norm: the norm over all of the replica's gradients is clipped to this, as
            ``torch.nn.utils.clip_grad_norm_`` does; 0.0 for no clipping.
        param_as_bucket_view: parameters are views of one flat block a bucket; otherwise they stay separate tensors, with
            the same numbers.
        sync_buffer_in_global_avg: floating-point buffers (BatchNorm statistics) take part in ``global_avg``.
        bucket_size_in_mb: upper size of a bucket, in MiB.
        _local_world_size: workers a node; None for the launcher's ``LOCAL_WORLD_SIZE``, else 1.
        overlap: exchange during the next forward and backward. False: step, exchange and mix before the backward returns.
        wire: what is sent of a parameter: 'float32' (lossless: its own dtype), 'bfloat16', or 'int8' (a byte, relative to
            the distance between replicas). A change of the mean over workers by rounding is ruled out on edges of two.
        mix_every: mix in every so many updates only, with steps of each replica on its own in between.
        process_group: whose workers mix; None for the default group. Ranks of a topology are ranks in it.
        transport: how bytes move, for workers that are no processes (``InProcessTransport``); None for torch.distributed.

    Raises:
        ValueError, TypeError: an argument is wrong, or the workers were given different models, settings or topologies.
            The same error on all workers.
        RuntimeError: there is no process group.
    """

    FLOAT_DTYPES = FLOAT_DTYPES

    def __init__(
        self,
        model: nn.Module,
        optim_fn: OPTIM_FN_TYPE,
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
        wire: str = "float32",
        mix_every: int = 1,
        process_group: ProcessGroup | None = None,
        transport: Transport | None = None,
        **unknown: Any,
    ) -> None:
        super().__init__()
        given, transport = transport, transport if transport is not None else connect(process_group)

        def check() -> tuple[tuple[Settings, Topology], dict[str, Any]]:
            refuse_ddp_keywords(unknown)
            if isinstance(model, DecentralizedDataParallel):
                raise TypeError("model is already wrapped in DecentralizedDataParallel: pass its .module")
            check_model(model)
            refuse_trained_elsewhere(model)
            check_factories(optim_fn, lr_scheduler_fn)
            buffers, scaled = bool(sync_buffer_in_global_avg), check_scaler(scaler) is not None
            check_wire(wire, [(name, p.dtype) for name, p in model.named_parameters() if p.requires_grad])
            settings = Settings(grad_clip_norm, bucket_size_in_mb, bool(overlap), buffers, scaled, wire, mix_every)
            made = make_topology(
                topology,
                local_world_size=local_world_size(_local_world_size),
                world_size=transport.world_size,
                rank=transport.rank,
            )
            shared = {
                "model": model_signature(model),
                "topology": made.fingerprint(),
                "settings": {**settings.signature(), "scheduled": lr_scheduler_fn is not None},
            }
            # Called on the class: what a subclass sets on itself may have any name.
            return (settings, Topology.every(made, mix_every)), shared

        with given_back_on_error(transport, given is None), torch.no_grad():
            settings, made_topology = agree_on_signature(transport.control, transport.rank, check)
            consensus.broadcast_(transport.control, [*model.parameters(), *model.buffers()])
            transport.prepare(made_topology._edges_ahead(_PREPARED_ROUNDS))
            transport.control.gather(None)  # a worker that leaves at once must not be gone before all have found it

        self.module = model
        self.training = model.training
        self._settings = settings
        self._topology = made_topology
        self._transport = transport
        self._backup: list[tuple[Tensor, Tensor]] | None = None  # what is not its own just now, and its own values
        self._averaging = False  # in `averaged`: the backup comes back by itself
        self._at_close: list[Callable[[], None]] = []  # what is to be finished while there are connections
        self._guard = Guard(model, before=self._settle, loaded=self._forget)
        self._builder = Builder(self._guard, transport, settings, optim_fn, lr_scheduler_fn, as_view=bool(param_as_bucket_view))
        self._optims, self._lr_schedulers = self._builder.optimizers, self._builder.schedulers
        self._engine = Engine(transport, made_topology)
        self._policy = Policy(self._guard.params, check_scaler(scaler), settings.grad_clip_norm)
        self._schedule = Schedule(
            self._guard.params,
            self._engine,
            self._policy,
            transport,
            build=self._build,
            began=self._drop_backup,
            overlap=settings.overlap,
        )
        parts = self._guard, self._engine, self._schedule, self._policy, self._builder
        self._replica = Replica(model, *parts, transport, made_topology, settings)
        self.register_load_state_dict_pre_hook(insert_module)  # type: ignore[no-untyped-call]
        # Also at exit, and in workers that multiprocessing has started, where atexit is not run.
        self._finalizer = Finalize(self, leave, args=(self._engine, transport), exitpriority=100)

    # -- the model ----------------------------------------------------------------------------------------------------

    # Only the model is for torch.compile; our bookkeeping before and after it is not. (torch.compiler.disable would load the
    # compiler at import; this form, which torch's optimizers use, loads it at the first call.)
    @_disable_dynamo(recursive=False)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward."""
        inner = self._before_forward()
        try:
            output = self.module(*args, **kwargs)
        except Exception as error:
            self._transport.report(f"{type(error).__name__} in its forward of round {self._engine.round}: {error}")
            raise
        if not inner and torch.is_grad_enabled() and not self._schedule.closed:
            self._after_forward(output)
        return output

    @_disable_dynamo
    def _before_forward(self) -> bool:
        """Does what is due and looks after the parameters; True inside a backward."""
        if torch._C._current_graph_task_id() != -1:
            # Recomputed by checkpointing around the wrapper: we are in the outer backward here, and can hear its end.
            self._schedule.enter_backward()
            return True
        if not self.module.training:
            self._settle()
        self._schedule.recover()
        if torch.is_grad_enabled() and (self.module.training or not self._schedule.closed):
            self._schedule.check()
            self._guard.check()
            for bucket in self._engine.buckets:
                bucket.block.adopt()
        return False

    @_disable_dynamo
    def _after_forward(self, output: Any) -> None:
        self._schedule.watch(output)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The model's."""
        self._settle()
        return self.module.parameters(recurse)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's, with the model's names."""
        self._settle()
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """The model's."""
        return self.module.buffers(recurse)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's, with the model's names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's, with its own keys; the values are copies."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """Loads into the model; keys may start with ``_model.`` or ``module.``.

        The exchange under way belongs to the old values: it is finished, and its difference is dropped.

        Raises:
            ValueError: with ``assign=True``.
        """
        self._settle()
        backup = self._backup
        try:
            return self.module.load_state_dict(state_dict, strict=strict, assign=assign)
        except Exception:
            self._backup = backup  # of what has failed half-way, the replica's own values are what is left
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears gradients; an owed update is made first. Needed nowhere: an update leaves none behind."""
        self._settle()
        self.module.zero_grad(set_to_none)
        self._schedule.discarded()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("the wrapper holds connections and cannot be copied: copy.deepcopy(model.module) copies the model.")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("the wrapper holds connections and cannot be pickled: save model.state_dict(), or model.module.")

    # -- updates ------------------------------------------------------------------------------------------------------

    def set_accumulate_grad(self, enable: bool = True) -> None:
        """Whether gradients are kept for a later backward. ``False`` leaves the window owed: see the documents."""
        self._schedule.set_accumulate(bool(enable))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate; the next one after it updates."""
        with self._schedule.pause():
            yield

    def update(self) -> None:
        """Applies the gradients that are there now, also those set by hand, as one update and one round.

        Called by all workers. A worker without gradients takes part in the round and does not move its parameters.
        """
        self._schedule.update()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For uneven inputs: a worker that has run out goes on mixing, without steps, until all have.

        Put the loop over the batches in it, on every worker. A worker may have no batch at all.
        """
        schedule = self._schedule
        if schedule.joining:
            raise RuntimeError("join() was entered inside join(): one is enough, around the loop.")
        self._settle()
        schedule.joining = True
        try:
            yield
            self._settle()
            while schedule.anybody_active():
                schedule.mix_only()
        except Exception as error:
            self._transport.report(f"{type(error).__name__} in round {self._engine.round}: {error}")
            raise
        finally:
            schedule.joining = False

    def set_adaptive_factor(self, factor: float) -> None:
        """How far a mix goes, from 0 (none) to 1 (full); the same on all workers.

        Raises:
            ValueError: outside [0, 1].
        """
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"the adaptive factor must be in [0, 1], got {factor!r}")
        self._engine.factor = float(factor)

    def close(self) -> None:
        """Finishes what is on the wire and gives connections back; parameters stay as they are.

        May be called again. The model is on its own after it: its backwards only leave gradients.
        """
        if self._schedule.closed:
            return
        try:
            for finish in self._at_close:
                finish()
            self._settle()
            self._engine.wait_all()
        except Exception as error:
            if not self._schedule.failed:
                raise
            # It has been raised once, by the update that failed; do not hide that one in the caller's `finally`.
            _log.warning("closed after a failed update: %s", error)
        finally:
            self._schedule.close()
            self._guard.close()
            self._transport.close()

    # -- the mean -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def global_avg(self, will_revert: bool = True, return_d2c: bool = False) -> float | None:
        """Every replica becomes the mean of all.

        Args:
            will_revert: keep a copy of this replica for ``revert_global_avg``.
            return_d2c: return this replica's L2 distance to the mean, as it was before.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
        """
        self._meet("global_avg")
        distances = self._average(will_revert)
        return float(sum(float(d) for d in distances) ** 0.5) if return_d2c else None

    @torch.no_grad()
    def revert_global_avg(self) -> None:
        """Undoes ``global_avg``: parameters and buffers.

        Raises:
            RuntimeError: there is no backup, because none was asked for or an update or a load came in between.
        """
        if self._backup is None:
            raise RuntimeError(
                "there is nothing to revert: call global_avg() (with will_revert=True) first. An update or a load after it "
                "drops the backup."
            )
        for tensor, saved in self._backup:
            tensor.copy_(saved)
        self._backup = None

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, every replica is the mean of all; each has its own values back after it."""
        nested = self._backup is not None
        self._meet("averaged")
        self._average(will_revert=True)
        outer, self._averaging = self._averaging, self._averaging or not nested
        try:
            yield
        finally:
            self._averaging = outer
            if self._backup is not None and not nested:
                self.revert_global_avg()

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root mean square over workers of the replicas' L2 distance to their mean. Called by all workers.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
        """
        self._meet("consensus_distance")
        own = consensus.squared_distance(self._transport.control, [param.detach() for param in self._guard.params])
        squares = self._transport.control.gather(own)
        return float((sum(squares) / len(squares)) ** 0.5)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """One a bucket; empty before the first update."""
        return self._optims

    @property
    def lr_schedulers(self) -> list[LRScheduler]:
        """One a bucket; empty before the first update and without ``lr_scheduler_fn``."""
        return [scheduler for scheduler in self._lr_schedulers if scheduler is not None]

    def get_lr(self) -> float:
        """The current learning rate of the first bucket's first group; 0.0 before the first update."""
        if not self._optims:
            return 0.0
        return float(self._optims[0].param_groups[0]["lr"])

    def optim_state_dict(self) -> dict[str, Any]:
        """The optimizers' state by parameter name, with schedulers, scaler and the round that comes next.

        It fits whatever buckets it is loaded into.

        Raises:
            ValueError: an optimizer keeps what belongs to no parameter; names it.
        """
        self._settle()
        return collect_optim_state(self._engine.buckets, self._policy.scaler, self._engine.round, self._builder.pending)

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``optim_state_dict`` returned; before the first update it is kept and applied when there are buckets.

        Before the first update it also sets the round that comes next, so that a topology goes on where it was: all workers
        must load theirs, or the first update raises ``OutOfStepError``.

        Raises:
            ValueError: it was saved from other parameters; names the first.
        """
        self._settle()
        check_optim_state(state_dict, self._guard.names)
        scaler = self._policy.scaler
        if scaler is not None and state_dict.get("scaler"):
            scaler.load_state_dict(state_dict["scaler"])  # at once: the caller scales the next loss with it
        if self._engine.buckets:
            load_optim_state(self._engine.buckets, state_dict)
        else:
            self._builder.pending = state_dict
            self._engine.round = state_dict.get("round", self._engine.round)

    # -- all of it ----------------------------------------------------------------------------------------------------

    def _snapshot(self) -> dict[str, Any]:
        """Everything that this worker needs to go on as if nothing had happened: see ``decent_dp.replica.snapshot``.

        Asks no other worker, and waits for no exchange. An owed update is made first. Inside ``averaged`` the replica's own
        values are taken, as they are after it. The tensors are live: copy them before the next update.

        Raises:
            RuntimeError: inside a backward; after an update that failed; between ``global_avg`` and ``revert_global_avg``;
                after ``close``.
            ValueError: an optimizer keeps what belongs to no parameter; names it.
        """
        if self._schedule.closed:
            raise RuntimeError("the wrapper was closed: save before close(), or keep model.module.state_dict().")
        self._schedule.settle_for("save")
        own: dict[int, Tensor] = {}
        if self._backup is not None:
            if not self._averaging:
                raise RuntimeError(
                    "save was called between global_avg() and revert_global_avg(), while the replica is not its own: call it "
                    "after revert_global_avg(), or average for good with global_avg(will_revert=False), or save inside "
                    "`with model.averaged():`, where the replica's own values are saved."
                )
            own = {id(tensor): saved for tensor, saved in self._backup}
        return take(self._replica, own)

    def _restore(self, snapshot: dict[str, Any]) -> None:
        """Goes on from what ``_snapshot`` returned, here or in another run. Called by all workers.

        ``optim_fn`` is called again: optimizers and schedulers are made anew, whatever the bucket size. The snapshot is not
        changed and not kept.

        Raises:
            ValueError, TypeError, RuntimeError: it does not fit this model, optimizer or scaler, or a worker is inside a
                backward; the same error on all workers, and nothing is changed.
            OutOfStepError: the workers' snapshots are of different rounds; likewise.
            RuntimeError: inside ``join``, or after ``close``.
        """
        schedule = self._schedule
        # Who has run out waits for another word of ours than those with which workers agree.
        if schedule.joining:
            raise RuntimeError("load was called inside join(), where some workers have run out: call it before the with-block.")
        if schedule.closed:
            schedule.check()

        # First what is due here, as others may be waiting for its exchange; inside a backward nothing is.
        schedule.settle()

        def refuse() -> None:
            schedule.refuse_inside("load")
            schedule.check()

        agree(self._transport.control, refuse)
        put_back(self._replica, snapshot)
        self._backup = None

    def stats(self) -> Stats:
        """Counters of this worker, cheap enough to read at every step."""
        norm = self._policy.last_norm
        engine = self._engine
        return Stats(
            engine.steps,
            engine.round,
            engine.bytes_sent,
            None if norm is None else float(norm),
            engine.exchanges,
            engine.waited,
            engine.rejected,
        )

    def extra_repr(self) -> str:
        return f"rank={self._transport.rank}, topology={self._topology!r}, overlap={self._settings.overlap}"

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _model(self) -> nn.Module:
        return self.module

    def _settle(self) -> None:
        self._schedule.settle()

    def _forget(self, params: Sequence[nn.Parameter]) -> None:
        """The values of ``params`` are about to be replaced from outside."""
        self._backup = None
        self._engine.disown(params)

    def _drop_backup(self) -> None:
        """A round begins: if the replicas still are the mean, they stay it."""
        if self._backup is not None:
            self._forget(self._guard.params)

    def _float_buffers(self) -> list[Tensor]:
        if not self._settings.sync_buffer_in_global_avg:
            return []
        return [buffer for buffer in self.module.buffers() if buffer.dtype in self.FLOAT_DTYPES]

    @torch.no_grad()
    def _average(self, will_revert: bool) -> list[Tensor]:
        """Each parameter's squared distance to the mean that it is now."""
        params = [param.detach() for param in self._guard.params]
        tensors = params + self._float_buffers()
        if not will_revert:
            self._forget(self._guard.params)
        elif self._backup is None:
            self._backup = [(tensor, tensor.detach().clone()) for tensor in (*self._guard.params, *self._float_buffers())]
        return consensus.average_(self._transport.control, tensors)[: len(params)]

    def _meet(self, what: str) -> None:
        """Before a collective of the user's: all must be there, and at the same update."""
        if self._schedule.joining:
            raise RuntimeError(
                f"{what} was called inside join(), where some workers have run out: call it after the with-block."
            )
        self._schedule.refuse_inside(what)
        self._settle()
        self._schedule.check()
        meet(self._transport.control, self._engine.round, what)

    def _build(self, order: Sequence[int]) -> list[Bucket]:
        return self._builder.build(order, self._engine.round)
