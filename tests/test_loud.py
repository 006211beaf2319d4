"""Mistakes that would silently train wrongly: PyTorch DDP around a replica, and the old loop around the wrapper."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import decent_dp
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.replica.snapshot import take
from decent_dp.transport import InProcessTransport
from tests.helpers import SGD, alone, error_of, loss, net


def by_gossip(model: nn.Module, optimizer: Any = None, **options: Any) -> decent_dp.Gossip:
    optimizer = optimizer if optimizer is not None else torch.optim.SGD(model.parameters(), lr=0.1)
    return decent_dp.gossip(model, optimizer, transport=InProcessTransport(), **options)


# -- CUDA graphs -----------------------------------------------------------------------------------------------------------


def as_graphed(module: nn.Module) -> None:
    """As ``torch.cuda.make_graphed_callables`` leaves a module."""

    def new_fwd(x: torch.Tensor) -> torch.Tensor:
        return type(module).forward(module, x)

    new_fwd.__qualname__ = "make_graphed_callables.<locals>.make_graphed_forward.<locals>.new_fwd"
    module.forward = new_fwd


@pytest.mark.parametrize(
    ("place", "said"), [("", "the forward of the model is a CUDA graph"), ("0", "of module '0' is a CUDA")]
)
def test_the_wrapper_does_not_move_what_a_cuda_graph_reads(place, said):
    model = net()
    as_graphed(model.get_submodule(place))
    with pytest.raises(ValueError, match=said):
        DecentralizedDataParallel(model, SGD, transport=InProcessTransport())
    before = [param.data_ptr() for param in model.parameters()]
    replica = DecentralizedDataParallel(model, SGD, param_as_bucket_view=False, transport=InProcessTransport())
    loss(replica, 0, 0).backward()
    assert [param.data_ptr() for param in model.parameters()] == before
    replica.close()
    by_gossip(model).close()
    assert [param.data_ptr() for param in model.parameters()] == before


def test_the_name_by_which_torchs_graphs_are_known():
    """There is no other sign of them; without a GPU only the source shows that torch still has it."""
    source = inspect.getsource(torch.cuda.make_graphed_callables)
    assert "func.forward = make_graphed_forward(" in source
    assert "def new_fwd(" in source


# -- PyTorch DDP -----------------------------------------------------------------------------------------------------------


def same_graph(graph: Any, _: Any) -> Any:
    """A backend of torch.compile that compiles nothing, and counts."""
    same_graph.count += 1  # type: ignore[attr-defined]
    return graph.forward


def ddp_around(rank: int, n: int) -> dict[str, str]:
    found = {}

    def attempt(name: str, around: Any, *closing: Any) -> None:
        found[name] = error_of(lambda: loss(around, 0, rank))
        for replica in closing:
            replica.close()

    wrapper = DecentralizedDataParallel(net(), SGD, topology="ring")
    attempt("the wrapper", DistributedDataParallel(wrapper), wrapper)
    wrapper = DecentralizedDataParallel(net(), SGD, topology="ring")
    attempt("the wrapper's module", DistributedDataParallel(wrapper.module), wrapper)
    model = net()
    around = DistributedDataParallel(model)
    replica = decent_dp.gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), topology="ring")
    attempt("before gossip", around)
    attempt("after gossip", DistributedDataParallel(model))
    attempt("a part of it", DistributedDataParallel(nn.Sequential(model, nn.Linear(3, 3))))
    attempt("compiled inside", DistributedDataParallel(torch.compile(model, backend=same_graph)))
    attempt("compiled outside", torch.compile(DistributedDataParallel(model), backend=same_graph))
    attempt("a full graph", DistributedDataParallel(torch.compile(model, backend=same_graph, fullgraph=True)))
    # Allowed: a copy in DDP, another model, the model without DDP, and after the end.
    loss(DistributedDataParallel(copy.deepcopy(model)), 0, rank)
    loss(DistributedDataParallel(pickle.loads(pickle.dumps(model))), 0, rank)
    loss(DistributedDataParallel(nn.Sequential(net(), nn.Linear(3, 3))), 0, rank)
    loss(model, 0, rank)
    replica.close()
    loss(DistributedDataParallel(model), 0, rank).backward()
    return found


def test_pytorch_ddp_around_a_replica(workers):
    same_graph.count = 0  # type: ignore[attr-defined]
    found, other = workers(2, ddp_around)
    assert found == other
    assert len(found) == 8
    full = found.pop("a full graph")  # torch's words, which name ours
    assert full
    for name, said in found.items():
        assert said.startswith("RuntimeError: PyTorch's DistributedDataParallel is around this model"), name
        assert "accelerator.prepare_model(model, evaluation_mode=True)" in said


def test_the_forward_hook_does_not_change_models():
    same_graph.count = 0  # type: ignore[attr-defined]
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = by_gossip(model, optimizer)
    compiled = torch.compile(model, backend=same_graph, fullgraph=True)
    for t in range(3):
        loss(compiled, t).backward()
        optimizer.step()
    loss(model, 0)
    optimizer.step()
    loss(compiled, 4)
    assert same_graph.count == 1  # type: ignore[attr-defined]  # taken off, it would be compiled again
    replica.close()
    assert not model._forward_pre_hooks
    model = net()
    wrapper = alone(model)
    loss(wrapper, 0).backward()
    wrapper.close()
    assert not model._forward_pre_hooks


# -- a step in a captured graph --------------------------------------------------------------------------------------------


def test_a_round_in_a_cuda_graph_is_refused(monkeypatch):
    """Without a GPU: the device of the parameters and the capture are faked."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = by_gossip(model, optimizer)
    wrapper = alone(net())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    loss(model, 0).backward()
    optimizer.step()  # on a CPU nothing is captured
    for one in (replica, wrapper.replica):
        monkeypatch.setattr(one.life, "_on_cuda", True)
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        optimizer.step()
    with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
        loss(wrapper, 0)
    monkeypatch.undo()
    optimizer.step()
    loss(wrapper, 0).backward()
    assert (replica.stats().rounds, wrapper.stats().rounds) == (2, 1)


# -- the loop of before ----------------------------------------------------------------------------------------------------


def warnings_of(call: Any) -> list[str]:
    """The warnings of a call; each of them points at this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(one.filename == __file__ and one.category is UserWarning for one in caught)
    return [str(one.message) for one in caught]


def test_an_old_loop_around_the_wrapper():
    model = alone(net())
    own = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)

    def old_loop() -> None:
        for t in range(4):
            loss(model, t).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            own.step()
            schedule.step()

    [said] = warnings_of(old_loop)
    assert "AdamW steps parameter '0.weight', which DecentralizedDataParallel trains" in said
    assert "lr_scheduler_fn" in said
    assert "no_sync()" in said
    assert warnings_of(old_loop) == []  # once for each optimizer
    again = torch.optim.AdamW(model.parameters())
    assert len(warnings_of(again.step)) == 1
    model.close()
    # No warning for a closed replica, nor for a model without a replica.
    assert warnings_of(lambda: (torch.optim.SGD(model.parameters()).step(), torch.optim.SGD(net().parameters()).step())) == []
    # An optimizer that was no stranger before: the model is trained by a new wrapper now.
    plain = net()
    first = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert warnings_of(first.step) == []
    second = alone(plain)
    assert len(warnings_of(first.step)) == 1
    second.close()
    third = alone(plain)
    assert warnings_of(lambda: loss(third, 0).backward()) == []
    assert third.stats().updates == 1


class Outer(Optimizer):
    """Steps a real optimizer inside its own step, or alone: as SAM's second_step does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        self.base_optimizer.step()

    def second_step(self) -> None:
        self.base_optimizer.step()


def test_foreign_optimizers_beside_gossip():
    model = net()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = by_gossip(model, first)
    loss(model, 0).backward()
    assert warnings_of(first.step) == []
    again = torch.optim.SGD(model.parameters(), lr=0.01)  # re-created, as for another rate
    [said] = warnings_of(again.step)
    assert "SGD steps parameter '0.weight', which gossip() mixes after the steps of other optimizers" in said
    assert "Pass it to gossip()" in said
    other = net()
    beside = by_gossip(other, torch.optim.SGD(other.parameters(), lr=0.1))  # all optimizers are looked at anew
    assert warnings_of(again.step) == []
    beside.close()
    assert replica.stats().rounds == 1
    replica.close()
    replica = by_gossip(model, again)
    assert warnings_of(again.step) == []
    assert replica.stats().rounds == 1
    replica.close()
    outer = Outer(model.parameters())
    replica = by_gossip(model, outer)
    assert warnings_of(outer.step) == []
    replica.close()
    outer = Outer(model.parameters())
    replica = by_gossip(model, outer)
    assert len(warnings_of(outer.second_step)) == 1
    assert replica.stats().rounds == 0


def test_inner_optimizers_of_a_wrapper_do_not_warn():
    model = alone(net(), lambda named: Outer([param for _, param in named]))
    assert warnings_of(lambda: [loss(model, t).backward() for t in range(2)]) == []
    assert model.stats().updates == 2


# -- a cell that is run twice ----------------------------------------------------------------------------------------------


def twice(rank: int, n: int) -> Any:
    """A replica without an update lets a new one take its model over; one that has made one, on one worker, does not."""
    found = []
    model = net()
    wrapper = partial(DecentralizedDataParallel, optim_fn=SGD, topology="ring")

    def gossip() -> decent_dp.Gossip:
        return decent_dp.gossip(model, torch.optim.SGD(model.parameters(), lr=0.1), topology="ring")

    first = wrapper(model)
    second = gossip()
    third = gossip()
    fourth = wrapper(model)
    hooks = len(model._state_dict_hooks)
    found.append(error_of(lambda: loss(first, 0)))
    found.append(error_of(second.consensus_distance))
    found.append(error_of(lambda: take(third)))
    loss(fourth, 0, rank).backward()
    assert fourth.stats().rounds == 1
    found.append(error_of(gossip))  # it has made an update
    fourth.close()
    assert not model._state_dict_hooks
    assert hooks == 1
    # Only on one worker there is one, with an update; and then one whose gradients wait for more.
    if rank == 0:
        lone = alone(model)
        loss(lone, 0).backward()
    found.append(error_of(gossip))
    if rank == 0:
        lone.close()
        lone = alone(model)
        with lone.no_sync():
            loss(lone, 0).backward()
    found.append(error_of(gossip))
    if rank == 0:
        lone.close()
        lone = alone(nn.Sequential(model, nn.Linear(3, 3)))  # the other has more parameters than the new one
    found.append(error_of(gossip))
    return found


def test_a_cell_that_is_run_twice(workers):
    found, other = workers(2, twice)
    assert found == other
    taken = "had made no update when a newer one took its model over: use the newer one."
    assert found[0] == f"RuntimeError: the wrapper {taken}"
    assert found[1] == found[2] == f"RuntimeError: this Gossip {taken}"
    assert all("is trained by another DecentralizedDataParallel or gossip()" in said for said in found[3:])
    assert all(said.startswith("ValueError: worker 0: ") for said in found[4:])


def test_ddp_around_a_part_of_a_model_without_forward_and_at_any_time(monkeypatch):
    parts = nn.ModuleDict({"a": net(), "b": nn.ModuleList([net(1)])})
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    replica = by_gossip(parts, optimizer)
    inner = [parts["a"], parts["b"][0]]
    for t in range(2):
        for model in inner:
            with monkeypatch.context() as around:
                around.setattr(DistributedDataParallel, "_active_ddp_module", nn.Sequential(model))
                with pytest.raises(RuntimeError, match="PyTorch's DistributedDataParallel is around this model"):
                    loss(model, t)
        sum(loss(model, t) for model in inner).backward()
        optimizer.step()
    replica.close()
