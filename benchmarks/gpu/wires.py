"""Compressed exchanges against the law, round by round; and the device's numbers against the CPU's."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.case import PAIR, THREADS, TRIO, SkipError, Worker, case
from benchmarks.gpu.training import SGD, Script, compare, library, mix, mlp, run_library, topology_of, values
from decent_dp.optim import AccumAdamW, GossipAdamW
from decent_dp.rules import GASLoC, MomentumTracking, OuterNesterov

STEPS = 8
# Of a bfloat16: the distance to the next value, relative.
ULP = 2.0**-7


def broad() -> nn.Module:
    """Several blocks of values, and one that is cut."""
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 230), nn.Tanh(), nn.Linear(230, 3))


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().cpu().reshape(-1) for tensor in tensors])


def record(script: Script, worker: Worker) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Trains, and returns the parameters before the first round and after each, their gradients in each, and the number of
    rejected blocks after each; on the CPU."""
    states: list[Tensor] = []
    gradients: list[Tensor] = []
    rejected: list[int] = []
    run: Any = library(script, worker)
    params = [param for param in run.model.parameters() if param.requires_grad]
    noted: dict[int, Tensor] = {}
    for number, param in enumerate(params):

        def note(param: Tensor, number: int = number) -> None:
            assert param.grad is not None
            noted[number] = param.grad.detach().clone()

        untyped: Any = param
        untyped.register_post_accumulate_grad_hook(note)
    states.append(flat(params))
    for t in range(STEPS):
        noted.clear()
        run.step(t)
        gradients.append(flat([noted[number] for number in range(len(params))]))
        states.append(flat(params))
        rejected.append(run.replica.stats().rejected)
    run.replica.close()
    return states, gradients, rejected


def check_wire(compression: str, overlap: bool, worker: Worker) -> str:
    """x <- step(x) + Σ w (r - q) in each round, from the values at the beginning of that round.

    Between pairs bfloat16 must be exact, because the sent values are known. int8 may be off by a few of its steps, and in a
    round with rejected blocks some values are not mixed; in both the mean over a pair stays.
    """
    topology = "complete" if worker.n == 2 else "base-2"
    script = Script(make=broad, topology=topology, overlap=overlap, options={"compression": compression})
    states, gradients, rejected = record(script, worker)
    gathered = worker.gather((states, gradients, rejected))
    everybody = [([x.double() for x in xs], [g.double() for g in gs], counts) for xs, gs, counts in gathered]
    chosen = topology_of(script, worker.n)
    learning: dict[str, float] = SGD.keywords  # type: ignore[attr-defined]
    moved = [torch.zeros_like(states[0], dtype=torch.float64) for _ in range(worker.n)]
    worst = drift = 0.0
    mixed = total = 0
    for t in range(STEPS):
        xs = []
        for rank, (theirs, grads, _) in enumerate(everybody):
            moved[rank] = learning["momentum"] * moved[rank] + grads[t]
            xs.append(theirs[t] - learning["lr"] * moved[rank])
        stepped = torch.stack(xs).clone()
        source = [theirs[t] for theirs, _, _ in everybody] if overlap else [x.clone() for x in xs]
        round_ = t - 1 if overlap else t
        if round_ >= 0:
            sent = [[x.to(torch.bfloat16) if compression == "bfloat16" else x] for x in source]
            mix([[x] for x in xs], sent, chosen, round_)
        after = torch.stack([theirs[t + 1] for theirs, _, _ in everybody])
        largest = float(after.abs().max())
        drift = max(drift, float((after.mean(0) - stepped.mean(0)).abs().max()))
        distance = max(float((a - b).abs().max()) for a in source for b in source)
        exact = 1e-6 if overlap else ULP * largest
        allowed = distance / 8 + largest / 32 / 64 if compression == "int8" else exact
        off = (after - torch.stack(xs)).abs()
        total += off.numel()
        mixed += int((off <= allowed).sum())
        if any(counts[t] > (counts[t - 1] if t else 0) for _, _, counts in everybody):
            off = torch.minimum(off, (after - stepped).abs())
        assert float(off.max()) <= allowed, f"round {t}: off by {float(off.max()):.2g}, more than {allowed:.2g}"
        worst = max(worst, float(off.max()))
    assert mixed >= total / 2, f"{mixed / total:.0%} of the values were mixed"
    assert drift <= 1e-5, f"mixing has moved the mean by {drift:.2g}"
    return f"off by {worst:.1e}, the mean by {drift:.1e}; {mixed / total:.0%} of the values mixed"


for _compression in ("bfloat16", "int8"):
    for _overlap in (True, False):
        _name = f"{_compression} on the wire{'' if _overlap else ', no overlap'}"
        case(_name, PAIR, *([THREADS, TRIO] if _overlap else []))(partial(check_wire, _compression, _overlap))


@case("a group's mean in bfloat16 and int8", TRIO)
def group(worker: Worker) -> str:
    """All members of 'complete' become one mean, up to rounding, in every round in which no block is rejected."""
    text = []
    for compression in ("bfloat16", "int8"):
        slow = partial(torch.optim.SGD, lr=0.01)
        run: Any = library(Script(make=broad, overlap=False, optimizer=slow, options={"compression": compression}), worker)
        rejected, worst, whole = 0, 0.0, 0
        for t in range(STEPS):
            run.step(t)
            now = run.replica.stats().rejected
            found = worker.gather((now - rejected, flat(values(run.model))))
            rejected = now
            if any(count for count, _ in found):
                continue
            whole += 1
            own = found[worker.rank][1]
            spread = max(float((theirs - own).abs().max()) for _, theirs in found)
            allowed = 2 * ULP * float(own.abs().max())
            assert spread <= allowed, f"{compression}, round {t}: members differ by {spread:.2g}, more than {allowed:.2g}"
            worst = max(worst, spread)
        run.replica.close()
        assert whole >= 3, f"{compression}: blocks were rejected in {STEPS - whole} of {STEPS} rounds"
        text.append(f"{compression}: members differ by {worst:.1e} in {whole} rounds")
    return "; ".join(text)


@case("low rank: the mean stays", PAIR, THREADS)
def low_rank(worker: Worker) -> str:
    """A round moves what the projections show of the difference, and not the mean; replicas come together without steps."""
    texts = []
    for compression in ("low-rank:4", "low-rank:4,bfloat16"):
        still = partial(torch.optim.SGD, lr=0.0)
        script = Script(make=broad, overlap=False, optimizer=still, options={"compression": compression})
        run: Any = library(script, worker)
        with torch.no_grad():
            for param in run.model.parameters():
                # A difference of rank one, and some noise.
                noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(9 + worker.rank), device="cpu")
                param.add_(worker.rank * 0.1 + 1e-3 * noise.to(param.device))
        before = worker.gather(flat(list(run.model.parameters())))
        for t in range(STEPS):
            run.step(t)
        after = worker.gather(flat(list(run.model.parameters())))
        run.replica.close()
        drift = float((sum(after).double() - sum(before).double()).abs().max()) / worker.n
        assert drift <= 1e-4, f"{compression}: mixing has moved the mean by {drift:.2g}"
        far, near = (float((states[0] - states[1]).norm()) for states in (before, after))
        assert near < 0.2 * far, f"{compression}: the distance was {far:.3g}, and is {near:.3g} after {STEPS} rounds"
        texts.append(f"{compression}: {far:.2g} to {near:.2g}, the mean by {drift:.1e}")
    return "; ".join(texts)


# -- the CPU -----------------------------------------------------------------------------------------------------------

# A small eps would make a step of a tiny gradient depend on its rounding.
_GOSSIP_ADAMW = partial(GossipAdamW, lr=0.01, eps=1e-4)
_ACCUM_ADAMW = partial(AccumAdamW, lr=0.01, eps=1e-4, accum_iter=2)

TO_THE_CPU: dict[str, Script] = {
    "float32": Script(),
    "no overlap": Script(overlap=False),
    "a rule of two levels": Script(options={"rule": OuterNesterov(lr=0.7, momentum=0.5), "mix_every": 2}),
    "mix_every": Script(options={"mix_every": 3}),
    "bfloat16": Script(options={"compression": "bfloat16"}, tolerance=2e-2),
    "int8, float64": Script(make=lambda: mlp().double(), options={"compression": "int8"}, tolerance=2e-2),
    "low-rank:4": Script(make=broad, options={"compression": "low-rank:4"}, tolerance=1e-3),
    "low-rank:4,bfloat16": Script(make=broad, options={"compression": "low-rank:4,bfloat16"}, tolerance=2e-2),
    "low-rank:4,int8": Script(make=broad, options={"compression": "low-rank:4,int8"}, tolerance=2e-2),
    "GossipAdamW": Script(make=broad, optimizer=_GOSSIP_ADAMW, tolerance=1e-3),
    "GossipAdamW, int8, mix_every": Script(
        make=broad, optimizer=_GOSSIP_ADAMW, options={"compression": "int8", "mix_every": 2}, tolerance=2e-2
    ),
    "AccumAdamW": Script(optimizer=_ACCUM_ADAMW, tolerance=1e-4),
    "AccumAdamW, clipping": Script(optimizer=_ACCUM_ADAMW, clip=0.2, tolerance=1e-4),
    "MomentumTracking": Script(
        make=broad, optimizer=partial(_GOSSIP_ADAMW, tracking=True), options={"rule": MomentumTracking()}, tolerance=1e-3
    ),
    "MomentumTracking, SGD": Script(options={"rule": MomentumTracking()}, tolerance=1e-4),
    "MomentumTracking, SGD, int8": Script(
        make=broad, options={"rule": MomentumTracking(), "compression": "int8"}, tolerance=2e-2
    ),
    "GASLoC": Script(options={"rule": GASLoC(), "mix_every": 2}, tolerance=1e-4),
}


# Replicas that are threads share the generator.
_ONE_AT_A_TIME = threading.Lock()


def to_device(device: torch.device, model: nn.Module, _: torch.device) -> nn.Module:
    return model.to(device)


def check_cpu(script: Script, worker: Worker) -> str:
    """The same script on the device and on the CPU."""
    found = []
    start: dict[str, Tensor] = {}

    def make() -> nn.Module:
        with _ONE_AT_A_TIME:
            torch.manual_seed(5)
            return script.make()

    for device in (worker.device, torch.device("cpu")):
        run, start = run_library(replace(script, make=make, place=partial(to_device, device)), worker)
        assert next(iter(start.values())).device == device
        found.append([value.cpu() for value in values(run.model)])
        run.replica.close()
        if not worker.cuda:
            assert all(bool(value.isfinite().all()) for value in found[0])
            raise SkipError("it trains here, and the second run would be the same")
    return compare(found[0], found[1], script.tolerance, "the CPU's run")


for _name, _script in TO_THE_CPU.items():
    case(f"as on the CPU: {_name}", PAIR, THREADS)(partial(check_cpu, _script))
