"""How bytes move: one contract (``interface``), and its implementations."""

from __future__ import annotations

from decent_dp.transport.collectives import Collectives
from decent_dp.transport.in_process import InProcessTransport, LocalHub, run_replicas
from decent_dp.transport.interface import ExchangeRequest, Handle, Transport
from decent_dp.transport.neighbours import Neighbours, PeerTable, Seen
from decent_dp.transport.peer_errors import is_of_network
from decent_dp.transport.peers import Peers, Replicas
from decent_dp.transport.process_group import (
    NewcomerTransport,
    ProcessGroupTransport,
    check_encrypt,
    check_transport,
    open_transport,
)
from decent_dp.transport.rendezvous import network_stack
from decent_dp.transport.torch_groups import NodeGroup, gather_in_mesh, group_of_replicas, inside_ddp, ranks_in
from decent_dp.transport.votes import ExchangeId, Verdict

__all__ = [
    "Collectives",
    "ExchangeId",
    "ExchangeRequest",
    "Handle",
    "InProcessTransport",
    "LocalHub",
    "Neighbours",
    "NewcomerTransport",
    "NodeGroup",
    "PeerTable",
    "Peers",
    "ProcessGroupTransport",
    "Replicas",
    "Seen",
    "Transport",
    "Verdict",
    "check_encrypt",
    "check_transport",
    "gather_in_mesh",
    "group_of_replicas",
    "inside_ddp",
    "is_of_network",
    "network_stack",
    "open_transport",
    "ranks_in",
    "run_replicas",
]
