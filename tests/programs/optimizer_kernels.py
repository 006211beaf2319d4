"""Runs the optimizers' kernels for CUDA on Triton's interpreter. Prints for each case how far it is from the readable form, and
the number of tensors that kernels have updated.

Needs TRITON_INTERPRET=1 before Triton is imported, so that it is a program. Tiles are small, so that small tensors have many.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from decent_dp.kernels import accum_adam, gossip_adamw_cuda, tables
from decent_dp.optim import AccumAdam, AccumAdamW, GossipAdamW

accum_adam._BLOCK = gossip_adamw_cuda._BLOCK = 64
gossip_adamw_cuda._STRIP, gossip_adamw_cuda._ROWS, gossip_adamw_cuda._COLUMNS = 8, 4, 16
gossip_adamw_cuda._PARTS, gossip_adamw_cuda._ENTRIES, gossip_adamw_cuda._CHUNK = 2, 16, 16

TAKEN: list[int] = []  # the numbers of tensors in launches


def by_kernels(enabled: bool) -> None:
    """Whether tensors of the CPU go to the kernels."""
    tables.DEVICES = {"cpu"} if enabled else set()
    tables.usable.cache_clear()


def counted(module: Any) -> None:
    form = module.update
    module.update = lambda rows, *args, **options: (TAKEN.append(len(rows)), form(rows, *args, **options))


def apart(fast: torch.optim.Optimizer, plain: torch.optim.Optimizer) -> float:
    """The largest difference of parameters and states, as a share of each tensor's largest value."""
    worst = 0.0
    for p, q in zip(fast.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        assert fast.state[p].keys() == plain.state[q].keys()
        pairs = [(p.detach(), q.detach()), *((fast.state[p][key], plain.state[q][key]) for key in plain.state[q])]
        for ours, theirs in pairs:
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            if ours.numel():
                difference = (ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-30)
                worst = max(worst, float(difference) if difference.isfinite() else 1e9)
    return worst


def alike(param: nn.Parameter, draw: torch.Generator) -> Tensor:
    """A gradient in the parameter's order of memory."""
    return torch.empty_like(param).copy_(torch.randn(param.shape, generator=draw))


def with_gaps(param: nn.Parameter, draw: torch.Generator) -> Tensor:
    return torch.randn((*param.shape, 2), generator=draw)[..., 0]


def both(
    make: Callable[[list[nn.Parameter], bool], torch.optim.Optimizer],
    values: list[Tensor],
    steps: int,
    gradient: Callable[[nn.Parameter, torch.Generator], Tensor] = alike,
    silent: int | None = None,
    faded: int | None = None,
) -> float:
    """Runs an optimizer by kernels and in the readable form, with the same gradients.

    Args:
        silent: the parameter that has no gradient in some steps.
        faded: the step before which shared averages are less than zero, as a mix that is late can leave them.
    """
    made = []
    for kernels in (True, False):
        by_kernels(kernels)
        draw = torch.Generator().manual_seed(1)
        params = [nn.Parameter(value.detach().clone(memory_format=torch.preserve_format)) for value in values]
        optimizer = make(params, kernels)
        for t in range(steps):
            optimizer.param_groups[0]["lr"] = 0.01 if t < 16 else 0.001
            for i, param in enumerate(params):
                param.grad = gradient(param, draw)
                if silent == i and t % 3 == 0:
                    param.grad = None
            if t == faded:
                for state in optimizer.state.values():
                    state["shared_means"].mul_(-20)
            versions = [param._version for param in params]
            optimizer.step()
            moved = [param._version > was for param, was in zip(params, versions, strict=True) if param.grad is not None]
            assert all(moved), "autograd would not see that a parameter has changed"
        made.append(optimizer)
    return apart(*made)


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def accum_cases() -> Iterator[tuple[str, float]]:
    shapes = ((), (0,), (64,), (3, 50))
    for cls in (AccumAdamW, AccumAdam):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):

            def make(params: list[nn.Parameter], kernels: bool, cls: Any = cls) -> torch.optim.Optimizer:
                return cls(params, weight_decay=0.1, accum_iter=2, foreach=None if kernels else False)

            name = f"{cls.__name__} {str(dtype).removeprefix('torch.')}"
            # One step in bfloat16: the interpreter rounds to zero.
            yield name, both(make, draw(*shapes, dtype=dtype), 1 if dtype == torch.bfloat16 else 3)
    odd = [draw((11, 9))[0].t(), draw((131,))[0][1:], draw((2, 3, 4, 5))[0].to(memory_format=torch.channels_last)]
    yield "AccumAdamW layouts", both(lambda p, k: AccumAdamW(p, 0.01, foreach=None if k else False), odd, 4, silent=0)
    yield "AccumAdamW compiled", both(lambda p, k: AccumAdamW(p, compiled=k, foreach=None if k else False), draw((70,)), 2)
    yield "AccumAdamW gaps", both(lambda p, k: AccumAdamW(p, foreach=None if k else False), draw((9, 20)), 3, with_gaps)


def gossip_cases() -> Iterator[tuple[str, float]]:
    shapes = ((5, 7), (17, 3), (2, 3, 3, 3), (6,), (2, 80))

    def make(
        drift: bool = False, n: int = 8, share: float | None = None, **options: Any
    ) -> Callable[[list[nn.Parameter], bool], GossipAdamW]:
        def made(params: list[nn.Parameter], kernels: bool) -> GossipAdamW:
            how = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, **options}
            optimizer = GossipAdamW(params, foreach=None if kernels else False, **how)
            optimizer.set_replicas(n, share)
            if drift:
                generator = torch.Generator().manual_seed(2)
                drifts = {id(p): 1e-3 * torch.randn(p.shape, generator=generator) for p in params}
                optimizer.set_drifts(lambda p: drifts[id(p)], 0.95)
            return optimizer

        return made

    yield "GossipAdamW", both(make(), draw(*shapes), 14, silent=1)
    yield "GossipAdamW drift", both(make(drift=True), draw(*shapes), 18)
    yield "GossipAdamW float64 maximize", both(make(maximize=True, n=2), draw((5, 7), (6,), dtype=torch.float64), 13)
    for drift in (False, True):
        yield f"GossipAdamW faded, drift {drift}", both(make(drift), draw((20, 50)), 6, faded=4)
        yield f"GossipAdamW share, drift {drift}", both(make(drift, share=0.4), draw((20, 50)), 6, faded=4)
    yield "GossipAdamW bfloat16", both(make(drift=True), draw((9, 16), (6,), dtype=torch.bfloat16), 1)
    yield "GossipAdamW transposed", both(make(), [draw((5, 7))[0].t()], 5)
    yield "GossipAdamW gaps", both(make(), draw((5, 7)), 5, with_gaps)
    yield "GossipAdamW amsgrad", both(make(amsgrad=True), draw((5, 7)), 5)
    yield "GossipAdamW loaded", loaded(make)
    yield "GossipAdamW not finite", not_finite()


def loaded(make: Any) -> float:
    """A state of an AdamW, and then one of a run with the rule: gains are made between two renewals."""
    (value,) = draw((5, 7))
    first = torch.optim.AdamW([nn.Parameter(value.clone())])
    results = []
    for kernels in (True, False):
        by_kernels(kernels)
        param = nn.Parameter(value.clone())
        optimizer = first
        for drift in (None, True, False):
            if drift is not None:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = make(drift=drift)([param], kernels)
                state["param_groups"][0]["foreach"] = None if kernels else False
                optimizer.load_state_dict(state)
                optimizer.set_replicas(8)
            for t in range(3):
                target = optimizer.param_groups[0]["params"][0]
                target.grad = torch.randn(value.shape, generator=torch.Generator().manual_seed(t))
                optimizer.step()
        results.append(optimizer)
        first = torch.optim.AdamW([nn.Parameter(value.clone())])
    return apart(*results)


def not_finite() -> float:
    """A gradient that is not a number reaches the gains, as in the readable form; rows of zeros stay finite."""
    found = []
    for kernels in (True, False):
        by_kernels(kernels)
        param = nn.Parameter(torch.ones(6, 5))
        optimizer = GossipAdamW([param], foreach=None if kernels else False)
        optimizer.set_replicas(3)
        param.grad = torch.zeros(6, 5)
        param.grad[2, 1] = 1e-25
        for _ in range(4):
            optimizer.step()
        assert bool(param.isfinite().all())
        param.grad[3, 3] = torch.nan
        optimizer.step()
        found.append((param.isnan(), optimizer.state[param]["gains"].isnan(), optimizer.state[param]["means"].isnan()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    return 0.0


def main() -> None:
    torch.set_num_threads(1)
    for module in (accum_adam, gossip_adamw_cuda):
        counted(module)
    found = {}
    for cases in (accum_cases(), gossip_cases()):
        for name, difference in cases:
            found[name] = (difference, sum(TAKEN))
            TAKEN.clear()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
