"""The line of epochs at a store that hangs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from decent_dp.membership import joining
from decent_dp.membership import line as line_module
from decent_dp.membership.line import Line


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


class Hanging:
    """A client whose calls return when ``go_on`` is set."""

    def __init__(self, go_on: threading.Event) -> None:
        self._go_on = go_on

    def check(self, keys: list[str]) -> bool:
        self._go_on.wait(20)
        return True


def test_a_connection_that_hangs_is_replaced(monkeypatch):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    go_on, made = threading.Event(), []
    connect = line_module.connect_store

    def connect_store(*args: Any) -> Any:
        made.append(len(made))
        return connect(*args) if made[-1] in (1, 5) else Hanging(go_on)

    monkeypatch.setattr(line_module, "connect_store", connect_store)
    monkeypatch.setattr(line_module, "_LIMIT", 0.1)
    line = Line(server, "run", {})
    with pytest.raises(ConnectionError, match="does not answer, and does not fail"):
        line.probe()
    line.probe()
    assert made == [0, 1]
    line._client = Hanging(go_on)  # type: ignore[assignment]
    for _ in range(6):
        with pytest.raises(ConnectionError, match="does not answer, and does not fail"):
            line.probe()
    assert made == [0, 1, 2, 3]  # not one for each call: the server may be stopped
    go_on.set()
    for _ in range(50):
        try:
            line.probe()
            break
        except ConnectionError:
            threading.Event().wait(0.05)
    line.probe()
