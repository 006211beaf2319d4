"""Workers that are killed at any moment of a run that saves all the time: the newest complete checkpoint loads every time."""

from __future__ import annotations

import hashlib
import json
import random
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

KILLS = 100


def digest(model: DecentralizedDataParallel) -> str:
    state = model.optim_state_dict()["state"]
    parts = [values(model.module), {name: own["momentum_buffer"] for name, own in state.items()}]
    return hashlib.sha256(b"".join(v.numpy().tobytes() for part in parts for v in part.values())).hexdigest()


def trains_and_saves(rank: int, n: int, path: str, journal: str) -> None:
    """Goes on from what is there, says what it was, and saves after each update."""
    model = DecentralizedDataParallel(net(rank), SGD, topology="ring", compression="int8")
    extra = load(model, path, missing_ok=True)
    as_saved = extra is None or (extra["digest"], extra["rank"]) == (digest(model), rank)
    note = Path(f"{journal}-{rank}")
    note.with_suffix(".tmp").write_text(json.dumps({"round": model.stats().rounds, "as saved": as_saved}))
    note.with_suffix(".tmp").rename(note)
    for t in range(model.stats().rounds, 1_000_000):
        loss(model, t, rank).backward()
        settle(model.replica)  # as the save does: what is passed to it is of the values that it saves
        save(model, path, {"digest": digest(model), "rank": rank}, keep=2, wait=t % 3 == 0)


class Chain:
    """A run of two workers that is killed and started again, over and over."""

    def __init__(self, workers: Workers, folder: Path) -> None:
        self.folder, self.saved = folder, folder / "saved"
        self.port = workers._store.port
        self.rng = random.Random(1002)
        self.loads = self.newest = 0

    def start(self, number: int) -> list[Any]:
        processes = []
        for rank in range(2):
            ours, theirs = _CONTEXT.Pipe(duplex=False)
            args = (str(self.saved), str(self.folder / f"run{number}"))
            process = _CONTEXT.Process(
                target=_worker, args=(theirs, self.port, f"kills-{number}", rank, 2, 20, trains_and_saves, args), daemon=True
            )
            process.start()
            theirs.close()
            process.pipe = ours  # a worker that ends by itself says how
            processes.append(process)
        return processes

    def notes(self, number: int) -> list[Any]:
        files = [self.folder / f"run{number}-{rank}" for rank in range(2)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def newest_round(self) -> tuple[int, str]:
        """Round and name of the newest complete checkpoint."""
        root, sight = look(self.saved)
        name, _ = choose(root, [sight]) or ("", 0)
        return (int(name.split("-")[1]), name) if name else (0, "")

    def kill_once(self, number: int) -> None:
        processes = self.start(number)
        if self.rng.random() < 0.85:
            until = time.monotonic() + 20
            while len(self.notes(number)) < 2 and time.monotonic() < until:
                wait_for_any([process.sentinel for process in processes], 0.004)
                if any(process.exitcode is not None for process in processes):
                    break
            assert len(self.notes(number)) == 2, f"run {number} did not load"
            if self.rng.random() < 0.5:  # so that runs come on, also on a machine that is busy
                names, until = steps_in(self.saved)[:1], time.monotonic() + 10
                while steps_in(self.saved)[:1] == names and time.monotonic() < until:
                    time.sleep(0.004)
        time.sleep(self.rng.uniform(0.0, 0.3))
        before, _ = self.newest_round()
        for process in [self.rng.choice(processes)] if self.rng.random() < 0.5 else processes:
            process.kill()
        if self.rng.random() < 0.2 and len(self.notes(number)) == 2:  # the other one finds out
            for process in processes:
                process.join(10)
                assert process.exitcode is not None, f"run {number}: a worker still runs without its peer"
        for process in processes:
            process.kill()
            process.join()
        self.check(number, before)

    def check(self, number: int, before: int) -> None:
        for found in self.notes(number):
            self.loads += 1
            assert found == {"round": self.newest, "as saved": True}, f"run {number}"
        self.newest, name = self.newest_round()
        assert self.newest >= before, f"run {number} went back"
        if name:
            for rank in range(2):
                with Shard(self.saved / name / shard_name(rank), rank) as shard:
                    shard.verify()
                    assert shard.record.round == self.newest
            # Leftovers of stopped runs do not pile up; several in a row may be killed before they load and tidy up.
            assert len(list(self.saved.iterdir())) <= 10


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_at_a_hundred_random_moments(workers, tmp_path):
    chain = Chain(workers, tmp_path)
    for number in range(KILLS):
        chain.kill_once(number)
    # The kills were of runs that trained and saved, and what was loaded was of the run before.
    assert chain.newest > 10
    assert chain.loads > KILLS
