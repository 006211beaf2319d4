"""AccumAdam and AccumAdamW: Adam that refreshes its moments once per window of s updates.

With s = accum_iter, k = ceil(step / s), M and V the moments as of the window's start and a the window's mean gradient:

    g  <- g + wd·x  (AccumAdam: decay in the gradient)     x <- x·(1 - lr·wd)  (AccumAdamW: decoupled)
    a  <- a + g/s
    m   = β1·M + (1-β1)·g          v = β2·V + (1-β2)·g²          for this update only
    x  <- x - lr/(1-β1^k) · m / (sqrt(v)/sqrt(1-β2^k) + ε)
    at the end of a window:  M <- β1·M + (1-β1)·a;  V <- β2·V + (1-β2)·a²;  a <- 0

The stored state is ``exp_avg`` = β1·M and ``exp_avg_sq`` = β2·V, so that between two window ends only ``accum_grad`` = a
and ``step`` change. With s = 1 this is Adam(W). Source: arXiv 2410.11998 (ICLR 2025).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .rows import Row, label_of, refuse_capture, refuse_sparse
from .update import Hyperparameters, accum_adam, state_dtype

__all__ = ["AccumAdam", "AccumAdamW", "accum_adam_foreach", "accum_adamw_foreach"]

_MOMENTS = ("exp_avg", "exp_avg_sq", "accum_grad")
_OPTIONS = ("lr", "betas", "eps", "weight_decay", "accum_iter")


# ---------------------------------------------------------------------------------------------------- functional forms


def accum_adamw_foreach(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    accum_grads: list[Tensor],
    state_steps: list[Tensor],
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    accum_iter: int,
) -> None:
    """One update of AccumAdamW (decoupled decay) on plain lists of tensors, in place.

    Args:
        params: the parameters; real floating point, any shapes, devices and dtypes.
        grads: their gradients, of the same shapes. Never modified.
        exp_avgs: β1·M. Like the next two of the parameter's shape and device, float32 (float64 for float64 parameters).
        exp_avg_sqs: β2·V.
        accum_grads: a, the window's gradients so far, each divided by ``accum_iter``.
        state_steps: updates made so far, one CPU float32 scalar per parameter. Incremented here.
        beta1, beta2, lr, weight_decay, eps: as in AdamW.
        accum_iter: s, the updates in a window.

    Raises:
        ValueError: lists of different lengths, or a state tensor of another dtype. Nothing is modified then.
    """
    hyper = Hyperparameters(beta1, beta2, lr, weight_decay, eps, accum_iter, decoupled=True)
    _check_and_update(hyper, params, grads, exp_avgs, exp_avg_sqs, accum_grads, state_steps)


def accum_adam_foreach(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    accum_grads: list[Tensor],
    state_steps: list[Tensor],
    beta1: float,
    beta2: float,
    lr: float,
    weight_decay: float,
    eps: float,
    accum_iter: int,
) -> None:
    """One update of AccumAdam (decay in the gradient); arguments and errors as in `accum_adamw_foreach`."""
    hyper = Hyperparameters(beta1, beta2, lr, weight_decay, eps, accum_iter, decoupled=False)
    _check_and_update(hyper, params, grads, exp_avgs, exp_avg_sqs, accum_grads, state_steps)


def _check_and_update(hyper: Hyperparameters, *columns: list[Tensor]) -> None:
    names = ("params", "grads", "exp_avgs", "exp_avg_sqs", "accum_grads", "state_steps")
    lengths = dict(zip(names, map(len, columns), strict=True))
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the lists must be equally long, but their lengths are {lengths}")
    rows = list(zip(*columns, strict=True))
    for i, (param, _, *moments, _) in enumerate(rows):
        for name, moment in zip(names[2:5], moments, strict=True):
            if moment.dtype != state_dtype(param):
                raise ValueError(
                    f"{name}[{i}] is {moment.dtype}, but the state of a parameter of {param.dtype} must be "
                    f"{state_dtype(param)}: small gradients would be lost in it"
                )
    with torch.no_grad():
        accum_adam(rows, hyper)


# --------------------------------------------------------------------------------------------------------- optimizers


class _AccumAdamBase(Optimizer):
    """AccumAdam and AccumAdamW, which differ in the place of the decay."""

    _decoupled: bool

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        accum_iter: int = 4,
        *,
        foreach: bool | None = None,
        compiled: bool = False,
    ) -> None:
        values = (lr, betas, eps, weight_decay, accum_iter)
        defaults = {**dict(zip(_OPTIONS, values, strict=True)), "foreach": foreach, "compiled": compiled}
        _check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. The group's own options are checked; a refused group is not added."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            for i, param in enumerate(group["params"]):
                if param.is_complex():
                    raise TypeError(
                        f"{type(self).__name__} does not support complex parameters, but {label_of(group, i)} is "
                        f"{param.dtype}; optimize torch.view_as_real of it instead"
                    )
        except Exception:
            self.param_groups.pop()
            raise

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for options in (self.defaults, *self.param_groups):
            options.setdefault("foreach", None)
            options.setdefault("compiled", self.defaults.get("compiled", False))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, without loss and without sharing memory with it.

        Raises:
            ValueError: the dict is not from an AccumAdam(W), or its shapes are not those of the parameters.
        """

        # torch casts state to the parameter's dtype, which would round float32 state of bfloat16 parameters, and shares the
        # tensors that need no cast, so that two optimizers would write to one state. What was given is copied after torch's
        # load, before the user's own post-hooks; it is checked after the user's own pre-hooks, which may change it.
        given: list[dict[str, Any]] = []

        def before(_: Optimizer, state_dict: dict[str, Any]) -> None:
            self._check_loadable(state_dict)
            given.append(state_dict)

        def after(_: Optimizer) -> None:
            for _key, param, state in self._loads_of(given[0]):
                like = {"device": param.device, "dtype": state_dtype(param), "copy": True}
                moments = {entry: state[entry].detach().to(**like) for entry in _MOMENTS}
                self.state[param].update(moments, step=_new_step(float(state["step"])))

        hooks = (
            self.register_load_state_dict_pre_hook(before),
            self.register_load_state_dict_post_hook(after, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _loads_of(self, given: dict[str, Any]) -> list[tuple[int, Tensor, dict[str, Any]]]:
        """(key, parameter, state) for each parameter with state in the given dict, matched by position as in torch."""
        keys = chain.from_iterable(group["params"] for group in given["param_groups"])
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        states = given["state"]  # with another number of parameters torch raises
        return [(key, param, states[key]) for key, param in zip(keys, params, strict=False) if key in states]

    def _check_loadable(self, given: dict[str, Any]) -> None:
        name = type(self).__name__
        for i, group in enumerate(given["param_groups"]):
            missing = [option for option in _OPTIONS if option not in group]
            if missing:
                raise ValueError(f"{name} cannot load this state dict: its param group {i} has no {', '.join(missing)}")
        for key, param, state in self._loads_of(given):
            missing = [entry for entry in ("step", *_MOMENTS) if entry not in state]
            if missing:
                raise ValueError(f"{name} cannot load this state dict: its state {key} has no {', '.join(missing)}")
            for entry in _MOMENTS:
                if state[entry].shape != param.shape:
                    raise ValueError(
                        f"{name} cannot load this state dict: {entry} of its state {key} has shape "
                        f"{tuple(state[entry].shape)}, but the parameter has {tuple(param.shape)}"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient; the others keep their step count.

        Args:
            closure: computes the gradients anew and returns the loss, which is returned.

        Raises:
            RuntimeError: a gradient is sparse, and no parameter is updated; or a CUDA graph is being captured.
        """
        refuse_capture(type(self).__name__)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_sparse(self, type(self).__name__)
        for group in self.param_groups:
            (beta1, beta2), lr, s = group["betas"], float(group["lr"]), group["accum_iter"]
            hyper = Hyperparameters(beta1, beta2, lr, group["weight_decay"], group["eps"], s, self._decoupled)
            accum_adam(self._gather(group), hyper, foreach=group["foreach"] is not False, compiled=group["compiled"])
        return loss

    def _gather(self, group: dict[str, Any]) -> list[Row]:
        """The rows of the parameters that have a gradient; makes missing state."""
        rows: list[Row] = []
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state = self.state[param]
            if not state:
                state["step"] = _new_step()
                for key in _MOMENTS:
                    state[key] = torch.zeros_like(param, dtype=state_dtype(param), memory_format=torch.preserve_format)
            rows.append((param, grad, *(state[key] for key in _MOMENTS), state["step"]))
        return rows


class AccumAdamW(_AccumAdamBase):
    """AdamW that refreshes its moments once per ``accum_iter`` updates, with decoupled weight decay.

    The formula is at the top of this module. State has the parameter's dtype but at least float32: narrower
    parameters are computed in float32 and rounded once.

    Args:
        params: parameters, named parameters ``(name, parameter)`` or param groups; real and dense.
        lr: learning rate, a number or a 1-element tensor.
        betas: (β1, β2), each in [0, 1).
        eps: ε, added to the root of the second moment.
        weight_decay: every update first shrinks x by the factor 1 - lr·weight_decay.
        accum_iter: s, the updates in a window; 1 is AdamW. Each parameter has its own window.
        foreach: None or True for torch's foreach operations, False for the readable form; equal up to rounding.
        compiled: True for one pass over memory by torch.compile, again equal up to rounding. It compiles for many seconds at
            the first update and at the first end of a window. It is for runs in which every parameter has a gradient in every
            update. Without a compiler it warns and runs the form of ``foreach=True``.

    Raises:
        ValueError: an option is out of its range.
        TypeError: a complex parameter.
    """

    _decoupled = True


class AccumAdam(_AccumAdamBase):
    """Adam that refreshes its moments once per ``accum_iter`` updates, with weight decay in the gradient (L2).

    Arguments, state and errors as in `AccumAdamW`, except that every update first adds weight_decay·x to the gradient (a copy:
    ``p.grad`` stays).
    """

    _decoupled = False


# ------------------------------------------------------------------------------------------------------------- helpers


def _check_options(options: dict[str, Any]) -> None:
    lr, betas, accum_iter = options["lr"], options["betas"], options["accum_iter"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr as a tensor must have 1 element, but has shape {tuple(lr.shape)}")
    for name, value in (("lr", lr), ("eps", options["eps"]), ("weight_decay", options["weight_decay"])):
        if not value >= 0:  # so that NaN is refused
            raise ValueError(f"{name} must be >= 0, but is {value}")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers in [0, 1), but is {betas}")
    if not isinstance(accum_iter, int) or isinstance(accum_iter, bool) or accum_iter < 1:
        raise ValueError(f"accum_iter must be an int >= 1, but is {accum_iter!r}")
    if options["compiled"] and options["foreach"] is False:
        raise ValueError("compiled=True and foreach=False ask for two different forms of the update")


def _new_step(step: float = 0.0) -> Tensor:
    return torch.tensor(step, dtype=torch.float32, device="cpu")
