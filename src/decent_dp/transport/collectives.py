"""Collectives of the workers, over their own connections: a death inside one is an error, or costs another try."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from decent_dp.errors import OutOfStepError, PeerError, PeerLostError, PeerTimeoutError
from decent_dp.transport.agreement import NO_ROUND, PeerView
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.messages import LARGEST_FRAME
from decent_dp.transport.neighbours import Neighbours
from decent_dp.transport.tree import Tree

__all__ = ["Collectives"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

# The most bytes of the message of one worker, and of all, that go through an agreement; larger ones go over the tree.
_SMALL = 2**12
_SMALL_OF_ALL = LARGEST_FRAME // 4
# What a worker says at the end of a collective: whether it has its result.
_DONE = "done"
_FAILED = "failed"
# Seconds after which a wait for others is a long one.
_SOON = 0.02
# Seconds between two looks at the rounds of workers that are waited for.
_LOOK_AT_ROUNDS = 5.0
# For so many timeouts a worker that makes rounds is waited for.
_MOST_TIMEOUTS = 10
# Bits of the number of a collective that count within a call.
_CALL = 24
# Bits of it that count within a part.
_OF_PART = 12
# The channel of the parts. They are never at the same time, and their numbers grow.
_PART = 2


@dataclass
class _Call:
    """A call of the user's, which may make several collectives.

    Attributes:
        round: in which it is made; ``NO_ROUND``: all take part.
        began: when, on the monotonic clock.
        number: of the next collective in it.
        history: of the members of all collectives so far: all of them must have had the same.
        waits: this worker has missed it, and waits for a later one of the others.
    """

    name: str = ""
    round: int = 0
    began: float = 0.0
    number: int = 0
    history: int = 0
    waits: bool = False


class Collectives:
    """Collectives of all workers, called by all in the same order. They end with the same result on all living workers, also
    if some die inside; without ``faults=`` with an error.

    Each one ends with an agreement on whether all have their result. If not, the living workers make it again. Data go up and
    down a tree of connections that work.

    A worker that was silent for a while, or has joined, may have missed calls. Its next call is the next one of the others that
    has the same name.

    Args:
        ranks: of the workers that began the run.
        node_of: the name of each worker's node; the tree leaves a node as seldom as it can.
        timeout: seconds after which a wait for a living worker fails that makes no rounds meanwhile.
        kind, channel: of the names of agreements, and of blocks: the same on all of these workers, and others of this worker
            have others.
        among: the workers whose collectives these are; None: all, those included that join.
        explain: without ``faults=``: the error for a collective in which these workers have not taken part, as they are gone.
            None: the others go on without them.
        leave: called when this worker can take part in no call any more, so that the others do not wait for it.
        neighbours: whom this worker waits for: it tells them, and waits as long as they make rounds. None: nobody is told.

    Attributes:
        ranks: of the workers that took part in the last one.
        calls: how many calls of the user's have begun, the same number on all workers.
    """

    def __init__(
        self,
        plane: ControlPlane,
        ranks: Sequence[int],
        node_of: Sequence[str],
        timeout: float,
        *,
        kind: str = "call",
        channel: int = 0,
        among: tuple[int, ...] | None = None,
        explain: Callable[[list[int], str], PeerError] | None = None,
        leave: Callable[[], None] = lambda: None,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._plane, self._node_of, self._timeout = plane, node_of, timeout
        self._kind, self._among, self._explain, self._leave = kind, among, explain, leave
        self._neighbours = neighbours
        self._tree = Tree(plane, channel, timeout)
        self._all = tuple(ranks)
        self.ranks: tuple[int, ...] = self._all
        self.calls, self._call = 0, _Call()
        # Whether this worker may have missed calls: then it is the one that is wrong where calls differ.
        self._is_late = False
        # Of a process that has joined, until its first call has begun: its first round; else -1.
        self._entered = -1

    # -- collectives --------------------------------------------------------------------------------------------------

    def begin(self, what: str, round_: int | None = None) -> None:
        """A call of the user's begins, which may make several collectives.

        Args:
            what: its name.
            round_: in which it is made. Processes whose first round is a later one take no part. None: all do.
        """
        self.calls += 1
        self._call = _Call(what, NO_ROUND if round_ is None else round_, time.monotonic())

    def enter(self, calls: int, first: int) -> None:
        """This worker has joined others, which have begun so many calls. ``first``: its first round."""
        self.calls, self._is_late, self._entered = calls, True, first

    def part(self, ranks: Collection[int]) -> Collectives:
        """The collectives of those of these workers that took part in the last one of all, this worker among them.

        All workers call it together, each for one part of them. It can be used until the next collective of all.
        """
        if self._call.number == 0:
            self.gather(None)  # who is here?
        made, number = copy.copy(self), self._call.number
        made.ranks = made._all = made._among = tuple(rank for rank in self.ranks if rank in ranks)
        made._kind, made._tree = f"part {min(ranks)}", Tree(self._plane, _PART, self._timeout)
        made._call = replace(self._call, number=number << _OF_PART)
        self._call.number += 1  # so that the next part has other names
        made.gather(None)  # makes its tree
        return made

    def gather(self, message: Any) -> list[Any]:
        """The messages of all workers, in the order of ``ranks``; they must be serializable as JSON."""
        own = json.dumps(message)
        is_small = len(own) <= min(_SMALL, _SMALL_OF_ALL // len(self._node_of))
        texts: Mapping[int, str | bytes] = self._agree("a gather", own if is_small else "")
        if not all(texts.values()):
            texts = self._until_all_have_it("a gather of long messages", lambda: self._tree.gather(own.encode()))
        return [json.loads(texts[rank]) for rank in self.ranks]

    def gather_tensors(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """The tensors of all workers (any number, dtypes and shapes, dense or not), on the CPU, in the order of ``ranks``."""
        host = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        kinds = json.dumps([[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in host]).encode()
        own = b"\n".join([kinds, b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in host)])
        found = self._until_all_have_it("a gather of tensors", lambda: self._tree.gather(own))
        return [_tensors_of(found[rank]) for rank in self.ranks]

    def broadcast(self, tensor: Tensor) -> None:
        """Every worker's ``tensor`` (any dtype, dense or not) becomes that of the first of ``ranks``."""

        def make() -> Tensor:
            host = tensor.detach().to("cpu", copy=True).contiguous()
            self._tree.broadcast(host.reshape(-1).view(torch.uint8))
            return host

        tensor.detach().copy_(self._until_all_have_it(f"a broadcast of {tensor.nbytes} bytes", make))

    def mean(self, tensor: Tensor) -> None:
        """``tensor`` (floating point, contiguous) becomes its mean over workers. Sums are taken in float32 at least."""

        def make() -> Tensor:
            host = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32), copy=True)
            self._tree.mean(host.reshape(-1))
            return host

        tensor.detach().copy_(self._until_all_have_it(f"a mean of {tensor.nbytes} bytes", make))

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _until_all_have_it(self, what: str, make: Callable[[], T]) -> T:
        """Calls ``make`` on all ``ranks``, and again on those that live as long as one of them has no result."""
        if self._call.number == 0:
            self.gather(None)  # there is no tree yet
        failing_since = math.inf
        while True:
            result: T | None = None
            self._tree.begin(self.calls << _CALL | self._call.number, self._has_failed(self._describe(what)))
            self._plane.coming = self._name, self.ranks
            try:
                result = make()
            except PeerLostError as error:
                _log.info("%s is made again: %s", what, error)
            except PeerTimeoutError:
                self._propose(self._name, what, _FAILED)  # the others need not wait, too
                self._call.number += 1
                raise
            finally:
                self._plane.coming = None
            before = self.ranks
            texts = self._agree(what, _FAILED if result is None else _DONE)
            if result is not None and self.ranks == before and set(texts.values()) == {_DONE}:
                return result
            failing_since = min(failing_since, time.monotonic()) if self.ranks == before else math.inf
            if time.monotonic() - failing_since > self._timeout:
                raise PeerLostError(
                    f"{self._describe(what)} has failed again and again for {self._timeout:g} s, though all of the workers "
                    f"{list(self.ranks)} live: some of them do not reach each other. See the network between them."
                )

    def _has_failed(self, call: str) -> Callable[[], bool]:
        """Says whether another worker has no result of this collective, or makes another one."""
        name, history, agreements = self._name, self._call.history, self._plane.agreements

        def has_it(text: str) -> bool:
            said = _Said.read(text)
            return (said.call, said.history, said.text) == (call, history, _DONE)

        return lambda: agreements.is_asked(name) or not all(map(has_it, agreements.heard(name)))

    @property
    def _name(self) -> str:
        """Of the next agreement."""
        return f"{self._kind}/{self.calls}/{self._call.number}"

    def _describe(self, what: str) -> str:
        return f"{what} of {self._call.name}()" if self._call.name else what

    def _propose(self, name: str, what: str, text: str) -> futures.Future[Mapping[int, str]]:
        # Later ones of a call are those of the workers that have made the first.
        among, call = self.ranks if self._call.number else self._among, self._call
        others = [rank for rank in self.ranks if rank != self._plane.rank]
        away = [rank for rank in others if self._plane.view(rank) in (PeerView.PENDING, PeerView.LOST)]
        incarnation = self._plane.incarnation
        said = _Said(self._describe(what), call.history, incarnation, call.round, self._entered, self._is_late, away, text)
        return self._plane.agree(name, said.write(), round_=call.round, among=among, asks=text == _FAILED)

    def _wait_for_rounds(self, future: futures.Future[Mapping[int, str]], name: str, what: str) -> None:
        """Waits as long as the workers that have not come make rounds: a slower one has more to make before it comes."""
        began = last = time.monotonic()
        rounds: dict[int, int] = {}
        is_said = False
        while not futures.wait([future], min(self._timeout / 10, _LOOK_AT_ROUNDS)).done:
            missing, before, now = self._plane.missing(name), rounds, time.monotonic()
            rounds = {} if self._neighbours is None else {rank: self._neighbours.table.round_of(rank) for rank in missing}
            # Of those that this worker has no connection to, others know whether they make rounds.
            moves = any(round_ < 0 or round_ > before.get(rank, round_) for rank, round_ in rounds.items())
            if moves and now - began <= _MOST_TIMEOUTS * self._timeout:
                last = now
            if now - began <= self._timeout or (is_said and now - last <= self._timeout):
                continue
            names, call = ", ".join(f"worker {rank}" for rank in missing) or "one of them", self._describe(what)
            within = f"within the process group's timeout of {self._timeout:g} s: {names} did not."
            text = f"not all living workers have come to {call} {within}"
            if now - last > self._timeout:
                if self._explain is not None and (apart := [r for r in missing if self._plane.view(r) is PeerView.PENDING]):
                    raise self._explain(apart, call)  # they cannot be reached
                advice = "Make the same calls on every worker. Uneven numbers of batches need join() around the loop."
                raise PeerTimeoutError(f"{text} {advice}")
            _log.warning("%s It is waited for, as it makes rounds. Is this call made on every worker?", text)
            is_said = True

    def _agree(self, what: str, text: str) -> dict[int, str]:
        """The texts of those that take part, which are ``ranks`` then."""
        rank = self._plane.rank
        while True:
            name = self._name
            future = self._propose(name, what, text)
            if not futures.wait([future], _SOON).done:
                with contextlib.nullcontext() if self._neighbours is None else self._neighbours.paused():
                    self._wait_for_rounds(future, name, what)
            texts = future.result()
            self._call.number += 1
            said = _of_the_present({rank: _Said.read(said) for rank, said in texts.items()})
            self._refuse_absent(said, what)
            first = said[min(said, key=lambda rank: (said[rank].is_late, rank))] if said else None
            out = {other for other, one in said.items() if one.is_late and first is not None and one.call != first.call}
            # Else what is said may be that of a process before this one.
            if rank in said and said[rank].incarnation == self._plane.incarnation:
                self._entered = -1
                if rank not in out:
                    break
            self._wait_for_a_later_call("" if first is None else first.call)
        assert first is not None
        said = {rank: one for rank, one in said.items() if rank not in out}
        leading = min(rank for rank, one in said.items() if one is first)
        for rank, one in said.items():
            if one.call != first.call:
                raise OutOfStepError(
                    f"worker {leading} has come to {first.call} and worker {rank} to {one.call}: make the same calls in the "
                    "same order on every worker."
                )
            if one.history != first.history:
                raise PeerLostError(
                    f"the network had fallen into parts inside this call: workers {leading} and {rank} have taken part in "
                    "different collectives of it. Make the call again."
                )
        self._call.history = zlib.crc32(f"{name} {list(said)}".encode(), self._call.history)
        self._regroup(said)
        return {rank: one.text for rank, one in said.items()}

    def _refuse_absent(self, said: Collection[int], what: str) -> None:
        """Raises PeerLostError without ``faults=`` if a worker is gone; the same on all."""
        if self._explain is not None and (absent := [rank for rank in self._all if rank not in said]):
            if (rank := self._plane.rank) in absent:
                raise PeerLostError(f"the others took worker {rank} for gone, and go on without it: end this process.")
            raise self._explain(absent, self._describe(what))

    def _wait_for_a_later_call(self, theirs: str) -> None:
        """This worker takes no part in the call that the others make, but in their next one of the same name.

        Args:
            theirs: what they make, if this worker has heard it.

        Raises:
            PeerLostError: they have gone on without this worker in the middle of its call.
            OutOfStepError: they have made other calls for the process group's timeout.
        """
        rank, call = self._plane.rank, self._call
        if self.calls == 0 or call.number > 1:
            self._leave()
            raise PeerLostError(
                f"the others took worker {rank} for gone, and have made this call without it. It cannot take part any "
                "more: end this process. The others continue."
            )
        if time.monotonic() - call.began > self._timeout:
            self._leave()
            raise OutOfStepError(
                f"worker {rank} has missed calls of the others, and waits for their next {call.name}(). They have made "
                f"other ones for {self._timeout:g} s, such as {theirs}. It cannot take part any more: end this process. The "
                "others continue."
            )
        if not call.waits:
            _log.warning("worker %d has missed calls of the others: it waits for their next %s", rank, call.name)
        self.calls += 1
        self._is_late = True
        self._call = replace(call, number=0, waits=True)

    def _regroup(self, said: Mapping[int, _Said]) -> None:
        ranks = tuple(said)
        if ranks != self.ranks:
            gone, back = sorted(set(self.ranks) - set(ranks)), sorted(set(ranks) - set(self.ranks))
            _log.warning(
                "collectives are those of workers %s: %s", list(ranks), f"{gone} are gone" if gone else f"{back} are back"
            )
        self.ranks = ranks
        apart = {frozenset((rank, peer)) for rank, one in said.items() for peer in one.away}
        self._tree.span(ranks, apart, self._node_of)


def _tensors_of(raw: bytes) -> list[Tensor]:
    """Those whose dtypes and shapes are in the first line, and whose bytes lie behind it one after the other."""
    begin = raw.index(b"\n") + 1
    tensors = []
    for dtype, shape in json.loads(raw[:begin]):
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        if tensor.nbytes:
            part = bytearray(memoryview(raw)[begin : begin + tensor.nbytes])
            tensor = torch.frombuffer(part, dtype=tensor.dtype).reshape(shape)
        tensors.append(tensor)
        begin += tensor.nbytes
    return tensors


@dataclass(frozen=True)
class _Said:
    """What a worker says in an agreement.

    Attributes:
        call: which one it makes, and what for.
        history: of the members of all collectives of the call so far.
        incarnation: of its process.
        round: in which it makes the call; ``entered``: its first one, if it has joined and this is its first call, else -1.
        is_late: it may have missed calls.
        away: those of the others that it does not reach itself.
    """

    call: str
    history: int
    incarnation: int
    round: int
    entered: int
    is_late: bool
    away: list[int]
    text: str

    def write(self) -> str:
        return json.dumps(list(vars(self).values()), separators=(",", ":"))

    @classmethod
    def read(cls, said: str) -> _Said:
        """What ``write`` has returned on another worker."""
        return cls(*json.loads(said))


def _of_the_present(said: dict[int, _Said]) -> dict[int, _Said]:
    """Without processes that have joined and come to their first call, where the others make one before their first round."""
    newest = max((one.round for one in said.values() if one.entered < 0), default=NO_ROUND)
    return {rank: one for rank, one in said.items() if one.entered < newest}
