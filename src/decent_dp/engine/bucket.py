"""A bucket: tensors, their compression, the rule's state for them, and the exchange in flight."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from decent_dp.compression import Compression, FlatTensor, part_of
from decent_dp.engine.layout import FlatBuffer
from decent_dp.rules import Gossip, Round, Rule
from decent_dp.rules.rule import apply_rule, group_scale, mixing_rate
from decent_dp.topo import Edge, Topology, schedule
from decent_dp.transport import Handle

__all__ = ["Bucket", "Edit", "InFlight"]

# Called with the weighted sum over the other members of an edge, one tensor per parameter in its shape; may change it in place.
Edit: TypeAlias = Callable[[Edge, list[Tensor]], None]


@dataclass(frozen=True)
class InFlight:
    """An exchange that was started. It carries its own round and edge, so that it is finished as it was started.

    Attributes:
        handle: None if this worker sits the round out.
        near: the values that were sent, or about those, one per ``compression.tensors``: an edit needs them to decode its own
            message.
        pull: the factor of what this worker takes, because of the replicas' weights (``Topology._pull``).
    """

    round: Round
    edge: Edge
    handle: Handle | None = None
    near: Sequence[Tensor] = ()
    pull: float = 1.0

    @property
    def sits_out(self) -> bool:
        """Whether this worker exchanges nothing in the round."""
        return len(self.edge.ranks) == 1

    def due(self, topology: Topology, round_: int) -> bool:
        """Whether it ends in round ``round_`` of its bucket's topology."""
        # The next exchange ends it, too, if the topology changes to one with shorter turns.
        over = round_ - self.round.number >= schedule.turn_of(topology, self.round.number).stage.time
        return over or schedule.turn_of(topology, round_).mixes


class Bucket:
    """Tensors of one dtype and device that are exchanged together.

    Args:
        number: identifies its messages; never reused within an engine.
        topology: the groups that mix in each round.

    Attributes:
        in_flight: the exchange that was started, or the round that this worker sits out; None before the first round.
        edit: called with the sum that is mixed in, which it may change; None for no change.
        stale: names of tensors whose values were replaced, so that the difference in flight does not belong to them.
        sends_copies: a proposal stays as it is when the replica moves on.
    """

    def __init__(self, number: int, buffer: FlatBuffer, compression: type[Compression], rule: Rule, topology: Topology) -> None:
        self.number = number
        self.topology = topology
        self.buffer = buffer
        self.rule = rule
        slots, plan = buffer.plan.slots, buffer.plan
        if compression.by_parameter or buffer.flat is None:
            tensors = [FlatTensor(slot.index, slot.spec.numel, slot.spec.rows) for slot in slots]
        else:
            tensors = [FlatTensor(slots[0].index, plan.numel)]
        self.compression = compression(tensors, plan.dtype, plan.device)
        # What needs hints is coded when the others are in the exchange, who may be slower. On a GPU the replica waits for them,
        # as the kernels would stand behind those of the next backward.
        self.sends_copies = compression.needs_hints and plan.device.type == "cpu"
        self.in_flight: InFlight | None = None
        self.edit: Edit | None = None
        self.stale: set[str] = set()
        # Names of stale tensors whose rule's state still belongs to the old values.
        self._outdated: set[str] = set()
        # Allocated at the first exchange, so that a single worker (n = 1) never does.
        self._messages: tuple[Tensor, Tensor] | None = None
        self._copies: list[Tensor] = []
        with torch.no_grad():
            self.states = [rule.state(value) for value in self.values]
            if topology.world_size > 1:
                self._know(buffer.names, {})

    @property
    def values(self) -> list[Tensor]:
        """The values, one per ``compression.tensors``."""
        return self.buffer.values(by_parameter=self.compression.by_parameter)

    @property
    def messages(self) -> tuple[Tensor, Tensor]:
        """The sent and the received message."""
        if self._messages is None:
            device, most = self.buffer.plan.device, self.compression.most_nbytes
            sent, received = (torch.empty(most, dtype=torch.uint8, device=device) for _ in range(2))
            self._messages = sent, received
        nbytes, (sent, received) = self.compression.nbytes, self._messages
        return self._messages if nbytes == len(sent) else (sent[:nbytes], received[:nbytes])

    def first_nonfinite(self, message: Tensor) -> str:
        """Returns the name of the first tensor with a NaN or an infinity in a message; '?' if the message does not show it."""
        found = self.compression.first_nonfinite(message)
        if found is None:
            return "?"
        tensor, element = found
        if len(self.compression.tensors) < len(self.buffer.names):  # one flat tensor holds all of them
            return next(s.spec.name for s in reversed(self.buffer.plan.slots) if s.offset <= element and s.spec.numel)
        return self.buffer.names[tensor]

    # -- the rule -----------------------------------------------------------------------------------------------------

    def propose(self, round: Round, *, for_later: bool = False) -> list[Tensor]:
        """Returns the rule's proposal to the neighbours, one per ``compression.tensors``.

        Args:
            for_later: the replica may move on before the proposal is coded.
        """
        proposal = [self.rule.propose(value, state, round) for value, state in zip(self.values, self.states, strict=True)]
        # An edit sees what was sent as numbers modulo 256, when the replica has moved on.
        if not (for_later and (self.sends_copies or (self.edit is not None and self.compression.needs_hints))):
            return proposal
        self._copies = self._copies or [torch.empty_like(value) for value in proposal]
        torch._foreach_copy_(self._copies, proposal)
        return self._copies

    def mix(self, in_flight: InFlight, factor: float) -> None:
        """Applies the rule to the received message."""
        factor *= in_flight.pull
        with self._stale_preserved() as some:
            if some and self.edit is not None:
                self._mix_edited(in_flight, factor, self.edit)
            elif some:
                self._apply(in_flight.round, mixing_rate(in_flight.edge, factor))
                self.buffer.written()

    def _apply(self, round: Round, rate: float) -> None:
        """Applies the rule to ``rate`` times the difference of the two messages."""
        values = self.values
        if type(self.rule) is Gossip:
            self.compression.mix(values, *self.messages, rate)
            return
        for block, difference, unit in self.compression.differences(*self.messages):
            state = {key: part_of(tensor, block) for key, tensor in self.states[block.tensor].items()}
            apply_rule(self.rule, part_of(values[block.tensor], block), state, difference, rate * unit, round)

    def mix_nothing(self, round: Round) -> None:
        """Notifies the rule of a round in which nothing arrived."""
        if not self.rule.acts_alone:
            self.stale.clear()
            return
        with self._stale_preserved() as some:
            if some:
                for value, state in zip(self.values, self.states, strict=True):
                    self.rule.apply(value, state, None, round)
                self.buffer.written()

    @contextlib.contextmanager
    def _stale_preserved(self) -> Iterator[bool]:
        """Context manager that restores stale tensors after the rule has written to all tensors.

        Yields whether there are tensors that are not stale. If there are none, nothing may be written, because a dropped
        bucket may belong to a model that trains on.
        """
        some = len(self.stale) < len(self.buffer.names)
        named = [(value, *state.values()) for name, value, state in self._named() if name in self.stale] if self.stale else []
        kept = [(tensor, tensor.clone()) for tensors in named for tensor in tensors] if some else []
        yield some
        for tensor, value in kept:
            tensor.copy_(value)
        self.stale.clear()

    def _mix_edited(self, in_flight: InFlight, factor: float, edit: Edit) -> None:
        plan, weight = self.buffer.plan, 1.0 - in_flight.edge.weight
        scale = group_scale(in_flight.edge)
        others = torch.empty(plan.numel, dtype=plan.dtype, device=plan.device)
        own = torch.empty_like(others)
        firsts = [0, *itertools.accumulate(tensor.numel for tensor in self.compression.tensors)]

        def place(flat: Tensor, tensor: int, start: int, stop: int) -> Tensor:
            return flat[firsts[tensor] + start : firsts[tensor] + stop]

        for block, proposal in self.compression.proposals(in_flight.near, self.messages[0]):
            for flat in (own, others):
                place(flat, block.tensor, block.start, block.stop).copy_(proposal)
        for block, difference, unit in self.compression.differences(*self.messages):
            if difference is not None:
                place(others, block.tensor, block.start, block.stop).add_(difference, alpha=scale * unit)
        others.mul_(weight)
        edit(in_flight.edge, self.buffer.views(others))
        if weight:
            others.div_(weight)
        for number, value in enumerate(self.values):
            difference = place(others, number, 0, len(value)) - place(own, number, 0, len(value))
            apply_rule(self.rule, value, self.states[number], difference, factor * weight, in_flight.round)
        self.buffer.written()

    def mark_stale(self, names: set[str]) -> None:
        """Notes that the values of these tensors are replaced."""
        self.stale |= names
        self._outdated |= names

    @torch.no_grad()
    def renew(self) -> None:
        """Resets the rule's state of the tensors whose values were replaced, and what the compression knows of them."""
        for name, value, state in self._named() if self._outdated else ():
            if name in self._outdated:
                for key, fresh in self.rule.state(value).items():
                    state[key].copy_(fresh)
        if self._outdated:
            self._know(self._outdated, {})
        self._outdated.clear()

    def _know(self, names: Iterable[str], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Lets the compression know the present values of these tensors, and what was saved of it."""
        if self.compression.by_parameter:  # one flat tensor for all parameters has no state
            pairs = zip(self.buffer.names, self.values, strict=True)
            entries = [{**saved.get(name, {}), **({"known": value} if name in names else {})} for name, value in pairs]
            self.compression.load_state(entries)

    def _named(self) -> Iterable[tuple[str, Tensor, dict[str, Tensor]]]:
        """Yields (name, values, rule's state) of each tensor, as 1-D views."""
        if self.buffer.flat is None or self.compression.by_parameter:
            yield from zip(self.buffer.names, self.values, self.states, strict=True)
            return
        for slot in self.buffer.plan.slots:
            there = slice(slot.offset, slot.offset + slot.spec.numel)
            yield slot.spec.name, self.values[0][there], {key: tensor[there] for key, tensor in self.states[0].items()}

    # -- saving and resuming -----------------------------------------------------------------------------

    def rule_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns the rule's state by tensor name, in the tensor's shape; the tensors are live."""
        self.renew()
        specs = {slot.spec.name: slot.spec for slot in self.buffer.plan.slots}
        return {
            name: {key: t.as_strided(specs[name].shape, specs[name].stride, t.storage_offset()) for key, t in state.items()}
            for name, _, state in self._named()
        }

    def load_rule_state(self, by_name: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads the result of ``rule_state``.

        Raises:
            ValueError: an entry is missing or has another shape; names the tensor.
        """
        for name, own in self.rule_state().items():
            saved = by_name.get(name, {})
            for key, tensor in own.items():
                found = saved.get(key)
                if found is None or found.shape != tensor.shape:
                    was = "is missing" if found is None else f"was saved as {tuple(found.shape)}"
                    raise ValueError(
                        f"'{key}' in the state of the rule for parameter '{name}' {was}, and should be {tuple(tensor.shape)}"
                    )
                tensor.copy_(found)

    def compression_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns the compression's state by tensor name; the tensors may be live."""
        return {name: entries for name, entries in zip(self.buffer.names, self.compression.state(), strict=False) if entries}

    def load_compression_state(self, by_name: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads the result of ``compression_state``, which may come from other buckets, or from another compression."""
        self._know(self.buffer.names, by_name)
