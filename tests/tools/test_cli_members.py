"""``decent-dp status`` and ``decent-dp kill``."""

from __future__ import annotations

import contextlib
import io
import socket
import time
from typing import Any

import pytest

from decent_dp.tools.cli.app import run
from tests.members import make, step, survivors, the_store

N, VICTIM = 3, 1


def drills(rank: int, n: int) -> Any:
    """Worker 0 looks at the members, and has worker 1 killed."""
    model, optimizer, replica = make(rank)
    said: list[tuple[int, str]] = []
    for t in range(120):
        time.sleep(0.02)
        step(model, optimizer, t, rank)
        commands = {20: f"status {the_store()}", 25: f"kill {VICTIM} {the_store()}", 110: f"status {the_store()}"}
        if rank == 0 and t in commands:
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(commands[t].split())
            said.append((code, out.getvalue() + err.getvalue()))
    replica.close()
    return said


@pytest.mark.slow
def test_the_members_are_shown_and_one_is_killed(workers):
    said, _ = survivors(workers.outcomes(N, drills), VICTIM)
    (code, before), (killed, text), (again, after) = said
    assert (code, killed, again) == (0, 0, 0), said
    assert ": epoch 0, 3 of at most 3 workers" in before
    assert before.count("yes") == N
    assert socket.gethostname() in before
    assert f"worker {VICTIM} of run " in text
    assert "was killed (process " in text
    assert "epoch 1, 2 of at most 3 workers" in after
    assert (after.count("yes"), after.count("no\n") + after.count("no ")) == (2, 1)


def test_without_a_store_there_is_one_line():
    for command, code, words in (
        ("status here", 2, "store must be HOST:PORT"),
        ("kill 0 127.0.0.1:9", 1, "no store answers at 127.0.0.1:9"),
    ):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            assert run(command.split()) == code
        assert words in err.getvalue()
        assert err.getvalue().count("\n") == 1
