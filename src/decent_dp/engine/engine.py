"""Rounds of exchanges, bucket by bucket: finish the one in flight, start the next one.

The verbs are separate, so that a driver can put its optimizer's step where it belongs: overlapped (finish, step, start, or
step, finish, start) or synchronous (step, start, finish), and so that a round can go by without a step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.profiler import record_function

from decent_dp.compression import Compression
from decent_dp.engine.bucket import Bucket, Edit, InFlight
from decent_dp.engine.layout import FlatBuffer, TensorSpec, choose_sizes, plan_buckets
from decent_dp.errors import NonFiniteError, PeerError, PeerLostError
from decent_dp.rules import Round, Rule
from decent_dp.topo import Edge, Topology
from decent_dp.transport import ExchangeId, ExchangeRequest, Transport

__all__ = ["ARRIVED", "NONFINITE_ROUNDS", "SAT_OUT", "Engine", "Outcome"]

_log = logging.getLogger(__name__)

# After so many rounds in a row that a worker sat out because of a replica that is not finite, training stops.
NONFINITE_ROUNDS = 10

# After so many exchanges in a row in which a block was rejected there is a warning.
_REJECTED_ROUNDS = 10


@dataclass(frozen=True)
class Outcome:
    """How the exchange of a bucket ended: what came was mixed in, this worker sat the round out, or the peer is lost."""

    kind: Literal["arrived", "sat out", "lost"]
    error: PeerError | NonFiniteError | None = None

    def raise_if_failed(self) -> None:
        """Raises what ends the run: the ``PeerError`` of a lost peer, or that a replica stays without finite values."""
        if self.error is not None:
            raise self.error


ARRIVED, SAT_OUT = Outcome("arrived"), Outcome("sat out")


class _NonFinite:
    """The rounds that one worker sits out because a replica, its own or another one, is not finite.

    Args:
        rank_in_all: of a member of an edge, for the texts.

    Attributes:
        rounds: how many there were.
    """

    def __init__(self, rank_in_all: Callable[[int], int]) -> None:
        self._rank_in_all = rank_in_all
        self.rounds = 0
        self._in_a_row = 0
        # Of the last exchange that was finished: its round, its members, and whether it was sat out.
        self._round, self._sat_out = -1, False
        self._members: Sequence[int] = ()
        # Workers that a warning has named, until they are finite again; and those that were not finite in the rounds in a row.
        self._warned: set[int] = set()
        self._nonfinite_workers: set[int] = set()

    def finished(self, in_flight: InFlight, ranks: Collection[int], bucket: Bucket, message: Tensor) -> Outcome | None:
        """Notes the end of an exchange of one bucket.

        Args:
            ranks: the members of the edge whose values are not finite, as far as the messages name them.
            message: one in which such values are.

        Returns:
            The outcome if there are any; None if the exchange can be mixed in.
        """
        number = in_flight.round.number
        if number != self._round:
            if not self._sat_out:
                self._warned.difference_update(self._members)
                self._in_a_row = 0
                self._nonfinite_workers.clear()
            self._round, self._members, self._sat_out = number, in_flight.edge.ranks, False
        if not ranks:
            return None
        if not self._sat_out:
            self._sat_out = True
            self.rounds += 1
            self._in_a_row += 1
        self._nonfinite_workers.update(ranks)
        where = f"parameter '{bucket.first_nonfinite(message)}' in round {number}"
        for rank in sorted(set(ranks) - self._warned):
            self._warned.add(rank)
            _log.warning(
                "the replica of worker %d holds a NaN or an infinity (%s). Its exchanges are left out on both sides, so that "
                "no other replica gets it, until it is finite again; after %d such rounds in a row training stops.",
                self._rank_in_all(rank),
                where,
                NONFINITE_ROUNDS,
            )
        if self._in_a_row < NONFINITE_ROUNDS:
            return SAT_OUT
        who = " and ".join(f"worker {self._rank_in_all(rank)}" for rank in sorted(self._nonfinite_workers))
        error = NonFiniteError(
            f"in each of the last {NONFINITE_ROUNDS} rounds a replica held a NaN or an infinity, that of {who} (now {where}): "
            "a loss or a gradient was not finite there. Try a lower learning rate, gradient clipping, or a GradScaler in "
            "float16, and start the workers again from the last checkpoint."
        )
        return Outcome("sat out", error)


class Engine:
    """Exchanges the tensors of buckets, round by round.

    Args:
        topology: who mixes with whom in which round.
        rule: what is proposed, and what becomes of what came.
        wire: the compression of buckets.

    Attributes:
        round: that is being made or comes next; counts rounds, also those before a restart.
        factor: the adaptive factor γ.
        exchanges: finished, of single buckets.
        bytes_sent: put on the wire by this worker for exchanges.
        waited: seconds that the calling thread has waited for exchanges.
        nonfinite: what kept a NaN or an infinity of one replica from the others.
        started: the last round whose exchanges these buckets have started, idle ones included; None: none yet.
    """

    def __init__(self, transport: Transport, topology: Topology, rule: Rule, compression: type[Compression]) -> None:
        self._transport, self._topology = transport, topology
        self.rule, self._compression = rule, compression
        self.buckets: list[Bucket] = []
        self.round = 0
        self.factor = 1.0
        self.exchanges = 0
        self.bytes_sent = 0
        self.waited = 0.0
        self.nonfinite = _NonFinite(transport.rank_in_all)
        self.started: int | None = None
        # Of buckets that are gone: runs that were rejected, and how many there were. Numbers of buckets are not given again, so
        # that what was announced for an old one is not taken for a new one's.
        self._rejected = self._gone = 0
        self._warned_of_rejections = False

    @property
    def rejected(self) -> int:
        """Runs whose difference a wire could not tell."""
        return self._rejected + sum(bucket.compression.rejected for bucket in self.buckets)

    def lay_out(
        self, specs: Sequence[TensorSpec], tensors: Sequence[Tensor], order: Sequence[int], limit_bytes: float, *, as_view: bool
    ) -> list[Bucket]:
        """New buckets for ``tensors``, to be installed.

        Args:
            specs: what the workers have agreed on, of each tensor.
            order: of the tensors, by number: the same on all workers.
            limit_bytes: upper size of a bucket.
            as_view: the tensors become views of one flat tensor in each bucket.
        """
        first, limit = choose_sizes(specs, limit_bytes)
        return [
            Bucket(
                self._gone + len(self.buckets) + number,
                FlatBuffer(plan, tensors, as_view=as_view),
                self._compression,
                self.rule,
            )
            for number, plan in enumerate(plan_buckets(specs, order, limit, first))
        ]

    def install(self, buckets: list[Bucket]) -> None:
        """These take the place of all buckets that there were, which have nothing in flight."""
        self._rejected = self.rejected
        self._gone += len(self.buckets)
        self.buckets, self.started = buckets, None

    # -- a round ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def finish(self, bucket: Bucket, edit: Edit | None = None) -> Outcome:
        """Waits for the exchange in flight, if there is one, and mixes. (Where none is, this worker sits out, too.)

        Args:
            edit: sees, and may change, what is mixed in.

        Raises:
            WireError: what came is not what was due.
        """
        in_flight, bucket.in_flight = bucket.in_flight, None
        if in_flight is None:
            return SAT_OUT
        if in_flight.sits_out:
            bucket.mix_nothing(in_flight.round)
            return SAT_OUT
        assert in_flight.handle is not None
        before = time.perf_counter()
        try:
            with record_function("decent_dp.wait"):
                in_flight.handle.wait()
        except PeerError as error:
            bucket.mix_nothing(in_flight.round)
            return Outcome("lost", error)
        finally:
            self.waited += time.perf_counter() - before
        self.exchanges += 1
        flags = in_flight.handle.flags or tuple(map(bucket.compression.flag, bucket.messages))
        ranks = {flag - 1 for flag in flags if flag}
        message = bucket.messages[0 if flags[0] else 1]
        unmixable = self.nonfinite.finished(in_flight, ranks, bucket, message)
        if unmixable is not None:
            bucket.mix_nothing(in_flight.round)
            return unmixable
        with record_function("decent_dp.mix"):
            bucket.mix(in_flight, self.factor, edit)
        if bucket.compression.rejected and not self._warned_of_rejections:
            self._warn_of_rejections(bucket)
        return ARRIVED

    def _warn_of_rejections(self, bucket: Bucket) -> None:
        """Warns, once, of a parameter that is not mixed round after round: nothing but a counter would show it."""
        stuck = bucket.compression.stuck(_REJECTED_ROUNDS)
        if not stuck:
            return
        self._warned_of_rejections = True
        _log.warning(
            "parameter '%s'%s was not mixed, or not all of it, in the last %d exchanges: the replicas are too far apart there "
            "for compression=%r, and each trains on alone. Use compression=None or 'bfloat16', or a lower learning rate.",
            bucket.buffer.names[stuck[0]],
            f" and {len(stuck) - 1} more" if len(stuck) > 1 else "",
            _REJECTED_ROUNDS,
            bucket.compression.name,
        )

    @torch.no_grad()
    def start(self, bucket: Bucket) -> None:
        """Proposes the tensors to the neighbours of the current round."""
        assert bucket.in_flight is None, "an exchange is started when the one before is finished"
        bucket.stale.clear()
        round_, edge = self._round(self.round), self._topology.get_edge(self.round)
        proposal = bucket.propose(round_)
        hint = self._send_hint(bucket, edge, proposal) if bucket.compression.needs_hints else b""
        self.started = self.round
        self._send(bucket, round_, edge, proposal, hint)

    def advance(self) -> None:
        """The round is over: all buckets have been started in it."""
        self.round += 1

    def wait_for_read(self) -> None:
        """Waits until the tensors may be written to: all that is to be sent of them has been read."""
        for bucket in self.buckets:
            if bucket.in_flight is not None and bucket.in_flight.handle is not None:
                before = time.perf_counter()
                bucket.in_flight.handle.wait_for_read()
                self.waited += time.perf_counter() - before

    def mark_stale(self, names: Iterable[str] | None = None) -> None:
        """Notes that the values of these tensors (None: of all) are replaced: the difference in flight is not added to the new
        ones, and ``renew`` resets the rule's state."""
        chosen = None if names is None else set(names)
        for bucket in self.buckets:
            own = set(bucket.buffer.names)
            bucket.mark_stale(own if chosen is None else own & chosen)

    def renew(self) -> None:
        """The tensors that were marked stale have their new values: the rule's state is reset for them."""
        for bucket in self.buckets:
            bucket.renew()

    def drop(self) -> None:
        """Finishes what is in flight, and does not mix it in.

        Raises:
            PeerError: a peer is lost; after all others have been waited for.
        """
        self.mark_stale()
        errors: list[Exception] = []
        for bucket in self.buckets:
            try:
                outcome = self.finish(bucket)
                if outcome.kind == "lost":
                    outcome.raise_if_failed()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _round(self, number: int) -> Round:
        return Round(number, Topology.mixes(self._topology, number))

    def _send(
        self, bucket: Bucket, round_: Round, edge: Edge, proposal: list[Tensor], hint: bytes, *, coded: bool = False
    ) -> None:
        handle = None
        if len(edge.ranks) > 1:
            exchange_id, members = ExchangeId(round_.number, bucket.number), tuple(sorted(edge.ranks))
            request = ExchangeRequest(
                bucket.compression, proposal, *bucket.messages, hint, self._transport.rank, exchange_id, members, coded
            )
            handle = self._transport.exchanger.start(edge, request)
            self.bytes_sent += handle.bytes_sent
        bucket.in_flight = InFlight(round_, edge, hint, handle, None if coded else proposal)

    def _send_hint(self, bucket: Bucket, edge: Edge, proposal: list[Tensor]) -> bytes:
        """Sends the hint for the next exchange to the members of its edge, and returns that for this one."""
        in_time = bucket.hints.coming is not None
        now = bucket.hints.turn(proposal)
        if not in_time and len(edge.ranks) > 1:  # the first round of this run, which may be any
            self._transport.exchanger.send_hint(edge, ExchangeId(self.round, bucket.number), now)
        self._send_hint_ahead(bucket, self.round + 1)
        return now

    def _send_hint_ahead(self, bucket: Bucket, round_: int) -> None:
        coming, hint = self._topology.get_edge(round_), bucket.hints.coming
        if hint is not None and len(coming.ranks) > 1:
            # A worker that has made its last update may be gone. If that round comes, its exchange raises.
            with contextlib.suppress(PeerLostError):
                self._transport.exchanger.send_hint(coming, ExchangeId(round_, bucket.number), hint)

    # -- saving and resuming -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to resume exactly; waits for no exchange.

        Returns:
            round, factor
            rule          {"kind": its class, "state": {tensor name: {key: tensor}}}
            compression   {tensor name: what the wire has learnt of single edges}
            exchange      {"parameters": {tensor name: see ``Bucket.saved_exchange``}, "stale": names of those whose
                          difference is to be dropped, "in_flight": whether the round before is}; None if it cannot be resumed

        The tensors are live: copy them before the next round.
        """
        going = bool(self.buckets) and self.started == self.round - 1
        exchange: dict[str, Any] = {"parameters": {}, "stale": [], "in_flight": False}
        rule: dict[str, Any] = {"kind": type(self.rule).__name__, "state": {}}
        compression: dict[str, Any] = {}
        for bucket in self.buckets:
            rule["state"].update({name: state for name, state in bucket.rule_state().items() if state})
            compression.update(bucket.edge_state())
            if going:
                exchange["parameters"].update(bucket.saved_exchange())
                exchange["in_flight"] |= bucket.in_flight is not None
                if bucket.in_flight is not None:
                    exchange["stale"] += [name for name in bucket.buffer.names if name in bucket.stale]
        return {
            "round": self.round,
            "factor": self.factor,
            "rule": rule,
            "compression": compression,
            "exchange": exchange if going else None,
        }

    def check_rule_state(self, saved: Mapping[str, Any]) -> None:
        """Looks whether the rule of ``state_dict`` is this one.

        Raises:
            ValueError: it has a state, and is of another class.
        """
        kind = type(self.rule).__name__
        if saved["state"] and saved["kind"] != kind:
            raise ValueError(
                f"the rule was {saved['kind']} when this was saved, and is {kind} now: its state does not fit. Use the "
                "same rule, or load the parameters alone (load_state_dict)."
            )

    def prepare(self, bucket: Bucket, state: Mapping[str, Any], *, resumed: bool) -> bytes | None:
        """Puts what ``state_dict`` returned into a new bucket, whose tensors need not have their values yet.

        Args:
            resumed: all workers resume the exchange.

        Returns:
            What was announced for the exchange in flight; None: nothing is.

        Raises:
            ValueError: it does not fit; names the tensor.
        """
        round_ = state["round"]
        if state["rule"]["state"]:
            bucket.load_rule_state(state["rule"]["state"])
        bucket.load_edge_state(state["compression"])
        if not resumed:
            return None
        if bucket.compression.needs_hints:
            self._topology.get_edge(round_)  # raises here if the edge of the hint cannot be made
        sending = state["exchange"]["in_flight"] and len(self._topology.get_edge(round_ - 1).ranks) > 1
        return bucket.load_exchange(state["exchange"]["parameters"], sending=sending)

    @torch.no_grad()
    def resume(self, state: Mapping[str, Any], hints: Iterable[bytes | None]) -> None:
        """Sends again, for the round before, what the buckets' messages hold of a run that was stopped.

        Args:
            state: what ``state_dict`` returned; round and factor are set already.
            hints: what ``prepare`` returned for each bucket.
        """
        self.started = self.round - 1
        stale = set(state["exchange"]["stale"])
        round_, edge = self._round(self.round - 1), self._topology.get_edge(self.round - 1)
        for bucket, hint in zip(self.buckets, hints, strict=True):
            if hint is not None:
                if bucket.compression.needs_hints:
                    self._transport.exchanger.send_hint(edge, ExchangeId(round_.number, bucket.number), hint)
                self._send(bucket, round_, edge, bucket.values, hint, coded=True)
            elif state["exchange"]["in_flight"]:
                bucket.in_flight = InFlight(round_, edge)
            bucket.stale = stale & set(bucket.buffer.names)
        for bucket in self.buckets:
            if bucket.compression.needs_hints:
                self._send_hint_ahead(bucket, self.round)
