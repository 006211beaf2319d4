"""From arguments to replicas that are connected and equal: the same on all workers, or the same error on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from decent_dp.replica.averages import broadcast_
from decent_dp.replica.consistency import agree_on_signature, model_signature
from decent_dp.replica.settings import Settings
from decent_dp.replica.shutdown import given_back_on_error
from decent_dp.rules import Rule, settings_of
from decent_dp.topo import Topology, make_topology
from decent_dp.transport import Transport

__all__ = ["Agreed", "connect_replicas"]

# Rounds of a period whose groups are connected at construction; a topology without a period connects as it goes.
_PREPARED_ROUNDS = 64

# What one worker was given, once checked: the settings, the topology (a name or an object), the rule, workers per node, and
# what else all must have alike, as JSON can hold it.
Checked = tuple[Settings, "str | Topology", Rule, int, dict[str, Any]]
Agreed = tuple[Settings, Topology, Rule]


def connect_replicas(model: nn.Module, transport: Transport, ours: bool, check: Callable[[], Checked]) -> Agreed:
    """All workers check their arguments and compare them; then parameters and buffers become those of rank 0.

    Args:
        transport: connected already.
        ours: the transport is closed if this fails.
        check: raises ValueError or TypeError for an argument that is wrong.

    Raises:
        ValueError, TypeError: as ``check``, or the workers were given different things; the same error on all workers.
    """

    def attempt() -> tuple[Agreed, dict[str, Any]]:
        settings, topology, rule, local, more = check()
        made = make_topology(
            topology,
            local_world_size=local,
            world_size=transport.world_size,
            rank=transport.rank,
        )
        # Called on the class: what a subclass sets on itself may have any name.
        Topology.every(made, settings.mix_every)
        shared: Mapping[str, Any] = {
            "model": model_signature(model),
            "topology": made.fingerprint(),
            "settings": {**settings.signature(), "rule": settings_of(rule), **more},
        }
        return (settings, made, rule), dict(shared)

    with given_back_on_error(transport, ours), torch.no_grad():
        settings, topology, rule = agree_on_signature(transport.control, transport.rank, attempt)
        broadcast_(transport.control, [*model.parameters(), *model.buffers()])
        transport.prepare(Topology.every(topology, settings.mix_every)._edges_ahead(_PREPARED_ROUNDS))
        transport.control.gather(None)  # a worker that leaves at once must not be gone before all have found it
    return settings, topology, rule
