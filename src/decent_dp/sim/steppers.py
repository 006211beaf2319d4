"""Optimizer steps of all replicas, each as it would take it on its own.

An optimizer that treats every element by itself can step all replicas at once, on the stacked tensors. Any other, and any with
a scaler, which may let some replicas step and others not, is made once a replica.
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

from decent_dp.arguments import LR_SCHEDULER_FN_TYPE, OPTIM_FN_TYPE, check_factories, make_optimizer, make_scheduler
from decent_dp.gradients import GradientPolicy
from decent_dp.optim import AccumAdam, AccumAdamW
from decent_dp.sim.gradients import Found
from decent_dp.sim.stack import Stack

__all__ = ["Factories", "OneEach", "Shared", "Stepper"]

# Known to treat every element by itself, and parameters of any shape alike. Subclasses may not.
_BY_ELEMENT = {
    AccumAdam,
    AccumAdamW,
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


class Factories:
    """The user's factories.

    Args:
        optim_fn: makes an optimizer from (name, parameter) pairs.
        lr_scheduler_fn: makes a scheduler for an optimizer; None for none.
    """

    def __init__(self, optim_fn: OPTIM_FN_TYPE, lr_scheduler_fn: LR_SCHEDULER_FN_TYPE | None) -> None:
        check_factories(optim_fn, lr_scheduler_fn)
        self._optim_fn, self._lr_scheduler_fn = optim_fn, lr_scheduler_fn

    def optimizer(self, named: Sequence[tuple[str, Parameter]]) -> Optimizer:
        """An optimizer of these parameters.

        Raises:
            TypeError, ValueError: the factory does not return what it should.
        """
        optimizer = make_optimizer(self._optim_fn, named)
        if getattr(optimizer, "pre_average_hook", None) is not None:
            raise TypeError(
                f"optim_fn returned a {type(optimizer).__name__} with a pre_average_hook, which changes what is mixed: the "
                "simulator mixes by the plain law. Use an optimizer without one."
            )
        return optimizer

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The optimizer's schedule; None if there is none. Raises TypeError as ``make_scheduler``."""
        return make_scheduler(self._lr_scheduler_fn, optimizer)


class Stepper(ABC):
    """Takes the replicas' steps.

    Attributes:
        optimizers: one, or one a replica.
        schedulers: theirs; empty if there are none.
        steps: optimizer steps that each replica has taken.
    """

    optimizers: list[Optimizer]
    schedulers: list[LRScheduler]
    steps: list[int]

    @abstractmethod
    def step(self, found: Found) -> None:
        """Clips, steps and lets the gradients go; a replica without any gradient takes no step."""

    def scale(self, i: int, loss: Tensor) -> Tensor:
        """The loss of replica i, for the backward."""
        return loss


class Shared(Stepper):
    """One optimizer on the stacked parameters.

    Args:
        optimizer: made for the template's parameters; is turned to the stacked ones.
        max_norm: of each replica's gradients together; 0 for no clipping.
    """

    def __init__(self, stack: Stack, factories: Factories, optimizer: Optimizer, max_norm: float) -> None:
        turned = {id(param): stack.params[name] for name, param in _template_params(stack)}
        for group in optimizer.param_groups:
            group["params"] = [turned[id(param)] for param in group["params"]]
        for param in list(optimizer.state):
            optimizer.state[turned[id(param)]] = _stacked_state(optimizer.state.pop(param), stack.n)
        self._params, self._max_norm = list(stack.params.values()), max_norm
        self.optimizers = [optimizer]
        scheduler = factories.scheduler(optimizer)
        self.schedulers = [] if scheduler is None else [scheduler]
        self.steps = [0] * stack.n

    @staticmethod
    def serves(optimizer: Optimizer) -> bool:
        """Whether each element's step is known to depend on that element alone."""
        hooks: list[Any] = [
            *getattr(optimizer, "_optimizer_step_pre_hooks", {}).values(),
            *getattr(optimizer, "_optimizer_step_post_hooks", {}).values(),
        ]
        known = all(getattr(hook, "__module__", "").startswith("decent_dp.optim") for hook in hooks)
        return type(optimizer) in _BY_ELEMENT and known

    def step(self, found: Found) -> None:
        assert found.stacked is not None
        gradients = [gradient for gradient in found.stacked if gradient is not None]
        if not gradients:
            return
        if self._max_norm > 0:
            _clip(gradients, self._max_norm)
        for param, gradient in zip(self._params, found.stacked, strict=True):
            param.grad = gradient
        self.optimizers[0].step()
        for scheduler in self.schedulers:
            scheduler.step()
        for param in self._params:
            param.grad = None
        self.steps = [count + 1 for count in self.steps]


@torch.no_grad()
def _clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Each replica's part of the stacked gradients, as ``torch.nn.utils.clip_grad_norm_`` would: to max_norm / (norm + 1e-6)
    of itself, if that is less."""
    norms = [torch.linalg.vector_norm(gradient.reshape(len(gradient), -1), dim=1) for gradient in gradients]
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), dim=0)
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor.to(gradient.device).view(-1, *[1] * (gradient.ndim - 1)))


def _template_params(stack: Stack) -> list[tuple[str, Parameter]]:
    return [(name, param) for name, param in stack.template.named_parameters() if param.requires_grad]


def _stacked_state(state: dict[str, Any], n: int) -> dict[str, Any]:
    """The state that an optimizer has made at construction (Adagrad does), for n replicas; they step together."""
    return {
        key: value.expand(n, *value.shape).clone() if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
    }


class OneEach(Stepper):
    """One optimizer, and one scaler, a replica, on views of the stacked parameters.

    Args:
        scaler: each replica gets a copy of it; None for none.
        max_norm: of each replica's gradients together; 0 for no clipping.
    """

    def __init__(self, stack: Stack, factories: Factories, scaler: torch.amp.GradScaler | None, max_norm: float) -> None:
        self._params = [[Parameter(param.detach()[i]) for param in stack.params.values()] for i in range(stack.n)]
        self.optimizers = [factories.optimizer(list(zip(stack.names, params, strict=True))) for params in self._params]
        made = [factories.scheduler(optimizer) for optimizer in self.optimizers]
        self.schedulers = [scheduler for scheduler in made if scheduler is not None]
        self._policies = [GradientPolicy(params, copy.deepcopy(scaler), max_norm) for params in self._params]
        self.steps = [0] * stack.n

    def scale(self, i: int, loss: Tensor) -> Tensor:
        scaler = self._policies[i].scaler
        return loss if scaler is None else scaler.scale(loss)

    def step(self, found: Found) -> None:
        for i, (params, gradients) in enumerate(zip(self._params, found.rows, strict=True)):
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            if self._policies[i].allows_step():
                self.optimizers[i].step()
                if self.schedulers:
                    self.schedulers[i].step()
                self.steps[i] += 1
            for param in params:
                param.grad = None
