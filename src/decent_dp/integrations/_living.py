"""Collectives of a framework, among the workers that live, for runs with ``faults``.

The process group fails after a death. These go over the connections of the replica, and continue without those that are gone.
"""

from __future__ import annotations

import base64
import io
import pathlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp.checkpoint import Saving
from decent_dp.errors import CheckpointError
from decent_dp.replica.replica import Replica

__all__ = ["Living", "save_again", "tolerates"]

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg": lambda stack: stack.mean(0, dtype=None if stack.is_floating_point() else torch.float64),
    "sum": lambda stack: stack.sum(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0),
}
# Of the objects that frameworks broadcast, those that ``torch.load`` does not know as data.
_DATA: list[Any] = [pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath]


class Living:
    """Collectives of the living workers, called by all of them in the same order.

    Each one has a name, and a number within its step, so that a worker that has missed some takes part in no other ones.

    Args:
        rank: this worker's.
        replica: whose workers speak; None after the training, when each worker is on its own.
        ranks: of the living workers, if there is no ``replica``.
    """

    def __init__(self, rank: int, replica: Replica | None, ranks: Sequence[int] = ()) -> None:
        self._rank, self._replica = rank, replica
        self._control = None if replica is None else replica.everyone.control
        self._ranks = ranks
        # The rounds made at the last collective, and its number since the round before.
        self._made = self._number = -1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that took part in the last collective. The first one has the duties of worker 0."""
        return tuple(self._ranks if self._control is None else self._control.ranks)

    @property
    def is_alone(self) -> bool:
        """Whether collectives are those of this worker only."""
        return self._control is None

    @property
    def position(self) -> tuple[int, int]:
        """This worker's index among those that share the data, and their number."""
        return (0, 1) if self.is_alone else (self.ranks.index(self._rank), len(self.ranks))

    def barrier(self) -> None:
        """Waits until all have come."""
        if self._control is not None:
            self._begin("barrier")
            self._control.gather(None)

    def gather(self, value: Any, what: str = "gather") -> list[Any]:
        """The values of all, in the order of ``ranks``; tensors arrive on the CPU. ``what``: names the call.

        Raises:
            TypeError: a value holds something else than tensors, numbers, texts, paths, and lists, tuples and dicts of them.
        """
        if self._control is None:
            return [value]
        self._begin(what)
        return [_decoded(text) for text in self._control.gather(_encoded(value))]

    def _begin(self, what: str) -> None:
        assert self._replica is not None
        assert self._control is not None
        made = self._replica.cadence.made
        self._made, self._number = made, 1 if made != self._made else self._number + 1
        self._control.begin(f"{what}-{self._number}")

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of the worker ``source``, or of the first one if that is gone. Raises as ``gather``."""
        self.barrier()
        while True:
            ranks = self.ranks
            chosen = source if source in ranks else ranks[0]
            found = self.gather(value if self._rank == chosen else None, "broadcast")
            if self.is_alone:
                return value
            if chosen in self.ranks:
                return found[self.ranks.index(chosen)]

    def reduce_(self, tensor: Tensor, operation: Any) -> Tensor:
        """``tensor`` becomes the reduction over all, and is returned.

        Args:
            operation: 'mean', 'sum', 'max', 'min', 'product', or one of ``torch.distributed.ReduceOp``.

        Raises:
            ValueError: it is another one.
        """
        name = (operation if isinstance(operation, str) else getattr(operation, "name", str(operation))).lower()
        name = "avg" if name == "mean" else name
        if name not in _REDUCTIONS:
            raise ValueError(f"with faults= there is no reduction {operation!r}: choose one of {sorted(_REDUCTIONS)}")
        with torch.no_grad():
            return tensor.copy_(_REDUCTIONS[name](torch.stack(self.gather(tensor, "reduce"))))


def tolerates(replica: Replica | None) -> bool:
    """Whether there is a replica, which tolerates the death of others."""
    return replica is not None and replica.everyone.neighbours is not None


def save_again(replica: Replica, save: Callable[[], Saving]) -> None:
    """Calls ``save``, and again without a worker that has died in it.

    Raises:
        Exception: the error of the save; on all workers.
    """
    control = replica.everyone.control
    while True:
        ranks = tuple(control.ranks)
        error = save().error
        if error is None:
            return
        if tolerates(replica) and isinstance(error, CheckpointError):
            control.begin("save")
            control.gather(None)
        if tuple(control.ranks) == ranks:
            raise error


def _encoded(value: Any) -> str:
    file = io.BytesIO()
    torch.save(_owned(value), file)
    return base64.b64encode(file.getvalue()).decode()


def _owned(value: Any) -> Any:
    """With copies of tensors that are views: ``torch.save`` writes the whole storage of a tensor."""
    if type(value) in (list, tuple):
        return type(value)(map(_owned, value))
    if type(value) is dict:
        return {key: _owned(entry) for key, entry in value.items()}
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided
    return value.detach().clone() if is_plain and value.untyped_storage().nbytes() > value.nbytes else value


def _decoded(text: str) -> Any:
    with torch.serialization.safe_globals(_DATA):
        try:
            return torch.load(io.BytesIO(base64.b64decode(text)), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise TypeError(
                "with faults= collectives carry tensors, numbers, texts, paths, and lists, tuples and dicts of them, and "
                f"nothing else: {str(error).partition('.')[0]}"
            ) from error
