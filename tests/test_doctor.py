"""The doctor: what it measures, what it says, and what it does when workers are missing, silent or gone."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from decent_dp.cli import doctor, main
from decent_dp.cli.screen import number
from decent_dp.topo import Edge
from decent_dp.transport import Exchange, Handle, Label, Parcel, process_group
from decent_dp.transport.base import Later
from decent_dp.transport.communicators import UnreachableError
from decent_dp.transport.probe import Pair, Probe
from tests.test_cli import links

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "COLUMNS", "FORCE_COLOR")
CLEAN = {**{k: v for k, v in os.environ.items() if k not in VARIABLES}, "OMP_NUM_THREADS": "1"}


def start(n: int, *options: str, **environ: str) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n)] if n else []
    command = [sys.executable, *launcher, "-m", "decent_dp.cli", "doctor", *options]
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


# -- real launches ---------------------------------------------------------------------------------------------------------


def test_four_workers_print_one_json_document() -> None:
    done = start(4, "--json", "--seconds-a-pair", "0.1")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    check(document, 4)
    rates = {(i, j): document["mbit_s"][i][j] for i in range(4) for j in range(i + 1, 4)}
    slow = document["worst"]["slowest"]
    assert slow["mbit_s"] == min(rates.values()) == rates[tuple(slow["pair"])]


def test_three_workers_and_a_plan_of_their_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "links.json"
    done = start(3, "--out", str(path), "--seconds-a-pair", "0.1")
    assert done.returncode == 0, done.stderr
    assert "decent-dp:" not in done.stderr
    document = json.loads(path.read_text())
    check(document, 3)
    # Worker 0 alone speaks; each measured number is there.
    assert done.stdout.count("backend gloo, 3 workers on 1 node") == 1
    assert "all workers reach each other" in done.stdout
    for row in document["latency_us"]:
        cells = ["·" if value is None else re.escape(number(value)) for value in row]
        assert re.search(r" +".join(cells), done.stdout)
    far = document["worst"]["longest"]
    assert f"longest way: worker {far['pair'][0]} and worker {far['pair'][1]}, {number(far['latency_us'])} µs" in done.stdout
    assert f"--measured {path}" in done.stdout
    assert main(["plan", "--params", "1e6", "--step-ms", "20", "--json", "--top", "1", "--measured", str(path)]) == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    assert (cluster["world_size"], cluster["local_world_size"]) == (3, 3)
    values = sorted(v for row in document["mbit_s"] for v in row if v is not None)
    assert cluster["intra"]["mbit_s"] == pytest.approx((values[2] + values[3]) / 2)


def test_alone_it_gives_the_line_to_start() -> None:
    done = start(0)
    assert (done.returncode, done.stderr) == (0, "")
    assert "backend gloo, 1 worker on 1 node" in done.stdout
    assert "torchrun --standalone --nproc-per-node 4 -m decent_dp.cli doctor" in done.stdout


def test_a_worker_that_never_comes() -> None:
    began = time.monotonic()
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = start(0, "--timeout", "2", **environ)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"decent-dp: the 2 workers did not meet within 2 s: [^\n]+\n", done.stderr)
    assert time.monotonic() - began < 30


def test_half_an_environment() -> None:
    done = start(0, RANK="0")
    assert done.returncode == 1
    assert done.stderr == "decent-dp: the environment variable WORLD_SIZE is missing: start the script with torchrun or srun.\n"


# -- the measuring ---------------------------------------------------------------------------------------------------------


class Slow(Exchange):
    """Takes as long as a link of this latency (one way, seconds) and rate (bytes a second)."""

    def __init__(self, inner: Exchange, latency: float, rate: float) -> None:
        self._inner, self._latency, self._rate = inner, latency, rate

    def announce(self, edge: Edge, label: Label, text: bytes) -> None:
        raise AssertionError("a lossless wire has nothing to announce")

    def start(self, edge: Edge, parcel: Parcel) -> Handle:
        assert edge == Edge(sorted(edge.ranks), 0.5)
        began, handle = time.perf_counter(), self._inner.start(edge, parcel)

        def finish() -> None:
            handle.wait()
            left = 2 * self._latency + parcel.wire.nbytes / self._rate - (time.perf_counter() - began)
            time.sleep(max(left, 0.0))

        return Later(finish)


def on_known_links(rank: int, n: int, seconds: float) -> Any:
    probe = Probe(seconds, 10.0)
    known = {(0, 1): (3e-3, 40e6), (0, 2): (20e-3, 4e6), (1, 2): (10e-3, 20e6)}
    now: list[tuple[int, int]] = []
    inner = probe._pairs.exchange

    class Known(Exchange):
        def announce(self, edge: Edge, label: Label, text: bytes) -> None: ...

        def start(self, edge: Edge, parcel: Parcel) -> Handle:
            assert edge.ranks == list(now[-1])  # one pair at a time
            return Slow(inner, *known[now[-1]]).start(edge, parcel)

    probe._pairs._exchange = Known()  # type: ignore[attr-defined]
    began = time.monotonic()
    found = probe.survey(lambda a, b: now.append((a, b)))
    took = time.monotonic() - began
    nodes = probe.nodes()
    probe.close()
    return known, {pair: (p.latency, p.rate, p.error) for pair, p in found.items()}, now, took, nodes


def test_latency_and_rate_of_known_links(workers: Any) -> None:
    results = workers(3, on_known_links, 0.6)
    for known, found, order, took, nodes in results:
        assert order == [(0, 1), (0, 2), (1, 2)]
        assert found == results[0][1]  # the same on all
        assert nodes == [0, 0, 0]
        assert took < 3 * 0.6 + 60 * 2 * (3e-3 + 20e-3 + 10e-3)
        for pair, (latency, rate) in known.items():
            assert found[pair][0] == pytest.approx(latency, rel=0.25)
            assert found[pair][1] == pytest.approx(rate, rel=0.2)
            assert found[pair][2] == ""


def the_command(rank: int, n: int, *options: str) -> tuple[int, str, str, float]:
    out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["doctor", "--seconds-a-pair", "0.05", *options])
    return code, out.getvalue(), err.getvalue(), time.monotonic() - began


def with_a_wall(rank: int, n: int, path: str) -> Any:
    if rank == 2:
        dial = process_group.dial

        def stopped(meeting: Any, peer: int) -> Any:
            if peer == 1:
                raise UnreachableError("10.0.0.1 port 1234", "no way there")
            return dial(meeting, peer)

        process_group.dial = stopped
    return the_command(rank, n, "--timeout", "1.5", "--out", path)


def test_workers_that_do_not_reach_each_other(workers: Any, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    results = workers(4, with_a_wall, str(path))
    assert [code for code, *_ in results] == [1] * 4
    assert all((out, err) == ("", "") for _, out, err, _ in results[1:])
    _, out, err, seconds = results[0]
    assert re.fullmatch(r"decent-dp: workers 1 and 2 do not reach each other: [^\n]*10\.0\.0\.1 port 1234[^\n]*\n", err)
    assert "do not reach each other: workers 1 and 2" in out
    assert seconds < 15
    document = json.loads(path.read_text())
    holes = {(i, j) for i in range(4) for j in range(4) if i != j and document["mbit_s"][i][j] is None}
    assert holes == {(1, 2), (2, 1)}
    assert [found["pair"] for found in document["unreachable"]] == [[1, 2]]
    assert out.count("none") == 4  # both matrices, both directions
    assert main(["plan", "--params", "1e6", "--step-ms", "20", "--measured", str(path)]) == 2


def killed_on_the_way(rank: int, n: int) -> Any:
    if rank == 2:
        Probe._measure = lambda self, peer: os._exit(9)  # type: ignore[method-assign, assignment]
    return the_command(rank, n, "--timeout", "4", "--json")


def test_a_worker_that_is_killed_on_the_way(workers: Any) -> None:
    outcomes = workers.outcomes(4, killed_on_the_way)
    assert outcomes[2].exitcode == 9
    results = [outcome.value for rank, outcome in enumerate(outcomes) if rank != 2]
    assert [code for code, *_ in results] == [1] * 3
    assert [out for _, out, _, _ in results] == [""] * 3
    assert results[0][2].startswith("decent-dp: worker 2 is gone")
    assert results[0][2].count("\n") == 1
    assert [err for _, _, err, _ in results[1:]] == [""] * 2
    assert all(seconds < 20 for *_, seconds in results)


_SILENT = """
import time
from decent_dp.launch import initialize_dist
from decent_dp.transport.probe import Probe
initialize_dist()
probe = Probe(0.05, 30.0)
probe.gather({"host": "h", "device": "cpu", "python": "3", "torch": "2", "decent_dp": "1"})
probe.nodes()
print("here", flush=True)
time.sleep(60)
"""


def test_a_launcher_that_ends_all_leaves_time_for_a_word(tmp_path: Path) -> None:
    """As torchrun does when another worker has failed: SIGTERM in the middle of a pair."""
    port = str(free_port())
    common = {**CLEAN, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    def begin(rank: str, *words: str) -> subprocess.Popen[str]:
        environ = {**common, "RANK": rank, "LOCAL_RANK": rank}
        command = [sys.executable, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)

    with begin("0", "-m", "decent_dp.cli", "doctor") as doctor_, begin("1", "-c", _SILENT) as silent:
        assert silent.stdout is not None
        assert silent.stdout.readline() == "here\n"
        time.sleep(1.0)
        doctor_.send_signal(signal.SIGTERM)
        out, err = doctor_.communicate(timeout=20)
        silent.kill()
    assert (doctor_.returncode, out) == (1, "")
    assert re.fullmatch(r"decent-dp: stopped by the launcher, as another worker has failed[^\n]+\n", err)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


# -- the words -------------------------------------------------------------------------------------------------------------


def pairs(n: int, local: int) -> dict[tuple[int, int], Pair]:
    found = {}
    for a in range(n):
        for b in range(a + 1, n):
            near = a // local == b // local
            found[a, b] = Pair(1e-6 * (10 + a + b) * (1 if near else 10), (1e9 if near else 1e8) - 1e5 * (a + b))
    return found


@pytest.mark.parametrize(("n", "columns"), [(4, "80"), (12, "80"), (12, "40"), (20, "80")])
def test_no_number_is_cut(n: int, columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    cards = [{"host": f"host{r // 4}", "device": "cpu", "python": "3", "torch": "2", "decent_dp": "1"} for r in range(n)]
    cards[1]["torch"] = "1.9"
    found = pairs(n, 4)
    document = doctor._document(cards, [r // 4 for r in range(n)], "gloo", found, 1.0)
    doctor._report(document, None)
    text = capsys.readouterr().out
    assert "worker 1 has torch 1.9: start all workers from one installation" in text
    rates = [pair.rate * 8e-6 for pair in found.values()]
    if n <= 16:
        for (a, b), pair in found.items():
            assert text.count(number(pair.latency * 1e6)) >= 2, (a, b)
        assert len(re.findall("·", text)) == 2 * n
    else:
        inside = [pair.rate * 8e-6 for (a, b), pair in found.items() if a // 4 == b // 4]
        assert re.search(rf"inside a node +{number(min(inside))} +\S+ +{number(max(inside))}", text)
        assert re.search(rf"between nodes +{number(min(rates))}", text)
    if n > 4:
        assert f"slowest link: worker {n - 5} and worker {n - 1}" in text or f"worker {n - 1}" in text
        assert f"(on host{(n - 5) // 4} and host{(n - 1) // 4})" in text


def test_what_is_written_is_what_the_planner_reads(tmp_path: Path) -> None:
    from decent_dp.planner import Cluster

    cards = [{"host": "h", "device": "cpu", "python": "3", "torch": "2", "decent_dp": "1"}] * 8
    found = {pair: Pair(70e-6, 940e6 / 8 * (1 if pair[0] // 4 != pair[1] // 4 else 10)) for pair in pairs(8, 4)}
    document = doctor._document(cards, [0] * 4 + [1] * 4, "gloo", found, 1.0)
    assert {key: document[key] for key in ("format", "nodes", "world_size")} == {
        key: links(8, 4)[key] for key in ("format", "nodes", "world_size")
    }
    path = tmp_path / "links.json"
    path.write_text(json.dumps(document))
    cluster = Cluster.from_measured(path)
    assert cluster.inter.bytes_per_s == pytest.approx(940e6 / 8)
    assert cluster.intra.bytes_per_s == pytest.approx(9400e6 / 8)
    assert cluster.inter.latency_s == pytest.approx(70e-6)
