"""Messages of hostile size: an error soon, in little memory."""

from __future__ import annotations

import json

import pytest

from decent_dp.replica import state_receiver
from decent_dp.replica.transfer import PartialState, unpack_message


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (b"[" * 10**6, "too many"),
        (b'{"a":' * 50_000, "too many levels"),
        (b"[" + b"[]," * 340_000 + b"0]", "no dict"),
        (b'{"a":' + b"1" * 10_000 + b"}", "4300"),
        (b'{"a":1,"a":2}', "twice"),
        (b'{"a":"\xff"}', "no JSON"),
    ],
    ids=["levels of lists", "levels of dicts", "lists", "digits", "twice", "no text"],
)
def test_a_message_of_hostile_size(message, cause):
    with pytest.raises(ConnectionError, match=cause):
        unpack_message(message + b"\n")


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        ([["a", "uint8", [10**12]]], "1000000000000 bytes, and 67108864 are allowed"),
        ([["a", "float32", [2**14, 2**10]], ["b", "uint8", [1]]], "67108865 bytes"),
        ([["a", "uint8", [-1]]], "negative"),
        ([["a", "float32", [2**62, 2**62]]], "no state can begin"),
        ([["a", "float99", [1]]], "no dtype 'float99'"),
        ([["a", "uint8", [2.5]]], "no state can begin"),
        ([["a"]], "no state can begin"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_state_of_hostile_size(tensors, cause):
    header = json.dumps({"tree": "null", "tensors": tensors}).encode()
    partial = PartialState(state_receiver._LEAST)
    partial.begin("c", len(header) + 10**6, len(header))
    with pytest.raises(ConnectionError, match=cause):
        partial.add(memoryview(header))
    assert (partial.name, partial.filled) == (None, 0)


@pytest.mark.parametrize(("size", "header"), [(10, 11), (2**40, 2**31), (10, 0), (10, -1)], ids=lambda value: str(value))
def test_a_header_of_hostile_size(size, header):
    with pytest.raises(ConnectionError, match="no state can begin with a header of"):
        PartialState().begin("c", size, header)


def test_a_state_with_more_bytes_than_it_announced():
    header = json.dumps({"tree": "null", "tensors": [["a", "uint8", [3]]]}).encode()
    partial = PartialState()
    partial.begin("c", len(header) + 3, len(header))
    with pytest.raises(ConnectionError, match="more than the"):
        partial.add(memoryview(header + bytes(4)))


def test_a_state_whose_tensors_are_not_as_large_as_it():
    header = json.dumps({"tree": "null", "tensors": [["a", "uint8", [3]]]}).encode()
    partial = PartialState()
    partial.begin("c", len(header) + 4, len(header))
    with pytest.raises(ConnectionError, match="its tensors have 3 bytes, and 4 are to come"):
        partial.add(memoryview(header))
