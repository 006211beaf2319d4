"""Runs at one store, and those who look at them."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

import decent_dp
from decent_dp.errors import PeerLostError
from decent_dp.membership import joining
from decent_dp.membership.line import Line
from tests.helpers import SilentStore


def test_two_runs_at_one_store_never_meet():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    lines = {name: Line(server, name, {"run": name, "signature": "{}"}) for name in ("a", "b")}
    for name, line in lines.items():
        line.keep(newest=True)
        assert line.write(0, "[]", None) == "[]"
        assert line.write(1, f'[["{{}}", [{len(name)}]]]', None) == '[["{}", [1]]]'
    assert lines["b"].write(2, "second of b", None) == "second of b"
    assert lines["a"].write(2, "second of a", None) == "second of a"
    assert lines["b"].write(2, "another", None) == "second of b"
    assert joining._whole_store(server).get("a/run") == b"a"
    assert server.get("decent_dp/newest") == b"b"  # which began last is the one that is joined


def test_a_line_that_was_closed_asks_nothing():
    line = Line(dist.HashStore(), "run", {})
    line.probe()
    line.close()
    with pytest.raises(ConnectionError, match="the worker has ended"):
        line.probe()


def joins_at(rank: int, n: int, port: int) -> str:
    joining._ANSWER = 0.5
    try:
        decent_dp.join(f"127.0.0.1:{port}", rank=0)
    except PeerLostError as error:
        return str(error)
    return ""


def test_a_process_that_joins_does_not_wait_for_a_store_that_was_stopped_before(workers):
    """The kernel accepts connections for it, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        [message] = workers(1, joins_at, server.getsockname()[1])
    assert message.startswith("the store does not answer, and does not fail")


@pytest.mark.parametrize("stops", ["before it looks at the run", "before it takes a rank", "before it is counted"])
def test_a_process_that_joins_does_not_wait_for_a_stopped_store(monkeypatch, stops):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    record = {"places": 2, "world_size": 1}
    records = {"run": json.dumps(record), "signature": "{}"}
    store = dist.HashStore()
    Line(store, "run", records).keep(newest=True)
    silent: Any = SilentStore(joining._whole_store(store))
    monkeypatch.setattr(joining, "_whole_store", lambda _: silent)
    monkeypatch.setattr(joining, "_ANSWER", 0.2)
    run = joining.look_at_run()
    assert run.record == record
    if stops != "before it looks at the run":
        monkeypatch.setattr(joining, "look_at_run", lambda _: run)
    silent.answers.clear()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="the store does not answer"):
        decent_dp.join("10.0.0.1:29500", rank=1 if stops == "before it is counted" else None)
    assert time.monotonic() < began + 10
    silent.answers.set()
