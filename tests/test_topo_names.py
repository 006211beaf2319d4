"""Which topologies fit, bad input, and subclasses whose own names are those of the base class."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from decent_dp.ddp import DecentralizedDataParallel
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
)
from decent_dp.topo.registry import names_that_fit, why_unfit
from decent_dp.topo.schedule import edges_ahead, title_of
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


def train(kind: type[Topology], mix_every: int) -> list[tuple[list[float], Any]]:
    TopologyReg.registry["own"] = kind

    def work(transport: Any) -> tuple[list[float], Any]:
        values = []
        for topology in ("own", kind(world_size=4, rank=transport.rank), "own:2,complete", "complete:2,own"):
            model = DecentralizedDataParallel(
                torch.nn.Linear(2, 1),
                partial(torch.optim.SGD, lr=0.1),
                topology=topology,
                mix_every=mix_every,
                transport=transport,
            )
            with torch.no_grad():
                model.module.weight.fill_(0.5)
            for t in range(4):
                model(torch.full((1, 2), transport.rank + t * 0.1)).sum().backward()
            values.append(model.module.weight[0, 0].item())
            model.close()
        return values, repr(model)

    return run_replicas(4, work)


@pytest.mark.parametrize("mix_every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_subclass_may_set_any_name_in_the_wrapper(mix_every):
    own, plain = train(Own, mix_every), train(Plain, mix_every)
    assert [values for values, _ in own] == [values for values, _ in plain]
    assert len({tuple(values) for values, _ in own}) > 1
    for values, _ in train(OwnRandom, mix_every):
        assert np.isfinite(values).all()


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
        lambda x: str(x).replace(type(x).__name__, ""),
        lambda x: str(EveryTopology(SwitchTopology((x, 6), x), 2)).replace(type(x).__name__, ""),
    ):
        assert of(own) == of(plain)
    assert analyse(own).name == own.fingerprint()["name"] == "Own"
    with pytest.raises(ValueError, match="OwnRandom with seed 0 has no period"):
        mixing_matrix(OwnRandom(world_size=6))


def test_the_names_without_a_subclass():
    topology = BaseTwoTopology(2, world_size=6, rank=1)
    assert (topology.world_size, topology.local_world_size, title_of(topology)) == (6, 2, "BaseTwoTopology")
    assert edges_ahead(topology, 2) == [topology.get_edge(0), topology.get_edge(1)]


# -- which fit -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "local", "kind", "says"),
    [
        (0, 1, ValueError, "world_size must be a whole number, at least 1, got 0"),
        (-3, 1, ValueError, "world_size must be a whole number, at least 1, got -3"),
        (6.5, 1, TypeError, r"world_size must be a whole number, at least ., got 6\.5"),
        ("4", 1, TypeError, "world_size must be a whole number, at least ., got '4'"),
        (True, 1, TypeError, "world_size must be a whole number, at least ., got True"),
        (4, 0, ValueError, "local_world_size must be a whole number, at least 1, got 0"),
        (4, 2.0, TypeError, r"local_world_size must be a whole number, at least ., got 2\.0"),
    ],
)
def test_bad_numbers_of_workers(n, local, kind, says):
    for ask in (lambda: names_that_fit(n, local), lambda: why_unfit("hierarchical", n, local)):
        with pytest.raises(kind, match=says):
            ask()


def test_numpy_integers_are_fine():
    assert names_that_fit(np.int64(4), np.int32(2)) == names_that_fit(4, 2)


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


def test_a_part_is_looked_at_once():
    asked = []

    class Asked(BaseTwoTopology):
        def fingerprint(self) -> dict[str, str | int]:
            asked.append(self)
            return super().fingerprint()

    topology = Asked(world_size=6)
    SwitchTopology((topology, 5), BaseTwoTopology(world_size=6)).fingerprint()
    topology.every(2).fingerprint()
    assert len(asked) == 2


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
