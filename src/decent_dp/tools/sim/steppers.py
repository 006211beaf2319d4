"""Optimizer steps of all replicas.

An elementwise optimizer can step all replicas at once, on the stacked tensors. Of any other there is one per replica, and also
with a scaler, which may skip the step of some replicas.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from decent_dp.arguments import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, make_optimizer, make_scheduler
from decent_dp.gradients import GradientPolicy
from decent_dp.optim import AccumAdam, AccumAdamW, GossipAdamW
from decent_dp.optim.tracking import Tracking
from decent_dp.tools.sim.absences import Faults
from decent_dp.tools.sim.losses import Gradients
from decent_dp.tools.sim.stack import Stack

__all__ = ["PerReplica", "Shared", "Stepper", "make_stepper"]

# Known to work element by element, and alike on any shape. Subclasses may not.
_STACKABLE = {
    AccumAdam,
    AccumAdamW,
    GossipAdamW,
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
}


class Stepper(ABC):
    """Takes the replicas' steps, of those that take part.

    What counts steps (an optimizer's count for its bias correction, a schedule) is one for all: it goes on for a replica that
    is away, whose values stand still.

    Attributes:
        optimizers: one, or one per replica.
        schedulers: theirs; empty if there are none.
        steps: optimizer steps that each replica has taken.
        tracked: of the optimizers, if their momenta are tracked.
    """

    def __init__(
        self, optimizers: list[Optimizer], lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None, n: int, faults: Faults
    ) -> None:
        self.optimizers = optimizers
        self._faults = faults
        made = [make_scheduler(lr_scheduler_fn, optimizer) for optimizer in optimizers]
        self.schedulers: list[LRScheduler] = [scheduler for scheduler in made if scheduler is not None]
        self.steps = [0] * n
        self.tracked: list[Tracking] = []

    @abstractmethod
    def step(self, gradients: Gradients) -> None:
        """Clips and steps; a replica without any gradient takes no step."""

    def scales(self) -> Tensor | None:
        """The factors of the replicas' losses in the backward, (n,); None for none."""
        return None

    def track(self, entry: str | None) -> dict[str, Tensor]:
        """Tracks the momenta of the optimizers (``optim.tracking``), and returns them by parameter name, (n, *shape)."""
        self.tracked = [Tracking(optimizer, entry) for optimizer in self.optimizers]
        return self._stacked_momenta()

    @abstractmethod
    def _stacked_momenta(self) -> dict[str, Tensor]: ...

    def catch_up(self, i: int, other: int) -> None:  # noqa: B027
        """Called when replica i is back: its counts become those of a replica that was not away."""


def make_stepper(
    stack: Stack,
    optim_fn: OPTIM_FN_TYPE,
    lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
    scaler: torch.amp.GradScaler | None,
    max_norm: float,
    faults: Faults,
    *,
    share: bool,
    shares: Sequence[float | None],
) -> Stepper:
    """The stepper of these replicas.

    Args:
        share: one optimizer for all, if it is known to work element by element.
        shares: of the replicas in the weight of all (``GossipAdamW.set_replicas``).
    """
    if scaler is None and share:
        named = [(name, param) for name, param in stack.template.named_parameters() if param.requires_grad]
        optimizer = _make_optimizer(optim_fn, named)
        hooks: list[Any] = [
            *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
            *getattr(optimizer, "_optimizer_step_post_hooks", {}).values(),
        ]
        known = all(getattr(hook, "__module__", "").startswith("decent_dp.optim") for hook in hooks)
        unequal = isinstance(optimizer, GossipAdamW) and shares[0] is not None
        if type(optimizer) in _STACKABLE and known and not unequal:
            _stack_parameters(optimizer, {id(param): stack.params[name] for name, param in named}, stack.n)
            if isinstance(optimizer, GossipAdamW):
                optimizer.set_replicas(stack.n, stacked=True)
            return Shared(stack, optimizer, lr_scheduler_fn, max_norm, faults)
    params = [[Parameter(param.detach()[i]) for param in stack.params.values()] for i in range(stack.n)]
    optimizers = [_make_optimizer(optim_fn, list(zip(stack.names, own, strict=True))) for own in params]
    for optimizer, own_share in zip(optimizers, shares, strict=True):
        if isinstance(optimizer, GossipAdamW):
            optimizer.set_replicas(stack.n, own_share)
    return PerReplica(stack.names, params, optimizers, lr_scheduler_fn, scaler, max_norm, faults)


def _make_optimizer(optim_fn: OPTIM_FN_TYPE, named: Sequence[tuple[str, Parameter]]) -> Optimizer:
    optimizer = make_optimizer(optim_fn, named)
    if getattr(optimizer, "pre_average_hook", None) is not None:
        raise TypeError(
            f"optim_fn returned a {type(optimizer).__name__} with a pre_average_hook, which changes what is mixed: the "
            "simulator calls no such hook. Use an optimizer without one."
        )
    return optimizer


def _stack_parameters(optimizer: Optimizer, stacked: dict[int, Parameter], n: int) -> None:
    """Puts the stacked parameters in the place of those that the optimizer was made for."""
    for group in optimizer.param_groups:
        group["params"] = [stacked[id(param)] for param in group["params"]]
    for param in list(optimizer.state):
        # Adagrad makes its state at construction. The replicas' steps are one count.
        optimizer.state[stacked[id(param)]] = {
            key: value.expand(n, *value.shape).clone() if isinstance(value, Tensor) and key != "step" else value
            for key, value in optimizer.state.pop(param).items()
        }


class Shared(Stepper):
    """One optimizer on the stacked parameters."""

    def __init__(
        self,
        stack: Stack,
        optimizer: Optimizer,
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
        max_norm: float,
        faults: Faults,
    ) -> None:
        super().__init__([optimizer], lr_scheduler_fn, stack.n, faults)
        self._named, self._params, self._max_norm = stack.params, list(stack.params.values()), max_norm

    def _stacked_momenta(self) -> dict[str, Tensor]:
        found = {id(param): momentum for tracking in self.tracked for param, momentum in tracking.momenta()}
        return {name: found[id(param)] for name, param in self._named.items()}

    def step(self, gradients: Gradients) -> None:
        assert gradients.stacked is not None
        used = [gradient for gradient in gradients.stacked if gradient is not None]
        if not used:
            return
        if self._max_norm > 0:
            _clip(used, self._max_norm)
        for param, gradient in zip(self._params, gradients.stacked, strict=True):
            param.grad = gradient
        with self._faults.standing_still(self._named, *self.optimizers[0].state.values()):
            self.optimizers[0].step()
        for scheduler in self.schedulers:
            scheduler.step()
        for param in self._params:
            param.grad = None
        self.steps = [count + (i not in self._faults.away) for i, count in enumerate(self.steps)]


@torch.no_grad()
def _clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Clips each replica's part of the stacked gradients as ``torch.nn.utils.clip_grad_norm_``: by the factor
    max_norm / (norm + 1e-6), if that is less than 1."""
    norms = [torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in gradients]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), dim=0)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device).view(-1, *[1] * (gradient.ndim - 1)))


class PerReplica(Stepper):
    """One optimizer, and one copy of the scaler if there is one, per replica, on views of the stacked parameters."""

    def __init__(
        self,
        names: Sequence[str],
        params: list[list[Parameter]],
        optimizers: list[Optimizer],
        lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None,
        scaler: torch.amp.GradScaler | None,
        max_norm: float,
        faults: Faults,
    ) -> None:
        super().__init__(optimizers, lr_scheduler_fn, len(params), faults)
        self._names, self._params = names, params
        self._policies = [GradientPolicy(own, copy.deepcopy(scaler), max_norm) for own in params]

    def scales(self) -> Tensor | None:
        one = torch.ones((), dtype=torch.float32, device=self._params[0][0].device)
        scales = [policy.scaler.scale(one) for policy in self._policies if policy.scaler is not None]
        return torch.stack(scales) if scales else None

    def _stacked_momenta(self) -> dict[str, Tensor]:
        found = {id(param): momentum for tracking in self.tracked for param, momentum in tracking.momenta()}
        stacked = {}
        for name, of_replicas in zip(self._names, zip(*self._params, strict=True), strict=True):
            momenta = [found[id(param)] for param in of_replicas]
            stacked[name] = torch.stack(momenta)
            for momentum, row in zip(momenta, stacked[name], strict=True):
                momentum.data = row
        return stacked

    def step(self, gradients: Gradients) -> None:
        for i in self._faults.present:
            params = self._params[i]
            for param, gradient in zip(params, gradients.of_replica(i), strict=True):
                param.grad = gradient
            if self._policies[i].allows_step():
                self.optimizers[i].step()
                if self.schedulers:
                    self.schedulers[i].step()
                self.steps[i] += 1
            for param in params:
                param.grad = None

    def catch_up(self, i: int, other: int) -> None:
        own, like = self.optimizers[i], self.optimizers[other]
        for group, wanted in zip(own.param_groups, like.param_groups, strict=True):
            group.update({key: copy.deepcopy(value) for key, value in wanted.items() if key != "params"})
        for param, pattern in zip(self._params[i], self._params[other], strict=True):
            if param in own.state:
                counts = {key: value for key, value in like.state[pattern].items() if _is_count(key, value, param)}
                own.state[param].update(copy.deepcopy(counts))
        if self.schedulers:
            self.schedulers[i].load_state_dict(copy.deepcopy(self.schedulers[other].state_dict()))


def _is_count(key: str, value: Any, param: Tensor) -> bool:
    """Whether an entry of an optimizer's state counts steps: a number, or a tensor that is one where the parameter is not."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and (param.ndim > 0 or key == "step")
    return isinstance(value, (int, float))
