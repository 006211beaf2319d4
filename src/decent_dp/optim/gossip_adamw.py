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

With uneven data the mean gradients of the replicas differ, and s contains what they do not have in common. The rule
``DriftCorrection`` estimates the drift D of a replica, by which one of its steps differs from the mean of all. In units of the
gradient that is δ = -D·(√v'+ε)/lr, and the signal that all have in common is

    c  <-  β2·c + (1-β2)·g⊙(m/(1-β1^(t-1)) - δ)                without this rule c = s

Row and column means of g⊙δ are bounded by four times those of g⊙g. While the rate falls faster than drifts are forgotten, D
belongs to higher rates, and c takes the share of s that it has.

Let v_r, v_c and v̄ be the means of v over row r, column c and all of this replica's matrix, and V, S and C the averages of such
means of v, s and c over the replicas:

    F_r = C_r / V_r + (1 - S_r / V_r)/n,   F_c likewise     with S/V and C/V clamped to [0, 1], and F at least 1/(4n)
    ρ_r = V_r / v_r,   ρ_c = V_c / v_c,   ρ = V̄ / v̄       at least 1/n, because V contains v/n
    v'  = v · (ρ_r·ρ_c/ρ) · √(F_r·F_c)                      the second moment to divide by
    v'  = V_r·V_c/V̄ · √(F_r·F_c)                           with the rule: the same for all replicas; at least v/(4n²)

Replicas may have batches of unequal sizes a_i, whose mean gradients are weighted by a_i (``gossip(weight=...)``). Let A = Σ a,
and s² be the noise of one sample. The noise in v is s²/a_i, and that of the global batch Σ (a_i/A)²·s²/a_i = s²/A, which is
a_i/A of it: F = a_i/A + (1 - a_i/A)·κ. V, S and C are averaged with the weights, as the parameters are, so that the noise in V
is Σ (a_i/A)·s²/a_i = n·s²/A. Of this the noise of the global batch is 1/n, so F_r and F_c stay as they are. V contains
v·a_i/A, so the bounds of ρ and v' are a_i/A and v·a_i/(4nA).

The update is AdamW's with v' in place of v. Without the rule it is computed as AdamW's times the gain √(v/v') of its row and
column. Statistics and gains are renewed in every fourth step (with β2⁴, and with m as it is then), and averaged in every fourth
round. Biases and other vectors get AdamW's update.
docs/gossip-adamw.md derives this, with the bias and the variance of the estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.adamw import AdamW, adamw
from torch.optim.optimizer import ParamsT

from decent_dp._checks import check_integer
from decent_dp.kernels import tables
from decent_dp.optim.gossip_state import (
    BOUND,
    COUNT,
    FALL,
    GAINS,
    KEPT,
    LARGE,
    LR,
    MEANS,
    PLAIN,
    ROOTS,
    SHARED,
    SMALLEST,
    STATISTICS,
    TINY,
    UpdateRow,
)
from decent_dp.optim.loading import given_state, pairs
from decent_dp.optim.statistics import SharesStatistics

__all__ = ["GossipAdamW"]

# Elements of a block of rows on the CPU: operands and temporaries of a few blocks fit into a cache of some MiB.
_BLOCK = 256 * 1024

# A part of a matrix, and the gains of its rows and columns.
_Piece: TypeAlias = "tuple[UpdateRow, Tensor, Tensor]"


class GossipAdamW(AdamW, SharesStatistics):
    """AdamW whose steps are as large as those of DDP with the same settings, although a replica sees only its own batch.

    ``gossip`` and ``DecentralizedDataParallel`` tell it the number of replicas, and average its statistics with the
    parameters (about two per cent more bytes). On its own, and with one replica, it is ``torch.optim.AdamW`` bit for bit.
    Bring the learning rate, betas and weight decay of the DDP run. The formula is at the top of this module.

    The state is AdamW's, and for each matrix of R rows and C columns three vectors of 5(R + C) float32 numbers in all (with
    ``DriftCorrection`` four, of 6(R + C)). The state dict of an AdamW can be loaded: the statistics then start from its second
    moment. Of a sharded parameter (DTensor), each worker keeps the means over its own part.

    Args:
        params: parameters, named parameters ``(name, parameter)`` or param groups; dense.
        lr: learning rate, a number or a 1-element tensor.
        betas: (β1, β2), each in [0, 1).
        eps: ε, added to the root of this replica's own second moment (with ``DriftCorrection``, of v').
        weight_decay: every update first shrinks x by the factor 1 - lr·weight_decay.
        amsgrad, maximize, foreach, fused: as in ``torch.optim.AdamW``. All forms are equal up to rounding. With more than one
            replica, kernels in Triton make the step of contiguous parameters on CUDA, unless foreach is False. Elsewhere
            matrices are updated one after another with ``DriftCorrection``. With amsgrad, drifts are not used.

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
        # The global batch, in batches of this replica: n if all have equal ones.
        self._batches: float = 1
        # The parameters of this many replicas lie in each tensor, one after another along the first dimension (the simulator).
        self._stacked = 1
        self._drift_of: Callable[[Tensor], Tensor | None] = _no_drift
        self._drift_scale = 1.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A parameter that has had no gradient yet has statistics alone, and torch expects a count of steps.
        for entry in state.get("state", {}).values():
            entry.setdefault("step", torch.zeros((), dtype=torch.float32, device="cpu"))
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name, value in {"_replicas": 1, "_batches": 1, "_stacked": 1, "_drift_of": _no_drift, "_drift_scale": 1.0}.items():
            vars(self).setdefault(name, value)

    # -- with other replicas ------------------------------------------------------------------------------------------------

    def set_replicas(self, n: int, share: float | None = None, *, stacked: bool = False) -> None:
        """Sets the number of replicas; 1 when the optimizer is on its own again.

        Args:
            share: of this replica in the weight of all, in (0, 1]; None: 1/n.
            stacked: the parameters of all n replicas lie in each tensor, one after another along the first dimension, as in the
                simulator.
        """
        if self._replicas == 1:
            for state in self.state.values():
                # It has stepped on its own since then: the second moment is newer than the statistics.
                if COUNT in state and float(state[COUNT]) != float(state.get("step", 0)):
                    _drop_statistics(state)
        self._replicas = check_integer("the number of replicas", n, 1)
        self._batches = self._replicas if share is None else 1 / share
        self._stacked = n if stacked else 1
        if self._replicas > 1:
            # An overflow on a GPU would be known only to the kernel, and the statistics must not take it: the GradScaler
            # unscales the gradients and skips the step itself.
            self._step_supports_amp_scaling = False
            self.statistics()
        else:
            self._drift_of = _no_drift

    def set_drifts(self, drift_of: Callable[[Tensor], Tensor | None], scale: float) -> None:
        self._drift_of, self._drift_scale = drift_of, scale

    def _drift(self, group: dict[str, Any], param: Tensor) -> Tensor | None:
        # Of the common second moment there is no maximum.
        return None if group["amsgrad"] else self._drift_of(param)

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
        if not state.keys() >= KEPT:
            _drop_statistics(state)
            if "exp_avg_sq" in state:
                moment = self._matrices(state["exp_avg_sq"])
                means = _means_of_product(moment, torch.ones_like(moment))
            else:
                stacked, rows, columns = self._matrices(param).shape
                means = torch.zeros(stacked, rows + columns, dtype=torch.float32, device=_local(param).device)
            means = means if self._stacked > 1 else means[0]
            state[MEANS] = means.clone()
            # V and, with κ = 1, S and C. (c + (v - s)/n is linear in them, so a second moment that was loaded fades out.)
            state[SHARED] = torch.cat([means, means, means], dim=-1)
            # AdamW's own count may be on a GPU, where reading it in each step would wait.
            state[COUNT] = torch.tensor(float(state.get("step", 0)), dtype=torch.float32, device="cpu")
            state[LR] = torch.zeros((), dtype=torch.float32, device="cpu")
        shared: Tensor = state[SHARED]
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
                for entry, wanted in ((MEANS, size), (SHARED, 3 * size), (GAINS, size), (ROOTS, size)):
                    if entry in state and state[entry].shape[-1:] != (wanted,):
                        self._refuse_shape(key, entry, state[entry], param, (wanted,))

        def restore(given: dict[str, Any]) -> None:
            for _, param, state in pairs(self.param_groups, given):
                for entry in STATISTICS & state.keys():
                    on = "cpu" if entry in (COUNT, LR) else param.device
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
            if self._replicas > 1:
                rows = self._step_by_kernels(group, rows)
            gained = [row for row in rows if self._replicas > 1 and self._is_matrix(row.param)]
            chosen = {id(row.param) for row in gained}
            vectors = [row for row in rows if id(row.param) not in chosen]
            self._adamw(group, vectors, fused=self._fused(group, vectors))
            self._step_matrices(group, gained)
        return loss

    def _gather(self, group: dict[str, Any]) -> list[UpdateRow]:
        """The parameters that have a gradient; makes missing state, as AdamW does."""
        rows = []
        moments = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} does not support sparse gradients, but a parameter of shape "
                    f"{tuple(param.shape)} has one ({grad.layout}): make it dense (nn.Embedding(..., sparse=False)) or "
                    "use torch.optim.SparseAdam"
                )
            state = self.state[param]
            if "exp_avg" not in state:
                on = param.device if group["fused"] else torch.device("cpu")
                wide = torch.get_default_dtype() == torch.float64 and not group["fused"]
                state["step"] = torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=on)
                for key in moments:
                    state[key] = torch.zeros_like(param, memory_format=torch.preserve_format)
            largest = state["max_exp_avg_sq"] if group["amsgrad"] else None
            rows.append(UpdateRow(param, grad, state["exp_avg"], state["exp_avg_sq"], largest, state["step"]))
        return rows

    def _adamw(self, group: dict[str, Any], rows: list[UpdateRow], **options: Any) -> None:
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

    def _fused(self, group: dict[str, Any], rows: list[UpdateRow]) -> bool | None:
        """Whether torch's fused kernel updates these parameters; None: as AdamW does by default."""
        if group["fused"] is not None or group["foreach"] is not None or self._replicas == 1:
            return cast("bool | None", group["fused"])
        # Four times as fast as the default of AdamW on the CPU.
        return True if all(row.param.device.type == "cpu" and _is_plain(row) for row in rows) else None

    @_disable_dynamo
    def _step_by_kernels(self, group: dict[str, Any], rows: list[UpdateRow]) -> list[UpdateRow]:
        """Steps the parameters that the kernels for CUDA can take, many in one launch; returns the others."""
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        readable = group["foreach"] is False or group["amsgrad"] or self._stacked > 1 or scaled
        if readable or not any(tables.usable(device) for device in {row.param.device for row in rows}):
            return rows
        tables.refuse_capture(type(self).__name__)
        from decent_dp.optim.gossip_kernels import KernelStep, takes  # imports Triton

        step, others = KernelStep(group, self._replicas, self._batches, self.EVERY, self._drift_scale), []
        for row in rows:
            drift = self._drift(group, row.param)
            if not takes(group, row, drift):
                others.append(row)
            elif self._is_matrix(row.param):
                self._statistics_of(row.param)
                step.add_matrix(row, self.state[row.param], drift)
            elif row.step.is_cpu:
                step.add_vector(row)
            else:  # reading the count of steps would wait for the GPU
                others.append(row)
        step.run()
        return others

    # Its blocks have many shapes, for each of which torch.compile would trace it anew.
    @_disable_dynamo
    def _step_matrices(self, group: dict[str, Any], rows: list[UpdateRow]) -> None:
        """AdamW's update of zeros gives the change of each matrix, which is multiplied by the gains of its rows and columns."""
        shared = [row for row in rows if self._drift(group, row.param) is not None]
        for row in shared:
            self._step_by_shared_moment(group, row)
        chosen = {id(row.param) for row in shared}
        rows = [row for row in rows if id(row.param) not in chosen]
        pieces = [piece for row in rows for piece in self._pieces(row, *self._factors_of(group, row, GAINS))]
        for together in _in_parts(pieces):
            changes = [UpdateRow.of([torch.zeros_like(r.param), *r.tensors[1:]], r.step.clone()) for r, _, _ in together]
            self._adamw(group, changes, fused=self._fused(group, changes), weight_decay=0.0)
            for (row, of_rows, of_columns), change in zip(together, changes, strict=True):
                self._move(row.param, change.param, of_rows, of_columns, 1 - group["lr"] * group["weight_decay"])
        for row in rows:
            row.step.add_(1)

    def _step_by_shared_moment(self, group: dict[str, Any], row: UpdateRow) -> None:
        """AdamW's update with the second moment that all replicas have in common."""
        (beta1, beta2), lr = group["betas"], group["lr"]
        of_rows, of_columns = self._factors_of(group, row, ROOTS)
        t = int(self.state[row.param][COUNT])
        # A row may get its first gradient between two renewals. If no other replica has one, this is the second moment of ḡ.
        scale, smallest = -lr / (1 - beta1**t), SMALLEST / (self._replicas * self._batches * (1 - beta2**t))
        for piece, roots, _ in self._pieces(row, of_rows, of_columns):
            grad = -piece.grad if group["maximize"] else piece.grad
            piece.exp_avg.lerp_(grad, 1 - beta1)
            piece.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            v = piece.exp_avg_sq.float() if _is_narrow(piece.exp_avg_sq) else piece.exp_avg_sq
            change = self._matrices(v * smallest).sqrt_()  # in place from here on, so that blocks stay in the cache
            torch.maximum(roots * of_columns, change, out=change).add_(group["eps"])
            torch.div(self._matrices(piece.exp_avg), change, out=change).mul_(scale)
            _shrink_and_add(piece.param, 1 - lr * group["weight_decay"], change.view(piece.param.shape))
        row.step.add_(1)

    def _pieces(self, row: UpdateRow, of_rows: Tensor, of_columns: Tensor) -> Iterator[_Piece]:
        """The parts of a matrix on this worker with their gains: blocks of rows on the CPU, else the whole."""
        tensors = [_local(tensor.detach()) for tensor in row.tensors]
        whole = UpdateRow.of(tensors, row.step)
        small = whole.param.numel() <= _BLOCK
        if small or self._stacked > 1 or whole.param.device.type != "cpu" or not _is_plain(whole):
            yield whole, of_rows, of_columns
            return
        size = max(1, _BLOCK * len(whole.param) // whole.param.numel())
        blocks = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
        for block, gains in zip(blocks, torch.split(of_rows, size, dim=1), strict=True):
            yield UpdateRow.of(block, row.step), gains, of_columns

    def _move(self, param: Tensor, change: Tensor, of_rows: Tensor, of_columns: Tensor, keep: float | Tensor) -> None:
        """param <- keep·param + change·gains"""
        matrices = self._matrices(change.float() if _is_narrow(param) else change)
        _shrink_and_add(param, keep, matrices.mul_(of_rows).mul_(of_columns).view(param.shape))

    def _factors_of(self, group: dict[str, Any], row: UpdateRow, kind: str) -> tuple[Tensor, Tensor]:
        """Returns gains or roots of rows (stacked, R, 1) and columns (stacked, 1, C), renewed in every fourth step."""
        self._statistics_of(row.param)
        state = self.state[row.param]
        if int(state[COUNT]) % self.EVERY == 0:
            self._take_gradient(group, row, state, kind)
        elif kind not in state:  # it is that of an AdamW, or of a run with another rule
            self._renew(state, group["betas"][1] ** int(state[COUNT]), row, kind)
        state[COUNT] += 1
        factors = state[kind] if self._stacked > 1 else state[kind][None]
        rows = self._matrices(row.param).shape[1]
        return factors[:, :rows, None], factors[:, None, rows:]

    def _renew(self, state: dict[str, Any], fading: float, row: UpdateRow, kind: str) -> None:
        """Writes the gains or the roots; ``fading`` is the weight of zeros in the averages."""
        rows = self._matrices(row.param).shape[1]
        of_v, of_all = state[MEANS].view(self._stacked, -1), state[SHARED].view(self._stacked, -1)
        for entry in (GAINS, ROOTS):
            state.pop(entry, None)
        if kind == ROOTS:
            factors = _roots(of_v, of_all, rows, self._replicas, self._batches, fading)
        else:
            factors = _gains(of_v, of_all, rows, self._replicas, self._batches)
        state[kind] = factors.view_as(state[MEANS])

    def _take_gradient(self, group: dict[str, Any], row: UpdateRow, state: dict[str, Any], kind: str) -> None:
        """Takes a gradient into the statistics, and renews what follows from them."""
        (beta1, beta2), t = group["betas"], int(state[COUNT])
        grad = self._matrices(row.grad)
        of_v, of_all = state[MEANS].view(len(grad), -1), state[SHARED].view(len(grad), -1)
        squares = signal = common = _means_of_product(grad, grad)
        if t >= PLAIN:
            # m is the average of -g if the loss is maximized.
            sign = -1 if group["maximize"] else 1
            signal = common = _means_of_product(grad, self._matrices(row.exp_avg)).mul_(sign / (1 - beta1**t))
            drift = self._drift(group, row.param)
            if drift is not None:
                lr, slowest = float(group["lr"]), FALL * float(state[LR])
                state[LR].fill_(max(lr, slowest))
                if lr < slowest or lr == 0 or ROOTS not in state:
                    _, s, c = of_all.chunk(3, dim=1)
                    common = signal * (c / s.clamp(min=TINY)).clamp_(0, 1)
                else:
                    by_gradient = self._drift_by_gradient(drift, grad, state[ROOTS].view(len(grad), -1), group["eps"])
                    by_gradient.mul_(sign / (lr * self._drift_scale))
                    common = signal + torch.clamp(by_gradient, -BOUND * squares, BOUND * squares)
        weight = 1 - beta2 ** (self.EVERY if t else 1)
        of_v.lerp_(squares, weight)
        of_all.lerp_(torch.cat([squares, signal, common], dim=1), weight)
        self._renew(state, beta2 ** (t + 1), row, kind)

    def _drift_by_gradient(self, drift: Tensor, grad: Tensor, roots: Tensor, eps: float) -> Tensor:
        """The means of g⊙D⊙(√v'+ε), where D is the drift, over each row and each column: (stacked, R + C), float32."""
        rows = grad.shape[1]
        tensors = grad, self._matrices(drift), roots[:, :rows, None]
        return _means(
            # In an order that forms no products of small numbers.
            ((of_rows * roots[:, None, rows:]).add_(eps).mul_(part).mul_(g) for g, part, of_rows in _blocks(*tensors)),
            grad,
        )


def _means_of_product(a: Tensor, b: Tensor) -> Tensor:
    """The means of a⊙b over each row and each column: (stacked, R, C), twice -> (stacked, R + C), float32."""
    return _means((part.float() * other.float() for part, other in _blocks(a, b)), a)


def _means(parts: Iterable[Tensor], whole: Tensor) -> Tensor:
    """The means over each row and each column of the blocks of a matrix: (stacked, R_i, C) -> (stacked, R + C)."""
    _, rows, columns = whole.shape
    # Products with vectors are several times as fast as means, of columns above all.
    over_rows, over_columns = (
        torch.full((size,), 1 / size, dtype=torch.float32, device=whole.device) for size in (rows, columns)
    )
    of_rows, of_columns, done = [], [], 0
    # A backward inside of autocast runs the wrapper's steps there, too.
    with torch.autocast(whole.device.type, enabled=False):
        for part in parts:
            of_rows.append(part @ over_columns)
            of_columns.append(part.transpose(1, 2) @ over_rows[done : done + part.shape[1]])
            done += part.shape[1]
    return torch.cat([*of_rows, torch.stack(of_columns).sum(0)], dim=1)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Blocks of rows of each tensor on the CPU, else the whole: (stacked, R_i, C)."""
    a = tensors[0]
    if a.numel() <= _BLOCK or a.device.type != "cpu" or len(a) > 1:
        return iter([tensors])
    size = max(1, _BLOCK * a.shape[1] // a.numel())
    return zip(*(torch.split(tensor, size, dim=1) for tensor in tensors), strict=True)


def _in_parts(pieces: list[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that are updated together: a few that stay in the cache of a CPU; on a GPU all, as fewer kernels are faster."""
    part: list[_Piece] = []
    elements = 0
    on_cpu = all(row.param.device.type == "cpu" for row, _, _ in pieces)
    for piece in pieces:
        size = piece[0].param.numel()
        if part and on_cpu and elements + size > _BLOCK:
            yield part
            part, elements = [], 0
        part.append(piece)
        elements += size
    if part:
        yield part


def _is_plain(row: UpdateRow) -> bool:
    """Whether torch's fused kernel, which looks at memory rather than shapes and strides, takes these tensors."""
    found = {
        (type(tensor) in (Tensor, torch.nn.Parameter), tensor.is_contiguous() and not tensor.is_neg(), tensor.dtype)
        for tensor in row.tensors
    }
    return found == {(True, True, row.param.dtype)} and row.step.dtype == torch.float32


def _gains(means: Tensor, shared: Tensor, rows: int, n: int, batches: float) -> Tensor:
    """The gains of the formula; they and ``means`` (v) are (stacked, R + C), ``shared`` (V, S, C) three times that."""
    v, s, c = shared.chunk(3, dim=1)
    rho = (v / means.clamp(min=TINY)).clamp_(1 / batches, LARGE)
    whole = (v[:, :rows].mean(1) / means[:, :rows].mean(1).clamp(min=TINY)).clamp_(1 / batches, LARGE)
    gains = rho.rsqrt_() * _share_of_global_batch(v, s, c, n).pow_(-0.25)
    gains[:, :rows] *= whole.sqrt_()[:, None]
    return gains


def _roots(means: Tensor, shared: Tensor, rows: int, n: int, batches: float, fading: float) -> Tensor:
    """The factors of √v' of the formula that is the same for all replicas: (stacked, R + C)."""
    v, s, c = shared.chunk(3, dim=1)
    # V contains v/batches. With overlap a difference is added to averages that have faded since: less than zero can be left.
    v = torch.maximum(v, means / batches)
    # √F is the product of the fourth roots of rows and columns.
    roots = v.sqrt() * _share_of_global_batch(v, s, c, n).pow_(0.25)
    # The weight of zeros cancels here, so that it is corrected once in a product of roots.
    roots[:, :rows] *= (v[:, :rows].mean(1, keepdim=True) * (1 - fading)).clamp_(min=TINY).rsqrt_()
    return roots


def _share_of_global_batch(v: Tensor, s: Tensor, c: Tensor, n: int) -> Tensor:
    """F of the formula."""
    of_signal, common = ((part / v.clamp(min=TINY)).clamp_(0, 1) for part in (s, c))
    return (common + (1 - of_signal) / n).clamp_(min=SMALLEST / n)


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _shrink_and_add(param: Tensor, keep: float | Tensor, change: Tensor) -> None:
    """param <- keep·param + change, rounded once."""
    wide = param.float() if _is_narrow(param) else param
    wide.mul_(keep).add_(change)
    if wide is not param:
        param.copy_(wide)


def _drop_statistics(state: dict[str, Any]) -> None:
    for entry in STATISTICS & state.keys():
        del state[entry]


def _no_drift(_: Tensor) -> None:
    """Of a replica whose rule estimates none."""


def _local(tensor: Tensor) -> Tensor:
    """The part of a DTensor on this worker, which shares its memory; any other tensor itself."""
    if type(tensor).__name__ != "DTensor":
        return tensor
    sharded: Any = tensor
    part: Tensor = sharded.to_local()
    return part
