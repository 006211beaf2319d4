"""The checkpoints of one path: what ``latest`` names is whole, whenever a save is interrupted, and nothing is left over."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import re
import shutil
import signal
import threading
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from decent_dp.checkpoint import files, index
from decent_dp.checkpoint.files import MANIFEST, Reader, open_worker, read_manifest, worker_name, write_worker
from decent_dp.checkpoint.tree import encode
from decent_dp.errors import CheckpointError
from tests.faulty_disk import Died, FaultyDisk
from tests.small_checkpoints import check, check_tidy, names_in, save, start_and_save, tree_of, write

# -- names -----------------------------------------------------------------------------------------------------------------


def test_names_of_folders():
    name = index.folder_name(500, "run", 3)
    assert re.fullmatch(r"step-00000500-[0-9a-f]{6}", name)
    assert name == index.folder_name(500, "run", 3)
    others = {index.folder_name(500, run, ordinal) for run in ("run", "again") for ordinal in range(50)}
    assert len(others) == 100
    assert index.folder_name(10**9, "run", 0).startswith("step-1000000000-")


def test_a_path_that_is_not_there_yet(tmp_path):
    path = tmp_path / "a" / "b"
    assert (index.read_latest(path), index.complete(path), index.leftovers(path)) == ([], [], [])
    name = save(path, 3)
    assert index.complete(path) == [name]
    assert check(path / name) == 3


def test_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = save(Path("runs"), 1)
    assert check(tmp_path / "runs" / name) == 1
    assert save(Path(), 2) in names_in(tmp_path)


def test_the_last_k_are_kept(tmp_path):
    saved: list[str] = []
    for round_ in (5, 7, 6, 9):  # a run that went back to an older one goes on from there
        saved.insert(0, save(tmp_path, round_, keep=2))
        assert index.read_latest(tmp_path) == index.complete(tmp_path) == saved[:2]
        check_tidy(tmp_path)
    assert (tmp_path / "latest").read_text() == f"{saved[0]}\n{saved[1]}\n"
    save(tmp_path, 10, keep=1)
    assert len(index.complete(tmp_path)) == 1
    check_tidy(tmp_path)
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        save(tmp_path, 11, keep=0)


def test_the_same_commit_again_with_less_to_keep(tmp_path):
    first, second = save(tmp_path, 1, keep=2), index.folder_name(2, "run", 2)
    manifest = write(index.make_folder(tmp_path, second), 2)
    assert index.commit(tmp_path, second, manifest, 2) == [second, first]
    assert index.commit(tmp_path, second, manifest, 1) == [second]
    check_tidy(tmp_path)
    assert check(tmp_path / second) == 2


def test_what_is_the_users_own_stays(tmp_path):
    name = save(tmp_path, 1)
    shutil.copytree(tmp_path / name, tmp_path / "best")
    shutil.copytree(tmp_path / name, tmp_path / "step-00000099-abcdef")  # brought from another path, say
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log").write_text("mine")
    (tmp_path / "logs" / "unlisted").write_text("")
    (tmp_path / "step-00000098-abcdef").symlink_to(tmp_path / "logs")
    for round_ in range(2, 6):
        start_and_save(tmp_path, round_, run=str(round_))
    assert check(tmp_path / "best") == 1
    assert check(tmp_path / "step-00000099-abcdef") == 1
    assert {"notes.txt", "logs", "step-00000098-abcdef"} <= names_in(tmp_path)
    assert names_in(tmp_path / "logs") == {"log", "unlisted"}
    assert index.is_checkpoint(tmp_path / "best")
    assert not index.is_checkpoint(tmp_path / "logs")
    assert not (tmp_path / name).exists()


def test_folders_that_were_removed_by_hand(tmp_path, caplog):
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    assert index.complete(tmp_path) == [new, old]
    assert caplog.text == ""
    shutil.rmtree(tmp_path / new)
    assert index.read_latest(tmp_path) == [new, old]
    assert index.complete(tmp_path) == [old]
    assert f"names {new}, which is gone" in caplog.text
    newest = save(tmp_path, 3)
    assert index.complete(tmp_path) == [newest, old], "what is gone takes no other's place"
    save(tmp_path, 4)
    assert index.complete(tmp_path)[1] == newest


def test_a_folder_that_cannot_be_removed_is_logged_and_tried_again(tmp_path, caplog, monkeypatch):
    old = save(tmp_path, 1, keep=1)
    real = os.unlink

    def unlink(path: Any) -> None:
        if worker_name(1) in str(path):
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        new = save(tmp_path, 2, keep=1)
    assert old in caplog.text
    assert index.complete(tmp_path) == [new]
    assert not index.is_checkpoint(tmp_path / old)
    save(tmp_path, 3, keep=1)
    check_tidy(tmp_path)


def test_files_of_the_user_in_a_checkpoints_folder_stay(tmp_path, caplog):
    old = save(tmp_path, 1, keep=1)
    (tmp_path / old / "eval.json").write_text("mine")
    (tmp_path / old / "plots").mkdir()
    (tmp_path / old / "worker-0000.safetensors.tmp").write_text("left over")
    (tmp_path / old / ".tmpQ4x7Zb").write_text("left over")
    for round_ in range(2, 5):
        start_and_save(tmp_path, round_, run=str(round_), keep=1)
    assert names_in(tmp_path / old) == {"eval.json", "plots"}
    assert (tmp_path / old / "eval.json").read_text() == "mine"
    assert caplog.text.count(old) == 1
    assert "no save made" in caplog.text
    shutil.rmtree(tmp_path / old)
    check_tidy(tmp_path)


def test_discard_removes_only_what_is_incomplete(tmp_path):
    named = save(tmp_path, 1)
    shutil.copytree(tmp_path / named, tmp_path / "step-00000002-abcdef")
    write(index.make_folder(tmp_path, "step-00000003-abcdef"), 3)
    assert index.leftovers(tmp_path) == ["step-00000003-abcdef"]
    for name in (named, "step-00000002-abcdef", "../step-00000003-abcdef", "step-00000009-abcdef"):
        assert index.discard(tmp_path, [name]) == []
    assert index.discard(tmp_path, ["step-00000003-abcdef"]) == ["step-00000003-abcdef"]
    assert names_in(tmp_path) == {"latest", named, "step-00000002-abcdef"}


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../step-00000001-aaaaaa", "a/b", "step-1-aaaaaa", "step-00000001-aaaaaa\n", "/etc"]
)
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    path = tmp_path / "runs"
    with pytest.raises(ValueError, match="is no name of a checkpoint's folder"):
        index.make_folder(path, name)
    with pytest.raises(ValueError, match="is no name of a checkpoint's folder"):
        index.switch_latest(path, [name])
    assert names_in(tmp_path) == set()


A, B = "step-00000001-aaaaaa", "step-00000002-bbbbbb"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        A,
        f"{A}\n\n",
        f"{A}\n{A}\n",
        "../x\n",
        f"{A}\n../{B}\n",
        f"{A}/..\n",
        f"{A}\r\n",
        "best\n",
        f" {A}\n",
        b"\xff\n",
        "/etc/passwd\n",
    ],
)
def test_a_broken_latest_is_named(tmp_path, content):
    (tmp_path / "latest").write_bytes(content if isinstance(content, bytes) else content.encode())
    for look in (index.read_latest, index.complete, index.prune, index.leftovers, lambda path: save(path, 3)):
        with pytest.raises(CheckpointError, match="latest cannot be used"):
            look(tmp_path)


def test_a_latest_that_is_no_file(tmp_path):
    name = save(tmp_path, 1)
    (tmp_path / "latest").rename(tmp_path / "elsewhere")
    for target in ("elsewhere", name, "nowhere"):
        (tmp_path / "latest").symlink_to(tmp_path / target)
        with pytest.raises(CheckpointError, match="latest cannot be used: it is no plain file"):
            index.read_latest(tmp_path)
        (tmp_path / "latest").unlink()
    (tmp_path / "latest").mkdir()
    with pytest.raises(CheckpointError, match="it is no plain file"):
        index.read_latest(tmp_path)


def test_a_folder_that_is_a_link_is_no_checkpoint(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    name = save(elsewhere, 1)
    path = tmp_path / "runs"
    path.mkdir()
    (path / A).symlink_to(elsewhere / name)
    index.switch_latest(path, [A])
    with pytest.raises(CheckpointError, match=f"{A}/manifest.json is missing"):
        index.complete(path)
    save(path, 2, keep=1)
    assert check(elsewhere / name) == 1


# -- a fault at every operation --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of which the next save drops one, and what a killed run left over."""
    path = tmp_path_factory.mktemp("before")
    save(path, 1)
    save(path, 2)
    write_worker(index.make_folder(path, index.folder_name(9, "killed", 1)), 0, *reversed(encode(tree_of(9, 0), "")))
    (path / "latest.tmp").write_text("step-0")
    return path


def save_on(disk: FaultyDisk, path: Path) -> type[BaseException] | None:
    with disk.installed():
        try:
            start_and_save(path, 3, "third")
        except (Died, OSError, CheckpointError) as error:
            return type(error)
    return None


def operations(before: Path, folder: Path) -> list[str]:
    shutil.copytree(before, folder / "dry")
    (folder / "aside").mkdir()
    disk = FaultyDisk(folder / "dry", folder / "aside", 0, dies=False)
    assert save_on(disk, folder / "dry") is None
    assert [check(folder / "dry" / name) for name in index.read_latest(folder / "dry")] == [3, 2]
    check_tidy(folder / "dry")
    return disk.operations


# What is lost when the process dies, and perhaps the machine with it.
LOSSES = {
    "killed": ("none", False),
    "power, names kept": ("none", True),
    "power, names lost": ("all", False),
    "power, all lost": ("all", True),
    "power, names lost inside": ("inside", True),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("first", [False, True], ids=["the third save", "the first save"])
def test_whenever_it_dies_latest_names_whole_checkpoints(before, tmp_path, monkeypatch, loss, first):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk below has its own
    possible = ([], [3]) if first else ([2, 1], [3, 2])
    outcomes = []
    for at in count(1):
        path, aside = tmp_path / f"{at}" / "path", tmp_path / f"{at}" / "aside"
        aside.mkdir(parents=True)
        if not first:
            shutil.copytree(before, path)
        disk = FaultyDisk(path, aside, at, dies=True)
        died = save_on(disk, path)
        disk.lose_power(*LOSSES[loss])
        rounds = [check(path / name) for name in index.read_latest(path)]
        assert rounds in possible, (at, disk.operations[-1])
        outcomes.append(rounds)
        newest = start_and_save(path, 4, "fourth")
        assert index.read_latest(path)[0] == newest
        assert [check(path / name) for name in index.read_latest(path)] == [4, *rounds[:1]]
        check_tidy(path)
        shutil.rmtree(tmp_path / f"{at}")
        if died is None:
            break
    assert len(outcomes) > (30 if first else 50)
    assert outcomes[0] == possible[0]
    assert outcomes[-1] == possible[1], "the save has returned, and was not durable"


def test_whatever_fails_latest_names_whole_checkpoints(before, tmp_path, monkeypatch):
    """A disk that is full for one operation."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    steps = operations(before, tmp_path)
    failed = 0
    for at in range(1, len(steps) + 1):
        path, aside = tmp_path / f"{at}" / "path", tmp_path / f"{at}" / "aside"
        shutil.copytree(before, path)
        aside.mkdir()
        error = save_on(FaultyDisk(path, aside, at, dies=False), path)
        failed += error is not None
        rounds = [check(path / name) for name in index.read_latest(path)]
        assert rounds in ([2, 1], [3, 2]), (at, steps[at - 1])
        assert rounds == [3, 2] or error is not None
        # At most what is kept, what was left over before, and one that could not be removed.
        assert len([entry for entry in path.iterdir() if entry.is_dir()]) <= 4
        start_and_save(path, 4, "fourth")
        check_tidy(path)
        shutil.rmtree(tmp_path / f"{at}")
    assert failed > 20


def test_what_a_worker_has_written_is_durable_before_it_says_so(tmp_path):
    path, aside = tmp_path / "path", tmp_path / "aside"
    aside.mkdir()
    disk = FaultyDisk(path, aside, 0, dies=True)
    with disk.installed():
        folder = index.make_folder(path, A)
        info = write_worker(folder, 0, *reversed(encode(tree_of(1, 0), "")))
    disk.lose_power(*LOSSES["power, all lost"])
    assert (folder / worker_name(0)).stat().st_size == info.bytes
    with Reader(folder / worker_name(0), 0) as reader:
        assert torch.equal(reader.tree()["w"], tree_of(1, 0)["w"])


def test_a_folder_is_no_checkpoint_any_more_before_anything_else_of_it_goes(tmp_path):
    path, aside = tmp_path / "path", tmp_path / "aside"
    aside.mkdir()
    name = save(path, 1, keep=1)
    disk = FaultyDisk(path, aside, 0, dies=True)
    with disk.installed():
        save(path, 2, keep=1)
    gone = disk.operations.index(f"unlink {MANIFEST}")
    assert disk.operations[gone + 1 : gone + 3] == [f"open {name}", f"fsync {name}"]
    rest = disk.operations[gone + 3 :]
    assert [step for step in rest if step.startswith(("unlink", "rmdir"))][-2:] == ["unlink unlisted", f"rmdir {name}"]
    assert not any(step.startswith("unlink worker") and not step.endswith(".tmp") for step in disk.operations[:gone])


def test_a_switch_that_fails(tmp_path, monkeypatch):
    old, newer = save(tmp_path, 1), save(tmp_path, 2)
    everything = sorted(tmp_path.rglob("*"))
    real_replace, real_sync = os.replace, files.sync_folder

    def no_replace(source: Any, target: Any) -> None:
        if Path(target).name == "latest":
            raise OSError(28, "No space left on device", str(target))
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", no_replace)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 3)
    assert index.complete(tmp_path) == [newer, old]
    assert [file for file in sorted(tmp_path.rglob("*")) if file.name != "unlisted"] == everything
    monkeypatch.setattr(os, "replace", real_replace)

    def no_sync(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(5, "Input/output error", str(folder))
        real_sync(folder)

    monkeypatch.setattr(files, "sync_folder", no_sync)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, 4)
    # It may be either after a power failure, so nothing goes.
    assert len(index.complete(tmp_path)) == 2
    assert [check(tmp_path / name) for name in (*index.complete(tmp_path), old)] == [4, 2, 1]
    monkeypatch.setattr(files, "sync_folder", real_sync)
    save(tmp_path, 5)
    check_tidy(tmp_path)


def test_a_full_disk_again_and_again_leaves_no_more(before, tmp_path, monkeypatch):
    path = tmp_path / "path"
    shutil.copytree(before, path)
    monkeypatch.setattr(
        os, "replace", lambda *args: (_ for _ in ()).throw(OSError(28, "No space left on device", str(args[0])))
    )
    seen = set()
    for round_ in range(10, 20):
        with pytest.raises(OSError, match="No space"):
            save(path, round_)
        seen.add(sum(1 for _ in path.rglob("*")))
    assert len(seen) == 1
    monkeypatch.undo()
    real = files.save_file

    def half(tensors: Any, path: Path, metadata: Any) -> None:
        real(tensors, path, metadata)
        raise files.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", half)
    for round_ in range(20, 25):
        with pytest.raises(OSError, match="No space"):
            save(path, round_)
        seen.add(sum(1 for _ in path.rglob("*")))
    assert len(seen) == 1


# -- several at a time -----------------------------------------------------------------------------------------------------


def test_workers_write_into_one_folder_at_the_same_time(tmp_path):
    n, path = 8, tmp_path / "a" / "b"
    start, infos, errors = threading.Barrier(n), {}, []

    def work(rank: int) -> None:
        try:
            for round_ in range(5):
                start.wait()
                text, tensors = encode(tree_of(round_, rank, 5000), "")
                infos[round_, rank] = write_worker(
                    index.make_folder(path, index.folder_name(round_, "run", round_)), rank, tensors, text
                )
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for round_ in range(5):
        name = index.folder_name(round_, "run", round_)
        manifest = files.Manifest(round_, n, tuple(infos[round_, rank] for rank in range(n)), None)
        index.commit(path, name, manifest, 3)
        for rank in range(n):
            with open_worker(path / name, rank) as reader:
                assert torch.equal(reader.tree()["w"], tree_of(round_, rank, 5000)["w"])
    assert len(index.complete(path)) == 3


def test_all_workers_discard_a_failed_save_at_the_same_time(tmp_path, caplog):
    n = 8
    start = threading.Barrier(n)
    gone: list[str] = []

    def discard(name: str) -> None:
        start.wait(20)
        gone.extend(index.discard(tmp_path, [name]))

    for round_ in range(20):
        name = index.folder_name(round_, "run", round_)
        write(index.make_folder(tmp_path, name), round_, n=3)
        gone.clear()
        threads = [threading.Thread(target=discard, args=(name,)) for _ in range(n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert set(gone) == {name}
        assert names_in(tmp_path) == set()
    assert caplog.text == ""


def test_reading_beside_a_writer_and_pruner(tmp_path):
    stop, failures, read = threading.Event(), [], []
    save(tmp_path, 0, keep=1)

    def look() -> None:
        while not stop.is_set():
            try:
                read.append(check(tmp_path / index.read_latest(tmp_path)[0]))
            except CheckpointError as error:
                if "is missing" not in str(error):
                    failures.append(error)
            except BaseException as error:
                failures.append(error)
                raise

    thread = threading.Thread(target=look)
    thread.start()
    ended = time.monotonic() + 1.5
    for round_ in count(1):
        save(tmp_path, round_, keep=1)
        if time.monotonic() > ended and round_ > 20:
            break
    stop.set()
    thread.join(20)
    assert failures == []
    assert len(set(read)) > 3
    assert read == sorted(read)  # never back to an older one


def _save_for_ever(path: Path, run: str) -> None:
    torch.set_num_threads(1)
    names = index.read_latest(path)
    first = read_manifest(path / names[0]).round + 1 if names else 0
    stale = index.leftovers(path)
    for round_ in count(first):
        save(path, round_, run, keep=3)
        index.discard(path, stale)


@pytest.mark.timeout(100)
def test_kill_9_at_random_moments(tmp_path):
    context, draw, newest = multiprocessing.get_context("forkserver"), random.Random(20), -1
    for attempt in range(10):
        process = context.Process(target=_save_for_ever, args=(tmp_path, f"run {attempt}"), daemon=True)
        process.start()
        ended, goal = time.monotonic() + 20, newest + draw.randrange(1, 4)
        while time.monotonic() < ended:  # until some saves are done, and a moment longer
            names = index.read_latest(tmp_path)
            if names and int(names[0][5:13]) >= goal:
                break
            time.sleep(0.002)
        time.sleep(draw.random() * 0.03)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
        rounds = [check(tmp_path / name) for name in index.read_latest(tmp_path)]
        assert rounds == sorted(rounds, reverse=True)
        assert rounds[0] >= goal
        newest = rounds[0]
        # What is kept, what the dead one was at, and what it was about to remove.
        assert sum(entry.is_dir() for entry in tmp_path.iterdir()) <= 5
    start_and_save(tmp_path, newest + 1, "last", keep=3)
    check_tidy(tmp_path)
