"""The copy that a save makes: whole, apart, and into memory that is there already."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from decent_dp.replica.host_copies import HostMemory


def some() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    block = torch.randn(4, 3, 5, 2, generator=generator)
    return {
        "block": block,
        "again": block,
        "row": block[1],
        "turned": block.permute(3, 1, 0, 2),
        "last": block.contiguous(memory_format=torch.channels_last),
        "stepped": block[::2, :, 1],
        "wide": torch.ones(2).expand(3, 2),
        "half": block.half(),
        "many": torch.arange(7),
        "flag": torch.tensor(True),
        "none": torch.zeros(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
    }


def spans(tensors: dict[str, Tensor]) -> list[tuple[int, int]]:
    return sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors.values() if t.numel())


def test_copies_are_whole_and_apart():
    tensors = some()
    staged = HostMemory().copy(tensors)
    staged.wait()
    assert list(staged.tensors) == list(tensors)
    for key, copy in staged.tensors.items():
        assert copy.dtype == tensors[key].dtype
        assert torch.equal(copy, tensors[key]), key
        assert copy.is_contiguous(), key
        assert copy.data_ptr() % copy.element_size() == 0
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans(staged.tensors)))
    before = {key: copy.clone() for key, copy in staged.tensors.items()}
    for tensor in (tensors["block"], tensors["last"], tensors["many"]):
        tensor.add_(1)
    assert all(torch.equal(copy, before[key]) for key, copy in staged.tensors.items())


@pytest.mark.parametrize(
    "change",
    [
        {"many": torch.arange(8)},
        {"many": torch.arange(7).reshape(7, 1)},
        {"many": torch.arange(7, dtype=torch.int32)},
        {"more": torch.ones(1000)},
        {"block": torch.zeros(0)},
    ],
)
def test_memory_and_places_are_kept_for_the_same_tensors_alone(change):
    staging, tensors = HostMemory(), some()
    first = staging.copy(tensors).tensors
    tensors["block"].add_(1)
    second = staging.copy(tensors).tensors
    assert all(second[key] is first[key] for key in second)
    for _ in range(2):
        for now in ({**tensors, **change}, tensors):
            staged = staging.copy(now).tensors
            assert list(staged) == list(now)
            for key, copy in staged.items():
                assert copy.dtype == now[key].dtype
                assert torch.equal(copy, now[key]), key
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans(staged)))


def test_what_was_reserved_is_used():
    tensors = some()
    memory = HostMemory.reserved(*HostMemory.needed(tensors))
    begin, end = memory._memory.data_ptr(), memory._memory.data_ptr() + memory._memory.nbytes
    places = spans(memory.copy(tensors).tensors)
    assert begin == places[0][0]
    assert end - 64 < places[-1][1] <= end
