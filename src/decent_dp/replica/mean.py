"""Backup of a replica's own values while its parameters are a mean."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from decent_dp.replica.shards import local

__all__ = ["Mean"]

_log = logging.getLogger(__name__)


class Mean:
    """Keeps a replica's own values while its tensors are a mean. For a DTensor, this is the local part.

    Args:
        locate: called before tensors are read or written; it updates their storage.

    Attributes:
        backup: pairs (tensor, own value) while tensors have other values; None otherwise.
        scoped: whether the end of a with-block restores the backup.
        reverted: whether the last ``revert`` was not followed by another mean, so that one more would have nothing to do.
    """

    def __init__(self, locate: Callable[[], object]) -> None:
        self._locate = locate
        self.backup: list[tuple[Tensor, Tensor]] | None = None
        self.scoped = False
        self.reverted = False

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Backs up ``tensors``, unless there is a backup already."""
        if self.backup is None:
            self.backup = self._copies(tensors)

    @torch.no_grad()
    def revert(self) -> None:
        """Restores the replica's own values. Does nothing if it has them because they were restored before.

        Raises:
            RuntimeError: there is no backup.
        """
        if self.backup is None and self.reverted:
            _log.warning("revert_global_avg() was called again without a global_avg() in between: it did nothing.")
            return
        if self.backup is None:
            raise RuntimeError(
                "there is nothing to revert: call global_avg() (with will_revert=True) first. An update or a load after it "
                "drops the backup."
            )
        self._locate()
        for tensor, value in self.backup:
            local(tensor).copy_(value)
        self.backup, self.reverted = None, True

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Removes ``tensors`` from the backup: they have got new values."""
        released = {id(tensor) for tensor in tensors}
        self.backup = [pair for pair in self.backup or () if id(pair[0]) not in released]

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, the tensors have the replica's own values, which may be changed; afterwards they are the mean again."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._locate()
        for tensor, value in self.backup or ():
            present = local(tensor).clone()
            local(tensor).copy_(value)
            value.copy_(present)

    @contextlib.contextmanager
    def preserved(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Restores the present values of ``tensors`` at the end of the with-block.

        Released tensors are not restored, and none is if the backup was reverted or dropped by an update inside.
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
                self._locate()
                with torch.no_grad():
                    for tensor, value in before:
                        if id(tensor) in kept:
                            local(tensor).copy_(value)

    def _copies(self, tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        self._locate()
        return [(tensor, local(tensor).detach().clone()) for tensor in tensors]
