from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from decent_dp.topo import TopologyReg
from tests.workers import Workers

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def workers() -> Workers:
    return Workers()


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    before = dict(TopologyReg.registry)
    yield
    TopologyReg.registry.clear()
    TopologyReg.registry.update(before)
