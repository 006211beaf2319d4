"""A checkpoint of n workers for a run of m.

    how="mean"      all start from the mean of the n replicas
    how="spread"    m < n: worker i starts from the mean of the replicas j with floor(j·m/n) = i
                    m > n: from replica floor(i·n/m);  m = n: from its own

The mean of the states of several workers is:

    floating and complex tensors   the mean by weights, in float64 (complex128); exactly the value where all are equal
    integers, integer tensors      the mean, rounded to the nearest (a half to the even one); so are optimizers' 'step' counters
    floats                         the mean
    entries that some do not have  the mean over those that have it: the state of a parameter that had no gradient everywhere
    the scaler                     the one of the smallest scale
    the open window                open if it is open anywhere; the mean of the gradients of those that have one
    the rule's state               the mean
    the user's state and modules' extra state   floating and complex tensors: the mean; the rest is the first worker's
    everything else                the first worker's
    random states, a compression's state    none: they belong to workers and edges that are gone
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from decent_dp._checks import check_choice
from decent_dp.checkpoint.files import Shard
from decent_dp.errors import CheckpointError
from decent_dp.serialization import MALFORMED, Stored, loaded

__all__ = ["HOW", "combined", "mean_tensors", "sources", "state_of_worker"]

HOW = ("mean", "spread")

# Floating numbers that count: optimizers keep their steps as float32.
_COUNTERS = frozenset({"step", "_step_count", "last_epoch"})
# float64 represents every integer up to here.
_EXACT = 1 << 53


def sources(saved: int, rank: int, world_size: int, how: str) -> list[int]:
    """The ranks of the workers, of ``saved`` ones, whose mean worker ``rank`` of ``world_size`` starts from."""
    if check_choice("resize", how, HOW) == "mean":
        return list(range(saved))
    if world_size < saved:
        return [j for j in range(saved) if j * world_size // saved == rank]
    return [rank * saved // world_size]


def state_of_worker(shard: Shard) -> Any:
    """The tree of a shard, with its tensors still in the file. Raises CheckpointError if it is not the state of a worker."""
    tree = shard.tree()
    fits = isinstance(tree, dict) and tree.keys() <= {"snapshot", "random", "state"}
    fits = fits and all(isinstance(tree.get(key), dict) for key in ("snapshot", "state"))
    parts = ("parameters", "buffers", "optim", "grads")
    fits = fits and all(isinstance(tree["snapshot"].get(key), dict) for key in parts)
    weight = tree["snapshot"].get("weight", 1.0) if fits else None
    if not isinstance(weight, (int, float)) or not 0.0 < weight < math.inf:
        raise CheckpointError(f"{shard.file} cannot be used: its tree is not the state of a worker")
    for stored in tree_leaves(tree["snapshot"]):
        if isinstance(stored, Stored):
            stored.weight = weight
    return tree


def combined(shards: Sequence[Shard]) -> dict[str, Any]:
    """The mean of what these workers saved, as the tree {"snapshot", "random": None, "state"}.

    One tensor of each worker is in memory at a time.

    Raises:
        CheckpointError: a file cannot be read, or the workers' parameters do not fit each other; names it.
    """
    trees = list(map(state_of_worker, shards))
    with _naming(shards):
        return {"snapshot": _snapshot(_at("snapshot", trees)), "random": None, "state": _user_state(_at("state", trees))}


def mean_tensors(shards: Sequence[Shard], keys: Sequence[str]) -> dict[str, Tensor]:
    """The means of the tensors in the snapshots under ``keys``, by name. Raises as `combined`."""
    trees = list(map(state_of_worker, shards))
    with _naming(shards):
        means = _snapshot([{key: tree["snapshot"][key] for key in keys} for tree in trees])
    return {name: tensor for key in keys for name, tensor in means[key].items()}


@contextlib.contextmanager
def _naming(shards: Sequence[Shard]) -> Iterator[None]:
    """Names the checkpoint in the errors of values that are not as ``save`` writes them."""
    try:
        yield
    except CheckpointError:
        raise
    except MALFORMED as error:
        raise CheckpointError(f"{shards[0].file.parent} cannot be combined: {type(error).__name__}: {error}") from error


def _snapshot(all_: Sequence[dict[str, Any]]) -> dict[str, Any]:
    windows = [snapshot for snapshot in all_ if snapshot.get("window") == "open"] or all_
    made: dict[str, Any] = {}
    for key in _keys(all_):
        if key not in ("exchange", "link"):  # of format 3
            nodes = _at(key, windows if key in ("window", "accumulate", "grads") else all_)
            made[key] = _MEAN_OF.get(key, _first)(nodes)
    return made


def _parameters(all_: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means of parameters, which all workers have in the same shape and dtype."""
    made = {}
    for name in _keys(all_):
        nodes = _at(name, all_)
        if len(nodes) < len(all_) or not all(isinstance(node, Stored) for node in nodes):
            raise ValueError(f"parameter '{name}' is not in all files")
        made[name] = _tensor(nodes, parameter=name)
    return made


def _optim(nodes: Sequence[dict[str, Any]]) -> Any:
    scalers = [node["scaler"] for node in nodes if node.get("scaler")]
    smallest = min(scalers, key=lambda scaler: scaler.get("scale", math.inf), default=None)
    others = [{key: value for key, value in node.items() if key != "scaler"} for node in nodes]
    return {**_mean(others, "optim"), "scaler": loaded(smallest)}


def _mean(nodes: Sequence[Any], name: str | None = None) -> Any:
    """The mean of states; ``name`` is the key that they have in an optimizer's state, None elsewhere."""
    nodes = [node for node in nodes if node is not None]
    if len(nodes) < 2:
        return _first(nodes)
    kinds = {type(node) for node in nodes}
    if kinds <= {int, float}:
        return _number(nodes, name)
    if kinds == {Stored}:
        return _tensor(nodes, counts=name in _COUNTERS)
    if kinds == {dict}:
        return {key: _mean(_at(key, nodes), None if name is None else str(key)) for key in _keys(nodes)}
    if kinds in ({list}, {tuple}, {deque}) and len({len(node) for node in nodes}) == 1:
        members = (_mean(members, name) for members in zip(*nodes, strict=True))
        return deque(members, nodes[0].maxlen) if kinds == {deque} else type(nodes[0])(members)
    return _first(nodes)


def _user_state(nodes: Sequence[Any]) -> Any:
    """The first one's, but for the floating tensors that others have at the same place."""
    first, kind = nodes[0], type(nodes[0])
    alike = [node for node in nodes if type(node) is kind]
    if kind is dict:
        return {key: _user_state(_at(key, alike)) for key in first}
    if kind in (list, tuple):
        return kind(_user_state([node[i] for node in alike if i < len(node)]) for i in range(len(first)))
    if kind is Stored and first.kind != "array" and len(alike) > 1:
        return _tensor(alike, integers=False)
    return loaded(first)


def _tensor(nodes: Sequence[Stored], *, counts: bool = False, integers: bool = True, parameter: str = "") -> Any:
    """The mean of tensors, of which one is in memory at a time beside the first and the sum; the first if they have none.

    Args:
        counts: a floating mean is rounded.
        integers: whether tensors of integers have a mean.
        parameter: its name. Other tensors may differ in shape or dtype.
    """
    mixed = len({node.kind for node in nodes}) > 1
    first: Any = None
    total, equal = None, True
    for node in nodes:
        value = node.load()
        if mixed and node.kind == "sparse":
            value = value.to_dense()
        first = value if first is None else first
        alike = isinstance(value, Tensor) and (value.shape, value.dtype) == (first.shape, first.dtype)
        if parameter and not alike:
            raise ValueError(f"parameter '{parameter}' has different shapes or dtypes in the files")
        if not alike or not _has_mean(value, integers, len(nodes)):
            return nodes[0].load()
        part = value.to(torch.complex128 if value.is_complex() else torch.float64, copy=True).mul_(node.weight)
        total = part if total is None else total.add_(part)
        equal = equal and _same_bits(first, value)
    return first if equal or total is None else _as(first, total / sum(node.weight for node in nodes), counts)


def _as(like: Tensor, mean: Tensor, counts: bool) -> Tensor:
    """The mean in the dtype of one of the tensors."""
    if mean.is_sparse:
        mean = mean.coalesce()
    if like.is_floating_point() or like.is_complex():
        return (mean.round() if counts else mean).to(like.dtype)
    return mean.round().to(torch.int64).to(like.dtype)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.is_sparse:
        return False  # the same values may be written in different ways
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def _has_mean(tensor: Tensor, integers: bool, n: int) -> bool:
    if tensor.dtype is torch.bool or not tensor.numel():
        return False
    if tensor.is_floating_point() or tensor.is_complex():
        # torch does not compute with two numbers per byte.
        return "float4" not in str(tensor.dtype)
    # Else the sum of ``n`` such tensors may not be exact.
    return integers and not tensor.is_sparse and not bool((tensor.double().abs() > _EXACT / n).any())


def _number(values: Sequence[float], name: str | None) -> float:
    if all(value == values[0] for value in values):
        return values[0]
    if all(isinstance(value, int) for value in values):
        return round(Fraction(sum(values)) / len(values))
    average = statistics.mean(values)
    return float(round(average)) if name in _COUNTERS and math.isfinite(average) else average


def _first(nodes: Sequence[Any]) -> Any:
    """The first that is not None."""
    return loaded(next((node for node in nodes if node is not None), None))


def _at(key: Any, nodes: Sequence[dict[Any, Any]]) -> list[Any]:
    return [node[key] for node in nodes if key in node]


def _keys(nodes: Sequence[dict[Any, Any]]) -> list[Any]:
    """The keys of all, in the order in which they first come."""
    return list(dict.fromkeys(key for node in nodes for key in node))


# How the entries of snapshots are combined, where that is not the first one's.
_MEAN_OF: dict[str, Callable[[Sequence[Any]], Any]] = {
    **dict.fromkeys(("accumulate", "window"), itemgetter(0)),
    "compression": lambda nodes: {},
    **dict.fromkeys(("buffers", "factor", "grads", "round", "rule", "steps"), _mean),
    "extra_state": _user_state,
    "optim": _optim,
    "parameters": _parameters,
}
