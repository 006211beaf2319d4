"""Nodes of which one, or none, lets others connect, as with NAT: network namespaces that lose what a worker's ports answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lab import Lab, launcher_variables, missing

PORTS = range(28672, 28736)
WORKER = """
import datetime, os, sys, time
import torch, torch.distributed as dist
import decent_dp
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
model = torch.nn.Linear(1000, 50)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
began = time.monotonic()
try:
    replica = decent_dp.gossip(model, optimizer, topology="ring")
    rank = dist.get_rank()
    with torch.no_grad():
        model.weight.fill_(float(rank))
    for _ in range(3):
        model(torch.ones(1000)).sum().backward()
        optimizer.step()
    replica.flush()
    print("mean", float(model.weight.mean()))
    replica.close()
except Exception as error:
    print(type(error).__name__, error)
print("seconds", time.monotonic() - began)
"""


def close(lab: Lab, node: int) -> None:
    """Nobody can connect to a worker of this node any more, as its answers are lost; its own connections work."""
    ports = f"{PORTS.start}-{PORTS.stop - 1}"
    rule = ["rule", "add", "ipproto", "tcp", "sport", ports, "blackhole"]
    subprocess.run(["ip", "-n", lab._name(node), *rule], check=True)


def run(closed: list[int], folder: Path) -> list[str]:
    with Lab(2, None) as lab:
        for node in closed:
            close(lab, node)
        for rank in range(2):
            env = {**os.environ, **launcher_variables(rank, 2, lab.address(0))}
            env["DECENT_DP_PORTS"] = f"{PORTS.start}-{PORTS.stop - 1}"
            with (folder / f"{rank}.log").open("wb") as log:
                lab.start(rank, [sys.executable, "-c", WORKER], env, log)
        assert lab.wait(120) is None
    return [(folder / f"{rank}.log").read_text() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("closed", [[], [0], [1]])
def test_who_can_be_reached_is_dialled(closed: list[int], tmp_path: Path) -> None:
    for said in run(closed, tmp_path):
        words: dict[str, Any] = dict(line.split(" ", 1) for line in said.splitlines() if " " in line)
        assert float(words["mean"]) == 0.5, said
        assert float(words["seconds"]) < 5, said


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_two_that_cannot_be_reached_are_told_so_with_the_ways_out(tmp_path: Path) -> None:
    said = run([0, 1], tmp_path)
    assert any("WireGuard" in text and text.count(" port 28") == 2 for text in said), said
    for text in said:
        assert text.startswith("PeerLostError"), text
        assert float(text.rsplit("seconds ", 1)[1]) < 60, text
