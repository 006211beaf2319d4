"""Another number of workers: means and copies against NumPy in float64."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from fractions import Fraction
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import decent_dp
from decent_dp.checkpoint import load, save
from decent_dp.checkpoint.files import Shard, shard_name
from decent_dp.checkpoint.resize import HOW, combined, sources
from decent_dp.errors import CheckpointError
from decent_dp.transport import InProcessTransport, run_replicas
from tests.helpers import some_in_the_fast_tests
from tests.small_checkpoints import write_tree


def state(**changes: Any) -> dict[str, Any]:
    """The least that a worker saves."""
    snapshot: dict[str, Any] = {
        "parameters": {},
        "buffers": {},
        "extra_state": {},
        "optim": {"state": {}, "param_groups": {}, "schedulers": None, "scaler": None, "round": 7},
        "optimizer": None,
        "round": 7,
        "steps": 7,
        "factor": 1.0,
        "accumulate": False,
        "window": "idle",
        "grads": {},
        "order": None,
    }
    extra = changes.pop("user", {})
    optim = {**snapshot["optim"], **changes.pop("optim", {})}
    return {"snapshot": {**snapshot, "optim": optim, **changes}, "random": {"python": (1, 2)}, "state": extra}


@contextlib.contextmanager
def saved(folder: Path, trees: Sequence[Any]) -> Iterator[list[Shard]]:
    folder.mkdir(exist_ok=True)
    for rank, tree in enumerate(trees):
        write_tree(folder, rank, len(trees), tree)
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Shard(folder / shard_name(rank), rank)) for rank in range(len(trees))]


def mean_of(folder: Path, trees: Sequence[Any]) -> dict[str, Any]:
    with saved(folder, trees) as readers:
        tree = combined(readers)
    assert tree["random"] is None
    return tree


def exactly(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(exactly(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple, deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(exactly, a, b))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return type(a) is type(b) and a == b


# -- who -------------------------------------------------------------------------------------------------------------------


def test_groups_and_copies():
    assert [sources(8, i, 5, "spread") for i in range(5)] == [[0, 1], [2, 3], [4], [5, 6], [7]]
    assert [sources(5, i, 8, "spread") for i in range(8)] == [[0], [0], [1], [1], [2], [3], [3], [4]]
    assert [sources(3, i, 3, "spread") for i in range(3)] == [[0], [1], [2]]
    assert [sources(3, i, 2, "mean") for i in range(2)] == [[0, 1, 2], [0, 1, 2]]


def test_every_replica_is_dealt_out():
    for saved_by, world_size in itertools.product(range(1, 10), repeat=2):
        dealt = [sources(saved_by, rank, world_size, "spread") for rank in range(world_size)]
        assert all(dealt)
        flat = [j for group in dealt for j in group]
        assert flat == sorted(flat)
        assert set(flat) == set(range(saved_by))
        sizes = [len(group) for group in dealt] if world_size <= saved_by else list(Counter(flat).values())
        assert max(sizes) - min(sizes) <= 1


def test_unknown_ways_are_refused():
    for how in ("means", None):
        with pytest.raises(ValueError, match="resize must be 'mean' or 'spread', got"):
            sources(2, 0, 3, how)  # type: ignore[arg-type]


# -- tensors ---------------------------------------------------------------------------------------------------------------

FLOATING = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"]


@pytest.mark.parametrize(("n", "name"), list(enumerate(FLOATING, 1)))
def test_means_of_floating_tensors(tmp_path, n, name):
    dtype = getattr(torch, name)
    generator = torch.Generator().manual_seed(n)
    shapes = {"w": (3, 4), "scalar": (), "empty": (0, 2), "one": (1,)}
    parts = [{key: torch.randn(shape, generator=generator).to(dtype) for key, shape in shapes.items()} for _ in range(n)]
    made = mean_of(tmp_path, [state(parameters=part, buffers=part) for part in parts])["snapshot"]
    for key in shapes:
        expected = np.mean([part[key].to(torch.float64).numpy() for part in parts], axis=0)
        for kind in ("parameters", "buffers"):
            got = made[kind][key]
            assert (got.dtype, got.shape) == (dtype, shapes[key])
            error = np.abs(got.to(torch.float64).numpy() - expected)
            assert np.all(error <= np.abs(expected) * torch.finfo(dtype).eps * 0.51 + 2.0**-10 * (dtype.itemsize == 1)), key


def test_the_mean_is_summed_in_float64(tmp_path):
    parts = [1.0, 2.0**-30, 2.0**-30, -1.0]
    made = mean_of(tmp_path, [state(parameters={"w": torch.tensor([x])}) for x in parts])["snapshot"]["parameters"]["w"]
    assert made.item() == 2.0**-31
    halves = [torch.tensor([60000.0], dtype=torch.float16), torch.tensor([49984.0], dtype=torch.float16)]
    made = mean_of(tmp_path, [state(buffers={"w": half}) for half in halves])["snapshot"]["buffers"]["w"]
    assert made.item() == 54976.0  # 54992 to the even float16, by way of a sum that float16 does not hold


def test_equal_tensors_stay_exactly_what_they_are(tmp_path):
    values = torch.tensor([0.1, 1 / 3, float("nan"), -0.0, float("inf"), 1e308], dtype=torch.float64)
    whole = torch.tensor([2**62 + 1, -5])
    tree = state(parameters={"w": values}, buffers={"i": whole, "u": whole.to(torch.uint64), "b": torch.tensor([True])})
    made = mean_of(tmp_path, [copy.deepcopy(tree) for _ in range(3)])["snapshot"]
    assert made["parameters"]["w"].view(torch.int64).tolist() == values.view(torch.int64).tolist()
    assert exactly(made["buffers"], tree["snapshot"]["buffers"])


@pytest.mark.parametrize("name", ["int64", "int32", "int8", "uint8", "uint16", "uint64"])
def test_integer_tensors_are_rounded(tmp_path, name):
    dtype = getattr(torch, name)
    rows = [[1, 2, 3, 100], [2, 3, 3, 0], [2, 3, 3, 0]]
    for n in (2, 3):
        made = mean_of(tmp_path, [state(buffers={"count": torch.tensor(row).to(dtype)}) for row in rows[:n]])
        expected = np.rint(np.mean(np.array(rows[:n], dtype=np.float64), axis=0)).astype(np.int64)
        got = made["snapshot"]["buffers"]["count"]
        assert got.dtype == dtype
        assert got.to(torch.int64).tolist() == expected.tolist()


# -- optimizers ------------------------------------------------------------------------------------------------------------


T = torch.tensor
# An entry of an optimizer's state: what the workers have, and the mean.
ENTRIES: list[tuple[str, list[Any], Any]] = [
    ("exp_avg", [T([1.0, 4.0]), T([2.0, 6.0]), T([3.0, 5.0])], T([2.0, 5.0])),
    ("exp_avg", [None, T([1.0]), T([2.0])], T([1.5])),
    ("wave", [T([1.0 + 2.0j]), T([3.0 + 0.0j])], T([2.0 + 1.0j])),
    ("wave", [T([1.0 + 2.0j], dtype=torch.complex128)] * 2, T([1.0 + 2.0j], dtype=torch.complex128)),
    ("step", [T(5.0), T(6.0), T(6.0), T(9.0)], T(6.0)),  # 6.5, to the even one
    ("step", [T(5.0), T(6.0), T(9.0)], T(7.0)),
    ("step", [2.0, 3.0], 2.0),
    ("steps", [3.0, 4.0], 3.5),
    ("count", [5, 6, 6, 9], 6),
    ("count", [5, 6, 9], 7),
    ("last_epoch", [5, 6, 9], 7),
    ("lr", [0.1, 0.2, 0.3, 0.4], 0.25),
    ("betas", [(0.9, 0.5), (0.9, 0.25)], (0.9, 0.375)),
    ("best", [3.0, inf], inf),
    ("foreach", [None, None], None),
    ("amsgrad", [True, False], True),
    ("kind", ["cos", "linear"], "cos"),
    ("milestones", [Counter({3: 1, 5: 1})] * 2, Counter({3: 1, 5: 1})),
    ("by_name", [{"w": {"_last_lr": 0.25}}, {"w": {"_last_lr": 0.5}}], {"w": {"_last_lr": 0.375}}),
    ("list", [[T([1.0]), 2], [T([2.0]), 4]], [T([1.5]), 3]),
    ("recent", [deque([T(1.0), 1], 4), deque([T(2.0), 3], 4)], deque([T(1.5), 2], 4)),
    ("flag", [T(True), T(False), T(False)], T(True)),
    ("large", [T(2**60 + 3), T(2**60 + 2)], T(2**60 + 3)),  # float64 represents neither of these
    ("large", [T(2**60 + 1), T(-(2**60) - 65)], T(2**60 + 1)),
    # Where they are not alike, the first one's.
    ("kind", [{"a": T([1.0])}, 3.0], {"a": T([1.0])}),
    ("list", [[T([1.0]), T([1.0])], [T([0.0])]], [T([1.0]), T([1.0])]),
    ("shape", [torch.ones(2), torch.zeros(3)], torch.ones(2)),
]


@pytest.mark.parametrize(("key", "values", "expected"), ENTRIES)
def test_the_mean_of_an_optimizers_state(tmp_path, key, values, expected):
    made = mean_of(tmp_path, [state(optim={"state": {"w": {key: value}}}) for value in values])
    assert exactly(made["snapshot"]["optim"]["state"]["w"], {key: expected})


def test_parameters_that_had_no_gradient_everywhere(tmp_path):
    trees = [state(optim={"state": own}) for own in ({"w": {"m": T([1.0])}}, {"w": {"m": T([3.0])}, "b": {"m": T([5.0])}}, {})]
    made = mean_of(tmp_path, trees)["snapshot"]["optim"]["state"]
    assert exactly(made, {"w": {"m": T([2.0])}, "b": {"m": T([5.0])}})


def test_only_optimizers_count_in_floats(tmp_path):
    steps = [
        {"step": torch.tensor(1.0), "last_epoch": torch.tensor([2.0])},
        {"step": torch.tensor(2.0), "last_epoch": torch.tensor([3.0])},
    ]
    made = mean_of(tmp_path, [state(parameters=own, buffers=own, user=own, optim={"state": {"w": own}}) for own in steps])
    halves = {"step": torch.tensor(1.5), "last_epoch": torch.tensor([2.5])}
    assert exactly([made["snapshot"]["parameters"], made["snapshot"]["buffers"], made["state"]], [halves] * 3)
    assert exactly(made["snapshot"]["optim"]["state"]["w"], {"step": torch.tensor(2.0), "last_epoch": torch.tensor([2.0])})


@given(st.lists(st.floats(-1e300, 1e300), min_size=2, max_size=6), st.lists(st.integers(), min_size=2, max_size=6))
@settings(max_examples=30, derandomize=True)
def test_means_of_plain_numbers(tmp_path_factory, floats, whole):
    n = min(len(floats), len(whole))
    trees = [state(factor=floats[i], steps=whole[i]) for i in range(n)]
    made = mean_of(tmp_path_factory.mktemp("numbers"), trees)["snapshot"]
    assert made["factor"] == float(sum(Fraction(x) for x in floats[:n]) / n)
    twice = Fraction(2 * sum(whole[:n]), n)
    assert abs(twice - 2 * made["steps"]) <= 1  # no integer is nearer
    assert abs(twice - 2 * made["steps"]) < 1 or made["steps"] % 2 == 0
    assert type(made["steps"]) is int


def test_the_scaler_of_the_smallest_scale(tmp_path):
    scalers = [{"scale": 1024.0, "_growth_tracker": 3}, None, {"scale": 256.0, "_growth_tracker": 1}, {}]
    made = mean_of(tmp_path, [state(optim={"scaler": scaler}) for scaler in scalers])
    assert made["snapshot"]["optim"]["scaler"] == scalers[2]
    assert mean_of(tmp_path, [state(), state()])["snapshot"]["optim"]["scaler"] is None


# -- windows, the rest -----------------------------------------------------------------------------------------------------


def test_the_open_window(tmp_path):
    grads = [{}, {"w": torch.tensor([1.0, 4.0])}, {"w": torch.tensor([2.0, 6.0]), "b": torch.tensor([3.0])}]
    trees = [state(window="idle" if i == 0 else "open", accumulate=i == 1, grads=own) for i, own in enumerate(grads)]
    trees[0]["snapshot"]["grads"] = {"w": torch.tensor([100.0, 100.0])}  # of no window
    made = mean_of(tmp_path, trees)["snapshot"]
    assert (made["window"], made["accumulate"]) == ("open", True)
    assert exactly(made["grads"], {"w": torch.tensor([1.5, 5.0]), "b": torch.tensor([3.0])})
    made = mean_of(tmp_path, trees[:1] * 2)["snapshot"]
    assert (made["window"], made["grads"]["w"].tolist()) == ("idle", [100.0, 100.0])


def sparse(indices: list[int], values: list[float]) -> Tensor:
    return torch.sparse_coo_tensor([indices], values, (5,), check_invariants=True)


def test_sparse_gradients(tmp_path):
    own = [sparse([0, 3, 0], [1.0, 2.0, 5.0]), sparse([1, 3, 4], [10.0, 20.0, 30.0]), sparse([3], [2.0])]
    made = mean_of(tmp_path, [state(window="open", grads={"w": grad}) for grad in own])["snapshot"]["grads"]["w"]
    assert made.is_coalesced()
    np.testing.assert_allclose(made.to_dense().numpy(), [2, 10 / 3, 0, 8, 10], rtol=1e-7)
    dense = torch.tensor([3.0, 0.0, 0.0, 0.0, 0.0])
    mixed = [state(window="open", grads={"w": own[0]}), state(window="open", grads={"w": dense})]
    made = mean_of(tmp_path, mixed)["snapshot"]["grads"]["w"]
    assert made.tolist() == [4.5, 0.0, 0.0, 1.0, 0.0]
    longer = torch.sparse_coo_tensor([[1]], [1.0], (6,), check_invariants=True)
    unlike = [state(window="open", grads={"w": grad}) for grad in (own[2], longer)]
    assert torch.equal(mean_of(tmp_path, unlike)["snapshot"]["grads"]["w"].to_dense(), own[2].to_dense())
    with saved(tmp_path, mixed) as readers:
        alone = combined(readers[:1])["snapshot"]["grads"]["w"]
    assert torch.equal(alone.to_dense(), own[0].to_dense())


def test_the_users_own(tmp_path):
    def extra(i: int) -> dict[str, Any]:
        own = {
            "epoch": 3 + i,
            "loss": 0.5 * i,
            "ema": {"w": torch.full((2,), float(i)), "n": torch.tensor(i), "steps": torch.tensor(float(i))},
            "list": [torch.tensor([float(i)]), i, "x"],
            "tuple": (torch.tensor([2.0 * i]),),
            "recent": deque([torch.tensor(float(i)), i], 4),
            "another shape": torch.zeros(i + 1),
            "another kind": torch.zeros(2) if i else 5.0,
            "array": np.array([float(i)]),
            "none": None if i == 0 else 3,
            "longer": [torch.tensor([1.0 + i])] * (2 if i == 0 else 1),
            "deeper": {"a": torch.ones(1)} if i == 0 else 4.0,
            "flag": torch.tensor(i == 0),
        }
        return {**own, **({"only mine": torch.ones(1)} if i == 0 else {"only theirs": torch.ones(1)})}

    trees = [state(user=extra(i), extra_state={"fp8": {"scale": torch.tensor([float(i)]), "n": i}}) for i in range(4)]
    made = mean_of(tmp_path, trees)
    first = extra(0)
    expected = {
        **first,
        "ema": {"w": torch.full((2,), 1.5), "n": torch.tensor(0), "steps": torch.tensor(1.5)},
        "list": [torch.tensor([1.5]), 0, "x"],
        "tuple": (torch.tensor([3.0]),),
        "longer": [torch.tensor([2.5]), torch.tensor([1.0])],
    }
    assert exactly(made["state"], expected)
    assert list(made["state"]) == list(first)
    assert exactly(made["snapshot"]["extra_state"], {"fp8": {"scale": torch.tensor([1.5]), "n": 0}})


def test_what_is_the_first_workers_and_what_is_left_out(tmp_path):
    """What a compression knows of edges, and what format 3 had in flight."""
    learned, in_flight = {"w": {"0-1": torch.ones(3)}}, {"parameters": {"w": {"sent": torch.ones(2)}}}
    trees = [
        state(order=order, optimizer=kind, nested=i == 0, compression=learned, exchange=in_flight, link={"rank": i})
        for i, (order, kind) in enumerate([(None, None), (["w"], "Adam")])
    ]
    made = mean_of(tmp_path, trees)["snapshot"]
    assert (made["order"], made["optimizer"], made["nested"], made["compression"]) == (["w"], "Adam", True, {})
    assert not made.keys() & {"exchange", "link"}


# -- all of it -------------------------------------------------------------------------------------------------------------


def test_one_tensor_of_one_worker_at_a_time(tmp_path, monkeypatch):
    n, size = 6, 1000
    trees = [state(parameters={f"w{k}": torch.randn(size) for k in range(5)}) for _ in range(n)]
    alive: list[Any] = []
    most = 0
    real = Shard.__getitem__

    def watched(self: Shard, key: str) -> Tensor:
        nonlocal most
        tensor = real(self, key)
        if tensor.numel() == size:
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    with saved(tmp_path, trees) as readers:
        monkeypatch.setattr(Shard, "__getitem__", watched)
        tree = combined(readers)
    assert len(alive) == 5 * n
    assert most <= 3  # the first worker's, the one before and this one
    assert len(tree["snapshot"]["parameters"]) == 5


def test_parameters_that_do_not_fit_are_named(tmp_path):
    good = state(parameters={"w": torch.ones(2)})
    for bad, message in [
        (state(parameters={"w": torch.ones(3)}), "parameter 'w' has different shapes or dtypes"),
        (state(parameters={"w": torch.ones(2, dtype=torch.float64)}), "parameter 'w' has different shapes or dtypes"),
        (state(parameters={}), "parameter 'w' is not in all files"),
        (state(parameters={"w": 3}), "parameter 'w' is not in all files"),
        ({"snapshot": [], "state": {}}, "its tree is not the state of a worker"),
        ([1], "its tree is not the state of a worker"),
        ({"snapshot": {"parameters": {}}, "state": {}}, "its tree is not the state of a worker"),
        *((state(parameters={"w": torch.ones(2)}, weight=w), "its tree is not the state of a worker") for w in (0.0, "2", inf)),
    ]:
        with saved(tmp_path, [good, bad]) as readers, pytest.raises(CheckpointError, match=str(tmp_path)) as caught:
            combined(readers)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    "second",
    [
        state(optim={"scaler": 5}),
        state(optim={"scaler": {"scale": "1"}}),
        state(factor=10**400),
        {key: {k: v for k, v in tree.items() if k != "accumulate"} for key, tree in state(window="open").items()},
    ],
    ids=["a scaler", "a scale", "an int", "a window"],
)
def test_trees_that_no_save_writes_are_named(tmp_path, second):
    first = state(optim={"scaler": {"scale": 1.0}})
    message = f"{tmp_path} cannot be combined: "
    with saved(tmp_path, [first, second]) as readers, pytest.raises(CheckpointError, match=re.escape(message)):
        combined(readers)


# -- runs ------------------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Parameters and buffers of several dtypes; ``seldom`` has a gradient on the first two workers only."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.narrow, self.seldom = nn.Linear(4, 3).bfloat16(), nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("average", torch.zeros(2, dtype=torch.bfloat16))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        out = self.narrow(self.wide(self.norm(x)).bfloat16()).float()
        return out * self.seldom if rank < 2 else out


def saved_run(transport: InProcessTransport, path: Path) -> dict[str, Any]:
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = decent_dp.gossip(model, optimizer, transport=transport, topology="ring")
    draw, rank = torch.Generator().manual_seed(transport.rank), transport.rank
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(5, 4, generator=draw), rank).square().mean().backward()
        optimizer.step()
    for _ in range(rank):  # statistics of more batches on some workers than on others
        model(torch.randn(5, 4, generator=draw), rank)
    model.count.fill_(10 * rank + 3)
    model.flag.fill_(rank == 0)
    model.average.copy_(torch.randn(2, generator=draw))
    optimizer.zero_grad()
    replica.flush()  # before the state for the save is made of the weights
    save(replica, path, {"rank": rank, "ema": {"w": model.wide.weight.detach() * 2}})
    found = contents(model, optimizer)
    replica.close()
    return found


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    tensors = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        tensors |= {f"{name} {key}": torch.as_tensor(value).clone() for key, value in optimizer.state.get(param, {}).items()}
    return tensors


@pytest.mark.parametrize(("how", "sizes"), some_in_the_fast_tests(HOW, [(4, 3), (3, 5), (3, 3), (2, 1)]))
def test_runs_of_another_size_start_from_numpys_means(tmp_path, how, sizes):
    n, m = sizes
    before = run_replicas(n, lambda transport: saved_run(transport, tmp_path))

    def load_it(transport: InProcessTransport) -> Any:
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        replica = decent_dp.gossip(model, optimizer, transport=transport, topology="ring")
        state = load(replica, tmp_path, resize=how)
        found = contents(model, optimizer)
        optimizer.zero_grad()
        model(torch.ones(5, 4), 0).square().mean().backward()
        optimizer.step()
        finite = all(bool(param.isfinite().all()) for param in model.parameters())
        replica.close()
        return state, found, finite, optimizer.param_groups[0]["lr"]

    for rank, (state, found, finite, lr) in enumerate(run_replicas(m, load_it)):
        group = sources(n, rank, m, how)
        assert (state["rank"], finite, lr) == (group[0], True, 0.01)
        assert found.keys() == {key for j in group for key in before[j]}
        for key, got in found.items():
            own = [before[j][key] for j in group if key in before[j]]
            expected = np.mean([value.double().numpy() for value in own], axis=0)
            assert got.dtype == own[0].dtype
            if got.dtype is torch.bool:
                assert got == own[0], key
            elif not got.is_floating_point() or key.endswith(" step"):
                assert got.item() == np.rint(expected), key
            else:
                ulp = np.abs(expected) * torch.finfo(got.dtype).eps
                assert np.all(np.abs(got.double().numpy() - expected) <= 0.51 * ulp), key
        ema = np.mean([2 * before[j]["wide.weight"].double().numpy() for j in group], axis=0)
        np.testing.assert_allclose(state["ema"]["w"].numpy(), ema, rtol=1e-7)
