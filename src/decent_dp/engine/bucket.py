"""A bucket: tensors, their compression, the rule's state for them, and the exchange in flight."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from decent_dp.compression import Compression, FlatTensor, part_of
from decent_dp.engine.layout import FlatBuffer
from decent_dp.rules import Gossip, Round, Rule
from decent_dp.rules.base import apply_rule, group_scale, mixing_rate
from decent_dp.topo import Edge, Topology
from decent_dp.transport import Handle

__all__ = ["Bucket", "Edit", "InFlight"]

# Called with the weighted sum over the other members of an edge, one tensor per parameter in its shape; may change it in place.
Edit: TypeAlias = Callable[[Edge, list[Tensor]], None]


@dataclass(frozen=True)
class InFlight:
    """An exchange that was started. It carries its own round and edge, so that it is finished as it was started.

    Attributes:
        hint: this worker's scale hint for it.
        handle: None if this worker sits the round out.
        near: the values that were sent, or about those, one per ``compression.tensors``: an edit needs them to decode its own
            message. None after a restart.
        hole: the other worker of the topology's edge is gone or silent, so that this one sits the round out.
    """

    round: Round
    edge: Edge
    hint: bytes = b""
    handle: Handle | None = None
    near: list[Tensor] | None = None
    hole: bool = False

    @property
    def sits_out(self) -> bool:
        """Whether this worker exchanges nothing in the round."""
        return len(self.edge.ranks) == 1

    def due(self, topology: Topology, round_: int) -> bool:
        """Whether it ends in round ``round_`` of its bucket's topology."""
        # The next exchange ends it, too, if the topology changes to one with shorter turns.
        over = round_ - self.round.number >= topology._time(self.round.number)
        return over or Topology.mixes(topology, round_)


class Bucket:
    """Tensors of one dtype and device that are exchanged together.

    Args:
        number: identifies its messages; never reused within an engine.
        topology: the groups that mix in each round.

    Attributes:
        in_flight: the exchange that was started, or the round that this worker sits out; None before the first round.
        stale: names of tensors whose values were replaced, so that the difference in flight does not belong to them.
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
        self.in_flight: InFlight | None = None
        self.stale: set[str] = set()
        # Names of stale tensors whose rule's state still belongs to the old values.
        self._outdated: set[str] = set()
        # Allocated at the first exchange, so that a single worker (n = 1) never does.
        self._messages: tuple[Tensor, Tensor] | None = None
        with torch.no_grad():
            self.states = [rule.state(value) for value in self.values]

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

    def propose(self, round: Round) -> list[Tensor]:
        """Returns the rule's proposal to the neighbours, one per ``compression.tensors``."""
        return [self.rule.propose(value, state, round) for value, state in zip(self.values, self.states, strict=True)]

    def mix(self, in_flight: InFlight, factor: float, edit: Edit | None = None) -> None:
        """Applies the rule to the received message."""
        with self._stale_preserved() as some:
            if some and edit is not None:
                self._mix_edited(in_flight, factor, edit)
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
        firsts = [0]
        for tensor in self.compression.tensors:
            firsts.append(firsts[-1] + tensor.numel)

        def place(flat: Tensor, tensor: int, start: int, stop: int) -> Tensor:
            return flat[firsts[tensor] + start : firsts[tensor] + stop]

        near = self.values if in_flight.near is None else in_flight.near
        for block, proposal in self.compression.proposals(near, self.messages[0]):
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
        """Resets the rule's state of the tensors whose values were replaced."""
        for name, value, state in self._named() if self._outdated else ():
            if name in self._outdated:
                for key, fresh in self.rule.state(value).items():
                    state[key].copy_(fresh)
        self._outdated.clear()

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

    def saved_exchange(self) -> dict[str, dict[str, Tensor]]:
        """Returns the state of the exchange by tensor name: parts of the message, and of its hint.

        The entries of a tensor do not depend on its bucket:

            sent            the codes in flight, 1-D, in the order of its memory
            records         the records in flight, float64 of shape (blocks, fields)
            hint_in_flight  the hint for the exchange in flight, int8
            ranges          the compression's ranges, float64 of shape (blocks, 4)

        Entries that a compression does not need, or that are not in flight, are missing. Tensors may be views of the
        message, which are valid until the next exchange starts.
        """
        sending = self.in_flight if self.in_flight is not None and not self.in_flight.sits_out else None
        return self._exchange_entries(None if sending is None else sending.hint)

    def _exchange_entries(self, hint: bytes | None) -> dict[str, dict[str, Tensor]]:
        """The entries for the message to be sent and its hint; None: no exchange is in flight."""
        compression, by_tensor = self.compression, self.compression.state()
        if hint is not None:
            for entries, parts in zip(by_tensor, compression.unpack(self.messages[0]), strict=True):
                entries.update(parts)
            if compression.needs_hints:
                for entries, part in zip(by_tensor, compression.hint_by_tensor(hint), strict=True):
                    entries["hint_in_flight"] = part
        if len(by_tensor) < len(self.buffer.names):  # one flat tensor for all, which has codes only
            sent, slots = by_tensor[0].get("sent"), self.buffer.plan.slots
            by_tensor = [{} if sent is None else {"sent": sent[slot.offset : slot.offset + slot.spec.numel]} for slot in slots]
        return dict(zip(self.buffer.names, by_tensor, strict=True))

    def load_exchange(self, by_name: Mapping[str, Mapping[str, Tensor]], *, sending: bool) -> bytes | None:
        """Loads the result of ``saved_exchange``, which may come from other buckets.

        Args:
            sending: whether the exchange in flight is resumed.

        Returns:
            The hint of the exchange in flight; None if it is not resumed.

        Raises:
            ValueError: an entry is missing, or has another shape or dtype; names the tensor.
        """
        compression, device = self.compression, self.buffer.plan.device
        blank = bytes(compression.hint_nbytes)
        wanted = self._exchange_entries(blank if sending else None)
        entries = [_checked(name, by_name.get(name, {}), own) for name, own in wanted.items()]
        if compression.needs_hints:
            compression.load_state(entries)
        if not sending:
            return None
        parts: list[Mapping[str, Tensor]] = [{**entry, "sent": entry["sent"].to(device)} for entry in entries]
        if len(compression.tensors) < len(parts):
            parts = [{"sent": torch.cat([part["sent"] for part in parts])}]
        compression.pack(parts, self.messages[0])
        return compression.hint_of([entry["hint_in_flight"] for entry in entries]) if compression.needs_hints else b""

    def edge_state(self) -> dict[str, dict[str, Tensor]]:
        """Returns the compression's state per edge by tensor name; only compressions with ``by_parameter`` have any."""
        # One flat tensor for all parameters has no state.
        return {
            name: entries for name, entries in zip(self.buffer.names, self.compression.edge_state(), strict=False) if entries
        }

    def load_edge_state(self, by_name: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Loads the result of ``edge_state``, which may come from other buckets."""
        if len(self.compression.tensors) == len(self.buffer.names):
            self.compression.load_edge_state([by_name.get(name, {}) for name in self.buffer.names])


def _checked(name: str, entries: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    for key, tensor in wanted.items():
        found = entries.get(key)
        if found is None or found.shape != tensor.shape or found.dtype != tensor.dtype:
            was = "is missing" if found is None else f"is {tuple(found.shape)} {found.dtype}"
            raise ValueError(
                f"'{key}' of the exchange of parameter '{name}' {was}, and should be {tuple(tensor.shape)} {tensor.dtype}"
            )
    return entries
