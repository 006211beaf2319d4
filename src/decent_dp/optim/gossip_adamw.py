"""AdamW with the second moment that the gradient of the global batch has.

AdamW divides by the root of v, an average of squared gradients. Let g be the gradient of one replica's batch and ḡ that of
the global batch, the mean over n replicas. With signal E[ḡ]² and noise variance σ² per replica, a replica's own v estimates
E[ḡ]² + σ², and DDP's v estimates E[ḡ]² + σ²/n. So a replica whose gradients are mostly noise takes steps that are up to √n
times too small. For each matrix (any parameter of two or more dimensions, as shape[0] × rest), GossipAdamW estimates

    s  <-  β2·s + (1-β2)·g⊙m/(1-β1^(t-1))      the squared signal, where m is the momentum before this step
    κ   =  clamp(s / v, 0, 1)                  its share in v
    F   =  1/n + (1 - 1/n)·κ                   the second moment of the global batch as a share of v

The noise of m and that of today's g are independent, so the mean of their product has no noise. In the first steps, where m
is an average of few gradients, s takes g⊙g, so κ starts at 1. Only the means of s and v over each row and each column are
kept (as in Adafactor, arXiv 1804.04235), and replicas average these through the mix.

With uneven data the mean gradients of the replicas differ, and s contains what they do not have in common. So replicas compare
a sketch z of their gradients, the sums over each row and each column with fixed random signs. y is a moving average of a
replica's own sketches, and Y that of all sketches, averaged through the mix, both before this step:

    a  <-  β2·a + (1-β2)·Σ z⊙Y,    b  <-  β2·b + (1-β2)·Σ z⊙y        averaged through the mix, too
    h   =  (a·b + p²) / (b² + p²),  p = 0.05·Σ S            the share of the common signal, with a clamped to [0, b]

With p, h is near 1 where the sketches contain next to nothing of the signal. Let v_r, v_c and v̄ be the means of v over row r,
column c and all of this replica's matrix, and V and S the averages of such means of v and s over the replicas:

    ρ_r = V_r / v_r,   ρ_c = V_c / v_c,   ρ = V̄ / v̄       at least 1/n, because V contains v/n
    F_r = 1/n + (1 - 1/n)·clamp(h·S_r / V_r, 0, 1),   F_c likewise
    v'  = v · (ρ_r·ρ_c/ρ) · √(F_r·F_c)                      the second moment to divide by

The update is AdamW's times the gain √(v/v') of its row and column. Statistics and gains are renewed in every fourth step (with
β2⁴, and with m as it is then), and averaged in every fourth round. Biases and other vectors get AdamW's update.
docs/gossip-adamw.md derives this, with the bias and the variance of the estimates.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.adamw import AdamW, adamw
from torch.optim.optimizer import ParamsT

from decent_dp._checks import check_integer
from decent_dp.optim.loading import given_state, pairs
from decent_dp.optim.statistics import SharesStatistics

__all__ = ["GossipAdamW"]

# Steps in which s takes g⊙g. After ten steps the momentum averages about six gradients.
_PLAIN = 10
# The moving averages of sketches are renewed in every fourth step, so this is a memory of 130 steps: the longer it is, the less
# does Y contain of the replica's own sketches that were not mixed yet.
_KEPT = 0.97
# Sketches count as far as the signal in them is large by this share of all signal.
_PRIOR = 0.05
_MEANS, _SHARED, _GAINS, _COUNT = "means", "shared_means", "gains", "statistics_step"
_STATISTICS = frozenset({_MEANS, _SHARED, _GAINS, _COUNT})
# Elements of a block of rows on the CPU: operands and temporaries of a few blocks fit into a cache of some MiB.
_BLOCK = 256 * 1024
# Bounds that keep the gains of rows without a gradient, whose update is zero, finite.
_TINY, _LARGE = 1e-38, 1e30


@dataclass(frozen=True)
class _Row:
    """A parameter of one update, or a part of one, and its state."""

    param: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None
    step: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """Those of the parameter's shape."""
        found = [self.param, self.grad, self.exp_avg, self.exp_avg_sq]
        return found if self.max_exp_avg_sq is None else [*found, self.max_exp_avg_sq]

    @classmethod
    def of(cls, tensors: Sequence[Tensor], step: Tensor) -> _Row:
        """The inverse of ``tensors``."""
        param, grad, exp_avg, exp_avg_sq, *largest = tensors
        return cls(param, grad, exp_avg, exp_avg_sq, largest[0] if largest else None, step)


class GossipAdamW(AdamW, SharesStatistics):
    """AdamW whose steps are as large as those of DDP with the same settings, although a replica sees only its own batch.

    ``gossip`` and ``DecentralizedDataParallel`` tell it the number of replicas, and average its statistics with the
    parameters (about two per cent more bytes). On its own, and with one replica, it is ``torch.optim.AdamW`` bit for bit.
    Bring the learning rate, betas and weight decay of the DDP run. The formula is at the top of this module.

    The state is AdamW's, and for each matrix of R rows and C columns three vectors, of 6(R + C) + 2 float32 numbers. The
    state dict of an AdamW can be loaded: the statistics then start from its second moment. Of a sharded parameter (DTensor),
    each worker keeps the means over its own part.

    Args:
        params: parameters, named parameters ``(name, parameter)`` or param groups; dense.
        lr: learning rate, a number or a 1-element tensor.
        betas: (β1, β2), each in [0, 1).
        eps: ε, added to the root of this replica's own second moment.
        weight_decay: every update first shrinks x by the factor 1 - lr·weight_decay.
        amsgrad, maximize, foreach, fused: as in ``torch.optim.AdamW``. All forms are equal up to rounding.

    Raises:
        ValueError: an option is out of its range.
    """

    # Also the number of steps from one gradient that is taken into the statistics to the next. They change slowly.
    EVERY = 4

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
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, foreach=foreach, fused=fused)
        self._replicas = 1
        # The parameters of this many replicas lie in each tensor, one after another along the first dimension (the simulator).
        self._stacked = 1

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        vars(self).setdefault("_replicas", 1)
        vars(self).setdefault("_stacked", 1)

    # -- with other replicas ------------------------------------------------------------------------------------------------

    def set_replicas(self, n: int, *, stacked: bool = False) -> None:
        """Sets the number of replicas; 1 when the optimizer is on its own again.

        Args:
            stacked: the parameters of all n replicas lie in each tensor, one after another along the first dimension, as in the
                simulator.
        """
        self._replicas = check_integer("the number of replicas", n, 1)
        self._stacked = n if stacked else 1
        if self._replicas > 1:
            # An overflow on a GPU would be known only to the kernel, and the statistics must not take it: the GradScaler
            # unscales the gradients and skips the step itself.
            self._step_supports_amp_scaling = False
            self.statistics()

    @torch.no_grad()
    def statistics(self) -> list[tuple[Tensor, Tensor]]:
        if self._replicas == 1:
            return []
        params = [param for group in self.param_groups for param in group["params"] if self._is_matrix(param)]
        return [(param, self._statistics_of(param)) for param in params]

    def _is_matrix(self, param: Tensor) -> bool:
        # A worker may hold no row of a sharded parameter.
        return param.ndim - (self._stacked > 1) >= 2 and param.is_floating_point() and _local(param).numel() > 0

    def _matrices(self, tensor: Tensor) -> Tensor:
        """The part of a tensor on this worker as (stacked, rows, columns)."""
        own = _local(tensor)
        rows = own.shape[1] if self._stacked > 1 else own.shape[0]
        return own.reshape(self._stacked, rows, -1)

    def _statistics_of(self, param: Tensor) -> Tensor:
        """The shared means; made from the second moment if there are none."""
        state = self.state[param]
        if _SHARED not in state:
            if "exp_avg_sq" in state:
                moment = self._matrices(state["exp_avg_sq"])
                means = _means_of_product(moment, torch.ones_like(moment))
            else:
                stacked, rows, columns = self._matrices(param).shape
                means = torch.zeros(stacked, rows + columns, device=_local(param).device)
            means = means if self._stacked > 1 else means[0]
            state[_MEANS] = torch.cat([means, torch.zeros_like(means)], dim=-1)  # v, y
            # V and, with κ = 1, S. (v/n + (1-1/n)·s is linear in both, so a second moment that was loaded fades out.) Y, a, b.
            state[_SHARED] = torch.cat([means, means, torch.zeros_like(means), means.new_zeros(*means.shape[:-1], 2)], dim=-1)
            state[_GAINS] = torch.ones_like(means)
            # AdamW's own count may be on a GPU, where reading it in each step would wait.
            state[_COUNT] = torch.tensor(float(state.get("step", 0)), device="cpu")
        shared: Tensor = state[_SHARED]
        return shared

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the result of `state_dict`, or of that of a ``torch.optim.AdamW``.

        Raises:
            ValueError: the statistics in it do not have the parameters' shapes.
        """

        def check(given: dict[str, Any]) -> None:
            for key, param, state in pairs(self.param_groups, given):
                for entry in ("exp_avg", "exp_avg_sq"):
                    if entry in state and state[entry].shape != param.shape:
                        self._refuse_shape(key, entry, state[entry], param, tuple(param.shape))
                size = sum(self._matrices(param).shape[1:]) if self._is_matrix(param) else 0
                for entry, wanted in ((_MEANS, 2 * size), (_SHARED, 3 * size + 2 if size else 0), (_GAINS, size)):
                    if entry in state and state[entry].shape[-1:] != (wanted,):
                        self._refuse_shape(key, entry, state[entry], param, (wanted,))

        def restore(given: dict[str, Any]) -> None:
            for _, param, state in pairs(self.param_groups, given):
                for entry in _STATISTICS & state.keys():
                    on = "cpu" if entry == _COUNT else param.device
                    self.state[param][entry] = state[entry].detach().to(on, torch.float32, copy=True)

        with given_state(self, check, restore):
            super().load_state_dict(state_dict)

    def _refuse_shape(self, key: int, entry: str, found: Tensor, param: Tensor, wanted: tuple[int, ...]) -> NoReturn:
        raise ValueError(
            f"{type(self).__name__} cannot load this state dict: {entry} of its state {key} has shape {tuple(found.shape)}, "
            f"and should be {wanted} for a parameter of shape {tuple(param.shape)}"
        )

    # -- steps --------------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the gradients anew and returns the loss, which is returned.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, rows in [(group, self._gather(group)) for group in self.param_groups]:
            gained = [row for row in rows if self._replicas > 1 and self._is_matrix(row.param)]
            chosen = {id(row.param) for row in gained}
            self._adamw(group, [row for row in rows if id(row.param) not in chosen])
            self._step_matrices(group, gained)
        return loss

    def _gather(self, group: dict[str, Any]) -> list[_Row]:
        """The parameters that have a gradient; makes missing state, as AdamW does."""
        rows = []
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        for param in group["params"]:
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, but a parameter of shape "
                    f"{tuple(param.shape)} has one ({param.grad.layout}): make it dense (nn.Embedding(..., sparse=False)) or "
                    "use torch.optim.SparseAdam"
                )
            state = self.state[param]
            if "exp_avg" not in state:
                on = param.device if group["fused"] else torch.device("cpu")
                wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
                state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=on)
                for key in moments:
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
            rows.append(_Row.of([param, param.grad, *(state[key] for key in moments)], state["step"]))
        return rows

    def _adamw(self, group: dict[str, Any], rows: list[_Row], **options: Any) -> None:
        """AdamW's update of the rows, with ``options`` in place of the group's."""
        if not rows:
            return
        beta1, beta2 = group["betas"]
        given = {
            **{key: group[key] for key in ("foreach", "fused", "amsgrad", "lr", "weight_decay", "eps", "maximize")},
            "grad_scale": getattr(self, "grad_scale", None),
            "found_inf": getattr(self, "found_inf", None),
            **options,
        }
        adamw(
            [row.param for row in rows],
            [row.grad for row in rows],
            [row.exp_avg for row in rows],
            [row.exp_avg_sq for row in rows],
            [row.max_exp_avg_sq for row in rows if row.max_exp_avg_sq is not None],
            [row.step for row in rows],
            has_complex=any(row.param.is_complex() for row in rows),
            beta1=beta1,
            beta2=beta2,
            **given,
        )

    # Its blocks have many shapes, for each of which torch.compile would trace it anew.
    @_disable_dynamo
    def _step_matrices(self, group: dict[str, Any], rows: list[_Row]) -> None:
        """AdamW's update of zeros gives the change of each matrix, which is multiplied by the gains of its rows and columns."""
        pieces = [piece for row in rows for piece in self._pieces(row, *self._gains_of(group, row))]
        on_cpu = all(piece.param.device.type == "cpu" for piece, _, _ in pieces)
        # One after another, pieces stay in the cache of a CPU. On a GPU fewer kernels are faster.
        for together in [[piece] for piece in pieces] if on_cpu else [pieces]:
            changes = [replace(row, param=torch.zeros_like(row.param), step=row.step.clone()) for row, _, _ in together]
            fused = group["fused"]
            if fused is None and group["foreach"] is None and on_cpu and all(map(_is_plain, changes)):
                fused = True  # four times as fast as the default of AdamW on the CPU
            self._adamw(group, changes, fused=fused, weight_decay=0.0)
            for (row, of_rows, of_columns), change in zip(together, changes, strict=True):
                self._move(row.param, change.param, of_rows, of_columns, 1 - group["lr"] * group["weight_decay"])
        for row in rows:
            row.step.add_(1)

    def _pieces(self, row: _Row, of_rows: Tensor, of_columns: Tensor) -> Iterator[tuple[_Row, Tensor, Tensor]]:
        """The parts of a matrix on this worker with their gains: blocks of rows on the CPU, else the whole."""
        tensors = [_local(tensor.detach()) for tensor in row.tensors]
        whole = _Row.of(tensors, row.step)
        if self._stacked > 1 or whole.param.device.type != "cpu" or not _is_plain(whole):
            yield whole, of_rows, of_columns
            return
        size = max(1, _BLOCK * len(whole.param) // whole.param.numel())
        blocks = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
        for block, gains in zip(blocks, torch.split(of_rows, size, dim=1), strict=True):
            yield _Row.of(block, row.step), gains, of_columns

    def _move(self, param: Tensor, change: Tensor, of_rows: Tensor, of_columns: Tensor, keep: float | Tensor) -> None:
        """param <- keep·param + change·gains"""
        narrow = param.dtype in (torch.float16, torch.bfloat16)
        wide = param.float() if narrow else param
        matrices = self._matrices(change.float() if narrow else change)
        wide.mul_(keep).add_(matrices.mul_(of_rows).mul_(of_columns).view(param.shape))
        if narrow:  # rounded once
            param.copy_(wide)

    def _gains_of(self, group: dict[str, Any], row: _Row) -> tuple[Tensor, Tensor]:
        """Returns the gains of rows (stacked, R, 1) and columns (stacked, 1, C), renewed in every fourth step."""
        self._statistics_of(row.param)
        state = self.state[row.param]
        gains = state[_GAINS] if self._stacked > 1 else state[_GAINS][None]
        if int(state[_COUNT]) % self.EVERY == 0:
            self._take_gradient(group, row, state, gains)
        state[_COUNT] += 1
        rows = _local(row.param).shape[1 if self._stacked > 1 else 0]
        return gains[:, :rows, None], gains[:, None, rows:]

    def _take_gradient(self, group: dict[str, Any], row: _Row, state: dict[str, Any], gains: Tensor) -> None:
        """Takes a gradient into the statistics, and writes the new gains."""
        (beta1, beta2), t = group["betas"], int(state[_COUNT])
        grad = self._matrices(row.grad)
        size = gains.shape[1]
        of_v, own_sketch = state[_MEANS].view(len(grad), -1).split(size, dim=1)
        of_both, sketch, common = state[_SHARED].view(len(grad), -1).split([2 * size, size, 2], dim=1)
        squares = signal = _means_of_product(grad, grad)
        if t >= _PLAIN:
            # m is the average of -g if the loss is maximized.
            correction = (-1 if group["maximize"] else 1) / (1 - beta1**t)
            signal = _means_of_product(grad, self._matrices(row.exp_avg)).mul_(correction)
        weight = 1 - beta2 ** (self.EVERY if t else 1)
        of_v.lerp_(squares, weight)
        of_both.lerp_(torch.cat([squares, signal], dim=1), weight)
        now = _sketch(grad)
        # At first, the average has hardly been mixed.
        products = [(now * before).sum(1, keepdim=True) for before in (own_sketch if t < _PLAIN else sketch, own_sketch)]
        common.lerp_(torch.cat(products, dim=1), weight)
        own_sketch.lerp_(now, 1 - _KEPT)
        sketch.lerp_(now, 1 - _KEPT)
        gains.copy_(_gains(of_v, of_both, common, grad.shape[1], self._replicas))


def _means_of_product(a: Tensor, b: Tensor) -> Tensor:
    """The means of a⊙b over each row and each column: (stacked, R, C), twice -> (stacked, R + C), float32."""
    _, rows, columns = a.shape
    products = (part.float() * other.float() for part, other in zip(_blocks(a), _blocks(b), strict=True))
    # Products with vectors are several times as fast as means, of columns above all.
    return _sums(products, torch.full((rows,), 1 / rows, device=a.device), torch.full((columns,), 1 / columns, device=a.device))


def _sketch(a: Tensor) -> Tensor:
    """The sums over each row and each column with random signs, as large as one entry: (stacked, R, C) -> (stacked, R + C)."""
    _, rows, columns = a.shape
    return _sums((part.float() for part in _blocks(a)), _signs(rows, a.device), _signs(columns, a.device))


@cache
def _signs(size: int, device: torch.device) -> Tensor:
    """±1/√size, the same in every process. Without signs, the sums of many gradients are 0, as behind a layer norm."""
    bits = np.unpackbits(np.frombuffer(random.Random(size).randbytes(size // 8 + 1), np.uint8), count=size)
    return torch.from_numpy((1 - 2 * bits.astype(np.float32)) / np.float32(size**0.5)).to(device)


def _blocks(a: Tensor) -> tuple[Tensor, ...]:
    """Blocks of rows on the CPU, else the whole: (stacked, R_i, C)."""
    size = max(1, _BLOCK * a.shape[1] // a.numel()) if a.device.type == "cpu" and len(a) == 1 else a.shape[1]
    return torch.split(a, size, dim=1)


def _sums(parts: Iterable[Tensor], over_rows: Tensor, over_columns: Tensor) -> Tensor:
    """The sums, with the given weights, of each row and each column of blocks (stacked, R_i, C): (stacked, R + C), float32."""
    of_rows, of_columns, done = [], [], 0
    # A backward inside of autocast runs the wrapper's steps there, too.
    with torch.autocast(over_rows.device.type, enabled=False):
        for part in parts:
            of_rows.append(part @ over_columns)
            of_columns.append(part.transpose(1, 2) @ over_rows[done : done + part.shape[1]])
            done += part.shape[1]
    return torch.cat([*of_rows, torch.stack(of_columns).sum(0)], dim=1)


def _is_plain(row: _Row) -> bool:
    """Whether torch's fused kernel, which looks at memory rather than shapes and strides, takes these tensors."""
    found = {
        (type(tensor) in (Tensor, torch.nn.Parameter), tensor.is_contiguous() and not tensor.is_neg(), tensor.dtype)
        for tensor in row.tensors
    }
    return found == {(True, True, row.param.dtype)} and row.step.dtype == torch.float32


def _gains(means: Tensor, shared: Tensor, common: Tensor, rows: int, n: int) -> Tensor:
    """The gains of the formula and ``means`` (v) are (stacked, R + C), ``shared`` (V, S) twice that, ``common`` (a, b) two."""
    v, s = shared.chunk(2, dim=1)
    rho = (v / means.clamp(min=_TINY)).clamp_(1 / n, _LARGE)
    whole = (v[:, :rows].mean(1) / means[:, :rows].mean(1).clamp(min=_TINY)).clamp_(1 / n, _LARGE)
    # The sum of s and the products of sketches estimate the same. In the unit of the larger, no square leaves float32's range.
    total = s.sum(1, keepdim=True).clamp_(min=0)
    unit = torch.maximum(common[:, 1:], total).clamp_(min=_TINY)
    a, b = (common / unit).clamp_(min=0).chunk(2, dim=1)
    prior = (_PRIOR * total / unit).square_() + _TINY
    h = (torch.minimum(a, b) * b + prior) / (b * b + prior)
    kappa = (h * s / v.clamp(min=_TINY)).clamp_(0, 1)
    gains = rho.rsqrt_() * (1 / n + (1 - 1 / n) * kappa).pow_(-0.25)
    gains[:, :rows] *= whole.sqrt_()[:, None]
    return gains


def _local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this worker, which shares its memory; any other tensor itself."""
    if type(tensor).__name__ != "DTensor":
        return tensor
    sharded: Any = tensor
    part: Tensor = sharded.to_local()
    return part
