"""AdamW with the second moment that the gradient of the global batch has.

AdamW divides by the root of v, an average of squared gradients. Let g be the gradient of one replica's batch, with the noise
variance N, and ḡ that of the global batch, the mean over n replicas. A replica's own v estimates E[g]² + N, and DDP's v
estimates E[ḡ]² + N/n. So a replica whose gradients are mostly noise takes steps that are up to √n times too small.

The squared momentum has little of the noise: of an average of gradients, m = (1-β1)·Σ β1^k·g, a share a = (1-β1)/(1+β1) of N is
left, 1/19 with β1 = 0.9. So the average of m² is E[g]² + a·N, and between it and v lies what DDP has:

    v'  <-  β2·v' + (1-β2)·((1-w)·m̂² + w·g²)          w = (1/n - a)/(1 - a), at least 0;   m̂ = m/(1-β1^t)

which is E[g]² + N/n as long as 1/n is at least a. The update is AdamW's with v' in place of v. With n = 1 it is AdamW's.

With momentum tracking (``tracking=True``, ``rules.MomentumTracking``) the momentum is an estimate y of the momentum of all
replicas, and g the corrected gradient g + (y - m). Then v' is common to all replicas up to the part w, also where their data
differ. The noise in y is that of the mean of all momenta, and of what this replica has added to it that was not mixed with
enough others yet:

    a = (1-β1)/(1+β1)/n + 2.5·(1-β1)²·(1 - 1/n)

The number 2.5 is between 1.9 and 3.3 on topologies of pairs, with overlap (a test computes it).

For vectors (norms and biases) w is at least 0.3, which makes their steps smaller.

Replicas may have batches of unequal sizes (``gossip(weight=...)``): 1/n is this replica's share of the global batch, then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.adamw import AdamW
from torch.optim.optimizer import ParamsT

from decent_dp._checks import check_integer
from decent_dp._dtensors import local
from decent_dp._triton import load_triton
from decent_dp.optim.rows import Row, refuse_capture, refuse_sparse, split_rows

__all__ = ["OWN", "GossipAdamW"]

# The entry of a parameter's state that is this replica's own momentum, where the optimizer's is the tracked one.
OWN = "own_momentum"
# The noise that a replica adds to its own tracked momentum, in units of (1-β1)²·N.
_OWN_NOISE = 2.5
# The least w of vectors: norms and biases are few, and at high rates they drive replicas apart first (docs/lab/log.md, "tracked
# momentum").
_LEAST_OF_VECTORS = 0.3
_KERNEL = "decent_dp.optim.gossip_adamw_triton"


class GossipAdamW(AdamW):
    """AdamW whose steps are as large as those of DDP with the same settings, although a replica sees only its own batch.

    ``gossip`` and ``DecentralizedDataParallel`` tell it the number of replicas. On its own, and with one replica, it is
    ``torch.optim.AdamW`` bit for bit. Bring the learning rate, betas and weight decay of the DDP run. The formula is at the top
    of this module. The state is AdamW's, whose state dict can be loaded; with ``tracking`` one more momentum.

    Args:
        params: parameters, named parameters ``(name, parameter)`` or param groups; dense.
        lr: learning rate, a number or a 1-element tensor.
        betas: (β1, β2), each in [0, 1).
        eps: ε, added to the root of the second moment.
        weight_decay: every update first shrinks x by the factor 1 - lr·weight_decay.
        amsgrad, maximize: as in ``torch.optim.AdamW``.
        foreach, fused: as there, for steps on its own.
        tracking: ``gossip`` tracks the momentum (``MomentumTracking``), for workers whose data differ.

    Raises:
        ValueError: an option is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        tracking: bool = False,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, fused=fused)
        self.tracking = bool(tracking)
        self._replicas, self._share, self._stacked = 1, 1.0, False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "tracking": self.tracking}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, value in {"tracking": False, "_replicas": 1, "_share": 1.0, "_stacked": False}.items():
            vars(self).setdefault(name, value)

    def set_replicas(self, n: int, share: float | None = None, *, stacked: bool = False) -> None:
        """Sets the number of replicas; 1 when the optimizer is on its own again.

        Args:
            share: of this replica in the weight of all, in (0, 1]; None: 1/n.
            stacked: the parameters of all replicas are in one tensor, along an additional first dimension (the simulator).
        """
        self._stacked = stacked
        self._replicas = check_integer("the number of replicas", n, 1)
        self._share = 1 / n if share is None else share
        if n > 1:
            # An overflow would be known only to a fused kernel: the GradScaler unscales and skips the step itself.
            self._step_supports_amp_scaling = False

    def weights(self, beta1: float, *, vector: bool = False) -> tuple[float, float]:
        """The weights of the squared momentum and of the squared gradient in the second moment: 1-w and w of the formula."""
        left = (1 - beta1) / (1 + beta1)
        if self.tracking:
            left = left * self._share + _OWN_NOISE * (1 - beta1) ** 2 * (1 - self._share)
        w = (self._share - left) / (1 - left) if left < self._share else 0.0
        w = max(w, _LEAST_OF_VECTORS) if vector else w
        return 1 - w, w

    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the gradients anew and returns the loss, which is returned.

        Raises:
            RuntimeError: a gradient is sparse, and nothing was changed; or a CUDA graph is being captured.
        """
        if self._replicas == 1:
            found: float | None = super().step(closure)
            return found
        refuse_capture("GossipAdamW")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        refuse_sparse(self, type(self).__name__)
        for group in self.param_groups:
            for (step, vector, *_), alike in self._gather(group).items():
                numbers = self._numbers(group, step, vector=vector)
                for part in split_rows(self._update_by_triton(group, numbers, alike)):
                    self._update(group, numbers, part)
            # Views of the parameters were written to, and autograd would miss that saved tensors have changed.
            torch.autograd.graph.increment_version([param for param in group["params"] if param.grad is not None])
        return loss

    def _gather(self, group: dict[str, Any]) -> dict[tuple[int, bool, torch.device, torch.dtype], list[Row]]:
        """The parameters that have a gradient, by step (which is counted), whether they are vectors, device and dtype.

        A row has parameter, gradient, momentum and second moment, with amsgrad the largest second moment, and with tracking
        the own momentum. Makes missing state.
        """
        rows: dict[tuple[int, bool, torch.device, torch.dtype], list[Row]] = {}
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            state = self.state[param]
            if "exp_avg" not in state:
                on = param.device if group["fused"] else torch.device("cpu")
                state["step"] = torch.zeros((), dtype=torch.float32, device=on)
                for key in moments:
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
            if self.tracking and OWN not in state:
                state[OWN] = state["exp_avg"].clone(memory_format=torch.preserve_format)
            state["step"] += 1
            tensors = param, grad, *(state[key] for key in moments), *([state[OWN]] if self.tracking else [])
            row = tuple(local(tensor.detach()) for tensor in tensors)
            vector = param.ndim - self._stacked < 2
            rows.setdefault((int(state["step"]), vector, row[0].device, row[0].dtype), []).append(row)
        return rows

    def _numbers(self, group: dict[str, Any], step: int, *, vector: bool) -> list[float]:
        """With known_i = 1-β_i^t: 1-lr·wd, 1-β1, β2, (1-β2)·(1-w)/known1², (1-β2)·w, √known2·ε, lr·√known2/known1."""
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        of_momentum, of_gradient = ((1 - beta2) * weight for weight in self.weights(beta1, vector=vector))
        known1, root2 = 1 - beta1**step, (1 - beta2**step) ** 0.5
        keep, rate = 1 - lr * group["weight_decay"], lr * root2 / known1
        return [keep, 1 - beta1, beta2, of_momentum / known1**2, of_gradient, group["eps"] * root2, rate]

    def _update_by_triton(self, group: dict[str, Any], numbers: list[float], rows: list[Row]) -> list[Row]:
        """The update of those rows that the kernel can take, in one pass; returns the others."""
        param = rows[0][0]
        if group["amsgrad"] or (kernel := load_triton(_KERNEL, param.device, param.dtype)) is None:
            return rows
        taken, others = [], []
        for row in rows:
            five = (*row[:4], row[-1])  # without tracking the last one twice
            if kernel.is_dense(five):
                taken.append(five)
            else:
                others.append(row)
        if taken:
            kernel.update(taken, numbers, tracking=self.tracking, maximize=group["maximize"])
        return others

    def _update(self, group: dict[str, Any], numbers: list[float], rows: Sequence[Row]) -> None:
        """The formula, on tensors that share device and dtype. Those of less than 32 bits are computed in float32."""
        tensors = [list(column) for column in zip(*rows, strict=True)]
        narrow = tensors[0][0].dtype in (torch.float16, torch.bfloat16)
        params, grads, momenta, seconds, *more = [[t.float() for t in column] for column in tensors] if narrow else tensors
        keep, w1, beta2, of_momentum, of_gradient, eps, rate = numbers
        if group["maximize"]:
            grads = list(torch._foreach_neg(grads))
        if self.tracking:
            corrected = list(torch._foreach_sub(momenta, more[-1]))
            torch._foreach_add_(corrected, grads)
            torch._foreach_lerp_(more[-1], grads, w1)
            grads = corrected
        torch._foreach_lerp_(momenta, grads, w1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, momenta, momenta, of_momentum)
        if of_gradient:
            torch._foreach_addcmul_(seconds, grads, grads, of_gradient)
        if group["amsgrad"]:
            torch._foreach_maximum_(more[0], seconds)
        # √(v'/known2) + ε, both times √known2, which divides a number instead of memory.
        roots = torch._foreach_sqrt(more[0] if group["amsgrad"] else seconds)
        torch._foreach_add_(roots, eps)
        torch._foreach_mul_(params, keep)
        torch._foreach_addcdiv_(params, momenta, roots, -rate)
        if narrow:
            for column, wide in zip(tensors, (params, grads, momenta, seconds, *more), strict=True):
                if column is not tensors[1]:
                    torch._foreach_copy_(column, wide)
