"""What of a run must fit its topology."""

from __future__ import annotations

from decent_dp.compression import Compression, Lossless, LowRank
from decent_dp.rules import Rule
from decent_dp.topo import Topology

__all__ = ["fit_rule"]


def fit_rule(rule: Rule, compression: type[Compression], topology: Topology, *, narrow: bool) -> Rule:
    """Returns the rule for this topology.

    Args:
        topology: includes ``mix_every``.
        narrow: whether there are parameters of less than 32 bits.

    Raises:
        ValueError: the compression or the rule does not work with the topology.
    """
    if compression.pairs_only and (largest := Topology.largest_group(topology)) > 2:
        raise ValueError(
            f"compression={compression.name!r} needs a topology of pairs, because only two workers can find a low-rank part of "
            f"their difference, and {topology!r} mixes groups of {largest}: use 'base-2', 'one-peer-exp', 'ring' or "
            "'random-matching', or another compression."
        )
    return rule.fit(topology, lossy=narrow or compression is not Lossless, partial=issubclass(compression, LowRank))
