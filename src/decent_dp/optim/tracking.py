"""Momentum tracking under an optimizer: its momentum is an estimate of the momentum of all replicas.

Let ``g`` be this replica's gradient, ``m`` its own momentum, and ``y`` the tracked one (``rules.MomentumTracking``), whose
differences to the neighbours' are mixed in between two steps. An average of gradients keeps what is added to it in a step:

    m' = β·m + (1-β)·g          y' = y + (m' - m) = β·y + (1-β)·(g + C)          with C = y - m

So the optimizer gets the gradient ``g + C`` instead of ``g`` (the control variate of SCAFFOLD, arXiv 1910.06378), keeps ``y``
as its momentum, and steps as ever. ``C`` changes by mixes alone: over all replicas it adds up to zero, and the mean of ``y`` is
that of ``m``. SGD's momentum is a sum, ``m' = μ·m + (1-τ)·g``, and gets ``g + C·(1-μ)/(1-τ)``.

In every tenth round ``C`` becomes smaller by a hundredth (``m`` comes closer to ``y`` by as much), on all replicas. What mixes
with errors have left of a sum that should be zero is forgotten so, and the mean of ``C`` is zero as before.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from decent_dp._dtensors import local, placed
from decent_dp.optim.gossip_adamw import OWN, GossipAdamW
from decent_dp.optim.rows import refuse_sparse
from decent_dp.rules import Gossip, MomentumTracking, Rule

__all__ = ["FADE_EVERY", "Tracking", "momentum_of", "rule_for"]

# C becomes smaller by this share, in each of so many rounds.
_FADES, FADE_EVERY = 0.01, 10


def rule_for(rule: Rule, optimizers: Sequence[Optimizer]) -> Rule:
    """Returns the rule: that of the user, or ``MomentumTracking`` if an optimizer asks for it.

    Raises:
        ValueError: an optimizer asks for it, and the rule is another one; or it does not work with an optimizer.
    """
    if isinstance(rule, MomentumTracking):
        for optimizer in optimizers:
            momentum_of(optimizer, rule.momentum)
        return rule
    if not any(isinstance(optimizer, GossipAdamW) and optimizer.tracking for optimizer in optimizers):
        return rule
    if type(rule) is not Gossip:
        raise ValueError(
            f"GossipAdamW(tracking=True) needs the rule MomentumTracking, and {rule!r} was given: leave one of both out."
        )
    return rule_for(MomentumTracking(), optimizers)


def momentum_of(optimizer: Optimizer, entry: str | None) -> str:
    """The entry of an optimizer's state that is its momentum; ``entry``: of those that are not known.

    Raises:
        ValueError: it is not known, or tracking it would not help.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, GossipAdamW):
        return "exp_avg"
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):  # since torch 2.9
        return "momentum_buffer"
    if isinstance(optimizer, torch.optim.SGD):
        for group in optimizer.param_groups:
            if group["momentum"] == 0 or group["dampening"] >= 1:
                raise ValueError(
                    f"MomentumTracking needs a momentum, and this {name} has momentum={group['momentum']} and "
                    f"dampening={group['dampening']}: give it momentum=0.9, or leave the rule out."
                )
        return "momentum_buffer"
    if "Adam" in name:
        raise ValueError(
            f"MomentumTracking does not work with {name}: it divides by the second moment of this worker's own gradients, and "
            "workers whose data differ would step in other directions. Use decent_dp.GossipAdamW, with the same settings."
        )
    if entry is None and name == "Lion":
        return "exp_avg"
    if entry is None:
        raise ValueError(
            f"MomentumTracking does not know the momentum of {name}. Name the entry of its state that is an exponential "
            "average of its gradients: MomentumTracking(momentum='exp_avg'). Or use GossipAdamW, Muon, Lion, or SGD with "
            "momentum."
        )
    return entry


class Tracking:
    """The tracked momentum of one optimizer.

    From now on the tracked and the own momenta are tensors of this object, which it puts into the optimizer's state. So both
    are saved, loaded and averaged with it, and no optimizer can exchange what is being mixed.

    Args:
        optimizer: steps by its momentum. Its hooks are this object's until ``close``.
        entry: of its state that is the momentum; None: as known.
        trained: the ids of the parameters whose momenta are tracked; None: of those that require a gradient now.

    Raises:
        ValueError: its momentum is not known, or it has none.
    """

    def __init__(self, optimizer: Optimizer, entry: str | None = None, trained: Container[int] | None = None) -> None:
        self._optimizer, self._entry = optimizer, momentum_of(optimizer, entry)
        self._is_named = self._entry == entry and not isinstance(optimizer, torch.optim.SGD)
        # The tracked and the own momentum of each parameter; zeros before its first step.
        self._pairs: dict[Tensor, tuple[Tensor, Tensor]] = {}
        # Those of which the optimizer's state has both.
        self._begun: set[Tensor] = set()
        # Whether own momenta may be those of another replica (a state dict that was loaded by hand).
        self._unsure = False
        self._loaded: set[Tensor] = set()
        # In a step: the parameters without a momentum; and those with a corrected gradient, their own gradient, and C.
        self._new: list[Tensor] = []
        self._changed: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._hooks = [
            # torch.compile must not trace these when the step is compiled.
            optimizer.register_step_pre_hook(_disable_dynamo(lambda *of: self._before_step(*of))),
            optimizer.register_step_post_hook(_disable_dynamo(lambda *of: self._after_step(*of))),
        ]
        # GossipAdamW corrects gradients itself, in fewer passes.
        self._former: bool | None = None
        if isinstance(optimizer, GossipAdamW):
            self._former, optimizer.tracking = optimizer.tracking, True
        else:
            # A scaler would leave the gradients scaled.
            optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        with torch.no_grad():
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if not (param.requires_grad if trained is None else id(param) in trained):
                    continue
                # In the parameter's order of memory on all workers, whatever was loaded.
                zeros = torch.zeros_like(param, memory_format=torch.preserve_format).detach()
                self._pairs[param] = zeros, zeros.clone(memory_format=torch.preserve_format)
                state = optimizer.state.get(param, {})
                if (tracked := state.get(self._entry)) is not None:
                    self._unsure |= OWN in state
                    self._put(param, state, tracked, state.get(OWN, tracked))

    def close(self) -> None:
        """The optimizer is on its own again: its momentum becomes its own by and by."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for state in self._optimizer.state.values():
            state.pop(OWN, None)
        if isinstance(self._optimizer, GossipAdamW) and self._former is not None:
            self._optimizer.tracking = self._former

    # -- the momenta ------------------------------------------------------------------------------------------------------

    def momenta(self) -> list[tuple[Tensor, Tensor]]:
        """The parameters that train, and their tracked momenta, which are always the same tensors."""
        return [(param, tracked) for param, (tracked, _) in self._pairs.items()]

    @torch.no_grad()
    def follow_loads(self, *, trusted: bool = False) -> set[Tensor]:
        """Takes over momenta that were loaded into the optimizer; returns the parameters of those since the last call.

        Args:
            trusted: the state is this replica's own. Otherwise it may be that of one replica on all, whose C do not add up to
                zero, and its own momentum becomes the tracked one.

        Raises:
            RuntimeError: a momentum is not like its parameter.
        """
        self._find_loads(trusted)
        found, self._loaded = self._loaded, set()
        return found

    def _find_loads(self, trusted: bool = False) -> None:
        found = []
        for param, (tracked, _) in self._pairs.items():
            state = self._optimizer.state.get(param, {})
            loaded = state.get(self._entry)
            if loaded is not None and loaded is not tracked:
                self._put(param, state, loaded, state.get(OWN, loaded))
                found.append(param)
            elif loaded is None and param in self._begun:  # the state was cleared
                self._clear(param)
                found.append(param)
        if not trusted:
            for param in self._pairs if self._unsure else found:
                tracked, own = self._pairs[param]
                local(own).copy_(local(tracked))
        self._loaded.update(found)
        self._unsure = False

    def _put(self, param: Tensor, state: dict[str, Any], tracked: Tensor, own: Tensor) -> None:
        pair = self._pairs[param]
        self._begun.add(param)
        for key, tensor, value in ((self._entry, pair[0], tracked), (OWN, pair[1], own)):
            if value.dtype != tensor.dtype or value.shape != tensor.shape:
                raise RuntimeError(
                    f"MomentumTracking needs momenta like their parameters, {tuple(tensor.shape)} {tensor.dtype}, and '{key}' "
                    f"of {type(self._optimizer).__name__} is {tuple(value.shape)} {value.dtype}: use float32 parameters with "
                    "autocast, or another optimizer."
                )
            local(tensor).copy_(local(value))
            state[key] = tensor

    def _clear(self, param: Tensor) -> None:
        self._begun.discard(param)
        for tensor in self._pairs[param]:
            local(tensor).zero_()

    @torch.no_grad()
    def drop_unsaved(self) -> list[Tensor]:
        """After a load of the whole run: momenta of parameters that had not stepped when it was saved begin with zeros.

        Returns:
            These parameters. What the mixes of others that had stepped them have made of their momenta is lost.
        """
        unsaved = [param for param in self._pairs if self._optimizer.state.get(param, {}).get(self._entry) is None]
        for param in unsaved:
            self._clear(param)
        return unsaved

    @torch.no_grad()
    def forget(self) -> None:
        """Each replica's own momentum becomes the tracked one (C = 0): after a change of the members."""
        for tracked, own in self._pairs.values():
            local(own).copy_(local(tracked))

    @torch.no_grad()
    def fade(self, times: int = 1) -> None:
        """C becomes a little smaller, so many times."""
        for tracked, own in self._pairs.values():
            local(own).lerp_(local(tracked), 1 - (1 - _FADES) ** times)

    @torch.no_grad()
    def rest(self) -> None:
        """A round in which this replica has no batch: a gradient of zero, and no step."""
        for group in self._optimizer.param_groups:
            keep = _kept(group)
            for param in group["params"]:
                if param in self._pairs:
                    tracked, own = map(local, self._pairs[param])
                    tracked.sub_(own, alpha=1 - keep)
                    own.mul_(keep)

    # -- a step -----------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Corrects the gradients, or those that a closure computes."""
        self._restore()  # of a step that has raised
        with torch.no_grad():
            self._find_loads()
        self._new = [param for param in self._pairs if optimizer.state.get(param, {}).get(self._entry) is None]
        _, *given = args  # the optimizer comes first
        closure = kwargs.get("closure", given[0] if given else None)
        if not callable(closure):
            self._correct()
            return None

        def corrected() -> Any:
            self._restore()
            loss = closure()
            self._correct()
            return loss

        return ((optimizer, corrected, *given[1:]), kwargs) if given else (args, {**kwargs, "closure": corrected})

    @torch.no_grad()
    def _correct(self) -> None:
        if self._former is not None:
            return
        refuse_sparse(self._optimizer, "MomentumTracking")
        for group in self._optimizer.param_groups:
            scale = (-1.0 if group.get("maximize") else 1.0) * self._scale(group)
            for param in group["params"]:
                grad = param.grad
                if grad is None or param not in self._pairs:
                    continue
                if param not in self._begun:  # the optimizer makes its momentum in this step
                    continue
                tracked, own = map(local, self._pairs[param])
                correction = tracked - own
                param.grad = placed(torch.add(local(grad), correction.to(grad.dtype), alpha=scale), grad)
                self._changed.append((param, grad, param.grad, correction))

    def _restore(self) -> None:
        for param, grad, corrected, _ in self._changed:
            if param.grad is corrected:  # else the optimizer, or a hook, has cleared it
                param.grad = grad
        self._changed.clear()

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for param, _grad, _corrected, correction in self._changed:
            state, (tracked, own) = self._optimizer.state[param], self._pairs[param]
            if state[self._entry] is not tracked:  # an optimizer that makes a new tensor in each step
                self._put(param, state, state[self._entry], own)
            torch.sub(local(tracked), correction, out=local(own))
        for param in self._new:
            state = self._optimizer.state.get(param, {})
            made = state.get(self._entry)
            if made is not None and self._is_named and _is_sum(made, param.grad):
                raise ValueError(
                    f"MomentumTracking(momentum={self._entry!r}): '{self._entry}' is the momentum of "
                    f"{type(self._optimizer).__name__}, and its first value is the gradient itself: it is a sum of gradients. "
                    "Tracking needs an exponential average (m <- β·m + (1-β)·g): use torch.optim.SGD or Muon, or an optimizer "
                    "with such an average."
                )
            if made is not None:  # goes on from what was mixed before
                tracked, own = self._pairs[param]
                self._put(param, state, tracked + made, own + made)
            elif state and param.grad is not None:
                raise ValueError(
                    f"MomentumTracking was told that the momentum of {type(self._optimizer).__name__} is '{self._entry}', and "
                    f"its state has {sorted(map(str, state))}: give the name of one of these."
                )
        self._new = []
        self._restore()

    def _scale(self, group: dict[str, Any]) -> float:
        is_sum = isinstance(self._optimizer, torch.optim.SGD)
        return float((1 - group["momentum"]) / (1 - group["dampening"])) if is_sum else 1.0


def _is_sum(made: Tensor, grad: Tensor | None) -> bool:
    """Whether a momentum is the first gradient as it is."""
    return grad is not None and torch.equal(local(made).abs(), local(grad).abs()) and bool(local(made).any())


def _kept(group: dict[str, Any]) -> float:
    """The share of its momentum that an optimizer keeps in a step."""
    if "momentum" in group:
        return float(group["momentum"])
    # Lion's second is that of its momentum; Adam's is that of its second moment.
    betas = group.get("betas", (0.9, 0.9))
    return float(betas[0] if "eps" in group else betas[1])
