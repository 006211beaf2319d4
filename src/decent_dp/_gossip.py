"""The driver for the user's own optimizer, whose step ends a round.

Everything happens in a hook after the step: ``x <- step(x)``; the exchange of the previous round is mixed in; the new ``x`` is
sent while the next forward, backward and step run. It adds a difference, so the order of step and mix does not matter. There
is no hook before the step, because some frameworks run forward and backward inside ``optimizer.step(closure)``, and an exchange
could not overlap with them. A step that a GradScaler skips calls no hook, so with a scaler its ``update()`` ends the round.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from decent_dp._checks import check_number
from decent_dp._sizes import MIB
from decent_dp.arguments import check_model, check_scaler
from decent_dp.engine import Bucket
from decent_dp.faults import Tolerate, check_faults
from decent_dp.optim.tracking import rule_for
from decent_dp.replica.assignment import describe_mesh, describe_node, ranks_of_mesh, why_no_node
from decent_dp.replica.construction import Agreement, Arguments, Settings, workers_per_node
from decent_dp.replica.live import start_replica
from decent_dp.replica.module_hooks import called_first
from decent_dp.replica.momenta import Momenta
from decent_dp.replica.node_gradients import NodeGradients
from decent_dp.replica.optimizer_guards import (
    check_optimizers,
    names_by_id,
    options_of,
    params_of,
    refuse_hidden_state,
    signature_of,
)
from decent_dp.replica.optimizer_state import load_optimizer, saved_optimizer
from decent_dp.replica.replica import DriverKind, Replica
from decent_dp.replica.scaler_hook import ScalerHook, is_inner_step, refuse_other_scaler
from decent_dp.replica.shards import fsdp_modules, local, mesh_of, refuse_stale_backward, reshard
from decent_dp.replica.shares import Shares, UnevenNode
from decent_dp.replica.snapshot import (
    ENGINE_ENTRIES,
    begin_load,
    check_engine_state,
    check_scaler_state,
    copied,
    first_loss_scale,
    restore,
    settle,
)
from decent_dp.rules import Rule
from decent_dp.rules.rule import check_rule
from decent_dp.topo import Topology
from decent_dp.transport import (
    NewcomerTransport,
    NodeGroup,
    Replicas,
    Transport,
    check_encrypt,
    check_transport,
    group_of_replicas,
    inside_ddp,
    open_transport,
    ranks_in,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Gossip", "gossip"]

_log = logging.getLogger(__name__)


def gossip(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    *,
    topology: str | Topology = "base-2",
    compression: str | None = None,
    mix_every: int = 1,
    rule: Rule | None = None,
    overlap: bool = True,
    scaler: torch.amp.GradScaler | None = None,
    faults: Tolerate | None = None,
    encrypt: bool | None = None,
    bucket_size_in_mb: float = 25,
    local_world_size: int | None = None,
    process_group: ProcessGroup | None = None,
    transport: Transport | None = None,
    replica: str | None = None,
    weight: float | None = None,
) -> Gossip:
    """Makes ``model`` a replica that mixes with its neighbours after each ``optimizer.step()``. Called by all workers.

    The model stays the same module. The optimizer, ``loss.backward()``, clipping, schedulers, accumulation and logging stay
    the user's. All get rank 0's parameters and buffers. Replicas differ from then on: evaluate and save their mean.

    Args:
        model: already on its device.
        optimizer: any ``torch.optim.Optimizer`` over its parameters, or several; a round ends when each has stepped.
        topology: who mixes with whom in each round: a registered name or a ``Topology``; or 'complete:500,base-2', in turn.
        compression: None: parameters in their own dtypes. 'bfloat16'; 'int8' (a byte, relative to the distance of replicas);
            for pairs '4bit', '2bit', '1bit' (each keeps a copy per partner), 'low-rank:R' and 'low-rank:R,int8' (of rank R).
        mix_every: mix each parameter in every ``mix_every``-th round only, in turns.
        rule: how received parameters are applied, from ``decent_dp.rules``; None for plain gossip.
        overlap: exchange during the next forward, backward and step; else a step returns after its exchange is mixed in.
        scaler: the ``torch.GradScaler`` that steps the optimizers; its ``update()`` ends the round.
        faults: ``Tolerate(...)``: a worker that dies, freezes or cannot be reached is left out. None: it is an error.
        encrypt: whether traffic between workers is; the same on all. None: between nodes, and not inside one.
        bucket_size_in_mb: upper size of a bucket, the unit of exchange, in MiB; 0 for one bucket per parameter.
        local_world_size: workers on each node; None for the launcher's ``LOCAL_WORLD_SIZE``, else 1.
        process_group: the workers that mix, or those at one position of all replicas; None for all. A topology counts its
            ranks, or the replicas in the order of their first ranks.
        transport: ``InProcessTransport()`` for workers that are threads, or what ``join()`` returned.
        replica: what mixes. 'node': the workers of a node, which average their gradients in the backward (those over which the
            model is sharded, or in ``DistributedDataParallel``, are one, too). 'worker': each. None: nodes, if several have
            several workers.
        weight: samples, or tokens, per step of this worker, where they differ: replicas then count by the sum of their own,
            in mixing and in every mean. For topologies of pairs; on all workers, or None on all.

    Raises:
        ValueError, TypeError: an argument is wrong, or models, optimizers, settings or topologies differ between workers. All
            workers raise the same error.
    """
    model, inner = inside_ddp(model)
    process_group = group_of_replicas(process_group, ranks_of_mesh(model) or ranks_in(inner))
    owned, opened = open_transport(transport, process_group, faults, encrypt)
    optimizers: list[Optimizer] = []

    def check() -> Arguments:
        on_node = workers_per_node("local_world_size", local_world_size)
        check_transport(transport)
        _check_model(model)
        optimizers.extend(check_optimizers(optimizer, model))
        why = why_no_node(model, opened)
        mesh = describe_mesh(model) or describe_node(replica, topology, opened, on_node, ranks_in(inner, process_group), why)
        return Arguments(
            Settings(bucket_size_in_mb, overlap, check_scaler(scaler) is not None, compression, mix_every),
            topology,
            rule_for(check_rule(rule), optimizers),
            on_node,
            {"optimizers": signature_of(optimizers, model), "encrypt": check_encrypt(encrypt)},
            mesh,
            options_of(optimizers, model),
            check_faults(faults),
            None if weight is None else check_number("weight", weight, "a positive number of samples or tokens", above=0.0),
        )

    def make(agreed: Agreement) -> Gossip:
        shares = _shares_of(model, agreed.replicas, opened, process_group, inner)
        return Gossip(model, opened, dataclasses.replace(agreed, shares=shares), optimizers, check_scaler(scaler))

    return start_replica(model, opened, owned, check, make)


def _shares_of(model: nn.Module, replicas: Replicas, opened: Transport, process_group: Any, inner: Any) -> Shares | None:
    """The shares of the workers of this one's node, if that is a replica. ``inner``: their group, if they have one."""
    number, position = replicas.place_of(opened.rank)
    if replicas.shards == 1 or mesh_of(model) is not None:
        return None
    ranks = replicas.workers_of(number)
    joins_as = opened.rank if isinstance(opened, NewcomerTransport) else None
    group = NodeGroup(ranks, process_group if inner is None else inner, averages=inner is not None, joins_as=joins_as)
    return Shares(position, len(ranks), group)


class Gossip(Replica):
    """A replica whose rounds follow the steps of the user's optimizers; returned by ``gossip``.

    The optimizers' hooks keep it alive, so users need not keep a reference.

    Attributes:
        optimizers: the user's.
    """

    KIND = DriverKind(
        name="gossip",
        what="this Gossip",
        model="the model",
        entries=frozenset({"optim", "stepped", "taken"}),
        foreign_step="gossip() mixes after the steps of other optimizers: its own make no round. Pass it to gossip(), with all "
        "others that step. If it replaces one, close() the Gossip of that first; if it steps inside another, like SAM's, pass "
        "the one whose step() is called.",
    )

    def __init__(
        self,
        model: nn.Module,
        transport: Transport,
        agreed: Agreement,
        optimizers: Sequence[Optimizer],
        scaler: torch.amp.GradScaler | None,
    ) -> None:
        super().__init__(model, transport, agreed)
        self.optimizers, self.scaler = list(optimizers), scaler
        # Steps of each optimizer since the last round, including skipped ones, and whether any of them was taken.
        self._stepped = [0] * len(self.optimizers)
        self._taken = False
        # Since the scaler's last update: the optimizers that have stepped, and those that it has unscaled or stepped.
        self._took_step, self._scaled = set[int](), set[int]()
        # Optimizers that have been checked at their first step.
        self._checked: set[int] = set()
        # Each optimizer's parameters at the call; referenced, so that no other object gets one of their ids.
        self._params_at_call = [params_of(optimizer) for optimizer in self.optimizers]
        self._tell_optimizers(range(self.agreed.peers.world_size))
        self.momenta = Momenta(self.optimizers, self.parameters.names_by_id, agreed.rule, self.agreed.shares)
        self._use_buckets(self._lay_out())
        self.hooks += [optimizer.register_step_post_hook(self._after_step(i)) for i, optimizer in enumerate(self.optimizers)]
        self.gradients: NodeGradients | None = None
        self._uneven: UnevenNode | None = None
        if self.agreed.shares is not None and not self.agreed.shares.group.averages:
            params, limit = self.parameters.params, self.agreed.settings.bucket_size_in_mb * MIB
            self.gradients = NodeGradients(params, self.agreed.shares.group, limit, self.mates.explaining)
            self.hooks += self.gradients.hooks
        if fsdp_modules(model):
            self.hooks += refuse_stale_backward(called_first(model), self.parameters.params)
        if scaler is not None:
            callbacks = {"unscale_": self._scaler_used, "step": self._scaler_used, "update": self._scaler_updated}
            self.hooks += [ScalerHook(scaler, name, callback) for name, callback in callbacks.items()]

    # -- rounds -------------------------------------------------------------------------------------------------------

    def _after_step(self, number: int) -> Callable[..., None]:
        # torch.compile must not trace this hook when the step is compiled.
        @_disable_dynamo
        def after_step(*_: Any) -> None:
            self._has_stepped(number)

        return after_step

    def _has_stepped(self, number: int) -> None:
        optimizer = self.optimizers[number]
        if is_inner_step(optimizer):
            return
        self.life.refuse_stopped()
        if self.agreed.shares is not None:
            self._refuse_own_gradients(number)
        if number not in self._checked:
            self._checked.add(number)
            with self.life.failing():
                refuse_other_scaler(self.scaler)
        self._stepped[number] += 1
        self._took_step.add(number)
        # A GradScaler also calls a fused optimizer for a step that it skips, with ``found_inf`` set. On a GPU, reading it
        # would block the step, only for a more exact count of steps.
        found_inf: Any = getattr(optimizer, "found_inf", None)
        self._taken |= found_inf is None or found_inf.is_cuda or not bool(found_inf)
        if self.scaler is None:
            self._end_round_if_complete()
        elif min(self._stepped) > 1:
            with self.life.failing():
                raise RuntimeError(
                    "the optimizers have stepped twice without an update() of the scaler that gossip() was given, which is "
                    "what ends a round: pass the scaler that steps them, and call its update() after each step. (The state "
                    "dict functions of torch.distributed.checkpoint step an optimizer that has no state yet: call them before "
                    "gossip().)"
                )

    def _refuse_own_gradients(self, number: int) -> None:
        """Raises RuntimeError if a step was made with gradients of this worker alone, and not of its node."""
        with self.life.failing():
            self.life.refuse_inside("the step of an optimizer, whose gradients are not averaged over the node yet,")
            gradients = self.gradients
            if gradients is None or (gradients.averaged and not gradients.is_open):
                return
            grads = [param.grad for param in self._params_at_call[number] if param.grad is not None]
            if any(bool(grad.any()) for grad in grads):
                raise RuntimeError(
                    "the optimizer has stepped with gradients that were not averaged over the workers of the node: all their "
                    "backwards were inside no_sync(), or they were set by hand (torch.autograd.grad). Leave the last backward "
                    "before a step outside; with gradients of your own pass replica='worker' to gossip()."
                )

    def _scaler_used(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self._scaled |= {number for number, own in enumerate(self.optimizers) if own is optimizer}

    def _scaler_updated(self, *_: Any, **__: Any) -> None:
        for number in self._scaled - self._took_step:  # skipped by the scaler, or by the user after a look at the scaler
            self._stepped[number] += 1
        self._scaled.clear()
        self._took_step.clear()
        self._end_round_if_complete()

    def _end_round_if_complete(self) -> None:
        if all(self._stepped):
            self._make_round(step=True)

    def _mix_only(self) -> None:
        self.momenta.rest()
        self._make_round(step=False)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        if self.agreed.shares is None:
            with super().join():
                yield
            return
        if (gradients := self.gradients) is None:
            raise RuntimeError(
                "join() does not know the collectives of DistributedDataParallel inside a node: leave that out, and pass "
                "replica='node' to gossip()."
            )
        self._uneven = uneven = UnevenNode(self.agreed.shares.group)
        gradients.meet = partial(uneven.meet, "backward")
        try:
            with super().join():
                yield
        finally:
            self._uneven, gradients.meet = None, lambda: None

    def _follow_others(self) -> None:
        shares, gradients, uneven = self.agreed.shares, self.gradients, self._uneven
        if shares is None or gradients is None or uneven is None:
            return
        with self.life.failing():
            while what := uneven.meet(""):
                if what == "backward":
                    gradients.without_gradients()
                else:
                    self._taken = "taken" in what
                    self._make_round(step="step" in what, follows=True)
            self._uneven = None
            if uneven.behind:
                saved = shares.broadcast(self._saved_entries()["optim"], uneven.source)
                self._load_optimizers({"optim": saved}, contextlib.ExitStack())
                self.momenta.follow_loads(trusted=True)  # the same values, to which what is in flight belongs, too
                if self.scaler is not None:
                    self.scaler.load_state_dict(saved["scaler"])

    def _is_unused(self) -> bool:
        return super()._is_unused() and not (any(self._stepped) or self._scaled)

    def _meet_in_node(self, *, step: bool, follows: bool) -> None:
        """Inside ``join``: workers of the node that have run out make this round, too, with the values of another."""
        uneven, shares = self._uneven, self.agreed.shares
        if uneven is None or shares is None:
            return
        if not follows:
            uneven.meet(f"a {'step' if step else 'round'}{', taken' if self._taken else ''}")
        if uneven.some_are_out:
            shares.group.broadcast([*self.parameters.params, *self.momenta.whole], uneven.source)

    def _make_round(self, *, step: bool, follows: bool = False) -> None:
        """Mixes in the exchange in flight and starts the next one."""
        self.life.refuse_stopped()
        with self.life.failing(), torch.inference_mode(False):
            self._meet_in_node(step=step, follows=follows)
            self.parameters.check_unchanged()
            self._check_groups()
        with self._round():
            self._exchange(stepped=step and self._taken)
            if step:
                self._stepped, self._taken = [0] * len(self.optimizers), False
                if self.gradients is not None:
                    self.gradients.averaged = False
        self.reached_boundary()

    def _check_groups(self) -> None:
        for optimizer, had in zip(self.optimizers, self._params_at_call, strict=True):
            has = params_of(optimizer)
            if list(map(id, has)) == list(map(id, had)):
                continue
            kind = type(optimizer).__name__
            what = f"{kind} had {len(had)} parameters when gossip() was called and has {len(has)} now (add_param_group?)"
            if len(has) == len(had):
                number = next(i for i, (now, before) in enumerate(zip(has, had, strict=True)) if now is not before)
                what = f"parameter {number} of {kind} was replaced by another object after gossip() was called"
            raise RuntimeError(
                f"{what}: it would train and not mix. Call gossip() after all groups are added, and change values in place "
                "(param.copy_ under torch.no_grad)."
            )

    def _lay_out(self) -> list[Bucket]:
        """Returns buckets in reverse registration order, the usual order of gradients, equal on all workers."""
        specs, limit = self.parameters.specs, self.agreed.settings.bucket_size_in_mb * MIB
        buckets = self.engine.lay_out(specs, self.parameters.locate(), range(len(specs))[::-1], limit)
        found = self.momenta
        order = range(len(found.specs))[::-1]
        return buckets + self.engine.lay_out(found.specs, found.tensors, order, limit, after=len(buckets))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Context manager around the forwards and backwards of a window but the last: their gradients stay this worker's.

        As DDP's, for replicas that are nodes. Where each worker is a replica it changes nothing.
        """
        return contextlib.nullcontext() if self.gradients is None else self.gradients.no_sync()

    def _has_own_gradients(self) -> bool:
        # Where the user has averaged them with DDP, it is not known.
        return self.agreed.shares is not None and (self.gradients is None or self.gradients.is_open)

    def average_(self) -> None:
        """Replaces every replica by the mean of all, including floating-point buffers. Called by all workers.

        Raises:
            OutOfStepError: the workers have made different numbers of rounds; on all of them.
            NonFiniteError: a replica holds a NaN or an infinity; on all of them.
        """
        self.become_mean("average_")

    def flush(self) -> None:
        """Finishes the exchange in flight and mixes it in now, instead of after the next step. Called by all workers.

        Raises:
            OutOfStepError: the workers have made different numbers of rounds; on all of them.
        """
        self.begin_collective("flush")
        if self.mean.backup is not None:
            raise RuntimeError("flush() was called inside averaged(), where the replica has other values: call it after it.")
        settle(self)

    # -- saves and loads ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Finishes what is in flight, mixes it in, and returns the round, and the state of the rule and the compression.

        Called by all workers after the same step; it waits for messages that are on their way. Call it before the state dicts
        of model and optimizers, with which a run resumes exactly. Every worker saves its own; tensors are copies. With
        ``MomentumTracking`` the corrections begin with zero then; ``decent_dp.save`` keeps them.

        Raises:
            PeerLostError, PeerTimeoutError: a worker that this one exchanges with is gone or silent.
        """
        self.reach_step_boundary("state_dict")
        if self.mean.backup is not None:
            raise RuntimeError("state_dict() was called inside averaged(), where the model has other values: call it after it.")
        settle(self)
        found: dict[str, Any] = copied(
            {"driver": self.KIND.name, "steps": self.steps, **self.engine.state_dict(), **self._progress()}
        )
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes from the result of ``state_dict``. Called by all workers, after model and optimizers were loaded.

        The present exchange in flight is dropped. So is one that an older version has saved, which does not change the mean.

        Raises:
            ValueError: the state does not fit; all workers raise the same error, and nothing changes.
            OutOfStepError: the workers' states are of different rounds; likewise.
        """
        self.life.refuse_in_join("load_state_dict", "before")
        self.life.refuse_before_member("load_state_dict")
        self.world.control.begin("load_state_dict", self.engine.round)
        begin_load(self, "load_state_dict")

        def check() -> None:
            wanted = ENGINE_ENTRIES | {"stepped", "taken"}
            if not isinstance(state_dict, dict) or not wanted <= state_dict.keys() or state_dict["driver"] != self.KIND.name:
                raise ValueError("load_state_dict takes what Gossip.state_dict() returned: something else was given")
            check_engine_state(self, state_dict)
            self._check_progress(state_dict)
            self._refuse_open_update("load_state_dict")

        restore(self, state_dict, check)

    def reach_step_boundary(self, what: str) -> None:
        super().reach_step_boundary(what)
        self._refuse_open_update(what)

    def _refuse_open_update(self, what: str) -> None:
        if self._scaled:  # no state dict contains the scaler's findings
            raise RuntimeError(
                f"{what} was called between a step (or unscale_) of the GradScaler and its update(): call it after update()."
            )

    def _progress(self) -> dict[str, Any]:
        return {"stepped": list(self._stepped), "taken": self._taken}

    def _check_progress(self, state: Mapping[str, Any]) -> None:
        stepped, taken = state["stepped"], state["taken"]
        if not isinstance(stepped, list) or any(type(count) is not int for count in stepped) or type(taken) is not bool:
            raise ValueError(f"this is no state of a Gossip: its 'stepped' is {brief(stepped)}, and its 'taken' {brief(taken)}")
        if len(stepped) != len(self.optimizers):
            raise ValueError(f"this was saved with {len(stepped)} optimizers, and there are {len(self.optimizers)} now")

    def _saved_entries(self) -> dict[str, Any]:
        """Returns these entries of a snapshot:

        optim     {"optimizers": a list (``replica.optimizers``), "scaler": its state or None}
        stepped   steps of each optimizer since the last round
        taken     whether any of them was taken
        """
        if self.steps:
            refuse_hidden_state(self.optimizers, self.model)
        names = names_by_id(self.model)
        optimizers = [saved_optimizer(optimizer, names) for optimizer in self.optimizers]
        scaler = None if self.scaler is None else self.scaler.state_dict()
        return {"optim": {"optimizers": optimizers, "scaler": scaler}, **self._progress()}

    def _check_entries(self, snapshot: Mapping[str, Any]) -> None:
        self._check_progress(snapshot)
        self._refuse_open_update("load")
        check_scaler_state(self.scaler, snapshot["optim"].get("scaler"))

    def _load_optimizers(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        for optimizer, saved in zip(self.optimizers, snapshot["optim"]["optimizers"], strict=True):
            load_optimizer(optimizer, names_by_id(self.model), saved, undo)

    def _prepare_load(self, snapshot: Mapping[str, Any], undo: contextlib.ExitStack) -> tuple[list[Bucket], Callable[[], None]]:
        if "optim" in snapshot:  # missing in the result of state_dict(): the user loads the optimizers
            self._load_optimizers(snapshot, undo)
        self.momenta.follow_loads(trusted=True)

        def install() -> None:
            self._stepped, self._taken = list(snapshot["stepped"]), bool(snapshot["taken"])
            if self.gradients is not None:
                self.gradients.is_open, self.gradients.averaged = bool(snapshot.get("open")), True
            self._scaled.clear()
            self._took_step.clear()
            if "optim" in snapshot and self.scaler is not None:
                self.scaler.load_state_dict(snapshot["optim"]["scaler"])
                first_loss_scale(self.scaler, self.parameters.params[0].device)

        return self._lay_out(), install

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError("a Gossip holds connections and cannot be copied: copy the model.")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a Gossip holds connections and cannot be pickled: save its state_dict().")

    def __repr__(self) -> str:
        kinds = ", ".join(type(optimizer).__name__ for optimizer in self.optimizers)
        names = f"{type(self.model).__name__}, {kinds}, rank={self.world.rank}, topology={self.engine.topology!r}"
        return f"Gossip({names}, {self._describe_replica()})"


def _check_model(model: nn.Module) -> None:
    """As ``check_model``; two trainable parameters that share memory, which would be mixed twice, are a ValueError, too."""
    check_model(model, shards=True)
    reshard(fsdp_modules(model))
    spans = []
    for name, tensor in model.named_parameters():
        param = local(tensor)
        if tensor.requires_grad and param.numel():
            last = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            spans.append((str(param.device), param.data_ptr(), param.data_ptr() + (last + 1) * param.itemsize, name))
    spans.sort()
    for (device, _, end, before), (other, start, _, name) in itertools.pairwise(spans):
        if device == other and start < end:
            raise ValueError(
                f"parameters '{before}' and '{name}' share memory, and would be mixed twice. Tie them by using one parameter "
                "in both places, or give each its own (param.data = param.data.clone())."
            )
