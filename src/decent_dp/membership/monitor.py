"""Which other workers a worker hears, and what it does when they are too few."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from decent_dp.errors import PeerLostError
from decent_dp.faults import Roster, Tolerate
from decent_dp.membership.epoch_store import Epoch
from decent_dp.membership.epochs import Epochs
from decent_dp.transport import Neighbours, Replicas, Seen, Transport

__all__ = ["Members", "MembershipMonitor"]

_log = logging.getLogger(__name__)

# Seconds between two looks at the others' rounds, for a worker that has run out of batches.
_PAUSE = 0.01
# Seconds for which a member is missed before an epoch without it: for others that die with it, or leave with it at the end.
_SETTLE = 0.5


class Members:
    """Who takes part in a run that needs each of its workers.

    Args:
        transport: of all workers.

    Attributes:
        tolerates_faults: whether workers may be in different rounds, or gone.
        callbacks: called with the old and the new roster when an epoch begins.
        neighbours: what is known of the others, where faults are tolerated.
        epochs: change the members; None where they stay the same.
    """

    tolerates_faults = False
    neighbours: Neighbours | None = None
    epochs: Epochs | None = None

    def __init__(self, transport: Transport, replicas: Replicas) -> None:
        self._transport, self.replicas = transport, replicas
        self.callbacks: list[Callable[[Roster, Roster], None]] = []
        # ``Roster.start`` and ``Roster.dealt`` where the members stay the same.
        self._origin = 0, 0

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(range(self._transport.world_size)) if self.epochs is None else self.epochs.newest.members

    @property
    def roster(self) -> Roster:
        """The newest epoch, and who of it is left out."""
        silent = () if self.neighbours is None else self.neighbours.look().silent
        (own, _), members = self.replicas.place_of(self._transport.rank), self.replicas.whole(self.members)
        holes = tuple(seat for seat, member in enumerate(members) if set(silent) & set(self.replicas.workers_of(member)))
        (start, dealt), number, is_in = self._origin, 0, True
        if self.epochs is not None:
            newest, is_in = self.epochs.newest, self.epochs.is_member
            number, start, dealt = newest.number, newest.start, newest.dealt
        return Roster(number, members.index(own) if is_in else -1, len(members), members, holes, start, dealt)

    def deal_from(self, round_: int, dealt: int) -> None:
        """``Roster.start`` and ``Roster.dealt`` of the present roster are these; the same on all workers."""
        self._origin = round_, dealt
        if self.epochs is not None:
            self.epochs.deal_from(round_, dealt)

    def refuse(self, error: Exception) -> None:
        """Raises ``error``: a call cannot be made by all workers in the same round, or expects that they change."""
        raise error

    def knows(self, round_: int) -> bool:
        """``Epochs.knows``."""
        return self.epochs is None or self.epochs.knows(round_)

    def newest_round(self, own: int) -> int:
        """Of the connected workers and this one, which is in round ``own``: a call of all brings them to it."""
        return max(own, self._transport.newest_round())

    def look(self, round_: int) -> None:
        """Called before each round."""

    def has_to_wait(self, round_: int, *, at_once: bool) -> bool:
        """Whether this worker goes no further at present."""
        return False

    def restart(self) -> None:
        """Rounds may be earlier ones from now on."""

    def close(self) -> None:
        """Ends the threads."""
        if self.epochs is not None:
            self.epochs.keeper.close()


class MembershipMonitor(Members):
    """Looks at the other workers once a round, where faults are tolerated. It sees those that this worker is connected to.

    Args:
        transport: of all workers.
        epochs: changes the members; None for a topology that cannot be rebuilt.
    """

    tolerates_faults = True

    neighbours: Neighbours

    def __init__(
        self, transport: Transport, neighbours: Neighbours, faults: Tolerate, replicas: Replicas, epochs: Epochs | None
    ) -> None:
        super().__init__(transport, replicas)
        self.neighbours, self.faults, self.epochs = neighbours, faults, epochs
        self._silent: set[int] = set()
        self._lost: set[int] = set()
        # Members that are missed, and since when, on the monotonic clock.
        self._missed: dict[int, float] = {}
        # Members that are gone for this worker since before it promised the newest epoch: others have named them in it.
        self._vouched: set[int] = set()
        self._coming: tuple[Epoch, Roster] | None = None
        # Since when this worker hears no other one, though some may live.
        self._cut_off_since: float | None = None
        self._waits = False
        # The largest number of members so far.
        self._most = 0
        n = transport.world_size
        if 1 < n <= faults.min_workers and transport.rank == 0:
            _log.warning(
                "faults=Tolerate(min_workers=%d) with %d workers: the first death ends the run. With min_workers=1 the last "
                "one continues.",
                faults.min_workers,
                n,
            )

    def refuse(self, error: Exception) -> None:
        """It goes on without them."""

    def restart(self) -> None:
        """``Epochs.restart``."""
        self._origin, before = (0, 0), self.roster
        if self.epochs is not None and (epoch := self.epochs.restart()) is not None:
            self._announce(epoch, before, self.epochs.keeper.absent)

    def has_to_wait(self, round_: int, *, at_once: bool) -> bool:
        """Whether this worker goes no further at present, since it is cut off, or was stopped and does not know yet in which
        round the others are. Called between two rounds.

        Args:
            at_once: else after ``Tolerate.orphan_for``.

        Raises:
            PeerLostError: as for ``check``, or it has waited for longer than the process group's timeout.
        """
        if not self.neighbours.look().is_awake:
            time.sleep(_PAUSE)
            self.look(round_)
            return True
        since, timeout = self._cut_off_since, self._transport.timeout
        patience = 0.0 if at_once else self.faults.orphan_for
        if self.faults.partition != "follow" or since is None or time.monotonic() - since < patience:
            return False
        if not self._waits:
            _log.warning("worker %d hears no other one, and waits until it does, for %g s", self._transport.rank, timeout)
            self._waits = True
        time.sleep(_PAUSE)
        self.look(round_)
        if self._cut_off_since is None:
            return False
        if time.monotonic() - since > self.faults.orphan_for + timeout:
            raise self._is_cut_off(f"has waited for the others for the process group's timeout of {timeout:g} s")
        return True

    def look(self, round_: int) -> None:
        """Logs which workers are silent, gone or back, and looks at the epochs. Called before each round.

        Raises:
            PeerLostError: too few workers are left (``Tolerate.min_workers``), or this one has been cut off for too long
                (``Tolerate.partition``).
            RuntimeError: a thread of this worker has failed (``Neighbours.fail``).
        """
        self.neighbours.refuse_failed()  # first: to a transport that has failed all others look gone
        seen = self.neighbours.look()
        silent, lost = set(seen.silent - seen.left), set(seen.lost - seen.left)
        if silent != self._silent or lost != self._lost:
            self._report(round_, silent, lost)
        self._silent, self._lost = silent, lost
        self._most = n = max(self._most, len(self.members))
        here = {*self.members, *seen.left} - lost  # who has left had no batches any more
        if n > 1 and not seen.living and (silent | lost) - seen.ended:
            self._check_cut_off()
        elif len(here) < min(self.faults.min_workers, n):
            raise PeerLostError(
                f"{len(here)} of {len(here | lost)} workers are left, and faults=Tolerate(min_workers="
                f"{self.faults.min_workers}) wants more. Gone: {sorted(lost)}. Start the workers again from the newest "
                "checkpoint, or allow fewer."
            )
        else:
            self._cut_off_since, self._waits = None, False
        self._look_at_epochs(round_, seen)

    def _look_at_epochs(self, round_: int, seen: Seen) -> None:
        if self.epochs is None:
            return
        now, before, gone = time.monotonic(), self.roster, seen.lost | seen.left
        self._vouched &= gone
        missed = gone & set(self.members) - self._vouched
        self._missed = {rank: self._missed.get(rank, now) for rank in missed}
        is_missed = any(now - since > _SETTLE for since in self._missed.values()) and bool(seen.living)
        epoch = self.epochs.look(round_, wanted=is_missed)
        if self.epochs.replaced or seen.is_replaced:
            raise PeerLostError(
                f"another process has taken the place of worker {self._transport.rank}, which was gone for the others. End "
                "this one: the others continue."
            )
        if epoch is not None:
            self._announce(epoch, before, self.epochs.keeper.absent)
        if self._coming is not None and round_ >= self._coming[0].start:
            (_, old), self._coming = self._coming, None
            for callback in self.callbacks:
                callback(old, self.roster)

    def _announce(self, epoch: Epoch, before: Roster, absent: frozenset[int]) -> None:
        old = before if self._coming is None else self._coming[1]  # of the one that has not begun yet
        self._coming, self._vouched = (epoch, old), set(absent.intersection(epoch.members))
        who = ", ".join(map(str, epoch.members))
        _log.warning("epoch %d, from round %d on: %d workers, %s", epoch.number, epoch.start, len(epoch.members), who)

    def is_free(self, rank: int, incarnation: int) -> bool:
        """Whether a process may take the place of this worker: it is gone, or this process has the place already.

        Raises:
            RuntimeError: no process can join these workers.
        """
        if self.epochs is None or not self.epochs.is_member:
            raise RuntimeError("this worker cannot let processes in: it was left out, or its topology is not given by name")
        if rank == self._transport.rank:
            return False
        return rank in self.neighbours.look().lost or rank not in self.members or self.epochs.is_seated(rank, incarnation)

    def others(self, *, in_store: bool) -> dict[int, int]:
        """The incarnations, by rank, of the members that have this worker's part of a replica.

        Args:
            in_store: those of the newest epoch in the store; else those of the present one that this worker is connected to.
        """
        epoch = None if self.epochs is None else self.epochs.keeper.newest_in_store() if in_store else self.epochs.newest
        known: Mapping[int, int]
        members, known = (self.members, {}) if epoch is None else (epoch.members, epoch.incarnations)
        own, position = self.replicas.place_of(self._transport.rank)
        ranks = [self.replicas.workers_of(number)[position] for number in self.replicas.whole(members) if number != own]
        living = ranks if in_store else self.neighbours.look().living
        return {rank: known.get(rank, 0) for rank in ranks if rank in living}

    def enter(self, epoch: Epoch) -> None:
        """This process is a member from this epoch on."""
        assert self.epochs is not None
        before = self.roster
        self.epochs.enter(epoch)
        self._coming = epoch, before

    def _report(self, round_: int, silent: set[int], lost: set[int]) -> None:
        for who, what in (
            (lost - self._lost, "gone: no exchange waits for it, and each of its partners trains on"),
            (silent - self._silent - lost, "silent: its exchanges are left out until it is heard again"),
            (self._silent - silent, "back: its exchanges continue"),
        ):
            for rank in sorted(who):
                _log.warning("round %d: worker %d is %s", round_, rank, what)

    def _check_cut_off(self) -> None:
        now = time.monotonic()
        self._cut_off_since = self._cut_off_since or now
        if self.faults.partition == "stop" and now - self._cut_off_since >= self.faults.orphan_for:
            raise self._is_cut_off(f"has heard no other for {self.faults.orphan_for:g} s")

    def _is_cut_off(self, what: str) -> PeerLostError:
        return PeerLostError(
            f"worker {self._transport.rank} {what}: the network is gone, or the others are. Start all workers again from the "
            "newest checkpoint, or let it train alone: faults=Tolerate(partition='train')."
        )
