"""The base class of both drivers: one worker's replica of a model in a run.

A driver turns events (gradients, an optimizer's step) into rounds of the engine. This class begins and ends rounds, notifies
listeners, refuses calls at the wrong time, and holds the state that is saved.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_dp._checks import check_integer
from decent_dp._sizes import MIB
from decent_dp.arguments import FLOAT_DTYPES
from decent_dp.compression import check_compression
from decent_dp.engine import Bucket, Edit, Engine
from decent_dp.faults import Roster
from decent_dp.replica.cadence import Cadence
from decent_dp.replica.consistency import check_same_call, gather_by_rank
from decent_dp.replica.construction import Agreement
from decent_dp.replica.mates import Mates
from decent_dp.replica.mean import Mean
from decent_dp.replica.module_hooks import HookedModel
from decent_dp.replica.momenta import Momenta, tell_replicas
from decent_dp.replica.parameters import Parameters
from decent_dp.replica.shards import fsdp_modules
from decent_dp.replica.shares import describe_replica
from decent_dp.replica.shutdown import passing_error, shut_down
from decent_dp.replica.stats import Stats
from decent_dp.replica.uneven import finish_together
from decent_dp.topo import schedule
from decent_dp.transport import Control, NewcomerTransport, Transport

__all__ = ["Listener", "Replica", "Stats"]

_log = logging.getLogger(__name__)


class Listener:
    """Base class of the entries of ``Replica.listeners``."""

    def round_ended(self) -> None:
        """Called between two rounds. An exception in it leaves the replica unchanged."""

    def reached_boundary(self) -> None:
        """Called between two rounds, outside any backward."""

    def measured(self, distance: float) -> None:
        """Called with each result of ``consensus_distance``."""

    def closing(self) -> None:
        """Called when the replica closes, while its connections still exist."""


class Replica(HookedModel):
    """A model, its engine, and rounds.

    Args:
        model: its trainable parameters are exchanged.
        transport: of all workers.
        agreed: settings, topology and rule.

    Attributes:
        world: connects all workers; used for collectives, checkpoints and reports.
        peers: connects the workers that hold the same part of each replica; its ranks are numbers of replicas. It is
            ``world`` if each worker holds a whole replica.
        replicas: the workers of each replica.
        parameters: the trainable parameters, with their names.
        momenta: those of the optimizers that are tracked, which are mixed in buckets of their own.
        mean: the backup while the replica holds the mean.
        listeners: notified of every round.
        optimizers: the ones that train this replica.
        edits: by bucket number, what its optimizer does with the sum that is mixed in.
        cadence: in which rounds calls of all workers are due.
        scaler: the GradScaler of its loss, or None.
        steps: optimizer steps taken.
        joining: whether it is inside ``join``. ``joins``: how often all workers have left it.
        closed: whether rounds are over.
        superseded: whether it was closed because a newer replica took the model over.
        monitor: who takes part. ``mates``: those that hold parts of this replica.
    """

    # The name of the driver in snapshots, and in messages.
    KIND: ClassVar[str]
    WHAT: ClassVar[str]
    # This driver's entries of a snapshot (``decent_dp.replica.snapshot``).
    ENTRIES: ClassVar[frozenset[str]]
    # The expression for the model itself, for messages.
    MODEL: ClassVar[str]
    # The end of the warning about an optimizer that is not its own and steps its parameters.
    FOREIGN_STEP: ClassVar[str]

    def __init__(self, model: nn.Module, transport: Transport, agreed: Agreement) -> None:
        self.world, self.peers, self.replicas = transport, agreed.peers, agreed.replicas
        self.settings, self.shares, self.topology = agreed.settings, agreed.shares, agreed.topology
        self.parameters = Parameters(model, self.shares)
        compression = check_compression(agreed.settings.compression)
        self.engine = Engine(self.peers, self.topology, agreed.rule, compression, self.peers.table)
        self.monitor = agreed.monitor
        # Of a process that joins a run: makes it a member.
        self.before_first_round: Callable[[], None] | None = None
        self.monitor.callbacks.append(lambda _, new: self.tell_optimizers(new.members))
        self.mates = Mates(transport, self.monitor)
        self.mates.explain(fsdp_modules(model))
        if not isinstance(transport, NewcomerTransport):  # else they are connected later
            self.mates.start(0)
        self.mean = Mean(model, self.parameters, transport, self.monitor, self.mates)
        self.mean.weights = agreed.weights
        self.momenta = Momenta([], {}, agreed.rule)
        self.listeners, self.cadence, self.optimizers = list[Listener](), Cadence(), list[Optimizer]()
        self.edits: Mapping[int, Edit | None] = {}
        self.scaler: torch.amp.GradScaler | None = None
        self.steps, self._nonfinite_in = 0, -1
        self.joining = self._has_run_out = self.closed = self.superseded = False
        self._handled, self.joins = id(sys.exc_info()[1]), 0
        self._on_cuda = any(param.is_cuda for param in self.parameters.params)
        self._fault: BaseException | None = None
        super().__init__(model)
        where = f"{self.KIND}: worker {transport.rank} of {transport.world_size}, topology {self.topology!r}"
        params = self.parameters.params
        size = f"{sum(param.numel() for param in params)} trainable parameters in {len(params)} tensors"
        _log.debug("%s, compression %s, %s", where, self.settings.compression, size)
        if transport.rank == 0:
            _log.info("%d workers, %d replicas; %s", transport.world_size, len(self.replicas.workers), self.describe_replica())
        # Runs at exit too, also in processes of multiprocessing, where atexit handlers do not run.
        args = (self.engine, transport, self.monitor.epochs, threading.current_thread())
        self._finalizer = Finalize(self, shut_down, args=args, exitpriority=100)

    # -- implemented by drivers ---------------------------------------------------------------------------------------

    @abstractmethod
    def mix_only(self) -> None:
        """Makes one round without an optimizer step."""

    @abstractmethod
    def saved_entries(self) -> dict[str, Any]:
        """Returns the values of ``ENTRIES``."""

    @abstractmethod
    def check_entries(self, snapshot: Mapping[str, Any]) -> None:
        """Raises ValueError if a snapshot does not fit this driver; changes nothing."""

    @abstractmethod
    def prepare_load(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> list[Bucket]:
        """Returns new buckets for a snapshot, and loads everything that the user's objects may refuse; ``undo`` reverts it."""

    @abstractmethod
    def load_optimizers(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        """Loads the state of the optimizers into those that are there; ``undo`` reverts it."""

    @abstractmethod
    def install(self, snapshot: Mapping[str, Any], buckets: list[Bucket]) -> None:
        """Replaces the buckets, and loads all entries that are not tensors of the model."""

    # -- rounds -------------------------------------------------------------------------------------------------------

    def apply_pending(self) -> None:
        """Makes a pending update, if drivers leave any, before the replica is observed."""
        self.refuse_superseded()

    def begin_round(self) -> None:
        """Called before any bucket is used."""
        if self.mean.backup is not None:  # this round makes the mean the replica's own values
            self.invalidate()
        self.rebind()
        self.engine.renew()
        if self.before_first_round is not None:
            self.before_first_round()
            self.before_first_round = None
        if self.engine.started is None and self.monitor.tolerates_faults and self.replicas.shards == 1:  # a mesh needs it
            self.world.leave_process_group()
        self.mates.refuse_lost()
        self.monitor.look(before := self.engine.round)
        self.catch_up()
        if self.engine.round > before:  # an epoch may have begun in the rounds that were left out
            self.monitor.look(self.engine.round)
        self.world.announce(self.engine.round)

    def use_buckets(self, buckets: list[Bucket]) -> None:
        """Replaces all buckets, after the optimizers."""
        self.engine.install(buckets)
        self.monitor.restart()
        if _log.isEnabledFor(logging.DEBUG):
            sizes = [f"{bucket.buffer.plan.numel * bucket.buffer.plan.dtype.itemsize / MIB:.3g}" for bucket in buckets]
            _log.debug("worker %d: %d buckets, MiB: %s", self.world.rank, len(buckets), ", ".join(sizes))

    def tell_optimizers(self, members: Sequence[int]) -> None:
        """Tells optimizers which replicas take part."""
        tell_replicas(self.optimizers, len(members), schedule.share_of(self.topology, self.peers.rank, members))
        self.engine.mark_stale(self.momenta.forget())  # what is in flight is of the members before

    def rebind(self) -> None:
        """Updates the buckets to the parameters' present storage."""
        self.parameters.locate()
        if loaded := self.momenta.follow_loads():  # the difference in flight belongs to the old ones
            self.engine.mark_stale(loaded)
        for bucket in self.engine.buckets:
            bucket.buffer.rebind()

    def describe_replica(self) -> str:
        """Describes the unit that mixes, for ``repr`` and the log."""
        own = self.replicas.workers_of(self.replicas.place_of(self.world.rank)[0])
        return describe_replica(own, self.shares, self.world.carrier(on_gpus=self._on_cuda))

    @property
    def averages_gradients(self) -> bool:
        return self.shares is not None and self.shares.group.averages

    @property
    def nonfinite_in(self) -> int:
        """The last round in which this replica was not finite, the same on all of its workers; -1 if it never was."""
        return self.engine.nonfinite_in if self.replicas.shards == 1 else self._nonfinite_in

    @property
    def has_own_gradients(self) -> bool:
        """Whether gradients are not averaged yet over the workers of a node."""
        return False

    def share(self) -> None:
        """The workers of a node gather what each has mixed."""
        if self.shares is not None and self.engine.finished:
            for kind, rules in (("parameter", True), ("momentum", False)):
                buckets = [bucket for bucket in self.engine.finished if (bucket.rule is self.engine.rule) is rules]
                self.shares.gather(kind, (slot.index for bucket in buckets for slot in bucket.buffer.plan.slots))
        self.engine.finished.clear()

    def end_round(self, *, stepped: bool) -> None:
        """Called after all buckets were started."""
        self.engine.wait_for_read()
        self.engine.finished.clear()
        if _log.isEnabledFor(logging.DEBUG):
            what, ranks = "with" if stepped else "without", self.topology.get_edge(self.engine.round).ranks
            _log.debug("worker %d: round %d %s a step, edge %s", self.world.rank, self.engine.round, what, ranks)
        self.cadence.add(self.engine.round)
        self.momenta.fade(self.engine.round, self.engine.round + 1)
        self.engine.advance()
        self.steps += stepped

    def notify_listeners(self) -> None:
        """Notifies the listeners of the end of a round; called outside ``faults``."""
        self.world.report("")  # an earlier error did not end the run
        for listener in list(self.listeners):
            listener.round_ended()

    def catch_up(self) -> None:
        """Goes on in the round of the others, if they have gone on without this replica. Called between two rounds."""
        before, target = self.engine.round, self.engine.round_of_others()
        alone = self._has_run_out and self.shares is None  # at the end of `join` sharded ones make no steps together
        target, self._nonfinite_in = self.mates.agree_on(target, self.engine.nonfinite_in, alone=alone)
        self.momenta.fade(before, target)  # also in rounds that are left out
        self.engine.go_to(target)
        if self.engine.round > before:
            self.cadence.fall_behind(self.engine.round)

    def due(self, every: int) -> bool:
        """Whether it is time for a call of all workers: once in ``every`` rounds, in the same rounds on all workers.

        Ask after a step, on every worker. The answer stays the same until the next round. With ``faults`` it holds for a worker
        that was out for a while or has joined, too: calls that the others have made without it are not due.

        Raises:
            ValueError, TypeError: ``every`` is no whole number, or less than 1.
        """
        check_integer("every", every, 1, "rounds")
        self.apply_pending()
        if self.before_first_round is not None:
            return False
        self.catch_up()
        return self.cadence.is_due(every, self.engine.round)

    def reached_boundary(self) -> None:
        """Notifies the listeners, between two rounds and outside any backward. A worker that is cut off waits here."""
        self._tell_boundary()
        self._wait_while_cut_off(at_once=False)

    def _tell_boundary(self) -> None:
        for listener in list(self.listeners):
            listener.reached_boundary()

    def _wait_while_cut_off(self, *, at_once: bool) -> None:
        while not self.closed and self.monitor.has_to_wait(self.engine.round, at_once=at_once):
            self._tell_boundary()

    def invalidate(self, params: Iterable[Tensor] | None = None) -> None:
        """Drops the state of ``params`` (None: of all), whose values are replaced from outside.

        If the replica holds the mean, all its values are new, and it keeps them.
        """
        if self.mean.backup is not None:
            self.mean.backup, params = None, None
        self.engine.mark_stale(None if params is None else self.parameters.names_of(params))

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Context manager around the loop over the batches, for uneven inputs, on every worker.

        A worker that has run out of batches goes on mixing, without steps, until all have. A worker may have no batch.
        """
        if self.joining:
            raise RuntimeError("join() was entered inside join(): one is enough, around the loop.")
        self.apply_pending()
        self.joining = True
        try:
            yield
            self.apply_pending()
            self.follow_others()
            self._has_run_out = True
            finish_together(self.world, self.engine, self.joins, self.mix_only, self._between_looks)
            self.joins += 1
        except Exception as error:
            self.world.report(f"{type(error).__name__} in round {self.engine.round}: {error}")
            raise
        finally:
            self.joining = self._has_run_out = False

    def follow_others(self) -> None:
        """This worker has run out of batches: it follows those of its node that have not."""

    def _between_looks(self) -> None:
        self.mates.refuse_lost()
        self.monitor.look(self.engine.round)
        self._tell_boundary()

    @property
    def roster(self) -> Roster:
        """Who takes part, and who is left out."""
        return self.monitor.roster

    def on_roster(self, callback: Callable[[Roster, Roster], None]) -> None:
        """Registers ``callback(old, new)``, which is called before the first round of each new roster, in the training thread.

        Raises:
            RuntimeError: faults are not tolerated, so that the roster stays as it is.
        """
        text = "on_roster needs faults=decent_dp.Tolerate(...): without it the workers stay the same."
        self.monitor.refuse(RuntimeError(text))
        self.monitor.callbacks.append(callback)

    def stats(self) -> Stats:
        """Counters of this worker, cheap enough to read at every step."""
        engine = self.engine
        return Stats(
            updates=self.steps,
            rounds=engine.round,
            bytes_sent=engine.bytes_sent,
            grad_norm=None,
            exchanges=engine.exchanges,
            waited_s=engine.waited,
            rejected=engine.rejected,
            nonfinite=engine.nonfinite,
            holes=engine.holes,
            one_sided=self.world.one_sided,
            reconnects=self.world.reconnects,
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether a round has failed, so that no further one can be made. The replica can still be read and saved."""
        return self._fault is not None

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """Marks the replica as failed if an exception leaves the with-block."""
        try:
            with self.mates.explaining():
                yield
        except BaseException as error:
            self._fault = error
            self.world.report(f"{type(error).__name__}: {error}")
            raise

    def refuse_stopped(self) -> None:
        """Raises RuntimeError if no round can be made: the replica is closed, failed, or in a CUDA-graph capture."""
        self.refuse_superseded()
        if self.closed:
            raise RuntimeError(f"{self.WHAT} was closed: train before close(), or use {self.MODEL} on its own.")
        if self._fault is not None:
            raise RuntimeError(
                f"an update failed earlier ({type(self._fault).__name__}: {self._fault}), and this replica is out of step with "
                "the others: start the workers again."
            ) from self._fault
        if self._on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"a CUDA graph is being captured, and {self.WHAT} would make its rounds in the capture and never in a replay: "
                "capture the forward and the backward alone, before gossip() (torch.cuda.make_graphed_callables), or use "
                "torch.compile(mode='reduce-overhead'), and step outside. A replay uses the memory that parameters had: give "
                "the wrapper param_as_bucket_view=False, or it moves them."
            )

    def refuse_superseded(self) -> None:
        """Raises RuntimeError if a newer replica has taken the model over."""
        if self.superseded:
            raise RuntimeError(f"{self.WHAT} had made no update when a newer one took its model over: use the newer one.")

    def refuse_closed(self) -> None:
        """Raises RuntimeError after ``close``; called before a save."""
        self.refuse_superseded()
        if self.closed:
            raise RuntimeError(f"{self.WHAT} was closed: save before close(), or keep {self.MODEL}.state_dict().")

    def reach_step_boundary(self, what: str) -> None:
        """Finishes a pending update, for a call of the user's named ``what``.

        Raises:
            RuntimeError: inside a backward, or after a round that failed.
        """
        self.refuse_inside(what)
        if not self.failed:
            self.apply_pending()
        if self._fault is not None:
            raise RuntimeError(
                f"{what} came after an update that failed half-way ({type(self._fault).__name__}: {self._fault}): this replica "
                "is out of step with the others. Start the workers again from what was saved before."
            ) from self._fault

    def refuse_inside(self, what: str) -> None:
        """Raises RuntimeError inside a backward; ``what`` names the user's call."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{what} was called inside a backward: call it after the backward has returned.")

    def refuse_in_join(self, what: str, instead: str = "after") -> None:
        """Raises RuntimeError inside ``join``, where workers may wait in another collective; ``what`` names the call."""
        if self.joining:
            raise RuntimeError(
                f"{what} was called inside join(), where some workers have run out: call it {instead} the with-block."
            )

    def refuse_before_member(self, what: str) -> None:
        """Raises RuntimeError in a process that joins a run, before its first step; ``what`` names the user's call."""
        if self.before_first_round is not None:
            raise RuntimeError(
                f"{what} was called in a process that joins a run, before its first step: it is no member yet, and has the "
                f"newest state of another worker already. Leave {what} out where replica.roster.seat is -1."
            )

    def begin_collective(self, what: str) -> None:
        """Checks, before a collective call of the user's, that all workers make this one, at the same round.

        Where faults are tolerated: that all make it that live.
        """
        self.refuse_in_join(what)
        self.refuse_inside(what)
        self.refuse_before_member(what)
        self.apply_pending()
        self.refuse_stopped()
        self.mates.refuse_lost()
        self.monitor.look(self.engine.round)
        self._wait_while_cut_off(at_once=True)
        engine, control = self.engine, self.world.control
        control.begin(what, self.monitor.newest_round(engine.round))
        rounds = check_same_call(control, engine.round, engine.factor, what, self.monitor)
        if min(rounds) < max(rounds):
            # Those that were silent or late for a while are in other rounds, with as many updates.
            self.momenta.fade(engine.round, max(rounds))
            engine.go_to(max(rounds))
            if self.mean.backup is None:
                self.rebind()
                for bucket in engine.buckets:  # a worker in a later round may have mixed what is in flight here
                    engine.finish(bucket)
                self.share()
        self.mates.wait_for_whole_replicas()

    def meet(self, what: str) -> bool:
        """``begin_collective``, for a call that does without where all workers are in the same round; whether it was made."""
        if may_differ := self.monitor.tolerates_faults:
            self.begin_collective(what)
        return may_differ

    @property
    def survivors(self) -> Control | None:
        """What a framework uses in place of the process group's collectives, which a death breaks; None: it may use those."""
        return self.world.control if self.monitor.tolerates_faults else None

    def close(self) -> None:
        """Waits for the exchange in flight, drops it, and releases the connections; parameters stay as they are.

        May be called again. The model is on its own after it.
        """
        if self.closed:
            return
        if (error := passing_error(self._handled)) is not None:
            self.world.report(f"{type(error).__name__}: {error}")
        try:
            with contextlib.ExitStack() as ending:  # from the last line to the first, whatever raises
                ending.callback(self.engine.drop)
                ending.callback(self.apply_pending)
                for listener in self.listeners:
                    ending.callback(listener.closing)
        except Exception as error:
            if not self.failed:
                raise
            # The failed round has raised already. A second error in the caller's `finally` would hide that one.
            _log.warning("closed after a failed update: %s", error)
        finally:
            self.closed = True
            for hook in self.hooks:
                hook.remove()
            tell_replicas(self.optimizers, 1)
            self.momenta.close()
            self.mates.close()
            self.monitor.close()
            self.world.close()

    @property
    def unused(self) -> bool:
        """Whether no update was made or begun, so that a newer replica may take the model over."""
        return not (self.engine.round or self.failed or self.joining) and self.mean.backup is None

    def supersede(self) -> None:
        """Closes this unused replica, on all workers, because a newer one takes the model over."""
        self.close()
        self.superseded = True

    # -- the mean -----------------------------------------------------------------------------------------------------

    def averaged_buffers(self) -> list[Tensor]:
        """Returns the floating-point buffers (such as BatchNorm statistics) if they are to be averaged."""
        if not self.settings.sync_buffer_in_global_avg:
            return []
        return [buffer for buffer in self.model.buffers() if buffer.dtype in FLOAT_DTYPES]

    @contextlib.contextmanager
    def averaged(self, buffers: bool = True) -> Iterator[None]:
        """Context manager in which every replica is the mean of all. Called by all workers.

        Args:
            buffers: whether this worker uses the means of buffers.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
            NonFiniteError: a replica holds a NaN or an infinity, or a buffer a NaN; on all of them.
        """
        self.begin_collective("averaged")
        averaged = self.averaged_buffers()
        counts = self.mean.check_finite("averaged", averaged, buffers=buffers)
        # If some buffers are averaged, all are restored, because `calibrate` changes the others (counters) inside.
        with self.mean.preserved([*self.parameters.params, *(self.model.buffers() if averaged else ())]):
            self.mean.average_(averaged, counts)
            yield

    def consensus_distance(self) -> float:
        """Returns the root mean square, over replicas, of their L2 distance to their mean. Called by all workers.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
        """
        self.begin_collective("consensus_distance")
        distance = math.sqrt(self.mean.mean_square_distance())
        for listener in list(self.listeners):
            listener.measured(distance)
        return distance

    def gather(self, value: Any) -> dict[int, Any]:
        """Returns the values of all workers, by rank: for metrics, and to see who takes part. Called by all workers.

        Args:
            value: what JSON knows: None, a number, a string, or lists and dicts of these.

        Raises:
            TypeError: it is something else; on all workers.
        """
        self.begin_collective("gather")
        return gather_by_rank(self.world.control, value)

    # -- saves and loads ----------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        self.apply_pending()

    def before_load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        self.refuse_before_member("load_state_dict")
        self.apply_pending()
        self.parameters.locate()
        params, buffers = (
            [tensor for name, tensor in own.items() if tensor is not None and prefix + name in state]
            for own in (module._parameters, module._buffers)
        )
        if self.mean.scoped:
            self.mean.release([*params, *buffers])
            self.engine.mark_stale(self.parameters.names_of(params))
        elif params or buffers:
            self.invalidate(params)

    def after_load(self) -> None:
        self.rebind()
        self.engine.renew()
