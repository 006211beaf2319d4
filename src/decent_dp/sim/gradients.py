"""Losses and gradients of all replicas: in one pass (``torch.func.vmap``), or one replica after another.

The first step shows which: it also computes one replica on its own, and what differs from that is not used.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decent_dp.sim.loop import LOSS_FN_TYPE, Loop, Scale, try_out, unused_model
from decent_dp.sim.onepass import OnePass, differs, unfit
from decent_dp.sim.stack import Stack

__all__ = ["LOSS_FN_TYPE", "Found", "Gradients"]

_log = logging.getLogger(__name__)


@dataclass
class Found:
    """What a step's forward and backward gave.

    Attributes:
        losses: (n,), detached and unscaled.
        stacked: one gradient a trainable parameter, (n, *shape), None where it has none; None if there are only ``rows``.
        rows: for each replica one gradient a trainable parameter, None where it has none. Views of ``stacked`` if there is one.
    """

    losses: Tensor
    stacked: list[Tensor | None] | None
    rows: Sequence[list[Tensor | None]]


class _Rows(Sequence[list["Tensor | None"]]):
    """The rows of stacked gradients, as they are asked for."""

    def __init__(self, stacked: list[Tensor | None], n: int) -> None:
        self._stacked, self._n = stacked, n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, i: Any) -> Any:
        return [None if gradient is None else gradient[i] for gradient in self._stacked]


class _DiffersError(Exception):
    """The pass does not come to what a replica comes to on its own."""


class Gradients:
    """Computes them.

    Args:
        stack: the replicas.
        loss_fn: called as ``loss_fn(model, *batch)``.
        vectorize: True: in one pass, or raise; False: the loop; None: in one pass if the first step shows that it goes.

    Attributes:
        vectorized: None as long as that is open.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE, vectorize: bool | None) -> None:
        self._stack, self._loss_fn, self._wanted = stack, loss_fn, vectorize
        self._pass: OnePass | None = None
        self._loop: Loop | None = None
        self._refusal: Exception | None = None
        self.vectorized = vectorize

    def __call__(self, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        """The losses and gradients.

        Raises:
            RuntimeError: the model cannot be computed in one pass, and that was asked for, or earlier steps were.
            Exception: what ``loss_fn`` and the model raise. Parameters and buffers are then what they were.
        """
        if self.vectorized is False:
            return self._one_by_one(batch, scale)
        return self._first(batch, scale) if self._pass is None else self._later(self._pass, batch, scale)

    def _first(self, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        stack = self._stack
        trial = try_out(stack, 0, self._loss_fn, batch, scale)  # an error of the user's own comes here
        kept = _Kept([*stack.params.values(), *stack.frozen.values(), *stack.buffers.values()])
        one_pass = OnePass(stack, self._loss_fn)
        try:
            difference = unfit(trial)
            if difference:
                raise _DiffersError(difference)
            losses, gradients = one_pass(batch, scale)
            difference = differs(trial, stack, losses[0], [None if g is None else g[0] for g in gradients])
            if difference:
                raise _DiffersError(difference)
        except Exception as error:
            refusal = error
        else:
            if trial.depends and all(gradient is None for gradient in trial.gradients):
                kept.restore()
                raise unused_model()
            one_pass.used = [gradient is not None for gradient in trial.gradients]
            self._pass, self.vectorized = one_pass, True
            stacked = [g if used else None for g, used in zip(gradients, one_pass.used, strict=True)]
            return Found(losses, stacked, _Rows(stacked, stack.n))
        kept.restore()  # what was half done must not be done twice
        if self._wanted:
            raise RuntimeError(
                f"vectorize=True, but this model cannot be computed for all replicas at once ({_cause(refusal)}): pass "
                "vectorize=False, or None to be given what goes"
            ) from refusal
        found = self._one_by_one(batch, scale)  # an error of the user's own comes again here
        self.vectorized = False
        _log.warning(
            "this model cannot be computed for all replicas at once (%s): it is computed replica by replica, which is slower. "
            "vectorize=False does so without trying.",
            _cause(refusal),
        )
        return found

    def _later(self, one_pass: OnePass, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        stack = self._stack
        if self._refusal is None:
            kept = _Kept(list(stack.buffers.values()))
            try:
                losses, stacked = one_pass(batch, scale)
            except BaseException as error:
                kept.restore()
                if not isinstance(error, Exception):
                    raise
                for i in range(stack.n):
                    try_out(stack, i, self._loss_fn, batch, scale)  # an error of the user's own comes here
                self._refusal = error
            else:
                return Found(losses, stacked, _Rows(stacked, stack.n))
        # For good: what the replicas' Python objects would be by now nobody knows.
        raise RuntimeError(
            f"this model can no longer be computed for all replicas at once, as it was in the first step "
            f"({_cause(self._refusal)}): pass vectorize=False"
        ) from self._refusal

    def _one_by_one(self, batch: Sequence[Tensor], scale: Scale | None) -> Found:
        if self._loop is None:
            self._loop = Loop(self._stack, self._loss_fn)
        kept = _Kept(list(self._stack.buffers.values()))
        try:
            losses, rows = self._loop(batch, scale)
        except BaseException:
            kept.restore()
            raise
        return Found(losses, None, rows)


class _Kept:
    """Tensors' values, to come back to."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._pairs = [(tensor, tensor.detach().clone()) for tensor in tensors]

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in self._pairs:
            tensor.copy_(value)


def _cause(error: Exception) -> str:
    """The first sentence, for a line of text."""
    said = str(error).strip().partition("\n")[0].partition(". ")[0]
    return said if isinstance(error, _DiffersError) else f"{type(error).__name__}: {said}"
