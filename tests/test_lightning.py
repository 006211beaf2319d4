"""Lightning's Trainer with the strategy of ``decent_dp.integrations.lightning``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.framework_cases import Run, assert_equal_runs, collectives, copies, plain_loop, quiet_frameworks
from tests.helpers import ROOT, Heard

# Found rather than imported: the import takes seconds, which only the workers need to spend.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")

CLIP = 0.05


def promises(rank: int, n: int) -> Any:
    """One short fit, with what most promises are about."""
    quiet_frameworks()
    from tests import lightning_cases as cases

    module = cases.Module(log=True)
    watch = cases.Watch()
    with collectives() as watch.found:
        run = cases.fitted(
            *(rank, n, module, cases.loader(), cases.loader(16, shuffle=False)),
            callbacks=[watch],
            gradient_clip_val=CLIP,
            accumulate_grad_batches=2,
            val_check_interval=4,
            num_sanity_val_steps=1,
        )
    shares = cases.shares(rank, n, 2)
    expected = plain_loop(shares, accumulate=2, clip=CLIP)
    replica = module.trainer.strategy.replica
    return {
        "run": run,
        "expected": expected,
        "sharded": module.model.seen == shares,
        "own": watch.own,
        "validated": module.validated,
        "local": watch.local == run.losses,
        "logged": [watch.means, [sum(run.losses[:8]) / 8, sum(run.losses[8:]) / 8]],
        "in_steps": watch.in_steps,
        "closed": replica.life.closed,
    }


@pytest.mark.slow
def test_a_fit_equals_the_plain_loop_and_validates_the_mean(workers):
    results = workers(2, promises)
    for result in results:
        run, expected = result["run"], result["expected"]
        assert_equal_runs(run, expected)  # so training went on from its own after each validation
        assert run.rounds == 8  # one per window
        assert run.norms == expected.norms  # of all local gradients
        assert max(run.norms) > CLIP
        assert result["sharded"]
        assert result["closed"]
        assert result["in_steps"] == []
    a, b = results
    assert not same(a["run"].params, b["run"].params)
    # The first is of the sanity check, when all are equal.
    assert len(a["validated"]) == 5
    for of_a, of_b, own_a, own_b in zip(a["validated"], b["validated"], a["own"], b["own"], strict=True):
        assert same(of_a, of_b)
        for mean, x, y in zip(of_a, own_a, own_b, strict=True):
            torch.testing.assert_close(mean, (x + y) / 2)
    assert not same(a["own"][1], b["own"][1])
    assert a["local"]  # self.log("loss", loss)
    assert b["local"]
    means, of_a = a["logged"]
    assert means == b["logged"][0]  # sync_dist=True
    assert means == pytest.approx([(x + y) / 2 for x, y in zip(of_a, b["logged"][1], strict=True)])


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- saves and stops -------------------------------------------------------------------------------------------------------


def resumes(rank: int, n: int, folder: str) -> Any:
    """An uninterrupted run that saves, and runs that resume from each of its files."""
    from decent_dp.replica import snapshot

    quiet_frameworks()
    settle = snapshot.settle
    from tests import lightning_cases as cases

    def fit(callbacks: Any, ckpt_path: str | None = None, loaders: Any = None, **options: Any) -> Any:
        module = cases.Noisy()
        options = {"max_epochs": 3, "callbacks": callbacks, "enable_checkpointing": True} | options
        cases.fitted(rank, n, module, *(loaders or data()), ckpt_path=ckpt_path, **options)
        return module

    def settles(ckpt_path: str, **options: Any) -> Any:
        """Resumes, and saves nothing."""
        return fit([cases.Settles(*settled)], ckpt_path, enable_checkpointing=False, **options)

    def data() -> Any:
        return cases.loader(kind=cases.Resumable), cases.loader(16, shuffle=False)

    steps = cases.ModelCheckpoint(f"{folder}/steps", filename="{step}", every_n_train_steps=4, save_top_k=-1)
    best = cases.ModelCheckpoint(f"{folder}/best", monitor="val_loss", save_top_k=1, save_last="link", filename="{epoch}")
    # File names that differ between workers: worker 0's count.
    named = cases.ModelCheckpoint(f"{folder}/named", filename="{epoch}-{own_loss:.6f}", monitor="own_loss", save_top_k=2)
    kept = cases.Kept()
    settled: set[int] = set()

    def note(replica: Any) -> None:
        settled.add(replica.engine.round)
        settle(replica)

    snapshot.settle = note
    whole = fit([steps, best, named, kept])
    found: dict[str, Any] = {"run": whole.run, "kept": kept.at, "folders": sorted(os.listdir(f"{folder}/best"))}
    torch.distributed.barrier()
    found["named"] = sorted(os.listdir(f"{folder}/named"))
    for name in ("steps/step=4", "steps/step=8", "steps/step=16", "best/last", f"named/{found['named'][0][:-5]}"):
        again = settles(f"{folder}/{name}.ckpt")
        losses = again.run.losses
        found[name] = (whole.run.losses[-len(losses) :] == losses, same(whole.run.params, again.run.params), len(losses))
        found[name] += (again.loaded == rank,)
        found[name] += (again.run.rounds == whole.run.rounds, same(whole.run.mean, again.run.mean))
    ends = cases.ModelCheckpoint(f"{folder}/ends", filename="{epoch}", save_top_k=-1)
    options = {"loaders": (cases.loader(kind=cases.Ahead),), "max_epochs": 2}
    settled.clear()
    straight = fit([ends], **options)
    again = settles(f"{folder}/ends/epoch=0.ckpt", **options)
    found["ahead"] = straight.model.seen[6:] == again.model.seen and same(straight.run.params, again.run.params)
    # A finished run has no further step, and gives the mean.
    found["finished"] = same(settles(f"{folder}/ends/epoch=1.ckpt", **options).run.mean, straight.run.mean)
    # The model alone, and a resume without the replicas.
    whole.trainer.save_checkpoint(f"{folder}/model.ckpt")
    plain = torch.load(f"{folder}/model.ckpt")
    found["plain"] = "decent_dp" not in plain and same(list(plain["state_dict"].values()), whole.run.mean)
    if rank == 0:
        os.rename(f"{folder}/steps/step=4.ckpt.decent_dp", f"{folder}/elsewhere")
    torch.distributed.barrier()
    found["moved"] = settles(f"{folder}/steps/step=4.ckpt", max_epochs=1).run.losses
    torch.distributed.barrier()
    if rank == 0:
        os.rename(f"{folder}/elsewhere", f"{folder}/steps/step=4.ckpt.decent_dp")
    return found


def fewer(rank: int, n: int, folder: str) -> list[list[torch.Tensor]]:
    quiet_frameworks()
    from tests import lightning_cases as cases

    module = cases.Noisy()
    validated = cases.fitted(rank, n, module, cases.loader(), ckpt_path=f"{folder}/best/last.ckpt", max_epochs=4)
    return validated.mean


@pytest.mark.slow
def test_a_resumed_fit_equals_the_uninterrupted_one_also_in_the_middle_of_an_epoch(workers, tmp_path, caplog):
    results = workers(3, resumes, str(tmp_path))
    for result in results:
        assert result["steps/step=4"] == (True, True, 14, True, True, True)
        assert result["steps/step=8"] == (True, True, 10, True, True, True)
        assert result["steps/step=16"] == (True, True, 2, True, True, True)
        assert result["best/last"][-1]
        first, folder, *others = result["named"]
        assert folder == f"{first}.decent_dp"
        assert len(others) == 2
        assert all(result[f"named/{first[:-5]}"])
        assert result["ahead"]
        assert result["finished"]
        assert result["plain"]
        assert result["moved"]
        # The best file and the link to it; removed files leave no replicas.
        assert result["folders"] == ["epoch=2.ckpt", "epoch=2.ckpt.decent_dp", "last.ckpt"]
    # What a file has is the mean.
    saved = torch.load(tmp_path / "steps" / "step=8.ckpt")["state_dict"]
    for key, value in saved.items():
        of_all = [result["kept"][8][key] for result in results]
        torch.testing.assert_close(value, sum(of_all) / 3)
        assert not torch.equal(of_all[0], of_all[1])
    a, b = workers(2, fewer, str(tmp_path))
    assert same(a, b)


def stops(rank: int, n: int, folder: str) -> Any:
    """Decisions of one worker alone, which stop all after the same batch."""
    quiet_frameworks()
    from tests import lightning_cases as cases

    found: dict[str, Any] = {}

    def fit(callbacks: Any, ckpt_path: str | None = None, **options: Any) -> Any:
        module = cases.Module()
        loaders = cases.loader(kind=cases.Resumable), cases.loader(16, shuffle=False)
        options = {"max_epochs": 4, "callbacks": callbacks} | options
        cases.fitted(rank, n, module, *loaders, ckpt_path=ckpt_path, **options)
        return module

    interrupted = cases.OnExceptionCheckpoint(folder)
    try:
        fit([cases.Interrupt(1, 3, lambda _: os.kill(os.getpid(), signal.SIGTERM)), interrupted], enable_checkpointing=True)
    except cases.SIGTERMException:
        saved = torch.load(f"{folder}/on_exception.ckpt")
        found["sigterm"] = saved["global_step"]
    torch.distributed.barrier()
    whole, again = fit([cases.Settles(saved["global_step"])]), fit([], f"{folder}/on_exception.ckpt")
    found["resumed"] = whole.run.losses[-len(again.run.losses) :] == again.run.losses
    found["resumed"] &= same(whole.run.params, again.run.params) and len(again.run.losses) == 32 - found["sigterm"]

    def should_stop(trainer: Any) -> None:
        trainer.should_stop = True

    for name, callback in (
        ("alone", cases.Interrupt(1, 10, should_stop)),
        ("module", cases.Interrupt(1, 10, lambda trainer: setattr(trainer.lightning_module, "enough", True))),
        ("timer", cases.Hasty(1, 10)),
        ("validation", cases.Lone(1, "on_validation_end")),
        ("epoch", cases.Lone(1, "on_train_epoch_end")),
        ("early", cases.EarlyStopping("own_loss", stopping_threshold=1e9 * (rank == 1), patience=100)),
    ):
        with collectives() as calls:
            watch = cases.Watch(calls)
            module = fit([callback, watch])
        found[name] = len(module.run.losses)
        found[f"{name} in steps"] = watch.in_steps
    # Slurm's signal before the time limit: all save after the same batch, and worker 0 requeues the job.
    slurm = {"JOB_ID": 7, "JOB_NAME": "x", "NTASKS": n, "NTASKS_PER_NODE": n, "PROCID": rank, "LOCALID": rank, "NODEID": 0}
    os.environ |= {f"SLURM_{name}": str(value) for name, value in slurm.items()} | {"PATH": f"{folder}:{os.environ['PATH']}"}
    options = {"plugins": [cases.SLURMEnvironment(requeue_signal=signal.SIGUSR1)], "folder": folder}
    try:
        fit([cases.Interrupt(1, 3, lambda _: os.kill(os.getpid(), signal.SIGUSR1))], **options)
    except cases.SIGTERMException:
        saved = torch.load(f"{folder}/hpc_ckpt_1.ckpt")
    torch.distributed.barrier()
    again = fit([], **options)  # Lightning finds the file
    for name in slurm:
        del os.environ[f"SLURM_{name}"]
    whole = fit([cases.Settles(saved["global_step"])])
    found["requeued"] = len(again.run.losses) == 32 - saved["global_step"] and same(whole.run.params, again.run.params)
    found["handler"] = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return found


@pytest.mark.slow
def test_a_decision_of_one_worker_stops_all_after_the_same_batch(workers, tmp_path):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/requeues\n')
    scontrol.chmod(0o755)
    a, b = workers(2, stops, str(tmp_path))
    assert a == b
    assert 3 < a["sigterm"] < 16
    assert a["resumed"]
    assert 10 < a["alone"] < 24
    assert 10 < a["module"] < 24
    assert 10 < a["timer"] < 24
    assert a["early"] == a["validation"] == a["epoch"] == 8  # the first validation, which ends the first epoch
    assert a["validation in steps"] == a["epoch in steps"] == []
    assert a["alone in steps"] == a["module in steps"] == a["timer in steps"] == a["early in steps"] == []
    assert a["handler"]
    assert a["requeued"]
    assert (tmp_path / "requeues").read_text() == "requeue 7\n"


# -- precision, several optimizers -----------------------------------------------------------------------------------------


def precisions(rank: int, n: int) -> Any:
    quiet_frameworks()
    from tests import lightning_cases as cases

    found: dict[str, Any] = {}
    module = cases.Module(poison=(1, 3))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    cases.fitted(rank, n, module, plugins=[cases.MixedPrecision("16-mixed", "cpu", scaler)], max_epochs=1)
    stats = module.trainer.strategy.replica.stats()
    finite = all(bool(p.isfinite().all()) for p in module.run.params)
    found["overflow"] = (stats.rounds, stats.updates, scaler.get_scale(), finite)
    module = cases.Module()
    cases.fitted(rank, n, module, precision="bf16-mixed", max_epochs=1)
    found["bf16"] = module.run.rounds
    module = cases.Adversarial()
    cases.fitted(rank, n, module, max_epochs=1)
    found["manual"] = (module.run.rounds, same(module.run.mean, module.run.params))
    found["means"] = module.run.mean
    return found


@pytest.mark.slow
def test_an_overflow_on_one_worker_and_several_optimizers_leave_rounds_equal(workers):
    a, b = workers(2, precisions)
    assert a["overflow"] == (8, 8, 8.0, True)
    assert b["overflow"] == (8, 7, 4.0, True)
    assert a["bf16"] == b["bf16"] == 8
    assert a["manual"] == b["manual"] == (8, False)
    assert same(a["means"], b["means"])


def single(rank: int, n: int) -> Any:
    quiet_frameworks()
    from tests import lightning_cases as cases

    heard = Heard()
    run = cases.fitted(rank, n, cases.Module())
    assert_equal_runs(run, plain_loop(cases.shares(rank, n, 2)))
    return heard.texts


@pytest.mark.slow
def test_one_worker_trains_alone_and_says_so(workers):
    ((warning,),) = workers(1, single)
    assert warning.startswith("one worker has no neighbours, and trains alone")


# -- errors ----------------------------------------------------------------------------------------------------------------


def dies(rank: int, n: int, how: str, folder: str) -> None:
    quiet_frameworks()
    from tests import lightning_cases as cases

    def act(_: Any) -> None:
        if how == "killed":
            os._exit(1)
        raise ValueError("out of luck")

    callbacks = [cases.Interrupt(2, 5, act), cases.OnExceptionCheckpoint(folder)]
    cases.fitted(rank, n, cases.Module(), callbacks=callbacks, max_epochs=100, enable_checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "raises"])
def test_a_worker_that_dies_ends_the_others_with_a_clear_error(workers, tmp_path, how):
    *others, dead = workers.outcomes(3, dies, how, str(tmp_path), group_timeout=100)
    assert dead.exitcode == 1 if how == "killed" else dead.message == "out of luck"
    for outcome in others:
        assert outcome.error == "PeerLostError"
        assert outcome.seconds < 45  # and does not wait for the others in Lightning's handling of the error
    if how == "raises":
        assert any("ValueError: out of luck" in outcome.message for outcome in others)
    assert not (tmp_path / "on_exception.ckpt").exists()


def refused(rank: int, n: int, folder: str) -> list[str]:
    quiet_frameworks()
    from tests import lightning_cases as cases
    from tests.helpers import error_of

    def fit(module: Any = None, **options: Any) -> Any:
        return lambda: cases.fitted(rank, n, module or cases.Module(), **options)

    remote, local = (cases.ModelCheckpoint(place, every_n_train_steps=1) for place in ("memory://x", folder))
    return [
        error_of(call)
        for call in (
            lambda: cases.GossipStrategy(find_unused_parameters=True),
            lambda: cases.GossipStrategy(scaler=None),
            lambda: cases.GossipStrategy(topologie="ring"),
            fit(sync_batchnorm=True),
            fit(val_check_interval="00:00:01:00"),
            fit(plugins=[cases.AsyncCheckpointIO()]),
            fit(cases.Idle()),
            fit(strategy=cases.GossipStrategy(topology="rign")),
            fit(strategy=cases.GossipStrategy(topology="hierarchical", local_world_size=3)),
            fit(callbacks=[remote], enable_checkpointing=True),
            fit(callbacks=[local], enable_checkpointing=True, plugins=[cases.Full()]),
        )
    ]


@pytest.mark.slow
def test_what_cannot_work_is_one_line_on_all_workers(workers, tmp_path):
    a, b = workers(2, refused, str(tmp_path))
    assert a == b
    expected = [
        "TypeError: GossipStrategy has no argument 'find_unused_parameters': it is an argument of PyTorch's DDP",
        "TypeError: GossipStrategy has no argument 'scaler': the GradScaler of the precision plugin is used",
        "TypeError: GossipStrategy has no argument 'topologie': it is unknown",
        "ValueError: Trainer(sync_batchnorm=True) waits for all workers",
        "ValueError: Trainer(val_check_interval=<a time>) goes by each worker's own clock",
        "ValueError: GossipStrategy writes the replicas and the checkpoint file together",
        "ValueError: configure_optimizers returned None",
        "ValueError: unknown topology 'rign'",
        "ValueError: HierarchicalTopology needs nodes of equal size, but local_world_size=3",
        "ValueError: the replicas are saved beside the checkpoint file, and 'memory://x",
        f"CheckpointError: worker 1: {tmp_path}/epoch=0-step=1.ckpt could not be saved: OSError: no space left",
    ]
    for message, begin in zip(a, expected, strict=True):
        assert message.startswith(begin)
        assert "\n" not in message


def test_a_missing_or_old_lightning_is_named_with_what_to_install(monkeypatch):
    name = "decent_dp.integrations.lightning"
    old, parts = ModuleType("lightning"), ["lightning.pytorch", "lightning.pytorch.plugins", "lightning.pytorch.plugins.io"]
    old.__version__ = "2.5.9"  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "lightning", None)
        with pytest.raises(ImportError, match=r"needs Lightning; .*pip install -e '\.\[lightning\]'$"):
            importlib.import_module(name)
        with pytest.raises(SystemExit, match=r"pip install -e '\.\[lightning,examples\]'$"):
            runpy.run_path(str(ROOT / "examples" / "lightning_digits.py"))
        for part in ["lightning", *parts]:
            patch.setitem(sys.modules, part, old)
        old.AsyncCheckpointIO = object  # type: ignore[attr-defined]
        with pytest.raises(ImportError, match=r"needs Lightning 2\.6 or newer, got 2\.5\.9"):
            importlib.import_module(name)


# -- Fabric ----------------------------------------------------------------------------------------------------------------


def fabric(rank: int, n: int, folder: str) -> Any:
    quiet_frameworks()
    from tests import lightning_cases as cases

    def train(run: Run, parts: Any, batches: Any) -> None:
        fabric, model, optimizer = parts
        for number, batch in batches:
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = model(**batch)["loss"]
                run.losses.append(float(loss))
                fabric.backward(loss / 2)
            if number % 2:
                run.norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=CLIP)))
                optimizer.step()
                optimizer.zero_grad()
        run.params, run.rounds = copies(model.module), fabric.strategy.replica.stats().rounds

    found: dict[str, Any] = {}
    parts = cases.fabric_parts(rank, n)
    data = parts[0].setup_dataloaders(cases.loader())
    run = Run()
    data.sampler.set_epoch(0)
    batches = list(enumerate(data))
    with collectives() as calls:
        train(run, parts, batches[:4])
    found["calls"] = calls
    fabric, model, optimizer = parts
    state = {"model": model, "optimizer": optimizer, "own": rank}
    fabric.save(f"{folder}/fabric.ckpt", state)
    train(run, parts, batches[4:])
    with fabric.strategy.replica.averaged():
        run.mean = copies(model.module)
    fabric.strategy.replica.close()
    expected = plain_loop(cases.shares(rank, n, 1), accumulate=2, clip=CLIP, saves=(2,))
    assert_equal_runs(run, expected)
    assert run.norms == expected.norms
    again, parts = Run(), cases.fabric_parts(rank, n)
    state = {"model": parts[1], "optimizer": parts[2], "own": None}
    found["left"] = sorted(parts[0].load(f"{folder}/fabric.ckpt", state))
    train(again, parts, batches[4:])
    parts[0].strategy.replica.close()
    found["resumed"] = again.losses == run.losses[4:] and same(again.params, run.params) and state["own"] == rank
    scaled = cases.fabric_parts(rank, n, scaler=True)
    for number, (_, batch) in enumerate(batches):
        loss = scaled[1](**batch)["loss"] * (float("inf") if (rank, number) == (1, 3) else 1.0)
        scaled[0].backward(loss)
        scaled[2].step()
        scaled[2].zero_grad()
    stats = scaled[0].strategy.replica.stats()
    found["scaled"] = (stats.rounds, stats.updates)
    return found


@pytest.mark.slow
def test_fabric_equals_the_plain_loop_and_resumes_exactly(workers, tmp_path):
    a, b = workers(2, fabric, str(tmp_path))
    assert a["calls"] == b["calls"] == []
    assert a["left"] == b["left"] == []
    assert a["resumed"]
    assert b["resumed"]
    assert (a["scaled"], b["scaled"]) == ((8, 8), (8, 7))
    saved = torch.load(tmp_path / "fabric.ckpt")
    assert set(saved) == {"model", "optimizer", "own", "decent_dp"}


def twins(rank: int, n: int, folder: str) -> Any:
    """Two models of one kind."""
    quiet_frameworks()
    from tests import lightning_cases as cases

    def twin(fabric: Any, state: dict[str, Any], name: str) -> None:
        model = cases.Model(len(state))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state[name], state[f"{name}_optimizer"] = fabric.setup(model, optimizer)

    def run(names: str, batches: Any, load: bool) -> Any:
        fabric, state = cases.fabric_of(rank, n), {}
        for name in names:
            twin(fabric, state, name)
        if load:
            fabric.load(f"{folder}/twins.ckpt", state)
        for batch in batches:
            for name in names:
                fabric.backward(state[name](**batch)["loss"])
                state[f"{name}_optimizer"].step()
                state[f"{name}_optimizer"].zero_grad()
        if not load:
            fabric.save(f"{folder}/twins.ckpt", state)
        found = {name: copies(state[name].module) for name in names}
        for replica in fabric.strategy.replicas:
            replica.close()
        return found

    saved = run("ab", list(cases.loader(shuffle=False))[3 * rank : 3 * rank + 3], load=False)
    found = []
    for names in ("ba", "b"):  # set up in another order, and one of them alone
        loaded = run(names, [], load=True)
        found.append(all(same(loaded[name], saved[name]) for name in names))
    # A file without replicas in the place of one with them, which another run would take for its own.
    fabric = cases.fabric_of(rank, n)
    beside = Path(f"{folder}/twins.ckpt.decent_dp")
    found.append(beside.is_dir())
    torch.distributed.barrier()
    fabric.save(beside.with_suffix(""), {"step": 3})
    torch.distributed.barrier()
    found.append(beside.exists())
    return found, same(saved["a"], saved["b"])


@pytest.mark.slow
def test_fabric_resumes_each_of_several_models_by_its_name(workers, tmp_path):
    assert workers(2, twins, str(tmp_path)) == [([True, True, True, False], False)] * 2


# -- the example and the page ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_example_resumes_after_a_signal_and_ends_as_a_run_under_torchrun(tmp_path):
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
    script = [str(ROOT / "examples" / "lightning_digits.py"), "--small"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *script]
    straight = subprocess.run(torchrun, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert straight.returncode == 0, straight.stderr
    # Lightning starts the second process.
    command = [sys.executable, *script, "--checkpoint", str(tmp_path / "saved")]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if line.startswith("epoch 2"):
                run.send_signal(signal.SIGTERM)
        run.wait(100)
    assert (tmp_path / "saved" / "last.ckpt").is_file()
    again = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
    ends = [done.stdout.strip().splitlines() for done in (straight, again)]
    found = [re.fullmatch(r"2 workers, 115 rounds, accuracy (9\d\.\d\d)%", end[-1]) for end in ends]
    assert all(found), ends
    # A save mixes in what is in flight, so that later replicas differ a little: by two of the 360 images at most.
    straight_on, resumed = (float(match[1]) for match in found if match is not None)
    assert abs(straight_on - resumed) < 0.6
    assert not any(line.startswith("epoch 1:") for line in ends[1])
    finished = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip().splitlines()[-1] == ends[1][-1]


def page(rank: int, n: int, folder: str, code: list[str]) -> list[str]:
    quiet_frameworks()
    os.environ["LOCAL_RANK"] = str(rank)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in code:
        exec(compile(block, "docs/lightning.md", "exec"), names)
    return sorted(names)


@pytest.mark.slow
def test_the_blocks_of_the_page_run(workers, tmp_path):
    from tests.test_docs import blocks

    code = [block.code for block in blocks(ROOT / "docs" / "lightning.md", "python no-run")]
    assert len(code) == 6
    found, _ = workers(2, page, str(tmp_path), code)
    assert {"trainer", "fabric"} <= set(found)
