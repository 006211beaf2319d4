from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before NumPy and torch are loaded: their pools of threads, one pool per process, would compete for the same cores.
os.environ["OMP_NUM_THREADS"] = "1"
# torch asks for the host name of each peer of a store, for its messages. A lost answer of a name server would stop a worker for
# five seconds, so that no question is sent; addresses and /etc/hosts need none. Torch would log that there was no answer.
os.environ["RES_OPTIONS"] = "attempts:0"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
# A hidden download is an error, also in the processes that tests start.
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest
import torch

from decent_dp.topo import TopologyReg
from decent_dp.transport import run_replicas
from tests import growth_once as growth_once
from tests.workers import FOREIGN, Workers, over_sockets

torch.set_num_threads(1)
# A machine whose cores are lent away for a moment is no fault of the code.
hypothesis.settings.register_profile("without deadlines", deadline=None)
hypothesis.settings.load_profile("without deadlines")


def pytest_configure(config: pytest.Config) -> None:
    for message, category, module in FOREIGN:
        config.addinivalue_line("filterwarnings", f"ignore:{re.escape(message)}:{category.__name__}:{re.escape(module)}")
    given = getattr(config, "workerinput", {})  # in a process of a parallel run
    if given and not any(".py" in argument for argument in given["mainargv"][1:]):
        _import_in_turns(int(given["workerid"].removeprefix("gw")), given["workercount"])


def _import_in_turns(number: int, count: int) -> None:
    """Each process of a parallel run begins with other files. pytest keeps the files whose asserts it has rewritten (12 s of
    processor time for all), so that each process rewrites its part, and reads the others' parts."""
    files = sorted(Path(__file__).parent.glob("test_*.py"))
    first = len(files) * number // count
    with contextlib.suppress(Exception):  # it comes again in the collection, which reports it
        for file in files[first:] + files[:first]:
            with contextlib.suppress(pytest.skip.Exception):
                importlib.import_module(f"tests.{file.stem}")


@pytest.hookimpl(optionalhook=True)  # also without xdist
def pytest_xdist_auto_num_workers() -> int | None:
    """Two more than there are cores: many tests wait. A number in the environment counts."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 2


def pytest_collection_finish() -> None:
    """Modules live until the end: without them, a collection of garbage takes a millisecond rather than a tenth of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def workers() -> Workers:
    return Workers()


@pytest.fixture(params=["threads", pytest.param("processes", marks=pytest.mark.slow)])
def replicas(request: pytest.FixtureRequest, workers: Workers) -> Callable[..., list[Any]]:
    """Runs ``body(transport, *args)`` on n replicas."""
    if request.param == "processes":
        return lambda n, body, *args: workers(n, over_sockets, body, *args)
    return lambda n, body, *args: run_replicas(n, lambda transport: body(transport, *args))


@pytest.fixture(autouse=True)
def _registry_as_it_was() -> Iterator[None]:
    before = dict(TopologyReg.registry)
    yield
    TopologyReg.registry.clear()
    TopologyReg.registry.update(before)
