"""Trees of plain values and tensors as JSON text and tensors by key, and back, bit for bit. Nothing is executed.

Values of JSON stand for themselves, as Python's ``json`` writes them: None, bool, int, float (also nan and infinities), str,
list, and a dict whose keys are strings. Everything else is an object with one key that begins with ``!``:

    {"!dict": [[key, value], ...]}      a dict with other keys         {"!counter": [[key, value], ...]}
    {"!tuple": [...]}                                                  {"!deque": [[...], maxlen]}
    {"!bytes": base64}                                                 {"!dtype": "float32"}    a torch.dtype
    {"!path": text}                     a path of pathlib
    {"!tensor": key}                    or [key, dtype, shape], if its bytes are stored as uint8
    {"!sparse": [indices, values, shape, coalesced]}                   indices and values are nodes of dense tensors
    {"!array": [key, dtype, shape]}     the bytes of a NumPy array     {"!scalar": [dtype, hex]}    a NumPy scalar
"""

from __future__ import annotations

import base64
import enum
import json
import pathlib
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decent_dp.errors import CheckpointError

__all__ = ["MALFORMED", "RESERVED", "Stored", "decode", "encode", "loaded", "parse", "read_json"]

# Keys that a file uses itself.
RESERVED = ("__metadata__", "__tree__")

# Levels of a tree. Each is at most three levels of JSON, which Python's reader follows by recursion.
_MAX_DEPTH = 100
# Characters of a tensor's key.
_MAX_KEY = 200
# Python converts no longer decimals (sys.set_int_max_str_digits).
_MAX_BITS = 10_000

# The dtypes of safetensors; tensors of other dtypes are stored as bytes.
_DIRECT = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
)
# Kinds of NumPy dtypes: bools, numbers, text, dates.
_ARRAY_KINDS = "biufcSUmM"
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, tuple, deque, torch.Size)


# -- encode ----------------------------------------------------------------------------------------------------------------


def encode(tree: Any) -> tuple[str, dict[str, Tensor]]:
    """Splits a tree into text and tensors.

    Args:
        tree: dicts (keys: str and int), lists, tuples, deques and Counters of None, bool, int, float, str, bytes, paths,
            dense or sparse COO tensors of any dtype, NumPy arrays and scalars, ``torch.dtype``. OrderedDict and defaultdict
            come back as dict, ``torch.Size`` as tuple, Parameters as plain tensors, a subclass of str or int as the plain one.

    Returns:
        ASCII text, and the tensors by key. They are the tensors of the tree where that is possible: of any strides, on any
        device, and maybe overlapping. Copy them (`staging`) before they are written.

    Raises:
        TypeError: the tree has something else in it, or contains itself; names the place.
    """
    encoder = _Encoder()
    text = json.dumps(encoder.node(tree), check_circular=False, separators=(",", ":"))
    return text, encoder.tensors


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._path: list[Any] = []
        # An object that occurs twice is one tensor in the file. Kept alive, so that no other object gets its id.
        self._seen: dict[int, tuple[Any, Any]] = {}

    def node(self, value: Any) -> Any:
        kind = type(value)
        if value is None or kind in (bool, float, str):
            return value
        if isinstance(value, Tensor):
            if id(value) not in self._seen:
                self._seen[id(value)] = self._tensor(value), value
            return self._seen[id(value)][0]
        if isinstance(value, (np.generic, np.ndarray)):
            is_odd = isinstance(value, np.ndarray) and kind not in (np.ndarray, np.memmap)
            if is_odd or value.dtype.kind not in _ARRAY_KINDS or not value.dtype.itemsize:
                raise self._refuse(value, "save plain numbers, text or arrays", what=f"{kind.__name__} of {value.dtype}")
        if isinstance(value, np.ndarray):
            raw = np.array(value, order="C").reshape(-1).view(np.uint8)
            return {"!array": [self._add(torch.from_numpy(raw)), value.dtype.str, list(value.shape)]}
        for tag, (of, written, _) in _ATOMS.items():
            if isinstance(value, of) and not isinstance(value, enum.Enum):
                return {tag: written(value)}
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise self._refuse(value, "save it as a str", what=f"int of {value.bit_length()} bits")
        for plain in (int, float, str):
            if isinstance(value, plain) and not isinstance(value, enum.Enum):
                return plain(value)
        return self._container(kind, value)

    def _container(self, kind: type, value: Any) -> Any:
        if kind not in _CONTAINERS:
            hints = {
                enum.Enum: "save its .value",
                torch.device: "save str(device)",
                object: "save its state_dict() or plain values",
            }
            raise self._refuse(value, next(hint for of, hint in hints.items() if isinstance(value, of)))
        if len(self._path) >= _MAX_DEPTH:
            del self._path[6:]
            raise TypeError(
                f"{self._name()} is nested more than {_MAX_DEPTH} levels deep, or contains itself: save flatter values"
            )
        if kind in (list, tuple, torch.Size, deque):
            members = [self._inside(i, member) for i, member in enumerate(value)]
            if kind is deque:
                return {"!deque": [members, value.maxlen]}
            return members if kind is list else {"!tuple": members}
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{self._name()} has the key {key!r} of type {type(key).__name__}: keys must be str or int")
        if kind is not Counter and all(type(key) is str and not key.startswith("!") for key in value):
            return {key: self._inside(key, member) for key, member in value.items()}
        tag = "!counter" if kind is Counter else "!dict"
        return {tag: [[key, self._inside(key, member)] for key, member in value.items()]}

    def _inside(self, step: Any, value: Any) -> Any:
        self._path.append(step)
        node = self.node(value)
        self._path.pop()
        return node

    def _tensor(self, tensor: Tensor) -> Any:
        if tensor.is_meta or (type(tensor) is not Tensor and torch.nn.parameter.is_lazy(tensor)):
            raise self._refuse(tensor, "it has no values yet", what="tensor without values")
        plain = tensor if type(tensor) is Tensor and not tensor.requires_grad else tensor.detach()
        what = type(plain).__name__ if type(plain) is not Tensor else None
        if what is not None or plain.is_quantized or plain.is_nested:
            raise self._refuse(tensor, "save a plain tensor", what=what or "quantized or nested tensor")
        if plain.layout is torch.sparse_coo:
            parts = {"indices": plain._indices(), "values": plain._values()}
            nodes = [self._inside(step, part) for step, part in parts.items()]
            return {"!sparse": [*nodes, list(plain.shape), plain.is_coalesced()]}
        if plain.layout is not torch.strided:
            raise self._refuse(tensor, "save it .to_dense() or as sparse COO", what=f"{plain.layout} tensor")
        if plain.dtype in _DIRECT:
            return {"!tensor": self._add(plain.resolve_conj().resolve_neg())}
        key = self._add(plain.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8))
        return {"!tensor": [key, _dtype_name(plain.dtype), list(plain.shape)]}

    def _add(self, tensor: Tensor) -> str:
        # Keys are UTF-8 in the file: a lone surrogate becomes a question mark.
        base = ".".join(map(str, self._path))[:_MAX_KEY].encode("utf-8", "replace").decode() or "value"
        key, n = base, 1
        while key in self.tensors or key in RESERVED:
            n += 1
            key = f"{base}#{n}"
        self.tensors[key] = tensor
        return key

    def _name(self) -> str:
        first, *rest = self._path or ["the tree"]
        return str(first) + "".join(f"[{step!r}]" for step in rest)

    def _refuse(self, value: Any, instead: str, what: str | None = None) -> TypeError:
        return TypeError(f"{self._name()} cannot be saved, as its type is {what or type(value).__name__}: {instead}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# -- decode ----------------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Stored:
    """A tensor or an array that is still in the file.

    Attributes:
        kind: 'tensor', 'sparse' or 'array'.
        load: reads it, tensors to the CPU. Raises CheckpointError if the tensors in the file do not fit the tree.
        weight: of the replica that it is of, in a mean.
    """

    kind: str
    load: Callable[[], Any]
    weight: float = 1.0


# Errors of Python, NumPy and torch for values that ``encode`` does not make.
MALFORMED = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)


def read_json(text: str) -> Any:
    """The value of a JSON text. Raises ValueError if it is not JSON, or has too many levels or digits, or a key twice."""
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it has too many levels") from error


def decode(text: str, get_tensor: Callable[[str], Tensor]) -> Any:
    """The inverse of `encode`; ``get_tensor`` returns the tensor of a key. Raises CheckpointError if the text does not fit."""
    return loaded(parse(text, get_tensor))


def parse(text: str, get_tensor: Callable[[str], Tensor], where: str = "") -> Any:
    """As `decode`, with a `Stored` in place of each tensor and array; errors begin with ``where``."""
    try:
        return _Decoder(get_tensor, where).value(read_json(text))
    except MALFORMED as error:
        raise CheckpointError(f"{where}the saved tree is malformed: {error}") from error


def loaded(tree: Any) -> Any:
    """The tree with all its tensors and arrays."""
    if isinstance(tree, Stored):
        return tree.load()
    if isinstance(tree, dict):
        return type(tree)({key: loaded(member) for key, member in tree.items()})
    if isinstance(tree, deque):
        return deque(map(loaded, tree), tree.maxlen)
    return type(tree)(map(loaded, tree)) if isinstance(tree, (list, tuple)) else tree


def _unique(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key occurs twice")
    return made


class _Decoder:
    def __init__(self, get_tensor: Callable[[str], Tensor], where: str) -> None:
        self._get, self._where = get_tensor, where

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(member) for member in node]
        if not isinstance(node, dict):
            return node
        tags = [key for key in node if key.startswith("!")]
        if not tags:
            return {key: self.value(member) for key, member in node.items()}
        if len(node) > 1:
            raise ValueError(f"{tags[0]!r} has other keys beside it")
        ((tag, body),) = node.items()
        if tag in _ATOMS:
            return _ATOMS[tag][2](body)
        if tag in ("!tensor", "!sparse", "!array"):
            return Stored(tag[1:], partial(self._load, tag, body))
        return self._container(tag, body)

    def _container(self, tag: str, body: Any) -> Any:
        if tag in ("!dict", "!counter"):
            pairs = [(key, self.value(member)) for key, member in _list(body)]
            if odd := [key for key, _ in pairs if type(key) not in (str, int)]:
                raise ValueError(f"{str(odd[0])[:40]!r} cannot be a key")
            made = _unique(pairs)
            return Counter(made) if tag == "!counter" else made
        if tag == "!tuple":
            return tuple(self.value(member) for member in _list(body))
        if tag == "!deque":
            members, longest = body
            return deque((self.value(member) for member in _list(members)), longest)
        raise ValueError(f"{tag!r} is not a kind of value")

    def _load(self, tag: str, body: Any) -> Any:
        try:
            if tag == "!tensor":
                return self._tensor(body)
            if tag == "!array":
                key, dtype, shape = body
                flat: np.ndarray[Any, Any] = self._get(key).numpy()
                return flat.view(_numpy_dtype(dtype)).reshape(shape)
            indices, values, shape, coalesced = body
            sparse = torch.sparse_coo_tensor(
                self._tensor(indices["!tensor"]),
                self._tensor(values["!tensor"]),
                shape,
                is_coalesced=coalesced or None,
                check_invariants=True,
            )
            return sparse if coalesced else sparse._coalesced_(False)
        except CheckpointError:
            raise
        except MALFORMED as error:
            raise CheckpointError(
                f"{self._where}the saved tree does not fit its tensors at {str(body)[:99]}: {error}"
            ) from error

    def _tensor(self, body: Any) -> Tensor:
        if isinstance(body, str):
            return self._get(body)
        key, dtype, shape = body
        return self._get(key).view(_torch_dtype(dtype)).reshape(shape)


def _list(body: Any) -> list[Any]:
    if not isinstance(body, list):
        raise ValueError("a list was expected")
    return body


def _torch_dtype(body: Any) -> torch.dtype:
    dtype = getattr(torch, body, None) if isinstance(body, str) else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {str(body)[:40]!r}")
    return dtype


def _numpy_dtype(body: Any) -> np.dtype[Any]:
    # As ``dtype.str`` writes them. NumPy reads other texts as Python, or with a warning.
    if not isinstance(body, str) or not re.fullmatch(rf"[<>|=]?[{_ARRAY_KINDS}][0-9]{{0,9}}(\[[0-9A-Za-z]{{1,8}}\])?", body):
        raise ValueError("a dtype was expected")
    dtype = np.dtype(body)
    if not dtype.itemsize:
        raise ValueError(f"{dtype} cannot be the dtype of a saved array")
    return dtype


def _numpy_scalar(body: Any) -> Any:
    name, bits = body
    dtype, raw = _numpy_dtype(name), bytes.fromhex(bits)
    if len(raw) != dtype.itemsize:
        raise ValueError(f"{len(raw)} bytes are not a {dtype}")
    return np.frombuffer(raw, dtype)[0]


# Values without members: the type, how one is written, and how it is read.
_ATOMS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "!scalar": (np.generic, lambda value: [value.dtype.str, value.tobytes().hex()], _numpy_scalar),
    "!bytes": (
        bytes,
        lambda value: base64.b64encode(value).decode("ascii"),
        partial(base64.b64decode, validate=True),
    ),
    "!dtype": (torch.dtype, _dtype_name, _torch_dtype),
    "!path": (pathlib.PurePath, str, pathlib.Path),
}
