"""What the workers of one wrapper have in common, and communicators of their own on the store of a process group.

``dist.new_group`` must be called by every worker of the world and forgets the parent's timeout. So each wrapper uses a prefix
of the store whose name rank 0 draws and shares over the process group, and a communicator is made by its members alone.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import json
import os
import secrets
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, default_pg_timeout

from decent_dp.errors import DisagreementError
from decent_dp.faults import Tolerate, most_workers
from decent_dp.transport.messages import VERSION
from decent_dp.transport.peer_errors import ONE_GPU, SHARED_GPU
from decent_dp.transport.sockets import Curve, check_pyzmq
from decent_dp.transport.store import ROOT, StoreClient, read_bytes, read_text, warn_of_unreadable, whole_store

# torch's stubs leave out what its communicators can do (send, recv, allreduce, … on lists of tensors).
Communicator: TypeAlias = Any

# Environment variables, the first that is set counts.
_INTERFACES = ("DECENT_DP_INTERFACE", "GLOO_SOCKET_IFNAME")
# The key, below ROOT, of the list of runs.
RUNS = "runs"

__all__ = [
    "ROOT",
    "RUNS",
    "Communicator",
    "Rendezvous",
    "address_key",
    "named_interface",
    "network_stack",
    "timeout_of",
]


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
            ValueError: the secret of a worker cannot be read, or its pyzmq is too old. It is raised on all of them.
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
            check_pyzmq()
            card["mac"] = bind_to_secret(_unbound(card))
        except (ValueError, ImportError) as error:
            card["wrong"] = str(error)  # raised on all workers
        try:
            dist.all_gather_object(cards, card, group=group)
        except RuntimeError as error:
            if ONE_GPU in str(error).lower():
                raise RuntimeError(SHARED_GPU) from error
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
        return bytes.fromhex(bind_to_secret(self.token.hex())) or self.token

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

    def close(self) -> None:
        """The store is not asked any more."""
        if "_client" in vars(self):
            self._client.close()

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
        common["mac"] = bind_to_secret(_unbound(common))
        own = json.dumps(self.addresses[self.rank])
        return {"run": json.dumps(common), address_key(self.rank, self.incarnation): own, **dict([self._key_record])}

    @property
    def local(self) -> frozenset[int]:
        """The other workers on this one's network stack."""
        return frozenset(i for i, name in enumerate(self.node_of) if name == self.node and i != self.rank)

    def nccl_communicator(self, name: str, ranks: Sequence[int], timeout: timedelta) -> Communicator:
        """An NCCL communicator of ``ranks`` on the current CUDA device; called by its members alone."""
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        store = PrefixStore(name, self.store)
        return dist.ProcessGroupNCCL(store, list(ranks).index(self.rank), len(ranks), options)


def bind_to_secret(text: str) -> str:
    """Proves that this worker knows the user's secret; empty without one. Raises ValueError as ``run_secret`` does."""
    secret = run_secret()
    return hmac.digest(secret, b"decent_dp run " + text.encode(), "sha256").hex() if secret else ""


def run_secret() -> bytes:
    """The secret in DECENT_DP_SECRET, or in the file that DECENT_DP_SECRET_FILE names.

    Raises:
        ValueError: the file cannot be read, or is empty.
    """
    name = os.environ.get("DECENT_DP_SECRET_FILE", "")
    if not name:
        return os.environ.get("DECENT_DP_SECRET", "").encode()
    try:
        with open(name, "rb") as file:
            text = file.read().strip()
    except OSError as error:
        raise ValueError(f"DECENT_DP_SECRET_FILE={name} cannot be read: {error.strerror}") from error
    if not text:
        raise ValueError(f"DECENT_DP_SECRET_FILE={name} is empty: write a long random text to it")
    return text


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
    return _are_equal(str(entry.get("mac", "")), bind_to_secret(_unbound(entry)))


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
