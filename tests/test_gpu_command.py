"""`make gpu`, on the CPU: what it prints and writes, and that a case that fails or hangs does not end the run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.gpu import runner
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.case import BOTH, PAIR, THREADS, TRIO, TRIO_THREADS
from decent_dp import gossip
from decent_dp.transport import InProcessTransport, in_process, run_replicas
from decent_dp.transport.in_process import LocalHub
from tests.helpers import ROOT, loss, net

WANTED = ("float64 twin, base-2", "another default device")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command(tmp_path):
    """Cases that are right, and cases that fail or hang, which do not end the run."""
    out = tmp_path / "new" / "gpu.json"
    modules = ("benchmarks.gpu.situations", "benchmarks.gpu.devices", "tests.gpu_cases")
    of_the_tests = ("gathers", "fails *", "hangs", "dies", "dies as *", "is not *", "continues", "measures", "warns")
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", str(out), "--modules", *modules]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [*command, "--only", *WANTED, *of_the_tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.startswith("NO GPU: EVERYTHING BELOW RAN ON THE CPU.")
    report = json.loads(out.read_text())
    assert report["device"] == "cpu"
    assert report["torch"] == torch.__version__
    rows = [row for row in report["rows"] if row["case"] in WANTED]
    assert {row["result"] for row in rows} == {"passed"}
    assert {(row["case"], row["driver"]) for row in rows} == {(name, driver) for name in WANTED for driver in BOTH}
    assert {(row["how"], row["workers"]) for row in rows} == {THREADS, TRIO_THREADS, PAIR, TRIO}
    for row in report["rows"]:
        assert f"{row['case']:<52} {row['driver']:<8} {row['how']:<10} {row['workers']:>2} {row['result']}" in done.stdout
    found = {(row["case"], row["how"]): (row["result"], row["detail"]) for row in report["rows"] if row["case"] not in WANTED}
    assert found == {
        ("gathers", "processes"): ("passed", "[0, 1]"),
        ("gathers", "threads"): ("passed", "[0, 1]"),
        ("fails on one worker", "processes"): ("failed", "worker 1: ValueError: this is wrong"),
        ("fails on one worker", "threads"): ("failed", "worker 0: ValueError: this is wrong"),
        ("hangs", "threads"): ("timeout", "workers [0] had not ended after 2 s"),
        ("dies", "processes"): ("failed", "worker 0: the process ended with exit code 3"),
        ("dies as it should", "processes"): ("passed", "the other one goes on"),
        ("measures", "processes"): ("passed", "alone"),
        ("warns", "threads"): ("passed", "heard ['a warning that is kept']"),
        ("fails and may", "threads"): ("optional", "worker 0: ValueError: not there yet"),
        ("is not for here", "threads"): ("skipped", "no reason"),
        ("continues", "processes"): ("passed", "after the others"),
        ("continues", "threads"): ("passed", "after the others"),
    }
    assert [row["case"] for row in report["rows"]][-1] == "measures"  # when all others are done
    assert "a warning that nobody hears" not in done.stdout + done.stderr
    assert 'raise ValueError("this is wrong\\nin two lines")' in done.stdout
    assert report["counts"] == {"passed": 7 + len(rows), "failed": 3, "timeout": 1, "optional": 1, "skipped": 1}


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_the_whole_command(tmp_path):
    """All cases have a stand-in here that passes, or say what they need a GPU for; in the ten minutes that it has there."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--lanes", "2", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=650, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert set(report["counts"]) <= {"passed", "skipped"}
    assert report["counts"]["passed"] > 220
    # One line for each case, and nothing of the workers between them.
    lines = done.stdout.splitlines()
    assert len(lines) == 4 + len(report["rows"]), done.stdout


def test_exit_codes(tmp_path, monkeypatch, capsys):
    """0 if nothing failed; cases that the limit leaves out count as failed; a name that there is not is an error."""
    arguments = ["--device", "cpu", "--out", str(tmp_path / "gpu.json"), "--modules", "tests.gpu_cases", "--only", "continues"]
    assert main([*arguments, "--limit", "0"]) == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["counts"] == {"not run": 2}
    monkeypatch.setattr(runner, "run", lambda cases, *_: [runner.Row(case, "passed", 1.0) for case in cases])
    assert main(arguments) == 0
    monkeypatch.setattr(runner, "describe_device", lambda: {**runner.CPU, "device": "cuda:0", "name": "A GPU"})
    assert main([*arguments[2:]]) == 0
    assert "\nDEVICE: A GPU (cuda:0)" in capsys.readouterr().out
    assert json.loads((tmp_path / "gpu.json").read_text())["device"] == "cuda"
    monkeypatch.setattr(runner, "describe_device", lambda: runner.CPU)
    assert main(["--device", "cuda", *arguments[2:]]) == 2
    with pytest.raises(SystemExit):
        main([*arguments[:-1], "nothing"])
    assert "no case is called ['nothing']; there are: " in capsys.readouterr().err


def test_a_python_without_torch_gets_a_message():
    code = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['gpu']; "
        "runpy.run_module('benchmarks.gpu', None, '__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "has no torch: these cases need torch (2.6 or newer) and NumPy" in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- threads on one GPU: what can be seen of it without one ------------------------------------------------------------


def test_threads_run_their_own_backwards():
    assert run_replicas(2, lambda _: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize("topology", ["complete", "ring"])
def test_threads_show_only_written_values(monkeypatch, topology):
    """Each thread may have a stream of its own: it waits for it before others read, and before it lets what it read go."""
    waited: set[int] = set()
    kept: list[Tensor] = []
    brought: list[bool] = []
    lock = threading.Lock()

    def wait(tensor: Tensor) -> None:
        with lock:
            kept.append(tensor)  # so that no other tensor gets its id
            waited.add(id(tensor))

    bring = LocalHub.put

    def look(self: LocalHub, key: Any, rank: int, value: object) -> None:
        if isinstance(value, Tensor):
            with lock:
                brought.append(id(value) in waited)
        bring(self, key, rank, value)

    monkeypatch.setattr(in_process, "_wait_until_written", wait)
    monkeypatch.setattr(LocalHub, "put", look)

    def work(transport: InProcessTransport) -> list[int]:
        model = net(transport.rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossip(model, optimizer, topology=topology, transport=transport)
        for t in range(3):
            optimizer.zero_grad()
            loss(model, t, transport.rank).backward()
            optimizer.step()
        replica.consensus_distance()
        received = [id(bucket.messages[1]) for bucket in replica.engine.buckets]
        replica.close()
        return received

    received = run_replicas(3, work)
    assert len(brought) > 5
    assert all(brought)
    assert {number for numbers in received for number in numbers} <= waited


# -- kernels -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_of_messages():
    """On Triton's interpreter, which must be chosen before Triton is imported. Parts of a tile, one value, none, and blocks."""
    pytest.importorskip("triton")
    code = (
        "from benchmarks.gpu import kernels; from benchmarks.gpu.case import Worker; import pathlib, torch\n"
        "for kernels.SHAPES[:] in ([(64, 64), (17, 3), (1, 1), (0, 4)], list(kernels.SHAPES)):\n"
        "    print(kernels.messages(Worker(0, 1, 'gossip', torch.device('cpu'), pathlib.Path())))"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n") == ["float32, float16"] * 2 + [""]
