"""A replica that holds other values than its own for a while: the mean over the workers, or a moving average of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from decent_dp.replica.shards import local

__all__ = ["Mean"]


class Mean:
    """The values that a replica has kept while it is the mean. Of a DTensor they are this worker's part.

    Args:
        settle: called before tensors are read or written to.

    Attributes:
        backup: the tensors that are not the replica's own just now, and its own values; None while all are its own.
        scoped: the backup comes back by itself, at the end of a with-block.
    """

    def __init__(self, settle: Callable[[], object]) -> None:
        self._settle = settle
        self.backup: list[tuple[Tensor, Tensor]] | None = None
        self.scoped = False

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Puts the values of ``tensors`` aside, unless some are there already."""
        if self.backup is None:
            self.backup = self._copies(tensors)

    @torch.no_grad()
    def revert(self) -> None:
        """Puts the replica's own values back.

        Raises:
            RuntimeError: there is no backup.
        """
        if self.backup is None:
            raise RuntimeError(
                "there is nothing to revert: call global_avg() (with will_revert=True) first. An update or a load after it "
                "drops the backup."
            )
        self._settle()
        for tensor, value in self.backup:
            local(tensor).copy_(value)
        self.backup = None

    def release(self, tensors: Iterable[Tensor]) -> None:
        """``tensors`` get new values, and do not have their old ones back."""
        released = {id(tensor) for tensor in tensors}
        self.backup = [pair for pair in self.backup or () if id(pair[0]) not in released]

    @contextlib.contextmanager
    def holding(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside, other values may be written to ``tensors``; they have the present ones back after it.

        Not those that were released, and none if there is no backup any more: it was reverted, or an update has made the values
        the replica's own.
        """
        outer, outer_scoped = self.backup, self.scoped
        before = self._copies(tensors)
        covered = {id(tensor) for tensor, _ in outer or ()}
        self.backup = [*(outer or ()), *(pair for pair in before if id(pair[0]) not in covered)]
        self.scoped = outer_scoped or outer is None
        try:
            yield
        finally:
            self.scoped = outer_scoped
            if self.backup is not None:
                kept = {id(tensor) for tensor, _ in self.backup}
                self.backup = None if outer is None else [pair for pair in outer if id(pair[0]) in kept]
                self._settle()
                with torch.no_grad():
                    for tensor, value in before:
                        if id(tensor) in kept:
                            local(tensor).copy_(value)

    def _copies(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        self._settle()
        return [(tensor, local(tensor).detach().clone()) for tensor in tensors]
