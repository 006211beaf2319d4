"""How the size of frames follows the rate of a link, what a body's checksum sees, and what one call encodes."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
import torch

from decent_dp.compression import BFloat16, FlatTensor, Lossless, MessageId, by_kernels
from decent_dp.compression import casts as casts_module
from decent_dp.transport.tcp.connection import WINDOW
from decent_dp.transport.tcp.pace import SMALLEST, Pace
from decent_dp.transport.tcp.protocol import DATA, LARGEST_DATA, OFFER, checksum
from tests import test_reactor
from tests.test_reactor import content, send

by_hand, _no_heartbeats = test_reactor.by_hand, test_reactor._no_heartbeats


def paced(rate: float, turn: float = 0.0, seconds: float = 1.0, part: int = 2**14) -> Pace:
    """After ``seconds`` at ``rate`` bytes per second, by the clock of the pace alone."""
    pace = Pace()
    pace.begin(0.0)
    for number in range(1, int(seconds * rate / part) + 1):
        pace.count(part, number * part / rate, turn)
    return pace


@pytest.mark.parametrize("megabits", [10, 35, 60, 100, 200, 260])
def test_pieces_of_slow_links_are_the_smallest(megabits):
    pace = paced(megabits * 1e6 / 8, turn=4e-3)
    assert pace.rate == pytest.approx(megabits * 1e6 / 8, rel=0.1)
    assert pace.piece == SMALLEST == 2**16


@pytest.mark.parametrize("gigabits", [1, 5, 10, 40])
@pytest.mark.parametrize("turn", [0.0, 1e-2])
def test_a_piece_is_what_a_link_moves_in_4_ms_or_in_a_turn_of_the_thread(gigabits, turn):
    worth = gigabits * 1e9 / 8 * max(4e-3, turn)
    piece = paced(gigabits * 1e9 / 8, turn, seconds=0.2).piece
    assert piece == min(2 ** (int(worth).bit_length() - 1), LARGEST_DATA)  # the power of two below it


def test_pauses_do_not_count_and_an_old_rate_is_given_up_slowly():
    pace = paced(1e9)
    assert pace.piece == LARGEST_DATA
    before = pace.rate
    pace.resume(10.0)  # after nine seconds
    pace.count(2**16, 10.001, 0.0)
    assert pace.rate == before
    pace.count(2**16, 10.1, 0.0)
    assert pace.rate == pytest.approx(0.9 * before)
    now = 10.1
    for _ in range(100):
        now += 0.06
        pace.count(2**10, now, 0.0)
    assert pace.piece == SMALLEST


def test_a_burst_on_a_slow_link_changes_nothing():
    pace = Pace()
    pace.begin(0.0)
    for _ in range(WINDOW // 2**16):  # the kernel takes all that was granted at once
        pace.count(2**16, 1e-4, 0.0)
    pace.count(2**16, 0.07, 0.0)  # and then as the link does, 7.5 MB/s
    assert pace.piece == SMALLEST


def test_frames_are_as_long_as_a_piece(by_hand, monkeypatch):
    monkeypatch.setattr(Pace, "count", lambda *_: False)
    connection = by_hand.reactor._framing.connection(1)
    for round_, piece in enumerate((2**16, 2**18)):
        connection.going.piece = piece
        key, data = (round_, 0, 0), content(piece, 10**6)
        send(by_hand.reactor, 1, key, data, ready=10**6)
        assert by_hand.read()[:2] == (OFFER, key)
        by_hand.grant(key, 10**6, 10**6)
        got = b""
        while len(got) < 10**6:
            kind, _, offset, _, body = by_hand.read()
            assert (kind, offset, len(body)) == (DATA, len(got), min(piece, 10**6 - len(got)))
            got += body
        assert got == data


# -- checksums -------------------------------------------------------------------------------------------------------------


def slow_checksum(body: bytes) -> int:
    """The same by arithmetic on single words."""
    if len(body) < 2**18:
        return zlib.crc32(body)
    row = 1451
    rows = len(body) // (8 * row)
    words = struct.unpack_from(f"<{row * rows}Q", body)
    total = [sum(words[column::row]) % 2**64 for column in range(row)]
    return zlib.crc32(struct.pack(f"<{row}Q", *total) + body[8 * row * rows :])


@pytest.mark.parametrize("size", [0, 1, 56, 5047, 2**16, 2**18 - 1, 2**18, 2**18 + 1, 8 * 1451 * 23, 2**21])
def test_the_checksum_is_its_slow_twin(size):
    body = random.Random(size).randbytes(size)
    assert checksum(body) == checksum(memoryview(bytearray(body))) == slow_checksum(body)


def test_the_checksum_sees_what_damages_bodies():
    rng = random.Random(1)
    body = bytearray(rng.randbytes(2**20))
    right = checksum(body)
    for _ in range(50):  # a bit, and bits that are powers of two apart
        damaged = bytearray(body)
        first = rng.randrange(2**19)
        for at in {first, first + rng.choice([0, 8, 64, 2**12, 2**16, 2**18])}:
            damaged[at] ^= 1 << rng.randrange(8)
        assert checksum(damaged) != right
    for size in (8, 64, 1448, 4096, 2**16):  # parts that have changed places, were lost, or came twice
        pairs = [rng.sample(range(2**20 // size), 2) for _ in range(10)]
        pairs += [[0, j] for j in (7, 125, 631) if size in (64, 1448) and j < 2**20 // size]
        for i, j in pairs:
            a, b = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            for damage in ("swap", "zero", "twice"):
                damaged = bytearray(body)
                if damage == "swap":
                    damaged[a], damaged[b] = body[b], body[a]
                else:
                    damaged[a] = bytes(size) if damage == "zero" else body[b]
                assert checksum(damaged) != right, (damage, size, i, j)
    assert checksum(body[:-1]) != right


# -- encoding by fewer calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Lossless, BFloat16])
@pytest.mark.parametrize("together", [1, 3, 16])
@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_encoded_together_is_what_is_encoded_block_by_block(kind, together, kernels, monkeypatch):
    for module in (casts_module, by_kernels):
        monkeypatch.setattr(module, "_TOGETHER", together)
    if not kernels:
        monkeypatch.setattr(by_kernels, "load_numba", lambda name: None)
    sizes = [5, 3 * 2**16 + 1, 7, 2**16, 2**16 - 1, 1, 2 * 2**16, 33]  # some chunks end with padding
    values = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in sizes]
    for bad in (None, 1, 6):
        if bad is not None:
            values[bad][-1] = torch.inf
        compression = kind([FlatTensor(i, size) for i, size in enumerate(sizes)], torch.float32, torch.device("cpu"))
        message = torch.full((compression.nbytes,), 255, dtype=torch.uint8)
        stops = list(compression.encode(values, message, MessageId(0, 4), []))
        assert stops == [chunk.stop for chunk in compression.chunks]
        for chunk in compression.chunks:
            for block in chunk.blocks:
                wanted = values[block.tensor][block.start : block.stop].to(compression.code)
                there = message[block.at : block.at + wanted.nbytes].view(compression.code)
                assert torch.equal(there, wanted), block
        assert compression.flag(message) == (0 if bad is None else 5)
        if bad is not None:
            values[bad][-1] = 0.0
