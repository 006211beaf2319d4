"""save and load through files: what goes on equals what was not interrupted; what is broken is refused by all workers."""

from __future__ import annotations

import os
import resource
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
from decent_dp.errors import CheckpointError
from decent_dp.replica.snapshot import settle
from decent_dp.transport import InProcessTransport, Transport, run_replicas
from tests.checkpoint_cases import AT, KINDS, STEPS, error_of, make, run, seed_all, state
from tests.helpers import SGD, alone, loss, net, noting_texts, values
from tests.workers import hear, say, shorten

# -- going on exactly ------------------------------------------------------------------------------------------------------


def uninterrupted(rank: int, n: int, path: str, kinds: list[str]) -> dict[str, Any]:
    """Runs that save on the way, some with each way to wait for it, and continue."""
    found = {}
    for kind in kinds:
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


def interrupted(rank: int, n: int, path: str, kinds: list[str]) -> dict[str, Any]:
    found = {}
    for kind in kinds:
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


# What the other kinds have more is in snapshots too, which are tested without files.
IN_FAST_TESTS = ["complete", "int8", "bfloat16", "clipped", "accum", "open window", "every second"]


@pytest.mark.parametrize(
    ("n", "kinds"),
    [(2, IN_FAST_TESTS), *(pytest.param(n, [*KINDS], marks=pytest.mark.slow) for n in (1, 2, 3))],
    ids=["2-some", "1", "2", "3"],
)
def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(workers, tmp_path, n, kinds):
    whole = workers(n, uninterrupted, str(tmp_path), kinds)
    parts = workers(n, interrupted, str(tmp_path), kinds)
    for rank in range(n):
        for kind in kinds:
            differing = [k for k in whole[rank][kind] if whole[rank][kind][k] != parts[rank][kind].get(k)]
            assert parts[rank][kind] == whole[rank][kind], (rank, kind, differing)


# Those whose state is not all plain tensors.


def rolled_back(rank: int, n: int, path: str) -> Any:
    """In a process that goes on: the same end from the same checkpoint, twice; a save that nobody has waited for is there."""
    model = make("int8")
    seed_all(rank)
    assert load(model, path, missing_ok=True) is None
    save(model, path, {"at": 0})
    run(model, "int8", rank, 0, AT)
    save(model, path, {"at": AT}, wait=False)
    ends = []
    for _ in range(2):
        run(model, "int8", rank, AT, STEPS)
        ends.append(state(model))
        extra = load(model, path)
        assert extra == {"at": AT}
    save(model, path, {"at": "this moment"}, wait=False)
    assert load(model, path) == {"at": "this moment"}
    first = load(model, sorted(str(p) for p in Path(path).glob("step-*"))[0])
    assert first == {"at": 0}
    assert model.stats().rounds == 0
    run(model, "int8", rank, 0, AT)
    settle(model.replica)
    run(model, "int8", rank, AT, STEPS)
    ends.append(state(model))
    model.close()
    return ends


def test_a_running_process_goes_back(workers, tmp_path):
    for ends in workers(2, rolled_back, str(tmp_path)):
        assert ends[0] == ends[1] == ends[2]


# -- what save does ---------------------------------------------------------------------------------------------------------


def test_the_last_k_are_kept_and_nothing_else(tmp_path):
    model = alone(net())
    for t in range(5):
        loss(model, t).backward()
        saving = save(model, str(tmp_path), keep=2)
        assert isinstance(saving, Saving)
        assert saving.done
        assert saving.error is None
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
    for folder in (left, copied, users):
        folder.mkdir()
    (left / "worker-0001.safetensors.tmp").write_text("x")
    (copied / "worker-0000.safetensors").write_text("x")
    (users / "notes").write_text("x")
    model = alone(net())
    assert load(model, tmp_path, missing_ok=True) is None
    newest = save(model, tmp_path).path
    assert sorted(os.listdir(tmp_path)) == sorted(["best", "latest", "run", newest.name, users.name])
    model.close()


def test_a_second_run_in_a_folder_is_refused_by_name(tmp_path):
    first, second = alone(net()), alone(net(1))
    save(first, tmp_path)
    for wait in (True, False):
        with pytest.raises(ValueError, match=r"has the checkpoints of run [0-9a-f]{12}, since 20.*load\(model, path"):
            save(second, tmp_path, wait=wait).wait()
    assert len(list(tmp_path.glob("step-*"))) == 1
    assert save(second, tmp_path / "own").error is None
    # A run that has loaded continues the first; if that is still alive it finds out at its next save.
    load(second, tmp_path)
    loss(second, 0).backward()
    assert save(second, tmp_path).error is None
    with pytest.raises(ValueError, match="has the checkpoints of run"):
        save(first, tmp_path, {"late": True})
    assert load(first, tmp_path) == {}
    for model in (first, second):
        model.close()
    # A copy of checkpoints without the word of the run.
    (tmp_path / "run").unlink()
    third = alone(net())
    with pytest.raises(ValueError, match="has the checkpoints of another run"):
        save(third, tmp_path)
    third.close()


def test_a_run_that_went_back_is_newer_than_what_it_left(tmp_path):
    """Also for a run that a zombie of an earlier attempt saves beside until it finds out."""
    model = alone(net())
    paths = []
    for t in range(3):
        paths.append(save(model, tmp_path, {"t": t}).path)
        loss(model, t).backward()
    assert load(model, paths[0]) == {"t": 0}
    loss(model, 7).backward()
    newer = save(model, tmp_path, {"t": "again"}, keep=2).path
    assert latest(tmp_path) == newer
    assert load(model, tmp_path) == {"t": "again"}
    assert sorted(tmp_path.glob("step-*")) == sorted([paths[2], newer])
    model.close()


def test_saves_that_nobody_waits_for_are_all_whole(tmp_path):
    """The memory of one is not used for the next before it is written; the store is not used."""
    texts = noting_texts(transport := InProcessTransport())
    model = DecentralizedDataParallel(nn.Linear(400, 400), partial(torch.optim.SGD, lr=0.1), transport=transport)
    expected, savings = [], []
    for t in range(20):
        model(torch.randn(2, 400)).sum().backward()
        savings.append(save(model, tmp_path, {"t": t}, keep=30, wait=False))
        expected.append(values(model.module))
    assert [saving.wait() for saving in savings] == [saving.path for saving in savings]
    for t, saving in enumerate(savings):
        assert load(model, saving.path) == {"t": t}
        assert torch.equal(model.module.weight, expected[t]["weight"])
    assert not texts
    assert not transport.plane.agreements.waiting
    model.close()


def test_wrong_arguments(tmp_path):
    model = alone(net())
    for call, kind, text in (
        (lambda: save(model.module, tmp_path), TypeError, "Sequential"),  # type: ignore[arg-type]
        (lambda: save(model, 3), TypeError, "path"),  # type: ignore[arg-type]
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
    assert load(model, tmp_path / "nothing", missing_ok=True) is None
    done = save(model, tmp_path, {"x": 1})
    assert done.wait() == latest(tmp_path)
    with pytest.raises(ValueError, match="one checkpoint"):
        save(model, done.path)
    model.close()
    model.close()
    with pytest.raises(RuntimeError, match="closed"):
        save(model, tmp_path)
    with pytest.raises(RuntimeError, match="closed"):
        load(model, tmp_path)


def test_moments(tmp_path):
    """Inside a backward there is no boundary; inside averaged() the replica's own values are saved."""
    model = alone(net())
    caught: list[str] = []

    def inside(_: Tensor) -> None:
        try:
            save(model, tmp_path)
        except RuntimeError as error:
            caught.append(str(error))

    hook = next(model.module.parameters()).register_hook(inside)
    loss(model, 0).backward()
    hook.remove()
    assert len(caught) == 1
    assert "inside a backward" in caught[0]
    assert latest(tmp_path) is None
    for call in (save, load):
        with model.join(), pytest.raises(RuntimeError, match=r"inside join\(\)"):
            call(model, tmp_path)
    save(model, tmp_path, {"ok": True})  # the numbers of saves go on
    assert load(model, tmp_path) == {"ok": True}
    model.close()

    def averaging(transport: InProcessTransport) -> bool:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        for t in range(3):
            loss(model, t, transport.rank).backward()
        before = values(model.module)
        with model.averaged():
            assert not torch.equal(before["0.weight"], model.module.get_parameter("0.weight"))
            save(model, tmp_path / "averaged")
        own = values(model.module)
        assert not torch.equal(own["0.weight"], before["0.weight"]), "nothing was in flight"
        load(model, tmp_path / "averaged")
        return all(torch.equal(own[name], value) for name, value in values(model.module).items())

    assert run_replicas(2, averaging) == [True, True]


# -- workers that do not keep together --------------------------------------------------------------------------------------


def out_of_step(transport: InProcessTransport, path: Path) -> Any:
    rank = transport.rank
    model = DecentralizedDataParallel(net(), SGD, topology="ring", mix_every=1000, transport=transport)
    for t in range(3 + (rank == 1)):
        loss(model, t, rank).backward()
    found = [error_of(lambda: save(model, path))]
    later = save(model, path, wait=False)  # the same again, told later
    while not later.done:
        time.sleep(0.01)
    if rank != 1:
        loss(model, 3, rank).backward()
    found.append(error_of(lambda: save(model, path)))
    found.append(error_of(lambda: save(model, path, {"fine": True})))
    found.append(error_of(later.wait))
    model.close()
    return found, os.listdir(path)


def test_saves_at_different_updates(tmp_path):
    for found, names in run_replicas(3, partial(out_of_step, path=tmp_path)):
        kinds = [kind for kind, _ in found]
        assert kinds == ["OutOfStepError", "OutOfStepError", "", "OutOfStepError"]
        assert "worker 0: 3, worker 1: 4, worker 2: 3" in found[0][1]
        assert sum(name.startswith("step-") for name in names) == 1
    assert latest(tmp_path) is not None


def one_does_not_come(rank: int, n: int, path: str) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    loss(model, 0, rank).backward()
    found = []
    if rank == 1:
        for other in (0, 2):
            hear(f"worker {other} has failed")
    else:
        shorten(model.replica.world, 2)
        began = time.monotonic()
        found = [*error_of(lambda: save(model, path)), time.monotonic() - began]
        shorten(model.replica.world, 60)
        say(f"worker {rank} has failed")
    if rank == 2:
        # The one extra that cannot be saved, on one worker: the others hear of it.
        found = [*found, error_of(lambda: save(model, path + "/second", {"x": object()}))]
    else:
        found = [*found, error_of(lambda: save(model, path + "/second", {"x": 1}))]
    model.close()
    return found


def test_a_worker_that_does_not_come_is_named(workers, tmp_path):
    results = workers(3, one_does_not_come, str(tmp_path))
    for rank in (0, 2):
        kind, text, seconds, _ = results[rank]
        assert kind == "PeerTimeoutError"
        assert "worker 1 did not write a shard" in text
        assert 1.5 < seconds < 45
    assert latest(tmp_path) is None


def test_an_extra_that_one_worker_cannot_save(tmp_path):
    results = run_replicas(2, partial(unsavable, path=tmp_path))
    assert results[1][0][0] == "TypeError"
    assert results[0][0][0] == "TypeError"
    assert "worker 1" in results[0][0][1]
    assert "object" in results[0][0][1]
    assert [found[1] for found in results] == [("", ""), ("", "")]


def unsavable(transport: InProcessTransport, path: Path) -> Any:
    model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
    loss(model, 0, transport.rank).backward()
    extra = {"x": object() if transport.rank == 1 else 1}
    found = [error_of(lambda: save(model, path, extra)), error_of(lambda: save(model, path))]
    model.close()
    return found


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


# -- the disk ---------------------------------------------------------------------------------------------------------------


def full_disk(rank: int, n: int, path: str) -> Any:
    """Worker 1 may write small files only, for a while."""
    model = DecentralizedDataParallel(net(), SGD, topology="ring")
    loss(model, 0, rank).backward()
    save(model, path, {"at": 1})
    loss(model, 1, rank).backward()
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    failed = save(model, path, {"at": 2})
    result = failed.done, type(failed.error).__name__, str(failed.error), failed.wait(), latest(path), repr(failed)
    loss(model, 2, rank).backward()
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    later = save(model, path, {"at": 3})
    model.replica.world.control.gather(None)  # one worker writes `latest`, and removes older checkpoints
    names = sorted(os.listdir(path))
    extra = load(model, path)
    model.close()
    return result, later.error, names, extra


def test_a_full_disk_does_not_stop_the_training(workers, tmp_path):
    for rank, (failed, later, names, extra) in enumerate(workers(2, full_disk, str(tmp_path))):
        done, kind, text, path, newest, shown = failed
        assert done
        assert path is None
        assert issubclass({"OSError": OSError, "CheckpointError": CheckpointError}[kind], Exception)
        assert ("worker 1" in text) == (rank == 0)
        assert "File too large" in text
        assert "failed" in shown
        assert newest.name.startswith("step-00000001-")
        assert later is None
        assert extra == {"at": 3}
        assert [name[:13] for name in names] == ["latest", "run", "step-00000001", "step-00000003"]


def test_a_folder_that_cannot_be_made(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    model = alone(net())
    saving = save(model, tmp_path / "file" / "below")
    assert isinstance(saving.error, OSError)
    assert saving.wait() is None
    assert "training goes on" in caplog.text
    loss(model, 0).backward()
    assert save(model, tmp_path / "other").error is None
    model.close()


# -- folders of their own ----------------------------------------------------------------------------------------------------


def separate(transport: Transport, path: Path) -> Any:
    """Workers 0 and 1 share a disk, worker 2 has its own."""
    rank = transport.rank
    own = f"{path}/disk{rank // 2}"
    model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
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
    found.append(error_of(lambda: load(model, own)))
    found.append(error_of(lambda: load(model, own, missing_ok=True)))
    model.close()
    return found


def test_workers_without_a_shared_disk(replicas, tmp_path):
    results = replicas(3, separate, tmp_path)
    for rank, (names, files, torn, resized, lost, still_lost) in enumerate(results):
        assert [name[:13] for name in names] == ["latest", "run", "step-00000003", "step-00000004"]
        parts = ["worker-0002.safetensors"] if rank == 2 else ["worker-0000.safetensors", "worker-0001.safetensors"]
        assert files == parts
        assert torn[0] == resized[0] == "CheckpointError"
        assert torn[1].startswith("worker 2: /")
        assert "disk1" in torn[1]
        assert "worker-0002.safetensors" in torn[1]
        assert "worker-000" in resized[1]
        assert "missing" in resized[1]
        assert lost == still_lost
        assert lost[0] == "CheckpointError"
        assert "worker 2 found none there" in lost[1]
    assert {str(result[2:]) for result in results} == {str(results[0][2:])}


def test_a_shard_that_is_not_written_does_not_cost_the_last_checkpoint_of_all(tmp_path):
    """On a disk of its own, and where only one is to be kept."""

    def work(transport: InProcessTransport) -> Any:
        own = tmp_path / str(transport.rank)
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        path = save(model, own, {"at": 0}, keep=1).path
        loss(model, 0, transport.rank).backward()
        blocked = own / path.name.replace("step-00000000-0-0", "step-00000001-0-1")
        if transport.rank == 1:
            blocked.write_text("mine")
        failed = save(model, own, {"at": 1}, keep=1)
        if transport.rank == 1:
            blocked.unlink()
        transport.control.gather(None)
        found = load(model, own), sorted(p.name for p in own.iterdir()) == ["latest", "run", path.name]
        model.close()
        return failed.wait(), str(failed.error), found

    for path, text, found in run_replicas(2, work):
        assert path is None
        assert "is not a folder" in text
        assert found == ({"at": 0}, True)


# -- another number of workers --------------------------------------------------------------------------------------------


def test_another_number_of_workers_is_refused_unless_resized(tmp_path):
    def saving(transport: InProcessTransport) -> None:
        save(DecentralizedDataParallel(net(), SGD, transport=transport), tmp_path)

    def loading(transport: InProcessTransport) -> None:
        model = DecentralizedDataParallel(net(), SGD, transport=transport)
        with pytest.raises(ValueError, match=r"saved by 3 workers and this run has 2: pass resize='spread'"):
            load(model, tmp_path)
        assert load(model, tmp_path, resize="spread") == {}

    run_replicas(3, saving)
    run_replicas(2, loading)


# -- leaving -----------------------------------------------------------------------------------------------------------------


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
        assert not list(newest.glob("*.tmp")), how
        assert len(list(newest.glob("worker-*.safetensors"))) == 2, how
