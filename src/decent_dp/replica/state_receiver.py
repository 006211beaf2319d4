"""How a worker gets the state of another one: a process that joins the run, and a replica that is not finite."""

from __future__ import annotations

import functools
import logging
import math
import random
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from decent_dp.engine import enter
from decent_dp.errors import CheckpointError, PeerLostError
from decent_dp.membership import Epoch, MembershipMonitor
from decent_dp.replica.replica import Listener, Replica
from decent_dp.replica.shards import mesh_of
from decent_dp.replica.snapshot import put_back, replace_values
from decent_dp.replica.state_server import StateServer
from decent_dp.replica.transfer import Donor, PartialState, pull
from decent_dp.transport import NewcomerTransport, Transport, gather_in_mesh

__all__ = ["serve_joiners"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# Rounds after which a replica that has become finite counts as healed.
_CALM = 100
# How often in a row it is tried: if it is the data, or the learning rate, the run ends with the error.
_MOST_TIMES = 5
# Seconds between two tries in one round, where this worker waits for others.
_HEAL_AGAIN = 1.0
# Seconds without an answer after which another worker is asked.
_STUCK = 5.0
# Seconds between two rounds of questions.
_AGAIN = 0.5
# Seconds of them in which nobody answers: this worker is without a network.
_UNREACHED = 30.0
# The entries of a snapshot that must be the same on all workers of a replica.
_OF_REPLICA = ("round", "factor", "steps")


def serve_joiners(replica: Replica) -> None:
    """Where faults are tolerated: processes can join from now on. One that joins itself gets its state here.

    Raises:
        PeerLostError: no member has given it.
    """
    monitor, transport = replica.monitor, replica.world
    if not isinstance(monitor, MembershipMonitor):
        return
    server = StateServer(replica, monitor)
    replica.listeners += [server, _Healer(replica, monitor)]
    if isinstance(transport, NewcomerTransport):
        joiner = _Joiner(replica, monitor, transport)
        try:
            joiner.fetch()
        except BaseException:
            replica.close()
            raise
        replica.life.before_first_round = joiner.enter
    # The thread that answers must not keep a replica alive that nobody uses any more.
    answer = weakref.WeakMethod(server.answer)

    def serve(rank: int, incarnation: int, request: bytes) -> bytes:
        return b"" if (found := answer()) is None else found(rank, incarnation, request)

    monitor.neighbours.serve(serve)


class _Joiner:
    def __init__(self, replica: Replica, monitor: MembershipMonitor, transport: NewcomerTransport) -> None:
        self._replica, self._monitor, self._transport = replica, monitor, transport

    def fetch(self) -> None:
        """Gets the state of a member; all workers of this replica from those of one replica, if they can."""
        monitor, replicas = self._monitor, self._replica.agreed.replicas
        drawn = replicas.place_of(random.choice(list(self._members()) or [0]))[0]
        number = self._of_the_first(drawn)
        first = replicas.workers_of(number)[self._replica.mates.position]
        rank, state = _fetch_state(self._replica, monitor, self._members, first=first)
        _log.info("worker %d has the state of worker %d", self._transport.rank, rank)
        # Their copies may be those of different rounds. What must be the same on all workers of a replica is the first's.
        snapshot = state["snapshot"]
        own = {name: snapshot[name] for name in _OF_REPLICA}, snapshot.get("optim", {}).get("scaler")
        common, scaler = self._of_the_first(own)
        snapshot.update(common)
        if "optim" in snapshot:
            snapshot["optim"]["scaler"] = scaler
        engine = self._replica.engine
        engine.first_bucket = state["first_bucket"] - len(engine.buckets)  # the next ones have numbers from this one on
        put_back(self._replica, snapshot)
        assert monitor.epochs is not None
        monitor.epochs.learn(state["epoch"])

    def _members(self) -> dict[int, int]:
        found = self._monitor.others(in_store=True)
        self._transport.meet(found)
        return found

    def enter(self) -> None:
        """Becomes a member, together with the others of its replica, and continues in the first round of the epoch."""
        replica, transport, monitor = self._replica, self._transport, self._monitor
        own, mates = transport.rank, dict(self._gather([transport.rank, transport.incarnation]))
        if set(mates) != {*replica.mates.ranks}:
            raise ValueError(
                f"replica {replica.mates.number} of this run is the workers {list(replica.mates.ranks)}, and the processes "
                f"of this mesh have the ranks {sorted(mates)}: start the workers of one replica together "
                "(decent_dp.join(rank=...))."
            )

        def seat(donor: Donor, seconds: float) -> dict[str, Any]:
            return donor.get({"want": "seat", "for": list(mates.items())}, seconds)[0]

        # The epoch waits for workers that have been silent for less than ``dead_after``, and some may fall silent meanwhile.
        patience, found = _STUCK + 2 * monitor.faults.dead_after, dict[str, Any]()
        if replica.mates.position == 0:  # asks for all of them
            _, found = _ask(monitor, transport, self._members, "a seat", seat, patience=patience)
        answer = self._of_the_first(found)
        epoch = Epoch.read(answer["epoch"], answer["text"])
        if any(epoch.incarnations.get(rank) != mates[rank] or rank not in epoch.members for rank in mates):
            raise PeerLostError(f"another process has taken the place of worker {own}: end this one.")
        if any(self._gather(answer["first_bucket"] != replica.engine.first_bucket)):  # the others have loaded another state
            self.fetch()
        fetched = replica.engine.round
        first = max(epoch.start, fetched)
        monitor.enter(epoch)
        replica.cadence.joins = answer["joins"]
        replica.cadence.contexts += max(0, answer["contexts"] - 1)  # in the last one of the others, or before it
        others = {rank: epoch.incarnations.get(rank, 0) for rank in epoch.members if rank != own}
        with monitor.neighbours.paused():
            transport.enter(others, answer["calls"], first)
            enter(replica.engine, first, replica.agreed.replicas.whole(epoch.members))
        replica.mates.start(mates[min(mates)])
        # The others have made about as many steps as rounds.
        replica.steps += first - fetched

    def _gather(self, value: Any) -> list[Any]:
        """The values of the workers of this replica.

        Raises:
            PeerLostError: one of them has ended, or does not come within the timeout of their process group.
        """
        mesh, shares = mesh_of(self._replica.model), self._replica.agreed.shares
        if mesh is None and shares is None:
            return [value]
        try:
            return gather_in_mesh(mesh, value) if shares is None else shares.group.gather_values(value)
        except RuntimeError as error:
            mates = self._replica.mates
            raise PeerLostError(
                f"one of the processes that join as replica {mates.number} has ended, or has not come: start its workers "
                f"{list(mates.ranks)} together."
            ) from error

    def _of_the_first(self, value: T) -> T:
        """The value of the worker of this replica at the first position."""
        found: T = dict(self._gather((self._replica.mates.position, value)))[0]
        return found


class _Healer(Listener):
    """Gives a replica that is not finite the values of a member. Until then its exchanges are left out."""

    def __init__(self, replica: Replica, monitor: MembershipMonitor) -> None:
        self._replica, self._monitor = replica, monitor
        # The round of the last time, and how many times there were in a row.
        self._last, self._times = -1, 0
        # The round of the last try, and when the next one may be, on the monotonic clock.
        self._tried, self._again = -1, 0.0

    def reached_boundary(self) -> None:
        engine, mates, now = self._replica.engine, self._replica.mates, time.monotonic()
        nonfinite_in = engine.nonfinite_in if len(mates.ranks) == 1 else mates.nonfinite_in
        # The workers of a node heal together, at the end of a round.
        again = math.inf if self._replica.agreed.shares is not None else self._again
        if nonfinite_in <= self._last or (engine.round <= self._tried and now < again):
            return
        self._tried, self._again = engine.round, now + _HEAL_AGAIN
        if self._last < 0 or engine.round >= self._last + _CALM:
            self._times = 0
        if self._times >= _MOST_TIMES:
            return
        monitor = self._monitor
        try:
            with monitor.neighbours.paused():
                rank, snapshot = self._fetch(monitor)
            replace_values(self._replica, snapshot)
        except (PeerLostError, ValueError, TypeError) as error:
            _log.warning("this replica is not finite, and no other worker gives its values: %s", error)
            return
        self._last, self._times = engine.round, self._times + 1
        _log.warning("round %d: this replica was not finite, and has the values of worker %d now", engine.round, rank)

    def _fetch(self, monitor: MembershipMonitor) -> tuple[int, Any]:
        """The rank of a member, and its snapshot. In a node the first worker gets it, for all.

        Raises:
            PeerLostError: nobody gives one.
        """
        shares, rank, why, snapshot = self._replica.agreed.shares, -1, "", {}
        if shares is None or shares.is_first:
            try:
                rank, state = _fetch_state(self._replica, monitor, partial(monitor.others, in_store=False), once=True)
                snapshot = state["snapshot"]
            except PeerLostError as error:
                why = str(error)
        if shares is not None:
            rank, why = shares.group.gather_values((rank, why))[0]
            if not why:  # the rule's state starts anew, and is that of other shares
                snapshot = shares.broadcast({**snapshot, "rule": {**snapshot["rule"], "state": {}}} if snapshot else {})
        if why:
            raise PeerLostError(why)
        return rank, snapshot


def _fetch_state(
    replica: Replica, monitor: MembershipMonitor, members: Callable[[], dict[int, int]], *, once: bool = False, first: int = -1
) -> tuple[int, Any]:
    """Gets the state of a member, as ``_ask`` does: one copy."""
    partial = PartialState()
    get = functools.partial(pull, partial=partial)
    return _ask(monitor, replica.world, members, "its state", get, once=once, partial=partial, first=first)


def _ask(
    monitor: MembershipMonitor,
    transport: Transport,
    members: Callable[[], dict[int, int]],
    what: str,
    get: Callable[..., T],
    *,
    patience: float = _STUCK,
    once: bool = False,
    partial: PartialState | None = None,
    first: int = -1,
) -> tuple[int, T]:
    """Asks one member after the other, ``first`` before all others. Returns the rank of the first that gives it, and what
    ``get`` returns, which is called with a member and the seconds in which an answer must come.

    The one that has given a part is asked first again when all others have been asked in vain: this worker may have been
    without a network.

    Args:
        members: returns the incarnations of those that can be asked, by rank.
        patience: seconds for an answer, at first: the next one is asked after them, though this one gives signs of life.
        once: each member only once, and for ``_STUCK`` seconds in all; else for the process group's timeout, beside the seconds
            in which ``partial`` has come.

    Raises:
        PeerLostError: no member gives it.
    """
    partial = PartialState() if partial is None else partial
    source = first, members().get(first, 0) if first >= 0 else 0  # the member whose copy ``partial`` is
    reasons: dict[int, str] = {}
    began = reached = time.monotonic()
    # Others may wait in a call for a member that asks.
    deadline = began + (min(transport.timeout, _STUCK) if once else transport.timeout)
    while (left := min(deadline + partial.seconds, reached + _UNREACHED) - time.monotonic()) > 0:
        others = list(members().items())
        for member in sorted(random.sample(others, len(others)), key=lambda member: member != source):
            rank, name = member[0], partial.name
            most = deadline + partial.seconds - time.monotonic()
            donor = Donor(functools.partial(monitor.neighbours.ask, *member), _STUCK, most)
            try:
                return rank, get(donor, seconds=min(patience, left))
            except PeerLostError:
                raise
            except (OSError, RuntimeError, CheckpointError) as error:
                _log.info("worker %d does not give %s: %s", rank, what, error)
                reasons[rank] = str(error)
                if donor.answered:
                    reached = time.monotonic()
                if partial.name != name:
                    source = member
        if once:
            break
        time.sleep(_AGAIN)
        patience *= 2  # their steps may be long
    said = "; ".join(f"worker {rank}: {reason}" for rank, reason in sorted(reasons.items()))
    raise PeerLostError(f"no worker has given {what} to worker {transport.rank}. {said or 'There is no other member.'}")
