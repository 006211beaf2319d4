"""With ``faults=`` nothing goes over the process group once training has begun: the group of ``initialize_dist`` is closed."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

import decent_dp
from tests.helpers import error_of, listening
from tests.members import make, step
from tests.test_launch import free_port


def launched(rank: int, n: int, port: int) -> None:
    dist.destroy_process_group()
    environ = {"RANK": rank, "WORLD_SIZE": n, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": n, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environ.items()}, MASTER_ADDR="127.0.0.1")
    assert decent_dp.initialize_dist() == (rank, n)


def closes(rank: int, n: int, port: int) -> Any:
    launched(rank, n, port)
    of_store = {where for where in listening() if int(where.rpartition(":")[2], 16) == port}
    model, optimizer, replica = make(rank)
    other, its_optimizer, its_replica = make(rank, seed=1)  # as for a GAN
    dist.barrier()
    of_gloo = listening() - of_store
    for t in range(5):
        step(model, optimizer, t, rank)
        step(other, its_optimizer, t, rank)
    left = listening() - of_store
    found: list[Any] = [dist.get_rank(), dist.get_world_size(), decent_dp.initialize_dist(), replica.gather(rank)]
    calls = [dist.barrier, lambda: dist.all_reduce(torch.zeros(1)), lambda: dist.broadcast(torch.zeros(1), 0)]
    calls += [lambda: dist.all_gather_object([None] * n, rank), lambda: make(rank)]
    calls += [lambda: dist.send(torch.zeros(1), (rank + 1) % n)]
    errors = [error_of(call) for call in calls]
    with replica.averaged():
        pass
    for one in (replica, its_replica):
        one.close()
    dist.destroy_process_group()
    return len(of_gloo), left, found, errors


def test_the_group_of_initialize_dist_listens_no_more(workers):
    port = free_port(range(20000 + os.getpid() % 9000, 30000))
    for rank, (of_gloo, left, found, errors) in enumerate(workers(3, closes, port)):
        assert of_gloo > 0
        assert left == set()
        assert found == [rank, 3, (rank, 3), {0: 0, 1: 1, 2: 2}]
        assert all("the process group was closed when training began" in error for error in errors), errors
        assert "replica.gather(value)" in errors[0]


def stays(rank: int, n: int, port: int) -> Any:
    """A group that the user has made, and one without faults."""
    model, optimizer, replica = make(rank)
    step(model, optimizer, 0, rank)
    dist.barrier()
    replica.close()
    launched(rank, n, port)
    model, optimizer, replica = make(rank, faults=None)
    step(model, optimizer, 0, rank)
    dist.barrier()
    replica.close()
    return True


def test_other_groups_stay(workers):
    port = free_port(range(30000 + os.getpid() % 9000, 40000))
    assert workers(2, stays, port) == [True, True]
