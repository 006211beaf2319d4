"""A Slurm cluster on this machine, for tests: a controller and nodes, each with its own host name and network stack.

Everything runs in namespaces of its own, and everything that is written lies in one temporary folder: nothing of the system's
Slurm or munge is used or changed, nothing listens on the machine's interfaces, and all processes end with the cluster.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CPUS = 4  # of a node, as Slurm is told

_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "ip", "unshare", "nsenter", "mount", "hostname")
# Daemons are in folders that not every user has on the PATH.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_CONFIG = """\
ClusterName=tests
SlurmctldHost=controller
SlurmUser=root
# A requeued job waits until the credentials of its last start have expired: 10 seconds here, 120 by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
# Without cgroups, which belong to the machine.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
# More CPUs than this machine may have.
SlurmdParameters=config_overrides
# A job is told of its limit on time, and gets a minute more than it asked for.
OverTimeLimit=1
ReturnToService=2
# Seconds for an answer. A signal that a busy machine does not confirm in time is sent again, and may reach the next start.
MessageTimeout=90
# Jobs of the partition 'high' take the nodes of those in the others: in 'low' with a signal, and time to save.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=node[1-{nodes}] CPUs={cpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=low-at-once Nodes=ALL PriorityTier=1
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""

# Run by the first process of the namespaces; $1 is the folder, $2 the number of nodes.
_START = """\
set -e
cd "$1"
mount --bind hosts /etc/hosts
hostname controller
ip link set lo up
ip link add cluster type bridge
ip address add 10.9.0.254/24 dev cluster
ip link set cluster up
munged --foreground --force --key-file="$1/munge.key" --socket="$1/munge.socket" --pid-file="$1/munged.pid" \
    --log-file="$1/munged.log" --seed-file="$1/munged.seed" &
for node in $(seq "$2"); do
    mkdir "node$node"
    unshare --net --uts --mount bash -e -c '
        hostname "node$1"
        ip link set lo up
        until ip link show eth0 > /dev/null 2>&1; do sleep 0.02; done
        ip address add "10.9.0.$1/24" dev eth0
        ip link set eth0 up
        while true; do slurmd -D || sleep 1; done' bash "$node" &
    echo $! > "node$node.pid"
    while [ "$(readlink /proc/$!/ns/net)" = "$(readlink /proc/$$/ns/net)" ]; do sleep 0.02; done
    ip link add "port$node" type veth peer name eth0 netns $!
    ip link set "port$node" master cluster up
done
slurmctld -D &
read -r || true  # until the pipe is closed; then the namespaces end, with all processes in them
"""


def missing() -> str:
    """What this machine lacks for a cluster; '' if nothing."""
    lacks = [program for program in _PROGRAMS if not shutil.which(program, path=PATH)]
    lacks += ["root"] if os.geteuid() != 0 else []
    if lacks:
        install = "apt-get install slurm-wlm munge iproute2"
        return f"needs root, slurmctld, slurmd, munged: {install} (missing here: {', '.join(lacks)})"
    network = "ip link add cluster type bridge && ip link add port type veth peer name eth0"
    command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "sh", "-c", network]
    done = subprocess.run(command, env={"PATH": PATH}, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"needs namespaces with a bridge, which this machine refuses: {done.stderr.strip()}"


class Cluster:
    """The cluster, as a context; its nodes are node1, node2, ...

    Args:
        nodes: how many.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes

    def __enter__(self) -> Cluster:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        with contextlib.ExitStack() as started:
            started.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._write()
            with open(self.folder / "output.txt", "wb") as output:
                # With its own process group, so that an interrupt from the keyboard leaves the end to us.
                self._process = subprocess.Popen(
                    ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
                    + ["bash", "-c", _START, "bash", str(self.folder), str(self._nodes)],
                    env=self._environ({}),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            started.callback(self._stop)
            self.until(lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%t").split() == ["idle"] * self._nodes)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def _write(self) -> None:
        config = _CONFIG.format(folder=self.folder, nodes=self._nodes, cpus=CPUS)
        (self.folder / "slurm.conf").write_text(config)
        addresses = [f"10.9.0.{node} node{node}" for node in range(1, self._nodes + 1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", "10.9.0.254 controller", *addresses, ""]))
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (self.folder / "munge.key").chmod(0o600)
        (self.folder / "state").mkdir()

    def _stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and with it the first process of the namespaces, so all of them
            self._process.wait()

    def _environ(self, also: Mapping[str, str]) -> dict[str, str]:
        # Without variables of a launcher that has started the tests.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_", "MASTER_", "LOCAL_"))}
        return {**kept, "PATH": PATH, "OMP_NUM_THREADS": "1", "SLURM_CONF": str(self.folder / "slurm.conf"), **also}

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Starts a command on the controller, in the root of the repository; stderr is in stdout."""
        # The pid namespace is the one of the children of our child, which is outside.
        own = f"/proc/{self._process.pid}/ns/pid_for_children"
        enter = ["nsenter", f"--target={self._process.pid}", "--net", "--uts", "--mount", f"--pid={own}"]
        return subprocess.Popen(
            [*enter, "env", f"--chdir={ROOT}", *command],
            env=self._environ(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def outcome(self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 250) -> tuple[int, str]:
        """Runs a command on the controller; returns its exit code and what it wrote."""
        with self.start(*command, env=env) as process:
            try:
                text, _ = process.communicate(timeout=timeout)
            finally:
                process.kill()
        return process.returncode, text

    def run(self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 250) -> str:
        """As ``outcome``, of a command that may not fail."""
        code, text = self.outcome(*command, env=env, timeout=timeout)
        assert code == 0, f"{' '.join(command)}: exit code {code}\n{text}\n{self.logs()}"
        return text

    def submit(self, *options: str, env: Mapping[str, str] | None = None) -> int:
        """Submits a job with sbatch; returns its number."""
        return int(self.run("sbatch", "--parsable", *options, env=env))

    def job(self, number: int) -> dict[str, str]:
        """What Slurm says about a job: JobState, Restarts, and so on."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", "--oneliner", str(number))))

    def crash(self, node: int) -> None:
        """Kills all processes on a node, as a loss of power does; Slurm hears of it at once. Then slurmd starts again."""
        first = (self.folder / f"node{node}.pid").read_text().strip()
        kill = """
            for process in /proc/[0-9]*; do
                if [ "$(readlink $process/ns/net)" = "$(readlink /proc/$0/ns/net)" ] && [ $process != /proc/$0 ]; then
                    kill -9 ${process#/proc/}
                fi
            done"""
        self.outcome("bash", "-c", kill, first)  # some processes end with others, before their turn
        self.run("scontrol", "update", f"nodename=node{node}", "state=down", "reason=crash")

    def until(self, happened: Callable[[], bool], seconds: float = 60, text: Callable[[], str] = lambda: "") -> None:
        """Waits until ``happened()``; ``text()`` is what a failure shows besides the logs."""
        deadline = time.monotonic() + seconds
        while True:
            with contextlib.suppress(AssertionError):  # of a daemon that has not started yet
                if happened():
                    return
            assert self._process.poll() is None, f"the cluster has ended\n{self.logs()}"
            assert time.monotonic() < deadline, f"not within {seconds:g} s\n{text()}\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The last lines of what the daemons have written."""
        files = [self.folder / "output.txt", *sorted(self.folder.glob("*.log"))]
        return "\n".join(f"--- {f.name}\n" + "\n".join(f.read_text().splitlines()[-25:]) for f in files if f.exists())
