"""Trains under faults: ``python -m benchmarks.endurance``, or ``make endurance``.

Workers of this machine train a small classifier (digits) with 0.8 s of emulated computation per step, while a schedule kills
and freezes them. A new process takes a killed worker's place after three seconds; a frozen one wakes after 2 to 30 seconds. The
schedule is drawn from a seed: faults at random times (Poisson), each of a random worker. The same run without faults comes
first. Figures:

- throughput: optimizer steps of all workers, relative to the run without faults, and of the workers alive at the time;
- participation: the part of the exchanges of living workers that took place;
- stall: the longest time between two steps of a worker that was not frozen itself;
- rejoin: seconds from the start of a new process to its first step as a member, and seconds of that without imports;
- loss: of the mean model on held-out data at the end, relative to the run without faults.

Each worker writes a line per second to ``FOLDER/worker-RANK.jsonl``. Writes ``benchmarks/results/endurance.json``, ``.md`` and
``.png``.
"""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import decent_dp
from decent_dp.launch.local import store_on

PACE, LR, BATCH = 0.8, 0.05, 32
# Seconds: for all to start, until a killed worker is started again, without faults at the end, and for all to end after that.
START, RESTART, CALM, GRACE = 300.0, 3.0, 25.0, 60.0
KILLS = 0.6
RESULT = Path(__file__).parent / "results" / "endurance.json"


@dataclass(frozen=True)
class Fault:
    """At second ``at`` worker ``rank`` is killed, or frozen for so many seconds."""

    at: float
    rank: int
    frozen: float = 0.0


def make_schedule(n: int, seconds: float, per_hour: float, seed: int) -> list[Fault]:
    chosen, now, found = random.Random(seed), 0.0, []
    while (now := now + chosen.expovariate(per_hour / 3600)) < seconds - CALM:
        frozen = 0.0 if chosen.random() < KILLS else chosen.uniform(2, 30)
        if now + frozen < seconds - CALM:
            found.append(Fault(round(now, 2), chosen.randrange(n), round(frozen, 2)))
    return found


# -- a worker --------------------------------------------------------------------------------------------------------------


def work(rank: int, store: str, folder: str, joins: bool) -> None:
    faulthandler.register(signal.SIGUSR1)
    began = time.time()
    torch.set_num_threads(1)
    from sklearn.datasets import load_digits

    data, labels = load_digits(return_X_y=True)
    inputs, targets = torch.from_numpy(data).float() / 16, torch.from_numpy(labels)
    held_out = slice(1400, None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    transport = decent_dp.join(store, rank=rank) if joins else None
    if not joins:
        decent_dp.initialize_dist()
    loaded = time.time()
    faults = decent_dp.Tolerate(dead_after=10.0)
    replica = decent_dp.gossip(model, optimizer, topology="base-2", faults=faults, transport=transport)
    chosen = torch.Generator().manual_seed(1000 * rank + (os.getpid() if joins else 0))
    loss_of, last_line, last_step, longest, steps, seated = nn.CrossEntropyLoss(), 0.0, time.monotonic(), 0.0, 0, 0.0
    with open(f"{folder}/worker-{rank}.jsonl", "a", buffering=1) as file:

        def note(**more: Any) -> None:
            stats, roster = replica.stats(), replica.roster
            with torch.no_grad():
                loss = float(loss_of(model(inputs[held_out]), targets[held_out]))
            counts = {"exchanges": stats.exchanges, "holes": stats.holes, "one_sided": stats.one_sided, "round": stats.rounds}
            here = {"epoch": roster.epoch, "size": roster.size, "seat": roster.seat, "gone": len(roster.holes)}
            line = {"time": time.time(), "pid": os.getpid(), "steps": steps, "longest": longest, "loss": loss, **counts, **here}
            print(json.dumps({**line, **more}), file=file)

        Path(f"{folder}/ready-{rank}").touch()
        while not Path(f"{folder}/until").exists():
            time.sleep(0.05)
        until, last_step = float(Path(f"{folder}/until").read_text()), time.monotonic()
        while time.time() < until:
            time.sleep(PACE)
            batch = torch.randint(0, 1400, (BATCH,), generator=chosen)
            optimizer.zero_grad()
            loss_of(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
            now = time.monotonic()
            longest, last_step, steps = max(longest, now - last_step), now, steps + 1
            if joins and not seated and replica.roster.seat >= 0:
                seated = time.time()
                note(seated_after=seated - began, seated_after_imports=seated - loaded)
                longest = 0.0  # it has joined within a step
            if now - last_line > 1:
                last_line = now
                note()
        if replica.roster.seat >= 0:
            with replica.averaged():
                weights = b"".join(param.detach().numpy().tobytes() for param in model.parameters())
                note(end=hashlib.sha256(weights).hexdigest())
    replica.close()


# -- all of them -----------------------------------------------------------------------------------------------------------


def run(n: int, seconds: float, schedule: list[Fault], folder: Path) -> dict[str, Any]:
    """Trains for so many seconds, and returns what was seen."""
    folder.mkdir(parents=True, exist_ok=True)
    server, begun = store_on(), time.monotonic()
    address = f"127.0.0.1:{server.port}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port)}
    environment |= {"WORLD_SIZE": str(n), "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    logs = {rank: open(folder / f"worker-{rank}.log", "ab") for rank in range(n)}  # noqa: SIM115

    def spawn(rank: int, joins: bool) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.endurance", "--worker", str(rank), address, str(folder)]
        own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.Popen(command + ["join"] * joins, env=own, stdout=logs[rank], stderr=subprocess.STDOUT)

    workers = {rank: spawn(rank, joins=False) for rank in range(n)}
    while not all((folder / f"ready-{rank}").exists() for rank in range(n)):
        if any(worker.poll() is not None for worker in workers.values()) or time.monotonic() > begun + START:
            for worker in workers.values():
                worker.kill()
                worker.wait()
            raise RuntimeError(f"not all workers have started: see {folder}")
        time.sleep(0.1)
    start = time.time() + 1.0
    until = start + seconds
    (folder / "until.new").write_text(str(until))
    (folder / "until.new").rename(folder / "until")
    due: list[tuple[float, str, int]] = []
    for fault in schedule:
        due.append((start + fault.at, "freeze" if fault.frozen else "kill", fault.rank))
        if fault.frozen:
            due.append((start + fault.at + fault.frozen, "wake", fault.rank))
    due.sort()
    errors: list[str] = []
    killed: dict[int, float] = {}
    frozen: dict[int, float] = {}
    seen: list[tuple[float, str, int]] = []
    try:
        while any(worker.poll() is None for worker in workers.values()) and time.time() < until + GRACE:
            now = time.time()
            while due and due[0][0] <= now:
                _, what, rank = due.pop(0)
                worker = workers[rank]
                if worker.poll() is not None or (what == "kill" and rank in frozen):
                    continue
                if what == "kill":
                    worker.kill()
                    killed[rank] = now + RESTART
                elif what == "freeze" and rank not in frozen:
                    worker.send_signal(signal.SIGSTOP)
                    frozen[rank] = now
                elif what == "wake" and frozen.pop(rank, 0.0):
                    worker.send_signal(signal.SIGCONT)
                else:
                    continue
                seen.append((now - start, what, rank))
            for rank, worker in workers.items():
                code = worker.poll()
                if code is not None and now < until - CALM / 2 and rank not in killed:
                    errors.append(f"worker {rank} ended with {code} after {now - start:.0f} s")
                    killed[rank] = now
                if rank in killed and now >= killed[rank]:
                    del killed[rank]
                    workers[rank] = spawn(rank, joins=True)
            time.sleep(0.05)
    finally:
        hanging = [rank for rank, worker in workers.items() if worker.poll() is None]
        for rank in hanging:
            workers[rank].send_signal(signal.SIGCONT)
            workers[rank].send_signal(signal.SIGUSR1)
        time.sleep(1.0 if hanging else 0.0)
        for rank, worker in workers.items():
            worker.kill()
            worker.wait()
            logs[rank].close()
    codes = {rank: worker.returncode for rank, worker in workers.items()}
    errors += [f"worker {rank} ended with {code}" for rank, code in codes.items() if code and rank not in hanging]
    return {"start": start, "until": until, "hangs": hanging, "errors": errors, "events": seen}


def read(folder: Path, found: dict[str, Any]) -> list[dict[str, Any]]:
    lines = []
    for file in folder.glob("worker-*.jsonl"):
        rank = int(file.stem.partition("-")[2])
        for line in file.read_text().splitlines():
            entry = json.loads(line)
            lines.append({**entry, "rank": rank, "at": entry["time"] - found["start"]})
    return lines


def figures(n: int, seconds: float, found: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What is computed from the lines of all workers."""
    last: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        last[line["rank"], line["pid"]] = line
    steps = sum(line["steps"] for line in last.values())
    exchanges, holes = (sum(line[key] for line in last.values()) for key in ("exchanges", "holes"))
    ends = [line for line in lines if "end" in line]
    frozen = {(rank) for _, what, rank in found["events"] if what == "freeze"}
    stalls = [line["longest"] for (rank, _), line in last.items() if rank not in frozen]
    seated = [line for line in lines if "seated_after" in line]
    alive = n * seconds
    for at, what, rank in found["events"]:
        if what == "kill":
            back = min((line["at"] for line in seated if line["rank"] == rank and line["at"] > at), default=seconds)
            alive -= back - at
        if what == "freeze":
            woke = min((t for t, w, r in found["events"] if r == rank and w == "wake" and t > at), default=seconds)
            alive -= woke - at
    return {
        "steps": steps,
        "steps_per_living_second": steps / alive,
        "participation": exchanges / max(exchanges + holes, 1),
        "one_sided": sum(line["one_sided"] for line in last.values()),
        "longest_stall": max(stalls, default=0.0),
        "rejoined": len(seated),
        "rejoin_s": statistics.median([line["seated_after"] for line in seated]) if seated else None,
        "rejoin_after_imports_s": statistics.median([line["seated_after_imports"] for line in seated]) if seated else None,
        "loss": statistics.fmean([line["loss"] for line in ends]) if ends else None,
        "means": len({line["end"] for line in ends}),
        "at_the_end": len(ends),
        "kills": sum(what == "kill" for _, what, _ in found["events"]),
        "freezes": sum(what == "freeze" for _, what, _ in found["events"]),
        "hangs": len(found["hangs"]),
        "errors": found["errors"],
    }


def table(n: int, seconds: float, per_hour: float, calm: dict[str, Any], stormy: dict[str, Any]) -> str:
    rows = {
        "workers, minutes": f"{n}, {seconds / 60:g}",
        "faults": f"{stormy['kills']} kills, {stormy['freezes']} freezes ({per_hour:g} per hour)",
        "workers that hang, or end with an error": f"{stormy['hangs'] + len(stormy['errors'])}",
        "new processes that became members": f"{stormy['rejoined']}",
        "different means at the end": f"{stormy['means']}, of {stormy['at_the_end']} workers",
        "steps of all workers": f"{stormy['steps'] / calm['steps']:.3f} of those without faults",
        "the same, per living worker": f"{stormy['steps_per_living_second'] / calm['steps_per_living_second']:.3f}",
        "participation": f"{stormy['participation']:.3f} ({calm['participation']:.3f} without faults)",
        "longest stall of a worker that was not frozen": f"{stormy['longest_stall']:.2f} s",
        "a new process mixes after": f"{stormy['rejoin_after_imports_s'] or 0:.1f} s",
        "the same, with its imports": f"{stormy['rejoin_s'] or 0:.1f} s",
        "loss of the mean at the end": f"{(stormy['loss'] or 0) / (calm['loss'] or 1):.3f} of that without faults",
    }
    return "\n".join(["| what | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())]) + "\n"


def plot(n: int, seconds: float, calm: list[dict[str, Any]], stormy: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, (above, middle, below) = plt.subplots(3, 1, figsize=(8, 7), sharex=True)
    bins = range(0, int(seconds), 2)
    for lines, name in ((calm, "without faults"), (stormy, "with faults")):
        by_bin: dict[int, list[dict[str, Any]]] = {}
        for line in lines:
            by_bin.setdefault(int(line["at"]) // 2 * 2, []).append(line)
        there = [len({line["rank"] for line in by_bin.get(t, [])}) for t in bins]
        mixing = [len({line["rank"] for line in by_bin.get(t, []) if line["seat"] >= 0 and line["gone"] == 0}) for t in bins]
        losses = [statistics.fmean([line["loss"] for line in by_bin[t]]) if t in by_bin else float("nan") for t in bins]
        above.plot(bins, there, label=name)
        middle.plot(bins, mixing, label=name)
        below.plot(bins, losses, label=name)
    above.set(ylabel="workers that step", ylim=(0, n + 1))
    middle.set(ylabel="workers that miss\nno member", ylim=(0, n + 1))
    below.set(ylabel="loss of a replica", yscale="log", xlabel="seconds")
    below.legend()
    plt.tight_layout()
    plt.savefig(file, dpi=110)


def demo() -> None:
    """A worker of four is killed after 15 seconds; three seconds later a new process starts in its place."""
    n, seconds, killed_at, victim = 4, 40.0, 15.0, 2
    with tempfile.TemporaryDirectory() as place:
        folder, found = Path(place), {}

        def train() -> None:
            found.update(run(n, seconds, [Fault(killed_at, victim)], folder))

        thread = threading.Thread(target=train)
        thread.start()
        print(f"{n} workers on this machine. Each line: steps per second of workers 0 to {n - 1}, members, loss of a replica.")
        last: dict[int, dict[str, Any]] = {}
        while thread.is_alive():
            thread.join(2.0)
            shown, sizes, losses = [], set(), []
            for rank in range(n):
                file = folder / f"worker-{rank}.jsonl"
                lines = [json.loads(line) for line in file.read_text().splitlines()[-3:]] if file.exists() else []
                same = [line for line in lines if line["pid"] == lines[-1]["pid"]]
                is_new = bool(lines) and lines[-1] != last.get(rank)
                if is_new and len(same) > 1 and same[-1]["time"] > same[0]["time"]:
                    pace = (same[-1]["steps"] - same[0]["steps"]) / (same[-1]["time"] - same[0]["time"])
                    shown.append(f"{pace:4.2f}")
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
        seen = figures(n, seconds, found, read(folder, found))
    rejoined, stall = seen["rejoin_after_imports_s"] or 0.0, seen["longest_stall"]
    print(f"Worker {victim} was killed, and a new process took its place: it mixed {rejoined:.1f} s after its imports.")
    print(f"The others lost no step. Their longest one took {stall:.2f} s, of which {PACE:g} s are computation.")
    print(f"At the end all {seen['at_the_end']} workers had the same mean: {seen['means'] == 1}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--demo", action="store_true", help="four workers, one minute, one kill")
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    if given.worker:
        rank, store, folder, *joins = given.worker
        work(int(rank), store, folder, bool(joins))
        return
    if given.demo:
        demo()
        return
    n, seconds = given.workers, 60 * given.minutes
    schedule = make_schedule(n, seconds, given.faults_per_hour, given.seed)
    with tempfile.TemporaryDirectory() as place:
        runs = {}
        for name, faults in (("without", []), ("with", schedule)):
            folder = Path(place) / name
            found = run(n, seconds, faults, folder)
            lines = read(folder, found)
            runs[name] = figures(n, seconds, found, lines), lines
            print(name, json.dumps(runs[name][0]), flush=True)
            if found["hangs"] or found["errors"]:
                for rank in range(n):
                    log = (folder / f"worker-{rank}.log").read_text(errors="replace")
                    if "Traceback" in log or rank in found["hangs"]:
                        print(f"--- worker {rank}\n{log[-3000:]}", flush=True)
    (calm, calm_lines), (stormy, stormy_lines) = runs["without"], runs["with"]
    content = {"workers": n, "seconds": seconds, "seed": given.seed, "schedule": [asdict(fault) for fault in schedule]}
    given.out.write_text(json.dumps({**content, "without": calm, "with": stormy}, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(table(n, seconds, given.faults_per_hour, calm, stormy))
    plot(n, seconds, calm_lines, stormy_lines, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
