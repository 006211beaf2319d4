"""The curves of a run, and the statuses that ``decent-dp watch`` shows, against independent computations."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import decent_dp
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.logging import Recorder, publish, publisher
from decent_dp.logging.status import FolderEntries, Status, StoreEntries, open_folder
from decent_dp.tools.cli import main
from decent_dp.tools.cli import watch as watching
from decent_dp.tools.cli.inputs import BadInputError
from decent_dp.transport import InProcessTransport, run_replicas
from decent_dp.transport.collectives import Collectives
from decent_dp.transport.store import server_of
from tests.helpers import SGD, alone, error_of, loss, net

SHARED = ["loss/mean", "distance", "step/ms", "step/waited_ms", "sent/bytes_per_step", "sent/Mbit_per_s"]
SKIPPED = ["skipped/rejected_blocks", "skipped/nonfinite_rounds"]


# -- curves ----------------------------------------------------------------------------------------------------------------


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The points of all curves in a folder, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def distance_of(model: Any) -> float:
    """The root mean square of the distances of all replicas to their mean, in NumPy. Called by all workers."""
    own = np.concatenate([param.detach().double().numpy().ravel() for param in model.parameters()])
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return float(np.sqrt(np.square(np.stack(found) - np.mean(found, axis=0)).sum(1).mean()))


def of_all(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@contextlib.contextmanager
def counted(kind: Any, name: str) -> Iterator[list[int]]:
    """Counts the calls of a method."""
    calls: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(kind, name)
        patch.setattr(kind, name, lambda self, *args: (calls.append(1), original(self, *args))[1])
        yield calls


def record(rank: int, folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Trains with ``gossip``, and writes two points in 10 steps: what they are to be, of all workers and of this one."""
    model = net()
    optimizer = torch.optim.SGD([{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 0.05}], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    replica = decent_dp.gossip(model, optimizer, topology="ring")
    board = Recorder(replica, folder, every=5, each_worker=True)
    shared, local, losses = [], [], []
    with counted(Collectives, "gather") as gathers, counted(Tensor, "item") as reads:
        for step in range(1, 11):
            optimizer.zero_grad()
            value = loss(model, step, rank) * (rank + 1)
            value.backward()
            optimizer.step()
            losses.append(float(value.detach().numpy()))
            calls = len(gathers), len(reads)
            board.log(value)
            if step % 5:
                assert (len(gathers), len(reads)) == calls, "a step that writes no point needs no worker and no device"
            else:
                sent = replica.stats().bytes_sent
                number = losses[-5:]
                shared.append(
                    {"loss/mean": np.mean(of_all(number)), "distance": distance_of(model), "sent": np.mean(of_all(sent))}
                )
                local.append({"loss/local": np.mean(number), "rate": scheduler.get_last_lr()[0], "sent": sent})
            scheduler.step()
    with replica.averaged():
        board.add("accuracy", torch.tensor(0.5))
    replica.close()
    return shared, local


def record_join(rank: int, folder: Path) -> list[float]:
    """Workers make 4 and 6 steps in ``join``; the losses."""
    model = net()
    replica = DecentralizedDataParallel(model, SGD)
    board = Recorder(replica, folder, every=2, distance=False)
    losses = []
    with replica.join():
        for step in range(4 + 2 * rank):
            value = loss(replica, step, rank)
            value.backward()
            board.log(value.item())
            losses.append(value.item())
    board.flush()
    replica.close()
    return losses


def record_resumed(rank: int, folder: Path) -> list[float]:
    """Six steps, one of them without a loss; then a second start from the state of the fourth, with six more; all losses."""
    losses, state = [], None
    for start in range(2):
        model = net()
        optimizer = SGD(model.parameters())
        replica = decent_dp.gossip(model, optimizer)
        board = Recorder(replica, folder, every=2, distance=False)
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
            replica.load_state_dict(state[2])
        for step in range(6):
            optimizer.zero_grad()
            value = loss(model, 10 * start + step, rank)
            value.backward()
            optimizer.step()
            value = value.detach() * (float("nan") if (start, step, rank) == (0, 1, 1) else 1)
            with torch.inference_mode(step == 4):
                board.log(value)
            losses.append(value.item())
            if step == 3 and not start:
                state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict(), replica.state_dict()
        replica.close()
    return losses


def all_recordings(rank: int, n: int, folder: Path) -> Any:
    tempfile.tempdir = str(folder)  # statuses, too
    parts = record, record_join, record_resumed
    return [part(rank, folder / part.__name__) for part in parts]


def test_curves_are_those_of_an_independent_computation(workers, tmp_path):
    pytest.importorskip("tensorboard")
    recorded, joined, resumed = zip(*workers(2, all_recordings, tmp_path), strict=True)

    # A point of all workers, and one of each.
    found = curves(tmp_path / "record")
    assert sorted(found) == sorted([*SHARED, *SKIPPED, "loss/local", "rate", "accuracy"])
    assert all([step for step, _ in points] == [5, 10] for tag, points in found.items() if tag != "accuracy")
    for number, expected in enumerate(recorded[0][0]):
        assert found["loss/mean"][number][1] == pytest.approx(expected["loss/mean"], rel=1e-6)
        assert found["distance"][number][1] == pytest.approx(expected["distance"], rel=1e-5)
        assert expected["distance"] > 1e-3
    # The first step comes before the first point of time.
    sent = [entry["sent"] for entry in recorded[0][0]]
    assert found["sent/bytes_per_step"][1][1] == pytest.approx((sent[1] - sent[0]) / 5)
    assert sent[1] > sent[0]
    milliseconds = [value for _, value in found["step/ms"]]
    rates = [8e-3 * b / ms for (_, b), ms in zip(found["sent/bytes_per_step"], milliseconds, strict=True)]
    assert [value for _, value in found["sent/Mbit_per_s"]] == pytest.approx(rates, rel=0.5)  # a mean of quotients
    assert all(0 <= waited <= ms for (_, waited), ms in zip(found["step/waited_ms"], milliseconds, strict=True))
    assert all(value == 0 for tag in SKIPPED for _, value in found[tag])
    assert found["accuracy"] == [(10, 0.5)]
    for rank in range(2):
        own = curves(tmp_path / "record" / f"worker{rank}")
        for number, expected in enumerate(recorded[rank][1]):
            assert own["loss/local"][number] == (5 * number + 5, pytest.approx(expected["loss/local"], rel=1e-6))
            assert own["rate"][number][1] == pytest.approx(expected["rate"], rel=1e-6)
        assert own["sent/bytes_per_step"][1][1] == (recorded[rank][1][1]["sent"] - recorded[rank][1][0]["sent"]) / 5
        assert "loss/mean" not in own
        if rank == 0:
            assert found["loss/local"] == own["loss/local"]

    # In join no worker waits for one that has run out; the point after it has all.
    found = curves(tmp_path / "record_join")
    assert found["loss/local"][:2] == [(2, pytest.approx(np.mean(joined[0][:2]))), (4, pytest.approx(np.mean(joined[0][2:])))]
    assert found["loss/mean"] == [(6, pytest.approx(np.mean([*joined[0], *joined[1]])))]
    assert "distance" not in found

    # A second start replaces what the first had written after the checkpoint. A NaN is in one point, and not in the next.
    found = curves(tmp_path / "record_resumed")
    first, second = np.mean(resumed, axis=0)[:6], np.mean(resumed, axis=0)[6:]
    expected = [*first[:4].reshape(2, 2).mean(1), *second.reshape(3, 2).mean(1)]
    assert found["loss/mean"] == [(2 * i + 2, pytest.approx(value, nan_ok=True)) for i, value in enumerate(expected)]
    assert np.isnan(expected).tolist() == [True, False, False, False, False]


def test_differences_between_workers_are_the_same_error_on_all(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def refusals(at: Any) -> list[str]:
        replica = decent_dp.gossip(model := torch.nn.Linear(2, 2), SGD(model.parameters()), transport=at)
        found = [
            error_of(lambda: Recorder(replica, tmp_path, every=5 + at.rank)),
            error_of(lambda: Recorder(replica, tmp_path, every=0)),
            error_of(lambda: Recorder(replica, Path(__file__) / "below")),
        ]
        board = Recorder(replica, tmp_path, every=1, distance=False)
        replica.optimizers[0].step()
        found.append(error_of((lambda: board.log(1.0)) if at.rank else replica.consensus_distance))
        replica.close()
        return found

    found, other = run_replicas(2, refusals)
    assert found == other
    for text, words in zip(
        found, ("every is 5 on worker 0 and 6 on worker 1", "at least 1, got 0", "test_logging.py"), strict=False
    ):
        assert words in text
    assert found[3].startswith(
        "OutOfStepError: worker 0 has come to a gather of consensus_distance() and worker 1 to a gather of"
    )


def test_losses_of_any_kind(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = alone(net())
    board = Recorder(model, tmp_path, every=3)
    for value in (1, torch.tensor([2.0], dtype=torch.bfloat16), torch.tensor(4.5, dtype=torch.float64, requires_grad=True)):
        loss(model, 0).backward()
        board.log(value)
    assert curves(tmp_path)["loss/mean"] == [(3, 2.5)]
    for wrong, error in ((torch.ones(2), ValueError), (torch.tensor(1j), ValueError), ("1", TypeError), (None, TypeError)):
        with pytest.raises(error, match="log takes the loss of a step"):
            board.log(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Recorder takes the DecentralizedDataParallel.*got a Sequential"):
        Recorder(net(), tmp_path)  # type: ignore[arg-type]
    model.close()
    with pytest.raises(RuntimeError, match="was closed"):
        board.flush()


def test_a_disk_that_fails_ends_no_training(tmp_path, monkeypatch, caplog):
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = alone(net())
    board = Recorder(model, tmp_path / "board", every=1)
    (tmp_path / "board").rmdir()
    (tmp_path / "board").write_text("")
    loss(model, 0).backward()
    board.log(1.0)
    assert all(message.startswith(f"the curves in {tmp_path}/board cannot be written: ") for message in caplog.messages)
    assert caplog.messages
    model.close()


def test_a_missing_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match=r"Recorder needs tensorboard; .*pip install -e '\.\[tensorboard\]'"):
        Recorder(alone(net()), tmp_path)


# -- statuses --------------------------------------------------------------------------------------------------------------

A = Status(
    run="abcdef0123",
    name="train.py, Net",
    world_size=2,
    store="",
    rank=0,
    host="node1",
    pid=os.getpid(),
    began=0.0,
    beat=1,
    round=10,
    idle_s=0.1,
    step_ms=12.5,
    waited_ms=0.5,
    mbit_s=93.0,
    distance=None,
)


def in_workers(rank: int, n: int, folder: Path) -> Any:
    """Trains while worker 0 watches, on its machine and through the store; then all close."""
    tempfile.tempdir = str(folder / str(rank % 2))  # two machines
    os.makedirs(tempfile.tempdir, exist_ok=True)
    publisher.BEAT = 0.05
    model = net()
    optimizer = SGD(model.parameters())
    replica = decent_dp.gossip(model, optimizer, topology="complete")
    publish(replica)
    publish(replica)
    began, waited = time.monotonic(), 0
    for step in range(20):
        optimizer.zero_grad()
        loss(model, step, rank).backward()
        optimizer.step()
        time.sleep(0.01)
    distance = replica.consensus_distance()
    seconds, stats, found = time.monotonic() - began, replica.stats(), {}
    if rank == 0:
        entries, runs = watching._find(None)
        view = watching.View(*watching._choose(runs, None)[:1], entries)
        while not view.settled or view._statuses[n - 1].round < 20:
            assert view.look() is None
            time.sleep(0.01)
        found = {rank: replace(status, pid=0) for rank, status in view._statuses.items()}
        assert [row[-1] for row in map(view._row, range(n))] == ["trains"] * n
    dist.barrier()
    replica.close()
    assert not list((Path(tempfile.tempdir) / f"decent_dp-{os.getuid()}").glob(f"*-{rank}.json"))
    dist.barrier()
    if rank == 0:
        assert re.match(r"the run has ended\. Its last round: 20", view.look() or "")
        assert [row[-1] for row in map(view._row, range(n))] == ["ended"] * n
    return found, distance, seconds, stats, waited


def test_watch_sees_all_workers_across_machines(workers, tmp_path):
    results = workers(3, in_workers, tmp_path)
    found = results[0][0]
    assert sorted(found) == [0, 1, 2]
    for rank, (_, distance, seconds, stats, _) in enumerate(results):
        status = found[rank]
        assert (status.rank, status.world_size, status.host, status.round) == (rank, 3, socket.gethostname(), 20)
        assert status.distance == distance
        assert 10 < status.step_ms < 1e3 * seconds / 18
        assert 0 <= status.waited_ms <= status.step_ms
        # Over the same rounds: bytes per round are those of the counters.
        per_round = stats.bytes_sent / stats.rounds
        assert status.mbit_s == pytest.approx(8e-3 * per_round / status.step_ms, rel=0.3)


def trained_alone() -> decent_dp.Gossip:
    model = net()
    optimizer = SGD(model.parameters())
    replica = decent_dp.gossip(model, optimizer, transport=InProcessTransport())
    publish(replica)
    for step in range(3):
        loss(model, step).backward()
        optimizer.step()
    return replica


def test_one_worker_without_a_launcher_is_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(publisher, "BEAT", 0.05)
    monkeypatch.setenv("COLUMNS", "100")
    kept = [trained_alone()]
    deadline = time.monotonic() + 30
    while "     3" not in (out := (main(["watch", "--once"]), capsys.readouterr().out)[1]):
        assert time.monotonic() < deadline, out
    assert re.search(rf"run \w{{8}} \({Path(sys.argv[0]).name}, Sequential, 1 worker\)\n", out)
    assert re.search(rf"\n +0 +{socket.gethostname()} +3 +[\d.,]+ +0 +0 +- +trains\n", out)
    (file,) = (tmp_path / f"decent_dp-{os.getuid()}").glob("*.json")
    assert file.stat().st_mode & 0o777 == 0o600
    kept.clear()  # without close()
    gc.collect()
    while file.exists():
        assert time.monotonic() < deadline
    assert main(["watch"]) == 1
    assert capsys.readouterr().err.startswith("decent-dp: no worker on this machine publishes. Call decent_dp.logging.publish")


class Known:
    """Entries that a test changes."""

    def __init__(self, *statuses: Status) -> None:
        self.now = {status.rank: status for status in statuses}

    def runs(self) -> Sequence[Status]:
        return list(self.now.values())[:1]

    def statuses(self, run: Status) -> dict[int, Status]:
        if self.now is None:
            raise ConnectionError
        return self.now


def test_states_of_a_worker_by_the_clock_of_the_reader():
    now, known = [100.0], Known(A, replace(A, rank=1))
    view = watching.View(A, known, clock=lambda: now[0])
    states = lambda: [row[-1] for row in map(view._row, range(2))]  # noqa: E731
    assert view.look() is None
    assert not view.settled
    assert states() == ["trains", "trains"]
    now[0] += 6
    known.now = {0: replace(A, beat=2, idle_s=6.0), 1: replace(A, rank=1)}
    assert view.look() is None
    assert not view.settled
    assert states() == ["no round for 6 s", "silent for 6 s"]
    known.now = {0: replace(A, beat=3, idle_s=6.0, step_ms=3000.0)}  # such a step takes that long
    assert view.look() is None
    assert view.settled
    assert states() == ["trains", "ended"]
    now[0] += 16
    assert view.look() == "no worker has said anything for 16 s: the run was stopped or killed. Its last round: 10."
    known.now = {}
    assert view.look() == "the run has ended. Its last round: 10."
    known.now = None
    assert view.look().startswith("the run's store does not answer any more")


def test_what_is_in_a_status_moves_no_cursor():
    view = watching.View(A, Known(replace(A, host="a\x1b[2Jb", name="\x1b]0;x\x07", distance=float("nan"))))
    view.look()
    assert view._row(0) == ["0", "a?[2Jb", "10", "12.5", "0.5", "93", "nan", "trains"]
    assert view._row(1)[-1] == "has not said anything"
    assert "\x1b" not in watching._describe(replace(A, name="\x1b]0;x\x07"))
    for text in ("", "[]", "{}", "1" * 5000, "[" * 100_000, json.dumps({**json.loads(A.to_json()), "round": "1"})):
        assert Status.from_json(text) is None
    assert Status.from_json(A.to_json()) == A


def test_the_folder_is_of_this_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = open_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(PermissionError, match="a folder of this user alone"):
        open_folder()
    assert main(["watch"]) == 1
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="a folder of this user alone"):
        open_folder()


def test_files_of_dead_workers_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    entries = FolderEntries(tmp_path)
    entries.write(replace(A, began=2.0))
    entries.write(replace(A, run="older", began=1.0))
    entries.write(replace(A, run="dead", pid=dead.pid))
    (tmp_path / "torn.json").write_text("{")
    assert [run.run for run in entries.runs()] == ["dead", "older", "abcdef0123"]  # it may be in another container
    for name in ("dead-0.json", "torn.json", "older-0.json"):
        os.utime(tmp_path / name, (0, time.time() - 20))
    assert [run.run for run in entries.runs()] == ["older", "abcdef0123"]
    assert {path.name for path in tmp_path.iterdir()} == {"older-0.json", "abcdef0123-0.json"}
    chosen, others = watching._choose(entries.runs(), None)
    assert (chosen.run, [run.run for run in others]) == ("abcdef0123", ["older"])
    assert watching._choose(entries.runs(), "old")[0].run == "older"
    with pytest.raises(BadInputError, match=r"no run 'x': there is older \(train.py, Net, 2 workers\), abcdef01 "):
        watching._choose(entries.runs(), "x")


def test_bad_addresses(capsys):
    for address in ("host", "host:", ":1", "host:99999", "host:x"):
        assert main(["watch", address]) == 2
        assert capsys.readouterr().err.startswith("decent-dp: an address is HOST:PORT, such as 10.0.0.1:29500, got ")


def test_a_store_that_is_gone_ends_the_watch(monkeypatch, capsys):
    monkeypatch.setattr(watching, "_ANSWER", 5.0)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = "{}:{}".format(*(server_of(dist.PrefixStore("a", dist.PrefixStore("b", server))) or ()))
    assert main(["watch", address]) == 1
    assert f"no worker publishes in the store at {address}" in capsys.readouterr().err
    entries = StoreEntries(address, 5.0)
    for run in (replace(A, run="first"), A):
        entries.announce(run)
    entries.write(A)
    found, runs = watching._find(address)
    assert [run.run for run in runs] == ["abcdef0123"]
    view = watching.View(runs[0], found)
    assert view.look() is None
    del server
    assert (
        view.look()
        == "the run's store does not answer any more: the run has ended, or its machine is gone. Its last round: 10."
    )
    monkeypatch.setattr(watching, "_ANSWER", 0.5)
    assert main(["watch", address]) == 1
    assert "no store answers at 127.0.0.1:" in capsys.readouterr().err


def test_a_status_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, caplog):
    replica = decent_dp.gossip(model := net(), SGD(model.parameters()), transport=InProcessTransport())
    # Afterwards: torch makes folders there when an optimizer is made.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    publish(replica)
    (listener,) = replica.listeners
    listener.thread.join(10)
    assert not listener.thread.is_alive()
    [message] = caplog.messages
    assert message.startswith("the status of this worker cannot be published: [Errno 2] No such file or directory: ")
    replica.close()
    with pytest.raises(RuntimeError, match="was closed"):
        publish(replica)
