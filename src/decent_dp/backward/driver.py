"""The wrapper's driver: turns autograd's events into updates.

Every backward is one update, unless gradients are being accumulated. The update is made at the end of the backward, when all
gradients are there, and hooks of the user's have seen them.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp._sizes import MIB
from decent_dp.arguments import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, check_scaler, make_optimizer, make_scheduler
from decent_dp.backward.scaled import refuse_scaled_loss
from decent_dp.backward.state_dicts import copy_values, strip_prefix
from decent_dp.backward.units import DeferredList, Unit, edit_of
from decent_dp.engine import Bucket
from decent_dp.errors import OutOfStepError
from decent_dp.gradients import EndOfBackward, GradientPolicy, tensors_in
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
from decent_dp.replica.replica import Replica
from decent_dp.replica.snapshot import check_scaler_state, copied, first_loss_scale
from decent_dp.transport import Transport

__all__ = ["BackwardReplica", "Window"]

_LATER = "are made at the first update, one per bucket, because buckets follow the order of the first gradients."
_NO_OPTIMIZERS = (
    f"the optimizers {_LATER} Set options such as lr in optim_fn, and a schedule with lr_scheduler_fn. get_lr() returns the "
    "rate, and 0.0 until then."
)
_NO_SCHEDULERS = f"the schedulers {_LATER} Pass lr_scheduler_fn, and read the rate with get_lr()."

# Rounds of a period for whose edges process groups are made, where the optimizer has a ``pre_average_hook``.
_MOST_ROUNDS = 64

_current_task: Callable[[], int] = torch._C._current_graph_task_id


class Window(enum.Enum):
    """The state of gradient accumulation."""

    # No gradients. -> OPEN: a backward ends while gradients are accumulated.
    IDLE = "idle"
    # More gradients may come. -> PENDING: set_accumulate_grad(False). -> IDLE: a backward without accumulation, or zero_grad.
    OPEN = "open"
    # The window is complete. -> IDLE: the next backward joins it and updates, or an observer updates first.
    PENDING = "pending"


@dataclass
class _Backward:
    """A running backward.

    Attributes:
        end: reference to its end callback.
        accumulating: whether gradients were accumulated at its start; it may end, or raise, after ``no_sync`` has ended.
        expected: whether it reaches parameters, so that it is an update even if it raises before the first gradient.
        arrived: whether a gradient has arrived.
    """

    end: weakref.ref[EndOfBackward]
    accumulating: bool
    expected: bool
    arrived: bool = False

    @property
    def raised(self) -> bool:
        """Whether it has raised: the engine has dropped the end callback without calling it."""
        return self.end() is None


@dataclass(frozen=True)
class _Layout:
    """Buckets with their optimizers, and those of the tracked momenta.

    Attributes:
        buckets: of the units, and then of the momenta.
        order: parameter indices in the order from which the buckets were planned; None before the first update.
    """

    units: list[Unit]
    momenta: Momenta
    buckets: list[Bucket]
    order: list[int] | None


class BackwardReplica(Replica):
    """A replica whose optimizers step inside the backward, for ``DecentralizedDataParallel``.

    Args:
        optim_fn, lr_scheduler_fn: called once for each bucket, at the first update.
        scaler: a disabled one means that the loss is not scaled; with None, the first update looks for one that scales it.
        as_view: whether parameters become views of one flat buffer per bucket.

    Attributes:
        units: buckets with their optimizers; empty before the first update.
        optimizers, schedulers: one per bucket.
        window: see ``Window``.
        accumulate: whether gradients are kept for a later backward (``set_accumulate_grad``).
        first_order: parameter indices in the order of the first gradients, from which buckets are planned.
    """

    KIND = "wrapper"
    WHAT = "the wrapper"
    ENTRIES = frozenset({"optim", "optimizer", "scheduler", "accumulate", "window", "arrived", "order"})
    MODEL = "model.module"
    FOREIGN_STEP = (
        "DecentralizedDataParallel trains: the backward has made the update, and gradients are None after it. So the step of "
        "this optimizer, its scheduler, clipping before it and accumulation by counting (if i % 4 == 3) do nothing. Remove "
        "them: pass lr_scheduler_fn and grad_clip_norm, and accumulate with no_sync() or set_accumulate_grad()."
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
        self._optim_fn, self._lr_scheduler_fn, self._as_view = optim_fn, lr_scheduler_fn, as_view
        self.units: list[Unit] = []
        # Users keep references to these two lists, so they are changed in place.
        self.optimizers = DeferredList[Optimizer](_NO_OPTIMIZERS)
        self.schedulers = DeferredList[LRScheduler | None](_NO_SCHEDULERS)
        self._order: list[int] | None = None
        # Optimizer state that was loaded before the first update.
        self._pending_state: dict[str, Any] | None = None
        self.window = Window.IDLE
        self.accumulate = False
        self._paused = 0
        # On a GPU, hooks of CPU and CUDA parameters run in different threads.
        self._lock = threading.RLock()
        self._backward: _Backward | None = None
        self.first_order: dict[int, None] = {}

        me = weakref.ref(self)
        untyped: Any = params  # torch does not type its hooks
        self.hooks += [p.register_post_accumulate_grad_hook(_gradient_hook(me, i)) for i, p in enumerate(untyped)]

    # -- autograd events ----------------------------------------------------------------------------------------------

    @_disable_dynamo
    def before_forward(self) -> bool:
        """Makes pending updates and checks the parameters; returns whether it runs inside a backward."""
        if _current_task() != -1:
            # Activation checkpointing around the wrapper recomputes the forward, inside the outer backward.
            self._enter_backward()
            return True
        if not self.model.training:
            self.apply_pending()
        self._recover()
        self.reached_boundary()
        if torch.is_grad_enabled() and (self.model.training or not self.life.closed):
            self.life.refuse_stopped()
            self.parameters.check_unchanged()
        return False

    @_disable_dynamo
    def after_forward(self, output: Any) -> None:
        """Registers hooks on the output, so that a backward that raises before its first gradient is noticed."""
        me = weakref.ref(self)

        def hook(_: Tensor) -> None:
            replica = me()
            if replica is not None:
                replica._enter_backward()

        tensor: Any
        for tensor in tensors_in(output):
            # A hook on a leaf would stay for ever.
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(hook)

    def _enter_backward(self) -> _Backward:
        """Records the running backward and registers the callback at its end."""
        with self._lock:
            self._recover()
            if self._backward is None:
                me = weakref.ref(self)
                end = EndOfBackward(lambda: replica._end_backward() if (replica := me()) else None)
                end.queue()
                accumulating = self.accumulate or self._paused > 0
                self._backward = _Backward(weakref.ref(end), accumulating, self._reaches_parameters())
            return self._backward

    def _reaches_parameters(self) -> bool:
        """Whether the running backward accumulates gradients in parameters (torch.autograd.grad does not)."""
        edges = (torch.autograd.graph.get_gradient_edge(param) for param in self.parameters.params if param.requires_grad)
        try:
            return any(torch._C._will_engine_execute_node(edge.node) for edge in edges)
        except RuntimeError:
            return False  # torch raises this for a leaf among the inputs of torch.autograd.grad

    def _gradient(self, index: int) -> None:
        """Called when a parameter's gradient has been accumulated."""
        backward = self._backward
        if backward is None or backward.raised:
            backward = self._enter_backward()  # the first gradient of this backward
        backward.arrived = True
        if not self.units:
            self.first_order.setdefault(index)

    def _end_backward(self) -> None:
        """Called at the end of the outermost backward, if it has not raised."""
        with self._lock:
            backward, self._backward = self._backward, None
            if backward is None or not backward.arrived:
                return  # torch.autograd.grad, or a loss without parameters
            if backward.accumulating:
                self.window = Window.OPEN
            else:
                self._update(step=True)

    # -- accumulation -------------------------------------------------------------------------------------------------

    def set_accumulate(self, enable: bool) -> None:
        """Sets whether gradients are kept for a later backward."""
        self.apply_pending()
        self.accumulate = enable
        has_gradients = any(param.grad is not None for param in self.parameters.params)
        if not (enable or self._paused) and self.window is Window.OPEN and has_gradients:
            self.window = Window.PENDING

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager in which gradients are kept for a later backward."""
        self.apply_pending()
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def apply_pending(self) -> None:
        """Completes the round of a backward that raised, and makes a pending update. Does nothing inside a backward."""
        if _current_task() != -1:
            return
        super().apply_pending()
        with self._lock:
            self._recover()
            if self.window is Window.PENDING and self.life.fault is None:
                self._update(step=True)

    def _recover(self) -> None:
        """If the last backward raised, completes its round without a step, because the other workers make that round too."""
        with self._lock:
            backward = self._backward
            if backward is None:
                return
            if _current_task() == -1 and (end := backward.end()) is not None:
                end.leave_outer()
                del end
            if not backward.raised:
                return
            self._backward = None
            if backward.accumulating:
                self.window = Window.OPEN if backward.arrived else self.window
            elif (backward.arrived or backward.expected) and self.life.fault is None:
                self._update(step=False)

    def discarded(self) -> None:
        """Called when the user has cleared the gradients."""
        if self.window is Window.OPEN:
            self.window = Window.IDLE

    # -- updates ------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Makes one update with the present gradients."""
        self.life.refuse_inside("update()")
        with self._lock:
            self._recover()
            self._update(step=True)

    def _mix_only(self) -> None:
        """Makes one round without a step; gradients stay."""
        with self._lock:
            self.momenta.rest()
            self._update(step=False, keep=True)

    @property
    def unused(self) -> bool:
        begun = self._backward is not None or self.window is not Window.IDLE or self._pending_state is not None
        return super().unused and not begun

    @property
    def grad_norm(self) -> float | None:
        norm = self.policy.last_norm
        return None if norm is None else float(norm)

    def _update(self, *, step: bool, keep: bool = False) -> None:
        """Makes a round, in which the optimizers step if ``step``. ``keep``: gradients stay."""

        def step_bucket(number: int) -> None:
            for unit in self.units[number : number + 1]:  # none for a bucket of momenta
                if step:
                    unit.step()
                if not keep:
                    for param in unit.buffer.params:
                        param.grad = None

        with self._round():
            if not self.units:
                self._build()
            step = step and self.policy.allows_step()
            self._exchange(stepped=step, step=step_bucket)
            if not keep:
                self.window = Window.IDLE

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
        first: list[int] = broadcast_object(control, rank, list(self.first_order))
        whole = list(dict.fromkeys([*first, *range(len(self.parameters.params))]))

        def make() -> tuple[_Layout, dict[str, Any]]:
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
        self.use_buckets(layout.buckets)

    def _lay_out(self, order: list[int], load: Callable[[list[Optimizer], list[LRScheduler | None]], None]) -> _Layout:
        """Returns new units; if they are to be views of flat buffers, the parameters are from now on.

        Args:
            order: parameter indices in bucket order; empty before the first update.
            load: loads state into the optimizers and schedulers.

        Raises:
            TypeError, ValueError: a factory returns something else than an optimizer or a scheduler of these parameters, the
                momentum of an optimizer is not known, or one asks for the rule that the wrapper was not given.
        """
        specs, params, limit = self.parameters.specs, self.parameters.params, self.settings.bucket_size_in_mb * MIB
        engine, units = self.engine, list[Unit]()
        for bucket in engine.lay_out(specs, params, order, limit, as_view=self._as_view) if order else ():
            named = [(slot.spec.name, params[slot.index]) for slot in bucket.buffer.plan.slots]
            optimizer = make_optimizer(self._optim_fn, named)
            tell_replicas([optimizer], self.peers.world_size)
            units.append(Unit(bucket, optimizer, make_scheduler(self._lr_scheduler_fn, optimizer)))
            bucket.edit = edit_of(units[-1], self.world)
        if self.replicas.shards == 1 and any(unit.bucket.edit is not None for unit in units):
            rounds = range(min(self.topology.period or 0, _MOST_ROUNDS))
            self.world.make_groups(edge for t in rounds for edge in self.topology.round(t))
        optimizers = [unit.optimizer for unit in units]
        load(optimizers, [unit.scheduler for unit in units])
        if rule_for(engine.rule, optimizers) is not engine.rule:
            raise ValueError(
                "GossipAdamW(tracking=True) needs the rule here, too: DecentralizedDataParallel(..., rule=MomentumTracking())."
            )
        found = Momenta(optimizers, self.parameters.names_by_id, engine.rule)
        others = engine.lay_out(found.specs, found.tensors, order if found.specs else (), limit, after=len(units))
        return _Layout(units, found, [*(unit.bucket for unit in units), *others], order or None)

    @torch.no_grad()
    def _release(self) -> None:
        """Gives each parameter its own storage again.

        A resumed run is exact only so: another alignment may make a kernel sum in another order.
        """
        if self._as_view:
            for spec, param in zip(self.parameters.specs, self.parameters.params, strict=True):
                own = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
                param.data = own.copy_(param.detach())

    def _use(self, layout: _Layout) -> None:
        """Replaces all units."""
        self.units, self.momenta, self._order = layout.units, layout.momenta, layout.order
        self.optimizers[:] = [unit.optimizer for unit in self.units]
        self.schedulers[:] = [unit.scheduler for unit in self.units]

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
        if self.units:
            load_optim_state(self.optimizers, self.schedulers, self.parameters.names_by_id, state_dict)
        else:
            self._pending_state = state_dict
            self.engine.round = state_dict.get("round", self.engine.round)

    def _after_save(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Replaces views of buckets, which would change with the next step, by copies."""
        if module is self.model or not prefix:  # the call for the outermost module covers its descendants
            copy_values(state, prefix)

    def _before_load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """As the base class; also strips prefixes from the keys of a wrapper's state dict."""
        if module is self.model:
            strip_prefix(state, prefix, state_names(module))
        super()._before_load(module, state, prefix)

    def saved_entries(self) -> dict[str, Any]:
        """Returns these entries of a snapshot:

        optim         optimizers, schedulers and scaler, by parameter name (``optimizer_state``)
        optimizer     the classes of the optimizers, None without any; ``scheduler`` likewise
        accumulate, window    the window is 'idle' or 'open'
        arrived       as the attribute ``first_order``
        nested        False; versions that updated inside the backward read it
        order         names in the order from which the buckets were planned; None before the first update
        """
        names = self.parameters.names
        return {
            "optim": self._optim_state(),
            "optimizer": kind_of(self.optimizers),
            "scheduler": kind_of(self.schedulers),
            "accumulate": self.accumulate,
            "window": self.window.value,
            "nested": False,
            "arrived": [names[i] for i in self.first_order] if self._order is None else [],
            "order": None if self._order is None else [names[i] for i in self._order],
        }

    def check_entries(self, snapshot: Mapping[str, Any]) -> None:
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
            raise ValueError(
                "the order of the parameters in the snapshot does not name each trainable parameter of this model once"
            )
        unknown = [name for name in snapshot["arrived"] if name not in self.parameters.numbers]
        if unknown:
            raise ValueError(f"the snapshot has a gradient of '{unknown[0]}', which is not a trainable parameter of this model")
        check_scaler_state(self.scaler, snapshot["optim"].get("scaler"))

    def load_optimizers(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        load_optim_state(self.optimizers, self.schedulers, self.parameters.names_by_id, snapshot["optim"], undo, exact=True)

    def prepare_load(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> tuple[list[Bucket], Callable[[], None]]:
        """Calls the factories again, so that a snapshot fits any bucket size."""
        numbers, optim = self.parameters.numbers, snapshot["optim"]
        is_new = snapshot["order"] is None  # saved before the first update

        def load(optimizers: list[Optimizer], schedulers: list[LRScheduler | None]) -> None:
            if not is_new:
                refuse_other_kind("optimizer", snapshot["optimizer"], kind_of(optimizers))
                refuse_other_kind(
                    "scheduler",
                    snapshot["scheduler"],
                    kind_of(schedulers),
                )
                load_optim_state(optimizers, schedulers, self.parameters.names_by_id, optim, exact=True)

        if not is_new and not self.units:  # present units rebind their parameters themselves
            undo.callback(self._release)
        layout = self._lay_out([numbers[name] for name in snapshot["order"] or ()], load)
        layout.momenta.follow_loads(trusted=True)

        def install() -> None:
            if self.units and is_new:
                self._release()
            self._use(layout)
            self._pending_state = None
            if is_new and optim["param_groups"]:
                rest = {key: value for key, value in optim.items() if key != "state"}
                self._pending_state = {**copy.deepcopy(rest), "state": copied(optim["state"])}
            self.window, self.accumulate = Window(snapshot["window"]), snapshot["accumulate"]
            self.first_order = {numbers[name]: None for name in snapshot["arrived"]}
            if self.scaler is not None:
                self.scaler.load_state_dict(optim["scaler"])
                first_loss_scale(self.scaler, self.parameters.params[0].device)

        return layout.buckets, install


def _gradient_hook(replica: weakref.ref[BackwardReplica], index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        target = replica()
        if target is not None:
            target._gradient(index)

    return hook
