"""The doctor: what it measures, what it says, and what it does when workers are missing, silent or gone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from decent_dp.errors import PeerError
from decent_dp.tools.cli import doctor, main
from decent_dp.tools.cli.links import Pair, Probe, schedule
from decent_dp.tools.cli.screen import number
from decent_dp.topo import Edge
from decent_dp.transport import ExchangeRequest, Handle, process_group
from decent_dp.transport.peer_errors import UnreachableError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS", "FORCE_COLOR")
CARD = {"host": "h", "device": "cpu", "python": "3", "torch": "2", "decent_dp": "1"}
CLEAN = {**{k: v for k, v in os.environ.items() if k not in VARIABLES}, "OMP_NUM_THREADS": "1"}


def start(n: int, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n else []
    command = [sys.executable, *launcher, "-m", "decent_dp", "doctor", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env={**CLEAN, **environ})


def check(document: dict[str, Any], n: int) -> None:
    assert (document["format"], document["world_size"], document["nodes"]) == ("decent_dp-doctor-1", n, [0] * n)
    assert document["unreachable"] == []
    for key, least, most in (("latency_us", 1, 1e6), ("mbit_s", 1, 1e6)):
        for i, row in enumerate(document[key]):
            assert [value is None for value in row] == [i == j for j in range(n)]
            assert all(least < value < most for value in row if value is not None)
            assert list(row) == [other[i] for other in document[key]]
    assert [worker["rank"] for worker in document["workers"]] == list(range(n))


BROKEN_OFF = r"decent-dp: (?:the links were not measured|worker \d): (?:one of the workers [^\n]+|worker \d) is gone[^\n]+\n"
MEASURING = r"decent-dp: measuring ([^,\n]+?) takes about ([^;\n]+); --seconds-a-pair shortens it\n"


# -- real launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_alone_it_gives_the_line_to_start() -> None:
    done = start(0)
    assert (done.returncode, done.stderr) == (0, "")
    assert "backend gloo, 1 worker on 1 node" in done.stdout
    assert "torchrun --standalone --nproc-per-node 4 -m decent_dp doctor" in done.stdout


@pytest.mark.slow
def test_a_worker_that_never_comes() -> None:
    began = time.monotonic()
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = start(0, "--timeout", "2", **environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"decent-dp: the 2 workers did not meet within 2 s: [^\n]+\n", done.stderr)
    assert time.monotonic() - began < 30


# -- the measuring ---------------------------------------------------------------------------------------------------------


def slowed(start: Callable[[], Handle], nbytes: int, latency: float, rate: float) -> Handle:
    """Starts an exchange, which takes as long as on a link of this latency (one way, seconds) and rate (bytes per second)."""
    began, handle = time.perf_counter(), start()

    def finish() -> None:
        handle.wait()
        left = 2 * latency + nbytes / rate - (time.perf_counter() - began)
        time.sleep(max(left, 0.0))

    return Handle(finish)


def on_known_links(rank: int, n: int, seconds: float) -> Any:
    probe = Probe(seconds, 10.0)
    known = {(0, 1): (3e-3, 40e6), (0, 2): (20e-3, 4e6), (1, 2): (10e-3, 20e6)}
    inner = probe._transport.start

    def start(edge: Edge, request: ExchangeRequest) -> Handle:
        assert edge == Edge(sorted(edge.ranks), 0.5)
        return slowed(lambda: inner(edge, request), request.compression.nbytes, *known[edge.ranks[0], edge.ranks[1]])

    probe._transport.start = start  # type: ignore[method-assign]
    nodes = probe.nodes()
    began = time.monotonic()
    found = probe.survey(nodes)
    took = time.monotonic() - began
    probe.close()
    return known, {pair: (p.latency, p.rate, p.error) for pair, p in found.items()}, took, nodes


@pytest.mark.slow  # by the clock, which means nothing on a machine whose cores are lent to others
def test_latency_and_rate_of_known_links(workers: Any) -> None:
    for _ in range(3):  # a machine that is busy for some seconds spoils one measurement, and not three
        results = workers(3, on_known_links, 0.6)
        known, measured, _, _ = results[0]
        if all(
            measured[pair][0] < latency + 8e-3 and measured[pair][1] > 0.6 * rate for pair, (latency, rate) in known.items()
        ):
            break
    for known, found, took, nodes in results:
        assert found == results[0][1]  # the same on all
        assert nodes == [0, 0, 0]
        assert took < 3 * 0.6 + 60 * 2 * (3e-3 + 20e-3 + 10e-3) + 5
        for pair, (latency, rate) in known.items():
            # A busy machine adds some milliseconds, and takes nothing away; the second pair's 20 ms would show a factor.
            assert 0.95 * latency < found[pair][0] < latency + 8e-3
            assert 0.6 * rate < found[pair][1] < 1.1 * rate
            assert found[pair][2] == ""


@pytest.mark.parametrize("sizes", [[1], [5], [1] * 6, [2, 2], [4, 4, 4], [8] * 8, [3, 1, 2, 5], [1] * 5])
def test_no_two_pairs_at_once_share_a_node(sizes: list[int]) -> None:
    nodes = [node for node, size in enumerate(sizes) for _ in range(size)]
    slots = schedule(nodes)
    assert sorted(pair for slot in slots for pair in slot) == list(combinations(range(len(nodes)), 2))
    for slot in slots:
        taken = [nodes[rank] for pair in slot for rank in pair]
        kinds = {nodes[a] == nodes[b] for a, b in slot}
        assert len(kinds) == 1
        assert len(set(taken)) == (len(slot) if kinds == {True} else 2 * len(slot))
    L, N = sizes[0], len(sizes)
    if set(sizes) == {L}:
        assert len(slots) == L * (L - 1) // 2 + (N - 1 if N % 2 == 0 else N if N > 1 else 0) * L * L


def with_silent_nodes(rank: int, n: int) -> Any:
    """Workers 0 and 1 on one node, 2 and 3 on another; messages between the two nodes are lost."""
    exchange, waits = process_group.ProcessGroupTransport.start, []

    def start(self: Any, edge: Edge, request: ExchangeRequest) -> Handle:
        a, b = edge.ranks
        if a // 2 == b // 2:
            return exchange(self, edge, request)

        def wait() -> None:
            waits.append(self.timeout)
            raise PeerError("it sent nothing")

        return Handle(wait)

    process_group.ProcessGroupTransport.start = start  # type: ignore[method-assign]
    probe_ = Probe(0.02, 30.0)
    found = probe_.survey([0, 0, 1, 1])
    probe_.close()
    return {pair: p.error for pair, p in found.items()}, waits


def test_of_silent_nodes_one_pair_is_tried(workers: Any) -> None:
    found = workers(4, with_silent_nodes)
    for errors, _ in found:
        assert list(errors) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
        assert [pair for pair, error in errors.items() if not error] == [(0, 1), (2, 3)]
        assert errors[1, 3] == "not tried, as workers 0 and 2 do not reach each other"
    # Only the first pair between the two nodes waits for its timeout.
    assert [waits for _, waits in found] == [[30.0], [], [30.0], []]


def the_command(rank: int, n: int, *options: str) -> tuple[int, str, str, float]:
    out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["doctor", "--seconds-a-pair", "0.05", *options])
    return code, out.getvalue(), err.getvalue(), time.monotonic() - began


def with_a_wall(rank: int, n: int, path: str) -> Any:
    find = process_group.find

    def stopped(rendezvous: Any, peer: int, *more: Any) -> Any:
        if {rank, peer} == {1, 2}:  # else the other one finds a way
            raise UnreachableError("10.0.0.1 port 1234", "no way there")
        return find(rendezvous, peer, *more)

    process_group.find = stopped
    measure = Probe._measured

    def impatient(self: Any, peer: int) -> Any:
        if {self.rank, peer} == {1, 2}:
            self._transport._exchanges.policy._timeout = 0.5
        return measure(self, peer)

    Probe._measured = impatient  # type: ignore[method-assign]
    return the_command(rank, n, "--out", path)


def test_workers_that_do_not_reach_each_other(workers: Any, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    results = workers(3, with_a_wall, str(path))
    assert [code for code, *_ in results] == [1] * 3
    assert all((out, err) == ("", "") for _, out, err, _ in results[1:])
    _, out, err, _ = results[0]
    assert re.fullmatch(
        MEASURING + r"decent-dp: workers 1 and 2 do not reach each other: [^\n]*10\.0\.0\.1 port 1234[^\n]*\n", err
    )
    assert "do not reach each other: workers 1 and 2" in out
    document = json.loads(path.read_text())
    holes = {(i, j) for i in range(3) for j in range(3) if i != j and document["mbit_s"][i][j] is None}
    assert holes == {(1, 2), (2, 1)}
    assert [found["pair"] for found in document["unreachable"]] == [[1, 2]]
    assert out.count("none") == 4  # both matrices, both directions
    assert main(["plan", "--params", "1e6", "--step-ms", "20", "--measured", str(path)]) == 2


def test_three_workers_and_a_plan_of_their_links(workers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"
    (code, out, err, _), *others = workers(3, the_command, "--out", str(path))
    assert [other[:3] for other in others] == [(0, "", "")] * 2
    assert (code, re.findall(MEASURING, err)) == (0, [("3 pairs of workers", "0 s")])
    assert err.count("\n") == 1
    document = json.loads(path.read_text())
    check(document, 3)
    assert out.count("backend gloo, 3 workers on 1 node") == 1
    assert "all workers reach each other" in out
    for row in document["latency_us"]:
        cells = ["·" if value is None else re.escape(number(value)) for value in row]
        assert re.search(r" +".join(cells), out)
    assert f"--measured {path}" in out
    assert main(["plan", "--params", "1e6", "--step-ms", "20", "--json", "--top", "1", "--measured", str(path)]) == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    assert (cluster["world_size"], cluster["local_world_size"]) == (3, 3)
    values = sorted(v for row in document["mbit_s"] for v in row if v is not None)
    assert cluster["intra"]["mbit_s"] == pytest.approx((values[2] + values[3]) / 2)


def test_a_file_that_cannot_be_written_does_not_suppress_the_report(workers: Any) -> None:
    results = workers(2, the_command, "--out", "/dev/full", "--json")
    assert [code for code, *_ in results] == [1, 1]
    check(json.loads(results[0][1]), 2)
    assert re.fullmatch(MEASURING + r"decent-dp: /dev/full could not be written: No space left[^\n]+\n", results[0][2])
    assert all(seconds < 45 for *_, seconds in results)  # in order: no worker waits 60 s for one that has exited


def killed_on_the_way(rank: int, n: int, who: int) -> Any:
    if rank == who:
        Probe._measure = lambda self, *_: os._exit(9)  # type: ignore[method-assign, assignment]
    return the_command(rank, n, "--json", "--timeout", "8")


def test_a_worker_that_is_killed_meanwhile(workers: Any) -> None:
    first, *others = workers.outcomes(3, killed_on_the_way, 0)
    assert first.exitcode == 9
    results = [outcome.value for outcome in others]
    assert [(code, out) for code, out, *_ in results] == [(1, "")] * 2
    assert re.fullmatch(2 * BROKEN_OFF, "".join(err for _, _, err, _ in results))
    assert all(seconds < 14 for *_, seconds in results)  # a silent one is waited for 16 s


def killed_with_the_store(rank: int, n: int, port: int) -> Any:
    """Without a launcher that hosts the store, worker 0 hosts it."""
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n)
    return killed_on_the_way(rank, n, 0)


def test_worker_0_ends_with_the_store(workers: Any) -> None:
    first, *others = workers.outcomes(3, killed_with_the_store, free_port())
    assert first.exitcode == 9
    assert [other.value[:2] for other in others] == [(1, "")] * 2
    assert "Where no launcher keeps it worker 0 does: look there first." in others[0].value[2]
    assert all(re.fullmatch(BROKEN_OFF, other.value[2]) for other in others)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- the texts -------------------------------------------------------------------------------------------------------------


def pairs(n: int, local: int) -> dict[tuple[int, int], Pair]:
    found = {}
    for a in range(n):
        for b in range(a + 1, n):
            near = a // local == b // local
            found[a, b] = Pair(1e-6 * (10 + a + b) * (1 if near else 10), (1e9 if near else 1e8) - 1e5 * (a + b))
    return found


@pytest.mark.parametrize(("n", "columns"), [(4, "80"), (10, "40"), (20, "80")])
def test_no_number_is_cut(n: int, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cards = [CARD, {**CARD, "torch": "1.9"}, *[CARD] * (n - 2)]
    found = pairs(n, 4)
    document = doctor._document(cards, [r // 4 for r in range(n)], "gloo", found, 1.0)
    doctor._report(document, None)
    text = capsys.readouterr().out
    assert "worker 1 has torch 1.9: start all workers from one installation" in text
    rates = [pair.rate * 8e-6 for pair in found.values()]
    if n <= 10:
        for (a, b), pair in found.items():
            assert text.count(number(pair.latency * 1e6)) >= 2, (a, b)
        assert len(re.findall("·", text)) == 2 * n
    else:
        inside = [pair.rate * 8e-6 for (a, b), pair in found.items() if a // 4 == b // 4]
        assert re.search(rf"inside nodes +{number(min(inside))} +\S+ +{number(max(inside))}", text)
        assert re.search(rf"between nodes +{number(min(rates))}", text)
    assert f"both at once, {'Gbit/s' if statistics.median(rates) >= 1000 else 'Mbit/s'}" in text


def test_a_link_that_is_much_slower_than_the_median_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    found = {pair: Pair(1e-4, 1e9 if pair != (1, 2) else 2e8) for pair in pairs(4, 4)}
    doctor._report(doctor._document([CARD] * 4, [0] * 4, "gloo", found, 1.0), None)
    said = "worker 1 and worker 2, 1.6 Gbit/s, 5 times slower than the median of these links"
    assert f"slowest link inside nodes: {said}" in capsys.readouterr().out


def test_where_nodes_have_several_workers_the_advice_is_about_nodes(capsys: pytest.CaptureFixture[str]) -> None:

    def said(nodes: list[int]) -> str:
        found = {(a, b): Pair(70e-6, 1e10 if nodes[a] == nodes[b] else 125e6) for a, b in combinations(range(8), 2)}
        doctor._report(doctor._document([CARD] * 8, nodes, "gloo", found, 1.0), None)
        return capsys.readouterr().out

    text = said([0] * 4 + [1] * 4)
    assert "the 4 workers of a node are one (replica='node', the default), and send one copy" in text
    # 100 million parameters of four bytes at 125 MB/s.
    assert "take 3,200 ms, with compression='bfloat16' 1,600 ms, with 'int8' 800 ms." in text
    for nodes in (list(range(8)), [0] * 8, [0] * 3 + [1] * 5):
        assert "replica" not in said(nodes)


def test_many_pairs_that_do_not_reach_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    found = {pair: found if pair[0] // 4 == pair[1] // 4 else Pair(error="no way") for pair, found in pairs(8, 4).items()}
    doctor._deliver(doctor._document([CARD] * 8, [0] * 4 + [1] * 4, "gloo", found, 1.0), False, None)
    out, err = capsys.readouterr()
    assert "do not reach each other: workers 0 and 4, 0 and 5," in out
    assert ", 2 and 5, and 6 more pairs; --json has all\n" in out
    assert err.count("\n") == 10
    assert "between nodes" not in out
