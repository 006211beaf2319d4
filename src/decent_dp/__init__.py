"""Decentralized data-parallel training for PyTorch."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from decent_dp.errors import (
    CheckpointError,
    DisagreementError,
    NonFiniteError,
    OutOfStepError,
    PeerError,
    PeerLostError,
    PeerTimeoutError,
    WireError,
)

# Here rather than at the first call that Windows does not have, in the middle of a run.
if sys.platform == "win32":
    raise ImportError("decent_dp runs on Linux and macOS, and not on Windows: use it in WSL 2, the Windows Subsystem for Linux")

if TYPE_CHECKING:
    from decent_dp._gossip import Gossip, gossip
    from decent_dp.checkpoint import (
        AveragedReplica,
        Preemption,
        Saving,
        calibrate,
        export,
        latest,
        load,
        read_parameters,
        save,
    )
    from decent_dp.data import RosterSampler
    from decent_dp.ddp import DecentralizedDataParallel, Stats
    from decent_dp.faults import Tolerate
    from decent_dp.launch import initialize_dist
    from decent_dp.membership import join
    from decent_dp.optim import AccumAdam, AccumAdamW, GossipAdamW
    from decent_dp.rules import GASLoC, MomentumTracking, OuterNesterov, Rule
    from decent_dp.topo import Edge, Topology, TopologyReg

__version__ = "1.0.0rc1"

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "AveragedReplica",
    "CheckpointError",
    "DecentralizedDataParallel",
    "DisagreementError",
    "Edge",
    "GASLoC",
    "Gossip",
    "GossipAdamW",
    "MomentumTracking",
    "NonFiniteError",
    "OutOfStepError",
    "OuterNesterov",
    "PeerError",
    "PeerLostError",
    "PeerTimeoutError",
    "Preemption",
    "RosterSampler",
    "Rule",
    "Saving",
    "Stats",
    "Tolerate",
    "Topology",
    "TopologyReg",
    "WireError",
    "calibrate",
    "export",
    "gossip",
    "initialize_dist",
    "join",
    "latest",
    "load",
    "read_parameters",
    "save",
]

# All other names are imported at first use (PEP 562), so that topologies do not have to wait for torch.
_NAMES = {
    "_gossip": ("Gossip", "gossip"),
    "checkpoint": (
        "AveragedReplica",
        "Preemption",
        "Saving",
        "calibrate",
        "export",
        "latest",
        "load",
        "read_parameters",
        "save",
    ),
    "data": ("RosterSampler",),
    "ddp": ("DecentralizedDataParallel", "Stats"),
    "faults": ("Tolerate",),
    "launch": ("initialize_dist",),
    "membership": ("join",),
    "optim": ("AccumAdam", "AccumAdamW", "GossipAdamW"),
    "rules": ("GASLoC", "MomentumTracking", "OuterNesterov", "Rule"),
    "topo": ("Edge", "Topology", "TopologyReg"),
}
_HOMES = {name: f"decent_dp.{home}" for home, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _NAMES and not name.startswith("_"):
        return importlib.import_module(f"decent_dp.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
