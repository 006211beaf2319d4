"""The transport over torch.distributed: pairs and groups side by side, and the collectives of all workers."""

from __future__ import annotations

import itertools
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from zmq import ZMQError

from decent_dp.compression import Compression, Lossless
from decent_dp.errors import PeerError, PeerLostError
from decent_dp.faults import Tolerate, default_dead_after, most_workers
from decent_dp.topo import Edge
from decent_dp.transport.addresses import find, listen
from decent_dp.transport.closed_group import close_default_group
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.hello import Credentials, Identity, password
from decent_dp.transport.in_process import InProcessTransport
from decent_dp.transport.interface import ExchangeRequest, Handle, Neighbours, Transport
from decent_dp.transport.liveness import HolesAllowed, WireNeighbours
from decent_dp.transport.nccl import AllReduceGroups, NcclPairs
from decent_dp.transport.peer_errors import Notes, peer_error
from decent_dp.transport.rendezvous import Communicator, Rendezvous, timeout_of
from decent_dp.transport.sockets import Socket, Sockets
from decent_dp.transport.waiter import Waiter
from decent_dp.transport.wire import Wire
from decent_dp.transport.wire_exchanges import WireExchanges

__all__ = [
    "NewcomerTransport",
    "ProcessGroupTransport",
    "check_encrypt",
    "check_transport",
    "gather_in_mesh",
    "group_of_replicas",
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


def group_of_replicas(process_group: Any, own_ranks: Sequence[int]) -> Any:
    """The process group of all workers of all replicas, for the argument ``process_group`` of ``gossip()``.

    With replicas of several workers that may be the group of the workers at one position of all, as a mesh gives it.

    Args:
        own_ranks: of the workers of this one's replica, in the default group; none if it has a whole one.
    """
    if process_group is None or not own_ranks or dist.get_rank(process_group) < 0:
        return process_group
    given = dist.get_process_group_ranks(process_group)
    replicas: list[list[int]] = [[]] * len(given)
    dist.all_gather_object(replicas, list(own_ranks), group=process_group)
    ranks = sorted(itertools.chain(*replicas))
    one_of_each = all(set(given) & set(own) == {rank} for rank, own in zip(given, replicas, strict=True))
    if not one_of_each or len(set(ranks)) < len(ranks) or len(ranks) == len(given):
        return process_group
    if len(ranks) == dist.get_world_size():
        return None
    made: Any = dist.new_group(
        ranks, timeout_of(process_group), dist.get_backend(process_group), use_local_synchronization=True
    )
    return made


def gather_in_mesh(mesh: Any, value: Any) -> list[Any]:
    """The values of the workers of a device mesh, in no particular order, over its process groups. All of them call it."""
    found = [value]
    for group in mesh.get_all_groups():
        parts: list[list[Any]] = [[]] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group=group)
        found = list(itertools.chain(*parts))
    return found


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
        self._process_group: Any = process_group if process_group is not None else dist.group.WORLD
        self._meet(Rendezvous.create(process_group, faults, encrypt), timeout)
        self.only_cuda = str(dist.get_backend(process_group)) == "nccl"
        self._listen()

    def _meet(self, shared: Rendezvous, timeout: float | None) -> None:
        self._rendezvous = shared
        timeout = shared.run.timeout if timeout is None else timeout
        super().__init__(shared.rank, shared.run.world_size, shared.run_id, timeout, shared.store)
        self._notes = Notes(shared.store, shared.rank)
        self._waiter = Waiter("decent_dp-staging")
        self._communicators: dict[str, Communicator] = {}
        self._control: Collectives | None = None
        # Of edges, for hooks of the user's.
        self._groups: dict[tuple[int, ...], Any] = {}
        self._faults: Tolerate | None = None
        self._has_failed = False

    def _listen(self) -> None:
        """Called by all workers together. Raises the same error on all if one cannot listen."""
        shared, error = self._rendezvous, ""
        sockets, listeners = None, list[Socket]()
        try:
            sockets = Sockets(shared.run.dead_after or default_dead_after(), password(shared.proof), io_threads=_io_threads())
            listeners = listen(shared, sockets)
        except (RuntimeError, ValueError, OSError, ZMQError) as found:
            error = str(found)
        try:
            self._connect_all(sockets, listeners, error)
        except BaseException:
            if sockets is not None:
                sockets.close_all()
            raise

    def _connect_all(self, sockets: Sockets | None, listeners: list[Socket], error: str) -> None:
        """``error``: why this worker does not listen."""
        shared = self._rendezvous
        texts: dict[int, Any] = {self.rank: error}
        if self._process_group is not None:  # else this process joins
            found: list[Any] = [""] * self.world_size
            dist.all_gather_object(found, error, group=self._process_group)
            texts = dict(enumerate(found))
        if any(texts.values()) or sockets is None:
            raise RuntimeError(" ".join(f"Worker {rank}: {text}" for rank, text in texts.items() if text))
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
        self._known = WireNeighbours(self._wire, shared.rank, sockets.dead_after)
        self._control = self._collectives("start", _START)
        self._exchanges = WireExchanges(self._wire, shared.rank, shared.run.node_of, self._waiter, self.timeout, self.explain)

    def _collectives(self, kind: str, channel: int, among: tuple[int, ...] | None = None) -> Collectives:
        """``kind``, ``channel``, ``among``: as of ``Collectives``."""
        shared = self._rendezvous
        # Nothing is known of the nodes of those that may come.
        node_of = (*shared.run.node_of, *(f"worker {rank}" for rank in range(self.world_size, shared.run.places)))
        return Collectives(
            self._wire.control_plane,
            among or range(self.world_size),
            node_of,
            shared.run.timeout,
            kind=kind,
            channel=channel,
            among=among,
            explain=self.explain_absent if self.neighbours is None else None,
            leave=lambda: self._wire.close(says_bye=False),
            neighbours=self.neighbours,
        )

    def explain_absent(self, ranks: Sequence[int], what: str) -> PeerLostError:
        errors = [self._wire.why_lost(rank) for rank in ranks]
        error = next((error for error in errors if isinstance(error, ConnectionError)), ConnectionError())
        found = self.explain(error, ranks, what)
        return found if isinstance(found, PeerLostError) else PeerLostError(str(found))

    def explain(self, error: Exception, ranks: Sequence[int], what: object) -> PeerError:
        return peer_error(error, ranks, str(what), self._notes, self.timeout)

    @property
    def control(self) -> Collectives:
        if self._control is None:
            raise RuntimeError("the transport was closed")
        return self._control

    @property
    def plane(self) -> ControlPlane:
        return self._wire.control_plane

    def make_groups(self, edges: Iterable[Edge]) -> None:
        group = self._process_group
        # All processes of the default group have to call new_group. With use_local_synchronization=True its members alone do,
        # but its name depends on how many groups each of them is in: if they differ, it waits for ever (torch 2.13).
        if self._faults is None and group is dist.group.WORLD:
            for ranks in sorted({_members(edge) for edge in edges if edge.group is None} - self._groups.keys()):
                if 1 < len(ranks) < self.world_size:
                    self._groups[ranks] = dist.new_group(list(ranks), timeout_of(group))

    def process_group_of(self, ranks: Sequence[int]) -> Any:
        if self._faults is not None:
            return None
        return self._process_group if len(ranks) == self.world_size else self._groups.get(tuple(sorted(ranks)))

    def begin(self, bucket: int) -> None:
        self._wire.commands.run_there(lambda: self._wire.links.begin(bucket))

    def announce(self, round_: int) -> None:
        self._known.announce(round_)
        if self._rendezvous.nccl and self._faults is None:  # else the messages of exchanges say it
            self._wire.call(self._wire.links.beat_all)

    def newest_round(self) -> int:
        return max(map(self._known.round_of, self._known.living()), default=-1)

    def prepare(self, edges: list[Edge]) -> None:
        self._exchanges.connect(edges)

    @property
    def _dial_seconds(self) -> float:
        # Well below the timeout, after which a call says why somebody is not connected.
        return self.timeout / 2 if self._faults is None else min(self.timeout / 2, self._faults.dead_after)

    def records(self) -> dict[str, str]:
        return self._rendezvous.records()

    def tolerate(self, faults: Tolerate) -> Neighbours:
        if not self._rendezvous.incarnation:  # a process that joins looks up those that it meets
            self._rendezvous.look_up_addresses()
        self._faults = faults
        self.neighbours = self.table = self._known
        self._exchanges.policy = HolesAllowed(self._wire, self._known, self.timeout)
        self._control = self._collectives("call", _CALLS)
        return self.neighbours

    @property
    def one_sided(self) -> int:
        return self._wire.settlement.one_sided

    @property
    def reconnects(self) -> int:
        return self._wire.connections.made_again

    def leave_process_group(self) -> None:
        self._process_group = None
        close_default_group()

    def report(self, cause: str) -> None:
        self._has_failed = bool(cause)
        self._notes.write(cause)

    def close(self) -> None:
        self._waiter.close()
        self._wire.close(says_bye=not self._has_failed)
        self._notes.close()
        self._rendezvous.close()
        self._communicators.clear()
        self._control = None

    def choose(self, edge: Edge, request: ExchangeRequest) -> WireExchanges | NcclPairs | AllReduceGroups:
        """The way of a request, by its device, its compression and the size of its edge."""
        ranks = _members(edge)
        group = len(ranks) > 2
        over_nccl = self.carrier(on_gpus=request.sent.is_cuda) == "NCCL"
        if over_nccl and _is_plain(type(request.compression), group):
            if group:
                return AllReduceGroups(self._communicator(f"nccl/{ranks}", ranks), self.rank, self.explain)
            return NcclPairs(self._communicator("nccl", range(self.world_size)), self.rank, self.explain)
        return self._exchanges

    def carrier(self, *, on_gpus: bool) -> str:
        # NCCL ends the process when a worker dies, and encrypts nothing.
        shared = self._rendezvous
        return "NCCL" if on_gpus and shared.nccl and self._faults is None and shared.run.encrypt is not True else "ZeroMQ"

    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        return self.choose(edge, request).start(edge, request)

    def _communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        if name not in self._communicators:
            options: Any = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=self.timeout)
            store, position = PrefixStore(name, self.store), list(ranks).index(self.rank)
            try:
                self._communicators[name] = dist.ProcessGroupNCCL(store, position, len(ranks), options)
            except RuntimeError as error:
                raise self.explain(error, [rank for rank in ranks if rank != self.rank], "a communicator") from error
        return self._communicators[name]


class NewcomerTransport(ProcessGroupTransport):
    """Connects a process that takes the place of a worker. Until ``enter``, collectives are those of this process alone.

    Args:
        shared: what the workers of the run have in common.
        signature: of their settings, which this process must share (``decent_dp.replica.consistency``).
    """

    def __init__(self, shared: Rendezvous, signature: Mapping[str, Any]) -> None:
        self._process_group = None
        self.signature = signature
        self._meet(shared, None)
        self._members: Collectives | None = None
        self._listen()
        self._control = self._collectives("alone", _START, (self.rank,))

    @property
    def incarnation(self) -> int:
        return self._rendezvous.incarnation

    def tolerate(self, faults: Tolerate) -> Neighbours:
        alone, neighbours = self._control, super().tolerate(faults)
        self._members, self._control = self._control, alone
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
        assert self._faults is not None
        assert self.neighbours is not None
        self._members.enter(calls, first)
        self.meet(incarnations)
        deadline = time.monotonic() + self._faults.dead_after / 2
        while set(incarnations) - {*self.neighbours.living(), *self.neighbours.lost()} and time.monotonic() < deadline:
            time.sleep(_LOOK)
        self._control = self._members


def _io_threads() -> int:
    text = os.environ.get(_IO_THREADS, "").strip() or "1"
    if not (text.isdecimal() and 1 <= int(text) <= _MOST_IO_THREADS):
        raise ValueError(f"the environment variable {_IO_THREADS} must be a number from 1 to {_MOST_IO_THREADS}, got {text!r}")
    return int(text)


def _is_plain(compression: type[Compression], group: bool) -> bool:
    """Whether torch's communicators can exchange its messages: they need no hints, and a group's are summed as they are."""
    return compression is Lossless if group else issubclass(compression, Lossless)


def _members(edge: Edge) -> tuple[int, ...]:
    return tuple(sorted(edge.ranks))
