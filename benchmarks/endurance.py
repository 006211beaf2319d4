"""Trains under faults: ``python -m benchmarks.endurance``, or ``make endurance``.

Workers of this machine train a small classifier (digits) with 1.5 s of emulated computation per step. With root they are in
sites, which are network namespaces (``benchmarks.lab``). A schedule kills and freezes workers, cuts sites off, and slows their
links down. A new process takes a killed worker's place after three seconds; a frozen one wakes after 2 to 30 seconds; a site is
apart for 5 to 40 seconds, or has a hundredth of its rate for 10 to 60. The schedule is drawn from a seed: faults at random
times (Poisson), each of a random worker or site. A twin without faults trains on the same machine at the same time. Figures:

- throughput: optimizer steps of all workers, relative to the twin, and of the workers alive at the time;
- participation: the part of the exchanges of living workers that took place;
- longest step: of those that do not last longer because the worker itself is frozen;
- rejoin: seconds from the start of a new process to its first exchange, and seconds of that without imports;
- loss: of the mean model on held-out data at the end, relative to the twin.

Each worker writes a line per second. Writes ``benchmarks/results/endurance.json``, ``.md``, ``.png``, and the lines of every
tenth second to ``.jsonl.gz``. Without root there are no sites, and only kills and freezes.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gzip
import hashlib
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import decent_dp
from benchmarks.lab import INTERFACE, Lab, missing
from decent_dp.errors import PeerLostError
from decent_dp.launch.local import store_on

PACE, LR, BATCH = 1.5, 0.05, 32
# Seconds: for all to start, until a killed worker is started again, without faults at the end, and for all to end after that.
START, RESTART, CALM, GRACE = 900.0, 3.0, 25.0, 120.0
# How often each fault is drawn, and the least and most seconds that it lasts.
KINDS = {"kill": (4, 0.0, 0.0), "freeze": (3, 2.0, 30.0), "part": (2, 5.0, 40.0), "slow": (2, 10.0, 60.0)}
# What ends it.
ENDS = {"freeze": "wake", "part": "heal", "slow": "fast"}
# Mbit/s of a site's link.
RATE, SLOW = 100.0, 1.0
# Seconds between two lines of a worker that are kept.
KEPT = 10.0
RESULT = Path(__file__).parent / "results" / "endurance.json"


@dataclass(frozen=True)
class Fault:
    """At second ``at`` a worker is killed or frozen, or a site is cut off or slowed down, for so many seconds."""

    at: float
    what: str
    who: int
    seconds: float = 0.0


def make_schedule(n: int, seconds: float, per_hour: float, seed: int, sites: int = 0) -> list[Fault]:
    """Faults that end in time. One site is apart at a time, and nothing has the same fault twice at once."""
    chosen, now, found = random.Random(seed), 0.0, list[Fault]()
    kinds = {what: often for what, (often, _, _) in KINDS.items() if sites or what in ("kill", "freeze")}
    while (now := now + chosen.expovariate(per_hour / 3600)) < seconds - CALM:
        (what,) = chosen.choices(list(kinds), list(kinds.values()))
        lasts = chosen.uniform(*KINDS[what][1:])
        who = chosen.randrange(n if what in ("kill", "freeze") else sites)
        others = [fault for fault in found if fault.what == what and now < fault.at + fault.seconds]
        if now + lasts < seconds - CALM and not any(what == "part" or fault.who == who for fault in others):
            found.append(Fault(round(now, 2), what, who, round(lasts, 2)))
    return found


# -- a worker --------------------------------------------------------------------------------------------------------------


def work(rank: int, store: str, folder: str, pace: float, joins: bool) -> None:
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    began = time.time()
    torch.set_num_threads(1)
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    inputs, targets = torch.from_numpy(data).float() / 16, torch.from_numpy(labels)
    held_out = slice(1400, None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    if not joins:
        decent_dp.initialize_dist()
    loaded = time.time()
    while True:
        try:
            transport = decent_dp.join(store, rank=rank) if joins else None
            faults = decent_dp.Tolerate(dead_after=10.0, min_workers=1)  # a site may be alone
            replica = decent_dp.gossip(model, optimizer, topology="base-2", faults=faults, transport=transport)
            break
        except PeerLostError as error:  # the site is cut off
            print(f"{time.strftime('%X')} worker {rank} tries again: {error}", flush=True)
            if not joins or time.time() > loaded + START:
                raise
            time.sleep(1.0)
    chosen = torch.Generator().manual_seed(1000 * rank + (os.getpid() if joins else 0))
    loss_of, last_line, last_step, steps, seated = nn.CrossEntropyLoss(), 0.0, time.monotonic(), 0, 0.0
    with open(f"{folder}/worker-{rank}.jsonl", "a", buffering=1) as file:

        def note(**more: Any) -> None:
            stats, roster = replica.stats(), replica.roster
            with torch.no_grad():
                loss = float(loss_of(model(inputs[held_out]), targets[held_out]))
            counts = {"exchanges": stats.exchanges, "holes": stats.holes, "one_sided": stats.one_sided, "round": stats.rounds}
            here = {"epoch": roster.epoch, "size": roster.size, "seat": roster.seat, "gone": len(roster.holes)}
            line = {"time": time.time(), "pid": os.getpid(), "steps": steps, "loss": loss, **counts, **here}
            print(json.dumps({**line, **more}), file=file)

        Path(f"{folder}/ready-{rank}").touch()
        while not Path(f"{folder}/until").exists():
            time.sleep(0.05)
        until, last_step = float(Path(f"{folder}/until").read_text()), time.monotonic()
        while time.time() < until:
            time.sleep(pace)
            batch = torch.randint(0, 1400, (BATCH,), generator=chosen)
            optimizer.zero_grad()
            loss_of(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            now = time.monotonic()
            took, last_step, steps = now - last_step, now, steps + 1
            if joins and not seated and replica.stats().exchanges > 0:
                seated = time.time()
                note(seated_after=seated - began, seated_after_imports=seated - loaded)
            elif took > 2 * pace and (seated or not joins):  # a process joins within a step
                note(long=took)
            if now - last_line > 1:
                last_line = now
                note()
        if replica.roster.seat >= 0:
            with replica.averaged():
                weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
                note(end=hashlib.sha256(weights).hexdigest())
    replica.close()


# -- all of them -----------------------------------------------------------------------------------------------------------


class Network:
    """Where workers run: in sites of a lab, or all in this machine's own network.

    Args:
        lab: None for the machine's own.
        first: the first of the lab's nodes that are this network's; the last one has the store.
    """

    def __init__(self, n: int, sites: int = 0, lab: Lab | None = None, first: int = 0) -> None:
        self._n, self._sites, self._lab, self._first = n, sites, lab, first

    def serve(self, folder: Path) -> tuple[str, int, Callable[[], None]]:
        """Starts the store. Returns its host and port, and what ends it."""
        if self._lab is None:
            server = [store_on()]  # it ends with the object
            return "127.0.0.1", server[0].port, server.clear
        node = self._first + self._sites
        host, port = self._lab.address(node), 29500
        command = [sys.executable, "-m", "decent_dp", "roster", "--bind", f"{host}:{port}"]
        with open(folder / "store.log", "ab") as log:
            process = self._lab.start(node, command, os.environ, log)
        return host, port, process.kill

    def start(self, rank: int, command: list[str], environment: dict[str, str], log: Any) -> subprocess.Popen[bytes]:
        if self._lab is None:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        environment = {**environment, "GLOO_SOCKET_IFNAME": INTERFACE}
        return self._lab.start(self._first + rank * self._sites // self._n, command, environment, log)

    def act(self, what: str, site: int) -> None:
        """One of 'part', 'heal', 'slow' and 'fast'."""
        assert self._lab is not None
        if what in ("part", "heal"):
            self._lab.plug([self._first + site], apart=what == "part")
        else:
            self._lab.set_rate(self._first + site, SLOW if what == "slow" else RATE)


class Run:
    """One training: its processes, and what happens to them.

    Attributes:
        events: seconds since the beginning, what, and the worker or site.
        errors: workers that ended though nobody killed them.
    """

    def __init__(
        self, n: int, seconds: float, schedule: list[Fault], folder: Path, network: Network, pace: float = PACE
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._pace = pace
        self.n, self.seconds, self.folder, self._network, self._schedule = n, seconds, folder, network, schedule
        self._host, self._port, self._end_store = network.serve(folder)
        self._logs = {rank: open(folder / f"worker-{rank}.log", "ab") for rank in range(n)}  # noqa: SIM115
        # When dead workers are started again; those that are frozen.
        self._restarts: dict[int, float] = {}
        self._frozen: set[int] = set()
        self.events: list[tuple[float, str, int]] = []
        self.errors: list[str] = []
        self.hanging: list[int] = []
        self.start = self.until = 0.0
        self._is_closed = False
        self._workers = {rank: self._spawn(rank, joins=False) for rank in range(n)}

    def _spawn(self, rank: int, joins: bool) -> subprocess.Popen[bytes]:
        address = f"{self._host}:{self._port}"
        command = [sys.executable, "-m", "benchmarks.endurance", "--worker", str(rank), address, str(self.folder)]
        command.append(str(self._pace))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": self._host, "MASTER_PORT": str(self._port)}
        environment |= {"WORLD_SIZE": str(self.n), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return self._network.start(rank, command + ["join"] * joins, environment, self._logs[rank])

    def wait_until_ready(self) -> None:
        begun = time.monotonic()
        while not all((self.folder / f"ready-{rank}").exists() for rank in range(self.n)):
            ended = [rank for rank, worker in self._workers.items() if worker.poll() is not None]
            if ended or time.monotonic() > begun + START:
                self.close()
                logs = {rank: (self.folder / f"worker-{rank}.log").read_text(errors="replace")[-3000:] for rank in ended[:1]}
                raise RuntimeError(f"not all workers have started within {START:g} s, or some have ended: {ended} {logs}")
            time.sleep(0.1)

    def train(self, start: float) -> None:
        """Until the end; ``start`` is a time that is to come."""
        self.start, self.until = start, start + self.seconds
        (self.folder / "until.new").write_text(str(self.until))
        (self.folder / "until.new").rename(self.folder / "until")
        due = [(self.start + fault.at, fault.what, fault.who) for fault in self._schedule]
        due += [
            (self.start + fault.at + fault.seconds, ENDS[fault.what], fault.who) for fault in self._schedule if fault.seconds
        ]
        due.sort()
        try:
            while any(worker.poll() is None for worker in self._workers.values()) and time.time() < self.until + GRACE:
                while due and due[0][0] <= time.time():
                    _, what, who = due.pop(0)
                    self._act(what, who)
                self._look_after()
                time.sleep(0.05)
        finally:
            self.close()

    def _act(self, what: str, who: int) -> None:
        now = time.time()
        if what in ("part", "heal", "slow", "fast"):
            self._network.act(what, who)
            self.events.append((now - self.start, what, who))
            return
        worker = self._workers[who]
        if worker.poll() is not None or (who in self._frozen) != (what == "wake"):
            return
        if what == "kill":
            worker.kill()
            self._restarts[who] = now + RESTART
        elif what == "freeze":
            worker.send_signal(signal.SIGSTOP)
            self._frozen.add(who)
        else:
            worker.send_signal(signal.SIGCONT)
            self._frozen.discard(who)
        self.events.append((now - self.start, what, who))

    def _look_after(self) -> None:
        now = time.time()
        for rank, worker in self._workers.items():
            code = worker.poll()
            if code is not None and now < self.until - CALM / 2 and rank not in self._restarts:
                self.errors.append(f"worker {rank} ended with {code} after {now - self.start:.0f} s")
                self._restarts[rank] = now
            if now >= self._restarts.get(rank, now + 1):
                del self._restarts[rank]
                self._workers[rank] = self._spawn(rank, joins=True)

    def close(self) -> None:
        """Ends all processes that are left; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self.hanging = [rank for rank, worker in self._workers.items() if worker.poll() is None]
        for rank in self.hanging:
            self._workers[rank].send_signal(signal.SIGCONT)
            self._workers[rank].send_signal(signal.SIGUSR1)
        time.sleep(1.0 if self.hanging else 0.0)
        for rank, worker in self._workers.items():
            worker.kill()
            code = worker.wait()
            if code and rank not in self.hanging and self.start:
                self.errors.append(f"worker {rank} ended with {code}")
            self._logs[rank].close()
        self._end_store()


def read(run: Run) -> list[dict[str, Any]]:
    lines = []
    for file in run.folder.glob("worker-*.jsonl"):
        rank = int(file.stem.partition("-")[2])
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            lines.append({**entry, "rank": rank, "at": entry["time"] - run.start})
    return lines


def intervals(run: Run, seated: list[dict[str, Any]]) -> tuple[dict[int, Any], dict[int, Any]]:
    """When workers were frozen, and when they were frozen or dead, by rank, in seconds since the beginning."""
    frozen: dict[int, list[tuple[float, float]]] = {}
    away: dict[int, list[tuple[float, float]]] = {}
    for at, what, rank in run.events:
        if what == "kill":
            back = min((line["at"] for line in seated if line["rank"] == rank and line["at"] > at), default=run.seconds)
            away.setdefault(rank, []).append((at, back))
        if what == "freeze":
            woke = min((t for t, w, r in run.events if r == rank and w == "wake" and t > at), default=run.seconds)
            frozen.setdefault(rank, []).append((at, woke))
            away.setdefault(rank, []).append((at, woke))
    return frozen, away


def union(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times, each once."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(found):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def figures(run: Run, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What is computed from the lines of all workers."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        last[line["rank"], line["pid"]] = line
    steps = sum(line["steps"] for line in last.values())
    exchanges, holes = (sum(line[key] for line in last.values()) for key in ("exchanges", "holes"))
    ends = [line for line in lines if "end" in line]
    seated = [line for line in lines if "seated_after" in line]
    frozen, away = intervals(run, seated)
    alive = run.n * run.seconds - sum(end - begin for own in away.values() for begin, end in union(own))
    # A step that began before its worker woke lasts longer for this reason.
    stalls = [
        line["long"]
        for line in lines
        if "long" in line
        and not any(begin < line["at"] and line["at"] - line["long"] < end for begin, end in frozen.get(line["rank"], ()))
    ]
    return {
        "steps": steps,
        "steps_per_living_second": steps / alive,
        "participation": exchanges / max(exchanges + holes, 1),
        "one_sided": sum(line["one_sided"] for line in last.values()),
        "longest_step": max(stalls, default=None),
        "rejoined": len(seated),
        "rejoin_s": statistics.median([line["seated_after"] for line in seated]) if seated else None,
        "rejoin_after_imports_s": statistics.median([line["seated_after_imports"] for line in seated]) if seated else None,
        "loss": statistics.fmean([line["loss"] for line in ends]) if ends else None,
        "means": len({line["end"] for line in ends}),
        "at_the_end": len(ends),
        "faults": dict(Counter(what for _, what, _ in run.events if what in KINDS)),
        "hangs": len(run.hanging),
        "errors": run.errors,
    }


def said(value: float | None, relative_to: float | None = 1.0, digits: int = 1) -> str:
    return "–" if value is None or not relative_to else f"{value / relative_to:.{digits}f}"


def table(content: dict[str, Any]) -> str:
    calm, stormy = content["without"], content["with"]
    counts = dict.fromkeys(KINDS, 0) | stormy["faults"]
    rows = {
        "workers, minutes": f"{content['workers']}, {content['seconds'] / 60:g}",
        "faults": f"{sum(counts.values())}: {counts['kill']} kills, {counts['freeze']} freezes, {counts['part']} times a site "
        f"was cut off, {counts['slow']} times its link was slow",
        "workers that hang, or end with an error": f"{stormy['hangs'] + len(stormy['errors'])}",
        "new processes that became members": f"{stormy['rejoined']}",
        "different means at the end": f"{stormy['means']}, of {stormy['at_the_end']} workers",
        "steps of all workers": f"{stormy['steps'] / calm['steps']:.3f} of those without faults",
        "the same, per living worker": f"{stormy['steps_per_living_second'] / calm['steps_per_living_second']:.3f}",
        "participation": f"{stormy['participation']:.3f} ({calm['participation']:.3f} without faults)",
        "longest step, of workers that are not frozen": f"{said(stormy['longest_step'])} s ({PACE:g} s of it are computation)",
        "a new process mixes after": f"{said(stormy['rejoin_after_imports_s'])} s (median)",
        "the same, with its imports": f"{said(stormy['rejoin_s'])} s",
        "loss of the mean at the end": f"{said(stormy['loss'], calm['loss'], 3)} of that without faults",
    }
    return "\n".join(["| what | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())]) + "\n"


def plot(content: dict[str, Any], calm: list[dict[str, Any]], stormy: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    n, seconds, width = content["workers"], content["seconds"], 4
    _, (above, middle, below) = plt.subplots(3, 1, figsize=(8, 7), sharex=True)
    bins = range(0, int(seconds), width)
    for lines, name in ((calm, "without faults"), (stormy, "with faults")):
        by_bin: dict[int, list[dict[str, Any]]] = {}
        for line in lines:
            by_bin.setdefault(int(line["at"]) // width * width, []).append(line)
        there = [len({line["rank"] for line in by_bin.get(t, [])}) for t in bins]
        mixing = [len({line["rank"] for line in by_bin.get(t, []) if line["seat"] >= 0 and line["gone"] == 0}) for t in bins]
        losses = [statistics.fmean([line["loss"] for line in by_bin[t]]) if t in by_bin else float("nan") for t in bins]
        for axis, values in ((above, there), (middle, mixing), (below, losses)):
            axis.plot([t / 60 for t in bins], values, label=name, linewidth=1)
    for fault in content["schedule"]:
        if fault["what"] == "part":
            for axis in (above, middle):
                axis.axvspan(fault["at"] / 60, (fault["at"] + fault["seconds"]) / 60, color="0.88", linewidth=0)
    above.set(
        ylabel="workers that step",
        ylim=(0, n + 1),
        title="shaded: a site is cut off",
    )
    middle.set(ylabel="workers that miss\nno member", ylim=(0, n + 1))
    below.set(ylabel="loss of a replica", yscale="log", xlabel="minutes")
    below.legend()
    plt.tight_layout()
    plt.savefig(file, dpi=110)


def demo() -> None:
    """A worker of four is killed after 15 seconds; three seconds later a new process starts in its place."""
    n, seconds, killed_at, victim, pace = 4, 40.0, 15.0, 2, 0.5
    with tempfile.TemporaryDirectory() as place:
        run = Run(n, seconds, [Fault(killed_at, "kill", victim)], Path(place), Network(n), pace)
        run.wait_until_ready()
        thread = threading.Thread(target=run.train, args=(time.time() + 1.0,))
        thread.start()
        print(f"{n} workers on this machine. Each line: steps per second of workers 0 to {n - 1}, members, loss of a replica.")
        last: dict[int, dict[str, Any]] = {}
        while thread.is_alive():
            thread.join(2.0)
            shown, sizes, losses = [], set(), []
            for rank in range(n):
                file = run.folder / f"worker-{rank}.jsonl"
                lines = [json.loads(line) for line in file.read_text().splitlines()[-3:]] if file.exists() else []
                same = [line for line in lines if line["pid"] == lines[-1]["pid"]]
                is_new = bool(lines) and lines[-1] != last.get(rank)
                if is_new and len(same) > 1 and same[-1]["time"] > same[0]["time"]:
                    stepped = (same[-1]["steps"] - same[0]["steps"]) / (same[-1]["time"] - same[0]["time"])
                    shown.append(f"{stepped:4.2f}")
                    sizes.add(same[-1]["size"])
                    losses.append(same[-1]["loss"])
                else:
                    shown.append("   -")
                last |= {rank: lines[-1]} if lines else {}
            if losses:
                members = "/".join(map(str, sorted(sizes)))
                print(
                    f"{time.strftime('%X')}  {'  '.join(shown)}   members {members}   loss {statistics.fmean(losses):.3f}",
                    flush=True,
                )
        seen = figures(run, read(run))
    rejoined = said(seen["rejoin_after_imports_s"])
    print(f"Worker {victim} was killed, and a new process took its place: it mixed {rejoined} s after its imports.")
    longest = f"{said(seen['longest_step'])} s" if seen["longest_step"] else f"less than {2 * pace:g} s"
    print(f"The longest step of the others took {longest}, of which {pace:g} s are computation.")
    print(f"At the end all {seen['at_the_end']} workers had the same mean: {seen['means'] == 1}.")


def endure(n: int, seconds: float, schedule: list[Fault], place: Path, sites: int, pace: float = PACE) -> dict[str, Run]:
    """Trains with the schedule and, at the same time, without. ``sites``: 0 for none; else it needs root."""
    with contextlib.ExitStack() as ending:
        lab = ending.enter_context(Lab(2 * (sites + 1), RATE)) if sites else None
        runs = {
            name: Run(n, seconds, faults, place / name, Network(n, sites, lab, first), pace)
            for name, faults, first in (("without", [], 0), ("with", schedule, sites + 1))
        }
        for run in runs.values():
            ending.callback(run.close)
        for run in runs.values():
            run.wait_until_ready()
        start = time.time() + 1.0
        threads = [threading.Thread(target=run.train, args=(start,)) for run in runs.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--demo", action="store_true", help="four workers, one minute, one kill")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--sites", type=int, default=8, help="that can be cut off, with root; 0: none")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.worker:
        rank, store, folder, pace, *joins = given.worker
        work(int(rank), store, folder, float(pace), bool(joins))
        return
    if given.demo:
        demo()
        return
    n, seconds, sites = given.workers, 60 * given.minutes, given.sites
    if sites and (lacking := missing()):
        print(f"no sites: {lacking}", flush=True)
        sites = 0
    schedule = make_schedule(n, seconds, given.faults_per_hour, given.seed, sites)
    with tempfile.TemporaryDirectory() as place:
        runs = endure(n, seconds, schedule, Path(place), sites)
        lines = {name: read(run) for name, run in runs.items()}
        seen = {name: figures(run, lines[name]) for name, run in runs.items()}
        for name, run in runs.items():
            print(name, json.dumps(seen[name]), flush=True)
            for rank in range(n) if run.hanging or run.errors else ():
                log = (run.folder / f"worker-{rank}.log").read_text(errors="replace")
                if "Traceback" in log or rank in run.hanging:
                    print(f"--- worker {rank}\n{log[-3000:]}", flush=True)
    settings = {"workers": n, "sites": sites, "seconds": seconds, "seed": given.seed, "per_hour": given.faults_per_hour}
    content = {**settings, "schedule": [asdict(fault) for fault in schedule], **seen}
    given.out.write_text(json.dumps(content, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(table(content))
    plot(content, lines["without"], lines["with"], given.out.with_suffix(".png"))
    with gzip.open(given.out.with_suffix(".jsonl.gz"), "wt") as file:
        for name in seen:
            for line in sorted(lines[name], key=lambda line: line["at"]):
                if line["at"] % KEPT < 1.0 or not {"long", "seated_after", "end"}.isdisjoint(line):
                    del line["time"], line["pid"]
                    print(
                        json.dumps({"run": name, **line, "at": round(line["at"], 1), "loss": round(line["loss"], 4)}), file=file
                    )


if __name__ == "__main__":
    main()
