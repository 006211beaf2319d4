"""Measures whether replicas learn as PyTorch DDP does, with DDP's settings: ``make learning`` (an hour on two cores).

    python -m benchmarks.learning --only digits --seeds 0    # a small part

Every contender makes 500 steps at the rate with which DDP has the lowest loss on held-out data; with uneven data some also at
2.5 and 5 times that rate. DDP is one model that trains on the batches of all workers. With one replica GossipAdamW is AdamW, so
DDP with the same rule is DDP. Another 500 steps at every rate show what happens at others, with even data.
With 16 and 64 workers the others are simulated; 4 and 8 are real processes. Writes learning.json, learning.md and learning.png
under docs/results/. Finished runs are kept in runs/learning.jsonl, so that an interrupted measurement goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmarks.characters import loss_fn
from benchmarks.learning_tasks import TASKS, Task, make_task
from benchmarks.report import machine
from benchmarks.workbench import markdown
from decent_dp.optim import GossipAdamW, lr_scheduler_fn_cosine_with_warmup
from decent_dp.rules import MomentumTracking
from decent_dp.tools.sim import VirtualCluster
from decent_dp.topo import make_topology

ROOT = Path(__file__).resolve().parents[1]
RESULTS, KEPT = ROOT / "docs" / "results", ROOT / "runs" / "learning.jsonl"
TOPOLOGY, STEPS, SEEDS = "base-2", 500, (0, 1, 2)
RATES, SGD_RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2), (0.02, 0.05, 0.1, 0.2, 0.5)
REAL, SIMULATED, MANY = (4, 8), 16, 64
# Of the Dirichlet distribution; 0: one class per worker, or of the text a part of its own.
ALPHAS = (0.3, 0.1, 0.0)
TIMES = (2.5, 5.0)
TRACKED = "GossipAdamW, tracking"
INT8, LOW_RANK = f"{TRACKED}, int8", f"{TRACKED}, low-rank:4,int8"
RING, HIERARCHICAL, NO_OVERLAP = f"{TRACKED}, ring", f"{TRACKED}, hierarchical", f"{TRACKED}, no overlap"
# Contenders with even data, with few or many workers, and with uneven data.
FEW = ("DDP", "AdamW", "GossipAdamW", TRACKED)
OTHERS = ("gradient tracking", "MT-DAO")
EVEN = (*FEW, INT8, NO_OVERLAP, "GossipAdamW, int8", "AdamW, √n·lr", *OTHERS)
OF_SGD = ("DDP, SGD", "SGD", "SGD, tracking", "quasi-global momentum")
OF_MUON = ("DDP, Muon", "Muon", "Muon, tracking")
UNEVEN = (*FEW, "gradient tracking", *OF_SGD)
MORE = (INT8, LOW_RANK, "SGD, tracking, int8", "MT-DAO", RING, HIERARCHICAL, NO_OVERLAP, *OF_MUON)
AT_HIGHER_RATES = ("DDP", TRACKED, INT8)
# Training loss as a share of DDP's; points of accuracy, with even data, and with uneven data at the best and at other rates.
MAX_LOSS, MAX_GAP, MAX_GAP_UNEVEN, MAX_GAP_FASTER = 1.05, 0.3, 1.0, 1.5


@dataclass(frozen=True)
class Run:
    """The settings of one training run."""

    task: str
    n: int
    contender: str
    lr: float
    seed: int = 0
    alpha: float | None = None
    real: bool = False
    steps: int = STEPS


@dataclass(frozen=True)
class Outcome:
    """Attributes:

    loss: of the mean model, on training data.
    held_out: its loss on other data.
    measure: test accuracy in per cent, or validation loss, of the mean model.
    distance: root mean square of the replicas' distances to their mean, at the end.
    last_step: the length of the mean's last step.
    bytes: sent per worker and step, as a share of the parameters.
    """

    loss: float
    held_out: float
    measure: float
    distance: float
    last_step: float
    bytes: float


# -- contenders ----------------------------------------------------------------------------------------------------------


def optim_fn(contender: str, lr: float, n: int) -> Callable[[Any], torch.optim.Optimizer]:
    if base_of(contender) == "DDP, SGD":
        return partial(torch.optim.SGD, lr=lr, momentum=0.9)
    if base_of(contender) == "DDP, Muon":
        return partial(Muon, lr=lr)
    if contender == "AdamW, √n·lr":
        return partial(torch.optim.AdamW, lr=lr * math.sqrt(n))
    kind = GossipAdamW if contender.startswith("GossipAdamW") else torch.optim.AdamW
    return partial(kind, lr=lr, weight_decay=0.01)


class Muon(torch.optim.Optimizer):
    """torch's Muon, which takes matrices only, with the sign of the momentum for the rest, as Signum."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        from torch.optim._muon import _zeropower_via_newtonschulz  # since torch 2.9; tests read this file with older ones, too

        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                momentum.lerp_(param.grad, 1 - group["momentum"])
                change = param.grad.lerp(momentum, group["momentum"])
                if param.ndim == 2:
                    change = _zeropower_via_newtonschulz(change, (3.4445, -4.775, 2.0315), 5, 1e-7).to(param.dtype)
                    change *= max(1, len(param) / param.shape[1]) ** 0.5
                else:
                    change = 0.2 * change.sign()
                param.sub_(change, alpha=group["lr"])


def network_of(contender: str) -> dict[str, Any]:
    """The arguments of the run besides model and optimizer."""
    found: dict[str, Any] = {"topology": TOPOLOGY}
    for part in contender.split(", ")[1:]:
        if part == "tracking":
            found["rule"] = MomentumTracking("momentum_buffer" if "Muon" in contender else None)
        elif part in ("int8", "low-rank:4,int8"):
            found["compression"] = part
        elif part == "no overlap":
            found["overlap"] = False
        elif part == "ring":
            found["topology"] = "ring"
        elif part == "hierarchical":
            found.update(topology="hierarchical", local_world_size=4)
    return found


def schedule(task: Task, run: Run) -> Callable[..., Any]:
    warm_up = min(task.warm_up, run.steps // 2)
    return partial(lr_scheduler_fn_cosine_with_warmup, t_warmup=warm_up, t_max=run.steps - warm_up)


def train(run: Run) -> Outcome:
    """Trains once, in this process; 4 and 8 real workers in processes of their own."""
    if run.real and not run.contender.startswith("DDP"):
        return _train_in_processes(run)
    torch.set_num_threads(1)
    task = make_task(run.task, run.n, run.alpha, run.seed)
    torch.manual_seed(run.seed)
    model = task.model()
    if run.contender.startswith("DDP"):
        return _train_pooled(run, task, model)
    if run.contender in STACKED:
        return _train_stacked(run, task, model)
    cluster = VirtualCluster(
        model,
        optim_fn(run.contender, run.lr, run.n),
        n=run.n,
        loss_fn=loss_fn,
        lr_scheduler_fn=schedule(task, run),
        **network_of(run.contender),
    )
    for t in range(run.steps):
        before = _mean(cluster.parameters) if t == run.steps - 1 else {}
        cluster.step(*task.batch(t))
    own = sum(param[0].numel() * param.itemsize for param in cluster.parameters.values())
    step = _distance(before, _mean(cluster.parameters))
    sent = cluster.bytes_sent / (run.n * run.steps * own)
    return Outcome(*task.evaluate(cluster.mean_model()), cluster.consensus_distance(), step, sent)


def _train_pooled(run: Run, task: Task, model: nn.Module) -> Outcome:
    """One model, on the batches of all workers: DDP's replicas are equal to it."""
    optimizer = optim_fn(run.contender, run.lr, run.n)(model.parameters())
    scheduler = schedule(task, run)(optimizer)
    for t in range(run.steps):
        x, y = (tensor.flatten(0, 1) for tensor in task.batch(t))
        before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    step = _distance(dict(enumerate(before)), dict(enumerate(model.parameters())))
    # The bytes of a ring all-reduce.
    return Outcome(*task.evaluate(model), 0.0, step, 2 * (run.n - 1) / run.n)


def _train_stacked(run: Run, task: Task, model: nn.Module) -> Outcome:
    """Methods that the library does not have, on stacked replicas, with exchanges that are not overlapped."""
    start = {name: param.detach() for name, param in model.named_parameters()}
    params = {name: nn.Parameter(value.expand(run.n, *value.shape).clone()) for name, value in start.items()}

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss_fn(lambda inputs: functional_call(model, values, (inputs,)), x, y)  # type: ignore[arg-type]

    gradients = vmap(grad(loss))
    method = STACKED[run.contender](params, run)
    scheduler = schedule(task, run)(method.optimizer)
    topology = make_topology(TOPOLOGY, local_world_size=1, world_size=run.n, rank=0)
    for t in range(run.steps):
        before = _mean(params)
        with torch.no_grad():
            found = gradients({name: param.detach() for name, param in params.items()}, *task.batch(t))
            w = torch.from_numpy(topology.mixing_matrix(t)).float()
            method.step(found, lambda value, w=w: torch.tensordot(w, value, 1))
        scheduler.step()
    mean = _mean(params)
    for name, param in model.named_parameters():
        param.data.copy_(mean[name])
    squares = sum(float((param.detach() - mean[name]).square().sum()) for name, param in params.items())
    return Outcome(*task.evaluate(model), math.sqrt(squares / run.n), _distance(before, mean), method.copies)


class GradientTracking:
    """AdamW on tracked gradients: y <- W·y + g - g of the step before (Di Lorenzo and Scutari 2016; Pu and Nedić 2021).

    y is sent beside the parameters.
    """

    copies = 2.0

    def __init__(self, params: dict[str, nn.Parameter], run: Run) -> None:
        self._params, self._last = params, {name: torch.zeros_like(param) for name, param in params.items()}
        self._tracked = {name: torch.zeros_like(param) for name, param in params.items()}
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(params.values(), lr=run.lr, weight_decay=0.01)

    def step(self, gradients: Mapping[str, Tensor], mix: Callable[[Tensor], Tensor]) -> None:
        for name, param in self._params.items():
            self._tracked[name] = mix(self._tracked[name]) + gradients[name] - self._last[name]
            self._last[name] = gradients[name]
            param.grad = self._tracked[name].clone()
        self.optimizer.step()
        for param in self._params.values():
            param.copy_(mix(param))


class QuasiGlobalMomentum:
    """QG-DSGDm (arXiv 2102.04761): the momentum is an average of the replica's movement, which includes the mix.

    u = β·m + g;  x <- W·(x - lr·u);  m <- β·m + (1-β)·(movement of x against its direction)/lr.
    """

    copies = 1.0

    def __init__(self, params: dict[str, nn.Parameter], run: Run) -> None:
        self._params, self._momentum = params, {name: torch.zeros_like(param) for name, param in params.items()}
        # It holds the rate for the scheduler.
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(params.values(), lr=run.lr)

    def step(self, gradients: Mapping[str, Tensor], mix: Callable[[Tensor], Tensor]) -> None:
        lr, beta = self.optimizer.param_groups[0]["lr"], 0.9
        for name, param in self._params.items():
            momentum, before = self._momentum[name], param.clone()
            param.copy_(mix(param - lr * (beta * momentum + gradients[name])))
            momentum.mul_(beta).add_((before - param) / lr, alpha=1 - beta)
        # torch's schedulers warn of an optimizer that has made no step; without gradients it moves nothing.
        self.optimizer.step()


class MTDAO:
    """MT-DAO (arXiv 2510.05361), its form with one slow momentum: AdamW that steps along (1-ω)·g + ω·u.

    u is an average of the gradients of a thousand steps; it and the second moment are sent in every tenth.
    """

    copies, omega, beta, every = 1.2, 0.95, 0.999, 10

    def __init__(self, params: dict[str, nn.Parameter], run: Run) -> None:
        self._params, self._slow = params, {name: torch.zeros_like(param) for name, param in params.items()}
        self._t = 0
        # Its own momentum is none: what it is given is the direction. The second moment is that of the gradients.
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(params.values(), lr=run.lr)
        self._second = {name: torch.zeros_like(param) for name, param in params.items()}

    def step(self, gradients: Mapping[str, Tensor], mix: Callable[[Tensor], Tensor]) -> None:
        self._t += 1
        lr = self.optimizer.param_groups[0]["lr"]
        for name, param in self._params.items():
            g, slow, second = gradients[name], self._slow[name], self._second[name]
            slow.lerp_(g, 1 - self.beta)
            second.lerp_(g * g, 1 - 0.999)
            direction = (1 - self.omega) * g + self.omega * slow / (1 - self.beta**self._t)
            root = (second / (1 - 0.999**self._t)).sqrt() + 1e-8
            param.copy_(mix(param * (1 - lr * 0.01) - lr * direction / root))
            if self._t % self.every == 0:
                slow.copy_(mix(slow))
                second.copy_(mix(second))
        # torch's schedulers warn of an optimizer that has made no step; without gradients it moves nothing.
        self.optimizer.step()


STACKED: dict[str, Any] = {
    "gradient tracking": GradientTracking,
    "quasi-global momentum": QuasiGlobalMomentum,
    "MT-DAO": MTDAO,
}


def _mean(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: param.detach().mean(0) for name, param in params.items()}


def _distance(a: Mapping[Any, Tensor], b: Mapping[Any, Tensor]) -> float:
    return math.sqrt(sum(float((a[key] - b[key]).detach().square().sum()) for key in a))


# -- real workers --------------------------------------------------------------------------------------------------------


def _train_in_processes(run: Run) -> Outcome:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.n)]
    command += ["-m", "benchmarks.learning", "--worker", json.dumps(asdict(run))]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise SystemExit(f"{run} failed with exit code {done.returncode}:\n{done.stderr}")
    return Outcome(**json.loads(found[-1]))


def work(run: Run) -> None:
    """One of the real workers; rank 0 prints the outcome."""
    import decent_dp

    torch.set_num_threads(1)
    rank, n = decent_dp.initialize_dist()
    task = make_task(run.task, n, run.alpha, run.seed)
    torch.manual_seed(run.seed)
    model = task.model()
    optimizer = optim_fn(run.contender, run.lr, n)(model.parameters())
    replica = decent_dp.gossip(model, optimizer, **network_of(run.contender))
    scheduler = schedule(task, run)(optimizer)
    for t in range(run.steps):
        x, y = (tensor[rank] for tensor in task.batch(t))
        if t == run.steps - 1:
            with replica.averaged():
                before = [param.detach().clone() for param in model.parameters()]
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()
    distance = replica.consensus_distance()
    own = sum(param.numel() * param.element_size() for param in model.parameters())
    sent = replica.stats().bytes_sent / (run.steps * own)
    with replica.averaged():
        step = _distance(dict(enumerate(before)), dict(enumerate(model.parameters())))
        outcome = Outcome(*task.evaluate(model), distance, step, sent)
    if rank == 0:
        print(json.dumps(asdict(outcome)), flush=True)
    replica.close()


# -- the whole measurement -------------------------------------------------------------------------------------------------


class Kept:
    """Finished runs, one JSON object per line of a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {json.dumps(line["run"]): Outcome(**line["outcome"]) for line in map(json.loads, lines)}

    def __getitem__(self, run: Run) -> Outcome:
        return self._found[json.dumps(asdict(run))]

    def make(self, runs: Iterable[Run], jobs: int) -> None:
        """Makes those of ``runs`` that are missing, in so many processes."""
        missing = list({json.dumps(asdict(run)): run for run in runs if json.dumps(asdict(run)) not in self._found}.values())
        if not missing:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with get_context("spawn").Pool(jobs) as pool, self._path.open("a") as file:
            for run, outcome in pool.imap_unordered(_made, missing):
                self._found[json.dumps(asdict(run))] = outcome
                file.write(json.dumps({"run": asdict(run), "outcome": asdict(outcome)}) + "\n")
                file.flush()
                print(f"{run}: {outcome}", flush=True)


def _made(run: Run) -> tuple[Run, Outcome]:
    return run, train(run)


def settings(tasks: Sequence[str]) -> list[tuple[Run, tuple[str, ...]]]:
    """All settings with their contenders; rates and contenders of the runs are filled in later."""
    found: list[tuple[Run, tuple[str, ...]]] = []
    for task in tasks:
        for n in REAL:
            found.append((Run(task, n, "", 0.0, real=True), FEW))
        found.append((Run(task, SIMULATED, "", 0.0), EVEN))
        found.append((Run(task, MANY, "", 0.0), FEW))
        if task == "characters":
            found.append((Run(task, 8, "", 0.0, alpha=0.0, real=True), FEW))
            found.append((Run(task, SIMULATED, "", 0.0, alpha=0.0), (*FEW, INT8, NO_OVERLAP, "gradient tracking")))
            continue
        found.append((Run(task, 8, "", 0.0, alpha=0.1, real=True), FEW))
        for alpha in ALPHAS:
            found.append((Run(task, SIMULATED, "", 0.0, alpha=alpha), (*UNEVEN, *MORE) if alpha == 0.1 else UNEVEN))
    return found


def seeds_of(run: Run, seeds: Sequence[int]) -> Sequence[int]:
    """Characters take long, and differ little between seeds."""
    return seeds[:1] if run.task == "characters" else seeds


def base_of(contender: str) -> str:
    """DDP with the contender's optimizer, whose rate it takes and which it is compared with."""
    if "SGD" in contender or contender.endswith("momentum"):
        return "DDP, SGD"
    return "DDP, Muon" if "Muon" in contender else "DDP"


def measure(tasks: Sequence[str], seeds: Sequence[int], jobs: int, path: Path) -> list[dict[str, Any]]:
    """The rows of the table: means over seeds."""
    kept, planned = Kept(path), settings(tasks)
    sweeps = {
        (at, base): [
            [replace(at, contender=base, lr=lr, seed=seed, real=False) for seed in seeds_of(at, seeds)]
            for lr in (SGD_RATES if base == "DDP, SGD" else RATES)
        ]
        for at, contenders in planned
        for base in map(str, ("DDP", "DDP, SGD", "DDP, Muon"))
        if base in contenders
    }
    kept.make((run for rates in sweeps.values() for runs in rates for run in runs), jobs)
    best = {key: min(rates, key=lambda runs: fmean(kept[run].held_out for run in runs))[0].lr for key, rates in sweeps.items()}
    rows: list[tuple[Run, list[Run]]] = []
    for at, contenders in planned:
        for times in (1.0, *TIMES) if at.alpha in (0.0, 0.1) and not at.real else (1.0,):
            for contender in contenders if times == 1.0 else AT_HIGHER_RATES:
                lr = float(f"{times * best[at, base_of(contender)]:g}")
                real = at.real and not contender.startswith("DDP")
                runs = [replace(at, contender=contender, lr=lr, seed=seed, real=real) for seed in seeds_of(at, seeds)]
                rows.append((replace(runs[0], real=at.real), runs))
    # Real workers take all cores.
    kept.make((run for _, runs in rows for run in runs if not run.real), jobs)
    kept.make((run for _, runs in rows for run in runs if run.real), 1)
    lines = []
    for run, runs in rows:
        outcomes = [asdict(kept[one]) for one in runs]
        means = {key: fmean(outcome[key] for outcome in outcomes) for key in outcomes[0]}
        where = {key: value for key, value in asdict(run).items() if key not in ("seed", "steps")}
        lines.append({**where, **means, "losses": [outcome["loss"] for outcome in outcomes]})
    return compared(lines)


def compared(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds the ratio of the loss to DDP's, and the gap to its measure (positive: worse)."""
    for line in lines:
        ddp = next(
            other
            for other in lines
            if other["contender"] == base_of(line["contender"])
            and all(other[key] == line[key] for key in ("task", "n", "alpha", "real", "lr"))
        )
        line["loss_ratio"] = line["loss"] / max(ddp["loss"], 1e-6)
        line["gap"] = (line["measure"] - ddp["measure"]) * (1 if line["task"] == "characters" else -1)
    return lines


HEADINGS = ["task", "data", "workers", "rate", "contender", "bytes", "training loss", "DDP = 1", "accuracy, %", "below DDP"]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The rows as Markdown; the accuracy of characters is the validation loss."""
    rows = []
    for line in lines:
        data = data_of(line)
        workers = f"{line['n']}{', real' if line['real'] else ''}"
        loss = f"{line['loss']:.4f}" if line["loss"] < 1 else f"{line['loss']:.3f}"
        digits = 3 if line["task"] == "characters" else 1
        measured = [f"{round(line[key], digits) + 0.0:.{digits}f}" for key in ("measure", "gap")]  # no -0.0
        cells = [line["task"], data, workers, f"{line['lr']:g}", line["contender"], f"{line['bytes']:.2f}"]
        rows.append([*cells, loss, f"{line['loss_ratio']:.2f}", *measured])
    return markdown(HEADINGS, rows, words=5)


def data_of(line: Mapping[str, Any]) -> str:
    if line["alpha"] == 0.0:
        return "own part" if line["task"] == "characters" else "one class"
    return "even" if line["alpha"] is None else f"α = {line['alpha']:g}"


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """16 workers at DDP's best rates: points of accuracy below DDP, and for characters the training loss (DDP = 1)."""
    shown = [line for line in lines if line["n"] == SIMULATED]
    # The first line of a setting is that of the best rate.
    columns = list(dict.fromkeys((line["task"], data_of(line)) for line in shown))
    kinds = list(dict.fromkeys(line["contender"] for line in shown if not line["contender"].startswith("DDP")))
    rows = []
    for kind in kinds:
        cells = []
        for column in columns:
            line = next((one for one in shown if one["contender"] == kind and (one["task"], data_of(one)) == column), None)
            text = (
                "" if line is None else f"{line['loss_ratio']:.2f}" if column[0] == "characters" else f"{line['gap'] + 0.0:.1f}"
            )
            cells.append("0.0" if text == "-0.0" else text)
        sent = next(line["bytes"] for line in shown if line["contender"] == kind)
        rows.append([kind, f"{sent:.2f}", *cells])
    return markdown(["contender", "bytes", *(f"{TITLES[task]}, {data}" for task, data in columns)], rows, words=1)


def verdict(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """What of the goals the recommended contenders have met: GossipAdamW with even data, with tracking with all."""
    said = []
    best: dict[tuple[Any, ...], float] = {}
    for line in lines:
        # The first line of a setting is that of the best rate.
        is_best = line["lr"] == best.setdefault((line["task"], line["n"], line["alpha"], line["real"]), line["lr"])
        if line["contender"] not in (("GossipAdamW", TRACKED) if line["alpha"] is None else (TRACKED, INT8)):
            continue
        if line["alpha"] is None or line["task"] == "characters":
            met = line["loss_ratio"] <= MAX_LOSS and (line["task"] == "characters" or line["gap"] <= MAX_GAP)
        else:
            met = line["gap"] <= (MAX_GAP_UNEVEN if is_best else MAX_GAP_FASTER)
        apart = line["distance"] / line["last_step"]
        said.append(
            f"{'met' if met else 'missed'}: {line['contender']}, {line['task']}, {line['n']} workers, {data_of(line)}, rate "
            f"{line['lr']:g}: loss {line['loss_ratio']:.3f} of DDP's, {line['gap']:.2f} below; replicas {apart:.1f} of the "
            "mean's last step apart"
        )
    return said


def other_rates(tasks: Sequence[str], jobs: int, path: Path) -> list[dict[str, Any]]:
    """The contenders of ``FEW`` at every rate, with 16 workers, even data and one seed."""
    kept = Kept(path)
    runs = [Run(task, SIMULATED, contender, lr) for task in tasks for contender in FEW for lr in RATES]
    kept.make(runs, jobs)
    return [{"task": run.task, "contender": run.contender, "lr": run.lr, "loss": kept[run].loss} for run in runs]


# Okabe and Ito's colours, and markers.
STYLES = {
    "DDP": ("#000000", "o"),
    "AdamW": ("#56B4E9", "s"),
    "GossipAdamW": ("#E69F00", "^"),
    TRACKED: ("#D55E00", "D"),
}
TITLES = {"digits": "digits", "mnist1d": "MNIST-1D", "characters": "characters"}


def plot(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Training losses by rate, a panel for each task."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(line["task"] for line in lines))
    figure = Figure(figsize=(3.6 * len(tasks), 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for contender, (colour, marker) in STYLES.items():
            points = [(line["lr"], line["loss"]) for line in lines if (line["task"], line["contender"]) == (task, contender)]
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.6, label=contender)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(RATES, [f"{lr:g}" for lr in RATES])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
        if task == "characters":
            axes.set_yticks([1.5, 2, 2.5])
        axes.set_title(TITLES[task], fontsize=11)
        axes.set_xlabel("learning rate")
        axes.grid(True, color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("training loss of the mean model")
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description="Learning, compared with DDP.")
    parser.add_argument("--only", choices=TASKS, nargs="+", default=list(TASKS), help="tasks")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--kept", type=Path, default=KEPT, help="a file of finished runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(Run(**json.loads(options.worker)))
        return
    lines = measure(options.only, options.seeds, options.jobs, options.kept)
    rates = other_rates(options.only, options.jobs, options.kept)
    options.out.mkdir(parents=True, exist_ok=True)
    document = {"topology": TOPOLOGY, "steps": STEPS, "seeds": options.seeds, "machine": machine()}
    (options.out / "learning.json").write_text(json.dumps({**document, "lines": lines, "rates": rates}, indent=1) + "\n")
    (options.out / "learning.md").write_text(table(lines))
    (options.out / "learning-summary.md").write_text(summary(lines))
    plot(rates, options.out / "learning.png")
    print(table(lines), *verdict(lines), sep="\n")


if __name__ == "__main__":
    main()
