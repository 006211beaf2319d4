"""Kills workers, a thousand times in one run: ``python -m benchmarks.kills``, or ``make kills``.

Eight processes of this machine train small replicas with ``faults=Tolerate()``, base-2, and steps of 10 ms. At random times,
one per second on average, one of them gets SIGKILL, whatever it does: a step, an exchange, a call of all workers, its own
start. A new process takes its place half a second later. All average every 20 rounds. What is checked:

- no hang: each worker makes steps, or becomes a member, within 30 seconds;
- no error: no worker ends that was not killed;
- the mean of each ``averaged()``, during the kills too: each worker writes its parameters before the call, and the mean must be
  that of the workers that took part, which NumPy computes in float64 from what they have written;
- the mean of the run: after every 25 kills all replicas get a known, different addition, and mix without gradients. Their mean
  must move by the mean of the additions, and all replicas must be equal to it: nothing is lost, counted twice, or left out.

Writes ``benchmarks/results/kills.json`` and ``kills.md``. Exit code 1 if something was wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import decent_dp
from decent_dp.launch.local import store_on

N, LEAST, PACE = 8, 4, 0.01
# Kills between two checks of the mean, seconds between two kills on average, and from a kill to the next process.
PHASE, BETWEEN, RESTART = 25, 1.0, 0.5
# Steps between two calls; parameters; seconds without a sign of life that count as a hang.
CALLS, SHAPE, PATIENCE = 20, (4, 4), 30.0
# The largest error of a mean relative to the largest parameter: a few roundings of float32.
EXACT = 1e-5
# Errors after which the run ends.
MOST_ERRORS = 20
RESULT = Path(__file__).parent / "results" / "kills.json"
# What workers do: train, rest (no gradients), and rest with the addition.
TRAIN, REST, ADD = range(3)
# Of a worker on the board: its process, how many steps it has made, the members that it knows (0 before it is one), and the
# order that its last call was made under.
PID, STEPS, MEMBERS, ORDER = range(4)


class Board:
    """Numbers that all processes share: ``order``, which counts up (TRAIN, REST, ADD, TRAIN, …), and a row for each worker."""

    def __init__(self, folder: str) -> None:
        mode: Any = "r+" if os.path.exists(f"{folder}/board") else "w+"
        self._values = np.memmap(f"{folder}/board", np.int64, mode, shape=(N + 1, 4))
        self.rows = self._values[:N]

    @property
    def order(self) -> int:
        return int(self._values[N, 0])

    @order.setter
    def order(self, value: int) -> None:
        self._values[N, 0] = value


# -- a worker --------------------------------------------------------------------------------------------------------------


def addition(rank: int, order: int) -> np.ndarray:
    """What a worker's parameters get in the check that this order begins."""
    return np.random.default_rng((rank, order)).standard_normal(2 * SHAPE[0] * SHAPE[1]).astype(np.float32)


def work(rank: int, folder: str, port: int, joins: bool, dead_after: float, driver: int) -> None:
    began = time.monotonic()
    log = open(f"{folder}/worker-{rank}.log", "a", buffering=1)  # noqa: SIM115
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR1, log)
    logging.basicConfig(format=f"%(asctime)s {os.getpid()} %(message)s", level=logging.INFO, stream=log)
    torch.set_num_threads(1)
    board = Board(folder)
    own = board.rows[rank]
    own[:] = os.getpid(), 0, 0, -1
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": N, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in environment.items()}, TORCHELASTIC_USE_AGENT_STORE="True")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*SHAPE, bias=False), nn.Linear(*SHAPE, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    transport = decent_dp.join(f"127.0.0.1:{port}", rank=rank) if joins else None
    if not joins:
        decent_dp.initialize_dist()
    faults = decent_dp.Tolerate(dead_after=dead_after, min_workers=1)
    replica = decent_dp.gossip(model, optimizer, topology="base-2", faults=faults, transport=transport, bucket_size_in_mb=0)
    target = np.random.default_rng(rank).standard_normal(addition(0, 0).size).astype(np.float32)
    random_ = np.random.default_rng(os.getpid())
    added, longest = -1, 0.0

    def read() -> np.ndarray:
        return np.concatenate([param.detach().numpy().ravel() for param in model.parameters()])

    with open(f"{folder}/calls-{rank}.jsonl", "a", buffering=1) as file:

        def note(**line: Any) -> None:
            print(json.dumps({"rank": rank, "pid": os.getpid(), **line}), file=file)

        average = replica.mean.average_

        def note_and_average(*args: Any, **options: Any) -> Any:
            note(call=replica.world.control.calls, own=read().tolist())
            return average(*args, **options)

        replica.mean.average_ = note_and_average  # type: ignore[method-assign]
        while Path(f"/proc/{driver}").exists():  # else nobody ends this process
            time.sleep(PACE)
            order = board.order
            gradient = np.zeros_like(target)
            if order % 3 == TRAIN:
                gradient = 0.05 * (read() - target) + 0.05 * random_.standard_normal(target.size).astype(np.float32)
            elif order % 3 == ADD and added != order:
                gradient, added = -addition(rank, order), order
            for param, part in zip(model.parameters(), np.split(gradient, 2), strict=True):
                param.grad = torch.from_numpy(part.reshape(SHAPE))
            before = time.monotonic()
            optimizer.step()
            if own[MEMBERS]:
                longest = max(longest, time.monotonic() - before)
            own[STEPS] += 1
            if own[MEMBERS] == 0 and replica.roster.seat >= 0 and joins:
                note(joined=time.monotonic() - began)
            own[MEMBERS] = len(replica.roster.members) if replica.roster.seat >= 0 else 0
            if replica.due(CALLS):
                with replica.averaged():
                    control = replica.world.control  # a process that joins gets another one with its first step
                    said = {"ranks": list(control.ranks), "mean": read().tolist(), "order": order, "longest": longest}
                    note(call=control.calls, **said)
                own[ORDER] = order


# -- all of them -----------------------------------------------------------------------------------------------------------


class Storm:
    """The processes of the run, and what happens to them.

    Attributes:
        kills: how many there were; of those, how many of processes that were no members yet.
        errors: workers that ended though nobody killed them.
        hangs: workers that made no steps for ``PATIENCE`` seconds; they are killed then.
    """

    def __init__(self, folder: str, seed: int, dead_after: float = 10.0) -> None:
        self._folder, self._dead_after = folder, dead_after
        self._context = multiprocessing.get_context("forkserver")
        self._store = store_on()
        self._random = random.Random(seed)
        self.board = Board(folder)
        self.board.rows[:] = 0
        self.board.order = TRAIN
        self.kills = self.kills_of_newcomers = 0
        self.errors: list[str] = []
        self.hangs: list[str] = []
        self._restarts: dict[int, float] = {}
        # The last progress of each worker: its steps, and when.
        self._progress = {rank: (-1, time.monotonic()) for rank in range(N)}
        self._workers = {rank: self._start(rank, joins=False) for rank in range(N)}

    def _start(self, rank: int, joins: bool) -> Any:
        self.board.rows[rank] = 0
        arguments = (rank, self._folder, self._store.port, joins, self._dead_after, os.getpid())
        process = self._context.Process(target=work, args=arguments, daemon=True)
        process.start()
        self._progress[rank] = -1, time.monotonic()
        return process

    def look_after(self) -> None:
        """Starts new processes, and notes errors and hangs."""
        now = time.monotonic()
        for rank, worker in self._workers.items():
            if worker.exitcode is not None:
                if rank not in self._restarts:
                    self.errors.append(f"worker {rank}, process {worker.pid}, ended with {worker.exitcode}")
                    self._restarts[rank] = now
                    if len(self.errors) > MOST_ERRORS:
                        raise RuntimeError("too many errors")
                if now >= self._restarts[rank]:
                    del self._restarts[rank]
                    self._workers[rank] = self._start(rank, joins=True)
                continue
            steps = int(self.board.rows[rank][STEPS])
            if steps != self._progress[rank][0]:
                self._progress[rank] = steps, now
            elif now > self._progress[rank][1] + PATIENCE:
                self.hangs.append(f"worker {rank}, process {worker.pid}, after {steps} steps")
                for other in self._workers.values():
                    if other.is_alive():
                        os.kill(other.pid, signal.SIGUSR1)
                time.sleep(0.5)
                worker.kill()
                worker.join()
                self._restarts[rank] = now

    def kill(self) -> bool:
        """Kills one, unless few would be left."""
        living = [rank for rank, worker in self._workers.items() if worker.exitcode is None]
        members = [rank for rank in living if self.board.rows[rank][MEMBERS] > 0]
        who = self._random.choice(living)
        is_member = who in members
        if len(members) - is_member < LEAST:
            return False
        self._workers[who].kill()
        self._restarts[who] = time.monotonic() + RESTART
        self.kills += 1
        self.kills_of_newcomers += not is_member
        return True

    def rage(self, kills: int) -> None:
        """Kills so many at random times."""
        until = self.kills + kills
        due = time.monotonic()
        while self.kills < until:
            if time.monotonic() >= due and self.kill():
                due = time.monotonic() + self._random.expovariate(1 / BETWEEN)
            self.look_after()
            time.sleep(0.01)

    def wait(self, done: Any) -> None:
        """Until ``done(rows)``."""
        begun = time.monotonic()
        while not done(self.board.rows):
            if time.monotonic() > begun + 4 * PATIENCE:
                raise RuntimeError(f"the workers do not come together: {self.board.rows.tolist()}")
            self.look_after()
            time.sleep(0.01)

    def check(self) -> None:
        """Has all workers rest, and make the check of the mean."""
        self.wait(lambda rows: (rows[:, MEMBERS] == N).all())
        for _ in (REST, ADD, TRAIN):
            self.board.order += 1
            self.wait(lambda rows: (rows[:, ORDER] == self.board.order).all())
            if self.board.order % 3 == ADD:  # two calls more, between which all mix in every round of base-2
                steps = self.board.rows[:, STEPS].copy()
                self.wait(lambda rows, steps=steps: (rows[:, STEPS] >= steps + 3 * CALLS).all())

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        for worker in self._workers.values():
            worker.join()


# -- what they have written ------------------------------------------------------------------------------------------------


def read_lines(folder: str) -> list[dict[str, Any]]:
    lines = []
    for file in Path(folder).glob("calls-*.jsonl"):
        for text in file.read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that a killed worker has not ended
                lines.append(json.loads(text))
    return lines


def check_calls(lines: list[dict[str, Any]]) -> tuple[int, int, list[str], float]:
    """The calls, the results of single workers, the wrong ones among them, and the largest error of the others."""
    own: dict[tuple[int, int], list[float]] = {(line["call"], line["rank"]): line["own"] for line in lines if "own" in line}
    wrong, largest, results = [], 0.0, [line for line in lines if "mean" in line]
    by_call = collections.defaultdict(set)
    for line in results:
        call, ranks = line["call"], line["ranks"]
        by_call[call].add(json.dumps(line["mean"]))
        values = np.array([own[call, rank] for rank in ranks if (call, rank) in own], np.float64)
        error = float(np.abs(values.mean(0) - line["mean"]).max() / np.abs(values).max())
        if not error <= EXACT or len(values) < len(ranks):
            wrong.append(f"call {call}, worker {line['rank']}: an error of {error:g}")
        else:
            largest = max(largest, error)
    wrong += [f"call {call}: {len(means)} different means" for call, means in by_call.items() if len(means) > 1]
    return len(by_call), len(results), wrong, largest


def check_runs(lines: list[dict[str, Any]]) -> tuple[int, list[str], float]:
    """The checks of the run's mean, what was wrong in them, and the largest error of the others."""
    calls: dict[int, dict[int, dict[int, Any]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    own = {(line["call"], line["rank"], line["pid"]): line["own"] for line in lines if "own" in line}
    for line in lines:
        if "mean" in line and line["order"] % 3 != TRAIN:
            calls[line["order"]][line["call"]][line["rank"]] = (line["mean"], own[line["call"], line["rank"], line["pid"]])
    wrong, largest, orders = [], 0.0, [order for order in calls if order % 3 == ADD]
    for order in orders:
        ends = [[found for _, found in sorted(calls[one].items()) if len(found) == N][-1:] for one in (order - 1, order)]
        if not all(ends):
            wrong.append(f"check {order // 3}: not all workers have come to it")
            continue
        (before,), (after,) = ends
        expected = np.array(before[0][0], np.float64) + np.mean([addition(rank, order) for rank in range(N)], 0, np.float64)
        for rank, (mean, replica) in after.items():
            for what, values in (("the mean", mean), ("the replica", replica)):
                error = float(np.abs(np.array(values) - expected).max() / np.abs(expected).max())
                if error > EXACT:
                    wrong.append(f"check {order // 3}: {what} of worker {rank} has an error of {error:g}")
                else:
                    largest = max(largest, error)
    return len(orders), wrong, largest


def run(kills: int, seed: int, folder: str, dead_after: float = 10.0) -> dict[str, Any]:
    storm, began, broken = Storm(folder, seed, dead_after), time.monotonic(), ""
    try:
        storm.wait(lambda rows: (rows[:, STEPS] > 0).all())
        while storm.kills < kills:
            storm.rage(min(PHASE, kills - storm.kills))
            storm.check()
            print(f"{storm.kills} kills, {len(storm.errors)} errors, {len(storm.hangs)} hangs", flush=True)
    except RuntimeError as error:
        broken = str(error)
    finally:
        storm.close()
    lines = read_lines(folder)
    calls, results, wrong_calls, error_of_calls = check_calls(lines)
    checks, wrong_runs, error_of_runs = check_runs(lines)
    joined = [line["joined"] for line in lines if "joined" in line]
    return {
        "kills": storm.kills,
        "of_processes_that_were_joining": storm.kills_of_newcomers,
        "minutes": (time.monotonic() - began) / 60,
        "hangs": [*storm.hangs, *filter(None, [broken])],
        "errors": storm.errors,
        "calls": calls,
        "results_of_calls": results,
        "wrong_results_of_calls": wrong_calls,
        "checks": checks,
        "wrong_checks": wrong_runs,
        "largest_error": max(error_of_calls, error_of_runs),
        "longest_step_s": max((line["longest"] for line in lines if "longest" in line), default=None),
        "joined": len(joined),
        "joined_after_s": statistics.median(joined) if joined else None,
    }


def table(found: dict[str, Any]) -> str:
    rows = {
        "kills": f"{found['kills']} in {found['minutes']:.0f} minutes, {found['of_processes_that_were_joining']} of them of "
        "processes that were joining",
        "workers that hang": len(found["hangs"]),
        "workers that end with an error": len(found["errors"]),
        "new processes that became members": f"{found['joined']}, after {found['joined_after_s'] or 0:.1f} s (median)",
        "longest step of a member": f"{found['longest_step_s'] or 0:.1f} s",
        "wrong means of `averaged()`": f"{len(found['wrong_results_of_calls'])} of {found['calls']} calls",
        "wrong means of the run": f"{len(found['wrong_checks'])} of {found['checks']} checks",
        "largest error of a mean": f"{found['largest_error']:.1e}, relative to the largest parameter",
    }
    return "\n".join(["| what | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="for the workers' logs; by default a temporary one")
    parser.add_argument("--out", type=Path, default=RESULT)
    given = parser.parse_args()
    with contextlib.ExitStack() as ending:
        folder = given.folder or ending.enter_context(tempfile.TemporaryDirectory())
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = run(given.kills, given.seed, folder)
    given.out.write_text(json.dumps(found, indent=1) + "\n")
    given.out.with_suffix(".md").write_text(table(found))
    print(table(found))
    bad = [*found["hangs"], *found["errors"], *found["wrong_results_of_calls"], *found["wrong_checks"]]
    print("\n".join(bad[:20]))
    return int(bool(bad))


if __name__ == "__main__":
    # Here alone: a process has one fork server, and that of the tests has its own list.
    multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "decent_dp._gossip"])
    sys.exit(main())
