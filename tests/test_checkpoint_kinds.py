"""Well-formed checkpoints with a value of another kind inside: refused by name, and nothing is changed."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import decent_dp
from decent_dp.checkpoint import latest, load, save
from decent_dp.checkpoint.files import Shard, shard_name
from decent_dp.optim import AccumAdamW
from decent_dp.serialization import loaded
from decent_dp.transport import InProcessTransport
from tests.checkpoint_cases import decaying, error_of, make, noisy_net, run
from tests.helpers import alone, assert_same, loss, net, some_in_the_fast_tests, values
from tests.small_checkpoints import craft


def entry(path: str, value: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Sets an entry of the snapshot; ``...`` removes it."""

    def change(tree: dict[str, Any]) -> dict[str, Any]:
        changed = {**tree, "snapshot": copy.deepcopy(tree["snapshot"])}
        node: Any = changed["snapshot"]
        *steps, last = [int(step) if step.isdigit() else step for step in path.split("/")]
        for step in steps:
            node = node[step]
        if value is ...:
            del node[last]
        else:
            node[last] = value
        return changed

    return change


OF_WRAPPER = {
    "rule/state": (True, "rule"),
    "optim/schedulers": (True, "schedulers"),
    "optim/schedulers/by_name": ([], "schedulers"),
    "optim/schedulers/last_epoch": ("three", r"LambdaLR\['last_epoch'\]|StepLR\['last_epoch'\]"),
    "optim/schedulers/gamma": ({}, r"StepLR\['gamma'\]"),
    "optim/state": (3, "'state' must be a dict"),
    "optim/state/0.weight": (5, "the state of parameter '0.weight'"),
    "optim/state/0.weight/exp_avg": (..., "parameter '0.weight' has no 'exp_avg'"),
    "optim/state/0.weight/exp_avg_sq": (7, r"parameter '0.weight'\['exp_avg_sq'\] was saved as 7"),
    "optim/state/0.weight/step": ({}, r"parameter '0.weight'\['step'\] was saved as a dict"),
    "optim/param_groups/0.weight/lr": ({"a": 1}, r"parameter group 0 of Adam\w*\['lr'\] was saved as a dict"),
    "optim/param_groups/0.weight/betas": ([0.9], r"\['betas'\] was saved as a list"),
    "optim/param_groups": ([], "by parameter number"),
}


@pytest.mark.parametrize(
    ("path", "optim", "stepped"), some_in_the_fast_tests(OF_WRAPPER, [torch.optim.AdamW, AccumAdamW], [False, True])
)
def test_a_value_of_another_kind_in_a_wrappers_checkpoint(tmp_path, path, optim, stepped):
    value, pattern = OF_WRAPPER[path]

    def optim_fn(pairs: Any) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = optim(pairs if optim is AccumAdamW else [param for _, param in pairs], lr=0.01)
        return made

    first = alone(net(), optim_fn, lr_scheduler_fn=decaying)
    for t in range(2):
        loss(first, t).backward()
    folder = save(first, tmp_path).path
    first.close()
    craft(folder, 0, entry(path, value))
    second = alone(net(1), optim_fn, lr_scheduler_fn=decaying)
    if stepped:
        loss(second, 0).backward()
    before = values(second.module)
    with pytest.raises(decent_dp.errors.CheckpointError, match=pattern.replace(r"Adam\w*", r"\w*Adam\w*")):
        load(second, tmp_path)
    assert_same(values(second.module), before)
    loss(second, 1).backward()
    second.close()


OF_GOSSIP = {
    "optim/optimizers/0": (3, "the state of SGD is not as it was saved"),
    "optim/optimizers/0/state": ([], "the state of SGD is not as it was saved"),
    "optim/optimizers/0/groups/0/lr": ({"a": 1}, r"parameter group 0 of SGD\['lr'\]"),
    "optim/optimizers/0/groups/0/momentum": ("a", r"parameter group 0 of SGD\['momentum'\]"),
    "optim/optimizers/0/state/0.weight/momentum_buffer": (1, "momentum_buffer"),
    "stepped": (3, "stepped"),
}


@pytest.mark.parametrize("path", OF_GOSSIP)
def test_a_value_of_another_kind_in_a_checkpoint_of_gossip(tmp_path, path):
    value, pattern = OF_GOSSIP[path]

    def make(seed: int) -> Any:
        model = net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, decent_dp.gossip(model, optimizer, transport=InProcessTransport())

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()

    model, optimizer, replica = make(0)
    step(model, optimizer)
    folder = save(replica, tmp_path).path
    replica.close()
    craft(folder, 0, entry(path, value))
    model, optimizer, replica = make(1)
    before = values(model)
    with pytest.raises(decent_dp.errors.CheckpointError, match=pattern):
        load(replica, tmp_path)
    assert_same(values(model), before)
    step(model, optimizer)
    replica.close()


def test_an_option_that_was_off_when_it_was_saved_is_named(tmp_path):
    def wrapped(amsgrad: bool) -> Any:
        return alone(net(), lambda pairs: torch.optim.Adam([param for _, param in pairs], lr=0.01, amsgrad=amsgrad))

    def gossiped(amsgrad: bool) -> Any:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=amsgrad)
        return decent_dp.gossip(model, optimizer, transport=InProcessTransport()), model, optimizer

    first = wrapped(False)
    loss(first, 0).backward()
    save(first, tmp_path / "wrapper")
    first.close()
    replica, model, optimizer = gossiped(False)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    save(replica, tmp_path / "gossip")
    replica.close()
    message = (
        "has no 'max_exp_avg_sq', which Adam needs: it was saved with amsgrad=False, and has amsgrad=True here. Make the "
        "optimizer with amsgrad=False"
    )
    for target, path in ((wrapped(True), "wrapper"), (gossiped(True)[0], "gossip")):
        with pytest.raises(decent_dp.errors.CheckpointError, match=message):
            load(target, tmp_path / path)
        target.close()


def test_one_step_of_a_new_optimizer_checks_all_parameters(tmp_path, monkeypatch):
    """A step for each of them takes 0.7 ms: 7 s for a model with 10,000 parameters."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    replica = decent_dp.gossip(model, optimizer, transport=InProcessTransport())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save(replica, tmp_path)
    steps = []
    real = torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda self, *args: (steps.append(self), real(self, *args))[1])
    load(replica, tmp_path)
    assert len(steps) == 2  # for vectors and for matrices
    replica.close()


# -- any value of another kind ------------------------------------------------------------------------------------------


def places(tree: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the dicts, lists and values of a tree are; of a list the first two."""
    for key, inner in (
        tree.items() if isinstance(tree, dict) else enumerate(tree[:2]) if isinstance(tree, (list, tuple)) else ()
    ):
        yield (*way, key)
        yield from places(inner, (*way, key))


def with_another(tree: Any, way: tuple[Any, ...], value: Any) -> Any:
    if not way:
        return value
    members = tree.items() if isinstance(tree, dict) else enumerate(tree)
    made = {key: with_another(inner, way[1:], value) if key == way[0] else inner for key, inner in members}
    return made if isinstance(tree, dict) else type(tree)(made.values())


OTHERS: list[Any] = [torch.zeros(3), {"a": 1}, [1, {"b": 2}], 10**400]


def replaced(rank: int, n: int, path: str, kind: str, resize: str | None, every: int) -> Any:
    """Each place of the snapshot of worker 0 has a value of another kind. Returns the errors, and whether the model changed."""
    root, found = Path(path), []
    if kind == "gossip":
        module = noisy_net(0)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        model: Any = decent_dp.gossip(module, optimizer, topology="ring", compression="int8")
        for t in range(3):
            optimizer.zero_grad()
            loss(module, t, rank).backward()
            optimizer.step()
        control = model.world.control
    else:
        model = make(kind)
        run(model, kind, rank, 0, 4)
        module, control = model.module, model.replica.world.control
    save(model, root, {"a": [1, torch.zeros(2)]})
    step = latest(root)
    assert step is not None
    file = step / shard_name(0)
    good = file.read_bytes()
    with Shard(file, 0) as shard:
        tree = loaded(shard.tree())
    parts = {key: tree[key] for key in ("snapshot", "random")}
    cases = [(way, other) for way in places(parts) for other in OTHERS]
    for way, other in [case for i, case in enumerate(cases) if i % every == 0 or (len(case[0]) == 2 and case[1] is OTHERS[0])]:
        control.gather(None)
        if rank == 0:
            craft(step, 0, lambda tree, way=way, other=other: with_another(tree, way, other))  # type: ignore[misc]
        control.gather(None)
        before = values(module)
        kind_of_error, text = error_of(lambda: load(model, root, resize=resize))
        same = not kind_of_error or all(torch.equal(before[key], value) for key, value in values(module).items())
        found.append((way, kind_of_error, text.removeprefix("worker 0: "), same))
        control.gather(None)
        if rank == 0:
            file.write_bytes(good)
    model.close()
    return found


@pytest.mark.parametrize(
    ("kind", "resize", "every"),
    [
        ("gossip", "mean", 83),
        *(pytest.param(*case, 1, marks=pytest.mark.slow) for case in itertools.product(("gossip", "int8"), (None, "mean"))),
    ],
)
def test_a_value_of_another_kind_loads_or_is_refused_by_all(workers, tmp_path, kind, resize, every):
    first, second = workers(2, replaced, str(tmp_path / "saved"), kind, resize, every, timeout=600 if every == 1 else 90)
    assert first == second
    assert {(kind, same) for _, kind, _, same in first} == {("", True), ("CheckpointError", True)}
