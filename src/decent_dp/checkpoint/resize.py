"""A checkpoint of n workers for a run of m.

    how="mean"      all start from the mean of the n replicas
    how="spread"    m < n: worker i starts from the mean of the replicas j with floor(j·m/n) = i
                    m > n: from replica floor(i·n/m);  m = n: from its own

What the mean of several workers' states is:

    floating and complex tensors   the mean, in float64 (complex128); exactly the value where all are equal
    integers, integer tensors      the mean, rounded to the nearest (a half to the even one); so are optimizers' 'step' counters
    floats                         the mean
    what some do not have          of those that have it: the state of a parameter that had no gradient everywhere
    the scaler                     the one of the smallest scale
    the open window                open if it is anywhere; the mean of the gradients of those that have one
    the rule's state               the mean
    the user's own and modules' extra state   floating and complex tensors: the mean; the rest is the first worker's
    all else                       the first worker's
    random states, the exchange, what a compression has learnt of single edges    none: their workers are no more
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decent_dp._checks import check_choice
from decent_dp.checkpoint.files import Shard
from decent_dp.checkpoint.serialization import Stored
from decent_dp.errors import CheckpointError

__all__ = ["HOW", "combined", "mean_tensors", "resized", "sources"]

HOW = ("mean", "spread")

# Floating numbers that count: optimizers keep their steps as float32.
_COUNTERS = frozenset({"step", "_step_count", "last_epoch"})
# Up to here float64 holds every integer.
_EXACT = 1 << 53


def resized(shards: Sequence[Shard], rank: int, world_size: int, how: str) -> dict[str, Any]:
    """What worker ``rank`` of a new run of ``world_size`` workers starts from.

    Args:
        shards: of all workers that saved, by rank.

    Returns:
        The tree {"snapshot", "random": None, "state"}. One tensor of each worker is in memory at a time.

    Raises:
        CheckpointError: a file cannot be read, or the workers' parameters do not fit each other; names it.
        ValueError: ``how`` is unknown.
    """
    return combined([shards[j] for j in sources(len(shards), rank, world_size, how)])


def sources(saved: int, rank: int, world_size: int, how: str) -> list[int]:
    """The ranks of the workers, of ``saved`` ones, whose mean worker ``rank`` of ``world_size`` starts from.

    Raises:
        ValueError: ``how`` is unknown.
    """
    if check_choice("resize", how, HOW) == "mean":
        return list(range(saved))
    if world_size < saved:
        return [j for j in range(saved) if j * world_size // saved == rank]
    return [rank * saved // world_size]


class _Part(NamedTuple):
    """A node of one worker's tree, with tensors that are still in its file."""

    shard: Shard
    node: Any


def combined(shards: Sequence[Shard]) -> dict[str, Any]:
    """The mean of what these workers saved, as the tree {"snapshot", "random": None, "state"}.

    Raises:
        CheckpointError: as for :func:`resized`.
    """
    trees = _trees(shards)
    return {"snapshot": _snapshot(_at("snapshot", trees)), "random": None, "state": _user_state(_at("state", trees))}


def mean_tensors(shards: Sequence[Shard], keys: Sequence[str]) -> dict[str, Tensor]:
    """The means of the tensors in the snapshots under ``keys``, by name.

    Raises:
        CheckpointError: as for :func:`resized`.
    """
    trees, found = _trees(shards), {}
    for key in keys:
        own = _at(key, _at("snapshot", trees))
        for name in _keys(own):
            found[name] = _parameter(name, trees, own) if key == "parameters" else _mean("", _at(name, own))
    return found


def _trees(shards: Sequence[Shard]) -> list[_Part]:
    for part in (trees := [_Part(shard, shard.outline()) for shard in shards]):
        if not _is_state(part.node):
            raise CheckpointError(f"{part.shard.file} cannot be used: its tree is not the state of a worker")
    return trees


def _is_state(tree: Any) -> bool:
    if not isinstance(tree, dict) or not all(isinstance(tree.get(key), dict) for key in ("snapshot", "state")):
        return False
    snapshot = tree["snapshot"]
    return all(isinstance(snapshot.get(key), dict) for key in ("parameters", "buffers", "optim", "grads"))


def _snapshot(parts: Sequence[_Part]) -> dict[str, Any]:
    opened = [part for part in parts if part.node.get("window") == "open"]
    made: dict[str, Any] = {}
    for key in _keys(parts):
        own = _at(key, parts)
        if key == "parameters":
            made[key] = {name: _parameter(name, parts, own) for name in _keys(own)}
        elif key == "buffers":
            made[key] = {name: _mean("", _at(name, own)) for name in _keys(own)}
        elif key == "optim":
            made[key] = _optim(own)
        elif key == "exchange":
            made[key] = None
        elif key == "compression":
            made[key] = {}
        elif key == "rule":
            made[key] = _mean("", own)
        elif key in ("window", "accumulate"):
            made[key] = _at(key, opened or parts)[0].node
        elif key == "grads":
            made[key] = _mean("", _at(key, opened or parts))
        elif key in ("round", "steps", "factor"):
            made[key] = _mean(key, own)
        elif key == "extra_state":
            made[key] = _user_state(own)
        else:
            made[key] = _first(own)
    return made


def _optim(parts: Sequence[_Part]) -> Any:
    scalers = [part for part in _at("scaler", parts) if part.node]
    smallest = min(scalers, key=lambda part: part.node.get("scale", math.inf), default=None)
    without = [_Part(part.shard, {k: v for k, v in part.node.items() if k != "scaler"}) for part in parts]
    return {**_mean("", without), "scaler": None if smallest is None else _load(smallest)}


def _mean(name: str, parts: Sequence[_Part]) -> Any:
    """The mean of states; ``name`` is the key that they have."""
    parts = [part for part in parts if part.node is not None]
    if len(parts) < 2:
        return _load(parts[0]) if parts else None
    nodes = [part.node for part in parts]
    if all(type(node) in (int, float) for node in nodes):
        return _number(name, nodes)
    if all(isinstance(node, Stored) for node in nodes):
        return _tensor(name, parts)
    if len({type(node) for node in nodes}) > 1:
        return _first(parts)
    kind = type(nodes[0])
    if kind is dict:
        return {key: _mean(str(key), _at(key, parts)) for key in _keys(parts)}
    if kind in (list, tuple, deque) and len({len(node) for node in nodes}) == 1:
        members = [_mean(name, [_Part(part.shard, part.node[i]) for part in parts]) for i in range(len(nodes[0]))]
        return deque(members, nodes[0].maxlen) if kind is deque else kind(members)
    return _first(parts)


def _parameter(name: str, parts: Sequence[_Part], own: Sequence[_Part]) -> Any:
    """The mean of a parameter, which all have alike."""
    have = [part for part in _at(name, own) if isinstance(part.node, Stored)]
    if len(have) < len(parts):
        lacking = next(part for part in parts if part.shard not in [other.shard for other in have])
        raise CheckpointError(f"{lacking.shard.file} does not fit the others' files: it has no parameter '{name}'")
    return _tensor("", have, must_fit=f"parameter '{name}' has another shape or dtype")


def _user_state(parts: Sequence[_Part]) -> Any:
    """The first one's, but for the tensors that others have at the same place."""
    node = parts[0].node
    alike = [part for part in parts if type(part.node) is type(node)]
    if type(node) is dict:
        return {key: _user_state(_at(key, alike)) for key in node}
    if type(node) in (list, tuple):
        members = ([_Part(part.shard, part.node[i]) for part in alike if i < len(part.node)] for i in range(len(node)))
        return type(node)(map(_user_state, members))
    if isinstance(node, Stored) and node.kind != "array" and len(alike) > 1:
        return _tensor("", alike, integers=False)
    return _load(parts[0])


def _tensor(name: str, parts: Sequence[_Part], must_fit: str = "", integers: bool = True) -> Any:
    """The mean of tensors, of which one is in memory at a time beside the first and the sum.

    Args:
        name: the key that they have; a counter is rounded.
        parts: nodes that are :class:`Stored`.
        must_fit: what to say where one has another shape or dtype; the first one's is taken where it is empty.
        integers: whether tensors of integers have a mean.
    """
    load = _load if all(part.node.kind == "sparse" for part in parts) else _load_dense
    first = load(parts[0])
    if not isinstance(first, Tensor):
        return first
    averaged = _has_mean(first, integers)
    if not averaged and not must_fit:
        return _load(parts[0])
    total, equal = None, True
    wide = torch.complex128 if first.is_complex() else torch.float64
    for part in parts[1:]:
        other = load(part)
        if not isinstance(other, Tensor) or (other.shape, other.dtype) != (first.shape, first.dtype):
            if must_fit:
                raise CheckpointError(f"{part.shard.file} does not fit {parts[0].shard.file}: {must_fit}")
            return _load(parts[0])
        equal = equal and _same_bits(first, other)
        if averaged:
            total = first.to(wide, copy=True) if total is None else total
            total += other.to(wide)
    return first if total is None or equal else _as(first, total / len(parts), name)


def _as(like: Tensor, mean: Tensor, name: str) -> Tensor:
    """The mean in the dtype of one of the tensors, which is returned itself where integers are too large for one."""
    if mean.is_sparse:
        mean = mean.coalesce()
    if like.is_complex() or (like.is_floating_point() and name not in _COUNTERS):
        return mean.to(like.dtype)
    if like.is_floating_point():
        return mean.round().to(like.dtype)
    return like if bool((mean.abs() >= _EXACT).any()) else mean.round().to(torch.int64).to(like.dtype)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.is_sparse:
        return False  # the same values may be written in different ways
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _has_mean(tensor: Tensor, integers: bool) -> bool:
    if tensor.dtype is torch.bool or not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        # Two numbers a byte: torch does not compute with it.
        return "float4" not in str(tensor.dtype)
    return integers and not tensor.is_sparse


def _number(name: str, values: Sequence[float]) -> float:
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, int) for value in values):
        return round(Fraction(sum(values)) / len(values))
    if not all(map(math.isfinite, values)):
        return sum(values) / len(values)
    mean = float(sum(map(Fraction, values)) / len(values))
    return float(round(mean)) if name in _COUNTERS else mean


def _first(parts: Sequence[_Part]) -> Any:
    """The first that is there."""
    there = [part for part in parts if part.node is not None]
    return _load(there[0]) if there else None


def _load(part: _Part) -> Any:
    """A node with its tensors."""
    shard, node = part
    if isinstance(node, Stored):
        return shard.load(node)
    if isinstance(node, dict):
        made = type(node)()
        for key, member in node.items():
            made[key] = _load(_Part(shard, member))
        return made
    if type(node) in (list, tuple):
        return type(node)(_load(_Part(shard, member)) for member in node)
    if isinstance(node, deque):
        return deque((_load(_Part(shard, member)) for member in node), node.maxlen)
    return node


def _load_dense(part: _Part) -> Any:
    value = _load(part)
    return value.to_dense() if isinstance(value, Tensor) and value.is_sparse else value


def _at(key: Any, parts: Sequence[_Part]) -> list[_Part]:
    return [_Part(shard, node[key]) for shard, node in parts if key in node]


def _keys(parts: Sequence[_Part]) -> list[Any]:
    """The keys of all, in the order in which they first come."""
    return list(dict.fromkeys(key for _, node in parts for key in node))
