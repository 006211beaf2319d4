"""From arguments to replicas that are connected and equal: the same on all workers, or the same error on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from decent_dp.replica.averages import broadcast_
from decent_dp.replica.consistency import agree, agree_on_signature, model_signature
from decent_dp.replica.options import Options, warn_of_rates
from decent_dp.replica.settings import Settings
from decent_dp.replica.shards import Replicas, is_sharded, local
from decent_dp.replica.shutdown import given_back_on_error
from decent_dp.rules import Rule, rule_settings
from decent_dp.topo import Topology, make_topology
from decent_dp.transport import Transport

__all__ = ["Agreed", "Arguments", "connect_replicas"]

# Rounds of a period whose groups are connected at construction; a topology without a period connects as it goes.
_PREPARED_ROUNDS = 64


@dataclass(frozen=True)
class Arguments:
    """What one worker was given, once checked.

    Attributes:
        local_world_size: workers per node.
        more: in what else the workers must be alike, as JSON can hold it.
        card: on which workers this replica lies (``mesh_card``); None where it is whole on this one.
        options: of the optimizers that there are.
    """

    settings: Settings
    topology: str | Topology
    rule: Rule
    local_world_size: int
    more: Mapping[str, Any] = field(default_factory=dict)
    card: dict[str, Any] | None = None
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Agreed:
    """On what all workers agreed; ``mix_every`` of the settings is a part of the topology.

    Attributes:
        topology: of replicas, by their numbers.
        replicas: the workers of each.
        peers: connects this worker with those that hold the same part of other replicas; ranks in it are the replicas' numbers.
    """

    settings: Settings
    topology: Topology
    rule: Rule
    replicas: Replicas
    peers: Transport


def connect_replicas(model: nn.Module, transport: Transport, ours: bool, check: Callable[[], Arguments]) -> Agreed:
    """All workers check their arguments and compare them; then parameters and buffers become those of rank 0, and of a sharded
    replica those of the worker of the first replica at the same position.

    Args:
        transport: connected already.
        ours: the transport is closed if this fails.
        check: raises ValueError or TypeError for an argument that is wrong.

    Raises:
        ValueError, TypeError: as ``check``, or the workers were given different things; the same error on all workers.
    """

    def attempt() -> tuple[Agreed, dict[str, Any]]:
        try:
            made = make_topology(
                given.topology,
                local_world_size=replicas.peers_on_node(transport.rank, given.local_world_size),
                world_size=peers.world_size,
                rank=peers.rank,
            )
        except ValueError as error:
            if replicas.shards == 1:
                raise
            numbers = f"{peers.world_size}, of {replicas.shards} workers each"
            raise ValueError(f"{error} (A topology is of replicas. Here are {numbers}.)") from error
        # Called on the class: what a subclass sets on itself may have any name.
        mixing = Topology.every(made, given.settings.mix_every)
        shared: Mapping[str, Any] = {
            "model": model_signature(model),
            "topology": made.fingerprint(),
            "settings": {**given.settings.signature(), "rule": rule_settings(given.rule), **given.more},
            "optimizers": given.options.alike,
        }
        return Agreed(given.settings, mixing, given.rule, replicas, peers), dict(shared)

    with given_back_on_error(transport, ours), torch.no_grad():
        given = agree(transport.control, check)
        replicas = Replicas.of(transport.control.gather(given.card))
        peers = transport if replicas.shards == 1 else transport.among(replicas.peers_of(transport.rank))
        agreed = agree_on_signature(transport.control, transport.rank, attempt)
        tensors = [*model.parameters(), *model.buffers()]
        broadcast_(peers.control, [local(tensor) for tensor in tensors if is_sharded(tensor)])
        broadcast_(transport.control, [tensor for tensor in tensors if not is_sharded(tensor)])
        peers.prepare(agreed.topology._edges_ahead(_PREPARED_ROUNDS))
        # The last to be gathered: a worker that leaves at once must not be gone before all have found it.
        warn_of_rates(transport.control.gather(given.options.rates))
    return agreed
