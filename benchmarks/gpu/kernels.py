"""The kernels of int8 for GPUs against their twin in torch: equal bytes of messages, and equal bits of values."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from benchmarks.gpu.case import ALONE, GOSSIP, SkipError, Worker, case
from decent_dp.compression.codec import FLAG, Compression, FlatTensor, MessageId, flag_of
from decent_dp.compression.int8 import Int8

# Parameters of several blocks, of one, of a part of a tile, of one element and of none.
SHAPES = [(97, 700), (64, 64), (17, 3), (1, 1), (0, 4), (5, 1000)]


# Rounds in which a sum is changed: which one.
_FORGED = {2: 0, 5: 1}


def _patched(module: object) -> contextlib.AbstractContextManager[object]:
    return mock.patch("decent_dp.compression.int8.load_triton", return_value=module)


@contextlib.contextmanager
def twins() -> Iterator[None]:
    """Compressions that are made meanwhile have no kernels."""
    with _patched(None):
        yield


@contextlib.contextmanager
def kernels(device: torch.device) -> Iterator[None]:
    """Compressions that are made meanwhile have kernels: on a CPU, too, where Triton's interpreter runs them."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise SkipError("kernels are for GPUs; on a CPU Triton's interpreter runs them if TRITON_INTERPRET=1")
    module = importlib.import_module("decent_dp.compression.int8_triton")
    with _patched(module):
        yield


class Pair:
    """A worker's two ends of the same bucket: with kernels, and without."""

    def __init__(self, dtype: torch.dtype, device: torch.device, flat: bool, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = [rows * columns for rows, columns in SHAPES]
        drawn = torch.randn(sum(sizes), generator=generator, device="cpu").to(device=device, dtype=dtype)
        # One behind the other, so that some start at odd places; or each in memory of its own.
        views = list(torch.split(drawn, sizes))
        self.values = [views if flat else [view.clone() for view in views], [view.clone() for view in views]]
        tensors = [FlatTensor(index, rows * columns, max(rows, 1)) for index, (rows, columns) in enumerate(SHAPES)]
        with kernels(device):
            fast = Int8(tensors, dtype, device)
        with twins():
            self.coders: list[Compression] = [fast, Int8(tensors, dtype, device)]
        self.messages = [torch.full((fast.nbytes,), 7, dtype=torch.uint8, device=device) for _ in range(2)]

    def hints(self) -> list[bytes]:
        return [coder.hint(values) for coder, values in zip(self.coders, self.values, strict=True)]

    def encode(self, rank: int, round_: int, hints: Sequence[bytes]) -> None:
        for coder, values, message in zip(self.coders, self.values, self.messages, strict=True):
            assert list(coder.encode(values, message, MessageId(round_, rank), hints))[-1] == coder.nbytes

    def mix(self, other: Pair, rate: float) -> None:
        for end, coder in enumerate(self.coders):
            coder.mix(self.values[end], self.messages[end], other.messages[end], rate)

    def forge(self, field: int) -> None:
        """Changes one of the two sums of the first block, so that neither end may mix it."""
        block = self.coders[0].chunks[0].blocks[0]
        for message in self.messages:
            message[block.record : block.record + 24].view(torch.float64)[field].add_(1)

    def check(self, what: str) -> None:
        """Both ends are equal."""
        with torch.no_grad():
            for index, (ours, due) in enumerate(zip(*self.values, strict=True)):
                bits = {2: torch.int16, 4: torch.int32}[ours.element_size()]
                assert torch.equal(ours.view(bits), due.view(bits)), f"{what}: values of tensor {index} differ"
        for ours, due in zip(*(coder.state() for coder in self.coders), strict=True):
            for key in due:
                assert torch.equal(ours[key].nan_to_num(-1.0), due[key].nan_to_num(-1.0)), f"{what}: '{key}' differs"
        assert self.coders[0].rejected == self.coders[1].rejected, (
            f"{what}: {[coder.rejected for coder in self.coders]} rejected"
        )

    def check_message(self, what: str) -> None:
        fast, due = self.messages
        assert flag_of(fast) == flag_of(due), f"{what}: the flags differ"
        if flag_of(fast):
            assert self.coders[0].first_nonfinite(fast) == self.coders[1].first_nonfinite(due), f"{what}: in another tensor"
            return
        fast, due = fast[:-FLAG].clone(), due[:-FLAG].clone()
        for block in (block for chunk in self.coders[0].chunks for block in chunk.blocks):
            codes = slice(block.at, block.at + block.numel)
            if not bool(due[block.record : block.record + 8].view(torch.float64).isfinite()):
                fast[codes] = due[codes] = 0  # a block without codes
        differs = (fast != due).nonzero().flatten()
        # Between chunks there may be a few bytes of padding, which both leave as they were.
        assert not len(differs), f"{what}: bytes {differs[:5].tolist()} of {len(fast)} differ, {len(differs)} in all"


def check_twins(dtype: torch.dtype, device: torch.device, flat: bool) -> None:
    """Rounds of a pair: usual ones, one that is too far apart to be decoded, values that are too large, and not finite."""
    ends = [Pair(dtype, device, flat, seed) for seed in (1, 1)]
    apart = [0.0, 1e-3, 1e-3, 3.0, 1e-3, 1e-2, 1e4, 1e-3, 1e-3]
    for round_, distance in enumerate(apart):
        what = f"{dtype}, {'flat' if flat else 'apart'}, round {round_}"
        for rank, end in enumerate(ends):
            generator = torch.Generator().manual_seed(100 * rank + round_)
            for ours, due in zip(*end.values, strict=True):
                noise = torch.randn(len(due), generator=generator, device="cpu").to(device=device, dtype=dtype)
                for values in (ours, due):
                    values.add_(noise, alpha=distance)
                    if round_ == 7 and rank and len(values) == 4096:
                        values[100] = float("inf")
                    if round_ == 8 and rank and len(values) == 4096:
                        values[100] = 1.0
        hints = [end.hints() for end in ends]
        for hint in hints:
            assert hint[0] == hint[1], f"{what}: hints differ"
        for rank, end in enumerate(ends):
            end.encode(rank, round_, [hint[0] for hint in hints])
            end.check_message(what)
            if rank and round_ in _FORGED:
                end.forge(_FORGED[round_])
        if any(flag_of(end.messages[0]) for end in ends):
            continue
        if round_ % 2:
            for end, other in (ends, ends[::-1]):
                for number in range(2):
                    end.coders[number].arrive(end.messages[number], other.messages[number])
        for end, other in (ends, ends[::-1]):
            end.mix(other, (0.5, 0.3, 1.0)[round_ % 3])
            end.check(what)
    assert ends[0].coders[0].rejected, "no block was rejected"


@case("kernels of messages equal their twins", ALONE, drivers=GOSSIP)
def messages(worker: Worker) -> str:
    """Bytes of messages, bits of mixed values, and what is learned of distances."""
    checked = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if not worker.cuda and dtype == torch.bfloat16:
            continue  # Triton's interpreter cuts a bfloat16 off, and does not round it
        for flat in (True, False) if worker.cuda else (dtype == torch.float32,):
            check_twins(dtype, worker.device, flat)
        checked.append(str(dtype).removeprefix("torch."))
    return ", ".join(checked)
