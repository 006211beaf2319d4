"""Collectives of the workers, over their own connections: a death inside one is an error, or costs another try."""

from __future__ import annotations

import contextlib
import copy
import heapq
import json
import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from decent_dp.errors import OutOfStepError, PeerLostError, PeerTimeoutError
from decent_dp.transport.agreement import NO_ROUND, PeerView
from decent_dp.transport.control_plane import ControlPlane
from decent_dp.transport.interface import Control, DeferredHandle, Handle
from decent_dp.transport.messages import LARGEST_FRAME
from decent_dp.transport.neighbours import Neighbours

__all__ = ["Collectives", "spanning_tree"]

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
# Bytes that go up the tree before the first of them come down: they bound the memory of a worker that is waited for.
_SEGMENT = 2**26


class Collectives(Control):
    """Collectives that end with the same result on all living workers, also if some die inside.

    Each one ends with an agreement on whether all have their result. If not, the living workers make it again. ``ranks`` are
    those that took part in the last one. Data go up and down a tree of connections that work.

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
        incarnation: of this process.
        neighbours: whom this worker waits for: it tells them, and waits as long as they make rounds. None: nobody is told.
    """

    def __init__(
        self,
        plane: ControlPlane,
        rank: int,
        ranks: Sequence[int],
        node_of: Sequence[str],
        timeout: float,
        *,
        kind: str = "call",
        channel: int = 0,
        among: tuple[int, ...] | None = None,
        explain: Callable[[list[int], str], PeerLostError] | None = None,
        leave: Callable[[], None] = lambda: None,
        incarnation: int = 0,
        neighbours: Neighbours | None = None,
    ) -> None:
        self._plane, self._rank, self._node_of, self._timeout = plane, rank, node_of, timeout
        self._kind, self._among, self._explain, self._leave = kind, among, explain, leave
        self._incarnation, self._neighbours = incarnation, neighbours
        self._courier = plane.courier(channel)
        self._all = tuple(ranks)
        self.ranks: tuple[int, ...] = self._all
        # Of the members of all collectives since ``begin``: all of them must have had the same.
        self._history = 0
        # Collectives since ``begin``; what has begun; whether this worker has missed calls: then it is the one that is wrong
        # where calls differ.
        self._number, self._call, self._is_late = 0, "", False
        # When this worker began it, and whether it waits for a later one of the others.
        self._began, self._is_waiting = 0.0, False
        self._what = ""
        # Since when attempts of the same workers have failed, on the monotonic clock.
        self._failing_since = math.inf
        self._parent: int | None = None
        self._children: tuple[int, ...] = ()
        self._round = 0  # of the present call
        # Of a process that has joined, until its first call has begun: its first round; else -1.
        self._entered = -1

    # -- collectives --------------------------------------------------------------------------------------------------

    def begin(self, what: str, round_: int | None = None) -> None:
        self.calls += 1
        self._history, self._number, self._call = 0, 0, what
        self._began, self._is_waiting = time.monotonic(), False
        self._round = NO_ROUND if round_ is None else round_

    def enter(self, calls: int, first: int) -> None:
        """This worker has joined others, which have begun so many calls. ``first``: its first round."""
        self.calls, self._is_late, self._entered = calls, True, first

    def part(self, ranks: Collection[int]) -> Collectives:
        if self._number == 0:
            self.gather(None)  # who is here?
        made = copy.copy(self)
        made.ranks = made._all = made._among = tuple(rank for rank in self.ranks if rank in ranks)
        made._kind, made._courier, made._number = f"part {min(ranks)}", self._plane.courier(_PART), self._number << _OF_PART
        self._number += 1  # so that the next part has other names
        made.gather(None)  # makes its tree
        return made

    def gather(self, message: Any) -> list[Any]:
        own = json.dumps(message)
        is_small = len(own) <= min(_SMALL, _SMALL_OF_ALL // len(self._node_of))
        while True:
            texts = self._agree("a gather", own if is_small else "")
            if all(texts.values()):
                return [json.loads(text) for text in texts.values()]
            found = self._attempt("a gather of long messages", lambda: self._gather_over_tree(own.encode()))
            if found is not None:
                return [json.loads(found[rank]) for rank in self.ranks]

    def gather_tensors(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        host = [tensor.detach().cpu().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
        kinds = self.gather([[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in host])
        kinds_of = dict(zip(self.ranks, kinds, strict=True))
        own = b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in host)
        found = self._until_all_have_it("a gather of tensors", lambda: self._gather_over_tree(own))
        return [_tensors_of(found[rank], kinds_of[rank]) for rank in self.ranks]

    def broadcast(self, tensor: Tensor) -> None:
        def make() -> Tensor:
            host = tensor.detach().to("cpu", copy=True).contiguous()
            self._send_down(host.reshape(-1).view(torch.uint8))
            return host

        tensor.detach().copy_(self._until_all_have_it(f"a broadcast of {tensor.nbytes} bytes", make))

    def mean(self, tensor: Tensor) -> Handle:
        def make() -> Tensor:
            host = tensor.detach().to("cpu", torch.promote_types(tensor.dtype, torch.float32), copy=True)
            flat = host.reshape(-1)
            count = _SEGMENT // flat.itemsize
            for begin in range(0, flat.numel(), count):
                segment = flat[begin : begin + count]
                self._sum_up(segment)
                self._send_down(segment.view(torch.uint8))
            return host

        def finish() -> None:
            tensor.detach().copy_(self._until_all_have_it(f"a mean of {tensor.nbytes} bytes", make))

        return DeferredHandle(finish)

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _until_all_have_it(self, what: str, make: Callable[[], T]) -> T:
        if self._number == 0:
            self.gather(None)  # there is no tree yet
        while True:
            result = self._attempt(what, make)
            if result is not None:
                return result

    def _attempt(self, what: str, make: Callable[[], T]) -> T | None:
        """Calls ``make`` on all ``ranks``. Returns None if one of them has no result: the living workers are ``ranks`` then."""
        self._what = what
        result: T | None = None
        self._courier.begin(self.calls << _CALL | self._number)
        try:
            result = make()
        except PeerLostError as error:
            _log.info("%s is made again: %s", what, error)
        except PeerTimeoutError:
            self._propose(self._name, what, _FAILED)  # the others need not wait, too
            self._number += 1
            raise
        before = self.ranks
        texts = self._agree(what, _FAILED if result is None else _DONE)
        if self.ranks == before and set(texts.values()) == {_DONE}:
            self._failing_since = math.inf
            return result
        self._failing_since = min(self._failing_since, time.monotonic()) if self.ranks == before else math.inf
        if time.monotonic() - self._failing_since > self._timeout:
            raise PeerLostError(
                f"{self._describe(what)} has failed again and again for {self._timeout:g} s, though all of the workers "
                f"{list(self.ranks)} live: some of them do not reach each other. See the network between them."
            )
        return None

    @property
    def _name(self) -> str:
        """Of the next agreement."""
        return f"{self._kind}/{self.calls}/{self._number}"

    def _describe(self, what: str) -> str:
        return f"{what} of {self._call}()" if self._call else what

    def _propose(self, name: str, what: str, text: str) -> futures.Future[Mapping[int, str]]:
        # Later ones of a call are those of the workers that have made the first.
        among = self.ranks if self._number else self._among
        others = [rank for rank in self.ranks if rank != self._rank]
        away = [rank for rank in others if self._plane.view(rank) in (PeerView.PENDING, PeerView.LOST)]
        said = _Said(
            self._describe(what), self._history, self._incarnation, self._round, self._entered, self._is_late, away, text
        )
        return self._plane.agree(name, said.write(), round_=self._round, among=among, asks=text == _FAILED)

    def _await(self, name: str, what: str, text: str) -> Mapping[int, str]:
        future = self._propose(name, what, text)
        with contextlib.suppress(futures.TimeoutError):
            return future.result(_SOON)
        with contextlib.nullcontext() if self._neighbours is None else self._neighbours.paused():
            return self._wait_for_rounds(future, name, what)

    def _wait_for_rounds(self, future: futures.Future[Mapping[int, str]], name: str, what: str) -> Mapping[int, str]:
        """Waits as long as the workers that have not come make rounds: a slower one has more to make before it comes."""
        began = last = time.monotonic()
        rounds: dict[int, int] = {}
        is_said = False
        while True:
            with contextlib.suppress(futures.TimeoutError):
                return future.result(min(self._timeout / 10, _LOOK_AT_ROUNDS))
            missing, before, now = self._plane.missing(name), rounds, time.monotonic()
            rounds = {} if self._neighbours is None else {rank: self._neighbours.round_of(rank) for rank in missing}
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
                advice = "Make the same calls on every worker. Uneven numbers of batches need `with model.join():`."
                raise PeerTimeoutError(f"{text} {advice}")
            _log.warning("%s It is waited for, as it makes rounds. Is this call made on every worker?", text)
            is_said = True

    def _agree(self, what: str, text: str) -> dict[int, str]:
        """The texts of those that take part, which are ``ranks`` then."""
        while True:
            name = self._name
            texts = self._await(name, what, text)
            self._number += 1
            said = _of_the_present({rank: _Said.read(said) for rank, said in texts.items()})
            self._refuse_absent(said, what)
            late = {rank for rank, one in said.items() if one.is_late}
            first = said[min(said, key=lambda rank: (rank in late, rank))] if said else None
            out = {rank for rank in late if first is not None and said[rank].call != first.call}
            # Else what is said may be that of a process before this one.
            if self._rank in said and said[self._rank].incarnation == self._incarnation:
                self._entered = -1
                if self._rank not in out:
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
        self._history = zlib.crc32(f"{name} {list(said)}".encode(), self._history)
        self._regroup(said)
        return {rank: one.text for rank, one in said.items()}

    def _refuse_absent(self, said: Collection[int], what: str) -> None:
        """Raises PeerLostError without ``faults=`` if a worker is gone; the same on all."""
        if self._explain is not None and (absent := [rank for rank in self._all if rank not in said]):
            if self._rank in absent:
                raise PeerLostError(f"the others took worker {self._rank} for gone, and go on without it: end this process.")
            raise self._explain(absent, self._describe(what))

    def _wait_for_a_later_call(self, theirs: str) -> None:
        """This worker takes no part in the call that the others make, but in their next one of the same name.

        Args:
            theirs: what they make, if this worker has heard it.

        Raises:
            PeerLostError: they have gone on without this worker in the middle of its call.
            OutOfStepError: they have made other calls for the process group's timeout.
        """
        if self.calls == 0 or self._number > 1:
            self._leave()
            raise PeerLostError(
                f"the others took worker {self._rank} for gone, and have made this call without it. It cannot take part any "
                "more: end this process. The others continue."
            )
        if time.monotonic() - self._began > self._timeout:
            self._leave()
            raise OutOfStepError(
                f"worker {self._rank} has missed calls of the others, and waits for their next {self._call}(). They have made "
                f"other ones for {self._timeout:g} s, such as {theirs}. It cannot take part any more: end this process. The "
                "others continue."
            )
        if not self._is_waiting:
            _log.warning("worker %d has missed calls of the others: it waits for their next %s", self._rank, self._call)
        self.calls += 1
        self._number, self._is_late, self._is_waiting = 0, True, True

    def _regroup(self, said: Mapping[int, _Said]) -> None:
        ranks = tuple(said)
        if ranks != self.ranks:
            gone, back = sorted(set(self.ranks) - set(ranks)), sorted(set(ranks) - set(self.ranks))
            _log.warning(
                "collectives are those of workers %s: %s", list(ranks), f"{gone} are gone" if gone else f"{back} are back"
            )
        self.ranks = ranks
        apart = {frozenset((rank, peer)) for rank, one in said.items() for peer in one.away}
        parents = spanning_tree(ranks, apart, self._node_of)
        self._parent = parents[self._rank]
        self._children = tuple(rank for rank in ranks if parents[rank] == self._rank)

    # -- the tree -----------------------------------------------------------------------------------------------------

    def _check(self, began: float) -> Callable[[int], None]:
        """A function that raises if a worker is not to be waited for any longer."""
        name, call = self._name, self._describe(self._what)

        def has_it(text: str) -> bool:
            """Whether who says this has its result of the same collective."""
            said = _Said.read(text)
            return (said.call, said.history, said.text) == (call, self._history, _DONE)

        def check(peer: int) -> None:
            view = self._plane.view(peer)
            if view is PeerView.LOST:
                raise PeerLostError(f"worker {peer} is gone")
            if view is PeerView.UNKNOWN:
                self._plane.connect(peer)
            if self._plane.agreements.is_asked(name) or not all(map(has_it, self._plane.agreements.heard(name))):
                raise PeerLostError("another worker has lost one, or makes another call")
            if time.monotonic() - began > self._timeout:
                raise PeerTimeoutError(
                    f"worker {peer} has not sent its part of a collective within the process group's timeout of "
                    f"{self._timeout:g} s."
                )

        return check

    def _put(self, peer: int, block: Any) -> None:
        self._courier.put(peer, bytes(block), self._check(time.monotonic()))

    def _get(self, peer: int) -> bytes:
        return self._courier.get(peer, self._check(time.monotonic()))

    def _sum_up(self, flat: Tensor) -> None:
        """``flat`` becomes the mean at the root, and elsewhere the sum of a part of the tree."""
        for part in torch.split(flat, LARGEST_FRAME // flat.itemsize):
            for child in self._children:
                part += torch.frombuffer(bytearray(self._get(child)), dtype=part.dtype)
            if self._parent is None:
                part /= len(self.ranks)
            else:
                self._put(self._parent, part.view(torch.uint8).numpy())

    def _send_down(self, raw: Tensor) -> None:
        """``raw`` (bytes) becomes that of the root."""
        for part in torch.split(raw, LARGEST_FRAME) if raw.numel() else ():
            if self._parent is not None:
                part.copy_(torch.frombuffer(bytearray(self._get(self._parent)), dtype=torch.uint8))
            for child in self._children:
                self._put(child, part.numpy())

    def _gather_over_tree(self, own: bytes) -> dict[int, bytes]:
        """The bytes of each worker."""
        parts, came = {self._rank: own}, {child: self._get_parts(child) for child in self._children}
        for below in came.values():
            parts.update(below)
        if self._parent is not None:
            self._put_parts(self._parent, parts)
            parts.update(self._get_parts(self._parent))
        for child in self._children:
            self._put_parts(child, {rank: part for rank, part in parts.items() if rank not in came[child]})
        return parts

    def _put_parts(self, peer: int, parts: Mapping[int, bytes]) -> None:
        self._put(peer, json.dumps([(rank, len(part)) for rank, part in parts.items()]).encode())
        for part in parts.values():
            for begin in range(0, len(part), LARGEST_FRAME):
                self._put(peer, memoryview(part)[begin : begin + LARGEST_FRAME])

    def _get_parts(self, peer: int) -> dict[int, bytes]:
        sizes = json.loads(self._get(peer))
        return {rank: b"".join(self._get(peer) for _ in range(0, size, LARGEST_FRAME)) for rank, size in sizes}


def _tensors_of(raw: bytes, kinds: Sequence[tuple[str, list[int]]]) -> list[Tensor]:
    """Those with these dtypes and shapes, whose bytes lie one after the other."""
    tensors, begin = [], 0
    for dtype, shape in kinds:
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


def spanning_tree(ranks: Sequence[int], apart: Collection[frozenset[int]], node_of: Sequence[str]) -> dict[int, int | None]:
    """The parent of each worker in a tree over all of them, whose root is the first; the same on all workers.

    It grows worker by worker (as Prim's algorithm), within a node first, and near the root first. A worker has two children
    where the connections allow it, so that no worker sends much.

    Args:
        apart: pairs of workers that are not connected. One is in the tree if there is no other way.
    """
    parents: dict[int, int | None] = {ranks[0]: None}
    depths, children = {ranks[0]: 0}, Counter[int]()
    for most, anyhow in ((2, False), (len(ranks), False), (len(ranks), True)):
        found: list[tuple[bool, int, int, int]] = []

        def add(rank: int, found: list[tuple[bool, int, int, int]] = found, anyhow: bool = anyhow) -> None:
            for peer in ranks:
                if peer not in parents and (anyhow or frozenset((rank, peer)) not in apart):
                    heapq.heappush(found, (node_of[peer] != node_of[rank], depths[rank], rank, peer))

        for rank in list(parents):
            add(rank)
        while found:
            _, depth, rank, peer = heapq.heappop(found)
            if peer not in parents and children[rank] < most:
                parents[peer], depths[peer] = rank, depth + 1
                children[rank] += 1
                add(peer)
    return parents
