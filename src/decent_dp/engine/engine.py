"""Rounds of exchanges, bucket by bucket: finish the exchange in flight, start the next one.

These are separate methods, so that a driver chooses when its optimizer steps: overlapped (finish, step, start, or step,
finish, start) or synchronous (step, start, finish). A round can also pass without a step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from decent_dp.compression import Compression, Lossless, flag_of, for_momentum
from decent_dp.engine.bucket import Bucket, InFlight
from decent_dp.engine.layout import FlatBuffer, TensorSpec, plan_turns
from decent_dp.engine.outcome import ARRIVED, SAT_OUT, NonFinite, Outcome
from decent_dp.errors import PeerError
from decent_dp.rules import Gossip, MomentumTracking, Round, Rule
from decent_dp.topo import Edge, Topology, schedule
from decent_dp.transport import ExchangeId, ExchangeRequest, Peers, Verdict

__all__ = ["Engine", "fit_rule"]

_log = logging.getLogger(__name__)

# After so many exchanges in a row in which a block was rejected there is a warning.
_REJECTED_ROUNDS = 10


@dataclass
class Counts:
    """What has happened in an engine.

    Attributes:
        exchanges: the number of finished exchanges of single buckets.
        bytes_sent: by this worker, for exchanges.
        waited_s: seconds that the calling thread has waited for exchanges.
        holes: the number of exchanges of single buckets that were left out, because the other worker was gone or silent.
        rejected: the number of blocks that were not mixed, because their difference was too large for the compression.
        nonfinite: the number of rounds that this worker sat out because of non-finite values.
    """

    exchanges: int = 0
    bytes_sent: int = 0
    waited_s: float = 0.0
    holes: int = 0
    rejected: int = 0
    nonfinite: int = 0


class Engine:
    """Exchanges the tensors of buckets, round by round.

    Args:
        peers: the other workers, with which exchanges are made.
        topology: the groups that mix in each round.
        rule: makes proposals, and applies received ones.
        compression: the encoding of messages.

    Attributes:
        buckets: the present ones, in the order of their exchanges. ``first_bucket``: the number of the first one, the same on
            all workers. Numbers are never reused, so that a message for an old bucket is not taken for a new one's.
        round: the number of the current or next round, including rounds before a restart.
        factor: the adaptive factor γ.
        counts: what has happened so far; of the present buckets ``stats`` knows more.
        nonfinite_in: the last round in which this replica was not finite; -1 if it never was.
        finished: the buckets whose exchanges have ended, until ``Replica.share``.
        started: the last round in which these buckets have started an exchange or sat out; None before the first.
    """

    def __init__(self, peers: Peers, topology: Topology, rule: Rule, compression: type[Compression]) -> None:
        self._peers, self.topology = peers, topology
        self.rule, self._compression = rule, compression
        self.buckets: list[Bucket] = []
        self.round, self.factor = 0, 1.0
        self.counts, self.nonfinite_in = Counts(), -1
        # By the id of their topology: the rounds of one turn follow each other.
        self._nonfinite: dict[int, NonFinite] = {}
        self.started: int | None = None
        self.first_bucket = 0
        self.finished: set[Bucket] = set()
        self._warned_of_rejections = False

    def stats(self) -> Counts:
        """What has happened so far."""
        own, counts = {id(bucket.topology) for bucket in self.buckets if bucket.rule is self.rule}, self.counts
        nonfinite = sum(record.rounds for number, record in self._nonfinite.items() if number in own)
        rejected = sum(bucket.compression.rejected for bucket in self.buckets)
        return replace(counts, nonfinite=counts.nonfinite + nonfinite, rejected=counts.rejected + rejected)

    def lay_out(
        self,
        specs: Sequence[TensorSpec],
        tensors: Sequence[Tensor],
        order: Sequence[int],
        limit_bytes: float,
        *,
        as_view: bool = False,
        after: int | None = None,
    ) -> list[Bucket]:
        """Returns new buckets for ``tensors``; ``install`` puts them to use.

        Args:
            specs: of the tensors at construction.
            order: indices of the tensors, in the same order on all workers.
            limit_bytes: upper size of a bucket.
            as_view: whether tensors become views of one flat tensor per bucket.
            after: the tensors are the tracked momenta of parameters, which are mixed in the same turns, by plain gossip; so
                many buckets are installed before these.
        """
        compression, rule = (self._compression, self.rule) if after is None else (for_momentum(self._compression), Gossip())
        first = self.first_bucket + len(self.buckets) + (after or 0)
        return [
            Bucket(first + number, FlatBuffer(plan, tensors, as_view=as_view), compression, rule, topology)
            for number, (plan, topology) in enumerate(plan_turns(specs, order, limit_bytes, self.topology))
        ]

    def install(self, buckets: list[Bucket]) -> None:
        """Replaces all buckets, which must have nothing in flight."""
        self.counts = self.stats()
        self._nonfinite.clear()  # ids may be used again
        self.first_bucket += len(self.buckets)
        self.buckets, self.started = buckets, None
        self._peers.begin(self.first_bucket)

    # -- a round ------------------------------------------------------------------------------------------------------

    def finish_due(self, bucket: Bucket) -> Outcome:
        """As ``finish``, but leaves an exchange in flight that has time until a later round."""
        in_flight = bucket.in_flight
        if in_flight is not None and not in_flight.due(bucket.topology, self.round):
            return SAT_OUT
        return self.finish(bucket)

    @torch.no_grad()
    def finish(self, bucket: Bucket) -> Outcome:
        """Waits for the exchange in flight and mixes; without one, this worker has sat the round out.

        Raises:
            WireError: a message arrived that was not expected.
        """
        in_flight, bucket.in_flight = bucket.in_flight, None
        if in_flight is None:
            return SAT_OUT
        self.finished.add(bucket)
        if (handle := in_flight.handle) is None:
            bucket.mix_nothing(in_flight.round)
            return SAT_OUT
        before = time.perf_counter()
        try:
            with record_function("decent_dp.wait"):
                handle.wait()
        except PeerError as error:
            bucket.mix_nothing(in_flight.round)
            return Outcome("lost", error)
        finally:
            self.counts.waited_s += time.perf_counter() - before
        if handle.verdict is Verdict.NEITHER:
            self.counts.holes += 1
            bucket.mix_nothing(in_flight.round)
            return SAT_OUT
        self.counts.exchanges += 1
        flags = handle.flags or tuple(map(flag_of, bucket.messages))
        ranks = {flag - 1 for flag in flags if flag}
        if self._peers.rank in ranks:
            self.nonfinite_in = in_flight.round.number
        message = bucket.messages[0 if flags[0] else 1]
        # Between two exchanges of a turn are those of others, which would end a sequence of rounds left out.
        record = self._nonfinite.setdefault(id(bucket.topology), NonFinite(self._peers.rank_in_all))
        unmixable = record.record(in_flight, ranks, bucket, message)
        if unmixable is not None:
            bucket.mix_nothing(in_flight.round)
            return unmixable
        with record_function("decent_dp.mix"):
            bucket.mix(in_flight, self.factor)
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
        """Sends the rule's proposal to the neighbours of the current round, if the bucket mixes in it."""
        self.started = self.round
        if not schedule.turn_of(bucket.topology, self.round).mixes:
            return
        assert bucket.in_flight is None, "an exchange is started when the one before is finished"
        bucket.stale.clear()
        round_, edge = Round(self.round), bucket.topology.get_edge(self.round)
        exchange_id = ExchangeId(self.round, bucket.number)
        if len(edge.ranks) > 1 and not self._peers.usable(edge, exchange_id):  # the other worker is gone or silent
            self._peers.skip(edge, exchange_id)
            self.counts.holes += 1
            edge = Edge([self._peers.rank], 1.0)
        proposal = bucket.propose(round_, for_later=len(edge.ranks) > 1)
        hint = bucket.compression.hint(proposal) if bucket.compression.needs_hints else b""
        handle = None
        if bucket.compression.pairs_only or schedule.weights_of(bucket.topology) is not None:
            self._refuse_groups(bucket, round_.number)
        if len(edge.ranks) > 1:
            meeting = schedule.meetings(bucket.topology, round_.number, edge.ranks)
            bucket.compression.begin(tuple(sorted(edge.ranks)), self._peers.rank, meeting)
            request = ExchangeRequest(bucket.compression, proposal, *bucket.messages, hint, self._peers.rank, exchange_id)
            handle = self._peers.start(edge, request)
            self.counts.bytes_sent += handle.bytes_sent
        bucket.in_flight = InFlight(round_, edge, handle, proposal, schedule.pull_of(bucket.topology, edge, self._peers.rank))

    def advance(self) -> None:
        """Ends the round, after all buckets were started in it."""
        self.round += 1

    def wait_for_read(self) -> None:
        """Waits until the transport has read all values to send that are the tensors', so that these may be written."""
        for bucket in self.buckets:
            if bucket.in_flight is not None and bucket.in_flight.handle is not None and not bucket.sends_copies:
                before = time.perf_counter()
                bucket.in_flight.handle.wait_for_read()
                self.counts.waited_s += time.perf_counter() - before

    def mark_stale(self, names: Iterable[str] | None = None) -> None:
        """Notes that the values of these tensors (None: of all) are replaced.

        The difference in flight is not added to the new values, and ``renew`` resets the rule's state.
        """
        chosen = None if names is None else set(names)
        for bucket in self.buckets:
            own = set(bucket.buffer.names)
            bucket.mark_stale(own if chosen is None else own & chosen)

    def renew(self) -> None:
        """Resets the rule's state of stale tensors, after they have got their new values, and the compression's."""
        for bucket in self.buckets:
            bucket.renew()

    def drop(self) -> None:
        """Finishes the exchange in flight without mixing it in.

        Raises:
            PeerError: a peer is lost; raised after waiting for all other exchanges.
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

    def _refuse_groups(self, bucket: Bucket, round_: int) -> None:
        """Of a topology without a period not all rounds were seen at construction. All workers raise the same."""
        largest = max((edge.ranks for edge in schedule.edges_of(bucket.topology, round_)), key=len)
        if len(largest) > 2:
            what = f"compression={bucket.compression.name!r}" if bucket.compression.pairs_only else "weight"
            raise ValueError(
                f"{what} needs a topology of pairs, and round {round_} has the edge {largest}: use another topology, or leave "
                "it out."
            )

    # -- saving and resuming -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which a run with nothing in flight resumes exactly.

        Returns:
            round, factor
            rule          {"kind": class name, "state": {tensor name: {key: tensor}}}
            compression   {tensor name: {key: tensor}}

        The tensors may be live: copy them before the next round.
        """
        rule: dict[str, Any] = {"kind": type(self.rule).__name__, "state": {}}
        compression: dict[str, Any] = {}
        for bucket in self.buckets:
            rule["state"].update({name: state for name, state in bucket.rule_state().items() if state and self.rule.is_saved})
            compression.update(bucket.compression_state())
        return {"round": self.round, "factor": self.factor, "rule": rule, "compression": compression}


def fit_rule(rule: Rule, compression: type[Compression], topology: Topology, *, narrow: bool, overlap: bool) -> Rule:
    """Returns the rule for this topology.

    Args:
        topology: includes ``mix_every``. ``narrow``: whether there are parameters of less than 32 bits.
        overlap: whether an exchange ends one update after it began.

    Raises:
        ValueError: the compression or the rule does not work with the topology.
    """
    if compression.pairs_only and (largest := schedule.largest_group(topology)) > 2:
        raise ValueError(
            f"compression={compression.name!r} needs a topology of pairs, because its messages are relative to what two "
            f"workers know of each other, and {topology!r} mixes groups of {largest}: use 'base-2', 'one-peer-exp', 'ring' or "
            "'random-matching', or another compression."
        )
    if isinstance(rule, MomentumTracking) and not overlap:
        rule = replace(rule, ahead=0)
    return rule.fit(topology, lossy=narrow or compression is not Lossless, partial=compression.partial)
