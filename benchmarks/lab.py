"""A network on one machine: nodes are network namespaces, joined by a bridge, each with a shaped link. Needs Linux and root.

Everything has names that start with ``ddplab-`` and our process id. The bridge has its own namespace, too, so that
the machine's network is never changed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

__all__ = ["INTERFACE", "Lab", "LabError", "launcher_variables", "missing", "namespaces", "shape"]

PREFIX = "ddplab-"
INTERFACE = "lab0"  # a node's link, within its namespace
LATENCY = "100ms"
PORT = 29500  # free: every lab has its own namespaces
ROOT = Path(__file__).resolve().parents[1]
# Bytes that a link may send at once after it was idle: what it carries in 35 ms, within these limits. With more, a slow link
# would let short messages pass as if it were a fast one.
_LEAST_BURST, _MOST_BURST = 16 * 1024, 256 * 1024
_CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def shape(rate: float) -> list[str]:
    """The words with which tc shapes a link to ``rate`` Mbit/s."""
    burst = min(max(int(rate * 1e6 / 8 * 0.035), _LEAST_BURST), _MOST_BURST)
    return ["rate", f"{rate:g}mbit", "burst", f"{burst}b", "latency", LATENCY]


class LabError(RuntimeError):
    """The lab could not be built."""


def missing() -> str | None:
    """The first requirement of a lab that this machine lacks, in one line; None if it has all."""
    if sys.platform != "linux":
        return "the network lab needs Linux: its nodes are network namespaces"
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"the network lab needs iproute2 (no {' and no '.join(tools)} here): apt-get install iproute2"
    if os.geteuid() != 0:
        return "the network lab needs root, to make network namespaces: sudo .venv/bin/python -m benchmarks.net"
    return None


def launcher_variables(
    rank: int,
    world_size: int,
    address: str,
    port: int = PORT,
    *,
    local: int = 1,
    interface: str = INTERFACE,
    library: Path | None = None,
) -> dict[str, str]:
    """What a launcher tells a worker, and what is set for all contenders.

    Args:
        local: workers per node.
        library: the folder that contains the package, if it is not the installed one.
    """
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": "1",
        **({} if library is None else {"PYTHONPATH": str(library)}),
    }


def _run(*command: str, seconds: float = 30) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(command)}` did not end within {seconds:g} s") from None
    if done.returncode:
        raise LabError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def namespaces(pid: int | None = None) -> list[str]:
    """The existing namespaces of labs; with ``pid``, only those of that process."""
    names = re.findall(rf"^({PREFIX}\d+-\w+)", _run("ip", "netns", "list"), re.MULTILINE)
    return [name for name in names if pid is None or name.startswith(f"{PREFIX}{pid}-")]


def _remove(names: Sequence[str]) -> None:
    """Ends all processes in these namespaces and deletes them, if they still exist."""
    for name in names:
        with contextlib.suppress(LabError):
            for pid in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    for name in names:
        with contextlib.suppress(LabError):
            _run("ip", "netns", "delete", name)


def _remove_stale() -> None:
    """Removes the remains of labs whose process was killed before it could clean up."""

    def dead(name: str) -> bool:
        return not Path(f"/proc/{name.removeprefix(PREFIX).partition('-')[0]}").exists()

    _remove([name for name in namespaces() if dead(name)])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that would interrupt a clean-up wait until it is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    """Called in a new process, before its command: the process ends with its parent."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


class Lab:
    """The nodes and their links, as a context; inside, :meth:`start` starts processes on them.

    Args:
        nodes: how many.
        rate: of each link, in both directions, in Mbit/s; None for links that are not shaped.
        congestion_control: how TCP shares the links; not the machine's default, which may be BBR (docs/lab/log.md, 2026-11-21).
            A namespace may have 'reno', and of the others those that the machine allows it.

    Raises:
        LabError: a command of iproute2 failed.
    """

    def __init__(self, nodes: int, rate: float | None, congestion_control: str = "reno") -> None:
        self._nodes, self._rate, self._congestion_control = nodes, rate, congestion_control
        self._owner = os.getpid()
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Lab:
        _remove_stale()
        atexit.register(self.close)
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes and removes all namespaces; may be called again."""
        if os.getpid() != self._owner:  # a fork has inherited the atexit handler
            return
        with _undisturbed():
            self.stop()
            _remove(namespaces(self._owner))
            atexit.unregister(self.close)

    def _name(self, node: int | str) -> str:
        return f"{PREFIX}{self._owner}-{node}"

    def address(self, node: int) -> str:
        """The node's IPv4 address."""
        return f"10.77.0.{node + 1}"

    def congestion_control(self) -> str:
        """The congestion control and buffers of TCP on the nodes."""
        return _run("ip", "netns", "exec", self._name(0), "cat", _CONGESTION_CONTROL).strip()

    def _build(self) -> None:
        switch = self._name("sw")
        _run("ip", "netns", "add", switch)
        for bridge in ("bridge", "apart"):
            _run("ip", "-n", switch, "link", "add", bridge, "type", "bridge")
            _run("ip", "-n", switch, "link", "set", bridge, "addrgenmode", "none", "up")
        for node in range(self._nodes):
            self._build_node(node, self._name(node), switch)

    def _build_node(self, node: int, name: str, switch: str) -> None:
        port = f"port{node}"
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", INTERFACE, "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
        # Without addresses of IPv6 the link is silent unless workers speak.
        _run("ip", "-n", name, "link", "set", INTERFACE, "addrgenmode", "none")
        _run("ip", "-n", name, "address", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        _run("ip", "-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge")
        if self._rate is not None:
            self.set_rate(node, self._rate)
        _run("ip", "-n", switch, "link", "set", port, "up")
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        command = ["sh", "-c", f'echo "$0" > {_CONGESTION_CONTROL}', self._congestion_control]
        try:
            _run("ip", "netns", "exec", name, *command)
        except LabError:
            raise LabError(
                f"TCP may not use {self._congestion_control!r} in a network namespace here: only 'reno', and what "
                "`sysctl net.ipv4.tcp_allowed_congestion_control` names"
            ) from None

    def set_rate(self, node: int, rate: float) -> None:
        """Shapes a node's link, in both directions, to ``rate`` Mbit/s."""
        # A veth shapes only what it sends, so each direction is shaped at its sender.
        for namespace, device in ((self._name(node), INTERFACE), (self._name("sw"), f"port{node}")):
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *shape(rate))

    def plug(self, nodes: Sequence[int], *, apart: bool) -> None:
        """Parts these nodes from all others, or joins them again. Nodes that are apart reach each other. Nobody is told."""
        for node in nodes:
            _run("ip", "-n", self._name("sw"), "link", "set", f"port{node}", "master", "apart" if apart else "bridge")

    def start(
        self, node: int, command: Sequence[str], env: Mapping[str, str], log: IO[bytes], cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts ``command`` on a node, in its own process group, with its output in ``log``."""
        worker = subprocess.Popen(
            ["ip", "netns", "exec", self._name(node), *command],
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        self._workers.append(worker)
        return worker

    def wait(self, seconds: float) -> tuple[int, int] | None:
        """Waits until all processes have ended well, or one has not.

        Returns:
            None: all well. Otherwise the index of the first process that ended otherwise, and its exit code; -n for signal n.

        Raises:
            TimeoutError: some still run after ``seconds``.
        """
        end = time.monotonic() + seconds
        while True:
            codes = [worker.poll() for worker in self._workers]
            failed = [(index, code) for index, code in enumerate(codes) if code]
            if failed or all(code == 0 for code in codes):
                return failed[0] if failed else None
            if time.monotonic() > end:
                raise TimeoutError(f"{codes.count(None)} of {len(codes)} workers still ran after {seconds:.0f} s")
            time.sleep(0.05)

    def run(self, command: Sequence[str], folder: Path, seconds: float) -> None:
        """Runs ``command`` with this repository's library as one worker per node, until all have ended.

        Args:
            folder: where each writes ``{rank}.log``.

        Raises:
            RuntimeError: one failed; with the end of its log.
            TimeoutError: some still run after ``seconds``.
        """
        for rank in range(self._nodes):
            env = launcher_variables(rank, self._nodes, self.address(0), library=ROOT / "src")
            with (folder / f"{rank}.log").open("wb") as log:
                self.start(rank, command, {**os.environ, **env}, log, cwd=ROOT)
        try:
            failed = self.wait(seconds)
        finally:
            self.stop()
        if failed is not None:
            rank, code = failed
            said = (folder / f"{rank}.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"worker {rank} of {' '.join(command)} ended with {code}: {said}")

    def stop(self) -> None:
        """Kills all processes started here, with their groups, and waits for their end."""
        for worker in self._workers:
            if worker.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(worker.pid, signal.SIGKILL)
        for worker in self._workers:
            worker.wait()
        self._workers.clear()
