"""Agreement among the living workers: each contributes a text, and all of them get the same texts.

An agreement has a name. The living worker of lowest rank decides, when it has a text of every living worker: each sends its own
there. Where two workers have no working connection, one that has a connection to both passes texts and results on. A worker
that no other one hears, for ``dead_after``, counts as dead.

If the deciding worker dies, its successor needs new texts of all living workers. Each of them says with its text which worker
it stands by, and takes a result of another one to that worker only. So a result that one of the living knows, of a worker that
has died, becomes the result of all. Two workers get different results only if no third one was connected to both: each part of
a partitioned network has results of its own.

A worker that leaves says to all what it has contributed. That counts, unlike the texts of workers that die.

Results are kept for workers that come late, up to a number of them for each kind of agreement.

The class has no sockets, no threads and no clock. ``tests/test_agreement.py`` runs it in a scripted network.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from decent_dp.transport.messages import AGREEMENT, Key

__all__ = ["NO_ROUND", "Agreements", "Links", "PeerView"]

# Results of each kind (what is before the slash in their names) that are kept for workers that come late.
_KEPT = 64
# After the first two questions the worker that decides asks in one turn of so many.
_SELDOM = 4
# Later than all rounds: of an agreement in which all take part.
NO_ROUND = 2**62
# The kinds of messages.
_SAY = "say"
_ASK = "ask"
_RESULT = "result"


class PeerView(enum.Enum):
    """What a worker knows of another one."""

    LINKED = "it is connected, and gives signs of life"
    PENDING = "the connection is broken or silent, and the worker may come back"
    UNKNOWN = "there has been no connection"
    LOST = "it has died or left, or has been silent for too long"


class Links(Protocol):
    """The connections of a worker, as agreements and collectives use them: in the transport's thread, but for ``call``."""

    def call(self, command: Callable[[], None], /) -> None:
        """Runs it in the transport's thread."""

    def view(self, peer: int, /) -> PeerView:
        """What this worker knows of another one."""

    def send_note(self, peer: int, key: Key, text: bytes, /) -> None:
        """Sends it to a connected worker; it may get lost."""

    def want(self, peer: int, /) -> None:
        """Sees to a connection, or to the knowledge that there can be none."""

    def first_round(self, peer: int, /) -> int:
        """The first round of another worker's process; -1: it began the run."""


@dataclass(frozen=True)
class _Statement:
    """What a worker contributes.

    Attributes:
        stands_by: the rank of the worker that is to decide.
        round: processes whose first round is not before this one take no part.
        incarnation: of its process.
        asks: the others are to be asked for theirs at once.
    """

    text: str
    stands_by: int
    round: int
    incarnation: int
    asks: bool


@dataclass
class _Open:
    """An agreement without a result.

    Attributes:
        among: the workers that take part; None: all.
        own: what this worker contributes; None: nothing yet.
        statements: of other workers, by rank.
        via: for each of them, the worker that has sent it, to which the result is to be sent.
        sent: the statements that were sent, by the worker that they are of: what, and to whom.
        stands_by: the worker whose result counts here; -1 before the first statement.
        missing: the workers that are waited for, as far as this one knows.
        turns: how often it was time for a question.
        is_asked: somebody wants all to learn of it at once; ``has_asked``: this worker has told them.
        heard: the workers that have sent something about it.
        told: the workers that were told, since the last look, whom this one is connected to.
    """

    among: tuple[int, ...] | None
    own: _Statement | None = None
    statements: dict[int, _Statement] = field(default_factory=dict)
    via: dict[int, int] = field(default_factory=dict)
    sent: dict[int, tuple[int, _Statement]] = field(default_factory=dict)
    stands_by: int = -1
    missing: list[int] = field(default_factory=list)
    turns: int = 0
    is_asked: bool = False
    has_asked: bool = False
    heard: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)

    def forget_from(self, peer: int, *, has_left: bool = False) -> None:
        """What came over a connection that was lost does not count: its senders may have a result since then. ``has_left``: the
        peer has none, and its own statement stays."""
        for rank in [rank for rank, via in self.via.items() if via == peer]:
            if rank != peer or not has_left:
                del self.statements[rank], self.via[rank]


class Agreements:
    """One worker's part in all agreements. Used by one thread.

    Args:
        links: to the other workers.
        on_result: called with the name and the texts, by rank in ascending order; without this worker's one if the others have
            gone on without it.
        incarnation: of this process.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        links: Links,
        on_result: Callable[[str, Mapping[int, str]], None],
        incarnation: int = 0,
    ) -> None:
        self._rank, self._incarnation = rank, incarnation
        self._others = [peer for peer in range(world_size) if peer != rank]
        self._links, self._on_result = links, on_result
        self._open: dict[str, _Open] = {}
        # By kind: the newest results by number, and the largest number of one that is not kept any more.
        self._results: dict[str, dict[tuple[int, ...], Mapping[int, str]]] = {}
        self._forgotten: dict[str, tuple[int, ...]] = {}
        # Whom each other worker is connected to, as it said last.
        self._sees: dict[int, frozenset[int]] = {}
        # By rank: the incarnations of the present processes.
        self._present: dict[int, int] = {}
        # The others that have left, and whether this worker has.
        self._departed: set[int] = set()
        self._has_left = False

    def _send(self, peer: int, message: bytes) -> None:
        self._links.send_note(peer, (0, AGREEMENT, 0), message)

    @property
    def waiting(self) -> bool:
        """Whether an agreement has no result."""
        return bool(self._open)

    def missing(self, name: str) -> list[int]:
        """The workers that an agreement waits for, as far as this one knows; empty after the result. Any thread may ask."""
        agreement = self._open.get(name)
        if agreement is None:
            return []
        return agreement.missing or [rank for rank in self._members(agreement) if rank not in agreement.statements]

    def heard(self, name: str) -> list[str]:
        """Texts of others in an agreement without a result, as far as they have come here. Any thread may call it."""
        agreement = self._open.get(name)
        return [] if agreement is None else [statement.text for statement in agreement.statements.copy().values()]

    def is_asked(self, name: str) -> bool:
        """Whether somebody wants all to contribute at once. Any thread may call it."""
        agreement = self._open.get(name)
        return self._result(name) is not None if agreement is None else agreement.is_asked

    def propose(
        self, name: str, text: str, *, round_: int = NO_ROUND, among: Sequence[int] | None = None, asks: bool = False
    ) -> None:
        """Contributes to an agreement, whose name is a kind, a slash, and a number that grows, or several.

        Args:
            round_: processes whose first round is not before this one take no part.
            among: the workers that take part, the same on all of them; None: all.
            asks: the others are to learn of it at once (``is_asked``).
        """
        if (result := self._result(name)) is not None:
            self._on_result(name, result)
            return
        agreement = self._get(name, among)
        agreement.own = _Statement(text, self._rank, round_, self._incarnation, asks)
        agreement.is_asked |= asks
        self._pursue(name, agreement)

    def hear(self, peer: int, message: bytes) -> None:
        """Another worker has sent this message.

        Raises:
            ValueError: it is no such message.
        """
        kind, name, among, sees, content = _unpack(message)
        if self._has_left:
            return
        self._sees[peer] = sees
        if (result := self._result(name)) is not None:
            if kind != _RESULT:
                stands_by = content[1].stands_by if kind == _SAY else peer
                self._send(peer, self._pack(_RESULT, name, among, [stands_by, list(result.items())]))
            return
        agreement = self._get(name, among)
        agreement.heard.add(peer)
        if kind == _RESULT:
            agreement.is_asked = True
            stands_by, texts = content
            if stands_by != agreement.stands_by and agreement.stands_by not in (-1, self._rank):
                self._take_to(agreement.stands_by, name, agreement, texts)
            else:
                self._conclude(name, agreement, texts)
            return
        if kind == _SAY:
            rank, statement = content
            if rank == self._rank or statement.incarnation < self._present.get(rank, 0):
                return
            agreement.statements[rank], agreement.via[rank] = statement, peer
            agreement.is_asked |= statement.asks
            decider, via = self._decider(agreement)
            is_right = decider == statement.stands_by and via in (decider, self._rank)
            if rank == peer not in agreement.told and not (is_right or decider is None):
                # One of both does not know yet, or any more, whom the other one is connected to.
                agreement.told.add(peer)
                self._send(peer, self._pack(_ASK, name, among, [agreement.is_asked, agreement.missing]))
        else:
            asks, agreement.missing = content
            agreement.is_asked |= asks
            agreement.sent = {}  # all is said again to whoever decides
            if agreement.own is not None:
                decider, via = self._decider(agreement)
                if via != peer or decider is None:  # the one that asks learns from it whom this one is connected to
                    self._say(peer, name, agreement, self._rank, agreement.own, decider)
        if name in self._open:
            self._pursue(name, agreement)

    def ask(self, peer: int, name: str, among: Sequence[int]) -> None:
        """Asks a worker for the result of an agreement to which this one has not contributed yet."""
        if self._result(name) is None:
            self._send(peer, self._pack(_ASK, name, among, [False, []]))

    def look(self, *, again: bool) -> None:
        """Looks at the other workers; called once in a while as long as it is ``waiting``. ``again``: asks those that miss, and
        asks more seldom after a while."""
        if self._has_left:
            return
        for name, agreement in list(self._open.items()):
            agreement.told.clear()
            agreement.turns += again
            is_due = again and (agreement.turns < 3 or agreement.turns % _SELDOM == 0)
            if is_due:
                agreement.sent = {}
            self._pursue(name, agreement)
            decider = self._decider(agreement)[0]
            lower = [peer for peer in self._members(agreement) if peer < (self._rank if decider is None else decider)]
            if is_due and name in self._open and (lower or decider in (None, self._rank)):
                self._ask(name, agreement)  # others may be connected to a lower one

    def reconnected(self, peer: int) -> None:
        """What was sent to a worker may have been lost."""
        for name, agreement in list(self._open.items()):
            agreement.sent = {rank: sent for rank, sent in agreement.sent.items() if sent[0] != peer}
            agreement.forget_from(peer)
            self._pursue(name, agreement)

    def leave(self) -> None:
        """This worker leaves, and decides nothing any more."""
        self._has_left = True
        for name, agreement in self._open.items():
            for peer in self._members(agreement):
                if agreement.own is not None and self._links.view(peer) is PeerView.LINKED:
                    self._say(peer, name, agreement, self._rank, agreement.own, peer)

    def departed(self, peer: int) -> None:
        """Another worker has left: others do not hear from it any more, either."""
        self._departed.add(peer)
        self._sees = {other: sees - {peer} for other, sees in self._sees.items()}

    def renew(self, rank: int, incarnation: int) -> None:
        """Another process is this worker now: what the one before has said does not count any more."""
        self._present[rank] = incarnation
        self._departed.discard(rank)
        self._sees.pop(rank, None)
        if rank not in self._others:
            self._others = sorted([*self._others, rank])
        for agreement in self._open.values():
            agreement.forget_from(rank)

    # -- who decides ----------------------------------------------------------------------------------------------------

    def _members(self, agreement: _Open) -> Iterator[int]:
        """The other workers that take part, in ascending order."""
        others = self._others if agreement.among is None else sorted(agreement.among)
        return (peer for peer in others if peer != self._rank)

    def _hears(self, peer: int, agreement: _Open) -> int | None:
        """The worker by way of which this one reaches another one: that itself, or one that both are connected to."""
        look = self._links.view
        view = look(peer)
        if view is PeerView.LINKED:
            return peer
        linked = [other for other in self._others if look(other) is PeerView.LINKED and peer in self._sees.get(other, ())]
        if view is PeerView.LOST:  # what others have said in former agreements may be old
            linked = [other for other in linked if other in agreement.heard]
        return next(iter(linked), None)

    def _decider(self, agreement: _Open) -> tuple[int | None, int]:
        """The worker that is to decide, and the one by way of which this one reaches it; None: it is not clear yet."""
        for peer in self._members(agreement):
            if peer > self._rank:
                break
            if self._is_absent(agreement, peer):
                continue
            via = self._hears(peer, agreement)
            if via is not None:
                return peer, via
            if self._links.view(peer) is not PeerView.LOST:
                self._links.want(peer)
                return None, peer
        return self._rank, self._rank

    def _is_absent(self, agreement: _Open, peer: int) -> bool:
        """Whether a worker takes no part, as its first round is a later one."""
        said = [*agreement.statements.values(), *([agreement.own] if agreement.own is not None else [])]
        return self._links.first_round(peer) >= min((statement.round for statement in said), default=NO_ROUND)

    def _pursue(self, name: str, agreement: _Open) -> None:
        """Does what is to be done next."""
        for peer in {peer for peer in agreement.via.values() if self._links.view(peer) is not PeerView.LINKED}:
            agreement.forget_from(peer, has_left=peer in self._departed)
        decider, via = self._decider(agreement)
        if decider is None:
            return
        agreement.stands_by = decider
        if decider == self._rank:
            self._decide(name, agreement)
            return
        if agreement.own is not None:
            self._say(via, name, agreement, self._rank, agreement.own, decider)
        if via == decider:
            for rank, statement in agreement.statements.items():
                if agreement.via[rank] == rank != decider and (statement.stands_by == decider or rank in self._departed):
                    self._say(decider, name, agreement, rank, statement, decider)

    def _say(self, to: int, name: str, agreement: _Open, rank: int, statement: _Statement, decider: int | None) -> None:
        """Sends the statement of worker ``rank``, unless it was sent there."""
        statement = replace(statement, stands_by=self._rank if decider is None else decider)
        if agreement.sent.get(rank) != (to, statement):
            agreement.sent[rank] = to, statement
            parts = [rank, *vars(statement).values()]
            self._send(to, self._pack(_SAY, name, agreement.among, parts))

    def _ask(self, name: str, agreement: _Open) -> None:
        message = self._pack(_ASK, name, agreement.among, [agreement.is_asked, agreement.missing])
        for peer in self._members(agreement):
            if self._links.view(peer) is PeerView.LINKED:
                self._send(peer, message)

    def _decide(self, name: str, agreement: _Open) -> None:
        """Decides, as the lowest one that lives, if all of them have come; and connects to those of which nobody knows."""
        texts = {} if agreement.own is None else {self._rank: agreement.own.text}
        agreement.missing = []
        for peer in self._members(agreement):
            statement = agreement.statements.get(peer)
            if statement is not None and statement.stands_by == self._rank:
                texts[peer] = statement.text
                continue
            view = self._links.view(peer)
            if self._is_absent(agreement, peer) or (view is PeerView.LOST and self._hears(peer, agreement) is None):
                continue
            agreement.missing.append(peer)
            if view is PeerView.UNKNOWN:
                self._links.want(peer)
        if agreement.own is not None and not agreement.missing:
            self._conclude(name, agreement, dict(sorted(texts.items())))
        elif agreement.is_asked and not agreement.has_asked:
            agreement.has_asked = True
            self._ask(name, agreement)

    # -- results --------------------------------------------------------------------------------------------------------

    def _take_to(self, decider: int, name: str, agreement: _Open, texts: Mapping[int, str]) -> None:
        """A result of another worker than the one that this one stands by."""
        via = self._hears(decider, agreement)
        if via is not None:
            self._send(via, self._pack(_RESULT, name, agreement.among, [decider, list(texts.items())]))

    def _conclude(self, name: str, agreement: _Open, texts: Mapping[int, str]) -> None:
        self._open.pop(name, None)
        kind, number = _split(name)
        results = self._results.setdefault(kind, {})
        results[number] = texts
        if len(results) > _KEPT:
            oldest = min(results)
            del results[oldest]
            self._forgotten[kind] = max(oldest, self._forgotten.get(kind, ()))
        told: dict[int, int] = {}
        for rank, via in agreement.via.items():
            told[via] = agreement.statements[rank].stands_by
        for via, stands_by in told.items():
            self._send(via, self._pack(_RESULT, name, agreement.among, [stands_by, list(texts.items())]))
        if agreement.own is not None:
            self._on_result(name, texts)

    def _result(self, name: str) -> Mapping[int, str] | None:
        """The result of an agreement, empty if it is not kept any more; None before it."""
        kind, number = _split(name)
        result = self._results.get(kind, {}).get(number)
        return {} if result is None and number <= self._forgotten.get(kind, ()) else result

    def _get(self, name: str, among: Sequence[int] | None) -> _Open:
        if name not in self._open:
            self._open[name] = _Open(None if among is None else tuple(among))
        return self._open[name]

    def _pack(self, kind: str, name: str, among: Sequence[int] | None, content: Any) -> bytes:
        sees = [peer for peer in self._others if self._links.view(peer) is PeerView.LINKED]
        return json.dumps([kind, name, among, sees, content], separators=(",", ":"), ensure_ascii=False).encode()


def _split(name: str) -> tuple[str, tuple[int, ...]]:
    """The kind and the numbers in the name of an agreement. Raises ValueError if it is none."""
    kind, *numbers = name.split("/")
    return kind, tuple(map(int, numbers))


def _rank(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"no rank: {number!r}")
    return number


def _unpack(message: bytes) -> tuple[str, str, tuple[int, ...] | None, frozenset[int], Any]:
    """What ``Agreements._pack`` was given. Raises ValueError if it is something else."""
    try:
        kind, name, among, sees, content = json.loads(message)
        _split(name)
        found: Any
        if kind == _SAY:
            rank, text, *numbers, asks = content
            stands_by, round_, incarnation = map(int, numbers)
            found = _rank(rank), _Statement(str(text), stands_by, round_, incarnation, bool(asks))
        elif kind == _RESULT:
            stands_by, texts = content
            found = int(stands_by), {_rank(rank): str(text) for rank, text in texts}
        elif kind == _ASK:
            asks, missing = content
            found = bool(asks), list(map(_rank, missing))
        else:
            raise ValueError(kind)
        return kind, name, None if among is None else tuple(map(_rank, among)), frozenset(map(_rank, sees)), found
    except (TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise ValueError(f"no message of an agreement: {message[:100]!r}") from error
