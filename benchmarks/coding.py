"""Times encoding and mixing by each compression: ``python -m benchmarks.coding``, or ``make bench-coding``.

The parameters are those of a transformer, in the buckets that the library makes of them, on one thread. A replica encodes its
values, and mixes the message of another one that is near. Compressions take turns, int8 with ``decent-dp[fast]`` and
without, so that other load on the machine slows all of them alike. Medians over the turns, in nanoseconds of processor time per
parameter, are printed and written to coding.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor

from benchmarks.report import machine
from decent_dp._compressions import CODES, FEW_BITS
from decent_dp.compression import Compression, FlatTensor, MessageId, check_compression
from decent_dp.compression.lattice import load_numba
from decent_dp.engine.layout import BucketPlan, TensorSpec, plan_buckets

ROOT = Path(__file__).resolve().parents[1]
WIDTH, BLOCKS, BUCKET_MIB = 512, 8, 25
FORMS = ("torch", "numba")


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """As where Numba is not installed."""
    modules = ("decent_dp.compression.int8", "decent_dp.compression.few_bits")
    with contextlib.ExitStack() as patches:
        for module in modules:
            patches.enter_context(mock.patch(f"{module}.load_numba", return_value=None))
        yield


def make_buckets(width: int, blocks: int) -> list[BucketPlan]:
    """The buckets of a transformer."""
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    shapes = [(width,), (width,), *matrices, (3 * width,), (width,), (4 * width,), (width,)] * blocks
    specs = [TensorSpec.of(str(i), torch.empty(shape)) for i, shape in enumerate(shapes)]
    return plan_buckets(specs, range(len(specs))[::-1], BUCKET_MIB * 2**20)


class Bucket:
    """The values of two near replicas, and how one of them codes."""

    def __init__(self, plan: BucketPlan, replicas: Sequence[Tensor], kind: type[Compression]) -> None:
        slots = plan.slots if kind.by_parameter else plan.slots[:0]
        tensors = [FlatTensor(slot.index, slot.spec.numel, slot.spec.rows) for slot in slots] or [FlatTensor(0, plan.numel)]
        self.values = [list(torch.split(flat, [tensor.numel for tensor in tensors])) for flat in replicas]
        self.first = [flat.clone() for flat in replicas]
        self.flat = list(replicas)
        self.codings = [kind(tensors, plan.dtype, plan.device) for _ in replicas]
        for coding in self.codings:
            coding.load_state([{"known": value} for value in self.values[0]])
        self.messages = [torch.empty(coding.nbytes, dtype=torch.uint8) for coding in self.codings]
        self.hints: list[bytes] = []

    def prepare(self) -> None:
        self.hints = [coding.hint(values) for coding, values in zip(self.codings, self.values, strict=True)]

    def encode(self, turn: int, rank: int) -> None:
        for _ in self.codings[rank].encode(self.values[rank], self.messages[rank], MessageId(turn, rank), self.hints):
            pass

    def mix(self, rank: int) -> None:
        ours, theirs = self.messages if rank == 0 else self.messages[::-1]
        self.codings[rank].mix(self.values[rank], ours, theirs, 0.5)

    def part(self) -> None:
        """The replicas are as far away from each other as before."""
        for flat, first in zip(self.flat, self.first, strict=True):
            flat.copy_(first)


@torch.no_grad()
def measure(turns: int, width: int = WIDTH, blocks: int = BLOCKS) -> dict[str, dict[str, dict[str, float]]]:
    """Nanoseconds per parameter, by compression, by what is done, and by form."""
    draw = torch.Generator().manual_seed(0)
    plans = make_buckets(width, blocks)
    values = [0.02 * torch.randn(plan.numel, generator=draw) for plan in plans]
    replicas = [(value, value + 1e-4 * torch.randn(len(value), generator=draw)) for value in values]
    parameters = sum(plan.numel for plan in plans)
    forms: dict[tuple[str, str], list[Bucket]] = {}
    for name in (*CODES, *FEW_BITS):
        kind = check_compression(name)
        for form in FORMS if name in ("int8", *FEW_BITS) else FORMS[:1]:
            with without_kernels() if form == "torch" else contextlib.nullcontext():
                pairs = [(first.clone(), second.clone()) for first, second in replicas]
                found = [Bucket(plan, pair, kind) for plan, pair in zip(plans, pairs, strict=True)]
            forms[name or "float32", form] = found
    times: dict[tuple[str, str, str], list[float]] = {}
    for turn in range(2 + turns):
        for (name, form), buckets in forms.items():
            with without_kernels() if form == "torch" else contextlib.nullcontext():
                for bucket in buckets:
                    bucket.prepare()
                    bucket.encode(turn, 1)
                began = time.thread_time()
                for bucket in buckets:
                    bucket.encode(turn, 0)
                encoded = time.thread_time()
                for bucket in buckets:
                    bucket.mix(0)
                mixed = time.thread_time()
                for bucket in buckets:
                    bucket.mix(1)
                    bucket.part()
            if turn >= 2:
                for what, seconds in {"encode": encoded - began, "mix": mixed - encoded}.items():
                    times.setdefault((name, what, form), []).append(1e9 * seconds / parameters)
    rejected = sum(coding.rejected for buckets in forms.values() for bucket in buckets for coding in bucket.codings)
    assert not rejected, f"{rejected} blocks were not mixed"
    lines: dict[str, dict[str, dict[str, float]]] = {}
    for (name, what, form), own in times.items():
        lines.setdefault(name, {}).setdefault(what, {})[form] = round(median(own), 2)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coding", description="Times encoding and mixing.")
    parser.add_argument("--turns", type=int, default=15, help="timed turns of each form")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if load_numba() is None:
        parser.error("Numba is missing or does not compile: pip install -e '.[fast]'")
    torch.set_num_threads(1)
    lines = measure(args.turns)
    print("ns per parameter        torch   numba")
    for name, whats in lines.items():
        for what, found in whats.items():
            print(f"{name:10}{what:10}", *(f"{found[form]:8.2f}" for form in FORMS if form in found))
    plans = make_buckets(WIDTH, BLOCKS)
    settings = {
        "parameters": sum(plan.numel for plan in plans),
        "tensors": sum(len(plan.slots) for plan in plans),
        "buckets": len(plans),
        "turns": args.turns,
        "threads": 1,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    found_on = machine()
    text = json.dumps({**settings, "machine": found_on, "ns_per_parameter": lines}, indent=2)
    (args.out / "coding.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
