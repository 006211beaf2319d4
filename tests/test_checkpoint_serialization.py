"""A tree as text and tensors, and back: bit for bit, and nothing but values."""

from __future__ import annotations

import argparse
import copy
import enum
import math
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from decent_dp.errors import CheckpointError
from decent_dp.replica.host_copies import HostMemory
from decent_dp.serialization import RESERVED, decode, encode


def there_and_back(tree: Any) -> Any:
    text, tensors = encode(tree)
    assert text.isascii()
    kept = HostMemory().copy(tensors).tensors
    for key, tensor in tensors.items():
        key.encode()  # no surrogates
        assert not any([tensor.requires_grad, tensor.is_conj(), tensor.is_neg()])
    return decode(text, kept.__getitem__)


def same(a: Any, b: Any) -> bool:
    """Whether two values are the same bit for bit, with the same types."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        if a.layout is torch.sparse_coo:
            return (
                a.shape == b.shape
                and a.is_coalesced() == b.is_coalesced()
                and same(a._indices(), b._indices())
                and same(a._values(), b._values())
            )
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a == b and math.copysign(1.0, a) == math.copysign(1.0, b) if a == a else b != b
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, deque):
        return a.maxlen == b.maxlen and same(list(a), list(b))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def raw(tensor: Tensor) -> bytes:
    return bytes(tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


# -- values ----------------------------------------------------------------------------------------------------------------

finite_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**52, max_value=2**70),
    st.floats(),
    st.binary(max_size=8),
    finite_text,
    st.sampled_from(["!tensor", "!", "", "__tree__", "!dict", "\ud800"]),
)
keys = st.one_of(finite_text, st.integers())
trees = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(finite_text, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4),
        st.lists(inner, max_size=3).map(lambda members: deque(members, 5)),
    ),
    max_leaves=20,
)


@given(trees)
@settings(max_examples=120)
def test_any_tree_of_values_comes_back(tree):
    assert same(there_and_back(tree), tree)


def test_values_that_json_has_not():
    tree = {
        "nan": float("nan"),
        "infinities": (math.inf, -math.inf),
        "zero": -0.0,
        "smallest": 5e-324,
        "long": 10**2000,
        "negative": -(2**64),
        "edge": [2**53, 2**53 + 1, -(2**53) - 1],
        "surrogate": ["\ud800", {"\udfff": 1}],
        "pair": "😀",
        "bytes": bytes(range(256)),
        "looks like a tag": {"!tensor": "weight", "a": 1},
        "a tag alone": {"!int": "0x1"},
        "nested tags": {"!dict": [["a", {"!tuple": []}]]},
        "the same key as a tag and not": [{"a": 1}, {"a": 2, "!a": 3}, {"!a": 4}],
        "numbers": {1: "int", -7: "negative", "1": "str"},
        "empty": [{}, [], (), "", b""],
        "milestones": Counter({3: 2, 5: 1}),
        "recent": deque([1, 2], maxlen=3),
        "torch": [torch.bfloat16, torch.float8_e5m2],
        "paths": [pathlib.Path("a/ü"), {"b": (pathlib.Path("/"),)}],
    }
    assert same(there_and_back(tree), tree)


def test_kinds_that_come_back_as_plain_ones():
    ordered = OrderedDict(b=1, a=OrderedDict(c=2))
    default: dict[str, list[int]] = defaultdict(list)
    default["x"].append(1)

    class Version(str):
        __slots__ = ()

    tree = {"ordered": ordered, "default": default, "torch": torch.__version__, "own": Version("1.0"), "size": torch.Size([2])}
    plain = {"ordered": {"b": 1, "a": {"c": 2}}, "default": {"x": [1]}, "torch": str(torch.__version__), "own": "1.0"}
    back = there_and_back(tree)
    assert same(back, {**plain, "size": (2,)})
    assert type(back["torch"]) is str
    assert type(back["ordered"]) is dict


# -- tensors ---------------------------------------------------------------------------------------------------------------

DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    *(name for name in ("float8_e8m0fnu", "float4_e2m1fn_x2") if hasattr(torch, name)),
]


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_shape(name):
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(3)
    for shape in [(), (1,), (0,), (3, 0, 2), (2, 3, 4)]:
        n = math.prod(shape) * dtype.itemsize
        bits = torch.randint(0, 2 if dtype is torch.bool else 256, (n,), dtype=torch.uint8, generator=generator)
        tensor = bits.view(dtype).reshape(shape)
        assert same(there_and_back({"a": tensor})["a"], tensor)


def test_views_of_all_kinds():
    base = torch.randn(4, 3, 5, 2)
    tree = {
        "base": base,
        "again": base,
        "transposed": base.permute(3, 1, 0, 2),
        "row": base[1],
        "overlapping": base[:2],
        "strided": base[::2, :, 1],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "channels last": base.contiguous(memory_format=torch.channels_last),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex128).conj().imag,
        "negated": torch._neg_view(torch.randn(3)),
        "parameter": nn.Parameter(torch.randn(3)),
        "not a leaf": nn.Parameter(torch.randn(3)) * 2,
        "scalar view": base[0, 0, 0, 0],
        "empty view": base[:0],
    }
    back = there_and_back(tree)
    for key, tensor in tree.items():
        assert type(back[key]) is Tensor, key
        assert torch.equal(back[key], tensor.detach()), key
        assert not back[key].requires_grad


def test_tensors_are_not_copied_and_everything_else_is():
    """Tensors are copied once, by the staging."""
    block, sparse = torch.randn(4, 3, 5, 2), torch.sparse_coo_tensor([[0, 2]], torch.ones(2), (3,), check_invariants=True)
    views = {"a": block[:2], "b": block[1:], "turned": block.permute(3, 1, 0, 2), "parameter": nn.Parameter(torch.randn(3))}
    array, inner = np.zeros(3), [1]
    text, tensors = encode({**views, "sparse": sparse, "array": array, "list": inner})
    for key, view in views.items():
        assert tensors[key].data_ptr() == view.data_ptr(), key
        assert tensors[key].stride() == view.stride(), key
    assert tensors["sparse.values"].data_ptr() == sparse._values().data_ptr()
    assert len(encode([block, block, block])[1]) == 1
    array += 1
    inner.append(2)
    back = decode(text, tensors.__getitem__)
    assert (back["array"].tolist(), back["list"]) == ([0, 0, 0], [1])


@pytest.mark.parametrize("coalesced", [False, True])
def test_sparse_tensors_keep_their_flag(coalesced):
    sparse = torch.sparse_coo_tensor([[2, 0, 2]], torch.randn(3, 2), (4, 2), check_invariants=True)
    sparse = sparse.coalesce() if coalesced else sparse
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0), (3,), check_invariants=True)
    double = torch.sparse_coo_tensor([[1], [0]], torch.ones(1, dtype=torch.complex128), (2, 2), check_invariants=True)
    single = torch.sparse_coo_tensor([[1]], [2.0], (3,), check_invariants=True)._coalesced_(coalesced)
    tree = {"s": sparse, "e": empty, "d": double, "1": single}
    assert same(there_and_back(tree), tree)


def test_arrays_and_random_states():
    rng = np.random.default_rng(1)
    readonly = np.arange(3)
    readonly.flags.writeable = False
    arrays = {
        "fortran": np.asfortranarray(rng.normal(size=(3, 4))),
        "backwards": np.arange(5)[::-1],
        "big-endian": np.arange(3, dtype=">i4"),
        "text": np.array(["a", "long\ud800"]),
        "bytes": np.array([b"a", b"bcd"]),
        "dates": np.array(["2020-01-01", "NaT"], dtype="datetime64[s]"),
        "half": np.array([1.5, np.nan], dtype=np.float16),
        "flags": np.array([True, False]),
        "scalar": np.array(3.5),
        "empty": np.zeros((0, 3)),
        "complex": np.array([1 + 2j]),
        "long double": np.array([1.1], dtype=np.longdouble),
        "read-only": readonly,
        "numbers": [
            np.float32(1.1),
            np.int64(-3),
            np.bool_(True),
            np.float64(np.nan),
            np.datetime64("2021-02-03"),
            np.uint8(7),
        ],
    }
    back = there_and_back(arrays)
    assert same(back, arrays)
    back["read-only"][0] = 5  # what comes back may be written to
    generator = random.Random(5)
    np.random.seed(3)
    states = {
        "python": generator.getstate(),
        "numpy": np.random.get_state(),
        "generator": rng.bit_generator.state,
        "mersenne": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    expected = (generator.random(), np.random.rand(), rng.normal())
    back = there_and_back(states)
    assert same(back, copy.deepcopy(states))
    generator.setstate(back["python"])
    np.random.set_state(back["numpy"])
    rng.bit_generator.state = back["generator"]
    assert (generator.random(), np.random.rand(), rng.normal()) == expected


def test_states_of_schedulers_and_optimizers():
    def optimizer(kind: str = "SGD") -> Any:
        return getattr(torch.optim, kind)([parameter], lr=0.1)

    parameter = nn.Parameter(torch.randn(3, 2))
    for scheduler in (
        lr_scheduler.MultiStepLR(optimizer(), [1, 1, 3]),
        lr_scheduler.ReduceLROnPlateau(optimizer()),
        lr_scheduler.ChainedScheduler([lr_scheduler.LambdaLR(optimizer(), lambda epoch: 0.9)]),
        lr_scheduler.OneCycleLR(optimizer("Adam"), 0.1, total_steps=10),
    ):
        state = scheduler.state_dict()
        assert there_and_back(state) == state
    for kind in ("Adam", "Adagrad", "Adafactor", "LBFGS"):
        own = optimizer(kind)

        def closure(own: Any = own) -> Tensor:
            own.zero_grad()
            loss = (parameter**2).sum()
            loss.backward()
            return loss

        own.step(closure)
        state = own.state_dict()
        assert same(there_and_back(state), {**state, "state": dict(state["state"])})


def test_keys_of_tensors_can_be_read_by_people():
    tree = {"snapshot": {"parameters": {"layer.0.weight": torch.ones(1)}}, "a": {"b": torch.ones(1)}, "a.b": torch.ones(1)}
    assert list(encode(tree)[1]) == ["snapshot.parameters.layer.0.weight", "a.b", "a.b#2"]
    odd = {"__metadata__": torch.ones(1), "__tree__": torch.zeros(1), "\ud800": torch.ones(1), "x" * 10_000: torch.ones(2)}
    text, tensors = encode(odd)
    assert not set(RESERVED) & tensors.keys()
    assert max(len(key.encode()) for key in tensors) < 300
    assert same(decode(text, tensors.__getitem__), odd)
    assert list(encode(torch.ones(1))[1]) == ["value"]


# -- what is refused -------------------------------------------------------------------------------------------------------


class Foo:
    x = 3


class Colour(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x y")


class OwnDict(dict):  # type: ignore[type-arg]
    pass


class OwnTensor(Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Foo(), "Foo: save its state_dict() or plain values"),
        (Foo, "type:"),
        (Colour.RED, "Colour: save its .value"),
        (Point(1, 2), "Point:"),
        (OwnDict(), "OwnDict:"),
        (argparse.Namespace(a=1), "Namespace:"),
        (random.Random(1), "Random:"),
        (torch.Generator(), "Generator:"),
        (torch.device("cpu"), "device: save str(device)"),
        (len, "builtin_function_or_method:"),
        (1j, "complex:"),
        ({1, 2}, "set:"),
        (frozenset({1}), "frozenset:"),
        (10**5000, "int of 16610 bits: save it as a str"),
        (np.array([None]), "ndarray of object:"),
        (np.zeros(2, dtype="i4,f4"), "ndarray of"),
        (np.ma.masked_array([1], [True]), "MaskedArray of int64:"),
        (torch.empty(2, device="meta"), "tensor without values:"),
        (nn.UninitializedParameter(), "tensor without values:"),
        (torch.ones(2).as_subclass(OwnTensor), "OwnTensor:"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_that_cannot_be_saved_is_named(value, message):
    with pytest.raises(TypeError) as caught:
        encode({"extra": {"sampler": [0, {"x": value}]}})
    assert str(caught.value).startswith("extra['sampler'][1]['x'] cannot be saved, as its type is " + message)


@pytest.mark.parametrize(
    "key", [Foo(), (1, 2), 1.5, None, True, b"a", torch.zeros(1), np.int64(3)], ids=lambda key: type(key).__name__
)
def test_keys_that_cannot_be_saved(key):
    with pytest.raises(TypeError, match=r"^extra\['a'\] has the key (.|\n)* of type \w+: keys must be str or int"):
        encode({"extra": {"a": {key: 1}}})


def test_cycles_and_depth():
    cycle: dict[str, Any] = {"a": []}
    cycle["a"].append(cycle)
    with pytest.raises(TypeError, match=r"^extra\['a'\]\[0\]\['a'\]\[0\]\['a'\] is nested .*, or contains itself"):
        encode({"extra": cycle})
    shared = [1]
    assert there_and_back([shared, shared]) == [[1], [1]]  # twice is no cycle
    for wrap in (lambda inner: [inner], lambda inner: {"a": inner}, lambda inner: {1: inner}):
        deep: Any = 1
        for _ in range(90):
            deep = wrap(deep)
        assert there_and_back(deep) == deep
        for _ in range(20_000):
            deep = wrap(deep)
        with pytest.raises(TypeError, match="nested more than 100 levels deep"):
            encode(deep)
        while isinstance(deep, (list, dict)):  # taken down from the outside: Python would do it by recursion
            deep = deep[0] if isinstance(deep, list) else deep.popitem()[1]


MALFORMED = [
    *("", "[", "{}x", "\ud800", "nul", '{"a":1,"a":2}', '{"!x":1}', '{"!":1}', '{"!int":"1"}', '{"!set":[1]}'),
    *('{"!bytes":"é"}', '{"!bytes":"a"}', '{"!bytes":3}', '{"!dict":{}}', '{"!dict":[[1]]}', '{"!dict":[[[1],2]]}'),
    *('{"!dict":[[1,2],[1,3]]}', '{"!dict":[[{"!tensor":"w"},2]]}', '{"!dict":[[true,2]]}', '{"!counter":[[1.5,2]]}'),
    *('{"!tuple":{}}', '{"!a":1,"b":2}', '{"!tuple":[],"!size":[]}'),
    *('{"!deque":[[1],-1]}', '{"!deque":[[1],"2"]}', '{"!size":[-1]}', '{"!size":[1.5]}', '{"!dtype":"load"}'),
    *('{"!dtype":"__class__"}', '{"!dtype":3}', '{"!device":"cuda:0; rm"}', '{"!device":"foo"}', '{"!tensor":"q"}'),
    *('{"!tensor":3}', '{"!tensor":["w","int99",[1]]}', '{"!tensor":["w","float64",[3]]}', '{"!tensor":["w","uint8",[5]]}'),
    *('{"!array":["w","O",[1]]}', '{"!array":["w","|O",[1]]}', '{"!array":["w","<i8",[7]]}', '{"!array":["q","<i8",[7]]}'),
    *('{"!array":["w","|V4",[3]]}', '{"!array":["w","i4,i4",[3]]}', '{"!scalar":["<f8","00"]}', '{"!scalar":["<f8"]}'),
    *('{"!array":["w","08",[3]]}', '{"!array":["w","a4",[3]]}', '{"!array":["w","<m8[1%2s]",[1]]}'),
    *('{"!scalar":["|O","0000000000000000"]}', '{"!sparse":[1,2,[3],true]}', '{"!sparse":[{"!tensor":"w"}]}'),
    '{"!sparse":[{"!tensor":"i"},{"!tensor":"w"},[2],false]}',  # an index that is out of range
    '{"!sparse":[{"!tensor":"w"},{"!tensor":"w"},[9],false]}',
    "[" * 100_000,
    '{"!scalar":["<f8","00000000000000000000000000000000"]}',
    "1" * 10_000,
]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:30])
def test_malformed_text_is_refused(text):
    tensors = {"w": torch.ones(3), "i": torch.tensor([[0, 1, 5]])}
    with pytest.raises(CheckpointError, match="the saved tree"):
        decode(text, tensors.__getitem__)


@given(st.data())
@settings(max_examples=150)
def test_text_with_an_error_is_refused_or_read(data):
    tree = {"a": [1, 2.5, None, {"b": torch.ones(2)}], 3: (np.arange(2), b"xyz", -(2**80)), "c": math.inf}
    text, tensors = encode(tree)
    at = data.draw(st.integers(0, len(text) - 1))
    changed = text[:at] + data.draw(st.characters(max_codepoint=0x17F)) + text[at + data.draw(st.integers(0, 3)) :]
    try:
        decode(changed, tensors.__getitem__)
    except CheckpointError:
        return
