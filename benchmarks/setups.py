"""Set-ups (machines and links) and contenders, by their names on the command line. Needs no torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

__all__ = [
    "BLOCKS",
    "GOSSIP",
    "OURS",
    "PARAMETERS",
    "PUBLISHED",
    "WIDTH",
    "WIRE_BYTES",
    "Contender",
    "Setup",
    "choose_contenders",
    "of_replicas",
]

BLOCKS, WIDTH, HIDDEN = 8, 256, 1024
# A block: LayerNorm (scale, bias), Linear to HIDDEN and Linear back.
PARAMETERS = BLOCKS * (2 * WIDTH + (WIDTH * HIDDEN + HIDDEN) + (HIDDEN * WIDTH + WIDTH))
FORWARD_MS = 25.0  # an emulated accelerator, a block; its backward takes twice as long
EMULATED_ROWS = 4  # so few that the processor's own work vanishes beside the emulated accelerator's
REAL_ROWS = 2560  # of all workers together: about 350 ms per step on two cores

PUBLISHED = "decent-dp-0.2.3"
PUBLISHED_TOPOLOGIES = ("complete", "ring", "one-peer-exp", "alternating-exp-ring")
WIRE_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Setup:
    """Nodes, workers per node, and the links.

    Attributes:
        nodes: network namespaces.
        local: workers per node.
        rate: of each node's link and direction, in Mbit/s (10^6 bits); None if it is not shaped.
        real: compute on the processor; otherwise it is slept through, as beside an accelerator.
    """

    nodes: int
    local: int
    rate: float | None
    real: bool

    @classmethod
    def parse(cls, name: str) -> Setup:
        """``8x1-60``: 8 nodes x 1 worker, 60 Mbit/s, emulated. ``real-8x1-200``: real compute. ``real-2``: one node of 2.

        Raises:
            ValueError: the name is none of these.
        """
        found = re.fullmatch(r"(real-)?(?:(\d+)x)?(\d+)(?:-(\d+(?:\.\d+)?))?", name)
        if found is None or (found[2] is None and found[4] is not None):
            raise ValueError(f"a set-up is written [real-]NODESxWORKERS[-MBIT], such as 8x1-60 or real-2; got {name!r}")
        setup = cls(int(found[2] or 1), int(found[3]), float(found[4]) if found[4] else None, found[1] is not None)
        if not 1 <= setup.nodes <= 200 or setup.local < 1 or setup.rate == 0:
            raise ValueError(f"set-up {name!r}: 1 to 200 nodes, at least one worker per node, and a rate above 0")
        return setup

    @property
    def world_size(self) -> int:
        return self.nodes * self.local

    @property
    def rows(self) -> int:
        """A worker's batch."""
        return max(1, REAL_ROWS // self.world_size) if self.real else EMULATED_ROWS

    @property
    def emulated_ms(self) -> float | None:
        """The computation of a step; None if it is real and must be measured."""
        return None if self.real else 3 * FORWARD_MS * BLOCKS

    def words(self) -> str:
        workers = f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.local} worker{'s' * (self.local > 1)}"
        link = "links not limited" if self.rate is None else f"{self.rate:g} Mbit/s per link"
        return f"{workers}, {link}, {'real compute' if self.real else 'emulated accelerator'}"


# Kinds of contenders with this library: those of gossip(), and the wrapper, too.
GOSSIP = ("gossip", "tolerant", "plain", "worker")
# Topologies of workers on nodes; with others, gossip() takes a node as one replica.
OF_WORKERS = ("hierarchical", "alternating-exp-ring")
OURS = ("ours", *GOSSIP)


@dataclass(frozen=True)
class Contender:
    """A contender and its options.

    Attributes:
        kind: 'alone', 'ddp', the published package, 'ours' (the wrapper), 'gossip' (the user's own optimizer), 'tolerant' (the
            same with ``faults=Tolerate()``), 'plain' (the same with ``encrypt=False``) or 'worker' (with ``replica="worker"``).
        topology: of all but the first two.
    """

    kind: str
    topology: str | None = None
    wire: str = "float32"

    @classmethod
    def parse(cls, name: str) -> Contender:
        """``alone``, ``ddp``, ``decent-dp-0.2.3:TOPOLOGY``, ``ours:TOPOLOGY[:WIRE]``, or that with another kind of ``OURS``.

        Raises:
            ValueError: the name is none of these.
        """
        kind, *rest = name.split(":")
        ours = dict.fromkeys(OURS, (1, 2))
        fits = {"alone": (0,), "ddp": (0,), PUBLISHED: (1,), **ours}.get(kind, ())
        if len(rest) not in fits or (len(rest) == 2 and rest[1] not in WIRE_BYTES):
            raise ValueError(
                f"a contender is alone, ddp, {PUBLISHED}:TOPOLOGY, ours:TOPOLOGY[:{'|'.join(WIRE_BYTES)}] (the wrapper) or "
                f"gossip:TOPOLOGY[:…] (the user's own optimizer), tolerant:TOPOLOGY[:…] (with faults=), "
                f"plain:TOPOLOGY[:…] (with encrypt=False) or worker:TOPOLOGY[:…] (with replica='worker'); got {name!r}"
            )
        return cls(kind, *rest)

    @property
    def name(self) -> str:
        parts = [self.kind, self.topology, None if self.wire == "float32" else self.wire]
        return ":".join(part for part in parts if part)


def of_replicas(setup: Setup, contender: Contender) -> Setup:
    """The nodes and workers that the contender's topology counts."""
    by_node = contender.kind in GOSSIP and contender.kind != "worker" and contender.topology not in OF_WORKERS
    return replace(setup, local=1) if by_node and setup.nodes > 1 else setup


def catalogue(setup: Setup) -> list[Contender]:
    """All contenders that a pattern on the command line can match."""
    # Not above: the workers of the published package import this module, and have that package's topologies.
    from decent_dp.topo.registry import names_that_fit

    fitting = names_that_fit(setup.world_size, setup.local)
    names = [name for name in fitting if setup.world_size > 2 or name in ("complete", "one-peer-exp")]
    published = [name for name in names if name in PUBLISHED_TOPOLOGIES]
    replicas: list[str] = []
    if setup.nodes > 1 < setup.local:  # a node is a replica, but with these topologies
        replicas = [*(name for name in names_that_fit(setup.nodes, 1) if name not in OF_WORKERS), *OF_WORKERS]
        replicas = [name for name in replicas if name in names or name not in OF_WORKERS]
    return [
        Contender("alone"),
        Contender("ddp"),
        # With one worker per node the published package has groups of one here, and divides by zero.
        *(Contender(PUBLISHED, name) for name in published if name != "alternating-exp-ring" or setup.local > 1),
        *(Contender("ours", name, wire) for name in names for wire in WIRE_BYTES),
        *(Contender("gossip", name, wire) for name in (replicas or names) for wire in WIRE_BYTES),
    ]


def default_contenders(setup: Setup) -> list[Contender]:
    """All topologies in float32, and every compression for the topology that suits the nodes."""
    if setup.world_size <= 2:
        best, others = "one-peer-exp", []
    elif setup.local == 1:
        best, others = "one-peer-exp", ["complete", "ring", "alternating-exp-ring"]
    else:
        best, others = "alternating-exp-ring", ["complete", "ring", "one-peer-exp"]
    published = ["one-peer-exp", best] if best != "one-peer-exp" else [best]
    return [
        Contender("alone"),
        Contender("ddp"),
        *(Contender(PUBLISHED, name) for name in published),
        *(Contender("ours", name) for name in others),
        *(Contender("ours", best, wire) for wire in WIRE_BYTES),
        *(Contender("gossip", "base-2" if setup.nodes > 1 < setup.local else best, wire) for wire in WIRE_BYTES),
    ]


def choose_contenders(setup: Setup, names: Sequence[str]) -> list[Contender]:
    """The contenders in ``names`` (with patterns ``*`` and ``?`` over the catalogue); without names, the usual ones."""
    if not names:
        return default_contenders(setup)
    chosen: dict[Contender, None] = {}
    for name in names:
        if not any(sign in name for sign in "*?["):
            chosen[Contender.parse(name)] = None
            continue
        found = [contender for contender in catalogue(setup) if _fits(contender, name)]
        if not found:
            raise ValueError(f"no contender fits the pattern {name!r}")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def _fits(contender: Contender, pattern: str) -> bool:
    """Matches also 'ours:*:float32', although the name omits float32."""
    return any(fnmatch.fnmatchcase(name, pattern) for name in (contender.name, f"{contender.name}:{contender.wire}"))
