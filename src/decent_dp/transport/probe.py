"""What the links between workers are worth: latency and bandwidth of every pair, measured with the library's own exchanges.

One pair is measured at a time while all others wait in a gather, so that nobody disturbs it.

- Latency: the median of small exchanges. Over the library's own links an exchange is one round trip (each asks, the other's
  message is the answer), so half of it is one way. Over NCCL nobody asks, and exchanges that follow each other take one way
  each.
- Bandwidth: that of an exchange of some MB, which grow until one takes long enough to be timed. Both directions carry a
  message at once, as they do in training; the rate is that of one direction.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from decent_dp.errors import PeerError
from decent_dp.topo import Edge
from decent_dp.transport.base import Label, Parcel, Transport
from decent_dp.transport.communicators import _network_stack
from decent_dp.transport.process_group import connect
from decent_dp.wire import Item, Lossless

__all__ = ["Pair", "Probe"]

_WARM_UP, _FEW, _MANY, _ROUND_TRIPS = 2, 5, 60, 30
_FIRST_BYTES, _MOST_BYTES = 2**15, 2**26
_REPEATS = 5


@dataclass(frozen=True)
class Pair:
    """What was found between two workers, the same in both directions.

    Attributes:
        latency: seconds one way.
        rate: bytes a second, each direction, both at once.
        error: why there is neither; '' when there are both.
    """

    latency: float = math.nan
    rate: float = math.nan
    error: str = ""


class Probe:
    """Measures the pairs of the default process group; made, used and closed by all its workers together.

    Args:
        seconds: what the measurement of a pair may take, about; a slow or a long link takes at least some messages of 32 KiB
            and some tens of round trips.
        timeout: seconds that a worker is waited for; a pair that cannot talk is given up after so many.

    Raises:
        RuntimeError: there is no process group.
        PeerError: a worker went, or is not reached.
    """

    def __init__(self, seconds: float, timeout: float) -> None:
        if not dist.is_initialized():
            raise RuntimeError("there is no process group: call decent_dp.utils.initialize_dist() first")
        self.rank, self.world_size, self.backend = dist.get_rank(), dist.get_world_size(), str(dist.get_backend())
        nccl = "nccl" in self.backend
        self.device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self._seconds, self._ways = seconds, 1 if nccl else 2
        self._transports: list[Transport] = []
        # A pair that cannot talk gives up before those who wait for it do.
        self._pairs = self._connect(timeout)
        self._control = self._connect(2 * timeout + 10 * seconds).control

    def _connect(self, timeout: float) -> Transport:
        transport = connect(dist.new_group(timeout=timedelta(seconds=timeout)))
        self._transports.append(transport)
        return transport

    def gather(self, message: Any) -> list[Any]:
        """The messages of all workers, by rank."""
        return self._control.gather(message)

    def nodes(self) -> list[int]:
        """The node of each rank, numbered in the order of their first ranks; who shares a network stack shares a node."""
        stacks = [stack or f"worker {rank}" for rank, stack in enumerate(self.gather(_network_stack()))]
        numbers = {stack: number for number, stack in enumerate(dict.fromkeys(stacks))}
        return [numbers[stack] for stack in stacks]

    def survey(self, on_pair: Callable[[int, int], None] | None = None) -> dict[tuple[int, int], Pair]:
        """Measures all pairs, one after another.

        Args:
            on_pair: called before each pair with its ranks.

        Returns:
            By (lower rank, higher rank), the same on all workers. A pair that cannot talk has an error.

        Raises:
            PeerError: a worker went.
        """
        found = {}
        for a in range(self.world_size):
            for b in range(a + 1, self.world_size):
                if on_pair is not None:
                    on_pair(a, b)
                own = self._measured(a + b - self.rank) if self.rank in (a, b) else None
                messages = self.gather(own)
                found[a, b] = _merged(messages[a], messages[b])
        return found

    def roll_call(self, seconds: float = 2.0) -> list[int]:
        """After an error: who does not answer any more. The store is asked, as collectives are of no use then.

        Called by all that are left. Worker 0 learns it at once, and what it returns; the others get [] when it has left word
        (``dismiss``), or after some seconds, so that a launcher that ends all with the first does not cut it short.
        """
        key, store = "decent_dp/doctor", _get_default_store()
        try:
            store.set(f"{key}/here/{self.rank}", "")
            if self.rank:
                _until(lambda: store.check([f"{key}/said"]), 2.5 * seconds)
                return []
            others = set(range(1, self.world_size))
            _until(lambda: all(store.check([f"{key}/here/{rank}"]) for rank in others), seconds)
            return sorted(rank for rank in others if not store.check([f"{key}/here/{rank}"]))
        except RuntimeError:
            return []

    def dismiss(self) -> None:
        """Worker 0 has said what there was to say: the others may leave."""
        try:
            _get_default_store().set("decent_dp/doctor/said", "")
        except RuntimeError:
            return

    def close(self) -> None:
        """Gives the connections and the process group back."""
        for transport in self._transports:
            transport.close()
        self._transports.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- one pair --------------------------------------------------------------------------------------------------------

    def _measured(self, peer: int) -> dict[str, Any]:
        try:
            return self._measure(peer)
        except (RuntimeError, OSError) as error:
            return {"error": " ".join(str(error).split()), "lost": isinstance(error, PeerError)}

    def _measure(self, peer: int) -> dict[str, Any]:
        swap = _Swaps(self._pairs, self.rank, peer, self.device)
        for _ in range(_WARM_UP):
            swap.small(0.0)
        few = [swap.small(0.0)[0] for _ in range(_FEW)]
        # Both go on alike: with the larger of their two values, which a small exchange tells them.
        typical = swap.agree(statistics.median(few))
        more = min(_MANY, int(0.25 * self._seconds / typical))
        small = swap.agree(statistics.median(few + [swap.small(0.0)[0] for _ in range(more)]))

        # A pair far apart has its time, too: some round trips are needed before the bytes are what counts.
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
        # What a message costs however short it is belongs to the latency.
        moving = typical - small if typical > 1.25 * small else typical
        return {"latency": small / self._ways, "rate": nbytes / moving}


class _Swaps:
    """Exchanges with one peer, numbered as they come."""

    def __init__(self, transport: Transport, rank: int, peer: int, device: torch.device) -> None:
        self._transport, self._rank, self._device = transport, rank, device
        self._edge = Edge(sorted([rank, peer]), 0.5)
        self._count = 0
        self._parcels: dict[int, tuple[Tensor, Parcel]] = {}

    def small(self, value: float) -> tuple[float, float]:
        """Seconds of an exchange of one number, and the peer's."""
        values, parcel = self._parcel(1)
        values.fill_(value)
        seconds = self._timed(parcel)
        return seconds, float(parcel.received.view(torch.float64)[0])

    def agree(self, value: float) -> float:
        """The larger of both workers' values."""
        return max(value, self.small(value)[1])

    def large(self, nbytes: int) -> float:
        """Seconds of an exchange of so many bytes each way."""
        _, parcel = self._parcel(nbytes // 8)
        self.small(0.0)  # they begin together
        return self._timed(parcel)

    def _parcel(self, numel: int) -> tuple[Tensor, Parcel]:
        if numel not in self._parcels:
            values = torch.zeros(numel, dtype=torch.float64, device=self._device)
            wire = Lossless([Item(0, numel)], values.dtype, values.device)
            sent, received = (torch.zeros(wire.nbytes, dtype=torch.uint8, device=self._device) for _ in range(2))
            self._parcels[numel] = values, Parcel(wire, [values], sent, received, b"", self._rank, Label(0, 0))
        return self._parcels[numel]

    def _timed(self, parcel: Parcel) -> float:
        parcel = dataclasses.replace(parcel, label=Label(self._count, 0))
        self._count += 1
        began = time.perf_counter()
        self._transport.exchange.start(self._edge, parcel).wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - began


def _merged(one: dict[str, Any], other: dict[str, Any]) -> Pair:
    """What both ends say of a pair."""
    errors = [said["error"] for said in (one, other) if "error" in said]
    if errors:
        # Who cannot connect knows more than who waits in vain.
        return Pair(error=min(errors, key=lambda text: ("sent nothing" in text, len(text))))
    return Pair((one["latency"] + other["latency"]) / 2, (one["rate"] + other["rate"]) / 2)


def _until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
