"""The load of each exchange on each link, and the buckets of the parameters.

Links are numbered: the ways out of each node, the ways into each node, then the same two of each worker inside its node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from decent_dp._sizes import MIB, choose_sizes
from decent_dp.topo import Topology, make_topology
from decent_dp.topo.schedule import largest_group, stages_of

from .describe import FSDP, HSDP, PUSH, Choice, Cluster, Job

__all__ = [
    "BLOCKS",
    "RoundTraffic",
    "Transfer",
    "all_reduce_s",
    "buckets_of",
    "capacities",
    "collective",
    "make_rounds",
    "seconds_per_byte",
]

Array = npt.NDArray[np.float64]

# Messages of its groups' trees that a worker requests at a time: one of each other node, within these limits (TCP links).
_REQUESTED_AT_ONCE, _MOST_REQUESTED = 4, 12
# Messages one way: the offer, the request and the data (the transport's TCP links).
_HANDSHAKE = 3
# For messages that NCCL does not take: bytes per second that a process's one thread moves each way inside a node (lab/gpus.md)
# and, encrypted, between nodes (lab/fast.md); and the least latency, a guess.
_TCP_BYTES_PER_S, _ENCRYPTED_BYTES_PER_S, _TCP_LATENCY_S = 0.7e9, 0.25e9, 30e-6
# FSDP gathers and sums the blocks of a transformer one after another.
BLOCKS = 32
# The most buckets of this library that are looked at.
_MOST_BUCKETS = 12
# Without a period, or with a long one, this many late rounds are simulated.
_SAMPLED_ROUNDS, _LATE, _LONG = 16, 1_000_000, 256


@dataclass(frozen=True)
class Transfer:
    """The exchange of one edge.

    Attributes:
        starters: workers that must have begun before anything moves.
        waiters: workers whose step needs the result.
        loads: (link, copies of the payload over it), for every link in use.
        crossing: (node, copies that leave it).
        latency_s: from the last start to the first byte.
        lanes: (worker, 0 for between nodes, 1 for inside). A worker has one transfer at a time on each lane.
        busy: the share of the time that links between nodes can be kept busy. Their ``loads`` are copies divided by it.
        most: bytes per second of the payload, whatever the links allow.
        detour: goes through the CPU and TCP though the cluster has NCCL.
    """

    starters: tuple[int, ...]
    waiters: tuple[int, ...]
    loads: tuple[tuple[int, float], ...]
    crossing: tuple[tuple[int, float], ...]
    latency_s: float
    lanes: tuple[tuple[int, int], ...]
    busy: float = 1.0
    most: float = math.inf
    detour: bool = False


@dataclass(frozen=True)
class RoundTraffic:
    """The transfers of a round; ``starts`` and ``needs`` say which of them each worker begins and waits for, or None."""

    transfers: tuple[Transfer, ...]
    starts: tuple[int | None, ...]
    needs: tuple[int | None, ...]


def capacities(cluster: Cluster) -> tuple[list[float], list[float]]:
    """Bytes per second of every link: in all, and for one flow."""
    between = [cluster.inter.bytes_per_s] * (2 * cluster.n_nodes)
    inside = [cluster.intra.bytes_per_s] * (2 * cluster.world_size)
    of_a_flow = min(cluster.ports, cluster.flow_ports * cluster.processes)
    return [cluster.ports * rate for rate in between] + inside, [of_a_flow * rate for rate in between] + inside


def seconds_per_byte(cluster: Cluster, transfers: Sequence[Transfer]) -> list[float]:
    """Seconds per byte of the payload of each transfer over the busiest of its links, which it shares with the others."""
    capacity, per_flow = capacities(cluster)
    copies = [0.0] * len(capacity)
    for transfer in transfers:
        for link, own in transfer.loads:
            copies[link] += own
    return [
        max([1 / each.most, *(max(copies[link] / capacity[link], own / per_flow[link]) for link, own in each.loads)])
        for each in transfers
    ]


def all_reduce_s(cluster: Cluster, transfer: Transfer, nbytes: Array) -> Array:
    """Seconds of all-reduces of so many bytes on idle links. An all-gather by a ring takes half of it."""
    return (transfer.latency_s + nbytes * seconds_per_byte(cluster, [transfer])[0]) * (len(transfer.starters) > 1)


def _most(cluster: Cluster, across: bool) -> float:
    """Bytes per second of a worker's messages that NCCL does not take."""
    return cluster.processes * (_ENCRYPTED_BYTES_PER_S if across else _TCP_BYTES_PER_S)


def _worker_ways(cluster: Cluster, rank: int) -> tuple[int, int]:
    """The numbers of the ways from and to a worker inside its node."""
    return 2 * cluster.n_nodes + rank, 2 * cluster.n_nodes + cluster.world_size + rank


def _send(cluster: Cluster, source: int, target: int) -> tuple[tuple[int, float], ...]:
    """One copy from a worker to another."""
    a, b = cluster.node(source), cluster.node(target)
    if a == b:
        return (_worker_ways(cluster, source)[0], 1.0), (_worker_ways(cluster, target)[1], 1.0)
    return (a, 1.0), (cluster.n_nodes + b, 1.0)


def node_copies(nodes: int, members: int, how: str) -> float:
    """Copies of the payload that leave each of the ``nodes`` nodes of a group in an all-reduce.

    A ring of ``members`` in the order of their nodes: 2 (m - 1)/m. The library's trees: 2 (k - 1)/k for k nodes. NCCL: the
    ring, but between two nodes its trees, in which root and leaf swap for the other half of the data: one copy.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, for the ring;
    Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, for the trees.
    """
    if nodes == 1:
        return 0.0
    if how == "tree":
        return 2 * (nodes - 1) / nodes
    return 1.0 if how == "nccl" and nodes == 2 else 2 * (members - 1) / members


def collective(cluster: Cluster, ranks: Sequence[int], how: str) -> Transfer:
    """A group's all-reduce by 'ring', 'tree' or 'nccl'.

    Trees among k > 2 nodes do not keep links full: every root requests chunks from the other nodes' workers, w at a time, and
    workers that are not in step request from the same one. If requests are distributed at random, a link is busy for a share of
    w / (w + (k - 2)/(k - 1)) of the time (mean value analysis of a closed network of k equal stations in Schweitzer's
    approximation, where an arriving request sees the queue without itself; Reiser and Lavenberg, JACM 1980).
    """
    ranks = tuple(sorted(ranks))
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(cluster.node(rank), []).append(rank)
    k, m = len(members), len(ranks)
    copies = node_copies(k, m, how)
    busy = 1.0
    if how == "tree" and k > 2:
        requested = min(max(_REQUESTED_AT_ONCE, k - 1), _MOST_REQUESTED) * min(len(own) for own in members.values())
        busy = requested / (requested + (k - 2) / (k - 1))
    loads: list[tuple[int, float]] = []
    for node, own in members.items():
        if k > 1:
            loads += [(way, copies / busy) for way in (node, cluster.n_nodes + node)]
        if len(own) > 1:
            inside = 2 * (len(own) - 1) / len(own) if how == "tree" else 2 * (m - 1) / m
            loads += [(way, inside) for rank in own for way in _worker_ways(cluster, rank)]
    latency = _group_latency(cluster, members, how)
    lanes = tuple((rank, lane) for rank in ranks for lane in ((0, 1) if k > 1 else (1,)))
    crossing = tuple((node, copies) for node in members) if k > 1 else ()
    detour = how == "tree" and cluster.backend == "nccl"
    most = _most(cluster, k > 1) / (2 * (m - 1) / m) if detour and m > 1 else math.inf
    return Transfer(ranks, ranks, tuple(loads), crossing, latency, lanes, busy, most, detour)


def _group_latency(cluster: Cluster, members: Mapping[int, Sequence[int]], how: str) -> float:
    """Seconds of a group's all-reduce of zero bytes; ``members`` are the ranks of each node.

    In a ring each part of the data makes two rounds less the two hops that meet where it started; the slowest part is that
    whose two hops are the shortest. The library's trees: to the node's leader, to the root and back, each with a handshake.
    NCCL's trees between two nodes: along the chain of each node's workers, across, and back.
    """
    k, m = len(members), sum(map(len, members.values()))
    inter, intra = cluster.inter.latency_s, cluster.intra.latency_s
    most = max(map(len, members.values()))
    if how == "tree":
        if cluster.backend == "nccl":
            inter, intra = max(inter, _TCP_LATENCY_S), max(intra, _TCP_LATENCY_S)
        return 2 * _HANDSHAKE * ((inter if k > 1 else 0.0) + (intra if most > 1 else 0.0))
    if how == "nccl" and k == 2:
        return 2 * (inter + (most - 1) * intra)
    hops = [hop for own in members.values() for hop in (*[intra] * (len(own) - 1), inter if k > 1 else intra)]
    return 2 * sum(hops) - min(hops[i] + hops[i - 1] for i in range(m)) if m > 1 else 0.0


def _pair(cluster: Cluster, a: int, b: int, detour: bool) -> Transfer:
    across = cluster.node(a) != cluster.node(b)
    latency = (cluster.inter if across else cluster.intra).latency_s
    if detour:
        latency = max(latency, _TCP_LATENCY_S)
    steps = _HANDSHAKE if detour or cluster.backend == "gloo" else 1
    crossing = ((cluster.node(a), 1.0), (cluster.node(b), 1.0)) if across else ()
    lane = 0 if across else 1
    loads = _send(cluster, a, b) + _send(cluster, b, a)
    most = _most(cluster, across) if detour else math.inf
    return Transfer((a, b), (a, b), loads, crossing, steps * latency, ((a, lane), (b, lane)), most=most, detour=detour)


def _push(cluster: Cluster, source: int, target: int) -> Transfer:
    across = cluster.node(source) != cluster.node(target)
    link = cluster.inter if across else cluster.intra
    crossing = ((cluster.node(source), 1.0),) if across else ()
    lanes = ((source, 0 if across else 1),)
    return Transfer((source,), (target,), _send(cluster, source, target), crossing, link.latency_s, lanes)


def make_rounds(cluster: Cluster, choice: Choice) -> list[RoundTraffic]:
    """The rounds of a period, or some late ones of a topology without a period; of a composition those of its last part.

    Raises:
        ValueError: the topology is unknown, or does not fit the cluster.
    """
    n = cluster.world_size
    if choice.kind == PUSH:
        distances = [1 << k for k in range(max(n - 1, 0).bit_length()) if 1 << k < n]
        return [
            RoundTraffic(
                tuple(_push(cluster, i, (i + d) % n) for i in range(n)),
                tuple(range(n)),
                tuple((i - d) % n for i in range(n)),
            )
            for d in distances
        ] or [RoundTraffic((), (None,) * n, (None,) * n)]
    topology: Topology = make_topology(
        choice.topology,  # type: ignore[arg-type]
        local_world_size=cluster.local_world_size,
        world_size=n,
        rank=0,
    )
    last = stages_of(Topology.every(topology, choice.mix_every))[-1]
    topology, h = last.topology, last.every
    if choice.pairs_only and (largest := largest_group(topology)) > 2:
        raise ValueError(
            f"{choice.name}: such messages need a topology of pairs, and this one has groups of {largest}: take 'base-2'"
        )
    # As the transport's process_group.py: NCCL takes pairs in float32 and bfloat16, and groups in float32 alone.
    nccl = cluster.backend == "nccl"
    how = "nccl" if nccl and choice.compression is None else "tree"
    detour = nccl and (choice.pairs_only or choice.compression == "int8")
    made: dict[tuple[int, ...], Transfer] = {}
    rounds = []
    period = topology.period
    for t in range(period) if period is not None and period <= _LONG else range(_LATE, _LATE + _SAMPLED_ROUNDS):
        transfers: list[Transfer] = []
        starts: list[int | None] = [None] * n
        for edge in topology.round(t):
            ranks = tuple(sorted(edge.ranks))
            if len(ranks) == 1:
                continue
            if ranks not in made:
                whole = _pair(cluster, *ranks, detour) if len(ranks) == 2 else collective(cluster, ranks, how)
                # With mix_every every step exchanges one part of the parameters.
                made[ranks] = whole if h == 1 else _part_of(whole, h)
            for rank in ranks:
                starts[rank] = len(transfers)
            transfers.append(made[ranks])
        rounds.append(RoundTraffic(tuple(transfers), tuple(starts), tuple(starts)))
    return rounds


def _part_of(whole: Transfer, h: int) -> Transfer:
    """The exchange of one h-th of the parameters."""
    loads, crossing = (tuple((at, copies / h) for at, copies in pairs) for pairs in (whole.loads, whole.crossing))
    return replace(whole, loads=loads, crossing=crossing, most=whole.most * h)


def buckets_of(job: Job, choice: Choice) -> Array:
    """Shares of the parameters in each bucket, in the order of the backward; they sum to 1.

    DDP: 1 MiB first, then the limit. This library: about eight of equal size below the limit, the first a quarter of them
    (``choose_sizes``). Parameters are assumed to be small beside a bucket. More than 12 buckets of this library are merged into
    12, except for the first: each waits for its own exchange of the previous step, so the latency counts once per step,
    whatever their number. DDP's buckets are summed one after another, each with the latency, and are not merged. FSDP's are
    blocks.
    """
    if choice.kind in (HSDP, FSDP):
        return np.full(BLOCKS, 1 / BLOCKS)
    total, limit = 4 * job.params, choice.bucket_mb * MIB
    first, size = choose_sizes(total, limit) if choice.decentralized else (min(MIB, limit), limit)
    first = min(first, total)
    rest = total - first
    if rest <= 1e-9 * total:
        return np.ones(1)
    count = int(-(-rest // size))
    if not choice.synchronous and count > _MOST_BUCKETS - 1:
        count, size = _MOST_BUCKETS - 1, rest / (_MOST_BUCKETS - 1)
    return np.array([first, *[size] * (count - 1), rest - (count - 1) * size]) / total
