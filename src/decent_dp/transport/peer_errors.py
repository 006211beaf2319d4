"""Errors of connections and communicators, as users see them, and the causes that workers leave in the store."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from decent_dp.errors import PeerError, PeerLostError, PeerTimeoutError
from decent_dp.transport.store import StoreClient, read_text

T = TypeVar("T")

__all__ = [
    "ONE_GPU",
    "OUT_OF_DESCRIPTORS",
    "SHARED_GPU",
    "GreetingError",
    "Notes",
    "SilentError",
    "UnreachableError",
    "is_of_network",
    "peer_error",
]

# Seconds for a note in the store. The error that would quote it is raised without it after that.
_STORE_LIMIT = 2.0
# Errors of the system when a process, or the machine, has too many open files.
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# Words in errors of NCCL for a worker that is gone or silent.
_OF_NETWORK = ("remote", "connection", "timed out", "timeout")
# A part of NCCL's error for two ranks on one GPU, in small letters.
ONE_GPU = "duplicate gpu"

SHARED_GPU = (
    "workers share a GPU, which NCCL refuses: give each worker a GPU of its own (decent_dp.initialize_dist(), or "
    "torch.cuda.set_device(LOCAL_RANK) before the process group is made), and start no more workers on a node than it has "
    "GPUs. To share one, make the process group with backend='gloo'."
)


class SilentError(ConnectionError):
    """A connected worker gave no sign of life for too long. Users see the `PeerLostError` that follows."""


class UnreachableError(ConnectionError):
    """No connection to a worker can be made. Users see the `PeerLostError` that follows.

    Args:
        where: its address and port; None for a local socket.
        reason: the error of the system.
        own: the address and port of this worker; empty if it listens on its machine alone.
        is_refused: nobody listens there.
    """

    def __init__(self, where: str | None, reason: str, own: str = "", *, is_refused: bool = False) -> None:
        super().__init__(reason)
        self.where, self.own, self.is_refused = where, own, is_refused


class GreetingError(ConnectionError):
    """The other end of a new connection refused it, or did not prove who it is. Users see the `PeerLostError` that follows."""


class Notes:
    """The cause of a failure of each worker, in the store, quoted in the errors of workers that lose it.

    Args:
        prefix: of the keys.
    """

    def __init__(self, client: StoreClient, prefix: str, rank: int) -> None:
        self._client, self._prefix, self._rank = client, prefix, rank
        self._written = ""
        # A store that did not answer is not asked again.
        self._failed = False

    def write(self, text: str) -> None:
        """Replaces this worker's note; an empty text removes it. A note that cannot be written is no error."""
        text = text[:2000]
        if text != self._written:
            self._call(lambda store: store.set(f"{self._prefix}/{self._rank}", text))
            self._written = text

    def read(self, ranks: Iterable[int]) -> str:
        """The notes of ``ranks``, as sentences; empty when there are none."""
        others = [rank for rank in ranks if rank != self._rank]
        texts = self._call(lambda store: [read_text(store, f"{self._prefix}/{rank}") for rank in others]) or []
        said = [f" Worker {rank} reported: {text}" for rank, text in zip(others, texts, strict=False) if text]
        if self._failed:
            said.append(" The store does not answer either. Where no launcher keeps it worker 0 does: look there first.")
        return "".join(said)

    def _call(self, call: Callable[[Store], T]) -> T | None:
        if not self._failed:
            try:
                return self._client.run(call, _STORE_LIMIT)
            except ConnectionError:  # gone, or it hangs
                self._failed = True
        return None


def is_of_network(error: RuntimeError) -> bool:
    """Whether a collective of torch has raised it for a lost or silent worker. Only the text tells these errors from others."""
    text = str(error).lower()
    is_of_gloo = "gloo/transport" in text and "enforce fail" not in text  # that is a mismatch of collectives
    return is_of_gloo or (isinstance(error, dist.DistError) and any(word in text for word in _OF_NETWORK))


def peer_error(error: Exception, ranks: Sequence[int], what: str, notes: Notes, timeout: float) -> PeerError:
    """The error of this library for one of a communicator.

    Args:
        error: as torch raised it, with an address and no rank.
        ranks: the other workers that took part.
        what: the operation that failed.
    """
    who = f"worker {ranks[0]}" if len(ranks) == 1 else f"one of the workers {list(ranks)}"
    said = notes.read(ranks)
    if isinstance(error, UnreachableError) and error.where is not None:
        own = f" It has not come to this worker at {error.own} either." if error.own else ""
        return PeerLostError(
            f"{who} does not answer at {error.where} ({error}), and {what} needs it.{own} It is gone, or there is no way: see "
            "that these are addresses of the right network interfaces (DECENT_DP_INTERFACE on each worker names its own). One "
            "of the two must be reached: open its ports in the firewall (DECENT_DP_PORTS=29600-29699 on all workers), "
            f"or connect the machines by a tunnel, such as WireGuard.{said}"
        )
    if isinstance(error, GreetingError):
        return PeerLostError(f"{who} is not connected, and {what} needs it: {error}{said}")
    if isinstance(error, OSError) and error.errno in OUT_OF_DESCRIPTORS:
        return PeerError(
            f"this process cannot open a connection to {who}, which {what} needs: {error.strerror}. Raise its limit of open "
            "files (`ulimit -n`)."
        )
    if isinstance(error, SilentError):
        return PeerLostError(
            f"{who} gave no sign of life ({error}), and {what} needs it: it is stopped, or its machine or the way to it "
            f"is gone (a longer wait: DECENT_DP_DEAD_AFTER, seconds, in the environment of all workers).{said}"
        )
    # torch has one class for all errors: only its text distinguishes them.
    text = "" if isinstance(error, ConnectionError) else str(error).lower()
    if ONE_GPU in text:
        return PeerError(f"{what} failed: {SHARED_GPU}")
    if isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text:
        return PeerTimeoutError(
            f"{who} sent nothing for {what} within the process group's timeout of {timeout:g} s. It is "
            "slower than that, or it has made fewer updates: uneven numbers of batches need join() around the loop."
            f"{said}"
        )
    return PeerLostError(
        f"{who} is gone, and {what} needed it: it raised, was killed, or had fewer batches (then put join() around the loop)."
        f"{said}"
    )
