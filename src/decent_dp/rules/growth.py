"""Whether a rule drives replicas apart that differ, on a topology."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from decent_dp.rules.base import Round, Rule
from decent_dp.topo import Topology

__all__ = ["refuse_growth"]

# Mixes in which replicas must come closer: at most the second number, and fewer for many workers: about a second.
_FEWEST, _MOST, _FOR_ONE = 64, 256, 2**18
# Far above rounding errors, which do not become smaller.
_NOTHING = 1e-9
# Momenta that are recommended.
_SMALLER = (0.7, 0.5, 0.3, 0.1)


def refuse_growth(rule: Any, topology: Topology, *, partial: bool) -> None:
    """Checks that a rule with a field ``momentum`` does not drive replicas apart.

    Args:
        topology: includes ``mix_every``.
        partial: as of ``Rule.fit``.

    Raises:
        ValueError: it does.
    """
    if not rule.momentum:
        return
    if partial:
        raise ValueError(
            f"{rule!r} does not work with compression='low-rank:...': its momentum repeats a pull in directions that the next "
            "mixes do not see, and replicas are driven apart. Use momentum=0, or compression=None, 'bfloat16' or 'int8'."
        )
    if not _grows(rule, topology):
        return
    smaller = (momentum for momentum in _SMALLER if momentum < rule.momentum)
    works = next((value for value in smaller if not _grows(dataclasses.replace(rule, momentum=value), topology)), 0.0)
    raise ValueError(
        f"{rule!r} does not work with {topology!r}: its momentum repeats the pull of a neighbour in mixes with others, and "
        f"drives {topology.world_size} replicas apart. Use momentum={works:g}, or topology='complete'."
    )


def _grows(rule: Rule, topology: Topology) -> bool:
    last = topology._final_part()[0]
    parts = [last] if last is topology else [topology, last]
    return any(_grows_in(rule, part) for part in parts)


@torch.no_grad()
def _grows_in(rule: Rule, topology: Topology) -> bool:
    """Follows replicas of two numbers that make no steps, from a distance that they got in the first."""
    n = topology.world_size
    mixes = max(_FEWEST, min(_MOST, _FOR_ONE // n))
    x = torch.zeros(n, 2, dtype=torch.float64, device="cpu")
    state = rule.state(x)
    x += torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    distances, t = [], -1
    for _ in range(mixes):
        t = topology._next_mix(t + 1)
        proposal = rule.propose(x, state, Round(t)).clone()
        difference = torch.zeros_like(x)
        for edge in topology.round(t):
            if len(edge.ranks) > 1:
                own = proposal[edge.ranks]
                others = (own.sum(0) - own) / (len(own) - 1)
                difference[edge.ranks] = (1 - edge.weight) * (others - own)
        rule.apply(x, state, difference, Round(t))
        distances.append(float((x - x.mean(0)).norm()))
    quarter = mixes // 4
    return not max(distances[-quarter:]) <= max(*distances[quarter : 2 * quarter], _NOTHING)  # also of NaN
