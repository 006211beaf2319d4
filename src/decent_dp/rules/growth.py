"""Whether a rule drives replicas apart that differ, on a topology."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from decent_dp.rules.rule import Round, Rule
from decent_dp.topo import Topology, schedule

__all__ = ["grows"]

# Mixes in which replicas must come closer: the first to the second number, so that 1000 workers take less than a second.
_FEWEST, _MOST, _FOR_ONE = 256, 1024, 2**18
# Far above rounding errors, which do not become smaller.
_NOTHING = 1e-9
# Replicas that are so far apart grow without end. Their squares are far below the largest number.
_HUGE = 1e50


def grows(rule: Rule, topology: Topology) -> bool:
    """Returns whether the distance of replicas grows that make no steps, in the first rounds or in those of the last part.

    Args:
        rule: linear in the parameters.
        topology: includes ``mix_every``.
    """
    last = schedule.stages_of(topology)[-1].topology
    return any(_grows_in(rule, part) for part in ([last] if last is topology else [topology, last]))


@torch.no_grad()
def _grows_in(rule: Rule, topology: Topology) -> bool:
    n = topology.world_size
    count = max(_FEWEST, min(_MOST, _FOR_ONE // n))
    x = torch.zeros(n, 2, dtype=torch.float64, device="cpu")
    state = rule.state(x)
    x += torch.from_numpy(np.random.default_rng(0).normal(size=(n, 2)))
    distances = []
    for t in itertools.islice((t for t in itertools.count() if schedule.turn_of(topology, t).mixes), count):
        proposal = rule.propose(x, state, Round(t)).numpy()
        difference = np.zeros_like(proposal)
        for edge in topology.round(t):
            if len(edge.ranks) > 1:
                own = proposal[edge.ranks]
                others = (own.sum(0) - own) / (len(own) - 1)
                rates = [[(1 - edge.weight) * schedule.pull_of(topology, edge, rank)] for rank in edge.ranks]
                difference[edge.ranks] = np.multiply(rates, others - own)
        rule.apply(x, state, torch.from_numpy(difference), Round(t))
        distances.append(float((x - x.mean(0)).norm()))
        if not distances[-1] <= _HUGE:  # also of NaN
            return True
    quarter = count // 4
    return max(distances[-quarter:]) > max(*distances[quarter : 2 * quarter], _NOTHING)
