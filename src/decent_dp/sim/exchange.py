"""What the replicas of one process send each other, and what they make of it: the law of ``decent_dp.mixing``.

``start`` and ``finish`` are what a worker's are. Lossless: for all edges of a round at once, on the stacked tensors. Other
wires: the wire's own messages, replica by replica.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from decent_dp.mixing import Gossip, MixRule
from decent_dp.sim.stack import Stack
from decent_dp.topo import Edge, Topology
from decent_dp.wire import Item, Moment, Wire

__all__ = ["Exchange", "LosslessExchange", "WiredExchange"]


class Exchange(ABC):
    """Exchanges of all replicas.

    Args:
        stack: the replicas.
        topology: who mixes with whom.

    Attributes:
        factor: the adaptive factor γ.
        bytes_sent: that the workers together have put on wires. A pair sends a message each, a group of m 2 (m - 1) in all.
    """

    def __init__(self, stack: Stack, topology: Topology) -> None:
        self._stack, self._topology = stack, topology
        self._rule: MixRule = Gossip()
        self.factor = 1.0
        self.bytes_sent = 0

    @abstractmethod
    def start(self, t: int) -> None:
        """Puts the parameters on the wire for round t."""

    @abstractmethod
    def finish(self) -> None:
        """Mixes with what is on the wire, if anything is."""

    def _round(self, t: int) -> list[Edge]:
        self._topology.get_edge(t)  # checks a round that a topology without a period makes up
        return self._topology.round(t)


def _scale(size: int) -> float:
    """Of a group the mean of all comes: the mean of the others is as much further away."""
    return 1.0 if size == 2 else size / (size - 1)


# -- lossless ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The edges of a round that have one size and one weight.

    Attributes:
        rows: their members, edge by edge; None for all replicas in their order.
        partners: of an edge of two, the other member; None for larger ones.
        size: members of an edge.
        pull: 1 - w.
    """

    rows: Tensor | None
    partners: Tensor | None
    size: int
    pull: float


@dataclass(frozen=True)
class _Round:
    parts: tuple[_Part, ...]
    copies: int  # of a replica that are sent in all


class LosslessExchange(Exchange):
    """Values as they are."""

    def __init__(self, stack: Stack, topology: Topology) -> None:
        super().__init__(stack, topology)
        self._params: list[Tensor] = [param.detach() for param in stack.params.values()]
        self._nbytes = sum(param[0].numel() * param.itemsize for param in self._params)
        self._plans: dict[int, _Round] = {}
        self._under_way: list[tuple[_Part, list[Tensor]]] = []

    @torch.no_grad()
    def start(self, t: int) -> None:
        plan = self._plan(t)
        self._under_way = [(part, [_differences(param, part) for param in self._params]) for part in plan.parts]
        self.bytes_sent += plan.copies * self._nbytes

    @torch.no_grad()
    def finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        for part, differences in under_way:
            pull = self.factor * part.pull * _scale(part.size)
            if part.rows is None:
                self._rule.mix(self._params, differences, pull)
                continue
            own = [param.index_select(0, part.rows) for param in self._params]
            self._rule.mix(own, differences, pull)
            for param, value in zip(self._params, own, strict=True):
                param.index_copy_(0, part.rows, value)

    def _plan(self, t: int) -> _Round:
        period = self._topology.period
        key = t if period is None else t % period
        if key not in self._plans:
            if period is None:
                self._plans.clear()
            self._plans[key] = _plan_round(self._round(t), self._stack.n, self._params[0].device)
        return self._plans[key]


def _plan_round(edges: list[Edge], n: int, device: torch.device) -> _Round:
    alike: dict[tuple[int, float], list[Edge]] = {}
    copies = 0
    for edge in edges:
        size = len(edge.ranks)
        if size > 1:
            alike.setdefault((size, edge.weight), []).append(edge)
            copies += 2 * (size - 1)
    parts = []
    for (size, weight), found in alike.items():
        if size == 2:
            ranks = [rank for edge in found for rank in edge.ranks]
            others = {rank: other for edge in found for rank, other in (edge.ranks, edge.ranks[::-1])}
            ranks = sorted(ranks)
            partners = torch.tensor([others[rank] for rank in ranks], device=device)
        else:
            ranks, partners = [rank for edge in found for rank in sorted(edge.ranks)], None
        rows = None if ranks == list(range(n)) else torch.tensor(ranks, device=device)
        parts.append(_Part(rows, partners, size, 1.0 - weight))
    return _Round(tuple(parts), copies)


def _differences(param: Tensor, part: _Part) -> Tensor:
    """What comes less what is sent, in float32 at least, for the rows of a part."""
    wide = torch.promote_types(param.dtype, torch.float32)
    own = param if part.rows is None else param.index_select(0, part.rows)
    if part.partners is not None:
        came = param.index_select(0, part.partners).to(wide)
        return came.sub_(own)
    groups = own.view(-1, part.size, *own.shape[1:])
    mean = groups.sum(1, keepdim=True, dtype=wide).div_(part.size).to(param.dtype)
    return torch.sub(mean.to(wide), groups).flatten(0, 1)


# -- other wires ---------------------------------------------------------------------------------------------------------


class _Line:
    """One replica's wire for its parameters of one dtype and device, and what it has on it.

    Args:
        wire: the kind.
        indices: the parameters' numbers among the trainable ones.
        values: their values, as 1-D views.
    """

    def __init__(self, wire: type[Wire], rank: int, indices: list[int], values: list[Tensor]) -> None:
        self.rank, self.values = rank, values
        items = [Item(index, value.numel()) for index, value in zip(indices, values, strict=True)]
        self.wire = wire(items, values[0].dtype, values[0].device)
        # What this replica has told the members of its next edge.
        self._announced: bytes | None = None
        self.sent: Tensor | None = None

    def announce(self) -> bytes:
        """What the members of this round's edge were told, a round ahead; tells those of the next one."""
        now = self.wire.announcement(self.values) if self._announced is None else self._announced
        self._announced = self.wire.announcement(self.values)
        return now

    def encode(self, t: int, heard: list[bytes]) -> Tensor:
        sent = torch.empty(self.wire.nbytes, dtype=torch.uint8, device=self.wire.device)
        for _ in self.wire.encode(self.values, sent, Moment(t, self.rank), heard):
            pass
        self.sent = sent
        return sent

    def mix(self, received: Tensor, rule: MixRule, pull: float) -> None:
        assert self.sent is not None
        for run, difference, unit in self.wire.differences(self.sent, received):
            rule.mix([self.values[run.item][run.start : run.stop]], [difference], pull * unit)
        self.sent = None


class WiredExchange(Exchange):
    """Values as a wire's messages stand for them.

    Args:
        wire: the kind.
    """

    def __init__(self, stack: Stack, topology: Topology, wire: type[Wire]) -> None:
        super().__init__(stack, topology)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        for index, param in enumerate(stack.params.values()):
            kinds.setdefault((param.dtype, param.device), []).append(index)
        rows = [stack.rows(i) for i in range(stack.n)]
        # By kind, then by replica.
        self._lines = [
            [_Line(wire, i, indices, [rows[i][index] for index in indices]) for i in range(stack.n)]
            for indices in kinds.values()
        ]
        self._under_way: list[tuple[_Line, Tensor, Edge]] = []

    @property
    def rejected(self) -> int:
        """Runs of parameters that were not mixed, as replicas were further apart than the wire could tell."""
        return sum(line.wire.rejected for lines in self._lines for line in lines)

    @torch.no_grad()
    def start(self, t: int) -> None:
        edges = self._round(t)
        self._under_way = []
        for lines in self._lines:
            announced = [line.announce() if line.wire.announces else b"" for line in lines]
            for edge in edges:
                if len(edge.ranks) > 1:
                    self._under_way += self._exchange(edge, t, lines, announced)

    def _exchange(self, edge: Edge, t: int, lines: list[_Line], announced: list[bytes]) -> Iterator[tuple[_Line, Tensor, Edge]]:
        members = [lines[rank] for rank in sorted(edge.ranks)]
        heard = [announced[line.rank] for line in members] if members[0].wire.announces else []
        sent = [line.encode(t, heard) for line in members]
        self.bytes_sent += 2 * (len(members) - 1) * members[0].wire.nbytes
        if len(members) == 2:
            yield members[0], sent[1], edge
            yield members[1], sent[0], edge
            return
        # As one node would: every piece's root sums all messages.
        wire, mean = members[0].wire, torch.empty_like(sent[0])
        for piece in wire.pieces:
            there = slice(piece.start, piece.stop)
            wire.combine(piece, [message[there] for message in sent], [1] * len(sent), mean[there], Moment(t, -1))
        for line in members:
            yield line, mean, edge

    @torch.no_grad()
    def finish(self) -> None:
        under_way, self._under_way = self._under_way, []
        for line, received, edge in under_way:
            line.mix(received, self._rule, self.factor * (1.0 - edge.weight) * _scale(len(edge.ranks)))
