"""``decent_dp.launch.spawn``: workers without a launcher, in scripts and in notebooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from decent_dp.launch import spawn
from tests.test_docs import ROOT, blocks
from tests.tools.test_launch_command import CLEAN, all_gone, own_lines

# What a notebook and a script begin with, and what they are asked about afterwards.
BEGIN = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import decent_dp
from decent_dp.launch import spawn

def children():
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found[path.parent.name] = fields[0]
    return found
"""


def run(text: str, folder: Path, *, as_notebook: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a script; or the text as a notebook does, with a main module that is no file."""
    text = BEGIN + textwrap.dedent(text)
    (folder / "script.py").write_text(text)
    command = ["-c", text] if as_notebook else ["script.py"]
    how: Any = {"capture_output": True, "text": True, "timeout": 300, "cwd": folder, "env": CLEAN}
    done = subprocess.run([sys.executable, "-W", "error", *command], **how)
    done.stderr = own_lines(done.stderr)
    return done


def told(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(done.stdout)


def read_input() -> str:
    return sys.stdin.read()


def test_workers_do_not_read_the_input_of_their_caller():
    mine, other = os.pipe()
    os.write(other, b"typed")
    os.close(other)
    before = os.dup(0)
    os.dup2(mine, 0)
    try:
        assert spawn(read_input, 1) == [""]
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(mine)


@pytest.mark.slow
def test_a_notebooks_function_runs_on_each_worker(tmp_path):
    """With the notebook's variables, functions and classes, after autograd ran there; and nothing remains."""
    pytest.importorskip("cloudpickle")
    found = told(
        run(
            """
            scale = 3
            class Result:
                def __init__(self, value):
                    self.value = value

            def scaled(x):
                return x * scale

            def train(x, y):
                total = torch.tensor([float(dist.get_rank() + 1)])
                dist.all_reduce(total)
                names = "WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR OMP_NUM_THREADS GLOO_SOCKET_IFNAME".split()
                facts = [dist.get_rank(), dist.get_world_size(), torch.get_num_threads(), *map(os.environ.get, names)]
                return Result((float(total), scaled(x) + y, facts))

            torch.randn(300, 300, requires_grad=True).mm(torch.randn(300, 300)).sum().backward()
            before = dict(os.environ)
            results = spawn(train, 2, 5, torch.ones(2))
            assert all(type(result) is Result for result in results)
            left = children()
            values = [(total, scaled.tolist(), facts) for total, scaled, facts in (result.value for result in results)]
            print(json.dumps([values, left, dict(os.environ) == before, dist.is_initialized()]))
            """,
            tmp_path,
            as_notebook=True,
        )
    )
    values, left, same, initialized = found
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank, (total, scaled, facts) in enumerate(values):
        assert (total, scaled) == (3.0, [16.0, 16.0])
        assert facts == [rank, 2, int(threads), "2", str(rank), "2", "127.0.0.1", threads, "lo"]
    assert (left, same, initialized) == ({}, True, False)


# -- bad input -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in os.environ.keys() - CLEAN.keys():
        monkeypatch.delenv(name)
    return monkeypatch


def test_bad_input(no_launcher):
    with pytest.raises(ValueError, match="nproc must be a whole number, at least 1, got 0"):
        spawn(os.getpid, 0)
    with pytest.raises(TypeError, match=r"nproc must be a whole number, at least 1, got 'two'"):
        spawn(os.getpid, "two")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fn must be a function, got 3"):
        spawn(3, 2)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"pickles the function, its arguments and its results.*cannot be:.*top level of a file"
    ):
        spawn(len, 2, signal.default_int_handler, sys._getframe())


def test_a_worker_or_a_process_with_a_group_spawns_none(no_launcher):
    no_launcher.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"a process group: call it before initialize_dist\(\)"):
        spawn(os.getpid, 2)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        no_launcher.setenv(name, value)
    with pytest.raises(
        RuntimeError, match=r"spawn\(\) starts workers itself, and was called in a worker \(RANK and WORLD_SIZE"
    ):
        spawn(os.getpid, 2)


def test_a_notebook_without_cloudpickle(no_launcher):
    main = type(sys)("__main__")
    no_launcher.setitem(sys.modules, "__main__", main)
    no_launcher.setitem(sys.modules, "cloudpickle", None)

    def train() -> None: ...

    train.__module__ = "__main__"
    with pytest.raises(
        ImportError, match=r"'train', which is defined in a notebook: put it in a file .*install cloudpickle;.*-e"
    ):
        spawn(train, 2)


# -- how workers end -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scripts_and_how_their_workers_end(tmp_path):
    found = told(
        run(
            """
            def rounds(steps, wrong=None):
                torch.manual_seed(dist.get_rank())
                model = torch.nn.Linear(4, 4)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                replica = decent_dp.gossip(model, optimizer)
                for t in range(steps):
                    optimizer.zero_grad()
                    model(torch.randn(8, 4)).square().mean().backward()
                    optimizer.step()
                    if t == 5 and dist.get_rank() == 1 and wrong is not None:
                        wrong()
                replica.average_()
                return model.weight.detach()

            def raises():
                raise ValueError("boom")

            def kills():
                os.kill(os.getpid(), signal.SIGKILL)

            def stubborn():
                # It hears no SIGTERM.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if dist.get_rank() == 1:
                    raises()
                time.sleep(1000)

            def nested():
                spawn(os.getpid, 2)

            def unpicklable():
                return lambda: None

            if __name__ == "__main__":
                cases = []
                for name, n, fn, args in (
                    ("fine", 2, rounds, (4,)), ("alone", 1, rounds, (4,)), ("raises", 3, rounds, (10**6, raises)),
                    ("kills", 2, rounds, (10**6, kills)), ("stubborn", 2, stubborn, ()), ("exits", 1, sys.exit, (0,)),
                    ("ends", 1, os._exit, (0,)), ("nested", 1, nested, ()), ("unpicklable", 1, unpicklable, ()),
                ):
                    try:
                        value = spawn(fn, n, *args)
                        words = [len(value), all(torch.equal(value[0], other) for other in value)]
                    except RuntimeError as error:
                        words = str(error)
                    cases.append([name, words, children()])
                print(json.dumps(cases))
            """,
            tmp_path,
        )
    )
    words = {name: text for name, text, left in found if left == {}}
    assert words.keys() == {name for name, *_ in found}
    assert (words["fine"], words["alone"]) == ([2, True], [1, True])
    first, *trace = words["raises"].splitlines()
    assert first == "worker 1 of 3 failed: ValueError: boom"
    assert trace[1] == "Traceback (most recent call last):"
    assert "script.py" in trace[2]
    assert trace[-1] == "ValueError: boom"
    assert words["kills"] == "worker 1 of 2 was killed by SIGKILL (is the memory full?); what it wrote may say more"
    assert words["stubborn"].startswith("worker 1 of 2 failed: ValueError: boom")
    assert words["exits"].startswith("worker 0 of 1 failed: SystemExit: 0")
    assert words["ends"].startswith("worker 0 of 1 ended before it had a result (exit code 0)")
    assert "RuntimeError: spawn() starts workers itself" in words["nested"]
    assert words["unpicklable"].startswith("worker 0 of 1 failed: TypeError: spawn() pickles")


@pytest.mark.slow
def test_a_script_without_the_guard_is_told_of_it(tmp_path):
    done = run("spawn(len, 2, b'')", tmp_path)
    assert done.returncode == 1
    assert "in a script under `if __name__ == '__main__':`" in done.stderr
    assert "RuntimeError: spawn() starts workers itself" in done.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_an_error_that_is_kept_keeps_no_port(tmp_path):
    """As a notebook keeps the last one, with its traceback."""
    text = """
    def fail():
        raise ValueError("boom")

    if __name__ == "__main__":
        kept, open_ = [], []
        for _ in range(3):
            try:
                spawn(fail, 1)
            except RuntimeError as error:
                kept.append(error)
            open_.append(len(os.listdir("/proc/self/fd")))
        sys.stdout.write(f"{open_[2] - open_[1]} {open_[1] - open_[0]}")
    """
    assert run(text, tmp_path).stdout == "0 0"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_caller(tmp_path, number):
    text = """
    def wait():
        sys.stdout.write(f"{os.getpid()}\\n")
        sys.stdout.flush()
        time.sleep(1000)

    if __name__ == "__main__":
        try:
            spawn(wait, 2)
        except KeyboardInterrupt:
            sys.stdout.write(f"left: {children()}\\n")
    """
    (tmp_path / "script.py").write_text(BEGIN + textwrap.dedent(text))
    how: Any = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL), "cwd": tmp_path, "env": CLEAN}
    with subprocess.Popen(
        [sys.executable, "script.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how
    ) as process:
        try:
            assert process.stdout is not None
            pids = [int(process.stdout.readline()) for _ in range(2)]
            began = time.monotonic()
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert time.monotonic() - began < 45
    assert all_gone(pids)
    err = own_lines(err)
    assert (process.returncode, out, err) == ((0, "left: {}\n", "") if number == signal.SIGINT else (-number, "", ""))


@pytest.mark.slow
def test_the_pages_notebook(tmp_path):
    pytest.importorskip("cloudpickle")
    block, *_ = blocks(ROOT / "docs" / "launch.md", "python no-run")
    done = run(block.code, tmp_path, as_notebook=True)
    assert (done.returncode, done.stderr) == (0, "")
    shown = [line.removeprefix("# > ") for line in block.code.splitlines() if line.startswith("# > ")]
    assert shown == done.stdout.splitlines()


def test_the_library_is_found_where_the_caller_has_found_it(tmp_path):
    """A script may have changed ``sys.path``, on which the library is by that alone."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "decent_dp").symlink_to(ROOT / "src" / "decent_dp")
    (tmp_path / "script.py").write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path / 'own')!r})\n"
        "import decent_dp, decent_dp.launch\n"
        "def place():\n"
        "    return decent_dp.__file__\n"
        "if __name__ == '__main__':\n"
        "    print(decent_dp.__file__, *decent_dp.launch.spawn(place, 1))\n"
    )
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, timeout=300, env=CLEAN)
    assert done.stdout.split() == 2 * [str(tmp_path / "own" / "decent_dp" / "__init__.py")], done.stderr
