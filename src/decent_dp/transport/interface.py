"""The interface of all transports."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from decent_dp.compression import Compression, MessageId
from decent_dp.errors import PeerError, PeerLostError
from decent_dp.faults import Tolerate
from decent_dp.topo import Edge
from decent_dp.transport.agreement import NO_ROUND
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.streams import beside
from decent_dp.transport.votes import ExchangeId, Verdict

__all__ = [
    "DeferredHandle",
    "ExchangeId",
    "ExchangeRequest",
    "Explain",
    "Handle",
    "Neighbours",
    "PeerTable",
    "Transport",
    "Verdict",
]


# Turns a broken connection, or a timeout, in an exchange with these workers into an error that names them.
Explain: TypeAlias = Callable[[Exception, list[int], ExchangeId], RuntimeError]


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


class Handle(ABC):
    """An operation in flight.

    Attributes:
        bytes_sent: the bytes that this worker puts on the wire for it, without flags.
        verdict: after ``wait``. It is BOTH unless faults are tolerated (``Transport.tolerate``).
        flags: after ``wait``, ``Compression.flag`` of the message sent and the largest of those received, if the transport
            knows them. On a GPU that costs less than to read them from the messages. None: read those.
    """

    bytes_sent: int = 0
    verdict: Verdict = Verdict.BOTH
    flags: tuple[int, int] | None = None

    def wait_for_read(self) -> None:
        """Blocks until the values to send have been read. Raises the errors of ``wait``."""
        return

    @abstractmethod
    def wait(self) -> None:
        """Blocks until the operation is complete. Called once.

        Raises:
            PeerLostError, PeerTimeoutError: another worker is gone or silent, and faults are not tolerated; the message names
                its rank.
            WireError: another message came than the expected one.
        """


class DeferredHandle(Handle):
    """A handle whose wait is a call, which may return the ``flags``."""

    def __init__(self, finish: Callable[[], tuple[int, int] | None], bytes_sent: int = 0) -> None:
        self._finish = finish
        self.bytes_sent = bytes_sent

    def wait(self) -> None:
        self.flags = self._finish()


class PeerTable:
    """What an engine asks of the other workers; no call waits for one. Without ``faults=`` each is needed: none is left out."""

    def usable(self, edge: Edge, exchange_id: ExchangeId) -> bool:
        """Whether this exchange can be started: the other worker gives signs of life, and has not left it out."""
        return True

    def round_of(self, rank: int) -> int:
        """The latest round in which a worker is known to be; -1 if nothing is known."""
        return -1

    def living(self) -> list[int]:
        """The workers that are connected and give signs of life."""
        return []

    def has_dropped(self, others: Sequence[int], exchange_id: ExchangeId) -> bool:
        """Whether one of these workers leaves this exchange out."""
        return False

    def skip(self, edge: Edge, exchange_id: ExchangeId) -> None:
        """Tells the other worker that this one leaves an exchange out, and all earlier ones of its bucket that are open."""
        return


class Neighbours(PeerTable, ABC):
    """The workers that this one is connected to, where faults are tolerated. Returned by ``Transport.tolerate``.

    Without more, the others can neither be late nor come back: threads of one process only end.
    """

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """Something has failed in a thread of this worker, and nobody expects it: the worker can go on no more. For the others
        it is gone, and ``refuse_failed`` raises from now on. Any thread may call it."""

    @abstractmethod
    def refuse_failed(self) -> None:
        """Raises RuntimeError, from the first error, after ``fail`` or an error in the transport's own thread."""

    @property
    def is_awake(self) -> bool:
        """False after a stop of this process that was long enough for its edges to become holes, until the others are heard."""
        return True

    @abstractmethod
    def silent(self) -> list[int]:
        """The workers whose edges are holes at present."""

    @abstractmethod
    def lost(self) -> list[int]:
        """Those of them that are gone, or have been silent for ``dead_after``."""

    @abstractmethod
    def ended(self) -> list[int]:
        """Those of the lost ones whose processes are known to have ended. The others may live, behind a broken network."""

    @abstractmethod
    def left(self) -> list[int]:
        """Those of the lost ones that have said that they leave."""

    def paused(self) -> AbstractContextManager[None]:
        """Context manager in which this worker makes no rounds: none of its exchanges is to be waited for. It does not nest."""
        return contextlib.nullcontext()

    @property
    def is_paused(self) -> bool:
        """Whether it is in ``paused()``."""
        return False

    @abstractmethod
    def reserve_until(self, seconds: float, least: int) -> int:
        """Returns a round, after which this worker starts no exchange until ``stop_mixing_after(None)``.

        Args:
            seconds, least: how far it is ahead of the present round: as many rounds as take so long, or so many.
        """

    @abstractmethod
    def stop_mixing_after(self, last: int | None) -> None:
        """Exchanges of later rounds than this are left out; None: no longer."""

    def enter_epoch(self, number: int) -> None:
        """This worker knows an epoch; the others learn of it."""
        return

    def newest_epoch(self) -> int:
        """The largest number of an epoch that a connected worker knows."""
        return 0

    def renew(self, rank: int, incarnation: int, start: int) -> None:
        """Another process is this worker now; nothing, if it is this incarnation already.

        Args:
            start: its first round. In rounds before nobody meets it.
        """
        return

    @property
    def replaced(self) -> bool:
        """Whether another process is known to be this worker now."""
        return False

    def serve(self, answer: Callable[[int, int, bytes], bytes]) -> None:
        """Requests of other workers are answered from now on, and processes that want to join may connect.

        Args:
            answer: called with the rank and the incarnation of a process that has proved that it knows the run's secret, and
                its request; in a thread of its own, one for all. An error is logged, and the answer is empty.
        """
        return

    def ask(self, rank: int, incarnation: int, request: bytes) -> Future[bytes]:
        """The answer of another worker, which is the process of this incarnation, to a request of at most 1 MiB.

        The request is repeated if the connection breaks, so there may be no answer for long. The future has a ConnectionError
        if the worker cannot be asked.
        """
        future: Future[bytes] = Future()
        future.set_exception(ConnectionError("workers of this kind give each other nothing but exchanges"))
        return future


@dataclass
class Transport(ABC):
    """How the bytes of one wrapper move.

    Attributes:
        rank: this worker's, in the process group.
        world_size: how many workers there are.
        run_id: drawn anew at each construction, the same on all workers.
        timeout: seconds after which a wait for another worker fails.
        store: shared by these workers alone, for a few short texts; any thread may use it. ``get`` waits for a missing key: use
            ``read_text``. ``add`` and ``set`` must not share a key. A store that is gone raises RuntimeError; a stopped one
            hangs (see ``StoreCalls``).
        only_cuda: whether the backend of the process group is NCCL alone, which moves nothing that is on a CPU.
        neighbours: the result of ``tolerate``; None before it.
        table: what an engine asks of the other workers.
    """

    rank: int
    world_size: int
    run_id: str
    timeout: float
    store: Store
    only_cuda: bool = False
    neighbours: Neighbours | None = field(default=None, init=False)
    table: PeerTable = field(default_factory=PeerTable, init=False)

    @property
    @abstractmethod
    def control(self) -> Collectives: ...

    @property
    @abstractmethod
    def plane(self) -> ControlPlane:
        """Moves the agreements and collectives of all workers."""

    @abstractmethod
    def explain_absent(self, ranks: Sequence[int], what: str) -> PeerLostError:
        """The error for workers that are gone, and were needed for ``what``."""

    def explain(self, error: Exception, ranks: Sequence[int], what: object) -> PeerError:
        """The error for ``error``, as a communicator with the workers ``ranks`` has raised it in ``what``."""
        return self.explain_absent(ranks, str(what))

    def agree(
        self,
        name: str,
        text: str,
        *,
        asks: bool = False,
        round_: int = NO_ROUND,
        among: Sequence[int] | None = None,
    ) -> Future[Mapping[int, str]]:
        """Contributes to an agreement: each worker contributes a text, and all get the same texts. Any thread may call it.

        Args:
            name: a kind, a slash, and a number that grows; the same on all workers.
            asks: the others are to learn of it at once (``is_asked``).
            round_: processes whose first round is not before this one take no part.
            among: those that take part, this worker among them, with ``tolerate``; None: all.

        Returns:
            The texts by rank, in ascending order, of all that live; without this worker's if the others have taken it for gone.
        """
        return self.plane.agree(name, text, asks=asks, round_=round_, among=among)

    def is_asked(self, name: str) -> bool:
        """Whether another worker wants all to contribute to an agreement at once."""
        return self.plane.agreements.is_asked(name)

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

    @abstractmethod
    def report(self, cause: str) -> None:
        """Stores the cause of a failure here, for the errors of workers that lose this one; '' removes it."""

    def records(self) -> dict[str, str]:
        """What a process must find in the store to join these workers, by key; the secret of the run is among it."""
        return {}

    def make_groups(self, edges: Iterable[Edge]) -> None:
        """Makes a process group for each of these edges, for collectives of the user's. Called by all workers together."""
        return

    def process_group_of(self, ranks: Sequence[int]) -> Any:
        """The process group of all workers, or one of ``make_groups``; None if there is none."""
        return None

    def carrier(self, *, on_gpus: bool) -> str:
        """Names the library that carries the exchanges of tensors on GPUs, or on CPUs; '' in one process."""
        return ""

    @property
    def one_sided(self) -> int:
        """Exchanges that were dropped here after this worker had all of it, and that the other worker may have mixed."""
        return 0

    @property
    def reconnects(self) -> int:
        """Connections that were made in place of lost ones."""
        return 0

    def leave_process_group(self) -> None:
        """Where faults are tolerated, rounds begin: nothing goes over the process group any more."""
        return

    @abstractmethod
    def close(self) -> None:
        """Closes connections and ends threads. All handles must have been waited for."""
