"""The interface of all transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from decent_dp.compression import Compression, MessageId
from decent_dp.errors import PeerError
from decent_dp.faults import Tolerate
from decent_dp.topo import Edge
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.neighbours import Neighbours, PeerTable
from decent_dp.transport.streams import beside
from decent_dp.transport.torch_groups import EdgeGroups
from decent_dp.transport.votes import ExchangeId, Verdict

__all__ = ["ExchangeRequest", "Explain", "Handle", "Transport"]

# Turns a broken connection, or a timeout, in an exchange with these workers into an error that names them.
Explain: TypeAlias = Callable[[Exception, list[int], object], RuntimeError]


@dataclass(frozen=True)
class ExchangeRequest:
    """One bucket's part in an exchange.

    Attributes:
        compression: encodes and reduces the messages.
        values: one 1-D tensor for each of ``compression.tensors``; not changed before ``Handle.wait_for_read`` returns.
        sent, received: the messages, on the bucket's device. ``sent`` is ``compression.nbytes`` long, as is what comes from a
            pair, or the mean of a group.
        hint: this worker's scale hint for the exchange.
        rank: this worker's.
        exchange_id: which exchange it is.
    """

    compression: Compression
    values: Sequence[Tensor]
    sent: Tensor
    received: Tensor
    hint: bytes
    rank: int
    exchange_id: ExchangeId

    def encode(self, hints: Sequence[bytes]) -> Iterator[int]:
        """Writes ``sent`` front to back, given the others' hints; yields how many bytes of it are final."""
        message_id = MessageId(self.exchange_id.round, self.rank)
        steps = self.compression.encode(self.values, self.sent, message_id, [self.hint, *hints])
        while True:
            with torch.no_grad():  # not around the yield: the caller would go on without gradients
                ready = next(steps, None)
            if ready is None:
                return
            yield ready

    def reduce(self, chunk: int, messages: Sequence[Tensor], sizes: Sequence[int], out: Tensor, part: int) -> None:
        """Writes one chunk of the mean of messages: of the whole group (``part`` 0), or of a part of it (from 1)."""
        compression, message_id = self.compression, MessageId(self.exchange_id.round, -1 - part)
        with torch.no_grad():
            if out.device == compression.device:
                compression.reduce(compression.chunks[chunk], messages, sizes, out, message_id)
                return
            # Messages are on the CPU, and tensors on a GPU, which does not finish the computation first.
            with beside(compression.device, "means of groups"):
                there = [message.to(compression.device) for message in messages]
                result = torch.empty_like(there[0])
                compression.reduce(compression.chunks[chunk], there, sizes, result, message_id)
                out.copy_(result)


class Handle:
    """An operation in flight.

    Args:
        finish: what is left to do in ``wait``. It may return the ``flags``.

    Attributes:
        bytes_sent: the bytes that this worker puts on the wire for it, without flags.
        verdict: after ``wait``. It is BOTH unless faults are tolerated (``Transport.tolerate``).
        flags: after ``wait``, ``Compression.flag`` of the message sent and the largest of those received, if the transport
            knows them. On a GPU that costs less than to read them from the messages. None: read those.
    """

    def __init__(self, finish: Callable[[], tuple[int, int] | None] = lambda: None, bytes_sent: int = 0) -> None:
        self.finish, self.bytes_sent = finish, bytes_sent
        self.verdict = Verdict.BOTH
        self.flags: tuple[int, int] | None = None

    def wait_for_read(self) -> None:
        """Blocks until the values to send have been read. Raises the errors of ``wait``."""
        return

    def wait(self) -> None:
        """Blocks until the operation is complete. Called once.

        Raises:
            PeerLostError, PeerTimeoutError: another worker is gone or silent, and faults are not tolerated; the message names
                its rank.
            WireError: another message came than the expected one.
        """
        self.flags = self.finish()


@dataclass(repr=False)
class Transport(ABC):
    """How the bytes of one wrapper move.

    Attributes:
        rank: this worker's, in the process group.
        world_size: how many workers there are.
        run_id: drawn anew at each construction, the same on all workers.
        timeout: seconds after which a wait for another worker fails.
        store: shared by these workers alone, for a few short texts; any thread may use it. ``get`` waits for a missing key: use
            ``read_text``. ``add`` and ``set`` must not share a key. A store that is gone raises RuntimeError; a stopped one
            hangs (see ``StoreClient``).
        control: collectives of all workers. ``plane``: moves them, and agreements.
        only_cuda: whether the backend of the process group is NCCL alone, which moves nothing that is on a CPU.
        neighbours: the result of ``tolerate``; None before it.
        table: what an engine asks of the other workers.
        records: what a process must find in the store to join these workers, by key; the secret of the run is among it.
        groups: of the edges of a topology, for collectives of the user's.
    """

    rank: int
    world_size: int
    run_id: str
    timeout: float
    store: Store
    control: Collectives = field(init=False)
    plane: ControlPlane = field(init=False)
    only_cuda: bool = field(default=False, init=False)
    neighbours: Neighbours | None = field(default=None, init=False)
    table: PeerTable = field(default_factory=PeerTable, init=False)
    records: Mapping[str, str] = field(default_factory=dict, init=False)
    groups: EdgeGroups = field(default_factory=EdgeGroups, init=False)

    @abstractmethod
    def explain(self, error: Exception | None, ranks: Sequence[int], what: object) -> PeerError:
        """The error for ``error``, as a communicator with the workers ``ranks`` has raised it in ``what``.
        None: they are gone."""

    @abstractmethod
    def start(self, edge: Edge, request: ExchangeRequest) -> Handle:
        """Begins the exchange of this worker with the others of ``edge`` (at least two ranks), beside the computation.

        The others get the request's hint. It is encoded, perhaps by another thread, as soon as theirs are there. After the
        handle's ``wait``, ``received`` holds the other's message on an edge of two, and on a larger one the message of the mean
        of all members. Until then both messages belong to the transport. Every member starts its exchanges in the same order
        of (round, bucket), with messages of one length. One of a bucket begins when the one before has been waited
        for, and has a larger round.
        """

    def begin(self, bucket: int) -> None:
        """Buckets from this number on are in use, and rounds may be earlier ones. Called by all workers together."""
        return

    def announce(self, round_: int) -> None:
        """This worker is in a round; the others learn of it."""
        return

    @abstractmethod
    def newest_round(self) -> int:
        """The latest round in which another living worker is known to be; -1 if nothing is known."""

    def tolerate(self, faults: Tolerate) -> Neighbours:
        """From now on exchanges with workers that are gone or silent end with a verdict and not with an error.

        Called before the first exchange, by all workers, with topologies of pairs.

        Raises:
            TypeError: this kind of transport cannot.
        """
        raise TypeError(f"{type(self).__name__} does not tolerate faults: leave faults= out.")

    def prepare(self, edges: list[Edge]) -> None:
        """Connects this worker along ``edges`` ahead of their first exchange; called by all workers together."""
        return

    def report(self, cause: str) -> None:
        """Stores the cause of a failure here, for the errors of workers that lose this one; '' removes it. Threads have their
        errors at hand."""
        return

    def carrier(self, *, on_gpus: bool) -> str:
        """Names the library that carries the exchanges of tensors on GPUs, or on CPUs; '' in one process."""
        return ""

    def counts(self) -> dict[str, int]:
        """``one_sided`` and ``reconnects`` of ``Stats``."""
        return {}

    def leave_process_group(self) -> None:
        """Where faults are tolerated, rounds begin: nothing goes over the process group any more."""
        return

    def close(self) -> None:
        """Closes connections and ends threads. All handles must have been waited for."""
        return
