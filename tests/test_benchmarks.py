"""The network lab: its arithmetic anywhere, its networks where there are root and iproute2, and a clear line elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import coding, lab, net, overhead, report
from benchmarks.lab import Lab, LabError, namespaces
from benchmarks.limits import busiest_link
from benchmarks.setups import PARAMETERS, Contender, Setup, choose_contenders
from decent_dp.compression.lattice import load_numba
from tests.helpers import ROOT, wait_for

ALONE, DDP = Contender("alone"), Contender("ddp")

# -- the limit ---------------------------------------------------------------------------------------------------------


def test_crossing_bytes_of_a_round() -> None:
    inside, across = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
    assert busiest_link(inside, 2, 10) == 0
    assert busiest_link(across, 2, 10) == 20  # both workers of a node send
    assert busiest_link([[0, 2], [1], [3]], 2, 10) == 10
    assert busiest_link([[0, 1, 2, 3]], 2, 10) == 10  # a group on two nodes: one copy per node
    assert busiest_link([[0, 1, 2], [3]], 2, 10) == 10
    assert busiest_link([[0, 1, 2, 3, 4, 5]], 2, 12) == 16  # on three: 2 (k - 1)/k
    assert busiest_link([[1, 2], [3, 4], [5, 0]], 2, 10) == 20
    assert busiest_link([[0], [1]], 1, 10) == 0


COPY_60, COPY_100, COPY_200 = 2244.6, 1346.8, 673.4  # ms of 4 * 4_208_640 bytes over 60, 100 and 200 Mbit/s


@pytest.mark.parametrize(
    ("setup", "contender", "ms"),
    [
        ("8x1-60", "ours:one-peer-exp", COPY_60),
        ("8x1-60", "ours:one-peer-exp:bfloat16", COPY_60 / 2),
        ("8x1-60", "ours:one-peer-exp:int8", 600),  # 561 of the link vanish behind compute
        ("8x1-60", "ours:ring", COPY_60),
        ("8x1-200", "decent-dp-0.2.3:one-peer-exp", COPY_200),
        ("8x1-200", "ours:one-peer-exp:int8", 600),
        ("4x2-100", "ours:one-peer-exp", (600 + 2 * 2 * COPY_100) / 3),  # distance 1 stays inside the nodes
        ("4x2-100", "ours:ring", (600 + 2 * COPY_100) / 2),
        ("4x2-100", "ours:alternating-exp-ring", COPY_100),
        ("4x2-100", "ours:complete", 1.5 * COPY_100),
        ("real-2", "ours:one-peer-exp", 600),
    ],
)
def test_limits_by_hand(setup: str, contender: str, ms: float) -> None:
    plan = net.Plan(setup, Setup.parse(setup), [Contender.parse(contender)], 5, 30, 1, ROOT / "src")
    assert net.find_limits(plan, 600.0) == {plan.contenders[0]: pytest.approx(ms, rel=1e-4)}
    assert net.find_limits(plan, None) == {}


def test_steps_are_whole_periods() -> None:
    setup = Setup.parse("4x2-100")  # periods 3 and 4
    both = [ALONE, Contender("ours", "one-peer-exp"), Contender("ours", "alternating-exp-ring")]
    assert [net.whole_periods(setup, both, steps) for steps in (1, 12, 30)] == [12, 12, 36]
    assert net.whole_periods(setup, [ALONE, DDP], 31) == 31
    assert net.whole_periods(setup, [Contender("ours", "random-matching"), both[0]], 31) % 64 != 0


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_of_setups_and_contenders() -> None:
    assert Setup.parse("8x1-60") == Setup(8, 1, 60.0, False)
    assert Setup.parse("real-2") == Setup(1, 2, None, True)
    for wrong in ("8x", "x2-60", "8x1-0", "real", "8x1-60-", "real-2-100"):
        with pytest.raises(ValueError, match="set-up"):
            Setup.parse(wrong)
    for name in ("alone", "ddp", "decent-dp-0.2.3:ring", "ours:ring", "ours:ring:int8"):
        assert Contender.parse(name).name == name
    for wrong in ("", "ours", "alone:ring", "ours:ring:int4", "decent-dp-0.2.3:ring:int8"):
        with pytest.raises(ValueError, match="a contender is"):
            Contender.parse(wrong)
    setup = Setup.parse("8x1-60")
    assert [c.name for c in choose_contenders(setup, ["ddp", "ours:*exp:int8", "ddp"])] == ["ddp", "ours:one-peer-exp:int8"]
    assert {c.wire for c in choose_contenders(setup, [])} == {"float32", "bfloat16", "int8"}
    with pytest.raises(ValueError, match="no contender fits"):
        choose_contenders(setup, ["theirs:*"])


# -- the report --------------------------------------------------------------------------------------------------------


def run_of(mean: float, memory: list[int] | None = None) -> report.Run:
    return report.Run(
        mean=mean, median=mean - 1, worst=mean + 50, worst_round=mean + 20, busy=mean / 2, sent=2e6, memory=memory or [0, 0]
    )


@pytest.fixture
def lines() -> list[report.Line]:
    ours, theirs, other = Contender("ours", "ring"), Contender.parse("decent-dp-0.2.3:ring"), Contender("ours", "complete")
    unit = 4 * PARAMETERS
    runs = {
        ALONE: [run_of(100.0, [unit, unit]), run_of(110.0, [unit, unit]), run_of(102.0, [unit, unit])],
        DDP: [run_of(400.0)],
        Contender.parse("decent-dp-0.2.3:one-peer-exp"): [run_of(150.0)],
        theirs: [run_of(200.0)],
        ours: [run_of(120.0, [3 * unit, 2 * unit]), run_of(900.0, [3 * unit, 2 * unit]), run_of(130.0, [3 * unit, 4 * unit])],
        other: [run_of(300.0)],
        Contender("ours", "ring", "int8"): [],
    }
    return report.make_lines(runs, {ours: 125.0, other: 110.0}, {Contender("ours", "ring", "int8"): "no such wire"})


def test_workers_results_become_a_run() -> None:
    results = [
        {"ms": [10.0, 20.0, 60.0], "at": [5.0, 15.0, 35.0, 95.0], "busy": 3.0, "bytes": 300, "memory": 5},
        {"ms": [20.0, 20.0, 20.0], "at": [5.0, 25.0, 45.0, 65.0], "busy": 3.0, "bytes": 300, "memory": 7},
        {"ms": [10.0, 10.0, 10.0], "at": [0.0, 10.0, 20.0, 30.0], "busy": 3.0, "bytes": 900, "memory": 6},
        {"ms": [20.0, 20.0, 20.0], "at": [1.0, 21.0, 41.0, 61.0], "busy": 15.0, "bytes": 900, "memory": 6},
    ]
    run = report.make_run(results, local=2)
    assert run == report.Run(mean=20.0, median=20.0, worst=60.0, worst_round=50.0, busy=2.0, sent=200.0, memory=[5, 7, 6, 6])


def test_lines_are_medians_and_ratios(lines: list[report.Line]) -> None:
    found = {line["contender"]: line for line in lines}
    ours = found["ours:ring"]
    assert (ours["mean_ms"], ours["median_ms"], ours["worst_ms"], ours["bytes_per_step"]) == (130.0, 129.0, 950.0, 2e6)
    assert ours["worst_round_ms"] == 920.0
    assert ours["to_alone"] == pytest.approx(130 / 102)
    assert ours["to_ddp"] == pytest.approx(130 / 400)
    assert ours["to_limit"] == pytest.approx(130 / 125)
    assert ours["to_published"] == pytest.approx(130 / 200)  # the same topology, though another is faster
    assert ours["memory"] == 2.0  # the worst worker of each run, above that worker alone; the median over runs
    assert found["ours:complete"]["published"] == "decent-dp-0.2.3:one-peer-exp"
    assert found["ours:complete"]["to_published"] == 2.0
    assert found["alone"]["memory"] == 0.0
    assert found["ours:ring:int8"]["mean_ms"] is None
    assert found["ours:ring:int8"]["to_ddp"] is None


def test_lines_are_shown_and_written(lines: list[report.Line], tmp_path: Path) -> None:
    console = report.make_console(record=True, file=io.StringIO())
    report.print_table(console, "made up", lines)
    text = console.export_text()
    assert "…" not in text
    assert "ours:ring:int8 failed: no such wire" in text
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["ours:ring"]]
    assert row == ["ours:ring", "130", "129", "950", "920", "65", "2.00", "2.00", "125", "1.275", "0.325", "0.650", "1.040"]
    report.write_json(tmp_path / "deep" / "made-up.json", lines, {"setup": "made-up"})
    written = json.loads((tmp_path / "deep" / "made-up.json").read_text())
    assert written["lines"][4]["to_limit"] == 1.04
    assert written["machine"]["cores"] == os.cpu_count()
    assert str(ROOT) not in json.dumps(written)
    table = (tmp_path / "deep" / "made-up.md").read_text().splitlines()
    assert "| ours:ring | 130 | 950 | 2.00 | 2.00 | 125 | 0.33 | 0.65 | 1.04 |" in table
    assert len(table) == 2 + len(lines)
    report.write_chart(tmp_path / "made-up.png", "made up", lines)
    assert (tmp_path / "made-up.png").stat().st_size > 5000


# -- the lab -----------------------------------------------------------------------------------------------------------


def start(*options: str, out: Path, **kwargs: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.net", "--warmup", "2", "--out", str(out), *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


@cache
def lacking() -> bool:
    """Whether no lab can be made here; then the command says so, and ends with 2."""
    if lab.missing() is None:
        try:
            with Lab(1, 60.0):
                return False
        except LabError:
            pass
    done = start("--setup", "1x1-60", "--contender", "alone", out=ROOT / "runs")
    out, err = done.communicate(timeout=200)
    assert done.returncode == 2
    assert len(err.strip().splitlines()) == 1, err
    assert "Traceback" not in out + err
    return True


def pids(name: str) -> list[int]:
    return [int(pid) for pid in subprocess.check_output(["ip", "netns", "pids", name], text=True).split()]


def workers_of(name: str) -> list[int]:
    """The workers in a namespace, without the `ip` and `tc` that set it up."""
    if name not in namespaces():
        return []
    found = []
    for pid in pids(name):
        with contextlib.suppress(OSError):  # `tc` has ended meanwhile
            if b"benchmarks.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_missing_requirements_are_named_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab.shutil, "which", lambda tool: None if tool == "tc" else "/sbin/ip")
    assert net.main(["--setup", "2x1-60"]) == 2
    assert capsys.readouterr().err == "the network lab needs iproute2 (no tc here): apt-get install iproute2\n"
    monkeypatch.setattr(lab.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(lab.os, "geteuid", lambda: 1000)
    assert net.main(["--setup", "2x1-60"]) == 2
    assert "needs root" in capsys.readouterr().err


@pytest.mark.slow
def test_two_nodes_end_to_end(tmp_path: Path) -> None:
    if lacking():
        return
    options = ["--setup", "2x1-500", "--contender", "alone", "ours:one-peer-exp", "--steps", "3"]
    process = start(*options, out=tmp_path)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    result = json.loads((tmp_path / "2x1-500.json").read_text())
    alone, ours = result["lines"]
    assert result["steps"] == 3
    assert 600 <= alone["mean_ms"] <= alone["worst_ms"]
    assert alone["bytes_per_step"] < 5000
    # A node sends its parameters, with headers; the last exchange may be cut by the end of the timed steps.
    assert 0.6 * 4 * PARAMETERS < ours["bytes_per_step"] < 1.4 * 4 * PARAMETERS
    assert ours["to_limit"] > 0.9
    assert namespaces(process.pid) == []


@pytest.mark.slow
def test_links_are_as_slow_as_asked(tmp_path: Path) -> None:
    if lacking():
        return
    with Lab(2, 60.0, "reno") as network:
        assert network.congestion_control() == "reno"
        shapes = [subprocess.check_output(["tc", "-n", name, "qdisc", "show"], text=True) for name in namespaces(os.getpid())]
        assert sum(shape.count("tbf") for shape in shapes) == 4  # two links, two directions
        assert all(shape.count("rate 60Mbit burst 256Kb lat 100ms") == shape.count("tbf") for shape in shapes)
        address = network.address(1)
        with (tmp_path / "seconds").open("wb") as seconds, open(os.devnull, "wb") as log:
            network.start(1, [sys.executable, "-c", RECEIVER, address], os.environ, seconds)
            network.start(0, [sys.executable, "-c", SENDER, address], os.environ, log)
        assert network.wait(20) is None
    # 3 MB over 60 Mbit/s are 0.4 s; the first 256 KiB may come in a burst.
    assert 0.36 < float((tmp_path / "seconds").read_text()) < 1.5
    assert namespaces(os.getpid()) == []


RECEIVER = """
import socket, sys, time
link, _ = socket.create_server((sys.argv[1], 5000)).accept()
received, start = 0, time.perf_counter()
while chunk := link.recv(1 << 16):
    received += len(chunk)
assert received == 3_000_000
print(time.perf_counter() - start)
"""
SENDER = """
import socket, sys, time
for _ in range(200):
    try:
        link = socket.create_connection((sys.argv[1], 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.05)
link.sendall(bytes(3_000_000))
"""


@pytest.mark.slow
def test_a_lab_that_cannot_be_built_is_removed() -> None:
    if lacking():
        return
    with pytest.raises(LabError, match="may not use 'nonsense'"), Lab(2, 60.0, "nonsense"):
        pass
    with pytest.raises(LabError, match=r"`tc .* rate 0mbit .*` failed"), Lab(2, 0.0):
        pass
    assert namespaces(os.getpid()) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGINT", "SIGTERM", "a worker killed"])
def test_an_interrupted_run_is_removed_completely(how: str, tmp_path: Path) -> None:
    if lacking():
        return
    process = start("--setup", "2x1-60", "--contender", "alone", out=tmp_path)
    workers = wait_for(lambda: workers_of(f"ddplab-{process.pid}-1"))
    if how == "a worker killed":
        os.kill(workers[0], signal.SIGKILL)
    else:
        process.send_signal(getattr(signal, how))
    out, err = process.communicate(timeout=200)
    assert process.returncode == {"SIGINT": 130, "SIGTERM": 143}.get(how, 1), out + err
    assert "Traceback" not in out + err
    assert ("alone failed: worker 1: killed by SIGKILL" in out) == (how == "a worker killed")
    assert namespaces(process.pid) == []
    assert not Path(f"/proc/{workers[0]}").exists()


def test_the_overhead_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "LAYERS", 5)
    monkeypatch.setattr(overhead, "STEPS", 2)
    found = overhead.measure(turns=4)
    assert found["tensors"] == 10
    assert found["plain"] > 0
    assert all(
        found[how]["quartiles"][0] <= found[how]["median"] <= found[how]["quartiles"][1] for how in ("gossip", "wrapper")
    )


@pytest.mark.skipif(load_numba() is None, reason="needs Numba that compiles")
def test_coding_is_measured_with_kernels_and_without() -> None:
    found = coding.measure(turns=1, width=16, blocks=2)
    assert found.keys() == {"float32", "bfloat16", "int8", "4bit", "2bit", "1bit"}
    assert all(whats.keys() == {"encode", "mix"} for whats in found.values())
    forms = {name: {form for own in whats.values() for form in own} for name, whats in found.items()}
    kernels = {key: {"torch", "numba"} for key in ("int8", "4bit", "2bit", "1bit")}
    assert forms == {"float32": {"torch"}, "bfloat16": {"torch"}, **kernels}
