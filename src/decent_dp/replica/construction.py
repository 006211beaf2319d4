"""Construction of connected, equal replicas from the users' arguments."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import nn

from decent_dp._checks import check_bool, check_integer, check_number
from decent_dp.compression import check_compression
from decent_dp.engine import fit_rule
from decent_dp.faults import Tolerate, most_workers
from decent_dp.membership import Epochs, EpochStore, Members, MembershipMonitor
from decent_dp.membership.runs import register
from decent_dp.replica.assignment import assign_replicas
from decent_dp.replica.averages import broadcast_, control_of_part
from decent_dp.replica.consistency import call_on_all, check_consistency, compare, model_signature
from decent_dp.replica.shards import is_sharded, local
from decent_dp.replica.shares import Shares
from decent_dp.rules import Rule
from decent_dp.rules.rule import rule_settings
from decent_dp.topo import Edge, Topology, TopologyReg, make_topology, schedule
from decent_dp.topo.epoch_topology import EpochTopology
from decent_dp.topo.registry import why_unfit
from decent_dp.transport import InProcessTransport, NewcomerTransport, Peers, Replicas, Transport

__all__ = ["Agreement", "Arguments", "Settings", "connect_replicas", "workers_per_node"]

_log = logging.getLogger(__name__)

# Rounds whose edges are connected at construction. Later ones connect at their first exchange.
_PREPARED_ROUNDS = 64


@dataclass(frozen=True)
class Settings:
    """Settings that must be equal on all workers. Raises ValueError or TypeError that names the argument and its value."""

    bucket_size_in_mb: float
    overlap: bool
    scaled: bool
    compression: str | None
    mix_every: int
    grad_clip_norm: float = 0.0
    sync_buffer_in_global_avg: bool = True

    def __post_init__(self) -> None:
        check_number("grad_clip_norm", self.grad_clip_norm, "0.0 (no clipping) or a positive norm", at_least=0.0)
        check_number(
            "bucket_size_in_mb", self.bucket_size_in_mb, "a number of MiB, or 0 (one bucket per parameter)", at_least=0.0
        )
        check_bool("overlap", self.overlap)
        check_integer("mix_every", self.mix_every, 1, "updates")
        check_compression(self.compression)

    def signature(self) -> dict[str, Any]:
        plain = {k: v if isinstance(v, (bool, str, NoneType)) else float(v) for k, v in asdict(self).items()}
        return {**plain, "mix_every": int(self.mix_every)}


@dataclass(frozen=True)
class Arguments:
    """The checked arguments of one worker.

    Attributes:
        local_world_size: workers per node.
        more: further settings (JSON) that must be equal on all workers.
        mesh: the workers that hold this replica (``describe_mesh``); None if this worker holds all of it.
        options: of the optimizers, as far as they exist.
        faults: how faults are tolerated; None: they are errors.
        weight: of this worker in the mean; None: as that of all others.
    """

    settings: Settings
    topology: str | Topology
    rule: Rule
    local_world_size: int
    more: Mapping[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    faults: Tolerate | None = None
    weight: float | None = None


@dataclass(frozen=True)
class Agreement:
    """The result of the consistency check, equal on all workers. The topology includes ``mix_every`` and the weights.

    Attributes:
        topology: its ranks are numbers of replicas.
        replicas: the workers of each replica.
        peers: connects the workers that hold the same part of each replica; its ranks are numbers of replicas.
        monitor: who takes part.
        weights: of the replica of this worker, and of this worker; None for equal ones.
    """

    settings: Settings
    topology: Topology
    rule: Rule
    replicas: Replicas
    peers: Peers
    monitor: Members
    weights: tuple[float, float] | None = None
    shares: Shares | None = None


def connect_replicas(model: nn.Module, transport: Transport, owned: bool, check: Callable[[], Arguments]) -> Agreement:
    """Checks the arguments of all workers, compares them, and broadcasts parameters and buffers from rank 0 (of sharded
    tensors, from the worker at the same position of the first replica).

    Args:
        owned: whether the transport is of this replica alone, which trains in this process.
        check: returns the arguments.

    Raises:
        ValueError, TypeError: from ``check``, or arguments differ between workers; the same error on all workers.
    """

    def attempt() -> tuple[tuple[Agreement, EpochStore | None], dict[str, Any]]:
        is_node = replicas.shards > 1 and "of" in (given.mesh or ())
        local_world_size = 1 if is_node else replicas.peers_on_node(transport.rank, given.local_world_size)
        made = _topology_of_replicas(given.topology, local_world_size, peers, replicas)
        narrow = any(param.itemsize < 4 for param in model.parameters())
        if given.faults is not None:
            made = _tolerant(made, given, local_world_size, peers.rank, replicas.shards, narrow=narrow)
        # Called on the class, because a subclass may have an attribute named `every`.
        mixing, own = _weighted(Topology.every(made, given.settings.mix_every), weights, given, replicas, transport.rank)
        rule = _fitted(given, mixing, narrow=narrow)
        faults = None if given.faults is None else given.faults.signature()
        shared: dict[str, Any] = {
            "model": model_signature(model),
            "topology": made.fingerprint(),
            "settings": {
                **given.settings.signature(),
                "rule": rule_settings(given.rule),
                **given.more,
                "faults": faults,
                "weight": weights,
                "workers of each replica": replicas.workers,
            },
            "optimizers": given.options,
        }
        if isinstance(transport, NewcomerTransport):
            compare(transport.signature, json.loads(json.dumps(shared)), transport.rank)
        store = _open_store(transport, mixing, given.faults, shared)
        return (Agreement(given.settings, mixing, rule, replicas, peers, Members(transport, replicas), own), store), shared

    def check_all() -> Arguments:
        checked = check()
        _refuse_wrong_device(model, transport)
        if joins and checked.faults is None:
            raise ValueError("a process that joins a run needs faults=decent_dp.Tolerate(...), as on the other workers.")
        return checked

    joins = isinstance(transport, NewcomerTransport)
    with torch.no_grad():
        given = call_on_all(transport.control, check_all)
        if isinstance(transport, NewcomerTransport):
            replicas, weights = _replicas_of_run(transport, given.mesh), _weights_of_run(transport, given.weight)
        else:
            meshes, found = zip(*transport.control.gather([given.mesh, given.weight]), strict=True)
            replicas, weights = assign_replicas(meshes, transport.rank), _agree_on_weights(found)
        peers = _peers_of(transport, replicas, given.faults)
        agreed, store = check_consistency(transport.control, transport.rank, attempt)
        neighbours = None if given.faults is None else transport.tolerate(given.faults)
        tensors = [*model.parameters(), *model.buffers()]
        part = control_of_part(transport.control, replicas, transport.rank)
        broadcast_(part, list(map(local, filter(is_sharded, tensors))))
        broadcast_(transport.control, [tensor for tensor in tensors if not is_sharded(tensor)])
        peers.prepare(schedule.edges_ahead(agreed.topology, _PREPARED_ROUNDS))
        if replicas.shards > 1:
            transport.prepare([Edge(list(replicas.workers_of(peers.rank)), 1.0)])  # they look at each other
        # This gather comes last, so that a worker that exits right away is still there for all collectives before it.
        gpus = transport.control.gather(gpus_of(model) if owned else [])
        _warn_of_shared_gpus(gpus, transport.control.ranks.index(transport.rank))
    if neighbours is None or given.faults is None:
        return agreed
    epochs = None
    if isinstance(agreed.topology, EpochTopology) and store is not None:
        incarnation = transport.incarnation if isinstance(transport, NewcomerTransport) else 0
        epochs = Epochs(transport.rank, replicas, neighbours, agreed.topology, store, incarnation)
    return replace(agreed, monitor=MembershipMonitor(transport, neighbours, given.faults, replicas, epochs))


def _open_store(
    transport: Transport, topology: Topology, faults: Tolerate | None, signature: Mapping[str, Any]
) -> EpochStore | None:
    """What the run keeps in its store, if processes can join it. Worker 0 registers a run that begins, if none of its name
    lives."""
    if faults is None or not isinstance(topology, EpochTopology):
        return None
    records = {**transport.records, "signature": json.dumps(signature)}
    epochs = EpochStore(transport.store, transport.run_id, records, faults.run)
    if transport.rank == 0 and not isinstance(transport, NewcomerTransport):
        register(epochs)
    return epochs


def _tolerant(made: Topology, given: Arguments, local_world_size: int, rank: int, shards: int, *, narrow: bool) -> Topology:
    """The topology ``made``, such that it can be rebuilt for other numbers of replicas.

    Raises:
        ValueError: faults cannot be tolerated with it or with the rule, or the rule does not work with as many replicas as
            one or two deaths leave, or may come.
    """
    schedule.check_pairs(made, "faults=Tolerate(...)")
    n, most = made.world_size, most_workers(given.faults) // shards
    if not isinstance(given.topology, str) or given.topology not in TopologyReg.registry:
        if most > n:
            raise ValueError(
                f"faults=Tolerate(max_workers={most}) with {n} workers needs a topology that can be rebuilt for "
                f"more: give it by name, such as 'base-2', instead of {made!r}."
            )
        return made
    make = partial(_for_members, given.topology, local_world_size)
    for count in sorted({n - 2, n - 1, most} & set(range(2, max(n, most + 1)))):
        topology = Topology.every(make(count), given.settings.mix_every)
        try:
            _fitted(given, topology, narrow=narrow)
        except ValueError as error:
            raise ValueError(f"with {count} workers, which faults={given.faults} allows: {error}") from error
    return EpochTopology(make, world_size=max(n, most), rank=rank, members=n)


def _fitted(given: Arguments, topology: Topology, *, narrow: bool) -> Rule:
    kind, overlap = check_compression(given.settings.compression), given.settings.overlap
    return fit_rule(given.rule, kind, topology, narrow=narrow, overlap=overlap)


def _for_members(name: str, local_world_size: int, count: int) -> Topology:
    """The topology of so many workers: the one of this name if it fits and is of pairs, or 'base-2', which always is."""
    local_world_size = min(local_world_size, count)
    if why_unfit(name, count, local_world_size) is None:
        made = make_topology(name, local_world_size=local_world_size, world_size=count, rank=0)
        if schedule.largest_group(made) <= 2:
            return made
    return make_topology("base-2", local_world_size=local_world_size, world_size=count, rank=0)


def _topology_of_replicas(topology: str | Topology, local_world_size: int, peers: Peers, replicas: Replicas) -> Topology:
    # A process that joins may have a rank beyond those that began the run.
    rank = min(peers.rank, peers.world_size - 1)
    try:
        return make_topology(topology, local_world_size=local_world_size, world_size=peers.world_size, rank=rank)
    except ValueError as error:
        if replicas.shards == 1:
            raise
        numbers = f"{peers.world_size}, of {replicas.shards} workers each"
        raise ValueError(f"{error} (A topology counts replicas, and there are {numbers}.)") from error


def _peers_of(transport: Transport, replicas: Replicas, faults: Tolerate | None) -> Peers:
    """Connects the workers that hold the same part of each replica, also of those that may come."""
    if replicas.shards > 1 and isinstance(transport, InProcessTransport):
        raise TypeError("an InProcessTransport connects whole replicas, and shards lie on processes: leave transport= out.")
    (own, position), began = replicas.place_of(transport.rank), len(replicas.workers)
    count = max(began, own + 1, most_workers(faults) // replicas.shards)  # settings are compared later
    return Peers(transport, [replicas.workers_of(number)[position] for number in range(count)], began)


def _replicas_of_run(transport: NewcomerTransport, mesh: Mapping[str, Any] | None) -> Replicas:
    """The replicas of the run that this process joins, into which its own ``mesh`` (``describe_mesh``) has to fit."""
    replicas = Replicas(tuple(map(tuple, transport.signature["settings"]["workers of each replica"])))
    if mesh is not None and mesh.get("of") == "auto" and replicas.shards == 1:
        mesh = None
    is_node = mesh is not None and "of" in mesh
    shards = 1 if mesh is None else mesh["on_node"] if is_node else len(mesh["ranks"])
    if shards != replicas.shards:
        how = f"there are {shards} on this node" if is_node else f"this process would be one of {shards}"
        raise ValueError(
            f"a replica of this run has {replicas.shards} workers, and {how}: start as many processes together"
            f"{'' if is_node else ', and call gossip() as in the run, with the same replica=, or fully_shard over them'}."
        )
    number, position = replicas.place_of(transport.rank)
    own = 0 if mesh is None else position if is_node else mesh["ranks"].index(mesh["rank"])
    if own != position:
        raise ValueError(
            f"worker {transport.rank} of this run has part {position} of replica {number}, and this process has part {own} of "
            f"its mesh: replica {number} is the workers {list(replicas.workers_of(number))}, in the order of the mesh. Give "
            "each process the rank of its part (decent_dp.join(rank=...))."
        )
    return replicas


def _agree_on_weights(found: Sequence[float | None]) -> list[float]:
    """The weights of all workers, by rank; empty if none has one. Not only some may have one."""
    given = [weight for weight in found if weight is not None]
    if 0 < len(given) < len(found):
        missing = ", ".join(str(rank) for rank, weight in enumerate(found) if weight is None)
        raise ValueError(
            f"weight was given on some workers, and not on others ({missing}): give the samples, or tokens, of a step of this "
            "worker on each of them, or on none."
        )
    return given


def _weights_of_run(transport: NewcomerTransport, own: float | None) -> list[float]:
    """Those of the run that this process joins, with the weight of the worker in whose place it comes."""
    weights: list[float] = transport.signature["settings"]["weight"]
    rank = min(transport.rank, len(weights) - 1)  # only where all are equal can there be more workers than began the run
    if own != (wanted := weights[rank] if weights else None):
        raise ValueError(f"worker {transport.rank} of this run has weight={wanted}, and this process has {own}: give the same.")
    return weights


def _weighted(
    topology: Topology, weights: Sequence[float], given: Arguments, replicas: Replicas, rank: int
) -> tuple[Topology, tuple[float, float] | None]:
    """The topology with the weights of the replicas, and ``Agreement.weights``; equal weights change nothing."""
    if len(set(weights)) < 2:
        return topology, None
    if most_workers(given.faults) > len(weights):
        raise ValueError("weight does not go with max_workers of faults: those of workers to come are not known.")
    shares = [weight / sum(weights) for weight in weights]
    of_replicas = [sum(shares[other] for other in ranks) for ranks in replicas.workers]
    return schedule.weigh(topology, of_replicas), (of_replicas[replicas.place_of(rank)[0]], shares[rank])


def workers_per_node(name: str, given: Any) -> int:
    """Returns the value of the argument ``name`` if given, else the launcher's ``LOCAL_WORLD_SIZE``, else 1."""
    source, value = name, given
    if value is None:
        source, value = "the environment variable LOCAL_WORLD_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1")
    try:
        number = 0 if isinstance(value, (bool, float)) else int(value)
    except (TypeError, ValueError):
        number = 0
    if number < 1:
        raise ValueError(f"{source} must be a whole number of workers per node, at least 1, got {value!r}")
    return number


# -- devices -----------------------------------------------------------------------------------------------------------------


def _refuse_wrong_device(model: nn.Module, transport: Transport) -> None:
    """Raises ValueError for a model on the CPU and a process group of NCCL, which is for GPUs.

    It would train, on the CPU: exchanges need no process group. The mistake is a missing ``.to("cuda")``.
    """
    # FSDP keeps shards on the CPU if it is told to.
    on_cpu = all(param.device.type == "cpu" and not is_sharded(param) for param in model.parameters())
    if transport.only_cuda and on_cpu:
        raise ValueError(
            "the model is on the CPU, and the process group's backend is NCCL, which is for GPUs: move the model before this "
            "call, with model.to('cuda') after initialize_dist() or torch.cuda.set_device(LOCAL_RANK). To train on the CPU, "
            "make the process group with backend='gloo'."
        )


def gpus_of(model: nn.Module) -> list[str]:
    """Returns the ids of the GPUs that parameters are on: the same in all processes, whatever is visible to each."""
    devices = {param.device for param in model.parameters() if param.device.type == "cuda"}
    return sorted({str(torch.cuda.get_device_properties(device).uuid) for device in devices})


def _warn_of_shared_gpus(gpus: Sequence[Sequence[str]], rank: int) -> None:
    """Logs a warning for a GPU that several workers have their models on, on the first of these workers."""
    for gpu in gpus[rank]:
        ranks = [other for other, own in enumerate(gpus) if gpu in own]
        if ranks[0] == rank < ranks[-1]:
            _log.warning(
                "the models of workers %s are on one GPU, whose memory and time they share. If each has a GPU of its own, move "
                "the model to it: model.to('cuda') after initialize_dist(), not 'cuda:0'.",
                ", ".join(map(str, ranks)),
            )
