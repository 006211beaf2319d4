"""Collectives of a framework, among the workers that live, for runs with ``faults``.

The process group fails after a death. These go over the connections of the replica, and continue without those that are gone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from decent_dp.checkpoint import Saving
from decent_dp.errors import CheckpointError
from decent_dp.replica.consistency import call_on_all
from decent_dp.replica.replica import Replica
from decent_dp.serialization import decode, encode
from decent_dp.transport import Collectives

__all__ = ["LeftOut", "SurvivorCollectives", "save_again"]

T = TypeVar("T")

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg": lambda stack: stack.mean(0, dtype=None if stack.is_floating_point() else torch.float64),
    "sum": lambda stack: stack.sum(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0),
}


class SurvivorCollectives:
    """Collectives of the living workers, called by all of them in the same order. Results are in the order of ``ranks``.

    Each one has a name, and a number within its step, so that a worker that has missed some takes part in no other ones.

    Args:
        rank: this worker's.
        replica: whose workers speak; None after the training, when each worker is on its own.
        ranks: of the living workers, if there is no ``replica``.
        regrouped: called after each collective, when ``ranks`` may have changed.
    """

    def __init__(
        self, rank: int, replica: Replica | None, ranks: Sequence[int] = (), regrouped: Callable[[], None] = lambda: None
    ) -> None:
        self._rank, self._replica, self._regrouped = rank, replica, regrouped
        self._ranks, self._control = ranks, None if replica is None else replica.world.control
        # The rounds made at the last collective, and its number since the round before.
        self._made = self._number = -1

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the workers that took part in the last collective. The first one has the duties of worker 0."""
        return tuple(self._ranks if self._control is None else self._control.ranks)

    @property
    def is_alone(self) -> bool:
        """Whether collectives are those of this worker only."""
        return self._replica is None

    @property
    def position(self) -> tuple[int, int]:
        """This worker's index among those that share the data, and their number."""
        return (0, 1) if self.is_alone else (self.ranks.index(self._rank), len(self.ranks))

    def barrier(self) -> None:
        """Waits until all have come."""
        self.gather(None, "barrier")

    def gather(self, message: Any, what: str = "gather") -> list[Any]:
        """The messages of all, which are JSON. ``what``: names the call."""
        return self._call(what, lambda control: control.gather(message), [message])

    def gather_tensors(self, tensors: Sequence[Tensor], what: str = "gather_tensors") -> list[list[Tensor]]:
        """The tensors of all, on the CPU; shapes and dtypes may differ. ``what``: names the call."""
        return self._call(what, lambda control: control.gather_tensors(tensors), [list(tensors)])

    def gather_objects(self, value: Any) -> list[Any]:
        """The values of all; tensors arrive on the CPU.

        Raises:
            TypeError: a value holds something else than tensors, arrays, numbers, texts, paths, and lists, tuples and dicts of
                them; on all workers.
        """
        return self._call("gather_objects", lambda control: _objects_of_all(control, value), [value])

    def broadcast(self, value: Any, source: int) -> Any:
        """The value of the worker ``source``, or of the first one if that is gone. Raises as ``gather_objects``."""

        def make(control: Collectives) -> list[Any]:
            control.gather(None)  # who is there
            while True:
                chosen = source if source in control.ranks else control.ranks[0]
                found = _objects_of_all(control, value if self._rank == chosen else None)
                if chosen in control.ranks:
                    return [found[control.ranks.index(chosen)]]

        return self._call("broadcast", make, [value])[0]

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
            stack = torch.stack([own for (own,) in self.gather_tensors([tensor], "reduce")])
            return tensor.copy_(_REDUCTIONS[name](stack))

    def _call(self, what: str, make: Callable[[Collectives], list[T]], own: list[T]) -> list[T]:
        """What ``make`` returns; ``own`` if this worker is alone."""
        if self._replica is not None and self._control is not None:
            made = self._replica.cadence.made
            self._made, self._number = made, 1 if made != self._made else self._number + 1
            self._control.begin(f"{what}-{self._number}")
            own = make(self._control)
        self._regrouped()
        return own


class LeftOut:
    """The rounds for which this worker was out; a framework counts them as steps.

    Args:
        replica: in training.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._taken = 0
        self.take()

    def take(self) -> int:
        """How many since the last call."""
        before, self._taken = self._taken, self._replica.cadence.left_out(self._replica.engine.round)
        return self._taken - before

    @property
    def is_behind(self) -> bool:
        """Whether the others are in a later round."""
        return self._replica.cadence.is_behind(self._replica.engine.round)


def save_again(replica: Replica, save: Callable[[], Saving]) -> None:
    """Calls ``save``, and again without a worker that has died in it.

    Raises:
        Exception: the error of the save; on all workers.
    """
    control = replica.world.control
    while True:
        ranks = tuple(control.ranks)
        error = save().error
        if error is None:
            return
        if replica.survivors is not None and isinstance(error, CheckpointError):
            control.begin("save")
            control.gather(None)
        if tuple(control.ranks) == ranks:
            raise error


def _objects_of_all(control: Collectives, value: Any) -> list[Any]:
    text, tensors = call_on_all(control, partial(_encoded, value))
    head = torch.frombuffer(bytearray(json.dumps([text, *tensors]).encode()), dtype=torch.uint8)
    return [_decoded(*parts) for parts in control.gather_tensors([head, *tensors.values()])]


def _encoded(value: Any) -> tuple[str, dict[str, Tensor]]:
    try:
        return encode(value)
    except TypeError as error:
        raise TypeError(
            "with faults= collectives carry tensors, arrays, numbers, texts, paths, and lists, tuples and dicts of them, and "
            f"nothing else: {str(error).partition(':')[0]}"
        ) from error


def _decoded(head: Tensor, *tensors: Tensor) -> Any:
    text, *keys = json.loads(bytes(head.numpy()))
    by_key = dict(zip(keys, tensors, strict=True))
    return decode(text, lambda key: by_key[key])
