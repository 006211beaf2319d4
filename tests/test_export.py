"""The model to keep: exports, and BatchNorm's statistics."""

from __future__ import annotations

import copy
import importlib
import resource
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from decent_dp.checkpoint.average import AveragedReplica
from decent_dp.checkpoint.exporting import calibrate, export
from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.errors import CheckpointError, DisagreementError, OutOfStepError
from decent_dp.transport import run_replicas
from tests.helpers import SGD, alone, loss, net, values

ADAMW = partial(torch.optim.AdamW, lr=0.02)
FORMATS = ("model.pt", "model.safetensors")


class Everything(nn.Module):
    """Tied, frozen, strided and half-precision parameters; buffers of all kinds; a random mask; an extra state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.fixed = nn.BatchNorm1d(6).eval()
        self.kernel = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.scale = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.out = nn.Linear(6, 3)
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("table", torch.randn(7))
        self.register_buffer("hidden", torch.randn(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.hidden.add_(1)
        x = self.drop(self.norm(self.first(x)).relu()) + self.frozen(self.fixed(x))
        result: Tensor = self.out(self.tied(x) * self.scale) + self.kernel.square().sum() * 1e-2
        return result

    def get_extra_state(self) -> Any:
        return torch.tensor([3, 4])

    def set_extra_state(self, state: Any) -> None:
        assert state.tolist() == [3, 4]


def everything_of(model: Any) -> dict[str, Tensor]:
    module = model.module
    found = {name: t.detach().clone() for name, t in (*module.named_parameters(), *module.named_buffers())}
    found["modes"] = torch.tensor([m.training for m in module.modules()])
    found["momenta"] = torch.tensor([m.momentum for m in module.modules() if isinstance(m, nn.BatchNorm1d)])
    found["random"] = torch.get_rng_state()
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].stride() == b[name].stride(), name
        assert torch.equal(a[name], b[name]), name


def trained(rank: int, steps: int, **options: Any) -> DecentralizedDataParallel:
    torch.manual_seed(100 + rank)
    model = DecentralizedDataParallel(Everything(), ADAMW, topology="ring", **options)
    for t in range(steps):
        loss(model, t, rank).backward()
    return model


def batches(rank: int, count: int | None = None) -> list[Any]:
    """Different numbers and sizes on each worker."""
    generator = torch.Generator().manual_seed(50 + rank)
    found = [torch.randn(4 + i, 6, generator=generator) for i in range(2 + rank if count is None else count)]
    return [found[0], *((x, "label") for x in found[1:])]


# -- export -----------------------------------------------------------------------------------------------------------


def export_in_the_middle(rank: int, n: int, folder: str) -> Any:
    """A run without an export, and one with some."""
    found = []
    for exports in (False, True):
        model = trained(rank, 5)
        before = everything_of(model)
        if exports:
            for name in FORMATS:
                assert export(model, f"{folder}/deep/{name}") == Path(folder, "deep", name)
                assert export(model, Path(folder, f"fitted-{name}"), loader=batches(rank)) == Path(folder, f"fitted-{name}")
            same(everything_of(model), before)
        rounds = model.stats().rounds
        for t in range(5, 9):
            loss(model, t, rank).backward()
        found += [before, everything_of(model), rounds]
        model.close()
    return found


def opened(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    return found


def check_mean(path: Path, replicas: list[dict[str, Tensor]], skip: tuple[str, ...] = ()) -> None:
    state = opened(path)
    reference = Everything().state_dict()
    assert set(state) == set(reference)
    names = {name: "first.weight" if name == "tied.weight" else name for name in state if not name.endswith("_extra_state")}
    for key, name in names.items():
        if key.endswith(skip):
            continue
        own, of_all = state[key], [replica[name] for replica in replicas]
        assert (own.shape, own.dtype) == (of_all[0].shape, of_all[0].dtype)
        if own.is_floating_point() and name not in ("table", "frozen.weight", "frozen.bias"):
            mean = np.mean([value.double().numpy() for value in of_all], axis=0)
            tolerance = 1e-2 if own.dtype == torch.bfloat16 else 2e-7
            np.testing.assert_allclose(own.double().numpy(), mean, rtol=tolerance, atol=tolerance, err_msg=key)
        else:
            assert torch.equal(own, of_all[0]), key
    Everything().load_state_dict(state, strict=True)


@pytest.fixture(scope="module")
def exported(workers, tmp_path_factory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("exported")
    return folder, workers(3, export_in_the_middle, str(folder))


def test_an_export_is_the_mean_of_the_replicas(exported):
    folder, found = exported
    replicas = [before for *_, before, _, _ in found]
    assert not torch.equal(replicas[0]["first.weight"], replicas[1]["first.weight"])
    assert not torch.equal(replicas[0]["norm.running_mean"], replicas[1]["norm.running_mean"])
    for name in FORMATS:
        check_mean(folder / "deep" / name, replicas)
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == sorted([*FORMATS, *(f"fitted-{n}" for n in FORMATS)])


def test_an_export_does_not_disturb_the_run(exported):
    for _, expected, expected_rounds, _, after, rounds in exported[1]:
        same(after, expected)
        assert rounds == expected_rounds == 5


def mean_model(replicas: list[dict[str, Tensor]]) -> Everything:
    model = Everything()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(torch.stack([replica[name].double() for replica in replicas]).mean(0))
    return model


def test_an_export_with_a_loader_has_the_statistics_of_the_mean_model(exported):
    """As torch's update_bn finds them on the mean model over the batches of all workers."""
    folder, found = exported
    replicas = [before for *_, before, _, _ in found]
    model = mean_model(replicas)
    model.drop.p = 0.0  # the workers' masks are not ours; `norm` comes before the mask and `fixed` does not see it
    update_bn([batch for rank in range(3) for batch in batches(rank)], model)
    for name in FORMATS:
        check_mean(folder / f"fitted-{name}", replicas, skip=("running_mean", "running_var", "num_batches_tracked"))
        state = opened(folder / f"fitted-{name}")
        for norm in ("norm", "fixed"):
            for which in ("running_mean", "running_var"):
                torch.testing.assert_close(
                    state[f"{norm}.{which}"], model.state_dict()[f"{norm}.{which}"], rtol=1e-5, atol=1e-6
                )
            assert state[f"{norm}.num_batches_tracked"] == 2 + 3 + 4


def sums_without_us(rank: int, n: int, paths: list[str]) -> list[float]:
    for name in [name for name in sys.modules if name.split(".")[0] == "decent_dp"]:
        del sys.modules[name]
    sys.modules["decent_dp"] = None  # type: ignore[assignment]  # importing it now raises an ImportError
    with pytest.raises(ImportError):
        importlib.import_module("decent_dp")
    found = []
    for path in paths:
        model = net(9)
        model.load_state_dict(opened(Path(path)), strict=True)
        found.append(sum(p.double().sum().item() for p in model.parameters()))
    return found


def test_an_export_opens_where_decent_dp_is_not_installed(workers, tmp_path):
    model = alone(net())
    loss(model, 0).backward()
    paths = [str(export(model, tmp_path / name)) for name in (*FORMATS, "model.pth", "model.bin")]
    assert workers(1, sums_without_us, paths) == [[sum(p.double().sum().item() for p in model.parameters())] * 4]


def test_an_export_replaces_the_file_in_one_step(tmp_path):
    model = alone(net())
    path = export(model, tmp_path / "model.pt")
    first = torch.load(path, weights_only=True)
    loss(model, 0).backward()

    limit = resource.RLIMIT_FSIZE
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (1000, before[1]))  # the writing fails half-way, as on a full disk
    try:
        with pytest.raises(CheckpointError, match=r"model\.pt'.*File too large"):  # torch's own error has no word of the cause
            export(model, path)
    finally:
        resource.setrlimit(limit, before)
    same(torch.load(path, weights_only=True), first)
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]
    export(model, path)
    same(torch.load(path, weights_only=True), dict(model.state_dict()))


def has_extra(value: Any) -> Any:
    return lambda model: setattr(model.module, "get_extra_state", lambda: value)


# The path, the loader, a change of the model, and the error: of both workers, or where `worker 1` is named of that one alone.
ERRORS: dict[str, tuple[Any, Any, Any, type[Exception], str]] = {
    "a suffix": ("model.h5", None, None, ValueError, ".safetensors, .pt, .pth, .bin, got "),
    "no suffix": ("model", None, None, ValueError, ".safetensors, .pt, .pth, .bin, got "),
    "below a file": ("file/model.pt", None, None, CheckpointError, "file/model.pt'"),
    "a folder": ("folder.pt", None, None, CheckpointError, "folder.pt'"),
    "no batch": ("model.pt", [], None, ValueError, "worker 1: the loader gave no batch"),
    "a batch of another shape": ("model.pt", [torch.ones(4, 7)], None, RuntimeError, "worker 1: "),
    "no tensor": ("model.pt", [{"x": torch.ones(4, 6)}], None, TypeError, "worker 1: batch 0 of the loader must be a tensor"),
    "a set": ("model.safetensors", None, has_extra({3}), TypeError, "a set under '_extra_state'"),
    "a module": ("model.pt", None, has_extra(nn.Linear(2, 2)), TypeError, "a Linear under '_extra_state'"),
    "no path": (None, None, None, TypeError, "export takes the path of the file to write, got None"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_an_export_are_raised_on_all_workers(tmp_path, name):
    path, loader, change, kind, text = ERRORS[name]
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.pt").mkdir()

    def work(transport: Any) -> str:
        model = DecentralizedDataParallel(Everything(), ADAMW, topology="ring", transport=transport)
        if change is not None:
            change(model)
        own = None if loader is None else loader if transport.rank == 1 else batches(0)
        before = everything_of(model)
        with pytest.raises(kind) as caught:
            export(model, path and tmp_path / path, loader=own)
        del before["random"]  # the other thread's model has drawn, too
        same({name: value for name, value in everything_of(model).items() if name != "random"}, before)
        return str(caught.value)

    first, second = run_replicas(2, work)
    assert text in first, first
    assert text.removeprefix("worker 1: ") in second, second
    assert not (tmp_path / "model.pt").exists()


def test_an_extra_state_of_plain_values_is_exported(tmp_path):
    model = alone(Everything(), ADAMW)
    has_extra({"a": [1, "b"]})(model)
    export(model, tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["_extra_state"] == {"a": [1, "b"]}


def test_workers_that_are_out_of_step(tmp_path):
    def work(transport: Any) -> None:
        rank = transport.rank
        model = DecentralizedDataParallel(net(), SGD, mix_every=5, transport=transport)
        ema = AveragedReplica(model)
        for t in range(1 + rank):
            loss(model, t, rank).backward()
            ema.update()
        for what, call in (
            ("export", lambda: export(model, tmp_path / "model.pt")),
            ("calibrate", lambda: calibrate(model, [])),
            ("averaged of AveragedReplica", lambda: ema.averaged().__enter__()),
        ):
            with pytest.raises(OutOfStepError, match=f"^{what} needs all .*worker 0: 1, worker 1: 2"):
                call()
        if rank == 0:
            loss(model, 1, rank).backward()
        for decay, kind, text in (
            (ema.decay, OutOfStepError, r"averaged different numbers of updates \(worker 0: 1, worker 1: 2\)"),
            (0.5 + rank / 10, DisagreementError, r"0\.5 on worker 0 and 0\.6 on worker 1"),
        ):
            ema.decay = decay
            with pytest.raises(kind, match=text), ema.averaged():
                pass
            ema.updates = 2
        ema.decay = 0.5
        with ema.averaged():
            assert not (tmp_path / "model.pt").exists()

    run_replicas(2, work)


def test_only_a_wrapper_is_exported(tmp_path):
    for call in (lambda m: export(m, tmp_path / "model.pt"), lambda m: calibrate(m, []), AveragedReplica):
        with pytest.raises(TypeError, match=r"DecentralizedDataParallel that wraps the model, .*got a Sequential"):
            call(net())


# -- inside averaged() ------------------------------------------------------------------------------------------------


def inside(rank: int, n: int, folder: str) -> Any:
    model = trained(rank, 4, sync_buffer_in_global_avg=True)
    ema = AveragedReplica(model, 0.5)
    for t in range(4, 7):
        loss(model, t, rank).backward()
        ema.update()
    own = everything_of(model)
    found = []
    for name, context in (("ema", ema.averaged()), ("mean", model.averaged())):
        with context:
            calibrate(model, batches(rank))
            there = everything_of(model)
            export(model, f"{folder}/{name}.pt")
            same(everything_of(model), there)
        found.append({key: value for key, value in there.items() if key in model.state_dict()})
        left = everything_of(model)
        if name == "mean":  # it puts back what it averages: not the integers of calibrate
            left, own = ({k: v for k, v in all_.items() if "tracked" not in k} for all_ in (left, own))
        same(left, own)
    return found


def test_an_export_inside_averaged_writes_the_present_values(workers, tmp_path):
    found = workers(3, inside, str(tmp_path))
    for i, name in enumerate(("ema", "mean")):
        state = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        for replicas in found:
            for key, value in replicas[i].items():
                assert torch.equal(state[key], value), key
    assert not torch.equal(found[0][0]["first.weight"], found[0][1]["first.weight"])


def test_present_values_are_written_bit_for_bit(tmp_path):
    """The mean of seven equal numbers is not always that number."""

    def work(transport: Any) -> Any:
        model = DecentralizedDataParallel(net(), SGD, topology="ring", transport=transport)
        loss(model, 0, transport.rank).backward()
        with model.averaged():
            mean = values(model.module)
            export(model, tmp_path / "model.pt")
            same(values(model.module), mean)
        return mean

    for mean in run_replicas(7, work):
        same(torch.load(tmp_path / "model.pt", weights_only=True), mean)


# -- calibrate --------------------------------------------------------------------------------------------------------


def test_calibrate_of_one_worker_is_torchs():
    model = alone(Everything(), ADAMW)
    for t in range(3):
        loss(model, t).backward()
    twin, stats = copy.deepcopy(model.module), model.stats()
    before = everything_of(model)
    calibrate(model, batches(2))
    after = everything_of(model)
    update_bn(batches(2), twin)
    statistics = {name for name in after if name.endswith(("running_mean", "running_var", "tracked"))}
    assert len(statistics) == 6
    for name in statistics:
        assert torch.equal(after[name], dict(twin.named_buffers())[name])
        assert not torch.equal(after[name], before[name]), name
    same({k: v for k, v in after.items() if k not in statistics}, {k: v for k, v in before.items() if k not in statistics})
    assert model.stats() == stats
    assert all(p.grad is None for p in model.parameters())
    loss(model, 3).backward()
    assert model.stats().updates == stats.updates + 1


def test_calibrate_reads_no_batch_without_statistics():
    def loader() -> Any:
        raise AssertionError("no batch should be read")
        yield

    for module in (net(), nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, track_running_stats=False))):
        model = alone(module)
        before = everything_of(model)
        calibrate(model, loader())
        same(everything_of(model), before)
