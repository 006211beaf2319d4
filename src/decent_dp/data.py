"""Data dealt to the workers by position, however many there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler

from decent_dp._checks import check_integer
from decent_dp.checkpoint.saver import replica_of
from decent_dp.faults import Roster
from decent_dp.replica.shards import fsdp_modules, mesh_of

__all__ = ["RosterSampler"]

# What distinguishes the random numbers of a process without a seat from those of the order.
_GUEST = 2**32


class RosterSampler(Sampler[list[int]]):
    """The batches of this worker: each sample of the data goes to one worker once per epoch, also if workers leave and come.

    Data are dealt batch by batch, in an order that depends on the seed and the epoch alone: in each round every seat of the
    roster gets the next batch, or one for each worker of its node. So the position in the data follows from the round, and
    needs no messages. After a resume from a checkpoint it continues where it was: by itself if the workers have been the same
    from the beginning, else with ``state_dict``. What was dealt to a worker that died, or for rounds that a worker has skipped,
    is left out until the next epoch. A process without a seat (it is about to join, or was left out, or does not know yet who
    takes part in this round) draws at random.

    Pass it as ``batch_sampler`` to a ``DataLoader``. One pass is one epoch, and as many rounds on all workers. An incomplete
    last batch of an epoch is left out.

    Args:
        data: the data set, or its length.
        replica: what ``gossip()`` has returned, or the wrapper. With each batch it makes one round.
        batch_size: samples per worker and round.
        shuffle: in another order in each epoch.
        seed: of the order; the same on all workers.
        ahead: the batches that the loader fetches before they are needed: ``num_workers * prefetch_factor``. A change of the
            roster concerns the batches after these.

    Raises:
        ValueError, TypeError: an argument is out of range.
    """

    def __init__(
        self,
        data: Sized | int,
        replica: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        ahead: int = 0,
    ) -> None:
        self._replica = replica_of(replica, "RosterSampler")
        self._size = check_integer("the length of the data", data if isinstance(data, int) else len(data), 1)
        self._batch_size = check_integer("batch_size", batch_size, 1)
        # Each worker of a node, or of fully_shard, has a batch of its own. In a mesh of more dimensions some have the same one.
        own, mesh = self._replica.agreed.replicas, mesh_of(self._replica.model)
        has_own = mesh is None or (mesh.ndim == 1 and fsdp_modules(self._replica.model))
        self._position, self._workers = (own.place_of(self._replica.world.rank)[1], own.shards) if has_own else (0, 1)
        # The shares of an epoch: a seat has a batch for each of its workers.
        self._batches = self._size // (self._batch_size * self._workers)
        if not self._batches:
            times = "" if self._workers == 1 else f", for each of {self._workers} workers of a replica"
            raise ValueError(f"batch_size must be at most the length of the data, {self._size}, got {batch_size}{times}")
        self._shuffle, self._seed = shuffle, check_integer("seed", seed, 0)
        self._ahead = check_integer("ahead", ahead, 0)
        # The rosters of the rounds for which batches are drawn, oldest first; the epoch of the first one in which data were
        # dealt; and the newest round that was looked at.
        self._rosters: list[Roster] = []
        self._first, self._round = 0, 0
        self._order: tuple[int, np.ndarray[Any, Any]] | None = None
        self._drawn = 0

    def __len__(self) -> int:
        """The rounds of an epoch, for as many workers as there are now."""
        return max(1, round(self._batches / self._replica.roster.size))

    def __iter__(self) -> Iterator[list[int]]:
        """The batches from the replica's present round on, to the end of the epoch."""
        drawn, round_, epoch = 0, -1, -1
        while True:
            # Batches are fetched ahead of the replica's rounds, which jump if this worker was late.
            round_ = max(round_ + 1, self._replica.engine.round + min(drawn, self._ahead))
            dealt, seat = self._look(round_)
            if seat < 0:
                yield self._any_batch()
            else:
                epoch = dealt // self._batches if epoch < 0 else epoch
                if dealt // self._batches > epoch:
                    return
                yield self._batch(dealt + seat)
            drawn += 1

    @property
    def epoch(self) -> int:
        """The number of the epoch of which the next pass is."""
        return self._look(self._replica.engine.round)[0] // self._batches

    def state_dict(self) -> dict[str, Any]:
        """The position in the data, for ``decent_dp.save(..., state=...)``."""
        return {"dealt": self._look(self._replica.engine.round)[0] * self._workers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a position. Called on all workers, in the same round, after ``decent_dp.load``.

        Raises:
            ValueError, TypeError: the state is none of a sampler.
        """
        dealt, replica = check_integer("dealt", state["dealt"], 0) // self._workers, self._replica
        self._rosters, self._first = [], replica.roster.epoch
        missing, round_ = dealt - self._look(replica.engine.round)[0], replica.engine.round
        self._rosters = []
        replica.monitor.deal_from(round_, replica.roster.dealt_before(round_) + missing)

    def _look(self, round_: int) -> tuple[int, int]:
        """The shares dealt before a round, and this worker's seat in it."""
        roster, known, now = self._replica.roster, self._rosters, self._replica.engine.round
        if now < self._round:  # an earlier state was loaded
            known.clear()
        self._round = now
        if known and known[-1].epoch == roster.epoch:
            known[-1] = roster
        else:
            known.append(roster)
        at = round_ - self._ahead
        while len(known) > 1 and known[1].start <= now - self._ahead:
            del known[0]
        found = next((roster for roster in reversed(known) if roster.start <= at), known[0])
        # Before that, a process that has joined had no seat; and a change may have happened that is not known yet.
        monitor, is_seated = self._replica.monitor, at >= found.start or found.epoch == self._first
        seat = found.seat if is_seated and monitor.knows(at) else -1
        return found.dealt_before(at) + self._ahead * self._replica.agreed.peers.world_size, seat

    def _batch(self, share: int) -> list[int]:
        epoch, number = divmod(share, self._batches)
        if self._order is None or self._order[0] != epoch:
            order = np.arange(self._size)
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(order) if self._shuffle else order
        begin = (number * self._workers + self._position) * self._batch_size
        batch: list[int] = self._order[1][begin : begin + self._batch_size].tolist()
        return batch

    def _any_batch(self) -> list[int]:
        self._drawn += 1
        rank = self._replica.world.rank
        chosen = np.random.default_rng([self._seed, _GUEST, rank, self._drawn])
        batch: list[int] = chosen.integers(self._size, size=self._batch_size).tolist()
        return batch
