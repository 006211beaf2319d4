"""Speeds on one GPU: kernels as shares of the bandwidth of a copy, host copies, and what an exchange costs the computation."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import decent_dp
from benchmarks.gpu.case import ALONE, GOSSIP, PAIR, SkipError, Worker, case
from decent_dp.compression import COMPRESSIONS, check_compression
from decent_dp.compression.codec import FlatTensor, MessageId
from decent_dp.optim import AccumAdamW, GossipAdamW

# Parameters whose updates and messages are timed: 24 matrices with their biases.
WIDTH, MATRICES = 2048, 24
_GIB = 2**30


def need_gpu(worker: Worker) -> None:
    if not worker.cuda:
        raise SkipError("a CPU's speed says nothing of a GPU's")


def timed(call: Callable[[], object], repeats: int = 9, inner: int = 4) -> float:
    """Seconds of a call on the GPU; the median."""
    for _ in range(4):
        call()
    found = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        for _ in range(inner):
            call()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) / inner / 1e3)
    middle: float = statistics.median(found)
    return middle


def kernel_times(call: Callable[[], object], calls: int = 12) -> tuple[float, float]:
    """Seconds of a call's kernels, and of the call itself on the CPU, which launches them; means."""
    for _ in range(4):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    host = (time.perf_counter() - began) / calls
    total: float = sum(kernel["us"] for kernel in profiled(call, calls))
    return total / calls / 1e6, host


@cache
def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    source = torch.randn(_GIB // 4, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source))
    return 2 * source.nbytes / seconds


def share(seconds: float, nbytes: float, device: torch.device) -> str:
    return f"{nbytes / seconds / copy_rate(device):.2f} of a copy's {copy_rate(device) / 1e9:.0f} GB/s"


def figures_of(seconds: float, nbytes: float, host: float, device: torch.device) -> dict[str, float]:
    found = {"ms": 1e3 * seconds, "of_copy": nbytes / seconds / copy_rate(device), "host_ms": 1e3 * host}
    return {key: round(value, 3) for key, value in found.items()} | {"copy_gb_s": round(copy_rate(device) / 1e9)}


def params_of(device: torch.device) -> list[nn.Parameter]:
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * MATRICES
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


# The optimizer, and the bytes per parameter that an update must move: the mean over a window.
OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], float]] = {
    "torch AdamW, fused": (partial(torch.optim.AdamW, fused=True), 28),
    "AccumAdamW": (AccumAdamW, 30),
    "GossipAdamW": (GossipAdamW, 28),
    "GossipAdamW, tracking": (partial(GossipAdamW, tracking=True), 36),
}


def time_optimizer(name: str, worker: Worker) -> str:
    """Four updates each: one of them ends a window of AccumAdamW."""
    need_gpu(worker)
    make, nbytes = OPTIMIZERS[name]
    params = params_of(worker.device)
    optimizer = make(params)
    if isinstance(optimizer, GossipAdamW):
        optimizer.set_replicas(16)
    count = sum(param.numel() for param in params)
    seconds, host = kernel_times(optimizer.step)
    worker.figures.update(figures_of(seconds, nbytes * count, host, worker.device))
    return f"{1e3 * seconds:.2f} ms, {share(seconds, nbytes * count, worker.device)}; host {1e3 * host:.2f} ms"


for _name in OPTIMIZERS:
    case(f"speed: {_name}", ALONE, drivers=GOSSIP, quiet=True)(partial(time_optimizer, _name))


def time_messages(name: str | None, worker: Worker) -> str:
    """One bucket with all parameters; the others differ a little."""
    need_gpu(worker)
    device = worker.device
    tensors = [FlatTensor(index, WIDTH * WIDTH, WIDTH) for index in range(MATRICES)]
    coders = [check_compression(name)(tensors, torch.float32, device) for _ in range(2)]
    for rank, coder in enumerate(coders):
        coder.begin((0, 1), rank, 0)
    values = [[torch.randn(tensor.numel, device=device) for tensor in tensors]]
    values.append([value + 1e-3 * torch.randn_like(value) for value in values[0]])
    messages = [torch.empty(coder.nbytes, dtype=torch.uint8, device=device) for coder in coders]
    hints = [coder.hint(own) for coder, own in zip(coders, values, strict=True)]

    def encode(rank: int) -> None:
        for _ in coders[rank].encode(values[rank], messages[rank], MessageId(0, rank), hints):
            pass

    def mix() -> None:
        coders[0].mix(
            values[0], messages[0], messages[1], 1e-3
        )  # which hardly changes the values, so that they can be mixed again

    encode(1)
    count, each = sum(tensor.numel for tensor in tensors), coders[0].nbytes / sum(tensor.numel for tensor in tensors)
    text = []
    for what, call, nbytes in (("encode", partial(encode, 0), 4 + each), ("mix", mix, 8 + 2 * each)):
        seconds, host = kernel_times(call)
        worker.figures[what] = figures_of(seconds, nbytes * count, host, device)
        text.append(f"{what} {1e3 * seconds:.2f} ms, {share(seconds, nbytes * count, device)}, host {1e3 * host:.2f} ms")
    assert not coders[0].rejected, f"{coders[0].rejected} blocks were rejected"
    return "; ".join(text)


for _compression in (*COMPRESSIONS, "low-rank:4"):
    case(f"speed: messages, {_compression}", ALONE, drivers=GOSSIP, quiet=True)(partial(time_messages, _compression))


# -- a step of training beside an exchange -------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = (part.view(n, length, self.heads, 64).transpose(1, 2) for part in self.qkv(self.first(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(n, length, width)
        x = x + self.out(mixed)
        out: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return out


class Transformer(nn.Module):
    """Of GPT-2's form, with the output's weights tied to those of the words."""

    def __init__(self, width: int, depth: int, words: int = 32_000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = F.linear(self.norm(x), self.words.weight)
        return out


# Width, depth, and tokens of a step.
SIZES = {"100 M": (768, 12, 32 * 1024), "1 B": (2048, 19, 32 * 1024)}


class Idle(torch.optim.AdamW):
    """Moves nothing. Optimizers of all workers must have one name."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return


Idle.__name__ = "AdamW"


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, pieces: int) -> None:
    """One update from ``pieces`` backwards."""
    optimizer.zero_grad()
    for part in tokens.chunk(pieces):
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
        torch.autograd.backward(loss / pieces)
    optimizer.step()


def time_update(size: str, compression: str | None, worker: Worker) -> str:
    """Worker 0 trains on the GPU; worker 1 is on the CPU, computes nothing, and exchanges with it."""
    need_gpu(worker)
    width, depth, length = SIZES[size]
    device = worker.device if worker.rank == 0 else torch.device("cpu")
    with torch.device(device if worker.rank == 0 else "meta"):
        model = Transformer(width, depth)
    if worker.rank == 1:
        model.to_empty(device=device)  # its values come from worker 0
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if worker.rank == 0 else Idle(model.parameters())
    tokens = torch.randint(32_000, (length // 1024, 1025), device=device) if worker.rank == 0 else torch.empty(0)
    step, steps = partial(train_step, model, optimizer, tokens, 4 if width > 1000 else 1), 1 if width > 1000 else 3
    plain = warm_profiled(step, steps) if worker.rank == 0 else []
    replica = decent_dp.gossip(model, optimizer, topology="complete", compression=compression)
    if worker.rank == 1:
        for param in model.parameters():
            param.grad = torch.zeros((), device=device).expand_as(param)
        for _ in range(_WARM + steps):
            optimizer.step()
        replica.close()
        return ""
    gossiping = warm_profiled(step, steps)
    waited = replica.stats().waited_s
    replica.close()
    main = max(by_stream(plain, steps).items(), key=lambda item: item[1])[0]
    before, after = by_stream(plain, steps)[main], by_stream(gossiping, steps)[main]
    ours = after - before  # by names torch's kernels of messages could not be told from those of the model
    beside = sum(kernel["us"] for kernel in gossiping if kernel["stream"] != main) / steps
    figures = {"exchange_ms": ours / 1e3, "step_ms": before / 1e3, "beside_ms": beside / 1e3, "waited_s": waited}
    worker.figures.update(
        {key: round(value, 3) for key, value in figures.items()},
        spans=spans(gossiping, main, {kernel["name"] for kernel in plain}),
    )
    return (
        f"kernels of exchanges take {ours / 1e3:.2f} ms of the compute stream, {ours / before:.1%} of a step of "
        f"{before / 1e3:.1f} ms (which was {after / 1e3:.1f} with them); {beside / 1e3:.1f} ms of copies beside it; waited "
        f"{waited:.1f} s for the loopback"
    )


def spans(kernels: Sequence[dict[str, Any]], main: int, of_plain_steps: set[str]) -> list[tuple[str, float, float]]:
    """What the GPU does in the last step: (kind, begin, end) in milliseconds. Kernels of one kind that follow each other are
    one span. Those that steps without an exchange have, too, are counted as computation."""
    found: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    first = min(kernel["at"] for kernel in kernels)
    for kernel in sorted(kernels, key=lambda kernel: kernel["at"]):
        name, begin = kernel["name"], (kernel["at"] - first) / 1e3
        kind = "computation" if name in of_plain_steps else "exchange"
        if kernel["stream"] != main:
            kind = "to the CPU" if "DtoH" in name else "to the GPU" if "HtoD" in name else "exchange, beside"
        row = found[kind]
        if row and begin - row[-1][2] < 0.05:
            row[-1] = (kind, row[-1][1], begin + kernel["us"] / 1e3)
        else:
            row.append((kind, begin, begin + kernel["us"] / 1e3))
    return [(kind, round(begin, 3), round(end, 3)) for row in found.values() for kind, begin, end in row]


_WARM = 2


def warm_profiled(step: Callable[[], None], steps: int) -> list[dict[str, Any]]:
    for _ in range(_WARM):
        step()
    return profiled(step, steps)


def profiled(call: Callable[[], object], calls: int) -> list[dict[str, Any]]:
    """The kernels and copies of some calls: name, stream, and begin and length in microseconds."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = []
    for event in profiler.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0:
            begin, length = event.start_ns() / 1e3, event.duration_ns() / 1e3
            found.append({"name": event.name(), "stream": event.device_resource_id(), "at": begin, "us": length})
    return found


def by_stream(kernels: Sequence[dict[str, Any]], steps: int) -> dict[int, float]:
    """Microseconds of a step's kernels on each stream."""
    total: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        total[kernel["stream"]] += kernel["us"] / steps
    return total


for _size, _compression in (("100 M", None), ("100 M", "int8"), ("1 B", None)):
    _title = f"speed: an update of {_size} parameters, {_compression}"
    case(_title, PAIR, drivers=GOSSIP, timeout=150, quiet=True)(partial(time_update, _size, _compression))


@case("speed: host copies", ALONE, drivers=GOSSIP, quiet=True)
def host_copies(worker: Worker) -> str:
    """Of page-locked memory, in both directions, in the pieces of an exchange."""
    need_gpu(worker)
    there = torch.randn(2**26, device=worker.device)
    back = torch.empty_like(there)
    host = [torch.empty(2**26, pin_memory=True, device="cpu") for _ in range(2)]
    down = timed(lambda: host[0].copy_(there, non_blocking=True))
    up = timed(lambda: back.copy_(host[1], non_blocking=True))

    def in_pieces() -> None:
        for start in range(0, 2**26, 2**20):
            host[0][start : start + 2**20].copy_(there[start : start + 2**20], non_blocking=True)

    pieces = timed(in_pieces)
    rates = {"to_cpu_gb_s": down, "to_cpu_in_pieces_gb_s": pieces, "to_gpu_gb_s": up}
    worker.figures.update({key: round(there.nbytes / seconds / 1e9, 1) for key, seconds in rates.items()})
    return (
        f"to the CPU {there.nbytes / down / 1e9:.1f} GB/s (in pieces of 4 MiB {there.nbytes / pieces / 1e9:.1f}), "
        f"to the GPU {there.nbytes / up / 1e9:.1f}"
    )
