"""Latency and bandwidth of every pair of workers, measured with the library's own exchanges.

Pairs are measured at the same time only if they share neither a node nor its link. All other workers wait in a gather and
disturb nobody. (A link that is common to all, such as that between two switches, is measured while several pairs use it.)

- Latency: the median of small exchanges. Over the library's own connections an exchange is one round trip (a grant, then the
  message), so half of it is one way. Over NCCL there are no grants, and an exchange takes one way.
- Bandwidth: that of an exchange of some MB, which grows until it takes long enough to be timed. Both directions carry a
  message at the same time, as in training; the rate is that of one direction.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations, product, zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decent_dp.compression import FlatTensor, Lossless
from decent_dp.topo import Edge
from decent_dp.transport import ExchangeId, ExchangeRequest, Transport, open_transport
from decent_dp.transport.rendezvous import network_stack

__all__ = ["Pair", "Probe", "schedule"]

_WARM_UP, _FEW, _MANY, _ROUND_TRIPS = 2, 5, 60, 30
_FIRST_BYTES, _MOST_BYTES = 2**15, 2**26
_REPEATS = 5


@dataclass(frozen=True)
class Pair:
    """The result of two workers, the same in both directions.

    Attributes:
        latency: seconds one way.
        rate: bytes per second in each direction, both at once.
        error: why there is neither; '' if there are both.
    """

    latency: float = math.nan
    rate: float = math.nan
    error: str = ""


def schedule(nodes: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All pairs of workers with these nodes, in slots: no two pairs of a slot share a node, and they are measured at the same
    time.

    First the pairs inside nodes, all nodes at once. Then those between nodes, as a tournament in which each node meets one
    other at a time (the circle method: all but one node move on by one place around a table, and those opposite meet). For L
    workers on each of N nodes these are L(L-1)/2 + (N-1)L² slots, NL² if N is odd.
    """
    members = [[rank for rank, own in enumerate(nodes) if own == node] for node in dict.fromkeys(nodes)]
    slots = _at_once([combinations(ranks, 2) for ranks in members])
    around: list[int | None] = [*range(len(members))]
    if len(around) % 2:
        around.append(None)  # the node opposite rests
    for _ in range(len(around) - 1):
        opposite = zip(around[: len(around) // 2], reversed(around), strict=False)
        slots += _at_once([product(members[a], members[b]) for a, b in opposite if a is not None and b is not None])
        around = [around[0], around[-1], *around[1:-1]]
    return slots


def _at_once(queues: list[Iterator[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    return [[(min(pair), max(pair)) for pair in slot if pair is not None] for slot in zip_longest(*queues)]


class Probe:
    """Measures the pairs of the default process group; made, used and closed by all its workers together.

    Args:
        seconds: about how long the measurement of a pair may take; a slow or long link needs at least some messages of 32 KiB
            and some tens of round trips.
        timeout: seconds after which a pair that cannot connect fails; the other pairs of the same nodes are not tried then.

    Raises:
        PeerError: a worker is gone, or cannot be reached.
    """

    def __init__(self, seconds: float, timeout: float) -> None:
        self.rank, self.world_size, self.backend = dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
        nccl = "nccl" in self.backend
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._seconds, self._ways = seconds, 1 if nccl else 2
        # A pair that cannot connect fails before the workers that wait for it do.
        group = dist.new_group(timeout=timedelta(seconds=2 * timeout + 10 * seconds))
        _, self._transport = open_transport(None, group, None, None, timeout)

    def gather(self, message: Any) -> list[Any]:
        """The messages of all workers, by rank."""
        return self._transport.control.gather(message)

    def nodes(self) -> list[int]:
        """The node of each rank, numbered in the order of their first ranks. Workers on one network stack are one node."""
        stacks = [stack or f"worker {rank}" for rank, stack in enumerate(self.gather(network_stack()))]
        numbers = {stack: number for number, stack in enumerate(dict.fromkeys(stacks))}
        return [numbers[stack] for stack in stacks]

    def survey(self, nodes: Sequence[int]) -> dict[tuple[int, int], Pair]:
        """Measures all pairs, in the order of ``schedule``: results by (lower rank, higher rank), the same on all workers. A
        pair that cannot connect has an error. Raises PeerError if a worker is gone."""
        found = {}
        apart: dict[frozenset[int], tuple[int, int]] = {}  # of two nodes, a pair that could not connect
        for slot in schedule(nodes):
            tried = [(a, b) for a, b in slot if frozenset((nodes[a], nodes[b])) not in apart]
            own = next((self._measured(a + b - self.rank) for a, b in tried if self.rank in (a, b)), None)
            messages = self.gather(own)
            for a, b in slot:
                both = frozenset((nodes[a], nodes[b]))
                if both in apart:
                    found[a, b] = Pair(error="not tried, as workers {} and {} do not reach each other".format(*apart[both]))
                    continue
                found[a, b] = _merged(messages[a], messages[b])
                if found[a, b].error:
                    apart[both] = a, b
        return dict(sorted(found.items()))

    def close(self) -> None:
        """Closes the connections and the process group."""
        self._transport.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- one pair --------------------------------------------------------------------------------------------------------

    def _measured(self, peer: int) -> dict[str, Any]:
        try:
            return self._measure(_Swaps(self._transport, self.rank, peer, self.device))
        except (RuntimeError, OSError) as error:
            return {"error": " ".join(str(error).split())}

    def _measure(self, swap: _Swaps) -> dict[str, Any]:
        for _ in range(_WARM_UP):
            swap.small(0.0)
        few = [swap.small(0.0)[0] for _ in range(_FEW)]
        # Both continue alike, with the larger of their two values, which a small exchange carries.
        typical = swap.agree(statistics.median(few))
        more = min(_MANY, int(0.25 * self._seconds / typical))
        small = swap.agree(statistics.median(few + [swap.small(0.0)[0] for _ in range(more)]))

        # A pair far apart gets more time: some round trips pass before the bandwidth dominates.
        left = max(0.7 * self._seconds, _ROUND_TRIPS * small)
        nbytes, times = _FIRST_BYTES, [swap.agree(swap.large(_FIRST_BYTES))]
        while 4 * nbytes <= _MOST_BYTES:
            left -= times[0] + 2 * small
            if 2 * (small + 4 * max(times[0] - small, 0.1 * times[0])) > left:
                break
            nbytes *= 4
            times = [swap.agree(swap.large(nbytes))]
        while len(times) < _REPEATS and times[0] + 2 * small < left:
            left -= times[0] + 2 * small
            times.append(swap.agree(swap.large(nbytes)))
        typical = statistics.median(times)
        # The cost of a message of any length belongs to the latency.
        moving = typical - small if typical > 1.25 * small else typical
        return {"latency": small / self._ways, "rate": nbytes / moving}


class _Swaps:
    """Exchanges with one peer, numbered as they come."""

    def __init__(self, transport: Transport, rank: int, peer: int, device: torch.device) -> None:
        self._transport, self._rank, self._device = transport, rank, device
        self._edge = Edge(sorted([rank, peer]), 0.5)
        self._count = 0
        self._requests: dict[int, tuple[Tensor, ExchangeRequest]] = {}

    def small(self, value: float) -> tuple[float, float]:
        """Seconds of an exchange of one number, and the peer's."""
        values, request = self._request(1)
        values.fill_(value)
        seconds = self._timed(request)
        return seconds, float(request.received.view(torch.float64)[0])

    def agree(self, value: float) -> float:
        """The larger of both workers' values."""
        return max(value, self.small(value)[1])

    def large(self, nbytes: int) -> float:
        """Seconds of an exchange of so many bytes each way."""
        _, request = self._request(nbytes // 8)
        self.small(0.0)  # they begin together
        return self._timed(request)

    def _request(self, numel: int) -> tuple[Tensor, ExchangeRequest]:
        if numel not in self._requests:
            values = torch.zeros(numel, dtype=torch.float64, device=self._device)
            compression = Lossless([FlatTensor(0, numel)], values.dtype, values.device)
            sent, received = (torch.zeros(compression.nbytes, dtype=torch.uint8, device=self._device) for _ in range(2))
            self._requests[numel] = (
                values,
                ExchangeRequest(compression, [values], sent, received, b"", self._rank, ExchangeId(0, 0)),
            )
        return self._requests[numel]

    def _timed(self, request: ExchangeRequest) -> float:
        request = dataclasses.replace(request, exchange_id=ExchangeId(self._count, 0))
        self._count += 1
        began = time.perf_counter()
        self._transport.start(self._edge, request).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began


def _merged(one: dict[str, Any], other: dict[str, Any]) -> Pair:
    """The result of a pair, from those of its ends."""
    errors = [said["error"] for said in (one, other) if "error" in said]
    if errors:
        # An end that cannot connect knows more than one that waits in vain.
        return Pair(error=min(errors, key=lambda text: ("sent nothing" in text, len(text))))
    return Pair((one["latency"] + other["latency"]) / 2, (one["rate"] + other["rate"]) / 2)
