"""What others have published for slow links, written from their papers; ``benchmarks.time_to_loss`` trains and times them.

Each is called after every step of a worker's optimizer, or is an optimizer. Messages are those of the paper, in bytes too,
and go over the process group. Where a setting depends on the size of the model (the rate, the steps between two exchanges),
the benchmark tries several.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = [
    "DeMo",
    "FactoredGossip",
    "Muon",
    "NoLoCo",
    "OuterMean",
    "Snoo",
    "SparseLoCo",
    "StreamingDiLoCo",
    "decode_e3m0",
    "encode_e3m0",
    "flat",
    "pack",
    "put",
    "unpack",
]


def flat(params: Sequence[Tensor]) -> Tensor:
    """A copy of all parameters, one after another."""
    return torch.cat([param.detach().flatten() for param in params])


@torch.no_grad()
def put(params: Sequence[Tensor], values: Tensor) -> None:
    """Sets all parameters to ``values``, one after another."""
    for param, value in zip(params, torch.split(values, [param.numel() for param in params]), strict=True):
        param.copy_(value.view_as(param))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """The lowest bits of non-negative integers, as bytes."""
    wide = numbers.numpy().astype(np.uint16)[:, None]
    return torch.from_numpy(np.packbits(((wide >> np.arange(bits, dtype=np.uint16)) & 1).astype(np.uint8)))


def unpack(message: Tensor, bits: int, count: int) -> Tensor:
    """What ``pack`` was given."""
    found = np.unpackbits(message.numpy(), count=bits * count).reshape(count, bits)
    return torch.from_numpy((found.astype(np.int64) << np.arange(bits)).sum(1))


def gathered(message: Tensor) -> list[Tensor]:
    """The messages of all workers, by rank; all have one length."""
    found = [torch.empty_like(message) for _ in range(dist.get_world_size())]
    dist.all_gather(found, message)
    return found


# -- messages of few bits, reduced as Streaming DiLoCo and MuLoCo do it ------------------------------------------------------


def encode_e3m0(values: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest powers of two, down to 2^-6 of the largest: a sign, and three bits of which 0 is zero; and the scale."""
    scale = values.abs().max().clamp_min(1e-30)
    # The nearest on a linear scale: the middle of 2^e and 2^(e+1) is 1.5 · 2^e.
    sizes = values.abs() / scale
    exponent = torch.where(sizes > 2.0**-7, torch.floor(torch.log2(sizes / 0.75)).clamp_min(-6.0), -7.0)
    return (exponent + 7).to(torch.uint8) | (values < 0).to(torch.uint8) << 3, scale


def decode_e3m0(codes: Tensor, scale: Tensor) -> Tensor:
    number = codes & 7
    size = torch.where(number > 0, torch.exp2(number.float() - 7), 0.0) * scale
    return torch.where(codes > 7, -size, size)


def encode_linear(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced levels between the smallest and the largest value, and these two."""
    low, high = values.min(), values.max()
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-30)
    return ((values - low) / step).round().to(torch.uint8), torch.stack([low, step])


def decode_linear(codes: Tensor, scale: Tensor) -> Tensor:
    return codes * scale[1] + scale[0]


@dataclass(frozen=True)
class Coding:
    """How values go: ``encode`` gives codes of so many ``bits``, and ``scales`` float32 numbers to decode them."""

    bits: int
    scales: int
    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    decode: Callable[[Tensor, Tensor], Tensor]

    def message(self, values: Tensor) -> Tensor:
        codes, scale = self.encode(values)
        return torch.cat([pack(codes, self.bits), scale.reshape(-1).view(torch.uint8)])

    def values(self, message: Tensor, count: int) -> Tensor:
        cut = len(message) - 4 * self.scales
        return self.decode(unpack(message[:cut], self.bits, count), message[cut:].clone().view(torch.float32).squeeze())


E3M0 = Coding(4, 1, encode_e3m0, decode_e3m0)


def linear(bits: int) -> Coding:
    return Coding(bits, 2, lambda values: encode_linear(values, bits), decode_linear)


def coded_mean(values: Tensor, coding: Coding, sizes: Sequence[int], group: Any = None) -> tuple[Tensor, Tensor]:
    """The mean over all workers, of codes: each reduces a part of each tensor in float32, and sends it coded once more.

    Tensors, of these ``sizes``, are coded one by one, as their scales differ, and go together.

    Returns:
        The mean, and what this worker's message said of its own values.
    """
    n = dist.get_world_size(group)
    lengths = [-(-size // n) for size in sizes]
    # Of each worker its part of each tensor.
    parts: list[list[Tensor]] = [[] for _ in range(n)]
    for value, length in zip(torch.split(values, list(sizes)), lengths, strict=True):
        padded = torch.cat([value, value.new_zeros(n * length - len(value))])
        for own, piece in zip(parts, padded.view(n, length), strict=True):
            own.append(piece)
    sent = [torch.cat([coding.message(piece) for piece in own]) for own in parts]
    came = torch.empty(n * len(sent[0]), dtype=torch.uint8)
    dist.all_to_all_single(came, torch.cat(sent), group=group)
    found = [_pieces(message, coding, lengths) for message in came.view(n, -1)]
    message = torch.cat([coding.message(torch.stack(pieces).mean(0)) for pieces in zip(*found, strict=True)])
    means = [torch.empty_like(message) for _ in range(n)]
    dist.all_gather(means, message, group=group)

    def whole(messages: Sequence[Tensor]) -> Tensor:
        by_worker = [_pieces(one, coding, lengths) for one in messages]
        tensors = zip(zip(*by_worker, strict=True), sizes, strict=True)
        return torch.cat([torch.cat(pieces)[:size] for pieces, size in tensors])

    return whole(means), whole(sent)


def _pieces(message: Tensor, coding: Coding, lengths: Sequence[int]) -> list[Tensor]:
    found, start = [], 0
    for length in lengths:
        end = start + -(-length * coding.bits // 8) + 4 * coding.scales
        found.append(coding.values(message[start:end], length))
        start = end
    return found


# -- contenders ---------------------------------------------------------------------------------------------------------------


class OuterMean:
    """DiLoCo (arXiv 2311.08105), and with Muon inside MuLoCo (2505.23725): Nesterov momentum on the mean movement of h steps.

    ``bits``: of the messages, as MuLoCo has them, with the rest kept for the next one (error feedback); None: float32.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], h: int, bits: int | None = None, lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self.params, self.h, self.bits = list(params), h, bits
        self.anchor = nn.Parameter(flat(params))
        self.outer = torch.optim.SGD([self.anchor], lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.kept = torch.zeros_like(self.anchor) if bits else None
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count % self.h:
            return
        moved = self.anchor.detach() - flat(self.params)
        if self.kept is None or self.bits is None:
            dist.all_reduce(moved)
            moved /= dist.get_world_size()
        else:
            self.kept += moved
            moved, own = coded_mean(self.kept, linear(self.bits), [param.numel() for param in self.params])
            self.kept -= own
        self.anchor.grad = moved
        self.outer.step()
        put(self.params, self.anchor.detach())


class Snoo:
    """SNOO (arXiv 2510.15830) beside DDP: Nesterov momentum on the movement of h steps, without any message."""

    def __init__(self, params: Sequence[nn.Parameter], h: int, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.params, self.h = list(params), h
        self.anchor = nn.Parameter(flat(params))
        self.outer = torch.optim.SGD([self.anchor], lr=lr, momentum=momentum, nesterov=True)
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count % self.h == 0:
            self.anchor.grad = self.anchor.detach() - flat(self.params)
            self.outer.step()
            put(self.params, self.anchor.detach())


class SparseLoCo:
    """SparseLoCo (arXiv 2508.15706): the largest 64 of each 4096 of the error feedback, with 2 bits, and 12 for the position.

    The error feedback decays by ``beta``, which stands for an outer momentum. The levels are those that fit the values sent:
    per tensor the means of the smaller and of the larger half of their sizes, with a sign. Of shorter chunks as many values go,
    and vectors whole.
    """

    CHUNK, KEPT = 4096, 64

    def __init__(self, params: Sequence[nn.Parameter], h: int, kept: int = KEPT, beta: float = 0.95, lr: float = 1.0) -> None:
        self.params, self.h, self.most, self.beta, self.lr = list(params), h, kept, beta, lr
        self.anchor = flat(params)
        self.memory = torch.zeros_like(self.anchor)
        # Chunks, of which the last of a tensor is shorter: their first element, length, and number of values kept.
        self.rows: list[list[tuple[int, int, int]]] = []
        start = 0
        for param in params:
            end, rows = start + param.numel(), []
            for first in range(start, end, self.CHUNK):
                length = min(self.CHUNK, end - first)
                rows.append((first, length, length if param.dim() == 1 else min(kept, length)))
            self.rows.append(rows)
            start = end
        self.count = 0

    def encode(self, values: Tensor) -> Tensor:
        """The message of ``values``: of each value sent 12 bits of position and 2 of size, and two levels per tensor."""
        numbers, levels = [], []
        for rows in self.rows:
            places = [values[first : first + length].abs().topk(most).indices for first, length, most in rows]
            sent = torch.cat([values[first + place] for (first, _, _), place in zip(rows, places, strict=True)])
            sizes = sent.abs()
            large = sizes > sizes.median()
            low = sizes[~large].mean()
            levels += [low, sizes[large].mean() if bool(large.any()) else low]
            numbers.append(torch.cat(places) | large.long() << 12 | (sent < 0).long() << 13)
        return torch.cat([pack(torch.cat(numbers), 14), torch.stack(levels).view(torch.uint8)])

    def decode(self, message: Tensor) -> Tensor:
        """What a message says: zero where nothing was sent."""
        count = sum(most for rows in self.rows for _, _, most in rows)
        cut = len(message) - 8 * len(self.rows)
        numbers = unpack(message[:cut], 14, count)
        levels = message[cut:].clone().view(torch.float32).view(-1, 2)
        firsts = torch.tensor([first for rows in self.rows for first, _, _ in rows])
        most = torch.tensor([most for rows in self.rows for _, _, most in rows])
        tensor = torch.tensor([i for i, rows in enumerate(self.rows) for _ in rows])
        sizes = levels[tensor.repeat_interleave(most), numbers >> 12 & 1]
        found = torch.zeros_like(self.anchor)
        found[firsts.repeat_interleave(most) + (numbers & 4095)] = torch.where(numbers >> 13 > 0, -sizes, sizes)
        return found

    def __call__(self) -> None:
        self.count += 1
        if self.count % self.h:
            return
        self.memory.mul_(self.beta).add_(self.anchor - flat(self.params))
        message = self.encode(self.memory)
        self.memory -= self.decode(message)
        for other in gathered(message):
            self.anchor -= self.lr / dist.get_world_size() * self.decode(other)
        put(self.params, self.anchor)


class StreamingDiLoCo:
    """Streaming DiLoCo (arXiv 2501.18512): every h steps each fragment in its turn, in 4 bits (E3M0), while training goes on.

    ``delay`` steps after a fragment was sent the outer optimizer steps, and the fragment becomes half the worker's own and half
    the common one. Its fragments are layers; here the blocks of the model, with what is before and behind them.
    """

    def __init__(
        self,
        fragments: Sequence[Sequence[nn.Parameter]],
        h: int,
        delay: int = 5,
        own: float = 0.5,
        lr: float = 0.4,
        momentum: float = 0.9,
    ) -> None:
        self.h, self.delay, self.own = h, min(delay, h - 1), own
        self.fragments = [list(fragment) for fragment in fragments]
        self.anchors = [nn.Parameter(flat(fragment)) for fragment in self.fragments]
        self.outers = [torch.optim.SGD([anchor], lr=lr, momentum=momentum, nesterov=True) for anchor in self.anchors]
        self.groups = [dist.new_group() for _ in self.fragments]
        self.flying: dict[int, tuple[threading.Thread, list[Tensor]]] = {}
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        for i, fragment in enumerate(self.fragments):
            # Turns are spread over the h steps.
            since = (self.count - i * self.h // len(self.fragments)) % self.h
            if since == self.delay and i in self.flying:
                self._end(i, fragment)
            if since == 0 and self.count > 1:
                self._begin(i, fragment)

    def _begin(self, i: int, fragment: list[nn.Parameter]) -> None:
        moved, found = self.anchors[i].detach() - flat(fragment), list[Tensor]()

        def reduce() -> None:
            found.append(coded_mean(moved, E3M0, [param.numel() for param in fragment], self.groups[i])[0])

        thread = threading.Thread(target=reduce)
        thread.start()
        self.flying[i] = thread, found

    def _end(self, i: int, fragment: list[nn.Parameter]) -> None:
        thread, found = self.flying.pop(i)
        thread.join()
        self.anchors[i].grad = found[0]
        self.outers[i].step()
        put(fragment, self.own * flat(fragment) + (1 - self.own) * self.anchors[i].detach())

    def close(self) -> None:
        for thread, _ in self.flying.values():
            thread.join()


def pairs(n: int, number: int) -> list[int]:
    """A random partner for each of ``n`` workers, the same on all of them."""
    order = np.random.default_rng([n, number]).permutation(n)
    partner = np.empty(n, dtype=int)
    partner[order[0::2]], partner[order[1::2]] = order[1::2], order[0::2]
    return [int(rank) for rank in partner]


def swap(values: Tensor, partner: int) -> Tensor:
    """The partner's values."""
    found = torch.empty_like(values)
    work = [dist.isend(values, partner), dist.irecv(found, partner)]
    for one in work:
        assert one is not None
        one.wait()
    return found


class NoLoCo:
    """NoLoCo (arXiv 2506.10911): a random partner every h steps, and Nesterov momentum with a pull towards its slow weights.

        v <- α v + β mean(Δ) - γ (φ - mean(φ))        φ <- φ + v        θ <- φ

    where Δ is the movement of the h steps, φ the slow weights, and means are of the pair; the difference in γ is what keeps
    workers together. Both Δ and φ are sent, φ during the h steps, as it is known when they begin.
    """

    def __init__(
        self, params: Sequence[nn.Parameter], h: int, alpha: float = 0.5, beta: float = 0.7, gamma: float = 1.0
    ) -> None:
        self.params, self.h, self.alpha, self.beta, self.gamma = list(params), h, alpha, beta, gamma
        self.slow = flat(params)
        self.momentum = torch.zeros_like(self.slow)
        self.count = 0
        self._begin()

    def _begin(self) -> None:
        self.partner = pairs(dist.get_world_size(), self.count // self.h + 1)[dist.get_rank()]
        self.theirs, self.sent = torch.empty_like(self.slow), self.slow.clone()
        self.works = [dist.isend(self.sent, self.partner), dist.irecv(self.theirs, self.partner)]

    def __call__(self) -> None:
        self.count += 1
        if self.count % self.h:
            return
        self.close()
        moved = flat(self.params) - self.slow
        moved = (moved + swap(moved, self.partner)) / 2
        self.momentum.mul_(self.alpha).add_(moved, alpha=self.beta).sub_((self.slow - self.theirs) / 2, alpha=self.gamma)
        self.slow += self.momentum
        put(self.params, self.slow)
        self._begin()

    def close(self) -> None:
        for work in self.works:
            assert work is not None
            work.wait()


class FactoredGossip:
    """Factored Gossip DiLoCo (arXiv 2606.22768), as its abstract describes it: two mixes take the place of DiLoCo's mean.

    The slow weights are known when the h steps begin, so that their mean over all workers is made meanwhile (the mix that
    does not block, and is not stale). To that mean each worker applies its own outer step, and then mixes the result with one
    random partner (the mix that blocks).
    """

    def __init__(self, params: Sequence[nn.Parameter], h: int, lr: float = 0.7, momentum: float = 0.9) -> None:
        self.params, self.h = list(params), h
        self.anchor = nn.Parameter(flat(params))
        self.outer = torch.optim.SGD([self.anchor], lr=lr, momentum=momentum, nesterov=True)
        self.count = 0
        self._begin()

    def _begin(self) -> None:
        self.mean = self.anchor.detach().clone()
        self.work: Any = dist.all_reduce(self.mean, async_op=True)

    def __call__(self) -> None:
        self.count += 1
        if self.count % self.h:
            return
        self.anchor.grad = self.anchor.detach() - flat(self.params)
        self.work.wait()
        with torch.no_grad():
            self.anchor.copy_(self.mean / dist.get_world_size())
        self.outer.step()
        partner = pairs(dist.get_world_size(), self.count // self.h)[dist.get_rank()]
        with torch.no_grad():
            self.anchor.add_(swap(self.anchor.detach(), partner)).div_(2)
        put(self.params, self.anchor.detach())
        self._begin()

    def close(self) -> None:
        self.work.wait()


class DeMo(torch.optim.Optimizer):
    """DeMo (arXiv 2411.19870): the largest ``most`` coefficients of the cosine transform of each 64 × 64 of the momentum.

    They are sent in every step and subtracted from the momentum, and the step is the sign of their mean over the workers that
    sent them. A coefficient takes 12 bits of position and 16 of value.

    ``free``: transforms are left out, where an accelerator would hide them and only times are measured.
    """

    SIDE = 64

    def __init__(
        self, params: Sequence[nn.Parameter], lr: float, most: int = 32, decay: float = 0.999, free: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr})
        self.most, self.decay, self.free = most, decay, free
        self.momenta = [torch.zeros_like(param) for param in params]
        self.bases = {size: cosines(size) for param in params for size in self._sides(param)}

    def _sides(self, param: Tensor) -> tuple[int, int]:
        """The largest sides up to 64 that divide a matrix; a vector is a matrix of one row."""
        rows, columns = param.shape if param.dim() == 2 else (1, param.numel())
        first, second = (max(side for side in range(1, self.SIDE + 1) if size % side == 0) for size in (rows, columns))
        return first, second

    def _transform(self, values: Tensor, param: Tensor, back: bool) -> Tensor:
        """Chunks, of shape (chunks, first side, second side), of a matrix; or back."""
        first, second = self._sides(param)
        rows, columns = param.shape if param.dim() == 2 else (1, param.numel())
        left, right = self.bases[first], self.bases[second]
        if back:
            chunks = values if self.free else left.T @ values @ right
            return chunks.view(rows // first, columns // second, first, second).transpose(1, 2).reshape(param.shape)
        chunks = values.view(rows // first, first, columns // second, second).transpose(1, 2).reshape(-1, first, second)
        return chunks if self.free else left @ chunks @ right.T

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = self.param_groups[0]["params"]
        places, sizes, shapes = [], [], []
        for param, momentum in zip(params, self.momenta, strict=True):
            momentum.mul_(self.decay).add_(param.grad, alpha=self.param_groups[0]["lr"])
            chunks = self._transform(momentum, param, back=False).flatten(1)
            place = chunks.abs().topk(min(self.most, chunks.shape[1]), dim=1).indices
            size = chunks.gather(1, place)
            places.append(place)
            # What is sent is what is subtracted.
            sizes.append(size.to(torch.bfloat16))
            shapes.append(chunks.shape)
        message = torch.cat(
            [
                torch.cat([size.flatten() for size in sizes]).view(torch.uint8),
                pack(torch.cat([place.flatten() for place in places]), 12),
            ]
        )
        messages = gathered(message)
        sums, counts = ([torch.zeros(shape) for shape in shapes] for _ in range(2))
        own = [
            torch.zeros(shape).scatter_(1, place, size.float())
            for shape, place, size in zip(shapes, places, sizes, strict=True)
        ]
        count = sum(place.numel() for place in places)
        for other in messages:
            values = other[: 2 * count].clone().view(torch.bfloat16).float()
            numbers = unpack(other[2 * count :], 12, count)
            start = 0
            for total, number, place in zip(sums, counts, places, strict=True):
                end = start + place.numel()
                at = numbers[start:end].view_as(place)
                total.scatter_add_(1, at, values[start:end].view_as(place))
                number.scatter_add_(1, at, torch.ones(place.shape))
                start = end
        for total, number in zip(sums, counts, strict=True):
            total.div_(number.clamp_min_(1.0))
        for param, momentum, total, mine in zip(params, self.momenta, sums, own, strict=True):
            first, second = self._sides(param)
            momentum.sub_(self._transform(mine.view(-1, first, second), param, back=True))
            param.sub_(
                self._transform(total.view(-1, first, second), param, back=True).sign_(), alpha=self.param_groups[0]["lr"]
            )


def cosines(size: int) -> Tensor:
    """The orthonormal cosine transform (DCT-II) as a matrix."""
    place, frequency = np.arange(size), np.arange(size)[:, None]
    found = np.cos(np.pi * (place + 0.5) * frequency / size) * np.sqrt(2 / size)
    found[0] /= np.sqrt(2)
    return torch.from_numpy(found).float()


class Muon(torch.optim.Optimizer):
    """``torch.optim.Muon`` in float32, and AdamW for all that is no matrix between layers.

    torch's takes bfloat16, which is slow on the processors of the benchmark. The update of a matrix has the size of AdamW's
    (0.2 of the square root of the longer side), so that both take one rate.

    ``free``: nothing is made orthogonal, where an accelerator would hide it and only times are measured.
    """

    COEFFICIENTS = (3.4445, -4.7750, 2.0315)

    def __init__(
        self, named: Sequence[tuple[str, nn.Parameter]], lr: float, momentum: float = 0.95, free: bool = False
    ) -> None:
        matrices = [param for name, param in named if param.dim() == 2 and "blocks" in name]
        others = [param for name, param in named if not (param.dim() == 2 and "blocks" in name)]
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
        super().__init__(groups, {"lr": lr, "weight_decay": 0.01})
        self.momentum, self.steps = momentum, 0 if free else 5
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.01, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for param in group["params"]:
            if param.grad is None:
                continue
            state = self.state[param]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(param)
            buffer = state["momentum_buffer"].lerp_(param.grad, 1 - self.momentum)
            update = orthogonal(param.grad.lerp(buffer, self.momentum), self.COEFFICIENTS, self.steps)
            param.mul_(1 - group["lr"] * group["weight_decay"])
            param.add_(update, alpha=-group["lr"] * 0.2 * max(param.shape) ** 0.5)
        self.adamw.param_groups[0]["lr"] = self.param_groups[1]["lr"]
        self.adamw.step()


def orthogonal(matrix: Tensor, coefficients: tuple[float, float, float], steps: int = 5) -> Tensor:
    """A matrix with singular values near 1, by Newton and Schulz's iteration (Jordan et al., "Muon", 2024)."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + torch.addmm(square, square, square, beta=b, alpha=c) @ x
    return x.T if tall else x
