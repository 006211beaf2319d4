"""A tree of plain values and tensors as JSON text and tensors by key, and back: bit for bit, and nothing is executed.

What JSON has stands for itself: None, bool, str, small int, finite float, list, and a dict whose keys are strings. All
else is an object of one key that begins with ``!``:

    {"!int": "0x20000000000001"}            an int of more than 53 bits        {"!float": "7ff0000000000000"} inf, nan: its bits
    {"!str": hex}                           a str with lone surrogates         {"!bytes": base64}
    {"!complex": [re, im]}                  {"!tuple": […]} {"!set": […]} {"!frozenset": […]} {"!deque": [[…], maxlen]}
    {"!dict": [[key, value], …]}            a dict with other keys             {"!counter": [[key, value], …]}
    {"!size": [2, 3]}                       a torch.Size                       {"!dtype": "float32"} {"!device": "cuda:0"}
    {"!tensor": key}                        or [key, dtype, shape], when its bytes are kept as uint8
    {"!sparse": [indices, values, shape, coalesced]}                           two tensors
    {"!array": [key, dtype, shape]}         a NumPy array, its bytes           {"!scalar": [dtype, hex]}   a NumPy scalar
"""

from __future__ import annotations

import base64
import enum
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decent_dp.errors import CheckpointError

__all__ = ["RESERVED", "Stored", "decode", "encode", "parse"]

# Keys that a file needs for itself.
RESERVED = ("__metadata__", "__tree__")

# Levels of a tree; each is at most three levels of JSON, which Python's reader must follow by recursion.
_MAX_DEPTH = 100
_MAX_KEY = 200
# Up to here every reader of JSON has integers exactly.
_EXACT = 1 << 53

# What safetensors keeps as it is; other dtypes go as bytes.
_DIRECT = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    )
)
_ARRAY_KINDS = "biufcSUmM"
_KEYS = (str, bytes, int, float, complex, np.generic, type(None), torch.Size, torch.dtype, torch.device)


# -- out -------------------------------------------------------------------------------------------------------------------


def encode(tree: Any, where: str) -> tuple[str, dict[str, Tensor]]:
    """Takes a tree apart.

    Args:
        tree: dicts (keys: None, bool, int, float, complex, str, bytes and tuples of them), lists, tuples, sets, deques and
            Counters of None, bool, int, float, complex, str, bytes, dense or sparse COO tensors of any dtype, NumPy arrays and
            scalars, ``torch.Size``, ``torch.dtype``, ``torch.device``. OrderedDict and defaultdict come back as dict,
            Parameters as plain tensors, a subclass of str or int as the plain one.
        where: what errors call the tree, such as ``"extra"``; "" calls its entries by their own keys.

    Returns:
        ASCII text, and the tensors by key, as they are in the tree where that is possible: of any strides, on any device, and
        maybe overlapping. Copy them (:mod:`staging`) before they are written. All else of the tree is copied.

    Raises:
        TypeError: something else is in the tree, or it contains itself; names the place.
    """
    encoder = _Encoder(where)
    node = encoder.node(tree)
    text = json.dumps(node, ensure_ascii=True, allow_nan=False, check_circular=False, separators=(",", ":"))
    return text, encoder.tensors


class _Encoder:
    def __init__(self, where: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._where = where
        self._path: list[Any] = []
        # Of the container that is open, for the keys of tensors.
        self._prefix = _spelled(where)
        self._open: set[int] = set()
        # The same object again is the same tensor in the file; kept alive so that no other takes its id.
        self._seen: dict[int, tuple[Any, Tensor]] = {}
        self._plain_keys: set[str] = set()

    def node(self, value: Any) -> Any:
        if _is_itself(value):
            return value
        if isinstance(value, Tensor):
            if id(value) not in self._seen:
                self._seen[id(value)] = self._tensor(value), value
            return self._seen[id(value)][0]
        if isinstance(value, np.generic) and not isinstance(value, (str, bytes)):
            return self._scalar(value)
        if isinstance(value, enum.Enum):
            raise self._refuse(value, "save its .value")
        if isinstance(value, int):
            number = int(value)
            return number if abs(number) <= _EXACT else {"!int": hex(number)}
        if isinstance(value, (float, str, bytes, complex)):
            return _plain(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if isinstance(value, torch.dtype):
            return {"!dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"!device": str(value)}
        return self._container(value)

    def _container(self, value: Any) -> Any:
        kind = type(value)
        if kind not in _CONTAINERS:
            raise self._refuse(value, "save its state_dict() or plain values")
        if id(value) in self._open:
            raise TypeError(f"{self._name()} contains itself: save plain values")
        if len(self._path) >= _MAX_DEPTH:
            raise TypeError(f"{self._name()} is nested more than {_MAX_DEPTH} levels deep: save flatter values")
        self._open.add(id(value))
        prefix, self._prefix = self._prefix, self._joined()
        try:
            return self._members(kind, value)
        finally:
            self._open.discard(id(value))
            self._prefix = prefix

    def _members(self, kind: type, value: Any) -> Any:
        if kind is list:
            return [self._inside(i, member) for i, member in enumerate(value)]
        if kind is torch.Size:
            return {"!size": [int(n) for n in value]}
        if kind is Counter:
            return {"!counter": self._pairs(value)}
        if kind is deque:
            return {"!deque": [[self._inside(i, member) for i, member in enumerate(value)], value.maxlen]}
        if kind is tuple:
            return {"!tuple": [self._inside(i, member) for i, member in enumerate(value)]}
        if kind in (set, frozenset):
            return {f"!{kind.__name__}": [self._key(member) for member in value]}
        if all(type(key) is str and (key in self._plain_keys or self._is_plain(key)) for key in value):
            return {key: self._inside(key, member) for key, member in value.items()}
        return {"!dict": self._pairs(value)}

    def _is_plain(self, key: str) -> bool:
        if key.startswith("!") or _has_surrogates(key):
            return False
        self._plain_keys.add(key)
        return True

    def _pairs(self, value: dict[Any, Any]) -> list[list[Any]]:
        return [[self._key(key), self._inside(key, member)] for key, member in value.items()]

    def _key(self, key: Any) -> Any:
        if not _may_be_key(key):
            raise TypeError(
                f"a key or member of {self._name()} is {_a(type(key).__name__)}: it may be str, bytes, int, float, bool, None "
                "or a tuple of them"
            )
        return self._inside(key, key)

    def _inside(self, step: Any, value: Any) -> Any:
        if _is_itself(value):
            return value
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
            parts = [self._dense(plain._indices(), ".indices"), self._dense(plain._values(), ".values")]
            return {"!sparse": [*parts, list(plain.shape), plain.is_coalesced()]}
        if plain.layout is not torch.strided:
            raise self._refuse(tensor, "save it .to_dense() or as sparse COO", what=f"{plain.layout} tensor")
        return self._dense(plain, "")

    def _dense(self, tensor: Tensor, suffix: str) -> Any:
        kept = tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
        if kept.dtype in _DIRECT:
            return {"!tensor": self._keep(kept, suffix)}
        key = self._keep(kept.contiguous().reshape(-1).view(torch.uint8), suffix)
        return {"!tensor": [key, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]}

    def _array(self, array: np.ndarray[Any, Any]) -> Any:
        if type(array) not in (np.ndarray, np.memmap) or array.dtype.kind not in _ARRAY_KINDS or not array.dtype.itemsize:
            raise self._refuse(array, "save plain arrays of numbers or text", what=f"{type(array).__name__} of {array.dtype}")
        raw = np.array(array, order="C").reshape(-1).view(np.uint8)
        return {"!array": [self._keep(torch.from_numpy(raw), ""), array.dtype.str, list(array.shape)]}

    def _scalar(self, value: np.generic) -> Any:
        if value.dtype.kind not in _ARRAY_KINDS:
            raise self._refuse(value, "save plain values")
        return {"!scalar": [value.dtype.str, value.tobytes().hex()]}

    def _keep(self, tensor: Tensor, suffix: str) -> str:
        base = (self._joined() or "value") + suffix
        key, n = base, 1
        while key in self.tensors or key in RESERVED:
            n += 1
            key = f"{base}#{n}"
        self.tensors[key] = tensor
        return key

    def _joined(self) -> str:
        if not self._path:
            return self._prefix[:_MAX_KEY]
        step = _spelled(self._path[-1])
        return (f"{self._prefix}.{step}" if self._prefix else step)[:_MAX_KEY]

    def _name(self) -> str:
        first, rest = (self._where, self._path) if self._where or not self._path else (str(self._path[0]), self._path[1:])
        return (first or "the tree") + "".join(f"[{step!r}]" for step in rest)

    def _refuse(self, value: Any, instead: str, what: str | None = None) -> TypeError:
        return TypeError(f"{self._name()} is {_a(what or type(value).__name__)}: {instead}")


_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, tuple, set, frozenset, deque, torch.Size)


def _is_itself(value: Any) -> bool:
    """Whether it is the same in JSON: the kinds that come most often."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    if kind is int:
        return bool(-_EXACT <= value <= _EXACT)
    return value is None or kind is bool or (kind is float and math.isfinite(value))


def _spelled(step: Any) -> str:
    return step if type(step) is str and step.isascii() else str(step).encode("utf-8", "replace").decode()


def _plain(value: float | str | bytes | complex) -> Any:
    if isinstance(value, float):
        number = float(value)
        return number if np.isfinite(number) else {"!float": struct.pack(">d", number).hex()}
    if isinstance(value, str):
        # JSON has no way to write two surrogates beside each other that are not one character.
        return {"!str": value.encode("utf-8", "surrogatepass").hex()} if _has_surrogates(value) else str(value)
    if isinstance(value, bytes):
        return {"!bytes": base64.b64encode(value).decode("ascii")}
    return {"!complex": [_plain(value.real), _plain(value.imag)]}


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text)


def _may_be_key(key: Any) -> bool:
    if type(key) in (tuple, frozenset):
        return all(_may_be_key(part) for part in key)
    return isinstance(key, _KEYS)


def _a(what: str) -> str:
    return f"{'an' if what[:1] in 'AEIOaeio' else 'a'} {what}"


# -- in --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A tensor or an array that is still in the file.

    Attributes:
        kind: 'tensor', 'sparse' or 'array'.
        parts: the keys, with dtype and shape where the bytes are kept as uint8.
        shape: of the whole; None where the file knows it.
        coalesced: of a sparse tensor.
    """

    kind: str
    parts: tuple[tuple[str, str | None, tuple[int, ...]], ...]
    shape: tuple[int, ...] | None = None
    coalesced: bool = False

    def load(self, get_tensor: Callable[[str], Tensor]) -> Any:
        """The tensor (on the CPU) or the array.

        Raises:
            CheckpointError: the file does not hold what the tree says.
        """
        try:
            if self.kind == "array":
                key, dtype, shape = self.parts[0]
                flat: np.ndarray[Any, Any] = get_tensor(key).numpy()
                return flat.view(np.dtype(dtype)).reshape(shape)
            loaded = [_viewed(get_tensor(key), dtype, shape) for key, dtype, shape in self.parts]
            if self.kind == "tensor":
                return loaded[0]
            sparse = torch.sparse_coo_tensor(
                loaded[0], loaded[1], self.shape, is_coalesced=self.coalesced or None, check_invariants=True
            )
            return sparse if self.coalesced else sparse._coalesced_(False)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            if isinstance(error, CheckpointError):
                raise
            names = " and ".join(f"'{key}'" for key, _, _ in self.parts)
            raise CheckpointError(f"the saved tree and its tensor {names} do not fit: {error}") from error


def _viewed(tensor: Tensor, dtype: str | None, shape: tuple[int, ...]) -> Tensor:
    return tensor if dtype is None else tensor.view(getattr(torch, dtype)).reshape(shape)


def decode(text: str, get_tensor: Callable[[str], Tensor]) -> Any:
    """Puts a tree together again.

    Args:
        text: what :func:`encode` returned.
        get_tensor: the tensor of a key.

    Raises:
        CheckpointError: the text was not made by :func:`encode`, or a tensor is missing or does not fit.
    """
    return parse(text, lambda stored: stored.load(get_tensor))


def parse(text: str, leaf: Callable[[Stored], Any] = lambda stored: stored) -> Any:
    """As :func:`decode`, with ``leaf`` of each :class:`Stored` in the place of tensors and arrays.

    Raises:
        CheckpointError: as for :func:`decode`.
    """
    try:
        root = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        return _Decoder(leaf).value(root, 0)
    except (_MalformedError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the saved tree is malformed: {error}") from error


class _MalformedError(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise _MalformedError("a key comes twice")
    return made


def _no_constant(name: str) -> Any:
    raise _MalformedError(f"{name} is no JSON")


class _Decoder:
    def __init__(self, leaf: Callable[[Stored], Any]) -> None:
        self._leaf = leaf

    def value(self, node: Any, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise _MalformedError(f"it is more than {_MAX_DEPTH} levels deep")
        if isinstance(node, list):
            return [self.value(member, depth + 1) for member in node]
        if not isinstance(node, dict):
            return node
        tags = [key for key in node if key.startswith("!")]
        if not tags:
            return {key: self.value(member, depth + 1) for key, member in node.items()}
        if len(node) > 1:
            raise _MalformedError(f"{tags[0]!r} does not stand alone")
        ((tag, body),) = node.items()
        if tag in _SCALARS:
            return _SCALARS[tag](body)
        if tag in _STORED:
            return self._leaf(_STORED[tag](body))
        return self._container(tag, body, depth)

    def _container(self, tag: str, body: Any, depth: int) -> Any:
        if tag in ("!dict", "!counter"):
            made: dict[Any, Any] = Counter() if tag == "!counter" else {}
            for pair in _list(body):
                key, member = _list(pair, 2)
                name = self._hashable(key, depth)
                if name in made:
                    raise _MalformedError("a key comes twice")
                made[name] = self.value(member, depth + 1)
            return made
        if tag == "!tuple":
            return tuple(self.value(member, depth + 1) for member in _list(body))
        if tag == "!deque":
            members, longest = _list(body, 2)
            if longest is not None and not _is_size(longest):
                raise _MalformedError("the length of a deque is no number")
            return deque((self.value(member, depth + 1) for member in _list(members)), longest)
        if tag in ("!set", "!frozenset"):
            kind = set if tag == "!set" else frozenset
            return kind(self._hashable(member, depth) for member in _list(body))
        raise _MalformedError(f"{tag!r} is no kind of value")

    def _hashable(self, node: Any, depth: int) -> Any:
        key = self.value(node, depth + 1)
        if not _may_be_key(key):
            raise _MalformedError(f"{_a(type(key).__name__)} is no key")
        return key


def _list(body: Any, length: int | None = None) -> list[Any]:
    if not isinstance(body, list) or (length is not None and len(body) != length):
        raise _MalformedError("a list of another length was due")
    return body


def _text(body: Any, pattern: str) -> str:
    if not isinstance(body, str) or not re.fullmatch(pattern, body):
        raise _MalformedError(f"{str(body)[:40]!r} is not of the form {pattern}")
    return body


def _is_size(body: Any) -> bool:
    return type(body) is int and 0 <= body < 1 << 63


def _shape(body: Any) -> tuple[int, ...]:
    if not all(_is_size(n) for n in _list(body)):
        raise _MalformedError("a shape holds what is no number")
    return tuple(body)


def _float(body: Any) -> float:
    if isinstance(body, dict):
        return float(struct.unpack(">d", bytes.fromhex(_text(body.get("!float"), "[0-9a-f]{16}")))[0])
    if type(body) is not float:
        raise _MalformedError("a float was due")
    return body


def _complex(body: Any) -> complex:
    real, imaginary = _list(body, 2)
    return complex(_float(real), _float(imaginary))


def _numpy_dtype(body: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(_text(body, r"[<>|=][a-zA-Z][0-9]*(\[[0-9a-zA-Z]+\])?"))
    except TypeError as error:
        raise _MalformedError(str(error)) from error
    if dtype.kind not in _ARRAY_KINDS or not dtype.itemsize:
        raise _MalformedError(f"{dtype} is no dtype of a saved array")
    return dtype


def _torch_dtype(body: Any) -> torch.dtype:
    dtype = getattr(torch, _text(body, "[a-z][a-z0-9_]*"), None)
    if not isinstance(dtype, torch.dtype):
        raise _MalformedError(f"this torch has no dtype {body!r}")
    return dtype


def _device(body: Any) -> torch.device:
    try:
        return torch.device(_text(body, "[a-z]+(:[0-9]+)?"))
    except RuntimeError as error:
        raise _MalformedError(f"this torch has no device {body!r}") from error


def _numpy_scalar(body: Any) -> Any:
    name, bits = _list(body, 2)
    dtype, raw = _numpy_dtype(name), bytes.fromhex(_text(bits, "([0-9a-f]{2})*"))
    if len(raw) != dtype.itemsize:
        raise _MalformedError(f"{len(raw)} bytes are no {dtype}")
    return np.frombuffer(raw, dtype)[0]


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "!int": lambda body: int(_text(body, "-?0x[0-9a-f]+"), 16),
    "!float": lambda body: _float({"!float": body}),
    "!str": lambda body: bytes.fromhex(_text(body, "([0-9a-f]{2})*")).decode("utf-8", "surrogatepass"),
    "!bytes": lambda body: base64.b64decode(_text(body, "[A-Za-z0-9+/]*={0,2}"), validate=True),
    "!complex": _complex,
    "!size": lambda body: torch.Size(_shape(body)),
    "!dtype": _torch_dtype,
    "!device": _device,
    "!scalar": _numpy_scalar,
}


def _part(body: Any) -> tuple[str, str | None, tuple[int, ...]]:
    if isinstance(body, str):
        return body, None, ()
    key, dtype, shape = _list(body, 3)
    return _text(key, "(?s).*"), str(_torch_dtype(dtype)).removeprefix("torch."), _shape(shape)


def _stored_sparse(body: Any) -> Stored:
    indices, values, shape, coalesced = _list(body, 4)
    parts = [_part(part["!tensor"]) for part in (indices, values) if isinstance(part, dict) and part.keys() == {"!tensor"}]
    if len(parts) != 2 or type(coalesced) is not bool:
        raise _MalformedError("a sparse tensor has indices, values, a shape and a flag")
    return Stored("sparse", tuple(parts), _shape(shape), coalesced)


def _stored_array(body: Any) -> Stored:
    key, dtype, shape = _list(body, 3)
    return Stored("array", ((_text(key, "(?s).*"), _numpy_dtype(dtype).str, _shape(shape)),), _shape(shape))


_STORED: dict[str, Callable[[Any], Stored]] = {
    "!tensor": lambda body: Stored("tensor", (_part(body),)),
    "!sparse": _stored_sparse,
    "!array": _stored_array,
}
