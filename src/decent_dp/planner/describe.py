"""What a prediction starts from: links, a cluster, a job, and a way to train. Plain numbers, checked when they are given."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from decent_dp.topo import Topology

__all__ = ["CODING_NS", "WIRE_BYTES", "Choice", "Cluster", "Job", "Link", "Prediction"]

WIRE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "int8": 1}

# Nanoseconds a parameter that coding and decoding add to a step, by backend. On a processor ('gloo'): the mean step of 'ours'
# on the wire less that on float32, of 4.2 million parameters (benchmarks/results/real-2.json: 397.3 - 382.7 ms; bfloat16 cost
# less than the noise). With 'nccl' nothing was measured: bfloat16 reads and writes some bytes of a GPU's memory; int8 goes
# through the CPU and TCP, and is charged as there.
CODING_NS: dict[str, dict[str, float]] = {
    "gloo": {"float32": 0.0, "bfloat16": 0.0, "int8": 3.5},
    "nccl": {"float32": 0.0, "bfloat16": 0.05, "int8": 3.5},
}

_MIB = 2**20


def _number(what: str, value: object, fix: str, *, least: float = 0.0, above: bool = False, finite: bool = True) -> None:
    """Raises ValueError unless ``value`` is a number of at least (``above``: above) ``least``."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) else float(value)
    large_enough = number > least if above else number >= least  # nan is not
    if not large_enough or (finite and math.isinf(number)):
        raise ValueError(f"{what} must be a number {'above' if above else 'of at least'} {least:g}, got {value!r}: {fix}")


def whole(what: str, value: object, fix: str, *, least: int = 1) -> int:
    """``value``, which may be a NumPy integer, as an int.

    Raises:
        ValueError: it is no integer of at least ``least``.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what} must be a whole number of at least {least}, got {value!r}: {fix}")
    return int(value)


def _slower(name: str, slow: object, count: int) -> dict[int, float]:
    """The factors of a cluster's ``slow_workers`` or ``slow_nodes``, checked."""
    if not isinstance(slow, Mapping):
        raise ValueError(
            f"Cluster: {name} must be a mapping, got {slow!r}: write {{0: 2.0}} for one half as fast, or leave it out"
        )
    for key, factor in slow.items():
        if not isinstance(key, (int, np.integer)) or isinstance(key, bool):
            raise ValueError(f"Cluster: {name} names {key!r}, which is no whole number: write 0 to {count - 1}")
        if not 0 <= key < count:
            raise ValueError(f"Cluster: {name} names {key}, but there are only 0 to {count - 1}: leave it out")
        _number(f"Cluster: {name}[{key}]", factor, "1 is as fast as the others, 2 half as fast", above=True)
    return {int(key): float(factor) for key, factor in slow.items()}


@dataclass(frozen=True)
class Link:
    """A full-duplex link: a message of b bytes takes ``latency_s`` + b / ``bytes_per_s`` (the alpha-beta model).

    Attributes:
        latency_s: seconds one way, at least 0.
        bytes_per_s: of payload, in each direction, at least 1; ``math.inf`` for a link that never limits.
    """

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        _number("Link: latency_s", self.latency_s, "give seconds, such as 50e-6")
        fix = "give bytes a second, such as 25e9 / 8 for 25 Gbit/s"
        _number("Link: bytes_per_s", self.bytes_per_s, fix, least=1.0, finite=False)

    @classmethod
    def of_gbit(cls, gbit: float, latency_us: float = 0.0) -> Link:
        """A link of ``gbit`` Gbit/s (10^9 bits) and ``latency_us`` microseconds.

        Raises:
            ValueError: as the class.
        """
        _number("Link: gbit", gbit, "give Gbit/s, such as 25", above=True, finite=False)
        _number("Link: latency_us", latency_us, "give microseconds, such as 50")
        return cls(latency_us * 1e-6, gbit * 1e9 / 8)


@dataclass(frozen=True)
class Cluster:
    """Workers, their nodes and links. Ranks ``[0, local_world_size)`` are the first node, and so on.

    Attributes:
        world_size: workers n.
        local_world_size: workers a node; divides n.
        inter: a node's link to other nodes. All its workers share it, in each direction.
        intra: a worker's own link to the others of its node.
        backend: 'gloo': DDP sums along a ring of all workers, this library's groups along trees
            (``transport/tcp/reduction_tree.py``).
            'nccl': both are NCCL's all-reduce, a ring, or its trees between two nodes; but int8, and groups of more than two
            on bfloat16, go through the CPU and TCP, as with 'gloo'.
        ports: links between nodes that a node has, each of them ``inter``.
        flow_ports: of them, how many one flow, or a ring, can use: one of bonded Ethernet, all where NCCL spreads a message
            over InfiniBand devices. Several flows use all.
        slow_workers: rank to how many times as long its computation takes.
        slow_nodes: node to how many times slower its link to other nodes is.
    """

    world_size: int
    local_world_size: int
    inter: Link
    intra: Link
    backend: str = "gloo"
    ports: int = 1
    flow_ports: int = 1
    slow_workers: Mapping[int, float] = field(default_factory=dict)
    slow_nodes: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, what in (
            ("world_size", "workers"),
            ("local_world_size", "workers a node"),
            ("ports", "links of a node"),
            ("flow_ports", "links that a flow can use"),
        ):
            object.__setattr__(self, name, whole(f"Cluster: {name}", getattr(self, name), f"give the number of {what}"))
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
        if not isinstance(self.backend, str) or self.backend not in CODING_NS:
            raise ValueError(f"Cluster: backend must be 'gloo' or 'nccl', got {self.backend!r}: say how workers talk")
        for name, count in (("slow_workers", n), ("slow_nodes", self.n_nodes)):
            object.__setattr__(self, name, _slower(name, getattr(self, name), count))

    @property
    def n_nodes(self) -> int:
        return self.world_size // self.local_world_size

    def node(self, rank: int) -> int:
        return rank // self.local_world_size

    @classmethod
    def from_measured(cls, path: str | Path, *, backend: str = "gloo") -> Cluster:
        """The cluster that ``decent-dp doctor --out FILE`` has measured and written to ``path``.

        A node's rate is that of the best of its pairs with other nodes; nodes with a link slower than most are ``slow_nodes``.

        Raises:
            ValueError: the file cannot be read, is not the doctor's, or lacks what is needed; in one line, with what to do.
        """
        from .measured import read_measured

        found = read_measured(path)
        inter, intra = Link(*found.inter), Link(*found.intra)
        return cls(found.world_size, found.local_world_size, inter, intra, backend=backend, slow_nodes=found.slow_nodes)


@dataclass(frozen=True)
class Job:
    """A step of one worker without the others.

    Attributes:
        params: trainable parameters, as a number.
        forward_ms, backward_ms, optimizer_ms: milliseconds, of which at least one is above 0.
        jitter: standard deviation of a step's computation, relative to its mean, drawn for each worker and step from a
            lognormal distribution. The default is what the workers of benchmarks/results/8x1-60.json show when they are alone.
        param_bytes: of a parameter in memory, which buckets are cut by and what the float32 wire and DDP send.
        coding_ns: wire to nanoseconds a parameter that coding and decoding add to a step in which something is sent; for wires
            that are not in it, ``CODING_NS`` of the backend.
    """

    params: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float = 0.0
    jitter: float = 0.01
    param_bytes: int = 4
    coding_ns: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _number("Job: params", self.params, "give the number of trainable parameters, such as 65e6", above=True)
        for name in ("forward_ms", "backward_ms", "optimizer_ms"):
            _number(f"Job: {name}", getattr(self, name), "give milliseconds")
        if self.compute_ms <= 0:
            raise ValueError("Job: forward_ms, backward_ms and optimizer_ms are all 0: give the milliseconds of a step")
        _number("Job: jitter", self.jitter, "0.02 is two percent of a step")
        if self.jitter >= 1:
            raise ValueError(f"Job: jitter must be below 1, got {self.jitter!r}: 0.02 is two percent of a step")
        object.__setattr__(self, "param_bytes", whole("Job: param_bytes", self.param_bytes, "4 for float32"))
        if self.coding_ns is not None and not isinstance(self.coding_ns, Mapping):
            raise ValueError(
                f"Job: coding_ns must be a mapping, got {self.coding_ns!r}: write {{'int8': 3.5}}, or leave it out"
            )
        for wire, cost in (self.coding_ns or {}).items():
            if wire not in WIRE_BYTES:
                raise ValueError(f"Job: coding_ns names {wire!r}, which is no wire: write one of {', '.join(WIRE_BYTES)}")
            _number(f"Job: coding_ns[{wire!r}]", cost, "give nanoseconds a parameter")

    @classmethod
    def of_step(cls, params: float, step_ms: float, *, optimizer_ms: float = 0.0, jitter: float = 0.01) -> Job:
        """A step of ``step_ms`` on one worker alone, of which ``optimizer_ms``; backward takes two thirds of the rest.

        Raises:
            ValueError: as the class; or the optimizer takes longer than the step.
        """
        _number("Job: step_ms", step_ms, "give the milliseconds of a step on one worker alone", above=True)
        _number("Job: optimizer_ms", optimizer_ms, "give milliseconds")
        if optimizer_ms > step_ms:
            raise ValueError(f"Job: optimizer_ms={optimizer_ms:g} is more than step_ms={step_ms:g}: it is a part of the step")
        rest = step_ms - optimizer_ms
        return cls(params, rest / 3, 2 * rest / 3, optimizer_ms, jitter)

    @property
    def compute_ms(self) -> float:
        return self.forward_ms + self.backward_ms + self.optimizer_ms

    def coding_s(self, wire: str, backend: str) -> float:
        """Seconds for coding and decoding all parameters."""
        costs = {**CODING_NS[backend], **(self.coding_ns or {})}
        return costs[wire] * 1e-9 * self.params


@dataclass(frozen=True)
class Choice:
    """A way to train.

    Attributes:
        kind: 'ddp' (PyTorch's), 'ours' (this library, over ``topology``), or 'push': every worker sends to the one 1, 2, 4, ...
            ranks further and takes what comes from as far behind (Assran et al., ICML 2019), overlapped bucket by bucket.
        topology: for 'ours': what ``make_topology`` takes.
        wire: 'float32', 'bfloat16' or 'int8'.
        bucket_mb: upper size of a bucket in MiB, above 0.
        overlap: as the wrapper's: False exchanges at the end of the step.
        extra_ms: what this way adds to a worker's backward (copies, kernels of the exchange), where it is known.
    """

    kind: str
    topology: str | Topology | None = None
    wire: str = "float32"
    bucket_mb: float = 25.0
    overlap: bool = True
    extra_ms: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in ("ddp", "ours", "push"):
            raise ValueError(f"Choice: kind must be 'ddp', 'ours' or 'push', got {self.kind!r}: say who exchanges")
        if self.kind == "ours" and not isinstance(self.topology, (str, Topology)):
            raise ValueError(f"Choice: topology must be a name or a Topology, got {self.topology!r}: such as 'one-peer-exp'")
        if self.kind != "ours" and self.topology is not None:
            raise ValueError(
                f"Choice: topology={self.topology!r} is for kind='ours' only, got kind={self.kind!r}: leave it out"
            )
        if not isinstance(self.wire, str) or self.wire not in WIRE_BYTES:
            raise ValueError(f"Choice: wire must be one of {', '.join(WIRE_BYTES)}, got {self.wire!r}: choose one")
        if self.kind != "ours" and self.wire != "float32":
            raise ValueError(f"Choice: wire={self.wire!r} is for kind='ours' only: {self.kind!r} sends float32")
        if self.kind != "ours" and not self.overlap:
            raise ValueError(f"Choice: overlap=False is for kind='ours', got kind={self.kind!r}: leave it out")
        _number("Choice: bucket_mb", self.bucket_mb, "give MiB, such as 25", above=True)
        _number("Choice: extra_ms", self.extra_ms, "give milliseconds")

    @property
    def topology_name(self) -> str | None:
        """The name that was given, or the title of the topology; None where there is none."""
        return self.topology.title() if isinstance(self.topology, Topology) else self.topology

    @property
    def name(self) -> str:
        """``ddp``, ``push`` or ``ours:TOPOLOGY[:WIRE]``, as the benchmarks name contenders."""
        if self.kind != "ours":
            return self.kind
        return ":".join(["ours", str(self.topology_name)] + [self.wire] * (self.wire != "float32"))

    @property
    def bucket_bytes(self) -> float:
        return self.bucket_mb * _MIB


@dataclass(frozen=True)
class Prediction:
    """What a step of ``choice`` takes.

    Attributes:
        step_ms: the mean over workers and steps, once the first steps are over; where somebody is slow and not all have come to
            the same rate by then, the slowest worker's.
        compute_ms: of it, what a worker computes (coding and ``extra_ms`` included), on the mean worker.
        waited_ms: of it, waiting for others and for links.
        node_bytes: bytes that a node sends to other nodes in a step, the mean over nodes and rounds.
        limit: 'compute', 'coding', 'links between nodes', 'links inside a node', 'the CPU and TCP' (messages that NCCL does not
            take), 'latency' or 'a slow worker'.
        reason: a sentence that says why.
        mixing: the factor by which a step shrinks the consensus error in the long run (0 for DDP, which has none); None if it
            is not known: ``plan`` finds it.
        detour: some of its messages go through the CPU and TCP, though the cluster has NCCL.
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
        shown = {key: getattr(self, key) for key in ("name", "step_ms", "compute_ms", "waited_ms", "node_bytes")}
        choice = self.choice
        shown |= {"kind": choice.kind, "topology": choice.topology_name, "wire": choice.wire, "bucket_mb": choice.bucket_mb}
        shown |= {"overlap": choice.overlap, "extra_ms": choice.extra_ms}
        return shown | {"limit": self.limit, "reason": self.reason, "mixing": self.mixing}
