"""Cases for the tests of `make gpu`: one that is right, one that fails, one that hangs, and one that comes after them."""

from __future__ import annotations

import logging
import os
import time

from benchmarks.gpu.case import ALONE, PAIR, SINGLE, THREADS, SkipError, Worker, case, warnings_of


@case("gathers", PAIR, THREADS, drivers=("gossip",))
def gathers(worker: Worker) -> str:
    return str(worker.gather(worker.rank))


@case("fails on one worker", PAIR, THREADS, drivers=("gossip",))
def fails(worker: Worker) -> None:
    if worker.rank == 1:
        raise ValueError("this is wrong\nin two lines")
    worker.gather(0)


@case("hangs", ALONE, drivers=("gossip",), timeout=2)
def hangs(worker: Worker) -> None:
    time.sleep(100)


@case("dies", PAIR, drivers=("gossip",))
def dies(worker: Worker) -> None:
    if worker.rank == 0:
        os._exit(3)
    worker.gather(0)


@case("dies as it should", PAIR, drivers=("gossip",), dies=1, alone=True)
def dies_as_told(worker: Worker) -> str:
    if worker.rank == 1:
        os._exit(3)
    return "the other one goes on"


@case("measures", SINGLE, drivers=("gossip",), quiet=True)
def measures(worker: Worker) -> str:
    return "alone"


@case("warns", ALONE, drivers=("gossip",))
def warns(worker: Worker) -> str:
    logging.getLogger("decent_dp.one").warning("a warning that nobody hears")
    with warnings_of("decent_dp") as found:
        logging.getLogger("decent_dp.two").warning("a warning that is kept")
    logging.getLogger("decent_dp.one").warning("a warning that nobody hears")
    return f"heard {found}"


@case("fails and may", ALONE, drivers=("gossip",), optional=lambda: True)
def may_fail(worker: Worker) -> None:
    raise ValueError("not there yet")


@case("is not for here", ALONE, drivers=("gossip",))
def skipped(worker: Worker) -> None:
    raise SkipError("no reason")


@case("continues", PAIR, ALONE, drivers=("gossip",))
def goes_on(worker: Worker) -> str:
    return "after the others"
