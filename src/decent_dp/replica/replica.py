"""The base class of both drivers: one worker's replica of a model in a run.

A driver turns events (gradients, an optimizer's step) into rounds of the engine. This class begins and ends rounds, notifies
listeners, refuses calls at the wrong time, and holds the state that is saved.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_dp._checks import check_integer
from decent_dp._sizes import MIB
from decent_dp.compression import check_compression
from decent_dp.engine import Bucket, Engine, go_to, round_of_others
from decent_dp.faults import Roster
from decent_dp.replica.cadence import Cadence
from decent_dp.replica.consistency import check_same_call, gather_by_rank
from decent_dp.replica.construction import Agreement
from decent_dp.replica.lifecycle import Lifecycle, State, shut_down
from decent_dp.replica.mates import Mates
from decent_dp.replica.mean import Mean
from decent_dp.replica.module_hooks import HookedModel
from decent_dp.replica.momenta import Momenta, tell_replicas
from decent_dp.replica.parameters import Parameters
from decent_dp.replica.shards import fsdp_modules, local
from decent_dp.replica.uneven import finish_together
from decent_dp.topo import schedule
from decent_dp.transport import Collectives, NewcomerTransport, Transport

__all__ = ["Calls", "DriverKind", "Listener", "Replica", "Stats"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stats:
    """Counters of one worker.

    Attributes:
        updates: optimizer steps taken.
        rounds: rounds made, including those before a restart; more than ``updates`` if a scaler skipped steps, or ``join``
            made rounds without one.
        bytes_sent: bytes that this worker has sent for exchanges, without headers and flags.
        grad_norm: norm of the gradients of the last update before clipping; None without ``grad_clip_norm``.
        exchanges: finished exchanges of single buckets.
        waited_s: seconds that the training thread has waited for exchanges.
        rejected: blocks of parameters that were not mixed, because replicas were further apart than the compression can
            represent.
        nonfinite: rounds that this worker sat out, because a replica of its edge had a NaN or an infinity.
        holes: exchanges of single buckets that were left out, because the other worker was gone, silent or much too slow;
            0 without ``faults``.
        one_sided: exchanges that this worker has dropped, as it could not learn whether the other one mixes them: the only
            ones that can move the mean over the replicas.
        reconnects: connections to other workers that were made in place of lost ones; 0 without ``faults``.
    """

    updates: int
    rounds: int
    bytes_sent: int
    grad_norm: float | None
    exchanges: int = 0
    waited_s: float = 0.0
    rejected: int = 0
    nonfinite: int = 0
    holes: int = 0
    one_sided: int = 0
    reconnects: int = 0


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


class Calls:
    """The calls that a ``Gossip`` and a wrapper have in common.

    Attributes:
        replica: the one that trains.
    """

    replica: Replica

    def close(self) -> None:
        """Waits for the exchange in flight, drops it, and releases the connections; parameters stay as they are.

        May be called again. The model is on its own after it.
        """
        replica = self.replica
        if replica.life.closed:
            return
        if (error := replica.life.passing_error()) is not None:
            replica.world.report(f"{type(error).__name__}: {error}")
        try:
            with contextlib.ExitStack() as ending:  # from the last line to the first, whatever raises
                ending.callback(replica.engine.drop)
                ending.callback(replica.apply_pending)
                for listener in replica.listeners:
                    ending.callback(listener.closing)
        except Exception as error:
            if replica.life.fault is None:
                raise
            # The failed round has raised already. A second error in the caller's `finally` would hide that one.
            _log.warning("closed after a failed update: %s", error)
        finally:
            replica.life.state = State.CLOSED
            for hook in replica.hooks:
                hook.remove()
            tell_replicas(replica.optimizers, 1)
            replica.momenta.close()
            replica.mates.close()
            replica.monitor.close()
            replica.world.close()

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Context manager around the loop over the batches, for uneven inputs, on every worker.

        A worker that has run out of batches goes on mixing, without steps, until all have. A worker may have no batch.
        """
        replica, engine = self.replica, self.replica.engine
        if replica.life.joining:
            raise RuntimeError("join() was entered inside join(): one is enough, around the loop.")
        replica.apply_pending()
        replica.life.state = State.IN_JOIN
        try:
            yield
            replica.apply_pending()
            replica._follow_others()
            if not replica.life.closed:  # close() was not called in the block
                replica.life.state, joins = State.RUN_OUT, replica.cadence.joins
                finish_together(replica.world, engine, joins, replica._mix_only, replica._tell_between_rounds)
                replica.cadence.joins += 1
        except Exception as error:
            replica.world.report(f"{type(error).__name__} in round {engine.round}: {error}".rstrip(": "))
            raise
        finally:
            if not replica.life.closed:
                replica.life.state = State.OPEN

    @contextlib.contextmanager
    def averaged(self, buffers: bool = True) -> Iterator[None]:
        """Context manager in which every replica is the mean of all, for evaluation and saving. Called by all workers.

        Each replica has its own values again afterwards.

        Args:
            buffers: whether floating-point buffers (BatchNorm statistics) are means inside, too.

        Raises:
            OutOfStepError: the workers have made different numbers of rounds; on all of them.
            NonFiniteError: a replica holds a NaN or an infinity; on all of them.
        """
        replica, mean = self.replica, self.replica.mean
        replica.begin_collective("averaged")
        own = [] if buffers else [(buffer, local(buffer).clone()) for buffer in mean.buffers]
        # If some buffers are averaged, all are restored, because `calibrate` changes the others (counters) inside.
        with mean.preserved([*replica.parameters.params, *(replica.model.buffers() if mean.buffers else ())]):
            # All workers average buffers, because `buffers` may differ between them.
            mean.average_("averaged", uses_buffers=buffers)
            with torch.no_grad():
                for buffer, value in own:
                    local(buffer).copy_(value)
            yield

    def consensus_distance(self) -> float:
        """Returns the root mean square, over replicas, of their L2 distance to their mean. Called by all workers.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
        """
        replica = self.replica
        replica.begin_collective("consensus_distance")
        distance = math.sqrt(replica.mean.mean_square_distance())
        for listener in list(replica.listeners):
            listener.measured(distance)
        return distance

    def gather(self, value: Any) -> dict[int, Any]:
        """Returns the values of all workers, by rank: for metrics, and to see who takes part. Called by all workers.

        Args:
            value: what JSON knows: None, a number, a string, or lists and dicts of these.

        Raises:
            TypeError: it is something else; on all workers.
        """
        self.replica.begin_collective("gather")
        return gather_by_rank(self.replica.world.control, value)

    def due(self, every: int) -> bool:
        """Whether it is time for a call of all workers: once in ``every`` rounds, in the same rounds on all workers.

        Ask after a step, on every worker. The answer stays the same until the next round. With ``faults`` it holds for a worker
        that was out for a while or has joined, too: calls that the others have made without it are not due.

        Raises:
            ValueError, TypeError: ``every`` is no whole number, or less than 1.
        """
        replica = self.replica
        check_integer("every", every, 1, "rounds")
        replica.apply_pending()
        if replica.life.before_first_round is not None:
            return False
        replica.catch_up()
        return replica.cadence.is_due(every, replica.engine.round)

    @property
    def roster(self) -> Roster:
        """Who takes part, and who is left out."""
        return self.replica.monitor.roster

    def on_roster(self, callback: Callable[[Roster, Roster], None]) -> None:
        """Registers ``callback(old, new)``, which is called before the first round of each new roster, in the training thread.

        Raises:
            RuntimeError: faults are not tolerated, so that the roster stays as it is.
        """
        monitor = self.replica.monitor
        text = "on_roster needs faults=decent_dp.Tolerate(...): without it the workers stay the same."
        monitor.refuse(RuntimeError(text))
        monitor.callbacks.append(callback)

    def stats(self) -> Stats:
        """Counters of this worker, cheap enough to read at every step."""
        replica, world = self.replica, self.replica.world
        counts = {**vars(replica.engine.stats()), **world.counts()}
        return Stats(updates=replica.steps, rounds=replica.engine.round, grad_norm=replica._grad_norm(), **counts)


@dataclass(frozen=True)
class DriverKind:
    """The words of a driver.

    Attributes:
        name: in snapshots, and in messages.
        what: the replica, and ``model`` the expression for the model itself, for messages.
        entries: those of this driver in a snapshot (``decent_dp.replica.snapshot``).
        foreign_step: the end of the warning about an optimizer that is not its own and steps its parameters.
    """

    name: str
    what: str
    model: str
    entries: frozenset[str]
    foreign_step: str


class Replica(Calls, HookedModel):
    """A model, its engine, and rounds.

    Args:
        model: its trainable parameters are exchanged.
        transport: of all workers.
        agreed: settings, topology and rule.

    Attributes:
        world: connects all workers; used for collectives, checkpoints and reports.
        agreed: as given.
        parameters: the trainable parameters, with their names.
        momenta: those of the optimizers that are tracked, which are mixed in buckets of their own.
        mean: the backup while the replica holds the mean.
        listeners: notified of every round.
        optimizers: the ones that train this replica.
        cadence: in which rounds calls of all workers are due.
        scaler: the GradScaler of its loss, or None.
        steps: optimizer steps taken.
        life: whether it can make rounds.
        monitor: who takes part. ``mates``: those that hold parts of this replica.
    """

    KIND: ClassVar[DriverKind]

    def __init__(self, model: nn.Module, transport: Transport, agreed: Agreement) -> None:
        self.world, self.agreed, shares = transport, agreed, agreed.shares
        self.parameters = Parameters(model, shares)
        params, compression = self.parameters.params, check_compression(agreed.settings.compression)
        self.engine = Engine(agreed.peers, agreed.topology, agreed.rule, compression)
        self.monitor = agreed.monitor
        self.monitor.callbacks.append(lambda _, new: self._tell_optimizers(new.members))
        self.mates = Mates(transport, self.monitor)
        self.mates.explain(fsdp_modules(model))
        if not isinstance(transport, NewcomerTransport):  # else they are connected later
            self.mates.start(0)
        self.mean = Mean(model, self.parameters, transport, agreed, self.mates)
        self.momenta = Momenta([], {}, agreed.rule)
        self.listeners, self.cadence, self.optimizers = list[Listener](), Cadence(), list[Optimizer]()
        self.scaler: torch.amp.GradScaler | None = None
        self.steps = 0
        on_cuda = any(param.is_cuda for param in params)
        self.life = Lifecycle(self.KIND.what, self.KIND.model, transport, self.mates, on_cuda=on_cuda)
        super().__init__(model, in_ddp=shares is not None and shares.group.averages)
        where = f"{self.KIND.name}: worker {transport.rank} of {transport.world_size}, topology {agreed.topology!r}"
        size = f"{sum(param.numel() for param in params)} trainable parameters in {len(params)} tensors"
        _log.debug("%s, compression %s, %s", where, agreed.settings.compression, size)
        if transport.rank == 0:
            count = len(agreed.replicas.workers)
            _log.info("%d workers, %d replicas; %s", transport.world_size, count, self._describe_replica())
        # Runs at exit too, also in processes of multiprocessing, where atexit handlers do not run.
        args = (self.engine, transport, self.monitor.epochs, threading.current_thread())
        Finalize(self, shut_down, args=args, exitpriority=100)

    @property
    def replica(self) -> Replica:  # type: ignore[override]  # read-only
        return self

    # -- implemented by drivers ---------------------------------------------------------------------------------------

    @abstractmethod
    def _mix_only(self) -> None:
        """Makes one round without an optimizer step."""

    @abstractmethod
    def _saved_entries(self) -> dict[str, Any]:
        """Returns the values of ``DriverKind.entries``."""

    @abstractmethod
    def _check_entries(self, snapshot: Mapping[str, Any]) -> None:
        """Raises ValueError if a snapshot does not fit this driver; changes nothing."""

    @abstractmethod
    def _prepare_load(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> tuple[list[Bucket], Callable[[], None]]:
        """Returns new buckets for a snapshot, and what loads all entries that are not tensors of the model.

        All that the user's objects may refuse is loaded already; ``undo`` reverts it.
        """

    @abstractmethod
    def _load_optimizers(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        """Loads the state of the optimizers into those that are there; ``undo`` reverts it."""

    def apply_pending(self) -> None:
        """Makes a pending update, if drivers leave any, before the replica is observed."""
        self.life.refuse_superseded()

    def _is_unused(self) -> bool:
        """Whether no update was made or begun, so that a newer replica may take the model over."""
        return not (self.engine.round or self.life.fault is not None or self.life.joining) and self.mean.backup is None

    def _grad_norm(self) -> float | None:
        """Of the last update before clipping; None without clipping."""
        return None

    def _has_own_gradients(self) -> bool:
        """Whether gradients are not averaged yet over the workers of a node."""
        return False

    def _follow_others(self) -> None:
        """This worker has run out of batches: it follows those of its node that have not."""

    # -- rounds -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _round(self) -> Iterator[None]:
        """Context manager around a round: from the present storage and the round of the others to the listeners."""
        self.life.refuse_stopped()
        # A round may be made during an evaluation. Tensors that it allocates must not be inference tensors.
        with self.life.failing(), torch.inference_mode(False):
            if self.mean.backup is not None:  # this round makes the mean the replica's own values
                self._invalidate()
            self._rebind()
            self.engine.renew()
            if self.life.before_first_round is not None:
                self.life.before_first_round()
                self.life.before_first_round = None
            whole = self.agreed.replicas.shards == 1  # a mesh needs the group
            if self.engine.started is None and self.monitor.tolerates_faults and whole:
                self.world.leave_process_group()
            self.mates.refuse_lost()
            self.monitor.look(before := self.engine.round)
            self.catch_up()
            if self.engine.round > before:  # an epoch may have begun in the rounds that were left out
                self.monitor.look(self.engine.round)
            self.world.announce(self.engine.round)
            yield
        self.world.report("")  # an earlier error did not end the run
        for listener in list(self.listeners):
            listener.round_ended()

    def _exchange(self, *, stepped: bool, step: Callable[[int], None] = lambda _: None) -> None:
        """Mixes in what is in flight and starts the next exchange, bucket by bucket. It ends the round.

        Args:
            stepped: whether optimizers step in this round.
            step: called in between, with the number of the bucket among the present ones.
        """
        engine, overlap = self.engine, self.agreed.settings.overlap
        for number, bucket in enumerate(engine.buckets):
            if overlap:
                engine.finish_due(bucket).raise_if_failed()
            step(number)
            engine.start(bucket)
        if not overlap:
            for bucket in engine.buckets:
                engine.finish(bucket).raise_if_failed()
        self._share()
        engine.wait_for_read()
        if _log.isEnabledFor(logging.DEBUG):
            what, ranks = "with" if stepped else "without", engine.topology.get_edge(engine.round).ranks
            _log.debug("worker %d: round %d %s a step, edge %s", self.world.rank, engine.round, what, ranks)
        self.cadence.add(engine.round)
        self.momenta.fade(engine.round, engine.round + 1)
        engine.advance()
        self.steps += stepped

    def _share(self) -> None:
        """The workers of a node gather what each has mixed."""
        shares, finished = self.agreed.shares, self.engine.finished
        if shares is not None and finished:
            for kind, rules in (("parameter", True), ("momentum", False)):
                buckets = [bucket for bucket in finished if (bucket.rule is self.engine.rule) is rules]
                shares.gather(kind, (slot.index for bucket in buckets for slot in bucket.buffer.plan.slots))
        finished.clear()

    def _use_buckets(self, buckets: list[Bucket]) -> None:
        """Replaces all buckets, after the optimizers."""
        self.engine.install(buckets)
        self.monitor.restart()
        if _log.isEnabledFor(logging.DEBUG):
            sizes = [f"{bucket.buffer.plan.numel * bucket.buffer.plan.dtype.itemsize / MIB:.3g}" for bucket in buckets]
            _log.debug("worker %d: %d buckets, MiB: %s", self.world.rank, len(buckets), ", ".join(sizes))

    def _tell_optimizers(self, members: Sequence[int]) -> None:
        """Tells optimizers which replicas take part."""
        share = schedule.share_of(self.engine.topology, self.mates.number, members)
        tell_replicas(self.optimizers, len(members), share)
        self.engine.mark_stale(self.momenta.forget())  # what is in flight is of the members before

    def _rebind(self) -> None:
        """Updates the buckets to the parameters' present storage."""
        self.parameters.locate()
        if loaded := self.momenta.follow_loads():  # the difference in flight belongs to the old ones
            self.engine.mark_stale(loaded)
        for bucket in self.engine.buckets:
            bucket.buffer.rebind()

    def _invalidate(self, params: Iterable[Tensor] | None = None) -> None:
        """Drops the state of ``params`` (None: of all), whose values are replaced from outside.

        If the replica holds the mean, all its values are new, and it keeps them.
        """
        if self.mean.backup is not None:
            self.mean.backup, params = None, None
        self.engine.mark_stale(None if params is None else self.parameters.names_of(params))

    def catch_up(self) -> None:
        """Goes on in the round of the others, if they have gone on without this replica. Called between two rounds."""
        before, target = self.engine.round, round_of_others(self.engine)
        # At the end of `join` sharded ones make no steps together.
        alone = self.life.state is State.RUN_OUT and self.agreed.shares is None
        target = self.mates.agree_on(target, self.engine.nonfinite_in, alone=alone)
        self.momenta.fade(before, target)  # also in rounds that are left out
        go_to(self.engine, target)
        if self.engine.round > before:
            self.cadence.fall_behind(self.engine.round)

    def reached_boundary(self) -> None:
        """Notifies the listeners, between two rounds and outside any backward. A worker that is cut off waits here."""
        self._tell_boundary()
        self._wait_while_cut_off(at_once=False)

    def _tell_boundary(self) -> None:
        for listener in list(self.listeners):
            listener.reached_boundary()

    def _wait_while_cut_off(self, *, at_once: bool) -> None:
        while not self.life.closed and self.monitor.has_to_wait(self.engine.round, at_once=at_once):
            self._tell_boundary()

    def _tell_between_rounds(self) -> None:
        self.mates.refuse_lost()
        self.monitor.look(self.engine.round)
        self._tell_boundary()

    def _describe_replica(self) -> str:
        """Describes the unit that mixes, for ``repr`` and the log."""
        carrier = self.world.carrier(on_gpus=any(param.is_cuda for param in self.parameters.params))
        own, shares, between = list(self.mates.ranks), self.agreed.shares, f", exchanges over {carrier}" if carrier else ""
        if len(own) == 1:
            return f"replica='worker'{between}"
        if shares is None:
            return f"replica: sharded over the workers {own}{between}"
        by = "by DistributedDataParallel " if shares.group.averages else ""
        return f"replica='node': the workers {own}, gradients averaged {by}over {shares.group.backend}{between}"

    # -- calls of the user's -------------------------------------------------------------------------------------------

    def reach_step_boundary(self, what: str) -> None:
        """Finishes a pending update, for a call of the user's named ``what``.

        Raises:
            RuntimeError: inside a backward, or after a round that failed.
        """
        self.life.refuse_inside(what)
        if self.life.fault is None:
            self.apply_pending()
        self.life.refuse_failed(what)

    def begin_collective(self, what: str) -> None:
        """Checks, before a collective call of the user's, that all workers make this one, at the same round.

        Where faults are tolerated: that all make it that live.
        """
        self.life.refuse_in_join(what)
        self.life.refuse_inside(what)
        self.life.refuse_before_member(what)
        self.apply_pending()
        self.life.refuse_stopped()
        self.mates.refuse_lost()
        self.monitor.look(self.engine.round)
        self._wait_while_cut_off(at_once=True)
        engine, control = self.engine, self.world.control
        control.begin(what, self.monitor.newest_round(engine.round))
        rounds = check_same_call(control, engine.round, engine.factor, what, self.monitor)
        if min(rounds) < max(rounds):
            # Those that were silent or late for a while are in other rounds, with as many updates.
            self.momenta.fade(engine.round, max(rounds))
            go_to(engine, max(rounds))
            if self.mean.backup is None:
                self._rebind()
                for bucket in engine.buckets:  # a worker in a later round may have mixed what is in flight here
                    engine.finish(bucket)
                self._share()
        self.mates.wait_for_whole_replicas()

    def meet(self, what: str) -> bool:
        """``begin_collective``, for a call that does without where all workers are in the same round; whether it was made."""
        if may_differ := self.monitor.tolerates_faults:
            self.begin_collective(what)
        return may_differ

    @property
    def survivors(self) -> Collectives | None:
        """What a framework uses in place of the process group's collectives, which a death breaks; None: it may use those."""
        return self.world.control if self.monitor.tolerates_faults else None

    def become_mean(self, what: str) -> list[Tensor]:
        """The replica becomes the mean of all, for the call ``what`` of all workers. Returns as ``Mean.average_``."""
        self.begin_collective(what)
        distances = self.mean.average_(what)
        self._invalidate()
        self.engine.renew()
        return distances

    # -- the model's saves and loads -----------------------------------------------------------------------------------

    def _before_save(self) -> None:
        self.apply_pending()

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        self.life.refuse_before_member("load_state_dict")
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
            self._invalidate(params)

    def _after_load(self) -> None:
        self._rebind()
        self.engine.renew()
