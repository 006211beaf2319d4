"""Effects of a save beside its files: order, waits, and errors."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from decent_dp.checkpoint import latest, load, save, saver
from decent_dp.checkpoint.files import Shard, shard_name
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import PeerTimeoutError
from decent_dp.replica.consistency import model_signature
from decent_dp.transport import InProcessTransport, LocalHub, run_replicas
from tests.checkpoint_cases import error_of, on
from tests.helpers import SGD, alone, broken_store, loss, net, silent_store


def slow_writing(monkeypatch: pytest.MonkeyPatch, seconds: float, rank: int = 0) -> None:
    real = saver.write_shard

    def slow(folder: Path, record: Any, *args: Any) -> Any:
        if record.rank == rank:
            time.sleep(seconds)
        return real(folder, record, *args)

    monkeypatch.setattr(saver, "write_shard", slow)


# -- in order --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("both", [False, True])
def test_a_save_that_is_refused_does_not_overtake_those_before_it(tmp_path, monkeypatch, both):
    """It is reported after them, so no worker waits for a shard that comes later."""
    slow_writing(monkeypatch, 0.4, rank=1)

    def work(transport: InProcessTransport) -> Any:
        model = on(transport, steps=1)
        first = save(model, tmp_path, wait=False)
        if transport.rank == 0:
            time.sleep(0.2)
        wrong = both or transport.rank == 1
        second = error_of(lambda: save(model, tmp_path, {"x": object() if wrong else 1}, wait=not wrong))
        found = first.wait(), *second
        assert save(model, tmp_path, {"last": True}).error is None
        model.close()
        return found

    (path, *first), (other, *second) = run_replicas(2, work)
    assert path == other is not None
    assert first[0] == second[0] == "TypeError"
    assert "object" in first[1]
    assert ("worker 1" in first[1]) is not both


# -- for how long ----------------------------------------------------------------------------------------------------------


def test_close_waits_for_the_own_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "_AT_ERROR", 0.2)
    slow_writing(monkeypatch, 1.0)
    model = alone(net())
    before = set(threading.enumerate())
    saving = save(model, tmp_path / "slow", wait=False)
    assert len(set(threading.enumerate()) - before) == 1  # at exit, Python 3.12 cannot start any
    model.close()
    assert saving.error is None
    assert latest(tmp_path / "slow") == saving.path


@pytest.mark.parametrize("at_error", [False, True])
def test_what_hangs_does_not_hold_a_close(tmp_path, monkeypatch, at_error):
    """Bounded by the timeout, after an error by less; the error says which file."""
    monkeypatch.setattr(saver, "_AT_ERROR", 0.2)
    hangs = threading.Event()
    monkeypatch.setattr(saver, "write_shard", lambda *_: hangs.wait(50))
    timeout = 90.0 if at_error else 0.5
    model = DecentralizedDataParallel(net(), SGD, transport=InProcessTransport(0, LocalHub(1, timeout=timeout)))
    saving, began = save(model, tmp_path, wait=False), time.monotonic()
    saver.saver_of(model.replica).closing(at_error)
    assert time.monotonic() - began < 45
    hangs.set()
    assert isinstance(saving.error, PeerTimeoutError)
    assert f"{saving.path} was not complete {0.2 if at_error else 0.5} s after close(): this worker's disk" in str(saving.error)
    model.close()


def test_workers_that_do_not_save_do_not_hold_a_close(tmp_path, monkeypatch):
    """Less than the timeout, which is half an hour by default: one worker alone has called save(), and the others live on."""
    monkeypatch.setattr(saver, "_AT_EXIT", 0.2)
    closed = threading.Event()

    def work(transport: InProcessTransport) -> None:
        model = DecentralizedDataParallel(net(), SGD, transport=transport)
        if transport.rank == 0:
            saving, began = save(model, tmp_path, wait=False), time.monotonic()
            saver.saver_of(model.replica).closing()
            closed.set()
            assert time.monotonic() - began < 8
            assert "was not complete 0.2 s after close(): this worker's disk hangs, or is slow, or not all" in str(saving.error)
        assert closed.wait(45)
        model.close()

    run_replicas(2, work, timeout=10.0)


def test_a_close_that_comes_while_old_checkpoints_are_removed_blames_no_file(tmp_path, monkeypatch, caplog):
    hangs = threading.Event()
    monkeypatch.setattr(saver.folder, "prune", lambda *_: hangs.wait(50))
    model = DecentralizedDataParallel(net(), SGD, transport=InProcessTransport(0, LocalHub(1, timeout=0.5)))
    saving, began = save(model, tmp_path, wait=False), time.monotonic()
    model.close()
    assert time.monotonic() - began < 45
    hangs.set()
    assert saving.wait() == latest(tmp_path) == saving.path
    assert caplog.text == ""


@pytest.mark.parametrize(("error", "interactive", "hurry"), [(False, False, False), (True, False, True), (True, True, False)])
def test_an_exit_after_an_error_waits_briefly(monkeypatch, error, interactive, hurry):
    """An interactive session has seen an error and goes on."""
    for name, there in (("last_value", error), ("ps1", interactive)):
        if there:
            monkeypatch.setattr(sys, name, KeyError(name), raising=False)
        else:
            monkeypatch.delattr(sys, name, raising=False)
    asked: list[bool] = []
    leaving: Any = SimpleNamespace(closing=lambda at_error: asked.append(at_error))
    saver._close_at_exit(leaving)
    assert asked == [hurry]


@pytest.mark.parametrize("in_place", [silent_store, broken_store])
def test_saves_need_no_store(tmp_path, in_place):
    def work(transport: InProcessTransport) -> Any:
        model = on(transport)
        transport.control.gather(None)
        store, transport.store = transport.store, in_place(transport.store)
        found = [save(model, tmp_path / str(transport.rank), {"at": at}).error for at in range(2)]
        transport.control.gather(None)
        transport.store = store
        model.close()
        return found

    assert run_replicas(2, work) == [[None, None]] * 2


def test_one_save_is_in_flight(tmp_path):
    """So a worker whose peers are slow does not fill its disk."""
    most = []

    def work(transport: InProcessTransport) -> Any:
        model, savings = on(transport, mix_every=1000), []
        for t in range(4):
            loss(model, t, transport.rank).backward()
            if transport.rank == 1:
                time.sleep(0.2)
            savings.append(save(model, tmp_path, wait=False))
            if transport.rank == 0:
                most.append(sum(not saving.done for saving in savings))
        found = [saving.wait() for saving in savings] == [saving.path for saving in savings]
        model.close()
        return found

    assert run_replicas(2, work) == [True, True]
    assert max(most) == 1


def test_an_interrupt_while_a_save_waits_is_reported(tmp_path, monkeypatch):
    """The others do not wait for a shard until the timeout."""
    real = saver.Saver._wait_for_earlier

    def interrupted(self: saver.Saver) -> None:
        if self._transport.rank == 1 and self._saves == 1:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(saver.Saver, "_wait_for_earlier", interrupted)

    def work(transport: InProcessTransport) -> Any:
        model, found = on(transport), ("", "")
        if transport.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                save(model, tmp_path)
        else:
            found = error_of(lambda: save(model, tmp_path))
        assert save(model, tmp_path).error is None
        model.close()
        return found

    kind, text = run_replicas(2, work)[0]
    assert kind == "RuntimeError"
    assert "worker 1 could not write its shard: KeyboardInterrupt" in text


# -- the disk --------------------------------------------------------------------------------------------------------------


def full(*args: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(args[-1]))


def test_a_full_disk_of_one_worker_does_not_stop_the_training(tmp_path, monkeypatch, caplog):
    """Also where each has its own, and only one checkpoint is to be kept."""
    real, is_full = saver.write_shard, threading.Event()

    def write(folder: Path, record: Any, *args: Any) -> Any:
        return full(folder) if record.rank == 1 and is_full.is_set() else real(folder, record, *args)

    monkeypatch.setattr(saver, "write_shard", write)

    def work(transport: InProcessTransport) -> Any:
        own = tmp_path / str(transport.rank)
        model = on(transport, steps=1)
        save(model, own, {"at": 1}, keep=1)
        loss(model, 1, transport.rank).backward()
        transport.control.gather(None)
        is_full.set()
        failed = save(model, own, {"at": 2}, keep=1)
        found = failed.wait(), failed.done, str(failed.error), repr(failed), load(model, own)
        transport.control.gather(None)
        is_full.clear()
        loss(model, 2, transport.rank).backward()
        later = save(model, own, {"at": 3}, keep=1)
        transport.control.gather(None)
        assert sorted(p.name for p in own.iterdir()) == sorted(["latest", "run", later.path.name])
        model.close()
        return *found, later.error

    for rank, (path, done, text, shown, before, later) in enumerate(run_replicas(2, work)):
        assert (path, done, before, later) == (None, True, {"at": 1}, None)
        assert "No space left" in text
        assert ("worker 1" in text) == (rank == 0)
        assert "failed" in shown
    assert caplog.text.count("training goes on without it") == 2


def test_a_path_that_cannot_be_used_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    model = alone(net())
    (tmp_path / "file").write_text("")
    (tmp_path / "stale").mkdir()
    for path in (tmp_path / ("x" * 300), tmp_path / "file" / "below"):
        saving = save(model, path)
        assert isinstance(saving.error, OSError)
        assert saving.wait() is None
    real: Callable[..., Any] = os.lstat

    def stale(path: Any) -> Any:
        if "stale" in str(path):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", stale)
        failed = save(model, tmp_path / "stale")
    assert "Stale file handle" in str(failed.error)
    assert caplog.text.count("training goes on without it") == 3
    loss(model, 0).backward()
    assert save(model, tmp_path / "stale").error is None
    model.close()


def test_the_checkpoint_that_was_loaded_stays_until_a_newer_one_is_written(tmp_path, monkeypatch):
    """Also if it is not the newest, which may be damaged; and so does what an earlier run still writes."""
    model = alone(net())
    older, newest = (save(model, tmp_path, {"at": at}).path for at in range(2))
    with Path(newest / shard_name(0)).open("r+b") as file:
        file.truncate(100)
    writes = tmp_path / older.name.replace("-0-0-", "-0-2-").replace("of-1", "of-2")
    writes.mkdir()
    (writes / shard_name(0)).touch()
    assert load(model, older) == {"at": 0}
    (writes / shard_name(1)).touch()
    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_shard", full)
        assert save(model, tmp_path, keep=1).error is not None
    assert writes.exists()
    assert load(model, older) == {"at": 0}
    saved = save(model, tmp_path, keep=1).path
    assert list(tmp_path.glob("step-*")) == [saved]
    model.close()


def test_a_checkpoint_that_was_complete_stays_as_its_disk_may_come_back(tmp_path):
    model = alone(net())
    older, lost = (save(model, tmp_path).path for _ in range(2))
    (lost / shard_name(0)).unlink()
    load(model, older)
    save(model, tmp_path, keep=1)
    assert (lost.is_dir(), older.is_dir()) == (True, False)
    model.close()


@pytest.mark.parametrize("what", ["run", "latest"])
def test_a_disk_that_is_full_for_small_files(tmp_path, monkeypatch, caplog, what):
    """Without the file of the run there is no checkpoint; without `latest` there is one."""
    real: Callable[..., Any] = os.replace

    def full(source: Any, target: Any) -> None:
        if Path(target).name == what:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        real(source, target)

    model = alone(net())
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        first = save(model, tmp_path, {"at": 0})
    assert "No space left" in (str(first.error) if what == "run" else caplog.text)
    assert (first.error is None) == (what == "latest")
    assert latest(tmp_path) == (first.path if what == "latest" else None)
    assert not list(tmp_path.glob("*.tmp"))
    newest = save(model, tmp_path, {"at": 1}, keep=1)
    assert load(model, tmp_path) == {"at": 1}
    assert list(tmp_path.glob("step-*")) == [newest.path]
    model.close()


# -- the model -------------------------------------------------------------------------------------------------------------


def test_the_record_names_the_model_of_the_moment(tmp_path):
    model = alone(net())
    model.module.register_buffer("seen", torch.zeros(2))

    def saved() -> Any:
        with Shard(save(model, tmp_path).path / "worker-0000.safetensors", 0) as shard:
            return shard.record.model

    assert saved() == model_signature(model.module)
    model.module.seen = torch.zeros(3)
    assert saved() == model_signature(model.module)
    model.module.seen = torch.zeros(3, dtype=torch.int64)
    assert saved() == model_signature(model.module)
    model.close()


def test_checkpoints_that_appear_after_the_load_are_not_removed(tmp_path):
    """A second start of the same script loads, and takes the folder over; the first one, which still saves, loses nothing."""
    first = alone(net())
    save(first, tmp_path, keep=3)
    second = alone(net())
    load(second, tmp_path)
    loss(first, 0).backward()
    later = save(first, tmp_path, keep=3)
    loss(second, 0).backward()
    save(second, tmp_path, keep=1)
    assert later.path.is_dir()
    first.close()
    second.close()


@pytest.mark.parametrize("number", [np.float32(0.05), np.array(0.05), np.int64(1)])
def test_a_rate_of_numpy_is_a_number(tmp_path, number):
    model = alone(net())
    loss(model, 0).backward()
    model.optimizers[0].param_groups[0]["lr"] = number
    save(model, tmp_path)
    load(model, tmp_path)
    assert model.get_lr() == pytest.approx(float(number))
    model.close()
