"""What the workers of one wrapper have in common, in the store of their process group under a prefix of its own.

Its name is drawn by rank 0, which shares it over the process group.
"""

from __future__ import annotations

import functools
import hmac
import ipaddress
import json
import math
import os
import secrets
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from decent_dp.errors import DisagreementError
from decent_dp.faults import Tolerate, most_workers
from decent_dp.transport.messages import VERSION
from decent_dp.transport.peer_errors import ONE_GPU, SHARED_GPU
from decent_dp.transport.sockets import Curve
from decent_dp.transport.store import ROOT, UNREADABLE, StoreClient, read_bytes, read_text, warn_of_unreadable, whole_store
from decent_dp.transport.torch_groups import timeout_of

# Environment variables, the first that is set counts.
_INTERFACES = ("DECENT_DP_INTERFACE", "GLOO_SOCKET_IFNAME")
# The key, below ROOT, of the list of runs.
RUNS = "runs"

__all__ = [
    "ROOT",
    "RUNS",
    "Rendezvous",
    "RunRecord",
    "address_key",
    "named_interface",
    "network_stack",
    "read_address",
]


@dataclass(frozen=True)
class RunRecord:
    """What all workers of a run have in common. It is in the store for those that join.

    Attributes:
        token: with which workers prove that they are of this run, unless the user gives a secret.
        world_size: the number of workers that began the run. ``places``: of ranks, with those of workers that may come.
        node_of: the name of the network stack of each worker that began; workers of one name share a loopback interface.
        timeout: the process group's, in seconds.
        dead_after: of ``Tolerate``; None: faults are errors.
        encrypt: whether connections are encrypted; None: those that leave a node.
        mac: proves that it was written by a worker that knows the user's secret.
    """

    token: bytes = field(repr=False)
    world_size: int
    places: int
    node_of: tuple[str, ...]
    timeout: float
    dead_after: float | None = None
    encrypt: bool | None = None
    mac: str = ""

    def _entries(self) -> dict[str, Any]:
        return {**asdict(self), "token": self.token.hex()}

    def write(self) -> str:
        return json.dumps({**self._entries(), "mac": bind_to_secret(_unbound(self._entries()))})

    @classmethod
    def read(cls, said: Any) -> RunRecord:
        """Of the JSON in the store. Raises one of ``UNREADABLE`` if it is nothing that ``write`` returns."""
        entries = {name: said[name] for name in cls.__dataclass_fields__ if name != "mac"}
        entries |= {"token": bytes.fromhex(said["token"]), "node_of": tuple(said["node_of"])}
        made = cls(**entries, mac=str(said.get("mac", "")))
        is_whole = type(made.world_size) is type(made.places) is int and 1 <= made.world_size <= made.places
        is_whole &= len(made.node_of) == made.world_size and all(isinstance(node, str) for node in made.node_of)
        is_whole &= 0 < made.timeout < math.inf and 0.5 <= said["dead_after"] < math.inf
        if not is_whole or made.encrypt not in (None, False, True):
            raise ValueError("no record of a run")
        return made

    @property
    def is_of_secret(self) -> bool:
        """Whether it is of a worker that knows this one's secret."""
        return _are_equal(self.mac, bind_to_secret(_unbound(self._entries())))


@dataclass(frozen=True)
class Rendezvous:
    """With what a worker meets the others of its run.

    Attributes:
        store: the process group's store, under a prefix of this run's own.
        run_id: the name of the run, the same on all its workers. ``run``: what else they have in common.
        rank: in the process group.
        node: the name of this worker's network stack. In ``run.node_of`` may be that of a process before it.
        nccl: the process group moves CUDA tensors by NCCL.
        incarnation: how many processes had joined the run before this one, itself included; 0 for those that began it.
        keys: the public keys of the workers that began the run, as far as they are known. ``curve``: this worker's keys.
        addresses: of workers, as far as they were looked up.
    """

    store: Store
    run_id: str
    run: RunRecord
    rank: int
    node: str
    nccl: bool = False
    incarnation: int = 0
    keys: frozenset[bytes] = frozenset()
    curve: Curve = field(default_factory=Curve.create, repr=False)
    addresses: dict[int, dict[str, Any]] = field(default_factory=dict)

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
            card["mac"] = bind_to_secret(_unbound(card))
        except ValueError as error:
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
        run = RunRecord(
            bytes.fromhex(cards[0]["token"]),
            world_size,
            max(world_size, most_workers(faults)),
            node_of,
            timeout_of(group).total_seconds(),
            None if faults is None else faults.dead_after,
            encrypt,
        )
        nccl, keys = "nccl" in str(dist.get_backend(group)), frozenset(bytes.fromhex(card["key"]) for card in cards)
        return cls(store, cards[0]["name"], run, rank, node_of[rank], nccl, 0, keys, curve)

    @functools.cached_property
    def proof(self) -> bytes:
        """The secret with which workers prove that they are of this run: the token, and the user's secret if there is one."""
        return bytes.fromhex(bind_to_secret(self.run.token.hex())) or self.run.token

    def _bind(self, text: str) -> str:
        """Binds what is in the store to the run's secret."""
        return hmac.digest(self.proof, b"decent_dp store " + text.encode(), "sha256").hex()

    def publish(self, address: dict[str, Any]) -> None:
        """Stores where this worker listens, and its public key."""
        address["rank"] = self.rank
        address["mac"] = self._bind(_unbound(address))
        self.addresses[self.rank] = address
        for key, text in self._published().items():
            self.store.set(key, text)

    def _published(self) -> dict[str, str]:
        own, key = self.addresses[self.rank], self.curve.public.hex()
        return {address_key(self.rank, self.incarnation): json.dumps(own), f"key/{key}": self._bind(key)}

    def records(self) -> dict[str, str]:
        """``Transport.records``."""
        return {"run": self.run.write(), **self._published()}

    def knows(self, key: bytes, seconds: float) -> bool:
        """Whether the store has this public key of a worker. Raises OSError if it does not answer."""
        found = self.client.run(lambda store: read_text(store, f"{self.run_id}/key/{key.hex()}"), seconds)
        return _are_equal(found or "", self._bind(key.hex()))

    @functools.cached_property
    def client(self) -> StoreClient:
        """Of the store. Its keys begin with the name of a run."""
        return StoreClient(self.store, ROOT)

    def address_of(self, rank: int, incarnation: int, seconds: float) -> dict[str, Any]:
        """Of the process of this incarnation; looked up in the store if it is not known.

        Raises:
            OSError: the store does not answer.
            RuntimeError: the process has stored no address, or something else has.
        """
        address = self.addresses.get(rank)
        if address is not None and address["incarnation"] == incarnation:
            return address
        key = f"{self.run_id}/{address_key(rank, incarnation)}"
        value = self.client.run(lambda store: read_bytes(store, key), seconds)
        if not value:  # b"": it has left
            raise RuntimeError(f"worker {rank} has stored no address")
        return self.keep_address(rank, incarnation, value)

    def keep_address(self, rank: int, incarnation: int, value: str | bytes) -> dict[str, Any]:
        """The address that a process of this incarnation has said. Raises RuntimeError if it is none."""
        try:
            address = read_address(json.loads(value))
            if address["incarnation"] != incarnation:
                raise ValueError("the address of another process")
        except UNREADABLE:
            key = f"{self.run_id}/{address_key(rank, incarnation)}"
            warn_of_unreadable(key, f"no connection to worker {rank} is made until it is there again")
            found = f"the store has something else under '{ROOT}/{key}' than the address of worker {rank}"
            raise RuntimeError(found) from None
        if address.get("rank") != rank or not _are_equal(str(address.get("mac")), self._bind(_unbound(address))):
            raise RuntimeError(
                f"the address of worker {rank} in the store was not written by a worker of this run: see who else writes to "
                "it, and that DECENT_DP_SECRET is the same on all workers"
            )
        self.addresses[rank] = address
        return address

    @property
    def local(self) -> frozenset[int]:
        """The other workers on this one's network stack."""
        return frozenset(i for i, name in enumerate(self.run.node_of) if name == self.node and i != self.rank)


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
    if not all(
        card["rank"] == rank and _are_equal(card["mac"], bind_to_secret(_unbound(card))) for rank, card in enumerate(cards)
    ):
        raise DisagreementError("DECENT_DP_SECRET (or the file of DECENT_DP_SECRET_FILE) is not the same on all workers")


def _are_equal(found: str, due: str) -> bool:
    return hmac.compare_digest(found.encode(errors="replace"), due.encode())


def _unbound(entry: Mapping[str, Any]) -> str:
    return json.dumps({name: value for name, value in entry.items() if name != "mac"}, sort_keys=True)


def read_address(said: Any) -> dict[str, Any]:
    """Of the JSON in the store, what ``listen`` has published. Raises one of ``UNREADABLE`` if it is something else."""
    host, local = said.get("host"), said.get("local")
    # A process number of 0 or below would be a group of processes.
    numbers = said["incarnation"], said["pid"]
    is_whole = isinstance(said["node"], str) and all(type(n) is int for n in numbers) and said["pid"] > 0
    if host is not None:
        is_whole &= bool(ipaddress.ip_address(str(host))) and _is_port(said["port"]) and _is_port(said["bulk"])
    if local is not None:
        is_whole &= bool(local.encode())
    if not (is_whole and (host or local) and len(bytes.fromhex(said.get("key", ""))) in (0, 32)):
        raise ValueError("no address")
    return {**said, "machine": str(said["machine"])}


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
