"""The checkpoints of one folder: whatever dies, and wherever, what is complete is found, and what is not is never loaded."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from decent_dp.checkpoint import folder, latest, read_parameters
from decent_dp.checkpoint.files import Shard, shard_name
from decent_dp.checkpoint.folder import Sight, choose, claim, complete, look, make_folder, prune, step_name, steps_in
from decent_dp.errors import CheckpointError
from decent_dp.serialization import loaded
from tests.faulty_disk import Died, FaultyDisk
from tests.small_checkpoints import check, check_tidy, names_in, newest, save, tree_of, write, write_tree

# -- names -----------------------------------------------------------------------------------------------------------------


def test_names_are_in_the_order_of_attempts_and_saves(tmp_path):
    names = [step_name(round_, *which, "run", 2) for round_, which in ((9, (0, 0)), (30, (0, 9)), (40, (0, 10)), (10, (1, 2)))]
    assert names[0].startswith("step-00000009-0-0-")
    assert step_name(9, 0, 0, "another run", 2) != names[0]
    for name in names:
        (tmp_path / name).mkdir()
    (tmp_path / names[0]).rename(tmp_path / "elsewhere")
    (tmp_path / names[0]).symlink_to(tmp_path / "elsewhere")  # a link is no checkpoint
    (tmp_path / "step-00000007-0-3-abcdef-of-2").write_text("a file")
    for other in (
        "step-7-0-3-abcdef-of-2",
        "step-00000007",
        *(f"step-00000007-0-3-abcdef-of-{end}" for end in ("0", "2-copy")),
    ):
        (tmp_path / other).mkdir()
    assert steps_in(tmp_path) == names[:0:-1]
    assert steps_in(tmp_path / "nowhere") == []


# -- what is complete ------------------------------------------------------------------------------------------------------


def sight(latest_names: str | None = None, only: str | None = None, **steps: Any) -> Sight:
    named = {f"step-00000001-0-{key[1:]}-abcdef-of-3": value for key, value in steps.items()}
    return Sight(only, named, None if latest_names is None else f"step-00000001-0-{latest_names[1:]}-abcdef-of-3")


WHOLE_OF_3 = (3, [0, 1, 2])


@pytest.mark.parametrize(
    ("sights", "outcome"),
    [
        ([sight(), sight()], None),
        ([sight(s1=WHOLE_OF_3), sight(s1=WHOLE_OF_3)], 1),
        ([sight(s1=WHOLE_OF_3, s2=(3, [0, 1]))] * 2, 1),  # killed in the second save
        ([sight(s1=(3, [0, 2]))] * 2, None),  # killed in the first
        ([sight(s1=(3, [0, 1])), sight(s1=(3, [2]))], 1),  # each its own disk
        ([sight("s9", s1=WHOLE_OF_3, s2=WHOLE_OF_3)] * 2, 2),  # a stale hint
        ([sight("s1", s1=WHOLE_OF_3, s2=WHOLE_OF_3)] * 2, 2),
        ([sight("s2", s1=WHOLE_OF_3, s2=(3, [0, 1]))] * 2, "-0-2-abcdef-of-3 is incomplete: worker-0002.* is missing"),
        ([sight("s2", s1=WHOLE_OF_3, s2=(3, [0, 1])), sight("s2", s1=WHOLE_OF_3)], 1),  # a disk has lost the folder
        (
            [sight("s1", s1=(3, [0, 1])), sight()],
            "no worker starts from scratch .*-0-1-abcdef-of-3 is incomplete: worker-0002.* is missing; worker 1 found none",
        ),
        ([sight("s1"), sight("s1")], "the file 'latest' names step-00000001-0-1-abcdef-of-3, which was removed"),
        ([sight(s1=WHOLE_OF_3), sight()], "no worker starts from scratch.*not seen by worker 1; worker 1 found none"),
        ([sight(s1=WHOLE_OF_3), sight(s2=WHOLE_OF_3)], "is not seen by worker 0; .* is not seen by worker 1\\. Give all"),
        ([sight(s1=(3, range(9)))], 1),
    ],
)
def test_which_one_is_loaded(tmp_path, sights, outcome):
    if isinstance(outcome, str):
        with pytest.raises(CheckpointError, match=outcome):
            choose(tmp_path, sights)
    else:
        chosen = choose(tmp_path, sights)
        assert (chosen and int(chosen[0].split("-")[3])) == outcome


def test_a_hint_changes_nothing(tmp_path):
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    _, before = look(tmp_path)
    assert (complete([before]), before.latest) == ([new, old], new)
    hint = tmp_path / "latest"
    gone = "step-00000009-0-9-abcdef-of-2\n"
    for content in ("", "\n", old, "../../etc\n", b"\xff", "x" * 5000, "best", f"{old}\n{new}\n", gone):
        hint.write_bytes(content if isinstance(content, bytes) else content.encode())
        assert newest(tmp_path) == new
        assert latest(tmp_path) == tmp_path / new
    hint.unlink()
    assert newest(tmp_path) == new
    for make in (lambda: hint.mkdir(), lambda: os.mkfifo(hint), lambda: hint.symlink_to("nowhere")):
        make()
        assert newest(tmp_path) == new
        shutil.rmtree(hint) if hint.is_dir() else hint.unlink()


def test_a_complete_checkpoint_is_found_behind_many_incomplete_ones(tmp_path):
    whole = save(tmp_path, 1)
    for number in range(2, 72):
        write_tree(make_folder(tmp_path / step_name(number, 0, number, "killed", 2)), 0, 2, {})
    (tmp_path / whole / shard_name(1)).rename(tmp_path / "on another disk")
    assert latest(tmp_path) == tmp_path / whole  # by the hint
    (tmp_path / "on another disk").rename(tmp_path / whole / shard_name(1))
    (tmp_path / "latest").unlink()
    assert newest(tmp_path) == whole


def test_a_folder_of_an_older_format_is_no_fresh_start(tmp_path):
    """Its checkpoints have another name, which must not hide them."""
    name = save(tmp_path, 3)
    old = tmp_path / name.removesuffix("-of-2")
    (tmp_path / name).rename(old)
    with pytest.raises(
        CheckpointError, match=f"{old} was written by an older decent_dp, and this one reads formats 3 and 4 only"
    ):
        look(tmp_path)
    with pytest.raises(CheckpointError, match="older decent_dp"):
        latest(tmp_path)
    new = save_on_top(tmp_path)
    assert newest(tmp_path) == new  # beside a new one, the old one is the user's
    assert old.exists()


def save_on_top(path: Path) -> str:
    name = step_name(4, 0, 4, "run", 2)
    write(make_folder(path / name), 4)
    return name


def test_the_parameters_of_one_worker_need_its_own_shard_only(tmp_path):
    def tree(rank: int) -> dict[str, Any]:
        snapshot = {"parameters": {"w": torch.full((2,), float(rank))}, "buffers": {}, "optim": {}, "grads": {}}
        return {"snapshot": snapshot, "state": {}}

    name = step_name(1, 0, 1, "run", 3)
    step = make_folder(tmp_path / name)
    write_tree(step, 2, 3, tree(2))
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):  # it may have been killed
        read_parameters(tmp_path, 2)
    assert read_parameters(step, 2)["w"].tolist() == [2.0, 2.0]
    folder.write_latest(tmp_path, name, 2)  # it was complete, and the other shards are on other disks
    assert read_parameters(tmp_path, 2)["w"].tolist() == [2.0, 2.0]
    with pytest.raises(CheckpointError, match=r"worker-0001.safetensors is missing"):
        read_parameters(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"incomplete: worker-0000.safetensors is missing"):
        read_parameters(tmp_path)
    with pytest.raises(ValueError, match="saved by 3 workers and has none of rank 3"):
        read_parameters(tmp_path, 3)


def test_a_folder_with_another_number_of_workers_in_its_name(tmp_path):
    """The shards are of one checkpoint, and one is missing."""
    step = make_folder(tmp_path / step_name(1, 0, 1, "run", 2))
    for rank in range(2):
        write_tree(step, rank, 3, {})
    with pytest.raises(CheckpointError, match=r"worker-0000.safetensors cannot be used: 3 workers saved it, not 2$"):
        read_parameters(tmp_path)


# -- whose they are --------------------------------------------------------------------------------------------------------


def test_one_run_at_a_time(tmp_path):
    claim(tmp_path, "killed before its first save", 0, may_take_over=False)
    claim(tmp_path, "first", 0, may_take_over=False)
    claim(tmp_path, "first", 1, may_take_over=False)
    (tmp_path / step_name(1, 0, 0, "first", 2)).mkdir()
    with pytest.raises(ValueError, match=r"has the checkpoints of run \w{12}, since 20\S+, on .*a folder of its own"):
        claim(tmp_path, "second", 0, may_take_over=False)
    claim(tmp_path, "second", 0, may_take_over=True)
    with pytest.raises(ValueError, match="two runs in one folder"):
        claim(tmp_path, "first", 0, may_take_over=False)
    assert names_in(tmp_path) == {"run", step_name(1, 0, 0, "first", 2)}
    assert json.loads((tmp_path / "run").read_text()).keys() == {"run", "since", "host"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"x" * 10_000, b'{"run": 3}', b'{"run": ' + b"[" * 4000])
def test_a_broken_word_of_a_run_is_that_of_another(tmp_path, content):
    (tmp_path / "run").write_bytes(content)
    (tmp_path / step_name(1, 0, 0, "another", 2)).mkdir()
    with pytest.raises(ValueError, match="two runs in one folder"):
        claim(tmp_path, "run", 0, may_take_over=False)
    claim(tmp_path, "run", 0, may_take_over=True)
    claim(tmp_path, "run", 0, may_take_over=False)


# -- what is removed -------------------------------------------------------------------------------------------------------


def test_files_of_the_user_stay(tmp_path, caplog):
    name = save(tmp_path, 1, keep=1)
    shutil.copytree(tmp_path / name, tmp_path / "best")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / name / "eval.json").write_text("mine")
    (tmp_path / name / "plots").mkdir()
    (tmp_path / name / "worker-0000.safetensors.tmp").write_text("left over")
    (tmp_path / name / ".tmpQ4x7Zb").write_text("left over")
    for round_ in range(2, 5):
        save(tmp_path, round_, keep=1)
    assert check(tmp_path / "best") == 1
    assert newest(tmp_path / "best") == "best"
    assert names_in(tmp_path / name) == {"eval.json", "plots"}
    assert caplog.text.count(name) == 1
    assert "no save made" in caplog.text


def test_a_failed_removal_is_logged_and_tried_again(tmp_path, caplog, monkeypatch):
    old = save(tmp_path, 1, keep=1)
    real = os.unlink

    def unlink(path: Any) -> None:
        if old in str(path) and shard_name(1) in str(path):
            raise OSError(16, "Device or resource busy", str(path))
        real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", unlink)
        new = save(tmp_path, 2, keep=1)
    assert f"the old checkpoint {tmp_path / old} could not be removed" in caplog.text
    assert newest(tmp_path) == new
    save(tmp_path, 3, keep=1)
    check_tidy(tmp_path, keep=1)


def test_only_what_is_older_than_a_complete_one_is_removed(tmp_path):
    names = [save(tmp_path, round_, keep=9) for round_ in range(5)]
    prune(tmp_path, names[3], {names[3], names[1]}, 2, names)
    assert steps_in(tmp_path) == [names[4], names[3], names[1]]
    prune(tmp_path, names[4], {names[4]}, 1, names[2:])
    assert steps_in(tmp_path) == [names[4], names[1]]  # the one that this run does not know stays
    prune(tmp_path, names[4], {names[4]}, 1, names)
    assert steps_in(tmp_path) == [names[4]]


# -- a fault at every operation --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints, of which the next save drops one, and what a killed run left over."""
    path = tmp_path_factory.mktemp("before")
    save(path, 1)
    save(path, 2)
    write_tree(make_folder(path / step_name(9, 0, 9, "killed", 2)), 0, 2, tree_of(9, 0))
    (path / "latest-0.tmp").write_text("step-0")
    return path


def save_next(path: Path, run: str) -> str:
    """By the next run, which has loaded and cleans up."""
    _, found = look(path)
    return save(path, {"third": 3, "fourth": 4}[run], run, attempt=1 if run == "third" else folder.attempt_of([found]))


def save_on(disk: FaultyDisk, path: Path) -> type[BaseException] | None:
    with disk.installed():
        try:
            save_next(path, "third")
        except (Died, OSError, CheckpointError) as error:
            return type(error)
    return None


def rounds_in(path: Path) -> list[int]:
    """Of the checkpoints that are complete: each is whole, and the newest is what a load would choose."""
    _, found = look(path)
    whole = complete([found])
    assert (whole[0] if whole else None) == newest(path)
    return [check(path / name) for name in whole]


# Losses when the process dies, and perhaps the machine with it.
LOSSES = {
    "killed": ("none", False),
    "power, names kept": ("none", True),
    "power, names lost": ("all", False),
    "power, all lost": ("all", True),
    "power, names lost inside": ("inside", True),
}


DEATHS = [
    pytest.param(loss, first, marks=() if (loss, first) == ("power, all lost", False) else pytest.mark.slow)
    for first in (False, True)
    for loss in LOSSES
]


@pytest.mark.parametrize(("loss", "first"), DEATHS)
def test_whenever_it_dies_what_is_complete_is_whole(before, tmp_path, monkeypatch, loss, first):
    """Of a run's first save, and of its third."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the disk below has its own
    possible = ([], [3]) if first else ([2, 1], [3, 2, 1], [3, 2])
    outcomes = []
    for at in count(1):
        path, aside = tmp_path / f"{at}" / "path", tmp_path / f"{at}" / "aside"
        aside.mkdir(parents=True)
        if not first:
            shutil.copytree(before, path)
        disk = FaultyDisk(path, aside, at, dies=True)
        died = save_on(disk, path)
        disk.lose_power(*LOSSES[loss])
        path.mkdir(exist_ok=True)
        rounds = rounds_in(path)
        assert rounds in possible, (at, disk.operations[-1])
        outcomes.append(rounds)
        assert newest(path) != save_next(path, "fourth") == newest(path)
        assert rounds_in(path) == [4, *rounds[:1]]
        for left in ("run-0.tmp", "latest-0.tmp"):
            assert not (path / left).exists()
        check_tidy(path)
        shutil.rmtree(tmp_path / f"{at}")
        if died is None:
            break
    assert len(outcomes) > 30
    assert outcomes[0] == possible[0]
    assert outcomes[-1][0] == 3, "the save has returned, and was not durable"


def test_whatever_fails_what_is_complete_is_whole(before, tmp_path, monkeypatch):
    """A disk that is full for one operation."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    failed = 0
    for at in count(1):
        path, aside = tmp_path / f"{at}" / "path", tmp_path / f"{at}" / "aside"
        shutil.copytree(before, path)
        aside.mkdir()
        disk = FaultyDisk(path, aside, at, dies=False)
        error = save_on(disk, path)
        failed += error is not None
        rounds = rounds_in(path)
        assert rounds in ([2, 1], [3, 2, 1], [3, 2]), (at, disk.operations[at - 1])
        assert rounds[0] == 3 or error is not None
        assert len([entry for entry in path.iterdir() if entry.is_dir()]) <= 4
        save_next(path, "fourth")
        check_tidy(path)
        shutil.rmtree(tmp_path / f"{at}")
        if len(disk.operations) < at:
            break
    assert failed > 15


def test_a_shard_is_durable_before_it_is_reported(tmp_path):
    path, aside = tmp_path / "path", tmp_path / "aside"
    aside.mkdir()
    disk = FaultyDisk(path, aside, 0, dies=True)
    with disk.installed():
        file = write_tree(make_folder(path / step_name(1, 0, 0, "run", 2)), 0, 1, tree_of(1, 0))
    disk.lose_power(*LOSSES["power, all lost"])
    with Shard(file, 0) as shard:
        shard.verify()
        assert torch.equal(loaded(shard.tree())["w"], tree_of(1, 0)["w"])


@pytest.mark.parametrize("number", [22, 95])
def test_a_folder_that_cannot_be_made_durable(tmp_path, monkeypatch, number):
    """Network mounts say EINVAL. Any other error counts."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if os.fstat(descriptor).st_mode & 0o40000:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert check(tmp_path / save(tmp_path, 1)) == 1
    number = 5
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path, 2)


# -- several at a time -----------------------------------------------------------------------------------------------------


def at_the_same_time(n: int, work: Callable[[int], None]) -> None:
    start = threading.Barrier(n)

    def wait_and_work(rank: int) -> None:
        start.wait(20)
        work(rank)

    with ThreadPoolExecutor(n) as pool:
        list(pool.map(wait_and_work, range(n)))


def test_workers_write_into_one_folder_and_remove_from_it_at_the_same_time(tmp_path, caplog):
    n, path = 8, tmp_path / "a" / "b"
    for round_ in range(5):
        name = step_name(round_, 0, round_, "run", n)

        def work(rank: int, name: str = name, round_: int = round_) -> None:
            claim(make_folder(path), "run", rank, may_take_over=False)
            write_tree(make_folder(path / name), rank, n, tree_of(round_, rank, 5000))

        at_the_same_time(n, work)
        _, found = look(path)
        assert complete([found]) == [name]
        at_the_same_time(n, lambda rank, name=name: folder.write_latest(path, name, rank))  # type: ignore[misc]
        assert names_in(path) == {"latest", "run", name}
        at_the_same_time(n, lambda _, name=name: folder.remove(path / name))  # type: ignore[misc]
    assert names_in(path) == {"latest", "run"}
    assert caplog.text == ""


def test_reading_beside_a_writer_and_pruner(tmp_path):
    stop, failures, read = threading.Event(), [], []
    save(tmp_path, 0, keep=1)

    def look_on() -> None:
        while not stop.is_set():
            try:
                name = newest(tmp_path)
                read.append(check(tmp_path / name) if name is not None else -1)
            except CheckpointError as error:
                if "is missing" not in str(error):
                    failures.append(error)
            except BaseException as error:
                failures.append(error)
                raise

    thread = threading.Thread(target=look_on)
    thread.start()
    ended = time.monotonic() + 0.5
    for round_ in count(1):
        save(tmp_path, round_, keep=1)
        if time.monotonic() > ended and round_ > 20:
            break
    stop.set()
    thread.join(20)
    assert failures == []
    assert len(set(read)) > 3
    assert read == sorted(read)  # never back to an older one


def test_the_hint_never_goes_back(tmp_path):
    """A worker that is late with an old save must not name it: the others may have removed it."""
    for number in (1, 3, 2):
        folder.write_latest(tmp_path, step_name(number, 0, number, "run", 2), 0)
    assert (tmp_path / "latest").read_text().strip() == step_name(3, 0, 3, "run", 2)
    folder.write_latest(tmp_path, step_name(2, 1, 4, "run", 2), 0)  # after a load of an older one
    assert (tmp_path / "latest").read_text().strip() == step_name(2, 1, 4, "run", 2)
