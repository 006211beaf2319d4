"""Losses and gradients of all replicas: in one pass (``torch.func.vmap``), or one replica after another.

The first step decides: it also computes one replica alone, and falls back to the loop if the pass differs from it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from decent_dp.tools.sim.loop import LOSS_FN_TYPE, Loop, compute_alone, unused_model
from decent_dp.tools.sim.stack import Snapshot, Stack
from decent_dp.tools.sim.vectorized import DiffersError, VectorizedPass

__all__ = ["LOSS_FN_TYPE", "Gradients", "StepGradients"]

_log = logging.getLogger(__name__)


@dataclass
class StepGradients:
    """The result of a step's forward and backward. Either ``stacked`` or ``rows`` is given.

    Attributes:
        losses: (n,), detached and unscaled.
        stacked: one gradient per trainable parameter, (n, *shape), None where it has none.
        rows: for each replica one gradient per trainable parameter, None where it has none.
    """

    losses: Tensor
    stacked: list[Tensor | None] | None = None
    rows: list[list[Tensor | None]] | None = None

    def of_replica(self, i: int) -> list[Tensor | None]:
        if self.stacked is not None:
            return [None if gradient is None else gradient[i] for gradient in self.stacked]
        assert self.rows is not None
        return self.rows[i]


class Gradients:
    """Computes losses and gradients.

    Args:
        stack: the replicas.
        loss_fn: called as ``loss_fn(model, *batch)``.
        vectorize: True: in one pass, or raise; False: the loop; None: in one pass if the first step shows that it is exact.

    Attributes:
        vectorized: None until the first step has decided.
    """

    def __init__(self, stack: Stack, loss_fn: LOSS_FN_TYPE, vectorize: bool | None) -> None:
        self._stack, self._loss_fn, self._required = stack, loss_fn, vectorize
        self._pass: VectorizedPass | None = None
        self._loop: Loop | None = None
        self._refusal: Exception | None = None
        self.vectorized = vectorize

    def __call__(self, batch: Sequence[Tensor], scales: Tensor | None) -> StepGradients:
        """The losses and gradients, of losses times ``scales`` if given.

        Raises:
            RuntimeError: the model cannot be computed in one pass, and ``vectorize`` requires it, or earlier steps were.
            Exception: an error of ``loss_fn`` or the model. Buffers and modules' Python attributes are as before then.
        """
        if self.vectorized is False:
            return self._one_by_one(batch, scales)
        return self._first(batch, scales) if self._pass is None else self._later(self._pass, batch, scales)

    def _first(self, batch: Sequence[Tensor], scales: Tensor | None) -> StepGradients:
        stack = self._stack
        reference = compute_alone(stack, 0, self._loss_fn, batch, scales)  # raises the user's own errors
        snapshot = Snapshot(stack.values().values())
        vectorized = VectorizedPass(stack, self._loss_fn)
        try:
            losses, stacked = vectorized.first(reference, batch, scales)
        except Exception as error:
            refusal = error
        else:
            if reference.depends and all(gradient is None for gradient in reference.gradients):
                snapshot.restore()
                raise unused_model()
            self._pass, self.vectorized = vectorized, True
            return StepGradients(losses, stacked)
        snapshot.restore()  # the loop must not find a half-done step
        if self._required:
            raise RuntimeError(
                f"vectorize=True, but this model cannot be computed for all replicas at once ({_cause(refusal)}): pass "
                "vectorize=False, or None to let the first step decide"
            ) from refusal
        found = self._one_by_one(batch, scales)  # raises the user's own errors
        self.vectorized = False
        _log.warning(
            "this model cannot be computed for all replicas at once (%s): it is computed replica by replica, which is slower. "
            "vectorize=False does so without trying.",
            _cause(refusal),
        )
        return found

    def _later(self, vectorized: VectorizedPass, batch: Sequence[Tensor], scales: Tensor | None) -> StepGradients:
        if self._refusal is None:
            try:
                return StepGradients(*vectorized(batch, scales))
            except Exception as error:
                for i in range(self._stack.n):
                    compute_alone(self._stack, i, self._loss_fn, batch, scales)  # raises the user's own errors
                self._refusal = error
        # For good: the loop would need each replica's own Python objects, and the pass had one for all.
        raise RuntimeError(
            f"this model can no longer be computed for all replicas at once, as it was in the first step "
            f"({_cause(self._refusal)}): pass vectorize=False"
        ) from self._refusal

    def _one_by_one(self, batch: Sequence[Tensor], scales: Tensor | None) -> StepGradients:
        if self._loop is None:
            self._loop = Loop(self._stack, self._loss_fn)
        losses, rows = self._loop(batch, scales)
        return StepGradients(losses, rows=rows)


def _cause(error: Exception) -> str:
    """The first sentence of an error's text."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0]
    return text if isinstance(error, DiffersError) else f"{type(error).__name__}: {text}"
