"""The command as users start it: a process of its own."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from decent_dp import __version__

COMMAND = str(Path(sys.executable).with_name("decent-dp"))
RING = ("simulate", "--topology", "ring")
CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "COLUMNS", "FORCE_COLOR")}
CLEAN["OMP_NUM_THREADS"] = "1"


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env={**CLEAN, **environ})


def test_the_entry_points() -> None:
    for command in ([COMMAND], [sys.executable, "-m", "decent_dp"]):
        done = run(*command, "--version")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"decent-dp {__version__}\n", "")
    done = run(COMMAND, "topology", "show", "ring", "-n", "0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("decent-dp: Invalid value for '-n'")


def test_help_is_fast() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run(COMMAND, "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    # Of the processor: what others do on this machine does not count.
    assert any(seconds() < 0.5 for _ in range(3))


_PROBE = """
import sys
from decent_dp.tools.cli import main
lines = ["--help", "--version", "topology show base-2 -n 12 -l 3 --json", "topology compare -n 8",
         "plan --params 1e6 --step-ms 60 -n 4 -l 2 --inter 1gbit --intra 10gbit", "doctor --help", "simulate --help",
         "simulate --topology ring -n 0", "doctor --timeout 0"]
for line in lines:
    code = main(line.split())
    assert code == (2 if line.endswith(" 0") else 0), line
    for module in ("torch", "matplotlib", "sklearn", "scipy", "networkx"):
        assert module not in sys.modules, (line, module)
print("fine")
"""


def test_topologies_and_plans_need_no_torch() -> None:
    done = run(sys.executable, "-W", "error", "-c", _PROBE)
    assert done.stdout.endswith("fine\n"), done.stderr


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    imports = f"import sys; sys.modules[{missing!r}] = None; from decent_dp.tools.cli import main"
    code = f"{imports}; sys.exit(main(['topology', 'list']))"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (1, "")
    line = "pip install 'decent-dp[cli]', or in a clone of the repository: pip install -e '.[cli]'"
    assert done.stderr == f"decent-dp: the command line needs typer and rich; {line}\n"


@pytest.mark.slow
@pytest.mark.parametrize("line", ["topology show complete -n 1024 --json", "topology show random-matching -n 8", "--help"])
def test_a_reader_that_goes_is_no_error(line: str) -> None:
    with subprocess.Popen(
        [COMMAND, *line.split()], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=CLEAN
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 0


@pytest.mark.slow
def test_ctrl_c_is_quiet() -> None:
    command = [COMMAND, *RING, "-n", "16", "--steps", "100000"]
    # Where the tests run in the background of a shell, their children ignore the signal.
    how: Any = {"env": CLEAN, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        deadline = time.monotonic() + 40
        while "libtorch" not in maps.read_text() and time.monotonic() < deadline:  # the imports are nearly over
            time.sleep(0.05)
        time.sleep(5.0)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (130, "", "")
