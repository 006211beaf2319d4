"""The transport over torch.distributed: pairs and groups side by side, and the collectives of all workers."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from zmq import ZMQError

from decent_dp.errors import PeerError
from decent_dp.faults import Tolerate, default_dead_after, most_workers
from decent_dp.topo import Edge
from decent_dp.transport.addresses import find, listen
from decent_dp.transport.closed_group import close_default_group
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.hello import Credentials, Identity, password
from decent_dp.transport.in_process import InProcessTransport
from decent_dp.transport.interface import ExchangeRequest, Handle, Transport
from decent_dp.transport.liveness import HolesAllowed, WireNeighbours
from decent_dp.transport.nccl import NcclExchanges, takes
from decent_dp.transport.neighbours import Neighbours
from decent_dp.transport.peer_errors import Notes, peer_error
from decent_dp.transport.rendezvous import Rendezvous
from decent_dp.transport.sockets import Socket, Sockets
from decent_dp.transport.torch_groups import EdgeGroups
from decent_dp.transport.waiter import Waiter
from decent_dp.transport.wire import Wire
from decent_dp.transport.wire_exchanges import WireExchanges

__all__ = [
    "NewcomerTransport",
    "ProcessGroupTransport",
    "check_encrypt",
    "check_transport",
    "open_transport",
]

# The environment variable for the number of ZeroMQ's threads, each of which serves some connections.
_IO_THREADS = "DECENT_DP_IO_THREADS"
# How many there can be.
_MOST_IO_THREADS = 16
# The channels of collectives: before ``tolerate``, and after it.
_START = 0
_CALLS = 1
# Seconds in which the store says whether it has the key of a worker that connects.
_LOOK_UP = 2.0
# Seconds between two looks whether a newcomer's connections are there.
_LOOK = 0.01


def open_transport(
    given: object, process_group: dist.ProcessGroup | None, faults: object, encrypt: object, timeout: float | None = None
) -> tuple[bool, Transport]:
    """Whether a replica owns its transport, and the transport, for arguments of ``gossip()`` and the wrapper.

    Wrong arguments connect, too: they are refused on all workers, and for that these must meet.

    Args:
        timeout: as of ``ProcessGroupTransport``.

    Raises:
        RuntimeError: there is no process group.
        ValueError: this worker is not in it, or the workers' versions, secrets or ``encrypt`` differ.
    """
    if isinstance(given, Transport):
        return False, given
    tolerated = faults if isinstance(faults, Tolerate) else None
    encrypted = encrypt if isinstance(encrypt, bool) else None
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group. Call decent_dp.utils.initialize_dist() (or torch.distributed.init_process_group) "
            "before wrapping the model, and start the script with torchrun for more than one worker."
        )
    if dist.get_rank(process_group) < 0:
        raise ValueError("this worker is not a member of process_group: call gossip() or wrap the model on its members only.")
    if max(dist.get_world_size(process_group), most_workers(tolerated)) == 1:
        return True, InProcessTransport()
    return True, ProcessGroupTransport(process_group, timeout, faults=tolerated, encrypt=encrypted)


def check_transport(given: object) -> None:
    """Raises TypeError if the argument ``transport`` is neither None nor a transport."""
    if not (given is None or isinstance(given, Transport)):
        raise TypeError(f"transport must be None, InProcessTransport() or what join() returned, got {given!r}")


def check_encrypt(given: bool | None) -> bool | None:
    """The argument ``encrypt``, which is None or a bool, else TypeError."""
    if not (given is None or isinstance(given, bool)):
        raise TypeError(f"encrypt must be None (between nodes), True or False, got {given!r}")
    return given


class ProcessGroupTransport(Transport):
    """Connects workers that are processes.

    They use connections of their own, or NCCL for exchanges if the process group has it and it can carry the compression.

    Args:
        process_group: whose workers, backend and timeout; None for the default group. All its workers call this together.
        timeout: seconds without progress after which an exchange fails; None: the process group's, as that of collectives.
        faults: what is tolerated, from ``tolerate`` on.
        encrypt: whether connections are encrypted; None: those between nodes.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        timeout: float | None = None,
        *,
        faults: Tolerate | None = None,
        encrypt: bool | None = None,
    ) -> None:
        group: Any = process_group if process_group is not None else dist.group.WORLD
        self._connect(Rendezvous.create(process_group, faults, encrypt), group, timeout)
        self.groups = EdgeGroups(group)
        self.only_cuda = str(dist.get_backend(group)) == "nccl"

    def _connect(self, shared: Rendezvous, group: Any, timeout: float | None = None) -> None:
        """Called by all workers of ``group`` together; None: by a process that joins. Raises the same error on all if one of
        them cannot listen."""
        self._rendezvous = shared
        timeout = shared.run.timeout if timeout is None else timeout
        super().__init__(shared.rank, shared.run.world_size, shared.run_id, timeout, shared.store)
        self._has_failed = False
        sockets, listeners, error = None, list[Socket](), ""
        try:
            sockets = Sockets(shared.run.dead_after or default_dead_after(), password(shared.proof), io_threads=_io_threads())
            listeners = listen(shared, sockets)
        except (RuntimeError, ValueError, OSError, ZMQError) as found:
            error = str(found)
        try:
            _introduce(shared, error, group)
        except BaseException:
            if sockets is not None:
                sockets.close_all()
            raise
        assert sockets is not None, "else there is an error"
        shared.client.start()  # an error that ends the interpreter is written when no thread can start any more
        self._notes = Notes(shared.client, f"{shared.run_id}/note", shared.rank)
        self._waiter = Waiter("decent_dp-staging")
        identity = Identity(bytes.fromhex(shared.run_id), shared.rank, secrets.token_bytes(8), shared.incarnation)
        self._wire = Wire(
            Credentials(identity, shared.proof, shared.curve, set(shared.keys), lambda key: shared.knows(key, _LOOK_UP)),
            range(self.world_size),
            shared.local,
            sockets,
            listeners,
            lambda peer, incarnation: find(shared, peer, self._dial_seconds, incarnation, sockets.dead_after),
            self.timeout,
        )
        self.plane, self.records = self._wire.control_plane, shared.records()
        self._known = WireNeighbours(self._wire, shared.rank, sockets.dead_after)
        self.control = self._collectives("start", _START)
        self._nccl = NcclExchanges(shared.store, shared.rank, self.world_size, self.timeout, self.explain)
        self._exchanges = WireExchanges(self._wire, shared.rank, shared.run.node_of, self._waiter, self.timeout, self.explain)

    def _collectives(self, kind: str, channel: int, among: tuple[int, ...] | None = None) -> Collectives:
        """``kind``, ``channel``, ``among``: as of ``Collectives``."""
        shared = self._rendezvous
        # Nothing is known of the nodes of those that may come.
        node_of = (*shared.run.node_of, *(f"worker {rank}" for rank in range(self.world_size, shared.run.places)))
        return Collectives(
            self.plane,
            among or range(self.world_size),
            node_of,
            shared.run.timeout,
            kind=kind,
            channel=channel,
            among=among,
            explain=partial(self.explain, None) if self.neighbours is None else None,
            leave=lambda: self._wire.close(says_bye=False),
            neighbours=self.neighbours,
        )

    def explain(self, error: Exception | None, ranks: Sequence[int], what: object) -> PeerError:
        if error is None:
            lost = (self._wire.why_lost(rank) for rank in ranks)
            error = next((error for error in lost if isinstance(error, ConnectionError)), ConnectionError())
        return peer_error(error, ranks, str(what), self._notes, self.timeout)

    def begin(self, bucket: int) -> None:
        self._wire.commands.run_there(lambda: self._wire.links.begin(bucket))

    def announce(self, round_: int) -> None:
        self._known.announce(round_)
        if self._rendezvous.nccl and self.neighbours is None:  # else the messages of exchanges say it
            self._wire.call(self._wire.links.beat_all)

    def newest_round(self) -> int:
        table = self._known.table
        return max(map(table.round_of, table.living()), default=-1)

    def prepare(self, edges: list[Edge]) -> None:
        self._exchanges.connect(edges)

    @property
    def _dial_seconds(self) -> float:
        # Well below the timeout, after which a call says why somebody is not connected.
        return self.timeout / 2 if self.neighbours is None else min(self.timeout / 2, self._known.dead_after)

    def tolerate(self, faults: Tolerate) -> Neighbours:
        self.neighbours, self.table, self.groups = self._known, self._known.table, EdgeGroups()
        self._exchanges.policy = HolesAllowed(self._wire, self._known, self.timeout)
        self.control = self._collectives("call", _CALLS)
        return self.neighbours

    def counts(self) -> dict[str, int]:
        return {"one_sided": self._wire.settlement.one_sided, "reconnects": self._wire.connections.made_again}

    def leave_process_group(self) -> None:
        close_default_group()

    def report(self, cause: str) -> None:
        self._has_failed = bool(cause)
        self._notes.write(cause)

    def close(self) -> None:
        self._waiter.close()
        self._wire.close(says_bye=not self._has_failed)
        self._rendezvous.client.close()
        self._nccl.close()

    def carrier(self, *, on_gpus: bool) -> str:
        # NCCL ends the process when a worker dies, and encrypts nothing.
        shared = self._rendezvous
        return "NCCL" if on_gpus and shared.nccl and self.neighbours is None and shared.run.encrypt is not True else "ZeroMQ"

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        over_nccl = self.carrier(on_gpus=request.sent.is_cuda) == "NCCL" and takes(type(request.compression), len(edge.ranks))
        return (self._nccl if over_nccl else self._exchanges).start(edge, request)


class NewcomerTransport(ProcessGroupTransport):
    """Connects a process that takes the place of a worker. Until ``enter``, collectives are those of this process alone.

    Args:
        shared: what the workers of the run have in common.
        signature: of their settings, which this process must share (``decent_dp.replica.consistency``).
    """

    def __init__(self, shared: Rendezvous, signature: Mapping[str, Any]) -> None:
        self.signature = signature
        self._members: Collectives | None = None
        self._connect(shared, None)
        self.control = self._collectives("alone", _START, (self.rank,))

    @property
    def incarnation(self) -> int:
        return self._rendezvous.incarnation

    def tolerate(self, faults: Tolerate) -> Neighbours:
        alone, neighbours = self.control, super().tolerate(faults)
        self._members, self.control = self.control, alone
        return neighbours

    def prepare(self, edges: list[Edge]) -> None:
        return  # nobody accepts it before it is a member

    def meet(self, incarnations: Mapping[int, int]) -> None:
        """The other members are these processes."""
        for rank, incarnation in incarnations.items():
            self._wire.renew(rank, incarnation)

    def enter(self, incarnations: Mapping[int, int], calls: int, first: int) -> None:
        """Connects to the other members, and takes part in their collectives from now on.

        Args:
            incarnations: of the other members.
            calls: ``Collectives.calls`` of one of them.
            first: the first round of this process.
        """
        assert self._members is not None
        self._members.enter(calls, first)
        self.meet(incarnations)
        deadline = time.monotonic() + self._known.dead_after / 2
        while time.monotonic() < deadline:
            seen = self._known.look()
            if seen.living | seen.lost >= incarnations.keys():
                break
            time.sleep(_LOOK)
        self.control = self._members


def _introduce(shared: Rendezvous, error: str, group: Any) -> None:
    """All workers of ``group`` get to know each other's addresses; None: this process joins alone.

    Args:
        error: why this worker cannot listen. Then a RuntimeError is raised on all.
    """
    said: list[Any] = [[error, json.dumps(shared.addresses.get(shared.rank))]]
    ranks: Sequence[int] = [shared.rank]
    if group is not None:
        own, ranks = said[0], range(shared.run.world_size)
        said = [None] * len(ranks)
        dist.all_gather_object(said, own, group=group)
    if any(text for text, _ in said):
        raise RuntimeError(" ".join(f"Worker {rank}: {text}" for rank, (text, _) in zip(ranks, said, strict=True) if text))
    for rank, (_, address) in zip(ranks, said, strict=True):
        shared.keep_address(rank, shared.incarnation, address)


def _io_threads() -> int:
    text = os.environ.get(_IO_THREADS, "").strip() or "1"
    if not (text.isdecimal() and 1 <= int(text) <= _MOST_IO_THREADS):
        raise ValueError(f"the environment variable {_IO_THREADS} must be a number from 1 to {_MOST_IO_THREADS}, got {text!r}")
    return int(text)
