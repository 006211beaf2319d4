"""Agreement among the living workers: each contributes a text, and all of them get the same texts.

An agreement has a name. The living worker of lowest rank decides when it has a statement of every living worker. The decision
travels back along the paths of the statements. A statement lists the workers that its sender is connected to. Together the
statements form a map of the working connections: a worker is alive if a path leads to it, and statements follow the shortest
path to the worker that decides. A worker opens a new connection only if it has none to a lower rank.

A worker that believes that it decides, and has waited for a while, asks for the missing statements. Its question is flooded
over all connections, so that two workers that both believe it learn of each other.

Workers keep their decisions. If the deciding worker dies, its successor asks all others, and those that know the decision reply
with it. A worker that has lost a connection decides only on statements that are newer than this loss, because their senders
may have decided without it. So two workers get different decisions only if no path connected them at that time: each part of
a partitioned network has decisions of its own. A worker that has lost all its connections for ``dead_after`` counts as lost,
even if it could open new ones.

The class has no sockets, no threads and no clock. ``tests/test_agreement.py`` runs it in a scripted network.
"""

from __future__ import annotations

import enum
import json
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

__all__ = ["Agreements", "Consensus", "Decision", "View"]

# Bits of the version of a statement that count within one incarnation of its sender.
_VERSIONS = 40
# Decisions of each kind (what is before the slash in their names) that are kept for workers that come late.
_KEPT = 64
# After the first two questions the worker that decides asks in one turn of so many.
_SELDOM = 4
# Statements in one message at most. Transports limit the size of messages.
_PART = 1024


class View(enum.Enum):
    """What a worker knows of another one."""

    LINKED = "it is connected, and gives signs of life"
    PENDING = "the connection is broken or silent, and the worker may come back"
    UNKNOWN = "there has been no connection"
    LOST = "it has died or left, or has been silent for too long"


@dataclass(frozen=True)
class Decision:
    """The end of an agreement.

    Attributes:
        texts: of those that take part, by rank in ascending order.
        links: for each of them, those that it is connected to.
    """

    texts: Mapping[int, str]
    links: Mapping[int, frozenset[int]]


class Consensus(ABC):
    """Agreements of the living workers. Used by any thread."""

    @abstractmethod
    def propose(self, name: str, text: str) -> Future[Decision]:
        """Contributes to the agreement ``name``. The result is its decision."""

    @abstractmethod
    def heard(self, name: str) -> frozenset[str]:
        """Texts that others have contributed to an agreement without a decision, as far as this worker has heard."""

    @abstractmethod
    def missing(self, name: str) -> list[int]:
        """The workers that an agreement waits for, as far as this one knows."""


@dataclass(frozen=True)
class _Statement:
    """What a worker contributes (None: nothing yet), and whom it sees. Of two the one of higher version counts."""

    version: int
    text: str | None
    linked: frozenset[int]
    pending: frozenset[int]
    lost: frozenset[int]


_NOTHING = _Statement(0, None, frozenset(), frozenset(), frozenset())


@dataclass
class _Open:
    """An agreement without a decision.

    Attributes:
        statements: by rank.
        askers: the workers that have sent any of them, to which the decision is to be sent.
        hop: the next worker on the way to the deciding one; None if that is this worker.
        sent: for each hop so far, the versions of the statements that it has been sent. A former hop may be the one that
            decides, so it is sent newer versions, too.
        linked: those that this worker was connected to when it last looked.
        stale: the versions of the statements that were known when a connection was lost. Since then their senders may have
            decided without this worker, so it decides on newer ones only.
        turns: how often it was time for a question.
        ways: ``Agreements._ways``, as far as statements since the last look have added to them; None: to be found again.
    """

    statements: dict[int, _Statement] = field(default_factory=dict)
    askers: set[int] = field(default_factory=set)
    hop: int | None = None
    sent: dict[int, dict[int, int]] = field(default_factory=dict)
    linked: frozenset[int] = frozenset()
    stale: dict[int, int] = field(default_factory=dict)
    turns: int = 0
    ways: dict[int, int | None] | None = None

    def lacks(self, rank: int, statement: _Statement) -> bool:
        """Whether a statement of this worker is newer than the known one."""
        return self.statements.get(rank, _NOTHING).version < statement.version


class Agreements:
    """One worker's part in all agreements. Used by one thread.

    Args:
        view: what this worker knows of another one.
        send: sends a message to a connected worker; it may get lost.
        connect: sees to a connection, or to the knowledge that there can be none.
        on_open: called with the name of an agreement and another worker's text, before the decision.
        on_decision: called with its name and the decision.
        incarnation: of this process; those of later incarnations have statements of higher versions.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        view: Callable[[int], View],
        send: Callable[[int, bytes], None],
        connect: Callable[[int], None],
        on_open: Callable[[str, str], None],
        on_decision: Callable[[str, Decision], None],
        incarnation: int = 0,
    ) -> None:
        self._rank, self._world_size = rank, world_size
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._view, self._send, self._connect = view, send, connect
        self._on_open, self._on_decision = on_open, on_decision
        self._open: dict[str, _Open] = {}
        # The newest decisions, and the names of all. A late worker learns that an old one was made without it.
        self._decided: dict[str, Decision] = {}
        self._names: set[str] = set()
        self._version = incarnation << _VERSIONS
        # By rank: what is older was said by a process before the present one.
        self._least: dict[int, int] = {}

    def expand(self, world_size: int) -> None:
        """From now on there can be so many workers. New ones are heard of first in statements, or by ``renew``."""
        self._world_size = max(world_size, self._world_size)

    @property
    def waiting(self) -> bool:
        """Whether this worker waits for a decision, or others may wait for it to pass theirs on."""
        return bool(self._open)

    def missing(self, name: str) -> list[int]:
        """The workers that have not contributed and are waited for, as far as this one knows; empty after the decision."""
        agreement = self._open.get(name)
        if agreement is None:
            return []
        reached = self._ways(agreement).keys()
        came = {rank for rank, statement in agreement.statements.items() if statement.text is not None}
        return sorted({*reached, *self._unclear(agreement, reached)} - came)

    def propose(self, name: str, text: str) -> None:
        """Contributes to an agreement."""
        if name in self._names:
            self._on_decision(name, self._known(name))
            return
        agreement = self._get(name)
        self._speak(agreement, text)
        self._pursue(name, agreement)

    def hear(self, peer: int, message: bytes) -> None:
        """Another worker has sent this message.

        Raises:
            ValueError: it is no such message.
        """
        name, statements, decision, asker = _unpack(message, self._world_size, self._names)
        if name in self._names:
            if decision is None:
                self._send(peer, _pack(name, {}, self._known(name)))
            return
        agreement = self._get(name)
        if decision is not None:
            agreement.askers.discard(peer)
            self._conclude(name, agreement, decision)
            return
        agreement.askers.add(peer)
        asks = asker is not None and self._is_news(agreement, asker, statements[asker])
        for rank, statement in statements.items():
            if not self._is_news(agreement, rank, statement):
                continue
            before = agreement.statements.get(rank, _NOTHING)
            agreement.statements[rank] = statement
            self._see(agreement, rank, before)
            if before.text is None and statement.text is not None:
                self._on_open(name, statement.text)
        if asks and name in self._open:
            own = agreement.statements.get(self._rank)
            if own is None:
                statements[self._rank] = self._state(None)
            else:
                statements[self._rank] = self._speak(agreement, own.text)
                self._send(peer, _pack(name, {self._rank: statements[self._rank]}))
            self._flood(_pack(name, statements, asker=asker), but=peer)
        self._pursue(name, agreement)

    def _is_news(self, agreement: _Open, rank: int, statement: _Statement) -> bool:
        """Not what is known, nor what the process before the present one has said: its question would go round for ever."""
        is_former = statement.version < self._least.get(rank, 0)
        return not is_former and rank != self._rank and agreement.lacks(rank, statement)

    def look(self, *, again: bool) -> None:
        """Looks at the other workers; called once in a while as long as it is ``waiting``. ``again``: asks those that miss, and
        asks more seldom after a while: a question goes over all connections of all workers."""
        for name, agreement in list(self._open.items()):
            own = agreement.statements.get(self._rank)
            if own is not None:
                new = self._state(own.text)
                if replace(new, version=own.version) != own:
                    agreement.statements[self._rank] = new
            elif not (again and self._passes_on(agreement)):
                continue
            agreement.ways = None
            self._pursue(name, agreement)
            agreement.turns += again
            is_due = again and (agreement.turns < 3 or agreement.turns % _SELDOM == 0)
            if is_due and agreement.hop is None and name in self._open:
                self._ask(name, agreement)

    def _passes_on(self, agreement: _Open) -> bool:
        """Whether living workers wait for this decision, to which this one contributes nothing. It may have missed it."""
        said = agreement.statements
        return any(rank in said and said[rank].text is not None for rank in self._ways(agreement))

    def reconnected(self, peer: int) -> None:
        """What was sent to a worker may have been lost."""
        for name, agreement in list(self._open.items()):
            if peer in agreement.sent:
                agreement.sent[peer] = dict.fromkeys(agreement.sent[peer], 0)
                self._pursue(name, agreement)

    def renew(self, rank: int, incarnation: int) -> None:
        """Another process is this worker now: what the one before has said does not count any more."""
        self._least[rank] = incarnation << _VERSIONS
        if rank not in self._others:
            self._others = sorted([*self._others, rank])
        for agreement in self._open.values():
            agreement.statements.pop(rank, None)
            agreement.ways = None
            agreement.sent.pop(rank, None)
            agreement.askers.discard(rank)

    def ask(self, name: str) -> None:
        """Asks for the statements that an agreement misses at once, if this worker decides."""
        agreement = self._open.get(name)
        if agreement is not None and agreement.hop is None:
            self._ask(name, agreement)

    def _ask(self, name: str, agreement: _Open) -> None:
        """Asks all living workers for their statements, which are newer than this question then; or for the decision."""
        own = agreement.statements.get(self._rank)
        own = self._state(None) if own is None else self._speak(agreement, own.text)
        self._flood(_pack(name, {self._rank: own}, asker=self._rank))

    def _flood(self, message: bytes, but: int | None = None) -> None:
        for peer in self._others:
            if peer != but and self._view(peer) is View.LINKED:
                self._send(peer, message)

    def _get(self, name: str) -> _Open:
        if name not in self._open:
            self._open[name] = _Open()
        return self._open[name]

    def _state(self, text: str | None) -> _Statement:
        seen: dict[View, list[int]] = {view: [] for view in View}
        for peer in self._others:
            seen[self._view(peer)].append(peer)
        self._version += 1
        linked, pending, lost = (frozenset(seen[view]) for view in (View.LINKED, View.PENDING, View.LOST))
        return _Statement(self._version, text, linked, pending, lost)

    def _speak(self, agreement: _Open, text: str | None) -> _Statement:
        """A new statement of this worker."""
        agreement.ways = None
        said = agreement.statements[self._rank] = self._state(text)
        return said

    def _pursue(self, name: str, agreement: _Open) -> None:
        """Decides, or sends what is new towards the worker that decides."""
        if name not in self._open:
            return
        linked = self._sight(agreement, self._rank).linked
        has_lost = bool(agreement.linked - linked)
        if has_lost:
            agreement.stale = {rank: said.version for rank, said in agreement.statements.items() if rank != self._rank}
        agreement.linked = linked
        ways = agreement.ways
        if ways is None or self._rank not in agreement.statements:
            ways = agreement.ways = self._ways(agreement)
        agreement.hop = ways[min(ways)]
        if agreement.hop is not None:
            agreement.sent.setdefault(agreement.hop, {})
        for peer, sent in agreement.sent.items():
            if self._view(peer) is not View.LINKED:
                continue
            due = agreement.statements.keys() if peer == agreement.hop else sent.keys()
            news = {
                rank: said
                for rank, said in agreement.statements.items()
                if rank in due and rank != peer and sent.get(rank) != said.version
            }
            if news:
                sent.update({rank: said.version for rank, said in news.items()})
                for first in range(0, len(news), _PART):
                    self._send(peer, _pack(name, dict(islice(news.items(), first, first + _PART))))
        if agreement.hop is None:
            if has_lost and self._rank in agreement.statements:
                self._ask(name, agreement)
            self._decide(name, agreement, ways)

    def _decide(self, name: str, agreement: _Open, ways: dict[int, int | None]) -> None:
        """Decides, as the lowest one that lives, if all of them have come; and connects to those of which nobody knows."""
        below = (peer for peer in self._others if peer < self._rank and self._view(peer) is not View.LOST)
        if (lowest := next(below, None)) is not None:
            self._connect(lowest)
        said, reached = agreement.statements, ways.keys()
        if any(rank not in said or said[rank].text is None for rank in reversed(ways)):  # those that are far come last
            return
        unclear = self._unclear(agreement, reached)
        for peer in unclear.intersection(self._others):
            self._connect(peer)
        is_stale = any(said[rank].version <= agreement.stale.get(rank, 0) for rank in reached - {self._rank})
        if not (unclear or is_stale):
            texts = {rank: said[rank].text or "" for rank in sorted(reached)}
            self._conclude(name, agreement, Decision(texts, {rank: said[rank].linked.intersection(reached) for rank in texts}))

    def _ways(self, agreement: _Open) -> dict[int, int | None]:
        """The living workers, and the first one on a shortest way to each; None for this one."""
        ways: dict[int, int | None] = {self._rank: None}
        self._extend(agreement, ways, self._rank)
        return ways

    def _extend(self, agreement: _Open, ways: dict[int, int | None], start: int) -> None:
        """Adds the workers that are reached by way of ``start``."""
        waiting = deque([start])
        while waiting:
            rank = waiting.popleft()
            for peer in sorted(self._sight(agreement, rank).linked.difference(ways)):
                ways[peer] = peer if ways[rank] is None else ways[rank]
                waiting.append(peer)

    def _see(self, agreement: _Open, rank: int, before: _Statement) -> None:
        """Brings the ways up to date after a new statement. Those that it makes shorter are found with the next look: a search
        for each of n statements takes too long where n is large."""
        ways = agreement.ways
        if before.linked - agreement.statements[rank].linked:
            agreement.ways = None
        elif ways is not None and rank in ways:
            self._extend(agreement, ways, rank)

    def _unclear(self, agreement: _Open, reached: Set[int]) -> set[int]:
        """Others that are waited for: they may come back, or nobody has ever been connected to them."""
        seen = [self._sight(agreement, rank) for rank in reached]
        pending = frozenset[int]().union(*(statement.pending for statement in seen))
        lost = frozenset[int]().union(*(statement.lost for statement in seen))
        return ((set(self._others) - lost) | pending) - reached

    def _sight(self, agreement: _Open, rank: int) -> _Statement:
        if rank == self._rank:
            return agreement.statements.get(rank) or self._state(None)
        return agreement.statements.get(rank, _NOTHING)

    def _known(self, name: str) -> Decision:
        return self._decided.get(name, Decision({}, {}))

    def _conclude(self, name: str, agreement: _Open, decision: Decision) -> None:
        self._open.pop(name, None)
        self._names.add(name)
        self._decided[name] = decision
        kind = name.partition("/")[0]
        alike = [other for other in self._decided if other.partition("/")[0] == kind]
        if len(alike) > _KEPT:
            del self._decided[alike[0]]
        message = _pack(name, {}, decision)
        for peer in agreement.askers:
            if self._view(peer) is not View.LOST:
                self._send(peer, message)
        if self._rank in agreement.statements:
            self._on_decision(name, decision)


def _pack(
    name: str, statements: Mapping[int, _Statement], decision: Decision | None = None, *, asker: int | None = None
) -> bytes:
    """A message. ``asker``: the worker whose question it is, of whom a statement is among ``statements``.

    Many workers say the same, so each text is in it once.
    """
    texts: dict[str | None, int] = {}
    said = [
        [rank, s.version, texts.setdefault(s.text, len(texts)), _short(s.linked), _short(s.pending), _short(s.lost)]
        for rank, s in statements.items()
    ]
    decided = None
    if decision is not None:
        alike: dict[tuple[int, frozenset[int]], list[int]] = {}
        for rank, text in decision.texts.items():
            alike.setdefault((texts.setdefault(text, len(texts)), decision.links.get(rank, frozenset())), []).append(rank)
        decided = [[_short(ranks), at, _short(links)] for (at, links), ranks in alike.items()]
    return json.dumps([name, list(texts), said, decided, asker], separators=(",", ":"), ensure_ascii=False).encode()


def _unpack(
    message: bytes, world_size: int, known: Collection[str] = ()
) -> tuple[str, dict[int, _Statement], Decision | None, int | None]:
    """What ``_pack`` was given. ``known``: names of agreements of which a decision is not read again."""
    try:
        name, texts, said, decided, asker = json.loads(message)
        _check(isinstance(name, str) and isinstance(texts, list))
        _check(all(text is None or isinstance(text, str) for text in texts))
        statements: dict[int, _Statement] = {}
        for rank, version, number, *sets in said:
            linked, pending, lost = (_ranks(text, world_size) for text in sets)
            _check(rank in range(world_size) and type(version) is int and number in range(len(texts)))
            statements[rank] = _Statement(version, texts[number], linked, pending, lost)
        decision = None
        if decided is not None and name in known:
            decision = Decision({}, {})
        elif decided is not None:
            decision = _decision(decided, texts, world_size)
        _check(asker is None or asker in statements)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"no message of an agreement: {message[:100]!r}") from error
    return name, statements, decision, asker


def _decision(decided: list[list[Any]], texts: list[str], world_size: int) -> Decision:
    """What a list of [ranks, number of their text, their links] stands for."""
    found: dict[int, tuple[str, frozenset[int]]] = {}
    for ranks, at, linked in decided:
        _check(None not in texts and at in range(len(texts)))
        said = texts[at], _ranks(linked, world_size)
        found.update(dict.fromkeys(_ranks(ranks, world_size), said))
    return Decision({rank: found[rank][0] for rank in sorted(found)}, {rank: linked for rank, (_, linked) in found.items()})


def _check(is_right: bool) -> None:
    if not is_right:
        raise ValueError("an entry of another type, or a rank that is no worker's")


def _short(ranks: Iterable[int]) -> str:
    """Ranks as spans ("0-4,7"), or as bits in hexadecimal digits after an "x" where that is shorter."""
    spans: list[list[int]] = []
    bits = 0
    for rank in sorted(ranks):
        bits |= 1 << rank
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return text if len(text) <= bits.bit_length() // 4 + 2 else f"x{bits:x}"


def _ranks(text: str, world_size: int) -> frozenset[int]:
    _check(isinstance(text, str))
    if text.startswith("x"):
        bits = int(text[1:], 16)
        _check(0 <= bits < 1 << world_size)
        return frozenset(rank for rank, digit in enumerate(reversed(f"{bits:b}")) if digit == "1")
    found: list[int] = []
    for span in text.split(",") if text else ():
        first, _, last = span.partition("-")
        low, high = int(first), int(last or first)
        _check((found[-1] if found else -1) < low <= high < world_size)
        found.extend(range(low, high + 1))
    return frozenset(found)
