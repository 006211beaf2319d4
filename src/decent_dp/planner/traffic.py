"""What an exchange puts on which link, and how parameters are cut into buckets.

Links are numbered: of each node the way out and the way in, then of each worker inside its node the same two.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from decent_dp.topo import Topology, make_topology

from .describe import Choice, Cluster, Job

__all__ = ["Exchange", "Round", "buckets_of", "capacities", "collective", "make_rounds", "node_copies"]

_MIB = 2**20
_BUCKETS = 8  # as bucket.py has it
# A worker asks for what its groups' trees need in quarters of a window (transport/tcp/framing.py).
_ASKED_AT_ONCE = 4
# One way each: the offer, what is asked for, and the data (transport/tcp/framing.py).
_HANDSHAKE = 3
# Where messages leave NCCL for the CPU and TCP: bytes a second that a worker's one thread moves each way, and the least
# latency. Guesses on the safe side: no such cluster was measured.
_TCP_BYTES_PER_S, _TCP_LATENCY_S = 1e9, 30e-6
# Of what mixes in the end without a period, or with a long one, so many rounds are looked at: late ones.
_SAMPLED_ROUNDS, _LATE, _LONG = 16, 1_000_000, 256


@dataclass(frozen=True)
class Exchange:
    """One edge of a round.

    Attributes:
        starters: who must have begun before anything moves.
        waiters: whose step needs the result.
        loads: (link, copies of the payload that go over it), for every link that it uses.
        crossing: (node, copies that leave it).
        latency_s: from the last start to the first byte.
        lanes: (worker, 0 for between nodes, 1 for inside): what a worker does one exchange at a time on.
        busy: the share of the time that links between nodes can be kept busy; ``loads`` of them are copies over it.
        most: bytes a second of the payload, whatever the links can.
        detour: it goes through the CPU and TCP though the cluster has NCCL.
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
class Round:
    """The exchanges of a round; ``starts`` and ``needs`` say which of them each worker begins and waits for (None: neither)."""

    exchanges: tuple[Exchange, ...]
    starts: tuple[int | None, ...]
    needs: tuple[int | None, ...]


def capacities(cluster: Cluster) -> tuple[list[float], list[float]]:
    """Of every link: bytes a second in all, and what one flow may take of it."""
    own = [cluster.inter.bytes_per_s / cluster.slow_nodes.get(node, 1.0) for node in range(cluster.n_nodes)]
    inside = [cluster.intra.bytes_per_s] * (2 * cluster.world_size)
    return [cluster.ports * rate for rate in own * 2] + inside, [cluster.flow_ports * rate for rate in own * 2] + inside


def _ways(cluster: Cluster, *, node: int | None = None, rank: int | None = None) -> tuple[int, int]:
    """The numbers of the ways out and in."""
    if node is not None:
        return node, cluster.n_nodes + node
    assert rank is not None
    return 2 * cluster.n_nodes + rank, 2 * cluster.n_nodes + cluster.world_size + rank


def _send(cluster: Cluster, source: int, target: int) -> tuple[tuple[int, float], ...]:
    """One copy from a worker to another."""
    a, b = cluster.node(source), cluster.node(target)
    if a == b:
        return (_ways(cluster, rank=source)[0], 1.0), (_ways(cluster, rank=target)[1], 1.0)
    return (_ways(cluster, node=a)[0], 1.0), (_ways(cluster, node=b)[1], 1.0)


def node_copies(nodes: int, members: int, how: str) -> float:
    """Copies of the payload that a group's all-reduce sends out of each of its ``nodes`` nodes.

    A ring of ``members`` in the order of their nodes: 2 (m - 1)/m. The library's trees: 2 (k - 1)/k for k nodes. NCCL: the
    ring, but between two nodes its trees, whose root and leaf change places for the other half of the data: one copy.
    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009, for the ring;
    Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009, for the trees.
    """
    if nodes == 1:
        return 0.0
    if how == "tree":
        return 2 * (nodes - 1) / nodes
    return 1.0 if how == "nccl" and nodes == 2 else 2 * (members - 1) / members


def collective(cluster: Cluster, ranks: Sequence[int], how: str) -> Exchange:
    """A group's all-reduce by 'ring', 'tree' or 'nccl'.

    Trees among k > 2 nodes do not keep links full: every root asks the others' workers for pieces, w of them at a time, and now
    and then several ask the same one. With requests that fall on the others at random, a link is busy for a share of
    w / (w + (k - 2)/(k - 1)) of the time (mean value analysis of a closed network of k equal stations in Schweitzer's
    approximation, where an arriving request sees what is queued but for itself; Reiser and Lavenberg, JACM 1980).
    """
    ranks = tuple(sorted(ranks))
    members: dict[int, list[int]] = {}
    for rank in ranks:
        members.setdefault(cluster.node(rank), []).append(rank)
    k, m = len(members), len(ranks)
    copies = node_copies(k, m, how)
    busy = 1.0
    if how == "tree" and k > 2:
        asked = _ASKED_AT_ONCE * min(len(own) for own in members.values())
        busy = asked / (asked + (k - 2) / (k - 1))
    loads: list[tuple[int, float]] = []
    for node, own in members.items():
        if k > 1:
            loads += [(way, copies / busy) for way in _ways(cluster, node=node)]
        if len(own) > 1:
            inside = 2 * (len(own) - 1) / len(own) if how == "tree" else 2 * (m - 1) / m
            loads += [(way, inside) for rank in own for way in _ways(cluster, rank=rank)]
    latency = _group_latency(cluster, members, how)
    lanes = tuple((rank, lane) for rank in ranks for lane in ((0, 1) if k > 1 else (1,)))
    crossing = tuple((node, copies) for node in members) if k > 1 else ()
    detour = how == "tree" and cluster.backend == "nccl"
    most = _TCP_BYTES_PER_S / (2 * (m - 1) / m) if detour and m > 1 else math.inf
    return Exchange(ranks, ranks, tuple(loads), crossing, latency, lanes, busy, most, detour)


def _group_latency(cluster: Cluster, members: Mapping[int, Sequence[int]], how: str) -> float:
    """Seconds until a group's all-reduce of nothing is done; ``members`` are the ranks of each node.

    A part of the data goes twice around a ring but for the two hops that meet where it started: of the parts, that counts for
    which these two cost least. The library's trees: to the node's leader, to the root and
    back, each with a handshake. NCCL's trees between two nodes: along the chain of each node's workers, across, and back.
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


def _pair(cluster: Cluster, a: int, b: int, detour: bool) -> Exchange:
    across = cluster.node(a) != cluster.node(b)
    latency = (cluster.inter if across else cluster.intra).latency_s
    if detour:
        latency = max(latency, _TCP_LATENCY_S)
    steps = _HANDSHAKE if detour or cluster.backend == "gloo" else 1
    crossing = ((cluster.node(a), 1.0), (cluster.node(b), 1.0)) if across else ()
    lane = 0 if across else 1
    loads = _send(cluster, a, b) + _send(cluster, b, a)
    most = _TCP_BYTES_PER_S if detour else math.inf
    return Exchange((a, b), (a, b), loads, crossing, steps * latency, ((a, lane), (b, lane)), most=most, detour=detour)


def _push(cluster: Cluster, source: int, target: int) -> Exchange:
    across = cluster.node(source) != cluster.node(target)
    link = cluster.inter if across else cluster.intra
    crossing = ((cluster.node(source), 1.0),) if across else ()
    lanes = ((source, 0 if across else 1),)
    return Exchange((source,), (target,), _send(cluster, source, target), crossing, link.latency_s, lanes)


def make_rounds(cluster: Cluster, choice: Choice) -> list[Round]:
    """The rounds of a period, or some late ones of a topology without one; of a composition those of its last part.

    Raises:
        ValueError: the topology is unknown, or does not fit the cluster.
    """
    n = cluster.world_size
    if choice.kind == "push":
        distances = [1 << k for k in range(max(n - 1, 0).bit_length()) if 1 << k < n]
        return [
            Round(
                tuple(_push(cluster, i, (i + d) % n) for i in range(n)),
                tuple(range(n)),
                tuple((i - d) % n for i in range(n)),
            )
            for d in distances
        ] or [Round((), (None,) * n, (None,) * n)]
    topology: Topology = make_topology(
        choice.topology,  # type: ignore[arg-type]
        local_world_size=cluster.local_world_size,
        world_size=n,
        rank=0,
    )
    topology, h = topology._settled()
    # As transport/process_group.py chooses: NCCL takes pairs on a wire whose sums are plain, and groups on float32 alone.
    nccl = cluster.backend == "nccl"
    how = "nccl" if nccl and choice.wire == "float32" else "tree"
    detour = nccl and choice.wire == "int8"
    made: dict[tuple[int, ...], Exchange] = {}
    idle = Round((), (None,) * n, (None,) * n)
    rounds = []
    period = topology.period
    for t in range(period) if period is not None and period <= _LONG else range(_LATE, _LATE + _SAMPLED_ROUNDS):
        exchanges: list[Exchange] = []
        starts: list[int | None] = [None] * n
        for edge in topology.round(t):
            ranks = tuple(sorted(edge.ranks))
            if len(ranks) == 1:
                continue
            if ranks not in made:
                made[ranks] = _pair(cluster, *ranks, detour) if len(ranks) == 2 else collective(cluster, ranks, how)
            for rank in ranks:
                starts[rank] = len(exchanges)
            exchanges.append(made[ranks])
        rounds += [idle] * (h - 1)
        rounds.append(Round(tuple(exchanges), tuple(starts), tuple(starts)))
    return rounds


def buckets_of(job: Job, choice: Choice, most: int) -> list[float]:
    """Shares of the parameters in each bucket, in the order of the backward; they sum to 1.

    DDP: 1 MiB first, then the limit. This library: about eight of equal size below the limit, the first a quarter of them
    (``bucket.choose_sizes``). Parameters are taken to be small beside a bucket. Of this library more than ``most`` buckets are
    merged into so many: the first stays as it is. (Each waits for its own exchange of the step before, so that a step has their
    latency once, whatever their number. DDP's are summed one after another and have it each: those are not merged.)
    """
    total = job.params * job.param_bytes
    limit = choice.bucket_bytes
    if choice.kind == "ours":
        size = min(limit, max(_MIB, total / _BUCKETS))
        first = size / 4 if total > size else size
    else:
        size, first = limit, min(_MIB, limit)
    shares = [min(first, total) / total]
    rest = total - shares[0] * total
    if rest > 1e-9 * total:
        count = -(-rest // size)
        if choice.kind != "ddp" and count > most - 1:
            shares += [rest / total / (most - 1)] * (most - 1)
        else:
            shares += [size / total] * int(count - 1) + [(rest - (count - 1) * size) / total]
    return shares
