"""Which topologies fit, bad input, and subclasses whose own names are those of the base class."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from decent_dp import gossip
from decent_dp.tools.analysis import analyse, consensus_error, mixing_matrix
from decent_dp.topo import (
    BaseTwoTopology,
    Edge,
    EveryTopology,
    OnePeerExpTopology,
    RandomMatchingTopology,
    SwitchTopology,
    Topology,
    TopologyReg,
    make_topology,
    schedule,
)
from decent_dp.topo.registry import names_that_fit, why_unfit
from decent_dp.topo.schedule import edges_ahead
from decent_dp.transport import run_replicas

# -- names of one's own ----------------------------------------------------------------------------------------------------


class Own(Topology):
    """Sets what it likes."""

    from_graph = 3  # type: ignore[assignment]
    title = "on the class"  # type: ignore[assignment]

    def __init__(self, local_world_size: int = 1, **options: Any) -> None:
        self.world_size = "mine"  # type: ignore[assignment, misc]
        super().__init__(local_world_size, **options)
        self.every = 5  # type: ignore[assignment, method-assign]
        self.local_world_size = None  # type: ignore[assignment, misc]

    def _get_topo_edges(self) -> list[list[Edge]]:
        n = self._world_size
        return [[Edge([i, (i + 1) % n], 0.5) for i in range(first, n, 2)] if n > 1 else [Edge([0], 1.0)] for first in range(2)]


class OwnRandom(RandomMatchingTopology):
    def __init__(self, local_world_size: int = 1, **options: Any) -> None:
        super().__init__(local_world_size, **options)
        self.title = self.every = self.world_size = self.local_world_size = 0  # type: ignore[assignment, method-assign, misc]


class Plain(Topology):
    """The same, and sets nothing."""

    _get_topo_edges = Own._get_topo_edges


@pytest.mark.parametrize("kind", [Own, OwnRandom])
def test_a_subclass_may_set_any_name_in_a_training(kind):
    TopologyReg.registry["own"] = kind

    def work(transport: Any) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossip(model, optimizer, topology="own:4,complete", mix_every=2, transport=transport)
        for _ in range(4):
            model.weight.grad = torch.full((1, 1), float(transport.rank))
            optimizer.step()
        replica.close()
        return model.weight.item()

    found = run_replicas(4, work)
    assert 0 < max(found) - min(found) < 11, "without a mix it would be 12"


def test_a_subclass_may_set_any_name_elsewhere():
    own, plain = Own(world_size=6), Plain(world_size=6)
    assert (own.world_size, own.every, own.title) == ("mine", 5, "on the class")
    for of in (
        lambda x: [getattr(analyse(x), name) for name in ("rate", "degree", "sent_by_worker", "rounds_to_epsilon")],
        lambda x: consensus_error(x, 5).tolist(),
        lambda x: mixing_matrix(x).tolist(),
        lambda x: mixing_matrix(x, 1).tolist(),
        lambda x: x.fingerprint()["rounds"],
        lambda x: make_topology(x, local_world_size=1, world_size=6, rank=0).round(1),
        lambda x: Topology.every(x, 3).round(5),
        lambda x: analyse(EveryTopology(x, 3)).rate,
        lambda x: analyse(SwitchTopology((x, 6), x)).rate,
        lambda x: edges_ahead(SwitchTopology((x, 6), x).every(2), 64),
        lambda x: [schedule.meetings(x, t, [0, 1]) for t in range(9)],
        lambda x: (schedule.largest_group(x), schedule.longest_turn(x), schedule.edges_of(x, 1)),
        lambda x: [schedule.turn_of(x, t)[1:] for t in range(9)],
        lambda x: schedule.spread(x, 0, 1, 2).round(1),
        lambda x: schedule.pull_of(schedule.weigh(x, range(1, 7)), Edge([1, 4], 0.5), 4),
        lambda x: str(x).replace(type(x).__name__, ""),
        lambda x: str(EveryTopology(SwitchTopology((x, 6), x), 2)).replace(type(x).__name__, ""),
    ):
        assert of(own) == of(plain)
    assert analyse(own).name == own.fingerprint()["name"] == "Own"
    with pytest.raises(ValueError, match="OwnRandom with seed 0 has no period"):
        mixing_matrix(OwnRandom(world_size=6))


# -- which fit -------------------------------------------------------------------------------------------------------------


class Unfit(BaseTwoTopology):
    @classmethod
    def unfit(cls, world_size: int, local_world_size: int) -> str | None:
        raise LookupError("no table")


def test_an_entry_that_raises_is_named_and_spoils_no_list():
    built_in = names_that_fit(6)
    TopologyReg.registry["key"] = lambda local: {}["gone"]  # type: ignore[index, return-value]
    TopologyReg.registry["class"] = Unfit
    TopologyReg.registry["three"] = 3  # type: ignore[assignment]
    TopologyReg.registry["fine"] = lambda local: BaseTwoTopology(local)
    assert names_that_fit(6) == [*built_in, "fine"]
    assert why_unfit("key", 6, 1) == "cannot be made: TopologyReg.registry['key'] raised KeyError('gone')"
    assert why_unfit("class", 6, 1) == "cannot be made: TopologyReg.registry['class'] raised LookupError('no table')"
    assert (why_unfit("three", 6, 1) or "").startswith("cannot be made: TopologyReg.registry['three'] must be a Topology")


def test_a_function_is_asked_by_calling_it():
    TopologyReg.registry["mine"] = lambda local: OnePeerExpTopology(local)
    assert (why_unfit("mine", 6, 1) or "").startswith("cannot be made: OnePeerExpTopology needs a power of two workers, got")
    assert "mine" not in names_that_fit(6)
    assert "mine" in names_that_fit(8)
    with pytest.raises(ValueError, match="needs a power of two workers, got world_size=6; 'base-2' and 'ring' fit any number"):
        make_topology("mine", local_world_size=1, world_size=6, rank=0)


# -- fingerprints ----------------------------------------------------------------------------------------------------------


def test_random_matching_is_known_by_its_seed():
    asked = []

    class Asked(RandomMatchingTopology):
        def _checked(self, t: int) -> Any:
            asked.append(t)
            return super()._checked(t)

    topology = Asked(world_size=6, seed=5)
    asked.clear()
    first = topology.fingerprint()
    assert len(asked) <= 8
    assert first["rounds"] != Asked(world_size=6, seed=6).fingerprint()["rounds"]
    assert first["rounds"] == RandomMatchingTopology(world_size=6, seed=5, rank=2).fingerprint()["rounds"]

    # Two workers have but one round.
    pair = [RandomMatchingTopology(world_size=2, seed=seed).fingerprint()["rounds"] for seed in (5, 6)]
    assert pair[0] != pair[1]

    class Late(RandomMatchingTopology):
        """Differs where only the rounds tell."""

        def round(self, t: int) -> list[Edge]:
            return super().round(t if t < 40 else 0)

    later = type("Late", (Late,), {"round": _later})
    assert Late(world_size=6).fingerprint() != later(world_size=6).fingerprint()


def _later(self: Any, t: int) -> list[Edge]:
    return RandomMatchingTopology.round(self, t if t < 41 else 0)
