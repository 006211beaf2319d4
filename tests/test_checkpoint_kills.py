"""Workers that are killed at any moment of a run that saves all the time: the newest complete checkpoint loads every time."""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import pytest

from decent_dp.checkpoint import load, save
from decent_dp.checkpoint.files import Shard, shard_name
from decent_dp.checkpoint.folder import choose, look, steps_in
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import settle
from tests.helpers import SGD, loss, net, values
from tests.workers import _CONTEXT, Workers, _worker

# Kills of a run of so many workers.
KILLS = {2: 70, 3: 30}
_STARTING = threading.Lock()


def digest(model: DecentralizedDataParallel) -> str:
    state = model.optim_state_dict()["state"]
    parts = [values(model.module), {name: own["momentum_buffer"] for name, own in state.items()}]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for part in parts for v in part.values())).hexdigest()


def trains_and_saves(rank: int, n: int, path: str, journal: str) -> None:
    """Goes on from what is there, says what it was, and saves after each update."""
    model = DecentralizedDataParallel(net(rank), SGD, topology="ring", compression="int8" if n == 2 else None)
    extra = load(model, path, missing_ok=True)
    found = {
        "round": model.stats().rounds,
        "as saved": extra is None or (extra["digest"], extra["rank"]) == (digest(model), rank),
    }
    note = Path(f"{journal}-{rank}")
    note.with_suffix(".tmp").write_text(json.dumps(found))
    note.with_suffix(".tmp").rename(note)
    for t in range(model.stats().rounds, 1_000_000):
        loss(model, t, rank).backward()
        settle(model.replica)  # as the save does: what is passed to it is of the values that it saves
        save(model, path, {"digest": digest(model), "rank": rank}, keep=2, wait=t % 3 == 0)


class Chain:
    """A run that is killed and started again, over and over."""

    def __init__(self, workers: Workers, n: int, folder: Path) -> None:
        self.n, self.folder, self.saved = n, folder, folder / "saved"
        self.port = workers._store.port
        self.rng = random.Random(1000 + n)
        self.problems: list[str] = []
        self.loads = self.lonely = 0
        self.newest = self.behind = self.most = 0

    def start(self, number: int) -> list[Any]:
        key, processes = f"kills-{self.n}-{number}", []
        for rank in range(self.n):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            args = (str(self.saved), str(self.folder / f"run{number}"))
            process = _CONTEXT.Process(
                target=_worker, args=(theirs, self.port, key, rank, self.n, 20, trains_and_saves, args), daemon=True
            )
            with _STARTING:
                process.start()
            theirs.close()
            process.pipe = ours  # a worker that ends by itself says how
            processes.append(process)
        return processes

    def notes(self, number: int) -> list[Any]:
        files = [self.folder / f"run{number}-{rank}" for rank in range(self.n)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def expect(self, fine: bool, *what: Any) -> None:
        if not fine:
            self.problems.append(" ".join(str(part) for part in what))

    def newest_round(self) -> tuple[int, str]:
        """Round and name of the newest complete checkpoint."""
        root, sight = look(self.saved)
        name, _ = choose(root, [sight]) or ("", 0)
        return (int(name.split("-")[1]), name) if name else (0, "")

    def kill_once(self, number: int) -> None:
        processes = self.start(number)
        if self.rng.random() < 0.85:
            until = time.monotonic() + 20
            while len(self.notes(number)) < self.n and time.monotonic() < until:
                wait_for_any([process.sentinel for process in processes], 0.004)
                if any(process.exitcode is not None for process in processes):
                    break
            self.expect(len(self.notes(number)) == self.n, "run", number, "did not load")
            if self.rng.random() < 0.5:  # so that runs come on, also on a machine that is busy
                names, until = steps_in(self.saved)[:1], time.monotonic() + 10
                while steps_in(self.saved)[:1] == names and time.monotonic() < until:
                    time.sleep(0.004)
            time.sleep(self.rng.uniform(0.0, 0.3))
        else:
            time.sleep(self.rng.uniform(0.0, 0.4))
        before, _ = self.newest_round()
        victims = [self.rng.choice(processes)] if self.rng.random() < 0.5 else list(processes)
        for process in victims:
            process.kill()
        if self.rng.random() < 0.2 and len(self.notes(number)) == self.n:  # the others find out
            for process in processes:
                process.join(10)
                self.expect(process.exitcode is not None, "run", number, "a worker still runs without its peer")
            self.lonely += len(victims) < self.n
        else:
            time.sleep(self.rng.uniform(0.0, 0.05))
        for process in processes:
            process.kill()
            process.join()
        self.look(number, before)

    def look(self, number: int, before: int) -> None:
        for found in self.notes(number):
            self.loads += 1
            self.expect(found["as saved"], "run", number, "loaded what was not saved")
            self.expect(found["round"] == self.newest, "run", number, "loaded round", found["round"], "not", self.newest)
        self.newest, name = self.newest_round()
        self.expect(self.newest >= before, "run", number, "went back from round", before, "to", self.newest)
        if name:
            for rank in range(self.n):
                with Shard(self.saved / name / shard_name(rank), rank) as shard:
                    shard.verify()
                    self.expect(shard.record.round == self.newest, "run", number, name, "is of round", shard.record.round)
            hint = self.saved / "latest"
            self.behind = max(self.behind, self.newest - int(hint.read_text().split("-")[1]) if hint.exists() else 0)
        # The two that stay, one that was complete and had not been followed up, and those in flight.
        left = [entry for entry in self.saved.iterdir() if entry.name.startswith("step-")] if name else []
        self.most = max(self.most, len(left))

    def run(self, kills: int) -> None:
        try:
            for number in range(kills):
                self.kill_once(number)
        except Exception as error:
            self.problems.append(f"{type(error).__name__}: {error}")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_a_hundred_random_moments(workers, tmp_path):
    chains = []
    for n in KILLS:
        (tmp_path / f"of{n}").mkdir()
        chains.append(Chain(workers, n, tmp_path / f"of{n}"))
    threads = [threading.Thread(target=chain.run, args=(KILLS[chain.n],), daemon=True) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for chain in chains:
        assert chain.problems == [], chain.n
        # The kills were of runs that trained and saved, and what was loaded was of the run before.
        assert chain.newest > 10, (chain.n, chain.newest)
        assert chain.loads > KILLS[chain.n], (chain.n, chain.loads)
        assert chain.lonely > 0
        # Leftovers of stopped runs do not pile up (several in a row may be killed before they load and tidy up), and the hint
        # is no further behind than the saves in flight.
        assert chain.most <= 9, chain.most
        assert chain.behind <= 3, chain.behind
        names = {entry.name for entry in chain.saved.iterdir()}
        assert len(names) <= 10, names
