"""Gradients in every shape that ordinary scripts give them."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from decent_dp.ddp import DecentralizedDataParallel
from decent_dp.transport import run_replicas
from tests.helpers import SGD, alone, assert_same, batch, beside, loss, net, plain, values

TINY = 1e-6  # MiB: one bucket per parameter
SIZES = pytest.mark.parametrize("bucket_size_in_mb", [25, 0.0005, TINY], ids=["one", "some", "each"])


# -- unused parameters -------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        result: Tensor = getattr(self, branch)(torch.tanh(self.trunk(x)))
        return result


def branches_on_workers(transport: Any, start: Branches) -> list[Any]:
    """Each worker takes branches of its own: 'a' on worker 0 only, and so on; parameters without a gradient still mix."""
    found, rank = [], transport.rank
    for topology in ("complete", "one-peer-exp", "ring"):
        for overlap in (True, False):
            model = DecentralizedDataParallel(
                copy.deepcopy(start), SGD, topology=topology, overlap=overlap, bucket_size_in_mb=TINY, transport=transport
            )
            for t in range(6):
                branch = "a" if rank == 0 or (rank == 1 and t == 3) else "b"
                x, y = batch(t, rank)
                (model(x, branch) - y).square().mean().backward()
            found.append((values(model), model.stats().rounds, model.consensus_distance()))
            model.close()
    return found


def test_branches_chosen_by_data_on_each_worker():
    torch.manual_seed(0)
    model = Branches()
    results = run_replicas(4, partial(branches_on_workers, start=model))
    start = values(model)
    for case in zip(*results, strict=True):
        assert [rounds for _, rounds, _ in case] == [6] * 4
        mean_a = sum(v["a.weight"] for v, _, _ in case) / 4
        assert not torch.allclose(mean_a, start["a.weight"])  # trained on one worker …
        assert all(not torch.equal(v["a.weight"], start["a.weight"]) for v, _, _ in case)  # … and mixed to all
        assert all(torch.allclose(v["never.weight"], start["never.weight"], atol=1e-6) for v, _, _ in case)


# -- tied weights, checkpointing, compile ------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.body(self.embed(tokens))))
        return result


class Checkpointed(nn.Module):
    """Blocks under checkpointing between an ordinary first and last layer; ``shared`` is used inside and outside."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        result: Tensor = torch.cat([self.last(x), x[:, 3:]], dim=1)
        return result[:, : self.width]

    width = 3


class CheckpointedTwice(Checkpointed):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):  # the same block in two inner backwards: its hooks fire twice in one outer one
            x = checkpoint(self.blocks[0], self.first(x), use_reentrant=self.use_reentrant)
        result: Tensor = self.last(x)
        return result


class LateCheckpoint(nn.Module):
    """``last`` is used in the outer graph and, once ``inner`` is set, in a checkpointed one, whose backward comes later."""

    inner = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        again = checkpoint(lambda z: self.last(z), y, use_reentrant=True) if self.inner else 0
        result: Tensor = self.last(self.middle(y)) + again
        return result


@dataclass
class Output:
    hidden: dict[str, Any]
    logits: list[Tensor]


class Opaque:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Structured(Checkpointed):
    """The end of the outer backward is detected through the outputs, wherever the tensors are in them.

    All gradients come from inner backwards here, several a backward, and each of those has an end of its own.
    """

    width = 6

    def __init__(self, kind: str) -> None:
        super().__init__(use_reentrant=True)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x.requires_grad_())
        y = checkpoint(self.blocks[1], checkpoint(self.blocks[0], y, use_reentrant=True), use_reentrant=True)[:, :3]
        return {"dataclass": Output({"none": None, "y": y}, [y]), "opaque": Opaque(y), "tuple": (1, (y, "text"))}[self.kind]


# -- steps that equal those of plain PyTorch -----------------------------------------------------------------------------

TOKENS = torch.randint(0, 7, (4, 9), generator=torch.Generator().manual_seed(0))


def mse(output: Tensor, t: int) -> Tensor:
    result: Tensor = (output - batch(t)[1]).square().mean()
    return result


def several_forwards(m: Any, t: int) -> Tensor:
    with torch.no_grad():
        m(batch(99)[0])
    m(batch(98)[0])  # without a backward
    return mse(m(batch(t)[0]) - m(batch(t + 50)[0]), t)


def around(use_reentrant: bool, calls: int) -> Any:
    """Checkpointing around the wrapper."""

    def step(m: Any, t: int) -> Tensor:
        x = batch(t)[0].requires_grad_()
        return mse(sum(checkpoint(m, x * (i + 1), use_reentrant=use_reentrant) for i in range(calls)), t)

    return step


def late(m: Any, t: int) -> Tensor:
    """A gradient that comes again, from an inner backward, is of the same update."""
    (m.module if isinstance(m, DecentralizedDataParallel) else m).inner = t > 1
    return loss(m, t)


def autocast(dtype: torch.dtype) -> Any:
    def step(m: Any, t: int) -> Tensor:
        with torch.autocast("cpu", dtype=dtype):
            output = m(batch(t)[0])
        return mse(output.float(), t)

    return step


def structured(m: Any, t: int) -> Tensor:
    output = m(batch(t)[0])
    kind = type(output).__name__
    return mse({"Output": lambda o: o.hidden["y"], "Opaque": lambda o: o.tensor, "tuple": lambda o: o[1][0]}[kind](output), t)


BOTH = (True, False)
# How a model is made, and a step with it; and an optimizer other than SGD.
SHAPES: dict[str, tuple[Any, ...]] = {
    **{
        f"branches {used}": (
            Branches,
            lambda m, t, used=used: mse(m(batch(t)[0], used[t]), t),
            partial(torch.optim.AdamW, lr=0.05),
        )
        for used in ("aabb", "bbaa", "abab", "aaab")
    },
    "tied": (Tied, lambda m, t: nn.functional.cross_entropy(m(TOKENS[t]), TOKENS[t])),
    **{f"checkpointed {how}": (partial(Checkpointed, how), loss) for how in BOTH},
    **{f"checkpointed twice {how}": (partial(CheckpointedTwice, how), loss) for how in BOTH},
    "checkpointed late": (LateCheckpoint, late),
    **{f"checkpointed around {how} {calls}": (net, around(how, calls)) for how in BOTH for calls in (1, 2)},
    **{f"output {kind}": (partial(Structured, kind), structured) for kind in ("dataclass", "opaque", "tuple")},
    "several forwards": (net, several_forwards),
    **{f"autocast {dtype}": (net, autocast(dtype)) for dtype in (torch.float16, torch.bfloat16)},
    "sparse": (
        lambda: nn.Sequential(nn.Embedding(20, 6, sparse=True), nn.Linear(6, 3)),
        lambda m, t: mse(m(TOKENS[t, :5]), t),
        partial(torch.optim.SGD, lr=0.1),
    ),
}


@SIZES
@pytest.mark.parametrize("name", SHAPES)
def test_scripts_of_any_shape(bucket_size_in_mb, name):
    make, step, *optim_fn = SHAPES[name]
    torch.manual_seed(0)
    beside(make(), step, *optim_fn, bucket_size_in_mb=bucket_size_in_mb)


def test_names_of_tied_weights():
    wrapper = alone(Tied())
    assert wrapper.module.head.weight is wrapper.module.embed.weight
    assert {"embed.weight", "head.weight"} <= wrapper.state_dict().keys()
    assert [name for name, _ in wrapper.named_parameters()] == ["embed.weight", "body.weight", "body.bias"]
    assert "head.weight" in dict(wrapper.named_parameters(remove_duplicate=False))


def test_compile_of_the_model_and_of_the_wrapper():
    beside(net(), lambda m, t: loss(m, t), steps=3)
    compiled = torch.compile(net(), backend="aot_eager")
    wrapper = alone(compiled, bucket_size_in_mb=TINY)
    outer = alone(net(), bucket_size_in_mb=TINY)
    compiled_outer = torch.compile(outer, backend="aot_eager")
    for t in range(3):
        loss(wrapper, t).backward()
        loss(compiled_outer, t).backward()
    expected = plain(net(), [[0], [1], [2]])
    assert outer.stats().rounds == wrapper.stats().rounds == 3
    assert_same(outer, expected, 1e-6)
    assert_same({n.removeprefix("_orig_mod."): v for n, v in values(wrapper).items()}, values(expected), 1e-6)


# -- clipping ----------------------------------------------------------------------------------------------------------


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(24) for layer in (nn.Linear(6, 6), nn.Tanh())), nn.Linear(6, 3))


@SIZES
@pytest.mark.parametrize("max_norm", [0.05, 100.0])
def test_clipping_is_over_all_gradients(bucket_size_in_mb, max_norm):
    twin = deep()
    optimizer = SGD(list(twin.named_parameters()))
    wrapper = alone(deep(), grad_clip_norm=max_norm, bucket_size_in_mb=bucket_size_in_mb)
    for t in range(4):
        optimizer.zero_grad()
        loss(twin, t).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        optimizer.step()
        loss(wrapper, t).backward()
        assert wrapper.stats().grad_norm == float(norm)
    assert_same(wrapper, twin)
    assert len(wrapper.optimizers) == 50 or bucket_size_in_mb > TINY


# -- GradScaler --------------------------------------------------------------------------------------------------------


@SIZES
@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_scaler_beside_plain_pytorch(bucket_size_in_mb, max_norm):
    options = {"init_scale": 1024.0, "growth_interval": 2}
    ours, theirs = torch.GradScaler("cpu", **options), torch.GradScaler("cpu", **options)
    twin = net()
    optimizer = SGD(list(twin.named_parameters()))
    wrapper = alone(net(), scaler=ours, grad_clip_norm=max_norm, bucket_size_in_mb=bucket_size_in_mb)
    for t in range(8):
        # The infinity is in one parameter's gradient alone.
        spoil = torch.tensor(float("inf") if t in (2, 5) else 0.0)
        for m, scaler in ((twin, theirs), (wrapper, ours)):
            inner = m.module if m is wrapper else m
            handle = inner[0].bias.register_hook(lambda g, spoil=spoil: g + spoil)
            scaler.scale(loss(m, t)).backward()
            handle.remove()
        theirs.unscale_(optimizer)
        if max_norm:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        assert ours.get_scale() == theirs.get_scale()
        assert_same(wrapper, twin)
    assert (wrapper.stats().updates, wrapper.stats().rounds) == (6, 8)


def scaler_on_workers(transport: Any) -> list[Any]:
    rank, scaler = transport.rank, torch.GradScaler("cpu", init_scale=2.0)
    model = DecentralizedDataParallel(
        net(), SGD, topology="complete", scaler=scaler, bucket_size_in_mb=TINY, transport=transport
    )
    found = []
    for t in range(4):
        factor = float("nan") if (rank == 1 and t == 2) else 1.0
        scaler.scale(loss(model, t, rank) * factor).backward()
        found.append(values(model))
    model.close()
    return [found, model.stats().updates, model.stats().rounds]


def test_a_skipped_step_still_mixes():
    """Worker 1 skips update 2: it takes no step, and the others still exchange with it."""
    (first, *_), (second, updates, rounds) = run_replicas(2, scaler_on_workers)
    assert (updates, rounds) == (3, 4)
    # After the skipped update, worker 1 has only mixed the values sent at update 1.
    for name, value in second[2].items():
        torch.testing.assert_close(value, (first[1][name] + second[1][name]) / 2, rtol=1e-5, atol=1e-6)
    assert all(torch.isfinite(v).all() for v in [*first[3].values(), *second[3].values()])


def test_a_disabled_scaler_counts_as_none():
    scaler = torch.GradScaler("cpu", enabled=False)
    model = alone(net(), scaler=scaler)
    scaler.scale(loss(model, 0)).backward()
    assert_same(model, plain(net(), [[0]]))


# -- dtypes, strides, shapes -------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(6, 6).to(torch.bfloat16)
        self.wide = nn.Linear(6, 6).double()
        self.single = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 6).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.low(x.bfloat16()).double()).float()
        image = self.conv(x[:, None, :, None].expand(-1, 2, -1, 6)).mean(dim=(1, 2, 3))
        result: Tensor = self.single(x) * self.scale + self.empty.sum() + image[:, None] + x @ self.turned
        return result


@SIZES
@pytest.mark.parametrize("view", [True, False])
def test_mixed_dtypes_and_strides(bucket_size_in_mb, view):
    torch.manual_seed(0)
    strides = {name: p.stride() for name, p in Mixed().named_parameters()}
    torch.manual_seed(0)
    wrapper = beside(Mixed(), loss, bucket_size_in_mb=bucket_size_in_mb, param_as_bucket_view=view)
    assert {name: p.stride() for name, p in wrapper.named_parameters()} == strides
    assert wrapper.module.conv.weight.is_contiguous(memory_format=torch.channels_last)
    kinds = [{p.dtype for p in optimizer.param_groups[0]["params"]} for optimizer in wrapper.optimizers]
    assert all(len(kind) == 1 for kind in kinds)


# -- the rest ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_size_in_mb", [25, TINY])
def test_hooks_of_the_users_see_every_gradient(bucket_size_in_mb):
    seen: list[str] = []
    model = net()

    def watch(name: str) -> Any:
        def hook(param: Tensor) -> None:
            assert param.grad is not None, name
            seen.append(name)

        return hook

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(watch(f"before {name}"))
        param.register_hook(lambda g: g * 2)
    wrapper = alone(model, bucket_size_in_mb=bucket_size_in_mb)
    for name, param in wrapper.named_parameters():
        param.register_post_accumulate_grad_hook(watch(f"after {name}"))
    for t in range(3):
        loss(wrapper, t).backward()
    assert len(seen) == 3 * 2 * 6
    twin = net()
    optimizer = SGD(list(twin.named_parameters()))
    for t in range(3):
        (2 * loss(twin, t)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(wrapper, twin, 1e-6)


class Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Breaks.armed:
            raise MemoryError("out of memory")
        return grad


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lower, self.upper = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.upper(Breaks.apply(self.lower(x)))
        return result


# Where worker 1's backward of round 3 raises, and the options. 'cleared': before zero_grad; 'first': before any gradient;
# 'bypassed': in a run that bypasses the wrapper's forward.
BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("half-way", {}),
    ("cleared", {"overlap": False}),
    ("half-way", {"grad_clip_norm": 1.0}),
    ("first", {}),
    ("no_sync", {}),
    ("bypassed", {}),
]


def broken_backwards(rank: int, n: int) -> Any:
    return [broken_backward(rank, where, options) for where, options in BROKEN]


def broken_backward(rank: int, where: str, options: dict[str, Any]) -> Any:
    model = DecentralizedDataParallel(Fragile(), SGD, topology="complete", bucket_size_in_mb=TINY, **options)
    forward = model.module if where == "bypassed" else model

    def fail(_: Tensor) -> None:
        raise MemoryError

    for t in range(6):
        broken = rank == 1 and t == 3
        Breaks.armed = broken and where != "first"
        try:
            with model.no_sync() if where == "no_sync" else contextlib.nullcontext():
                output = forward(batch(t, rank)[0])
                if broken and where == "first":
                    output.register_hook(fail)
                output.square().mean().backward()
        except MemoryError:
            assert broken
            if where == "cleared":
                model.zero_grad()
        Breaks.armed = False
        if where == "no_sync":
            loss(forward, t + 100, rank).backward()
    result = model.stats().updates, model.stats().rounds, values(model), model.consensus_distance()
    model.close()
    return result


def test_a_backward_that_raises_keeps_the_rounds_in_step(workers):
    """Worker 1 runs out of memory at update 3 and continues: nothing hangs."""
    for case, *results in zip(BROKEN, *workers(2, broken_backwards), strict=True):
        made = 6 if case[0] == "no_sync" else 5
        assert [(updates, rounds) for updates, rounds, *_ in results] == [(6, 6), (made, 6)], case
        assert all(torch.isfinite(v).all() for _, _, value, _ in results for v in value.values()), case
        if case[0] == "cleared":
            assert results[0][3] < 1e-6


@pytest.mark.parametrize("of", ["input", "parameters"])
def test_a_broken_gradient_computation_is_no_round(of):
    """torch.autograd.grad that raises: it would have been no update, and is none."""
    model = alone(Fragile(), bucket_size_in_mb=TINY)
    loss(model, 0).backward()
    Breaks.armed = True
    x = batch(1)[0].requires_grad_()
    with pytest.raises(MemoryError):
        torch.autograd.grad(model(x).sum(), x if of == "input" else list(model.module.parameters()))
    Breaks.armed = False
    loss(model, 2).backward()
    assert (model.stats().updates, model.stats().rounds) == (2, 2)


def test_a_broken_backward_clears_gradients_and_keeps_one_rate():
    schedule = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)
    model = alone(Fragile(), lr_scheduler_fn=schedule, bucket_size_in_mb=TINY)
    loss(model, 0).backward()
    Breaks.armed = True
    with pytest.raises(MemoryError):
        loss(model, 1).backward()
    Breaks.armed = False
    loss(model, 2).backward()
    assert (model.stats().updates, model.stats().rounds) == (2, 3)
    assert all(p.grad is None for p in model.parameters())
    assert len({scheduler.get_last_lr()[0] for scheduler in model.lr_schedulers}) == 1


@pytest.mark.parametrize("view", [True, False])
def test_a_saved_tensor_made_stale_by_the_update_is_torchs_error(view):
    model = alone(net(), bucket_size_in_mb=TINY, param_as_bucket_view=view)
    loss(model, 0).backward()
    value = loss(model, 1)
    value.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def stale_by_mixing(transport: Any) -> str:
    """No gradient for the later layers: their values move by mixing alone, which must count as a write, too."""
    model = DecentralizedDataParallel(net(), SGD, topology="complete", bucket_size_in_mb=25, transport=transport)
    for t in range(3):
        loss(model, t, transport.rank).backward()
    value = loss(model, 3, transport.rank)
    model.update()
    try:
        value.backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_mixing_makes_saved_tensors_stale():
    assert all("modified by an inplace operation" in message for message in run_replicas(2, stale_by_mixing))


@pytest.mark.parametrize("within", [True, False], ids=["in the same node", "in a later node"])
def test_an_outer_backward_that_raises_after_its_inner_one(within):
    """The output is an opaque object, and the graph stays alive: the next forward completes the round."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = layer(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            ctx.y.backward(grad)
            if fails and within:
                raise RuntimeError("out of memory")
            return ctx.x.grad, None

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Any:
            return Opaque(Inner.apply(Breaks.apply(self.first(x)), self.second))

    model = alone(Nested())
    losses = []
    for t, fails in enumerate((False, True, False, False)):
        losses.append(model(batch(t)[0]).tensor.sum())  # all graphs are kept
        Breaks.armed = fails and not within
        with pytest.raises((RuntimeError, MemoryError), match="out of memory") if fails else contextlib.nullcontext():
            losses[-1].backward()
        Breaks.armed = False
    assert (model.stats().updates, model.stats().rounds) == (3, 4)
    model.close()
