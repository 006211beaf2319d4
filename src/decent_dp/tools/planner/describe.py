"""The inputs and the result of a prediction: links, a cluster, a job, a way to train. Plain numbers, validated."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from decent_dp._checks import check_choice, check_integer, check_number
from decent_dp._compressions import CODES as COMPRESSIONS
from decent_dp._compressions import bytes_per_number, needs_pairs, parse_compression
from decent_dp.topo import Topology
from decent_dp.topo.schedule import stages_of, title_of

from .measured import read_measured

__all__ = ["COMPRESSIONS", "Choice", "Cluster", "Job", "Link", "Prediction"]

# A transformer of hidden size d with d/64 blocks has about 12 d² · d/64 parameters.
_HEAD = 64
# The length of a side of its matrices (d × 3d, d × d, d × 4d, 4d × d) in d, as low-rank messages need it; and the share of its
# parameters that are in vectors, times d.
_SIDE, _VECTORS = 1.5, 1.1
DDP, HSDP, FSDP, DECENT_DP, PUSH = KINDS = ("ddp", "hsdp", "fsdp", "decent_dp", "push")
BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Link:
    """A full-duplex link: a message of b bytes takes ``latency_s`` + b / ``bytes_per_s`` (the alpha-beta model).

    Attributes:
        latency_s: seconds one way, at least 0.
        bytes_per_s: of payload, in each direction, at least 1; ``math.inf`` for a link without limit.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        check_number("Link: latency_s", self.latency_s, "seconds, at least 0, such as 50e-6", at_least=0.0)
        if self.bytes_per_s != math.inf:
            want = "bytes per second, at least 1, such as 25e9 / 8 for 25 Gbit/s"
            check_number("Link: bytes_per_s", self.bytes_per_s, want, at_least=1.0)

    @classmethod
    def of_gbit(cls, gbit: float, latency_us: float = 0.0) -> Link:
        """A link of ``gbit`` Gbit/s (10^9 bits) and ``latency_us`` microseconds."""
        if gbit != math.inf:
            check_number("Link: gbit", gbit, "Gbit/s above 0, such as 25", above=0.0)
        check_number("Link: latency_us", latency_us, "microseconds, at least 0, such as 50", at_least=0.0)
        return cls(latency_us * 1e-6, gbit * 1e9 / 8)


@dataclass(frozen=True)
class Cluster:
    """Workers, nodes and links. Ranks ``[0, local_world_size)`` are the first node, and so on.

    Attributes:
        world_size: workers n.
        local_world_size: workers per node; divides n.
        inter: a node's link to other nodes, shared by its workers in each direction.
        intra: a worker's own link to the other workers of its node.
        backend: 'gloo': DDP sums along a ring of all workers, and this library's groups along trees. 'nccl': both use
            NCCL's all-reduce, a ring, or its trees between two nodes; but int8, and groups of more than two in bfloat16, go
            through the CPU and TCP, as with 'gloo'.
        ports: links between nodes per node, each of them ``inter``.
        flow_ports: how many of them one flow, or a ring, can use: 1 for bonded Ethernet, all where NCCL spreads a message over
            InfiniBand devices. Several flows use all.
        processes: of each worker. They share its messages: a node that is one replica has those of its GPUs.
    """

    world_size: int
    local_world_size: int
    inter: Link
    intra: Link
    backend: str = "gloo"
    ports: int = 1
    flow_ports: int = 1
    processes: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "local_world_size", "ports", "flow_ports", "processes"):
            object.__setattr__(self, name, check_integer(f"Cluster: {name}", getattr(self, name), 1))
        if self.flow_ports > self.ports:
            raise ValueError(
                f"Cluster: flow_ports={self.flow_ports} is more than ports={self.ports}: a flow has at most all of them"
            )
        n, local = self.world_size, self.local_world_size
        if n % local:
            raise ValueError(
                f"Cluster: local_world_size={local} does not divide world_size={n}: every node must have as many workers"
            )
        for name, link in (("inter", self.inter), ("intra", self.intra)):
            if not isinstance(link, Link):
                raise ValueError(f"Cluster: {name} must be a Link, got {link!r}: write Link(latency_s, bytes_per_s)")
        check_choice("Cluster: backend", self.backend, BACKENDS)

    @property
    def n_nodes(self) -> int:
        return self.world_size // self.local_world_size

    def node(self, rank: int) -> int:
        return rank // self.local_world_size

    @property
    def several_of_several(self) -> bool:
        """Several nodes of several workers each: nodes can be the replicas."""
        return 1 < self.local_world_size < self.world_size

    def of_nodes(self) -> Cluster:
        """Each node as one worker."""
        return replace(self, world_size=self.n_nodes, local_world_size=1, processes=self.local_world_size)

    @classmethod
    def from_measured(cls, path: str | Path, *, backend: str | None = None) -> Cluster:
        """The cluster that ``decent-dp doctor --out FILE`` measured and wrote to ``path``.

        A node's rate is that of the best of its pairs with other nodes. The rate between nodes is that of most nodes, or
        that of the slowest one if it is clearly slower, as all workers come to wait for it. ``backend``: by default the one
        that was measured.

        Raises:
            ValueError: the file cannot be read, is not the doctor's, or lacks something; in one line, with what to do.
        """
        found = read_measured(path)
        found |= {name: Link(*found[name]) for name in ("inter", "intra")}
        return cls(**found | ({} if backend is None else {"backend": backend}))


@dataclass(frozen=True)
class Job:
    """A step of one worker without the others.

    Attributes:
        params: number of trainable parameters, in float32.
        forward_ms, backward_ms, optimizer_ms: milliseconds; at least one is above 0.
        jitter: standard deviation of a step's computation, relative to its mean, drawn for each worker and step from a
            lognormal distribution. The default is that of the workers in benchmarks/results/8x1-60.json when they are alone.
        width: hidden size of a transformer, from which the bytes of low-rank messages are estimated; None: from ``params``.
        sharded: the model is sharded over the workers of a node (``fully_shard``). They gather parameters in bfloat16, in the
            forward and again in the backward, and sum gradients in float32.
    """

    params: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float = 0.0
    jitter: float = 0.01
    width: float | None = None
    sharded: bool = False

    def __post_init__(self) -> None:
        if self.width is not None:
            check_number("Job: width", self.width, "the hidden size of the model, at least 1, such as 768", at_least=1.0)
        check_number("Job: params", self.params, "the number of trainable parameters, above 0, such as 65e6", above=0.0)
        for name in ("forward_ms", "backward_ms", "optimizer_ms"):
            check_number(f"Job: {name}", getattr(self, name), "milliseconds, at least 0", at_least=0.0)
        if self.compute_ms <= 0:
            raise ValueError("Job: forward_ms, backward_ms and optimizer_ms are all 0: give the milliseconds of a step")
        want = "at least 0 and below 1 (0.02 is two percent of a step)"
        check_number("Job: jitter", self.jitter, want, at_least=0.0, below=1.0)

    @classmethod
    def of_step(cls, params: float, step_ms: float, *, optimizer_ms: float = 0.0, **rest: Any) -> Job:
        """A step of ``step_ms`` on one worker alone, including ``optimizer_ms``; backward takes two thirds of the rest.

        ``rest``: ``jitter``, ``width``, ``sharded``.

        Raises:
            ValueError: as the class; or the optimizer takes longer than the step.
        """
        check_number("Job: step_ms", step_ms, "the milliseconds of a step on one worker alone, above 0", above=0.0)
        check_number("Job: optimizer_ms", optimizer_ms, "milliseconds, at least 0", at_least=0.0)
        if optimizer_ms > step_ms:
            raise ValueError(f"Job: optimizer_ms={optimizer_ms:g} is more than step_ms={step_ms:g}: it is a part of the step")
        time = step_ms - optimizer_ms
        return cls(params, time / 3, 2 * time / 3, optimizer_ms, **rest)

    def numbers_sent(self, rank: int) -> float:
        """The numbers of a low-rank message, as a share of the parameters: estimated for a transformer."""
        d = self.width or (_HEAD * self.params / 12) ** (1 / 3)
        return min(1.0, rank / (_SIDE * d) + _VECTORS / d)

    @property
    def compute_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.optimizer_ms


@dataclass(frozen=True)
class Choice:
    """A way to train.

    Attributes:
        kind: 'decent_dp' (this library, over ``topology``); PyTorch's 'ddp', or of a sharded job 'hsdp' (sharded inside nodes,
            all-reduce between them) and 'fsdp' (sharded over all workers); or 'push': every worker sends to the one 1, 2, 4,
            ... ranks further and receives from as far behind (Assran et al., ICML 2019), overlapped bucket by bucket.
        topology: for 'decent_dp': an argument of ``make_topology``.
        compression: as of ``gossip``.
        mix_every: as of ``gossip``.
        bucket_mb: upper size of a bucket in MiB, above 0.
        extra_ms: added to a worker's backward (copies, kernels of the exchange), where it is known.
        replica: 'worker' or 'node', as of ``gossip``.
    """

    kind: str
    topology: str | Topology | None = None
    compression: str | None = None
    bucket_mb: float = 25.0
    extra_ms: float = 0.0
    mix_every: int = 1
    replica: str = "worker"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mix_every", check_integer("Choice: mix_every", self.mix_every, 1))
        check_choice("Choice: kind", self.kind, KINDS)
        check_choice("Choice: replica", self.replica, ("worker", "node"))
        if not self.decentralized:
            for name, default in (("topology", None), ("compression", None), ("mix_every", 1), ("replica", "worker")):
                if (value := getattr(self, name)) != default:
                    raise ValueError(f"Choice: {name}={value!r} is for kind='decent_dp' only, got kind={self.kind!r}")
        elif not isinstance(self.topology, (str, Topology)):
            raise ValueError(f"Choice: topology must be a name or a Topology, got {self.topology!r}: such as 'one-peer-exp'")
        try:
            parse_compression(self.compression)
        except ValueError as error:
            raise ValueError(f"Choice: {error}") from None
        check_number("Choice: bucket_mb", self.bucket_mb, "MiB above 0, such as 25", above=0.0)
        check_number("Choice: extra_ms", self.extra_ms, "milliseconds, at least 0", at_least=0.0)

    @property
    def decentralized(self) -> bool:
        return self.kind == DECENT_DP

    @property
    def synchronous(self) -> bool:
        """All workers average their gradients in every step."""
        return self.kind in (DDP, HSDP, FSDP)

    @property
    def of_nodes(self) -> bool:
        """The workers of a node hold the same parameters, or shards of them."""
        return self.replica == "node" or self.kind == HSDP

    @property
    def topology_name(self) -> str | None:
        """The name that was given, or the title of the topology, or None."""
        return title_of(self.topology) if isinstance(self.topology, Topology) else self.topology

    @property
    def name(self) -> str:
        """``ddp``, ``hsdp``, ``fsdp``, ``push`` or ``TOPOLOGY[, node][, COMPRESSION][, every H]``."""
        if not self.decentralized:
            return self.kind
        every = f"every {self.mix_every}" if self.mix_every > 1 else None
        node = "node" if self.of_nodes else None
        return ", ".join(part for part in (self.topology_name, node, self.compression, every) if part)

    @property
    def steps_per_mix(self) -> int:
        """Steps from one mix of a parameter to the next."""
        return self.mix_every * (stages_of(self.topology)[-1].every if isinstance(self.topology, Topology) else 1)

    @property
    def low_rank(self) -> bool:
        return parse_compression(self.compression)[0] is not None

    @property
    def pairs_only(self) -> bool:
        return needs_pairs(self.compression)

    def numbers_sent(self, job: Job) -> float:
        """Numbers that an exchange of a worker sends, as a share of the parameters."""
        rank, _ = parse_compression(self.compression)
        return 1.0 if rank is None else job.numbers_sent(rank)

    def message_bytes(self, job: Job) -> float:
        """Bytes of an exchange of all parameters of a replica."""
        _, code = parse_compression(self.compression)
        return bytes_per_number(code) * self.numbers_sent(job) * job.params


@dataclass(frozen=True)
class Prediction:
    """The predicted step of ``choice``.

    Attributes:
        step_ms: the mean over workers and steps, after the first steps.
        compute_ms: the computation in it (coding and ``extra_ms`` included), of the mean worker.
        waited_ms: the wait for others and for links in it.
        node_bytes: bytes that a node sends to other nodes per step, the mean over nodes and rounds.
        limit: 'compute', 'coding', 'links between nodes', 'links inside a node', 'the CPU and TCP' (messages that NCCL does not
            take) or 'latency'.
        reason: a sentence about the limit.
        mixing: the factor by which a step shrinks the consensus error in the long run (0 for DDP, which has none); None if it
            is not known: ``plan`` computes it for up to 1,024 workers.
        detour: some messages go through the CPU and TCP, though the cluster has NCCL.
    """

    choice: Choice
    step_ms: float
    compute_ms: float
    waited_ms: float
    node_bytes: float
    limit: str
    reason: str
    mixing: float | None = None
    detour: bool = False

    @property
    def name(self) -> str:
        return self.choice.name

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        choice = self.choice
        return {
            **{key: getattr(self, key) for key in ("name", "step_ms", "compute_ms", "waited_ms", "node_bytes")},
            **{key: getattr(choice, key) for key in ("kind", "replica", "compression", "mix_every", "bucket_mb", "extra_ms")},
            "topology": choice.topology_name,
            "limit": self.limit,
            "reason": self.reason,
            "mixing": self.mixing,
        }
