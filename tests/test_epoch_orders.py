"""The protocol of epochs with three workers, in all orders of events up to a bound: a search, where ``test_epoch_model`` draws.

The real ``Epochs`` and ``EpochStore`` run. Time passes in ticks, of one round each. Within a tick the search tries all orders
in which the calls of the store are made. Before each of these one worker may die, in the middle of a look. A call, or its
answer, may be lost. A call may be slow: its worker trains on, and it is made when the others have long gone on without it.

A schedule is a list of choices. It is run from the beginning; then all other choices at its new points are tried. A run ends
where it comes to a state that was seen before, so that two orders of calls to the same end count as one.

What must hold is what ``test_epoch_model`` checks: who is named in an epoch mixes in none of its rounds by an earlier one, both
ends of an edge have planned its round for the same members, and there is one text of each number. In the end those that live
are the members of one epoch, with no promise left: every wait ends.

The bound: at first one worker, ``wanting``, wants an epoch, and worker 1 is a round ahead. Disturbances begin within
``WITHIN`` ticks, and the end is after ``END``. The searches are complete. Not tried here, but in ``test_epoch_model``: two
disturbances, cut links, processes that join, and a store that loses what it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from decent_dp.membership import epochs as epochs_module
from tests import test_epoch_model as model
from tests.test_epoch_model import STEP, Store, Worker, World

# Workers; ticks in which disturbances begin, of a run, and of a slow call.
N, WITHIN, END, SLOW = 3, 9, 44, 12


class SeenError(Exception):
    """The run has come to a state from which all orders are tried already."""


class Orders(World):
    """Three workers whose calls are made in the order of a list of choices.

    Args:
        choices: those at the first points; afterwards always the first one.
        seen: digests of states, of all runs.
        wanting: the worker that wants an epoch at first.
        deaths, losses, slow: how many workers may die, and calls may be lost or slow.
    """

    def __init__(
        self, choices: list[int], seen: set[int], *, wanting: int = 0, deaths: int = 0, losses: int = 0, slow: int = 0
    ) -> None:
        super().__init__(N)
        self.choices, self.seen, self.given = choices, seen, len(choices)
        self.left = {"deaths": deaths, "losses": losses, "slow": slow}
        self.points: list[int] = []  # at each point: the number of choices
        self.ticks = 0
        self.look_at, self.sleeps_until = [0] * N, [0] * N
        for worker in self.workers:
            worker.round = worker.rank % 2  # one is a round ahead
            worker.epochs.keeper._keep_at = 1e9  # it is looked at after an error
            look = worker.epochs.look

            def wants(round_: int, *, wanted: bool, own: Worker = worker, look: Any = look) -> Any:
                return look(round_, wanted=wanted or (own.rank == wanting and own.epochs.decided.number == 0))  # type: ignore[union-attr]

            worker.epochs.look = wants  # type: ignore[method-assign]
        self.store.texts[f"{model.RUN}/whole"] = "1"

    def choose(self, count: int) -> int:
        place = len(self.points)
        self.points.append(count)
        if place < self.given:
            return self.choices[place]
        self.choices.append(0)
        return 0

    # -- what may happen next

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.is_running]

    def tick(self) -> None:
        """Each worker makes a round, and begins to look at the store if it is time."""
        self.ticks += 1
        self.now = self.ticks * STEP
        for worker in self.living():
            worker.step()
            if worker.epochs.keeper._wake.is_set():
                worker.epochs.keeper._wake.clear()
                self.look_at[worker.rank] = self.ticks
        for worker in self.living():
            self.begin_look(worker)

    def begin_look(self, worker: Worker) -> None:
        while worker.thread.call is None and self.look_at[worker.rank] <= self.ticks:
            worker.thread.go()
            if worker.thread.call is None:
                self.look_at[worker.rank] = self.ticks + round(worker.thread.wait / STEP)

    def call(self, worker: Worker, how: str = "") -> None:
        """Makes a call. ``how``: it is "lost", or its "answer" is; or it is "slow"."""
        if how == "slow":
            self.left["slow"] -= 1
            self.sleeps_until[worker.rank] = self.ticks + SLOW
            return
        self.left["losses"] -= bool(how)
        result = None if how == "lost" else worker.thread.call(self.store)
        worker.thread.answer(result, ConnectionError(how) if how else None)
        if worker.thread.call is None:
            self.look_at[worker.rank] = self.ticks + round(worker.thread.wait / STEP)
            self.begin_look(worker)

    def writes(self, worker: Worker) -> bool:
        """Whether its call would change the store."""
        copy = Store(lambda number, text: None)
        copy.texts = dict(self.store.texts)
        worker.thread.call(copy)
        return copy.texts != self.store.texts

    def is_over(self) -> bool:
        """Whether nothing can happen any more."""
        idle = all(w.epochs.promise is None and w.last == math.inf and not w.epochs._new for w in self.living())
        return self.ticks > WITHIN and idle and len({w.epochs.decided.number for w in self.living()}) == 1  # type: ignore[union-attr]

    def die(self, worker: Worker) -> None:
        self.left["deaths"] -= 1
        self.kill(worker.rank)

    def actions(self) -> Iterator[Callable[[], None]]:
        calling = [w for w in self.living() if w.thread.call is not None and self.sleeps_until[w.rank] <= self.ticks]
        is_free = self.ticks <= WITHIN
        # The order of calls that only read does not matter, as long as nobody writes.
        for worker in calling if any(map(self.writes, calling)) else calling[:1]:
            yield lambda worker=worker: self.call(worker)  # type: ignore[misc]
        if not calling:
            yield self.tick
        for worker in calling if is_free else ():
            if self.left["losses"]:
                yield lambda worker=worker: self.call(worker, "lost")  # type: ignore[misc]
                yield lambda worker=worker: self.call(worker, "answer")  # type: ignore[misc]
            if self.left["slow"]:
                yield lambda worker=worker: self.call(worker, "slow")  # type: ignore[misc]
        if is_free and self.left["deaths"]:
            for worker in self.living():
                yield lambda worker=worker: self.die(worker)  # type: ignore[misc]

    # -- the search

    def search(self) -> None:
        """Runs to the end, or to a state that was seen before."""
        while self.ticks < END:
            if self.is_over() and set(self.workers[self.living()[0].rank].epochs.newest.members).isdisjoint(self.dead):
                break
            actions = list(self.actions())
            if len(actions) == 1:
                actions[0]()
                continue
            if len(self.points) >= self.given:
                digest = self.digest()
                if digest in self.seen:
                    raise SeenError
                self.seen.add(digest)
            actions[self.choose(len(actions))]()
        self.check_end()

    def digest(self) -> int:
        """Of all that the future depends on, and of the rounds that were made."""
        state: list[Any] = [self.ticks, sorted(self.left.items()), sorted(self.dead), sorted(self.store.texts.items())]
        state += [[plans for at, plans in sorted(self.planned.items()) if at >= min(w.round for w in self.workers) - 2]]
        state += [self.look_at, self.sleeps_until, sorted(self.line)]
        for worker in self.living():
            epochs, keeper, thread = worker.epochs, worker.epochs.keeper, worker.thread
            state += [
                worker.round,
                worker.last,
                worker.epoch,
                worker.mixed,
                sorted(worker.missed.items()),
                sorted(worker.vouched),
            ]
            state += [epochs.decided, epochs.newest, epochs.own, epochs._new, epochs.promise, keeper._told]
            state += [keeper._wanted, keeper._heard, keeper._is_away, keeper._keep_at > 0]
            state += [epochs.mixing_from]
            state += [thread.call is None, thread.heard]
        return hash(repr(state))


def explore(**bounds: int) -> tuple[int, int]:
    """Runs schedules until none is left. Returns how many runs, and how many states."""
    seen: set[int] = set()
    waiting: list[list[int]] = [[]]
    runs = 0
    while waiting:
        choices = waiting.pop()
        given, runs = len(choices), runs + 1
        world = run(choices, seen, **bounds)
        for place in range(given, len(world.points)):
            waiting += [[*world.choices[:place], other] for other in range(1, world.points[place])]
    return runs, len(seen)


def run(choices: list[int], seen: set[int], **bounds: int) -> Orders:
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epochs_module, "time", clock)
        world = Orders(choices, seen, **bounds)
        clock.monotonic = lambda: world.now
        try:
            world.search()
        except SeenError:
            pass
        except Exception as error:
            raise AssertionError(f"choices {world.choices} of {bounds}: {error!r}") from error
        finally:
            world.close()
    return world


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short delays, and no threads of their own."""
    for name, seconds in {
        "_AHEAD": 0.1,
        "_LOOK": 0.2,
        "_SOON": 0.1,
        "_SILENT": 0.2,
        "_HEARD": 0.4,
        "_FEW": 0.6,
        "_TURN": 0.3,
        "_AGAIN": 0.2,
    }.items():
        monkeypatch.setattr(epochs_module, name, seconds)
    monkeypatch.setattr(epochs_module, "start_thread", lambda *_: True)
    monkeypatch.setattr(model, "SETTLE", 0.15)


def test_all_orders_of_calls() -> None:
    _, states = explore()
    assert states > 40


@pytest.mark.slow
@pytest.mark.parametrize("wanting", [0, 1])
@pytest.mark.parametrize("bounds", [{"deaths": 1}, {"losses": 1}, {"slow": 1}])
def test_all_orders_with_a_disturbance(bounds: dict[str, int], wanting: int) -> None:
    _, states = explore(wanting=wanting, **bounds)
    assert states > 500


def test_a_schedule_is_repeated_by_its_choices() -> None:
    """And two orders that lead to one state are one."""
    seen: set[int] = set()
    world = run([], seen)
    again = run(list(world.choices), set())
    assert again.points == world.points
    assert again.digest() == world.digest()
    assert run([], seen).points == []
