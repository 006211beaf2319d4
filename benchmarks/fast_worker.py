"""One worker of ``benchmarks.fast``: exchanges over fast links, ours and those of gloo, in turns within one process.

Every contender moves the same 100 MB of float32 values per worker, and waits until all of it is done.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import decent_dp
from decent_dp.compression import BFloat16, Compression, FlatTensor, Int8, Lossless, MessageId, all_finite
from decent_dp.topo import Edge
from decent_dp.transport import ExchangeId, ExchangeRequest, ProcessGroupTransport

# 25 parameters of a million float32 values, in buckets of about the default size.
TENSORS, NUMEL, BUCKETS = 25, 10**6, 4
GB = 4e-9 * TENSORS * NUMEL  # of values that each worker exchanges
STEPS = 2  # of an optimizer in a turn
SPINS = 2  # turns that are also made beside a thread of pure Python
KINDS: dict[str, type[Compression]] = {"float32": Lossless, "bfloat16": BFloat16, "int8": Int8}


def seconds_of(thread: int) -> float:
    """Processor time of a thread of this process, by its ``ident``."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


class Contender(ABC):
    """``run`` moves this worker's values once.

    Attributes:
        rounds: how many times its turn moves them.
    """

    rounds = 1

    @abstractmethod
    def run(self, peer: int) -> None: ...

    def extra(self) -> dict[str, float]:
        """Processor seconds since the last call, by what they were spent on."""
        return {}


class GlooPair(Contender):
    """isend and irecv of one tensor."""

    def __init__(self) -> None:
        self.sent, self.received = (torch.ones(TENSORS * NUMEL) for _ in range(2))

    def run(self, peer: int) -> None:
        works: list[Any] = [dist.isend(self.sent, peer), dist.irecv(self.received, peer)]
        for work in works:
            work.wait()


class GlooAllReduce(Contender):
    """The sum of one tensor over all workers."""

    def __init__(self) -> None:
        self.values = torch.zeros(TENSORS * NUMEL)

    def run(self, peer: int) -> None:
        dist.all_reduce(self.values)


class Pair(Contender):
    """Exchanges of buckets over the library's links, without mixing. Encoding is timed apart."""

    def __init__(self, compression: str, transport: ProcessGroupTransport, round_: int) -> None:
        self.transport, self.rank, self.round = transport, dist.get_rank(), round_
        kind = KINDS[compression]
        self.requests = []
        self.coding = self.mixing = 0.0
        self.used = self.seconds()
        generator = torch.Generator().manual_seed(self.rank)
        whole = torch.randn(TENSORS * NUMEL, generator=torch.Generator().manual_seed(9))
        for bucket, tensors in enumerate(torch.arange(TENSORS).tensor_split(BUCKETS)):
            near = whole[tensors[0] * NUMEL : (tensors[-1] + 1) * NUMEL].clone()
            near += 1e-3 * torch.randn(len(near), generator=generator)  # replicas are near each other
            values = list(torch.split(near, NUMEL)) if kind.by_parameter else [near]
            made = _timed(kind, self)([FlatTensor(i, len(v)) for i, v in enumerate(values)], near.dtype, near.device)
            sent, received = (torch.empty(made.nbytes, dtype=torch.uint8) for _ in range(2))
            self.requests.append(ExchangeRequest(made, values, sent, received, b"", self.rank, ExchangeId(0, bucket)))

    def run(self, peer: int) -> None:
        edge = Edge(sorted((self.rank, peer)), 0.5)
        self.round += 1
        handles, started = [], []
        for request in self.requests:
            exchange_id = ExchangeId(self.round, request.exchange_id.bucket)
            hint = request.compression.hint(request.values)
            started.append(
                ExchangeRequest(
                    request.compression, request.values, request.sent, request.received, hint, self.rank, exchange_id
                )
            )
        for request in started:
            request.compression.begin(tuple(edge.ranks), self.rank, self.round)
            handles.append(self.transport.start(edge, request))
        for handle in handles:
            handle.wait()

    def seconds(self) -> float:
        """Processor time of the transport's Python thread, which encodes; libzmq's own is not in it."""
        thread = self.transport._wire.commands.thread
        return 0.0 if thread.ident is None else seconds_of(thread.ident)

    def mix(self) -> None:
        """What the training thread does with the received messages, at a rate that changes nothing."""
        began = time.thread_time()
        for request in self.requests:
            request.compression.mix(request.values, request.sent, request.received, 1e-30)
        self.mixing += time.thread_time() - began

    def extra(self) -> dict[str, float]:
        used, coding, mixing = self.seconds(), self.coding, self.mixing
        found = {"thread": used - self.used - coding, "encode": coding, "mix": mixing}
        self.used, self.coding, self.mixing = used, 0.0, 0.0
        return found


def _timed(kind: type[Compression], pair: Pair) -> type[Compression]:
    """The same compression, whose encoding counts its processor time."""

    class Timed(kind):  # type: ignore[misc, valid-type]
        def encode(self, values: Sequence[Tensor], out: Tensor, message_id: MessageId, hints: Sequence[bytes]) -> Iterator[int]:
            began = time.thread_time()
            for ready in super().encode(values, out, message_id, hints):
                pair.coding += time.thread_time() - began
                yield ready
                began = time.thread_time()

    return Timed


class NoCompute(torch.autograd.Function):
    """A model without computation: its gradients are zeros that are there already."""

    @staticmethod
    def forward(ctx: Any, zeros: Sequence[Tensor], *params: Tensor) -> Tensor:
        ctx.zeros = zeros
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.zeros)


class Model(nn.Module):
    """Parameters of the size above."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList(torch.ones(NUMEL) for _ in range(TENSORS))
        self.zeros = [torch.zeros(NUMEL) for _ in range(TENSORS)]

    def forward(self) -> Tensor:
        return NoCompute.apply(self.zeros, *self.layers)  # type: ignore[no-any-return, no-untyped-call]


class Steps(Contender):
    """Steps of SGD without computation, with DDP or with ``gossip()``; the last exchange is waited for."""

    rounds = STEPS

    def __init__(self, how: str, *, encrypt: bool = False) -> None:
        model: Any = Model()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        self.flush: Any = lambda: None
        if how == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            compression = None if how == "float32" else how
            replica = decent_dp.gossip(model, self.optimizer, topology="one-peer-exp", compression=compression, encrypt=encrypt)
            self.flush = replica.flush
        self.model = model

    def run(self, peer: int) -> None:
        for _ in range(STEPS):
            self.model().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.flush()


class Spinner:
    """A thread of pure Python, as a training thread between its kernels: how long it is held up.

    Waiting for a processor is not counted: that is what ``schedstat`` of the kernel reports.
    """

    def __init__(self) -> None:
        self.end, self.found = threading.Event(), (0.0, 0.0)
        self.thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        longest, began, before = 0.0, time.perf_counter(), [int(n) for n in stat.read_text().split()]
        last = began
        while not self.end.is_set():
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
        ran, waited, _ = (int(n) - m for n, m in zip(stat.read_text().split(), before, strict=True))
        wall = time.perf_counter() - began
        self.found = max(0.0, 1 - 1e-9 * (ran + waited) / wall), 1e3 * longest

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        self.thread.start()
        yield
        self.end.set()
        self.thread.join()


def make_contenders(plain: ProcessGroupTransport, encrypted: ProcessGroupTransport) -> dict[str, Callable[[], Contender]]:
    """Calls that make them, by name."""
    made: dict[str, Callable[[], Contender]] = {
        "gloo pair": GlooPair,
        "gloo all-reduce": GlooAllReduce,
        "DDP step": partial(Steps, "ddp"),
    }
    for number, name in enumerate(KINDS):
        made[f"pair {name}"] = partial(Pair, name, plain, 10**6 * number)
    made |= {f"gossip step {name}": partial(Steps, name) for name in KINDS}
    made["pair float32, encrypted"] = partial(Pair, "float32", encrypted, 0)
    made["gossip step float32, encrypted"] = partial(Steps, "float32", encrypt=True)
    return made


def passes() -> dict[str, float]:
    """Processor seconds per GB of float32 values of each pass that the library makes over them; medians of calls on memory
    that is in no cache."""
    torch.set_num_threads(1)
    values, other = torch.randn(TENSORS * NUMEL), torch.randn(TENSORS * NUMEL)
    compression = Lossless([FlatTensor(0, len(values))], values.dtype, values.device)
    sent, received = (torch.empty(compression.nbytes, dtype=torch.uint8) for _ in range(2))
    part = 2**20  # values that are encoded together
    calls: dict[str, Callable[[], Any]] = {
        "copy": lambda: sent[: 4 * len(values)].view(torch.float32).copy_(values),
        "finite": lambda: [all_finite(values[start : start + part]) for start in range(0, len(values), part)],
        "mix": lambda: compression.mix([values], sent, received, 1e-30),
    }
    received[: 4 * len(other)].view(torch.float32).copy_(other)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(7):
        for name, call in calls.items():
            began = time.thread_time()
            call()
            found[name].append((time.thread_time() - began) / GB)
    return {name: round(statistics.median(times), 4) for name, times in found.items()}


def peer_of(turn: int) -> int:
    """Pairs change with the turn, so that all links are used."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return rank ^ (1 << turn % (size.bit_length() - 1))


def measure(contender: Contender, turn: int) -> dict[str, float]:
    """Seconds of one exchange, and processor seconds for it, this worker's."""
    dist.barrier()
    contender.extra()
    busy, began = time.process_time(), time.perf_counter()
    contender.run(peer_of(turn))
    ended = time.perf_counter()
    found = {"seconds": ended - began, "busy": time.process_time() - busy}
    if isinstance(contender, Pair):
        contender.mix()
    return {key: value / contender.rounds for key, value in {**found, **contender.extra()}.items()}


def measure_spinning(contender: Contender, turn: int) -> dict[str, float]:
    """The share of an exchange for which a thread of pure Python is held up, its longest stop in ms, and seconds."""
    dist.barrier()
    spinner = Spinner()
    with spinner():
        began = time.perf_counter()
        contender.run(peer_of(turn))
        seconds = time.perf_counter() - began
    contender.extra()
    return {"spin seconds": seconds, "held": spinner.found[0], "longest": spinner.found[1]}


def main() -> None:
    """Reads rank and address from the environment, as under torchrun, and writes ``OUT/RANK.json``."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--turns", type=int, required=True)
    parser.add_argument("--spin", action="store_true", help="the last turns also beside a thread of pure Python")
    parser.add_argument("--contenders", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    plain, encrypted = ProcessGroupTransport(encrypt=False), ProcessGroupTransport(encrypt=True)
    pairs = [Edge(sorted((dist.get_rank(), peer_of(turn))), 0.5) for turn in range(dist.get_world_size().bit_length() - 1)]
    for each in (plain, encrypted):
        each.prepare(pairs)
    calls = make_contenders(plain, encrypted)
    names = args.contenders or list(calls)
    made = {name: calls[name]() for name in names}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(-2, args.turns):  # the first ones connect, and measure links; two, as pairs take turns
        shift = max(turn, 0) % len(names)
        for name in [*names[shift:], *names[:shift]]:
            found = measure(made[name], turn)
            if args.spin and turn >= args.turns - SPINS and isinstance(made[name], (GlooPair, Pair)):
                found |= measure_spinning(made[name], turn)
            if turn >= 0:
                results[name].append(found)
    (args.out / f"{dist.get_rank()}.json").write_text(json.dumps(results))
    dist.barrier()
    for contender in made.values():
        if isinstance(contender, Steps):
            contender.flush()
    for each in (plain, encrypted):
        each.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
