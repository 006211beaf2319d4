"""Checkpoints of a ``Gossip``: with the user's own optimizers, a run that resumes equals one that continued after the save."""

from __future__ import annotations

import math
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler

import decent_dp
from decent_dp.checkpoint import load, save
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError
from decent_dp.replica.snapshot import settle, take
from decent_dp.rules import OuterNesterov
from decent_dp.transport import InProcessTransport, run_replicas
from tests.checkpoint_cases import error_of
from tests.helpers import SGD, loss, net, seed_cpu, values
from tests.resuming import assert_equal, dumb_copy

_ONE_AT_A_TIME = threading.Lock()
LAST = 8  # actions of each run, unless it is one of two optimizers


def normed(seed: int) -> nn.Module:
    seed_cpu(seed)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))
    model[3].bias.requires_grad_(False)
    return model


class Halves(nn.Module):
    """Parameters of two dtypes."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        seed_cpu(seed)
        self.narrow, self.out = nn.Linear(6, 8).bfloat16(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.narrow(x.bfloat16()).float()))
        return result


class Wide(Optimizer):
    """Keeps its state in more digits than its parameters, in containers, with values that are no numbers."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["all"] = {"steps": self.state.get("all", {"steps": 0})["steps"] + 1, "seen": torch.ones(2).double() / 3}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= {"sum": torch.zeros_like(param, dtype=torch.float32), "last": deque(maxlen=2), "phase": "long"}
                    state["count"] = torch.zeros(3, dtype=torch.int64)
                state["sum"].mul_(0.9).add_(param.grad.float())
                state["last"].append(state["sum"].double() / 3)
                state["count"] += 1001
                turn = 1.0 if state["phase"] == "long" else 0.5
                state["phase"] = "short" if state["phase"] == "long" else "long"
                step = sum(state["last"]) * group["lr"] * turn + float(state["count"][0]) * 1e-7
                param.copy_((param.double() - step).to(param.dtype))


# -- runs of many kinds ----------------------------------------------------------------------------------------------------


def step_plain(run: Run, t: int, part: int, rank: int) -> None:
    optimizer = run.optimizers[part]
    loss(run.model, t, rank).backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    optimizer.step()
    for scheduler in run.schedulers[part : part + 1]:
        scheduler.step()
    for each in run.optimizers:
        each.zero_grad()


def step_plateau(run: Run, t: int, part: int, rank: int) -> None:
    value = loss(run.model, t, rank)
    value.backward()
    run.optimizers[0].step()
    run.schedulers[0].step(value.item())
    run.optimizers[0].zero_grad()


def step_closure(run: Run, t: int, part: int, rank: int) -> None:
    def closure() -> Tensor:
        run.optimizers[0].zero_grad()
        value = loss(run.model, t, rank)
        value.backward()
        return value

    run.optimizers[0].step(closure)


def step_accumulating(run: Run, t: int, part: int, rank: int) -> None:
    """The window is open after two of three."""
    loss(run.model, t, rank).backward()
    if t % 3 == 2:
        run.optimizers[0].step()
        run.optimizers[0].zero_grad()


def step_scaled(run: Run, t: int, part: int, rank: int) -> None:
    """One step is skipped on one worker."""
    value = loss(run.model, t, rank) * (math.inf if (t, part, rank) == (2, 0, 1) else 1.0)
    run.scaler.scale(value).backward()
    run.scaler.unscale_(run.optimizers[part])
    run.scaler.step(run.optimizers[part])
    run.scaler.update()
    for each in run.optimizers:
        each.zero_grad()


def step_settling(run: Run, t: int, part: int, rank: int) -> None:
    """Finishes the exchange in flight, becomes the mean, or loads the model, right before some of the stops."""
    step_plain(run, t, part, rank)
    if t in (2, 6):
        run.gossip.flush()
    elif t == 3:
        run.gossip.average_()
    elif t == 4:
        run.model.load_state_dict(
            {name: value * 0.9 for name, value in run.model.state_dict().items() if "weight" in name}, False
        )


@dataclass(frozen=True)
class Case:
    """The training job, and the numbers of actions after which it stops; ``parts`` actions are one iteration."""

    optimizers: Callable[[nn.Module], list[Optimizer]]
    options: dict[str, Any] = field(default_factory=dict)
    stops: tuple[int, ...] = (1, 4)
    model: Callable[[int], nn.Module] = normed
    scheduler: Any = None
    act: Callable[[Run, int, int, int], None] = step_plain
    scaled: bool = False
    parts: int = 1
    by_hand: bool = True  # goes through torch.save, too
    n: int = 2


class Run:
    def __init__(self, case: Case, seed: int, transport: Any = None, **options: Any) -> None:
        self.case = case
        with _ONE_AT_A_TIME:  # workers that are threads share the random numbers
            self.model = case.model(seed)
        self.optimizers = case.optimizers(self.model)
        self.schedulers = [case.scheduler(optimizer) for optimizer in self.optimizers] if case.scheduler else []
        self.scaler: Any = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if case.scaled else None
        given: dict[str, Any] = {"topology": "ring", "scaler": self.scaler, "transport": transport, **case.options, **options}
        self.gossip = decent_dp.gossip(self.model, self.optimizers, **given)

    def act(self, first: int, last: int, rank: int) -> None:
        for i in range(first, last):
            self.case.act(self, *divmod(i, self.case.parts), rank)

    def extras(self) -> dict[str, Any]:
        return {"schedulers": [scheduler.state_dict() for scheduler in self.schedulers]}

    def load_extras(self, extras: Any) -> None:
        for scheduler, state in zip(self.schedulers, extras["schedulers"], strict=True):
            scheduler.load_state_dict(state)

    def by_hand(self) -> dict[str, Any]:
        """As users save without decent_dp.checkpoint."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "scaler": self.scaler and self.scaler.state_dict(),
            "gossip": self.gossip.state_dict(),
            **self.extras(),
        }

    def load_by_hand(self, saved: Any) -> None:
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        if self.scaler is not None:
            self.scaler.load_state_dict(saved["scaler"])
        self.load_extras(saved)
        self.gossip.load_state_dict(saved["gossip"])

    def state(self) -> Any:
        """Everything that training has produced."""
        stats = self.gossip.stats()
        return {
            "values": {name: t.detach() for name, t in (*self.model.named_parameters(), *self.model.named_buffers())},
            "gradients": {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None},
            "counts": [stats.rounds, stats.updates],
            **self.by_hand(),
        }

    def now(self) -> Any:
        return dumb_copy(_plain(self.state()))

    def end(self) -> Any:
        found = self.now()
        self.gossip.close()
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, deque):
        return ["deque", value.maxlen, *map(_plain, value)]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value))
    return value


def one(make: Any, **options: Any) -> Callable[[nn.Module], list[Optimizer]]:
    return lambda model: [make(model.parameters(), **options)]


def grouped(model: nn.Module) -> list[Optimizer]:
    weights, rest = ([p for name, p in model.named_parameters() if name.endswith("weight") is is_w] for is_w in (True, False))
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": weights, "lr": torch.tensor(0.01), "amsgrad": True}]
    return [torch.optim.AdamW(groups, lr=torch.tensor(0.02))]


def muon(model: nn.Module) -> list[Optimizer]:
    matrices, rest = ([p for p in model.parameters() if (p.dim() == 2) is is_matrix] for is_matrix in (True, False))
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]


def halves(make: Any, **options: Any) -> Callable[[nn.Module], list[Optimizer]]:
    """An optimizer for the parameters of the first layers, and one for the rest."""

    def made(model: nn.Module) -> list[Optimizer]:
        params = list(model.parameters())
        return [make(params[:3], **options), make(params[3:], **options)]

    return made


def one_cycle(optimizer: Optimizer) -> Any:
    rates = [0.02 / (i + 1) for i in range(len(optimizer.param_groups))]
    return lr_scheduler.OneCycleLR(optimizer, rates, total_steps=20)


def decaying(optimizer: Optimizer) -> Any:
    return lr_scheduler.StepLR(optimizer, 2, 0.7)


MOMENTUM = one(torch.optim.SGD, lr=0.1, momentum=0.9)
MANY = {"bucket_size_in_mb": 2e-4}
# One of three workers sits out in most rounds.
CASES: dict[str, Case] = {
    "groups": Case(grouped, {"topology": "complete", "overlap": False}, (1, 3), scheduler=decaying),
    "adam": Case(one(torch.optim.Adam, lr=0.02), {"topology": "base-2", **MANY}, scheduler=one_cycle),
    "fused": Case(one(torch.optim.Adam, lr=0.02, fused=True), {"compression": "int8", "topology": "base-2", **MANY}, (1, 4, 5)),
    "adafactor": Case(one(torch.optim.Adafactor, lr=0.05), {"compression": "bfloat16"}),
    "bfloat16": Case(one(torch.optim.AdamW, lr=0.02), {"compression": "int8", **MANY}, model=Halves),
    "lbfgs": Case(one(torch.optim.LBFGS, lr=0.1, max_iter=2, history_size=3), {}, act=step_closure),
    "muon": Case(muon, {"topology": "random-matching"}, (3, 6), parts=2, scheduler=decaying, n=3),
    "two scaled": Case(halves(torch.optim.Adam, lr=0.02), {}, (1, 4, 5, 7), act=step_scaled, scaled=True, parts=2, n=3),
    "own": Case(one(Wide), {"topology": "base-2"}, (0, 4), model=Halves, by_hand=False),
    "settling": Case(MOMENTUM, {"compression": "int8"}, (3, 4, 5, 7), act=step_settling, n=3),
    "outer": Case(MOMENTUM, {"rule": OuterNesterov(lr=0.7, momentum=0.6), "mix_every": 2}, (3, 4), n=3),
    "plateau": Case(MOMENTUM, {}, scheduler=partial(lr_scheduler.ReduceLROnPlateau, patience=0), act=step_plateau),
    "open window": Case(MOMENTUM, {}, (2, 4), act=step_accumulating, by_hand=False),
}


def named(names: Iterable[str]) -> list[Any]:
    """Names of cases as parameters of a test; one that this torch cannot make is skipped."""
    missing = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
    return [pytest.param(name, marks=[missing] if name == "muon" else []) for name in names]


def last_of(case: Case) -> int:
    return LAST if case.parts == 1 else 10


def uninterrupted(case: Case, folder: Path, transport: InProcessTransport) -> Any:
    """The run that saves between steps, in both ways, and continues."""
    run, rank = Run(case, 0, transport), transport.rank
    for first, stop in zip((0, *case.stops), case.stops, strict=False):
        run.act(first, stop, rank)
        # In turn, as what comes second has nothing to settle.
        if case.by_hand and stop % 2:
            torch.save(run.by_hand(), folder / f"{stop}-{rank}.pt")
        save(run.gossip, folder / f"{stop}", run.extras(), wait=False)
        if case.by_hand and stop % 2 == 0:
            torch.save(run.by_hand(), folder / f"{stop}-{rank}.pt")
    run.act(case.stops[-1], last_of(case), rank)
    return run.end()


def resumed(case: Case, folder: Path, transport: InProcessTransport) -> dict[str, Any]:
    """The first stop resumes in a new run, the others in one that is already at its end or elsewhere; in turn in both ways."""
    found = {}
    run, rank = Run(case, 77, transport), transport.rank
    for stop, way in zip(case.stops, cycle(["files", "by hand"] if case.by_hand else ["files"]), strict=False):
        at = stop
        if way == "files":
            run.load_extras(load(run.gossip, folder / f"{stop}"))
        else:
            run.load_by_hand(torch.load(folder / f"{stop}-{rank}.pt", weights_only=True))
        for later in case.stops:  # as the run that continued
            if later > stop:
                run.act(at, later, rank)
                settle(run.gossip)
                at = later
        run.act(at, last_of(case), rank)
        found[f"stopped at {stop}, {way}"] = run.now()
        run.act(0, case.parts + stop % 2, rank)
    run.gossip.close()
    return found


@pytest.mark.parametrize("name", named(CASES))
def test_a_run_that_is_resumed_equals_one_that_was_not_stopped(tmp_path, name):
    case = CASES[name]
    whole = run_replicas(case.n, partial(uninterrupted, case, tmp_path))
    parts = run_replicas(case.n, partial(resumed, case, tmp_path))
    for rank in range(case.n):
        for where, end in parts[rank].items():
            assert_equal(end, whole[rank], f"worker {rank}: {where}")


PLAIN = Case(MOMENTUM)
ADAM = Case(one(torch.optim.Adam, lr=0.02))


def on(transport: InProcessTransport, case: Case, seed: int = 0, steps: int = 0, **options: Any) -> Run:
    run = Run(case, seed, transport, **options)
    run.act(0, steps, transport.rank)
    return run


def test_going_back_to_before_an_optimizer_has_made_all_its_state(tmp_path):
    """LBFGS makes some of its state in its second step."""
    case = Case(one(torch.optim.LBFGS, max_iter=1), act=step_closure)
    run = on(InProcessTransport(), case, steps=1, topology="complete")
    save(run.gossip, tmp_path)
    run.act(1, 4, 0)
    load(run.gossip, tmp_path)
    run.gossip.close()


@pytest.mark.parametrize("name", ["adam", "outer"])
def test_the_users_own_state_dict_mixes_what_is_in_flight(name):
    """The model's state dict may be taken before or after, as it refers to the parameters; the mean stays."""

    def work(transport: InProcessTransport) -> Any:
        run = on(transport, CASES[name], steps=4)
        before, own = values(run.model), run.model.state_dict()
        run.gossip.state_dict()
        assert all(bucket.in_flight is None for bucket in run.gossip.engine.buckets)
        assert_equal(dumb_copy(dict(own)), dumb_copy(dict(run.model.state_dict())))
        return before, values(run.model)

    (old, new), (other_old, other_new) = run_replicas(2, work)
    assert any(not torch.equal(value, new[key]) for key, value in old.items())
    for key in old if name != "outer" else ():  # the anchors move, too
        torch.testing.assert_close(new[key] + other_new[key], old[key] + other_old[key], rtol=1e-6, atol=1e-7)


def test_values_that_cannot_be_saved_are_named(tmp_path):
    class Odd(torch.optim.SGD):
        def state_dict(self) -> Any:
            return {"numbers": 1}

    def gossiping(make: Any) -> tuple[Optimizer, Any]:
        model = net()
        optimizer = make(model.parameters(), lr=0.1)
        return optimizer, decent_dp.gossip(model, optimizer, transport=InProcessTransport(), topology="complete")

    _, run = gossiping(Odd)
    with pytest.raises(ValueError, match=r"Odd.state_dict\(\) has \['numbers'\], and must have 'state' and 'param_groups'"):
        save(run, tmp_path)
    run.close()
    optimizer, run = gossiping(torch.optim.SGD)
    save(run, tmp_path)
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(TypeError, match=r"optim.*odd.*object"):
        save(run, tmp_path)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(ValueError, match=r"parameter 6 of SGD, of shape \(3,\), is not one of the model's"):
        save(run, tmp_path)
    with pytest.raises(CheckpointError, match=r"parameter 6 of SGD"):
        load(run, tmp_path)
    run.close()


# -- what is refused -------------------------------------------------------------------------------------------------------


def reordered(model: nn.Module) -> list[Optimizer]:
    return [SGD(list(model.parameters())[::-1])]


def regrouped(model: nn.Module) -> list[Optimizer]:
    params = list(model.parameters())
    return [SGD([{"params": params[:2]}, {"params": params[2:]}])]


def two(second: Any) -> Case:
    """The states of the first optimizer have more digits than their parameters."""

    def made(model: nn.Module) -> list[Optimizer]:
        params = list(model.parameters())
        return [Wide(params[:2]), second(params[2:])]

    return Case(made, parts=2, model=Halves)


# What is saved, what loads it, and the error.
MISFITS: dict[str, tuple[Case, Case, str]] = {
    "kind": (PLAIN, ADAM, "the optimizer was SGD when this was saved, and is Adam now"),
    "order": (PLAIN, Case(reordered), "parameter 0 of group 0 was '0.weight', and is '5.bias' now"),
    "groups": (PLAIN, Case(regrouped), "SGD had 1 parameter groups when this was saved, and has 2 now"),
    "number": (PLAIN, Case(halves(SGD), parts=2), "saved with 1 optimizers, and there are 2 now"),
    "scaler": (PLAIN, Case(MOMENTUM, act=step_scaled, scaled=True), "saved without a GradScaler, and this run has one"),
    "model": (PLAIN, Case(MOMENTUM, model=net), "is of another model"),
    # The first of two optimizers is loaded before the second refuses.
    "second": (two(torch.optim.Adam), two(torch.optim.SGD), "the optimizer was Adam when this was saved, and is SGD now"),
}


def refused(run: Run, call: Callable[[], Any]) -> tuple[str, str]:
    """The error of a call, which has changed nothing."""
    before = run.now()
    found = error_of(call)
    assert_equal(run.now(), before)
    return found


@pytest.mark.parametrize("name", MISFITS)
def test_a_misfit_is_refused_and_changes_nothing(tmp_path, name):
    saved, case, text = MISFITS[name]

    def work(transport: InProcessTransport) -> Any:
        run = on(transport, saved, steps=4)
        save(run.gossip, tmp_path)
        run.gossip.close()
        run = on(transport, case, seed=1, steps=2)
        found = refused(run, lambda: load(run.gossip, tmp_path))
        run.act(2, 4, transport.rank)
        run.gossip.close()
        return found

    first, second = run_replicas(2, work)
    assert first == second
    assert first[0] == "CheckpointError"
    assert text in first[1]
    assert str(tmp_path) in first[1]


def test_an_optimizer_of_one_worker_that_refuses(tmp_path):
    def work(transport: InProcessTransport) -> Any:
        class Picky(torch.optim.SGD):
            def load_state_dict(self, state_dict: Any) -> None:
                super().load_state_dict(state_dict)
                if transport.rank == 1 and self.param_groups[0]["lr"] != 0.3:
                    raise KeyError("lr")

        Picky.__name__ = "SGD"
        run = on(transport, PLAIN, steps=3)
        save(run.gossip, tmp_path)
        run.gossip.close()
        run = on(transport, Case(one(Picky, lr=0.3, momentum=0.9)), seed=1, steps=2)
        found = refused(run, lambda: load(run.gossip, tmp_path))
        run.gossip.close()
        return found

    for kind, text in run_replicas(2, work):
        assert kind == "CheckpointError"
        assert "worker 1: SGD.load_state_dict does not take" in text
        assert "KeyError" in text


def test_states_that_do_not_belong_together(tmp_path):
    def work(transport: InProcessTransport) -> dict[str, tuple[str, str]]:
        rank, found = transport.rank, {}
        run = on(transport, PLAIN, steps=3)
        gossip = run.gossip
        save(gossip, tmp_path / "earlier")
        earlier = gossip.state_dict()
        run.act(3, 4, rank)
        save(gossip, tmp_path / "later")
        later = gossip.state_dict()
        for name, own in {
            "rounds": earlier,
            "steps": {**later, "steps": None},
            "stepped": {**later, "stepped": ["1"]},
            "junk": {"model": 1},
        }.items():
            found[name] = refused(run, partial(gossip.load_state_dict, own if rank == 1 else later))
        found["checkpoints"] = refused(run, lambda: load(gossip, tmp_path / ("later" if rank == 1 else "earlier")))
        with gossip.join():
            found["in join"] = error_of(lambda: gossip.load_state_dict(later))
        run.act(4, 5, rank)
        assert gossip.stats().rounds == 5
        gossip.close()
        for name, call in {"closed, save": save, "closed, load": load}.items():
            found[name] = error_of(partial(call, gossip, tmp_path / "later"))

        wrapper = DecentralizedDataParallel(normed(0), SGD, topology="ring", transport=transport)
        loss(wrapper, 0, rank).backward()
        save(wrapper, tmp_path / "wrapper")
        before = dumb_copy(take(wrapper.replica))
        found["into the wrapper"] = error_of(lambda: load(wrapper, tmp_path / "later"))
        assert_equal(dumb_copy(take(wrapper.replica)), before)
        wrapper.close()
        run = on(transport, PLAIN, steps=1)
        for how in (None, "mean"):
            call = partial(load, run.gossip, tmp_path / "wrapper", resize=how)
            found[f"from the wrapper, {how}"] = refused(run, call)
        run.gossip.close()
        return found

    found, other = run_replicas(2, work)
    assert other == found
    for name, (kind, text) in {
        "rounds": ("OutOfStepError", "worker 0: 4, worker 1: 3"),
        "steps": ("ValueError", "worker 1: .*its 'steps' is None"),
        "stepped": ("ValueError", r"worker 1: .*its 'stepped' is \['1'\]"),
        "junk": ("ValueError", r"worker 1: load_state_dict takes what Gossip.state_dict\(\) returned"),
        "checkpoints": ("CheckpointError", "is not seen by worker"),
        "in join": ("RuntimeError", r"inside join\(\)"),
        "closed, save": ("RuntimeError", "this Gossip was closed"),
        "closed, load": ("RuntimeError", "this Gossip was closed"),
        "into the wrapper": ("CheckpointError", "this was saved by .*cannot be loaded into"),
        "from the wrapper, None": ("CheckpointError", "this was saved by .*cannot be loaded into"),
        "from the wrapper, mean": ("CheckpointError", "this was saved by .*cannot be loaded into"),
    }.items():
        assert found[name][0] == kind, (name, found[name])
        assert re.search(text, found[name][1]), (name, found[name])


def test_a_save_during_a_step_of_a_scaler(tmp_path):
    """The scaler's findings between its step and its update are in no state dict, and a load would lose them."""
    run = Run(Case(halves(torch.optim.SGD, lr=0.1), parts=2, scaled=True), 0, InProcessTransport(), topology="complete")
    save(run.gossip, tmp_path / "before")
    state = run.gossip.state_dict()
    run.scaler.scale(loss(run.model, 0)).backward()
    for act in (lambda: run.scaler.unscale_(run.optimizers[0]), lambda: run.scaler.step(run.optimizers[0])):
        act()
        for call in (lambda: save(run.gossip, tmp_path), run.gossip.state_dict):
            with pytest.raises(RuntimeError, match=r"update\(\)"):
                call()
        with pytest.raises(RuntimeError, match=r"load_state_dict was called between .* update\(\)"):
            run.gossip.load_state_dict(state)
        with pytest.raises(RuntimeError, match=r"load was called between .* update\(\)"):
            load(run.gossip, tmp_path / "before")
    run.scaler.step(run.optimizers[1])
    run.scaler.update()
    assert save(run.gossip, tmp_path).error is None
    run.gossip.close()


def test_a_round_with_a_skipped_step_after_a_stop():
    """Of two optimizers one has stepped before the stop and the other is skipped after it: the round is an update."""
    case = Case(halves(torch.optim.SGD, lr=0.1), parts=2, scaled=True, act=step_scaled)
    run = Run(case, 0, InProcessTransport(), topology="complete")
    run.act(0, 1, 0)
    saved = dumb_copy(run.by_hand())
    other = Run(case, 1, InProcessTransport(), topology="complete")
    other.load_by_hand(saved)
    for each in (run, other):
        each.scaler.scale(loss(each.model, 0) * math.inf).backward()
        each.scaler.step(each.optimizers[1])
        each.scaler.update()
        assert each.gossip.stats().rounds == each.gossip.stats().updates == 1
        each.gossip.close()
