"""One worker's replica of a model in a run: what all drivers share.

A driver turns events (gradients, an optimizer's step) into rounds of the engine. Here is what a round is to the rest of the
library: when it begins and ends, who listens to it, what is refused in it, and what is kept of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from multiprocessing.util import Finalize
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from decent_dp.engine import Bucket, Engine
from decent_dp.errors import NonFiniteError
from decent_dp.handed import FLOAT_DTYPES
from decent_dp.replica.averages import average_, squared_distance
from decent_dp.replica.consistency import meet
from decent_dp.replica.construction import Agreed
from decent_dp.replica.living import enter
from decent_dp.replica.mean import Mean
from decent_dp.replica.module_hooks import ModuleHooks
from decent_dp.replica.parameters import Parameters
from decent_dp.replica.shards import holds_first_copy, is_sharded, local
from decent_dp.replica.shutdown import shut_down
from decent_dp.replica.stats import Stats
from decent_dp.rules import rule_settings
from decent_dp.transport import Handle, Transport
from decent_dp.wire import WIRES, all_finite

__all__ = ["Listener", "Replica"]

_log = logging.getLogger(__name__)

# How many of join's flags may be in flight: it bounds how far one worker can run ahead of the slowest there.
_FLAGS_IN_FLIGHT = 32


class Listener:
    """Is notified of a replica's rounds: an entry of ``Replica.listeners``."""

    def round_ended(self) -> None:
        """A round is over, and the next has not begun. What this raises leaves the replica as it is."""

    def closing(self) -> None:
        """The replica is closed; its connections are still there."""


class Replica(ABC):
    """A model, its engine, and rounds.

    Args:
        model: its trainable parameters are exchanged.
        transport: of all workers.
        agreed: settings, topology and rule.

    Attributes:
        everyone: connects all workers, for what concerns them all: agreements, checkpoints, reports.
        transport: connects this worker with those that hold the same part of the other replicas; ranks are the replicas'
            numbers. It is ``everyone`` where each worker has a whole replica.
        replicas: the workers of each replica.
        parameters: the trainable ones, with their names.
        mean: what is put aside while the replica is the mean.
        listeners: notified of every round.
        optimizers: whose steps are this replica's own.
        scaler: the GradScaler that scales its loss, or None.
        steps: optimizer steps taken.
        joining: inside ``join``: every round tells the others that this worker is active.
        closed: rounds are over.
        superseded: closed, because a newer replica has taken the model over.
    """

    # What a snapshot says that it is of, and what messages call it.
    KIND: ClassVar[str]
    WHAT: ClassVar[str]
    # How users get at the model itself.
    MODEL: ClassVar[str]
    # What is wrong when an optimizer that is not its own steps its parameters, and what to do.
    FOREIGN_STEP: ClassVar[str]

    def __init__(self, model: nn.Module, transport: Transport, agreed: Agreed) -> None:
        self.model = model
        self.everyone, self.transport, self.replicas = transport, agreed.peers, agreed.replicas
        self.settings = agreed.settings
        self.parameters = Parameters(model)
        self.topology = agreed.topology
        self.engine = Engine(self.transport, self.topology, agreed.rule, WIRES[agreed.settings.wire])
        self.mean = Mean(self.parameters.locate)
        self.listeners: list[Listener] = []
        self.optimizers: list[Optimizer] = []
        self.scaler: torch.amp.GradScaler | None = None
        self.steps = 0
        self.joining = False
        self.closed = False
        self.superseded = False
        self._on_cuda = any(param.is_cuda for param in self.parameters.params)
        self._flags: deque[Handle] = deque()
        self._fault: BaseException | None = None
        self._module_hooks = ModuleHooks(model, self)
        enter(self)
        # Also at exit, and in workers that multiprocessing has started, where atexit is not run.
        self._finalizer = Finalize(self, shut_down, args=(self.engine, transport, threading.current_thread()), exitpriority=100)

    # -- what a driver brings -----------------------------------------------------------------------------------------

    @abstractmethod
    def catch_up(self) -> None:
        """Makes a pending update before the replica is observed."""

    @abstractmethod
    def mix_only(self) -> None:
        """One round without an optimizer step."""

    @abstractmethod
    def saved_entries(self) -> dict[str, Any]:
        """What a snapshot holds of this driver: see ``decent_dp.replica.snapshot``."""

    @abstractmethod
    def check_entries(self, snapshot: Mapping[str, Any]) -> None:
        """Looks whether a snapshot fits this driver; raises ValueError, and changes nothing."""

    @abstractmethod
    def prepare_load(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> list[Bucket]:
        """New buckets for a snapshot, and all that the user's objects may still refuse; ``undo`` takes it back."""

    @abstractmethod
    def install(self, snapshot: Mapping[str, Any], buckets: list[Bucket]) -> None:
        """The buckets take the place of those that there were, and what is not a tensor of the model is loaded."""

    # -- rounds -------------------------------------------------------------------------------------------------------

    def begin_round(self, *, active: bool = True) -> None:
        """Before any bucket is touched. ``active``: this worker has not run out of data."""
        if self.joining and active:
            # Before any other collective of this round: workers that have run out wait for it.
            self._flags.append(self.transport.control.mean(torch.ones(1, device="cpu")))
            if len(self._flags) > _FLAGS_IN_FLIGHT:
                self._flags.popleft().wait()
        if self.mean.backup is not None:  # if the replicas still are the mean, they stay it
            self.forget()
        self.adopt()
        self.engine.renew()

    def adopt(self) -> None:
        """The buckets find the parameters' values where they are now."""
        self.parameters.locate()
        for bucket in self.engine.buckets:
            bucket.block.adopt()

    def end_round(self, *, stepped: bool) -> None:
        """All buckets have been started."""
        self.engine.wait_for_read()
        self.engine.advance()
        self.steps += stepped

    def tell_round(self) -> None:
        """Tells the listeners of the round that has ended; outside ``faults``."""
        self.everyone.report("")  # what went wrong before did not end the run
        for listener in list(self.listeners):
            listener.round_ended()

    def forget(self, params: Iterable[Tensor] | None = None) -> None:
        """The values of ``params`` (None: of all) are replaced from outside: what belongs to the old ones is dropped.

        Where the replica holds the mean just now, it keeps it: all values are others then.
        """
        if self.mean.backup is not None:
            self.mean.backup, params = None, None
        self.engine.mark_stale(None if params is None else self.parameters.names_of(params))

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """For uneven inputs: a worker that has run out continues to mix, without steps, until all have.

        Put the loop over the batches in it, on every worker. A worker may have no batch at all.
        """
        if self.joining:
            raise RuntimeError("join() was entered inside join(): one is enough, around the loop.")
        self.refuse_superseded()
        self.catch_up()
        self.joining = True
        try:
            yield
            self.catch_up()
            while self._anybody_active():
                self.mix_only()
        except Exception as error:
            self.everyone.report(f"{type(error).__name__} in round {self.engine.round}: {error}")
            raise
        finally:
            self.joining = False

    def _anybody_active(self) -> bool:
        """For a worker that has run out: whether any other makes the coming round."""
        flag = torch.zeros(1, device="cpu")
        self.transport.control.mean(flag).wait()
        # Flags are summed in order: all of ours are in.
        while self._flags:
            self._flags.popleft().wait()
        return bool(flag.item() > 0)

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
            nonfinite=engine.nonfinite.rounds,
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """A round has failed, and no other can be made; what is there can still be looked at and saved."""
        return self._fault is not None

    @contextlib.contextmanager
    def faults(self) -> Iterator[None]:
        """What raises in it leaves a replica that can make no more rounds."""
        try:
            yield
        except BaseException as error:
            self._fault = error
            self.everyone.report(f"{type(error).__name__}: {error}")
            raise

    def check(self) -> None:
        """Raises RuntimeError when no round can be made: for good, or here."""
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
        """Raises RuntimeError when a newer replica has taken the model over."""
        if self.superseded:
            raise RuntimeError(f"{self.WHAT} had made no update when a newer one took its model over: use the newer one.")

    def refuse_closed(self) -> None:
        """Raises RuntimeError after ``close``, for a save."""
        self.refuse_superseded()
        if self.closed:
            raise RuntimeError(f"{self.WHAT} was closed: save before close(), or keep {self.MODEL}.state_dict().")

    def come_to_boundary(self, what: str) -> None:
        """Comes to a step boundary, for a call of the user's named ``what``.

        Raises:
            RuntimeError: inside a backward; after a round that failed half-way.
        """
        self.refuse_inside(what)
        self.refuse_superseded()
        if not self.failed:
            self.catch_up()
        if self._fault is not None:
            raise RuntimeError(
                f"{what} came after an update that failed half-way ({type(self._fault).__name__}: {self._fault}): this replica "
                "is out of step with the others. Start the workers again from what was saved before."
            ) from self._fault

    def refuse_inside(self, what: str) -> None:
        """Raises RuntimeError inside a backward, for a call of the user's named ``what``."""
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(f"{what} was called inside a backward: call it after the backward has returned.")

    def refuse_in_join(self, what: str, instead: str = "after") -> None:
        """Raises RuntimeError inside ``join``, where some workers wait for other words than those of ``what``."""
        if self.joining:
            raise RuntimeError(
                f"{what} was called inside join(), where some workers have run out: call it {instead} the with-block."
            )

    def meet(self, what: str) -> None:
        """Before a collective of the user's: all must be there, and at the same round."""
        self.refuse_in_join(what)
        self.refuse_inside(what)
        self.catch_up()
        self.check()
        meet(self.everyone.control, self.engine.round, what)

    def close(self) -> None:
        """Waits for the exchange in flight, drops it, and releases the connections; parameters stay as they are.

        May be called again. The model is on its own after it.
        """
        if self.closed:
            return
        try:
            with contextlib.ExitStack() as ending:  # from the last line to the first, whatever raises
                ending.callback(self.engine.drop)
                ending.callback(self.catch_up)
                for listener in self.listeners:
                    ending.callback(listener.closing)
        except Exception as error:
            if not self.failed:
                raise
            # It has been raised once, by the round that failed; do not hide that one in the caller's `finally`.
            _log.warning("closed after a failed update: %s", error)
        finally:
            self.closed = True
            self.let_go_of_model()
            self.everyone.close()

    @property
    def unused(self) -> bool:
        """It has made no update and none has begun, so that nothing is lost if a newer replica takes its model over."""
        return not (self.engine.round or self.failed or self.joining) and self.mean.backup is None

    def supersede(self) -> None:
        """A newer replica takes the model over, on all workers: this one, which is unused, closes."""
        self.close()
        self.superseded = True

    def let_go_of_model(self) -> None:
        """Takes the hooks off."""
        self._module_hooks.remove()

    # -- the mean -----------------------------------------------------------------------------------------------------

    def averaged_buffers(self) -> list[Tensor]:
        """The floating-point buffers (BatchNorm's statistics, say), where they take part in averages."""
        if not self.settings.sync_buffer_in_global_avg:
            return []
        return [buffer for buffer in self.model.buffers() if buffer.dtype in FLOAT_DTYPES]

    @contextlib.contextmanager
    def averaged(self, buffers: bool = True) -> Iterator[None]:
        """Inside, every replica is the mean of all; each has its own values back after it. Called by all workers.

        Args:
            buffers: this worker uses the means of buffers.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
            NonFiniteError: a replica holds a NaN or an infinity, or a buffer a NaN; on all of them.
        """
        self.meet("averaged")
        averaged = self.averaged_buffers()
        self.refuse_nonfinite("averaged", averaged, buffers=buffers)
        # Where some buffers are averaged, the others come back, too: `calibrate` counts in them.
        with self.mean.holding([*self.parameters.params, *(self.model.buffers() if averaged else ())]):
            self.become_mean(averaged)
            yield

    @torch.no_grad()
    def refuse_nonfinite(
        self, what: str, averaged: Sequence[Tensor] = (), params: Sequence[Tensor] | None = None, *, buffers: bool = True
    ) -> None:
        """Before a mean over the replicas, for a call of the user's named ``what``. Called by all workers.

        Args:
            averaged: the model's buffers that take part in it. Infinities are values like others there (a best loss so far),
                and so is a NaN that all workers have.
            params: what takes part in the place of the parameters; None for themselves.
            buffers: this worker uses the means of buffers.

        Raises:
            NonFiniteError: a replica holds a NaN or an infinity, or a buffer a NaN, and all would get it; on all workers.
        """
        params = self.parameters.locate() if params is None else params
        chosen = set(map(id, averaged))
        named = [(name, local(buffer)) for name, buffer in self.model.named_buffers() if id(buffer) in chosen]
        param = next((name for name, t in zip(self.parameters.names, params, strict=False) if not all_finite(t.detach())), None)
        found = self.everyone.control.gather([param, [name for name, t in named if bool(t.isnan().any())], buffers])
        everywhere = set.intersection(*(set(names) for _, names, _ in found))
        for rank, (name, names, _) in enumerate(found):
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

    @torch.no_grad()
    def become_mean(self, buffers: Sequence[Tensor] = ()) -> list[Tensor]:
        """Parameters and ``buffers`` become the mean; the squared distances of the parameters to it, as they were."""
        return self.average([tensor.detach() for tensor in self.parameters.locate()], buffers)

    def average(self, parts: Sequence[Tensor], buffers: Sequence[Tensor]) -> list[Tensor]:
        """``parts`` of parameters become their mean over replicas, and ``buffers`` theirs: of a buffer that is not sharded over
        all workers, as each has its own. The squared distances of the parts to their mean, as they were."""
        distances = average_(self.transport.control, parts)
        average_(self.transport.control, [local(buffer) for buffer in buffers if is_sharded(buffer)])
        average_(self.everyone.control, [buffer for buffer in buffers if not is_sharded(buffer)])
        return distances

    @torch.no_grad()
    def consensus_distance(self) -> float:
        """Root mean square over replicas of their L2 distance to their mean. Called by all workers.

        Raises:
            OutOfStepError: the workers have made different numbers of updates; on all of them.
        """
        self.meet("consensus_distance")
        pairs = zip(self.parameters.params, self.parameters.locate(), strict=True)
        # What a replica has several copies of counts once.
        own = squared_distance(self.transport.control, [part.detach() for param, part in pairs if holds_first_copy(param)])
        return float((sum(self.everyone.control.gather(own)) / self.transport.world_size) ** 0.5)

    # -- saves and loads ----------------------------------------------------------------------------------------------

    def before_save(self) -> None:
        """A module of the model is about to be saved."""
        self.catch_up()

    @abstractmethod
    def after_save(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Its values are in ``state``."""

    def before_load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """A module's own tensors are about to be overwritten by ``state``: what is in flight belongs to the old values."""
        self.catch_up()
        self.parameters.locate()
        params, buffers = (
            [tensor for name, tensor in own.items() if tensor is not None and prefix + name in state]
            for own in (module._parameters, module._buffers)
        )
        if self.mean.scoped:
            self.mean.release([*params, *buffers])
            self.engine.mark_stale(self.parameters.names_of(params))
        elif params or buffers:
            self.forget(params)

    def after_load(self) -> None:
        """Parameters have the values that were loaded."""
        self.adopt()
        self.engine.renew()

    @cached_property
    def _fixed_link(self) -> dict[str, Any]:
        specs = [[spec.name, list(spec.shape), list(spec.stride), str(spec.dtype)] for spec in self.parameters.specs]
        return {
            "rank": self.transport.rank,
            "topology": self.topology.fingerprint(),
            "mix_every": int(self.settings.mix_every),
            "overlap": self.settings.overlap,
            "wire": self.settings.wire,
            "rule": rule_settings(self.engine.rule),
            "parameters": hashlib.sha256(json.dumps(specs).encode()).hexdigest()[:16],
        }

    def link(self, round_: int) -> dict[str, Any]:
        """What the exchange before round ``round_`` depends on, as JSON can hold it."""
        edge = self.topology.get_edge(round_ - 1) if round_ else None
        return {**self._fixed_link, "edge": None if edge is None else [list(edge.ranks), edge.weight]}

    def engine_entries(self) -> dict[str, Any]:
        """What the engine needs to resume, and to tell whether it can: see ``decent_dp.replica.snapshot``."""
        engine = self.engine
        return {"driver": self.KIND, "steps": self.steps, **engine.state_dict(), "link": self.link(engine.round)}
