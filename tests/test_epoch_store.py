"""Runs at one store: their names, which of them live, and those who look at them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import decent_dp
from decent_dp.errors import PeerLostError
from decent_dp.membership import Epoch, runs
from decent_dp.membership.epoch_store import EpochStore, Promise, newest_epoch
from decent_dp.membership.runs import Reach, Run, look_at_run, reach, register
from decent_dp.tools.cli.app import run as command
from decent_dp.transport.rendezvous import Rendezvous, RunRecord, address_key, bind_to_secret, network_stack
from decent_dp.transport.store import StoreClient, add_to, whole_store
from tests.helpers import SilentStore

A, B, C, D, E = (letter * 32 for letter in "abcde")  # ids of runs
RECORD = {
    "token": "00",
    "world_size": 2,
    "places": 3,
    "node_of": ["a", "a"],
    "timeout": 10.0,
    "dead_after": 10.0,
    "encrypt": None,
}
SIGNATURE = json.dumps({"settings": {"workers of each replica": [[0], [1]]}})
GONE = {"node": "x", "machine": "m", "pid": 1, "incarnation": 0, "host": "127.0.0.1", "port": 9, "bulk": 9}
FAR = {"node": "x", "machine": "m", "pid": 1, "incarnation": 0, "local": "f"}


def epoch_text(*ranks: int, **other: Any) -> str:
    """An epoch of these workers. ``other``: entries of it."""
    return json.dumps({"start": 1, "dealt": 0, "members": ranks, "incarnations": {}, **other})


def epoch_of(number: int, *ranks: int, **other: Any) -> Epoch:
    return Epoch.read(number, epoch_text(*ranks, **other))


# What no worker writes: no UTF-8, no JSON, JSON of another shape, other types, and nobody.
UNREADABLE = [
    *(b"\xff\xfe", b"", b"hello", b"[" * 10_000, b"{}", b"[1]", b"null", b"7", b'"text"'),
    *(epoch_text(*members).encode() for members in ((), (-1,), (1, 0), (0, 0))),
    epoch_text(0, members=0).encode(),
    epoch_text(0, members=["0"]).encode(),
    *(epoch_text(0, **{key: value}).encode() for key in ("start", "dealt") for value in (1.5, "1", None, -1, [1])),
    *(epoch_text(0, incarnations=value).encode() for value in ({"3": "a"}, {"x": 1}, {"-1": 1}, [1], 0)),
]


def a_server() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


# A store with a server of its own, and one inside this process: both keep bytes.
STORES = [a_server, dist.HashStore]


@pytest.fixture
def server() -> Any:
    return a_server()


@pytest.fixture
def living() -> Iterator[dict[str, Any]]:
    """The address of a process that speaks ZeroMQ, as a worker does."""
    with serving(b"\xff" + bytes(8) + b"\x7f") as address:
        yield address


@contextlib.contextmanager
def serving(said: bytes) -> Iterator[dict[str, Any]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.ExitStack() as accepted, contextlib.suppress(OSError):
                while True:
                    stream = accepted.enter_context(listener.accept()[0])
                    stream.sendall(said)

        thread = threading.Thread(target=serve)
        thread.start()
        yield {**GONE, "port": listener.getsockname()[1]}
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def line_of(store: Any, run_id: str, name: str | None, *addresses: dict[str, Any]) -> EpochStore:
    """That of worker 0, which writes the addresses of all."""
    records = {"run": json.dumps(RECORD), "signature": SIGNATURE}
    records |= {f"address/{rank}": json.dumps(address) for rank, address in enumerate(addresses)}
    return EpochStore(store, run_id, records, name)


def begin(store: Any, run_id: str, name: str | None, *addresses: dict[str, Any]) -> EpochStore:
    line = line_of(store, run_id, name, *addresses)
    register(line)
    return line


def names(line: EpochStore) -> list[str]:
    return [entry.name for entry in line.ask(runs.runs_in)]


def address_of(store: Any) -> str:
    return f"127.0.0.1:{store.port}"


def whole(store: Any) -> Any:
    """The part of a store that has all keys of this library."""
    return dist.PrefixStore("decent_dp", whole_store(store))


def say(*words: str) -> tuple[int, str]:
    """The exit code of a command, and what it says."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command(words)
    return code, said.getvalue()


# -- names -----------------------------------------------------------------------------------------------------------------


def test_two_runs_at_one_store_never_meet(server, living):
    lines = {name: begin(server, run_id, name, living, living) for name, run_id in (("a", A), ("b", B))}
    for line in lines.values():
        assert line.decide(epoch_of(1, 1)) == epoch_of(1, 1)
    for name, ranks, won in (("b", (1, 2), (1, 2)), ("a", (1, 3), (1, 3)), ("b", (1, 4), (1, 2))):
        assert lines[name].decide(epoch_of(2, *ranks)) == epoch_of(2, *won)
    promises = {name: Promise(rank, 0, 7, (), {}, (2, 1, 0, 2)) for rank, name in enumerate(lines)}
    for name, line in lines.items():
        assert line.promise(3, promises[name]) == promises[name].rank
    for name, line in lines.items():
        assert line.promises(3) == {promises[name].rank: promises[name]}
    assert names(lines["a"]) == ["a", "b"]
    for name in ("run", "signature", "address/0"):
        assert server.check([f"decent_dp/{A}/{name}", f"decent_dp/{B}/{name}"])


def test_of_several_living_runs_one_must_be_named(server, living):
    begin(server, "0" * 32, "first", living, living)
    begin(server, "1" * 32, None, living, living)
    for call in (decent_dp.join, look_at_run):
        with pytest.raises(ValueError, match=r"^2 runs .*'first' \(2 members\), '11111111' \(2 members\)"):
            call(address_of(server))
    assert [look_at_run(server, name).run_id for name in ("first", "1" * 8)] == ["0" * 32, "1" * 32]
    transport = decent_dp.join(address_of(server), rank=0, run="first")
    assert transport.run_id == "0" * 32
    transport.close()
    code, text = say("status", address_of(server))
    assert (code, text.count("\n")) == (2, 1)
    assert "--run" in text
    assert "'first' (2 members)" in text
    code, text = say("status", address_of(server), "--run", "first")
    assert code == 0
    assert text.startswith("run first: epoch 0, 2 of at most 3 workers\n")
    for words, code, said in (
        (("kill", "0", address_of(server)), 2, "2 runs are registered"),
        (("kill", "0", address_of(server), "--run", "first"), 1, "worker 0 is process 1 on m: run the command there"),
        (("kill", "0", address_of(server), "--run", "f"), 1, "no run of the name 'f' is registered at this store, which knows"),
        (("kill", "0", address_of(server), "--run", "a b"), 2, "run must be None or a name of up to 64 letters"),
    ):
        found = say(*words)
        assert (found[0], found[1].count("\n")) == (code, 1)
        assert said in found[1]


def test_the_run_that_lives_needs_no_name(server, living):
    """Of the others all workers are gone, or have said that they leave."""
    begin(server, A, "killed", GONE, GONE)
    left = begin(server, B, "left", FAR, GONE)
    begin(server, C, "own", GONE, living)
    assert names(left) == ["left", "own"]  # a run that is over leaves the list when another one begins
    with pytest.raises(ValueError, match=r"'left' \(2 members, which do not answer from here\), 'own' \(2 members\)"):
        look_at_run(server)
    left.close()
    assert look_at_run(server).name == "own"
    begin(server, D, "next", living)
    assert runs.newest_run(address_of(server)).name == "next"  # type: ignore[union-attr]


def test_of_runs_that_are_over_the_newest_counts(server):
    for run_id, name in ((A, "a"), (B, "b")):
        line_of(server, run_id, name, GONE, GONE).register()
    assert look_at_run(server).name == "b"


def test_a_name_belongs_to_one_living_run(server, living, caplog):
    begin(server, A, "exp", GONE, living)
    with pytest.raises(ValueError, match=r"faults=Tolerate\(run='exp'\): a run of this name lives at this store"):
        begin(server, B, "exp", living)
    begin(server, C, "other", living, GONE)
    assert look_at_run(server, "exp").run_id == A
    server.set(f"decent_dp/{A}/address/1", json.dumps(GONE))
    begin(server, D, "exp", living, GONE)  # that run is over
    assert look_at_run(server, "exp").run_id == D
    assert caplog.messages == []
    server.set(f"decent_dp/{D}/address/0", json.dumps(FAR))
    begin(server, E, "exp", living, GONE)
    assert look_at_run(server, "exp").run_id == E
    (said,) = caplog.messages
    assert said.startswith("the run 'exp' of before is replaced at the store")


def test_of_two_runs_that_begin_at_once_with_one_name_one_begins(server, living):
    lines = [line_of(server, run_id, "exp", living) for run_id in (A, B, C, D)]
    refused = []

    def try_to(line: EpochStore) -> None:
        try:
            register(line)
        except ValueError:
            refused.append(line)

    threads = [threading.Thread(target=try_to, args=(line,)) for line in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert names(lines[0]) == ["exp"]


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 65, "a/b", "a\n", 7, b"a"])
def test_names_are_checked(name):
    error = ValueError if isinstance(name, str) else TypeError
    for call in (lambda: decent_dp.Tolerate(run=name), lambda: decent_dp.join("10.0.0.1:29500", run=name)):
        with pytest.raises(error, match=r"run must be None or a name of up to 64 letters and digits, '-', '_' and '\.', got"):
            call()
    assert decent_dp.Tolerate(run="Exp-7_b.2").signature()["run"] == "Exp-7_b.2"


def test_what_an_address_tells(living):
    assert reach(living) is Reach.ANSWERS
    with serving(b"") as silent, serving(b"SSH-2.0-OpenSSH") as another:
        assert reach(silent, 0.1) is Reach.SILENT
        assert reach(another) is Reach.GONE
    own = {**FAR, "node": network_stack()}
    for address, expected in ((GONE, Reach.GONE), ({}, Reach.GONE), (None, Reach.UNKNOWN), (FAR, Reach.UNKNOWN)):
        assert reach(address) is expected
    assert network_stack() is None or reach(own) is Reach.GONE


def test_what_join_is_given_is_checked(server, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for arguments, error, text in (
        ({"encrypt": "yes"}, TypeError, "encrypt must be None"),
        *(({"store": store}, ValueError, "store must be HOST:PORT") for store in (None, "here", ":1", "a:b")),
        ({"store": 7}, TypeError, "store must be HOST:PORT"),
    ):
        with pytest.raises(error, match=text):
            decent_dp.join(**arguments)  # type: ignore[arg-type]
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(PeerLostError, match=r"^no store answers at 127\.0\.0\.1.*refused\)\. It must be that of the run"):
            decent_dp.join(f"127.0.0.1:{unused.getsockname()[1]}")
    monkeypatch.setattr(runs, "_FREE", 0.2)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    for address in (None, address_of(server)):
        with pytest.raises(PeerLostError, match=r"^no run is registered at this store"):
            decent_dp.join(address)

    def write(**record: Any) -> None:
        server.set(f"decent_dp/{A}/run", json.dumps({**RECORD, **record}))

    line_of(server, A, "exp").register()
    write(places=2)
    with pytest.raises(PeerLostError, match=r"^the run has 2 members, and no place for more.*max_workers=\.\.\.\) above 2"):
        decent_dp.join()
    write()
    for rank in (3, -1, "x"):
        with pytest.raises(ValueError, match="rank must be from 0 to 2, as this run can have 3 workers"):
            decent_dp.join(rank=rank)  # type: ignore[arg-type]
    monkeypatch.setenv("RANK", "1")
    assert runs._look_for_a_place(None, None, None)[1] == 1
    for encrypt in (True, False):
        with pytest.raises(ValueError, match=f"encrypt={encrypt}, and the run at the store was started with encrypt=None"):
            decent_dp.join(encrypt=encrypt)
    # With a secret nobody else can say that the run is not encrypted.
    monkeypatch.setenv("DECENT_DP_SECRET", "long and random")
    mac = bind_to_secret(json.dumps(RECORD, sort_keys=True))
    for others, error, text in (
        ({}, ValueError, "was started with"),
        ({"encrypt": False}, PeerLostError, "was not written by a worker that knows"),
    ):
        write(mac=mac, **others)
        with pytest.raises(error, match=text):
            decent_dp.join(encrypt=True)


# -- a store in trouble ----------------------------------------------------------------------------------------------------


def test_a_store_that_was_closed_is_asked_nothing():
    line = EpochStore(dist.HashStore(), "run", {})
    assert not line.is_proposed(1)
    line.close()
    with pytest.raises(ConnectionError, match="the worker has ended"):
        line.is_proposed(1)


@pytest.mark.parametrize("make_store", STORES)
def test_the_first_proposal_stays_and_promises_add_up(make_store, caplog):
    store = make_store()
    lines = [EpochStore(store, f"promises {make_store}", {}) for _ in range(3)]
    promises = [Promise(rank, rank, 7 + rank, (2,), {4: 9}, (0, 0, 0, 3)) for rank in range(3)]
    assert not lines[0].is_proposed(1)
    assert lines[0].promises(1) == {}
    assert [lines[rank].promise(1, promises[rank]) for rank in (2, 0, 1, 1)] == [2, 2, 2, 2]
    assert lines[0].is_proposed(1)
    whole(store).append(f"promises {make_store}/epoch/1/promises", '{"rank": 3}\nwhat?\n')
    assert lines[1].promises(1) == dict(enumerate(promises))
    (said,) = said_of_the_store(caplog)
    assert f"under 'decent_dp/promises {make_store}/epoch/1/promises'" in said
    whole(store).set(f"promises {make_store}/epoch/2/proposal", "who?")
    assert lines[0].promise(2, promises[0]) is None
    assert lines[0].promises(2) == {0: promises[0]}


def test_what_led_to_an_epoch_is_forgotten_after_a_while():
    store = EpochStore(dist.HashStore(), "run", {})
    assert not store.come_back(epoch_of(3, 0, 1), 0, 3)
    store.register()
    for number in range(1, 20):
        store.promise(number, Promise(0, 0, 7, (), {}, (0, 0, 0, 3)))
        assert store.decide(epoch_of(number, 0)) is not None
    assert [number for number in range(1, 20) if store.is_proposed(number)] == list(range(12, 20))
    assert [number for number in range(1, 20) if store.promises(number)] == list(range(12, 20))
    assert store.read(1) == epoch_of(1, 0)
    assert not whole(store._all).check(["run/epoch/3/back"])


def test_a_store_that_was_emptied_gets_the_run_back_together_with_its_epoch(server, living):
    """Who found the run without its members, or these without the run, could not join."""
    lines = [line_of(server, A, "exp", living) for _ in range(5)]
    assert lines[0].register()
    epoch, older = epoch_of(6, 0, 1, 2, 3, 4), epoch_of(5, 0, 1, 2, 3, 4, start=0)
    assert lines[0].decide(epoch) == epoch
    assert all(line.come_back(epoch, rank, 6) for rank, line in enumerate(lines))
    for key in ("runs", *(f"{A}/{name}" for name in ("run", "signature", "address/0", "epoch/6", "epoch", "whole"))):
        server.delete_key(f"decent_dp/{key}")
    begin(server, B, "other", living)  # another run is back before
    for rank, newest, known in ((0, 6, epoch), (0, 6, epoch), (3, 5, older), (4, 6, older), (7, 6, epoch)):
        assert not lines[0].come_back(known, rank, newest)  # of five, two have come back with the newest one
        assert lines[1].decide(epoch_of(7, 0, 1)) is None
        assert names(lines[0]) == ["other"]
        assert not server.check([f"decent_dp/{A}/run"])
    assert lines[1].come_back(epoch, 1, 6)
    assert names(lines[0]) == ["other", "exp"]
    assert server.check([f"decent_dp/{A}/run", f"decent_dp/{A}/signature", f"decent_dp/{A}/address/0"])
    assert Run.read(lines[0].ask, lines[0].entry).epoch == epoch
    assert lines[1].decide(epoch_of(7, 0, 1)) == epoch_of(7, 0, 1)
    server.delete_key(f"decent_dp/{A}/address/0")  # of one that comes later
    assert lines[2].come_back(epoch_of(7, 0, 1), 2, 7)
    assert server.check([f"decent_dp/{A}/address/0"])


def test_a_run_whose_name_was_taken_says_so_once(server, living, caplog):
    line = begin(server, A, "exp", living)
    for key in ("runs", f"{A}/run"):
        server.delete_key(f"decent_dp/{key}")
    begin(server, B, "exp", living)
    for _ in range(2):
        server.delete_key(f"decent_dp/{A}/run")
        assert line.come_back(Epoch.first(2), 0, 0)
    assert [entry.run_id for entry in line.ask(runs.runs_in)] == [B]
    assert [message for message in caplog.messages if "another run has taken the name 'exp'" in message] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_run_begins_at_a_store_that_does_not_answer(caplog):
    line = line_of(dist.HashStore(), A, None)
    line.close()
    register(line)
    assert "the run 'aaaaaaaa' is registered when the store answers: the worker has ended" in caplog.messages


GARBAGE = {
    "no UTF-8": b"\xff\xfe\x00",
    "no JSON": b"what?",
    "another shape": b'[7, {"a": null}]',
    "a number": b"7",
    "missing fields": b'{"token": "00"}',
    "odd replicas": b'{"settings": {"workers of each replica": [[0, 1], [2]]}}',
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("key", ["runs", *(f"{A}/{name}" for name in ("run", "signature", "address/0"))])
def test_garbage_in_the_store_is_one_clear_error(server, living, key, garbage):
    begin(server, A, None, living, living)
    server.set(f"decent_dp/{key}", GARBAGE[garbage])
    code, text = say("status", address_of(server))
    assert (code, text.count("\n")) == (1, 1), text
    assert f"under the key 'decent_dp/{key}" in text
    assert say("kill", "0", address_of(server)) == (1, text)
    if "address" not in key:  # which it does not need
        with pytest.raises(PeerLostError) as caught:
            decent_dp.join(address_of(server), rank=0)
        assert f"decent-dp: {caught.value}\n" == text
        assert caught.value.__cause__ is None


def test_a_missing_record_is_named(server, living):
    begin(server, A, None, living)
    server.delete_key(f"decent_dp/{A}/run")
    with pytest.raises(PeerLostError, match=f"the store has nothing under the key 'decent_dp/{A}/run'"):
        look_at_run(server)


def test_a_run_is_registered_where_garbage_was(server, living, caplog):
    server.set("decent_dp/runs", "what?")
    line = begin(server, A, None, living)
    assert names(line) == [A[:8]]
    assert "under the key 'decent_dp/runs'" in caplog.text


def test_join_waits_until_the_run_is_registered(server, living, caplog):
    """A store that was started again does not know it at once."""
    line = line_of(server, A, "exp", living)
    timer = threading.Timer(1.0, register, [line])
    timer.start()
    with caplog.at_level(logging.WARNING):
        transport = decent_dp.join(address_of(server), rank=1, run="exp")
    transport.close()
    timer.join()
    (said,) = [message for message in caplog.messages if "This process waits" in message]
    assert said.startswith(
        "no run of the name 'exp' is registered at this store, which knows none. This process waits for 30 s"
    )


def test_each_of_those_that_look_at_the_same_time_finds_a_rank():
    store = dist.HashStore()
    run: Any = SimpleNamespace(
        run_id="x",
        record=SimpleNamespace(places=4),
        epoch=SimpleNamespace(number=3, members=(0,)),
        ask=lambda call: call(store),
    )
    assert [runs._free_rank(run, shared=False) for _ in range(4)] == [1, 2, 3, None]
    assert runs._free_rank(run, shared=True) == 2  # after a while: one that has drawn it may have ended


# -- what others have written there ----------------------------------------------------------------------------------------


def said_of_the_store(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_no_worker_writes_is_unreadable():
    assert [value for value in UNREADABLE if Epoch.stored(1, value) is not None] == []
    assert Epoch.stored(1, None) is None
    epoch = Epoch.stored(1, epoch_text(0, 2, start=9, incarnations={"2": 5}).encode())
    assert epoch is not None
    assert (epoch.start, epoch.members, epoch.incarnations) == (9, (0, 2), {2: 5})


@settings(max_examples=30)
@given(st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda x: json.dumps(x).encode()))
def test_any_bytes_are_an_epoch_or_unreadable(value):
    epoch = Epoch.stored(1, value)
    assert epoch is None or epoch.members


@pytest.mark.parametrize("make_store", STORES)
def test_the_members_write_the_epoch_in_place_of_what_is_unreadable(make_store, caplog):
    store = make_store()
    for number, value in enumerate(UNREADABLE):
        run = f"{make_store is a_server:016x}{number:016x}"
        lines = [EpochStore(store, run, {}) for _ in range(2)]
        lines[0].register()
        key = f"decent_dp/{run}/epoch/1"
        store.set(key, value)
        assert newest_epoch(whole(store), run) is None
        caplog.clear()
        won = [line.decide(epoch_of(1, rank)) for rank, line in enumerate(lines)]
        assert won == [epoch_of(1, 0)] * 2, value
        assert lines[1].newest() == epoch_of(1, 0)
        if value:  # else it is as if nothing was there
            said = said_of_the_store(caplog)
            assert [key in line for line in said] == [True], said
            assert "the members write the epoch in its place" in said[0]


def test_those_that_come_later_go_past_what_is_unreadable(caplog):
    """Whatever of the line it has replaced, and the number where they begin to look."""
    store = whole(dist.HashStore())
    texts = {1: epoch_text(0, 1, 2), 2: epoch_text(0, 1), 3: epoch_text(0)}
    for counter in ("0", "2", "3", "7", "-1", "9" * 40, b"\xff"):
        for spoilt, newest in (((), 3), ((3,), 2), ((2, 3), 1), ((1, 2), 3), ((1, 2, 3), None), ((1,), 3)):
            run = f"{counter!r} {spoilt}"
            store.set(f"{run}/epoch", counter)
            for number, text in texts.items():
                store.set(f"{run}/epoch/{number}", b"\xff" if number in spoilt else text)
            caplog.clear()
            assert newest_epoch(store, run) == (None if newest is None else Epoch.read(newest, texts[newest])), run
            newest_epoch(store, run)
            said = said_of_the_store(caplog)
            assert len(said) == len(set(said)), said  # once
            assert bool(said) or not (3 in spoilt or counter in ("-1", "9" * 40, b"\xff"))


@pytest.mark.parametrize("make_store", STORES)
def test_a_counter_that_is_no_number_counts_as_0(make_store):
    store = make_store()
    for number, value in enumerate((b"\xff", b"", b"ten", b"9" * 30)):
        store.set(f"{number}", value)
        assert [add_to(store, f"{number}", amount) for amount in (1, 0, 1)] == [1, 1, 2]


ADDRESS = {"node": "b", "machine": "m", "pid": 1, "incarnation": 0, "host": "10.0.0.1", "port": 1234, "bulk": 1235}


NO_ADDRESSES = [
    *(b"\xff", b"hello", b"[1]", b"[" * 10_000, b'{"node": "b", "incarnation": 0}'),
    *(json.dumps({**ADDRESS, "host": host}).encode() for host in (1, None, "x" * 99, "10.0.0.1.1")),
    *(json.dumps({**ADDRESS, "port": port}).encode() for port in ("1", 10**6, 0, None)),
    *(json.dumps({**ADDRESS, **other}).encode() for other in ({"local": "\ud800"}, {"local": 1}, {"incarnation": 3})),
    json.dumps({**ADDRESS, "node": None}).encode(),
]


def test_an_address_that_is_none_is_an_error_with_its_key(caplog):
    for number, value in enumerate(NO_ADDRESSES):
        name = f"addresses {number}"
        store = dist.PrefixStore(f"decent_dp/{name}", dist.HashStore())
        rendezvous = Rendezvous(store, name, RunRecord(b"", 2, 2, ("a", "b"), 5.0), 0, "a")
        store.set(address_key(1, 0), value)
        caplog.clear()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="than the address of worker 1") as caught:
                rendezvous.address_of(1, 0, 5.0)
            assert f"decent_dp/{name}/address/1" in str(caught.value)
        [said] = said_of_the_store(caplog)
        assert f"decent_dp/{name}/address/1" in said
        there = dataclasses.replace(rendezvous, rank=1, addresses={})
        there.publish({**ADDRESS})
        assert rendezvous.address_of(1, 0, 5.0) == there.addresses[1]


# -- a store that does not answer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", ["before it looks at the run", "before it takes a rank", "before it is counted"])
def test_a_process_that_joins_does_not_wait_for_a_stopped_store(monkeypatch, stops):
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    store = dist.HashStore()
    begin(store, A, None)
    client: Any = StoreClient(store, "decent_dp")
    client._store = silent = SilentStore(client._store)
    monkeypatch.setattr(runs, "StoreClient", lambda *_: client)
    monkeypatch.setattr(runs, "_STORE_ANSWERS", 0.2)
    run = look_at_run("10.0.0.1:29500")
    assert run.record == RunRecord.read(RECORD)
    if stops != "before it looks at the run":
        monkeypatch.setattr(runs, "_choose", lambda *_: run)
    silent.answers.clear()
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="the store does not answer"):
        decent_dp.join("10.0.0.1:29500", rank=1 if stops == "before it is counted" else None)
    assert time.monotonic() < began + 10
    silent.answers.set()
    assert isinstance(run, Run)
