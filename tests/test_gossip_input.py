"""Bad arguments of ``gossip``: the same error on all workers at once, and everything is released."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import decent_dp
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.rules import OuterNesterov
from decent_dp.transport import InProcessTransport
from tests.checkpoint_cases import error_of
from tests.helpers import SGD, listening, loss, net

# Arguments of gossip(): a model, an optimizer and options.
Given = tuple[Any, Any, dict[str, Any]]


def good(model: nn.Module, **options: Any) -> Given:
    return model, SGD(model.parameters()), {"topology": "ring", **options}


def instead(optimizer: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Given]:
    """Another object in place of the optimizer."""
    return lambda model: (model, optimizer(model), {"topology": "ring"})


def option(**options: Any) -> Callable[[nn.Module], Given]:
    return lambda model: good(model, **options)


def within(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Given]:
    return lambda model: good(wrap(model))


def part(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], Given]:
    return lambda model: good(nn.Sequential(nn.Linear(6, 6), wrap(model)))


def named(name: str, base: type) -> Any:
    """A class that is called as one of a package that is not installed."""
    return type(name, (base,), {})


def holding(tensor: Callable[[], Tensor], trained: bool = True, buffer: bool = False) -> Callable[[nn.Module], Given]:
    """A model with one more parameter or buffer, in an optimizer that takes it."""

    def made(model: nn.Module) -> Given:
        outer = nn.Module()
        outer.inner = model
        if buffer:
            outer.register_buffer("odd", tensor())
        else:
            value = tensor()
            outer.odd = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=trained)
        return outer, SGD(list(outer.parameters())), {"topology": "ring"}

    return made


class Engine(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Wrapping(Optimizer):
    """Calls another optimizer, as some frameworks' do, and is none itself."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


class Looking(torch.optim.SGD):
    def pre_average_hook(self, edge: Any, weight: float) -> None: ...


def frozen(model: nn.Module) -> Given:
    model, optimizer, options = good(model)
    return model.requires_grad_(False), optimizer, options


def lazy(model: nn.Module) -> Given:
    outer = nn.Sequential(model, nn.LazyLinear(2))
    return outer, SGD(model.parameters()), {}


def replaced(model: nn.Module) -> Given:
    """``model.to`` makes new parameters under this option of torch, after the optimizer was made."""
    optimizer = SGD(model.parameters())
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        return model.double(), optimizer, {}
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)


def halves(model: nn.Module, first: slice, second: slice) -> list[Optimizer]:
    params = list(model.parameters())
    return [SGD(params[first]), SGD(params[second])]


def twice(model: nn.Module) -> list[Optimizer]:
    optimizer = SGD(model.parameters())
    return [optimizer, optimizer]


OPT = "optimizer must be a torch.optim.Optimizer, or a list of them, got "
TYPE, VALUE = "TypeError", "ValueError"
# Each with the error's kind, and its text.
BAD: dict[str, tuple[Callable[[nn.Module], Given], str, str]] = {
    "swapped": (lambda m: (SGD(m.parameters()), m, {}), TYPE, "model must be a torch.nn.Module, got SGD"),
    "DataParallel": (within(nn.DataParallel), TYPE, "already wrapped in DataParallel: pass its .module, and start one"),
    "DeepSpeed": (
        within(named("DeepSpeedEngine", Engine)),
        TYPE,
        "wrapped in DeepSpeedEngine: it averages gradients itself",
    ),
    "FSDP1": (
        within(named("FullyShardedDataParallel", Engine)),
        TYPE,
        "wrapped in FullyShardedDataParallel: its flat shards cannot be mixed: call fully_shard",
    ),
    "lazy": (lazy, VALUE, "'1.weight' has no values yet"),
    "meta": (holding(lambda: torch.empty(2, device="meta")), VALUE, "'odd' has no values yet"),
    "sparse": (holding(lambda: torch.eye(2).to_sparse()), VALUE, "'odd' is a sparse tensor: make it dense"),
    "complex": (holding(lambda: torch.zeros(2, dtype=torch.complex64)), VALUE, "parameter 'odd' is torch.complex64"),
    "frozen": (frozen, VALUE, "no trainable parameters"),
    **{
        f"a {kind}": (instead(make), TYPE, f"{OPT}a {kind}: pass the object")
        for kind, make in {
            "NoneType": lambda m: None,
            "StepLR": lambda m: torch.optim.lr_scheduler.StepLR(SGD(m.parameters()), 3),
            "partial": lambda m: SGD,
            "Parameter": lambda m: m.parameters(),
            "Sequential": lambda m: m,
            "str": lambda m: "adam",
            "dict": lambda m: {"a": SGD(m.parameters())},
            "int": lambda m: [SGD(m.parameters()), 7],
        }.items()
    },
    "a class": (instead(lambda m: torch.optim.SGD), TYPE, f"{OPT}the class SGD: pass the object whose step() trains"),
    "empty": (instead(lambda m: []), VALUE, "optimizer is an empty list"),
    "wrapping": (instead(lambda m: Wrapping(SGD(m.parameters()))), TYPE, "Wrapping does not tell of its steps"),
    "hook": (instead(lambda m: Looking(m.parameters(), lr=0.1)), TYPE, "Looking has a pre_average_hook"),
    "sharing": (
        instead(lambda m: named("ZeroRedundancyOptimizer", torch.optim.SGD)(m.parameters(), lr=0.1)),
        TYPE,
        "ZeroRedundancyOptimizer makes the parameters of all workers equal",
    ),
    "in two": (instead(lambda m: halves(m, slice(0, 4), slice(3, 6))), VALUE, "parameter '2.bias' is in two optimizers"),
    "twice": (instead(twice), VALUE, "parameter '0.weight' is in two optimizers, or twice in one"),
    "in none": (
        instead(lambda m: halves(m, slice(0, 2), slice(3, 6))),
        VALUE,
        "parameter '2.weight' is in no optimizer",
    ),
    "another's": (
        instead(lambda m: SGD([*m.parameters(), torch.zeros(7, requires_grad=True)])),
        VALUE,
        "parameter 6 of SGD, of shape (7,), is not one of the model's",
    ),
    "replaced": (replaced, VALUE, "parameter 0 of SGD, of shape (12, 6), is not one of the model's"),
    "topology": (option(topology="rnig"), VALUE, "did you mean 'ring'?"),
    "int4": (option(compression="int4"), VALUE, "got 'int4': did you mean 'int8'?"),
    "no mix": (
        option(topology="complete:3,ring", mix_every=5),
        VALUE,
        "CompleteTopology, every 5 updates, would never mix",
    ),
    "overlap": (option(overlap="no"), TYPE, "overlap must be True or False, got 'no'"),
    "mix_every=0": (option(mix_every=0), VALUE, "mix_every must be a whole number of updates, at least 1, got 0"),
    "bucket -1": (
        option(bucket_size_in_mb=-1),
        VALUE,
        "bucket_size_in_mb must be a number of MiB, or 0 (one bucket per parameter), got -1",
    ),
    "local 0": (
        option(local_world_size=0),
        VALUE,
        "local_world_size must be a whole number of workers per node",
    ),
    "rule class": (option(rule=OuterNesterov), TYPE, "OuterNesterov is a class: pass rule=OuterNesterov(...)"),
    "rule": (option(rule="outer"), TYPE, "got 'outer'"),
    "scaler": (option(scaler=True), TYPE, "scaler must be a torch.GradScaler or None, got True"),
}


def other_order(model: nn.Module) -> Given:
    return model, SGD(list(model.parameters())[::-1]), {"topology": "ring"}


def frozen_bias(model: nn.Module) -> Given:
    model[0].bias.requires_grad_(False)
    return good(model)


DDP = nn.parallel.DistributedDataParallel
IN_DDP = "is in DistributedDataParallel over 2 of 2 workers, which averages its gradients: that is one replica"
# Of all workers together, which have a process group.
TOGETHER = {
    "DDP": (within(DDP), VALUE, IN_DDP),
    "DDP inside": (part(DDP), TYPE, "a part of the model is wrapped in DistributedData"),
    "encrypt": (option(encrypt="yes"), TYPE, "encrypt must be None"),
    "transport": (option(transport="auto"), TYPE, "transport must be None"),
}


# On one worker only, where each alone would be right.
DIFFERENT: dict[str, tuple[Callable[[nn.Module], Given], str]] = {
    "kind": (instead(lambda m: torch.optim.Adam(m.parameters())), "SGD of 0.weight, 0.bias, 2.weight"),
    "number": (instead(lambda m: halves(m, slice(0, 2), slice(2, 6))), "'SGD of 2.weight, 2.bias, 4.weight, 4.bias'"),
    "order": (other_order, "SGD of 4.bias, 4.weight, 2.bias"),
    "frozen": (frozen_bias, "parameter '0.bias' (12,) float32, frozen"),
    "rule": (option(rule=OuterNesterov(lr=0.5)), "OuterNesterov"),
    "scaler": (option(scaler=torch.amp.GradScaler("cpu")), "scaled is False on worker 0 and True on worker 1"),
    "topology": (option(topology="complete"), "the topology differs between workers"),
    "turns": (option(topology="complete:101,ring"), "name is "),
    "compression": (option(compression="int8"), "'int8' on worker 1"),
    "mix_every": (option(mix_every=2), "mix_every is 1 on worker 0 and 2 on worker 1"),
    "overlap": (option(overlap=False), "overlap is True on worker 0 and False on worker 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_argument_is_named(name):
    """And everything is released: a right call works afterwards, also on a model with which another one has failed."""
    bad, kind, text = BAD[name]
    transport, model = InProcessTransport(), net()
    given, optimizer, options = bad(model)
    found, said = error_of(lambda: decent_dp.gossip(given, optimizer, transport=transport, **options))
    assert found == kind, said
    assert text in said
    assert len(said) < 400
    model = model.float().requires_grad_(True)
    optimizer = SGD(model.parameters())
    decent_dp.gossip(model, optimizer, transport=transport, topology="complete").close()  # the transport is the caller's


# -- several workers -------------------------------------------------------------------------------------------------------


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("decent_dp")}


def attempt(given: Given) -> tuple[str, str]:
    """The error of one call, which is raised soon and leaves no thread and no port behind."""
    model, optimizer, options = given
    before, began = (threads(), listening()), time.monotonic()
    found = error_of(lambda: decent_dp.gossip(model, optimizer, **options))
    took = time.monotonic() - began
    assert took < 45, f"{took} s: {found}"
    gc.collect()
    for _ in range(100):
        left = threads() - before[0], listening() - before[1]
        if not any(left):
            break
        time.sleep(0.02)
    assert not any(left), (left, found)
    return found


def trains(model: nn.Module, rank: int) -> bool:
    """A right call works, also on a model with which others have failed."""
    optimizer = SGD(model.parameters())
    gossip = decent_dp.gossip(model, optimizer, topology="ring")
    for t in range(2):
        loss(model, t, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    gossip.close()
    return gossip.stats().rounds == 2


# The same checks find them as on one worker: some are enough.
SOME = [*BAD][::12]


def wrong(rank: int, n: int) -> Any:
    """On worker 1 alone, and on all; and where each alone would be right."""
    found: dict[str, Any] = {}
    gc.freeze()  # what is there already need not be looked at again and again
    for name in SOME:
        model = net()
        found[name] = attempt(BAD[name][0](net()) if rank == 1 else good(model))
        assert trains(model, rank), name
    for name, (bad, _, _) in TOGETHER.items():
        found[name] = attempt(bad(net()))
    for name, (other, _) in DIFFERENT.items():
        model = net()
        found[f"different {name}"] = attempt(other(model) if rank == 1 else good(model))
        if name in ("kind", "frozen", "overlap"):
            assert trains(model.requires_grad_(True), rank), name
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(300)])
    params = list(model.parameters())
    if rank == 1:
        params[-2:] = params[:-3:-1]
    found["large"] = attempt((model, SGD(params), {}))
    return found


def test_the_same_error_on_all_workers(workers):
    found, other = workers(2, wrong)
    assert found == other
    for name in SOME:
        _, kind, text = BAD[name]
        assert found[name][0] == kind, found[name]
        assert found[name][1].startswith("worker 1: ")
        assert text in found[name][1]
    for name, (_, kind, text) in TOGETHER.items():
        assert found[name][0] == kind
        assert text in found[name][1]
        assert not found[name][1].startswith("worker")
    for name, (_, text) in DIFFERENT.items():
        kind, said = found[f"different {name}"]
        assert kind == "DisagreementError", (name, said)
        assert text in said, (name, said)
        assert "worker 1" in said, (name, said)
    assert "SGD of 600 parameters, 0.weight, 0.bias" in found["large"][1]
    assert len(found["large"][1]) < 500


def without_a_collector(rank: int, n: int) -> Any:
    """No error references itself, which would keep the connections."""
    gc.disable()
    assert trains(net(), rank)
    before, found = listening(), []
    for given in (good(net(), compression="int4"), good(net(), mix_every=1 + rank), good(net(), mix_every=rank)):
        found.append(error_of(lambda given=given: decent_dp.gossip(given[0], given[1], **given[2]))[0])
        for _ in range(100):
            if listening() <= before:
                break
            time.sleep(0.02)
        assert listening() <= before, found
    return found


def test_connections_do_not_wait_for_the_garbage_collector(workers):
    assert workers(2, without_a_collector) == [["ValueError", "DisagreementError", "ValueError"]] * 2


def trained_elsewhere(rank: int, n: int) -> Any:
    """Of another gossip() and of a wrapper, on both or on one; and after they were closed."""
    found = []
    model = net()
    optimizer = SGD(model.parameters())
    first = decent_dp.gossip(model, optimizer, topology="ring")
    optimizer.step()  # a replica without an update would let the next one take the model over
    found.append(attempt(good(model)))
    found.append(attempt(good(nn.Sequential(model, nn.Linear(3, 3)))))
    found.append(error_of(lambda: DecentralizedDataParallel(model, SGD, topology="ring")))
    fresh = net()
    found.append(attempt(good(model if rank == 0 else fresh)))
    first.close()
    assert trains(model, rank)
    wrapper = DecentralizedDataParallel(model, SGD, topology="ring")
    wrapper.update()
    found.append(attempt(good(model)))
    found.append(attempt(good(wrapper)))
    wrapper.close()
    assert trains(model, rank)
    return found


def test_a_model_that_is_trained_already(workers):
    found, other = workers(2, trained_elsewhere)
    assert found == other
    name = "is trained by another DecentralizedDataParallel or gossip()"
    expected = [("0.weight", name), ("0.0.weight", name), ("0.weight", name), ("worker 0: ", name), ("0.weight", name)]
    for (kind, said), texts in zip(found, expected, strict=False):
        assert kind == "ValueError"
        assert all(text in said for text in texts), said
    assert found[5] == ("TypeError", "model is already wrapped in DecentralizedDataParallel: pass its .module")


def test_without_a_process_group():
    before = threads()
    for _ in range(2):
        model = net()
        kind, said = error_of(lambda model=model: decent_dp.gossip(model, SGD(model.parameters())))
        assert kind == "RuntimeError"
        assert "process group" in said
        assert not threads() - before
