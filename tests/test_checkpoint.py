"""save and load through files: what goes on equals what was not interrupted, and when and how a save is complete."""

from __future__ import annotations

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from decent_dp.checkpoint import Saving, latest, load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import settle
from decent_dp.transport import InProcessTransport, Transport, run_replicas
from tests.checkpoint_cases import AT, KINDS, STEPS, error_of, make, on, run, seed_all, state
from tests.helpers import DRIVERS, SGD, Driven, alone, assert_same, loss, net, values, wait_for

# -- going on exactly ------------------------------------------------------------------------------------------------------


def uninterrupted(rank: int, n: int, path: str) -> dict[str, Any]:
    """Runs that save on the way, some with each way to wait for it, and continue."""
    found = {}
    for kind in KINDS:
        model = make(kind)
        seed_all(rank)
        run(model, kind, rank, 0, AT)
        extra = {"position": [AT, rank], "weights": torch.full((2,), float(rank))}
        saving = save(model, f"{path}/{kind}", extra, wait=len(kind) % 2 == 0)
        run(model, kind, rank, AT, STEPS)
        assert saving.wait() == saving.path
        found[kind] = state(model)
        model.close()
    return found


def interrupted(rank: int, n: int, path: str) -> dict[str, Any]:
    found = {}
    for kind in KINDS:
        model = make(kind, seed=77)
        seed_all(999)
        extra = load(model, f"{path}/{kind}")
        assert extra is not None
        assert extra["position"] == [AT, rank]
        assert torch.equal(extra["weights"], torch.full((2,), float(rank)))
        run(model, kind, rank, AT, STEPS)
        found[kind] = state(model)
        model.close()
    return found


def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(workers, tmp_path):
    """In processes, with random numbers. All kinds of state are tested without files."""
    whole = workers(2, uninterrupted, str(tmp_path))
    parts = workers(2, interrupted, str(tmp_path))
    for rank in range(2):
        for kind in KINDS:
            differing = [k for k in whole[rank][kind] if whole[rank][kind][k] != parts[rank][kind].get(k)]
            assert parts[rank][kind] == whole[rank][kind], (rank, kind, differing)


class Noisy(torch.optim.SGD):
    """Draws in its step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(0.01 * torch.randn_like(param))


@DRIVERS
@pytest.mark.parametrize("frozen", [True, False])
def test_a_layer_that_is_frozen_for_a_while(driver, frozen, tmp_path):
    """The script learns from the checkpoint whether the layer is frozen at present."""
    one, other = Driven(driver, net()), Driven(driver, net(7))
    one.model[0].requires_grad_(False)
    one.step(0)
    one.model[0].requires_grad_(not frozen)
    one.step(1)
    save(one.user, tmp_path, {"frozen": frozen})
    found = load(other.user, tmp_path)
    assert found is not None
    other.model[0].requires_grad_(not found["frozen"])
    assert_same(one.steps(2, 3).model, other.steps(2, 3).model)
    for driven in (one, other):
        driven.user.close()


def test_a_pending_update_is_made_before_random_states_are_taken(tmp_path):
    def window(model: Any, t: int) -> None:
        model.set_accumulate_grad(True)
        loss(model, t).backward()
        model.set_accumulate_grad(False)

    def end(model: Any) -> dict[str, Tensor]:
        window(model, 2)
        model.state_dict()  # the update that is pending
        found = values(model.module)
        model.close()
        return found

    torch.manual_seed(7)
    model = alone(net(), partial(Noisy, lr=0.1))
    window(model, 0)
    window(model, 1)
    save(model, tmp_path)
    whole = end(model)
    resumed = alone(net(), partial(Noisy, lr=0.1))
    torch.manual_seed(99)
    load(resumed, tmp_path)
    assert all(torch.equal(whole[name], value) for name, value in end(resumed).items())


def test_a_load_makes_a_pending_update_before_its_collectives(tmp_path):
    """Without overlap the others are in their update, and wait for this worker's."""

    def work(transport: InProcessTransport) -> int:
        model = on(transport, overlap=False)
        save(model, tmp_path)
        model.set_accumulate_grad(transport.rank == 1)
        loss(model, 0).backward()
        model.set_accumulate_grad(False)
        load(model, tmp_path)
        rounds = model.stats().rounds
        model.close()
        return rounds

    assert run_replicas(2, work) == [0, 0]


# -- what save does --------------------------------------------------------------------------------------------------------


def test_the_last_k_are_kept_and_nothing_else(tmp_path):
    model = alone(net())
    for t in range(5):
        loss(model, t).backward()
        saving = save(model, str(tmp_path), keep=2)
        assert isinstance(saving, Saving)
        assert (saving.done, saving.error) == (True, None)
        assert latest(tmp_path) == saving.path == saving.wait()
        assert f"-0000000{t + 1}-" in str(saving.path)
    names = sorted(os.listdir(tmp_path))
    assert [name[:13] for name in names] == ["latest", "run", "step-00000004", "step-00000005"]
    assert (tmp_path / "latest").read_text() == f"{names[-1]}\n"
    assert os.listdir(tmp_path / names[-1]) == ["worker-0000.safetensors"]
    model.close()


def test_incomplete_checkpoints_of_a_stopped_run_are_removed(tmp_path):
    left, copied, users = (
        tmp_path / name for name in ("step-00000009-0-4-abcdef-of-2", "best", "step-00000002-0-1-abcdef-of-2")
    )
    for folder, file in ((left, "worker-0001.safetensors.tmp"), (copied, "worker-0000.safetensors"), (users, "notes")):
        folder.mkdir()
        (folder / file).write_text("x")
    model = alone(net())
    assert load(model, tmp_path, missing_ok=True) is None
    newest = save(model, tmp_path).path
    assert sorted(os.listdir(tmp_path)) == sorted(["best", "latest", "run", newest.name, users.name])
    model.close()


def test_a_second_run_in_a_folder_is_refused_by_name(tmp_path):
    """Two wrappers of a process are two runs, too."""
    saved, link = tmp_path / "saved", tmp_path / "link"
    first, second, third = (alone(net(seed)) for seed in range(3))
    save(first, saved)
    link.symlink_to(saved)
    for path in (saved, link):
        with pytest.raises(ValueError, match=r"has the checkpoints of run [0-9a-f]{12}, since 20.*load\(model, path"):
            save(second, path, wait=False).wait()
    assert len(list(saved.glob("step-*"))) == 1
    assert save(second, tmp_path / "own").error is None
    # A run that has loaded continues the first; if that is still alive it finds out at its next save.
    load(second, saved)
    loss(second, 0).backward()
    assert save(second, link).error is None
    with pytest.raises(ValueError, match="the other one has loaded from the folder since"):
        save(first, saved, {"late": True})
    assert load(first, saved) == {}
    assert save(first, saved).error is None
    with pytest.raises(ValueError, match="the other one has loaded from the folder since"):
        save(second, saved)
    # A copy of checkpoints without the word of the run.
    (saved / "run").unlink()
    with pytest.raises(ValueError, match="has the checkpoints of another run"):
        save(third, saved)
    for model in (first, second, third):
        model.close()


def test_a_run_that_went_back_is_newer_than_what_it_left(tmp_path):
    """Also for a run that a zombie of an earlier attempt saves beside until it finds out."""
    model = alone(net())
    paths, saved = [], []
    for t in range(3):
        paths.append(save(model, tmp_path, {"t": t}, wait=False).path)
        saved.append(values(model.module))
        loss(model, t).backward()
    for at in (2, 0):  # the newest may still be written
        assert load(model, paths[at] if at == 0 else tmp_path) == {"t": at}
        assert model.stats().rounds == at
        assert_same(values(model.module), saved[at])
    newer = save(model, tmp_path, {"t": "again"}, keep=2).path
    assert latest(tmp_path) == newer
    assert load(model, tmp_path) == {"t": "again"}
    assert sorted(tmp_path.glob("step-*")) == sorted([paths[2], newer])
    model.close()


def test_saves_that_nobody_waits_for_are_all_whole(tmp_path):
    """The memory of one is not used for the next before it is written."""
    model = DecentralizedDataParallel(nn.Linear(400, 400), partial(torch.optim.SGD, lr=0.1), transport=InProcessTransport())
    expected, savings = [], []
    for t in range(20):
        model(torch.randn(2, 400)).sum().backward()
        savings.append(save(model, tmp_path, {"t": t}, keep=30, wait=False))
        expected.append(values(model.module))
    for t, saving in enumerate(savings):
        assert saving.wait() == saving.path
        assert load(model, saving.path) == {"t": t}
        assert torch.equal(model.module.weight, expected[t]["weight"])
    model.close()


def test_wrong_arguments(tmp_path):
    model = alone(net())
    for call, kind, text in (
        (lambda: save(model.module, tmp_path), TypeError, r"decent_dp.gossip\(\) returned, got a Sequential"),  # type: ignore[arg-type]
        (lambda: save(model, tmp_path, keep=0), ValueError, "keep"),
        (lambda: save(model, tmp_path, wiat=False), TypeError, "wiat"),  # type: ignore[call-arg]
        (lambda: save(model, tmp_path, state=[1]), TypeError, "state must be a dict"),  # type: ignore[arg-type]
        (lambda: save(model, tmp_path, keep=1.5), TypeError, "keep"),  # type: ignore[arg-type]
        (lambda: save(model, tmp_path, wait="no"), TypeError, "wait must be True or False, got 'no'"),  # type: ignore[arg-type]
        (lambda: save(model, tmp_path, {"sampler": {"x": object()}}), TypeError, r"sampler.*'x'.*object"),
        (lambda: load(model, tmp_path / "nothing"), FileNotFoundError, "nothing"),
        (lambda: load(model, tmp_path, resize="median"), ValueError, "median"),
        (lambda: load(model.module, tmp_path), TypeError, "Sequential"),  # type: ignore[arg-type]
    ):
        with pytest.raises(kind, match=text):
            call()
    assert latest(tmp_path) is None
    done = save(model, tmp_path, {"x": 1})
    with pytest.raises(ValueError, match="one checkpoint"):
        save(model, done.path)
    model.close()
    for call in (save, load):
        with pytest.raises(RuntimeError, match="closed"):
            call(model, tmp_path)


@pytest.mark.parametrize("call", [save, load, lambda _, path: latest(path)])
def test_no_path_is_no_path(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where a save would go that takes '' for the current folder
    model = alone(net())
    with pytest.raises(ValueError, match="path must be the folder for checkpoints, got ''"):
        call(model, "")
    with pytest.raises(TypeError, match="path must be the folder for checkpoints, got 3"):
        call(model, 3)
    model.close()


def test_moments(tmp_path):
    """Inside a backward there is no boundary; inside averaged() the replica's own values are saved."""
    model = alone(net())
    caught: list[Any] = []
    hook = next(model.module.parameters()).register_hook(lambda _: caught.append(error_of(lambda: save(model, tmp_path))))
    loss(model, 0).backward()
    hook.remove()
    assert [kind for kind, _ in caught] == ["RuntimeError"]
    assert "inside a backward" in caught[0][1]
    assert latest(tmp_path) is None
    for call in (save, load):
        with model.join(), pytest.raises(RuntimeError, match=r"inside join\(\)"):
            call(model, tmp_path)
    save(model, tmp_path, {"ok": True})  # the numbers of saves go on
    assert load(model, tmp_path) == {"ok": True}
    model.close()

    def averaging(transport: InProcessTransport) -> bool:
        model = on(transport, steps=3)
        before = values(model.module)
        with model.averaged():
            assert not torch.equal(before["0.weight"], model.module.get_parameter("0.weight"))
            save(model, tmp_path / "averaged")
        own = values(model.module)
        assert not torch.equal(own["0.weight"], before["0.weight"]), "nothing was in flight"
        load(model, tmp_path / "averaged")
        return all(torch.equal(own[name], value) for name, value in values(model.module).items())

    assert run_replicas(2, averaging) == [True, True]


# -- workers that do not keep together -------------------------------------------------------------------------------------


def test_saves_at_different_updates(tmp_path):
    def work(transport: InProcessTransport) -> Any:
        rank = transport.rank
        model = on(transport, steps=3 + (rank == 1), mix_every=1000)
        found = [error_of(lambda: save(model, tmp_path))]
        later = save(model, tmp_path, wait=False)  # the same again, told later
        wait_for(lambda: later.done)
        if rank != 1:
            loss(model, 3, rank).backward()
        found += [error_of(partial(save, model, tmp_path)) for _ in range(2)]
        found.append(error_of(later.wait))
        model.close()
        return found, os.listdir(tmp_path)

    for found, names in run_replicas(3, work):
        assert [kind for kind, _ in found] == ["OutOfStepError", "OutOfStepError", "", "OutOfStepError"]
        assert "worker 0: 3, worker 1: 4, worker 2: 3" in found[0][1]
        assert sum(name.startswith("step-") for name in names) == 1
    assert latest(tmp_path) is not None


@pytest.mark.parametrize("wait", [True, False])
def test_a_worker_that_does_not_come_is_named(tmp_path, wait):
    """By the save, or by the next one."""

    def work(transport: InProcessTransport) -> Any:
        model = on(transport)
        found = None
        if transport.rank == 0:
            transport.timeout = 0.5  # of a save; not of the hub
            if not wait:
                save(model, tmp_path, wait=False)
            found = error_of(lambda: save(model, tmp_path, wait=wait))
        transport.control.gather(None)
        return found

    kind, text = run_replicas(2, work)[0]
    assert kind == "PeerTimeoutError"
    assert "worker 1 did not write a shard" in text
    assert latest(tmp_path) is None


def killed_before_its_part(rank: int, n: int, path: str) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    loss(model, 0, rank).backward()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    return (*error_of(lambda: save(model, path)), time.monotonic() - began)


def test_a_worker_that_is_killed_is_named_at_once(workers, tmp_path):
    kind, text, seconds = workers.outcomes(2, killed_before_its_part, str(tmp_path))[0].value
    assert kind == "PeerLostError"
    assert "worker 1" in text
    assert seconds < 45  # a silent one is waited for 60 s


def test_workers_that_have_loaded_from_different_folders_do_not_save_together(tmp_path):
    """Their shards have different names, and no load would find all of them."""

    def work(transport: InProcessTransport) -> str:
        model = on(transport)
        save(model, tmp_path / "one")
        load(model, tmp_path / "one")
        with pytest.raises(ValueError, match="the shards of the workers are of different checkpoints") as caught:
            save(model, tmp_path / ("one" if transport.rank == 0 else "two"))
        model.close()
        return str(caught.value)

    first, second = run_replicas(2, work)
    assert first == second


# -- folders of their own --------------------------------------------------------------------------------------------------


def separate(transport: Transport, path: Path) -> Any:
    """Workers 0 and 1 share a disk, worker 2 has its own."""
    rank = transport.rank
    own = f"{path}/disk{rank // 2}"
    model = on(transport)
    for t in range(4):
        loss(model, t, rank).backward()
        save(model, own, {"t": t}, keep=2)
    model.replica.world.control.gather(None)  # who completes a folder also removes what is too old there
    found = [sorted(os.listdir(own)), sorted(os.listdir(str(latest(own))))]
    before = values(model.module)
    loss(model, 4, rank).backward()
    newest = latest(own)
    assert newest is not None
    # A disk on which the newest is broken: all are told.
    if rank == 2:
        (newest / "worker-0002.safetensors").write_text("{")
    model.replica.world.control.gather(None)
    found.append(error_of(lambda: load(model, own)))
    # A disk that has lost the newest: all go on from the one before.
    if rank == 2:
        shutil.rmtree(newest)
    model.replica.world.control.gather(None)
    assert load(model, own) == {"t": 2}
    loss(model, 3, rank).backward()
    settle(model.replica)
    assert all(torch.equal(before[k], v) for k, v in values(model.module).items())
    found.append(error_of(lambda: load(model, own, resize="mean")))
    if rank == 2:
        shutil.rmtree(own)
    model.replica.world.control.gather(None)
    found.append(error_of(lambda: load(model, own, missing_ok=True)))
    model.close()
    return found


def test_workers_without_a_shared_disk(replicas, tmp_path):
    results = replicas(3, separate, tmp_path)
    for rank, (names, files, torn, resized, lost) in enumerate(results):
        assert [name[:13] for name in names] == ["latest", "run", "step-00000003", "step-00000004"]
        parts = ["worker-0002.safetensors"] if rank == 2 else ["worker-0000.safetensors", "worker-0001.safetensors"]
        assert files == parts
        assert torn[0] == resized[0] == lost[0] == "CheckpointError"
        for text in ("worker 2: /", "disk1", "worker-0002.safetensors"):
            assert text in torn[1]
        assert "worker-000" in resized[1]
        assert "missing" in resized[1]
        assert "worker 2 found none there" in lost[1]
    assert {str(result[2:]) for result in results} == {str(results[0][2:])}


# -- another number of workers ---------------------------------------------------------------------------------------------


def test_another_number_of_workers_is_refused_unless_resized(tmp_path):
    def loading(transport: InProcessTransport) -> None:
        model = on(transport)
        with pytest.raises(ValueError, match=r"saved by 3 workers and this run has 2 workers: pass resize='spread'"):
            load(model, tmp_path)
        assert load(model, tmp_path, resize="spread") == {}

    run_replicas(3, lambda transport: save(on(transport), tmp_path) and None)
    run_replicas(2, loading)


# -- leaving ---------------------------------------------------------------------------------------------------------------


def leaves_without_waiting(rank: int, n: int, path: str) -> None:
    def trained_and_saved(how: str) -> DecentralizedDataParallel:
        model = DecentralizedDataParallel(net(), SGD, topology="ring")
        loss(model, 0, rank).backward()
        time.sleep(0.2 * rank)
        save(model, f"{path}/{how}", {"how": how}, wait=False)
        return model

    trained_and_saved("close").close()
    del_after = trained_and_saved("drop")
    del del_after
    trained_and_saved("exit")


def test_an_exiting_worker_finishes_its_checkpoint(workers, tmp_path):
    """Also one whose wrapper was closed or dropped."""
    workers(2, leaves_without_waiting, str(tmp_path))
    for how in ("close", "drop", "exit"):
        newest = latest(tmp_path / how)
        assert newest is not None, how
        assert sorted(os.listdir(newest)) == ["worker-0000.safetensors", "worker-0001.safetensors"], how
