"""How a process joins a run: it gets the state of a member, and becomes one before its first round."""

from __future__ import annotations

import logging
import random
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from decent_dp.errors import CheckpointError, PeerLostError
from decent_dp.membership import Company, Epoch
from decent_dp.replica.host import Host
from decent_dp.replica.replica import Replica
from decent_dp.replica.snapshot import put_back
from decent_dp.replica.transfer import hear, receive_state, say
from decent_dp.transport import NewcomerTransport

__all__ = ["open_doors"]

T = TypeVar("T")
R = TypeVar("R", bound=Replica)

_log = logging.getLogger(__name__)

# Seconds without progress after which another worker is asked, and between two rounds of questions.
_STUCK, _AGAIN = 5.0, 0.5


def open_doors(replica: R) -> R:
    """Where faults are tolerated: processes can join from now on. One that joins itself gets its state here.

    Returns:
        The replica.

    Raises:
        PeerLostError: no member has given it.
    """
    company, transport = replica.company, replica.everyone
    if company is None:
        return replica
    host = Host(replica, company)
    replica.listeners.append(host)
    if isinstance(transport, NewcomerTransport):
        newcomer = _Newcomer(replica, company, transport)
        try:
            newcomer.fetch()
        except BaseException:
            replica.close()
            raise
        replica.before_first_round = newcomer.enter
    company.neighbours.welcome(host.serve)
    return replica


class _Newcomer:
    def __init__(self, replica: Replica, company: Company, transport: NewcomerTransport) -> None:
        self._replica, self._company, self._transport = replica, company, transport

    def fetch(self) -> None:
        """Gets the state of a member."""
        rank, state = self._ask("its state", {"want": "state"}, receive_state)
        _log.info("worker %d has the state of worker %d", self._transport.rank, rank)
        self._replica.engine.count_buckets_from(state["first_bucket"])
        put_back(self._replica, state["snapshot"])

    def enter(self) -> None:
        """Becomes a member, and goes on in its first round."""
        replica, transport, company = self._replica, self._transport, self._company
        own, incarnation = transport.rank, transport.incarnation

        def seat(stream: socket.socket) -> tuple[Epoch, dict[str, Any]]:
            answer = None
            while answer is None:
                answer = hear(stream)
            if "refused" in answer:
                raise ConnectionError(answer["refused"])
            epoch = Epoch.read(answer["epoch"], answer["text"])
            if epoch.incarnations.get(own) != incarnation or own not in epoch.members:
                raise ConnectionError("another process has taken the seat")
            return epoch, answer

        _, (epoch, answer) = self._ask("a seat", {"seat": own, "incarnation": incarnation}, seat)
        fetched = replica.engine.round
        company.enter(epoch, answer["joins"])
        others = {rank: epoch.incarnations.get(rank, 0) for rank in epoch.members if rank != own}
        transport.enter(others, answer["calls"])
        replica.engine.round = max(epoch.start, fetched)
        # The others have made about as many steps as rounds.
        replica.steps += replica.engine.round - fetched

    def _ask(self, what: str, request: dict[str, Any], receive: Callable[[socket.socket], T]) -> tuple[int, T]:
        """Asks one member after the other. Returns the rank of the first that gives it, and what ``receive`` returns."""
        reasons: dict[int, str] = {}
        deadline = time.monotonic() + self._transport.timeout
        while time.monotonic() < deadline:
            others = [rank for rank in self._company.newest_members() if rank != self._transport.rank]
            for rank in random.sample(others, len(others)):
                try:
                    with self._company.neighbours.visit(rank) as stream:
                        stream.settimeout(_STUCK)
                        say(stream, request)
                        return rank, receive(stream)
                except (OSError, RuntimeError, CheckpointError) as error:
                    _log.info("worker %d does not give %s: %s", rank, what, error)
                    reasons[rank] = str(error)
            time.sleep(_AGAIN)
        said = "; ".join(f"worker {rank}: {reason}" for rank, reason in sorted(reasons.items()))
        raise PeerLostError(
            f"no worker of the run has given {what} to the process that joins as worker {self._transport.rank} within "
            f"{self._transport.timeout:g} s. {said or 'It has no other member.'}"
        )
