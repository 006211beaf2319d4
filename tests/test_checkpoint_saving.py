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
from torch import Tensor

from decent_dp import gossip
from decent_dp.checkpoint import latest, load, save, saver
from decent_dp.checkpoint.files import Shard, shard_name
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import PeerTimeoutError
from decent_dp.replica.consistency import model_signature
from decent_dp.transport import InProcessTransport, LocalHub, run_replicas
from tests.checkpoint_cases import error_of
from tests.helpers import SGD, alone, broken_store, loss, net, silent_store, values


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
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        loss(model, 0, transport.rank).backward()
        first = save(model, tmp_path, wait=False)
        if transport.rank == 0:
            time.sleep(0.2)
        wrong = both or transport.rank == 1
        second = error_of(lambda: save(model, tmp_path, {"x": object() if wrong else 1}, wait=not wrong))
        found = first.wait(), second
        assert save(model, tmp_path, {"last": True}).error is None
        model.close()
        return found

    loss(alone(net()), 0).backward()  # the first one of a process loads torch's compiler, which takes seconds
    began = time.monotonic()
    found = run_replicas(2, work)
    assert time.monotonic() - began < 45
    assert [path for path, _ in found] == [found[0][0]] * 2
    assert found[0][0] is not None
    assert [kind for _, (kind, _) in found] == ["TypeError", "TypeError"]


class Noisy(torch.optim.SGD):
    """Draws in its step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(0.01 * torch.randn_like(param))


def test_a_pending_update_is_made_before_random_states_are_taken(tmp_path):
    def window(model: Any, t: int) -> None:
        model.set_accumulate_grad(True)
        loss(model, 2 * t).backward()
        loss(model, 2 * t + 1).backward()
        model.set_accumulate_grad(False)

    def end(model: Any) -> dict[str, Tensor]:
        window(model, 2)
        model.state_dict()  # the update that is owed
        return values(model.module)

    model = alone(net(), lambda params: Noisy(params, lr=0.1))
    torch.manual_seed(7)
    window(model, 0)
    window(model, 1)
    save(model, tmp_path)
    whole = end(model)
    model.close()
    resumed = alone(net(), lambda params: Noisy(params, lr=0.1))
    torch.manual_seed(99)
    load(resumed, tmp_path)
    part = end(resumed)
    resumed.close()
    assert all(torch.equal(whole[name], value) for name, value in part.items())


# -- for how long ----------------------------------------------------------------------------------------------------------


def test_close_waits_for_the_own_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "_AT_ERROR", 0.2)
    slow_writing(monkeypatch, 1.0)
    model = alone(net())
    saving = save(model, tmp_path / "slow", wait=False)
    model.close()
    assert saving.error is None
    assert latest(tmp_path / "slow") == saving.path
    hangs = threading.Event()
    monkeypatch.setattr(saver, "write_shard", lambda *_: hangs.wait(50))
    model = alone(net())
    saving, began = save(model, tmp_path / "error", wait=False), time.monotonic()
    saver.saver_of(model.replica).closing(at_error=True)
    assert time.monotonic() - began < 45
    hangs.set()
    assert isinstance(saving.error, PeerTimeoutError)


def test_close_waits_for_others_only_for_a_while(tmp_path):
    def work(transport: InProcessTransport) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        if transport.rank == 1:  # never saves
            transport.control.gather(None)
            return None
        saving, began = save(model, tmp_path, wait=False), time.monotonic()
        transport.timeout = 0.3
        saver.saver_of(model.replica).closing()
        took = time.monotonic() - began
        transport.control.gather(None)
        return took, str(saving.error)

    took, text = run_replicas(2, work)[0]
    assert 0.2 < took < 45
    assert "was not complete 0.3 s after close()" in text


def test_a_disk_that_hangs_does_not_hold_a_close(tmp_path, monkeypatch):
    """Bounded by the timeout; the error says which file."""
    hangs = threading.Event()
    monkeypatch.setattr(saver, "write_shard", lambda *_: hangs.wait(50))
    model = DecentralizedDataParallel(net(), SGD, transport=InProcessTransport(0, LocalHub(1, timeout=0.5)))
    saving, began = save(model, tmp_path, wait=False), time.monotonic()
    model.close()
    assert time.monotonic() - began < 45
    hangs.set()
    assert f"{saving.path} was not complete 0.5 s after close(): this worker's disk hangs" in str(saving.error)


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
    hangs.set()


def test_a_save_in_flight_at_exit_starts_no_threads(tmp_path, monkeypatch):
    """Python 3.12 cannot start any then."""
    slow_writing(monkeypatch, 0.3)
    model = alone(net())
    saving = save(model, tmp_path, wait=False)
    before = set(threading.enumerate())
    assert saving.wait() == saving.path
    assert set(threading.enumerate()) <= before
    model.close()


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
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        transport.control.gather(None)
        store, transport.store = transport.store, in_place(transport.store)
        began = time.monotonic()
        found = [save(model, tmp_path / str(transport.rank), {"at": at}).error for at in range(2)]
        took = time.monotonic() - began
        transport.control.gather(None)
        transport.store = store
        model.close()
        return found, took < 45

    assert run_replicas(2, work) == [([None, None], True)] * 2


def test_one_save_is_in_flight(tmp_path):
    """So a worker whose peers are slow does not fill its disk."""
    most = []

    def work(transport: InProcessTransport) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", mix_every=1000, transport=transport)
        savings = []
        for t in range(6):
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


@pytest.mark.slow
def test_a_second_save_raises_what_the_first_one_did_not_get(tmp_path):
    def work(transport: InProcessTransport) -> Any:
        if transport.rank == 1:  # never saves
            DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
            transport.control.gather(None)
            return None
        transport.timeout = 4.0  # of a save; not of the hub
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        began = time.monotonic()
        save(model, tmp_path, wait=False)
        assert time.monotonic() - began < 3.9
        found = error_of(lambda: save(model, tmp_path, wait=False)), time.monotonic() - began
        transport.control.gather(None)
        return found

    (kind, text), took = run_replicas(2, work)[0]
    assert kind == "PeerTimeoutError"
    assert "worker 1 did not write a shard" in text
    assert 3.8 < took < 45


def test_an_interrupt_while_a_save_waits_is_reported(tmp_path, monkeypatch):
    """The others do not wait for a shard until the timeout."""
    real = saver.Saver._wait_for_earlier

    def interrupted(self: saver.Saver) -> None:
        if self._transport.rank == 1 and self._saves == 1:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(saver.Saver, "_wait_for_earlier", interrupted)

    def work(transport: InProcessTransport) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        if transport.rank == 1:
            with pytest.raises(KeyboardInterrupt):
                save(model, tmp_path)
            found = "", ""
        else:
            found = error_of(lambda: save(model, tmp_path))
        assert save(model, tmp_path).error is None
        model.close()
        return found

    kind, text = run_replicas(2, work)[0]
    assert kind == "RuntimeError"
    assert "worker 1 could not write its shard: KeyboardInterrupt" in text


# -- for whom --------------------------------------------------------------------------------------------------------------


def test_each_wrapper_of_a_process_has_its_own_folder(tmp_path):
    (tmp_path / "saved").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "saved")

    def work(transport: InProcessTransport) -> Any:
        first, second = (DecentralizedDataParallel(net(seed), SGD, topology="ring", transport=transport) for seed in (0, 1))
        # As connect() would give it one of its own.
        second.replica.world = InProcessTransport(transport.rank, transport._hub)
        assert save(first, tmp_path / "saved", {"who": 1}).error is None
        found = [error_of(lambda name=name: save(second, tmp_path / name, {"who": 2})) for name in ("saved", "link")]
        assert save(second, tmp_path / "second", {"who": 2}).error is None
        assert save(first, tmp_path / "link", {"who": 1}).error is None
        first.close()
        second.close()
        return found

    for found in run_replicas(2, work):
        for kind, text in found:
            assert kind == "ValueError"
            assert "two runs in one folder would remove each other's" in text


# -- the disk --------------------------------------------------------------------------------------------------------------


def test_a_path_that_cannot_be_looked_at_does_not_end_the_training(tmp_path, monkeypatch, caplog):
    model = alone(net())
    assert isinstance(save(model, tmp_path / ("x" * 300)).error, OSError)
    real: Callable[..., Any] = os.lstat

    def stale(path: Any) -> Any:
        if "stale" in str(path):
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return real(path)

    (tmp_path / "stale").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", stale)
        failed = save(model, tmp_path / "stale")
    assert "Stale file handle" in str(failed.error)
    assert caplog.text.count("training goes on without it") == 2
    loss(model, 0).backward()
    assert save(model, tmp_path / "stale").error is None
    model.close()


def test_the_checkpoint_that_was_loaded_stays_until_a_newer_one_is_written(tmp_path, monkeypatch):
    """Also if it is not the newest, which may be damaged."""
    model = alone(net())
    older, newest = (save(model, tmp_path, {"at": at}).path for at in range(2))
    with Path(newest / "worker-0000.safetensors").open("r+b") as file:
        file.truncate(100)
    assert load(model, older) == {"at": 0}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_shard", full)
        assert save(model, tmp_path, keep=1).error is not None
    assert load(model, older) == {"at": 0}
    saved = save(model, tmp_path, keep=1).path
    assert [path for path in (older, newest, saved) if path.exists()] == [saved]
    model.close()


def test_what_an_earlier_run_still_writes_stays_until_a_newer_one_is_complete(tmp_path, monkeypatch):
    """It was incomplete at the load, and may be complete by now."""
    model = alone(net())
    path = save(model, tmp_path, {"at": 0}).path
    writes = tmp_path / path.name.replace("-0-0-", "-0-1-").replace("of-1", "of-2")
    writes.mkdir()
    (writes / shard_name(0)).touch()
    load(model, path)
    (writes / shard_name(1)).touch()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saver, "write_shard", full)
        assert save(model, tmp_path).error is not None
    assert writes.exists()
    saved = save(model, tmp_path, keep=1).path
    assert list(tmp_path.glob("step-*")) == [saved]
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


def test_a_shard_that_is_gone_again_is_named(tmp_path, monkeypatch):
    """All have said that theirs is written: the one before stays where it is, and a load says what is missing."""
    real = saver.write_shard

    def loses(folder: Path, record: Any, *args: Any) -> Any:
        file = real(folder, record, *args)
        if record.rank == 2 and losing.is_set():
            file.unlink()
        return file

    losing = threading.Event()
    monkeypatch.setattr(saver, "write_shard", loses)

    def work(transport: InProcessTransport) -> Any:
        rank = transport.rank
        own = tmp_path / f"disk{rank // 2}" if rank < 3 else tmp_path / "disk1"
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        first = save(model, own, {"at": 0}, keep=2)
        transport.control.gather(None)
        losing.set()
        save(model, own, {"at": 1}, keep=2)
        transport.control.gather(None)
        losing.clear()
        found = error_of(lambda: load(model, own)), load(model, first.path)
        assert save(model, own, {"at": 2}, keep=1).error is None
        transport.control.gather(None)
        found = *found, load(model, own)
        model.close()
        return found

    for (kind, text), before, after in run_replicas(4, work):
        assert kind == "CheckpointError"
        assert "worker-0002.safetensors is missing" in text
        assert (before, after) == ({"at": 0}, {"at": 2})


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


def test_a_load_makes_a_pending_update_before_its_collectives(tmp_path):
    """Without overlap the others are in their update, and wait for this worker's."""

    def work(transport: InProcessTransport) -> int:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", overlap=False, transport=transport)
        save(model, tmp_path)
        owes = transport.rank == 1
        if owes:
            model.set_accumulate_grad(True)
        loss(model, 0).backward()
        if owes:
            model.set_accumulate_grad(False)
        load(model, tmp_path)
        rounds = model.stats().rounds
        model.close()
        return rounds

    assert run_replicas(2, work) == [0, 0]


def test_workers_that_have_loaded_from_different_folders_do_not_save_together(tmp_path):
    """Their shards have different names, and no load would find all of them."""
    models = [net() for _ in range(2)]

    def work(transport: InProcessTransport) -> str:
        model = DecentralizedDataParallel(models[transport.rank], SGD, transport=transport)
        save(model, tmp_path / "one")
        load(model, tmp_path / "one")
        with pytest.raises(ValueError, match="the shards of the workers are of different checkpoints") as caught:
            save(model, tmp_path / ("one" if transport.rank == 0 else "two"))
        model.close()
        return str(caught.value)

    texts = run_replicas(2, work)
    assert texts[0] == texts[1]


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
    loss(first, 0).backward()
    with pytest.raises(ValueError, match="the other one has loaded from the folder since"):
        save(first, tmp_path, keep=3)
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


def test_going_back_to_before_an_optimizer_has_made_all_its_state(tmp_path):
    """LBFGS makes some of its state in its second step."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, 0)
        value.backward()
        return value

    run = gossip(model, optimizer, transport=InProcessTransport())
    optimizer.step(closure)
    save(run, tmp_path)
    for _ in range(3):
        optimizer.step(closure)
    load(run, tmp_path)
    run.close()
