"""Communicators of our own on the store of a process group, and what their errors mean.

``dist.new_group`` must be called by every worker of the world and forgets the parent's timeout. So each wrapper uses a prefix
of the store whose name rank 0 draws and shares over the process group, and a communicator is made by its members alone.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hmac
import ipaddress
import json
import os
import secrets
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, default_pg_timeout

from decent_dp.errors import DisagreementError, PeerError, PeerLostError, PeerTimeoutError
from decent_dp.faults import Tolerate, most_workers
from decent_dp.transport.messages import VERSION
from decent_dp.transport.sockets import Curve
from decent_dp.transport.store import ROOT, StoreCalls, StoreClient, read_bytes, read_text, warn_of_unreadable, whole_store

# torch's stubs leave out what its communicators can do (send, recv, allreduce, … on lists of tensors).
Communicator: TypeAlias = Any
T = TypeVar("T")

# Seconds for a note in the store. The error that would quote it is raised without it after that.
_STORE_LIMIT = 2.0
# Environment variables, the first that is set counts.
_INTERFACES = ("DECENT_DP_INTERFACE", "GLOO_SOCKET_IFNAME")
# Errors of the system when a process, or the machine, has too many open files.
OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

# The key, below ROOT, of the list of runs.
RUNS = "runs"

# A part of NCCL's error for two ranks on one GPU, in small letters.
_ONE_GPU = "duplicate gpu"

__all__ = [
    "OUT_OF_DESCRIPTORS",
    "ROOT",
    "RUNS",
    "Communicator",
    "GreetingError",
    "Notes",
    "Rendezvous",
    "SilentError",
    "UnreachableError",
    "address_key",
    "named_interface",
    "network_stack",
    "peer_error",
    "timeout_of",
]


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


@dataclass(frozen=True)
class Rendezvous:
    """The common data with which the workers of one wrapper connect.

    Attributes:
        store: the process group's store, under a prefix of this wrapper's own.
        rank, world_size: in the process group.
        timeout: the process group's.
        node: the name of this worker's network stack. In ``node_of`` may be that of a process before it.
        places: the number of ranks, with those of workers that may come.
        incarnation: how many processes had joined the run before this one, itself included; 0 for those that began it.
        nccl: the process group moves CUDA tensors by NCCL.
        node_of: the name of each worker's network stack; workers of one name share a loopback interface.
        token: the secret with which they prove that they are of this run; known to these workers alone.
        run_id: this wrapper's own name, the same on all its workers.
        addresses: of workers, as far as they were looked up.
        encrypt: whether connections are encrypted; None: those that leave a node.
        curve: this worker's keys. ``keys``: the public ones of the workers that began the run, as far as they are known.
        dead_after: of ``Tolerate``; None: faults are errors.
    """

    store: Store
    rank: int
    world_size: int
    timeout: timedelta
    nccl: bool
    node_of: tuple[str, ...]
    token: bytes = field(repr=False)
    run_id: str
    node: str
    places: int
    incarnation: int = 0
    addresses: dict[int, dict[str, Any]] = field(default_factory=dict)
    encrypt: bool | None = None
    curve: Curve = field(default_factory=Curve.create, repr=False)
    keys: frozenset[bytes] = frozenset()
    dead_after: float | None = None

    @classmethod
    def create(
        cls, process_group: dist.ProcessGroup | None, faults: Tolerate | None = None, encrypt: bool | None = None
    ) -> Rendezvous:
        """Called by all workers of ``process_group`` (None: the default group) together.

        Raises:
            DisagreementError: the workers' versions, secrets or ``encrypt`` differ. It is raised on all of them.
            ValueError: the secret of a worker cannot be read. It is raised on all of them.
        """
        group = process_group if process_group is not None else dist.group.WORLD
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        cards: list[Any] = [None] * world_size
        curve, name = Curve.create(), uuid.uuid4().hex
        card = {
            "version": VERSION,
            "name": name,
            "token": secrets.token_hex(16),
            "stack": network_stack(),
            "key": curve.public.hex(),
            "encrypt": encrypt,
            "rank": rank,
        }
        try:
            card["mac"] = run_secret().bind(_unbound(card))
        except ValueError as error:
            card["wrong"] = str(error)  # raised on all workers
        try:
            dist.all_gather_object(cards, card, group=group)
        except RuntimeError as error:
            if _ONE_GPU in str(error).lower():
                raise RuntimeError(_SHARED_GPU) from error
            raise
        _check_cards(cards)
        # Without the prefix of the process group, which a process that joins later does not know.
        store = PrefixStore(f"{ROOT}/{cards[0]['name']}", whole_store(_get_default_store()))
        # A worker that does not know its stack shares it with nobody.
        node_of = tuple(card["stack"] or f"worker {i}" for i, card in enumerate(cards))
        return cls(
            store,
            rank,
            world_size,
            timeout_of(group),
            nccl="nccl" in str(dist.get_backend(group)),
            node_of=node_of,
            token=bytes.fromhex(cards[0]["token"]),
            run_id=cards[0]["name"],
            node=node_of[rank],
            places=max(world_size, most_workers(faults)),
            encrypt=encrypt,
            curve=curve,
            keys=frozenset(bytes.fromhex(card["key"]) for card in cards),
            dead_after=None if faults is None else faults.dead_after,
        )

    @functools.cached_property
    def proof(self) -> bytes:
        """The secret with which workers prove that they are of this run: the token, and the user's secret if there is one."""
        return bytes.fromhex(run_secret().bind(self.token.hex())) if run_secret().text else self.token

    def bind(self, text: str) -> str:
        """Binds what is in the store to the run's secret."""
        return hmac.digest(self.proof, b"decent_dp store " + text.encode(), "sha256").hex()

    def publish(self, address: dict[str, Any]) -> None:
        """Stores where this worker listens, and its public key."""
        address["rank"] = self.rank
        address["mac"] = self.bind(_unbound(address))
        self.addresses[self.rank] = address
        self.store.set(address_key(self.rank, self.incarnation), json.dumps(address))
        self.store.set(*self._key_record)

    @property
    def _key_record(self) -> tuple[str, str]:
        key = self.curve.public.hex()
        return f"key/{key}", self.bind(key)

    def _is_bound(self, address: dict[str, Any], rank: int) -> bool:
        return address.get("rank") == rank and _are_equal(str(address.get("mac")), self.bind(_unbound(address)))

    def knows(self, key: bytes, seconds: float) -> bool:
        """Whether the store has this public key of a worker. Raises OSError if it does not answer."""
        found = self._client.run(lambda store: read_text(store, f"{self.run_id}/key/{key.hex()}"), seconds)
        return _are_equal(found or "", self.bind(key.hex()))

    @functools.cached_property
    def _client(self) -> StoreClient:
        return StoreClient(self.store, ROOT)

    def address_of(self, rank: int, incarnation: int, seconds: float) -> dict[str, Any]:
        """Of the process of this incarnation; looked up in the store if it is not known.

        Raises:
            OSError: the store does not answer.
            RuntimeError: the process has stored no address, or not in time if it began with this one; or something else has.
        """
        address = self.addresses.get(rank)
        if address is None or address["incarnation"] != incarnation:
            key = address_key(rank, incarnation)
            if incarnation or self.incarnation:
                # The store may be another one than at the start, or stopped.
                value = self._client.run(lambda store: read_bytes(store, f"{self.run_id}/{key}"), seconds)
                if not value:  # b"": it has left
                    raise RuntimeError(f"worker {rank} has stored no address")
            else:
                # The store's own timeout, which ``get`` has, is another: half an hour by default.
                self.store.wait([key], timedelta(seconds=seconds))
                value = self.store.get(key)
            address = self._keep_address(rank, incarnation, value)
        return address

    def look_up_addresses(self) -> None:
        """Reads the addresses of all workers that began the run, so that ``address_of`` does not need the store.

        Raises:
            RuntimeError: as of ``address_of``.
        """
        others = [rank for rank in range(self.world_size) if rank not in self.addresses]
        keys = [address_key(rank, 0) for rank in others]
        self.store.wait(keys, self.timeout)
        for rank, value in zip(others, self.store.multi_get(keys), strict=True):
            self._keep_address(rank, 0, value)

    def _keep_address(self, rank: int, incarnation: int, value: bytes) -> dict[str, Any]:
        address = _read_address(value, incarnation)
        if address is not None and not self._is_bound(address, rank):
            raise RuntimeError(
                f"the address of worker {rank} in the store was not written by a worker of this run: see who else writes to "
                "it, and that DECENT_DP_SECRET is the same on all workers"
            )
        if address is None:
            key = f"{self.run_id}/{address_key(rank, incarnation)}"
            warn_of_unreadable(key, f"no connection to worker {rank} is made until it is there again")
            raise RuntimeError(f"the store has something else under '{ROOT}/{key}' than the address of worker {rank}")
        self.addresses[rank] = address
        return address

    def records(self) -> dict[str, str]:
        """``Transport.records``."""
        common: dict[str, Any] = {
            "token": self.token.hex(),
            "world_size": self.world_size,
            "places": self.places,
            "node_of": list(self.node_of),
            "timeout": self.timeout.total_seconds(),
            "dead_after": self.dead_after,
            "encrypt": self.encrypt,
        }
        common["mac"] = run_secret().bind(_unbound(common))
        own = json.dumps(self.addresses[self.rank])
        return {"run": json.dumps(common), address_key(self.rank, self.incarnation): own, **dict([self._key_record])}

    @property
    def local(self) -> frozenset[int]:
        """The other workers on this one's network stack."""
        return frozenset(i for i, name in enumerate(self.node_of) if name == self.node and i != self.rank)

    def gloo(self, name: str, ranks: Sequence[int]) -> Communicator:
        """A gloo communicator of ``ranks``; called by its members alone."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self.timeout
        options._threads = 1
        options._devices = [self._device()]
        store = PrefixStore(name, self.store)
        return gloo(store, list(ranks).index(self.rank), len(ranks), options)

    def nccl_communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """An NCCL communicator of ``ranks`` on the current CUDA device; called by its members alone."""
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        store = PrefixStore(name, self.store)
        return dist.ProcessGroupNCCL(store, list(ranks).index(self.rank), len(ranks), options)

    def _device(self) -> Any:
        interface = named_interface()[1]
        if interface:
            return dist.ProcessGroupGloo.create_device(interface=interface)
        if len(self.local) == self.world_size - 1:  # nothing needs to listen beyond it
            return dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")
        return dist.ProcessGroupGloo.create_default_device()


@dataclass(frozen=True)
class RunSecret:
    """A secret of the user's, known to the workers of a run alone; empty for none."""

    text: bytes = field(repr=False)

    def bind(self, text: str) -> str:
        """Proves that this worker knows the secret; empty without one."""
        return hmac.digest(self.text, b"decent_dp run " + text.encode(), "sha256").hex() if self.text else ""


def run_secret() -> RunSecret:
    """The secret in DECENT_DP_SECRET, or in the file that DECENT_DP_SECRET_FILE names.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    name = os.environ.get("DECENT_DP_SECRET_FILE", "")
    if not name:
        return RunSecret(os.environ.get("DECENT_DP_SECRET", "").encode())
    try:
        with open(name, "rb") as file:
            text = file.read().strip()
    except OSError as error:
        raise ValueError(f"DECENT_DP_SECRET_FILE={name} cannot be read: {error.strerror}") from error
    if not text:
        raise ValueError(f"DECENT_DP_SECRET_FILE={name} is empty: write a long random text to it")
    return RunSecret(text)


def _check_cards(cards: Sequence[dict[str, Any]]) -> None:
    """Raises the same error on all workers if they cannot work together."""
    versions = [card.get("version") if isinstance(card, dict) else None for card in cards]
    if set(versions) != {VERSION}:
        raise DisagreementError(
            f"the workers speak different versions of the protocol (by rank: {versions}): install one on all of them"
        )
    wrong = [f"worker {rank}: {card['wrong']}" for rank, card in enumerate(cards) if "wrong" in card]
    if wrong:
        raise ValueError("; ".join(wrong))
    encrypts = [card["encrypt"] for card in cards]
    if len(set(encrypts)) > 1:
        raise DisagreementError(f"encrypt= must be the same on all workers, and is (by rank): {encrypts}")
    with_secret = [rank for rank, card in enumerate(cards) if card["mac"]]
    if 0 < len(with_secret) < len(cards):
        raise DisagreementError(
            f"only workers {with_secret} have DECENT_DP_SECRET (or DECENT_DP_SECRET_FILE): set it on all of them"
        )
    if not all(card["rank"] == rank and is_of_secret(card) for rank, card in enumerate(cards)):
        raise DisagreementError("DECENT_DP_SECRET (or the file of DECENT_DP_SECRET_FILE) is not the same on all workers")


def _are_equal(found: str, due: str) -> bool:
    return hmac.compare_digest(found.encode(errors="replace"), due.encode())


def _unbound(entry: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in entry.items() if name != "mac"}, sort_keys=True)


def is_of_secret(entry: Mapping[str, Any]) -> bool:
    """Whether an entry, such as what all workers have in common (``records``), is of one that knows this worker's secret."""
    return _are_equal(str(entry.get("mac", "")), run_secret().bind(_unbound(entry)))


_SHARED_GPU = (
    "workers share a GPU, which NCCL refuses: give each worker a GPU of its own (decent_dp.initialize_dist(), or "
    "torch.cuda.set_device(LOCAL_RANK) before the process group is made), and start no more workers on a node than it has "
    "GPUs. To share one, make the process group with backend='gloo'."
)


def _read_address(value: bytes, incarnation: int) -> dict[str, Any] | None:
    """What ``listen`` has stored; None: it is something else."""
    with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError, RecursionError):
        address = json.loads(value)
        host, local, node = (address.get(name) for name in ("host", "local", "node"))
        ports = (address.get("port"), address.get("bulk"))
        if host is not None and not (ipaddress.ip_address(str(host)) and all(map(_is_port, ports))):
            return None
        if local is not None and not (isinstance(local, str) and local.encode()):
            return None
        if len(bytes.fromhex(address.get("key", ""))) not in (0, 32):
            return None
        if (host or local) and isinstance(node, str) and address["incarnation"] == incarnation:
            return dict(address)
    return None


def _is_port(number: Any) -> bool:
    return type(number) is int and 0 < number < 2**16


def address_key(rank: int, incarnation: int) -> str:
    """The key of a process's address in the run's store."""
    return f"address/{rank}" if incarnation == 0 else f"address/{rank}/{incarnation}"


def named_interface() -> tuple[str, str]:
    """The environment variable that names the network interface at which this worker listens, and the interface; else ''."""
    name = next((name for name in _INTERFACES if os.environ.get(name)), "")
    return name, os.environ.get(name, "").split(",")[0]


def network_stack() -> str | None:
    """The name of this process's network stack; processes with equal names share a loopback interface. None: unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # a Mac has one
        return f"{uuid.getnode():012x}" if sys.platform == "darwin" else None


def timeout_of(group: dist.ProcessGroup | None) -> timedelta:
    """The timeout of a process group's collectives."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            backend: Any = group._get_backend(torch.device(device))  # type: ignore[union-attr]
            return timedelta(seconds=backend.options._timeout.total_seconds())
    return default_pg_timeout


class Notes:
    """The cause of a failure of each worker, in the store, quoted in the errors of workers that lose it."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank = store, rank
        self._calls = StoreCalls()
        self._calls.start()  # an error that ends the interpreter is written when no thread can start any more
        self._written = ""
        # A store that did not answer is not asked again: torch prints a stack at each try.
        self._failed = self._closed = False

    def close(self) -> None:
        """Notes are neither written nor read any more."""
        self._closed = True
        self._calls.close()

    def write(self, text: str) -> None:
        """Replaces this worker's note; an empty text removes it. A note that cannot be written is no error."""
        text = text[:2000]
        if text != self._written:
            self._call(lambda: self._store.set(f"note/{self._rank}", text))
            self._written = text

    def read(self, ranks: Iterable[int]) -> str:
        """The notes of ``ranks``, as sentences; empty when there are none."""
        others = [rank for rank in ranks if rank != self._rank]
        texts = self._call(lambda: [read_text(self._store, f"note/{rank}") for rank in others]) or []
        said = [f" Worker {rank} reported: {text}" for rank, text in zip(others, texts, strict=False) if text]
        if self._failed:
            said.append(" The store does not answer either. Where no launcher keeps it worker 0 does: look there first.")
        return "".join(said)

    def _call(self, call: Callable[[], T]) -> T | None:
        if not (self._failed or self._closed):
            try:
                return self._calls.run(call, _STORE_LIMIT)
            except (RuntimeError, ConnectionError):  # gone, or it hangs
                self._failed = True
        return None


def peer_error(error: Exception, ranks: Sequence[int], what: str, notes: Notes, timeout: timedelta) -> PeerError:
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
    if _ONE_GPU in text:
        return PeerError(f"{what} failed: {_SHARED_GPU}")
    if isinstance(error, TimeoutError) or "timed out" in text or "timeout" in text:
        return PeerTimeoutError(
            f"{who} sent nothing for {what} within the process group's timeout of {timeout.total_seconds():g} s. It is "
            "slower than that, or it has made fewer updates: uneven numbers of batches need `with model.join():`."
            f"{said}"
        )
    return PeerLostError(
        f"{who} is gone, and {what} needed it: it raised, was killed, or had fewer batches (then use `with model.join():`)."
        f"{said}"
    )
