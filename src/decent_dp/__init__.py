"""Decentralized data-parallel training for PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decent_dp._gossip import Gossip, gossip
    from decent_dp.ddp import DecentralizedDataParallel
    from decent_dp.launch import initialize_dist
    from decent_dp.optim import AccumAdam, AccumAdamW
    from decent_dp.topo import Edge, Topology, TopologyReg

__version__ = "1.0.0.dev0"

__all__ = [
    "AccumAdam",
    "AccumAdamW",
    "DecentralizedDataParallel",
    "Edge",
    "Gossip",
    "Topology",
    "TopologyReg",
    "gossip",
    "initialize_dist",
]

# Loaded when they are first asked for (PEP 562): topologies must not wait for torch.
_HOMES = {
    "AccumAdam": "decent_dp.optim",
    "AccumAdamW": "decent_dp.optim",
    "DecentralizedDataParallel": "decent_dp.ddp",
    "Edge": "decent_dp.topo",
    "Gossip": "decent_dp._gossip",
    "Topology": "decent_dp.topo",
    "TopologyReg": "decent_dp.topo",
    "gossip": "decent_dp._gossip",
    "initialize_dist": "decent_dp.launch",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
