"""What programs that were written for decent_dp 0.2 rely on."""

from __future__ import annotations

import copy
import json
import logging
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import decent_dp
from decent_dp import optim
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.optim import published
from decent_dp.replica import construction
from decent_dp.topo import Edge, Topology
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import ROOT, SGD, Heard, alone, assert_same, loss, net, seed_cpu, values

# -- several workers: the groups of edges, the devices, the log ------------------------------------------------------------


class Summing(torch.optim.SGD):
    """Sums the ranks over the group of each edge, in the hook."""

    def __init__(self, params: Any, seen: list[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.seen = seen

    def pre_average_hook(self, edge: Edge, weight: float) -> None:
        try:
            group = edge.group
        except RuntimeError as error:
            self.seen.append((edge.ranks, str(error)))
            return
        total = torch.tensor([10.0 ** dist.get_rank()])
        dist.all_reduce(total, group=group)
        assert edge == Edge(list(edge.ranks), weight)
        self.seen.append((edge.ranks, float(total)))


class OwnGroups(Topology):
    """A pair with a process group of the user's, and one without."""

    def _get_topo_edges(self) -> list[list[Edge]]:
        first = [Edge([0, 1], 0.5, dist.new_group([0, 1])), Edge([2], 1.0)]
        return [first, [Edge([1, 2], 0.5), Edge([0], 1.0)], [Edge([0, 1, 2], 1 / 3)]]


def sums(rank: int, topology: Any, process_group: Any = None, **options: Any) -> list[Any]:
    seen: list[Any] = []
    optim_fn = partial(Summing, seen=seen)
    model = DecentralizedDataParallel(net(), optim_fn, topology=topology, process_group=process_group, **options)
    for t in range(4):
        loss(model, t, rank).backward()
    model.close()
    return seen


def devices_of_workers(rank: int, n: int) -> tuple[str, list[str]]:
    real, refused = dist.get_backend, ""
    dist.get_backend = lambda group=None: "nccl"
    try:
        decent_dp.gossip(model := net(), torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as error:
        refused = str(error)
    finally:
        dist.get_backend = real
    assert construction.gpus_of(net()) == []
    heard = Heard()
    gpus_of = construction.gpus_of
    construction.gpus_of = lambda model: ["GPU-a"] if rank < 2 else ["GPU-b"]
    decent_dp.gossip(model := net(), torch.optim.SGD(model.parameters(), lr=0.1)).close()
    construction.gpus_of = gpus_of
    return refused, heard.texts


def in_three_workers(rank: int, n: int) -> Any:
    pair = dist.new_group([0, 1])
    part = sums(rank, "ring", pair) if rank < 2 else []
    groups = [sums(rank, "complete"), sums(rank, OwnGroups()), part]
    found = devices_of_workers(rank, n)
    heard = Heard(logging.DEBUG)
    replica = decent_dp.gossip(model := net(), optimizer := SGD(model.parameters()), bucket_size_in_mb=0)
    for t in range(2):
        loss(model, t, rank).backward()
        optimizer.step()
    replica.close()
    return groups, found, heard.texts


@pytest.fixture(scope="module")
def three(workers: Any) -> list[Any]:
    return workers(3, in_three_workers)


def total(ranks: list[int]) -> float:
    return float(sum(10**rank for rank in ranks))


def test_the_group_of_an_edge_is_that_of_its_workers(three):
    for rank, ((complete, own, part), *_) in enumerate(three):
        assert complete == [([0, 1, 2], 111.0)] * 3
        assert [ranks for ranks, _ in own] == [ranks for ranks in ([0, 1], [1, 2], [0, 1, 2]) if rank in ranks]
        assert all(found == total(ranks) for ranks, found in own)
        # All workers of the process group are one edge.
        assert part == ([([0, 1], 11.0)] * 3 if rank < 2 else [])


def in_four_workers(rank: int, n: int) -> Any:
    """Groups of all edges are made, whatever the order of the buckets; and none with faults."""
    several = partial(sums, bucket_size_in_mb=0)
    found = [several(rank, topology) for topology in ("ring", "one-peer-exp", "ring")]
    found.append(sums(rank, "base-2", overlap=False, mix_every=2))
    return found, sums(rank, "ring", faults=decent_dp.Tolerate())


def test_groups_are_made_for_all_edges(workers):
    for rank, (found, tolerant) in enumerate(workers(4, in_four_workers)):
        for seen in found:
            assert len({tuple(ranks) for ranks, _ in seen}) == 2
            assert all(rank in ranks and number == total(ranks) for ranks, number in seen)
        assert tolerant
        assert all("has no process group: none are made with faults=" in text for _, text in tolerant)


def test_workers_that_are_threads_have_no_groups():
    seen: list[Any] = []

    def train(transport: Any) -> None:
        model = DecentralizedDataParallel(net(), partial(Summing, seen=seen), topology="ring", transport=transport)
        for t in range(3):
            loss(model, t, transport.rank).backward()
        model.close()

    run_replicas(2, train)
    assert seen
    assert all("has no process group" in text for _, text in seen)


def test_a_model_on_the_cpu_in_a_group_of_nccl_is_refused_on_all_workers(three):
    refused = [text for _, (text, _), _ in three]
    assert refused == [refused[0]] * 3
    assert "the model is on the CPU, and the process group's backend is NCCL" in refused[0]
    assert "model.to('cuda')" in refused[0]


def test_workers_with_one_gpu_are_warned_of_once(three):
    first, *others = [texts for _, (_, texts), _ in three]
    (text,) = first
    assert text.startswith("the models of workers 0, 1 are on one GPU")
    assert others == [[], []]


def test_the_log_says_who_mixes_what(three):
    for rank, (*_, texts) in enumerate(three):
        start, buckets, *rounds = [text for text in texts if f"worker {rank}" in text]
        assert start == (
            f"gossip: worker {rank} of 3, topology BaseTwoTopology(1, world_size=3, rank={rank}), compression None, "
            "279 trainable parameters in 6 tensors"
        )
        assert buckets.startswith(f"worker {rank}: 6 buckets, MiB: ")
        assert [text.partition(", edge [")[0] for text in rounds] == [f"worker {rank}: round {t} with a step" for t in (0, 1)]


def test_several_gpus_of_a_worker(monkeypatch):
    on = [SimpleNamespace(device=torch.device("cuda", i)) for i in (1, 0, 1)] + [SimpleNamespace(device=torch.device("cpu"))]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"id{device.index}"))
    assert construction.gpus_of(SimpleNamespace(parameters=lambda: on)) == ["id0", "id1"]


# -- optimizer states ------------------------------------------------------------------------------------------------------

KINDS = {
    "optim_fn_adam": (torch.optim.Adam, 1 / 32768, {}),
    "optim_fn_adamw": (torch.optim.AdamW, 0.1, {}),
    "optim_fn_accum_adam": (optim.AccumAdam, 1 / 32768, {"accum_iter": 4}),
    "optim_fn_accum_adamw": (optim.AccumAdamW, 0.1, {"accum_iter": 4}),
}


def named_model() -> nn.Module:
    """With names that 0.2 took for norms and biases, and norms that it did not."""
    seed_cpu(3)
    layers = {"subnet": nn.Linear(6, 6), "bn": nn.LayerNorm(6), "norm": nn.LayerNorm(6), "out": nn.Linear(6, 3)}
    return nn.Sequential(OrderedDict(layers))


def published_state(kind: str, named: list[tuple[str, Tensor]]) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """A state as 0.2 saved it: no names, and the decay in the second group; and its moments by name."""
    make, decay, options = KINDS[kind]
    first = [(name, param) for name, param in named if not ("bn" in name or "bias" in name)]
    second = [(name, param) for name, param in named if "bn" in name or "bias" in name]
    groups = [{"params": [p for _, p in first], "weight_decay": 0.0}, {"params": [p for _, p in second], "weight_decay": decay}]
    optimizer = make(groups, lr=0.01, **options)
    for number in range(2):
        for i, (_, param) in enumerate(named):
            param.grad = torch.full_like(param, 0.1 * (i + 1) + number)
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        for key in ("foreach", "compiled", "fused"):
            if options:  # 0.2's AccumAdam(W) had neither
                group.pop(key, None)
    for param in dict(named).values():
        param.grad = None
    return saved, {name: copy.deepcopy(optimizer.state[param]) for name, param in named}


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_optimizer_state_is_loaded_by_name_with_our_decay(kind, caplog):
    published._warn_once_of_decay.cache_clear()
    ours = alone(named_model(), partial(getattr(optim, kind), lr=0.01))
    loss(ours, 0).backward()
    (optimizer,) = ours._optims
    names = ours.replica.layout.units[0].bucket.buffer.names
    named = [(name, dict(ours.named_parameters())[name]) for name in names]
    before = [(group["weight_decay"], group["param_names"]) for group in optimizer.param_groups]
    twin = named_model()
    twin.load_state_dict(values(ours))
    saved, moments = published_state(kind, [(name, dict(twin.named_parameters())[name]) for name in names])
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert [text for text in caplog.messages if "weight decay stays" in text] != []
    assert len(caplog.messages) == 1
    assert [(group["weight_decay"], group["param_names"]) for group in optimizer.param_groups] == before
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    for name, param in named:
        for key, value in moments[name].items():
            assert torch.equal(optimizer.state[param][key].float(), value.float()), (name, key)
    # The next step is that of an optimizer with one group per parameter: our decay, and these moments.
    twin.load_state_dict(values(ours))
    make, decay, options = KINDS[kind]
    params = dict(twin.named_parameters())
    groups = [{"params": [p], "weight_decay": decay if p.ndim > 1 and "bias" not in n else 0.0} for n, p in params.items()]
    reference = make(groups, lr=0.01, **options)
    for name, param in params.items():
        reference.state[param] = copy.deepcopy(moments[name])
    loss(twin, 1).backward()
    reference.step()
    loss(ours, 1).backward()
    assert_same(ours, twin, 1e-6)


def test_a_published_state_of_other_parameters_is_refused():
    named = [*named_model().named_parameters()]
    saved, _ = published_state("optim_fn_adamw", named)
    with pytest.raises(ValueError, match=r"no names and groups of \[2, 6\] parameters.*has groups of \[1, 5\]"):
        optim.optim_fn_adamw(named[:6]).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"exp_avg of 'out.weight' .* has shape \(6,\), but the parameter has \(3, 6\)"):
        optim.optim_fn_adamw(named[::-1]).load_state_dict(saved)
    saved["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match="differ in lr"):
        optim.optim_fn_adamw(named).load_state_dict(saved)


def test_a_bucket_of_weights_alone_takes_a_published_state_with_an_empty_group():
    named = [("a.weight", nn.Parameter(torch.ones(2, 2))), ("b.weight", nn.Parameter(torch.ones(3, 2)))]
    saved, moments = published_state("optim_fn_adamw", named)
    optimizer = optim.optim_fn_adamw(named, weight_decay=0.3)
    optimizer.load_state_dict(saved)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]
    assert all(torch.equal(optimizer.state[param]["exp_avg"], moments[name]["exp_avg"]) for name, param in named)


def test_a_state_of_today_keeps_the_decay_that_was_saved():
    named = [*net().named_parameters()]
    saved = optim.optim_fn_adamw(named, weight_decay=0.0).state_dict()
    optimizer = optim.optim_fn_adamw(named, weight_decay=0.3)
    optimizer.load_state_dict(saved)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.0]


# -- state dicts of the model ----------------------------------------------------------------------------------------------


def gossiping(model: nn.Module) -> nn.Module:
    decent_dp.gossip(model, SGD(model.parameters()), transport=InProcessTransport())
    return model


@pytest.mark.parametrize(
    "wrap", [alone, gossiping, lambda m: nn.ModuleDict({"inner": alone(m)})], ids=["wrapper", "gossip", "in"]
)
def test_a_state_dict_of_which_no_key_fits_warns(wrap, caplog):
    model = wrap(net())
    saved = model.state_dict()
    inner = "inner." if isinstance(model, nn.ModuleDict) else ""
    cut = {inner + key.removeprefix(inner)[7:]: value for key, value in saved.items()}
    before = values(model)
    model.load_state_dict(cut, strict=False)
    assert "no key of the state dict fits the model, so nothing is loaded: its first is 't'" in caplog.text
    assert_same(before, values(model))
    caplog.clear()
    if not inner:
        model.load_state_dict({key[7:]: value for key, value in saved.items() if key.startswith("_model.")}, strict=False)
        assert "so nothing is loaded: it is empty" in caplog.text
        caplog.clear()
    model.load_state_dict(saved, strict=False)
    model.load_state_dict(dict(list(saved.items())[:1]), strict=False)
    model.load_state_dict(saved)
    if inner:
        model.load_state_dict({"other.weight": torch.ones(1)}, strict=False)  # of another part of the larger module
    assert not caplog.text
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(cut)


class Renamed(nn.Linear):
    """Takes the keys of its first version, too."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "kernel" in state:
            state[prefix + "weight"] = state.pop(prefix + "kernel")
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("make", [lambda: Renamed(3, 2), lambda: checkpoint_wrapper(nn.Linear(3, 2))], ids=["old", "wrapped"])
def test_a_state_dict_whose_keys_the_modules_rename_does_not_warn(make, caplog):
    model = gossiping(nn.Sequential(make(), make()))
    key = "kernel" if isinstance(model[0], Renamed) else "weight"
    model.load_state_dict({f"{i}.{key}": torch.full((2, 3), 7.0) for i in (0, 1)}, strict=False)
    assert all(bool((layer.weight == 7.0).all()) for layer in model)
    assert not caplog.text
    model.load_state_dict({"3.kernel": torch.ones(2, 3)}, strict=False)
    assert "so nothing is loaded: its first is '3.kernel'" in caplog.text


# -- whole programs --------------------------------------------------------------------------------------------------------


def run_program(name: str, launcher: str, folder: Path, *arguments: str, n: int = 2) -> list[dict[str, Any]]:
    """Runs a program of tests/programs as n processes that torchrun or Slurm seems to have started; what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(n):
        slurm = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "localhost"}
        if launcher == "srun":
            slurm |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(n)}
            own = {"MASTER_PORT": str(port)}
        else:  # one srun task per node, which starts torchrun
            slurm |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
            own = {"RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n)}
            own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "RANK", "LOCAL_", "WORLD_", "MASTER_"))}
        command = [sys.executable, str(ROOT / "tests" / "programs" / name), str(folder), *arguments]
        environ = {**kept, **slurm, **own, "OMP_NUM_THREADS": "1"}
        processes.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.slow
def test_an_image_program_with_a_compiled_forward_and_channels_last(tmp_path):
    first, second = run_program("image.py", "srun", tmp_path)
    assert first["mean"] == second["mean"]
    assert first["last"] != second["last"]
    assert all(found["losses"][-1] < 0.7 * found["losses"][0] for found in (first, second))
    again, _ = run_program("image.py", "srun", tmp_path, "--resume")
    assert again["losses"][0] < 0.7 * first["losses"][0]


@pytest.mark.slow
def test_a_text_program_with_a_profiler_accumulation_and_a_topology_of_its_own(tmp_path):
    first, second = run_program("text.py", "torchrun", tmp_path)
    assert first["mean"] == second["mean"]
    assert all(found["losses"][-1] < 0.8 * found["losses"][0] for found in (first, second))
    assert first["updates"] == second["updates"] == 12
    assert first["traces"] > 0
