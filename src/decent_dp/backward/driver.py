"""The wrapper's driver: turns autograd's events into updates.

Every backward is one update, unless gradients are being accumulated. The update is made at the end of the backward, when all
gradients are there, and hooks of the user's have seen them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp._sizes import MIB
from decent_dp.arguments import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, check_scaler, make_optimizer, make_scheduler
from decent_dp.backward.events import Backward, Backwards, Window, inside_backward
from decent_dp.backward.scaled import refuse_scaled_loss
from decent_dp.backward.state_dicts import copy_values, strip_prefix
from decent_dp.backward.units import DeferredList, Unit, edit_of
from decent_dp.engine import Bucket
from decent_dp.errors import OutOfStepError
from decent_dp.gradients import GradientPolicy
from decent_dp.optim.tracking import rule_for
from decent_dp.replica.consistency import broadcast_object, check_consistency, worker_counts
from decent_dp.replica.construction import Agreement
from decent_dp.replica.module_hooks import state_names
from decent_dp.replica.momenta import Momenta, tell_replicas
from decent_dp.replica.optimizer_guards import options_of, refuse_hidden_state
from decent_dp.replica.optimizer_state import (
    check_optim_state,
    collect_optim_state,
    kind_of,
    load_optim_state,
    refuse_other_kind,
)
from decent_dp.replica.replica import DriverKind, Replica
from decent_dp.replica.snapshot import check_scaler_state, copied, first_loss_scale
from decent_dp.transport import Transport

__all__ = ["BackwardReplica"]

_LATER = "are made at the first update, one per bucket, because buckets follow the order of the first gradients."
_NO_OPTIMIZERS = (
    f"the optimizers {_LATER} Set options such as lr in optim_fn, and a schedule with lr_scheduler_fn. get_lr() returns the "
    "rate, and 0.0 until then."
)
_NO_SCHEDULERS = f"the schedulers {_LATER} Pass lr_scheduler_fn, and read the rate with get_lr()."

# Rounds of a period for whose edges process groups are made, where the optimizer has a ``pre_average_hook``.
_MOST_ROUNDS = 64


@dataclass(frozen=True)
class Layout:
    """Buckets with their optimizers, and those of the tracked momenta."""

    units: list[Unit]
    momenta: Momenta
    # Of the units, and then of the momenta.
    buckets: list[Bucket]
    # Parameter indices in the order from which the buckets were planned; None before the first update.
    order: list[int] | None


class BackwardReplica(Replica):
    """A replica whose optimizers step inside the backward, for ``DecentralizedDataParallel``.

    Args:
        scaler: a disabled one means that the loss is not scaled; with None, the first update looks for one that scales it.
        as_view: whether parameters become views of one flat buffer per bucket.

    Attributes:
        backwards: their events; buckets are planned in the order of the first gradients.
    """

    KIND = DriverKind(
        name="wrapper",
        what="the wrapper",
        model="model.module",
        entries=frozenset({"optim", "optimizer", "scheduler", "accumulate", "window", "arrived", "order"}),
        foreign_step="DecentralizedDataParallel trains: the backward has made the update, and gradients are None after it. So "
        "the step of this optimizer, its scheduler, clipping before it and accumulation by counting (if i % 4 == 3) do "
        "nothing. Remove them: pass lr_scheduler_fn and grad_clip_norm, and accumulate with no_sync() or "
        "set_accumulate_grad().",
    )

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        agreed: Agreement,
        optim_fn: OPTIM_FN_TYPE,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
        scaler: torch.amp.GradScaler | None,
        *,
        as_view: bool,
    ) -> None:
        super().__init__(model, transport, agreed)
        params = self.parameters.params
        self.scaler = check_scaler(scaler)
        # A disabled scaler states that the loss is not scaled.
        self._may_be_scaled = scaler is None
        self.policy = GradientPolicy(params, self.scaler, agreed.settings.grad_clip_norm)
        self._make_optimizer, self._make_scheduler = partial(make_optimizer, optim_fn), partial(make_scheduler, lr_scheduler_fn)
        self._as_view = as_view
        # Users keep references to these two lists, so they are changed in place.
        self.optimizers = DeferredList[Optimizer](_NO_OPTIMIZERS)
        self.schedulers = DeferredList[LRScheduler | None](_NO_SCHEDULERS)
        self.layout = Layout([], self.momenta, [], None)
        # Optimizer state that was loaded before the first update.
        self._pending_state: dict[str, Any] | None = None
        self.backwards = Backwards(params, self._backward_ended)
        self.hooks += self.backwards.hooks

    # -- autograd events ----------------------------------------------------------------------------------------------

    @_disable_dynamo
    def before_forward(self) -> bool:
        """Makes pending updates and checks the parameters; returns whether it runs inside a backward."""
        if inside_backward():
            # Activation checkpointing around the wrapper recomputes the forward, inside the outer backward.
            self.backwards.enter()
            return True
        if not self.model.training:
            self.apply_pending()
        self.backwards.recover()
        self.reached_boundary()
        if torch.is_grad_enabled() and (self.model.training or not self.life.closed):
            self.life.refuse_stopped()
            self.parameters.check_unchanged()
        return False

    def _backward_ended(self, backward: Backward) -> None:
        if backward.accumulating:
            self.backwards.window = Window.OPEN if backward.arrived else self.backwards.window
        elif not backward.raised:
            self._update(step=True)
        elif self.life.fault is None:
            self._update(step=False)  # the other workers make this round, too

    def set_accumulate(self, enable: bool) -> None:
        """After ``False`` the update of an open window is pending."""
        self.apply_pending()
        found = self.backwards
        found.accumulate = enable
        has_gradients = any(param.grad is not None for param in self.parameters.params)
        if not found.accumulating and found.window is Window.OPEN and has_gradients:
            found.window = Window.PENDING

    def apply_pending(self) -> None:
        """Completes the round of a backward that raised, and makes a pending update. Does nothing inside a backward."""
        if inside_backward():
            return
        super().apply_pending()
        with self.backwards.lock:
            self.backwards.recover()
            if self.backwards.window is Window.PENDING and self.life.fault is None:
                self._update(step=True)

    # -- updates ------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        self.life.refuse_inside("update()")
        with self.backwards.lock:
            self.backwards.recover()
            self._update(step=True)

    def _mix_only(self) -> None:
        with self.backwards.lock:
            self.momenta.rest()
            self._update(step=False, keep=True)

    def _is_unused(self) -> bool:
        begun = self.backwards.running or self._pending_state is not None or self.backwards.window is not Window.IDLE
        return super()._is_unused() and not begun

    def _grad_norm(self) -> float | None:
        norm = self.policy.last_norm
        return None if norm is None else float(norm)

    def _update(self, *, step: bool, keep: bool = False) -> None:
        """Makes a round, in which the optimizers step if ``step``. ``keep``: gradients stay."""

        def step_bucket(number: int) -> None:
            for unit in self.layout.units[number : number + 1]:  # none for a bucket of momenta
                if step:
                    unit.step()
                if not keep:
                    for param in unit.bucket.buffer.params:
                        param.grad = None

        with self._round():
            if not self.layout.units:
                self._build()
            step = step and self.policy.allows_step()
            self._exchange(stepped=step, step=step_bucket)
            if not keep:
                self.backwards.window = Window.IDLE

    # -- buckets ------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        """Makes the buckets at the first update, on all workers in the order of the first worker's gradients."""
        control, rank, round_ = self.world.control, self.world.rank, self.engine.round
        rounds = control.gather(round_)
        if len(set(rounds)) > 1:
            counts = worker_counts(rounds, control.ranks)
            raise OutOfStepError(
                f"the workers start at different rounds ({counts}): they have loaded optimizer states of different rounds, or "
                "some have loaded none. Load on every worker what was saved at the same update."
            )
        first: list[int] = broadcast_object(control, rank, list(self.backwards.order))
        whole = list(dict.fromkeys([*first, *range(len(self.parameters.params))]))

        def make() -> tuple[Layout, dict[str, Any]]:
            if self._may_be_scaled:
                refuse_scaled_loss()
            signature: dict[str, Any] = {}

            def load(optimizers: list[Optimizer], schedulers: list[LRScheduler | None]) -> None:
                signature["optimizers"] = options_of(optimizers, self.model, schedulers)
                if self._pending_state is not None:
                    load_optim_state(optimizers, schedulers, self.parameters.names_by_id, self._pending_state)

            return self._lay_out(whole, load), signature

        layout = check_consistency(control, rank, make)
        self._pending_state = None
        self._use(layout)
        self._use_buckets(layout.buckets)

    def _lay_out(self, order: list[int], load: Callable[[list[Optimizer], list[LRScheduler | None]], None]) -> Layout:
        """Returns new units; if they are to be views of flat buffers, the parameters are from now on.

        ``order`` is empty before the first update; ``load`` loads state into the optimizers and schedulers.
        """
        specs, params, limit = self.parameters.specs, self.parameters.params, self.agreed.settings.bucket_size_in_mb * MIB
        engine, units = self.engine, list[Unit]()
        for bucket in engine.lay_out(specs, params, order, limit, as_view=self._as_view) if order else ():
            named = [(slot.spec.name, params[slot.index]) for slot in bucket.buffer.plan.slots]
            optimizer = self._make_optimizer(named)
            tell_replicas([optimizer], self.agreed.peers.world_size)
            units.append(Unit(bucket, optimizer, self._make_scheduler(optimizer)))
            bucket.edit = edit_of(units[-1], self.world)
        if self.agreed.replicas.shards == 1 and any(unit.bucket.edit is not None for unit in units):
            rounds = range(min(self.engine.topology.period or 0, _MOST_ROUNDS))
            self.world.groups.make(edge for t in rounds for edge in self.engine.topology.round(t))
        optimizers = [unit.optimizer for unit in units]
        load(optimizers, [unit.scheduler for unit in units])
        if rule_for(engine.rule, optimizers) is not engine.rule:
            raise ValueError(
                "GossipAdamW(tracking=True) needs the rule here, too: DecentralizedDataParallel(..., rule=MomentumTracking())."
            )
        found = Momenta(optimizers, self.parameters.names_by_id, engine.rule)
        others = engine.lay_out(found.specs, found.tensors, order if found.specs else (), limit, after=len(units))
        return Layout(units, found, [*(unit.bucket for unit in units), *others], order or None)

    @torch.no_grad()
    def _release(self) -> None:
        """Gives each parameter its own storage again: another alignment may make a kernel sum in another order."""
        if self._as_view:
            for spec, param in zip(self.parameters.specs, self.parameters.params, strict=True):
                own = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
                param.data = own.copy_(param.detach())

    def _use(self, layout: Layout) -> None:
        """Replaces all units."""
        self.layout, self.momenta = layout, layout.momenta
        self.optimizers[:] = [unit.optimizer for unit in layout.units]
        self.schedulers[:] = [unit.scheduler for unit in layout.units]

    # -- saves and loads ----------------------------------------------------------------------------------------------

    def optim_state_dict(self) -> dict[str, Any]:
        """Returns the state of optimizers, schedulers and scaler, and the round (``optimizer_state``)."""
        self.apply_pending()
        return self._optim_state()

    def _optim_state(self) -> dict[str, Any]:
        if self.steps:
            refuse_hidden_state(self.optimizers, self.model)
        found = self._pending_state or collect_optim_state(self.optimizers, self.schedulers, self.parameters.names_by_id)
        return {**found, "scaler": None if self.scaler is None else self.scaler.state_dict(), "round": self.engine.round}

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of ``optim_state_dict``; before the first update, keeps it until then."""
        self.apply_pending()
        check_optim_state(state_dict, self.parameters.names)
        if self.scaler is not None and state_dict.get("scaler"):
            self.scaler.load_state_dict(state_dict["scaler"])  # not deferred, because the user scales the next loss with it
        if self.layout.units:
            load_optim_state(self.optimizers, self.schedulers, self.parameters.names_by_id, state_dict)
        else:
            self._pending_state = state_dict
            self.engine.round = state_dict.get("round", self.engine.round)

    def _after_save(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        if module is self.model or not prefix:  # the call for the outermost module covers its descendants
            copy_values(state, prefix)

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        if module is self.model:
            strip_prefix(state, prefix, state_names(module))
        super()._before_load(module, state, prefix)

    def _saved_entries(self) -> dict[str, Any]:
        """Returns these entries of a snapshot:

        optim         optimizers, schedulers and scaler, by parameter name (``optimizer_state``)
        optimizer     the classes of the optimizers, None without any; ``scheduler`` likewise
        accumulate, window    the window is 'idle' or 'open'
        arrived       names in the order of the first gradients, before the first update
        nested        False; versions that updated inside the backward read it
        order         names in the order from which the buckets were planned; None before the first update
        """
        names, order = self.parameters.names, self.layout.order
        return {
            "optim": self._optim_state(),
            "optimizer": kind_of(self.optimizers),
            "scheduler": kind_of(self.schedulers),
            "accumulate": self.backwards.accumulate,
            "window": self.backwards.window.value,
            "nested": False,
            "arrived": [names[i] for i in self.backwards.order] if order is None else [],
            "order": None if order is None else [names[i] for i in order],
        }

    def _check_entries(self, snapshot: Mapping[str, Any]) -> None:
        names = self.parameters.names
        for what, fits in {
            "accumulate": type(snapshot["accumulate"]) is bool,
            "window": snapshot["window"] in (Window.IDLE.value, Window.OPEN.value),
            "arrived": isinstance(snapshot["arrived"], list),
        }.items():
            if not fits:
                raise ValueError(f"this is not a snapshot of a replica: its '{what}' is {snapshot[what]!r}")
        check_optim_state(snapshot["optim"], names)
        order = snapshot["order"]
        if order is not None and sorted(order) != sorted(names):
            raise ValueError("the order of parameters in the snapshot does not name each parameter of this model once")
        unknown = [name for name in snapshot["arrived"] if name not in self.parameters.numbers]
        if unknown:
            raise ValueError(f"the snapshot has a gradient of '{unknown[0]}', which is not a trainable parameter of this model")
        check_scaler_state(self.scaler, snapshot["optim"].get("scaler"))

    def _load_optimizers(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        load_optim_state(self.optimizers, self.schedulers, self.parameters.names_by_id, snapshot["optim"], undo, exact=True)

    def _prepare_load(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> tuple[list[Bucket], Callable[[], None]]:
        """Calls the factories again, so that a snapshot fits any bucket size."""
        numbers, optim = self.parameters.numbers, snapshot["optim"]
        is_new = snapshot["order"] is None  # saved before the first update

        def load(optimizers: list[Optimizer], schedulers: list[LRScheduler | None]) -> None:
            if not is_new:
                refuse_other_kind("optimizer", snapshot["optimizer"], kind_of(optimizers))
                refuse_other_kind("scheduler", snapshot["scheduler"], kind_of(schedulers))
                load_optim_state(optimizers, schedulers, self.parameters.names_by_id, optim, exact=True)

        if not is_new and not self.layout.units:  # present units rebind their parameters themselves
            undo.callback(self._release)
        layout = self._lay_out([numbers[name] for name in snapshot["order"] or ()], load)
        layout.momenta.follow_loads(trusted=True)

        def install() -> None:
            if self.layout.units and is_new:
                self._release()
            self._use(layout)
            self._pending_state = None
            if is_new and optim["param_groups"]:
                rest = {key: value for key, value in optim.items() if key != "state"}
                self._pending_state = {**copy.deepcopy(rest), "state": copied(optim["state"])}
            self.backwards.window, self.backwards.accumulate = Window(snapshot["window"]), snapshot["accumulate"]
            self.backwards.order = {numbers[name]: None for name in snapshot["arrived"]}
            if self.scaler is not None:
                self.scaler.load_state_dict(optim["scaler"])
                first_loss_scale(self.scaler, self.parameters.params[0].device)

        return layout.buckets, install
